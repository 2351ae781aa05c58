"""What Spark registers for reading: the format's name, its columns by view, and its readers.

Construction is cheap and opens nothing: Spark makes readers in short-lived processes only to pickle
them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.pandas.types import from_arrow_schema

from ledgerlake.decode import schema
from ledgerlake.decode.compat import compat_columns
from ledgerlake.decode.typed import typed_columns
from ledgerlake.options.source_options import parse_options
from ledgerlake.source.value_schemas import find_value_schema, note_schema, noted_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from ledgerlake.options.source_options import SourceOptions

_ARROW_SCHEMAS = {"entries": schema.ENTRIES, "bundles": schema.BUNDLES}


class ReadingDataSource(DataSource):  # type: ignore[misc]
    """``format("ledgerlake")`` for reading: see ``options`` for what can be set."""

    @classmethod
    def name(cls) -> str:
        return "ledgerlake"

    def schema(self) -> StructType:
        options = parse_options(self.options)
        if options.view not in ("messages", "compat"):
            return from_arrow_schema(_ARROW_SCHEMAS[options.view])
        found = find_value_schema(options) if options.is_typed else None
        columns = schema.VIEW if found is None else typed_columns(schema.VIEW, found)
        shown = from_arrow_schema(compat_columns(columns) if options.view == "compat" else columns)
        return shown if found is None else note_schema(shown, found)

    def reader(self, schema: StructType) -> DataSourceReader:
        from ledgerlake.source.batch_reader import LedgerlakeBatchReader

        return LedgerlakeBatchReader(self._options_with(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from ledgerlake.source.stream_reader import LedgerlakeStreamReader

        return LedgerlakeStreamReader(self._options_with(schema))

    def _options_with(self, schema: StructType) -> SourceOptions:
        """The options of a read, with what its columns say of the values."""
        options = parse_options(self.options)
        if not options.is_typed:
            return options
        return replace(options, value_schema=noted_schema(schema) or find_value_schema(options))
