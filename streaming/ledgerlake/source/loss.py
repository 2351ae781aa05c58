"""Loss, told apart from holes: what was in the topic, was never read, and is not there any more.

Entry ids have legal gaps: ledgers change, transaction markers and aborted transactions are never delivered, compaction takes
entries away, the chunks of one message stand between those of others. A broker removes only whole ledgers from the front, by
retention, truncation, or when a topic is deleted. So nothing is lost as long as the ledger of the last entry taken is still
there; once it is gone, the broker's index (PIP-70), which counts every message, says whether anything stood between.

If there is no index to compare, a durable cursor of ours decides. A broker keeps every ledger with an entry that a cursor has not
passed, so a ledger that is gone was read whole. That ends where somebody else moved the cursor (message TTL, an operator), which
shows as a cursor beyond what was taken, or where an entry is gone that was there when the range was planned. Without a
cursor something may have stood between, and that counts as loss.

Nothing shows that a cursor was moved just to the end of a ledger, or removed and made again: where a ledger that was read whole is
removed, the broker itself moves the cursor before the first entry of the next one.

What a broker numbers and never delivers, such as the marker of a transaction at the end of a ledger that was then removed,
cannot be told from a message here: so the count of lost messages says "at most".
"""

from __future__ import annotations

from dataclasses import dataclass

from ledgerlake.wire.message_id import BEFORE_ALL, Position


@dataclass(frozen=True)
class Taken:
    """The last entry that was read, with the broker's index of its last message where it says one."""

    position: Position
    index: int | None = None


@dataclass(frozen=True)
class Loss:
    """A range of a topic partition that is gone: behind ``after``, and before ``before``.

    ``messages`` is how many there were at most; None where nobody knows. ``is_new_topic`` says that the numbers begin
    again: the topic was deleted and created anew. ``cause`` ends the sentence on it.
    """

    after: Position
    before: Position
    messages: int | None
    is_new_topic: bool
    cause: str = "they were removed before they were read"

    @property
    def first(self) -> Position:
        """The first position that is missing."""
        return self.after.next

    def sentence(self) -> str:
        count = "an unknown number of messages" if self.messages is None else f"at most {self.messages:,} messages"
        how = "the topic was deleted and created again" if self.is_new_topic else self.cause
        return f"{count} after {self.after} and before {self.before} are lost: {how}"


def find_loss(
    taken: Taken,
    following: Position,
    first_index: int | None,
    first_available: Position,
    *,
    end: Position,
    pinned_from: Position | None,
) -> Loss | None:
    """What is lost between the last entry taken and the one that followed.

    Args:
        following: where the next entry stands that there is.
        first_index: the broker's index of its first message, where it says one.
        first_available: where the topic begins now.
        end: where the range ends by its plan.
        pinned_from: behind this position a durable cursor has kept what was not read; None: there is none.
    """
    if taken.position.ledger_id < 0 or taken.position.ledger_id >= first_available.ledger_id:
        return None
    if taken.index is None or first_index is None:
        is_kept = pinned_from is not None and taken.position >= pinned_from
        if is_kept and end.ledger_id >= first_available.ledger_id:
            return None
        return Loss(taken.position, following, None, False)
    if first_index <= taken.index:
        return Loss(taken.position, following, None, True)
    between = first_index - taken.index - 1
    return Loss(taken.position, following, between, False) if between else None


def moved_to(marked: Position, taken: Position) -> Position:
    """Return up to where somebody else moved a cursor over what was not read; ``BEFORE_ALL`` if nobody did.

    Args:
        marked: the cursor's mark-delete position.
        taken: the last entry that was read.
    """
    return marked if marked.entry_id >= 0 and marked > taken else BEFORE_ALL
