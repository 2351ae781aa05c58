"""Weights of values: the size that is counted before a value is decoded is the decoded size."""

from __future__ import annotations

import io
import json
import random
from typing import TYPE_CHECKING, Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from google.protobuf import message_factory

from ledgerlake.decode import weights
from ledgerlake.decode.columns import Encoded
from ledgerlake.decode.weights import PART_BYTES, RECORD_BYTES, cuts, fixed_bytes
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.values import protobufs
from ledgerlake.values.schemas import column_type, decoder
from ledgerlake.wire.limits import MAX_VALUES_BYTES
from ledgerlake.wire.value_schema import ValueSchema
from tests.decode.protobuf_schemas import protobuf
from tests.values.test_avro import random_value
from tests.values.test_schemas import key_value

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.fixture
def always_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_VALUES_BYTES", 0)


def weighed(
    schema: ValueSchema, payloads: Sequence[bytes | None], writer: ValueSchema | None = None
) -> list[int]:
    weigh = decoder(writer or schema, schema).weigh
    weights_of = weigh(Encoded(pa.array(payloads, pa.binary()))).tolist()
    bounds = [weigh.fixed_bytes + weigh.rate * len(payload or b"") for payload in payloads]
    assert all(weight <= bound for weight, bound in zip(weights_of, bounds, strict=True))
    return weights_of


def counted(kind: pa.DataType, value: Any) -> int:
    """The weight of a decoded value's items, counted another way."""
    if value is None:
        return 0
    if pa.types.is_struct(kind):
        return sum(counted(field.type, value[field.name]) for field in kind)
    if pa.types.is_map(kind):
        own = (PART_BYTES + fixed_bytes(kind.item_type)) * len(value)
        return own + sum(counted(kind.item_type, item) for _, item in value)
    if pa.types.is_list(kind):
        return fixed_bytes(kind.value_type) * len(value) + sum(
            counted(kind.value_type, item) for item in value
        )
    return 0


def weight_of(schema: ValueSchema, payload: bytes) -> int:
    kind = column_type(schema)
    decoded = decoder(schema, schema)(Encoded(pa.array([payload], pa.binary())))
    assert decoded.bad == {}
    return fixed_bytes(kind) + counted(kind, decoded.values.to_pylist()[0])


def avro(definition: Any) -> ValueSchema:
    return ValueSchema(pb.Schema.Avro, json.dumps(definition).encode())


def written(definition: Any, value: Any) -> bytes:
    encoded = io.BytesIO()
    fastavro.schemaless_writer(encoded, fastavro.parse_schema(definition), value)
    return encoded.getvalue()


def record(name: str, **types: Any) -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "fields": [{"name": key, "type": kind} for key, kind in types.items()],
    }


def array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def with_lists(rng: random.Random, depth: int, names: list[str]) -> Any:
    """A random type that may hold arrays and maps. No item has no bytes, and no symbol has text."""
    choice = rng.random()
    if depth > 3 or choice < 0.3:
        return rng.choice(
            ["int", "long", "string", "double", "boolean", "bytes", ["null", "float"]]
        )
    inner = with_lists(rng, depth + 1, names)
    if choice < 0.5:
        return array(inner)
    if choice < 0.7:
        return {"type": "map", "values": inner}
    if choice < 0.8 and not isinstance(inner, list):
        return rng.choice([["null", inner], [inner, "null"]])
    name = f"N{len(names)}"
    names.append(name)
    more = [with_lists(rng, depth + 1, names) for _ in range(rng.randint(0, 2))]
    return record(name, **{f"f{number}": kind for number, kind in enumerate([inner, *more])})


