"""What entries say about others takes effect also if their payload cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ledgerlake.assembly.rules import Limits
from ledgerlake.decode.crypto import NO_KEYS
from ledgerlake.decode.payloads import process_entry
from ledgerlake.decode.rejects import RejectedEntry, reject_frame
from ledgerlake.decode.split import PieceKind, split_bundle
from ledgerlake.operators import outcomes
from ledgerlake.operators.decoded_rows import open_rows
from ledgerlake.operators.ingest import decode_ranges, write_ranges
from ledgerlake.operators.results import BatchSettings, StageSettings
from ledgerlake.operators.schedule_events import Scheduled, ScheduleEvents
from ledgerlake.operators.stage_rows import RowKind
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.reasons import PAYLOAD_PROCESSOR
from ledgerlake.schedules import cancel_messages
from ledgerlake.source.pieces import Piece
from ledgerlake.wire import commands
from ledgerlake.wire.chunks import encode_chunks, encode_marker, promise
from ledgerlake.wire.entry import encode_batch, encode_entry
from ledgerlake.wire.message_id import Position
from tests.chunks import chunk_entries
from tests.encryption import encrypted
from tests.entries import broker, bundle, metadata
from tests.entries import decoded as decode_rows
from tests.operators.test_writing import OPTIONS, report_of, span, task_settings

if TYPE_CHECKING:
    from pathlib import Path

DUE_MS = 4_000_000_000_000
AT = Position(7, 1)
OF_AT = (AT.ledger_id, AT.entry_id)


@dataclass
class Heard:
    """What a task passes on of what entries say, and the reasons of its rejects."""

    events: list[Any]
    reasons: list[str]


def written(folder: Path, pieces: list[Piece], count: int, **delay: Any) -> list[pa.RecordBatch]:
    """Rows of a task of the pipeline."""
    whole = span([b""] * count, None)
    return list(write_ranges([(whole, pieces)], task_settings(folder, **delay), BatchSettings(0)))


def decoded(_folder: Path, pieces: list[Piece], count: int, **delay: Any) -> list[pa.RecordBatch]:
    """Rows of a task of ``messages()``."""
    whole = span([b""] * count, None)
    settings = StageSettings(Limits(), DelayOptions(**delay), OPTIONS)
    return list(decode_ranges([(whole, pieces)], settings))


TASKS = pytest.mark.parametrize("task", [written, decoded])


def heard(rows: list[pa.RecordBatch]) -> list[Any]:
    schedules = ScheduleEvents()
    for row in (row for batch in rows for row in batch.to_pylist()):
        if row["kind"] == RowKind.SCHEDULES:
            schedules.add_row(row["entry"])
    return [*schedules.in_order(lambda _: 0), *report_of(rows).events]


def pieces_of(entries: list[bytes]) -> list[Piece]:
    return [Piece(kind, view, broker_ms=ms) for kind, view, ms in split_bundle(bundle(entries))]


def entry(said: dict[str, str], value: bytes = b"v", **fields: Any) -> bytes:
    own = [pb.KeyValue(key=f"ledgerlake.{name}", value=text) for name, text in said.items()]
    return encode_entry(metadata(properties=own, **fields), value, broker(1))


def unreadable(way: str, said: dict[str, str], **fields: Any) -> list[Piece]:
    """Pieces with an entry that says something and whose payload cannot be read, between two
    others.
    """
    ways: dict[str, Any] = {
        "encrypted": lambda: encrypted(entry(said, **fields), "nobodys"),
        "bad_compression": lambda: entry(
            said, b"no zlib", compression=pb.ZLIB, uncompressed_size=9, **fields
        ),
        "too_large": lambda: entry(
            said, compression=pb.ZLIB, uncompressed_size=2**31 - 1, **fields
        ),
        "unknown_codec": lambda: entry(said, compression=9, **fields),
    }
    others = [entry({}), entry({}, b"after")]
    if way in ways:
        return pieces_of([others[0], ways[way](), others[1]])
    rejected = RejectedEntry(AT, entry(said, **fields), PAYLOAD_PROCESSOR, "the function failed")
    return [*pieces_of(others[:1]), Piece(PieceKind.REJECT, reject_frame(rejected))]


WAYS = pytest.mark.parametrize(
    "way", ["encrypted", "bad_compression", "too_large", "unknown_codec", "processor"]
)


SAID = pytest.mark.parametrize(
    "said",
    [
        {"schedule": "a"},
        {"pause": "all"},
        {"pause": "schedule=a"},
        {"resume": "schedule=a"},
        {"cancel": "schedule=a"},
        {"cancel": "key=k"},
        {"cancel": "id=7:0"},
    ],
    ids=lambda said: "=".join(*said.items()),
)


@TASKS
@WAYS
@pytest.mark.parametrize("enabled", [True, False])
@SAID
def test_what_a_message_says_has_its_effect_also_if_its_payload_cannot_be_read(
    task: Any, way: str, enabled: bool, said: dict[str, str], tmp_path: Path
) -> None:
    for folder in ("r", "u"):
        (tmp_path / folder).mkdir()
    readable = heard(
        task(tmp_path / "r", pieces_of([entry({}), entry(said), entry({})]), 3, enabled=enabled)
    )
    assert [event.position for event in readable] == [AT]
    assert heard(task(tmp_path / "u", unreadable(way, said), 3, enabled=enabled)) == readable


@TASKS
@SAID
@pytest.mark.parametrize("fields", [{}, {"deliver_at_time": DUE_MS}, {"null_value": True}])
def test_what_a_message_says_has_its_effect_also_if_the_users_function_finds_no_message_in_it(
    task: Any, fields: dict[str, Any], said: dict[str, str], tmp_path: Path
) -> None:
    entries = [entry({}), entry(said, **fields), entry({})]
    made = process_entry(lambda _: [], memoryview(entries[1]), *OF_AT, 1000, NO_KEYS)
    assert made is not None
    for folder in ("f", "u"):
        (tmp_path / folder).mkdir()
    unchanged = heard(task(tmp_path / "u", pieces_of(entries), 3))
    entries[1] = made
    assert heard(task(tmp_path / "f", pieces_of(entries), 3)) == unchanged
    ((row,), _) = decode_rows([made])
    assert (row["is_null"], row["key"]) == (True, None)


@pytest.mark.parametrize("said", [{}, {"expires": "9"}, {"schedule": "a", "occurrence": "1"}])
def test_what_says_nothing_about_others_is_left_out_by_the_users_function(
    said: dict[str, str],
) -> None:
    raw = memoryview(entry(said))
    assert process_entry(lambda _: [], raw, *OF_AT, 1000, NO_KEYS) == b""


def rejects_of(rows: list[pa.RecordBatch]) -> list[tuple[Position, str]]:
    shown = open_rows(one for one in rows if one["kind"][0].as_py() == RowKind.ROWS)
    return [
        (Position(row["ledger_id"], row["entry_id"]), row["reject_reason"])
        for batch in shown
        for row in batch.to_pylist()
        if row["reject_reason"] is not None
    ]


@TASKS
@WAYS
def test_a_bad_property_of_an_entry_that_cannot_be_read_has_no_effect(
    task: Any, way: str, tmp_path: Path
) -> None:
    assert heard(task(tmp_path, unreadable(way, {"pause": "everything"}), 3)) == []


@WAYS
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("said", [{"pause": "everything"}, {"cron": "0 9 * * *"}])
def test_an_entry_with_a_bad_schedule_that_cannot_be_read_is_one_reject(
    way: str, enabled: bool, said: dict[str, str], tmp_path: Path
) -> None:
    """It is ``bad_schedule`` if it would be so with a payload that can be read."""
    rows = decoded(tmp_path, unreadable(way, said), 3, enabled=enabled)
    unread = PAYLOAD_PROCESSOR if way == "processor" else way
    assert rejects_of(rows) == [(AT, "bad_schedule" if enabled else unread)]


@WAYS
def test_an_entry_that_cannot_be_read_and_whose_schedule_has_no_room_is_one_reject(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScheduleEvents, "add", lambda *_: False)
    rows = decoded(tmp_path, unreadable(way, {"schedule": "a"}), 3)
    assert rejects_of(rows) == [(AT, "schedule_refused")]


@TASKS
def test_a_large_message_replaces_what_waits_once_it_is_complete_also_if_it_cannot_be_read(
    task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        outcomes, "read_again_by", lambda _, __, places, ___: (None for _ in places)
    )
    own = [pb.KeyValue(key="ledgerlake.schedule", value="a")]
    chunks = [encrypted(one, "nobodys") for one in chunk_entries(b"value", 2, properties=own)]
    for name in ("whole", "part"):
        (tmp_path / name).mkdir()
    replaced = [
        [
            event
            for event in heard(task(tmp_path / name, pieces_of(read), len(read)))
            if isinstance(event, Scheduled)
        ]
        for name, read in (("whole", chunks), ("part", chunks[:1]))
    ]
    assert [[(event.schedule_id, event.position) for event in events] for events in replaced] == [
        [("a", AT)],
        [],
    ]


@TASKS
def test_a_delayed_entry_that_is_rejected_before_it_waits_replaces_nothing(
    task: Any, tmp_path: Path
) -> None:
    said = {"schedule": "a"}
    assert heard(task(tmp_path, unreadable("processor", said, deliver_at_time=DUE_MS), 3)) == []


@TASKS
def test_damaged_entries_chunks_and_batches_that_cannot_be_read_say_nothing(
    task: Any, tmp_path: Path
) -> None:
    said = {"cancel": "schedule=a"}
    damaged = bytearray(entry(said))
    damaged[-1] ^= 1
    single = pb.SingleMessageMetadata(
        payload_size=0, properties=[pb.KeyValue(key="ledgerlake.pause", value="all")]
    )
    batch = entry({}, encode_batch([(single, b"v")]), num_messages_in_batch=1)
    of_batch = entry(said, b"cut", num_messages_in_batch=1)
    entries = [bytes(damaged), encrypted(batch, "nobodys"), of_batch]
    assert heard(task(tmp_path, pieces_of(entries), 3)) == []


def test_which_cancels_a_task_refuses_does_not_depend_on_the_cut_of_bundles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel_messages, "MAX_TASK_CANCELS", 5)
    entries = [entry({"cancel": f"key={number}"}) for number in range(9)]
    entries[1::2] = [encrypted(one, "nobodys") for one in entries[1::2]]
    frames = [commands.message(1, 7, number, one) for number, one in enumerate(entries)]
    monkeypatch.setattr(
        outcomes, "read_again_by", lambda _, __, places, ___: (None for _ in places)
    )
    accepted = []
    for cut in (1, 2, 4, 9):
        bundles = [b"".join(frames[first : first + cut]) for first in range(0, 9, cut)]
        pieces = [
            Piece(kind, view, broker_ms=ms)
            for part in bundles
            for kind, view, ms in split_bundle(part)
        ]
        accepted.append([event.target for event in heard(decoded(tmp_path, pieces, 9))])
    assert accepted == [list("01234")] * 4


FAULTS: list[dict[str, str]] = [
    {"schedule": ""},
    {"schedule": "x" * 201},
    {"expires": "tomorrow"},
    {"schedule": "a", "expires": "9" * 99},
    {"schedule": "a", "pause": "all"},
    {"pause": "all", "resume": "all"},
    {"pause": "everything"},
    {"resume": "schedule="},
    {"cron": "0 9 * * *"},
    {"jitter": "PT1S"},
]


def in_one_entry(said: dict[str, str], fields: dict[str, Any]) -> list[bytes]:
    return [entry(said, **fields)]


def in_chunks(said: dict[str, str], fields: dict[str, Any]) -> list[bytes]:
    own = [pb.KeyValue(key=f"ledgerlake.{name}", value=text) for name, text in said.items()]
    return chunk_entries(b"value", 2, properties=own, **fields)


def in_chunks_with_a_marker(said: dict[str, str], fields: dict[str, Any]) -> list[bytes]:
    own = metadata(uncompressed_size=5, **fields)
    own.properties.add().CopyFrom(promise())
    for name, text in said.items():
        own.properties.add(key=f"ledgerlake.{name}", value=text)
    chunks = list(encode_chunks(own, b"value", 3))
    return [*chunks, encode_marker(own, 2, [Position(7, 0), Position(7, 1)])]


@pytest.mark.parametrize("form", [in_one_entry, in_chunks, in_chunks_with_a_marker])
@pytest.mark.parametrize("due_ms", [None, DUE_MS])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_bad_schedule_is_rejected_in_every_form_if_messages_are_delayed_and_else_in_none(
    form: Any, due_ms: int | None, enabled: bool, tmp_path: Path
) -> None:
    for said in FAULTS:
        entries = form(said, {} if due_ms is None else {"deliver_at_time": due_ms})
        rows = decoded(tmp_path, pieces_of(entries), len(entries), enabled=enabled)
        shown = [
            row
            for batch in open_rows(one for one in rows if one["kind"][0].as_py() == RowKind.ROWS)
            for row in batch.to_pylist()
        ]
        assert {row["reject_reason"] for row in shown} == {"bad_schedule" if enabled else None}
        assert RowKind.DELAYED not in [one["kind"][0].as_py() for one in rows], said
        value = b"v" if form is in_one_entry else b"value"
        assert enabled or [row["value"] for row in shown] == [value], said
