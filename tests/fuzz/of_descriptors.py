"""A target of Protobuf descriptors that no compiler wrote: each field, option and label of a
descriptor may be any, and the names still fit. Protobuf's library for Python checks less of a
descriptor than its compiler does.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from google.protobuf import descriptor_pb2

from ledgerlake.decode.columns import Encoded
from ledgerlake.errors import SetupError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.values.schemas import column_type, decoder
from ledgerlake.wire.value_schema import ValueSchema
from tests.fuzz import mutate
from tests.fuzz.engine import Target

if TYPE_CHECKING:
    from tests.fuzz.mutate import Rng

_SYNTAXES = ("proto2", "proto3", "editions")
_TYPES = range(1, 19)
_MESSAGE, _ENUM, _GROUP = 11, 14, 10
_MESSAGES = (".d.R", ".d.R.MEntry", ".d.R.EEntry", ".d.I", ".d.R.N", ".google.protobuf.Any", "I")
_ENUMS = (".d.E", ".d.F")
_NAMES = ("key", "value", "m", "HasField", "DESCRIPTOR", "a", "A", "__init__", "ä", "")
_DEFAULTS = ("0", "-1", "x", "A", "nan", "true", "\\377", "1e999", "")
_WIRE_TYPES = (0, 0, 1, 2, 2, 2, 3, 4, 5)


def _file(rng: Rng) -> descriptor_pb2.FileDescriptorProto:
    syntax = rng.choice(_SYNTAXES)
    file = descriptor_pb2.FileDescriptorProto(name="d.proto", package="d", syntax=syntax)
    if syntax == "editions":
        file.edition = rng.choice([descriptor_pb2.EDITION_2023, descriptor_pb2.EDITION_2024])
    for name in ("E", "F"):
        kind = file.enum_type.add(name=name)
        for number in range(3):
            kind.value.add(name=f"{name}{number}", number=number)
    inner = file.message_type.add(name="I")
    inner.field.add(name="x", number=1, label=1, type=5)
    root = file.message_type.add(name="R")
    root.nested_type.add(name="N").field.add(name="y", number=1, label=3, type=9)
    for name, value in (("MEntry", {"type": 9}), ("EEntry", {"type": _ENUM, "type_name": ".d.E"})):
        entry = root.nested_type.add(name=name)
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=1, type=rng.choice([5, 9]))
        entry.field.add(name="value", number=2, label=1, **value)
    root.field.add(name="m", number=1, label=3, type=_MESSAGE, type_name=".d.R.MEntry")
    root.field.add(name="e", number=2, label=3, type=_MESSAGE, type_name=".d.R.EEntry")
    root.field.add(name="i", number=3, label=1, type=_MESSAGE, type_name=".d.I")
    root.field.add(name="n", number=4, label=3, type=_MESSAGE, type_name=".d.R.N")
    root.field.add(name="k", number=5, label=3, type=_ENUM, type_name=".d.E")
    root.oneof_decl.add(name="o")
    for number in (6, 7):
        root.field.add(name=f"o{number}", number=number, label=1, type=9, oneof_index=0)
    return file


def _a_descriptor(rng: Rng) -> bytes:
    """A changed descriptor, the root message, and values whose tags are of its fields."""
    file = _file(rng)
    for _ in range(rng.choice([1, 1, 2, 4])):
        _change(rng, file)
    root = rng.choice(["d.R"] * 9 + ["d.R.MEntry", "d.I"])
    values = [_a_value(rng) for _ in range(8)]
    return mutate.packed(file.SerializeToString(), root.encode(), *values)


def _messages(file: descriptor_pb2.FileDescriptorProto) -> list[Any]:
    return [*file.message_type, *(one for part in file.message_type for one in part.nested_type)]


def _change(rng: Rng, file: descriptor_pb2.FileDescriptorProto) -> None:
    message = rng.choice(_messages(file))
    kind = rng.randrange(8)
    if kind == 0:
        _change_message(rng, message)
    elif kind == 1:
        _change_enum(rng, rng.choice(file.enum_type))
    elif kind == 2 and message.field:
        message.field.remove(rng.choice(message.field))
    elif kind == 3:
        field = message.field.add(name="z", number=rng.randrange(9), label=1, type=9)
        _change_field(rng, field)
    elif message.field:
        field = rng.choice(message.field)
        for _ in range(rng.choice([1, 1, 2])):
            _change_field(rng, field)


def _change_message(rng: Rng, message: Any) -> None:
    changes = {
        "map_entry": lambda: setattr(message.options, "map_entry", rng.random() < 0.8),
        "set": lambda: setattr(message.options, "message_set_wire_format", True),
        "range": lambda: message.extension_range.add(start=rng.randrange(9), end=2**29),
        "reserved": lambda: message.reserved_range.add(start=1, end=rng.randrange(9)),
        "oneof": lambda: message.oneof_decl.add(name=rng.choice(_NAMES)),
        "name": lambda: setattr(message, "name", rng.choice(["R", "X", "MEntry"])),
        "order": lambda: message.field.sort(key=lambda _field: rng.random()),
        "nested": lambda: message.nested_type.add(name="Y"),
    }
    rng.choice(list(changes.values()))()


def _change_enum(rng: Rng, kind: Any) -> None:
    value = rng.choice(kind.value) if kind.value else kind.value.add(name="z", number=0)
    changes = {
        "number": lambda: setattr(value, "number", rng.choice([-1, 0, 1, 2**31 - 1, -(2**31)])),
        "name": lambda: setattr(value, "name", rng.choice(_NAMES)),
        "none": lambda: kind.value.remove(value),
        "alias": lambda: setattr(kind.options, "allow_alias", True),
        "closed": lambda: setattr(kind.options.features, "enum_type", rng.randrange(3)),
    }
    rng.choice(list(changes.values()))()


def _change_field(rng: Rng, field: Any) -> None:
    features = field.options.features

    def change_type() -> None:
        field.type = rng.choice([*_TYPES, _MESSAGE, _MESSAGE, _GROUP, _ENUM])
        field.ClearField("type_name")
        if field.type in (_MESSAGE, _GROUP) or rng.random() < 0.05:
            field.type_name = rng.choice(_MESSAGES)
        elif field.type == _ENUM:
            field.type_name = rng.choice(_ENUMS)

    changes = [
        change_type,
        change_type,
        lambda: setattr(field, "number", rng.choice([*range(9), 19_000, 2**29 - 1, 2**29, -1])),
        lambda: setattr(field, "number", rng.randrange(1, 9)),
        lambda: setattr(field, "label", rng.choice([1, 2, 3])),
        lambda: setattr(field, "name", rng.choice(_NAMES)),
        lambda: setattr(field, "json_name", rng.choice(_NAMES)),
        lambda: setattr(field, "default_value", rng.choice(_DEFAULTS)),
        lambda: setattr(field, "oneof_index", rng.choice([0, 0, 1, -1])),
        lambda: setattr(field, "proto3_optional", True),
        lambda: setattr(field.options, "packed", rng.random() < 0.8),
        lambda: setattr(field.options, "lazy", True),
        lambda: setattr(field.options, "weak", True),
        lambda: setattr(field.options, "ctype", rng.randrange(3)),
        lambda: setattr(features, "field_presence", rng.randrange(4)),
        lambda: setattr(features, "message_encoding", rng.randrange(3)),
        lambda: setattr(features, "repeated_field_encoding", rng.randrange(3)),
        lambda: setattr(features, "utf8_validation", rng.choice([0, 2, 3])),
        lambda: field.ClearField("type"),
    ]
    rng.choice(changes)()


def _a_value(rng: Rng, depth: int = 0) -> bytes:
    value = bytearray()
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        number, kind = rng.randrange(1, 10), rng.choice(_WIRE_TYPES)
        value += mutate.varint(number << 3 | kind)
        if kind == 0:
            value += mutate.varint(rng.choice([0, 1, 2, 3, mutate.edge(rng)]))
        elif kind == 2:
            inner = _a_value(rng, depth + 1) if depth < 4 else rng.randbytes(rng.randrange(4))
            value += mutate.varint(len(inner)) + inner
        else:
            value += rng.randbytes({1: 8, 5: 4}.get(kind, 0))
    return bytes(value)


def _judge_descriptor(data: bytes) -> int:
    """The values of a schema: each is a value or bad, or the schema is refused."""
    file, root, *values = [*mutate.unpacked(data), b"", b""]
    files = descriptor_pb2.FileDescriptorSet()
    files.file.add().MergeFromString(file)
    definition = {
        "fileDescriptorSet": base64.b64encode(files.SerializeToString()).decode(),
        "rootMessageTypeName": root.decode(),
    }
    schema = ValueSchema(pb.Schema.ProtobufNative, json.dumps(definition).encode())
    column_type.cache_clear()
    decoder.cache_clear()
    decoded = decoder(schema, schema)(Encoded(pa.array(values, pa.binary())))
    decoded.values.validate(full=True)
    assert decoded.values.type.equals(column_type(schema))
    assert decoded.values.null_count >= len(decoded.bad)
    return 1


TARGETS = [
    Target(
        "descriptor",
        "values.protobufs: descriptors that no compiler wrote",
        _a_descriptor,
        _judge_descriptor,
        (SetupError,),
        memory_bytes=32 * 1024 * 1024,
    )
]
