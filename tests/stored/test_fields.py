"""What a checkpoint holds is checked field by field: damage is one sentence that says what
to do.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.assembly.rules import ChunkedMessageKey, IncompleteMessage
from ledgerlake.decode.messages import BatchRange
from ledgerlake.delay.bucket import Bucket, IndexRecord, record_from_json, record_to_json
from ledgerlake.delay.due_times import DueSpan
from ledgerlake.errors import OffsetError
from ledgerlake.operators.separately_stored import (
    SeparatelyStored,
    separately_stored_from_json,
    separately_stored_to_json,
)
from ledgerlake.operators.stage_rows import (
    MessageStarted,
    StateSummary,
    TaskReport,
    report_from_json,
    report_to_json,
)
from ledgerlake.operators.stateful import incomplete_from_json, incomplete_to_json
from ledgerlake.schedules.cancels import Cancel, cancels_from_json, cancels_to_json
from ledgerlake.schedules.schedules import (
    Pauses,
    Repeating,
    ScheduledMessage,
    waiting_from_json,
    waiting_to_json,
)
from ledgerlake.stored.fields import fields_of, parse_stored, stored
from ledgerlake.stored.offsets import PartitionOffset, from_json, to_json
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLACES = (Position(7, 1), Position(7, 4))
KEY = ChunkedMessageKey("p", "p-1")

WRITTEN: dict[str, tuple[Callable[[str], Any], str]] = {
    "delayed index": (
        record_from_json,
        record_to_json(
            IndexRecord(
                [Bucket(1, *PLACES, 2, 5, 10, 20, True, None)],
                7,
                PLACES[1],
                {"table": PLACES[0]},
                [3],
            )
        ),
    ),
    "cancels": (cancels_from_json, cancels_to_json([Cancel("key", "k", PLACES[0], 5)])),
    "schedules": (
        waiting_from_json,
        waiting_to_json(
            [ScheduledMessage(PLACES[1], 20, 500, Repeating(30, pauses=Pauses(70, [40])))]
        ),
    ),
    "open set": (
        incomplete_from_json,
        incomplete_to_json(IncompleteMessage(KEY, 3, 900, 5, 4, PLACES, 600, 640)),
    ),
    "delayed large message": (
        separately_stored_from_json,
        separately_stored_to_json(SeparatelyStored(PLACES, True, PLACES[-1], key=KEY)),
    ),
    "part of a delayed entry": (
        separately_stored_from_json,
        separately_stored_to_json(SeparatelyStored(PLACES[:1], True, PLACES[0], BatchRange(1, 2))),
    ),
    "report": (
        report_from_json,
        report_to_json(TaskReport(PLACES[0], 5, {}, [MessageStarted(KEY)])),
    ),
    "summary": (
        lambda text: parse_stored(text, "state summary", partial(stored, StateSummary)),
        json.dumps(
            StateSummary([{}], PLACES[0], 5, due_spans=[DueSpan(5, 1000, 1)]), default=fields_of
        ),
    ),
    "offset": (
        lambda text: from_json(json.loads(text)),
        json.dumps(
            to_json({"t": PartitionOffset(PLACES[0], 1, 1_700_000_000_000, 3, 1_700_000_000_000)})
        ),
    ),
}


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder and key of a value that is no container."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, (dict, list)):
            yield from places(value)
        else:
            yield tree, key


@pytest.mark.parametrize("name", WRITTEN)
def test_what_was_written_is_read(name: str) -> None:
    read, text = WRITTEN[name]
    assert read(text)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("wrong", [{"a": 1}, ["x"], 1.5, float("inf"), 2**63], ids=repr)
def test_a_value_of_another_type_is_damage(name: str, wrong: Any) -> None:
    read, text = WRITTEN[name]
    for number in range(len(list(places(json.loads(text))))):
        tree = json.loads(text)
        holder, key = list(places(tree))[number]
        holder[key] = wrong
        with pytest.raises(OffsetError):
            read(json.dumps(tree))


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "offset"])
@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, '{"version": 1}', '{"version": "1"}']
)
def test_what_is_no_record_is_damage(name: str, text: str) -> None:
    with pytest.raises(OffsetError, match=r"damaged .*(restore the checkpoint|report it)"):
        WRITTEN[name][0](text)


@pytest.mark.parametrize(
    "name",
    [
        "delayed index",
        "cancels",
        "open set",
        "delayed large message",
        "part of a delayed entry",
        "offset",
    ],
)
def test_a_newer_version_is_refused_with_advice(name: str) -> None:
    read, text = WRITTEN[name]
    with pytest.raises(OffsetError, match="upgrade Ledgerlake"):
        read(json.dumps(json.loads(text) | {"version": 99}))


def test_an_index_whose_buckets_contradict_themselves_is_damage() -> None:
    for wrong in ({"segment": 4}, {"segment": 0}, {"waiting": -1}, {"offset": -1}):
        record = json.loads(WRITTEN["delayed index"][1])
        record["buckets"][0] |= wrong
        with pytest.raises(OffsetError, match="damaged"):
            record_from_json(json.dumps(record))


def test_an_event_of_an_unknown_kind_is_damage() -> None:
    report = json.loads(WRITTEN["report"][1])
    report["events"][0][0] = "Unheard"
    with pytest.raises(OffsetError, match="damaged"):
        report_from_json(json.dumps(report))
