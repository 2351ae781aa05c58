"""verify of tables with the latest messages that the pipeline's own writers have made: which table
takes a message is decided as there, and what another stream has done to a table is no loss.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from ledgerlake.client.topics import split_partition
from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.decode.split import split_bundle
from ledgerlake.operators.results import BatchSettings
from ledgerlake.operators.table_writer import TableWriters
from ledgerlake.options.config import parse_config
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.record_schemas import RecordSchemas
from ledgerlake.pipeline.tables import Tables
from ledgerlake.source import value_schemas
from ledgerlake.source.pieces import Piece
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.verify import topic_content
from ledgerlake.verify import verify as verify_module
from ledgerlake.verify.verify import Verdict, verify
from ledgerlake.wire import commands
from ledgerlake.wire.message_id import Position
from tests.entries import BROKER_TIME_MS, single
from tests.model.test_record_model import Registry, version_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ledgerlake.client.cluster import Cluster

KEYS = "abcdef"
# Conditions that a message may meet by its key, by its value, with one only, or without one too.
CONDITIONS = (
    "",
    "key < 'c'",
    "octet_length(value) > 2",
    "is_null or key > 'c'",
    "coalesce(octet_length(value), 9) > 2",
)


class Stream:
    """A stream of one topic, which writes as the pipeline's tasks and its driver do."""

    def __init__(
        self,
        folder: Path,
        name: str,
        delta: dict[str, Any],
        *tables: dict[str, Any],
        begins: bool = True,
    ) -> None:
        self.topic = f"persistent://public/default/{name}"
        self.config = parse_config(
            {
                "source": {"service_url": "pulsar://nowhere:1", "topics": [self.topic]},
                "stream": {"name": name, "checkpoint": str(folder / name)},
                "delta": {"rejects_path": str(folder / f"rejects-{name}"), **delta},
                "tables": list(tables),
            }
        )
        self.frames: list[bytes] = []
        self.versions: list[dict[str, str]] = []
        registry = Registry({self.topic: self.versions})
        self.cluster = SimpleNamespace(
            settings=registry.settings,
            schema=registry.schema,
            schemas=registry.schemas,
            close=lambda: None,
        )
        self._batches = 0
        if begins:
            self._begin(folder)

    def _begin(self, folder: Path) -> None:
        self.tables = Tables(self.config, Place(str(folder / "staging")))
        self.tables.add_for_topics([self.topic])
        self.tables.check(None)
        self._schemas = RecordSchemas(cast("Cluster", self.cluster), self.tables)
        self._schemas.learn([self.topic])
        self.tables.create()
        self.tables.begin_stream([self.topic])

    @property
    def latest(self) -> list[str]:
        """The paths of the tables with the latest messages."""
        return [
            table.options.place.uri for table in self.tables.messages if table.options.keeps_latest
        ]

    @property
    def paths(self) -> list[str]:
        return [table.options.place.uri for table in self.tables.messages]

    def write(self, *sent: tuple[str | None, bytes | None], version: int | None = None) -> None:
        """Write a micro-batch of keys and values, of a version of the schema or of none."""
        first = len(self.frames)
        for key, value in sent:
            fields: dict[str, Any] = {} if key is None else {"partition_key": key}
            if version is not None:
                fields["schema_version"] = version_of(version)
            if value is None:
                fields["null_value"] = True
            number = len(self.frames)
            entry = single(value or b"", number, **fields)
            self.frames.append(commands.message(1, 7, number, entry))
        source = TopicPartition(*split_partition(self.topic))
        schemas = self._schemas.learn([self.topic], [self.topic])
        self.tables.create()
        batch = BatchSettings(
            self._batches, self.tables.settings(self.tables.messages), [], schemas
        )
        writers = TableWriters(
            self.tables.for_tasks,
            source,
            self.config.source.client,
            batch,
            f"part-{self._batches:08}-00000",
        )
        for decoded in decode_bundle(b"".join(self.frames[first:]), source):
            messages = decoded.messages.select(schema.MESSAGES.names)
            places = messages.select(
                ["topic", "partition", "ledger_id", "entry_id", "message_id"]
            ).to_pylist()
            rejects = [
                {**places[misfit.row], "reason": misfit.reason, "detail": misfit.detail}
                for misfit in writers.write(messages)
            ]
            write_deltalake(
                self.config.rejects_place.uri,
                pa.Table.from_pylist(rejects, schema=schema.REJECTS),
                mode="append",
            )
        record = BatchCommit(self.config.stream.name, self.topic, self._batches, self._batches)
        for writer in writers.with_rows:
            table = self.tables.by_name[writer.table.name]
            assert not table.contains(record)
            table.commit(record, writer.finish(None).files, {})
        self._batches += 1

    def verify(self, monkeypatch: pytest.MonkeyPatch) -> Verdict:
        last = len(self.frames) - 1
        end = PartitionOffset(Position(7, last), None, BROKER_TIME_MS + last, last)
        monkeypatch.setattr(verify_module, "Cluster", lambda _: self.cluster)
        monkeypatch.setattr(Checkpoint, "committed_range", lambda _: ({}, {self.topic: end}))
        monkeypatch.setattr(topic_content, "read_pieces", self._pieces)
        return verify(self.config)

    def _pieces(self, *_: Any) -> Iterator[Piece]:
        for kind, piece, broker_ms in split_bundle(b"".join(self.frames)):
            yield Piece(kind, piece, broker_ms=broker_ms)


