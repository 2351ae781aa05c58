"""Writes the rows of one topic partition for one table, in a task.

    messages of the topic partition
      | those by the schema that the table asks for
      v
    records                by the schemas' versions, if the table has records (see
                           ``values.record_rows``)
      | condition, query or function, computed columns (see ``transforms``)
      v
    rows                   in order, apart for each partition of the table (see
                           ``table.ordered_files``)

``TopicTables`` decides which tables take a message, for the pipeline, a replay and ``verify``. A
message that does not fit is a misfit, with the reason of its reject. The table counts as taking it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.client.topics import join_partition
from ledgerlake.decode.codes import codes_of
from ledgerlake.operators.results import TableResult
from ledgerlake.operators.transforms import RowTransform, column_of, messages_schema
from ledgerlake.options.table_options import tables_of_topic
from ledgerlake.reasons import NO_KEY, NO_TABLE, TRANSFORM_FAILED
from ledgerlake.source.value_schemas import schemas_of
from ledgerlake.table.layout import partition_text
from ledgerlake.table.ordered_files import (
    BufferedWriter,
    OrderedWriter,
    data_folder,
    merge_overlapping,
)
from ledgerlake.values.record_rows import (
    PULSAR_FIELDS,
    Misfit,
    record_cuts,
    record_rows,
    rows_schema,
)
from ledgerlake.values.schemas import record_name
from ledgerlake.wire.value_schema import NO_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.decode.messages import TopicPartition
    from ledgerlake.operators.results import BatchSettings
    from ledgerlake.options.table_options import TableOptions
    from ledgerlake.table.ordered_files import DataFile, ParquetFolder
    from ledgerlake.wire.value_schema import ValueSchema


# The rows that all partitions of a table may have in memory, in one task for one topic partition.
_MOST_BUFFERED_BYTES = 128 * 1024 * 1024

# A topic partition's rows of a micro-batch may be in so many partitions of a table: producers
# choose the values, and each one makes a file.
_MOST_PARTITIONS = 1000

_TOO_MANY = f"the micro-batch has messages for more than {_MOST_PARTITIONS} partitions of the table"
_ONLY_UNWRITTEN = (
    "only tables with the latest messages take it, and messages are not put into those again"
)
_NO_TABLE = "no table takes this message"
_TAKEN = "another of [[tables]] has the folder of this topic's table"

PartitionKey = tuple[str | None, ...]


@dataclass(frozen=True)
class Taken:
    """The numbers of the messages that a table takes, and the misfits among them. A query or a
    function may leave out others.
    """

    rows: NDArray[np.int64]
    misfits: list[Misfit]


@dataclass(frozen=True)
class Made:
    """Rows of a table, the number of each one's message, and which messages the table takes.
    ``maker`` has made them. If it is None, no table takes the messages, and ``why`` says why.
    """

    maker: RowMaker | None
    rows: pa.RecordBatch
    numbers: NDArray[np.int64]
    taken: Taken
    why: str = ""

    @property
    def misfits(self) -> list[Misfit]:
        """Return the messages that do not fit."""
        if self.maker is not None:
            return self.taken.misfits
        return [Misfit(row, NO_TABLE, self.why) for row in self.taken.rows.tolist()]


class SharedTable:
    """Files of one table that topic partitions of a task share, see ``partition_writer``."""

    def __init__(self) -> None:
        self._writers: dict[PartitionKey, BufferedWriter] = {}

    def writer(self, key: PartitionKey, folder: ParquetFolder) -> BufferedWriter:
        """Return the writer for a partition of the table."""
        if sum(writer.buffered_bytes for writer in self._writers.values()) > _MOST_BUFFERED_BYTES:
            for writer in self._writers.values():
                writer.flush()
        if key not in self._writers:
            self._writers[key] = BufferedWriter(folder)
        return self._writers[key]

    def finish(self) -> list[DataFile]:
        return [file for writer in self._writers.values() for file in writer.finish()]


class TableWriter:
    """The files of one topic partition for one table.

    Args:
        maker: makes the table's rows.
        prefix: begins the files' names.
    """

    def __init__(
        self,
        maker: RowMaker,
        topic_partition: TopicPartition,
        batch: BatchSettings,
        prefix: str,
    ) -> None:
        self.table = table = maker.table
        self.obstacle = maker.obstacle
        self._keeps_latest = table.keeps_latest
        self.folder = data_folder(table.place, maker.schema, prefix)
        # The latest message of a key is never late.
        name = join_partition(topic_partition.topic, topic_partition.partition)
        known = batch.table(table.name)
        self._watermark_us = None if table.keeps_latest else known.watermark_us.get(name)
        self._partition_columns = table.partition_columns
        self._writers: dict[PartitionKey, OrderedWriter] = {}

    def write(
        self, rows: pa.RecordBatch, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], list[Misfit]]:
        """Write rows; return the numbers of those that were written, and the misfits.

        Args:
            numbers: the number of each row's message.
        """
        written: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
        misfits: list[Misfit] = []
        for key, of_key in self._by_partition(rows):
            writer = self._writer(key)
            if writer is None:
                misfits += [
                    Misfit(int(row), TRANSFORM_FAILED, _TOO_MANY) for row in numbers[of_key]
                ]
            else:
                writer.write(rows if len(of_key) == rows.num_rows else rows.take(pa.array(of_key)))
                written.append(numbers[of_key])
        self._bound_memory()
        return np.concatenate(written), misfits

    def roll_files(self) -> None:
        """Close the open files: a row from another file will come between."""
        for writer in self._writers.values():
            writer.roll_file()

    def finish(self, shared: SharedTable | None) -> TableResult:
        """Close the files.

        Args:
            shared: takes the rows for which no file was opened yet.
        """
        files: list[DataFile] = []
        for key, writer in self._writers.items():
            files += writer.finish(
                None if shared is None else shared.writer(key, self._folder_of(key))
            )
        if self._keeps_latest:
            return TableResult(files)
        times_us = [writer.max_effective_us for writer in self._writers.values()]
        return TableResult(
            files, max((time_us for time_us in times_us if time_us is not None), default=None)
        )

    def merge(self, results: list[TableResult]) -> tuple[TableResult, list[str]]:
        """Return the results of all tasks of the topic partition together, and the names of the
        files that were merged into others.
        """
        files = [file for result in results for file in result.files]
        if self._keeps_latest:
            return TableResult(files), []
        ordered, replaced = merge_overlapping(self.folder, files)
        times_us = [result.max_effective_us for result in results]
        watermark_us = max((time_us for time_us in times_us if time_us is not None), default=None)
        return TableResult(ordered, watermark_us), replaced

    def _writer(self, key: PartitionKey) -> OrderedWriter | None:
        """Return the writer for a partition of the table; None if there are too many of them."""
        if key not in self._writers:
            if len(self._writers) >= _MOST_PARTITIONS:
                return None
            self._writers[key] = OrderedWriter(self._folder_of(key), self._watermark_us)
        return self._writers[key]

    def _folder_of(self, key: PartitionKey) -> ParquetFolder:
        return replace(
            self.folder, partition_values=dict(zip(self._partition_columns, key, strict=True))
        )

    def _bound_memory(self) -> None:
        """Close files if many partitions have rows in memory together."""
        if (
            len(self._writers) > 1
            and sum(writer.buffered_bytes for writer in self._writers.values())
            > _MOST_BUFFERED_BYTES
        ):
            self.roll_files()

    def _by_partition(
        self, rows: pa.RecordBatch
    ) -> Iterator[tuple[PartitionKey, NDArray[np.int64]]]:
        """Yield the partitions of the table that the rows are in, and the numbers of the rows in
        each. They are in the order of their first rows: which of them are too many must not depend
        on the pieces in which the rows come.
        """
        if not rows.num_rows:
            return
        if not self._partition_columns:
            yield (), np.arange(rows.num_rows)
            return
        columns = []
        numbers = np.zeros(rows.num_rows, dtype=np.int64)
        for name in self._partition_columns:
            column = column_of(rows, name)
            assert column is not None
            columns.append(column)
            codes, firsts = codes_of(column)
            if len(columns) > 1:
                codes, _ = codes_of(pa.array(numbers * len(firsts) + codes))
            # They rise with the first row of their values.
            numbers = codes
        order = np.argsort(numbers, kind="stable")
        for of_key in np.split(order, np.cumsum(np.bincount(numbers))[:-1]):
            yield tuple(partition_text(column[of_key[0]].as_py()) for column in columns), of_key


class TopicTables:
    """The tables that may take messages of a topic, and which of them take a message: each one of
    ``[[tables]]`` whose conditions it meets, or else the default one. A message that no table takes
    is a misfit.

    Args:
        tables: the tables of the configuration, perhaps with placeholders.
        unwritten: tables that are not written. A message that only they take is a misfit.
    """

    def __init__(
        self,
        tables: Iterable[TableOptions],
        topic: str,
        client: ClientSettings,
        batch: BatchSettings,
        unwritten: Iterable[TableOptions] = (),
    ) -> None:
        self.makers: list[RowMaker] = []
        for table in tables_of_topic(tables, topic):
            is_taken = any(maker.table.name == table.name for maker in self.makers)
            owner = batch.table(table.name).section
            obstacle = _TAKEN if is_taken or owner not in ("", table.section) else ""
            self.makers.append(RowMaker(table, topic, client, batch, obstacle))
        self._unwritten = [
            RowMaker(table, topic, client, batch) for table in tables_of_topic(unwritten, topic)
        ]
        self._matching = [maker for maker in self.makers if not maker.table.is_default]
        self._default = next((maker for maker in self.makers if maker.table.is_default), None)

    def of(
        self, messages: pa.RecordBatch, present: Mapping[str, NDArray[np.bool_]] | None = None
    ) -> Iterator[Made]:
        """Yield the rows that messages become in the tables, and the misfits.

        Args:
            present: by table, which of the messages it has already; it takes those.

        Raises:
            BrokerError, TransportError: a version of the schema cannot be read.
        """
        is_taken = np.zeros(messages.num_rows, dtype=bool)
        for maker in self._matching:
            is_present = _of_table(present, maker)
            if is_present is not None:
                is_taken |= is_present
            for made in _made(maker, messages, is_present):
                is_taken[made.taken.rows] = True
                yield made
        for maker in self._unwritten:
            for part in maker.of(messages):
                left = part.taken.rows[~is_taken[part.taken.rows]]
                is_taken[left] = True
                yield _not_taken(messages, left, _ONLY_UNWRITTEN)
        if self._default is None:
            yield _not_taken(messages, np.flatnonzero(~is_taken), _NO_TABLE)
            return
        is_present = _of_table(present, self._default)
        yield from _made(
            self._default, messages, is_taken if is_present is None else is_taken | is_present
        )


class TableWriters:
    """The files of one topic partition for all tables that take its messages. ``is_new``
    says which of the last messages got a row in a table.

    Args:
        tables, unwritten: as ``TopicTables``.
    """

    def __init__(
        self,
        tables: Sequence[TableOptions],
        topic_partition: TopicPartition,
        client: ClientSettings,
        batch: BatchSettings,
        prefix: str,
        unwritten: Sequence[TableOptions] = (),
    ) -> None:
        self.is_new = np.zeros(0, dtype=bool)
        self._tables = TopicTables(tables, topic_partition.topic, client, batch, unwritten)
        self._writer_of = {
            maker: TableWriter(maker, topic_partition, batch, prefix)
            for maker in self._tables.makers
        }

    @property
    def writers(self) -> list[TableWriter]:
        """Return the writers in the order of the tables."""
        return list(self._writer_of.values())

    @property
    def with_rows(self) -> list[TableWriter]:
        """Return the writers without those that an obstacle keeps from writing."""
        return [writer for writer in self.writers if not writer.obstacle]

    def write(
        self, messages: pa.RecordBatch, present: Mapping[str, NDArray[np.bool_]] | None = None
    ) -> list[Misfit]:
        """Write messages into the tables that take them; return those that do not fit, by their
        rows. A message that does not fit several tables is there once, with the first reason; the
        detail has the others.

        Args:
            present: as ``TopicTables.of``.

        Raises:
            BrokerError, TransportError: a version of the schema cannot be read.
        """
        self.is_new = np.zeros(messages.num_rows, dtype=bool)
        misfits: dict[int, Misfit] = {}
        for made in self._tables.of(messages, present):
            found, section = list(made.misfits), ""
            if made.maker is not None:
                section = made.maker.table.section
                written, more = self._writer_of[made.maker].write(made.rows, made.numbers)
                self.is_new[written] = True
                found += more
            for misfit in found:
                first = misfits.get(misfit.row)
                misfits[misfit.row] = (
                    misfit if first is None else _with_another(first, misfit, section)
                )
        return sorted(misfits.values(), key=attrgetter("row"))


class RowMaker:
    """Makes the rows of a table from messages of one topic.

    A table with the latest messages gets each deletion of a key, a message without a value, because
    it may have the key. But it takes a deletion as it takes any message, and leaves the others to
    the default table: if it asks for no other schema, and if the message meets its condition, which
    sees no value. A condition that cannot be judged without a value is not met.

    Args:
        table: without placeholders.
        obstacle: why the table takes no rows; its messages are misfits. Empty if it takes rows.
    """

    def __init__(
        self,
        table: TableOptions,
        topic: str,
        client: ClientSettings,
        batch: BatchSettings,
        obstacle: str = "",
    ) -> None:
        known = batch.table(table.name)
        self.table = table
        self.obstacle = obstacle or known.obstacle
        self._transform = RowTransform(table)
        self._record, self._columns = known.record_type, known.columns_type
        self._is_plain = not (table.where or table.computes_rows or table.partition_by)
        self._of_version = schemas_of(client, topic, batch.schemas.asked)
        self._newest_version = batch.schemas.newest_version(topic)
        self.schema = (
            rows_schema(self._columns) if table.has_record_shape else messages_schema(self._columns)
        )

    def of(self, messages: pa.RecordBatch) -> Iterator[Made]:
        """Yield rows and which messages are taken, in parts."""
        if self.table.keeps_latest:
            messages = _without_empty_values(messages)
        ranges: Iterable[tuple[int, int]] = [(0, messages.num_rows)]
        if self.table.has_record_shape and not self.obstacle:
            ranges = record_cuts(messages, self._schema_of, self._newest(), self._record)
        for start, stop in ranges:
            part = messages.slice(start, stop - start)
            fits = self._by_schema(part)
            is_null = part["is_null"].to_numpy(zero_copy_only=False)
            if not self.table.keeps_latest or not is_null.any():
                made = self._of_values(*_chosen(part, np.arange(start, stop), fits))
            else:
                made = _together(
                    self._of_values(*_chosen(part, np.arange(start, stop), fits & ~is_null)),
                    self._of_nulls(*_chosen(part, np.arange(start, stop), is_null), fits[is_null]),
                )
            if made.rows.num_rows or len(made.taken.rows):
                yield made

    def _of_values(self, messages: pa.RecordBatch, numbers: NDArray[np.int64]) -> Made:
        """
        Args:
            numbers: the number of each message in its batch.
        """
        if not messages.num_rows:
            return self._nothing(Taken(numbers, []))
        if self.obstacle:
            misfits = [Misfit(row, TRANSFORM_FAILED, self.obstacle) for row in numbers.tolist()]
            return self._nothing(Taken(numbers, misfits))
        keyed = has_key(messages)
        if not self.table.keeps_latest or keyed.all():
            return self._of_messages(messages, numbers)
        # The table may have a condition that they do not meet.
        unkeyed = self._of_messages(*_chosen(messages, numbers, ~keyed)).taken.rows
        made = self._of_messages(*_chosen(messages, numbers, keyed))
        return _together(made, self._nothing(_without_key(unkeyed)))

    def _of_nulls(
        self, messages: pa.RecordBatch, numbers: NDArray[np.int64], fits: NDArray[np.bool_]
    ) -> Made:
        """Return what becomes of messages without a value in a table with the latest messages.

        Args:
            numbers: as ``_of_values``.
            fits: which of them have the schema that the table asks for.
        """
        is_taken, keyed = fits & self._meet_condition(messages), has_key(messages)
        taken = Taken(numbers[is_taken & keyed], [])
        if self.obstacle:
            misfits = [Misfit(row, TRANSFORM_FAILED, self.obstacle) for row in taken.rows.tolist()]
            deletions = self._nothing(Taken(taken.rows, misfits))
        else:
            rows, own = _chosen(messages, numbers, keyed)
            deletions = Made(self, self._deletions(rows), own, taken)
        return _together(deletions, self._nothing(_without_key(numbers[is_taken & ~keyed])))

    def _meet_condition(self, messages: pa.RecordBatch) -> NDArray[np.bool_]:
        """Return a mask of the messages without a value that meet the table's condition."""
        if not self.table.where:
            return np.ones(messages.num_rows, dtype=bool)
        mask = np.zeros(messages.num_rows, dtype=bool)
        if not self.obstacle:
            rows = self._deletions(messages, self._record)
            mask[self._transform.meeting(rows)] = True
        return mask

    def _deletions(
        self, messages: pa.RecordBatch, record: pa.StructType | None = None
    ) -> pa.RecordBatch:
        """Return messages without a value as rows, which have no record.

        Args:
            record: the fields of the record; without it, the table's fields.
        """
        if not self.table.has_record_shape:
            return messages
        columns = self._columns if record is None else record
        arrays = [
            *(messages[field.name] for field in PULSAR_FIELDS),
            pa.nulls(messages.num_rows, columns),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=rows_schema(columns))

    def _of_messages(self, messages: pa.RecordBatch, numbers: NDArray[np.int64]) -> Made:
        misfits: list[Misfit] = []
        rows, fitting = messages, numbers
        if self.table.has_record_shape:
            rows, misfits = record_rows(messages, self._schema_of, self._newest(), self._record)
            fitting = np.delete(numbers, [misfit.row for misfit in misfits])
            misfits = _renumbered(misfits, numbers)
        if self._is_plain:
            return Made(self, rows, fitting, Taken(numbers, misfits))
        done = self._transform.apply(rows, self._columns)
        unfit = np.array([misfit.row for misfit in misfits], dtype=np.int64)
        taken = np.concatenate([fitting[done.taken], unfit])
        misfits += _renumbered(done.misfits, fitting)
        return Made(self, done.rows, fitting[done.numbers], Taken(taken, misfits))

    def _nothing(self, taken: Taken) -> Made:
        """Return no rows."""
        rows = pa.RecordBatch.from_arrays(
            [pa.nulls(0, column.type) for column in self.schema], schema=self.schema
        )
        return Made(self, rows, np.empty(0, dtype=np.int64), taken)

    def _newest(self) -> ValueSchema:
        newest = None if self._newest_version is None else self._of_version(self._newest_version)
        return self.table.value_schema(newest or NO_SCHEMA)

    def _schema_of(self, version: bytes) -> ValueSchema | None:
        registered = self._of_version(version)
        return None if registered is None else self.table.value_schema(registered)

    def _by_schema(self, messages: pa.RecordBatch) -> NDArray[np.bool_]:
        """Return a mask of the messages whose schema has the name that the table asks for, if it
        asks for one. A message without a version has none: the newest one may be another when the
        micro-batch is run again.
        """
        if not self.table.schema:
            return np.ones(messages.num_rows, dtype=bool)
        numbers, firsts = codes_of(messages["schema_version"])
        wanted = []
        for version in messages["schema_version"].take(pa.array(firsts)).to_pylist():
            schema = self._of_version(version) if version else None
            wanted.append(self.table.takes_schema("" if schema is None else record_name(schema)))
        result: NDArray[np.bool_] = np.array(wanted, dtype=bool)[numbers]
        return result


