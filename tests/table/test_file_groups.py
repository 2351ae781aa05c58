"""Which neighbouring files become one."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace

import pytest

from ledgerlake.table.file_groups import TableFile, groups_to_merge

KIB, MIB = 1024, 1024 * 1024


def file(
    number: int, size_bytes: int = 10 * KIB, topics: str = "t", modified_ms: int | None = None
) -> TableFile:
    """A file whose topics are from the first letter of ``topics`` to the last."""
    when_ms = number if modified_ms is None else modified_ms
    return TableFile(f"{number:04}", size_bytes, 100, when_ms, (topics[0], topics[-1], 0, 0))


def names(groups: list[list[TableFile]]) -> list[list[int]]:
    return [[int(file.name) for file in group] for group in groups]


def test_eight_small_neighbours_become_one_and_seven_do_not() -> None:
    assert names(groups_to_merge([file(number) for number in range(8)])) == [list(range(8))]
    assert groups_to_merge([file(number) for number in range(7)]) == []


def test_files_are_neighbours_by_the_time_of_their_commits() -> None:
    files = [file(number, modified_ms=100 - number) for number in range(8)]
    assert names(groups_to_merge(files)) == [list(range(7, -1, -1))]


def test_a_large_file_of_the_same_topic_lies_between_two_groups() -> None:
    files = [file(number, size_bytes=100 * MIB if number == 8 else KIB) for number in range(17)]
    assert names(groups_to_merge(files)) == [list(range(8)), list(range(9, 17))]


def test_a_large_file_of_another_topic_does_not_separate_files() -> None:
    files = [
        file(number, 100 * MIB, "z") if number == 4 else file(number, topics="ab")
        for number in range(9)
    ]
    assert names(groups_to_merge(files)) == [[0, 1, 2, 3, 5, 6, 7, 8]]


def test_a_file_whose_topics_are_not_known_separates_files() -> None:
    files = [file(number) for number in range(9)]
    files[4] = replace(files[4], bounds=None, is_fixed=True)
    assert groups_to_merge(files) == []


def test_a_small_file_beside_a_large_one_of_its_commit_and_topic_is_left_because_their_order_is_not_known() -> (
    None
):
    files = [file(number) for number in range(9)]
    commit = [file(9, 100 * MIB, modified_ms=9), file(10, modified_ms=9)]
    later = [file(number, modified_ms=number) for number in range(11, 20)]
    assert names(groups_to_merge(files + commit + later)) == [list(range(9)), list(range(11, 20))]


def test_files_of_one_commit_stay_together_where_a_group_is_full() -> None:
    files = [file(number, 900 * KIB, modified_ms=number // 10) for number in range(30)]
    assert names(groups_to_merge(files)) == [
        list(range(10)),
        list(range(10, 20)),
        list(range(20, 30)),
    ]


def test_a_commit_with_more_than_a_group_may_have_stays_as_it_is() -> None:
    files = [file(number, modified_ms=0) for number in range(1001)]
    assert groups_to_merge(files) == []
    large = [file(number, 9 * MIB, modified_ms=0) for number in range(32)]
    assert groups_to_merge(large) == []


def test_files_before_one_of_another_writer_are_left_unless_their_topics_differ() -> None:
    before, after = [file(number) for number in range(8)], [file(number) for number in range(9, 17)]
    foreign = replace(file(8), is_foreign=True)
    assert names(groups_to_merge([*before, foreign, *after])) == [list(range(9, 17))]
    others = [file(number, topics="a") for number in range(8)]
    assert names(groups_to_merge([*others, foreign])) == [list(range(8))]


def test_small_files_come_first_and_their_results_are_merged_later() -> None:
    medium = [file(number, 2 * MIB) for number in range(8)]
    small = [file(number) for number in range(8, 16)]
    assert names(groups_to_merge(medium + small)) == [list(range(8, 16))]
    assert names(groups_to_merge([*medium, file(16)])) == [[*range(8), 16]]


@pytest.mark.parametrize(
    "large",
    [
        TableFile("x", 2 * MIB, 1, 4, ("t", "t", 0, 0)),
        TableFile("x", MIB, 2_000_000, 4, ("t", "t", 0, 0)),
        TableFile("x", KIB, 1, 4, ("t", "t", 0, 0), is_fixed=True),
    ],
    ids=["of a large message", "of many rows", "that cannot be replaced"],
)
def test_a_file_stays_as_it_is(large: TableFile) -> None:
    files = (
        [file(number) for number in range(4)] + [large] + [file(number) for number in range(5, 9)]
    )
    assert groups_to_merge(files) == []


@dataclass
class Lake:
    """A table of files with the numbers of their rows by topic, and commits at a clock."""

    rng: random.Random
    files: dict[str, TableFile] = field(default_factory=dict)
    rows: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    written: int = 0

    def commit(self, modified_ms: int) -> None:
        for _ in range(self.rng.randint(1, 4)):
            topics = self.rng.sample("abcdef", self.rng.randint(1, 3))
            if any(
                set(topics) & set(self.rows[name])
                for name in self.rows
                if self.files[name].modified_ms == modified_ms
            ):
                continue
            size_bytes = self.rng.choice([KIB, KIB, KIB, 300 * KIB, 3 * MIB, 20 * MIB, 80 * MIB])
            self.add(modified_ms, size_bytes, {topic: [modified_ms] for topic in topics})

    def add(self, modified_ms: int, size_bytes: int, rows: dict[str, list[int]]) -> None:
        self.written += 1
        # Names in no order, as runs of a task have them.
        name = f"{self.rng.random()}"
        bounds = (min(rows), max(rows), 0, 0)
        self.files[name] = TableFile(name, size_bytes, size_bytes // 64, modified_ms, bounds)
        self.rows[name] = rows

    def merge(self) -> bool:
        groups = groups_to_merge(list(self.files.values()))
        for group in groups:
            rows: dict[str, list[int]] = defaultdict(list)
            for old in group:
                del self.files[old.name]
                for topic, numbers in self.rows.pop(old.name).items():
                    rows[topic] += numbers
            size_bytes = sum(old.size_bytes for old in group)
            self.add(
                max(old.modified_ms for old in group),
                size_bytes,
                {t: sorted(rows[t]) for t in rows},
            )
        return bool(groups)


@pytest.mark.parametrize("seed", range(40))
def test_no_merge_puts_a_file_across_the_rows_of_another(seed: int) -> None:
    lake = Lake(random.Random(seed))
    for modified_ms in range(300):
        lake.commit(modified_ms)
        if lake.rng.random() < 0.1:
            while lake.merge():
                pass
    for topic in "abcdef":
        spans = sorted(rows[topic] for rows in lake.rows.values() if topic in rows)
        rows = [number for span in spans for number in span]
        assert rows == sorted(rows), topic


def test_a_steady_stream_of_small_files_leaves_few_and_writes_each_row_a_few_times() -> None:
    files: dict[str, TableFile] = {}
    rewritten_bytes = 0
    most = 0
    for number in range(20_000):
        files[f"{number}"] = TableFile(f"{number}", 50 * KIB, 800, number, ("t", "t", 0, 0))
        if number % 60 == 0:
            while groups := groups_to_merge(list(files.values())):
                for group in groups:
                    for old in group:
                        del files[old.name]
                    size_bytes = sum(old.size_bytes for old in group)
                    rewritten_bytes += size_bytes
                    name = f"{number}-{len(files)}-{size_bytes}"
                    rows = sum(old.rows for old in group)
                    files[name] = TableFile(
                        name, size_bytes, rows, group[-1].modified_ms, ("t", "t", 0, 0)
                    )
            most = max(most, len(files))
    assert most < 60
    assert rewritten_bytes < 4 * 20_000 * 50 * KIB


@pytest.mark.parametrize("commits_per_look", [1, 6, 60])
def test_a_row_is_written_again_a_few_times_however_often_upkeep_looks(
    commits_per_look: int,
) -> None:
    files: list[TableFile] = []
    written_bytes = 0
    for number in range(6000):
        files.append(file(number, 20 * KIB))
        if number % commits_per_look:
            continue
        while groups := groups_to_merge(files):
            for group in groups:
                merged = {member.name for member in group}
                size_bytes, rows = (
                    sum(member.size_bytes for member in group),
                    sum(member.rows for member in group),
                )
                written_bytes += size_bytes
                files = [member for member in files if member.name not in merged]
                last_ms = max(member.modified_ms for member in group)
                files.append(
                    TableFile(f"m{number}-{last_ms}", size_bytes, rows, last_ms, ("t", "t", 0, 0))
                )
    assert written_bytes < 8 * 6000 * 20 * KIB
    assert len(files) < 100


def test_the_last_group_of_a_clustered_table_waits_until_it_has_enough_for_several_files() -> None:
    few = [file(number, 10 * MIB) for number in range(8)]
    enough = [file(number, 40 * MIB) for number in range(8)]
    followed = [*few, *(file(number, 10 * MIB) for number in range(8, 17))]
    assert groups_to_merge(few, are_clustered=True) == []
    assert names(groups_to_merge(few)) == [list(range(8))]
    assert names(groups_to_merge(enough, are_clustered=True)) == [list(range(8))]
    assert names(groups_to_merge(followed, are_clustered=True)) == [list(range(16))]
