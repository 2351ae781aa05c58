"""What ``ledgerlake waiting`` prints."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import pytest

from ledgerlake.cli.waiting import _nothing_found, _print_row


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
        "key_bytes": None,
        "properties": properties,
        "is_known": True,
        "may_be_cancelled": True,
    }
    _print_row(row, 1_700_000_000_000, as_json=False)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert (
        "key k\\r  a cancel may hit it  paused since 2023-11-14T22:13:20.000Z  ledgerlake.schedule=a\\n2030-01-01"
        in printed
    )
    assert "\\x1b[2J é" in printed


@pytest.mark.parametrize("as_json", [False, True])
def test_of_a_message_that_may_be_what_is_asked_for_it_is_said_that_it_is_not_known(
    capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    row = {
        "deliver_at": datetime(2026, 5, 2, tzinfo=timezone.utc),
        "topic": "t",
        "partition": 0,
        "message_id": "1:1",
        "key": None,
        "key_bytes": None,
        "properties": None,
        "is_known": False,
        "may_be_cancelled": False,
    }
    _print_row(row, None, as_json)
    printed = capsys.readouterr().out
    if as_json:
        assert json.loads(printed)["is_known"] is False
    else:
        assert printed.endswith("t-partition-0 1:1  key and properties not known\n")


def test_that_nothing_known_is_what_is_asked_for_is_said_also_if_unknown_messages_are_listed() -> (
    None
):
    said = "is known to wait, as of the pipeline's last micro-batch"
    assert _nothing_found(True, are_listed=True) == f"no such message {said}"
    assert _nothing_found(True, are_listed=False).startswith("no such message waits, ")
    assert _nothing_found(False, are_listed=False).startswith("no message waits, ")
