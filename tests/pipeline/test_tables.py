"""The tables of a pipeline: which topics have one, how their columns follow from schemas, and the
refused tables.
"""

from __future__ import annotations

import errno
import json
import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from ledgerlake.client.cluster import ClientSettings
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.decode.schema import MESSAGES
from ledgerlake.errors import CheckpointError, OffsetError, SetupError, TableAccessError, TableError
from ledgerlake.operators.results import (
    BatchSettings,
    PartitionResult,
    TableResult,
    TaskResult,
    TopicSchemas,
)
from ledgerlake.operators.stage_rows import StateSummary
from ledgerlake.operators.table_writer import TableWriters
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.commit import DeltaSink
from ledgerlake.pipeline.record_schemas import RecordSchemas
from ledgerlake.pipeline.row_settings import changed, row_settings
from ledgerlake.pipeline.tables import Tables
from ledgerlake.stored.places import Place
from ledgerlake.table import open_table
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.delta_table import PARTITION_BY
from ledgerlake.table.open_table import open_delta
from ledgerlake.table.ordered_files import DataFile
from ledgerlake.table.record_table import LEARNED, RecordTable, learned_from_text, learned_to_text
from ledgerlake.values import record_columns
from ledgerlake.wire.message_id import Position
from tests.model.test_record_model import TOPICS, Fields, Registry
from tests.pipeline_tables import opened_tables

if TYPE_CHECKING:
    from pathlib import Path


def started(
    folder: Path,
    registry: Registry,
    tables: list[dict[str, Any]],
    topics: Any = TOPICS,
    sections: dict[str, Any] | None = None,
    **delta: Any,
) -> Tables:
    """The tables after a start."""
    located = [{**table, "path": str(folder / table["path"])} for table in tables]
    opened = opened_tables(folder, located, sections, **delta)
    opened.add_for_topics(topics)
    opened.check(None)
    opened.schemas = RecordSchemas(registry, opened)  # type: ignore[attr-defined,arg-type]
    learn(opened, topics, have_messages=False)
    return opened


def learn(tables: Tables, topics: Any = TOPICS, *, have_messages: bool = True) -> TopicSchemas:
    found: TopicSchemas = tables.schemas.learn(topics, topics if have_messages else ())  # type: ignore[attr-defined]
    tables.create()
    return found


def columns(folder: Path, name: str) -> dict[str, str]:
    fields = pa.schema(DeltaTable(str(folder / name)).schema())
    return {field.name: str(field.type) for field in fields if field.name != "pulsar"}


@pytest.fixture
def registry() -> Registry:
    return Registry()


def test_the_types_that_a_query_sees_stay_whatever_the_order_in_which_topics_come(
    tmp_path: Path, registry: Registry
) -> None:
    tables = [{"path": "t", "shape": "record", "sql": "select amount from messages"}]
    registry.versions[TOPICS[1]] = [{"amount": "double"}]
    started(tmp_path, registry, tables)
    registry.versions[TOPICS[0]] = [{"amount": "string"}]
    again = started(tmp_path, registry, tables)
    assert str(again.by_name[f"table:{tmp_path / 't'}"].learned.field("amount").type) == "double"  # type: ignore[attr-defined]
    assert columns(tmp_path, "t") == {"amount": "double"}
    registry.versions[TOPICS[0]].append({"amount": "string", "more": "int"})
    learn(again)
    third = started(tmp_path, registry, tables)
    assert third.by_name[f"table:{tmp_path / 't'}"].learned.names == ["amount", "more"]  # type: ignore[attr-defined]


