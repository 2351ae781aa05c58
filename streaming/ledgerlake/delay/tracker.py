"""The delayed message tracker: the delayed messages of one topic partition, until they are due
(PIP-195).

    added        to the mutable buckets: fresh messages in memory, and a stored bucket for each
                 micro-batch; stored buckets of similar size are merged
    sealed       if a message of a later ledger range comes and the mutable buckets have enough
                 messages: they become one immutable bucket of segments
    merged       if there are too many immutable buckets: those two neighbours that have the fewest
                 messages
    taken        from all buckets in the order of (time, ledger, entry), with one segment of each in
                 memory
    deleted      segments when their last message was taken, and buckets with their last segment

Rules kept here:
  - All messages that are due by the time that the caller gives are taken, or exactly the first of
    them up to the caller's limit, and none that is due later. Neither how messages were added nor
    how buckets store them decides which ones these are.
  - Stored segments never change. ``save`` returns the record of the buckets in use. Until the
    caller has stored it, no bucket or segment that an older record uses is deleted. After a
    failure, the index is opened again from the last saved record.
  - A message that was added before is not added again (by the bitmaps of the buckets in the last
    record).
  - If the mutable buckets grow to many times the least size, they are sealed within a ledger range;
    else a single long ledger would make one bucket without end.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from ledgerlake.decode.sorted_runs import count_through
from ledgerlake.delay.bucket import Bucket, IndexRecord, SegmentRange, smallest_neighbours
from ledgerlake.delay.due_times import FEW_SEGMENTS, DueTimes, due_spans, due_times
from ledgerlake.delay.segment import (
    DEFAULT_MAX_INDEXES,
    DEFAULT_MIN_INDEXES,
    DEFAULT_TIME_STEP_MS,
    are_until,
    cut_segments,
    index_rows,
    key_at,
    key_columns,
    shared_queue,
    sort_rows,
)
from ledgerlake.delay.snapshot import (
    SegmentMetadata,
    describe_segment,
    metadata_from_bytes,
    metadata_to_bytes,
    segment_from_bytes,
    segment_to_bytes,
)
from ledgerlake.delay.storage import METADATA, missing
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from ledgerlake.delay.due_times import DueSpan
    from ledgerlake.delay.segment import Key
    from ledgerlake.delay.storage import SnapshotStorage

# The mutable buckets are sealed within a ledger range at this many times the least size.
_OVERFULL = 10


@dataclass(frozen=True)
class DelaySettings:
    """The sizes of buckets and segments; the names are the broker's, the defaults the broker's and
    the proposal's. The broker has no least size of a segment.

    ``max_fresh_messages`` and ``max_fresh_bytes`` limit the messages of a micro-batch in memory; if
    there are more, they are stored before it ends.
    """

    min_indexes_per_bucket: int = 50_000
    ledger_step_per_bucket: int = 5
    time_step_per_segment_ms: int = DEFAULT_TIME_STEP_MS
    max_indexes_per_segment: int = DEFAULT_MAX_INDEXES
    max_buckets: int = 20
    min_indexes_per_segment: int = DEFAULT_MIN_INDEXES
    max_fresh_messages: int = 200_000
    max_fresh_bytes: int = 32 * 1024 * 1024


class DelayedTracker:
    """The delayed messages of one topic partition, from one stored record to the next.

    Args:
        record: the record that ``save`` returned last time.

    Every method that uses the storage raises the storage's errors; the tracker must not be used
    afterwards.
    """

    def __init__(
        self, storage: SnapshotStorage, settings: DelaySettings, record: IndexRecord | None = None
    ) -> None:
        record = record or IndexRecord()
        self._storage = storage
        self._settings = settings
        self._buckets = list(record.buckets)
        self._saved_buckets = tuple(record.buckets)
        self._range_end = record.range_end
        self._saved = self._reached = record.reached
        self._doomed: list[int] = []
        self._finished: list[SegmentRange] = []
        self._fresh = _RowsInMemory()
        self._again = _RowsInMemory()
        self._segments: dict[int, tuple[int, pa.RecordBatch]] = {}
        self._metadata: dict[int, list[SegmentMetadata]] = {}
        self._due_times: dict[int, DueTimes] = {}
        self.outputs = dict(record.outputs)
        storage.start()
        for segments in record.finished:
            storage.delete_segments(segments)
        for bucket_id in record.doomed:
            storage.delete_bucket(bucket_id)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(self._buckets)

    @property
    def count(self) -> int:
        """Return how many messages are delayed."""
        return sum(bucket.waiting for bucket in self._buckets) + self._fresh.count

    @property
    def next_due_ms(self) -> int | None:
        """Return when the next message is due; None if no message is delayed."""
        times_ms = [bucket.next_ms for bucket in self._buckets if bucket.waiting]
        added = [*self._fresh.batches, *self._again.batches]
        return min(times_ms + [pc.min(batch.column(0)).as_py() for batch in added], default=None)

    @property
    def last_due_ms(self) -> int | None:
        """Return when the last message is due; None if no message is delayed."""
        times_ms = [bucket.last_ms for bucket in self._buckets if bucket.waiting]
        return max(
            times_ms + [pc.max(batch.column(0)).as_py() for batch in self._fresh.batches],
            default=None,
        )

    def due_spans(self, known: dict[int, DueTimes]) -> list[DueSpan]:
        """Return how many messages are due when; for after ``save``.

        Args:
            known: the times of buckets, so that each bucket is read once. Those that are missing
                are added.
        """
        buckets = [bucket for bucket in self._buckets if bucket.waiting]
        for bucket in buckets:
            times = known.get(bucket.bucket_id)
            # A micro-batch that is run again has messages again that had left.
            if times is None or times.count < bucket.waiting:
                written = self._due_times.get(bucket.bucket_id)
                known[bucket.bucket_id] = written or due_times(bucket, self._storage.get_segment)
        return due_spans(
            [known[bucket.bucket_id].of_last(bucket.waiting, bucket.next_ms) for bucket in buckets]
        )

    @property
    def reread_from(self) -> Position | None:
        """Return a position before which the bytes of all delayed messages are here; None if the
        bytes of all are; for after ``save``.
        """
        positions = (bucket.reread_from for bucket in self._buckets if bucket.waiting)
        return min((position for position in positions if position is not None), default=None)

    def move_reread_from(self) -> None:
        """Move the ``reread_from`` of buckets past the taken messages; call it before ``save``. It
        may stay before a message whose bytes are in its bucket.
        """
        saved = set(self._saved_buckets)
        self._buckets = [
            bucket if bucket in saved else self._with_reread_from(bucket)
            for bucket in self._buckets
        ]

    def _with_reread_from(self, bucket: Bucket) -> Bucket:
        """Return a bucket with its ``reread_from`` moved. Its metadata is read only if its first
        unfinished segment lacks that message.
        """
        if bucket.reread_from is None or not bucket.waiting:
            return bucket
        rows = self._load_next(bucket)
        without_bytes = rows.filter(rows.column(3).is_null())
        positions = [_extent(without_bytes)[0]] if without_bytes.num_rows else []
        if bucket.reread_from not in positions:
            positions += [
                _first(segment) for segment in self._load_metadata(bucket)[bucket.segment :]
            ]
        first = min(positions, default=None)
        return replace(
            bucket, reread_from=None if first is None else max(first, bucket.reread_from)
        )

    def add(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Add rows of ``segment.INDEX_SCHEMA``; return those that are left out because their
        entries were added before.
        """
        is_repeated = self._is_repeated(batch)
        self._add(batch.filter(pa.array(~is_repeated)))
        return batch.filter(pa.array(is_repeated))

    def add_part(self, due_ms: int, position: Position) -> bool:
        """Add a part of an entry, without its bytes; return False if a message waits at its
        position. Another part may have been added before, and have left.
        """
        if self._waits_at(position):
            return False
        self._add(index_rows([(due_ms, position.ledger_id, position.entry_id)]))
        return True

    def _add(self, new: pa.RecordBatch) -> None:
        for rows in _by_ledger(new):
            ledger_id = rows.column(1)[0].as_py()
            if ledger_id > self._range_end:
                if self._mutable_count >= self._settings.min_indexes_per_bucket:
                    self._seal()
                range_end = ledger_id + self._settings.ledger_step_per_bucket - 1
                self._range_end = min(range_end, AFTER_ALL.ledger_id)
            self._fresh.add(rows)
            self._reached = max(self._reached, _extent(rows)[1])
        if self._is_too_much(self._fresh):
            self._store_fresh()

    def take_due(
        self, cutoff_ms: int, most_messages: int = sys.maxsize
    ) -> Iterator[pa.RecordBatch]:
        """Yield the messages due at a time or before, in order. Use them up before you call another
        method but ``add_again``.

        Args:
            most_messages: so many are yielded at most, the first ones. The others stay due.
        """
        due = [bucket for bucket in self._buckets if bucket.waiting and bucket.next_ms <= cutoff_ms]
        heads: dict[int, tuple[Bucket, pa.RecordBatch]] = {}
        fresh = self._take_fresh(cutoff_ms)
        sources = [self._take_from(bucket, cutoff_ms, heads) for bucket in due]
        left = most_messages
        for batch in shared_queue([iter(fresh), *sources]):
            if batch.num_rows < left:
                left -= batch.num_rows
                yield batch
                continue
            last = key_at(batch, batch.num_rows - 1)
            for rows in fresh:
                self._fresh.add(rows.slice(_count_through(rows, last)))
            for bucket, messages in heads.values():
                self._advance(bucket, messages, _count_through(messages, last))
            # Its last rows have left their buckets with the others.
            self._fresh.add(batch.slice(left))
            yield batch.slice(0, left)
            return

    def add_again(self, batch: pa.RecordBatch) -> None:
        """Add messages that were taken, with another time; ``take_due`` yields them after the next
        ``save``.
        """
        self._again.add(batch)
        if self._is_too_much(self._again):
            rows = sort_rows(self._again.take())
            self._buckets += self._write([iter([rows])], sealed=False)

    def _is_too_much(self, rows: _RowsInMemory) -> bool:
        settings = self._settings
        return (
            rows.size_bytes > settings.max_fresh_bytes or rows.count > settings.max_fresh_messages
        )

    def add_output(self, output: str, mark_delete: Position) -> None:
        """Add an output that gets the messages after a position; an output that was added before
        keeps its own position.
        """
        self.outputs.setdefault(output, mark_delete)

    def forget_marks_beyond(self, read: Position) -> None:
        """Forget the mark-delete positions beyond the position up to which the topic was read
        before: it was created again, and they are of the former topic, whose messages go to all
        outputs from now on. A message that was read in part may be the one at a mark.
        """
        for name, mark_delete in self.outputs.items():
            if read < mark_delete.before:
                self.outputs[name] = BEFORE_ALL

    def _trim(self, through: Position) -> None:
        """Forget the buckets that lie wholly at or before a position."""
        for bucket in [bucket for bucket in self._buckets if bucket.last <= through]:
            self._replace([bucket], [])

    def save(self) -> IndexRecord:
        """Store fresh messages and drop empty buckets; return the record of the buckets."""
        if self.outputs:
            self._trim(min(self.outputs.values()))
        for rows in self._again.take():
            self._fresh.add(rows)
        self._store_fresh()
        self._replace([bucket for bucket in self._buckets if not bucket.waiting], [])
        if self._mutable_count >= _OVERFULL * self._settings.min_indexes_per_bucket:
            self._seal()
        self._finished += self._newly_finished()
        self._saved, self._saved_buckets = self._reached, tuple(self._buckets)
        self._forget_passed_marks()
        return IndexRecord(
            list(self._buckets),
            self._range_end,
            self._reached,
            dict(self.outputs),
            list(self._doomed),
            list(self._finished),
        )

    def _newly_finished(self) -> Iterator[SegmentRange]:
        """Yield the segments whose last messages were taken since the last record."""
        saved = {bucket.bucket_id: bucket.segment for bucket in self._saved_buckets}
        for bucket in self._buckets:
            first = saved.get(bucket.bucket_id, 1)
            if first < bucket.segment:
                yield SegmentRange(bucket.bucket_id, first, bucket.segment)

    def _forget_passed_marks(self) -> None:
        """Forget the mark-delete positions that no delayed message stands at or before. A topic
        that is created again may have lower positions, and those are for all outputs.
        """
        first = min((bucket.first for bucket in self._buckets), default=None)
        for name, mark_delete in self.outputs.items():
            if first is None or mark_delete < first:
                self.outputs[name] = BEFORE_ALL

    @property
    def _mutable_count(self) -> int:
        return (
            sum(bucket.waiting for bucket in self._buckets if not bucket.sealed) + self._fresh.count
        )

    def _is_repeated(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Return a mask of the rows that were added before."""
        _, ledger_id, entry_id = key_columns(batch)
        older = are_until(ledger_id, entry_id, self._saved)
        is_repeated = np.zeros(batch.num_rows, dtype=bool)
        for ledger in np.unique(ledger_id[older]).tolist():
            rows = older & (ledger_id == ledger)
            is_repeated[rows] = np.isin(entry_id[rows], self._added_entries(ledger))
        return is_repeated

    def _waits_at(self, position: Position) -> bool:
        """Return whether a message of the last record waits at a position. Of the segments with an
        entry, only the first unfinished one must be read: some of its messages may have left.
        """
        buckets = [
            bucket
            for bucket in self._saved_buckets
            if bucket.waiting and bucket.first <= position <= bucket.last
        ]
        for bucket in buckets:
            first, *others = (
                position.entry_id in segment.entries.get(position.ledger_id, ())
                for segment in self._load_metadata(bucket)[bucket.segment - 1 :]
            )
            if any(others) or (first and _has_entry(self._load_next(bucket), position)):
                return True
        return False

    def _added_entries(self, ledger_id: int) -> NDArray[np.int64]:
        """Return the entries of a ledger that the saved buckets have or had. What this micro-batch
        does to buckets depends on how its rows are cut, and must not decide.
        """
        buckets = [
            bucket
            for bucket in self._saved_buckets
            if bucket.first.ledger_id <= ledger_id <= bucket.last.ledger_id
        ]
        segments = [
            segment.entries for bucket in buckets for segment in self._load_metadata(bucket)
        ]
        bitmaps = [entries[ledger_id] for entries in segments if ledger_id in entries]
        return np.array(BitMap().union(*bitmaps).to_array(), np.int64)

    def _load_metadata(self, bucket: Bucket) -> list[SegmentMetadata]:
        if bucket.bucket_id not in self._metadata:
            data = self._storage.get_segment(bucket.bucket_id, METADATA)
            self._metadata[bucket.bucket_id] = metadata_from_bytes(data)
        return self._metadata[bucket.bucket_id]

    def _load_next(self, bucket: Bucket) -> pa.RecordBatch:
        """Return the delayed messages of a bucket's first unfinished segment."""
        number, segment = self._segments.get(bucket.bucket_id, (0, None))
        if number != bucket.segment:
            segment = self._read(bucket, bucket.segment)
            self._segments[bucket.bucket_id] = (bucket.segment, segment)
        if bucket.offset >= segment.num_rows:
            raise missing(bucket.bucket_id, bucket.segment)
        return segment.slice(bucket.offset)

    def _read(self, bucket: Bucket, number: int) -> pa.RecordBatch:
        """Return a segment, which is not empty."""
        segment = segment_from_bytes(self._storage.get_segment(bucket.bucket_id, number))
        if not segment.num_rows:
            raise missing(bucket.bucket_id, number)
        return segment

    def _take_fresh(self, cutoff_ms: int) -> list[pa.RecordBatch]:
        """Return the fresh messages that are due, in order; no batch is empty."""
        if not self._fresh.count:
            return []
        fresh = sort_rows(self._fresh.take())
        count = _due_count(fresh, cutoff_ms)
        self._fresh.add(fresh.slice(count))
        return [fresh.slice(0, count)] if count else []

    def _take_from(
        self, bucket: Bucket, cutoff_ms: int, heads: dict[int, tuple[Bucket, pa.RecordBatch]]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the due messages of a bucket. While a segment is in use, ``heads`` has it with the
        bucket before it.
        """
        while bucket.waiting and bucket.next_ms <= cutoff_ms:
            messages = self._load_next(bucket)
            count = _due_count(messages, cutoff_ms)
            heads[bucket.bucket_id] = (bucket, messages)
            yield messages.slice(0, count)
            bucket = self._advance(bucket, messages, count)
        heads.pop(bucket.bucket_id, None)

    def _advance(self, bucket: Bucket, messages: pa.RecordBatch, count: int) -> Bucket:
        """Count messages of a bucket's first unfinished segment as taken; return the changed
        bucket.

        Args:
            messages: the delayed messages of that segment.
            count: how many of them are taken.
        """
        left = bucket.waiting - count
        if count < messages.num_rows:
            advanced = replace(bucket, offset=bucket.offset + count, waiting=left)
        else:
            advanced = replace(bucket, segment=bucket.segment + 1, offset=0, waiting=left)
        if left:
            advanced = replace(advanced, next_ms=self._load_next(advanced).column(0)[0].as_py())
        self._buckets[self._buckets.index(bucket)] = advanced
        return advanced

    def _read_delayed(self, bucket: Bucket) -> Iterator[pa.RecordBatch]:
        """Yield all delayed messages of a bucket, without taking them."""
        yield self._load_next(bucket)
        for number in range(bucket.segment + 1, bucket.segments + 1):
            yield self._read(bucket, number)

    def _store_fresh(self) -> None:
        """Store the messages that arrived in this micro-batch as a mutable bucket; the last mutable
        buckets that are no larger are merged into it.
        """
        count = self._fresh.count
        if not count:
            return
        mutable_buckets: list[Bucket] = []
        for bucket in reversed(self._buckets):
            if bucket.sealed or bucket.waiting > count:
                break
            mutable_buckets.append(bucket)
            count += bucket.waiting
        self._merge_mutable(mutable_buckets[::-1], sealed=False)

    def _seal(self) -> None:
        self._merge_mutable([bucket for bucket in self._buckets if not bucket.sealed], sealed=True)
        while (
            len(sealed := [bucket for bucket in self._buckets if bucket.sealed])
            > self._settings.max_buckets
        ):
            place = smallest_neighbours(sealed)
            pair = sealed[place : place + 2]
            sources = [self._read_delayed(bucket) for bucket in pair if bucket.waiting]
            self._replace(pair, self._write(sources, sealed=True))

    def _merge_mutable(self, buckets: list[Bucket], *, sealed: bool) -> None:
        """Write mutable buckets, and all fresh messages, as one bucket."""
        sources = [iter(self._take_fresh(AFTER_ALL.ledger_id))]
        sources += [self._read_delayed(bucket) for bucket in buckets if bucket.waiting]
        self._replace(buckets, self._write(sources, sealed=sealed))

    def _write(self, sources: list[Iterator[pa.RecordBatch]], *, sealed: bool) -> list[Bucket]:
        """Write the messages of sources as one stored bucket, and return it; no bucket if there are
        no messages.
        """
        bucket_id = self._storage.create_bucket()
        content = _BucketContent()
        segments = cut_segments(
            shared_queue(sources),
            self._settings.time_step_per_segment_ms,
            self._settings.max_indexes_per_segment,
            self._settings.min_indexes_per_segment,
        )
        self._storage.save_all_segments(bucket_id, content.snapshots(segments))
        if content.first is None or content.last is None:
            self._doomed.append(bucket_id)
            return []
        metadata = content.metadata
        self._metadata[bucket_id] = metadata
        self._due_times[bucket_id] = content.due_times
        count = sum(segment.count for segment in metadata)
        times_ms = (metadata[0].min_ms, metadata[-1].max_ms)
        extent = (content.first, content.last)
        return [
            Bucket(bucket_id, *extent, len(metadata), count, *times_ms, sealed, content.reread_from)
        ]

    def _replace(self, old: list[Bucket], new: list[Bucket]) -> None:
        """Put new buckets in the place of old ones, which are no longer used."""
        place = self._buckets.index(old[0]) if old else len(self._buckets)
        self._doomed += [bucket.bucket_id for bucket in old]
        others = [bucket for bucket in self._buckets if bucket not in old]
        self._buckets = [*others[:place], *new, *others[place:]]


class _RowsInMemory:
    """Batches of rows, with the number and the bytes of all."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.count = 0
        self.size_bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self.batches.append(batch)
            self.count += batch.num_rows
            self.size_bytes += batch.nbytes

    def take(self) -> list[pa.RecordBatch]:
        """Return the batches, and forget them."""
        batches = self.batches
        self.batches, self.count, self.size_bytes = [], 0, 0
        return batches


class _BucketContent:
    """Collects the description of a bucket while its segments are written."""

    def __init__(self) -> None:
        self.metadata: list[SegmentMetadata] = []
        self.first: Position | None = None
        self.last: Position | None = None
        self.reread_from: Position | None = None
        self._times_ms: list[NDArray[np.int64]] = []

    @property
    def due_times(self) -> DueTimes:
        """Return what ``due_times`` reads of the bucket."""
        is_small = len(self.metadata) <= FEW_SEGMENTS
        return (
            DueTimes.of_messages(np.concatenate(self._times_ms))
            if is_small
            else DueTimes.of(self.metadata)
        )

    def snapshots(self, segments: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, bytes]]:
        for number, segment in enumerate(segments, 1):
            first, last = _extent(segment)
            self.first, self.last = min(self.first or first, first), max(self.last or last, last)
            if segment.column(3).null_count:
                without_bytes = _extent(segment.filter(segment.column(3).is_null()))[0]
                self.reread_from = min(self.reread_from or without_bytes, without_bytes)
            self.metadata.append(describe_segment(segment))
            if number <= FEW_SEGMENTS:
                # A copy, so that the entries are not held.
                self._times_ms.append(key_columns(segment)[0].copy())
            yield number, segment_to_bytes(segment)
        yield METADATA, metadata_to_bytes(self.metadata)


def _due_count(batch: pa.RecordBatch, cutoff_ms: int) -> int:
    return int(np.searchsorted(batch.column(0).to_numpy(), cutoff_ms, "right"))


def _count_through(batch: pa.RecordBatch, last: Key) -> int:
    return count_through(key_columns(batch), last)


def _has_entry(batch: pa.RecordBatch, position: Position) -> bool:
    _, ledger_id, entry_id = key_columns(batch)
    return bool(((ledger_id == position.ledger_id) & (entry_id == position.entry_id)).any())


def _extent(batch: pa.RecordBatch) -> tuple[Position, Position]:
    """Return the least and the greatest position of a batch that is not empty."""
    _, ledger_id, entry_id = key_columns(batch)
    low, high = ledger_id.min(), ledger_id.max()
    return (
        Position(int(low), int(entry_id[ledger_id == low].min())),
        Position(int(high), int(entry_id[ledger_id == high].max())),
    )


def _first(segment: SegmentMetadata) -> Position:
    """Return the least position of a segment."""
    ledger_id = min(segment.entries)
    return Position(ledger_id, segment.entries[ledger_id].min())


def _by_ledger(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield runs of rows of one ledger."""
    ledger_id = batch.column(1).to_numpy()
    cuts = [0, *(np.flatnonzero(np.diff(ledger_id)) + 1).tolist(), batch.num_rows]
    for start, end in pairwise(cuts):
        if end > start:
            yield batch.slice(start, end - start)
