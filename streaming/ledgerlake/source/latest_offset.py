"""The current end of a topic partition, with the broker's time and index of its last entry."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ledgerlake.client.reader import (
    EntryReader,
    Wanted,
    close_together,
    open_together,
    read_one_each,
)
from ledgerlake.errors import (
    BrokerError,
    CorruptEntryError,
    LedgerlakeError,
    TopicNotFoundError,
)
from ledgerlake.source.read_until import next_until
from ledgerlake.source.topic_end import Follower, last_position
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.wire.entry import peek_metadata, read_stamp
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ledgerlake.client.channels import Consumer
    from ledgerlake.client.cluster import Cluster
    from ledgerlake.client.session import Session
    from ledgerlake.wire.connection import EntryReceived
    from ledgerlake.wire.entry import Stamp

# How often an idle topic is checked: often after new entries, less often while there are none.
_POLL_FIRST_S = 0.1
_POLL_MOST_S = 1.0

# Up to so many entries, and bytes by the size of the last ones, a reader reads on to the end of a
# topic partition.
_NEAR_ENTRIES = 16
_NEAR_BYTES = 64 * 1024

# How many bytes an entry is taken for before the first one of its topic partition.
_UNKNOWN_BYTES = 512 * 1024

# How long to wait for an entry that only describes an offset.
_DESCRIBE_S = 10.0


class LatestOffset:
    """The end of a topic partition. Answers are cached for a while, so that polling is cheap."""

    def __init__(self, cluster: Cluster, topic_partition: str) -> None:
        self.topic_partition = topic_partition
        self.is_gone = False
        # If there was no topic at some time: the last known end of the one before.
        self.ended: PartitionOffset | None = None
        # About how many bytes an entry has, by the last ones; None before the first.
        self.entry_bytes: int | None = None
        # The broker's last answer, even if that is before what it answered earlier.
        self.answered = BEFORE_ALL
        self._cluster = cluster
        self._reader = EntryReader(cluster, topic_partition, AFTER_ALL)
        # The consumer whose topic is known to be the one that was read.
        self._identified: Consumer | None = None
        self._follower = Follower()
        self._offset = PartitionOffset(BEFORE_ALL)
        self._known_since_s = float("-inf")
        self._sent_s: float | None = None
        self._asked_s = float("-inf")
        self._pause_s = _POLL_FIRST_S

    @property
    def session(self) -> Session | None:
        """Return the open session with the broker; None if there is none."""
        return self._reader.session

    @property
    def is_identified(self) -> bool:
        """Return whether the topic is known to be the one that was read. A topic goes only with its
        consumers, so it stays the same as long as the consumer.
        """
        return self._reader.consumer is self._identified

    def identify(self) -> None:
        """Take the topic for the one that was read."""
        self._identified = self._reader.consumer

    @property
    def known_for_ms(self) -> int:
        """Return how long ago the broker was asked for the known end, rounded up. Entries that were
        stored before that time are not after the end.
        """
        return math.ceil((time.monotonic() - self._known_since_s) * 1000)

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
            self.is_gone, self.ended = True, self._offset
            self._asked_s = self._known_since_s = time.monotonic()
            return self._offset

    def _refresh(self) -> PartitionOffset:
        if self._is_due:
            position = self._ask()
            if position is not None:
                entry = entry_at(self._cluster, self.topic_partition, position)
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
        sent_s, self._sent_s = time.monotonic() if self._sent_s is None else self._sent_s, None
        position = last_position(self._reader, self._offset.position, self._follower) or BEFORE_ALL
        self.answered = position
        if position >= self._offset.position:
            self._known_since_s = sent_s
        moved = position > self._offset.position
        self._pause_s = _POLL_FIRST_S if moved else min(self._pause_s * 2, _POLL_MOST_S)
        self._asked_s = time.monotonic()
        self.is_gone = False
        return position if moved else None

    def remember(self, offset: PartitionOffset) -> None:
        """Remember the offset of an entry: if the topic ends there, nothing is read to
        describe it.
        """
        if offset.position > self._offset.position:
            self._offset = replace(offset, batch_index=None, clock_ms=None)

    def try_to_ask(self) -> None:
        """Subscribe to the topic partition and ask for its end, without another try.

        Raises:
            As ``EntryReader.try_to_ask``.
        """
        self._reader.try_to_ask()

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
        self._follower.close()

    def _reader_before(self, position: Position) -> EntryReader:
        """Return a reader that soon gets the entry at a position: the one that is open, if it is
        not far before it, since a subscription costs the broker much more than a few small entries.
        """
        reader = self._reader
        most_entries = min(_NEAR_ENTRIES, max(1, _NEAR_BYTES // (self.entry_bytes or _NEAR_BYTES)))
        is_in_ledger = reader.session is not None and reader.after.ledger_id == position.ledger_id
        if (
            is_in_ledger
            and not reader.read_compacted
            and 0 < reader.distance(position) <= most_entries
        ):
            return reader
        return EntryReader(
            self._cluster, self.topic_partition, position.before, read_compacted=False
        )

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
        was_identified = self.is_identified
        former, self._reader = self._reader, reader
        if was_identified:
            self.identify()
        return former


def refresh_all(offsets: Collection[LatestOffset]) -> None:
    """Ask for the ends of many topic partitions with few round trips; ``get`` then returns the
    cached answers.

    If a broker does not answer for one of them or refuses, its ``get`` asks again.
    """
    due = [offset for offset in offsets if offset._is_due]
    open_together([offset._reader for offset in due if offset._reader.session is None])
    due = [offset for offset in due if offset._reader.session is not None]
    with suppress(LedgerlakeError), ExitStack() as requests:
        for session in {offset._reader.session for offset in due}:
            if session is not None:
                requests.enter_context(session.together())
        for offset in due:
            offset._sent_s = time.monotonic()
            offset._reader.ask_last_message()
    moved: dict[Session, list[tuple[LatestOffset, Position]]] = {}
    for offset in due:
        try:
            position = offset._ask()
        except BrokerError:
            continue
        session = offset._reader.session
        if position is not None and session is not None:
            moved.setdefault(session, []).append((offset, position))
    for session, group in moved.items():
        _read_ends(session, group)


def _read_ends(session: Session, moved: Sequence[tuple[LatestOffset, Position]]) -> None:
    """Read the last entries of topic partitions of one broker. An entry is described when it
    arrives, and not kept: each may have the largest size.
    """
    wanted: list[Wanted] = []
    missing: dict[EntryReader, LatestOffset] = {}
    for offset, position in moved:
        reader = offset._reader_before(position)
        missing[reader] = offset
        wanted.append(
            Wanted(
                reader,
                position,
                _UNKNOWN_BYTES if offset.entry_bytes is None else offset.entry_bytes,
            )
        )
    left = [
        missing.pop(reader)._take(reader, entry) for reader, entry in read_one_each(session, wanted)
    ]
    left += [offset._take(reader, None) for reader, offset in missing.items()]
    close_together(session, [reader for reader in left if reader is not None])


def describe(cluster: Cluster, topic_partition: str, position: Position) -> PartitionOffset:
    """Return a position with the broker's time and index of its entry, if that entry can still be
    read.
    """
    return _offset_at(position, entry_at(cluster, topic_partition, position))


def entry_at(cluster: Cluster, topic_partition: str, position: Position) -> EntryReceived | None:
    """Return the entry at a position; None if it cannot be read."""
    if position.entry_id < 0:
        return None
    reader = EntryReader(cluster, topic_partition, position.before, window=1)
    try:
        return next_until(reader, position, _DESCRIBE_S)
    finally:
        reader.close()


def entries_at(
    cluster: Cluster, positions: Mapping[str, Position]
) -> Iterator[tuple[str, EntryReceived]]:
    """Yield the entries at positions of topic partitions, with few round trips; those that are not
    there are left out. A caller that keeps no entry has few of them in memory.
    """
    readers = {
        name: EntryReader(cluster, name, position.before, window=1, read_compacted=False)
        for name, position in positions.items()
        if position.entry_id >= 0
    }
    found: set[str] = set()
    try:
        open_together(list(readers.values()))
        by_session: dict[Session, list[Wanted]] = {}
        for name, reader in readers.items():
            if reader.session is not None:
                wanted = Wanted(reader, positions[name], _UNKNOWN_BYTES)
                by_session.setdefault(reader.session, []).append(wanted)
        for session, group in by_session.items():
            for reader, entry in read_one_each(session, group):
                found.add(reader.topic_partition)
                yield reader.topic_partition, entry
            close_together(session, [wanted.reader for wanted in group])
    finally:
        for reader in readers.values():
            reader.close()
    for name, reader in readers.items():
        # A later entry may have come in its place.
        if name not in found and reader.after < positions[name]:
            with suppress(TopicNotFoundError):
                entry_or_none = entry_at(cluster, name, positions[name])
                if entry_or_none is not None:
                    yield name, entry_or_none


def _entry_bytes(entry: EntryReceived) -> int:
    """Return the size of an entry; of a chunk, that of an average chunk of its message, since the
    last one may be small.
    """
    try:
        metadata = peek_metadata(entry.entry)
    except CorruptEntryError:
        return len(entry.frames)
    return max(
        len(entry.frames), metadata.total_chunk_msg_size // max(metadata.num_chunks_from_msg, 1)
    )


def _offset_at(position: Position, entry: EntryReceived | None) -> PartitionOffset:
    return PartitionOffset(position) if entry is None else stamped(entry)


def stamped(entry: EntryReceived) -> PartitionOffset:
    """Return the offset of an entry, with the broker's time and index of it."""
    try:
        stamp = read_stamp(entry.entry)
    except CorruptEntryError:
        return PartitionOffset(entry.position)
    return offset_of(entry.position, stamp)


def offset_of(position: Position, stamp: Stamp) -> PartitionOffset:
    """Return the offset of an entry with a stamp."""
    return PartitionOffset(position, None, stamp.time_ms, stamp.index, by_broker=stamp.by_broker)
