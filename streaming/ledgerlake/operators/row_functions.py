"""A user's function from Arrow batch to Arrow batch, in the form of a query of rows (see
``values.row_query``): its columns, and its answer with the messages for which it fails.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ledgerlake.decode.columns import first_line
from ledgerlake.errors import SetupError
from ledgerlake.outside import Unreadable, reading
from ledgerlake.runtime.plugins import load
from ledgerlake.values.record_columns import PULSAR_COLUMN
from ledgerlake.values.row_query import Answer, joined, table_type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_POSITION = ("ledger_id", "entry_id", "batch_index")


@lru_cache(maxsize=100)
def row_function(path: str, where: str) -> RowFunction:
    """Return a function; one that this process has had is not asked for its columns again.

    Raises:
        SetupError: as ``RowFunction``.
    """
    return RowFunction(path, where)


class RowFunction:
    """The function of a table.

    Args:
        path: its name, as ``package.module:name``.
        where: the name of the option, for errors.

    Raises:
        SetupError: it cannot be imported.
    """

    def __init__(self, path: str, where: str) -> None:
        self._where = where
        self._function = load(path)
        self._columns: dict[pa.Schema, pa.StructType] = {}

    def columns(self, messages: pa.Schema) -> pa.StructType:
        """Return the columns of the answer, without ``pulsar``.

        Raises:
            SetupError: it fails for a batch without rows, or returns what it should not.
        """
        if messages not in self._columns:
            nothing = pa.RecordBatch.from_arrays(
                [pa.nulls(0, field.type) for field in messages], schema=messages
            )
            try:
                result = self._call(nothing)
            except ValueError as error:
                raise SetupError(
                    f"{self._where} fails for a batch without rows, by which its columns are "
                    f"found: {error}"
                ) from None
            self._columns[messages] = pa.struct(list(self._fields(result.schema)))
        return self._columns[messages]

    def of(self, messages: pa.RecordBatch) -> Answer:
        """Run the function over a batch; if it fails for all messages together, halve them until it
        fails for single ones.

        Raises:
            SetupError: as ``columns``.
        """
        columns = self.columns(messages.schema)
        try:
            return self._answer(messages, columns)
        except ValueError as error:
            if messages.num_rows <= 1:
                return Answer(pa.array([], columns), np.empty(0, dtype=np.int64), {0: str(error)})
        half = messages.num_rows // 2
        return joined(self.of(messages.slice(0, half)), self.of(messages.slice(half)), half)

    def _answer(self, messages: pa.RecordBatch, columns: pa.StructType) -> Answer:
        result = self._call(messages)
        rows = _places(_positions(result), _positions(messages))
        if rows is None:
            raise ValueError("the function does not keep each row once, in the order of the batch")
        unknown = set(result.schema.names) - {PULSAR_COLUMN, *(field.name for field in columns)}
        if unknown:
            raise ValueError(
                f"the function returns a column {min(unknown)}, and did not for a batch without "
                "rows"
            )
        values = [self._values(result, field) for field in columns]
        struct = (
            pa.StructArray.from_arrays(values, fields=list(columns))
            if values
            else pa.array([{}] * len(rows), columns)
        )
        return Answer(struct, rows)

    @staticmethod
    def _values(result: pa.RecordBatch, field: pa.Field) -> pa.Array:
        """Return a column of the result in the type that it has without rows."""
        if field.name not in result.schema.names:
            return pa.nulls(result.num_rows, field.type)
        try:
            with reading():
                column = result[field.name].cast(field.type)
                column.validate(full=True)
        except Unreadable as failure:
            raise ValueError(
                f"the column {field.name} of the function: {first_line(failure.error)}"
            ) from None
        return column

    def _fields(self, result: pa.Schema) -> Iterator[pa.Field]:
        for field in result:
            if field.name == PULSAR_COLUMN:
                continue
            kind = pa.string() if pa.types.is_large_string(field.type) else table_type(field.type)
            if kind is None:
                raise SetupError(
                    f"the column {field.name} of {self._where} is {field.type}, which no table can "
                    "have"
                )
            yield pa.field(field.name, kind)

    def _call(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Call the function.

        Raises:
            ValueError: it fails, or does not return what it should.
        """
        try:
            result: Any = self._function(batch)
        except (Exception, SystemExit) as error:  # whatever a user's code raises
            raise ValueError(first_line(error)) from None
        if not isinstance(result, pa.RecordBatch):
            raise ValueError(
                f"the function returns a {type(result).__name__} and no record batch of Arrow"
            )
        names = result.schema.names
        if (
            names.count(PULSAR_COLUMN) != 1
            or result[PULSAR_COLUMN].type != batch[PULSAR_COLUMN].type
        ):
            raise ValueError(f"the function does not keep the column {PULSAR_COLUMN}")
        if len(set(names)) < len(names):
            raise ValueError("the function returns a column twice")
        return result


def _positions(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Return the position of each row.

    Raises:
        ValueError: a row has none.
    """
    pulsar = batch[PULSAR_COLUMN]
    columns = [pulsar.field(name) for name in _POSITION]
    if pulsar.null_count or any(column.null_count for column in columns):
        raise ValueError(f"the function returns a row without {PULSAR_COLUMN}")
    return np.stack([column.to_numpy(zero_copy_only=False) for column in columns], axis=1)


def _places(wanted: NDArray[np.int64], known: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the row of each wanted position among the known ones; None if they are not some of
    those, in their order, or if one is known several times, as that of a message that repeats, and
    not all are wanted.
    """
    if np.array_equal(wanted, known):
        return np.arange(len(known))
    if not len(known):
        return None
    packed = [
        np.ascontiguousarray((keys + 1).astype(">i8")).view("S24").reshape(-1)
        for keys in (wanted, known)
    ]
    # Due messages come in the order in which they are due.
    order = np.argsort(packed[1], kind="stable")
    first, behind = (
        np.searchsorted(packed[1], packed[0], side, order) for side in ("left", "right")
    )
    if (behind != first + 1).any() or (np.diff(order[first]) <= 0).any():
        return None
    return order[first].astype(np.int64)
