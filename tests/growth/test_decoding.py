"""Decoding and assembly: work grows with the input at most, and memory stays within its bounds."""

from __future__ import annotations

import base64
import json
from collections import Counter
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2

from ledgerlake.assembly.rules import Chunk, ChunkedMessageKey, Deliver, IncompleteMessages, Limits
from ledgerlake.decode import messages, schema
from ledgerlake.decode.codecs import compress
from ledgerlake.decode.columns import Encoded
from ledgerlake.decode.messages import decode_bundle
from ledgerlake.decode.split import PieceKind, split_bundle
from ledgerlake.errors import SetupError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.reasons import VALUE_TOO_LARGE
from ledgerlake.values.avro_types import not_null
from ledgerlake.values.record_columns import record_of
from ledgerlake.values.record_rows import record_cuts, record_rows
from ledgerlake.values.schemas import column_type, decoder
from ledgerlake.values.typed import by_version, typed_parts
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.limits import (
    DECODED_PIECE_BYTES,
    DECODING_FACTOR,
    MAX_MESSAGE_METADATA_BYTES,
    MAX_VALUES_BYTES,
)
from ledgerlake.wire.message_id import Position
from ledgerlake.wire.value_schema import ValueSchema
from tests.chunks import chunk_entries
from tests.decode.values_limit import values_limit
from tests.entries import BROKER_TIME_MS, SOURCE, batch, broker, bundle, metadata, single
from tests.fuzz.engine import MIB
from tests.growth.counting import Case, check, counted_calls
from tests.growth.memory import measured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

# A number of the metadata that no column holds. The entry is decoded by the reference decoder.
_ODD = 2**63


def _zipped(plain: bytes, sequence_id: int, index: int) -> bytes:
    fields = {"compression": pb.ZSTD, "uncompressed_size": len(plain), "sequence_id": sequence_id}
    return encode_entry(metadata(**fields), compress(pb.ZSTD, plain), broker(index))


def _odd_entries(plain: bytes) -> Callable[[], list[int]]:
    frames = bundle([_zipped(plain, 1 if index == 20 else _ODD, index) for index in range(40)])

    def decode() -> list[int]:
        ids: list[int] = []
        for part in decode_bundle(frames, SOURCE):
            assert part.messages.nbytes <= DECODED_PIECE_BYTES + len(plain)
            ids.extend(part.messages["entry_id"].to_pylist())
        return ids

    return decode


def test_entries_of_the_reference_decoder_are_expanded_a_few_at_a_time() -> None:
    plain = bytes(8 * MIB)
    ids, peak_bytes = measured(_odd_entries, plain)
    assert ids == list(range(40))
    assert peak_bytes <= DECODING_FACTOR * len(plain) + 10 * DECODED_PIECE_BYTES


_PROPERTY = pb.SingleMessageMetadata(payload_size=0, properties=[pb.KeyValue(key="", value="")])


def _with_properties(messages: int, properties: int, sequence_id: int = 1) -> bytes:
    """An entry of messages with as many properties as their bytes can hold."""
    empty = pb.SingleMessageMetadata(payload_size=0).SerializeToString()
    own = empty + _PROPERTY.SerializeToString().replace(empty, b"") * properties
    plain = (len(own).to_bytes(4, "big") + own) * messages
    fields = {"compression": pb.ZSTD, "uncompressed_size": len(plain), "sequence_id": sequence_id}
    entry = metadata(num_messages_in_batch=messages, **fields)
    return encode_entry(entry, compress(pb.ZSTD, plain), broker(0))


def _heavy_properties(
    messages: int, properties: int, sequence_id: int
) -> Callable[[], tuple[int, list[str]]]:
    frames = bundle([_with_properties(messages, properties, sequence_id)])
    list(decode_bundle(bundle([_with_properties(2, 2, sequence_id)]), SOURCE))

    def decode() -> tuple[int, list[str]]:
        rows, reasons = 0, []
        for part in decode_bundle(frames, SOURCE):
            rows += part.messages.num_rows
            reasons.extend(part.rejects["reason"].to_pylist())
        return rows, reasons

    return decode


