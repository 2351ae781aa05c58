"""The tables that take messages in a task: what they take, and what becomes of messages that do not
fit.
"""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import date, datetime, timezone
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from ledgerlake.api import parse_config
from ledgerlake.client.cluster import ClientSettings
from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.errors import SetupError
from ledgerlake.operators import table_writer
from ledgerlake.operators.results import BatchSettings, TableBatch, TopicSchemas
from ledgerlake.operators.table_writer import TableWriters
from ledgerlake.operators.transforms import RowTransform, united_columns
from ledgerlake.options.spark_options import SparkConfig
from ledgerlake.options.table_options import TableOptions, tables_of_topic
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.pipeline.tables import MessagesTable
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.compaction import Compaction
from ledgerlake.values.record_columns import record_of
from ledgerlake.verify.table_rows import TableRows
from ledgerlake.wire.value_schema import NO_SCHEMA, ValueSchema
from tests.model.test_record_model import schema_of, version_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ledgerlake.values.row_query import Answer

TOPIC = "persistent://public/default/orders"
RECORD = pa.struct([("id", pa.int64()), ("day", pa.date32()), ("name", pa.string())])


def messages(*rows: dict[str, Any]) -> pa.RecordBatch:
    common = {
        "topic": TOPIC,
        "partition": -1,
        "ledger_id": 1,
        "batch_index": -1,
        "is_null": False,
        "late": False,
    }
    numbered = [
        {**common, "entry_id": number, "publish_time": number, **row}
        for number, row in enumerate(rows)
    ]
    return pa.RecordBatch.from_pylist(numbered, schema=schema.MESSAGES)


def values(*texts: bytes, **other: Any) -> pa.RecordBatch:
    return messages(*({"value": text, **other} for text in texts))


class Tables:
    """Tables in a folder, and what a task writes into them."""

    def __init__(
        self, folder: Path, *tables: TableOptions, known: dict[str, TableBatch] | None = None
    ) -> None:
        self.folder = folder
        batch = BatchSettings(0, known or {}, [], TopicSchemas())
        client = ClientSettings("pulsar://nowhere:1")
        self.writers = TableWriters(
            tables, TopicPartition(TOPIC, -1), client, batch, "part-00000000-00000"
        )

    def write(self, batch: pa.RecordBatch) -> list[tuple[int, str]]:
        return [(misfit.row, misfit.detail) for misfit in self.writers.write(batch)]

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        return {
            writer.table.name: [
                row
                for file in writer.finish(None).files
                for row in pq.read_table(f"{writer.folder.root}/{file.name}").to_pylist()
            ]
            for writer in self.writers.with_rows
        }


def table(folder: Path, name: str, **options: Any) -> TableOptions:
    (folder / name).mkdir(exist_ok=True)
    return TableOptions(name, f"[[tables]] {name}", Place(str(folder / name)), **options)


def known(columns: pa.StructType, record: pa.StructType | None = None, **other: Any) -> TableBatch:
    made = TableBatch.of({}, record if record is not None else columns, columns)
    return TableBatch(made.watermark_us, made.record, made.columns, **other)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, Any]:
    versions: dict[bytes, Any] = {version_of(0): schema_of({"n": "int"})}
    monkeypatch.setattr(table_writer, "schemas_of", lambda *_: versions.get)
    return versions


def test_a_message_that_fits_none_is_said_once_and_others_are_in_the_tables_that_take_them(
    tmp_path: Path,
) -> None:
    tables = Tables(
        tmp_path,
        table(tmp_path, "a", where="cast(key as int) > 0"),
        table(tmp_path, "b", where="cast(key as int) > 1"),
        table(tmp_path, "rest", is_default=True),
    )
    batch = messages(*({"key": key, "value": b"v"} for key in ("0", "1", "2", "x")))
    ((row, detail),) = tables.write(batch)
    assert row == 3
    assert detail.count("Could not convert string 'x'") == 2
    assert "; [[tables]] b: transform_failed: " in detail
    assert {name: [row["key"] for row in rows] for name, rows in tables.rows().items()} == {
        "a": ["1", "2"],
        "b": ["2"],
        "rest": ["0"],
    }


