"""Random interleavings of chunked messages against a plain reference, one seed one schedule.

The schedule: producers that publish messages in chunks, with duplicates, resends, lost chunks and
reused uuids between them, limits that force sets aside, and a restart between any two steps. The
reference keeps everything and knows no limits.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import pytest

from ledgerlake.assembly.rules import Chunk, Deliver, Hold, Limits, PendingSets, PutAside, Reject, SetKey
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Callable

Played = TypeVar("Played")

pytestmark = pytest.mark.slow

SEEDS = 20_000 if os.environ.get("LEDGERLAKE_CAMPAIGN") == "long" else 2_000
_AT_ONCE = 250


def schedule(rng: random.Random) -> list[Chunk]:
    """Chunks in the order in which a topic partition holds them."""
    streams = [_producer(rng, f"p{number}") for number in range(rng.randint(1, 4))]
    chunks: list[Chunk] = []
    while any(streams):
        key, chunk_id, count, total, size, publish_ms = rng.choice([one for one in streams if one]).pop(0)
        time_ms = rng.choice([len(chunks), None])
        chunks.append(Chunk(key, Position(1, len(chunks)), chunk_id, count, total, size, time_ms, publish_ms))
    return chunks


def _producer(rng: random.Random, name: str) -> list[tuple[SetKey, int, int, int, int, int]]:
    sent = []
    for sequence in range(rng.randint(1, 5)):
        key = SetKey(name, f"{name}-{rng.choice([sequence, 0])}")
        sizes = [rng.randint(0, 9) for _ in range(rng.randint(2, 5))]
        publish_ms = rng.randrange(10**6)
        for attempt in range(rng.choice([1, 1, 1, 2])):
            # The same chunks sent again after a reconnect, or the same message by a producer that
            # was started again.
            publish_ms += attempt * rng.choice([0, 1])
            stop = len(sizes) if attempt or rng.random() < 0.8 else rng.randrange(len(sizes))
            for chunk_id in range(stop):
                if rng.random() < 0.05:
                    continue
                for _ in range(rng.choice([1] * 9 + [2])):
                    sent.append((key, chunk_id, len(sizes), sum(sizes), sizes[chunk_id], publish_ms))
    return sent


@dataclass
class Store:
    """What an operator would keep: the bytes held by position, here the positions alone."""

    held: set[Position] = field(default_factory=set)
    delivered: list[tuple[SetKey, tuple[Position, ...]]] = field(default_factory=list)
    rejected: list[Position] = field(default_factory=list)
    reread: int = 0

    def apply(self, effect: object) -> None:
        if isinstance(effect, Hold):
            self.held.add(effect.position)
        elif isinstance(effect, PutAside):
            self._free(effect.positions)
        elif isinstance(effect, Deliver):
            if effect.reread:
                self.reread += 1
                assert self.held.isdisjoint(effect.positions)
            else:
                self._free(effect.positions[:-1])
            self.delivered.append((effect.key, effect.positions))
        elif isinstance(effect, Reject):
            if effect.held:
                self._free(effect.positions)
            self.rejected += effect.positions

    def _free(self, positions: tuple[Position, ...]) -> None:
        for position in positions:
            self.held.remove(position)


def reference(chunks: list[Chunk]) -> list[tuple[SetKey, tuple[Position, ...]]]:
    """The messages that can be delivered, by remembering all."""
    open_sets: dict[SetKey, list[Chunk]] = {}
    delivered = []
    for chunk in chunks:
        held = open_sets.get(chunk.key)
        if chunk.chunk_id == 0:
            open_sets[chunk.key] = [chunk]
        elif held is None or _message_of(chunk) != _message_of(held[0]):
            continue
        elif chunk.chunk_id > len(held):
            del open_sets[chunk.key]
        elif chunk.chunk_id == len(held):
            held.append(chunk)
            so_far = sum(one.size_bytes for one in held)
            complete = len(held) == chunk.chunk_count
            if so_far > chunk.total_bytes or (complete and so_far != chunk.total_bytes):
                del open_sets[chunk.key]
            elif complete:
                delivered.append((chunk.key, tuple(one.position for one in held)))
                del open_sets[chunk.key]
    return delivered


def _message_of(chunk: Chunk) -> tuple[int, int, int]:
    return chunk.chunk_count, chunk.total_bytes, chunk.publish_ms


def play(seed: int) -> Store:
    rng = random.Random(seed)
    limits = Limits(max_pending=rng.choice([1, 1, 2, 100]), max_pending_bytes=rng.choice([1, 20, 10_000]))
    chunks = schedule(rng)
    pending, store = PendingSets(limits), Store()
    for chunk in chunks:
        for effect in pending.arrive(chunk):
            store.apply(effect)
        assert len([one for one in pending.sets if not one.aside]) <= limits.max_pending
        assert pending.held_bytes <= limits.max_pending_bytes
        assert len(store.held) == sum(len(one.positions) for one in pending.sets if not one.aside)
        if rng.random() < 0.3:
            pending = PendingSets(limits, pending.sets)
    assert store.delivered == reference(chunks)
    still_open = [position for one in pending.sets for position in one.positions]
    accounted = [position for _, positions in store.delivered for position in positions] + store.rejected + still_open
    assert sorted(accounted) == [chunk.position for chunk in chunks]
    for effect in (*pending.expire(10**9), *pending.expire(2 * 10**9)):
        store.apply(effect)
    assert (store.held, pending.sets, pending.held_bytes) == (set(), (), 0)
    return store


def play_all(play_one: Callable[[int], Played], seeds: range) -> list[Played]:
    """What came of each seed; a failure names its own."""
    found = []
    for seed in seeds:
        try:
            found.append(play_one(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return found


@pytest.mark.parametrize("start", range(0, SEEDS, _AT_ONCE))
def test_random_schedules_deliver_what_the_reference_does_and_account_for_every_chunk(start: int) -> None:
    stores = play_all(play, range(start, start + _AT_ONCE))
    assert sum(store.reread for store in stores) > 0
    assert sum(len(store.delivered) for store in stores) > _AT_ONCE