def some_messages(rng: random.Random) -> list[tuple[str | None, bytes | None]]:
    return [
        (rng.choice([*KEYS, *KEYS, None]), rng.choice([None, b"", b"v", b"value", b"other"]))
        for _ in range(rng.randint(1, 12))
    ]


def keys_in(path: str) -> list[str]:
    return sorted(column(path, "key"))


def entries_in(path: str) -> list[int]:
    return column(path, "entry_id")


def column(path: str, name: str) -> list[Any]:
    found = QueryBuilder().register("t", DeltaTable(path)).execute(f"select {name} from t")
    values: list[Any] = pa.table(found)[name].to_pylist()
    return values


@pytest.mark.parametrize("seed", range(12))
def test_tables_that_the_pipeline_has_written_are_right_and_each_lost_key_is_missing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    stream = Stream(
        tmp_path,
        "s",
        {"path": str(tmp_path / "rest"), "mode": "latest"},
        *(
            {
                "path": f"{tmp_path}/t{number}",
                "mode": rng.choice(["append", "latest"]),
                "where": rng.choice(CONDITIONS[1:]),
            }
            for number in range(rng.randint(1, 2))
        ),
    )
    for _ in range(3):
        stream.write(*some_messages(rng))
    verdict = stream.verify(monkeypatch)
    assert (verdict.missing, verdict.outdated, verdict.undecided) == (0, 0, 0)
    assert verdict.clean
    lost = 0
    for path in stream.latest:
        keys = keys_in(path)
        if keys:
            DeltaTable(path).delete(f"key = '{rng.choice(keys)}'")
            lost += 1
            assert stream.verify(monkeypatch).missing == lost


def test_rows_without_a_key_that_another_program_has_added_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "latest")
    stream = Stream(tmp_path, "s", {"path": path, "mode": "latest"})
    stream.write(("a", b"1"), ("b", b"2"))
    before = stream.verify(monkeypatch)
    copied = QueryBuilder().register("t", DeltaTable(path)).execute("select * from t")
    rows = pa.table(copied).cast(schema.MESSAGES)
    place = rows.schema.get_field_index("key")
    keyless = rows.set_column(place, "key", pa.nulls(2, pa.string()))
    write_deltalake(path, keyless, mode="append")
    assert stream.verify(monkeypatch) == before


@pytest.mark.parametrize("seed", range(6))
def test_a_message_that_is_lost_from_the_one_other_table_that_took_it_is_missing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    modes = ["latest", rng.choice(["append", "latest"])]
    stream = Stream(
        tmp_path,
        "s",
        {"path": str(tmp_path / "rest")},
        *(
            {"path": f"{tmp_path}/t{number}", "mode": mode, "where": rng.choice(CONDITIONS[1:])}
            for number, mode in enumerate(modes)
        ),
    )
    deletions = [(rng.choice(KEYS), None) for _ in range(3)]
    for _ in range(3):
        stream.write(*some_messages(rng), *deletions)
    assert stream.verify(monkeypatch).clean
    others = {path for path in stream.paths if path not in stream.latest}
    entries = {path: entries_in(path) for path in others}
    for number, path in enumerate(sorted(path for path in others if entries[path]), 1):
        elsewhere = {entry for other in others - {path} for entry in entries[other]}
        entry = rng.choice(sorted(set(entries[path]) - elsewhere))
        DeltaTable(path).delete(f"entry_id = {entry}")
        assert stream.verify(monkeypatch).missing == number