def test_the_query_of_each_stream_sees_the_columns_of_its_own_topics(tmp_path: Path) -> None:
    def seen(stream: str, kind: pa.DataType) -> Any:
        section = {"stream": {"name": stream, "checkpoint": f"{tmp_path}/{stream}"}}
        sql = "select cast(v as string) as v from messages"
        tables = opened_tables(tmp_path, sections=section, shape="record", sql=sql)
        tables.main.note_record(pa.struct([("v", kind)]))
        tables.main.add_columns(is_start=True)
        tables.create()
        return tables.main.table.learned.field("v").type  # type: ignore[attr-defined]

    for _ in range(2):
        assert seen("numbers", pa.int32()) == pa.int32()
        assert seen("texts", pa.string()) == pa.string()


def test_a_table_of_declared_fields_is_there_before_the_first_message_and_its_query_is_checked(
    tmp_path: Path, registry: Registry
) -> None:
    table = {"path": "t", "shape": "record", "json_fields": {"page": "string", "ms": "int"}}
    started(
        tmp_path,
        registry,
        [{**table, "sql": "select ms + 1 as later from messages where page = 'a'"}],
    )
    assert columns(tmp_path, "t") == {"later": "int32"}
    with pytest.raises(SetupError, match="nothing"):
        started(tmp_path, registry, [{**table, "path": "u", "sql": "select nothing from messages"}])


@pytest.mark.parametrize("query", [{}, {"sql": "select ms, page from messages"}])
def test_another_type_of_a_declared_field_ends_the_start(
    tmp_path: Path, registry: Registry, query: dict[str, str]
) -> None:
    table = {"path": "t", "shape": "record", **query}
    started(tmp_path, registry, [{**table, "json_fields": {"page": "string", "ms": "int"}}])
    with pytest.raises(SetupError, match=r"the column ms of .* json_fields is"):
        started(
            tmp_path,
            registry,
            [{**table, "json_fields": {"page": "string", "ms": "timestamp-millis"}}],
        )
    started(
        tmp_path,
        registry,
        [{**table, "json_fields": {"page": "string", "ms": "int", "more": "double"}}],
    )


def test_what_a_query_sees_is_stored_with_a_version() -> None:
    record = pa.struct([("amount", pa.float64())])
    golden = (
        "1 "
        "/////3gAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEDEA"
        "AAACAAAAAEAAAAAAAAAAYAAABhbW91bnQAAAAABgAIAAYABgAAAAAAAgA="
    )
    assert learned_from_text(golden, "t", LEARNED) == record
    assert learned_from_text(learned_to_text(record), "t", LEARNED) == record
    with pytest.raises(OffsetError, match="newer Ledgerlake"):
        learned_from_text("2 abc", "t", LEARNED)
    for damaged in ("", "1", "1 %", "1 abcd", "x"):
        with pytest.raises(TableError, match=f"{LEARNED} of the table at t is damaged"):
            learned_from_text(damaged, "t", LEARNED)


@pytest.mark.parametrize("shape", ["messages", "record"])
def test_a_partition_column_that_is_computed_otherwise_is_refused(
    tmp_path: Path, registry: Registry, shape: str
) -> None:
    registry.versions[TOPICS[0]] = [{"size": "int"}]
    inside = "pulsar." if shape == "record" else ""

    def start(*partition_by: str) -> None:
        started(
            tmp_path,
            registry,
            [{"path": "t", "shape": shape, "partition_by": list(partition_by)}],
            TOPICS[:1],
        )

    start(f"date({inside}broker_timestamp) as day", f"{inside}partition as part")
    start(f"date({inside}broker_timestamp) as day", f"{inside}partition as part")
    with pytest.raises(
        TableError,
        match=r"column day of .*t was computed by date\(.*broker.*\), and partition_by has "
        r"date\(.*publish",
    ):
        start(f"date({inside}publish_time) as day", f"{inside}partition as part")


def test_a_partition_column_of_the_rows_that_would_be_computed_from_now_on_is_refused(
    tmp_path: Path, registry: Registry
) -> None:
    registry.versions[TOPICS[0]] = [{"size": "int"}]

    def start(partition_by: str) -> None:
        started(
            tmp_path,
            registry,
            [{"path": "t", "shape": "record", "partition_by": [partition_by]}],
            TOPICS[:1],
        )

    start("size")
    start("size")
    with pytest.raises(
        TableError, match=r"column size of .*t was not computed, and partition_by has size [+] 1"
    ):
        start("size + 1 as size")