@pytest.mark.parametrize("sequence_id", [1, _ODD], ids=["kernels", "reference"])
@pytest.mark.parametrize(
    ("messages", "properties"), [(1, 20_000_000), (20, 60_000), (1, 1_000_000)]
)
def test_properties_of_six_bytes_take_limited_memory(
    messages: int, properties: int, sequence_id: int
) -> None:
    result, peak_bytes = measured(_heavy_properties, messages, properties, sequence_id)
    assert peak_bytes <= DECODING_FACTOR * MAX_MESSAGE_METADATA_BYTES + 10 * DECODED_PIECE_BYTES
    is_too_large = properties * 6 > MAX_MESSAGE_METADATA_BYTES
    assert result == ((0, ["too_large"]) if is_too_large else (messages, []))


def test_odd_entries_between_regular_ones_keep_their_order_in_pieces() -> None:
    values = [bytes([index]) * (3 * MIB if index % 3 else 9) for index in range(30)]
    entries = [
        single(value, index, sequence_id=_ODD if index % 2 else 1)
        for index, value in enumerate(values)
    ]
    parts = list(decode_bundle(bundle(entries), SOURCE))
    assert [row for part in parts for row in part.messages["value"].to_pylist()] == values
    assert max(part.messages.nbytes for part in parts) <= DECODED_PIECE_BYTES + 3 * MIB


def _chunk(
    uuid: str, entry_id: int, chunk_id: int, count: int, *, has_marker: bool = False
) -> Chunk:
    key = ChunkedMessageKey("p", uuid)
    return Chunk(key, Position(1, entry_id), chunk_id, count, count, 1, 1, 1, 1, has_marker)


def _arrivals(chunks: Iterable[Chunk], limits: Limits) -> int:
    pending = IncompleteMessages(limits)
    return sum(isinstance(effect, Deliver) for chunk in chunks for effect in pending.arrive(chunk))


def _one_message(n: int) -> Callable[[], None]:
    chunks = [_chunk("p-1", number, number, n) for number in range(n)]

    def work() -> None:
        assert _arrivals(chunks, Limits()) == 1

    return work


def _many_messages(n: int) -> Callable[[], None]:
    chunks = [_chunk(f"p-{number}", 2 * number + at, at, 3) for number in range(n) for at in (0, 1)]

    def work() -> None:
        assert _arrivals(chunks, Limits(max_pending=10, max_spilled=20)) == 0

    return work


def _awaited_chunks(n: int) -> Callable[[], None]:
    chunks = [_chunk("p-1", number, number + 1, n + 2, has_marker=True) for number in range(n)]
    key, positions = chunks[0].key, tuple(chunk.position for chunk in chunks)

    def work() -> None:
        pending = IncompleteMessages(Limits())
        assert not any(effect for chunk in chunks for effect in pending.arrive(chunk))
        assert len(pending.apply_marker(key, positions)) == 1

    return work


# Typed values. Each maker returns the bytes of a value with ``n`` items, a few bytes for each.


def _number(number: int) -> bytes:
    """Return a number as Avro writes it."""
    bits, out = number << 1, b""
    while bits > 127:
        out += bytes([bits & 127 | 128])
        bits >>= 7
    return out + bytes([bits])


def _record(name: str, **types: Any) -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "fields": [{"name": key, "type": kind} for key, kind in types.items()],
    }


def _list_of(item: Any) -> bytes:
    return json.dumps(_record("Root", l={"type": "array", "items": item})).encode()


def _avro(item: Any) -> ValueSchema:
    return ValueSchema(pb.Schema.Avro, _list_of(item))


def _json(item: Any) -> ValueSchema:
    return ValueSchema(pb.Schema.Json, _list_of(item))


def _avro_items(item: bytes) -> Callable[[int], bytes]:
    return lambda n: _number(n) + item * n + b"\0"


def _json_items(item: str) -> Callable[[int], bytes]:
    return lambda n: f'{{"l":[{",".join([item] * n)}]}}'.encode()


