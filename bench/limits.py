"""What the machine takes for the bytes of ``bench.throughput`` and ``bench.large`` by themselves:
the limits that no pipeline gets below.

Each step is the work of a library in C or Rust, in one thread, over the same entries again and
again:

    copy             each frame is copied once
    CRC-32C          the checksum that each entry carries
    LZ4              each batch is decompressed
    zstd, level 1    the values are compressed, as for Parquet
    disk             the values, compressed if small, are written to a file and flushed to the disk
    broker           frames are received and framed, and nothing else is done with them

MB/s are of plain values, by wall-clock time. CPU seconds are counted for the process that does the
step. A pipeline must do all steps but the first. So its limit is their CPU together, and the rate
of the disk or of the broker, whichever is slower; ``bench.plot`` draws it as a line. Values of 4
MiB stand for the chunks of large messages. They are random, so neither a producer nor Parquet
compresses them.

``python -m bench.limits``; results are printed and written to ``bench/latest-limits.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import crc32c
import lz4.block
import pyarrow as pa

from bench.throughput import SETTINGS, Pass, Workload, encode, in_process, publish
from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.decode.scan import scan
from ledgerlake.devbroker import Broker
from ledgerlake.source.bounds import resolve_end
from ledgerlake.source.read_until import next_together_until
from ledgerlake.wire.entry import parse_entry
from ledgerlake.wire.message_id import BEFORE_ALL

if TYPE_CHECKING:
    from collections.abc import Callable

Item = TypeVar("Item")

LIMIT = "limit"
LATEST = Path(__file__).parent / "latest-limits.json"
_SMALL = Workload("100 B, batches of 1000, LZ4", 2_000_000, 100, 1000)
LARGE = Workload("4 MiB, unbatched", 150, 4 * 1024 * 1024, 1)
_PASSES = 5
_DISTINCT_ENTRIES = 20


@dataclass(frozen=True)
class Limit:
    """What a step takes for a workload, or what a pipeline must take (``LIMIT``)."""

    block: str
    label: str
    messages_per_s: float
    mb_per_s: float
    cpu_s_per_million: float
    cpu_s_per_gb: float


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n\n")[0]).parse_args()
    with (
        Broker(settings=SETTINGS) as address,
        tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder,
    ):
        limits = [
            *_measure(
                address.service_url, publish(address, _SMALL, 1), _SMALL, _small_steps(Path(folder))
            ),
            *_measure(
                address.service_url, publish(address, LARGE, 1), LARGE, _large_steps(Path(folder))
            ),
        ]
    LATEST.write_text(json.dumps([asdict(limit) for limit in limits], indent=2) + "\n")


def _measure(
    service_url: str, topic: str, workload: Workload, steps: dict[str, Callable[[int], None]]
) -> list[Limit]:
    print(
        f"\n{workload.name}: median of {_PASSES} "
        f"passes\n{'step':<20}{'MB/s':>12}{'CPU s/M':>12}{'CPU s/GB':>12}"
    )
    entries = workload.messages // workload.batch
    passes = {
        name: [_timed(step, entries) for _ in range(1 + _PASSES)] for name, step in steps.items()
    }
    passes["broker"], _ = in_process(_receive, service_url, topic, entries, 1 + _PASSES)
    by_step = {name: _limit(workload, name, timed[1:]) for name, timed in passes.items()}
    slowest = min(by_step["disk"], by_step["broker"], key=lambda limit: limit.mb_per_s)
    needed = [limit for name, limit in by_step.items() if name != "copy"]
    per_million, per_gb = (
        round(sum(getattr(limit, field) for limit in needed), 3)
        for field in ("cpu_s_per_million", "cpu_s_per_gb")
    )
    limit = replace(slowest, label=LIMIT, cpu_s_per_million=per_million, cpu_s_per_gb=per_gb)
    return [*by_step.values(), _printed(limit)]


def _timed(step: Callable[[int], None], entries: int) -> Pass:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    step(entries)
    return Pass(time.perf_counter() - began_s, time.process_time() - began_cpu_s)


def _limit(workload: Workload, name: str, passes: list[Pass]) -> Limit:
    seconds = statistics.median(one_pass.seconds for one_pass in passes)
    cpu_s = statistics.median(one_pass.cpu_s for one_pass in passes)
    return _printed(
        Limit(
            workload.name,
            name,
            round(workload.messages / seconds),
            round(workload.plain_mb / seconds, 1),
            round(cpu_s * 1e6 / workload.messages, 3),
            round(cpu_s * 1e3 / workload.plain_mb, 3),
        )
    )


def _printed(limit: Limit) -> Limit:
    print(
        f"{limit.label:<20}{limit.mb_per_s:>12,.0f}{limit.cpu_s_per_million:>12,.3f}{limit.cpu_s_per_gb:>12,.2f}",
        flush=True,
    )
    return limit


def _small_steps(folder: Path) -> dict[str, Callable[[int], None]]:
    frames = [encode(_SMALL, "limits", number) for number in range(_DISTINCT_ENTRIES)]
    packed = [
        (bytes(entry.payload), entry.metadata.uncompressed_size)
        for entry in map(parse_entry, frames)
    ]
    values = [lz4.block.decompress(data, uncompressed_size=size) for data, size in packed]
    zstd = pa.Codec("zstd", 1)
    return {
        "copy": _over(frames, bytearray),
        "CRC-32C": _over(frames, crc32c.crc32c),
        "LZ4": _over(packed, lambda pair: lz4.block.decompress(pair[0], uncompressed_size=pair[1])),
        "zstd, level 1": _over(values, zstd.compress),
        "disk": partial(
            _write, folder / "small", [bytes(zstd.compress(value)) for value in values]
        ),
    }


def _large_steps(folder: Path) -> dict[str, Callable[[int], None]]:
    values = [os.urandom(LARGE.value_bytes) for _ in range(_DISTINCT_ENTRIES)]
    return {
        "copy": _over(values, bytearray),
        "CRC-32C": _over(values, crc32c.crc32c),
        "disk": partial(_write, folder / "large", values),
    }


def _over(items: list[Item], work: Callable[[Item], Any]) -> Callable[[int], None]:
    def step(entries: int) -> None:
        for item in islice(cycle(items), entries):
            work(item)

    return step


def _write(file: Path, items: list[bytes], entries: int) -> None:
    with file.open("wb") as stream:
        for item in islice(cycle(items), entries):
            stream.write(item)
        stream.flush()
        os.fsync(stream.fileno())


def _receive(service_url: str, topic: str, _entries: int) -> None:
    cluster = Cluster(ClientSettings(service_url))
    (name,) = cluster.topic_partitions(topic)
    reader = EntryReader(cluster, name, BEFORE_ALL, scan=scan)
    end = resolve_end(cluster, name, "latest").position
    while next_together_until(reader, end) is not None:
        pass
    reader.close()
    cluster.close()


if __name__ == "__main__":
    main()
