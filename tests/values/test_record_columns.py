"""Columns of records: the union of schemas, and which values fit it."""

from __future__ import annotations

import base64
import io
import json
import math
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import deltalake
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.protobuf import descriptor_pb2

from ledgerlake.decode import schema
from ledgerlake.decode.columns import DecodedValues, Encoded
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.decode.rejects import RejectedEntry, read_reject, reject_frame, reject_rows
from ledgerlake.decode.single_entry import single_entries
from ledgerlake.errors import SetupError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.values import record_rows as record_rows_module
from ledgerlake.values.record_columns import as_records, record_of, united
from ledgerlake.values.record_rows import RECORD_COLUMN, record_rows
from ledgerlake.values.schemas import decoder
from ledgerlake.wire.entry import parse_entry
from ledgerlake.wire.message_id import Position
from ledgerlake.wire.value_schema import NO_SCHEMA, ValueSchema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def avro(*fields: tuple[str, Any], kind: int = pb.Schema.Json) -> ValueSchema:
    definition = {
        "type": "record",
        "name": "R",
        "fields": [{"name": name, "type": of} for name, of in fields],
    }
    return ValueSchema(kind, json.dumps(definition).encode())


def fit(
    values: list[Any], kind: pa.DataType, column: pa.DataType
) -> tuple[list[Any], dict[int, str]]:
    records = pa.array([{"x": value} for value in values], pa.struct([("x", kind)]))
    fitted = as_records(DecodedValues(records), pa.struct([("x", column)]))
    fitted.values.validate(full=True)
    return [row and row["x"] for row in fitted.values.to_pylist()], fitted.bad


def test_a_schema_has_a_column_for_each_field_and_other_kinds_have_one() -> None:
    assert record_of(avro(("id", "long"), ("name", ["null", "string"]))) == pa.struct(
        [("id", pa.int64()), ("name", pa.string())]
    )
    assert record_of(ValueSchema(pb.Schema.Int32)) == pa.struct([("value", pa.int32())])
    assert record_of(NO_SCHEMA) == pa.struct([("value", pa.binary())])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            [("Pulsar", "long")],
            "has a field Pulsar, and the table has the metadata of Pulsar in a column of that name",
        ),
        ([("id", "long"), ("ID", "long")], "has two fields 'ID' that differ in case at most"),
        (
            [
                (
                    "in",
                    {
                        "type": "record",
                        "name": "I",
                        "fields": [{"name": "a", "type": "int"}, {"name": "A", "type": "int"}],
                    },
                )
            ],
            "has two fields 'A' that differ",
        ),
        (
            [
                (
                    "l",
                    {
                        "type": "array",
                        "items": {
                            "type": "record",
                            "name": "I",
                            "fields": [{"name": "a b", "type": "int"}],
                        },
                    },
                )
            ],
            "has a field 'a b', whose name Delta does not take",
        ),
        ([("n\0a", "int"), ("n\0b", "int")], r"has a field 'n\\x00a', whose name"),
        ([("a\x1b[2J", "int")], r"has a field 'a\\x1b\[2J', whose name"),
        ([("n" * 256, "int")], "has a field 'n{40}'..., whose name has more than 255 bytes"),
        (
            [("_change_type", "int")],
            "has a field '_change_type', which is a column of Delta's own to Spark",
        ),
        ([("__delta_internal_is_row_deleted", "int")], "which is a column of Delta's own"),
        ([("pulsar.partition", "int")], "has a field 'pulsar.partition', whose name"),
    ],
)
def test_fields_that_cannot_be_columns_are_refused(
    fields: list[tuple[str, Any]], sentence: str
) -> None:
    with pytest.raises(SetupError, match=sentence):
        record_of(avro(*fields))


def nested(levels: str, kind: int) -> ValueSchema:
    """A schema with a record in a list in a map, as the letters say."""
    of: Any = "int"
    for number, letter in enumerate(reversed(levels)):
        of = {
            "l": {"type": "array", "items": of},
            "m": {"type": "map", "values": of},
            "r": {"type": "record", "name": f"R{number}", "fields": [{"name": "a", "type": of}]},
            "n": [
                "null",
                {"type": "record", "name": f"R{number}", "fields": [{"name": "a", "type": of}]},
            ],
        }[letter]
    return ValueSchema(
        kind,
        json.dumps({"type": "record", "name": "R", "fields": [{"name": "x", "type": of}]}).encode(),
    )


