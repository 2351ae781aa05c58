"""Schemas that change at random, under kills: the table of records against plain Python.

A history has topics whose schemas get versions, messages of any version, micro-batches, and kills
between any two steps of a micro-batch. After a kill, new objects go on, as a new process does. The
reference knows fields by name and nothing of Arrow or Delta.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ledgerlake.client.cluster import ClientSettings
from ledgerlake.decode import schema, weights
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.operators import table_writer
from ledgerlake.operators.results import BatchSettings, TableBatch, TopicSchemas
from ledgerlake.operators.table_writer import RowMaker, TableWriters
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.pipeline.record_schemas import RecordSchemas
from ledgerlake.source import value_schemas
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.layout import record_of
from ledgerlake.table.open_table import open_delta
from ledgerlake.values.record_rows import RECORD_COLUMN
from ledgerlake.wire.value_schema import ValueSchema
from tests.pipeline_tables import messages_table, opened_tables

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ledgerlake.pipeline.tables import MessagesTable

HISTORIES = 500 if os.environ.get("LEDGERLAKE_CAMPAIGN") == "long" else 12
TOPICS = ("persistent://public/default/a", "persistent://public/default/b")
KINDS = ("int", "long", "string", "double")
FIELDS = ("f0", "f1", "f2", "f3", "f4")

Fields = dict[str, str]


class _KilledError(Exception):
    pass


@dataclass
class Registry:
    """The broker's registry, as much of ``Cluster`` as is used."""

    versions: dict[str, list[Fields]] = field(
        default_factory=lambda: {topic: [] for topic in TOPICS}
    )
    settings: ClientSettings = field(default_factory=lambda: ClientSettings("pulsar://nowhere:1"))

    def schemas(
        self, asked: Sequence[tuple[str, bytes | None]]
    ) -> list[tuple[bytes, ValueSchema] | None]:
        return [self.answer(*each) for each in asked]

    def answer(self, topic: str, version: bytes | None) -> tuple[bytes, ValueSchema] | None:
        versions = self.versions[topic]
        number = len(versions) - 1 if version is None else int.from_bytes(version, "big")
        return (
            (version_of(number), schema_of(versions[number]))
            if 0 <= number < len(versions)
            else None
        )

    def schema(self, topic: str, version: bytes) -> ValueSchema | None:
        answer = self.answer(topic, version)
        return None if answer is None else answer[1]


def version_of(number: int) -> bytes:
    return number.to_bytes(8, "big")


def schema_of(fields: Fields) -> ValueSchema:
    definition = {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": name, "type": ["null", kind], "default": None} for name, kind in fields.items()
        ],
    }
    return ValueSchema(pb.Schema.Json, json.dumps(definition).encode())


@dataclass
class Reference:
    """What the table has to be: columns with the types of their first versions, and rows."""

    columns: Fields = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)

    def learn(self, fields: Fields) -> None:
        for name, kind in fields.items():
            self.columns.setdefault(name, kind)

    def write(self, number: int, value: dict[str, Any], fields: Fields) -> None:
        if all(self.fits(value[name], fields[name], self.columns[name]) for name in value):
            self.rows.append({"number": number, **value})
        else:
            self.rejected.append(number)

    @staticmethod
    def fits(value: Any, kind: str, column: str) -> bool:
        if value is None or kind == column:
            return True
        if "string" in (kind, column):
            return False
        if column == "int":
            return float(value).is_integer() and abs(value) < 2**31
        return column == "double" or float(value).is_integer()


