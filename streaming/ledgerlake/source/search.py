"""Finding an entry by the broker's time or index (PIP-70), in a number of reads that grows with the
logarithm.

The broker answers one question: which entry is the first at a position or behind it? Positions have
holes everywhere: ledger ids are those of the whole cluster, ledgers end where they like and may
hold a single entry, entries may be markers or compacted away. So the search is over positions, and
an answer far behind the question also says that nothing lies between.

What is assumed is that times and indexes rise. A broker's do, but for a clock that is set back;
publish times, where an entry has no broker timestamp, do so only about as well as the producers'
clocks agree, and there the result is exact only to that. In a topic whose broker began to add
metadata in mid-life, publish times decide only about what lies before that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from ledgerlake.wire.entry import Stamp

# How far to look into a ledger whose end is not known yet. Brokers begin another after 50,000
# entries unless told otherwise.
_FIRST_STEP = 8192


@dataclass(frozen=True)
class StampedEntry:
    """An entry of a topic, when it was stored, and how many numbers the broker's index gave to it."""

    position: Position
    stamp: Stamp
    index_count: int = 1

    @property
    def first_index(self) -> int | None:
        """The broker's index of its first message; the stamp has that of its last."""
        return None if self.stamp.index is None else self.stamp.index - self.index_count + 1


# The first entry at a position or behind it, up to where the search ends.
Probe = Callable[[Position], "StampedEntry | None"]


def first_since(probe: Probe, last: Position, time_ms: int) -> StampedEntry | None:
    """The first entry stored at ``time_ms`` or later; None if there is none up to ``last``."""
    probe = cache(probe)
    begin = _first_by_broker(probe, last)
    if begin is None:
        return _search(probe, last, lambda one: one.stamp.time_ms >= time_ms)[1]
    if begin.stamp.time_ms < time_ms:
        # What has no broker timestamp was stored before what has one, whatever its producer's clock
        # said.
        return _search(probe, last, lambda one: one.stamp.by_broker and one.stamp.time_ms >= time_ms)[1]
    return _search(probe, last, lambda one: one.stamp.by_broker or one.stamp.time_ms >= time_ms)[1]


def first_with_index(probe: Probe, last: Position, index: int) -> StampedEntry | None:
    """The first entry whose last message has ``index`` or a higher one; None if there is none up to
    ``last``.
    """
    return _search(probe, last, lambda one: one.stamp.index is not None and one.stamp.index >= index)[1]


def last_before(probe: Probe, last: Position, position: Position) -> StampedEntry | None:
    """The entry before a position; None if that is the first."""
    return _search(probe, last, lambda one: one.position >= position)[0]


def _first_by_broker(probe: Probe, last: Position) -> StampedEntry | None:
    """Return where broker timestamps begin; None if the topic does not end with them."""
    end = probe(last)
    if end is not None and not end.stamp.by_broker:
        return None
    return _search(probe, last, lambda one: one.stamp.by_broker)[1]


def _search(
    probe: Probe, last: Position, reached: Callable[[StampedEntry], bool]
) -> tuple[StampedEntry | None, StampedEntry | None]:
    """The last entry that is not ``reached`` and the first that is, as all behind it are."""
    low = probe(BEFORE_ALL)
    if low is None or reached(low):
        return None, low
    best = probe(last)
    if best is not None and not reached(best):
        return best, None
    # Of what is behind ``low`` and before ``high`` nothing is known; at ``high`` or behind,
    # ``best`` is the first.
    high, step = last, _FIRST_STEP
    while low.position.next < high:
        middle = _middle(low.position, high, step)
        found = probe(middle)
        if found is None or found.position >= high:
            high = middle
        elif reached(found):
            high, best = middle, found
        else:
            step = step * 2 if found.position.ledger_id == low.position.ledger_id else _FIRST_STEP
            low = found
    return low, best


def _middle(low: Position, high: Position, step: int) -> Position:
    """A position between two: halfway in entries of one ledger, else in ledgers, else a step into
    the lower ledger.
    """
    if low.ledger_id == high.ledger_id:
        return Position(low.ledger_id, (low.entry_id + 1 + high.entry_id) // 2)
    begun = high.entry_id > 0
    ledger_id = (low.ledger_id + high.ledger_id + begun) // 2
    if ledger_id > low.ledger_id:
        return Position(ledger_id, 0)
    return Position(low.ledger_id, low.entry_id + step)
