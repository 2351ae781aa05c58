"""What a topic has of due messages that were sent before, read from the topic itself.

A broker forgets the numbers of a producer that was away for long
(``brokerDeduplicationProducerInactivityTimeoutMinutes``, six hours unless told otherwise), and
without deduplication it knows none. The entries still say which producer sent them, and under which
number. So a micro-batch whose sending began is looked for behind the entry that was the topic's
last one before that.

Rules kept here:
  - It is bounded: by where the topic ends now, and by a number of entries.
  - Anybody who may write to the topic can use our producer's name. A number that the micro-batch
    does not have is not believed.
  - Of a large message the last chunk counts; without that it is not there.
  - Who may write to a topic need not be allowed to read it. That holds up nothing: it is said, and
    the end is not known.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.errors import CorruptEntryError, LedgerlakeError, TopicNotFoundError, TransportError, is_retryable
from ledgerlake.source.last_entry import last_position
from ledgerlake.source.positions import next_until
from ledgerlake.wire.entry import peek_metadata
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, Position, from_wire

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator, Mapping

    from ledgerlake.client.cluster import ClientSettings

_log = logging.getLogger(__name__)

# How many entries of one partition of the target are looked at, and how many of them may be on
# their way.
_ENTRIES_MOST = 1_000_000
_WINDOW = 500

# How long a broker that went away meanwhile is waited for; the sender tries again later.
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
            TransportError, BrokerError, ProtocolError: the same question may be answered later.
        """
        cluster = Cluster(self._settings)
        try:
            return {target: _end_if_allowed(cluster, target) for target in targets}
        finally:
            cluster.close()

    def last_numbers(self, target: str, after: Position | None, nexts: Mapping[str, int]) -> dict[str, int]:
        """Return the last number of each producer of ours that is in a partition of the target.

        Args:
            after: the entry behind which to look; None if it is not known.
            nexts: the producers by name, and the number that comes next to the micro-batch's last
                one.

        Raises:
            TransportError, BrokerError, ProtocolError: the same question may be answered later.
        """
        found: dict[str, int] = {}
        if after is None:
            _say_unknown(target, "its end was not known when the sending began")
            return found
        try:
            for producer, number in self._numbers(target, after):
                if found.get(producer, -1) < number < nexts.get(producer, 0):
                    found[producer] = number
        except TopicNotFoundError:
            return {}
        except LedgerlakeError as error:
            if is_retryable(error):
                raise
            _say_unknown(target, str(error))
        return found

    def _numbers(self, target: str, after: Position) -> Iterator[tuple[str, int]]:
        """Producers and numbers of the messages that stand behind an entry, in order."""
        cluster = Cluster(self._settings)
        reader = EntryReader(cluster, target, after, _WINDOW, read_compacted=False)
        try:
            end = last_position(reader, after) or BEFORE_ALL
            for _ in range(_ENTRIES_MOST):
                if self._stopping.is_set():
                    raise TransportError("it was stopped")
                if (entry := next_until(reader, end)) is None:
                    return
                if (message := _message(entry.entry)) is not None:
                    yield message
            if reader.after < end:
                _say_unknown(target, f"only {_ENTRIES_MOST:,} entries of it are looked at")
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
            "%s cannot be read (%s); if this process ends amid sending and the broker forgets its producers before the next "
            "start, some due messages will stand there twice: allow this role to consume that topic",
            target,
            error,
        )
        return None


def _end(cluster: Cluster, target: str) -> Position | None:
    """The last entry; ``BEFORE_ALL`` if there is none, None if the broker cannot tell."""
    reader = EntryReader(cluster, target, AFTER_ALL, read_compacted=False)
    try:
        received = reader.last_message()
    except TopicNotFoundError:
        return BEFORE_ALL
    finally:
        reader.close()
    if received is None:
        return None
    found = from_wire(received.answer.last_message_id).position
    return found if found.is_storable else BEFORE_ALL


def _message(entry: memoryview) -> tuple[str, int] | None:
    """Return who sent the message that an entry completes, and its number; None if it completes
    none.
    """
    try:
        metadata = peek_metadata(entry)
    except CorruptEntryError:
        return None
    if metadata.chunk_id < metadata.num_chunks_from_msg - 1:
        return None
    return metadata.producer_name, metadata.sequence_id


def _say_unknown(target: str, reason: str) -> None:
    _log.warning(
        "due messages were sent to %s in part before, the broker has forgotten up to where, and the topic does not tell (%s); "
        "some may stand there twice",
        target,
        reason,
    )
