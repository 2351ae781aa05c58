"""A table of records beside other writers."""

from __future__ import annotations

import json
import random
from operator import ge, le
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, Field, QueryBuilder
from deltalake import Schema as DeltaSchema

from ledgerlake.decode import schema
from ledgerlake.errors import TableError
from ledgerlake.options.spark_options import SparkConfig
from ledgerlake.stored.places import Place
from ledgerlake.table import ordered_files
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.clustered_table import ClusteredTable
from ledgerlake.table.compaction import Compaction
from ledgerlake.table.delta_table import Table
from ledgerlake.table.latest_table import LatestRecordTable
from ledgerlake.table.open_table import read_commit
from ledgerlake.table.ordered_files import STATISTICS_PROPERTY, OrderedWriter, data_folder
from ledgerlake.table.record_table import RecordTable
from ledgerlake.values.record_rows import PULSAR_FIELDS, rows_schema
from ledgerlake.verify.table_rows import TableRows
from tests.table.rows import rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ledgerlake.table.ordered_files import DataFile

ID = pa.struct([("id", pa.int64())])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(str(tmp_path / "messages"))
    place.make()
    return place


def created(place: Place, record: pa.StructType = ID) -> RecordTable:
    table = RecordTable(place)
    table.add_columns(record)
    table.create()
    return table


def write(table: RecordTable, number: int, task: str = "00000") -> list[DataFile]:
    messages = rows([number], number, key=f"k{number}", is_null=False)
    record = pa.array([{"id": number}], table.record)
    columns = [*(messages[field.name] for field in PULSAR_FIELDS), record]
    writer = OrderedWriter(data_folder(table.path, table.schema, f"part-{number:08}-{task}"), None)
    writer.write(pa.RecordBatch.from_arrays(columns, schema=table.schema))
    return writer.finish()


def commit(table: Table, number: int, files: list[DataFile]) -> None:
    record = BatchCommit("stream", "query", number, number)
    assert not table.contains(record)
    table.commit(record, files, {})


def test_columns_that_another_writer_adds_between_read_and_commit_do_not_stop_a_micro_batch(
    place: Place,
) -> None:
    table = created(place)
    commit(table, 0, write(table, 0))
    files = write(table, 1)
    record = BatchCommit("stream", "query", 1, 1)
    assert not table.contains(record)
    DeltaTable(place.uri).alter.add_columns([Field("checked", "boolean")])
    table.commit(record, files, {})
    assert sorted(DeltaTable(place.uri).to_pyarrow_table()["id"].to_pylist()) == [0, 1]
    assert table.recorded("query").batch_id == 1  # type: ignore[union-attr]


def test_two_pipelines_that_add_columns_at_once_both_get_theirs(place: Place) -> None:
    one, other = created(place), RecordTable(place)
    assert other.check(None)
    one._current()
    other._current()
    other.add_columns(pa.struct([("a", pa.string())]))
    one.add_columns(pa.struct([("b", pa.string()), ("a", pa.int32())]))
    assert [field.name for field in one.record] == ["id", "a", "b"]
    assert one.record.field("a").type == pa.string()
    commit(one, 0, write(one, 0))


