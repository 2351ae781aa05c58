"""Rows of a micro-batch that its commit lacks: added once, and none of them twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from ledgerlake.decode import schema
from ledgerlake.errors import CheckpointError
from ledgerlake.operators.results import PartitionResult, TableResult, TaskResult
from ledgerlake.operators.stage_rows import StateSummary
from ledgerlake.pipeline.commit import BatchResult, DeltaSink
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit, SeenBatch
from ledgerlake.table.delta_table import Table
from ledgerlake.table.ordered_files import BufferedWriter, DataFile, data_folder
from ledgerlake.table.repeated_rejects import add_missing
from ledgerlake.wire.message_id import Position
from tests.pipeline_tables import opened_tables

TOPIC = "persistent://public/default/orders"
SPAN = {"start": None, "end": {"ledger": 3, "entry": 9}}
BATCH = BatchCommit("orders", "ledgerlake:orders:id", 4, 7, {TOPIC: SPAN})


def rejected(
    entry_id: int, reason: str = "chunk_orphan", detail: str = "", **other: Any
) -> dict[str, Any]:
    row = {
        "topic": TOPIC,
        "partition": -1,
        "message_id": f"3:{entry_id}",
        "ledger_id": 3,
        "entry_id": entry_id,
    }
    return row | {"reason": reason, "detail": detail, "entry": b"bytes"} | other


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Table]:
    schemas = {"messages": schema.MESSAGES, "rejects": schema.REJECTS}
    for name, columns in schemas.items():
        write_deltalake(str(tmp_path / name), columns.empty_table())
    return {name: Table(Place(str(tmp_path / name)), columns) for name, columns in schemas.items()}


def written(table: Table, rows: list[dict[str, Any]]) -> list[DataFile]:
    writer = BufferedWriter(data_folder(table.folder, table.schema, "part-00000004-00000"))
    writer.write(pa.Table.from_pylist(rows, schema=table.schema))
    return writer.finish()


def run(
    tables: dict[str, Table],
    rejects: list[dict[str, Any]],
    messages: int = 0,
    batch: BatchCommit = BATCH,
) -> BatchResult:
    """One run of a micro-batch by a process of its own, from the tasks' files on."""
    here = opened_tables(Path(tables["messages"].path.uri).parent)
    rows = [
        {"topic": TOPIC, "partition": -1, "ledger_id": 3, "entry_id": number, "batch_index": -1}
        for number in range(messages)
    ]
    files = TableResult(written(here.main.table, rows))
    result = TaskResult(
        TOPIC, -1, Position(3, 9), {"messages": files}, written(here.rejects, rejects)
    )
    return DeltaSink(here).commit(batch, [PartitionResult(result, StateSummary([]))])


def killed_behind_rejects(
    tables: dict[str, Table], rejects: list[dict[str, Any]], batch: BatchCommit = BATCH
) -> None:
    """A run that ends between the two commits."""
    table = Table(tables["rejects"].path, schema.REJECTS)
    assert not table.contains(batch)
    table.commit(batch, written(table, rejects), {})


def killed_behind_additions(tables: dict[str, Table], rejects: list[dict[str, Any]]) -> None:
    """Another run that ends before the commit of ``messages``."""
    table = Table(tables["rejects"].path, schema.REJECTS)
    assert table.contains(BATCH)
    add_missing(table, BATCH, written(table, rejects))


def stored_rows(tables: dict[str, Table], name: str = "rejects") -> list[tuple[int, str, str]]:
    rows = DeltaTable(tables[name].path.uri).to_pyarrow_table().to_pylist()
    return sorted((row["entry_id"], row.get("reason", ""), row.get("detail", "")) for row in rows)


def test_what_a_repeat_rejects_beyond_the_first_run_is_added(tables: dict[str, Table]) -> None:
    killed_behind_rejects(tables, [rejected(1)])
    run(tables, [rejected(1), rejected(5, "undecryptable")], messages=2)
    assert stored_rows(tables) == [(1, "chunk_orphan", ""), (5, "undecryptable", "")]
    assert len(stored_rows(tables, "messages")) == 2


def test_it_is_added_once_over_a_kill_behind_it(tables: dict[str, Table]) -> None:
    killed_behind_rejects(tables, [rejected(1)])
    for _ in range(2):
        run(tables, [rejected(1), rejected(5)])
    assert [row[0] for row in stored_rows(tables)] == [1, 5]


