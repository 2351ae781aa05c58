"""The sink commits what the tasks of a micro-batch wrote, if this process still owns the stream."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from deltalake import DeltaTable, write_deltalake

from ledgerlake.decode import schema
from ledgerlake.errors import CheckpointError, OwnershipError, ProcessLostError, TableAccessError
from ledgerlake.operators.outcome_digest import OutcomeDigest, Tally, depends_on_surroundings
from ledgerlake.operators.results import (
    PartitionResult,
    TableResult,
    TaskResult,
    TopicSchemas,
    results_to_json,
)
from ledgerlake.operators.stage_rows import StateSummary
from ledgerlake.pipeline.commit import DeltaSink
from ledgerlake.publish.outbox import Outbox
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.delta_table import Table
from ledgerlake.table.open_table import batch_at
from ledgerlake.table.ordered_files import DataFile
from ledgerlake.wire.message_id import Position
from tests.pipeline_tables import opened_tables

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ledgerlake.pipeline.tables import Tables

_RANGE = {"t": {"start": {"ledger": 1, "entry": 0}, "end": {"ledger": 1, "entry": 5}}}


class Frame:
    """The rows of a micro-batch whose tasks wrote nothing, with the results of topics."""

    def __init__(self, *rows: list[str]) -> None:
        self.rows = rows
        context = SimpleNamespace(setLocalProperty=lambda _name, _value: None)
        self.sparkSession = SimpleNamespace(sparkContext=context)

    def collect(self) -> list[Any]:
        return [
            SimpleNamespace(
                result=results_to_json(
                    [
                        PartitionResult(
                            TaskResult(topic, -1, Position(1, 5), {}, []), StateSummary([])
                        )
                        for topic in topics
                    ]
                )
            )
            for topics in self.rows
        ]


def tables_in(folder: Path) -> Tables:
    for name, columns in (("messages", schema.MESSAGES), ("rejects", schema.REJECTS)):
        write_deltalake(str(folder / name), columns.empty_table())
    return opened_tables(folder)


def taken_over() -> None:
    raise OwnershipError("another process has taken over")


def test_a_process_that_lost_the_stream_while_its_tasks_ran_commits_nothing(tmp_path: Path) -> None:
    sink = DeltaSink(tables_in(tmp_path))
    batch = BatchCommit("s", "ledgerlake:s:q", 0, 1, _RANGE)
    frame: Any = Frame()
    with pytest.raises(OwnershipError):
        sink.write(frame, batch, None, taken_over, TopicSchemas())
    assert DeltaTable(str(tmp_path / "messages")).version() == 0
    sink.write(frame, batch, None, lambda: None, TopicSchemas())
    assert DeltaTable(str(tmp_path / "messages")).version() == 1


@pytest.mark.parametrize("rows", [[["a"]], [["a"], ["a", "b"]], [["a", "b"], ["b"]]])
def test_results_of_two_runs_of_a_task_that_do_not_fit_together_are_not_committed(
    rows: list[list[str]], tmp_path: Path
) -> None:
    sink = DeltaSink(tables_in(tmp_path))
    batch = BatchCommit("s", "ledgerlake:s:q", 0, 1, _RANGE, frozenset("ab"))
    frame: Any = Frame(*rows)
    with pytest.raises(ProcessLostError, match="the loss of an executor"):
        sink.write(frame, batch, None, lambda: None, TopicSchemas())
    assert DeltaTable(str(tmp_path / "messages")).version() == 0
    whole: Any = Frame(["a"], ["b"])
    sink.write(whole, batch, None, lambda: None, TopicSchemas())
    assert DeltaTable(str(tmp_path / "messages")).version() == 1


def test_due_messages_that_no_table_can_have_are_sent_after_a_restart_too(tmp_path: Path) -> None:
    tables, place = tables_in(tmp_path), Place(str(tmp_path / "outbox"))
    outbox = Outbox(place)
    outbox.begin(None, None)
    for name in ("outbox/due.parquet", "rejects/reject.parquet"):
        (tmp_path / name).write_bytes(b"rows")
    batch = BatchCommit("s", "ledgerlake:s:q", 3, 1, _RANGE)
    written = TaskResult("t", -1, Position(1, 5), {}, [DataFile("reject.parquet", 4, 1, "{}")])
    DeltaSink(tables, outbox).commit(
        batch,
        [PartitionResult(written, StateSummary([]), outbox=[DataFile("due.parquet", 4, 1, "{}")])],
    )
    recorded = opened_tables(tmp_path).main.table.recorded(batch.query)
    assert recorded is not None
    restarted = Outbox(place)
    restarted.begin(recorded.batch_id, outbox.name)
    assert [ready.batch_id for ready in restarted.ready()] == [3]


@pytest.mark.parametrize(
    ("dies_at", "sent"),
    [
        ([Table], 2),
        ([Table, Outbox], 2),
        ([Outbox], 1),
        ([Outbox, Outbox], 1),
        ([], 1),
    ],
)
def test_the_topic_gets_what_the_table_has_whatever_other_runs_have(
    dies_at: list[type], sent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(str(tmp_path / "outbox"))
    batch = BatchCommit("s", "ledgerlake:s:q", 3, 1, _RANGE)
    tables_in(tmp_path)

    def run(count: int) -> Outbox:
        """A run with as many messages for the topic."""
        tables = opened_tables(tmp_path)
        recorded = tables.main.table.recorded(batch.query)
        outbox = Outbox(place)
        outbox.begin(None if recorded is None else recorded.batch_id, None)
        (tmp_path / "outbox" / f"{count}.parquet").write_bytes(b"rows")
        digest = OutcomeDigest(outbox=Tally.of(np.arange(count)), may_differ=True)
        written = TaskResult("t", -1, Position(1, 5), {}, [], digest=digest)
        files = [DataFile(f"{count}.parquet", 4, count, "{}")]
        DeltaSink(tables, outbox).commit(
            batch, [PartitionResult(written, StateSummary([]), outbox=files)]
        )
        return outbox

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    for number, place_of_death in enumerate(dies_at, 1):
        with monkeypatch.context() as patched:
            patched.setattr(place_of_death, "commit", killed)
            with pytest.raises(KeyboardInterrupt):
                run(number)
    for number in (len(dies_at) + 1, len(dies_at) + 2):
        outbox = run(number)
        assert [file.rows for ready in outbox.ready() for file in ready.files] == [sent]
        assert (
            opened_tables(tmp_path).main.table.outbox_messages(outbox.name)
            == outbox.messages_up_to(3)
            == sent
        )


def result_of(
    rows: int, released: int, reasons: dict[str, int] | None = None, waited: int = 0
) -> PartitionResult:
    digest = OutcomeDigest(
        rows=Tally.of(np.arange(rows)),
        released=Tally.of(np.arange(released)),
        waited=Tally.of(np.arange(waited)),
        may_differ=depends_on_surroundings(reasons or {}),
    )
    written = TaskResult("t", -1, Position(1, 5), {}, [], reasons or {}, digest=digest)
    return PartitionResult(written, StateSummary([]))


@pytest.mark.parametrize(
    ("first", "repeat", "difference"),
    [
        (result_of(4, 2), result_of(4, 3), "2 released delayed messages, and now 3"),
        (result_of(4, 2), result_of(5, 2), "4 messages, and now 5"),
        (result_of(4, 0), result_of(0, 0), "4 messages, and now 0"),
        (
            result_of(4, 2, waited=2),
            result_of(3, 1, {"data_loss": 1}, waited=1),
            "2 released messages that had waited, and now 1",
        ),
    ],
)
def test_a_repeat_with_another_outcome_is_refused_before_anything_changes(
    first: PartitionResult, repeat: PartitionResult, difference: str, tmp_path: Path
) -> None:
    tables, batch = tables_in(tmp_path), BatchCommit("s", "ledgerlake:s:q", 3, 1, _RANGE)
    DeltaSink(tables).commit(batch, [first])
    outbox = Outbox(Place(str(tmp_path / "outbox")))
    outbox.begin(None, None)
    with pytest.raises(CheckpointError, match=f"batch 3 .*{difference}"):
        DeltaSink(opened_tables(tmp_path), outbox).commit(batch, [repeat])
    assert outbox.ready() == []
    assert DeltaTable(str(tmp_path / "messages")).version() == 1


@pytest.mark.parametrize("repeat", [result_of(4, 2), result_of(3, 1, {"data_loss": 1})])
def test_a_repeat_with_the_same_outcome_or_one_that_the_topic_explains_goes_on(
    repeat: PartitionResult, tmp_path: Path
) -> None:
    batch = BatchCommit("s", "ledgerlake:s:q", 3, 1, _RANGE)
    DeltaSink(tables_in(tmp_path)).commit(batch, [result_of(4, 2)])
    assert DeltaSink(opened_tables(tmp_path)).commit(batch, [repeat]).repeated


def test_a_repeat_without_rejects_is_compared_with_the_rejects_of_the_first_run(
    tmp_path: Path,
) -> None:
    batch = BatchCommit("s", "ledgerlake:s:q", 3, 1, _RANGE)
    tables = tables_in(tmp_path)
    (tmp_path / "rejects" / "reject.parquet").write_bytes(b"rows")
    first = result_of(4, 2)
    outcomes = {first.topic_partition: first.written.digest.to_json()}
    # A kill came after the commit of rejects.
    tables.rejects.commit(
        replace(batch, outcomes=outcomes), [DataFile("reject.parquet", 4, 1, "{}")], {}
    )
    with pytest.raises(CheckpointError, match="2 released delayed messages, and now 3"):
        DeltaSink(opened_tables(tmp_path)).commit(batch, [result_of(4, 3)])
    assert DeltaTable(str(tmp_path / "messages")).version() == 0


def test_a_suspended_process_does_not_commit_rows_of_a_micro_batch_that_another_one_had_only_rejects_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, batch = tables_in(tmp_path), BatchCommit("s", "ledgerlake:s:q", 3, 1)
    for name in ("messages/row.parquet", "rejects/reject.parquet"):
        (tmp_path / name).write_bytes(b"rows")
    may_differ = OutcomeDigest(may_differ=True)
    row = TaskResult(
        "t",
        -1,
        Position(1, 5),
        {"messages": TableResult([DataFile("row.parquet", 4, 1, "{}")], None)},
        [],
    )
    reject = TaskResult(
        "t", -1, Position(1, 5), {}, [DataFile("reject.parquet", 4, 1, "{}")], digest=may_differ
    )
    table = tables.main.table
    commit = table.commit

    def woken_after_another_process(*arguments: Any) -> None:
        DeltaSink(opened_tables(tmp_path)).commit(
            batch, [PartitionResult(reject, StateSummary([]))]
        )
        commit(*arguments)

    monkeypatch.setattr(table, "commit", woken_after_another_process)
    with pytest.raises(TableAccessError, match="Concurrent transaction"):
        DeltaSink(tables).commit(batch, [PartitionResult(row, StateSummary([]))])
    files = [DeltaTable(str(tmp_path / name)).file_uris() for name in ("messages", "rejects")]
    assert [len(names) for names in files] == [0, 1]


def commits_of_another_stream(path: Place, count: int = 4) -> None:
    other = Table(path, schema.MESSAGES)
    for number in range(count):
        record = BatchCommit("other", "ledgerlake:other:q", number, 1)
        assert not other.contains(record)
        other.commit(record, [], {})


def log_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reads of logs that look for a commit."""
    reads: list[str] = []

    def noted(read: Callable[..., Any], name: str) -> Callable[..., Any]:
        def reading(*args: Any) -> Any:
            reads.append(name)
            return read(*args)

        return reading

    monkeypatch.setattr(DeltaTable, "history", noted(DeltaTable.history, "history"))
    monkeypatch.setattr("ledgerlake.table.delta_table.batch_at", noted(batch_at, "commit"))
    return reads


