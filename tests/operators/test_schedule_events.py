"""Events of schedules on their way from the tasks to the stateful stage."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.decode.split import split_bundle
from ledgerlake.operators.ingest import write_ranges
from ledgerlake.operators.results import BatchSettings, task_result_from_dict
from ledgerlake.operators.schedule_events import (
    PauseChanged,
    Scheduled,
    ScheduleEvent,
    ScheduleEvents,
)
from ledgerlake.operators.stage_rows import RowKind
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.schedules.cancels import Cancel
from ledgerlake.schedules.repetition import RepetitionRate
from ledgerlake.source.pieces import Piece
from ledgerlake.wire import commands
from ledgerlake.wire.limits import MAX_TASK_SCHEDULE_BYTES
from ledgerlake.wire.message_id import Position
from tests.entries import BROKER_TIME_MS, single
from tests.operators.stage import SOURCE
from tests.operators.test_writing import report_of, span, task_settings

if TYPE_CHECKING:
    from pathlib import Path


def at(entry_id: int) -> Position:
    return Position(7, entry_id)


EVENTS: list[ScheduleEvent] = [
    Scheduled("a", Position(3, 2**32 - 1), 5),
    Scheduled("ü\0\U0001f600" * 66, at(1), 5, 2**40),
    Scheduled("b", at(2), 6, 9, RepetitionRate(86_400, 2**40)),
    Cancel("schedule", "a", at(3), 7),
    PauseChanged(None, at(4), 8, resumes=False),
    PauseChanged("a", at(5), 9, resumes=True),
]


def test_events_pass_in_rows_of_many_and_are_applied_in_the_order_of_their_messages() -> None:
    rng = random.Random(1)
    tasks = [ScheduleEvents(), ScheduleEvents()]
    for event in rng.sample(EVENTS, len(EVENTS)):
        assert rng.choice(tasks).add(event)
    rows = [row for task in tasks for row in task.rows(SOURCE, all_events=True)]
    assert [row["kind"][0].as_py() for row in rows] == [RowKind.SCHEDULES] * 2
    stage = ScheduleEvents()
    for row in rng.sample(rows, len(rows)):
        stage.add_row(row["entry"][0].as_py())
    # Events of all ids come first, since they are in no block.
    of_all = [
        event for event in EVENTS if isinstance(event, PauseChanged) and event.schedule_id is None
    ]
    assert list(stage.in_order(lambda _: 0)) == [
        *of_all,
        *(event for event in EVENTS if event not in of_all),
    ]


def test_a_task_passes_on_full_rows_while_it_reads_and_the_rest_at_its_end() -> None:
    task = ScheduleEvents()
    for number in range(25_000):
        assert task.add(Scheduled(f"visit-{number}", at(number), 5, 9))
    assert len(list(task.rows(SOURCE))) == 2
    assert len(list(task.rows(SOURCE))) == 0
    assert len(list(task.rows(SOURCE, all_events=True))) == 1
    assert task.is_any


def test_a_task_has_room_for_a_backlog_of_millions() -> None:
    task, accepted = ScheduleEvents(MAX_TASK_SCHEDULE_BYTES // 1000), 0
    while task.add(Scheduled(f"visit-{accepted:07}", at(accepted), 5, 9)):
        accepted += 1
    assert 1000 * accepted > 3_000_000


def test_messages_of_a_batch_that_say_the_same_pass_once_and_pauses_in_the_order_of_the_batch() -> (
    None
):
    task = ScheduleEvents(max_bytes=1000)
    for number in range(0, 3000, 3):
        assert task.add(Scheduled("a" * 100, at(1), 5), number)
        assert task.add(Cancel("schedule", "b" * 100, at(1), 5), number + 1)
    pauses = [PauseChanged("a", at(2), 6, resumes) for resumes in (False, True, False)]
    for number, pause in enumerate(pauses):
        assert task.add(pause, number)
    first = [Scheduled("a" * 100, at(1), 5), Cancel("schedule", "b" * 100, at(1), 5)]
    assert list(task.in_order(lambda _: 0)) == [*first, *pauses]


def test_a_pause_of_all_is_seen_without_the_events_in_order() -> None:
    stage = ScheduleEvents()
    stage.add(PauseChanged("a", at(1), 5, resumes=False))
    assert not stage.pauses_all
    stage.add(PauseChanged(None, at(2), 5, resumes=True))
    assert stage.pauses_all


@pytest.mark.parametrize("limit", [150, 300, 350, 10_000])
def test_which_events_a_task_refuses_does_not_depend_on_the_cut_of_bundles(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScheduleEvents.__init__, "__defaults__", (limit,))
    entries = []
    for number in range(12):
        named: dict[str, Any] = {
            "properties": [pb.KeyValue(key="ledgerlake.schedule", value=f"{number}")]
        }
        if number % 2:
            named["deliver_at_time"] = BROKER_TIME_MS + 10**8
        entries.append(single(b"%d" % number, number, **named))
    frames = [commands.message(1, 7, number, entry) for number, entry in enumerate(entries)]
    outcomes = []
    for cut in (1, 2, 5, 12):
        bundles = [b"".join(frames[first : first + cut]) for first in range(0, 12, cut)]
        pieces = (
            Piece(kind, view, broker_ms=ms)
            for part in bundles
            for kind, view, ms in split_bundle(part)
        )
        (tmp_path / str(cut)).mkdir()
        settings = task_settings(tmp_path / str(cut))
        rows = list(write_ranges([(span(entries, None), pieces)], settings, BatchSettings(0)))
        result = task_result_from_dict(report_of(rows).result)
        outcomes.append((result.digest.to_json(), result.reasons))
    assert outcomes == [outcomes[0]] * 4
    assert bool(outcomes[0][1].get("schedule_refused")) == (limit < 10_000)
