"""Entries in a format of the user's own: read by a function of the user's, and rejected where that
fails.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ledgerlake.decode.messages import WHOLE_BATCH
from ledgerlake.decode.payloads import EntryPayload, PayloadMessage
from ledgerlake.decode.rejects import read_reject
from ledgerlake.errors import DecryptionError
from ledgerlake.operators.schedule_events import Scheduled, ScheduleEvents
from ledgerlake.operators.scheduled import find_in_frames
from ledgerlake.options.source_options import SourceOptions, parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source.pieces import read_pieces
from ledgerlake.source.planning import EntryRange
from ledgerlake.source.views import read_entries, read_messages
from ledgerlake.wire.entry import encode_entry, parse_entry
from ledgerlake.wire.message_id import BEFORE_ALL
from tests.chunks import chunk_entries
from tests.encryption import encrypted
from tests.entries import batch, single
from tests.peer import TOPIC, Peer


def lines(entry: EntryPayload) -> list[PayloadMessage] | None:
    """A format of lines: ``key=value``, or ``key`` alone for a null value; what does not begin so
    is Pulsar's own.
    """
    if not entry.payload.startswith(b"lines:"):
        return None
    assert pb.MessageMetadata.FromString(entry.metadata).producer_name == "p"
    messages = []
    for line in entry.payload.removeprefix(b"lines:").decode().split():
        key, _, value = line.partition("=")
        if key == "bad":
            raise ValueError("this line is bad")
        messages.append(
            PayloadMessage(
                value.encode() if value else None, key, {"entry": str(entry.entry_id)}, 17
            )
        )
    return messages


def options_for(peer: Peer) -> SourceOptions:
    return parse_options(
        {
            "service.url": peer.url,
            "topic": TOPIC,
            "messagePayloadProcessor": f"{__name__}:lines",
            "retryTimeoutMs": "3000",
        }
    )


def test_a_function_of_the_users_finds_the_messages_of_its_format() -> None:
    with Peer() as peer:
        peer.add(
            batch([b"own"]),
            single(b"lines:a=1 b=2 c"),
            single(b"lines:"),
            chunk_entries(b"x" * 9, 2)[0],
        )
        span = EntryRange(TOPIC, BEFORE_ALL, peer.entries[-1][0])
        rows = [row for part in read_messages(options_for(peer), span) for row in part.to_pylist()]
        message_rows = [
            (row["message_id"], row["key"], row["value"], row["is_null"])
            for row in rows
            if row["chunk_id"] is None
        ]
        assert message_rows == [
            ("7:0:0", None, b"own", False),
            ("7:1:0", "a", b"1", False),
            ("7:1:1", "b", b"2", False),
            ("7:1:2", "c", None, True),
        ]
        assert (dict(rows[1]["properties"]), rows[1]["broker_index"]) == ({"entry": "1"}, None)
        assert rows[1]["broker_timestamp"] is not None
        assert len(rows) == 5


def test_an_entry_that_the_function_cannot_read_is_a_reject_with_its_words() -> None:
    with Peer() as peer:
        peer.add(single(b"a"), single(b"lines:bad"), single(b"b"))
        span = EntryRange(TOPIC, BEFORE_ALL, peer.entries[-1][0])
        rows = [row for part in read_messages(options_for(peer), span) for row in part.to_pylist()]
        assert [(row["value"], row["reject_reason"]) for row in rows] == [
            (b"a", None),
            (peer.entries[1][1], "payload_processor"),
            (b"b", None),
        ]
        entries = [
            row for part in read_entries(options_for(peer), span) for row in part.to_pylist()
        ]
        assert [row["reject_reason"] for row in entries] == [None, "payload_processor", None]
        assert [piece.kind for piece in read_pieces(options_for(peer), span)] == [
            "entries",
            "reject",
            "entries",
        ]


@pytest.mark.parametrize(
    ("reason", "entry"),
    [
        ("encrypted", encrypted(single(b"lines:a=1"), "nobodys")),
        ("bad_compression", single(b"no zlib", compression=pb.ZLIB, uncompressed_size=9)),
        ("unknown_codec", single(b"lines:a=1", compression=9)),
        ("too_large", single(b"", compression=pb.ZLIB, uncompressed_size=2**31 - 1)),
    ],
)
def test_an_entry_that_cannot_be_opened_does_not_wait_until_it_is_due_without_the_function(
    reason: str, entry: bytes
) -> None:
    raw = parse_entry(memoryview(entry))
    raw.metadata.deliver_at_time = 4_000_000_000_000
    delayed = encode_entry(raw.metadata, bytes(raw.payload), raw.broker)
    with Peer() as peer:
        peer.add(entry, delayed)
        span = EntryRange(TOPIC, BEFORE_ALL, peer.entries[-1][0])
        pieces = list(read_pieces(options_for(peer), span))
        assert [piece.kind for piece in pieces] == ["entries", "reject"]
        rejected = read_reject(pieces[1].frames)
        assert (rejected.reason, rejected.entry) == (reason, delayed)
        rows = [row for part in read_messages(options_for(peer), span) for row in part.to_pylist()]
        assert [row["reject_reason"] for row in rows] == [reason, reason]


@pytest.mark.parametrize("action", ["reject", "pass", "fail"])
def test_a_delayed_entry_that_no_key_decrypts_does_not_wait_whatever_is_to_become_of_it(
    action: str,
) -> None:
    with Peer() as peer:
        peer.add(encrypted(single(b"lines:a=1", deliver_at_time=4_000_000_000_000), "nobodys"))
        span = EntryRange(TOPIC, BEFORE_ALL, peer.entries[-1][0])
        options = replace(options_for(peer), crypto_failure_action=action)
        if action == "fail":
            with pytest.raises(DecryptionError):
                list(read_pieces(options, span))
        else:
            assert [piece.kind for piece in read_pieces(options, span)] == ["reject"]


def test_what_the_sender_says_of_schedules_holds_for_the_messages_that_the_function_returns() -> (
    None
):
    said = {"ledgerlake.schedule": "a", "ledgerlake.every": "PT1H"}
    copied = {"ledgerlake.cancel": "key=b", "ledgerlake.occurrence": "1"}
    with Peer() as peer:
        peer.add(
            single(
                b"lines:k=1",
                deliver_at_time=50,
                properties=pairs(said),
                partition_key="own",
                event_time=3,
            ),
            single(b"lines:k=1 l=2", 1, properties=pairs(copied)),
        )
        span = EntryRange(TOPIC, BEFORE_ALL, peer.entries[-1][0])
        (delayed, _), rows = pieces_and_rows(options_for(peer), span)
        schedules = ScheduleEvents()
        assert not find_in_frames(delayed, WHOLE_BATCH, schedules).rejects
        (event,) = schedules.in_order(lambda _: 0)
        assert isinstance(event, Scheduled)
        assert (event.schedule_id, event.rate is not None) == ("a", True)
        found = [
            (row["message_id"], row["key"], row["value"], dict(row["properties"])) for row in rows
        ]
        assert found == [
            ("7:0", "k", b"1", {"entry": "0", **said}),
            ("7:1:0", "k", b"1", {"entry": "1", **copied}),
            ("7:1:1", "l", b"2", {"entry": "1", **copied}),
        ]
        assert rows[0]["event_time"] == rows[1]["event_time"]


def pairs(properties: dict[str, str]) -> list[pb.KeyValue]:
    return [pb.KeyValue(key=name, value=value) for name, value in properties.items()]


def pieces_and_rows(
    options: SourceOptions, span: EntryRange
) -> tuple[list[memoryview], list[dict[str, Any]]]:
    """What a task reads: the frames of each piece, and the messages."""
    pieces = [piece.frames for piece in read_pieces(options, span)]
    return pieces, [row for part in read_messages(options, span) for row in part.to_pylist()]


def odd(entry: EntryPayload) -> list[PayloadMessage]:
    """What a function may do with bytes that producers choose."""
    if entry.payload == b"text":
        return [PayloadMessage("text", "key")]  # type: ignore[arg-type]
    if entry.payload == b"exit":
        raise SystemExit(3)
    if entry.payload == b"speechless":
        raise _SpeechlessError
    raise ValueError("no kind \ud800\nand more")


class _SpeechlessError(Exception):
    def __str__(self) -> str:
        return str(self.args[1])


def test_a_function_that_returns_or_says_what_cannot_be_written_makes_a_reject() -> None:
    with Peer() as peer:
        peer.add(*map(single, (b"text", b"surrogate", b"exit", b"speechless")))
        span = EntryRange(TOPIC, BEFORE_ALL, peer.entries[-1][0])
        options = replace(options_for(peer), message_payload_processor=f"{__name__}:odd")
        rows = [row for part in read_messages(options, span) for row in part.to_pylist()]
        assert [row["reject_reason"] for row in rows] == ["payload_processor"] * 4
        assert sum(piece.kind == "reject" for piece in read_pieces(options, span)) == 4