def a_value(rng: random.Random, node: Any) -> Any:
    if isinstance(node, list):
        branch = rng.choice(node)
        return None if branch == "null" else a_value(rng, branch)
    kind = node if isinstance(node, str) else node["type"]
    if kind == "array":
        return [a_value(rng, node["items"]) for _ in range(rng.randint(0, 3))]
    if kind == "map":
        return {f"k{number}": a_value(rng, node["values"]) for number in range(rng.randint(0, 3))}
    if kind == "record":
        return {field["name"]: a_value(rng, field["type"]) for field in node["fields"]}
    return random_value(rng, node)


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.usefixtures("always_walked")
def test_an_avro_value_weighs_what_is_decoded(seed: int) -> None:
    rng = random.Random(seed)
    names: list[str] = []
    definition = record("Root", value=with_lists(rng, 0, names), other=with_lists(rng, 0, names))
    schema = avro(definition)
    payloads = [written(definition, a_value(rng, definition)) for _ in range(4)]
    assert weighed(schema, payloads) == [weight_of(schema, payload) for payload in payloads]


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.usefixtures("always_walked")
def test_bytes_that_do_not_fit_an_avro_schema_have_the_bound_by_their_size(seed: int) -> None:
    rng = random.Random(seed)
    definition = record("Root", value=array(with_lists(rng, 0, [])))
    payloads = [written(definition, a_value(rng, definition)) for _ in range(4)]
    damaged = [
        payload[: rng.randrange(len(payload) + 1)] + rng.randbytes(rng.randrange(9))
        for payload in payloads
    ]
    assert all(
        weight >= 0 for weight in weighed(avro(definition), [*damaged, None, b"\x80" * 30, b""])
    )


@pytest.mark.usefixtures("always_walked")
def test_avro_blocks_and_named_types_are_walked() -> None:
    line = record("Line", quantity="int")
    definition = record("Order", first=line, lines=array("Line"))
    # Two blocks, the second with its size in bytes.
    payload = b"\x02" + b"\x04\x02\x04" + b"\x03\x04\x02\x04" + b"\x00"
    item = RECORD_BYTES + PART_BYTES
    assert weighed(avro(definition), [payload]) == [RECORD_BYTES + item + PART_BYTES + 4 * item]
    assert weight_of(avro(definition), payload) == RECORD_BYTES + item + PART_BYTES + 4 * item


@pytest.mark.usefixtures("always_walked")
def test_symbols_and_defaults_weigh_with_each_item_and_dropped_fields_do_not() -> None:
    symbols = {"type": "enum", "name": "E", "symbols": ["A" * 500, "B"]}
    assert weighed(avro(record("R", e=array(symbols))), [b"\x04\x00\x02\x00"]) == [
        RECORD_BYTES + PART_BYTES + 2 * (PART_BYTES + 500)
    ]
    writer = record("R", lines=array(record("L", a="int")), gone=array("int"))
    reader = record("R", lines=array(record("L", a="int")))
    reader["fields"][0]["type"]["items"]["fields"].append(
        {"name": "added", "type": "string", "default": "x" * 300}
    )
    payload = b"\x04\x02\x04\x00" + b"\x06\x02\x02\x02\x00"
    item = RECORD_BYTES + 2 * PART_BYTES + 300
    assert weighed(avro(reader), [payload], avro(writer)) == [RECORD_BYTES + PART_BYTES + 2 * item]


def reader_of(definition: Any, **added: Any) -> dict[str, Any]:
    """A record with more fields, each with its default."""
    fields = [
        {"name": name, "type": kind, "default": default} for name, (kind, default) in added.items()
    ]
    return {**definition, "fields": [*definition["fields"], *fields]}


_ITEM = reader_of(
    record("Item"), a=("long", 0), t=("string", "x" * 100), b=("bytes", "\u00ff" * 50)
)

_DEFAULTS = {
    "records": (array(_ITEM), [{}] * 9, 9 * (RECORD_BYTES + 3 * PART_BYTES + 150)),
    "nulls of wide records": (
        array(["null", _ITEM]),
        [None] * 9,
        9 * (RECORD_BYTES + 3 * PART_BYTES),
    ),
    "maps": ({"type": "map", "values": "string"}, {"k": "x" * 70}, 2 * PART_BYTES + 71),
    "texts": ("string", "\u20ac" * 100, 300),
}


