"""Messages with typed values: the column ``value`` has the type of the topic's schema.

Two columns are added:

    value_bytes     the bytes of messages without a typed value, which are chunks and values that
                    do not fit their schema; on request, of every message
    reject_reason   of a value that does not fit: ``undecodable_value``; ``value_too_large`` if
                    it would take too much memory (see ``weights``); or ``unknown_schema`` for a
                    version that the registry does not have
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.decode.codes import codes_of
from ledgerlake.decode.columns import DecodedValues, Decoder, Encoded, halved
from ledgerlake.decode.times import with_python_times
from ledgerlake.decode.weights import cuts
from ledgerlake.errors import SetupError
from ledgerlake.reasons import UNDECODABLE_VALUE, UNKNOWN_SCHEMA, VALUE_TOO_LARGE
from ledgerlake.values.schemas import column_type, decoder
from ledgerlake.wire.value_schema import ValueSchema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


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
    weights = message_weights(messages, lambda version: _decoder(version, reader, of_version))
    for start, stop in cuts(weights) if messages.num_rows else [(0, 0)]:
        yield type_values(
            messages.slice(start, stop - start), reader, of_version, keep_bytes=keep_bytes
        )


def message_weights(
    messages: pa.RecordBatch, decoder_of: Callable[[bytes | None], Decoder | None]
) -> NDArray[np.int64]:
    """Return how many bytes each message takes if its value is decoded, with its own.

    Args:
        decoder_of: returns the decoder of a version; None if its values cannot be decoded.
    """
    encoded = encoded_of(messages)
    weights: NDArray[np.int64] = np.array(
        pc.fill_null(pc.binary_length(encoded.payloads), 0).to_numpy(), dtype=np.int64
    )
    for version, rows in by_version(messages["schema_version"]):
        decode = decoder_of(version)
        if decode is not None:
            more = decode.weigh(take(encoded, rows))
            # Most batches have one version, and rows by number take longer.
            weights = weights + more if len(rows) == len(weights) else _added(weights, rows, more)
    return weights


def _added(
    weights: NDArray[np.int64], rows: NDArray[np.int64], more: NDArray[np.int64]
) -> NDArray[np.int64]:
    weights[rows] += more
    return weights


def encoded_of(messages: pa.RecordBatch) -> Encoded:
    """Return the bytes of messages' values and keys."""
    keys = pc.coalesce(messages["key_bytes"], messages["key"].cast(pa.binary()))
    return Encoded(messages["value"], keys)


def by_version(versions: pa.Array) -> Iterator[tuple[bytes | None, NDArray[np.int64]]]:
    """Yield each schema version with the rows that have it."""
    if len(versions) and _are_same(versions):
        yield versions[0].as_py(), np.arange(len(versions))
        return
    numbers, firsts = codes_of(versions)
    # Each message may name a version of its own, so the rows are not searched for each one.
    order = np.argsort(numbers, kind="stable")
    ends = np.cumsum(np.bincount(numbers, minlength=len(firsts)))
    for number, first in enumerate(firsts.tolist()):
        yield versions[first].as_py(), order[ends[number - 1] if number else 0 : ends[number]]


def _are_same(versions: pa.Array) -> bool:
    """Return whether all versions are the same one, as in most batches."""
    if versions.null_count:
        return bool(versions.null_count == len(versions))
    return bool(pc.all(pc.equal(versions, versions[0])).as_py())


def take(encoded: Encoded, rows: NDArray[np.int64]) -> Encoded:
    """Return the values of some rows."""
    if len(rows) == len(encoded.payloads):
        return encoded
    keys = None if encoded.keys is None else encoded.keys.take(pa.array(rows))
    return Encoded(encoded.payloads.take(pa.array(rows)), keys)


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
    keys = encoded_of(messages).keys
    encoded = Encoded(pc.if_else(is_message, columns["value"], None), keys)
    reasons: dict[int, str] = {}
    values = _by_version(columns["schema_version"], encoded, reader, of_version, reasons)
    keeps = np.full(messages.num_rows, keep_bytes)
    keeps[list(reasons)] = True
    columns["value_bytes"] = pc.if_else(
        pc.or_(pa.array(keeps), pc.invert(is_message)), columns["value"], None
    )
    columns["value"] = values
    if reasons:
        new_reasons = pa.array([reasons.get(row) for row in range(messages.num_rows)], pa.string())
        columns["reject_reason"] = pc.coalesce(columns["reject_reason"], new_reasons)
    target = typed_columns(messages.schema, reader)
    return pa.RecordBatch.from_arrays([columns[name] for name in target.names], schema=target)


def _by_version(
    versions: pa.Array,
    encoded: Encoded,
    reader: ValueSchema,
    of_version: SchemaOfVersion,
    reasons: dict[int, str],
) -> pa.Array:
    """Return all values; add to ``reasons`` the reason of each message that should have a value and
    has none.
    """
    pieces = [pa.nulls(0, column_type(reader))]
    places: list[NDArray[np.int64]] = []
    for version, rows in by_version(versions):
        decode = _decoder(version, reader, of_version)
        part = take(encoded, rows)
        found = (
            _undecoded(part, reader)
            if decode is None
            else _decoded(part, decode, column_type(reader))
        )
        reason = UNDECODABLE_VALUE if not version or of_version(version) else UNKNOWN_SCHEMA
        reasons.update(
            (int(rows[row]), VALUE_TOO_LARGE if row in found.too_large else reason)
            for row in found.bad
        )
        pieces.append(found.values)
        places.append(rows)
    together = pa.concat_arrays(pieces)
    if len(places) < 2:
        return together
    back = np.empty(len(versions), dtype=np.int64)
    back[np.concatenate(places)] = np.arange(len(versions))
    return together.take(pa.array(back))


def _decoder(
    version: bytes | None, reader: ValueSchema, of_version: SchemaOfVersion
) -> Decoder | None:
    """Return the decoder of a version; None if no value of this version can be decoded."""
    writer = of_version(version) if version else reader
    if writer is None:
        return None
    try:
        return decoder(writer, reader)
    except SetupError:
        # The reader's own schema has a column, or the read would not have begun.
        return None


def _decoded(encoded: Encoded, decode: Decoder, target: pa.DataType) -> DecodedValues:
    return halved(encoded, lambda part: with_python_times(decode(part)), target)


def _undecoded(encoded: Encoded, reader: ValueSchema) -> DecodedValues:
    present = np.flatnonzero(encoded.payloads.is_valid().to_numpy(False)).tolist()
    return DecodedValues(
        pa.nulls(len(encoded.payloads), column_type(reader)), dict.fromkeys(present, "")
    )
