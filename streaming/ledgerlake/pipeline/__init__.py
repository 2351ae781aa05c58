"""The running pipeline: its plan, start and stop, ownership, commit, cursors, progress and metrics."""
