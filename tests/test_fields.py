"""Every field that a producer controls, at the ends of its range and beyond: rows or rejects, and
nothing ends.
"""

from __future__ import annotations

import contextlib
import json
import struct
from typing import TYPE_CHECKING, Any

import crc32c
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import LocalFileSystem

from ledgerlake.assembly.chunk_entries import read_alone
from ledgerlake.client.topics import join_partition
from ledgerlake.decode import schema
from ledgerlake.decode.compat import as_compat
from ledgerlake.decode.entries import entry_rows
from ledgerlake.decode.messages import decode_bundle
from ledgerlake.decode.split import PieceKind, only_entry, read_delayed, split_bundle
from ledgerlake.errors import CorruptEntryError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.schedules.cancel_messages import find_cancels
from ledgerlake.source.latest_offset import stamped
from ledgerlake.stored.offsets import from_json, to_json
from ledgerlake.table.ordered_files import OrderedWriter, ParquetFolder, effective_times
from ledgerlake.wire.connection import EntryReceived
from ledgerlake.wire.consumer import Permits
from ledgerlake.wire.entry import MAGIC_BROKER_METADATA, index_count, message_count, read_stamp
from ledgerlake.wire.fields import FIELDS, Field, Outside, property_of
from ledgerlake.wire.limits import MAX_TIME_MS
from tests.decode.both_ways import same_both_ways
from tests.entries import SOURCE, bundle, decoded, metadata, single

if TYPE_CHECKING:
    from pathlib import Path

    from google.protobuf.descriptor import FieldDescriptor

