"""Reads single entries of a topic partition again, by their positions.

An entry that the topic no longer has costs a new reader, and a wait if no entry follows. A topic
loses entries by the million, so each such answer is used for all positions that it covers.
"""

from __future__ import annotations

from itertools import tee
from typing import TYPE_CHECKING

from ledgerlake.client.cluster import shared_cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.errors import TopicNotFoundError
from ledgerlake.source.bounds import first_available
from ledgerlake.source.loss_watch import topic_end
from ledgerlake.source.read_until import next_until
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.wire.connection import EntryReceived
    from ledgerlake.wire.message_id import Position

# Entries that are read again may be as large as entries can be, so few are prefetched.
_WINDOW = 8
_NEAR = 16


class GoneEntries:
    """The entries that a topic partition no longer has, as far as reads have found them.

    A broker removes the oldest ledgers. So these are all entries before the topic's first ledger,
    in whatever order they are asked for, and the gap in which the last missing one was.
    """

    def __init__(self) -> None:
        self._first: Position | None = None
        self._gap = (BEFORE_ALL, BEFORE_ALL)

    def __contains__(self, position: Position) -> bool:
        begin, end = self._gap
        return (self._first is not None and position < self._first) or begin <= position < end

    def add_gap(self, position: Position, reader: EntryReader) -> None:
        """Note that an entry is missing.

        Args:
            reader: has read on from before the position, to the entry that follows or to the end.
        """
        self._gap = (position, reader.after if position < reader.after else AFTER_ALL)
        # A compacted topic may have entries from before its first ledger.
        if self._first is None and not reader.read_compacted:
            self._first = first_available(reader.cluster, reader.topic_partition)

    def add_all(self) -> None:
        """Note that the topic is gone."""
        self._gap = (BEFORE_ALL, AFTER_ALL)


def read_again_by(
    options: SourceOptions, topic_partition: str, positions: Iterable[Position], gone: GoneEntries
) -> Iterator[bytes | None]:
    """Yield entries as ``read_again``. An entry that is gone may still be among what compaction has
    left, with which the read began.
    """
    positions, same = tee(positions)
    entries = read_again(options.client, topic_partition, positions, gone)
    gone_compacted = GoneEntries()
    for position, entry in zip(same, entries, strict=True):
        if entry is None and options.read_compacted:
            (left,) = read_again(options.first_client, topic_partition, [position], gone_compacted)
            yield left
        else:
            yield entry


def read_again(
    client: ClientSettings,
    topic_partition: str,
    positions: Iterable[Position],
    gone: GoneEntries | None = None,
) -> Iterator[bytes | None]:
    """Yield the entries at positions, in the given order; None for an entry that the topic no
    longer has, or if the topic is gone.

    Rising positions that are near to each other are read by one reader.

    Args:
        gone: the gone entries of this topic partition that earlier reads found; new ones are added.

    Raises:
        BrokerError, TransportError: as for a reader.
    """
    gone = GoneEntries() if gone is None else gone
    unread = iter(positions)
    try:
        yield from _read_again(client, topic_partition, unread, gone)
    except TopicNotFoundError:
        gone.add_all()
        # The entry that was being read, and those after it.
        yield None
        for _ in unread:
            yield None


def _read_again(
    client: ClientSettings, topic_partition: str, positions: Iterable[Position], gone: GoneEntries
) -> Iterator[bytes | None]:
    reader: EntryReader | None = None
    entry: EntryReceived | None = None
    try:
        for position in positions:
            if position in gone:
                yield None
                continue
            if reader is None or not _is_near(reader, entry, position):
                if reader is not None:
                    reader.close()
                reader = EntryReader(
                    shared_cluster(client, "reading again"),
                    topic_partition,
                    position.before,
                    _WINDOW,
                )
                entry = None
            has_looked_up = False
            while entry is None or entry.position < position:
                entry = next_until(reader, position)
                if entry is not None:
                    continue
                # The entry was there: a broker that has lost the topic may not know it.
                if (
                    has_looked_up
                    or topic_end(reader.cluster, topic_partition, position, reader.after) < position
                ):
                    break
                reader.close()
                has_looked_up = True
            if entry is None:
                gone.add_gap(position, reader)
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
