"""A backlog of one topic partition, read by one task and by a task for each core, in turns.

``python -m bench.one_partition [--messages 10000000]``

So many messages of 100 bytes, in batches of 1,000 with LZ4, are on one topic partition. A pipeline on
``local[2]`` brings them into a table of its own in one micro-batch. Rates and CPU are those of
``bench.throughput``: medians after one pass of each that is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

from pyspark import SparkContext

from bench.throughput import SETTINGS, Pass, Workload, pipeline_to_delta, publish, spark_pass
from ledgerlake.devbroker import Broker

_TASKS = (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--messages", type=int, default=10_000_000, help="default: 10000000")
    parser.add_argument("--passes", type=int, default=5, help="passes that are counted (default: 5)")
    options = parser.parse_args()
    from ledgerlake.runtime.session import start_session

    workload = Workload("", options.messages, 100, 1000)
    passes: dict[int, list[Pass]] = {tasks: [] for tasks in _TASKS}
    peaks_mb = dict.fromkeys(_TASKS, 0.0)
    with Broker(settings=SETTINGS) as address, tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder:
        topic = publish(address, workload, 1)
        spark = start_session("bench", "local[2]")
        try:
            path = partial(pipeline_to_delta, spark, address.service_url, topic, workload.messages, Path(folder))
            for _ in range(1 + options.passes):
                for tasks in _TASKS:
                    with mock.patch.object(SparkContext, "defaultParallelism", tasks):
                        measured_pass, peak_mb = spark_pass(path)
                    passes[tasks].append(measured_pass)
                    peaks_mb[tasks] = max(peaks_mb[tasks], peak_mb)
        finally:
            spark.stop()
    _print(workload.messages, {tasks: of_tasks[1:] for tasks, of_tasks in passes.items()}, peaks_mb)


def _print(messages: int, passes: dict[int, list[Pass]], peaks_mb: dict[int, float]) -> None:
    print(f"{messages:,} messages\n{'tasks':<8}{'messages/s':>14}{'ratio':>8}{'CPU s/M':>10}{'peak MB':>10}")
    rates = {
        tasks: messages / statistics.median(one_pass.seconds for one_pass in of_tasks)
        for tasks, of_tasks in passes.items()
    }
    for tasks, rate in rates.items():
        cpu_s = statistics.median(one_pass.cpu_s for one_pass in passes[tasks])
        ratio = rate / rates[_TASKS[0]]
        print(f"{tasks:<8}{rate:>14,.0f}{ratio:>8.2f}{cpu_s * 1e6 / messages:>10.2f}{peaks_mb[tasks]:>10,.0f}")


if __name__ == "__main__":
    main()
