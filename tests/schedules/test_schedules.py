"""The effects of a message with an id, and of a cancel of the id, on the messages that wait; and
the stored schedules.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ledgerlake.errors import OffsetError
from ledgerlake.reasons import CANCELLED, REPETITION_REFUSED, REPLACED, SCHEDULE_REFUSED, Reason
from ledgerlake.schedules.cancels import cancels_from_json, cancels_to_json, parse_cancel
from ledgerlake.schedules.repetition import (
    Occurrence,
    Repetition,
    RepetitionLimit,
    RepetitionRate,
    parse_repetition,
)
from ledgerlake.schedules.schedules import (
    REPEATING,
    SCHEDULED,
    MarkedPositions,
    Pauses,
    Repeating,
    ScheduledMessage,
    Schedules,
    Step,
    waiting_from_json,
    waiting_to_json,
)
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterator


class Store:
    """Messages by id, in a dict."""

    def __init__(self) -> None:
        self.messages: dict[str, list[ScheduledMessage]] = {}
        self.rate = RepetitionRate()

    def load(self, schedule_id: str) -> list[ScheduledMessage]:
        return self.messages.setdefault(schedule_id, [])

    def store(self, schedule_id: str, messages: list[ScheduledMessage]) -> None:
        self.messages[schedule_id] = messages
        if not messages:
            del self.messages[schedule_id]

    def load_repeating(self, schedule_id: str) -> list[ScheduledMessage]:
        return [message for message in self.messages[schedule_id] if message.repeating]

    def store_repeating(self, schedule_id: str, messages: list[ScheduledMessage]) -> None:
        others = [message for message in self.messages[schedule_id] if not message.repeating]
        self.store(schedule_id, sorted([*others, *messages], key=lambda message: message.position))


def waiting(entry_id: int, time_ms: int, deliver_ms: int) -> ScheduledMessage:
    return ScheduledMessage(Position(7, entry_id), time_ms, deliver_ms)


def release(schedules: Schedules, *entry_ids: int) -> list[str | None]:
    """Release messages together; why each is not to be delivered."""
    withheld = schedules.release(np.full(len(entry_ids), 7), np.array(entry_ids))
    return [withheld.get(row) for row in range(len(entry_ids))]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def schedules(store: Store) -> Schedules:
    return Schedules(store, MarkedPositions())


def test_the_last_message_of_an_id_waits_and_the_others_are_replaced(
    store: Store, schedules: Schedules
) -> None:
    schedules.put("a", waiting(1, 0, 100))
    schedules.put("b", waiting(2, 0, 100))
    schedules.put("a", waiting(3, 10, 50))
    schedules.put("a", waiting(4, 20, 500))
    assert store.messages == {"a": [waiting(4, 20, 500)], "b": [waiting(2, 0, 100)]}
    assert release(schedules, 3, 1, 2, 4) == [REPLACED, REPLACED, None, None]
    assert not schedules.marked


def test_a_message_that_was_due_when_the_next_one_was_stored_is_delivered(
    schedules: Schedules,
) -> None:
    schedules.put("a", waiting(1, 0, 100))
    schedules.put("a", waiting(2, 100, 200))
    schedules.end("a", Position(7, 3), 199, CANCELLED)
    assert release(schedules, 1) == [None]
    assert release(schedules, 2) == [CANCELLED]


def test_a_message_that_is_due_already_replaces_others_and_does_not_wait_under_its_id(
    store: Store, schedules: Schedules
) -> None:
    schedules.put("a", waiting(1, 0, 500))
    schedules.put("a", waiting(2, 100, 100))
    schedules.put("a", waiting(3, 50, 20))
    schedules.end("a", Position(7, 4), 10, CANCELLED)
    assert not store.messages
    assert release(schedules, 1, 2, 3) == [REPLACED, None, None]


@pytest.mark.parametrize("seed", range(50))
def test_the_times_of_what_waits_under_an_id_rise_whatever_the_clocks_of_senders_say(
    seed: int,
) -> None:
    """Only then does an event find what it hits without a look at each message."""
    rng = random.Random(seed)
    schedules = Schedules(store := Store(), MarkedPositions())
    for entry_id in rng.sample(range(200), 200):
        time_ms = rng.randrange(1000)
        if rng.random() < 0.2:
            schedules.end("a", Position(7, entry_id), time_ms, CANCELLED)
        else:
            deliver_ms = rng.choice([time_ms, time_ms + rng.randrange(5), rng.randrange(1000)])
            repeats = (
                Repeating(deliver_ms) if deliver_ms >= time_ms and rng.random() < 0.2 else None
            )
            schedules.put(
                "a", ScheduledMessage(Position(7, entry_id), time_ms, deliver_ms, repeats)
            )
        waits = store.messages.get("a", [])
        assert all(message.time_ms <= message.deliver_ms for message in waits)
        assert all(earlier.deliver_ms <= later.time_ms for earlier, later in pairwise(waits))


def test_a_message_for_which_its_id_has_no_room_changes_nothing_of_the_id(
    monkeypatch: pytest.MonkeyPatch, store: Store, schedules: Schedules
) -> None:
    monkeypatch.setattr("ledgerlake.schedules.schedules.MOST_WAITING", 2)
    waits = [waiting(1, 100, 200), waiting(2, 200, 300)]
    for message in waits:
        schedules.put("a", message)
    assert schedules.put("a", waiting(3, 300, 400))
    assert not schedules.put("a", replace(waiting(4, 300, 400), repeating=Repeating(400)))
    assert store.messages["a"] == waits
    schedules.put("a", waiting(5, 299, 400))
    assert store.messages["a"] == [waits[0], waiting(5, 299, 400)]
    assert release(schedules, 2, 3, 4, 1, 5) == [
        REPLACED,
        SCHEDULE_REFUSED,
        REPETITION_REFUSED,
        None,
        None,
    ]


def test_a_message_that_comes_after_one_that_stands_behind_it_is_replaced_by_it(
    schedules: Schedules,
) -> None:
    schedules.put("a", waiting(5, 50, 200))
    schedules.put("a", waiting(3, 30, 300))
    assert release(schedules, 5, 3) == [None, REPLACED]


@pytest.mark.parametrize("end", [None, REPLACED, CANCELLED])
def test_what_waits_from_a_topic_that_was_created_again_with_lower_ids_is_hit_and_swallows_nothing(
    store: Store, schedules: Schedules, end: Reason | None
) -> None:
    former = ScheduledMessage(Position(900, 0), 10, 1000)
    schedules.put("a", former)
    new = ScheduledMessage(Position(3, 5), 20, 500)
    if end is None:
        schedules.put("a", new)
    else:
        schedules.end("a", new.position, new.time_ms, end)
    assert store.messages == ({"a": [new]} if end is None else {})
    assert schedules.release(np.array([900]), np.array([0])) == {0: end or REPLACED}


class ReadList(list[ScheduledMessage]):
    """A list that counts the messages that are read."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.reads += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self) -> Iterator[ScheduledMessage]:
        for message in super().__iter__():
            self.reads += 1
            yield message


