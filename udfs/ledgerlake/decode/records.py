"""Records of Avro and JSON schemas. The registry defines both in Avro's schema language.

| Avro | column |
|---|---|
| record; array; map | struct; array; map with ``string`` keys |
| ``[null, T]`` | T, nullable |
| a union of int and long, or of float and double | the wider type |
| string, enum | ``string`` |
| bytes, fixed | ``binary``; ``string`` in JSON: Java's clients write base64, others the text |
| decimal of at most 38 digits | ``decimal`` (Avro only) |
| date | ``date`` |
| timestamp-millis and -micros | ``timestamp`` |
| local-timestamp-millis and -micros | ``timestamp_ntz`` |
| other logical types | the column of the underlying type |

Other unions and recursive records have no column; read such a topic with ``schema = bytes``.

Rules kept here:
  - Regular Avro values are read by a compiled loop (see ``avro``), all others by fastavro, after a
    walk that refuses what does not fit its schema (see ``avro_weights``).
  - What a value takes when it is decoded is counted before (see ``weights``).
  - An Avro value must end where its bytes end. Sizes in a damaged value allocate no memory: each
    item needs bytes, and a schema with items of no bytes is refused.
  - A schema whose defaults stand for too much is refused: in a short text, defaults that each use
    another one ten times can stand for more than any machine can hold.
  - A decimal is judged by its size before it becomes a number.
  - JSON is parsed by Arrow, one batch at a time. If a batch has an unusual value, each value is
    parsed alone, by the same rules: a number becomes its text if the schema has a string, and
    nothing else is converted. Both are given the same bytes (see ``json_text``).
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from ledgerlake.decode.avro import avro_reader
from ledgerlake.decode.avro_types import named_types, not_null, short_name
from ledgerlake.decode.avro_weights import avro_misfits, avro_weigher
from ledgerlake.decode.columns import COLUMNS_MOST, DecodedValues, Decoder, build, decode_rows, too_wide, without
from ledgerlake.decode.json_text import Number, parse_json, without_deep
from ledgerlake.decode.json_weights import json_weigher
from ledgerlake.decode.loop_columns import with_loop
from ledgerlake.decode.schema import TIMESTAMP
from ledgerlake.decode.weights import PART_BYTES
from ledgerlake.errors import SetupError
from ledgerlake.pb import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.decode.columns import Encoded, Read
    from ledgerlake.wire.value_schema import ValueSchema

_PRIMITIVES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
}

# Names that a schema gives no type, in any namespace.
_RESERVED = {*_PRIMITIVES, "null", "record", "error", "enum", "array", "map", "union", "fixed"}

# The units in the encoded values; Spark's own timestamps have microseconds.
_LOGICAL: dict[tuple[str, str], pa.DataType] = {
    ("int", "date"): pa.date32(),
    ("long", "timestamp-millis"): pa.timestamp("ms", tz="UTC"),
    ("long", "timestamp-micros"): TIMESTAMP,
    ("long", "local-timestamp-millis"): pa.timestamp("ms"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
}

_WIDER = [({"int", "long"}, "long"), ({"float", "double"}, "double")]
_DECIMAL_DIGITS = 38

# The bytes of a decimal beside those that only repeat its sign.
_DECIMAL_BYTES = 16

# Decimals are read by ``_decimal``: fastavro's own reader takes quadratic time, and rounds.
_DECIMAL = "ledgerlake-decimal"
_EXACT = Context(prec=_DECIMAL_DIGITS)
_POWERS = [10**digits for digits in range(_DECIMAL_DIGITS + 1)]

# So much of a number is in an error.
_SHOWN_CHARACTERS = 50

# A value of a byte or two stands for a symbol.
_SYMBOL_MOST = 1000

# What the defaults of a schema take together, as values and texts.
_DEFAULTS_MOST_BYTES = 8 * 1024 * 1024


def record_type(schema: ValueSchema) -> pa.DataType:
    """Return the column type of an Avro or JSON schema.

    Raises:
        SetupError: the schema has no column.
    """
    physical = _Types(schema).of(_parse(schema.definition))
    if schema.kind == pb.Schema.Avro:
        _compiled(schema)
    return _for_spark(physical)


def record_decoder(writer: ValueSchema, reader: ValueSchema) -> Decoder:
    """Return a decoder that reads values of one version as those of another.

    Raises:
        SetupError: a version is damaged, or has no column.
    """
    physical = _Types(reader).of(_parse(reader.definition))
    if reader.kind == pb.Schema.Json:
        return Decoder(partial(_decode_json, physical), json_weigher(physical))
    _Types(writer).of(_parse(writer.definition))
    ours, theirs = _compiled(reader), _compiled(writer)
    return Decoder(_avro_decoder(physical, writer, theirs, ours), avro_weigher(theirs, ours))


def _avro_decoder(physical: pa.DataType, writer: ValueSchema, theirs: Any, ours: Any) -> Read:
    if ours != theirs:
        return _by_fastavro(physical, theirs, ours)
    decode = _by_fastavro(physical, theirs, None)
    loop = avro_reader(_parse(writer.definition), physical) if pa.types.is_struct(physical) else None
    if loop is None:
        return decode
    return with_loop(loop.read, lambda records: records.cast(_for_spark(physical)), decode)


def _parse(definition: bytes) -> Any:
    try:
        return json.loads(definition)
    except ValueError as error:
        raise SetupError(f"a schema's definition is not JSON: {error}") from None


def _compiled(schema: ValueSchema) -> Any:
    # Every worker imports this module, and few read Avro.
    import fastavro
    from fastavro.read import LOGICAL_READERS

    LOGICAL_READERS.update(dict.fromkeys((f"bytes-{_DECIMAL}", f"fixed-{_DECIMAL}"), _decimal))
    try:
        parsed = fastavro.parse_schema(_plain(_parse(schema.definition)))
        _Defaults(named_types(parsed)).read(parsed)
        return parsed
    except (
        fastavro.schema.SchemaParseException,
        fastavro.schema.UnknownType,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise SetupError(f"a schema's definition is no Avro schema: {error}") from None


def _plain(node: Any) -> Any:
    """Return a schema without logical types, but for decimals that fit into a column."""
    if isinstance(node, list):
        return [_plain(branch) for branch in node]
    if not isinstance(node, dict):
        return node
    plain = {name: value if name == "default" else _plain(value) for name, value in node.items()}
    if _is_decimal(node):
        plain["logicalType"] = _DECIMAL
    else:
        plain.pop("logicalType", None)
    return plain


@dataclass
class _Defaults:
    """Replaces the defaults in a parsed schema by values as they are read: in JSON, bytes are texts,
    and the default of a record leaves out fields that have one. fastavro takes them as they are.
    """

    named: dict[str, Any]
    left_bytes: int = _DEFAULTS_MOST_BYTES

    def read(self, node: Any) -> None:
        """Replace the defaults of a type.

        Raises:
            SetupError: the defaults of the schema stand for too much.
        """
        if isinstance(node, list):
            for branch in node:
                self.read(branch)
        if not isinstance(node, dict):
            return
        for inner in ("type", "items", "values"):
            self.read(node.get(inner))
        for field in node.get("fields", ()):
            self.read(field["type"])
            if "default" in field:
                field["default"] = self._value(field["type"], field["default"])

    def _value(self, node: Any, value: Any) -> Any:
        """Return the value that a default in a schema stands for."""
        self.left_bytes -= PART_BYTES + (len(value) if isinstance(value, (str, bytes)) else 0)
        if self.left_bytes < 0:
            raise SetupError(
                f"the defaults of a schema stand for more than {_DEFAULTS_MOST_BYTES} bytes; read it with schema = bytes"
            )
        if value is None:
            return None
        node = not_null(node, self.named)
        kind = node["type"] if isinstance(node, dict) else node
        if kind in ("bytes", "fixed") and isinstance(value, str):
            data = value.encode("latin-1")
            return _decimal(data, node) if isinstance(node, dict) and "logicalType" in node else data
        if kind in ("float", "double"):
            return float(value)
        if kind == "array":
            return [self._value(node["items"], item) for item in value]
        if kind == "map":
            return {name: self._value(node["values"], item) for name, item in value.items()}
        if kind in ("record", "error"):
            return {
                field["name"]: self._value(field["type"], value.get(field["name"], field.get("default")))
                for field in node["fields"]
            }
        return value


def _is_decimal(node: dict[str, Any]) -> bool:
    digits, scale = node.get("precision"), node.get("scale", 0)
    sizes = (
        isinstance(digits, int) and isinstance(scale, int) and 0 < digits <= _DECIMAL_DIGITS and 0 <= scale <= digits
    )
    return node.get("logicalType") == "decimal" and sizes


def _decimal(data: bytes, writer: dict[str, Any], _reader: Any = None) -> Decimal:
    """Return the number of a decimal's bytes.

    Raises:
        ValueError: it has more digits than its schema allows.
    """
    digits, scale = writer["precision"], writer.get("scale", 0)
    if len(data) > _DECIMAL_BYTES:
        sign = b"\xff" if data[:1] >= b"\x80" else b"\0"
        significant = data.lstrip(sign)
        if len(significant) > _DECIMAL_BYTES:
            raise ValueError(f"a decimal has {len(significant)} bytes, more than {digits} digits take")
        data = sign + significant
    number = int.from_bytes(data, "big", signed=True)
    if not -_POWERS[digits] < number < _POWERS[digits]:
        raise ValueError(f"the decimal {number} has more than {digits} digits")
    return _EXACT.scaleb(number, -scale)


class _Types:
    """Converts the Avro types of one schema to Arrow's; knows the schema's named types."""

    def __init__(self, schema: ValueSchema) -> None:
        self._is_json = schema.kind == pb.Schema.Json
        self._named: dict[str, pa.DataType] = {}
        self._definitions: dict[str, Any] = {}
        self._named_empty: set[str] = set()
        self._widths: dict[str, int] = {}
        self._columns = 0
        self._open: list[str] = []

    def of(self, node: Any) -> pa.DataType:
        if isinstance(node, list):
            return self._union(node)
        if isinstance(node, str):
            return self._by_name(node)
        kind = node.get("type") if isinstance(node, dict) else None
        if isinstance(kind, (dict, list)):
            return self.of(kind)
        if kind in ("record", "error"):
            return self._record(node)
        if kind == "array":
            return pa.list_(self._item(node.get("items")))
        if kind == "map":
            return pa.map_(pa.string(), self.of(node.get("values")))
        if kind in ("enum", "fixed"):
            return self._name(node, self._enum_or_fixed(node))
        if _is_decimal(node) and kind == "bytes" and not self._is_json:
            return pa.decimal128(node["precision"], node.get("scale", 0))
        return _LOGICAL.get((str(kind), str(node.get("logicalType"))), self._by_name(str(kind)))

    def _by_name(self, name: str) -> pa.DataType:
        if name in _PRIMITIVES:
            return pa.string() if name == "bytes" and self._is_json else _PRIMITIVES[name]
        if short_name(name) in self._open:
            raise SetupError(
                f"the record {name} of a schema holds itself, which no column can; read it with schema = bytes"
            )
        arrow_type = self._named.get(short_name(name))
        self._count(self._widths.get(short_name(name), 0))
        if arrow_type is None:
            raise SetupError(f"a schema has the type '{name}', which has no column; read it with schema = bytes")
        return arrow_type

    def _record(self, node: dict[str, Any]) -> pa.DataType:
        before = self._columns
        self._open.append(short_name(str(node.get("name"))))
        fields = []
        for field in node.get("fields", ()):
            self._count(1)
            fields.append((str(field["name"]), self.of(field["type"])))
        self._widths[self._open.pop()] = self._columns - before
        return self._name(node, pa.struct(fields))

    def _count(self, columns: int) -> None:
        """Add to the number of columns; a named type counts at each place where it is named."""
        self._columns += columns
        if self._columns > COLUMNS_MOST:
            raise too_wide()

    def _name(self, node: dict[str, Any], arrow_type: pa.DataType) -> pa.DataType:
        name = short_name(str(node.get("name")))
        if name in _RESERVED:
            raise SetupError(f"a schema gives a type the name {name}, which is Avro's own; read it with schema = bytes")
        if self._definitions.setdefault(name, node) != node:
            raise SetupError(f"a schema has two types of the name {name}; read it with schema = bytes")
        self._named[name] = arrow_type
        if self._takes_no_bytes(node):
            self._named_empty.add(name)
        return arrow_type

    def _takes_no_bytes(self, node: Any) -> bool:
        """Return whether an item may be encoded in no bytes: fixed bytes of size 0, or a record
        with only such fields.
        """
        if isinstance(node, str):
            return short_name(node) in self._named_empty
        if not isinstance(node, dict):
            return False
        if node.get("type") == "fixed":
            return not node.get("size")
        if node.get("type") in ("record", "error"):
            return all(self._takes_no_bytes(field["type"]) for field in node.get("fields", ()))
        return isinstance(node.get("type"), (str, dict)) and self._takes_no_bytes(node["type"])

    def _enum_or_fixed(self, node: dict[str, Any]) -> pa.DataType:
        if node["type"] == "enum":
            if any(len(str(symbol)) > _SYMBOL_MOST for symbol in node.get("symbols", ())):
                raise SetupError(
                    f"a schema has a symbol of more than {_SYMBOL_MOST} characters; read it with schema = bytes"
                )
            return pa.string()
        size = node.get("size")
        if not isinstance(size, int) or size < 0:
            raise SetupError(f"a schema has a fixed type of the size {size}; read it with schema = bytes")
        if self._is_json:
            return pa.string()
        return pa.decimal128(node["precision"], node.get("scale", 0)) if _is_decimal(node) else pa.binary()

    def _item(self, node: Any) -> pa.DataType:
        arrow_type = self.of(node)
        if not self._is_json and self._takes_no_bytes(node):
            raise SetupError("a schema has an array of items without bytes; read it with schema = bytes")
        return arrow_type

    def _union(self, branches: list[Any]) -> pa.DataType:
        others = [branch for branch in branches if branch != "null"]
        if len(others) == 1:
            return self.of(others[0])
        for kinds, wider in _WIDER:
            if all(isinstance(branch, str) for branch in others) and set(others) == kinds:
                return _PRIMITIVES[wider]
        raise SetupError(
            f"a schema has a union of {len(others)} types, which no column can hold; read it with schema = bytes"
        )


def _for_spark(arrow_type: pa.DataType) -> pa.DataType:
    """Return an Arrow type with times in microseconds."""
    if pa.types.is_struct(arrow_type):
        return pa.struct([(field.name, _for_spark(field.type)) for field in arrow_type])
    if pa.types.is_map(arrow_type):
        return pa.map_(pa.string(), _for_spark(arrow_type.item_type))
    if pa.types.is_list(arrow_type):
        return pa.list_(_for_spark(arrow_type.value_type))
    return pa.timestamp("us", arrow_type.tz) if pa.types.is_timestamp(arrow_type) else arrow_type


def _by_fastavro(physical: pa.DataType, writer: Any, reader: Any) -> Read:
    import fastavro

    misfits = avro_misfits(writer)

    def read(payload: bytes) -> Any:
        return fastavro.schemaless_reader(io.BytesIO(payload), writer, reader)

    def decode(encoded: Encoded) -> DecodedValues:
        payloads = encoded.payloads
        wrong = np.flatnonzero(misfits(payloads) & payloads.is_valid().to_numpy(False)).tolist()
        rows, bad = decode_rows(without(payloads, wrong), read)
        bad |= dict.fromkeys(wrong, "its bytes do not fit the schema that it was written with")
        return DecodedValues(build(rows, physical, _for_spark(physical), bad), bad)

    return decode


def _decode_json(physical: pa.DataType, encoded: Encoded) -> DecodedValues:
    payloads, deep = without_deep(encoded.payloads)
    together = _parse_together(payloads, physical) if _is_simple(physical) else None
    if together is not None:
        return DecodedValues(together, deep)
    conform = _conformer(physical)
    rows, bad = decode_rows(payloads, lambda payload: conform(parse_json(payload)))
    return DecodedValues(build(rows, physical, _for_spark(physical), bad), bad | deep)


_JSON_SPACES = " \t\n\r"

# From here on a double is rounded to a float that is infinite.
_FLOAT_LIMIT = (2 - 2**-24) * 2.0**127


def _is_simple(arrow_type: pa.DataType) -> bool:
    """Return whether Arrow's JSON reader gives the same values as ours."""
    return pa.types.is_struct(arrow_type) and arrow_type.num_fields > 0 and all(map(_is_simple_part, arrow_type))


