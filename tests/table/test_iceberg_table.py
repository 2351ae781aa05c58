"""An Iceberg table that follows a Delta table, over anything that happens to either. ``pyiceberg``
and ``deltalake`` read the rows to compare.
"""

from __future__ import annotations

import http.server
import json
import random
import shutil
import threading
import time
import urllib.parse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import CommitStateUnknownException
from pyiceberg.table import Table as OpenedIceberg

from ledgerlake.decode import schema
from ledgerlake.decode.schema import TIMESTAMP
from ledgerlake.errors import SetupError, TableError
from ledgerlake.options.config import parse_config
from ledgerlake.pipeline import iceberg as pipeline_iceberg
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.compaction import Compaction
from ledgerlake.table.delta_table import Table
from ledgerlake.table.iceberg_table import IcebergTable
from ledgerlake.table.ordered_files import BufferedWriter, data_folder
from ledgerlake.table.record_table import RecordTable
from ledgerlake.values.record_rows import PULSAR_FIELDS, rows_schema
from tests.table.rows import rows as rows_of_messages
from tests.table.test_compaction import Writer
from tests.table.test_latest_table import Written, message

if TYPE_CHECKING:
    from pathlib import Path

NAME = "shop.orders"
DAY_MS = 24 * 60 * 60 * 1000


def settings(folder: Path) -> dict[str, str]:
    return {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/warehouse",
    }


def follower(folder: Path, retention_ms: int = DAY_MS, place: Place | None = None) -> IcebergTable:
    return IcebergTable(
        place or Place(str(folder / "messages")), NAME, "default", settings(folder), retention_ms
    )


def iceberg(folder: Path) -> OpenedIceberg:
    return load_catalog("default", **settings(folder)).load_table(NAME)


def rows(table: pa.Table) -> list[tuple[Any, ...]]:
    names = ("partition", "ledger_id", "entry_id", "value", "broker_timestamp")
    return sorted(zip(*(table[name].to_pylist() for name in names), strict=True))


def compared(folder: Path) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    return rows(read(folder)), rows(DeltaTable(str(folder / "messages")).to_pyarrow_table())


def read(folder: Path, **scan: Any) -> pa.Table:
    # pyiceberg's own tables mix no files of deltalake with others.
    return iceberg(folder).scan(**scan).to_arrow_batch_reader().read_all()


class Interrupted(BaseException):
    """The process ends."""


