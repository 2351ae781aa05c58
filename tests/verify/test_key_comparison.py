"""Messages and rows are compared by their keys, part by part: by examples, and on random topics and
tables against plain dictionaries.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import numpy as np
import pytest

from ledgerlake.verify import hashed_parts
from ledgerlake.verify.entry_set import EntrySet
from ledgerlake.verify.hashed_parts import HashedParts
from ledgerlake.verify.key_comparison import (
    RECORD,
    Kind,
    compare,
    entry_hashes,
    entry_records,
    message_records,
    row_records,
)
from ledgerlake.verify.topic_content import ExpectedMessages
from ledgerlake.wire.message_id import Position

SEEDS = 20_000 if os.environ.get("LEDGERLAKE_CAMPAIGN") == "long" else 200

Key = tuple[int, int, int, int]
FIRST: Key = (1, 0, 0, 10)
SECOND: Key = (1, 0, 1, 11)


def message(*keys: Key, waits: bool = False) -> np.ndarray:
    return message_records(0, np.array(keys), is_not_due=waits)


def chunk(kind: Kind) -> np.ndarray:
    """Of the first entry."""
    return entry_records(kind, 0, np.array([FIRST[:2]]), is_not_due=False)


def row(
    *keys: Key, table: int = 0, group: int = 0, partition: int = 0, due_us: int = 0
) -> np.ndarray:
    return row_records(table, group, partition, np.array(keys), np.full(len(keys), due_us))


def compared(
    *records: np.ndarray, groups: tuple[int, ...] = (1,)
) -> tuple[int, list[list[int]], list[list[int]]]:
    """Duplicates, and the absent and the not_due messages by group and topic partition."""
    ends = np.full((len(groups), 2), -1)
    result = compare(np.concatenate(records), np.array(groups), ends)
    return result.duplicate, result.absent.tolist(), result.not_due.tolist()


def test_a_message_is_there_if_a_row_has_its_whole_key() -> None:
    assert compared(message(FIRST), message(SECOND), row(SECOND), row(FIRST)) == (0, [[0]], [[0]])
    other_index = (*FIRST[:3], 99)
    assert compared(message(FIRST), message(SECOND), row(SECOND), row(other_index)) == (
        0,
        [[1]],
        [[0]],
    )


def test_an_index_that_the_broker_shows_only_now_or_no_more_is_not_compared() -> None:
    unknown = [(*key[:3], -1) for key in (FIRST, SECOND)]
    assert compared(message(FIRST, SECOND), row(unknown[0]), row(unknown[1])) == (0, [[0]], [[0]])
    assert compared(message(*unknown), row(FIRST, SECOND)) == (0, [[0]], [[0]])
    assert compared(message(FIRST, SECOND), row(unknown[0])) == (0, [[1]], [[0]])
    assert compared(message(FIRST), row(unknown[0]), row(FIRST)) == (1, [[0]], [[0]])


def test_a_message_that_is_not_due_is_not_missing() -> None:
    assert compared(message(FIRST, waits=True)) == (0, [[0]], [[1]])
    assert compared(message(FIRST, waits=True), row(FIRST)) == (0, [[0]], [[0]])


def test_a_large_message_is_there_if_a_row_has_the_entry_of_its_last_chunk() -> None:
    large = chunk(Kind.ENTRY)
    assert compared(large, row(SECOND)) == (0, [[0]], [[0]])
    assert compared(large, row((1, 2, -1, 5))) == (0, [[1]], [[0]])


def test_a_chunk_of_no_message_is_never_there() -> None:
    assert compared(chunk(Kind.CHUNK), row((1, 0, 0, 0))) == (0, [[1]], [[0]])


def test_rows_of_another_topic_partition_do_not_count() -> None:
    assert compared(message(FIRST), row(FIRST, partition=1), groups=(1, 1)) == (
        0,
        [[1, 0]],
        [[0, 0]],
    )


def test_a_message_has_to_be_in_one_table_of_each_group() -> None:
    both = (message(FIRST), row(FIRST, table=0, group=0))
    assert compared(*both, groups=(2,)) == (0, [[0], [1]], [[0], [0]])
    assert compared(*both, row(FIRST, table=1, group=1), groups=(2,)) == (0, [[0], [0]], [[0], [0]])
    assert compared(message(FIRST), row(FIRST, table=2, group=-1)) == (0, [[1]], [[0]])


def test_rows_are_duplicates_of_the_same_table_and_time_alone() -> None:
    assert compared(row(FIRST), row(FIRST), row(FIRST))[0] == 2
    assert compared(row(FIRST), row(FIRST, due_us=7), row(FIRST, due_us=7))[0] == 1
    assert compared(row(FIRST), row(FIRST, table=1), row(SECOND))[0] == 0


BATCH: list[Key] = [(1, 0, number, 10 + number) for number in range(5)]
WITHOUT_INDEX: list[Key] = [(1, 0, number, -1) for number in range(5)]


@pytest.mark.parametrize("keys", [BATCH, WITHOUT_INDEX], ids=["with an index", "without an index"])
def test_messages_in_a_row_are_one_record_and_count_each(keys: list[Key]) -> None:
    assert len(message(*keys)) == 1
    assert compared(message(*keys)) == (0, [[5]], [[0]])
    assert compared(message(*keys), row(*keys)) == (0, [[0]], [[0]])
    assert compared(message(*keys), row(*keys), row(*keys)) == (5, [[0]], [[0]])


@pytest.mark.parametrize("keys", [BATCH, WITHOUT_INDEX], ids=["with an index", "without an index"])
def test_rows_of_a_part_of_a_batch_are_found(keys: list[Key]) -> None:
    assert compared(message(*keys), row(*keys[1:3]), row(keys[4]), row(keys[2])) == (
        1,
        [[2]],
        [[0]],
    )
    assert compared(message(*keys[:2]), message(*keys[2:]), row(*keys)) == (0, [[0]], [[0]])


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param([(1, 0, 0, 10), (1, 1, 1, 11)], id="another entry"),
        pytest.param([(1, 0, 0, 10), (2, 0, 1, 11)], id="another ledger"),
        pytest.param([(1, 0, 0, 10), (1, 0, 2, 11)], id="a message is left out"),
        pytest.param([(1, 0, 0, 10), (1, 0, 1, 12)], id="an index is left out"),
        pytest.param([(1, 0, 0, -1), (1, 0, 1, 0)], id="the first has no index"),
        pytest.param([(1, 0, 0, 0), (1, 0, 1, -1)], id="the last has no index"),
    ],
)
def test_messages_that_are_not_in_a_row_are_records_of_their_own(keys: list[Key]) -> None:
    assert len(message(*keys)) == 2


def test_nothing_is_compared_without_topic_partitions() -> None:
    result = compare(
        np.empty(0, dtype=RECORD), np.empty(0, dtype=np.int64), np.empty((0, 2), dtype=np.int64)
    )
    assert (result.duplicate, result.absent.size, result.not_due.size) == (0, 0, 0)


@dataclass
class World:
    """A few topic partitions and tables. Entries and keys are so few that much meets by chance."""

    rng: random.Random
    # For each topic partition the group of each table.
    groups: list[dict[int, int]] = field(default_factory=list)
    rejects: list[set[tuple[int, int]]] = field(default_factory=list)
    # Up to where each topic partition was read for other tables.
    ends: list[tuple[int, int]] = field(default_factory=list)
    messages: list[tuple[int, Key, bool]] = field(default_factory=list)
    large: list[tuple[int, list[tuple[int, int]], bool]] = field(default_factory=list)
    rows: list[tuple[int, int, Key, int]] = field(default_factory=list)

    def fill(self) -> None:
        for partition in range(self.rng.randint(1, 3)):
            tables = self.rng.sample(range(4), self.rng.randint(0, 3))
            whole = self.rng.random() < 0.5
            groups = (
                {table: number for number, table in enumerate(tables)}
                if whole
                else dict.fromkeys(tables, 0)
            )
            if whole and self.rng.random() < 0.5:
                groups[9] = -1
            self.groups.append(groups)
            self.ends.append(self.entry() if self.rng.random() < 0.5 else (-1, -1))
            self.rejects.append({self.entry() for _ in range(self.rng.randint(0, 4))})
            for _ in range(self.rng.randint(0, 12)):
                waits = self.rng.random() < 0.3
                self.messages += [(partition, key, waits) for key in self.batch()]
            for _ in range(self.rng.randint(0, 5)):
                chunks = [self.entry() for _ in range(self.rng.randint(1, 3))]
                self.large.append((partition, chunks, self.rng.random() < 0.3))
            for table in groups:
                kept = [
                    key
                    for of, key, _ in self.messages
                    if of == partition and self.rng.random() < 0.8
                ]
                strange = [key for _ in range(self.rng.randint(0, 2)) for key in self.batch()]
                times = [
                    self.rng.choice((0, 5)) if self.rng.random() < 0.1 else 0
                    for _ in (*kept, *strange)
                ]
                rows = [
                    (partition, table, key, due_us)
                    for key, due_us in zip((*kept, *strange), times, strict=True)
                ]
                if self.rng.random() < 0.3:
                    self.rng.shuffle(rows)
                self.rows += rows

    def entry(self) -> tuple[int, int]:
        return self.rng.randint(1, 2), self.rng.randint(0, 5)

    def batch(self) -> list[Key]:
        """Messages of one entry."""
        entry = self.entry()
        begin, index = self.rng.randint(-1, 2), self.rng.choice((-1, 0, 3))
        return [
            (*entry, begin + number, index if index < 0 else index + number)
            for number in range(self.rng.choice((1, 1, 3, 4)))
        ]

    @property
    def group_counts(self) -> list[int]:
        return [
            max((group + 1 for group in groups.values()), default=0) or 1 for groups in self.groups
        ]


Missing = Counter[tuple[int, int]]
Counts = tuple[int, Missing, Missing, Missing]


def streamed(world: World) -> Counts:
    """Return the number of duplicates, and the absent, earlier and not_due messages by group and
    topic partition.
    """
    counts = np.array(world.group_counts)
    duplicate = 0
    absent: Missing = Counter()
    earlier: Missing = Counter()
    not_due: Missing = Counter()
    with HashedParts(RECORD, entry_hashes) as records:
        for partition, rejects in enumerate(world.rejects):
            expected = ExpectedMessages(
                partition, EntrySet(np.array([*rejects]).reshape(-1, 2)), records
            )
            of_partition = [(key, waits) for of, key, waits in world.messages if of == partition]
            for begin in range(0, len(of_partition), 4):
                keys, waits = zip(*of_partition[begin : begin + 4], strict=True)
                expected.add(np.array(keys), np.array(waits))
            for of, chunks, is_not_due in world.large:
                if of == partition:
                    expected.add_large(
                        [Position(*chunk) for chunk in chunks], is_not_due=is_not_due
                    )
        for (partition, table), of_table in groupby(world.rows, key=itemgetter(0, 1)):
            group = world.groups[partition][table]
            rows = [*of_table]
            while rows:
                size = world.rng.randint(1, 9)
                keys, times = zip(
                    *((key, due_us) for _, _, key, due_us in rows[:size]), strict=True
                )
                records.add(
                    row_records(table, group, partition, np.array(keys), np.array(times)), len(keys)
                )
                rows = rows[size:]
        for part in records.parts():
            result = compare(part, counts, np.array(world.ends))
            duplicate += result.duplicate
            for counter, numbers in (
                (absent, result.absent),
                (earlier, result.earlier),
                (not_due, result.not_due),
            ):
                for group, partition in zip(*np.nonzero(numbers), strict=True):
                    counter[int(group), int(partition)] += int(numbers[group, partition])
    return duplicate, absent, earlier, not_due


def naive(world: World) -> Counts:
    """The same, by the rules as they are said."""
    known = [(of, key) for of, key, _ in world.messages if key[:2] not in world.rejects[of]]
    without_index = {
        (of, key[:2])
        for of, key in [*known, *((of, key) for of, _, key, _ in world.rows)]
        if key[3] < 0
    }

    def plain(of: int, key: Key) -> Key:
        return (*key[:3], -1) if (of, key[:2]) in without_index else key

    all_rows = [(of, table, plain(of, key), due_us) for of, table, key, due_us in world.rows]
    absent: Missing = Counter()
    earlier: Missing = Counter()
    not_due: Missing = Counter()
    for partition, count in enumerate(world.group_counts):
        rejects, end = world.rejects[partition], world.ends[partition]
        for group in range(count):
            rows = {
                key
                for of, table, key, _ in all_rows
                if of == partition and world.groups[partition][table] == group
            }
            entries = {key[:2] for key in rows}
            for of, key, waits in world.messages:
                if of == partition and plain(of, key) not in rows and key[:2] not in rejects:
                    due = earlier if key[:2] <= end else absent
                    (not_due if waits else due)[group, partition] += 1
            for of, chunks, waits in world.large:
                in_table = len(chunks) > 1 and chunks[-1] in entries
                if of == partition and not in_table and chunks[-1] not in rejects:
                    due = earlier if chunks[-1] <= end else absent
                    (not_due if waits else due)[group, partition] += 1
    return len(all_rows) - len(set(all_rows)), absent, earlier, not_due


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_parts_of_a_few_records_add_up_to_what_dictionaries_say(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(first, first + 20):
        world = World(random.Random(seed))
        world.fill()
        monkeypatch.setattr(hashed_parts, "_BUFFER_RECORDS", world.rng.randint(1, 9))
        monkeypatch.setattr(hashed_parts, "_PART_SIZE", world.rng.randint(1, 9))
        assert streamed(world) == naive(world), f"seed {seed}"