def _protobuf(fields: int, *, of_numbers: bool) -> ValueSchema:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="o.proto", syntax="proto3")
    line = file.message_type.add(name="Line")
    for number in range(1, fields + 1):
        line.field.add(
            name=f"q{number}", number=number, type=kinds.TYPE_INT32, label=kinds.LABEL_OPTIONAL
        )
    order = file.message_type.add(name="Order")
    kind = (
        {"type": kinds.TYPE_INT32}
        if of_numbers
        else {"type": kinds.TYPE_MESSAGE, "type_name": ".Line"}
    )
    order.field.add(name="lines", number=1, label=kinds.LABEL_REPEATED, **kind)
    return _of_file(file)


def _odd_protobuf(*parts: str) -> ValueSchema:
    """A message in which something may be written again and again beside items."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="o.proto", syntax="proto2")
    wide = file.message_type.add(name="Wide")
    for number in range(1, 101):
        wide.field.add(
            name=f"f{number}", number=number, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL
        )
    order = file.message_type.add(name="Order", extension_range=[{"start": 5, "end": 6}])
    order.field.add(name="id", number=1, type=kinds.TYPE_INT32, label=kinds.LABEL_OPTIONAL)
    is_wide = {"type": kinds.TYPE_MESSAGE, "type_name": ".Wide"}
    if "union" in parts:
        order.oneof_decl.add(name="union")
        for number in (2, 3):
            order.field.add(
                name=f"u{number}",
                number=number,
                label=kinds.LABEL_OPTIONAL,
                oneof_index=0,
                **is_wide,
            )
    if "enum" in parts:
        file.enum_type.add(name="Color").value.add(name="RED", number=1)
        of_color = {"type": kinds.TYPE_ENUM, "type_name": ".Color"}
        order.field.add(name="color", number=4, label=kinds.LABEL_OPTIONAL, **of_color)
        order.field.add(name="colors", number=7, label=kinds.LABEL_REPEATED, **of_color)
    if "extension" in parts:
        order.field.add(name="more", number=6, type=kinds.TYPE_STRING, label=kinds.LABEL_REPEATED)
        wide.extension.add(
            name="e", number=5, label=kinds.LABEL_REPEATED, extendee=".Order", **is_wide
        )
    return _of_file(file)


def _of_file(file: descriptor_pb2.FileDescriptorProto) -> ValueSchema:
    files = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    definition = {
        "fileDescriptorSet": base64.b64encode(files).decode(),
        "rootMessageTypeName": "Order",
    }
    return ValueSchema(pb.Schema.ProtobufNative, json.dumps(definition).encode())


def _packed_numbers(n: int) -> bytes:
    size, out = n, b"\x0a"
    while size > 127:
        out += bytes([size & 127 | 128])
        size >>= 7
    return out + bytes([size]) + bytes(n)


_LONG_SYMBOL = {"type": "enum", "name": "E", "symbols": ["S" * 1000]}
_WIDE = _record("W", **{f"f{number}": ["null", "string"] for number in range(100)})
_UNION = {"type": "map", "values": ["null", "long"]}

_HEAVY = {
    "avro, numbers": (_avro("long"), _avro_items(b"\x02")),
    "avro, records": (_avro(_record("L", q="int")), _avro_items(b"\x02")),
    "avro, records without a value": (_avro(_record("L", q=["null", "int"])), _avro_items(b"\0")),
    "avro, arrays": (_avro({"type": "array", "items": "int"}), _avro_items(b"\0")),
    "avro, maps": (_avro(_UNION), _avro_items(b"\x02\x02k\0\0")),
    "avro, symbols": (_avro(_LONG_SYMBOL), _avro_items(b"\0")),
    "avro, texts": (_avro("string"), _avro_items(b"\0")),
    "json, numbers": (_json("long"), _json_items("7")),
    "json, wide records": (_json(_WIDE), _json_items("{}")),
    "json, wide records that are null": (_json(["null", _WIDE]), _json_items("null")),
    "json, maps": (_json(_UNION), _json_items('{"k":1}')),
    "json, lists": (_json({"type": "array", "items": "int"}), _json_items("[]")),
    "protobuf, messages": (_protobuf(6, of_numbers=False), lambda n: b"\x0a\0" * n),
    "protobuf, packed numbers": (_protobuf(1, of_numbers=True), _packed_numbers),
    "protobuf, numbers": (_protobuf(1, of_numbers=True), lambda n: b"\x08\x01" * n),
    "protobuf, messages of a union": (_odd_protobuf("union"), lambda n: b"\x12\0\x1a\0" * n),
    "protobuf, unknown numbers": (_odd_protobuf("enum"), lambda n: b"\x58\x01" * n),
    "protobuf, unknown texts": (_odd_protobuf("enum"), lambda n: b"\x5a\0" * n),
    "protobuf, numbers of another kind": (_odd_protobuf("enum"), lambda n: b"\x0a\0" * n),
    "protobuf, unknown fields beside an extension": (
        _odd_protobuf("enum", "extension"),
        lambda n: b"\x2a\0" * n,
    ),
}


def _encoded(*payloads: bytes) -> Encoded:
    return Encoded(pa.array(payloads, pa.binary()))


def _weight(of_schema: ValueSchema, payload: bytes) -> int:
    return int(decoder(of_schema, of_schema).weigh(_encoded(payload))[0])


# The limit of the values of a message, small so that the largest message is quickly decoded.
_SMALL_LIMIT_BYTES = 32 * MIB
_limit = ExitStack()


def _with_small_limit() -> None:
    """Set the limit for the rest of a process of its own."""
    _limit.enter_context(values_limit(_SMALL_LIMIT_BYTES))


def _refused(name: str) -> Callable[[], int]:
    of_schema, make = _HEAVY[name]
    payload, good = make(6_000_000), make(3)
    decode = decoder(of_schema, of_schema)
    # The first call compiles what others share.
    decode(_encoded(good, payload))

    def refuse() -> int:
        decoded = decode(_encoded(good, payload, good))
        assert decoded.too_large == {1}
        assert f"the limit is {MAX_VALUES_BYTES}" in decoded.bad[1]
        assert decoded.values.null_count == 1
        return len(payload)

    return refuse


@pytest.mark.parametrize("name", _HEAVY)
def test_values_that_stand_for_much_are_refused_before_they_are_decoded(name: str) -> None:
    payload_bytes, peak_bytes = measured(_refused, name)
    assert peak_bytes <= DECODING_FACTOR * payload_bytes // 4 + 16 * MIB


def _largest(name: str) -> Callable[[], int]:
    of_schema, make = _HEAVY[name]
    _with_small_limit()
    least, most = 1, 3_000_000
    while most - least > 100:
        middle = (least + most) // 2
        fits = _weight(of_schema, make(middle)) <= _SMALL_LIMIT_BYTES
        least, most = (middle, most) if fits else (least, middle)
    payload = make(least)
    decode = decoder(of_schema, of_schema)
    decode(_encoded(make(3)))

    def read() -> int:
        assert decode(_encoded(payload)).bad == {}
        return len(payload)

    return read


@pytest.mark.parametrize("name", _HEAVY)
def test_the_largest_value_that_is_decoded_takes_what_the_limit_says(name: str) -> None:
    payload_bytes, peak_bytes = measured(_largest, name)
    assert peak_bytes <= 2 * _SMALL_LIMIT_BYTES + DECODING_FACTOR * payload_bytes + 16 * MIB


def _messages(payloads: list[bytes]) -> pa.RecordBatch:
    entries = [
        single(payload, index, schema_version=bytes(8)) for index, payload in enumerate(payloads)
    ]
    (part,) = decode_bundle(bundle(entries), SOURCE)
    return part.messages.select(schema.MESSAGES.names)


def _of_an_extension(payload: bytes) -> Callable[[], list[object]]:
    of_schema = _odd_protobuf("extension")
    decode = decoder(of_schema, of_schema)
    decode(_encoded(payload[:2]))

    def read() -> list[object]:
        return decode(_encoded(payload)).values.to_pylist()

    return read


def test_an_extension_takes_no_more_than_its_bytes() -> None:
    payload = b"\x2a\0" * 500_000
    values, peak_bytes = measured(_of_an_extension, payload)
    assert values == [{"id": None, "more": []}]
    assert peak_bytes <= DECODING_FACTOR * len(payload)


def _of_unknown_fields(field: bytes) -> Callable[[], int]:
    of_schema = _odd_protobuf("enum")
    decode = decoder(of_schema, of_schema)
    _with_small_limit()
    payload = field * ((_SMALL_LIMIT_BYTES // _weight(of_schema, field * 10_000)) * 10_000)
    decode(_encoded(b""))
    assert _weight(of_schema, payload) <= _SMALL_LIMIT_BYTES

    def read() -> int:
        decode(_encoded(payload))
        return len(payload)

    return read


@pytest.mark.parametrize(
    "field",
    [b"\x5b\x5c", b"\x5b\x58\x01\x5c", b"\x20\x05"],
    ids=["groups", "groups of one", "enum"],
)
def test_odd_unknown_fields_take_what_the_limit_says(field: bytes) -> None:
    payload_bytes, peak_bytes = measured(_of_unknown_fields, field)
    assert peak_bytes <= 2 * _SMALL_LIMIT_BYTES + DECODING_FACTOR * payload_bytes + 16 * MIB


def _in_pieces(name: str) -> Callable[[], tuple[list[int], int]]:
    """The numbers of rows of the pieces of 12 messages, and the bytes of one message."""
    of_schema, make = _HEAVY[name]
    _with_small_limit()
    n = 1000
    while _weight(of_schema, make(n)) < _SMALL_LIMIT_BYTES // 4:
        n *= 2
    payload = make(n)
    messages = _messages([payload] * 12)
    record = record_of(of_schema)

    def read() -> tuple[list[int], int]:
        pieces = []
        for start, stop in record_cuts(messages, lambda _version: of_schema, of_schema, record):
            rows, misfits = record_rows(
                messages.slice(start, stop - start), lambda _version: of_schema, of_schema, record
            )
            assert misfits == []
            pieces.append(rows.num_rows)
        for part in typed_parts(messages, of_schema, lambda _version: of_schema, keep_bytes=False):
            assert part["reject_reason"].null_count == part.num_rows
        return pieces, len(payload)

    return read


@pytest.mark.parametrize("name", _HEAVY)
def test_messages_of_one_bundle_become_rows_in_pieces(name: str) -> None:
    (pieces, payload_bytes), peak_bytes = measured(_in_pieces, name)
    assert sum(pieces) == 12
    assert max(pieces) < 12
    decoding_bytes = 2 * _SMALL_LIMIT_BYTES + DECODING_FACTOR * max(pieces) * payload_bytes
    assert peak_bytes <= 2 * decoding_bytes + 16 * MIB


def test_a_message_that_is_too_large_is_a_reject_with_its_weight_and_the_limit() -> None:
    of_schema, make = _HEAVY["avro, records"]
    messages = _messages([make(2), make(2_000_000), make(1)])
    rows, (misfit,) = record_rows(
        messages, lambda _version: of_schema, of_schema, record_of(of_schema)
    )
    assert rows.num_rows == 2
    assert (misfit.row, misfit.reason) == (1, VALUE_TOO_LARGE)
    assert misfit.detail.endswith(f"bytes when they are decoded; the limit is {MAX_VALUES_BYTES}")
    parts = list(typed_parts(messages, of_schema, lambda _version: of_schema, keep_bytes=False))
    assert [reason for part in parts for reason in part["reject_reason"].to_pylist()] == [
        None,
        VALUE_TOO_LARGE,
        None,
    ]
    kept = [data for part in parts for data in part["value_bytes"].to_pylist()]
    assert kept == [None, messages["value"][1].as_py(), None]


def _versions(n: int) -> Callable[[], None]:
    versions = pa.array([number.to_bytes(8, "big") for number in range(n)] * 2, pa.binary())

    def work() -> None:
        found = list(by_version(versions))
        assert [rows.tolist() for _, rows in found] == [[number, number + n] for number in range(n)]

    return work


def _typed_values(name: str) -> Callable[[int], Callable[[], None]]:
    of_schema, make = _HEAVY[name]

    def prepare(n: int) -> Callable[[], None]:
        decode, payload = decoder(of_schema, of_schema), make(n)
        return lambda: np.testing.assert_equal(decode(_encoded(payload)).bad, {})

    return prepare


_numbers = count()


def _union_of_nulls(n: int) -> Callable[[], Mapping[str, int]]:
    """A schema with a union of ``n`` nulls and a number, which reads its own values."""
    # A process remembers the decoders of schemas.
    definition = _record(f"R{next(_numbers)}", field=["null"] * n + ["long"])
    schema = ValueSchema(pb.Schema.Avro, json.dumps(definition).encode())

    def work() -> Mapping[str, int]:
        branches = 0

        def counted(node: Any, named: dict[str, Any]) -> Any:
            nonlocal branches
            branches += len(node) if isinstance(node, list) else 1
            return not_null(node, named)

        # Python counts no call for a branch that is passed over.
        with patch("ledgerlake.values.avro_weights.not_null", counted):
            decoder(schema, schema)
        return {"branches": branches}

    return work


def _nested_records(kind: int) -> Callable[[int], Callable[[], None]]:
    """Schemas of ``n`` records in each other; the inmost one has ``n`` fields without bytes."""

    def prepare(n: int) -> Callable[[], None]:
        empty = {"type": "fixed", "name": "F", "size": 0}
        definition = _record("R", first=empty, **{f"f{number}": "F" for number in range(n)})
        for number in range(n):
            definition = _record(f"R{number}", inner=definition)
        nested = ValueSchema(kind, json.dumps(definition).encode())

        def work() -> None:
            column_type.cache_clear()
            with pytest.raises(SetupError, match="nested too deeply"):
                column_type(nested)

        return work

    return prepare


def _pieces(
    odd: int, piece_bytes: int = DECODED_PIECE_BYTES
) -> Callable[[int], Callable[[], dict[str, int]]]:
    """Batches of two messages; some of a hundred are odd."""

    def prepare(n: int) -> Callable[[], dict[str, int]]:
        fields = [{"sequence_id": _ODD} if number % 100 < odd else {} for number in range(n)]
        frames = bundle([batch([b"a", b"b"], **more) for more in fields])

        def work() -> dict[str, int]:
            with (
                patch.object(messages, "DECODED_PIECE_BYTES", piece_bytes),
                counted_calls(messages, "_spans") as columns,
            ):
                parts = list(decode_bundle(frames, SOURCE))
            ids = [number for part in parts for number in part.messages["entry_id"].to_pylist()]
            assert ids == [number for number in range(n) for _ in range(2)]
            return {
                "pieces": len(parts),
                "rows of columns": sum(len(sizes) for _, _, sizes, _ in columns),
            }

        return work

    return prepare


def _chunks_between(n: int) -> Callable[[], Mapping[str, int]]:
    """Prepare a bundle in which each plain and each delayed entry is behind a chunk."""
    chunk = chunk_entries(b"ab", 2)[1]
    frames = bundle(
        [chunk, single(b"v"), chunk, single(b"v", deliver_at_time=2 * BROKER_TIME_MS)] * n
    )

    def work() -> Mapping[str, int]:
        kinds = Counter(kind for kind, _, _ in split_bundle(frames))
        assert kinds.pop(PieceKind.CHUNK) == 2 * n
        return {"pieces to decode": kinds.total()}

    return work


CASES = [
    Case(
        "split_bundle, chunks between other entries",
        _chunks_between,
        constant=("pieces to decode",),
    ),
    Case("pieces, small odd batches", _pieces(odd=100), n=200, constant=("pieces",)),
    Case("pieces, small odd batches between others", _pieces(odd=2), n=200, constant=("pieces",)),
    Case("pieces, many of odd batches and others", _pieces(odd=2, piece_bytes=2_000), n=200),
    Case("pieces, many of regular batches", _pieces(odd=0, piece_bytes=2_000), n=200),
    Case("rules, chunks of one message", _one_message, n=200),
    Case("rules, messages of which two chunks came", _many_messages, n=200),
    Case("rules, chunks that wait for a marker", _awaited_chunks, n=200),
    Case("typed, messages that each name another version", _versions, n=200),
    Case("schema, Avro records in each other", _nested_records(pb.Schema.Avro), n=40),
    Case("schema, JSON records in each other", _nested_records(pb.Schema.Json), n=40),
    Case("schema, a union of nulls", _union_of_nulls, n=300),
    *(Case(f"values, {name}", _typed_values(name), n=500) for name in _HEAVY),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_work_of_decoding_grows_with_its_input_at_most(case: Case) -> None:
    check(case)
