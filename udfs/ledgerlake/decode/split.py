"""A bundle cut where an entry must travel alone: parts of large messages, and the markers that list them.

Kinds:

    entries   consecutive plain entries; all that most topics ever have, and then the bundle stays one piece, untouched
    chunk     one chunk of a large message (PIP-37): ``num_chunks_from_msg`` above 1
    marker    the list of a large message's chunks (PIP-37, option 2), see ``wire.chunks``
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from ledgerlake.decode import kernels as k
from ledgerlake.decode.messages import read_entry_table
from ledgerlake.errors import CorruptEntryError
from ledgerlake.wire.chunks import has_promise
from ledgerlake.wire.entry import peek_metadata
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

ENTRIES = "entries"
CHUNK = "chunk"
MARKER = "marker"


def split_bundle(frames: bytes | bytearray) -> Iterator[tuple[str, memoryview]]:
    """Pieces of a bundle in order, each with its kind.

    Raises:
        MalformedFrameError: the bundle is not whole frames.
    """
    buffer, entries = read_entry_table(frames)
    status = np.zeros(len(entries), dtype=np.int8)
    k.walk_entries(buffer, entries, status)
    view = memoryview(frames)
    alone = {
        row: kind
        for row in np.flatnonzero(status != k.OK).tolist()
        if (kind := _kind(view[entries[row, k.E_START] : entries[row, k.E_END]])) != ENTRIES
    }
    start = 0
    for (_, kind), rows in groupby(
        range(len(entries)), lambda row: (row if row in alone else -1, alone.get(row, ENTRIES))
    ):
        end = int(entries[max(rows), k.E_END])
        yield kind, view[start:end]
        start = end


def only_entry(frames: pa.Buffer | memoryview) -> tuple[Position, memoryview]:
    """The one entry of a piece that travels alone."""
    buffer, entries = read_entry_table(frames)
    start, end, ledger_id, entry_id = entries[0, [k.E_START, k.E_END, k.E_LEDGER, k.E_ENTRY]].tolist()
    return Position(ledger_id, entry_id), buffer.data[start:end]


def _kind(raw: memoryview) -> str:
    """What cannot be read is plain: decoding rejects it, whole."""
    try:
        metadata = peek_metadata(raw)
    except CorruptEntryError:
        return ENTRIES
    if metadata.num_chunks_from_msg > 1:
        return CHUNK
    return MARKER if metadata.num_chunks_from_msg == 1 and has_promise(metadata) else ENTRIES