class History:
    """The pipeline's objects over a folder; ``restart`` makes them anew, as after a kill."""

    def __init__(self, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(seed)
        self.registry, self.reference = Registry(), Reference()
        self.folder = folder
        self.path = Place(str(folder / "messages"))
        self.messages = 0
        self.batches = 0
        self.kills = 0
        monkeypatch.setattr(
            table_writer,
            "schemas_of",
            lambda _client, topic, _registered: lambda v: self.registry.schema(topic, v),
        )
        self.restart()

    def restart(self) -> None:
        self.tables = opened_tables(self.folder, shape="record")
        self.schemas = RecordSchemas(self.registry, self.tables)  # type: ignore[arg-type]
        self.learn(TOPICS)
        self.schemas.learn(TOPICS)
        self.tables.create()

    def learn(self, topics: Sequence[str]) -> None:
        """Have the reference know all versions of these topics, in the pipeline's order."""
        for topic in topics:
            for fields in self.registry.versions[topic]:
                self.reference.learn(fields)

    def play(self, steps: int) -> None:
        for _ in range(steps):
            if self.rng.random() < 0.4 or not any(self.registry.versions.values()):
                self.change_schema()
            else:
                self.batch()

    def change_schema(self) -> None:
        names = self.rng.sample(FIELDS, self.rng.randint(1, len(FIELDS)))
        self.registry.versions[self.rng.choice(TOPICS)].append(
            {name: self.rng.choice(KINDS) for name in names}
        )

    def batch(self) -> None:
        """A micro-batch, which is run again until no kill comes."""
        topics = [topic for topic in TOPICS if self.registry.versions[topic]]
        written = [self.message(self.rng.choice(topics)) for _ in range(self.rng.randint(1, 5))]
        while True:
            try:
                self.run(written)
                break
            except _KilledError:
                self.kills += 1
                if self.rng.random() < 0.3:
                    self.change_schema()
                self.restart()
        for _, version, fields, number, value in sorted(written, key=lambda each: each[0]):
            del version
            self.reference.write(number, value, fields)
        self.batches += 1

    def message(self, topic: str) -> tuple[str, int, Fields, int, dict[str, Any]]:
        version = self.rng.randrange(len(self.registry.versions[topic]))
        fields = self.registry.versions[topic][version]
        values: dict[str, list[Any]] = {
            "int": [0, -5, 2**31 - 1],
            "long": [7, 2**40],
            "string": ["x", ""],
            "double": [2.0, 0.5],
        }
        value = {
            name: None if self.rng.random() < 0.2 else self.rng.choice(values[kind])
            for name, kind in fields.items()
        }
        self.messages += 1
        return topic, version, fields, self.messages, value

    def run(self, written: Sequence[tuple[str, int, Fields, int, dict[str, Any]]]) -> None:
        topics = sorted({topic for topic, *_ in written})
        self.maybe_kill()
        self.learn(topics)
        settings = self.schemas.learn(topics, topics)
        self.maybe_kill()
        files = []
        table = self.tables.main
        batch = BatchSettings(self.batches, {"messages": table.settings()}, None, settings)
        for topic in topics:
            prefix = f"part-{self.batches:08}-00000"
            source = TopicPartition(topic, -1)
            writers = TableWriters([table.options], source, self.registry.settings, batch, prefix)
            messages = [
                {
                    "topic": topic,
                    "partition": -1,
                    "ledger_id": TOPICS.index(topic),
                    "entry_id": number,
                    "batch_index": -1,
                    "broker_timestamp": number * 1000,
                    "publish_time": number * 1000,
                    "schema_version": version_of(version),
                    "is_null": False,
                    "late": False,
                    "value": json.dumps(value).encode(),
                }
                for of_topic, version, _, number, value in written
                if of_topic == topic
            ]
            writers.write(pa.RecordBatch.from_pylist(messages, schema=schema.MESSAGES))
            (writer,) = writers.writers
            files += writer.finish(None).files
        self.maybe_kill()
        record = BatchCommit("stream", "query", self.batches, self.batches)
        if not table.table.contains(record):
            table.table.commit(record, files, {})
        self.maybe_kill()

    def maybe_kill(self) -> None:
        if self.rng.random() < 0.12:
            raise _KilledError

    def rows(self) -> list[dict[str, Any]]:
        table = open_delta(self.path).to_pyarrow_table()
        numbers = [row["entry_id"] for row in table["pulsar"].to_pylist()]
        rows = table.drop_columns(["pulsar"]).to_pylist()
        return [
            {"number": number, **{name: value for name, value in row.items() if value is not None}}
            for number, row in sorted(zip(numbers, rows, strict=True), key=lambda pair: pair[0])
        ]


def without_nulls(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    present = [{name: value for name, value in row.items() if value is not None} for row in rows]
    return sorted(present, key=lambda row: row["number"])


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_the_table_has_what_plain_python_says(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(seed, tmp_path, monkeypatch)
    history.play(25)
    assert history.rows() == without_nulls(history.reference.rows)
    columns = open_delta(history.path).schema().to_arrow()
    names = {"int": "integer", "long": "long", "string": "string", "double": "double"}
    actual = {
        each["name"]: each["type"]
        for each in json.loads(open_delta(history.path).schema().to_json())["fields"]
    }
    del actual["pulsar"], columns
    assert actual == {name: names[kind] for name, kind in history.reference.columns.items()}


def test_histories_have_kills_and_rejects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = SimpleNamespace(kills=0, rejected=0)
    for seed in range(5):
        (tmp_path / str(seed)).mkdir()
        history = History(seed, tmp_path / str(seed), monkeypatch)
        history.play(25)
        counts.kills += history.kills
        counts.rejected += len(history.reference.rejected)
    assert counts.kills > 5
    assert counts.rejected > 5


@pytest.fixture
def registry() -> Registry:
    return Registry()


def learned(registry: Registry, folder: Path) -> tuple[MessagesTable, RecordSchemas]:
    tables = opened_tables(folder, shape="record")
    return tables.main, RecordSchemas(registry, tables)  # type: ignore[arg-type]


def columns_of(table: MessagesTable) -> list[str]:
    record = record_of(table.table.schema)
    assert record is not None
    return [each.name for each in record]


def test_a_topic_that_is_created_again_has_its_new_columns_and_tasks_ask_again(
    registry: Registry, tmp_path: Path
) -> None:
    table, schemas = learned(registry, tmp_path)
    registry.versions[TOPICS[0]] = [{"a": "string"}]
    before = schemas.learn(TOPICS)
    registry.versions[TOPICS[0]] = [{"b": "string"}]
    after = schemas.learn(TOPICS)
    assert columns_of(table) == ["a", "b"]
    assert before.asked != after.asked
    registry.versions[TOPICS[0]] = [{"c": "string"}, {"d": "string"}, {"e": "string"}]
    schemas.learn(TOPICS)
    assert columns_of(table) == ["a", "b", "c", "d", "e"]


def test_topics_without_a_schema_are_asked_for_at_once(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    answers = registry.schemas

    def schemas(
        asked: Sequence[tuple[str, bytes | None]],
    ) -> list[tuple[bytes, ValueSchema] | None]:
        rounds.append(len(asked))
        return answers(asked)

    monkeypatch.setattr(registry, "schemas", schemas)
    _, learner = learned(registry, tmp_path)
    for _ in range(2):
        learner.learn(TOPICS, TOPICS)
    assert rounds == 2 * [len(TOPICS), 2 * len(TOPICS)]


def test_versions_before_a_deletion_have_columns(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, schemas = learned(registry, tmp_path)
    registry.versions[TOPICS[0]] = [{"a": "string"}, {"b": "int"}]
    answer = registry.answer
    monkeypatch.setattr(
        registry,
        "answer",
        lambda topic, version: None if version is None else answer(topic, version),
    )
    schemas.learn(TOPICS[:1], TOPICS[:1])
    assert columns_of(table) == ["a", "b", "value"]


def test_a_version_far_away_is_not_counted_up_to(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, schemas = learned(registry, tmp_path)
    asked: list[int] = []

    def answer(_topic: str, version: bytes | None) -> tuple[bytes, ValueSchema] | None:
        asked.append(0)
        return (bytes([255] * 8), schema_of({"a": "int"})) if version is None else None

    monkeypatch.setattr(registry, "answer", answer)
    schemas.learn(TOPICS[:1])
    assert columns_of(table) == ["a"]
    assert len(asked) <= 1001


def test_rows_of_many_columns_are_converted_in_parts(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A row has 448 bytes in the columns, a record and two fields, and its value 1,200 as a dict at
    # most.
    monkeypatch.setattr(weights, "MAX_VALUES_BYTES", 4000)
    monkeypatch.setattr(
        table_writer, "schemas_of", lambda *_: lambda _version: schema_of({"a": "int", "b": "int"})
    )
    record = pa.struct([("a", pa.int32()), ("b", pa.int32())])
    schemas = TopicSchemas.of({TOPICS[0]: (bytes(8), schema_of({"a": "int", "b": "int"}))})
    batch_settings = BatchSettings(
        0, {"messages": TableBatch.of({}, record, record)}, None, schemas
    )
    options = messages_table(tmp_path, shape="record")
    rows = RowMaker(options, TOPICS[0], registry.settings, batch_settings)
    message = {"topic": TOPICS[0], "ledger_id": 1, "schema_version": bytes(8)}
    batch = pa.RecordBatch.from_pylist(
        [message | {"entry_id": number, "value": b'{"a": %d}' % number} for number in range(7)],
        schema=schema.MESSAGES,
    )
    parts = [made.rows for made in rows.of(batch)]
    assert [part.num_rows for part in parts] == [2, 2, 2, 1]
    assert [row["a"] for part in parts for row in part[RECORD_COLUMN].to_pylist()] == list(range(7))


def test_a_version_that_the_registry_lacks_for_a_while_is_asked_for_once_in_each_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([None, schema_of({"a": "int"})])
    monkeypatch.setattr(
        value_schemas,
        "shared_cluster",
        lambda _client: SimpleNamespace(
            schema=lambda *_: next(answers), schemas=lambda _asked: [None]
        ),
    )
    client, version = ClientSettings("pulsar://nowhere:2"), bytes(7) + b"\x01"
    for batch, expected in (("1", None), ("2", schema_of({"a": "int"}))):
        for _ in range(3):
            assert value_schemas.schemas_of(client, "t", batch)(version) == expected


def test_a_topic_that_was_created_again_is_decoded_by_none_of_its_former_schemas(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    def schema(topic: str, version: bytes) -> ValueSchema | None:
        asked.append(version)
        return registry.schema(topic, version)

    monkeypatch.setattr(
        value_schemas, "shared_cluster", lambda _client: SimpleNamespace(schema=schema)
    )
    client, topic = ClientSettings("pulsar://nowhere:2"), TOPICS[0]
    newest = {"b": "int", "a": "int"}
    for first in ({"a": "int"}, {"c": "int"}):
        registry.versions[topic] = [first, newest]
        micro_batch = TopicSchemas.of({topic: (version_of(1), schema_of(newest))})
        # Tasks of a micro-batch in one process, and a read that has none.
        for batch in (micro_batch.asked, micro_batch.asked, ""):
            of_version = value_schemas.schemas_of(client, topic, batch)
            for _ in range(3):
                assert of_version(version_of(0)) == schema_of(first)
    assert len(asked) == 4


@pytest.mark.parametrize("has_newest", [True, False])
def test_versions_that_were_never_registered_do_not_cost_a_request_each(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, has_newest: bool
) -> None:
    client, topic = ClientSettings("pulsar://nowhere:2"), TOPICS[0]
    registry.versions[topic] = [{"a": "int"}] * 10
    asked: list[bytes | None] = []

    def schema(topic: str, version: bytes) -> ValueSchema | None:
        asked.append(version)
        return registry.schema(topic, version)

    def schemas(asked_for: list[tuple[str, None]]) -> list[tuple[bytes, ValueSchema] | None]:
        asked.append(None)
        return [(version_of(9), schema_of({"a": "int"})) if has_newest else None for _ in asked_for]

    cluster = SimpleNamespace(schema=schema, schemas=schemas)
    monkeypatch.setattr(value_schemas, "shared_cluster", lambda _client: cluster)
    of_version = value_schemas.schemas_of(client, topic)
    assert [of_version(version_of(1000 + number)) for number in range(50)] == [None] * 50
    assert all(of_version(version_of(number)) for number in range(10))
    assert len(asked) == (12 if has_newest else 61)


@pytest.mark.parametrize("version", [b"\x01", bytes(7), bytes(9), b"\xff" * 8, b"a" * 1000])
def test_the_broker_is_not_asked_for_what_can_be_no_version(
    monkeypatch: pytest.MonkeyPatch, version: bytes
) -> None:
    monkeypatch.setattr(
        value_schemas, "shared_cluster", lambda _client: pytest.fail("the broker was asked")
    )
    assert value_schemas.schemas_of(ClientSettings("pulsar://nowhere:2"), "t")(version) is None
