"""The results that tasks send to the driver of a micro-batch, and the settings that the driver
sends to the tasks; nothing of it is stored.
"""

from __future__ import annotations

import base64
import json
import secrets
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledgerlake.assembly.rules import Limits
from ledgerlake.client.topics import join_partition
from ledgerlake.operators.outcome_digest import OutcomeDigest
from ledgerlake.operators.stage_rows import (
    Released,
    StateSummary,
)
from ledgerlake.stored.fields import fields_of, stored
from ledgerlake.table.ordered_files import DataFile
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ledgerlake.decode.messages import TopicPartition
    from ledgerlake.options.delay_options import DelayOptions
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.options.table_options import TableOptions
    from ledgerlake.stored.places import Place
    from ledgerlake.wire.value_schema import ValueSchema


# A row has the results of one topic partition or of several, as JSON.
RESULT_SCHEMA = "result string"

# The local property of a job by which the driver sends ``BatchSettings`` to the tasks.
BATCH_PROPERTY = "ledgerlake.batch"


@dataclass(frozen=True)
class StageSettings:
    """The settings of the tasks and of the stateful stage; the same for all micro-batches."""

    limits: Limits
    delay: DelayOptions
    options: SourceOptions


@dataclass(frozen=True)
class TaskSettings(StageSettings):
    """The settings of a pipeline, whose tasks write. ``outbox``: see ``publish.outbox``.
    ``stops_at_misfits``: a message that does not fit a table ends the stream, and is not rejected.
    """

    tables: tuple[TableOptions, ...]
    rejects_folder: Place
    outbox: Place | None = None
    stops_at_misfits: bool = False

    def with_delivery(self, beginning: str | None) -> TaskSettings:
        """Return the settings with the beginning of the delivery (see ``DelayOptions``)."""
        return replace(self, delay=replace(self.delay, republish=beginning))


@dataclass(frozen=True)
class TopicSchemas:
    """What the registry has of the topics of a micro-batch.

    ``newest_versions`` has the newest version of each topic's schema, in hexadecimal; none of a
    topic without one. ``asked`` is a text that is new each time when the registry is asked: by it,
    tasks ask again for versions of a topic, which may have been created again.
    """

    newest_versions: dict[str, str] = field(default_factory=dict)
    asked: str = ""

    @classmethod
    def of(cls, newest: Mapping[str, tuple[bytes, ValueSchema]]) -> TopicSchemas:
        versions = {topic: version.hex() for topic, (version, _) in newest.items()}
        return cls(versions, secrets.token_hex(8))

    def newest_version(self, topic: str) -> bytes | None:
        """Return the newest version of a topic's schema; None if it has none."""
        version = self.newest_versions.get(topic)
        return None if version is None else bytes.fromhex(version)


@dataclass(frozen=True)
class TableBatch:
    """The values of a table that a micro-batch's tasks need.

    ``watermark_us`` is the greatest time in the table by topic partition. ``record`` has the
    columns into which values are decoded, and ``columns`` those that the table has beside
    ``pulsar``, or beside the columns of messages: both as Arrow serializes a schema, in base64.
    ``section`` is what the configuration calls it, and ``obstacle`` says why it takes no rows,
    empty if it does.
    """

    watermark_us: dict[str, int] = field(default_factory=dict)
    record: str = ""
    columns: str = ""
    section: str = ""
    obstacle: str = ""

    @classmethod
    def of(
        cls, watermark_us: dict[str, int], record: pa.StructType, columns: pa.StructType
    ) -> TableBatch:
        return cls(watermark_us, _to_text(record), _to_text(columns))

    @cached_property
    def record_type(self) -> pa.StructType:
        """Return the columns into which values are decoded."""
        return _from_text(self.record)

    @cached_property
    def columns_type(self) -> pa.StructType:
        """Return the columns of the table beside the others."""
        return _from_text(self.columns)


def _to_text(columns: pa.StructType) -> str:
    return (
        base64.b64encode(pa.schema(list(columns)).serialize()).decode()
        if columns.num_fields
        else ""
    )


def _from_text(text: str) -> pa.StructType:
    return pa.struct(list(pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) if text else ()))


