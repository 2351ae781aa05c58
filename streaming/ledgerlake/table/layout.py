"""How rows stand in the files of a table.

    messages, rejects   as they are
    records             each field of the record is a column; everything else is in one struct
                        column ``pulsar``

Rows of records have the column ``RECORD_COLUMN``, whose name no column of a table can have; so the
columns of the rows say how they stand in the files. A table says it by the type of ``pulsar``: a
table of messages has a column of that name only if it is partitioned by it, and no partition column
is a struct. A file may lack columns that the table got later; they are read as null.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from ledgerlake.values.record_columns import PULSAR_COLUMN
from ledgerlake.values.record_rows import PULSAR_FIELDS, RECORD_COLUMN, rows_schema

_PULSAR = pa.field(PULSAR_COLUMN, pa.struct(PULSAR_FIELDS))


def record_of(rows: pa.Schema) -> pa.StructType | None:
    """Return the columns of the record in rows; None if they are no records."""
    return rows.field(RECORD_COLUMN).type if RECORD_COLUMN in rows.names else None


def file_schema(rows: pa.Schema) -> pa.Schema:
    """Return the columns of the files for rows; the table has the same columns."""
    record = record_of(rows)
    return rows if record is None else pa.schema([*record, _PULSAR])


def has_record_shape(table: pa.Schema) -> bool:
    """Return whether a table is one of records, by its columns. Another writer may have given
    ``pulsar`` another order, or more fields.
    """
    number = table.get_field_index(PULSAR_COLUMN)
    return number >= 0 and fits(table.field(number).type, _PULSAR.type)


def fits(column: pa.DataType | None, kind: pa.DataType) -> bool:
    """Return whether files with a type fit a column of a table; it may have parts that the type
    lacks.
    """
    if column is None:
        return False
    if pa.types.is_struct(column) and pa.types.is_struct(kind):
        parts = {part.name: part.type for part in column}
        return all(fits(parts.get(part.name), part.type) for part in kind)
    if pa.types.is_list(column) and pa.types.is_list(kind):
        return fits(column.value_type, kind.value_type)
    if pa.types.is_map(column) and pa.types.is_map(kind):
        return fits(column.item_type, kind.item_type)
    return bool(column.equals(kind))


def rows_of_table(table: pa.Schema) -> pa.Schema:
    """Return the columns of the rows for a table of records."""
    return rows_schema(pa.struct([field for field in table if field.name != PULSAR_COLUMN]))


def path_in_file(rows: pa.Schema, column: str) -> str:
    """Return the path in the files of a column of the rows."""
    return column if record_of(rows) is None else f"{PULSAR_COLUMN}.{column}"


def to_file(rows: pa.Table) -> pa.Table:
    """Return rows in the columns of the files."""
    if record_of(rows.schema) is None:
        return rows
    columns = [_one_chunk(rows[field.name]) for field in PULSAR_FIELDS]
    pulsar = pa.StructArray.from_arrays(columns, fields=PULSAR_FIELDS)
    return pa.Table.from_arrays(
        [*_one_chunk(rows[RECORD_COLUMN]).flatten(), pulsar], schema=file_schema(rows.schema)
    )


def from_file(content: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the content of a file as rows with the columns of ``schema``.

    Raises:
        ArrowException, ValueError: the file has other columns.
    """
    record = record_of(schema)
    if record is None:
        return content.cast(schema)
    pulsar = _one_chunk(content[PULSAR_COLUMN]).cast(_PULSAR.type)
    present = set(content.column_names)
    columns = [
        _one_chunk(content[field.name]).cast(field.type)
        if field.name in present
        else pa.nulls(content.num_rows, field.type)
        for field in record
    ]
    records = pa.StructArray.from_arrays(columns, fields=list(record))
    return pa.Table.from_arrays([*pulsar.flatten(), records], schema=schema)


def log_text(value: Any) -> str:
    """Return JSON for Delta's log. Characters stand as they are: delta-rs 1.6 reads an escaped pair
    of surrogates as another character.
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def partition_text(value: Any) -> str | None:
    """Return a value of a column by which a table is partitioned, as Delta's log has it."""
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])
    )