def _is_simple_part(one: pa.Field) -> bool:
    if pa.types.is_list(one.type):
        return _is_simple_part(one.type.value_field)
    return _is_simple(one.type) or one.type in (
        pa.bool_(),
        pa.int32(),
        pa.int64(),
        pa.float32(),
        pa.float64(),
        pa.string(),
    )


def _parse_together(payloads: pa.BinaryArray, physical: pa.DataType) -> pa.Array | None:
    """Parse all values by one call; return None if one of them is not exactly one object.

    The values are joined by line breaks, which a JSON string cannot contain, and each value begins
    and ends with braces. So if there are as many objects as values, each value is one object.
    """
    present = payloads.drop_null()
    if not len(present):
        return None
    try:
        texts = pc.utf8_trim(present.cast(pa.string()), _JSON_SPACES)
        if not pc.all(pc.and_(pc.starts_with(texts, "{"), pc.ends_with(texts, "}"))).as_py():
            return None
        data = pc.binary_join(pa.ListArray.from_arrays([0, len(texts)], texts), "\n")[0].as_buffer()
        table = pj.read_json(
            pa.BufferReader(data),
            read_options=pj.ReadOptions(use_threads=False, block_size=data.size + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema(list(_with_doubles(physical))),
                newlines_in_values=True,
                unexpected_field_behavior="ignore",
            ),
        )
    except (pa.ArrowException, ValueError):
        return None
    if table.num_rows != len(texts):
        return None
    records = table.select([field.name for field in physical]).to_struct_array().combine_chunks().cast(physical)
    if _has_infinity(records):
        return None
    if payloads.null_count == 0:
        return records
    valid = payloads.is_valid().to_numpy(False)
    rows = np.where(valid, np.cumsum(valid) - 1, 0)
    return records.take(pa.array(rows, mask=~valid))


