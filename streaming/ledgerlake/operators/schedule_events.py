"""Events of schedules by id (``schedules.schedules``), from the tasks to the stateful stage.

A backlog may have a million of them, so they pass as Arrow, many in one row (``schedules`` in
``operators.stage_rows``), and the stage keeps them so until it applies them.

Rules kept here:
  - Events of an id are applied in the order of their messages, of the messages of a batch too, in
    whatever order the rows come.
  - A batch of messages that say the same passes as one event.
  - A task passes on ``MAX_TASK_SCHEDULE_BYTES`` at most, half of it of delayed entries. Those come
    in pieces of their own, so where the network cut the entries decides about no event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.operators.stage_rows import RowKind, stage_row
from ledgerlake.schedules.cancels import Cancel
from ledgerlake.schedules.repetition import RepetitionRate
from ledgerlake.wire.limits import MAX_TASK_SCHEDULE_BYTES
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ledgerlake.decode.messages import TopicPartition


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The event of a message with the id of a schedule, stored at ``time_ms``; ``deliver_ms`` is
    when it is due, or when it starts to repeat, None if it was delivered at once. ``rate`` is how
    often it repeats, None if it does not.
    """

    schedule_id: str
    position: Position
    time_ms: int
    deliver_ms: int | None = None
    rate: RepetitionRate | None = None


@dataclass(frozen=True, slots=True)
class PauseChanged:
    """The event of a message, stored at ``time_ms``, that pauses the repetitions of a schedule, or
    of all if there is no id, or that resumes them.
    """

    schedule_id: str | None
    position: Position
    time_ms: int
    resumes: bool


ScheduleEvent = Scheduled | PauseChanged | Cancel

_EVENTS = pa.schema(
    [
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),
        ("kind", pa.int8()),
        ("schedule_id", pa.string()),
        ("time_ms", pa.int64()),
        ("deliver_ms", pa.int64()),
        ("occurrences", pa.int64()),
        ("size_bytes", pa.int64()),
    ]
)

# The kinds of events, in the order in which the events of one message are applied.
_AT_ONCE, _DELAYED, _REPEATING, _CANCEL, _PAUSE, _RESUME = range(6)

# The bytes of an event without its id.
_EVENT_BYTES = 64

# Events in one row.
_ROW_EVENTS = 10_000

_Values = tuple[int, int, int, int, str | None, int, int | None, int, int]


