"""The writing tasks without Spark: what a range tells the stateful stage, and what the stage makes
of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from bench.throughput import results

from ledgerlake.assembly.assembler import Assembled, Rejected
from ledgerlake.assembly.rules import Limits
from ledgerlake.client.topics import join_partition
from ledgerlake.decode.messages import BatchRange
from ledgerlake.decode.split import split_bundle
from ledgerlake.errors import SetupError
from ledgerlake.operators.ingest import decode_ranges, write_ranges
from ledgerlake.operators.outcome_digest import OutcomeDigest
from ledgerlake.operators.outcome_files import OutcomeFiles
from ledgerlake.operators.results import (
    BatchSettings,
    StageSettings,
    TaskSettings,
    results_from_json,
)
from ledgerlake.operators.stage_rows import RowKind, TaskReport, report_from_json
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source.pieces import Piece
from ledgerlake.source.planning import EntryRange
from ledgerlake.stored.places import Place
from ledgerlake.wire.entry import encode_entry, parse_entry
from ledgerlake.wire.message_id import Position
from tests.chunks import chunk_entries
from tests.entries import batch, bundle, single
from tests.operators.stage import SOURCE, Stage
from tests.pipeline_tables import messages_table

if TYPE_CHECKING:
    from pathlib import Path

    from ledgerlake.options.source_options import SourceOptions

OPTIONS = parse_options({"service.url": "pulsar://nowhere:1", "topic": "t"})
NOW_MS = 1_700_000_000_000
FAST_MS = NOW_MS + 10**9
LIMITS = Limits(expire_after_ms=3_600_000)
ENTRY = encode_entry(
    pb.MessageMetadata(producer_name="fast", sequence_id=1, publish_time=FAST_MS), b"v"
)


def span(entries: list[bytes], clock_ms: int | None) -> EntryRange:
    return EntryRange(
        join_partition(SOURCE.topic, SOURCE.partition),
        Position(7, -1),
        Position(7, len(entries) - 1),
        clock_ms=clock_ms,
    )


def pieces(entries: list[bytes]) -> list[Piece]:
    return [
        Piece(kind, view, broker_ms=broker_ms)
        for kind, view, broker_ms in split_bundle(bundle(entries))
    ]


def task_settings(folder: Path, options: SourceOptions = OPTIONS, **delay: Any) -> TaskSettings:
    return TaskSettings(
        LIMITS, DelayOptions(**delay), options, (messages_table(folder),), Place(str(folder))
    )


def written(
    folder: Path, entries: list[bytes], clock_ms: int | None = None, **delay: Any
) -> list[pa.RecordBatch]:
    """Rows of a task of the pipeline."""
    settings = task_settings(folder, **delay)
    return list(
        write_ranges([(span(entries, clock_ms), pieces(entries))], settings, BatchSettings(0))
    )


def decoded(
    _folder: Path, entries: list[bytes], clock_ms: int | None = None, **delay: Any
) -> list[pa.RecordBatch]:
    """Rows of a task of ``messages()``."""
    settings = StageSettings(LIMITS, DelayOptions(**delay), OPTIONS)
    return list(decode_ranges([(span(entries, clock_ms), pieces(entries))], settings))


def report_of(rows: list[pa.RecordBatch]) -> TaskReport:
    (report,) = (
        row for batch in rows for row in batch.to_pylist() if row["kind"] == RowKind.REPORT
    )
    return report_from_json(report["header"])


@pytest.mark.parametrize(
    ("reason", "ends", "table", "message"),
    [
        ("transform_failed", True, {"where": "cast(key as int) > 5"}, {"partition_key": "no"}),
        ("no_table", False, {"where": "cast(key as int) > 5"}, {"partition_key": "3"}),
        ("no_table", False, {"where": "key = '5'"}, {"partition_key": "3", "null_value": True}),
        (
            "no_table",
            False,
            {"where": "key = '5'", "mode": "latest"},
            {"partition_key": "3", "null_value": True},
        ),
        ("no_key", False, {"mode": "latest"}, {}),
    ],
)
def test_only_a_message_that_does_not_fit_its_table_can_end_a_stream(
    reason: str, ends: bool, table: dict[str, str], message: dict[str, Any], tmp_path: Path
) -> None:
    entries = [single(b"v", **message)]
    settings = replace(task_settings(tmp_path), tables=(messages_table(tmp_path, **table),))

    def rejected(settings: TaskSettings) -> dict[str, int]:
        rows = write_ranges([(span(entries, None), pieces(entries))], settings, BatchSettings(0))
        reasons: dict[str, int] = report_of(list(rows)).result["reasons"]
        return reasons

    assert rejected(settings) == {reason: 1}
    stopping = replace(settings, stops_at_misfits=True)
    if ends:
        with pytest.raises(SetupError, match=reason):
            rejected(stopping)
    else:
        assert rejected(stopping) == {reason: 1}


@pytest.mark.parametrize("task", [written, decoded])
@pytest.mark.parametrize("enabled", [True, False])
def test_no_time_that_a_producer_wrote_is_the_clock(
    task: Any, enabled: bool, tmp_path: Path
) -> None:
    delayed = encode_entry(
        pb.MessageMetadata(
            producer_name="p", sequence_id=1, publish_time=FAST_MS, deliver_at_time=FAST_MS
        ),
        b"v",
    )
    entries = [ENTRY, delayed, *chunk_entries(b"large message", 2, publish_time=FAST_MS)]
    assert report_of(task(tmp_path, entries, enabled=enabled)).now_ms is None
    assert report_of(task(tmp_path, entries, NOW_MS, enabled=enabled)).now_ms == NOW_MS


@pytest.mark.parametrize("task", [written, decoded])
def test_the_brokers_time_is_the_clock_also_where_only_chunks_come(
    task: Any, tmp_path: Path
) -> None:
    (chunk, _) = chunk_entries(b"large message", 2, publish_time=FAST_MS)
    parsed = parse_entry(chunk)
    stored = encode_entry(
        parsed.metadata, bytes(parsed.payload), pb.BrokerEntryMetadata(broker_timestamp=NOW_MS)
    )
    assert report_of(task(tmp_path, [stored])).now_ms == NOW_MS


@pytest.mark.parametrize(
    ("name", "value", "difference"),
    [
        ("readCompacted", "false", "2 messages, and now 1"),
        ("readCompacted", "true", ""),
        ("cryptoFailureAction", "reject", "2 messages, and now 1"),
        ("cryptoFailureAction", "pass", ""),
    ],
)
def test_a_repeat_may_have_other_messages_where_compaction_or_a_key_decides_about_them(
    name: str, value: str, difference: str, tmp_path: Path
) -> None:
    options = parse_options({"service.url": "pulsar://nowhere:1", "topic": "t", name: value})
    settings = task_settings(tmp_path, options)

    def digest_of(entries: list[bytes]) -> OutcomeDigest:
        ranges = [(span(entries, None), pieces(entries))]
        (row,) = write_ranges(
            ranges, settings, BatchSettings(0, with_state=[]), is_sole_reader=True
        )
        (result,) = results_from_json(row["header"][0].as_py())
        return OutcomeDigest.from_json(result.written.digest.to_json())

    assert digest_of([ENTRY, ENTRY]).difference(digest_of([ENTRY])) == difference


@pytest.mark.parametrize("task", [written, decoded])
def test_an_entry_of_which_a_part_belongs_to_the_range_travels_alone(
    task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batched = batch([b"a", b"b", b"c"], deliver_at_time=FAST_MS)
    split_pieces = pieces([batched, batched])
    monkeypatch.setitem(
        globals(), "pieces", lambda _: [replace(split_pieces[0], first_entry=BatchRange(0, 1))]
    )
    rows = [row for rows in task(tmp_path, [batched, batched]) for row in rows.to_pylist()]
    assert [(row["kind"], row["entry_id"], row["header"]) for row in rows[:2]] == [
        ("delayed", 0, "[0, 1]"),
        ("delayed", -1, None),
    ]
    assert b"".join(row["entry"] for row in rows[:2]) == split_pieces[0].frames


@pytest.mark.parametrize("task", [written, decoded])
def test_a_producer_with_a_fast_clock_expires_nobodys_open_message(
    task: Any, tmp_path: Path
) -> None:
    slow = chunk_entries(b"large message", 2, uuid="slow-1", producer_name="slow", publish_time=1)
    stage = Stage(LIMITS)
    kinds: list[type] = []
    fast = chunk_entries(b"another", 2, publish_time=FAST_MS)
    for entries, clock_ms in (
        ([slow[0]], NOW_MS),
        ([ENTRY, fast[0]], NOW_MS + 1000),
        ([ENTRY, ENTRY, slow[1]], NOW_MS + 2000),
    ):
        outcomes = stage.run(task(tmp_path, entries, clock_ms))
        kinds += [type(each) for each in outcomes if isinstance(each, Rejected | Assembled)]
    assert kinds == [Assembled]


@pytest.mark.parametrize("with_state", [[], None])
def test_what_the_bench_puts_in_place_of_the_stage_has_its_results(
    with_state: list[str] | None, tmp_path: Path
) -> None:
    settings, batch, entries = (
        task_settings(tmp_path),
        BatchSettings(0, with_state=with_state),
        [ENTRY, ENTRY],
    )
    ingested = write_ranges(
        [(span(entries, None), pieces(entries))], settings, batch, is_sole_reader=True
    )
    rows = pa.Table.from_batches(ingested).to_batches()
    (batch_of_results,) = results(lambda source: OutcomeFiles(source, settings, batch), iter(rows))
    (text,) = batch_of_results["result"].to_pylist()
    (result,) = results_from_json(text)
    assert [file.rows for file in result.written.tables["messages"].files] == [2]
