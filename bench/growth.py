"""What a message costs the pipeline as partitions, messages and their sizes grow: ``make bench``.

    partitions   the same messages on 1 to 64 partitions
    messages     10 thousand to 50 million on four partitions
    sizes        the same bytes as messages of 100 B to 1 MiB, in batches of about 100 KB

Each topic is read whole into a table of its own, in one micro-batch, on local[2]; medians after one
pass that is not counted. Time and CPU are measured as in ``bench.throughput``. A micro-batch and
the start of its query cost something whatever is in them: few messages share that among few. What a
run in a session that is up takes beside its micro-batches, from its start to its end, is printed
too.

Results are printed and written to ``bench/latest-growth.json``.
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
    pipeline_to_delta,
    publish,
    spark_pass,
)
from ledgerlake.devbroker import Broker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from ledgerlake.devbroker.standalone import BrokerAddress

LATEST = Path(__file__).parent / "latest-growth.json"
_PARTITIONS = (1, 4, 16, 64)
_MESSAGES = (10_000, 100_000, 1_000_000, 10_000_000, 50_000_000)
_SIZES_BYTES = (100, 1024, 10_240, 102_400, 1_048_576)
_SIZES_TOTAL_BYTES = 400_000_000
_BATCH_BYTES = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--messages", type=int, default=4_000_000, help="over the partitions (default: 4000000)"
    )
    parser.add_argument(
        "--most", type=int, default=max(_MESSAGES), help="of messages (default: 50000000)"
    )
    parser.add_argument(
        "--passes", type=int, default=5, help="passes that are counted (default: 5)"
    )
    options = parser.parse_args()
    from ledgerlake.runtime.session import start_session

    results: list[dict[str, Any]] = []
    with Broker(settings=SETTINGS) as address:
        spark = start_session("bench", "local[2]")
        try:
            for block, workload, partitions in _runs(options.messages, options.most):
                if not results or results[-1]["block"] != block:
                    print(
                        f"\n{block}\n{'':<24}{'messages/s':>14}{'MB/s':>10}{'CPU s/M':>10}{'CPU s/GB':>10}{'peak MB':>10}{'beyond s':>10}"
                    )
                counted_passes, peak_mb = passes_of(
                    spark, address, workload, partitions, options.passes
                )
                results.append(
                    {
                        "block": block,
                        "label": workload.name,
                        **_row(workload, counted_passes, peak_mb),
                    }
                )
        finally:
            spark.stop()
    LATEST.write_text(json.dumps(results, indent=2) + "\n")


def _runs(messages: int, most: int) -> Iterator[tuple[str, Workload, int]]:
    """Block, what a topic holds, and its partitions."""
    for partitions in _PARTITIONS:
        yield "partitions", Workload(f"{partitions}", messages, 100, 1000), partitions
    for count in _MESSAGES:
        if count <= most:
            yield "messages", Workload(f"{count:,}", count, 100, 1000), PARTITIONS
    for size_bytes in _SIZES_BYTES:
        batch = max(1, _BATCH_BYTES // size_bytes)
        count = _SIZES_TOTAL_BYTES // size_bytes // batch * batch
        yield "value bytes", Workload(f"{size_bytes:,}", count, size_bytes, batch), PARTITIONS


def passes_of(
    spark: SparkSession, address: BrokerAddress, workload: Workload, partitions: int, passes: int
) -> tuple[list[Pass], float]:
    topic = publish(address, workload, partitions)
    with tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder:
        path = partial(
            pipeline_to_delta, spark, address.service_url, topic, workload.messages, Path(folder)
        )
        passes_and_peaks = [spark_pass(path) for _ in range(passes + 1)]
    return [measured_pass for measured_pass, _ in passes_and_peaks[1:]], max(
        peak_mb for _, peak_mb in passes_and_peaks[1:]
    )


def _row(workload: Workload, counted_passes: list[Pass], peak_mb: float) -> dict[str, float]:
    seconds = statistics.median(counted_pass.seconds for counted_pass in counted_passes)
    cpu_s = statistics.median(counted_pass.cpu_s for counted_pass in counted_passes)
    row = {
        "messages_per_s": round(workload.messages / seconds),
        "mb_per_s": round(workload.plain_mb / seconds, 1),
        "cpu_s_per_million": round(cpu_s * 1e6 / workload.messages, 2),
        "cpu_s_per_gb": round(cpu_s * 1e3 / workload.plain_mb, 2),
        "peak_rss_mb": round(peak_mb),
        "beyond_s": round(
            statistics.median(counted_pass.beyond_s for counted_pass in counted_passes), 2
        ),
    }
    print(
        f"{workload.name:<24}{row['messages_per_s']:>14,.0f}{row['mb_per_s']:>10,.1f}{row['cpu_s_per_million']:>10.2f}"
        f"{row['cpu_s_per_gb']:>10.2f}{row['peak_rss_mb']:>10,.0f}{row['beyond_s']:>10.2f}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
