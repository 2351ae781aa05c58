"""How the rows of a table come from messages: conditions, queries, a user's function, and computed
columns. The driver learns the table's columns from it, and the tasks their rows.

Conditions, queries and functions see the columns that a table without them would have. So they see
the fields of the record and the struct ``pulsar`` of a table of records, and the columns of
messages of another one. A query's columns become the record; ``pulsar`` stays beside them, whatever
the query selects, because rows have their place and their order by it.

A function gets an Arrow record batch and returns one. It keeps the column ``pulsar`` of the rows
that it keeps, in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ledgerlake.decode import schema
from ledgerlake.decode.columns import DecodedValues, first_line
from ledgerlake.decode.record_columns import PULSAR_COLUMN, as_records, check_names, united
from ledgerlake.decode.record_rows import PULSAR_FIELDS, RECORD_COLUMN, Misfit, rows_schema
from ledgerlake.decode.row_query import Answer, table_type
from ledgerlake.errors import SetupError
from ledgerlake.runtime.plugins import load
from ledgerlake.table.layout import record_of, to_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from ledgerlake.decode.row_query import RowQuery
    from ledgerlake.options.table_options import TableOptions

# The reason of a reject: a value of the message cannot be computed.
TRANSFORM_FAILED = "transform_failed"

_PULSAR = pa.struct(PULSAR_FIELDS)

_POSITION = ("ledger_id", "entry_id", "batch_index")

Transformed = tuple[pa.RecordBatch, "NDArray[np.int64]", list[Misfit]]


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
        self._query = table.query()
        self._function = load(table.function) if table.function else None
        self._computed = table.computed_columns

    @property
    def makes_records(self) -> bool:
        """Return whether a query or a function makes the records."""
        return self._query is not None or self._function is not None

    @property
    def computed_names(self) -> list[str]:
        """Return the names of the columns that are computed beside the record."""
        return [] if self._computed is None else self._table.computed_names

    def columns(self, record: pa.StructType) -> pa.StructType:
        """Return the table's columns beside ``pulsar``, or beside those of messages.

        Args:
            record: the fields of the messages' records; none for a table of messages.

        Raises:
            SetupError: the condition, the query or the function does not fit the messages.
        """
        columns = record
        if self._condition is not None:
            self._condition.columns(self._seen(record))
        if self._query is not None:
            columns = self._without_pulsar(self._query.columns(self._seen(record)))
        elif self._function is not None:
            columns = self._columns_of_function(record)
        check_names(columns, f"{self._table.section} sql" if self._query is not None else self._table.section)
        if self._computed is not None:
            columns = pa.struct([*columns, *self._computed.columns(self._seen(columns))])
            check_names(columns, f"{self._table.section} partition_by")
        return self._checked(columns)

    def apply(
        self, rows: pa.RecordBatch, columns: pa.StructType
    ) -> tuple[tuple[pa.RecordBatch, list[Misfit]], NDArray[np.int64]]:
        """Return the rows of the table for rows of messages or records.

        Args:
            columns: the table's columns, as ``columns`` has them.

        Returns:
            The rows, and the messages of which a value cannot be computed; and the numbers of the
            messages that the table takes.
        """
        numbers = np.arange(rows.num_rows)
        misfits: list[Misfit] = []
        if self._condition is not None:
            answer, misfits = self._answer(self._condition, rows)
            rows, numbers = _chosen(rows, answer.rows), answer.rows
        taken = np.union1d(numbers, np.array([misfit.row for misfit in misfits], dtype=np.int64))
        for step in self._steps():
            rows, kept, more = step(rows, columns)
            misfits += [Misfit(int(numbers[misfit.row]), misfit.reason, misfit.detail) for misfit in more]
            numbers = numbers[kept]
        return (rows, misfits), taken

    def _steps(self) -> Iterator[Callable[[pa.RecordBatch, pa.StructType], Transformed]]:
        if self._query is not None:
            yield self._select
        elif self._function is not None:
            yield self._call
        if self._computed is not None:
            yield self._compute

    def _select(self, rows: pa.RecordBatch, columns: pa.StructType) -> Transformed:
        assert self._query is not None
        answer, misfits = self._answer(self._query, rows)
        kept = _chosen(rows, answer.rows)
        return self._with_record(kept, answer, columns, misfits)

    def _call(self, rows: pa.RecordBatch, columns: pa.StructType) -> Transformed:
        answers, misfits = _halving(rows, lambda part, first: self._answer_of_function(part, first, columns))
        answer = _joined(answers, columns)
        return self._with_record(_chosen(rows, answer.rows), answer, columns, misfits)

    def _with_record(
        self, rows: pa.RecordBatch, answer: Answer, columns: pa.StructType, misfits: list[Misfit]
    ) -> Transformed:
        """Return rows with values in place of their records."""
        fitted = as_records(DecodedValues(answer.values), columns)
        arrays = [*(rows[field.name] for field in PULSAR_FIELDS), fitted.values]
        result = pa.RecordBatch.from_arrays(arrays, schema=rows_schema(columns))
        if not fitted.bad:
            return result, answer.rows, misfits
        bad = np.array(sorted(fitted.bad))
        misfits += [Misfit(int(answer.rows[row]), TRANSFORM_FAILED, fitted.bad[row]) for row in bad.tolist()]
        fits = np.setdiff1d(np.arange(result.num_rows), bad)
        return result.take(pa.array(fits)), answer.rows[fits], misfits

    def _compute(self, rows: pa.RecordBatch, columns: pa.StructType) -> Transformed:
        assert self._computed is not None
        answer, misfits = self._answer(self._computed, rows)
        kept = _chosen(rows, answer.rows)
        values = dict(zip(answer.values.type.names, answer.values.flatten(), strict=True))
        record = record_of(rows.schema)
        if record is None:
            arrays = [*kept.columns, *(values[field.name].cast(field.type) for field in columns)]
            return pa.RecordBatch.from_arrays(arrays, schema=messages_schema(columns)), answer.rows, misfits
        known = dict(zip(record.names, kept[RECORD_COLUMN].flatten(), strict=True))
        parts = [values[field.name] if field.name in values else known[field.name] for field in columns]
        structs = pa.StructArray.from_arrays(
            [part.cast(field.type) for part, field in zip(parts, columns, strict=True)], fields=list(columns)
        )
        arrays = [*(kept[field.name] for field in PULSAR_FIELDS), structs]
        return pa.RecordBatch.from_arrays(arrays, schema=rows_schema(columns)), answer.rows, misfits

    def _answer(self, query: RowQuery, rows: pa.RecordBatch) -> tuple[Answer, list[Misfit]]:
        """Run a query; messages of which a value cannot be computed are left out."""
        columns = self._without_pulsar(query.columns(_as_file(rows.slice(0, 0)).schema))

        def run(part: pa.RecordBatch, first: int) -> Answer:
            answer = query.of(_as_file(part), columns)
            return Answer(answer.values, answer.rows + first)

        answers, misfits = _halving(rows, run)
        return _joined(answers, columns), misfits

    def _answer_of_function(self, part: pa.RecordBatch, first: int, columns: pa.StructType) -> Answer:
        result = self._called(_as_file(part))
        positions = [part[name].to_numpy() for name in _POSITION]
        pulsar = result[PULSAR_COLUMN]
        wanted = [pulsar.field(name).to_numpy(zero_copy_only=False) for name in _POSITION]
        rows = _places(np.stack(wanted, axis=1), np.stack(positions, axis=1))
        if rows is None:
            raise ValueError("the function does not keep each row once, in the order of the batch")
        names = [field.name for field in columns if field.name in result.schema.names]
        values = [result[name].cast(table_type(result[name].type)) for name in names]
        return Answer(pa.StructArray.from_arrays(values, names=names), rows + first)

    def _columns_of_function(self, record: pa.StructType) -> pa.StructType:
        nothing = pa.RecordBatch.from_pylist([], schema=self._seen(record))
        try:
            result = self._called(nothing)
        except ValueError as error:
            raise SetupError(
                f"{self._table.section} function fails for a batch without rows, by which its columns are found: {error}"
            ) from None
        fields = []
        for field in result.schema:
            if field.name == PULSAR_COLUMN:
                continue
            kind = table_type(field.type)
            if kind is None:
                raise SetupError(
                    f"the column {field.name} of {self._table.section} function is {field.type}, which no table can have"
                )
            fields.append(pa.field(field.name, kind))
        return pa.struct(fields)

    def _called(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Call the function.

        Raises:
            ValueError: it fails, or does not return what it should.
        """
        assert self._function is not None
        try:
            result = self._function(batch)
        except Exception as error:  # whatever a user's code raises
            raise ValueError(first_line(error)) from None
        if not isinstance(result, pa.RecordBatch):
            raise ValueError(f"the function returns a {type(result).__name__} and no record batch of Arrow")
        names = result.schema.names
        if PULSAR_COLUMN not in names or result[PULSAR_COLUMN].type != batch[PULSAR_COLUMN].type:
            raise ValueError(f"the function does not keep the column {PULSAR_COLUMN}")
        return result

    def _without_pulsar(self, columns: pa.StructType) -> pa.StructType:
        """Return the columns of a query without ``pulsar``, which stays beside them as it is.

        Raises:
            SetupError: the query makes another column of that name.
        """
        for field in columns:
            if field.name.lower() == PULSAR_COLUMN and not field.type.equals(_PULSAR):
                raise SetupError(
                    f"{self._table.section} sql has a column {field.name}, and the table keeps what is Pulsar's in a column of that "
                    "name; name it otherwise"
                )
        return pa.struct([field for field in columns if field.name.lower() != PULSAR_COLUMN])

    def _seen(self, columns: pa.StructType) -> pa.Schema:
        """Return the columns that queries and functions see."""
        return _as_file(_no_rows(self._table.is_of_records, columns)).schema

    def _checked(self, columns: pa.StructType) -> pa.StructType:
        """Return the columns, if the table can be partitioned by those that it should be by.

        Raises:
            SetupError: it cannot.
        """
        known = {
            field.name: field.type for field in (columns if self._table.is_of_records else messages_schema(columns))
        }
        for name in self._table.partition_columns:
            if name not in known:
                raise SetupError(f"{self._table.section} partition_by names {name}, and the table has no such column")
            if not _is_partition_type(known[name]):
                raise SetupError(
                    f"{self._table.section} partition_by names {name}, which is {known[name]}; a table is partitioned by texts, whole "
                    "numbers, dates and flags"
                )
        return columns


