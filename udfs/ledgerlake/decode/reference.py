"""One entry at a time through protobuf: slow, plain, and the judge of everything odd.

The kernels hand over what they do not accept; tests compare both routes on random bytes. Order of work on the bytes:
checksum, decrypt (chunks only when they are joined), decompress, unbatch.

Reasons that end in ``rejects``: ``bad_checksum``, ``malformed_entry``, ``unknown_codec``, ``bad_compression``,
``too_large``, ``truncated_batch``, ``batch_count``, ``encrypted``, ``undecryptable``.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from ledgerlake.decode.codecs import decompress
from ledgerlake.decode.crypto import CLOSED, CryptoSettings, open_entry
from ledgerlake.decode.kernels import MAX_BATCH_MESSAGES
from ledgerlake.errors import CorruptEntryError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.entry import MAX_TIME_MS, RawEntry, parse_entry, take_message, text_of

Row = dict[str, Any]

# The property of a message that is the bytes of an entry which no key here opens.
ENCRYPTED_FOR = "ledgerlake.encrypted_for"


def decode_entry(
    raw: memoryview, ledger_id: int, entry_id: int, max_bytes: int, crypto: CryptoSettings = CLOSED
) -> list[Row]:
    """The rows (columns of ``schema.VIEW``; times in microseconds) of one entry; none for a server's own marker.

    Raises:
        CorruptEntryError: the entry cannot become messages; ``reason`` says why.
        DecryptionError: it is not for us, and the settings say to fail.
    """
    entry = parse_entry(raw)
    metadata = entry.metadata
    _check(entry)
    if metadata.HasField("marker_type"):
        return []
    shared = _shared_columns(entry, ledger_id, entry_id)
    if metadata.num_chunks_from_msg > 1:
        return [_chunk_row(shared, entry)]
    try:
        entry = open_entry(entry, crypto)
    except CorruptEntryError:
        if crypto.failure_action != "pass":
            raise
        return [_opaque_row(shared, entry)]
    metadata = entry.metadata
    plain = decompress(metadata.compression, entry.payload, metadata.uncompressed_size, max_bytes)
    if metadata.HasField("num_messages_in_batch"):
        return _batch_rows(shared, entry, memoryview(plain))
    own = _own_columns(metadata, metadata.sequence_id)
    return [{**shared, **own, "value": None if metadata.null_value else bytes(plain)}]


def _check(entry: RawEntry) -> None:
    metadata = entry.metadata
    times = [metadata.publish_time, metadata.event_time, metadata.deliver_at_time]
    if entry.broker is not None:
        times.append(entry.broker.broker_timestamp)
        if entry.broker.index >= 2**63:
            raise CorruptEntryError("the broker index is out of range", reason="malformed_entry")
    if max(times) > MAX_TIME_MS or min(times) < -MAX_TIME_MS:
        raise CorruptEntryError("a time is out of range", reason="malformed_entry")
    if metadata.sequence_id >= 2**63:
        raise CorruptEntryError("the sequence id is out of range", reason="malformed_entry")


def _shared_columns(entry: RawEntry, ledger_id: int, entry_id: int) -> Row:
    broker, metadata = entry.broker, entry.metadata
    return {
        "message_id": f"{ledger_id}:{entry_id}",
        "ledger_id": ledger_id,
        "entry_id": entry_id,
        "batch_index": -1,
        "broker_timestamp": broker.broker_timestamp * 1000 if broker and broker.HasField("broker_timestamp") else None,
        "broker_index": broker.index if broker and broker.HasField("index") else None,
        "publish_time": metadata.publish_time * 1000,
        "deliver_at": metadata.deliver_at_time * 1000 if metadata.HasField("deliver_at_time") else None,
        "producer_name": text_of(metadata, "producer_name"),
        "schema_version": metadata.schema_version if metadata.HasField("schema_version") else None,
    }


def _own_columns(source: pb.MessageMetadata | pb.SingleMessageMetadata, sequence_id: int) -> Row:
    """Columns that a single message has in its entry's metadata and a batched one in its own."""
    key, key_bytes = key_of(source)
    return {
        "event_time": source.event_time * 1000 if source.event_time else None,
        "sequence_id": sequence_id,
        "key": key,
        "key_bytes": key_bytes,
        "ordering_key": source.ordering_key if source.HasField("ordering_key") else None,
        "properties": [(text_of(one, "key"), text_of(one, "value")) for one in source.properties] + _recipients(source),
        "is_null": source.null_value,
    }


