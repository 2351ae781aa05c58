"""What users of the JVM connectors bring along: their options and columns, the scenarios of their
tests, and what went wrong there.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
from collections import Counter
from typing import TYPE_CHECKING, Any

import pulsar
import pytest
from pulsar import schema as ps
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql.functions import expr

from ledgerlake.api import messages
from ledgerlake.decode.as_udf import compat
from ledgerlake.devbroker import Broker
from tests.live.pipelines import run_once
from tests.live.runtime import SETTINGS, Runtime

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = [pytest.mark.live, pytest.mark.spark]

THEIR_COLUMNS = [
    ("__key", "binary"),
    ("__topic", "string"),
    ("__messageId", "binary"),
    ("__publishTime", "timestamp"),
    ("__eventTime", "timestamp"),
    ("__messageProperties", "map<string,string>"),
]


def publish(
    runtime: Runtime, topic: str, values: Any, schema: Any = None, **options: Any
) -> list[pulsar.MessageId]:
    """Send values in turn, in batches of a hundred where they are many."""
    producer_options = {
        "batching_max_messages": 100,
        "batching_max_publish_delay_ms": 1000,
        "block_if_queue_full": True,
    } | options
    producer = runtime.client().create_producer(
        topic, schema=schema or ps.StringSchema(), **producer_options
    )
    message_ids: list[pulsar.MessageId] = []
    for value in values:
        producer.send_async(value, lambda _result, message_id: message_ids.append(message_id))
    producer.flush()
    producer.close()
    return message_ids


def theirs(runtime: Runtime, **options: str) -> dict[str, str]:
    """Options as a query of theirs spells them."""
    return {
        "Service.Url": runtime.service_url,
        "admin.url": runtime.admin_url,
        "view": "compat",
    } | options


def batch(spark: SparkSession, runtime: Runtime, **options: str) -> DataFrame:
    return spark.read.format("ledgerlake").options(**theirs(runtime, **options)).load()


class Stream:
    """A stream of theirs into a table of files, run until everything available is in it."""

    def __init__(self, spark: SparkSession, runtime: Runtime, folder: Path, **options: str) -> None:
        self._spark = spark
        self._folder = folder
        self._options = theirs(runtime, **options)

    def start(self) -> StreamingQuery:
        source = self._spark.readStream.format("ledgerlake").options(**self._options).load()
        writer = source.writeStream.format("parquet").option(
            "checkpointLocation", f"{self._folder}/checkpoint"
        )
        return writer.option("path", f"{self._folder}/table").trigger(availableNow=True).start()

    def run(self) -> StreamingQuery:
        query = self.start()
        assert query.awaitTermination(120)
        return query

    def values(self) -> list[Any]:
        return sorted(
            row["value"] for row in self._spark.read.parquet(f"{self._folder}/table").collect()
        )


def as_byte_list(message_id: pulsar.MessageId) -> list[int]:
    """As their offsets have it: signed bytes."""
    return [byte - 256 if byte > 127 else byte for byte in message_id.serialize()]


@pytest.mark.parametrize("is_batched", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("fails_on_loss", ["true", pytest.param("false", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "start",
    [
        "id",
        # Other tests read from the earliest message, and pipelines start at the latest.
        pytest.param("earliest", marks=pytest.mark.long),
        pytest.param("latest", marks=pytest.mark.long),
        "time",
    ],
)
def test_assign_from(
    runtime: Runtime,
    spark: SparkSession,
    tmp_path: Path,
    start: str,
    fails_on_loss: str,
    is_batched: bool,
) -> None:
    topic = runtime.topic()
    ids = publish(runtime, topic, ["0", "1", "2"], batching_enabled=is_batched)
    time.sleep(0.05)
    middle_ms = int(time.time() * 1000)
    time.sleep(0.05)
    publish(runtime, topic, ["3", "4"], batching_enabled=is_batched)
    options = {
        "earliest": {"startingOffsets": "earliest"},
        "latest": {"STARTINGOFFSETS": "latest"},
        "id": {"startingOffsets": json.dumps({topic: as_byte_list(ids[1])})},
        "time": {"startingTime": json.dumps({topic: middle_ms})},
    }[start]
    stream = Stream(spark, runtime, tmp_path, topic=topic, failOnDataLoss=fails_on_loss, **options)
    stream.run()
    publish(runtime, topic, ["5"], batching_enabled=is_batched)
    stream.run()
    first = {"earliest": 0, "latest": 5, "id": 1, "time": 3}[start]
    assert stream.values() == [str(number) for number in range(first, 6)]
    assert runtime.subscriptions(topic) == {}


def test_a_batch_between_offsets_in_their_form(runtime: Runtime, spark: SparkSession) -> None:
    topic = runtime.topic()
    ids = publish(runtime, topic, [str(number) for number in range(10)], batching_enabled=False)
    bounds = {
        "startingOffsets": json.dumps({topic: as_byte_list(ids[2])}),
        "endingOffsets": json.dumps({topic: as_byte_list(ids[7])}),
    }
    assert [row.value for row in batch(spark, runtime, topic=topic, **bounds).collect()] == list(
        "234567"
    )


def test_columns_are_theirs(runtime: Runtime, spark: SparkSession) -> None:
    class Row(ps.Record):
        a = ps.Integer()
        b = ps.String()

    plain, record = runtime.topic(), runtime.topic()
    publish(runtime, plain, ["x"])
    publish(runtime, record, [Row(a=1, b="x")], schema=ps.AvroSchema(Row))
    assert batch(spark, runtime, topic=plain).dtypes == [("value", "string"), *THEIR_COLUMNS]
    frame = batch(spark, runtime, topic=record)
    assert frame.dtypes == [("a", "int"), ("b", "string"), *THEIR_COLUMNS]
    assert frame.select("a", "b", "__topic").collect() == [(1, "x", record)]
    message_id = pulsar.MessageId.deserialize(bytes(frame.collect()[0]["__messageId"]))
    assert message_id.ledger_id() >= 0


def test_columns_of_the_pipeline_and_of_the_table_can_be_theirs(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic(partitions=2)
    publish(runtime, topic, [b"x"], schema=ps.BytesSchema())
    config = run_once(spark, runtime.config(tmp_path, topic))
    table = compat(spark.read.format("delta").load(config.delta.path))
    assert table.dtypes == [("value", "binary"), *THEIR_COLUMNS]
    assert [row["__topic"].rpartition("-")[0] for row in table.collect()] == [f"{topic}-partition"]
    assert compat(messages(spark, config)).isStreaming


def test_rows_of_a_batch_are_counted_and_one_source_can_be_joined_with_itself(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish(runtime, topic, [str(number) for number in range(30)])
    stream = Stream(spark, runtime, tmp_path, topic=topic, startingOffsets="earliest")
    assert sum(progress.numInputRows for progress in stream.run().recentProgress) == 30
    source = spark.readStream.format("ledgerlake").options(
        **theirs(runtime, topic=topic, startingOffsets="earliest")
    )
    stream_values = source.load().selectExpr("value as v")
    joined = stream_values.join(stream_values.selectExpr("v as w"), expr("v = w"))
    query = joined.writeStream.format("memory").queryName("joined").trigger(availableNow=True)
    assert (
        query.option("checkpointLocation", str(tmp_path / "joined")).start().awaitTermination(120)
    )
    assert spark.table("joined").where("v = w").count() == 30


def test_a_watermark_on_their_time_column(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish(runtime, topic, [str(number) for number in range(10)])
    options = theirs(runtime, topic=topic, startingOffsets="earliest")
    source = spark.readStream.format("ledgerlake").options(**options).load()
    counted = source.withWatermark("__publishTime", "10 seconds").groupBy("__topic").count()
    query = (
        counted.writeStream.format("memory")
        .queryName("counted")
        .outputMode("complete")
        .trigger(availableNow=True)
    )
    assert (
        query.option("checkpointLocation", str(tmp_path / "counted")).start().awaitTermination(120)
    )
    assert [row["count"] for row in spark.table("counted").collect()] == [10]


@pytest.mark.parametrize(
    "pattern", ["topicsPattern", pytest.param("TOPICSPATTERN", marks=pytest.mark.long)]
)
def test_topics_by_pattern_of_which_one_is_deleted_and_made_again(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, pattern: str
) -> None:
    base = runtime.topic()
    first, second = f"{base}-a", f"{base}-b"
    for topic in (first, second):
        runtime.admin("PUT", topic)
        publish(runtime, topic, [f"{topic[-1]}0"])
    options = {pattern: f"{base}-[ab]", "startingOffsets": "earliest", "failOnDataLoss": "false"}
    stream = Stream(spark, runtime, tmp_path, **options)
    stream.run()
    runtime.admin("DELETE", second, "?force=true")
    publish(runtime, first, ["a1"])
    stream.run()
    runtime.admin("PUT", second)
    publish(runtime, second, ["b1"])
    stream.run()
    assert stream.values() == ["a0", "a1", "b0", "b1"]


def test_waiting_for_a_topic_that_does_not_exist_yet(runtime: Runtime, spark: SparkSession) -> None:
    topic = f"{runtime.topic()}-later"
    with pytest.raises(PySparkException, match="does not exist; create it or correct its name"):
        batch(spark, runtime, topic=topic).collect()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        runtime.admin("GET", topic, "/stats")

    def make() -> None:
        time.sleep(2)
        runtime.admin("PUT", topic)
        publish(runtime, topic, ["x"])

    maker = threading.Thread(target=make)
    maker.start()
    frame = batch(spark, runtime, topic=topic, waitingForNonExistedTopic="true", schema="bytes")
    maker.join()
    assert [bytes(row.value) for row in frame.collect()] in ([b"x"], [])
    assert [
        bytes(row.value) for row in batch(spark, runtime, topic=topic, schema="bytes").collect()
    ] == [b"x"]


def test_an_option_that_we_do_not_have_names_the_nearest(
    runtime: Runtime, spark: SparkSession
) -> None:
    with pytest.raises(
        PySparkException,
        match="no option 'subscriptionPrefix': nothing is left on the broker unless",
    ):
        batch(spark, runtime, topic=runtime.topic(), subscriptionPrefix="p")


def test_limited_batches_of_batched_topics_double_nothing(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    """Theirs: 999 rows too many at each boundary, only with an admin address, and not at all under
    AvailableNow.
    """
    topic = runtime.topic(partitions=2)
    publish(runtime, topic, (f"{number:06d}" for number in range(4_000)), batching_max_messages=200)
    options = {"topic": topic, "startingOffsets": "earliest", "maxBytesPerTrigger": "15000"}
    stream = Stream(spark, runtime, tmp_path, **options)
    query = stream.run()
    assert stream.values() == [f"{number:06d}" for number in range(4_000)]
    assert len([progress for progress in query.recentProgress if progress.numInputRows]) > 3


def test_nothing_is_left_on_the_broker(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    """Theirs: a durable subscription with the full backlog for every partition and query."""
    topic = runtime.topic(partitions=2)
    publish(runtime, topic, [str(number) for number in range(10)])
    names = [f"{topic}-partition-{number}" for number in range(2)]
    assert batch(spark, runtime, topic=topic).count() == 10
    Stream(spark, runtime, tmp_path, topic=topic, startingOffsets="earliest").run()
    with pytest.raises(PySparkException):
        batch(
            spark, runtime, topic=topic, startingOffsets="index 1", endingOffsets="99:99:99:99"
        ).collect()
    broken = theirs(runtime, topic=topic, startingOffsets="earliest")
    source = (
        spark.readStream.format("ledgerlake")
        .options(**broken)
        .load()
        .selectExpr("cast(raise_error('no') as int)")
    )
    failing = (
        source.writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "broken"))
        .start()
    )
    with pytest.raises(StreamingQueryException):
        failing.awaitTermination(60)
    assert [runtime.subscriptions(name) for name in names] == [{}, {}]


def test_latest_does_not_read_the_last_batch_again(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish(runtime, topic, [f"old{number}" for number in range(150)], batching_max_messages=30)
    stream = Stream(spark, runtime, tmp_path, topic=topic)
    stream.run()
    publish(runtime, topic, ["new"])
    stream.run()
    assert stream.values() == ["new"]


def test_a_predefined_subscription_reaches_zero_backlog(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    """Theirs trails a run behind."""
    topic = runtime.topic()
    publish(runtime, topic, [str(number) for number in range(250)])
    stream = Stream(
        spark,
        runtime,
        tmp_path,
        topic=topic,
        startingOffsets="earliest",
        predefinedSubscription="mine",
    )
    stream.run()
    assert runtime.subscriptions(topic) == {"mine": 0}
    publish(runtime, topic, [str(number) for number in range(7)])
    assert runtime.subscriptions(topic) == {"mine": 7}
    stream.run()
    assert runtime.subscriptions(topic) == {"mine": 0}


def test_chunked_messages_are_no_loss_and_delays_are_kept(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    """The JVM connector fails on the chunks' positions, and delivers delayed messages at once."""
    topic = runtime.topic()
    large = {"batching_enabled": False, "chunking_enabled": True, "schema": ps.BytesSchema()}
    publish(runtime, topic, [b"a" * 12_000_000, b"small"], **large)
    config = runtime.config(tmp_path, topic, fail_on_data_loss=True)
    run_once(spark, config)
    publish(runtime, topic, [b"b" * 12_000_000], **large)
    producer = runtime.client().create_producer(topic)
    due_ms = int(time.time() * 1000) + 3_600_000
    producer.send(b"later", deliver_at=due_ms)
    producer.close()
    run_once(spark, config)
    rows = spark.read.format("delta").load(str(tmp_path / "messages"))
    compat_rows = compat(rows).orderBy("__publishTime").collect()
    assert Counter(bytes(row.value)[:1] for row in compat_rows) == {b"a": 1, b"s": 1, b"b": 1}


