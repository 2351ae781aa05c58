"""Entries whose claims of messages mislead the broker's count: none is lost, and none stops
a read.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.client import reader as reader_module
from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.errors import DeadlineError
from ledgerlake.options.source_options import parse_options
from ledgerlake.reasons import DATA_LOSS
from ledgerlake.source import read_until
from ledgerlake.source.bounds import resolve_start
from ledgerlake.source.latest_offset import LatestOffset
from ledgerlake.source.planning import EntryRange
from ledgerlake.source.views import read_messages
from ledgerlake.wire.message_id import BEFORE_ALL, Position
from tests.entries import BROKER_TIME_MS, batch, single
from tests.peer import TOPIC, Peer

if TYPE_CHECKING:
    from ledgerlake.options.source_options import SourceOptions


def options_for(peer: Peer, **more: str) -> SourceOptions:
    return parse_options(
        {"service.url": peer.url, "topic": TOPIC, "retryTimeoutMs": "3000", **more}
    )


def claims(count: int) -> bytes:
    """A batch of one message that says it has another number of them."""
    return batch([b"hostile"], num_messages_in_batch=count)


def values(peer: Peer, after: Position, end: Position, **more: str) -> list[Any]:
    """The values of a range, of a reject its entry's id."""
    rows = [
        row
        for part in read_messages(options_for(peer, **more), span(after, end))
        for row in part.to_pylist()
    ]
    return [row["value"] if row["reject_reason"] is None else row["entry_id"] for row in rows]


def span(after: Position, end: Position) -> EntryRange:
    return EntryRange(TOPIC, after, end, is_end_stored=True)


@pytest.mark.parametrize("messages", [0, 2])
@pytest.mark.parametrize("markers", [1, 3])
def test_a_range_that_ends_with_markers_is_read_without_a_loss(messages: int, markers: int) -> None:
    with Peer() as peer:
        peer.add(*[single(b"message")] * messages, *[b"marker"] * markers)
        peer.markers = {position for position, _ in peer.entries[messages:]}
        end = peer.entries[-1][0]
        assert values(peer, BEFORE_ALL, end, pollTimeoutMs="20000") == [b"message"] * messages


def test_what_message_expiry_acknowledges_while_a_range_is_read_comes_to_new_consumers() -> None:
    with Peer() as peer:
        peer.add(*[single(b"message")] * 4)
        peer.expires = True
        assert (
            values(peer, BEFORE_ALL, peer.entries[-1][0], pollTimeoutMs="20000") == [b"message"] * 4
        )


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize(
    "hostile_ones",
    [
        pytest.param([-1], id="one that cancels it"),
        pytest.param([2**31 - 1, -(2**31), 0], id="several that cancel it together"),
        pytest.param([-1, 0, 0], id="one that cancels it, and others that claim nothing"),
    ],
)
def test_a_message_that_a_claim_cancels_is_read(hostile_ones: list[int], follows: bool) -> None:
    with Peer(adds_up_claims=True) as peer:
        peer.add(single(b"before"), single(b"honest"), *(claims(count) for count in hostile_ones))
        end = peer.entries[-1][0] if not follows else Position(7, 1)
        if follows:
            peer.add(single(b"after"), first=len(peer.entries))
        got = values(peer, Position(7, 0), end)
        assert got[0] == b"honest"
        assert values(peer, Position(7, 0), Position(7, 2))[:1] == [b"honest"]


