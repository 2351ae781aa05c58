"""The format ``ledgerlake``: reading (see ``source``), and writing rows as messages (see
``topic_writer``).
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

from ledgerlake.errors import UsageError
from ledgerlake.options.sink_options import SinkOptions, parse_sink_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.publish.planned_batch import newest_planned
from ledgerlake.publish.topic_writer import TopicSettings, TopicWriter, check_columns
from ledgerlake.source.datasource import ReadingDataSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from ledgerlake.publish.planned_batch import PlannedBatch

_CODECS = {"none": pb.NONE, "lz4": pb.LZ4, "zlib": pb.ZLIB, "zstd": pb.ZSTD, "snappy": pb.SNAPPY}


class LedgerlakeDataSource(ReadingDataSource):
    """``format("ledgerlake")``."""

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        options = parse_sink_options(self.options)
        if options.txn_version is not None:
            raise UsageError(
                "'txnVersion' is for df.write; leave it out: a query numbers its micro-batches"
            )
        # Spark calls this for each micro-batch, after it has planned it.
        return _StreamWrite(
            _checked(options, schema), newest_planned(self.options.get("checkpointLocation"))
        )

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        if overwrite:
            raise UsageError("a topic cannot be overwritten; write with mode append")
        options = parse_sink_options(self.options)
        return _BatchWrite(_checked(options, schema), options.txn_version)


def topic_settings(options: SinkOptions) -> TopicSettings:
    """Return the writers' settings by these options."""
    return TopicSettings(
        options.connection,
        options.full_topic,
        options.batching_max_messages if options.batching_enabled else 1,
        options.batching_max_bytes,
        _CODECS[options.compression_type],
        options.producer_name or "",
    )


def _checked(options: SinkOptions, schema: StructType) -> TopicSettings:
    settings = topic_settings(options)
    check_columns(
        {field.name: field.dataType.simpleString() for field in schema.fields}, settings.topic
    )
    return settings


@dataclass
class StoredMessages(WriterCommitMessage):  # type: ignore[misc]
    """The number of messages that a task has stored."""

    messages: int


class _StreamWrite(DataSourceStreamArrowWriter):  # type: ignore[misc]
    def __init__(self, settings: TopicSettings, planned: PlannedBatch | None) -> None:
        self._settings = settings
        self._planned = planned

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StoredMessages:
        task = TaskContext.get()
        name = (
            self._settings.producer_name
            or f"ledgerlake-{task.getLocalProperty('sql.streaming.queryId')}"
        )
        batch_id = int(task.getLocalProperty("streaming.sql.batchId"))
        planned = self._planned
        plan_number = (
            planned.plan_number if planned is not None and planned.batch_id == batch_id else None
        )
        return _write(
            self._settings, f"{name}-{task.partitionId()}", batch_id, plan_number, iterator
        )

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: everything is stored already."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Leave the messages that are stored; they are not stored again when the micro-batch is run
        again.
        """


class _BatchWrite(DataSourceArrowWriter):  # type: ignore[misc]
    """A write that is not part of a streaming query. Spark may retry its tasks. With a version, the
    write may be run again too: it has the names and sequence ids that a micro-batch of that number
    has. Without one, each write has names of its own: two writes under one name and number would
    be taken for a repeat, and the second one lost.
    """

    def __init__(self, settings: TopicSettings, version: int | None) -> None:
        self._settings = settings
        self._version = version or 0
        self._name = settings.producer_name or "ledgerlake"
        if version is None:
            self._name += f"-{uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StoredMessages:
        name = f"{self._name}-{TaskContext.get().partitionId()}"
        return _write(self._settings, name, self._version, None, iterator)


def _write(
    settings: TopicSettings,
    producer_name: str,
    batch_id: int,
    plan_number: int | None,
    rows: Iterator[pa.RecordBatch],
) -> StoredMessages:
    writer = TopicWriter(settings, producer_name, batch_id, plan_number)
    try:
        for batch in rows:
            writer.write(batch)
        writer.flush()
    finally:
        writer.close()
    return StoredMessages(writer.messages)