@pytest.mark.parametrize("seed", range(8))
def test_it_has_the_rows_of_the_delta_table_over_merges_deletions_and_lost_answers(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    writer = Writer(Place(str(tmp_path / "messages")))
    followers = [follower(tmp_path), follower(tmp_path)]
    commit = OpenedIceberg._do_commit

    def unreliable(table: OpenedIceberg, *arguments: Any, **named: Any) -> None:
        fate = chance.random()
        if fate < 0.15:
            raise Interrupted
        if fate < 0.3:
            # The other follower comes first.
            monkeypatch.setattr(OpenedIceberg, "_do_commit", commit)
            follower(tmp_path).follow()
        commit(table, *arguments, **named)
        if 0.3 < fate < 0.5:
            raise chance.choice(
                [Interrupted(), CommitStateUnknownException("the answer was lost"), OSError("lost")]
            )

    for _ in range(25):
        step = chance.random()
        if step < 0.5:
            writer.commit()
        elif step < 0.6:
            Compaction(writer.table.path, writer.table.schema).run()
        elif step < 0.65:
            DeltaTable(str(tmp_path / "messages")).delete(f"entry_id % 7 = {chance.randrange(7)}")
        else:
            monkeypatch.setattr(OpenedIceberg, "_do_commit", unreliable)
            try:
                chance.choice(followers).follow()
            except (Interrupted, TableError):
                followers = [follower(tmp_path), follower(tmp_path)]
            monkeypatch.setattr(OpenedIceberg, "_do_commit", commit)
    follower(tmp_path).follow()
    there, expected = compared(tmp_path)
    assert there == expected
    for snapshot in iceberg(tmp_path).snapshots():
        assert snapshot.summary is not None
        version = int(snapshot.summary["ledgerlake.delta-version"] or -1)
        of_version = DeltaTable(str(tmp_path / "messages"), version=version).to_pyarrow_table()
        assert rows(read(tmp_path, snapshot_id=snapshot.snapshot_id)) == rows(of_version)


def test_a_step_is_nothing_if_there_is_nothing_new_or_no_table(tmp_path: Path) -> None:
    first = follower(tmp_path)
    assert first.follow() is None
    writer = Writer(Place(str(tmp_path / "messages")))
    writer.commit()
    assert first.follow() == 1
    assert first.follow() is None
    assert follower(tmp_path).follow() is None
    assert len(list(iceberg(tmp_path).snapshots())) == 1


def test_a_column_that_the_delta_table_gets_comes_with_its_first_rows(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "t"))
    nested = pa.array([{"a": 1, "tags": ["x"], "by_name": [("k", "v")]}])
    write_deltalake(place.uri, pa.table({"id": [1], "record": nested}))
    table = follower(tmp_path, place=place)
    table.follow()
    more = pa.array([{"a": 2, "tags": ["y"], "by_name": [("k", "w")], "b": "new"}])
    write_deltalake(
        place.uri,
        pa.table({"id": [2], "record": more, "note": ["n"]}),
        mode="append",
        schema_mode="merge",
    )
    table.follow()
    read = iceberg(tmp_path).scan().to_arrow().sort_by("id").to_pylist()
    assert [row["note"] for row in read] == [None, "n"]
    assert [row["record"]["b"] for row in read] == [None, "new"]
    assert iceberg(tmp_path).scan(row_filter="note = 'n'").to_arrow()["id"].to_pylist() == [2]


def test_old_snapshots_go_with_their_files_and_the_newest_stays(tmp_path: Path) -> None:
    writer = Writer(Place(str(tmp_path / "messages")))
    table = follower(tmp_path, retention_ms=0)
    for _ in range(60):
        writer.commit()
        table.follow()
    metadata = tmp_path / "warehouse" / "shop" / "orders" / "metadata"
    assert len(list(iceberg(tmp_path).snapshots())) <= 21
    assert len(list(metadata.iterdir())) < 100
    there, expected = compared(tmp_path)
    assert there == expected


def test_a_snapshot_stays_for_the_retention_after_it_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(Place(str(tmp_path / "messages")))
    table = follower(tmp_path)
    for _ in range(23):
        writer.commit()
        table.follow()
    shown = {snapshot.snapshot_id for snapshot in iceberg(tmp_path).snapshots()}
    now_s = time.time()
    # The catalog takes no commits for two days, while readers are served.
    monkeypatch.setattr(time, "time", lambda: now_s + 2 * DAY_MS / 1000)
    writer.commit()
    table.follow()
    monkeypatch.setattr(time, "time", lambda: now_s)
    left = {snapshot.snapshot_id for snapshot in iceberg(tmp_path).snapshots()}
    newest, replaced = iceberg(tmp_path).current_snapshot(), shown & left
    assert newest is not None
    assert replaced == {newest.parent_snapshot_id}


def test_an_iceberg_table_of_something_else_is_left_alone(tmp_path: Path) -> None:
    Writer(Place(str(tmp_path / "messages"))).commit()
    follower(tmp_path).follow()
    iceberg(tmp_path).append(iceberg(tmp_path).scan().to_arrow())
    Writer(Place(str(tmp_path / "others"))).commit()
    for place in ("messages", "others"):
        with pytest.raises(TableError, match="drop it"):
            follower(tmp_path, place=Place(str(tmp_path / place))).follow()
    catalog = load_catalog("default", **settings(tmp_path))
    catalog.drop_table(NAME)
    follower(tmp_path).follow()
    there, expected = compared(tmp_path)
    assert there == expected


