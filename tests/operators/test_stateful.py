"""The stateful stage: the stored messages, the messages that never touch state, and its reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ledgerlake.assembly.assembler import _stored_ms
from ledgerlake.assembly.chunk_entries import read_alone, read_chunk
from ledgerlake.assembly.rules import Chunk, ChunkedMessageKey, IncompleteMessage, Limits
from ledgerlake.decode.split import PieceKind
from ledgerlake.errors import CorruptEntryError, OffsetError
from ledgerlake.operators import stateful
from ledgerlake.operators.stage_rows import KEY_OF_RESULTS, RowKind, stage_row
from ledgerlake.operators.stateful import incomplete_from_json, incomplete_to_json
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.chunks import Marker, promise
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import Position
from tests.chunks import chunk_entries
from tests.operators.stage import DictState, DictValue, Settled, Stage, task

GOLDEN = Path(__file__).parents[1] / "golden"
KEY_A, KEY_B = ChunkedMessageKey("a", "a-1"), ChunkedMessageKey("b", "b-1")
LIMITS = Limits(expire_after_ms=1000)
MARKER = Marker("a", "a-1", Position(1, 3), tuple(Position(1, n) for n in range(3)), 5003, 5003)


def chunk(
    key: ChunkedMessageKey, entry: int, chunk_id: int, count: int = 3, has_marker: bool = False
) -> Chunk:
    return Chunk(
        key, Position(1, entry), chunk_id, count, 10 * count, 10, 15, 5000 + entry, 7, has_marker
    )


def at(*entries: int) -> tuple[Position, ...]:
    return tuple(Position(1, entry) for entry in entries)


class Play:
    """Batches one after another over the same state."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.stage = Stage(limits)
        self.settled = Settled()

    def __call__(self, *tasks: list[Chunk | Marker], now_ms: int | None = None) -> None:
        rows = [
            row
            for task_chunks in tasks
            for row in task(task_chunks, self.stage.limits, self.settled, now_ms)
        ]
        self.settled.stage(self.stage.run(rows))

    @property
    def state(self) -> dict[str, int]:
        return {name: len(self.stage.states[name].values) for name in ("sets", "parts")}

    @property
    def writes(self) -> int:
        return sum(state.writes for state in self.stage.states.values())


@pytest.mark.parametrize("own", [{"uuid": "u" * 1025}, {"producer_name": "p" * 1025}])
def test_a_chunk_or_marker_with_a_name_that_is_too_long_is_a_reject(own: dict[str, Any]) -> None:
    names: dict[str, Any] = {"uuid": "p-1", "producer_name": "p"} | own
    with pytest.raises(CorruptEntryError) as raised:
        read_chunk(chunk_entries(b"xy", 2, **names)[0], Position(1, 5))
    assert raised.value.reason == "chunk_invalid"
    metadata = pb.MessageMetadata(
        publish_time=1, sequence_id=1, num_chunks_from_msg=1, properties=[promise()], **names
    )
    with pytest.raises(CorruptEntryError) as raised:
        read_alone(
            PieceKind.MARKER, encode_entry(metadata, b'{"chunks": ["1:2", "1:3"]}'), Position(1, 5)
        )
    assert raised.value.reason == "malformed_marker"


def test_a_marker_that_lists_what_comes_behind_it_is_a_reject() -> None:
    metadata = pb.MessageMetadata(
        producer_name="p",
        uuid="p-1",
        publish_time=1,
        sequence_id=1,
        num_chunks_from_msg=1,
        properties=[promise()],
    )
    entry = encode_entry(metadata, b'{"chunks": ["1:2", "1:5"]}')
    with pytest.raises(CorruptEntryError, match="behind it"):
        read_alone(PieceKind.MARKER, entry, Position(1, 5))
    assert isinstance(read_alone(PieceKind.MARKER, entry, Position(1, 6)), Marker)


