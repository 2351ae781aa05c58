"""How rows are divided into files by the columns of a clustered table."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from ledgerlake.table.clusters import part_numbers, parts_of, split_of


@pytest.mark.parametrize("seed", range(60))
def test_each_part_has_rows_and_the_parts_of_a_column_do_not_overlap(seed: int) -> None:
    chance = random.Random(seed)
    few = [None, *range(chance.randint(1, 50))]
    rows = pa.table(
        {
            "a": pa.array([chance.choice(few) for _ in range(chance.randint(1, 300))], pa.int64()),
        }
    )
    split = split_of(rows, chance.randint(1, 9))
    numbers = part_numbers(rows, split)
    assert set(numbers.tolist()) == set(range(parts_of(split)))
    # Parts are in the order of their values, and null comes first.
    highest = -2
    for part in range(parts_of(split)):
        values = [
            -1 if value is None else value
            for value in rows["a"].filter(pa.array(numbers == part)).to_pylist()
        ]
        assert min(values) > highest
        highest = max(values)


def test_two_columns_are_halved_in_turn() -> None:
    rows = pa.table({"a": [0, 0, 1, 1] * 25, "b": ["x", "y"] * 50})
    split = split_of(rows, 4)
    numbers = part_numbers(rows, split).tolist()
    assert parts_of(split) == 4
    assert len(set(zip(rows["a"].to_pylist(), rows["b"].to_pylist(), numbers, strict=True))) == 4


def test_a_column_with_one_value_divides_nothing() -> None:
    rows = pa.table({"a": [1] * 10, "b": pa.nulls(10, pa.string())})
    assert split_of(rows, 8) is None
    assert part_numbers(rows, None).tolist() == [0] * 10
