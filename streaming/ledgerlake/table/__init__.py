"""The Delta tables: ordered Parquet files, commits, and the removal of files that no table
knows.
"""
