"""Outcomes become rows: from bytes at hand, from the topic, and where the topic no longer has them."""

from __future__ import annotations

from typing import Any

from ledgerlake.assembly.assembler import Assembled, Rejected
from ledgerlake.client.topics import split_partition
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.operators.outcomes import OutcomeDecoder
from ledgerlake.options.source_options import parse_options
from ledgerlake.wire.message_id import Position
from tests.chunks import chunk_entries
from tests.entries import single
from tests.peer import TOPIC, Peer

ENTRIES = chunk_entries(b"large message", 3)
AT = tuple(Position(7, number) for number in (1, 2, 4))


def decoder(peer: Peer) -> OutcomeDecoder:
    options = parse_options({"service.url": peer.url, "topic": TOPIC, "retryTimeoutMs": "2000"})
    return OutcomeDecoder(TopicPartition(*split_partition(TOPIC)), options, 10**6, delays_messages=True)


def fill(peer: Peer) -> None:
    peer.add(single(b"a"), ENTRIES[0], ENTRIES[1], single(b"b"), ENTRIES[2], single(b"c"))


def rows(tables: Any) -> list[dict[str, Any]]:
    return [row for table in tables for row in table.to_pylist()]


def test_a_set_that_was_put_aside_is_read_again_from_the_topic() -> None:
    with Peer() as peer:
        fill(peer)
        (found,) = decoder(peer).decode(Assembled(AT, None))
        assert not isinstance(found, list)
        assert found.to_pylist()[0]["value"] == b"large message"


def test_what_the_topic_no_longer_has_becomes_rejects_with_positions() -> None:
    with Peer() as peer:
        fill(peer)
        del peer.entries[:2]
        judge = decoder(peer)
        (found,) = judge.decode(Assembled(AT, None))
        assert isinstance(found, list)
        written = rows(judge.reject_tables(found))
        assert [(row["reason"], row["entry_id"], row["entry"]) for row in written] == [
            ("chunk_trimmed", 1, None),
            ("chunk_trimmed", 2, ENTRIES[1]),
            ("chunk_trimmed", 4, ENTRIES[2]),
        ]


def test_chunks_without_bytes_are_read_again_to_be_rejected_whole() -> None:
    with Peer() as peer:
        fill(peer)
        judge = decoder(peer)
        (found,) = judge.decode(Rejected("chunk_expired", [(AT[2], None), (AT[0], b"held"), (AT[1], None)]))
        assert isinstance(found, list)
        written = rows(judge.reject_tables(found))
        assert [(row["entry_id"], row["entry"]) for row in written] == [(1, b"held"), (2, ENTRIES[1]), (4, ENTRIES[2])]
        assert written[1]["detail"] == "chunk 1 of 3 of p-1"