def test_each_of_many_messages_of_an_id_that_do_not_hit_each_other_reads_a_few(
    store: Store, schedules: Schedules
) -> None:
    store.messages["a"] = messages = ReadList()
    for number in range(1, 1000):
        schedules.put("a", waiting(number, 10 * number, 10 * number + 10))
        schedules.pause("a", Position(7, number), 10 * number)
    schedules.end("a", Position(7, 1000), 10_000, CANCELLED)
    assert len(messages) == 999
    assert release(schedules, *range(1, 1000)) == [None] * 999
    # Halving finds a place among a thousand in ten reads.
    assert messages.reads < 40 * 1000


def test_marks_are_found_among_positions_of_many_ledgers() -> None:
    marked = MarkedPositions()
    marked.mark(Position(1, 5), SCHEDULED)
    marked.mark(Position(2, 2**32 - 1), REPLACED)
    ledger_ids, entry_ids = np.array([1, 2, 2, 5]), np.array([5, 5, 2**32 - 1, 1])
    assert marked.are_marked(ledger_ids, entry_ids).tolist() == [True, False, True, False]
    assert marked.are_marked(ledger_ids, entry_ids, [REPLACED]).tolist() == [
        False,
        False,
        True,
        False,
    ]


def test_the_marks_of_neighbours_are_small_in_state() -> None:
    marked = MarkedPositions()
    for entry_id in range(50_000):
        marked.mark(Position(7, entry_id), SCHEDULED)
    assert len(cancels_to_json([], marked)) < 200


