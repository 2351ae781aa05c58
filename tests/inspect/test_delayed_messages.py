"""The delayed messages in the state as rows, without Spark."""

from __future__ import annotations

import pyarrow as pa

from ledgerlake.decode.messages import TopicPartition
from ledgerlake.decode.split import entries_of
from ledgerlake.delay.bucket import Bucket, IndexRecord
from ledgerlake.delay.segment import INDEX_SCHEMA, index_rows
from ledgerlake.delay.snapshot import segment_to_bytes
from ledgerlake.inspect.delayed_messages import _Decoder
from ledgerlake.options.source_options import parse_options
from ledgerlake.reasons import REPLACED
from ledgerlake.schedules.cancels import Cancel, Cancels
from ledgerlake.schedules.schedules import REPEATING, MarkedPositions, Pauses
from ledgerlake.wire import commands
from ledgerlake.wire.message_id import Position
from tests.encryption import encrypted
from tests.entries import single
from tests.operators.test_scheduled import frame

SOURCE = TopicPartition("persistent://public/default/t", 0)


def test_of_messages_whose_bytes_are_elsewhere_the_positions_are_listed_but_for_cancelled_ones() -> (
    None
):
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
    assert [(row["message_id"], row["may_be_cancelled"]) for row in listed] == [("1:2", False)]
    assert listed[0]["deliver_at"].timestamp() == 6.0


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
    rows = decoder.waiting_rows(SOURCE, bucket, 1, segment)
    listed = [row for batch in decoder.messages(SOURCE, rows) for row in batch.to_pylist()]
    assert sorted((row["deliver_at"].timestamp(), row["value"]) for row in listed) == [
        (4.0, b"2"),
        (5.0, b"1"),
    ]
    (found,) = decoder.entries(SOURCE, rows, "a")
    assert found["entry"].to_pylist() == list(entries_of(frames[0]).values())
    assert found["due_ms"].to_pylist() == [5000]


def test_an_entry_that_a_cancel_by_key_or_message_id_hits_is_not_found_by_its_id() -> None:
    decoding = parse_options({"service.url": "pulsar://h:1", "topic": "t"}).decoding
    cancels = Cancels([Cancel("id", "7:1", Position(7, 9), 100, 10**9)])
    decoder = _Decoder(
        {SOURCE: IndexRecord()}, {SOURCE: (cancels, MarkedPositions(), Pauses())}, decoding, 7000
    )
    rows = index_rows(
        [(5000, 7, 1), (5000, 7, 2)], [frame(number, 5000, schedule="a") for number in (1, 2)]
    )
    found = [
        row["entry"] for batch in decoder.entries(SOURCE, rows, "a") for row in batch.to_pylist()
    ]
    assert found == list(entries_of(frame(2, 5000, schedule="a")).values())