def test_a_conflict_while_columns_are_added_is_met_with_a_second_attempt(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = created(place)
    load = RecordTable._current
    met: list[None] = []

    def conflict(self: RecordTable) -> DeltaTable:
        current = load(self)
        if not met:
            met.append(None)
            return current
        if len(met) == 1:
            met.append(None)
            DeltaTable(place.uri).alter.add_columns([Field("checked", "boolean")])
        return current

    monkeypatch.setattr(RecordTable, "_current", conflict)
    table.add_columns(pa.struct([("a", pa.string())]))
    assert [field.name for field in table.record] == ["id", "checked", "a"]


def test_a_nested_field_that_another_pipeline_adds_does_not_stop_this_one(place: Place) -> None:
    inner = pa.struct([("id", pa.int64()), ("in", pa.struct([("a", pa.int32())]))])
    table = created(place, inner)
    files = write(table, 0)
    other = RecordTable(place)
    assert other.check(None)
    other.add_columns(pa.struct([("in", pa.struct([("b", pa.int32())]))]))
    commit(table, 0, files)
    assert DeltaTable(place.uri).to_pyarrow_table()["id"].to_pylist() == [0]


def test_a_column_that_must_not_be_null_is_refused_at_the_start(place: Place) -> None:
    created(place)
    DeltaTable(place.uri).alter.add_columns([Field("checked", "boolean")])
    log = place / "_delta_log" / f"{DeltaTable(place.uri).version():020}.json"
    with open(log.root) as commit_file:
        text = commit_file.read()
    strict = text.replace(
        '\\"name\\":\\"checked\\",\\"type\\":\\"boolean\\",\\"nullable\\":true',
        '\\"name\\":\\"checked\\",\\"type\\":\\"boolean\\",\\"nullable\\":false',
    )
    assert strict != text
    with open(log.root, "w") as commit_file:
        commit_file.write(strict)
    with pytest.raises(TableError, match="NOT NULL on checked"):
        RecordTable(place).check(None)


def test_floating_numbers_have_no_bounds_and_long_texts_have_short_ones(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = pa.struct([("id", pa.int64()), ("text", pa.string()), ("number", pa.float64())])
    table = created(place, record)
    monkeypatch.setattr(ordered_files, "ROW_GROUP_BYTES", 1)
    writer = OrderedWriter(data_folder(place, table.schema, "part-00000000-00000"), None)
    for number, text in enumerate(["a", "z" * 5000]):
        # A single row as large as a row group would get a file of its own.
        messages = rows([number, number], first_entry=number * 2)
        records = pa.array([{"id": number, "text": text, "number": float("nan")}] * 2, table.record)
        columns = [*(messages[field.name] for field in PULSAR_FIELDS), records]
        writer.write(pa.RecordBatch.from_arrays(columns, schema=table.schema))
    (file,) = writer.finish()
    stats = json.loads(file.stats)
    assert stats["maxValues"]["id"] == 1
    assert (stats["minValues"]["pulsar"]["entry_id"], stats["maxValues"]["pulsar"]["entry_id"]) == (
        0,
        3,
    )
    assert (stats["minValues"]["text"], stats["maxValues"]["text"]) == (
        "a",
        "z" * 256 + "\U0010ffff",
    )
    assert "number" not in stats["minValues"] | stats["maxValues"] | stats["nullCount"]


def test_readers_that_take_missing_bounds_for_none_find_all_rows(place: Place) -> None:
    """The PyArrow dataset of delta-rs skips files without the bounds of a column, unless the table
    says that it has none.
    """
    table = created(place, pa.struct([("id", pa.int64()), ("number", pa.float64())]))
    writer = OrderedWriter(data_folder(place, table.schema, "part-00000000-00000"), None)
    messages = rows([1, 2], key="k" * 300)
    records = pa.array([{"id": 7, "number": 1.5}] * 2, table.record)
    columns = [*(messages[field.name] for field in PULSAR_FIELDS), records]
    writer.write(pa.RecordBatch.from_arrays(columns, schema=table.schema))
    table.begin()
    table.commit(BatchCommit("stream", "query", 0, 0), writer.finish(), {})
    read = DeltaTable(place.uri).to_pyarrow_dataset()
    for condition in (
        pc.field("number") == 1.5,
        pc.field("id") == 7,
        pc.field("pulsar", "late") == pa.scalar(False),
    ):
        assert read.to_table(filter=condition).num_rows == 2
    table.add_columns(
        pa.struct([("id", pa.int64()), ("number", pa.float64()), ("city", pa.string())])
    )
    read = DeltaTable(place.uri).to_pyarrow_dataset()
    assert read.to_table(filter=pc.field("city").is_null()).num_rows == 2


@pytest.mark.parametrize("merges", [False, True])
def test_the_log_has_statistics_of_the_columns_alone_that_the_table_names(
    place: Place, *, merges: bool
) -> None:
    table = created(place)
    named = DeltaTable(place.uri).metadata().configuration[STATISTICS_PROPERTY].split(",")
    table.add_columns(pa.struct([("id", pa.int64()), ("city", pa.string())]))
    for number in range(8):
        commit(table, number, write(table, number))
    if merges:
        assert Compaction(place, None).run() == 8
    for add in (
        action["add"]
        for action in read_commit(place, DeltaTable(place.uri).version())
        if "add" in action
    ):
        stats = json.loads(add["stats"])
        for part in ("minValues", "maxValues", "nullCount"):
            pulsar = stats[part].pop("pulsar")
            assert {*stats[part], *(f"pulsar.{name}" for name in pulsar)} <= {*named}
    read = DeltaTable(place.uri).to_pyarrow_dataset()
    assert read.to_table(filter=pc.field("city").is_null()).num_rows == 8
    assert read.to_table(filter=pc.field("id") == 3).num_rows == 1


def test_a_long_text_has_a_bound_before_it_and_one_after_it(place: Place) -> None:
    table = Table(place, schema.MESSAGES)
    writer = OrderedWriter(data_folder(place, table.schema, "part-00000000-00000"), None)
    writer.write(rows([1], key="a" * 300))
    writer.write(rows([2], first_entry=1, key="b" * 300))
    (file,) = writer.finish()
    stats = json.loads(file.stats)
    assert stats["minValues"]["key"] == "a" * 256 < "a" * 300
    assert "b" * 300 < stats["maxValues"]["key"] == "b" * 256 + "\U0010ffff"


@pytest.mark.parametrize("length", [255, 256, 257, 300, 5000])
def test_a_text_of_the_last_characters_has_a_short_bound_after_it_or_its_file_has_none(
    place: Place, length: int
) -> None:
    for key in ("\U0010ffff" * length, "a" + "\U0010ffff" * length, "\U0010ffff" * length + "a"):
        writer = OrderedWriter(data_folder(place, schema.MESSAGES, "part-00000000-00000"), None)
        writer.write(rows([1], key=key))
        (file,) = writer.finish()
        stats = json.loads(file.stats)
        if key.startswith("\U0010ffff" * 257):
            assert stats == {"numRecords": 1}
        else:
            assert stats["maxValues"]["key"] >= key
            assert len(stats["maxValues"]["key"]) <= 257


@pytest.mark.parametrize("seed", range(40))
def test_the_statistics_of_any_rows_are_bounds_of_a_size_that_the_columns_decide(
    place: Place, seed: int
) -> None:
    generator = random.Random(seed)
    signs = ["\U0010ffff", "\ud7ff", "\ue000", "\uffff", "\0", '"', "\\", "a", "\x7f", "\u2028"]

    def text() -> str | None:
        beginning = generator.choice(signs) * generator.choice(
            [0, 1, 15, 16, 255, 256, 257, 1024, 100_000]
        )
        return generator.choice(
            [None, beginning, beginning + "".join(generator.choices(signs, k=20))]
        )

    record = pa.struct(
        [("id", pa.int64()), *((f"text_{number}", pa.string()) for number in range(3))]
    )
    table = created(place, record)
    writer = OrderedWriter(data_folder(place, table.schema, "part-00000000-00000"), None)
    keys: list[str | None] = []
    records: list[dict[str, Any]] = []
    for number in range(generator.randint(1, 4)):
        keys.append(text())
        records.append(
            {
                name: generator.choice([None, -(2**63)]) if name == "id" else text()
                for name in record.names
            }
        )
        messages = rows([number], first_entry=number, key=keys[-1])
        columns = [
            *(messages[field.name] for field in PULSAR_FIELDS),
            pa.array([records[-1]], table.record),
        ]
        writer.write(pa.RecordBatch.from_arrays(columns, schema=table.schema))
    (file,) = writer.finish()
    paths = ordered_files.bounded_paths(table.schema)
    # A control character takes six bytes in JSON.
    assert len(file.stats.encode()) < sum(2 * 6 * 257 + 3 * len(path) + 100 for path in paths)
    stats = json.loads(file.stats)
    values: dict[str, list[Any]] = {
        "pulsar.key": keys,
        **{name: [row[name] for row in records] for name in record.names},
    }
    for path, column in values.items():
        outer, _, name = path.rpartition(".")
        known = [value for value in column if value is not None]
        for part, is_bound in (("minValues", le), ("maxValues", ge)):
            bounds = stats.get(part, {})
            bounds = bounds.get(outer, {}) if outer else bounds
            assert name not in bounds or all(is_bound(bounds[name], value) for value in known)
    commit(table, 0, [file])
    read = DeltaTable(place.uri).to_pyarrow_dataset()
    for name in record.names[1:]:
        for row in records:
            expected = sum(other[name] == row[name] for other in records)
            condition = (
                pc.field(name).is_null() if row[name] is None else pc.field(name) == row[name]
            )
            assert read.to_table(filter=condition).num_rows == expected


def test_a_file_with_very_many_columns_has_its_number_of_rows_alone_in_the_log(
    place: Place,
) -> None:
    record = pa.struct([(f"{number:0100}", pa.string()) for number in range(2500)])
    table = created(place, record)
    (file,) = write(table, 0)
    assert json.loads(file.stats) == {"numRecords": 1}
    commit(table, 0, [file])
    assert DeltaTable(place.uri).to_pyarrow_dataset().count_rows() == 1


def test_a_property_that_a_user_sets_meanwhile_does_not_stop_a_table_of_messages(
    place: Place,
) -> None:
    table = Table(place, schema.MESSAGES)
    table.create()
    record = BatchCommit("stream", "query", 0, 0)
    assert not table.contains(record)
    DeltaTable(place.uri).alter.set_table_properties({"delta.appendOnly": "true"})
    table.commit(record, [], {})
    assert table.recorded("query").batch_id == 0  # type: ignore[union-attr]


def test_a_column_that_a_user_adds_meanwhile_to_a_table_of_messages_is_an_error_that_names_it(
    place: Place,
) -> None:
    table = Table(place, schema.MESSAGES)
    table.create()
    record = BatchCommit("stream", "query", 0, 0)
    assert not table.contains(record)
    DeltaTable(place.uri).alter.add_columns([Field("checked", "boolean")])
    with pytest.raises(TableError, match="it has checked"):
        table.commit(record, [], {})


def test_a_table_whose_metadata_another_writer_reordered_and_extended_is_one_of_records(
    place: Place,
) -> None:
    pulsar = pa.struct([*reversed(PULSAR_FIELDS), pa.field("note", pa.string())])
    columns = pa.schema([pa.field("pulsar", pulsar), pa.field("id", pa.int64())])
    DeltaTable.create(str(place), DeltaSchema.from_arrow(columns))
    table = RecordTable(place)
    assert table.check(None)
    commit(table, 0, write(table, 0))
    (file,) = TableRows(place, SparkConfig()).batches()
    assert file[1]["entry_id"].to_pylist() == [0]
    found = (
        QueryBuilder()
        .register("t", DeltaTable(str(place)))
        .execute("select pulsar['key'] k from t")
    )
    assert pa.table(found.read_all())["k"].to_pylist() == ["k0"]


def test_a_column_whose_type_another_writer_changed_is_refused(place: Place) -> None:
    table = created(place)
    files = write(table, 0)
    table.schema = rows_schema(pa.struct([("id", pa.string())]))
    with pytest.raises(TableError, match="another writer changed the columns id"):
        commit(table, 0, files)


@pytest.mark.parametrize("key", ["\U00020000", "a\U0010ffff", "\U0001f600"])
def test_rows_are_found_by_a_key_with_any_character(place: Place, key: str) -> None:
    """delta-rs reads an escaped pair of surrogates in the log as another character."""
    for number, table in enumerate(
        [
            Table(place / "plain", schema.MESSAGES),
            ClusteredTable(place / "by", schema.MESSAGES, ["key"]),
        ]
    ):
        table.path.make()
        table.create()
        table.begin()
        writer = OrderedWriter(
            data_folder(table.path, schema.MESSAGES, f"part-{number:08}-00000"), None
        )
        writer.write(rows([1], key=key))
        commit(table, 0, writer.finish())
        read = DeltaTable(table.path.uri).to_pyarrow_dataset()
        assert read.to_table(filter=pc.field("key") == key).num_rows == 1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"delta.dataSkippingNumIndexedCols": "32"},
        {"delta.dataSkippingStatsColumns": "message_id,batch_index"},
    ],
)
@pytest.mark.parametrize("merges", [False, True])
def test_filters_find_all_rows_of_a_table_that_names_other_columns_with_statistics(
    place: Place, settings: dict[str, str], merges: bool
) -> None:
    DeltaTable.create(place.uri, schema.MESSAGES, configuration=settings)
    table = Table(place, schema.MESSAGES)
    assert table.examine()
    table.begin()
    assert DeltaTable(place.uri).version() == 0
    for batch_id in range(12):
        writer = OrderedWriter(data_folder(place, schema.MESSAGES, "part-00000000-00000"), None)
        writer.write(rows([1 + 2 * batch_id, 2 + 2 * batch_id], message_id="1:0"))
        commit(table, batch_id, writer.finish())
    if merges:
        assert Compaction(place, schema.MESSAGES).run() > 0
    read = DeltaTable(place.uri).to_pyarrow_dataset()
    for condition in (pc.field("message_id") == "1:0", pc.field("late") == pa.scalar(False)):
        assert read.to_table(filter=condition).num_rows == 24


