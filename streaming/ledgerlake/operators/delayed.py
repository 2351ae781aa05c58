"""Delayed messages of one topic partition in one micro-batch: messages that arrive are stored,
messages that are due come out.

State beside that of large messages:

    index      the record of all buckets, JSON with a version (``delay.bucket``)
    snapshots  (bucket, number) -> a bucket's metadata or one of its segments, with the entries that wait in it
    large      (ledger, entry) -> a message whose bytes are in ``parts`` and not in a segment, JSON with a version
               (``unpacked``). The key of a large message is its last chunk
    cancels    what is not to be delivered after all, JSON with a version (``delay.cancels``)

An entry is stored once, in a segment with its neighbours in time; merging buckets moves it. With
``reread`` only its position is stored, and the entry is read from the topic when it is due.

A large message whose chunks are not in ``parts`` (they were spilled, or a marker lists them) is read from
the topic when it comes to wait. So without ``reread`` nothing that waits needs the topic, however long
its producer lets it wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from ledgerlake.assembly.assembler import Assembled, DueEntries, DuePositions, KeptEntries, Rejected
from ledgerlake.assembly.rules import MALFORMED_MARKER
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
from ledgerlake.delay.segment import INDEX_SCHEMA, frame_sizes, index_rows
from ledgerlake.delay.tracker import DelayedTracker
from ledgerlake.errors import CorruptEntryError
from ledgerlake.operators.bucket_folders import open_folder, query_id_of_task
from ledgerlake.operators.bucket_storage import FolderStorage, StateStorage
from ledgerlake.operators.unpacked import UnpackedMessage, unpacked_from_json, unpacked_to_json
from ledgerlake.source.loss import DELAYED_TRIMMED
from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql.streaming.stateful_processor import MapState, StatefulProcessorHandle, ValueState

    from ledgerlake.assembly.assembler import Entry, Outcome
    from ledgerlake.decode.messages import BatchRange, TopicPartition
    from ledgerlake.operators.rows import Waits
    from ledgerlake.options.delay_options import DelayOptions

TABLE = "table"
TOPIC = "topic"

# The most of one row of due messages.
_ROW_BYTES = 1024 * 1024
_ROW_POSITIONS = 1000

# The reason of an entry whose position was added before: the topic was created anew under its name,
# and delayed messages of the former topic have the same ids.
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


class StoredEntries(KeptEntries, Protocol):
    """Entries in state, by position."""

    def put(self, position: Position, entry: bytes) -> None: ...

    def has(self, position: Position) -> bool: ...


class DelayedMessages:
    """See the module. The index is opened when it is first needed.

    Args:
        read_chunks: reads the chunks of a large message from the topic, as ``decode.large.read_chunks`` does.
    """

    def __init__(
        self,
        source: TopicPartition,
        state: DelayedState,
        options: DelayOptions,
        parts: StoredEntries,
        read_chunks: Callable[[Waits], Iterator[Entry]],
    ) -> None:
        self._source = source
        self._state = state
        self._options = options
        self._parts = parts
        self._read_chunks = read_chunks
        self._stored_record = _read_value(state.index)
        self._tracker: DelayedTracker | None = None
        self._new_cancels: list[Cancel] = []
        self._due_partial: list[tuple[Position, BatchRange]] = []
        self._repeated: list[tuple[Position, Entry | None]] = []
        self._unheld: list[Waits] = []
        self._refused: list[Assembled] = []

    def add(self, frames: bytes) -> None:
        """Add the entries of a ``delayed`` piece (see ``decode.split``)."""
        delayed = read_delayed(frames)
        no_frames = pa.nulls(len(delayed.due_ms), pa.binary())
        frame_column = no_frames if self._options.reread else _frames(frames, delayed.frame_ends)
        keys = [pa.array(column) for column in (delayed.due_ms, delayed.ledger_ids, delayed.entry_ids)]
        repeated = self._open().add(pa.RecordBatch.from_arrays([*keys, frame_column], schema=INDEX_SCHEMA))
        if repeated.num_rows:
            entries = entries_of(frames)
            ids = zip(repeated.column(1).to_pylist(), repeated.column(2).to_pylist(), strict=True)
            positions = [Position(ledger_id, entry_id) for ledger_id, entry_id in ids]
            self._repeated += [(position, entries[position]) for position in positions]

    def add_large(self, message: Waits) -> None:
        """Add a complete large message; its chunks are in ``parts``, or ``release`` reads them again."""
        if message.held:
            self._add_held(message)
        else:
            self._unheld.append(message)

    def _add_held(self, message: Waits) -> None:
        last = message.positions[-1]
        is_known = self._load_unpacked(last.ledger_id, last.entry_id) is not None
        if is_known or self._open().add(index_rows([(message.deliver_ms, last.ledger_id, last.entry_id)])).num_rows:
            self._repeated += [(position, self._parts.take(position)) for position in message.positions]
            return
        if self._options.reread:
            for position in message.positions:
                self._parts.drop(position)
        self._store_unpacked(last, UnpackedMessage(message.positions, not self._options.reread, key=message.key))

    def _add_unheld(self, cutoff_ms: int) -> None:
        for message in self._unheld:
            try:
                self._read_into_parts(message)
            except CorruptEntryError as error:
                # A message that is due is not lost with the state of an earlier run (see ``table.additions``).
                is_lost = error.reason == "chunk_trimmed" and message.deliver_ms > cutoff_ms
                self.refuse_large(message, DELAYED_TRIMMED if is_lost else error.reason)
            else:
                self._add_held(message)

    def _read_into_parts(self, message: Waits) -> None:
        """Read the chunks of a large message from the topic into ``parts``.

        Raises:
            CorruptEntryError: they are no message, or one of them waits with another message already:
                a marker may list anything. Nothing was changed.
        """
        kept: list[Position] = []
        try:
            for position, entry in zip(message.positions, self._read_chunks(message), strict=True):
                if self._parts.has(position):
                    raise CorruptEntryError("one of its chunks waits with another message", reason=MALFORMED_MARKER)
                self._parts.put(position, bytes(entry))
                kept.append(position)
        except CorruptEntryError:
            for position in kept:
                self._parts.drop(position)
            raise

    def refuse_large(self, message: Waits, reason: str) -> None:
        """Reject a complete large message whose chunks must be read again."""
        refused = Assembled(message.positions, None, key=message.key, refused=reason, known=message.known)
        self._refused.append(refused)

    def add_partial(self, position: Position, frame: bytes, part: BatchRange) -> None:
        """Add an entry of which only some messages belong to the range; its frame is in ``parts``
        also with ``reread``.

        A later range may bring more messages of the same entry. If the earlier ones are still
        delayed, the new ones join them. If those were delivered, the new ones are due at once.
        """
        earlier = self._load_unpacked(position.ledger_id, position.entry_id)
        if earlier is not None and earlier.is_delivered:
            self._due_partial.append((position, part))
            return
        if earlier is None:
            due_ms = int(read_delayed(frame).due_ms[0])
            if self._open().add(index_rows([(due_ms, position.ledger_id, position.entry_id)])).num_rows:
                # A release that stored such entries whole has it already.
                self._parts.drop(position)
                return
        joined = part if earlier is None or earlier.part is None else replace(part, after=earlier.part.after)
        self._store_unpacked(position, UnpackedMessage((position,), True, joined))

    def cancel(self, cancel: Cancel) -> None:
        self._new_cancels.append(cancel)

    def release(self, due_ms: int | None) -> Iterator[Outcome | Cancels]:
        """Yield the messages that are due by ``due_ms``, in order. If something is due and cancels
        are in force, they come before the messages.

        Raises:
            BrokerError, TransportError: chunks had to be read again and could not.
        """
        cutoff_ms = due_ms or 0
        self._add_unheld(cutoff_ms)
        yield from self._refused
        if self._tracker is None and self._stored_record is None:
            return
        tracker = self._open()
        if self._repeated:
            yield Rejected(DELAYED_KNOWN, self._repeated)
        stored_cancels = _read_value(self._state.cancels)
        cancels = cancels_from_json(stored_cancels) if stored_cancels else Cancels()
        refused = self._add_cancels(cancels, tracker.last_due_ms)
        if refused:
            positions = dict.fromkeys(cancel.position for cancel in refused)
            yield Rejected(CANCEL_REFUSED, [(position, None) for position in positions])
        next_due_ms = tracker.next_due_ms
        if self._due_partial or (next_due_ms is not None and next_due_ms <= cutoff_ms):
            if len(cancels):
                yield cancels
            delivered_ms = max(cutoff_ms, int(time.time() * 1000))
            for position, part in self._due_partial:
                yield from self._take_partial(position, part, delivered_ms, _outputs(tracker))
            for batch in _combine(tracker.take_due(cutoff_ms)):
                yield from self._outcomes(batch, delivered_ms, tracker)
        self._store_cancels(cancels.needed_after(cutoff_ms), stored_cancels)

    def save(self) -> DelayedSummary:
        """Store the messages that have arrived as parts of buckets, and the record of all buckets;
        return how many messages are delayed, and when the next one is due.
        """
        if self._tracker is None:
            return DelayedSummary()
        record = record_to_json(self._tracker.save())
        if record != self._stored_record:
            self._state.index.update((record,))
        return DelayedSummary(self._tracker.count, self._tracker.next_due_ms, self._oldest(self._tracker))

    def _oldest(self, tracker: DelayedTracker) -> Position | None:
        """Return the first entry that must be read again when it is due; for a large message that is
        its first chunk. Without ``reread`` there is none, unless an earlier release has let one wait so.
        """
        positions = [tracker.oldest] if self._options.reread else []
        if self._state.large.exists():
            unpacked = [unpacked_from_json(value[0]) for _, value in self._state.large.iterator()]
            positions += [message.positions[0] for message in unpacked if not message.is_held]
        return min((position for position in positions if position is not None), default=None)

    def _open(self) -> DelayedTracker:
        if self._tracker is None:
            record = record_from_json(self._stored_record) if self._stored_record else Record()
            self._tracker = DelayedTracker(self._storage(record), self._options.settings, record)
            self._tracker.add_output(TABLE, BEFORE_ALL)
            if self._options.republish is None:
                self._tracker.remove_output(TOPIC)
            else:
                self._tracker.add_output(TOPIC, BEFORE_ALL if self._options.republish == "earliest" else record.reached)
        return self._tracker

    def _storage(self, record: Record) -> StateStorage | FolderStorage:
        if self._options.folder is None:
            return StateStorage(self._state.snapshots)
        used = [bucket.bucket_id for bucket in record.buckets]
        return open_folder(self._options.folder, self._source, query_id_of_task(), used)

    def _add_cancels(self, cancels: Cancels, until_ms: int | None) -> list[Cancel]:
        """Add cancels; return those that are refused because there are too many. If no message is
        delayed, nothing can be cancelled.
        """
        if until_ms is None:
            return []
        refused: list[Cancel] = []
        count, target_bytes = len(cancels), cancels.target_bytes
        for cancel in self._new_cancels:
            count, target_bytes = count + 1, target_bytes + len(cancel.target.encode())
            if refused or count > MOST_CANCELS or target_bytes > MOST_CANCEL_BYTES:
                refused.append(cancel)
            else:
                cancels.add(replace(cancel, until_ms=until_ms))
        return refused

    def _store_cancels(self, cancels: list[Cancel], stored: str | None) -> None:
        text = cancels_to_json(cancels) if cancels else None
        if text == stored:
            return
        if text is None:
            self._state.cancels.clear()
        else:
            self._state.cancels.update((text,))

    def _outcomes(self, batch: pa.RecordBatch, delivered_ms: int, tracker: DelayedTracker) -> Iterator[Outcome]:
        outputs = _outputs(tracker)
        has_frame = batch.column(3).is_valid().to_pylist()
        for is_packed, group in groupby(range(batch.num_rows), has_frame.__getitem__):
            rows = list(group)
            messages = batch.slice(rows[0], len(rows))
            if is_packed:
                yield from (DueEntries(frames, delivered_ms, outputs) for frames in _join_frames(messages))
            else:
                yield from self._take_unpacked(messages, delivered_ms, outputs)

    def _take_unpacked(
        self, batch: pa.RecordBatch, delivered_ms: int, outputs: dict[str, Position]
    ) -> Iterator[Outcome]:
        """Yield messages whose bytes are not in their segment: large ones, partial entries, and
        those that must be read from the topic.
        """
        to_reread: list[Position] = []
        for ledger_id, entry_id in zip(batch.column(1).to_pylist(), batch.column(2).to_pylist(), strict=True):
            message = self._load_unpacked(ledger_id, entry_id)
            if message is None:
                to_reread.append(Position(ledger_id, entry_id))
                continue
            positions = message.positions
            if message.part is not None:
                yield from self._take_partial(positions[0], message.part, delivered_ms, outputs)
                continue
            entries = map(self._parts.take, positions) if message.is_held else None
            known = () if message.is_held else positions
            yield Assembled(
                positions, entries, delivered_ms=delivered_ms, outputs=outputs, key=message.key, known=known
            )
            self._state.large.removeKey((ledger_id, entry_id))
        for start in range(0, len(to_reread), _ROW_POSITIONS):
            yield DuePositions(to_reread[start : start + _ROW_POSITIONS], delivered_ms, outputs)

    def _take_partial(
        self, position: Position, part: BatchRange, delivered_ms: int, outputs: dict[str, Position]
    ) -> Iterator[Outcome]:
        frame = self._parts.take(position)
        if frame is not None:
            yield DueEntries(frame, delivered_ms, outputs, part)
        if part.until is None:
            self._state.large.removeKey((position.ledger_id, position.entry_id))
        else:
            self._store_unpacked(position, UnpackedMessage((position,), True, part, is_delivered=True))

    def _load_unpacked(self, ledger_id: int, entry_id: int) -> UnpackedMessage | None:
        row = self._state.large.getValue((ledger_id, entry_id))
        return None if row is None else unpacked_from_json(row[0])

    def _store_unpacked(self, position: Position, message: UnpackedMessage) -> None:
        self._state.large.updateValue((position.ledger_id, position.entry_id), (unpacked_to_json(message),))


def _read_value(state: ValueState) -> str | None:
    row = state.get()
    return None if row is None else str(row[0])


def _outputs(tracker: DelayedTracker) -> dict[str, Position]:
    """Return the mark-delete positions of the outputs beside the table."""
    return {name: mark for name, mark in tracker.outputs.items() if name != TABLE}


def _frames(frames: bytes, ends: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Array:
    """Return each frame as a value, without a copy."""
    offsets = np.zeros(len(ends) + 1, dtype=np.int32)
    offsets[1:] = ends
    return pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(frames)])


def _combine(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in fewer batches: a batch costs much more than a message in it."""
    buffer: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        buffer.append(batch)
        size += batch.nbytes
        if size >= _ROW_BYTES:
            yield _concat(buffer)
            buffer, size = [], 0
    if buffer:
        yield _concat(buffer)


def _concat(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _join_frames(batch: pa.RecordBatch) -> Iterator[bytes]:
    """Yield the frames of rows that all have one, joined up to the size of one row."""
    ends = frame_sizes(batch).cumsum()
    start = 0
    while start < batch.num_rows:
        before = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + _ROW_BYTES, "right")))
        yield b"".join(batch.column(3).slice(start, end - start).to_pylist())
        start = end
