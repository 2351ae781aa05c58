"""Tells loss from holes. An entry is lost if it was in the topic, was never read, and is gone.

Entry ids have legal gaps: ledgers change, transaction markers and aborted transactions are never
delivered, compaction removes entries, the chunks of messages are interleaved. A broker removes only
whole ledgers from the front, by retention, truncation, or when a topic is deleted. So nothing is
lost as long as the ledger of the last entry read is still there. Once that is gone, the broker's
index (PIP-70), which counts every message, says whether messages are missing.

If there is no index to compare, the pipeline's durable cursor decides. A broker retains every
ledger with an entry that a cursor has not passed, so a ledger that is gone was read completely.
There are two exceptions: the cursor was moved from outside (message TTL, an operator), so that it
is after the last entry read; or a ledger of the range itself is gone, although a cursor passes a
range only when it is committed. Without a cursor there may have been messages in between, and that
counts as loss.

A cursor has retained nothing that was gone before it was created. So if a read begins at a position
that the topic has lost (``PartitionOffset.was_gone``), its first range counts as one without a
cursor.

A broker returns the position of a cursor only to the consumer of the subscription. So if a range
without an index goes from one ledger into another, that consumer asks: the planner of the bare
source when it plans the range, the driver of a pipeline before the tasks begin (see
``source.loss_watch``).

A topic that was empty when its read began (``bounds``) had no entry with an index, and a broker
removes an empty ledger when it loads the topic again. There too the cursor decides. Without a
cursor, a first index of 0 proves that nothing was lost, and a later one counts as loss; without an
index either, nothing is known to have been lost.

Three cases are not detected: a ledger in the midst of a topic was lost, and the broker may skip it
(see ``not_sent``); a cursor was moved just to the end of a ledger; or it was removed and created
again. If a ledger that was read completely is removed, the broker itself moves the cursor before
the first entry of the next one.

Another topic may have taken the name of the one that was read: it was deleted and created again,
the cluster was created anew, or the address leads to another cluster. Ledger ids do not tell topics
of two clusters apart. The topic is another one if it ends before the last entry that was read
(``ends_before``), if it has another entry at that position (``is_entry``), or if its indexes begin
again.

Some entries have an index and are never delivered: transaction markers, and entries that the broker
cannot read. Those before the first entry that comes of a ledger are known by their ids, and explain
an index each. Those at the end of a ledger that was then removed cannot be distinguished from
messages here, so the count of lost messages says "at most".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgerlake.errors import CorruptEntryError
from ledgerlake.wire.entry import peek_metadata, read_stamp
from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from ledgerlake.stored.offsets import PartitionOffset


# The index before a topic's first message: of a range from the beginning of a topic whose first
# message has index 0, or that was empty.
NO_INDEX_YET = -1

# A broker notices within the timeout of its metadata session, 30 seconds by default, that it has
# lost a topic.
LOST_TOPIC_S = 40.0


@dataclass(frozen=True)
class LastRead:
    """The last entry that was read, with the broker's index of its last message if it gives one."""

    position: Position
    index: int | None = None


@dataclass(frozen=True)
class Loss:
    """A range of a topic partition that is gone: after ``after``, and before ``before``. Each range
    that is read names its own loss, so the losses of two ranges do not overlap, except in the entry
    in which a batch was cut.

    ``messages`` is their greatest possible number; None if that is unknown. ``is_new_topic``: the
    indexes begin again, because the topic was deleted and created again. ``cause`` ends the
    sentence about the loss.
    """

    after: Position
    before: Position
    messages: int | None
    is_new_topic: bool
    cause: str = "they were removed before they were read"

    @property
    def first(self) -> Position:
        """Return the first position that is missing; 0:0 if it is the topic's first."""
        return Position(0, 0) if self.after == BEFORE_ALL else self.after.next

    def sentence(self) -> str:
        count = (
            "an unknown number of messages"
            if self.messages is None
            else f"at most {self.messages:,} messages"
        )
        how = "the topic was deleted and created again" if self.is_new_topic else self.cause
        begin = "the topic's beginning" if self.after == BEFORE_ALL else self.after
        return f"{count} after {begin} and before {self.before} are lost: {how}"


