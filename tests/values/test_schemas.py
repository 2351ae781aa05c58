"""Values by their schemas: every kind, evolution, and what does not fit."""

from __future__ import annotations

import base64
import io
import json
import math
import struct
from datetime import date, datetime, timedelta, timezone
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any

import fastavro
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st

from ledgerlake.decode.columns import Encoded
from ledgerlake.errors import SetupError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.values import avro_weights, records
from ledgerlake.values import schemas as values_module
from ledgerlake.values.records import record_type
from ledgerlake.values.schemas import column_type, decoder
from ledgerlake.wire.value_schema import ValueSchema
from tests.decode.protobuf_schemas import protobuf

if TYPE_CHECKING:
    from collections.abc import Sequence

SchemaType = pb.Schema
UTC = timezone.utc


def read(
    schema: ValueSchema,
    payloads: Sequence[bytes | None],
    writer: ValueSchema | None = None,
    keys: list[Any] | None = None,
) -> tuple[list[Any], dict[int, str]]:
    encoded = Encoded(
        pa.array(payloads, pa.binary()), None if keys is None else pa.array(keys, pa.binary())
    )
    decoded = decoder(writer or schema, schema)(encoded)
    assert decoded.values.type == column_type(schema)
    assert len(decoded.values) == len(payloads)
    return decoded.values.to_pylist(), decoded.bad


def avro(*fields: dict[str, Any], name: str = "R") -> ValueSchema:
    return ValueSchema(
        SchemaType.Avro,
        json.dumps({"type": "record", "name": name, "fields": list(fields)}).encode(),
    )


def as_json(schema: ValueSchema) -> ValueSchema:
    return ValueSchema(SchemaType.Json, schema.definition)


def written(schema: ValueSchema, value: Any) -> bytes:
    encoded = io.BytesIO()
    fastavro.schemaless_writer(encoded, fastavro.parse_schema(json.loads(schema.definition)), value)
    return encoded.getvalue()


# It has no absolute value.
LEAST = struct.pack(">q", -(2**63))


def field(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


@pytest.mark.parametrize(
    ("kind", "payload", "value"),
    [
        (SchemaType.String, "grüße".encode(), "grüße"),
        (SchemaType.String, b"", ""),
        (SchemaType.Bool, b"\1", True),
        (SchemaType.Bool, b"\0", False),
        (SchemaType.Int8, b"\xff", -1),
        (SchemaType.Int16, struct.pack(">h", -300), -300),
        (SchemaType.Int32, struct.pack(">i", 2**31 - 1), 2**31 - 1),
        (SchemaType.Int64, struct.pack(">q", -(2**63)), -(2**63)),
        (SchemaType.Float, struct.pack(">f", 1.5), 1.5),
        (SchemaType.Double, struct.pack(">d", -0.1), -0.1),
        (SchemaType.Date, struct.pack(">q", 86_400_000), datetime(1970, 1, 2, tzinfo=UTC)),
        (SchemaType.Time, struct.pack(">q", 1), datetime(1970, 1, 1, microsecond=1000, tzinfo=UTC)),
        (
            SchemaType.Timestamp,
            struct.pack(">q", -1),
            datetime(1969, 12, 31, 23, 59, 59, 999000, tzinfo=UTC),
        ),
        (
            SchemaType.Instant,
            struct.pack(">qi", 1, 5000),
            datetime(1970, 1, 1, 0, 0, 1, 5, tzinfo=UTC),
        ),
        (SchemaType.LocalDate, struct.pack(">q", -1), date(1969, 12, 31)),
        (SchemaType.LocalTime, struct.pack(">q", 123_456_789), 123_456_789),
        (SchemaType.LocalDateTime, struct.pack(">qq", 1, 60 * 10**9), datetime(1970, 1, 2, 0, 1)),
        (SchemaType.NoSchema, b"\xff\0", b"\xff\0"),
        (SchemaType.Protobuf, b"\x08\x01", b"\x08\x01"),
    ],
)
def test_every_primitive_is_read_and_null_stays_null(kind: int, payload: bytes, value: Any) -> None:
    assert read(ValueSchema(kind), [payload, None, payload]) == ([value, None, value], {})


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (SchemaType.String, b"\xff"),
        (SchemaType.Bool, b""),
        (SchemaType.Int8, b"\0\0"),
        (SchemaType.Int64, b"\0" * 7),
        (SchemaType.Double, b""),
        (SchemaType.Timestamp, struct.pack(">q", 2**62)),
        (SchemaType.Instant, struct.pack(">qi", 2**62, 0)),
        (SchemaType.LocalDate, struct.pack(">q", 2**40)),
        (SchemaType.LocalDateTime, struct.pack(">qq", -(2**62), 0)),
        *[
            (kind, LEAST)
            for kind in (
                SchemaType.Date,
                SchemaType.Time,
                SchemaType.Timestamp,
                SchemaType.LocalDate,
            )
        ],
        (SchemaType.Instant, LEAST + bytes(4)),
        (SchemaType.LocalDateTime, LEAST + bytes(8)),
        (SchemaType.Instant, struct.pack(">qi", 0, 10**9)),
        (SchemaType.LocalDateTime, struct.pack(">qq", 0, -1)),
        (SchemaType.LocalDateTime, struct.pack(">qq", 0, 86_400 * 10**9)),
    ],
)
def test_a_bad_primitive_spoils_nothing_beside_it(kind: int, payload: bytes) -> None:
    good: dict[int, bytes] = {
        SchemaType.String: b"x",
        SchemaType.Bool: b"\1",
        SchemaType.Int8: b"\1",
        SchemaType.Instant: b"\0" * 12,
        SchemaType.LocalDateTime: b"\0" * 16,
    }
    values, bad = read(ValueSchema(kind), [good.get(kind, b"\0" * 8), payload, None])
    assert list(bad) == [1]
    assert values[0] is not None
    assert values[1:] == [None, None]