def test_what_waits_under_an_id_is_readable_by_later_releases_and_newer_ones_are_refused() -> None:
    golden = (
        '{"version": 1, "messages": [{"position": {"ledger_id": 7, "entry_id": 4}, "time_ms": 20, '
        '"deliver_ms": 500,'
        ' "repeating": {"start_ms": 30, "occurrence": {"number": 3, "nominal_ms": 499, "due_ms": '
        '500}, "ends_ms": 800,'
        ' "ends_by": "replaced", "pauses": {"since_ms": 70, "ended_ms": [40, 60]},'
        ' "rate": {"occurrences": 24, "size_bytes": 2400}}}]}'
    )
    repeating = Repeating(
        30, Occurrence(3, 499, 500), 800, REPLACED, Pauses(70, [40, 60]), RepetitionRate(24, 2400)
    )
    assert waiting_from_json(golden) == [replace(waiting(4, 20, 500), repeating=repeating)]
    assert json.loads(waiting_to_json(waiting_from_json(golden))) == json.loads(golden)
    with pytest.raises(OffsetError, match="newer Ledgerlake"):
        waiting_from_json('{"version": 2}')


def test_marks_in_state_are_readable_by_later_releases() -> None:
    golden = (
        '{"version": 1, "cancels": [], "marked": {"replaced": {"7": '
        '"OjAAAAEAAAAAAAEAEAAAAAQACQA="}},'
        ' "pauses": {"since_ms": 70, "ended_ms": [40, 60]}}'
    )
    cancels, marked, pauses = cancels_from_json(golden)
    assert (len(cancels), pauses) == (0, Pauses(70, [40, 60]))
    assert marked.take(Position(7, 9)) == REPLACED
    assert marked.take(Position(7, 9)) is None
    assert marked.take(Position(7, 4)) == REPLACED
    assert not marked
    marked.mark(Position(7, 4), REPLACED)
    marked.mark(Position(7, 9), REPLACED)
    assert json.loads(cancels_to_json([], marked, pauses)) == json.loads(golden)


def test_the_rate_is_that_of_the_messages_that_repeat_whatever_happens_to_them() -> None:
    """Messages of a few ids are put, replaced, cancelled and delivered in a random order."""
    rng = random.Random(1)
    schedules = Schedules(
        store := Store(), MarkedPositions(), limit=RepetitionLimit(occurrences_per_s=3)
    )
    refused = 0
    for number in range(1, 2_000):
        schedule_id, time_ms = rng.choice("abcdef"), 1_000 * number
        if rng.random() < 0.5:
            rate = RepetitionRate(rng.choice([40_000, 86_400, 170_000]), number)
            repeating = Repeating(time_ms + 500, rate=rate) if rng.random() < 0.8 else None
            refused += not schedules.put(
                schedule_id,
                ScheduledMessage(Position(7, number), time_ms, time_ms + 500, repeating),
            )
        elif rng.random() < 0.3:
            schedules.end(schedule_id, Position(7, number), time_ms, CANCELLED)
        for name, waiting in list(store.messages.items()):
            for message in waiting:
                if (
                    message.repeating is not None
                    and schedules.repeats(message.position)
                    and rng.random() < 0.5
                ):
                    schedules.advance(
                        name, message.position, every_second(count="4"), time_ms + 500
                    )
        of_all = [
            message.repeating.rate
            for waits in store.messages.values()
            for message in waits
            if message.repeating
        ]
        assert store.rate == sum(of_all, RepetitionRate())
        assert store.rate.occurrences <= 3 * 86_400
    assert refused > 100


def every_second(**more: str) -> Repetition:
    properties = {"ledgerlake.every": "PT1S"} | {
        f"ledgerlake.{name}": value for name, value in more.items()
    }
    rule = parse_repetition(properties)
    assert rule is not None
    return rule


def repeating(schedules: Schedules, entry_id: int = 1, start_ms: int = 5_000) -> Position:
    """Put a message that repeats from a time on, and let it start; the first occurrence is due
    then.
    """
    message = ScheduledMessage(Position(7, entry_id), start_ms, start_ms, Repeating(start_ms))
    schedules.put("a", message)
    assert schedules.advance("a", message.position, every_second(), start_ms) == Step(
        None, start_ms
    )
    return message.position


def numbers(
    schedules: Schedules, position: Position, rule: Repetition, cutoff_ms: int
) -> list[int]:
    """The occurrences that are delivered until the message is due after a time, or has ended."""
    delivered: list[int] = []
    while schedules.repeats(position):
        step = schedules.advance("a", position, rule, cutoff_ms)
        delivered += [] if step.delivered is None else [step.delivered.number]
        if step.next_ms is None or step.next_ms > cutoff_ms:
            break
    return delivered


