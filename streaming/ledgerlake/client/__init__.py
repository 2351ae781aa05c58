"""The only room with sockets: blocking, with a deadline on every wait, since Spark's Python workers
are synchronous.
"""
