"""How many messages are due when: the spans."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ledgerlake.delay.due_times import MOST_PARTS, DueSpan, DueTimes, due_spans, spans_of_length
from ledgerlake.wire.limits import MAX_TIME_MS

if TYPE_CHECKING:
    from collections.abc import Iterable

_MINUTE_MS, _HOUR_MS, _DAY_MS = 60_000, 3_600_000, 86_400_000


def times(*pairs: tuple[int, int]) -> DueTimes:
    """Parts of one time each."""
    first_ms = np.array([pair[0] for pair in pairs])
    return DueTimes(first_ms, first_ms, np.array([pair[1] for pair in pairs]))


def one_at_each(first_ms: Iterable[int]) -> DueTimes:
    return times(*((time_ms, 1) for time_ms in first_ms))


def test_a_span_tells_its_first_message_and_every_message_counts_once() -> None:
    assert due_spans([]) == []
    parts = [times((9_000, 3)), times((5_400, 1), (5_900, 2), (6_000, 4))]
    spans = due_spans(parts)
    assert spans == [DueSpan(5_400, 1000, 3), DueSpan(6_000, 1000, 4), DueSpan(9_000, 1000, 3)]
    assert [(span.begin_ms, span.end_ms) for span in spans[:2]] == [(5_000, 6_000), (6_000, 7_000)]


def test_the_messages_of_a_few_segments_count_to_the_precision_of_a_part() -> None:
    times_ms = np.array(sorted(range(0, 30 * _DAY_MS, _HOUR_MS)))
    parts = DueTimes.of_messages(times_ms)
    assert len(parts.counts) <= MOST_PARTS
    assert parts.counts.sum() == len(times_ms)
    for count in (1, 2, 100, len(times_ms)):
        last = parts.of_last(count, int(times_ms[-count]))
        assert (last.counts.sum(), last.first_ms[0]) == (count, times_ms[-count])
        assert all(last.counts > 0)
    assert DueTimes.of_messages(np.array([7])).of_last(1, 7).counts.tolist() == [1]


@pytest.mark.parametrize("first_ms", [0, 1_777_626_012_345])
def test_spans_get_longer_with_the_time_until_they_are_due(first_ms: int) -> None:
    spans = due_spans([one_at_each(range(first_ms, first_ms + 30 * _DAY_MS, _MINUTE_MS // 2))])
    assert sum(span.count for span in spans) == 2 * 30 * 24 * 60
    for span, later in pairwise(spans):
        assert span.first_ms < later.first_ms
        assert span.length_ms <= later.length_ms
        assert span.begin_ms % span.length_ms == 0
        ahead_ms = span.first_ms - first_ms
        longest_ms = (
            _MINUTE_MS
            if ahead_ms < 2 * _HOUR_MS
            else _HOUR_MS
            if ahead_ms < 8 * _DAY_MS
            else _DAY_MS
        )
        assert span.length_ms <= (1000 if ahead_ms < _MINUTE_MS else longest_ms)
    # Each length goes on until a span of the next one can begin.
    assert sum(span.length_ms == _MINUTE_MS for span in spans) <= 120 + 60


def test_there_are_few_spans_however_far_messages_are_delayed() -> None:
    century_ms = 100 * 365 * _DAY_MS
    densely = [
        range(60),
        range(0, 7_200, 60),
        range(0, 8 * 86_400, 3_600),
        range(0, 100 * 365 * 86_400, 86_400),
    ]
    parts = [one_at_each(second * 1000 for second in seconds) for seconds in densely]
    assert 700 < len(due_spans(parts)) < 1_500
    late = due_spans([one_at_each([*range(0, MAX_TIME_MS, century_ms), MAX_TIME_MS])])
    assert len(late) < 100
    assert late[-1].end_ms == MAX_TIME_MS + 1


def test_spans_of_several_topic_partitions_are_added_up_to_a_length() -> None:
    spans = [
        DueSpan(7_250_000, 1000, 2),
        DueSpan(7_260_000, 60_000, 3),
        DueSpan(11_000_000, 60_000, 4),
    ]
    others = [DueSpan(7_200_500, 1000, 1, is_estimate=True)]
    by_minute = [DueSpan(7_200_500, 60_000, 3, is_estimate=True), *spans[1:]]
    assert spans_of_length([*spans, *others], 60_000) == by_minute
    by_hour = [DueSpan(7_200_500, _HOUR_MS, 6, is_estimate=True), DueSpan(11_000_000, _HOUR_MS, 4)]
    assert spans_of_length([*spans, *others], _HOUR_MS) == by_hour
    assert spans_of_length(spans, _DAY_MS) == [DueSpan(7_250_000, _DAY_MS, 9)]
    assert spans_of_length([], _DAY_MS) == []


def test_each_length_reaches_as_far_as_promised_whatever_waits_beyond() -> None:
    first_ms = 1_777_626_012_345
    ahead_ms = [
        105 * _MINUTE_MS,
        119 * _MINUTE_MS,
        7 * _DAY_MS,
        191 * _HOUR_MS,
        310 * _DAY_MS,
        399 * _DAY_MS,
    ]
    ahead_ms += [401 * _DAY_MS, 40_000 * _DAY_MS, 2_000_000 * _DAY_MS]
    spans = due_spans([one_at_each([first_ms, *(first_ms + time_ms for time_ms in ahead_ms)])])
    lengths_ms = [span.length_ms for span in spans]
    assert lengths_ms[:7] == [1000, _MINUTE_MS, _MINUTE_MS, _HOUR_MS, _HOUR_MS, _DAY_MS, _DAY_MS]
    assert lengths_ms[-1] == 36_500 * _DAY_MS
    for length_ms in (_MINUTE_MS, _HOUR_MS, _DAY_MS):
        assert [
            span.count for span in spans_of_length(spans, length_ms) if span.length_ms <= _DAY_MS
        ][-2:] == [1, 1]


def test_messages_of_a_segment_are_taken_for_evenly_spread() -> None:
    segment = DueTimes(np.array([10 * _DAY_MS]), np.array([20 * _DAY_MS]), np.array([241]))
    first = one_at_each([9 * _DAY_MS])
    spans = due_spans([first, segment])
    assert [span.count for span in spans_of_length(spans, _DAY_MS)] == [1, *(10 * [24]), 1]
    assert [span.is_estimate for span in spans_of_length(spans, _DAY_MS)] == [False, *(11 * [True])]
    within = DueTimes(np.array([9 * _DAY_MS]), np.array([9 * _DAY_MS + 999]), np.array([241]))
    assert due_spans([within]) == [DueSpan(9 * _DAY_MS, 1000, 241)]
    assert (
        sum(
            span.count
            for span in due_spans(
                [DueTimes(np.array([0]), np.array([MAX_TIME_MS]), np.array([5_000]))]
            )
        )
        == 5_000
    )


def test_spans_of_a_length_hold_every_message_once_and_are_apart() -> None:
    random = np.random.default_rng(7)
    for _ in range(50):
        spans, times_ms = [], []
        for _ in range(3):
            first_ms = int(random.integers(0, 10 * _DAY_MS))
            ahead_ms = np.sort(
                np.exp(random.uniform(0, np.log(1000 * _DAY_MS), 200)).astype(np.int64)
            )
            spans += due_spans([one_at_each((first_ms + ahead_ms).tolist())])
            times_ms += (first_ms + ahead_ms).tolist()
        for length_ms in (_MINUTE_MS, _HOUR_MS, _DAY_MS):
            added = spans_of_length(spans, length_ms)
            for span in added:
                assert span.count == sum(
                    span.begin_ms <= time_ms < span.end_ms for time_ms in times_ms
                )
                assert span.length_ms >= length_ms
            assert sum(span.count for span in added) == 600
            assert all(span.end_ms <= later.begin_ms for span, later in pairwise(added))
