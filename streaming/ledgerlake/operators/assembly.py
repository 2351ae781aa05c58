"""The rules of ``state.chunks`` with bytes beside them: what arrives goes in, whole messages and rejects come out.

The same whether the bytes are kept in a task's memory or in Spark's state: ``Parts`` is all that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ledgerlake.state.chunks import Deliver, Effect, Hold, PendingSets, PutAside, Reject

if TYPE_CHECKING:
    from ledgerlake.state.chunks import Chunk, Limits, OpenSet, SetKey
    from ledgerlake.wire.message_id import Position


Entry = bytes | memoryview


class Parts(Protocol):
    """Entries kept by position."""

    def take(self, position: Position) -> Entry | None:
        """The entry, which is gone from here afterwards; None where it is not kept."""

    def drop(self, position: Position) -> None:
        """Let go of an entry, kept or not."""


@dataclass(frozen=True)
class Assembled:
    """A whole message: its chunks in order. ``entries`` is None where they must be read from the topic again."""

    positions: tuple[Position, ...]
    entries: Iterable[Entry | None] | None


@dataclass(frozen=True)
class Rejected:
    """Chunks that cannot become a message; an entry is None where only the topic may still have it."""

    reason: str
    entries: list[tuple[Position, Entry | None]]


Outcome = Assembled | Rejected


class Assembly:
    """The open sets of one topic partition with their bytes.

    The entry of an arriving chunk must be in ``parts``; outcomes are to be used up before the next call.
    """

    def __init__(self, limits: Limits, parts: Parts, sets: Iterable[OpenSet] = ()) -> None:
        self.pending = PendingSets(limits, sets)
        self._parts = parts

    def arrive(self, chunk: Chunk) -> Iterator[Outcome]:
        effects = self.pending.arrive(chunk)
        yield from self._apply(effects)
        if Hold(chunk.position) not in effects:
            self._parts.drop(chunk.position)

    def mark(self, key: SetKey, positions: tuple[Position, ...]) -> Iterator[Outcome]:
        yield from self._apply(self.pending.mark(key, positions))

    def supersede(self, key: SetKey) -> Iterator[Outcome]:
        yield from self._apply(self.pending.supersede(key))

    def adopt(self, opened: OpenSet) -> Iterator[Outcome]:
        yield from self._apply(self.pending.adopt(opened))

    def expire(self, now_ms: int) -> Iterator[Outcome]:
        yield from self._apply(self.pending.expire(now_ms))

    def _apply(self, effects: list[Effect]) -> Iterator[Outcome]:
        for effect in effects:
            if isinstance(effect, PutAside):
                for position in effect.positions:
                    self._parts.drop(position)
            elif isinstance(effect, Deliver):
                entries = None if effect.reread else map(self._parts.take, effect.positions)
                yield Assembled(effect.positions, entries)
                for position in effect.positions:
                    self._parts.drop(position)
            elif isinstance(effect, Reject):
                yield Rejected(effect.reason, [(one, self._parts.take(one)) for one in effect.positions])
