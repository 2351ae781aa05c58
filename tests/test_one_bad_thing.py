"""One bad thing, then good ones: the good ones come, and nothing ends.

A producer may write anything into an entry, a property, a schedule, a marker, a topic's name or a
schema. It becomes rows or rejects; the stream, the tables and the topic of due messages go on. Each
seed is one bad thing, with something good before it and after it:

    entries    mutated entries of all kinds, through the simulated pipeline with its topic of due
               messages
    schemas    mutated versions of a topic's schema and values by them, through the tables of
               records
    names      topics of any name, with tables by topic and folders of delayed messages
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.decode.rejects import reject_rows
from ledgerlake.operators import table_writer
from ledgerlake.operators.bucket_folders import open_folder
from ledgerlake.operators.partition_writer import misfit_rejects
from ledgerlake.operators.results import BatchSettings
from ledgerlake.operators.table_writer import TableWriters
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.pipeline.record_schemas import RecordSchemas
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.open_table import open_delta
from ledgerlake.wire.chunks import encode_chunks, encode_marker, promise
from ledgerlake.wire.entry import encode_batch, encode_entry, index_count
from ledgerlake.wire.schedules import (
    CANCEL_PROPERTY,
    CRON_PROPERTY,
    EVERY_PROPERTY,
    EXPIRES_PROPERTY,
    JITTER_PROPERTY,
    PAUSE_PROPERTY,
    RESUME_PROPERTY,
    SCHEDULE_PROPERTY,
    SENDER_PROPERTIES,
)
from ledgerlake.wire.value_schema import ValueSchema
from tests.fuzz import mutate
from tests.fuzz.seeds import an_entry, take_apart
from tests.model.test_record_model import Registry, version_of
from tests.pipeline_tables import opened_tables
from tests.simulation.by_hand import by_hand, put
from tests.simulation.driver import Application, Edges
from tests.simulation.history import Features, History, Script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ledgerlake.wire.message_id import Position
    from tests.simulation.broker import Topic

IS_LONG = os.environ.get("LEDGERLAKE_CAMPAIGN") == "long"
COUNT = 3000 if IS_LONG else 12
TOPIC = "persistent://public/default/a"

# What a property of ours may be, beside what fits nowhere.
TEXTS = (
    "all", "schedule=a", "key=a", "id=7:0", "PT1S", "PT0.001S", "P1M", "R2/PT1S", "R/2026-01-01T00:00:00Z/PT1S", "1",
    "* * * * *", "*/1 * * * * *", "0 0 30 2 *", "Europe/Berlin", "../../etc/passwd", "UTC", "last", "none", "a" * 201,
    "2027-01-15T08:00:05Z", "1800000004000", "P99999999999Y", "PT" + "9" * 400 + "S", "0 0 * * MON#5", "a\x1b[2J",
)  # fmt: skip
NAMES = (*SENDER_PROPERTIES, CANCEL_PROPERTY, "ledgerlake.occurrence", "ledgerlake.chunks", "own")


def _text(rng: random.Random) -> str:
    return mutate.text(rng, rng.choice(TEXTS)).encode(errors="replace").decode()


class OneBad(History):
    """A history with a bad thing. Each run that ends, with or without an error, is a violation."""

    def __init__(self, script: Script, edges: Edges) -> None:
        super().__init__(script, edges)
        self.bad: list[bytes] = []
        self.rng = random.Random(script.seed)
        self._for_good_alone("_take_row", lambda _topic, row: row["value"])
        self._for_good_alone("_take_copy", lambda row: row["value"])
        self._for_good_alone("published", lambda payload, _properties: payload)
        edges.due.stored = self.oracle.published

    def _for_good_alone(self, name: str, payload_of: Callable[..., bytes]) -> None:
        """Have the oracle see nothing of bad messages that became rows."""
        judge = getattr(self.oracle, name)

        def judge_good(*arguments: Any) -> None:
            if payload_of(*arguments) in self.oracle.sent:
                judge(*arguments)

        setattr(self.oracle, name, judge_good)

    def _metadata(self, **fields: Any) -> pb.MessageMetadata:
        """Good messages have a producer of their own: the name and the uuid of a large message are
        all that its chunks have in common.
        """
        return super()._metadata(**{"producer_name": "good"} | fields)

    def _check_end(self, app: Application) -> None:
        """Incomplete messages, which wait for their chunks, keep the cursor back."""
        if app.is_running:
            self.oracle.complain("a stop by signal does not end the pipeline")

    def _judge(self, app: Application) -> None:
        self.oracle.complain(
            f"nothing ends: {app.process.name} ended with {app.mistake or app.ended}"
        )

    def _send_bad(self, topic: Topic) -> None:
        for written in self._bad_entries(topic):
            parts = take_apart(written)
            # A broker without metadata removes what a producer has put there.
            is_stripped = parts is not None and not self.script.has_metadata
            entry = replace(parts, broker=None).put_together() if parts and is_stripped else written
            self.bad.append(entry)
            try:
                count = max(1, index_count(memoryview(entry)))
            except Exception:  # the broker takes what it cannot read for one message
                count = 1
            self.brokers.append(topic, entry, min(count, 1000))

    def _bad_entries(self, topic: Topic) -> list[bytes]:
        kind = self.rng.choice(
            ["mutated", "mutated", "field", "property", "property", "batch", "large", "large"]
        )
        entries: list[bytes] = getattr(self, f"_{kind}")(topic)
        return entries

    def _mutated(self, _topic: Topic) -> list[bytes]:
        return [an_entry(self.rng) for _ in range(self.rng.randint(1, 3))]

    def _soon_ms(self) -> int:
        return self.brokers.clock_ms + self.rng.choice([-5, 1, 1500, 4000])

    def _field(self, _topic: Topic) -> list[bytes]:
        """Metadata with a few fields that have other values."""
        metadata = self._metadata(
            producer_name="q", partition_key="a", event_time=5, deliver_at_time=self._soon_ms()
        )
        parts = take_apart(encode_entry(metadata, b"bad"))
        assert parts is not None
        return [replace(parts, metadata=mutate.message(self.rng, parts.metadata)).put_together()]

    def _properties(self) -> list[pb.KeyValue]:
        rng = self.rng
        names = rng.sample(NAMES, rng.randint(1, 4))
        if rng.random() < 0.7:
            # Most others have a meaning beside these alone.
            names += [
                SCHEDULE_PROPERTY,
                rng.choice([EVERY_PROPERTY, CRON_PROPERTY, EXPIRES_PROPERTY, JITTER_PROPERTY]),
            ]
        return [
            pb.KeyValue(key=name, value=rng.choice(TEXTS) if rng.random() < 0.8 else _text(rng))
            for name in names
            if name not in (PAUSE_PROPERTY, RESUME_PROPERTY) or rng.random() < 0.5
        ]

    def _property(self, _topic: Topic) -> list[bytes]:
        metadata = self._metadata(producer_name="q", properties=self._properties())
        if self.rng.random() < 0.8:
            metadata.deliver_at_time = self._soon_ms()
        return [encode_entry(metadata, b"bad")]

    def _batch(self, _topic: Topic) -> list[bytes]:
        singles = [
            (
                pb.SingleMessageMetadata(
                    payload_size=0, properties=self._properties(), event_time=5
                ),
                b"bad",
            )
            for _ in range(self.rng.randint(1, 3))
        ]
        plain = encode_batch(singles)
        if self.rng.random() < 0.3:
            plain = mutate.some_bytes(self.rng, plain)
        metadata = self._metadata(
            producer_name="q", num_messages_in_batch=len(singles), uncompressed_size=len(plain)
        )
        if self.rng.random() < 0.5:
            metadata.deliver_at_time = self._soon_ms()
        return [encode_entry(metadata, plain)]

    def _large(self, topic: Topic) -> list[bytes]:
        """Chunks with one that is missing, double, changed or late, and a marker that says another
        thing.
        """
        rng = self.rng
        metadata = self._metadata(producer_name="q", properties=[promise()], uncompressed_size=30)
        if rng.random() < 0.5:
            metadata.deliver_at_time = self._soon_ms()
        if rng.random() < 0.3:
            metadata.properties.extend(self._properties())
        chunks = [*encode_chunks(metadata, b"bad" * 10, 10)]
        rng.shuffle(chunks)
        if rng.random() < 0.3:
            chunks[rng.randrange(3)] = an_entry(rng, tuple(chunks))
        positions: list[Position] = [self.brokers.append(topic, chunk, 1) for chunk in chunks]
        if rng.random() < 0.3:
            rng.shuffle(positions)
        if rng.random() < 0.5:
            metadata.ClearField("deliver_at_time")
        if rng.random() < 0.5:
            metadata.deliver_at_time = self._soon_ms()
        if rng.random() < 0.3:
            metadata.properties.extend(self._properties())
        marker = encode_marker(metadata, 9, positions)
        return [an_entry(rng, (marker,)) if rng.random() < 0.3 else marker]


@pytest.fixture
def edges() -> Iterator[Edges]:
    with Edges() as entered:
        yield entered


@pytest.mark.parametrize("seed", range(COUNT))
def test_good_messages_come_after_a_bad_entry(edges: Edges, seed: int) -> None:
    goods = ("plain", "batch", "delayed", "chunked", "schedule")
    good = [put(at_s, kind) for at_s in (1.0, 2.4, 4.0) for kind in goods]
    bad = [put(2.0, "bad"), put(random.Random(seed).choice([2.2, 3.0]), "bad")]
    script = by_hand(*sorted([*good, *bad], key=lambda step: step.at_s), has_metadata=seed % 4 != 3)
    features = Features(has_tables=seed % 3 == 1)
    script = replace(script, seed=seed, delivers=True, duration_s=6.0, features=features)
    history = OneBad(script, edges)
    verdict = history.play()
    assert verdict.violations == [], [entry.hex() for entry in history.bad]
    assert history.bad


@dataclass
class AnyRegistry(Registry):
    """The broker's registry with schemas of any content."""

    schemas_of_topic: list[ValueSchema] = field(default_factory=list)

    def answer(self, topic: str, version: bytes | None) -> tuple[bytes, ValueSchema] | None:
        known = self.schemas_of_topic
        number = len(known) - 1 if version is None else int.from_bytes(version, "big")
        return (version_of(number), known[number]) if 0 <= number < len(known) else None


