"""Publishing encoded entries: for the demo's producers with clocks of their own, and for tests of odd bytes.

The broker stores an entry as it was encoded (``wire.entry.encode_entry``); nothing is added or checked here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ledgerlake.errors import DeadlineError, TransportError

if TYPE_CHECKING:
    from ledgerlake.client.cluster import Cluster
    from ledgerlake.pb import pulsar_pb2 as pb

_PENDING_MOST = 500


class EntryProducer:
    """Sends entries to one topic partition, a bounded number ahead of their receipts."""

    def __init__(self, cluster: Cluster, topic_partition: str, name: str | None = None) -> None:
        self.topic_partition = topic_partition
        self._session = cluster.session_for(topic_partition)
        self._queue, self.name = self._session.open_producer(topic_partition, name)
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

    def flush(self) -> pb.MessageIdData | None:
        """Wait for every receipt; the id of the last entry stored since the last flush."""
        last = None
        while self._pending:
            last = self._take_receipt()
        return last

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
