"""Bytes and texts that earlier releases wrote, and what writes them anew."""
