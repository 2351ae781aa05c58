"""Targets of ``ledgerlake.decode``: entries, codecs, keys, schemas, values."""

from __future__ import annotations

import base64
import contextlib
import io
import json
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import fastavro
import numpy as np
import pyarrow as pa
from google.protobuf import descriptor_pb2

from ledgerlake.assembly.assembler import Assembled
from ledgerlake.assembly.chunk_entries import read_alone
from ledgerlake.assembly.rules import Chunk, Limits
from ledgerlake.decode import crypto, data_keys, schema
from ledgerlake.decode.codecs import compress, decompress
from ledgerlake.decode.columns import Encoded
from ledgerlake.decode.compat import as_compat
from ledgerlake.decode.crypto import CryptoSettings, open_entry
from ledgerlake.decode.entries import entry_rows
from ledgerlake.decode.large import decode_large
from ledgerlake.decode.messages import (
    TopicPartition,
    decode_bundle,
    decode_entries,
    read_entry_table,
)
from ledgerlake.decode.payloads import EntryPayload, PayloadMessage, process_entry
from ledgerlake.decode.reference import decode_entry
from ledgerlake.decode.rejects import (
    RejectedEntry,
    read_reject,
    reject_frame,
    reject_rows,
    rejected_row,
)
from ledgerlake.decode.split import PieceKind, only_entry, read_delayed, split_bundle
from ledgerlake.errors import CorruptEntryError, DecryptionError, MalformedFrameError, SetupError
from ledgerlake.operators.local_assembly import LocalAssembly
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.reasons import Reason
from ledgerlake.schedules.cancel_messages import find_cancels
from ledgerlake.values import records
from ledgerlake.values.schemas import column_type, decoder
from ledgerlake.values.typed import type_values
from ledgerlake.wire import commands, limits
from ledgerlake.wire.entry import delivery_time_ms, encode_batch, encode_entry, parse_entry
from ledgerlake.wire.message_id import Position
from ledgerlake.wire.value_schema import ValueSchema
from tests.entries import broker, metadata, single
from tests.fuzz import mutate, seeds
from tests.fuzz.engine import MIB, Target

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.fuzz.mutate import Rng

SOURCE = TopicPartition("persistent://public/default/fuzz", 1)

# Small, so that the limit itself is passed often.
MOST_BYTES = 256 * 1024

_KINDS = pb.Schema
OURS = CryptoSettings(key_folder=str(seeds.KEYS))
_IDS = ("ledger_id", "entry_id", "batch_index")


# Entries to rows.


def _places(data: bytes) -> list[tuple[int, int, int, int]]:
    """Start, end, ledger and entry of each entry of a bundle."""
    _, table = read_entry_table(data)
    return [tuple(row[:4]) for row in table.tolist()]


def _judge_bundle(crypto: CryptoSettings, data: bytes) -> int:
    """The kernels against the reference: the same rows, and the same rejects."""
    places = _places(data)
    options: dict[str, Any] = {"max_bytes": MOST_BYTES, "crypto": crypto}
    parts = list(decode_bundle(data, SOURCE, chunks_as_rejects=False, **options))
    messages = pa.Table.from_batches([part.messages for part in parts], schema.VIEW)
    rejects = pa.Table.from_batches([part.rejects for part in parts], schema.REJECTS)
    expected, expected_rejects = _by_reference(data, places, crypto)
    assert _as_numbers(messages).equals(_as_numbers(expected)), _difference(messages, expected)
    decoded_rejects = list(
        zip(
            rejects["entry_id"].to_pylist(),
            rejects["reason"].to_pylist(),
            rejects["entry"].to_pylist(),
        )
    )
    assert decoded_rejects == expected_rejects
    for part in parts:
        part.messages.validate(full=True)
        part.rejects.validate(full=True)
    entries = [data[start:end] for start, end, _, _ in places]
    ledger_ids, entry_ids = (
        np.array([place[at] for place in places], dtype=np.int64) for at in (2, 3)
    )
    stored = list(
        decode_entries(pa.array(entries, pa.binary()), ledger_ids, entry_ids, SOURCE, **options)
    )
    assert (
        sum(stored_part.messages.num_rows for stored_part in stored)
        + sum(stored_part.rejects.num_rows for stored_part in stored)
        >= rejects.num_rows
    )
    return int(messages.num_rows + rejects.num_rows)


