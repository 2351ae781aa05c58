"""Random lives of the delayed message tracker against a plain sorted list, one seed one life.

A life: messages are added out of ledgers that come and go, the clock steps, due messages are taken,
micro-batches end or are killed and run again, storage fails at any call. The reference is a list of
the waiting messages, and a copy of it from the last micro-batch that ended.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from ledgerlake.delay.bucket import IndexRecord, SegmentRange, record_from_json, record_to_json
from ledgerlake.delay.segment import Key, index_rows, key_at
from ledgerlake.delay.storage import METADATA
from ledgerlake.delay.tracker import DelayedTracker, DelaySettings
from ledgerlake.wire.message_id import BEFORE_ALL, Position
from tests.delay.memory_storage import MemoryStorage

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.slow

SEEDS = 20_000 if os.environ.get("LEDGERLAKE_CAMPAIGN") == "long" else 100
_AT_ONCE = 100


class StorageFailed(Exception):
    """Injected."""


class FailingStorage(MemoryStorage):
    """Fails now and then, in the middle of what it does."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.fails = 0.0

    def _may_fail(self) -> None:
        if self.rng.random() < self.fails:
            raise StorageFailed

    def create_bucket(self) -> int:
        self._may_fail()
        return super().create_bucket()

    def save_all_segments(self, bucket_id: int, snapshots: Iterable[tuple[int, bytes]]) -> None:
        for snapshot in snapshots:
            self._may_fail()
            super().save_all_segments(bucket_id, [snapshot])

    def get_segment(self, bucket_id: int, number: int) -> bytes:
        self._may_fail()
        return super().get_segment(bucket_id, number)

    def delete_segments(self, segments: SegmentRange) -> None:
        self._may_fail()
        super().delete_segments(segments)
        self._may_fail()

    def delete_bucket(self, bucket_id: int) -> None:
        self._may_fail()
        super().delete_bucket(bucket_id)
        self._may_fail()


@dataclass
class Reference:
    """What waits, and where the next entry will stand."""

    waits: set[Key] = field(default_factory=set)
    next_position: Position = field(default_factory=lambda: Position(0, 0))

    def copy(self) -> Reference:
        return Reference(set(self.waits), self.next_position)


class Life:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.settings = DelaySettings(
            min_indexes_per_bucket=rng.choice([1, 2, 5, 20]),
            ledger_step_per_bucket=rng.choice([1, 2, 5]),
            time_step_per_segment_ms=rng.choice([1, 10, 1000]),
            max_indexes_per_segment=rng.choice([1, 2, 7, 100]),
            max_buckets=rng.choice([1, 2, 3, 5, 20]),
            min_indexes_per_segment=rng.choice([1, 4, 250]),
            max_fresh_messages=rng.choice([0, 3, 1000]),
        )
        self.storage = FailingStorage(rng)
        self.killed = False
        self.clock_ms = 0
        self.ended, self.record = Reference(), record_to_json(IndexRecord())
        self.start()

    def start(self) -> None:
        """A micro-batch begins, from what the last one that ended left."""
        self.now = self.ended.copy()
        self.tracker = DelayedTracker(self.storage, self.settings, record_from_json(self.record))

    def play(self, steps: int) -> None:
        for _ in range(steps):
            step = self.rng.choices(
                [self.add, self.take, self.look, self.end, self.kill], [5, 3, 1, 3, 1]
            )[0]
            self.storage.fails = self.rng.choice([0.0, 0.0, 0.02])
            try:
                step()
            except StorageFailed:
                self.kill()
        self.storage.fails = 0.0
        self.end()
        self.check_storage()
        self.clock_ms = 10_000
        while self.now.waits:
            self.take()
        assert self.tracker.count == 0
        self.end()
        self.end()
        assert self.killed or self.storage.buckets == {}

    def add(self) -> None:
        keys = [self.fresh_key() for _ in range(self.rng.choice([1, 1, 3, 30]))]
        known_keys = sorted(self.ended.waits & self.now.waits, key=lambda key: key[1:])
        known_keys = [key for key in known_keys if self.rng.random() < 0.05]
        self.tracker.add(index_rows(known_keys, [frame_of(key) for key in known_keys]))
        self.tracker.add(index_rows(keys, [frame_of(key) for key in keys]))
        self.now.waits |= set(keys)
        assert self.tracker.count == len(self.now.waits)

    def fresh_key(self) -> Key:
        position = self.now.next_position
        if self.rng.random() < 0.1:
            position = Position(position.ledger_id + self.rng.randint(1, 7), 0)
        self.now.next_position = Position(
            position.ledger_id, position.entry_id + self.rng.randint(1, 2)
        )
        return (
            self.clock_ms + self.rng.choice([0, 1, 5, 50, 500]),
            position.ledger_id,
            position.entry_id,
        )

    def take(self) -> None:
        self.clock_ms += self.rng.choice([0, 1, 10, 100])
        most = self.rng.choice([1, 3, 20, 1_000_000])
        taken_keys: list[Key] = []
        for batch in self.tracker.take_due(self.clock_ms, most):
            keys = [key_at(batch, row) for row in range(batch.num_rows)]
            assert batch["frame"].to_pylist() == [frame_of(key) for key in keys]
            taken_keys += keys
        due = sorted(wait for wait in self.now.waits if wait[0] <= self.clock_ms)
        assert taken_keys == due[:most]
        self.now.waits -= set(taken_keys)
        assert self.tracker.count == len(self.now.waits)

    def look(self) -> None:
        waits = self.now.waits
        assert self.tracker.next_due_ms == min((wait[0] for wait in waits), default=None)
        assert self.tracker.last_due_ms == max((wait[0] for wait in waits), default=None)
        assert sum(bucket.sealed for bucket in self.tracker.buckets) <= self.settings.max_buckets

    def end(self) -> None:
        """The micro-batch ends: what it did counts."""
        record = record_to_json(self.tracker.save())
        spans = self.tracker.due_spans({})
        assert sum(span.count for span in spans) == len(self.now.waits)
        assert [span.first_ms for span in spans[:1]] == sorted(wait[0] for wait in self.now.waits)[
            :1
        ]
        self.ended, self.record = self.now, record
        self.restart()

    def kill(self) -> None:
        """The micro-batch does not count, and is begun again with other messages at the same
        positions or others.
        """
        self.killed = True
        self.restart()

    def restart(self) -> None:
        try:
            self.start()
        except StorageFailed:
            self.storage.fails = 0.0
            self.start()

    def check_storage(self) -> None:
        """What the record uses is there, and nothing else but what killed micro-batches left."""
        used = {bucket.bucket_id for bucket in self.tracker.buckets}
        assert used <= self.storage.buckets.keys()
        assert self.killed or used == self.storage.buckets.keys()
        for bucket in self.tracker.buckets:
            numbers = self.storage.buckets[bucket.bucket_id].keys() - {METADATA}
            assert numbers == set(range(bucket.segment, bucket.segments + 1))


def frame_of(key: Key) -> bytes:
    return b"%d:%d:%d" % key


@pytest.mark.parametrize("first", range(0, SEEDS, _AT_ONCE))
def test_nothing_is_lost_doubled_early_or_out_of_order(first: int) -> None:
    for seed in range(first, first + _AT_ONCE):
        try:
            Life(seed).play(40)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_positions_before_all_are_nobodys() -> None:
    assert DelayedTracker(MemoryStorage(), DelaySettings()).save().reached == BEFORE_ALL
