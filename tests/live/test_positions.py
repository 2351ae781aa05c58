"""Starts by time on a real topic: exact against every entry, in few reads, whatever producers say of their clocks."""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING

import pytest

from ledgerlake.client.producer import EntryProducer
from ledgerlake.client.reader import EntryReader
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.query.config import parse_config
from ledgerlake.source import positions
from ledgerlake.source.options import Since
from ledgerlake.source.positions import next_until, resolve_start
from ledgerlake.wire.entry import encode_entry, read_stamp
from ledgerlake.wire.message_id import BEFORE_ALL, Position
from tests.live.test_columns import run_once
from tests.live.test_large import table_rows

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ledgerlake.client.cluster import Cluster
    from tests.live.runtime import Runtime

pytestmark = pytest.mark.live

LEDGERS, ENTRIES, SEARCHES = 4, 3000, 100


def publish(runtime: Runtime, topic: str, rng: random.Random) -> None:
    """Several producers whose clocks are anywhere, and a new ledger now and then."""
    cluster = runtime.cluster()
    for _ in range(LEDGERS):
        producers = [EntryProducer(cluster, topic) for _ in range(3)]
        for number in range(ENTRIES):
            producer = rng.choice(producers)
            metadata = pb.MessageMetadata(producer_name=producer.name, sequence_id=number)
            metadata.publish_time = rng.randrange(2**41)
            producer.send(encode_entry(metadata, b"v"))
        for one in producers:
            one.close()
        runtime.admin("PUT", topic, "/unload")
        time.sleep(0.5)
    cluster.close()


def every_entry(cluster: Cluster, topic: str) -> list[tuple[Position, int]]:
    reader = EntryReader(cluster, topic, BEFORE_ALL)
    last = reader.last_position()
    assert last is not None
    found = []
    while (entry := next_until(reader, last)) is not None:
        found.append((Position(entry.ledger_id, entry.entry_id), read_stamp(entry.entry).time_ms))
    reader.close()
    return found


def test_times_are_found_exactly_and_in_few_reads(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    topic = runtime.topic()
    publish(runtime, topic, rng)
    cluster = runtime.cluster()
    entries = every_entry(cluster, topic)
    assert len(entries) == LEDGERS * ENTRIES
    assert len({position.ledger_id for position, _ in entries}) >= 3
    reads: list[Position] = []
    really = positions._dated

    def counted(one: Cluster, name: str, position: Position, last: Position) -> object:
        reads.append(position)
        return really(one, name, position, last)

    monkeypatch.setattr(positions, "_dated", counted)
    most, took_s, off = 0, 0.0, 0
    for _ in range(SEARCHES):
        asked_ms = rng.randint(entries[0][1] - 5, entries[-1][1] + 5)
        expected = next((position for position, time_ms in entries if time_ms >= asked_ms), None)
        reads.clear()
        began_s = time.monotonic()
        found = resolve_start(cluster, topic, Since(asked_ms)).position
        took_s += time.monotonic() - began_s
        if expected is None:
            assert found == entries[-1][0]
        else:
            assert found == Position(expected.ledger_id, expected.entry_id - 1)
        most = max(most, len(reads))
        theirs = runtime.admin("GET", topic, f"/messageid/{asked_ms}")
        off += expected is not None and (theirs["ledgerId"], theirs["entryId"]) != (
            expected.ledger_id,
            expected.entry_id,
        )
    print(
        f"{len(entries):,} entries, {SEARCHES} times: at most {most} reads, {took_s / SEARCHES * 1000:.0f} ms a search; "
        f"the broker's own search differs in {off}"
    )
    assert most <= 2 * math.log2(len(entries)) + 10
    cluster.close()


@pytest.mark.spark
def test_a_pipeline_starts_at_a_time(runtime: Runtime, spark: SparkSession, tmp_path: Path) -> None:
    topic = runtime.topic()
    producer = runtime.client().create_producer(topic)
    producer.send(b"before")
    time.sleep(0.05)
    moment = time.time()
    time.sleep(0.05)
    producer.send(b"after")
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + f".{int(moment * 1000) % 1000:03d}Z"
    data = runtime.config(tmp_path, topic, starting=text)
    assert parse_config(data).source.starting == text
    run_once(spark, data)
    assert [row["value"] for row in table_rows(tmp_path)] == [b"after"]
