"""Bytes and texts of each stored format, and what writes them anew."""