def test_a_marker_lists_no_more_chunks_than_a_message_may_have() -> None:
    metadata = pb.MessageMetadata(
        producer_name="p",
        uuid="p-1",
        publish_time=1,
        sequence_id=1,
        num_chunks_from_msg=1,
        properties=[promise()],
    )
    listed = [f"1:{entry}" for entry in range(LIMITS.max_chunks + 1)]
    longest_marker, too_long_marker = (
        encode_entry(metadata, json.dumps({"chunks": ids}).encode()) for ids in (listed[1:], listed)
    )
    assert isinstance(read_alone(PieceKind.MARKER, longest_marker, Position(2, 0)), Marker)
    with pytest.raises(CorruptEntryError, match="more than 10000 chunks") as raised:
        read_alone(PieceKind.MARKER, too_long_marker, Position(2, 0))
    assert raised.value.reason == "malformed_marker"


def test_what_a_task_reports_of_chunks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ledgerlake.operators.local_assembly.MAX_TASK_EVENT_BYTES", 10_000)
    key = ChunkedMessageKey("p" * 100, "u" * 100)
    events = [
        replace(chunk(key, entry, 1), key=replace(key, uuid=f"{entry:0100}")) for entry in range(50)
    ]
    settled = Settled()
    rows = task(events, LIMITS, settled)
    (report,) = (row for row in rows if row["kind"][0].as_py() == RowKind.REPORT.value)
    assert len(report["header"][0].as_py()) < 10_200
    sent = sum(row["kind"][0].as_py() == RowKind.CHUNK.value for row in rows)
    assert 10 < sent < 25
    assert [reason for reason, _ in settled.rejected] == ["chunk_evicted"] * (50 - sent)


