"""Where a topic partition ends now, what stands at a position, and how far a limited batch may go."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ledgerlake.client.reader import EntryReader, open_together, read_one_each
from ledgerlake.errors import CorruptEntryError, DeadlineError, TopicNotFoundError
from ledgerlake.source.last_entry import last_position
from ledgerlake.stored.offsets import Offset, PartitionOffset
from ledgerlake.wire.entry import read_stamp
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ledgerlake.client.cluster import Cluster
    from ledgerlake.client.session import Session
    from ledgerlake.wire.connection import EntryReceived, Received

# Between two looks at an idle topic: short after news, longer while nothing happens.
_POLL_FIRST_S = 0.1
_POLL_MOST_S = 1.0

# How long to wait for an entry before asking whether there is one.
_IDLE_FIRST_S = 0.2
_IDLE_MOST_S = 2.0


def next_until(reader: EntryReader, end: Position) -> EntryReceived | None:
    """The next entry up to and including ``end``, or None when there is no more.

    The entry at ``end`` itself may never come: it can be a marker, a hole, or trimmed meanwhile. So
    when nothing arrives, the broker is asked for its last entry; once that is not beyond what was
    taken, the range is complete.

    Raises:
        DeadlineError: the broker says that there is more and does not send it.
    """
    return cast("EntryReceived | None", _next_until(reader, end, EntryReader.next))


def next_together_until(reader: EntryReader, end: Position) -> Received | None:
    """The same, with those that came with it.

    Raises:
        As ``next_until``.
    """
    return _next_until(reader, end, EntryReader.next_together)


def _next_until(
    reader: EntryReader, end: Position, take: Callable[[EntryReader, float], Received | None]
) -> Received | None:
    waited_s, pause_s = 0.0, _IDLE_FIRST_S
    while reader.after < end:
        received = take(reader, pause_s)
        if received is not None:
            return received.until(end)
        last = last_position(reader, end)
        if last is None or last <= reader.after:
            return None
        waited_s += pause_s
        if waited_s > reader.cluster.settings.poll_timeout_s:
            raise DeadlineError(
                f"the broker holds entries of {reader.topic_partition} up to {last} and sends none; check its log"
            )
        reader.wake()
        pause_s = min(pause_s * 2, _IDLE_MOST_S)
    return None


class Tail:
    """The end of a topic partition. Answers are remembered for a while, so that polling costs next
    to nothing.
    """

    def __init__(self, cluster: Cluster, topic_partition: str) -> None:
        self.topic_partition = topic_partition
        self.is_gone = False
        # What the broker said last, also if that is before what was known.
        self.answered = BEFORE_ALL
        self._cluster = cluster
        self._reader = EntryReader(cluster, topic_partition, AFTER_ALL)
        self._last = PartitionOffset(BEFORE_ALL)
        self._asked_s = float("-inf")
        self._pause_s = _POLL_FIRST_S

    def now(self) -> PartitionOffset:
        """The last entry with the broker's time and index of it; BEFORE_ALL for an empty topic.

        Of a topic that is deleted it is what was known last, and ``is_gone`` says so.

        Raises:
            As ``EntryReader.next``.
        """
        try:
            return self._look()
        except TopicNotFoundError:
            self.is_gone = True
            self._asked_s = time.monotonic()
            return self._last

    def _look(self) -> PartitionOffset:
        if self._is_due:
            position = self._ask()
            if position is not None:
                self._last = describe(self._cluster, self.topic_partition, position)
        return self._last

    @property
    def _is_due(self) -> bool:
        return time.monotonic() - self._asked_s >= self._pause_s

    def _ask(self) -> Position | None:
        """Return where the topic ends, if that is further than before."""
        position = last_position(self._reader, self._last.position) or BEFORE_ALL
        self.answered = position
        moved = position > self._last.position
        self._pause_s = _POLL_FIRST_S if moved else min(self._pause_s * 2, _POLL_MOST_S)
        self._asked_s = time.monotonic()
        self.is_gone = False
        return position if moved else None

    def remember(self, known: PartitionOffset) -> None:
        """Remember an entry: if the topic ends there, nothing is read to describe it."""
        if known.position > self._last.position:
            self._last = replace(known, batch_index=None, clock_ms=None)

    def ask_again(self) -> None:
        """Do not answer the next question from memory."""
        self._asked_s = float("-inf")

    def ask_afresh(self) -> None:
        """Ask whoever serves the topic by a new look-up; a broker that has lost it may not know its
        end.
        """
        self._reader.close()
        self.ask_again()
        self.now()

    def close(self) -> None:
        self._reader.close()


def look_at_all(tails: Collection[Tail]) -> None:
    """Have many tails know where their topics end, by few waits for the broker; ``now`` then
    answers from memory.

    What cannot be had together is left to ``now``.
    """
    due = [one for one in tails if one._is_due]
    for cluster in {one._cluster for one in due}:
        open_together(cluster, [one._reader for one in due if one._cluster is cluster and one._reader.session is None])
    due = [one for one in due if one._reader.session is not None]
    for one in due:
        one._reader.ask_last_message()
    moved: dict[Session, dict[str, tuple[Tail, Position]]] = {}
    for one in due:
        try:
            position = one._ask()
        except TopicNotFoundError:
            continue
        session = one._reader.session
        if position is not None and session is not None:
            moved.setdefault(session, {})[one.topic_partition] = one, position
    for session, group in moved.items():
        found = read_one_each(session, {name: position for name, (_, position) in group.items()})
        for name, (one, _) in group.items():
            if name in found:
                one._last = _stamped(found[name])
            else:
                one.ask_again()


def describe(cluster: Cluster, topic_partition: str, position: Position) -> PartitionOffset:
    """A position with the broker's time and index of its entry, if that entry can still be read."""
    if position.entry_id < 0:
        return PartitionOffset(position)
    reader = EntryReader(cluster, topic_partition, position.before, window=1)
    try:
        entry = next_until(reader, position)
    finally:
        reader.close()
    return PartitionOffset(position) if entry is None else _stamped(entry)


