"""Avro records by a compiled loop, without a Python object for each value.

A schema becomes a short program for ``kernels.walk_avro``: one instruction for each field, in the
order of the bytes. The loop reads regular values of records that have no arrays, maps, decimals or
unions other than with null. ``records`` decodes all others with fastavro, value by value, and so
decides about all that is odd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from ledgerlake.decode.columns import exceeds
from ledgerlake.decode.kernels import (
    A_BOOLEAN,
    A_BYTES,
    A_ENUM,
    A_FIXED,
    A_FIXED_NUMBER,
    A_INT,
    A_LONG,
    A_NULLABLE,
    A_RECORD,
    walk_avro,
)
from ledgerlake.decode.loop_columns import LoopColumns

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUMBERS = {"int": A_INT, "long": A_LONG}
_FLOATING = {"float": (4, np.uint32, np.float32), "double": (8, np.int64, np.float64)}


# Makes an Arrow array of the columns that were filled.
_Build: TypeAlias = Callable[[LoopColumns], pa.Array]


class _UnsupportedError(Exception):
    """A schema has a part for which there is no instruction."""


@dataclass
class AvroReader:
    """A program and the columns that it fills.

    Args:
        build: makes the records of the filled columns.
        texts: the columns that must be UTF-8.
        limits: the columns whose numbers have a greatest magnitude.
    """

    program: NDArray[np.int64]
    columns: int
    build: _Build
    texts: list[int]
    limits: dict[int, int]

    def read(self, payloads: pa.BinaryArray) -> tuple[pa.Array, NDArray[np.bool_]]:
        """Return the records, and which rows have one. All others are null, or odd."""
        read = LoopColumns.of(payloads, self.columns)
        walk_avro(
            read.data,
            read.offsets,
            read.present,
            self.program,
            read.values,
            read.sizes,
            read.valid,
            read.ok,
        )
        read.refuse_wrong_texts(self.texts)
        for column, limit in self.limits.items():
            read.refuse(np.flatnonzero(exceeds(read.values[column], limit)).tolist())
        return self.build(read), read.ok != 0


def avro_reader(definition: Any, physical: pa.StructType) -> AvroReader | None:
    """Return a reader of a schema; None if the schema has a part for which there is no instruction.

    Args:
        definition: the schema, as parsed JSON with full names.
        physical: the type of its records.
    """
    compiler = _Compiler()
    try:
        build = compiler.compile(definition, physical)
    except _UnsupportedError:
        return None
    program = np.array(compiler.program, np.int64).reshape(-1, 4)
    return AvroReader(program, compiler.columns, build, compiler.texts, compiler.limits)


@dataclass
class _Compiler:
    program: list[list[int]] = field(default_factory=list)
    columns: int = 0
    texts: list[int] = field(default_factory=list)
    limits: dict[int, int] = field(default_factory=dict)
    named: dict[str, Any] = field(default_factory=dict)
    symbols: dict[str, pa.Array] = field(default_factory=dict)

    def compile(self, node: Any, physical: pa.DataType) -> _Build:
        if isinstance(node, list):
            return self._nullable(node, physical)
        if pa.types.is_null(physical):
            # No value fits.
            raise _UnsupportedError
        kind = node if isinstance(node, str) else node.get("type")
        if kind in self.named:
            return self.compile(self.named[kind], physical)
        if isinstance(node, dict) and kind in ("record", "enum", "fixed"):
            self.named[node["name"]] = node
        if kind == "record":
            return self._record(node, physical)
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind], physical)
        if kind in _FLOATING:
            return self._floating(*_FLOATING[kind], physical)
        if kind == "boolean":
            column = self._add(A_BOOLEAN)
            return lambda read: pa.array(read.values[column] != 0, mask=read.missing(column))
        if kind in ("string", "bytes") and not pa.types.is_decimal(physical):
            return self._bytes(A_BYTES, 0, physical)
        if kind == "fixed" and not pa.types.is_decimal(physical):
            return self._bytes(A_FIXED, int(node["size"]), physical)
        if kind == "enum":
            return self._enum(node)
        raise _UnsupportedError

    def _add(self, instruction: int, argument: int = 0) -> int:
        self.program.append([instruction, self.columns, argument, 0])
        self.columns += 1
        return self.columns - 1

    def _nullable(self, branches: list[Any], physical: pa.DataType) -> _Build:
        others = [branch for branch in branches if branch != "null"]
        if len(branches) != len(others) + 1 or len(others) != 1:
            raise _UnsupportedError
        instruction = [A_NULLABLE, 0, branches.index("null"), 0]
        self.program.append(instruction)
        build = self.compile(others[0], physical)
        instruction[3] = len(self.program)
        return build

    def _record(self, node: dict[str, Any], physical: pa.DataType) -> _Build:
        column = self._add(A_RECORD)
        parts = [
            self.compile(part["type"], field.type)
            for part, field in zip(node["fields"], physical, strict=True)
        ]

        def build(read: LoopColumns) -> pa.Array:
            columns = [part(read) for part in parts]
            return pa.StructArray.from_arrays(
                columns, fields=list(physical), mask=pa.array(read.missing(column))
            )

        return build

    def _number(self, instruction: int, physical: pa.DataType) -> _Build:
        column = self._add(instruction)
        plain, dtype = (pa.int32(), np.int32) if instruction == A_INT else (pa.int64(), np.int64)
        if pa.types.is_timestamp(physical) and physical.unit == "ms":
            # Columns of Spark have microseconds.
            self.limits[column] = (2**63 - 1) // 1000
        return lambda read: pa.array(
            read.values[column].astype(dtype), plain, mask=read.missing(column)
        ).cast(physical)

    def _floating(self, size: int, bits: Any, dtype: Any, physical: pa.DataType) -> _Build:
        column = self._add(A_FIXED_NUMBER, size)
        return lambda read: pa.array(
            read.values[column].astype(bits).view(dtype),
            physical,
            mask=read.missing(column),
            from_pandas=False,
        )

    def _bytes(self, instruction: int, argument: int, physical: pa.DataType) -> _Build:
        column = self._add(instruction, argument)
        if pa.types.is_string(physical):
            self.texts.append(column)
        return lambda read: read.bytes_of(column, physical, ~read.missing(column))

    def _enum(self, node: dict[str, Any]) -> _Build:
        # Many fields may have one enumeration.
        name = node["name"]
        if name not in self.symbols:
            self.symbols[name] = pa.array(node["symbols"], pa.string())
        symbols = self.symbols[name]
        column = self._add(A_ENUM, len(symbols))

        def build(read: LoopColumns) -> pa.Array:
            numbers = pa.array(read.values[column].astype(np.int32), mask=read.missing(column))
            return pa.DictionaryArray.from_arrays(numbers, symbols).cast(pa.string())

        return build
