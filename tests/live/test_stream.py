"""The source as a stream, the pipeline over restarts, and what it leaves on the broker."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from ledgerlake.api import messages, rejects, run
from ledgerlake.client.cursor import DurableCursor
from ledgerlake.errors import (
    CheckpointError,
    LedgerlakeError,
    SetupError,
    TableError,
    TopicNotFoundError,
)
from ledgerlake.inspect.lag import find_lags
from ledgerlake.options.config import parse_config
from ledgerlake.pipeline.forget import forget, forget_topic
from ledgerlake.stored.places import Place
from ledgerlake.verify.verify import verify
from tests.live.pipelines import forget_last_commit, publish_numbers, rows_by_position, run_once
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]


def source(spark: SparkSession, runtime: Runtime, topic: str, **options: Any) -> Any:
    reader = (
        spark.readStream.format("ledgerlake")
        .option("service.url", runtime.service_url)
        .option("topic", topic)
    )
    return reader.options(**options)


def drain(frame: DataFrame, checkpoint: Path) -> tuple[list[list[int]], Any]:
    """Values by micro-batch until AvailableNow ends, and the query."""
    batches: list[list[int]] = []

    def keep(batch: DataFrame, _number: int) -> None:
        batches.append(
            [
                int(row.value)
                for row in batch.orderBy("ledger_id", "entry_id", "batch_index").collect()
            ]
        )

    query = (
        frame.writeStream.foreachBatch(keep)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return batches, query


def test_a_stream_goes_on_where_it_stopped(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(20))
    frame = source(spark, runtime, topic, startingOffsets="earliest").load()
    assert drain(frame, tmp_path)[0] == [list(range(20))]
    publish_numbers(runtime, topic, range(20, 50), batch=10)
    assert drain(frame, tmp_path)[0] == [list(range(20, 50))]
    assert sum(map(len, drain(frame, tmp_path)[0])) == 0


def test_limits_hold_also_when_everything_available_is_wanted(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(100), batch=10)
    frame = source(spark, runtime, topic, startingOffsets="earliest", maxRowsPerTrigger=25).load()
    batches, query = drain(frame, tmp_path)
    assert [len(batch) for batch in batches] == [20, 20, 20, 20, 20]
    assert [number for batch in batches for number in batch] == list(range(100))
    assert '"index": 99' in query.lastProgress.sources[0].endOffset


def test_bytes_limit_a_batch_too(runtime: Runtime, spark: SparkSession, tmp_path: Path) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(30))
    frame = source(
        spark, runtime, topic, startingOffsets="earliest", maxBytesPerTrigger=1000
    ).load()
    batches, _ = drain(frame, tmp_path)
    assert len(batches) > 2
    assert [number for batch in batches for number in batch] == list(range(30))


@pytest.mark.parametrize("batch", [1, 10])
def test_a_start_at_a_message_begins_with_that_message(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, batch: int
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(40), batch)
    topic_rows = (
        spark.read.format("ledgerlake")
        .option("service.url", runtime.service_url)
        .option("topic", topic)
        .load()
    )
    message_id = next(row.message_id for row in topic_rows.collect() if row.value == b"17")
    frame = source(spark, runtime, topic, startingOffsets=message_id).load()
    assert [number for part in drain(frame, tmp_path)[0] for number in part] == list(range(17, 40))


def test_latest_takes_only_what_comes_after_the_start(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(10))
    values: list[int] = []

    def keep(batch: DataFrame, _number: int) -> None:
        values.extend(int(row.value) for row in batch.collect())

    frame = source(spark, runtime, topic, startingOffsets="latest").load()
    query = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path)).start()
    try:
        query.processAllAvailable()
        publish_numbers(runtime, topic, range(10, 15))
        wait_until(lambda: len(values) >= 5)
    finally:
        query.stop()
    assert values == list(range(10, 15))


def test_a_batch_read_is_bounded_on_both_sides(runtime: Runtime, spark: SparkSession) -> None:
    topic = runtime.topic()
    ids = publish_numbers(runtime, topic, range(10))
    text = [f"{message_id.ledger_id()}:{message_id.entry_id()}" for message_id in ids]
    reader = (
        spark.read.format("ledgerlake")
        .option("service.url", runtime.service_url)
        .option("topic", topic)
    )
    frame = reader.option("startingOffsets", text[3]).option("endingOffsets", text[6]).load()
    assert sorted(int(row.value) for row in frame.collect()) == [3, 4, 5, 6]
    assert sorted(int(row.value) for row in frame.collect()) == [3, 4, 5, 6]


def test_a_missing_topic_is_an_error_and_stays_missing(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    name = "persistent://public/default/never-made"
    config = parse_config(runtime.config(tmp_path, name))
    with pytest.raises(TopicNotFoundError, match="does not exist"):
        run(spark, config, once=True)
    with pytest.raises(Exception, match="does not exist"):
        spark.read.format("ledgerlake").option("service.url", runtime.service_url).option(
            "topic", name
        ).load().count()
    listing = runtime.admin("GET", "persistent://public/default")
    assert name not in listing


def test_an_idle_query_hardly_asks_the_broker(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    import time

    topic = runtime.topic()
    publish_numbers(runtime, topic, range(3))
    frame = source(spark, runtime, topic, startingOffsets="earliest").load()
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
    try:
        query.processAllAvailable()
        before = runtime.admin("GET", topic, "/stats")["msgOutCounter"]
        time.sleep(2)
        assert runtime.admin("GET", topic, "/stats")["msgOutCounter"] == before
    finally:
        query.stop()
    assert len(query.recentProgress) < 5


def test_the_pipeline_commits_each_batch_once_when_spark_repeats_it(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic)
    publish_numbers(runtime, topic, range(50), batch=10)
    config = run_once(spark, data)
    publish_numbers(runtime, topic, range(50, 80))
    with monkeypatch.context() as unrecorded:
        # A cursor passes what Spark has recorded, and what it has recorded is not repeated.
        unrecorded.setattr(DurableCursor, "advance", lambda _cursor, _position: None)
        run_once(spark, data)
    forget_last_commit(tmp_path / "checkpoint")
    publish_numbers(runtime, topic, range(80, 90))
    run_once(spark, data)
    assert [int(row["value"]) for row in rows_by_position(config.delta.path)] == list(range(90))
    verdict = verify(config)
    assert (verdict.messages, verdict.clean) == (90, True)


@pytest.mark.parametrize(
    ("partitions", "state_partitions"), [pytest.param(0, 1, marks=pytest.mark.long), (3, 2)]
)
def test_the_pipelines_state_has_no_more_partitions_than_the_topic(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, partitions: int, state_partitions: int
) -> None:
    topic = runtime.topic(partitions)
    publish_numbers(runtime, topic, range(20))
    config = run_once(spark, runtime.config(tmp_path, topic))
    state = {
        path.name
        for path in (tmp_path / "checkpoint" / "state" / "0").iterdir()
        if path.name.isdigit()
    }
    assert state == {str(number) for number in range(state_partitions)}
    publish_numbers(runtime, topic, range(20))
    run_once(spark, runtime.config(tmp_path, topic))
    assert len(rows_by_position(config.delta.path)) == 40


def test_a_new_checkpoint_is_a_new_query_and_not_a_silent_skip(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic)
    publish_numbers(runtime, topic, range(10))
    config = run_once(spark, data)
    shutil.rmtree(tmp_path / "checkpoint")
    forget(config)
    with caplog.at_level(logging.WARNING):
        run_once(spark, data)
    assert "begins anew, and its rows stay in" in caplog.text
    assert len(rows_by_position(config.delta.path)) == 20
    assert verify(config).duplicate == 10


def test_a_copy_of_a_configuration_for_another_topic_is_refused_and_changes_nothing(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic, other = runtime.topic(), runtime.topic()
    for name in (topic, other):
        publish_numbers(runtime, name, range(10))
    data = runtime.config(tmp_path, topic, name="copied")
    config = run_once(spark, data)
    copy = data | {
        "source": data["source"] | {"topics": [other]},
        "delta": {"path": str(tmp_path / "others")},
    }
    with pytest.raises(
        SetupError, match=f"reads {topic}, and the configuration selects none of its topics"
    ):
        run_once(spark, copy)
    assert runtime.subscriptions(other) == {}
    assert not DeltaTable.is_deltatable(str(tmp_path / "others"))
    publish_numbers(runtime, topic, range(10, 15))
    run_once(spark, data)
    assert len(rows_by_position(config.delta.path)) == 15
    both = data | {"source": data["source"] | {"topics": [topic, other]}}
    run_once(spark, both)
    assert len(rows_by_position(config.delta.path)) == 25


def test_a_stream_may_leave_all_its_topics_if_they_are_forgotten_or_gone(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic, second, third = runtime.topic(), runtime.topic(), runtime.topic()
    for name in (topic, second, third):
        publish_numbers(runtime, name, range(10))
    data = runtime.config(tmp_path, topic)
    config = run_once(spark, data)
    data["source"]["topics"] = [second]
    forget_topic(parse_config(data), topic)
    run_once(spark, data)
    assert len(rows_by_position(config.delta.path)) == 20
    runtime.admin("DELETE", second, "?force=true")
    data["source"]["topics"] = [third]
    run_once(spark, data)
    assert len(rows_by_position(config.delta.path)) == 30


def test_a_lost_checkpoint_asks_for_a_choice_and_the_cursor_is_one(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic, name="lost")
    publish_numbers(runtime, topic, range(10))
    config = run_once(spark, data)
    publish_numbers(runtime, topic, range(10, 15))
    shutil.rmtree(tmp_path / "checkpoint")
    with pytest.raises(
        SetupError,
        match=r"no checkpoint at .* table at .* knows the stream lost; restore .* or set",
    ):
        run_once(spark, data)
    data["source"]["starting"] = "cursor"
    run_once(spark, data)
    assert [int(row["value"]) for row in rows_by_position(config.delta.path)] == list(range(15))
    publish_numbers(runtime, topic, range(15, 16))
    run_once(spark, data)
    assert verify(config).messages == 16
    assert runtime.subscriptions(topic) == {"ledgerlake-lost": 0}


def test_a_start_that_fails_leaves_nothing_on_the_broker(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(10))
    data = runtime.config(tmp_path, topic, name="failed")
    data["stream"]["checkpoint"] = "/proc/nowhere"
    with pytest.raises(SetupError, match="the checkpoint folder /proc/nowhere cannot be written"):
        run_once(spark, data)
    assert runtime.subscriptions(topic) == {}


def test_the_bare_source_goes_on_from_its_subscription(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(10))
    options = {"startingOffsets": "cursor", "subscription": "pin"}
    assert drain(source(spark, runtime, topic, **options).load(), tmp_path / "a")[0] == [
        [*range(10)]
    ]
    publish_numbers(runtime, topic, range(10, 12))
    assert drain(source(spark, runtime, topic, **options).load(), tmp_path / "b")[0] == [[10, 11]]


def test_verify_sees_what_is_missing_and_what_is_doubled(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(30), batch=10)
    config = run_once(spark, runtime.config(tmp_path, topic))
    table = DeltaTable(config.delta.path)
    rows = spark.read.format("delta").load(config.delta.path)
    rows.where("batch_index = 4").coalesce(1).write.format("delta").mode("append").save(
        config.delta.path
    )
    table.update_incremental()
    assert verify(config).duplicate == 3
    spark.sql(f"delete from delta.`{config.delta.path}` where batch_index = 4")
    verdict = verify(config)
    assert (verdict.missing, verdict.duplicate) == (3, 0)
    assert not verdict.clean


def test_the_cursor_shows_the_backlog_and_goes_when_it_is_forgotten(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(10))
    data = runtime.config(tmp_path, topic, name="backlog")
    config = run_once(spark, data)
    publish_numbers(runtime, topic, range(10, 14))
    assert runtime.subscriptions(topic) == {"ledgerlake-backlog": 4}
    assert [lag.messages for lag in find_lags(config)] == [4]
    run_once(spark, data)
    assert runtime.subscriptions(topic) == {"ledgerlake-backlog": 0}
    with pytest.raises(CheckpointError, match="remove the checkpoint first"):
        forget(config)
    assert runtime.subscriptions(topic) == {"ledgerlake-backlog": 0}
    shutil.rmtree(tmp_path / "checkpoint")
    assert forget(config) == [topic]
    assert runtime.subscriptions(topic) == {}


def test_the_bare_source_leaves_a_cursor_only_where_it_was_asked_to(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(10))
    frame = source(spark, runtime, topic, startingOffsets="earliest").load()
    drain(frame, tmp_path / "a")
    assert runtime.subscriptions(topic) == {}
    pinned = source(
        spark, runtime, topic, startingOffsets="earliest", subscription="pin", maxRowsPerTrigger=4
    ).load()
    drain(pinned, tmp_path / "b")
    assert runtime.subscriptions(topic) == {"pin": 0}


def test_the_python_entry_points_stream_messages_and_rejects(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(10))
    config = parse_config(runtime.config(tmp_path, topic))
    assert drain(messages(spark, config), tmp_path / "m")[0] == [list(range(10))]
    assert sum(map(len, drain(rejects(spark, config), tmp_path / "r")[0])) == 0


def test_a_table_with_another_schema_is_refused_and_the_difference_named(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    config = parse_config(runtime.config(tmp_path, topic))
    spark.range(1).selectExpr("id", "cast(id as string) as partition").write.format("delta").save(
        config.delta.path
    )
    with pytest.raises(
        TableError, match=r"it lacks topic.*it has id.*partition is string instead of integer"
    ):
        run(spark, config, once=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("set tblproperties ('delta.columnMapping.mode' = 'name')", "columnMapping"),
        ("set tblproperties ('delta.enableChangeDataFeed' = 'true')", "changeDataFeed"),
        ("add constraint positive check (ledger_id >= 0)", "checkConstraints"),
    ],
)
def test_a_table_that_the_writer_cannot_honour_is_refused(
    spark: SparkSession, tmp_path: Path, change: str, reason: str
) -> None:
    from ledgerlake.decode import schema
    from ledgerlake.table.delta_table import Table

    table = Table(Place(str(tmp_path / "table")), schema.MESSAGES)
    table.create()
    spark.sql(f"alter table delta.`{table.path}` {change}")
    with pytest.raises(TableError, match=f"has {reason}, which this writer cannot honour"):
        table.check(spark)


def test_a_partitioned_table_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    from ledgerlake.decode import schema
    from ledgerlake.table.delta_table import Table

    table = Table(Place(str(tmp_path / "table")), schema.MESSAGES)
    table.create()
    empty = spark.read.format("delta").load(table.path.uri)
    empty.write.format("delta").partitionBy("topic").save(str(tmp_path / "partitioned"))
    with pytest.raises(TableError, match="has partition columns"):
        Table(Place(str(tmp_path / "partitioned")), schema.MESSAGES).check(spark)


def test_a_table_whose_making_was_interrupted_is_made_after_all(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(5))
    (tmp_path / "messages" / "_delta_log").mkdir(parents=True)
    (tmp_path / "messages" / "_delta_log" / ".00000000000000000000.json.x.tmp").write_text("")
    config = run_once(spark, runtime.config(tmp_path, topic))
    assert len(rows_by_position(config.delta.path)) == 5


def test_a_table_path_that_cannot_be_written_is_one_sentence(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    data = runtime.config(tmp_path / "file", runtime.topic())
    with pytest.raises(LedgerlakeError, match="choose another path"):
        run(spark, parse_config(data), once=True)


def test_two_pipelines_of_one_name_do_not_run_together(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ledgerlake.client.cursor.BUSY_FOR_S", 0.5)
    topic = runtime.topic()
    first = run(spark, parse_config(runtime.config(tmp_path / "first", topic, name="same")))
    try:
        with pytest.raises(LedgerlakeError, match="another consumer holds this subscription"):
            run(spark, parse_config(runtime.config(tmp_path / "second", topic, name="same")))
    finally:
        first.stop()
        first.close()


def test_stored_entries_decode_later_to_the_same_messages(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    from ledgerlake.decode.as_udf import decode_messages

    topic = runtime.topic(partitions=2)
    publish_numbers(runtime, topic, range(200), batch=20)
    reader = (
        spark.read.format("ledgerlake")
        .option("service.url", runtime.service_url)
        .option("topic", topic)
    )
    reader.option("view", "entries").load().write.parquet(str(tmp_path / "entries"))
    later = decode_messages(spark.read.parquet(str(tmp_path / "entries")))
    at_once = reader.option("view", "messages").load()
    columns = [
        "message_id",
        "partition",
        "broker_timestamp",
        "broker_index",
        "producer_name",
        "sequence_id",
        "value",
    ]
    assert sorted(later.select(columns).collect()) == sorted(at_once.select(columns).collect())
    assert later.count() == 200
