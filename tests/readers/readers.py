"""The readers of a table: each one returns its rows, and the numbers of the rows that meet a
condition.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import QueryBuilder

from ledgerlake.table.open_table import open_delta
from tests.readers.model import NUMBER
from tests.readers.recipes import EPOCH

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.stored.places import Place
    from tests.readers.model import Row

_OPERATORS = {"=": operator.eq, "<": operator.lt, ">=": operator.ge}


@dataclass(frozen=True)
class Condition:
    """A condition on one column; ``values`` has one value, or the values of ``in``."""

    column: str
    kind: str
    operator: str
    values: tuple[Any, ...] = ()

    def holds(self, row: Row) -> bool:
        value = row[self.column]
        if self.operator == "is null":
            return value is None
        if value is None:
            return False
        if self.operator == "in":
            return value in self.values
        return bool(_OPERATORS[self.operator](value, self.values[0]))


class Reader:
    """A reader of one table; ``outer`` is the column of Pulsar's columns, empty if it has none."""

    name = ""

    def __init__(self, place: Place, outer: str) -> None:
        self.place, self.outer = place, outer

    def rows(self, columns: list[str]) -> list[Row]:
        """Return the rows, in the order of their numbers."""
        raise NotImplementedError

    def numbers(self, condition: Condition) -> list[int]:
        """Return the numbers of the rows that meet a condition, in order."""
        raise NotImplementedError

    def is_inside(self, column: str) -> bool:
        return bool(self.outer) and column in (NUMBER, "key", "event_time", "properties", "is_null")


class PyArrow(Reader):
    """The dataset of delta-rs, which DuckDB reads too."""

    name = "pyarrow"

    def __init__(self, place: Place, outer: str) -> None:
        super().__init__(place, outer)
        self.dataset = open_delta(place).to_pyarrow_dataset()

    def rows(self, columns: list[str]) -> list[Row]:
        return plain(self.dataset.to_table(columns={name: self._field(name) for name in columns}))

    def numbers(self, condition: Condition) -> list[int]:
        field = self._field(condition.column)
        values = [pa.scalar(value, ARROW[condition.kind]) for value in condition.values]
        if condition.operator == "is null":
            chosen = field.is_null()
        elif condition.operator == "in":
            chosen = field.isin(pa.array(condition.values, ARROW[condition.kind]))
        else:
            chosen = _OPERATORS[condition.operator](field, values[0])
        found = self.dataset.to_table(columns={NUMBER: self._field(NUMBER)}, filter=chosen)
        return sorted(found[NUMBER].to_pylist())

    def _field(self, name: str) -> pc.Expression:
        return pc.field(self.outer, name) if self.is_inside(name) else pc.field(name)


class _Sql(Reader):
    """A reader by SQL; ``run`` returns the answer of a query over the relation ``t``."""

    def __init__(self, place: Place, outer: str) -> None:
        super().__init__(place, outer)
        self.run: Callable[[str], pa.Table] = self.connect()

    def connect(self) -> Callable[[str], pa.Table]:
        raise NotImplementedError

    def literal(self, value: Any, kind: str) -> str:
        raise NotImplementedError

    def rows(self, columns: list[str]) -> list[Row]:
        return plain(self.run(f"select {', '.join(map(self._named, columns))} from t"))

    def numbers(self, condition: Condition) -> list[int]:
        literals = ", ".join(self.literal(value, condition.kind) for value in condition.values)
        right = f"({literals})" if condition.operator == "in" else literals
        where = f"{self.path(condition.column)} {condition.operator} {right}"
        return sorted(
            self.run(f"select {self._named(NUMBER)} from t where {where}")[NUMBER].to_pylist()
        )

    def path(self, name: str) -> str:
        return f"{self.outer}.{name}" if self.is_inside(name) else name

    def _named(self, name: str) -> str:
        return f"{self.path(name)} as {name}"


