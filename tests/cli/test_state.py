"""What ``ledgerlake state --by`` prints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ledgerlake.cli.state import _print_counts
from ledgerlake.delay.due_times import DueSpan

if TYPE_CHECKING:
    import pytest


def test_a_line_says_until_when_it_counts_if_that_is_longer_than_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spans = [DueSpan(7_200_123, 3_600_000, 4), DueSpan(86_400_000, 86_400_000, 2, is_estimate=True)]
    _print_counts(spans, "hour", as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "1970-01-01T02:00:00.000Z                 4 " + 40 * "#",
        "1970-01-02T00:00:00.000Z           about 2 "
        + 20 * "#"
        + "  until 1970-01-03T00:00:00.000Z",
    ]
    _print_counts(spans, "hour", as_json=True)
    first, _ = capsys.readouterr().out.splitlines()
    assert json.loads(first) == {
        "from": "1970-01-01T02:00:00.000Z",
        "until": "1970-01-01T03:00:00.000Z",
        "messages": 4,
        "is_estimate": False,
    }


def test_nothing_is_delayed_as_of_the_last_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    _print_counts([], "hour", as_json=False)
    assert capsys.readouterr().err == "no delayed message, as of the pipeline's last micro-batch\n"
