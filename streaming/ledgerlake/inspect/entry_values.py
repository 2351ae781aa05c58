"""The values of a stored entry, for a person: as far as they can be read without keys and other
chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.decode.reference import decode_entry
from ledgerlake.errors import LedgerlakeError

if TYPE_CHECKING:
    from collections.abc import Iterator


def entry_values(entry: bytes, most_bytes: int) -> Iterator[bytes | None]:
    """Yield the value of each message of an entry, None for one without a value and for a chunk;
    nothing if the entry cannot be read.

    Args:
        most_bytes: an entry with more uncompressed bytes is not read.
    """
    try:
        rows = decode_entry(memoryview(entry), 0, 0, most_bytes)
    except LedgerlakeError:
        return
    yield from (None if row.get("chunk_uuid") is not None else row["value"] for row in rows)
