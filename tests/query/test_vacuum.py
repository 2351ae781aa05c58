"""What killed tasks left goes, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from ledgerlake.errors import TableError, UsageError
from ledgerlake.query.config import Config, parse_config
from ledgerlake.query.vacuum import vacuum


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Two tables, of which one has a file in use, an old orphan and one of a task in work."""
    data = {
        "source": {"service_url": "pulsar://localhost", "topics": ["t"]},
        "stream": {"name": "s"},
        "delta": {"path": str(tmp_path / "messages")},
    }
    for name in ("messages", "messages_rejects"):
        write_deltalake(str(tmp_path / name), pa.table({"n": [1, 2, 3]}))
    messages = tmp_path / "messages"
    for name in (*messages.glob("*.parquet"), messages / "part-old.parquet", messages / "part-new.parquet"):
        path = Path(name)
        path.touch()
        if path.name != "part-new.parquet":
            os.utime(path, (time.time() - 30 * 86_400,) * 2)
    return parse_config(data)


def left(config: Config) -> set[str]:
    return {one.name for one in Path(config.delta.path).glob("part-*.parquet")}


def test_only_old_files_that_the_table_does_not_use_are_removed(config: Config) -> None:
    before = left(config)
    (would, nothing) = vacuum(config, dry_run=True)
    assert (would.files, nothing.files) == (["part-old.parquet"], [])
    assert left(config) == before
    assert vacuum(config)[0].files == ["part-old.parquet"]
    assert left(config) == before - {"part-old.parquet"}
    assert DeltaTable(config.delta.path).to_pyarrow_table()["n"].to_pylist() == [1, 2, 3]


def test_a_file_of_a_task_in_work_is_never_old_enough(config: Config) -> None:
    assert "part-new.parquet" not in vacuum(config, 1)[0].files
    with pytest.raises(UsageError, match="less than an hour"):
        vacuum(config, 0)


def test_a_missing_table_is_one_sentence(config: Config, tmp_path: Path) -> None:
    os.rename(tmp_path / "messages_rejects", tmp_path / "elsewhere")
    with pytest.raises(TableError, match="messages_rejects cannot be vacuumed"):
        vacuum(config)
