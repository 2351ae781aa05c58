"""What killed tasks left goes, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyarrow.fs import LocalFileSystem

from ledgerlake.decode.messages import TopicPartition
from ledgerlake.errors import TableError, UsageError
from ledgerlake.operators.partition_writer import file_prefix
from ledgerlake.operators.results import BatchSettings
from ledgerlake.options.config import Config, parse_config
from ledgerlake.stored.places import Place
from ledgerlake.table.ordered_files import FileWriter, ParquetFolder
from ledgerlake.table.vacuum import vacuum
from tests.ageing import make_older

# As tasks name them, see ``operators.partition_writer.file_prefix`` and ``table.ordered_files``.
OLD = "part-00000007-00001-000-2c1f8f04-43d6-4d0c-9a9c-6a3f0c0e2a11.zstd.parquet"
WEEK = 168
SOURCE = TopicPartition("t", 1)
NEW = "part-00000008-00001-000-5f0c3b0e-8a51-4a0e-b3a3-1c1b8a9d6e22.zstd.parquet"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Two tables; one has a file in use, an old orphan and a file of a running task."""
    data = {
        "source": {"service_url": "pulsar://localhost", "topics": ["t"]},
        "stream": {"name": "s"},
        "delta": {"path": str(tmp_path / "messages")},
    }
    for name in ("messages", "messages_rejects"):
        write_deltalake(str(tmp_path / name), pa.table({"n": [1, 2, 3]}))
    messages = tmp_path / "messages"
    for path in (*messages.glob("*.parquet"), messages / OLD, messages / NEW):
        path.touch()
        if path.name != NEW:
            os.utime(path, (time.time() - 30 * 86_400,) * 2)
    return parse_config(data)


def data_files(config: Config) -> set[str]:
    return {path.name for path in Path(config.delta.path).glob("part-*.parquet")}


def test_only_old_files_that_the_table_does_not_use_are_removed(config: Config) -> None:
    before = data_files(config)
    would = vacuum(config.messages_place, WEEK, dry_run=True)
    nothing = vacuum(config.rejects_place, WEEK, dry_run=True)
    assert (would.files, nothing.files) == ([OLD], [])
    assert data_files(config) == before
    assert vacuum(config.messages_place, WEEK).files == [OLD]
    assert data_files(config) == before - {OLD}
    assert DeltaTable(config.delta.path).to_pyarrow_table()["n"].to_pylist() == [1, 2, 3]


def test_a_file_of_a_task_in_work_is_never_old_enough(config: Config) -> None:
    assert NEW not in vacuum(config.messages_place, 1, overrules_table=True).files
    with pytest.raises(UsageError, match="less than an hour"):
        vacuum(config.messages_place, 0)


def test_a_missing_table_is_one_sentence(config: Config, tmp_path: Path) -> None:
    os.rename(tmp_path / "messages_rejects", tmp_path / "elsewhere")
    with pytest.raises(
        TableError,
        match=r"there is no table at .*messages_rejects; if it was removed, restore it; else run the pipeline first",
    ):
        vacuum(config.rejects_place, WEEK)


def test_what_lies_in_the_tables_folder_and_is_no_data_file_of_it_stays(config: Config) -> None:
    messages = Path(config.delta.path)
    names = ["notes.txt", "export.parquet", "part-1.parquet", "day=1/" + OLD, f"rejects/{OLD}"]
    names += [
        "rejects/_delta_log/00000000000000000000.json",
        "checkpoint/metadata",
        "checkpoint/offsets/7",
    ]
    for name in names:
        path = messages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (time.time() - 30 * 86_400,) * 2)
    assert vacuum(config.messages_place, WEEK).files == [OLD]
    assert [name for name in names if not (messages / name).exists()] == []


def test_files_that_tasks_write_and_those_that_an_optimize_leaves_are_known_by_their_names(
    config: Config,
) -> None:
    path = config.delta.path
    write_deltalake(path, pa.table({"n": [4]}), mode="append")
    DeltaTable(path).optimize.compact()
    in_use = {Path(uri).name for uri in DeltaTable(path).file_uris()}
    folder = ParquetFolder(
        LocalFileSystem(),
        path,
        pa.schema([("n", pa.int64())]),
        file_prefix(SOURCE.partition, BatchSettings(7, {})),
    )
    writer = FileWriter(folder)
    writer.write(pa.table({"n": [1]}))
    (written_file,) = writer.finish()
    spark = "part-00000-1ae5adda-00c7-4e01-b2db-42d921938b81.c000.snappy.parquet"
    (Path(path) / spark).touch()
    for data_file in Path(path).glob("*.parquet"):
        os.utime(data_file, (time.time() - 30 * 86_400,) * 2)
    # The log says when it put the others out of use, and that was now.
    assert set(vacuum(config.messages_place, WEEK).files) == {OLD, NEW, written_file.name, spark}
    assert {file.name for file in Path(path).glob("*.parquet")} >= in_use


