"""Delayed messages in the stateful stage: what waits in state, what comes out when, and what a cancel hits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.decode.split import DELAYED, entries_of
from ledgerlake.errors import OffsetError
from ledgerlake.operators.delayed import DelayOptions
from ledgerlake.operators.outcomes import OutcomeDecoder, read_flow
from ledgerlake.operators.rows import FLOW, Report, Standing, Waits, flow_row, report_to_json
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source.options import parse_options
from ledgerlake.state.chunks import Limits
from ledgerlake.state.delay import cancels as cancel_rules
from ledgerlake.state.delay.cancels import Cancel, Cancels, cancels_from_json, cancels_to_json, parse_cancel
from ledgerlake.state.delay.tracker import DelaySettings
from ledgerlake.wire import commands
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import Position
from tests.chunks import chunk_entries
from tests.operators.stage import SOURCE, Stage

if TYPE_CHECKING:
    import pyarrow as pa

    from ledgerlake.operators.rows import Event

STORED_MS = 1_700_000_000_000
SMALL = DelaySettings(min_indexes_per_bucket=3, ledger_step_per_bucket=1, max_indexes_per_segment=2, max_buckets=2)


def frame(entry_id: int, due_s: int, key: str | None = None, ledger_id: int = 1) -> bytes:
    """A delayed entry, due so many seconds after all are stored; its value is its position."""
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=entry_id, publish_time=STORED_MS)
    metadata.deliver_at_time = STORED_MS + 1000 * due_s
    if key is not None:
        metadata.partition_key = key
    broker = pb.BrokerEntryMetadata(broker_timestamp=STORED_MS, index=entry_id)
    value = b"%d:%d" % (ledger_id, entry_id)
    return commands.message(1, ledger_id, entry_id, encode_entry(metadata, value, broker))


class Play:
    """Batches one after another over the same state, and what the last stage makes of them."""

    def __init__(self, **options: Any) -> None:
        self.stage = Stage(Limits(), DelayOptions(**{"settings": SMALL, **options}))
        self.values: list[bytes] = []
        self.rejects: list[RejectedEntry] = []
        self.standing = Standing([])
        self.kinds: list[str] = []

    def __call__(
        self, *frames: bytes, at_s: int | None = None, events: list[Event] | None = None, parts: Any = ()
    ) -> list[bytes]:
        """One batch; the values that were let go."""
        due_ms = None if at_s is None else STORED_MS + 1000 * at_s
        report = Report(Position(9, 9), due_ms, {}, events or [])
        rows = [flow_row(SOURCE, "chunk", position, entry=entry) for position, entry in parts]
        rows += [flow_row(SOURCE, DELAYED, entry=b"".join(frames))] if frames else []
        rows.append(flow_row(SOURCE, "report", note=report_to_json(report)))
        found = self.stage.run(rows)
        self.kinds = [row.kind for row in found]
        before = len(self.values)
        self._settle([pa_row(row) for row in found])
        return self.values[before:]

    def _settle(self, rows: list[pa.RecordBatch]) -> None:
        decoder = OutcomeDecoder(SOURCE, parse_options({"service.url": "pulsar://nowhere:1", "topic": "t"}), 10**6)
        for _, found in read_flow(rows):
            if isinstance(found, Standing):
                self.standing = found
            elif isinstance(found, Cancels):
                decoder.cancels = found
            else:
                for one in decoder.decode(found):  # type: ignore[arg-type]
                    if isinstance(one, list):
                        self.rejects += one
                    else:
                        assert one["delivered_at"].null_count == 0
                        self.values += one["value"].to_pylist()

    def state(self, name: str) -> dict[Any, Any]:
        return self.stage.states[name].values


def pa_row(row: Any) -> pa.RecordBatch:
    source = type(SOURCE)(row.topic, row.partition)
    return flow_row(source, row.kind, Position(row.ledger_id, row.entry_id), row.note, row.entry)


def test_messages_wait_and_come_out_in_order_when_they_are_due() -> None:
    play = Play()
    assert play(frame(0, 30), frame(1, 10), frame(2, 20), at_s=0) == []
    assert (play.standing.waiting, play.standing.next_due_ms) == (3, STORED_MS + 10_000)
    assert play(frame(0, 5, ledger_id=2), at_s=9) == [b"2:0"]
    assert play(at_s=20) == [b"1:1", b"1:2"]
    assert play(at_s=29) == []
    assert play(at_s=30) == [b"1:0"]
    assert (play.standing.waiting, play.standing.next_due_ms) == (0, None)
    play(at_s=31)
    assert play.state("snapshots") == {}


def test_without_a_time_by_the_broker_nothing_is_let_go() -> None:
    play = Play()
    assert play(frame(0, -5), at_s=None) == []
    assert play(at_s=0) == [b"1:0"]


def test_a_batch_in_which_nothing_happens_writes_nothing() -> None:
    play = Play()
    play(frame(0, 30), at_s=0)
    play(at_s=1)
    before = sum(one.writes for one in play.stage.states.values())
    play(at_s=2)
    assert sum(one.writes for one in play.stage.states.values()) == before


def test_what_waited_is_let_go_also_when_delays_are_no_longer_held() -> None:
    play = Play()
    play(frame(0, 30), at_s=0)
    play.stage.delay = DelayOptions(enabled=False, settings=SMALL)
    assert play(at_s=30) == [b"1:0"]


def test_many_messages_leave_in_few_rows() -> None:
    play = Play(settings=DelaySettings(max_indexes_per_segment=2))
    play(*(frame(one, 30 + one % 3) for one in range(500)), at_s=0)
    assert len(play(at_s=40)) == 500
    assert play.kinds == ["due", "report"]


def test_a_large_message_waits_with_its_chunks_and_leaves_nothing() -> None:
    entries = chunk_entries(b"large message", 3)
    at = tuple(Position(1, one) for one in range(3))
    play = Play()
    waits = Waits(at, STORED_MS + 10_000, held=True)
    play(events=[waits], parts=list(zip(at, entries, strict=True)), at_s=0)
    assert len(play.state("parts")) == 3
    assert play(at_s=9) == []
    assert play(at_s=10) == [b"large message"]
    play(at_s=11)
    assert [name for name in ("parts", "large", "snapshots") if play.state(name)] == []


def test_with_reread_only_positions_wait() -> None:
    play = Play(reread=True)
    play(frame(0, 30), frame(1, 30), at_s=0)
    assert play.standing.oldest_waiting == Position(1, 0)
    assert not any(b"1:0" in value[0] for value in play.state("snapshots").values())
    rows = play.stage.run([flow_row(SOURCE, "report", note=report_to_json(Report(Position(9, 9), STORED_MS + 30_000, {}, [])))])  # fmt: skip
    assert [(row.kind, json.loads(row.note).get("positions")) for row in rows[:1]] == [("again", [[1, 0], [1, 1]])]


@pytest.mark.parametrize("reread", [False, True])
def test_the_cursor_does_not_pass_chunks_that_only_the_topic_has(reread: bool) -> None:
    play = Play(reread=reread)
    at = tuple(Position(1, one) for one in (3, 5, 7))
    play(frame(4, 30), events=[Waits(at, STORED_MS + 10_000, held=False)], at_s=0)
    assert play.standing.oldest_waiting == Position(1, 3)
    held = Play(reread=reread)
    parts = list(zip(at, chunk_entries(b"large message", 3), strict=True))
    held(events=[Waits(at, STORED_MS + 10_000, held=True)], parts=parts, at_s=0)
    assert held.standing.oldest_waiting == (Position(1, 3) if reread else None)


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
    assert [(one.position.entry_id, one.reason, one.entry) for one in play.rejects] == [
        (one, "cancelled", expected[Position(1, one)]) for one in (0, 2, 3)
    ]


def test_a_cancel_hits_what_stands_before_it_and_is_due_after_it() -> None:
    play = Play()
    play(frame(0, 3, "a"), frame(1, 9, "a"), frame(8, 9, "a"), events=[cancel("key", "a", 5, at_s=4)], at_s=2)
    assert play(at_s=9) == [b"1:0", b"1:8"]
    assert [one.position.entry_id for one in play.rejects] == [1]


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
    monkeypatch.setattr("ledgerlake.operators.delayed.MOST_CANCELS", 2)
    play = Play()
    play(frame(0, 30, "c"), at_s=0)
    play(events=[cancel("key", key, 5 + number) for number, key in enumerate("abc")], at_s=1)
    assert [(one.position.entry_id, one.reason) for one in play.rejects] == [(7, "cancel_refused")]
    assert play(at_s=30) == [b"1:0"]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("id=12:34", ("id", "12:34")),
        ("id=12:34:5", ("id", "12:34")),
        ("id=1:2;3:4", ("id", "3:4")),
        ("key=a=b", ("key", "a=b")),
        ("key=", None),
        ("id=x", None),
        ("12:34", None),
        ("", None),
    ],
)
def test_a_cancel_names_an_id_or_a_key(text: str, target: tuple[str, str] | None) -> None:
    found = parse_cancel(text, Position(1, 1), 5)
    assert (found and (found.by, found.target)) == target


def test_cancels_in_state_are_readable_by_later_releases_and_newer_ones_are_refused() -> None:
    golden = '{"version": 1, "cancels": [{"by": "key", "target": "a", "position": {"ledger_id": 1, "entry_id": 5}, "time_ms": 7, "until_ms": 9}]}'  # fmt: skip
    cancels = cancels_from_json(golden)
    assert json.loads(cancels_to_json(cancels.all)) == json.loads(golden)
    assert cancels.hit(Position(1, 4), "a", 8)
    assert cancel_rules.VERSION == 1
    with pytest.raises(OffsetError, match="newer Ledgerlake"):
        cancels_from_json('{"version": 2}')


def test_flow_has_no_columns_that_pandas_would_round() -> None:
    assert {str(one.type) for one in FLOW} == {"string", "int32", "int64", "binary"}
