"""Maps of Protobuf messages: which descriptors are maps, and which are damaged."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FieldDescriptor

from ledgerlake.decode.columns import Encoded
from ledgerlake.errors import SetupError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.values.schemas import column_type, decoder
from ledgerlake.wire.value_schema import ValueSchema

if TYPE_CHECKING:
    from collections.abc import Callable

_T = FieldDescriptor
ENTRY = {"type": _T.TYPE_MESSAGE, "type_name": ".m.R.TagsEntry"}
INNER = {"type": _T.TYPE_MESSAGE, "type_name": ".m.I"}
NO_KEYS = ("DOUBLE", "FLOAT", "BYTES", "ENUM", "MESSAGE")
KEYS = [
    name.removeprefix("TYPE_")
    for name in vars(_T)
    if name.startswith("TYPE_") and name.removeprefix("TYPE_") not in (*NO_KEYS, "GROUP")
]


class Map:
    """A file with the message ``R``, which has one map, for tests to change."""

    def __init__(self) -> None:
        self.file = descriptor_pb2.FileDescriptorProto(name="m.proto", package="m", syntax="proto2")
        self.file.message_type.add(name="I").field.add(name="x", number=1, label=1, type=5)
        self.file.enum_type.add(name="E").value.add(name="NONE", number=0)
        self.root = self.file.message_type.add(name="R")
        self.entry = self.root.nested_type.add(name="TagsEntry")
        self.entry.options.map_entry = True
        self.key = self.entry.field.add(name="key", number=1, label=1, type=_T.TYPE_STRING)
        self.value = self.entry.field.add(name="value", number=2, label=1, type=_T.TYPE_STRING)
        self.field = self.root.field.add(name="tags", number=1, label=3, **ENTRY)

    def schema(self, root: str = "m.R") -> ValueSchema:
        files = descriptor_pb2.FileDescriptorSet(file=[self.file])
        definition = {
            "fileDescriptorSet": base64.b64encode(files.SerializeToString()).decode(),
            "rootMessageTypeName": root,
        }
        return ValueSchema(pb.Schema.ProtobufNative, json.dumps(definition).encode())


def change(part: str, **changes: Any) -> Callable[[Map], object]:
    def apply(one: Map) -> None:
        for name, value in changes.items():
            setattr(getattr(one, part), name, value)

    return apply


def add_field(message: str, **field: Any) -> Callable[[Map], object]:
    return lambda one: getattr(one, message).field.add(**{"name": "z", "number": 7} | field)


def both(*changes: Callable[[Map], object]) -> Callable[[Map], object]:
    return lambda one: [apply(one) for apply in changes]


def field_of_another_message(one: Map) -> None:
    one.file.message_type[0].field.add(name="z", number=7, label=3, **ENTRY)
    one.root.field.add(name="z", number=7, label=1, **INNER)


def option_on_another_message(one: Map) -> None:
    one.file.message_type[0].options.map_entry = True
    one.root.field.add(name="z", number=7, label=3, **INNER)


def in_union(one: Map) -> None:
    one.root.oneof_decl.add(name="union")
    one.root.field.add(name="z", number=7, label=1, oneof_index=0, **ENTRY)


def parts_in_union(one: Map) -> None:
    one.entry.oneof_decl.add(name="union")
    one.key.oneof_index = one.value.oneof_index = 0


ODD: dict[str, Callable[[Map], object]] = {
    "a key with another number": change("key", number=3),
    "a value with another number": change("value", number=3),
    "swapped numbers": both(change("key", number=2), change("value", number=1)),
    "swapped fields": lambda one: one.entry.field.reverse(),
    "swapped names": both(change("key", name="value"), change("value", name="key")),
    "a key with another name": change("key", name="k"),
    "a value with another name": change("value", name="v"),
    "a third field": add_field("entry", label=1, type=5),
    "no key": lambda one: one.entry.field.remove(one.key),
    "no value": lambda one: one.entry.field.remove(one.value),
    "no field": lambda one: one.entry.ClearField("field"),
    **{f"a key of label {label}": change("key", label=label) for label in (2, 3)},
    **{f"a value of label {label}": change("value", label=label) for label in (2, 3)},
    "parts in a union": parts_in_union,
    "a range of extensions": lambda one: one.entry.extension_range.add(start=5, end=9),
    **{f"a key of {kind}": change("key", type=getattr(_T, f"TYPE_{kind}")) for kind in NO_KEYS[:3]},
    "a key of an enumeration": change("key", type=_T.TYPE_ENUM, type_name=".m.E"),
    "a key of a message": change("key", **INNER),
    "a key of a group": change("key", type=_T.TYPE_GROUP, type_name=".m.I"),
    "a value of a group": change("value", type=_T.TYPE_GROUP, type_name=".m.I"),
    "a value of an entry": change("value", **ENTRY),
    "a group of entries": change("field", type=_T.TYPE_GROUP),
    **{f"a field of label {label}": change("field", label=label) for label in (1, 2)},
    "a second field of one entry": add_field("root", label=1, **ENTRY),
    "a union with an entry": in_union,
    "a field of another message": field_of_another_message,
    "the option on another message": option_on_another_message,
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_a_map_entry_that_no_compiler_writes_is_a_damaged_schema(odd: str) -> None:
    one = Map()
    ODD[odd](one)
    for read in (column_type, lambda schema: decoder(schema, schema)):
        with pytest.raises(SetupError, match="descriptor is damaged"):
            read(one.schema())


def test_a_map_entry_as_the_root_is_a_damaged_schema() -> None:
    with pytest.raises(SetupError, match=r"m\.R\.TagsEntry is an entry of a map"):
        column_type(Map().schema("m.R.TagsEntry"))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [{"type": 5}, {"type": 14, "type_name": ".m.E"}, INNER])
def test_a_map_that_a_compiler_writes_is_a_column(key: str, value: dict[str, Any]) -> None:
    one = Map()
    change("key", type=getattr(_T, f"TYPE_{key}"))(one)
    change("value", **value)(one)
    schema = one.schema()
    found = decoder(schema, schema)(Encoded(pa.array([b"\x0a\0", b""], pa.binary())))
    assert not found.bad
    assert [len(row["tags"]) for row in found.values.to_pylist()] == [1, 0]


@pytest.mark.parametrize("type_name", [ENTRY["type_name"], "TagsEntry"])
@pytest.mark.parametrize("value", [{"type": 5}, {"type": 14, "type_name": ".m.E"}, INNER])
@pytest.mark.parametrize("syntax", ["editions", "proto2"])
def test_a_map_is_no_group_if_messages_are_groups(
    syntax: str, value: dict[str, Any], type_name: str
) -> None:
    one = Map()
    one.file.syntax = syntax
    if syntax == "editions":
        one.file.edition = descriptor_pb2.EDITION_2023
        one.file.options.features.message_encoding = descriptor_pb2.FeatureSet.DELIMITED
    change("value", **value)(one)
    change("field", type_name=type_name)(one)
    # A message beside it, of the same name as the entry.
    group = _T.TYPE_MESSAGE if syntax == "editions" else _T.TYPE_GROUP
    one.file.message_type.add(name="TagsEntry").field.add(name="x", number=1, label=1, type=5)
    one.root.field.add(name="z", number=7, label=1, type=group, type_name=".m.TagsEntry")
    is_message = value is INNER
    item = b"\x12\x02\x08\x01" if is_message else b"\x10\0"
    entry = b"\x0a\x01a" + item
    payload = b"\x0a" + bytes([len(entry)]) + entry + b"\x3b\x08\x05\x3c"
    schema = one.schema()
    found = decoder(schema, schema)(Encoded(pa.array([payload], pa.binary())))
    plain = {"x": 1} if is_message else "NONE" if "type_name" in value else 0
    assert found.values.to_pylist() == [{"tags": [("a", plain)], "z": {"x": 5}}]
    assert not found.bad
