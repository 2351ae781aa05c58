"""The table of the messages that wait, by id: many in one value of the state, however it grows."""

from __future__ import annotations

import random

import pytest

from ledgerlake.errors import OffsetError
from ledgerlake.operators import schedule_state
from ledgerlake.operators.schedule_state import (
    BLOCK_MESSAGES,
    ScheduleState,
    StoredSchedules,
    block_from_bytes,
    block_of,
    block_to_bytes,
    table_from_bytes,
)
from ledgerlake.operators.state_variables import StateVariables
from ledgerlake.reasons import CANCELLED
from ledgerlake.schedules.repetition import RepetitionRate
from ledgerlake.schedules.schedules import (
    REPEATING,
    SCHEDULED,
    MarkedPositions,
    Repeating,
    ScheduledMessage,
    Schedules,
)
from ledgerlake.wire.message_id import Position
from tests.operators.stage import DictState


class Table:
    """The state variables, and what waits."""

    def __init__(self) -> None:
        self.states: dict[str, DictState] = {}
        self.state = ScheduleState(StateVariables(self))
        self.marked = MarkedPositions()

    def getMapState(self, name: str, *_: str) -> DictState:
        return self.states.setdefault(name, DictState())

    def open(self, *schedule_ids: str) -> StoredSchedules:
        store = StoredSchedules(self.state, self.marked)
        store.begin(len(set(schedule_ids)))
        return store

    def add(self, *numbers: int) -> None:
        """Have the messages of these numbers wait."""
        store = self.open(*map(name_of, numbers))
        for number in sorted(numbers, key=lambda number: store.block_of(name_of(number))):
            self.marked.mark(message(number).position, SCHEDULED)
            store.store(name_of(number), [message(number)])
        store.save()

    def found(self, numbers: range) -> list[int]:
        store = self.open()
        return [number for number in numbers if store.load(name_of(number)) == [message(number)]]

    @property
    def blocks(self) -> dict[int, bytes]:
        return {key[0]: value[0] for key, value in self.states["schedule_blocks"].values.items()}


def name_of(number: int) -> str:
    return f"visit-{number}"


def message(number: int) -> ScheduledMessage:
    return ScheduledMessage(Position(7, number), number, 10**6 + number)


@pytest.fixture
def table() -> Table:
    return Table()


