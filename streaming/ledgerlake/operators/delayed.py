"""Stores the delayed messages of one topic partition in one micro-batch, and releases those that
are due.

State beside that of large messages:

    index      the record of all buckets, JSON with a version (``delay.bucket``)
    snapshots  (bucket, number) -> a bucket's metadata, its directory of blocks, or a block of
               segments with the delayed entries in them (``bucket_storage``)
    separate   (ledger, entry) -> a message whose bytes are in ``parts`` and not in a segment: a
               large message, with the position of its last chunk as the key, or an entry that a
               range cut in two. JSON with a version (``separately_stored``)

and the variables of cancels, schedules and pauses (``operators.controls``).

An entry is stored once, in a segment with its neighbours in time; merging buckets moves it. With
``reread`` only its position is stored, and the entry is read from the topic when it is due. An
entry keeps its bytes in ``parts`` all the same if a range begins or ends inside it.

A large message that was spilled or completed by its marker has no chunks in ``parts``. It is read
from the topic when it arrives. So without ``reread`` no delayed message needs the topic, however
long its producer delays it.

A micro-batch of a pipeline releases the first ``MOST_DUE`` messages of a topic partition, and up to
a row more. The others stay due, and the next micro-batch takes them: so plain messages do not wait
until a million delayed ones are written.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ledgerlake.assembly.assembler import Rejected
from ledgerlake.decode.split import entries_of, read_delayed
from ledgerlake.delay.bucket import IndexRecord, record_from_json, record_to_json
from ledgerlake.delay.due_times import DueSpan, DueTimes
from ledgerlake.delay.segment import (
    INDEX_SCHEMA,
    are_until,
    index_rows,
    key_columns,
)
from ledgerlake.delay.tracker import DelayedTracker
from ledgerlake.errors import CorruptEntryError
from ledgerlake.operators.bucket_folders import open_folder, query_id_of_task
from ledgerlake.operators.bucket_storage import FolderStorage, StateStorage
from ledgerlake.operators.controls import Controls
from ledgerlake.operators.due_outcomes import DueOutcomes, Release, combined
from ledgerlake.operators.outcome_digest import Tally
from ledgerlake.operators.outcome_types import RejectedPositions
from ledgerlake.operators.repeating import Repeated, RepeatingMessages
from ledgerlake.operators.schedule_events import Scheduled
from ledgerlake.operators.schedule_state import ScheduleState
from ledgerlake.operators.scheduled import may_repeat
from ledgerlake.operators.separately_stored import (
    SeparatelyStored,
    SeparateMessages,
)
from ledgerlake.reasons import (
    CHUNK_TRIMMED,
    DELAYED_KNOWN,
    DELAYED_TRIMMED,
    MALFORMED_MARKER,
    Reason,
)
from ledgerlake.schedules.cancels import (
    Cancels,
)
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray
    from pyspark.sql.streaming.stateful_processor import ValueState

    from ledgerlake.assembly.assembler import Entry
    from ledgerlake.decode.messages import BatchRange, TopicPartition
    from ledgerlake.operators.outcome_types import Outcome
    from ledgerlake.operators.separately_stored import StoredEntries
    from ledgerlake.operators.stage_rows import DelayedLargeMessage
    from ledgerlake.operators.state_variables import StateVariables
    from ledgerlake.options.delay_options import DelayOptions

TABLE = "table"
TOPIC = "topic"

# When the messages of buckets are due, so that a worker process reads the metadata of a bucket
# once. Buckets never change, and their ids are random.
_due_times: dict[int, DueTimes] = {}
_MOST_KNOWN_BUCKETS = 1000


@dataclass(frozen=True)
class DelayedSummary:
    """The delayed messages of a topic partition in numbers. ``oldest_to_reread`` is the first entry
    whose bytes only the topic has; ``more_due`` tells that the next micro-batch is to release more;
    ``left`` is the tally of messages that left the index, ``waited`` of the ones among them that
    had waited before the micro-batch.
    """

    count: int = 0
    next_due_ms: int | None = None
    oldest_to_reread: Position | None = None
    due_spans: list[DueSpan] = field(default_factory=list)
    more_due: bool = False
    left: Tally = field(default_factory=Tally)
    waited: Tally = field(default_factory=Tally)


class DelayedState:
    """The state variables of delayed messages."""

    def __init__(self, variables: StateVariables) -> None:
        self.index = variables.getValueState("index", "record string")
        self.snapshots = variables.getMapState(
            "snapshots", "bucket_id bigint, number int", "snapshot binary"
        )
        self.separate = variables.getMapState(
            "separate", "ledger_id bigint, entry_id bigint", "positions string"
        )
        self.cancels = variables.getValueState("cancels", "cancels string")
        self.schedules = ScheduleState(variables)


class DelayedMessages:
    """The delayed messages of one topic partition; see the module. The index is opened when it is
    first needed.

    Args:
        read_chunks: reads the chunks of a large message from the topic, as
            ``decode.large.read_chunks`` does.
    """

    def __init__(
        self,
        source: TopicPartition,
        state: DelayedState,
        options: DelayOptions,
        kept_entries: StoredEntries,
        read_chunks: Callable[[DelayedLargeMessage], Iterator[Entry]],
    ) -> None:
        self._source = source
        self._state = state
        self._options = options
        self._kept_entries = kept_entries
        self._read_chunks = read_chunks
        self.controls = Controls(state.cancels, state.schedules, options.repetition_limit)
        self._separate = SeparateMessages(state.separate, kept_entries)
        self._tracker: DelayedTracker | None = None
        self._known: list[tuple[Position, Entry | None]] = []
        self._large_to_read: list[DelayedLargeMessage] = []
        self._rejected: list[RejectedPositions] = []
        self._not_added: set[Position] = set()
        # Of messages that left the index: those that had waited before the micro-batch, and its
        # own.
        self._waited = self._own = Tally()
        self._cutoff_ms = 0
        self._after = AFTER_ALL

    @cached_property
    def _stored_record(self) -> str | None:
        return _read_value(self._state.index)

    def add(self, frames: bytes) -> None:
        """Add the entries of a ``delayed`` piece (see ``decode.split``)."""
        delayed = read_delayed(frames)
        frame_column = _frames(frames, delayed.frame_ends)
        if self._options.reread:
            frame_column = _of_repeating(frame_column)
        keys = [
            pa.array(column) for column in (delayed.due_ms, delayed.ledger_ids, delayed.entry_ids)
        ]
        repeated = self._open().add(
            pa.RecordBatch.from_arrays([*keys, frame_column], schema=INDEX_SCHEMA)
        )
        if repeated.num_rows:
            entries = entries_of(frames)
            ids = zip(repeated.column(1).to_pylist(), repeated.column(2).to_pylist(), strict=True)
            positions = [Position(ledger_id, entry_id) for ledger_id, entry_id in ids]
            self._known += [(position, entries[position]) for position in positions]
            self._not_added.update(positions)

    def add_large(self, message: DelayedLargeMessage) -> None:
        """Add a complete large message. If its chunks are not kept, ``release`` reads them from the
        topic.
        """
        if message.bytes_kept:
            self._add_kept(message)
        else:
            self._large_to_read.append(message)

    def _add_kept(self, message: DelayedLargeMessage) -> None:
        last = message.positions[-1]
        if not self._take_place(last, message.deliver_ms):
            self._known += [
                (position, self._kept_entries.take(position)) for position in message.positions
            ]
            return
        if message.schedule_id is not None:
            self.controls.add_large(
                Scheduled(
                    message.schedule_id, message.stands_at, message.stored_ms, message.deliver_ms
                ),
                last,
            )
        if self._options.reread:
            for position in message.positions:
                self._kept_entries.drop(position)
        bytes_kept = not self._options.reread
        self._separate.store(
            last,
            SeparatelyStored(message.positions, bytes_kept, message.stands_at, key=message.key),
        )

    def reject_known(self, message: DelayedLargeMessage) -> None:
        """Reject a complete large message. Some of its chunks were refused."""
        for position in message.positions:
            is_refused = self._kept_entries.is_refused(position)
            self._known.append(
                (position, None if is_refused else self._kept_entries.take(position))
            )

    def _add_large_to_read(self, cutoff_ms: int) -> None:
        for message in self._large_to_read:
            try:
                self._keep_chunks(message)
            except CorruptEntryError as error:
                # A message that is due at once is not lost with the state of an earlier run (see
                # ``table.repeated_rejects``).
                is_lost = error.reason == CHUNK_TRIMMED and message.deliver_ms > cutoff_ms
                self.reject_large(message, DELAYED_TRIMMED if is_lost else error.reason)
            else:
                self._add_kept(message)

    def _keep_chunks(self, message: DelayedLargeMessage) -> None:
        """Read the chunks of a large message from the topic, and keep them.

        Raises:
            CorruptEntryError: they are no message, or one of them belongs to another delayed
                message: a marker may list anything. Nothing was changed.
        """
        kept: list[Position] = []
        try:
            for position, entry in zip(message.positions, self._read_chunks(message), strict=True):
                if not self._kept_entries.put(position, bytes(entry)):
                    raise CorruptEntryError(
                        "one of its chunks waits with another message", reason=MALFORMED_MARKER
                    )
                kept.append(position)
        except CorruptEntryError:
            for position in kept:
                self._kept_entries.drop(position)
            raise

    def reject_large(self, message: DelayedLargeMessage, reason: Reason) -> None:
        """Reject a complete large message whose chunks must be read again."""
        self._rejected.append(RejectedPositions(reason, message.known))

    def add_partial(self, position: Position, frame: bytes, batch_range: BatchRange) -> None:
        """Add an entry that is partly in the range; its frame is kept, also
        with ``reread``.

        A later range may bring the rest of the entry. If the earlier messages are still delayed,
        the rest joins them. If those have left, the rest waits as they did, until the stream has
        read what may cancel it. If another message waits at its position, it is a reject.
        """
        earlier = self._separate.load(position)
        if earlier is None:
            is_added = self._add_part(position, frame, batch_range)
        else:
            kept = self._kept_entries.get(position) or b""
            is_added = earlier.is_continued_by(batch_range) and entries_of(kept) == entries_of(
                frame
            )
            if is_added:
                self._separate.store(position, earlier.joined_with(batch_range))
        if not is_added:
            self._known += entries_of(frame).items()
            self._not_added.add(position)

    def _add_part(self, position: Position, frame: bytes, batch_range: BatchRange) -> bool:
        if not self._kept_entries.put(position, frame):
            return False
        if not self._open().add_part(int(read_delayed(frame).due_ms[0]), position):
            self._kept_entries.drop(position)
            return False
        self._separate.store(position, SeparatelyStored((position,), True, position, batch_range))
        return True

    def _take_place(self, position: Position, due_ms: int) -> bool:
        """Add a large message to the index; return False if another one waits at its position. The
        index knows the messages of earlier micro-batches only, and ``separate`` this one's.
        """
        if self._separate.load(position) is not None:
            return False
        return (
            not self._open()
            .add(index_rows([(due_ms, position.ledger_id, position.entry_id)]))
            .num_rows
        )

    def release(
        self, clock_ms: int | None, after: Position = AFTER_ALL, end: Position = AFTER_ALL
    ) -> Iterator[Outcome | Cancels]:
        """Yield the messages that are due by the time of the micro-batch, in order, or the first of
        them (see the module). If something is due and cancels are in force, they come before the
        messages.

        Args:
            after, end: the range of the micro-batch begins behind the one, and goes up to the
            other.

        Raises:
            BrokerError, TransportError: chunks had to be read again and could not.
        """
        controls = self.controls
        cutoff_ms = self._cutoff_ms = clock_ms or 0
        self._after = after
        self._add_large_to_read(cutoff_ms)
        yield from self._rejected
        if self._known:
            yield Rejected(DELAYED_KNOWN, self._known)
        if self._tracker is None and self._stored_record is None and not controls.events.pauses_all:
            return
        tracker = self._open()
        if after < end:
            tracker.forget_marks_beyond(after)
        next_due_ms = tracker.next_due_ms
        is_due = next_due_ms is not None and next_due_ms <= cutoff_ms
        if not (is_due or controls.has_new):
            return
        yield from controls.apply(tracker.last_due_ms, self._not_added)
        if is_due:
            if len(controls.cancels):
                yield controls.cancels
            delivered_ms = max(cutoff_ms, int(time.time() * 1000))
            release = Release(delivered_ms, _outputs(tracker), clock_ms)
            outcomes = DueOutcomes(self._separate, self._kept_entries, controls.schedules, release)
            repeating = RepeatingMessages(controls.schedules, cutoff_ms, tracker)
            due = combined(tracker.take_due(cutoff_ms, self._options.most_due))
            yield from outcomes.in_order(self._tallied(repeating.in_order(due)))
        controls.save(tracker.next_due_ms, cutoff_ms)

    def _tallied(
        self, due: Iterable[pa.RecordBatch | Repeated | Rejected]
    ) -> Iterator[pa.RecordBatch | Repeated | Rejected]:
        """Yield what leaves the index, and count it."""
        for part in due:
            keys = _keys(part)
            has_waited = are_until(keys[1], keys[2], self._after)
            self._waited += Tally.of(*keys[:, has_waited])
            self._own += Tally.of(*keys[:, ~has_waited])
            yield part

    def save(self) -> DelayedSummary:
        """Store the messages that have arrived as parts of buckets, and the record of all buckets;
        return how many messages are delayed, and when the next one is due.
        """
        if self._tracker is None:
            return DelayedSummary()
        if self._options.reread:
            self._tracker.move_reread_from()
        record = record_to_json(self._tracker.save())
        if record != self._stored_record:
            self._state.index.update((record,))
        next_due_ms = self._tracker.next_due_ms
        return DelayedSummary(
            self._tracker.count,
            next_due_ms,
            self._oldest_to_reread(self._tracker),
            due_spans=self._due_spans(self._tracker),
            left=self._waited + self._own,
            waited=self._waited,
            more_due=next_due_ms is not None and next_due_ms <= self._cutoff_ms,
        )

    @staticmethod
    def _due_spans(tracker: DelayedTracker) -> list[DueSpan]:
        if len(_due_times) > _MOST_KNOWN_BUCKETS:
            _due_times.clear()
        return tracker.due_spans(_due_times)

    def _oldest_to_reread(self, tracker: DelayedTracker) -> Position | None:
        """Return the first entry that must be read again when it is due; of a large message, that
        is its first chunk. Without ``reread`` there is none.
        """
        if not self._options.reread:
            return None
        positions = (tracker.reread_from, self._separate.first_to_reread())
        return min((position for position in positions if position is not None), default=None)

    def _open(self) -> DelayedTracker:
        if self._tracker is None:
            record = record_from_json(self._stored_record) if self._stored_record else IndexRecord()
            self._tracker = DelayedTracker(self._storage(record), self._options.settings, record)
            self._tracker.add_output(TABLE, BEFORE_ALL)
            # What waited when the delivery began is what the record has: each run since has this
            # option, also without ``[deliver]``, so the first one that opens the record adds it.
            if self._options.republish is not None:
                self._tracker.add_output(
                    TOPIC, BEFORE_ALL if self._options.republish == "earliest" else record.reached
                )
        return self._tracker

    def _storage(self, record: IndexRecord) -> StateStorage | FolderStorage:
        if self._options.folder is None:
            return StateStorage(self._state.snapshots)
        used = {bucket.bucket_id: bucket.segment for bucket in record.buckets}
        return open_folder(self._options.folder, self._source, query_id_of_task(), used)


def _keys(due: pa.RecordBatch | Repeated | Rejected) -> NDArray[np.int64]:
    """Return when messages that leave the index were due, and their positions, as three rows."""
    if isinstance(due, pa.RecordBatch):
        return np.array(key_columns(due))
    if isinstance(due, Repeated):
        keys = [(due.delivery.due_ms, due.position.ledger_id, due.position.entry_id)]
    else:
        keys = [(0, position.ledger_id, position.entry_id) for position, _ in due.entries]
    return np.array(keys, dtype=np.int64).reshape(-1, 3).T


def _read_value(state: ValueState) -> str | None:
    row = state.get()
    return None if row is None else str(row[0])


def _outputs(tracker: DelayedTracker) -> dict[str, Position]:
    """Return the mark-delete positions of the outputs beside the table."""
    return {name: position for name, position in tracker.outputs.items() if name != TABLE}


def _frames(frames: bytes, ends: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Array:
    """Return each frame as a value, without a copy."""
    offsets = np.zeros(len(ends) + 1, dtype=np.int32)
    offsets[1:] = ends
    return pa.Array.from_buffers(
        pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(frames)]
    )


def _of_repeating(frames: pa.Array) -> pa.Array:
    """Return the frames of messages that repeat, null for others."""
    if not len(frames) or not may_repeat(frames.buffers()[2]):
        return pa.nulls(len(frames), pa.binary())
    return pa.array(
        [frame if may_repeat(frame) else None for frame in frames.to_pylist()], pa.binary()
    )