def _with_doubles(one: pa.DataType) -> pa.DataType:
    """Return a type with doubles in place of floats: a number becomes a double first, however it is
    parsed, so that it is rounded alike.
    """
    if pa.types.is_struct(one):
        return pa.struct([field.with_type(_with_doubles(field.type)) for field in one])
    if pa.types.is_list(one):
        return pa.list_(one.value_field.with_type(_with_doubles(one.value_type)))
    return pa.float64() if pa.types.is_float32(one) else one


def _has_infinity(values: pa.Array) -> bool:
    """Return whether a number was too large for its column, at any depth."""
    if pa.types.is_struct(values.type):
        return any(map(_has_infinity, values.flatten()))
    if pa.types.is_list(values.type):
        return _has_infinity(values.flatten())
    return pa.types.is_floating(values.type) and bool(pc.any(pc.is_inf(values)).as_py())


def _conformer(arrow_type: pa.DataType) -> Callable[[Any], Any]:
    """Return a function that makes a parsed JSON value fit a column, or raises ValueError."""
    if pa.types.is_struct(arrow_type):
        conformers = {field.name: _conformer(field.type) for field in arrow_type}
        return _or_null(dict, lambda value: {name: conform(value.get(name)) for name, conform in conformers.items()})
    if pa.types.is_map(arrow_type):
        item = _conformer(arrow_type.item_type)
        return _or_null(dict, lambda value: [(name, item(element)) for name, element in value.items()])
    if pa.types.is_list(arrow_type):
        item = _conformer(arrow_type.value_type)
        return _or_null(list, lambda value: [item(element) for element in value])
    if pa.types.is_string(arrow_type):
        return _or_null(str, str)
    if pa.types.is_boolean(arrow_type):
        return _or_null(bool, lambda value: value)
    return _or_null(Number, partial(_real, arrow_type) if pa.types.is_floating(arrow_type) else _whole)


def _real(arrow_type: pa.DataType, number: Number) -> float:
    value = float(number)
    limit = _FLOAT_LIMIT if pa.types.is_float32(arrow_type) else math.inf
    # A column holds infinity itself.
    if abs(value) >= limit and not number.endswith("Infinity"):
        raise ValueError(f"{number[:_SHOWN_CHARACTERS]} is too large for a column of {arrow_type}")
    return value


def _whole(number: Number) -> int:
    if not number.removeprefix("-").isdigit():
        raise ValueError(f"{number[:_SHOWN_CHARACTERS]} is no whole number")
    return int(number)


def _or_null(kind: type, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def conform(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, kind):
            name = "number" if isinstance(value, Number) else type(value).__name__
            raise ValueError(f"a {name} stands where another type belongs")
        return convert(value)

    return conform
