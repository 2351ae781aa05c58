"""Cancels among decoded messages: found wherever they are, and never more of them than a task may
hold.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgerlake.assembly.rules import Limits
from ledgerlake.decode.messages import decode_bundle
from ledgerlake.decode.split import PieceKind
from ledgerlake.operators.ingest import write_ranges
from ledgerlake.operators.results import BatchSettings, TaskSettings
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.schedules import cancel_messages
from ledgerlake.schedules.cancel_messages import TaskCancels, find_cancels
from ledgerlake.schedules.cancels import Cancel, Cancels
from ledgerlake.source.pieces import Piece
from ledgerlake.source.planning import EntryRange
from ledgerlake.stored.places import Place
from ledgerlake.wire.entry import encode_batch, encode_entry
from ledgerlake.wire.limits import MAX_TIME_MS
from ledgerlake.wire.message_id import Position
from tests.entries import SOURCE, bundle, metadata, single
from tests.pipeline_tables import messages_table

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa


def cancels_of(targets: list[str], codec: int = pb.NONE) -> bytes:
    """One entry with a cancel for each target."""
    from ledgerlake.decode.codecs import compress

    slots = []
    for target in targets:
        slot = pb.SingleMessageMetadata(payload_size=0)
        slot.properties.add(key="ledgerlake.cancel", value=f"key={target}")
        slots.append((slot, b""))
    plain = encode_batch(slots)
    entry_metadata = metadata(
        num_messages_in_batch=len(slots), uncompressed_size=len(plain), compression=codec
    )
    return encode_entry(entry_metadata, compress(codec, plain))


def messages(*entries: bytes) -> pa.RecordBatch:
    (part,) = decode_bundle(bundle(entries), SOURCE)
    return part.messages


def test_cancels_stand_among_other_messages_with_and_without_properties() -> None:
    fields: list[dict[str, Any]] = [
        {
            "properties": [
                pb.KeyValue(key="a", value="1"),
                pb.KeyValue(key="ledgerlake.cancel", value="key=x"),
            ]
        }
    ]
    rows = messages(
        single(b"1"),
        single(b"2", **fields[0]),
        single(b"3", properties=[pb.KeyValue(key="b", value="")]),
    )
    assert [(cancel.position.entry_id, cancel.target) for cancel in find_cancels(rows)] == [
        (1, "x")
    ]
    assert [cancel.position.entry_id for cancel in find_cancels(rows.slice(1, 2))] == [1]
    assert list(find_cancels(rows.slice(2))) == []


def test_a_cancel_without_a_known_time_is_of_1970() -> None:
    entry = metadata(
        publish_time=MAX_TIME_MS + 1,
        properties=[pb.KeyValue(key="ledgerlake.cancel", value="key=x")],
    )
    assert [cancel.time_ms for cancel in find_cancels(messages(encode_entry(entry, b"")))] == [0]


def test_the_same_cancel_many_times_in_an_entry_is_one() -> None:
    entry = cancels_of(["k"] * 100_000, pb.ZSTD)
    assert len(entry) < 1000
    cancels = TaskCancels()
    taken = [cancels.take(part.messages) for part in decode_bundle(bundle([entry]), SOURCE)]
    assert len(taken) > 1
    assert [cancel.target for accepted, _ in taken for cancel in accepted] == ["k"]
    assert not any(refused for _, refused in taken)


@pytest.mark.parametrize(
    ("limit", "most"),
    [("MAX_TASK_CANCELS", 3), ("MAX_TASK_CANCEL_BYTES", 3)],
    ids=["by number", "by bytes"],
)
def test_beyond_the_limit_the_entry_of_a_cancel_is_named_once(
    limit: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel_messages, limit, most)
    cancels = TaskCancels()
    accepted, refused = cancels.take(
        messages(cancels_of(list("ab")), cancels_of(list("cdef")), cancels_of(list("gh")))
    )
    assert [cancel.target for cancel in accepted] == ["a", "b", "c"]
    assert [position.entry_id for position in refused] == [1, 2]
    assert cancels.take(messages(single(b"nothing"), single(b"again"), cancels_of(["z"])))[1] == []


def test_a_task_passes_a_bounded_number_on_and_the_others_are_rejects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel_messages, "MAX_TASK_CANCELS", 10)
    entries = [
        cancels_of([f"{number}-{slot}" for slot in range(4)], pb.ZSTD) for number in range(5)
    ]
    monkeypatch.setattr(
        "ledgerlake.operators.outcomes.read_again_by",
        lambda _options, _topic, positions, _gone: iter(
            [entries[position.entry_id] for position in positions]
        ),
    )
    options = parse_options({"service.url": "pulsar://nowhere:1", "topic": "t"})
    for folder in "mr":
        (tmp_path / folder).mkdir()
    tables = (messages_table(tmp_path / "m"),)
    settings = TaskSettings(Limits(), DelayOptions(), options, tables, Place(str(tmp_path / "r")))
    name = f"{SOURCE.topic}-partition-{SOURCE.partition}"
    span = EntryRange(name, Position(7, -1), Position(7, 4))
    pieces = [Piece(PieceKind.ENTRIES, memoryview(bundle(entries)))]
    ingested = write_ranges([(span, pieces)], settings, BatchSettings(0))
    rows = [row for batch in ingested for row in batch.to_pylist()]
    report = json.loads(rows[-1]["header"])
    assert len([event for event in report["events"] if event[0] == "Cancel"]) == 10
    assert sum(file["rows"] for file in report["result"]["tables"]["messages"]["files"]) == 20
    assert sum(file["rows"] for file in report["result"]["rejects"]) == 3


def test_an_accepted_cancel_is_what_the_message_says() -> None:
    (cancel,) = find_cancels(messages(cancels_of(["k"])))
    assert cancel == Cancel("key", "k", Position(7, 0), metadata().publish_time)


_SMALL = st.integers(0, 6)


@given(st.lists(st.tuples(_SMALL, _SMALL), max_size=8), _SMALL, _SMALL)
def test_a_message_is_cancelled_if_one_of_the_cancels_hits_it(
    stored: list[tuple[int, int]], entry_id: int, deliver_ms: int
) -> None:
    all_cancels = [Cancel("key", "k", Position(1, place), time_ms) for place, time_ms in stored]
    cancels, position = Cancels(), Position(1, entry_id)
    for cancel in all_cancels:
        cancels.is_cancelled(position, -1, "k", deliver_ms)
        cancels.add(cancel)
    is_hit = any(cancel.hits(position, deliver_ms) for cancel in all_cancels)
    assert cancels.is_cancelled(position, -1, "k", deliver_ms) == is_hit
    assert not cancels.is_cancelled(position, -1, "other", deliver_ms)
