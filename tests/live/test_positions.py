"""Starts and ends by time, number and id on a real topic: exact against every message, in few
reads.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import pulsar
import pytest

from ledgerlake.client.producer import EntryProducer
from ledgerlake.client.reader import EntryReader
from ledgerlake.inspect.lag import find_lags
from ledgerlake.options.bounds import AtIndex, AtTime
from ledgerlake.options.config import parse_config
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source import bounds
from ledgerlake.source.bounds import resolve_end, resolve_start
from ledgerlake.source.read_until import next_until
from ledgerlake.source.topic_end import last_position
from ledgerlake.wire.entry import Stamp, encode_batch, encode_entry, message_count, read_stamp
from ledgerlake.wire.message_id import BEFORE_ALL, Position, from_bytes, parse_message_id, to_bytes
from tests.live.pipelines import config_file, ledgerlake, run_once, table_rows
from tests.live.runtime import Runtime, start_runtime

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ledgerlake.client.cluster import Cluster

pytestmark = pytest.mark.live

LEDGERS, MESSAGES, SEARCHES = (
    (4, 100_000, 200) if os.environ.get("LEDGERLAKE_CAMPAIGN") == "long" else (4, 100_000, 60)
)


@dataclass(frozen=True)
class Stored:
    """An entry of the topic as a plain reading of everything found it."""

    position: Position
    stamp: Stamp
    count: int


def publish(runtime: Runtime, topic: str, rng: random.Random, messages: int = MESSAGES) -> None:
    """Several producers whose clocks are anywhere, batches and single messages, and a new ledger
    now and then.
    """
    cluster = runtime.cluster()
    number = 0
    for ledger in range(LEDGERS):
        producers = [EntryProducer(cluster, topic) for _ in range(3)]
        while number < messages * (ledger + 1) // LEDGERS:
            count = min(rng.choice([0, 0, 1, 5, 20, 40]), messages - number)
            rng.choice(producers).send(entry(rng.randrange(2**41), number, count), max(count, 1))
            number += max(count, 1)
        for producer in producers:
            producer.close()
        runtime.admin("PUT", topic, "/unload")
        time.sleep(0.5)
    cluster.close()


def entry(publish_ms: int, number: int, count: int) -> bytes:
    """Messages that are numbers, from one on; a count of 0 is one message that is not in a
    batch.
    """
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=number, publish_time=publish_ms)
    if not count:
        return encode_entry(metadata, b"%d" % number)
    plain = encode_batch(
        [(pb.SingleMessageMetadata(), b"%d" % (number + offset)) for offset in range(count)]
    )
    metadata.num_messages_in_batch = count
    return encode_entry(metadata, plain)


def every_entry(cluster: Cluster, topic: str) -> list[Stored]:
    reader = EntryReader(cluster, topic, BEFORE_ALL)
    last = last_position(reader)
    assert last is not None
    entries = []
    while (received := next_until(reader, last)) is not None:
        position = Position(received.ledger_id, received.entry_id)
        entries.append(Stored(position, read_stamp(received.entry), message_count(received.entry)))
    reader.close()
    return entries


@pytest.fixture(scope="module")
def topic(runtime: Runtime) -> str:
    name = runtime.topic()
    publish(runtime, name, random.Random(1))
    return name


@pytest.fixture
def cluster(runtime: Runtime) -> Iterator[Cluster]:
    cluster_client = runtime.cluster()
    yield cluster_client
    cluster_client.close()


class Reads:
    """Counts the entries that a search reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.most = 0
        really = bounds.entry_from

        def counted(*arguments: Any) -> Any:
            self.count += 1
            return really(*arguments)

        monkeypatch.setattr(bounds, "entry_from", counted)

    def end_of_search(self) -> None:
        self.most = max(self.most, self.count)
        self.count = 0


