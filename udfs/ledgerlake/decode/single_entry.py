"""A row of messages as an entry of its own: what a reject keeps of one message of a batch.

The entry of a batch may have thousands of messages, and each could become a reject. So each gets an
entry that has that message alone, with its metadata and the broker's. Times have milliseconds, as
in Pulsar. A large message is whole in its entry, and is decoded as any message, since there is no
``num_chunks_from_msg``. ``uuid`` has the id of its first chunk, ``chunk_id`` the number of chunks.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.fields import is_kept, property_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_UNSIGNED = ("publish_time", "event_time", "sequence_id")
_NUMBER = re.compile(r"[0-9]{1,20}")


def single_entries(messages: pa.RecordBatch) -> list[bytes]:
    """Return an entry for each row of ``schema.MESSAGES``."""
    times = {
        name: messages[name].cast(pa.int64())
        for name in ("broker_timestamp", "publish_time", "event_time", "deliver_at")
    }
    for name, values in times.items():
        messages = messages.set_column(messages.schema.get_field_index(name), name, values)
    return [_entry_of(row) for row in messages.to_pylist()]


def chunks_of(metadata: pb.MessageMetadata) -> tuple[int | None, str | None]:
    """Return ``chunk_count`` and ``first_chunk_id`` of the message of an entry of its own."""
    if not metadata.HasField("uuid"):
        return None, None
    return metadata.chunk_id, metadata.uuid


def _entry_of(row: Mapping[str, Any]) -> bytes:
    outside, properties = _outside(row)
    metadata = pb.MessageMetadata(
        producer_name=row["producer_name"] or "",
        sequence_id=outside.get("sequence_id", row["sequence_id"] or 0),
        publish_time=outside.get("publish_time", _milliseconds(row["publish_time"]) or 0),
        event_time=outside.get("event_time", _milliseconds(row["event_time"])),
        deliver_at_time=_milliseconds(row["deliver_at"]),
        schema_version=row["schema_version"],
        ordering_key=row["ordering_key"],
        null_value=bool(row["is_null"]),
    )
    if row["key_bytes"] is not None:
        metadata.partition_key = base64.b64encode(row["key_bytes"]).decode()
        metadata.partition_key_b64_encoded = True
    elif row["key"] is not None:
        metadata.partition_key = row["key"]
    if row["chunk_count"] is not None:
        metadata.uuid, metadata.chunk_id = row["first_chunk_id"], row["chunk_count"]
    for name, value in properties:
        metadata.properties.add(key=name, value=value)
    return encode_entry(metadata, row["value"] or b"", _broker_metadata(row))


def _outside(row: Mapping[str, Any]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the numbers that their columns could not hold, that decoding made properties of, and
    the other properties.
    """
    columns = {property_of(name): name for name in _UNSIGNED if row[name] is None}
    outside: dict[str, int] = {}
    properties: list[tuple[str, str]] = []
    # The message's own properties come first.
    for name, value in reversed(row["properties"] or ()):
        column = columns.get(name, "")
        number = int(value) if column not in outside and _NUMBER.fullmatch(value) else 0
        if column and number < 2**64 and is_kept(column, number):
            outside[column] = number
        else:
            properties.append((name, value))
    return outside, properties[::-1]


def _broker_metadata(row: Mapping[str, Any]) -> pb.BrokerEntryMetadata | None:
    if row["broker_timestamp"] is None and row["broker_index"] is None:
        return None
    return pb.BrokerEntryMetadata(
        broker_timestamp=_milliseconds(row["broker_timestamp"]), index=row["broker_index"]
    )


def _milliseconds(time_us: int | None) -> int | None:
    return None if time_us is None else time_us // 1000
