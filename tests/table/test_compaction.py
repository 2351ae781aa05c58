"""Small files of a table become one; readers see the same rows, in order."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from ledgerlake.decode import schema
from ledgerlake.errors import TableError
from ledgerlake.options.spark_options import SparkConfig
from ledgerlake.stored.places import Place
from ledgerlake.table import compaction, file_groups, log_commit, replacement
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.compaction import Compaction
from ledgerlake.table.delta_table import Table
from ledgerlake.table.open_table import open_delta, read_commit
from ledgerlake.table.ordered_files import BufferedWriter, OrderedWriter, data_folder
from ledgerlake.table.properties import checkpoint_interval
from ledgerlake.table.vacuum import is_data_file
from ledgerlake.verify.table_rows import TableRows
from ledgerlake.wire.message_id import AFTER_ALL
from tests.table.rows import rows
from tests.table_rows import out_of_order, rows_by_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ledgerlake.table.ordered_files import DataFile

PARTITIONS = 3
ROWS = 20


class Writer:
    """A pipeline's table of messages, and its micro-batches."""

    def __init__(self, path: Place) -> None:
        self.table = Table(path, schema.MESSAGES)
        self.table.path.make()
        self.table.create()
        self.batches = 0

    def commit(self, *, watermark_us: int | None = None, times_ms: list[int] | None = None) -> None:
        """Commit a micro-batch with a file of each partition."""
        number, files = self.batches, []
        self.batches += 1
        times_ms = times_ms or list(range(number * ROWS, (number + 1) * ROWS))
        for partition in range(PARTITIONS):
            folder = data_folder(
                self.table.path, schema.MESSAGES, f"part-{number:08}-{partition:05}"
            )
            writer = OrderedWriter(folder, watermark_us)
            writer.write(rows(times_ms, number * ROWS, partition=partition, ledger_id=partition))
            files += writer.finish()
        batch = BatchCommit("stream", "query", number, number)
        assert not self.table.contains(batch)
        self.table.commit(batch, files, {})

    def compaction(self, **arguments: Any) -> Compaction:
        return Compaction(self.table.path, schema.MESSAGES, **arguments)

    def merge_once(self) -> int:
        """Carry out the first group of the first plan alone."""
        rests: list[None] = []
        return self.compaction(
            rest=lambda: rests.append(None), is_stopped=lambda: len(rests) > 1
        ).run()


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(Place(str(tmp_path / "messages")))


def files_of(path: Place) -> list[str]:
    return sorted(pa.table(open_delta(path).get_add_actions())["path"].to_pylist())


def content(path: Place) -> list[dict[str, Any]]:
    table = open_delta(path).to_pyarrow_table(
        columns=["partition", "entry_id", "broker_timestamp", "late", "value"]
    )
    return table.sort_by([("partition", "ascending"), ("entry_id", "ascending")]).to_pylist()


def rows_out_of_order(path: Place) -> int:
    table = TableRows(path, SparkConfig())
    return sum(
        out_of_order(rows_by_file(table, f"t-partition-{partition}", AFTER_ALL))
        for partition in range(PARTITIONS)
    )


def test_small_files_become_one_with_the_same_rows_in_order(writer: Writer) -> None:
    for _ in range(5):
        writer.commit()
    before = content(writer.table.path)
    assert writer.compaction().run() == 5 * PARTITIONS
    assert len(files_of(writer.table.path)) == 1
    assert content(writer.table.path) == before
    assert rows_out_of_order(writer.table.path) == 0


def test_the_pipeline_commits_on_after_a_compaction_and_the_next_one_takes_what_came(
    writer: Writer,
) -> None:
    for _ in range(4):
        writer.commit()
    compaction = writer.compaction()
    assert compaction.run() == 4 * PARTITIONS
    writer.commit()
    writer.table.refresh()
    compaction.run()
    for _ in range(3):
        writer.commit()
    assert compaction.run() > 0
    assert len(content(writer.table.path)) == 8 * PARTITIONS * ROWS
    assert rows_out_of_order(writer.table.path) == 0
    assert writer.table.recorded("query").batch_id == 7  # type: ignore[union-attr]


