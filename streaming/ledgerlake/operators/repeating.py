"""Messages that repeat, in one micro-batch of one topic partition: their occurrences among the
other messages that are due.

Rules kept here:
  - A message that repeats has one row in the index, for its next occurrence. When the row is taken,
    ``Schedules.advance`` returns the occurrence to deliver and the time when the message is due
    again. It goes back into the index, or, if it is due in this micro-batch already, comes again.
  - Messages and occurrences leave in the order of (time, ledger, entry).
  - A micro-batch takes at most ``MOST_OVERDUE`` occurrences of messages that are due more than once
    in it, and keeps ``OVERDUE_BYTES`` of those messages. The first one for which there is no room
    stays due, and with it all that comes after it, other messages too. The next micro-batches take
    them, as they do those that come after the last row, if the index has kept further rows.
  - Occurrences that are not delivered are passed together, ``MOST_PASSED`` in a micro-batch, and
    all occurrences of the last minute.
  - Only the metadata of a message is read: it holds the properties, and is neither compressed nor
    encrypted.
"""

from __future__ import annotations

import heapq
import sys
from bisect import bisect
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ledgerlake.assembly.assembler import Rejected
from ledgerlake.decode.split import entries_of
from ledgerlake.delay.segment import index_rows, key_at, key_columns
from ledgerlake.errors import CorruptEntryError
from ledgerlake.operators.outcome_types import Delivery
from ledgerlake.reasons import NO_OCCURRENCE, Reason
from ledgerlake.schedules.repetition import TIMEZONE_DATA_VERSION, parse_repetition
from ledgerlake.schedules.schedules import REPEATING
from ledgerlake.wire.entry import peek_metadata
from ledgerlake.wire.message_id import AFTER_ALL, Position
from ledgerlake.wire.schedules import (
    SCHEDULE_PROPERTY,
    TIMEZONE_DATA_PROPERTY,
    occurrence_properties,
    properties_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

    from ledgerlake.schedules.repetition import Occurrence
    from ledgerlake.schedules.schedules import Schedules

# The most occurrences of a micro-batch beyond the first one of each message.
MOST_OVERDUE = 100_000

# The most occurrences that a micro-batch passes, beyond the first one and the last minute of each
# message: some seconds. Without passing, each takes a turn.
MOST_PASSED = 100_000

# The most bytes of messages that are kept to be delivered again in the micro-batch.
OVERDUE_BYTES = 32 * 1024 * 1024

# Rows for the index are passed on in groups of this many, or of this many bytes.
_GROUP_ROWS = 1_000
_GROUP_BYTES = 1024 * 1024


# When a row is due, and its position.
_Key = tuple[int, Position]
_NEVER: _Key = (sys.maxsize, AFTER_ALL)


class Repeated(NamedTuple):
    """A message that is delivered again: its position, its frame and this delivery."""

    position: Position
    frame: bytes
    delivery: Delivery


class _Row(NamedTuple):
    """A row of the index; in order of (time, ledger, entry)."""

    due_ms: int
    position: Position
    frame: bytes


class DueIndex(Protocol):
    """The part of ``delay.tracker.DelayedTracker`` that messages need when they are due."""

    @property
    def next_due_ms(self) -> int | None:
        """Return when the next message is due that was not taken."""

    def add_again(self, batch: pa.RecordBatch) -> None:
        """Add rows of ``INDEX_SCHEMA`` for the next micro-batch."""


class RepeatingMessages:
    """The messages that repeat; see the module.

    Args:
        index: the rows come from it, and messages that are due again are added to it.
    """

    def __init__(self, schedules: Schedules, cutoff_ms: int, index: DueIndex) -> None:
        self._schedules = schedules
        self._cutoff_ms = cutoff_ms
        self._index = index
        self._overdue: list[_Row] = []
        self._overdue_bytes = 0
        self._left = MOST_OVERDUE
        self._left_to_pass = MOST_PASSED
        self._later: list[_Row] = []
        self._later_bytes = 0
        # Messages after this time and position wait for the next micro-batch.
        self._stop = _NEVER

    def in_order(
        self, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch | Repeated | Rejected]:
        """Yield the rows of other messages, and occurrences, in order. Use it up."""
        for batch in batches:
            yield from self._merge(batch)
        next_due_ms = self._index.next_due_ms
        if next_due_ms is None or next_due_ms > self._cutoff_ms:
            while self._first_overdue < self._stop:
                yield from self._take_overdue()
        self._later += self._overdue
        self._pass_on()

    def _merge(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch | Repeated | Rejected]:
        _, ledger_ids, entry_ids = key_columns(batch)
        repeats = self._schedules.marked.are_marked(ledger_ids, entry_ids, [REPEATING])
        ends = [*np.flatnonzero(repeats).tolist(), batch.num_rows]
        start = 0
        while start < batch.num_rows:
            key = _key(batch, start)
            if self._first_overdue < min(key, self._stop):
                yield from self._take_overdue()
            elif self._stop < key:
                self._index.add_again(batch.slice(start))
                return
            elif repeats[start]:
                yield from self._take(_Row(*key, batch.column(3)[start].as_py()))
                start += 1
            else:
                end = self._end_of_rows(batch, start, ends[bisect(ends, start)])
                yield batch.slice(start, end - start)
                start = end

    @property
    def _first_overdue(self) -> _Key:
        return self._overdue[0][:2] if self._overdue else _NEVER

    def _end_of_rows(self, batch: pa.RecordBatch, start: int, end: int) -> int:
        """Return the end of the rows that come before the first overdue occurrence, and before the
        stop; at least one does.
        """
        first = min(self._first_overdue, self._stop)
        start += int(np.searchsorted(key_columns(batch)[0][start:end], first[0]))
        while start < end and _key(batch, start) < first:
            start += 1
        return start

    def _take_overdue(self) -> Iterator[Repeated | Rejected]:
        self._left -= 1
        row = heapq.heappop(self._overdue)
        self._overdue_bytes -= len(row.frame)
        yield from self._take(row)

    def _take(self, row: _Row) -> Iterator[Repeated | Rejected]:
        """Yield the occurrence of a row, if it is delivered, and keep the row for the next one. If
        the message was replaced or cancelled before that one, yield it as a reject.
        """
        ((_, entry),) = entries_of(row.frame).items()
        if not self._schedules.repeats(row.position):
            yield Rejected(
                Reason(str(self._schedules.marked.take(row.position))), [(row.position, entry)]
            )
            return
        properties = properties_of(peek_metadata(memoryview(entry)))
        schedule_id = str(properties[SCHEDULE_PROPERTY])
        try:
            rule = parse_repetition(properties)
        except CorruptEntryError as error:
            # The rule was checked when the message arrived, by another version of the libraries.
            self._schedules.end_repetition(schedule_id, row.position)
            yield Rejected(error.reason, [(row.position, entry)])
            return
        assert rule is not None
        step = self._schedules.advance(
            schedule_id, row.position, rule, self._cutoff_ms, self._left_to_pass
        )
        self._left_to_pass -= step.passed
        if step.is_empty:
            yield Rejected(NO_OCCURRENCE, [(row.position, entry)])
        if step.delivered is not None:
            yield Repeated(row.position, row.frame, _delivery(step.delivered))
        if step.next_ms is None:
            return
        again = row._replace(due_ms=step.next_ms)
        if step.next_ms <= self._cutoff_ms and self._has_room(row.frame):
            heapq.heappush(self._overdue, again)
            self._overdue_bytes += len(row.frame)
            return
        if step.next_ms <= self._cutoff_ms:
            self._stop = min(self._stop, again[:2])
        self._later.append(again)
        self._later_bytes += len(row.frame)
        if len(self._later) >= _GROUP_ROWS or self._later_bytes >= _GROUP_BYTES:
            self._pass_on()

    def _has_room(self, frame: bytes) -> bool:
        """Return whether a message may be kept to be delivered again; one may, however
        large it is.
        """
        has_bytes = not self._overdue or self._overdue_bytes + len(frame) <= OVERDUE_BYTES
        return len(self._overdue) < self._left and has_bytes

    def _pass_on(self) -> None:
        if self._later:
            keys = [
                (row.due_ms, row.position.ledger_id, row.position.entry_id) for row in self._later
            ]
            self._index.add_again(index_rows(keys, [row.frame for row in self._later]))
        self._later, self._later_bytes = [], 0


def _key(batch: pa.RecordBatch, row: int) -> _Key:
    due_ms, ledger_id, entry_id = key_at(batch, row)
    return due_ms, Position(ledger_id, entry_id)


def _delivery(occurrence: Occurrence) -> Delivery:
    properties = occurrence_properties(occurrence.number, occurrence.nominal_ms)
    return Delivery(occurrence.due_ms, properties | {TIMEZONE_DATA_PROPERTY: TIMEZONE_DATA_VERSION})
