"""Which rows of merged files go together into one file, so that a reader who filters by the columns
of a clustered table opens few files. Pure: values in, numbers out.

The rows are halved by the first column, each half by the second one, and so on in turn, until there
are as many parts as files. So each file has a narrow range of all columns (a k-d tree). Nulls come
before all values. Rows with the same value of a column stay together as far as that column decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Split:
    """Rows whose value in a column is less than ``value`` are ``below``, others ``above``. A side
    without a split of its own is a part.
    """

    column: int
    value: pa.Scalar
    below: Split | None
    above: Split | None

    @property
    def parts(self) -> int:
        """Return how many parts it makes."""
        return parts_of(self.below) + parts_of(self.above)


def parts_of(split: Split | None) -> int:
    """Return how many parts a split makes; one without it."""
    return 1 if split is None else split.parts


def split_of(sample: pa.Table, parts: int, column: int = 0) -> Split | None:
    """Return a split into parts of about as many rows each; None if that is not possible.

    Args:
        sample: some rows of the columns.
        parts: how many, at most.
        column: the number of the column by which to begin.
    """
    if parts < 2:
        return None
    for offset in range(sample.num_columns):
        chosen = (column + offset) % sample.num_columns
        value = _middle(sample.column(chosen))
        if value is not None:
            is_below = _is_below(sample, chosen, value)
            return Split(
                chosen,
                value,
                split_of(sample.filter(is_below), parts // 2, chosen + 1),
                split_of(sample.filter(pc.invert(is_below)), parts - parts // 2, chosen + 1),
            )
    return None


def part_numbers(columns: pa.Table, split: Split | None) -> NDArray[np.int64]:
    """Return the number of the part of each row."""
    numbers = np.zeros(columns.num_rows, dtype=np.int64)
    if split is None or not columns.num_rows:
        return numbers
    is_below = _is_below(columns, split.column, split.value)
    below = is_below.to_numpy()
    numbers[below] = part_numbers(columns.filter(is_below), split.below)
    numbers[~below] = parts_of(split.below) + part_numbers(
        columns.filter(pc.invert(is_below)), split.above
    )
    return numbers


def _is_below(columns: pa.Table, column: int, value: pa.Scalar) -> pa.ChunkedArray:
    return pc.fill_null(pc.less(columns.column(column), value), True)


def _middle(values: pa.ChunkedArray) -> pa.Scalar | None:
    """Return a value near the middle that has rows on both sides of it; None if there is none."""
    known = values.drop_null()
    ordered = known.take(pc.sort_indices(known))
    if not len(ordered):
        return None
    middle = ordered[max(0, len(values) // 2 - values.null_count)]
    if values.null_count or pc.less(ordered[0], middle).as_py():
        return middle
    larger = ordered.filter(pc.greater(ordered, middle))
    return larger[0] if len(larger) else None