def _by_reference(
    data: bytes, places: list[tuple[int, int, int, int]], crypto: CryptoSettings
) -> tuple[pa.Table, list[tuple[int, Reason, bytes]]]:
    rows: list[dict[str, Any]] = []
    rejects = []
    for start, end, ledger_id, entry_id in places:
        raw = memoryview(data)[start:end]
        try:
            message_rows = decode_entry(raw, ledger_id, entry_id, MOST_BYTES, crypto)
        except CorruptEntryError as error:
            rejects.append((entry_id, error.reason, bytes(raw)))
            continue
        rows += [
            {"topic": SOURCE.topic, "partition": SOURCE.partition, "late": False, **row}
            for row in message_rows
        ]
    rows.sort(key=lambda row: tuple(row[name] for name in _IDS))
    return pa.Table.from_pylist(rows, schema=schema.VIEW), rejects


def _as_numbers(rows: pa.Table) -> pa.Table:
    """Times as numbers, since Python's own end with the year 9999; in one piece, in the order of
    ids.
    """
    columns = [
        column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        for column in rows.columns
    ]
    plain = pa.table(columns, names=rows.column_names).combine_chunks()
    return plain.take(pa.array(np.lexsort([plain[name].to_numpy() for name in reversed(_IDS)])))


def _difference(decoded_rows: pa.Table, expected_rows: pa.Table) -> str:
    decoded_rows, expected_rows = _as_numbers(decoded_rows), _as_numbers(expected_rows)
    if decoded_rows.num_rows != expected_rows.num_rows:
        return f"{decoded_rows.num_rows} rows and {expected_rows.num_rows}"
    return str(
        [
            (name, decoded_rows[name].to_pylist(), expected_rows[name].to_pylist())
            for name in decoded_rows.column_names
            if not decoded_rows[name].equals(expected_rows[name])
        ]
    )[:2000]


def _a_wide_bundle(rng: Rng) -> bytes:
    """Few bytes that stand for much: what an entry says once, beside many messages."""
    entries = []
    for _ in range(rng.choice([1, 2])):
        count = rng.choice([1, 10, 1000, 20_000])
        size = rng.choice([0, 1, 300, 20_000])
        slot = pb.SingleMessageMetadata(
            payload_size=0, properties=[pb.KeyValue(key="k", value="v")] * rng.choice([0, 0, 3])
        )
        entry_metadata = metadata(
            num_messages_in_batch=count,
            producer_name="p" * size,
            schema_version=b"v" * rng.choice([0, size]),
        )
        entry_metadata.event_time = rng.choice([0, 2**63, mutate.edge(rng) % 2**64])
        entry_metadata.publish_time = rng.choice([entry_metadata.publish_time, 2**64 - 1])
        entries.append(
            encode_entry(
                entry_metadata,
                encode_batch([(slot, b"")] * count),
                rng.choice([None, broker(30_000)]),
            )
        )
    return b"".join(commands.message(1, 7, number, entry) for number, entry in enumerate(entries))


def _judge_wide(data: bytes) -> int:
    """Rows in pieces. One is held while the next is made, and Arrow keeps some freed memory."""
    return sum(
        part.messages.num_rows + part.rejects.num_rows for part in decode_bundle(data, SOURCE)
    )


def _judge_entry_rows(data: bytes) -> int:
    rows = entry_rows(data, SOURCE)
    rows.validate(full=True)
    return int(rows.num_rows)


def _judge_split(data: bytes) -> int:
    places = _places(data)
    pieces = list(split_bundle(data))
    assert sum(len(frames) for _, frames, _ in pieces) == len(data)
    entries_by_id: dict[tuple[int, int], list[bytes]] = {}
    for kind, frames, _ in pieces:
        for start, end, ledger_id, entry_id in _places(bytes(frames)):
            entries_by_id.setdefault((ledger_id, entry_id), []).append(bytes(frames[start:end]))
        if kind == PieceKind.DELAYED:
            _check_delayed(bytes(frames))
        elif kind in (PieceKind.CHUNK, PieceKind.MARKER):
            position, raw = only_entry(frames)
            _read_alone(kind, raw, position)
        else:
            assert kind == PieceKind.ENTRIES
    expected: dict[tuple[int, int], list[bytes]] = {}
    for start, end, ledger_id, entry_id in places:
        expected.setdefault((ledger_id, entry_id), []).append(data[start:end])
    assert entries_by_id == expected
    return len(pieces)


def _check_delayed(frames: bytes) -> None:
    delayed = read_delayed(frames)
    ends = delayed.frame_ends.tolist()
    assert ends == sorted(ends)
    assert ends[-1] == len(frames)
    for row, (start, end, _, entry_id) in enumerate(_places(frames)):
        assert delayed.due_ms[row] == delivery_time_ms(parse_entry(frames[start:end]))
        assert 0 <= entry_id < 2**32


