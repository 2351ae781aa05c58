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
    item needs bytes, and a schema with items of no bytes, or with many parts of no bytes, is
    refused.
  - A schema whose defaults stand for too much is refused: in a short text, defaults that each use
    another one ten times can stand for more than any machine can hold.
  - A decimal is judged by its size before it becomes a number.
  - JSON is parsed by Arrow, one batch at a time. If a batch has an unusual value, each value is
    parsed alone, by the same rules: a number becomes its text if the schema has a string, and
    nothing else is converted. Both are given the same bytes (see ``json_text``).
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from dataclasses import dataclass, field
from decimal import Context, Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from ledgerlake.decode.columns import (
    COLUMNS_MOST,
    DecodedValues,
    Decoder,
    DoesNotFit,
    build,
    check_depth,
    decode_rows,
    has_column,
    too_wide,
    without,
)
from ledgerlake.decode.loop_columns import with_loop
from ledgerlake.decode.schema import TIMESTAMP
from ledgerlake.decode.weights import PART_BYTES
from ledgerlake.errors import SetupError
from ledgerlake.outside import Unreadable, reading
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.values.avro import avro_reader
from ledgerlake.values.avro_types import NAMED, named_types, not_null, short_name, with_full_names
from ledgerlake.values.avro_units import in_written_units
from ledgerlake.values.avro_weights import avro_misfits, avro_weigher
from ledgerlake.values.json_text import Number, parse_json, without_deep
from ledgerlake.values.json_weights import json_weigher

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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

# A byte of an item stands for at most so many parts without bytes: each takes time.
_EMPTY_PARTS_MOST = 8

# What a schema says to fastavro. Other names are its own, such as ``__named_schemas``.
_AVRO_NAMES = frozenset(
    (
        "type",
        "name",
        "namespace",
        "aliases",
        "fields",
        "items",
        "values",
        "symbols",
        "size",
        "default",
        "precision",
        "scale",
    )
)

# Pulsar's brokers and clients take any default, and fastavro refuses a schema for a wrong one. So
# it sees none until they are judged here.
_UNREAD_DEFAULT = "ledgerlake-default"

# The Python classes of defaults. Bytes have one class before they are read and others after that.
_DEFAULT_CLASSES: dict[str, Any] = {
    "boolean": bool,
    "int": int,
    "long": int,
    "string": str,
    "enum": str,
    "bytes": (str, bytes, Decimal),
    "fixed": (str, bytes, Decimal),
    "array": list,
    "map": dict,
    "record": dict,
    "error": dict,
}

# What the defaults of a schema take together, as values and texts.
_DEFAULTS_MOST_BYTES = 8 * 1024 * 1024


def record_type(schema: ValueSchema) -> pa.DataType:
    """Return the column type of an Avro or JSON schema.

    Raises:
        SetupError: the schema has no column.
    """
    physical = _Types(schema).of(_parse(schema.definition))
    check_depth(physical, "a schema")
    if schema.kind == pb.Schema.Avro:
        _compiled(schema)
    return _for_spark(physical)


def record_decoder(writer: ValueSchema, reader: ValueSchema) -> Decoder:
    """Return a decoder that reads values of the version ``writer`` into the column of ``reader``.

    Raises:
        SetupError: a version is damaged, or has no column.
    """
    definition = _parse(reader.definition)
    physical = _Types(reader).of(definition)
    if reader.kind == pb.Schema.Json:
        written = _units_of_json(physical, writer, definition)
        return Decoder(partial(_decode_json, written, _for_spark(physical)), json_weigher(physical))
    of_writer = _parse(writer.definition)
    _Types(writer).of(of_writer)
    ours, theirs = _compiled(reader), _compiled(writer)
    written = in_written_units(physical, of_writer, definition)
    column = _for_spark(physical)
    if ours != theirs:
        return Decoder(_by_fastavro(written, column, theirs, ours), avro_weigher(theirs, ours))
    return Decoder(_of_one_shape(written, column, of_writer, theirs), avro_weigher(theirs, ours))


def _units_of_json(physical: pa.DataType, writer: ValueSchema, reader: Any) -> pa.DataType:
    try:
        with reading():
            return in_written_units(physical, _parse(writer.definition), reader)
    except (SetupError, Unreadable):
        # JSON has the names of its fields, and can be read without the schema that wrote it.
        return physical


