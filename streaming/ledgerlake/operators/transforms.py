"""How the rows of a table come from messages: conditions, queries, a user's function, and computed
columns. The driver learns the table's columns from it, and the tasks their rows.

Conditions, queries and functions see the columns that a table without them would have. So they see
the fields of the record and the struct ``pulsar`` of a table of records, and the columns of
messages of another one. ``late`` and ``delivered_at`` are null there: they are known only when a
row is written, and a micro-batch that is run again has others. A query's columns become the record;
``pulsar`` stays beside them, whatever the query selects, because rows have their place and their
order by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.decode import schema
from ledgerlake.decode.columns import DecodedValues
from ledgerlake.decode.times import without_python_time
from ledgerlake.errors import SetupError
from ledgerlake.operators.row_functions import row_function
from ledgerlake.reasons import TRANSFORM_FAILED
from ledgerlake.table.layout import file_schema, record_of, to_file
from ledgerlake.table.ordered_files import bounded_paths
from ledgerlake.values.column_names import folded
from ledgerlake.values.record_columns import PULSAR_COLUMN, as_records, check_columns, united
from ledgerlake.values.record_rows import PULSAR_FIELDS, RECORD_COLUMN, Misfit, rows_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from ledgerlake.operators.row_functions import RowFunction
    from ledgerlake.options.table_options import TableOptions
    from ledgerlake.values.row_query import Answer, RowQuery


_PULSAR = pa.struct(PULSAR_FIELDS)

# Producers choose the texts that partition a table, and the table's log has one for each file.
_PARTITION_VALUE_MOST_BYTES = 1000

# Columns whose values are known only when a row is written.
_UNKNOWN_YET = ("late", "delivered_at")


@dataclass(frozen=True)
class Transformed:
    """Rows of a table, the number of each row's message in its batch, and the messages for which a
    value cannot be computed. ``taken`` has the numbers of the messages that the table takes.
    """

    rows: pa.RecordBatch
    numbers: NDArray[np.int64]
    misfits: list[Misfit]
    taken: NDArray[np.int64]


_Step = tuple[pa.RecordBatch, "NDArray[np.int64]", dict[int, str]]


def messages_schema(computed: pa.StructType) -> pa.Schema:
    """Return the columns of the rows of a table of messages with computed columns."""
    return pa.schema([*schema.MESSAGES, *computed])


class RowTransform:
    """The transform of a table's rows.

    Raises:
        UsageError: an SQL text is none.
        SetupError: the function cannot be imported.
    """

    def __init__(self, table: TableOptions) -> None:
        self._table = table
        self._condition = table.condition()
        self._maker: RowQuery | RowFunction | None = table.query()
        if table.function:
            self._maker = row_function(table.function, f"{table.section} function")
        self._computed = table.computed_columns

    @property
    def computes_rows(self) -> bool:
        """Return whether a query or a function makes the records."""
        return self._maker is not None

    def columns(self, record: pa.StructType) -> pa.StructType:
        """Return the table's columns beside ``pulsar``, or beside the columns of messages.

        Args:
            record: the fields of the messages' records; none for a table of messages.

        Raises:
            SetupError: the condition, the query or the function does not fit the messages.
        """
        columns = record
        if self._condition is not None:
            self._condition.columns(self._seen(record))
        if self._maker is not None:
            columns = self._without_pulsar(self._maker.columns(self._seen(record)))
            check_columns(columns, f"{self._table.section} sql or function", "")
        if self._computed is not None:
            columns = pa.struct([*columns, *self._computed.columns(self._seen(columns))])
        known = file_schema(self._rows(columns))
        check_columns(pa.struct(list(known)), f"{self._table.section} partition_by", "")
        self._check_partitions({field.name: field.type for field in known})
        self._check_clusters(columns)
        return columns

    def apply(self, rows: pa.RecordBatch, columns: pa.StructType) -> Transformed:
        """Return the rows of the table for rows of messages or records.

        Args:
            columns: the table's columns, as ``columns`` has them.
        """
        numbers = taken = np.arange(rows.num_rows)
        misfits: list[Misfit] = []
        for step in self._steps():
            try:
                rows, kept, bad = step(rows, columns)
            except SetupError as error:
                # The messages' schemas lack what the query names; later ones may have it.
                bad = dict.fromkeys(range(len(numbers)), error.message)
                rows, kept = self._no_rows(columns), np.empty(0, dtype=np.int64)
            misfits += [
                Misfit(int(numbers[row]), TRANSFORM_FAILED, reason) for row, reason in bad.items()
            ]
            numbers = numbers[kept]
            if step == self._choose:
                taken = np.union1d(
                    numbers, np.array([misfit.row for misfit in misfits], dtype=np.int64)
                )
            if not rows.num_rows:
                rows = self._no_rows(columns)
                break
        return Transformed(rows, numbers, misfits, taken)

    def meeting(self, rows: pa.RecordBatch) -> NDArray[np.int64]:
        """Return the numbers of the rows for which the condition holds, by which a table chooses
        its messages. It does not hold for a row for which it cannot be judged.
        """
        assert self._condition is not None
        try:
            return self._condition.of(_seen_of(rows)).rows
        except SetupError:
            # It names columns that the messages do not have.
            return np.empty(0, dtype=np.int64)

    def _steps(self) -> Iterator[Callable[[pa.RecordBatch, pa.StructType], _Step]]:
        if self._condition is not None:
            yield self._choose
        if self._maker is not None:
            yield self._make
        if self._computed is not None:
            yield self._compute
        if self._table.partition_by:
            yield self._with_partitions

    def _choose(self, rows: pa.RecordBatch, _columns: pa.StructType) -> _Step:
        assert self._condition is not None
        answer = self._condition.of(_seen_of(rows))
        return _chosen(rows, answer.rows), answer.rows, answer.bad

    def _make(self, rows: pa.RecordBatch, columns: pa.StructType) -> _Step:
        """Return rows with the answer of the query or the function in place of their records."""
        assert self._maker is not None
        answer = self._maker.of(_seen_of(rows))
        fitted = as_records(
            DecodedValues(_without(answer.values, PULSAR_COLUMN)), self._made(columns)
        )
        parts = dict(zip(fitted.values.type.names, fitted.values.flatten(), strict=True))
        result = _with_record(_chosen(rows, answer.rows), parts, columns)
        bad = answer.bad | {int(answer.rows[row]): reason for row, reason in fitted.bad.items()}
        fits = np.setdiff1d(np.arange(result.num_rows), list(fitted.bad))
        return _chosen(result, fits), answer.rows[fits], bad

    def _compute(self, rows: pa.RecordBatch, columns: pa.StructType) -> _Step:
        assert self._computed is not None
        answer: Answer = self._computed.of(_seen_of(self._without_computed(rows)))
        kept = _chosen(rows, answer.rows)
        values = dict(zip(answer.values.type.names, answer.values.flatten(), strict=True))
        record = record_of(rows.schema)
        if record is None:
            arrays = [*kept.columns, *(values[field.name].cast(field.type) for field in columns)]
            return (
                pa.RecordBatch.from_arrays(arrays, schema=messages_schema(columns)),
                answer.rows,
                answer.bad,
            )
        known = dict(zip(record.names, kept[RECORD_COLUMN].flatten(), strict=True))
        return _with_record(kept, known | values, columns), answer.rows, answer.bad

    def _with_partitions(self, rows: pa.RecordBatch, _columns: pa.StructType) -> _Step:
        """Return the rows whose partition values are such that a table can have them. An empty text
        is null: Delta's log has no other partition for it, and readers take the value from the log
        or from the file. The log has the value of each file, so a text has a limit.
        """
        columns = [column_of(rows, name) for name in self._table.partition_columns]
        bad: dict[int, str] = {}
        for name, column in zip(self._table.partition_columns, columns, strict=True):
            if column is None:
                raise SetupError(f"the table has no column {name} yet, by which it is partitioned")
            bad |= without_python_time(column, name)
            if pa.types.is_string(column.type):
                bad |= _long_values(column, name)
                rows = _with_column(rows, name, pc.if_else(pc.equal(column, ""), None, column))
        fits = np.setdiff1d(np.arange(rows.num_rows), list(bad))
        return _chosen(rows, fits), fits, bad

    def _made(self, columns: pa.StructType) -> pa.StructType:
        """Return the table's columns that are not computed beside the record."""
        return pa.struct(
            [field for field in columns if field.name not in self._table.computed_names]
        )

    def _without_computed(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows as they are before columns are computed."""
        record = record_of(rows.schema)
        if record is None or not set(record.names).intersection(self._table.computed_names):
            return rows
        parts = dict(zip(record.names, rows[RECORD_COLUMN].flatten(), strict=True))
        return _with_record(rows, parts, self._made(record))

    def _rows(self, columns: pa.StructType) -> pa.Schema:
        """Return the columns of the rows of a table with these columns."""
        return rows_schema(columns) if self._table.has_record_shape else messages_schema(columns)

    def _no_rows(self, columns: pa.StructType) -> pa.RecordBatch:
        rows = self._rows(columns)
        return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in rows], schema=rows)

    def _seen(self, columns: pa.StructType) -> pa.Schema:
        """Return the columns that queries and functions see."""
        return _seen_of(self._no_rows(columns)).schema

    def _without_pulsar(self, columns: pa.StructType) -> pa.StructType:
        """Return the columns of a query without ``pulsar``, which stays beside them as it is.

        Raises:
            SetupError: the query makes another column of that name.
        """
        for field in columns:
            if folded(field.name) == PULSAR_COLUMN and not field.type.equals(_PULSAR):
                raise SetupError(
                    f"{self._table.section} sql has a column {field.name}, and the table has the "
                    "metadata of Pulsar in a column of that name; name it otherwise"
                )
        return pa.struct([field for field in columns if folded(field.name) != PULSAR_COLUMN])

    def _check_partitions(self, known: dict[str, pa.DataType]) -> None:
        """Check that a table with these columns can be partitioned as it should be.

        Raises:
            SetupError: it cannot.
        """
        for name in self._table.partition_columns:
            if name not in known:
                raise SetupError(
                    f"{self._table.section} partition_by names {name}, and the table has no such "
                    "column"
                )
            if not _is_partition_type(known[name]):
                raise SetupError(
                    f"{self._table.section} partition_by names {name}, which is {known[name]}; a "
                    "table is partitioned by texts, whole numbers, dates and flags"
                )

    def _check_clusters(self, columns: pa.StructType) -> None:
        """Check that a table with these columns can be clustered as it should be.

        Raises:
            SetupError: it cannot.
        """
        known = bounded_paths(self._rows(columns))
        unknown = [name for name in self._table.cluster_by if name not in known]
        if unknown:
            raise SetupError(
                f"{self._table.section} cluster_by names {unknown[0]}; a table can be clustered by "
                f"{', '.join(known)}"
            )


def united_columns(known: pa.StructType, columns: pa.StructType, section: str) -> pa.StructType:
    """Return the columns of a table with those that a query or a function adds.

    Raises:
        SetupError: a column is there with another type.
    """
    by_name = {folded(field.name): field.type for field in known}
    for field in columns:
        there = by_name.get(folded(field.name), field.type)
        if not _fits(field.type, there):
            raise SetupError(
                f"the column {field.name} of {section} is {field.type}, and the table has it as "
                f"{there}; cast it, or name it otherwise"
            )
    return united(known, columns)


def column_of(rows: pa.RecordBatch, name: str) -> pa.Array | None:
    """Return a column of the table; None if the rows do not have it."""
    if RECORD_COLUMN not in rows.schema.names:
        return rows[name]
    records = rows[RECORD_COLUMN]
    return (
        records.flatten()[records.type.get_field_index(name)]
        if name in records.type.names
        else None
    )


def _with_column(rows: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    """Return rows with another column in place of the table's column of that name."""
    record = record_of(rows.schema)
    if record is None:
        number = rows.schema.get_field_index(name)
        return rows.set_column(number, rows.schema.field(number), column)
    parts = dict(zip(record.names, rows[RECORD_COLUMN].flatten(), strict=True))
    return _with_record(rows, parts | {name: column}, record)


def _fits(kind: pa.DataType, column: pa.DataType) -> bool:
    """Return whether all values of a type may be in a column."""
    for is_kind in (pa.types.is_integer, pa.types.is_floating):
        if is_kind(kind) and is_kind(column):
            return bool(kind.bit_width <= column.bit_width)
    for is_kind in (pa.types.is_struct, pa.types.is_list, pa.types.is_map):
        if is_kind(kind):
            return bool(is_kind(column))
    return bool(kind.equals(column))


def _is_partition_type(kind: pa.DataType) -> bool:
    is_plain = pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_date(kind)
    return bool(is_plain or pa.types.is_boolean(kind))


def _long_values(texts: pa.Array, name: str) -> dict[int, str]:
    """Return the rows whose partition value is too long, each with a sentence about it."""
    sizes = pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False)
    return {
        int(row): f"{name} has {sizes[row]:,} bytes, and a partition value has at most "
        f"{_PARTITION_VALUE_MOST_BYTES:,}"
        for row in np.flatnonzero(sizes > _PARTITION_VALUE_MOST_BYTES)
    }


