"""A task's range of entries as pieces of one kind each, read a little ahead.

Stateless by contract: everything arrives in the arguments, so a task that is run again reads the
same again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgerlake.client.prefetch import prefetched
from ledgerlake.decode.messages import WHOLE_BATCH, BatchRange
from ledgerlake.decode.rejects import RejectedEntry, reject_frame
from ledgerlake.decode.split import PieceKind, split_bundle
from ledgerlake.source.range_reader import read_range

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange

# Read while those before are worked on; each is a bundle or one larger entry.
_BUNDLES_AHEAD = 8


@dataclass(frozen=True)
class Piece:
    """MESSAGE frames of one kind (see ``decode.split``), in order, and what of the first entry
    belongs to the range.

    ``broker_ms`` is the broker's time of the last entry, if it says one.
    """

    kind: PieceKind
    frames: memoryview
    first_entry: BatchRange = WHOLE_BATCH
    broker_ms: int | None = None


def read_pieces(options: SourceOptions, span: EntryRange) -> Iterator[Piece]:
    """The range in pieces up to a bundle's size, read a little ahead."""
    for item in prefetched(read_range(options, span), _BUNDLES_AHEAD):
        if isinstance(item, RejectedEntry):
            yield Piece(PieceKind.REJECT, reject_frame(item))
            continue
        frames, first_entry = item
        for number, (kind, piece, broker_ms) in enumerate(split_bundle(frames)):
            yield Piece(kind, piece, first_entry if number == 0 else WHOLE_BATCH, broker_ms)
