"""Flat Protobuf messages by a compiled loop, without a Python object for each value.

The loop (``kernels.walk_protobuf``) reads regular values of messages whose fields are single
numbers, texts, bytes and open enumerations. ``protobufs`` reads all others by Protobuf's own
library, value by value, and so decides about all that is odd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
from google.protobuf.descriptor import FieldDescriptor

from ledgerlake.decode.kernels import P_BYTES, P_FIXED32, P_FIXED64, P_VARINT, walk_protobuf
from ledgerlake.decode.loop_columns import LoopColumns

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor
    from numpy.typing import NDArray

_T = FieldDescriptor
_Numbers: TypeAlias = "NDArray[np.int64]"

# A table of columns by field number is this long at most.
_MOST_NUMBER = 4096


def _low_bits(values: _Numbers) -> _Numbers:
    result: _Numbers = values & 0xFFFFFFFF
    return result


def _zigzag(bits: NDArray[Any]) -> _Numbers:
    result: _Numbers = ((bits >> 1) ^ (0 - (bits & 1))).astype(np.int64)
    return result


# By type of a field: how its bytes are, and the numbers that they mean.
_NUMBERS: dict[int, tuple[int, Callable[[_Numbers], NDArray[Any]]]] = {
    _T.TYPE_INT32: (P_VARINT, lambda values: values.astype(np.int32)),
    _T.TYPE_INT64: (P_VARINT, lambda values: values),
    _T.TYPE_UINT32: (P_VARINT, _low_bits),
    _T.TYPE_SINT32: (P_VARINT, lambda values: _zigzag(_low_bits(values)).astype(np.int32)),
    _T.TYPE_SINT64: (P_VARINT, lambda values: _zigzag(values.view(np.uint64))),
    _T.TYPE_BOOL: (P_VARINT, lambda values: values != 0),
    _T.TYPE_FIXED32: (P_FIXED32, _low_bits),
    _T.TYPE_SFIXED32: (P_FIXED32, lambda values: values.astype(np.int32)),
    _T.TYPE_SFIXED64: (P_FIXED64, lambda values: values),
    _T.TYPE_FLOAT: (P_FIXED32, lambda values: values.astype(np.uint32).view(np.float32)),
    _T.TYPE_DOUBLE: (P_FIXED64, lambda values: values.view(np.float64)),
}


@dataclass
class ProtobufReader:
    """The fields of a message: the column and the kind of each."""

    fields: list[Any]
    target: pa.StructType
    columns: _Numbers
    kinds: _Numbers

    def read(self, payloads: pa.BinaryArray) -> tuple[pa.Array, NDArray[np.bool_]]:
        """Return the messages, and which rows have one. All others are null, or odd."""
        read = LoopColumns.of(payloads, len(self.fields))
        walk_protobuf(
            read.data,
            read.offsets,
            read.present,
            self.columns,
            self.kinds,
            read.values,
            read.sizes,
            read.valid,
            read.ok,
        )
        read.refuse_wrong_texts(
            [
                column
                for column, field in enumerate(self.fields)
                if field.type == FieldDescriptor.TYPE_STRING
            ]
        )
        parts = [self._column(read, column) for column in range(len(self.fields))]
        is_read = read.ok != 0
        return pa.StructArray.from_arrays(
            parts, fields=list(self.target), mask=pa.array(~is_read)
        ), is_read

    def _column(self, read: LoopColumns, column: int) -> pa.Array:
        field, kind = self.fields[column], self.target.field(column).type
        # A field without presence has its default, which is what the loop began with.
        missing = read.missing(column) if field.has_presence else np.zeros(len(read.ok), bool)
        if self.kinds[column] == P_BYTES:
            return read.bytes_of(column, kind, ~missing)
        if field.type == FieldDescriptor.TYPE_ENUM:
            return _names(read.values[column].astype(np.int32), field.enum_type, missing)
        return pa.array(_NUMBERS[field.type][1](read.values[column]), kind, mask=missing)


def protobuf_reader(message: Descriptor, target: pa.StructType) -> ProtobufReader | None:
    """Return a reader of a message; None if it has a field that the loop does not read."""
    fields = list(message.fields)
    if not fields or not all(map(_is_plain, fields)):
        return None
    columns = np.full(max(field.number for field in fields) + 1, -1, np.int64)
    columns[[field.number for field in fields]] = np.arange(len(fields))
    kinds = np.array([_kind(field) for field in fields], np.int64)
    return ProtobufReader(fields, target, columns, kinds)


def _is_plain(field: Any) -> bool:
    if field.is_repeated or field.is_required or field.number > _MOST_NUMBER:
        return False
    # Of the fields of a union, the last one counts.
    if field.containing_oneof is not None and len(field.containing_oneof.fields) > 1:
        return False
    if field.type == FieldDescriptor.TYPE_ENUM:
        return not field.enum_type.is_closed
    return field.type in _NUMBERS or field.type in (
        FieldDescriptor.TYPE_STRING,
        FieldDescriptor.TYPE_BYTES,
    )


def _kind(field: Any) -> int:
    if field.type == FieldDescriptor.TYPE_ENUM:
        return P_VARINT
    return _NUMBERS[field.type][0] if field.type in _NUMBERS else P_BYTES


def _names(numbers: NDArray[np.int32], kind: Any, missing: NDArray[np.bool_]) -> pa.Array:
    """Return the names of an enumeration's values, and the numbers of those that have none."""
    unique, places = np.unique(numbers, return_inverse=True)
    names = [
        kind.values_by_number[number].name if number in kind.values_by_number else str(number)
        for number in unique.tolist()
    ]
    indices = pa.array(places.reshape(-1).astype(np.int32), mask=missing)
    return pa.DictionaryArray.from_arrays(indices, pa.array(names, pa.string())).cast(pa.string())
