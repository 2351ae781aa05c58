"""Values of primitive schemas: big-endian, as Pulsar's clients write them. One kind is not
converted to another.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ledgerlake.decode.columns import DecodedValues, decode_rows, exceeds
from ledgerlake.decode.schema import TIMESTAMP
from ledgerlake.outside import Unreadable, reading
from ledgerlake.pb import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_T = pb.Schema

_NUMBERS: dict[int, tuple[str, pa.DataType]] = {
    _T.Int8: (">i1", pa.int8()),
    _T.Int16: (">i2", pa.int16()),
    _T.Int32: (">i4", pa.int32()),
    _T.Int64: (">i8", pa.int64()),
    _T.Float: (">f4", pa.float32()),
    _T.Double: (">f8", pa.float64()),
    _T.LocalTime: (">i8", pa.int64()),
}

TYPES: dict[int, pa.DataType] = {
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
    with contextlib.suppress(Unreadable), reading():
        return DecodedValues(payloads.cast(pa.string()))
    rows, bad = decode_rows(payloads, lambda payload: payload.decode())
    return DecodedValues(pa.array(rows, pa.string()), bad)


def _number(kind: int) -> Callable[[pa.BinaryArray], DecodedValues]:
    dtype, arrow_type = np.dtype(_NUMBERS[kind][0]), _NUMBERS[kind][1]

    def decode(payloads: pa.BinaryArray) -> DecodedValues:
        found, present, bad = _fixed(payloads, dtype)
        return DecodedValues(
            pa.array(found.astype(dtype.newbyteorder("=")), arrow_type, mask=~present), bad
        )

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
    _refuse(exceeds(days, 2**31 - 1), "the day is out of range", present, bad)
    return DecodedValues(
        pa.array(np.where(present, days, 0).astype(np.int32), pa.date32(), mask=~present), bad
    )


def _local_date_times(payloads: pa.BinaryArray) -> DecodedValues:
    found, present, bad = _fixed(payloads, np.dtype([("day", ">i8"), ("nanoseconds", ">i8")]))
    more = found["nanoseconds"].astype(np.int64) // 1000
    return _in_microseconds(
        found["day"].astype(np.int64), 86_400 * 10**6, present, bad, pa.timestamp("us"), more
    )


def _in_microseconds(
    values: NDArray[np.int64],
    unit: int,
    present: NDArray[np.bool_],
    bad: dict[int, str],
    target: pa.DataType,
    more: NDArray[np.int64] | int = 0,
) -> DecodedValues:
    _refuse(exceeds(values, (2**63 - 1) // unit - 1), "the time is out of range", present, bad)
    if not isinstance(more, int):
        _refuse((more < 0) | (more >= unit), "the nanoseconds are out of range", present, bad)
    microseconds = np.where(present, values, 0) * unit + np.where(present, more, 0)
    return DecodedValues(pa.array(microseconds, pa.int64(), mask=~present).cast(target), bad)


def _refuse(
    wrong: NDArray[np.bool_], why: str, present: NDArray[np.bool_], bad: dict[int, str]
) -> None:
    wrong = wrong & present
    bad.update(dict.fromkeys(np.flatnonzero(wrong).tolist(), why))
    present &= ~wrong


def _fixed(
    payloads: pa.BinaryArray, dtype: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[np.bool_], dict[int, str]]:
    """Return values of one size as numbers, a mask of the values that are not null, and errors for
    values of another size.
    """
    count, width = len(payloads), dtype.itemsize
    present = (
        np.ones(count, dtype=bool)
        if payloads.null_count == 0
        else payloads.is_valid().to_numpy(False)
    )
    offsets = np.frombuffer(payloads.buffers()[1], dtype=np.int32)[
        payloads.offset : payloads.offset + count + 1
    ]
    wrong = np.diff(offsets) != width
    bad: dict[int, str] = {}
    _refuse(wrong, f"a value of this kind has {width} bytes", present, bad)
    data = np.frombuffer(payloads.buffers()[2] or b"", dtype=np.uint8)
    values = np.zeros((count, width), dtype=np.uint8)
    values[present] = data[offsets[:-1][present][:, None] + np.arange(width)]
    return values.reshape(-1).view(dtype), present, bad


DECODERS: dict[int, Callable[[pa.BinaryArray], DecodedValues]] = {
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
