"""Starts and ends as positions: ids, times and the broker's numbers, to the message."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, cast

import pytest

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.decode.payloads import EntryPayload, PayloadMessage
from ledgerlake.errors import DataLossError, SetupError, UsageError
from ledgerlake.options.bounds import After, AtIndex, AtTime, Before, Bound
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source import batch_reader, bounds
from ledgerlake.source import topic_end as last_entry
from ledgerlake.source.batch_reader import RangePartition
from ledgerlake.source.bounds import (
    EndBound,
    latest_offset,
    matching_partitions,
    resolve_end,
    resolve_start,
)
from ledgerlake.source.planner import Planner
from ledgerlake.source.planning import entry_range
from ledgerlake.source.views import read_messages
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import ChunkMessageId, MessageId, Position, to_bytes
from tests.chunks import chunk_entries
from tests.entries import BROKER_TIME_MS, batch, metadata, single
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
    return PartitionOffset(offset.position, offset.batch_index)


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
        (
            AtIndex(11),
            "no message with the number 11 to start at: the next one that comes has 10; correct "
            "starting",
        ),
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
    assert where(resolve_start(cluster, TOPIC, bound, is_bounded=True)) == at(9, 1)
    cluster.close()


def test_of_an_empty_topic_a_stream_starts_at_the_first_number_only() -> None:
    with Peer(first_ledger_id=7) as peer:
        cluster = cluster_of(peer)
        assert where(resolve_start(cluster, TOPIC, AtIndex(0))) == at(7, -1)
        with pytest.raises(
            UsageError, match="the number 1 to start at: the next one that comes has 0"
        ):
            resolve_start(cluster, TOPIC, AtIndex(1))
        cluster.close()


def test_the_next_number_is_known_behind_an_entry_that_nobody_can_read(peer: Peer) -> None:
    peer.add(b"no metadata", ledger_id=9, first=2)
    cluster = cluster_of(peer)
    assert where(resolve_start(cluster, TOPIC, AtIndex(10))) == at(9, 1)
    with pytest.raises(UsageError, match="the next one that comes has 10"):
        resolve_start(cluster, TOPIC, AtIndex(11))
    cluster.close()


def test_a_read_that_ends_now_takes_nothing_that_comes_before_its_start(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def then_one_more_comes(
        cluster: Cluster, topic_partition: str, bound: Bound, **more: Any
    ) -> PartitionOffset:
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
        f"the message id {bound if isinstance(bound, ChunkMessageId) else '7:1'} is of partition "
        f"3, not of {ORDERS}-partition-0; give it by topic partition, as JSON such as "
        f'{{"{ORDERS}-partition-3": "..."}}'
    ]


@pytest.mark.parametrize(
    "bound",
    [
        MessageId(10, 0),
        MessageId(9, 3),
        MessageId(9, 2, 1),
        After(MessageId(9, 2)),
        After(MessageId(999, 1)),
        ChunkMessageId(MessageId(10, 0), MessageId(10, 1)),
    ],
)
def test_a_start_behind_the_end_of_the_topic_is_refused(peer: Peer, bound: Bound) -> None:
    cluster = cluster_of(peer)
    with pytest.raises(
        UsageError, match=r"has no entry .* to start at: its last one is 9:1; correct starting"
    ):
        resolve_start(cluster, TOPIC, bound)
    cluster.close()


def bare() -> bytes:
    """Return an entry to which the broker adds nothing, as to one that a producer says has no
    message.
    """
    return encode_entry(metadata(), b"bare")


def test_the_last_entry_with_an_index_decides_what_the_topic_has_reached(peer: Peer) -> None:
    peer.add(bare(), bare(), ledger_id=9, first=2)
    peer.add(bare(), ledger_id=11)
    cluster = cluster_of(peer)
    latest = latest_offset(cluster, TOPIC)
    assert EndBound(cluster, TOPIC, AtIndex(100)).cap(latest) == latest
    assert EndBound(cluster, TOPIC, AtIndex(9)).cap(latest).position == Position(9, 1)
    assert where(resolve_start(cluster, TOPIC, AtIndex(4))) == at(7, 0, 0)
    with pytest.raises(UsageError, match="the next one that comes has 10"):
        resolve_start(cluster, TOPIC, AtIndex(11))


def test_an_entry_without_an_index_hides_none_that_has_one() -> None:
    with Peer() as peer:
        for number in range(10):
            peer.add(batch([b"v"], index=number), bare(), bare(), ledger_id=7, first=3 * number)
        cluster = cluster_of(peer)
        for number in range(10):
            assert resolve_end(cluster, TOPIC, AtIndex(number)).position == Position(7, 3 * number)


def test_a_number_of_a_topic_whose_numbers_begin_again_is_refused_if_the_search_meets_them() -> (
    None
):
    with Peer() as peer:
        peer.add(*(batch([b"v"], index=number) for number in range(40)), ledger_id=7)
        peer.add(*(bare() for _ in range(60)), ledger_id=8)
        peer.add(*(batch([b"v"], index=number) for number in range(10)), ledger_id=9)
        cluster = cluster_of(peer)
        for resolve in (resolve_start, resolve_end):
            for index in (5, 20, 100):
                with pytest.raises(
                    UsageError, match=r"the numbers of .* do not rise: .*; give an id"
                ):
                    resolve(cluster, TOPIC, AtIndex(index))
        cluster.close()


def add_claims(peer: Peer, counts: dict[int, list[int]]) -> None:
    """Add by ledger batches that claim so many messages, as a broker numbers them."""
    index = -1
    for ledger_id, of_ledger in counts.items():
        entries = []
        for count in of_ledger:
            index += count
            entries.append(batch([b"v"], index=index, num_messages_in_batch=count))
        peer.add(*entries, ledger_id=ledger_id)


@pytest.mark.parametrize(
    ("counts", "number", "found"),
    [
        ({7: 20 * [1], 8: [0, *(20 * [1])]}, 30, Position(8, 11)),
        ({7: [*(20 * [1]), 0], 8: 20 * [1]}, 30, Position(8, 10)),
        ({7: 20 * [1], 8: [-4, *(20 * [1])]}, 30, Position(8, 15)),
        ({7: [*(20 * [1]), -6, 1, 1], 8: 20 * [1]}, 30, Position(8, 14)),
        ({7: 40 * [1], 8: [-2, 1], 9: [-2, 1], 10: 40 * [1]}, 60, Position(10, 22)),
        ({7: 10 * [1, 1, -1], 8: 10 * [1, 1, -1], 9: 40 * [1]}, 50, Position(9, 30)),
    ],
)
def test_a_batch_that_claims_no_message_or_fewer_refuses_no_number(
    counts: dict[int, list[int]], number: int, found: Position
) -> None:
    with Peer() as peer:
        add_claims(peer, counts)
        cluster = cluster_of(peer)
        assert resolve_end(cluster, TOPIC, AtIndex(number)).position == found
        assert resolve_start(cluster, TOPIC, AtIndex(number)).position == found.before
        for index in range(number):
            resolve_end(cluster, TOPIC, AtIndex(index))
        cluster.close()


def test_numbers_that_begin_again_do_not_end_a_stream_whose_end_has_not_come() -> None:
    with Peer() as peer:
        peer.add(*(batch([b"v"], index=number) for number in range(40)), ledger_id=7)
        peer.add(*(batch([b"v"], index=number) for number in range(10)), bare(), ledger_id=9)
        cluster = cluster_of(peer)
        latest = latest_offset(cluster, TOPIC)
        assert EndBound(cluster, TOPIC, AtIndex(100)).cap(latest) == latest
        with pytest.raises(UsageError, match="do not rise"):
            EndBound(cluster, TOPIC, AtIndex(5)).cap(latest)
        cluster.close()


def test_a_topic_in_which_no_entry_has_an_index_cannot_end_at_one() -> None:
    with Peer() as peer:
        peer.add(*(bare() for _ in range(20)), ledger_id=7)
        with pytest.raises(SetupError, match="have no index; set brokerEntryMetadataInterceptors"):
            resolve_end(cluster_of(peer), TOPIC, AtIndex(0))


@pytest.mark.parametrize(
    "bound", [MessageId(9, 2), After(MessageId(9, 1)), AtIndex(10), AtTime(BROKER_TIME_MS + 10)]
)
def test_a_start_at_the_end_of_the_topic_knows_what_was_stored_before_it(
    peer: Peer, bound: Bound
) -> None:
    peer.clock_ms = lambda: BROKER_TIME_MS + 5000
    start = resolve_start(cluster_of(peer), TOPIC, bound)
    assert start == resolve_start(cluster_of(peer), TOPIC, "latest")
    assert (start.index, start.time_ms) == (9, BROKER_TIME_MS + 9)
    peer.entries.clear()
    peer.add(batch([b"10"], index=10), ledger_id=11)
    span = entry_range(TOPIC, start, latest_offset(cluster_of(peer), TOPIC))
    options = parse_options({"service.url": peer.url, "topic": TOPIC})
    assert [row["value"] for part in read_messages(options, span) for row in part.to_pylist()] == [
        b"10"
    ]


@pytest.mark.parametrize(
    "bound", [MessageId(7, 1, 1), After(MessageId(7, 1, 0)), MessageId(9, 1, 3)]
)
def test_a_start_within_a_batch_knows_the_number_of_the_message_before_it(
    peer: Peer, bound: Bound
) -> None:
    start = resolve_start(cluster_of(peer), TOPIC, bound)
    assert start.index == {7: 3, 9: 8}[start.position.ledger_id]


NO_MESSAGE = r"has no message \d in the entry (\d:\d): it has \d, .*write \1$"


@pytest.mark.parametrize(
    "bound", [MessageId(7, 1, 2), After(MessageId(7, 1, 3)), MessageId(9, 0, 1)]
)
def test_a_start_at_a_message_that_its_entry_does_not_have_is_refused(
    peer: Peer, bound: Bound
) -> None:
    cluster = cluster_of(peer)
    for name, is_bounded in [
        (TOPIC, False),
        (f"{ORDERS}-partition-1", False),
        (f"{ORDERS}-partition-1", True),
    ]:
        with pytest.raises(UsageError, match=NO_MESSAGE):
            resolve_start(cluster, name, bound, is_bounded=is_bounded)


@pytest.mark.parametrize(
    "bound", [MessageId(7, 1, 2), Before(MessageId(7, 1, 3)), MessageId(9, 0, 1)]
)
def test_an_end_at_a_message_that_its_entry_does_not_have_is_refused(
    peer: Peer, bound: Bound
) -> None:
    cluster = cluster_of(peer)
    with pytest.raises(UsageError, match=NO_MESSAGE):
        resolve_end(cluster, TOPIC, bound)
    end = EndBound(cluster, TOPIC, bound)
    latest = latest_offset(cluster, TOPIC)
    assert end.cap(at(7, 0)) == at(7, 0)
    with pytest.raises(UsageError, match=NO_MESSAGE):
        end.cap(latest)


def thirds(entry: EntryPayload) -> list[PayloadMessage] | None:
    """Three messages of each entry, other than Pulsar's own number; but what is said to stay."""
    if entry.payload.startswith(b"own"):
        return None
    return [PayloadMessage(entry.payload + b"/%d" % third) for third in range(3)]


