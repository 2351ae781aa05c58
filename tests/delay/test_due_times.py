"""How many messages are due when: the spans."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ledgerlake.delay.due_times import MOST_PARTS, DueSpan, DueTimes, due_spans

if TYPE_CHECKING:
    from collections.abc import Iterable

_MINUTE_MS, _HOUR_MS, _DAY_MS = 60_000, 3_600_000, 86_400_000


def times(*pairs: tuple[int, int]) -> DueTimes:
    return DueTimes(np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs]))


def one_at_each(first_ms: Iterable[int]) -> DueTimes:
    return times(*((time_ms, 1) for time_ms in first_ms))


def test_a_span_begins_with_its_first_message_and_every_message_counts_once() -> None:
    assert due_spans([]) == []
    parts = [times((9_000, 3)), times((5_000, 1), (5_900, 2), (6_000, 4))]
    assert due_spans(parts) == [DueSpan(5_000, 7), DueSpan(9_000, 3)]


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


def test_spans_get_longer_with_the_time_until_they_are_due() -> None:
    spans = due_spans([one_at_each(range(0, 30 * _DAY_MS, _MINUTE_MS))])
    assert sum(span.count for span in spans) == 30 * 24 * 60
    for span, later in pairwise(spans):
        if 10 * _MINUTE_MS < span.first_ms < _DAY_MS:
            assert later.first_ms - span.first_ms <= span.first_ms / 2


def test_there_are_few_spans_however_far_messages_are_delayed() -> None:
    century_ms = 100 * 365 * _DAY_MS
    assert len(due_spans([one_at_each(range(0, century_ms, 7 * _HOUR_MS))])) < 70
