"""The client against a peer that misbehaves on request."""

from __future__ import annotations

import socket
import struct
from typing import Any

import pytest

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.cursor import DurableCursor
from ledgerlake.client.reader import EntryReader
from ledgerlake.errors import (
    BrokerError,
    ConsumerBusyError,
    DeadlineError,
    FrameTooLargeError,
    MalformedFrameError,
    ProtocolError,
    TopicNotFoundError,
    TransportError,
)
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source.read_until import next_until
from ledgerlake.wire import commands
from ledgerlake.wire.message_id import BEFORE_ALL, Position
from tests.entries import batch, single
from tests.peer import TOPIC, Peer


def cluster_of(peer: Peer, give_up_after_s: float = 5.0, request_timeout_s: float = 2.0) -> Cluster:
    settings = ClientSettings(
        peer.url,
        connect_timeout_s=2,
        request_timeout_s=request_timeout_s,
        give_up_after_s=give_up_after_s,
    )
    return Cluster(settings)


# A test that waited for an answer that is lost would not end.
NEVER_S = 3600.0


def read_all(reader: EntryReader, end: Position) -> list[int]:
    entry_ids = []
    while (entry := next_until(reader, end)) is not None:
        entry_ids.append(entry.entry_id)
    return entry_ids


def test_entries_come_in_order_and_end_where_the_range_ends() -> None:
    with Peer() as peer:
        peer.add(*[single(b"%d" % number) for number in range(10)])
        assert read_all(EntryReader(cluster_of(peer), TOPIC, BEFORE_ALL), Position(7, 6)) == list(
            range(7)
        )


def test_a_reader_goes_on_after_the_last_entry_taken_when_the_connection_breaks() -> None:
    with Peer(drop_after=4) as peer:
        peer.add(*[single(b"%d" % number) for number in range(10)])
        assert read_all(
            EntryReader(cluster_of(peer), TOPIC, Position(7, -1)), Position(7, 9)
        ) == list(range(10))
        assert peer.requests.count("CommandLookupTopic") == 2


def test_entries_that_the_broker_repeats_are_taken_once() -> None:
    with Peer() as peer:
        entries = [single(b"x")] * 3
        peer.add(*entries)
        peer.entries.insert(2, peer.entries[0])
        peer.rewrite = lambda _position, frame: frame + frame
        assert read_all(EntryReader(cluster_of(peer), TOPIC, BEFORE_ALL), Position(7, 2)) == [
            0,
            1,
            2,
        ]


@pytest.mark.parametrize("end", [Position(7, 5), Position(7, 999), Position(8, 0)])
def test_a_range_whose_last_entry_never_comes_still_ends(end: Position) -> None:
    with Peer() as peer:
        peer.add(single(b"a"), single(b"b"))
        assert read_all(EntryReader(cluster_of(peer), TOPIC, BEFORE_ALL), end) == [0, 1]


def test_a_range_that_ends_in_a_hole_ends_at_the_first_entry_behind_it() -> None:
    with Peer() as peer:
        peer.add(single(b"a"))
        peer.add(single(b"b"), first=9)
        assert read_all(EntryReader(cluster_of(peer), TOPIC, BEFORE_ALL), Position(7, 5)) == [0]


def test_a_topic_that_was_trimmed_altogether_ends_a_range_at_once() -> None:
    with Peer(last_position=Position(-1, -1)) as peer:
        assert read_all(EntryReader(cluster_of(peer), TOPIC, BEFORE_ALL), Position(7, 5)) == []


def test_a_redirected_lookup_reads_from_the_owner() -> None:
    with Peer() as owner, Peer() as other:
        owner.add(single(b"x"))
        other.lookup = {
            "response": pb.CommandLookupTopicResponse.Redirect,
            "broker_service_url": owner.url,
        }
        assert read_all(EntryReader(cluster_of(other), TOPIC, BEFORE_ALL), Position(7, 0)) == [0]
        assert "CommandSubscribe" not in other.requests


def test_an_owner_behind_a_proxy_is_reached_through_the_service_address() -> None:
    with Peer() as proxy:
        proxy.add(single(b"x"))
        proxy.lookup = {
            "broker_service_url": "pulsar://hidden:6650",
            "proxy_through_service_url": True,
        }
        assert read_all(EntryReader(cluster_of(proxy), TOPIC, BEFORE_ALL), Position(7, 0)) == [0]
        assert proxy.proxied_to == "pulsar://hidden:6650"


