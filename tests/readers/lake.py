"""Tables that the product's own code writes: entries are decoded, columns follow the schemas, tasks
write files, and the driver commits them.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any
from unittest import mock

import fastavro
import pyarrow as pa

from ledgerlake.client.cluster import ClientSettings
from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.operators import table_writer
from ledgerlake.operators.results import BatchSettings
from ledgerlake.operators.table_writer import TableWriters
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.pipeline.record_schemas import RecordSchemas
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.compaction import Compaction
from ledgerlake.table.open_table import open_delta
from ledgerlake.wire.value_schema import ValueSchema
from tests.entries import bundle, single
from tests.pipeline_tables import opened_tables

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ledgerlake.pipeline.tables import MessagesTable
    from ledgerlake.stored.places import Place
    from ledgerlake.table.ordered_files import DataFile
    from tests.readers.recipes import Fields, Message, Recipe

TOPIC = "persistent://public/default/a"
CLIENT = ClientSettings("pulsar://nowhere:1")


class _Registry:
    """The versions of the topic's schema that are registered by now."""

    settings = CLIENT

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.known = recipe.batches[0][0]

    def schemas(
        self, asked: Sequence[tuple[str, bytes | None]]
    ) -> list[tuple[bytes, ValueSchema] | None]:
        return [self._answer(*each) for each in asked]

    def schema(self, topic: str, version: bytes) -> ValueSchema | None:
        answer = self._answer(topic, version)
        return None if answer is None else answer[1]

    def _answer(self, topic: str, version: bytes | None) -> tuple[bytes, ValueSchema] | None:
        number = self.known - 1 if version is None else int.from_bytes(version, "big")
        if topic != TOPIC or not 0 <= number < self.known:
            return None
        fields = self._recipe.versions[number]
        kind = pb.Schema.Json if self._recipe.is_json else pb.Schema.Avro
        definition = json.dumps(_definition(fields)).encode()
        return _version(number), ValueSchema(kind, definition)


def _version(number: int) -> bytes:
    return number.to_bytes(8, "big")


def write(recipe: Recipe, folder: Path) -> Place:
    """Make the table of a recipe in a folder; return its place."""
    registry = _Registry(recipe)
    tables = opened_tables(folder, shape=recipe.shape, **recipe.options)
    schemas = RecordSchemas(registry, tables)  # type: ignore[arg-type]
    schemas.learn([TOPIC])
    tables.create()
    tables.begin()
    table = tables.main.table
    first = 0
    for number, (known, messages) in enumerate(recipe.batches):
        registry.known = known
        topics = schemas.learn([TOPIC], [TOPIC])
        settings = BatchSettings(number, {"messages": tables.main.settings()}, None, topics)
        files = _files(registry, tables.main, settings, _decoded(number, first, recipe, messages))
        record = BatchCommit("stream", "query", number, number)
        assert not table.contains(record)
        table.commit(record, files, {})
        first += len(messages)
    if recipe.is_merged:
        Compaction(table.path, None if recipe.shape == "record" else schema.MESSAGES).run()
    if recipe.has_checkpoint:
        open_delta(table.path).create_checkpoint()
    return table.path


def _files(
    registry: _Registry, table: MessagesTable, settings: BatchSettings, messages: pa.RecordBatch
) -> list[DataFile]:
    """Return the files that a task writes for messages."""

    def of_version(version: bytes) -> ValueSchema | None:
        return registry.schema(TOPIC, version)

    with mock.patch.object(table_writer, "schemas_of", return_value=of_version):
        prefix = f"part-{settings.batch_id:08}-00000"
        source = TopicPartition(TOPIC, -1)
        writers = TableWriters([table.options], source, CLIENT, settings, prefix)
        writers.write(messages)
        (writer,) = writers.writers
        return writer.finish(None).files


def _decoded(batch: int, first: int, recipe: Recipe, messages: Sequence[Message]) -> pa.RecordBatch:
    """Return messages as tasks decode them from entries of the broker."""
    entries = [_entry(recipe, first + number, message) for number, message in enumerate(messages)]
    parts = list(decode_bundle(bundle(entries, batch), TopicPartition(TOPIC, -1)))
    assert not any(part.rejects.num_rows for part in parts)
    rows = pa.Table.from_batches([part.messages for part in parts]).combine_chunks()
    (batch_of_rows,) = rows.select(schema.MESSAGES.names).to_batches()
    return batch_of_rows


def _entry(recipe: Recipe, number: int, message: Message) -> bytes:
    fields: dict[str, Any] = {
        "sequence_id": number,
        "schema_version": _version(message.version),
        "properties": [pb.KeyValue(key=key, value=value) for key, value in message.properties],
        "event_time": message.event_ms,
    }
    if message.key is not None:
        fields["partition_key"] = message.key
    if message.value is None:
        return single(b"", number, null_value=True, **fields)
    return single(_encoded(recipe, message), number, **fields)


def _encoded(recipe: Recipe, message: Message) -> bytes:
    assert message.value is not None
    if recipe.is_json:
        return json.dumps(message.value).encode()
    out = io.BytesIO()
    plain = _definition(recipe.versions[message.version], is_plain=True)
    fastavro.schemaless_writer(out, fastavro.parse_schema(plain), message.value)
    return out.getvalue()


def _definition(fields: Fields, *, is_plain: bool = False) -> dict[str, Any]:
    """Return Avro's schema; ``is_plain`` leaves out logical types, so that any number is
    written.
    """
    return {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": name, "type": ["null", _type(kind, name, is_plain)], "default": None}
            for name, kind in fields.items()
        ],
    }


def _type(kind: str, name: str, is_plain: bool) -> Any:
    if kind == "nested":
        at = {
            "name": "at",
            "type": ["null", _type("timestamp-micros", name, is_plain)],
            "default": None,
        }
        return {"type": "record", "name": f"N_{name}", "fields": [at]}
    if kind == "days":
        return {"type": "array", "items": _type("date", name, is_plain)}
    plain = {"date": "int"}.get(kind, "long" if "timestamp" in kind else kind)
    return plain if is_plain or plain == kind else {"type": plain, "logicalType": kind}