@pytest.mark.parametrize("shape", ["messages", "record"])
def test_an_empty_value_deletes_a_key_as_in_pulsars_compaction(tmp_path: Path, shape: str) -> None:
    latest = table(
        tmp_path,
        "r",
        mode="latest",
        shape=shape,
        where="key is distinct from 'z'" if shape == "messages" else "",
    )
    tables = Tables(tmp_path, latest, table(tmp_path, "all"), known={"r": known(pa.struct([]))})
    batch = messages(
        {"key": "a", "value": b""},
        {"key": "b", "is_null": True},
        {"value": b""},
        {"key": "z", "value": b""},
    )
    assert tables.write(batch) == [(2, "the message has no key")]
    rows = tables.rows()
    deleted = rows["r"] if shape == "messages" else [row["pulsar"] for row in rows["r"]]
    assert [row["key"] for row in deleted] == ["a", "b", "z"]
    # A table that has all messages keeps what they are.
    assert [row["value"] for row in rows["all"]] == [b"", None, b"", b""]


def test_a_message_without_key_that_a_condition_leaves_out_is_no_reject_of_the_latest_messages(
    tmp_path: Path,
) -> None:
    latest = table(tmp_path, "r", mode="latest", where="value = 'b'")
    tables = Tables(tmp_path, latest, table(tmp_path, "rest", is_default=True))
    batch = messages(
        {"key": "a", "value": b"a"},
        {"value": b"a"},
        {"value": b"b"},
        {"is_null": True},
        {"key": "b", "value": b"b"},
    )
    assert tables.write(batch) == [(2, "the message has no key")]
    assert {
        name: [(row["key"], row["value"]) for row in rows] for name, rows in tables.rows().items()
    } == {
        "r": [("b", b"b")],
        "rest": [("a", b"a"), (None, b"a"), (None, None)],
    }


def test_a_message_without_a_schema_version_has_no_schema_name(
    tmp_path: Path, registry: dict[bytes, Any]
) -> None:
    tables = Tables(
        tmp_path, table(tmp_path, "r", schema="R"), table(tmp_path, "rest", is_default=True)
    )
    assert (
        tables.write(messages({"value": b"1", "schema_version": version_of(0)}, {"value": b"2"}))
        == []
    )
    assert {name: [row["value"] for row in rows] for name, rows in tables.rows().items()} == {
        "r": [b"1"],
        "rest": [b"2"],
    }


def test_a_deletion_that_does_not_meet_the_condition_of_a_table_is_in_it_and_in_the_default_one(
    tmp_path: Path,
) -> None:
    latest = table(tmp_path, "r", mode="latest", where="value = 'b'")
    tables = Tables(tmp_path, latest, table(tmp_path, "rest", is_default=True))
    batch = messages(
        {"key": "a", "value": b"a"}, {"key": "b", "is_null": True}, {"key": "c", "value": b"b"}
    )
    present = {"r": np.array([False, False, True])}
    assert tables.writers.write(batch, present) == []
    assert tables.writers.is_new.tolist() == [True, True, False]
    assert {name: [row["key"] for row in rows] for name, rows in tables.rows().items()} == {
        "r": ["b"],
        "rest": ["a", "b"],
    }


def test_a_message_without_value_and_key_is_no_deletion_of_a_table_by_schema(
    tmp_path: Path, registry: dict[bytes, Any]
) -> None:
    latest = table(tmp_path, "r", schema="R", mode="latest")
    tables = Tables(tmp_path, latest, table(tmp_path, "rest", is_default=True))
    batch = messages(
        {"value": b"1", "schema_version": version_of(0), "key": "a"},
        {"is_null": True, "key": "b"},
        {"is_null": True},
    )
    assert tables.write(batch) == []
    assert {name: [row["key"] for row in rows] for name, rows in tables.rows().items()} == {
        "r": ["a", "b"],
        "rest": ["b", None],
    }