def test_permits_flow_for_batches_larger_than_the_window() -> None:
    with Peer() as peer:
        peer.add(*[batch([b"x"] * 50) for _ in range(40)])
        assert (
            len(
                read_all(
                    EntryReader(cluster_of(peer), TOPIC, BEFORE_ALL, window=10), Position(7, 39)
                )
            )
            == 40
        )


def test_a_count_that_lies_about_its_permits_does_not_stall_the_reader() -> None:
    with Peer() as peer:
        peer.add(*[batch([b"x"] * 50) for _ in range(10)])
        peer.rewrite = lambda position, frame: commands.message(
            _consumer(frame), 7, position.entry_id, b"unreadable"
        )
        assert (
            len(
                read_all(
                    EntryReader(cluster_of(peer), TOPIC, BEFORE_ALL, window=100), Position(7, 9)
                )
            )
            == 10
        )


def _consumer(frame: bytes) -> int:
    (size,) = struct.unpack_from(">I", frame, 4)
    return int(pb.BaseCommand.FromString(frame[8 : 8 + size]).message.consumer_id)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        pytest.param(
            lambda frame: struct.pack(">I", 2**31) + frame[4:],
            FrameTooLargeError,
            id="frame over the limit",
        ),
        pytest.param(
            lambda frame: frame[:4] + struct.pack(">I", 2**30) + frame[8:],
            MalformedFrameError,
            id="command over its frame",
        ),
        pytest.param(
            lambda frame: frame[:8] + b"\xff" * 8 + frame[16:],
            MalformedFrameError,
            id="command garbage",
        ),
    ],
)
def test_lost_framing_ends_the_connection_with_a_typed_error_and_the_next_one_goes_on(
    damage: Any, error: Any
) -> None:
    with Peer() as peer:
        peer.add(*[single(b"%d" % number) for number in range(5)])
        strikes = iter([True])
        peer.rewrite = lambda position, frame: (
            damage(frame) if position.entry_id == 2 and next(strikes, False) else frame
        )
        assert read_all(EntryReader(cluster_of(peer), TOPIC, BEFORE_ALL), Position(7, 4)) == list(
            range(5)
        )
        peer.rewrite = lambda _position, frame: damage(frame)
        with pytest.raises(error):
            read_all(
                EntryReader(cluster_of(peer, give_up_after_s=0.3), TOPIC, BEFORE_ALL),
                Position(7, 4),
            )


def test_a_frame_over_the_announced_size_is_never_held_in_memory() -> None:
    with Peer(max_message_bytes=1000) as peer:
        peer.add(single(b"x" * 50_000))
        with pytest.raises(FrameTooLargeError, match="over the limit"):
            read_all(
                EntryReader(cluster_of(peer, give_up_after_s=0.3), TOPIC, BEFORE_ALL),
                Position(7, 0),
            )


def test_a_refusal_that_passes_is_tried_again_and_one_that_does_not_is_not() -> None:
    with Peer(refuse_subscribe=[pb.ServiceNotReady, pb.ServiceNotReady]) as peer:
        peer.add(single(b"x"))
        assert read_all(EntryReader(cluster_of(peer), TOPIC, BEFORE_ALL), Position(7, 0)) == [0]
    with Peer(refuse_subscribe=[pb.AuthorizationError]) as peer:
        with pytest.raises(BrokerError, match="AuthorizationError"):
            EntryReader(cluster_of(peer), TOPIC, BEFORE_ALL).next(1)
    with Peer(refuse_subscribe=[pb.TopicNotFound]) as peer:
        with pytest.raises(TopicNotFoundError):
            EntryReader(cluster_of(peer), TOPIC, BEFORE_ALL).next(1)