@pytest.mark.parametrize("seed", range(8))
def test_a_table_that_two_streams_share_is_right_by_either_of_them(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    shared = {"path": str(tmp_path / "shared"), "mode": "latest"}
    streams = [Stream(tmp_path, name, shared) for name in ("one", "two")]
    for stream in streams:
        stream.write(("a", b"first"))
    for _ in range(6):
        rng.choice(streams).write(*some_messages(rng))
    streams[1].write(("a", None))
    for stream in streams:
        verdict = stream.verify(monkeypatch)
        assert (verdict.missing, verdict.outdated, verdict.clean) == (0, 0, True)
    # What either of them may have deleted is a loss to none of them.
    assert streams[0].verify(monkeypatch).undecided >= 1


FIELDS = {"mode": ["append", "latest"], "shape": ["messages", "record"]}
# A condition over the fields of the values, over what all messages have, or none.
BY_VALUE = {"record": ["f0 > 3", "pulsar.key > 'b'", ""], "messages": ["key > 'b'", ""]}


def some_table(rng: random.Random, path: str) -> dict[str, Any]:
    table: dict[str, Any] = {name: rng.choice(values) for name, values in FIELDS.items()}
    table["where"] = rng.choice(BY_VALUE[table["shape"]])
    if table["shape"] == "record":
        table["json_fields"] = {"f0": "long"}
    return {**table, "path": path}


def write_some_values(rng: random.Random, stream: Stream) -> None:
    versions = len(stream.versions)
    values = [None, b"", *(b'{"f0": %d}' % number for number in range(8)), b'{"f1": 1}', b"text"]
    sent = [(rng.choice(KEYS), rng.choice(values)) for _ in range(rng.randint(1, 8))]
    stream.write(*sent, version=rng.choice([None, *range(versions)]))


@pytest.mark.parametrize("seed", range(12))
def test_rows_that_were_made_by_other_schemas_than_those_of_today_are_right(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    tables = [some_table(rng, f"{tmp_path}/t{number}") for number in range(rng.randint(1, 2))]
    default = some_table(rng, str(tmp_path / "rest"))
    del default["where"]
    stream = Stream(tmp_path, "s", default if rng.random() < 0.7 else {}, *tables)
    monkeypatch.setattr(value_schemas, "shared_cluster", lambda _: stream.cluster)
    write_some_values(rng, stream)
    for fields in ({"f1": "string"}, {"f0": "long"}):
        stream.versions.append(fields)
        verdict = stream.verify(monkeypatch)
        assert verdict.clean, verdict.sentence()
        write_some_values(rng, stream)
        verdict = stream.verify(monkeypatch)
        assert verdict.clean, verdict.sentence()
    stream.versions.pop()
    verdict = stream.verify(monkeypatch)
    assert verdict.clean, verdict.sentence()


def test_a_later_schema_hides_no_lost_key_of_a_table_that_takes_all_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest = {"path": str(tmp_path / "latest"), "mode": "latest", "shape": "record"}
    stream = Stream(tmp_path, "s", latest)
    monkeypatch.setattr(value_schemas, "shared_cluster", lambda _: stream.cluster)
    stream.write(*((key, b"no record") for key in KEYS))
    stream.versions.append({"f0": "long"})
    verdict = stream.verify(monkeypatch)
    assert (verdict.clean, verdict.undecided) == (True, 0)
    DeltaTable(latest["path"]).delete("pulsar.key = 'a'")
    assert stream.verify(monkeypatch).missing == 1


def test_a_table_that_was_configured_and_has_not_begun_has_taken_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = {"path": str(tmp_path / "rest"), "mode": "latest"}
    stream = Stream(tmp_path, "s", default, {"path": f"{tmp_path}/b", "where": "key = 'b'"})
    stream.write(*((key, b"v") for key in KEYS))
    later = Stream(
        tmp_path,
        "s",
        default,
        {"path": f"{tmp_path}/b", "where": "key = 'b'"},
        {"path": f"{tmp_path}/a", "where": "key = 'a'"},
        begins=False,
    )
    later.frames = stream.frames
    assert later.verify(monkeypatch).clean