def find_loss(
    last_read: LastRead,
    following: Position,
    index: int | None,
    first_available: Position,
    *,
    count: int = 1,
    after: Position,
    end: Position,
    end_index: int | None = None,
    pinned_from: Position | None,
) -> Loss | None:
    """Return the loss between the last entry that was read and the next one, up to the end of the
    range, if there is any.

    Args:
        following: the position of the next entry in the topic. It may be behind the range.
        index: the broker's index of that entry's last message, if it gives one.
        first_available: the current beginning of the topic.
        count: by how much that entry raised the index. Its producer says so, and may say too much:
            only the broker's index shows that the indexes begin again.
        after: the last entry that was read before the range.
        end: the planned end of the range.
        end_index: the broker's index of the last message of the range, if it is known.
        pinned_from: a durable cursor has retained all unread entries after this position; None if
            there is no cursor.
    """
    # A producer may claim less than nothing, so an index that falls proves nothing while the ledger
    # is there.
    if (
        last_read.position.ledger_id < 0
        or last_read.position.ledger_id >= first_available.ledger_id
    ):
        return None
    before = min(following, end.next)
    # The last index before ``until``.
    until, last_index = following, None if index is None else index - count
    if following > end and end_index is not None and end_index >= (last_read.index or 0):
        until, last_index = end.next, end_index
    if last_read.index is None or last_index is None:
        is_kept = pinned_from is not None and pinned_from <= last_read.position == after
        was_empty = pinned_from is None and last_read.index == NO_INDEX_YET
        if (is_kept or was_empty) and end.ledger_id >= first_available.ledger_id:
            return None
        return Loss(last_read.position, before, None, False)
    # If the topic's numbers begin with this entry, the numbers that were read are of another topic.
    if index is not None and (
        index <= last_read.index or index - count == NO_INDEX_YET < last_read.index
    ):
        return Loss(last_read.position, before, None, True)
    missing = last_index - last_read.index
    # Ledgers are removed whole, so the entries that no reader gets are there in a ledger that is.
    undelivered = until.entry_id if until.ledger_id >= first_available.ledger_id else 0
    return Loss(last_read.position, before, missing, False) if missing > undelivered else None


def not_sent(last_read: LastRead, following: Position, index: int | None, count: int) -> int:
    """Return how many of the broker's indexes lie between two entries that came one after the
    other, more than the entries before the second one in its ledger explain; 0 if there is no
    index.

    Aborted transactions, and markers at the end of a ledger, may have these indexes. Or a broker
    that may skip lost ledgers (``autoSkipNonRecoverableData``) skipped one. It acknowledges the
    entries of that ledger as it does markers, so a reader cannot tell the two apart.
    """
    if last_read.index is None or index is None:
        return 0
    return max(index - count - last_read.index - following.entry_id, 0)


def moved_to(mark_delete: Position, last_read: Position) -> Position:
    """Return the position to which a cursor was moved from outside, past unread entries;
    ``BEFORE_ALL`` if it was not.

    Args:
        mark_delete: the cursor's mark-delete position.
        last_read: the last entry that was read.
    """
    return mark_delete if mark_delete.entry_id >= 0 and mark_delete > last_read else BEFORE_ALL


def ends_before(read_to: PartitionOffset, end: Position) -> bool:
    """Return whether a topic that ends at ``end`` does not have the entry up to which it was read,
    and cannot have removed it.

    A broker never answers that a topic ends before an entry that it has delivered: if no entry is
    left, it answers entry -1. A position at which there was no entry may be after the end; the
    offset of an entry that was there has a time.
    """
    return read_to.time_ms is not None and end.entry_id >= 0 and end < read_to.position


def is_entry(read_to: PartitionOffset, entry: memoryview) -> bool:
    """Return whether an entry at the position of an offset may be the one that was read: it has the
    time and the index of the offset. What cannot be read, or compared, proves nothing.

    A broker may begin to add a time or an index to what it sends, or cease to. So the broker's are
    compared with the broker's. An entry always has its producer's time.
    """
    try:
        stamp, publish_ms = read_stamp(entry), peek_metadata(entry).publish_time
    except CorruptEntryError:
        return True
    broker_ms = stamp.time_ms if stamp.by_broker else None
    return _may_be_same(read_to.time_ms, broker_ms if read_to.by_broker else publish_ms) and (
        _may_be_same(read_to.index, stamp.index)
    )


def _may_be_same(known: int | None, found: int | None) -> bool:
    return known is None or found is None or known == found
