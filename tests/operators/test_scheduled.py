"""How a task finds schedules, and which messages with the properties it rejects."""

from __future__ import annotations

from typing import Any

import pytest

from ledgerlake.decode import schema
from ledgerlake.decode.messages import WHOLE_BATCH, BatchRange, decode_bundle
from ledgerlake.decode.split import entries_of
from ledgerlake.operators import in_task
from ledgerlake.operators.in_task import EventBudget
from ledgerlake.operators.rows import DelayedLargeMessage, Scheduled, TaskEvent
from ledgerlake.operators.scheduled import find_in_due, find_in_frames, find_in_messages
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.entry import encode_batch, encode_entry
from ledgerlake.wire.message_id import Position
from tests.operators.stage import SOURCE
from tests.operators.test_delayed import Play
from tests.operators.test_delayed import frame as delayed_frame

STORED_MS = 1_700_000_000_000


def properties(names: dict[str, str]) -> list[pb.KeyValue]:
    return [pb.KeyValue(key=f"ledgerlake.{name}", value=text) for name, text in names.items()]


def frame(entry_id: int, deliver_ms: int | None = None, batch: list[dict[str, str]] | None = None, **names: str) -> bytes:  # fmt: skip
    """An entry with properties; a batch has them in its messages."""
    fields: dict[str, Any] = {} if deliver_ms is None else {"deliver_at_time": deliver_ms}
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=entry_id, publish_time=5, properties=properties(names), **fields
    )
    value = b"%d" % entry_id
    if batch is not None:
        metadata.num_messages_in_batch = len(batch)
        singles = [pb.SingleMessageMetadata(payload_size=0, properties=properties(names)) for names in batch]
        value = encode_batch([(single, value) for single in singles])
    broker = pb.BrokerEntryMetadata(broker_timestamp=STORED_MS + entry_id)
    return commands.message(1, 7, entry_id, encode_entry(metadata, value, broker))


def decoded(frames: bytes) -> Any:
    (bundle,) = decode_bundle(frames, SOURCE)
    return bundle.messages.select(schema.MESSAGES.names)


def test_ids_of_delayed_entries_are_found_without_touching_the_frames() -> None:
    frames = memoryview(
        frame(0, STORED_MS + 9_000) + frame(1, STORED_MS + 9_000, schedule="a") + frame(2, 1, schedule="b", expires="9")
    )
    found = find_in_frames(frames, WHOLE_BATCH, EventBudget())
    assert found.frames is frames
    assert found.events == [
        Scheduled("a", Position(7, 1), STORED_MS + 1, STORED_MS + 9_000),
        Scheduled("b", Position(7, 2), STORED_MS + 2, STORED_MS + 2),
    ]
    assert not found.rejects


def test_a_delayed_entry_with_a_bad_id_or_expiry_is_rejected_at_once_and_the_others_stay() -> None:
    bad = [frame(0, 9, schedule=""), frame(2, 9, schedule="ok", expires="tomorrow")]
    frames = memoryview(bad[0] + frame(1, 9, schedule="a") + bad[1] + frame(3, 9))
    found = find_in_frames(frames, BatchRange(0, None), EventBudget())
    assert [position.entry_id for position in entries_of(found.frames)] == [1, 3]
    assert found.first_entry == WHOLE_BATCH
    assert [event.schedule_id for event in found.events] == ["a"]
    assert [(reject.position.entry_id, reject.reason) for reject in found.rejects] == [
        (0, "bad_schedule"),
        (2, "bad_schedule"),
    ]
    assert "1 to 200" in found.rejects[0].detail
    assert "ISO-8601" in found.rejects[1].detail
    assert all(reject.entry for reject in found.rejects)


def test_the_names_in_a_value_mean_nothing() -> None:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=5, deliver_at_time=9)
    frames = memoryview(commands.message(1, 7, 0, encode_entry(metadata, b"ledgerlake.schedule ledgerlake.expires")))
    found = find_in_frames(frames, WHOLE_BATCH, EventBudget())
    assert (found.events, found.rejects) == ([], [])


