"""Cancels, schedules and their marks, if there are many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from ledgerlake.decode import schema
from ledgerlake.delay.cancels import Cancel, Cancels
from ledgerlake.delay.schedules import SCHEDULED, MarkedPositions, Schedules, WaitingMessage
from ledgerlake.operators.cancelled import cancelled_rows
from ledgerlake.operators.schedule_state import ScheduleState, StoredSchedules
from ledgerlake.operators.state_variables import StateVariables
from ledgerlake.wire.message_id import Position
from tests.entries import decoded, single
from tests.growth.counting import Case, check
from tests.operators.stage import DictState

if TYPE_CHECKING:
    from collections.abc import Callable

TIME_MS = 1_700_000_000_000


def _messages(n: int) -> pa.RecordBatch:
    """Due messages with one key, of ledger 7."""
    rows, _ = decoded([single(b"v", partition_key="k", deliver_at_time=TIME_MS) for _ in range(n)])
    return pa.RecordBatch.from_pylist(rows, schema.MESSAGES)


def _cancels_of_a_key(n: int) -> Callable[[], None]:
    """Prepare cancels of one key, none of which hits one of as many messages with that key."""
    # As a sender's clock that runs backwards writes them: each hits messages that the others do not.
    cancels = [Cancel("key", "k", Position(8, number), TIME_MS + n - number) for number in range(n)]
    messages = _messages(n)

    def work() -> None:
        assert not cancelled_rows(messages, Cancels(cancels)).any()

    return work


def _cancels_by_id(n: int) -> Callable[[], None]:
    """Prepare cancels of other messages, and messages that are due in many rows."""
    cancels = [Cancel("id", f"6:{number}", Position(8, number), 0) for number in range(n)]
    parts = [_messages(2)] * n

    def work() -> None:
        in_force = Cancels(cancels)
        assert not any(cancelled_rows(messages, in_force).any() for messages in parts)

    return work


def _marks_in_many_ledgers(n: int) -> Callable[[], None]:
    """Prepare messages that wait in many ledgers; those of a few are due."""
    marked = MarkedPositions()
    for ledger_id in range(n):
        marked.mark(Position(ledger_id, 5), SCHEDULED)
    ledger_ids, entry_ids = np.arange(10), np.full(10, 5)

    def work() -> None:
        assert marked.are_marked(ledger_ids, entry_ids).all()
        marked.discard(SCHEDULED, ledger_ids, entry_ids)
        assert not marked.are_marked(ledger_ids, entry_ids).any()

    return work


def _replacements_of_an_id(n: int) -> Callable[[], None]:
    """Prepare messages with one id, each of which replaces the one before."""
    messages = [WaitingMessage(Position(7, number), number, 10**12) for number in range(n)]

    class Handle:
        def getMapState(self, *_: str) -> DictState:
            return DictState()

    def work() -> None:
        store = StoredSchedules(ScheduleState(StateVariables(Handle())), marked := MarkedPositions())
        store.begin(1)
        schedules = Schedules(store, marked)
        for message in messages:
            assert schedules.put("a", message)
        store.save()

    return work


CASES = [
    Case("cancelled_rows, cancels of a key and messages with it", _cancels_of_a_key),
    Case("cancelled_rows, cancels by id and rows of messages", _cancels_by_id),
    Case("MarkedPositions, ledgers with marks", _marks_in_many_ledgers, constant=("calls",)),
    Case("Schedules.put, messages of an id", _replacements_of_an_id),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_work_of_cancels_and_schedules_grows_with_their_number_at_most(case: Case) -> None:
    check(case)
