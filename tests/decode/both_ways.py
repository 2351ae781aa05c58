"""Entries decoded by the kernels and by the reference, compared."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from ledgerlake.decode import schema
from ledgerlake.decode.messages import decode_bundle
from ledgerlake.decode.reference import decode_entry
from ledgerlake.errors import CorruptEntryError
from tests.entries import SOURCE, bundle


def same_both_ways(entries: list[bytes]) -> None:
    parts = list(decode_bundle(bundle(entries), SOURCE, chunks_as_rejects=False))
    messages = pa.Table.from_batches([part.messages for part in parts], schema.VIEW)
    rejects = pa.Table.from_batches([part.rejects for part in parts], schema.REJECTS)
    expected, expected_rejects = by_reference(entries)
    assert as_numbers(messages) == as_numbers(expected)
    assert (
        list(zip(rejects["entry_id"].to_pylist(), rejects["reason"].to_pylist(), strict=True))
        == expected_rejects
    )


def by_reference(entries: list[bytes]) -> tuple[pa.Table, list[tuple[int, str]]]:
    rows: list[dict[str, Any]] = []
    rejects: list[tuple[int, str]] = []
    for number, entry in enumerate(entries):
        try:
            entry_rows = decode_entry(memoryview(entry), 7, number, 1 << 27)
        except CorruptEntryError as error:
            rejects.append((number, error.reason))
            continue
        rows += [
            {"topic": SOURCE.topic, "partition": SOURCE.partition, "late": False, **row}
            for row in entry_rows
        ]
    return pa.Table.from_pylist(rows, schema=schema.VIEW), rejects


def as_numbers(rows: pa.Table) -> list[dict[str, Any]]:
    """Times as numbers, since Python's own end with the year 9999."""
    plain = [
        pa.int64() if pa.types.is_timestamp(field.type) else field.type for field in rows.schema
    ]
    return rows.cast(pa.schema(zip(rows.schema.names, plain, strict=True))).to_pylist()
