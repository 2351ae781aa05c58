"""A restart with very many messages waiting: soon at work again, and without reading the topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from ledgerlake.client.producer import EntryProducer
from ledgerlake.inspect.delayed_counts import delayed_counts
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.entry import encode_entry
from tests.live.pipelines import now_ms, run_once, running
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark, pytest.mark.slow]


def publish_waiting(runtime: Runtime, topic: str, count: int, due_ms: int, gap_ms: int) -> None:
    """Publish delayed messages: the first is due at ``due_ms``, and then one every ``gap_ms``."""
    cluster = runtime.cluster()
    producer = EntryProducer(cluster, topic)
    metadata = pb.MessageMetadata(producer_name=producer.name, sequence_id=0, publish_time=now_ms())
    for number in range(count):
        metadata.deliver_at_time = due_ms + gap_ms * ((number * 7919) % count)
        producer.send(encode_entry(metadata, b"%-100d" % number))
    producer.close()
    cluster.close()


def sent_by_broker(runtime: Runtime, topic: str) -> int:
    """Messages that the broker has sent to anyone."""
    return int(runtime.admin("GET", topic, "/stats")["msgOutCounter"])


def rows(folder: Path) -> int:
    return int(
        DeltaTable(str(folder / "messages")).to_pyarrow_table(columns=["ledger_id"]).num_rows
    )


def test_a_restart_reads_at_most_the_last_entry_again_and_delivers_soon(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, campaign_is_long: bool
) -> None:
    # The last message is due after minutes, so that a slow machine finds some waiting.
    count, gap_ms = (1_000_000, 10) if campaign_is_long else (2_000, 100)
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic)
    data["stream"]["trigger"] = "1 second"
    due_ms = now_ms() + (240_000 if campaign_is_long else 20_000)
    publish_waiting(runtime, topic, count, due_ms, gap_ms)
    config = run_once(spark, data)
    delivered = rows(tmp_path)
    assert (
        sum(partition.delayed for partition in delayed_counts(spark, config))
        == count - delivered
        > 0
    )
    before = sent_by_broker(runtime, topic)
    began_ms = now_ms()
    with running(spark, data):
        wait_until(lambda: rows(tmp_path) > delivered)
        took_ms = now_ms() - began_ms
    sent_again = sent_by_broker(runtime, topic) - before
    print(
        f"{count:,} waiting: first due message in the table after {took_ms:,} ms; the broker sent "
        f"{sent_again} entries"
    )
    # The entry at the position of the checkpoint shows that the topic is the one that was read.
    assert sent_again <= 1
