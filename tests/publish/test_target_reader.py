"""What a topic has of messages that were sent before: found behind an entry, by producer and
number.
"""

from __future__ import annotations

import logging
import threading

import pytest

from ledgerlake.client.cluster import ClientSettings
from ledgerlake.errors import TransportError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.publish import target_reader
from ledgerlake.publish.target_reader import TargetReader
from ledgerlake.wire.message_id import BEFORE_ALL, Position
from tests.entries import single
from tests.peer import TOPIC, Peer

OURS = "ledgerlake-s-abcd-t"


def sent(number: int, producer: str = OURS, **fields: int) -> bytes:
    origin = pb.KeyValue(key="ledgerlake.message_id", value=f"1:{number}")
    return single(b"due", producer_name=producer, sequence_id=number, properties=[origin], **fields)


def reader_of(peer: Peer) -> TargetReader:
    return TargetReader(
        ClientSettings(peer.url, connect_timeout_s=2, request_timeout_s=2), threading.Event()
    )


def last_numbers(
    peer: Peer, after: Position | None = BEFORE_ALL, following: int = 100
) -> dict[str, int]:
    return reader_of(peer).last_numbers(TOPIC, after, {OURS: following, f"{OURS}-2": following})


def test_each_producer_has_its_last_number_whoever_else_sends() -> None:
    with Peer() as peer:
        peer.add(
            sent(3),
            sent(99, "another"),
            sent(1, f"{OURS}-2"),
            sent(5),
            single(b"", producer_name=OURS, sequence_id=7),
        )
        peer.add(b"no entry", first=6)
        assert last_numbers(peer) == {OURS: 5, f"{OURS}-2": 1}


def test_nothing_is_looked_for_before_the_sending_began() -> None:
    with Peer() as peer:
        peer.add(sent(3), sent(4), sent(5, f"{OURS}-2"))
        assert last_numbers(peer, Position(7, 1)) == {f"{OURS}-2": 5}


def test_an_empty_topic_and_one_that_is_gone_have_nothing() -> None:
    with Peer() as peer:
        assert (reader_of(peer).ends([TOPIC]), last_numbers(peer)) == ({TOPIC: BEFORE_ALL}, {})
        peer.is_deleted = True
        assert (reader_of(peer).ends([TOPIC]), last_numbers(peer)) == ({TOPIC: BEFORE_ALL}, {})


def test_a_large_message_without_its_last_chunk_is_not_there() -> None:
    with Peer() as peer:
        chunks = [sent(4, chunk_id=number, num_chunks_from_msg=3) for number in range(3)]
        peer.add(sent(3), *chunks[:2])
        assert last_numbers(peer) == {OURS: 3}
        peer.add(chunks[2], first=3)
        assert last_numbers(peer) == {OURS: 4}


def test_a_number_that_the_micro_batch_does_not_have_is_not_believed_whoever_sent_it() -> None:
    with Peer() as peer:
        peer.add(sent(3), sent(20), sent(2**63))
        assert last_numbers(peer, following=20) == {OURS: 3}


def test_a_search_is_bounded_and_says_what_may_happen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(target_reader, "_ENTRIES_MOST", 2)
    with Peer() as peer, caplog.at_level(logging.WARNING):
        peer.add(sent(3), sent(4))
        assert last_numbers(peer) == {OURS: 4}
        assert caplog.records == []
        peer.add(sent(5), first=2)
        assert last_numbers(peer) == {OURS: 4}
    assert [record.message for record in caplog.records] == [
        f"due messages may have been sent to {TOPIC} before, the broker does not say up to where, "
        "and the topic does not tell (only 2 entries of it are read); some may be there twice"
    ]


def test_a_topic_that_may_not_be_read_has_no_known_end_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        Peer(refuse_subscribe=[pb.AuthorizationError] * 2) as peer,
        caplog.at_level(logging.WARNING),
    ):
        assert reader_of(peer).ends([TOPIC]) == {TOPIC: None}
        assert last_numbers(peer) == {}
    assert [
        record.message.rpartition(", ")[2].rpartition("; ")[2] for record in caplog.records
    ] == [
        "some due messages will be there twice: allow this role to consume that topic",
        "some may be there twice",
    ]


def test_a_broker_that_goes_away_is_asked_again_by_the_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target_reader, "_GIVE_UP_S", 0.1)
    with Peer() as peer:
        url = peer.url
    reader = TargetReader(ClientSettings(url, connect_timeout_s=2), threading.Event())
    with pytest.raises(TransportError):
        reader.last_numbers(TOPIC, BEFORE_ALL, {OURS: 9})
