"""Compacted topics (PIP-429): their ends, their remaining messages, and new messages after that."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pulsar
import pytest

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.cursor import DurableCursor
from ledgerlake.client.producer import EntryProducer
from ledgerlake.client.reader import EntryReader
from ledgerlake.decode.crypto import CryptoSettings
from ledgerlake.options.read_settings import ReadSettings
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source.bounds import latest_offset
from ledgerlake.source.planning import entry_range
from ledgerlake.source.topic_end import last_message
from ledgerlake.source.views import read_messages
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.verify.verify import verify
from ledgerlake.wire.entry import encode_entry, parse_entry
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, MessageId, Position
from tests.encryption import crypto_key_reader
from tests.live.pipelines import forget_last_commit, run_once, table_rows
from tests.peer import TOPIC, Peer
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ledgerlake.wire.connection import EntryReceived
    from tests.live.runtime import Runtime

pytestmark = pytest.mark.live

CODECS = ["NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY"]
EACH = [(codec, batched) for codec in CODECS for batched in (False, True)]


class Topic:
    """A topic with one producer of keyed messages; each call of ``send`` is one batch where it
    batches.
    """

    def __init__(self, runtime: Runtime, codec: str = "NONE", *, batched: bool = True) -> None:
        self.name = runtime.topic()
        self._runtime = runtime
        self._producer = runtime.client().create_producer(
            self.name,
            compression_type=getattr(pulsar.CompressionType, codec),
            batching_enabled=batched,
            batching_max_publish_delay_ms=500,
        )

    def send(self, *messages: tuple[str | None, bytes]) -> list[MessageId]:
        """Publish keys with values; the ids that the broker gave."""
        ids: list[Any] = []
        for key, value in messages:
            keyed = {} if key is None else {"partition_key": key}
            self._producer.send_async(
                value, lambda _result, message_id: ids.append(message_id), **keyed
            )
        self._producer.flush()
        wait_until(lambda: len(ids) == len(messages))
        return [
            MessageId(message_id.ledger_id(), message_id.entry_id(), message_id.batch_index())
            for message_id in ids
        ]

    def tombstone(self, key: str) -> MessageId:
        """A message without a value, as Java's ``value(null)`` sends it."""
        cluster = self._runtime.cluster()
        producer = EntryProducer(cluster, self.name)
        metadata = pb.MessageMetadata(
            producer_name="t", sequence_id=1, publish_time=int(time.time() * 1000)
        )
        metadata.partition_key, metadata.null_value = key, True
        metadata.uncompressed_size = 0
        (position,) = producer.send_and_wait([encode_entry(metadata, b"")])
        cluster.close()
        return MessageId(position.ledger_id, position.entry_id)

    def compact(self) -> None:
        self._runtime.admin("PUT", self.name, "/compaction")
        wait_until(
            lambda: self._runtime.admin("GET", self.name, "/compaction")["status"] != "RUNNING"
        )
        assert self._runtime.admin("GET", self.name, "/compaction")["status"] == "SUCCESS"


def compacted(runtime: Runtime) -> Cluster:
    return Cluster(replace(runtime.cluster().settings, read_compacted=True))


def end_of(runtime: Runtime, topic: str) -> MessageId | None:
    cluster = compacted(runtime)
    reader = EntryReader(cluster, topic, AFTER_ALL)
    try:
        return last_message(reader)
    finally:
        cluster.close()


def rows_of(runtime: Runtime, topic: str) -> list[tuple[str | None, bytes]]:
    """Keys and values of a compacted read up to its end."""
    options = parse_options(
        {"service.url": runtime.service_url, "topic": topic, "readCompacted": "true"}
    )
    cluster = Cluster(options.client)
    try:
        span = entry_range(topic, PartitionOffset(BEFORE_ALL), latest_offset(cluster, topic))
        rows = [row for part in read_messages(options, span) for row in part.to_pylist()]
        return [(row["key"], row["value"]) for row in rows]
    finally:
        cluster.close()


