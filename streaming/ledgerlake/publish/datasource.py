"""The format ``ledgerlake`` whole: reading (see ``source``), and writing rows as messages (see ``topic_writer``).

| option for writing | meaning | default |
|---|---|---|
| ``service.url``, ``pulsar.client.*``, ``retryTimeoutMs`` | as for reading | |
| ``topic`` | where rows go that name no topic | none |
| ``pulsar.producer.producerName`` | begins the name of every producer; the same for every run of a query, and its alone | the query's id |
| ``pulsar.producer.batchingEnabled`` | several messages to an entry | ``true`` |
| ``pulsar.producer.batchingMaxMessages`` | at most so many | 1000 |
| ``pulsar.producer.batchingMaxBytes`` | at most so many bytes of payload, keys and properties | 131072 |
| ``pulsar.producer.compressionType`` | ``none``, ``lz4``, ``zlib``, ``zstd`` or ``snappy`` | ``none`` |
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from ledgerlake.client.topics import full_name
from ledgerlake.errors import UsageError
from ledgerlake.options.source_options import CLIENT_OPTIONS, client_settings, flag, positive, spelled
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.publish.topic_writer import TopicSettings, TopicWriter, check_columns
from ledgerlake.source.datasource import ReadingDataSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql.types import StructType

_NAMES = (
    *CLIENT_OPTIONS,
    "topic",
    "pulsar.producer.producerName",
    "pulsar.producer.batchingEnabled",
    "pulsar.producer.batchingMaxMessages",
    "pulsar.producer.batchingMaxBytes",
    "pulsar.producer.compressionType",
)

# Spark adds these to every sink by itself.
_SPARKS_OWN = frozenset({"path", "checkpointlocation"})

_CODECS = {"none": pb.NONE, "lz4": pb.LZ4, "zlib": pb.ZLIB, "zstd": pb.ZSTD, "snappy": pb.SNAPPY}


class LedgerlakeDataSource(ReadingDataSource):
    """``format("ledgerlake")``."""

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return _StreamWriter(_checked(self.options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        if overwrite:
            raise UsageError("a topic cannot be overwritten; write with mode append")
        return _BatchWriter(_checked(self.options, schema), uuid.uuid4().hex)


def parse_topic_options(given: Mapping[str, str]) -> TopicSettings:
    """Check what the user wrote.

    Raises:
        UsageError: an unknown or missing option, or a value that it cannot have; the message names it.
    """
    ours = ((name, value) for name, value in given.items() if name.lower() not in _SPARKS_OWN)
    values = spelled(ours, _NAMES, "sink")
    codec = values.get("pulsar.producer.compressionType", "none").strip().lower()
    if codec not in _CODECS:
        raise UsageError(
            f"the option 'pulsar.producer.compressionType' cannot be '{codec}'; it is {', '.join(_CODECS)}"
        )
    batches = flag(values, "pulsar.producer.batchingEnabled", default=True)
    defaults = TopicSettings(client_settings(values))
    return TopicSettings(
        defaults.client,
        full_name(values["topic"]) if values.get("topic") else None,
        (positive(values, "pulsar.producer.batchingMaxMessages") or defaults.batch_messages) if batches else 1,
        positive(values, "pulsar.producer.batchingMaxBytes") or defaults.batch_bytes,
        _CODECS[codec],
        values.get("pulsar.producer.producerName") or "",
    )


def _checked(given: Mapping[str, str], schema: StructType) -> TopicSettings:
    settings = parse_topic_options(given)
    check_columns({one.name: one.dataType.simpleString() for one in schema.fields}, settings.topic)
    return settings


@dataclass
class Written(WriterCommitMessage):  # type: ignore[misc]
    """How many messages a task has stored."""

    messages: int


class _StreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc]
    def __init__(self, settings: TopicSettings) -> None:
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        task = TaskContext.get()
        name = self._settings.producer_name or f"ledgerlake-{task.getLocalProperty('sql.streaming.queryId')}"
        batch_id = int(task.getLocalProperty("streaming.sql.batchId"))
        return _write(self._settings, f"{name}-{task.partitionId()}", batch_id, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Everything is stored already."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """What is stored stays, and is not stored again when the micro-batch is run again."""


class _BatchWriter(DataSourceArrowWriter):  # type: ignore[misc]
    """A write that is not part of a query; its tasks may be tried again, the whole of it is a new one each time."""

    def __init__(self, settings: TopicSettings, write_id: str) -> None:
        self._settings = settings
        self._write_id = write_id

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        name = self._settings.producer_name or "ledgerlake"
        return _write(self._settings, f"{name}-{self._write_id}-{TaskContext.get().partitionId()}", 0, iterator)


def _write(settings: TopicSettings, producer_name: str, batch_id: int, rows: Iterator[pa.RecordBatch]) -> Written:
    writer = TopicWriter(settings, producer_name, batch_id)
    try:
        for batch in rows:
            writer.write(batch)
        writer.flush()
    finally:
        writer.close()
    return Written(writer.messages)