def rows_between(peer: Peer, **edges: str) -> list[tuple[str, bytes]]:
    options = parse_options({"service.url": peer.url, "topic": TOPIC, **edges})
    partitions = cast(
        "list[RangePartition]", batch_reader.LedgerlakeBatchReader(options).partitions()
    )
    rows = [
        (row["message_id"], row["value"])
        for partition in partitions
        for part in read_messages(options, partition.span)
        for row in part.to_pylist()
    ]
    return sorted(rows, key=lambda row: [int(number) for number in row[0].split(":")])


@pytest.mark.parametrize("processor", [{}, {"messagePayloadProcessor": f"{__name__}:thirds"}])
def test_the_id_of_each_row_is_a_start_and_an_end_and_reads_that_meet_there_have_each_row_once(
    processor: dict[str, str],
) -> None:
    rng = random.Random(20)
    with Peer() as peer:
        kinds: list[Callable[[int], list[bytes]]] = [
            lambda number: [single(b"%d" % number, index=number)],
            lambda number: [single(b"own %d" % number, index=number)],
            lambda number: [batch([b"%d" % number], index=number)],
            lambda number: [batch([b"%d.%d" % (number, one) for one in range(4)], index=number)],
            lambda number: chunk_entries(b"%d" % number * 9, 3),
            lambda _: [bare()],
            lambda _: [b"no metadata"],
        ]
        for number in range(14):
            new = kinds[number % 7 if number < 7 else rng.randrange(7)](4 * number + 3)
            peer.add(*new, ledger_id=7 + number // 5, first=10 * (number % 5))
        rows = rows_between(peer, **processor)
        assert len({message_id for message_id, _ in rows}) == len(rows) > 15
        for place, (message_id, _) in enumerate(rows):
            for first, then, cut in (
                (message_id, f"after {message_id}", place + 1),
                (f"before {message_id}", message_id, place),
            ):
                assert rows_between(peer, endingOffsets=first, **processor) == rows[:cut]
                assert rows_between(peer, startingOffsets=then, **processor) == rows[cut:]


@pytest.mark.parametrize("bound", [MessageId(50, 0), After(MessageId(9, 7))])
def test_an_id_without_a_partition_is_no_start_of_a_partition_that_has_not_reached_it(
    peer: Peer, bound: Bound
) -> None:
    name = f"{ORDERS}-partition-1"
    with pytest.raises(
        UsageError, match=r"its last one is 9:1; .* by topic partition, as JSON such as"
    ):
        resolve_start(cluster_of(peer), name, bound)
    start = resolve_start(cluster_of(peer), name, bound, is_bounded=True)
    assert start.is_beyond(latest_offset(cluster_of(peer), name))


@pytest.mark.parametrize(
    ("partitions", "there"), [({}, "it has no partitions"), ({TOPIC: 2}, "its last one is 1")]
)
@pytest.mark.parametrize("edge", ["starting", "ending"])
def test_a_bound_of_a_partition_that_the_topic_does_not_have_is_refused(
    peer: Peer, partitions: dict[str, int], there: str, edge: str
) -> None:
    peer.partitions = partitions
    written = {
        "service.url": peer.url,
        "topic": TOPIC,
        f"{edge}Offsets": '{"peer-partition-2": "7:0"}',
    }
    options = parse_options(written)
    with closing(Planner(options)) as planner:
        for begin in (batch_reader.LedgerlakeBatchReader(options).partitions, planner.initial):
            with pytest.raises(
                UsageError, match=f"/peer has no partition 2 to start or to end at: {there}"
            ):
                begin()


def test_an_id_of_a_partition_is_none_of_a_topic_without_partitions(peer: Peer) -> None:
    with pytest.raises(
        UsageError, match=r"7:1 is of partition 3, not of .*/peer, which has no partitions"
    ):
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
    assert where(resolve_start(cluster_of(peer), topic_partition, bound)) == at(7, 0)
    assert where(resolve_end(cluster_of(peer), topic_partition, bound)) == at(7, 1)


def test_an_id_of_a_partition_is_looked_for_in_that_one() -> None:
    names = [f"{ORDERS}-partition-{number}" for number in range(5)]
    assert matching_partitions(names, OF_PARTITION_3) == [names[3]]
    assert matching_partitions(names, MessageId(7, 1)) == names
    assert matching_partitions(names, "earliest") == names
    assert matching_partitions(names[:2], OF_PARTITION_3) == names[:2]


def test_ids_by_topic_partition_bound_each_its_own(peer: Peer) -> None:
    serialised = {
        f"orders-partition-{number}": list(to_bytes(MessageId(7, 1), number)) for number in range(2)
    }
    options = parse_options(
        {"service.url": peer.url, "topic": "orders", "startingOffsets": json.dumps(serialised)}
    )
    for number in range(2):
        name = f"{ORDERS}-partition-{number}"
        assert where(
            resolve_start(cluster_of(peer), name, options.starting_of(name, "latest"))
        ) == at(7, 0)


@pytest.mark.parametrize("bound", [AtIndex(9), AtIndex(99), AtTime(BROKER_TIME_MS + 99), "latest"])
def test_an_end_that_is_not_there_yet_is_the_end_of_the_topic(peer: Peer, bound: Bound) -> None:
    assert resolve_end(cluster_of(peer), TOPIC, bound).position == Position(9, 1)


def test_every_range_of_numbers_is_read_to_the_message(peer: Peer) -> None:
    options = parse_options({"service.url": peer.url, "topic": TOPIC})
    cluster = cluster_of(peer)
    for first in range(10):
        for last in range(first, 10):
            start, end = (
                resolve_start(cluster, TOPIC, AtIndex(first)),
                resolve_end(cluster, TOPIC, AtIndex(last)),
            )
            rows = [
                row
                for part in read_messages(options, entry_range(TOPIC, start, end))
                for row in part.to_pylist()
            ]
            assert [row["broker_index"] for row in rows] == list(range(first, last + 1))
            assert [row["value"] for row in rows] == [
                str(number).encode() for number in range(first, last + 1)
            ]


def test_the_number_of_the_last_message_taken_is_known_where_a_number_was_asked_for(
    peer: Peer,
) -> None:
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


def without_stamp(payload: bytes) -> bytes:
    """An entry of a producer that counts in microseconds, without a stamp of the broker's."""
    return encode_entry(metadata(publish_time=BROKER_TIME_MS * 1000), payload)


@pytest.mark.parametrize(
    ("start", "rows"),
    [
        ({"startingOffsets": "earliest"}, 6),
        ({"startingTime": str(BROKER_TIME_MS)}, 6),
        ({"startingTime": str(BROKER_TIME_MS + 1)}, 3),
        ({"startingTime": str(BROKER_TIME_MS + 2)}, 1),
        ({"startingIndex": "1"}, 3),
        ({"startingIndex": "2"}, 1),
    ],
)
def test_no_start_skips_an_entry_whose_stamp_cannot_be_read(
    start: dict[str, str], rows: int
) -> None:
    with Peer() as peer:
        peer.add(*[without_stamp(b"%d" % number) for number in range(2)])
        peer.add(
            batch([b"2"], index=0),
            without_stamp(b"3"),
            batch([b"4"], index=1),
            without_stamp(b"5"),
            first=2,
        )
        reader = batch_reader.LedgerlakeBatchReader(
            parse_options(
                {"service.url": peer.url, "topic": TOPIC, "retryTimeoutMs": "2000"} | start
            )
        )
        read = [
            row
            for part in reader.partitions()
            for rows in reader.read(part)
            for row in rows.to_pylist()
        ]
        assert [row["entry_id"] for row in read] == list(range(6))[-rows:]


@pytest.mark.parametrize("bound", ["earliest", AtTime(0), AtTime(BROKER_TIME_MS)])
def test_a_topic_of_entries_without_a_stamp_is_read_from_its_first_entry(bound: Bound) -> None:
    with Peer(clock_ms=lambda: BROKER_TIME_MS + 5000) as peer:
        peer.add(*[without_stamp(b"%d" % number) for number in range(3)])
        assert resolve_start(cluster_of(peer), TOPIC, bound) == at(7, -1)


@pytest.mark.parametrize(
    "bounds_",
    [
        {"startingIndex": "1000", "endingIndex": "2001"},
        {"startingIndex": "500", "endingIndex": "999"},
    ],
)
def test_numbers_that_the_topic_has_lost_are_a_loss_as_ids_are(bounds_: dict[str, str]) -> None:
    with Peer() as peer:
        peer.add(
            *[batch([b"%d" % number], index=number) for number in range(2000, 2003)], ledger_id=20
        )
        options = {"service.url": peer.url, "topic": TOPIC} | bounds_

        def rows(**more: str) -> list[Any]:
            reader = batch_reader.LedgerlakeBatchReader(parse_options(options | more))
            return [
                row
                for part in reader.partitions()
                for rows in reader.read(part)
                for row in rows.to_pylist()
            ]

        with pytest.raises(DataLossError, match="messages after 19:-1 and before 20:0 are lost"):
            rows()
        loss, *left = rows(failOnDataLoss="false")
        assert loss["reject_reason"] == "data_loss"
        assert [row["broker_index"] for row in left] == (
            [2000, 2001] if "1000" in bounds_.values() else []
        )


def test_the_first_number_of_a_topic_that_begins_with_markers_is_no_loss() -> None:
    with Peer() as peer:
        peer.add(batch([b"2"], index=2), batch([b"3"], index=3), first=2)
        reader = batch_reader.LedgerlakeBatchReader(
            parse_options({"service.url": peer.url, "topic": TOPIC, "startingIndex": "0"})
        )
        read = [
            row
            for part in reader.partitions()
            for rows in reader.read(part)
            for row in rows.to_pylist()
        ]
        assert [row["value"] for row in read] == [b"2", b"3"]


def test_a_topic_without_numbers_says_what_to_do_about_it() -> None:
    with Peer() as peer:
        peer.add(
            encode_entry(pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=5), b"v")
        )
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


