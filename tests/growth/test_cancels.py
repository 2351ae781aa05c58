"""Cancels, schedules and their marks, if there are many."""

from __future__ import annotations

import random
from itertools import islice, product
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from cronsim import CronSim

from ledgerlake.assembly.rules import Limits
from ledgerlake.decode import schema
from ledgerlake.operators.cancelled import cancelled_rows
from ledgerlake.operators.schedule_state import ScheduleState, StoredSchedules
from ledgerlake.operators.stage_rows import RowKind, TaskReport, report_to_json, stage_row
from ledgerlake.operators.state_variables import StateVariables
from ledgerlake.schedules.cancels import Cancel, Cancels
from ledgerlake.schedules.nominal_times import cron_rule
from ledgerlake.schedules.repetition import (
    RepetitionLimit,
    RepetitionRate,
    occurrences,
    parse_repetition,
)
from ledgerlake.schedules.schedules import (
    SCHEDULED,
    MarkedPositions,
    Repeating,
    ScheduledMessage,
    Schedules,
)
from ledgerlake.wire import commands
from ledgerlake.wire.message_id import Position
from tests.entries import decoded, single
from tests.growth.counting import Case, check, counted_calls
from tests.operators.stage import SOURCE, DictState, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TIME_MS = 1_700_000_000_000


def _messages(n: int) -> pa.RecordBatch:
    """Due messages with one key, of ledger 7."""
    rows, _ = decoded([single(b"v", partition_key="k", deliver_at_time=TIME_MS) for _ in range(n)])
    return pa.RecordBatch.from_pylist(rows, schema.MESSAGES)


def _cancels_of_a_key(n: int) -> Callable[[], None]:
    """Prepare cancels of one key, and as many messages with that key that no cancel hits."""
    # As a sender's clock that runs backwards writes them: each hits messages that the others do
    # not.
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


def _cancels_of_keys(n: int) -> Callable[[], None]:
    """Prepare cancels of keys that no message has, and messages that are due in many rows."""
    cancels = [Cancel("key", f"other-{number:06}", Position(8, number), 0) for number in range(n)]
    messages = _messages(2)

    def work() -> None:
        in_force = Cancels(cancels)
        assert not any(cancelled_rows(messages, in_force).any() for _ in range(n))

    return work


def _stored_cancels(n: int, *, is_due: bool = True) -> Callable[[], Mapping[str, int]]:
    """Prepare cancels that wait for a message, and micro-batches without another cancel."""
    stage = Stage(Limits())
    frames = b"".join(
        commands.message(1, 7, number, single(b"v", deliver_at_time=TIME_MS + 1000 * (number + 1)))
        for number in range(10)
    )
    cancels = [Cancel("key", f"other-{number:06}", Position(8, number), 0) for number in range(n)]

    def micro_batch(
        now_ms: int, rows: Sequence[pa.RecordBatch] = (), events: Sequence[Cancel] = ()
    ) -> None:
        report = TaskReport(Position(9, 9), now_ms, {}, list(events))
        stage.run([*rows, stage_row(SOURCE, RowKind.REPORT, header=report_to_json(report))])

    micro_batch(TIME_MS, [stage_row(SOURCE, RowKind.DELAYED, entry=frames)], cancels)
    stored = stage.getValueState("cancels", "")

    def work() -> Mapping[str, int]:
        writes = stored.writes
        for number in range(5):
            micro_batch(TIME_MS + (1000 * (number + 1) if is_due else number))
        return {"writes": stored.writes - writes}

    return work


def _marks_in_many_ledgers(n: int) -> Callable[[], None]:
    """Prepare messages that wait in many ledgers; the messages in a few ledgers are due."""
    marked = MarkedPositions()
    for ledger_id in range(n):
        marked.mark(Position(ledger_id, 5), SCHEDULED)
    ledger_ids, entry_ids = np.arange(10), np.full(10, 5)

    def work() -> None:
        assert marked.are_marked(ledger_ids, entry_ids).all()
        marked.discard(SCHEDULED, ledger_ids, entry_ids)
        assert not marked.are_marked(ledger_ids, entry_ids).any()

    return work


# The times of events in the order of their positions. Without the broker's timestamps, senders
# choose them.
ORDERS: dict[str, Callable[[int], Sequence[int]]] = {
    "rising": range,
    "falling": lambda n: range(n, 0, -1),
    "equal": lambda n: [n] * n,
    "random": lambda n: random.Random(n).choices(range(n), k=n),
}

# When a message is due that was stored at a time.
DUE: dict[str, Callable[[int], int]] = {
    "before": lambda _time_ms: 0,
    "at once": lambda time_ms: time_ms,
    "soon": lambda time_ms: time_ms + 1,
    "late": lambda _time_ms: 10**12,
    "sooner if stored later": lambda time_ms: 10**12 - time_ms,
}


class Handle:
    """State variables in dicts."""

    def getMapState(self, *_: str) -> DictState:
        return DictState()


