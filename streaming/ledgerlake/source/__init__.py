"""``spark.readStream.format("ledgerlake")`` and ``spark.read.format("ledgerlake")``: Pulsar entries for Spark."""
