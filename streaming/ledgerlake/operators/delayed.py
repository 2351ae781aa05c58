"""Delayed messages of one topic partition in one micro-batch: what arrives waits, what is due comes
out.

State beside that of large messages:

    index      the record of all buckets, JSON with a version (``delay.bucket``)
    snapshots  (bucket, number) -> a bucket's metadata or one of its segments, with the entries that wait in it
    large      (ledger, entry) -> JSON with a version: what waits with its bytes in ``parts`` and not in a segment. It is a
               large message (the key is its last chunk, the value lists the positions of all), or
               an entry if a range began or ended inside it
    cancels    what is not to be delivered after all, JSON with a version (``delay.cancels``)

An entry is stored once, in a segment with its neighbours in time; merging buckets moves it. With
``reread`` only its position waits, and it is read from the topic when it is due.
"""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ledgerlake.assembly.assembler import Assembled, DueEntries, DuePositions, Rejected
from ledgerlake.assembly.rules import ChunkedMessageKey
from ledgerlake.client.topics import join_partition
from ledgerlake.decode.messages import BatchRange
from ledgerlake.decode.split import entries_of, read_delayed
from ledgerlake.delay.bucket import Record, record_from_json, record_to_json
from ledgerlake.delay.cancel_messages import CANCEL_REFUSED
from ledgerlake.delay.cancels import (
    MOST_CANCEL_BYTES,
    MOST_CANCELS,
    Cancel,
    Cancels,
    cancels_from_json,
    cancels_to_json,
)
from ledgerlake.delay.segment import WAITING, frame_sizes, waiting
from ledgerlake.delay.tracker import DelayedTracker
from ledgerlake.errors import SetupError
from ledgerlake.operators.bucket_storage import FolderStorage, StateStorage
from ledgerlake.operators.rows import places
from ledgerlake.stored.fields import parse_stored, stored
from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql.streaming.stateful_processor import MapState, StatefulProcessorHandle, ValueState

    from ledgerlake.assembly.assembler import Entry, KeptEntries, Outcome
    from ledgerlake.decode.messages import TopicPartition
    from ledgerlake.operators.rows import Waits
    from ledgerlake.options.delay_options import DelayOptions

TABLE = "table"
TOPIC = "topic"

# Entries that come out together.
_TOGETHER_BYTES = 1024 * 1024
_TOGETHER_POSITIONS = 1000

_LARGE_VERSION = 3

# The reason of an entry whose position was added before: the topic is another one of that name, and
# what waits of the one before it has the same ids.
DELAYED_KNOWN = "delayed_known"


@dataclass(frozen=True)
class DelayedSummary:
    """The delayed messages of a topic partition in numbers. ``oldest`` is the first entry whose
    bytes only the topic has.
    """

    messages: int = 0
    next_due_ms: int | None = None
    oldest: Position | None = None


class DelayedState:
    """The state variables of delayed messages."""

    def __init__(self, handle: StatefulProcessorHandle) -> None:
        self.index: ValueState = handle.getValueState("index", "record string")
        self.snapshots: MapState = handle.getMapState("snapshots", "bucket_id bigint, number int", "snapshot binary")
        self.large: MapState = handle.getMapState("large", "ledger_id bigint, entry_id bigint", "positions string")
        self.cancels: ValueState = handle.getValueState("cancels", "cancels string")