def _read_alone(kind: PieceKind, raw: memoryview, position: Position) -> Any:
    try:
        return read_alone(kind, raw, position)
    except CorruptEntryError:
        return None


def _judge_rejects(data: bytes) -> int:
    for start, end, ledger_id, entry_id in _places(data):
        raw = data[start:end]
        rejected = RejectedEntry(
            Position(ledger_id, entry_id), raw, Reason("reason"), "detail \0 more"
        )
        assert read_reject(reject_frame(rejected)) == rejected
        for reject in (
            rejected,
            RejectedEntry(rejected.position, raw, Reason("reason")),
            RejectedEntry(rejected.position, None, Reason("r")),
        ):
            reject_rows([reject], SOURCE).validate(full=True)
            rejected_row(reject, SOURCE).validate(full=True)
    return len(data)


# Large messages.


def _some_chunks(rng: Rng) -> bytes:
    entries = [*seeds.large_entries(), *(entry for entry in seeds.encrypted_entries())]
    first = rng.randrange(3)
    order = entries[first : first + rng.randrange(2, 10)]
    if rng.random() < 0.3:
        rng.shuffle(order)
    if rng.random() < 0.4:
        order.insert(rng.randrange(len(order)), rng.choice(order))
    changed = [seeds.an_entry(rng, (entry,)) if rng.random() < 0.3 else entry for entry in order]
    return b"".join(commands.message(1, 7, number, entry) for number, entry in enumerate(changed))


def _judge_chunks(data: bytes) -> int:
    """Put chunks together by the rules as they come, and decode the complete messages."""
    limits = Limits(
        max_pending=3, max_pending_bytes=2000, max_chunks=100, max_message_bytes=MOST_BYTES
    )
    assembly = LocalAssembly(limits)
    count = 0
    for kind, frames, _ in split_bundle(data):
        if kind not in (PieceKind.CHUNK, PieceKind.MARKER):
            continue
        position, raw = only_entry(frames)
        event = _read_alone(kind, raw, position)
        if event is None:
            continue
        outcomes = (
            assembly.arrive(event, bytes(raw))
            if isinstance(event, Chunk)
            else assembly.apply_marker(event)
        )
        for outcome in outcomes or ():
            count += 1
            if isinstance(outcome, Assembled) and outcome.entries is not None:
                entries = [entry for entry in outcome.entries if entry is not None]
                _large(entries, outcome.positions)
    return count + sum(1 for _ in assembly.drain_pending())


def _large(entries: list[Any], positions: tuple[Position, ...]) -> None:
    if len(entries) == len(positions):
        with contextlib.suppress(CorruptEntryError):
            decode_large(entries, positions, SOURCE, MOST_BYTES, OURS).validate(full=True)


# Codecs.


def _packed_payload(rng: Rng) -> bytes:
    codec = rng.choice([0, 1, 2, 3, 4, 4, 3, 2, 1, rng.randrange(256)])
    plain = rng.choice(
        [b"", b"a", b"abc" * 100, bytes(5000), rng.randbytes(300), bytes(range(256)) * 40]
    )
    data = compress(codec, plain)
    if rng.random() < 0.7:
        data = mutate.some_bytes(rng, data)
    size = (
        rng.choice([len(plain), len(plain), len(plain) + 1, len(plain) - 1, mutate.edge(rng)])
        % 2**32
    )
    return mutate.packed(bytes([codec]), size.to_bytes(4, "big"), data)


def _judge_codec(data: bytes) -> int:
    parts = mutate.unpacked(data)
    if len(parts) < 3 or not parts[0]:
        return 0
    declared = int.from_bytes(parts[1][:4], "big")
    plain = decompress(parts[0][0], memoryview(parts[2]), declared, 16 * MIB)
    assert parts[0][0] == 0 or len(plain) == declared
    return 1


# Keys.


def _judge_encrypted(data: bytes) -> int:
    data_keys._opener.cache_clear()
    entry = parse_entry(data)
    for action in ("reject", "pass", "fail"):
        try:
            opened = open_entry(entry, CryptoSettings(OURS.key_folder, failure_action=action))
            assert not opened.metadata.encryption_keys
        except CorruptEntryError:
            assert action != "fail"
        except DecryptionError:
            assert action == "fail"
    return 1


