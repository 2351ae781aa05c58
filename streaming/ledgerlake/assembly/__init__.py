"""Chunks become large messages (PIP-37). Pure: no Spark, no clock, no socket."""
