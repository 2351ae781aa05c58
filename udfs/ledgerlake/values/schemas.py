"""Values by the schemas of Pulsar's registry: bytes in, Arrow columns out.

Each message has the version of the topic's schema with which it was written (``schema_version``).
All messages of a read are converted to one schema, the reader's schema:

    primitives      big-endian, as Pulsar's clients write them; different kinds cannot be converted
    Avro            by Avro's schema resolution: new fields get their defaults, removed ones go
    JSON            fields by name: missing fields are null, unknown fields are dropped
    key and value   a struct of both; if the schema is ``SEPARATED``, the key is the message's key
    Protobuf        by the descriptor in the schema (``PROTOBUF_NATIVE``), fields by number

| kind | column |
|---|---|
| none, BYTES, PROTOBUF (its registry entry has no descriptor) | ``binary`` |
| STRING, BOOLEAN | ``string``, ``boolean`` |
| INT8 to INT64; FLOAT, DOUBLE | integers; ``float``, ``double`` |
| DATE, TIME, TIMESTAMP, INSTANT | ``timestamp`` |
| LOCAL_DATE, LOCAL_DATE_TIME | ``date``, ``timestamp_ntz`` |
| LOCAL_TIME | ``long``, nanoseconds of the day |
| AVRO, JSON | a struct (see ``records``) |
| KEY_VALUE | a struct of ``key`` and ``value`` |
| PROTOBUF_NATIVE | a struct (see ``protobufs``) |

A value must fit its schema to the last byte. If it does not, it is bad, and the reason is returned;
the other values of its batch are not affected.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.decode.columns import (
    SCHEMAS_KEPT,
    DecodedValues,
    Decoder,
    Encoded,
    Read,
    check_depth,
    first_line,
)
from ledgerlake.decode.weights import Weigher, fixed_bytes
from ledgerlake.errors import SetupError
from ledgerlake.outside import Unreadable, reading
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.values.primitives import DECODERS, TYPES
from ledgerlake.values.protobufs import message_decoder, message_type
from ledgerlake.values.records import record_decoder, record_type
from ledgerlake.wire.value_schema import ValueSchema

if TYPE_CHECKING:
    from ledgerlake.decode.weights import Weights

_T = pb.Schema

_Answer = TypeVar("_Answer")


class _Remembered(Generic[_Answer]):
    """A function whose answers are kept, and its errors too: to refuse a schema may take as long as
    to compile it, and each message can name it.
    """

    def __init__(self, call: Callable[..., _Answer]) -> None:
        self.__doc__ = call.__doc__
        self._kept = lru_cache(SCHEMAS_KEPT)(partial(_outcome, call))

    def __call__(self, *schemas: ValueSchema) -> _Answer:
        answer, error = self._kept(*schemas)
        if error is not None:
            raise error.with_traceback(None)
        return cast("_Answer", answer)

    def cache_clear(self) -> None:
        self._kept.cache_clear()


def _outcome(
    call: Callable[..., _Answer], *schemas: ValueSchema
) -> tuple[_Answer | None, SetupError | None]:
    try:
        return call(*schemas), None
    except SetupError as error:
        return None, error


@_Remembered
def column_type(schema: ValueSchema) -> pa.DataType:
    """Return the column type for values of a schema.

    Raises:
        SetupError: no column can hold them, or the schema is damaged; the message tells the reason.
    """
    with _damage_said():
        found = _column_type(schema)
        check_depth(found, "a schema")
        return found


def _column_type(schema: ValueSchema) -> pa.DataType:
    if schema.kind in (_T.Avro, _T.Json):
        return record_type(schema)
    if schema.kind == _T.ProtobufNative:
        return message_type(schema)
    if schema.kind == _T.KeyAndValue:
        parts = _key_value(schema)
        return pa.struct([("key", column_type(parts.key)), ("value", column_type(parts.value))])
    return TYPES.get(schema.kind, pa.binary())


@lru_cache(SCHEMAS_KEPT)
def record_name(schema: ValueSchema) -> str:
    """Return the full name of the record of a schema; empty if it has none."""
    try:
        definition = json.loads(schema.definition)
        if schema.kind == _T.ProtobufNative:
            return str(definition["rootMessageTypeName"])
        name, namespace = str(definition["name"]), definition.get("namespace")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
    return f"{namespace}.{name}" if namespace and "." not in name else name


@_Remembered
def decoder(writer: ValueSchema, reader: ValueSchema) -> Decoder:
    """Return a decoder that reads values of the schema ``writer`` into the column of ``reader``.

    Raises:
        SetupError: a schema is damaged, or the kinds of the two cannot be converted.
    """
    with _damage_said():
        return _decoder(writer, reader)


@contextlib.contextmanager
def _damage_said() -> Iterator[None]:
    """Turn any error of the block into a SetupError: a schema is text from outside, and if it is
    not a valid one, any step of reading it may fail.

    Raises:
        SetupError: the block failed.
    """
    try:
        with reading():
            yield
    except Unreadable as failure:
        reason = first_line(failure.error)
        raise SetupError(
            f"a schema is damaged ({reason}); read the topic with schema = bytes"
        ) from None


def _decoder(writer: ValueSchema, reader: ValueSchema) -> Decoder:
    target = column_type(reader)
    if pa.types.is_binary(target):
        return _of_fixed(lambda encoded: DecodedValues(encoded.payloads), target)
    if writer.kind != reader.kind:
        raise SetupError(f"a value of kind {writer.kind_name} is none of kind {reader.kind_name}")
    if reader.kind in (_T.Avro, _T.Json):
        return record_decoder(writer, reader)
    if reader.kind == _T.ProtobufNative:
        return message_decoder(reader)
    if reader.kind == _T.KeyAndValue:
        return _key_value_decoder(_key_value(writer), _key_value(reader), target)
    return _of_fixed(lambda encoded: DECODERS[reader.kind](encoded.payloads), target)


def _of_fixed(read: Read, target: pa.DataType) -> Decoder:
    """Return a decoder of values that have neither arrays nor maps."""
    return Decoder(read, Weigher(fixed_bytes(target)))


@dataclass(frozen=True)
class _KeyValue:
    """The parts of a key-value schema; if ``separated``, the key is the message's key."""

    key: ValueSchema
    value: ValueSchema
    separated: bool


