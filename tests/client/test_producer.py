"""A producer with numbers of its own, against a peer that deduplicates as a broker does."""

from __future__ import annotations

import pytest

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.producer import NumberedEntry, NumberedProducer
from ledgerlake.errors import BrokerError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.entry import encode_entry
from tests.peer import TOPIC, Peer


def entry(first: int, count: int = 1) -> NumberedEntry:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=first, publish_time=1)
    return NumberedEntry(encode_entry(metadata, b"%d" % first), first, first + count - 1, count)


def producer_of(peer: Peer) -> NumberedProducer:
    return NumberedProducer(Cluster(ClientSettings(peer.url, give_up_after_s=5)), TOPIC, "p")


def test_entries_are_stored_in_order_with_their_numbers() -> None:
    with Peer() as peer:
        producer = producer_of(peer)
        for first in (0, 10, 20):
            producer.send(entry(first, 10))
        producer.flush()
        assert peer.stored == [(0, 9), (10, 19), (20, 29)]
        producer.close()


def test_what_a_broker_has_stored_already_is_not_sent() -> None:
    with Peer(stored=[(0, 9), (10, 19)]) as peer:
        producer = producer_of(peer)
        assert producer.last_sequence_id == 19
        for first in (0, 10, 20):
            producer.send(entry(first, 10))
        producer.flush()
        assert peer.stored == [(0, 9), (10, 19), (20, 29)]
        assert peer.requests.count("CommandSend") == 1


@pytest.mark.parametrize("lost", [1, 2, 5, 9])
def test_a_connection_that_breaks_before_receipts_stores_everything_once(lost: int) -> None:
    with Peer(drop_after_sends=lost) as peer:
        producer = producer_of(peer)
        for first in range(10):
            producer.send(entry(first))
        producer.flush()
        assert peer.stored == [(first, first) for first in range(10)]
        assert peer.drop_after_sends is None, "the connection did break"


def test_a_broker_that_refuses_an_entry_ends_it() -> None:
    with Peer(refuse_send=pb.NotAllowedError) as peer:
        producer = producer_of(peer)
        producer.send(entry(0))
        with pytest.raises(BrokerError, match="could not store an entry: NotAllowedError"):
            producer.flush()
