"""A merge of sorted sources: batches of rows with keys of several columns, one batch of each source
in memory.

A row is output if no source can still have an earlier one. In each step, these are the rows up to
the smallest of the last keys of the batches in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Columns = tuple[NDArray[np.int64], ...]


class _Rows(Protocol):
    """The interface of tables and record batches that the merge needs."""

    @property
    def num_rows(self) -> int: ...


Rows = TypeVar("Rows", bound=_Rows)


def merge_sorted(
    sources: Sequence[Iterator[Rows]],
    keys: Callable[[Rows], Columns],
    part: Callable[[Rows, int, int], Rows],
    joined: Callable[[list[Rows]], Rows],
) -> Iterator[Rows]:
    """Yield the rows of several sorted sources in order; no batch of a source is empty.

    Args:
        keys: the key columns of a batch, most significant first.
        part: returns a number of rows of a batch, from a row on.
        joined: returns several batches as one, in order.
    """
    heads = {number: rows for number, source in enumerate(sources) if (rows := next(source, None)) is not None}
    while heads:
        last = min(tuple(int(column[-1]) for column in keys(rows)) for rows in heads.values())
        ready = []
        for number, rows in list(heads.items()):
            count = count_through(keys(rows), last)
            if count:
                ready.append(part(rows, 0, count))
            rest = part(rows, count, rows.num_rows - count) if count < rows.num_rows else next(sources[number], None)
            if rest is None:
                del heads[number]
            else:
                heads[number] = rest
        yield joined(ready)


def count_through(columns: Columns, last: tuple[int, ...]) -> int:
    """Return how many sorted rows there are up to and including a key."""
    result = np.ones(len(columns[0]), dtype=bool)
    for column, value in zip(reversed(columns), reversed(last), strict=True):
        result = (column < value) | ((column == value) & result)
    return int(result.sum())