def test_one_partition_is_read_by_several_tasks(runtime: Runtime, spark: SparkSession) -> None:
    topic = runtime.topic()
    publish(runtime, topic, (f"{number:05d}" for number in range(10_000)))
    frame = batch(spark, runtime, topic=topic, minPartitions="4")
    assert frame.rdd.getNumPartitions() == 4
    assert sorted(row.value for row in frame.collect()) == [
        f"{number:05d}" for number in range(10_000)
    ]


@pytest.mark.long
def test_the_brokers_cleaning_leaves_a_topic_alone_that_a_pipeline_has_not_read(
    spark: SparkSession, tmp_path: Path
) -> None:
    """An inactive topic is deleted with its data, unless something pins it."""
    cleaning = {
        "brokerDeleteInactiveTopicsEnabled": "true",
        "brokerDeleteInactiveTopicsFrequencySeconds": "1",
        "brokerDeleteInactiveTopicsMaxInactiveDurationSeconds": "3",
    }
    broker = Broker(settings=SETTINGS | cleaning)
    address = broker.start()
    runtime = Runtime(address.service_url, address.admin_url, broker)
    try:
        topic = "persistent://public/default/pinned"
        runtime.admin("PUT", topic)
        publish(runtime, topic, [b"1"], schema=ps.BytesSchema())
        config = runtime.config(tmp_path, topic)
        run_once(spark, config)
        publish(runtime, topic, [b"2"], schema=ps.BytesSchema())
        time.sleep(10)
        run_once(spark, config)
        rows = spark.read.format("delta").load(str(tmp_path / "messages")).collect()
        assert sorted(bytes(row.value) for row in rows) == [b"1", b"2"]
    finally:
        for client in runtime.clients:
            client.close()
        broker.stop()