def seen_by_pulsar_client(runtime: Runtime, topic: str) -> list[tuple[str | None, bytes]]:
    """The same by pulsar-client, which hands out the emptied slots of a batch as well."""
    reader = runtime.client().create_reader(
        topic, pulsar.MessageId.earliest, is_read_compacted=True
    )
    keys_and_values = []
    with contextlib.suppress(pulsar.Timeout):
        while True:
            message = reader.read_next(500)
            keys_and_values.append((message.partition_key() or None, message.data()))
    reader.close()
    return [key_and_value for key_and_value in keys_and_values if key_and_value != (None, b"")]


def test_an_empty_topic_and_one_of_which_nothing_was_kept_end_nowhere(runtime: Runtime) -> None:
    topic = Topic(runtime)
    assert end_of(runtime, topic.name) is None
    assert rows_of(runtime, topic.name) == []
    topic.send(("k0", b"v0"), ("k0", b""))
    topic.compact()
    assert end_of(runtime, topic.name) is None
    assert rows_of(runtime, topic.name) == []


@pytest.mark.parametrize(("codec", "batched"), EACH)
def test_a_topic_ends_with_its_last_message_before_and_after_compaction(
    runtime: Runtime, codec: str, batched: bool
) -> None:
    topic = Topic(runtime, codec, batched=batched)
    topic.send(("k0", b"v0"), ("k0", b"v1"), ("k0", b"v2"))
    last = topic.send(("k1", b"v0"), ("k1", b"v1"), ("k1", b"v2"))[-1]
    assert end_of(runtime, topic.name) == last
    assert len(rows_of(runtime, topic.name)) == 6
    topic.compact()
    assert end_of(runtime, topic.name) == last
    assert rows_of(runtime, topic.name) == [("k0", b"v2"), ("k1", b"v2")]
    assert seen_by_pulsar_client(runtime, topic.name) == [("k0", b"v2"), ("k1", b"v2")]


@pytest.mark.parametrize("codec", CODECS)
def test_of_the_proposals_example_one_message_is_left_and_is_the_last(
    runtime: Runtime, codec: str
) -> None:
    topic = Topic(runtime, codec)
    ids = topic.send(("k0", b"v0"), ("k0", b"v1"), ("k1", b"v0"), ("k1", b""))
    assert end_of(runtime, topic.name) == ids[-1]
    topic.compact()
    assert end_of(runtime, topic.name) == ids[1]
    assert rows_of(runtime, topic.name) == [("k0", b"v1")]


@pytest.mark.parametrize(("codec", "batched"), EACH)
def test_what_comes_after_compaction_follows_what_it_left(
    runtime: Runtime, codec: str, batched: bool
) -> None:
    topic = Topic(runtime, codec, batched=batched)
    topic.send(("k", b"v0"), ("k", b"v1"), ("k", b"v2"))
    topic.compact()
    (last,) = topic.send(("k", b"v3"))
    assert end_of(runtime, topic.name) == last
    assert rows_of(runtime, topic.name) == [("k", b"v2"), ("k", b"v3")]


@pytest.mark.parametrize(("codec", "batched"), EACH)
def test_without_compaction_every_message_is_read_also_after_it_ran(
    runtime: Runtime, codec: str, batched: bool
) -> None:
    topic = Topic(runtime, codec, batched=batched)
    topic.send(("k", b"v0"), ("k", b"v1"), ("k", b"v2"))
    topic.compact()
    (last,) = topic.send(("k", b"v3"))
    cluster = runtime.cluster()
    assert last_message(EntryReader(cluster, topic.name, AFTER_ALL)) == last
    options = parse_options({"service.url": runtime.service_url, "topic": topic.name})
    span = entry_range(topic.name, PartitionOffset(BEFORE_ALL), latest_offset(cluster, topic.name))
    rows = [row for part in read_messages(options, span) for row in part.to_pylist()]
    assert [row["value"] for row in rows] == [b"v0", b"v1", b"v2", b"v3"]
    cluster.close()