def _an_encrypted_entry(rng: Rng) -> bytes:
    return seeds.an_entry(rng, seeds.encrypted_entries())


# Functions of the user's.


def _processor(payload: EntryPayload) -> list[PayloadMessage] | None:
    entry_metadata = pb.MessageMetadata.FromString(payload.metadata)
    if not payload.payload:
        return None
    return [
        PayloadMessage(
            payload.payload[:9],
            properties={"codec": str(entry_metadata.compression)},
            event_time_ms=entry_metadata.event_time % 2**40,
        )
    ] * 2


def _judge_processed(data: bytes) -> int:
    processed = process_entry(_processor, memoryview(data), 7, 3, MOST_BYTES, OURS)
    if processed:
        parse_entry(processed)
    return 1


# Values.

_AVRO = {
    "type": "record", "name": "r", "fields": [
        {"name": "i", "type": "int"}, {"name": "l", "type": ["null", "long"], "default": None}, {"name": "s", "type": "string"},
        {"name": "b", "type": "bytes"}, {"name": "d", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "e", "type": {"type": "enum", "name": "en", "symbols": ["A", "B"]}}, {"name": "f", "type": {"type": "fixed", "name": "fx", "size": 4}},
        {"name": "a", "type": {"type": "array", "items": "string"}}, {"name": "m", "type": {"type": "map", "values": "double"}},
        {"name": "t", "type": {"type": "long", "logicalType": "timestamp-millis"}}, {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "n", "type": {"type": "record", "name": "inner", "fields": [{"name": "x", "type": "float"}, {"name": "u", "type": ["int", "long"]}]}},
        {"name": "ns", "type": {"type": "array", "items": "inner"}},
    ],
}  # fmt: skip
_ROW = {
    "i": 1, "l": 2, "s": "text", "b": b"bytes", "d": b"\1\2", "e": "B", "f": b"four", "a": ["x", "y"], "m": {"k": 1.5}, "t": 1_700_000_000_000,
    "day": 19_000, "n": {"x": 0.5, "u": 3}, "ns": [{"x": 1.5, "u": 4}],
}  # fmt: skip


@cache
def _avro_value() -> bytes:
    encoded_value = io.BytesIO()
    fastavro.schemaless_writer(encoded_value, fastavro.parse_schema(records._plain(_AVRO)), _ROW)
    return encoded_value.getvalue()


@cache
def _json_value() -> bytes:
    row = {**_ROW, "b": "Ynl0ZXM=", "d": "AQI=", "f": "Zm91cg=="}
    return json.dumps(row).encode()


@cache
def _proto_definition() -> bytes:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="f.proto", package="p", syntax="proto3")
    inner = file.message_type.add(name="Inner")
    inner.field.add(name="x", number=1, type=kinds.TYPE_SINT64, label=kinds.LABEL_OPTIONAL)
    outer = file.message_type.add(name="Outer")
    for number, kind in enumerate(
        (
            kinds.TYPE_INT32,
            kinds.TYPE_UINT64,
            kinds.TYPE_DOUBLE,
            kinds.TYPE_STRING,
            kinds.TYPE_BYTES,
            kinds.TYPE_BOOL,
        ),
        1,
    ):
        outer.field.add(name=f"f{number}", number=number, type=kind, label=kinds.LABEL_OPTIONAL)
    outer.field.add(
        name="in",
        number=7,
        type=kinds.TYPE_MESSAGE,
        type_name=".p.Inner",
        label=kinds.LABEL_REPEATED,
    )
    outer.field.add(
        name="en", number=8, type=kinds.TYPE_ENUM, type_name=".p.E", label=kinds.LABEL_OPTIONAL
    )
    enum = file.enum_type.add(name="E")
    enum.value.add(name="ZERO", number=0)
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()


_PROTO_VALUE = bytes.fromhex(
    "0801100319000000000000f03f2203616263 2a0278792a00 3001 3a020802 3a00 4000".replace(" ", "")
)


def _proto_schema(descriptors: bytes, root: str = "p.Outer") -> bytes:
    return json.dumps(
        {"fileDescriptorSet": base64.b64encode(descriptors).decode(), "rootMessageTypeName": root}
    ).encode()


_PLAIN_KINDS = [
    _KINDS.String, _KINDS.Bool, _KINDS.Int8, _KINDS.Int16, _KINDS.Int32, _KINDS.Int64, _KINDS.Float, _KINDS.Double, _KINDS.Date,
    _KINDS.Time, _KINDS.Timestamp, _KINDS.Instant, _KINDS.LocalDate, _KINDS.LocalTime, _KINDS.LocalDateTime,
]  # fmt: skip