def test_avro_records_with_every_type_become_structs() -> None:
    schema = avro(
        field("i", "int"),
        field("l", "long"),
        field("f", "float"),
        field("d", "double"),
        field("b", "boolean"),
        field("s", ["null", "string"], default=None),
        field("raw", "bytes"),
        field("color", {"type": "enum", "name": "Color", "symbols": ["RED", "BLUE"]}),
        field(
            "list",
            {
                "type": "array",
                "items": {"type": "record", "name": "Inner", "fields": [field("x", "int")]},
            },
        ),
        field("again", "Inner"),
        field("map", {"type": "map", "values": "long"}),
        field("at", {"type": "long", "logicalType": "timestamp-millis"}),
        field("at_us", {"type": "long", "logicalType": "timestamp-micros"}),
        field("local", {"type": "long", "logicalType": "local-timestamp-millis"}),
        field("day", {"type": "int", "logicalType": "date"}),
        field("price", {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}),
        field("id", {"type": "string", "logicalType": "uuid"}),
        field("wide", ["int", "long"]),
        field("mac", {"type": "fixed", "name": "Mac", "size": 2}),
    )
    value = {
        "i": 1, "l": 2**40, "f": 0.5, "d": 0.25, "b": True, "s": None, "raw": b"\xff", "color": "BLUE",
        "list": [{"x": 1}, {"x": 2}], "again": {"x": 3}, "map": {"a": 1},
        "at": datetime(2026, 5, 1, 9, tzinfo=UTC), "at_us": datetime(2026, 5, 1, 9, 0, 0, 7, tzinfo=UTC),
        "local": datetime(2026, 5, 1, 9), "day": date(2026, 5, 1), "price": Decimal("12.34"),
        "id": "5f3b", "wide": 2**40, "mac": b"ab",
    }  # fmt: skip
    payload = written(
        ValueSchema(SchemaType.Avro, schema.definition.replace(b'"uuid"', b'"none"')), value
    )
    values, bad = read(schema, [payload, None])
    assert bad == {}
    assert values == [{**value, "map": [("a", 1)]}, None]


DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 3}


