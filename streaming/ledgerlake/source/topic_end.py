"""Finds the end of a topic partition for a reader: the last message that the reader will get
(PIP-429).

For an ordinary read, the broker returns it. For a compacted read, it is found from the entry that
comes with the broker's answer. A broker of Pulsar 4.0 cannot answer if compaction left an encrypted
or an unusually compressed batch at the end; then the last message is searched for here, from the
end of the topic backwards.

A broker stores any bytes that a producer sends as metadata. If it cannot read the last entry of a
topic, it can neither return the last message nor deliver that entry until another one follows. Then
the end is the last entry that a reader gets by reading on. On a topic with traffic that may not
end. So the broker is asked again meanwhile, and a second reader shows what has come since: the
first one need not read further.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ledgerlake.client.reader import EntryReader
from ledgerlake.client.topics import split_partition
from ledgerlake.decode.codecs import DEFAULT_MAX_UNCOMPRESSED_BYTES, decompress
from ledgerlake.decode.crypto import CryptoSettings, open_entry
from ledgerlake.errors import CorruptEntryError, SetupError
from ledgerlake.options.read_settings import ReadSettings
from ledgerlake.runtime.plugins import load
from ledgerlake.wire.entry import RawEntry, parse_entry
from ledgerlake.wire.last_message import LastEntry, last_message_id
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, MessageId, Position, from_wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ledgerlake.wire.connection import EntryReceived, LastMessageIdReceived
    from ledgerlake.wire.last_message import PayloadToMessageIdConverter

# How long to wait for a reader that gets nothing, while another reader gets entries of the topic.
_QUIET_S = 2.0

# How long to wait if a late entry is found the next time.
_QUIET_AT_END_S = 0.5

# How long to read on before the broker is asked again.
_ASK_AGAIN_S = 1.0

# A reader that stays open gets few messages ahead.
_FOLLOWING_WINDOW = 100

_log = logging.getLogger(__name__)


class Follower:
    """A reader that reads on to the end of a topic partition, and stays open for the next time."""

    def __init__(self) -> None:
        self._reader: EntryReader | None = None

    def open(self, reader: EntryReader, after: Position) -> tuple[EntryReader, float]:
        """Return the reader that reads on after a position, and how long to wait for an entry: one
        that was open has got what came since.
        """
        if (
            self._reader is not None
            and self._reader.after == after
            and self._reader.session is not None
        ):
            return self._reader, 0.0
        self.close()
        self._reader = EntryReader(reader.cluster, reader.topic_partition, after, _FOLLOWING_WINDOW)
        return self._reader, _QUIET_AT_END_S

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class Arrivals:
    """The first entry that comes to a topic partition after ``are_reached_by`` was first called. A
    reader that has reached this entry has read all earlier ones, and need not read further.
    """

    def __init__(self, reader: EntryReader) -> None:
        self._reader = EntryReader(reader.cluster, reader.topic_partition, AFTER_ALL, window=1)
        self._first: EntryReceived | None = None

    def are_reached_by(self, reader: EntryReader) -> bool:
        self._first = self._first or self._reader.next(0.0)
        return self._first is not None and self._first.position <= reader.after

    def close(self) -> None:
        self._reader.close()


def last_position(
    reader: EntryReader, known_end: Position = BEFORE_ALL, follower: Follower | None = None
) -> Position | None:
    """Return the current last entry of the topic that a reader will get; None if there is none.

    Args:
        known_end: the entry after which to read on, if the broker cannot return the last one.
        follower: reads on; its owner closes it. None for a new one.

    Raises:
        As ``last_message``.
    """
    message_id = last_message(reader, known_end, follower)
    return None if message_id is None else message_id.position


def next_readable(reader: EntryReader) -> EntryReceived | None:
    """Return the next entry of a reader whose broker cannot read the last one; None if none comes
    soon.
    """
    return reader.next(_QUIET_AT_END_S)


def last_message(
    reader: EntryReader, known_end: Position = BEFORE_ALL, follower: Follower | None = None
) -> MessageId | None:
    """Return the current last message of the topic that a reader will get; None if there is none.
    ``known_end``, ``follower``: see ``last_position``.

    Raises:
        SetupError: the user's converter failed, or does not exist.
        BrokerError, TransportError, ProtocolError: as ``EntryReader.next``.
    """
    received = reader.last_message()
    if received is None:
        return _search(reader) if reader.read_compacted else _read_on(reader, known_end, follower)
    answered = _answered(received)
    if answered is None or not reader.read_compacted or not received.entry:
        return answered
    return _of_last_entry(reader, answered, received) or _search(reader)


def _answered(received: LastMessageIdReceived) -> MessageId | None:
    """Return the id that the broker answered; None if the topic has no message."""
    answered = from_wire(received.answer.last_message_id)
    return None if answered.ledger_id < 0 or answered.entry_id < 0 else answered


def _of_last_entry(
    reader: EntryReader, answered: MessageId, received: LastMessageIdReceived
) -> MessageId | None:
    """Return the last message in the entry that came with an answer; None if it cannot be read."""
    try:
        return _convert(reader, answered.position, received.entry)
    except CorruptEntryError as error:
        _log.warning(
            "the last entry that the broker sent of %s is not usable: %s",
            reader.topic_partition,
            error,
        )
        return None


def _convert(reader: EntryReader, position: Position, stored: bytes | memoryview) -> MessageId:
    """Return the id of the last message in an entry.

    Raises:
        CorruptEntryError: it does not parse.
        SetupError: the user's converter failed.
    """
    entry = parse_entry(stored)
    settings = reader.cluster.settings
    if not isinstance(settings, ReadSettings):
        settings = ReadSettings(**vars(settings))
    last = LastEntry(
        position.ledger_id,
        position.entry_id,
        split_partition(reader.topic_partition)[1],
        entry.metadata.SerializeToString(),
        _plain_payload(entry, settings.crypto),
    )
    if settings.converter is None:
        return last_message_id(last)
    converter: PayloadToMessageIdConverter = load(settings.converter)
    try:
        return converter(last)
    except Exception as error:
        raise SetupError(
            f"{settings.converter} failed on the last entry of {reader.topic_partition}: {error}"
        ) from error


def _plain_payload(entry: RawEntry, crypto: CryptoSettings) -> bytes | None:
    try:
        opened = open_entry(entry, replace(crypto, failure_action="reject"))
    except CorruptEntryError:
        return None
    metadata = opened.metadata
    return bytes(
        decompress(
            metadata.compression,
            opened.payload,
            metadata.uncompressed_size,
            DEFAULT_MAX_UNCOMPRESSED_BYTES,
        )
    )


def _read_on(
    reader: EntryReader, known_end: Position, follower: Follower | None
) -> MessageId | None:
    """Return the last entry after ``known_end`` that a reader gets, or a later one than the topic
    had at first; ``known_end`` if it gets none. If the broker can return the last message
    meanwhile, that is returned.
    """
    is_own = follower is None
    follower = follower or Follower()
    following, quiet_s = follower.open(reader, known_end)
    if quiet_s:
        _log.warning(
            "the broker cannot read the last entry of %s; reading on from %s",
            reader.topic_partition,
            known_end,
        )
    arrivals = Arrivals(reader)
    ask_at_s = time.monotonic() + _ASK_AGAIN_S
    try:
        while following.next_together(quiet_s) is not None:
            if time.monotonic() >= ask_at_s:
                received = reader.last_message()
                if received is not None:
                    return _answered(received)
                if arrivals.are_reached_by(following):
                    break
                ask_at_s = time.monotonic() + _ASK_AGAIN_S
    finally:
        arrivals.close()
        if is_own:
            follower.close()
    return (
        None
        if following.after == BEFORE_ALL
        else MessageId(following.after.ledger_id, following.after.entry_id)
    )


def _search(reader: EntryReader) -> MessageId | None:
    """Return the last message that a compacted reader gets, by a search backwards from the end of
    the uncompacted topic; None if it gets none.
    """
    uncompacted = EntryReader(
        reader.cluster, reader.topic_partition, AFTER_ALL, read_compacted=False
    )
    try:
        end = last_position(uncompacted)
    finally:
        uncompacted.close()
    if end is None:
        return None
    for start in _backwards(end):
        entry = _last_entry_from(reader, start, end)
        if entry is not None:
            try:
                return _convert(reader, entry.position, entry.entry)
            except CorruptEntryError:
                return MessageId(entry.ledger_id, entry.entry_id)
    return None


def _backwards(end: Position) -> Iterator[Position]:
    """Yield positions after which to read: just before the end, then twice as far each time, then
    the beginning of the ledger, then that of the topic.
    """
    distance = 1
    while distance <= end.entry_id:
        yield Position(end.ledger_id, end.entry_id - distance)
        distance *= 2
    yield Position(end.ledger_id, -1)
    yield BEFORE_ALL


def _last_entry_from(reader: EntryReader, after: Position, end: Position) -> EntryReceived | None:
    """Return the last entry after a position, up to ``end``, that a compacted reader gets; None if
    none comes.
    """
    following = EntryReader(reader.cluster, reader.topic_partition, after)
    last_entry = None
    try:
        while following.after < end and (entry := following.next(_QUIET_S)) is not None:
            last_entry = entry
    finally:
        following.close()
    return last_entry
