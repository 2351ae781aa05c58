"""What Spark runs in a micro-batch: ingest, the stateful stage, finalize, and the rows between
them. ``pipeline.plan`` connects the three.
"""
