"""What ``ledgerlake waiting`` prints."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ledgerlake.cli.waiting import _print_counts, _print_row
from ledgerlake.delay.due_times import DueSpan

if TYPE_CHECKING:
    import pytest


def test_what_senders_wrote_is_printed_on_one_line_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    properties = {"ledgerlake.schedule": "a\n2030-01-01T00:00:00Z  t-partition-0 1:2\x1b[2J é"}
    row = {
        "deliver_at": datetime(2026, 5, 2, tzinfo=timezone.utc),
        "topic": "t",
        "partition": 0,
        "message_id": "1:1",
        "key": "k\r",
        "properties": properties,
        "may_be_cancelled": True,
    }
    _print_row(row, 1_700_000_000_000, as_json=False)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert (
        "key k\\r  a cancel by key may hit it  paused since 2023-11-14T22:13:20.000Z  ledgerlake.schedule=a\\n2030-01-01"
        in printed
    )
    assert "\\x1b[2J é" in printed


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


def test_nothing_waits_as_of_the_last_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    _print_counts([], "hour", as_json=False)
    assert capsys.readouterr().err == "no message waits, as of the pipeline's last micro-batch\n"
