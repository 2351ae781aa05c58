"""The former place of ``ledgerlake.publish``; what was imported from here still is."""