def test_a_message_that_repeats_waits_for_one_occurrence_after_the_other() -> None:
    schedules = Schedules(store := Store(), MarkedPositions())
    position = repeating(schedules)
    assert schedules.advance("a", position, every_second(), 5_000) == Step(
        Occurrence(1, 5_000, 5_000), 6_000
    )
    assert schedules.advance("a", position, every_second(), 6_000) == Step(
        Occurrence(2, 6_000, 6_000), 7_000
    )
    (waits,) = store.messages["a"]
    assert (waits.deliver_ms, waits.repeating and waits.repeating.occurrence) == (
        7_000,
        Occurrence(3, 7_000, 7_000),
    )


def test_after_its_last_occurrence_nothing_is_left_of_it() -> None:
    schedules = Schedules(store := Store(), MarkedPositions())
    position = repeating(schedules)
    assert numbers(schedules, position, every_second(count="3"), 10**9) == [1, 2, 3]
    assert (store.messages, bool(schedules.marked)) == ({}, False)


def test_what_was_due_before_a_replacement_is_delivered_and_the_next_one_is_a_reject() -> None:
    schedules = Schedules(store := Store(), MarkedPositions())
    position = repeating(schedules)
    schedules.end("a", Position(7, 9), 6_500, REPLACED)
    schedules.end("a", Position(7, 10), 6_600, CANCELLED)
    assert numbers(schedules, position, every_second(), 10_000) == [1, 2]
    assert release(schedules, position.entry_id) == [REPLACED]
    assert (store.messages, bool(schedules.marked)) == ({}, False)


def test_a_cancel_by_a_clock_that_is_ahead_does_not_hold_up_a_later_one_by_a_right_clock() -> None:
    schedules = Schedules(Store(), MarkedPositions())
    position = repeating(schedules)
    schedules.end("a", Position(7, 9), 8_500, CANCELLED)
    schedules.end("a", Position(7, 10), 6_500, CANCELLED)
    assert numbers(schedules, position, every_second(), 10_000) == [1, 2]


def test_a_replacement_before_the_next_occurrence_hits_that_one() -> None:
    schedules = Schedules(Store(), MarkedPositions())
    position = repeating(schedules)
    schedules.put("a", waiting(9, 4_000, 9_000))
    assert not schedules.repeats(position)
    assert release(schedules, position.entry_id) == [REPLACED]


def test_a_pause_holds_back_what_is_due_while_it_lasts() -> None:
    schedules = Schedules(Store(), MarkedPositions())
    position = repeating(schedules)
    schedules.pause("a", Position(7, 5), 6_000)
    schedules.pause("a", Position(7, 6), 6_500)
    schedules.resume("a", Position(7, 7), 8_000)
    schedules.pause(None, Position(7, 8), 9_500)
    schedules.resume(None, Position(7, 9), 10_000)
    assert numbers(schedules, position, every_second(), 12_000) == [1, 2, 5, 7, 8]


def test_a_pause_lasts_over_micro_batches_and_is_of_the_messages_before_it() -> None:
    store = Store()
    schedules = Schedules(store, MarkedPositions())
    position = repeating(schedules, entry_id=6)
    schedules.pause("a", Position(7, 5), 4_500)
    assert numbers(schedules, position, every_second(), 6_000) == [1, 2]
    schedules.pause("a", Position(7, 8), 6_500)
    later = Schedules(store, schedules.marked)
    assert numbers(later, position, every_second(), 8_000) == []
    all_paused = Schedules(store, schedules.marked, Pauses(8_100))
    all_paused.resume("a", Position(7, 9), 8_200)
    assert numbers(all_paused, position, every_second(), 9_000) == []
    all_paused.resume(None, Position(7, 10), 9_500)
    assert all_paused.pauses.since_ms is None
    assert numbers(all_paused, position, every_second(), 10_000) == [6]


