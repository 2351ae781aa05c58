"""Types the values of messages that were read already: from ``messages()``, or from the table,
which keeps the bytes.

The table has the published bytes, so a new or corrected schema applies to all of its rows.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import groupby
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from ledgerlake.decode import schema
from ledgerlake.source.value_schemas import find_value_schema, schemas_of
from ledgerlake.values.typed import typed_columns, typed_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

    from ledgerlake.options.config import Config
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.wire.value_schema import ValueSchema


def typed(rows: DataFrame, config: Config, *, keep_bytes: bool = False) -> DataFrame:
    """Return the rows with ``value`` typed by the newest schema of the configuration's topics, see
    ``values.typed``.

    Args:
        rows: with columns of the table ``messages``: at least ``topic``, ``key``, ``key_bytes``,
            ``schema_version`` and ``value``.
        keep_bytes: put the bytes of every message into ``value_bytes``, and not only of those
            without a typed value.

    Raises:
        UsageError: the topics have different schemas.
        SetupError: no column can have their values; the message gives the reason.
        BrokerError, TransportError: the broker cannot be asked.
    """
    options = config.source
    reader = find_value_schema(options)
    columns = typed_columns(to_arrow_schema(rows.schema, timezone="UTC"), reader)
    return rows.mapInArrow(
        lambda batches: _type_batches(batches, options, reader, keep_bytes),
        from_arrow_schema(columns),
    )


def _type_batches(
    batches: Iterator[pa.RecordBatch], options: SourceOptions, reader: ValueSchema, keep_bytes: bool
) -> Iterator[pa.RecordBatch]:
    schemas = cache(partial(schemas_of, options.client))
    for batch in batches:
        start = 0
        for topic, group in groupby(batch["topic"].to_pylist()):
            count = sum(1 for _ in group)
            rows = _as_bytes(batch.slice(start, count))
            yield from typed_parts(rows, reader, schemas(topic), keep_bytes=keep_bytes)
            start += count


def _as_bytes(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows whose binary columns have 32-bit offsets, which the decoder needs; Spark may pass
    larger ones.
    """
    for name in ("value", "key_bytes", "schema_version", "key"):
        column_type = schema.MESSAGES.field(name).type
        if rows[name].type != column_type:
            rows = rows.set_column(
                rows.schema.get_field_index(name), name, rows[name].cast(column_type)
            )
    return rows
