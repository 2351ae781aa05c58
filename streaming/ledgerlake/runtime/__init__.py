"""The processes that a pipeline runs in: Java, the Spark session, Python workers, memory, and
functions of the user's.
"""
