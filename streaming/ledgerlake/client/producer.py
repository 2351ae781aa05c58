"""Publishes encoded entries: for large messages with markers, for the demo's producers with their
own clocks, and for tests.

The broker stores an entry as it was encoded (``wire.entry.encode_entry``); nothing is added or
checked here.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgerlake.client.backoff import Backoff, with_retries
from ledgerlake.client.receipts import close_producer, next_receipt, open_producer, send_entry
from ledgerlake.errors import (
    BrokerError,
    DeadlineError,
    LedgerlakeError,
    ProducerNameError,
    TransportError,
    is_retryable,
)
from ledgerlake.wire.message_id import BEFORE_ALL, Position, from_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ledgerlake.client.channels import Receipts
    from ledgerlake.client.cluster import Cluster
    from ledgerlake.client.session import Session
    from ledgerlake.pb import pulsar_pb2 as pb

_PENDING_MOST = 500
_PENDING_BYTES_MOST = 32 * 1024 * 1024

# The most pending entries if they may be large.
_TOGETHER_MOST = 4

_ANY_ID = 2**64 - 1


def check_may_send(cluster: Cluster, topic: str) -> None:
    """Check that messages can be sent to a topic, by a producer that sends nothing.

    Raises:
        TopicNotFoundError: there is no such topic; the broker may create it for the first message.
        BrokerError, TransportError: as for a producer.
    """
    try:
        EntryProducer(cluster, cluster.topic_partitions(topic)[0]).close()
    except BrokerError as error:
        if error.code != "AuthorizationError":
            raise
        # Pulsar refuses already to describe the topic.
        raise BrokerError(
            f"the role of the credentials may not send to {topic}, for which it needs the "
            f"permission to produce ({error.message})",
            code=error.code,
        ) from None


class EntryProducer:
    """Sends entries to one topic partition, a bounded number ahead of their receipts.

    Opening it is retried while the broker does not answer or still loads the topic.

    Sequence ids continue after the last one of an earlier producer of that name. Otherwise a broker
    with deduplication would drop the entries.

    Raises:
        TopicNotFoundError, BrokerError, TransportError: as for a reader.
    """

    def __init__(self, cluster: Cluster, topic_partition: str, name: str | None = None) -> None:
        self.topic_partition = topic_partition
        self._session, self._queue, accepted = _open(cluster, topic_partition, name)
        self.name = accepted.producer_name
        self.first_sequence_id = accepted.last_sequence_id + 1
        self._pending = 0
        self._sequence = self.first_sequence_id

    @property
    def max_entry_bytes(self) -> int:
        """Return the largest size of an entry that the broker accepts."""
        return self._session.max_message_bytes

    def send(self, entry: bytes, message_count: int = 1) -> None:
        """Send an entry; wait while too many receipts are missing.

        Raises:
            BrokerError: an earlier entry was refused. TransportError, DeadlineError: the connection
            failed; entries without a receipt may or may
                not be stored.
        """
        send_entry(self._session, self._queue, self._sequence, message_count, entry)
        self._sequence += 1
        self._pending += 1
        while self._pending >= _PENDING_MOST:
            self._take_receipt()

    def send_and_wait(self, entries: Iterable[bytes]) -> list[Position]:
        """Send entries and wait until all are stored; return their positions, in order.

        Raises:
            As ``send``.
        """
        self.flush()
        receipts = []
        for entry in entries:
            self.send(entry)
            if self._pending > _TOGETHER_MOST:
                receipts.append(self._take_receipt())
        while self._pending:
            receipts.append(self._take_receipt())
        return [from_wire(receipt).position for receipt in receipts]

    def flush(self) -> None:
        """Wait for every receipt."""
        while self._pending:
            self._take_receipt()

    def close(self) -> None:
        self.flush()
        self.abandon()

    def abandon(self) -> None:
        """Close the producer without waiting for receipts. A broker that fails to do it has lost
        the producer already.
        """
        with contextlib.suppress(LedgerlakeError):
            close_producer(self._session, self._queue)

    @property
    def is_open(self) -> bool:
        """Return whether the producer is open, as far as is known without a request to the
        broker.
        """
        return self._session.usable and not self._queue.closed

    def _take_receipt(self) -> pb.MessageIdData:
        try:
            receipt = _next_receipt(self._session, self._queue, self.topic_partition)
        except BrokerError:
            # A refusal is in the place of a receipt.
            self._pending -= 1
            raise
        self._pending -= 1
        return receipt


@dataclass(frozen=True)
class NumberedEntry:
    """An entry with its sequence id; a batch also has that of its last message."""

    entry: bytes
    sequence_id: int
    highest_sequence_id: int
    message_count: int = 1
    is_chunk: bool = False


class NumberedProducer:
    """Sends entries with the caller's sequence ids, across disconnects.

    Only a receipt proves that an entry is stored. After a disconnect, entries without a receipt are
    sent again, as are those that an earlier producer of that name may have sent: a broker with
    deduplication drops those that it has. The broker's last id of a name may be one that it has
    only begun to store, so no entry is left out because of it. Without deduplication, entries
    without a receipt may be stored twice.

    A broker that refuses an entry may store later ones, and an id below a stored one is dropped for
    ever. So an entry that is larger than all before it is sent alone: the next one is sent after
    its receipt.

    Everybody who may write to the topic can use the name while this producer is not connected. The
    broker drops the ids up to the highest one that was used, and its receipt has no position then.
    So an error is raised if the broker knows an id that no producer of the caller has sent. The
    caller checks ``first_known_id`` itself.

    Raises:
        TopicNotFoundError, BrokerError, TransportError: as for a reader.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic_partition: str,
        name: str,
        on_stored: Callable[[int, Position], None] = lambda _sequence_id, _position: None,
        earlier_id: int = _ANY_ID,
    ) -> None:
        """Open the producer.

        Args:
            earlier_id: the highest id that the caller's earlier producers of that name may have
                sent.
            on_stored: called with each stored sequence id, in order, and its position;
                ``BEFORE_ALL`` if the broker does not return a position.
        """
        self.topic_partition = topic_partition
        self.name = name
        self.last_sequence_id = -1
        self._accepted_bytes = 0
        self._on_stored = on_stored
        self._cluster = cluster
        self._backoff = Backoff(give_up_after_s=cluster.settings.give_up_after_s)
        self._pending: deque[NumberedEntry] = deque()
        self._pending_bytes = 0
        self._is_stopped = False
        self._sent_id = self._sent_before_id = earlier_id
        self._open()
        self.first_known_id = self.last_sequence_id

    @property
    def max_entry_bytes(self) -> int:
        """Return the largest size of an entry that the broker accepts."""
        return self._session.max_message_bytes

    def send(self, entry: NumberedEntry) -> None:
        """Send an entry, perhaps together with later ones; wait while too many receipts are
        missing. ``flush`` sends all of them.

        Raises:
            BrokerError: an entry was refused. TransportError, DeadlineError: the connection kept
            failing for ``give_up_after_s``. ProducerNameError: somebody else has used the name.
            ValueError: the last id that the broker knew when the
            producer was opened is in the middle
                of the entry, so that the broker would drop the entire entry.
        """
        if entry.sequence_id <= self.first_known_id < entry.highest_sequence_id:
            raise ValueError(
                f"the ids {entry.sequence_id} to {entry.highest_sequence_id} are in part stored "
                "already"
            )
        is_alone = len(entry.entry) > self._accepted_bytes
        if is_alone:
            self.flush()
        self._pending.append(entry)
        self._pending_bytes += len(entry.entry)
        self._retrying(lambda: self._send(entry))
        if is_alone:
            self.flush()
            self._accepted_bytes = len(entry.entry)
        while len(self._pending) >= _PENDING_MOST or self._pending_bytes > _PENDING_BYTES_MOST:
            self._retrying(self._take_receipt)

    def send_chunks(self, sequence_id: int, chunks: Callable[[], Iterable[bytes]]) -> None:
        """Send the chunks of a large message, and wait until all are stored; after a disconnect,
        begin again with the first.

        A broker stores the chunks before the last one again. So they are not sent if the broker
        knows a later number: that was sent when the last chunk was stored. If it knows this number
        alone, it may have only begun to store the last chunk.

        Args:
            chunks: returns the entries of an attempt, with a new uuid.

        Raises:
            As ``send``.
        """
        self.flush()
        position = BEFORE_ALL
        while sequence_id >= self.last_sequence_id:
            try:
                position = self._send_all(sequence_id, chunks())
                self._check_is_stored(sequence_id, position)
                self._backoff.succeeded()
                break
            except LedgerlakeError as failure:
                self._open_again(failure)
        self._on_stored(sequence_id, position)

    def flush(self) -> None:
        """Wait until everything is stored.

        Raises:
            As ``send``.
        """
        while self._pending:
            self._retrying(self._take_receipt)

    def stop(self) -> None:
        """Have calls that wait for receipts end with a TransportError after the next one; called
        from another thread.
        """
        self._is_stopped = True

    def close(self) -> None:
        """Close the producer, without waiting for receipts."""
        with contextlib.suppress(LedgerlakeError):
            close_producer(self._session, self._queue)

    def _open(self) -> None:
        self._session, self._queue, accepted = _open(self._cluster, self.topic_partition, self.name)
        self.last_sequence_id = accepted.last_sequence_id
        self._sent_before_id = self._sent_id
        for entry in self._pending:
            self._send(entry)

    def _send_all(self, sequence_id: int, chunks: Iterable[bytes]) -> Position:
        """Send chunks, and wait until they are stored; return the position of the last one."""
        sizes: deque[int] = deque()
        position = BEFORE_ALL
        for entry in chunks:
            self._send(NumberedEntry(entry, sequence_id, sequence_id, is_chunk=True))
            sizes.append(len(entry))
            while len(sizes) >= _PENDING_MOST or sum(sizes) > _PENDING_BYTES_MOST:
                self._receipt()
                sizes.popleft()
        for _ in sizes:
            position = self._receipt()
        return position

    def _send(self, entry: NumberedEntry) -> None:
        self._sent_id = max(self._sent_id, entry.highest_sequence_id)
        send_entry(
            self._session,
            self._queue,
            entry.sequence_id,
            entry.message_count,
            entry.entry,
            later=True,
            highest_sequence_id=entry.highest_sequence_id,
            is_chunk=entry.is_chunk,
        )

    def _take_receipt(self) -> None:
        if self._pending:
            self._settle(self._receipt())

    def _receipt(self) -> Position:
        if self._is_stopped:
            raise TransportError(f"the producer of {self.topic_partition} was stopped")
        return from_wire(_next_receipt(self._session, self._queue, self.topic_partition)).position

    def _settle(self, position: Position) -> None:
        """Remove the oldest pending entry, which is stored."""
        self._check_is_stored(self._pending[0].highest_sequence_id, position)
        entry = self._pending.popleft()
        self._pending_bytes -= len(entry.entry)
        self._on_stored(entry.highest_sequence_id, position)

    def _check_is_stored(self, sequence_id: int, position: Position) -> None:
        """Check that a broker that has dropped an entry may have had it before."""
        if not position.is_storable:
            self._check_is_own(sequence_id)

    def _check_is_own(self, known_id: int) -> None:
        """Check that an id that the broker knew when the producer was opened is one of its own."""
        if known_id > self._sent_before_id:
            raise ProducerNameError(
                f"another producer has used the name {self.name} on {self.topic_partition}: the "
                f"broker drops messages with the sequence id {known_id}, which this one had not "
                "sent; look at who may write to that topic, and give this producer another name"
            )

    def _retrying(self, call: Callable[[], None]) -> None:
        """Call once; if the connection failed, open the producer again, which sends all pending
        entries.
        """
        try:
            call()
            self._backoff.succeeded()
        except LedgerlakeError as failure:
            self._open_again(failure)

    def _open_again(self, failure: LedgerlakeError) -> None:
        """Open the producer again after a failure that is worth a retry; else raise the failure."""
        while True:
            can_retry = is_retryable(failure) and not self._is_stopped
            pause_s = self._backoff.failed(time.monotonic(), failure) if can_retry else None
            if pause_s is None:
                raise failure
            time.sleep(pause_s)
            # A slow broker may still have the old producer of that name.
            self.close()
            try:
                self._open()
                self._check_is_own(self.last_sequence_id)
                return
            except LedgerlakeError as error:
                failure = error


def _open(
    cluster: Cluster, topic_partition: str, name: str | None
) -> tuple[Session, Receipts, pb.CommandProducerSuccess]:
    """Open a producer, with retries until the broker has loaded the topic."""

    def open_once() -> tuple[Session, Receipts, pb.CommandProducerSuccess]:
        session = cluster.session_for(topic_partition)
        return session, *open_producer(session, topic_partition, name)

    return with_retries(open_once, cluster.settings.give_up_after_s)


def _next_receipt(session: Session, queue: Receipts, topic_partition: str) -> pb.MessageIdData:
    receipt = next_receipt(session, queue, time.monotonic() + session.request_timeout_s)
    if receipt is None:
        if queue.closed:
            raise TransportError(f"the broker closed the producer of {topic_partition}")
        raise DeadlineError(f"the broker stored nothing for {session.request_timeout_s:g} s")
    return receipt