class ScheduleEvents:
    """The events of one topic partition, in a task or in the stage.

    Args:
        max_bytes: a task passes on so much of delayed entries, and as much of others; the stage
            refuses nothing that tasks have accepted.
    """

    def __init__(self, max_bytes: int = MAX_TASK_SCHEDULE_BYTES // 2) -> None:
        self._max_bytes = max_bytes
        self._new: list[_Values] = []
        self._batches: list[pa.RecordBatch] = []
        self._of_batch: tuple[Position, set[_Values]] | None = None
        self._used_bytes = 0

    def add(self, event: ScheduleEvent, batch_index: int = -1) -> bool:
        """Add an event; return False if there is no room for it.

        Args:
            batch_index: the place of its message in a batch.
        """
        values = _values(event, batch_index)
        if batch_index >= 0 and self._is_repeated(event.position, values):
            return True
        used_bytes = self._used_bytes + _EVENT_BYTES + len((values[4] or "").encode())
        if used_bytes > self._max_bytes:
            return False
        self._used_bytes = used_bytes
        self._new.append(values)
        if len(self._new) >= _ROW_EVENTS:
            self._pack()
        return True

    def add_row(self, data: bytes) -> None:
        """Add the events of a row that another one has made."""
        with pa.ipc.open_stream(data) as reader:
            self._batches += list(reader)

    def rows(
        self, topic_partition: TopicPartition, *, all_events: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows for the stage, and forget the events in them; without ``all_events`` only the
        rows that are full.
        """
        if all_events:
            self._pack()
        batches, self._batches = self._batches, []
        for batch in batches:
            with pa.BufferOutputStream() as out, pa.ipc.new_stream(out, _EVENTS) as writer:
                writer.write_batch(batch)
            yield stage_row(topic_partition, RowKind.SCHEDULES, entry=out.getvalue())

    @property
    def is_any(self) -> bool:
        """Return whether there was an event."""
        return self._used_bytes > 0 or bool(self._batches)

    @property
    def pauses_all(self) -> bool:
        """Return whether one of them pauses or resumes all schedules."""
        self._pack()
        return any(batch["schedule_id"].null_count for batch in self._batches)

    @property
    def delayed_ids(self) -> int:
        """Return how many ids have a message that waits."""
        self._pack()
        kinds = pa.array([_DELAYED, _REPEATING], pa.int8())
        waiting = (
            batch.filter(pc.is_in(batch["kind"], kinds))["schedule_id"] for batch in self._batches
        )
        # A set of the ids takes ten times the memory of their hashes.
        return len(
            np.unique(
                np.fromiter(
                    (hash(name) for ids in waiting for name in ids.to_pylist()), dtype=np.int64
                )
            )
        )

    def in_order(self, block_of: Callable[[str], int]) -> Iterator[ScheduleEvent]:
        """Yield the events by the blocks of their ids, and within a block in the order of their
        messages. Events of all ids come first.
        """
        self._pack()
        events = pa.Table.from_batches(self._batches, _EVENTS)
        # The ids of all would take more memory than the events.
        ids = (name for batch in self._batches for name in batch["schedule_id"].to_pylist())
        blocks = np.fromiter(
            (-1 if name is None else block_of(name) for name in ids), dtype=np.int64
        )
        keys = [
            events[name].to_numpy() for name in ("kind", "batch_index", "entry_id", "ledger_id")
        ]
        order = np.lexsort([*keys, blocks])
        for start in range(0, len(order), _ROW_EVENTS):
            columns = events.take(order[start : start + _ROW_EVENTS]).to_pydict().values()
            yield from (_event(*values) for values in zip(*columns, strict=True))

    def _is_repeated(self, position: Position, values: _Values) -> bool:
        """Return whether another message of the batch says the same. A pause may follow the end of
        one that is like it.
        """
        if values[3] in (_PAUSE, _RESUME):
            return False
        if self._of_batch is None or self._of_batch[0] != position:
            self._of_batch = position, set()
        said = self._of_batch[1]
        key = (*values[:2], -1, *values[3:])
        is_repeated = key in said
        said.add(key)
        return is_repeated

    def _pack(self) -> None:
        if self._new:
            columns = [
                pa.array(column, field.type) for column, field in zip(zip(*self._new), _EVENTS)
            ]
            self._batches.append(pa.RecordBatch.from_arrays(columns, schema=_EVENTS))
        self._new = []


def _values(event: ScheduleEvent, batch_index: int) -> _Values:
    position = event.position
    place = position.ledger_id, position.entry_id, batch_index
    if isinstance(event, Cancel):
        return *place, _CANCEL, event.target, event.time_ms, None, 0, 0
    if isinstance(event, PauseChanged):
        return (
            *place,
            _RESUME if event.resumes else _PAUSE,
            event.schedule_id,
            event.time_ms,
            None,
            0,
            0,
        )
    kind = _AT_ONCE if event.deliver_ms is None else _DELAYED if event.rate is None else _REPEATING
    rate = event.rate or RepetitionRate()
    return (
        *place,
        kind,
        event.schedule_id,
        event.time_ms,
        event.deliver_ms,
        rate.occurrences,
        rate.size_bytes,
    )


def _event(
    ledger_id: int,
    entry_id: int,
    _batch_index: int,
    kind: int,
    schedule_id: str | None,
    time_ms: int,
    deliver_ms: int | None,
    occurrences: int,
    size_bytes: int,
) -> ScheduleEvent:
    position = Position(ledger_id, entry_id)
    if kind in (_PAUSE, _RESUME):
        return PauseChanged(schedule_id, position, time_ms, kind == _RESUME)
    assert schedule_id is not None
    if kind == _CANCEL:
        return Cancel("schedule", schedule_id, position, time_ms)
    rate = RepetitionRate(occurrences, size_bytes) if kind == _REPEATING else None
    return Scheduled(schedule_id, position, time_ms, deliver_ms, rate)