def test_late_rows_keep_their_mark_and_get_their_place_in_time(writer: Writer) -> None:
    for _ in range(3):
        writer.commit()
    writer.commit(watermark_us=60_000, times_ms=[5])
    before = content(writer.table.path)
    writer.compaction().run()
    assert content(writer.table.path) == before
    [name] = files_of(writer.table.path)
    merged = pq.read_table(f"{writer.table.path}/{name}")
    assert merged["broker_timestamp"].to_pylist() == sorted(merged["broker_timestamp"].to_pylist())
    assert sum(merged["late"].to_pylist()) == PARTITIONS


def test_a_clock_that_steps_back_does_not_change_the_order_of_files(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.commit()
    monkeypatch.setattr("ledgerlake.table.delta_table.time.time", lambda: 1_000_000.0)
    writer.commit()
    # As a process on another machine, whose clock is behind.
    writer.table = Table(writer.table.path, schema.MESSAGES)
    writer.commit()
    actions = pa.table(open_delta(writer.table.path).get_add_actions())
    in_order = actions.sort_by([("modification_time", "ascending")])["path"].to_pylist()
    assert [name[:13] for name in in_order] == sorted(name[:13] for name in in_order)


def test_readers_of_changes_see_no_change(writer: Writer) -> None:
    for _ in range(4):
        writer.commit()
    writer.compaction().run()
    log = f"{writer.table.path}/_delta_log/{open_delta(writer.table.path).version():020}.json"
    with open(log) as commit:
        actions = [json.loads(line) for line in commit]
    assert [action["commitInfo"]["operation"] for action in actions if "commitInfo" in action] == [
        "OPTIMIZE"
    ]
    changes = [
        next(iter(action.values())) for action in actions if "add" in action or "remove" in action
    ]
    assert len(changes) == 4 * PARTITIONS + 1
    assert not any(change["dataChange"] for change in changes)


def test_rows_that_a_user_deleted_meanwhile_stay_deleted(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        writer.commit()
    before_the_commit(
        monkeypatch, lambda _: DeltaTable(writer.table.path.uri).delete("entry_id < 10")
    )
    assert writer.merge_once() == 0
    assert min(row["entry_id"] for row in content(writer.table.path)) == 10
    assert not [name for name in os.listdir(str(writer.table.path)) if "compacted" in name]


def test_files_before_a_users_deletion_stay_and_those_after_it_are_merged_in_order(
    writer: Writer,
) -> None:
    for _ in range(6):
        writer.commit()
    DeltaTable(writer.table.path.uri).delete("entry_id = 45 and partition = 1")
    for _ in range(6):
        writer.commit()
    merged = writer.compaction().run()
    assert 0 < merged < 12 * PARTITIONS
    assert len(content(writer.table.path)) == 12 * ROWS * PARTITIONS - 1
    assert rows_out_of_order(writer.table.path) == 0


def before_the_commit(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[Sequence[DataFile]], object]
) -> None:
    """Have somebody act after files were merged, and before the commit; ``act`` gets the merged
    ones.
    """
    replace = replacement.replace_files

    def after_act(path: Place, version: int, old: Any, new: Any, needed: Any) -> int | None:
        act(new)
        return replace(path, version, old, new, needed)

    monkeypatch.setattr(compaction, "replace_files", after_act)


def test_micro_batches_that_are_committed_meanwhile_do_not_stop_a_compaction(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        writer.commit()

    def commit_twice(_merged: Sequence[DataFile]) -> None:
        writer.commit()
        writer.commit()

    before_the_commit(monkeypatch, commit_twice)
    assert writer.merge_once() == 4 * PARTITIONS
    assert len(content(writer.table.path)) == 6 * PARTITIONS * ROWS
    assert rows_out_of_order(writer.table.path) == 0


def test_a_table_whose_columns_another_writer_changes_is_left(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        writer.commit()
    properties = {"delta.appendOnly": "true"}
    before_the_commit(
        monkeypatch,
        lambda _: DeltaTable(writer.table.path.uri).alter.set_table_properties(properties),
    )
    assert writer.merge_once() == 0
    assert len(files_of(writer.table.path)) == 4 * PARTITIONS


def test_a_commit_whose_answer_was_lost_is_known_again(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        writer.commit()
    create = Place.create_file

    def lose_answer(place: Place, commit: bytes) -> bool:
        create(place, commit)
        raise OSError("the connection was reset")

    monkeypatch.setattr(Place, "create_file", lose_answer)
    assert writer.compaction().run() == 4 * PARTITIONS
    assert len(content(writer.table.path)) == 4 * PARTITIONS * ROWS


def test_a_request_that_meets_its_own_first_attempt_is_not_a_conflict(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        writer.commit()
    create = Place.create_file
    monkeypatch.setattr(Place, "create_file", lambda place, commit: create(place, commit) and False)
    assert writer.compaction().run() == 4 * PARTITIONS
    assert len(files_of(writer.table.path)) == 1


def test_a_merged_file_is_never_deleted_while_its_commit_may_be_ours(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        writer.commit()
    create, read = Place.create_file, read_commit
    created: list[Place] = []

    def meet_own_attempt(place: Place, commit: bytes) -> bool:
        created.append(place)
        return create(place, commit) and False

    def fail_after_it(path: Place, version: int) -> list[Any]:
        if created:
            raise OSError("the store does not answer")
        return read(path, version)

    monkeypatch.setattr(Place, "create_file", meet_own_attempt)
    for module in (replacement, log_commit):
        monkeypatch.setattr(module, "read_commit", fail_after_it)
    with pytest.raises(TableError, match="the store does not answer"):
        writer.compaction().run()
    monkeypatch.undo()
    assert len(files_of(writer.table.path)) == 1
    assert len(content(writer.table.path)) == 4 * PARTITIONS * ROWS


def test_a_merged_file_that_a_vacuum_removed_meanwhile_is_not_committed(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        writer.commit()
    before = files_of(writer.table.path)

    def remove(merged: Sequence[DataFile]) -> None:
        for file in merged:
            os.unlink(f"{writer.table.path}/{file.name}")

    before_the_commit(monkeypatch, remove)
    with pytest.raises(TableError, match="could not be replaced"):
        writer.compaction().run()
    assert files_of(writer.table.path) == before


def test_a_table_that_another_writer_compacts_is_left_to_it(writer: Writer) -> None:
    for _ in range(4):
        writer.commit()
    DeltaTable(writer.table.path.uri).optimize.compact()
    for _ in range(4):
        writer.commit()
    kept = writer.compaction()
    assert kept.run() == 0
    assert kept.obstacles == ["another writer that merges its files (delta-rs:py-1.6.6)"]


def test_the_log_gets_its_checkpoints_though_merges_take_their_versions(writer: Writer) -> None:
    DeltaTable(writer.table.path.uri).alter.set_table_properties({"delta.checkpointInterval": "10"})
    kept = writer.compaction()
    for _ in range(18):
        for _ in range(3):
            writer.commit()
        kept.run()
    checkpoints = [
        name
        for name in os.listdir(f"{writer.table.path}/_delta_log")
        if ".checkpoint.parquet" in name
    ]
    assert len(checkpoints) >= open_delta(writer.table.path).version() // 10 - 1
    assert len(content(writer.table.path)) == 54 * PARTITIONS * ROWS


@pytest.mark.parametrize("interval", ["0", "-5", "10 commits", "", "²", "9" * 5000])
def test_an_interval_of_checkpoints_that_cannot_be_is_that_of_a_table_without_one(
    writer: Writer, interval: str
) -> None:
    log = Path(writer.table.path.uri) / f"_delta_log/{0:020}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "metaData" in action:
            action["metaData"]["configuration"]["delta.checkpointInterval"] = interval
    log.write_text("".join(f"{json.dumps(action)}\n" for action in actions))
    table = open_delta(writer.table.path)
    assert table.metadata().configuration["delta.checkpointInterval"] == interval
    assert checkpoint_interval(table) == 100
    for _ in range(4):
        writer.commit()
    assert writer.compaction().run() == 4 * PARTITIONS


def test_nothing_is_read_of_a_table_that_has_not_changed(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.commit()
    kept = writer.compaction()
    kept.run()

    def fail(_path: Place) -> None:
        raise AssertionError("the table was opened")

    monkeypatch.setattr(compaction, "open_delta", fail)
    assert kept.run() == 0


def test_a_turn_ends_though_files_come_at_each_rest_and_merges_those_of_its_begin_at_all_levels(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_groups, "_LEVELS", ((2**40, ROWS + 1), (2**40, 2**40)))
    monkeypatch.setattr(file_groups, "_MOST_FILES", (9, 9))
    for _ in range(24):
        writer.commit()
    rests: list[None] = []

    def commit_a_group() -> None:
        rests.append(None)
        assert len(rests) < 50, "the turn does not end"
        for _ in range(3):
            writer.commit()

    assert writer.compaction(rest=commit_a_group).run() == 24 * PARTITIONS + 8
    assert len(files_of(writer.table.path)) == 1 + 3 * PARTITIONS * len(rests)
    assert writer.compaction().run() >= 3 * PARTITIONS * len(rests)
    assert rows_out_of_order(writer.table.path) == 0


def test_a_turn_ends_though_another_writer_comes_first_at_each_commit(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        writer.commit()
    changes: list[None] = []

    def change(_merged: Sequence[DataFile]) -> None:
        changes.append(None)
        assert len(changes) < 5, "the turn does not end"
        properties = {"delta.logRetentionDuration": f"interval {len(changes)} days"}
        DeltaTable(writer.table.path.uri).alter.set_table_properties(properties)

    before_the_commit(monkeypatch, change)
    assert writer.compaction().run() == 0
    assert len(files_of(writer.table.path)) == 4 * PARTITIONS


def test_a_table_whose_log_was_cleaned_beyond_the_last_look_is_looked_at_again(
    writer: Writer,
) -> None:
    writer.commit()
    compaction = Compaction(writer.table.path, writer.table.schema)
    assert compaction.run() == 0
    settled = compaction._settled
    assert settled is not None
    for _ in range(12):
        writer.commit()
    log = Path(writer.table.path.uri) / "_delta_log"
    DeltaTable(writer.table.path.uri).create_checkpoint()
    for version in range(settled + 6):
        (log / f"{version:020}.json").unlink(missing_ok=True)
    assert compaction.run() > 0


def test_a_stop_gives_the_merge_up_and_leaves_no_file(writer: Writer) -> None:
    for _ in range(4):
        writer.commit()
    before = sorted(os.listdir(str(writer.table.path)))
    assert writer.compaction(is_stopped=lambda: True).run() == 0
    assert sorted(os.listdir(str(writer.table.path))) == before


def test_files_that_cannot_be_joined_are_left_and_the_others_are_merged(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(4):
        writer.commit()

    def fail(_rows: pa.Table) -> pa.Table:
        raise pa.ArrowInvalid("offset overflow")

    with monkeypatch.context() as patched:
        patched.setattr(compaction, "in_order", fail)
        kept = writer.compaction()
        assert kept.run() == 0
    assert "offset overflow" in caplog.text
    for _ in range(4):
        writer.commit()
    assert kept.run() == 4 * PARTITIONS


def test_a_commit_of_many_files_is_not_merged_in_one_go(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_groups, "_MOST_FILES", (PARTITIONS - 1,) * 3)
    for _ in range(4):
        writer.commit()
    assert writer.compaction().run() == 0


def test_a_commit_that_failed_leaves_its_files_because_it_may_land_later(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        writer.commit()

    def fail(_place: Place, _commit: bytes) -> bool:
        raise OSError("timed out")

    monkeypatch.setattr(Place, "create_file", fail)
    with pytest.raises(TableError, match=r"could not be replaced: timed out"):
        writer.compaction().run()
    assert [name for name in os.listdir(str(writer.table.path)) if "compacted" in name]


def test_a_version_is_not_free_if_the_log_before_it_was_removed(writer: Writer) -> None:
    for _ in range(4):
        writer.commit()
    path, version = writer.table.path, open_delta(writer.table.path).version()
    open_delta(path).create_checkpoint()
    os.unlink(f"{path}/_delta_log/{version:020}.json")
    with pytest.raises(TableError, match="could not be replaced"):
        replacement.replace_files(path, version, [], [], set())


def test_a_disk_that_is_full_keeps_no_part_of_a_file(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        writer.commit()

    def fail(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BufferedWriter, "finish", fail)
    with pytest.raises(TableError, match=r"cannot be merged: .*No space left"):
        writer.compaction().run()
    assert not [name for name in os.listdir(str(writer.table.path)) if "compacted" in name]
    assert len(files_of(writer.table.path)) == 4 * PARTITIONS


def test_only_files_directly_in_the_table_with_the_names_of_data_files_are_merged() -> None:
    assert is_data_file("part-00000-babbf7a3-d020-4d26-92cd-84a60540f20c-c000.snappy.parquet")
    assert is_data_file("part-compacted-000-babbf7a3-d020-4d26-92cd-84a60540f20c.zstd.parquet")
    assert not is_data_file("other.parquet")
    assert not is_data_file(
        "day=1/part-00000-babbf7a3-d020-4d26-92cd-84a60540f20c-c000.snappy.parquet"
    )


def test_a_table_with_features_that_plain_files_cannot_honour_is_left_with_the_reason(
    writer: Writer,
) -> None:
    for _ in range(4):
        writer.commit()
    DeltaTable(writer.table.path.uri).alter.add_constraint({"has_entry": "entry_id >= 0"})
    kept = writer.compaction()
    assert kept.run() == 0
    assert kept.obstacles == ["checkConstraints"]


def small_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every file be of a level that is merged row group by row group."""
    monkeypatch.setattr(file_groups, "_LEVELS", ((0, 0), (2**40, 2**40)))


def test_larger_files_are_merged_row_group_by_row_group(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        writer.commit()
    before = content(writer.table.path)
    small_levels(monkeypatch)
    assert writer.merge_once() > 0
    assert content(writer.table.path) == before
    assert rows_out_of_order(writer.table.path) == 0


def test_a_large_file_whose_row_groups_are_not_in_order_is_left_and_its_neighbours_are_merged(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        writer.commit()
    foreign = pa.Table.from_batches(
        [rows([1000, 1001], 500, partition=7), rows([3, 4], 600, partition=7)]
    )
    name = "part-00000-babbf7a3-d020-4d26-92cd-84a60540f20c-c000.snappy.parquet"
    pq.write_table(foreign, f"{writer.table.path}/{name}", row_group_size=2)
    add(writer.table.path, name, foreign)
    for _ in range(4):
        writer.commit()
    small_levels(monkeypatch)
    assert writer.merge_once() > 0
    assert name in files_of(writer.table.path)
    assert len(content(writer.table.path)) == 8 * PARTITIONS * ROWS + 4
    assert rows_out_of_order(writer.table.path) == 0


def add(path: Place, name: str, content: pa.Table) -> None:
    """Have another writer add a file."""
    from deltalake.transaction import AddAction

    table = DeltaTable(path.uri)
    stats = {"numRecords": content.num_rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
    newest_ms = max(pa.table(table.get_add_actions())["modification_time"].to_pylist())
    action = AddAction(
        name, os.path.getsize(f"{path}/{name}"), {}, newest_ms + 1, True, json.dumps(stats)
    )
    table.create_write_transaction([action], "append", table.schema())


def test_rejects_stay_in_the_order_of_their_files(tmp_path: Path) -> None:
    table = Table(Place(str(tmp_path / "rejects")), schema.REJECTS)
    table.path.make()
    table.create()
    for number in range(9):
        writer = BufferedWriter(data_folder(table.path, schema.REJECTS, f"part-{number:08}-00000"))
        reject = {
            "topic": "t",
            "partition": 0,
            "ledger_id": 1,
            "entry_id": 9 - number,
            "reason": "corrupt",
            "entry": b"x",
        }
        writer.write(pa.Table.from_pylist([reject], schema=schema.REJECTS))
        batch = BatchCommit("stream", "query", number, number)
        assert not table.contains(batch)
        table.commit(batch, writer.finish(), {})
    assert Compaction(table.path, schema.REJECTS).run() == 9
    assert open_delta(table.path).to_pyarrow_table()["entry_id"].to_pylist() == list(
        range(9, 0, -1)
    )


def test_rows_that_compress_well_are_not_merged_beyond_the_memory_they_take(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(6):
        writer.commit()
    size_bytes = PARTITIONS * 2 * (ROWS * compaction._ROW_BYTES + 4000)
    monkeypatch.setattr(compaction, "_MOST_ROWS_BYTES", size_bytes)
    assert PARTITIONS < writer.merge_once() < 6 * PARTITIONS
    monkeypatch.setattr(compaction, "_MOST_ROWS_BYTES", 1)
    assert writer.compaction().run() == 0
    assert len(content(writer.table.path)) == 6 * PARTITIONS * ROWS
    assert rows_out_of_order(writer.table.path) == 0
