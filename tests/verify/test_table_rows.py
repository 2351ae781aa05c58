"""The rows of a table come batch by batch, and their order is judged as if all were in memory."""

from __future__ import annotations

import random
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from ledgerlake.decode import schema
from ledgerlake.errors import TableError
from ledgerlake.options.spark_options import SparkConfig
from ledgerlake.stored.places import Place
from ledgerlake.verify import table_rows
from ledgerlake.verify.table_rows import (
    RowOrder,
    TableFile,
    TableRows,
    by_topic_partition,
    rows_before,
    up_to,
)
from ledgerlake.wire.message_id import Position
from tests.table.rows import rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_rows, "_BATCH_ROWS", 4)


def written(folder: Path, *files: pa.RecordBatch) -> TableRows:
    """A table with these files."""
    for file in files:
        write_deltalake(str(folder), pa.Table.from_batches([file]), mode="append")
    return TableRows(Place(str(folder)), SparkConfig())


def test_the_rows_of_a_file_come_in_their_order_a_batch_at_a_time(tmp_path: Path) -> None:
    table = written(tmp_path, rows([*range(10)]), rows([*range(6)], first_entry=100))
    batches: dict[str, list[list[int]]] = {}
    for file, batch in table.batches():
        batches.setdefault(file.path, []).append(batch["entry_id"].to_pylist())
    assert sorted(batches.values()) == [
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]],
        [[100, 101, 102, 103], [104, 105]],
    ]


def test_only_the_wanted_files_are_read(tmp_path: Path) -> None:
    table = written(tmp_path, rows([1, 2]), rows([3], first_entry=100))
    (wanted,) = {file for file, batch in table.batches() if batch["entry_id"][0].as_py() == 100}
    assert [batch["entry_id"].to_pylist() for _, batch in table.batches({wanted})] == [[100]]


def test_the_rows_of_a_version_are_read_although_the_table_goes_on(tmp_path: Path) -> None:
    table = written(tmp_path, rows([1, 2]))
    DeltaTable(str(tmp_path)).delete()
    assert [batch.num_rows for _, batch in table.batches()] == [2]


def test_a_file_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    table = written(tmp_path, rows([1, 2]))
    (file,) = tmp_path.glob("*.parquet")
    file.unlink()
    with pytest.raises(
        TableError, match=f"^the table at {tmp_path} cannot be read: [^\n]*{file.name}"
    ):
        list(table.batches())


def test_rows_are_divided_by_topic_partition_in_their_order() -> None:
    rng = random.Random(5)
    sources = [
        rng.choice([("t", 0), ("t", 1), ("u", -1), (None, 0), ("t", None)]) for _ in range(200)
    ]
    mixed = [
        {"topic": topic, "partition": partition, "entry_id": number}
        for number, (topic, partition) in enumerate(sources)
    ]
    divided = dict(by_topic_partition(pa.Table.from_pylist(mixed, schema=schema.MESSAGES)))
    assert {name: part["entry_id"].to_pylist() for name, part in divided.items()} == {
        name: [number for number, source in enumerate(sources) if source == of]
        for name, of in (("t-partition-0", ("t", 0)), ("t-partition-1", ("t", 1)), ("u", ("u", -1)))
    }


def test_rows_up_to_an_entry_are_those_of_earlier_ledgers_too() -> None:
    places = [(1, 9), (2, 3), (2, 4), (3, 0), (None, 1)]
    made = [{"ledger_id": ledger_id, "entry_id": entry_id} for ledger_id, entry_id in places]
    left = up_to(pa.Table.from_pylist(made, schema=schema.MESSAGES), Position(2, 3))
    assert [
        tuple(row)
        for row in zip(left["ledger_id"].to_pylist(), left["entry_id"].to_pylist(), strict=True)
    ] == [
        (1, 9),
        (2, 3),
    ]


@pytest.mark.spark
def test_spark_gives_the_rows_of_each_file_in_their_order(
    spark: SparkSession, tmp_path: Path
) -> None:
    written(tmp_path, rows([*range(60)]), rows([*range(90, 0, -1)], first_entry=100))
    mode = "set tblproperties ('delta.columnMapping.mode' = 'name')"
    spark.sql(f"alter table delta.`{tmp_path}` {mode}")
    table = TableRows(Place(str(tmp_path)), SparkConfig())
    DeltaTable(str(tmp_path)).delete("entry_id > 100")
    order = RowOrder()
    batches: dict[TableFile, list[int]] = {}
    sizes = []
    with changed(
        spark,
        {
            "spark.sql.execution.arrow.maxRecordsPerBatch": "7",
            "spark.sql.files.maxPartitionBytes": "1kb",
        },
    ):
        for file, batch in table.batches():
            batches.setdefault(file, []).extend(batch["entry_id"].to_pylist())
            order.add(None, file, batch)
            sizes.append(batch.num_rows)
        first = min(batches, key=lambda file: batches[file])
        assert {file for file, _ in table.batches({first})} == {first}
    assert sorted(batches.values()) == [[*range(60)], [*range(100, 190)]]
    assert (order.descents, max(sizes)) == (89, 7)


