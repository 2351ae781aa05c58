"""Columns of records: the union of the fields of several schemas, and values that are made to fit
it.

A table of records has a column for each field that any version of its topics' schemas has. A value
is decoded by the version that wrote it, and its fields are put into the columns by name; the case
of names does not count, as in Delta. A field that its version lacks is null.

A type is fixed by the first schema that has the field. Later ones fit if their values do: a number
fits if it stays the same number, nested records, arrays and maps fit by their parts. Once there are
files, a record in a map gets no more fields. A value that does not fit is bad, with the reason; the
other values of its batch are not affected.
"""

from __future__ import annotations

import contextlib
import re
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.decode.columns import (
    COLUMNS_MOST,
    SCHEMAS_KEPT,
    DecodedValues,
    check_depth,
    column_count,
    has_column,
    without,
)
from ledgerlake.decode.times import without_python_time
from ledgerlake.errors import SetupError
from ledgerlake.outside import Unreadable, reading
from ledgerlake.values.column_names import folded
from ledgerlake.values.schemas import column_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ledgerlake.wire.value_schema import ValueSchema

# The column of everything that is not of the value.
PULSAR_COLUMN = "pulsar"

# The column of values that are no record.
VALUE_COLUMN = "value"

# Columns that Spark adds to a table while it reads it or its changes. With one of its own it fails.
_RESERVED = re.compile(
    r"_change_type$|_commit_(version|timestamp)$|_tmp_metadata_|__delta_internal_"
)

# Spark takes none of the signs, and Arrow ends a name at a zero byte.
_FORBIDDEN = {*" ,;{}()=.\x7f", *map(chr, range(32))}
# The statistics of each file repeat the names of its columns.
_NAME_MOST_BYTES = 255

_OTHER_SHAPE = 'set [delta] shape = "messages"'

_WIDE_DECIMAL = pa.decimal128(38, 0)


@lru_cache(SCHEMAS_KEPT)
def record_of(schema: ValueSchema) -> pa.StructType:
    """Return the columns for the values of a schema: a record's fields, key and value, or one
    column ``value``. A record without fields, which no file can hold, is left out.

    Raises:
        SetupError: no column can have a value or a field, or readers could not read it.
    """
    value_type = column_type(schema)
    record = (
        value_type if pa.types.is_struct(value_type) else pa.struct([(VALUE_COLUMN, value_type)])
    )
    for field in record:
        if folded(field.name) == PULSAR_COLUMN:
            raise SetupError(
                f"a schema has a field {field.name}, and the table has the metadata of Pulsar in a "
                f"column of that name; {_OTHER_SHAPE}"
            )
    check_columns(record, "a schema")
    return _storable(record) or pa.struct([])


def united(known: pa.DataType, more: pa.DataType, *, has_files: bool = False) -> pa.DataType:
    """Return a type with the fields of both. Where both have a field, its type stays as it is
    known, with the parts that the other one adds.

    Args:
        has_files: there are files with the known type. The SQL of delta-rs cannot read them as a
            type that has more in a map, so nothing is added in maps.
    """
    if known.equals(more):
        return known
    unite = partial(united, has_files=has_files)
    if pa.types.is_struct(known) and pa.types.is_struct(more):
        others = {folded(field.name): field for field in more}
        fields = []
        for field in known:
            other = others.pop(folded(field.name), None)
            fields.append(
                field if other is None else field.with_type(unite(field.type, other.type))
            )
        return pa.struct([*fields, *(field.with_nullable(True) for field in others.values())])
    if pa.types.is_list(known) and pa.types.is_list(more):
        return pa.list_(known.value_field.with_type(unite(known.value_type, more.value_type)))
    if pa.types.is_map(known) and pa.types.is_map(more) and not has_files:
        return pa.map_(
            known.key_type, known.item_field.with_type(unite(known.item_type, more.item_type))
        )
    return known


def check_width(columns: pa.StructType) -> None:
    """Check that a table may have so many columns. Each version of a schema may add some.

    Raises:
        SetupError: there are more.
    """
    count = column_count(columns)
    if count > COLUMNS_MOST:
        raise SetupError(
            f"the schemas of a table's topics have {count} columns together, more than the "
            f"{COLUMNS_MOST} of a table; {_OTHER_SHAPE}"
        )


