"""Delayed messages in the stateful stage: the messages in state, the time of their release, and the
hits of cancels.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.assembly.rules import Chunk, ChunkedMessageKey, IncompleteMessage, Limits
from ledgerlake.decode.messages import BatchRange
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.decode.split import entries_of
from ledgerlake.delay.due_times import DueSpan
from ledgerlake.delay.tracker import DelaySettings
from ledgerlake.errors import OffsetError
from ledgerlake.operators import bucket_storage, delayed, due_outcomes, repeating, stateful
from ledgerlake.operators.outcome_types import DueEntries, DuePositions, RejectedPositions
from ledgerlake.operators.outcomes import OutcomeDecoder
from ledgerlake.operators.schedule_events import PauseChanged, Scheduled, ScheduleEvents
from ledgerlake.operators.schedule_state import block_from_bytes
from ledgerlake.operators.separately_stored import (
    SeparatelyStored,
    separately_stored_from_json,
    separately_stored_to_json,
)
from ledgerlake.operators.stage_rows import (
    STAGE_ROWS,
    DelayedLargeMessage,
    MessageStarted,
    RowKind,
    StateSummary,
    TaskReport,
    delayed_rows,
    report_to_json,
    stage_row,
)
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.reasons import MALFORMED_MARKER, Reason
from ledgerlake.schedules.cancels import (
    Cancel,
    Cancels,
    cancels_from_json,
    cancels_to_json,
    parse_cancel,
)
from ledgerlake.schedules.repetition import RepetitionRate, parse_repetition, rate_of
from ledgerlake.stored.places import Place
from ledgerlake.wire import commands
from ledgerlake.wire.chunks import Marker
from ledgerlake.wire.entry import encode_batch, encode_entry
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, Position
from tests.chunks import chunk_entries
from tests.operators.stage import SOURCE, Stage, stage_settings
from tests.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pyarrow as pa

    from ledgerlake.operators.stage_rows import TaskEvent

STORED_MS = 1_700_000_000_000
SMALL = DelaySettings(
    min_indexes_per_bucket=3, ledger_step_per_bucket=1, max_indexes_per_segment=2, max_buckets=2
)


def frame(
    entry_id: int,
    due_s: int,
    key: str | None = None,
    ledger_id: int = 1,
    batch: int | None = None,
    **fields: Any,
) -> bytes:
    """A delayed entry, due so many seconds after all are stored; its value is its position, of a
    batch with the index.
    """
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=entry_id, publish_time=STORED_MS, **fields
    )
    metadata.deliver_at_time = STORED_MS + 1000 * due_s
    if key is not None:
        metadata.partition_key = key
    broker = pb.BrokerEntryMetadata(broker_timestamp=STORED_MS, index=entry_id)
    value = b"%d:%d" % (ledger_id, entry_id)
    if batch is not None:
        metadata.num_messages_in_batch = batch
        singles = [
            pb.SingleMessageMetadata(payload_size=0, partition_key=key or "") for _ in range(batch)
        ]
        value = encode_batch(
            [(single, value + b":%d" % number) for number, single in enumerate(singles)]
        )
    return commands.message(1, ledger_id, entry_id, encode_entry(metadata, value, broker))


class Play:
    """Batches one after another over the same state, and what the last stage makes of them."""

    def __init__(self, **options: Any) -> None:
        self.stage = Stage(Limits(), DelayOptions(**{"settings": SMALL, **options}))
        self.values: list[bytes] = []
        self.rejects: list[RejectedEntry] = []
        self.summary = StateSummary([])
        self.kinds: list[type] = []
        self.after, self.end = AFTER_ALL, Position(9, 9)
        # Of the messages that were let go last.
        self.outputs: Mapping[str, Position] = {}

    def __call__(
        self,
        *frames: bytes,
        at_s: int | None = None,
        events: list[Any] | None = None,
        parts: Any = (),
        rows: Any = (),
    ) -> list[bytes]:
        """One batch; the values that were let go."""
        due_ms = None if at_s is None else STORED_MS + 1000 * at_s
        schedules = ScheduleEvents()
        others: list[TaskEvent] = []
        for event in events or []:
            if isinstance(event, Scheduled | PauseChanged) or (
                isinstance(event, Cancel) and event.by == "schedule"
            ):
                schedules.add(event)
            else:
                others.append(event)
        report = TaskReport(self.end, due_ms, {}, others, self.after)
        rows = [*rows, *schedules.rows(SOURCE, all_events=True)]
        rows = [
            *rows,
            *(stage_row(SOURCE, RowKind.CHUNK, position, entry=entry) for position, entry in parts),
        ]
        rows += [stage_row(SOURCE, RowKind.DELAYED, entry=b"".join(frames))] if frames else []
        rows.append(stage_row(SOURCE, RowKind.REPORT, header=report_to_json(report)))
        outcomes = self.stage.run(rows)
        self.kinds = [type(outcome) for outcome in outcomes]
        before = len(self.values)
        self._settle(outcomes)
        return self.values[before:]

    def report(self, report: TaskReport) -> list[Any]:
        """Run one batch with nothing but a report; return the outcomes."""
        return self.stage.run([stage_row(SOURCE, RowKind.REPORT, header=report_to_json(report))])

    def _settle(self, outcomes: list[Any]) -> None:
        decoder = OutcomeDecoder(SOURCE, stage_settings(Limits(max_message_bytes=10**6)))
        for outcome in outcomes:
            if isinstance(outcome, StateSummary):
                self.summary = outcome
            elif isinstance(outcome, Cancels):
                decoder.cancels = outcome
            else:
                if isinstance(outcome, DueEntries):
                    self.outputs = outcome.outputs
                for decoded in decoder.decode(outcome):
                    if isinstance(decoded, list):
                        self.rejects += decoded
                    else:
                        assert decoded["delivered_at"].null_count == 0
                        self.values += decoded["value"].to_pylist()

    def state(self, name: str) -> dict[Any, Any]:
        return self.stage.states[name].values


def test_messages_wait_and_come_out_in_order_when_they_are_due() -> None:
    play = Play()
    assert play(frame(0, 30), frame(1, 10), frame(2, 20), at_s=0) == []
    assert (play.summary.delayed_count, play.summary.next_due_ms) == (3, STORED_MS + 10_000)
    assert play(frame(0, 5, ledger_id=2), at_s=9) == [b"2:0"]
    assert play(at_s=20) == [b"1:1", b"1:2"]
    assert play(at_s=29) == []
    assert play.summary.due_spans == [DueSpan(STORED_MS + 30_000, 1000, 1)]
    assert play(at_s=30) == [b"1:0"]
    assert play.summary.due_spans == []
    assert (play.summary.delayed_count, play.summary.next_due_ms) == (0, None)
    play(at_s=31)
    assert play.state("snapshots") == {}


def test_what_is_due_beyond_the_limit_leaves_in_the_next_batches_and_cancels_still_hit_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A row of due messages may go beyond the limit.
    monkeypatch.setattr(due_outcomes, "_ROW_BYTES", 1)
    play = Play(most_due=2)
    play(*(frame(number, 10, key="b" if number == 4 else "a") for number in range(6)), at_s=0)
    by_key = Cancel("key", "b", Position(1, 5), STORED_MS)
    assert play(at_s=10, events=[by_key]) == [b"1:0", b"1:1"]
    assert (play.summary.more_due, play.summary.next_due_ms) == (True, STORED_MS + 10_000)
    assert play(at_s=11) == [b"1:2", b"1:3"]
    assert play(at_s=11) == [b"1:5"]
    assert [reject.reason for reject in play.rejects] == ["cancelled"]
    assert (play.summary.more_due, play.summary.next_due_ms) == (False, None)


def test_without_a_time_by_the_broker_nothing_is_let_go() -> None:
    play = Play()
    assert play(frame(0, -5), at_s=None) == []
    assert play(at_s=0) == [b"1:0"]


def test_a_batch_in_which_nothing_happens_writes_nothing() -> None:
    play = Play()
    play(frame(0, 30), at_s=0)
    play(at_s=1)
    before = sum(state.writes for state in play.stage.states.values())
    play(at_s=2)
    assert sum(state.writes for state in play.stage.states.values()) == before


def test_what_waited_is_let_go_also_when_delays_are_no_longer_held() -> None:
    play = Play()
    play(frame(0, 30), at_s=0)
    play.stage.delay = DelayOptions(enabled=False, settings=SMALL)
    assert play(at_s=30) == [b"1:0"]


def test_many_messages_leave_in_few_rows() -> None:
    play = Play(settings=DelaySettings(max_indexes_per_segment=2))
    play(*(frame(number, 30 + number % 3) for number in range(500)), at_s=0)
    assert len(play(at_s=40)) == 500
    assert play.kinds == [DueEntries, StateSummary]


def test_occurrences_beyond_the_limit_of_a_micro_batch_need_another_one_though_nothing_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeating, "MOST_OVERDUE", 3)
    names = {"ledgerlake.schedule": "a", "ledgerlake.every": "PT1S", "ledgerlake.count": "9"}
    properties = [pb.KeyValue(key=name, value=value) for name, value in names.items()]
    play = Play()
    play(
        frame(1, 1, properties=properties),
        events=[Scheduled("a", Position(1, 1), STORED_MS, STORED_MS + 1000, RepetitionRate(1))],
    )
    values: list[bytes] = []
    at_s = 60
    while play.summary.next_due_ms is not None:
        values += play(at_s=at_s)
        assert play.summary.more_due == (play.summary.next_due_ms is not None)
        at_s += 1
    assert values == [b"1:1"] * 9


@pytest.mark.parametrize("limit", [{"max_repetitions_per_s": 2}, {"max_repeated_bytes_per_s": 200}])
def test_messages_that_would_repeat_beyond_the_limit_are_rejects_when_they_arrive(
    limit: dict[str, int],
) -> None:
    play = Play(**limit)

    def put(entry_id: int, schedule_id: str, every: str) -> list[tuple[str, Position]]:
        before = len(play.rejects)
        play(
            repeating_frame(entry_id, schedule_id, every),
            events=[every_event(entry_id, schedule_id, every)],
            at_s=0,
        )
        return [(reject.reason, reject.position) for reject in play.rejects[before:]]

    assert put(1, "a", "PT1S") == put(2, "b", "PT1S") == []
    assert put(3, "c", "PT1H") == [("repetition_refused", Position(1, 3))]
    # What waits under an id stays if the new message is refused, and makes room if it is replaced.
    assert put(4, "a", "PT2S") == []
    assert put(5, "c", "PT2S") == []
    assert put(6, "a", "PT1S") == [("repetition_refused", Position(1, 6))]
    values = play(at_s=12)
    assert {value: values.count(value) for value in sorted(set(values))} == {
        b"1:2": 3,
        b"1:4": 2,
        b"1:5": 2,
    }
    # Refused messages leave without a word.
    assert [reject.reason for reject in play.rejects] == ["repetition_refused"] * 2 + ["replaced"]


def test_with_a_limit_of_zero_no_message_repeats_and_others_wait() -> None:
    play = Play(max_repetitions_per_s=0)
    play(repeating_frame(1, "a", "P1Y"), frame(2, 1), events=[every_event(1, "a", "P1Y")], at_s=0)
    assert [(reject.reason, reject.position) for reject in play.rejects] == [
        ("repetition_refused", Position(1, 1))
    ]
    assert play(at_s=20) == [b"1:2"]
    assert not play.state("cancels")
    assert not play.state("schedule_blocks")


def repeating_frame(entry_id: int, schedule_id: str, every: str) -> bytes:
    """A message that repeats from 10 seconds on."""
    names = {"ledgerlake.schedule": schedule_id, "ledgerlake.every": every}
    return frame(
        entry_id,
        10,
        properties=[pb.KeyValue(key=name, value=value) for name, value in names.items()],
    )


def every_event(entry_id: int, schedule_id: str, every: str) -> Scheduled:
    """What the task says of such a message, as if it had 100 bytes."""
    rule = parse_repetition({"ledgerlake.every": every})
    assert rule is not None
    return Scheduled(
        schedule_id, Position(1, entry_id), STORED_MS, STORED_MS + 10_000, rate_of(rule, 100)
    )


@pytest.mark.parametrize("paused", ["a", None])
def test_the_limit_of_a_micro_batch_ends_no_pause(
    paused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeating, "MOST_OVERDUE", 2)
    names = {"ledgerlake.schedule": "a", "ledgerlake.every": "PT1S", "ledgerlake.count": "9"}
    properties = [pb.KeyValue(key=name, value=value) for name, value in names.items()]
    play = Play()
    events = [
        Scheduled("a", Position(1, 1), STORED_MS, STORED_MS + 1000, RepetitionRate(1)),
        PauseChanged(paused, Position(1, 2), STORED_MS + 4500, resumes=False),
        PauseChanged(paused, Position(1, 3), STORED_MS + 7500, resumes=True),
    ]
    values = play(frame(1, 1, properties=properties), at_s=60, events=events)
    while play.summary.next_due_ms is not None:
        values += play(at_s=60)
    assert len(values) == 6
    assert not play.state("cancels")


@pytest.mark.parametrize("paused", ["a", None])
def test_a_pause_holds_from_its_own_time_on_after_one_of_a_sender_whose_clock_is_ahead(
    paused: str | None,
) -> None:
    play = Play()
    play(repeating_frame(1, "a", "PT10S"), events=[every_event(1, "a", "PT10S")], at_s=0)
    pauses = [
        PauseChanged(paused, Position(1, entry_id), STORED_MS + 1000 * at_s, resumes=False)
        for entry_id, at_s in ((2, 120), (3, 25))
    ]
    assert play(events=pauses, at_s=26) == [b"1:1"] * 2
    assert play(at_s=115) == []


def test_too_many_pauses_are_refused_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ledgerlake.schedules.schedules.MOST_PAUSES", 2)
    play = Play()
    play(frame(0, 30), at_s=0)
    events = [
        PauseChanged(None, Position(1, 5 + number), STORED_MS + number, resumes=number % 2 == 1)
        for number in range(8)
    ]
    play(events=events, at_s=1)
    assert [(reject.position.entry_id, reject.reason) for reject in play.rejects] == [
        (9, "pause_refused"),
        (11, "pause_refused"),
    ]
    assert not play.state("cancels")


def test_too_many_messages_of_an_id_whose_times_are_to_come_are_refused_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ledgerlake.schedules.schedules.MOST_WAITING", 3)
    play = Play()
    for number in range(6):
        # As senders say it without the broker's time: each is due when the next one is stored.
        message = Scheduled(
            "a", Position(1, number), STORED_MS + 50_000 + number, STORED_MS + 50_001 + number
        )
        play(frame(number, 50), events=[message], at_s=number)
    assert len(block_from_bytes(play.state("schedule_blocks")[0,][0])["a"]) == 3
    assert play(at_s=60) == [b"1:0", b"1:1", b"1:2"]
    assert [(reject.reason, reject.position.entry_id) for reject in play.rejects] == [
        ("schedule_refused", number) for number in (3, 4, 5)
    ]
    assert all(reject.entry is not None for reject in play.rejects)


def test_a_large_message_waits_with_its_chunks_and_leaves_nothing() -> None:
    entries = chunk_entries(b"large message", 3, deliver_at_time=STORED_MS + 10_000)
    at = tuple(Position(1, number) for number in range(3))
    play = Play()
    waits = DelayedLargeMessage(at, STORED_MS + 10_000, True, at[-1])
    play(events=[waits], parts=list(zip(at, entries, strict=True)), at_s=0)
    assert len(play.state("parts")) == 3
    assert play(at_s=9) == []
    assert play(at_s=10) == [b"large message"]
    play(at_s=11)
    assert [name for name in ("parts", "separate", "snapshots") if play.state(name)] == []


def test_what_has_the_id_of_a_message_that_waits_is_a_reject() -> None:
    play = Play()
    at = tuple(Position(1, entry_id) for entry_id in (3, 5, 7))
    parts = list(
        zip(at, chunk_entries(b"large message", 3, deliver_at_time=STORED_MS + 10_000), strict=True)
    )
    play(
        frame(0, 30),
        events=[DelayedLargeMessage(at, STORED_MS + 10_000, True, at[-1])],
        parts=parts,
        at_s=0,
    )
    other_parts = list(
        zip(at, chunk_entries(b"other message", 3, deliver_at_time=STORED_MS + 10_000), strict=True)
    )
    play(
        frame(0, 60),
        frame(1, 60),
        events=[DelayedLargeMessage(at, STORED_MS + 20_000, True, at[-1])],
        parts=other_parts,
        at_s=1,
    )
    # The chunks are refused where those that wait are kept, and only the topic has them.
    assert [(reject.position, reject.reason, reject.entry is None) for reject in play.rejects] == [
        (Position(1, 0), "delayed_known", False),
        *((position, "delayed_known", True) for position in at),
    ]
    assert play(at_s=10) == [b"large message"]
    assert play(at_s=30) == [b"1:0"]
    assert play(at_s=60) == [b"1:1"]


AT = tuple(Position(1, entry_id) for entry_id in (3, 5, 7))
NEWER = ChunkedMessageKey("newer", "newer-1")


@pytest.mark.parametrize("fresh_bytes", [0, 10**6])
@pytest.mark.parametrize(
    "events",
    [
        pytest.param(
            [Chunk(NEWER, Position(1, 3), 0, 2, 4, 2, 90, STORED_MS, STORED_MS)], id="a chunk"
        ),
        pytest.param(
            [
                MessageStarted(NEWER),
                IncompleteMessage(NEWER, 2, 4, STORED_MS, STORED_MS, (Position(1, 3),), 2, 90),
            ],
            id="a message that began in its range",
        ),
    ],
)
def test_a_chunk_takes_the_place_of_no_chunk_that_waits(
    monkeypatch: pytest.MonkeyPatch, events: list[Any], fresh_bytes: int
) -> None:
    monkeypatch.setattr(stateful, "_FRESH_BYTES", fresh_bytes)
    entries = chunk_entries(b"large message", 3, deliver_at_time=STORED_MS + 10_000)
    newer = chunk_entries(b"abcd", 2, uuid="newer-1", producer_name="newer")[0]
    play = Play()
    waits = DelayedLargeMessage(AT, STORED_MS + 10_000, True, AT[-1])
    play(events=[waits], parts=list(zip(AT, entries, strict=True)), at_s=0)
    play(events=events, parts=[(Position(1, 3), newer)], at_s=1)
    assert [(reject.position, reject.reason) for reject in play.rejects] == [
        (Position(1, 3), "chunk_known")
    ]
    assert play(at_s=10) == [b"large message"]
    assert not play.state("parts")


@pytest.mark.parametrize("place", AT)
@pytest.mark.parametrize("reread", [False, True])
def test_an_entry_that_is_cut_takes_the_place_of_no_message_that_waits(
    place: Position, reread: bool
) -> None:
    entries = chunk_entries(b"large message", 3, deliver_at_time=STORED_MS + 10_000)
    play = Play(reread=reread)
    waits = DelayedLargeMessage(AT, STORED_MS + 10_000, True, AT[-1])
    play(events=[waits], parts=list(zip(AT, entries, strict=True)), at_s=0)
    cut = list(
        delayed_rows(SOURCE, memoryview(frame(place.entry_id, 20, batch=3)), BatchRange(None, 1))
    )
    play(rows=cut, at_s=1)
    if reread and place != AT[-1]:
        assert play.rejects == []
        return
    assert [(reject.position, reject.reason) for reject in play.rejects] == [
        (place, "delayed_known")
    ]
    if not reread:
        assert play(at_s=10) == [b"large message"]
        assert not play.state("parts")


@pytest.mark.parametrize("reread", [False, True])
def test_an_entry_that_is_cut_is_a_reject_at_the_position_of_a_plain_message_that_waits(
    reread: bool,
) -> None:
    play = Play(reread=reread)
    play(frame(3, 30), at_s=0)
    cut = frame(3, 20, batch=3)
    play(rows=parts_of(cut, (None, 1)), at_s=1)
    assert [(reject.position, reject.reason, reject.entry) for reject in play.rejects] == [
        (Position(1, 3), "delayed_known", entries_of(cut)[Position(1, 3)])
    ]
    assert not play.state("parts")
    assert not play.state("separate")
    if not reread:
        assert play(at_s=30) == [b"1:3"]


@pytest.mark.parametrize("reread", [False, True])
def test_the_rest_of_a_batch_whose_first_part_was_cancelled_is_delivered(reread: bool) -> None:
    play = Play(reread=reread)
    batch = frame(0, 30, batch=3)
    events = [Scheduled("a", Position(1, 0), STORED_MS, STORED_MS + 30_000)]
    play(frame(1, 90), rows=parts_of(batch, (None, 1)), events=events, at_s=0)
    play(events=[Cancel("schedule", "a", Position(1, 2), STORED_MS)], at_s=1)
    assert play(at_s=30) == []
    assert [(reject.position, reject.reason) for reject in play.rejects] == [
        (Position(1, 0), "cancelled")
    ]
    assert play(rows=parts_of(batch, (1, None)), at_s=31) == [b"1:0:2"]
    assert not play.state("separate")


@pytest.mark.parametrize("part", [(None, 0), (None, None)])
def test_the_position_of_a_part_that_was_delivered_is_free_in_a_topic_that_was_created_again(
    part: tuple[int | None, int | None],
) -> None:
    play = Play()
    play(rows=parts_of(frame(0, 30, batch=3), (None, 1)), at_s=0)
    assert play(at_s=30) == [b"1:0:0", b"1:0:1"]
    play(at_s=31)
    new = frame(0, 60, batch=2)
    assert play(rows=parts_of(new, part), at_s=32) == []
    assert play(at_s=60) == [b"1:0:0", b"1:0:1"][: 1 if part[1] == 0 else 2]


def test_with_reread_a_message_at_the_position_of_a_part_that_was_delivered_is_read_again() -> None:
    play = Play(reread=True)
    play(rows=parts_of(frame(0, 30, batch=3), (None, 1)), at_s=0)
    play(at_s=30)
    play(at_s=31)
    play(frame(0, 60), at_s=32)
    report = TaskReport(Position(9, 9), STORED_MS + 60_000, {}, [])
    assert [type(outcome) for outcome in play.report(report)] == [DuePositions, StateSummary]


def test_a_topic_that_was_created_again_is_for_the_output_that_gets_what_comes() -> None:
    """Its ledgers may have lower ids than what waits from the former one."""
    play = Play()
    play(frame(0, 10, ledger_id=500), frame(1, 1000, ledger_id=500))
    play.stage.delay = replace(play.stage.delay, republish="latest")
    for after, end in ((Position(500, 1), Position(500, 1)), (BEFORE_ALL, BEFORE_ALL)):
        play.after, play.end = after, end
        play(at_s=1)
    play.after, play.end = Position(500, 0), Position(500, 9)
    assert play(frame(2, 10, ledger_id=500), at_s=10) == [b"500:0", b"500:2"]
    assert play.outputs == {"topic": Position(500, 1)}, "one waited before the output"
    play.after, play.end = Position(3, -1), Position(3, 0)
    assert play(frame(0, 20, ledger_id=3), at_s=20) == [b"3:0"]
    assert play.outputs == {"topic": BEFORE_ALL}


def test_with_reread_only_positions_wait() -> None:
    play = Play(reread=True)
    play(frame(0, 30), frame(1, 30), at_s=0)
    assert play.summary.oldest_to_reread == Position(1, 0)
    assert not any(b"1:0" in value[0] for value in play.state("snapshots").values())
    due, _ = play.report(TaskReport(Position(9, 9), STORED_MS + 30_000, {}, []))
    assert isinstance(due, DuePositions)
    assert due.positions == [Position(1, 0), Position(1, 1)]


NOT_KEPT = DelayedLargeMessage(
    AT, STORED_MS + 10_000, False, AT[-1], ChunkedMessageKey("p", "p-1"), AT[:1]
)


def serving(*entries: bytes) -> Peer:
    """A broker that has entries at the places of ``AT``."""
    return Peer(list(zip(AT, entries, strict=False)))


@pytest.mark.parametrize("bytes_kept", [False, True])
def test_the_cursor_passes_a_large_message_that_waits_wherever_its_chunks_were(
    bytes_kept: bool,
) -> None:
    entries = chunk_entries(b"large message", 3, deliver_at_time=STORED_MS + 10_000)
    play = Play()
    with serving(*entries) as peer:
        play.stage.service_url = peer.url
        parts = list(zip(AT, entries, strict=True)) if bytes_kept else []
        play(frame(4, 30), events=[replace(NOT_KEPT, bytes_kept=bytes_kept)], parts=parts, at_s=0)
    assert play.summary.oldest_to_reread is None
    assert play(at_s=9) == []
    assert play(at_s=10) == [b"large message"]
    play(at_s=30)
    assert [name for name in ("parts", "separate") if play.state(name)] == []


@pytest.mark.parametrize("bytes_kept", [False, True])
def test_with_reread_the_cursor_passes_no_chunk_of_a_message_that_waits(bytes_kept: bool) -> None:
    entries = chunk_entries(b"large message", 3, deliver_at_time=STORED_MS + 10_000)
    play = Play(reread=True)
    with serving(*entries) as peer:
        play.stage.service_url = peer.url
        parts = list(zip(AT, entries, strict=True)) if bytes_kept else []
        play(frame(4, 30), events=[replace(NOT_KEPT, bytes_kept=bytes_kept)], parts=parts, at_s=0)
    assert play.summary.oldest_to_reread == Position(1, 3)
    assert play.state("parts") == {}


@pytest.mark.parametrize(
    ("entries", "due_s", "reason"),
    [
        pytest.param(
            chunk_entries(b"large message", 3, deliver_at_time=STORED_MS + 10_000)[:2],
            10,
            "delayed_trimmed",
            id="trimmed",
        ),
        pytest.param(
            chunk_entries(b"large message", 3, deliver_at_time=STORED_MS + 10_000)[:2],
            0,
            "chunk_trimmed",
            id="trimmed and due at once",
        ),
        pytest.param(
            chunk_entries(b"large message", 3, uuid="q-1", deliver_at_time=STORED_MS + 10_000),
            10,
            "chunk_mismatch",
            id="of another message",
        ),
        pytest.param(
            chunk_entries(b"large message", 4, deliver_at_time=STORED_MS + 10_000)[:3],
            10,
            "chunk_mismatch",
            id="not all",
        ),
        pytest.param([b"\0\0\xff\xffgarbage"] * 3, 10, "malformed_entry", id="unreadable"),
        pytest.param(
            chunk_entries(bytes(2000), 3, deliver_at_time=STORED_MS + 10_000),
            10,
            "too_large",
            id="too large",
        ),
    ],
)
@pytest.mark.parametrize("reread", [False, True])
def test_chunks_that_a_marker_lists_falsely_wait_for_nothing(
    entries: list[bytes], due_s: int, reason: str, reread: bool
) -> None:
    play = Play(reread=reread)
    play.stage.limits = Limits(max_message_bytes=1000)
    with serving(*entries) as peer:
        play.stage.service_url = peer.url
        report = TaskReport(
            AT[-1], STORED_MS, {}, [replace(NOT_KEPT, deliver_ms=STORED_MS + 1000 * due_s)]
        )
        rejected, summary = play.report(report)
    assert rejected == RejectedPositions(Reason(reason), (Position(1, 3),))
    assert (summary.delayed_count, summary.next_due_ms, summary.oldest_to_reread) == (0, None, None)
    assert [name for name in ("parts", "separate") if play.state(name)] == []


def test_a_marker_takes_no_chunk_of_a_message_that_waits() -> None:
    entries = chunk_entries(b"large message", 3, deliver_at_time=STORED_MS + 10_000)
    play = Play()
    play(
        events=[replace(NOT_KEPT, bytes_kept=True)],
        parts=list(zip(AT, entries, strict=True)),
        at_s=0,
    )
    with Peer([*zip(AT[:2], entries, strict=False), (Position(1, 8), entries[2])]) as peer:
        play.stage.service_url = peer.url
        forged = replace(NOT_KEPT, positions=(*AT[:2], Position(1, 8)), deliver_ms=STORED_MS + 5000)
        report = TaskReport(Position(1, 9), STORED_MS, {}, [forged])
        rejected, _ = play.report(report)
    assert rejected == RejectedPositions(MALFORMED_MARKER, (Position(1, 3),))
    assert play(at_s=10) == [b"large message"]


def cancel(by: Any, target: str, entry_id: int, at_s: int = 0) -> Cancel:
    return Cancel(by, target, Position(1, entry_id), STORED_MS + 1000 * at_s)


def test_cancelled_messages_are_rejects_with_their_bytes_when_they_would_have_been_due() -> None:
    play = Play()
    frames = [frame(0, 30, "a"), frame(1, 30, "b"), frame(2, 30, "a"), frame(3, 31, "c")]
    play(*frames, at_s=0)
    assert play(events=[cancel("key", "a", 7), cancel("id", "1:3", 8)], at_s=1) == []
    assert play.rejects == []
    assert play(at_s=40) == [b"1:1"]
    expected = entries_of(b"".join(frames))
    assert [(reject.position.entry_id, reject.reason, reject.entry) for reject in play.rejects] == [
        (entry_id, "cancelled", expected[Position(1, entry_id)]) for entry_id in (0, 2, 3)
    ]


def test_a_cancel_hits_what_stands_before_it_and_is_due_after_it() -> None:
    play = Play()
    play(
        frame(0, 3, "a"),
        frame(1, 9, "a"),
        frame(8, 9, "a"),
        events=[cancel("key", "a", 5, at_s=4)],
        at_s=2,
    )
    assert play(at_s=9) == [b"1:0", b"1:8"]
    assert [reject.position.entry_id for reject in play.rejects] == [1]


def test_a_cancel_of_one_message_of_a_batch_leaves_the_others() -> None:
    play = Play()
    frames = [frame(0, 30, batch=3), frame(1, 30, batch=2), frame(2, 30)]
    play(*frames, at_s=0)
    play(
        events=[cancel("id", "1:0:1", 7), cancel("id", "1:1", 8), cancel("id", "1:2:0", 9)], at_s=1
    )
    assert play(at_s=30) == [b"1:0:0", b"1:0:2", b"1:2"]
    entries = entries_of(b"".join(frames))
    assert [(reject.position.entry_id, reject.detail, reject.entry) for reject in play.rejects] == [
        (0, "messages 1 of the batch", entries[Position(1, 0)]),
        (1, "messages 0, 1 of the batch", entries[Position(1, 1)]),
    ]


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        pytest.param({"partition_key": "plain"}, "plain", id="text"),
        pytest.param(
            {"partition_key": "/wD+", "partition_key_b64_encoded": True}, "/wD+", id="binary"
        ),
        pytest.param(
            {"partition_key": "b2s=", "partition_key_b64_encoded": True},
            "b2s=",
            id="text as binary",
        ),
        pytest.param(
            {"partition_key": "???", "partition_key_b64_encoded": True}, "Pz8/", id="no base64"
        ),
    ],
)
def test_a_cancel_by_key_hits_small_and_large_messages_alike(
    fields: dict[str, Any], key: str
) -> None:
    play = Play()
    at = tuple(Position(1, number) for number in range(3))
    large = chunk_entries(b"large message", 3, deliver_at_time=STORED_MS + 30_000, **fields)
    waits = DelayedLargeMessage(at, STORED_MS + 30_000, True, at[-1])
    play(
        frame(4, 30, **fields),
        frame(5, 30, "other"),
        events=[waits],
        parts=list(zip(at, large, strict=True)),
        at_s=0,
    )
    play(events=[cancel("key", key, 7)], at_s=1)
    assert play(at_s=30) == [b"1:5"]
    assert {reject.position.entry_id for reject in play.rejects} == {0, 1, 2, 4}


@pytest.mark.parametrize("others", [[], [frame(2, 5000)]], ids=["alone", "with another"])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("target", [("key", "a"), ("id", "1:7"), ("schedule", "a")])
def test_a_cancel_reaches_a_large_message_if_the_marker_that_completes_it_stands_before(
    target: tuple[str, str], together: bool, others: list[bytes]
) -> None:
    play = Play()
    entries = chunk_entries(
        b"large message", 3, deliver_at_time=STORED_MS + 30_000, partition_key="a"
    )
    chunks = IncompleteMessage(
        ChunkedMessageKey("p", "p-1"), 3, 13, STORED_MS, STORED_MS, AT[1:], 8, 0, True, True
    )
    marker = Marker("p", "p-1", Position(1, 9), AT, STORED_MS, STORED_MS, STORED_MS + 30_000, "a")
    events = [chunks, cancel(*target, 8), marker]
    with serving(*entries) as peer:
        play.stage.service_url = peer.url
        for each in [events] if together else [[event] for event in events]:
            play(*others, events=each, at_s=1)
            others = []
    hit = play.stage.copy()
    assert play(at_s=30) == [b"large message"]
    play.stage = hit
    play(events=[cancel(*target, 10)], at_s=2)
    assert play(at_s=30) == []
    assert [reject.position for reject in play.rejects] == list(AT)


@pytest.mark.parametrize("ahead_s", [0, 35, 100])
def test_a_later_cancel_by_a_sender_whose_clock_is_ahead_does_not_undo_the_first(
    ahead_s: int,
) -> None:
    play = Play()
    play(frame(0, 30, "a"), frame(1, 50, "a"), frame(2, 70, "a"), at_s=0)
    play(events=[cancel("key", "a", 5, at_s=1)], at_s=1)
    play(frame(6, 40, "a"), frame(7, 150, "a"), at_s=2)
    play(events=[cancel("key", "a", 8, at_s=ahead_s)], at_s=3)
    late = [b"1:6"] if ahead_s > 40 else []
    assert play(at_s=200) == late
    play(at_s=201)
    assert not play.state("cancels")


def parts_of(frames: bytes, *parts: tuple[int | None, int | None]) -> list[pa.RecordBatch]:
    return [
        row for part in parts for row in delayed_rows(SOURCE, memoryview(frames), BatchRange(*part))
    ]


@pytest.mark.parametrize("reread", [False, True])
def test_a_range_that_ends_inside_a_delayed_batch_delivers_its_messages_and_the_next_range_the_others(
    reread: bool,
) -> None:
    play = Play(reread=reread)
    batch = frame(0, 30, batch=5)
    play(rows=parts_of(batch, (None, 1)), at_s=0)
    assert play(at_s=30) == [b"1:0:0", b"1:0:1"]
    assert play(rows=parts_of(batch, (1, 2)), at_s=31) == [b"1:0:2"]
    assert play(rows=parts_of(batch, (2, None)), at_s=None) == []
    assert play(at_s=31) == [b"1:0:3", b"1:0:4"]
    play(at_s=32)
    assert [name for name in ("parts", "separate", "snapshots") if play.state(name)] == []


@pytest.mark.parametrize("others", [[], [frame(1, 5000)]], ids=["alone", "with another"])
@pytest.mark.parametrize("read_s", [11, 31], ids=["before it is due", "after"])
def test_the_rest_of_a_batch_is_cancelled_as_its_first_part_would_have_been(
    read_s: int, others: list[bytes]
) -> None:
    """It is read after a stop, with what was stored meanwhile."""
    play = Play()
    batch = frame(0, 30, "a", batch=3)
    play(*others, rows=parts_of(batch, (None, 0)), at_s=0)
    assert play(at_s=30) == [b"1:0:0"]
    # The first micro-batch after the stop has not read the cancel.
    backlog_s = 9
    assert play(rows=parts_of(batch, (0, None)), at_s=backlog_s) == []
    play(events=[cancel("key", "a", 7, at_s=10)], at_s=read_s)
    play(at_s=31)
    assert [(reject.reason, reject.position) for reject in play.rejects] == [
        ("cancelled", Position(1, 0))
    ]
    assert play.values == [b"1:0:0"]


def test_a_batch_whose_rest_is_delivered_at_once_leaves_nothing() -> None:
    play = Play()
    play(rows=parts_of(frame(0, 30, batch=3), (None, 0)), at_s=0)
    # Without [delay] enabled, the task delivers the rest.
    play.stage.delay = DelayOptions(enabled=False, settings=SMALL)
    assert play(at_s=30) == [b"1:0:0"]
    play(at_s=31)
    assert [name for name in ("parts", "separate", "snapshots") if play.state(name)] == []


def test_two_parts_that_come_before_they_are_due_and_are_all_of_a_delayed_batch_are_delivered_whole() -> (
    None
):
    play = Play()
    batch = frame(0, 30, batch=3)
    play(rows=parts_of(batch, (None, 1)), at_s=0)
    play(rows=parts_of(batch, (1, None)), at_s=1)
    assert play(at_s=30) == [b"1:0:0", b"1:0:1", b"1:0:2"]
    assert not play.state("separate")


def test_parts_of_a_delayed_batch_that_come_before_it_is_due_are_delivered_together() -> None:
    play = Play()
    batch = frame(0, 30, "a", batch=5)
    play(frame(1, 30), rows=parts_of(batch, (0, 1)), at_s=0)
    play(rows=parts_of(batch + frame(2, 30), (1, 3)), at_s=1)
    assert play.summary.delayed_count == 3
    play(events=[cancel("id", "1:0:2", 7)], at_s=2)
    assert play(at_s=30) == [b"1:0:1", b"1:0:3", b"1:1", b"1:2"]


def test_what_waits_separately_is_readable_by_later_releases_and_newer_ones_are_refused() -> None:
    large = (
        '{"version": 1, "positions": [[1, 0], [1, 1]], "bytes_kept": true, "batch_range": null, '
        '"stands_at": {"ledger_id": 1, "entry_id": 9}, '
        '"key": {"producer_name": "p", "uuid": "p-1"}}'
    )
    part = (
        '{"version": 1, "positions": [[1, 2]], "bytes_kept": true, "batch_range": {"after": null, '
        '"until": 3}, "stands_at": {"ledger_id": 1, "entry_id": 2},'
        ' "key": null}'
    )
    positions = (Position(1, 0), Position(1, 1))
    key = ChunkedMessageKey("p", "p-1")
    of_large = SeparatelyStored(positions, True, Position(1, 9), key=key)
    of_part = SeparatelyStored((Position(1, 2),), True, Position(1, 2), BatchRange(None, 3))
    for golden, message in (
        (large, of_large),
        (part, of_part),
    ):
        assert separately_stored_from_json(golden) == message
        assert json.loads(separately_stored_to_json(message)) == json.loads(golden)
    with pytest.raises(OffsetError, match="newer Ledgerlake"):
        separately_stored_from_json('{"version": 2}')


def test_of_many_cancels_of_a_key_only_those_that_hit_something_more_are_kept() -> None:
    play = Play()
    play(frame(0, 30, "a"), at_s=0)
    for number in range(50):
        play(events=[cancel("key", "a", 5 + number, at_s=number % 3)], at_s=3)
    assert len(cancels_from_json(play.state("cancels")[()][0])[0]) == 1


def test_a_cancel_is_kept_until_all_that_waited_then_has_left() -> None:
    play = Play()
    play(frame(0, 30, "a"), frame(1, 50, "b"), at_s=0)
    play(events=[cancel("key", "a", 5)], at_s=1)
    play(at_s=40)
    assert play.state("cancels")
    play(at_s=50)
    assert not play.state("cancels")


def test_a_cancel_where_nothing_waits_is_not_kept() -> None:
    play = Play()
    play(frame(0, 1), at_s=0)
    play(at_s=1)
    play(events=[cancel("key", "a", 5)], at_s=2)
    assert not play.state("cancels")


def test_too_many_cancels_are_refused_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ledgerlake.operators.controls.MOST_CANCELS", 2)
    play = Play()
    play(frame(0, 30, "c"), at_s=0)
    play(events=[cancel("key", key, 5 + number) for number, key in enumerate("abc")], at_s=1)
    assert [(reject.position.entry_id, reject.reason) for reject in play.rejects] == [
        (7, "cancel_refused")
    ]
    assert play(at_s=30) == [b"1:0"]


def test_cancels_that_name_too_much_are_refused_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ledgerlake.operators.controls.MOST_CANCEL_BYTES", 6)
    play = Play()
    play(frame(0, 30, "c"), at_s=0)
    play(events=[cancel("key", "aaa", 5)], at_s=1)
    play(events=[cancel("key", "bbb", 6), cancel("key", "ccc", 7)], at_s=2)
    assert [(reject.position.entry_id, reject.reason) for reject in play.rejects] == [
        (7, "cancel_refused")
    ]


def test_an_entry_of_which_several_cancels_are_refused_is_one_reject(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ledgerlake.operators.controls.MOST_CANCELS", 1)
    play = Play()
    play(frame(0, 30, "c"), at_s=0)
    play(events=[cancel("key", key, 5) for key in "abcd"], at_s=1)
    assert [(reject.position.entry_id, reject.reason) for reject in play.rejects] == [
        (5, "cancel_refused")
    ]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("id=12:34", ("id", "12:34")),
        ("id=12:34:5", ("id", "12:34:5")),
        ("id=1:2;3:4", ("id", "3:4")),
        ("key=a=b", ("key", "a=b")),
        ("key=", None),
        ("id=x", None),
        pytest.param(
            "id=CP///////////wEQ////////////AQ==", None, id="the id before all, serialised"
        ),
        ("id=9223372036854775808:1", None),
        ("id=1:9999999999999999999", None),
        pytest.param("id=" + "[" * 200_000, None, id="lists in lists"),
        pytest.param("id=" + "9" * 5000 + ":1", None, id="more digits than a number has"),
        ("12:34", None),
        ("", None),
    ],
)
def test_a_cancel_names_an_id_or_a_key(text: str, target: tuple[str, str] | None) -> None:
    parsed = parse_cancel(text, Position(1, 1), 5)
    assert (parsed and (parsed.by, parsed.target)) == target


def test_cancels_in_state_are_readable_by_later_releases_and_newer_ones_are_refused() -> None:
    golden = (
        '{"version": 1, "cancels": ['
        '{"by": "key", "target": "a", "position": {"ledger_id": 1, "entry_id": 5}, "time_ms": 7, '
        '"until_ms": 9},'
        ' {"by": "id", "target": "1:2:3", "position": {"ledger_id": 1, "entry_id": 5}, "time_ms": '
        '7, "until_ms": 9}'
        '], "marked": {}, "pauses": {"since_ms": null, "ended_ms": []}}'
    )
    cancels, marked, pauses = cancels_from_json(golden)
    assert not marked
    assert json.loads(cancels_to_json(cancels.all, marked, pauses)) == json.loads(golden)
    assert cancels.is_cancelled(Position(1, 4), -1, "a", 8)
    assert cancels.is_cancelled(Position(1, 2), 3, None, 8)
    with pytest.raises(OffsetError, match="newer Ledgerlake"):
        cancels_from_json('{"version": 2}')


@pytest.fixture
def query(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Say which query's worker process, just started, this is."""

    def become(name: str) -> None:
        bucket_storage._swept_s.clear()
        bucket_storage._recent.__init__(10**6)  # type: ignore[misc]
        monkeypatch.setattr(delayed, "query_id_of_task", lambda: name)

    return become


