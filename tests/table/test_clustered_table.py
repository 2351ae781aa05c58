"""A clustered table: the content of its log, and the effects of commits and upkeep. ``deltalake``
reads the rows to compare.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from ledgerlake.decode import schema
from ledgerlake.errors import TableError
from ledgerlake.stored.places import Place
from ledgerlake.table import compaction, file_groups
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.clustered_table import ClusteredRecordTable, ClusteredTable
from ledgerlake.table.compaction import Compaction
from ledgerlake.table.log_state import clustering_columns
from ledgerlake.table.ordered_files import BufferedWriter, data_folder
from ledgerlake.table.record_table import RecordTable
from ledgerlake.values.record_rows import rows_schema
from tests.table.rows import rows

if TYPE_CHECKING:
    from pathlib import Path

    from ledgerlake.table.delta_table import Table

KEYS = [f"k{number}" for number in range(20)]


def begun(table: Table) -> Table:
    if not table.check(None):
        table.create({"delta.checkpointInterval": "5"})
    table.begin()
    return table


def opened(folder: Path, *cluster_by: str) -> Table:
    return begun(ClusteredTable(Place(str(folder / "t")), schema.MESSAGES, cluster_by or ("key",)))


def commit(table: Table, number: int) -> None:
    writer = BufferedWriter(data_folder(table.path, table.schema, f"part-{number:08}-00000"))
    for position, key in enumerate(KEYS):
        entry_id = number * len(KEYS) + position
        writer.write(pa.Table.from_batches([rows([entry_id], entry_id, key=key)]))
    record = BatchCommit("stream", "query", number, number)
    assert not table.contains(record)
    table.commit(record, writer.finish(), {"t": number})
    assert table.contains(record)


def entries(folder: Path) -> list[int]:
    return sorted(DeltaTable(str(folder / "t")).to_pyarrow_table()["entry_id"].to_pylist())


def test_the_log_names_the_columns_and_keeps_them_over_checkpoints(tmp_path: Path) -> None:
    table = opened(tmp_path)
    for number in range(12):
        commit(table, number)
    delta = DeltaTable(str(tmp_path / "t"))
    assert {"clustering", "domainMetadata"} <= set(delta.protocol().writer_features or [])
    assert list((tmp_path / "t" / "_delta_log").glob("*.checkpoint.parquet"))
    assert clustering_columns(table.path, delta.version()) == ["key"]
    assert entries(tmp_path) == list(range(12 * len(KEYS)))
    version = delta.version()
    opened(tmp_path)
    assert DeltaTable(str(tmp_path / "t")).version() == version


def test_other_columns_may_be_named_later(tmp_path: Path) -> None:
    opened(tmp_path)
    table = opened(tmp_path, "topic", "key")
    commit(table, 0)
    assert clustering_columns(table.path, DeltaTable(str(tmp_path / "t")).version()) == [
        "topic",
        "key",
    ]


def test_a_table_that_was_not_clustered_becomes_so(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "t"), schema.MESSAGES.empty_table())
    commit(opened(tmp_path), 0)
    assert entries(tmp_path) == list(range(len(KEYS)))


def test_a_commit_that_another_writer_overtakes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened(tmp_path)
    create_file = Place.create_file
    others: list[Place] = []

    def overtaken(place: Place, content: bytes) -> bool:
        if not others and place.uri.endswith(".json"):
            others.append(place)
            create_file(place, b'{"commitInfo": {"operation": "OTHER"}}\n')
        return create_file(place, content)

    monkeypatch.setattr(Place, "create_file", overtaken)
    commit(table, 0)
    commit(table, 1)
    assert entries(tmp_path) == list(range(2 * len(KEYS)))


def test_an_answer_that_is_lost_is_no_second_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened(tmp_path)
    create_file = Place.create_file

    def lose(place: Place, content: bytes) -> bool:
        create_file(place, content)
        raise OSError("the answer was lost")

    with monkeypatch.context() as changed:
        changed.setattr(Place, "create_file", lose)
        commit(table, 0)
    commit(table, 1)
    assert entries(tmp_path) == list(range(2 * len(KEYS)))


def test_the_same_micro_batch_by_two_processes_lands_once(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    record = BatchCommit("stream", "query", 0, 0)
    for table in (first, second):
        assert not table.contains(record)
    commit(first, 0)
    writer = BufferedWriter(data_folder(second.path, second.schema, "part-00000000-00000"))
    writer.write(pa.Table.from_batches([rows([0], 0, key="k")]))
    with pytest.raises(TableError):
        second.commit(record, writer.finish(), {})
    assert entries(tmp_path) == list(range(len(KEYS)))


def test_upkeep_divides_the_rows_by_the_columns_and_keeps_their_order_in_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened(tmp_path)
    for number in range(10):
        commit(table, number)
    monkeypatch.setattr(file_groups, "LAST_LEVEL", 0)
    monkeypatch.setattr(file_groups, "_CLUSTERED_BYTES", 1)
    monkeypatch.setattr(compaction, "_CLUSTER_BYTES", 5000)
    assert Compaction(table.path, schema.MESSAGES).run() == 10
    delta = DeltaTable(str(tmp_path / "t"))
    files = pa.table(delta.get_add_actions(flatten=True)).to_pylist()
    assert len(files) > 2
    assert all(file["path"].startswith("part-clustered") for file in files)
    bounds = sorted((file["min.key"], file["max.key"]) for file in files)
    assert all(before[1] < after[0] for before, after in pairwise(bounds))
    assert entries(tmp_path) == list(range(10 * len(KEYS)))
    for file in files:
        of_file = pq.read_table(tmp_path / "t" / file["path"])["entry_id"].to_pylist()
        assert of_file == sorted(of_file)
    # They are left as they are, and new files beside them are merged on.
    assert Compaction(table.path, schema.MESSAGES).run() == 0
    for number in range(10, 20):
        commit(table, number)
    assert Compaction(table.path, schema.MESSAGES).run() == 10
    assert entries(tmp_path) == list(range(20 * len(KEYS)))


def test_columns_and_properties_come_by_commits_of_our_own(tmp_path: Path) -> None:
    table = ClusteredRecordTable(Place(str(tmp_path / "t")), ("customer",))
    table.add_columns(
        pa.struct([("customer", pa.string()), ("at", pa.struct([("city", pa.string())]))])
    )
    begun(table)
    more = pa.struct([("at", pa.struct([("zip", pa.string())])), ("amount", pa.int64())])
    table.add_columns(more, learned=more)
    delta = DeltaTable(str(tmp_path / "t"))
    fields = {field.name: field.type for field in pa.schema(delta.schema())}
    assert [field.name for field in fields["at"]] == ["city", "zip"]
    assert fields["amount"] == pa.int64()
    assert "ledgerlake.record." in delta.metadata().configuration
    assert delta.metadata().configuration["delta.checkpointInterval"] == "5"
    assert table.schema.equals(rows_schema(pa.struct([field for field in table.record])))
    log = [
        json.loads(line)
        for line in (tmp_path / "t/_delta_log/00000000000000000002.json").read_text().splitlines()
    ]
    metadata: Any = next(action["metaData"] for action in log if "metaData" in action)
    assert metadata["format"] == {"provider": "parquet", "options": {}}


def test_a_field_with_a_time_without_zone_brings_its_feature(tmp_path: Path) -> None:
    table = ClusteredRecordTable(Place(str(tmp_path / "t")), ("customer",))
    table.add_columns(pa.struct([("customer", pa.string())]))
    begun(table)
    table.add_columns(pa.struct([("at", pa.list_(pa.struct([("local", pa.timestamp("us"))])))]))
    delta = DeltaTable(str(tmp_path / "t"))
    assert "timestampNtz" in (delta.protocol().reader_features or [])
    assert {"timestampNtz", "clustering"} <= set(delta.protocol().writer_features or [])
    begun(ClusteredRecordTable(Place(str(tmp_path / "t")), ("customer",)))


def test_no_commit_lands_where_old_ones_were_removed(tmp_path: Path) -> None:
    suspended, other = opened(tmp_path), opened(tmp_path)
    record = BatchCommit("stream", "query", 0, 0)
    writer = BufferedWriter(data_folder(suspended.path, suspended.schema, "part-00000000-00000"))
    writer.write(pa.Table.from_batches([rows([0], 0, key="k")]))
    assert not suspended.contains(record)
    for number in range(12):
        of_other = BatchCommit("other", "other", number, number)
        another = BufferedWriter(data_folder(other.path, other.schema, f"part-{number:08}-00001"))
        another.write(pa.Table.from_batches([rows([number], 1000 + number, key="k")]))
        assert not other.contains(of_other)
        other.commit(of_other, another.finish(), {})
    DeltaTable(str(tmp_path / "t")).create_checkpoint()
    last = DeltaTable(str(tmp_path / "t")).version()
    for log in (tmp_path / "t" / "_delta_log").glob("*.json"):
        if log.stem.isdigit() and int(log.stem) < last:
            log.unlink()
    with pytest.raises(TableError):
        suspended.commit(record, writer.finish(), {})
    assert entries(tmp_path) == list(range(1000, 1012))


def test_a_commit_that_only_adds_says_so(tmp_path: Path) -> None:
    commit(opened(tmp_path), 0)
    assert DeltaTable(str(tmp_path / "t")).history(1)[0]["isBlindAppend"] is True


def test_a_column_that_the_table_lacks_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    opened(tmp_path)
    with pytest.raises(
        TableError, match=r"cluster_by names nope, by which the table at .* cannot be clustered"
    ):
        opened(tmp_path, "nope")


def test_without_cluster_by_a_clustered_table_is_refused_with_the_way_out(tmp_path: Path) -> None:
    table = ClusteredRecordTable(Place(str(tmp_path / "t")), ("customer",))
    table.add_columns(pa.struct([("customer", pa.string())]))
    begun(table)
    with pytest.raises(TableError, match="set cluster_by again"):
        RecordTable(Place(str(tmp_path / "t"))).check(None)


def test_an_older_protocol_is_refused_in_words(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "t"), schema.MESSAGES.empty_table())
    log = tmp_path / "t/_delta_log/00000000000000000001.json"
    log.write_text(json.dumps({"protocol": {"minReaderVersion": 1, "minWriterVersion": 4}}) + "\n")
    with pytest.raises(TableError, match="older protocol of writer version 4"):
        opened(tmp_path)