def _without_empty_values(messages: pa.RecordBatch) -> pa.RecordBatch:
    """Return messages in which an empty value is none. Pulsar's compaction deletes a key by either,
    so a table has the same keys whether the topic is compacted or not.
    """
    is_empty = pc.equal(pc.binary_length(messages["value"]), 0).fill_null(False)
    if not is_empty.true_count:
        return messages
    value = pc.if_else(is_empty, pa.scalar(None, messages["value"].type), messages["value"])
    changed = {"value": value, "is_null": pc.or_(messages["is_null"], is_empty)}
    columns = [changed.get(name, messages[name]) for name in messages.schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=messages.schema)


def has_key(messages: pa.RecordBatch) -> NDArray[np.bool_]:
    """Return a mask of the messages with a key."""
    mask: NDArray[np.bool_] = pc.or_(
        messages["key"].is_valid(), messages["key_bytes"].is_valid()
    ).to_numpy(zero_copy_only=False)
    return mask


def _of_table(
    present: Mapping[str, NDArray[np.bool_]] | None, maker: RowMaker
) -> NDArray[np.bool_] | None:
    return None if present is None else present.get(maker.table.name)


def _made(
    maker: RowMaker, messages: pa.RecordBatch, is_left_out: NDArray[np.bool_] | None
) -> Iterator[Made]:
    """Yield the rows of messages without some of them."""
    if is_left_out is None or not is_left_out.any():
        yield from maker.of(messages)
        return
    numbers = np.flatnonzero(~is_left_out)
    if not len(numbers):
        return
    for made in maker.of(messages.take(pa.array(numbers))):
        taken = Taken(numbers[made.taken.rows], _renumbered(made.taken.misfits, numbers))
        yield replace(made, numbers=numbers[made.numbers], taken=taken)


