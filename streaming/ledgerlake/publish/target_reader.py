"""Reads from a topic which due messages were sent to it before.

A broker forgets the numbers of a producer that was not connected for long
(``brokerDeduplicationProducerInactivityTimeoutMinutes``, by default six hours), and without
deduplication it knows none. The entries still have the name of their producer and their number. So
the messages of a micro-batch whose sending began are searched for after the entry that was the
topic's last one before that.

Rules kept here:
  - The search is bounded: by the topic's current end, and by a number of entries.
  - Any writer to the topic can use the pipeline's producer name. A number that the micro-batch does
    not have is ignored, and so is a message that names no origin.
  - A large message counts if its last chunk is on the topic.
  - A role that may write to a topic need not be allowed to read it. Then a warning is logged, and
    the end is not known.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.errors import (
    CorruptEntryError,
    LedgerlakeError,
    TopicNotFoundError,
    TransportError,
    is_retryable,
)
from ledgerlake.source.read_until import next_until
from ledgerlake.source.topic_end import last_position
from ledgerlake.wire.entry import peek_metadata
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, Position, from_wire

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator, Mapping

    from ledgerlake.client.cluster import ClientSettings

_log = logging.getLogger(__name__)

# The property of a sent message that names its origin.
MESSAGE_ID = "ledgerlake.message_id"

# How many entries of one partition of the target are read, and how many of them are requested at a
# time.
_ENTRIES_MOST = 1_000_000
_WINDOW = 500

# How long to wait for a broker that disconnected; the sender tries again later.
_GIVE_UP_S = 10.0


class TargetReader:
    """Reads partitions of the target.

    Args:
        stopping: ends a search.
    """

    def __init__(self, settings: ClientSettings, stopping: threading.Event) -> None:
        self._settings = replace(settings, read_compacted=False, give_up_after_s=_GIVE_UP_S)
        self._stopping = stopping

    def ends(self, targets: Iterable[str]) -> dict[str, Position | None]:
        """Return the last entry of each partition of the target; None if it may not be read.

        Raises:
            TransportError, BrokerError, ProtocolError: the broker cannot be asked now.
        """
        cluster = Cluster(self._settings)
        try:
            return {target: _end_if_allowed(cluster, target) for target in targets}
        finally:
            cluster.close()

    def last_numbers(
        self, target: str, after: Position | None, nexts: Mapping[str, int]
    ) -> dict[str, int]:
        """Return the last number on a partition of the target of each of the pipeline's producers.

        Args:
            after: the entry after which to search; None if it is not known.
            nexts: by producer name, the number after the micro-batch's last one.

        Raises:
            TransportError, BrokerError, ProtocolError: the broker cannot be asked now.
        """
        last_numbers: dict[str, int] = {}
        if after is None:
            _warn_unknown(target, "its end was not known when the sending began")
            return last_numbers
        try:
            for producer, number in self._numbers(target, after):
                if last_numbers.get(producer, -1) < number < nexts.get(producer, 0):
                    last_numbers[producer] = number
        except TopicNotFoundError:
            return {}
        except LedgerlakeError as error:
            if is_retryable(error):
                raise
            _warn_unknown(target, str(error))
        return last_numbers

    def _numbers(self, target: str, after: Position) -> Iterator[tuple[str, int]]:
        """Yield producer and number of each message after an entry, in order."""
        cluster = Cluster(self._settings)
        reader = EntryReader(cluster, target, after, _WINDOW, read_compacted=False)
        try:
            end = last_position(reader, after) or BEFORE_ALL
            for _ in range(_ENTRIES_MOST):
                if self._stopping.is_set():
                    raise TransportError("the search was stopped")
                if (entry := next_until(reader, end)) is None:
                    return
                if (message := _message(entry.entry)) is not None:
                    yield message
            if reader.after < end:
                _warn_unknown(target, f"only {_ENTRIES_MOST:,} entries of it are read")
        finally:
            reader.close()
            cluster.close()


def _end_if_allowed(cluster: Cluster, target: str) -> Position | None:
    try:
        return _end(cluster, target)
    except LedgerlakeError as error:
        if is_retryable(error):
            raise
        _log.warning(
            "%s cannot be read (%s); if this process ends amid sending and the broker forgets its "
            "producers before the next "
            "start, some due messages will be there twice: allow this role to consume that topic",
            target,
            error,
        )
        return None


def _end(cluster: Cluster, target: str) -> Position | None:
    """Return the last entry; ``BEFORE_ALL`` if there is none, None if the broker cannot tell."""
    reader = EntryReader(cluster, target, AFTER_ALL, read_compacted=False)
    try:
        received = reader.last_message()
    except TopicNotFoundError:
        return BEFORE_ALL
    finally:
        reader.close()
    if received is None:
        return None
    position = from_wire(received.answer.last_message_id).position
    return position if position.is_storable else BEFORE_ALL


def _message(entry: memoryview) -> tuple[str, int] | None:
    """Return producer and number of the sent message that an entry completes; None if it completes
    none.
    """
    try:
        metadata = peek_metadata(entry)
    except CorruptEntryError:
        return None
    if metadata.chunk_id < metadata.num_chunks_from_msg - 1:
        return None
    if all(entry_property.key != MESSAGE_ID for entry_property in metadata.properties):
        return None
    return metadata.producer_name, metadata.sequence_id


def _warn_unknown(target: str, reason: str) -> None:
    _log.warning(
        "due messages may have been sent to %s before, the broker does not say up to where, and "
        "the topic does not tell (%s); some may be there twice",
        target,
        reason,
    )