def record(kind: int, *fields: tuple[str, Any]) -> ValueSchema:
    definition = {
        "type": "record",
        "name": "R",
        "fields": [{"name": name, "type": of} for name, of in fields],
    }
    return ValueSchema(kind, json.dumps(definition).encode())


def a_type(rng: random.Random, depth: int) -> Any:
    """A type of Avro, perhaps one that no column can hold."""
    if depth <= 0 or rng.random() < 0.3:
        simple = [
            "int",
            "long",
            "string",
            "bytes",
            "double",
            "boolean",
            "null",
            "R",
            "what",
            "\ud800",
            5,
            None,
            {},
            [],
        ]
        return rng.choice(simple)
    inner = a_type(rng, depth - 1)
    name = f"N{rng.randrange(10)}_{depth}"
    return rng.choice(
        [
            ["null", inner],
            [inner, "null", "int"],
            {"type": "array", "items": inner},
            {"type": "map", "values": inner},
            {"type": "record", "name": name, "fields": [{"name": a_name(rng), "type": inner}]},
            {"type": "enum", "name": name, "symbols": ["a", "a\0", "b" * rng.choice([1, 2000])]},
            {"type": "fixed", "name": name, "size": rng.choice([0, 1, -1, 2**70, "x"])},
            {
                "type": "bytes",
                "logicalType": "decimal",
                "precision": rng.choice([0, 5, 38, 39]),
                "scale": mutate.edge(rng),
            },
            {
                "type": "long",
                "logicalType": rng.choice(
                    ["timestamp-millis", "local-timestamp-micros", "date", "what"]
                ),
            },
        ]
    )


