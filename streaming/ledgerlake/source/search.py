"""Finds an entry by the broker's time or index (PIP-70). The number of reads grows with the
logarithm of the topic's length.

The broker answers one question: which entry is the first at or after a position? Positions have
gaps everywhere: all topics of a cluster share the ledger ids, a ledger may end at any entry and may
have a single one, entries may be markers or compacted away. So the search is over positions, and an
answer far after the asked position shows that there are no entries between.

The search assumes that times and indexes rise. A broker's do, unless its clock is set back, the
topic moves to a broker whose clock is behind, or it is served for a while without the broker's
metadata: then the indexes begin again. If times fall, the result depends on the end of the topic
too: no search with so few reads can find the first of several places without a look at entries
behind it. If an entry has no broker timestamp, its publish time counts, and the result is only as
exact as the producers' clocks. If the broker began to add metadata later, publish times decide only
about the entries before that: the first entry with a broker timestamp, or one after an entry
without, tells by itself on which side of it the search goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from ledgerlake.wire.entry import Stamp

# How far to search into a ledger whose end is not known yet. By default, brokers begin another one
# after 50,000 entries.
_FIRST_STEP = 8192


@dataclass(frozen=True)
class StampedEntry:
    """An entry of a topic, when it was stored, and how many of the broker's indexes it has.

    ``begin``: the first of the entries just before it whose stamps cannot be read, or its own
    position. They count with it.
    """

    position: Position
    stamp: Stamp
    index_count: int
    begin: Position

    @property
    def first_index(self) -> int | None:
        """Return the broker's index of its first message; the stamp has that of its last."""
        return None if self.stamp.index is None else self.stamp.index - self.index_count + 1


# Returns the first entry at or after a position, up to the end of the search.
Probe = Callable[[Position], "StampedEntry | None"]


def first_since(probe: Probe, last: Position, time_ms: int) -> StampedEntry | None:
    """Return the first entry stored at ``time_ms`` or later; None if there is none up to
    ``last``.
    """
    probe = cache(probe)

    def is_reached(entry: StampedEntry) -> bool:
        return entry.stamp.time_ms >= time_ms

    begin = _by_broker(probe, last)
    if begin is None:
        return _search(probe, last, is_reached)[1]
    if is_reached(begin):
        return _search(probe, begin.position, is_reached)[1]
    return _search(probe, last, is_reached, begin)[1]


def first_with_index(probe: Probe, last: Position, index: int) -> StampedEntry | None:
    """Return the first entry whose last message has ``index`` or a higher one; None if there is
    none up to ``last``.
    """
    return _search(
        probe, last, lambda entry: entry.stamp.index is not None and entry.stamp.index >= index
    )[1]


def first_not_above(
    probe: Probe, earlier: StampedEntry, later: StampedEntry, index: int
) -> StampedEntry | None:
    """Return an entry after ``earlier``, up to ``later``, at which the indexes come from above
    ``index`` to it or below it. ``later`` has no higher one.
    """
    return _search(
        probe,
        later.position,
        lambda entry: (
            entry.position > earlier.position
            and entry.stamp.index is not None
            and entry.stamp.index <= index
        ),
        earlier,
    )[1]


def last_before(probe: Probe, last: Position, position: Position) -> StampedEntry | None:
    """Return the entry before a position; None if no entry is."""
    return _search(probe, last, lambda entry: entry.position >= position)[0]


def _by_broker(probe: Probe, last: Position) -> StampedEntry | None:
    """Return an entry where broker timestamps begin; None if the topic does not end with them. They
    may have begun several times.
    """
    end = probe(last)
    if end is not None and not end.stamp.by_broker:
        return None
    return _search(probe, last, lambda entry: entry.stamp.by_broker)[1]


def _search(
    probe: Probe,
    last: Position,
    is_reached: Callable[[StampedEntry], bool],
    first: StampedEntry | None = None,
) -> tuple[StampedEntry | None, StampedEntry | None]:
    """Return the last entry for which ``is_reached`` is false, and the first for which it is true;
    it must be true for all entries after that.

    Args:
        first: the entry at which the search begins; None for the topic's first one.
    """
    low = first or probe(BEFORE_ALL)
    if low is None or is_reached(low):
        return None, low
    best = probe(last)
    if best is not None and not is_reached(best):
        return best, None
    # Nothing is known of the entries between ``low`` and ``high``; at ``high`` or after it,
    # ``best`` is the first that is reached.
    high, step = last, _FIRST_STEP
    while low.position.next < high:
        middle = _middle(low.position, high, step)
        entry = probe(middle)
        if entry is None or entry.begin >= high:
            high = middle
        elif is_reached(entry):
            high, best = middle, entry
        else:
            step = step * 2 if entry.position.ledger_id == low.position.ledger_id else _FIRST_STEP
            low = entry
    return low, best


def _middle(low: Position, high: Position, step: int) -> Position:
    """Return a position between two: halfway in entries of one ledger, else in ledgers, else a step
    into the lower ledger.
    """
    if low.ledger_id == high.ledger_id:
        return Position(low.ledger_id, (low.entry_id + 1 + high.entry_id) // 2)
    has_entries = high.entry_id > 0
    ledger_id = (low.ledger_id + high.ledger_id + has_entries) // 2
    if ledger_id > low.ledger_id:
        return Position(ledger_id, 0)
    return Position(low.ledger_id, low.entry_id + step)
