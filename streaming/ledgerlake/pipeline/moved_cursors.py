"""Cursors that somebody else moved over what a micro-batch reads: by message TTL, or by hand (ADR
14).
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
    from ledgerlake.table.batch_record import BatchRecord
    from ledgerlake.wire.message_id import Position

_log = logging.getLogger(__name__)


def moved_cursors(cursors: CursorKeeper, batch: BatchRecord) -> dict[str, Position]:
    """Return up to where somebody else moved cursors over what a micro-batch reads; asked only if
    loss is told by it.

    Raises:
        OwnershipError: another process has taken over.
        LedgerlakeError: the broker cannot be asked.
    """
    begins = {span.topic_partition: span.after for span in _without_index(batch) if span.crosses}
    moved = {}
    for name, position in cursors.positions_now(begins).items():
        if moved_to(position, begins[name]) != BEFORE_ALL:
            _log.warning(
                "the subscription %s of %s stands at %s, and the stream has read up to %s: somebody moved it, by message "
                "TTL or by hand",
                cursors.subscription,
                name,
                position,
                begins[name],
            )
            moved[name] = position
    return moved


def _without_index(batch: BatchRecord) -> Iterator[EntryRange]:
    """The ranges of a micro-batch of which not both ends have the broker's index."""
    ranges = {name: one for name, one in batch.ranges.items() if one["start"] is not None}
    starts, ends = ({name: one[end] for name, one in ranges.items()} for end in ("start", "end"))
    before, after = (from_json({"version": VERSION, "positions": one}) for one in (starts, ends))
    for name, start in before.items():
        if start.index is None or after[name].index is None:
            yield entry_range(name, start, after[name])
