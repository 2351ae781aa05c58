"""Tables with features that plain appended files would violate: written by delta-spark, exactly once, in order, and said so."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.client.cursor import DurableCursor
from ledgerlake.decode import schema
from ledgerlake.errors import TableError, UsageError
from ledgerlake.inspect.verify import verify
from ledgerlake.options.config import parse_config
from ledgerlake.table.batch_record import BatchRecord, Recorded
from ledgerlake.table.delta_table import Table
from ledgerlake.table.spark_table import SparkTable, open_table
from tests.live.test_columns import run_once
from tests.live.test_large import rejects_rows

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]

CHANGES = {
    "columnMapping": "set tblproperties ('delta.columnMapping.mode' = 'name')",
    "changeDataFeed": "set tblproperties ('delta.enableChangeDataFeed' = 'true')",
    "checkConstraints": "add constraint positive check (ledger_id >= 0)",
}


def publish(runtime: Runtime, topic: str, values: range) -> None:
    producer = runtime.client().create_producer(topic)
    for value in values:
        producer.send(b"%d" % value)
    producer.close()


def values(spark: SparkSession, path: str) -> list[int]:
    rows = spark.read.format("delta").load(path).orderBy("partition", "ledger_id", "entry_id").collect()
    return [int(row.value) for row in rows]


def made(spark: SparkSession, path: str, feature: str) -> None:
    """A table with a feature."""
    if feature == "partition columns":
        Table(f"{path}-plain", schema.MESSAGES).create(spark)
        spark.read.format("delta").load(f"{path}-plain").write.format("delta").partitionBy("topic").save(path)
    elif feature == "generated columns":
        columns = ", ".join(f"`{one.name}` {one.dataType.simpleString()}" for one in spark_columns(spark))
        day = "day date generated always as (cast(publish_time as date))"
        spark.sql(f"create table delta.`{path}` ({columns}, {day}) using delta")
    else:
        Table(path, schema.MESSAGES).create(spark)
        spark.sql(f"alter table delta.`{path}` {CHANGES[feature]}")


def spark_columns(spark: SparkSession) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema.MESSAGES).fields


@pytest.mark.parametrize("feature", [*CHANGES, "partition columns", "generated columns"])
def test_a_table_with_a_feature_is_written_all_the_same(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, feature: str
) -> None:
    topic = runtime.topic()
    made(spark, str(tmp_path / "messages"), feature)
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
        for one in folder.iterdir():
            one.unlink()
    run_once(spark, data)
    assert values(spark, config.delta.path) == list(range(20))


def test_a_batch_without_rows_is_recorded(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "table")
    table = SparkTable(path, schema.MESSAGES, str(tmp_path / "staging"))
    assert not table.check(spark)
    table.create(spark)
    spark.sql(f"alter table delta.`{path}` {CHANGES['columnMapping']}")
    record = BatchRecord("s", "ledgerlake:s:q", 4, 7)
    assert not table.holds(record)
    table.commit(record, [], {})
    assert table.recorded("ledgerlake:s:q") == Recorded(4, 7)
    assert table.holds(record)
    assert table.last_batch_of("s") == 4
    assert spark.read.format("delta").load(path).count() == 0


def test_a_violated_constraint_is_one_sentence(runtime: Runtime, spark: SparkSession, tmp_path: Path) -> None:
    topic = runtime.topic()
    made(spark, str(tmp_path / "messages"), "checkConstraints")
    spark.sql(f"alter table delta.`{tmp_path / 'messages'}` add constraint few check (entry_id < 0)")
    publish(runtime, topic, range(5))
    with pytest.raises(TableError, match=r"batch 0 could not be committed to .*few.*entry_id"):
        run_once(spark, runtime.config(tmp_path, topic))


def test_the_writer_is_chosen_by_the_table(spark: SparkSession, tmp_path: Path) -> None:
    path, staging = str(tmp_path / "table"), str(tmp_path / "staging")
    assert type(open_table(path, schema.MESSAGES, "auto", staging)) is Table
    assert type(open_table(path, schema.MESSAGES, "spark", staging)) is SparkTable
    made(spark, path, "changeDataFeed")
    assert type(open_table(path, schema.MESSAGES, "auto", staging)) is SparkTable
    assert type(open_table(path, schema.MESSAGES, "arrow", staging)) is Table
    shutil.rmtree(path)
    spark.range(1).write.format("delta").save(path)
    assert type(open_table(path, schema.MESSAGES, "auto", staging)) is Table, "which refuses it, and says why"
    with pytest.raises(TableError, match="it lacks topic"):
        SparkTable(path, schema.MESSAGES, staging).check(spark)


def test_an_unknown_writer_is_named(runtime: Runtime, tmp_path: Path) -> None:
    data = runtime.config(tmp_path, "t")
    data["delta"]["writer"] = "fast"
    with pytest.raises(UsageError, match="writer cannot be 'fast'; it is auto, arrow or spark"):
        parse_config(data)
