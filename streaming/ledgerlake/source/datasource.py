"""What Spark registers: the format's name, its columns by view, and its readers.

Construction is cheap and opens nothing: Spark makes readers in short-lived processes only to pickle them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.pandas.types import from_arrow_schema

from ledgerlake.decode import schema
from ledgerlake.source.options import parse_options

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_ARROW_SCHEMAS = {"messages": schema.VIEW, "entries": schema.ENTRIES, "bundles": schema.BUNDLES}


class LedgerlakeDataSource(DataSource):  # type: ignore[misc]
    """``format("ledgerlake")``: see ``options`` for what can be set."""

    @classmethod
    def name(cls) -> str:
        return "ledgerlake"

    def schema(self) -> StructType:
        return from_arrow_schema(_ARROW_SCHEMAS[parse_options(self.options).view])

    def reader(self, schema: StructType) -> DataSourceReader:
        from ledgerlake.source.batch_reader import LedgerlakeBatchReader

        return LedgerlakeBatchReader(parse_options(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from ledgerlake.source.stream_reader import LedgerlakeStreamReader

        return LedgerlakeStreamReader(parse_options(self.options))
