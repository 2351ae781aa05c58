"""Times that Python does not have."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ledgerlake.decode.columns import DecodedValues
from ledgerlake.decode.times import with_python_times
from ledgerlake.values.record_columns import as_records

FIRST_DAY, LAST_DAY = -719_162, 2_932_896
FIRST_US, LAST_US = FIRST_DAY * 86_400_000_000, (LAST_DAY + 1) * 86_400_000_000 - 1

TIME = pa.timestamp("us", "UTC")
DATE = pa.date32()


def column(kind: pa.DataType, *values: Any) -> pa.Array:
    """Times as numbers, since Python does not have all."""
    return (
        pa.array(values, _numbers(kind)).cast(kind)
        if not pa.types.is_map(kind)
        else _map(kind, values)
    )


def _numbers(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _numbers(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_numbers(kind.value_type))
    return pa.int32() if pa.types.is_date(kind) else pa.int64()


def _map(kind: pa.MapType, values: tuple[Any, ...]) -> pa.Array:
    offsets = [0]
    items: list[Any] = []
    for value in values:
        items += value
        offsets.append(len(items))
    keys = pa.array([str(number) for number in range(len(items))], pa.string())
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()), keys, column(kind.item_type, *items)
    )


@pytest.mark.parametrize(
    ("kind", "values", "bad"),
    [
        (TIME, [FIRST_US, LAST_US, None, FIRST_US - 1, LAST_US + 1], [3, 4]),
        (pa.timestamp("us"), [-(2**63), 2**63 - 1, 0], [0, 1]),
        (DATE, [FIRST_DAY, LAST_DAY, None, FIRST_DAY - 1, 2**31 - 1], [3, 4]),
        (pa.list_(DATE), [[0], None, [], [0, LAST_DAY + 1], [0]], [3]),
        (
            pa.struct([("a", pa.list_(pa.struct([("b", TIME)])))]),
            [None, {"a": [{"b": LAST_US + 1}]}],
            [1],
        ),
        (pa.map_(pa.string(), TIME), [[0], [], [0, LAST_US + 1], [1]], [2]),
        (pa.int64(), [2**63 - 1], []),
    ],
)
def test_a_value_with_a_time_that_python_does_not_have_is_bad(
    kind: pa.DataType, values: list[Any], bad: list[int]
) -> None:
    whole = column(kind, *values)
    for given, first in ((whole, 0), (whole.slice(1), 1)):
        found = with_python_times(DecodedValues(given))
        assert sorted(found.bad) == [row - first for row in bad if row >= first]
        assert all("the years are 1 to 9999" in reason for reason in found.bad.values())
        found.values.to_pylist()
    record = pa.struct([("value", kind)])
    records = as_records(
        DecodedValues(pa.StructArray.from_arrays([whole], fields=list(record))), record
    )
    assert sorted(records.bad) == bad
    assert all(reason.startswith("value") for reason in records.bad.values())
