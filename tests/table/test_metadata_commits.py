"""What a table's readers have to know, and what they can read."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from ledgerlake.decode import schema
from ledgerlake.errors import SetupError
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.clustered_table import ClusteredRecordTable
from ledgerlake.table.latest_table import LatestRecordTable, LatestTable
from ledgerlake.table.open_table import existing_table
from ledgerlake.table.ordered_files import BufferedWriter, data_folder
from ledgerlake.table.record_table import RecordTable
from ledgerlake.values.record_rows import PULSAR_FIELDS
from tests.table.rows import rows

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
    for name, kind in (
        ("plain", RecordTable),
        ("clustered", lambda path: ClusteredRecordTable(path, ["id"])),
    ):
        table = made(kind(Place(str(tmp_path / name))))
        table.begin()
        table.add_columns(pa.struct([("more", pa.string())]))
        assert reader_features(table) == []
        table.add_columns(LOCAL)
        assert reader_features(table) == ["timestampNtz"]
    for name in ("latest", "latest_records", "plain", "clustered"):
        table = DeltaTable(str(tmp_path / name))
        assert len(table.history()) == table.version() + 1


def any_type(generator: random.Random, depth: int = 0) -> pa.DataType:
    plain = [
        pa.timestamp("us"),
        pa.timestamp("us", "UTC"),
        pa.int32(),
        pa.string(),
        pa.decimal128(38, 5),
        pa.date32(),
    ]
    shape = generator.choice(["plain", "struct", "list", "map"]) if depth < 4 else "plain"
    if shape == "struct":
        return pa.struct(
            [(name, any_type(generator, depth + 1)) for name in "ab"[: generator.randint(1, 2)]]
        )
    if shape == "list":
        return pa.list_(any_type(generator, depth + 1))
    if shape == "map":
        return pa.map_(generator.choice(plain), any_type(generator, depth + 1))
    return generator.choice(plain)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("kind", [RecordTable, LatestRecordTable])
def test_a_table_of_any_types_is_opened_and_read(
    tmp_path: Path, kind: type[RecordTable | LatestRecordTable], seed: int
) -> None:
    generator = random.Random(seed)
    first, later = (
        pa.struct([(f"{name}{number}", any_type(generator)) for number in range(2)])
        for name in "ab"
    )
    table = made(kind(Place(str(tmp_path / "table"))), first)
    for number in range(2):
        opened = existing_table(table.path)
        assert opened is not None
        columns = json.loads(opened.schema().to_json())
        assert reader_features(table) == sorted(
            [
                *(["timestampNtz"] if '"timestamp_ntz"' in json.dumps(columns) else []),
                *(["deletionVectors"] if kind is LatestRecordTable else []),
            ]
        )
        messages = rows([number], first_entry=number, key=str(number), is_null=False)
        parts = [*(messages[field.name] for field in PULSAR_FIELDS), pa.nulls(1, table.record)]
        writer = BufferedWriter(data_folder(table.path, table.schema, f"part-{number:08}-00000"))
        writer.write(pa.Table.from_arrays(parts, schema=table.schema))
        record = BatchCommit("stream", "query", number, number)
        assert not table.contains(record)
        table.commit(record, writer.finish(), {})
        read = pa.table(
            QueryBuilder().register("t", DeltaTable(table.path.uri)).execute("select * from t")
        )
        assert read.num_rows == number + 1
        table.add_columns(later)


def test_columns_that_no_reader_could_read_are_refused_before_they_are_in_the_log(
    tmp_path: Path,
) -> None:
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
    for new in (
        RecordTable(Place(str(tmp_path / "new"))),
        LatestRecordTable(Place(str(tmp_path / "new"))),
    ):
        with pytest.raises(SetupError, match="a Delta table cannot have the columns"):
            new.add_columns(record)
        assert new.record.num_fields == 0