def test_decimals_are_read_to_their_last_digit_however_they_are_padded() -> None:
    numbers = [0, 1, -1, 127, 128, -128, -129, 10**38 - 1, -(10**38) + 1]
    payloads = []
    for number in numbers:
        for size in (number.bit_length() // 8 + 1, 17, 40, 4_000_000 if number == -129 else 20):
            data = number.to_bytes(size, "big", signed=True)
            payloads.append(written(avro(field("d", "bytes")), {"d": data}))
    values, bad = read(avro(field("d", DECIMAL)), payloads)
    assert bad == {}
    expected = [int(f"{number}") for number in numbers for _ in range(4)]
    assert [int(value["d"].scaleb(3, Context(prec=50))) for value in values] == expected


def test_a_decimal_of_too_many_digits_is_bad_whatever_its_size() -> None:
    small = avro(field("d", {**DECIMAL, "precision": 4}))
    payloads = [
        written(avro(field("d", "bytes")), {"d": data})
        for data in (b"\x27\x0f", b"\x27\x10", b"\x7f" * 4_000_000)
    ]
    values, bad = read(small, payloads)
    assert values == [{"d": Decimal("9.999")}, None, None]
    assert bad[1] == "ValueError: the decimal 10000 has more than 4 digits"
    assert bad[2] == "ValueError: a decimal has 4000000 bytes, more than 4 digits take"


def test_avro_evolves_by_its_own_rules() -> None:
    old = avro(field("a", "int"), field("gone", "string"))
    new = avro(
        field("a", "long"),
        field("added", "string", default="none"),
        field("maybe", ["null", "int"], default=None),
    )
    assert read(new, [written(old, {"a": 1, "gone": "x"})], old) == (
        [{"a": 1, "added": "none", "maybe": None}],
        {},
    )
    assert read(old, [written(old, {"a": 1, "gone": "x"})]) == ([{"a": 1, "gone": "x"}], {})


def test_an_avro_value_ends_where_its_bytes_end() -> None:
    schema = avro(field("a", "string"), field("b", "int"))
    good = written(schema, {"a": "hello", "b": 1})
    values, bad = read(schema, [good, good[:-1], good + b"\0", b"", b"\x80" * 20, b"\x09xx", good])
    assert sorted(bad) == [1, 2, 3, 4, 5]
    assert [row for row, value in enumerate(values) if value is not None] == [0, 6]


def test_a_schema_that_is_refused_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []

    def judge(schema: ValueSchema) -> pa.DataType:
        judged.append(schema)
        return record_type(schema)

    monkeypatch.setattr(values_module, "_column_type", judge)
    schema = ValueSchema(SchemaType.Avro, b'["int", "string", "refused once"]')
    for _ in range(3):
        with pytest.raises(SetupError, match="union of 3 types"):
            column_type(schema)
    assert judged == [schema]


def test_fields_that_share_an_enumeration_look_at_its_symbols_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sized, size = [], avro_weights._size

    def measure(value: Any) -> int:
        sized.append(value)
        return size(value)

    monkeypatch.setattr(avro_weights, "_size", measure)
    symbols = [f"S{number}" for number in range(2000)]
    fields = [field("f0", {"type": "enum", "name": "E", "symbols": symbols})]
    schema = avro(*fields, *(field(f"f{number}", "E") for number in range(1, 400)))
    value = {f"f{number}": symbols[-number - 1] for number in range(400)}
    payload = written(schema, value)
    assert read(schema, [payload]) == ([value], {})
    # For the weights, and to judge the values.
    assert len(sized) < 3 * len(symbols)


def test_a_schema_cannot_give_the_library_that_reads_it_hints_of_its_own() -> None:
    inner = {"type": "record", "name": "I", "fields": [{"name": "x", "type": "int"}]}
    definition = {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": "a", "type": inner},
            {"name": "m", "type": {"type": "map", "values": "int"}},
            {"name": "b", "type": "I"},
        ],
    }
    hints = {
        "__fastavro_parsed": True,
        "__named_schemas": {"I": {"type": "array", "items": "null"}},
    }
    plain, hinted = (
        ValueSchema(SchemaType.Avro, json.dumps(content).encode())
        for content in (definition, definition | hints)
    )
    payload = written(plain, {"a": {"x": 1}, "m": {}, "b": {"x": 5_000_000}})
    assert read(hinted, [payload]) == read(plain, [payload])


@pytest.mark.parametrize(
    ("definition", "why"),
    [
        (b"{", "not JSON"),
        (b'{"type": "object"}', "'object'"),
        (b'["int", "string"]', "union of 2 types"),
        (
            b'{"type":"record","name":"N","fields":[{"name":"n","type":["null","N"]}]}',
            "holds itself",
        ),
        (b'{"type":"array","items":{"type":"record","name":"E","fields":[]}}', "without bytes"),
        (b'{"type":"array","items":{"type":"fixed","name":"F","size":0}}', "without bytes"),
        (
            b'{"type":"array","items":{"type":"record","name":"A","fields":[{"name":"b","type":'
            b'{"type":"record","name":"B","fields":[{"name":"c","type":{"type":"record","name":"C","fields":[]}}]}}]}}',
            "without bytes",
        ),
        (
            b'{"type":"array","items":{"type":"record","name":"A","fields":[{"name":"f","type":'
            b'{"type":"fixed","name":"F","size":0}}]}}',
            "without bytes",
        ),
        (
            b'{"type":"record","name":"R","fields":[{"name":"e","type":{"type":"fixed","name":"n.E","size":0}},'
            b'{"name":"l","type":{"type":"array","items":{"type":"record","name":"A","fields":[{"name":"e","type":"n.E"}]}}}]}',
            "without bytes",
        ),
        *(
            (
                b'{"type":"%s","%s":{"type":"record","name":"A","fields":[{"name":"b","type":"boolean"},{"name":"f0","type":'
                b'{"type":"fixed","name":"F","size":0}}%s]}}'
                % (
                    kind,
                    items,
                    b"".join(b',{"name":"f%d","type":["F"]}' % number for number in range(1, 9)),
                ),
                "items with 9 parts without bytes, more than 8",
            )
            for kind, items in ((b"array", b"items"), (b"map", b"values"))
        ),
        (b'{"type":"array","items":"null"}', "'null'"),
        (b'{"type":"array","items":' * 40 + b'"int"' + b"}" * 40, "in 40 levels of 32"),
        (b'{"type":' * 5000 + b'"int"' + b"}" * 5000, "recursion"),
    ],
)
def test_what_no_column_can_hold_is_refused_with_the_reason(definition: bytes, why: str) -> None:
    with pytest.raises(SetupError, match=why):
        column_type(ValueSchema(SchemaType.Avro, definition))


def test_an_array_of_records_with_any_bytes_has_a_column() -> None:
    empty = b'{"name":"e","type":{"type":"record","name":"E","fields":[]}}'
    definition = (
        b'{"type":"array","items":{"type":"record","name":"A","fields":[%s,{"name":"i","type":"int"}]}}'
        % empty
    )
    assert pa.types.is_list(column_type(ValueSchema(SchemaType.Avro, definition)))