def nested_messages(count: int) -> ValueSchema:
    """A Protobuf schema of so many messages; each one has a field of the next one."""
    file = descriptor_pb2.FileDescriptorProto(name="d.proto", syntax="proto3")
    for number in range(count):
        message = file.message_type.add(name=f"M{number}")
        message.field.add(name="x", number=1, type=5, label=1)
        if number + 1 < count:
            message.field.add(
                name="a", number=2, type=11, label=1 + 2 * (number % 2), type_name=f".M{number + 1}"
            )
    files = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    definition = {
        "fileDescriptorSet": base64.b64encode(files).decode(),
        "rootMessageTypeName": "M0",
    }
    return ValueSchema(pb.Schema.ProtobufNative, json.dumps(definition).encode())


def key_value(value: ValueSchema) -> ValueSchema:
    parts = (b"", value.definition)
    kinds: dict[int, str] = {
        pb.Schema.Avro: "AVRO",
        pb.Schema.Json: "JSON",
        pb.Schema.ProtobufNative: "PROTOBUF_NATIVE",
    }
    return ValueSchema(
        pb.Schema.KeyAndValue,
        b"".join(len(part).to_bytes(4, "big") + part for part in parts),
        (("key.schema.type", "STRING"), ("value.schema.type", kinds[value.kind])),
    )


def is_read_by_all(record: pa.StructType) -> bool:
    """Whether columns come back from Delta's log, a Parquet file, Arrow's stream and DuckDB."""
    columns = pa.schema([*record, pa.field("pulsar", pa.struct(record_rows_module.PULSAR_FIELDS))])
    delta = deltalake.Schema.from_arrow(columns)
    assert deltalake.Schema.from_json(delta.to_json()) == delta
    table = pa.Table.from_arrays([pa.nulls(2, field.type) for field in columns], schema=columns)
    parquet, stream = io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet)
    with pa.ipc.new_stream(stream, pa.schema([("record", record)])) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([pa.nulls(2, record)], names=["record"]))
    assert pa.ipc.open_stream(stream.getvalue()).read_all().schema.field("record").type == record
    query = duckdb.from_arrow(table).project("*").to_arrow_table()
    return pq.read_table(parquet).schema.equals(columns) and query.num_rows == 2


@pytest.mark.parametrize("wrap", [lambda schema: schema, key_value], ids=["value", "key and value"])
def test_a_schema_is_refused_or_read_by_all_readers_however_deep_it_is(
    wrap: Callable[[ValueSchema], ValueSchema],
) -> None:
    taken: set[int] = set()
    refused: dict[int, str] = {}
    for depth in (
        1,
        8,
        14,
        15,
        16,
        20,
        28,
        29,
        30,
        31,
        32,
        33,
        41,
        42,
        43,
        50,
        99,
        300,
        1000,
        5000,
    ):
        schemas = [nested_messages(depth)]
        for letters in ("r", "n", "l", "m", "lr", "nm", "lnm"):
            levels = (letters * depth)[:depth]
            schemas += [
                nested(levels, kind)
                for kind in ((pb.Schema.Avro, pb.Schema.Json) if depth < 300 else ())
            ]
        for number, schema_of in enumerate(map(wrap, schemas)):
            try:
                record = record_of(schema_of)
            except SetupError as error:
                refused[number] = error.message
                continue
            assert is_read_by_all(record)
            taken.add(number)
    assert taken == set(refused) == set(range(15))
    assert all("nested too deeply" in why or "recursion" in why for why in refused.values())


def test_a_record_without_fields_is_left_out_at_every_depth() -> None:
    empty = {"type": "record", "name": "E", "fields": []}
    schema_of = avro(
        ("id", "long"), ("gone", empty), ("l", {"type": "array", "items": "E"}), kind=pb.Schema.Json
    )
    assert record_of(schema_of) == pa.struct([("id", pa.int64())])
    rows, misfits = record_rows(
        messages((b"1", b'{"id": 1, "gone": {}}')),
        lambda _: schema_of,
        NO_SCHEMA,
        record_of(schema_of),
    )
    assert (rows[RECORD_COLUMN].to_pylist(), misfits) == ([{"id": 1}], [])