def test_how_partition_columns_are_computed_is_stored_with_a_version(
    tmp_path: Path, registry: Registry
) -> None:
    registry.versions[TOPICS[0]] = []
    table = [{"path": "t", "partition_by": ["date(broker_timestamp) as day", "topic"]}]
    started(tmp_path, registry, table)
    path = str(tmp_path / "t")
    golden = '1 {"day": "date(broker_timestamp)"}'
    assert DeltaTable(path).metadata().configuration[PARTITION_BY] == golden
    for text, error, sentence in (
        ("2 {}", OffsetError, "newer Ledgerlake"),
        ("1 x", TableError, f"{PARTITION_BY} of the table at .* is damaged"),
        ('1 {"day": 1}', TableError, f"{PARTITION_BY} of the table at .* is damaged"),
    ):
        DeltaTable(path).alter.set_table_properties({PARTITION_BY: text}, raise_if_not_exists=False)
        with pytest.raises(error, match=sentence):
            started(tmp_path, registry, table)


@pytest.mark.parametrize(
    ("table", "versions"),
    [
        ({"sql": "select country from messages"}, [{"f0": "int"}]),
        ({"partition_by": ["country"]}, [{"f0": "int"}]),
        ({"partition_by": ["country"]}, [{"country": "double"}]),
        ({"sql": "select *, 1 as one from messages"}, [{"one": "int"}]),
    ],
)
def test_a_producers_schema_stops_no_stream_that_makes_tables_by_topic(
    tmp_path: Path, registry: Registry, table: dict[str, Any], versions: list[Fields]
) -> None:
    registry.versions[TOPICS[0]] = versions
    tables = started(tmp_path, registry, [{"path": "lake/{topic}", "shape": "record", **table}])
    learn(tables)
    (settings,) = (
        s for name, s in tables.settings(tables.messages).items() if name.endswith("lake/a")
    )
    assert settings.obstacle
    assert not tables.exists(f"table:{tmp_path / 'lake/a'}")


def test_a_table_by_a_fixed_path_says_at_the_start_what_does_not_fit(
    tmp_path: Path, registry: Registry
) -> None:
    registry.versions[TOPICS[0]] = [{"f0": "int"}]
    with pytest.raises(SetupError, match='"country" not found'):
        started(
            tmp_path,
            registry,
            [{"path": "t", "shape": "record", "sql": "select country from messages"}],
        )


@pytest.mark.parametrize("table", [{}, {"where": "x > 1"}, {"partition_by": ["x"]}, {"partition_by": ["x % 2 as day"]}, {"cluster_by": ["x"]}, {"sql": "select *, x + 1 as y from messages"}, {"mode": "latest"}])  # fmt: skip
def test_a_schema_stops_neither_a_run_nor_a_start_and_the_next_one_gets_its_columns(
    tmp_path: Path, registry: Registry, table: dict[str, Any]
) -> None:
    deep: Any = "int"
    for number in range(50):
        deep = {"type": "record", "name": f"R{number}", "fields": [{"name": "a", "type": deep}]}
    bad: list[Any] = [
        {"day": "string"}, {"Day": "int"}, {"x": "string"}, {"X": "int"}, {"y": "string"}, {"pulsar": "int"},
        {"messages": "int"}, {"record": "int"}, {'a"b\'c`d': "int"}, {"n\0a": "int", "n\0b": "int"}, {"n\0a": "int"},
        {"f": {"type": "fixed", "name": "F", "size": 2**70}}, {"a": "int", "A": "int"}, {"_change_type": "int"},
        {"x": {"type": "record", "name": "X", "fields": [{"name": "z", "type": "int"}]}}, {}, {"deep": deep},
    ]  # fmt: skip
    options = {"path": "t", "shape": "record", **table}
    registry.versions[TOPICS[0]] = [{"x": "int"}]
    tables = started(tmp_path, registry, [options], TOPICS[:1])
    for number, schema in enumerate(bad):
        registry.versions[TOPICS[0]].append({"x": "int", **schema})
        learn(tables, TOPICS[:1])
        tables = started(tmp_path, registry, [options], TOPICS[:1])
        registry.versions[TOPICS[0]].append({"x": "int", f"good{number}": "int"})
        learn(tables, TOPICS[:1])
    selects_all = "sql" not in table or "*" in table["sql"]
    assert {"x", *(f"good{number}" for number in range(len(bad)) if selects_all)} <= set(
        columns(tmp_path, "t")
    )
    assert not tables.settings(tables.messages)[f"table:{tmp_path / 't'}"].obstacle