@pytest.mark.parametrize("can_read_last", [True, False])
def test_a_broker_that_sends_none_of_its_entries_is_a_deadline_unless_it_can_read_the_last_one(
    can_read_last: bool,
) -> None:
    with Peer() as peer:
        peer.add(single(b"a"), single(b"b"))
        peer.hold_back = {Position(7, 0), Position(7, 1)}
        peer.unreadable_last = not can_read_last
        reader = EntryReader(
            Cluster(ClientSettings(peer.url, poll_timeout_s=0.5)), TOPIC, BEFORE_ALL
        )
        if can_read_last:
            assert read_all(reader, Position(7, 1)) == []
            assert reader.is_passed_over
        else:
            with pytest.raises(DeadlineError, match="sends none"):
                read_all(reader, Position(7, 1))


def test_a_peer_that_never_answers_is_a_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"pulsar://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DeadlineError, match="did not greet us"):
            Cluster(ClientSettings(url, request_timeout_s=0.3)).topic_partitions("t")


def test_a_peer_that_is_no_broker_is_a_protocol_error() -> None:
    with Peer(greeting=b"HTTP/1.1 400 Bad Request\r\n\r\n") as peer:
        with pytest.raises(ProtocolError):
            cluster_of(peer).topic_partitions("t")


def test_nobody_listening_is_one_sentence_with_the_address() -> None:
    with pytest.raises(
        TransportError, match=r"no broker listens at pulsar://127.0.0.1:1 .*start it or correct"
    ):
        Cluster(ClientSettings("pulsar://127.0.0.1:1")).topic_partitions("t")


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_host_name_that_there_cannot_be_is_one_sentence(host: str) -> None:
    with pytest.raises(
        TransportError,
        match=f"the address pulsar://{host}:6650 has a host name that there cannot be",
    ):
        Cluster(ClientSettings(f"pulsar://{host}", give_up_after_s=0.0)).topic_partitions("t")


def test_a_cursor_is_moved_by_cumulative_acknowledgement() -> None:
    with Peer() as peer:
        peer.add(*[b"entry"] * 5)
        cursor = DurableCursor(cluster_of(peer), TOPIC, "s")
        cursor.ensure(from_earliest=True)
        cursor.advance(Position(7, 3))
        assert peer.acknowledged == Position(7, 3)
        peer.disconnect()
        cursor.advance(Position(7, 4))
        assert peer.acknowledged == Position(7, 4)


def test_an_acknowledgement_that_an_unload_swallows_is_repeated_at_once() -> None:
    with Peer(unloads_at=[pb.CommandAck]) as peer:
        peer.add(*[single(b"x")] * 3)
        cursor = DurableCursor(cluster_of(peer, request_timeout_s=NEVER_S), TOPIC, "s")
        cursor.ensure(from_earliest=True)
        cursor.advance(Position(7, 2))
        assert peer.acknowledged == Position(7, 2)


@pytest.mark.parametrize("asks_ahead", [False, True])
def test_a_question_for_the_last_message_that_an_unload_swallows_is_repeated_at_once(
    asks_ahead: bool,
) -> None:
    with Peer(unloads_at=[pb.CommandGetLastMessageId]) as peer:
        peer.add(*[single(b"x")] * 3)
        reader = EntryReader(cluster_of(peer, request_timeout_s=NEVER_S), TOPIC, BEFORE_ALL)
        assert reader.next(1.0) is not None
        if asks_ahead:
            reader.ask_last_message()
            while (session := reader.session) is not None:
                assert session.usable
        last = reader.last_message()
        assert last is not None
        assert last.answer.last_message_id.entry_id == 2


def test_where_the_broker_cannot_read_the_last_entry_a_cursor_is_before_the_first_one_that_it_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ledgerlake.client.cursor._UNREAD_S", 1.0)
    with Peer(unreadable_last=True) as peer:
        peer.add(*[single(b"x")] * 4)
        cursor = DurableCursor(cluster_of(peer), TOPIC, "s")
        assert [cursor.position(), cursor.position()] == [Position(7, -1)] * 2
        cursor.advance(Position(7, 1))
        peer.disconnect()
        assert cursor.position() == Position(7, 1)
        cursor.advance(Position(7, 3))
        peer.disconnect()
        assert cursor.position() is None


