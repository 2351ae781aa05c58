"""Large messages (PIP-37): chunks of a real broker's topic become whole messages in the table, or
rows in ``rejects``.
"""

from __future__ import annotations

import hashlib
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
from deltalake.exceptions import TableNotFoundError

from ledgerlake.api import messages, rejects, run
from ledgerlake.inspect.incomplete_messages import incomplete_messages
from ledgerlake.options.config import parse_config
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.publish.large_messages import LargeMessageProducer
from ledgerlake.verify.verify import Verdict, verify
from ledgerlake.wire.message_id import ChunkMessageId, from_bytes, to_bytes
from tests.chunks import chunk_entries
from tests.live.pipelines import backlog, publish_entries, rejects_rows, run_once, small, table_rows
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]


def read_with_pulsar_client(runtime: Runtime, topic: str) -> Iterator[Any]:
    import pulsar

    reader = runtime.client().create_reader(topic, pulsar.MessageId.earliest)
    while reader.has_message_available():
        yield reader.read_next(10_000)
    reader.close()


def drained(frame: DataFrame, checkpoint: Path) -> list[bytes]:
    """Values that a stream brings until there are no more, in the order of their positions."""
    rows: list[Any] = []
    query = (
        frame.select("ledger_id", "entry_id", "value")
        .writeStream.foreachBatch(lambda batch, _: rows.extend(batch.collect()))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return [bytes(row.value) for row in sorted(rows, key=lambda row: (row.ledger_id, row.entry_id))]


def rejected(folder: Path) -> list[tuple[str, int]]:
    try:
        rows = rejects_rows(folder)
    except TableNotFoundError:
        return []
    return sorted((row["reason"], row["entry_id"]) for row in rows)


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
    # Waiting for the query as well, so that its failure is told at once.
    wait_until(lambda: pipeline.wait(0.1) or sum(result.messages for result in results) >= 32)
    pipeline.stop()
    pipeline.close()
    rows_by_hash = hashes(tmp_path)
    assert rows_by_hash.keys() == sent.keys()
    assert len(table_rows(tmp_path)) == 32
    for name, message_id in sent.items():
        row = rows_by_hash[name]
        if isinstance(message_id, ChunkMessageId):
            assert row["first_chunk_id"] == str(message_id.first)
            assert row["message_id"] == str(message_id.last)
            assert row["chunk_count"] > 1
        else:
            assert (row["message_id"], row["chunk_count"], row["first_chunk_id"]) == (
                str(message_id),
                None,
                None,
            )
    assert verify(config).clean
    assert sum(isinstance(sent_id, ChunkMessageId) for sent_id in sent.values()) >= 8


def test_a_message_that_spans_runs_is_held_in_state_and_pinned_on_the_broker(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    payload = random.Random(1).randbytes(3_000_000)
    entries = chunk_entries(payload, 6)
    data = runtime.config(tmp_path, topic)
    publish_entries(runtime, topic, [small(b"before"), *entries[:3]])
    config = run_once(spark, data)
    (incomplete,) = incomplete_messages(spark, config)
    assert (incomplete.uuid, incomplete.present, incomplete.missing) == ("p-1", 3, 3)
    # The broker stores its own metadata with each entry.
    assert 0 < incomplete.kept_bytes - sum(map(len, entries[:3])) < 300
    assert backlog(runtime, topic) == 3
    assert verify(config).incomplete_chunks == 3
    publish_entries(runtime, topic, [*entries[3:], small(b"behind")])
    config = run_once(spark, data)
    before, large, behind = table_rows(tmp_path)
    assert (before["value"], behind["value"]) == (b"before", b"behind")
    assert (large["value"], large["chunk_count"]) == (payload, 6)
    assert incomplete_messages(spark, config) == []
    assert backlog(runtime, topic) == 0
    assert verify(config) == Verdict(messages=3)


def test_one_pending_set_is_enough_for_three_interleaved_messages(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    payloads = [random.Random(seed).randbytes(1_000_000) for seed in range(3)]
    sets = [
        chunk_entries(payload, 4, uuid=f"p{number}-1", producer_name=f"p{number}")
        for number, payload in enumerate(payloads)
    ]
    data = runtime.config(tmp_path, topic) | {"chunks": {"max_pending": 1}}
    for step in zip(*sets):
        publish_entries(runtime, topic, list(step))
        config = run_once(spark, data)
    assert [row["value"] for row in table_rows(tmp_path)] == payloads
    assert rejected(tmp_path) == []
    assert verify(config) == Verdict(messages=3)


def test_a_set_that_stays_open_expires_also_on_an_idle_topic(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_entries(runtime, topic, chunk_entries(b"x" * 100, 3)[:2])
    config = parse_config(
        runtime.config(tmp_path, topic) | {"chunks": {"expire_after": "2 seconds"}}
    )
    pipeline = run(spark, config)
    wait_until(lambda: len(rejected(tmp_path)) == 2)
    batches = pipeline.query.lastProgress.batchId if pipeline.query else 0
    pipeline.wait(1.0)
    assert pipeline.query is not None
    assert pipeline.query.lastProgress.batchId <= batches + 1
    pipeline.stop()
    pipeline.close()
    assert rejected(tmp_path) == [("chunk_expired", 0), ("chunk_expired", 1)]
    assert rejects_rows(tmp_path)[0]["entry"].endswith(b"x" * 34)
    assert backlog(runtime, topic) == 0
    assert verify(config).clean


def test_what_claims_too_much_or_nonsense_is_rejected_and_the_stream_goes_on(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    odd_fields: list[dict[str, Any]] = [
        {"total_chunk_msg_size": 2**31 - 1},
        {"chunk_id": 7},
        {"chunk_id": -1},
        {"total_chunk_msg_size": -5},
        {"num_chunks_from_msg": 2**31 - 1, "chunk_id": 0},
    ]
    entries = [
        chunk_entries(b"x" * 100, 2, uuid=f"odd-{number}", **fields)[0]
        for number, fields in enumerate(odd_fields)
    ]
    halves = [chunk_entries(b"y" * 20, 2, uuid=f"open-{number}") for number in range(12_000)]
    open_sets = [first for first, _ in halves]
    publish_entries(
        runtime,
        topic,
        [*entries, *open_sets, *chunk_entries(b"good" * 500, 3, uuid="good"), small(b"end")],
    )
    config = run_once(spark, runtime.config(tmp_path, topic))
    good, end = table_rows(tmp_path)
    assert (good["value"], end["value"]) == (b"good" * 500, b"end")
    reasons_and_entries = rejected(tmp_path)
    assert [
        reason
        for reason, entry in sorted(reasons_and_entries, key=lambda reject: reject[1])
        if entry < 5
    ] == [
        "too_large",
        "chunk_invalid",
        "chunk_invalid",
        "chunk_invalid",
        "too_large",
    ]
    limits = config.chunks.limits
    evicted = [entry for reason, entry in reasons_and_entries if reason == "chunk_evicted"]
    assert len(evicted) == 12_000 + 1 - limits.max_pending - limits.max_spilled
    publish_entries(runtime, topic, [halves[-1][1], small(b"more")])
    run_once(spark, runtime.config(tmp_path, topic))
    assert [row["value"] for row in table_rows(tmp_path)][2:] == [b"y" * 20, b"more"]


@pytest.fixture
def large_and_small(runtime: Runtime) -> tuple[str, list[Any]]:
    """A topic with small, large, small, large, small; and the ids that pulsar-client gave them."""
    topic = runtime.topic()
    producer = runtime.client().create_producer(
        topic, chunking_enabled=True, batching_enabled=False
    )
    ids = [
        producer.send(value)
        for value in (b"s0", b"l1" * 6_000_000, b"s2", b"l3" * 6_000_000, b"s4")
    ]
    producer.close()
    return topic, ids


@pytest.mark.parametrize(
    ("form", "expected", "orphans"),
    [
        pytest.param(str, ["l1", "s2", "l3", "s4"], 0, id="at a large message"),
        pytest.param(
            lambda message_id: f"after {message_id}",
            ["s2", "l3", "s4"],
            0,
            id="after a large message",
            marks=pytest.mark.long,
        ),
        pytest.param(
            lambda message_id: str(message_id.first),
            ["l1", "s2", "l3", "s4"],
            0,
            id="at the plain id of its first chunk",
            marks=pytest.mark.long,
        ),
        pytest.param(
            lambda message_id: f"after {message_id.first}",
            ["s2", "l3", "s4"],
            2,
            id="after its first chunk",
            marks=pytest.mark.long,
        ),
        pytest.param(
            lambda message_id: str(message_id.last),
            ["s2", "l3", "s4"],
            1,
            id="at the plain id of its last chunk",
        ),
        pytest.param(
            lambda message_id: f"after {message_id.last}",
            ["s2", "l3", "s4"],
            0,
            id="after its last chunk",
            marks=pytest.mark.long,
        ),
        pytest.param(
            lambda message_id: to_bytes(message_id).hex(),
            ["l1", "s2", "l3", "s4"],
            0,
            id="serialised",
        ),
    ],
)
def test_a_start_at_a_large_message(
    runtime: Runtime,
    spark: SparkSession,
    tmp_path: Path,
    large_and_small: tuple[str, list[Any]],
    form: Any,
    expected: list[str],
    orphans: int,
) -> None:
    topic, ids = large_and_small
    large = from_bytes(ids[1].serialize())
    assert isinstance(large, ChunkMessageId)
    config = run_once(spark, runtime.config(tmp_path, topic, starting=form(large)))
    assert [row["value"][:2].decode() for row in table_rows(tmp_path)] == expected
    assert [reason for reason, _ in rejected(tmp_path)] == ["chunk_orphan"] * orphans
    assert verify(config).clean


def test_the_very_bytes_that_pulsar_client_serialises_are_a_start(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, large_and_small: tuple[str, list[Any]]
) -> None:
    topic, ids = large_and_small
    run_once(spark, runtime.config(tmp_path, topic, starting=ids[3].serialize().hex()))
    assert [row["value"][:2] for row in table_rows(tmp_path)] == [b"l3", b"s4"]


def test_several_readers_of_one_partition_bring_all_chunks_of_a_message_together(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    rng = random.Random(5)
    payloads = [rng.randbytes(rng.randint(50_000, 400_000)) for _ in range(12)]
    chunk_sets = [
        chunk_entries(payload, 6, uuid=f"p{number}-0", producer_name=f"p{number}")
        for number, payload in enumerate(payloads)
    ]
    entries: list[bytes] = []
    while any(chunk_sets):
        entries.append(rng.choice([chunks for chunks in chunk_sets if chunks]).pop(0))
        entries += [small(b"small")] * rng.randint(0, 2)
    publish_entries(runtime, topic, entries)
    config = run_once(spark, runtime.config(tmp_path, topic, min_partitions=4))
    rows = table_rows(tmp_path)
    assert sorted(row["value"] for row in rows if row["chunk_count"]) == sorted(payloads)
    assert verify(config) == Verdict(messages=len(rows))
    in_file_order = [row for row in rows if not row["late"]]
    assert len(in_file_order) == len(entries) - 12 * 5


def test_a_marker_brings_a_large_message_to_a_query_that_began_in_its_middle(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    values = [random.Random(seed).randbytes(1_000_000) for seed in (1, 2)]
    cluster = runtime.cluster()
    producer = LargeMessageProducer(cluster, topic, codec=pb.LZ4, chunk_bytes=200_000)
    ids = [producer.send(value, key="k", properties={"a": "b"}) for value in values]
    plain = producer.send(b"small")
    producer.close()
    cluster.close()
    assert isinstance(ids[0], ChunkMessageId)
    middle = f"after {ids[0].first}"
    run_once(spark, runtime.config(tmp_path / "middle", topic, starting=middle))
    run_once(spark, runtime.config(tmp_path / "whole", topic, name="whole"))
    for folder in ("middle", "whole"):
        rows = table_rows(tmp_path / folder)
        assert [row["value"] for row in rows] == [*values, b"small"]
        last: list[Any] = [ids[0], ids[1]]
        assert [row["message_id"] for row in rows] == [*(str(one.last) for one in last), str(plain)]
        assert (rows[0]["key"], dict(rows[0]["properties"])["a"]) == ("k", "b")
        assert rejected(tmp_path / folder) == []
    received = list(read_with_pulsar_client(runtime, topic))
    assert [
        message.data()
        for message in received
        if "ledgerlake.chunks" not in message.properties() or message.data() in values
    ] == [
        *values,
        b"small",
    ]


def test_messages_for_other_sinks_are_whole_too(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    payload = random.Random(3).randbytes(500_000)
    entries = chunk_entries(payload, 5, codec=pb.ZSTD)
    config = parse_config(runtime.config(tmp_path, topic))
    publish_entries(runtime, topic, [small(b"one"), *entries[:2]])
    assert drained(messages(spark, config), tmp_path / "m") == [b"one"]
    publish_entries(runtime, topic, [*entries[2:], small(b"two"), entries[4]])
    assert drained(messages(spark, config), tmp_path / "m") == [payload, b"two"]
    assert len(drained(rejects(spark, config), tmp_path / "r")) == 1