def _of_one_shape(physical: pa.DataType, column: pa.DataType, definition: Any, parsed: Any) -> Read:
    decode = _by_fastavro(physical, column, parsed, None)
    loop = avro_reader(definition, physical) if pa.types.is_struct(physical) else None
    if loop is None:
        return decode
    return with_loop(loop.read, lambda records: records.cast(column), decode)


def _parse(definition: bytes) -> Any:
    try:
        return with_full_names(json.loads(definition))
    except ValueError as error:
        raise SetupError(f"a schema's definition is not JSON: {error}") from None


def _compiled(schema: ValueSchema) -> Any:
    # Every worker imports this module, and few read Avro.
    import fastavro
    from fastavro.read import LOGICAL_READERS

    LOGICAL_READERS.update(dict.fromkeys((f"bytes-{_DECIMAL}", f"fixed-{_DECIMAL}"), _decimal))
    try:
        with reading():
            parsed = fastavro.parse_schema(_plain(_parse(schema.definition)))
            _Defaults(named_types(parsed)).read(parsed)
            return parsed
    except Unreadable as failure:
        raise SetupError(f"a schema's definition is no Avro schema: {failure.error}") from None


def _plain(node: Any) -> Any:
    """Return a schema without logical types, but for decimals that fit into a column, without
    names that are not Avro's, and with defaults that are still to be read (see ``_Defaults``).
    """
    if isinstance(node, list):
        return [_plain(branch) for branch in node]
    if not isinstance(node, dict):
        return node
    plain = {
        name: _plain(value)
        for name, value in node.items()
        if name in _AVRO_NAMES and name != "default"
    }
    if "default" in node:
        plain[_UNREAD_DEFAULT] = node["default"]
    if _is_decimal(node):
        plain["logicalType"] = _DECIMAL
    return plain


@dataclass
class _Defaults:
    """Puts the defaults into a parsed schema, as values that are read: in JSON, bytes are texts,
    and the default of a record leaves out fields that have one. fastavro takes them as they are. A
    default that is no value of its type is left out.
    """

    named: dict[str, Any]
    left_bytes: int = _DEFAULTS_MOST_BYTES
    # By enumerations. Many fields may have one.
    _symbols: dict[int, frozenset[str]] = field(default_factory=dict)

    def read(self, node: Any) -> None:
        """Put the defaults into a type.

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
        if node["type"] == "enum":
            self._put(node, node)
        for part in node.get("fields", ()):
            self.read(part["type"])
            self._put(part, part["type"])

    def _put(self, owner: dict[str, Any], node: Any) -> None:
        """Put its default into a field or an enumeration.

        Args:
            node: the type of the default.
        """
        if _UNREAD_DEFAULT not in owner:
            return
        default = owner.pop(_UNREAD_DEFAULT)
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            owner["default"] = self._value(node, default)

    def _value(self, node: Any, value: Any) -> Any:
        """Return the value that a default in a schema stands for. It may have been read before.

        Raises:
            ValueError, TypeError, OverflowError: it is no value of its type.
        """
        self.left_bytes -= PART_BYTES + (len(value) if isinstance(value, (str, bytes)) else 0)
        if self.left_bytes < 0:
            raise SetupError(
                f"the defaults of a schema stand for more than {_DEFAULTS_MOST_BYTES} bytes; read "
                "it with schema = bytes"
            )
        if value is None and isinstance(node, list) and "null" in node:
            return None
        node = not_null(node, self.named)
        kind = node["type"] if isinstance(node, dict) else node
        if kind in ("float", "double"):
            return float(value)
        if not isinstance(value, _DEFAULT_CLASSES[kind]):
            raise TypeError(f"a default of {kind} is {type(value).__name__}")
        if kind in ("bytes", "fixed") and isinstance(value, str):
            data = value.encode("latin-1")
            return (
                _decimal(data, node) if isinstance(node, dict) and "logicalType" in node else data
            )
        if kind == "enum" and value not in self._symbols_of(node):
            raise ValueError("a default is none of the symbols")
        if kind == "array":
            return [self._value(node["items"], item) for item in value]
        if kind == "map":
            return {name: self._value(node["values"], item) for name, item in value.items()}
        if kind in ("record", "error"):
            return {part["name"]: self._part(part, value) for part in node["fields"]}
        return value

    def _part(self, part: dict[str, Any], value: dict[str, Any]) -> Any:
        """Return the value of a record's field in the default of the record."""
        if part["name"] not in value and "default" not in part:
            raise ValueError(f"a default lacks {part['name']}")
        return self._value(part["type"], value.get(part["name"], part.get("default")))

    def _symbols_of(self, enumeration: dict[str, Any]) -> frozenset[str]:
        if id(enumeration) not in self._symbols:
            self._symbols[id(enumeration)] = frozenset(enumeration["symbols"])
        return self._symbols[id(enumeration)]


