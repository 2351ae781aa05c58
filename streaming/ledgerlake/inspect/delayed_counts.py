"""The delayed messages in a pipeline's state, as of its last committed batch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as f

from ledgerlake.client.topics import join_partition
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.delay.bucket import IndexRecord, record_from_json
from ledgerlake.delay.due_times import DueTimes, due_times, needed
from ledgerlake.delay.storage import METADATA, missing
from ledgerlake.inspect.stored_state import last_batch, read_state
from ledgerlake.monitor.progress import counted
from ledgerlake.operators.bucket_folders import open_folder
from ledgerlake.operators.bucket_storage import segments_of_block
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.schedules.cancels import cancels_from_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ledgerlake.delay.bucket import Bucket
    from ledgerlake.options.config import Config
    from ledgerlake.schedules.cancels import Cancels
    from ledgerlake.schedules.schedules import MarkedPositions, Pauses

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
class DelayedCounts:
    """A topic partition's delayed messages. ``horizon`` counts them by when they are due, to the
    precision of a segment.
    """

    topic_partition: str
    delayed: int
    buckets: int
    segments: int
    mutable: int
    cancels: int
    next_due_ms: list[int] = field(default_factory=list)
    horizon: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return a sentence, and a bar for each part of the horizon."""
        if not self.delayed:
            return [
                f"{self.topic_partition}: no delayed message, "
                f"{counted(self.cancels, 'cancel', 'cancels')}"
            ]
        due = ", ".join(_moment(time_ms) for time_ms in self.next_due_ms) or "none"
        lines = [
            f"{self.topic_partition}: "
            f"{counted(self.delayed, 'delayed message', 'delayed messages')} in "
            f"{counted(self.buckets, 'bucket', 'buckets')} of "
            f"{counted(self.segments, 'segment', 'segments')} ({self.mutable:,} of them in the "
            f"mutable bucket), {counted(self.cancels, 'cancel', 'cancels')}; next due {due}"
        ]
        most = max(self.horizon.values(), default=0)
        for name, count in self.horizon.items():
            bar = "#" * round(_BAR * count / most) if most else ""
            lines.append(f"  {name:<16} {count:>12,} {bar}".rstrip())
        return lines


def delayed_counts(spark: SparkSession, config: Config) -> list[DelayedCounts]:
    """Return the delayed messages of every topic partition that has or had some.

    Raises:
        SetupError: there is no checkpoint of a pipeline that has run.
        OffsetError: a newer release wrote it, or a bucket is missing.
    """
    now_ms, batch_id = int(time.time() * 1000), last_batch(config)
    cancels = {
        source: len(stored[0]) for source, stored in stored_cancels(spark, config, batch_id).items()
    }
    records = stored_records(spark, config, batch_id)
    times = _due_times(spark, config, batch_id, records)
    partitions = [
        _describe(source, record, times, cancels.get(source, 0), now_ms)
        for source, record in records.items()
    ]
    return sorted(partitions, key=lambda partition: partition.topic_partition)


def stored_records(
    spark: SparkSession, config: Config, batch_id: int | None
) -> dict[TopicPartition, IndexRecord]:
    """Return the records of the buckets in the state.

    Raises:
        OffsetError: a newer release wrote one.
    """
    rows = read_state(spark, config, "index", batch_id).collect()
    return {source_of(row): record_from_json(row.value["record"]) for row in rows}


def stored_cancels(
    spark: SparkSession, config: Config, batch_id: int | None
) -> dict[TopicPartition, tuple[Cancels, MarkedPositions, Pauses]]:
    """Return the cancels in the state, with the marked positions and the pauses of all schedules.

    Raises:
        OffsetError: a newer release wrote one.
    """
    rows = read_state(spark, config, "cancels", batch_id).collect()
    return {source_of(row): cancels_from_json(row.value["cancels"]) for row in rows}


def _filled_buckets(record: IndexRecord) -> list[Bucket]:
    return [bucket for bucket in record.buckets if bucket.waiting]


def _due_times(
    spark: SparkSession,
    config: Config,
    batch_id: int | None,
    records: dict[TopicPartition, IndexRecord],
) -> dict[int, DueTimes]:
    """Return when the messages of the buckets are due, by the bucket's id."""
    buckets = {source: _filled_buckets(record) for source, record in records.items()}
    folder = config.pipeline_delay.folder
    if folder is not None:
        query_id = str(Checkpoint(config.checkpoint_place).log.query_id())
        times: dict[int, DueTimes] = {}
        for source, of_source in buckets.items():
            storage = open_folder(
                folder, source, query_id, {bucket.bucket_id: bucket.segment for bucket in of_source}
            )
            times |= {
                bucket.bucket_id: due_times(bucket, storage.get_segment) for bucket in of_source
            }
        return times
    by_id = {bucket.bucket_id: bucket for of_source in buckets.values() for bucket in of_source}
    return _due_times_in_state(spark, config, batch_id, by_id)


def _due_times_in_state(
    spark: SparkSession, config: Config, batch_id: int | None, buckets: dict[int, Bucket]
) -> dict[int, DueTimes]:
    few = [bucket_id for bucket_id, bucket in buckets.items() if METADATA not in needed(bucket)]
    is_needed = f.col("user_map_key.number") == METADATA
    if few:
        is_needed |= f.col("user_map_key.bucket_id").isin(few)
    snapshots: dict[int, dict[int, bytes]] = {}
    times: dict[int, DueTimes] = {}
    # The segments hold the messages themselves, so they are not collected.
    for row in read_state(spark, config, "snapshots", batch_id).where(is_needed).toLocalIterator():
        bucket = buckets.get(row.user_map_key["bucket_id"])
        number, value = row.user_map_key["number"], bytes(row.user_map_value["snapshot"])
        if bucket is None or number < METADATA:
            continue
        values = [value] if number == METADATA else segments_of_block(value)
        found = {
            place: data for place, data in enumerate(values, number) if place in needed(bucket)
        }
        of_bucket = snapshots.setdefault(bucket.bucket_id, {})
        of_bucket |= found
        if found and len(of_bucket) == len(needed(bucket)):
            times[bucket.bucket_id] = due_times(
                bucket, lambda bucket_id, number: snapshots[bucket_id][number]
            )
            del snapshots[bucket.bucket_id]
    for bucket_id, bucket in buckets.items():
        if bucket_id not in times:
            raise missing(bucket_id, needed(bucket)[0])
    return times


def _describe(
    source: TopicPartition,
    record: IndexRecord,
    times: dict[int, DueTimes],
    cancels: int,
    now_ms: int,
) -> DelayedCounts:
    buckets = _filled_buckets(record)
    horizon = dict.fromkeys([*_HORIZON_MS, _BEYOND], 0)
    for bucket in buckets:
        left = times[bucket.bucket_id].of_last(bucket.waiting, bucket.next_ms)
        for time_ms, count in zip(left.first_ms.tolist(), left.counts.tolist(), strict=True):
            horizon[_step(time_ms - now_ms)] += count
    return DelayedCounts(
        topic_partition=join_partition(source.topic, source.partition),
        delayed=sum(bucket.waiting for bucket in buckets),
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


def source_of(row: Any) -> TopicPartition:
    """Return the topic partition of a row of the state."""
    return TopicPartition(row.key["topic"], row.key["partition"])


def _moment(time_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_ms / 1000)) + "Z"
