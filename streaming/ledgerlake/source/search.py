"""Finding the first entry that was stored at a time or later (PIP-70), in a number of reads that grows with the logarithm.

The broker answers one question: which entry is the first at a position or behind it? Positions have holes everywhere:
ledger ids are those of the whole cluster, ledgers end where they like and may hold a single entry, entries may be markers or
compacted away. So the search is over positions, and an answer far behind the question also says that nothing lies between.

What is assumed is that times rise. A broker's do, but for a clock that is set back; publish times, where an entry has no
broker timestamp, do so only about as well as the producers' clocks agree, and the result is exact only to that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Callable

# How far to look into a ledger whose end is not known yet. Brokers begin another after 50,000 entries unless told otherwise.
_FIRST_STEP = 8192


@dataclass(frozen=True)
class Dated:
    """An entry and when it was stored."""

    position: Position
    time_ms: int


def first_since(probe: Callable[[Position], Dated | None], last: Position, time_ms: int) -> Dated | None:
    """The first entry stored at ``time_ms`` or later; None where there is none up to ``last``.

    Args:
        probe: the first entry at a position or behind it, up to ``last``.
    """
    low = probe(BEFORE_ALL)
    if low is None or low.time_ms >= time_ms:
        return low
    best = probe(last)
    if best is not None and best.time_ms < time_ms:
        return None
    # Of what is behind ``low`` and before ``high`` nothing is known; at ``high`` or behind, ``best`` is the first.
    high, step = last, _FIRST_STEP
    while Position(low.position.ledger_id, low.position.entry_id + 1) < high:
        middle = _middle(low.position, high, step)
        found = probe(middle)
        if found is None or found.position >= high:
            high = middle
        elif found.time_ms >= time_ms:
            high, best = middle, found
        else:
            step = step * 2 if found.position.ledger_id == low.position.ledger_id else _FIRST_STEP
            low = found
    return best


def _middle(low: Position, high: Position, step: int) -> Position:
    """A position between two: halfway in entries of one ledger, else in ledgers, else a step into the lower ledger."""
    if low.ledger_id == high.ledger_id:
        return Position(low.ledger_id, (low.entry_id + 1 + high.entry_id) // 2)
    begun = high.entry_id > 0
    ledger_id = (low.ledger_id + high.ledger_id + begun) // 2
    if ledger_id > low.ledger_id:
        return Position(ledger_id, 0)
    return Position(low.ledger_id, low.entry_id + step)
