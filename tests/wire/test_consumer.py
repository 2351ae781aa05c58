"""Permits, counted in messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ledgerlake.wire.consumer import Permits


def test_half_a_window_is_granted_at_a_time() -> None:
    permits = Permits(window=10)
    assert permits.open() == 10
    assert [permits.take(1) for _ in range(5)] == [0, 0, 0, 0, 5]


def test_a_batch_larger_than_the_window_is_paid_back_in_full() -> None:
    permits = Permits(window=10)
    permits.open()
    assert permits.take(1000) == 1000
    assert permits.outstanding == 10


@given(st.integers(1, 50), st.lists(st.integers(1, 200), max_size=100))
def test_the_broker_never_runs_dry_and_never_owes(window: int, counts: list[int]) -> None:
    permits = Permits(window)
    at_the_broker = permits.open()
    for count in counts:
        at_the_broker += permits.take(count) - count
        assert 0 < at_the_broker <= window
