"""Messages as rows of a table of records (see ``record_columns``).

The rows have the columns of ``schema.MESSAGES`` without ``value``, and one struct column for the
record, which becomes the table's own columns when the rows are written (see ``table.layout``).
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ledgerlake.decode import schema
from ledgerlake.decode.columns import Encoded, halved
from ledgerlake.decode.weights import cuts, fixed_bytes
from ledgerlake.errors import SetupError
from ledgerlake.reasons import (
    REASONS,
    SCHEMA_MISMATCH,
    UNKNOWN_SCHEMA,
    VALUE_TOO_LARGE,
    Reason,
)
from ledgerlake.values.record_columns import as_records, record_of
from ledgerlake.values.schemas import decoder
from ledgerlake.values.typed import (
    by_version,
    encoded_of,
    message_weights,
    take,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ledgerlake.decode.columns import Decoder
    from ledgerlake.values.typed import SchemaOfVersion
    from ledgerlake.wire.value_schema import ValueSchema

# Delta takes no such name, so no other column of rows has it: users name partition columns.
RECORD_COLUMN = "(record)"

# What stands beside the record in a row.
PULSAR_FIELDS = [field for field in schema.MESSAGES if field.name != "value"]


@dataclass(frozen=True)
class Misfit:
    """A message without a record: its row, and the reason and the detail of the reject.
    ``also`` has the reasons of other tables.
    """

    row: int
    reason: Reason
    detail: str
    also: tuple[Reason, ...] = ()

    @property
    def is_mismatch(self) -> bool:
        """Return whether the message does not fit a table that takes it; else no table takes it,
        or it has no key.
        """
        return any(REASONS[reason].is_mismatch for reason in (self.reason, *self.also))


def rows_schema(record: pa.StructType) -> pa.Schema:
    """Return the columns of the rows."""
    return pa.schema([*PULSAR_FIELDS, pa.field(RECORD_COLUMN, record)])


def record_cuts(
    messages: pa.RecordBatch,
    of_version: SchemaOfVersion,
    newest: ValueSchema,
    record: pa.StructType,
) -> Iterator[tuple[int, int]]:
    """Yield ranges of messages whose rows are to be made at once, so that they take limited memory.

    Args:
        newest: the schema of messages that name no version.
        record: the table's columns.
    """

    def decoder_of(version: bytes | None) -> Decoder | None:
        writer = of_version(version) if version else newest
        try:
            return None if writer is None else decoder(writer, writer)
        except SetupError:
            return None

    return cuts(np.maximum(message_weights(messages, decoder_of), fixed_bytes(record)))


def record_rows(
    messages: pa.RecordBatch,
    of_version: SchemaOfVersion,
    newest: ValueSchema,
    record: pa.StructType,
) -> tuple[pa.RecordBatch, list[Misfit]]:
    """Return messages of one topic as rows, and those that do not fit.

    Args:
        messages: rows of ``schema.MESSAGES``.
        newest: the schema of messages that name no version.
        record: the table's columns.
    """
    records, misfits = _records(messages, of_version, newest, record)
    columns = [*(messages[field.name] for field in PULSAR_FIELDS), records]
    rows = pa.RecordBatch.from_arrays(columns, schema=rows_schema(record))
    if not misfits:
        return rows, []
    fits = np.ones(rows.num_rows, dtype=bool)
    fits[[misfit.row for misfit in misfits]] = False
    return rows.filter(pa.array(fits)), sorted(misfits, key=attrgetter("row"))


def _records(
    messages: pa.RecordBatch,
    of_version: SchemaOfVersion,
    newest: ValueSchema,
    record: pa.StructType,
) -> tuple[pa.Array, list[Misfit]]:
    """Return the record of each message, decoded by the version that the message names."""
    if not messages.num_rows:
        return pa.nulls(0, record), []
    encoded = encoded_of(messages)
    parts: list[pa.Array] = []
    places: list[NDArray[np.int64]] = []
    misfits: list[Misfit] = []
    for version, rows in by_version(messages["schema_version"]):
        records, more = _of_version(take(encoded, rows), version, of_version, newest, record, rows)
        parts.append(records)
        places.append(rows)
        misfits += more
    if len(parts) == 1:
        return parts[0], misfits
    back = np.empty(messages.num_rows, dtype=np.int64)
    back[np.concatenate(places)] = np.arange(messages.num_rows)
    return pa.concat_arrays(parts).take(pa.array(back)), misfits


def _of_version(
    encoded: Encoded,
    version: bytes | None,
    of_version: SchemaOfVersion,
    newest: ValueSchema,
    record: pa.StructType,
    rows: NDArray[np.int64],
) -> tuple[pa.Array, list[Misfit]]:
    writer = of_version(version) if version else newest
    if writer is None:
        number = int.from_bytes(version or b"", "big")
        detail = f"the registry has no version {number} of the topic's schema"
        return _none(encoded, record, rows, UNKNOWN_SCHEMA, detail)
    try:
        # What the table does not take of a version, it takes of none of its messages.
        record_of(writer)
        decode = decoder(writer, writer)
    except SetupError as error:
        return _none(encoded, record, rows, SCHEMA_MISMATCH, error.message)
    return _decoded(encoded, decode, record, rows)


def _decoded(
    encoded: Encoded, decode: Decoder, record: pa.StructType, rows: NDArray[np.int64]
) -> tuple[pa.Array, list[Misfit]]:
    fitted = halved(encoded, lambda part: as_records(decode(part), record), record)
    misfits = [
        Misfit(
            int(rows[row]), VALUE_TOO_LARGE if row in fitted.too_large else SCHEMA_MISMATCH, detail
        )
        for row, detail in sorted(fitted.bad.items())
    ]
    return fitted.values, misfits


def _none(
    encoded: Encoded, record: pa.StructType, rows: NDArray[np.int64], reason: Reason, detail: str
) -> tuple[pa.Array, list[Misfit]]:
    """Return no record of a version's messages; those without a value need none."""
    present = np.flatnonzero(encoded.payloads.is_valid().to_numpy(False))
    return pa.nulls(len(rows), record), [Misfit(int(rows[row]), reason, detail) for row in present]