def test_an_option_that_fits_no_schema_ends_each_start_and_no_run(
    tmp_path: Path, registry: Registry
) -> None:
    registry.versions[TOPICS[0]] = [{"x": "int"}]
    started(tmp_path, registry, [{"path": "t", "shape": "record"}], TOPICS[:1])
    for option in ({"where": "nothing > 1"}, {"sql": "select nothing from messages"}):
        for path in ("t", "u"):
            with pytest.raises(SetupError, match="nothing"):
                started(
                    tmp_path, registry, [{"path": path, "shape": "record", **option}], TOPICS[:1]
                )


def test_a_later_schema_that_does_not_fit_leaves_a_table_as_it_is(
    tmp_path: Path, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.versions[TOPICS[0]] = [{"f0": "int"}]
    table = {"path": "t", "shape": "record", "partition_by": ["f0 % 2 as day"]}
    tables = started(tmp_path, registry, [table], TOPICS[:1])
    registry.versions[TOPICS[0]] += [{"f0": "int", "day": "string"}, {"f2": "int"}]
    learn(tables, TOPICS[:1])
    assert "messages by a schema do not fit" in caplog.text
    assert set(columns(tmp_path, "t")) == {"f0", "day", "f2"}
    assert not tables.settings(tables.messages)[f"table:{tmp_path / 't'}"].obstacle
    registry.versions[TOPICS[0]].append({"f0": "int", "f1": "int"})
    learn(tables, TOPICS[:1])
    assert set(columns(tmp_path, "t")) == {"f0", "day", "f1", "f2"}


@pytest.mark.parametrize("query", [{}, {"sql": "select * from messages"}], ids=["fields", "query"])
def test_columns_of_all_versions_together_are_limited_and_a_version_beyond_is_a_misfit(
    tmp_path: Path,
    registry: Registry,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    query: dict[str, str],
) -> None:
    monkeypatch.setattr(record_columns, "COLUMNS_MOST", 25)
    registry.versions[TOPICS[0]] = [{"f0": "int"}]
    tables = started(tmp_path, registry, [{"path": "t", "shape": "record", **query}], TOPICS[:1])
    registry.versions[TOPICS[0]] += [
        {f"v{version}_{number}": "int" for number in range(10)} for version in range(6)
    ]
    learn(tables, TOPICS[:1])
    kept = {"f0", *(f"v{version}_{number}" for version in range(2) for number in range(10))}
    assert set(columns(tmp_path, "t")) == kept
    assert "columns together, more than the 25 of a table" in caplog.text
    registry.versions[TOPICS[0]].append({"f0": "int", "small": "int"})
    learn(tables, TOPICS[:1])
    assert set(columns(tmp_path, "t")) == {*kept, "small"}
    assert not tables.settings(tables.messages)[f"table:{tmp_path / 't'}"].obstacle


@pytest.mark.parametrize("query", [{}, {"sql": "select * from messages"}], ids=["fields", "query"])
def test_the_versions_that_fit_among_many_are_one_change_of_the_table_and_none_at_the_next_start(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch, query: dict[str, str]
) -> None:
    monkeypatch.setattr(record_columns, "COLUMNS_MOST", 55)
    registry.versions[TOPICS[0]] = [{"f0": "int"}]
    table = {"path": "t", "shape": "record", **query}
    tables = started(tmp_path, registry, [table], TOPICS[:1])
    changes: list[None] = []
    change = RecordTable._change

    def counted(*arguments: Any) -> None:
        changes.append(None)
        change(*arguments)

    monkeypatch.setattr(RecordTable, "_change", counted)
    # Every other one has more columns than fit.
    registry.versions[TOPICS[0]] += [
        {f"v{version}_{number}": "int" for number in range(100 if version % 2 else 2)}
        for version in range(20)
    ]
    learn(tables, TOPICS[:1])
    kept = {"f0", *(f"v{version}_{number}" for version in range(0, 20, 2) for number in range(2))}
    assert set(columns(tmp_path, "t")) == kept
    # A query's table also notes the columns that the query sees.
    assert len(changes) == (2 if query else 1)
    started(tmp_path, registry, [table], TOPICS[:1])
    assert len(changes) == (2 if query else 1)
    assert set(columns(tmp_path, "t")) == kept


@pytest.mark.parametrize("name", ["rejects", "messages", "checkpoint", "delayed"])
def test_a_topic_whose_table_would_share_a_folder_has_none(
    tmp_path: Path, registry: Registry, name: str
) -> None:
    topics = [f"persistent://public/default/{name}", TOPICS[0]]
    registry.versions[topics[0]] = []
    storage = {"storage": str(tmp_path / "delayed")}
    tables = started(tmp_path, registry, [{"path": "{topic}"}], topics, sections={"delay": storage})
    assert "would share a folder" in tables.settings([])[f"table:{tmp_path / name}"].obstacle
    assert [table.options.name for table in tables.of_topic(topics[0])] == ["messages"]
    assert tables.exists(f"table:{tmp_path / 'a'}")


NAMESPACES = ("public/eu", "public/us")
PATTERNS = (
    "a-.*",
    "b-.*",
    "persistent://public/eu/.*",
    "persistent://public/us/.*",
    "persistent://public/us/a-.*",
)
TEMPLATES = (
    "{topic}",
    "{namespace}/{topic}",
    "us/{topic}",
    "us/{namespace}",
    "fixed",
    "us/a-0",
    "{tenant}/{topic}",
)


@pytest.mark.parametrize("seed", range(60))
def test_driver_and_tasks_agree_which_tables_a_topic_has(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tables = [
        {"path": f"{tmp_path}/lake/{path}"}
        | ({"topics_pattern": pattern} if (pattern := rng.choice(PATTERNS)) else {})
        for path in rng.sample(TEMPLATES, rng.randint(1, 4))
    ]
    pool = [
        f"persistent://{namespace}/{name}-{number}"
        for namespace in NAMESPACES
        for name in "abc"
        for number in (0, 1)
    ]
    topics = rng.sample(pool, rng.randint(1, 6))
    opened = opened_tables(
        tmp_path, tables, {"source": {"service_url": "pulsar://h:1", "topics_pattern": "p/d/.*"}}
    )
    for some in (topics[:2], topics):
        opened.add_for_topics(some)
        opened.check(None)
        opened.create()
    taken = set()
    for topic in topics:
        ours = {table.options.name for table in opened.of_topic(topic)}
        taken |= ours
        settings = opened.settings(opened.of_topic(topic))
        client, batch = (
            ClientSettings("pulsar://h:1"),
            BatchSettings(0, settings, [], TopicSchemas()),
        )
        writers = TableWriters(
            opened.for_tasks, TopicPartition(topic, -1), client, batch, "part-00000000-00000"
        )
        misfits = writers.write(one_message(topic))
        assert {writer.table.name for writer in writers.with_rows} == ours
        if not opened.obstacles:
            assert misfits == []
    of_topics = [table.options for table in opened.messages if table.options.from_template]
    assert {options.name for options in of_topics} <= taken


def one_message(topic: str) -> pa.RecordBatch:
    row = {
        "topic": topic,
        "partition": -1,
        "ledger_id": 1,
        "entry_id": 0,
        "batch_index": -1,
        "publish_time": 1,
    }
    return pa.RecordBatch.from_pylist(
        [{**row, "value": b"1", "is_null": False, "late": False}], schema=MESSAGES
    )


def test_a_topic_whose_folder_another_of_the_tables_has_is_named(tmp_path: Path) -> None:
    tables = opened_tables(
        tmp_path, [{"path": f"{tmp_path}/{path}/{{topic}}"} for path in ("us", "{namespace}")]
    )
    tables.add_for_topics(["persistent://public/us/x"])
    assert [
        f"{{namespace}}/{{topic}} is that of [[tables]] {tmp_path}/us" in text
        for text in tables.obstacles
    ] == [True]


@pytest.mark.parametrize("shape", ["messages", "record"])
def test_a_topic_whose_table_would_be_that_of_another_program_has_none(
    tmp_path: Path, registry: Registry, shape: str
) -> None:
    DeltaTable.create(str(tmp_path / "b"), pa.schema([("other", pa.int32())]))
    registry.versions[TOPICS[0]] = [{"f0": "int"}]
    table = {"path": "{topic}", "shape": shape}
    for _ in range(2):
        tables = started(tmp_path, registry, [table])
        assert "b " in tables.settings([])[f"table:{tmp_path / 'b'}"].obstacle
        assert tables.exists(f"table:{tmp_path / 'a'}")
    with pytest.raises(TableError, match=r"b .*use another path"):
        started(tmp_path, registry, [{**table, "path": "b"}])


def commit_of_another_program(features: str, kind: str) -> str:
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": [features],
        "writerFeatures": [features],
    }
    fields = [{"name": "x", "type": kind, "nullable": True, "metadata": {}}]
    metadata = {
        "id": "1",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": [],
        "configuration": {},
    }
    return json.dumps({"protocol": protocol}) + "\n" + json.dumps({"metaData": metadata}) + "\n"


def put_log(folder: Path, commit: str) -> None:
    (folder / "_delta_log").mkdir(parents=True)
    (folder / "_delta_log" / f"{0:020}.json").write_text(commit)


def put_file_as_log(folder: Path) -> None:
    folder.mkdir()
    (folder / "_delta_log").write_text("x")


IN_THE_WAY = {
    "a file": lambda folder: folder.write_text("x"),
    "a link to nowhere": lambda folder: folder.symlink_to("/nowhere/x"),
    "a file in place of the log": put_file_as_log,
    "a damaged log": lambda folder: put_log(folder, "no json"),
    "an empty commit": lambda folder: put_log(folder, ""),
    "an unknown feature": lambda folder: put_log(
        folder, commit_of_another_program("newFeature", "long")
    ),
    "commits by a catalog": lambda folder: put_log(
        folder, commit_of_another_program("catalogManaged", "long")
    ),
    "an unknown type": lambda folder: put_log(
        folder, commit_of_another_program("timestampNtz", "geometry")
    ),
}


@pytest.mark.parametrize("writer", ["arrow", "auto"])
@pytest.mark.parametrize("what", IN_THE_WAY)
def test_whatever_is_in_the_folder_of_a_topics_table_stops_no_other_topic(
    tmp_path: Path, what: str, writer: str
) -> None:
    (tmp_path / "lake").mkdir()
    IN_THE_WAY[what](tmp_path / "lake/b")
    for check in (lambda tables: tables.check(None), Tables.examine):
        tables = opened_tables(tmp_path, [{"path": f"{tmp_path}/lake/{{topic}}"}], writer=writer)
        tables.add_for_topics(TOPICS)
        check(tables)
        assert "lake/b" in tables.settings([])[f"table:{tmp_path / 'lake/b'}"].obstacle
        assert f"table:{tmp_path / 'lake/a'}" in [
            table.options.name for table in tables.of_topic(TOPICS[0])
        ]
    with pytest.raises((TableError, SetupError), match="lake/b"):
        opened_tables(tmp_path, [{"path": f"{tmp_path}/lake/b"}], writer=writer)


@pytest.mark.parametrize("what", ["a file", "a damaged log", "an unknown feature"])
def test_a_table_of_the_stream_that_cannot_be_opened_ends_the_start(
    tmp_path: Path, what: str
) -> None:
    (tmp_path / "lake").mkdir()
    IN_THE_WAY[what](tmp_path / "lake/b")
    name = f"table:{tmp_path / 'lake/b'}"
    (tmp_path / "checkpoint/ledgerlake").mkdir(parents=True)
    Checkpoint(Place(str(tmp_path / "checkpoint"))).save_tables({name: str(tmp_path / "lake/b")})
    tables = opened_tables(tmp_path, [{"path": f"{tmp_path}/lake/{{topic}}"}])
    tables.add_for_topics(TOPICS)
    with pytest.raises(TableError, match="lake/b cannot be opened"):
        tables.check(None)


def test_a_folder_above_all_tables_of_topics_that_cannot_be_written_ends_the_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "lake").write_text("x")
    tables = opened_tables(tmp_path, [{"path": f"{tmp_path}/lake/{{topic}}"}])
    tables.add_for_topics(TOPICS)
    with pytest.raises(SetupError, match="lake/a cannot be made"):
        tables.check(None)


