"""A query of its own process, to be killed: files of rows into a topic until all are sent.

python -m tests.live.sink_run SERVICE_URL TOPIC FOLDER CHECKPOINT
"""

from __future__ import annotations

import sys

from ledgerlake.runtime.session import start_session

SCHEMA = "value binary, key string, properties map<string,string>, event_time timestamp"


def main(service_url: str, topic: str, folder: str, checkpoint: str) -> None:
    spark = start_session("sink", "local[2]")
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 2).parquet(folder)
    writer = (
        rows.writeStream.format("ledgerlake")
        .option("service.url", service_url)
        .option("topic", topic)
    )
    writer = writer.option("pulsar.producer.compressionType", "lz4").option(
        "checkpointLocation", checkpoint
    )
    query = writer.trigger(availableNow=True).start()
    print("started", flush=True)
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
