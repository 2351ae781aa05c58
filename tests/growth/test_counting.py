"""The counting itself: linear work passes, and quadratic work is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.growth.counting import Case, check, counted_calls, faults, growth

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _linear(n: int) -> Callable[[], Mapping[str, int]]:
    return lambda: {"items": sum(len([number]) for number in range(n))}


def _quadratic(n: int) -> Callable[[], Mapping[str, int]]:
    return lambda: {"items": sum(sum(1 for _ in range(number)) for number in range(n))}


def _sorting(n: int) -> Callable[[], Mapping[str, int]]:
    return lambda: {"items": len(sorted([number * 7919 % 1009 for number in range(n)], key=abs))}


def test_linear_work_passes_and_so_does_sorting() -> None:
    check(Case("linear", _linear))
    check(Case("sorting", _sorting))


@pytest.mark.parametrize("count", ["calls", "items"])
def test_quadratic_work_is_found_by_each_count(count: str) -> None:
    case = Case("quadratic", _quadratic)

    assert any(f"quadratic: {count} grow faster" in fault for fault in faults(case, growth(case)))


def test_a_count_that_must_not_grow_may_not_be_linear() -> None:
    case = Case("linear", _linear, constant=("items",))

    assert faults(case, growth(case)) == ["linear: items must not grow, and are 50, 100 and 200"]


def test_calls_of_a_function_are_counted_with_their_arguments() -> None:
    class Owner:
        def twice(self, number: int) -> int:
            return 2 * number

    with counted_calls(Owner, "twice") as calls:
        assert Owner().twice(4) == 8

    assert [args[1:] for args in calls] == [(4,)]
    assert Owner().twice(1) == 2
    assert len(calls) == 1
