"""Large messages (PIP-37): chunks of a real broker's topic become whole messages in the table, or rows in ``rejects``."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from ledgerlake.client.producer import EntryProducer
from ledgerlake.query import run
from ledgerlake.query.config import parse_config
from ledgerlake.query.verify import verify
from ledgerlake.wire.message_id import ChunkMessageId, from_bytes
from tests.chunks import chunk_entries
from tests.live.test_columns import run_once

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]


def publish_entries(runtime: Runtime, topic: str, entries: list[bytes]) -> None:
    cluster = runtime.cluster()
    producer = EntryProducer(cluster, topic)
    for entry in entries:
        producer.send(entry)
    producer.close()
    cluster.close()


def table_rows(folder: Path) -> list[dict[str, Any]]:
    return DeltaTable(str(folder / "messages")).to_pyarrow_table().to_pylist()


def rejected(folder: Path) -> list[tuple[str, int]]:
    table = DeltaTable(str(folder / "rejects")).to_pyarrow_table()
    return sorted(zip(table["reason"].to_pylist(), table["entry_id"].to_pylist(), strict=True))


def hashes(folder: Path) -> dict[str, Any]:
    """Rows by their value's hash."""
    rows = table_rows(folder)
    return {hashlib.sha256(row["value"]).hexdigest(): row for row in rows}


def test_messages_of_all_sizes_and_codecs_from_eight_producers_arrive_whole_and_in_order(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    import pulsar

    topic = runtime.topic()
    sent: dict[str, Any] = {}
    codecs = [
        pulsar.CompressionType.NONE,
        *(getattr(pulsar.CompressionType, name) for name in ("LZ4", "ZLib", "ZSTD", "SNAPPY")),
    ]

    def produce(number: int) -> None:
        rng = random.Random(number)
        producer = runtime.client().create_producer(
            topic,
            chunking_enabled=True,
            batching_enabled=False,
            compression_type=codecs[number % len(codecs)],
            block_if_queue_full=True,
        )
        for size in [
            rng.randint(1024, 40 * 1024 * 1024),
            100,
            rng.randint(1024, 12 * 1024 * 1024),
            rng.randint(1024, 100_000),
        ]:
            half = rng.randbytes(size // 2)
            value = half + half[: size - len(half)].ljust(size - len(half), b"x")
            sent[hashlib.sha256(value).hexdigest()] = from_bytes(producer.send(value).serialize())
        producer.close()

    config = parse_config(runtime.config(tmp_path, topic))
    results: list[Any] = []
    pipeline = run(spark, config, on_batch=results.append)
    threads = [threading.Thread(target=produce, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 120
    while sum(result.messages for result in results) < 32 and time.monotonic() < deadline:
        pipeline.wait(0.2)
    pipeline.stop()
    pipeline.close()
    found = hashes(tmp_path)
    assert found.keys() == sent.keys()
    assert len(table_rows(tmp_path)) == 32
    for name, message_id in sent.items():
        row = found[name]
        if isinstance(message_id, ChunkMessageId):
            assert row["first_chunk_id"] == str(message_id.first)
            assert row["message_id"] == str(message_id.last)
            assert row["chunk_count"] > 1
        else:
            assert (row["message_id"], row["chunk_count"], row["first_chunk_id"]) == (str(message_id), None, None)
    assert verify(config).clean
    assert sum(isinstance(one, ChunkMessageId) for one in sent.values()) >= 8


def test_a_message_that_spans_runs_is_held_in_state_and_not_read_again(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    payload = random.Random(1).randbytes(3_000_000)
    entries = chunk_entries(payload, 6)
    publish_entries(runtime, topic, entries[:3])
    run_once(spark, runtime.config(tmp_path, topic))
    publish_entries(runtime, topic, entries[3:])
    run_once(spark, runtime.config(tmp_path, topic))
    (row,) = table_rows(tmp_path)
    assert row["value"] == payload
    assert row["chunk_count"] == 6
