"""The reference decoder: one entry at a time, by protobuf. It is slow and simple, and decides about
all entries that the kernels do not accept.

Tests compare it with the kernels on random bytes. The steps are: verify the checksum, decrypt
(chunks when they are joined), decompress, split the batch.

Reasons that end in ``rejects``: ``bad_checksum``, ``malformed_entry``, ``unknown_codec``,
``bad_compression``, ``too_large``, ``truncated_batch``, ``batch_count``, ``encrypted``,
``undecryptable``.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

from ledgerlake.decode.codecs import decompress
from ledgerlake.decode.crypto import NO_KEYS, CryptoSettings, open_entry
from ledgerlake.errors import CorruptEntryError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.reasons import BATCH_COUNT, MALFORMED_ENTRY, TOO_LARGE
from ledgerlake.wire.chunks import has_promise
from ledgerlake.wire.entry import RawEntry, parse_entry, take_message, text_of
from ledgerlake.wire.fields import read_number, rejected
from ledgerlake.wire.limits import MAX_BATCH_MESSAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

Row = dict[str, Any]

# The key of a property, and the number that its column cannot hold.
KeptNumber = tuple[str, str] | None

# The property of a message that consists of the bytes of an entry that cannot be decrypted.
ENCRYPTED_FOR = "ledgerlake.encrypted_for"


def decode_entry(
    raw: memoryview, ledger_id: int, entry_id: int, max_bytes: int, crypto: CryptoSettings = NO_KEYS
) -> Iterator[Row]:
    """Yield the rows of one entry (columns of ``schema.VIEW``; times in microseconds); none for a
    broker's own marker.

    Rows are made one by one, but every error is raised before the first.

    Raises:
        CorruptEntryError: the entry cannot become messages; ``reason`` tells why.
        DecryptionError: there is no key for it, and the settings are to fail.
    """
    entry = parse_entry(raw)
    metadata = entry.metadata
    _check(entry)
    if metadata.HasField("marker_type"):
        return iter(())
    shared = _shared_columns(entry, ledger_id, entry_id)
    if metadata.num_chunks_from_msg > 1:
        return iter([_chunk_row(shared, entry)])
    try:
        entry = open_entry(entry, crypto)
    except CorruptEntryError:
        if crypto.failure_action != "pass":
            raise
        return iter([_opaque_row(shared, entry)])
    metadata = entry.metadata
    plain = decompress(metadata.compression, entry.payload, metadata.uncompressed_size, max_bytes)
    if metadata.HasField("num_messages_in_batch"):
        for _ in _batch_rows(shared, entry, memoryview(plain), max_bytes):
            pass
        return _batch_rows(shared, entry, memoryview(plain), max_bytes)
    row = {
        **_with_own_columns(shared, metadata),
        "value": None if metadata.null_value else bytes(plain),
    }
    return iter([row])


def _check(entry: RawEntry) -> None:
    if rejected(entry.metadata, "deliver_at_time"):
        deliver_ms = entry.metadata.deliver_at_time
        raise CorruptEntryError(
            f"deliver_at_time is {deliver_ms}, which is out of range", reason=MALFORMED_ENTRY
        )


def _shared_columns(entry: RawEntry, ledger_id: int, entry_id: int) -> Row:
    broker, metadata = entry.broker, entry.metadata
    publish_us, kept_publish = _microseconds(metadata, "publish_time")
    deliver_us, kept_deliver = _microseconds(metadata, "deliver_at_time")
    return {
        "message_id": f"{ledger_id}:{entry_id}",
        "ledger_id": ledger_id,
        "entry_id": entry_id,
        "batch_index": -1,
        "broker_timestamp": broker.broker_timestamp * 1000
        if broker and broker.HasField("broker_timestamp")
        else None,
        "broker_index": broker.index if broker and broker.HasField("index") else None,
        "publish_time": publish_us,
        "deliver_at": deliver_us if metadata.HasField("deliver_at_time") else None,
        "producer_name": text_of(metadata, "producer_name"),
        "schema_version": metadata.schema_version if metadata.HasField("schema_version") else None,
        "properties": [number for number in (kept_publish, kept_deliver) if number is not None],
    }


def _microseconds(
    source: pb.MessageMetadata | pb.SingleMessageMetadata, name: str
) -> tuple[int | None, KeptNumber]:
    milliseconds, kept = read_number(source, name)
    return (None if milliseconds is None else milliseconds * 1000), kept


def _with_own_columns(
    shared: Row,
    source: pb.MessageMetadata | pb.SingleMessageMetadata,
    numbered: pb.MessageMetadata | pb.SingleMessageMetadata | None = None,
) -> Row:
    """Return a row with the columns of the message's metadata, which is the entry's for a single
    message, and the one in the batch for a batched message.

    ``numbered`` has the sequence id, if it is not in ``source``. A number that does not fit into
    its column becomes a property.
    """
    key, key_bytes = key_of(source)
    event_us, kept_event = _microseconds(source, "event_time")
    sequence_id, kept_sequence = read_number(numbered or source, "sequence_id")
    properties = [(text_of(entry, "key"), text_of(entry, "value")) for entry in source.properties]
    kept = [number for number in (kept_event, kept_sequence) if number is not None]
    return shared | {
        "event_time": event_us or None,
        "sequence_id": sequence_id,
        "key": key,
        "key_bytes": key_bytes,
        "ordering_key": source.ordering_key if source.HasField("ordering_key") else None,
        "properties": once_each(properties + _recipients(source) + shared["properties"] + kept),
        "is_null": source.null_value,
    }


def once_each(properties: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return properties with each key once, with its last value, as Pulsar's clients read them."""
    last: dict[str, str] = {}
    for key, value in reversed(properties):
        last.setdefault(key, value)
    return list(last.items())[::-1]


