"""The Delta sink: each task writes files from its bundles, the driver commits both tables exactly once.

Order of a micro-batch, each step safe to repeat after a kill at any point:

    1. tasks decode and write Parquet files that no table knows; what a killed task leaves is an orphan for VACUUM
    2. commit ``rejects``     with (query, batch id); skipped where that batch is in already
    3. commit ``messages``    likewise, with how far each topic partition's time has come
    4. move the durable cursors

The plan is run once per batch and also on a replay, since stateful stages must see every batch; only commits are skipped.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledgerlake.client.topics import partition_name
from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.sinks.ordered import DataFile, FileWriter, OrderedWriter
from ledgerlake.sinks.tables import Table, data_folder
from ledgerlake.source.partition_reader import check_broker_metadata
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

FACT_SCHEMA = "fact string"


@dataclass(frozen=True)
class TaskSettings:
    """What a writing task needs to know; pickled with the plan."""

    messages_path: str
    rejects_path: str
    batch_id: int
    floors_us: dict[str, int]
    require_broker_metadata: bool
    max_uncompressed_bytes: int


@dataclass(frozen=True)
class TaskFact:
    """What a task did for one topic partition: its files, and how far it read."""

    topic: str
    partition: int
    end_ledger_id: int
    end_entry_id: int
    max_effective_us: int | None
    messages: list[DataFile]
    rejects: list[DataFile]

    @property
    def topic_partition(self) -> str:
        return self.topic if self.partition < 0 else partition_name(self.topic, self.partition)


@dataclass
class BatchResult:
    """What a micro-batch brought; ``repeated`` where the table had it already."""

    batch_id: int
    messages: int = 0
    rejects: int = 0
    repeated: bool = False
    ends: dict[str, Position] = field(default_factory=dict)


class DeltaSink:
    """Writes micro-batches of bundles into the two tables."""

    def __init__(
        self, messages_path: str, rejects_path: str, *, require_broker_metadata: bool, max_uncompressed_bytes: int
    ) -> None:
        self.messages = Table(messages_path, schema.MESSAGES)
        self.rejects = Table(rejects_path, schema.REJECTS)
        self._require_broker_metadata = require_broker_metadata
        self._max_uncompressed_bytes = max_uncompressed_bytes
        self._floors_us: dict[str, int] = {}

    def load_floors(self, topic_partitions: list[str]) -> None:
        """Recall how far each topic partition's time has come in the table."""
        self._floors_us = self.messages.effective_times_us(topic_partitions)

    def write(self, bundles: DataFrame, query: str, batch_id: int) -> BatchResult:
        """Run the batch's plan and commit what it wrote.

        Raises:
            TableError: a commit did not land; the batch is not counted as done.
        """
        settings = TaskSettings(
            self.messages.path,
            self.rejects.path,
            batch_id,
            self._floors_us,
            self._require_broker_metadata,
            self._max_uncompressed_bytes,
        )
        written = bundles.mapInArrow(lambda batches: write_task(batches, settings), FACT_SCHEMA).collect()
        facts = [_fact_from_json(row.fact) for row in written]
        return self._commit(query, batch_id, facts)

    def _commit(self, query: str, batch_id: int, facts: list[TaskFact]) -> BatchResult:
        rejects = [file for fact in facts for file in fact.rejects]
        messages = [file for fact in facts for file in fact.messages]
        times_us = {fact.topic_partition: fact.max_effective_us for fact in facts if fact.max_effective_us is not None}
        later_us = {name: max(time_us, self._floors_us.get(name, time_us)) for name, time_us in times_us.items()}
        result = BatchResult(batch_id, sum(file.rows for file in messages), sum(file.rows for file in rejects))
        if rejects:
            result.repeated = not self.rejects.commit(query, batch_id, rejects, {})
        if messages:
            result.repeated = not self.messages.commit(query, batch_id, messages, later_us)
        if not result.repeated:
            self._floors_us |= later_us
        result.ends = {fact.topic_partition: Position(fact.end_ledger_id, fact.end_entry_id) for fact in facts}
        return result


def write_task(batches: Iterator[pa.RecordBatch], settings: TaskSettings) -> Iterator[pa.RecordBatch]:
    """One task: bundles in, files out, one fact per topic partition."""
    writers: dict[TopicPartition, _PartitionWriter] = {}
    for batch in batches:
        for row in range(batch.num_rows):
            source = TopicPartition(batch["topic"][row].as_py(), batch["partition"][row].as_py())
            writer = writers.get(source)
            if writer is None:
                writer = writers[source] = _PartitionWriter(source, settings)
            writer.take(batch, row)
    facts = [_fact_to_json(writer.finish()) for writer in writers.values()]
    yield pa.RecordBatch.from_arrays([pa.array(facts, pa.string())], names=["fact"])


class _PartitionWriter:
    """Both tables' files for one topic partition in one task."""

    def __init__(self, source: TopicPartition, settings: TaskSettings) -> None:
        self._source = source
        self._settings = settings
        prefix = f"part-{settings.batch_id:08d}-{max(source.partition, 0):05d}"
        name = source.topic if source.partition < 0 else partition_name(source.topic, source.partition)
        self._messages = OrderedWriter(
            data_folder(settings.messages_path, schema.MESSAGES, prefix), settings.floors_us.get(name)
        )
        self._rejects = FileWriter(data_folder(settings.rejects_path, schema.REJECTS, prefix))
        self._end = Position(-1, -1)

    def take(self, batch: pa.RecordBatch, row: int) -> None:
        self._end = Position(batch["end_ledger_id"][row].as_py(), batch["end_entry_id"][row].as_py())
        decoded_parts = decode_bundle(
            batch["frames"][row].as_buffer(),
            self._source,
            after_batch_index=batch["after_batch_index"][row].as_py(),
            max_bytes=self._settings.max_uncompressed_bytes,
        )
        for decoded in decoded_parts:
            check_broker_metadata(self._settings.require_broker_metadata, decoded, self._source)
            self._messages.write(decoded.messages.select(schema.MESSAGES.names))
            if decoded.rejects.num_rows:
                self._rejects.write(pa.Table.from_batches([decoded.rejects]))

    def finish(self) -> TaskFact:
        messages = self._messages.finish()
        return TaskFact(
            self._source.topic,
            self._source.partition,
            self._end.ledger_id,
            self._end.entry_id,
            self._messages.max_effective_us,
            messages,
            self._rejects.finish(),
        )


def _fact_to_json(fact: TaskFact) -> str:
    return json.dumps(asdict(fact))


def _fact_from_json(text: str) -> TaskFact:
    data: dict[str, Any] = json.loads(text)
    data["messages"] = [DataFile(**one) for one in data["messages"]]
    data["rejects"] = [DataFile(**one) for one in data["rejects"]]
    return TaskFact(**data)
