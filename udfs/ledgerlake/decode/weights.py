"""How many bytes values take when they are decoded, counted before an object is made of them.

A few bytes may stand for much: an item of an Avro array may have one byte, an item of JSON two, and
entries are compressed. So each value has a weight, an upper bound of what its parts take as Python
objects and in columns. Its own texts and bytes are not in it, since they are as long when decoded.

Weights follow from the schema for values without arrays and maps. For all others there is a bound
by the number of their bytes. Only if a bound passes ``MAX_VALUES_BYTES``, the values of its batch
are walked through, which takes linear time. A value whose weight passes the limit is not decoded.
Other values of its batch do not decide about that: in a batch that is not walked, no bound passes
it.

``cuts`` divides rows so that no more is decoded at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

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

# Adds what the bytes of values weigh to the weights of their rows, -1 for a row whose bytes do not
# fit its schema. It may stop in a row that passes the limit.
Walk = Callable[["Encoded", "Weights"], None]


@dataclass(frozen=True)
class Weigher:
    """The weights of values of one schema.

    Args:
        fixed_bytes: the weight of a value, whatever its bytes are.
        rate: what each of its bytes adds at most.
        walk: counts what the bytes add, if they may pass the limit.
        has_keys: messages' keys are decoded too.
    """

    fixed_bytes: int
    rate: int = 0
    walk: Walk | None = None
    has_keys: bool = False

    def __call__(self, encoded: Encoded) -> Weights:
        """Return the weight of each value. One above the limit may be larger."""
        most = self.fixed_bytes + self._most(encoded)
        if most.max(initial=0) <= MAX_VALUES_BYTES:
            return most
        weights: Weights = np.full(len(encoded.payloads), self.fixed_bytes, np.int64)
        self.add(encoded, weights)
        return weights

    def add(self, encoded: Encoded, weights: Weights) -> None:
        """Add what the bytes of values weigh to the weights of their rows."""
        if self.walk is None or not self.rate:
            return
        most = weights + self._most(encoded)
        self.walk(encoded, weights)
        np.copyto(weights, np.where(weights < 0, most, np.minimum(weights, most)))

    def _most(self, encoded: Encoded) -> Weights:
        sizes: Weights = np.sum(
            [np.diff(offsets_of(part)) for part in self._parts(encoded)], axis=0, dtype=np.int64
        )
        return self.rate * sizes

    def _parts(self, encoded: Encoded) -> list[pa.BinaryArray]:
        has_keys = self.has_keys and encoded.keys is not None
        return [encoded.payloads, encoded.keys] if has_keys else [encoded.payloads]


def bytes_of(payloads: pa.BinaryArray) -> tuple[Bytes, Offsets]:
    """Return the data of payloads, and where each of them begins in it, see ``offsets_of``."""
    return np.frombuffer(payloads.buffers()[2] or b"", np.uint8), offsets_of(payloads)


def offsets_of(payloads: pa.BinaryArray) -> Offsets:
    """Return where each payload begins in their data, and where the last one ends."""
    offsets = np.frombuffer(payloads.buffers()[1] or bytes(4), np.int32)
    return offsets[payloads.offset : payloads.offset + len(payloads) + 1]


def too_heavy(weight: int) -> str:
    """Return why a value is not decoded."""
    return f"its values take {weight} bytes when they are decoded; the limit is {MAX_VALUES_BYTES}"


def fixed_bytes(kind: pa.DataType) -> int:
    """Return the weight of a value of a type without the items of its arrays and maps. The columns
    of a record that is null take as much.
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
