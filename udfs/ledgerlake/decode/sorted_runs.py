"""A merge of sorted sources: batches of rows with keys of several columns, one batch of each source
in memory.

A row is output if no source can still have an earlier one. In each step, these are the rows up to
the smallest of the last keys of the batches in memory. If the first keys of the sources are known,
a source is opened when the rows before its own have been output.
"""

from __future__ import annotations

from collections import deque
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
    first_keys: Sequence[tuple[int, ...]] | None = None,
) -> Iterator[Rows]:
    """Yield the rows of several sorted sources in order; no batch of a source is empty.

    Args:
        keys: the key columns of a batch, most significant first.
        part: returns a number of rows of a batch, from a row on.
        joined: returns several batches as one, in order.
        first_keys: the key of each source's first row, if they rise.
    """
    unopened = deque(enumerate(sources))
    heads: dict[int, Rows] = {}
    while heads or unopened:
        last = min((_last_key(keys(rows)) for rows in heads.values()), default=None)
        while unopened and (
            first_keys is None or last is None or first_keys[unopened[0][0]] <= last
        ):
            number, source = unopened.popleft()
            rows = next(source, None)
            if rows is not None:
                heads[number] = rows
                own_last = _last_key(keys(rows))
                last = own_last if last is None else min(last, own_last)
        if last is not None:
            yield joined(_taken_through(last, heads, sources, keys, part))


def _taken_through(
    last: tuple[int, ...],
    heads: dict[int, Rows],
    sources: Sequence[Iterator[Rows]],
    keys: Callable[[Rows], Columns],
    part: Callable[[Rows, int, int], Rows],
) -> list[Rows]:
    """Take the rows up to a key from ``heads``, and read the next batch of a source that has no
    others; return the rows.
    """
    ready = []
    for number, rows in list(heads.items()):
        count = count_through(keys(rows), last)
        if count:
            ready.append(part(rows, 0, count))
        rest = (
            part(rows, count, rows.num_rows - count)
            if count < rows.num_rows
            else next(sources[number], None)
        )
        if rest is None:
            del heads[number]
        else:
            heads[number] = rest
    return ready


def _last_key(columns: Columns) -> tuple[int, ...]:
    return tuple(int(column[-1]) for column in columns)


def count_through(columns: Columns, last: tuple[int, ...]) -> int:
    """Return how many sorted rows there are up to and including a key."""
    result = np.ones(len(columns[0]), dtype=bool)
    for column, value in zip(reversed(columns), reversed(last), strict=True):
        result = (column < value) | ((column == value) & result)
    return int(result.sum())
