"""Publishes large messages followed by a marker (PIP-37, option 2), so that a reader that missed a
chunk can find them all.

Every Pulsar client reads such a topic: the chunks as it reads any, the marker as a small message
with the property ``ledgerlake.chunks``, which it may ignore.

The size of a chunk is that of the producer's settings, but at most what the broker's largest
message (``max_message_size`` of CONNECTED) leaves beside the metadata.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ledgerlake.client.producer import EntryProducer
from ledgerlake.decode.codecs import compress
from ledgerlake.errors import UsageError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.chunks import (
    CHUNK_BYTES,
    encode_chunks,
    encode_marker,
    payload_limit_bytes,
    promise,
)
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import AnyMessageId, ChunkMessageId, MessageId, Position
from ledgerlake.wire.schedules import fault_of_large

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ledgerlake.client.cluster import Cluster


class LargeMessageProducer:
    """Sends messages of any size to one topic partition; what fits into one entry is sent as an
    ordinary message.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic_partition: str,
        *,
        name: str | None = None,
        codec: int = pb.NONE,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._producer = EntryProducer(cluster, topic_partition, name)
        self._codec = codec
        self._chunk_bytes = chunk_bytes
        self._sequence_id = self._producer.first_sequence_id

    def send(
        self,
        value: bytes | None,
        *,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        deliver_at_ms: int | None = None,
    ) -> AnyMessageId:
        """Publish one message and wait until it is stored; if it was cut into chunks, its marker
        too.

        Args:
            value: None for a message without a value.
            deliver_at_ms: when it is to be delivered, in milliseconds since 1970; at once by
                default.

        Raises:
            UsageError: the key and properties alone are too large for the broker, or are no Unicode
                text; the value is not bytes; or the message needs chunks, and repeats.
            BrokerError: the broker refused it.
            TransportError, DeadlineError: it may or may not be stored.
        """
        if not isinstance(value, bytes | None):
            raise UsageError(
                f"the value is of type {type(value).__name__}, and must be bytes; pass text as "
                "text.encode()"
            )
        try:
            metadata = pb.MessageMetadata(
                properties=[
                    pb.KeyValue(key=name, value=text) for name, text in (properties or {}).items()
                ],
                partition_key=key,
            )
        except UnicodeEncodeError:
            raise UsageError(
                "the key or a property is no Unicode text: it has half of a surrogate pair"
            ) from None
        except TypeError:
            raise UsageError("the key, and names and values of properties, must be text") from None
        metadata.producer_name = self._producer.name
        metadata.sequence_id = self._next_sequence_id()
        metadata.publish_time = int(time.time() * 1000)
        if value is None:
            metadata.null_value, value = True, b""
        metadata.compression = self._codec
        metadata.uncompressed_size = len(value)
        if deliver_at_ms is not None:
            metadata.deliver_at_time = deliver_at_ms
        packed = compress(self._codec, value)
        if len(packed) <= self._most_bytes(metadata, packed):
            (position,) = self._producer.send_and_wait([encode_entry(metadata, packed)])
            return _plain(position)
        fault = fault_of_large(metadata)
        if fault is not None:
            # The pipeline would reject it.
            raise UsageError(
                f"{fault.message}: the value has {len(packed):,} bytes, and "
                f"{self._most_bytes(metadata, packed):,} fit into one entry"
            )
        metadata.properties.append(promise())
        chunks = encode_chunks(metadata, packed, self._most_bytes(metadata, packed))
        positions = self._producer.send_and_wait(chunks)
        self._producer.send_and_wait([encode_marker(metadata, self._next_sequence_id(), positions)])
        return ChunkMessageId(_plain(positions[0]), _plain(positions[-1]))

    def close(self) -> None:
        self._producer.close()

    def abandon(self) -> None:
        """Close the producer without waiting for receipts."""
        self._producer.abandon()

    @property
    def is_open(self) -> bool:
        """Return whether the producer is open, as far as is known without a request to the
        broker.
        """
        return self._producer.is_open

    def _most_bytes(self, metadata: pb.MessageMetadata, packed: bytes) -> int:
        """Return how many bytes of a payload fit into one entry."""
        return payload_limit_bytes(
            metadata, len(packed), self._producer.max_entry_bytes, self._chunk_bytes
        )

    def _next_sequence_id(self) -> int:
        self._sequence_id += 1
        return self._sequence_id - 1


def _plain(position: Position) -> MessageId:
    return MessageId(position.ledger_id, position.entry_id)
