"""Random schedules of chunks, and a plain reference that keeps everything and knows no limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ledgerlake.assembly.rules import Chunk, ChunkedMessageKey
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    import random
    from collections.abc import Callable


Played = TypeVar("Played")


def schedule(rng: random.Random) -> list[Chunk]:
    """Chunks in the order in which a topic partition holds them."""
    streams = [_producer(rng, f"p{number}") for number in range(rng.randint(1, 4))]
    chunks: list[Chunk] = []
    while any(streams):
        key, chunk_id, count, total, size, publish_ms = rng.choice(
            [stream for stream in streams if stream]
        ).pop(0)
        time_ms = rng.choice([len(chunks), None])
        position, entry_bytes = Position(1, len(chunks)), size + rng.randint(1, 9)
        chunks.append(
            Chunk(key, position, chunk_id, count, total, size, entry_bytes, time_ms, publish_ms)
        )
    return chunks


def _producer(
    rng: random.Random, name: str
) -> list[tuple[ChunkedMessageKey, int, int, int, int, int]]:
    sent = []
    for sequence in range(rng.randint(1, 5)):
        key = ChunkedMessageKey(name, f"{name}-{rng.choice([sequence, 0])}")
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
                    sent.append(
                        (key, chunk_id, len(sizes), sum(sizes), sizes[chunk_id], publish_ms)
                    )
    return sent


def reference(chunks: list[Chunk]) -> list[tuple[ChunkedMessageKey, tuple[Position, ...]]]:
    """The messages that can be delivered, by remembering all."""
    open_sets: dict[ChunkedMessageKey, list[Chunk]] = {}
    delivered = []
    for chunk in chunks:
        open_set = open_sets.get(chunk.key)
        if chunk.chunk_id == 0:
            open_sets[chunk.key] = [chunk]
        elif open_set is None or _message_of(chunk) != _message_of(open_set[0]):
            continue
        elif chunk.chunk_id > len(open_set):
            del open_sets[chunk.key]
        elif chunk.chunk_id == len(open_set):
            open_set.append(chunk)
            so_far = sum(held_chunk.size_bytes for held_chunk in open_set)
            complete = len(open_set) == chunk.chunk_count
            if so_far > chunk.total_bytes or (complete and so_far != chunk.total_bytes):
                del open_sets[chunk.key]
            elif complete:
                delivered.append((chunk.key, tuple(held_chunk.position for held_chunk in open_set)))
                del open_sets[chunk.key]
    return delivered


def _message_of(chunk: Chunk) -> tuple[int, int, int]:
    return chunk.chunk_count, chunk.total_bytes, chunk.publish_ms


def play_all(play_one: Callable[[int], Played], seeds: range) -> list[Played]:
    """What came of each seed; a failure names its own."""
    played = []
    for seed in seeds:
        try:
            played.append(play_one(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return played
