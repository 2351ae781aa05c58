"""Merging what stands in order: batches of rows with keys of several columns, held one of each
source.

A row goes out when nothing earlier can still come. In each step everything up to the smallest of
the held batches' last keys can: no source has anything earlier left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Columns = tuple[NDArray[np.int64], ...]


class _Rows(Protocol):
    """The interface that tables and record batches have in common here."""

    @property
    def num_rows(self) -> int: ...


Rows = TypeVar("Rows", bound=_Rows)


def merge_sorted(
    sources: Sequence[Iterator[Rows]],
    keys: Callable[[Rows], Columns],
    part: Callable[[Rows, int, int], Rows],
    joined: Callable[[list[Rows]], Rows],
) -> Iterator[Rows]:
    """Rows of several sources in order, each source's own in order; their batches are not empty.

    Args:
        keys: the key columns of a batch, most significant first.
        part: so many rows of a batch, from one on.
        joined: several batches as one, in order.
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
    """Return how many rows in order come up to and including a key."""
    result = np.ones(len(columns[0]), dtype=bool)
    for column, value in zip(reversed(columns), reversed(last), strict=True):
        result = (column < value) | ((column == value) & result)
    return int(result.sum())
