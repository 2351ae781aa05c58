"""The data source that Spark registers for reading: the format's name, its columns by view, and its
readers.

Construction is cheap and opens nothing, because Spark creates some readers only to pickle them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyspark
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.pandas.types import from_arrow_schema

from ledgerlake.decode import schema
from ledgerlake.decode.compat import compat_columns
from ledgerlake.errors import UsageError
from ledgerlake.options.source_options import parse_options
from ledgerlake.source.value_schemas import attach_schema, attached_schema, find_value_schema
from ledgerlake.values.typed import typed_columns

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from ledgerlake.options.source_options import SourceOptions


class ReadingDataSource(DataSource):  # type: ignore[misc]
    """``format("ledgerlake")`` for reading: see ``options`` for what can be set."""

    @classmethod
    def name(cls) -> str:
        return "ledgerlake"

    def schema(self) -> StructType:
        options = parse_options(self.options)
        if options.view == "entries":
            return from_arrow_schema(schema.ENTRIES)
        value_schema = find_value_schema(options) if options.is_typed else None
        arrow_schema = (
            schema.VIEW if value_schema is None else typed_columns(schema.VIEW, value_schema)
        )
        columns = from_arrow_schema(
            compat_columns(arrow_schema) if options.view == "compat" else arrow_schema
        )
        return columns if value_schema is None else attach_schema(columns, value_schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        from ledgerlake.source.batch_reader import LedgerlakeBatchReader

        return LedgerlakeBatchReader(self._options_with(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        try:
            from ledgerlake.source.stream_reader import LedgerlakeStreamReader
        except ModuleNotFoundError as error:
            if error.name != "pyspark.sql.streaming.datasource":
                raise
            # Spark before 4.2 asks for the end of a micro-batch without its start.
            raise UsageError(
                f"a streaming read needs Spark 4.2 or later, and this is {pyspark.__version__}; "
                "upgrade Spark, or read batches"
            ) from None

        return LedgerlakeStreamReader(self._options_with(schema))

    def _options_with(self, schema: StructType) -> SourceOptions:
        """Return the options of a read, with the schema of the values that its columns carry."""
        options = parse_options(self.options)
        if options.view == "compat":
            # The connectors fail by default, since these columns do not show that a message is left
            # out.
            options = parse_options({"cryptoFailureAction": "fail"} | dict(self.options))
        if not options.is_typed:
            return options
        return replace(options, value_schema=attached_schema(schema) or find_value_schema(options))
