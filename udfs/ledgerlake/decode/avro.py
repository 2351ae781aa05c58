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
    gather,
    walk_avro,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[np.int64]

_NUMBERS = {"int": A_INT, "long": A_LONG}
_FLOATING = {"float": (4, np.uint32, np.float32), "double": (8, np.int64, np.float64)}


@dataclass(frozen=True)
class _Columns:
    """What the loop has read: numbers by column and row, and which are there."""

    data: NDArray[np.uint8]
    values: Matrix
    sizes: Matrix
    valid: NDArray[np.uint8]

    def missing(self, column: int) -> NDArray[np.bool_]:
        result: NDArray[np.bool_] = self.valid[column] == 0
        return result

    def bytes_of(self, column: int, kind: pa.DataType) -> pa.Array:
        """Return spans of the data as texts or bytes, which may not be valid texts."""
        sizes = self.sizes[column]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        out = np.empty(int(offsets[-1]), np.uint8)
        gather(self.data, self.values[column], sizes, offsets, out)
        is_valid = pa.array(self.valid[column] != 0).buffers()[1]
        buffers = [is_valid, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(out)]
        return pa.Array.from_buffers(kind, len(sizes), buffers)


# Makes an Arrow array of what was read.
_Build: TypeAlias = Callable[[_Columns], pa.Array]


class _UnsupportedError(Exception):
    """A schema has a part for which there is no instruction."""


@dataclass
class AvroReader:
    """A program and the columns that it fills.

    Args:
        build: makes the records of what was read.
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
        count = len(payloads)
        present = payloads.is_valid().to_numpy(False)
        offsets = np.frombuffer(payloads.buffers()[1], np.int32)[payloads.offset : payloads.offset + count + 1]
        data = np.frombuffer(payloads.buffers()[2] or b"", np.uint8)
        values, sizes = (np.zeros((self.columns, count), np.int64) for _ in range(2))
        valid, ok = np.zeros((self.columns, count), np.uint8), np.zeros(count, np.uint8)
        walk_avro(data, offsets, present, self.program, values, sizes, valid, ok)
        read = _Columns(data, values, sizes, valid)
        wrong = [row for column in self.texts for row in _wrong_texts(read.bytes_of(column, pa.string()))]
        for column, limit in self.limits.items():
            wrong += np.flatnonzero(np.abs(values[column]) > limit).tolist()
        ok[wrong] = 0
        valid[:, wrong] = 0
        sizes[:, wrong] = 0
        values[:, wrong] = 0
        return self.build(read), ok != 0


def avro_reader(definition: Any, physical: pa.StructType) -> AvroReader | None:
    """Return a reader of a schema; None if the schema has a part for which there is no instruction.

    Args:
        definition: the schema, as parsed JSON.
        physical: the type of its records.
    """
    compiler = _Compiler()
    try:
        build = compiler.compile(definition, physical)
    except _UnsupportedError:
        return None
    program = np.array(compiler.program, np.int64).reshape(-1, 4)
    return AvroReader(program, compiler.columns, build, compiler.texts, compiler.limits)


def short_name(name: str) -> str:
    """Return the name of a type without its namespace."""
    return name.rpartition(".")[2]


@dataclass
class _Compiler:
    program: list[list[int]] = field(default_factory=list)
    columns: int = 0
    texts: list[int] = field(default_factory=list)
    limits: dict[int, int] = field(default_factory=dict)
    named: dict[str, Any] = field(default_factory=dict)

    def compile(self, node: Any, physical: pa.DataType) -> _Build:
        if isinstance(node, list):
            return self._nullable(node, physical)
        kind = node if isinstance(node, str) else node.get("type")
        if isinstance(kind, (dict, list)):
            return self.compile(kind, physical)
        if short_name(kind) in self.named:
            return self.compile(self.named[short_name(kind)], physical)
        if isinstance(node, dict) and kind in ("record", "enum", "fixed"):
            self.named[short_name(node["name"])] = node
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
            return self._enum(list(node["symbols"]))
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
        parts = [self.compile(part["type"], field.type) for part, field in zip(node["fields"], physical, strict=True)]

        def build(read: _Columns) -> pa.Array:
            columns = [part(read) for part in parts]
            return pa.StructArray.from_arrays(columns, fields=list(physical), mask=pa.array(read.missing(column)))

        return build

    def _number(self, instruction: int, physical: pa.DataType) -> _Build:
        column = self._add(instruction)
        plain, dtype = (pa.int32(), np.int32) if instruction == A_INT else (pa.int64(), np.int64)
        if pa.types.is_timestamp(physical) and physical.unit == "ms":
            # Columns of Spark have microseconds.
            self.limits[column] = (2**63 - 1) // 1000
        return lambda read: pa.array(read.values[column].astype(dtype), plain, mask=read.missing(column)).cast(physical)

    def _floating(self, size: int, bits: Any, dtype: Any, physical: pa.DataType) -> _Build:
        column = self._add(A_FIXED_NUMBER, size)
        return lambda read: pa.array(
            read.values[column].astype(bits).view(dtype), physical, mask=read.missing(column), from_pandas=False
        )

    def _bytes(self, instruction: int, argument: int, physical: pa.DataType) -> _Build:
        column = self._add(instruction, argument)
        if pa.types.is_string(physical):
            self.texts.append(column)
        return lambda read: read.bytes_of(column, physical)

    def _enum(self, symbols: list[str]) -> _Build:
        column = self._add(A_ENUM, len(symbols))

        def build(read: _Columns) -> pa.Array:
            numbers = pa.array(read.values[column].astype(np.int32), mask=read.missing(column))
            return pa.DictionaryArray.from_arrays(numbers, pa.array(symbols, pa.string())).cast(pa.string())

        return build


def _wrong_texts(texts: pa.StringArray) -> list[int]:
    """Return the rows of texts that are not UTF-8."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return [row for row, text in enumerate(texts.view(pa.binary()).to_pylist()) if not _is_text(text)]
    return []


def _is_text(data: bytes | None) -> bool:
    try:
        return data is None or data.decode() is not None
    except UnicodeDecodeError:
        return False
