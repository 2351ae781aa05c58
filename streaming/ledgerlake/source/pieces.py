"""A task's range of entries as pieces of one kind each, read a little ahead.

Stateless: everything is in the arguments, so a task that is run again reads the same entries again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from ledgerlake.assembly.chunk_entries import read_alone
from ledgerlake.client.prefetch import prefetched
from ledgerlake.decode.messages import WHOLE_BATCH, BatchRange
from ledgerlake.decode.rejects import RejectedEntry, read_reject, reject_frame
from ledgerlake.decode.split import PieceKind, only_entry, split_bundle
from ledgerlake.errors import CorruptEntryError
from ledgerlake.source.range_reader import read_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.assembly.rules import Chunk
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.source.range_reader import Bundle
    from ledgerlake.wire.chunks import Marker
    from ledgerlake.wire.message_id import Position

# How many bundles are read while earlier ones are processed; each is a bundle or one larger entry.
_BUNDLES_AHEAD = 8


@dataclass(frozen=True)
class Piece:
    """MESSAGE frames of one kind (see ``decode.split``), in order.

    ``first_entry`` says which messages of the first entry belong to the range. ``broker_ms`` is the
    broker's time of the last entry, if it gives one.
    """

    kind: PieceKind
    frames: memoryview
    first_entry: BatchRange = WHOLE_BATCH
    broker_ms: int | None = None


@dataclass(frozen=True)
class SingleEntry:
    """A chunk of a large message, or the marker that lists its chunks: position, bytes and
    content.
    """

    position: Position
    entry: memoryview
    content: Chunk | Marker


def read_pieces(options: SourceOptions, span: EntryRange) -> Iterator[Piece]:
    """Yield the range in pieces of at most a bundle's size; a thread prefetches bundles."""
    for _, pieces in read_pieces_by_range(options, [span]):
        yield from pieces


def read_pieces_by_range(
    options: SourceOptions, spans: list[EntryRange]
) -> Iterator[tuple[EntryRange, Iterator[Piece]]]:
    """Yield each range with its pieces, as ``read_pieces``. They must be used up before the next
    range is asked for, which the thread reads meanwhile.
    """
    bundles = prefetched(read_ranges(options, spans), _BUNDLES_AHEAD)
    for span, of_range in groupby(bundles, itemgetter(0)):
        yield span, _pieces(bundle for _, bundle in of_range if bundle is not None)


def _pieces(bundles: Iterable[Bundle | RejectedEntry]) -> Iterator[Piece]:
    for bundle in bundles:
        if isinstance(bundle, RejectedEntry):
            yield Piece(PieceKind.REJECT, reject_frame(bundle))
            continue
        frames, first_entry = bundle
        for number, (kind, piece, broker_ms) in enumerate(split_bundle(frames)):
            part = first_entry if number == 0 else WHOLE_BATCH
            if kind in (PieceKind.CHUNK, PieceKind.MARKER) and part != WHOLE_BATCH:
                if not part.includes_whole(only_entry(piece)[1]):
                    continue
                part = WHOLE_BATCH
            yield Piece(kind, piece, part, broker_ms)


def read_single(piece: Piece) -> SingleEntry | RejectedEntry:
    """Read a piece of one entry: a chunk, a marker, or a reject. A chunk or marker that cannot be
    parsed becomes a reject.
    """
    if piece.kind == PieceKind.REJECT:
        return read_reject(piece.frames)
    position, entry = only_entry(piece.frames)
    try:
        return SingleEntry(position, entry, read_alone(piece.kind, entry, position))
    except CorruptEntryError as error:
        return RejectedEntry(position, entry, error.reason, error.message)