def _recipients(source: pb.MessageMetadata | pb.SingleMessageMetadata) -> list[tuple[str, str]]:
    """Return the names of the keys of an encrypted entry, as a property."""
    if isinstance(source, pb.SingleMessageMetadata) or not source.encryption_keys:
        return []
    return [
        (
            ENCRYPTED_FOR,
            ",".join(dict.fromkeys(text_of(key, "key") for key in source.encryption_keys)),
        )
    ]


def key_of(
    source: pb.MessageMetadata | pb.SingleMessageMetadata,
) -> tuple[str | None, bytes | None]:
    """Return a message's key: its text, or its bytes if it is not text."""
    if not source.HasField("partition_key"):
        return None, None
    text: str | bytes = source.partition_key
    if isinstance(text, bytes):
        return None, text
    return (None, decode_base64_key(text)) if source.partition_key_b64_encoded else (text, None)


def decode_base64_key(text: str) -> bytes:
    """Return the bytes of a key that is not text; a key that is marked as base64 and is not is
    unchanged.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return text.encode()


def _chunk_row(shared: Row, entry: RawEntry) -> Row:
    metadata = entry.metadata
    return {
        **_with_own_columns(shared, metadata),
        "chunk_count": metadata.num_chunks_from_msg,
        "chunk_uuid": text_of(metadata, "uuid"),
        "chunk_id": metadata.chunk_id,
        "chunk_total_bytes": metadata.total_chunk_msg_size,
        "value": bytes(entry.payload),
    }


def _opaque_row(shared: Row, entry: RawEntry) -> Row:
    """Return an entry that cannot be decrypted as one message of its bytes; a property has the
    names of its recipients.
    """
    return {
        **_with_own_columns(shared, entry.metadata),
        "is_null": False,
        "value": bytes(entry.payload),
    }


def unread_row(raw: memoryview, ledger_id: int, entry_id: int) -> Row | None:
    """Return the row, without a value, of an entry whose payload cannot be read: its metadata alone
    says what it is. None for a batch, whose payload has the metadata of its messages, for a part of
    a large message, and for a broker's own marker.

    Raises:
        CorruptEntryError: the entry is damaged, or its metadata cannot be read either.
    """
    entry = parse_entry(raw)
    metadata = entry.metadata
    _check(entry)
    is_of_large = metadata.num_chunks_from_msg > 1 or has_promise(metadata)
    if (
        is_of_large
        or metadata.HasField("num_messages_in_batch")
        or metadata.HasField("marker_type")
    ):
        return None
    return _with_own_columns(_shared_columns(entry, ledger_id, entry_id), metadata)


def large_row(last: RawEntry, ledger_id: int, entry_id: int, first_chunk_id: str) -> Row:
    """Return the row of a large message without its value, from its last chunk.

    Raises:
        CorruptEntryError: a number of its metadata is out of range.
    """
    _check(last)
    metadata = last.metadata
    return {
        **_with_own_columns(_shared_columns(last, ledger_id, entry_id), metadata),
        "chunk_count": metadata.num_chunks_from_msg,
        "first_chunk_id": first_chunk_id,
    }


def _batch_rows(shared: Row, entry: RawEntry, payload: memoryview, max_bytes: int) -> Iterator[Row]:
    count = entry.metadata.num_messages_in_batch
    if not 0 < count <= MAX_BATCH_MESSAGES:
        raise CorruptEntryError(f"the batch claims {count} messages", reason=BATCH_COUNT)
    copied_bytes = len(shared["producer_name"].encode()) + len(shared["schema_version"] or b"")
    if count * copied_bytes > max_bytes:
        raise CorruptEntryError(
            f"{count} copies of {copied_bytes} bytes of the batch's metadata are over the limit of "
            f"{max_bytes}",
            reason=TOO_LARGE,
        )
    for batch_index in range(count):
        single, value, payload = take_message(payload, batch_index, count)
        if single.compacted_out:
            continue
        row = _with_own_columns(
            shared, single, single if single.HasField("sequence_id") else entry.metadata
        )
        row["message_id"] = f"{shared['message_id']}:{batch_index}"
        row["batch_index"] = batch_index
        row["value"] = None if single.null_value else bytes(value)
        # In a transaction, the broker's index counts entries instead of messages.
        if row["broker_index"] is not None and not entry.metadata.HasField("txnid_most_bits"):
            index = row["broker_index"] + batch_index + 1 - count
            # The broker counted fewer messages than the batch has, as its producer said.
            row["broker_index"] = index if index >= 0 else None
        yield row
    if len(payload):
        raise CorruptEntryError(
            f"{len(payload)} bytes follow the batch's {count} messages", reason=BATCH_COUNT
        )
