"""Values by the schemas of Pulsar's registry: bytes in, Arrow columns out.

A message says by which version of its topic's schema it was written (``schema_version``). It is read as the schema that the
whole read has chosen, the reader's:

    primitives      big-endian, as Pulsar's clients write them; kinds that differ do not mix
    Avro            by Avro's own rules of resolution: new fields take their defaults, dropped ones go, numbers widen
    JSON            fields by name: absent ones are null, unknown ones go
    key and value   a struct of both; the key from the message's own where it is ``SEPARATED``
    Protobuf        by the descriptor in the schema (``PROTOBUF_NATIVE``): fields by number, as Protobuf does

| kind | column |
|---|---|
| none, BYTES, PROTOBUF (whose registry entry has no descriptor) | ``binary`` |
| STRING; BOOLEAN; INT8 to INT64; FLOAT, DOUBLE | ``string``; ``boolean``; integers; ``float``, ``double`` |
| DATE, TIME, TIMESTAMP, INSTANT | ``timestamp`` |
| LOCAL_DATE; LOCAL_TIME; LOCAL_DATE_TIME | ``date``; ``long``, nanoseconds of the day; ``timestamp_ntz`` |
| AVRO, JSON | a struct (see ``records``) |
| KEY_VALUE | a struct of ``key`` and ``value`` |
| PROTOBUF_NATIVE | a struct (see ``protobufs``) |

A value that does not fit its schema to the last byte is bad, with the reason why; the others of its batch are not touched by it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.decode.schema import TIMESTAMP
from ledgerlake.errors import SetupError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.value_schema import ValueSchema

if TYPE_CHECKING:
    from numpy.typing import NDArray

_T = pb.Schema

# Of one schema, nested ones included. A few lines that name each other twice over can stand for more than any machine holds.
COLUMNS_MOST = 10_000


@dataclass
class DecodedValues:
    """A column, null where a value is null or bad; ``bad`` says by row what is wrong."""

    values: pa.Array
    bad: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoded:
    """What values are decoded from: the payloads, and the messages' own keys; null where there is none."""

    payloads: pa.BinaryArray
    keys: pa.BinaryArray | None = None


# Values of one writer's schema as the reader's.
Decoder = Callable[[Encoded], DecodedValues]


@cache
def column_type(schema: ValueSchema) -> pa.DataType:
    """The column that values of a schema become.

    Raises:
        SetupError: no column can hold them, or the schema is damaged; says what is in the way.
    """
    with _damage_said():
        return _column_type(schema)


def _column_type(schema: ValueSchema) -> pa.DataType:
    if schema.kind in (_T.Avro, _T.Json):
        from ledgerlake.decode.records import record_type

        return record_type(schema)
    if schema.kind == _T.ProtobufNative:
        from ledgerlake.decode.protobufs import message_type

        return message_type(schema)
    if schema.kind == _T.KeyAndValue:
        parts = _key_value(schema)
        return pa.struct([("key", column_type(parts.key)), ("value", column_type(parts.value))])
    return _PRIMITIVES.get(schema.kind, pa.binary())


@cache
def decoder(writer: ValueSchema, reader: ValueSchema) -> Decoder:
    """What reads values that were written by one schema as those of another.

    Raises:
        SetupError: one of the two is damaged, or their kinds do not mix.
    """
    with _damage_said():
        return _decoder(writer, reader)


