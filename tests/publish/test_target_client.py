"""The producers of due messages: in order, each answered once, and no chunk twice under one
uuid.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ledgerlake.client.cluster import ClientSettings
from ledgerlake.client.producer import NumberedProducer
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.publish.target_client import Receipt, TargetClient
from ledgerlake.wire.entry import parse_entry
from tests.peer import Peer
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

TOPIC = "persistent://public/default/due"
KIBIBYTE = 1024
LARGE = bytes(range(256)) * 12


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer(max_message_bytes=KIBIBYTE) as broker:
        yield broker


class Sending:
    """Messages sent one after another, and what became of them."""

    def __init__(self, peer: Peer, earlier_number: int = -1) -> None:
        self.client = TargetClient(ClientSettings(peer.url, give_up_after_s=2))
        (target,) = self.client.partitions(TOPIC)
        self._producer = self.client.open_producer(target, "p", earlier_number)
        self.receipts: dict[int, Receipt] = {}
        self._answered = threading.Condition()

    def __call__(self, *contents: bytes, first: int = 0, wait_s: float = 20, **fields: str) -> None:
        for number, content in enumerate(contents, first):
            metadata = pb.MessageMetadata(sequence_id=number, **fields)  # type: ignore[arg-type]
            self._producer.send(metadata, content, partial(self._answer, number))
        with self._answered:
            assert self._answered.wait_for(
                lambda: len(self.receipts) == first + len(contents), wait_s
            )

    def _answer(self, number: int, receipt: Receipt) -> None:
        with self._answered:
            assert number not in self.receipts
            self.receipts[number] = receipt
            self._answered.notify()

    @property
    def names(self) -> list[str]:
        return [self.receipts[number].name for number in sorted(self.receipts)]


def chunk_ids(peer: Peer) -> dict[str, list[int]]:
    ids_by_uuid: dict[str, list[int]] = {}
    for entry in map(parse_entry, peer.received):
        if entry.metadata.num_chunks_from_msg > 1:
            ids_by_uuid.setdefault(entry.metadata.uuid, []).append(entry.metadata.chunk_id)
    return ids_by_uuid


def test_messages_of_all_sizes_are_stored_in_order_and_answered(peer: Peer) -> None:
    sending = Sending(peer)
    sending(b"first", LARGE, b"", b"last")
    sending.client.close()
    assert sending.names == ["Ok"] * 4
    assert [sequence_id for sequence_id, _ in peer.stored] == [0, 1, 2, 3]
    assert [ids == list(range(len(ids))) for ids in chunk_ids(peer).values()] == [True]
    assert all(receipt.position.is_storable for receipt in sending.receipts.values())


@pytest.mark.parametrize("received", [1, 2, 3, 5, 6])
def test_after_a_disconnect_no_chunk_stands_there_twice_under_one_uuid(
    peer: Peer, received: int
) -> None:
    peer.drop_after_received = received
    sending = Sending(peer)
    sending(b"first", LARGE, b"last")
    sending.client.close()
    assert sending.names == ["Ok"] * 3
    assert [sequence_id for sequence_id, _ in peer.stored] == [0, 1, 2]
    attempts = list(chunk_ids(peer).values())
    assert all(ids == list(range(len(ids))) for ids in attempts)
    assert max(map(len, attempts)) > 3


def test_a_large_message_before_the_last_number_that_the_broker_knows_is_not_sent_again(
    peer: Peer,
) -> None:
    peer.stored = [(0, 0), (1, 1), (2, 2)]
    sending = Sending(peer, earlier_number=2)
    sending(b"first", LARGE, b"last")
    sending.client.close()
    assert sending.names == ["Ok"] * 3
    assert [parse_entry(raw).metadata.sequence_id for raw in peer.received] == [0, 2]


def test_a_large_message_that_the_broker_has_only_begun_to_store_is_sent_again(peer: Peer) -> None:
    sending = Sending(peer, earlier_number=0)
    sending(b"first")
    peer.pushes_only = True
    with pytest.raises(AssertionError):
        sending(LARGE, first=1, wait_s=0.5)
    peer.pushes_only = False
    peer.disconnect()
    wait_until(lambda: 1 in sending.receipts)
    sending.client.close()
    assert sending.names == ["Ok"] * 2
    assert [sequence_id for sequence_id, _ in peer.stored] == [0, 1]


def test_metadata_that_the_broker_does_not_take_are_answered_at_once_and_hold_up_nothing(
    peer: Peer,
) -> None:
    sending = Sending(peer)
    sending(b"too large", partition_key="k" * 2 * KIBIBYTE)
    assert sending.names == ["MessageTooBig"]
    sending(b"in its place", b"last", first=1)
    sending.client.close()
    assert sending.names == ["MessageTooBig", "Ok", "Ok"]


def test_a_message_whose_chunks_would_be_mostly_metadata_is_too_large(peer: Peer) -> None:
    sending = Sending(peer)
    sending(LARGE, partition_key="k" * 900)
    sending(b"small", first=1, partition_key="k" * 800)
    sending.client.close()
    assert sending.names == ["MessageTooBig", "Ok"]
    assert len(peer.received) == 1


def test_after_the_first_message_that_fails_none_is_sent(peer: Peer) -> None:
    peer.refuse_send = pb.NotAllowedError
    sending = Sending(peer)
    sending(b"first", b"second")
    peer.refuse_send = None
    sending(b"third", first=2)
    sending.client.close()
    assert sending.names == ["NotAllowedError", "AlreadyClosed", "AlreadyClosed"]
    assert peer.stored == []


def test_an_error_that_nobody_thought_of_is_an_answer_too(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending = Sending(peer)
    monkeypatch.setattr(NumberedProducer, "send", lambda *_: 1 / 0)
    sending(b"a", b"b")
    assert sending.names == ["ZeroDivisionError", "AlreadyClosed"]
    sending.client.close()


def test_a_client_whose_broker_is_gone_can_be_closed() -> None:
    with Peer() as peer:
        sending = Sending(peer)
    sending(b"first", b"second")
    sending.client.close()
    assert sending.names == ["TransportError", "AlreadyClosed"]


def test_a_client_of_a_broker_that_stores_slowly_can_be_closed(peer: Peer) -> None:
    peer.store_pause_s = 0.5
    client = TargetClient(ClientSettings(peer.url, give_up_after_s=2))
    (target,) = client.partitions(TOPIC)
    producer = client.open_producer(target, "p", -1)
    answered = threading.Semaphore(0)
    for number in range(100):
        producer.send(
            pb.MessageMetadata(sequence_id=number), b"small", lambda _receipt: answered.release()
        )
    wait_until(lambda: bool(peer.stored))
    client.close()
    assert all(answered.acquire(timeout=5) for _ in range(100))
    assert len(peer.stored) < 100
