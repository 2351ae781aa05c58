"""What the stateful stage of a pipeline does with its outcomes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from ledgerlake.assembly.assembler import Assembled
from ledgerlake.assembly.rules import Limits
from ledgerlake.operators.delayed import TOPIC
from ledgerlake.operators.outcome_files import OutcomeFiles
from ledgerlake.operators.outcome_types import DueEntries
from ledgerlake.operators.results import BatchSettings, TaskResult, TaskSettings, results_from_json
from ledgerlake.operators.stage_rows import Released, StateSummary
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.options.source_options import parse_options
from ledgerlake.schedules.cancels import Cancel, Cancels
from ledgerlake.stored.fields import fields_of
from ledgerlake.stored.places import Place
from ledgerlake.wire.message_id import BEFORE_ALL, Position
from tests.encryption import encrypted
from tests.entries import BROKER_TIME_MS, batch, bundle, single
from tests.operators.stage import SOURCE
from tests.pipeline_tables import messages_table

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = parse_options({"service.url": "pulsar://nowhere:1", "topic": "t"})


def test_the_chunks_after_one_that_is_gone_leave_the_state_too(tmp_path: Path) -> None:
    settings = TaskSettings(
        Limits(), DelayOptions(), OPTIONS, (messages_table(tmp_path),), Place(str(tmp_path))
    )
    chunks = iter([None, b"second", b"third"])
    positions = tuple(Position(7, number) for number in range(3))
    OutcomeFiles(SOURCE, settings, BatchSettings(0)).take(
        Assembled(positions, chunks, positions[-1])
    )
    assert list(chunks) == []


def test_the_delayed_messages_that_were_released_are_those_that_were_delivered(
    tmp_path: Path,
) -> None:
    settings = TaskSettings(
        Limits(), DelayOptions(), OPTIONS, (messages_table(tmp_path),), Place(str(tmp_path))
    )
    files = OutcomeFiles(SOURCE, settings, BatchSettings(0))
    due_ms = BROKER_TIME_MS + 60_000
    expired = [{"key": "ledgerlake.expires", "value": "40"}]
    entries = [
        single(b"stored when it was due", deliver_at_time=1),
        single(b"cancelled", deliver_at_time=due_ms - 500, partition_key="k"),
        single(b"expired", deliver_at_time=due_ms - 400, properties=expired),
        encrypted(single(b"secret", deliver_at_time=due_ms - 300), "theirs"),
        batch([b"a", b"b"], deliver_at_time=due_ms),
    ]
    files.take(Cancels([Cancel("key", "k", Position(9, 0), 0, 10**15)]))
    files.take(DueEntries(bundle(entries), due_ms + 50, {}, clock_ms=due_ms + 50))
    ingested = TaskResult(SOURCE.topic, SOURCE.partition, Position(7, 9), {}, [])
    (frame,) = files.finish(StateSummary([json.loads(json.dumps(ingested, default=fields_of))]))
    (result,) = results_from_json(frame["result"][0])
    assert result.written.reasons == {"cancelled": 1, "expired": 1, "encrypted": 1}
    assert result.released == Released(3, BROKER_TIME_MS + 40_000, BROKER_TIME_MS)


def test_the_topic_of_due_messages_gets_what_a_table_rejects_or_leaves_out(tmp_path: Path) -> None:
    for folder in ("m", "r", "o"):
        (tmp_path / folder).mkdir()
    tables = (messages_table(tmp_path / "m", where="cast(key as int) > 5"),)
    places = Place(str(tmp_path / "r")), Place(str(tmp_path / "o"))
    settings = TaskSettings(Limits(), DelayOptions(), OPTIONS, tables, *places)
    files = OutcomeFiles(SOURCE, settings, BatchSettings(0))
    due_ms = BROKER_TIME_MS + 60_000
    entries = [
        single(key.encode(), deliver_at_time=due_ms, partition_key=key)
        for key in ("7", "no number", "3")
    ]
    entries.append(encrypted(single(b"secret", deliver_at_time=due_ms), "theirs"))
    files.take(DueEntries(bundle(entries), due_ms + 50, {TOPIC: BEFORE_ALL}, clock_ms=due_ms + 50))
    ingested = TaskResult(SOURCE.topic, SOURCE.partition, Position(7, 9), {}, [])
    (frame,) = files.finish(StateSummary([json.loads(json.dumps(ingested, default=fields_of))]))
    (result,) = results_from_json(frame["result"][0])
    assert result.written.reasons == {"transform_failed": 1, "no_table": 1, "encrypted": 1}
    (file,) = result.outbox
    published = pq.read_table(str(tmp_path / "o" / file.name))["value"].to_pylist()
    assert published == [b"7", b"no number", b"3"]
