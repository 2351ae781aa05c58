"""What a table's readers have to know, and what they can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from ledgerlake.decode import schema
from ledgerlake.errors import SetupError
from ledgerlake.stored.places import Place
from ledgerlake.table.clustered_table import ClusteredRecordTable
from ledgerlake.table.latest_table import LatestRecordTable, LatestTable
from ledgerlake.table.record_table import RecordTable

if TYPE_CHECKING:
    from pathlib import Path

ID = pa.struct([("id", pa.int64())])
LOCAL = pa.struct([("at", pa.list_(pa.struct([("local", pa.timestamp("us"))])))])


def made(table: RecordTable, record: pa.StructType = ID) -> RecordTable:
    table.add_columns(record)
    table.create()
    return table


def reader_features(table: RecordTable | LatestTable) -> list[str]:
    return sorted(DeltaTable(table.path.uri).protocol().reader_features or [])


def test_a_table_demands_only_the_features_that_it_needs(tmp_path: Path) -> None:
    latest = LatestTable(Place(str(tmp_path / "latest")), schema.MESSAGES)
    latest.create()
    assert reader_features(latest) == ["deletionVectors"]
    of_records = made(LatestRecordTable(Place(str(tmp_path / "latest_records"))))
    assert reader_features(of_records) == ["deletionVectors"]
    of_records.add_columns(LOCAL)
    assert reader_features(of_records) == ["deletionVectors", "timestampNtz"]
    for name, kind in (("plain", RecordTable), ("clustered", lambda path: ClusteredRecordTable(path, ["id"]))):
        table = made(kind(Place(str(tmp_path / name))))
        table.begin()
        table.add_columns(pa.struct([("more", pa.string())]))
        assert reader_features(table) == []
        table.add_columns(LOCAL)
        assert reader_features(table) == ["timestampNtz"]
    for name in ("latest", "latest_records", "plain", "clustered"):
        table = DeltaTable(str(tmp_path / name))
        assert len(table.history()) == table.version() + 1


def test_columns_that_no_reader_could_read_are_refused_before_they_are_in_the_log(tmp_path: Path) -> None:
    deep: pa.DataType = pa.int32()
    for _ in range(60):
        deep = pa.struct([("a", deep)])
    record = pa.struct([("deep", deep)])
    table = made(RecordTable(Place(str(tmp_path / "there"))))
    version = DeltaTable(table.path.uri).version()
    with pytest.raises(SetupError, match="a Delta table cannot have the columns"):
        table.add_columns(record, learned=record)
    assert DeltaTable(table.path.uri).version() == version
    table.add_columns(pa.struct([("more", pa.string())]))
    assert [field.name for field in table.record] == ["id", "more"]
    for new in (RecordTable(Place(str(tmp_path / "new"))), LatestRecordTable(Place(str(tmp_path / "new")))):
        with pytest.raises(SetupError, match="a Delta table cannot have the columns"):
            new.add_columns(record)
        assert new.record.num_fields == 0
