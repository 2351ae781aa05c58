"""What a table records of micro-batches, whom it refuses, and how its log stays small."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from pyarrow import fs

from ledgerlake.errors import CheckpointError, OffsetError, OwnershipError, TableError
from ledgerlake.stored.places import Place
from ledgerlake.stored.stores import StorageSettings
from ledgerlake.table import delta_table
from ledgerlake.table.batch_commit import BatchCommit, Recorded
from ledgerlake.table.delta_table import Table
from ledgerlake.table.features import HONOURED_FEATURES
from ledgerlake.table.ordered_files import DataFile
from ledgerlake.table.spark_table import SparkTable, open_table

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA = pa.schema([("number", pa.int64())])
COMMITS = 230


def test_expired_entries_of_the_log_are_removed_though_not_looked_for_at_each_commit(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "table")
    DeltaTable.create(
        path, SCHEMA, configuration={"delta.logRetentionDuration": "interval 0 seconds"}
    )
    table = Table(Place(path), SCHEMA)
    most = 0
    for number in range(COMMITS):
        put(
            table,
            BatchCommit("stream", "query", number, number),
            data_file(table, f"part-{number}.parquet"),
        )
        most = max(most, len(os.listdir(f"{path}/_delta_log")))

    assert most < 150
    reopened_table = DeltaTable(path)
    assert reopened_table.version() == COMMITS
    assert len(reopened_table.file_uris()) == COMMITS
    assert reopened_table.transaction_version("query") == COMMITS - 1


def test_a_topic_partition_is_written_by_one_stream_unless_another_takes_it_over(
    tmp_path: Path,
) -> None:
    table = new_table(tmp_path / "table")
    table.begin_stream("orders", ["t", "u"])
    put(table, batch(0), data_file(table, "a"))
    version = DeltaTable(table.path.uri).version()
    with pytest.raises(CheckpointError) as refused:
        table.begin_stream("payments", ["v", "u"])
    assert refused.value.message == (
        f"the stream orders writes the messages of u to the table at {table.path}, and the stream "
        "payments would write them a second time; set [stream] name and checkpoint back, or give "
        "the stream tables of its own; if it is to take the topic over, set [delta] "
        "fail_on_second_stream to false: what it reads may come twice, and what waits in the other "
        "stream, delayed, repeating or incomplete, is not delivered"
    )
    assert DeltaTable(table.path.uri).version() == version
    table.begin_stream("orders", ["t", "u"])
    assert DeltaTable(table.path.uri).version() == version
    table.begin_stream("payments", ["v"])
    table.begin_stream("payments", ["v", "u"], takes_over=True)
    table.check_writers("payments", ["v", "u"])
    with pytest.raises(CheckpointError, match="another stream writes the messages of u to"):
        table.check_writers("orders", ["t", "u"])


def test_a_stream_that_runs_writes_no_topic_partition_that_another_one_has_taken_over(
    tmp_path: Path,
) -> None:
    table = new_table(tmp_path / "table")
    table.begin_stream("orders", ["t", "u"])
    put(table, batch(0), data_file(table, "a"))
    Table(table.path, SCHEMA).begin_stream("payments", ["t"], takes_over=True)
    with pytest.raises(OwnershipError) as refused:
        table.contains(batch(1))
    assert refused.value.message == (
        f"another stream has taken over the messages of t in the table at {table.path}, so the "
        "stream orders writes them no more; end this stream, give it tables of its own, or, to "
        "take the topic back, start it with [delta] fail_on_second_stream = false"
    )
    of_other_topic = replace(
        batch(1), ranges={"u": batch(1).ranges["t"], "t": {"start": None, "end": None}}
    )
    put(table, of_other_topic, data_file(table, "b"))
    table.begin_stream("orders", ["t"], takes_over=True)
    put(table, batch(2), data_file(table, "c"))


def of_delta_spark(table: Table, **configuration: str) -> SparkTable:
    """The same table with delta-spark as its writer."""
    if configuration:
        rewritten(
            Path(table.path.uri),
            lambda actions: actions["metaData"]["configuration"].update(configuration),
        )
    return SparkTable(table.path, SCHEMA, table.path / "staging")


@pytest.mark.parametrize("own_times", [{}, {"delta.enableInCommitTimestamps": "true"}])
def test_who_writes_a_topic_partition_is_the_same_to_both_kinds_of_writer(
    tmp_path: Path, own_times: dict[str, str]
) -> None:
    plain = new_table(tmp_path / "table")
    by_spark = of_delta_spark(plain, **own_times)
    by_spark.begin_stream("orders", ["t", "u"])
    assert (plain.last_batch_of("orders"), by_spark.last_batch_of("orders")) == (-1, -1)
    for kind in (plain, by_spark, of_delta_spark(plain)):
        with pytest.raises(CheckpointError, match="another stream writes the messages of u to"):
            kind.begin_stream("payments", ["v", "u"])
    version = DeltaTable(plain.path.uri).version()
    by_spark.begin_stream("orders", ["t", "u"])
    assert DeltaTable(plain.path.uri).version() == version
    plain.begin_stream("payments", ["u"], takes_over=True)
    with pytest.raises(OwnershipError, match="has taken over the messages of u"):
        by_spark.contains(replace(batch(0), ranges={"u": batch(0).ranges["t"]}))
    by_spark.begin_stream("orders", ["u"], takes_over=True)
    with pytest.raises(OwnershipError, match="has taken over the messages of u"):
        plain.contains(replace(batch(0), stream="payments", ranges={"u": batch(0).ranges["t"]}))


def test_a_commit_with_times_of_its_own_is_later_than_the_one_before(tmp_path: Path) -> None:
    plain = new_table(tmp_path / "table")
    by_spark = of_delta_spark(plain, **{"delta.enableInCommitTimestamps": "true"})
    far_ms = 4_000_000_000_000
    rewritten(
        tmp_path / "table", lambda actions: actions.update(commitInfo={"inCommitTimestamp": far_ms})
    )
    by_spark.begin_stream("orders", ["t"])
    by_spark.begin_stream("orders", ["u"])
    log = sorted((tmp_path / "table/_delta_log").glob("*.json"))[-2:]
    first = [json.loads(file.read_text().splitlines()[0]) for file in log]
    assert [action["commitInfo"]["inCommitTimestamp"] for action in first] == [
        far_ms + 1,
        far_ms + 2,
    ]


def test_of_two_streams_that_begin_at_once_by_delta_spark_one_gets_a_topic_partition(
    tmp_path: Path,
) -> None:
    table = new_table(tmp_path / "table")
    second = of_delta_spark(table)
    append = SparkTable._append

    def late(self: SparkTable, *args: Any) -> None:
        of_delta_spark(table).begin_stream("orders", ["t"])
        append(self, *args)

    second._append = late.__get__(second)  # type: ignore[method-assign]
    with pytest.raises(TableError, match="the stream payments could not be recorded"):
        second.begin_stream("payments", ["t"])
    Table(table.path, SCHEMA).check_writers("orders", ["t"])


def test_a_table_whose_commits_a_catalog_orders_is_refused(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    rewritten(tmp_path / "table", feature("coordinatedCommits-preview"))
    with pytest.raises(
        TableError, match="has coordinatedCommits-preview, so that only its catalog may commit"
    ):
        of_delta_spark(table).examine()


def test_what_delta_spark_has_committed_is_known_to_the_other_writer(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    table.begin_stream("orders", ["t"])
    assert not table.contains(batch(0))
    table.commit(batch(0), [data_file(table, "a")], {"t": 5, "u": 7}, {"box": 1})
    for number, time_us in ((1, 90), (2, 80)):
        more = {"effective_times_us": {"t": time_us}, "outbox": {"box": number}}
        metadata = {"userMetadata": json.dumps(json.loads(batch(number).to_json()) | more)}
        numbers = [Transaction(batch(number).query, number)]
        DeltaTable(table.path.uri).create_write_transaction(
            [],
            "append",
            deltalake.Schema.from_arrow(SCHEMA),
            commit_properties=CommitProperties(custom_metadata=metadata, app_transactions=numbers),
        )
    again = Table(table.path, SCHEMA)
    assert again.effective_times_us(["t", "u", "v"]) == {"t": 90, "u": 7}
    assert again.last_batch_of("orders") == 2
    assert again.outbox_messages("box") == 2


@pytest.mark.parametrize("writer", ["auto", "arrow", "spark"])
def test_a_partitioned_table_needs_its_partition_by_from_the_start_on(
    tmp_path: Path, writer: str
) -> None:
    path, staging = Place(str(tmp_path / "table")), Place(str(tmp_path / "staging"))
    rows = SCHEMA.append(pa.field("twice", pa.int64()))
    path.make()
    Table(path, rows, {"twice": "number * 2"}).create()
    with pytest.raises(TableError) as refused:
        open_table(path, SCHEMA, writer, staging).examine()
    assert refused.value.message == (
        f"the table at {path} is partitioned by twice, computed by number * 2, and partition_by is "
        "not set; set it back, or use another path"
    )


@pytest.mark.parametrize(("partition_by", "nullable"), [(["day"], True), ([], False)])
def test_a_column_that_nobody_fills_is_refused_by_the_start(
    tmp_path: Path, partition_by: list[str], nullable: bool
) -> None:
    path = tmp_path / "table"
    DeltaTable.create(
        str(path),
        SCHEMA.append(pa.field("day", pa.string(), nullable=nullable)),
        partition_by=partition_by or None,
    )
    table = open_table(Place(str(path)), SCHEMA, "auto", Place(str(tmp_path / "staging")))
    with pytest.raises(
        TableError, match="column day, which no message has and Spark cannot compute"
    ):
        table.examine()

    def computed(actions: dict[str, Any]) -> None:
        schema = json.loads(actions["metaData"]["schemaString"])
        schema["fields"][-1]["metadata"] = {"delta.generationExpression": "'today'"}
        actions["metaData"]["schemaString"] = json.dumps(schema)

    rewritten(path, computed)
    assert open_table(Place(str(path)), SCHEMA, "auto", Place(str(tmp_path / "staging"))).examine()


def test_a_topic_partition_that_comes_into_another_table_is_the_other_streams_here(
    tmp_path: Path,
) -> None:
    table = new_table(tmp_path / "table")
    table.begin_stream("orders", ["u"])
    Table(table.path, SCHEMA).begin_stream("payments", ["t"])
    put(table, batch(0), data_file(table, "a"))


def test_of_two_streams_that_begin_at_once_one_gets_a_topic_partition(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    append = Table._append

    def late(self: Table, *args: Any) -> None:
        Table(self.path, SCHEMA).begin_stream("orders", ["t"])
        append(self, *args)

    second = Table(table.path, SCHEMA)
    second._append = late.__get__(second)  # type: ignore[method-assign]
    with pytest.raises(TableError, match="the stream payments could not be recorded"):
        second.begin_stream("payments", ["t"])
    Table(table.path, SCHEMA).check_writers("orders", ["t"])


@pytest.mark.parametrize("checkpoint_after", [None, 5, 30])
def test_the_writers_of_many_topic_partitions_are_read_from_the_log_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_after: int | None
) -> None:
    table = new_table(tmp_path / "table")
    names = [f"t-partition-{number}" for number in range(100)]
    table.begin_stream("payments", names[:50])
    table.begin_stream("orders", names[50:])
    for number in range(10):
        put(table, batch(number), data_file(table, f"a{number}"))
        if number == checkpoint_after:
            DeltaTable(table.path.uri).create_checkpoint()
    read, lookups = DeltaTable.transaction_version, []

    def counted(opened: DeltaTable, name: str) -> int | None:
        lookups.append(name)
        return read(opened, name)

    monkeypatch.setattr(DeltaTable, "transaction_version", counted)
    again = Table(table.path, SCHEMA)
    again.check_writers("orders", names[50:])
    again.check_writers("orders", ["new"] * 20 + names[50:])
    assert lookups == []
    with pytest.raises(CheckpointError, match="the messages of t-partition-49 to"):
        again.check_writers("orders", names[49:])


def test_numbers_are_read_from_the_log_again_only_after_a_commit_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table(tmp_path / "table")
    table.begin_stream("orders")
    put(table, batch(0), data_file(table, "a"))
    names: list[str] = []
    read = DeltaTable.transaction_version

    def noted(opened: DeltaTable, name: str) -> int | None:
        names.append(name)
        return read(opened, name)

    monkeypatch.setattr(DeltaTable, "transaction_version", noted)
    for number in range(1, 4):
        put(table, batch(number), data_file(table, f"b{number}"))
    assert names == []
    Table(table.path, SCHEMA).begin_stream("payments")
    names.clear()
    assert table.last_batch_of("payments") == -1
    assert names == ["ledgerlake.stream:payments"]
    assert table.recorded("ledgerlake:orders:id") == Recorded(3, 7)
    put(table, batch(4), data_file(table, "c"))
    assert table.recorded("ledgerlake:orders:id") == Recorded(4, 7)


def test_a_refreshed_table_is_read_again_only_after_a_commit_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, other = new_table(tmp_path / "table"), Table(Place(str(tmp_path / "table")), SCHEMA)
    put(table, batch(0), data_file(table, "a"))
    updates: list[int] = []
    update = DeltaTable.update_incremental

    def noted(opened: DeltaTable) -> None:
        updates.append(opened.version())
        update(opened)

    monkeypatch.setattr(DeltaTable, "update_incremental", noted)
    table.refresh()
    assert not table.contains(batch(1))
    assert updates == [0]
    put(other, batch(1), data_file(table, "b"))
    assert table.contains(batch(1))
    assert updates[-1] == 1


@pytest.mark.parametrize("missing", [[0], [0, 1]])
def test_a_refreshed_table_whose_commits_are_removed_is_read_again(
    tmp_path: Path, missing: list[int]
) -> None:
    table, other = new_table(tmp_path / "table"), Table(Place(str(tmp_path / "table")), SCHEMA)
    table.refresh()
    put(other, batch(1), data_file(table, "b"))
    put(other, batch(2), data_file(table, "c"))
    DeltaTable(str(tmp_path / "table")).create_checkpoint()
    for version in missing:
        (tmp_path / "table" / "_delta_log" / f"{version:020}.json").unlink()
    assert table.contains(batch(2))


def test_a_store_that_refuses_to_answer_for_a_missing_file_does_not_end_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table(tmp_path / "table")
    table.refresh()

    def refuse(_place: Place) -> fs.FileSystem:
        raise PermissionError("ACCESS_DENIED")

    monkeypatch.setattr(Place, "filesystem", refuse)
    assert not table.contains(batch(1))


def test_a_refresh_that_fails_leaves_the_failure_to_the_next_question(tmp_path: Path) -> None:
    table = Table(Place(str(tmp_path / "table")), SCHEMA)
    table.refresh()
    with pytest.raises(TableError, match=f"the table at {tmp_path}/table cannot be opened"):
        table.contains(batch(0))


def test_a_store_that_lost_our_commit_and_took_anothers_is_noticed(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    table.begin()
    put(table, batch(0), data_file(table, "a"))
    put(table, batch(1), data_file(table, "b"))
    assert table.last_writer("orders") == 1
    put(table, batch(2), data_file(table, "c"))
    newest = DeltaTable(str(tmp_path / "table")).version()
    commit = tmp_path / "table" / "_delta_log" / f"{newest:020}.json"
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    for action in actions:
        if (
            action.get("txn", {})
            .get("appId", "")
            .startswith(("ledgerlake.checkpoint:", "ledgerlake.attempt:"))
        ):
            action["txn"]["version"] = 5
        if "commitInfo" in action:
            action["commitInfo"]["ledgerlake"] = replace(
                batch(2), query="ledgerlake:orders:other"
            ).to_json()
    commit.write_text("\n".join(map(json.dumps, actions)))
    with pytest.raises(OwnershipError, match="another checkpoint of the stream orders"):
        table.contains(batch(3))


def new_table(path: Path, **configuration: str) -> Table:
    DeltaTable.create(str(path), SCHEMA, configuration=configuration)
    return Table(Place(str(path)), SCHEMA)


def data_file(table: Table, name: str) -> DataFile:
    path = Path((table.folder / name).root)
    pq.write_table(pa.table({"number": [1]}), path)
    return DataFile(name, path.stat().st_size, 1, json.dumps({"numRecords": 1}))


def put(table: Table, record: BatchCommit, file: DataFile) -> None:
    assert not table.contains(record)
    table.commit(record, [file], {})


def batch(number: int, digest: int = 7) -> BatchCommit:
    ranges = {"t": {"start": None, "end": {"ledger": 3, "entry": 9}}}
    return BatchCommit("orders", "ledgerlake:orders:id", number, digest, ranges, checkpoint=1)


def test_a_batch_that_the_table_holds_is_known_by_its_number_and_its_offsets(
    tmp_path: Path,
) -> None:
    table = new_table(tmp_path / "table")
    assert table.recorded("ledgerlake:orders:id") is None
    assert table.last_batch_of("orders") is None
    table.begin_stream("orders")
    assert table.last_batch_of("orders") == -1
    assert not table.contains(batch(4))
    table.commit(batch(4), [data_file(table, "a")], {"t": 12}, {"box": 3})
    assert table.contains(batch(4))
    assert not table.contains(batch(5))
    assert table.recorded("ledgerlake:orders:id") == Recorded(4, 7)
    assert table.last_batch_of("orders") == 4
    assert table.outbox_messages("box") == 3
    assert table.effective_times_us(["t", "u"]) == {"t": 12}


@pytest.mark.parametrize("other", [batch(4, digest=8), batch(3)])
def test_another_batch_of_the_same_number_or_an_earlier_one_is_refused(
    tmp_path: Path, other: BatchCommit
) -> None:
    table = new_table(tmp_path / "table")
    put(table, batch(4), data_file(table, "a"))
    with pytest.raises(
        CheckpointError, match=r"which has batch 4: another process .* or restore the newest"
    ):
        table.contains(other)


def test_a_digest_counts_for_the_batch_that_it_was_written_for(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    put(table, batch(4), data_file(table, "a"))
    record_by_spark(tmp_path / "table", 6)
    assert table.recorded("ledgerlake:orders:id") == Recorded(6, None)
    assert table.contains(batch(6, digest=9))
    put(table, batch(7), data_file(table, "b"))
    with pytest.raises(CheckpointError):
        table.contains(batch(7, digest=9))


def test_a_digest_without_its_number_does_not_count(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    record_by_spark(tmp_path / "table", 4)
    record_by_spark(tmp_path / "table", 7, "ledgerlake:orders:id:range")
    assert table.recorded("ledgerlake:orders:id") == Recorded(4, None)


def test_who_has_committed_last_for_a_stream_is_known(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    first, second = batch(4), replace(batch(1), query="ledgerlake:orders:other", checkpoint=2)
    assert table.last_writer("orders") is None
    put(table, first, data_file(table, "a"))
    assert table.contains(first)
    table.commit(first.more(1), [data_file(table, "b")], {})
    assert table.last_writer("orders") == 1
    put(table, second, data_file(table, "c"))
    assert table.contains(second)
    assert table.last_writer("orders") == 2
    assert table.last_writer("invoices") is None


def test_a_micro_batch_that_a_newer_release_recorded_is_refused(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    put(table, batch(0), data_file(table, "a"))
    log = tmp_path / "table" / "_delta_log" / f"{DeltaTable(table.path.uri).version():020}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    (info,) = (action["commitInfo"] for action in actions if "commitInfo" in action)
    info["ledgerlake"] = json.dumps(json.loads(info["ledgerlake"]) | {"version": 2})
    log.write_text("\n".join(map(json.dumps, actions)))
    with pytest.raises(OffsetError, match="the table was written by a newer Ledgerlake"):
        Table(table.path, SCHEMA).last_batch_of("orders")


def test_a_process_beside_which_a_later_checkpoint_has_committed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table"
    table, beside = new_table(path), Table(Place(str(path)), SCHEMA)
    table.begin()
    put(table, batch(4), data_file(table, "a"))
    later = replace(batch(1), query="ledgerlake:orders:other", checkpoint=2)
    put(beside, later, data_file(beside, "b"))
    with pytest.raises(
        OwnershipError, match="another checkpoint of the stream orders has written to the table"
    ):
        table.contains(batch(5))
    assert beside.contains(later)


def test_a_commit_of_delta_spark_counts_though_it_leaves_an_older_number(tmp_path: Path) -> None:
    path = tmp_path / "table"
    table, later = new_table(path), replace(batch(1), query="ledgerlake:orders:other", checkpoint=2)
    put(table, batch(4), data_file(table, "a"))
    DeltaTable(str(path)).create_write_transaction(
        [],
        "append",
        deltalake.Schema.from_arrow(SCHEMA),
        commit_properties=CommitProperties(custom_metadata={"userMetadata": later.to_json()}),
    )
    assert table.last_writer("orders") == 2
    # A process of the later query, which appends files again, is not taken for another one.
    assert not table.contains(replace(later, batch_id=2))


def record_by_spark(path: Path, number: int, name: str = "ledgerlake:orders:id") -> None:
    """A commit with one number, as delta-spark makes it for txnAppId and txnVersion."""
    numbers = CommitProperties(app_transactions=[Transaction(name, number)])
    DeltaTable(str(path)).create_write_transaction(
        [], "append", deltalake.Schema.from_arrow(SCHEMA), commit_properties=numbers
    )


def test_of_two_processes_with_the_same_batch_one_commits(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    suspended = Table(Place(str(tmp_path / "table")), SCHEMA)
    assert not suspended.contains(batch(4))
    put(table, batch(4), data_file(table, "a"))
    with pytest.raises(TableError, match="batch 4 could not be committed"):
        suspended.commit(batch(4), [data_file(suspended, "b")], {})
    put(table, batch(5), data_file(table, "c"))
    assert len(DeltaTable(str(tmp_path / "table")).file_uris()) == 2


@pytest.fixture
def lost_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that stores a commit and answers with a failure: delta-rs tries again, and meets its
    own.
    """
    commit = DeltaTable.create_write_transaction

    def commit_twice(table: DeltaTable, *arguments: Any, **options: Any) -> None:
        commit(DeltaTable(table.table_uri, version=table.version()), *arguments, **options)
        commit(table, *arguments, **options)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", commit_twice)