def _seen_of(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows in the columns of the table's files; values known only later are null."""
    for name in _UNKNOWN_YET:
        index = rows.schema.get_field_index(name)
        rows = rows.set_column(
            index, rows.schema.field(index), pa.nulls(rows.num_rows, rows.schema.field(index).type)
        )
    if record_of(rows.schema) is None:
        return rows
    content = to_file(pa.Table.from_batches([rows])).combine_chunks()
    arrays = [
        column.chunk(0) if column.num_chunks else pa.nulls(0, column.type)
        for column in content.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=content.schema)


def _chosen(rows: pa.RecordBatch, numbers: NDArray[np.int64]) -> pa.RecordBatch:
    """Return some rows; the numbers rise."""
    return rows if len(numbers) == rows.num_rows else rows.take(pa.array(numbers, pa.int64()))


def _with_record(
    rows: pa.RecordBatch, parts: dict[str, pa.Array], columns: pa.StructType
) -> pa.RecordBatch:
    """Return rows with a record of these parts; those that are missing are null."""
    count = rows.num_rows
    arrays = [
        parts[field.name].cast(field.type) if field.name in parts else pa.nulls(count, field.type)
        for field in columns
    ]
    records = (
        pa.StructArray.from_arrays(arrays, fields=list(columns))
        if arrays
        else pa.array([{}] * count, columns)
    )
    return pa.RecordBatch.from_arrays(
        [*(rows[field.name] for field in PULSAR_FIELDS), records], schema=rows_schema(columns)
    )


def _without(values: pa.StructArray, name: str) -> pa.StructArray:
    """Return a struct column without one of its fields, in any case."""
    kept = [
        (field, part)
        for field, part in zip(values.type, values.flatten(), strict=True)
        if folded(field.name) != name
    ]
    if not kept:
        return pa.array([{}] * len(values), pa.struct([]))
    return pa.StructArray.from_arrays(
        [part for _, part in kept], fields=[field for field, _ in kept]
    )
