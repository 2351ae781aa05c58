"""Producers for a topic of due messages: they accept messages at once, store them in order in a
thread, and report each stored message.

Only a receipt proves that the broker has stored a message. So messages that a producer of that name
may have sent before are sent again, and a broker with deduplication drops them.

A large message is sent in chunks. If the connection breaks in the middle, the message is sent again
from its first chunk under another uuid: pulsar-client for C++ and Python skips a message if the
topic has a chunk twice under one uuid.

After the first message of a producer that fails, its other messages fail too, unsent.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.producer import NumberedEntry, NumberedProducer
from ledgerlake.client.topics import full_name
from ledgerlake.errors import BrokerError, LedgerlakeError, UsageError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.chunks import attempt_suffix, chunk_limit_bytes, encode_chunks
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Callable

# How long this client tries to reconnect. The sender, which asks again for the last number, tries
# longer.
_GIVE_UP_S = 5.0
_REQUEST_S = 10.0


@dataclass(frozen=True)
class Receipt:
    """The result of sending a message: ``Ok`` or the name of an error, and the position of the
    message if the broker gave one.
    """

    name: str
    position: Position = BEFORE_ALL


_TOO_BIG = Receipt("MessageTooBig")

# The error of the messages after one that failed.
_NOT_SENT = "AlreadyClosed"


class TargetClient:
    """A connection to the cluster of the target, and a thread that sends."""

    def __init__(self, settings: ClientSettings) -> None:
        self._cluster = Cluster(
            replace(
                settings,
                give_up_after_s=min(settings.give_up_after_s, _GIVE_UP_S),
                request_timeout_s=min(settings.request_timeout_s, _REQUEST_S),
            )
        )
        self._producers: list[TargetProducer] = []
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ledgerlake-target", daemon=True)
        self._thread.start()

    def partitions(self, topic: str) -> list[str]:
        """Return the names of the topic's partitions; the broker may create the topic.

        Raises:
            BrokerError, TransportError, ProtocolError: as ``Cluster.topic_partitions``.
        """
        return self._cluster.topic_partitions(full_name(topic), creates=True)

    def open_producer(self, topic_partition: str, name: str, earlier_number: int) -> TargetProducer:
        """Open a producer.

        Args:
            earlier_number: the highest number that earlier producers of that name may have sent;
                the caller compares it with ``last_sequence_id``.

        Raises:
            BrokerError, TransportError, ProtocolError: as ``NumberedProducer``.
        """
        producer = TargetProducer(
            self._cluster, topic_partition, name, earlier_number, self._tasks.put
        )
        self._producers.append(producer)
        return producer

    def close_producer(self, producer: TargetProducer) -> None:
        """Close a producer whose messages are all answered."""
        self._producers.remove(producer)
        producer.close()

    def close(self) -> None:
        """Close the producers; messages that are not stored fail."""
        self._tasks.put(None)
        for producer in self._producers:
            producer.fail(_NOT_SENT)
        self._thread.join()
        for producer in self._producers:
            producer.close()
        self._cluster.close()

    def _work(self) -> None:
        while True:
            if self._tasks.empty():
                # Another thread opens and closes some.
                for producer in list(self._producers):
                    producer.flush()
            task = self._tasks.get()
            if task is None:
                return
            task()


class TargetProducer:
    """A producer of one partition of the target. Its messages have rising numbers."""

    def __init__(
        self,
        cluster: Cluster,
        topic_partition: str,
        name: str,
        earlier_number: int,
        enqueue: Callable[[Callable[[], None]], None],
    ) -> None:
        self._producer = NumberedProducer(
            cluster, topic_partition, name, self._stored, earlier_number
        )
        self._enqueue = enqueue
        self._pending: deque[tuple[int, Callable[[Receipt], None]]] = deque()
        self._failure = ""

    @property
    def last_sequence_id(self) -> int:
        """Return the last number that the broker knew when the producer was opened; -1 if none."""
        return self._producer.last_sequence_id

    def send(
        self, metadata: pb.MessageMetadata, content: bytes, on_receipt: Callable[[Receipt], None]
    ) -> None:
        """Accept a message, whose number is in its metadata. ``on_receipt`` is called once: at
        once, with ``MessageTooBig``, if the metadata alone is too large for the broker; else by the
        thread.
        """
        metadata.producer_name = self._producer.name
        metadata.publish_time = int(time.time() * 1000)
        try:
            limit_bytes = self._limit_bytes(metadata, content)
        except UsageError:
            on_receipt(_TOO_BIG)
            return
        if len(content) > limit_bytes:
            self._enqueue(lambda: self._send_chunks(metadata, content, on_receipt))
        else:
            self._enqueue(lambda: self._send(metadata, content, on_receipt))

    def flush(self) -> None:
        """Wait until all messages are stored or have failed; called by the thread."""
        if self._pending and not self._failure:
            self._try(self._producer.flush)

    def fail(self, reason: str) -> None:
        """Stop sending; later messages fail."""
        self._failure = self._failure or reason
        self._producer.stop()

    def close(self) -> None:
        with contextlib.suppress(LedgerlakeError):
            self._producer.close()

    def _limit_bytes(self, metadata: pb.MessageMetadata, content: bytes) -> int:
        return chunk_limit_bytes(metadata, len(content), self._producer.max_entry_bytes)

    def _send(
        self, metadata: pb.MessageMetadata, content: bytes, on_receipt: Callable[[Receipt], None]
    ) -> None:
        number = metadata.sequence_id
        self._pending.append((number, on_receipt))
        self._try(
            lambda: self._producer.send(
                NumberedEntry(encode_entry(metadata, content), number, number)
            )
        )

    def _send_chunks(
        self, metadata: pb.MessageMetadata, content: bytes, on_receipt: Callable[[Receipt], None]
    ) -> None:
        metadata.uncompressed_size = len(content)
        self._pending.append((metadata.sequence_id, on_receipt))
        self._try(
            lambda: self._producer.send_chunks(
                metadata.sequence_id,
                lambda: encode_chunks(
                    metadata, content, self._limit_bytes(metadata, content), attempt_suffix()
                ),
            )
        )

    def _try(self, call: Callable[[], Any]) -> None:
        reason = _NOT_SENT
        if not self._failure:
            try:
                call()
                return
            except Exception as error:  # whatever it is, the sender waits for an answer
                reason = (
                    error.code
                    if isinstance(error, BrokerError) and error.code
                    else type(error).__name__
                )
                self.fail(reason)
        while self._pending:
            self._pending.popleft()[1](Receipt(reason))
            reason = _NOT_SENT

    def _stored(self, sequence_id: int, position: Position) -> None:
        while self._pending and self._pending[0][0] <= sequence_id:
            number, on_receipt = self._pending.popleft()
            on_receipt(Receipt("Ok", position if number == sequence_id else BEFORE_ALL))