@pytest.mark.parametrize("others", [0, 4, 30])
def test_a_repeat_is_compared_however_often_another_stream_has_committed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    monkeypatch.setattr("ledgerlake.table.delta_table.HISTORY_COMMITS", 3)
    tables, batch = tables_in(tmp_path), BatchCommit("s", "ledgerlake:s:q", 3, 1, _RANGE)
    DeltaSink(tables).commit(batch, [result_of(4, 2, waited=2)])
    commits_of_another_stream(tables.main.table.path, others)
    version = DeltaTable(str(tmp_path / "messages")).version()
    reads = log_reads(monkeypatch)
    with pytest.raises(CheckpointError, match="of t it had 4 messages, and now 5"):
        DeltaSink(opened_tables(tmp_path)).commit(batch, [result_of(5, 2)])
    # The history is read for the times alone, which only commits of delta-spark have there.
    assert reads == ["history", "commit"]
    with pytest.raises(CheckpointError, match="of t it had 2 released"):
        DeltaSink(opened_tables(tmp_path)).commit(
            batch, [result_of(3, 1, {"data_loss": 1}, waited=1)]
        )
    assert (
        DeltaSink(opened_tables(tmp_path))
        .commit(batch, [result_of(3, 2, {"data_loss": 1}, waited=2)])
        .repeated
    )
    reads.clear()
    assert DeltaSink(opened_tables(tmp_path)).commit(batch, [result_of(4, 2, waited=2)]).repeated
    assert reads == ["history"]
    assert DeltaTable(str(tmp_path / "messages")).version() == version