def a_name(rng: random.Random) -> str:
    """A field's name: one with a meaning in the table, its options or its query, or any text."""
    known = [
        "x",
        "X",
        "s",
        "day",
        "pulsar",
        "value",
        "y",
        "messages",
        "record",
        "_change_type",
        "a\0",
        "a b",
        "\ud800",
        "",
        'q"',
    ]
    return rng.choice(known) if rng.random() < 0.7 else mutate.text(rng, rng.choice(known))


def a_bad_schema(rng: random.Random) -> ValueSchema:
    others = pb.Schema.Type.values()
    kind = rng.choice([pb.Schema.Avro, pb.Schema.Avro, pb.Schema.Json, pb.Schema.Json, *others, 99])
    depth = rng.choice([1, 3, 8, 60])
    fields = [(a_name(rng), a_type(rng, depth)) for _ in range(rng.choice([0, 1, 2, 200]))]
    definition = record(kind, ("x", "int"), *fields).definition
    if rng.random() < 0.3:
        definition = mutate.json_text(rng, definition.decode()).encode(errors="replace")
    elif rng.random() < 0.2:
        definition = mutate.some_bytes(rng, definition)
    parts = [
        ("key.schema.type", "STRING"),
        ("value.schema.type", rng.choice(["AVRO", "JSON", "KEY_VALUE", "x"])),
    ]
    properties = parts if rng.random() < 0.5 else []
    if kind == pb.Schema.KeyAndValue:
        definition = mutate.packed(b"", definition)
    return ValueSchema(kind, definition, tuple(properties))