@pytest.mark.parametrize(("failures", "goes_on"), [(1, True), (10, False)])
def test_a_store_that_does_not_answer_leaves_out_no_topic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, goes_on: bool
) -> None:
    options = [{"path": f"{tmp_path}/lake/{{topic}}"}]
    tables = opened_tables(tmp_path, options)
    tables.add_for_topics(TOPICS)
    tables.check(None)
    tables.create()
    tables = opened_tables(tmp_path, options)
    left = [failures]

    def fails(*args: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EIO, "no answer")
        return open_delta(*args)

    tables.add_for_topics(TOPICS)
    monkeypatch.setattr(open_table, "open_delta", fails)
    if not goes_on:
        monkeypatch.setattr(Place, "filesystem", fails)
        with pytest.raises(TableAccessError, match="no answer"):
            tables.check(None)
        return
    tables.check(None)
    assert tables.exists(f"table:{tmp_path / 'lake/a'}")


def test_a_topic_of_a_table_with_a_schema_is_asked_for_again_after_it_was_created_again(
    tmp_path: Path, registry: Registry
) -> None:
    registry.versions[TOPICS[0]] = [{"f0": "int"}]
    tables = started(tmp_path, registry, [{"path": "t", "schema": "R"}])
    before = learn(tables).asked
    registry.versions[TOPICS[0]] = [{"f1": "int"}]
    assert learn(tables).asked != before != ""


