"""The rules of ``assembly.rules`` with bytes beside them: what arrives goes in, whole messages and
rejects come out.

The same whether the bytes are kept in a task's memory or in Spark's state: ``KeptEntries`` is all that
differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ledgerlake.assembly.rules import ChunkedMessageKey, Deliver, Effect, IncompleteMessages, Reject, Retain, Spill
from ledgerlake.decode.messages import WHOLE_BATCH, BatchRange

if TYPE_CHECKING:
    from ledgerlake.assembly.rules import Chunk, IncompleteMessage, Limits
    from ledgerlake.wire.chunks import Marker
    from ledgerlake.wire.message_id import Position


Entry = bytes | memoryview


class KeptEntries(Protocol):
    """Entries kept by position."""

    def take(self, position: Position) -> Entry | None:
        """The entry, which is gone from here afterwards; None if it is not kept."""

    def drop(self, position: Position) -> None:
        """Let go of an entry, kept or not."""


@dataclass(frozen=True)
class Assembled:
    """A whole message: its chunks in order. ``entries`` is None if they must be read from the topic
    again.

    Iterating ``entries`` takes them out of where they are kept. ``key`` is whose chunks they must be,
    None if a release that did not store it spilled it.
    ``deliver_ms`` is when it is to be delivered, if it has to wait; ``delivered_ms`` when it was,
    if it had to, and ``outputs`` then as in ``DueEntries``. ``refused``: it is no message, for this
    reason. ``known``: the chunks that become rejects if their bytes are not here and it is no message;
    a marker may have listed others, which are none of its message or were never read.
    """

    positions: tuple[Position, ...]
    entries: Iterable[Entry | None] | None
    deliver_ms: int | None = None
    delivered_ms: int | None = None
    outputs: Mapping[str, Position] = field(default_factory=dict)
    key: ChunkedMessageKey | None = None
    refused: str | None = None
    known: tuple[Position, ...] = ()


@dataclass(frozen=True)
class Rejected:
    """Chunks that cannot become a message; an entry is None if only the topic may still have it."""

    reason: str
    entries: list[tuple[Position, Entry | None]]


@dataclass(frozen=True)
class DueEntries:
    """Delayed entries, in the order in which they are due: whole MESSAGE frames.

    ``outputs`` are those beside the table; what stands at an output's position or before is not for
    it. ``first_entry`` is what of the first entry is due.
    """

    frames: Entry
    delivered_ms: int
    outputs: Mapping[str, Position]
    first_entry: BatchRange = WHOLE_BATCH


@dataclass(frozen=True)
class DuePositions:
    """Delayed entries of which only the topic has the bytes."""

    positions: list[Position]
    delivered_ms: int
    outputs: Mapping[str, Position]


Outcome = Assembled | Rejected | DueEntries | DuePositions


class Assembly:
    """The incomplete messages of one topic partition with their bytes.

    The entry of an arriving chunk must be in ``parts``; outcomes are to be used up before the next
    call. With ``hold_delayed`` the entries of a message that is to be delivered later stay in
    ``parts`` unless they are taken.
    """

    def __init__(
        self, limits: Limits, parts: KeptEntries, sets: Iterable[IncompleteMessage] = (), *, hold_delayed: bool = False
    ) -> None:
        self.pending = IncompleteMessages(limits, sets)
        self._parts = parts
        self._hold_delayed = hold_delayed

    def arrive(self, chunk: Chunk) -> Iterator[Outcome]:
        effects = self.pending.arrive(chunk)
        yield from self._apply(effects, chunk.deliver_ms)
        if Retain(chunk.position) not in effects and not any(_takes_parts(effect) for effect in effects):
            self._parts.drop(chunk.position)

    def mark(self, marker: Marker) -> Iterator[Outcome]:
        effects = self.pending.mark(ChunkedMessageKey(marker.producer_name, marker.uuid), marker.positions)
        yield from self._apply(effects, marker.deliver_ms)

    def supersede(self, key: ChunkedMessageKey) -> Iterator[Outcome]:
        yield from self._apply(self.pending.supersede(key))

    def adopt(self, opened: IncompleteMessage) -> Iterator[Outcome]:
        yield from self._apply(self.pending.adopt(opened))

    def expire(self, now_ms: int) -> Iterator[Outcome]:
        yield from self._apply(self.pending.expire(now_ms))

    def _apply(self, effects: list[Effect], deliver_ms: int | None = None) -> Iterator[Outcome]:
        for effect in effects:
            if isinstance(effect, Spill):
                for position in effect.positions:
                    self._parts.drop(position)
            elif isinstance(effect, Deliver):
                entries = None if effect.reread else map(self._parts.take, effect.positions)
                waits_ms = deliver_ms if self._hold_delayed else None
                yield Assembled(effect.positions, entries, waits_ms, key=effect.key, known=effect.known)
                # A message that is read again has no entries in ``parts``, and a marker may have
                # listed chunks of others.
                if waits_ms is None and not effect.reread:
                    for position in effect.positions:
                        self._parts.drop(position)
            elif isinstance(effect, Reject):
                yield Rejected(effect.reason, [(one, self._parts.take(one)) for one in effect.positions])


def _takes_parts(effect: Effect) -> bool:
    return isinstance(effect, Deliver) and not effect.reread