def test_messages_that_are_complete_in_a_task_leave_room_in_its_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ledgerlake.operators.local_assembly.MAX_TASK_EVENT_BYTES", 10_000)
    keys = [replace(KEY_A, uuid=f"{number}") for number in range(80)]
    chunks = [chunk(keys[number // 20], number, number % 20, count=20) for number in range(80 * 20)]
    settled = Settled()
    rows = task(chunks, LIMITS, settled)
    assert (len(settled.delivered), settled.rejected, len(rows)) == (80, [], 1)


def test_incomplete_messages_for_which_a_report_has_no_room_are_rejects_from_the_oldest_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ledgerlake.operators.local_assembly.MAX_TASK_EVENT_BYTES", 10_000)
    chunks = [chunk(replace(KEY_A, uuid=f"{number}"), number, 0) for number in range(50)]
    settled = Settled()
    rows = task(chunks, LIMITS, settled)
    (report,) = (row for row in rows if row["kind"][0].as_py() == RowKind.REPORT.value)
    assert len(report["header"][0].as_py()) < 10_200
    evicted = [position for reason, position in settled.rejected if reason == "chunk_evicted"]
    assert 0 < len(evicted) < 50
    assert set(evicted) == set(at(*range(len(evicted))))
    assert len(rows) == 50 - len(evicted) + 1


def test_what_begins_and_ends_within_a_batch_never_touches_the_state() -> None:
    play = Play()
    play(
        [
            chunk(KEY_A, 0, 0),
            chunk(KEY_B, 1, 0),
            chunk(KEY_A, 2, 1),
            chunk(KEY_B, 3, 1),
            chunk(KEY_A, 4, 2),
            chunk(KEY_B, 5, 2),
        ]
    )
    assert play.settled.delivered == [at(0, 2, 4), at(1, 3, 5)]
    assert play.writes == 0


def test_what_is_open_waits_in_the_state_part_by_part() -> None:
    play = Play()
    play([chunk(KEY_A, 0, 0), chunk(KEY_A, 1, 1)])
    assert play.state == {"sets": 1, "parts": 2}
    play([chunk(KEY_A, 2, 2)])
    assert play.settled.delivered == [at(0, 1, 2)]
    assert play.state == {"sets": 0, "parts": 0}


def test_a_batch_that_completes_a_message_writes_none_of_its_last_parts() -> None:
    play = Play()
    play([chunk(KEY_A, 0, 0)])
    before = play.writes
    play([chunk(KEY_A, 1, 1), chunk(KEY_A, 2, 2)])
    assert play.settled.delivered == [at(0, 1, 2)]
    assert play.writes == before


def test_bytes_that_do_not_fit_into_memory_wait_in_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stateful, "_FRESH_BYTES", 15)
    play = Play()
    play([chunk(KEY_A, 0, 0)])
    play([chunk(KEY_A, 1, 1), chunk(KEY_A, 2, 2)])
    assert play.settled.delivered == [at(0, 1, 2)]
    assert play.state == {"sets": 0, "parts": 0}


def test_several_tasks_of_one_topic_partition_meet_in_the_order_of_their_ranges() -> None:
    play = Play()
    play([chunk(KEY_A, 4, 2)], [chunk(KEY_A, 2, 1)], [chunk(KEY_A, 0, 0)])
    assert play.settled.delivered == [at(0, 2, 4)]


def test_a_message_that_begins_again_in_a_later_batch_gives_up_the_old_set() -> None:
    play = Play()
    play([chunk(KEY_A, 0, 0), chunk(KEY_A, 1, 1)])
    play([chunk(KEY_A, 2, 0), chunk(KEY_A, 3, 1), chunk(KEY_A, 4, 2)])
    assert play.settled.delivered == [at(2, 3, 4)]
    assert play.settled.rejected == [("chunk_resent", position) for position in at(0, 1)]
    assert play.state == {"sets": 0, "parts": 0}


def test_with_one_pending_set_three_interleaved_messages_are_delivered_by_reading_again() -> None:
    play = Play(Limits(max_pending=1))
    keys = [ChunkedMessageKey(name, name) for name in "xyz"]
    for chunk_id in range(3):
        play([chunk(key, 3 * chunk_id + number, chunk_id) for number, key in enumerate(keys)])
    assert sorted(play.settled.delivered) == [at(0, 3, 6), at(1, 4, 7), at(2, 5, 8)]
    assert play.settled.rejected == []
    assert play.settled.read_again == 2
    assert play.state == {"sets": 0, "parts": 0}


def test_a_chunk_of_a_topic_made_anew_takes_the_place_of_no_chunk_that_waits() -> None:
    play = Play()
    play([chunk(KEY_A, 0, 0), chunk(KEY_A, 1, 1)])
    # The first chunk of the same message in the new topic, and a message of another producer.
    play([replace(chunk(KEY_A, 1, 1), publish_ms=8), chunk(KEY_B, 0, 0)])
    play([chunk(KEY_B, 3, 1), chunk(KEY_A, 4, 2)])
    assert play.settled.delivered == [at(0, 1, 4)]
    assert sorted(play.settled.rejected) == [
        ("chunk_known", Position(1, 0)),
        ("chunk_known", Position(1, 1)),
        ("chunk_orphan", Position(1, 3)),
    ]
    assert play.state == {"sets": 0, "parts": 0}


def test_a_message_at_the_positions_of_a_spilled_one_is_rejected_with_its_own_bytes() -> None:
    play = Play(Limits(max_pending=1))
    play([chunk(KEY_A, 0, 0), chunk(KEY_B, 1, 0)])
    play([chunk(ChunkedMessageKey("c", "c-1"), 0, 0)])
    assert play.settled.rejected == [("chunk_known", Position(1, 0))]
    play([chunk(KEY_A, 2, 1), chunk(KEY_A, 3, 2), chunk(KEY_B, 4, 1), chunk(KEY_B, 5, 2)])
    assert play.settled.delivered == [at(0, 2, 3), at(1, 4, 5)]
    assert play.state == {"sets": 0, "parts": 0}


def test_a_set_expires_on_a_clock_alone() -> None:
    play = Play()
    play([chunk(KEY_A, 0, 0)])
    assert play.settled.summary is not None
    assert play.settled.summary.expires_ms == 6001, "a batch at 6000 would not give it up"
    play([], now_ms=6000)
    assert play.settled.rejected == []
    play([], now_ms=6001)
    assert play.settled.rejected == [("chunk_expired", Position(1, 0))]
    assert play.state == {"sets": 0, "parts": 0}


def test_the_standing_says_where_the_oldest_open_message_begins() -> None:
    play = Play()
    play([chunk(KEY_A, 0, 0), chunk(KEY_B, 1, 0)])
    summary = play.settled.summary
    assert summary is not None
    assert (summary.oldest_incomplete, summary.incomplete_count) == (Position(1, 0), 2)
    play([chunk(KEY_A, 2, 1), chunk(KEY_A, 3, 2)])
    assert play.settled.summary is not None
    assert play.settled.summary.oldest_incomplete == Position(1, 1)


def test_a_marker_delivers_what_a_query_that_began_in_the_middle_could_not() -> None:
    play = Play()
    play([chunk(KEY_A, 1, 1, has_marker=True)])
    play([chunk(KEY_A, 2, 2, has_marker=True), MARKER])
    assert play.settled.delivered == [at(0, 1, 2)]
    assert play.settled.read_again == 1
    assert play.settled.rejected == []


def test_a_marker_behind_a_whole_message_changes_nothing() -> None:
    play = Play()
    chunks = [chunk(KEY_A, number, number, has_marker=True) for number in range(3)]
    play([*chunks[:2]])
    play([chunks[2], MARKER])
    assert play.settled.delivered == [at(0, 1, 2)]


def test_an_open_set_in_state_is_readable_by_later_releases_and_a_newer_one_is_refused() -> None:
    golden = (GOLDEN / "open-set-v1.json").read_text()
    incomplete = IncompleteMessage(
        ChunkedMessageKey("p", "p-7"), 3, 11, 1_777_626_000_123, 1_777_625_999_000, at(0, 4), 8, 96
    )
    assert incomplete_from_json(golden) == incomplete
    assert json.loads(incomplete_to_json(incomplete)) == json.loads(golden)
    with pytest.raises(OffsetError, match="newer Ledgerlake"):
        incomplete_from_json('{"version": 2}')


def test_without_a_time_by_the_broker_a_set_is_as_old_as_the_batch_that_opened_it() -> None:
    play = Play()
    bare = replace(chunk(KEY_A, 0, 0), time_ms=None, publish_ms=10**15)
    play([bare], now_ms=5000)
    play([replace(chunk(KEY_B, 1, 0), time_ms=None, publish_ms=1)], now_ms=6000)
    assert play.settled.rejected == []
    play([], now_ms=6001)
    assert play.settled.rejected == [("chunk_expired", Position(1, 0))]
    assert play.settled.summary is not None
    assert play.settled.summary.expires_ms == 7001


@pytest.mark.parametrize("publish_time", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_any_publish_time_tells_a_restarted_producers_chunks_apart_and_fits_into_the_state(
    publish_time: int,
) -> None:
    first, other = (
        chunk_entries(b"large message", 2, publish_time=publish_ms)[0]
        for publish_ms in (publish_time, publish_time ^ 1)
    )
    chunks = [read_chunk(raw, Position(1, 0)) for raw in (first, other)]
    assert chunks[0].publish_ms != chunks[1].publish_ms
    assert -(2**63) <= chunks[0].publish_ms < 2**63


@pytest.mark.parametrize(
    ("publish_ms", "stored_ms"), [(0, 0), (7000, 7000), (-(2**63), 0), (2**63 - 1, 0)]
)
def test_a_large_message_was_stored_at_a_time_that_fits_into_the_records_of_schedules(
    publish_ms: int, stored_ms: int
) -> None:
    assert _stored_ms(replace(chunk(KEY_A, 2, 2), time_ms=None, publish_ms=publish_ms)) == stored_ms


def test_results_of_a_task_pass_as_they_are_and_no_state_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the state was read")

    for state in (DictState, DictValue):
        for name in ("exists", "get", "getValue", "iterator"):
            monkeypatch.setattr(state, name, fail, raising=False)
    stage = Stage(LIMITS)
    of_tasks = [stage_row(KEY_OF_RESULTS, RowKind.RESULTS, header=text) for text in ("[]", "[1]")]
    rows = stage.run(of_tasks, topic_partition=KEY_OF_RESULTS)
    assert [(row.kind, row.header) for row in rows] == [
        (RowKind.RESULTS, "[]"),
        (RowKind.RESULTS, "[1]"),
    ]
    assert stage.calls == 1
