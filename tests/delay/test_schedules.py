"""What a message with an id, or a cancel of the id, does to the messages that wait; and what is
stored.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from ledgerlake.delay.cancels import cancels_from_json, cancels_to_json, parse_cancel
from ledgerlake.delay.schedules import (
    CANCELLED,
    REPLACED,
    SCHEDULED,
    MarkedPositions,
    Schedules,
    WaitingMessage,
    waiting_from_json,
)
from ledgerlake.errors import OffsetError
from ledgerlake.wire.message_id import Position


class Store:
    """Messages by id, in a dict."""

    def __init__(self) -> None:
        self.messages: dict[str, list[WaitingMessage]] = {}

    def load(self, schedule_id: str) -> list[WaitingMessage]:
        return self.messages.get(schedule_id, [])

    def store(self, schedule_id: str, messages: list[WaitingMessage]) -> None:
        self.messages[schedule_id] = messages
        if not messages:
            del self.messages[schedule_id]


def waiting(entry_id: int, time_ms: int, deliver_ms: int) -> WaitingMessage:
    return WaitingMessage(Position(7, entry_id), time_ms, deliver_ms)


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


def test_the_last_message_of_an_id_waits_and_the_others_are_replaced(store: Store, schedules: Schedules) -> None:
    schedules.put("a", waiting(1, 0, 100))
    schedules.put("b", waiting(2, 0, 100))
    schedules.put("a", waiting(3, 10, 50))
    schedules.put("a", waiting(4, 20, 500))
    assert store.messages == {"a": [waiting(4, 20, 500)], "b": [waiting(2, 0, 100)]}
    assert release(schedules, 3, 1, 2, 4) == [REPLACED, REPLACED, None, None]
    assert not schedules.marked


def test_a_message_that_has_left_is_neither_hit_nor_hits_another_though_the_store_has_it(
    store: Store, schedules: Schedules
) -> None:
    schedules.put("a", waiting(5, 50, 200))
    assert release(schedules, 5) == [None]
    assert store.messages == {"a": [waiting(5, 50, 200)]}
    schedules.end("a", Position(7, 6), 100, CANCELLED)
    assert not schedules.marked
    schedules.put("a", waiting(3, 30, 300))
    assert release(schedules, 3) == [None]


def test_a_message_that_was_due_when_the_next_one_was_stored_is_delivered(schedules: Schedules) -> None:
    schedules.put("a", waiting(1, 0, 100))
    schedules.put("a", waiting(2, 100, 200))
    schedules.end("a", Position(7, 3), 199, CANCELLED)
    assert release(schedules, 1) == [None]
    assert release(schedules, 2) == [CANCELLED]


def test_a_message_that_comes_after_one_that_stands_behind_it_is_replaced_by_it(schedules: Schedules) -> None:
    schedules.put("a", waiting(5, 50, 200))
    schedules.put("a", waiting(3, 30, 300))
    assert release(schedules, 5, 3) == [None, REPLACED]


def test_marks_are_found_among_positions_of_many_ledgers() -> None:
    marked = MarkedPositions()
    marked.mark(Position(1, 5), SCHEDULED)
    marked.mark(Position(2, 2**32 - 1), REPLACED)
    ledger_ids, entry_ids = np.array([1, 2, 2, 5]), np.array([5, 5, 2**32 - 1, 1])
    assert marked.are_marked(ledger_ids, entry_ids).tolist() == [True, False, True, False]
    assert marked.are_marked(ledger_ids, entry_ids, [REPLACED]).tolist() == [False, False, True, False]


def test_the_marks_of_neighbours_are_small_in_state() -> None:
    marked = MarkedPositions()
    for entry_id in range(50_000):
        marked.mark(Position(7, entry_id), SCHEDULED)
    assert len(cancels_to_json([], marked)) < 200


def test_what_earlier_builds_stored_under_an_id_is_readable() -> None:
    golden = '{"version": 1, "messages": [{"position": {"ledger_id": 7, "entry_id": 4}, "time_ms": 20, "deliver_ms": 500}]}'  # fmt: skip
    assert waiting_from_json(golden) == [waiting(4, 20, 500)]
    with pytest.raises(OffsetError, match="newer Ledgerlake"):
        waiting_from_json('{"version": 2}')


def test_marks_in_state_are_readable_by_later_releases() -> None:
    golden = '{"version": 3, "cancels": [], "marked": {"replaced": {"7": "OjAAAAEAAAAAAAEAEAAAAAQACQA="}}}'
    cancels, marked = cancels_from_json(golden)
    assert len(cancels) == 0
    assert marked.take(Position(7, 9)) == REPLACED
    assert marked.take(Position(7, 9)) is None
    assert marked.take(Position(7, 4)) == REPLACED
    assert not marked
    marked.mark(Position(7, 4), REPLACED)
    marked.mark(Position(7, 9), REPLACED)
    assert json.loads(cancels_to_json([], marked)) == json.loads(golden)


@pytest.mark.parametrize("marks", ['{"lost": {}}', '{"replaced": {"7": "!"}}', '{"replaced": {"x": ""}}', "[]"])
def test_damaged_marks_are_refused_in_a_sentence(marks: str) -> None:
    with pytest.raises(OffsetError, match="damaged cancels"):
        cancels_from_json(f'{{"version": 3, "cancels": [], "marked": {marks}}}')


@pytest.mark.parametrize(("text", "found"), [("schedule=a=b", "a=b"), ("schedule=", None), ("schedule=" + "a" * 201, None)])  # fmt: skip
def test_a_cancel_names_the_id_of_a_schedule(text: str, found: str | None) -> None:
    cancel = parse_cancel(text, Position(1, 1), 5)
    assert (cancel and (cancel.by, cancel.target)) == (found and ("schedule", found))