def test_a_third_run_adds_what_both_before_lack(tables: dict[str, Table]) -> None:
    killed_behind_rejects(tables, [rejected(1)])
    killed_behind_additions(tables, [rejected(1), rejected(5)])
    killed_behind_additions(tables, [rejected(6), rejected(1), rejected(5)])
    run(tables, [rejected(6)], messages=2)
    assert [row[0] for row in stored_rows(tables)] == [1, 5, 6]


def test_a_repeat_that_judges_the_same_changes_nothing(tables: dict[str, Table]) -> None:
    killed_behind_rejects(tables, [rejected(1), rejected(2)])
    version = DeltaTable(tables["rejects"].path.uri).version()
    run(tables, [rejected(2), rejected(1)], messages=1)
    assert DeltaTable(tables["rejects"].path.uri).version() == version


def test_a_loss_that_has_grown_is_another_row_and_a_word_of_detail_is_not(
    tables: dict[str, Table],
) -> None:
    killed_behind_rejects(
        tables, [rejected(1, "data_loss", "after 3:0"), rejected(2, detail="one way")]
    )
    run(
        tables,
        [rejected(1, "data_loss", "after 3:0 and more"), rejected(2, detail="another way")],
        messages=1,
    )
    assert [row[2] for row in stored_rows(tables)] == ["after 3:0", "after 3:0 and more", "one way"]


def test_messages_of_one_batch_entry_are_told_apart(tables: dict[str, Table]) -> None:
    killed_behind_rejects(tables, [rejected(1, message_id="3:1:-1:0")])
    run(
        tables, [rejected(1, message_id="3:1:-1:0"), rejected(1, message_id="3:1:-1:1")], messages=1
    )
    assert len(stored_rows(tables)) == 2


def test_rows_of_other_batches_and_streams_do_not_count(tables: dict[str, Table]) -> None:
    killed_behind_rejects(tables, [rejected(5)], BatchCommit("orders", BATCH.query, 3, 6))
    killed_behind_rejects(tables, [rejected(1)])
    killed_behind_rejects(
        tables, [rejected(5)], BatchCommit("payments", "ledgerlake:payments:id", 4, 7)
    )
    run(tables, [rejected(1), rejected(5)], messages=1)
    assert [row[0] for row in stored_rows(tables)] == [1, 5, 5, 5]


def test_rows_that_a_user_has_deleted_meanwhile_do_not_come_again(tables: dict[str, Table]) -> None:
    killed_behind_rejects(tables, [rejected(1), rejected(2)])
    DeltaTable(tables["rejects"].path.uri).delete("entry_id = 1")
    run(tables, [rejected(1), rejected(2), rejected(5)], messages=1)
    assert [row[0] for row in stored_rows(tables)] == [2, 5]


def test_files_that_an_optimize_joined_meanwhile_are_compared_all_the_same(
    tables: dict[str, Table],
) -> None:
    killed_behind_rejects(tables, [rejected(8)], BatchCommit("orders", BATCH.query, 3, 6))
    killed_behind_rejects(tables, [rejected(1)])
    DeltaTable(tables["rejects"].path.uri).optimize.compact()
    run(tables, [rejected(1), rejected(5)], messages=1)
    assert [row[0] for row in stored_rows(tables)] == [1, 5, 8]


def test_a_batch_that_messages_has_is_done_whatever_the_repeat_rejects(
    tables: dict[str, Table],
) -> None:
    run(tables, [], messages=3)
    result = run(tables, [rejected(1, "undecryptable")], messages=2)
    assert (stored_rows(tables), result.repeated) == ([], True)
    assert result.tables == {"messages": SeenBatch(str(tables["messages"].path), 4)}
    result = run(tables, [rejected(1, "undecryptable")])
    assert (stored_rows(tables), result.repeated) == ([], True)
    assert len(stored_rows(tables, "messages")) == 3


def test_a_message_that_waited_in_the_first_run_and_is_trimmed_in_the_repeat_is_a_reject(
    tables: dict[str, Table],
) -> None:
    run(tables, [], messages=3)
    for _ in range(2):
        run(tables, [rejected(1, "delayed_trimmed"), rejected(2, "chunk_trimmed")], messages=2)
        assert [row[:2] for row in stored_rows(tables)] == [(1, "delayed_trimmed")]


def commits_of_another_stream(path: Place, count: int) -> None:
    """Commits to a table of rejects by a stream that shares it, more than are searched."""
    other = Table(path, schema.REJECTS)
    for number in range(count):
        record = BatchCommit("payments", "ledgerlake:payments:id", number, 7)
        assert not other.contains(record)
        other.commit(record, [], {})


