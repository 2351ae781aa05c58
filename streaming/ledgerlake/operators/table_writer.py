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

A message that does not fit is a misfit, with the reason of its reject. The table counts as taking
it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.client.topics import join_partition
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
    from ledgerlake.operators.results import BatchSettings, TableBatch
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
class Written(Taken):
    """What a table takes, with the numbers of the messages that got a row in it."""

    with_row: NDArray[np.int64]


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
        table: without placeholders.
        prefix: begins the files' names.
        obstacle: why the table takes no rows; its messages are misfits. Empty if there is none.
    """

    def __init__(
        self,
        table: TableOptions,
        topic_partition: TopicPartition,
        client: ClientSettings,
        batch: BatchSettings,
        prefix: str,
        obstacle: str = "",
    ) -> None:
        self.table = table
        known = batch.table(table.name)
        self.obstacle = obstacle or known.obstacle
        self._keeps_latest = table.keeps_latest
        self._rows = RowMaker(table, topic_partition.topic, client, batch, known, self.obstacle)
        self.folder = data_folder(table.place, self._rows.schema, prefix)
        # The latest message of a key is never late.
        name = join_partition(topic_partition.topic, topic_partition.partition)
        self._reached_us = None if table.keeps_latest else known.reached_us.get(name)
        self._partition_columns = table.partition_columns
        self._writers: dict[PartitionKey, OrderedWriter] = {}

    def write(self, messages: pa.RecordBatch) -> Written:
        """Write the messages that the table takes.

        Raises:
            BrokerError, TransportError: a version of the schema cannot be read.
        """
        taken: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
        with_row: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
        misfits: list[Misfit] = []
        for rows, numbers, part in self._rows.of(messages):
            for key, of_key in self._by_partition(rows):
                writer = self._writer(key)
                if writer is None:
                    misfits += [
                        Misfit(int(row), TRANSFORM_FAILED, _TOO_MANY) for row in numbers[of_key]
                    ]
                else:
                    writer.write(
                        rows if len(of_key) == rows.num_rows else rows.take(pa.array(of_key))
                    )
                    with_row.append(numbers[of_key])
            taken.append(part.rows)
            misfits += part.misfits
            self._bound_memory()
        return Written(np.concatenate(taken), misfits, np.concatenate(with_row))

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
        reached_us = max((time_us for time_us in times_us if time_us is not None), default=None)
        return TableResult(ordered, reached_us), replaced

    def _writer(self, key: PartitionKey) -> OrderedWriter | None:
        """Return the writer for a partition of the table; None if there are too many of them."""
        if key not in self._writers:
            if len(self._writers) >= _MOST_PARTITIONS:
                return None
            self._writers[key] = OrderedWriter(self._folder_of(key), self._reached_us)
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
            codes = column.dictionary_encode(null_encoding="encode")
            together = pa.array(numbers * len(codes.dictionary) + codes.indices.to_numpy())
            # Codes rise with the first row of their value.
            numbers = together.dictionary_encode().indices.to_numpy()
        order = np.argsort(numbers, kind="stable")
        for of_key in np.split(order, np.cumsum(np.bincount(numbers))[:-1]):
            yield tuple(partition_text(column[of_key[0]].as_py()) for column in columns), of_key


class TableWriters:
    """The files of one topic partition for all tables that take its messages. ``is_new``
    says which of the last messages got a row in a table.

    Args:
        tables: those of the configuration, perhaps with placeholders.
        unwritten: tables that are not written. What only they take does not fit.
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
        topic = topic_partition.topic
        self.is_new = np.zeros(0, dtype=bool)
        self.writers: list[TableWriter] = []
        for table in tables_of_topic(tables, topic):
            is_taken = any(writer.table.name == table.name for writer in self.writers)
            owner = batch.table(table.name).section
            obstacle = _TAKEN if is_taken or owner not in ("", table.section) else ""
            self.writers.append(
                TableWriter(table, topic_partition, client, batch, prefix, obstacle)
            )
        self._unwritten: list[RowMaker] = []
        for table in tables_of_topic(unwritten, topic):
            known = batch.table(table.name)
            self._unwritten.append(RowMaker(table, topic, client, batch, known, known.obstacle))
        self._matching = [writer for writer in self.writers if not writer.table.is_default]
        # What no table takes goes into the default one, or is rejected.
        self._default = next((writer for writer in self.writers if writer.table.is_default), None)

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
            present: by table, which of the messages it has already.

        Raises:
            BrokerError, TransportError: a version of the schema cannot be read.
        """
        is_taken = np.zeros(messages.num_rows, dtype=bool)
        self.is_new = np.zeros(messages.num_rows, dtype=bool)
        misfits: dict[int, Misfit] = {}
        for writer in self._matching:
            written = _write_absent(writer, messages, (present or {}).get(writer.table.name))
            is_taken[written.rows] = True
            self.is_new[written.with_row] = True
            for misfit in written.misfits:
                first = misfits.get(misfit.row)
                misfits[misfit.row] = (
                    misfit if first is None else _with_another(first, misfit, writer.table.section)
                )
        for maker in self._unwritten:
            for _, _, taken in maker.of(messages):
                left = taken.rows[~is_taken[taken.rows]]
                misfits |= {row: Misfit(row, NO_TABLE, _ONLY_UNWRITTEN) for row in left.tolist()}
                is_taken[left] = True
        if not is_taken.all():
            misfits |= self._write_others(messages, np.flatnonzero(~is_taken), present or {})
        return sorted(misfits.values(), key=attrgetter("row"))

    def _write_others(
        self,
        messages: pa.RecordBatch,
        rows: NDArray[np.int64],
        present: Mapping[str, NDArray[np.bool_]],
    ) -> dict[int, Misfit]:
        """Write messages that no other table takes; return those that do not fit."""
        if self._default is None:
            return {
                row: Misfit(row, NO_TABLE, "no table takes this message") for row in rows.tolist()
            }
        chosen = messages if len(rows) == messages.num_rows else messages.take(pa.array(rows))
        is_present = present.get(self._default.table.name)
        written = _write_absent(
            self._default, chosen, None if is_present is None else is_present[rows]
        )
        self.is_new[rows[written.with_row]] = True
        return {misfit.row: misfit for misfit in _renumbered(written.misfits, rows)}


class RowMaker:
    """Makes the rows of a table from messages of one topic."""

    def __init__(
        self,
        table: TableOptions,
        topic: str,
        client: ClientSettings,
        batch: BatchSettings,
        known: TableBatch,
        obstacle: str,
    ) -> None:
        self._table = table
        self._obstacle = obstacle
        self._transform = RowTransform(table)
        self._record, self._columns = known.record_type, known.columns_type
        self._is_plain = not (table.where or table.makes_records or table.partition_by)
        self._of_version = schemas_of(client, topic, batch.schemas.asked)
        self._newest_version = batch.schemas.newest_version(topic)
        self.schema = (
            rows_schema(self._columns) if table.is_of_records else messages_schema(self._columns)
        )

    def of(
        self, messages: pa.RecordBatch
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64], Taken]]:
        """Yield rows with the number of each one's message, and which messages are taken, in
        parts.
        """
        if self._table.keeps_latest:
            messages = _without_empty_values(messages)
        ranges: Iterable[tuple[int, int]] = [(0, messages.num_rows)]
        if self._table.is_of_records and not self._obstacle:
            ranges = record_cuts(messages, self._schema_of, self._newest(), self._record)
        for start, stop in ranges:
            part = messages.slice(start, stop - start)
            numbers = np.arange(start, stop)
            if self._table.schema:
                wanted = self._by_schema(part)
                if self._table.keeps_latest:
                    # A deletion of a key has no value, so it needs no schema.
                    wanted |= part["is_null"].to_numpy(zero_copy_only=False) & _has_key(part)
                part, numbers = part.filter(pa.array(wanted)), numbers[wanted]
            if part.num_rows:
                yield self._of_part(part, numbers)

    def _of_part(
        self, messages: pa.RecordBatch, numbers: NDArray[np.int64]
    ) -> tuple[pa.RecordBatch, NDArray[np.int64], Taken]:
        """
        Args:
            numbers: the number of each message in its batch.
        """
        if self._obstacle:
            misfits = [Misfit(row, TRANSFORM_FAILED, self._obstacle) for row in numbers.tolist()]
            return self._no_rows(), numbers[:0], Taken(numbers, misfits)
        if not self._table.keeps_latest or not (
            messages["key"].null_count and messages["key_bytes"].null_count
        ):
            return self._of_messages(messages, numbers)
        has_key = _has_key(messages)
        # The table may have a condition that they do not meet.
        _, _, unkeyed = self._of_messages(messages.filter(pa.array(~has_key)), numbers[~has_key])
        misfits = [Misfit(row, NO_KEY, "the message has no key") for row in unkeyed.rows.tolist()]
        rows, own, taken = self._of_messages(messages.filter(pa.array(has_key)), numbers[has_key])
        return rows, own, Taken(np.concatenate([taken.rows, unkeyed.rows]), misfits + taken.misfits)

    def _of_messages(
        self, messages: pa.RecordBatch, numbers: NDArray[np.int64]
    ) -> tuple[pa.RecordBatch, NDArray[np.int64], Taken]:
        misfits: list[Misfit] = []
        rows, fitting = messages, numbers
        if self._table.is_of_records:
            rows, misfits = record_rows(messages, self._schema_of, self._newest(), self._record)
            fitting = np.delete(numbers, [misfit.row for misfit in misfits])
            misfits = _renumbered(misfits, numbers)
        if self._is_plain:
            return rows, fitting, Taken(numbers, misfits)
        is_deletion = rows["is_null"].to_numpy(zero_copy_only=False)
        if not self._table.keeps_latest:
            is_deletion = np.zeros(len(is_deletion), dtype=bool)
        others = np.flatnonzero(~is_deletion)
        values = rows if len(others) == rows.num_rows else rows.take(pa.array(others))
        done = self._transform.apply(values, self._columns)
        unfit = np.array([misfit.row for misfit in misfits], dtype=np.int64)
        taken = np.concatenate([fitting[others][done.taken], fitting[is_deletion], unfit])
        made, own = done.rows, fitting[others][done.numbers]
        if is_deletion.any():
            made, order = self._with_deletions(made, rows.filter(pa.array(is_deletion)))
            own = np.concatenate([own, fitting[is_deletion]])[order]
        return made, own, Taken(taken, misfits + _renumbered(done.misfits, fitting[others]))

    def _with_deletions(
        self, rows: pa.RecordBatch, deletions: pa.RecordBatch
    ) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        """Return rows of a table with the latest messages, with those that delete a key, and where
        each of them was. Those pass by conditions and queries, which see no value in them.
        """
        if self._table.is_of_records:
            columns = [
                *(deletions[name.name] for name in PULSAR_FIELDS),
                pa.nulls(deletions.num_rows, self._columns),
            ]
            deletions = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        together = pa.Table.from_batches([rows, deletions])
        keys = [(name, "ascending") for name in ("ledger_id", "entry_id", "batch_index")]
        order = pc.sort_indices(together, sort_keys=keys)
        (batch,) = together.take(order).combine_chunks().to_batches()
        return batch, order.to_numpy()

    def _no_rows(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(
            [pa.nulls(0, column.type) for column in self.schema], schema=self.schema
        )

    def _newest(self) -> ValueSchema:
        newest = None if self._newest_version is None else self._of_version(self._newest_version)
        return self._table.value_schema(newest or NO_SCHEMA)

    def _schema_of(self, version: bytes) -> ValueSchema | None:
        registered = self._of_version(version)
        return None if registered is None else self._table.value_schema(registered)

    def _by_schema(self, messages: pa.RecordBatch) -> NDArray[np.bool_]:
        """Return a mask of the messages whose schema has the name that the table asks for. A
        message without a version has none: the newest one may be another when the micro-batch is
        run again.
        """
        codes = messages["schema_version"].dictionary_encode(null_encoding="encode")
        wanted = []
        for version in codes.dictionary.to_pylist():
            schema = self._of_version(version) if version else None
            wanted.append(self._table.takes_schema("" if schema is None else record_name(schema)))
        result: NDArray[np.bool_] = np.array(wanted, dtype=bool)[codes.indices.to_numpy()]
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


def _has_key(messages: pa.RecordBatch) -> NDArray[np.bool_]:
    """Return a mask of the messages with a key."""
    mask: NDArray[np.bool_] = pc.or_(
        messages["key"].is_valid(), messages["key_bytes"].is_valid()
    ).to_numpy(zero_copy_only=False)
    return mask


def _write_absent(
    writer: TableWriter, messages: pa.RecordBatch, is_present: NDArray[np.bool_] | None
) -> Written:
    """Write the messages that a table does not have; the others count as taken."""
    if is_present is None or not is_present.any():
        return writer.write(messages)
    absent = np.flatnonzero(~is_present)
    written = writer.write(messages.take(pa.array(absent)))
    rows = np.concatenate([np.flatnonzero(is_present), absent[written.rows]])
    return Written(rows, _renumbered(written.misfits, absent), absent[written.with_row])


def _with_another(first: Misfit, other: Misfit, section: str) -> Misfit:
    return replace(first, detail=f"{first.detail}; {section}: {other.reason}: {other.detail}")


def _renumbered(misfits: list[Misfit], numbers: NDArray[np.int64]) -> list[Misfit]:
    return [replace(misfit, row=int(numbers[misfit.row])) for misfit in misfits]
