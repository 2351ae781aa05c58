"""Searching by time: exact against a plain look at every entry, in few reads, whatever holes there
are.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.options.bounds import AtTime
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source.bounds import resolve_start
from ledgerlake.source.search import Probe, StampedEntry, first_since, first_with_index
from ledgerlake.wire.entry import Stamp, encode_entry
from ledgerlake.wire.message_id import Position
from tests.peer import TOPIC, Peer


def dated(position: Position, time_ms: int) -> StampedEntry:
    return StampedEntry(position, Stamp(time_ms, None, True), 1, position)


def prober(entries: list[StampedEntry], end: Position | None = None) -> Probe:
    return lambda position: next(
        (
            entry
            for entry in entries
            if position <= entry.position and (end is None or entry.position <= end)
        ),
        None,
    )


def search(
    entries: list[StampedEntry], time_ms: int, last: Position | None = None
) -> tuple[StampedEntry | None, int]:
    """Return the entry that is found, and the number of reads."""
    reads = 0
    end = last or (entries[-1].position if entries else Position(-1, -1))

    def probe(position: Position) -> StampedEntry | None:
        nonlocal reads
        reads += 1
        return next((entry for entry in entries if position <= entry.position <= end), None)

    return first_since(probe, end, time_ms), reads


def topic(rng: random.Random) -> list[StampedEntry]:
    """Ledgers with sparse ids, of one entry or many, with holes; several entries may share
    a time.
    """
    entries, ledger_id, time_ms = [], rng.randrange(5), 1000
    for _ in range(rng.randint(0, 6)):
        ledger_id += rng.choice([1, 1, 2, 50])
        entry_id = rng.choice([0, 0, 3])
        for _ in range(rng.choice([1, 1, 5, 40])):
            time_ms += rng.choice([0, 0, 1, 10])
            entries.append(dated(Position(ledger_id, entry_id), time_ms))
            entry_id += rng.choice([1, 1, 1, 4])
    return entries


def test_the_first_entry_at_or_after_the_time_is_found_in_every_topic() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        entries = topic(rng)
        asked_ms = rng.choice([entry.stamp.time_ms for entry in entries] or [0]) + rng.choice(
            [-1, 0, 1]
        )
        expected = next((entry for entry in entries if entry.stamp.time_ms >= asked_ms), None)
        assert search(entries, asked_ms)[0] == expected


def test_an_end_that_is_a_hole_does_not_matter() -> None:
    entries = [dated(Position(3, number), 1000 + number) for number in range(10)]
    for last in (Position(3, 12), Position(4, 0), Position(9, 7)):
        assert search(entries, 1005, last)[0] == entries[5]
        assert search(entries, 1009, last)[0] == entries[9]
        assert search(entries, 1010, last)[0] is None


def test_where_broker_timestamps_begin_in_mid_life_publish_times_decide_only_about_what_is_before() -> (
    None
):
    rng = random.Random(3)
    for _ in range(3000):
        entries = topic(rng)
        begin = rng.randint(0, len(entries))
        old = [
            replace(entry, stamp=Stamp(entry.stamp.time_ms, None, False))
            for entry in entries[:begin]
        ]
        is_wrong = bool(old) and begin < len(entries) and rng.random() < 0.5
        if is_wrong:
            # The clock of the last producer before was years ahead.
            old[-1] = replace(old[-1], stamp=Stamp(10**13, None, False))
        asked_ms = rng.choice([entry.stamp.time_ms for entry in entries] or [0]) + rng.choice(
            [-1, 0, 1]
        )
        exact = next((entry.position for entry in entries if entry.stamp.time_ms >= asked_ms), None)
        stamped_entry = search(old + entries[begin:], asked_ms)[0]
        position = None if stamped_entry is None else stamped_entry.position
        if is_wrong and entries[begin].stamp.time_ms >= asked_ms:
            assert position in (exact, old[-1].position)
        else:
            assert position == exact


def test_a_time_is_found_although_broker_timestamps_began_and_ceased_several_times() -> None:
    rng = random.Random(5)
    for _ in range(3000):
        by_broker, entries = rng.random() < 0.5, []
        for entry in topic(rng):
            by_broker ^= rng.random() < 0.1
            stamp = Stamp(entry.stamp.time_ms, None, by_broker)
            entries.append(replace(entry, stamp=stamp))
        asked_ms = rng.choice([entry.stamp.time_ms for entry in entries] or [0]) + rng.choice(
            [-1, 0, 1]
        )
        expected = next((entry for entry in entries if entry.stamp.time_ms >= asked_ms), None)
        assert search(entries, asked_ms)[0] == expected


def test_an_index_is_found_in_the_entry_that_holds_it() -> None:
    rng = random.Random(4)
    for _ in range(2000):
        entries, index, before_index = [], -1, rng.choice([0, 0, 3])
        for number, topic_entry in enumerate(topic(rng)):
            if number < before_index:
                entries.append(
                    replace(topic_entry, stamp=Stamp(topic_entry.stamp.time_ms, None, False))
                )
                continue
            count = rng.choice([1, 1, 5, 100])
            index += count + rng.choice([0, 0, 0, 2])
            entries.append(
                replace(
                    topic_entry,
                    stamp=Stamp(topic_entry.stamp.time_ms, index, True),
                    index_count=count,
                )
            )
        asked_index = rng.randint(0, max(index, 0) + 1)
        expected = next(
            (
                entry
                for entry in entries
                if entry.stamp.index is not None and entry.stamp.index >= asked_index
            ),
            None,
        )
        assert (
            first_with_index(
                prober(entries), entries[-1].position if entries else Position(-1, -1), asked_index
            )
            == expected
        )


@pytest.mark.parametrize(
    "ledgers", [[100_000], [50_000, 50_000], [33_000, 1, 33_000, 1, 33_000], [1] * 300, [10] * 1000]
)
def test_the_number_of_reads_grows_with_the_logarithm(ledgers: list[int]) -> None:
    positions = [
        Position(7 + 3 * number, entry)
        for number, count in enumerate(ledgers)
        for entry in range(count)
    ]
    place = {position: index for index, position in enumerate(positions)}
    ends = {7 + 3 * number: count for number, count in enumerate(ledgers)}
    rng = random.Random(2)
    for _ in range(200):
        time_ms = rng.randrange(len(positions))
        reads = 0

        def probe(position_asked: Position) -> StampedEntry:
            nonlocal reads
            reads += 1
            ledger_id = max(position_asked.ledger_id, 7)
            ledger_id += -(ledger_id - 7) % 3
            entry_id = (
                max(position_asked.entry_id, 0) if ledger_id == position_asked.ledger_id else 0
            )
            if entry_id >= ends.get(ledger_id, 0):
                ledger_id, entry_id = ledger_id + 3, 0
            position = Position(ledger_id, entry_id)
            return dated(position, place[position])

        first_entry = first_since(probe, positions[-1], time_ms)
        assert first_entry == dated(positions[time_ms], time_ms)
        assert reads <= 2 * math.log2(len(positions)) + 10


def stored(time_ms: int, by_broker: bool = True) -> bytes:
    """An entry of that time; its producer's clock is wrong if the broker says it."""
    publish_ms = 5 if by_broker else time_ms
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=publish_ms)
    return encode_entry(
        metadata, b"v", pb.BrokerEntryMetadata(broker_timestamp=time_ms) if by_broker else None
    )


@pytest.mark.parametrize(
    ("time_ms", "start"),
    [
        pytest.param(0, (3, -1), id="before all"),
        pytest.param(100, (3, -1), id="at the first"),
        pytest.param(101, (3, 0), id="between two"),
        pytest.param(300, (8, -1), id="at the first of another ledger"),
        pytest.param(
            400,
            (8, 0),
            id="of two at the same time the first, and an odd entry between does not matter",
        ),
        pytest.param(401, (8, 3), id="behind all"),
    ],
)
def test_a_start_by_time_is_before_the_first_entry_of_that_time_or_later(
    time_ms: int, start: tuple[int, int]
) -> None:
    with Peer() as peer:
        peer.add(stored(100, by_broker=False), stored(200), ledger_id=3)
        peer.add(stored(300), stored(400), b"odd", stored(400), ledger_id=8)
        cluster = Cluster(ClientSettings(peer.url, give_up_after_s=2))
        try:
            assert resolve_start(cluster, TOPIC, AtTime(time_ms)).position == Position(*start)
        finally:
            cluster.close()
