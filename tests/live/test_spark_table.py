"""Tables with features that plain appended files would violate: written by delta-spark, exactly
once, in order, and said so.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ledgerlake.client.cursor import DurableCursor
from ledgerlake.decode import schema
from ledgerlake.errors import CheckpointError, OwnershipError, TableError, UsageError
from ledgerlake.options.config import parse_config
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit, Recorded
from ledgerlake.table.delta_table import Table
from ledgerlake.table.ordered_files import BufferedWriter, DataFile, data_folder
from ledgerlake.table.repeated_rejects import add_missing
from ledgerlake.table.spark_table import SparkTable, open_table
from ledgerlake.verify.verify import verify
from tests.live.pipelines import rejects_rows, run_once

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]

CHANGES = {
    "columnMapping": "set tblproperties ('delta.columnMapping.mode' = 'name')",
    "changeDataFeed": "set tblproperties ('delta.enableChangeDataFeed' = 'true')",
    "checkConstraints": "add constraint positive check (ledger_id >= 0)",
    "clustering": "cluster by (topic)",
}


def publish(runtime: Runtime, topic: str, values: range) -> None:
    producer = runtime.client().create_producer(topic)
    for value in values:
        producer.send(b"%d" % value)
    producer.close()


def values(spark: SparkSession, path: str) -> list[int]:
    rows = (
        spark.read.format("delta")
        .load(path)
        .orderBy("partition", "ledger_id", "entry_id")
        .collect()
    )
    return [int(row.value) for row in rows]


def make_table(spark: SparkSession, path: str, feature: str) -> None:
    """A table with a feature."""
    if feature == "partition columns":
        Table(Place(f"{path}-plain"), schema.MESSAGES).create()
        spark.read.format("delta").load(f"{path}-plain").write.format("delta").partitionBy(
            "topic"
        ).save(path)
    elif feature == "generated columns":
        columns = ", ".join(
            f"`{column.name}` {column.dataType.simpleString()}" for column in spark_columns(spark)
        )
        day = "day date generated always as (cast(publish_time as date))"
        spark.sql(f"create table delta.`{path}` ({columns}, {day}) using delta")
    else:
        Table(Place(path), schema.MESSAGES).create()
        spark.sql(f"alter table delta.`{path}` {CHANGES[feature]}")


def spark_columns(spark: SparkSession) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema.MESSAGES).fields


@pytest.mark.long
@pytest.mark.parametrize("feature", [*CHANGES, "partition columns", "generated columns"])
def test_a_table_with_a_feature_is_written_all_the_same(
    runtime: Runtime,
    spark: SparkSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    feature: str,
) -> None:
    topic = runtime.topic()
    make_table(spark, str(tmp_path / "messages"), feature)
    publish(runtime, topic, range(30))
    data = runtime.config(tmp_path, topic, max_rows_per_trigger=10)
    with caplog.at_level(logging.WARNING):
        config = run_once(spark, data)
    assert "it is written by delta-spark, which is slower" in caplog.text
    publish(runtime, topic, range(30, 40))
    run_once(spark, data)
    assert values(spark, config.delta.path) == list(range(40))
    verdict = verify(config)
    assert verdict.clean, verdict.sentence()
    assert rejects_rows(tmp_path) == []
    if feature == "generated columns":
        assert spark.read.format("delta").load(config.delta.path).where("day is null").count() == 0
    assert not [*(tmp_path / "checkpoint" / "ledgerlake" / "staging" / "messages").iterdir()]


def test_a_batch_that_spark_repeats_is_in_the_table_once(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = runtime.topic()
    publish(runtime, topic, range(20))
    data = runtime.config(tmp_path, topic)
    data["delta"]["writer"] = "spark"
    with monkeypatch.context() as unrecorded:
        # A cursor passes what Spark has recorded, and what it has recorded is not repeated.
        unrecorded.setattr(DurableCursor, "advance", lambda _cursor, _position: None)
        config = run_once(spark, data)
    for folder in (tmp_path / "checkpoint" / "commits",):
        for path in folder.iterdir():
            path.unlink()
    run_once(spark, data)
    assert values(spark, config.delta.path) == list(range(20))


def test_a_batch_without_rows_is_recorded(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "table")
    table = SparkTable(Place(path), schema.MESSAGES, Place(str(tmp_path / "staging")))
    assert not table.check(spark)
    table.create()
    spark.sql(f"alter table delta.`{path}` {CHANGES['columnMapping']}")
    record = BatchCommit("s", "ledgerlake:s:q", 4, 7)
    assert not table.contains(record)
    table.commit(record, [], {})
    assert table.recorded("ledgerlake:s:q") == Recorded(4, 7)
    assert table.contains(record)
    assert table.last_batch_of("s") == 4
    assert spark.read.format("delta").load(path).count() == 0


def test_staged_files_are_read_from_a_folder_of_any_name(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = Place(str(tmp_path / "rejects"))
    Table(path, schema.REJECTS).create()
    table = SparkTable(
        path, schema.REJECTS, Place(str(tmp_path / r"a%41 [b]{c,d}*?\e" / "staging"))
    )
    table.check(spark)
    table.begin()
    table.commit(REJECTS_BATCH, staged(table, range(3)), {})
    assert spark.read.format("delta").load(path.uri).count() == 3


def test_a_micro_batch_is_found_however_often_another_stream_has_committed_since(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ledgerlake.table.delta_table.HISTORY_COMMITS", 3)
    monkeypatch.setattr("ledgerlake.table.spark_table._COMMITS_PER_PLACE", 2)
    path = Place(str(tmp_path / "rejects"))
    Table(path, schema.REJECTS).create()
    table = SparkTable(path, schema.REJECTS, Place(str(tmp_path / "staging")))
    table.check(spark)
    table.begin()
    outcomes = {"t": {"rows": "4:0000000000000001"}}
    for number in range(3):
        record = replace(REJECTS_BATCH, batch_id=number, outcomes=outcomes)
        assert not table.contains(record)
        table.commit(record, staged(table, range(2 * number, 2 * number + 2)), {})
    other = Table(path, schema.REJECTS)
    for number in range(4):
        unlike = BatchCommit("other", "ledgerlake:other:q", number, 1)
        assert not other.contains(unlike)
        other.commit(unlike, [], {})
    again = SparkTable(path, schema.REJECTS, Place(str(tmp_path / "staging")))
    again.check(spark)
    assert again.outcomes_of(record) == outcomes
    assert again.recorded(record.query) == Recorded(2, record.range_digest)
    assert again.last_writer("s") == record.checkpoint
    again.begin()
    with pytest.raises(OwnershipError, match="another checkpoint of the stream s has written"):
        again.contains(
            replace(record, query="ledgerlake:s:earlier", checkpoint=record.checkpoint - 1)
        )
    with pytest.raises(CheckpointError, match="is not the one in the table"):
        again.contains(replace(record, range_digest=8))
    add_missing(again, record, staged(again, range(4, 7)))
    rows = spark.read.format("delta").load(path.uri).orderBy("entry_id").collect()
    assert [row.entry_id for row in rows] == list(range(7))


@pytest.mark.parametrize(
    "property_",
    [
        "columnMapping.mode' = 'name",
        "enableInCommitTimestamps' = 'true",
        "enableRowTracking' = 'true",
    ],
)
def test_what_a_start_records_is_between_the_commits_of_delta_spark(
    spark: SparkSession, tmp_path: Path, property_: str
) -> None:
    path = str(tmp_path / "rejects")
    Table(Place(path), schema.REJECTS).create()
    spark.sql(f"alter table delta.`{path}` set tblproperties ('delta.{property_}')")
    table = SparkTable(Place(path), schema.REJECTS, Place(str(tmp_path / "staging")))
    table.check(spark)
    table.begin()
    for number in range(12):
        table.begin_stream("s", [f"t-partition-{number}"])
        record = BatchCommit("s", "ledgerlake:s:q", number, 7)
        assert not table.contains(record)
        table.commit(
            record, staged(table, range(number, number + 1)), {f"t-partition-{number}": number}
        )
    rows = spark.read.format("delta").load(path).orderBy("entry_id").collect()
    assert [row.entry_id for row in rows] == list(range(12))
    again = Table(Place(path), schema.REJECTS)
    assert again.effective_times_us(["t-partition-3", "t-partition-11"]) == {
        "t-partition-3": 3,
        "t-partition-11": 11,
    }
    again.check_writers("s", [f"t-partition-{number}" for number in range(12)])
    with pytest.raises(CheckpointError, match="the stream s writes the messages of t-partition-0"):
        again.check_writers("other", ["t-partition-0"])


def test_rows_without_a_topic_that_somebody_has_added_are_passed_over(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = str(tmp_path / "messages")
    make_table(spark, path, "columnMapping")
    for columns, row in (("key", "'mine'"), ("topic", "'t'")):
        spark.sql(f"insert into delta.`{path}` ({columns}) values ({row})")
    table = SparkTable(Place(path), schema.MESSAGES, Place(str(tmp_path / "staging")))
    table.check(spark)
    assert table.effective_times_us(["t"]) == {}


def test_a_violated_constraint_is_one_sentence(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    make_table(spark, str(tmp_path / "messages"), "checkConstraints")
    spark.sql(
        f"alter table delta.`{tmp_path / 'messages'}` add constraint few check (entry_id < 0)"
    )
    publish(runtime, topic, range(5))
    with pytest.raises(
        TableError, match=r"batch 0 has a row that the table at .* refuses: .*few.*entry_id"
    ) as raised:
        run_once(spark, runtime.config(tmp_path, topic))
    assert not raised.value.retryable


def test_the_writer_is_chosen_by_the_table(spark: SparkSession, tmp_path: Path) -> None:
    path, staging = str(tmp_path / "table"), str(tmp_path / "staging")
    assert type(open_table(Place(path), schema.MESSAGES, "auto", Place(staging))) is Table
    assert type(open_table(Place(path), schema.MESSAGES, "spark", Place(staging))) is SparkTable
    make_table(spark, path, "changeDataFeed")
    assert type(open_table(Place(path), schema.MESSAGES, "auto", Place(staging))) is SparkTable
    assert type(open_table(Place(path), schema.MESSAGES, "arrow", Place(staging))) is Table
    shutil.rmtree(path)
    spark.range(1).write.format("delta").save(path)
    assert type(open_table(Place(path), schema.MESSAGES, "auto", Place(staging))) is Table, (
        "which refuses it, and says why"
    )
    with pytest.raises(TableError, match="it lacks topic"):
        SparkTable(Place(path), schema.MESSAGES, Place(staging)).check(spark)


def test_an_unknown_writer_is_named(runtime: Runtime, tmp_path: Path) -> None:
    data = runtime.config(tmp_path, "t")
    data["delta"]["writer"] = "fast"
    with pytest.raises(UsageError, match="writer cannot be 'fast'; it is auto, arrow or spark"):
        parse_config(data)


REJECTS_BATCH = BatchCommit("s", "ledgerlake:s:q", 4, 7, checkpoint=1)


def staged(table: Table, entries: range) -> list[DataFile]:
    """Rejects as a task writes them."""
    writer = BufferedWriter(data_folder(table.folder, table.schema, "part-00000004-00000"))
    place = {"topic": "t", "partition": -1, "ledger_id": 3, "reason": "chunk_orphan"}
    rows = [
        place | {"entry_id": number, "message_id": f"3:{number}", "detail": ""}
        for number in entries
    ]
    writer.write(pa.Table.from_pylist(rows, schema=table.schema))
    return writer.finish()


@pytest.mark.long
@pytest.mark.parametrize(
    ("feature", "first"),
    [("columnMapping", "spark"), ("columnMapping", "arrow"), ("partition columns", "spark")],
)
def test_what_a_repeat_rejects_beyond_the_first_run_is_added_once(
    spark: SparkSession, tmp_path: Path, feature: str, first: str
) -> None:
    path, staging = str(tmp_path / "rejects"), str(tmp_path / "staging")
    plain = Table(Place(path), schema.REJECTS)
    if feature == "partition columns":
        empty = spark.createDataFrame(schema.REJECTS.empty_table())
        empty.write.format("delta").partitionBy("topic").save(path)
    else:
        plain.create()
    table = SparkTable(Place(path), schema.REJECTS, Place(staging))
    table.check(spark)
    table.begin()
    if first == "arrow":
        # The table gets its feature, and with it another writer, between the runs.
        plain.commit(REJECTS_BATCH, staged(plain, range(2)), {})
    if feature == "columnMapping":
        spark.sql(f"alter table delta.`{path}` {CHANGES[feature]}")
    if first == "spark":
        table.commit(REJECTS_BATCH, staged(table, range(2)), {})
    assert table.contains(REJECTS_BATCH)
    for entries in (range(3), range(3), range(5), range(1, 4)):
        add_missing(table, REJECTS_BATCH, staged(table, entries))
    rows = spark.read.format("delta").load(path).orderBy("entry_id").collect()
    assert [row.entry_id for row in rows] == list(range(5))
    assert table.contains(REJECTS_BATCH)
    assert table.recorded(REJECTS_BATCH.query) in (Recorded(4, 7), Recorded(4, None))
    assert not [*(tmp_path / "staging").iterdir()]


def test_an_addition_to_what_delta_spark_wrote_is_made_by_the_other_writer_too(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = str(tmp_path / "rejects")
    Table(Place(path), schema.REJECTS).create()
    by_spark = SparkTable(Place(path), schema.REJECTS, Place(str(tmp_path / "staging")))
    by_spark.check(spark)
    by_spark.begin()
    by_spark.commit(REJECTS_BATCH, staged(by_spark, range(2)), {})
    plain = Table(Place(path), schema.REJECTS)
    for _ in range(2):
        add_missing(plain, REJECTS_BATCH, staged(plain, range(3)))
    assert sorted(row["entry_id"] for row in rejects_rows(tmp_path)) == [0, 1, 2]


def test_what_delta_spark_cannot_read_back_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "rejects")
    Table(Place(path), schema.REJECTS).create()
    table = SparkTable(Place(path), schema.REJECTS, Place(str(tmp_path / "staging")))
    table.check(spark)
    table.begin()
    table.commit(REJECTS_BATCH, staged(table, range(2)), {})
    for file in (tmp_path / "rejects").glob("part-*.parquet"):
        file.unlink()
    with pytest.raises(
        CheckpointError, match=r"cannot be compared .*choose a new \[delta\] rejects_path"
    ):
        add_missing(table, REJECTS_BATCH, staged(table, range(3)))
