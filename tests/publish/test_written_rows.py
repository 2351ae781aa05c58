"""What rows of a query become as messages, also those that Python has no text or time for."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ledgerlake.client.cluster import ClientSettings
from ledgerlake.errors import UsageError
from ledgerlake.publish.topic_writer import TopicSettings, TopicWriter
from ledgerlake.wire.entry import RawEntry, parse_entry
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
