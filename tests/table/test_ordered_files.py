"""Files in order from batches in any order, and what their footers tell Delta."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from ledgerlake.decode import schema
from ledgerlake.table import ordered_files
from ledgerlake.table.ordered_files import (
    BufferedWriter,
    DataFile,
    OrderedWriter,
    ParquetFolder,
    merge_overlapping,
    sort_keys,
)
from tests.table.rows import rows

if TYPE_CHECKING:
    from pathlib import Path


def writer_in(folder: Path, watermark_us: int | None = None) -> OrderedWriter:
    return OrderedWriter(
        ParquetFolder(fs.LocalFileSystem(), str(folder), schema.MESSAGES, "part"), watermark_us
    )


def write_in_groups(writer: OrderedWriter, times: list[int]) -> None:
    for start in range(0, len(times), 20):
        writer.write(rows(times[start : start + 20], first_entry=start))


def read(folder: Path, files: list[DataFile]) -> pa.Table:
    return pa.concat_tables(
        [pq.read_table(folder / file.name, partitioning=None) for file in files]
    )


def entries_of(folder: Path, files: list[DataFile]) -> list[int]:
    return read(folder, files)["entry_id"].to_pylist()


def test_rows_in_order_pass_into_one_file(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.write(rows([1, 2, 2]))
    writer.write(rows([3, 4], first_entry=3))
    files = writer.finish()
    assert entries_of(tmp_path, files) == [0, 1, 2, 3, 4]
    assert (len(files), files[0].rows, writer.max_effective_us) == (1, 5, 4000)
    assert files[0].size_bytes == (tmp_path / files[0].name).stat().st_size


def test_rows_out_of_order_in_one_group_are_sorted_and_ties_keep_their_position(
    tmp_path: Path,
) -> None:
    writer = writer_in(tmp_path)
    writer.write(rows([5, 1, 5, 3, 1]))
    assert entries_of(tmp_path, writer.finish()) == [1, 4, 3, 0, 2]


def test_groups_out_of_order_are_merged_and_the_runs_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_files, "ROW_GROUP_BYTES", 1)
    rng = random.Random(7)
    times = [rng.randrange(100) for _ in range(300)]
    writer = writer_in(tmp_path)
    write_in_groups(writer, times)
    files = writer.finish()
    expected = sorted(range(300), key=lambda number: (times[number], number))
    assert entries_of(tmp_path, files) == expected
    assert {file.name for file in files} == {path.name for path in tmp_path.iterdir()}


def count_open_files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets how many files are read at one time, at each that is opened."""
    counts: list[int] = []
    read_row_groups = ordered_files.read_row_groups
    is_open: set[str] = set()

    def counted(folder: ParquetFolder, name: str) -> Any:
        is_open.add(name)
        counts.append(len(is_open))
        yield from read_row_groups(folder, name)
        is_open.remove(name)

    monkeypatch.setattr(ordered_files, "read_row_groups", counted)
    return counts


def test_times_that_overlap_a_little_are_merged_with_few_files_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_files, "ROW_GROUP_BYTES", 1)
    open_files = count_open_files(monkeypatch)
    writer = writer_in(tmp_path)
    # Two producers; one is late by less than a group is long.
    times = [number - (7 if number % 2 else 0) for number in range(1000, 1600)]
    write_in_groups(writer, times)
    assert sum(run._open is not None for run in writer._runs) == 1
    files = writer.finish()
    expected = sorted(range(600), key=lambda number: (times[number], number))
    assert entries_of(tmp_path, files) == expected
    assert (len(open_files), max(open_files)) == (30, 2)


def test_many_runs_over_one_span_of_time_are_merged_with_a_bounded_number_of_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_files, "ROW_GROUP_BYTES", 1)
    open_files = count_open_files(monkeypatch)
    rng = random.Random(8)
    times = [rng.randrange(1000) for _ in range(1400)]
    writer = writer_in(tmp_path)
    write_in_groups(writer, times)
    files = writer.finish()
    assert entries_of(tmp_path, files) == sorted(
        range(1400), key=lambda number: (times[number], number)
    )
    # 70 runs become 9, those become 2, and those are merged.
    assert (len(open_files), max(open_files)) == (70 + 9 + 2, 8)
    assert {file.name for file in files} == {path.name for path in tmp_path.iterdir()}


def test_row_groups_of_merged_files_have_a_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = writer_in(tmp_path), writer_in(tmp_path)
    first.write(rows([1, *range(3, 103)]))
    second.write(rows([2, *range(203, 303)], first_entry=200))
    monkeypatch.setattr(ordered_files, "ROW_GROUP_BYTES", rows(list(range(10))).nbytes)
    merged, _ = merge_overlapping(first._folder, [*first.finish(), *second.finish()])
    sizes = [
        group.num_rows
        for file in merged
        for parquet in [pq.ParquetFile(tmp_path / file.name).metadata]
        for group in map(parquet.row_group, range(parquet.num_row_groups))
    ]
    assert sum(sizes) == 202
    assert max(sizes) <= 20