@contextlib.contextmanager
def _damage_said() -> Iterator[None]:
    """A schema is text from outside: where one stands that is no schema, any step of reading it may fail.

    Raises:
        SetupError: it did.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        reason = _first_line(error)
        raise SetupError(f"a schema is damaged ({reason}); read the topic with schema = bytes") from None


def _decoder(writer: ValueSchema, reader: ValueSchema) -> Decoder:
    target = column_type(reader)
    if pa.types.is_binary(target):
        return lambda encoded: DecodedValues(encoded.payloads)
    if writer.kind != reader.kind:
        raise SetupError(f"a value of kind {writer.kind_name} is none of kind {reader.kind_name}")
    if reader.kind in (_T.Avro, _T.Json):
        from ledgerlake.decode.records import record_decoder

        return record_decoder(writer, reader)
    if reader.kind == _T.ProtobufNative:
        from ledgerlake.decode.protobufs import message_decoder

        return message_decoder(reader)
    if reader.kind == _T.KeyAndValue:
        return _key_value_decoder(_key_value(writer), _key_value(reader), target)
    return lambda encoded: _DECODERS[reader.kind](encoded.payloads)


def too_wide() -> SetupError:
    return SetupError(f"a schema has more than {COLUMNS_MOST} columns; read it with schema = bytes")


def build(rows: list[Any], physical: pa.DataType, target: pa.DataType, bad: dict[int, str]) -> pa.Array:
    """A column of Python values; those that do not fit are noted as bad and null."""
    try:
        return pa.array(rows, physical).cast(target)
    except (TypeError, ValueError, OverflowError):
        pass
    fitting = list(rows)
    for number, row in enumerate(rows):
        try:
            pa.array([row], physical).cast(target)
        except (TypeError, ValueError, OverflowError) as error:
            bad[number], fitting[number] = _first_line(error), None
    return pa.array(fitting, physical).cast(target)


def decode_rows(payloads: pa.BinaryArray, read: Callable[[bytes], Any]) -> tuple[list[Any], dict[int, str]]:
    """Values one by one, None for null and bad ones; and what is wrong with those."""
    rows: list[Any] = []
    bad: dict[int, str] = {}
    for number, payload in enumerate(payloads.to_pylist()):
        value = None
        if payload is not None:
            try:
                value = read(payload)
            except Exception as error:  # whatever a library finds wrong with bytes from outside
                bad[number] = _first_line(error)
        rows.append(value)
    return rows, bad


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


_NUMBERS: dict[int, tuple[str, pa.DataType]] = {
    _T.Int8: (">i1", pa.int8()),
    _T.Int16: (">i2", pa.int16()),
    _T.Int32: (">i4", pa.int32()),
    _T.Int64: (">i8", pa.int64()),
    _T.Float: (">f4", pa.float32()),
    _T.Double: (">f8", pa.float64()),
    _T.LocalTime: (">i8", pa.int64()),
}

_PRIMITIVES: dict[int, pa.DataType] = {
    **{kind: arrow_type for kind, (_, arrow_type) in _NUMBERS.items()},
    _T.String: pa.string(),
    _T.Bool: pa.bool_(),
    _T.Date: TIMESTAMP,
    _T.Time: TIMESTAMP,
    _T.Timestamp: TIMESTAMP,
    _T.Instant: TIMESTAMP,
    _T.LocalDate: pa.date32(),
    _T.LocalDateTime: pa.timestamp("us"),
}


def _strings(payloads: pa.BinaryArray) -> DecodedValues:
    try:
        return DecodedValues(payloads.cast(pa.string()))
    except pa.ArrowInvalid:
        rows, bad = decode_rows(payloads, lambda one: one.decode())
        return DecodedValues(pa.array(rows, pa.string()), bad)


def _number(kind: int) -> Callable[[pa.BinaryArray], DecodedValues]:
    dtype, arrow_type = np.dtype(_NUMBERS[kind][0]), _NUMBERS[kind][1]

    def decode(payloads: pa.BinaryArray) -> DecodedValues:
        found, present, bad = _fixed(payloads, dtype)
        return DecodedValues(pa.array(found.astype(dtype.newbyteorder("=")), arrow_type, mask=~present), bad)

    return decode


def _booleans(payloads: pa.BinaryArray) -> DecodedValues:
    found, present, bad = _fixed(payloads, np.dtype("u1"))
    return DecodedValues(pa.array(found != 0, pa.bool_(), mask=~present), bad)


def _milliseconds(payloads: pa.BinaryArray) -> DecodedValues:
    found, present, bad = _fixed(payloads, np.dtype(">i8"))
    return _in_microseconds(found.astype(np.int64), 1000, present, bad, TIMESTAMP)


def _instants(payloads: pa.BinaryArray) -> DecodedValues:
    found, present, bad = _fixed(payloads, np.dtype([("seconds", ">i8"), ("nanoseconds", ">i4")]))
    more = found["nanoseconds"].astype(np.int64) // 1000
    return _in_microseconds(found["seconds"].astype(np.int64), 10**6, present, bad, TIMESTAMP, more)


def _local_dates(payloads: pa.BinaryArray) -> DecodedValues:
    found, present, bad = _fixed(payloads, np.dtype(">i8"))
    days = found.astype(np.int64)
    _refuse(np.abs(days) > 2**31 - 1, "the day is out of range", present, bad)
    return DecodedValues(pa.array(np.where(present, days, 0).astype(np.int32), pa.date32(), mask=~present), bad)


def _local_date_times(payloads: pa.BinaryArray) -> DecodedValues:
    found, present, bad = _fixed(payloads, np.dtype([("day", ">i8"), ("nanoseconds", ">i8")]))
    more = found["nanoseconds"].astype(np.int64) // 1000
    return _in_microseconds(found["day"].astype(np.int64), 86_400 * 10**6, present, bad, pa.timestamp("us"), more)


def _in_microseconds(
    values: NDArray[np.int64],
    unit: int,
    present: NDArray[np.bool_],
    bad: dict[int, str],
    target: pa.DataType,
    more: NDArray[np.int64] | int = 0,
) -> DecodedValues:
    _refuse(np.abs(values) > (2**63 - 1) // unit - 1, "the time is out of range", present, bad)
    microseconds = np.where(present, values, 0) * unit + np.where(present, more, 0)
    return DecodedValues(pa.array(microseconds, pa.int64(), mask=~present).cast(target), bad)


def _refuse(wrong: NDArray[np.bool_], why: str, present: NDArray[np.bool_], bad: dict[int, str]) -> None:
    wrong = wrong & present
    bad.update(dict.fromkeys(np.flatnonzero(wrong).tolist(), why))
    present &= ~wrong


def _fixed(payloads: pa.BinaryArray, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[np.bool_], dict[int, str]]:
    """Values of one size: as numbers, which of them there are, and what is wrong with those of another size."""
    count, width = len(payloads), dtype.itemsize
    present = np.ones(count, dtype=bool) if payloads.null_count == 0 else payloads.is_valid().to_numpy(False)
    offsets = np.frombuffer(payloads.buffers()[1], dtype=np.int32)[payloads.offset : payloads.offset + count + 1]
    wrong = np.diff(offsets) != width
    bad: dict[int, str] = {}
    _refuse(wrong, f"a value of this kind has {width} bytes", present, bad)
    data = np.frombuffer(payloads.buffers()[2] or b"", dtype=np.uint8)
    found = np.zeros((count, width), dtype=np.uint8)
    found[present] = data[offsets[:-1][present][:, None] + np.arange(width)]
    return found.reshape(-1).view(dtype), present, bad


_DECODERS: dict[int, Callable[[pa.BinaryArray], DecodedValues]] = {
    **{kind: _number(kind) for kind in _NUMBERS},
    _T.String: _strings,
    _T.Bool: _booleans,
    _T.Date: _milliseconds,
    _T.Time: _milliseconds,
    _T.Timestamp: _milliseconds,
    _T.Instant: _instants,
    _T.LocalDate: _local_dates,
    _T.LocalDateTime: _local_date_times,
}


@dataclass(frozen=True)
class _KeyValue:
    """A key-value schema taken apart; ``separated``: the key is the message's own."""

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
        raise SetupError("a key-value schema inside another has no column; read it with schema = bytes")
    texts = [properties.get(f"{part}.schema.properties") or "{}" for part in ("key", "value")]
    key, value = (
        ValueSchema(kind, part or b"", tuple(sorted(json.loads(text).items())))
        for kind, part, text in zip(kinds, parts, texts, strict=True)
    )
    return _KeyValue(key, value, properties.get("kv.encoding.type", "INLINE") == "SEPARATED")