def as_records(decoded: DecodedValues, record: pa.StructType) -> DecodedValues:
    """Return decoded values as rows of a record's columns; those that do not fit, or have a time
    that Python does not have, are null, and bad.
    """
    values = decoded.values
    if not pa.types.is_struct(values.type):
        values = pa.StructArray.from_arrays([values], names=[VALUE_COLUMN], mask=values.is_null())
    fitted, misfits = _fit(values, record, "")
    bad = without_python_time(fitted) | misfits | decoded.bad
    return DecodedValues(without(fitted, bad), bad, decoded.too_large)


def check_columns(columns: pa.StructType, what: str, advice: str = f"; {_OTHER_SHAPE}") -> None:
    """Check the names and the depth of columns of a table.

    Args:
        what: what has the columns, for the error.
        advice: the end of its sentence.

    Raises:
        SetupError: Delta does not take a name, or takes two for one; or a column is nested too
        deeply.
    """
    check_depth(columns, what, advice)
    _check_names(columns, what, advice)
    for field in columns:
        if _RESERVED.match(folded(field.name)):
            raise SetupError(
                f"{what} has a field {field.name!r}, which is a column of Delta's own to "
                f"Spark{advice}"
            )


def _check_names(kind: pa.DataType, what: str, advice: str) -> None:
    if pa.types.is_list(kind):
        _check_names(kind.value_type, what, advice)
    elif pa.types.is_map(kind):
        _check_names(kind.item_type, what, advice)
    elif pa.types.is_struct(kind):
        seen: set[str] = set()
        for field in kind:
            if _FORBIDDEN.intersection(field.name) or not field.name:
                raise SetupError(
                    f"{what} has a field {field.name!r}, whose name Delta does not take{advice}"
                )
            if len(field.name.encode()) > _NAME_MOST_BYTES:
                raise SetupError(
                    f"{what} has a field {field.name[:40]!r}..., whose name has more than "
                    f"{_NAME_MOST_BYTES} bytes{advice}"
                )
            if folded(field.name) in seen:
                raise SetupError(
                    f"{what} has two fields {field.name!r} that differ in case at most, which are "
                    f"one column to Delta{advice}"
                )
            seen.add(folded(field.name))
            _check_names(field.type, what, advice)


def _storable(kind: pa.DataType) -> pa.DataType | None:
    """Return a type without records that have no fields; None if nothing is left."""
    if pa.types.is_list(kind):
        items = _storable(kind.value_type)
        return None if items is None else pa.list_(kind.value_field.with_type(items))
    if pa.types.is_map(kind):
        items = _storable(kind.item_type)
        return None if items is None else pa.map_(kind.key_type, kind.item_field.with_type(items))
    if pa.types.is_struct(kind):
        parts = [(field, _storable(field.type)) for field in kind]
        fields = [field.with_type(part) for field, part in parts if part is not None]
        return pa.struct(fields) if fields else None
    return kind


def _fit(values: pa.Array, target: pa.DataType, path: str) -> tuple[pa.Array, dict[int, str]]:
    """Return values as another type, and the reasons of the rows that do not fit."""
    if values.type.equals(target):
        return values, {}
    if pa.types.is_struct(values.type) and pa.types.is_struct(target):
        return _fit_struct(values, target, path)
    if pa.types.is_list(values.type) and pa.types.is_list(target):
        return _fit_list(values, target, path)
    if (
        pa.types.is_map(values.type)
        and pa.types.is_map(target)
        and values.type.key_type == target.key_type
    ):
        return _fit_map(values, target, path)
    if _is_number(values.type) and _is_number(target):
        return _fit_numbers(values, target, path)
    bad = np.flatnonzero(values.is_valid().to_numpy(False))
    return pa.nulls(len(values), target), dict.fromkeys(
        bad.tolist(), _misfit(path, values.type, target)
    )


def _fit_struct(
    values: pa.StructArray, target: pa.StructType, path: str
) -> tuple[pa.Array, dict[int, str]]:
    parts = {
        folded(field.name): part for field, part in zip(values.type, values.flatten(), strict=True)
    }
    columns: list[pa.Array] = []
    bad: dict[int, str] = {}
    for field in target:
        part = parts.pop(folded(field.name), None)
        if part is None:
            columns.append(pa.nulls(len(values), field.type))
            continue
        fitted, misfits = _fit(part, field.type, _inside(path, field.name))
        columns.append(fitted)
        bad = misfits | bad
    for name, part in parts.items():
        if not has_column(part.type):
            continue
        rows = np.flatnonzero(part.is_valid().to_numpy(False)).tolist()
        bad = dict.fromkeys(rows, f"the table has no column for {_inside(path, name)}") | bad
    return pa.StructArray.from_arrays(columns, fields=list(target), mask=values.is_null()), bad