JSON = as_json(
    avro(
        field("a", "int"),
        field("s", ["null", "string"]),
        field("d", "double"),
        field("l", {"type": "array", "items": "long"}),
        field("in", {"type": "record", "name": "I", "fields": [field("b", "boolean")]}),
    )
)


def test_json_is_read_by_name_however_it_is_laid_out() -> None:
    values, bad = read(
        JSON,
        [
            b'{"a":1,"s":"x","d":2,"l":[1,2],"in":{"b":true},"more":[{}]}',
            None,
            b'\n{\n "s": null }\n',
            b"{}",
            b"null",
        ],
    )
    nothing = dict.fromkeys(("a", "s", "d", "l", "in"))
    assert bad == {}
    assert values == [
        {"a": 1, "s": "x", "d": 2.0, "l": [1, 2], "in": {"b": True}},
        None,
        nothing,
        nothing,
        None,
    ]


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"x", b"[]", b"1", b'{"a":1.5}', b'{"a":"1"}', b'{"a":true}', b'{"a":99999999999}', b'{"a":1}{"a":2}',
        b'{"a":1} x', b'{"l":1}', b'{"l":["x"]}', b'{"in":1}', b'{"d":"1"}', b'{"s":"\xff"}', b'{"s":"\\ud800"}',
        b'{"s":"}', b'{"in":{"b":1}}', b"[" * 100_000, b'{"a":' + b"1" * 6000 + b"}",
    ],
)  # fmt: skip
def test_bad_json_spoils_nothing_beside_it(payload: bytes) -> None:
    values, bad = read(JSON, [b'{"a":1}', payload, b'{"a":2}'])
    assert list(bad) == [1]
    assert [None if value is None else value["a"] for value in values] == [1, None, 2]


def test_values_cannot_borrow_from_each_other() -> None:
    values, bad = read(JSON, [b'{"s":"}', b'{"}', b"{}{}"])
    assert sorted(bad) == [0, 1, 2]
    assert values == [None] * 3


def test_times_maps_enums_and_bytes_in_json() -> None:
    schema = as_json(
        avro(
            field("at", {"type": "long", "logicalType": "timestamp-millis"}),
            field("m", {"type": "map", "values": "int"}),
            field("e", {"type": "enum", "name": "E", "symbols": ["X"]}),
            field("raw", "bytes"),
        )
    )
    values, bad = read(
        schema, [b'{"at":1000,"m":{"k":1},"e":"X","raw":"/w=="}', b'{"at":"x"}', b'{"e":7}']
    )
    assert list(bad) == [1]
    assert values[0] == {
        "at": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
        "m": [("k", 1)],
        "e": "X",
        "raw": "/w==",
    }
    assert values[2]["e"] == "7"


_SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
)
_VALUES = st.recursive(
    _SCALARS,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from("asdlinb"), part),
)


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["a", "s", "d", "l", "in", "z"]), _VALUES) | _VALUES,
        max_size=6,
    )
)
def test_a_batch_of_json_reads_as_its_values_do_one_by_one(rows: list[Any]) -> None:
    payloads = [json.dumps(row).encode() for row in rows]
    together = read(JSON, list(payloads))
    alone = [read(JSON, [b"[]", payload]) for payload in payloads]
    assert repr(together[0]) == repr([values[1] for values, _ in alone])
    assert set(together[1]) == {row for row, (_, bad) in enumerate(alone) if 1 in bad}


_NUMBERS = st.from_regex(
    r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,4})?", fullmatch=True
)


@given(st.lists(_NUMBERS, min_size=1, max_size=5))
def test_a_number_of_json_in_a_column_of_texts_keeps_its_digits(numbers: list[str]) -> None:
    parts = [{"type": "array", "items": "string"}, {"type": "map", "values": "string"}]
    schema = as_json(avro(field("a", "string"), field("l", parts[0]), field("m", parts[1])))
    payloads: list[bytes | None] = [
        f'{{"a":{one},"l":[{one},"x"],"m":{{"k":{one}}}}}'.encode() for one in numbers
    ]
    values, bad = read(schema, payloads)
    assert (values, bad) == (
        [{"a": one, "l": [one, "x"], "m": [("k", one)]} for one in numbers],
        {},
    )


def test_plain_json_takes_the_way_of_whole_batches() -> None:
    physical = column_type(JSON)
    assert (
        records._parse_together(pa.array([b'{"a":1}', None, b'{"a":2}'], pa.binary()), physical)
        is not None
    )
    assert records._parse_together(pa.array([b'{"a":1}', b"{}{}"], pa.binary()), physical) is None


def key_value(
    key: ValueSchema, value: ValueSchema, encoding: str, names: tuple[str, str]
) -> ValueSchema:
    definition = b"".join(
        struct.pack(">i", len(part.definition)) + part.definition for part in (key, value)
    )
    properties = {
        "key.schema.type": names[0],
        "value.schema.type": names[1],
        "kv.encoding.type": encoding,
    }
    return ValueSchema(SchemaType.KeyAndValue, definition, tuple(sorted(properties.items())))