def _key_value(
    key: bytes,
    value: bytes,
    key_kind: str = "STRING",
    value_kind: str = "INT64",
    kind: str = "INLINE",
) -> tuple[bytes, bytes]:
    properties = {
        "key.schema.type": key_kind,
        "value.schema.type": value_kind,
        "kv.encoding.type": kind,
        "key.schema.properties": "{}",
    }
    return mutate.packed(key, value), json.dumps(properties).encode()


def _schema(kind: int, definition: bytes, properties: bytes = b"{}") -> bytes:
    return mutate.packed((kind % 2**32).to_bytes(4, "big"), definition, properties)


def _read_schema(data: bytes) -> ValueSchema:
    kind, definition, properties = [*mutate.unpacked(data), b"", b"", b""][:3]
    try:
        property_values = json.loads(properties)
        named_properties = tuple(
            sorted((str(key), str(value)) for key, value in property_values.items())
        )
    except (ValueError, AttributeError, RecursionError):
        named_properties = ()
    number = int.from_bytes(kind[:4], "big")
    return ValueSchema(number - 2**32 if number >= 2**31 else number, definition, named_properties)


@cache
def _schemas() -> tuple[tuple[bytes, bytes], ...]:
    """Schemas, each with a value of it."""
    avro = json.dumps(_AVRO).encode()
    pair = _key_value(b"", b"")
    return (
        (_schema(_KINDS.Avro, avro), _avro_value()),
        (_schema(_KINDS.Json, avro), _json_value()),
        (_schema(_KINDS.ProtobufNative, _proto_schema(_proto_definition())), _PROTO_VALUE),
        (_schema(_KINDS.KeyAndValue, *pair), mutate.packed(b"key", bytes(8))),
        (
            _schema(_KINDS.KeyAndValue, *_key_value(avro, b"", "JSON", "STRING", "SEPARATED")),
            b"value",
        ),
        *((_schema(kind, b""), bytes(8)) for kind in _PLAIN_KINDS),
    )


def _a_schema(rng: Rng) -> bytes:
    """A schema that was changed, and values of the schema as it was."""
    data, value = rng.choice(_schemas()[:5] if rng.random() < 0.8 else _schemas())
    kind, definition, properties = mutate.unpacked(data)
    number = int.from_bytes(kind, "big")
    if rng.random() < 0.1:
        kind = (
            (mutate.edge(rng) % 2**32).to_bytes(4, "big")
            if rng.random() < 0.5
            else rng.choice(_schemas())[0][4:8]
        )
    if number == _KINDS.ProtobufNative and rng.random() < 0.8:
        definition = _proto_schema(
            mutate.message(rng, _proto_definition(), 2), rng.choice(["p.Outer", "p.Inner", "p"])
        )
    elif definition.startswith(b"{") and rng.random() < 0.9:
        definition = mutate.json_text(rng, definition.decode()).encode("utf-8", "surrogatepass")
    elif definition:
        definition = mutate.some_bytes(rng, definition)
    if rng.random() < 0.3:
        properties = mutate.json_text(rng, properties.decode()).encode("utf-8", "surrogatepass")
    return mutate.packed(mutate.packed(kind, definition, properties), data, value)


def _judge_details(details: Iterable[str]) -> None:
    """Each detail becomes rows of rejects."""
    rejected = [
        RejectedEntry(Position(7, 1), None, Reason("schema_mismatch"), detail) for detail in details
    ]
    reject_rows(rejected, SOURCE).validate(full=True)


def _judge_schema(data: bytes) -> int:
    """A changed schema as the reader's, and as the writer's of values that are read by another."""
    column_type.cache_clear()
    decoder.cache_clear()
    parts = [*mutate.unpacked(data), b"", b"", b""]
    changed, known = _read_schema(parts[0]), _read_schema(parts[1])
    payloads = pa.array([parts[2], None, b"", parts[2][:-1]], pa.binary())
    for writer, reader in ((changed, changed), (changed, known), (known, changed)):
        try:
            decoded = decoder(writer, reader)(Encoded(payloads))
        except SetupError as error:
            _judge_details([error.message])
            continue
        decoded.values.validate(full=True)
        assert decoded.values.type.equals(column_type(reader))
        _judge_details(decoded.bad.values())
    column_type(changed)
    return 1