def test_messages_that_are_delivered_at_once_have_schedules_too_also_in_a_batch() -> None:
    frames = frame(0) + frame(1, schedule="a") + frame(2, batch=[{}, {"schedule": "b"}, {"schedule": "x" * 201}])
    messages, events, rejects = find_in_messages(decoded(frames), frames, EventBudget())
    assert messages["message_id"].to_pylist() == ["7:0", "7:1", "7:2:0", "7:2:1"]
    assert events == [
        Scheduled("a", Position(7, 1), STORED_MS + 1),
        Scheduled("b", Position(7, 2), STORED_MS + 2),
    ]
    (reject,) = rejects
    assert (reject.reason, reject.position, reject.batch_index) == ("bad_schedule", Position(7, 2), 2)
    assert reject.entry is not None


def test_a_delayed_batch_is_opened_when_it_is_due_and_its_messages_with_an_id_are_rejected() -> None:
    frames = frame(0, 9, batch=[{}, {"schedule": "a"}, {"expires": "5"}])
    assert find_in_frames(memoryview(frames), WHOLE_BATCH, EventBudget()).events == []
    messages, rejects = find_in_due(decoded(frames), frames, 10)
    assert messages["message_id"].to_pylist() == ["7:0:0"]
    assert [(reject.reason, reject.batch_index) for reject in rejects] == [("bad_schedule", 1), ("bad_schedule", 2)]


@pytest.mark.parametrize(("clock_ms", "delivered"), [(None, 2), (99, 2), (100, 2), (101, 1)])
def test_a_message_expires_by_the_time_of_the_micro_batch_that_releases_it(clock_ms: int | None, delivered: int) -> None:  # fmt: skip
    frames = frame(0, 9, expires="100") + frame(1, 9, expires="1000")
    messages, rejects = find_in_due(decoded(frames), frames, clock_ms)
    assert messages.num_rows == delivered
    assert [reject.reason for reject in rejects] == ["expired"] * (2 - delivered)


def test_schedules_beyond_the_room_in_a_report_are_rejected_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_task, "MAX_TASK_EVENT_BYTES", 700)
    budget = EventBudget()
    frames = b"".join(frame(number, 9, schedule="a") for number in range(3))
    found = find_in_frames(memoryview(frames), WHOLE_BATCH, budget)
    assert len(found.events) == 2
    assert [(reject.position.entry_id, reject.reason) for reject in found.rejects] == [(2, "schedule_refused")]
    frames = frame(0, schedule="a")
    messages, events, (reject,) = find_in_messages(decoded(frames), frames, budget)
    assert (messages.num_rows, events, reject.reason) == (0, [], "schedule_refused")
    assert "more schedules" in reject.detail


def test_a_replaced_message_of_which_only_the_topic_has_the_bytes_is_rejected_by_its_position() -> None:
    play = Play(reread=True)
    chunks = (Position(1, 1), Position(1, 2))
    large = DelayedLargeMessage(chunks, STORED_MS + 10_000, bytes_kept=True)
    events: list[TaskEvent] = [
        large,
        Scheduled("small", Position(1, 0), STORED_MS, STORED_MS + 10_000),
        Scheduled("large", Position(1, 2), STORED_MS, STORED_MS + 10_000),
    ]
    play(delayed_frame(0, 10), at_s=0, events=events, parts=[(position, b"chunk") for position in chunks])
    play(at_s=5, events=[Scheduled("small", Position(1, 5), STORED_MS), Scheduled("large", Position(1, 6), STORED_MS)])
    assert play.rejects == []
    play(at_s=10)
    assert [(reject.reason, reject.position, reject.entry) for reject in play.rejects] == [
        ("replaced", position, None) for position in (Position(1, 0), *chunks)
    ]
    assert play.values == []
    assert not any(play.state(name) for name in ("schedule_blocks", "cancels", "large", "parts"))


def test_a_message_that_was_not_added_to_the_index_replaces_nothing_and_leaves_nothing() -> None:
    play = Play()
    play(delayed_frame(0, 10), at_s=0, events=[Scheduled("a", Position(1, 0), STORED_MS, STORED_MS + 10_000)])
    known: list[TaskEvent] = [Scheduled("a", Position(1, 0), STORED_MS + 1, STORED_MS + 10_000)]
    assert play(delayed_frame(0, 10), at_s=5, events=known) == []
    assert [reject.reason for reject in play.rejects] == ["delayed_known"]
    assert play(at_s=10) == [b"1:0"]
    assert not any(play.state(name) for name in ("schedule_blocks", "cancels"))