class DuckDb(_Sql):
    """DuckDB over the dataset of delta-rs."""

    name = "duckdb"

    def connect(self) -> Callable[[str], pa.Table]:
        dataset = open_delta(self.place).to_pyarrow_dataset()
        connection = duckdb.connect()
        connection.register("t", dataset)
        return lambda text: connection.sql(text).to_arrow_table()

    def literal(self, value: Any, kind: str) -> str:
        if kind == "date":
            return f"make_date({value.year}, {value.month}, {value.day})"
        if isinstance(value, datetime):
            made = "make_timestamptz" if value.tzinfo else "make_timestamp"
            return f"{made}({microseconds(value)})"
        return _literal(value)


class DeltaRs(_Sql):
    """The SQL of delta-rs."""

    name = "delta-rs"

    def connect(self) -> Callable[[str], pa.Table]:
        builder = QueryBuilder().register("t", open_delta(self.place))
        return lambda text: pa.table(builder.execute(text).read_all())

    def path(self, name: str) -> str:
        return f"{self.outer}['{name}']" if self.is_inside(name) else name

    def literal(self, value: Any, kind: str) -> str:
        if kind == "date":
            return f"arrow_cast({(value - date(1970, 1, 1)).days}, 'Date32')"
        if isinstance(value, datetime):
            zone = 'Some("UTC")' if value.tzinfo else "None"
            return f"arrow_cast({microseconds(value)}, 'Timestamp(Microsecond, {zone})')"
        return _literal(value)


class Polars(Reader):
    name = "polars"

    def __init__(self, place: Place, outer: str) -> None:
        super().__init__(place, outer)
        self.frame = pl.scan_delta(place.root)

    def rows(self, columns: list[str]) -> list[Row]:
        chosen = [self._field(name).alias(name) for name in columns]
        return plain(self.frame.select(chosen).collect().to_arrow())

    def numbers(self, condition: Condition) -> list[int]:
        field = pl.col(condition.column)
        values = [pl.lit(value, POLARS[condition.kind]) for value in condition.values]
        if condition.operator == "is null":
            chosen = field.is_null()
        elif condition.operator == "in":
            chosen = field.is_in(
                pl.Series(condition.values, dtype=POLARS[condition.kind]).implode()
            )
        else:
            chosen = _OPERATORS[condition.operator](field, values[0])
        # Polars 2.1 fails at a filter by a field of a struct with statistics.
        frame = self.frame.select(
            [self._field(name).alias(name) for name in dict.fromkeys((NUMBER, condition.column))]
        )
        found = frame.filter(chosen).select(NUMBER).collect()
        return sorted(found[NUMBER].to_list())

    def _field(self, name: str) -> pl.Expr:
        return pl.col(self.outer).struct.field(name) if self.is_inside(name) else pl.col(name)


ARROW: dict[str, pa.DataType] = {
    "int": pa.int32(),
    "long": pa.int64(),
    "string": pa.string(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "timestamp-millis": pa.timestamp("us", "UTC"),
    "local-timestamp-micros": pa.timestamp("us"),
}
POLARS: dict[str, Any] = {
    "int": pl.Int32,
    "long": pl.Int64,
    "string": pl.String,
    "double": pl.Float64,
    "boolean": pl.Boolean,
    "date": pl.Date,
    "timestamp-micros": pl.Datetime("us", "UTC"),
    "timestamp-millis": pl.Datetime("us", "UTC"),
    "local-timestamp-micros": pl.Datetime("us"),
}


def microseconds(value: datetime) -> int:
    """Microseconds since 1970."""
    return (value.replace(tzinfo=timezone.utc) - EPOCH) // timedelta(microseconds=1)


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, bool):
        return str(value).lower()
    return f"cast({value!r} as double)" if isinstance(value, float) else str(value)


def plain(table: pa.Table) -> list[Row]:
    """Rows as the model has them, in the order of their numbers."""
    rows = table.to_pylist()
    for row in rows:
        if row.get("properties") is not None:
            pairs = [
                tuple(pair.values()) if isinstance(pair, dict) else pair
                for pair in row["properties"]
            ]
            # A key that is there twice would be seen by one reader and not by the other.
            row["properties"] = dict(pairs) if len(dict(pairs)) == len(pairs) else pairs
    return sorted(rows, key=lambda row: row[NUMBER])


# A table with deletion vectors has no dataset.
OF_LATEST: list[type[Reader]] = [DeltaRs, Polars]
READERS: list[type[Reader]] = [PyArrow, DuckDb, *OF_LATEST]
