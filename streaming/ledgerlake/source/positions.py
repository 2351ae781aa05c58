"""Finds the current end of a topic partition, and the end of a limited batch; reads entries up to
an end.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ledgerlake.client.reader import DEFAULT_WINDOW, EntryReader, close_together, open_together, read_one_each
from ledgerlake.errors import CorruptEntryError, DeadlineError, LedgerlakeError, TopicNotFoundError
from ledgerlake.source.last_entry import last_position
from ledgerlake.stored.offsets import Offset, PartitionOffset
from ledgerlake.wire.entry import peek_metadata, read_stamp
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ledgerlake.client.cluster import Cluster
    from ledgerlake.client.session import Session
    from ledgerlake.wire.connection import EntryReceived, Received

# How often an idle topic is checked: often after new entries, less often while there are none.
_POLL_FIRST_S = 0.1
_POLL_MOST_S = 1.0

# Up to so many entries, and bytes by the size of the last ones, a reader reads on to the end of a
# topic partition.
_NEAR_ENTRIES = 16
_NEAR_BYTES = 64 * 1024

# How many messages a reader gets ahead while their size is not known.
_LEAST_WINDOW = 4

# How long to wait for an entry before asking whether there is one.
_IDLE_FIRST_S = 0.2
_IDLE_MOST_S = 2.0


def next_until(reader: EntryReader, end: Position) -> EntryReceived | None:
    """Return the next entry up to and including ``end``; None if there is no more.

    The entry at ``end`` itself may never come: it can be a marker, a hole, or trimmed. So if
    nothing arrives, the broker is asked for its last entry. If that was read already, the range is
    complete.

    Raises:
        DeadlineError: the broker has more entries and does not send them.
    """
    return cast("EntryReceived | None", _next_until(reader, end, EntryReader.next))


def next_together_until(reader: EntryReader, end: Position) -> Received | None:
    """Return the next entries that came together, up to and including ``end``; None if there are no
    more.

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
                f"the broker has entries of {reader.topic_partition} up to {last} and sends none; check its log"
            )
        reader.wake()
        pause_s = min(pause_s * 2, _IDLE_MOST_S)
    return None