def test_a_topic_that_comes_again_goes_on_in_its_table_unless_a_later_checkpoint_has_written_there(
    tmp_path: Path,
) -> None:
    def begun() -> Tables:
        tables = opened_tables(tmp_path, [{"path": f"{tmp_path}/lake/{{topic}}"}])
        tables.create()
        tables.begin()
        return tables

    def write(tables: Tables, checkpoint: int, batch_id: int, topic: str) -> None:
        span = {"start": {"ledger": 1, "entry": -1}, "end": {"ledger": 1, "entry": 4}}
        query = f"ledgerlake:orders:{checkpoint}"
        batch = BatchCommit("orders", query, batch_id, 1, {topic: span}, checkpoint=checkpoint)
        tables.add_for_topics([topic])
        tables.check(None)
        tables.open_for(batch)
        for table in tables.of_topic(topic):
            assert not table.table.contains(batch)
            table.table.commit(batch, [], {})

    first, second = "persistent://public/default/a", "persistent://public/default/b"
    earlier, later = begun(), begun()
    write(earlier, 3, 0, first)
    write(earlier, 3, 1, second)
    write(later, 4, 0, first)
    write(later, 4, 1, second)
    with pytest.raises(
        CheckpointError,
        match="b has rows of the stream orders by a later checkpoint, so this one is an",
    ):
        write(begun(), 3, 2, second)


