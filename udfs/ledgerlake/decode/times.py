"""Times and dates that Python has: the years 1 to 9999.

Arrow, Delta and Spark can store others. But readers that make Python's ``datetime`` of a column
then fail for all its rows: ``collect()``, pandas, Polars. So a value with another time fits no
column.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.decode.columns import without

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ledgerlake.decode.columns import DecodedValues

_EPOCH = date(1970, 1, 1)
_FIRST_DAY, _LAST_DAY = (date.min - _EPOCH).days, (date.max - _EPOCH).days
_DAY_US = 24 * 60 * 60 * 10**6


def with_python_times(decoded: DecodedValues) -> DecodedValues:
    """Return values; one with another time, at any depth, is null and bad."""
    wrong = without_python_time(decoded.values)
    return replace(decoded, values=without(decoded.values, wrong), bad=wrong | decoded.bad)


def without_python_time(values: pa.Array, path: str = "") -> dict[int, str]:
    """Return the rows of a column that have another time, at any depth, and the reasons."""
    kind = values.type
    if pa.types.is_struct(kind):
        found: dict[int, str] = {}
        for field, part in zip(kind, values.flatten(), strict=True):
            found = (
                without_python_time(part, f"{path}.{field.name}" if path else field.name) | found
            )
        return found
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return _of_items(values, path)
    if pa.types.is_date32(kind):
        return _outside(values.cast(pa.int32()), _FIRST_DAY, _LAST_DAY, path, "days")
    if pa.types.is_timestamp(kind):
        last_us = (_LAST_DAY + 1) * _DAY_US - 1
        numbers = values.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
        return _outside(numbers, _FIRST_DAY * _DAY_US, last_us, path, "microseconds")
    return {}


def _of_items(values: pa.ListArray | pa.MapArray, path: str) -> dict[int, str]:
    if not _has_time(values.type):
        return {}
    offsets = values.offsets.to_numpy()
    items = values.items if pa.types.is_map(values.type) else values.values
    found: dict[int, str] = {}
    for item, reason in without_python_time(items, f"{path}[]").items():
        row = int(np.searchsorted(offsets, item, side="right")) - 1
        if 0 <= row < len(values) and values[row].is_valid:
            found.setdefault(row, reason)
    return found


def _has_time(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_time(field.type) for field in kind)
    if pa.types.is_map(kind):
        return _has_time(kind.item_type)
    if pa.types.is_list(kind):
        return _has_time(kind.value_type)
    return bool(pa.types.is_date32(kind) or pa.types.is_timestamp(kind))


def _outside(numbers: pa.Array, first: int, last: int, path: str, unit: str) -> dict[int, str]:
    ends = pc.min_max(numbers).as_py()
    if ends["min"] is None or (first <= ends["min"] and ends["max"] <= last):
        return {}
    known = pc.fill_null(numbers, 0).to_numpy()
    rows: NDArray[np.int64] = np.flatnonzero((known < first) | (known > last))
    subject = path or "the value"
    return {
        int(row): f"{subject} is {known[row]} {unit} after 1970; the years are 1 to 9999"
        for row in rows
    }
