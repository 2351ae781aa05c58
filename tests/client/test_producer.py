"""A producer with numbers of its own, against a peer that deduplicates as a broker does."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.producer import NumberedEntry, NumberedProducer
from ledgerlake.client.transport import Transport
from ledgerlake.errors import BrokerError, ProducerNameError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.entry import encode_entry
from tests.peer import TOPIC, Peer

if TYPE_CHECKING:
    from collections.abc import Callable


def entry(first: int, count: int = 1, value: bytes = b"v") -> NumberedEntry:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=first, publish_time=1)
    return NumberedEntry(encode_entry(metadata, value), first, first + count - 1, count)


def producer_of(peer: Peer, request_timeout_s: float = 30, **options: int) -> NumberedProducer:
    settings = ClientSettings(peer.url, give_up_after_s=5, request_timeout_s=request_timeout_s)
    return NumberedProducer(Cluster(settings), TOPIC, "p", **options)  # type: ignore[arg-type]


def last_chunk(number: int) -> bytes:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=number, publish_time=1, uuid="u")
    metadata.chunk_id, metadata.num_chunks_from_msg = 0, 1
    return encode_entry(metadata, b"v")


def call_each(*calls: Callable[[], None]) -> None:
    for call in calls:
        call()


def test_entries_are_stored_in_order_with_their_numbers() -> None:
    with Peer() as peer:
        producer = producer_of(peer)
        for first in (0, 10, 20):
            producer.send(entry(first, 10))
        producer.flush()
        assert peer.stored == [(0, 9), (10, 19), (20, 29)]
        producer.close()


def test_small_entries_are_written_together_when_somebody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Peer() as peer:
        producer = producer_of(peer)
        producer.send(entry(0))
        producer.flush()
        written: list[int] = []
        send = Transport.send

        def count(transport: Transport, data: bytes, timeout_s: float) -> None:
            written.append(len(data))
            send(transport, data, timeout_s)

        monkeypatch.setattr(Transport, "send", count)
        for first in range(1, 100):
            producer.send(entry(first))
        assert written == []
        producer.flush()
        assert len(written) == 1
        producer.send(entry(100, value=b"v" * 100_000))
        assert len(peer.stored) == 101
        producer.close()


def test_what_a_broker_has_stored_already_is_sent_again_and_dropped_by_it() -> None:
    with Peer(stored=[(0, 9), (10, 19)]) as peer:
        producer = producer_of(peer)
        assert producer.first_known_id == 19
        for first in (0, 10, 20):
            producer.send(entry(first, 10))
        producer.flush()
        assert peer.stored == [(0, 9), (10, 19), (20, 29)]
        assert peer.requests.count("CommandSend") == 3


def test_what_a_broker_only_began_to_store_is_sent_again_until_there_is_a_receipt() -> None:
    with Peer(pushes_only=True) as peer:
        producer = producer_of(peer, request_timeout_s=0.3)
        storing = threading.Timer(1.0, lambda: setattr(peer, "pushes_only", False))
        storing.start()
        producer.send(entry(0))
        producer.send(entry(1))
        producer.flush()
        storing.join()
        assert peer.stored == [(0, 0), (1, 1)]


def test_an_entry_that_is_refused_has_none_stored_behind_it() -> None:
    with Peer(largest_stored_bytes=1000) as peer:
        producer = producer_of(peer)
        producer.send(entry(0))
        producer.send(entry(1))
        with pytest.raises(BrokerError, match="NotAllowedError"):
            producer.send(entry(2, value=b"B" * 5000))
        assert peer.stored == [(0, 0), (1, 1)]


def test_ids_that_are_in_part_stored_are_no_entry() -> None:
    with Peer(stored=[(0, 15)]) as peer:
        producer = producer_of(peer)
        producer.send(entry(0, 10))
        with pytest.raises(ValueError, match="10 to 19 are in part stored"):
            producer.send(entry(10, 10))


@pytest.mark.parametrize("lost", [1, 2, 5, 9])
def test_a_connection_that_breaks_before_receipts_stores_everything_once(lost: int) -> None:
    with Peer(drop_after_sends=lost) as peer:
        producer = producer_of(peer)
        for first in range(10):
            producer.send(entry(first))
        producer.flush()
        assert peer.stored == [(first, first) for first in range(10)]
        assert peer.drop_after_sends is None, "the connection did break"


@pytest.mark.parametrize(
    "code", [pb.ProducerBlockedQuotaExceededError, pb.ProducerBlockedQuotaExceededException]
)
def test_a_target_over_its_backlog_quota_is_waited_for(code: pb.ServerError) -> None:
    with Peer() as peer:
        producer = producer_of(peer)
        producer.send(entry(0))
        producer.flush()
        peer.refuse_producers = [code] * 3
        peer.disconnect()
        producer.send(entry(1))
        producer.flush()
        assert peer.stored == [(0, 0), (1, 1)]
        assert peer.refuse_producers == []


def test_a_broker_that_refuses_an_entry_ends_it() -> None:
    with Peer(refuse_send=pb.NotAllowedError) as peer:
        producer = producer_of(peer)
        with pytest.raises(BrokerError, match="could not store an entry: NotAllowedError"):
            producer.send(entry(0))


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("is_disconnected", [False, True])
def test_an_id_that_somebody_else_used_under_the_name_is_an_error_and_not_a_receipt(
    is_large: bool, is_disconnected: bool
) -> None:
    with Peer() as peer:
        producer = producer_of(peer, earlier_id=-1)
        producer.send(entry(0))
        producer.flush()
        peer.stored.append((2**62, 2**62))
        if is_disconnected:
            peer.disconnect()
        send = (
            partial(producer.send_chunks, 1, lambda: [last_chunk(1)])
            if is_large
            else partial(producer.send, entry(1))
        )
        stored = list(peer.stored)
        with pytest.raises(ProducerNameError, match="another producer has used the name p on"):
            call_each(send, producer.flush)
        assert peer.stored == stored


@pytest.mark.parametrize("earlier", [0, 3])
def test_what_an_earlier_producer_may_have_sent_needs_no_position(earlier: int) -> None:
    with Peer() as peer:
        producer = producer_of(peer, earlier_id=earlier)
        peer.stored.append((earlier, earlier))
        for first in range(earlier + 2):
            producer.send(entry(first))
        producer.flush()
        assert peer.stored == [(earlier, earlier), (earlier + 1, earlier + 1)]