@pytest.mark.parametrize("kind", [RecordTable, LatestRecordTable])
def test_columns_that_a_restore_takes_away_are_added_again_by_the_next_micro_batch(
    place: Place, kind: type[RecordTable]
) -> None:
    table = kind(place)
    table.add_columns(pa.struct([("id", pa.int64()), ("in", pa.struct([("a", pa.int32())]))]))
    table.create()
    commit(table, 0, write(table, 0))
    version = DeltaTable(place.uri).version()
    more = pa.struct([("a", pa.int32()), ("b", pa.string())])
    table.add_columns(pa.struct([("in", more), ("new", pa.string())]))
    commit(table, 1, write(table, 1))
    DeltaTable(place.uri).restore(version, protocol_downgrade_allowed=True)
    assert "new" not in pa.schema(DeltaTable(place.uri).schema()).names
    commit(table, 2, write(table, 2))
    columns = pa.schema(DeltaTable(place.uri).schema())
    assert columns.field("new").type == pa.string()
    assert columns.field("in").type.names == ["a", "b"]
    restored = kind(place)
    assert restored.check(None)
    commit(restored, 3, write(restored, 3))
    query = QueryBuilder().register("t", DeltaTable(place.uri))
    assert sorted(pa.table(query.execute("select id from t"))["id"].to_pylist()) == [0, 2, 3]


