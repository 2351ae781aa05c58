"""Encrypted topics, written by pulsar-client in every combination, for us, for others, and for
both.
"""

from __future__ import annotations

import hashlib
import random
import time
from typing import TYPE_CHECKING, Any

import pulsar
import pytest

from ledgerlake.errors import DecryptionError
from ledgerlake.verify.verify import verify
from tests.encryption import crypto_key_reader
from tests.live.pipelines import rejects_rows, run_once, table_rows

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]

CODECS = ["NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY"]
SHAPES: dict[str, dict[str, Any]] = {
    "single": {"batching_enabled": False},
    "batched": {"batching_enabled": True, "batching_max_publish_delay_ms": 50},
    "chunked": {"batching_enabled": False, "chunking_enabled": True},
}


def publish(
    runtime: Runtime, topic: str, folder: Path, key: str, codec: str, shape: str
) -> list[bytes]:
    """Some messages encrypted for a key; what they are."""
    rng = random.Random(f"{key} {codec} {shape}")
    sizes = [6_000_000, 12_000_000] if shape == "chunked" else [10, 5000, 50_000]
    values = [rng.randbytes(size // 2) + bytes(size // 2) for size in sizes]
    producer = runtime.client().create_producer(
        topic,
        compression_type=getattr(pulsar.CompressionType, codec),
        encryption_key=key,
        crypto_key_reader=crypto_key_reader(folder, key),
        **SHAPES[shape],
    )
    for value in values:
        producer.send_async(value, lambda *_: None, partition_key="k", properties={"codec": codec})
    producer.flush()
    producer.close()
    return values


def digests(values: list[bytes]) -> list[bytes]:
    return sorted(hashlib.sha256(value).digest() for value in values)


def test_messages_for_our_keys_are_read_and_those_for_others_are_rejects(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    topic = runtime.topic()
    values: list[bytes] = []
    for codec in CODECS:
        for shape in SHAPES:
            for key in ("first", "second"):
                values += publish(runtime, topic, ours, key, codec, shape)
    foreign = [
        value
        for shape in SHAPES
        for value in publish(runtime, topic, theirs, "third", "LZ4", shape)
    ]
    plain = runtime.client().create_producer(topic)
    plain.send(b"not encrypted")
    data = runtime.config(tmp_path, topic, crypto_key_folder=str(ours))
    config = run_once(spark, data)
    rows = table_rows(tmp_path)
    assert digests([row["value"] for row in rows]) == digests([*values, b"not encrypted"])
    assert {row["key"] for row in rows if row["value"] != b"not encrypted"} == {"k"}
    rejects = rejects_rows(tmp_path)
    assert {row["reason"] for row in rejects} == {"undecryptable"}
    # A batch is one entry.
    assert len(rejects) >= len(foreign) - 2
    assert verify(config).clean
    data = runtime.config(
        tmp_path / "passed",
        topic,
        name="passed",
        crypto_key_folder=str(ours),
        crypto_failure_action="pass",
    )
    run_once(spark, data)
    passed = table_rows(tmp_path / "passed")
    opaque = [row for row in passed if "ledgerlake.encrypted_for" in dict(row["properties"])]
    assert {dict(row["properties"])["ledgerlake.encrypted_for"] for row in opaque} == {"third"}
    assert len(passed) == len(rows) + len(opaque)
    assert rejects_rows(tmp_path / "passed") == []
    data = runtime.config(tmp_path / "failed", topic, name="failed", crypto_failure_action="fail")
    with pytest.raises(DecryptionError, match="the entry is encrypted"):
        run_once(spark, data)


@pytest.mark.long
def test_an_encrypted_delayed_message_is_opened_when_it_is_due(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    producer = runtime.client().create_producer(
        topic,
        batching_enabled=False,
        encryption_key="first",
        crypto_key_reader=crypto_key_reader(tmp_path, "first"),
    )
    due_ms = int(time.time() * 1000) + 20_000
    producer.send(b"later", deliver_at=due_ms)
    data = runtime.config(tmp_path, topic, crypto_key_folder=str(tmp_path))
    run_once(spark, data)
    assert table_rows(tmp_path) == []
    time.sleep(max(due_ms / 1000 - time.time(), 0) + 0.5)
    run_once(spark, data)
    (row,) = table_rows(tmp_path)
    assert (row["value"], row["delivered_at"] >= row["deliver_at"]) == (b"later", True)
