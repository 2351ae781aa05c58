"""The compiled loop for Avro against fastavro: random schemas, values, and damaged bytes."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ledgerlake.decode.columns import Encoded
from ledgerlake.errors import SetupError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.values import records
from ledgerlake.values.avro import avro_reader
from ledgerlake.values.schemas import decoder
from ledgerlake.wire.value_schema import ValueSchema

LEAVES: list[Any] = [
    "boolean",
    "int",
    "long",
    "float",
    "double",
    "string",
    "bytes",
    {"type": "int", "logicalType": "date"},
    {"type": "long", "logicalType": "timestamp-millis"},
    {"type": "long", "logicalType": "timestamp-micros"},
    {"type": "string", "logicalType": "uuid"},
]


def random_node(rng: random.Random, depth: int, names: list[str]) -> Any:
    choice = rng.random()
    if choice < 0.25:
        inner = random_node(rng, depth, names)
        return inner if isinstance(inner, list) else rng.choice([["null", inner], [inner, "null"]])
    if choice < 0.4 and depth < 3:
        return random_record(rng, depth + 1, names)
    names.append(f"N{len(names)}")
    if choice < 0.5:
        return {"type": "enum", "name": names[-1], "symbols": ["a", "b", "c"]}
    if choice < 0.6:
        return {"type": "fixed", "name": names[-1], "size": rng.randint(1, 5)}
    return rng.choice(LEAVES)


def random_record(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    names.append(f"N{len(names)}")
    name = names[-1]
    fields = [
        {"name": f"f{number}", "type": random_node(rng, depth, names)}
        for number in range(rng.randint(1, 5))
    ]
    return {"type": "record", "name": name, "fields": fields}


def random_value(rng: random.Random, node: Any) -> Any:
    if isinstance(node, list):
        branch = rng.choice(node)
        return None if branch == "null" else random_value(rng, branch)
    kind = node if isinstance(node, str) else node["type"]
    if kind == "record":
        return {field["name"]: random_value(rng, field["type"]) for field in node["fields"]}
    return {
        "boolean": lambda: rng.random() < 0.5,
        "int": lambda: rng.choice([0, -1, 2**31 - 1, -(2**31), rng.randint(-1000, 1000)]),
        "long": lambda: rng.choice(
            [0, -1, 2**62, rng.randint(-(2**45), 2**45), rng.randint(-(2**63), 2**63 - 1)]
        ),
        "float": lambda: rng.choice([0.0, -0.5, float("inf"), 1.25e20]),
        "double": lambda: rng.choice([0.1, -1e300, float("-inf"), rng.random()]),
        "string": lambda: rng.choice(["", "x", "näme", "long" * rng.randint(0, 50)]),
        "bytes": lambda: rng.randbytes(rng.randint(0, 20)),
        "enum": lambda: rng.choice(node["symbols"]),
        "fixed": lambda: rng.randbytes(node["size"]),
    }[kind]()


def damaged(rng: random.Random, payload: bytes) -> bytes:
    change = rng.random()
    if change < 0.6 or not payload:
        return payload
    place = rng.randrange(len(payload))
    if change < 0.7:
        return payload[:place]
    if change < 0.8:
        return payload + b"\0"
    return payload[:place] + bytes([rng.randrange(256)]) + payload[place + 1 :]


def schema_of(definition: Any) -> ValueSchema:
    return ValueSchema(pb.Schema.Avro, json.dumps(definition).encode())


def by_fastavro(schema: ValueSchema, definition: Any) -> Any:
    physical = records._Types(schema).of(definition)
    return records._by_fastavro(
        physical, records._for_spark(physical), records._compiled(schema), None
    )


def are_same(one: pa.Array, other: pa.Array) -> bool:
    """Whether two arrays are equal; times may be out of Python's range, and floating
    numbers none.
    """
    if pa.types.is_struct(one.type):
        parts = zip(one.flatten(), other.flatten(), strict=True)
        return one.is_valid().equals(other.is_valid()) and all(are_same(*part) for part in parts)
    if pa.types.is_floating(one.type):
        numbers = [pc.if_else(pc.is_nan(each), None, each) for each in (one, other)]
        nans = [pc.is_nan(each) for each in (one, other)]
        return bool(numbers[0].equals(numbers[1]) and nans[0].equals(nans[1]))
    return bool(one.equals(other))


@pytest.mark.parametrize("seed", range(60))
def test_the_loop_reads_what_fastavro_reads(seed: int) -> None:
    rng = random.Random(seed)
    definition = random_record(rng, 0, [])
    schema = schema_of(definition)
    # With logical types, fastavro writes other Python values.
    parsed = fastavro.parse_schema(records._plain(definition))
    payloads: list[bytes | None] = []
    for _ in range(200):
        encoded = io.BytesIO()
        fastavro.schemaless_writer(encoded, parsed, random_value(rng, definition))
        payloads.append(None if rng.random() < 0.05 else damaged(rng, encoded.getvalue()))
    column = pa.array(payloads, pa.binary()).slice(rng.randint(0, 3))
    ours = decoder(schema, schema)(Encoded(column))
    theirs = by_fastavro(schema, definition)(Encoded(column))
    ours.values.validate(full=True)
    assert ours.values.type == theirs.values.type
    assert are_same(ours.values, theirs.values)
    assert ours.bad == theirs.bad
    # The loop itself reads all that is good.
    reader = avro_reader(definition, records._Types(schema).of(definition))
    assert reader is not None
    refused = ~reader.read(column)[1] & column.is_valid().to_numpy(False)
    assert np.flatnonzero(refused).tolist() == sorted(ours.bad)


def test_regular_values_of_each_leaf_are_read_by_the_loop_itself() -> None:
    definition = {
        "type": "record",
        "name": "R",
        "fields": [{"name": f"f{number}", "type": leaf} for number, leaf in enumerate(LEAVES)],
    }
    physical = records._Types(schema_of(definition)).of(definition)
    reader = avro_reader(definition, physical)
    assert reader is not None
    encoded = io.BytesIO()
    parsed = fastavro.parse_schema(records._plain(definition))
    value = random_value(random.Random(1), definition)
    fastavro.schemaless_writer(encoded, parsed, value)
    rows, is_read = reader.read(pa.array([encoded.getvalue(), None], pa.binary()))
    assert is_read.tolist() == [True, False]
    assert rows[1].as_py() is None


@pytest.mark.parametrize(
    "node",
    [
        {"type": "array", "items": "int"},
        {"type": "map", "values": "int"},
        {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
        ["int", "long"],
    ],
)
def test_schemas_with_other_parts_are_left_to_fastavro(node: Any) -> None:
    definition = {"type": "record", "name": "R", "fields": [{"name": "f", "type": node}]}
    assert avro_reader(definition, records._Types(schema_of(definition)).of(definition)) is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            [{"name": "f", "type": {"type": "fixed", "name": "F", "size": -5}}],
            "a fixed type of the size -5",
        ),
        (
            [
                {"name": "f", "type": {"type": "enum", "name": "x.E", "symbols": ["a"]}},
                {"name": "g", "type": {"type": "enum", "name": "x.E", "symbols": ["b"]}},
            ],
            "two types of the name x.E",
        ),
        (
            [{"name": "f", "type": {"type": "enum", "name": "E", "symbols": ["a" * 1001]}}],
            "a symbol of more than 1000",
        ),
        (
            [{"name": "f", "type": {"type": "enum", "name": "x.long", "symbols": ["a"]}}],
            "the name long, which is Avro's",
        ),
        (
            [{"name": "f", "type": {"type": "fixed", "name": "map", "size": 4}}],
            "the name map, which is Avro's",
        ),
    ],
)
def test_schemas_that_would_be_misread_are_refused(fields: list[Any], sentence: str) -> None:
    schema = schema_of({"type": "record", "name": "R", "fields": fields})
    with pytest.raises(SetupError, match=sentence):
        decoder(schema, schema)


def test_a_type_may_be_named_with_its_namespace_and_referred_to_without() -> None:
    color = {"type": "enum", "name": "com.acme.Color", "symbols": ["RED", "BLUE"]}
    fields = [{"name": "a", "type": color}, {"name": "b", "type": "Color"}]
    schema = schema_of({"type": "record", "name": "R", "namespace": "com.acme", "fields": fields})
    assert decoder(schema, schema)(
        Encoded(pa.array([b"\x00\x02"], pa.binary()))
    ).values.to_pylist() == [{"a": "RED", "b": "BLUE"}]


def an_order(shop: str, *, has_tags: bool) -> dict[str, Any]:
    """A record with two enumerations of one short name, each used where it is defined and below."""
    statuses = [
        {"type": "enum", "name": "Status", "namespace": f"{shop}.{owner}", "symbols": symbols}
        for owner, symbols in (("Order", ["OPEN", "PAID"]), ("Customer", ["NEW"]))
    ]
    customer = [
        {"name": "status", "type": statuses[1]},
        {"name": "before", "type": f"{shop}.Customer.Status"},
    ]
    fields = [
        {"name": "status", "type": statuses[0]},
        {"name": "customer", "type": {"type": "record", "name": "Customer", "fields": customer}},
        {"name": "before", "type": ["null", {"type": f"{shop}.Order.Status"}]},
        {"name": "other", "type": "Customer"},
    ]
    tags = (
        [{"name": "tags", "type": {"type": "array", "items": f"{shop}.Order.Status"}}]
        if has_tags
        else []
    )
    return {"type": "record", "name": "Order", "namespace": shop, "fields": fields + tags}


@pytest.mark.parametrize("reader", ["com.shop", "org.shop"])
@pytest.mark.parametrize("has_tags", [False, True], ids=["by the loop", "by fastavro"])
def test_types_of_one_short_name_are_told_apart_by_their_namespaces(
    has_tags: bool, reader: str
) -> None:
    ours, theirs = (schema_of(an_order(shop, has_tags=has_tags)) for shop in (reader, "com.shop"))
    payload = (
        b"\x02" + b"\x00\x00" + b"\x02\x00" + b"\x00\x00" + (b"\x02\x02\x00" if has_tags else b"")
    )
    decoded = decoder(theirs, ours)(Encoded(pa.array([payload], pa.binary())))
    expected = {
        "status": "PAID",
        "customer": {"status": "NEW", "before": "NEW"},
        "before": "OPEN",
        "other": {"status": "NEW", "before": "NEW"},
    }
    assert (decoded.values.to_pylist(), decoded.bad) == (
        [expected | ({"tags": ["PAID"]} if has_tags else {})],
        {},
    )
    assert is_regular(theirs) != has_tags


def test_a_name_without_a_namespace_stands_for_no_later_type_in_one() -> None:
    states = [
        {"type": "enum", "name": name, "symbols": [symbol]}
        for name, symbol in (("E", "a"), ("x.E", "b"))
    ]
    fields = [
        {"name": f"f{number}", "type": node} for number, node in enumerate([*states, "E", "x.E"])
    ]
    schema = schema_of({"type": "record", "name": "R", "fields": fields})
    decoded = decoder(schema, schema)(Encoded(pa.array([b"\0\0\0\0"], pa.binary())))
    assert decoded.values.to_pylist() == [{"f0": "a", "f1": "b", "f2": "a", "f3": "b"}]


def is_regular(schema: ValueSchema) -> bool:
    """Whether the loop reads values of a schema."""
    definition = records._parse(schema.definition)
    return avro_reader(definition, records._Types(schema).of(definition)) is not None


def test_a_size_beyond_the_bytes_reads_nothing() -> None:
    definition = {"type": "record", "name": "R", "fields": [{"name": "f", "type": "string"}]}
    schema = schema_of(definition)
    decoded = decoder(schema, schema)(
        Encoded(pa.array([b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x02a"], pa.binary()))
    )
    assert decoded.values.to_pylist() == [None, {"f": "a"}]
    assert list(decoded.bad) == [0]


def a_number(value: int) -> bytes:
    encoded = io.BytesIO()
    fastavro.schemaless_writer(encoded, "long", value)
    return encoded.getvalue()


SYMBOLS = {"type": "enum", "name": "E", "symbols": ["a", "b", "c"]}

MISFITS: dict[str, tuple[Any, bytes]] = {
    "a symbol below the first": (SYMBOLS, a_number(-1)),
    "a symbol beyond the last": (SYMBOLS, a_number(3)),
    "a branch below the first": (["null", "int"], a_number(-2)),
    "a branch counted from the end": (["null", "int"], a_number(-1) + a_number(5)),
    "a long of 70 bits": ("long", b"\xff" * 9 + b"\x7f"),
    "a long in 12 bytes": ("long", b"\x8e" + b"\x80" * 10 + b"\x00"),
    "an int of 33 bits": ("int", a_number(2**32)),
    "a boolean of 7": ("boolean", b"\x07"),
    "a text of a size below zero": ("string", a_number(-1)),
}

FITTING: dict[str, tuple[Any, bytes, Any]] = {
    "the last symbol": (SYMBOLS, a_number(2), "c"),
    "the least long": ("long", a_number(-(2**63)), -(2**63)),
    "the greatest long": ("long", a_number(2**63 - 1), 2**63 - 1),
    "a short long in ten bytes": ("long", b"\x8e" + b"\x80" * 8 + b"\x00", 7),
    "the least int": ("int", a_number(-(2**31)), -(2**31)),
}


def around(node: Any, encoded: bytes, place: str) -> tuple[Any, bytes]:
    """A schema that has a type somewhere, and a record with its value there."""
    schemas = {
        "a field": (node, encoded),
        "an item": ({"type": "array", "items": node}, a_number(1) + encoded + b"\0"),
        "a block": (
            {"type": "array", "items": node},
            a_number(-1) + a_number(len(encoded)) + encoded + b"\0",
        ),
        "a map": (
            {"type": "map", "values": node},
            a_number(1) + a_number(1) + b"k" + encoded + b"\0",
        ),
    }
    kind, payload = schemas[place]
    fields = [{"name": "f", "type": kind}, {"name": "last", "type": "int"}]
    return {"type": "record", "name": "R", "fields": fields}, payload + a_number(1)


@pytest.mark.parametrize("is_dropped", [False, True], ids=["read", "dropped"])
@pytest.mark.parametrize("place", ["a field", "an item", "a block", "a map"])
@pytest.mark.parametrize("name", MISFITS)
def test_bytes_that_do_not_fit_their_schema_are_bad_wherever_they_are(
    name: str, place: str, is_dropped: bool
) -> None:
    definition, payload = around(*MISFITS[name], place)
    reader = {**definition, "fields": definition["fields"][1:]} if is_dropped else definition
    decoded = decoder(schema_of(definition), schema_of(reader))(
        Encoded(pa.array([payload, None], pa.binary()))
    )
    assert decoded.values.to_pylist() == [None, None]
    assert decoded.bad == {0: "its bytes do not fit the schema that it was written with"}


@pytest.mark.parametrize("place", ["a field", "an item", "a block", "a map"])
@pytest.mark.parametrize("name", FITTING)
def test_the_last_values_that_fit_are_read(name: str, place: str) -> None:
    node, encoded, expected = FITTING[name]
    definition, payload = around(node, encoded, place)
    schema = schema_of(definition)
    decoded = decoder(schema, schema)(Encoded(pa.array([payload], pa.binary())))
    assert decoded.bad == {}
    value = {"an item": [expected], "a block": [expected], "a map": [("k", expected)]}.get(
        place, expected
    )
    assert decoded.values.to_pylist() == [{"f": value, "last": 1}]
