"""A backlog of one topic partition, read by one task and by a task for each core, in turns.

``python -m bench.one_partition [--messages 10000000]``

So many messages of 100 bytes, in batches of 1,000 with LZ4, are on one topic partition. A pipeline
on ``local[2]`` brings them into a table of its own in one micro-batch. Rates and CPU are measured
as in ``bench.throughput``: medians after one pass of each that is not counted.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from pyspark import SparkContext

from bench.throughput import (
    SETTINGS,
    PassAndPeak,
    Workload,
    in_turns,
    pipeline_to_delta,
    print_compared,
    publish,
    spark_pass,
)
from ledgerlake.devbroker import Broker

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.throughput import Pass

_TASKS = (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--messages", type=int, default=10_000_000, help="default: 10000000")
    parser.add_argument(
        "--passes", type=int, default=5, help="passes that are counted (default: 5)"
    )
    options = parser.parse_args()
    from ledgerlake.runtime.session import start_session

    workload = Workload("", options.messages, 100, 1000)
    with (
        Broker(settings=SETTINGS) as address,
        tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder,
    ):
        topic = publish(address, workload, 1)
        spark = start_session("bench", "local[2]")
        try:
            path = partial(
                pipeline_to_delta,
                spark,
                address.service_url,
                topic,
                workload.messages,
                Path(folder),
            )
            passes = in_turns(
                {str(tasks): partial(_by_tasks, tasks, path) for tasks in _TASKS}, options.passes
            )
        finally:
            spark.stop()
    print_compared(workload.messages, "tasks", passes)


def _by_tasks(tasks: int, path: Callable[[], Pass]) -> PassAndPeak:
    with mock.patch.object(SparkContext, "defaultParallelism", tasks):
        return spark_pass(path)


if __name__ == "__main__":
    main()
