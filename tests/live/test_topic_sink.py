"""Rows as messages: every column and option, read back by pulsar-client and by us; once, over kills
and replays.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pulsar
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException

from ledgerlake.client.producer import NumberedEntry, NumberedProducer
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.entry import encode_entry
from tests.live.pipelines import forget_last_commit, rows_by_position, run_once
from tests.live.runtime import wait_for_commits

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]

CODECS = {"none": "NONE", "lz4": "LZ4", "zlib": "ZLib", "zstd": "ZSTD", "snappy": "SNAPPY"}
SCHEMA = (
    "value binary, key string, ordering_key binary, properties map<string,string>, event_time "
    "timestamp"
)
AT = datetime(2026, 5, 1, 9, 0, 0, 123000, tzinfo=timezone.utc)


@pytest.fixture(scope="module")
def deduplicating(runtime: Runtime) -> Runtime:
    return runtime.deduplicating()


def rows(spark: SparkSession, count: int) -> list[tuple[Any, ...]]:
    return [
        (
            f"value {number} ".encode() * 20,
            f"k{number % 3}" if number % 2 else None,
            b"order" if number % 5 == 0 else None,
            {"n": str(number)},
            AT if number % 4 else None,
        )
        for number in range(count)
    ]


def write(frame: DataFrame, runtime: Runtime, **options: str) -> None:
    all_options = {"service.url": runtime.service_url} | options
    frame.write.format("ledgerlake").options(**all_options).mode("append").save()


def received(runtime: Runtime, topic: str, count: int) -> list[pulsar.Message]:
    """What pulsar-client's reader gets."""
    reader = runtime.client().create_reader(topic, pulsar.MessageId.earliest)
    messages = [reader.read_next(10_000) for _ in range(count)]
    assert not reader.has_message_available()
    reader.close()
    return messages


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("batching", ["true", "false"])
def test_every_column_arrives_at_a_pulsar_client(
    runtime: Runtime, spark: SparkSession, codec: str, batching: str
) -> None:
    topic = runtime.topic()
    sent = rows(spark, 50)
    options = {
        "pulsar.producer.compressionType": codec,
        "pulsar.producer.batchingEnabled": batching,
    }
    write(spark.createDataFrame(sent, SCHEMA).coalesce(1), runtime, topic=topic, **options)
    for (value, key, ordering_key, properties, event_time), message in zip(
        sent, received(runtime, topic, 50), strict=True
    ):
        assert (message.data(), message.partition_key() or None, message.properties()) == (
            value,
            key,
            properties,
        )
        assert message.ordering_key() == (ordering_key or b"").decode()
        assert message.event_timestamp() == (int(AT.timestamp() * 1000) if event_time else 0)


