"""Intervals of table properties are read as Delta reads them."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from ledgerlake.stored.places import Place
from ledgerlake.table.log_commit import write_checkpoint
from ledgerlake.table.retention import interval_hours
from tests.ageing import make_older
from tests.table.test_compaction import Writer

if TYPE_CHECKING:
    from pathlib import Path

LOG = "delta.logRetentionDuration"
CLEANS = "delta.enableExpiredLogCleanup"


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("interval 30 days", 720),
        ("30 days", 720),
        ("INTERVAL 30 DAYS", 720),
        ("  interval\t1   week ", 168),
        ("1 day 12 hours", 36),
        ("interval 1 day 90 minutes 1800 seconds", 26),
        ("+2 hour", 2),
        ("7200.5 seconds", 7200.5 / 3600),
        ("3600000 milliseconds 3600000000 microseconds", 2),
        ("0 days", 0),
    ],
)
def test_an_interval_is_read_as_delta_reads_it(text: str, hours: float) -> None:
    assert interval_hours(text) == pytest.approx(hours)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "interval",
        "30",
        "days",
        "1 month",
        "1 year 3 days",
        "-1 days",
        "1.5 days",
        "30days",
        "interval30 days",
    ],
)
def test_what_is_no_interval_of_a_retention_is_not_guessed(text: str) -> None:
    assert interval_hours(text) is None


@pytest.mark.parametrize("text", ["1 day, 2 hours", "1 dayss", "1 day2 hours", "² days", "٣ days"])
def test_an_interval_with_anything_else_in_it_is_not_guessed(text: str) -> None:
    assert interval_hours(text) is None


@pytest.mark.parametrize(
    "text", ["9" * 5000 + " days", "1 day " * 5000 + "x"], ids=["digits", "parts"]
)
def test_a_long_text_is_no_interval(text: str) -> None:
    assert interval_hours(text) is None


def aged_log(writer: Writer, tmp_path: Path, properties: dict[str, str]) -> None:
    """Make a log of 40 days, with a checkpoint behind which it may be cleaned."""
    DeltaTable(writer.table.path.uri).alter.set_table_properties(properties)
    for _ in range(3):
        writer.commit()
    DeltaTable(writer.table.path.uri).create_checkpoint()
    make_older(tmp_path / "messages", 40)


@pytest.mark.parametrize(
    ("properties", "is_cleaned"),
    [
        ({}, True),
        ({LOG: "interval 1 day"}, True),
        ({LOG: "interval 60 days"}, False),
        ({LOG: "60 days"}, False),
        ({LOG: "INTERVAL 60 DAYS"}, False),
        ({CLEANS: "false"}, False),
    ],
)
@pytest.mark.parametrize("is_merge", [False, True])
def test_a_log_is_cleaned_only_as_its_table_says(
    is_merge: bool,
    properties: dict[str, str],
    is_cleaned: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = Writer(Place(str(tmp_path / "messages")))
    aged_log(writer, tmp_path, {"delta.checkpointInterval": "1", **properties})
    with caplog.at_level(logging.WARNING):
        if is_merge:
            write_checkpoint(writer.table.path)
            write_checkpoint(writer.table.path)
        else:
            writer.table._cleaned_in = None
            writer.commit()
    assert os.path.exists(tmp_path / "messages/_delta_log" / f"{0:020}.json") == (not is_cleaned)
    warnings = [
        record.getMessage() for record in caplog.records if "is not cleaned" in record.getMessage()
    ]
    unknown = properties.get(LOG, "interval").startswith("interval") is False
    assert len(warnings) == unknown
