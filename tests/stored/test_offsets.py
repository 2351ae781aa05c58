"""Offsets in checkpoints: readable, versioned, stable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgerlake.errors import OffsetError
from ledgerlake.stored.offsets import PartitionOffset, from_json, to_json
from ledgerlake.wire.message_id import BEFORE_ALL, Position

GOLDEN = Path(__file__).parents[1] / "golden"
OFFSET = {
    "persistent://public/default/orders-partition-0": PartitionOffset(
        Position(12, 345), None, 1_777_626_000_123, 98_765, parts=2
    ),
    "persistent://public/default/orders-partition-1": PartitionOffset(
        Position(12, -1), 4, was_gone=True
    ),
    "persistent://public/default/plain": PartitionOffset(BEFORE_ALL, clock_ms=1_777_626_001_000),
    "persistent://public/default/without-metadata": PartitionOffset(
        Position(7, 0), None, 1_777_626_000_123, by_broker=False, ended_ms=1_777_626_001_000
    ),
}


def test_the_golden_offset_is_read_and_written() -> None:
    golden = json.loads((GOLDEN / "offset-v1.json").read_text())
    assert from_json(golden) == OFFSET
    assert to_json(OFFSET) == golden


def test_json_does_not_depend_on_the_order_in_which_topics_came() -> None:
    backwards = dict(reversed(OFFSET.items()))
    assert json.dumps(to_json(backwards)) == json.dumps(to_json(OFFSET))


def test_a_newer_version_is_refused_with_advice() -> None:
    with pytest.raises(OffsetError, match=r"written by a newer Ledgerlake .*upgrade"):
        from_json({"version": 2, "positions": {}})


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"version": "1"},
        {"version": 1},
        {"version": 1, "positions": []},
        {"version": 1, "positions": {"t": {}}},
        {"version": 1, "positions": {"t": {"ledger": 1, "entry": 2, "surprise": 3}}},
        {
            "version": 1,
            "positions": {
                "t": {
                    "ledger": 1,
                    "entry": 2,
                    "time": "2026-05-01T09:00:00.123Z",
                    "published": "2026-05-01T09:00:00.123Z",
                }
            },
        },
    ],
)
def test_a_foreign_or_damaged_offset_is_refused(data: Any) -> None:
    with pytest.raises(OffsetError, match="checkpoint"):
        from_json(data)


@pytest.mark.parametrize(
    "time_ms", [-1, 253_402_300_800_000, 1_760_000_000_000_000, 2**63 - 1, 2**64]
)
def test_a_time_that_cannot_be_written_is_left_out(time_ms: int) -> None:
    offset = {"t": PartitionOffset(Position(1, 2), time_ms=time_ms, index=3)}
    assert to_json(offset)["positions"] == {"t": {"ledger": 1, "entry": 2, "index": 3}}
    assert from_json(to_json(offset)) == {"t": PartitionOffset(Position(1, 2), index=3)}


@given(st.integers(0, 253_402_214_399_999))
def test_every_time_in_range_is_read_as_it_was_written(time_ms: int) -> None:
    offset = {"t": PartitionOffset(Position(1, 2), time_ms=time_ms, clock_ms=time_ms)}
    assert from_json(to_json(offset)) == offset
