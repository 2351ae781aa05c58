"""Rules of what outlives a micro-batch. Pure: no Spark, no clock, no socket."""