@pytest.mark.parametrize(
    "value", ["1700000000000", '"2026-05-01"', "[1, [2]]", "null", '{"time": 1}']
)
@pytest.mark.parametrize("place", ["%s", "[%s]", '{"k": %s}', '{"in": %s}'])
def test_what_has_no_column_may_be_anything_in_json(place: str, value: str) -> None:
    empty = {"type": "record", "name": "Date", "namespace": "java.util", "fields": []}
    kinds: dict[str, Any] = {
        "%s": ["null", empty],
        "[%s]": {"type": "array", "items": empty},
        '{"k": %s}': {"type": "map", "values": empty},
        '{"in": %s}': {"type": "record", "name": "I", "fields": [{"name": "in", "type": empty}]},
    }
    schema_of = avro(("id", "long"), ("created", kinds[place]))
    payloads = [f'{{"id": 1, "created": {written}}}'.encode() for written in (place % value, value)]
    batch = messages(*((b"1", payload) for payload in payloads))
    rows, misfits = record_rows(batch, lambda _: schema_of, NO_SCHEMA, record_of(schema_of))
    assert (rows[RECORD_COLUMN].to_pylist(), misfits) == ([{"id": 1}, {"id": 1}], [])


def test_a_union_keeps_known_types_and_adds_what_is_new_at_every_depth() -> None:
    known = pa.struct(
        [
            ("id", pa.int32()),
            ("in", pa.struct([("a", pa.int32())])),
            ("l", pa.list_(pa.struct([("p", pa.int32())]))),
        ]
    )
    more = pa.struct(
        [
            ("ID", pa.string()),
            ("in", pa.struct([("b", pa.string())])),
            ("l", pa.list_(pa.struct([("q", pa.int64())]))),
            ("m", pa.map_(pa.string(), pa.int64())),
        ]
    )
    union = united(known, more)
    assert [field.name for field in union] == ["id", "in", "l", "m"]
    assert union.field("id").type == pa.int32()
    assert union.field("in").type == pa.struct([("a", pa.int32()), ("b", pa.string())])
    assert union.field("l").type.value_type == pa.struct([("p", pa.int32()), ("q", pa.int64())])
    assert united(union, more) == union
    assert united(union, known) == union


@pytest.mark.parametrize(
    ("values", "kind", "column", "fitted", "misfits"),
    [
        (
            [1, None, 2**40],
            pa.int64(),
            pa.int32(),
            [1, None, None],
            {2: "x 1099511627776 is no int32"},
        ),
        ([1, 2], pa.int32(), pa.int64(), [1, 2], {}),
        (
            [1, 2**53 + 1],
            pa.int64(),
            pa.float64(),
            [1.0, None],
            {1: "x 9007199254740993 is no double"},
        ),
        ([1.0, 1.5, None], pa.float64(), pa.int32(), [1, None, None], {1: "x 1.5 is no int32"}),
        ([0.5, 0.1], pa.float64(), pa.float32(), [0.5, None], {1: "x 0.1 is no float"}),
        (
            ["a", None],
            pa.string(),
            pa.int32(),
            [None, None],
            {0: "x is string, and its column is int32"},
        ),
        (
            [Decimal("1.50"), Decimal("1000.25")],
            pa.decimal128(6, 2),
            pa.decimal128(4, 2),
            [Decimal("1.50"), None],
            {1: "x 1000.25 is no decimal128(4, 2)"},
        ),
    ],
)
def test_a_number_fits_if_it_stays_the_same(
    values: list[Any],
    kind: pa.DataType,
    column: pa.DataType,
    fitted: list[Any],
    misfits: dict[int, str],
) -> None:
    assert fit(values, kind, column) == (fitted, misfits)


_NUMBERS = [None, *map(Decimal, ("0", "7", "-1", "1.5", "99", "-128", "2147483648", "1E10"))]
_KINDS = [
    *(pa.int8(), pa.int32(), pa.int64(), pa.decimal128(4, 2), pa.decimal128(10, 2)),
    *(pa.decimal128(38, 0), pa.decimal128(38, 10)),
]


def has_room(kind: pa.DataType, number: Decimal | None) -> bool:
    """Whether a type of whole or decimal numbers has a number as it is."""
    if number is None:
        return True
    if pa.types.is_decimal(kind):
        whole = kind.precision - kind.scale
        return abs(number) < 10**whole and number == round(number, kind.scale)
    return number == int(number) and -(2 ** (kind.bit_width - 1)) <= number < 2 ** (
        kind.bit_width - 1
    )