# Conditions, and what each is of a message; None if it is null or fails.
CONDITIONS: dict[str, Callable[[dict[str, Any]], bool | None]] = {
    "": lambda _: True,
    "key = 'a'": lambda seen: None if seen["key"] is None else seen["key"] == "a",
    "key is distinct from 'a'": lambda seen: seen["key"] != "a",
    "octet_length(value) > 3": lambda seen: (
        None if seen["value"] is None else len(seen["value"]) > 3
    ),
    "coalesce(octet_length(value), 9) > 3": lambda seen: (
        seen["value"] is None or len(seen["value"]) > 3
    ),
    "is_null": lambda seen: bool(seen["is_null"]),
    "cast(properties['n'] as int) > 2": lambda seen: {"1": False, "5": True}.get(
        dict(seen["properties"]).get("n", "")
    ),
}
RECORD_CONDITIONS: dict[str, Callable[[dict[str, Any]], bool | None]] = {
    "n > 1": lambda seen: None if seen["value"] is None else seen["value"] == b'{"n": 3}',
    "coalesce(n, 9) > 1": lambda seen: seen["value"] in (None, b'{"n": 3}'),
    "pulsar.key = 'a'": CONDITIONS["key = 'a'"],
    "": CONDITIONS[""],
}
ELSEWHERE = "persistent://public/default/elsewhere"


def a_message(rng: random.Random) -> dict[str, Any]:
    value, version = rng.choice(
        [
            (None, None),
            (None, version_of(0)),
            (b"", None),
            (b"ab", None),
            (b"abcdef", None),
            (b'{"n": 1}', version_of(0)),
            (b'{"n": 3}', version_of(0)),
            (b"{broken", version_of(0)),
        ]
    )
    return {
        "value": value,
        "is_null": value is None,
        "schema_version": version,
        "key": rng.choice(["a", "b", "c", None]),
        "properties": rng.choice([[], [("n", "1")], [("n", "5")], [("n", "x")]]),
    }


def some_tables(rng: random.Random, folder: Path) -> list[TableOptions]:
    tables = []
    for number in range(rng.randint(0, 3)):
        options: dict[str, Any] = {
            "mode": rng.choice(["append", "latest"]),
            "topics_pattern": rng.choice(["", "", TOPIC, ELSEWHERE]),
            "schema": rng.choice(["", "R"]),
        }
        if options["schema"] and rng.random() < 0.5:
            options |= {"shape": "record", "where": rng.choice(list(RECORD_CONDITIONS))}
        else:
            options["where"] = rng.choice(list(CONDITIONS))
        made = table(folder, f"t{number}", **options)
        if rng.random() < 0.3:
            (folder / f"t{number}" / "orders").mkdir()
            made = replace(made, place=made.place / "{topic}")
        tables.append(made)
    if rng.random() < 0.7:
        tables.append(table(folder, "rest", mode=rng.choice(["append", "latest"]), is_default=True))
    rng.shuffle(tables)
    return tables


def place_in(options: TableOptions, message: dict[str, Any]) -> tuple[bool, str]:
    """Whether a table takes a message, and what becomes of it there: a row, a deletion, a reject or
    nothing.
    """
    seen = dict(message)
    if options.keeps_latest and not seen["value"]:
        seen |= {"value": None, "is_null": True}
    is_deletion = options.keeps_latest and seen["value"] is None
    conditions = RECORD_CONDITIONS if options.has_record_shape else CONDITIONS
    holds = conditions[options.where](seen)
    fits = not options.schema or message["schema_version"] is not None
    is_bad = holds is None and "cast" in options.where and ("n", "x") in message["properties"]
    is_bad |= options.has_record_shape and message["value"] == b"{broken"
    if is_deletion and message["key"] is not None:
        return fits and bool(holds), "deletion"
    if not fits or not (holds or (is_bad and not is_deletion)):
        return False, ""
    return True, "reject" if is_bad or (options.keeps_latest and not message["key"]) else "row"