@contextmanager
def changed(spark: SparkSession, settings: dict[str, str]) -> Iterator[None]:
    """Settings of the session for a while."""
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


Row = tuple[int, int, bool]


def table_of(file: Sequence[Row]) -> pa.Table:
    made: list[dict[str, Any]] = [
        {
            "broker_timestamp": time_us,
            "ledger_id": 1,
            "entry_id": entry_id,
            "batch_index": -1,
            "late": is_late,
        }
        for time_us, entry_id, is_late in file
    ]
    return pa.Table.from_pylist(made, schema=schema.MESSAGES)


def naive(files: list[list[Row]]) -> int:
    """The rule as it is said, on lists: inside a file by position too, between files by time."""
    on_time = [
        [(time_us, entry_id) for time_us, entry_id, is_late in file if not is_late]
        for file in files
    ]
    count = 0
    watermark_us = -1
    in_order = sorted(filter(None, on_time), key=lambda file: (file[0][0], file[-1][0]))
    for file in in_order:
        count += sum(after < before for before, after in pairwise(file))
        count += sum(time_us < watermark_us for time_us, _ in file)
        watermark_us = max(watermark_us, file[-1][0])
    return count


def test_order_by_batches_is_that_of_whole_files() -> None:
    rng = random.Random(3)
    found = 0
    for _ in range(200):
        lanes: list[list[list[Row]]] = [[], []]
        order = RowOrder()
        for _ in range(rng.randrange(6)):
            lane = rng.randrange(2)
            start = rng.randrange(30)
            file = [
                (start + rng.randrange(10), rng.randrange(50), rng.random() < 0.2)
                for _ in range(rng.randrange(12))
            ]
            if rng.random() < 0.7:
                file.sort()
            lanes[lane].append(file)
            for begin in range(0, len(file), 3):
                order.add(lane, (lane, len(lanes[lane]) - 1), table_of(file[begin : begin + 3]))
        overlaps = order.overlaps()
        count = order.descents
        for lane, files in enumerate(lanes):
            for number, file in enumerate(files):
                watermark_us = overlaps.get((lane, number), {}).get(lane)
                if watermark_us is not None:
                    count += sum(
                        rows_before(table_of(file[begin : begin + 3]), watermark_us)
                        for begin in range(0, len(file), 3)
                    )
        expected = sum(map(naive, lanes))
        assert count == expected
        found += expected > 0
    assert 50 < found < 150


def test_two_commits_may_have_rows_of_one_time_in_any_order() -> None:
    order = RowOrder()
    order.add("lane", "first", table_of([(4, 9, False), (5, 9, False)]))
    order.add("lane", "second", table_of([(5, 1, False), (8, 2, False)]))
    order.add("lane", "third", table_of([(8, 1, False)]))
    assert order.overlaps() == {}


def test_a_file_is_looked_at_again_only_if_it_overlaps_an_earlier_one() -> None:
    order = RowOrder()
    order.add("lane", "second", table_of([(5, 1, False), (6, 1, False)]))
    order.add("lane", "first", table_of([(1, 1, False), (4, 1, False)]))
    assert order.overlaps() == {}
    order.add("lane", "between", table_of([(3, 1, False)]))
    order.add("other lane", "second", table_of([(0, 1, False)]))
    assert order.overlaps() == {"between": {"lane": 4}}


_PULSAR_WITHOUT_TOPIC = pa.array([{"partition": 0}], pa.struct([("partition", pa.int32())]))


@pytest.mark.parametrize("columns", [{"id": [1]}, {"id": [1], "pulsar": _PULSAR_WITHOUT_TOPIC}])
def test_a_table_of_somebody_else_is_an_error_that_names_it(
    columns: dict[str, Any], tmp_path: Path
) -> None:
    write_deltalake(str(tmp_path), pa.table(columns))
    with pytest.raises(
        TableError,
        match=f"{tmp_path} has no column topic, nor a column pulsar with all the metadata of",
    ):
        TableRows(Place(str(tmp_path)), SparkConfig())
