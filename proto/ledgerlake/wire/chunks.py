"""Large messages on the wire (PIP-37): the chunk entries of a message, and the marker that lists
them.

All chunks of a message have the uuid ``<producer>-<sequence id>`` and the metadata of the message.
Each chunk has its own ``chunk_id``, the number of chunks and the total size of all chunks. The
message is compressed as a whole before it is cut. A message that is sent again gets another uuid
(``attempt_suffix``), because pulsar-client for C++ and Python skips a message if one of its chunks
is stored twice under one uuid.

All chunks but the last have the sequence id before the message's own in their metadata. If they had
the message's own, a broker that loads the topic would take the message for stored
(``MessageDeduplication`` checks for the last chunk only while it stores). It would then drop a
message that is sent again because the topic was unloaded between two of its chunks. The number
before 0 is the largest one, which Java reads as -1; the broker uses the larger one of it and
``highest_sequence_id``.

A marker (PIP-37, option 2) is an ordinary message, so every Pulsar client can still read the topic:

    num_chunks_from_msg   1, so that no client takes it for a chunk
    uuid                  the large message's
    property              ``ledgerlake.chunks`` = ``1``, the version of what follows
    payload               JSON: {"chunks": ["ledger:entry", ...]} in order

The chunks have the same property, which announces that a marker follows.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgerlake.errors import CorruptEntryError, UsageError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.reasons import MALFORMED_MARKER, Reason
from ledgerlake.wire.entry import (
    broker_time_ms,
    delivery_time_ms,
    encode_entry,
    parse_entry,
    publish_time_ms,
    text_of,
)
from ledgerlake.wire.limits import MAX_CHUNK_NAME_BYTES, MAX_CHUNKS
from ledgerlake.wire.message_id import MessageId, Position, parse_message_id
from ledgerlake.wire.schedules import SCHEDULE_PROPERTY, schedule_id_of_large

if TYPE_CHECKING:
    from collections.abc import Iterator

MARKER_PROPERTY = "ledgerlake.chunks"
MARKER_VERSION = "1"

# Payload of one entry, if the broker takes that much.
CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Marker:
    """The chunks of one message, in order, as its producer listed them in a marker at ``position``.

    ``time_ms`` is the broker's time of the marker, None if unknown, and ``publish_ms`` the
    producer's, which is any number. ``deliver_ms`` is the delivery time of the message, None if it
    has none, and ``schedule_id`` the id of its schedule, if any.
    """

    producer_name: str
    uuid: str
    position: Position
    positions: tuple[Position, ...]
    time_ms: int | None
    publish_ms: int
    deliver_ms: int | None = None
    schedule_id: str | None = None


def fits_into_one_entry(metadata: pb.MessageMetadata, size: int, max_entry_bytes: int) -> bool:
    """Return whether a message needs no chunks for sure, without encoding it: whether it takes at
    most half of an entry, even if its metadata were twice as large.
    """
    # Chunk fields repeat the producer's name, and their numbers and the suffix take less than 128
    # bytes.
    return 2 * metadata.ByteSize() + 128 + size <= max_entry_bytes // 2


def payload_limit_bytes(
    metadata: pb.MessageMetadata, size: int, max_entry_bytes: int, most_bytes: int = CHUNK_BYTES
) -> int:
    """Return how many bytes of a payload an entry gets: as ``chunk_limit_bytes``, and
    ``most_bytes`` at most.
    """
    return min(most_bytes, chunk_limit_bytes(metadata, size, max_entry_bytes))


def chunk_limit_bytes(metadata: pb.MessageMetadata, size: int, max_entry_bytes: int) -> int:
    """Return how many bytes of a payload fit into one entry beside the metadata, which each chunk
    repeats. Of a small message, for which that is not worth finding out, it is a number that is not
    below its size.

    Args:
        metadata: the message's, complete except for the chunk fields.
        size: the size of the compressed payload.
        max_entry_bytes: the largest entry that the broker accepts.

    Raises:
        UsageError: the metadata takes more than half of an entry, so that each chunk would be
            mostly metadata.
    """
    if fits_into_one_entry(metadata, size, max_entry_bytes):
        return max_entry_bytes // 2
    most = max(min(size, 2**31 - 1), 2)
    # The last chunk has another sequence id than those before it.
    both = (
        _chunk_metadata(metadata, chunk_id, most, size, attempt_suffix())
        for chunk_id in (most - 2, most)
    )
    metadata_bytes = max(len(encode_entry(chunk, b"")) for chunk in both)
    if metadata_bytes + min(size, max_entry_bytes // 2) > max_entry_bytes:
        raise UsageError(
            f"the key and the properties of a message take {metadata_bytes:,} bytes, which each of "
            f"its chunks repeats, and the broker takes entries of {max_entry_bytes:,}; make them "
            "smaller, or raise maxMessageSize in the broker's configuration"
        )
    return max_entry_bytes - metadata_bytes


def attempt_suffix() -> str:
    """Return a suffix that makes the uuids of two attempts to send a message differ."""
    return f"-{secrets.token_hex(4)}"


def encode_chunks(
    metadata: pb.MessageMetadata, packed: bytes, chunk_bytes: int, suffix: str = ""
) -> Iterator[bytes]:
    """Yield the entries of a large message, one after another.

    Args:
        metadata: the message's; chunk fields are filled in.
        packed: its payload, compressed by the codec in ``metadata``.
        suffix: is added to its uuid, see ``attempt_suffix``.
    """
    view = memoryview(packed)
    count = max(1, -(-len(packed) // chunk_bytes))
    for chunk_id in range(count):
        own = _chunk_metadata(metadata, chunk_id, count, len(packed), suffix)
        yield encode_entry(own, bytes(view[chunk_bytes * chunk_id : chunk_bytes * (chunk_id + 1)]))


def _chunk_metadata(
    metadata: pb.MessageMetadata, chunk_id: int, count: int, size: int, suffix: str
) -> pb.MessageMetadata:
    own = pb.MessageMetadata()
    own.CopyFrom(metadata)
    own.uuid = f"{metadata.producer_name}-{metadata.sequence_id}{suffix}"
    own.chunk_id = chunk_id
    if chunk_id < count - 1:
        own.sequence_id = (metadata.sequence_id - 1) % 2**64
        if metadata.sequence_id == 0:
            own.highest_sequence_id = own.sequence_id
    own.num_chunks_from_msg = count
    own.total_chunk_msg_size = size
    return own


def encode_marker(chunks: pb.MessageMetadata, sequence_id: int, positions: list[Position]) -> bytes:
    """Return the marker's entry for chunks that are stored at ``positions``; ``chunks`` is their
    common metadata.
    """
    metadata = pb.MessageMetadata(
        producer_name=chunks.producer_name,
        sequence_id=sequence_id,
        publish_time=chunks.publish_time,
        uuid=f"{chunks.producer_name}-{chunks.sequence_id}",
        num_chunks_from_msg=1,
        properties=[
            promise(),
            *(entry for entry in chunks.properties if entry.key == SCHEDULE_PROPERTY),
        ],
    )
    if chunks.HasField("deliver_at_time"):
        metadata.deliver_at_time = chunks.deliver_at_time
    return encode_entry(
        metadata, json.dumps({"chunks": [str(position) for position in positions]}).encode()
    )


def promise() -> pb.KeyValue:
    """Return the property of a marker and of the chunks that it lists."""
    return pb.KeyValue(key=MARKER_PROPERTY, value=MARKER_VERSION)


def has_promise(metadata: pb.MessageMetadata) -> bool:
    return any(entry.key == MARKER_PROPERTY for entry in metadata.properties)


def chunk_names(metadata: pb.MessageMetadata, reason: Reason) -> tuple[str, str]:
    """Return the producer name and the uuid of a chunk or of a marker.

    Raises:
        CorruptEntryError: one is not text, or is longer than ``MAX_CHUNK_NAME_BYTES`` (then with
            ``reason``).
    """
    names = text_of(metadata, "producer_name"), text_of(metadata, "uuid")
    if max(len(name.encode()) for name in names) > MAX_CHUNK_NAME_BYTES:
        raise CorruptEntryError(
            f"its producer name or uuid is longer than {MAX_CHUNK_NAME_BYTES} bytes", reason=reason
        )
    return names


def parse_marker(raw: bytes | memoryview, position: Position) -> Marker:
    """Return the list of chunks in a marker.

    Raises:
        CorruptEntryError: the checksum is wrong, or the marker is malformed, has an unknown
            version, or lists chunks that come behind it.
    """
    entry = parse_entry(raw)
    metadata = entry.metadata
    versions = [entry.value for entry in metadata.properties if entry.key == MARKER_PROPERTY]
    if versions != [MARKER_VERSION]:
        raise CorruptEntryError(
            f"a marker of version {versions}, known is {MARKER_VERSION}", reason=MALFORMED_MARKER
        )
    try:
        listed = json.loads(bytes(entry.payload))["chunks"]
        if len(listed) > MAX_CHUNKS:
            raise CorruptEntryError(
                f"a marker lists more than {MAX_CHUNKS} chunks", reason=MALFORMED_MARKER
            )
        positions = tuple(_position(text) for text in listed)
    except (ValueError, KeyError, TypeError, RecursionError, UsageError):
        raise CorruptEntryError(
            "the list of chunks does not parse", reason=MALFORMED_MARKER
        ) from None
    if len(set(positions)) != len(positions) or len(positions) < 2:
        raise CorruptEntryError(
            "a marker lists two chunks at least, each once", reason=MALFORMED_MARKER
        )
    if max(positions) >= position:
        raise CorruptEntryError(
            "a marker lists chunks that come behind it", reason=MALFORMED_MARKER
        )
    producer_name, uuid = chunk_names(metadata, MALFORMED_MARKER)
    return Marker(
        producer_name,
        uuid,
        position,
        positions,
        broker_time_ms(entry),
        publish_time_ms(entry),
        delivery_time_ms(entry),
        schedule_id_of_large(metadata),
    )


def _position(text: object) -> Position:
    message_id = parse_message_id(text) if isinstance(text, str) else None
    if not isinstance(message_id, MessageId) or not message_id.position.is_storable:
        raise ValueError(text)
    return message_id.position
