"""Starts and ends as positions: ids, times and the broker's numbers, to the message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.errors import SetupError, UsageError
from ledgerlake.options.bounds import After, AtIndex, AtTime, Before, Bound
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source import batch_reader
from ledgerlake.source.bounds import EndBound, latest_offset, matching_partitions, resolve_end, resolve_start
from ledgerlake.source.planning import entry_range
from ledgerlake.source.views import read_messages
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import ChunkMessageId, MessageId, Position, to_bytes
from tests.entries import BROKER_TIME_MS, batch
from tests.peer import TOPIC, Peer


@pytest.fixture
def peer() -> Iterator[Peer]:
    """Messages 0 to 2 in one batch, 3 to 4 in the next, 5 and 6 to 9 in another ledger; stored at
    their last number.
    """
    with Peer() as broker:
        broker.add(batch([b"0", b"1", b"2"], index=2), batch([b"3", b"4"], index=4), ledger_id=7)
        broker.add(batch([b"5"], index=5), batch([b"6", b"7", b"8", b"9"], index=9), ledger_id=9)
        yield broker


def at(ledger_id: int, entry_id: int, batch_index: int | None = None) -> PartitionOffset:
    return PartitionOffset(Position(ledger_id, entry_id), batch_index)


def where(offset: PartitionOffset) -> PartitionOffset:
    """Without the stamps."""
    return replace(offset, time_ms=None, index=None)


def cluster_of(peer: Peer) -> Cluster:
    return Cluster(ClientSettings(peer.url, give_up_after_s=2))


CHUNKED = ChunkMessageId(MessageId(7, 0), MessageId(9, 1))


@pytest.mark.parametrize(
    ("bound", "start"),
    [
        (MessageId(7, 1), at(7, 0)),
        (MessageId(7, 1, 0), at(7, 0)),
        (MessageId(7, 1, 1), at(7, 0, 0)),
        (After(MessageId(7, 1)), at(7, 1)),
        (After(MessageId(7, 1, 0)), at(7, 0, 0)),
        (CHUNKED, at(7, -1)),
        (After(CHUNKED), at(9, 1)),
        (AtIndex(0), at(7, -1)),
        (AtIndex(1), at(7, -1, 0)),
        (AtIndex(3), at(7, 0)),
        (AtIndex(5), at(9, -1)),
        (AtIndex(9), at(9, 0, 2)),
        (AtIndex(10), at(9, 1)),
        (AtTime(BROKER_TIME_MS + 3), at(7, 0)),
        (AtTime(BROKER_TIME_MS + 10), at(9, 1)),
    ],
)
def test_a_start(peer: Peer, bound: Bound, start: PartitionOffset) -> None:
    assert where(resolve_start(cluster_of(peer), TOPIC, bound)) == start


@pytest.mark.parametrize(
    ("bound", "advice"),
    [
        (AtIndex(11), "no message with the number 11 to start at: the next one that comes has 10; correct starting"),
        (
            # The broker's clock goes on while it is asked.
            AtTime(BROKER_TIME_MS + 600_000),
            r"no message of .*Z to start at: by its broker's clock it is .*Z; correct starting",
        ),
        (AtTime(10**30), "no message of 9999-12-30T"),
    ],
)
def test_a_stream_does_not_start_where_the_topic_has_not_come_to_and_a_read_that_ends_now_is_empty(
    peer: Peer, bound: Bound, advice: str
) -> None:
    peer.clock_ms = lambda: BROKER_TIME_MS + 5000
    cluster = cluster_of(peer)
    with pytest.raises(UsageError, match=advice):
        resolve_start(cluster, TOPIC, bound)
    assert resolve_start(cluster, TOPIC, bound, is_bounded=True) == at(9, 1)
    cluster.close()


def test_of_an_empty_topic_a_stream_starts_at_the_first_number_only() -> None:
    with Peer(first_ledger_id=7) as peer:
        cluster = cluster_of(peer)
        assert where(resolve_start(cluster, TOPIC, AtIndex(0))) == at(7, -1)
        with pytest.raises(UsageError, match="the number 1 to start at: the next one that comes has 0"):
            resolve_start(cluster, TOPIC, AtIndex(1))
        cluster.close()


def test_the_next_number_is_known_behind_an_entry_that_nobody_can_read(peer: Peer) -> None:
    peer.add(b"no metadata", ledger_id=9, first=2)
    cluster = cluster_of(peer)
    assert resolve_start(cluster, TOPIC, AtIndex(10)).position == Position(9, 2)
    with pytest.raises(UsageError, match="the next one that comes has 10"):
        resolve_start(cluster, TOPIC, AtIndex(11))
    cluster.close()


def test_a_read_that_ends_now_takes_nothing_that_comes_before_its_start(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def then_one_more_comes(cluster: Cluster, topic_partition: str, bound: Bound, **more: Any) -> PartitionOffset:
        offset = resolve_start(cluster, topic_partition, bound, **more)
        peer.add(batch([b"10"], index=10), ledger_id=9, first=2)
        return offset

    monkeypatch.setattr(batch_reader, "resolve_start", then_one_more_comes)
    options = parse_options({"service.url": peer.url, "topic": TOPIC, "startingIndex": "1000"})
    assert batch_reader.LedgerlakeBatchReader(options).partitions() == []


@pytest.mark.parametrize(
    ("bound", "end"),
    [
        (MessageId(7, 1), at(7, 1)),
        (MessageId(7, 1, 0), at(7, 0, 0)),
        (Before(MessageId(7, 1)), at(7, 0)),
        (Before(MessageId(7, 1, 0)), at(7, 0)),
        (Before(MessageId(7, 1, 1)), at(7, 0, 0)),
        (CHUNKED, at(9, 1)),
        (Before(CHUNKED), at(9, 0)),
        (AtIndex(0), at(7, -1, 0)),
        (AtIndex(2), at(7, 0)),
        (AtIndex(7), at(9, 0, 1)),
        (AtTime(BROKER_TIME_MS), at(7, -1)),
        (AtTime(BROKER_TIME_MS + 4), at(7, 0)),
        (AtTime(BROKER_TIME_MS + 5), at(9, -1)),
    ],
)
def test_an_end(peer: Peer, bound: Bound, end: PartitionOffset) -> None:
    assert where(resolve_end(cluster_of(peer), TOPIC, bound)) == end


ORDERS = "persistent://public/default/orders"
OF_PARTITION_3 = MessageId(7, 1, partition=3)


@pytest.mark.parametrize(
    "bound",
    [
        OF_PARTITION_3,
        After(OF_PARTITION_3),
        Before(OF_PARTITION_3),
        ChunkMessageId(MessageId(7, 0, partition=3), OF_PARTITION_3),
    ],
)
def test_an_id_of_a_partition_bounds_no_other(peer: Peer, bound: Bound) -> None:
    cluster = cluster_of(peer)
    refusals = []
    for resolve in (resolve_start, resolve_end, EndBound):
        with pytest.raises(UsageError) as caught:
            resolve(cluster, f"{ORDERS}-partition-0", bound)
        refusals.append(caught.value.message)
    assert refusals == 3 * [
        f"the message id {bound if isinstance(bound, ChunkMessageId) else '7:1'} is of partition 3, not of "
        f'{ORDERS}-partition-0; give it by topic partition, as JSON such as {{"{ORDERS}-partition-3": "..."}}'
    ]


@pytest.mark.parametrize(
    "bound", [MessageId(10, 0), After(MessageId(999, 1)), ChunkMessageId(MessageId(10, 0), MessageId(10, 1))]
)
def test_a_start_in_a_ledger_that_is_not_there_yet_is_refused(peer: Peer, bound: Bound) -> None:
    cluster = cluster_of(peer)
    with pytest.raises(UsageError, match=r"has no entry .* to start at: its last one is 9:1; correct starting"):
        resolve_start(cluster, TOPIC, bound)
    cluster.close()


def test_an_id_of_a_partition_is_none_of_a_topic_without_partitions(peer: Peer) -> None:
    with pytest.raises(UsageError, match=r"7:1 is of partition 3, not of .*/peer, which has no partitions"):
        resolve_start(cluster_of(peer), TOPIC, OF_PARTITION_3)


@pytest.mark.parametrize(
    ("topic_partition", "partition"),
    [
        pytest.param(f"{ORDERS}-partition-3", 3, id="its own partition"),
        pytest.param(f"{ORDERS}-partition-3", -1, id="no partition"),
        pytest.param(TOPIC, -1, id="no partition, no partitions"),
        pytest.param(TOPIC, 0, id="no partitions, as the Go client writes it"),
    ],
)
def test_an_id_bounds_its_own_partition(peer: Peer, topic_partition: str, partition: int) -> None:
    bound = MessageId(7, 1, partition=partition)
    assert resolve_start(cluster_of(peer), topic_partition, bound) == at(7, 0)
    assert resolve_end(cluster_of(peer), topic_partition, bound) == at(7, 1)


def test_an_id_of_a_partition_is_looked_for_in_that_one() -> None:
    names = [f"{ORDERS}-partition-{number}" for number in range(5)]
    assert matching_partitions(names, OF_PARTITION_3) == [names[3]]
    assert matching_partitions(names, MessageId(7, 1)) == names
    assert matching_partitions(names, "earliest") == names
    assert matching_partitions(names[:2], OF_PARTITION_3) == names[:2]


def test_ids_by_topic_partition_bound_each_its_own(peer: Peer) -> None:
    serialised = {f"orders-partition-{number}": list(to_bytes(MessageId(7, 1), number)) for number in range(2)}
    options = parse_options({"service.url": peer.url, "topic": "orders", "startingOffsets": json.dumps(serialised)})
    for number in range(2):
        name = f"{ORDERS}-partition-{number}"
        assert resolve_start(cluster_of(peer), name, options.starting_of(name, "latest")) == at(7, 0)


@pytest.mark.parametrize("bound", [AtIndex(9), AtIndex(99), AtTime(BROKER_TIME_MS + 99), "latest"])
def test_an_end_that_is_not_there_yet_is_the_end_of_the_topic(peer: Peer, bound: Bound) -> None:
    assert resolve_end(cluster_of(peer), TOPIC, bound).position == Position(9, 1)


def test_every_range_of_numbers_is_read_to_the_message(peer: Peer) -> None:
    options = parse_options({"service.url": peer.url, "topic": TOPIC})
    cluster = cluster_of(peer)
    for first in range(10):
        for last in range(first, 10):
            start, end = resolve_start(cluster, TOPIC, AtIndex(first)), resolve_end(cluster, TOPIC, AtIndex(last))
            rows = [row for part in read_messages(options, entry_range(TOPIC, start, end)) for row in part.to_pylist()]
            assert [row["broker_index"] for row in rows] == list(range(first, last + 1))
            assert [row["value"] for row in rows] == [str(number).encode() for number in range(first, last + 1)]


def test_the_number_of_the_last_message_taken_is_known_where_a_number_was_asked_for(peer: Peer) -> None:
    cluster = cluster_of(peer)
    for number in range(1, 10):
        assert resolve_start(cluster, TOPIC, AtIndex(number)).index == number - 1
        assert resolve_end(cluster, TOPIC, AtIndex(number)).index == number


def test_a_number_between_what_is_left_starts_and_ends_beside_it() -> None:
    with Peer() as peer:
        peer.add(batch([b"2"], index=2), batch([b"8", b"9"], index=9))
        cluster = cluster_of(peer)
        assert where(resolve_start(cluster, TOPIC, AtIndex(5))) == at(7, 0)
        assert where(resolve_end(cluster, TOPIC, AtIndex(5))) == at(7, 0)


def test_a_topic_without_numbers_says_what_to_do_about_it() -> None:
    with Peer() as peer:
        peer.add(encode_entry(pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=5), b"v"))
        with pytest.raises(SetupError, match="have no index; set brokerEntryMetadataInterceptors"):
            resolve_start(cluster_of(peer), TOPIC, AtIndex(5))


@pytest.mark.parametrize(
    ("bound", "end"),
    [
        (AtIndex(11), at(9, 1, 1)),
        (AtTime(BROKER_TIME_MS + 12), at(9, 1)),
        (MessageId(9, 2, 0), at(9, 1, 0)),
        (Before(MessageId(9, 2)), at(9, 1)),
    ],
)
def test_a_stream_goes_up_to_its_end_once_the_topic_has_it_and_no_further(
    peer: Peer, bound: Bound, end: PartitionOffset
) -> None:
    cluster = cluster_of(peer)
    ending = EndBound(cluster, TOPIC, bound)
    latest = latest_offset(cluster, TOPIC)
    assert ending.cap(latest) == latest
    peer.add(batch([b"10", b"11", b"12"], index=12), ledger_id=9, first=2)
    for _ in range(2):
        assert where(ending.cap(latest_offset(cluster, TOPIC))) == end
    peer.add(batch([b"13"], index=13), ledger_id=10)
    assert where(ending.cap(latest_offset(cluster, TOPIC))) == end


def test_after_the_last_message_of_a_topic_from_which_all_are_removed_is_a_start() -> None:
    with Peer(first_ledger_id=20) as peer:
        cluster = cluster_of(peer)
        assert resolve_start(cluster, TOPIC, After(MessageId(10, 99))).position == Position(10, 99)
        with pytest.raises(
            UsageError, match=r"has no entry 21:0 to start at: it has no message, and its first ledger is 20; correct"
        ):
            resolve_start(cluster, TOPIC, After(MessageId(21, 0)))
        cluster.close()