def _recipients(source: pb.MessageMetadata | pb.SingleMessageMetadata) -> list[tuple[str, str]]:
    """Whom an entry that is still encrypted is for, as a property."""
    if isinstance(source, pb.SingleMessageMetadata) or not source.encryption_keys:
        return []
    return [(ENCRYPTED_FOR, ",".join(dict.fromkeys(text_of(one, "key") for one in source.encryption_keys)))]


def key_of(source: pb.MessageMetadata | pb.SingleMessageMetadata) -> tuple[str | None, bytes | None]:
    """A message's key: its text, or its bytes where it is not text."""
    if not source.HasField("partition_key"):
        return None, None
    text: str | bytes = source.partition_key
    if isinstance(text, bytes):
        return None, text
    return (None, decode_base64_key(text)) if source.partition_key_b64_encoded else (text, None)


def decode_base64_key(text: str) -> bytes:
    """The bytes of a key that is not text; what claims to be base64 and is not stays as it is."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return text.encode()


def _chunk_row(shared: Row, entry: RawEntry) -> Row:
    metadata = entry.metadata
    return {
        **shared,
        **_own_columns(metadata, metadata.sequence_id),
        "chunk_count": metadata.num_chunks_from_msg,
        "chunk_uuid": text_of(metadata, "uuid"),
        "chunk_id": metadata.chunk_id,
        "chunk_total_bytes": metadata.total_chunk_msg_size,
        "value": bytes(entry.payload),
    }


def _opaque_row(shared: Row, entry: RawEntry) -> Row:
    """An entry that nobody here can open, as one message of its bytes; a property names whom it is for."""
    own = _own_columns(entry.metadata, entry.metadata.sequence_id)
    return {**shared, **own, "is_null": False, "value": bytes(entry.payload)}


def large_row(last: RawEntry, ledger_id: int, entry_id: int, first_chunk_id: str) -> Row:
    """The row of a large message but for its value, from its last chunk.

    Raises:
        CorruptEntryError: a number of its metadata is out of range.
    """
    _check(last)
    metadata = last.metadata
    return {
        **_shared_columns(last, ledger_id, entry_id),
        **_own_columns(metadata, metadata.sequence_id),
        "chunk_count": metadata.num_chunks_from_msg,
        "first_chunk_id": first_chunk_id,
    }


def _batch_rows(shared: Row, entry: RawEntry, payload: memoryview) -> list[Row]:
    count = entry.metadata.num_messages_in_batch
    if not 0 < count <= MAX_BATCH_MESSAGES:
        raise CorruptEntryError(f"the batch claims {count} messages", reason="batch_count")
    rows = []
    for batch_index in range(count):
        single, value, payload = take_message(payload, batch_index, count)
        if single.compacted_out:
            continue
        sequence_id = single.sequence_id if single.HasField("sequence_id") else entry.metadata.sequence_id
        row = {**shared, **_own_columns(single, sequence_id)}
        row["message_id"] = f"{shared['message_id']}:{batch_index}"
        row["batch_index"] = batch_index
        row["value"] = None if single.null_value else bytes(value)
        # Of a transaction brokers count entries in place of messages.
        if row["broker_index"] is not None and not entry.metadata.HasField("txnid_most_bits"):
            row["broker_index"] += batch_index + 1 - count
        rows.append(row)
    if len(payload):
        raise CorruptEntryError(f"{len(payload)} bytes follow the batch's {count} messages", reason="batch_count")
    return rows
