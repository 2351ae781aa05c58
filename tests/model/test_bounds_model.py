"""Starts and ends beside a plain list of messages: whatever the bounds, a read has the messages
between them, and so has a stream that is stopped and started again while the topic grows.

Each topic is random: batches and single messages in several ledgers, entries whose stamp cannot be
read, positions without an entry. The broker adds its time and its index, or the index alone.
Entries may be stored at one time, or far apart. What a bound means is said here once more, by the
list alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from operator import ge, gt, le, lt
from typing import Any

import pytest

from ledgerlake.errors import UsageError
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source.batch_reader import LedgerlakeBatchReader
from ledgerlake.source.stream_reader import LedgerlakeStreamReader
from ledgerlake.wire.entry import encode_batch, encode_entry
from tests.entries import BROKER_TIME_MS, metadata
from tests.peer import TOPIC, Peer

TOPICS = 40
PAIRS = 10
STREAMS = 120


@dataclass(frozen=True)
class Entry:
    """An entry of the list. ``index`` is of its last message; time and index are None if its stamp
    cannot be read.
    """

    ledger_id: int
    entry_id: int
    count: int
    is_batch: bool
    time_ms: int | None
    index: int | None
    has_broker_time: bool = True

    @property
    def position(self) -> tuple[int, int]:
        return self.ledger_id, self.entry_id

    def stored(self) -> bytes:
        if self.time_ms is None:
            # A producer that counts in microseconds, and no stamp of the broker's.
            return encode_entry(metadata(publish_time=BROKER_TIME_MS * 1000), b"v")
        stamp = pb.BrokerEntryMetadata(index=self.index)
        times = {"publish_time": self.time_ms}
        if self.has_broker_time:
            stamp.broker_timestamp = self.time_ms
            times = {}
        if not self.is_batch:
            return encode_entry(metadata(**times), b"v", stamp)
        payload = encode_batch([(pb.SingleMessageMetadata(payload_size=0), b"v")] * self.count)
        fields = {"uncompressed_size": len(payload), "num_messages_in_batch": self.count}
        return encode_entry(metadata(**fields, **times), payload, stamp)


@dataclass(frozen=True)
class Message:
    """A message of the list, with what bounds compare. An entry whose stamp cannot be read counts
    with the next one whose stamp can; behind the last of these, it is of any time and number.
    """

    ledger_id: int
    entry_id: int
    batch_index: int
    time_ms: float
    index: float

    @property
    def place(self) -> tuple[int, int, int]:
        return self.ledger_id, self.entry_id, self.batch_index


def random_topic(rng: random.Random, *, has_unreadable: bool) -> list[Entry]:
    entries: list[Entry] = []
    time_ms, index = BROKER_TIME_MS, -1
    has_broker_time = rng.random() < 0.7
    ledger_id = rng.randint(3, 9)
    for _ in range(rng.randint(1, 3)):
        entry_id = rng.choice([0, 0, 1])
        for _ in range(rng.randint(1, 4)):
            is_batch = rng.random() < 0.5
            count = rng.randint(1, 3) if is_batch else 1
            if has_unreadable and rng.random() < 0.3:
                entries.append(Entry(ledger_id, entry_id, 1, False, None, None))
            else:
                time_ms += rng.choice([0, 1, 1, 60_000])
                index += count
                entries.append(
                    Entry(ledger_id, entry_id, count, is_batch, time_ms, index, has_broker_time)
                )
            entry_id += rng.choice([1, 1, 1, 2])
        ledger_id += rng.randint(1, 4)
    return entries


def messages_of(entries: list[Entry]) -> list[Message]:
    messages: list[Message] = []
    time_ms = index = float("inf")
    for entry in reversed(entries):
        first = index
        if entry.time_ms is not None and entry.index is not None:
            time_ms, first = entry.time_ms, entry.index - entry.count + 1
        index = first
        for batch_index in reversed(range(entry.count)):
            place = batch_index if entry.is_batch else -1
            messages.append(
                Message(entry.ledger_id, entry.entry_id, place, time_ms, first + batch_index)
            )
    return messages[::-1]


@dataclass(frozen=True)
class Bound:
    """An option, its value, and which messages it leaves in."""

    option: str
    value: str
    takes: Callable[[Message], bool]

    def __str__(self) -> str:
        return f"{self.option}={self.value}"


def random_start(rng: random.Random, messages: list[Message]) -> Bound:
    kind = rng.choice(["earliest", "place", "place", "place", "place", "time", "index"])
    if kind == "earliest":
        return Bound("startingOffsets", kind, lambda _: True)
    if kind == "place":
        return random_place(rng, messages, "startingOffsets", ge, "after", gt)
    if kind == "time":
        time_ms = random_time(rng)
        return Bound("startingTime", str(time_ms), lambda m: m.time_ms >= time_ms)
    number = rng.randint(0, 12)
    return Bound("startingIndex", str(number), lambda m: m.index >= number)


def random_end(rng: random.Random, messages: list[Message]) -> Bound:
    """Return an end. One that the topic has not reached leaves all messages in."""
    kind = rng.choice(["latest", "place", "place", "place", "place", "time", "index"])
    if kind == "latest":
        return Bound("endingOffsets", kind, lambda _: True)
    if kind == "place":
        return random_place(rng, messages, "endingOffsets", le, "before", lt)
    if kind == "time":
        time_ms = random_time(rng)
        is_reached = any(time_ms <= message.time_ms < math.inf for message in messages)
        return Bound("endingTime", str(time_ms), lambda m: not is_reached or m.time_ms < time_ms)
    number = rng.randint(0, 12)
    is_reached = any(number <= message.index < math.inf for message in messages)
    return Bound("endingIndex", str(number), lambda m: not is_reached or m.index <= number)


def random_place(
    rng: random.Random,
    messages: list[Message],
    option: str,
    includes: Callable[[Any, Any], bool],
    word: str,
    excludes: Callable[[Any, Any], bool],
) -> Bound:
    """Return a bound at a message or an entry, or with the word beside it."""
    place = rng.choice(messages).place[: rng.choice([2, 3])]
    is_beside = rng.random() < 0.5
    compares, text = (excludes, f"{word} {_id(place)}") if is_beside else (includes, _id(place))
    return Bound(option, text, lambda m: compares(m.place[: len(place)], place))


def random_time(rng: random.Random) -> int:
    return BROKER_TIME_MS + rng.choice([-1, 0, 1, 2, 3, 60_000, 60_001, 60_002, 500_000])


def _id(place: tuple[int, ...]) -> str:
    return ":".join(str(number) for number in place if number >= 0)


def place_of(row: dict[str, Any]) -> tuple[int, int, int]:
    return (
        row["ledger_id"],
        row["entry_id"],
        -1 if row["batch_index"] is None else row["batch_index"],
    )


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer(clock_ms=lambda: BROKER_TIME_MS + 10**6) as broker:
        yield broker


def add(peer: Peer, entries: list[Entry]) -> None:
    for entry in entries:
        peer.add(entry.stored(), ledger_id=entry.ledger_id, first=entry.entry_id)


@pytest.mark.parametrize("has_unreadable", [False, True])
@pytest.mark.parametrize("seed", range(TOPICS))
def test_a_read_has_the_messages_between_its_bounds(
    peer: Peer, seed: int, has_unreadable: bool
) -> None:
    rng = random.Random(seed)
    entries = random_topic(rng, has_unreadable=has_unreadable)
    messages = messages_of(entries)
    add(peer, entries)
    for _ in range(PAIRS):
        start, end = random_start(rng, messages), random_end(rng, messages)
        reader = LedgerlakeBatchReader(parse_options(options_of(peer, start, end)))
        rows = [
            row
            for part in reader.partitions()
            for rows in reader.read(part)
            for row in rows.to_pylist()
        ]
        expected = [
            message.place for message in messages if start.takes(message) and end.takes(message)
        ]
        assert [place_of(row) for row in rows] == expected, f"{start} {end} of {entries}"


def options_of(peer: Peer, *bounds: Bound) -> dict[str, str]:
    options = {"service.url": peer.url, "topic": TOPIC, "retryTimeoutMs": "2000"}
    return options | {bound.option: bound.value for bound in bounds}


def is_reached(start: Bound, there: list[Message]) -> bool:
    """Return whether a topic with some messages has come to a start: it takes one of them, or all
    that follow them.
    """
    last = there[-1]
    if start.option == "startingIndex":
        return int(start.value) <= last.index + 1
    after, _, text = start.value.rpartition(" ")
    if start.option == "startingTime" or text == "earliest":
        return True
    place = tuple(int(number) for number in text.split(":"))
    return place <= (last.place if after else (last.ledger_id, last.entry_id + 1, 0))


class Stream:
    """A run of a streaming query that reads the current entries and stops.

    Args:
        offset: where the run before it ended; None for the first run.
    """

    def __init__(self, options: dict[str, str], offset: dict[str, Any] | None = None) -> None:
        self._reader = LedgerlakeStreamReader(parse_options(options))
        self.offset = offset

    def read_all(self) -> list[dict[str, Any]]:
        rows = []
        if self.offset is None:
            self.offset = self._reader.initialOffset()
        self._reader.prepareForTriggerAvailableNow()
        while (
            end := self._reader.latestOffset(self.offset, self._reader.getDefaultReadLimit())
        ) != self.offset:
            for part in self._reader.partitions(self.offset, end):
                rows += [row for batch in self._reader.read(part) for row in batch.to_pylist()]
            self.offset = end
        return rows

    def close(self) -> None:
        self._reader.stop()


@pytest.mark.parametrize("seed", range(STREAMS))
def test_a_stream_over_restarts_has_the_messages_between_its_bounds(peer: Peer, seed: int) -> None:
    """The start belongs to what the topic has at first. The end may come later."""
    rng = random.Random(seed)
    entries = random_topic(rng, has_unreadable=False)
    messages = messages_of(entries)
    start, end = random_start(rng, messages), random_end(rng, messages)
    options = options_of(peer, start, end) | {"maxRowsPerTrigger": str(rng.randint(1, 4))}
    step = rng.randint(1, len(entries))
    add(peer, entries[:step])
    there = messages_of(entries[:step])
    if not is_reached(start, there):
        with pytest.raises(UsageError, match="to start at"), closing(Stream(options)) as stream:
            stream.read_all()
        return
    rows: list[dict[str, Any]] = []
    offset = None
    for first in range(0, len(entries), step):
        if first > 0:
            add(peer, entries[first : first + step])
        with closing(Stream(options, offset)) as stream:
            rows += stream.read_all()
            offset = stream.offset
    taken = [message for message in messages if start.takes(message) or message not in there]
    assert [place_of(row) for row in rows] == [
        message.place for message in taken if end.takes(message)
    ], f"{start} {end} of {entries}, {step} at a time"