def test_messages_without_broker_time_are_ordered_by_publish_time(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.write(rows([0], first_entry=0, broker_timestamp=None, publish_time=9_000))
    writer.write(rows([0], first_entry=1, broker_timestamp=None, publish_time=2_000))
    assert entries_of(tmp_path, writer.finish()) == [1, 0]


def test_a_message_without_a_time_stands_first_and_is_late_where_the_table_has_rows(
    tmp_path: Path,
) -> None:
    batch = rows([7, 3, 5]).set_column(6, "broker_timestamp", pa.nulls(3, schema.TIMESTAMP))
    times = pa.array([7_000, None, 5_000], schema.TIMESTAMP)
    batch = batch.set_column(batch.schema.get_field_index("publish_time"), "publish_time", times)
    assert ordered_files.effective_times(batch).tolist() == [7_000, 0, 5_000]
    assert [column.tolist() for column in sort_keys(batch)[:3]] == [
        [7_000, 0, 5_000],
        [1, 1, 1],
        [0, 1, 2],
    ]
    for watermark_us, late in ((None, [False, False, False]), (1, [True, False, False])):
        writer = writer_in(tmp_path, watermark_us)
        writer.write(batch)
        files = writer.finish()
        assert entries_of(tmp_path, files) == [1, 2, 0]
        assert read(tmp_path, files)["late"].to_pylist() == late
        assert (files[0].first, files[0].last, writer.max_effective_us) == (
            (0, 1, 1, -1),
            (7_000, 1, 0, -1),
            7_000,
        )


def test_a_batch_of_messages_without_a_time_moves_no_watermark(tmp_path: Path) -> None:
    batch = rows([0, 0]).set_column(6, "broker_timestamp", pa.nulls(2, schema.TIMESTAMP))
    untimed = pa.nulls(2, schema.TIMESTAMP)
    batch = batch.set_column(batch.schema.get_field_index("publish_time"), "publish_time", untimed)
    writer = writer_in(tmp_path, 9_000)
    writer.write(batch)
    files = writer.finish()
    assert (entries_of(tmp_path, files), writer.max_effective_us) == ([0, 1], 0)


def test_a_file_with_a_time_that_python_cannot_hold_has_no_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_files, "ROW_GROUP_BYTES", 1)
    writer = writer_in(tmp_path)
    writer.write(rows([1, 1]))
    writer.write(rows([2, 2], first_entry=2, publish_time=1_760_000_000_000_000_000))
    writer.write(rows([3, 3], first_entry=4))
    (file,) = writer.finish()
    stats = json.loads(file.stats)
    assert stats == {"numRecords": 6}


def test_delayed_messages_are_ordered_by_when_they_were_due_or_stored_if_that_is_later(
    tmp_path: Path,
) -> None:
    writer = writer_in(tmp_path)
    writer.write(rows([3000, 5000], first_entry=0))
    writer.write(rows([1000], first_entry=2, deliver_at=4_000_000, delivered_at=9_000_000))
    writer.write(rows([6000], first_entry=3, deliver_at=2_000_000, delivered_at=9_000_000))
    writer.write(rows([2000], first_entry=4, deliver_at=4_000_000, delivered_at=None))
    assert entries_of(tmp_path, writer.finish()) == [4, 0, 2, 1, 3]


def test_what_is_earlier_than_the_table_had_reached_is_marked_late(tmp_path: Path) -> None:
    writer = writer_in(tmp_path, watermark_us=3000)
    writer.write(rows([4, 1, 3, 2]))
    files = writer.finish()
    assert read(tmp_path, files)["late"].to_pylist() == [True, True, False, False]


def test_files_are_cut_at_their_size_and_stay_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_files, "ROW_GROUP_BYTES", 1)
    monkeypatch.setattr(ordered_files, "FILE_BYTES", 1)
    writer = writer_in(tmp_path)
    for start in range(0, 9, 3):
        writer.write(rows([start, start, start], first_entry=start))
    files = writer.finish()
    assert [file.rows for file in files] == [3, 3, 3]
    assert [file.name.split("-")[1] for file in files] == ["000", "001", "002"]
    assert entries_of(tmp_path, files) == list(range(9))


