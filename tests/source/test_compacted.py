"""A stream of a compacted topic: it begins with what compaction has left, and goes on with all that
follows. So a table with the latest messages has what the topic has, however compaction, restarts
and limits fall.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ledgerlake.options.source_options import parse_options
from ledgerlake.source.stream_reader import LedgerlakeStreamReader
from ledgerlake.source.views import read_messages
from ledgerlake.stored.offsets import from_json
from ledgerlake.wire.message_id import Position
from tests.entries import single
from tests.peer import TOPIC, Peer


@dataclass
class Topic:
    """A topic of keyed messages on a peer, one in each entry."""

    peer: Peer
    latest: dict[str, bytes] = field(default_factory=dict)
    sent: list[tuple[Position, str, bytes | None]] = field(default_factory=list)
    ledger_id: int = 3
    _stored: dict[Position, bytes] = field(default_factory=dict)
    _horizon: int = 0
    _left: list[Position] = field(default_factory=list)

    def send(self, key: str, value: bytes | None) -> None:
        """Publish a message; without a value, it deletes its key."""
        number = len(self.sent)
        position = Position(
            self.ledger_id, sum(at.ledger_id == self.ledger_id for at in self._stored)
        )
        self._stored[position] = single(
            value or b"", index=number, partition_key=key, null_value=value is None
        )
        self.sent.append((position, key, value))
        self.peer.entries.append((position, self._stored[position]))
        self.latest.pop(key, None)
        if value is not None:
            self.latest[key] = value
        self._show()

    def compact(self) -> None:
        last = {key: (position, value) for position, key, value in self.sent}
        self._left = sorted(position for position, value in last.values() if value is not None)
        self._horizon = len(self.sent)
        self._show()

    def trim(self) -> None:
        """Remove the ledger that is written, once all of it is compacted."""
        self.compact()
        self.ledger_id += 1
        self.peer.entries.clear()
        self.peer.first_ledger_id = self.ledger_id
        self._show()

    def _show(self) -> None:
        behind = [position for position, _, _ in self.sent[self._horizon :]]
        self.peer.compacted = [
            (position, self._stored[position]) for position in [*self._left, *behind]
        ]


class Stream:
    """A stream that keeps the latest messages."""

    def __init__(self, peer: Peer, **options: str) -> None:
        self.offset: Any = None
        self.latest: dict[str, bytes] = {}
        self.batches: list[list[str]] = []
        self._options = parse_options(
            {
                "service.url": peer.url,
                "topic": TOPIC,
                "readCompacted": "true",
                "startingOffsets": "earliest",
                "retryTimeoutMs": "3000",
                **options,
            }
        )

    def run(self, limit: int | None = None, most: int = 100) -> None:
        """Start it, read so many batches at most, up to the end of the topic, and stop it."""
        reader = LedgerlakeStreamReader(replace(self._options, max_rows_per_trigger=limit))
        try:
            self.offset = self.offset or reader.initialOffset()
            for _ in range(most):
                end = reader.latestOffset(self.offset, reader.getDefaultReadLimit())
                if end == self.offset:
                    break
                self._take(reader, end)
                self.offset = end
        finally:
            reader.stop()

    def _take(self, reader: LedgerlakeStreamReader, end: Any) -> None:
        keys = []
        for partition in reader.partitions(self.offset, end):
            for rows in read_messages(self._options, partition.span):
                for row in rows.to_pylist():
                    assert row["reject_reason"] is None, row
                    keys.append(row["key"])
                    self.latest.pop(row["key"], None)
                    if not row["is_null"]:
                        self.latest[row["key"]] = row["value"]
        self.batches.append(keys)


def test_a_deletion_that_was_compacted_between_two_batches_is_read() -> None:
    with Peer() as peer:
        topic, stream = Topic(peer), Stream(peer)
        for value in (b"1", b"2"):
            topic.send("alice", value)
            topic.send("bob", value)
        topic.compact()
        stream.run()
        assert stream.batches == [["alice", "bob"]]
        topic.send("alice", None)
        topic.send("carol", b"1")
        topic.compact()
        stream.run()
        assert stream.batches[1:] == [["alice", "carol"]]
        assert stream.latest == {"bob": b"2", "carol": b"1"}


def test_what_compaction_left_is_one_batch_whatever_the_limit() -> None:
    with Peer() as peer:
        topic, stream = Topic(peer), Stream(peer)
        for key in "abc":
            topic.send(key, b"1")
        stream.run(limit=1, most=1)
        topic.send("a", None)
        topic.send("b", b"2")
        topic.compact()
        stream.run(limit=1)
        assert stream.batches == [["a", "b", "c"], ["a"], ["b"]]


def test_what_compaction_left_is_read_also_if_the_topic_has_nothing_else() -> None:
    with Peer() as peer:
        topic, stream = Topic(peer), Stream(peer)
        topic.send("a", b"1")
        topic.send("b", b"1")
        topic.trim()
        stream.run()
        assert stream.batches == [["a", "b"]]
        topic.send("a", None)
        topic.trim()
        topic.send("c", b"1")
        topic.compact()
        assert from_json(stream.offset)[TOPIC].position == Position(4, -1)


def test_a_start_at_the_latest_message_has_nothing_that_compaction_left() -> None:
    with Peer() as peer:
        topic, stream = Topic(peer), Stream(peer, startingOffsets="latest")
        topic.send("a", b"1")
        topic.send("b", None)
        topic.compact()
        stream.run()
        topic.send("a", None)
        topic.compact()
        stream.run()
        assert stream.batches == [["a"]]


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_a_table_of_a_compacted_topic_has_the_latest_messages(first: int) -> None:
    for seed in range(first, first + 10):
        rng = random.Random(seed)
        with Peer() as peer:
            topic, stream = Topic(peer), Stream(peer)
            for _ in range(rng.randrange(1, 25)):
                what = rng.choices(("send", "delete", "compact", "trim", "run"), (6, 3, 2, 1, 2))[0]
                if what in ("send", "delete"):
                    value = b"%d" % rng.randrange(9) if what == "send" else None
                    topic.send(rng.choice("abcd"), value)
                elif what == "compact":
                    topic.compact()
                elif what == "trim":
                    # Once a stream has begun, its cursor keeps what it has not read.
                    if stream.offset is not None:
                        stream.run()
                    topic.trim()
                else:
                    stream.run(rng.choice((None, 1, 3)), rng.choice((1, 2, 100)))
            stream.run()
            assert stream.latest == topic.latest, seed
