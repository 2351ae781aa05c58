"""A million messages of 100 bytes without batches, by pulsar-client's reader loop and by the pipeline, in
turns.

``python -m bench.unbatched [--messages 1000000]``

The loop reads a topic of one partition, the pipeline one of four, on ``local[2]`` into a table of its own.
Rates and CPU are those of ``bench.throughput``: medians after one pass of each that is not counted.
With so many messages, the start of a query is a small part of the CPU.

Results are printed and written to ``bench/latest-unbatched.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.throughput import (
    PARTITIONS,
    SETTINGS,
    Pass,
    Workload,
    in_process,
    pipeline_to_delta,
    publish,
    pulsar_reader,
    spark_pass,
)
from ledgerlake.devbroker import Broker

if TYPE_CHECKING:
    from collections.abc import Callable

LATEST = Path(__file__).parent / "latest-unbatched.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000, help="default: 1000000")
    parser.add_argument("--passes", type=int, default=5, help="passes that are counted (default: 5)")
    options = parser.parse_args()
    from ledgerlake.runtime.session import start_session

    workload = Workload("100 B, unbatched", options.messages, 100, 1)
    with Broker(settings=SETTINGS) as address, tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder:
        one_partition, four_partitions = (publish(address, workload, partitions) for partitions in (1, PARTITIONS))
        spark = start_session("bench", "local[2]")
        try:
            url, count = address.service_url, workload.messages
            paths: dict[str, Callable[[], Pass]] = {
                "pulsar-client reader loop": lambda: in_process(pulsar_reader, url, one_partition, count, 1)[0][0],
                "pipeline to Delta, Spark": partial(
                    pipeline_to_delta, spark, url, four_partitions, count, Path(folder)
                ),
            }
            passes: dict[str, list[Pass]] = {name: [] for name in paths}
            for _ in range(1 + options.passes):
                for name, path in paths.items():
                    passes[name].append(spark_pass(path)[0])
        finally:
            spark.stop()
    rows = _rows(count, {name: of_path[1:] for name, of_path in passes.items()})
    LATEST.write_text(json.dumps(rows, indent=2) + "\n")


def _rows(count: int, passes: dict[str, list[Pass]]) -> list[dict[str, Any]]:
    print(f"{count:,} messages\n{'path':<32}{'messages/s':>14}{'ratio':>8}{'CPU s/M':>10}")
    rows: list[dict[str, Any]] = []
    for name, of_path in passes.items():
        rate = count / statistics.median(one_pass.seconds for one_pass in of_path)
        cpu_s = statistics.median(one_pass.cpu_s for one_pass in of_path) * 1e6 / count
        rows.append({"name": name, "messages_per_s": round(rate), "cpu_s_per_million": round(cpu_s, 2)})
        ratio = rate / rows[0]["messages_per_s"]
        print(f"{name:<32}{rate:>14,.0f}{ratio:>8.2f}{cpu_s:>10.2f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