def test_a_repeat_whose_commit_the_log_has_no_more_goes_on_only_with_the_same_outcome(
    tmp_path: Path,
) -> None:
    tables, batch = tables_in(tmp_path), BatchCommit("s", "ledgerlake:s:q", 3, 1, _RANGE)
    DeltaSink(tables).commit(batch, [result_of(4, 2)])
    commits_of_another_stream(tables.main.table.path, 1)
    newest = DeltaTable(str(tmp_path / "messages"))
    newest.create_checkpoint()
    for version in range(newest.version()):
        (tmp_path / "messages" / "_delta_log" / f"{version:020}.json").unlink()
    assert DeltaSink(opened_tables(tmp_path)).commit(batch, [result_of(4, 2)]).repeated
    with pytest.raises(
        CheckpointError,
        match="another outcome: its log no longer has the commit that says in what;",
    ):
        DeltaSink(opened_tables(tmp_path)).commit(batch, [result_of(5, 2)])


def test_a_table_without_the_numbers_of_outcomes_is_searched_and_what_is_not_found_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ledgerlake.table.delta_table.HISTORY_COMMITS", 3)
    tables, batch = tables_in(tmp_path), BatchCommit("s", "ledgerlake:s:q", 3, 1, _RANGE)
    table = tables.main.table
    append = table._append

    def without_numbers(files: list[DataFile], numbers: dict[str, int], *more: Any) -> None:
        append(
            files,
            {name: numbers[name] for name in numbers if not name.endswith((":outcomes", ":since"))},
            *more,
        )

    monkeypatch.setattr(table, "_append", without_numbers)
    DeltaSink(tables).commit(batch, [result_of(4, 2)])
    with pytest.raises(CheckpointError, match="of t it had 4 messages, and now 5"):
        DeltaSink(opened_tables(tmp_path)).commit(batch, [result_of(5, 2)])
    assert caplog.text == ""
    commits_of_another_stream(table.path)
    assert DeltaSink(opened_tables(tmp_path)).commit(batch, [result_of(4, 2)]).repeated
    assert (
        "batch 3 of the stream s is run again, and its outcome is compared with none" in caplog.text
    )