def test_a_pause_that_has_ended_is_kept_while_an_occurrence_waits_that_was_due_in_it() -> None:
    store = Store()
    schedules = Schedules(store, MarkedPositions())
    position = repeating(schedules)
    schedules.pause("a", Position(7, 5), 5_500)
    schedules.resume("a", Position(7, 6), 7_000)
    schedules.pause("a", Position(7, 7), 8_500)
    assert schedules.advance("a", position, every_second(), 10_000) == Step(
        Occurrence(1, 5_000, 5_000), 6_000
    )
    (left,) = store.messages["a"]
    assert left.repeating is not None
    assert left.repeating.pauses == Pauses(8_500, [5_500, 7_000])
    later = Schedules(store, schedules.marked)
    later.resume("a", Position(7, 8), 9_500)
    assert numbers(later, position, every_second(), 10_000) == [4, 6]
    (left,) = store.messages["a"]
    assert left.repeating is not None
    assert left.repeating.pauses == Pauses()


@pytest.mark.parametrize("schedule_id", ["a", None])
def test_a_pause_beyond_the_limit_is_refused_and_one_that_has_begun_goes_on_and_ends(
    monkeypatch: pytest.MonkeyPatch, schedule_id: str | None
) -> None:
    monkeypatch.setattr("ledgerlake.schedules.schedules.MOST_PAUSES", 3)
    schedules = Schedules(Store(), MarkedPositions())
    position = repeating(schedules)
    for number in range(3):
        assert schedules.pause(schedule_id, Position(7, 5), 6_500 + 2_000 * number)
        assert schedules.pause(schedule_id, Position(7, 5), 6_600 + 2_000 * number)
        schedules.resume(schedule_id, Position(7, 5), 7_500 + 2_000 * number)
    assert not schedules.pause(schedule_id, Position(7, 5), 12_500)
    assert numbers(schedules, position, every_second(), 13_000) == [1, 2, 4, 6, 8, 9]
    schedules.pauses.forget_before(14_000)
    assert schedules.pause(schedule_id, Position(7, 6), 13_500)


def test_a_pause_in_which_nothing_can_be_due_is_not_kept() -> None:
    store = Store()
    schedules = Schedules(store, MarkedPositions())
    repeating(schedules)
    for entry_id in range(5, 2_000, 2):
        schedules.pause("a", Position(7, entry_id), 1_000 + entry_id)
        schedules.resume("a", Position(7, entry_id + 1), 1_001 + entry_id)
    (waits,) = store.messages["a"]
    assert waits.repeating is not None
    assert waits.repeating.pauses == Pauses()


def test_pauses_that_follow_each_other_are_one_and_a_clock_that_goes_back_makes_none() -> None:
    pauses = Pauses()
    for begin_ms, end_ms in ((10, 20), (20, 30), (40, 35), (25, 50)):
        pauses.begin(begin_ms)
        pauses.end(end_ms)
    assert pauses == Pauses(None, [10, 50])
    assert [due_ms for due_ms in (10, 11, 30, 50, 51) if pauses.holds_back(due_ms)] == [11, 30, 50]


@pytest.mark.parametrize(
    ("policy", "soon", "late"),
    [("all", [1, 2, 3], [1, 2, 3]), ("last", [3], [3]), ("none", [3], [])],
)
def test_what_was_missed_for_more_than_a_minute_is_delivered_by_the_policy(
    policy: str, soon: list[int], late: list[int]
) -> None:
    rule = every_second(every="PT1M", catchup=policy, count="3")
    for cutoff_ms, delivered in ((180_001, soon), (240_001, late)):
        schedules = Schedules(Store(), MarkedPositions())
        position = repeating(schedules, start_ms=60_000)
        assert numbers(schedules, position, rule, cutoff_ms) == delivered


@pytest.mark.parametrize(
    ("policy", "slow", "stopped"),
    [
        ("all", [*range(1, 7)], [*range(1, 13)]),
        ("last", [*range(1, 7)], [12]),
        ("none", [*range(1, 7)], [12]),
    ],
)
def test_after_a_stop_one_occurrence_comes_of_a_rule_that_fires_more_than_once_a_minute(
    policy: str, slow: list[int], stopped: list[int]
) -> None:
    """A micro-batch that is only slow delivers all."""
    rule = every_second(every="PT10S", catchup=policy)
    for cutoff_ms, delivered in ((110_000, slow), (170_001, stopped)):
        schedules = Schedules(Store(), MarkedPositions())
        position = repeating(schedules, start_ms=60_000)
        assert numbers(schedules, position, rule, cutoff_ms) == delivered