@pytest.mark.parametrize("codec", CODECS)
def test_messages_without_a_key_at_the_end_are_compacted_away(runtime: Runtime, codec: str) -> None:
    """A 4.0 broker answers some of these with an error of its own; the remaining messages are found
    all the same.
    """
    topic = Topic(runtime, codec)
    ids = topic.send((None, b"x"), ("k", b"v"), (None, b"y"))
    topic.compact()
    assert end_of(runtime, topic.name) == ids[1]
    assert rows_of(runtime, topic.name) == [("k", b"v")]


@pytest.mark.spark
def test_a_pipeline_of_a_compacted_topic_ends_by_itself_and_goes_on_live(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = Topic(runtime, "LZ4")
    for value in range(5):
        topic.send(*((f"k{key}", b"%d" % value) for key in range(10)), (None, b"no key"))
    topic.compact()
    data = runtime.config(tmp_path, topic.name, read_compacted=True)
    run_once(spark, data)
    assert [(row["key"], row["value"]) for row in table_rows(tmp_path)] == [
        (f"k{key}", b"4") for key in range(10)
    ]
    run_once(spark, data)
    topic.send(("k3", b"5"))
    topic.tombstone("k4")
    run_once(spark, data)
    rows = table_rows(tmp_path)
    assert [(row["key"], row["value"], row["is_null"]) for row in rows[10:]] == [
        ("k3", b"5", False),
        ("k4", None, True),
    ]
    topic.compact()
    options = {"service.url": runtime.service_url, "topic": topic.name, "readCompacted": "true"}
    latest = {
        row.key: bytes(row.value)
        for row in spark.read.format("ledgerlake").options(**options).load().collect()
    }
    assert latest == {f"k{key}": b"5" if key == 3 else b"4" for key in range(10) if key != 4}


@pytest.mark.spark
def test_a_compaction_between_a_kill_and_the_repeat_of_its_batch_stops_no_stream(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = Topic(runtime)
    data = runtime.config(tmp_path, topic.name, read_compacted=True)
    topic.send(*((f"k{key}", b"0") for key in range(5)))
    run_once(spark, data)
    for value in range(1, 4):
        topic.send(*((f"k{key}", b"%d" % value) for key in range(5)))
    with monkeypatch.context() as unrecorded:
        # A cursor passes what Spark has recorded, and what it has recorded is not repeated.
        unrecorded.setattr(DurableCursor, "advance", lambda _cursor, _position: None)
        run_once(spark, data)
    forget_last_commit(tmp_path / "checkpoint")
    topic.compact()
    topic.send(("k0", b"4"))
    run_once(spark, data)
    values = [row["value"] for row in table_rows(tmp_path)]
    assert values == [b"%d" % value for value in range(4) for _ in range(5)] + [b"4"]


def latest_rows(spark: SparkSession, folder: Path) -> dict[str, bytes]:
    rows = spark.read.format("delta").load(str(folder / "messages")).collect()
    assert len({row.key for row in rows}) == len(rows)
    return {row.key: bytes(row.value) for row in rows}


@pytest.mark.spark
@pytest.mark.parametrize("limits", [{}, {"max_rows_per_trigger": 1}])
def test_a_deletion_that_was_compacted_before_a_restart_reaches_a_table_of_the_latest(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, limits: dict[str, Any]
) -> None:
    topic = Topic(runtime)
    data = runtime.config(tmp_path, topic.name, read_compacted=True, **limits)
    data["delta"]["mode"] = "latest"
    for value in (b"1", b"2"):
        topic.send(("alice", value), ("bob", value))
    topic.send(("dora", b"1"))
    topic.tombstone("dora")
    topic.compact()
    run_once(spark, data)
    assert latest_rows(spark, tmp_path) == {"alice": b"2", "bob": b"2"}
    topic.tombstone("alice")
    topic.send(("carol", b"1"))
    topic.compact()
    config = run_once(spark, data)
    assert latest_rows(spark, tmp_path) == {"bob": b"2", "carol": b"1"}
    assert verify(config).clean


@pytest.fixture(scope="module")
def captured(runtime: Runtime) -> tuple[list[EntryReceived], list[EntryReceived]]:
    """Entries of a topic as a live broker stored them, and those that its compaction left."""
    topic = Topic(runtime, "LZ4")
    topic.send(("k0", b"v0"), ("k1", b"v0"))
    topic.send(("k0", b"v0"), ("k0", b"v1"), ("k1", b"v0"), ("k1", b""))
    raw = entries_of(runtime.cluster(), topic.name)
    topic.compact()
    return raw, entries_of(compacted(runtime), topic.name)


def entries_of(cluster: Cluster, topic: str) -> list[EntryReceived]:
    reader = EntryReader(cluster, topic, BEFORE_ALL)
    entries = []
    while (entry := reader.next(1)) is not None:
        entries.append(entry)
    cluster.close()
    return entries


def peer_with(captured: tuple[list[EntryReceived], list[EntryReceived]]) -> Peer:
    """A broker that knows protocol v22, with what the live one stored."""
    stored, compacted_entries = (
        [(Position(entry.ledger_id, entry.entry_id), bytes(entry.entry)) for entry in part]
        for part in captured
    )
    return Peer(entries=stored, compacted=compacted_entries, last_entry=compacted_entries[-1][1])


def test_a_broker_that_sends_the_last_entry_is_understood(captured: Any) -> None:
    with peer_with(captured) as peer:
        cluster = Cluster(
            replace(
                parse_options({"service.url": peer.url, "topic": TOPIC}).client, read_compacted=True
            )
        )
        last_id = last_message(EntryReader(cluster, TOPIC, AFTER_ALL))
        cluster.close()
        assert last_id == MessageId(peer.entries[-1][0].ledger_id, 1, 1)


def test_an_older_client_gets_no_entry_from_it_and_reads_as_before(captured: Any) -> None:
    with peer_with(captured) as peer:
        client = pulsar.Client(peer.url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
        reader = client.create_reader(TOPIC, pulsar.MessageId.earliest, is_read_compacted=True)
        assert reader.has_message_available()
        # It hands out the slots that compaction emptied.
        assert [reader.read_next(5000).data() for _ in range(2)] == [b"", b"v1"]
        client.close()


def test_a_4_0_broker_cannot_tell_the_end_of_an_encrypted_topic_and_we_find_it(
    runtime: Runtime, tmp_path: Path
) -> None:
    keys = crypto_key_reader(tmp_path, "key")
    topic = runtime.topic()
    producer = runtime.client().create_producer(
        topic,
        batching_enabled=True,
        batching_max_publish_delay_ms=500,
        compression_type=pulsar.CompressionType.LZ4,
        encryption_key="key",
        crypto_key_reader=keys,
    )
    ids: list[Any] = []
    for value in range(4):
        producer.send_async(
            b"%d" % value, lambda _result, message_id: ids.append(message_id), partition_key="k"
        )
    producer.flush()
    runtime.admin("PUT", topic, "/compaction")
    wait_until(lambda: runtime.admin("GET", topic, "/compaction")["status"] == "SUCCESS")
    cluster = compacted(runtime)
    reader = EntryReader(cluster, topic, AFTER_ALL)
    assert reader.last_message() is None
    assert last_message(reader) == MessageId(ids[-1].ledger_id(), ids[-1].entry_id(), 3)
    opening = ReadSettings(**vars(cluster.settings), crypto=CryptoSettings(str(tmp_path)))
    assert last_message(EntryReader(Cluster(opening), topic, AFTER_ALL)) == MessageId(
        ids[-1].ledger_id(), ids[-1].entry_id(), 3
    )
    (entry,) = entries_of(cluster, topic)
    assert parse_entry(entry.entry).metadata.encryption_keys