def _fit_list(
    values: pa.ListArray, target: pa.ListType, path: str
) -> tuple[pa.Array, dict[int, str]]:
    fitted, misfits = _fit(values.flatten(), target.value_type, f"{path}[]")
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), fitted, type=target, mask=values.is_null())
    return lists, _of_rows(misfits, offsets)


def _fit_map(values: pa.MapArray, target: pa.MapType, path: str) -> tuple[pa.Array, dict[int, str]]:
    fitted, misfits = _fit(values.items, target.item_type, f"{path}[]")
    offsets = values.offsets.to_numpy()
    maps = pa.MapArray.from_arrays(
        pa.array(offsets), values.keys, fitted, type=target, mask=values.is_null()
    )
    return maps, _of_rows(misfits, offsets)


def _of_rows(misfits: dict[int, str], offsets: NDArray[np.int32]) -> dict[int, str]:
    """Return the reasons of rows by the reasons of their items."""
    rows = np.searchsorted(offsets, list(misfits), side="right") - 1
    return {
        int(row): reason
        for row, reason in zip(rows, misfits.values(), strict=True)
        if 0 <= row < len(offsets) - 1
    }


def _fit_numbers(
    values: pa.Array, target: pa.DataType, path: str
) -> tuple[pa.Array, dict[int, str]]:
    if pa.types.is_decimal(values.type) or pa.types.is_decimal(target):
        return _fit_decimals(values, target, path)
    fitted = _cast(values, target)
    back = _cast(fitted, values.type)
    is_same = pc.fill_null(pc.equal(back, values), pc.is_null(values))
    if pa.types.is_floating(values.type) and pa.types.is_floating(target):
        is_same = pc.or_(is_same, pc.and_(pc.is_nan(back), pc.is_nan(values)))
    wrong = np.flatnonzero(~is_same.to_numpy(False)).tolist()
    if not wrong:
        return fitted, {}
    bad = {row: f"{_inside(path)} {values[row].as_py()} is no {target}" for row in wrong}
    return without(fitted, bad), bad


def _cast(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Return numbers as another type. A floating number beyond all whole numbers of the type is
    null: processors differ in what they make of it.
    """
    if pa.types.is_floating(values.type) and pa.types.is_integer(target):
        end = 2.0 ** (target.bit_width - 1)
        fits = pc.and_(
            pc.greater_equal(values, pa.scalar(-end, values.type)),
            pc.less(values, pa.scalar(end, values.type)),
        )
        values = pc.if_else(fits, values, pa.scalar(None, values.type))
    return values.cast(target, safe=False)


def _fit_decimals(
    values: pa.Array, target: pa.DataType, path: str
) -> tuple[pa.Array, dict[int, str]]:
    # Arrow converts all of them or none.
    with contextlib.suppress(Unreadable), reading():
        return _exact(values, target), {}
    fitted: list[pa.Array] = []
    bad: dict[int, str] = {}
    for row in range(len(values)):
        try:
            with reading():
                fitted.append(_exact(values.slice(row, 1), target))
        except Unreadable:
            fitted.append(pa.nulls(1, target))
            bad[row] = f"{_inside(path)} {values[row].as_py()} is no {target}"
    return pa.concat_arrays(fitted), bad


def _exact(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Return numbers as another type; one of the two is decimal.

    Raises:
        ArrowInvalid: one of them would change.
    """
    wide = values.cast(_WIDE_DECIMAL) if pa.types.is_integer(values.type) else values
    fitted = wide.cast(target)
    if pa.types.is_integer(target):
        # Arrow casts whole numbers back only to decimals that have room for all of them.
        wide = wide.cast(pa.decimal256(76, wide.type.scale))
    # Arrow rounds floating numbers without a word.
    if not pc.all(pc.equal(fitted.cast(wide.type), wide)).as_py() and wide.null_count < len(wide):
        raise pa.ArrowInvalid("a number would change")
    return fitted


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    )


def _misfit(path: str, actual: pa.DataType, target: pa.DataType) -> str:
    return f"{_inside(path)} is {actual}, and its column is {target}"


def _inside(path: str, name: str = "") -> str:
    return ".".join(part for part in (path, name) if part) or VALUE_COLUMN
