"""Bundles as one row for each stored entry: its bytes, and the fields of both kinds of metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledgerlake.decode import kernels as k
from ledgerlake.decode import schema
from ledgerlake.decode.messages import (
    WHOLE_BATCH,
    BatchRange,
    TopicPartition,
    read_entry_table,
)
from ledgerlake.decode.reference import once_each
from ledgerlake.errors import CorruptEntryError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.reasons import MALFORMED_ENTRY
from ledgerlake.wire.entry import parse_entry, split_broker_metadata
from ledgerlake.wire.fields import read_number, rejected

if TYPE_CHECKING:
    from google.protobuf.message import Message


def entry_rows(
    frames: pa.Buffer | memoryview | bytes,
    source: TopicPartition,
    first_entry: BatchRange = WHOLE_BATCH,
) -> pa.RecordBatch:
    """Return rows of ``schema.ENTRIES`` in order; an entry that does not parse has a
    ``reject_reason`` and its bytes.

    Args:
        first_entry: the messages of the first entry that belong to the read.
    """
    buffer, entries = read_entry_table(frames)
    view = buffer.data
    rows = []
    for number, (start, end, ledger_id, entry_id) in enumerate(
        entries[:, [k.E_START, k.E_END, k.E_LEDGER, k.E_ENTRY]].tolist()
    ):
        raw = view[start:end]
        if number == 0 and not first_entry.includes_whole(raw):
            continue
        place = {
            "topic": source.topic,
            "partition": source.partition,
            "ledger_id": ledger_id,
            "entry_id": entry_id,
        }
        rows.append({**place, **_describe(raw), "entry": bytes(raw)})
    return pa.RecordBatch.from_pylist(rows, schema=schema.ENTRIES)


def _describe(raw: memoryview) -> dict[str, Any]:
    try:
        broker, _ = split_broker_metadata(raw)
        columns = _broker_columns(broker) if broker is not None else {}
        metadata = parse_entry(raw).metadata
        if rejected(metadata, "deliver_at_time"):
            return columns | {"reject_reason": MALFORMED_ENTRY}
        return columns | _metadata_columns(metadata)
    except CorruptEntryError as error:
        return {"reject_reason": error.reason}


def _broker_columns(broker: pb.BrokerEntryMetadata) -> dict[str, Any]:
    time_ms = _present(broker, "broker_timestamp")
    return {
        "broker_timestamp": None if time_ms is None else time_ms * 1000,
        "broker_index": _present(broker, "index"),
    }


def _metadata_columns(metadata: pb.MessageMetadata) -> dict[str, Any]:
    codecs = pb.CompressionType.items()
    properties = [(_text(entry.key), _text(entry.value)) for entry in metadata.properties]
    numbers: dict[str, int | None] = {}
    for name in ("sequence_id", "publish_time", "event_time", "deliver_at_time"):
        number, kept = read_number(metadata, name)
        numbers[name] = number if metadata.HasField(name) else None
        properties += [kept] if kept is not None else []
    return {
        "producer_name": _text(metadata.producer_name),
        "sequence_id": numbers["sequence_id"],
        "publish_time": _microseconds(numbers["publish_time"]),
        "event_time": _microseconds(numbers["event_time"]),
        "deliver_at": _microseconds(numbers["deliver_at_time"]),
        "key": _text(metadata.partition_key) if metadata.HasField("partition_key") else None,
        "properties": once_each(properties),
        "schema_version": _present(metadata, "schema_version"),
        "compression": {number: name for name, number in codecs}.get(
            metadata.compression, str(metadata.compression)
        ),
        "uncompressed_size": _present(metadata, "uncompressed_size"),
        "num_messages_in_batch": _present(metadata, "num_messages_in_batch"),
        "chunk_uuid": _text(metadata.uuid) if metadata.HasField("uuid") else None,
        "chunk_id": _present(metadata, "chunk_id"),
        "chunk_count": _present(metadata, "num_chunks_from_msg"),
        "chunk_total_bytes": _present(metadata, "total_chunk_msg_size"),
        "encryption_keys": [_text(key.key) for key in metadata.encryption_keys],
    }


def _present(message: Message, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _microseconds(milliseconds: int | None) -> int | None:
    return None if milliseconds is None else milliseconds * 1000


def _text(value: Any) -> str:
    """Return a string field. If it is not UTF-8, protobuf's C parser returns bytes, which are
    decoded with replacement characters.
    """
    return value if isinstance(value, str) else bytes(value).decode("utf-8", "replace")
