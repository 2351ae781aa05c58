"""Loss, told apart from holes: what was in the topic, was never read, and is not there any more.

Entry ids have legal gaps: ledgers change, transaction markers and aborted transactions are never delivered, compaction takes
entries away, the chunks of one message stand between those of others. A broker removes only whole ledgers from the front, by
retention, truncation, or when a topic is deleted. So nothing is lost as long as the ledger of the last entry taken is still
there; once it is gone, the broker's index (PIP-70), which counts every message, says whether anything stood between. Where
there is no index to compare, it may have, and that counts as loss.

What a broker numbers and never delivers, such as the marker of a transaction at the end of a ledger that was then removed,
cannot be told from a message here: so the count of lost messages says "at most".
"""

from __future__ import annotations

from dataclasses import dataclass

from ledgerlake.wire.message_id import Position


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


def find_loss(taken: Taken, following: Position, first_index: int | None, first_available: Position) -> Loss | None:
    """What is lost between the last entry taken and the one that followed.

    Args:
        following: where the next entry stands that there is.
        first_index: the broker's index of its first message, where it says one.
        first_available: where the topic begins now.
    """
    if taken.position.ledger_id < 0 or taken.position.ledger_id >= first_available.ledger_id:
        return None
    if taken.index is None or first_index is None:
        return Loss(taken.position, following, None, False)
    if first_index <= taken.index:
        return Loss(taken.position, following, None, True)
    between = first_index - taken.index - 1
    return Loss(taken.position, following, between, False) if between else None