def test_a_topic_partition_that_joins_in_a_run_is_late_by_the_time_that_its_table_has_for_it(
    tmp_path: Path,
) -> None:
    topic = "persistent://public/default/t"

    def begun(stream: str) -> Tables:
        section = {"stream": {"name": stream, "checkpoint": f"{tmp_path}/{stream}"}}
        tables = opened_tables(tmp_path, sections=section, fail_on_second_stream=False)
        tables.create()
        tables.begin()
        return tables

    def write(tables: Tables, stream: str, batch_id: int, time_us: int) -> dict[str, int]:
        """Return the times by which the rows of the micro-batch are late."""
        span = {
            "start": {"ledger": 1, "entry": batch_id - 1},
            "end": {"ledger": 1, "entry": batch_id},
        }
        batch = BatchCommit(stream, f"ledgerlake:{stream}:id", batch_id, 1, {topic: span})
        tables.open_for(batch)
        times_us = dict(tables.main.watermark_us)
        (tmp_path / "messages" / f"{stream}{batch_id}").write_bytes(b"rows")
        written = TableResult([DataFile(f"{stream}{batch_id}", 4, 1, "{}")], time_us)
        task = TaskResult(topic, -1, Position(1, batch_id), {"messages": written}, [])
        DeltaSink(tables).commit(batch, [PartitionResult(task, StateSummary([]))])
        return times_us

    first, second = begun("one"), begun("two")
    assert write(first, "one", 0, 3000) == {}
    assert write(second, "two", 0, 2000) == {topic: 3000}
    assert write(second, "two", 1, 4000) == {topic: 3000}
    assert write(second, "two", 2, 1000) == {topic: 4000}
    assert begun("two").main.table.effective_times_us([topic]) == {topic: 4000}