@pytest.mark.parametrize("seed", range(60))
def test_each_message_is_in_a_table_or_in_rejects_or_has_deleted_a_key(
    seed: int, tmp_path: Path, registry: dict[bytes, Any]
) -> None:
    """What a table with the latest messages deletes without taking the message does not count."""
    rng = random.Random(seed)
    configured = some_tables(rng, tmp_path)
    options = tables_of_topic(configured, TOPIC)
    record = pa.struct([("n", pa.int32())])
    tables = Tables(
        tmp_path,
        *configured,
        known={of.name: known(record) for of in options if of.has_record_shape},
    )
    sent = [a_message(rng) for _ in range(30)]
    half = rng.randint(0, len(sent))
    batch = messages(*sent)
    rejected = {row for row, _ in tables.write(batch.slice(0, half))}
    rejected |= {row + half for row, _ in tables.write(batch.slice(half))}
    found: dict[int, set[tuple[str, str]]] = {number: set() for number in range(len(sent))}
    for name, rows in tables.rows().items():
        (of,) = (of for of in options if of.name == name)
        for row in rows:
            place = row["pulsar"] if of.has_record_shape else row
            kind = "deletion" if of.keeps_latest and place["is_null"] else "row"
            found[place["entry_id"]].add((name, kind))
    default = next((of for of in options if of.is_default), None)
    others = [of for of in options if not of.is_default]
    for number, message in enumerate(sent):
        places = {of.name: place_in(of, message) for of in others}
        is_taken = any(takes for takes, _ in places.values())
        if not is_taken and default is not None:
            places[default.name] = place_in(default, message)
        expected = {(name, kind) for name, (_, kind) in places.items()}
        assert found[number] == {item for item in expected if item[1] in ("row", "deletion")}
        is_reject = any(kind == "reject" for _, kind in expected)
        assert (number in rejected) == (is_reject or not any(takes for takes, _ in places.values()))


def test_json_without_a_schema_becomes_the_fields_that_the_configuration_declares(
    tmp_path: Path, registry: dict[bytes, Any]
) -> None:
    registry[version_of(1)] = ValueSchema(pb.Schema.String)
    fields = {
        "id": "long",
        "tags": ["string"],
        "address": {"city": "string"},
        "at": "timestamp-millis",
    }
    (options,) = parse_config(
        {
            "source": {"service_url": "pulsar://h:1", "topics": ["orders"]},
            "stream": {"name": "s"},
            "delta": {"path": str(tmp_path / "t"), "shape": "record", "json_fields": fields},
        }
    ).table_options
    (tmp_path / "t").mkdir()
    record = record_of(options.value_schema(NO_SCHEMA))
    tables = Tables(tmp_path, options, known={"messages": known(record)})
    texts = [
        b'{"id": 1, "tags": ["a"], "address": {"city": "Ulm", "zip": 1}, "at": 1000, "unknown": '
        b"true}",
        b"{broken",
        b'{"id": "no number"}',
        b"{}",
    ]
    misfits = tables.write(values(*texts))
    assert [row for row, _ in misfits] == [1, 2]
    assert (
        tables.write(values(b'{"id": 2}', schema_version=version_of(1), entry_id=9, publish_time=9))
        == []
    )
    rows = [{name: row[name] for name in record.names} for row in tables.rows()["messages"]]
    nothing = dict.fromkeys(record.names)
    at = datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc)
    assert rows == [
        {"id": 1, "tags": ["a"], "address": {"city": "Ulm"}, "at": at},
        nothing,
        {**nothing, "id": 2},
    ]


def test_a_schema_with_fields_counts_more_than_declared_ones(registry: dict[bytes, Any]) -> None:
    options = TableOptions("t", "t", Place("t"), shape="record", json_fields='{"type": "record"}')
    assert options.value_schema(registry[version_of(0)]) == registry[version_of(0)]


def test_a_table_whose_schema_is_not_known_yet_does_not_stop_messages_of_others(
    tmp_path: Path, registry: dict[bytes, Any]
) -> None:
    options = table(
        tmp_path,
        "t",
        schema="Order",
        where="amount > 1000",
        shape="record",
        partition_by=("country",),
    )
    tables = Tables(tmp_path, options, table(tmp_path, "rest", is_default=True))
    assert tables.write(messages({"value": b'{"n": 1}', "schema_version": version_of(0)})) == []
    registry[version_of(0)] = schema_of({"amount": "int"})
    one = Tables(
        tmp_path,
        table(tmp_path, "t", where="total > 1", shape="record"),
        known={"t": known(pa.struct([("amount", pa.int32())]))},
    )
    ((row, detail),) = one.write(
        messages({"value": b'{"amount": 1}', "schema_version": version_of(0)})
    )
    assert (row, '"total" not found' in detail) == (0, True)


def test_an_obstacle_makes_misfits_and_no_files(tmp_path: Path) -> None:
    tables = Tables(tmp_path, table(tmp_path, "t"), known={"t": TableBatch(obstacle="no folder")})
    assert tables.write(values(b"1", b"2")) == [(0, "no folder"), (1, "no folder")]
    assert tables.rows() == {}