def messages_of(topic: str, count: int) -> pa.RecordBatch:
    """Rows of good messages."""
    columns = {
        "topic": topic,
        "partition": -1,
        "ledger_id": 1,
        "batch_index": -1,
        "schema_version": version_of(0),
    }
    columns |= {"is_null": False, "late": False, "value": b'{"x": 1}', "publish_time": 1000}
    rows = [
        {**columns, "entry_id": number, "broker_timestamp": number * 1000}
        for number in range(count)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=schema.MESSAGES)


class SchemaPlay:
    """A pipeline's tables of records over a folder, without Spark; ``restart`` makes its objects
    anew.
    """

    def __init__(self, folder: Path, options: dict[str, Any], registry: AnyRegistry) -> None:
        self.folder, self.options, self.registry = folder, options, registry
        self.batches = 0
        self.misfits: list[str] = []
        self.restart()

    def restart(self) -> None:
        self.tables = opened_tables(self.folder, shape="record", **self.options)
        self.tables.add_for_topics([TOPIC])
        self.tables.check(None)
        self.schemas = RecordSchemas(self.registry, self.tables)  # type: ignore[arg-type]
        self.schemas.learn([TOPIC])
        self.tables.create()

    def batch(self, *messages: tuple[int | None, bytes | None]) -> None:
        """Write messages, each by a version or by none, whose numbers are their entry ids."""
        settings = self.schemas.learn([TOPIC], [TOPIC])
        self.tables.create()
        table = self.tables.main
        batch = BatchSettings(self.batches, self.tables.settings([table]), None, settings)
        source = TopicPartition(TOPIC, -1)
        writers = TableWriters(
            [table.options], source, self.registry.settings, batch, f"part-{self.batches:08}-00000"
        )
        rows = [
            {
                "topic": TOPIC,
                "partition": -1,
                "ledger_id": self.batches,
                "entry_id": number,
                "batch_index": -1,
                "broker_timestamp": (self.batches * 1000 + number) * 1000,
                "publish_time": 1000,
                "schema_version": None if version is None else version_of(version),
                "is_null": value is None,
                "late": False,
                "value": value,
            }
            for number, (version, value) in enumerate(messages)
        ]
        batch_rows = pa.RecordBatch.from_pylist(rows, schema=schema.MESSAGES)
        misfits = writers.write(batch_rows)
        if misfits:
            rejects = reject_rows(misfit_rejects(batch_rows, misfits), source)
            write_deltalake(self.folder / "rejects of misfits", rejects, mode="append")
            self.misfits += [misfit.detail for misfit in misfits]
        (writer,) = writers.writers
        files = writer.finish(None).files
        commit = BatchCommit("stream", "query", self.batches, self.batches)
        assert not table.table.contains(commit)
        table.table.commit(commit, files, {})
        self.batches += 1

    def details(self) -> list[str]:
        """Return the details of the rejects in their table."""
        place = Place(str(self.folder / "rejects of misfits"))
        return open_delta(place).to_pyarrow_table()["detail"].to_pylist()

    def rows(self) -> list[tuple[int, int]]:
        table = open_delta(self.tables.main.table.path).to_pyarrow_table()
        return [(row["ledger_id"], row["entry_id"]) for row in table["pulsar"].to_pylist()]


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"partition_by": ["x"]},
    {"partition_by": ["x % 2 as day"]},
    {"sql": "select *, x + 1 as y from messages"},
    {"sql": "select x, s from messages"},
    {"cluster_by": ["x"]},
)