class DelayedMessages:
    """See the module. Nothing is opened before it is needed."""

    def __init__(self, source: TopicPartition, state: DelayedState, options: DelayOptions, parts: KeptEntries) -> None:
        self._source = source
        self._state = state
        self._options = options
        self._parts = parts
        self._stored = _read_value(state.index)
        self._tracker: DelayedTracker | None = None
        self._new_cancels: list[Cancel] = []
        self._due_parts: list[tuple[Position, BatchRange]] = []
        self._known: list[tuple[Position, Entry | None]] = []

    def add(self, frames: bytes) -> None:
        """A ``delayed`` piece (see ``decode.split``)."""
        found = read_delayed(frames)
        kept = pa.nulls(len(found.due_ms), pa.binary()) if self._options.reread else _frames(frames, found.frame_ends)
        numbers = [pa.array(one) for one in (found.due_ms, found.ledger_ids, found.entry_ids)]
        known = self._open().add(pa.RecordBatch.from_arrays([*numbers, kept], schema=WAITING))
        if known.num_rows:
            entries = entries_of(frames)
            places = zip(known.column(1).to_pylist(), known.column(2).to_pylist(), strict=True)
            self._known += [(place, entries[place]) for place in (Position(*one) for one in places)]

    def add_large(self, event: Waits) -> None:
        """A complete large message; its chunks are in ``parts``, or to be read again."""
        last = event.positions[-1]
        if self._open().add(waiting([(event.deliver_ms, last.ledger_id, last.entry_id)])).num_rows:
            self._known += [(one, self._parts.take(one)) for one in event.positions]
            return
        if self._options.reread:
            for position in event.positions:
                self._parts.drop(position)
        held = event.held and not self._options.reread
        text = _outside_to_json(_OutsideBucket(event.positions, held, key=event.key))
        self._state.large.updateValue((last.ledger_id, last.entry_id), (text,))

    def add_part(self, position: Position, frame: bytes, part: BatchRange) -> None:
        """An entry of which only some messages belong to the range; its frame is in ``parts`` also
        with ``reread``.

        A later range may bring more messages of the same entry. If the earlier ones still wait, the
        new ones join them. If those were delivered, the new ones are due at once.
        """
        key = (position.ledger_id, position.entry_id)
        found = self._state.large.getValue(key)
        before = _outside_from_json(found[0]) if found is not None else None
        if before is not None and before.is_delivered:
            self._due_parts.append((position, part))
            return
        if before is None and self._open().add(waiting([(int(read_delayed(frame).due_ms[0]), *key)])).num_rows:
            # A release that held such entries whole has it already.
            self._parts.drop(position)
            return
        joined = part if before is None or before.part is None else replace(part, after=before.part.after)
        self._state.large.updateValue(key, (_outside_to_json(_OutsideBucket((position,), True, joined)),))

    def cancel(self, cancel: Cancel) -> None:
        self._new_cancels.append(cancel)

    def release(self, due_ms: int | None) -> Iterator[Outcome | Cancels]:
        """Yield the messages that are due by ``due_ms``, in order. If something is due and cancels
        are in force, they come before the messages.
        """
        if self._tracker is None and self._stored is None:
            return
        tracker = self._open()
        if self._known:
            yield Rejected(DELAYED_KNOWN, self._known)
        stored = _read_value(self._state.cancels)
        cancels = cancels_from_json(stored) if stored else Cancels()
        refused = self._add_cancels(cancels, tracker.last_due_ms)
        if refused:
            yield Rejected(CANCEL_REFUSED, [(one, None) for one in dict.fromkeys(one.position for one in refused)])
        next_due_ms = tracker.next_due_ms
        cutoff_ms = due_ms or 0
        if self._due_parts or (next_due_ms is not None and next_due_ms <= cutoff_ms):
            if len(cancels):
                yield cancels
            delivered_ms = max(cutoff_ms, int(time.time() * 1000))
            for position, part in self._due_parts:
                yield from self._part(position, part, delivered_ms, _outputs(tracker))
            for batch in _gathered(tracker.take_due(cutoff_ms)):
                yield from self._outcomes(batch, delivered_ms, tracker)
        self._keep_cancels(cancels.after(cutoff_ms), stored)

    def save(self) -> DelayedSummary:
        """Store what has arrived as parts of buckets, and the record of all buckets; return numbers
        of what waits.
        """
        if self._tracker is None:
            return DelayedSummary()
        record = record_to_json(self._tracker.save())
        if record != self._stored:
            self._state.index.update((record,))
        return DelayedSummary(self._tracker.waiting, self._tracker.next_due_ms, self._oldest(self._tracker))

    def _oldest(self, tracker: DelayedTracker) -> Position | None:
        """The first entry that must be read again; of a large message that is its first chunk."""
        again = [tracker.oldest] if self._options.reread else []
        if self._state.large.exists():
            large = [_outside_from_json(value[0]) for _, value in self._state.large.iterator()]
            again += [one.positions[0] for one in large if not one.is_held]
        return min((one for one in again if one is not None), default=None)

    def _open(self) -> DelayedTracker:
        if self._tracker is None:
            record = record_from_json(self._stored) if self._stored else Record()
            self._tracker = DelayedTracker(self._storage(record), self._options.settings, record)
            self._tracker.join(TABLE, BEFORE_ALL)
            if self._options.republish is None:
                self._tracker.leave(TOPIC)
            else:
                self._tracker.join(TOPIC, BEFORE_ALL if self._options.republish == "earliest" else record.reached)
        return self._tracker

    def _storage(self, record: Record) -> StateStorage | FolderStorage:
        if self._options.folder is None:
            return StateStorage(self._state.snapshots)
        return open_folder(self._options.folder, self._source, _query_id(), [one.bucket_id for one in record.buckets])

    def _add_cancels(self, cancels: Cancels, until_ms: int | None) -> list[Cancel]:
        """Add cancels; return those that are refused because there are too many. If no message is
        delayed, nothing can be cancelled.
        """
        if until_ms is None:
            return []
        refused: list[Cancel] = []
        count, target_bytes = len(cancels), cancels.target_bytes
        for one in self._new_cancels:
            count, target_bytes = count + 1, target_bytes + len(one.target.encode())
            if refused or count > MOST_CANCELS or target_bytes > MOST_CANCEL_BYTES:
                refused.append(one)
            else:
                cancels.add(replace(one, until_ms=until_ms))
        return refused

    def _keep_cancels(self, kept: list[Cancel], stored: str | None) -> None:
        text = cancels_to_json(kept) if kept else None
        if text == stored:
            return
        if text is None:
            self._state.cancels.clear()
        else:
            self._state.cancels.update((text,))

    def _outcomes(self, batch: pa.RecordBatch, delivered_ms: int, tracker: DelayedTracker) -> Iterator[Outcome]:
        outputs = _outputs(tracker)
        kept = batch.column(3).is_valid().to_numpy(zero_copy_only=False)
        rows = range(batch.num_rows)
        for has_frame, group in groupby(rows, lambda row: bool(kept[row])):
            together = list(group)
            part = batch.slice(together[0], len(together))
            if has_frame:
                yield from (DueEntries(frames, delivered_ms, outputs) for frames in _together(part))
            else:
                yield from self._take_outside(part, delivered_ms, outputs)

    def _take_outside(
        self, batch: pa.RecordBatch, delivered_ms: int, outputs: dict[str, Position]
    ) -> Iterator[Outcome]:
        """Messages whose bytes are not in their segment: large ones, parts, and those that are read
        from the topic.
        """
        again: list[Position] = []
        for ledger_id, entry_id in zip(batch.column(1).to_pylist(), batch.column(2).to_pylist(), strict=True):
            found = self._state.large.getValue((ledger_id, entry_id))
            if found is None:
                again.append(Position(ledger_id, entry_id))
                continue
            one = _outside_from_json(found[0])
            if one.part is not None:
                yield from self._part(one.positions[0], one.part, delivered_ms, outputs)
                continue
            entries = map(self._parts.take, one.positions) if one.is_held else None
            yield Assembled(one.positions, entries, delivered_ms=delivered_ms, outputs=outputs, key=one.key)
            self._state.large.removeKey((ledger_id, entry_id))
        for start in range(0, len(again), _TOGETHER_POSITIONS):
            yield DuePositions(again[start : start + _TOGETHER_POSITIONS], delivered_ms, outputs)

    def _part(
        self, position: Position, part: BatchRange, delivered_ms: int, outputs: dict[str, Position]
    ) -> Iterator[Outcome]:
        frame = self._parts.take(position)
        if frame is not None:
            yield DueEntries(frame, delivered_ms, outputs, part)
        key = (position.ledger_id, position.entry_id)
        if part.until is None:
            self._state.large.removeKey(key)
        else:
            text = _outside_to_json(_OutsideBucket((position,), True, part, is_delivered=True))
            self._state.large.updateValue(key, (text,))


