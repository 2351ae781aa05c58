"""A table with the latest message of each key, against a dict of Python."""

from __future__ import annotations

import json
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltalake.transaction import AddAction

from ledgerlake.decode import schema
from ledgerlake.errors import TableError
from ledgerlake.stored.places import Place
from ledgerlake.table import latest_table, log_commit
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.delta_table import Table
from ledgerlake.table.latest_index import FileRows, LatestIndex, key_hashes, ranks
from ledgerlake.table.latest_table import LatestTable
from ledgerlake.table.open_table import read_commit
from ledgerlake.table.ordered_files import BufferedWriter, DataFile, data_folder
from ledgerlake.table.vacuum import vacuum
from tests.ageing import make_older

TOPIC = "persistent://public/default/orders"


def message(entry_id: int, key: str | None, value: bytes | None, **other: Any) -> dict[str, Any]:
    return {
        "topic": TOPIC,
        "partition": -1,
        "ledger_id": 1,
        "entry_id": entry_id,
        "batch_index": -1,
        "publish_time": entry_id * 1000,
        "key": key,
        "is_null": value is None,
        "late": False,
        "value": value,
    } | other


def rows_of(messages: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(messages, schema=schema.MESSAGES)


class Written:
    """A table, and the processes that write micro-batches to it."""

    def __init__(self, folder: Path, stream: str = "stream") -> None:
        self.path, self.stream = Place(str(folder / "latest")), stream
        self.batches = 0
        self.restart()
        self.table.create()

    def restart(self) -> None:
        self.table = LatestTable(self.path, schema.MESSAGES)
        self.table.check(None)

    def files(self, *parts: list[dict[str, Any]]) -> list[DataFile]:
        files: list[DataFile] = []
        for part in parts:
            writer = BufferedWriter(
                data_folder(self.path, schema.MESSAGES, f"part-{self.batches:08}-00000")
            )
            writer.write(rows_of(part))
            files += writer.finish()
        return files

    def batch(self, *parts: list[dict[str, Any]]) -> None:
        record = BatchCommit(self.stream, f"query of {self.stream}", self.batches, self.batches)
        assert not self.table.contains(record)
        self.table.commit(record, self.files(*parts), {})
        assert self.table.contains(record)
        self.batches += 1

    def values(self) -> dict[str, bytes]:
        """What delta-rs reads."""
        found = (
            QueryBuilder()
            .register("t", DeltaTable(self.path.uri))
            .execute("select key, value from t")
        )
        rows = pa.table(found).to_pylist()
        assert len({row["key"] for row in rows}) == len(rows)
        return {row["key"]: row["value"] for row in rows}


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


@pytest.mark.parametrize("seed", range(8))
def test_the_table_is_what_a_dict_is(
    seed: int, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(latest_table, "_MOST_SMALL_FILES", rng.choice([2, 5, 100]))
    monkeypatch.setattr(latest_table, "_MOST_REWRITTEN_ROWS", rng.choice([1, 10, 10_000]))
    expected: dict[str, bytes] = {}
    entry_id = 0
    for _ in range(25):
        messages = []
        for _ in range(rng.randint(0, 12)):
            entry_id += 1
            key, value = f"k{rng.randrange(15)}", None if rng.random() < 0.2 else b"%d" % entry_id
            messages.append(message(entry_id, key, value))
            if value is None:
                expected.pop(key, None)
            else:
                expected[key] = value
        rng.shuffle(messages)
        cut = rng.randint(0, len(messages))
        written.batch(*[part for part in (messages[:cut], messages[cut:]) if part])
        if rng.random() < 0.2:
            written.restart()
        if rng.random() < 0.1:
            DeltaTable(written.path.uri).create_checkpoint()
        assert written.values() == expected
    polars_rows = pl.read_delta(written.path.uri)
    assert dict(zip(polars_rows["key"], polars_rows["value"], strict=True)) == expected


def test_the_log_gets_checkpoints_and_the_table_goes_on_after_them(written: Written) -> None:
    for number in range(130):
        written.batch([message(number, f"k{number % 7}", b"%d" % number)])
        if number == 120:
            written.restart()
    log = Path(written.path.uri) / "_delta_log"
    assert (log / f"{100:020}.checkpoint.parquet").stat().st_size > 0
    assert written.values() == {f"k{number % 7}": b"%d" % number for number in range(123, 130)}
    assert len(DeltaTable(written.path.uri).file_uris()) <= 20


def test_another_writers_deletion_is_seen_and_a_key_may_come_again(written: Written) -> None:
    written.batch([message(1, "a", b"1"), message(2, "b", b"2")])
    DeltaTable(written.path.uri).delete("key = 'a'")
    written.batch([message(3, "b", b"3")])
    assert written.values() == {"b": b"3"}
    written.batch([message(4, "a", b"4")])
    assert written.values() == {"a": b"4", "b": b"3"}


def test_a_commit_that_another_writer_overtakes_is_made_again(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.batch([message(1, "a", b"1")])
    create_file = Place.create_file
    overtaken: list[bool] = []

    def overtake(place: Place, content: bytes) -> bool:
        if place.uri.endswith(".json") and not overtaken:
            overtaken.append(True)
            DeltaTable(written.path.uri).delete("key = 'a'")
        return create_file(place, content)

    monkeypatch.setattr(Place, "create_file", overtake)
    written.batch([message(2, "b", b"2")])
    assert overtaken
    assert written.values() == {"b": b"2"}


def test_the_same_micro_batch_by_two_processes_lands_once(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = LatestTable(written.path, schema.MESSAGES)
    other.check(None)
    record = BatchCommit("stream", "query of stream", 0, 0)
    assert not other.contains(record)
    files = written.files([message(1, "a", b"1")])
    written.batch([message(1, "a", b"1")])
    with pytest.raises(TableError, match="same app id"):
        other.commit(record, files, {})
    assert written.values() == {"a": b"1"}


def test_a_lost_answer_is_no_second_commit(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_file = Place.create_file
    lost: list[bool] = []

    def lose(place: Place, content: bytes) -> bool:
        made = create_file(place, content)
        if place.uri.endswith(".json") and not lost:
            lost.append(True)
            raise OSError("the answer was lost")
        return made

    monkeypatch.setattr(Place, "create_file", lose)
    written.batch([message(1, "a", b"1")])
    version = DeltaTable(written.path.uri).version()
    written.batch([message(2, "a", b"2")])
    assert DeltaTable(written.path.uri).version() == version + 1
    assert written.values() == {"a": b"2"}


def test_on_a_topic_partition_the_position_counts_and_a_delayed_message_from_its_delivery_on() -> (
    None
):
    plain = [message(1, "a", b"", publish_time=9_000), message(2, "a", b"", publish_time=4_000)]
    assert np.argsort(ranks(rows_of(plain))).tolist() == [0, 1]
    delayed = message(0, "a", b"", publish_time=0, deliver_at=10_000, delivered_at=11_000)
    assert np.argsort(ranks(rows_of([*plain, delayed]))).tolist() == [0, 1, 2]
    later = message(3, "a", b"", publish_time=20_000)
    # Without the broker's times nobody knows which was first.
    assert np.argsort(ranks(rows_of([*plain, delayed, later]))).tolist() == [0, 1, 3, 2]
    stored = [
        message(number, "a", b"", broker_timestamp=time_us)
        for number, time_us in ((1, 5_000), (2, 12_000))
    ]
    timed = delayed | {"broker_timestamp": 1_000}
    assert np.argsort(ranks(rows_of([*stored, timed]))).tolist() == [0, 2, 1]


def test_between_topic_partitions_the_effective_time_counts_also_without_times_of_the_broker() -> (
    None
):
    old = message(0, "k", b"", ledger_id=900, publish_time=36_000)
    new = message(0, "k", b"", topic=f"{TOPIC}-2", ledger_id=100, publish_time=39_600)
    assert np.argsort(ranks(rows_of([new, old]))).tolist() == [1, 0]
    delayed = message(1, "k", b"", ledger_id=50, deliver_at=1_000, delivered_at=2_000)
    assert np.argsort(ranks(rows_of([delayed, new, old]))).tolist() == [2, 1, 0]


def test_the_index_keeps_no_names_of_files_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ledgerlake.table.latest_index._MOST_NAMES", 3)
    index, hashes = (
        LatestIndex(),
        key_hashes(pa.table({"key": ["a", "b"], "key_bytes": pa.nulls(2, pa.binary())})),
    )
    for number in range(20):
        rows = FileRows(f"f{number}", hashes, np.zeros(2, dtype=bool), np.arange(2))
        touched = index.add([rows])
        assert touched == ({f"f{number - 1}"} if number else set())
        index.remove_files(touched)
        assert len(index.files) <= 6
    assert len(index) == 2


def test_vectors_that_no_version_within_the_retention_names_are_removed(written: Written) -> None:
    def vectors() -> set[str]:
        return {path.name for path in Path(written.path.uri).glob("deletion_vector_*.bin")}

    many = [message(number, f"k{number}", b"1") for number in range(100)]
    written.batch(many)
    written.batch([message(200, "k1", b"2")])
    (first,) = vectors()
    written.batch([message(300, "k2", b"3")])
    (second,) = vectors() - {first}
    old_s = time.time() - 3 * 3600
    for name in (first, second):
        os.utime(Path(written.path.uri) / name, (old_s, old_s))
    # The first one was named until just now.
    assert vacuum(written.path, 2, overrules_table=True).files == []
    _delete_earlier(written, 10_800_000)
    assert vacuum(written.path, 2, overrules_table=True).files == [first]
    assert vectors() == {second}
    assert written.values() == {f"k{number}": b"1" for number in range(100)} | {
        "k1": b"2",
        "k2": b"3",
    }


def test_a_text_and_the_same_bytes_are_two_keys(written: Written) -> None:
    written.batch([message(1, "a", b"1"), {**message(2, "", b"2"), "key": None, "key_bytes": b"a"}])
    assert DeltaTable(written.path.uri).count() == 2
    written.batch([message(3, "a", b"3")])
    assert written.values() == {"a": b"3", None: b"2"}


def test_a_second_row_of_a_key_by_another_writer_is_hidden_by_the_next_commit(
    written: Written,
) -> None:
    written.batch([message(1, "a", b"1"), message(2, "b", b"2")])
    write_deltalake(written.path.uri, rows_of([message(9, "a", b"other")]), mode="append")
    written.batch([message(3, "b", b"3")])
    assert written.values() == {"a": b"other", "b": b"3"}
    written.batch([message(4, "a", None)])
    assert written.values() == {"b": b"3"}


@pytest.fixture
def keys_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys were read of each file, beside those that a process has just written."""
    counts: list[int] = []
    read = LatestTable._read_columns

    def counted(table: LatestTable, name: str, columns: Any) -> pa.Table:
        rows = read(table, name, columns)
        if columns == latest_table._KEY_COLUMNS:
            counts.append(rows.num_rows)
        return rows

    monkeypatch.setattr(LatestTable, "_read_columns", counted)
    return counts


@pytest.mark.parametrize("n", [200, 400])
def test_of_the_commits_of_a_second_stream_only_their_rows_are_read(
    n: int, written: Written, keys_read: list[int]
) -> None:
    written.batch([message(number, f"a{number}", b"1") for number in range(n)])
    second = Written(Path(written.path.uri).parent, "second")
    second.batch([message(number, f"b{number}", b"1") for number in range(n)])
    written.batch([message(n, "a0", b"2")])
    keys_read.clear()
    for number in range(5):
        second.batch(
            [message(n + number, f"b{number}", b"2"), message(n + 10 + number, "b0", b"2")]
        )
        written.batch([message(n + 1 + number, f"a{number}", b"3")])
    assert 15 <= sum(keys_read) <= 20
    assert len(written.values()) == 2 * n


@pytest.mark.parametrize("seed", range(12))
def test_two_streams_and_other_writers_leave_what_a_dict_has(
    seed: int, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(latest_table, "_MOST_SMALL_FILES", rng.choice([2, 5, 100]))
    monkeypatch.setattr(latest_table, "_MOST_REWRITTEN_ROWS", rng.choice([1, 10, 10_000]))
    streams = [written, Written(Path(written.path.uri).parent, "second")]
    expected: dict[str, bytes] = {}
    for entry_id in range(40):
        stream = rng.choice(streams)
        keys = rng.sample(range(15), rng.randint(0, 8))
        found = {f"k{key}": None if rng.random() < 0.2 else b"%d" % entry_id for key in keys}
        stream.batch(
            [message(entry_id * 100 + number, *item) for number, item in enumerate(found.items())]
        )
        expected = {key: value for key, value in (expected | found).items() if value is not None}
        chance = rng.random()
        if chance < 0.1:
            stream.restart()
        elif chance < 0.2 and expected:
            key = rng.choice(sorted(expected))
            del expected[key]
            DeltaTable(written.path.uri).delete(f"key = '{key}'")
        elif chance < 0.25:
            expected["k1"] = b"foreign"
            write_deltalake(
                written.path.uri, rows_of([message(1, "k1", b"foreign")]), mode="append"
            )
            # Both streams hide the earlier row by their next commits.
            continue
        assert stream.values() == expected


def test_rows_that_another_writer_brings_back_are_known_again(
    written: Written, keys_read: list[int]
) -> None:
    written.batch([message(1, "a", b"1"), message(2, "b", b"1")])
    version = DeltaTable(written.path.uri).version()
    written.batch([message(3, "a", b"2")])
    DeltaTable(written.path.uri).restore(version)
    written.batch([message(4, "b", b"3")])
    assert written.values() == {"a": b"1", "b": b"3"}
    assert keys_read == [2]
    written.batch([message(5, "a", None)])
    assert written.values() == {"b": b"3"}


@pytest.mark.parametrize("properties", [{}, {"ledgerlake.mode": "latest"}])
def test_a_table_that_was_not_made_for_it_is_refused(
    tmp_path: Path, properties: dict[str, str]
) -> None:
    path = Place(str(tmp_path / "plain"))
    DeltaTable.create(
        path.uri, schema.MESSAGES, configuration=properties, raise_if_key_not_exists=False
    )
    with pytest.raises(TableError, match=r'not made with mode = "latest"|no deletion vectors'):
        LatestTable(path, schema.MESSAGES).check(None)


@pytest.mark.parametrize("flag", ["true", "TRUE"])
def test_a_table_of_the_latest_is_refused_by_others(written: Written, flag: str) -> None:
    with pytest.raises(TableError, match='was made with mode = "latest"'):
        Table(written.path, schema.MESSAGES).check(None)
    DeltaTable(written.path.uri).alter.set_table_properties({"delta.appendOnly": flag})
    with pytest.raises(TableError, match=r"has delta\.appendOnly"):
        LatestTable(written.path, schema.MESSAGES).check(None)


def test_an_answer_that_is_lost_and_a_log_that_cannot_be_read_lose_nothing(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.batch([message(1, "a", b"1"), message(2, "b", b"1")])
    create_file = Place.create_file
    reads: list[int] = []

    def lose(place: Place, content: bytes) -> bool:
        made = create_file(place, content)
        return made and not (place.uri.endswith(".json") and not reads)

    def refuse(path: Place, version: int) -> Any:
        if len(reads) < 2:
            reads.append(version)
            raise OSError("503")
        return read_commit(path, version)

    with monkeypatch.context() as changed:
        changed.setattr(Place, "create_file", lose)
        changed.setattr(log_commit, "read_commit", refuse)
        written.batch([message(3, "a", b"2"), message(4, "c", b"2")])
    assert written.values() == {"a": b"2", "b": b"1", "c": b"2"}
    written.batch([message(5, "b", b"3")])
    assert written.values() == {"a": b"2", "b": b"3", "c": b"2"}


def test_the_log_is_read_without_its_hint_and_with_files_of_others_without_statistics(
    written: Written,
) -> None:
    for number in range(105):
        written.batch([message(number, f"k{number % 3}", b"%d" % number)])
    log = Path(written.path.uri) / "_delta_log"
    (log / "_last_checkpoint").unlink()
    for commit in sorted(log.glob("*.json"))[:50]:
        commit.unlink()
    name = "part-00000-foreign.parquet"
    pq.write_table(rows_of([message(500, "x", b"500")]), Path(written.path.uri) / name)
    table = DeltaTable(written.path.uri)
    action = AddAction(name, (Path(written.path.uri) / name).stat().st_size, {}, 1, True, "{}")
    table.create_write_transaction([action], "append", table.schema())
    written.restart()
    written.batch([message(501, "y", b"501")])
    assert written.values()["x"] == b"500"
    assert set(written.values()) == {"k0", "k1", "k2", "x", "y"}


def test_a_file_of_another_writer_without_statistics_gets_the_number_of_its_rows_with_a_vector(
    written: Written,
) -> None:
    written.batch([message(1, "a", b"1")])
    name = "part-00000-foreign.parquet"
    rows = rows_of([message(number, f"f{number}", b"x") for number in range(4)])
    pq.write_table(rows, Path(written.path.uri) / name)
    table = DeltaTable(written.path.uri)
    action = AddAction(name, (Path(written.path.uri) / name).stat().st_size, {}, 1, True, "{}")
    table.create_write_transaction([action], "append", table.schema())
    written.batch([message(9, "f1", b"new")])
    log = (
        Path(written.path.uri) / "_delta_log" / f"{DeltaTable(written.path.uri).version():020}.json"
    )
    added = [json.loads(line).get("add") for line in log.read_text().splitlines()]
    (foreign,) = [entry for entry in added if entry and entry["path"] == name]
    assert foreign["deletionVector"]["cardinality"] == 1
    assert json.loads(foreign["stats"])["numRecords"] == 4


def _delete_earlier(written: Written, earlier_ms: int) -> None:
    """Make the deletions in the commits of a table's log so much earlier."""
    for commit in (Path(written.path.uri) / "_delta_log").glob("*.json"):
        earlier = re.sub(
            r'"deletionTimestamp":(\d+)',
            lambda found: f'"deletionTimestamp":{int(found[1]) - earlier_ms}',
            commit.read_text(),
        )
        commit.write_text(earlier)


def test_a_checkpoint_that_forgets_removals_takes_no_vector_from_a_version_within_the_retention(
    written: Written,
) -> None:
    written.batch([message(number, f"k{number}", b"1") for number in range(100)])
    written.batch([message(200, "k1", b"2")])
    version = DeltaTable(written.path.uri).version()
    make_older(Path(written.path.uri), 40)
    written.batch([message(300, "k2", b"3")])
    make_older(Path(written.path.uri), 10)
    DeltaTable(written.path.uri).create_checkpoint()
    assert vacuum(written.path, 30 * 24).files == []
    found = (
        QueryBuilder()
        .register("t", DeltaTable(written.path.uri, version=version))
        .execute("select key from t")
    )
    assert len(pa.table(found.read_all())) == 100
    assert [name for name in vacuum(written.path, 168).files if name.endswith(".bin")] != []


def test_files_of_which_a_version_within_the_retention_needs_rows_stay(written: Written) -> None:
    written.batch([message(number, f"k{number}", b"1") for number in range(10)])
    written.batch([message(20, "k0", b"2")])
    _delete_earlier(written, 864_000_000)
    version = DeltaTable(written.path.uri).version()
    written.batch([message(30 + number, f"k{number}", b"3") for number in range(10)])
    for file in Path(written.path.uri).glob("*.parquet"):
        os.utime(file, (time.time() - 864_000,) * 2)
    written.restart()
    assert not [name for name in vacuum(written.path, 168).files if name.endswith(".parquet")]
    found = (
        QueryBuilder()
        .register("t", DeltaTable(written.path.uri, version=version))
        .execute("select count(*) as n from t")
    )
    assert pa.table(found).to_pylist() == [{"n": 10}]


def test_large_rows_are_not_written_again_by_each_commit(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latest_table, "_SMALL_BYTES", 20_000)
    for number in range(60):
        written.batch([message(number, f"k{number}", os.urandom(30_000))])
    compacted = [path for path in Path(written.path.uri).glob("part-compacted-*")]
    assert compacted == []
    state = written.table._state
    assert state is not None
    assert set(state.index.deleted) == set(state.entries)


@pytest.mark.parametrize("pattern", ["part-compacted-*", "deletion_vector_*", "part-00000016-*"])
def test_a_file_that_a_vacuum_removed_while_the_process_was_suspended_is_not_committed(
    written: Written, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    for number in range(16):
        # Some rows stay, and of none of the files are most.
        written.batch([message(4 * number + row, f"k{number}-{row}", b"v") for row in range(4)])
    commit, folder = latest_table._Change._commit, Path(written.path.uri)
    before = {*folder.iterdir()}

    def suspended(self: latest_table._Change, *arguments: Any) -> log_commit.OwnCommit:
        made = commit(self, *arguments)
        removed = [file for file in folder.glob(pattern) if file not in before]
        assert removed
        for file in removed:
            file.unlink()
        return made

    monkeypatch.setattr(latest_table._Change, "_commit", suspended)
    monkeypatch.setattr(latest_table, "_MOST_REWRITTEN_ROWS", 8)
    known = written.values()
    with pytest.raises(TableError, match="which the commit adds, is gone"):
        written.batch([message(100 + number, f"k{number}-0", b"w") for number in range(16)])
    monkeypatch.undo()
    assert written.values() == known
    written.restart()
    written.batch([message(100, "k0-0", b"w")])
    assert written.values() == known | {"k0-0": b"w"}


FAR_US = 32_503_680_000_000_000


def test_times_beyond_nanoseconds_stay_though_another_writer_stores_them_as_int96(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latest_table, "_MOST_SMALL_FILES", 1)
    written.batch([message(1, "a", b"1", event_time=FAR_US), message(2, "b", b"2")])
    (path,) = DeltaTable(written.path.uri).file_uris()
    # In the place of the file, as Spark writes it.
    pq.write_table(pq.read_table(path), path, use_deprecated_int96_timestamps=True)
    written.restart()
    written.batch([message(3, "b", b"3")])
    written.batch([message(4, "c", b"4")])
    assert written.values() == {"a": b"1", "b": b"3", "c": b"4"}
    rows = pl.read_delta(written.path.uri)
    times_us = rows.select(pl.col("key"), pl.col("event_time").cast(pl.Int64)).rows()
    assert sorted(times_us) == [("a", FAR_US), ("b", None), ("c", None)]


def test_rows_without_a_key_that_another_writer_adds_stay(written: Written) -> None:
    written.batch([message(1, "a", b"1")])
    others = [message(number, None, b"%d" % number) for number in range(100, 103)]
    write_deltalake(written.path.uri, rows_of(others), mode="append")
    written.batch([message(2, "a", b"2")])
    written.restart()
    written.batch([message(3, "a", b"3")])
    values = pl.read_delta(written.path.uri)["value"].to_list()
    assert sorted(values) == [b"100", b"101", b"102", b"3"]
