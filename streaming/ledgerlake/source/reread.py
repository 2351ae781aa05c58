"""Single entries of a topic partition, read again by their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.client.cluster import shared_cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.errors import TopicNotFoundError
from ledgerlake.source.positions import next_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.wire.connection import EntryReceived
    from ledgerlake.wire.message_id import Position

# Entries that are read again may be as large as entries can be, so few are asked for ahead.
_WINDOW = 8
_NEAR = 16


def read_again(client: ClientSettings, topic_partition: str, positions: Iterable[Position]) -> Iterator[bytes | None]:
    """Single entries by position, in the order asked for; None for one that the topic no longer
    has, or went with it.

    Positions that rise and are near to each other are read in one go.

    Raises:
        BrokerError, TransportError: as for a reader.
    """
    wanted = iter(positions)
    try:
        yield from _read_again(client, topic_partition, wanted)
    except TopicNotFoundError:
        # The one that was being read, and those behind it.
        yield None
        for _ in wanted:
            yield None


def _read_again(client: ClientSettings, topic_partition: str, positions: Iterable[Position]) -> Iterator[bytes | None]:
    reader: EntryReader | None = None
    taken: EntryReceived | None = None
    try:
        for position in positions:
            if reader is None or not _is_near(reader, taken, position):
                if reader is not None:
                    reader.close()
                reader = EntryReader(shared_cluster(client), topic_partition, position.before, _WINDOW)
                taken = None
            while taken is None or taken.position < position:
                taken = next_until(reader, position)
                if taken is None:
                    break
            yield bytes(taken.entry) if taken is not None and taken.position == position else None
    finally:
        if reader is not None:
            reader.close()


def _is_near(reader: EntryReader, taken: EntryReceived | None, position: Position) -> bool:
    """Return whether reading on is cheaper than a new start. A reader that found a gap may have
    passed over what comes next.
    """
    reached = reader.after
    distance = position.entry_id - reached.entry_id
    return taken is not None and reached.ledger_id == position.ledger_id and 0 <= distance <= _NEAR