def test_a_delta_table_that_is_made_again_is_another_one(tmp_path: Path) -> None:
    Writer(Place(str(tmp_path / "messages"))).commit()
    table = follower(tmp_path)
    table.follow()
    shutil.rmtree(tmp_path / "messages")
    Writer(Place(str(tmp_path / "messages"))).commit()
    with pytest.raises(TableError, match="was not made from"):
        follower(tmp_path).follow()


def test_deletion_vectors_are_refused_in_words(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.batch([message(0, "a", b"1"), message(1, "b", b"2"), message(2, "c", b"3")])
    written.batch([message(3, "a", b"4")])
    with pytest.raises(TableError, match="because that has deletion vectors"):
        follower(tmp_path, place=written.path).follow()
    assert not (tmp_path / "catalog.db").exists()


def test_no_error_shows_a_secret_of_the_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Writer(Place(str(tmp_path / "messages"))).commit()
    monkeypatch.setenv("CATALOG_URI", "nosuchdialect://user:swordfish@host/db")
    properties = {**settings(tmp_path), "uri": "env:CATALOG_URI"}
    table = IcebergTable(Place(str(tmp_path / "messages")), NAME, "default", properties, DAY_MS)
    with pytest.raises(TableError) as raised:
        table.follow()
    assert "swordfish" not in str(raised.value) + repr(table.__dict__)


def test_a_variable_that_is_not_set_is_named_and_its_name_is_sent_nowhere(tmp_path: Path) -> None:
    Writer(Place(str(tmp_path / "messages"))).commit()
    properties = {**settings(tmp_path), "token": "env:NO_SUCH_TOKEN"}
    table = IcebergTable(Place(str(tmp_path / "messages")), NAME, "default", properties, DAY_MS)
    with pytest.raises(SetupError, match="the variable NO_SUCH_TOKEN"):
        table.follow()


def test_a_process_that_is_behind_takes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(Place(str(tmp_path / "messages")))
    writer.commit()
    behind = follower(tmp_path)
    before, opened = DeltaTable(str(tmp_path / "messages")), behind._current
    views = [opened, lambda: before]

    def current() -> DeltaTable | None:
        return views.pop()()

    monkeypatch.setattr(behind, "_current", current)
    writer.commit()
    assert follower(tmp_path).follow() == 2
    assert behind.follow() is None
    there, expected = compared(tmp_path)
    assert there == expected


def test_a_delta_table_that_was_restored_from_a_copy_is_followed_back(tmp_path: Path) -> None:
    folder = tmp_path / "messages"
    writer = Writer(Place(str(folder)))
    writer.commit()
    shutil.copytree(folder, tmp_path / "copy")
    for _ in range(3):
        writer.commit()
    assert follower(tmp_path).follow() == 4
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "copy", folder)
    assert follower(tmp_path).follow() == 1
    there, expected = compared(tmp_path)
    assert there == expected


def committed(
    table: Table, *parts: pa.Table, partition: dict[str, str | None] | None = None
) -> None:
    """Commit a file with a row group for each part."""
    folder = replace(
        data_folder(table.path, table.schema, "part-00000000-00000"),
        partition_values=partition or {},
    )
    writer = BufferedWriter(folder)
    for part in parts:
        writer.write(part)
        writer.flush()
    record = BatchCommit("stream", "query", 0, 0)
    assert not table.contains(record)
    table.commit(record, writer.finish(), {})


def test_a_row_beside_a_text_that_is_too_long_for_bounds_is_found(tmp_path: Path) -> None:
    writer = Writer(Place(str(tmp_path / "messages")))
    batches = [rows_of_messages([1], 1, key="a"), rows_of_messages([2], 2, key="z" * 5000)]
    last = rows_of_messages([3], 3, key="m")
    committed(
        writer.table, pa.Table.from_batches(batches[:1]), pa.Table.from_batches([batches[1], last])
    )
    follower(tmp_path).follow()
    assert read(tmp_path, row_filter="key = 'm'")["entry_id"].to_pylist() == [3]