def test_missed_and_paused_occurrences_are_passed_together_up_to_the_one_that_is_delivered() -> (
    None
):
    paused = Pauses()
    paused.begin(6_000)
    paused.end(9_000)
    schedules = Schedules(store := Store(), MarkedPositions(), paused)
    position = repeating(schedules)
    assert schedules.advance("a", position, every_second(), 10_000, 9) == Step(
        Occurrence(1, 5_000, 5_000), 6_000
    )
    assert schedules.advance("a", position, every_second(), 10_000, 9) == Step(
        Occurrence(2, 6_000, 6_000), 7_000
    )
    assert schedules.advance("a", position, every_second(), 10_000, 9) == Step(
        None, 10_000, passed=2
    )
    (waits,) = store.messages["a"]
    assert (waits.deliver_ms, waits.repeating and waits.repeating.occurrence) == (
        10_000,
        Occurrence(6, 10_000, 10_000),
    )


@pytest.mark.parametrize(
    ("policy", "cutoff_ms", "most_passed", "expected"),
    [
        ("last", 100_000, 1_000, Step(None, 100_000, passed=94)),
        ("last", 100_000, 10, Step(None, 16_000, passed=10)),
        ("last", 100_000, 0, Step(None, 6_000)),
        ("last", 100_000, 33, Step(None, 39_000, passed=33)),
        ("last", 100_000, 34, Step(None, 100_000, passed=94)),
        ("none", 100_000, 1_000, Step(None, 100_000, passed=94)),
        ("all", 100_000, 1_000, Step(Occurrence(1, 5_000, 5_000), 6_000)),
    ],
)
def test_an_occurrence_that_is_delivered_is_not_passed(
    policy: str, cutoff_ms: int, most_passed: int, expected: Step
) -> None:
    schedules = Schedules(Store(), MarkedPositions())
    position = repeating(schedules)
    rule = every_second(catchup=policy)
    assert schedules.advance("a", position, rule, cutoff_ms, most_passed) == expected


def test_a_message_that_ends_is_passed_no_further() -> None:
    schedules = Schedules(store := Store(), MarkedPositions())
    position = repeating(schedules)
    schedules.end("a", Position(7, 9), 8_500, REPLACED)
    assert schedules.advance("a", position, every_second(catchup="none"), 10**6, 100) == Step(
        None, 9_000, passed=3
    )
    assert release(schedules, position.entry_id) == [REPLACED]
    assert (store.messages, bool(schedules.marked)) == ({}, False)


def test_jitter_does_not_change_the_order_of_occurrences_and_does_not_add_up() -> None:
    schedules = Schedules(Store(), MarkedPositions())
    position = repeating(schedules)
    rule = every_second(jitter="PT1S", count="50")
    due_ms = []
    while schedules.repeats(position):
        step = schedules.advance("a", position, rule, 10**9)
        if step.delivered is not None:
            due_ms.append(step.delivered.due_ms)
            assert 0 <= step.delivered.due_ms - step.delivered.nominal_ms <= 1_001
    assert due_ms == sorted(due_ms)
    assert len(due_ms) == 50


def test_a_message_whose_rule_can_no_longer_be_used_is_forgotten() -> None:
    schedules = Schedules(store := Store(), MarkedPositions())
    position = repeating(schedules)
    assert schedules.marked.has(position, REPEATING)
    schedules.end_repetition("a", position)
    assert (store.messages, bool(schedules.marked)) == ({}, False)


@pytest.mark.parametrize(
    "marks", ['{"lost": {}}', '{"replaced": {"7": "!"}}', '{"replaced": {"x": ""}}', "[]"]
)
def test_damaged_marks_are_refused_in_a_sentence(marks: str) -> None:
    with pytest.raises(OffsetError, match="damaged cancels"):
        cancels_from_json(
            f'{{"version": 1, "cancels": [], "marked": {marks}, "pauses": {{"since_ms": null, '
            f'"ended_ms": []}}}}'
        )


@pytest.mark.parametrize(("text", "found"), [("schedule=a=b", "a=b"), ("schedule=", None), ("schedule=" + "a" * 201, None)])  # fmt: skip
def test_a_cancel_names_the_id_of_a_schedule(text: str, found: str | None) -> None:
    cancel = parse_cancel(text, Position(1, 1), 5)
    assert (cancel and (cancel.by, cancel.target)) == (found and ("schedule", found))


def test_a_message_of_which_the_rest_is_read_again_does_not_replace_itself(store: Store) -> None:
    schedules = Schedules(store, MarkedPositions())
    for _ in range(2):
        schedules.put("a", waiting(1, 100, 500))
    assert store.messages["a"] == [waiting(1, 100, 500)]
    assert release(schedules, 1) == [None]