@dataclass(frozen=True)
class BatchSettings:
    """The settings that differ from micro-batch to micro-batch.

    ``tables`` has the values of the known tables by name. ``with_state`` are the topic partitions
    with incomplete or delayed messages in state; None if they are not known.
    """

    batch_id: int
    tables: dict[str, TableBatch] = field(default_factory=dict)
    with_state: list[str] | None = None
    schemas: TopicSchemas = field(default_factory=TopicSchemas)

    @classmethod
    def of_this_task(cls) -> BatchSettings:
        from pyspark import TaskContext

        return _batch_settings(TaskContext.get().getLocalProperty(BATCH_PROPERTY))

    def table(self, name: str) -> TableBatch:
        """Return the values of a table; the defaults if the micro-batch does not know the table."""
        return self.tables.get(name) or TableBatch()

    def may_have_state(self, topic_partition: TopicPartition) -> bool:
        """Return whether a topic partition may have messages in state."""
        return (
            self._with_state is None
            or join_partition(*astuple(topic_partition)) in self._with_state
        )

    @cached_property
    def _with_state(self) -> frozenset[str] | None:
        return None if self.with_state is None else frozenset(self.with_state)


@lru_cache(maxsize=1)
def _batch_settings(text: str) -> BatchSettings:
    """Read the settings of a micro-batch, once in a process: they grow with its topic partitions,
    and so do its tasks.
    """
    fields = json.loads(text)
    tables = {name: TableBatch(**table) for name, table in fields["tables"].items()}
    return BatchSettings(
        **{**fields, "tables": tables, "schemas": TopicSchemas(**fields["schemas"])}
    )


@dataclass(frozen=True)
class TableResult:
    """The files that were written for a table, and the greatest time among their messages (see
    ``table.ordered_files``).
    """

    files: list[DataFile] = field(default_factory=list)
    max_effective_us: int | None = None


@dataclass(frozen=True)
class TaskResult:
    """The result of a task, or of all tasks of a batch together, for one topic partition.

    ``end`` is the last position that was read. ``tables`` has the written files by the tables'
    names, and ``reasons`` the number of rejects by reason. ``stored_bytes`` counts the bytes from
    the topic. ``digest`` is the digest of the outcome.
    """

    topic: str
    partition: int
    end: Position
    tables: dict[str, TableResult]
    rejects: list[DataFile]
    reasons: dict[str, int] = field(default_factory=dict)
    stored_bytes: int = 0
    digest: OutcomeDigest = field(default_factory=OutcomeDigest)


@dataclass(frozen=True)
class PartitionResult:
    """The result of a batch for one topic partition.

    ``written`` is the result of all its tasks together; ``replaced`` are files by table that were
    merged into others; ``outbox`` are the files for the topic of due messages; ``released`` tells
    when the delayed messages were due that were delivered.
    """

    written: TaskResult
    summary: StateSummary
    replaced: dict[str, list[str]] = field(default_factory=dict)
    outbox: list[DataFile] = field(default_factory=list)
    released: Released = field(default_factory=Released)

    @property
    def topic_partition(self) -> str:
        return join_partition(self.written.topic, self.written.partition)

    @property
    def safe_to_acknowledge(self) -> Position:
        """Return the last position that is safe to acknowledge: everything up to it was read, and
        is in the table or in state.
        """
        needed = (self.summary.oldest_incomplete, self.summary.oldest_to_reread)
        return min(
            [self.written.end, *(position.before for position in needed if position is not None)]
        )

    @property
    def wakeup_time_ms(self) -> int | None:
        """Return when the topic partition needs a micro-batch even without new entries (see
        ``source.wakeup_files``).
        """
        if self.summary.more_due and self.summary.next_due_ms is not None:
            return -self.summary.next_due_ms
        times_ms = (self.summary.expires_ms, self.summary.next_due_ms)
        return min((time_ms for time_ms in times_ms if time_ms is not None), default=None)


def results_to_json(results: list[PartitionResult]) -> str:
    """Write a row of ``RESULT_SCHEMA``."""
    return json.dumps(results, default=fields_of)


def results_from_json(text: str) -> list[PartitionResult]:
    """Read a row of ``RESULT_SCHEMA``."""
    return [
        PartitionResult(
            task_result_from_dict(fields["written"]),
            stored(StateSummary, fields["summary"]),
            fields["replaced"],
            stored(list[DataFile], fields["outbox"]),
            stored(Released, fields["released"]),
        )
        for fields in json.loads(text)
    ]


def task_result_from_dict(fields: dict[str, Any]) -> TaskResult:
    """Read a task's result from parsed JSON."""
    tables = {
        name: TableResult(stored(list[DataFile], table["files"]), table["max_effective_us"])
        for name, table in fields["tables"].items()
    }
    rejects = stored(list[DataFile], fields["rejects"])
    digest = stored(OutcomeDigest, fields["digest"])
    end = Position(**fields["end"])
    return TaskResult(
        **{**fields, "tables": tables, "rejects": rejects, "end": end, "digest": digest}
    )