def _key_value(schema: ValueSchema) -> _KeyValue:
    properties = dict(schema.properties)
    parts = _two(schema.definition)
    if parts is None:
        raise SetupError("a key-value schema is damaged: its two parts do not fill it")
    kinds = [_kind_of(properties.get(f"{part}.schema.type", "")) for part in ("key", "value")]
    if _T.KeyAndValue in kinds:
        raise SetupError(
            "a key-value schema inside another has no column; read it with schema = bytes"
        )
    texts = [properties.get(f"{part}.schema.properties") or "{}" for part in ("key", "value")]
    key, value = (
        ValueSchema(kind, part or b"", tuple(sorted(json.loads(text).items())))
        for kind, part, text in zip(kinds, parts, texts, strict=True)
    )
    return _KeyValue(key, value, properties.get("kv.encoding.type", "INLINE") == "SEPARATED")


def _kind_of(name: str) -> int:
    """Return the protocol's number of a kind, by its name in a key-value schema's properties."""
    word = {
        "BOOLEAN": "Bool",
        "BYTES": "NoSchema",
        "NONE": "NoSchema",
        "KEY_VALUE": "KeyAndValue",
        "PROTOBUF_NATIVE": "ProtobufNative",
    }.get(name, name.title().replace("_", ""))
    if word not in _T.Type.keys():  # noqa: SIM118  the enum's wrapper is no mapping
        raise SetupError(f"a key-value schema has a part of unknown kind '{name}'")
    return _T.Type.Value(word)


def _two(data: bytes) -> tuple[bytes | None, bytes | None] | None:
    """Return the two parts of the bytes, each after its length (-1: null); None if they do not fill
    the bytes.
    """
    parts: list[bytes | None] = []
    start = 0
    for _ in range(2):
        if len(data) < start + 4:
            return None
        size = int.from_bytes(data[start : start + 4], "big", signed=True)
        start += 4
        if size < -1 or len(data) < start + max(size, 0):
            return None
        parts.append(None if size == -1 else data[start : start + size])
        start += max(size, 0)
    return (parts[0], parts[1]) if start == len(data) else None


def _key_value_decoder(writer: _KeyValue, reader: _KeyValue, target: pa.DataType) -> Decoder:
    read_key, read_value = decoder(writer.key, reader.key), decoder(writer.value, reader.value)

    def decode(encoded: Encoded) -> DecodedValues:
        bad: dict[int, str] = {}
        present = encoded.payloads.is_valid()
        keys, payloads, broken = _parts(encoded, writer.separated)
        bad.update(dict.fromkeys(broken, "its key and value do not fill it"))
        key, value = read_key.read(Encoded(keys)), read_value.read(Encoded(payloads))
        bad |= {row: f"its key: {why}" for row, why in key.bad.items()} | value.bad
        rows = pa.array([number not in bad for number in range(len(payloads))]) if bad else None
        is_valid = present if rows is None else pc.and_(present, rows)
        columns = [
            decoded.values.cast(field.type)
            for decoded, field in zip((key, value), target, strict=True)
        ]
        return DecodedValues(
            pa.StructArray.from_arrays(columns, fields=list(target), mask=pc.invert(is_valid)), bad
        )

    return Decoder(
        decode, _pair_weigher(read_key.weigh, read_value.weigh, separated=writer.separated)
    )


def _pair_weigher(of_key: Weigher, of_value: Weigher, *, separated: bool) -> Weigher:
    """Return the weights of keys and values together."""

    def walk(encoded: Encoded, weights: Weights) -> None:
        keys, payloads, _ = _parts(encoded, separated)
        of_key.add(Encoded(keys), weights)
        of_value.add(Encoded(payloads), weights)

    fixed, rate = of_key.fixed_bytes + of_value.fixed_bytes, max(of_key.rate, of_value.rate)
    return Weigher(fixed, rate, walk, has_keys=separated)


def _parts(encoded: Encoded, separated: bool) -> tuple[pa.BinaryArray, pa.BinaryArray, list[int]]:
    """Return keys, values, and the rows whose bytes are not a key and a value."""
    payloads = encoded.payloads
    if separated:
        return (
            pa.nulls(len(payloads), pa.binary()) if encoded.keys is None else encoded.keys,
            payloads,
            [],
        )
    pairs = [None if payload is None else _two(payload) for payload in payloads.to_pylist()]
    present = payloads.is_valid().to_pylist()
    broken = [number for number, pair in enumerate(pairs) if pair is None and present[number]]
    keys = pa.array([None if pair is None else pair[0] for pair in pairs], pa.binary())
    return (
        keys,
        pa.array([None if pair is None else pair[1] for pair in pairs], pa.binary()),
        broken,
    )
