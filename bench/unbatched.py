"""A million messages of 100 bytes without batches, by pulsar-client's reader loop and by the
pipeline, in turns.

``python -m bench.unbatched [--messages 1000000]``

The loop reads a topic of one partition, the pipeline one of four, on ``local[2]`` into a table of
its own. Rates and CPU are measured as in ``bench.throughput``: medians after one pass of each that
is not counted. With so many messages, the start of a query is a small part of the CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

from bench.throughput import (
    PARTITIONS,
    SETTINGS,
    PassAndPeak,
    Paths,
    Workload,
    in_process,
    in_turns,
    pipeline_to_delta,
    print_compared,
    publish,
    pulsar_reader,
    spark_pass,
)
from ledgerlake.devbroker import Broker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000, help="default: 1000000")
    parser.add_argument(
        "--passes", type=int, default=5, help="passes that are counted (default: 5)"
    )
    options = parser.parse_args()
    from ledgerlake.runtime.session import start_session

    workload = Workload("100 B, unbatched", options.messages, 100, 1)
    with (
        Broker(settings=SETTINGS) as address,
        tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder,
    ):
        url, count = address.service_url, workload.messages
        one_partition, four_partitions = (
            publish(address, workload, partitions) for partitions in (1, PARTITIONS)
        )
        spark = start_session("bench", "local[2]")
        try:
            pipeline = partial(pipeline_to_delta, spark, url, four_partitions, count, Path(folder))
            paths: Paths = {
                "pulsar-client reader loop": partial(_loop, url, one_partition, count),
                "pipeline to Delta, Spark": partial(spark_pass, pipeline),
            }
            passes = in_turns(paths, options.passes)
        finally:
            spark.stop()
    print_compared(count, "path", passes)


def _loop(service_url: str, topic: str, count: int) -> PassAndPeak:
    (one_pass,), peak_mb = in_process(pulsar_reader, service_url, topic, count, 1)
    return one_pass, peak_mb


if __name__ == "__main__":
    main()
