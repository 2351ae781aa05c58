"""Random interleavings of chunked messages against a plain reference, one seed one schedule.

The schedule: producers that publish messages in chunks, with duplicates, resends, lost chunks and
reused uuids between them, limits that spill, and a restart between any two steps. The
reference keeps everything and knows no limits.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from ledgerlake.assembly.rules import (
    ChunkedMessageKey,
    Deliver,
    IncompleteMessages,
    Limits,
    Reject,
    Retain,
    Spill,
)
from ledgerlake.wire.message_id import Position
from tests.model.chunk_schedules import play_all, reference, schedule

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.slow

SEEDS = 20_000 if os.environ.get("LEDGERLAKE_CAMPAIGN") == "long" else 2_000
_AT_ONCE = 250


@dataclass
class Store:
    """What an operator would keep: the bytes held by position, here the positions alone."""

    kept: set[Position] = field(default_factory=set)
    delivered: list[tuple[ChunkedMessageKey, tuple[Position, ...]]] = field(default_factory=list)
    rejected: list[Position] = field(default_factory=list)
    reread: int = 0

    def apply(self, effect: object) -> None:
        if isinstance(effect, Retain):
            self.kept.add(effect.position)
        elif isinstance(effect, Spill):
            self._free(effect.positions)
        elif isinstance(effect, Deliver):
            if effect.reread:
                self.reread += 1
                assert self.kept.isdisjoint(effect.positions)
            else:
                self._free(effect.positions[:-1])
            self.delivered.append((effect.key, effect.positions))
        elif isinstance(effect, Reject):
            if effect.bytes_kept:
                self._free(effect.positions)
            self.rejected += effect.positions

    def _free(self, positions: tuple[Position, ...]) -> None:
        for position in positions:
            self.kept.remove(position)


def play(seed: int) -> Store:
    rng = random.Random(seed)
    limits = Limits(
        max_pending=rng.choice([1, 1, 2, 100]), max_pending_bytes=rng.choice([1, 20, 10_000])
    )
    chunks = schedule(rng)
    pending, store = IncompleteMessages(limits), Store()
    for chunk in chunks:
        for effect in pending.arrive(chunk):
            store.apply(effect)
        assert (
            len([message for message in pending.messages if not message.spilled])
            <= limits.max_pending
        )
        assert pending.kept_bytes <= limits.max_pending_bytes
        assert len(store.kept) == sum(
            len(message.positions) for message in pending.messages if not message.spilled
        )
        if rng.random() < 0.3:
            pending = IncompleteMessages(limits, pending.messages)
    assert store.delivered == reference(chunks)
    still_open = [position for message in pending.messages for position in message.positions]
    accounted = (
        [position for _, positions in store.delivered for position in positions]
        + store.rejected
        + still_open
    )
    assert sorted(accounted) == [chunk.position for chunk in chunks]
    for effect in (*pending.expire(10**9), *pending.expire(2 * 10**9)):
        store.apply(effect)
    assert (store.kept, pending.messages, pending.kept_bytes) == (set(), (), 0)
    return store


@pytest.mark.parametrize("start", range(0, SEEDS, _AT_ONCE))
def test_random_schedules_deliver_what_the_reference_does_and_account_for_every_chunk(
    start: int,
) -> None:
    stores = play_all(play, range(start, start + _AT_ONCE))
    assert sum(store.reread for store in stores) > 0
    assert sum(len(store.delivered) for store in stores) > _AT_ONCE
