"""From a stored entry to what the rules of ``state.chunks`` need to know of it; and the marker that lists chunks.

A marker (PIP-37, option 2) is an ordinary message, so that every Pulsar client reads the topic as before:

    num_chunks_from_msg   1, which no client takes for a chunk
    uuid                  the large message's
    property              ``ledgerlake.chunks`` = ``1``, the version of what follows
    payload               JSON: {"chunks": ["ledger:entry", ...]} in order

Its chunks carry the same property, as the promise that a marker follows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ledgerlake.decode.split import MARKER_PROPERTY
from ledgerlake.errors import CorruptEntryError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.state.chunks import Chunk, SetKey
from ledgerlake.wire.entry import RawEntry, encode_entry, parse_entry
from ledgerlake.wire.message_id import MessageId, Position, parse_message_id

MARKER_VERSION = "1"


@dataclass(frozen=True, slots=True)
class Marker:
    """The chunks of one message, in order, as its producer listed them."""

    key: SetKey
    positions: tuple[Position, ...]
    time_ms: int


def read_chunk(raw: bytes | memoryview, position: Position) -> Chunk:
    """What an entry says of itself as a chunk.

    Raises:
        CorruptEntryError: bad checksum, malformed, or encrypted.
    """
    entry = parse_entry(raw)
    metadata = entry.metadata
    if metadata.encryption_keys:
        raise CorruptEntryError("the entry is encrypted", reason="encrypted")
    return Chunk(
        key=_key(metadata),
        position=position,
        chunk_id=metadata.chunk_id,
        chunk_count=metadata.num_chunks_from_msg,
        total_bytes=metadata.total_chunk_msg_size,
        size_bytes=len(entry.payload),
        time_ms=_time_ms(entry),
        marked=any(one.key == MARKER_PROPERTY for one in metadata.properties),
    )


def read_marker(raw: bytes | memoryview) -> Marker:
    """The list that a marker holds.

    Raises:
        CorruptEntryError: bad checksum, malformed, or of a version that is not known.
    """
    entry = parse_entry(raw)
    versions = [one.value for one in entry.metadata.properties if one.key == MARKER_PROPERTY]
    if versions != [MARKER_VERSION]:
        raise CorruptEntryError(f"a marker of version {versions}, known is {MARKER_VERSION}", reason="malformed_marker")
    try:
        positions = tuple(_position(text) for text in json.loads(bytes(entry.payload))["chunks"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CorruptEntryError("the list of chunks does not parse", reason="malformed_marker") from None
    if len(positions) < 2:
        raise CorruptEntryError(f"a marker of {len(positions)} chunks", reason="malformed_marker")
    return Marker(_key(entry.metadata), positions, _time_ms(entry))


def encode_marker(
    producer_name: str, sequence_id: int, uuid: str, publish_time_ms: int, chunks: list[Position]
) -> bytes:
    """A marker's entry."""
    metadata = pb.MessageMetadata(
        producer_name=producer_name,
        sequence_id=sequence_id,
        publish_time=publish_time_ms,
        uuid=uuid,
        num_chunks_from_msg=1,
        properties=[promise()],
    )
    return encode_entry(metadata, json.dumps({"chunks": [str(one) for one in chunks]}).encode())


def promise() -> pb.KeyValue:
    """The property of chunks that a marker follows, and of the marker."""
    return pb.KeyValue(key=MARKER_PROPERTY, value=MARKER_VERSION)


def _key(metadata: pb.MessageMetadata) -> SetKey:
    if not isinstance(metadata.producer_name, str) or not isinstance(metadata.uuid, str):
        raise CorruptEntryError("producer name or uuid is not text", reason="malformed_entry")
    return SetKey(metadata.producer_name, metadata.uuid)


def _time_ms(entry: RawEntry) -> int:
    if entry.broker is not None and entry.broker.HasField("broker_timestamp"):
        return entry.broker.broker_timestamp
    return entry.metadata.publish_time


def _position(text: str) -> Position:
    message_id = parse_message_id(text)
    if not isinstance(message_id, MessageId):
        raise ValueError(text)
    return message_id.position