def _not_taken(messages: pa.RecordBatch, rows: NDArray[np.int64], why: str) -> Made:
    return Made(None, messages.slice(0, 0), rows[:0], Taken(rows, []), why)


def _without_key(rows: NDArray[np.int64]) -> Taken:
    return Taken(rows, [Misfit(row, NO_KEY, "the message has no key") for row in rows.tolist()])


def _together(first: Made, second: Made) -> Made:
    """Return what becomes of two parts of a batch, with the rows in the order of the messages."""
    taken = Taken(
        np.concatenate([first.taken.rows, second.taken.rows]),
        [*first.taken.misfits, *second.taken.misfits],
    )
    if not first.rows.num_rows or not second.rows.num_rows:
        return replace(first if first.rows.num_rows else second, taken=taken)
    numbers = np.concatenate([first.numbers, second.numbers])
    order = np.argsort(numbers, kind="stable")
    rows = pa.Table.from_batches([first.rows, second.rows]).take(pa.array(order))
    (batch,) = rows.combine_chunks().to_batches()
    return Made(first.maker, batch, numbers[order], taken)


def _chosen(
    messages: pa.RecordBatch, numbers: NDArray[np.int64], mask: NDArray[np.bool_]
) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
    """Return some messages with their numbers."""
    if mask.all():
        return messages, numbers
    return messages.filter(pa.array(mask)), numbers[mask]


def _with_another(first: Misfit, other: Misfit, section: str) -> Misfit:
    detail = f"{first.detail}; {section}: {other.reason}: {other.detail}"
    return replace(first, detail=detail, also=(*first.also, other.reason))


def _renumbered(misfits: list[Misfit], numbers: NDArray[np.int64]) -> list[Misfit]:
    return [replace(misfit, row=int(numbers[misfit.row])) for misfit in misfits]
