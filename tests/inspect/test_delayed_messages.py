"""The delayed messages in the state as rows, without Spark."""

from __future__ import annotations

import base64
from typing import Any

import pyarrow as pa
import pytest

from ledgerlake.decode.messages import WHOLE_BATCH, TopicPartition
from ledgerlake.decode.split import entries_of
from ledgerlake.delay.bucket import Bucket, IndexRecord
from ledgerlake.delay.segment import INDEX_SCHEMA, index_rows
from ledgerlake.delay.snapshot import segment_to_bytes
from ledgerlake.inspect.delayed_messages import _Decoder
from ledgerlake.operators.schedule_events import Scheduled, ScheduleEvents
from ledgerlake.operators.scheduled import find_in_frames
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.reasons import REPLACED
from ledgerlake.schedules.cancels import Cancel, Cancels
from ledgerlake.schedules.schedules import REPEATING, SCHEDULED, MarkedPositions, Pauses
from ledgerlake.wire import commands
from ledgerlake.wire.message_id import Position
from tests.encryption import encrypted
from tests.entries import single
from tests.operators.test_scheduled import frame

SOURCE = TopicPartition("persistent://public/default/t", 0)


def test_of_messages_whose_bytes_are_elsewhere_the_positions_are_listed_and_which_a_cancel_may_hit() -> (
    None
):
    """A marker that completed a large message may stand behind the cancel, and is not known."""
    bucket = Bucket(7, Position(1, 1), Position(1, 3), 1, 3, 5000, 7000, True, None)
    columns = [
        pa.array([5000, 6000, 7000]),
        pa.array([1, 1, 1]),
        pa.array([1, 2, 3]),
        pa.nulls(3, pa.binary()),
    ]
    segment = segment_to_bytes(pa.RecordBatch.from_arrays(columns, schema=INDEX_SCHEMA))
    cancels = Cancels([Cancel("id", "1:1", Position(1, 9), 100, 10**9)])
    decoding = parse_options({"service.url": "pulsar://h:1", "topic": "t"}).decoding
    decoder = _Decoder(
        {SOURCE: IndexRecord([bucket])},
        {SOURCE: (cancels, MarkedPositions(), Pauses())},
        decoding,
        7000,
    )
    rows = decoder.waiting_rows(SOURCE, bucket, 1, segment)
    listed = [row for batch in decoder.messages(SOURCE, rows) for row in batch.to_pylist()]
    assert [(row["message_id"], row["may_be_cancelled"]) for row in listed] == [
        ("1:1", True),
        ("1:2", False),
    ]
    assert [row["deliver_at"].timestamp() for row in listed] == [5.0, 6.0]
    last_chunk, marker = Position(1, 1), Position(1, 12)
    assert not cancels.is_cancelled(last_chunk, -1, "k", 5000, marker)


def test_of_a_message_whose_key_is_not_known_it_is_said_that_a_cancel_by_key_may_hit_it() -> None:
    """A cancel by key hits what stands before it and is due after it."""
    cancels = Cancels([Cancel("key", "k", Position(7, 3), 5500, 10**9)])
    decoding = parse_options({"service.url": "pulsar://h:1", "topic": "t"}).decoding
    decoder = _Decoder(
        {SOURCE: IndexRecord()}, {SOURCE: (cancels, MarkedPositions(), Pauses())}, decoding, 9000
    )
    stored = {
        1: single(b"v", partition_key="k", deliver_at_time=6000),
        2: single(b"v", partition_key="l", deliver_at_time=6000),
        5: encrypted(single(b"v", partition_key="l", deliver_at_time=6000), "theirs"),
    }
    frames = [commands.message(0, 7, number, entry) for number, entry in stored.items()]
    known = index_rows([(6000, 7, number) for number in stored], frames)
    places = [(5000, 7, 1), (6000, 7, 1), (6000, 7, 2), (6000, 7, 4)]
    columns = [pa.array(column) for column in zip(*places, strict=True)]
    unknown = pa.RecordBatch.from_arrays([*columns, pa.nulls(4, pa.binary())], schema=INDEX_SCHEMA)

    def listed(rows: pa.RecordBatch) -> list[tuple[float, str, bool]]:
        return [
            (row["deliver_at"].timestamp(), row["message_id"], row["may_be_cancelled"])
            for batch in decoder.messages(SOURCE, rows)
            for row in batch.to_pylist()
        ]

    assert listed(known) == [(6.0, "7:2", False), (6.0, "7:5", False)]
    assert listed(unknown) == [
        (5.0, "7:1", False),
        (6.0, "7:1", True),
        (6.0, "7:2", True),
        (6.0, "7:4", False),
    ]


