"""What a table's log says is the same in every form of a checkpoint, wherever it is asked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from ledgerlake.decode import schema
from ledgerlake.errors import TableAccessError, TableError
from ledgerlake.options.spark_options import SparkConfig
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.clustered_table import ClusteredTable
from ledgerlake.table.compaction import Compaction
from ledgerlake.table.delta_table import Table
from ledgerlake.table.latest_table import LatestTable
from ledgerlake.table.log_state import clustering_columns, read_log_state, read_transactions
from ledgerlake.table.ordered_files import BufferedWriter, data_folder
from ledgerlake.table.vacuum import vacuum
from ledgerlake.verify.table_rows import TableRows
from tests.ageing import make_older
from tests.table.log_forms import FORMS, rewrite_log
from tests.table.rows import rows

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS: dict[str, Callable[[Place], Table]] = {
    "messages": lambda place: Table(place, schema.MESSAGES),
    "clustered": lambda place: ClusteredTable(place, schema.MESSAGES, ["key"]),
    "latest": lambda place: LatestTable(place, schema.MESSAGES),
}
TOPICS = [f"persistent://public/default/t{number}" for number in range(12)]
BATCHES, ROWS = 12, 6
ORPHAN = "part-00000099-00000-000-1ae5adda-00c7-4e01-b2db-42d921938b81.zstd.parquet"


def opened(kind: str, place: Place) -> Table:
    table = KINDS[kind](place)
    table.check(None)
    table.begin()
    return table


def commit(table: Table, number: int) -> None:
    times_us = {topic: number for topic in TOPICS}
    record = BatchCommit("stream", "query", number, number)
    writer = BufferedWriter(data_folder(table.path, table.schema, f"part-{number:08}-00000"))
    for position in range(ROWS):
        key = f"k{number}:{position}" if position else "often"
        content = rows([number], ROWS * number + position, key=key, is_null=False)
        writer.write(pa.Table.from_batches([content]))
    assert not table.contains(record)
    table.commit(record, writer.finish(), times_us)


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A table of 40 days with some micro-batches and a file that it does not name, and its kind."""
    kind, folder = request.param, tmp_path_factory.mktemp("made") / "t"
    table = KINDS[kind](Place(str(folder)))
    table.check(None)
    table.create({"delta.checkpointInterval": "100000"})
    table.begin()
    table.begin_stream("stream", TOPICS)
    for number in range(BATCHES):
        commit(table, number)
    (folder / ORPHAN).touch()
    make_older(folder, 40)
    return kind, folder


def answers(kind: str, folder: Path) -> dict[str, Any]:
    """All that the parts of the product ask of a log, and what a start and a micro-batch do."""
    place, delta = Place(str(folder)), DeltaTable(str(folder))
    state = read_log_state(place, delta.version())
    found: dict[str, Any] = {
        "files": {
            name: {part: entry.get(part) for part in ("size", "stats", "deletionVector")}
            for name, entry in state.files.items()
        },
        "transactions": read_transactions(place, delta.version()),
        "clustering": clustering_columns(place, delta.version()),
        "unused": vacuum(place, 24, overrules_table=True, dry_run=True).files,
        "verified": sorted(
            entry_id
            for _, batch in TableRows(place, SparkConfig()).batches()
            for entry_id in batch["entry_id"].to_pylist()
        ),
    }
    table = opened(kind, place)
    found["version at the start"] = DeltaTable(str(folder)).version() - delta.version()
    found["topics"] = table.written_topic_partitions()
    found["times"] = table.effective_times_us(TOPICS)
    commit(table, BATCHES)
    if kind != "latest":
        found["merged"] = Compaction(place, schema.MESSAGES).run()
    found["entries"] = entries(folder)
    return found


def entries(folder: Path) -> list[int]:
    query = QueryBuilder().register("t", DeltaTable(str(folder)))
    return sorted(pa.table(query.execute("select entry_id from t"))["entry_id"].to_pylist())


@pytest.mark.parametrize("form", FORMS[1:])
def test_each_form_of_a_checkpoint_gives_the_answers_of_the_commits(
    made: tuple[str, Path], form: str, tmp_path: Path
) -> None:
    kind, folder = made
    found = {}
    for name in ("commits", form):
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        rewrite_log(copy, name)
        found[name] = answers(kind, copy)
    assert found[form] == found["commits"]
    assert found[form]["topics"] == set(TOPICS)
    assert found[form]["clustering"] == (["key"] if kind == "clustered" else [])
    assert found[form]["unused"] == [ORPHAN]
    deleted = BATCHES if kind == "latest" else 0
    vectors = [entry["deletionVector"] for entry in found[form]["files"].values()]
    assert len(vectors) - vectors.count(None) == max(0, deleted - 1)
    assert len(found[form]["entries"]) == (BATCHES + 1) * ROWS - deleted


def test_a_sidecar_that_is_missing_is_refused_before_anything_is_written(
    made: tuple[str, Path], tmp_path: Path
) -> None:
    kind, folder = made
    copy = tmp_path / "t"
    shutil.copytree(folder, copy)
    rewrite_log(copy, "uuid.json with sidecars")
    for sidecar in (copy / "_delta_log" / "_sidecars").glob("*"):
        sidecar.unlink()
    before = sorted(os.listdir(copy / "_delta_log"))
    with pytest.raises(TableError, match=f"^the table at {copy} cannot be opened: ") as error:
        KINDS[kind](Place(str(copy))).check(None)
    assert not isinstance(error.value, TableAccessError)
    assert sorted(os.listdir(copy / "_delta_log")) == before