def _schedules(limit: RepetitionLimit | None = None) -> tuple[StoredSchedules, Schedules]:
    store = StoredSchedules(ScheduleState(StateVariables(Handle())), marked := MarkedPositions())
    store.begin(1)
    return store, Schedules(store, marked, limit=limit)


def _waiting(
    number: int, time_ms: int, deliver_ms: int, *, repeats: bool = False
) -> ScheduledMessage:
    return ScheduledMessage(
        Position(7, number), time_ms, deliver_ms, Repeating(deliver_ms) if repeats else None
    )


def _messages_of_an_id(order: str, due: str) -> Callable[[int], Callable[[], None]]:
    """Prepare messages with one id."""

    def prepare(n: int) -> Callable[[], None]:
        messages = [
            _waiting(number, time_ms, DUE[due](time_ms))
            for number, time_ms in enumerate(ORDERS[order](n))
        ]

        def work() -> None:
            store, schedules = _schedules()
            for message in messages:
                assert schedules.put("a", message)
            store.save()

        return work

    return prepare


def _events_of_an_id(
    order: str, act: Callable[[Schedules, Position, int], object]
) -> Callable[[int], Callable[[], None]]:
    """Prepare as many messages that wait under an id as events of it. None of these messages hits
    another.
    """

    def prepare(n: int) -> Callable[[], None]:
        store, schedules = _schedules(RepetitionLimit(occurrences_per_s=1))
        for number in range(n):
            assert schedules.put("a", _waiting(n + number, number, number + 1, repeats=True))
        events = list(enumerate(ORDERS[order](n)))

        def work() -> None:
            for number, time_ms in events:
                act(schedules, Position(9, number), time_ms)
            store.save()

        return work

    return prepare


def _put_late(schedules: Schedules, position: Position, time_ms: int) -> None:
    """Put a message that its marker completes, and that stands before those that wait."""
    schedules.put("a", _waiting(position.entry_id, time_ms, time_ms + 1))


def _refuse(schedules: Schedules, position: Position, time_ms: int) -> None:
    too_often = Repeating(10**9, rate=RepetitionRate(10**9))
    assert not schedules.put("a", ScheduledMessage(position, time_ms, 10**9, too_often))


def _pause(schedules: Schedules, position: Position, time_ms: int) -> None:
    assert schedules.pause("a", position, time_ms)
    schedules.resume("a", position, time_ms + 1)


EVENTS = {
    "others that stand before them": _put_late,
    "others that are refused": _refuse,
    "pauses": _pause,
}


def _occurrences_of_an_id(n: int) -> Callable[[], None]:
    """Prepare messages that repeat and are due together. Each one ended the one before."""
    rule = parse_repetition({"ledgerlake.every": "PT1S"})
    assert rule is not None
    store, schedules = _schedules()
    for number in range(n):
        assert schedules.put("a", _waiting(number, 5_000, 5_000, repeats=True))
    store.save()

    def work() -> None:
        for number in range(n - 1):
            while schedules.repeats(Position(7, number)):
                schedules.advance("a", Position(7, number), rule, 6_000)

    return work


def _leap_mondays(n: int) -> Callable[[], Mapping[str, int]]:
    """Prepare a rule whose occurrences are decades apart."""
    rule = parse_repetition({"ledgerlake.cron": "0 0 * 2 MON#5"})
    assert rule is not None
    cron_rule.cache_clear()

    def work() -> Mapping[str, int]:
        with counted_calls(CronSim, "match_day") as days:
            assert len(list(islice(occurrences(rule, "a", TIME_MS), n))) == n
        return {"days that are looked at": len(days)}

    return work


CASES = [
    Case("cancelled_rows, cancels of a key and messages with it", _cancels_of_a_key),
    Case("cancelled_rows, cancels by id and rows of messages", _cancels_by_id),
    Case("cancelled_rows, cancels of keys and rows of messages", _cancels_of_keys),
    Case(
        "DelayedMessages.release, cancels that hit none of what is due",
        _stored_cancels,
        constant=("writes",),
    ),
    Case(
        "DelayedMessages.release, cancels, and nothing is due",
        lambda n: _stored_cancels(n, is_due=False),
        constant=("calls",),
    ),
    Case("MarkedPositions, ledgers with marks", _marks_in_many_ledgers, constant=("calls",)),
    *(
        Case(
            f"Schedules.put, messages of an id, {order} times, due {due}",
            _messages_of_an_id(order, due),
        )
        for order, due in product(ORDERS, DUE)
    ),
    *(
        Case(
            f"Schedules, messages of an id and {name}, {order} times", _events_of_an_id(order, act)
        )
        for order, (name, act) in product(ORDERS, EVENTS.items())
    ),
    Case("Schedules.advance, messages of an id", _occurrences_of_an_id),
    Case(
        "occurrences, decades between them",
        _leap_mondays,
        n=20,
        constant=("days that are looked at",),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_work_of_cancels_and_schedules_grows_with_their_number_at_most(case: Case) -> None:
    check(case)
