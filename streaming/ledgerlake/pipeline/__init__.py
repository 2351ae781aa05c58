"""The running pipeline: its start and stop, ownership, tables, commit, cursors and upkeep."""
