"""Stores the delayed messages of one topic partition in one micro-batch, and releases those that
are due.

State beside that of large messages:

    index      the record of all buckets, JSON with a version (``delay.bucket``)
    snapshots  (bucket, number) -> a bucket's metadata, its directory of blocks, or a block of
               segments with the delayed entries in them (``bucket_storage``)
    separate   (ledger, entry) -> a message whose bytes are in ``parts`` and not in a segment: a
               large message, with the position of its last chunk as the key, or an entry that a
               range cut in two. JSON with a version (``separately_stored``)
    cancels    the cancels that are still needed, and marks of positions, JSON with a version
               (``schedules.cancels``)

and those of schedules by id (``operators.schedule_state``).

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

import sys
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from ledgerlake.assembly.assembler import Assembled, KeptEntries, Rejected
from ledgerlake.decode.split import entries_of, read_delayed
from ledgerlake.delay.bucket import Record, record_from_json, record_to_json
from ledgerlake.delay.due_times import DueSpan, DueTimes
from ledgerlake.delay.segment import (
    INDEX_SCHEMA,
    are_until,
    frame_sizes,
    index_rows,
    key_at,
    key_columns,
)
from ledgerlake.delay.tracker import DelayedTracker
from ledgerlake.errors import CorruptEntryError
from ledgerlake.operators.bucket_folders import open_folder, query_id_of_task
from ledgerlake.operators.bucket_storage import FolderStorage, StateStorage
from ledgerlake.operators.outcome_digest import Tally
from ledgerlake.operators.outcome_types import DueEntries, DuePositions, RejectedPositions
from ledgerlake.operators.repeating import Repeated, RepeatingMessages
from ledgerlake.operators.schedule_events import PauseChanged, Scheduled, ScheduleEvents
from ledgerlake.operators.schedule_state import ScheduleState, StoredSchedules
from ledgerlake.operators.scheduled import may_repeat
from ledgerlake.operators.separately_stored import (
    SeparatelyStored,
    separately_stored_from_json,
    separately_stored_to_json,
)
from ledgerlake.reasons import (
    CANCEL_REFUSED,
    CANCELLED,
    CHUNK_TRIMMED,
    DELAYED_KNOWN,
    DELAYED_TRIMMED,
    MALFORMED_MARKER,
    PAUSE_REFUSED,
    REPETITION_REFUSED,
    REPLACED,
    Reason,
)
from ledgerlake.schedules.cancels import (
    MOST_CANCEL_BYTES,
    MOST_CANCELS,
    Cancel,
    Cancels,
    cancels_from_json,
    cancels_to_json,
)
from ledgerlake.schedules.schedules import (
    MarkedPositions,
    Pauses,
    Repeating,
    Schedules,
    WaitingMessage,
)
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from pyspark.sql.streaming.stateful_processor import ValueState

    from ledgerlake.assembly.assembler import Entry
    from ledgerlake.decode.messages import BatchRange, TopicPartition
    from ledgerlake.delay.segment import Key
    from ledgerlake.operators.outcome_types import Delivery, Outcome
    from ledgerlake.operators.stage_rows import DelayedLargeMessage
    from ledgerlake.operators.state_variables import StateVariables
    from ledgerlake.options.delay_options import DelayOptions

TABLE = "table"
TOPIC = "topic"

# The most bytes, or positions, of one row of due messages.
_ROW_BYTES = 1024 * 1024
_ROW_POSITIONS = 1000

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


@dataclass(frozen=True)
class _Release:
    """What the messages have in common that a micro-batch releases (see ``DueEntries``)."""

    delivered_ms: int
    outputs: dict[str, Position]
    clock_ms: int | None


class _DueRow(NamedTuple):
    """A message that left the index: its frame unless only the topic has it or it is stored
    separately, and what is said of this delivery if it repeats.
    """

    key: Key
    frame: bytes | None
    delivery: Delivery | None


class _Together:
    """What left the index one after another: messages, occurrences of those that repeat, and
    rejects of these.
    """

    def __init__(self) -> None:
        self.parts: list[pa.RecordBatch | Repeated] = []
        self.rejected: dict[Reason, list[tuple[Position, Entry | None]]] = {}
        self.size_bytes = 0
        self.has_repeated = False

    def add(self, part: pa.RecordBatch | Repeated, size_bytes: int) -> None:
        self.parts.append(part)
        self.size_bytes += size_bytes
        self.has_repeated |= isinstance(part, Repeated)

    def reject(self, rejected: Rejected) -> None:
        self.rejected.setdefault(rejected.reason, []).extend(rejected.entries)
        self.size_bytes += sum(len(entry or b"") for _, entry in rejected.entries)

    def rows(self) -> Iterator[_DueRow]:
        """Yield messages and occurrences one by one, in order."""
        for part in self.parts:
            if isinstance(part, Repeated):
                key = (part.delivery.due_ms, part.position.ledger_id, part.position.entry_id)
                yield _DueRow(key, part.frame, part.delivery)
            else:
                for time_ms, ledger_id, entry_id, frame in zip(
                    *(column.to_pylist() for column in part.columns), strict=True
                ):
                    yield _DueRow((time_ms, ledger_id, entry_id), frame, None)


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


class StoredEntries(KeptEntries, Protocol):
    """Entries in state, by position."""

    def put(self, position: Position, entry: bytes) -> bool:
        """Keep an entry; return False if it is refused."""

    def get(self, position: Position) -> bytes | None:
        """Return an entry, which stays kept; None if it is not."""


@dataclass(frozen=True)
class _KeptChunks:
    """The chunks of a message that is due. They stay kept until it is delivered: if they cannot be
    joined, they become rejects.
    """

    kept_entries: StoredEntries
    positions: tuple[Position, ...]

    def __iter__(self) -> Iterator[bytes | None]:
        return map(self.kept_entries.get, self.positions)

    def __reversed__(self) -> Iterator[bytes | None]:
        return map(self.kept_entries.get, reversed(self.positions))


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
        self.schedules = ScheduleEvents(sys.maxsize)
        self._tracker: DelayedTracker | None = None
        self._new_cancels: list[Cancel] = []
        self._due_partial: list[tuple[Position, BatchRange]] = []
        self._known: list[tuple[Position, Entry | None]] = []
        self._large_to_read: list[DelayedLargeMessage] = []
        self._rejected: list[RejectedPositions] = []
        self._not_added: set[Position] = set()
        self._not_repeated: list[Position] = []
        self._not_paused: dict[Position, None] = {}
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
            self.schedules.add(
                Scheduled(message.schedule_id, last, message.stored_ms, message.deliver_ms)
            )
        if self._options.reread:
            for position in message.positions:
                self._kept_entries.drop(position)
        bytes_kept = not self._options.reread
        self._store_separate(last, SeparatelyStored(message.positions, bytes_kept, key=message.key))

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
        the rest joins them. If those have left, the rest is due at once. If another message waits
        at its position, it is a reject.
        """
        earlier = self._load_separate(position.ledger_id, position.entry_id)
        if earlier is None or not earlier.is_continued_by(batch_range):
            is_added = self._add_first_part(position, frame, batch_range)
        elif earlier.is_delivered:
            is_added = self._kept_entries.put(position, frame)
            self._due_partial += [(position, batch_range)] if is_added else []
        else:
            is_added = entries_of(self._kept_entries.get(position) or b"") == entries_of(frame)
            if is_added:
                self._store_separate(position, earlier.joined_with(batch_range))
        if not is_added:
            self._known += entries_of(frame).items()
            self._not_added.add(position)

    def _add_first_part(self, position: Position, frame: bytes, batch_range: BatchRange) -> bool:
        if not self._kept_entries.put(position, frame):
            return False
        if not self._take_place(position, int(read_delayed(frame).due_ms[0])):
            self._kept_entries.drop(position)
            return False
        self._store_separate(position, SeparatelyStored((position,), True, batch_range))
        return True

    def _take_place(self, position: Position, due_ms: int) -> bool:
        """Add a message to the index whose bytes are not in it; return False if another one waits
        at its position. The index knows the messages of earlier micro-batches only, and
        ``separate`` this one's.
        """
        if self._load_waiting(position.ledger_id, position.entry_id) is not None:
            return False
        return (
            not self._open()
            .add(index_rows([(due_ms, position.ledger_id, position.entry_id)]))
            .num_rows
        )

    def cancel(self, cancel: Cancel) -> None:
        self._new_cancels.append(cancel)

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
        cutoff_ms = self._cutoff_ms = clock_ms or 0
        self._after = after
        self._add_large_to_read(cutoff_ms)
        yield from self._rejected
        if self._known:
            yield Rejected(DELAYED_KNOWN, self._known)
        if self._tracker is None and self._stored_record is None and not self.schedules.pauses_all:
            return
        tracker = self._open()
        if after < end:
            tracker.forget_marks_beyond(after)
        next_due_ms = tracker.next_due_ms
        is_due = bool(self._due_partial) or (next_due_ms is not None and next_due_ms <= cutoff_ms)
        if not (is_due or self._new_cancels or self.schedules.is_any):
            # Cancels and marks are as many as senders like, and only these events change or need
            # them.
            return
        stored_cancels = _read_value(self._state.cancels)
        cancels, marked, pauses = (
            cancels_from_json(stored_cancels)
            if stored_cancels
            else (Cancels(), MarkedPositions(), Pauses())
        )
        stored = _content(cancels.all, marked, pauses)
        store = StoredSchedules(self._state.schedules, marked)
        schedules = Schedules(store, marked, pauses, self._options.repetition_limit)
        has_schedules = self._apply_schedule_events(store, schedules)
        if self._not_repeated:
            yield Rejected(
                REPETITION_REFUSED, [(position, None) for position in self._not_repeated]
            )
        if self._not_paused:
            yield Rejected(PAUSE_REFUSED, [(position, None) for position in self._not_paused])
        refused = self._add_cancels(cancels, tracker.last_due_ms)
        if refused:
            positions = dict.fromkeys(cancel.position for cancel in refused)
            yield Rejected(CANCEL_REFUSED, [(position, None) for position in positions])
        if is_due:
            if len(cancels):
                yield cancels
            delivered_ms = max(cutoff_ms, int(time.time() * 1000))
            release = _Release(delivered_ms, _outputs(tracker), clock_ms)
            for position, batch_range in self._due_partial:
                yield from self._take_partial(position, batch_range, release)
            yield from self._due_outcomes(tracker, schedules, cutoff_ms, release)
        left_ms = tracker.next_due_ms
        pauses.forget_before(sys.maxsize if left_ms is None else left_ms)
        if has_schedules and not marked:
            self._state.schedules.clear()
        elif has_schedules:
            store.save_repeating()
        released_ms = cutoff_ms if left_ms is None else min(cutoff_ms, left_ms - 1)
        needed = cancels.needed_after(released_ms)
        if _content(needed, marked, pauses) != stored:
            self._store_cancels(needed, marked, pauses)

    def _due_outcomes(
        self, tracker: DelayedTracker, schedules: Schedules, cutoff_ms: int, release: _Release
    ) -> Iterator[Outcome]:
        repeating = RepeatingMessages(schedules, cutoff_ms, tracker)
        together = _Together()
        for part in repeating.in_order(
            _combine(tracker.take_due(cutoff_ms, self._options.most_due))
        ):
            if together.size_bytes >= _ROW_BYTES:
                yield from self._outcomes_of(together, release)
                together = _Together()
            keys = _keys(part)
            has_waited = are_until(keys[1], keys[2], self._after)
            self._waited += Tally.of(*keys[:, has_waited])
            self._own += Tally.of(*keys[:, ~has_waited])
            if isinstance(part, Repeated):
                together.add(part, len(part.frame))
            elif isinstance(part, Rejected):
                together.reject(part)
            else:
                messages, withheld = _without_withheld(part, schedules)
                yield from self._withheld_rejects(part, withheld)
                together.add(messages, messages.nbytes)
        yield from self._outcomes_of(together, release)

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
        positions = [tracker.reread_from]
        if self._state.separate.exists():
            separate = [
                separately_stored_from_json(value[0])
                for _, value in self._state.separate.iterator()
            ]
            positions += [message.positions[0] for message in separate if not message.bytes_kept]
        return min((position for position in positions if position is not None), default=None)

    def _open(self) -> DelayedTracker:
        if self._tracker is None:
            record = record_from_json(self._stored_record) if self._stored_record else Record()
            self._tracker = DelayedTracker(self._storage(record), self._options.settings, record)
            self._tracker.add_output(TABLE, BEFORE_ALL)
            if self._options.republish is None:
                self._tracker.remove_output(TOPIC)
            else:
                self._tracker.add_output(
                    TOPIC, BEFORE_ALL if self._options.republish == "earliest" else record.reached
                )
        return self._tracker

    def _storage(self, record: Record) -> StateStorage | FolderStorage:
        if self._options.folder is None:
            return StateStorage(self._state.snapshots)
        used = {bucket.bucket_id: bucket.segment for bucket in record.buckets}
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

    def _apply_schedule_events(self, store: StoredSchedules, schedules: Schedules) -> bool:
        """Apply the events: those of an id in the order of their messages; and block by block, so
        that each is loaded once. Return whether a message waits under an id, or did so before.
        """
        added = self.schedules.delayed_ids
        has_schedules = added > 0 or bool(schedules.marked)
        if has_schedules:
            store.begin(added)
        for event in self.schedules.in_order(store.block_of):
            if isinstance(event, PauseChanged):
                if has_schedules or event.schedule_id is None:
                    self._change_pause(schedules, event)
            elif not has_schedules:
                continue
            elif isinstance(event, Cancel):
                schedules.end(event.target, event.position, event.time_ms, CANCELLED)
            elif event.deliver_ms is None:
                schedules.end(event.schedule_id, event.position, event.time_ms, REPLACED)
            elif event.position not in self._not_added:
                repeating = (
                    None if event.rate is None else Repeating(event.deliver_ms, rate=event.rate)
                )
                message = WaitingMessage(event.position, event.time_ms, event.deliver_ms, repeating)
                if not schedules.put(event.schedule_id, message):
                    self._not_repeated.append(event.position)
        if has_schedules:
            store.save()
        return has_schedules

    def _change_pause(self, schedules: Schedules, event: PauseChanged) -> None:
        if event.resumes:
            schedules.resume(event.schedule_id, event.position, event.time_ms)
        elif not schedules.pause(event.schedule_id, event.position, event.time_ms):
            self._not_paused[event.position] = None

    def _withheld_rejects(
        self, batch: pa.RecordBatch, withheld: dict[int, Reason]
    ) -> Iterator[Outcome]:
        """Yield the rejects of due messages that are not to be delivered. A large one is read when
        the one before it was taken.

        Args:
            withheld: the reasons by row.
        """
        frames: dict[Reason, list[bytes]] = {}
        for row, reason in withheld.items():
            frame = batch.column(3)[row].as_py()
            if reason == REPETITION_REFUSED:
                # It was rejected when it arrived.
                continue
            if frame is None:
                _, ledger_id, entry_id = key_at(batch, row)
                yield self._reject_separate(reason, Position(ledger_id, entry_id))
            else:
                frames.setdefault(reason, []).append(frame)
        for reason, group in frames.items():
            yield Rejected(reason, list(entries_of(b"".join(group)).items()))

    def _reject_separate(self, reason: Reason, position: Position) -> Outcome:
        """Return the reject of a due message whose bytes are not in its segment."""
        message = self._load_waiting(position.ledger_id, position.entry_id)
        if message is None:
            return Rejected(reason, [(position, None)])
        if message.batch_range is not None:
            kept_frame = self._take_frame(position, message.batch_range)
            return Rejected(
                reason,
                [(position, None)] if kept_frame is None else [*entries_of(kept_frame).items()],
            )
        self._state.separate.removeKey((position.ledger_id, position.entry_id))
        if not message.bytes_kept:
            return RejectedPositions(reason, message.positions)
        return Rejected(
            reason, [(chunk, self._kept_entries.take(chunk)) for chunk in message.positions]
        )

    def _store_cancels(
        self, cancels: list[Cancel], marked: MarkedPositions, pauses: Pauses
    ) -> None:
        if cancels or marked or pauses.since_ms is not None:
            self._state.cancels.update((cancels_to_json(cancels, marked, pauses),))
        else:
            self._state.cancels.clear()

    def _outcomes_of(self, together: _Together, release: _Release) -> Iterator[Outcome]:
        """Yield what left the index together. If messages that repeat are among the others, as many
        as possible make one outcome: a sender can put an occurrence between any two of them.
        """
        yield from (Rejected(reason, entries) for reason, entries in together.rejected.items())
        if not together.has_repeated:
            for batch in together.parts:
                yield from self._outcomes(batch, release)
            return
        rows: list[_DueRow] = []
        for row in together.rows():
            is_separate = row.frame is None and self._load_waiting(*row.key[1:]) is not None
            if is_separate or (
                len(rows) >= _ROW_POSITIONS and any(each.frame is None for each in rows)
            ):
                yield from _due_outcome(rows, release)
                rows = []
            if is_separate:
                yield from self._take_separate(index_rows([row.key]), release)
            else:
                rows.append(row)
        yield from _due_outcome(rows, release)

    def _outcomes(self, batch: pa.RecordBatch, release: _Release) -> Iterator[Outcome]:
        has_frame = batch.column(3).is_valid().to_pylist()
        for is_packed, group in groupby(range(batch.num_rows), has_frame.__getitem__):
            rows = list(group)
            messages = batch.slice(rows[0], len(rows))
            if is_packed:
                yield from (
                    DueEntries(
                        frames, release.delivered_ms, release.outputs, clock_ms=release.clock_ms
                    )
                    for frames in _join_frames(messages)
                )
            else:
                yield from self._take_separate(messages, release)

    def _take_separate(self, batch: pa.RecordBatch, release: _Release) -> Iterator[Outcome]:
        """Yield messages whose bytes are not in their segment: large ones, partial entries, and
        those that must be read from the topic.
        """
        to_reread: list[Key] = []
        for due_ms, ledger_id, entry_id in zip(
            *(column.to_pylist() for column in batch.columns[:3]), strict=True
        ):
            message = self._load_waiting(ledger_id, entry_id)
            if to_reread and (message is not None or len(to_reread) == _ROW_POSITIONS):
                yield _due_positions(to_reread, release)
                to_reread = []
            if message is None:
                to_reread.append((due_ms, ledger_id, entry_id))
                continue
            positions = message.positions
            if message.batch_range is not None:
                yield from self._take_partial(positions[0], message.batch_range, release)
                continue
            entries = _KeptChunks(self._kept_entries, positions) if message.bytes_kept else None
            known = () if message.bytes_kept else positions
            yield Assembled(
                positions,
                entries,
                delivered_ms=release.delivered_ms,
                due_ms=due_ms,
                outputs=release.outputs,
                key=message.key,
                known=known,
                clock_ms=release.clock_ms,
            )
            self._state.separate.removeKey((ledger_id, entry_id))
            for chunk in positions if message.bytes_kept else ():
                self._kept_entries.drop(chunk)
        if to_reread:
            yield _due_positions(to_reread, release)

    def _take_partial(
        self, position: Position, batch_range: BatchRange, release: _Release
    ) -> Iterator[Outcome]:
        frame = self._take_frame(position, batch_range)
        if frame is not None:
            yield DueEntries(
                frame, release.delivered_ms, release.outputs, batch_range, release.clock_ms
            )

    def _take_frame(self, position: Position, batch_range: BatchRange) -> Entry | None:
        """Take the bytes of an entry when a part of it leaves. Its record stays if the rest is to
        come.
        """
        if batch_range.until is None:
            self._state.separate.removeKey((position.ledger_id, position.entry_id))
        else:
            self._store_separate(
                position, SeparatelyStored((position,), True, batch_range, is_delivered=True)
            )
        return self._kept_entries.take(position)

    def _load_waiting(self, ledger_id: int, entry_id: int) -> SeparatelyStored | None:
        message = self._load_separate(ledger_id, entry_id)
        return None if message is None or message.is_delivered else message

    def _load_separate(self, ledger_id: int, entry_id: int) -> SeparatelyStored | None:
        row = self._state.separate.getValue((ledger_id, entry_id))
        return None if row is None else separately_stored_from_json(row[0])

    def _store_separate(self, position: Position, message: SeparatelyStored) -> None:
        self._state.separate.updateValue(
            (position.ledger_id, position.entry_id), (separately_stored_to_json(message),)
        )


