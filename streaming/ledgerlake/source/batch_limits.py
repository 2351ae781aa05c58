"""The end of a micro-batch with a limit, and the number of messages that one would have, found by
reading entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.client.reader import DEFAULT_WINDOW, EntryReader
from ledgerlake.errors import TopicNotFoundError
from ledgerlake.source.latest_offset import stamped
from ledgerlake.source.read_until import next_until
from ledgerlake.stored.offsets import Offset, PartitionOffset
from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from ledgerlake.client.cluster import Cluster
    from ledgerlake.wire.connection import EntryReceived

# How many messages a reader gets ahead while their size is not known.
_LEAST_WINDOW = 4


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
            stop = stamped(entry)
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
