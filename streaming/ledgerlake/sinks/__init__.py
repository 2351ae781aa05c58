"""Sinks: the tasks write Parquet files, the driver commits them to Delta tables exactly once."""