def open_folder(folder: str, source: TopicPartition, query_id: str, used: Iterable[int]) -> FolderStorage:
    """The buckets of one query's topic partition, below a folder for all.

    Args:
        used: those that the query's record names.
    """
    return FolderStorage(bucket_folder(folder, source, query_id), used, shared_bucket_folder(folder, source))


def bucket_folder(folder: str, source: TopicPartition, query_id: str) -> str:
    return shared_bucket_folder(f"{folder.rstrip('/')}/{query_id}", source)


def shared_bucket_folder(folder: str, source: TopicPartition) -> str:
    """Return the folder in which earlier releases, which did not tell queries apart, kept a topic
    partition's buckets.
    """
    name = join_partition(source.topic, source.partition)
    return f"{folder.rstrip('/')}/{name.rpartition('/')[2]}-{zlib.crc32(name.encode()):08x}"


def _query_id() -> str:
    """The id that Spark gave this task's query; it belongs to the checkpoint."""
    from pyspark import TaskContext

    context = TaskContext.get()
    found = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
    if not found:
        raise SetupError("Spark did not tell the query's id, by which its folder of delayed messages is named")
    return str(found)


def _read_value(state: ValueState) -> str | None:
    found = state.get()
    return None if found is None else str(found[0])


@dataclass(frozen=True)
class _OutsideBucket:
    """The delayed messages whose bytes ``parts`` holds: a large message's chunks, or one entry.

    ``part`` is what of that entry came, None of a large message. It stays when it was delivered,
    since the rest may come with a later range. ``key``: see ``Assembled``.
    """

    positions: tuple[Position, ...]
    is_held: bool
    part: BatchRange | None = None
    is_delivered: bool = False
    key: ChunkedMessageKey | None = None


