"""Raw entries: the bytes that BookKeeper stores.

Layout, each length a big-endian u32:

    [0x0e02 | len | BrokerEntryMetadata]   absent if the broker does not add or show it (PIP-70)
    [0x0e01 | crc32c]                      absent if the producer is very old
    [len | MessageMetadata] [payload]

Rules kept here:
  - Broker metadata is removed first. The checksum covers metadata length, metadata and payload,
    never broker metadata. (The Java client looks for the checksum before it removes broker
    metadata, and so skips the check if there is any.)
  - The first broker metadata of an entry is trusted. A second one after it was put there by the
    producer and makes the entry malformed. If a broker shows broker metadata but adds none, the
    first one may also be the producer's; the protocol has no way to tell the two apart.
  - The payload stays a memoryview. ``decode`` decrypts and decompresses it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import crc32c

from ledgerlake.errors import CorruptEntryError
from ledgerlake.outside import Unreadable, reading
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.reasons import (
    BAD_CHECKSUM,
    BATCH_COUNT,
    MALFORMED_ENTRY,
    TOO_LARGE,
    TRUNCATED_BATCH,
)
from ledgerlake.wire.fields import rejected
from ledgerlake.wire.limits import MAX_MESSAGE_METADATA_BYTES, MAX_TIME_MS

if TYPE_CHECKING:
    from google.protobuf.message import Message

MAGIC_BROKER_METADATA = 0x0E02
MAGIC_CRC32C = 0x0E01

_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class RawEntry:
    """The parts of an entry. ``broker`` is None if the broker sent no entry metadata."""

    broker: pb.BrokerEntryMetadata | None
    metadata: pb.MessageMetadata
    payload: memoryview


def parse_entry(raw: bytes | memoryview) -> RawEntry:
    """Split one entry into its parts without copying the payload.

    Raises:
        CorruptEntryError: ``bad_checksum``, or ``malformed_entry`` if a length is larger than the
            rest or the metadata does not parse; ``too_large``, if the metadata is.
    """
    broker, rest = split_broker_metadata(memoryview(raw))
    # The first one is the broker's, so its time and index hold for the reject too.
    if broker is not None and _magic(rest) == MAGIC_BROKER_METADATA:
        raise CorruptEntryError(
            "a second broker entry metadata, which no broker adds", reason=MALFORMED_ENTRY
        )
    body = _verify_checksum(rest)
    metadata_bytes, payload = _take_sized(body, "message metadata")
    return RawEntry(broker, _parse(pb.MessageMetadata, metadata_bytes, "message metadata"), payload)


def split_broker_metadata(raw: memoryview) -> tuple[pb.BrokerEntryMetadata | None, memoryview]:
    """Return the broker's metadata, and the rest, which is what the producer sent.

    Raises:
        CorruptEntryError: ``malformed_entry``, also if a number in it is out of range.
    """
    if _magic(raw) != MAGIC_BROKER_METADATA:
        return None, raw
    metadata_bytes, rest = _take_sized(raw[2:], "broker entry metadata")
    broker: pb.BrokerEntryMetadata = _parse(
        pb.BrokerEntryMetadata, metadata_bytes, "broker entry metadata"
    )
    if rejected(broker, "broker_timestamp") or rejected(broker, "index"):
        raise CorruptEntryError(
            "the broker timestamp or index is out of range", reason=MALFORMED_ENTRY
        )
    return broker, rest


def _verify_checksum(raw: memoryview) -> memoryview:
    if _magic(raw) != MAGIC_CRC32C:
        return raw
    if len(raw) < 6:
        raise CorruptEntryError("the entry ends inside its checksum", reason=MALFORMED_ENTRY)
    (expected,) = _U32.unpack_from(raw, 2)
    body = raw[6:]
    actual = crc32c.crc32c(body)
    if actual != expected:
        raise CorruptEntryError(
            f"checksum {actual:08x} differs from the stored {expected:08x}", reason=BAD_CHECKSUM
        )
    return body


def _take_sized(raw: memoryview, what: str) -> tuple[memoryview, memoryview]:
    if len(raw) < 4:
        raise CorruptEntryError(
            f"the entry ends before the length of its {what}", reason=MALFORMED_ENTRY
        )
    (size,) = _U32.unpack_from(raw)
    if size > len(raw) - 4:
        raise CorruptEntryError(
            f"{what} of {size} bytes does not fit into the {len(raw) - 4} bytes left",
            reason=MALFORMED_ENTRY,
        )
    return raw[4 : 4 + size], raw[4 + size :]


def _parse(message_type: type, data: memoryview, what: str):  # type: ignore[no-untyped-def]
    _check_size(len(data), what)
    try:
        with reading():
            parsed = message_type.FromString(bytes(data))  # type: ignore[attr-defined]
    except Unreadable as failure:
        raise CorruptEntryError(
            f"{what} does not parse: {failure.error}", reason=MALFORMED_ENTRY
        ) from None
    if not parsed.IsInitialized():
        raise CorruptEntryError(f"{what} lacks a required field", reason=MALFORMED_ENTRY)
    return parsed


def _check_size(size_bytes: int, what: str) -> None:
    if size_bytes > MAX_MESSAGE_METADATA_BYTES:
        raise CorruptEntryError(
            f"{what} has {size_bytes} bytes; the limit is {MAX_MESSAGE_METADATA_BYTES}",
            reason=TOO_LARGE,
        )


def _magic(raw: memoryview) -> int:
    return int(_U16.unpack_from(raw)[0]) if len(raw) >= 2 else -1


def message_count(raw: memoryview) -> int:
    """Return how many permits an entry uses: its batch size, or 1 for a single message or an entry
    that does not parse.

    The checksum is not verified; a wrong count only makes the flow uneven.
    """
    try:
        count = peek_metadata(raw).num_messages_in_batch
    except CorruptEntryError:
        return 1
    return max(count, 1)


def index_count(raw: memoryview) -> int:
    """Return by how much an entry raised the broker's index: by one for each message, but by one
    for a batch of a transaction.
    """
    try:
        metadata = peek_metadata(raw)
    except CorruptEntryError:
        return 1
    return 1 if metadata.HasField("txnid_most_bits") else max(metadata.num_messages_in_batch, 1)


def first_index(raw: memoryview) -> int | None:
    """Return the broker's index of an entry's first message; None if it is not known."""
    try:
        index = read_stamp(raw).index
    except CorruptEntryError:
        return None
    return None if index is None else index - index_count(raw) + 1


@dataclass(frozen=True, slots=True)
class Stamp:
    """The broker's time of an entry, and the number of messages in the topic at that time, by the
    broker's index.

    A broker may add one of them, or none: ``time_ms`` is the producer's publish time if it is not
    ``by_broker``, and ``index`` is None.
    """

    time_ms: int
    index: int | None
    by_broker: bool


def read_stamp(raw: memoryview) -> Stamp:
    """Return the entry's time as the protocol defines it: the broker's time, or the publish time if
    there is none.

    Raises:
        CorruptEntryError: the metadata does not parse, or the time is out of range. The checksum is
            not verified.
    """
    broker, rest = split_broker_metadata(raw)
    index = broker.index if broker is not None and broker.HasField("index") else None
    if broker is not None and broker.HasField("broker_timestamp"):
        return Stamp(broker.broker_timestamp, index, True)
    return Stamp(_in_range(_peek(rest).publish_time), index, False)


def broker_time_ms(entry: RawEntry) -> int | None:
    """Return the time when the broker stored an entry; None if there is no broker metadata."""
    if entry.broker is not None and entry.broker.HasField("broker_timestamp"):
        return entry.broker.broker_timestamp
    return None


def publish_time_ms(entry: RawEntry) -> int:
    """Return the producer's time of an entry, any number: an unsigned 64-bit one as a signed one,
    because numbers in a checkpoint are signed.
    """
    publish_ms: int = entry.metadata.publish_time
    return publish_ms - 2**64 if publish_ms >= 2**63 else publish_ms


def _in_range(publish_ms: int) -> int:
    if publish_ms > MAX_TIME_MS:
        raise CorruptEntryError(
            f"publish_time is {publish_ms}, and there is no broker timestamp",
            reason=MALFORMED_ENTRY,
        )
    return publish_ms


def delivery_time_ms(entry: RawEntry) -> int | None:
    """Return the time when an entry is due: its delivery time, or the time when the broker stored
    it if that is later. None if it has no delivery time.
    """
    deliver_ms: int = entry.metadata.deliver_at_time
    return max(deliver_ms, broker_time_ms(entry) or 0) if 0 < deliver_ms <= MAX_TIME_MS else None


def text_of(message: Message, field: str) -> str:
    """Return a text field. If it is not UTF-8, protobuf's C parser gives its bytes.

    Raises:
        CorruptEntryError: the field is not text.
    """
    value = getattr(message, field)
    if not isinstance(value, str):
        raise CorruptEntryError(f"{field} is not text", reason=MALFORMED_ENTRY)
    return value


def peek_metadata(raw: memoryview) -> pb.MessageMetadata:
    """Return the message metadata of an entry. The checksum is not verified.

    Raises:
        CorruptEntryError: ``malformed_entry``.
    """
    return _peek(split_broker_metadata(raw)[1])


def _peek(rest: memoryview) -> pb.MessageMetadata:
    """Return the message metadata of an entry without broker metadata; the checksum is skipped."""
    body = rest[6:] if _magic(rest) == MAGIC_CRC32C else rest
    metadata_bytes, _ = _take_sized(body, "message metadata")
    metadata: pb.MessageMetadata = _parse(pb.MessageMetadata, metadata_bytes, "message metadata")
    return metadata


def take_message(
    payload: memoryview, batch_index: int, count: int
) -> tuple[pb.SingleMessageMetadata, memoryview, memoryview]:
    """Return the next message of a batch's plain payload: its metadata, its value, and the rest of
    the payload.

    Raises:
        CorruptEntryError: ``batch_count``, ``truncated_batch``, ``malformed_entry`` or
        ``too_large``.
    """
    if len(payload) == 0:
        raise CorruptEntryError(
            f"the batch claims {count} messages and holds {batch_index}", reason=BATCH_COUNT
        )
    if len(payload) < 4 or _U32.unpack_from(payload)[0] > len(payload) - 4:
        raise CorruptEntryError(
            f"the batch ends inside message {batch_index}", reason=TRUNCATED_BATCH
        )
    metadata_end = 4 + _U32.unpack_from(payload)[0]
    _check_size(metadata_end - 4, f"metadata of message {batch_index}")
    try:
        with reading():
            single = pb.SingleMessageMetadata.FromString(bytes(payload[4:metadata_end]))
    except Unreadable as failure:
        raise CorruptEntryError(
            f"metadata of message {batch_index}: {failure.error}", reason=MALFORMED_ENTRY
        ) from None
    if not single.IsInitialized():
        raise CorruptEntryError(
            f"metadata of message {batch_index} lacks a required field", reason=MALFORMED_ENTRY
        )
    end = metadata_end + single.payload_size
    if single.payload_size < 0 or end > len(payload):
        raise CorruptEntryError(
            f"the batch ends inside message {batch_index}", reason=TRUNCATED_BATCH
        )
    return single, payload[metadata_end:end], payload[end:]


def encode_entry(
    metadata: pb.MessageMetadata, payload: bytes, broker: pb.BrokerEntryMetadata | None = None
) -> bytes:
    """Return an entry as a producer sends it, with its checksum; with ``broker``, as a broker sends
    it to readers.
    """
    metadata_bytes = metadata.SerializeToString()
    body = _U32.pack(len(metadata_bytes)) + metadata_bytes + payload
    entry = _U16.pack(MAGIC_CRC32C) + _U32.pack(crc32c.crc32c(body)) + body
    if broker is None:
        return entry
    broker_bytes = broker.SerializeToString()
    return _U16.pack(MAGIC_BROKER_METADATA) + _U32.pack(len(broker_bytes)) + broker_bytes + entry


def encode_batch(messages: list[tuple[pb.SingleMessageMetadata, bytes]]) -> bytes:
    """Return the plain payload of a batch; payload sizes are filled in."""
    parts = []
    for metadata, payload in messages:
        metadata.payload_size = len(payload)
        metadata_bytes = metadata.SerializeToString()
        parts += [_U32.pack(len(metadata_bytes)), metadata_bytes, payload]
    return b"".join(parts)
