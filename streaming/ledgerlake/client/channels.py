"""The channels of a connection, beside requests and their answers.

    consumer   the entries that the broker sends for one consumer id
    producer   the receipts for the entries of one producer id
    watcher    the notice that topics were created or deleted

Ids are numbers that the client chooses; each is used once in a connection.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from operator import itemgetter

from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import limits
from ledgerlake.wire.connection import EntriesReceived, EntryReceived, Event, Received

# How often the unread bytes are counted while as many bytes arrive as may be unread.
_COUNTS_TO_LIMIT = 16


@dataclass
class Consumer:
    """The unread entries of one consumer id. ``closed`` is set when the broker has closed it
    (unload, seek, takeover), or when too many bytes were unread (``Channels.drop_excess``).
    """

    consumer_id: int
    entries: deque[Received] = field(default_factory=deque)
    closed: bool = False

    def unread_bytes(self) -> int:
        """Return the size of the unread entries. Another thread may take some meanwhile, so a copy
        is counted.
        """
        return sum(len(received.frames) for received in list(self.entries))


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
        self._uncounted_bytes = 0

    @property
    def are_open(self) -> bool:
        """Return whether there is a channel."""
        return bool(self.consumers or self.producers or self.watchers)

    def unread_bytes(self) -> int:
        """Return the size of the unread entries."""
        return sum(consumer.unread_bytes() for consumer in list(self.consumers.values()))

    def drop_excess(self) -> list[Consumer]:
        """Close consumers if more than ``limits.MAX_UNREAD_BYTES`` are unread, those with the most
        first, until half of that is left. Drop their entries, and return them.

        Permits count messages, so they do not limit bytes. And the answer to a request comes behind
        entries, so they must be received. The reader of a closed consumer opens another one, which
        begins after the last entry that was taken. A consumer with one entry does not count,
        because another one would get that entry too.

        The bytes are counted anew each time that a part of the limit has arrived.
        """
        if self._uncounted_bytes < limits.MAX_UNREAD_BYTES // _COUNTS_TO_LIMIT:
            return []
        self._uncounted_bytes = 0
        dropped = []
        unread = [
            (one.unread_bytes(), one)
            for one in list(self.consumers.values())
            if len(one.entries) > 1
        ]
        unread.sort(key=itemgetter(0))
        left_bytes = sum(size for size, _ in unread)
        is_excess = left_bytes > limits.MAX_UNREAD_BYTES
        while is_excess and left_bytes > limits.MAX_UNREAD_BYTES // 2:
            size, consumer = unread.pop()
            left_bytes -= size
            consumer.closed = True
            consumer.entries.clear()
            self.consumers.pop(consumer.consumer_id, None)
            dropped.append(consumer)
        return dropped

    def take(self, event: Event) -> bool:
        """Hand an event to its channel; return False if it is not for a channel. Events of a closed
        channel are dropped.
        """
        if isinstance(event, (EntryReceived, EntriesReceived)):
            if consumer := self.consumers.get(event.consumer_id):
                consumer.entries.append(event)
                self._uncounted_bytes += len(event.frames)
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

    def close_all(self) -> None:
        """Close every channel, because the connection is closed."""
        for consumer in self.consumers.values():
            consumer.closed = True
        for receipts in self.producers.values():
            receipts.closed = True
        for watcher in self.watchers.values():
            watcher.closed = True
