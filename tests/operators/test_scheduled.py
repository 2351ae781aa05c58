"""How a task finds schedules, and which messages with the properties it rejects."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from ledgerlake.assembly.assembler import Assembled, Assembly
from ledgerlake.assembly.chunk_entries import read_chunk
from ledgerlake.assembly.rules import Chunk, ChunkedMessageKey, Limits
from ledgerlake.decode import schema
from ledgerlake.decode.messages import WHOLE_BATCH, BatchRange, decode_bundle
from ledgerlake.decode.split import entries_of
from ledgerlake.delay.tracker import DelaySettings
from ledgerlake.operators.local_assembly import MemoryEntries
from ledgerlake.operators.schedule_events import (
    PauseChanged,
    Scheduled,
    ScheduleEvent,
    ScheduleEvents,
)
from ledgerlake.operators.scheduled import (
    DelayedFrames,
    find_in_due,
    find_in_frames,
    find_in_messages,
    with_occurrences,
)
from ledgerlake.operators.stage_rows import DelayedLargeMessage
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.schedules.cancel_messages import TaskCancels
from ledgerlake.schedules.cancels import Cancel
from ledgerlake.schedules.repetition import RepetitionRate
from ledgerlake.wire import commands
from ledgerlake.wire.chunks import Marker, encode_chunks, encode_marker, parse_marker, promise
from ledgerlake.wire.entry import encode_batch, encode_entry
from ledgerlake.wire.limits import MAX_TIME_MS
from ledgerlake.wire.message_id import Position
from tests.chunks import chunk_entries
from tests.operators.stage import SOURCE
from tests.operators.test_delayed import Play
from tests.operators.test_delayed import frame as delayed_frame
from tests.peer import Peer

STORED_MS = 1_700_000_000_000


def scheduled_frame(deliver_ms: int | None, names: dict[str, str]) -> bytes:
    return frame(0, deliver_ms, None, **names)


def properties(names: dict[str, str]) -> list[pb.KeyValue]:
    return [pb.KeyValue(key=f"ledgerlake.{name}", value=text) for name, text in names.items()]


def frame(entry_id: int, deliver_ms: int | None = None, batch: list[dict[str, str]] | None = None, **names: str) -> bytes:  # fmt: skip
    """An entry with properties; a batch has them in its messages."""
    fields: dict[str, Any] = {} if deliver_ms is None else {"deliver_at_time": deliver_ms}
    metadata = pb.MessageMetadata(
        producer_name="p",
        sequence_id=entry_id,
        publish_time=5,
        properties=properties(names),
        **fields,
    )
    value = b"%d" % entry_id
    if batch is not None:
        metadata.num_messages_in_batch = len(batch)
        singles = [
            pb.SingleMessageMetadata(payload_size=0, properties=properties(names))
            for names in batch
        ]
        value = encode_batch([(single, value) for single in singles])
    broker = pb.BrokerEntryMetadata(broker_timestamp=STORED_MS + entry_id)
    return commands.message(1, 7, entry_id, encode_entry(metadata, value, broker))


def in_frames(
    frames: bytes | memoryview, first: BatchRange = WHOLE_BATCH
) -> tuple[DelayedFrames, list[ScheduleEvent]]:
    """What a task finds in delayed entries: the piece that is left, and the events."""
    schedules = ScheduleEvents()
    found = find_in_frames(memoryview(frames), first, schedules)
    return found, list(schedules.in_order(lambda _: 0))


def in_messages(
    frames: bytes, *, delays_messages: bool = True
) -> tuple[Any, list[ScheduleEvent], list[Any]]:
    """What a task finds in messages: those that are kept, the events, and the rejects."""
    schedules = ScheduleEvents()
    kept, rejects = find_in_messages(
        decoded(frames), frames, schedules, delays_messages=delays_messages
    )
    return kept, list(schedules.in_order(lambda _: 0)), rejects


def decoded(frames: bytes) -> Any:
    (bundle,) = decode_bundle(frames, SOURCE)
    return bundle.messages.select(schema.MESSAGES.names)


def test_ids_of_delayed_entries_are_found_without_touching_the_frames() -> None:
    frames = memoryview(
        frame(0, STORED_MS + 9_000)
        + frame(1, STORED_MS + 9_000, schedule="a")
        + frame(2, 1, schedule="b", expires="9")
    )
    found, events = in_frames(frames)
    assert found.frames.obj is frames.obj
    assert events == [
        Scheduled("a", Position(7, 1), STORED_MS + 1, STORED_MS + 9_000),
        Scheduled("b", Position(7, 2), STORED_MS + 2, STORED_MS + 2),
    ]
    assert not found.rejects


@pytest.mark.parametrize(
    ("batch_range", "rejected"), [(BatchRange(until=0), [0, 2]), (BatchRange(after=0), [2])]
)
def test_a_delayed_entry_with_a_bad_id_or_expiry_is_rejected_at_once_and_the_others_stay(
    batch_range: BatchRange, rejected: list[int]
) -> None:
    bad = [frame(0, 9, schedule=""), frame(2, 9, schedule="ok", expires="tomorrow")]
    frames = memoryview(bad[0] + frame(1, 9, schedule="a") + bad[1] + frame(3, 9))
    found, events = in_frames(frames, batch_range)
    assert [position.entry_id for position in entries_of(found.frames)] == [1, 3]
    assert found.first_entry == WHOLE_BATCH
    assert events == [Scheduled("a", Position(7, 1), STORED_MS + 1, STORED_MS + 1)]
    assert [reject.position.entry_id for reject in found.rejects] == rejected
    why = {0: "1 to 200", 2: "ISO-8601"}
    for reject in found.rejects:
        assert reject.reason == "bad_schedule"
        assert why[reject.position.entry_id] in reject.detail
    assert all(reject.entry for reject in found.rejects)


def test_the_names_in_a_value_mean_nothing() -> None:
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=1, publish_time=5, deliver_at_time=9
    )
    frames = memoryview(
        commands.message(1, 7, 0, encode_entry(metadata, b"ledgerlake.schedule ledgerlake.expires"))
    )
    found, events = in_frames(frames)
    assert (events, found.rejects) == ([], [])


def test_messages_that_are_delivered_at_once_have_schedules_too_also_in_a_batch() -> None:
    frames = (
        frame(0)
        + frame(1, schedule="a")
        + frame(2, batch=[{}, {"schedule": "b"}, {"schedule": "x" * 201}])
    )
    messages, events, rejects = in_messages(frames)
    assert messages["message_id"].to_pylist() == ["7:0", "7:1", "7:2:0", "7:2:1"]
    assert events == [
        Scheduled("a", Position(7, 1), STORED_MS + 1),
        Scheduled("b", Position(7, 2), STORED_MS + 2),
    ]
    (reject,) = rejects
    assert (reject.reason, reject.position, reject.batch_index) == (
        "bad_schedule",
        Position(7, 2),
        2,
    )
    assert reject.entry is not None


def test_a_delayed_batch_is_opened_when_it_is_due_and_its_messages_with_an_id_are_rejected() -> (
    None
):
    frames = frame(0, 9, batch=[{"cancel": "key=a"}, {"schedule": "a"}, {"expires": "5"}])
    assert in_frames(frames)[1] == []
    messages, (reject,) = find_in_due(decoded(frames), frames, 10)
    assert messages["message_id"].to_pylist() == ["7:0:0"]
    assert (reject.reason, reject.batch_index) == ("bad_schedule", -1)
    assert reject.detail.startswith("messages 1, 2 of the batch: a delayed message")


def test_a_copy_of_a_delivered_message_is_no_schedule_also_in_a_delayed_batch() -> None:
    frames = frame(
        0, 9, batch=[{"schedule": "a", "occurrence": "1"}, {"pause": "all", "occurrence": "2"}]
    )
    messages, rejects = find_in_due(decoded(frames), frames, 10)
    assert (messages["message_id"].to_pylist(), rejects) == (["7:0:0", "7:0:1"], [])


@pytest.mark.parametrize(("clock_ms", "delivered"), [(None, 2), (99, 2), (100, 2), (101, 1)])
def test_a_message_expires_by_the_time_of_the_micro_batch_that_releases_it(clock_ms: int | None, delivered: int) -> None:  # fmt: skip
    frames = frame(0, 9, expires="100") + frame(1, 9, expires="1000")
    messages, rejects = find_in_due(decoded(frames), frames, clock_ms)
    assert messages.num_rows == delivered
    assert [reject.reason for reject in rejects] == ["expired"] * (2 - delivered)
    times = r"it expired at 1970-01-01T[0-9:.]+Z and was released at 1970-01-01T[0-9:.]+Z"
    assert all(re.fullmatch(times, reject.detail or "") for reject in rejects)


def test_schedules_beyond_the_room_in_a_task_are_rejected_in_words() -> None:
    schedules = ScheduleEvents(max_bytes=130)
    frames = b"".join(frame(number, 9, schedule="a") for number in range(3))
    found = find_in_frames(memoryview(frames), WHOLE_BATCH, schedules)
    assert [event.position.entry_id for event in schedules.in_order(lambda _: 0)] == [0, 1]
    assert [(reject.position.entry_id, reject.reason) for reject in found.rejects] == [
        (2, "schedule_refused")
    ]
    frames = frame(0, schedule="a")
    messages, (reject,) = find_in_messages(decoded(frames), frames, schedules, delays_messages=True)
    assert (messages.num_rows, reject.reason) == (0, "schedule_refused")
    assert "more schedules" in reject.detail


def test_without_delays_nothing_is_a_bad_schedule_and_what_waits_can_still_be_replaced_and_cancelled() -> (
    None
):
    frames = (
        frame(0, schedule="a", cron="never") + frame(1, schedule="") + frame(2, cancel="schedule=b")
    )
    messages, events, rejects = in_messages(frames, delays_messages=False)
    assert (messages.num_rows, rejects) == (3, [])
    assert [event.position.entry_id for event in events] == [0, 2]


def test_a_bad_property_in_many_messages_of_a_batch_is_one_reject_that_lists_them() -> None:
    frames = frame(3, batch=[{"schedule": ""}, {}, {"schedule": "x" * 201}, {"pause": "now"}])
    messages, _, (reject,) = in_messages(frames)
    assert messages["batch_index"].to_pylist() == [1]
    assert (reject.position, reject.batch_index, reject.reason) == (
        Position(7, 3),
        -1,
        "bad_schedule",
    )
    assert reject.entry == entries_of(frames)[Position(7, 3)]
    assert reject.detail.startswith("messages 0, 2, 3 of the batch: ")
    assert "has 0 characters" in reject.detail


def test_cancels_of_schedules_are_found_beside_the_schedules_and_have_no_limit_of_their_own() -> (
    None
):
    frames = frame(
        0,
        batch=[
            {"cancel": "schedule=a"},
            {"cancel": "key=a"},
            {"schedule": "b", "cancel": "schedule=c"},
        ],
    )
    messages, events, rejects = in_messages(frames)
    assert (messages.num_rows, rejects) == (3, [])
    assert events == [
        Cancel("schedule", "a", Position(7, 0), STORED_MS),
        Scheduled("b", Position(7, 0), STORED_MS),
        Cancel("schedule", "c", Position(7, 0), STORED_MS),
    ]
    assert [cancel.by for cancel in TaskCancels().take(decoded(frames))[0]] == ["key"]


@pytest.mark.parametrize("broker_ms", [None, 5, STORED_MS])
@pytest.mark.parametrize("publish_ms", [0, 7, STORED_MS - 9, MAX_TIME_MS])
def test_a_message_is_stored_at_the_same_time_in_every_form(
    publish_ms: int, broker_ms: int | None
) -> None:
    own = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=publish_ms)
    own.properties.extend([promise(), *properties({"schedule": "a"})])
    broker = None if broker_ms is None else pb.BrokerEntryMetadata(broker_timestamp=broker_ms)
    places = [Position(7, number) for number in range(3)]
    stamp = encode_entry(own, b"", broker).removesuffix(encode_entry(own, b""))
    chunks = [
        read_chunk(stamp + raw, place)
        for raw, place in zip(encode_chunks(own, b"123456789", 3), places, strict=True)
    ]
    marker = parse_marker(stamp + encode_marker(own, 2, places), Position(7, 3))

    def assembled(*events: Chunk | Marker) -> int:
        assembly = Assembly(Limits(), MemoryEntries())
        (message,) = [
            outcome
            for event in events
            for outcome in (
                assembly.apply_marker(event)
                if isinstance(event, Marker)
                else assembly.arrive(event)
            )
        ]
        assert isinstance(message, Assembled)
        return message.stored_ms

    del own.properties[0]
    small = commands.message(1, 7, 0, encode_entry(own, b"v", broker))
    own.deliver_at_time = MAX_TIME_MS
    delayed = commands.message(1, 7, 0, encode_entry(own, b"v", broker))
    (event,), (waiting,) = in_messages(small)[1], in_frames(delayed)[1]
    assert isinstance(event, Scheduled)
    assert isinstance(waiting, Scheduled)
    stored_ms = publish_ms if broker_ms is None else broker_ms
    assert {
        event.time_ms,
        waiting.time_ms,
        assembled(*chunks),
        assembled(*chunks[1:], marker),
    } == {stored_ms}


def test_a_replaced_message_of_which_only_the_topic_has_the_bytes_is_rejected_by_its_position() -> (
    None
):
    play = Play(reread=True)
    chunks = (Position(1, 1), Position(1, 2))
    large = DelayedLargeMessage(
        chunks,
        STORED_MS + 10_000,
        True,
        chunks[-1],
        schedule_id="large",
        stored_ms=STORED_MS,
    )
    events: list[Any] = [
        large,
        Scheduled("small", Position(1, 0), STORED_MS, STORED_MS + 10_000),
    ]
    play(
        delayed_frame(0, 10),
        at_s=0,
        events=events,
        parts=[(position, b"chunk") for position in chunks],
    )
    play(
        at_s=5,
        events=[
            Scheduled("small", Position(1, 5), STORED_MS),
            Scheduled("large", Position(1, 6), STORED_MS),
        ],
    )
    assert play.rejects == []
    play(at_s=10)
    assert [(reject.reason, reject.position, reject.entry) for reject in play.rejects] == [
        ("replaced", position, None) for position in (Position(1, 0), *chunks)
    ]
    assert play.values == []
    assert not any(play.state(name) for name in ("schedule_blocks", "cancels", "separate", "parts"))


def test_messages_that_were_replaced_leave_the_stage_together_in_frames_of_bounded_size() -> None:
    play = Play(settings=DelaySettings())
    large = commands.message(1, 1, 999, encode_entry(pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=5, deliver_at_time=STORED_MS + 10_000), b"x" * 2_000_000))  # fmt: skip
    ids: list[Any] = [Scheduled(f"{number}", Position(1, number), STORED_MS, STORED_MS + 10_000) for number in [*range(500), 999]]  # fmt: skip
    play(*(delayed_frame(number, 10) for number in range(500)), large, at_s=0, events=ids)
    play(
        at_s=5,
        events=[Scheduled(f"{number}", Position(2, 0), STORED_MS) for number in [*range(500), 999]],
    )
    play(at_s=10)
    assert Counter(reject.reason for reject in play.rejects) == {"replaced": 501}
    assert play.stage.calls <= 4


def test_a_message_that_was_not_added_to_the_index_replaces_nothing_and_leaves_nothing() -> None:
    play = Play()
    play(
        delayed_frame(0, 10),
        at_s=0,
        events=[Scheduled("a", Position(1, 0), STORED_MS, STORED_MS + 10_000)],
    )
    known: list[Any] = [Scheduled("a", Position(1, 0), STORED_MS + 1, STORED_MS + 10_000)]
    assert play(delayed_frame(0, 10), at_s=5, events=known) == []
    assert [reject.reason for reject in play.rejects] == ["delayed_known"]
    assert play(at_s=10) == [b"1:0"]
    assert not any(play.state(name) for name in ("schedule_blocks", "cancels"))


@pytest.mark.parametrize("is_forged", [False, True])
def test_a_marker_that_lists_the_entry_of_another_sender_changes_nothing_for_its_schedule(
    is_forged: bool,
) -> None:
    play = Play()
    play(
        delayed_frame(0, 100),
        at_s=0,
        events=[Scheduled("visit", Position(1, 0), STORED_MS, STORED_MS + 100_000)],
    )
    chunks = (Position(1, 1), Position(1, 2))
    forged = DelayedLargeMessage(chunks, STORED_MS + 50_000, False, chunks[-1], ChunkedMessageKey("evil", "evil-1"), chunks[:1], "visit", STORED_MS)  # fmt: skip
    with Peer(
        [(Position(1, 1), chunk_entries(b"large message", 3)[0]), (Position(1, 2), b"x")]
    ) as peer:
        play.stage.service_url = peer.url
        moved = Scheduled("visit", Position(1, 2), STORED_MS + 1000, STORED_MS + 60_000)
        play(delayed_frame(2, 60), at_s=2, events=[*([forged] if is_forged else []), moved])
    assert (play(at_s=60), play(at_s=100)) == ([b"1:2"], [])


def test_a_delayed_message_with_a_rule_is_the_schedule_of_a_message_that_repeats() -> None:
    frames = memoryview(frame(0, STORED_MS + 9_000, schedule="a", cron="0 9 * * *"))
    found, events = in_frames(frames)
    assert found.frames.obj is frames.obj
    ((_, entry),) = entries_of(frames).items()
    rate = RepetitionRate(1, len(entry))
    assert events == [Scheduled("a", Position(7, 0), STORED_MS, STORED_MS + 9_000, rate)]


def test_a_message_that_repeats_counts_from_its_publish_time_if_the_broker_adds_none() -> None:
    names = {"schedule": "a", "every": "PT1S"}
    metadata = pb.MessageMetadata(
        producer_name="p",
        sequence_id=1,
        publish_time=STORED_MS,
        deliver_at_time=9,
        properties=properties(names),
        uncompressed_size=1_000_000,
    )
    _, events = in_frames(commands.message(1, 7, 0, encode_entry(metadata, b"v")))
    rate = RepetitionRate(86_400, 86_400 * 1_000_000)
    assert events == [Scheduled("a", Position(7, 0), STORED_MS, STORED_MS, rate)]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ({"cron": "0 9 * * *"}, "needs an id"),
        ({"schedule": "a", "cron": "0 25 * * *"}, "hour"),
        ({"schedule": "a", "timezone": "Europe/Berlin"}, "neither"),
        ({"pause": "all"}, "without a delivery time"),
        ({"resume": "schedule=a"}, "without a delivery time"),
    ],
)
def test_a_delayed_message_with_a_rule_that_cannot_be_used_is_a_reject(
    names: dict[str, str], why: str
) -> None:
    found, events = in_frames(scheduled_frame(STORED_MS + 9_000, names))
    (reject,) = found.rejects
    assert (reject.reason, events) == ("bad_schedule", [])
    assert why in reject.detail


@pytest.mark.parametrize(
    ("batch_range", "is_taken"),
    [
        (BatchRange(until=0), True),
        (BatchRange(after=0), False),
        (BatchRange(after=0, until=3), False),
    ],
)
def test_a_message_that_repeats_has_no_parts(batch_range: BatchRange, is_taken: bool) -> None:
    """Some clients say the index 0 of a message that was sent alone."""
    frames = frame(0, STORED_MS + 9_000, schedule="a", cron="0 9 * * *") + frame(
        1, STORED_MS + 9_000
    )
    found, events = in_frames(frames, batch_range)
    kept = [position.entry_id for position in entries_of(found.frames)]
    assert (kept, found.first_entry, found.rejects) == (
        [0, 1] if is_taken else [1],
        WHOLE_BATCH,
        [],
    )
    assert bool(events) == is_taken


@pytest.mark.parametrize("deliver_ms", [None, -5])
def test_a_message_with_a_rule_and_without_a_delivery_time_is_a_reject(
    deliver_ms: int | None,
) -> None:
    frames = frame(0, deliver_ms, schedule="a", cron="0 9 * * *")
    kept, events, (reject,) = in_messages(frames)
    assert (kept.num_rows, events, reject.reason) == (0, [], "bad_schedule")
    assert "needs a delivery time" in reject.detail


def test_a_delayed_message_that_cannot_be_delivered_replaces_nothing() -> None:
    # Properties are UTF-8 text.
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=1, publish_time=5, deliver_at_time=STORED_MS + 9_000
    )
    metadata.properties.add(key="ledgerlake.schedule", value="a")
    metadata.properties.add(key="x", value="yy")
    raw = metadata.SerializeToString().replace(b"yy", b"\xff\xfe")
    entry = len(raw).to_bytes(4, "big") + raw + b"v"
    found, events = in_frames(commands.message(1, 7, 0, entry))
    assert (len(entries_of(found.frames)), events, found.rejects) == (1, [], [])


def test_pauses_are_found_in_the_order_of_their_messages_and_stay_rows() -> None:
    frames = frame(0, batch=[{"pause": "schedule=a"}, {"resume": "all"}, {}]) + frame(
        1, pause="all"
    )
    kept, events, rejects = in_messages(frames)
    assert (kept.num_rows, rejects) == (4, [])
    assert events == [
        PauseChanged(None, Position(7, 0), STORED_MS, resumes=True),
        PauseChanged(None, Position(7, 1), STORED_MS + 1, resumes=False),
        PauseChanged("a", Position(7, 0), STORED_MS, resumes=False),
    ]


def test_a_message_that_was_due_says_that_it_was_delivered_if_a_copy_could_be_a_schedule_or_a_cancel() -> (
    None
):
    frames = (
        frame(0, STORED_MS + 9_001, schedule="a")
        + frame(1, STORED_MS, cancel="key=a")
        + frame(2, 9, expires="10")
    )
    due = with_occurrences(decoded(frames + frame(3, 9, schedule="a", occurrence="7")))
    assert [dict(pairs) for pairs in due["properties"].to_pylist()] == [
        {
            "ledgerlake.schedule": "a",
            "ledgerlake.occurrence": "1",
            "ledgerlake.occurrence_time": "2023-11-14T22:13:29.001Z",
        },
        {
            "ledgerlake.cancel": "key=a",
            "ledgerlake.occurrence": "1",
            "ledgerlake.occurrence_time": "2023-11-14T22:13:20.000Z",
        },
        {"ledgerlake.expires": "10"},
        {"ledgerlake.schedule": "a", "ledgerlake.occurrence": "7"},
    ]


def test_the_copy_of_a_message_that_was_delivered_cancels_nothing() -> None:
    frames = frame(
        0,
        batch=[{"cancel": "schedule=a", "occurrence": "1"}, {"cancel": "key=a", "occurrence": "1"}],
    )
    assert in_messages(frames)[1:] == ([], [])
    assert TaskCancels().take(decoded(frames)) == ([], [])


def test_a_repetition_that_is_sent_to_a_topic_is_an_ordinary_message_there() -> None:
    names = {"schedule": "a", "cron": "0 9 * * *", "occurrence": "3"}
    frames = scheduled_frame(None, names)
    kept, events, rejects = in_messages(frames)
    assert (kept.num_rows, events, rejects) == (1, [], [])
    assert in_frames(scheduled_frame(STORED_MS + 1, names))[1] == []