def united_columns(known: pa.StructType, columns: pa.StructType, section: str) -> pa.StructType:
    """Return the columns of a table with those that a query or a function adds.

    Raises:
        SetupError: a column is there with another type.
    """
    by_name = {field.name.lower(): field.type for field in known}
    for field in columns:
        there = by_name.get(field.name.lower(), field.type)
        if not _same_kind(there, field.type):
            raise SetupError(
                f"the column {field.name} of {section} is {field.type}, and the table has it as {there}; cast it, or name it otherwise"
            )
    return united(known, columns)


def _same_kind(one: pa.DataType, other: pa.DataType) -> bool:
    """Return whether values of the one type may be in a column of the other."""
    numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    if any(is_number(one) for is_number in numbers):
        return any(is_number(other) for is_number in numbers)
    nested = (pa.types.is_struct, pa.types.is_list, pa.types.is_map)
    if any(is_nested(one) for is_nested in nested):
        return any(is_nested(one) and is_nested(other) for is_nested in nested)
    return bool(one.equals(other))


def _is_partition_type(kind: pa.DataType) -> bool:
    is_plain = pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_date(kind)
    return bool(is_plain or pa.types.is_boolean(kind))


def _no_rows(is_of_records: bool, columns: pa.StructType) -> pa.RecordBatch:
    rows = rows_schema(columns) if is_of_records else messages_schema(columns)
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in rows], schema=rows)


