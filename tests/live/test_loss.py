"""Loss, told apart from holes on a real topic: what retention took, a topic made anew,
transactions, chunks.
"""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from ledgerlake.client.reader import EntryReader
from ledgerlake.devbroker.standalone import distribution
from ledgerlake.errors import DataLossError
from ledgerlake.runtime.java import find_java
from ledgerlake.source.bounds import first_available
from tests.chunks import chunk_entries
from tests.live.pipelines import publish_entries, rejects_rows, run_once, small, table_rows, values
from tests.live.runtime import Runtime, start_runtime
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.live, pytest.mark.spark]


@pytest.fixture(scope="module")
def trimming(runtime: Runtime) -> Runtime:
    """Topics whose broker removes all ledgers that no cursor pins."""
    return runtime.trimming()


def send(runtime: Runtime, topic: str, values: range) -> None:
    producer = runtime.client().create_producer(topic, batching_enabled=False)
    for value in values:
        producer.send_async(b"%d" % value, lambda *_: None)
    producer.flush()
    producer.close()


def begin_another_ledger(runtime: Runtime, topic: str) -> None:
    runtime.admin("PUT", topic, "/unload")
    time.sleep(0.5)


def trim(runtime: Runtime, topic: str) -> None:
    """Forget the pipeline's cursor and let the broker remove every ledger that is full."""
    for name in [
        subscription
        for subscription in runtime.admin("GET", topic, "/subscriptions")
        if subscription.startswith("ledgerlake-test")
    ]:
        runtime.admin("DELETE", topic, f"/subscription/{name}?force=true")
    before = runtime.first_ledger(topic)
    begin_another_ledger(runtime, topic)
    runtime.admin("DELETE", topic, "/truncate")
    wait_until(lambda: runtime.first_ledger(topic) > before)


