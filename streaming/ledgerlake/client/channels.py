"""The channels of a connection, beside requests and their answers.

    consumer   the entries that the broker sends for one consumer id
    producer   the receipts for the entries of one producer id
    watcher    the notice that topics were created or deleted

Ids are numbers that the client chooses; each is used once in a connection.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ledgerlake.errors import ProtocolError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import limits
from ledgerlake.wire.connection import EntriesReceived, EntryReceived, Event, Received


@dataclass
class Consumer:
    """The unread entries of one consumer id. ``closed`` is set when the broker has closed it
    (unload, seek, takeover).

    ``permits`` is the number of messages that the broker may still send; each entry uses at least
    one. A broker exceeds it by what it reads at once, and by messages of producers that give a
    wrong count. ``excess_bytes`` is the size of the unread entries that came without a permit.
    """

    consumer_id: int
    entries: deque[Received] = field(default_factory=deque)
    closed: bool = False
    permits: int = 0
    excess_bytes: int = 0

    def add(self, received: Received) -> None:
        """Add entries that have arrived."""
        if not self.entries:
            self.excess_bytes = 0
        if self.permits <= 0:
            self.excess_bytes += len(received.frames)
        self.permits -= received.message_count
        self.entries.append(received)


@dataclass
class Receipts:
    """The broker's receipts for the entries of one producer id, in order."""

    producer_id: int
    arrived: deque[pb.CommandSendReceipt | pb.CommandSendError] = field(default_factory=deque)
    closed: bool = False


@dataclass
class Watcher:
    """The broker's notice that topics were created or deleted; there is none once the connection is
    ``closed``.
    """

    watcher_id: int
    changed: bool = False
    closed: bool = False


class Channels:
    """The consumers, producers and watchers of one connection, by their ids."""

    def __init__(self) -> None:
        self.consumers: dict[int, Consumer] = {}
        self.producers: dict[int, Receipts] = {}
        self.watchers: dict[int, Watcher] = {}

    def unread_bytes(self) -> int:
        """Return the size of the unread entries. Other threads may take some meanwhile, so copies are
        counted.
        """
        unread = [entry for consumer in list(self.consumers.values()) for entry in list(consumer.entries)]
        return sum(len(entry.frames) for entry in unread)

    def take(self, event: Event) -> bool:
        """Hand an event to its channel; return False if it is not for a channel. Events of a closed
        channel are dropped.

        Raises:
            ProtocolError: the broker sent more entries than it has permits for.
        """
        if isinstance(event, (EntryReceived, EntriesReceived)):
            if consumer := self.consumers.get(event.consumer_id):
                consumer.add(event)
                if consumer.excess_bytes:
                    self._check_excess()
        elif isinstance(event, pb.CommandCloseConsumer):
            if consumer := self.consumers.pop(event.consumer_id, None):
                consumer.closed = True
        elif isinstance(event, (pb.CommandSendReceipt, pb.CommandSendError)):
            if receipts := self.producers.get(event.producer_id):
                receipts.arrived.append(event)
        elif isinstance(event, pb.CommandCloseProducer):
            if receipts := self.producers.pop(event.producer_id, None):
                receipts.closed = True
        elif isinstance(event, pb.CommandWatchTopicUpdate):
            if watcher := self.watchers.get(event.watcher_id):
                watcher.changed = True
        else:
            return False
        return True

    def _check_excess(self) -> None:
        excess_bytes = sum(consumer.excess_bytes for consumer in self.consumers.values() if consumer.entries)
        if excess_bytes > limits.MAX_EXCESS_BYTES:
            raise ProtocolError(
                f"the broker sent {excess_bytes} bytes of entries without permits, over the limit of "
                f"{limits.MAX_EXCESS_BYTES}"
            )

    def close_all(self) -> None:
        """Close every channel, because the connection is closed."""
        for consumer in self.consumers.values():
            consumer.closed = True
        for receipts in self.producers.values():
            receipts.closed = True
        for watcher in self.watchers.values():
            watcher.closed = True