def test_key_and_value_in_one_payload() -> None:
    value = avro(field("a", "int"))
    schema = key_value(ValueSchema(SchemaType.String), value, "INLINE", ("STRING", "AVRO"))
    encoded = written(value, {"a": 5})
    both = struct.pack(">i", 1) + b"k" + struct.pack(">i", len(encoded)) + encoded
    no_value = struct.pack(">i", 1) + b"k" + struct.pack(">i", -1)
    values, bad = read(
        schema, [both, None, no_value, both[:-1], both + b"x", b"", struct.pack(">i", 2**31 - 1)]
    )
    assert values[:3] == [{"key": "k", "value": {"a": 5}}, None, {"key": "k", "value": None}]
    assert sorted(bad) == [3, 4, 5, 6]


def test_a_separate_key_is_the_messages_own() -> None:
    schema = key_value(
        ValueSchema(SchemaType.Int32),
        ValueSchema(SchemaType.Bool),
        "SEPARATED",
        ("INT32", "BOOLEAN"),
    )
    values, bad = read(
        schema, [b"\1", b"\0", b"\1", b"xx"], keys=[b"\0\0\0\7", b"x", None, b"\0\0\0\7"]
    )
    assert values == [{"key": 7, "value": True}, None, {"key": None, "value": True}, None]
    assert sorted(bad) == [1, 3]


def test_a_damaged_key_value_schema_is_refused() -> None:
    with pytest.raises(SetupError, match="two parts"):
        column_type(ValueSchema(SchemaType.KeyAndValue, b"\0\0\0\5x"))
    with pytest.raises(SetupError, match="unknown kind 'COLOR'"):
        column_type(
            key_value(
                ValueSchema(SchemaType.String),
                ValueSchema(SchemaType.String),
                "INLINE",
                ("COLOR", "STRING"),
            )
        )


def test_kinds_do_not_mix() -> None:
    with pytest.raises(SetupError, match="kind Int32 is none of kind String"):
        decoder(ValueSchema(SchemaType.Int32), ValueSchema(SchemaType.String))


def test_whatever_was_written_can_be_read_as_bytes() -> None:
    assert read(ValueSchema(), [b"\0\0\0\1", None], writer=ValueSchema(SchemaType.Int32)) == (
        [b"\0\0\0\1", None],
        {},
    )


def test_protobuf_is_read_by_its_descriptor() -> None:
    item = b"\x0a\x01s\x10\x03"
    payload = (
        b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"
        + b"\x12\x05"
        + item
        + b"\x18\x01\x22\x01\xff"
        + b"\x32\x05\x08\x07\x12\x01t"
    )
    values, bad = read(protobuf("shop.Order"), [payload, b"", b"\x18\x09", b"\xff", None])
    assert values[0] == {
        "id": Decimal(2**64 - 1),
        "items": [{"sku": "s", "count": 3}],
        "color": "BLUE",
        "raw": b"\xff",
        "first": None,
        "tags": [("7", "t")],
    }
    assert values[1]["color"] == "RED"
    assert values[2]["color"] == "9"
    assert list(bad) == [3]


@pytest.mark.parametrize("syntax", ["proto2", "proto3"])
@pytest.mark.parametrize("name", dir(descriptor_pb2.FieldDescriptorProto))
def test_a_protobuf_field_may_be_called_as_anything_of_pythons_class(
    name: str, syntax: str
) -> None:
    file = descriptor_pb2.FileDescriptorProto(name="n.proto", package="n", syntax=syntax)
    kind = file.enum_type.add(name="E")
    kind.value.add(name="NONE", number=0)
    root = file.message_type.add(name="R")
    inner = root.nested_type.add(name="I")
    # A type of a message is an attribute of its class too.
    inner.nested_type.add(name=name)
    inner.field.add(name="x", number=1, label=1, type=14, type_name=".n.E")
    root.field.add(name=name, number=1, label=1, type=9)
    root.field.add(name="i", number=2, label=1, type=11, type_name=".n.R.I")
    packed = base64.b64encode(
        descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    ).decode()
    definition = json.dumps({"fileDescriptorSet": packed, "rootMessageTypeName": "n.R"}).encode()
    schema = ValueSchema(SchemaType.ProtobufNative, definition)
    values, bad = read(schema, [b"\x0a\x01v\x12\x02\x08\x05", b""])
    assert values[0] == {name: "v", "i": {"x": "5"}}
    assert values[1] == {name: None if syntax == "proto2" else "", "i": None}
    assert not bad


def test_a_protobuf_schema_that_is_damaged_or_endless_is_refused() -> None:
    with pytest.raises(SetupError, match="descriptor is damaged"):
        column_type(ValueSchema(SchemaType.ProtobufNative, b"{}"))
    with pytest.raises(SetupError, match="descriptor is damaged"):
        column_type(protobuf("shop.None"))
    with pytest.raises(SetupError, match=r"shop\.Node of a schema holds itself"):
        column_type(protobuf("shop.Node"))


