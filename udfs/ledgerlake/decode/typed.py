"""Messages with typed values: the column ``value`` has the type of the topic's schema.

Two columns are added:

    value_bytes     the bytes of messages without a typed value, which are chunks and values that
                    do not fit their schema; on request, of every message
    reject_reason   of a value that does not fit: ``undecodable_value``, or ``unknown_schema`` for
                    a version that the registry does not have
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.decode.columns import DecodedValues, Encoded, rows_at_once
from ledgerlake.decode.values import column_type, decoder
from ledgerlake.errors import SetupError
from ledgerlake.wire.value_schema import ValueSchema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

UNDECODABLE_VALUE = "undecodable_value"
UNKNOWN_SCHEMA = "unknown_schema"

# Returns the schema of a message's version; None if the registry has no such version.
SchemaOfVersion = Callable[[bytes], "ValueSchema | None"]


def typed_columns(columns: pa.Schema, reader: ValueSchema) -> pa.Schema:
    """Return the columns of messages whose values are read by a schema.

    Raises:
        SetupError: no column can hold the values.
    """
    fields = []
    for field in columns:
        fields.append(pa.field("value", column_type(reader)) if field.name == "value" else field)
        if field.name == "value":
            fields.append(pa.field("value_bytes", pa.binary()))
    if "reject_reason" not in columns.names:
        fields.append(pa.field("reject_reason", pa.string()))
    return pa.schema(fields)


def typed_parts(
    messages: pa.RecordBatch, reader: ValueSchema, of_version: SchemaOfVersion, *, keep_bytes: bool
) -> Iterator[pa.RecordBatch]:
    """Yield messages as ``type_values`` returns them, in parts of limited size; at least one."""
    step = rows_at_once(column_type(reader))
    for start in range(0, max(messages.num_rows, 1), step):
        yield type_values(messages.slice(start, step), reader, of_version, keep_bytes=keep_bytes)


def type_values(
    messages: pa.RecordBatch, reader: ValueSchema, of_version: SchemaOfVersion, *, keep_bytes: bool
) -> pa.RecordBatch:
    """Return messages of one topic with ``typed_columns``. A message without a schema version is
    read by the reader's schema.

    Args:
        messages: any columns with ``value``, ``key``, ``key_bytes`` and ``schema_version``; rows
            with a ``chunk_uuid`` or a ``reject_reason``, if there are such columns, are no
            messages.
    """
    columns = dict(zip(messages.schema.names, messages.columns, strict=True))
    columns.setdefault("reject_reason", pa.nulls(messages.num_rows, pa.string()))
    is_message = pc.is_null(columns["reject_reason"])
    if "chunk_uuid" in columns:
        is_message = pc.and_(is_message, pc.is_null(columns["chunk_uuid"]))
    keys = pc.coalesce(columns["key_bytes"], columns["key"].cast(pa.binary()))
    encoded = Encoded(pc.if_else(is_message, columns["value"], None), keys)
    reasons: dict[int, str] = {}
    values = _by_version(columns["schema_version"], encoded, reader, of_version, reasons)
    keeps = np.full(messages.num_rows, keep_bytes)
    keeps[list(reasons)] = True
    columns["value_bytes"] = pc.if_else(pc.or_(pa.array(keeps), pc.invert(is_message)), columns["value"], None)
    columns["value"] = values
    if reasons:
        new_reasons = pa.array([reasons.get(row) for row in range(messages.num_rows)], pa.string())
        columns["reject_reason"] = pc.coalesce(columns["reject_reason"], new_reasons)
    target = typed_columns(messages.schema, reader)
    return pa.RecordBatch.from_arrays([columns[name] for name in target.names], schema=target)


def _by_version(
    versions: pa.Array, encoded: Encoded, reader: ValueSchema, of_version: SchemaOfVersion, reasons: dict[int, str]
) -> pa.Array:
    """Return all values; add to ``reasons`` those of messages that should have a value and do not."""
    codes = versions.dictionary_encode(null_encoding="encode")
    names, numbers = codes.dictionary.to_pylist(), codes.indices.to_numpy()
    target = column_type(reader)
    pieces = [pa.nulls(0, target)]
    places: list[NDArray[np.int64]] = []
    for number, name in enumerate(names):
        rows = np.flatnonzero(numbers == number)
        part = encoded if len(names) == 1 else _take(encoded, rows)
        found, reason = _decode(part, reader if not name else of_version(name), reader)
        reasons.update((int(rows[row]), reason) for row in found.bad)
        pieces.append(found.values)
        places.append(rows)
    together = pa.concat_arrays(pieces)
    if len(names) < 2:
        return together
    back = np.empty(len(versions), dtype=np.int64)
    back[np.concatenate(places)] = np.arange(len(versions))
    return together.take(pa.array(back))


def _take(encoded: Encoded, rows: NDArray[np.int64]) -> Encoded:
    keys = None if encoded.keys is None else encoded.keys.take(pa.array(rows))
    return Encoded(encoded.payloads.take(pa.array(rows)), keys)


def _decode(encoded: Encoded, writer: ValueSchema | None, reader: ValueSchema) -> tuple[DecodedValues, str]:
    """Return the values of one version, and the reasons of those that cannot be decoded."""
    if writer is not None:
        try:
            return decoder(writer, reader)(encoded), UNDECODABLE_VALUE
        except SetupError:
            # No value of this version can be read. The reader's own schema has a column, or the
            # read would not have begun.
            pass
    present = np.flatnonzero(encoded.payloads.is_valid().to_numpy(False)).tolist()
    nothing = pa.nulls(len(encoded.payloads), column_type(reader))
    return DecodedValues(nothing, dict.fromkeys(present, "")), UNDECODABLE_VALUE if writer else UNKNOWN_SCHEMA