def _some_values(rng: Rng) -> bytes:
    number = rng.randrange(len(_schemas()))
    kind, value = _schemas()[number][0], _schemas()[number][1]
    values = []
    for _ in range(rng.choice([1, 2, 4])):
        if rng.random() < 0.2:
            values.append(value)
        elif value.startswith(b"{"):
            values.append(mutate.json_text(rng, value.decode()).encode("utf-8", "surrogatepass"))
        elif value == _PROTO_VALUE:
            values.append(mutate.message(rng, value))
        else:
            values.append(mutate.some_bytes(rng, value))
    return mutate.packed(kind, *values)


def _judge_values(data: bytes) -> int:
    """No value stops the others: each is a value or bad."""
    parts = mutate.unpacked(data)
    reader = _read_schema(parts[0]) if parts else ValueSchema()
    decoded = decoder(reader, reader)(Encoded(pa.array(parts[1:], pa.binary())))
    decoded.values.validate(full=True)
    assert decoded.values.null_count >= len(decoded.bad)
    return len(parts)


def _judge_typed(data: bytes) -> int:
    """Decoded messages with values by a schema, as the JVM connectors' columns, and what they
    cancel.
    """
    parts = mutate.unpacked(data)
    reader = _read_schema(parts[0]) if parts else ValueSchema()
    frames = b"".join(
        commands.message(1, 7, number, _typed_entry(part)) for number, part in enumerate(parts[1:])
    )
    for decoded in decode_bundle(frames, SOURCE, max_bytes=MOST_BYTES):
        typed = type_values(
            decoded.messages, reader, lambda version: reader if version else None, keep_bytes=True
        )
        typed.validate(full=True)
        find_cancels(decoded.messages)
        with contextlib.suppress(CorruptEntryError):
            as_compat(typed).validate(full=True)
    return len(parts)


def _typed_entry(value: bytes) -> bytes:
    text = value.decode("utf-8", "replace")
    fields: dict[str, Any] = {
        "schema_version": value[:2],
        "partition_key": text,
        "partition_key_b64_encoded": len(value) % 2 == 0,
    }
    return single(
        value, **fields, properties=[pb.KeyValue(key="ledgerlake.cancel", value=f"id={text}")]
    )


def _bundles_of(entries: Any) -> Any:
    return lambda rng: seeds.a_bundle(rng, entries())


TARGETS = [
    Target(
        "decode", "decode.kernels through decode_bundle against decode.reference", _bundles_of(seeds.all_entries), partial(_judge_bundle, crypto.NO_KEYS),
        (MalformedFrameError,), memory_factor=300, memory_bytes=48 * MIB,
    ),
    Target(
        "decode-encrypted", "the same with keys", _bundles_of(seeds.encrypted_entries), partial(_judge_bundle, OURS),
        (MalformedFrameError,), memory_factor=300, memory_bytes=48 * MIB,
    ),
    Target(
        "decode-wide", "decode_bundle where an entry repeats itself for each of many messages", _a_wide_bundle, _judge_wide,
        memory_factor=limits.DECODING_FACTOR, memory_bytes=10 * limits.DECODED_PIECE_BYTES, cost=20,
    ),
    Target("entry-rows", "decode.entries", _bundles_of(seeds.all_entries), _judge_entry_rows, (MalformedFrameError,)),
    Target(
        "split", "decode.split, assembly.chunk_entries",
        _bundles_of(lambda: (*seeds.delayed_entries(), *seeds.large_entries(), *seeds.plain_entries()[:5])), _judge_split, (MalformedFrameError,),
    ),
    Target("rejects", "decode.rejects", _bundles_of(seeds.all_entries), _judge_rejects, (MalformedFrameError,)),
    Target("chunks", "chunks to large messages: operators.in_task, decode.large", _some_chunks, _judge_chunks, (MalformedFrameError,)),
    Target("codec", "decode.codecs: sizes that are claimed", _packed_payload, _judge_codec, (CorruptEntryError,), memory_bytes=40 * MIB),
    Target("encrypted", "decode.crypto", _an_encrypted_entry, _judge_encrypted, (CorruptEntryError,)),
    Target("payloads", "decode.payloads", seeds.an_entry, _judge_processed, (CorruptEntryError,)),
    Target("schema", "values.schemas, records, protobufs: schemas", _a_schema, _judge_schema, (SetupError,)),
    Target("values", "values.schemas, records, protobufs: values", _some_values, _judge_values, (SetupError,)),
    Target("typed", "values.typed, decode.compat, schedules.cancel_messages", _some_values, _judge_typed, (SetupError,)),
]  # fmt: skip