@pytest.mark.parametrize("seed", range(3))
def test_any_texts_are_followed_and_found_by_their_bounds(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    signs = ["\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff", "\U0010fffe", "a"]
    writer = Writer(Place(str(tmp_path / "messages")))
    files: list[Any] = []
    keys: list[str] = []
    for number in range(30):
        of_file = [
            "".join(chance.choice(signs) * chance.choice([0, 1, 15, 16, 17]) for _ in range(3))
            for _ in range(2)
        ]
        parquet = BufferedWriter(
            data_folder(writer.table.path, schema.MESSAGES, f"part-00000000-{number:05}")
        )
        for key in of_file:
            parquet.write(pa.Table.from_batches([rows_of_messages([1], len(keys), key=key)]))
            keys.append(key)
        files += parquet.finish()
    record = BatchCommit("stream", "query", 0, 0)
    assert not writer.table.contains(record)
    writer.table.commit(record, files, {})
    assert follower(tmp_path).follow() == 1
    for key in sorted(set(keys)):
        found = read(tmp_path, row_filter=f"key = '{key}'")["entry_id"].to_pylist()
        assert sorted(found) == [number for number, other in enumerate(keys) if other == key]


@pytest.mark.parametrize(("kind", "number"), [(pa.date32(), 99_999_999), (TIMESTAMP, 2**63 - 1)])
def test_a_time_that_python_does_not_have_holds_nothing_up(
    kind: pa.DataType, number: int, tmp_path: Path
) -> None:
    record = pa.struct([("at", kind)])
    table = RecordTable(Place(str(tmp_path / "messages")))
    table.add_columns(record)
    table.check(None)
    table.create()
    batch = rows_of_messages([1, 2], 1)
    at = pa.array([1, number], pa.int32() if kind == pa.date32() else pa.int64()).cast(kind)
    columns = [
        *(batch[field.name] for field in PULSAR_FIELDS),
        pa.StructArray.from_arrays([at], fields=list(record)),
    ]
    committed(table, pa.Table.from_arrays(columns, schema=rows_schema(record)))
    assert follower(tmp_path).follow() == 1
    assert iceberg(tmp_path).scan().count() == 2


def test_a_partitioned_table_is_followed_until_another_writers_file_lacks_the_column(
    tmp_path: Path,
) -> None:
    columns = pa.schema([*schema.MESSAGES, pa.field("day", pa.string())])
    table = Table(Place(str(tmp_path / "messages")), columns, {"day": "day"})
    table.path.make()
    table.create()
    batch = rows_of_messages([1, 2], 1)
    content = pa.Table.from_batches([batch]).append_column("day", pa.array(["x", "x"]))
    committed(table, content, partition={"day": "x"})
    first = follower(tmp_path)
    first.follow()
    assert read(tmp_path, row_filter="day = 'x'").num_rows == 2
    DeltaTable(str(tmp_path / "messages")).delete("entry_id = 1")
    with pytest.raises(TableError, match="lacks the partition column day"):
        first.follow()
    assert read(tmp_path).num_rows == 2


@pytest.mark.parametrize(
    "properties",
    [
        {"type": "sql", "uri": "nosuchdialect://user:swordfish@host/db"},
        *({"type": "rest", "uri": f"http://user:swordfish{sign}x@127.0.0.1:1"} for sign in "/#?"),
        *({"type": "rest", "uri": f"http://user:x{sign}swordfish@127.0.0.1:1"} for sign in "/#?"),
        {"type": "rest", "uri": "http://127.0.0.1:1/x?key=swordfish"},
        {"type": "rest", "uri": "http://127.0.0.1:1", "token": "swordfish\n"},
        {"type": "rest", "uri": "http://127.0.0.1:1", "token": "one\nswordfish"},
        {"type": "rest", "uri": "password=swordfish host=h"},
        {"type": "rest", "uri": "http://[user:swordfish"},
    ],
)
def test_no_error_shows_a_secret_that_stands_in_the_settings(
    properties: dict[str, str], tmp_path: Path
) -> None:
    Writer(Place(str(tmp_path / "messages"))).commit()
    table = IcebergTable(Place(str(tmp_path / "messages")), NAME, "default", properties, DAY_MS)
    with pytest.raises(TableError) as raised:
        table.follow()
    assert "swordfish" not in str(raised.value)


class _Echo(http.server.BaseHTTPRequestHandler):
    """A catalog that refuses each request, and repeats what it got."""

    def _refuse(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        sent = [self.headers[name] for name in ("Authorization", "X-Api-Key")]
        said = {"message": f"{body} {sent} {urllib.parse.unquote(body)}", "type": "T", "code": 401}
        answer = json.dumps({"error": said, "error_description": said["message"]}).encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = _refuse

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    "properties",
    [
        {"credential": 'me:sword+fish/"x', "oauth2-server-uri": "URL/token"},
        {"token": "sword+fish/'x"},
        {"header.X-Api-Key": "sword'\"fish"},
    ],
)
def test_no_error_shows_a_secret_that_a_catalog_repeats(
    properties: dict[str, str], tmp_path: Path
) -> None:
    Writer(Place(str(tmp_path / "messages"))).commit()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        given = {name: value.replace("URL", url) for name, value in properties.items()}
        table = IcebergTable(
            Place(str(tmp_path / "messages")),
            NAME,
            "c",
            {"type": "rest", "uri": url} | given,
            DAY_MS,
        )
        with pytest.raises(TableError) as raised:
            table.follow()
        server.shutdown()
    assert "sword" not in str(raised.value)
    assert "..." in str(raised.value)


def test_keys_that_were_renewed_open_both_tables_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(Place(str(tmp_path / "messages")))
    writer.commit()
    table = follower(tmp_path)
    table.follow()
    before = table._delta, table._catalog
    monkeypatch.setattr(Place, "delta_options", lambda _: {"aws_access_key_id": "new"})
    writer.commit()
    assert table.follow() == 2
    assert (table._delta is before[0], table._catalog is before[1]) == (False, False)


def test_a_catalog_that_never_answers_does_not_keep_a_process_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(IcebergTable, "follow", lambda _: answer.wait())
    monkeypatch.setattr(pipeline_iceberg, "_LAST_S", 0.05)
    data = {
        "source": {"service_url": "pulsar://h:1", "topics": ["orders"]},
        "stream": {"name": "s"},
        "delta": {"path": str(tmp_path / "messages"), "iceberg_table": NAME},
        "iceberg": {"settings": settings(tmp_path)},
    }
    tables = pipeline_iceberg.IcebergTables(parse_config(data))
    tables.start()
    tables.close()
    assert "does not answer" in caplog.text
    answer.set()


def test_a_column_that_comes_again_with_another_type_is_refused_with_a_way_out(
    tmp_path: Path,
) -> None:
    place = Place(str(tmp_path / "messages"))
    write_deltalake(place.uri, pa.table({"id": [1]}))
    version = DeltaTable(place.uri).version()
    write_deltalake(
        place.uri, pa.table({"id": [2], "new": [7]}), mode="append", schema_mode="merge"
    )
    first = follower(tmp_path)
    assert first.follow() is not None
    DeltaTable(place.uri).restore(version)
    write_deltalake(
        place.uri, pa.table({"id": [3], "new": ["x"]}), mode="append", schema_mode="merge"
    )
    for again in (first, follower(tmp_path)):
        with pytest.raises(TableError, match="drop it, and it is made again") as error:
            again.follow()
        assert "new" in error.value.message
    load_catalog("default", **settings(tmp_path)).drop_table(NAME)
    assert follower(tmp_path).follow() is not None
    assert sorted(read(tmp_path)["id"].to_pylist()) == [1, 3]