def test_two_of_tables_with_one_folder_do_not_lose_the_rows_of_one(tmp_path: Path) -> None:
    tables = Tables(
        tmp_path, table(tmp_path, "t", where="key = 'a'"), table(tmp_path, "t", where="key = 'b'")
    )
    ((row, detail),) = tables.write(
        messages({"key": "a", "value": b"1"}, {"key": "b", "value": b"2"})
    )[1:]
    assert (row, "has the folder of this topic's table" in detail) == (1, True)
    assert [row["value"] for row in tables.rows()["t"]] == [b"1"]


def test_dates_that_no_partition_can_have_are_misfits(
    tmp_path: Path, registry: dict[bytes, Any]
) -> None:
    options = table(tmp_path, "t", partition_by=("date(event_time) as day",))
    days = [
        datetime(2026, 1, 1, tzinfo=timezone.utc),
        datetime(1960, 1, 1, tzinfo=timezone.utc),
        None,
    ]
    batch = messages(*({"event_time": day, "value": b"v"} for day in days))
    far = pa.array([400_000_000_000_000_000] * 3).cast(schema.TIMESTAMP)
    both = pa.Table.from_batches(
        [batch, batch.set_column(batch.schema.get_field_index("event_time"), "event_time", far)]
    )
    tables = Tables(
        tmp_path, options, known={"t": known(pa.struct([("day", pa.date32())]), pa.struct([]))}
    )
    (mixed,) = both.combine_chunks().to_batches()
    misfits = tables.write(mixed)
    assert [row for row, _ in misfits] == [3, 4, 5]
    assert all("the years are 1 to 9999" in detail for _, detail in misfits)
    assert [row["day"] for row in tables.rows()["t"]] == [date(2026, 1, 1), date(1960, 1, 1), None]


def test_producers_cannot_make_any_number_of_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_writer, "_MOST_PARTITIONS", 3)
    tables = Tables(tmp_path, table(tmp_path, "t", partition_by=("key",)))
    batch = messages(*({"key": f"k{number % 5}", "value": b"%d" % number} for number in range(10)))
    assert [row for row, detail in tables.write(batch) if "more than" in detail] == [3, 4, 8, 9]
    assert sorted(row["key"] for row in tables.rows()["t"]) == ["k0", "k0", "k1", "k1", "k2", "k2"]


def test_a_partition_value_that_is_too_long_for_the_log_makes_the_message_a_reject(
    tmp_path: Path,
) -> None:
    tables = Tables(tmp_path, table(tmp_path, "t", partition_by=("key",)))
    batch = messages(
        {"key": "\u00e9" * 500},
        {"key": "\u00e9" * 500 + "k"},
        {"key": "k" * 5_000_000},
        {"key": None},
    )
    assert [detail for _, detail in tables.write(batch)] == [
        f"key has {size} bytes, and a partition value has at most 1,000"
        for size in ("1,001", "5,000,000")
    ]
    assert [row["key"] for row in tables.rows()["t"]] == ["\u00e9" * 500, None]


@pytest.mark.parametrize("cut", range(0, 40, 7))
def test_which_partitions_are_too_many_does_not_depend_on_the_pieces_of_a_range(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_writer, "_MOST_PARTITIONS", 9)
    rng = random.Random(7)
    keys = [(rng.choice("abc"), rng.choice("vwxyz")) for _ in range(40)]
    batch = messages(*({"key": key, "producer_name": name} for key, name in keys))
    tables = Tables(tmp_path, table(tmp_path, "t", partition_by=("key", "producer_name")))
    first = list(dict.fromkeys(keys))[:9]
    refused = [row for row, _ in tables.write(batch.slice(0, cut))]
    refused += [row + cut for row, _ in tables.write(batch.slice(cut))]
    assert refused == [row for row, key in enumerate(keys) if key not in first]


def test_a_query_may_select_pulsar_which_stays_as_it_is(
    tmp_path: Path, registry: dict[bytes, Any]
) -> None:
    columns = pa.struct([("n", pa.int32()), ("twice", pa.int32())])
    record = pa.struct([("n", pa.int32())])
    options = table(tmp_path, "t", shape="record", sql="select *, n * 2 as twice from messages")
    assert RowTransform(options).columns(record) == columns
    tables = Tables(tmp_path, options, known={"t": known(columns, record)})
    assert (
        tables.write(messages({"value": b'{"n": 3}', "schema_version": version_of(0), "key": "k"}))
        == []
    )
    (row,) = tables.rows()["t"]
    assert (row["n"], row["twice"], row["pulsar"]["key"], row["pulsar"]["late"]) == (
        3,
        6,
        "k",
        False,
    )
    with pytest.raises(SetupError, match="sql has a column Pulsar"):
        RowTransform(
            table(tmp_path, "t", shape="record", sql="select 1 as Pulsar from messages")
        ).columns(record)