def test_a_cursor_on_another_topic_of_the_same_name_moves_from_its_beginning() -> None:
    with Peer() as peer:
        peer.add(*[b"entry"] * 5)
        cursor = DurableCursor(cluster_of(peer), TOPIC, "s")
        cursor.advance(Position(7, 3))
        peer.disconnect()
        peer.entries.clear()
        peer.acknowledged = None
        peer.add(b"new", b"newer", ledger_id=2)
        cursor.advance(Position(7, 4))
        assert peer.acknowledged is None
        cursor.advance(Position(2, 0))
        assert peer.acknowledged == Position(2, 0)


@pytest.mark.parametrize("stranger", [Position(50, 9), Position(3, 9)])
def test_a_cursor_that_is_told_of_an_earlier_topic_again_and_again_moves_by_the_present_one(
    stranger: Position,
) -> None:
    with Peer() as peer:
        peer.add(b"a", b"b", ledger_id=3)
        cursor = DurableCursor(cluster_of(peer), TOPIC, "s")
        for _ in range(3):
            cursor.advance(stranger)
        assert peer.acknowledged is None
        cursor.advance(Position(3, 0))
        assert peer.acknowledged == Position(3, 0)


def test_an_acknowledgement_that_was_interrupted_is_not_repeated_on_another_topic_of_the_same_name() -> (
    None
):
    with Peer() as peer:
        peer.add(*[b"entry"] * 5)
        cursor = DurableCursor(cluster_of(peer), TOPIC, "s")
        cursor.advance(Position(7, 3))
        peer.entries.clear()
        peer.acknowledged = None
        peer.add(b"new", b"newer", ledger_id=2)
        peer.drop_acknowledgements = 1
        cursor.advance(Position(7, 4))
        assert peer.drop_acknowledgements == 0
        assert peer.acknowledged is None


def test_a_cursor_is_made_although_the_broker_is_not_ready_at_first() -> None:
    with Peer(refuse_subscribe=[pb.ServiceNotReady]) as peer:
        DurableCursor(cluster_of(peer), TOPIC, "s").make(from_earliest=True)
        assert not peer.refuse_subscribe


def test_a_cursor_that_is_to_be_made_and_is_held_is_there() -> None:
    with Peer(refuse_subscribe=[pb.ConsumerBusy] * 2) as peer:
        with pytest.raises(ConsumerBusyError):
            DurableCursor(cluster_of(peer), TOPIC, "s").make(from_earliest=True)
        assert len(peer.refuse_subscribe) == 1


def test_a_cursor_waits_for_a_dead_holder_and_then_says_who_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The broker needs its time, however soon the client gives up a broker that is not there.
    with Peer(refuse_subscribe=[pb.ConsumerBusy] * 4) as peer:
        DurableCursor(cluster_of(peer, give_up_after_s=0.1), TOPIC, "s").ensure(from_earliest=True)
    monkeypatch.setattr("ledgerlake.client.cursor.BUSY_FOR_S", 0.5)
    with Peer(refuse_subscribe=[pb.ConsumerBusy] * 1000) as peer:
        with pytest.raises(ConsumerBusyError, match="another consumer holds"):
            DurableCursor(cluster_of(peer), TOPIC, "s").ensure(from_earliest=True)


def test_a_reader_waits_until_the_broker_takes_one_more_consumer() -> None:
    with Peer(refuse_subscribe=[pb.ConsumerBusy]) as peer:
        peer.add(single(b"a"))
        reader = EntryReader(cluster_of(peer), TOPIC, BEFORE_ALL)
        assert reader.next(5.0) is not None
        reader.close()
    refusal = (pb.ConsumerBusy, "Topic reached max consumers limit")
    with Peer(refuse_topics={TOPIC: refusal}) as peer:
        cluster = cluster_of(peer, give_up_after_s=0.3)
        for call in (
            EntryReader(cluster, TOPIC, BEFORE_ALL).next,
            DurableCursor(cluster, TOPIC, "s").ensure,
        ):
            with pytest.raises(
                BrokerError, match="max consumers limit; raise the limit of consumers"
            ) as raised:
                call(True)
            assert not isinstance(raised.value, ConsumerBusyError)
            assert raised.value.exit_code == 3


def test_a_look_at_a_connection_does_not_wait() -> None:
    with Peer() as peer:
        session = cluster_of(peer).session_for(TOPIC)
        assert session.usable
        assert session._transport._socket.gettimeout() == 0.0
