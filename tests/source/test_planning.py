"""Planning: offsets in, ranges out."""

from __future__ import annotations

import pytest

from ledgerlake.source.offsets import PartitionOffset
from ledgerlake.source.planning import EntryRange, ranges, share
from ledgerlake.wire.message_id import BEFORE_ALL, Position


def at(ledger_id: int, entry_id: int, batch_index: int | None = None) -> PartitionOffset:
    return PartitionOffset(Position(ledger_id, entry_id), batch_index)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        pytest.param({"a": at(1, 2)}, {"a": at(1, 2)}, [], id="nothing new"),
        pytest.param(
            {"a": at(1, 2)}, {"a": at(1, 3)}, [EntryRange("a", Position(1, 2), Position(1, 3))], id="one entry"
        ),
        pytest.param(
            {"a": at(1, 9)}, {"a": at(2, 0)}, [EntryRange("a", Position(1, 9), Position(2, 0))], id="next ledger"
        ),
        pytest.param({}, {"a": at(1, 0)}, [EntryRange("a", BEFORE_ALL, Position(1, 0))], id="new topic partition"),
        pytest.param({"a": at(1, 2), "b": at(5, 5)}, {"a": at(1, 2)}, [], id="topic partition gone"),
        pytest.param({"a": at(1, 2)}, {"a": at(1, 1)}, [], id="end before start"),
        pytest.param(
            {"a": at(1, 2, 7)},
            {"a": at(1, 3)},
            [EntryRange("a", Position(1, 2), Position(1, 3), 7)],
            id="inside a batch",
        ),
        pytest.param(
            {"b": at(1, 0), "a": at(1, 0)},
            {"b": at(1, 1), "a": at(1, 1)},
            [EntryRange("a", Position(1, 0), Position(1, 1)), EntryRange("b", Position(1, 0), Position(1, 1))],
            id="by name",
        ),
    ],
)
def test_ranges(start: dict[str, PartitionOffset], end: dict[str, PartitionOffset], expected: list[EntryRange]) -> None:
    assert ranges(start, end) == expected


@pytest.mark.parametrize(("budget", "parts", "expected"), [(None, 3, None), (10, 3, 3), (2, 3, 1), (10, 0, 10)])
def test_a_budget_is_shared_evenly_and_never_to_nothing(budget: int | None, parts: int, expected: int | None) -> None:
    assert share(budget, parts) == expected