def test_nothing_in_is_no_file(tmp_path: Path) -> None:
    assert writer_in(tmp_path).finish() == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_tells_delta_its_range(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.write(rows([1000, 2500], broker_index=7))
    stats = json.loads(writer.finish()[0].stats)
    assert stats["numRecords"] == 2
    assert stats["minValues"]["broker_timestamp"] == "1970-01-01T00:00:01.000Z"
    assert stats["maxValues"]["broker_timestamp"] == "1970-01-01T00:00:02.500Z"
    assert (stats["minValues"]["entry_id"], stats["maxValues"]["entry_id"]) == (0, 1)
    assert stats["nullCount"]["broker_index"] == 0


def test_merging_holds_one_table_of_each_run() -> None:
    run_numbers: list[int] = []

    def run(number: int, times: list[int]) -> Any:
        for index, time_ms in enumerate(times):
            run_numbers.append(number)
            yield pa.Table.from_batches([rows([time_ms], first_entry=number * 100 + index)])

    runs = [run(0, [1, 4, 7]), run(1, [2, 5, 8]), run(2, [3, 6, 9])]
    merged = ordered_files.merge_sorted(runs)
    first = next(merged)
    assert first["broker_timestamp"].cast(pa.int64()).to_pylist() == [1000]
    assert sorted(run_numbers) == [0, 0, 1, 2]
    all_rows = pa.concat_tables([first, *merged])
    assert list(sort_keys(all_rows)[0]) == [number * 1000 for number in range(1, 10)]


def test_files_of_several_writers_that_follow_each_other_stay_as_they_are(tmp_path: Path) -> None:
    first, second = writer_in(tmp_path), writer_in(tmp_path)
    first.write(rows([1, 2]))
    first.roll_file()
    first.write(rows([7, 8], first_entry=6))
    second.write(rows([4], first_entry=4))
    files = [*first.finish(), *second.finish()]
    merged, replaced = merge_overlapping(first._folder, files)
    assert replaced == []
    assert entries_of(tmp_path, merged) == [0, 1, 4, 6, 7]


def test_files_of_several_writers_that_overlap_are_merged_and_the_others_left(
    tmp_path: Path,
) -> None:
    first, second = writer_in(tmp_path), writer_in(tmp_path)
    first.write(rows([1, 2, 9]))
    first.roll_file()
    first.write(rows([20], first_entry=20))
    second.write(rows([5], first_entry=5))
    files = [*first.finish(), *second.finish()]
    merged, replaced = merge_overlapping(first._folder, files)
    assert entries_of(tmp_path, merged) == [0, 1, 5, 2, 20]
    assert len(replaced) == 2
    assert all((tmp_path / name).exists() for name in replaced)
    assert [(file.first[0], file.last[0]) for file in merged if file.first and file.last] == [
        (1000, 9000),
        (20000, 20000),
    ]


def test_positions_that_step_back_within_the_same_time_are_put_in_order(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.write(rows([3, 3], first_entry=5))
    writer.write(rows([3], first_entry=2))
    assert entries_of(tmp_path, writer.finish()) == [2, 5, 6]


@pytest.mark.parametrize(
    ("value", "packed"), [(b"x" * 1000, True), (random.Random(1).randbytes(1000), False)]
)
def test_a_value_as_large_as_a_row_group_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: bytes, packed: bool
) -> None:
    monkeypatch.setattr(ordered_files, "ROW_GROUP_BYTES", 1000)
    writer = writer_in(tmp_path)
    writer.write(rows([1]))
    writer.write(rows([2], first_entry=1, value=value))
    writer.write(rows([3], first_entry=2))
    files = writer.finish()
    assert entries_of(tmp_path, files) == [0, 1, 2]
    assert [file.rows for file in files] == [1, 1, 1]
    assert ("zstd" in files[1].name) == packed


def test_tables_without_rows_are_no_file(tmp_path: Path) -> None:
    writer = BufferedWriter(
        ParquetFolder(fs.LocalFileSystem(), str(tmp_path), schema.MESSAGES, "part")
    )
    writer.write(schema.MESSAGES.empty_table())
    assert writer.finish() == []
    assert list(tmp_path.iterdir()) == []


def test_many_small_tables_become_one_while_they_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_files, "_MAX_BUFFERED_TABLES", 10)
    writer = BufferedWriter(
        ParquetFolder(fs.LocalFileSystem(), str(tmp_path), schema.MESSAGES, "part")
    )
    for number in range(105):
        writer.write(pa.Table.from_batches([rows([number], first_entry=number)]))
        assert len(writer._buffer) < 10
    (file,) = writer.finish()
    assert entries_of(tmp_path, [file]) == list(range(105))
    assert pq.ParquetFile(tmp_path / file.name).num_row_groups == 1


def test_delayed_messages_with_one_time_are_in_the_order_of_their_positions(tmp_path: Path) -> None:
    """They come in the order in which they were due."""
    writer = writer_in(tmp_path)
    due = rows([5, 5, 5], deliver_at=2, delivered_at=9)
    writer.write(due.take(pa.array([2, 0, 1])))
    assert entries_of(tmp_path, writer.finish()) == [0, 1, 2]


def test_a_large_message_that_was_delayed_is_written_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(
        ordered_files.FileWriter,
        "write",
        lambda _self, table: written.append(table["value"].chunk(0).buffers()[2].address),
    )
    writer = writer_in(tmp_path)
    due = rows([5], deliver_at=2, delivered_at=9, value=bytes(ordered_files.ROW_GROUP_BYTES))
    writer.write(due)
    assert written == [due["value"].buffers()[2].address]


def test_a_file_is_described_without_another_request_to_the_store(tmp_path: Path) -> None:
    # Another process may have removed the file by then.
    store = SimpleNamespace(open_output_stream=fs.LocalFileSystem().open_output_stream)
    writer = OrderedWriter(ParquetFolder(store, str(tmp_path), schema.MESSAGES, "part"), None)
    writer.write(rows([1, 2, 3]))
    (file,) = writer.finish()
    assert file.size_bytes == (tmp_path / file.name).stat().st_size
