"""A table of very many commits: what its log holds does not grow for good."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable

from ledgerlake.sinks.ordered import DataFile
from ledgerlake.sinks.tables import Table

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = pa.schema([("number", pa.int64())])
COMMITS = 230


def test_expired_entries_of_the_log_are_removed_though_not_looked_for_at_each_commit(tmp_path: Path) -> None:
    path = str(tmp_path / "table")
    DeltaTable.create(path, SCHEMA, configuration={"delta.logRetentionDuration": "interval 0 seconds"})
    table = Table(path, SCHEMA)
    most = 0
    for number in range(COMMITS):
        file = DataFile(f"part-{number}.parquet", 100, 1, json.dumps({"numRecords": 1}))
        assert table.commit("query", number, [file], {})
        most = max(most, len(os.listdir(f"{path}/_delta_log")))

    assert most < 150
    found = DeltaTable(path)
    assert found.version() == COMMITS
    assert len(found.file_uris()) == COMMITS
    assert found.transaction_version("query") == COMMITS - 1
