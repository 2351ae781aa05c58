"""Message expiry (TTL) moves the cursors of readers past entries that were not sent: they are read
all the same.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.decode.scan import scan
from ledgerlake.source import read_until
from ledgerlake.source.batch_limits import LimitPlanner
from ledgerlake.source.read_until import next_together_until
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.wire.message_id import BEFORE_ALL, Position
from tests.entries import single
from tests.peer import TOPIC, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def cluster_of() -> Iterator[Callable[[Peer], Cluster]]:
    clusters: list[Cluster] = []

    def make(peer: Peer) -> Cluster:
        clusters.append(Cluster(ClientSettings(peer.url, give_up_after_s=5)))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a broker does not send at once, it does not send."""
    monkeypatch.setattr(read_until, "_IDLE_FIRST_S", 0.02)
    monkeypatch.setattr(read_until, "_BEGIN_AGAIN_S", 0.03)


def read_all(reader: EntryReader, end: Position) -> list[Position]:
    positions = []
    while (received := next_together_until(reader, end)) is not None:
        positions += [entry.position for entry in received.each()]
    reader.close()
    return positions


def fill(peer: Peer, rng: random.Random) -> list[Position]:
    """Store entries in a few ledgers, with markers and holes; return the positions of the
    messages.
    """
    for ledger_id in sorted(rng.sample(range(3, 12), rng.randint(1, 3))):
        for entry_id in range(rng.choice([1, 3, 12])):
            if rng.random() < 0.9:
                peer.add(single(b"x"), ledger_id=ledger_id, first=entry_id)
    peer.add(single(b"x"), ledger_id=20)
    peer.markers = {position for position, _ in peer.entries if rng.random() < 0.25}
    return [position for position, _ in peer.entries if position not in peer.markers]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("seed", range(80))
def test_whenever_expiry_runs_every_message_is_read_once_and_in_order(
    seed: int, cluster_of: Callable[[Peer], Cluster]
) -> None:
    rng = random.Random(seed)
    with Peer() as peer:
        messages = fill(peer, rng)
        peer.stalled = rng.choice([0, 0, 1, 2])
        step = 0
        for _ in range(rng.randint(1, 3)):
            # It does not run for two consumers that are opened soon one after the other.
            step += rng.randint(6, 12) if step else rng.randint(1, 8)
            peer.expirations.append((step, rng.choice(peer.entries)[0]))
        begin = rng.choice([BEFORE_ALL, Position(peer.entries[0][0].ledger_id, -1)])
        window = rng.choice([1, 2, 5, 1000])
        reader = EntryReader(
            cluster_of(peer), TOPIC, begin, window, scan=scan if rng.random() < 0.5 else None
        )
        assert read_all(reader, peer.entries[-1][0]) == messages


@pytest.mark.parametrize("markers", [0, 1])
def test_markers_between_messages_cost_few_questions_unless_expiry_ran(
    markers: int, cluster_of: Callable[[Peer], Cluster]
) -> None:
    with Peer() as peer:
        peer.add(*[single(b"x")] * 400)
        peer.markers = {Position(7, number) for number in range(1, 399, 2)} if markers else set()
        reader = EntryReader(cluster_of(peer), TOPIC, Position(7, -1), scan=scan)
        assert len(read_all(reader, Position(7, 399))) == 400 - len(peer.markers)
        assert peer.requests.count("CommandSubscribe") == 1
        assert peer.requests.count("CommandGetLastMessageId") <= 40 * markers


def test_what_expiry_passed_over_comes_to_one_new_consumer(
    cluster_of: Callable[[Peer], Cluster],
) -> None:
    with Peer() as peer:
        peer.add(*[single(b"x")] * 400)
        peer.expirations = [(10, Position(7, 300))]
        reader = EntryReader(cluster_of(peer), TOPIC, Position(7, -1), window=4)
        assert len(read_all(reader, Position(7, 399))) == 400
        assert peer.requests.count("CommandSubscribe") == 2


@pytest.mark.usefixtures("soon")
def test_the_end_of_a_limited_batch_does_not_pass_over_what_expired(
    cluster_of: Callable[[Peer], Cluster],
) -> None:
    with Peer(stalled=2, expirations=[(2, Position(7, 9))]) as peer:
        peer.add(*[single(b"x")] * 10)
        planner = LimitPlanner(cluster_of(peer), TOPIC)
        end = PartitionOffset(Position(7, 9))
        assert planner.advance(Position(7, -1), end, 2, None).position == Position(7, 1)
        planner.close()