def test_a_commit_that_landed_although_the_store_answered_with_a_failure_is_done(
    tmp_path: Path, lost_answers: None
) -> None:
    table = new_table(tmp_path / "table")
    table.begin_stream("orders")
    for number in (4, 5):
        put(table, batch(number), data_file(table, f"{number}"))
        assert table.contains(batch(number))
    assert len(DeltaTable(str(tmp_path / "table")).file_uris()) == 2


def test_a_commit_of_which_nothing_is_known_is_not_done(
    tmp_path: Path, lost_answers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table(tmp_path / "table")
    assert not table.contains(batch(4))

    def unreachable(_table: DeltaTable) -> None:
        raise OSError("the store is not reachable")

    with monkeypatch.context() as outage:
        outage.setattr(DeltaTable, "update_incremental", unreachable)
        with pytest.raises(TableError, match="batch 4 could not be committed"):
            table.commit(batch(4), [data_file(table, "a")], {})
    assert table.contains(batch(4))


def test_a_commit_of_another_stream_does_not_stand_in_the_way(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    other = Table(Place(str(tmp_path / "table")), SCHEMA)
    assert not other.contains(BatchCommit("payments", "ledgerlake:payments:id", 4, 1))
    put(table, batch(4), data_file(table, "a"))
    other.commit(
        BatchCommit("payments", "ledgerlake:payments:id", 4, 1), [data_file(other, "b")], {}
    )
    assert len(DeltaTable(str(tmp_path / "table")).file_uris()) == 2


def test_the_history_shows_each_batch_with_its_ranges(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    put(table, batch(4), data_file(table, "a"))
    known = json.loads(DeltaTable(str(tmp_path / "table")).history(1)[0]["ledgerlake"])
    assert known["ranges"] == batch(4).ranges
    assert (known["version"], known["stream"], known["batch"]) == (1, "orders", 4)


def test_a_table_that_forgets_its_batches_is_refused(tmp_path: Path) -> None:
    table = new_table(
        tmp_path / "table", **{"delta.setTransactionRetentionDuration": "interval 1 hours"}
    )
    with pytest.raises(
        TableError,
        match=r"setTransactionRetentionDuration.* forgets its batches; remove it.* UNSET "
        r"TBLPROPERTIES",
    ):
        table.check(None)


@pytest.mark.parametrize(
    ("start", "end", "reads"),
    [
        ({"ledger": 3, "entry": 1}, {"ledger": 3, "entry": 2}, True),
        ({"ledger": 3, "entry": 1}, {"ledger": 4, "entry": 1}, True),
        ({"ledger": 3, "entry": 1, "batch": 0}, {"ledger": 3, "entry": 1}, True),
        (None, {"ledger": 3, "entry": 1}, True),
        (
            {"ledger": 3, "entry": 1},
            {"ledger": 3, "entry": 1, "clock": "2026-05-01T08:00:00Z"},
            False,
        ),
    ],
)
def test_a_clock_alone_reads_nothing(start: object, end: object, reads: bool) -> None:
    assert BatchCommit("s", "q", 1, 1, {"t": {"start": start, "end": end}}).reads == reads


def test_a_file_that_a_vacuum_removed_while_the_process_was_suspended_is_not_committed(
    tmp_path: Path,
) -> None:
    table = new_table(tmp_path / "table")
    files = [data_file(table, "a"), data_file(table, "b")]
    assert not table.contains(batch(4))
    (tmp_path / "table" / "b").unlink()
    with pytest.raises(
        TableError, match=r"batch 4 was not committed .*: b, which its tasks wrote, is gone"
    ):
        table.commit(batch(4), files, {})
    assert DeltaTable(str(tmp_path / "table")).version() == 0


def narrow(table: DeltaTable) -> None:
    table.alter.add_constraint({"positive": "number > 0"})


def retype(table: DeltaTable) -> None:
    empty = pa.table({"number": pa.array([], pa.string())})
    deltalake.write_deltalake(table, empty, mode="overwrite", schema_mode="overwrite")


@pytest.mark.parametrize(
    ("change", "why"), [(narrow, "which this writer cannot honour"), (retype, "another schema")]
)
def test_a_table_that_somebody_changed_so_that_the_files_do_not_fit_is_not_written(
    tmp_path: Path, change: Callable[[DeltaTable], None], why: str
) -> None:
    table = new_table(tmp_path / "table")
    put(table, batch(4), data_file(table, "a"))
    change(DeltaTable(str(tmp_path / "table")))
    with pytest.raises(TableError, match=why):
        put(table, batch(5), data_file(table, "b"))
    assert table.recorded(batch(5).query) == Recorded(4, 7)


@pytest.mark.parametrize("change", [narrow, retype])
def test_nor_if_it_was_changed_after_the_last_look(
    tmp_path: Path, change: Callable[[DeltaTable], None]
) -> None:
    table = new_table(tmp_path / "table")
    put(table, batch(4), data_file(table, "a"))
    assert not table.contains(batch(5))
    change(DeltaTable(str(tmp_path / "table")))
    with pytest.raises(TableError, match="batch 5 could not be committed"):
        table.commit(batch(5), [data_file(table, "b")], {})
    assert table.recorded(batch(5).query) == Recorded(4, 7)


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Another writer's commit: the table's protocol and metadata, changed."""
    log = path / "_delta_log"
    known = DeltaTable(str(path))
    actions: dict[str, Any] = {}
    for file in sorted(log.glob("*.json")):
        for action in map(json.loads, file.read_text().splitlines()):
            actions |= {name: action[name] for name in ("protocol", "metaData") if name in action}
    change(actions)
    lines = [json.dumps({name: action}) for name, action in actions.items()]
    (log / f"{known.version() + 1:020d}.json").write_text("\n".join(lines) + "\n")


def feature(*names: str) -> Callable[[dict[str, Any]], None]:
    """Add features to a table, as ALTER TABLE does."""

    def add(actions: dict[str, Any]) -> None:
        actions["protocol"] = {
            "minReaderVersion": 1,
            "minWriterVersion": 7,
            "writerFeatures": ["appendOnly", *names],
        }

    return add


def legacy_writer(actions: dict[str, Any]) -> None:
    actions["protocol"] = {"minReaderVersion": 2, "minWriterVersion": 6}


def invariant(actions: dict[str, Any]) -> None:
    fields = json.loads(actions["metaData"]["schemaString"])
    fields["fields"][0]["metadata"] = {
        "delta.invariants": json.dumps({"expression": {"expression": "number > 0"}})
    }
    actions["metaData"]["schemaString"] = json.dumps(fields)


def not_null(actions: dict[str, Any]) -> None:
    """Change the schema as ALTER TABLE ... ALTER COLUMN number SET NOT NULL does."""
    schema = json.loads(actions["metaData"]["schemaString"])
    schema["fields"][0]["nullable"] = False
    actions["metaData"]["schemaString"] = json.dumps(schema)


CANNOT_HONOUR = [
    feature("domainMetadata"),
    feature("clustering", "domainMetadata"),
    feature("inCommitTimestamp"),
    feature("allowColumnDefaults"),
    feature("checkpointProtection"),
    feature("aFeatureOfALaterRelease"),
    legacy_writer,
    invariant,
    not_null,
]


@pytest.mark.parametrize("change", CANNOT_HONOUR)
def test_a_table_with_a_feature_that_appended_files_cannot_honour_is_for_delta_spark(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    path, staging = tmp_path / "table", Place(str(tmp_path / "staging"))
    running = new_table(path)
    put(running, batch(4), data_file(running, "a"))
    rewritten(path, change)
    is_clustered = "clustering" in (DeltaTable(str(path)).protocol().writer_features or [])
    advice = "set cluster_by again" if is_clustered else r"start again with \[delta\] writer = auto"
    assert isinstance(open_table(Place(str(path)), SCHEMA, "auto", staging), SparkTable)
    for table in (open_table(Place(str(path)), SCHEMA, "arrow", staging), running):
        with pytest.raises(TableError, match=advice):
            table.check(None)
    with pytest.raises(TableError, match=advice):
        put(running, batch(5), data_file(running, "b"))
    assert DeltaTable(str(path)).version() == 2


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        (pa.field("properties", pa.map_(pa.string(), pa.string()), nullable=False), "properties"),
        (
            pa.field(
                "properties", pa.map_(pa.string(), pa.field("value", pa.string(), nullable=False))
            ),
            "properties.value",
        ),
    ],
)
def test_a_column_that_must_not_be_null_is_named_as_the_reason(
    tmp_path: Path, properties: pa.Field, name: str
) -> None:
    schema = pa.schema([pa.field("properties", pa.map_(pa.string(), pa.string()))])
    DeltaTable.create(str(tmp_path / "table"), pa.schema([properties]))
    with pytest.raises(
        TableError, match=f"has NOT NULL on {name}, which this writer cannot honour"
    ):
        Table(Place(str(tmp_path / "table")), schema).check(None)
    # A column of ours that is never null may be so in the table too.
    assert Table(Place(str(tmp_path / "table")), pa.schema([properties])).check(None)


@pytest.mark.parametrize("name", sorted(HONOURED_FEATURES))
def test_and_one_with_a_feature_that_they_honour_is_not(tmp_path: Path, name: str) -> None:
    path = tmp_path / "table"
    DeltaTable.create(str(path), SCHEMA)
    reader = [] if name in ("appendOnly", "invariants") else [name]

    def change(actions: dict[str, Any]) -> None:
        versions = {"minReaderVersion": 3, "minWriterVersion": 7}
        actions["protocol"] = versions | {"writerFeatures": [name], "readerFeatures": reader}

    rewritten(path, change)
    table = open_table(Place(str(path)), SCHEMA, "auto", Place(str(tmp_path / "staging")))
    assert type(table) is Table
    assert table.check(None)
    put(table, batch(4), data_file(table, "a"))
    assert DeltaTable(str(path)).file_uris() == [str(path / "a")]


def test_keys_that_are_renewed_in_their_files_are_those_of_the_next_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DeltaTable.create(str(tmp_path / "table"), SCHEMA)
    opened: list[dict[str, str]] = []

    def open_delta(place: Place, _version: int | None = None) -> DeltaTable:
        opened.append(place.delta_options() or {})
        return DeltaTable(str(tmp_path / "table"))

    monkeypatch.setattr(delta_table, "open_delta", open_delta)
    for name in ("key", "token"):
        (tmp_path / name).write_text("first")
    key, token = f"file:{tmp_path}/key", f"file:{tmp_path}/token"
    table = Table(Place("s3://lake/table", StorageSettings("", "", "id", key, token)), SCHEMA)
    for number in (4, 5):
        assert not table.contains(batch(number))
    assert len(opened) == 1, "an update is cheaper than a load"
    for name in ("token", "key"):
        table.refresh()
        (tmp_path / name).write_text("second")
        assert not table.contains(batch(6))
    assert [options["aws_session_token"] for options in opened] == ["first", "second", "second"]
    assert [options["aws_secret_access_key"] for options in opened] == ["first", "first", "second"]


def test_a_log_that_is_gone_is_said_in_one_sentence(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    put(table, batch(4), data_file(table, "a"))
    shutil.rmtree(tmp_path / "table")
    with pytest.raises(
        TableError, match=f"the log of the table at {tmp_path}/table cannot be read"
    ):
        table.last_writer("orders")


def test_a_table_whose_path_is_a_file_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no table")
    with pytest.raises(TableError, match=r"cannot be opened: it is a file, and not a folder"):
        Table(Place(str(tmp_path / "file")), pa.schema([("a", pa.int64())])).check(None)


@pytest.mark.parametrize(
    ("start", "end", "has_messages"),
    [
        (None, {"ledger": 3, "entry": -1}, False),
        ({"ledger": -1, "entry": -1}, {"ledger": 3, "entry": -1}, False),
        ({"ledger": 3, "entry": 1}, {"ledger": 3, "entry": 1}, False),
        (None, {"ledger": 3, "entry": 0}, True),
        (None, {"ledger": 3, "entry": -1, "batch": 2}, True),
        ({"ledger": 2, "entry": -1}, {"ledger": 3, "entry": -1}, True),
    ],
)
def test_a_range_that_only_notes_where_a_topic_begins_has_no_messages(
    start: object, end: object, has_messages: bool
) -> None:
    batch = BatchCommit("s", "q", 1, 1, {"t": {"start": start, "end": end}})
    assert batch.with_messages == (["t"] if has_messages else [])
