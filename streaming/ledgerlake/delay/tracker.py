"""The delayed message tracker: what waits on one topic partition, and what is due (PIP-195).

    added        into the last mutable bucket: fresh messages in memory, and parts of it that were stored when a
                 micro-batch ended
    sealed       when a message of a later ledger range comes and the mutable bucket holds enough: its parts become one
                 immutable bucket of segments
    merged       when there are too many immutable buckets: those two neighbours that have the fewest messages
    taken        from all buckets in the order of (time, ledger, entry), with one segment of each in memory
    deleted      when the last message of a bucket was taken

Rules kept here:
  - What is due is taken whole, and by the time that the caller gives; nothing is ever due early.
  - Stored buckets never change. ``save`` gives the record that says what is in use; until that is
    kept somewhere, nothing that an older record uses is deleted. After a failure, the index is
    opened again from the last saved record.
  - A message that was added before is not added again (by the buckets' bitmaps).
  - A mutable bucket that holds many times what sealing asks for is sealed although its ledger goes
    on; else a single long ledger would make one bucket without end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from ledgerlake.delay.bucket import Bucket, Record
from ledgerlake.delay.merge import fewest_together, shared_queue
from ledgerlake.delay.segment import (
    DEFAULT_MAX_INDEXES,
    DEFAULT_TIME_STEP_MS,
    cut,
    in_order,
    key_columns,
)
from ledgerlake.delay.snapshot import (
    SegmentMetadata,
    describe,
    metadata_from_bytes,
    metadata_to_bytes,
    segment_from_bytes,
    segment_to_bytes,
)
from ledgerlake.delay.storage import METADATA, missing
from ledgerlake.wire.message_id import AFTER_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from ledgerlake.delay.storage import SnapshotStorage

# Fresh messages in memory; beyond, they are stored before the micro-batch ends.
FRESH_BYTES = 32 * 1024 * 1024
FRESH_MESSAGES = 200_000

# A mutable bucket is sealed within its ledger range at so many times the least size.
_OVERFULL = 10


@dataclass(frozen=True)
class DelaySettings:
    """The sizes of buckets and segments; the names follow the broker's, the defaults the broker's
    and the proposal's.
    """

    min_indexes_per_bucket: int = 50_000
    ledger_step_per_bucket: int = 5
    time_step_per_segment_ms: int = DEFAULT_TIME_STEP_MS
    max_indexes_per_segment: int = DEFAULT_MAX_INDEXES
    max_buckets: int = 20


class DelayedTracker:
    """The delayed messages of one topic partition, from one stored record to the next.

    Args:
        record: what ``save`` gave last time.

    Raises, in every method that reaches storage, whatever that raises; the tracker is of no use
    afterwards.
    """

    def __init__(self, storage: SnapshotStorage, settings: DelaySettings, record: Record | None = None) -> None:
        record = record or Record()
        self._storage = storage
        self._settings = settings
        self._buckets = list(record.buckets)
        self._range_end = record.range_end
        self._saved = self._reached = record.reached
        self._doomed: list[int] = []
        self._fresh: list[pa.RecordBatch] = []
        self._segments: dict[int, tuple[int, pa.RecordBatch]] = {}
        self._metadata: dict[int, list[SegmentMetadata]] = {}
        self.outputs = dict(record.outputs)
        storage.start()
        for bucket_id in record.doomed:
            storage.delete_bucket(bucket_id)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(self._buckets)

    @property
    def waiting(self) -> int:
        return sum(one.waiting for one in self._buckets) + self._fresh_count

    @property
    def next_due_ms(self) -> int | None:
        """Return when the next message is due; None if no message is delayed."""
        times_ms = [one.next_ms for one in self._buckets if one.waiting]
        return min(times_ms + [pc.min(one.column(0)).as_py() for one in self._fresh], default=None)

    @property
    def last_due_ms(self) -> int | None:
        """Return when the last message is due; None if no message is delayed."""
        times_ms = [one.last_ms for one in self._buckets if one.waiting]
        return max(times_ms + [pc.max(one.column(0)).as_py() for one in self._fresh], default=None)

    @property
    def oldest(self) -> Position | None:
        """No message that waits stands before this position; None if none waits."""
        firsts = [one.first for one in self._buckets if one.waiting]
        return min(firsts + [_extent(one)[0] for one in self._fresh], default=None)

    def add(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Take rows of ``segment.WAITING``; return those that are left out, since their entries
        were added before.
        """
        known = self._known(batch)
        new = batch.filter(pa.array(~known))
        for rows in _by_ledger(new):
            ledger_id = rows.column(1)[0].as_py()
            if ledger_id > self._range_end:
                if self._mutable_count >= self._settings.min_indexes_per_bucket:
                    self._seal()
                range_end = ledger_id + self._settings.ledger_step_per_bucket - 1
                self._range_end = min(range_end, AFTER_ALL.ledger_id)
            self._fresh.append(rows)
            self._reached = max(self._reached, _extent(rows)[1])
        if sum(one.nbytes for one in self._fresh) > FRESH_BYTES or self._fresh_count > FRESH_MESSAGES:
            self._store_fresh()
        return batch.filter(pa.array(known))

    def take_due(self, cutoff_ms: int) -> Iterator[pa.RecordBatch]:
        """Everything due at a time or before, in order; to be used up before anything else is
        asked.
        """
        due = [one for one in self._buckets if one.waiting and one.next_ms <= cutoff_ms]
        yield from shared_queue([self._take_fresh(cutoff_ms), *(self._take_of(one, cutoff_ms) for one in due)])

    def join(self, output: str, mark: Position) -> None:
        """An output that gets what stands behind a position; one that is known already keeps its
        own.
        """
        self.outputs.setdefault(output, mark)

    def leave(self, output: str) -> None:
        self.outputs.pop(output, None)

    def trim(self, through: Position) -> int:
        """Forget the buckets that lie wholly at or before a position; how many messages those had."""
        passed = [one for one in self._buckets if one.last <= through]
        for one in passed:
            self._replace([one], [])
        return sum(one.waiting for one in passed)

    def save(self) -> Record:
        """Store what is fresh and tidy up; the record of what is then there."""
        if self.outputs:
            self.trim(min(self.outputs.values()))
        self._store_fresh()
        self._replace([one for one in self._buckets if not one.waiting], [])
        if self._mutable_count >= _OVERFULL * self._settings.min_indexes_per_bucket:
            self._seal()
        self._saved = self._reached
        return Record(list(self._buckets), self._range_end, self._reached, dict(self.outputs), list(self._doomed))

    @property
    def _fresh_count(self) -> int:
        return sum(one.num_rows for one in self._fresh)

    @property
    def _mutable_count(self) -> int:
        return sum(one.waiting for one in self._buckets if not one.sealed) + self._fresh_count

    def _known(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Which rows were added before."""
        _, ledger_id, entry_id = key_columns(batch)
        saved = self._saved
        older = (ledger_id < saved.ledger_id) | ((ledger_id == saved.ledger_id) & (entry_id <= saved.entry_id))
        known = np.zeros(batch.num_rows, dtype=bool)
        for ledger in np.unique(ledger_id[older]).tolist():
            rows = older & (ledger_id == ledger)
            known[rows] = np.isin(entry_id[rows], self._added_of(ledger))
        return known

    def _added_of(self, ledger_id: int) -> NDArray[np.int64]:
        """Entries of a ledger that stored buckets have or had."""
        buckets = [one for one in self._buckets if one.first.ledger_id <= ledger_id <= one.last.ledger_id]
        segments = [segment.entries for one in buckets for segment in self._describe(one)]
        return np.array(BitMap().union(*(one[ledger_id] for one in segments if ledger_id in one)).to_array(), np.int64)

    def _describe(self, bucket: Bucket) -> list[SegmentMetadata]:
        if bucket.bucket_id not in self._metadata:
            data = self._storage.get_segment(bucket.bucket_id, METADATA)
            self._metadata[bucket.bucket_id] = metadata_from_bytes(data)
        return self._metadata[bucket.bucket_id]

    def _load(self, bucket: Bucket) -> pa.RecordBatch:
        """Return the rest of a bucket's first unfinished segment."""
        number, segment = self._segments.get(bucket.bucket_id, (0, None))
        if number != bucket.segment:
            segment = self._read(bucket, bucket.segment)
            self._segments[bucket.bucket_id] = (bucket.segment, segment)
        if bucket.offset >= segment.num_rows:
            raise missing(bucket.bucket_id, bucket.segment)
        return segment.slice(bucket.offset)

    def _read(self, bucket: Bucket, number: int) -> pa.RecordBatch:
        """A segment, which is not empty."""
        segment = segment_from_bytes(self._storage.get_segment(bucket.bucket_id, number))
        if not segment.num_rows:
            raise missing(bucket.bucket_id, number)
        return segment

    def _take_fresh(self, cutoff_ms: int) -> Iterator[pa.RecordBatch]:
        if not self._fresh:
            return
        whole = in_order(self._fresh)
        count = _due_count(whole, cutoff_ms)
        self._fresh = [whole.slice(count)] if count < whole.num_rows else []
        if count:
            yield whole.slice(0, count)

    def _take_of(self, bucket: Bucket, cutoff_ms: int) -> Iterator[pa.RecordBatch]:
        while bucket.waiting and bucket.next_ms <= cutoff_ms:
            rest = self._load(bucket)
            count = _due_count(rest, cutoff_ms)
            bucket = self._move(bucket, rest, count)
            yield rest.slice(0, count)

    def _move(self, bucket: Bucket, rest: pa.RecordBatch, count: int) -> Bucket:
        """Count messages of its first unfinished segment as taken; the bucket as it is then."""
        left = bucket.waiting - count
        if count < rest.num_rows:
            moved = replace(bucket, offset=bucket.offset + count, waiting=left)
        else:
            moved = replace(bucket, segment=bucket.segment + 1, offset=0, waiting=left)
        if left:
            moved = replace(moved, next_ms=self._load(moved).column(0)[0].as_py())
        self._buckets[self._buckets.index(bucket)] = moved
        return moved

    def _rest_of(self, bucket: Bucket) -> Iterator[pa.RecordBatch]:
        """All that waits in a bucket, without taking it."""
        yield self._load(bucket)
        for number in range(bucket.segment + 1, bucket.segments + 1):
            yield self._read(bucket, number)

    def _store_fresh(self) -> None:
        """Store the messages that arrived in this micro-batch as a part of the mutable bucket,
        together with the last parts that are no larger.
        """
        count = self._fresh_count
        if not count:
            return
        parts: list[Bucket] = []
        for one in reversed(self._buckets):
            if one.sealed or one.waiting > count:
                break
            parts.append(one)
            count += one.waiting
        self._unite(parts[::-1], sealed=False)

    def _seal(self) -> None:
        self._unite([one for one in self._buckets if not one.sealed], sealed=True)
        while len(sealed := [one for one in self._buckets if one.sealed]) > self._settings.max_buckets:
            place = fewest_together(sealed)
            two = sealed[place : place + 2]
            self._replace(two, self._write([self._rest_of(one) for one in two if one.waiting], sealed=True))

    def _unite(self, parts: list[Bucket], *, sealed: bool) -> None:
        """Parts of the mutable bucket, and what is fresh, as one."""
        sources = [self._take_fresh(AFTER_ALL.ledger_id), *(self._rest_of(one) for one in parts if one.waiting)]
        self._replace(parts, self._write(sources, sealed=sealed))

    def _write(self, sources: list[Iterator[pa.RecordBatch]], *, sealed: bool) -> list[Bucket]:
        """Sources as one stored bucket; none if they are empty."""
        bucket_id = self._storage.create_bucket()
        written = _BucketContent()
        segments = cut(
            shared_queue(sources), self._settings.time_step_per_segment_ms, self._settings.max_indexes_per_segment
        )
        self._storage.save_all_segments(bucket_id, written.snapshots(segments))
        if written.first is None or written.last is None:
            self._doomed.append(bucket_id)
            return []
        metadata = written.metadata
        self._metadata[bucket_id] = metadata
        waiting = sum(one.count for one in metadata)
        times_ms = (metadata[0].min_ms, metadata[-1].max_ms)
        return [Bucket(bucket_id, written.first, written.last, len(metadata), waiting, *times_ms, sealed)]

    def _replace(self, old: list[Bucket], new: list[Bucket]) -> None:
        """Put buckets where others were, which are then used by nothing."""
        place = self._buckets.index(old[0]) if old else len(self._buckets)
        self._doomed += [one.bucket_id for one in old]
        kept = [one for one in self._buckets if one not in old]
        self._buckets = [*kept[:place], *new, *kept[place:]]


class _BucketContent:
    """The content of a bucket as it is learned while the bucket is written."""

    def __init__(self) -> None:
        self.metadata: list[SegmentMetadata] = []
        self.first: Position | None = None
        self.last: Position | None = None

    def snapshots(self, segments: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, bytes]]:
        for number, segment in enumerate(segments, 1):
            first, last = _extent(segment)
            self.first, self.last = min(self.first or first, first), max(self.last or last, last)
            self.metadata.append(describe(segment))
            yield number, segment_to_bytes(segment)
        yield METADATA, metadata_to_bytes(self.metadata)


def _due_count(batch: pa.RecordBatch, cutoff_ms: int) -> int:
    return int(np.searchsorted(batch.column(0).to_numpy(), cutoff_ms, "right"))


def _extent(batch: pa.RecordBatch) -> tuple[Position, Position]:
    """The least and the greatest position of a batch that is not empty."""
    _, ledger_id, entry_id = key_columns(batch)
    low, high = ledger_id.min(), ledger_id.max()
    return (
        Position(int(low), int(entry_id[ledger_id == low].min())),
        Position(int(high), int(entry_id[ledger_id == high].max())),
    )


def _by_ledger(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Stretches of rows of one ledger."""
    ledger_id = batch.column(1).to_numpy()
    cuts = [0, *(np.flatnonzero(np.diff(ledger_id)) + 1).tolist(), batch.num_rows]
    for start, end in pairwise(cuts):
        if end > start:
            yield batch.slice(start, end - start)
