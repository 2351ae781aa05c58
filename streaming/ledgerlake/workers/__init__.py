"""The Python processes of Spark's tasks on a local master: the server that forks them, and the
daemon.
"""
