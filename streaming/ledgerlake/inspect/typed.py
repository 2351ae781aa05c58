"""Typed values of messages that have been read already: of ``messages()``, or of the table, which
keeps the bytes.

The table holds what was published, so a schema that comes later, or is mended, is applied to
everything in it.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from ledgerlake.decode import schema
from ledgerlake.decode.typed import type_values, typed_columns
from ledgerlake.source.value_schemas import find_value_schema, schemas_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

    from ledgerlake.options.config import Config
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.wire.value_schema import ValueSchema


def typed(rows: DataFrame, config: Config, *, keep_bytes: bool = False) -> DataFrame:
    """The same rows with ``value`` by the newest schema of the configuration's topics, see
    ``decode.typed``.

    Args:
        rows: with columns of the table ``messages``: at least ``topic``, ``key``, ``key_bytes``,
            ``schema_version`` and ``value``.
        keep_bytes: every message's bytes in ``value_bytes``, and not only of what has no typed
            value.

    Raises:
        UsageError: the topics have different schemas.
        SetupError: no column can hold their values; says what is in the way.
        BrokerError, TransportError: the broker cannot be asked.
    """
    options = config.source
    reader = find_value_schema(options)
    columns = typed_columns(to_arrow_schema(rows.schema, timezone="UTC"), reader)
    return rows.mapInArrow(
        lambda batches: _type_batches(batches, options, reader, keep_bytes), from_arrow_schema(columns)
    )


def _type_batches(
    batches: Iterator[pa.RecordBatch], options: SourceOptions, reader: ValueSchema, keep_bytes: bool
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        start = 0
        for topic, found in groupby(batch["topic"].to_pylist()):
            count = sum(1 for _ in found)
            part = _as_bytes(batch.slice(start, count))
            yield type_values(part, reader, schemas_of(options.client, topic), keep_bytes=keep_bytes)
            start += count


def _as_bytes(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The columns that are read here with the offsets that we count with, whatever Spark handed
    over.
    """
    for name in ("value", "key_bytes", "schema_version", "key"):
        wanted = schema.MESSAGES.field(name).type
        if rows[name].type != wanted:
            rows = rows.set_column(rows.schema.get_field_index(name), name, rows[name].cast(wanted))
    return rows
