"""Decoding of a DataFrame of stored entries, for users who keep raw entries and decode them later.

This is the only module of ``decode`` that imports PySpark.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from ledgerlake.decode import schema
from ledgerlake.decode.compat import as_compat, compat_columns
from ledgerlake.decode.messages import TopicPartition, decode_entries, rejects_as_view

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

_COLUMNS = ["topic", "partition", "ledger_id", "entry_id", "entry"]


def decode_messages(entries: DataFrame) -> DataFrame:
    """Return the messages of stored entries in the columns of ``schema.VIEW``; an entry that is not
    a message has a ``reject_reason``.

    Args:
        entries: rows of the source's ``view = entries``; ``topic``, ``partition``,
            ``ledger_id``, ``entry_id`` and ``entry`` are used.
    """
    return entries.select(*_COLUMNS).mapInArrow(_decode_batches, from_arrow_schema(schema.VIEW))


def compat(messages: DataFrame) -> DataFrame:
    """Return messages in the columns of the JVM connectors, see ``compat``.

    Args:
        messages: rows of the table ``messages``, of ``ledgerlake.api.messages`` or of the bare
            source, typed or not.
    """
    columns = compat_columns(to_arrow_schema(messages.schema, timezone="UTC"))
    return messages.mapInArrow(lambda batches: map(as_compat, batches), from_arrow_schema(columns))


def _decode_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for source, start, stop in _runs(batch):
            yield from _decode_run(batch.slice(start, stop - start), source)


def _runs(batch: pa.RecordBatch) -> Iterator[tuple[TopicPartition, int, int]]:
    """Yield runs of rows of one topic partition."""
    sources = zip(batch["topic"].to_pylist(), batch["partition"].to_pylist(), strict=True)
    start = 0
    for (topic, partition), rows in groupby(sources):
        stop = start + sum(1 for _ in rows)
        yield TopicPartition(topic, partition), start, stop
        start = stop


def _decode_run(rows: pa.RecordBatch, source: TopicPartition) -> Iterator[pa.RecordBatch]:
    ledger_ids, entry_ids = (
        rows[name].to_numpy().astype(np.int64) for name in ("ledger_id", "entry_id")
    )
    for decoded in decode_entries(rows["entry"].cast(pa.binary()), ledger_ids, entry_ids, source):
        yield decoded.messages
        if decoded.rejects.num_rows:
            yield rejects_as_view(decoded.rejects)
