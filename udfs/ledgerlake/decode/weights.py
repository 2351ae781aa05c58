"""How many bytes values take when they are decoded, counted before an object is made of them.

A few bytes may stand for much: an item of an Avro array may have one byte, an item of JSON two, and
entries are compressed. So each value has a weight, an upper bound of what its parts take as Python
objects and in columns. Its own texts and bytes are not in it, since they are as long when decoded.

Weights follow from the schema for values without arrays and maps. For all others there is a bound
by the number of their bytes. Only if that passes ``MAX_VALUES_BYTES``, the values are walked
through, which takes linear time and makes no objects.

A value whose weight passes the limit is not decoded. ``cuts`` divides rows so that no more is
decoded at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from ledgerlake.wire.limits import MAX_VALUES_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ledgerlake.decode.columns import Encoded

    Bytes: TypeAlias = "NDArray[np.uint8]"
    Offsets: TypeAlias = "NDArray[np.int32]"
    Weights: TypeAlias = "NDArray[np.int64]"

# A field, an item or a key: its place in a dict or a list, its object, its place in a column.
PART_BYTES = 64

# A record as a dict or a message of Protobuf, in addition to its fields.
RECORD_BYTES = 320

# Adds what rows weigh to their weights, -1 for a row whose bytes do not fit its schema. It may stop
# in a row that passes the limit.
Walk = Callable[["Bytes", "Offsets", "Weights"], None]

# Returns an upper bound of the weights of all bytes together, in a fast way.
Bound = Callable[["Bytes"], int]


class Weigh(Protocol):
    """Returns the weight of each value. One above the limit may be larger.

    ``fixed_bytes`` is the weight of a value, whatever its bytes are, and ``rate`` what each of its
    bytes adds at most.
    """

    @property
    def fixed_bytes(self) -> int: ...

    @property
    def rate(self) -> int: ...

    def most_bytes(self, encoded: Encoded) -> int:
        """Return an upper bound of all weights together, in constant time."""

    def __call__(self, encoded: Encoded) -> Weights: ...


@dataclass(frozen=True)
class Weigher:
    """The weights of values of one schema, by their bytes.

    Args:
        fixed_bytes, rate: see ``Weigh``.
        walk: counts what the bytes add, if they may pass the limit.
        bound: may show that ``walk`` is not needed.
    """

    fixed_bytes: int
    rate: int = 0
    walk: Walk | None = None
    bound: Bound | None = None

    def most_bytes(self, encoded: Encoded) -> int:
        """Return an upper bound of all weights together, in constant time."""
        offsets = offsets_of(encoded.payloads)
        return self.fixed_bytes * len(encoded.payloads) + self.rate * int(offsets[-1] - offsets[0])

    def __call__(self, encoded: Encoded) -> Weights:
        """Return the weight of each value. One above the limit may be larger."""
        count = len(encoded.payloads)
        offsets = offsets_of(encoded.payloads)
        data = np.frombuffer(encoded.payloads.buffers()[2] or b"", np.uint8)
        weights: Weights = self.fixed_bytes + self.rate * np.diff(offsets).astype(np.int64)
        total = int(weights.sum())
        if self.walk is None or not self.rate or total <= MAX_VALUES_BYTES:
            return weights
        if self.bound is not None and weights.max() <= MAX_VALUES_BYTES:
            bound = count * self.fixed_bytes + self.bound(data[offsets[0] : offsets[-1]])
            if bound <= MAX_VALUES_BYTES:
                return weights * bound // total
        walked: Weights = np.full(count, self.fixed_bytes, np.int64)
        self.walk(data, offsets, walked)
        return np.where(walked < 0, weights, np.minimum(walked, weights))


def offsets_of(payloads: pa.BinaryArray) -> Offsets:
    """Return where each payload begins in their data, and where the last one ends."""
    offsets = np.frombuffer(payloads.buffers()[1] or bytes(4), np.int32)
    return offsets[payloads.offset : payloads.offset + len(payloads) + 1]


def too_heavy(weight: int) -> str:
    """Return why a value is not decoded."""
    return f"its values take {weight} bytes when they are decoded; the limit is {MAX_VALUES_BYTES}"


def fixed_bytes(kind: pa.DataType) -> int:
    """Return the weight of a value of a type without the items of its arrays and maps. The columns of
    a record that is null take as much.
    """
    if pa.types.is_struct(kind):
        return RECORD_BYTES + sum(fixed_bytes(field.type) for field in kind)
    return PART_BYTES


def cuts(weights: Weights) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that weigh ``MAX_VALUES_BYTES`` at most, or have one row."""
    ends = np.cumsum(weights)
    start = 0
    while start < len(weights):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + MAX_VALUES_BYTES, "right")))
        yield start, stop
        start = stop