@pytest.mark.parametrize("kind", _KINDS, ids=str)
@pytest.mark.parametrize("column", _KINDS, ids=str)
def test_a_whole_or_decimal_number_fits_each_column_that_has_room_for_it(
    kind: pa.DataType, column: pa.DataType
) -> None:
    numbers = [number for number in _NUMBERS if has_room(kind, number)]
    values = [
        number if number is None or pa.types.is_decimal(kind) else int(number) for number in numbers
    ]
    fitted, misfits = fit(values, kind, column)
    assert fitted == [number if has_room(column, number) else None for number in numbers]
    assert [*misfits] == [row for row, number in enumerate(numbers) if not has_room(column, number)]


def test_a_number_that_is_none_fits_floating_columns_only() -> None:
    fitted, misfits = fit([math.nan], pa.float64(), pa.float32())
    assert math.isnan(fitted[0])
    assert misfits == {}
    assert fit([math.nan], pa.float64(), pa.int32())[1] == {0: "x nan is no int32"}
    # x86 and ARM cast numbers out of bounds to different ones.
    for kind, bits, target, has_all in (
        (pa.float64(), 63, pa.int64(), False),
        (pa.float32(), 63, pa.int64(), False),
        (pa.float64(), 31, pa.int32(), True),
        (pa.float32(), 31, pa.int32(), False),
        (pa.float32(), 7, pa.int8(), True),
    ):
        end = 2.0**bits
        fitted, bad = fit([-end, end, -2 * end, math.inf, -math.inf, math.nan, None], kind, target)
        assert (fitted, list(bad)) == ([int(-end), *[None] * 6], [1, 2, 3, 4, 5])
        fitted, bad = fit([int(end) - 1, int(-end)], target, kind)
        assert (fitted[1], list(bad)) == (-end, [] if has_all else [0])


def test_parts_of_lists_and_maps_that_do_not_fit_make_their_row_a_misfit() -> None:
    lists = fit([[1, 2], None, [], [2**40]], pa.list_(pa.int64()), pa.list_(pa.int32()))
    assert lists == ([[1, 2], None, [], None], {3: "x[] 1099511627776 is no int32"})
    maps = fit(
        [[("k", 1)], [("k", 2**40)], None],
        pa.map_(pa.string(), pa.int64()),
        pa.map_(pa.string(), pa.int32()),
    )
    assert maps == ([[("k", 1)], None, None], {1: "x[] 1099511627776 is no int32"})


def test_slices_fit_as_whole_arrays_do() -> None:
    kind = pa.struct([("l", pa.list_(pa.int64())), ("m", pa.map_(pa.string(), pa.int64()))])
    column = pa.struct(
        [("l", pa.list_(pa.int32())), ("m", pa.map_(pa.string(), pa.int32())), ("n", pa.string())]
    )
    rows = [{"l": [n, n + 1], "m": [("k", n)]} if n % 3 else None for n in range(20)]
    whole = as_records(DecodedValues(pa.array(rows, kind)), column).values.to_pylist()
    part = as_records(DecodedValues(pa.array(rows, kind).slice(7, 9)), column).values
    part.validate(full=True)
    assert part.to_pylist() == whole[7:16]


def test_a_field_without_a_column_is_a_misfit_and_not_dropped() -> None:
    records = pa.array(
        [{"x": 1, "y": None}, {"x": 2, "y": "new"}],
        pa.struct([("x", pa.int32()), ("y", pa.string())]),
    )
    fitted = as_records(DecodedValues(records), pa.struct([("x", pa.int32())]))
    assert fitted.values.to_pylist() == [{"x": 1}, None]
    assert fitted.bad == {1: "the table has no column for y"}


def messages(*values: tuple[bytes | None, bytes | None], **columns: Any) -> pa.RecordBatch:
    """Messages with these versions and values."""
    return pa.RecordBatch.from_pylist(
        [
            {
                "topic": "t",
                "partition": 0,
                "ledger_id": 3,
                "entry_id": number,
                "batch_index": -1,
                "producer_name": "p",
                "sequence_id": number,
                "publish_time": 5_000_000,
                "schema_version": version,
                "is_null": value is None,
                "value": value,
                **columns,
            }
            for number, (version, value) in enumerate(values)
        ],
        schema=schema.MESSAGES,
    )


