"""Plans the ranges that a micro-batch reads between two offsets, and shares a budget among topic
partitions. Pure: numbers in, numbers out.

A batch depends only on (start, end): the same two offsets always give the same ranges. Into how
many parts a range is cut is in the end's offset, because what a task reads decides which limit it
meets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from ledgerlake.stored.offsets import Offset

# One task reads so many ranges at most, and about so many bytes if they are several.
_GROUP_RANGES = 16
_GROUP_BYTES = 4 * 1024 * 1024

# Entries take time however small they are, and the last one may be smaller than the others.
_LEAST_ENTRY_BYTES = 2 * 1024

# A part of a long range has about so many bytes at least: less costs more as a task of its own.
_PART_BYTES = 32 * 1024 * 1024

# A bookie reads a hundred entries ahead of each reader. If entries are larger, the bookie's cache
# cannot hold them for several readers, and it reads them again and again.
_MOST_CUT_ENTRY_BYTES = 1024 * 1024


@dataclass(frozen=True)
class EntryRange:
    """Entries of one topic partition after ``after`` up to and including ``end``.

    ``after_batch_index`` belongs to the first entry after ``after``: its messages up to that index
    were read before. ``end_batch_index`` belongs to the entry at ``end``: only its messages up to
    that index are in the range. ``after_index`` is the broker's index of the last message that was
    read before, and ``end_index`` that of the last one of the range, if they are known.
    ``pinned_from``: a durable cursor has retained all unread entries after this position, which
    distinguishes loss from a hole if there is no index (see ``loss``); None if there is no cursor.
    ``was_gone``: the topic had lost ``after`` before the read began there. ``clock_ms`` is the time
    of the batch, if its offset carries one; a range without entries only carries that. ``end_ms``
    is the broker's time of the entry at ``end``, if it gives one: a batch that is run again has
    reached that time even if the entry is gone. ``is_end_stored``: the topic had an entry at
    ``end`` or after it when the range was planned. ``parts`` is into how many ranges ``split`` cuts
    it at most. ``is_first``: the read of the topic partition begins here, and nobody has kept what
    follows. With ``read_compacted`` it is what compaction has left.
    """

    topic_partition: str
    after: Position
    end: Position
    after_batch_index: int | None = None
    clock_ms: int | None = None
    end_batch_index: int | None = None
    after_index: int | None = None
    pinned_from: Position | None = None
    was_gone: bool = False
    end_index: int | None = None
    end_ms: int | None = None
    is_end_stored: bool = False
    parts: int = 1
    is_first: bool = False

    @property
    def has_entries(self) -> bool:
        """Return whether the range may have entries, and not a time alone."""
        return self.end > self.after

    @property
    def crosses(self) -> bool:
        """Return whether the range ends in a later ledger than that of the last entry read
        before.
        """
        return 0 <= self.after.ledger_id < self.end.ledger_id

    def size_bytes(self, entry_bytes: int | None) -> int | None:
        """Return about how many bytes the range has; None if that is not known.

        Args:
            entry_bytes: the size of one entry, if it is known.
        """
        if not self.has_entries:
            return 0
        if entry_bytes is None or self.end.ledger_id != self.after.ledger_id:
            return None
        return self.last_ledger_bytes(entry_bytes)

    def last_ledger_bytes(self, entry_bytes: int) -> int:
        """Return about how many bytes the range has in the ledger in which it ends.

        Args:
            entry_bytes: the size of one entry.
        """
        before = self.after.entry_id if self.after.ledger_id == self.end.ledger_id else -1
        return (self.end.entry_id - before) * max(entry_bytes, _LEAST_ENTRY_BYTES)

    @property
    def through(self) -> Position:
        """Return the last position up to which the range has all messages."""
        return self.end if self.end_batch_index is None else self.end.before


def ranges(start: Offset, end: Offset) -> list[EntryRange]:
    """Return the ranges between two offsets, by topic partition; one that is new in ``end`` is read
    from its beginning.
    """
    unread = PartitionOffset(BEFORE_ALL)
    spans = []
    for name in sorted(end):
        before, after = start.get(name, unread), end[name]
        has_new_clock = after.clock_ms is not None and after.clock_ms != before.clock_ms
        if after.is_beyond(before) or has_new_clock:
            spans.append(entry_range(name, before, after))
    return spans


def entry_range(
    topic_partition: str, before: PartitionOffset, after: PartitionOffset
) -> EntryRange:
    """Return the range between two offsets of a topic partition."""
    return EntryRange(
        topic_partition,
        before.position,
        after.last_position,
        before.batch_index,
        after.clock_ms,
        after.batch_index,
        before.index,
        was_gone=before.was_gone,
        end_index=after.index,
        end_ms=after.broker_ms,
        # The offset of an entry that was there has a time, and that of another position has none.
        is_end_stored=after.time_ms is not None,
        parts=after.parts,
        is_first=before.is_first,
    )


def split(spans: list[EntryRange]) -> list[EntryRange]:
    """Return the same entries, with each range cut into its parts, if possible. A range is cut
    within the ledger that it ends in.

    The entries in earlier ledgers stay one range, since their number is not known here.
    """
    return [part for span in spans for part in _split_range(span)]


def parts_for(spans: list[EntryRange], min_partitions: int) -> list[int]:
    """Return into how many parts each range is cut, so that there are at least
    ``min_partitions``.
    """
    return [-(-min_partitions // max(len(spans), 1))] * len(spans)


def parts_of_long(spans: list[EntryRange], entry_bytes: list[int | None], tasks: int) -> list[int]:
    """Return into how many parts each range is cut: a long one into several, if there are fewer
    long ranges than tasks that can run at once.

    Without the broker's times, the rows of a topic are ordered by the producers' times. The files
    of several parts may overlap then, and would be written again. Such a range is not cut. Neither
    is one of large entries: two readers of one topic partition got a third of what one gets.

    Args:
        entry_bytes: about how large an entry of each range is; None if that is not known.
    """
    most_parts = [
        _most_parts(span, of_entry) for span, of_entry in zip(spans, entry_bytes, strict=True)
    ]
    long_ranges = sum(count > 1 for count in most_parts)
    parts: list[int] = []
    for span, most in zip(spans, most_parts, strict=True):
        count = min(most, tasks // max(long_ranges, 1))
        has_earlier_ledgers = span.after.ledger_id != span.end.ledger_id
        parts.append(count + has_earlier_ledgers if count > 1 else 1)
    return parts


def _most_parts(span: EntryRange, entry_bytes: int | None) -> int:
    if span.end_ms is None or entry_bytes is None or entry_bytes > _MOST_CUT_ENTRY_BYTES:
        return 0
    return span.last_ledger_bytes(entry_bytes) // _PART_BYTES


def _split_range(span: EntryRange) -> list[EntryRange]:
    """Return at most ``span.parts`` ranges; one of them has the entries before the last ledger, if
    there are any.
    """
    count = span.parts
    if count < 2:
        return [span]
    ledger_id, last = span.end.ledger_id, span.end.entry_id
    same_ledger = span.after.ledger_id == ledger_id
    before, ledger_count = (span.after.entry_id, count) if same_ledger else (-1, count - 1)
    ledger_count = min(ledger_count, last - before)
    cuts = {
        before + (last - before) * number // ledger_count for number in range(1, ledger_count)
    } - {before, last}
    ledger_begins = [] if same_ledger else [Position(ledger_id, -1)]
    ends = [*ledger_begins, *(Position(ledger_id, entry_id) for entry_id in sorted(cuts)), span.end]
    starts = [span.after, *ends[:-1]]
    return [
        replace(
            span,
            after=start,
            end=end,
            after_batch_index=span.after_batch_index if start == span.after else None,
            after_index=span.after_index if start == span.after else None,
            end_batch_index=span.end_batch_index if end == span.end else None,
            end_index=span.end_index if end == span.end else None,
        )
        for start, end in zip(starts, ends, strict=True)
    ]


def group(
    spans: list[EntryRange], entry_bytes: list[int | None], min_groups: int
) -> list[list[EntryRange]]:
    """Return the ranges in groups that one task each reads. Small ones share a group:
    a task costs more than the entries of a quiet topic partition.

    Args:
        entry_bytes: as for ``parts_of_long``.
        min_groups: how many groups there are at least, if there are as many ranges.
    """
    most_ranges = min(_GROUP_RANGES, len(spans) // max(min_groups, 1))
    groups: list[list[EntryRange]] = []
    filling: list[EntryRange] = []
    room_bytes = 0
    for span, of_entry in zip(spans, entry_bytes, strict=True):
        size_bytes = span.size_bytes(of_entry)
        if size_bytes is None or size_bytes > _GROUP_BYTES:
            groups.append([span])
            continue
        if not filling or size_bytes > room_bytes or len(filling) >= most_ranges:
            filling, room_bytes = [], _GROUP_BYTES
            groups.append(filling)
        filling.append(span)
        room_bytes -= size_bytes
    return groups


def share(budget: int | None, count: int) -> int | None:
    """Return one of ``count`` equal shares of a budget, at least 1; None is no limit."""
    return None if budget is None else max(1, budget // max(count, 1))
