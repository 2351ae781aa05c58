"""Counts the work of a function for ``n``, ``2n`` and ``4n`` items, and says how it grows.

A clock would say how fast this machine is today. Counts are the same on each machine: calls of
Python and of C functions (``sys.setprofile``), bytes that Arrow allocates, and what a case counts
itself, as files, stored bytes or requests.

A module of this folder has a list ``CASES``. Its tests check each case, and ``python -m
tests.growth`` prints all of them.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# The names of the counts that each case has.
CALLS = "calls"
ARROW_BYTES = "bytes of Arrow"

# From 2n to 4n, linear work grows by twice as much as from n to 2n, and quadratic work by four
# times as much. Sorting is between them, near the first.
_MOST_GROWTH = 2.7

# Caches and first calls make differences that say nothing.
_LEAST_DIFFERENCE = {CALLS: 200, ARROW_BYTES: 64 * 1024}

Counts = dict[str, int]


@dataclass(frozen=True)
class Case:
    """A function, and lists for it.

    Args:
        name: the function, and the list that grows.
        prepare: makes a list of so many items, and returns the work on it. Only the work is
            counted. It may return counts of its own.
        n: the smallest number of items: so many that their work is more than the rest. constant:
        the counts that must not grow at all, however many items there are. has_waits: the work
        waits for another thread, so its calls depend on the time, and only its own
            counts say something.
    """

    name: str
    prepare: Callable[[int], Callable[[], Mapping[str, int] | None]]
    n: int = 50
    constant: tuple[str, ...] = ()
    has_waits: bool = False


def growth(case: Case) -> dict[str, tuple[int, int, int]]:
    """Return what a case counts for ``n``, ``2n`` and ``4n`` items, by the names of the counts."""
    _count(case.prepare(case.n))
    counts = [_count(case.prepare(case.n * factor)) for factor in (1, 2, 4)]
    names = dict.fromkeys(name for counted in counts for name in counted)
    if case.has_waits:
        names = dict.fromkeys(name for name in names if name not in (CALLS, ARROW_BYTES))
    return {
        name: (counts[0].get(name, 0), counts[1].get(name, 0), counts[2].get(name, 0))
        for name in names
    }


def faults(case: Case, counts: Mapping[str, tuple[int, int, int]]) -> list[str]:
    """Return a sentence for each count that grows faster than the list; see ``growth``."""
    found = []
    for name, (first, second, third) in counts.items():
        if name in case.constant and not first == second == third:
            found.append(
                f"{case.name}: {name} must not grow, and are {first:,}, {second:,} and {third:,}"
            )
        elif third - second > _MOST_GROWTH * max(second - first, 0) + _LEAST_DIFFERENCE.get(
            name, 0
        ):
            found.append(
                f"{case.name}: {name} grow faster than the list: {first:,}, {second:,} and "
                f"{third:,}"
            )
    return found


def check(case: Case) -> None:
    """Fail if the work of a case grows faster than its list."""
    found = faults(case, growth(case))
    assert not found, "\n".join(found)


@contextmanager
def counted_calls(owner: object, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """Count the calls of a function: yield a list that gets the arguments of each.

    Args:
        owner: the class or module that has the function.
    """
    function = getattr(owner, name)
    calls: list[tuple[Any, ...]] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return function(*args, **kwargs)

    setattr(owner, name, counting)
    try:
        yield calls
    finally:
        setattr(owner, name, function)


def _count(work: Callable[[], Mapping[str, int] | None]) -> Counts:
    calls = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    pool = pa.default_memory_pool()
    allocated, former = pool.total_bytes_allocated(), sys.getprofile()
    sys.setprofile(profile)
    try:
        own = work()
    finally:
        sys.setprofile(former)
    return {CALLS: calls, ARROW_BYTES: pool.total_bytes_allocated() - allocated, **(own or {})}
