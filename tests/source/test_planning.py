"""Planning: offsets in, ranges out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ledgerlake.source.planning import (
    EntryRange,
    group,
    parts_for,
    parts_of_long,
    ranges,
    share,
    split,
)
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.wire.message_id import BEFORE_ALL, Position


def at(ledger_id: int, entry_id: int, batch_index: int | None = None) -> PartitionOffset:
    return PartitionOffset(Position(ledger_id, entry_id), batch_index)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        pytest.param({"a": at(1, 2)}, {"a": at(1, 2)}, [], id="nothing new"),
        pytest.param(
            {"a": at(1, 2)},
            {"a": at(1, 3)},
            [EntryRange("a", Position(1, 2), Position(1, 3))],
            id="one entry",
        ),
        pytest.param(
            {"a": at(1, 9)},
            {"a": at(2, 0)},
            [EntryRange("a", Position(1, 9), Position(2, 0))],
            id="next ledger",
        ),
        pytest.param(
            {},
            {"a": at(1, 0)},
            [EntryRange("a", BEFORE_ALL, Position(1, 0), is_first=True)],
            id="new topic partition",
        ),
        pytest.param(
            {"a": at(1, 2), "b": at(5, 5)}, {"a": at(1, 2)}, [], id="topic partition gone"
        ),
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
            [
                EntryRange("a", Position(1, 0), Position(1, 1)),
                EntryRange("b", Position(1, 0), Position(1, 1)),
            ],
            id="by name",
        ),
    ],
)
def test_ranges(
    start: dict[str, PartitionOffset], end: dict[str, PartitionOffset], expected: list[EntryRange]
) -> None:
    assert ranges(start, end) == expected


@pytest.mark.parametrize(
    ("budget", "parts", "expected"), [(None, 3, None), (10, 3, 3), (2, 3, 1), (10, 0, 10)]
)
def test_a_budget_is_shared_evenly_and_never_to_nothing(
    budget: int | None, parts: int, expected: int | None
) -> None:
    assert share(budget, parts) == expected


def cut(spans: list[EntryRange], parts: list[int]) -> list[EntryRange]:
    return split([replace(span, parts=count) for span, count in zip(spans, parts, strict=True)])


def pieces(span: EntryRange, parts: int) -> list[tuple[Position, Position, int | None]]:
    return [(part.after, part.end, part.after_batch_index) for part in cut([span], [parts])]


def test_a_range_within_a_ledger_is_cut_into_equal_parts() -> None:
    span = EntryRange("a", Position(1, 9), Position(1, 19), 3)
    assert pieces(span, 1) == [(Position(1, 9), Position(1, 19), 3)]
    assert pieces(span, 2) == [
        (Position(1, 9), Position(1, 14), 3),
        (Position(1, 14), Position(1, 19), None),
    ]


def test_a_range_over_ledgers_is_cut_where_the_last_one_begins_and_in_it() -> None:
    span = EntryRange("a", Position(1, 9), Position(3, 9))
    assert pieces(span, 3) == [
        (Position(1, 9), Position(3, -1), None),
        (Position(3, -1), Position(3, 4), None),
        (Position(3, 4), Position(3, 9), None),
    ]


@pytest.mark.parametrize(
    "after", [BEFORE_ALL, Position(1, 0), Position(2, -1), Position(2, 3), Position(2, 5)]
)
@pytest.mark.parametrize("wanted", [1, 2, 3, 8])
def test_however_a_range_is_cut_its_parts_follow_each_other(after: Position, wanted: int) -> None:
    parts = cut([EntryRange("a", after, Position(2, 5), clock_ms=7)], [wanted])
    assert (parts[0].after, parts[-1].end) == (after, Position(2, 5))
    assert [part.end for part in parts[:-1]] == [part.after for part in parts[1:]]
    assert len(parts) == 1 or all(part.after < part.end for part in parts)
    assert {part.clock_ms for part in parts} == {7}


def test_enough_topic_partitions_are_not_cut() -> None:
    spans = [EntryRange(name, Position(1, 0), Position(1, 99)) for name in "abc"]
    assert cut(spans, parts_for(spans, 3)) == spans
    assert len(cut(spans, parts_for(spans, 4))) == 6
    assert parts_for([], 4) == []


LONG = Position(1, 100_000)


def ends_of_parts(
    spans: list[EntryRange], tasks: int, entry_bytes: int | None = 10_000
) -> list[Position]:
    parts = parts_of_long(spans, [entry_bytes] * len(spans), tasks)
    return [part.end for part in cut(spans, parts)]


@pytest.mark.parametrize(
    ("after", "tasks", "entry_bytes", "expected"),
    [
        pytest.param(
            Position(1, -1), 2, 10_000, [(1, 49_999), (1, 100_000)], id="a part for each task"
        ),
        pytest.param(Position(1, 99_000), 2, 10_000, [(1, 100_000)], id="not if it is short"),
        pytest.param(
            Position(1, 93_000), 8, 10_000, [(1, 96_500), (1, 100_000)], id="no part is short"
        ),
        pytest.param(Position(1, -1), 1, 10_000, [(1, 100_000)], id="one task"),
        pytest.param(Position(1, -1), 2, None, [(1, 100_000)], id="of unknown size"),
        pytest.param(
            Position(1, -1), 2, 2**20, [(1, 49_999), (1, 100_000)], id="entries of a mebibyte"
        ),
        pytest.param(
            Position(1, -1), 2, 2**20 + 1, [(1, 100_000)], id="not if its entries are larger"
        ),
        pytest.param(
            BEFORE_ALL,
            2,
            10_000,
            [(1, -1), (1, 49_999), (1, 100_000)],
            id="earlier ledgers are one part more",
        ),
        pytest.param(LONG, 2, 10_000, [(1, 100_000)], id="no entries"),
    ],
)
def test_a_long_range_is_cut_for_all_tasks(
    after: Position, tasks: int, entry_bytes: int | None, expected: list[tuple[int, int]]
) -> None:
    span = EntryRange("a", after, LONG, end_ms=1)
    assert ends_of_parts([span], tasks, entry_bytes) == [Position(*end) for end in expected]


def test_long_ranges_are_not_cut_if_there_is_one_for_each_task() -> None:
    spans = [EntryRange(name, Position(1, -1), LONG, end_ms=1) for name in "abc"]
    assert ends_of_parts(spans, 5) == [LONG] * 3
    assert ends_of_parts(spans, 6) == [Position(1, 49_999), LONG] * 3
    assert ends_of_parts([], 6) == []


def test_short_ranges_beside_a_long_one_do_not_count() -> None:
    short = [EntryRange(name, Position(1, 0), Position(1, 1), end_ms=1) for name in "bcd"]
    assert ends_of_parts([EntryRange("a", Position(1, -1), LONG, end_ms=1), *short], 2) == [
        Position(1, 49_999),
        LONG,
        *[Position(1, 1)] * 3,
    ]


def test_a_long_range_without_broker_times_is_not_cut() -> None:
    assert ends_of_parts([EntryRange("a", Position(1, -1), LONG)], 2) == [LONG]


def test_a_clock_alone_makes_a_range_without_entries() -> None:
    start = {"a": at(1, 2)}
    end = {"a": PartitionOffset(Position(1, 2), clock_ms=50)}
    assert ranges(start, end) == [EntryRange("a", Position(1, 2), Position(1, 2), clock_ms=50)]
    assert ranges(end, end) == []
    assert ranges(end, {"a": at(1, 2)}) == []


def spans_of(*names: str) -> list[EntryRange]:
    return [EntryRange(name, Position(1, 0), Position(1, 10)) for name in names]


def groups_of(sizes_bytes: list[int | None], min_groups: int = 1) -> list[int]:
    """How many ranges each group has."""
    spans = spans_of(*(f"{number:03}" for number in range(len(sizes_bytes))))
    entries = 10
    entry_bytes = [
        None if size_bytes is None else size_bytes // entries for size_bytes in sizes_bytes
    ]
    groups = group(spans, entry_bytes, min_groups)
    assert sorted((span for together in groups for span in together), key=str) == spans
    return [len(together) for together in groups]


MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("sizes_bytes", "min_groups", "expected"),
    [
        pytest.param([], 1, [], id="none"),
        pytest.param([1000] * 10, 1, [10], id="small ones share a task"),
        pytest.param([0] * 40, 1, [16, 16, 8], id="no task reads too many"),
        pytest.param([3 * MIB, 3 * MIB, MIB, 1], 1, [1, 2, 1], id="nor too much"),
        pytest.param(
            [100 * MIB, 1, None, None, 1, 1], 1, [1, 3, 1, 1], id="large or unknown ones are alone"
        ),
        pytest.param([1000] * 10, 4, [2, 2, 2, 2, 2], id="as many tasks as the user wants"),
        pytest.param([0] * 3, 8, [1, 1, 1], id="as many as there can be"),
        pytest.param([0] * 3, 0, [3], id="no number wanted"),
    ],
)
def test_ranges_are_grouped_by_their_bytes(
    sizes_bytes: list[int | None], min_groups: int, expected: list[int]
) -> None:
    assert groups_of(sizes_bytes, min_groups) == expected


@pytest.mark.parametrize(
    ("after", "end", "entry_bytes", "expected"),
    [
        (Position(1, 2), Position(1, 5), 10_000, 30_000),
        pytest.param(Position(1, 2), Position(1, 5), 10, 3 * 2048, id="entries take time"),
        (Position(1, 2), Position(1, 2), None, 0),
        (Position(1, 2), Position(2, 0), 10, None),
        (Position(1, 2), Position(1, 5), None, None),
        (BEFORE_ALL, Position(1, 5), 10, None),
    ],
)
def test_the_bytes_of_a_range_are_known_within_a_ledger(
    after: Position, end: Position, entry_bytes: int | None, expected: int | None
) -> None:
    assert EntryRange("a", after, end).size_bytes(entry_bytes) == expected


def test_the_offset_of_the_end_says_into_how_many_parts_a_range_is_cut() -> None:
    start = {"a": at(1, 0), "b": at(1, 0)}
    end = {
        "a": PartitionOffset(Position(1, 90), parts=3),
        "b": PartitionOffset(Position(1, 90)),
    }
    found = split(ranges(start, end))
    assert [(part.topic_partition, part.end.entry_id) for part in found] == [
        ("a", 30),
        ("a", 60),
        ("a", 90),
        ("b", 90),
    ]