def test_versions_that_alternate_fill_their_own_fields() -> None:
    versions = {
        b"1": avro(("id", "long"), ("a", "string")),
        b"2": avro(("id", "long"), ("b", "double")),
    }
    record = united(record_of(versions[b"1"]), record_of(versions[b"2"]))
    batch = messages(
        (b"1", b'{"id": 1, "a": "x"}'),
        (b"2", b'{"id": 2, "b": 0.5}'),
        (b"1", b'{"id": 3, "a": "y"}'),
        (None, b'{"id": 4, "b": 1.5}'),
        (b"2", None),
    )
    rows, misfits = record_rows(batch, versions.get, versions[b"2"], record)
    assert misfits == []
    assert rows[RECORD_COLUMN].to_pylist() == [
        {"id": 1, "a": "x", "b": None},
        {"id": 2, "a": None, "b": 0.5},
        {"id": 3, "a": "y", "b": None},
        {"id": 4, "a": None, "b": 1.5},
        None,
    ]
    assert rows["entry_id"].to_pylist() == [0, 1, 2, 3, 4]


def test_messages_that_do_not_fit_are_told_apart_with_the_reason() -> None:
    versions = {b"1": avro(("id", "int"))}
    batch = messages(
        (b"1", b'{"id": 1}'),
        (b"1", b'{"id": "x"}'),
        (b"9", b"{}"),
        (b"1", b"no json"),
        (b"9", None),
    )
    rows, misfits = record_rows(batch, versions.get, NO_SCHEMA, record_of(versions[b"1"]))
    assert rows["entry_id"].to_pylist() == [0, 4]
    assert [(misfit.row, misfit.reason) for misfit in misfits] == [
        (1, "schema_mismatch"),
        (2, "unknown_schema"),
        (3, "schema_mismatch"),
    ]


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each object or list of a JSON, and each key or number in it."""
    if isinstance(tree, dict | list):
        for key in range(len(tree)) if isinstance(tree, list) else list(tree):
            yield tree, key
            yield from places(tree[key])


def with_text(definition: str, text: str) -> Iterator[str]:
    """Yield the definition with a text at each place, as the value there and as the key."""
    for number, _ in enumerate(list(places(json.loads(definition)))):
        for is_key in (False, True):
            tree = json.loads(definition)
            node, key = list(places(tree))[number]
            if is_key and isinstance(node, dict):
                node[text] = node.pop(key)
            else:
                node[key] = text
            yield json.dumps(tree)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\0", "\x1b[2J", "a\nb", "\U0001f600"])
@pytest.mark.parametrize("kind", [pb.Schema.Json, pb.Schema.Avro])
def test_no_text_of_a_schema_makes_a_reject_that_cannot_be_stored(
    kind: int, text: str, tmp_path: Path
) -> None:
    item = {"type": "record", "name": "n.I", "fields": [{"name": "a", "type": "R", "default": 1}]}
    size = {"type": "fixed", "name": "F", "size": 2, "logicalType": "decimal", "precision": 3}
    choice = {"type": "enum", "name": "E", "namespace": "n", "symbols": ["A"], "default": "A"}
    whole = avro(
        ("id", ["null", "int"]),
        ("items", {"type": "array", "items": item}),
        ("by_key", {"type": "map", "values": size}),
        ("choice", choice),
        ("again", {**choice, "symbols": ["B"]}),
        kind=kind,
    )
    rejected: list[RejectedEntry] = []
    for definition in with_text(whole.definition.decode(), text):
        of_text = ValueSchema(kind, definition.encode())
        _, misfits = record_rows(
            messages((None, b"{}")), lambda _: None, of_text, pa.struct([("x", pa.int32())])
        )
        rejected += [
            RejectedEntry(Position(3, len(rejected)), b"{}", misfit.reason, misfit.detail)
            for misfit in misfits
        ]
    assert len(rejected) > 20
    assert [read_reject(reject_frame(reject)) for reject in rejected] == rejected
    deltalake.write_deltalake(tmp_path, reject_rows(rejected, TopicPartition("t", 0)))
    stored = deltalake.DeltaTable(tmp_path).to_pyarrow_table().sort_by("entry_id")
    assert stored["detail"].to_pylist() == [reject.detail for reject in rejected]


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        ('{"id": "x"}', "id: a text stands where the schema has a number"),
        ('{"id": 2147483648}', "id: 2147483648 is too large for a column of int32"),
        ('{"id": ' + "9" * 5000 + "}", f"id: {'9' * 50} is too large for a column of int32"),
        ('{"item": {"price": true}}', "item.price: a boolean stands where the schema has a number"),
        ('{"item": {"price": 1e400}}', "item.price: 1e400 is too large for a column of double"),
        ('{"item": []}', "item: a list stands where the schema has an object"),
        ('{"tags": ["a", {}]}', "tags: an object stands where the schema has a text"),
        ("[]", "a list stands where the schema has an object"),
    ],
)
def test_a_json_value_that_does_not_fit_names_the_field(value: str, detail: str) -> None:
    item = {
        "type": "record",
        "name": "Item",
        "fields": [{"name": "price", "type": ["null", "double"]}],
    }
    tags = {"type": "array", "items": "string"}
    of_order = avro(("id", ["null", "int"]), ("item", ["null", item]), ("tags", ["null", tags]))
    _, (misfit,) = record_rows(
        messages((None, value.encode())), lambda _: None, of_order, record_of(of_order)
    )
    assert misfit.detail == detail


def test_a_batch_without_messages_has_no_rows() -> None:
    rows, misfits = record_rows(
        messages(), lambda _: None, NO_SCHEMA, record_of(avro(("id", "int")))
    )
    assert (rows.num_rows, misfits) == (0, [])


def test_a_time_that_no_column_can_hold_is_a_misfit_and_not_the_end() -> None:
    of_millis = avro(
        ("at", {"type": "long", "logicalType": "timestamp-millis"}), kind=pb.Schema.Avro
    )
    nanoseconds = b"\x80\x80\xa0\xc9\x9b\xcb\xed\x85\x31"
    batch = messages((b"1", b"\x02"), (b"1", nanoseconds), (b"1", b"\x04"))
    rows, misfits = record_rows(batch, lambda _: of_millis, NO_SCHEMA, record_of(of_millis))
    assert rows["entry_id"].to_pylist() == [0, 2]
    assert [(misfit.row, misfit.reason) for misfit in misfits] == [(1, "schema_mismatch")]


def test_a_decoder_that_fails_for_all_together_costs_the_bad_ones_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = avro(("id", "int"))

    def failing(writer: ValueSchema, reader: ValueSchema) -> Any:
        decode = decoder(writer, reader)

        def checked(encoded: Encoded) -> Any:
            if any(payload == b'{"id": 3}' for payload in encoded.payloads.to_pylist()):
                raise pa.ArrowInvalid("overflow")
            return decode(encoded)

        return checked

    monkeypatch.setattr(record_rows_module, "decoder", failing)
    batch = messages(*((b"1", b'{"id": %d}' % number) for number in range(7)))
    rows, misfits = record_rows(batch, lambda _: whole, NO_SCHEMA, record_of(whole))
    assert rows["entry_id"].to_pylist() == [0, 1, 2, 4, 5, 6]
    assert [(misfit.row, misfit.detail) for misfit in misfits] == [(3, "ArrowInvalid: overflow")]


def test_messages_of_a_version_that_the_table_refuses_are_misfits_as_a_whole() -> None:
    refused = avro(("id", "int"), ("ID", "int"))
    record = record_of(avro(("id", "int")))
    rows, misfits = record_rows(
        messages((b"1", b'{"id": 1, "ID": 2}')), lambda _: refused, NO_SCHEMA, record
    )
    assert rows.num_rows == 0
    assert "differ in case" in misfits[0].detail


def test_a_message_of_a_batch_becomes_an_entry_with_all_that_it_had() -> None:
    batch = messages(
        (b"1", b"value"),
        key="k",
        properties=[("a", "1"), ("a", "2")],
        event_time=7_000_000,
        broker_timestamp=9_000_000,
        broker_index=41,
        ordering_key=b"o",
    )
    entry = parse_entry(single_entries(batch)[0])
    assert bytes(entry.payload) == b"value"
    assert (entry.broker.broker_timestamp, entry.broker.index) == (9000, 41)  # type: ignore[union-attr]
    metadata = entry.metadata
    assert (metadata.partition_key, metadata.event_time, metadata.publish_time) == ("k", 7000, 5000)
    assert (metadata.schema_version, metadata.ordering_key, metadata.producer_name) == (
        b"1",
        b"o",
        "p",
    )
    assert [(each.key, each.value) for each in metadata.properties] == [("a", "1"), ("a", "2")]


def test_a_binary_key_and_a_tombstone_are_kept() -> None:
    metadata = parse_entry(single_entries(messages((None, None), key_bytes=b"\xff"))[0]).metadata
    assert metadata.null_value
    assert metadata.partition_key_b64_encoded
    assert metadata.partition_key == "/w=="