def test_an_end_that_is_not_there_yet_is_searched_for_only_after_the_topic_has_moved() -> None:
    def entry(publish_ms: int) -> bytes:
        return encode_entry(
            pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=publish_ms), b"v"
        )

    with Peer() as peer:
        peer.add(*(entry(publish_ms) for publish_ms in range(10)))
        cluster = cluster_of(peer)
        ending = EndBound(cluster, TOPIC, AtTime(100))
        latest = latest_offset(cluster, TOPIC)
        assert ending.cap(latest) == latest
        asked = len(peer.requests)
        assert [ending.cap(latest) for _ in range(3)] == [latest] * 3
        assert len(peer.requests) == asked
        peer.add(entry(99), entry(100), first=10)
        assert where(ending.cap(latest_offset(cluster, TOPIC))) == at(7, 10)


def test_after_the_last_message_of_a_topic_from_which_all_are_removed_is_a_start() -> None:
    with Peer(first_ledger_id=20) as peer:
        cluster = cluster_of(peer)
        assert resolve_start(cluster, TOPIC, After(MessageId(10, 99))).position == Position(10, 99)
        with pytest.raises(
            UsageError,
            match=r"has no entry 21:0 to start at: it has no message, and its first ledger is 20; "
            r"correct",
        ):
            resolve_start(cluster, TOPIC, After(MessageId(21, 0)))
        cluster.close()


def test_a_topic_to_which_nothing_readable_comes_has_a_beginning_though_it_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Peer(unreadable_last=True) as broker:
        broker.add(*[b"unreadable"] * 3)

        class Growing(EntryReader):
            def next(self, timeout_s: float) -> Any:
                assert len(broker.entries) < 100, "it reads for ever"
                broker.add(b"unreadable", first=len(broker.entries))
                return super().next(timeout_s)

        monkeypatch.setattr(bounds, "EntryReader", Growing)
        monkeypatch.setattr(last_entry, "EntryReader", Growing)
        cluster = cluster_of(broker)
        try:
            assert resolve_start(cluster, TOPIC, "earliest") == at(7, -1)
            assert bounds.beginning(cluster, TOPIC, None) == at(7, -1)
        finally:
            cluster.close()
