"""``spark.readStream.format("ledgerlake")`` and ``spark.read.format("ledgerlake")``: Pulsar entries
for Spark.
"""

from ledgerlake.runtime.workers import quieten_this_process

# Whatever of the source a worker of Spark's loads first.
quieten_this_process()