def odd(batch: pa.RecordBatch) -> pa.RecordBatch:
    """What functions return that nobody expects, by the first value."""
    kind = batch["value"][0].as_py().decode() if batch.num_rows else ""
    count = batch.num_rows
    columns: dict[str, pa.Array] = {
        "n": pa.array(range(count), pa.int64()),
        "pulsar": batch["pulsar"],
    }
    if kind == "null":
        columns["n"] = pa.nulls(count)
    if kind == "large":
        columns["n"] = pa.array([str(number) for number in range(count)], pa.large_string())
    if kind == "exit":
        raise SystemExit(3)
    if kind == "surrogate":
        raise ValueError("no kind \ud800")
    if kind == "missing":
        del columns["n"]
    if kind == "extra":
        columns["more"] = columns["n"]
    if kind == "twice":
        return pa.RecordBatch.from_arrays(
            [columns["n"], columns["n"], columns["pulsar"]], names=["n", "n", "pulsar"]
        )
    if kind == "doubled":
        columns = {name: pa.concat_arrays([column, column]) for name, column in columns.items()}
    if kind == "table":
        return pa.table(columns)
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


@pytest.mark.parametrize(
    ("kind", "misfit"),
    [
        ("null", ""),
        ("large", ""),
        ("missing", ""),
        ("exit", "SystemExit"),
        ("surrogate", "ValueError: no kind ?"),
        ("extra", "a column more, and did not"),
        ("twice", "a column twice"),
        ("doubled", "each row once"),
        ("table", "returns a Table and no record batch"),
    ],
)
def test_what_a_function_returns_never_ends_the_task(
    kind: str, misfit: str, tmp_path: Path
) -> None:
    options = table(tmp_path, "t", shape="record", function="tests.operators.test_table_writer:odd")
    record = pa.struct([("value", pa.binary())])
    columns = RowTransform(options).columns(record)
    tables = Tables(tmp_path, options, known={"t": known(columns, record)})
    found = tables.write(values(kind.encode()))
    assert [misfit in detail for _, detail in found] == ([True] if misfit else [])
    assert len(tables.rows()["t"]) == (0 if misfit else 1)


def test_a_computed_column_does_not_take_the_name_of_another(tmp_path: Path) -> None:
    for options in (
        table(tmp_path, "t", partition_by=("upper(key) as key",)),
        table(tmp_path, "t", shape="record", partition_by=("upper(name) as id",)),
        table(tmp_path, "t", shape="record", partition_by=("upper(name) as Pulsar",)),
    ):
        with pytest.raises(
            SetupError, match=r"two fields '(key|id|pulsar)' that differ in case at"
        ):
            RowTransform(options).columns(RECORD if options.has_record_shape else pa.struct([]))


@pytest.mark.parametrize(
    "name", ["record", "Record", "pulsar", "PULSAR", "value_record", "messages"]
)
def test_a_partition_column_may_have_any_name_that_is_free(tmp_path: Path, name: str) -> None:
    options = table(tmp_path, "t", partition_by=(f"split_part(topic, '/', 5) as {name}",))
    opened = MessagesTable(options, "s", "auto", Place(str(tmp_path / "staging")))
    opened.table.check(None)
    opened.table.create()
    for number in range(9):
        tables = Tables(tmp_path, options, known={"t": opened.settings()})
        rows = ({"value": b"v", "entry_id": 2 * number + position} for position in range(2))
        assert tables.write(messages(*rows)) == []
        files = [file for writer in tables.writers.with_rows for file in writer.finish(None).files]
        batch = BatchCommit("stream", "query", number, number)
        assert not opened.table.contains(batch)
        opened.table.commit(batch, files, {})
    compaction = Compaction(options.place, schema.MESSAGES)
    assert (compaction.run(), compaction.obstacles) == (9, [])
    read = TableRows(options.place, SparkConfig()).batches()
    assert sorted(n for _, rows in read for n in rows["entry_id"].to_pylist()) == list(range(18))


