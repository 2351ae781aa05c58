"""The properties of schedules: what they say, and which values are refused."""

from __future__ import annotations

import pytest

from ledgerlake.errors import CorruptEntryError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.chunks import encode_marker, parse_marker
from ledgerlake.wire.message_id import Position
from ledgerlake.wire.schedules import (
    PauseRequest,
    ScheduleProperties,
    fault_of_large,
    occurrence_properties,
    parse_schedule,
    properties_of,
)


@pytest.mark.parametrize(
    ("text", "expires_ms"),
    [
        ("1", 1),
        ("1767225600000", 1_767_225_600_000),
        ("2026-01-01T00:00:00Z", 1_767_225_600_000),
        ("2026-01-01T02:00:00.250+02:00", 1_767_225_600_250),
    ],
)
def test_an_expiry_is_milliseconds_or_a_time_with_a_zone(text: str, expires_ms: int) -> None:
    assert parse_schedule({"ledgerlake.expires": text}) == ScheduleProperties(None, expires_ms)


@pytest.mark.parametrize(
    "time_ms", [1, 9_999_999_999_001, 100_000_000_000_003, 253_402_214_399_999]
)
def test_the_time_of_an_occurrence_is_written_to_the_millisecond(time_ms: int) -> None:
    written = occurrence_properties(1, time_ms)["ledgerlake.occurrence_time"]
    assert parse_schedule({"ledgerlake.expires": written}) == ScheduleProperties(None, time_ms)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-5",
        "soon",
        "1e12",
        "٣",
        "9" * 30,
        "253402214400000",
        "2026-01-01T00:00:00",
        "2026-13-01T00:00:00Z",
    ],
)
def test_any_other_expiry_is_refused(text: str) -> None:
    with pytest.raises(CorruptEntryError, match="neither milliseconds since 1970 nor") as refused:
        parse_schedule({"ledgerlake.expires": text})
    assert refused.value.reason == "bad_schedule"


@pytest.mark.parametrize("schedule_id", ["a", "ü" * 200, " ", "a=b"])
def test_an_id_is_any_text_of_1_to_200_characters(schedule_id: str) -> None:
    assert (
        parse_schedule({"ledgerlake.schedule": schedule_id, "other": "x"}).schedule_id
        == schedule_id
    )


@pytest.mark.parametrize(
    ("schedule_id", "why"), [("", "0 char"), ("a" * 201, "201 char"), (b"\xff", "not UTF-8")]
)
def test_any_other_id_is_refused(schedule_id: object, why: str) -> None:
    with pytest.raises(CorruptEntryError, match=why) as refused:
        parse_schedule({"ledgerlake.schedule": schedule_id})
    assert refused.value.reason == "bad_schedule"


def test_a_message_without_the_properties_has_no_schedule_and_a_batch_has_none_of_its_own() -> None:
    metadata = pb.MessageMetadata(properties=[pb.KeyValue(key="a", value="b")])
    assert parse_schedule(properties_of(metadata)) == ScheduleProperties()
    metadata.properties.add(key="ledgerlake.schedule", value="a")
    assert parse_schedule(properties_of(metadata)).schedule_id == "a"
    metadata.num_messages_in_batch = 1
    assert parse_schedule(properties_of(metadata)) == ScheduleProperties()


def test_a_marker_names_the_schedule_of_its_message() -> None:
    properties = [
        pb.KeyValue(key="ledgerlake.schedule", value="a"),
        pb.KeyValue(key="b", value="c"),
    ]
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=1, publish_time=1, properties=properties
    )
    marker = encode_marker(metadata, 2, [Position(1, 0), Position(1, 1)])
    assert parse_marker(marker, Position(1, 2)).schedule_id == "a"


@pytest.mark.parametrize(
    ("properties", "pause"),
    [
        ({"ledgerlake.pause": "all"}, PauseRequest(None, resumes=False)),
        ({"ledgerlake.resume": "all"}, PauseRequest(None, resumes=True)),
        ({"ledgerlake.pause": "schedule=a=b"}, PauseRequest("a=b", resumes=False)),
    ],
)
def test_a_pause_is_of_one_schedule_or_of_all(
    properties: dict[str, object], pause: PauseRequest
) -> None:
    assert parse_schedule(properties).pause == pause


@pytest.mark.parametrize(
    "properties",
    [
        {"ledgerlake.pause": "a"},
        {"ledgerlake.pause": "schedule="},
        {"ledgerlake.pause": b"\xff"},
        {"ledgerlake.pause": "all", "ledgerlake.resume": "all"},
        {"ledgerlake.pause": "all", "ledgerlake.schedule": "a"},
    ],
)
def test_any_other_pause_is_refused(properties: dict[str, object]) -> None:
    with pytest.raises(CorruptEntryError) as refused:
        parse_schedule(properties)
    assert refused.value.reason == "bad_schedule"


def test_a_message_with_the_number_of_an_occurrence_is_no_schedule() -> None:
    properties = {"ledgerlake.schedule": "", "ledgerlake.cron": "?", "ledgerlake.occurrence": "1"}
    assert parse_schedule(properties) == ScheduleProperties()


@pytest.mark.parametrize("name", ["cron", "jitter", "pause", "resume"])
def test_a_message_in_chunks_does_not_repeat_or_pause(name: str) -> None:
    metadata = pb.MessageMetadata(properties=[pb.KeyValue(key=f"ledgerlake.{name}", value="all")])
    fault = fault_of_large(metadata)
    assert fault is not None
    assert "not sent in chunks" in fault.message