@pytest.mark.parametrize("seed", range(COUNT))
def test_good_messages_come_after_a_bad_schema(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    registry = AnyRegistry()
    monkeypatch.setattr(
        table_writer,
        "schemas_of",
        lambda _client, topic, _registered: lambda version: registry.schema(topic, version),
    )
    good = b'{"x": 1, "s": "a"}'
    registry.schemas_of_topic = [record(pb.Schema.Json, ("x", "int"), ("s", "string"))]
    play = SchemaPlay(tmp_path, rng.choice(OPTIONS), registry)
    play.batch((0, good))
    for _ in range(2):
        registry.schemas_of_topic.append(a_bad_schema(rng))
        bad = len(registry.schemas_of_topic) - 1
        values = [
            mutate.json_text(rng, good.decode()).encode(errors="replace"),
            rng.randbytes(9),
            b"",
            None,
            good,
        ]
        play.batch(
            (0, good),
            *((bad, value) for value in values),
            (None, rng.choice(values)),
            (99, good),
            (0, good),
        )
        play.restart()
    registry.schemas_of_topic.append(
        record(pb.Schema.Json, ("x", "int"), ("s", "string"), ("added_later", "long"))
    )
    play.batch(
        (bad + 1, b'{"x": 1, "s": "a", "added_later": 5}'), (0, good), (bad, good), (None, good)
    )
    assert sorted(play.details()) == sorted(play.misfits)
    found = set(play.rows())
    assert {(0, 0), (1, 0), (1, 8), (2, 0), (2, 8), (3, 0), (3, 1), (3, 3)} <= found
    if play.options.get("sql") != "select x, s from messages":
        table = open_delta(play.tables.main.table.path).to_pyarrow_table()
        assert 5 in table["added_later"].to_pylist()


def a_topic(rng: random.Random) -> str:
    """A topic of any name that a broker takes, in a namespace of any name."""
    alphabet = rng.choice(
        ["abc", "a.-_~", "\u00fc\u00e9\u4e2d", "a%2F=:*?'\"\\|<>", "\x01\x1b\x7f", "A\u0130"]
    )
    known = [
        ".",
        "..",
        "_delta_log",
        "rejects",
        "messages",
        "checkpoint",
        "foreign",
        "con",
        "a" * 255,
        "\u00fc" * 127,
        "{topic}",
    ]
    name = (
        rng.choice(known)
        if rng.random() < 0.5
        else "".join(rng.choices(alphabet, k=rng.choice([1, 5, 200, 255])))
    )
    return f"persistent://{rng.choice(['public', 'public', 'p.q', 'a' * 255])}/default/{name}"


@pytest.mark.parametrize("seed", range(COUNT))
def test_good_messages_come_after_a_topic_of_any_name(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    # Another program's table stands where the table of a topic would be.
    foreign = DeltaTable.create(str(tmp_path / "foreign"), pa.schema([("other", pa.int32())]))
    path = rng.choice(["{topic}", "lake/{tenant}/{namespace}/{topic}", "lake/x-{topic}"])
    shape = rng.choice(["messages", "record"])
    topics = [f"{TOPIC}-good", a_topic(rng), a_topic(rng), f"{TOPIC}-good-too"]
    registry = AnyRegistry()
    registry.schemas_of_topic = [record(pb.Schema.Json, ("x", "int"))]
    monkeypatch.setattr(
        table_writer,
        "schemas_of",
        lambda _client, topic, _registered: lambda version: registry.schema(topic, version),
    )
    tables = opened_tables(tmp_path, [{"path": str(tmp_path / path), "shape": shape}])
    schemas = RecordSchemas(registry, tables)  # type: ignore[arg-type]
    for number, topic in enumerate(topics):
        known = topics[: number + 1]
        tables.add_for_topics(known)
        tables.check(None)
        settings = schemas.learn(known, known)
        tables.create()
        batch = BatchSettings(number, tables.settings(tables.messages), None, settings)
        source = TopicPartition(topic, -1)
        writers = TableWriters(
            tables.for_tasks, source, registry.settings, batch, f"part-{number:08}-00000"
        )
        misfits = writers.write(messages_of(topic, 3))
        for writer in writers.with_rows:
            table = tables.by_name[writer.table.name]
            commit = BatchCommit("stream", "query", number, number)
            assert not table.contains(commit)
            table.commit(commit, writer.finish(None).files, {})
        storage = open_folder(Place(str(tmp_path / "delayed")), source, "query", {})
        storage.start()
        bucket_id = storage.create_bucket()
        storage.save_all_segments(bucket_id, [(1, b"1"), (0, b"0")])
        assert storage.get_segment(bucket_id, 1) == b"1"
        if topic in (topics[0], topics[-1]):
            assert not misfits
            (of_topic,) = (writer for writer in writers.with_rows if writer.table.from_template)
            assert (
                open_delta(tables.by_name[of_topic.table.name].path).to_pyarrow_table().num_rows
                == 3
            )
        else:
            assert len(misfits) == 3 or writers.with_rows
    assert foreign.version() == DeltaTable(str(tmp_path / "foreign")).version()
