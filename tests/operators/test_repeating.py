"""Occurrences among the other messages that are due: their order, and what a micro-batch delivers
at most.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from ledgerlake.delay.segment import Key, index_rows, key_at
from ledgerlake.operators import repeating
from ledgerlake.operators.repeating import Repeated, RepeatingMessages
from ledgerlake.reasons import Reason
from ledgerlake.schedules.repetition import TIMEZONE_DATA_VERSION
from ledgerlake.schedules.schedules import MarkedPositions, Repeating, ScheduledMessage, Schedules
from ledgerlake.wire.message_id import Position
from tests.operators.test_scheduled import frame
from tests.schedules.test_schedules import Store, every_second

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ledgerlake.assembly.assembler import Rejected


class Index:
    """Schedules of two messages that repeat, and the rows that are added to the index.
    ``next_due_ms`` is that of the rows that are left.
    """

    def __init__(self, **rules: str) -> None:
        self.schedules = Schedules(Store(), MarkedPositions())
        self.frames: dict[Position, bytes] = {}
        self.again: list[Key] = []
        self.next_due_ms: int | None = None
        for entry_id, (schedule_id, every) in enumerate(rules.items(), 100):
            position = Position(7, entry_id)
            self.schedules.put(
                schedule_id, ScheduledMessage(position, 1_000, 1_000, Repeating(1_000))
            )
            self.frames[position] = frame(entry_id, 1_000, schedule=schedule_id, every=every)

    def rows(self, *keys: tuple[int, int]) -> pa.RecordBatch:
        """Rows of the index: due time and entry."""
        frames = [self.frames.get(Position(7, entry_id), b"plain") for _, entry_id in keys]
        return index_rows([(due_ms, 7, entry_id) for due_ms, entry_id in keys], frames)

    def add_again(self, batch: pa.RecordBatch) -> None:
        self.again += [key_at(batch, row) for row in range(batch.num_rows)]

    def released(self, cutoff_ms: int, *batches: pa.RecordBatch) -> list[tuple[int, str]]:
        """What leaves, in order: entry, and the number of the occurrence, or the reason of a
        reject.
        """
        messages = RepeatingMessages(self.schedules, cutoff_ms, self)
        return [entry for part in messages.in_order(batches) for entry in shown(part)]


def shown(part: pa.RecordBatch | Repeated | Rejected) -> Iterable[tuple[int, str]]:
    if isinstance(part, pa.RecordBatch):
        return [(key_at(part, row)[2], "") for row in range(part.num_rows)]
    if isinstance(part, Repeated):
        return [(part.position.entry_id, part.delivery.properties["ledgerlake.occurrence"])]
    return [(position.entry_id, part.reason) for position, _ in part.entries]


def test_occurrences_leave_among_the_other_messages_in_the_order_of_their_times() -> None:
    index = Index(a="PT1S", b="PT2S")
    first = index.rows((900, 1), (1_000, 100), (1_000, 101), (1_500, 2))
    second = index.rows((2_000, 99), (2_000, 102), (2_500, 3), (9_000, 4))
    assert index.released(4_000, first, second) == [
        (1, ""),
        (100, "1"),
        (101, "1"),
        (2, ""),
        (99, ""),
        (100, "2"),
        (102, ""),
        (3, ""),
        (100, "3"),
        (101, "2"),
        (100, "4"),
        (4, ""),
    ]
    assert sorted(index.again) == [(5_000, 7, 100), (5_000, 7, 101)]


def test_a_micro_batch_delivers_a_limited_number_of_overdue_occurrences_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeating, "MOST_OVERDUE", 4)
    index = Index(a="PT1S", b="PT1S")
    rows = [(1_000, 100), (1_000, 101)]
    delivered: list[tuple[int, str]] = []
    for _ in count():
        released = index.released(10_000, index.rows(*rows))
        assert len(released) <= 4 + len(rows)
        delivered += released
        rows, index.again = sorted((due_ms, entry_id) for due_ms, _, entry_id in index.again), []
        if rows[0][0] > 10_000:
            break
    for entry_id in (100, 101):
        assert [number for entry, number in delivered if entry == entry_id] == [
            str(number) for number in range(1, 11)
        ]


@pytest.mark.parametrize(("most_passed", "next_ms"), [(100, 11_000), (3, 6_000)])
def test_occurrences_that_are_not_delivered_take_one_turn_together(
    monkeypatch: pytest.MonkeyPatch, most_passed: int, next_ms: int
) -> None:
    monkeypatch.setattr(repeating, "MOST_OVERDUE", 4)
    monkeypatch.setattr(repeating, "MOST_PASSED", most_passed)
    index = Index(a="PT1S", b="PT1S")
    index.schedules.pause("a", Position(7, 500), 1_000)
    rows = index.rows((1_000, 100), (1_000, 101))
    assert index.released(10_000, rows) == [(100, "1"), (101, "1"), (101, "2")]
    assert sorted(index.again) == [(3_000, 7, 101), (next_ms, 7, 100)]


def test_occurrences_behind_the_last_row_wait_with_the_rows_that_are_left() -> None:
    index = Index(a="PT1S", b="PT2S")
    index.next_due_ms = 2_100
    assert index.released(9_000, index.rows((1_000, 100), (1_000, 101), (2_000, 99))) == [
        (100, "1"),
        (101, "1"),
        (99, ""),
    ]
    assert sorted(index.again) == [(2_000, 7, 100), (3_000, 7, 101)]


def test_a_micro_batch_keeps_a_limited_number_of_bytes_of_overdue_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeating, "OVERDUE_BYTES", 1)
    index = Index(a="PT1S", b="PT1S")
    assert index.released(3_000, index.rows((1_000, 100), (1_000, 101))) == [(100, "1")]
    assert sorted(index.again) == [(1_000, 7, 101), (2_000, 7, 100)]
    rows, index.again = index.rows((1_000, 101), (2_000, 100)), []
    assert index.released(3_000, rows) == [(101, "1"), (100, "2"), (101, "2")]
    assert sorted(index.again) == [(3_000, 7, 100), (3_000, 7, 101)]


@pytest.mark.parametrize(
    ("name", "most"), [("MOST_OVERDUE", 1), ("MOST_OVERDUE", 3), ("OVERDUE_BYTES", 1)]
)
def test_what_there_is_no_room_for_lets_nothing_pass_that_is_due_later(
    monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(repeating, name, most)
    index = Index(a="PT1S", b="PT1S", c="PT2S")
    keys = [
        (1_000, 100),
        (1_000, 101),
        (1_000, 102),
        (1_500, 1),
        (2_000, 2),
        (3_500, 3),
        (5_000, 4),
        (5_500, 5),
    ]
    delivered: list[tuple[int, int]] = []
    times = {entry_id: due_ms for due_ms, entry_id in keys if entry_id < 100}
    while keys and keys[0][0] <= 6_000:
        due = [key for key in keys if key[0] <= 6_000]
        index.again = []
        released = index.released(
            6_000, index.rows(*due[:4]), *([index.rows(*due[4:])] if due[4:] else [])
        )
        delivered += [
            (
                1_000 + (int(number) - 1) * (2_000 if entry_id == 102 else 1_000)
                if number
                else times[entry_id],
                entry_id,
            )
            for entry_id, number in released
        ]
        later = [key for key in keys if key[0] > 6_000]
        keys = sorted([*later, *((due_ms, entry_id) for due_ms, _, entry_id in index.again)])
    assert delivered == sorted(delivered)
    assert len(delivered) == len(set(delivered)) == 5 + 6 + 6 + 3


def test_large_messages_go_back_into_the_index_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index()
    groups: list[int] = []
    for entry_id in range(100, 110):
        schedule_id = f"s{entry_id}"
        waits = ScheduledMessage(Position(7, entry_id), 1_000, 1_000, Repeating(1_000))
        index.schedules.put(schedule_id, waits)
        index.frames[waits.position] = frame(
            entry_id, 1_000, schedule=schedule_id, every="PT1S", more="x" * 2**20
        )
    monkeypatch.setattr(index, "add_again", lambda batch: groups.append(batch.num_rows))
    messages = RepeatingMessages(index.schedules, 1_000, index)
    parts = [*messages.in_order([index.rows(*[(1_000, entry_id) for entry_id in range(100, 110)])])]
    assert (len(parts), groups) == (10, [1] * 10)


def test_a_message_that_was_cancelled_among_overdue_occurrences_leaves_as_a_reject() -> None:
    index = Index(a="PT1S")
    index.schedules.advance("a", Position(7, 100), every_second(), 1_000)
    index.schedules.end("a", Position(7, 500), 2_400, Reason("cancelled"))
    assert index.released(9_000, index.rows((1_000, 100))) == [
        (100, "1"),
        (100, "2"),
        (100, "cancelled"),
    ]
    assert index.again == []


@pytest.mark.parametrize(
    "names",
    [
        {"every": "PT1S", "until": "999"},
        {"every": "R1/500/PT1S"},
        {"every": "R/9000-12-31T23:00:00Z/PT1H", "until": "2000"},
    ],
)
def test_a_message_without_any_occurrence_is_a_reject_when_it_starts(names: dict[str, str]) -> None:
    index = Index(a="PT1S")
    index.frames[Position(7, 100)] = frame(100, 1_000, None, schedule="a", **names)
    assert index.released(1_000, index.rows((1_000, 100))) == [(100, "no_occurrence")]
    assert (index.again, bool(index.schedules.marked)) == ([], False)


def test_a_rule_that_this_release_refuses_makes_the_message_a_reject() -> None:
    index = Index(a="PT1S", b="PT1S")
    index.frames[Position(7, 100)] = frame(100, 1_000, schedule="a", cron="not any more")
    released = index.released(1_500, index.rows((1_000, 100), (1_000, 101)))
    assert released == [(100, "bad_schedule"), (101, "1")]
    assert not index.schedules.repeats(Position(7, 100))


def test_an_occurrence_says_its_time_and_which_time_zones_decided_it() -> None:
    index = Index(a="PT1.5S")
    (part,) = RepeatingMessages(index.schedules, 1_000, index).in_order([index.rows((1_000, 100))])
    assert isinstance(part, Repeated)
    assert part.delivery.properties["ledgerlake.occurrence_time"] == "1970-01-01T00:00:01.000Z"
    assert part.delivery.properties["ledgerlake.timezone_data"] == TIMEZONE_DATA_VERSION
