"""Protobuf messages by the descriptor in their topic's schema (``PROTOBUF_NATIVE``).

The definition is JSON: ``fileDescriptorSet`` in base64, and ``rootMessageTypeName``. Messages
become structs, repeated fields arrays, maps maps with keys as text, enums the names of their values
(the number of an unknown value; a value is bad if that number is one of several), ``uint32`` a
``long`` and ``uint64`` a ``decimal(20, 0)``. A missing field is null if Protobuf tracks its
presence; otherwise it has its default. A recursive message has no column.
"""

from __future__ import annotations

import base64
import json
from itertools import count
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.unknown_fields import UnknownFieldSet

from ledgerlake.decode.columns import (
    COLUMNS_MOST,
    DecodedValues,
    Decoder,
    build,
    decode_rows,
    too_wide,
)
from ledgerlake.decode.loop_columns import with_loop
from ledgerlake.errors import SetupError
from ledgerlake.outside import Unreadable, reading
from ledgerlake.values.protobuf_loop import protobuf_reader
from ledgerlake.values.protobuf_maps import check_map_entries, is_map
from ledgerlake.values.protobuf_weights import closed_fields, protobuf_weigher

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

    from ledgerlake.decode.columns import Encoded
    from ledgerlake.wire.value_schema import ValueSchema

_CPP = FieldDescriptor
_FEATURES = descriptor_pb2.FeatureSet
_TYPES = {
    _CPP.CPPTYPE_INT32: pa.int32(),
    _CPP.CPPTYPE_INT64: pa.int64(),
    _CPP.CPPTYPE_UINT32: pa.int64(),
    _CPP.CPPTYPE_UINT64: pa.decimal128(20, 0),
    _CPP.CPPTYPE_DOUBLE: pa.float64(),
    _CPP.CPPTYPE_FLOAT: pa.float32(),
    _CPP.CPPTYPE_BOOL: pa.bool_(),
    _CPP.CPPTYPE_ENUM: pa.string(),
}

# How a number is encoded, and the number of the value of a map's entry.
_VARINT = 0
_VALUE = 2


def message_type(schema: ValueSchema) -> pa.DataType:
    """Return the struct of a schema's root message.

    Raises:
        SetupError: the schema is damaged, or its message has no column.
    """
    return _struct(_root(schema), (), count(1))


def message_decoder(reader: ValueSchema) -> Decoder:
    """Return a decoder of values by the root message of a schema, for every version that wrote
    them.

    Raises:
        SetupError: as ``message_type``.
    """
    target = message_type(reader)
    root = _root(reader)
    kind = message_factory.GetMessageClass(_root(reader, has_maps=False))
    loop = protobuf_reader(root, target)

    def decode(encoded: Encoded) -> DecodedValues:
        rows, bad = decode_rows(
            encoded.payloads, lambda payload: _values(kind.FromString(payload), root)
        )
        return DecodedValues(build(rows, target, target, bad), bad)

    read = decode if loop is None else with_loop(loop.read, lambda values: values, decode)
    return Decoder(read, protobuf_weigher(root))


def _root(schema: ValueSchema, *, has_maps: bool = True) -> Descriptor:
    """Return the root message of a schema.

    Args:
        has_maps: whether its maps are maps; otherwise they are repeated messages, as on the wire.
    """
    try:
        with reading():
            definition = json.loads(schema.definition)
            files = descriptor_pb2.FileDescriptorSet.FromString(
                base64.b64decode(definition["fileDescriptorSet"])
            )
            pool = descriptor_pool.DescriptorPool()
            parts = [_without_extensions(file) for file in files.file]
            if not has_maps:
                parts = list(map(_without_maps, parts))
            _add_all(pool, {part.name: part for part in parts})
            root = pool.FindMessageTypeByName(definition["rootMessageTypeName"])
            check_map_entries(root)
            return root
    except Unreadable as failure:
        raise SetupError(f"a schema's Protobuf descriptor is damaged: {failure.error!r}") from None


def _without_extensions(part: Any) -> Any:
    """Return a file or a message without its extensions. They have no column, so their parsed
    values would take memory that no weight counts. Their bytes become unknown fields.
    """
    part.ClearField("extension")
    for inner in _messages_in(part):
        _without_extensions(inner)
    return part


def _without_maps(file: Any) -> Any:
    """Return a file without the option that makes maps of repeated messages. Protobuf keeps a map
    in a hash table, and a producer could choose keys for which that takes quadratic time.
    """
    for message in file.message_type:
        _clear_map_entry(
            message, f".{file.package}" if file.package else "", file.syntax == "editions"
        )
    return file


