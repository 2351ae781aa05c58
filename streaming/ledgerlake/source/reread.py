"""Reads single entries of a topic partition again, by their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.client.cluster import shared_cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.errors import TopicNotFoundError
from ledgerlake.source.loss_watch import topic_end
from ledgerlake.source.read_until import next_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.wire.connection import EntryReceived
    from ledgerlake.wire.message_id import Position

# Entries that are read again may be as large as entries can be, so few are prefetched.
_WINDOW = 8
_NEAR = 16


def read_again(client: ClientSettings, topic_partition: str, positions: Iterable[Position]) -> Iterator[bytes | None]:
    """Yield the entries at positions, in the given order; None for an entry that the topic no longer
    has, or if the topic is gone.

    Rising positions that are near to each other are read by one reader.

    Raises:
        BrokerError, TransportError: as for a reader.
    """
    unread = iter(positions)
    try:
        yield from _read_again(client, topic_partition, unread)
    except TopicNotFoundError:
        # The entry that was being read, and those after it.
        yield None
        for _ in unread:
            yield None


def _read_again(client: ClientSettings, topic_partition: str, positions: Iterable[Position]) -> Iterator[bytes | None]:
    reader: EntryReader | None = None
    entry: EntryReceived | None = None
    try:
        for position in positions:
            if reader is None or not _is_near(reader, entry, position):
                if reader is not None:
                    reader.close()
                reader = EntryReader(shared_cluster(client, "reading again"), topic_partition, position.before, _WINDOW)
                entry = None
            has_looked_up = False
            while entry is None or entry.position < position:
                entry = next_until(reader, position)
                if entry is not None:
                    continue
                # The entry was there: a broker that has lost the topic may not know it.
                if has_looked_up or topic_end(reader.cluster, topic_partition, position, reader.after) < position:
                    break
                reader.close()
                has_looked_up = True
            yield bytes(entry.entry) if entry is not None and entry.position == position else None
    finally:
        if reader is not None:
            reader.close()


def _is_near(reader: EntryReader, entry: EntryReceived | None, position: Position) -> bool:
    """Return whether reading on is cheaper than a new start. A reader that found a gap may have
    passed over the next position.
    """
    reached = reader.after
    distance = position.entry_id - reached.entry_id
    return entry is not None and reached.ledger_id == position.ledger_id and 0 <= distance <= _NEAR
