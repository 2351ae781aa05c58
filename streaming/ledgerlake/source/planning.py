"""What a micro-batch reads: ranges from two offsets, and how a budget is shared. Pure: numbers in,
numbers out.

A batch depends only on (start, end): the same two offsets always give the same ranges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from ledgerlake.stored.offsets import Offset


@dataclass(frozen=True)
class EntryRange:
    """Entries of one topic partition after ``after`` up to and including ``end``.

    ``after_batch_index`` belongs to the first entry after ``after``: its messages up to that index
    were taken before. ``end_batch_index`` belongs to the entry at ``end``: only its messages up to
    that index are in the range. ``after_index`` is the broker's index of the last message taken
    before, if it is known. ``pinned_from``: behind this position a durable cursor has kept what was
    not read, which tells loss from a hole if an index cannot (see ``loss``); None: there is none.
    ``clock_ms`` is what time it is by the batch, if it says so; a range without entries is there
    for that alone.
    """

    topic_partition: str
    after: Position
    end: Position
    after_batch_index: int | None = None
    clock_ms: int | None = None
    end_batch_index: int | None = None
    after_index: int | None = None
    pinned_from: Position | None = None

    @property
    def crosses(self) -> bool:
        """Return whether the range goes on in another ledger than that of the last entry taken."""
        return 0 <= self.after.ledger_id < self.end.ledger_id

    @property
    def through(self) -> Position:
        """The last position of which the range takes everything."""
        return self.end if self.end_batch_index is None else self.end.before


def ranges(start: Offset, end: Offset) -> list[EntryRange]:
    """The ranges between two offsets, by topic partition; one that is new in ``end`` is read from
    its beginning.
    """
    nothing = PartitionOffset(BEFORE_ALL)
    found = []
    for name in sorted(end):
        before, after = start.get(name, nothing), end[name]
        ticked = after.clock_ms is not None and after.clock_ms != before.clock_ms
        if after.is_beyond(before) or ticked:
            found.append(entry_range(name, before, after))
    return found


def entry_range(topic_partition: str, before: PartitionOffset, after: PartitionOffset) -> EntryRange:
    """Return the range between two offsets of a topic partition."""
    end = after.position if after.batch_index is None else after.next_position
    return EntryRange(
        topic_partition,
        before.position,
        end,
        before.batch_index,
        after.clock_ms,
        after.batch_index,
        before.index,
    )


def split(spans: list[EntryRange], min_partitions: int) -> list[EntryRange]:
    """The same entries in at least so many ranges if that can be: a range is cut within the ledger
    that it ends in.

    What lies in earlier ledgers stays one range, since how many entries those have is not known
    here.
    """
    if not spans or len(spans) >= min_partitions:
        return spans
    parts = -(-min_partitions // len(spans))
    return [piece for span in spans for piece in _split_one(span, parts)]


def _split_one(span: EntryRange, parts: int) -> list[EntryRange]:
    """At least two parts are asked for; what lies before the last ledger is one of them."""
    ledger_id, last = span.end.ledger_id, span.end.entry_id
    same_ledger = span.after.ledger_id == ledger_id
    before, here = (span.after.entry_id, parts) if same_ledger else (-1, parts - 1)
    cuts = {before + (last - before) * number // here for number in range(1, here)} - {before, last}
    ledger_begins = [] if same_ledger else [Position(ledger_id, -1)]
    ends = [*ledger_begins, *(Position(ledger_id, one) for one in sorted(cuts)), span.end]
    starts = [span.after, *ends[:-1]]
    return [
        replace(
            span,
            after=start,
            end=end,
            after_batch_index=span.after_batch_index if start == span.after else None,
            after_index=span.after_index if start == span.after else None,
            end_batch_index=span.end_batch_index if end == span.end else None,
        )
        for start, end in zip(starts, ends, strict=True)
    ]


def share(budget: int | None, parts: int) -> int | None:
    """An equal share of a budget, at least 1; None is no limit."""
    return None if budget is None else max(1, budget // max(parts, 1))
