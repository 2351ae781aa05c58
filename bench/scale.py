"""What a thousand topic partitions and a billion delayed messages cost: constants measured here,
and formulas that a larger measurement checks.

index       The delayed index of one topic partition (PIP-195), without Spark: micro-batches add
            messages until so many wait, then they leave in twenty steps of the clock.
              written     bytes that the index stores for each byte that arrives: merges write
                          messages again
              largest     the largest share of the waiting bytes that one micro-batch stored
              state       bytes of the waiting messages in the index, and of the record in state,
                          which each micro-batch rewrites
              restart     from the record in state to the first due message
pipeline    CPU s of a micro-batch = fixed + partitions x P + messages x M, fitted to runs of the
            pipeline on a live broker. One more run, which the fit has not seen, is predicted and
            measured.
1,000       by those constants: 1,000 topic partitions with 1 M messages/s, at several triggers.
            ``fixed`` has the start of a query in it, so it is too high for a query that runs on.

python -m bench.scale [--index-only]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tests.delay.memory_storage import MemoryStorage

from bench.delay import FIRST_DUE_MS, HORIZON_MS, index_batch
from bench.growth import passes_of
from bench.throughput import SETTINGS, Workload
from ledgerlake.delay.bucket import record_from_json, record_to_json
from ledgerlake.delay.tracker import DelayedTracker, DelaySettings
from ledgerlake.devbroker import Broker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import SparkSession

    from ledgerlake.devbroker.standalone import BrokerAddress

_WAITING = (100_000, 300_000, 1_000_000)
_ADDED = 2_000
_FRAME_BYTES = 175
_STEPS = 20

# Partitions and messages of the runs; the last one is predicted from the others.
_RUNS = (
    (1, 250_000),
    (1, 2_000_000),
    (16, 250_000),
    (16, 2_000_000),
    (48, 1_000_000),
    (32, 4_000_000),
)
_PASSES = 3

_PARTITIONS, _MESSAGES_PER_S, _TRIGGERS_S = 1_000, 1_000_000, (1, 10, 60)


@dataclass(frozen=True)
class Constants:
    """CPU seconds of a micro-batch: fixed, for each topic partition, for each message."""

    fixed_s: float
    partition_s: float
    message_s: float

    def cpu_s(self, partitions: int, messages: int) -> float:
        return self.fixed_s + self.partition_s * partitions + self.message_s * messages


class _CountingStorage(MemoryStorage):
    """Counts the bytes that are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.written_bytes = 0

    def save_all_segments(self, bucket_id: int, snapshots: Iterable[tuple[int, bytes]]) -> None:
        super().save_all_segments(bucket_id, snapshots)
        self.written_bytes += sum(map(len, self.buckets[bucket_id].values()))

    @property
    def stored_bytes(self) -> int:
        return sum(len(value) for bucket in self.buckets.values() for value in bucket.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--index-only", action="store_true", help="without Spark and broker")
    options = parser.parse_args()
    print(
        f"{'waiting':>12}{'written':>10}{'largest':>10}{'bytes each':>12}{'buckets':>9}{'record B':>10}",
        end="",
    )
    print(f"{'added/s':>10}{'released/s':>12}{'restart ms':>12}")
    for messages in _WAITING:
        _measure_index(messages)
    if not options.index_only:
        _show_thousand(_measure_pipeline())


def _measure_index(messages: int) -> None:
    storage, record = _CountingStorage(), None
    began_s = time.perf_counter()
    largest_bytes = 0
    for first in range(0, messages, _ADDED):
        tracker = DelayedTracker(storage, DelaySettings(), record)
        before = storage.written_bytes
        tracker.add(index_batch(first, _ADDED, bytes(_FRAME_BYTES)))
        record = record_from_json(record_to_json(tracker.save()))
        largest_bytes = max(largest_bytes, storage.written_bytes - before)
    assert record is not None
    add_s = time.perf_counter() - began_s
    arrived_bytes = messages * _FRAME_BYTES
    written, stored = storage.written_bytes / arrived_bytes, storage.stored_bytes / messages
    text = record_to_json(record)
    began_s = time.perf_counter()
    next(
        iter(
            DelayedTracker(storage, DelaySettings(), record_from_json(text)).take_due(
                FIRST_DUE_MS + HORIZON_MS
            )
        )
    )
    restart_ms = (time.perf_counter() - began_s) * 1000
    released, release_s = _release(storage, text)
    assert released == messages
    print(
        f"{messages:>12,}{written:>10.1f}{largest_bytes / arrived_bytes:>10.2f}{stored:>12.0f}{len(record.buckets):>9}"
        f"{len(text):>10,}{messages / add_s:>10,.0f}{messages / release_s:>12,.0f}{restart_ms:>12.1f}",
        flush=True,
    )


def _release(storage: MemoryStorage, text: str) -> tuple[int, float]:
    """Release all messages; return how many, and the seconds."""
    began_s = time.perf_counter()
    released = 0
    for step in range(1, _STEPS + 1):
        tracker = DelayedTracker(storage, DelaySettings(), record_from_json(text))
        released += sum(
            batch.num_rows for batch in tracker.take_due(FIRST_DUE_MS + HORIZON_MS * step // _STEPS)
        )
        text = record_to_json(tracker.save())
    return released, time.perf_counter() - began_s


def _measure_pipeline() -> Constants:
    from ledgerlake.runtime.session import start_session

    print(f"\n{'partitions':>12}{'messages':>12}{'CPU s':>10}{'by fit':>10}")
    with Broker(settings=SETTINGS) as address:
        spark = start_session("bench", "local[2]")
        try:
            cpu_s = [_cpu_s(spark, address, *run) for run in _RUNS]
        finally:
            spark.stop()
    # Relative errors count alike, so that large runs do not drown the small ones.
    terms = np.array([(1, *run) for run in _RUNS[:-1]]) / np.array(cpu_s[:-1])[:, None]
    constants = Constants(*np.linalg.lstsq(terms, np.ones(len(terms)), rcond=None)[0].tolist())
    for (partitions, messages), seconds in zip(_RUNS, cpu_s, strict=True):
        print(
            f"{partitions:>12}{messages:>12,}{seconds:>10.2f}{constants.cpu_s(partitions, messages):>10.2f}"
        )
    print("the last line was not part of the fit")
    print(
        f"fixed {constants.fixed_s:.2f} s, a topic partition {constants.partition_s * 1000:.0f} "
        f"ms, a million messages {constants.message_s * 1e6:.2f} s"
    )
    return constants


def _cpu_s(spark: SparkSession, address: BrokerAddress, partitions: int, messages: int) -> float:
    passes, _ = passes_of(spark, address, Workload("", messages, 100, 1000), partitions, _PASSES)
    return statistics.median(counted_pass.cpu_s for counted_pass in passes)


def _show_thousand(constants: Constants) -> None:
    print(f"\n{_PARTITIONS:,} topic partitions, {_MESSAGES_PER_S:,} messages/s")
    print(f"{'trigger s':>12}{'cores':>10}{'files a day':>14}{'messages a file':>18}")
    for trigger_s in _TRIGGERS_S:
        cores = constants.cpu_s(_PARTITIONS, _MESSAGES_PER_S * trigger_s) / trigger_s
        files = _PARTITIONS * 86_400 // trigger_s
        print(f"{trigger_s:>12}{cores:>10.1f}{files:>14,}{_MESSAGES_PER_S * 86_400 // files:>18,}")


if __name__ == "__main__":
    main()
