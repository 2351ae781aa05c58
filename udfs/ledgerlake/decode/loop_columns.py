"""What the compiled loops for values read: numbers by column and row, which become Arrow arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ledgerlake.decode.columns import DecodedValues, Encoded
from ledgerlake.decode.kernels import gather
from ledgerlake.outside import Unreadable, reading

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ledgerlake.decode.columns import Read

    Matrix = NDArray[np.int64]


@dataclass(frozen=True)
class LoopColumns:
    """The columns that a loop fills.

    A column has a number for each row: a value, the bits of a floating one, or where its bytes
    begin in ``data``, with their size in ``sizes``. ``valid`` says which are there, ``ok`` which
    rows were read.
    """

    data: NDArray[np.uint8]
    offsets: NDArray[np.int32]
    present: NDArray[np.bool_]
    values: Matrix
    sizes: Matrix
    valid: NDArray[np.uint8]
    ok: NDArray[np.uint8]

    @classmethod
    def of(cls, payloads: pa.BinaryArray, columns: int) -> LoopColumns:
        """Return empty columns for the rows of payloads."""
        count = len(payloads)
        offsets = np.frombuffer(payloads.buffers()[1], np.int32)[
            payloads.offset : payloads.offset + count + 1
        ]
        data = np.frombuffer(payloads.buffers()[2] or b"", np.uint8)
        values, sizes = (np.zeros((columns, count), np.int64) for _ in range(2))
        valid, ok = np.zeros((columns, count), np.uint8), np.zeros(count, np.uint8)
        return cls(data, offsets, payloads.is_valid().to_numpy(False), values, sizes, valid, ok)

    def missing(self, column: int) -> NDArray[np.bool_]:
        result: NDArray[np.bool_] = self.valid[column] == 0
        return result

    def bytes_of(self, column: int, kind: pa.DataType, is_valid: NDArray[np.bool_]) -> pa.Array:
        """Return spans of the data as texts or bytes, which may not be valid texts."""
        sizes = self.sizes[column]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        out = np.empty(int(offsets[-1]), np.uint8)
        gather(self.data, self.values[column], sizes, offsets, out)
        bits = pa.array(is_valid).buffers()[1]
        return pa.Array.from_buffers(
            kind, len(sizes), [bits, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(out)]
        )

    def refuse(self, rows: Sequence[int]) -> None:
        """Discard the values that were read for some rows."""
        self.ok[rows] = 0
        for numbers in (self.valid, self.sizes, self.values):
            numbers[:, rows] = 0

    def refuse_wrong_texts(self, columns: Sequence[int]) -> None:
        """Take back the rows that have a text which is not UTF-8 in one of the columns."""
        for column in columns:
            texts = self.bytes_of(column, pa.string(), ~self.missing(column))
            try:
                with reading():
                    texts.validate(full=True)
            except Unreadable:
                payloads = texts.view(pa.binary()).to_pylist()
                self.refuse([row for row, payload in enumerate(payloads) if not _is_text(payload)])


def with_loop(
    read: Callable[[pa.BinaryArray], tuple[pa.Array, NDArray[np.bool_]]],
    finished: Callable[[pa.Array], pa.Array],
    decode: Read,
) -> Read:
    """Return a function that reads regular values by a loop, and hands all others to ``decode``.

    Args:
        read: returns the values, and which rows were read.
        finished: makes those values what ``decode`` returns.
    """

    def decode_both(encoded: Encoded) -> DecodedValues:
        payloads = encoded.payloads
        values, is_read = read(payloads)
        others = np.flatnonzero(payloads.is_valid().to_numpy(False) & ~is_read)
        if not len(others):
            return DecodedValues(finished(values))
        decoded = decode(Encoded(payloads.take(pa.array(others))))
        places = np.arange(len(payloads))
        places[others] = len(payloads) + np.arange(len(others))
        together = pa.concat_arrays([finished(values), decoded.values]).take(pa.array(places))
        return DecodedValues(
            together, {int(others[row]): reason for row, reason in decoded.bad.items()}
        )

    return decode_both


def _is_text(data: bytes | None) -> bool:
    try:
        return data is None or data.decode() is not None
    except UnicodeDecodeError:
        return False