def _content(cancels: list[Cancel], marked: MarkedPositions, pauses: Pauses) -> tuple[Any, ...]:
    """Return what is stored of cancels, to compare: writing it costs much more."""
    return cancels, marked.to_fields(), pauses.since_ms, list(pauses.ended_ms)


def _without_withheld(
    batch: pa.RecordBatch, schedules: Schedules
) -> tuple[pa.RecordBatch, dict[int, Reason]]:
    """Return due messages without those that are not to be delivered, and the reasons of these by
    row.
    """
    _, ledger_ids, entry_ids = key_columns(batch)
    withheld = schedules.release(ledger_ids, entry_ids)
    if not withheld:
        return batch, withheld
    is_kept = np.ones(batch.num_rows, dtype=bool)
    is_kept[list(withheld)] = False
    return batch.filter(pa.array(is_kept)), withheld


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


def _due_outcome(rows: list[_DueRow], release: _Release) -> Iterator[DueEntries | DuePositions]:
    """Yield rows as one outcome, if there are any."""
    frames = b"".join(row.frame for row in rows if row.frame is not None)
    deliveries = [row.delivery for row in rows]
    if any(row.frame is None for row in rows):
        yield _due_positions([row.key for row in rows], release, frames, deliveries)
    elif rows:
        yield DueEntries(
            frames,
            release.delivered_ms,
            release.outputs,
            clock_ms=release.clock_ms,
            deliveries=deliveries,
        )


def _due_positions(
    keys: list[Key],
    release: _Release,
    frames: bytes = b"",
    deliveries: Sequence[Delivery | None] = (),
) -> DuePositions:
    positions = [Position(*key[1:]) for key in keys]
    due_ms = [key[0] for key in keys]
    return DuePositions(
        positions,
        due_ms,
        release.delivered_ms,
        release.outputs,
        release.clock_ms,
        frames,
        deliveries,
    )


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