KEPT = "delta.deletedFileRetentionDuration"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A table of 40 days, whose two files were merged just now."""
    folder = tmp_path / "table"
    for number in range(2):
        write_deltalake(str(folder), pa.table({"n": [number]}), mode="append")
    make_older(folder, 40)
    return folder


def merged(folder: Path, properties: dict[str, str]) -> int:
    """Merge the files, and return the version before."""
    if properties:
        DeltaTable(str(folder)).alter.set_table_properties(properties)
    before = DeltaTable(str(folder)).version()
    DeltaTable(str(folder)).optimize.compact()
    return before


def removed(folder: Path, hours: int = WEEK, *, overrules_table: bool = False) -> int:
    return len(vacuum(Place(str(folder)), hours, overrules_table=overrules_table).files)


def readable(folder: Path, version: int) -> list[int]:
    return sorted(DeltaTable(str(folder), version=version).to_pyarrow_table()["n"].to_pylist())


@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize(
    "text", ["interval 30 days", "30 days", "INTERVAL 30 DAYS", "2 weeks 15 days 24 hours"]
)
def test_unused_files_stay_for_the_tables_own_retention_in_all_words_that_delta_takes(
    text: str, has_checkpoint: bool, folder: Path
) -> None:
    before = merged(folder, {KEPT: text})
    make_older(folder, 10)
    if has_checkpoint:
        # In most of these words, delta-rs takes a week, and its checkpoint forgets the removals.
        DeltaTable(str(folder)).create_checkpoint()
    assert removed(folder) == 0
    assert readable(folder, before) == [0, 1]
    if not has_checkpoint:
        make_older(folder, 21)
        assert removed(folder) == 2


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_retention_that_is_longer_than_the_tables_own_holds(
    has_checkpoint: bool, folder: Path
) -> None:
    before = merged(folder, {KEPT: "interval 1 day"})
    make_older(folder, 10)
    if has_checkpoint:
        DeltaTable(str(folder)).create_checkpoint()
    assert removed(folder, 30 * 24) == 0
    assert removed(folder, 30 * 24, overrules_table=True) == 0
    assert readable(folder, before) == [0, 1]
    assert removed(folder, WEEK) == 2


def test_only_a_retention_that_overrules_the_table_is_shorter_than_its_own(folder: Path) -> None:
    merged(folder, {KEPT: "30 days"})
    make_older(folder, 10)
    assert removed(folder, 24) == 0
    assert removed(folder, 24, overrules_table=True) == 2


def test_a_file_of_the_oldest_version_that_the_log_still_has_stays(folder: Path) -> None:
    DeltaTable(str(folder)).create_checkpoint()
    for commit in (folder / "_delta_log").glob("*0.json"):
        commit.unlink()
    merged(folder, {KEPT: "interval 1 day"})
    make_older(folder, 10)
    DeltaTable(str(folder)).create_checkpoint()
    assert removed(folder, 60 * 24) == 0
    assert readable(folder, 1) == [0, 1]


@pytest.mark.parametrize("text", ["1 month", "for ever", "interval -3 days", ""])
def test_nothing_goes_while_the_tables_retention_is_not_known(text: str, folder: Path) -> None:
    merged(folder, {KEPT: text})
    make_older(folder, 400)
    with pytest.raises(
        TableError, match=f"its property {KEPT} = '{text}' is not known; write for example"
    ):
        removed(folder)
    assert removed(folder, overrules_table=True) == 2


def test_an_absurd_retention_is_refused_and_one_of_the_table_keeps_everything(folder: Path) -> None:
    merged(folder, {KEPT: "interval 999999999999 weeks"})
    make_older(folder, 3650)
    assert removed(folder) == 0
    with pytest.raises(UsageError, match="which are 100 years"):
        removed(folder, 10**12)
