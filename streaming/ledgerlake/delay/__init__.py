"""The delayed index (PIP-195): which messages wait until when, without bytes of theirs, storage or
a clock.
"""