def test_times_are_found_exactly_and_in_few_reads(
    runtime: Runtime, topic: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(2)
    entries = every_entry(cluster, topic)
    assert sum(stored.count for stored in entries) == MESSAGES
    assert len({stored.position.ledger_id for stored in entries}) >= 3
    theirs = runtime.client().create_reader(topic, pulsar.MessageId.earliest)
    reads, ours_s, rest_s, seek_s, rest_off, seek_off = Reads(monkeypatch), [], [], [], 0, 0
    for _ in range(SEARCHES):
        asked_ms = rng.randint(entries[0].stamp.time_ms - 5, entries[-1].stamp.time_ms)
        expected = next(stored.position for stored in entries if stored.stamp.time_ms >= asked_ms)
        began_s = time.monotonic()
        start = resolve_start(cluster, topic, AtTime(asked_ms))
        ours_s.append(time.monotonic() - began_s)
        reads.end_of_search()
        reader = EntryReader(cluster, topic, start.position, window=1)
        first = reader.next(10)
        reader.close()
        assert first is not None
        assert Position(first.ledger_id, first.entry_id) == expected
        began_s = time.monotonic()
        answer = runtime.admin("GET", topic, f"/messageid/{asked_ms}")
        rest_s.append(time.monotonic() - began_s)
        rest_off += Position(answer["ledgerId"], answer["entryId"]) != expected
        began_s = time.monotonic()
        theirs.seek(asked_ms)
        sought = theirs.read_next(10_000).message_id()
        seek_s.append(time.monotonic() - began_s)
        seek_off += Position(sought.ledger_id(), sought.entry_id()) != expected
    print(
        f"{MESSAGES:,} messages in {len(entries):,} entries, {SEARCHES} times: at most "
        f"{reads.most} reads\nours {median(ours_s) * 1000:.0f} ms a search, 0 wrong; the broker's "
        f"by REST {median(rest_s) * 1000:.0f} ms, {rest_off} wrong; pulsar-client's seek and first "
        f"message {median(seek_s) * 1000:.0f} ms, {seek_off} wrong"
    )
    assert reads.most <= 2 * math.log2(len(entries)) + 10
    beyond = resolve_start(cluster, topic, AtTime(entries[-1].stamp.time_ms + 1))
    assert beyond.position == entries[-1].position


def test_numbers_are_found_to_the_message_and_in_few_reads(
    topic: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, campaign_is_long: bool
) -> None:
    rng = random.Random(3)
    entries = every_entry(cluster, topic)
    place: dict[int, tuple[Position, int]] = {}
    for stored in entries:
        assert stored.stamp.index is not None
        for batch_index in range(stored.count):
            place[stored.stamp.index - stored.count + 1 + batch_index] = (
                stored.position,
                batch_index,
            )
    assert set(place) == set(range(MESSAGES))
    reads = Reads(monkeypatch)
    searches = 1000 if campaign_is_long else 100
    for index in rng.sample(range(MESSAGES), searches):
        start = resolve_start(cluster, topic, AtIndex(index))
        reads.end_of_search()
        position, batch_index = place[index]
        assert start.next_position == position
        assert (start.batch_index or 0) == (batch_index - 1 if batch_index > 1 else 0)
        assert (start.batch_index is None) == (batch_index == 0)
    print(f"{searches:,} numbers: at most {reads.most} reads")
    assert reads.most <= 2 * math.log2(len(entries)) + 10


@pytest.mark.spark
def test_a_range_of_numbers_or_times_is_the_same_rows_each_time(
    spark: SparkSession, runtime: Runtime, topic: str
) -> None:
    def read(**options: str) -> list[Any]:
        all_options = {"service.url": runtime.service_url, "topic": topic, **options}
        rows = (
            spark.read.format("ledgerlake")
            .options(**all_options)
            .load()
            .select("broker_index", "value", "message_id")
        )
        return sorted(rows.collect())

    rows = read(startingIndex="12345", endingIndex="54321", minPartitions="2")
    assert [row.broker_index for row in rows] == list(range(12345, 54322))
    assert [int(row.value) for row in rows] == list(range(12345, 54322))
    assert read(startingIndex="12345", endingIndex="54321") == rows
    first, last = rows[0].message_id, rows[-1].message_id
    assert read(startingOffsets=first, endingOffsets=last) == rows
    assert read(startingOffsets=f"after {first}", endingOffsets=f"before {last}") == rows[1:-1]


@pytest.mark.spark
def test_times_cut_a_topic_into_parts_that_fit(
    spark: SparkSession, runtime: Runtime, topic: str, cluster: Cluster
) -> None:
    entries = every_entry(cluster, topic)
    middle_ms = str(entries[len(entries) // 2].stamp.time_ms)
    options = {"service.url": runtime.service_url, "topic": topic}
    before = spark.read.format("ledgerlake").options(**options, endingTime=middle_ms).load().count()
    behind = (
        spark.read.format("ledgerlake").options(**options, startingTime=middle_ms).load().count()
    )
    assert before + behind == MESSAGES
    assert min(before, behind) > 0


@pytest.mark.spark
def test_a_pipeline_runs_between_two_numbers_and_its_lag_is_the_truth(
    spark: SparkSession, runtime: Runtime, topic: str, tmp_path: Path
) -> None:
    data = runtime.config(tmp_path, topic, starting="index 70000", ending="index 79999")
    config = parse_config(data)
    run_once(spark, data)
    assert [int(row["value"]) for row in table_rows(tmp_path)] == list(range(70_000, 80_000))
    assert [(lag.messages, lag.has_ended) for lag in find_lags(config)] == [(0, True)]
    data["source"]["ending"] = "index 80004"
    run_once(spark, data)
    assert [int(row["value"]) for row in table_rows(tmp_path)] == list(range(70_000, 80_005))
    lag_output = ledgerlake("lag", config_file(tmp_path, data), "--json")
    assert lag_output.returncode == 0
    shown = json.loads(lag_output.stdout)
    assert (shown["messages"], shown["has_ended"]) == (0, True)
    data["source"]["ending"] = "latest"
    run_once(spark, data)
    (lag,) = find_lags(config)
    assert (lag.messages, lag.time_ms) == (0, 0)
    assert [int(row["value"]) for row in table_rows(tmp_path)] == list(range(70_000, MESSAGES))


@pytest.mark.spark
def test_a_pipeline_starts_at_a_time(runtime: Runtime, spark: SparkSession, tmp_path: Path) -> None:
    topic = runtime.topic()
    producer = runtime.client().create_producer(topic)
    producer.send(b"before")
    time.sleep(0.05)
    moment = time.time()
    time.sleep(0.05)
    producer.send(b"after")
    text = (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment))
        + f".{int(moment * 1000) % 1000:03d}Z"
    )
    run_once(spark, runtime.config(tmp_path, topic, starting=text))
    assert [row["value"] for row in table_rows(tmp_path)] == [b"after"]


def test_a_place_is_shown_with_its_neighbours(
    runtime: Runtime, topic: str, cluster: Cluster
) -> None:
    entries = every_entry(cluster, topic)
    for index in (0, 5000, MESSAGES - 1):
        completed = ledgerlake(
            "positions",
            topic,
            "--index",
            str(index),
            "--service-url",
            runtime.service_url,
            "--json",
        )
        place = json.loads(completed.stdout)
        number = next(
            number for number, stored in enumerate(entries) if (stored.stamp.index or 0) >= index
        )
        neighbours = [
            None if neighbour is None else Position(neighbour["ledger_id"], neighbour["entry_id"])
            for neighbour in map(place.get, ("before", "at", "after"))
        ]
        around = [
            entries[neighbour_number].position if 0 <= neighbour_number < len(entries) else None
            for neighbour_number in range(number - 1, number + 2)
        ]
        assert neighbours == around
        completed_by_id = ledgerlake(
            "positions", topic, "--id", place["serialised"], "--service-url", runtime.service_url
        )
        assert (
            completed_by_id.stdout.splitlines()[0]
            == f"{topic}: {place['message_id']} ({place['serialised']})"
        )
    time_ms = entries[77].stamp.time_ms
    completed = ledgerlake(
        "positions", topic, "--at", str(time_ms), "--service-url", runtime.service_url, "--json"
    )
    first = next(stored for stored in entries if stored.stamp.time_ms >= time_ms)
    assert json.loads(completed.stdout)["at"]["broker_index"] == first.stamp.index


@pytest.mark.long
def test_where_a_broker_began_to_add_metadata_in_mid_life_the_search_is_right(
    tmp_path: Path,
) -> None:
    """The producers' clocks before are an hour ahead; what the broker stored itself is found
    exactly all the same.
    """
    with start_runtime(broker_metadata=False, data_dir=tmp_path / "broker") as bare:
        assert bare.broker is not None
        topic = bare.topic()
        cluster = bare.cluster()
        producer = EntryProducer(cluster, topic)
        for number in range(300):
            producer.send(entry(int(time.time() * 1000) + 3_600_000, number, 0))
        producer.close()
        cluster.close()
    with start_runtime(broker_metadata=True, data_dir=tmp_path / "broker") as running:
        cluster = running.cluster()
        producer = EntryProducer(cluster, topic)
        for number in range(300, 800):
            producer.send(entry(5, number, 0))
        producer.close()
        entries = every_entry(cluster, topic)
        assert [stored.stamp.by_broker for stored in entries] == [False] * 300 + [True] * 500
        for sought in random.Random(4).sample(entries[301:], 50):
            start = resolve_start(cluster, topic, AtTime(sought.stamp.time_ms))
            expected = next(
                candidate
                for candidate in entries[300:]
                if candidate.stamp.time_ms >= sought.stamp.time_ms
            )
            assert start.next_position == expected.position
        first_number = entries[300].stamp.index
        assert first_number is not None
        assert (
            resolve_start(cluster, topic, AtIndex(first_number + 5)).next_position
            == entries[305].position
        )
        assert resolve_end(cluster, topic, AtIndex(first_number)).position == entries[300].position
        cluster.close()


def test_every_id_of_pulsar_client_is_ours_and_the_other_way_round(runtime: Runtime) -> None:
    topic = runtime.topic(partitions=2)
    client = runtime.client()
    ids: list[Any] = []
    for batched in (False, True):
        producer = client.create_producer(
            topic, batching_enabled=batched, batching_max_publish_delay_ms=50
        )
        for _ in range(20):
            producer.send_async(b"v", lambda _result, message_id: ids.append(message_id))
        producer.flush()
    ids.append(
        client.create_producer(
            f"{topic}-partition-0", chunking_enabled=True, batching_enabled=False
        ).send(b"x" * 12_000_000)
    )
    for theirs in ids:
        serialised = theirs.serialize()
        ours = from_bytes(serialised)
        forms = [
            serialised.hex(),
            str(list(serialised)),
            str([byte - 256 if byte > 127 else byte for byte in serialised]),
        ]
        assert {str(parse_message_id(form)) for form in forms} == {str(ours)}
        client_id = pulsar.MessageId.deserialize(to_bytes(ours, theirs.partition()))
        assert (
            client_id.ledger_id(),
            client_id.entry_id(),
            client_id.batch_index(),
            client_id.partition(),
        ) == (
            theirs.ledger_id(),
            theirs.entry_id(),
            theirs.batch_index(),
            theirs.partition(),
        )
        assert str(from_bytes(client_id.serialize())) == str(ours)
    assert ";" in str(from_bytes(ids[-1].serialize()))