def _is_decimal(node: dict[str, Any]) -> bool:
    digits, scale = node.get("precision"), node.get("scale", 0)
    sizes = (
        isinstance(digits, int)
        and isinstance(scale, int)
        and 0 < digits <= _DECIMAL_DIGITS
        and 0 <= scale <= digits
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
            raise ValueError(
                f"a decimal has {len(significant)} bytes, more than {digits} digits take"
            )
        data = sign + significant
    number = int.from_bytes(data, "big", signed=True)
    if not -_POWERS[digits] < number < _POWERS[digits]:
        raise ValueError(f"the decimal {number} has more than {digits} digits")
    return _EXACT.scaleb(number, -scale)


class _Types:
    """Converts the Avro types of one schema to Arrow's; knows the schema's named types. The schema
    has full names.
    """

    def __init__(self, schema: ValueSchema) -> None:
        self._is_json = schema.kind == pb.Schema.Json
        self._named: dict[str, pa.DataType] = {}
        self._definitions: dict[str, Any] = {}
        self._named_empty: set[str] = set()
        self._named_empty_parts: dict[str, int] = {}
        self._widths: dict[str, int] = {}
        self._columns = 0
        self._open: list[str] = []

    def of(self, node: Any) -> pa.DataType:
        if isinstance(node, list):
            return self._union(node)
        if isinstance(node, str):
            return self._by_name(node)
        kind = node.get("type") if isinstance(node, dict) else None
        if kind in ("record", "error"):
            return self._record(node)
        if kind == "array":
            return pa.list_(self._item(node.get("items")))
        if kind == "map":
            return pa.map_(pa.string(), self._part_of_items(node.get("values")))
        if kind in ("enum", "fixed"):
            return self._name(node, self._enum_or_fixed(node))
        if _is_decimal(node) and kind == "bytes" and not self._is_json:
            return pa.decimal128(node["precision"], node.get("scale", 0))
        return _LOGICAL.get((str(kind), str(node.get("logicalType"))), self._by_name(str(kind)))

    def _by_name(self, name: str) -> pa.DataType:
        if name in _PRIMITIVES:
            return pa.string() if name == "bytes" and self._is_json else _PRIMITIVES[name]
        if name in self._open:
            raise SetupError(
                f"the record {name} of a schema holds itself, which no column can; read it with "
                "schema = bytes"
            )
        arrow_type = self._named.get(name)
        self._count(self._widths.get(name, 0))
        if arrow_type is None:
            raise SetupError(
                f"a schema has the type '{name}', which has no column; read it with schema = bytes"
            )
        return arrow_type

    def _record(self, node: dict[str, Any]) -> pa.DataType:
        before = self._columns
        self._open.append(str(node.get("name")))
        fields = []
        for part in node.get("fields", ()):
            self._count(1)
            fields.append((str(part["name"]), self.of(part["type"])))
        self._widths[self._open.pop()] = self._columns - before
        return self._name(node, pa.struct(fields))

    def _count(self, columns: int) -> None:
        """Add to the number of columns; a named type counts at each place where it is named."""
        self._columns += columns
        if self._columns > COLUMNS_MOST:
            raise too_wide()

    def _name(self, node: dict[str, Any], arrow_type: pa.DataType) -> pa.DataType:
        name = str(node.get("name"))
        short = short_name(name)
        if short in _RESERVED:
            raise SetupError(
                f"a schema gives a type the name {short}, which is Avro's own; read it with schema "
                "= bytes"
            )
        if self._definitions.setdefault(name, node) != node:
            raise SetupError(
                f"a schema has two types of the name {name}; read it with schema = bytes"
            )
        self._named[name] = arrow_type
        # Inner types have been named before, so each type is judged once.
        parts = [part["type"] for part in node.get("fields", ())]
        is_empty = (
            not node.get("size")
            if node["type"] == "fixed"
            else all(map(self._takes_no_bytes, parts))
        )
        if is_empty and node["type"] != "enum":
            self._named_empty.add(name)
        self._named_empty_parts[name] = sum(map(self._empty_parts, parts)) + (
            name in self._named_empty
        )
        return arrow_type

    def _takes_no_bytes(self, node: Any) -> bool:
        """Return whether an item may be encoded in no bytes: fixed bytes of size 0, or a record
        with only such fields.
        """
        return _name_in(node) in self._named_empty

    def _enum_or_fixed(self, node: dict[str, Any]) -> pa.DataType:
        if node["type"] == "enum":
            if any(len(str(symbol)) > _SYMBOL_MOST for symbol in node.get("symbols", ())):
                raise SetupError(
                    f"a schema has a symbol of more than {_SYMBOL_MOST} characters; read it with "
                    "schema = bytes"
                )
            return pa.string()
        size = node.get("size")
        if not isinstance(size, int) or size < 0:
            raise SetupError(
                f"a schema has a fixed type of the size {size}; read it with schema = bytes"
            )
        if self._is_json:
            return pa.string()
        return (
            pa.decimal128(node["precision"], node.get("scale", 0))
            if _is_decimal(node)
            else pa.binary()
        )

    def _item(self, node: Any) -> pa.DataType:
        arrow_type = self._part_of_items(node)
        if not self._is_json and self._takes_no_bytes(node):
            raise SetupError(
                "a schema has an array of items without bytes; read it with schema = bytes"
            )
        return arrow_type

    def _part_of_items(self, node: Any) -> pa.DataType:
        arrow_type = self.of(node)
        count = 0 if self._is_json else self._empty_parts(node)
        if count > _EMPTY_PARTS_MOST:
            raise SetupError(
                f"a schema has items with {count:,} parts without bytes, more than "
                f"{_EMPTY_PARTS_MOST}; read it with schema = bytes"
            )
        return arrow_type

    def _empty_parts(self, node: Any) -> int:
        """Return how many parts of a value take no bytes. The items of its arrays and maps do not
        count.
        """
        if isinstance(node, list):
            return max(map(self._empty_parts, node), default=0)
        return self._named_empty_parts.get(_name_in(node), 0)

    def _union(self, branches: list[Any]) -> pa.DataType:
        others = [branch for branch in branches if branch != "null"]
        if len(others) == 1:
            return self.of(others[0])
        for kinds, wider in _WIDER:
            if all(isinstance(branch, str) for branch in others) and set(others) == kinds:
                return _PRIMITIVES[wider]
        raise SetupError(
            f"a schema has a union of {len(others)} types, which no column can hold; read it with "
            "schema = bytes"
        )


def _name_in(node: Any) -> str:
    """Return the name of a type that is defined or named here; one of Avro's own if it has none."""
    if isinstance(node, dict):
        return str(node.get("name" if node.get("type") in NAMED else "type"))
    return str(node)


def _for_spark(arrow_type: pa.DataType) -> pa.DataType:
    """Return an Arrow type with times in microseconds."""
    if pa.types.is_struct(arrow_type):
        return pa.struct([(field.name, _for_spark(field.type)) for field in arrow_type])
    if pa.types.is_map(arrow_type):
        return pa.map_(pa.string(), _for_spark(arrow_type.item_type))
    if pa.types.is_list(arrow_type):
        return pa.list_(_for_spark(arrow_type.value_type))
    return pa.timestamp("us", arrow_type.tz) if pa.types.is_timestamp(arrow_type) else arrow_type


def _by_fastavro(physical: pa.DataType, column: pa.DataType, writer: Any, reader: Any) -> Read:
    import fastavro

    misfits = avro_misfits(writer)

    def read(payload: bytes) -> Any:
        return fastavro.schemaless_reader(io.BytesIO(payload), writer, reader)

    def decode(encoded: Encoded) -> DecodedValues:
        payloads = encoded.payloads
        wrong = np.flatnonzero(misfits(payloads) & payloads.is_valid().to_numpy(False)).tolist()
        rows, bad = decode_rows(without(payloads, wrong), read)
        bad |= dict.fromkeys(wrong, "its bytes do not fit the schema that it was written with")
        return DecodedValues(build(rows, physical, column, bad), bad)

    return decode


def _decode_json(physical: pa.DataType, column: pa.DataType, encoded: Encoded) -> DecodedValues:
    payloads, deep = without_deep(encoded.payloads)
    together = None
    with contextlib.suppress(Unreadable), reading():
        together = _parse_together(payloads, physical) if _is_simple(physical) else None
    if together is not None:
        return DecodedValues(together, deep)
    conform = _conformer(physical)
    rows, bad = decode_rows(payloads, lambda payload: conform(parse_json(payload)))
    return DecodedValues(build(rows, physical, column, bad), bad | deep)


_JSON_SPACES = " \t\n\r"

_JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "a boolean",
    Number: "a number",
}

