"""The last entries of a topic partition, as the broker stored them: what ``init`` and ``check``
look at.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ledgerlake.client.reader import EntryReader
from ledgerlake.errors import CorruptEntryError
from ledgerlake.source.bounds import end_position, entry_from
from ledgerlake.source.read_until import next_until
from ledgerlake.wire.entry import delivery_time_ms, parse_entry
from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from ledgerlake.client.cluster import Cluster
    from ledgerlake.wire.entry import RawEntry


@dataclass(frozen=True)
class LastEntries:
    """The last entries of a topic partition, in order, without those that do not parse.

    Args:
        end: the position of the last one; ``BEFORE_ALL`` for an empty topic.
        stored: their bytes.
    """

    topic_partition: str
    end: Position
    entries: list[RawEntry]
    stored: list[bytes] = field(default_factory=list)

    @property
    def without_broker_metadata(self) -> bool:
        """Return whether an entry has no broker timestamp."""
        return any(
            not (entry.broker and entry.broker.HasField("broker_timestamp"))
            for entry in self.entries
        )

    @property
    def stored_ms(self) -> int | None:
        """Return when the broker stored the last one, by its clock; None if it does not say."""
        if not self.entries or self.without_broker_metadata:
            return None
        broker = self.entries[-1].broker
        return None if broker is None else int(broker.broker_timestamp)

    @property
    def encrypted(self) -> RawEntry | None:
        """Return the last one that is encrypted."""
        return next(
            (entry for entry in reversed(self.entries) if entry.metadata.encryption_keys), None
        )

    @property
    def has_delayed(self) -> bool:
        """Return whether one has a delivery time."""
        for entry in self.entries:
            with contextlib.suppress(CorruptEntryError):
                if delivery_time_ms(entry) is not None:
                    return True
        return False


def last_entries(cluster: Cluster, topic_partition: str, count: int) -> LastEntries:
    """Return up to ``count`` entries at the end of a topic partition, of its last ledger.

    Raises:
        TopicNotFoundError, BrokerError, TransportError: as for a reader.
    """
    end = end_position(cluster, topic_partition)
    entries: list[RawEntry] = []
    stored: list[bytes] = []
    if end == BEFORE_ALL or end.entry_id < 0:
        return LastEntries(topic_partition, BEFORE_ALL, entries)
    reader = EntryReader(cluster, topic_partition, before_last(end, count), window=count)
    try:
        while (received := next_until(reader, end)) is not None:
            with contextlib.suppress(CorruptEntryError):
                # The bytes are valid until the next one is received.
                entry = bytes(received.entry)
                entries.append(parse_entry(entry))
                stored.append(entry)
    finally:
        reader.close()
    return LastEntries(topic_partition, end, entries, stored)


def before_last(end: Position, count: int) -> Position:
    """Return the position before the last ``count`` entries up to ``end``, of its ledger alone."""
    return Position(end.ledger_id, max(end.entry_id - count, -1))


def message_count(cluster: Cluster, last: LastEntries) -> int | None:
    """Return how many messages the topic partition has, by the broker's index; None if it gives
    none.

    Raises:
        As ``last_entries``.
    """
    if last.end == BEFORE_ALL:
        return 0
    first = entry_from(cluster, last.topic_partition, BEFORE_ALL, last.end)
    broker = last.entries[-1].broker if last.entries else None
    if first is None or first.first_index is None or broker is None or not broker.HasField("index"):
        return None
    return int(broker.index) - first.first_index + 1
