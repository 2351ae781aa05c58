"""What a micro-batch writes beside its tables, if the topic partitions of a stream grow, and what
its commit writes if the columns of a table do.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from ledgerlake.delay.due_times import DueSpan
from ledgerlake.operators.results import (
    PartitionResult,
    TableResult,
    TaskResult,
    results_from_json,
    results_to_json,
)
from ledgerlake.operators.stage_rows import StateSummary
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.commit import BatchResult
from ledgerlake.pipeline.wakeups import Wakeups
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.ordered_files import DataFile, OrderedWriter, data_folder
from ledgerlake.table.record_table import RecordTable
from ledgerlake.values.record_rows import PULSAR_FIELDS
from ledgerlake.wire.message_id import Position
from tests.growth.counting import Case, check
from tests.table.rows import rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_BATCHES = 10


def _few_changes_of_delayed_messages(n: int) -> Callable[[], Mapping[str, int]]:
    """Prepare topic partitions with delayed messages; each micro-batch changes one of them."""
    folder = tempfile.TemporaryDirectory()
    wakeups = Wakeups(Checkpoint(Place(folder.name)), 0)
    names = [f"persistent://public/default/orders-partition-{number}" for number in range(n)]
    spans = [DueSpan(1000 * number, 1000, 1) for number in range(1, 200)]
    wakeups.update(0, dict.fromkeys(names, 1000), {name: list(spans) for name in names})

    def work() -> Mapping[str, int]:
        written = 0
        for batch_id in range(1, 1 + _BATCHES):
            wakeups.update(
                batch_id,
                {names[batch_id]: 1000},
                {names[batch_id]: [*spans, DueSpan(10**6, 1000, batch_id)]},
            )
            file = Path(folder.name) / "ledgerlake" / "wakes" / f"{batch_id:010d}.json"
            written += sum(len(of_name) for of_name in json.loads(file.read_text())["due"].values())
        folder.cleanup()
        return {"due counts": written}

    return work


def _changes_of_all(n: int) -> Callable[[], Mapping[str, int]]:
    """Prepare topic partitions. Micro-batch after micro-batch changes all of them."""
    folder = tempfile.TemporaryDirectory()
    wakeups = Wakeups(Checkpoint(Place(folder.name)), 0)
    names = [f"persistent://public/default/orders-partition-{number}" for number in range(n)]
    times_ms: dict[str, int | None] = dict.fromkeys(names, 1000)

    def work() -> Mapping[str, int]:
        for batch_id in range(_BATCHES):
            wakeups.update(
                batch_id, times_ms, {name: [DueSpan(1000, 1000, batch_id + 1)] for name in names}
            )
        files = list((Path(folder.name) / "ledgerlake" / "wakes").iterdir())
        kept = sum(file.stat().st_size for file in files)
        folder.cleanup()
        return {"bytes that stay": kept}

    return work


def _results(n: int) -> Callable[[], None]:
    """Prepare what a micro-batch of many topic partitions sends to the driver."""
    summary = StateSummary([], due_spans=[DueSpan(1000, 1000, 1)])
    file = DataFile("part", 1, 1, "{}", (1, 1, 1, 1), (1, 1, 1, 1))
    results = [
        PartitionResult(
            TaskResult(
                f"orders-{number}", 0, Position(1, 1), {"messages": TableResult([file])}, []
            ),
            summary,
        )
        for number in range(n)
    ]

    def work() -> None:
        result = BatchResult(1, n, 0)
        for partition in results_from_json(results_to_json(results)):
            result.add(partition)
        assert len(result.ends) == n

    return work


def _commit_of_records(n: int) -> Callable[[], Mapping[str, int]]:
    """Prepare a table of records to which a later schema adds columns, and a file of one row."""
    folder = tempfile.TemporaryDirectory()
    place = Place(folder.name)
    table = RecordTable(place)
    table.add_columns(pa.struct([("id", pa.int64())]))
    table.create()
    table.add_columns(pa.struct([(f"field_{number}", pa.string()) for number in range(n)]))
    messages, records = rows([1]), pa.array([{"id": 1}], table.record)
    writer = OrderedWriter(data_folder(place, table.schema, "part-00000000-00000"), None)
    columns = [*(messages[field.name] for field in PULSAR_FIELDS), records]
    writer.write(pa.RecordBatch.from_arrays(columns, schema=table.schema))
    files, batch = writer.finish(), BatchCommit("stream", "query", 0, 0)

    def work() -> Mapping[str, int]:
        assert not table.contains(batch)
        table.commit(batch, files, {})
        commits = sorted((Path(folder.name) / "_delta_log").glob("*.json"))
        actions = map(json.loads, commits[-1].read_text().splitlines())
        (stats,) = (action["add"]["stats"] for action in actions if "add" in action)
        folder.cleanup()
        return {"bytes of statistics": len(stats)}

    return work


CASES = [
    Case(
        "RecordTable.commit, columns of a later schema",
        _commit_of_records,
        constant=("bytes of statistics",),
    ),
    Case("results of a micro-batch, topic partitions", _results),
    Case("Wakeups.update, topic partitions that change", _changes_of_all),
    Case(
        "Wakeups.update, topic partitions without a change",
        _few_changes_of_delayed_messages,
        constant=("due counts",),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_work_of_a_commit_grows_with_its_list_at_most(case: Case) -> None:
    check(case)