def _outside_to_json(one: _OutsideBucket) -> str:
    part = None if one.part is None else asdict(one.part)
    data = {"positions": places(one.positions), "held": one.is_held, "part": part}
    key = None if one.key is None else asdict(one.key)
    return json.dumps({"version": _LARGE_VERSION, **data, "delivered": one.is_delivered, "key": key})


def _outside_from_json(text: str) -> _OutsideBucket:
    return parse_stored(text, "delayed large messages", _outside_from_dict, _LARGE_VERSION)


def _outside_from_dict(data: dict[str, Any], version: int) -> _OutsideBucket:
    """Version 1 knew no parts, version 2 no key."""
    positions = tuple(map(_position, stored(list[list[int]], data["positions"])))
    if not positions:
        raise ValueError("a message without chunks")
    is_held = stored(bool, data["held"])
    if version == 1:
        return _OutsideBucket(positions, is_held)
    part, is_delivered = stored(BatchRange | None, data["part"]), stored(bool, data["delivered"])
    key = stored(ChunkedMessageKey | None, data["key"]) if version > 2 else None
    return _OutsideBucket(positions, is_held, part, is_delivered, key)


def _position(place: list[int]) -> Position:
    ledger_id, entry_id = place
    return Position(ledger_id, entry_id)


def _outputs(tracker: DelayedTracker) -> dict[str, Position]:
    """The outputs beside the table."""
    return {name: mark for name, mark in tracker.outputs.items() if name != TABLE}


def _frames(frames: bytes, ends: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Array:
    """Each frame as a value, without a copy."""
    offsets = np.zeros(len(ends) + 1, dtype=np.int32)
    offsets[1:] = ends
    return pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(frames)])


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches: each that comes out costs much more than a message in it."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= _TOGETHER_BYTES:
            yield _joined(held)
            held, size = [], 0
    if held:
        yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _together(batch: pa.RecordBatch) -> Iterator[bytes]:
    """The frames of rows that all have one, joined up to a bundle's size."""
    ends = frame_sizes(batch).cumsum()
    start = 0
    while start < batch.num_rows:
        before = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + _TOGETHER_BYTES, "right")))
        yield b"".join(batch.column(3).slice(start, end - start).to_pylist())
        start = end
