"""The end of a micro-batch with a limit, and the number of messages that one would have, found by
reading entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgerlake.client.reader import DEFAULT_WINDOW, EntryReader
from ledgerlake.errors import TopicNotFoundError
from ledgerlake.source.latest_offset import stamped
from ledgerlake.source.read_until import next_until
from ledgerlake.stored.offsets import Offset, PartitionOffset, messages_between
from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from ledgerlake.client.cluster import Cluster
    from ledgerlake.wire.connection import EntryReceived

# How many messages a reader gets ahead while their size is not known.
_LEAST_WINDOW = 4

# The bytes that all planners of a stream together may get ahead and keep until the next batch.
READ_AHEAD_BYTES = 64 * 1024 * 1024


def count_messages(
    cluster: Cluster,
    topic_partition: str,
    start: PartitionOffset,
    end: PartitionOffset,
    max_count: int,
) -> int:
    """Return the number of messages between two offsets, by the broker's index. If the index does
    not tell, the messages are read and counted, up to ``max_count``.
    """
    by_index = messages_between(start.index, end.index)
    if by_index is not None:
        return by_index
    reader = EntryReader(cluster, topic_partition, start.position)
    count = 0
    try:
        while count < max_count and (entry := next_until(reader, end.position)) is not None:
            count += entry.message_count
    finally:
        reader.close()
    return count


@dataclass(frozen=True)
class _Counted:
    """The number of messages of a topic partition between two positions."""

    begin: Position
    end: PartitionOffset
    count: int


class BacklogCounts:
    """Counts the unread messages. If a range has grown, only what came since is counted.

    Args:
        max_count: where to stop counting in a topic partition whose entries have no index.
    """

    def __init__(self, cluster: Cluster, max_count: int) -> None:
        self._cluster = cluster
        self._max_count = max_count
        self._counted: dict[str, _Counted] = {}

    def total(self, start: Offset, ends: Offset) -> int:
        """Return the number of messages before the ends, of all topic partitions together."""
        return sum(
            self._count(name, start.get(name, PartitionOffset(BEFORE_ALL)), end)
            for name, end in ends.items()
        )

    def _count(self, name: str, begin: PartitionOffset, end: PartitionOffset) -> int:
        counted = self._counted.get(name)
        if counted is None or counted.begin != begin.position or counted.end.is_beyond(end):
            counted = _Counted(begin.position, begin, 0)
        if counted.count < self._max_count and end.is_beyond(counted.end):
            most = self._max_count - counted.count
            try:
                count = count_messages(self._cluster, name, counted.end, end, most)
            except TopicNotFoundError:
                # There is no reason to wait: the tasks report the loss.
                count = most
            counted = _Counted(begin.position, end, counted.count + count)
        self._counted[name] = counted
        return counted.count


@dataclass(frozen=True)
class _Read:
    """What counts of an entry that was read."""

    offset: PartitionOffset
    messages: int
    size: int


class LimitPlanner:
    """Finds the end of a limited batch by reading its entries; without an admin address or
    estimated sizes.

    It continues at the end of the last batch, so a limited stream costs the broker one extra pass.
    If the entries are so large that it would get too many bytes ahead, it begins anew each time.
    """

    def __init__(self, cluster: Cluster, topic_partition: str) -> None:
        self.topic_partition = topic_partition
        self._cluster = cluster
        self._reader: EntryReader | None = None
        self._next: _Read | None = None
        self._stopped_at: Position | None = None

    def advance(
        self,
        after: Position,
        end: PartitionOffset,
        max_rows: int | None,
        max_bytes: int | None,
        ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> PartitionOffset:
        """Return the last entry within the budget, at least the first one; ``end`` if the budget
        covers all of them.

        Args:
            ahead_bytes: how many bytes of entries may come ahead, by the size of the messages so
                far.
        """
        if self._reader is None or self._stopped_at != after:
            self.close()
            self._reader = EntryReader(self._cluster, self.topic_partition, after, _LEAST_WINDOW)
        rows = size = 0
        stop: PartitionOffset | None = None
        last = end.last_position
        while (read := self._next or _read(next_until(self._reader, last), end)) is not None:
            is_over = (max_rows is not None and rows + read.messages > max_rows) or (
                max_bytes is not None and size + read.size > max_bytes
            )
            if is_over and stop is not None:
                self._next, self._stopped_at = read, stop.position
                if (
                    self._reader.outstanding
                    * _message_bytes(rows + read.messages, size + read.size)
                    > ahead_bytes
                ):
                    self.close()
                return stop
            self._next = None
            rows, size = rows + read.messages, size + read.size
            most_bytes = ahead_bytes if max_bytes is None else min(max_bytes, ahead_bytes)
            self._reader.set_window(
                _messages_within(max_rows, most_bytes // _message_bytes(rows, size))
            )
            stop = read.offset
        self.close()
        return end

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._next = self._stopped_at = None


def _read(entry: EntryReceived | None, end: PartitionOffset) -> _Read | None:
    if entry is None:
        return None
    # Its producer says how many messages an entry has. More than it has bytes are hardly in it.
    size = len(entry.frames)
    messages = min(entry.message_count, size)
    if end.batch_index is not None and entry.position > end.position:
        # Only a part of the entry is before the end.
        return _Read(end, min(messages, end.batch_index + 1), size)
    return _Read(stamped(entry), messages, size)


def _message_bytes(messages: int, size: int) -> int:
    return max(size // max(messages, 1), 1)


def _messages_within(max_rows: int | None, by_bytes: int) -> int:
    """Return how many messages to receive ahead: as many as a batch has. Until the next batch,
    messages are received while others use the connection, and stay in memory.
    """
    by_rows = DEFAULT_WINDOW if max_rows is None else max_rows
    return max(_LEAST_WINDOW, min(DEFAULT_WINDOW, by_rows, by_bytes))
