"""Broker metadata of a producer's own, and entries that no broker can read: what brokers make of
them, and what we do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ledgerlake.client.producer import EntryProducer
from ledgerlake.client.reader import EntryReader
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source.bounds import first_available
from ledgerlake.source.latest_offset import LatestOffset
from ledgerlake.source.read_until import next_until
from ledgerlake.wire.entry import encode_entry, read_stamp
from ledgerlake.wire.message_id import BEFORE_ALL, Position
from tests.entries import metadata
from tests.live.runtime import start_runtime
from tests.waiting import wait_until

if TYPE_CHECKING:
    from ledgerlake.client.cluster import Cluster
    from ledgerlake.wire.entry import Stamp
    from tests.live.runtime import Runtime

pytestmark = pytest.mark.live

FORGED = pb.BrokerEntryMetadata(broker_timestamp=4_102_444_800_000, index=10**12)
GOOD = encode_entry(metadata(), b"good")


def publish(cluster: Cluster, topic: str, *entries: bytes) -> Position:
    producer = EntryProducer(cluster, topic, "p")
    stored = producer.send_and_wait(entries)
    producer.close()
    return stored[-1]


def stamps(cluster: Cluster, topic: str, end: Position) -> dict[Position, Stamp]:
    reader = EntryReader(cluster, topic, BEFORE_ALL)
    entry_stamps = {}
    while (received := next_until(reader, end)) is not None:
        entry_stamps[received.position] = read_stamp(received.entry)
    return entry_stamps


@pytest.mark.parametrize(
    "unreadable",
    [
        pytest.param(encode_entry(metadata(), b"forged", FORGED), id="broker metadata of its own"),
        pytest.param(b"\xff" * 40, id="garbage"),
    ],
)
def test_an_entry_that_the_broker_cannot_read_behind_its_metadata_sets_no_time_and_stops_nothing(
    runtime: Runtime, unreadable: bytes
) -> None:
    topic, cluster = runtime.topic(), runtime.cluster(give_up_after_s=10)
    good = publish(cluster, topic, GOOD)
    latest = LatestOffset(cluster, topic)
    assert latest.get().position == good
    publish(cluster, topic, unreadable)
    latest.expire()
    assert latest.get().position == good
    # It waits half a second for an entry; the next micro-batch finds a late one.
    wait_until(lambda: LatestOffset(cluster, topic).get().position == good)
    assert first_available(cluster, topic).ledger_id == good.ledger_id
    last = publish(cluster, topic, GOOD)
    latest.expire()
    assert latest.get().position == last
    entry_stamps = stamps(cluster, topic, last)
    assert list(entry_stamps) == [good, last]
    assert all(
        stamp.by_broker and stamp.time_ms < FORGED.broker_timestamp
        for stamp in entry_stamps.values()
    )


@pytest.mark.long
@pytest.mark.parametrize("exposing", ["false", "true"])
def test_a_producers_broker_metadata_is_believed_only_if_the_broker_shows_such_and_adds_none(
    exposing: str,
) -> None:
    settings = {"exposingBrokerEntryMetadataToClientEnabled": exposing}
    with start_runtime(settings, broker_metadata=False) as runtime:
        topic, cluster = runtime.topic(), runtime.cluster()
        last = publish(cluster, topic, GOOD, encode_entry(metadata(), b"forged", FORGED))
        plain, forged = stamps(cluster, topic, last).values()
        assert (plain.by_broker, plain.time_ms) == (False, metadata().publish_time)
        # Nothing that a client is told sets the two apart.
        assert (forged.by_broker, forged.time_ms == FORGED.broker_timestamp) == (
            exposing == "true",
            exposing == "true",
        )
