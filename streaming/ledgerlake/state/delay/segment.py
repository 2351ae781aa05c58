"""Waiting messages, and how a bucket's are cut into segments.

Order everywhere: (time, ledger, entry). A segment ends where the next message is due a whole time step or more after the
segment's first, or where the segment is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DEFAULT_TIME_STEP_MS = 300_000
DEFAULT_MAX_INDEXES = 5000

# What a bitmap can hold. Ledgers are closed long before.
MAX_ENTRY_ID = 2**32 - 1


@dataclass(frozen=True, order=True, slots=True)
class DelayedIndex:
    """One waiting message: when it is due, and where it stands."""

    time_ms: int
    ledger_id: int
    entry_id: int


def cut(
    indexes: Iterable[DelayedIndex], time_step_ms: int = DEFAULT_TIME_STEP_MS, max_indexes: int = DEFAULT_MAX_INDEXES
) -> Iterator[list[DelayedIndex]]:
    """Segments of waiting messages, which come in order; no segment is empty."""
    segment: list[DelayedIndex] = []
    for index in indexes:
        if segment and (index.time_ms - segment[0].time_ms >= time_step_ms or len(segment) >= max_indexes):
            yield segment
            segment = []
        segment.append(index)
    if segment:
        yield segment