@pytest.mark.parametrize("answers_s", [0.3, None])
def test_a_broker_that_skips_for_long_before_it_sends_a_hidden_message_is_waited_for(
    answers_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_HIDDEN_S", 0.1)
    take, slow_since_s = EntryReader.next, time.monotonic()

    def slow(reader: EntryReader, timeout_s: float) -> Any:
        if answers_s is None or time.monotonic() - slow_since_s < answers_s:
            time.sleep(timeout_s)
            return None
        return take(reader, timeout_s)

    with Peer(adds_up_claims=True) as peer:
        peer.add(single(b"honest"), *map(single, [b"more"] * 98), claims(-99))
        peer.add(single(b"last"), ledger_id=9)
        monkeypatch.setattr(EntryReader, "next", slow)
        with contextlib.suppress(DeadlineError) if answers_s is None else contextlib.nullcontext():
            assert (
                values(peer, Position(7, -1), Position(9, 0), retryTimeoutMs="500")[0] == b"honest"
            )


def test_the_first_ledger_of_a_topic_that_a_claim_hides_is_read() -> None:
    with Peer(adds_up_claims=True) as peer:
        honest = [b"%d" % number for number in range(99)]
        peer.add(*map(single, honest), claims(-99))
        peer.add(single(b"last"), ledger_id=9)
        got = values(peer, BEFORE_ALL, Position(9, 0))
        assert [value for value in got if isinstance(value, bytes)] == [*honest, b"last"]


def test_messages_that_are_cancelled_within_a_range_or_before_a_change_of_ledger_are_read() -> None:
    with Peer(adds_up_claims=True) as peer:
        honest = [b"%d" % number for number in range(99)]
        peer.add(*map(single, honest), claims(-99))
        peer.add(*map(single, honest), claims(-99), ledger_id=9)
        peer.add(single(b"last"), ledger_id=12)
        got = values(peer, Position(7, -1), Position(12, 0))
        assert [value for value in got if isinstance(value, bytes)] == [*honest, *honest, b"last"]


def test_hidden_messages_are_read_only_as_they_are_taken() -> None:
    with Peer(adds_up_claims=True) as peer:
        peer.add(
            single(b"first"),
            *map(single, [b"honest"] * 50),
            *(claims(-1) for _ in range(50)),
            single(b"last"),
        )
        reader = EntryReader(Cluster(ClientSettings(peer.url)), TOPIC, Position(7, 0))
        taken = []
        for number in range(1, 102):
            entry = reader.next_together(20)
            assert entry is not None
            taken.append(entry.last.entry_id)
            assert peer.requests.count("CommandSubscribe") <= number + 1
        assert taken == list(range(1, 102))
        reader.close()


@pytest.mark.parametrize("claimed", [2**31 - 1, -(2**31), -(2**31) + 5, -(2**30), -100_000])
def test_a_claim_that_overflows_the_brokers_count_stops_no_reader(claimed: int) -> None:
    with Peer(adds_up_claims=True) as peer:
        honest = [b"%d" % number for number in range(300)]
        peer.add(single(b"first"), claims(claimed), *map(single, honest))
        got = values(peer, BEFORE_ALL, peer.entries[-1][0])
        assert [value for value in got if isinstance(value, bytes)] == [b"first", *honest]


def test_a_last_entry_that_claims_no_message_is_read_together_with_the_one_before_it() -> None:
    with Peer(adds_up_claims=True) as peer:
        peer.add(single(b"first", index=0), claims(0))
        cluster = Cluster(ClientSettings(peer.url, give_up_after_s=2))
        latest = LatestOffset(cluster, TOPIC).get()
        assert (latest.position, latest.time_ms) == (Position(7, 1), BROKER_TIME_MS)
        assert values(peer, Position(7, 0), Position(7, 1), pollTimeoutMs="3000") == [1]


def test_an_entry_that_a_broker_names_and_never_sends_is_a_reject_only_if_losses_are() -> None:
    with Peer(adds_up_claims=True) as peer:
        peer.add(claims(0), claims(0))
        where = span(BEFORE_ALL, Position(7, 1))
        options = options_for(peer, pollTimeoutMs="1000", failOnDataLoss="false")
        rows = [row for part in read_messages(options, where) for row in part.to_pylist()]
        assert [(row["message_id"], row["reject_reason"]) for row in rows] == [("0:0", DATA_LOSS)]
        with pytest.raises(DeadlineError, match="the broker names them and does not send them"):
            list(
                read_messages(options_for(peer, pollTimeoutMs="1000", failOnDataLoss="true"), where)
            )


def test_the_beginning_of_a_topic_whose_last_entry_is_unreadable_takes_one_entry() -> None:
    with Peer(unreadable_last=True) as peer:
        peer.add(*[single(b"x")] * 300)
        assert resolve_start(
            Cluster(ClientSettings(peer.url)), TOPIC, "earliest"
        ).position == Position(7, -1)
        assert peer._sent <= 2


def test_a_topic_whose_last_entry_stays_unreadable_is_followed_by_one_reader() -> None:
    with Peer(unreadable_last=True) as peer:
        peer.add(single(b"a"))
        latest = LatestOffset(Cluster(ClientSettings(peer.url)), TOPIC)
        ends = []
        opened = []
        for _ in range(4):
            latest.expire()
            ends.append(latest.get().position.entry_id)
            opened.append(peer.requests.count("CommandSubscribe"))
        assert ends == [0] * 4
        # The first time finds the end, which is described, and the second time reads on from there.
        assert opened[1:] == [opened[1]] * 3
        latest.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is slow for a moment is not a broker that sends nothing."""
    monkeypatch.setattr(read_until, "_IDLE_FIRST_S", 30.0)


@pytest.mark.usefixtures("patient")
def test_a_hole_of_one_entry_costs_nothing_and_a_longer_one_a_single_consumer() -> None:
    with Peer(adds_up_claims=True) as peer:
        for number in range(50):
            peer.add(single(b"x"), first=2 * number)
        end = peer.entries[-1][0]
        assert len(values(peer, Position(7, -1), end)) == 50
        assert peer.requests.count("CommandSubscribe") == 1
        peer.add(single(b"y"), first=200)
        assert len(values(peer, Position(7, -1), Position(7, 200))) == 51
        assert peer.requests.count("CommandSubscribe") == 3


@pytest.mark.usefixtures("patient")
def test_a_compacted_topic_has_holes_for_which_nothing_is_asked() -> None:
    with Peer() as peer:
        peer.compacted = [(Position(7, 10 * number), single(b"x")) for number in range(20)]
        options = options_for(peer, readCompacted="true")
        first = replace(span(Position(7, -1), Position(7, 190)), is_first=True)
        assert sum(part.num_rows for part in read_messages(options, first)) == 20
        assert peer.requests.count("CommandSubscribe") == 1