def test_every_id_is_found_while_the_table_grows_by_any_steps(table: Table) -> None:
    rng = random.Random(1)
    added = 0
    while added < 3000:
        count = rng.choice([1, 5, 40, 700])
        table.add(*range(added, added + count))
        added += count
        assert table.found(range(added + 10)) == list(range(added))
    blocks = table.blocks
    size = table_from_bytes(blocks.pop(-1))
    assert (size.blocks, size.messages) == (-(-added // BLOCK_MESSAGES), added)
    assert max(len(block_from_bytes(block)) for block in blocks.values()) < 4 * BLOCK_MESSAGES


def test_a_larger_table_leaves_most_ids_in_their_blocks() -> None:
    ids = [name_of(number) for number in range(10_000)]
    assert (
        sum(block_of(schedule_id, 100) != block_of(schedule_id, 101) for schedule_id in ids) < 200
    )
    assert {block_of(schedule_id, 101) for schedule_id in ids} == set(range(101))


def test_ids_that_a_producer_has_chosen_for_one_block_are_in_many(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [number for number in range(30_000) if block_of(name_of(number), 64) == 5]
    table.add(*numbers)
    assert (
        max(len(block_from_bytes(block)) for number, block in table.blocks.items() if number != -1)
        > 100
    )
    keyed = Table()
    monkeypatch.setattr(
        schedule_state, "find_query_id", lambda: "5f2b6f5e-0f5e-4d0e-8a5e-c0ffee00c0de"
    )
    keyed.add(*numbers)
    assert (
        max(len(block_from_bytes(block)) for number, block in keyed.blocks.items() if number != -1)
        < 100
    )
    assert keyed.found(range(0, 30_000, 100)) == [number for number in numbers if number % 100 == 0]
    monkeypatch.setattr(schedule_state, "find_query_id", lambda: pytest.fail("the key is stored"))
    assert keyed.found(range(5)) == [number for number in numbers if number < 5]
    assert table.found(range(5)) == [number for number in numbers if number < 5], (
        "a table without a key"
    )


def test_a_thousand_messages_cost_a_call_for_each_block_and_not_for_each_message(
    table: Table,
) -> None:
    table.add(*range(1000))
    assert table.states["schedule_blocks"].writes <= 1000 / BLOCK_MESSAGES + 2


@pytest.mark.parametrize("repeating", [None, Repeating(5)])
def test_an_event_does_not_copy_the_messages_that_wait_under_its_id(
    table: Table, repeating: Repeating | None
) -> None:
    store = table.open("a")
    store.store("a", [])
    waiting = store.load("a")
    for number in range(3):
        table.marked.mark(Position(7, number), SCHEDULED if repeating is None else REPEATING)
        waiting.append(ScheduledMessage(Position(7, number), number, 10**6, repeating))
        store.store("a", waiting)
        assert store.load("a") is waiting
    store.save()
    store.rate = RepetitionRate(2**70, 5)
    store.save_repeating()
    assert table.open().load("a") == waiting
    assert table.open().rate == RepetitionRate(2**63 - 1, 5)


def test_messages_that_have_left_are_removed_with_the_next_change_of_their_block(
    table: Table,
) -> None:
    table.add(*range(20))
    for number in range(15):
        table.marked.take(Position(7, number))
    table.add(99)
    size, block = table.blocks[-1], table.blocks[0]
    assert (table_from_bytes(size).blocks, table_from_bytes(size).messages) == (1, 6)
    assert sorted(block_from_bytes(block)) == sorted(map(name_of, (15, 16, 17, 18, 19, 99)))


def test_a_message_that_has_left_is_neither_hit_nor_hits_another_though_its_block_has_it(
    table: Table,
) -> None:
    table.add(5)
    table.marked.take(Position(7, 5))
    schedules = Schedules(table.open(name_of(5)), table.marked)
    schedules.end(name_of(5), Position(7, 6), 100, CANCELLED)
    assert not table.marked
    schedules.put(name_of(5), ScheduledMessage(Position(7, 3), 3, 10**6))
    assert table.marked.has(Position(7, 3), SCHEDULED)


def test_a_block_is_readable_by_later_releases_and_newer_ones_are_refused() -> None:
    golden = bytes.fromhex("0a130a0776697369742d341007180420042884897a5001")
    assert block_from_bytes(golden) == {"visit-4": [ScheduledMessage(Position(7, 4), 4, 2_000_004)]}
    assert block_to_bytes([("visit-4", ScheduledMessage(Position(7, 4), 4, 2_000_004))]) == golden
    repeating = bytes.fromhex("0a150a0776697369742d341007180420042884897a30015001")
    # Of a message that repeats a block has the start, whatever waits now.
    assert block_from_bytes(repeating) == {
        "visit-4": [ScheduledMessage(Position(7, 4), 4, 2_000_004, Repeating(2_000_004))]
    }
    assert (
        block_to_bytes([("visit-4", ScheduledMessage(Position(7, 4), 4, 9, Repeating(2_000_004)))])
        == repeating
    )
    with pytest.raises(OffsetError, match="newer Ledgerlake"):
        block_from_bytes(bytes.fromhex("5002"))


@pytest.mark.parametrize(
    "damaged", ["0a", "0a020807", "0a130a07ff697369742d341007180420042884897a5001"]
)
def test_a_damaged_block_is_refused_in_a_sentence(damaged: str) -> None:
    with pytest.raises(OffsetError, match="damaged schedules"):
        block_from_bytes(bytes.fromhex(damaged))