def test_a_long_time_is_not_cut() -> None:
    schema = avro(field("at", {"type": "long", "logicalType": "timestamp-millis"}))
    late = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=365_000 * 5)
    values, bad = read(schema, [written(schema, {"at": late}), written(schema, {"at": 2**62})])
    assert values[0] == {"at": late}
    assert list(bad) == [1]


NO_SCHEMAS = {
    "a field that is a list": '{"type": "record", "fields": [[]]}',
    "a field without a name": '{"type": "record", "fields": [{"type": "int"}]}',
    "a number of fields": '{"type": "record", "fields": 5}',
    "a number": "1.5",
    "a type that is half of a surrogate pair": r'{"type": "\ud800"}',
    "a type with a line end": r'{"type": "x\nledgerlake: all is well"}',
    "a name that is not UTF-8": r'{"type": "fixed", "name": "\udfff", "size": "\ud800"}',
    "a long type": f'{{"type": "{"x" * 100_000}"}}',
    "nested without end": "[" * 100_000,
}


@pytest.mark.parametrize("definition", NO_SCHEMAS.values(), ids=NO_SCHEMAS)
@pytest.mark.parametrize("kind", [SchemaType.Avro, SchemaType.Json, SchemaType.ProtobufNative])
def test_a_schema_that_is_none_is_one_sentence(kind: int, definition: str) -> None:
    schema = ValueSchema(kind, definition.encode())
    with pytest.raises(SetupError) as refused:
        decoder(schema, schema)
    said = refused.value.message
    assert said.isprintable()
    assert said.startswith("a schema")
    assert len(said) < 4000


@pytest.mark.parametrize("kind", [SchemaType.Avro, SchemaType.ProtobufNative])
def test_a_symbol_that_is_an_object_is_no_schema(kind: int) -> None:
    schema = ValueSchema(kind, b'{"type": "enum", "name": "e", "symbols": [{}]}')
    with pytest.raises(SetupError):
        decoder(schema, schema)


def test_a_part_of_a_key_value_schema_with_damaged_properties_is_one_sentence() -> None:
    definition = (0).to_bytes(4, "big") * 2
    properties = {
        "key.schema.type": "STRING",
        "value.schema.type": "STRING",
        "key.schema.properties": "{",
    }
    with pytest.raises(SetupError, match="damaged"):
        column_type(
            ValueSchema(SchemaType.KeyAndValue, definition, tuple(sorted(properties.items())))
        )


def doubled(levels: int) -> str:
    """A record of two records of two records of two, which is that many columns and few
    characters.
    """
    node: dict[str, Any] = {
        "type": "record",
        "name": "r0",
        "fields": [{"name": "a", "type": "int"}],
    }
    for level in range(1, levels):
        fields = [{"name": "a", "type": node}, {"name": "b", "type": f"r{level - 1}"}]
        node = {"type": "record", "name": f"r{level}", "fields": fields}
    return json.dumps(node)


@pytest.mark.parametrize("kind", [SchemaType.Avro, SchemaType.Json])
def test_a_schema_of_more_columns_than_can_be_is_refused(kind: int) -> None:
    assert column_type(ValueSchema(kind, doubled(10).encode())).num_fields == 2
    with pytest.raises(SetupError, match="more than 10000 columns"):
        column_type(ValueSchema(kind, doubled(40).encode()))


def test_a_protobuf_schema_of_more_columns_than_can_be_is_refused() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="wide.proto", package="w", syntax="proto3")
    for level in range(40):
        message = file.message_type.add(name=f"M{level}")
        for number in (1, 2):
            kind: dict[str, Any] = (
                {"type": 5} if level == 0 else {"type": 11, "type_name": f".w.M{level - 1}"}
            )
            message.field.add(name=f"f{number}", number=number, label=1, **kind)
    packed = base64.b64encode(
        descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    ).decode()
    for root, fits in (("w.M5", True), ("w.M39", False)):
        definition = json.dumps({"fileDescriptorSet": packed, "rootMessageTypeName": root}).encode()
        if fits:
            assert column_type(ValueSchema(SchemaType.ProtobufNative, definition)).num_fields == 2
            continue
        with pytest.raises(SetupError, match="more than 10000 columns"):
            column_type(ValueSchema(SchemaType.ProtobufNative, definition))


_JSON_NUMBERS = st.one_of(
    st.integers(-(10**40), 10**40).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(
        ["1e39", "1e400", "-1e400", "3.4028235677973366e38", "1.00000017881393432617187499"]
    ),
)
_JSON_VALUES = st.builds(
    lambda before, number, other, after: (
        f'{before}{{"f": {number}, "d": {other}, "s": "x"}}{after}'.encode()
    ),
    st.sampled_from(["", " ", "\n\t", "\u00a0", "\u2028", "\v"]),
    _JSON_NUMBERS,
    _JSON_NUMBERS,
    st.sampled_from(["", "\r ", "\u00a0", "\u2029"]),
)