def test_what_was_written_is_what_the_table_gets(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic(partitions=3)
    sent = rows(spark, 100)
    binary = [(None, b"\xff\0", None, None, None, None, topic)]
    frame = spark.createDataFrame(
        [(*row[:1], (row[1] or "").encode() or None, *row[2:], None, None) for row in sent]
        + binary,
        "value binary, key binary, ordering_key binary, properties map<string,string>, event_time "
        "timestamp, deliver_at timestamp, topic string",
    )
    write(frame, runtime, topic=topic)
    config = run_once(spark, runtime.config(tmp_path, topic))
    stored_rows = rows_by_position(config.delta.path)
    assert len(stored_rows) == 101
    null = next(row for row in stored_rows if row["is_null"])
    assert (null["key_bytes"], null["value"]) == (b"\xff\0", None)
    by_value = {row["value"]: row for row in stored_rows if row["value"] is not None}
    for value, key, ordering_key, properties, event_time in sent:
        row = by_value[value]
        assert (row["key_bytes"] or b"").decode() == (key or "")
        assert (row["ordering_key"], row["properties"]) == (ordering_key, properties)
        assert (row["event_time"] is None) == (event_time is None)
    partitions: dict[bytes, int] = {}
    for row in stored_rows:
        if row["key_bytes"] is not None:
            assert partitions.setdefault(row["key_bytes"], row["partition"]) == row["partition"]


def test_large_and_delayed_messages(runtime: Runtime, spark: SparkSession, tmp_path: Path) -> None:
    topic = runtime.topic()
    large = random.Random(1).randbytes(11_000_000)
    due = datetime.fromtimestamp(int(time.time()) + 3600, tz=timezone.utc)
    frame = spark.createDataFrame(
        [(b"small", None), (large, None), (b"later", due)], "value binary, deliver_at timestamp"
    ).coalesce(1)
    write(frame, runtime, topic=topic)
    config = run_once(spark, runtime.config(tmp_path, topic))
    stored_rows = rows_by_position(config.delta.path)
    assert [row["value"] for row in stored_rows] == [b"small", large]
    assert stored_rows[1]["chunk_count"] == 3
    view = (
        spark.read.format("ledgerlake")
        .option("service.url", runtime.service_url)
        .option("topic", topic)
        .load()
    )
    assert [
        row.deliver_at.timestamp() for row in view.where("deliver_at is not null").collect()
    ] == [due.timestamp()]


def test_their_columns_and_a_topic_for_each_row(runtime: Runtime, spark: SparkSession) -> None:
    first, second = runtime.topic(), runtime.topic()
    frame = spark.createDataFrame(
        [("a", "k", first, AT, {"p": "1"}), ("b", None, second, None, None)],
        "value string, __key string, __topic string, __eventTime timestamp, __messageProperties "
        "map<string,string>",
    )
    write(frame, runtime)
    (message,) = received(runtime, first, 1)
    assert (message.data(), message.partition_key(), message.properties()) == (
        b"a",
        "k",
        {"p": "1"},
    )
    assert [second_message.data() for second_message in received(runtime, second, 1)] == [b"b"]


def test_a_topic_and_one_of_its_partitions_in_one_task_share_a_producer(
    deduplicating: Runtime, spark: SparkSession
) -> None:
    topic = deduplicating.topic(partitions=1)
    frame = spark.createDataFrame(
        [(f"{number}", topic if number % 2 else f"{topic}-partition-0") for number in range(300)],
        "value string, topic string",
    ).coalesce(1)
    write(frame, deduplicating)
    assert [int(message.data()) for message in received(deduplicating, topic, 300)] == list(
        range(300)
    )


@pytest.mark.parametrize(
    ("columns", "options", "why"),
    [
        ("value binary, extra int", {}, "nothing that the column 'extra' could become"),
        ("value int", {}, "the column 'value' is int; it must be string or binary"),
        ("key string", {}, "the column 'value' is missing"),
        ("value binary, key string, __key string", {}, "two columns mean the same"),
        ("value binary", {"topic": ""}, "set the option 'topic' or add a column 'topic'"),
        ("value binary", {"topics": "x"}, "the sink has no option 'topics'; did you mean 'topic'"),
        (
            "value binary",
            {"pulsar.producer.compressionType": "gzip"},
            "cannot be 'gzip'; it is none",
        ),
        ("value binary", {"service.url": ""}, "the option 'service.url' is missing"),
    ],
)
def test_what_cannot_be_written_is_named(
    runtime: Runtime, spark: SparkSession, columns: str, options: dict[str, str], why: str
) -> None:
    with pytest.raises(PySparkException, match=why):
        write(spark.createDataFrame([], columns), runtime, **({"topic": "t"} | options))


def test_a_missing_topic_is_an_error_and_stays_missing(
    runtime: Runtime, spark: SparkSession
) -> None:
    name = f"{runtime.topic()}-absent"
    with pytest.raises(PySparkException, match="does not exist; create it or correct its name"):
        write(spark.createDataFrame([("x",)], "value string"), runtime, topic=name)
    with pytest.raises(OSError, match="404"):
        runtime.admin("GET", name, "/stats")
    writer = (
        spark.createDataFrame([("x",)], "value string").write.format("ledgerlake").mode("overwrite")
    )
    writer = writer.option("service.url", runtime.service_url).option("topic", name)
    with pytest.raises(PySparkException, match="a topic cannot be overwritten"):
        writer.save()


def test_a_producer_goes_on_over_a_disconnect_and_an_unload(deduplicating: Runtime) -> None:
    topic = deduplicating.topic()
    cluster = deduplicating.cluster()
    producer = NumberedProducer(cluster, topic, "steady")
    for number in range(3000):
        metadata = pb.MessageMetadata(producer_name="steady", sequence_id=number, publish_time=1)
        producer.send(NumberedEntry(encode_entry(metadata, b"%d" % number), number, number))
        if number % 1000 == 500:
            deduplicating.admin("PUT", topic, "/unload")
        if number % 1000 == 700:
            cluster.close()
    producer.flush()
    assert [message.data() for message in received(deduplicating, topic, 3000)] == [
        b"%d" % number for number in range(3000)
    ]
    producer.close()
    successor = NumberedProducer(cluster, topic, "steady")
    assert successor.last_sequence_id == 2999
    cluster.close()


def test_a_micro_batch_that_is_run_again_stores_nothing_twice(
    deduplicating: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    """Spark forgets that a batch was committed, and so does it again."""
    topic, checkpoint, folder = (
        deduplicating.topic(partitions=2),
        tmp_path / "checkpoint",
        tmp_path / "rows",
    )
    write_files(folder, files=4, rows_each=500)

    def run() -> None:
        source = spark.readStream.schema(FILE_SCHEMA)
        frame = source.option("maxFilesPerTrigger", 1).parquet(str(folder))
        writer = frame.writeStream.format("ledgerlake").option(
            "service.url", deduplicating.service_url
        )
        writer = writer.option("topic", topic).option("checkpointLocation", str(checkpoint))
        assert writer.trigger(availableNow=True).start().awaitTermination(120)

    run()
    forget_last_commit(checkpoint)
    run()
    values = [
        message.data()
        for number in range(2)
        for message in received_all(deduplicating, f"{topic}-partition-{number}")
    ]
    assert sorted(values) == sorted(b"%07d" % number for number in range(2000))


FILE_SCHEMA = "value binary, key string, properties map<string,string>, event_time timestamp"


def write_files(folder: Path, files: int, rows_each: int) -> None:
    """Rows with numbers for values, in files for a file source."""
    folder.mkdir()
    for file in range(files):
        numbers = range(file * rows_each, (file + 1) * rows_each)
        table = pa.table(
            {
                "value": pa.array([b"%07d" % number for number in numbers]),
                "key": pa.array([f"k{number % 97}" if number % 3 else None for number in numbers]),
                "properties": pa.array(
                    [[("n", str(number))] for number in numbers], pa.map_(pa.string(), pa.string())
                ),
                "event_time": pa.array([AT] * rows_each, pa.timestamp("us", tz="UTC")),
            }
        )
        pq.write_table(table, folder / f"{file:05d}.parquet")


def received_all(runtime: Runtime, topic_partition: str) -> list[pulsar.Message]:
    reader = runtime.client().create_reader(topic_partition, pulsar.MessageId.earliest)
    messages = []
    while reader.has_message_available():
        messages.append(reader.read_next(10_000))
    reader.close()
    return messages


@pytest.mark.slow
@pytest.mark.long
def test_rows_go_through_a_topic_and_back_into_a_table_over_kills(
    deduplicating: Runtime, spark: SparkSession, tmp_path: Path, campaign_is_long: bool
) -> None:
    kills, files, rows_each = (10, 100, 10_000) if campaign_is_long else (1, 12, 10_000)
    seed = int(os.environ.get("LEDGERLAKE_SEED", "0")) or random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    topic, folder = deduplicating.topic(partitions=2), tmp_path / "rows"
    write_files(folder, files, rows_each)
    command = [
        sys.executable,
        "-m",
        "tests.live.sink_run",
        deduplicating.service_url,
        topic,
        str(folder),
    ]
    # Two files are a micro-batch; some are left for what runs after the last kill. Spark refuses a
    # checkpoint whose file source had begun when it was killed, but not the first micro-batch.
    kill_after = sorted(rng.sample(range(1, files // 2 - 3), kills))
    killed = 0
    while True:
        running = subprocess.Popen(
            [*command, str(tmp_path / "sink")], stdout=subprocess.PIPE, cwd=Path.cwd()
        )
        assert running.stdout is not None
        if killed == kills:
            assert running.wait(600) == 0
            break
        try:
            assert running.stdout.readline() == b"started\n"
            wait_for_commits(tmp_path / "sink", kill_after[killed], running)
            time.sleep(rng.uniform(0, 0.5))
            assert running.poll() is None, "all was sent before the last kill; give it more rows"
        finally:
            running.send_signal(signal.SIGKILL)
            running.wait()
        killed += 1
    run_once(spark, deduplicating.config(tmp_path, topic, name="back"))
    table = DeltaTable(str(tmp_path / "messages")).to_pyarrow_table(
        columns=["value", "key", "properties", "event_time"]
    )
    numbers = pc.cast(table["value"].cast(pa.string()), pa.int64()).to_pylist()
    print(f"{killed} kills, {len(numbers)} rows")
    assert sorted(numbers) == list(range(files * rows_each))
    for number, key, properties in zip(
        numbers, table["key"].to_pylist(), table["properties"].to_pylist(), strict=True
    ):
        assert key == (f"k{number % 97}" if number % 3 else None)
        assert properties == [("n", str(number))]
    assert pc.unique(table["event_time"]).to_pylist() == [AT]
