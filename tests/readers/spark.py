"""Spark as a reader of tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as f

from tests.readers.model import NUMBER
from tests.readers.readers import Reader, microseconds, plain

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

    from ledgerlake.stored.places import Place
    from tests.readers.model import Row
    from tests.readers.readers import Condition

_OPERATORS = {"=": "__eq__", "<": "__lt__", ">=": "__ge__"}


class Spark(Reader):
    name = "spark"

    def __init__(self, session: SparkSession, place: Place, outer: str) -> None:
        super().__init__(place, outer)
        self.frame = session.read.format("delta").load(place.root)

    def rows(self, columns: list[str]) -> list[Row]:
        return plain(
            self.frame.select(*(self._field(name).alias(name) for name in columns)).toArrow()
        )

    def numbers(self, condition: Condition) -> list[int]:
        field = self._field(condition.column)
        values = [self._literal(value, condition.kind) for value in condition.values]
        if condition.operator == "is null":
            chosen = field.isNull()
        elif condition.operator == "in":
            chosen = field.isin(values)
        else:
            chosen = getattr(field, _OPERATORS[condition.operator])(values[0])
        rows = self.frame.where(chosen).select(self._field(NUMBER).alias(NUMBER)).collect()
        return sorted(row[0] for row in rows)

    def _field(self, name: str) -> Column:
        return f.col(f"{self.outer}.{name}" if self.is_inside(name) else name)

    @staticmethod
    def _literal(value: Any, kind: str) -> Column:
        if kind == "date":
            return f.lit(value.isoformat()).cast("date")
        if "timestamp" in kind:
            moment = f.timestamp_micros(f.lit(microseconds(value)))
            return moment if value.tzinfo else moment.cast("timestamp_ntz")
        return f.lit(value)
