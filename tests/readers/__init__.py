"""All readers of a table see the same rows."""
