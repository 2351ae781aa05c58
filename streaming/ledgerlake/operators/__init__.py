"""What Spark runs in a micro-batch: ingest, the stateful stage, which writes what comes out of it,
and the rows between them. ``pipeline.plan`` connects the two.
"""
