"""What ``ledgerlake waiting`` prints."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ledgerlake.cli.waiting import _print_row

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
        "key_bytes": None,
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
