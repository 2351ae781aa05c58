"""The compiled loop for flat Protobuf messages against Protobuf's own library."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor

from ledgerlake.decode.columns import Encoded
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.values import protobufs
from ledgerlake.values.protobuf_loop import protobuf_reader
from ledgerlake.values.schemas import decoder
from ledgerlake.wire.value_schema import ValueSchema
from tests.values.test_avro import are_same, damaged

_T = FieldDescriptor
TYPES = (
    _T.TYPE_INT32, _T.TYPE_INT64, _T.TYPE_UINT32, _T.TYPE_SINT32, _T.TYPE_SINT64, _T.TYPE_BOOL, _T.TYPE_FIXED32,
    _T.TYPE_SFIXED32, _T.TYPE_SFIXED64, _T.TYPE_FLOAT, _T.TYPE_DOUBLE, _T.TYPE_STRING, _T.TYPE_BYTES, _T.TYPE_ENUM,
)  # fmt: skip


def random_file(rng: random.Random, syntax: str = "proto3") -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="r.proto", package="r", syntax=syntax)
    color = file.enum_type.add(name="Color")
    for number, name in enumerate(("RED", "BLUE", "GREEN")):
        color.value.add(name=name, number=number)
    message = file.message_type.add(name="M")
    numbers = rng.sample([*range(1, 30), 200, 4000], rng.randint(1, 10))
    for index, number in enumerate(numbers):
        kind = rng.choice(TYPES)
        field = message.field.add(name=f"f{index}", number=number, type=kind, label=1)
        if kind == _T.TYPE_ENUM:
            field.type_name = ".r.Color"
        if syntax == "proto3" and rng.random() < 0.3:
            field.proto3_optional = True
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_f{index}")
    return file


def schema_of(file: descriptor_pb2.FileDescriptorProto) -> ValueSchema:
    files = descriptor_pb2.FileDescriptorSet(file=[file])
    definition = {
        "fileDescriptorSet": base64.b64encode(files.SerializeToString()).decode(),
        "rootMessageTypeName": "r.M",
        "rootFileDescriptorName": "r.proto",
    }
    return ValueSchema(pb.Schema.ProtobufNative, json.dumps(definition).encode())


def random_value(rng: random.Random, kind: int) -> Any:
    return {
        _T.TYPE_BOOL: lambda: rng.random() < 0.5,
        _T.TYPE_STRING: lambda: rng.choice(["", "x", "näme" * rng.randint(1, 9)]),
        _T.TYPE_BYTES: lambda: rng.randbytes(rng.randint(0, 9)),
        _T.TYPE_FLOAT: lambda: rng.choice([0.0, -1.5, float("inf")]),
        _T.TYPE_DOUBLE: lambda: rng.choice([0.1, -1e300]),
        _T.TYPE_UINT32: lambda: rng.choice([0, 2**32 - 1, 7]),
        _T.TYPE_FIXED32: lambda: rng.choice([0, 2**32 - 1, 7]),
        _T.TYPE_INT64: lambda: rng.choice([0, -1, 2**63 - 1, -(2**63)]),
        _T.TYPE_SINT64: lambda: rng.choice([0, -1, 2**63 - 1, -(2**63)]),
        _T.TYPE_SFIXED64: lambda: rng.choice([0, -1, 2**63 - 1, -(2**63)]),
        _T.TYPE_ENUM: lambda: rng.choice([0, 1, 2, 9, -3]),
    }.get(kind, lambda: rng.choice([0, -1, 5, 2**31 - 1, -(2**31)]))()


def message_class(file: descriptor_pb2.FileDescriptorProto) -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("r.M"))


@pytest.mark.parametrize("seed", range(60))
def test_the_loop_reads_what_the_library_reads(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    file = random_file(rng, rng.choice(["proto3", "proto3", "proto2"]))
    kind, schema = message_class(file), schema_of(file)
    payloads: list[bytes | None] = []
    for _ in range(200):
        message = kind()
        for field in kind.DESCRIPTOR.fields:
            value = random_value(rng, field.type)
            is_closed = field.enum_type is not None and field.enum_type.is_closed
            is_known = not is_closed or 0 <= value < 3
            if rng.random() < 0.7 and is_known:
                setattr(message, field.name, value)
        payload = message.SerializeToString()
        # A field that comes twice, and one that nobody knows.
        payload += rng.choice([b"", payload, b"\xf8\x3f\x01", b"\xfa\x3f\x02ab"])
        payloads.append(None if rng.random() < 0.05 else damaged(rng, payload))
    column = pa.array(payloads, pa.binary()).slice(rng.randint(0, 3))
    ours = decoder(schema, schema)(Encoded(column))
    with monkeypatch.context() as patched:
        patched.setattr(protobufs, "protobuf_reader", lambda *_: None)
        theirs = protobufs.message_decoder(schema)(Encoded(column))
    ours.values.validate(full=True)
    assert ours.values.type == theirs.values.type
    assert are_same(ours.values, theirs.values)
    assert ours.bad.keys() == theirs.bad.keys()


def test_regular_messages_are_read_by_the_loop_itself() -> None:
    file = random_file(random.Random(3))
    kind, schema = message_class(file), schema_of(file)
    reader = protobuf_reader(kind.DESCRIPTOR, protobufs.message_type(schema))
    assert reader is not None
    rows, is_read = reader.read(pa.array([kind().SerializeToString(), None, b"\xff"], pa.binary()))
    assert is_read.tolist() == [True, False, False]
    assert rows.is_valid().to_pylist() == [True, False, False]


def with_field(**options: Any) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="r.proto", package="r", syntax="proto2")
    file.enum_type.add(name="Color").value.add(name="RED", number=0)
    file.message_type.add(name="M").field.add(**{"name": "f", "number": 1, "label": 1, **options})
    return file


@pytest.mark.parametrize(
    "file",
    [
        with_field(type=_T.TYPE_INT32, label=3),
        with_field(type=_T.TYPE_INT32, label=2),
        with_field(type=_T.TYPE_UINT64),
        with_field(type=_T.TYPE_ENUM, type_name=".r.Color"),
        with_field(type=_T.TYPE_INT32, number=5000),
    ],
    ids=["repeated", "required", "too large for a long", "a closed enumeration", "a large number"],
)
def test_messages_with_other_fields_are_left_to_the_library(
    file: descriptor_pb2.FileDescriptorProto,
) -> None:
    kind = message_class(file)
    assert protobuf_reader(kind.DESCRIPTOR, protobufs.message_type(schema_of(file))) is None


def closed_enumerations() -> descriptor_pb2.FileDescriptorProto:
    file = with_field(type=_T.TYPE_ENUM, type_name=".r.Color")
    message = file.message_type[0]
    message.field.add(name="many", number=2, label=3, type=_T.TYPE_ENUM, type_name=".r.Color")
    entry = message.nested_type.add(name="ByIdEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=_T.TYPE_INT32, label=1)
    entry.field.add(name="value", number=2, type=_T.TYPE_ENUM, label=1, type_name=".r.Color")
    message.field.add(
        name="by_id", number=3, label=3, type=_T.TYPE_MESSAGE, type_name=".r.M.ByIdEntry"
    )
    return file


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b"", {"f": None, "many": [], "by_id": []}),
        (b"\x08\x00", {"f": "RED", "many": [], "by_id": []}),
        (b"\x08\x07", {"f": "7", "many": [], "by_id": []}),
        (b"\x08\xfd\xff\xff\xff\xff\xff\xff\xff\xff\x01", {"f": "-3", "many": [], "by_id": []}),
        (b"\x0d\x07\x00\x00\x00", {"f": None, "many": [], "by_id": []}),
        (
            b"\x10\x00\x10\x00\x1a\x04\x08\x05\x10\x00",
            {"f": None, "many": ["RED", "RED"], "by_id": [("5", "RED")]},
        ),
        (b"\x08\x00\x08\x07", None),
        (b"\x08\x07\x08\x00", None),
        (b"\x08\x07\x08\x08", None),
        (b"\x12\x02\x00\x07", None),
        (b"\x1a\x04\x08\x05\x10\x07", None),
    ],
)
def test_a_number_that_a_closed_enumeration_lacks_is_never_left_out(
    payload: bytes, expected: object
) -> None:
    schema = schema_of(closed_enumerations())
    decoded = decoder(schema, schema)(Encoded(pa.array([payload], pa.binary())))
    assert decoded.values.to_pylist() == [expected]
    assert bool(decoded.bad) == (expected is None)