# No column has as many digits, and the time to convert them grows with their square.
_DIGITS_MOST = 100

# From here on a double is rounded to a float that is infinite.
_FLOAT_LIMIT = (2 - 2**-24) * 2.0**127


def _is_simple(arrow_type: pa.DataType) -> bool:
    """Return whether Arrow's JSON reader gives the same values as ours."""
    return (
        pa.types.is_struct(arrow_type)
        and arrow_type.num_fields > 0
        and all(map(_is_simple_part, arrow_type))
    )


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
    """Parse all values by one call; return None, or raise anything, if one of them is not exactly
    one object.

    The values are joined by line breaks, which a JSON string cannot contain, and each value begins
    and ends with braces. So if there are as many objects as values, each value is one object.
    """
    present = payloads.drop_null()
    if not len(present):
        return None
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
    if table.num_rows != len(texts):
        return None
    records = (
        table.select([field.name for field in physical])
        .to_struct_array()
        .combine_chunks()
        .cast(physical)
    )
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
    """Return a function that makes a parsed JSON value fit a column, or raises DoesNotFit."""
    if pa.types.is_struct(arrow_type):
        conformers = {field.name: _part_conformer(field.type) for field in arrow_type}
        return _or_null(dict, partial(_fields, conformers))
    if pa.types.is_map(arrow_type):
        item = _part_conformer(arrow_type.item_type)
        return _or_null(
            dict, lambda value: [(name, item(element)) for name, element in value.items()]
        )
    if pa.types.is_list(arrow_type):
        item = _part_conformer(arrow_type.value_type)
        return _or_null(list, lambda value: [item(element) for element in value])
    if pa.types.is_string(arrow_type):
        return _or_null(str, str)
    if pa.types.is_boolean(arrow_type):
        return _or_null(bool, lambda value: value)
    return _or_null(
        Number, partial(_real if pa.types.is_floating(arrow_type) else _whole, arrow_type)
    )


