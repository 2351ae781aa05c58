"""Entries in, Arrow messages out: verify, decompress, unbatch. Opens nothing and logs nothing."""
