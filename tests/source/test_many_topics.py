"""The ends of many topics, which the planner asks for with few round trips and subscriptions."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.client import reader
from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.consumers import grant, next_entry
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source import planner
from ledgerlake.source.batch_limits import LimitPlanner
from ledgerlake.source.bounds import latest_offset
from ledgerlake.source.latest_offset import LatestOffset, refresh_all
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.wire import commands
from ledgerlake.wire.connection import EntryReceived
from ledgerlake.wire.message_id import BEFORE_ALL, Position
from tests.entries import BROKER_TIME_MS, batch, single
from tests.peer import TOPIC, Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ledgerlake.client.channels import Consumer
    from ledgerlake.client.session import Session

NAMES = [f"persistent://public/default/many-{number}" for number in range(100)]


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as broker:
        broker.add(single(b"first"))
        yield broker


@pytest.fixture
def latest(peer: Peer) -> Iterator[list[LatestOffset]]:
    cluster = Cluster(ClientSettings(peer.url, give_up_after_s=5))
    yield [LatestOffset(cluster, name) for name in NAMES]
    cluster.close()


def ends(latest: list[LatestOffset]) -> set[PartitionOffset]:
    for offset in latest:
        offset.expire()
    refresh_all(latest)
    return {offset.get() for offset in latest}


def end_at(entry_id: int, index: int) -> set[PartitionOffset]:
    return {PartitionOffset(Position(7, entry_id), None, BROKER_TIME_MS + index, index)}


def test_the_reader_that_read_an_end_reads_the_next_ones_if_they_are_near(
    peer: Peer, latest: list[LatestOffset]
) -> None:
    assert ends(latest) == end_at(0, 0)
    opened = peer.requests.count("CommandSubscribe")
    for number in range(1, 4):
        peer.add(
            *[single(b"x", index=3 * number + more) for more in range(3)], first=3 * number - 2
        )
        assert ends(latest) == end_at(3 * number, 3 * number + 2)
    assert ends(latest) == end_at(9, 11)
    assert peer.requests.count("CommandSubscribe") == opened


def test_batches_take_more_permits_than_entries_and_the_reader_gets_all_of_them(
    peer: Peer, latest: list[LatestOffset]
) -> None:
    assert ends(latest) == end_at(0, 0)
    opened = peer.requests.count("CommandSubscribe")
    peer.add(batch([b"a"] * 5, index=5), single(b"b", index=6), batch([b"c"] * 3, index=9), first=1)
    assert ends(latest) == end_at(3, 9)
    peer.add(single(b"d", index=10), first=4)
    assert ends(latest) == end_at(4, 10)
    assert peer.requests.count("CommandSubscribe") == opened


@pytest.mark.parametrize("last", [6, 10])
def test_holes_leave_permits_that_the_next_ends_use(
    peer: Peer, latest: list[LatestOffset], last: int
) -> None:
    """As with a message in each transaction: its marker takes a number and no permit."""
    few = latest[:3]
    assert ends(few) == end_at(0, 0)
    opened = peer.requests.count("CommandSubscribe")
    for entry_id in range(2, last, 2):
        peer.add(single(b"x", index=entry_id), first=entry_id)
    assert ends(few) == end_at(last - 2, last - 2)
    peer.add(single(b"x", index=last), first=last)
    assert ends(few) == end_at(last, last)
    assert peer.requests.count("CommandSubscribe") == opened


def test_a_reader_gets_no_entry_that_was_not_asked_for(
    peer: Peer, latest: list[LatestOffset]
) -> None:
    assert ends(latest) == end_at(0, 0)
    peer.add(single(b"a", index=1), single(b"b", index=2), first=1)
    assert ends(latest) == end_at(2, 2)
    peer.add(*[single(b"large" * 1000, index=3 + more) for more in range(9)], first=3)
    refresh_all(latest[:1])
    session = latest[0]._reader.session
    assert session is not None
    session.request(pb.CommandLookupTopicResponse, "answer", partial(commands.lookup, NAMES[0]))
    assert session.channels.unread_bytes() == 0


@pytest.mark.parametrize("entry_bytes", [1, 64 * 1024])
def test_far_from_the_last_end_one_entry_is_read_and_not_all_before_it(
    peer: Peer, latest: list[LatestOffset], entry_bytes: int
) -> None:
    assert ends(latest) == end_at(0, 0)
    peer.add(single(b"x" * entry_bytes, index=1), first=1)
    assert ends(latest) == end_at(1, 1)
    opened = peer.requests.count("CommandSubscribe")
    count = 17 if entry_bytes == 1 else 2
    peer.add(*[single(b"x", index=2 + more) for more in range(count)], first=2)
    assert ends(latest) == end_at(1 + count, 1 + count)
    assert peer.requests.count("CommandSubscribe") == opened + len(NAMES)
    assert peer.requests.count("CommandCloseConsumer") == 2 * len(NAMES)
    peer.add(single(b"x", index=100), first=2 + count)
    assert ends(latest) == end_at(2 + count, 100)
    assert peer.requests.count("CommandSubscribe") == opened + len(NAMES), "the new readers go on"


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """``gc.get_objects`` returns only what the test makes, not the millions that others have."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("only_new_objects")
def test_the_last_entries_are_not_kept_and_few_large_ones_come_at_once(
    peer: Peer, latest: list[LatestOffset], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.add(single(b"x" * 300_000, index=1), first=1)
    most_kept = most_granted = granted = 0

    def entry_of(*arguments: Any) -> EntryReceived | None:
        nonlocal granted, most_kept
        entry = next_entry(*arguments)
        granted -= 1
        most_kept = max(
            most_kept, sum(isinstance(known, EntryReceived) for known in gc.get_objects())
        )
        return entry

    def grant_to(session: Session, consumer: Consumer, permits: int) -> None:
        nonlocal granted, most_granted
        granted += permits
        most_granted = max(most_granted, granted)
        grant(session, consumer, permits)

    monkeypatch.setattr(reader, "next_entry", entry_of)
    monkeypatch.setattr(reader, "grant", grant_to)
    monkeypatch.setattr(reader, "_TOGETHER_BYTES", 5_000_000)
    # On a busy machine too they come together.
    monkeypatch.setattr(reader, "_AT_ONCE_S", 60.0)
    assert ends(latest) == end_at(1, 1)
    # Their size is not known before the first ones came.
    assert most_granted <= 5_000_000 // 300_000
    # Those that came behind the one that is described are not read yet.
    assert most_kept <= most_granted + 2


def test_the_first_entry_of_a_new_ledger_is_read_by_a_new_reader(
    peer: Peer, latest: list[LatestOffset]
) -> None:
    assert ends(latest) == end_at(0, 0)
    peer.add(single(b"x", index=1), ledger_id=9)
    assert ends(latest) == {PartitionOffset(Position(9, 0), None, BROKER_TIME_MS + 1, 1)}


def test_an_end_that_does_not_come_in_time_is_read_in_the_other_way_and_the_next_one_too(
    peer: Peer, latest: list[LatestOffset], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = latest[:3]
    monkeypatch.setattr(reader, "_AT_ONCE_S", -1.0)
    assert ends(few) == end_at(0, 0)
    peer.add(single(b"x", index=1), first=1)
    assert ends(few) == end_at(1, 1)
    monkeypatch.undo()
    peer.add(single(b"x", index=2), first=2)
    assert ends(few) == end_at(2, 2)


def test_an_end_is_read_over_a_connection_that_breaks_meanwhile(
    peer: Peer, latest: list[LatestOffset]
) -> None:
    assert ends(latest) == end_at(0, 0)
    peer.add(single(b"x", index=1), first=1)
    peer.drop_after = 130
    assert ends(latest) == end_at(1, 1)
    peer.add(single(b"x", index=2), first=2)
    assert ends(latest) == end_at(2, 2)


def test_the_reader_of_a_limited_stream_keeps_little_of_a_backlog_of_large_entries() -> None:
    with Peer() as peer:
        peer.add(*[single(b"x" * 1_900_000) for _ in range(40)])
        cluster = Cluster(ClientSettings(peer.url))
        limits, end = LimitPlanner(cluster, TOPIC), latest_offset(cluster, TOPIC)
        session = cluster.session_for(TOPIC)
        reached = PartitionOffset(BEFORE_ALL)
        for number in range(10):
            reached = limits.advance(reached.position, end, None, 4_000_000)
            assert reached.position == Position(7, 2 * number + 1)
            for _ in range(3):
                # Others use the connection until the next batch.
                latest_offset(cluster, TOPIC)
            assert session.channels.unread_bytes() < 10_000_000
        limits.close()
        cluster.close()


@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize(
    ("limit", "text"), [("maxBytesPerTrigger", "41000000"), ("maxRowsPerTrigger", "400")]
)
def test_what_limited_streams_keep_of_large_entries_does_not_grow_with_the_topics(
    peer: Peer, limit: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "READ_AHEAD_BYTES", 4_000_000)
    peer.add(*[single(b"x" * 100_000, index=1 + number) for number in range(40)], first=1)
    names = ",".join(NAMES[:40])
    planning = planner.Planner(
        parse_options(
            {"service.url": peer.url, "topics": names, "startingOffsets": "earliest", limit: text}
        )
    )
    start = planning.initial()
    for number in range(1, 4):
        start = planning.plan_end(start, limited=True)
        assert {offset.position.entry_id for offset in start.values()} <= {
            10 * number,
            10 * number - 1,
        }
        for _ in range(3):
            # Others use the connection until the next batch.
            latest_offset(planning._cluster, TOPIC)
        kept = [known for known in gc.get_objects() if isinstance(known, EntryReceived)]
        assert sum(len(entry.frames) for entry in kept) < 5_000_000
    planning.close()
