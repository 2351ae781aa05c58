"""The delayed index (PIP-195): which messages are delayed until when. Storage and the clock are the
caller's.
"""
