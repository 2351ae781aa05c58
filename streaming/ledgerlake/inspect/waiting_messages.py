"""The delayed messages in a pipeline's state, as of its last committed batch."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ledgerlake.client.topics import join_partition
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.delay.bucket import Record, record_from_json
from ledgerlake.delay.cancels import cancels_from_json
from ledgerlake.delay.due_times import DueTimes
from ledgerlake.delay.snapshot import SegmentMetadata, metadata_from_bytes
from ledgerlake.delay.storage import METADATA
from ledgerlake.inspect.open_messages import last_batch, read_state
from ledgerlake.operators.bucket_folders import open_folder
from ledgerlake.pipeline.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from ledgerlake.options.config import Config

# Upper ends of the horizon's steps.
_HORIZON_MS = {
    "due": 0,
    "within a minute": 60_000,
    "within an hour": 3_600_000,
    "within a day": 86_400_000,
    "within a week": 7 * 86_400_000,
}
_BEYOND = "later"
_BAR = 30


@dataclass(frozen=True)
class WaitingMessages:
    """A topic partition's delayed messages. ``horizon`` counts them by when they are due, to the
    precision of a segment.
    """

    topic_partition: str
    waiting: int
    buckets: int
    segments: int
    mutable: int
    cancels: int
    next_due_ms: list[int] = field(default_factory=list)
    horizon: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)

    def sentence(self) -> str:
        due = ", ".join(_moment(time_ms) for time_ms in self.next_due_ms) or "none"
        lines = [
            f"{self.topic_partition}: {self.waiting:,} messages wait in {self.buckets} buckets of {self.segments:,} segments "
            f"({self.mutable:,} of them in the mutable bucket), {self.cancels:,} cancels; next due {due}"
        ]
        most = max(self.horizon.values(), default=0)
        for name, count in self.horizon.items():
            lines.append(f"  {name:<16} {count:>12,} {'#' * round(_BAR * count / most) if most else ''}".rstrip())
        return "\n".join(lines)


def waiting_messages(spark: SparkSession, config: Config) -> list[WaitingMessages]:
    """Return the delayed messages of every topic partition that has or had some.

    Raises:
        SetupError: there is no checkpoint of a pipeline that has run.
        OffsetError: a newer release wrote it, or a bucket is missing.
    """
    now_ms, batch_id = int(time.time() * 1000), last_batch(config)
    cancels = {
        _source(row): len(cancels_from_json(row.value["cancels"])[0])
        for row in read_state(spark, config, "cancels", batch_id).collect()
    }
    metadata = _metadata(spark, config, batch_id)
    partitions = []
    for row in read_state(spark, config, "index", batch_id).collect():
        source = _source(row)
        record = record_from_json(row.value["record"])
        partitions.append(_describe(source, record, partial(metadata, source), cancels.get(source, 0), now_ms))
    return sorted(partitions, key=lambda partition: partition.topic_partition)


def due_counts(spark: SparkSession, config: Config, span_ms: int) -> dict[int, int]:
    """Count the delayed messages by when they are due, to the precision of a segment; no message is
    read. Messages that were cancelled count too.

    Args:
        span_ms: the length of the spans.

    Returns:
        by the beginning of each span that has messages, in milliseconds since 1970.

    Raises:
        SetupError, OffsetError: as ``waiting_messages``.
    """
    batch_id = last_batch(config)
    metadata = _metadata(spark, config, batch_id)
    counts: Counter[int] = Counter()
    for row in read_state(spark, config, "index", batch_id).collect():
        source, record = _source(row), record_from_json(row.value["record"])
        for bucket in (bucket for bucket in record.buckets if bucket.waiting):
            times = DueTimes.of(metadata(source, bucket.bucket_id)).of_last(bucket.waiting, bucket.next_ms)
            for time_ms, count in zip(times.first_ms.tolist(), times.counts.tolist(), strict=True):
                counts[time_ms - time_ms % span_ms] += count
    return dict(counts)


def _metadata(
    spark: SparkSession, config: Config, batch_id: int | None
) -> Callable[[TopicPartition, int], list[SegmentMetadata]]:
    """Return a function that gets a bucket's metadata by its topic partition and id."""
    folder = config.delay_options.folder
    if folder is not None:
        query_id = str(Checkpoint(config.checkpoint_place).log.query_id())

        def from_folder(source: TopicPartition, bucket_id: int) -> list[SegmentMetadata]:
            storage = open_folder(folder, source, query_id, [bucket_id])
            return metadata_from_bytes(storage.get_segment(bucket_id, METADATA))

        return from_folder
    rows = read_state(spark, config, "snapshots", batch_id).where(f"user_map_key.number = {METADATA}").collect()
    values = {row.user_map_key["bucket_id"]: bytes(row.user_map_value["snapshot"]) for row in rows}
    return lambda _source, bucket_id: metadata_from_bytes(values[bucket_id])


def _describe(
    source: TopicPartition,
    record: Record,
    metadata: Callable[[int], list[SegmentMetadata]],
    cancels: int,
    now_ms: int,
) -> WaitingMessages:
    buckets = [bucket for bucket in record.buckets if bucket.waiting]
    horizon = dict.fromkeys([*_HORIZON_MS, _BEYOND], 0)
    for bucket in buckets:
        times = DueTimes.of(metadata(bucket.bucket_id)).of_last(bucket.waiting, bucket.next_ms)
        for time_ms, count in zip(times.first_ms.tolist(), times.counts.tolist(), strict=True):
            horizon[_step(time_ms - now_ms)] += count
    return WaitingMessages(
        topic_partition=join_partition(source.topic, source.partition),
        waiting=sum(bucket.waiting for bucket in buckets),
        buckets=len(buckets),
        segments=sum(bucket.segments - bucket.segment + 1 for bucket in buckets),
        mutable=sum(bucket.waiting for bucket in buckets if not bucket.sealed),
        cancels=cancels,
        next_due_ms=sorted(bucket.next_ms for bucket in buckets)[:5],
        horizon=horizon,
        outputs={name: str(position) for name, position in record.outputs.items()},
    )


def _step(ahead_ms: int) -> str:
    return next((name for name, end_ms in _HORIZON_MS.items() if ahead_ms <= end_ms), _BEYOND)


def _source(row: Any) -> TopicPartition:
    return TopicPartition(row.key["topic"], row.key["partition"])


def _moment(time_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_ms / 1000)) + "Z"