@given(_JSON_VALUES)
def test_json_is_read_alike_alone_and_beside_a_value_that_does_not_fit(payload: bytes) -> None:
    schema = as_json(avro(field("f", "float"), field("d", "double"), field("s", "string")))
    alone, bad_alone = read(schema, [payload])
    beside, bad_beside = read(schema, [payload, b"[]"])
    assert (alone[0], 0 in bad_alone) == (beside[0], 0 in bad_beside)
    if 0 not in bad_alone:
        assert all(math.isfinite(alone[0][name]) for name in ("f", "d"))


_JSON_WORDS = [
    "Inf",
    "-Inf",
    "Infinity",
    "-Infinity",
    "NaN",
    "-NaN",
    "inf",
    "nan",
    "Infi",
    "--NaN",
    "-",
    "true",
    "True",
]
_JSON_PIECES = [*_JSON_WORDS, '"Inf"', r'"\"-NaN', r'"\ud800"', "01", "1.", *'"\\1[]{}:,\0']


@given(
    st.sampled_from([*_JSON_WORDS, "1", "null"]),
    st.sampled_from(["0", "0", "[", "{"]).flatmap(
        lambda first: st.lists(st.sampled_from(_JSON_PIECES), max_size=5).map(
            lambda more: "".join([first, *more])
        )
    ),
    st.sampled_from(_JSON_WORDS),
)
def test_whatever_stands_where_the_schema_has_no_field_is_read_alike_alone_and_beside_others(
    number: str, more: str, word: str
) -> None:
    schema = as_json(avro(field("d", "double"), field("i", "int"), field("s", "string")))
    for payload in (
        f'{{"d": {number}, "more": {more}}}',
        f'{{"more": [{word}, "Inf -NaN"], "{number}": {word}}}',
    ):
        alone, bad_alone = read(schema, [payload.encode()])
        beside, bad_beside = read(schema, [payload.encode(), b"[]"])
        assert (str(alone[0]), 0 in bad_alone) == (str(beside[0]), 0 in bad_beside)


def test_words_for_numbers_that_are_none_are_read_outside_of_texts_alone() -> None:
    schema = as_json(avro(field("d", "double"), field("s", "string")))
    payload = rb'{"s": "\"Inf -NaN\\", "d": -Inf, "more": -NaN, "Inf": [Inf,Infinity]}'
    assert read(schema, [payload]) == ([{"d": -math.inf, "s": '"Inf -NaN\\'}], {})
    values, bad = read(
        schema,
        [b'{"d": Infin}', b'{"d": --NaN}', b'{"d": 1Inf}', b'{"s": "' + b'\\"' * 100_000 + b" Inf"],
    )
    assert (values, len(bad)) == ([None] * 4, 4)


@pytest.mark.parametrize(
    ("levels", "is_read"), [(400, True), (499, True), (500, False), (100_000, False)]
)
@pytest.mark.parametrize("is_closed", [True, False])
def test_the_depth_of_json_counts_alike_alone_and_beside_others(
    levels: int, is_read: bool, is_closed: bool
) -> None:
    schema = as_json(avro(field("a", "int")))
    payload = (
        b'{"a": 1, "text": "[[[\\"[[[", "other": '
        + b"[" * levels
        + b"]" * (levels if is_closed else 0)
        + b"}"
    )
    alone, bad_alone = read(schema, [payload, None])
    beside, bad_beside = read(schema, [payload, b"[]"])
    expected = {"a": 1} if is_read and is_closed else None
    assert (alone[0], beside[0]) == (expected, expected)
    assert (0 in bad_alone, 0 in bad_beside) == (expected is None, expected is None)


_INNER = {"type": "record", "name": "In", "fields": [{"name": "x", "type": "int", "default": 7}]}


@pytest.mark.parametrize(
    ("of_field", "default", "expected"),
    [
        ("bytes", "\u00ff\u0001", b"\xff\x01"),
        ({"type": "fixed", "name": "F", "size": 2}, "\u00ff\u0001", b"\xff\x01"),
        (DECIMAL, "\u0003\u00e8", Decimal("1.000")),
        (["null", DECIMAL], None, None),
        ([DECIMAL, "null"], "\u0001", Decimal("0.001")),
        (_INNER, {}, {"x": 7}),
        ({"type": "array", "items": _INNER}, [{}, {"x": 1}], [{"x": 7}, {"x": 1}]),
        ({"type": "map", "values": "bytes"}, {"k": "\u00ff"}, [("k", b"\xff")]),
        ("double", 1, 1.0),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "B"),
    ],
)
def test_a_new_field_of_any_type_has_its_default_in_older_values(
    of_field: Any, default: Any, expected: Any
) -> None:
    old = avro(field("a", "int"))
    new = avro(field("a", "int"), {"name": "b", "type": of_field, "default": default})
    assert read(new, [written(old, {"a": 1})], old) == ([{"a": 1, "b": expected}], {})