def test_two_streams_with_one_folder_leave_each_others_messages_alone(
    tmp_path: Path, query: Callable[[str], None]
) -> None:
    plays = {name: Play(folder=Place(str(tmp_path))) for name in ("a", "b")}
    for entry_id in range(3):
        for name, play in plays.items():
            query(name)
            play(frame(entry_id, 30 + entry_id), at_s=0)
            for path in tmp_path.glob("**/*"):
                os.utime(path, (path.stat().st_mtime - 90_000,) * 2)
    for name, play in plays.items():
        query(name)
        assert play(at_s=40) == [b"1:0", b"1:1", b"1:2"]


def test_a_batch_that_is_run_again_from_an_older_state_still_finds_its_buckets(
    tmp_path: Path, query: Callable[[str], None]
) -> None:
    query("a")
    play = Play(folder=Place(str(tmp_path)))
    for entry_id in range(6):
        play(frame(entry_id, 30 + entry_id), at_s=0)
    before = play.stage.copy()
    for entry_id in range(6, 30):
        play(frame(entry_id, 30 + entry_id), at_s=0)
    assert len(play(at_s=100)) == 30
    play(at_s=101)
    query("a")
    play.stage = before
    assert len(play(at_s=100)) == 6


def test_flow_has_no_columns_that_pandas_would_round() -> None:
    assert {str(column.type) for column in STAGE_ROWS} == {"string", "int32", "int64", "binary"}