def _clear_map_entry(message: Any, scope: str, has_features: bool) -> None:
    message.options.ClearField("map_entry")
    name = f"{scope}.{message.name}"
    for inner in message.nested_type:
        if inner.options.map_entry and has_features:
            maps = [
                field
                for field in message.field
                if field.type_name in (inner.name, f"{name}.{inner.name}")
            ]
            # Any other message may be a group by its file's features, but never a map or its value.
            for field in (*maps, *inner.field):
                if field.type == _CPP.TYPE_MESSAGE:
                    field.options.features.message_encoding = _FEATURES.LENGTH_PREFIXED
        _clear_map_entry(inner, name, has_features)


def _messages_in(part: Any) -> Any:
    return part.message_type if hasattr(part, "message_type") else part.nested_type


def _add_all(
    pool: descriptor_pool.DescriptorPool, files: dict[str, descriptor_pb2.FileDescriptorProto]
) -> None:
    """Add files, each after those that it imports."""

    def add(name: str) -> None:
        file = files.pop(name, None)
        if file is None:
            return
        for imported in file.dependency:
            add(imported)
        pool.Add(file)

    for name in list(files):
        add(name)


def _struct(descriptor: Descriptor, inside: tuple[str, ...], columns: Iterator[int]) -> pa.DataType:
    if descriptor.full_name in inside:
        raise SetupError(
            f"the message {descriptor.full_name} of a schema holds itself, which no column can; "
            "read it with schema = bytes"
        )
    return pa.struct(
        [
            (field.name, _type(field, (*inside, descriptor.full_name), columns))
            for field in descriptor.fields
        ]
    )


def _type(field: Any, inside: tuple[str, ...], columns: Iterator[int]) -> pa.DataType:
    if next(columns) > COLUMNS_MOST:
        raise too_wide()
    if is_map(field):
        return pa.map_(
            pa.string(), _type(field.message_type.fields_by_name["value"], inside, columns)
        )
    single = _single(field, inside, columns)
    return pa.list_(single) if field.is_repeated else single


def _single(field: Any, inside: tuple[str, ...], columns: Iterator[int]) -> pa.DataType:
    if field.cpp_type == _CPP.CPPTYPE_MESSAGE:
        return _struct(field.message_type, inside, columns)
    if field.cpp_type == _CPP.CPPTYPE_STRING:
        return pa.binary() if field.type == _CPP.TYPE_BYTES else pa.string()
    return _TYPES[field.cpp_type]


def _values(message: Message, descriptor: Descriptor) -> dict[str, Any]:
    values = {field.name: _value(message, field) for field in descriptor.fields}
    closed = closed_fields(descriptor)
    unknown_fields: Iterable[Any] = UnknownFieldSet(message) if closed else []  # type: ignore[assignment]
    for unknown in unknown_fields:
        field = closed.get(unknown.field_number)
        if field is None or is_map(field) or unknown.wire_type != _VARINT:
            continue
        # Protobuf keeps a number that a closed enumeration lacks as an unknown field.
        if field.is_repeated or values[field.name] is not None:
            raise ValueError(
                f"the field {field.name} has a number that its enumeration lacks, beside others"
            )
        values[field.name] = str((unknown.data + 2**31) % 2**32 - 2**31)
    return values


def _value(message: Message, field: Any) -> Any:
    # A field hides the method of a message that has its name.
    if field.has_presence and not type(message).HasField(message, field.name):
        return None
    value = getattr(message, field.name)
    if is_map(field):
        return list(_map(value, field.message_type).items())
    return (
        [_plain(field, element) for element in value] if field.is_repeated else _plain(field, value)
    )


def _map(entries: Iterable[Any], descriptor: Descriptor) -> dict[str, Any]:
    """Return a map of its entries: of one key, the last one counts. The keys are texts, since
    Python's hash of numbers has no secret.
    """
    items: dict[str, Any] = {}
    item, is_closed = descriptor.fields_by_name["value"], bool(closed_fields(descriptor))
    for entry in entries:
        if is_closed and _has_unknown_value(entry):
            raise ValueError("a map has a number that its enumeration lacks")
        # Protobuf's C parser gives the bytes of a text that is not UTF-8.
        key = entry.key.decode() if isinstance(entry.key, bytes) else str(entry.key)
        items[key] = _plain(item, entry.value)
    return items


def _has_unknown_value(entry: Message) -> bool:
    unknown_fields: Iterable[Any] = UnknownFieldSet(entry)  # type: ignore[assignment]
    return any(one.field_number == _VALUE and one.wire_type == _VARINT for one in unknown_fields)


def _plain(field: Any, value: Any) -> Any:
    if field.cpp_type == _CPP.CPPTYPE_MESSAGE:
        return _values(value, field.message_type)
    if field.cpp_type == _CPP.CPPTYPE_ENUM:
        enum_value = field.enum_type.values_by_number.get(value)
        return str(value) if enum_value is None else enum_value.name
    return value