class LatestOffset:
    """The end of a topic partition. Answers are cached for a while, so that polling is cheap."""

    def __init__(self, cluster: Cluster, topic_partition: str) -> None:
        self.topic_partition = topic_partition
        self.is_gone = False
        # About how many bytes an entry has, by the last ones; None before the first.
        self.entry_bytes: int | None = None
        # The broker's last answer, even if that is before what it answered earlier.
        self.answered = BEFORE_ALL
        self._cluster = cluster
        self._reader = EntryReader(cluster, topic_partition, AFTER_ALL)
        self._offset = PartitionOffset(BEFORE_ALL)
        self._asked_s = float("-inf")
        self._pause_s = _POLL_FIRST_S

    @property
    def session(self) -> Session | None:
        """Return the open session with the broker; None if there is none."""
        return self._reader.session

    def get(self) -> PartitionOffset:
        """Return the last entry with the broker's time and index of it; BEFORE_ALL for an empty
        topic.

        If the topic is deleted, ``is_gone`` is set, and the last known offset is returned.

        Raises:
            As ``EntryReader.next``.
        """
        try:
            return self._refresh()
        except TopicNotFoundError:
            self.is_gone = True
            self._asked_s = time.monotonic()
            return self._offset

    def _refresh(self) -> PartitionOffset:
        if self._is_due:
            position = self._ask()
            if position is not None:
                entry = _entry_at(self._cluster, self.topic_partition, position)
                self._describe(position, entry)
        return self._offset

    def _describe(self, position: Position, entry: EntryReceived | None) -> None:
        self._offset = _offset_at(position, entry)
        if entry is not None:
            # One small entry among large ones is not taken for all.
            self.entry_bytes = max(_entry_bytes(entry), (self.entry_bytes or 0) * 3 // 4)

    @property
    def _is_due(self) -> bool:
        return time.monotonic() - self._asked_s >= self._pause_s

    def _ask(self) -> Position | None:
        """Return the end of the topic; None if it has not moved."""
        position = last_position(self._reader, self._offset.position) or BEFORE_ALL
        self.answered = position
        moved = position > self._offset.position
        self._pause_s = _POLL_FIRST_S if moved else min(self._pause_s * 2, _POLL_MOST_S)
        self._asked_s = time.monotonic()
        self.is_gone = False
        return position if moved else None

    def remember(self, offset: PartitionOffset) -> None:
        """Remember the offset of an entry: if the topic ends there, nothing is read to describe it."""
        if offset.position > self._offset.position:
            self._offset = replace(offset, batch_index=None, clock_ms=None)

    def expire(self) -> None:
        """Expire the cached answer: the next ``get`` asks the broker."""
        self._asked_s = float("-inf")

    def ask_anew(self) -> None:
        """Look the topic up again, and ask the broker that serves it now. A broker that has lost
        the topic may not know its end.
        """
        self._reader.close()
        self.expire()
        self.get()

    def close(self) -> None:
        self._reader.close()

    def _reader_before(self, position: Position) -> EntryReader:
        """Return a reader that soon gets the entry at a position: the one that is open, if it is not
        far before it, since a subscription costs the broker much more than a few small entries.
        """
        reader = self._reader
        most_entries = min(_NEAR_ENTRIES, max(1, _NEAR_BYTES // (self.entry_bytes or _NEAR_BYTES)))
        is_in_ledger = reader.session is not None and reader.after.ledger_id == position.ledger_id
        if is_in_ledger and not reader.read_compacted and 0 < reader.distance(position) <= most_entries:
            return reader
        return EntryReader(self._cluster, self.topic_partition, position.before, read_compacted=False)

    def _take(self, reader: EntryReader, entry: EntryReceived | None) -> EntryReader | None:
        """Take the last entry from a reader, which asks for the end from now on; return the reader
        that is not needed any more, if there is one.
        """
        if entry is None:
            self.expire()
            return reader
        self._describe(entry.position, entry)
        if reader is self._reader or self._reader.read_compacted:
            return None if reader is self._reader else reader
        former, self._reader = self._reader, reader
        return former


def refresh_all(offsets: Collection[LatestOffset]) -> None:
    """Ask for the ends of many topic partitions with few round trips; ``get`` then returns the
    cached answers.

    If a broker does not answer for one of them, its ``get`` asks again.
    """
    due = [offset for offset in offsets if offset._is_due]
    for cluster in {offset._cluster for offset in due}:
        closed = [offset._reader for offset in due if offset._cluster is cluster and offset._reader.session is None]
        open_together(cluster, closed)
    due = [offset for offset in due if offset._reader.session is not None]
    with suppress(LedgerlakeError), ExitStack() as requests:
        for session in {offset._reader.session for offset in due}:
            if session is not None:
                requests.enter_context(session.together())
        for offset in due:
            offset._reader.ask_last_message()
    moved: dict[Session, list[tuple[LatestOffset, Position]]] = {}
    for offset in due:
        try:
            position = offset._ask()
        except TopicNotFoundError:
            continue
        session = offset._reader.session
        if position is not None and session is not None:
            moved.setdefault(session, []).append((offset, position))
    for session, group in moved.items():
        readers = [offset._reader_before(position) for offset, position in group]
        entries = read_one_each(
            session, [(reader, position) for reader, (_, position) in zip(readers, group, strict=True)]
        )
        left = [offset._take(reader, entries.get(reader)) for reader, (offset, _) in zip(readers, group, strict=True)]
        close_together(session, [reader for reader in left if reader is not None])


def describe(cluster: Cluster, topic_partition: str, position: Position) -> PartitionOffset:
    """Return a position with the broker's time and index of its entry, if that entry can still be
    read.
    """
    return _offset_at(position, _entry_at(cluster, topic_partition, position))


def _entry_at(cluster: Cluster, topic_partition: str, position: Position) -> EntryReceived | None:
    if position.entry_id < 0:
        return None
    reader = EntryReader(cluster, topic_partition, position.before, window=1)
    try:
        return next_until(reader, position)
    finally:
        reader.close()


def count_messages(
    cluster: Cluster, topic_partition: str, start: PartitionOffset, end: PartitionOffset, max_count: int
) -> int:
    """Return the number of messages between two offsets, by the broker's index. If there is no
    index, the messages are read and counted, up to ``max_count``.
    """
    if end.index is not None and start.index is not None:
        return max(end.index - start.index, 0)
    reader = EntryReader(cluster, topic_partition, start.position)
    count = 0
    try:
        while count < max_count and (entry := next_until(reader, end.position)) is not None:
            count += entry.message_count
    finally:
        reader.close()
    return count


class BacklogCounts:
    """Counts the unread messages; the broker is asked once for each range.

    Args:
        max_count: where to stop counting in a topic partition whose entries have no index.
    """

    def __init__(self, cluster: Cluster, max_count: int) -> None:
        self._cluster = cluster
        self._max_count = max_count
        self._counted: dict[str, tuple[Position, Position, int]] = {}

    def total(self, start: Offset, ends: Offset) -> int:
        """Return the number of messages before the ends, of all topic partitions together."""
        return sum(self._count(name, start.get(name, PartitionOffset(BEFORE_ALL)), end) for name, end in ends.items())

    def _count(self, name: str, begin: PartitionOffset, end: PartitionOffset) -> int:
        counted = self._counted.get(name)
        if counted is None or counted[:2] != (begin.position, end.position):
            try:
                count = count_messages(self._cluster, name, begin, end, self._max_count)
            except TopicNotFoundError:
                # There is no reason to wait: the tasks report the loss.
                count = self._max_count
            counted = self._counted[name] = (begin.position, end.position, count)
        return counted[2]


class LimitPlanner:
    """Finds the end of a limited batch by reading its entries; without an admin address or
    estimated sizes.

    It continues at the end of the last batch, so a limited stream costs the broker one extra pass.
    """

    def __init__(self, cluster: Cluster, topic_partition: str) -> None:
        self.topic_partition = topic_partition
        self._cluster = cluster
        self._reader: EntryReader | None = None
        self._next_entry: EntryReceived | None = None
        self._stopped_at: Position | None = None

    def advance(
        self, after: Position, end: PartitionOffset, max_rows: int | None, max_bytes: int | None
    ) -> PartitionOffset:
        """Return the last entry within the budget, at least the first one; ``end`` if the budget
        covers all of them.
        """
        if self._reader is None or self._stopped_at != after:
            self.close()
            self._reader = EntryReader(self._cluster, self.topic_partition, after, _LEAST_WINDOW)
        rows = size = 0
        stop: PartitionOffset | None = None
        while (entry := self._next_entry or next_until(self._reader, end.position)) is not None:
            count = entry.message_count
            is_over = (max_rows is not None and rows + count > max_rows) or (
                max_bytes is not None and size + len(entry.frames) > max_bytes
            )
            if is_over and stop is not None:
                self._next_entry = entry
                self._stopped_at = stop.position
                return stop
            self._next_entry = None
            rows, size = rows + count, size + len(entry.frames)
            self._reader.set_window(_messages_within(max_rows, max_bytes, size // max(rows, 1)))
            stop = _stamped(entry)
        self.close()
        return end

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._next_entry = self._stopped_at = None


def _messages_within(max_rows: int | None, max_bytes: int | None, message_bytes: int) -> int:
    """Return how many messages to get ahead: those of a batch. Until the next batch they are received
    while others use the connection, and stay in memory.
    """
    by_rows = DEFAULT_WINDOW if max_rows is None else max_rows
    by_bytes = DEFAULT_WINDOW if max_bytes is None else max_bytes // max(message_bytes, 1)
    return max(_LEAST_WINDOW, min(DEFAULT_WINDOW, by_rows, by_bytes))


def _entry_bytes(entry: EntryReceived) -> int:
    """Return the size of an entry; of a chunk, that of an average chunk of its message, since the
    last one may be small.
    """
    try:
        metadata = peek_metadata(entry.entry)
    except CorruptEntryError:
        return len(entry.frames)
    return max(len(entry.frames), metadata.total_chunk_msg_size // max(metadata.num_chunks_from_msg, 1))


def _offset_at(position: Position, entry: EntryReceived | None) -> PartitionOffset:
    return PartitionOffset(position) if entry is None else _stamped(entry)


def _stamped(entry: EntryReceived) -> PartitionOffset:
    try:
        stamp = read_stamp(entry.entry)
    except CorruptEntryError:
        return PartitionOffset(entry.position)
    return PartitionOffset(entry.position, None, stamp.time_ms, stamp.index)