def without_commits(path: Place) -> None:
    """Remove the commits from a table's log, as a writer does whose retention they have passed."""
    DeltaTable(path.uri).create_checkpoint()
    newest = DeltaTable(path.uri).version()
    for version in range(newest):
        (Path(path.uri) / "_delta_log" / f"{version:020}.json").unlink()


@pytest.mark.parametrize("is_in_rejects", [True, False])
def test_what_a_repeat_rejects_is_compared_however_often_another_stream_has_committed_since(
    tables: dict[str, Table], monkeypatch: pytest.MonkeyPatch, is_in_rejects: bool
) -> None:
    monkeypatch.setattr("ledgerlake.table.delta_table.HISTORY_COMMITS", 3)
    loss = [rejected(1, "data_loss", "after 3:0")]
    run(tables, loss if is_in_rejects else [], messages=1)
    run(tables, loss, messages=1)
    commits_of_another_stream(tables["rejects"].path, 4)
    version = DeltaTable(tables["rejects"].path.uri).version()
    run(tables, loss, messages=1)
    assert DeltaTable(tables["rejects"].path.uri).version() == version
    run(tables, [*loss, rejected(2, "data_loss", "after 3:1")], messages=1)
    assert [row[0] for row in stored_rows(tables)] == [1, 2]


def test_a_kill_between_the_commits_refuses_no_start_though_another_stream_goes_on(
    tables: dict[str, Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ledgerlake.table.delta_table.HISTORY_COMMITS", 3)
    killed_behind_rejects(tables, [rejected(1)])
    commits_of_another_stream(tables["rejects"].path, 4)
    run(tables, [rejected(1), rejected(5)], messages=2)
    assert [row[0] for row in stored_rows(tables)] == [1, 5]
    assert len(stored_rows(tables, "messages")) == 2


def test_a_loss_whose_commit_the_log_has_no_more_is_not_added_again(
    tables: dict[str, Table],
) -> None:
    loss = [rejected(1, "data_loss", "after 3:0")]
    run(tables, loss, messages=1)
    commits_of_another_stream(tables["rejects"].path, 1)
    without_commits(tables["rejects"].path)
    version = DeltaTable(tables["rejects"].path.uri).version()
    with pytest.raises(
        CheckpointError, match=r"cannot be compared .*its log does not have the commit any more"
    ):
        run(tables, loss, messages=1)
    assert DeltaTable(tables["rejects"].path.uri).version() == version


def test_an_addition_says_whose_it_is_and_the_batch_stays_the_last_one(
    tables: dict[str, Table],
) -> None:
    killed_behind_rejects(tables, [rejected(1)])
    run(tables, [rejected(1), rejected(5)], messages=1)
    table = DeltaTable(tables["rejects"].path.uri)
    known = json.loads(table.history(1)[0]["ledgerlake"])
    assert (known["query"], known["batch"], known["ranges"]) == (
        "ledgerlake:orders:id:more:1",
        4,
        {TOPIC: SPAN},
    )
    assert table.transaction_version("ledgerlake:orders:id:more:1") == 4
    assert Table(tables["rejects"].path, schema.REJECTS).contains(BATCH)


def test_the_files_of_a_repeat_that_are_not_needed_are_removed(
    tables: dict[str, Table], tmp_path: Path
) -> None:
    killed_behind_rejects(tables, [rejected(1)])
    run(tables, [rejected(1), rejected(5)], messages=1)
    files = list((tmp_path / "rejects").glob("part-*.parquet"))
    assert len(files) == len(DeltaTable(tables["rejects"].path.uri).file_uris()) == 2
    assert sum(pq.read_metadata(file).num_rows for file in files) == 2


@pytest.mark.parametrize("gone", ["files", "log"])
def test_a_commit_that_cannot_be_read_back_is_refused_and_the_way_on_is_said(
    tables: dict[str, Table], tmp_path: Path, gone: str
) -> None:
    if gone == "files":
        killed_behind_rejects(tables, [rejected(1)])
        for file in (tmp_path / "rejects").glob("part-*.parquet"):
            file.unlink()
    else:
        table = Table(tables["rejects"].path, schema.REJECTS)
        version = DeltaTable(table.path.uri).version()
        table._append(written(table, [rejected(1)]), {BATCH.query: 4}, None, "", version)
    version = DeltaTable(tables["rejects"].path.uri).version()
    with pytest.raises(
        CheckpointError,
        match=r"cannot be compared .*restore .* or choose a new \[delta\] rejects_path",
    ):
        run(tables, [rejected(1), rejected(5)], messages=1)
    assert DeltaTable(tables["rejects"].path.uri).version() == version
    assert stored_rows(tables, "messages") == []
