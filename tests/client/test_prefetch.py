"""Reading ahead: order, limits, errors, and an end that leaves no thread behind."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from ledgerlake.client.prefetch import prefetched

if TYPE_CHECKING:
    from collections.abc import Generator


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ledgerlake-prefetch"]


def test_items_come_in_order_and_the_thread_ends_with_them() -> None:
    assert list(prefetched((number for number in range(100)), 3)) == list(range(100))
    assert threads() == []


def test_no_more_is_taken_ahead_than_asked_for() -> None:
    taken_numbers = []

    def source() -> Generator[int, None, None]:
        for number in range(100):
            taken_numbers.append(number)
            yield number

    items = prefetched(source(), 3)
    assert next(items) == 0
    time.sleep(0.3)
    assert len(taken_numbers) <= 1 + 3 + 1


def test_what_the_source_raises_is_raised_behind_what_it_gave() -> None:
    def source() -> Generator[int, None, None]:
        yield 1
        raise ValueError("broken")

    items = prefetched(source(), 3)
    assert next(items) == 1
    with pytest.raises(ValueError, match="broken"):
        next(items)
    assert threads() == []


def test_whoever_stops_early_ends_the_source_too() -> None:
    closed = threading.Event()

    def source() -> Generator[int, None, None]:
        try:
            yield from range(1000)
        finally:
            closed.set()

    items = prefetched(source(), 2)
    assert next(items) == 0
    items.close()  # type: ignore[attr-defined]
    assert closed.is_set()
    assert threads() == []