@pytest.mark.parametrize("name", _DEFAULTS)
@pytest.mark.usefixtures("always_walked")
def test_a_default_weighs_what_it_becomes_with_each_item_that_has_it(name: str) -> None:
    kind, default, more = _DEFAULTS[name]
    writer, line = (
        record("R", lines=array(record("L", a="int"))),
        reader_of(record("L", a="int"), d=(kind, default)),
    )
    (weight,) = weighed(avro(record("R", lines=array(line))), [b"\x04\x02\x04\x00"], avro(writer))
    assert weight == RECORD_BYTES + PART_BYTES + 2 * (RECORD_BYTES + 2 * PART_BYTES + more)


@pytest.mark.usefixtures("always_walked")
def test_a_symbol_that_the_reader_lacks_weighs_as_much_as_its_default() -> None:
    symbols = [{"type": "enum", "name": "E", "symbols": ["B"]}]
    symbols += [{"type": "enum", "name": "E", "symbols": ["A" * 900], "default": "A" * 900}]
    writer, reader = (record("R", e=array(one)) for one in symbols)
    assert weighed(avro(reader), [b"\x04\x00\x00\x00"], avro(writer)) == [
        RECORD_BYTES + PART_BYTES + 2 * (PART_BYTES + 900)
    ]


@pytest.mark.usefixtures("always_walked")
def test_a_named_type_weighs_as_much_wherever_the_two_schemas_define_it() -> None:
    line = record("L", a="int", b="int")
    writer, reader = (
        record("R", first=array(line), second=array("L")),
        record("R", second=array(line), first="L"),
    )
    reader["fields"][1]["type"] = array("L")
    payload = b"\x02\x02\x02\x00" * 2
    item = RECORD_BYTES + 2 * PART_BYTES
    assert weighed(avro(reader), [payload], avro(writer)) == [
        RECORD_BYTES + 2 * (PART_BYTES + item)
    ]


def test_weights_beyond_all_numbers_of_64_bits_are_too_heavy() -> None:
    definition = record("R", l=array(record("L", a="int")))
    wide = reader_of(
        record("Wide"), **{f"f{number}": (["null", "int"], None) for number in range(2000)}
    )
    line = reader_of(record("L", a="int"), d=(array(["null", wide]), [None] * 100_000))
    reader = record("R", l=array(line))
    payload = b"\xfe\xff\xff\x07" + b"\x02" * (2**23 - 1) + b"\x00"
    (weight,) = weighed(avro(reader), [payload], avro(definition))
    assert weight > MAX_VALUES_BYTES


@pytest.mark.parametrize("text", ["x", "\u0122"])
def test_json_in_another_encoding_than_utf_8_is_not_decoded(text: str) -> None:
    wide = record("W", **{f"f{number}": ["null", "int"] for number in range(1000)})
    schema = ValueSchema(
        pb.Schema.Json, json.dumps(record("R", s="string", l=array(wide))).encode()
    )
    value = json.dumps({"s": text, "l": [{}] * 20_000}, ensure_ascii=False)
    for encoding in ("utf-16", "utf-16-le", "utf-32", "utf-32-be"):
        decoded = decoder(schema, schema)(Encoded(pa.array([value.encode(encoding)], pa.binary())))
        assert list(decoded.bad) == [0]


@pytest.mark.parametrize("digits", [4000, 5000])
def test_a_number_of_any_length_beside_items_does_not_hide_what_they_weigh(digits: int) -> None:
    wide = record("W", **{f"f{number}": ["null", "int"] for number in range(1000)})
    schema = ValueSchema(
        pb.Schema.Json, json.dumps(record("R", s="string", l=array(wide))).encode()
    )
    value = b'{"s":%s,"l":[%s]}' % (b"1" * digits, b",".join([b"{}"] * 20_000))
    decoded = decoder(schema, schema)(Encoded(pa.array([value], pa.binary())))
    assert decoded.too_large == {0}


