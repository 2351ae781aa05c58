"""Numbers for the distinct values of a column.

Producers choose the values, and the hashes of Arrow and of NumPy have no secret: for values with
one hash, a hash table takes quadratic time. So the values are sorted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]


def codes_of(values: pa.Array) -> tuple[Numbers, Numbers]:
    """Return for each row the number of its value, and for each number the first row that has it.
    Numbers rise with their first rows; null is a value.
    """
    # Equal values are often next to each other, and one of them is enough to be sorted.
    heads = heads_of_runs(values)
    kept = values.take(pa.array(heads))
    order = pc.array_sort_indices(kept).to_numpy().astype(np.int64)
    starts = heads_of_runs(kept.take(pa.array(order)))
    # Sorting is stable, so the first of equal values is the first row.
    firsts = order[starts]
    numbers = np.empty(len(heads), np.int64)
    numbers[order] = np.repeat(np.argsort(np.argsort(firsts)), np.diff(starts, append=len(order)))
    return np.repeat(numbers, np.diff(heads, append=len(values))), heads[np.sort(firsts)]


def heads_of_runs(values: pa.Array) -> Numbers:
    """Return the rows whose value is another one than that of the row before, and the first row."""
    if not len(values):
        return np.empty(0, np.int64)
    before, after = values.slice(0, len(values) - 1), values.slice(1)
    is_other = pc.fill_null(pc.not_equal(before, after), False).to_numpy(zero_copy_only=False)
    is_null = values.is_null().to_numpy(zero_copy_only=False)
    changes = np.flatnonzero(is_other | (is_null[1:] != is_null[:-1])) + 1
    return np.append([0], changes)