def test_what_retention_took_from_a_paused_pipeline_is_named_with_its_range(
    trimming: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = trimming.topic()
    send(trimming, topic, range(10))
    data = trimming.config(tmp_path, topic, ending="index 5")
    run_once(spark, data)
    assert values(tmp_path) == list(range(6))
    trim(trimming, topic)
    send(trimming, topic, range(10, 15))
    del data["source"]["ending"]
    with pytest.raises(
        DataLossError, match=r"at most 4 messages after \d+:5 and before .* are lost"
    ):
        run_once(spark, data)
    assert values(tmp_path) == list(range(6))
    data["source"]["fail_on_data_loss"] = False
    run_once(spark, data)
    assert values(tmp_path) == [*range(6), *range(10, 15)]
    (lost,) = rejects_rows(tmp_path)
    assert (lost["reason"], lost["entry_id"]) == ("data_loss", 6)
    assert "at most 4 messages" in lost["detail"]
    send(trimming, topic, range(15, 17))
    run_once(spark, data)
    assert values(tmp_path) == [*range(6), *range(10, 17)]
    assert len(rejects_rows(tmp_path)) == 1


def test_ledgers_that_went_after_they_were_read_are_no_loss(
    trimming: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = trimming.topic()
    data = trimming.config(tmp_path, topic)
    for first in (0, 10, 20):
        send(trimming, topic, range(first, first + 10))
        run_once(spark, data)
        trim(trimming, topic)
    send(trimming, topic, range(30, 35))
    run_once(spark, data)
    assert values(tmp_path) == list(range(35))
    assert rejects_rows(tmp_path) == []


def test_a_topic_that_was_deleted_and_created_again_is_named_so(
    trimming: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = trimming.topic()
    send(trimming, topic, range(10))
    data = trimming.config(tmp_path, topic)
    run_once(spark, data)
    trimming.admin("DELETE", topic, "?force=true")
    trimming.admin("PUT", topic)
    send(trimming, topic, range(100, 105))
    with pytest.raises(DataLossError, match="the topic was deleted and created again"):
        run_once(spark, data)
    data["source"]["fail_on_data_loss"] = False
    run_once(spark, data)
    assert values(tmp_path) == [*range(10), *range(100, 105)]
    assert [row["reason"] for row in rejects_rows(tmp_path)] == ["data_loss"]


def test_a_start_that_the_topic_no_longer_has_is_loss_and_earliest_is_not(
    trimming: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = trimming.topic()
    send(trimming, topic, range(10))
    cluster = trimming.cluster()
    reader = EntryReader(cluster, topic, first_available(cluster, topic))
    first = reader.next(10)
    reader.close()
    cluster.close()
    assert first is not None
    trim(trimming, topic)
    send(trimming, topic, range(10, 12))
    options = {"service.url": trimming.service_url, "topic": topic}
    starting = f"{first.ledger_id}:{first.entry_id + 3}"
    with pytest.raises(Exception, match="an unknown number of messages after"):
        spark.read.format("ledgerlake").options(
            **options, startingOffsets=starting
        ).load().collect()
    assert spark.read.format("ledgerlake").options(**options).load().count() == 2
    data = trimming.config(tmp_path, topic, starting=starting)
    with pytest.raises(DataLossError, match="no longer has the messages to start at"):
        run_once(spark, data)
    data["source"]["fail_on_data_loss"] = False
    run_once(spark, data)
    assert values(tmp_path) == [10, 11]
    assert [row["reason"] for row in rejects_rows(tmp_path)] == ["data_loss"]
    send(trimming, topic, range(12, 14))
    run_once(spark, data)
    assert values(tmp_path) == [10, 11, 12, 13]
    assert len(rejects_rows(tmp_path)) == 1


def test_a_topic_of_which_every_ledger_was_trimmed_has_no_messages(
    trimming: Runtime, spark: SparkSession
) -> None:
    topic = trimming.topic()
    send(trimming, topic, range(5))
    trim(trimming, topic)
    options = {"service.url": trimming.service_url, "topic": topic}
    assert spark.read.format("ledgerlake").options(**options).load().count() == 0


def test_chunks_holes_and_ledgers_between_are_no_loss(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic)
    first_chunks, second_chunks = (
        chunk_entries(b"a" * 1000, 4, uuid="one"),
        chunk_entries(b"b" * 1000, 4, uuid="other"),
    )
    publish_entries(
        runtime, topic, [small(b"0"), first_chunks[0], second_chunks[0], first_chunks[1]]
    )
    run_once(spark, data)
    begin_another_ledger(runtime, topic)
    publish_entries(
        runtime, topic, [second_chunks[1], first_chunks[2], second_chunks[2], small(b"1")]
    )
    begin_another_ledger(runtime, topic)
    publish_entries(runtime, topic, [first_chunks[3], second_chunks[3]])
    run_once(spark, data)
    assert sorted(row["value"][:1] for row in table_rows(tmp_path)) == [b"0", b"1", b"a", b"b"]
    assert rejects_rows(tmp_path) == []


@pytest.fixture(scope="module")
def transactional() -> Iterator[Runtime]:
    settings = {"transactionCoordinatorEnabled": "true", "systemTopicEnabled": "true"}
    with start_runtime(broker_metadata=True, settings=settings) as running:
        yield running


def transact(runtime: Runtime, topic: str, *, abort: bool) -> None:
    """Three transactions of messages, by Pulsar's own tool, since pulsar-client for Python has
    none.
    """
    home, other = distribution(), runtime.topic(partitions=1)
    command = [
        find_java(),
        "-cp",
        f"{home}/conf:{home}/lib/*",
        "--add-opens",
        "java.base/java.nio=ALL-UNNAMED",
    ]
    command += [
        "--add-opens",
        "java.base/jdk.internal.misc=ALL-UNNAMED",
        "-Dio.netty.tryReflectionSetAccessible=true",
    ]
    command += [
        "org.apache.pulsar.testclient.PulsarPerfTestTool",
        f"{home}/conf/client.conf",
        "transaction",
    ]
    command += [
        "-u",
        runtime.service_url,
        "-au",
        runtime.admin_url,
        "--topics-p",
        topic,
        "--topics-c",
        other,
    ]
    command += ["-np", "1", "-threads", "1", "-nmp", "5", "-nmc", "0", "-ntxn", "3"] + [
        "-abort"
    ] * abort
    subprocess.run(command, check=True, capture_output=True, timeout=120)


@pytest.mark.long
def test_aborted_transactions_and_markers_are_no_loss(
    transactional: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = transactional.topic(partitions=1)
    data = transactional.config(tmp_path, topic)
    partition = f"{topic}-partition-0"
    transact(transactional, topic, abort=False)
    run_once(spark, data)
    committed = len(table_rows(tmp_path))
    assert committed > 0
    transact(transactional, topic, abort=True)
    begin_another_ledger(transactional, partition)
    transact(transactional, topic, abort=True)
    run_once(spark, data)
    assert len(table_rows(tmp_path)) == committed
    begin_another_ledger(transactional, partition)
    transact(transactional, topic, abort=False)
    run_once(spark, data)
    rows = table_rows(tmp_path)
    assert len(rows) > committed
    assert len({row["ledger_id"] for row in rows}) > 1
    numbers = sorted({row["broker_index"] for row in rows})
    assert numbers[0] == 0
    assert numbers[-1] + 1 > len(numbers)
    assert rejects_rows(tmp_path) == []