def test_tables_that_come_or_go_are_a_change(tmp_path: Path) -> None:
    def settings(*paths: str, **delta: Any) -> Any:
        tables = [{"path": str(tmp_path / path)} for path in paths]
        return row_settings(opened_tables(tmp_path, tables, **delta)._config)

    one = settings("a")
    assert changed(one, settings("a")) == []
    assert changed(one, settings("a", "b")) == ["[[tables]]"]
    assert changed(one, settings("b")) == ["[[tables]]"]
    assert changed(one, settings("a", path="")) == ["[[tables]]"]
    assert changed(settings("a", path=""), one) == ["[[tables]]"]


DELETED: dict[str, str] = {}


def test_a_version_that_comes_and_is_deleted_between_two_micro_batches_gets_its_columns(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Registry.answer

    def with_deletions(self: Registry, topic: str, version: bytes | None) -> Any:
        found = answer(self, topic, version)
        if found is None or self.versions[topic][int.from_bytes(found[0], "big")] == DELETED:
            return None
        return found

    monkeypatch.setattr(Registry, "answer", with_deletions)
    registry.versions[TOPICS[0]] = [{"a": "int"}, DELETED]
    tables = started(tmp_path, registry, [{"path": "t", "shape": "record"}])
    learn(tables)
    for name in ("b", "c"):
        registry.versions[TOPICS[0]] += [{name: "int"}, DELETED]
        learn(tables)
    assert {"a", "b", "c"} <= columns(tmp_path, "t").keys()
    registry.versions[TOPICS[0]] += [{"d": "int"}, DELETED]
    again = started(tmp_path, registry, [{"path": "t", "shape": "record"}])
    learn(again)
    assert "d" in columns(tmp_path, "t")