def test_a_message_that_was_replaced_is_left_out() -> None:
    bucket = Bucket(7, Position(1, 1), Position(1, 2), 1, 2, 5000, 6000, True, None)
    columns = [pa.array([5000, 6000]), pa.array([1, 1]), pa.array([1, 2]), pa.nulls(2, pa.binary())]
    segment = segment_to_bytes(pa.RecordBatch.from_arrays(columns, schema=INDEX_SCHEMA))
    marked = MarkedPositions()
    marked.mark(Position(1, 1), REPLACED)
    decoding = parse_options({"service.url": "pulsar://h:1", "topic": "t"}).decoding
    decoder = _Decoder(
        {SOURCE: IndexRecord([bucket])}, {SOURCE: (Cancels(), marked, Pauses())}, decoding, 7000
    )
    rows = decoder.waiting_rows(SOURCE, bucket, 1, segment)
    listed = [row for batch in decoder.messages(SOURCE, rows) for row in batch.to_pylist()]
    assert [row["message_id"] for row in listed] == ["1:2"]


def test_of_a_message_that_cannot_be_decrypted_here_the_position_is_listed() -> None:
    bucket = Bucket(7, Position(7, 1), Position(7, 2), 1, 2, 5000, 6000, True, None)
    stored = [single(b"plain"), encrypted(single(b"secret"), "theirs")]
    frames = [commands.message(0, 7, number, entry) for number, entry in enumerate(stored, 1)]
    segment = segment_to_bytes(index_rows([(5000, 7, 1), (6000, 7, 2)], frames))
    decoding = parse_options({"service.url": "pulsar://h:1", "topic": "t"}).decoding
    decoder = _Decoder({SOURCE: IndexRecord([bucket])}, {}, decoding, 7000)
    rows = decoder.waiting_rows(SOURCE, bucket, 1, segment)
    listed = [row for batch in decoder.messages(SOURCE, rows) for row in batch.to_pylist()]
    assert [(row["message_id"], row["value"]) for row in listed] == [
        ("7:1", b"plain"),
        ("7:2", None),
    ]


def test_of_a_message_that_repeats_the_next_occurrence_is_listed_and_its_entry_is_found_by_the_id() -> (
    None
):
    bucket = Bucket(7, Position(7, 1), Position(7, 2), 1, 2, 5000, 6000, True, None)
    frames = [frame(1, 4000, schedule="a", every="PT1S"), frame(2, 4000, schedule="b")]
    segment = segment_to_bytes(index_rows([(5000, 7, 1), (6000, 7, 2)], frames))
    marked = MarkedPositions()
    marked.mark(Position(7, 1), REPEATING)
    # A cancel by the message id does not end it.
    cancels = Cancels([Cancel("id", "7:1", Position(7, 9), 100, 10**9)])
    decoding = parse_options({"service.url": "pulsar://h:1", "topic": "t"}).decoding
    decoder = _Decoder(
        {SOURCE: IndexRecord([bucket])}, {SOURCE: (cancels, marked, Pauses())}, decoding, 7000
    )
    marked.mark(Position(7, 2), SCHEDULED)
    rows = decoder.waiting_rows(SOURCE, bucket, 1, segment)
    listed = [row for batch in decoder.messages(SOURCE, rows) for row in batch.to_pylist()]
    assert sorted((row["deliver_at"].timestamp(), row["value"]) for row in listed) == [
        (4.0, b"2"),
        (5.0, b"1"),
    ]
    (found,) = decoder.entries(SOURCE, rows, "a")
    assert found["entry"].to_pylist() == list(entries_of(frames[0]).values())
    assert found["due_ms"].to_pylist() == [5000]
    # One that was ended delivers only what was due before.
    assert list(decoder.entries(SOURCE, rows, "a", {(SOURCE, Position(7, 1))})) == []


def test_an_entry_that_a_cancel_by_key_or_message_id_hits_is_not_found_by_its_id() -> None:
    decoding = parse_options({"service.url": "pulsar://h:1", "topic": "t"}).decoding
    cancels = Cancels([Cancel("id", "7:1", Position(7, 9), 100, 10**9)])
    marked = MarkedPositions()
    for number in (1, 2):
        marked.mark(Position(7, number), SCHEDULED)
    decoder = _Decoder(
        {SOURCE: IndexRecord()}, {SOURCE: (cancels, marked, Pauses())}, decoding, 7000
    )
    rows = index_rows(
        [(5000, 7, 1), (5000, 7, 2)], [frame(number, 5000, schedule="a") for number in (1, 2)]
    )
    found = [
        row["entry"] for batch in decoder.entries(SOURCE, rows, "a") for row in batch.to_pylist()
    ]
    assert found == list(entries_of(frame(2, 5000, schedule="a")).values())


