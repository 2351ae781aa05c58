"""When a pipeline plans its next micro-batch: at the times of its trigger, and when messages are
due.
"""

from __future__ import annotations

import pytest

from ledgerlake.source.trigger_times import TriggerTimes


@pytest.fixture
def times() -> TriggerTimes:
    planned = TriggerTimes(1000)
    planned.plan(5300)
    return planned


def test_the_first_batch_is_planned_at_once() -> None:
    assert TriggerTimes(1000).pause_ms(5300, None) == 0


@pytest.mark.parametrize(("clock_ms", "pause_ms"), [(5300, 700), (5999, 1), (6000, 0), (6500, 0)])
def test_plain_messages_wait_for_the_next_multiple_of_the_interval(
    times: TriggerTimes, clock_ms: int, pause_ms: int
) -> None:
    assert times.pause_ms(clock_ms, None) == pause_ms


@pytest.mark.parametrize(
    ("due_ms", "pause_ms"), [(5000, 0), (5499, 0), (5500, 1), (5600, 101), (9000, 500)]
)
def test_a_message_that_is_due_does_not_wait_for_it(
    times: TriggerTimes, due_ms: int, pause_ms: int
) -> None:
    assert times.pause_ms(5500, due_ms) == pause_ms


def test_a_batch_for_a_message_that_is_due_does_not_delay_plain_ones(times: TriggerTimes) -> None:
    times.plan(5900)
    assert times.pause_ms(5950, None) == 50


def test_a_time_that_passed_while_a_batch_ran_is_made_up_for_once(times: TriggerTimes) -> None:
    assert times.pause_ms(8200, None) == 0
    times.plan(8200)
    assert times.pause_ms(8200, None) == 800


def test_a_clock_that_was_set_back_stops_nothing(times: TriggerTimes) -> None:
    assert times.pause_ms(1500, None) == 0
    times.plan(1500)
    assert times.pause_ms(1500, None) == 500


def test_an_interval_of_0_plans_each_batch_as_soon_as_the_last_one_ends() -> None:
    times = TriggerTimes(0)
    for clock_ms in (5300, 5300, 5301):
        times.plan(clock_ms)
        assert times.pause_ms(clock_ms + 1, None) == 0
