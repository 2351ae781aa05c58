"""What rows of a query become as messages, also those that Python has no text or time for."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ledgerlake.client.cluster import ClientSettings
from ledgerlake.decode.reference import key_of
from ledgerlake.errors import UsageError
from ledgerlake.publish.topic_writer import TopicSettings, TopicWriter
from ledgerlake.wire.entry import RawEntry, parse_entry
from ledgerlake.wire.limits import MAX_TIME_MS
from tests.peer import TOPIC, Peer

YEAR_10000_MS = 253_402_300_800_000


def unchecked(*texts: bytes) -> pa.Array:
    """Strings as Spark casts them from bytes: nothing has checked that they are UTF-8."""
    return pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())


def written(**columns: pa.Array) -> list[RawEntry]:
    with Peer() as peer:
        writer = TopicWriter(
            TopicSettings(ClientSettings(peer.url, give_up_after_s=2), TOPIC, 1), "w", 0
        )
        try:
            writer.write(pa.RecordBatch.from_pydict(columns))
            writer.flush()
        finally:
            writer.close()
        return [parse_entry(raw) for raw in peer.received]


def test_strings_that_are_not_utf8_are_sent_as_their_bytes() -> None:
    entries = written(value=unchecked(b"good", b"\xff bad"), key=unchecked(b"k", b"\xff"))
    assert [bytes(entry.payload) for entry in entries] == [b"good", b"\xff bad"]
    assert [
        (entry.metadata.partition_key, entry.metadata.partition_key_b64_encoded)
        for entry in entries
    ] == [
        ("k", False),
        ("/w==", True),
    ]


def test_times_are_sent_to_the_millisecond_whatever_their_year_and_none_to_deliver_at_is_early() -> (
    None
):
    times = pa.array([YEAR_10000_MS * 1000, 1_499, 1_500, None, 2_001], pa.timestamp("us", "UTC"))
    entries = written(value=pa.array([b"a"] * 5), event_time=times, deliver_at=times)
    sent = [(entry.metadata.event_time, entry.metadata.deliver_at_time) for entry in entries]
    assert sent == [(YEAR_10000_MS, YEAR_10000_MS), (1, 2), (2, 2), (0, 0), (2, 3)]


def test_a_property_that_is_not_utf8_is_an_error_that_names_row_and_column() -> None:
    names, texts = pa.array(["p", "p"]), unchecked(b"good", b"\xff")
    with pytest.raises(
        UsageError, match=r"row 1 of a task has bytes in the column 'properties' that are not UTF-8"
    ):
        written(
            value=pa.array([b"a", b"b"]),
            properties=pa.MapArray.from_arrays([0, 1, 2], names, texts),
        )


# By column, values at the ends of what Spark has, and what a reader gets of each.
_US = 1_000
_EXTREMES: dict[str, tuple[pa.DataType, list[tuple[object, object]]]] = {
    "value": (pa.binary(), [(b"", b""), (None, None), (b"\0\xff", b"\0\xff")]),
    "key": (pa.string(), [("", ""), ("\0", "\0"), ("\U0010ffff", "\U0010ffff"), (None, None)]),
    "key_bytes": (pa.binary(), [(b"", b""), (b"\xff", b"\xff")]),
    "ordering_key": (pa.binary(), [(b"", b""), (b"\xff\0", b"\xff\0"), (None, None)]),
    "properties": (
        pa.map_(pa.string(), pa.string()),
        [
            ([], []),
            (None, []),
            ([("", "")], [("", "")]),
            ([("a", "\0"), ("b", "\U0010ffff")], [("a", "\0"), ("b", "\U0010ffff")]),
            ([("a", "x"), ("b", None)], UsageError),
        ],
    ),
    "event_time": (
        pa.timestamp("us", "UTC"),
        [
            (-(2**63), UsageError),
            (-1, UsageError),
            (0, UsageError),
            (500, UsageError),
            (501, 1),
            (MAX_TIME_MS * _US, MAX_TIME_MS),
            (2**63 - 1, (2**63 - 1) // _US + 1),
            (None, 0),
        ],
    ),
    "deliver_at": (
        pa.timestamp("us", "UTC"),
        [
            (-(2**63), UsageError),
            (-1, UsageError),
            (0, UsageError),
            (1, 1),
            (MAX_TIME_MS * _US, MAX_TIME_MS),
            (2**63 - 1, (2**63 - 1) // _US + 1),
            (None, 0),
        ],
    ),
    "topic": (pa.string(), [("", UsageError)]),
}


def _read_back(column: str, entry: RawEntry) -> object:
    """What a client gets of a message."""
    metadata = entry.metadata
    if column == "value":
        return None if metadata.null_value else bytes(entry.payload)
    if column == "properties":
        return [(pair.key, pair.value) for pair in metadata.properties]
    if column in ("key", "key_bytes"):
        text, as_bytes = key_of(metadata)
        return as_bytes if column == "key_bytes" else text
    if column == "ordering_key":
        return metadata.ordering_key if metadata.HasField("ordering_key") else None
    return metadata.deliver_at_time if column == "deliver_at" else metadata.event_time


@pytest.mark.parametrize(
    ("column", "given", "back"),
    [(column, *pair) for column, (_, pairs) in _EXTREMES.items() for pair in pairs],
)
def test_a_reader_gets_what_a_row_has_or_the_row_is_an_error(
    column: str, given: object, back: object
) -> None:
    rows = {"value": pa.array([b"first", b"v"])}
    name = "key" if column == "key_bytes" else column
    kind = _EXTREMES[column][0]
    # An earlier row, so that the error has to name the right one.
    fine = (
        next(good for good, read in _EXTREMES[column][1] if read is not UsageError)
        if column != "topic"
        else TOPIC
    )
    rows[name] = pa.array([fine, given], kind)
    if back is not UsageError:
        assert _read_back(column, written(**rows)[1]) == back
        return
    with pytest.raises(
        UsageError, match="not a topic name" if column == "topic" else f"row 1 .*'{name}'"
    ):
        written(**rows)
