"""Finds cursors that were moved past entries of a micro-batch from outside: by message TTL, or by
hand (ADR 14).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ledgerlake.source.loss import moved_to
from ledgerlake.source.planning import entry_range
from ledgerlake.stored.offsets import VERSION, from_json
from ledgerlake.wire.message_id import BEFORE_ALL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ledgerlake.pipeline.cursors import CursorKeeper
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.table.batch_commit import BatchCommit
    from ledgerlake.wire.message_id import Position

_log = logging.getLogger(__name__)


def moved_cursors(cursors: CursorKeeper, batch: BatchCommit) -> dict[str, Position]:
    """Return the positions of cursors that were moved from outside past entries of a micro-batch.
    Only cursors that are needed to find a loss are asked.

    Raises:
        OwnershipError: another process has taken over.
        LedgerlakeError: the broker cannot be asked.
    """
    begins = {span.topic_partition: span.after for span in _without_index(batch) if span.crosses}
    moved = {}
    for name, position in cursors.positions_now(begins).items():
        if moved_to(position, begins[name]) != BEFORE_ALL:
            _log.warning(
                "the subscription %s of %s is at %s, and the stream has read up to %s: it was "
                "moved from outside, by message TTL or by hand",
                cursors.subscription,
                name,
                position,
                begins[name],
            )
            moved[name] = position
    return moved


def _without_index(batch: BatchCommit) -> Iterator[EntryRange]:
    """Yield the ranges of a micro-batch without the broker's index at one end."""
    ranges = {name: span for name, span in batch.ranges.items() if span["start"] is not None}
    starts, ends = ({name: span[end] for name, span in ranges.items()} for end in ("start", "end"))
    before, after = (
        from_json({"version": VERSION, "positions": positions}) for positions in (starts, ends)
    )
    for name, start in before.items():
        if start.index is None or after[name].index is None:
            yield entry_range(name, start, after[name])