def of_times(logical: str, place: str, *more: dict[str, Any]) -> ValueSchema:
    """A schema with a time in a field, an array, a map or a record."""
    kind = {"type": "int" if logical in ("date", "time-millis") else "long", "logicalType": logical}
    kinds: dict[str, Any] = {
        "field": ["null", kind],
        "array": {"type": "array", "items": kind},
        "map": {"type": "map", "values": kind},
        "record": {
            "type": "record",
            "name": f"of.{logical[0]}.In",
            "fields": [{"name": "x", "type": kind}],
        },
    }
    return avro(field("t", kinds[place]), *more)


@pytest.mark.parametrize(
    "more", [[], [field("n", ["null", "int"], default=None)]], ids=["one shape", "more fields"]
)
@pytest.mark.parametrize("place", ["field", "array", "map", "record"])
@pytest.mark.parametrize("as_kind", [lambda schema: schema, as_json], ids=["Avro", "JSON"])
@pytest.mark.parametrize(
    ("theirs", "ours", "fits"),
    [
        ("timestamp-millis", "timestamp-micros", True),
        ("timestamp-micros", "timestamp-millis", True),
        ("local-timestamp-millis", "local-timestamp-micros", True),
        ("timestamp-millis", "local-timestamp-millis", False),
        ("timestamp-millis", "timestamp-nanos", False),
        ("date", "timestamp-millis", False),
        ("time-millis", "time-micros", False),
    ],
)
def test_a_time_is_read_in_the_unit_that_wrote_it_or_does_not_fit(
    theirs: str, ours: str, fits: bool, as_kind: Any, place: str, more: list[dict[str, Any]]
) -> None:
    writer, reader = as_kind(of_times(theirs, place)), as_kind(of_times(ours, place, *more))
    number = 1_700_000_000_123_456 if theirs.endswith("micros") else 1_700_000_000_123
    number = number if theirs.endswith(("timestamp-millis", "timestamp-micros")) else 19_000
    inside = {"field": number, "array": [number], "map": {"k": number}, "record": {"x": number}}[
        place
    ]
    is_json = writer.kind == SchemaType.Json
    payload = json.dumps({"t": inside}).encode() if is_json else written(writer, {"t": inside})
    rows, bad = read(reader, [payload, None], writer)
    assert (list(bad), rows[1]) == ([] if fits else [0], None)
    if fits:
        moment = datetime(
            2023, 11, 14, 22, 13, 20, 123_456 if theirs.endswith("micros") else 123_000, tzinfo=UTC
        )
        moment = moment.replace(tzinfo=None) if theirs.startswith("local") else moment
        expected = {
            "field": moment,
            "array": [moment],
            "map": [("k", moment)],
            "record": {"x": moment},
        }[place]
        assert rows[0]["t"] == expected


_NO_DEFAULTS = {
    "type": "record",
    "name": "In",
    "fields": [{"name": "x", "type": "int", "default": None}],
}
_LETTERS = {"type": "enum", "name": "E", "symbols": ["A", "B"], "default": "Z"}


@pytest.mark.parametrize(
    ("of_field", "default", "encoded", "value"),
    [
        ("string", None, b"\x02x", "x"),
        ("int", "1", b"\x02", 1),
        ("double", [], b"\0" * 8, 0.0),
        ("bytes", "\u20ac", b"\x02x", b"x"),
        (DECIMAL, "\u0001" * 17, b"\x02\x01", Decimal("0.001")),
        (["null", "string"], 1, b"\x02\x02x", "x"),
        (_LETTERS, "C", b"\x02", "B"),
        (_NO_DEFAULTS, {}, b"\x02", {"x": 1}),
        ({"type": "array", "items": _INNER}, [{"x": "1"}], b"\x02\x02\0", [{"x": 1}]),
        ({"type": "map", "values": "long"}, {"k": None}, b"\x02\x02k\x02\0", [("k", 1)]),
    ],
)
def test_a_default_that_is_no_value_of_its_type_counts_as_none(
    of_field: Any, default: Any, encoded: bytes, value: Any
) -> None:
    old = avro(field("a", "int"))
    new = avro(field("a", "int"), {"name": "b", "type": of_field, "default": default})
    assert read(new, [b"\x02" + encoded]) == ([{"a": 1, "b": value}], {})
    assert read(new, [b"\x02"], old) == (
        [None],
        {0: "SchemaResolutionError: No default value for field b in R"},
    )


def test_a_schema_whose_defaults_stand_for_more_than_they_say_is_refused() -> None:
    kind: dict[str, Any] = {
        "type": "record",
        "name": "R0",
        "fields": [{"name": "a", "type": "int", "default": 0}],
    }
    for level in range(1, 9):
        of_field = {"name": "a", "type": {"type": "array", "items": kind}, "default": [{}] * 10}
        kind = {"type": "record", "name": f"R{level}", "fields": [of_field]}
    schema = ValueSchema(SchemaType.Avro, json.dumps(kind).encode())
    for read_schema in (column_type, lambda one: decoder(one, one)):
        with pytest.raises(
            SetupError, match="the defaults of a schema stand for more than 8388608 bytes"
        ):
            read_schema(schema)
