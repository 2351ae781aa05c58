"""The code that Spark runs in a micro-batch: the ingest, the stateful stage, which writes its
outcomes, and the rows between the two. ``pipeline.plan`` connects them.
"""