def count_messages(
    cluster: Cluster, topic_partition: str, start: PartitionOffset, end: PartitionOffset, most: int
) -> int:
    """Return how many messages lie between two offsets, by the broker's index; if there is none
    they are read, up to ``most``.
    """
    if end.index is not None and start.index is not None:
        return max(end.index - start.index, 0)
    reader = EntryReader(cluster, topic_partition, start.position)
    count = 0
    try:
        while count < most and (entry := next_until(reader, end.position)) is not None:
            count += entry.message_count
    finally:
        reader.close()
    return count


class BacklogCounts:
    """Counts the messages that there are to read; the broker is asked once for each range.

    Args:
        most: of a topic partition whose entries have no index no more are counted.
    """

    def __init__(self, cluster: Cluster, most: int) -> None:
        self._cluster = cluster
        self._most = most
        self._counted: dict[str, tuple[Position, Position, int]] = {}

    def total(self, start: Offset, ends: Offset) -> int:
        """Return how many messages lie before the ends, on their topic partitions together."""
        return sum(self._count(name, start.get(name, PartitionOffset(BEFORE_ALL)), end) for name, end in ends.items())

    def _count(self, name: str, begin: PartitionOffset, end: PartitionOffset) -> int:
        known = self._counted.get(name)
        if known is None or known[:2] != (begin.position, end.position):
            count = count_messages(self._cluster, name, begin, end, self._most)
            known = self._counted[name] = (begin.position, end.position, count)
        return known[2]


class LimitPlanner:
    """Finds where a limited batch ends, by reading ahead of it; needs no admin address and no guess
    at sizes.

    It goes on where the batch before ended, so a limited stream costs the broker one extra pass.
    """

    def __init__(self, cluster: Cluster, topic_partition: str) -> None:
        self.topic_partition = topic_partition
        self._cluster = cluster
        self._reader: EntryReader | None = None
        self._ahead: EntryReceived | None = None
        self._stopped_at: Position | None = None

    def advance(
        self, after: Position, end: PartitionOffset, max_rows: int | None, max_bytes: int | None
    ) -> PartitionOffset:
        """The last entry within the budget, at least one; ``end`` if the budget covers all of it."""
        if self._reader is None or self._stopped_at != after:
            self.close()
            self._reader = EntryReader(self._cluster, self.topic_partition, after)
        rows = size = 0
        stop: PartitionOffset | None = None
        while (entry := self._ahead or next_until(self._reader, end.position)) is not None:
            count = entry.message_count
            over = (max_rows is not None and rows + count > max_rows) or (
                max_bytes is not None and size + len(entry.frames) > max_bytes
            )
            if over and stop is not None:
                self._ahead = entry
                self._stopped_at = stop.position
                return stop
            self._ahead = None
            rows, size = rows + count, size + len(entry.frames)
            stop = _stamped(entry)
        self.close()
        return end

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._ahead = self._stopped_at = None


def _stamped(entry: EntryReceived) -> PartitionOffset:
    try:
        stamp = read_stamp(entry.entry)
    except CorruptEntryError:
        return PartitionOffset(entry.position)
    return PartitionOffset(entry.position, None, stamp.time_ms, stamp.index)
