"""Bundles split into pieces by the treatment of their entries.

Kinds of pieces:

    entries   plain entries; most topics have only these, and then the bundle is one piece
    delayed   plain entries with a delivery time, even if it is long past
    chunk     one chunk of a large message (PIP-37): ``num_chunks_from_msg`` above 1
    marker    the list of a large message's chunks (PIP-37, option 2), see ``wire.chunks``
    reject    an entry that was rejected when it was read, or is lost (``rejects.reject_frame``)

Each chunk, marker and reject is its own piece. The others are cut at a few chunks and markers of a
bundle, so that a message that one of them completes comes between its neighbours. A piece costs as
much as hundreds of its entries, so beyond these places all the rest is together. A chunk is never
``delayed``, even if it has a delivery time. The delivery time of an entry is used only if its
checksum is right: a damaged entry is rejected at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING

import crc32c
import numpy as np

from ledgerlake.decode import kernels as k
from ledgerlake.decode.messages import read_entry_table
from ledgerlake.errors import CorruptEntryError
from ledgerlake.wire.chunks import has_promise
from ledgerlake.wire.entry import (
    delivery_time_ms,
    parse_entry,
    peek_metadata,
    split_broker_metadata,
)
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from ledgerlake.decode.messages import Bytes, Matrix


class PieceKind(str, Enum):
    """The kind of a piece, see the module; the column ``kind`` has these values."""

    ENTRIES = "entries"
    DELAYED = "delayed"
    CHUNK = "chunk"
    MARKER = "marker"
    REJECT = "reject"


# The largest entry id in a bitmap of the delayed index. Brokers close ledgers long before.
MAX_DELAYED_ENTRY_ID = 2**32 - 1

# At so many chunks and markers of a bundle the other entries are cut. A bundle with more has tiny
# ones, and messages of these are sorted in memory.
_MOST_CUTS = 8


@dataclass(frozen=True)
class DelayedEntries:
    """Entries of a ``delayed`` piece: the due time (not before the entry was stored), the position,
    and the end of the frame in the piece, of each.
    """

    due_ms: Matrix
    ledger_ids: Matrix
    entry_ids: Matrix
    frame_ends: Matrix


def split_bundle(
    frames: bytes | bytearray | memoryview,
) -> Iterator[tuple[PieceKind, memoryview, int | None]]:
    """Yield the pieces of a bundle in order, each with its kind and the latest broker's time of its
    entries, None if there is none. A broker's clock may step back. So the time of a micro-batch is
    the latest one of all its entries, however they were cut into bundles and pieces.

    Raises:
        MalformedFrameError: the bundle does not consist of complete frames.
    """
    buffer, entries = read_entry_table(frames)
    status = np.zeros(len(entries), dtype=np.int8)
    k.walk_entries(buffer, entries, status)
    view = memoryview(frames)
    kinds = dict.fromkeys(_delayed(buffer, entries, status).tolist(), PieceKind.DELAYED)
    times_ms = entries[:, k.E_BROKER_TIME].copy()
    for row in np.flatnonzero(status != k.OK).tolist():
        entry = view[slice(*_span(entries, row))]
        broker_ms = _broker_ms(entry)
        times_ms[row] = k.NONE if broker_ms is None else broker_ms
        kind = _kind(entry, int(entries[row, k.E_ENTRY]))
        if kind != PieceKind.ENTRIES:
            kinds[row] = kind
    ends = entries[:, k.E_END].tolist()
    for kind, runs in _pieces(len(entries), kinds):
        spans = [view[ends[first - 1] if first else 0 : ends[last]] for first, last in runs]
        latest_ms = max(int(times_ms[first : last + 1].max()) for first, last in runs)
        frames_of_piece = spans[0] if len(spans) == 1 else memoryview(b"".join(spans))
        yield kind, frames_of_piece, None if latest_ms == k.NONE else latest_ms


def _pieces(
    count: int, kinds: dict[int, PieceKind]
) -> Iterator[tuple[PieceKind, list[tuple[int, int]]]]:
    """Yield kinds with their runs of rows (first and last). Between chunks and markers there is one
    piece of each other kind. Behind ``_MOST_CUTS`` of them, one piece of each other kind comes
    first, and then the chunks and markers.

    The piece with the first row comes first.
    """
    together: dict[PieceKind, list[tuple[int, int]]] = {}
    uncut: list[tuple[PieceKind, list[tuple[int, int]]]] = []
    cuts = 0
    rows = sorted({0, count, *kinds, *(row + 1 for row in kinds)})
    for first, end in pairwise(rows):
        kind = kinds.get(first, PieceKind.ENTRIES)
        if kind in (PieceKind.CHUNK, PieceKind.MARKER) and cuts == _MOST_CUTS:
            uncut.append((kind, [(first, end - 1)]))
        elif kind in (PieceKind.CHUNK, PieceKind.MARKER):
            yield from together.items()
            yield kind, [(first, end - 1)]
            together = {}
            cuts += 1
        elif together.get(kind, [(0, -2)])[-1][1] == first - 1:
            together[kind][-1] = (together[kind][-1][0], end - 1)
        else:
            together.setdefault(kind, []).append((first, end - 1))
    yield from together.items()
    yield from uncut


def read_delayed(frames: bytes | memoryview) -> DelayedEntries:
    """Return the due times and the positions of the entries of a ``delayed`` piece."""
    buffer, entries = read_entry_table(frames)
    status = np.zeros(len(entries), dtype=np.int8)
    k.walk_entries(buffer, entries, status)
    due_ms = np.maximum(entries[:, k.E_DELIVER], entries[:, k.E_BROKER_TIME])
    for row in np.flatnonzero(status != k.OK).tolist():
        due_ms[row] = delivery_time_ms(parse_entry(buffer.data[slice(*_span(entries, row))])) or 0
    columns = [k.E_LEDGER, k.E_ENTRY, k.E_END]
    return DelayedEntries(due_ms, *(np.ascontiguousarray(entries[:, column]) for column in columns))


def only_entry(frames: pa.Buffer | memoryview) -> tuple[Position, memoryview]:
    """Return the entry of a piece with a single entry."""
    buffer, entries = read_entry_table(frames)
    start, end, ledger_id, entry_id = entries[
        0, [k.E_START, k.E_END, k.E_LEDGER, k.E_ENTRY]
    ].tolist()
    return Position(ledger_id, entry_id), buffer.data[start:end]


def entries_of(frames: bytes | memoryview) -> dict[Position, bytes]:
    """Return the stored entries of a piece by position."""
    return dict(placed_entries(frames))


def placed_entries(frames: bytes | memoryview) -> list[tuple[Position, bytes]]:
    """Return the stored entries of a piece, each with its position, which several may have."""
    buffer, entries = read_entry_table(frames)
    rows = entries[:, [k.E_LEDGER, k.E_ENTRY, k.E_START, k.E_END]].tolist()
    return [
        (Position(ledger_id, entry_id), bytes(buffer.data[start:end]))
        for ledger_id, entry_id, start, end in rows
    ]


def _broker_ms(raw: memoryview) -> int | None:
    """Return the broker's time of an entry, also of chunks and of entries that the kernels do not
    read.
    """
    try:
        broker, _ = split_broker_metadata(raw)
    except CorruptEntryError:
        return None
    return (
        broker.broker_timestamp
        if broker is not None and broker.HasField("broker_timestamp")
        else None
    )


def _span(entries: Matrix, row: int) -> tuple[int, int]:
    return int(entries[row, k.E_START]), int(entries[row, k.E_END])


def _delayed(buffer: Bytes, entries: Matrix, status: NDArray[np.int8]) -> Matrix:
    """Return the rows of undamaged, plain entries with a delivery time."""
    timed = (entries[:, k.E_DELIVER] > 0) & (entries[:, k.E_ENTRY] <= MAX_DELAYED_ENTRY_ID)
    rows = np.flatnonzero((status == k.OK) & timed)
    return np.array(
        [row for row in rows.tolist() if _checksum_fits(buffer, entries[row])], dtype=np.int64
    )


def _checksum_fits(buffer: Bytes, entry: Matrix) -> bool:
    crc = int(entry[k.E_CRC])
    return crc == k.NONE or crc32c.crc32c(buffer.data[entry[k.E_BODY] : entry[k.E_END]]) == crc


def _kind(raw: memoryview, entry_id: int) -> PieceKind:
    """Return the kind of an entry; an unreadable one is plain, so that the decoder rejects it."""
    try:
        metadata = peek_metadata(raw)
        if metadata.num_chunks_from_msg > 1:
            return PieceKind.CHUNK
        if metadata.num_chunks_from_msg == 1 and has_promise(metadata):
            return PieceKind.MARKER
        delayed = (
            entry_id <= MAX_DELAYED_ENTRY_ID and delivery_time_ms(parse_entry(raw)) is not None
        )
    except CorruptEntryError:
        return PieceKind.ENTRIES
    return PieceKind.DELAYED if delayed else PieceKind.ENTRIES