def test_light_parts_of_a_key_and_a_value_are_decoded_whatever_comes_with_them() -> None:
    part = ValueSchema(pb.Schema.Json, json.dumps(record("P", t="string")).encode())
    schema = key_value(part, part, "INLINE", ("JSON", "JSON"))
    texts = [b'{"t":"%s"}' % (b"x" * size) for size in (1_000_000, 1_500_000)]
    light, other = (2 * (len(text).to_bytes(4, "big") + text) for text in texts)
    for payloads in ([light], [light, other], [other, light]):
        assert decoder(schema, schema)(Encoded(pa.array(payloads, pa.binary()))).bad == {}


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.usefixtures("always_walked")
def test_a_json_value_weighs_at_least_what_is_decoded(seed: int) -> None:
    rng = random.Random(seed)
    definition = record("Root", value=with_lists(rng, 0, []))
    schema = ValueSchema(pb.Schema.Json, json.dumps(definition).encode())
    for _ in range(4):
        row = a_value(rng, definition)
        payload = json.dumps(
            row, default=lambda data: data.decode("latin1"), indent=rng.choice([None, 1])
        ).encode()
        if b"Infinity" in payload or b"NaN" in payload:
            continue
        assert weighed(schema, [payload])[0] >= weight_of(schema, payload)


def test_marks_inside_of_texts_have_no_weight() -> None:
    schema = ValueSchema(
        pb.Schema.Json, json.dumps(record("R", s="string", l=array("int"))).encode()
    )
    text = json.dumps({"s": '{[,:"\\' * 3_000_000, "l": [1]}).encode()
    decoded = decoder(schema, schema)(Encoded(pa.array([text], pa.binary())))
    assert decoded.bad == {}


def test_a_few_items_of_many_columns_are_counted_one_by_one() -> None:
    fields = {f"f{number}": ["null", "int"] for number in range(5000)}
    definition = record("R", wide=array(record("W", **fields)), narrow=array("int"))
    schema = ValueSchema(pb.Schema.Json, json.dumps(definition).encode())
    value = {"wide": [{"f1": 1}] * 3, "narrow": [7] * 100_000}
    decoded = decoder(schema, schema)(Encoded(pa.array([json.dumps(value).encode()], pa.binary())))
    assert decoded.bad == {}
    assert len(decoded.values[0]["narrow"]) == 100_000


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.usefixtures("always_walked")
def test_a_protobuf_message_weighs_what_is_decoded(seed: int) -> None:
    rng = random.Random(seed)
    schema = protobuf("shop.Order")
    root = protobufs._root(schema)
    message: Any = message_factory.GetMessageClass(root)()
    message.id = rng.randrange(9)
    for number in range(rng.randrange(5)):
        message.items.add(sku="s" * rng.randrange(4), count=number)
        message.tags[number] = "tag"
    message.first.sku = "first"
    names = len("BLUE")
    # A message takes as much as a record. The entry of a map has a key beside its record.
    item = RECORD_BYTES + 2 * PART_BYTES
    expected = (
        RECORD_BYTES
        + 5 * PART_BYTES
        + names
        + item
        + item * (len(message.items) + len(message.tags))
    )
    assert weighed(schema, [message.SerializeToString()]) == [expected]


def test_rows_are_cut_by_their_weights_and_none_is_lost() -> None:
    third = MAX_VALUES_BYTES // 3
    found = list(cuts(np.array([third] * 4 + [MAX_VALUES_BYTES + 5, 1, 1])))
    assert found == [(0, 3), (3, 4), (4, 5), (5, 7)]
    assert list(cuts(np.array([], np.int64))) == []
