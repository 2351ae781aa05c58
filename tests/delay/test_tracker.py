"""The delayed message tracker. The cases with the broker's own names are those that its tests hold
it to.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ledgerlake.delay.bucket import IndexRecord, record_from_json, record_to_json
from ledgerlake.delay.due_times import DueSpan, DueTimes
from ledgerlake.delay.segment import Key, index_rows, key_at
from ledgerlake.delay.tracker import DelayedTracker, DelaySettings
from ledgerlake.errors import OffsetError
from ledgerlake.wire.message_id import BEFORE_ALL, Position
from tests.delay.memory_storage import MemoryStorage

if TYPE_CHECKING:
    from collections.abc import Iterable

SMALL = DelaySettings(min_indexes_per_bucket=20, ledger_step_per_bucket=1, time_step_per_segment_ms=3_600_000, max_indexes_per_segment=5, max_buckets=100, min_indexes_per_segment=1)  # fmt: skip


def frame_of(key: Key) -> bytes:
    return repr(key).encode()


def add(tracker: DelayedTracker, *keys: Key) -> None:
    """Each a batch of its own: time, ledger, entry."""
    for key in keys:
        tracker.add(index_rows([key], [frame_of(key)]))


def take(tracker: DelayedTracker, cutoff_ms: int, most_messages: int = 1_000_000) -> list[Key]:
    taken_keys: list[Key] = []
    for batch in tracker.take_due(cutoff_ms, most_messages):
        keys = [key_at(batch, row) for row in range(batch.num_rows)]
        assert batch["frame"].to_pylist() == [frame_of(key) for key in keys]
        taken_keys += keys
    return taken_keys


def sealed(tracker: DelayedTracker) -> list[int]:
    """Segments of each immutable bucket."""
    return [bucket.segments for bucket in tracker.buckets if bucket.sealed]


def test_test() -> None:
    tracker = DelayedTracker(MemoryStorage(), SMALL)
    add(tracker, (20, 1, 2), (10, 2, 1), (30, 3, 3), (50, 4, 5), (40, 5, 4))
    assert take(tracker, 0) == []
    assert (tracker.count, tracker.next_due_ms, tracker.last_due_ms) == (5, 10, 50)
    assert take(tracker, 15) == [(10, 2, 1)]
    assert take(tracker, 60) == [(20, 1, 2), (30, 3, 3), (40, 5, 4), (50, 4, 5)]
    assert (tracker.count, tracker.next_due_ms) == (0, None)


@pytest.mark.parametrize("taken", range(13))
def test_a_part_is_added_if_no_message_waits_at_its_position(taken: int) -> None:
    storage = MemoryStorage()
    tracker = DelayedTracker(storage, SMALL)
    keys = [(10 * number, 1 + number % 2, number) for number in range(1, 13)]
    tracker.add(index_rows(keys, [frame_of(key) for key in keys]))
    record = tracker.save()
    tracker = DelayedTracker(storage, SMALL, record)
    assert take(tracker, 10 * taken) == keys[:taken]
    record = tracker.save()
    for number in range(14):
        tracker = DelayedTracker(storage, SMALL, record)
        is_added = tracker.add_part(500, Position(1 + number % 2, number))
        assert is_added == (number not in range(taken + 1, 13)), number
        assert tracker.add_part(500, Position(2 - number % 2, number))


def test_what_is_due_when_is_counted_to_the_precision_of_a_segment() -> None:
    storage = MemoryStorage()
    known: dict[int, DueTimes] = {}
    tracker = DelayedTracker(storage, SMALL)
    assert tracker.due_spans(known) == []
    times_ms = [1_000 * second for second in (5, 6, 9, 65, 3_605, 90_005)]
    add(tracker, *((time_ms, 1, time_ms) for time_ms in times_ms))
    record = tracker.save()
    assert sum(span.count for span in tracker.due_spans(known)) == 6
    assert tracker.due_spans(known)[0].first_ms == 5_000
    tracker = DelayedTracker(storage, SMALL, record)
    assert take(tracker, 65_000) == [(time_ms, 1, time_ms) for time_ms in times_ms[:4]]
    tracker.save()
    assert tracker.due_spans(known) == [
        DueSpan(3_605_000, 1000, 1),
        DueSpan(90_005_000, 3_600_000, 1),
    ]
    assert take(tracker, 90_005_000)
    tracker.save()
    assert tracker.due_spans(known) == []


def test_messages_of_one_segment_are_counted_each_by_its_own_time() -> None:
    storage = MemoryStorage()
    tracker = DelayedTracker(storage, DelaySettings())
    minutes = (1, 2, 100, 10_000)
    add(tracker, *((60_000 * minute, 1, minute) for minute in minutes))
    record = tracker.save()
    (bucket,) = tracker.buckets
    assert bucket.segments == 1
    known: dict[int, DueTimes] = {}
    assert [span.first_ms // 60_000 for span in tracker.due_spans(known)] == list(minutes)
    later = DelayedTracker(storage, DelaySettings(), record)
    take(later, 120_000)
    later.save()
    assert [span.first_ms // 60_000 for span in later.due_spans(known)] == [100, 10_000]
    # The micro-batch is run again by the same process.
    again = DelayedTracker(storage, DelaySettings(), record)
    for times in (known, {}):
        assert sum(span.count for span in again.due_spans(times)) == 4


def test_with_timer() -> None:
    tracker = DelayedTracker(MemoryStorage(), SMALL)
    next_due_times_ms = []
    for number, time_ms in enumerate((20, 10, 30)):
        add(tracker, (time_ms, 1, number))
        next_due_times_ms.append(tracker.next_due_ms)
    assert next_due_times_ms == [20, 10, 10]


def test_add_within_tick_time() -> None:
    """The broker may deliver a tick early unless it is told to be strict; here nothing ever is."""
    tracker = DelayedTracker(MemoryStorage(), SMALL)
    add(tracker, *((time_ms, 1, time_ms) for time_ms in (10, 99, 100, 101, 200)))
    assert take(tracker, 0) == []
    assert [key[0] for key in take(tracker, 100)] == [10, 99, 100]
    assert tracker.count == 2


def test_add_message_with_strict_delay() -> None:
    tracker = DelayedTracker(MemoryStorage(), SMALL)
    add(tracker, (9, 1, 9), (10, 1, 10), (11, 1, 11))
    assert [key[0] for key in take(tracker, 10)] == [9, 10]
    assert (take(tracker, 10), tracker.count) == ([], 1)


def test_max_indexes_per_segment() -> None:
    tracker = DelayedTracker(MemoryStorage(), SMALL)
    add(tracker, *((number * 10, number, number) for number in range(1, 102)))
    assert sealed(tracker) == [4, 4, 4, 4, 4]
    assert tracker.count == 101


def test_a_bucket_is_sealed_when_a_message_comes_from_beyond_its_ledgers() -> None:
    settings = DelaySettings(min_indexes_per_bucket=2, ledger_step_per_bucket=5)
    tracker = DelayedTracker(MemoryStorage(), settings)
    add(tracker, (9, 10, 0), (9, 14, 0), (9, 14, 1))
    assert sealed(tracker) == []
    add(tracker, (9, 15, 0))
    assert sealed(tracker) == [1]
    add(tracker, (9, 20, 0))
    assert sealed(tracker) == [1], "one message was too few"
    add(tracker, (9, 25, 0))
    assert sealed(tracker) == [1, 1]


def test_one_long_ledger_does_not_make_one_bucket_without_end() -> None:
    tracker = DelayedTracker(MemoryStorage(), DelaySettings(min_indexes_per_bucket=10))
    for entry_id in range(100):
        add(tracker, (9, 1, entry_id))
    tracker.save()
    assert sealed(tracker) == [1]


def test_segments_whose_messages_have_left_are_deleted_once_the_record_says_so() -> None:
    storage = MemoryStorage()
    settings = DelaySettings(time_step_per_segment_ms=1, min_indexes_per_segment=1)
    tracker = DelayedTracker(storage, settings)
    add(tracker, *((number, 1, number) for number in range(5)))
    record = tracker.save()
    (bucket,) = record.buckets

    def kept() -> list[int]:
        return sorted(storage.buckets[bucket.bucket_id])

    tracker = DelayedTracker(storage, settings, record)
    take(tracker, 2)
    later = tracker.save()
    assert kept() == [0, 1, 2, 3, 4, 5]
    # The micro-batch may be run again with the former record.
    assert take(DelayedTracker(storage, settings, record), 0) == [(0, 1, 0)]
    tracker = DelayedTracker(storage, settings, later)
    assert kept() == [0, 4, 5]
    assert take(tracker, 9) == [(3, 1, 3), (4, 1, 4)]


@pytest.mark.parametrize(
    "finished",
    [{"bucket_id": 9, "first": 0, "end": 1}, {"bucket_id": 9, "first": 2, "end": 2}, None],
)
def test_a_record_with_finished_segments_that_cannot_be_is_damaged(
    finished: dict[str, int] | None,
) -> None:
    tracker = DelayedTracker(MemoryStorage(), SMALL)
    add(tracker, (5, 1, 1))
    record = tracker.save()
    used = {"bucket_id": record.buckets[0].bucket_id, "first": 1, "end": 2}
    fields = json.loads(record_to_json(record)) | {"finished": [finished or used]}
    with pytest.raises(OffsetError, match="contradict themselves"):
        record_from_json(json.dumps(fields))


@pytest.mark.parametrize("most", [1, 2, 3, 20])
def test_no_more_buckets_than_the_maximum_and_all_is_taken_once(most: int) -> None:
    storage = MemoryStorage()
    settings = DelaySettings(2, 1, 10, 3, most)
    tracker = DelayedTracker(storage, settings)
    keys = [
        ((ledger_id * 7) % 50, ledger_id, entry_id)
        for ledger_id in range(40)
        for entry_id in range(3)
    ]
    taken_keys: list[Key] = []
    for number, key in enumerate(keys):
        add(tracker, key)
        assert len(sealed(tracker)) <= most
        if number == 60:
            taken_keys += take(tracker, 20)
            assert taken_keys == sorted(key for key in keys[:61] if key[0] <= 20)
    tracker = DelayedTracker(storage, settings, tracker.save())
    assert len(storage.buckets) == len(tracker.buckets)
    remaining_keys = take(tracker, 50)
    assert remaining_keys == sorted(set(keys) - set(taken_keys))


def test_the_two_neighbours_with_the_fewest_messages_are_merged() -> None:
    tracker = DelayedTracker(MemoryStorage(), DelaySettings(1, 1, max_buckets=3))
    for ledger_id, count in enumerate([5, 3, 2, 4, 1]):
        tracker.add(index_rows([(9, ledger_id, number) for number in range(count)]))
    assert [bucket.waiting for bucket in tracker.buckets if bucket.sealed] == [5, 5, 4]


def test_small_parts_of_the_mutable_bucket_become_larger_ones() -> None:
    storage = MemoryStorage()
    record = IndexRecord()
    for entry_id in range(1000):
        tracker = DelayedTracker(storage, DelaySettings(), record)
        add(tracker, (5000 - entry_id, 1, entry_id))
        record = tracker.save()
        assert len(record.buckets) <= 10
    assert take(DelayedTracker(storage, DelaySettings(), record), 5000) == [(5000 - number, 1, number) for number in range(999, -1, -1)]  # fmt: skip


def test_only_one_segment_of_each_bucket_is_in_memory() -> None:
    reads: list[tuple[int, int]] = []

    class Watched(MemoryStorage):
        def get_segment(self, bucket_id: int, number: int) -> bytes:
            reads.append((bucket_id, number))
            return super().get_segment(bucket_id, number)

    storage = Watched()
    tracker = DelayedTracker(storage, DelaySettings(100, 1, 10, 10))
    tracker.add(index_rows([(number, number // 100, number % 100) for number in range(1000)]))
    record = tracker.save()
    tracker = DelayedTracker(storage, DelaySettings(), record)
    reads.clear()
    assert sum(batch.num_rows for batch in tracker.take_due(14)) == 15
    assert [number for _, number in reads] == [1, 2]


def test_what_was_due_while_nobody_looked_is_taken_after_a_restart() -> None:
    storage = MemoryStorage()
    tracker = DelayedTracker(storage, SMALL)
    add(tracker, *((number, number, 0) for number in range(100)))
    restarted = DelayedTracker(storage, SMALL, record_from_json(record_to_json(tracker.save())))
    assert take(restarted, 1_000_000) == [(number, number, 0) for number in range(100)]


def test_a_message_added_again_is_not_taken_twice() -> None:
    storage = MemoryStorage()
    tracker = DelayedTracker(storage, SMALL)
    keys = [(number, number // 10, number % 10) for number in range(100)]
    add(tracker, *keys)
    tracker = DelayedTracker(storage, SMALL, tracker.save())
    tracker.add(index_rows(keys))
    assert tracker.count == 100
    add(tracker, (200, 10, 0), (200, 10, 0))
    assert take(tracker, 200) == [*keys, (200, 10, 0)]


def test_only_what_was_added_before_is_left_out_of_a_batch() -> None:
    storage = MemoryStorage()
    tracker = DelayedTracker(storage, SMALL)
    even = [(number, number // 10, number % 10) for number in range(0, 100, 2)]
    add(tracker, *even)
    tracker = DelayedTracker(storage, SMALL, tracker.save())
    assert len(take(tracker, 49)) == 25
    all_keys = [(number, number // 10, number % 10) for number in range(120)]
    tracker.add(index_rows(all_keys, [frame_of(key) for key in all_keys]))
    assert take(tracker, 120) == [key for key in all_keys if key not in even[:25]]


def test_an_output_that_joins_keeps_its_own_position() -> None:
    tracker = DelayedTracker(MemoryStorage(), SMALL)
    add(tracker, (5, 3, 0))
    tracker.add_output("table", BEFORE_ALL)
    tracker.add_output("topic", Position(3, 0))
    tracker.add_output("topic", Position(9, 9))
    record = record_from_json(record_to_json(tracker.save()))
    assert record.outputs == {"table": BEFORE_ALL, "topic": Position(3, 0)}


def test_an_output_gets_all_that_comes_when_nothing_waits_any_more_that_it_is_not_to_get() -> None:
    """A topic that was created again has lower positions."""
    storage = MemoryStorage()
    tracker = DelayedTracker(storage, SMALL)
    add(tracker, (5, 3, 0), (9, 3, 1))
    tracker.add_output("topic", Position(3, 0))
    tracker = DelayedTracker(storage, SMALL, tracker.save())
    take(tracker, 5)
    tracker = DelayedTracker(storage, SMALL, tracker.save())
    assert tracker.outputs == {"topic": Position(3, 0)}, "its bucket is there still"
    take(tracker, 9)
    assert tracker.save().outputs == {"topic": BEFORE_ALL}


def test_what_every_output_has_passed_is_trimmed() -> None:
    storage = MemoryStorage()
    tracker = DelayedTracker(storage, DelaySettings(10, 1))
    add(tracker, *((99, number // 10, number % 10) for number in range(40)))
    tracker.add_output("topic", Position(1, 9))
    tracker.add_output("other", Position(2, 3))
    record = tracker.save()
    assert tracker.count == 20
    restarted = DelayedTracker(storage, SMALL, record)
    assert [key[1:] for key in take(restarted, 99)] == [
        (number // 10, number % 10) for number in range(20, 40)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_position_to_reread_from_is_that_of_the_first_message_that_waits(seed: int) -> None:
    rng = random.Random(seed)
    storage, record = MemoryStorage(), IndexRecord()
    waiting: set[Key] = set()
    for step in range(1, 40):
        tracker = DelayedTracker(storage, SMALL, record)
        new = [
            (100 * step + rng.randrange(1, 1_000), step // 3, 10 * step + number)
            for number in range(rng.randrange(9))
        ]
        if new:
            tracker.add(index_rows(new))
        waiting.update(new)
        for batch in tracker.take_due(100 * step, rng.choice([2, 1_000])):
            waiting -= {key_at(batch, row) for row in range(batch.num_rows)}
        tracker.move_reread_from()
        record = record_from_json(record_to_json(tracker.save()))
        assert tracker.reread_from == min((Position(*key[1:]) for key in waiting), default=None)


def test_no_message_whose_bytes_only_the_topic_has_is_before_the_position_to_reread_from() -> None:
    storage = MemoryStorage()
    tracker = DelayedTracker(storage, SMALL)
    tracker.add(index_rows([(5, 2, 0), (9, 1, 7), (9, 1, 8)], [None, b"kept", None]))
    record = tracker.save()
    assert tracker.reread_from == Position(1, 8)
    restarted = DelayedTracker(storage, SMALL, record)
    assert restarted.reread_from == Position(1, 8)
    assert sum(batch.num_rows for batch in restarted.take_due(9)) == 3
    restarted.add(index_rows([(20, 3, 0)], [b"kept"]))
    restarted.save()
    assert restarted.reread_from is None


def test_a_missing_bucket_is_an_error_that_says_so() -> None:
    storage = MemoryStorage()
    tracker = DelayedTracker(storage, SMALL)
    add(tracker, (5, 2, 0))
    record = tracker.save()
    storage.buckets.clear()
    with pytest.raises(OffsetError, match=r"bucket 1 of delayed messages lacks its value 1"):
        take(DelayedTracker(storage, SMALL, record), 5)


def test_a_newer_record_is_refused_with_advice() -> None:
    with pytest.raises(
        OffsetError, match=r"newer Ledgerlake \(delayed index of version 2.*upgrade"
    ):
        record_from_json(record_to_json(IndexRecord()).replace('"version": 1', '"version": 2'))


def test_the_golden_index_is_read_and_written() -> None:
    golden = json.loads(
        (Path(__file__).parents[1] / "golden" / "delayed-index-v1.json").read_text()
    )
    storage = MemoryStorage()
    for bucket_id, values in golden["snapshots"].items():
        storage.buckets[int(bucket_id)] = {
            int(number): bytes.fromhex(value) for number, value in values.items()
        }
    record = record_from_json(json.dumps(golden["record"]))
    assert [bucket.reread_from for bucket in record.buckets] == [
        bucket.last for bucket in record.buckets
    ]
    assert json.loads(record_to_json(record)) == golden["record"]
    tracker = DelayedTracker(storage, DelaySettings(), record)
    assert sorted(storage.buckets) == [1, 3], "a doomed bucket goes when its record is used"
    messages = [(key_at(batch, row), batch["frame"][row].as_py()) for batch in tracker.take_due(2 * 10**12) for row in range(batch.num_rows)]  # fmt: skip
    assert messages == [
        ((1700000000005, 1, 1), b"second"),
        ((1700000000006, 1, 2), None),
        ((1700000000020, 2, 0), b"fourth"),
        ((1700000000030, 2, 4), None),
    ]


@pytest.mark.parametrize("segment", [b"", None], ids=["empty", "shorter than its record says"])
def test_a_segment_without_the_messages_that_are_asked_of_it_is_missing(
    segment: bytes | None,
) -> None:
    storage = MemoryStorage()
    tracker = DelayedTracker(storage, SMALL)
    tracker.add_output("table", BEFORE_ALL)
    add(tracker, *((1_000 + number, 1, number) for number in range(3)))
    record = tracker.save()
    (bucket,) = record.buckets
    if segment is None:
        record = replace(record, buckets=[replace(bucket, offset=3)])
    else:
        storage.buckets[bucket.bucket_id][1] = segment
    with pytest.raises(OffsetError, match="lacks its value 1"):
        take(DelayedTracker(storage, SMALL, record), 5_000)


def test_the_last_ledger_that_there_can_be_leaves_a_record_that_is_read() -> None:
    tracker = DelayedTracker(MemoryStorage(), SMALL)
    add(tracker, (1_000, 2**63 - 1, 1))
    record = tracker.save()
    assert record_from_json(record_to_json(record)) == record


def test_a_message_that_was_taken_may_be_added_with_another_time_and_is_taken_again_after_the_next_save() -> (
    None
):
    storage = MemoryStorage()
    tracker = DelayedTracker(storage, SMALL)
    add(tracker, (10, 1, 1), (20, 1, 2), (90, 1, 3))
    record = tracker.save()
    tracker = DelayedTracker(storage, SMALL, record)
    for batch in tracker.take_due(20):
        keys = [key_at(batch, row) for row in range(batch.num_rows)]
        again = [(key[0] + 5, *key[1:]) for key in keys]
        tracker.add_again(index_rows(again, [frame_of(key) for key in again]))
    record = tracker.save()
    assert (tracker.count, tracker.next_due_ms) == (3, 15)
    tracker = DelayedTracker(storage, SMALL, record)
    assert take(tracker, 100) == [(15, 1, 1), (25, 1, 2), (90, 1, 3)]
    assert tracker.save().buckets == []


def test_due_messages_beyond_the_limit_stay_due_in_stored_buckets_and_among_fresh_messages() -> (
    None
):
    storage = MemoryStorage()
    tracker = DelayedTracker(storage, SMALL)
    add(tracker, *[(10, 1, number) for number in range(0, 30, 2)])
    tracker = DelayedTracker(storage, SMALL, tracker.save())
    add(tracker, *[(10, 2, number) for number in range(15)], (99, 2, 15))
    keys = [(10, 1, number) for number in range(0, 30, 2)] + [
        (10, 2, number) for number in range(15)
    ]
    taken: list[Key] = []
    while more := take(tracker, 50, 4):
        taken += more
        assert (tracker.count, tracker.next_due_ms) == (
            31 - len(taken),
            10 if len(taken) < 30 else 99,
        )
        tracker = DelayedTracker(storage, SMALL, tracker.save())
    assert taken == keys
    assert take(tracker, 99) == [(99, 2, 15)]


@pytest.mark.parametrize("max_fresh_messages", [0, 7, 1000])
@pytest.mark.parametrize("added_at_once", [1, 6, 40])
def test_exactly_the_first_messages_are_released_however_they_were_added(
    added_at_once: int, max_fresh_messages: int
) -> None:
    settings = replace(SMALL, max_fresh_messages=max_fresh_messages)
    storage = MemoryStorage()
    tracker = DelayedTracker(storage, settings)
    keys = [(number * 7 % 40, 1 + number // 15, number) for number in range(40)]
    for start in range(0, 40, added_at_once):
        added = keys[start : start + added_at_once]
        tracker.add(index_rows(added, [frame_of(key) for key in added]))
    taken: list[Key] = []
    for count in (13, 1, 26):
        assert take(tracker, 100, count) == sorted(keys)[len(taken) : len(taken) + count]
        taken += sorted(keys)[len(taken) : len(taken) + count]
        assert tracker.count == 40 - len(taken)
        tracker = DelayedTracker(storage, settings, tracker.save())


def test_many_messages_that_are_added_again_are_stored_before_the_next_save() -> None:
    class Watched(MemoryStorage):
        saved = 0

        def save_all_segments(self, bucket_id: int, snapshots: Iterable[tuple[int, bytes]]) -> None:
            self.saved += 1
            super().save_all_segments(bucket_id, snapshots)

    storage = Watched()
    settings = replace(SMALL, max_fresh_bytes=100)
    tracker = DelayedTracker(storage, settings)
    keys = [(10, 1, number) for number in range(40)]
    add(tracker, *keys)
    tracker = DelayedTracker(storage, settings, tracker.save())
    saved_before, taken = storage.saved, list[Key]()
    for batch in tracker.take_due(30):
        taken += [key_at(batch, row) for row in range(batch.num_rows)]
        again = [(30, *key_at(batch, row)[1:]) for row in range(batch.num_rows)]
        tracker.add_again(index_rows(again, [frame_of(key) for key in again]))
    assert taken == keys
    assert storage.saved - saved_before >= 4
    tracker = DelayedTracker(storage, SMALL, tracker.save())
    assert take(tracker, 30) == [(30, 1, number) for number in range(40)]