_MESSAGES: dict[str, Any] = {
    "BrokerEntryMetadata": pb.BrokerEntryMetadata,
    "MessageMetadata": pb.MessageMetadata,
    "SingleMessageMetadata": pb.SingleMessageMetadata,
    "CommandSend": pb.CommandSend,
}
_IN_ENTRIES = [field for field in FIELDS if field.message != "CommandSend"]
_NUMBERS = [field for field in _IN_ENTRIES if field.column is not None]
_BYTES = {
    "empty": b"",
    "nul": b"\0",
    "huge": b"x" * 100_000,
    "not utf-8": b"\xff\xfe",
    "cut utf-8": "ä".encode()[:1],
    "a surrogate": b"\xed\xa0\x80",
}


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def sized(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def descriptor(field: Field) -> FieldDescriptor:
    field_descriptor: FieldDescriptor = _MESSAGES[field.message].DESCRIPTOR.fields_by_name[
        field.name
    ]
    return field_descriptor


def numbers_at_the_ends(field: Field) -> dict[str, int]:
    """Unsigned 64-bit numbers as they stand in the bytes, by what they say."""
    values = {
        0,
        1,
        -1,
        2,
        2**31 - 1,
        2**31,
        2**32 - 1,
        2**32,
        2**62,
        2**63 - 1,
        2**63,
        2**64 - 1,
        MAX_TIME_MS,
    }
    # Microseconds and nanoseconds of 2026.
    values |= {1_790_000_000_000_000, 1_790_000_000_000_000_000}
    values |= {
        end + step
        for end in (field.lowest, field.highest)
        if end is not None
        for step in (-1, 0, 1)
    }
    return {str(value): value % 2**64 for value in sorted(values)}


def values_at_the_ends(field: Field) -> dict[str, bytes]:
    """The field's bytes, tag included, by what they say."""
    field_descriptor = descriptor(field)
    if field_descriptor.type == field_descriptor.TYPE_MESSAGE:
        parts = {
            "empty": b"",
            "key alone": sized(1, b"k"),
            "broken": b"\xff",
            "whole": sized(1, b"k") + sized(2, b"v"),
        }
        parts |= {f"key {name}": sized(1, data) + sized(2, b"v") for name, data in _BYTES.items()}
        parts |= {f"value {name}": sized(1, b"k") + sized(2, data) for name, data in _BYTES.items()}
        return {name: sized(field_descriptor.number, part) for name, part in parts.items()}
    if field_descriptor.type in (field_descriptor.TYPE_STRING, field_descriptor.TYPE_BYTES):
        return {name: sized(field_descriptor.number, data) for name, data in _BYTES.items()}
    return {
        name: varint(field_descriptor.number << 3) + varint(value)
        for name, value in numbers_at_the_ends(field).items()
    }


def entry(entry_metadata: bytes, payload: bytes, by_broker: bytes | None) -> bytes:
    """An entry of any bytes, with a checksum that fits."""
    body = struct.pack(">I", len(entry_metadata)) + entry_metadata + payload
    checksummed = b"\x0e\x01" + struct.pack(">I", crc32c.crc32c(body)) + body
    if by_broker is None:
        return checksummed
    return struct.pack(">HI", MAGIC_BROKER_METADATA, len(by_broker)) + by_broker + checksummed


def slot(slot_metadata: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(slot_metadata)) + slot_metadata + payload


BY_BROKER = pb.BrokerEntryMetadata(broker_timestamp=1_700_000_000_000, index=10).SerializeToString()
SHAPES: dict[str, dict[str, Any]] = {
    "single": {},
    "delayed": {"deliver_at_time": 1_800_000_000_000},
    "chunk": {"uuid": "p-1", "chunk_id": 0, "num_chunks_from_msg": 2, "total_chunk_msg_size": 10},
    "marker": {
        "uuid": "p-1",
        "num_chunks_from_msg": 1,
        "properties": [pb.KeyValue(key="ledgerlake.chunks", value="1")],
    },
    "cancel": {"properties": [pb.KeyValue(key="ledgerlake.cancel", value="key=k")]},
    "batch": {"num_messages_in_batch": 2},
}


def entries_with(field: Field, extra_field: bytes) -> list[bytes]:
    """Entries of every shape, with the broker's metadata and without, that have the field once more
    than they should.
    """
    entries = []
    slots = pb.SingleMessageMetadata(payload_size=1, sequence_id=3).SerializeToString()
    in_slot = extra_field if field.message == "SingleMessageMetadata" else b""
    batch = slot(slots + in_slot, b"v") + slot(slots, b"w")
    for name, fields in SHAPES.items():
        entry_metadata = metadata(**fields).SerializeToString() + (
            extra_field if field.message == "MessageMetadata" else b""
        )
        payload = batch if name == "batch" else b'{"chunks":["1:1","1:2"]}'
        by_broker = BY_BROKER + extra_field if field.message == "BrokerEntryMetadata" else BY_BROKER
        entries += [entry(entry_metadata, payload, by_broker), entry(entry_metadata, payload, None)]
    return entries


def test_the_table_has_every_field_of_what_a_producer_sends() -> None:
    table_fields = [(field.message, field.name) for field in FIELDS]
    sent_fields = [
        (name, field.name) for name, kind in _MESSAGES.items() for field in kind.DESCRIPTOR.fields
    ]
    assert sorted(table_fields) == sorted(sent_fields)


@pytest.mark.parametrize("field", _IN_ENTRIES, ids=lambda field: f"{field.message}.{field.name}")
def test_a_field_of_any_value_leaves_rows_and_rejects_that_everything_behind_can_hold(
    field: Field, tmp_path: Path
) -> None:
    for value in values_at_the_ends(field).values():
        odd = entries_with(field, value)
        entries = [
            raw_entry
            for pair in zip(odd, [single(b"good")] * len(odd), strict=True)
            for raw_entry in pair
        ]
        same_both_ways(entries)
        rows = _decode_and_write(entries, tmp_path)
        assert sum(row["value"] == b"good" for row in rows) == len(odd)
        _split(entries)
        assert len(entry_rows(bundle(entries), SOURCE).to_pylist()) == len(entries)
        for raw in odd:
            _plan(raw)


def _decode_and_write(entries: list[bytes], folder: Path) -> list[dict[str, Any]]:
    """The rows of the table's file, which the writer has taken and a reader can have."""
    parts = list(decode_bundle(bundle(entries), SOURCE))
    messages = [part.messages for part in parts]
    rejects = [row for part in parts for row in part.rejects.to_pylist()]
    assert len(
        {row["entry_id"] for message in messages for row in message.to_pylist()}
        | {row["entry_id"] for row in rejects}
    )
    writer = OrderedWriter(
        ParquetFolder(LocalFileSystem(), str(folder), schema.MESSAGES, "part"), watermark_us=1
    )
    rows = []
    for message in messages:
        writer.write(message.select(schema.MESSAGES.names))
        assert len(as_compat(message).to_pylist()) == message.num_rows
        list(find_cancels(message))
    for file in writer.finish():
        json.loads(file.stats)
        table = pq.read_table(folder / file.name).cast(schema.MESSAGES)
        times = effective_times(table).tolist()
        assert times == sorted(times)
        assert 0 <= times[0] <= times[-1] <= MAX_TIME_MS * 1000
        rows += table.to_pylist()
    return rows


def _split(entries: list[bytes]) -> None:
    for kind, piece, broker_ms in split_bundle(bundle(entries)):
        assert broker_ms is None or 0 <= broker_ms <= MAX_TIME_MS
        assert kind in (PieceKind.ENTRIES, PieceKind.DELAYED, PieceKind.CHUNK, PieceKind.MARKER)
        if kind == PieceKind.DELAYED:
            due_ms = read_delayed(piece).due_ms
            assert ((due_ms > 0) & (due_ms <= MAX_TIME_MS)).all()
        elif kind != PieceKind.ENTRIES:
            position, raw = only_entry(piece)
            try:
                event = read_alone(kind, raw, position)
            except CorruptEntryError:
                continue
            assert event.time_ms is None or 0 <= event.time_ms <= MAX_TIME_MS
            json.dumps(str(event))


def _plan(raw: bytes) -> None:
    view = memoryview(raw)
    granted = Permits(1000).take(message_count(view))
    assert 0 <= granted < 2**31
    assert index_count(view) > 0
    with contextlib.suppress(CorruptEntryError):
        assert 0 <= read_stamp(view).time_ms <= MAX_TIME_MS
    frame = bundle([raw])
    offset = {
        join_partition(SOURCE.topic, 3): stamped(
            EntryReceived(1, 7, 0, frame, len(frame) - len(raw))
        )
    }
    assert from_json(json.loads(json.dumps(to_json(offset)))) == offset


@pytest.mark.parametrize("field", _NUMBERS, ids=lambda field: f"{field.message}.{field.name}")
def test_a_number_is_in_its_column_or_a_property_or_a_reject_as_the_table_says(
    field: Field,
) -> None:
    assert field.column is not None
    shape = "batch" if field.message == "SingleMessageMetadata" else "single"
    is_signed = descriptor(field).type == descriptor(field).TYPE_INT64
    for unsigned in numbers_at_the_ends(field).values():
        value = unsigned - 2**64 if is_signed and unsigned >= 2**63 else unsigned
        extra_field = varint(descriptor(field).number << 3) + varint(unsigned)
        raw = entries_with(field, extra_field)[2 * list(SHAPES).index(shape)]
        messages, rejects = decoded([raw])
        fate = field.fate(value)
        assert [row["reason"] for row in rejects] == (
            ["malformed_entry"] if fate is Outside.REJECT else []
        )
        if fate is Outside.REJECT:
            continue
        property_value = dict(messages[0]["properties"]).get(property_of(field.column))
        assert property_value == (str(value) if fate is Outside.NULL else None)
        column_value = (
            pa.array([messages[0][field.column]], schema.VIEW.field(field.column).type)
            .cast(pa.int64())[0]
            .as_py()
        )
        if fate is Outside.NULL or (field.name == "event_time" and value == 0):
            assert column_value is None
        else:
            assert column_value == (
                value * 1000 if schema.VIEW.field(field.column).type == schema.TIMESTAMP else value
            )


@pytest.mark.parametrize("shape", ["chunk", "marker"])
def test_a_chunk_or_marker_has_the_brokers_time_or_none(shape: str) -> None:
    entry_metadata = metadata(
        **SHAPES[shape] | {"publish_time": MAX_TIME_MS + 1}
    ).SerializeToString()
    payload = b'{"chunks":["1:1","1:2"]}'
    for by_broker, time_ms in ((BY_BROKER, 1_700_000_000_000), (None, None)):
        ((kind, piece, _),) = split_bundle(bundle([entry(entry_metadata, payload, by_broker)]))
        position, raw = only_entry(piece)
        assert kind == shape
        assert read_alone(kind, raw, position).time_ms == time_ms


def test_a_delayed_message_with_an_unusable_publish_time_is_due_when_it_says() -> None:
    for publish_time in (MAX_TIME_MS + 1, 2**63 - 1, 2**63, 2**64 - 1):
        entry_metadata = metadata(
            deliver_at_time=1_800_000_000_000, publish_time=publish_time
        ).SerializeToString()
        ((kind, piece, _),) = split_bundle(bundle([entry(entry_metadata, b"v", None)]))
        assert (kind, read_delayed(piece).due_ms.tolist()) == (
            PieceKind.DELAYED,
            [1_800_000_000_000],
        )


def test_a_second_broker_metadata_is_a_reject_with_the_time_and_index_of_the_first() -> None:
    good = entry(metadata().SerializeToString(), b"v", BY_BROKER)
    forged = struct.pack(">HI", MAGIC_BROKER_METADATA, len(BY_BROKER)) + BY_BROKER + good
    _, rejects = decoded([forged])
    assert [(row["reason"], row["entry"]) for row in rejects] == [("malformed_entry", forged)]
    assert "second" in rejects[0]["detail"]
    # The index of the next entry follows it, or a loss would be seen where there is none.
    stamp = read_stamp(memoryview(forged))
    assert stamp == read_stamp(memoryview(good))
    ((kind, _, broker_ms),) = split_bundle(bundle([forged]))
    assert (kind, broker_ms) == (PieceKind.ENTRIES, stamp.time_ms)
