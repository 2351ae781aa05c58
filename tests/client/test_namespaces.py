"""Large namespaces: 100,000 topic partitions are listed, matched and watched."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.topics import TopicSelection
from ledgerlake.errors import UsageError
from ledgerlake.options.source_options import parse_options
from ledgerlake.source.stream_reader import LedgerlakeStreamReader
from ledgerlake.wire import limits
from tests.entries import single
from tests.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMESPACE = "persistent://warehouse-eu/inventory-events"
STORES = [f"{NAMESPACE}/store-{store:05}-stock-movements-v2" for store in range(6250)]
PARTITIONS = [f"{name}-partition-{number}" for name in STORES for number in range(16)]
RETURNS = [f"{NAMESPACE}/returns-north", f"{NAMESPACE}/returns-south"]


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer(topics=[*RETURNS[:1], *PARTITIONS], tells_of_topics=True) as broker:
        yield broker


def selection(local: str) -> TopicSelection:
    return TopicSelection(pattern=f"{NAMESPACE}/{local}")


def test_a_namespace_of_100_000_topic_partitions_is_more_than_a_broker_takes_as_one_message() -> (
    None
):
    assert len(PARTITIONS) == 100_000
    assert sum(map(len, PARTITIONS)) > limits.frame_limit_bytes(None)


def test_a_namespace_of_100_000_topic_partitions_is_listed_and_matched(peer: Peer) -> None:
    cluster = Cluster(ClientSettings(peer.url, give_up_after_s=2))
    assert cluster.all_partitions(selection("store-.*")) == sorted(PARTITIONS)
    assert cluster.all_partitions(selection("store-0[01]000-.*")) == sorted(
        name for name in PARTITIONS if "-00000-" in name or "-01000-" in name
    )
    assert cluster.all_partitions(selection("returns-.*")) == RETURNS[:1]
    cluster.close()


def test_a_namespace_of_100_000_topic_partitions_is_watched(peer: Peer) -> None:
    cluster = Cluster(ClientSettings(peer.url, give_up_after_s=2))
    watcher = cluster.watch(selection("returns-.*"))
    assert watcher is not None
    assert not watcher.changed
    peer.tell_of_topics(RETURNS, PARTITIONS)
    deadline = time.monotonic() + 60
    while not watcher.changed and time.monotonic() < deadline:
        assert cluster.all_partitions(selection("returns-.*"))
    assert watcher.changed
    assert not watcher.closed
    assert cluster.all_partitions(selection(".*")) == RETURNS
    cluster.close()


def test_a_stream_goes_on_while_its_namespace_grows_to_100_000_topic_partitions() -> None:
    with Peer(topics=RETURNS[:1], tells_of_topics=True) as peer:
        peer.add(single(b"a"))
        options = {
            "service.url": peer.url,
            "topicsPattern": f"{NAMESPACE}/returns-.*",
            "startingOffsets": "earliest",
        }
        reader = LedgerlakeStreamReader(parse_options(options))
        offset = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        assert list(offset["positions"]) == RETURNS[:1]
        peer.tell_of_topics([*PARTITIONS, *RETURNS], [])
        deadline = time.monotonic() + 60
        while len(offset["positions"]) < 2 and time.monotonic() < deadline:
            offset = reader.latestOffset(offset, ReadAllAvailable())
        assert list(offset["positions"]) == RETURNS
        reader.stop()


def test_a_namespace_whose_list_is_over_the_limit_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_COMMAND_BYTES", 200_000)
    with Peer(topics=PARTITIONS[:5000], max_message_bytes=100_000) as peer:
        cluster = Cluster(ClientSettings(peer.url, give_up_after_s=30))
        with pytest.raises(UsageError) as raised:
            cluster.all_partitions(selection("returns-.*"))
    assert re.fullmatch(
        r"the list of the topics of warehouse-eu/inventory-events is too long: the peer announced "
        r"a frame of \d+ bytes, "
        "over the limit of 200000; name topics in place of a pattern, or split the namespace",
        raised.value.message,
    )