def test_another_query_may_not_change_the_type_of_a_column_so_that_values_are_lost() -> None:
    there = pa.struct([("n", pa.int32()), ("x", pa.float64()), ("l", pa.list_(pa.int64()))])
    narrower = pa.struct(
        [("n", pa.int16()), ("x", pa.float32()), ("l", pa.list_(pa.int64())), ("more", pa.string())]
    )
    assert united_columns(there, narrower, "t").names == ["n", "x", "l", "more"]
    for kind in (pa.int64(), pa.float64(), pa.string()):
        with pytest.raises(SetupError, match="the column n of t is"):
            united_columns(there, pa.struct([("n", kind)]), "t")


def test_what_is_known_only_when_a_row_is_written_is_null_for_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[pa.RecordBatch] = []
    options = table(tmp_path, "t", where="true")
    transform = RowTransform(options)
    assert transform._condition is not None
    of = transform._condition.of

    def noted(batch: pa.RecordBatch) -> Answer:
        seen.append(batch)
        return of(batch)

    monkeypatch.setattr(transform._condition, "of", noted)
    transform.apply(messages({"value": b"1", "delivered_at": 5, "late": True}), pa.struct([]))
    assert pc.all(seen[0]["late"].is_null()).as_py()
    assert seen[0]["delivered_at"].null_count == 1


@pytest.mark.parametrize(
    "setting",
    [
        {"where": "decode(value)->>'$.n' = 'a'"},
        {"sql": "select decode(value)->>'$.n' as n from messages"},
    ],
)
def test_a_broken_value_that_is_not_ascii_is_rejected_alone(
    tmp_path: Path, setting: dict[str, str]
) -> None:
    transform = RowTransform(table(tmp_path, "t", **setting))
    columns = transform.columns(pa.struct([]))
    good, broken = b'{"n":"a"}', ('{"n":"a' + "東" * 50).encode()
    answer = transform.apply(messages({"value": good}, {"value": broken}, {"value": good}), columns)
    assert answer.numbers.tolist() == [0, 2]
    assert [(misfit.row, misfit.reason) for misfit in answer.misfits] == [(1, "transform_failed")]


def test_a_function_gets_due_messages_together_whose_positions_do_not_rise(tmp_path: Path) -> None:
    calls.clear()
    options = table(
        tmp_path, "t", shape="record", function="tests.operators.test_table_writer:counted"
    )
    record = pa.struct([("value", pa.binary())])
    tables = Tables(
        tmp_path, options, known={"t": known(RowTransform(options).columns(record), record)}
    )
    batch = messages(
        *({"value": b"%d" % entry_id, "entry_id": entry_id} for entry_id in (5, 3, 4, 1))
    )
    assert tables.write(batch) == []
    assert [rows for rows in calls if rows] == [4]
    assert sorted(row["value"] for row in tables.rows()["t"]) == [b"1", b"3", b"4", b"5"]


calls: list[int] = []


def counted(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A function that changes nothing."""
    calls.append(batch.num_rows)
    return batch


def latest_occurrence(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A function that keeps the rows of a value."""
    calls.append(batch.num_rows)
    return batch.filter(pc.equal(batch["value"], b"2"))


@pytest.mark.parametrize(
    ("function", "values_left"), [("counted", [b"1", b"2", b"3"]), ("latest_occurrence", [b"2"])]
)
def test_a_function_may_leave_out_occurrences_of_a_message_that_repeats(
    tmp_path: Path, function: str, values_left: list[bytes]
) -> None:
    """They have one position."""
    calls.clear()
    options = table(
        tmp_path, "t", shape="record", function=f"tests.operators.test_table_writer:{function}"
    )
    record = pa.struct([("value", pa.binary())])
    tables = Tables(
        tmp_path, options, known={"t": known(RowTransform(options).columns(record), record)}
    )
    batch = messages(
        *({"value": b"%d" % number, "entry_id": 7, "event_time": number} for number in (1, 2, 3))
    )
    assert tables.write(batch) == []
    rows = tables.rows()["t"]
    assert [(row["value"], row["pulsar"]["event_time"].microsecond) for row in rows] == [
        (value, int(value)) for value in values_left
    ]
    if function == "counted":
        assert [count for count in calls if count] == [3]