def _kind_of(name: str) -> int:
    """The protocol's number of a kind that stands by name in a key-value schema's properties."""
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
    """Two parts, each with its length in front (-1: null), that fill the bytes; None where they do not."""
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
        keys, payloads = encoded.keys, encoded.payloads
        if not writer.separated:
            pairs = [None if one is None else _two(one) for one in payloads.to_pylist()]
            broken = [number for number, pair in enumerate(pairs) if pair is None and present[number].as_py()]
            bad.update(dict.fromkeys(broken, "its key and value do not fill it"))
            keys = pa.array([None if pair is None else pair[0] for pair in pairs], pa.binary())
            payloads = pa.array([None if pair is None else pair[1] for pair in pairs], pa.binary())
        key = read_key(Encoded(pa.nulls(len(payloads), pa.binary()) if keys is None else keys))
        value = read_value(Encoded(payloads))
        bad |= {row: f"its key: {why}" for row, why in key.bad.items()} | value.bad
        rows = pa.array([number not in bad for number in range(len(payloads))]) if bad else None
        whole = present if rows is None else pc.and_(present, rows)
        columns = [one.values.cast(part.type) for one, part in zip((key, value), target, strict=True)]
        return DecodedValues(pa.StructArray.from_arrays(columns, fields=list(target), mask=pc.invert(whole)), bad)

    return decode