def test_a_column_that_a_restore_takes_away_and_another_writer_adds_otherwise_ends_the_run(
    place: Place,
) -> None:
    table = created(place)
    version = DeltaTable(place.uri).version()
    table.add_columns(pa.struct([("new", pa.string())]))
    DeltaTable(place.uri).restore(version)
    DeltaTable(place.uri).alter.add_columns([Field("new", "integer")])
    with pytest.raises(TableError, match="changed the columns new of the table"):
        commit(table, 0, write(table, 0))
    with pytest.raises(TableError, match="changed the columns new of the table"):
        table.append_once("replay", 1, None, write(table, 1))


def _set_property(place: Place) -> None:
    DeltaTable(place.uri).alter.set_table_properties({"delta.appendOnly": "false"})


def _add_column(place: Place) -> None:
    DeltaTable(place.uri).alter.add_columns([Field("checked", "boolean")])


def _restore(place: Place) -> None:
    DeltaTable(place.uri).restore(0, protocol_downgrade_allowed=True)


@pytest.mark.parametrize("change", [_set_property, _add_column, _restore])
@pytest.mark.parametrize("kind", [RecordTable, LatestRecordTable])
def test_two_processes_that_commit_the_same_around_another_writers_change_land_once(
    place: Place, kind: type[RecordTable], change: Callable[[Place], None]
) -> None:
    first = kind(place)
    first.add_columns(ID)
    first.create()
    more = pa.struct([("new", pa.string())])
    first.add_columns(more)
    second = kind(place)
    assert second.check(None)
    record = BatchCommit("stream", "query", 0, 0)
    files = write(first, 0, "first"), write(second, 0, "second")
    assert not first.contains(record)
    assert not second.contains(record)
    change(place)
    first.commit(record, files[0], {})
    with pytest.raises(TableError, match="could not be committed"):
        second.commit(record, files[1], {})
    query = QueryBuilder().register("t", DeltaTable(place.uri))
    assert pa.table(query.execute("select id from t"))["id"].to_pylist() == [0]