def _as_file(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows in the columns of the table's files."""
    if record_of(rows.schema) is None:
        return rows
    batches = to_file(pa.Table.from_batches([rows])).combine_chunks().to_batches()
    return batches[0] if batches else _empty(to_file(pa.Table.from_batches([rows])).schema)


def _empty(columns: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in columns], schema=columns)


def _chosen(rows: pa.RecordBatch, numbers: NDArray[np.int64]) -> pa.RecordBatch:
    return rows if len(numbers) == rows.num_rows else rows.take(pa.array(numbers))


def _halving(
    rows: pa.RecordBatch, run: Callable[[pa.RecordBatch, int], Answer], first: int = 0
) -> tuple[list[Answer], list[Misfit]]:
    """Run a query over a batch; if it fails for all rows together, halve them until it fails for
    single ones.

    Args:
        run: takes rows, and the number of the first of them.
    """
    try:
        return [run(rows, first)], []
    except ValueError as error:
        if rows.num_rows <= 1:
            return [], [Misfit(first, TRANSFORM_FAILED, str(error))] * rows.num_rows
    half = rows.num_rows // 2
    answers, misfits = _halving(rows.slice(0, half), run, first)
    more, more_misfits = _halving(rows.slice(half), run, first + half)
    return answers + more, misfits + more_misfits


def _joined(answers: list[Answer], columns: pa.StructType) -> Answer:
    if len(answers) == 1:
        return answers[0]
    values = [answer.values for answer in answers]
    kind = values[0].type if values else columns
    rows = [answer.rows for answer in answers]
    return Answer(pa.concat_arrays([pa.nulls(0, kind), *values]), np.concatenate([np.empty(0, dtype=np.int64), *rows]))


def _places(wanted: NDArray[np.int64], known: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the row of each wanted position among the known ones; None if they are not some of
    those, in their order. Both rise.
    """
    packed = [np.ascontiguousarray(keys.astype(">i8")).view("S24").reshape(-1) for keys in (wanted, known)]
    rows = np.searchsorted(packed[1], packed[0])
    if len(rows) and (rows[-1] >= len(known) or (np.diff(rows) <= 0).any() or (packed[1][rows] != packed[0]).any()):
        return None
    return rows.astype(np.int64)
