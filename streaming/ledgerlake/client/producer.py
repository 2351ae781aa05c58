"""Publishing encoded entries: for large messages with markers, for the demo's producers with clocks of their own, and for tests.

The broker stores an entry as it was encoded (``wire.entry.encode_entry``); nothing is added or checked here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ledgerlake.client.backoff import patiently
from ledgerlake.errors import DeadlineError, TransportError
from ledgerlake.wire.message_id import Position, from_wire

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ledgerlake.client.cluster import Cluster
    from ledgerlake.client.session import Receipts, Session
    from ledgerlake.pb import pulsar_pb2 as pb

_PENDING_MOST = 500

# Of entries that may be large.
_TOGETHER_MOST = 4


class EntryProducer:
    """Sends entries to one topic partition, a bounded number ahead of their receipts.

    Opening it waits for a broker that is away or still loads the topic.

    Raises:
        TopicNotFoundError, BrokerError, TransportError: as for a reader.
    """

    def __init__(self, cluster: Cluster, topic_partition: str, name: str | None = None) -> None:
        def open_once() -> tuple[Session, Receipts, str]:
            session = cluster.session_for(topic_partition)
            return session, *session.open_producer(topic_partition, name)

        self.topic_partition = topic_partition
        self._session, self._queue, self.name = patiently(open_once, cluster.settings.give_up_after_s)
        self._pending = 0
        self._sequence = 0

    def send(self, entry: bytes, message_count: int = 1) -> None:
        """Queue one entry; waits while too many receipts are missing.

        Raises:
            BrokerError: an earlier entry was refused.
            TransportError, DeadlineError: the connection failed; what had no receipt may or may not be stored.
        """
        self._session.send_entry(self._queue, self._sequence, message_count, entry)
        self._sequence += 1
        self._pending += 1
        while self._pending >= _PENDING_MOST:
            self._take_receipt()

    def send_and_wait(self, entries: Iterable[bytes]) -> list[Position]:
        """Send entries and wait until all are stored; where they stand, in order.

        Raises:
            As ``send``.
        """
        self.flush()
        stored = []
        for entry in entries:
            self.send(entry)
            if self._pending > _TOGETHER_MOST:
                stored.append(self._take_receipt())
        while self._pending:
            stored.append(self._take_receipt())
        return [from_wire(one).position for one in stored]

    def flush(self) -> None:
        """Wait for every receipt."""
        while self._pending:
            self._take_receipt()

    def close(self) -> None:
        self.flush()
        self._session.close_producer(self._queue)

    def _take_receipt(self) -> pb.MessageIdData:
        deadline = time.monotonic() + self._session.request_timeout_s
        receipt = self._session.next_receipt(self._queue, deadline)
        if receipt is None:
            if self._queue.closed:
                raise TransportError(f"the broker closed the producer of {self.topic_partition}")
            raise DeadlineError(f"the broker stored nothing for {self._session.request_timeout_s:g} s")
        self._pending -= 1
        return receipt