def _fields(
    conformers: Mapping[str, Callable[[Any], Any]], value: dict[str, Any]
) -> dict[str, Any]:
    """Make each field of a record fit its column."""
    fitting = {}
    for name, conform in conformers.items():
        try:
            fitting[name] = conform(value.get(name))
        except DoesNotFit as error:
            raise DoesNotFit(error.what, (name, *error.names)) from None
    return fitting


def _part_conformer(arrow_type: pa.DataType) -> Callable[[Any], Any]:
    """Return a function that makes a part of a value fit. A part that no table has a column for may
    be anything: Java's clients write a number for the record without fields that stands for a Date.
    """
    conform = _conformer(arrow_type)
    if has_column(arrow_type):
        return conform

    def conform_if_fits(value: Any) -> Any:
        with contextlib.suppress(ValueError):
            return conform(value)
        return None

    return conform_if_fits


def _real(arrow_type: pa.DataType, number: Number) -> float:
    value = float(number)
    limit = _FLOAT_LIMIT if pa.types.is_float32(arrow_type) else math.inf
    # A column holds infinity itself.
    if abs(value) >= limit and not number.endswith("Infinity"):
        raise _too_large(number, arrow_type)
    return value


def _whole(arrow_type: pa.DataType, number: Number) -> int:
    digits = number.removeprefix("-")
    if not digits.isdigit():
        raise DoesNotFit(
            f"{number[:_SHOWN_CHARACTERS]} is written with a fraction or an exponent, and the "
            "column has whole numbers"
        )
    limit = 2 ** (arrow_type.bit_width - 1)
    if len(digits) <= _DIGITS_MOST and -limit <= (value := int(number)) < limit:
        return value
    raise _too_large(number, arrow_type)


def _too_large(number: Number, arrow_type: pa.DataType) -> DoesNotFit:
    return DoesNotFit(f"{number[:_SHOWN_CHARACTERS]} is too large for a column of {arrow_type}")


def _or_null(kind: type, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def conform(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, kind):
            raise DoesNotFit(
                f"{_JSON_NAMES[type(value)]} stands where the schema has {_JSON_NAMES[kind]}"
            )
        return convert(value)

    return conform
