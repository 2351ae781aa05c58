"""Detects loss while a range is read (see ``loss``), and raises or reports it.

If a cursor was moved from outside, the driver passes its position to the tasks of a micro-batch in
a local property of their job, as ``{topic partition: [ledger, entry]}``.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING

from ledgerlake.client.cluster import shared_cluster
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.errors import CorruptEntryError, DataLossError, DeadlineError, TransportError
from ledgerlake.reasons import DATA_LOSS
from ledgerlake.source.bounds import end_position, entry_from, first_available
from ledgerlake.source.loss import (
    LOST_TOPIC_S,
    LastRead,
    Loss,
    find_loss,
    not_sent,
)
from ledgerlake.wire.entry import index_count, read_stamp
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, Position

if TYPE_CHECKING:
    from pyspark import SparkContext

    from ledgerlake.client.cluster import Cluster
    from ledgerlake.client.reader import EntryReader
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.wire.connection import EntryReceived, Received

# How often a topic is looked up again that ends before an entry that it had.
_ASK_AGAIN_S = 1.0

_MOVED_CURSORS = "ledgerlake.movedCursors"

_NOT_KNOWN = (
    "the broker counts %d messages after %s and before %s of %s that it does not send: they are of "
    "transactions, or it skipped a ledger that is lost (autoSkipNonRecoverableData)"
)

_NOT_SENT = "the broker names them and does not send them"

_log = logging.getLogger(__name__)

# If a cluster was made anew, many topic partitions end early: only the first is waited for.
_KNOWN_FOR_S = 600.0


class _Lookups:
    """How long to look topics up again that end early, in this process."""

    def __init__(self) -> None:
        self._gave_up_s = float("-inf")

    def deadline_s(self) -> float:
        now_s = time.monotonic()
        return now_s if now_s - self._gave_up_s < _KNOWN_FOR_S else now_s + LOST_TOPIC_S

    def note_gave_up(self) -> None:
        self._gave_up_s = time.monotonic()


_lookups = _Lookups()


def topic_end(
    cluster: Cluster, topic_partition: str, stored: Position, known: Position
) -> Position:
    """Return the end of a topic partition. If it is before a position that was stored, the topic is
    looked up again for a while: a broker that has lost it may not know its end. Such an end does
    not move.

    Args:
        known: a position up to which it was read.
    """
    deadline_s, first = _lookups.deadline_s(), None
    while BEFORE_ALL < (end := end_position(cluster, topic_partition, known)) < stored:
        first = first or end
        if end != first or time.monotonic() >= deadline_s:
            _lookups.note_gave_up()
            break
        time.sleep(_ASK_AGAIN_S)
    return end


class LossWatch:
    """Detects loss where a range goes from one ledger to another; it can occur nowhere else.

    The reader sets ``topic_is_gone`` if the topic is deleted while it reads.
    """

    def __init__(self, options: SourceOptions, span: EntryRange) -> None:
        self.topic_is_gone = False
        self._cluster = shared_cluster(options.client)
        self._fails = options.fail_on_data_loss
        self._span = span
        # Entries that compaction removed are not lost, and the ledgers before and after a compacted
        # entry may be gone.
        self._is_enabled = not (options.read_compacted and span.is_first)
        self._ledger_id = span.after.ledger_id
        self._last: Received | None = None
        self._topic_end: Position | None = None
        self._deadline_s: float | None = None
        self._is_passed_over = False

    def take(self, received: Received) -> RejectedEntry | None:
        """Return the loss before the entries that were received next, if there is any.

        Raises:
            DataLossError: there is a loss, and the options forbid it.
        """
        self._deadline_s = None
        loss = None
        if self._is_enabled and 0 <= self._ledger_id != received.ledger_id:
            index, count = _index_and_count(received.first_entry)
            loss = self._look(received.position, index, count)
            if loss is None and (
                missing := not_sent(self._last_read(), received.position, index, count)
            ):
                _log.warning(
                    _NOT_KNOWN,
                    missing,
                    self._last_read().position,
                    received.position,
                    self._span.topic_partition,
                )
        self._ledger_id, self._last = received.ledger_id, received
        return loss

    def has_more(self, reader: EntryReader) -> bool:
        """Return whether the topic has the end of the range, although the broker that was read from
        has nothing more: that broker has lost the topic. The range is read on then.

        Raises:
            TransportError: that does not change.
        """
        span, after = self._span, reader.after
        self._is_passed_over = reader.is_passed_over
        if self._is_passed_over:
            return False
        if not (self._is_enabled and span.is_end_stored and after < span.end):
            return False
        self._topic_end = topic_end(self._cluster, span.topic_partition, span.end, after)
        if self._topic_end < span.end:
            return False
        now_s = time.monotonic()
        if self._deadline_s is None:
            self._deadline_s = now_s + LOST_TOPIC_S
        elif now_s >= self._deadline_s:
            raise TransportError(
                f"{span.topic_partition} ends at {self._topic_end} by one answer and at {after} by "
                f"another, for {LOST_TOPIC_S:g} s; "
                "check that the address leads to one cluster, and that all of its brokers are well"
            )
        else:
            time.sleep(_ASK_AGAIN_S)
        return True

    def end(self) -> RejectedEntry | None:
        """Return the loss before the end of the range. There can be one if the last entry of the
        range was not received: either the topic has a hole there, or the entry is gone.

        Raises:
            As ``take``.
        """
        if self.topic_is_gone:
            if self._span.after == BEFORE_ALL and self._span.end.entry_id < 0:
                # The range has only noted where the topic begins.
                return None
            last = self._last_read()
            return self._report(
                Loss(last.position, self._span.end.next, None, False, "the topic was deleted")
            )
        if self._is_passed_over:
            unsent = Loss(self._last_read().position, self._span.end.next, None, False, _NOT_SENT)
            if self._fails:
                # They are not known to be gone: a broker that is slow may send them to the next
                # run.
                raise DeadlineError(
                    f"{self._span.topic_partition}: {unsent.sentence()}; check the broker's log, "
                    "or, to record that in rejects "
                    "and go on, set failOnDataLoss (fail_on_data_loss) to false"
                )
            return _reject(unsent)
        if not self._is_enabled or self._last_read().position >= self._span.end:
            return None
        if self._topic_end is not None and BEFORE_ALL < self._topic_end < self._span.end:
            # Another topic has taken its name, or its bookies lost entries.
            cause = f"the topic ends before them, at {self._topic_end}"
            if self._topic_end.ledger_id < self._span.end.ledger_id:
                cause += ": it is another topic of that name"
            return self._report(
                Loss(self._last_read().position, self._span.end.next, None, False, cause)
            )
        # Ask for the topic's beginning before its first entry: if the pipeline's cursor moves in
        # between, ledgers that were read are removed.
        begin = first_available(self._cluster, self._span.topic_partition)
        if self._last_read().position == BEFORE_ALL:
            return self._look_at_beginning(begin)
        if begin.ledger_id <= self._last_read().position.ledger_id:
            return None
        first = entry_from(self._cluster, self._span.topic_partition, BEFORE_ALL, AFTER_ALL)
        if first is None:
            loss = self._look(self._span.end.next, None, 1)
        else:
            loss = self._look(first.position, first.stamp.index, first.index_count)
        return (
            loss
            if loss is not None or self._last_read().position.entry_id >= 0
            else self._look_at_beginning(begin)
        )

    def _look_at_beginning(self, begin: Position) -> RejectedEntry | None:
        """Return the loss of a range from the topic's beginning that gave no entry: the indexes of
        a topic that was made again begin again. A range that ends before the first entry of a
        ledger has only noted where an unread topic begins.
        """
        end = self._span.end
        is_lost = end.entry_id >= 0 and begin.ledger_id > end.ledger_id
        return self._report(Loss(self._span.after, end.next, None, False)) if is_lost else None

    def _look(self, following: Position, index: int | None, count: int) -> RejectedEntry | None:
        span = self._span
        begin = first_available(self._cluster, span.topic_partition)
        pinned_from = (
            None
            if span.pinned_from is None
            else max(span.pinned_from, _moved_cursor(span.topic_partition))
        )
        loss = find_loss(
            self._last_read(),
            following,
            index,
            begin,
            count=count,
            after=span.after,
            end=span.end,
            end_index=span.end_index,
            pinned_from=pinned_from,
        )
        return None if loss is None else self._report(loss)

    def _report(self, loss: Loss) -> RejectedEntry:
        if self._fails:
            raise DataLossError(
                f"{self._span.topic_partition}: {loss.sentence()}; to record that in rejects and "
                "go on, set failOnDataLoss (fail_on_data_loss) to false"
            )
        return _reject(loss)

    def _last_read(self) -> LastRead:
        if self._last is None:
            return LastRead(self._span.after, self._span.after_index)
        return LastRead(self._last.last, _index(self._last.last_entry))


def _reject(loss: Loss) -> RejectedEntry:
    return RejectedEntry(loss.first, b"", DATA_LOSS, loss.sentence())


def _index_and_count(entry: EntryReceived) -> tuple[int | None, int]:
    """Return the broker's index of an entry's last message, and by how much the entry raised it."""
    return _index(entry), index_count(entry.entry)


def _index(entry: EntryReceived) -> int | None:
    try:
        return read_stamp(entry.entry).index
    except CorruptEntryError:
        return None


def pass_moved_cursors(context: SparkContext, moved: dict[str, Position]) -> None:
    """Pass the cursors that were moved from outside, with their positions, to the tasks of the next
    jobs.
    """
    positions = {name: [position.ledger_id, position.entry_id] for name, position in moved.items()}
    context.setLocalProperty(_MOVED_CURSORS, json.dumps(positions))


def _moved_cursor(topic_partition: str) -> Position:
    """Return the position of a moved cursor that ``pass_moved_cursors`` passed to this task;
    ``BEFORE_ALL`` if the cursor was not moved.
    """
    from pyspark import TaskContext

    task = TaskContext.get()
    text = task.getLocalProperty(_MOVED_CURSORS) if task is not None else None
    ids = json.loads(text).get(topic_partition) if text else None
    return BEFORE_ALL if ids is None else Position(*ids)