@pytest.mark.parametrize(
    "other",
    [
        pb.KeyValue(key="ledgerlake.occurrence", value="1"),
        pb.KeyValue(key="ledgerlake.schedule", value="b"),
    ],
    ids=["a delivered copy", "another id"],
)
def test_what_does_not_wait_under_an_id_is_not_found_by_it(other: pb.KeyValue) -> None:
    """A delivered copy may wait too, if its consumer puts it off. So the stage decides, which
    marks what waits under an id, and not the property.
    """
    properties = [pb.KeyValue(key="ledgerlake.schedule", value="a"), other]
    entry = single(b"v", deliver_at_time=5000, properties=properties)
    frames = memoryview(commands.message(0, 7, 1, entry))
    events = ScheduleEvents(10)
    find_in_frames(frames, WHOLE_BATCH, events)
    marked = MarkedPositions()
    for event in events.in_order(lambda _: 0):
        assert isinstance(event, Scheduled)
        marked.mark(event.position, SCHEDULED)
    rows = index_rows([(5000, 7, 1)], [bytes(frames)])
    assert list(_decoder(marked=marked).entries(SOURCE, rows, "a")) == []
    assert _listed(rows, _decoder(marked=marked), schedule_id="a") == []


def test_a_message_that_is_marked_and_has_no_id_is_not_found_by_one() -> None:
    """The topic may have been created again, with the same positions."""
    marked = MarkedPositions()
    marked.mark(Position(7, 1), SCHEDULED)
    entry = single(b"v", deliver_at_time=5000, partition_key="a")
    rows = index_rows([(5000, 7, 1)], [commands.message(0, 7, 1, entry)])
    assert list(_decoder(marked=marked).entries(SOURCE, rows, "a")) == []


def test_a_binary_key_is_asked_for_by_its_base64_text_as_a_cancel_names_it() -> None:
    text = base64.b64encode(b"\x00\x01k").decode()
    entries = [
        single(b"v", deliver_at_time=5000, partition_key=text, partition_key_b64_encoded=True),
        single(b"v", deliver_at_time=5000, partition_key="other"),
        single(b"v", deliver_at_time=5000),
    ]
    frames = [commands.message(0, 7, number, entry) for number, entry in enumerate(entries, 1)]
    rows = index_rows([(5000, 7, number) for number in (1, 2, 3)], frames)
    (found,) = _listed(rows, key=text)
    assert (found["message_id"], found["is_known"]) == ("7:1", True)
    hits = Cancels([Cancel("key", text, Position(7, 9), 100, 10**9)])
    assert [row["message_id"] for row in _listed(rows, _decoder(hits))] == ["7:2", "7:3"]


def test_a_message_that_is_not_known_here_may_be_what_is_asked_for() -> None:
    """The key and the properties of an encrypted message are in its metadata, unless it is a
    batch.
    """
    marked = MarkedPositions()
    marked.mark(Position(7, 1), SCHEDULED)
    marked.mark(Position(7, 3), SCHEDULED)
    properties = [pb.KeyValue(key="ledgerlake.schedule", value="a")]
    secret = single(b"v", deliver_at_time=5000, partition_key="k", properties=properties)
    frames = [None, None, commands.message(0, 7, 3, encrypted(secret, "theirs"))]
    columns = [pa.array(column) for column in ([5000] * 3, [7] * 3, [1, 2, 3])]
    rows = pa.RecordBatch.from_arrays([*columns, pa.array(frames, pa.binary())], INDEX_SCHEMA.names)

    def found(**asked: str) -> list[tuple[str, bool]]:
        return [
            (row["message_id"], row["is_known"])
            for row in _listed(rows, _decoder(marked=marked), **asked)
        ]

    assert found() == [("7:1", False), ("7:2", False), ("7:3", True)]
    assert found(key="k") == [("7:1", False), ("7:2", False), ("7:3", True)]
    assert found(key="l") == [("7:1", False), ("7:2", False)]
    assert found(schedule_id="a") == [("7:1", False), ("7:3", True)]
    assert found(schedule_id="b") == [("7:1", False)]


def _decoder(cancels: Cancels | None = None, marked: MarkedPositions | None = None) -> _Decoder:
    """A decoder without the keys that decrypt messages."""
    controls = (cancels or Cancels(), marked or MarkedPositions(), Pauses())
    decoding = parse_options({"service.url": "pulsar://h:1", "topic": "t"}).decoding
    return _Decoder({SOURCE: IndexRecord()}, {SOURCE: controls}, decoding, 7000)


def _listed(
    rows: pa.RecordBatch, decoder: _Decoder | None = None, **asked: str
) -> list[dict[str, Any]]:
    """The messages of rows, in order."""
    batches = (decoder or _decoder()).messages(SOURCE, rows, **asked)
    found = [row for batch in batches for row in batch.to_pylist()]
    return sorted(found, key=lambda row: str(row["message_id"]))
