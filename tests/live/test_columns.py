"""Every column of the table against what pulsar-client sent and what the broker says of it."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pulsar
import pytest

from ledgerlake.inspect.peek import entry_line, peek
from ledgerlake.verify.verify import verify
from tests.live.pipelines import rows_by_position, run_once

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]

CODECS = ["NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY"]


def test_what_was_sent_is_what_stands_in_the_table(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    client = runtime.client()
    sent: list[tuple[Any, dict[str, Any]]] = []
    began_ms = int(time.time() * 1000) - 1000
    for codec in CODECS:
        for batched in (False, True):
            producer = client.create_producer(
                topic,
                producer_name=f"producer-{codec}-{batched}",
                compression_type=getattr(pulsar.CompressionType, codec),
                batching_enabled=batched,
                batching_max_publish_delay_ms=20,
            )
            for number in range(5):
                message = {
                    "content": f"{codec} {batched} {number} ".encode() * 300,
                    "properties": {"number": str(number), "näme": "ü"} if number else {},
                    "partition_key": f"key-{number}" if number else None,
                    "ordering_key": f"o{number}" if number == 2 else None,
                    "event_timestamp": 1_600_000_000_000 + number if number else None,
                    "deliver_at": began_ms if number == 3 and not batched else None,
                }
                arguments = dict(message)
                producer.send_async(
                    callback=lambda _result, _id: None,
                    **{k: v for k, v in arguments.items() if v is not None},
                )
                sent.append((f"producer-{codec}-{batched}", message))
            producer.flush()
            producer.close()
    config = run_once(spark, runtime.config(tmp_path, topic))
    rows = rows_by_position(config.delta.path)
    assert len(rows) == len(sent)
    for index, (row, (producer_name, message)) in enumerate(zip(rows, sent, strict=True)):
        assert row["topic"] == topic
        assert row["partition"] == -1
        assert row["producer_name"] == producer_name
        assert row["sequence_id"] == index % 5
        assert row["value"] == message["content"]
        assert row["properties"] == message["properties"]
        assert row["key"] == message["partition_key"]
        assert row["key_bytes"] is None
        assert (
            row["ordering_key"] == str(message["ordering_key"] or "").encode()
            or row["ordering_key"] is None
        )
        assert _milliseconds(row["event_time"]) == message["event_timestamp"]
        assert _milliseconds(row["deliver_at"]) == message["deliver_at"]
        assert (row["delivered_at"] is None) == (message["deliver_at"] is None)
        assert (row["chunk_count"], row["first_chunk_id"]) == (None, None)
        assert (row["is_null"], row["late"], row["schema_version"]) == (False, False, None)
        assert row["broker_index"] == index
        assert abs(row["broker_timestamp"] - row["publish_time"]) < timedelta(seconds=10)
        assert row["message_id"].split(":")[:2] == [str(row["ledger_id"]), str(row["entry_id"])]
        assert (row["batch_index"] >= 0) == (len(row["message_id"].split(":")) == 3)
    assert verify(config).clean
    for index in (0, 7, 23, len(rows) - 1):
        by_broker = runtime.entry_headers(topic, rows[index]["ledger_id"], rows[index]["entry_id"])
        last_of_entry = max(
            row["broker_index"] for row in rows if row["entry_id"] == rows[index]["entry_id"]
        )
        assert int(by_broker["X-Pulsar-Broker-Entry-METADATA-index"]) == last_of_entry
        told = _moment(by_broker["X-Pulsar-Broker-Entry-METADATA-timestamp"])
        assert told == rows[index]["broker_timestamp"].astimezone(timezone.utc)


def _moment(text: str) -> datetime:
    """Java's shortest form: no fraction where it is zero."""
    seconds_part, _, fraction = text.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{seconds_part}.{fraction:0<6}+00:00")


def _milliseconds(moment: Any) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


def test_schema_versions_and_ids_agree_with_the_client(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    producer = runtime.client().create_producer(
        topic, schema=pulsar.schema.StringSchema(), batching_enabled=False
    )
    ids = [producer.send(f"text {number}") for number in range(3)]
    config = run_once(spark, runtime.config(tmp_path, topic))
    rows = rows_by_position(config.delta.path)
    assert [(row["ledger_id"], row["entry_id"]) for row in rows] == [
        (message_id.ledger_id(), message_id.entry_id()) for message_id in ids
    ]
    assert [row["schema_version"] for row in rows] == [b"\0" * 8] * 3


def test_partitions_keep_their_order_and_their_number(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic(partitions=3)
    producer = runtime.client().create_producer(
        topic, batching_max_publish_delay_ms=5, block_if_queue_full=True
    )
    for number in range(3000):
        producer.send_async(
            b"%d" % number, lambda _result, _id: None, partition_key=f"k{number % 50}"
        )
    producer.flush()
    config = run_once(spark, runtime.config(tmp_path, topic))
    rows = rows_by_position(config.delta.path)
    assert len(rows) == 3000
    assert {row["partition"] for row in rows} == {0, 1, 2}
    for key in {row["key"] for row in rows}:
        values = [int(row["value"]) for row in rows if row["key"] == key]
        assert values == sorted(values)
    verdict = verify(config)
    assert (verdict.messages, verdict.clean) == (3000, True)


def test_peek_shows_the_brokers_own_metadata(runtime: Runtime) -> None:
    topic = runtime.topic()
    producer = runtime.client().create_producer(
        topic, producer_name="peeked", batching_enabled=False
    )
    for number in range(4):
        producer.send(b"%d" % number, partition_key="k")
    rows = list(peek(runtime.cluster().settings, topic, "earliest", 3))
    assert [row["broker_index"] for row in rows] == [0, 1, 2]
    line = entry_line(rows[1])
    assert "index 1" in line
    assert "by peeked #1" in line
    (last,) = peek(runtime.cluster().settings, topic, f"{rows[2]['ledger_id']}:3", 10)
    assert last["broker_index"] == 3
    assert [row["value"] for row in peek(runtime.cluster().settings, topic, "last", 2)] == [
        "2",
        "3",
    ]


def test_peek_shows_the_beginning_of_the_first_value_as_one_line(runtime: Runtime) -> None:
    topic = runtime.topic()
    producer = runtime.client().create_producer(
        topic, batching_enabled=False, compression_type=pulsar.CompressionType.ZSTD
    )
    for value in (b"two\nlines", b"x" * 1000, b"\xff\x00"):
        producer.send(value)
    lines = [entry_line(row) for row in peek(runtime.cluster().settings, topic, "earliest", 3)]
    assert lines[0].endswith(r"two\nlines")
    assert lines[1].endswith(" " + "x" * 80 + "...")
    assert all(line.isprintable() for line in lines)


def test_peek_tells_chunks_and_delayed_messages_from_others(runtime: Runtime) -> None:
    topic = runtime.topic()
    producer = runtime.client().create_producer(
        topic, batching_enabled=False, chunking_enabled=True
    )
    producer.send(b"later", deliver_at=1_900_000_000_000)
    producer.send(bytes(6 * 1024 * 1024))
    delayed, first, second = (
        entry_line(row) for row in peek(runtime.cluster().settings, topic, "earliest", 3)
    )
    assert "single due 2030-03-17T17:46:40.000Z" in delayed
    assert "chunk 0 of 2" in first
    assert "chunk 1 of 2" in second
