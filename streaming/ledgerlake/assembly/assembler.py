"""Applies the rules of ``assembly.rules`` to entries: chunks go in, complete messages and rejects
come out.

The entries are kept in a task's memory or in Spark's state, behind the interface ``KeptEntries``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ledgerlake.assembly.rules import (
    Chunk,
    ChunkedMessageKey,
    ChunkEvent,
    Deliver,
    Effect,
    IncompleteMessages,
    Reject,
    Retain,
    Spill,
)
from ledgerlake.reasons import Reason
from ledgerlake.wire.limits import MAX_TIME_MS

if TYPE_CHECKING:
    from ledgerlake.assembly.rules import IncompleteMessage, Limits
    from ledgerlake.wire.chunks import Marker
    from ledgerlake.wire.message_id import Position


Entry = bytes | memoryview


class KeptEntries(Protocol):
    """Entries kept by position. A position has one: an entry that comes to one that is kept is
    refused.
    """

    def is_refused(self, position: Position) -> bool:
        """Return whether an entry was refused that came to this position."""

    def take(self, position: Position) -> Entry | None:
        """Remove an entry and return it; None if it is not kept."""

    def drop(self, position: Position) -> None:
        """Remove an entry if it is kept."""


@dataclass(frozen=True)
class Assembled:
    """A complete message: its chunks in order. ``entries`` is None if they must be read from the
    topic again.

    Iterating ``entries`` removes them from the kept entries. The entries of a delayed message can
    be iterated again, until the next outcome is asked for. ``key`` is the key that the chunks must
    have; None if the message was spilled by a release that did not store it.

    ``deliver_ms`` is the requested time, set if the message must still be delayed. ``delivered_ms``
    is the release time, set once it is due; ``due_ms`` is then the time by which it waited, and
    ``outputs`` is as in ``DueEntries``.

    ``schedule_id`` is the id of its schedule, if any, and ``stored_ms`` the time when it was
    stored. ``stands_at`` is the position of what completed it, its last chunk or its marker: no
    cancel and no schedule before that hits it. ``clock_ms`` is as in ``DueEntries``.

    ``known``, if ``entries`` is None: the chunks that become rejects if the message cannot be read.
    A marker may have listed other entries, which belong to other messages or were never read.
    """

    positions: tuple[Position, ...]
    entries: Iterable[Entry | None] | None
    stands_at: Position
    deliver_ms: int | None = None
    delivered_ms: int | None = None
    due_ms: int | None = None
    outputs: Mapping[str, Position] = field(default_factory=dict)
    key: ChunkedMessageKey | None = None
    known: tuple[Position, ...] = ()
    schedule_id: str | None = None
    stored_ms: int = 0
    clock_ms: int | None = None


@dataclass(frozen=True)
class Rejected:
    """Chunks that cannot become a message; an entry is None if only the topic may still have it."""

    reason: Reason
    entries: list[tuple[Position, Entry | None]]


class Assembly:
    """The incomplete messages of one topic partition with their bytes.

    The methods return lazy iterators: a chunk or marker is added when its iterator is iterated, and
    each iterator must be used up before the next call. The entry of an arriving chunk must be among
    the kept entries, or be refused there: then the chunk is rejected. If ``delays_messages``, the
    entries of a message that is to be delivered later stay there unless they are taken.
    """

    def __init__(
        self,
        limits: Limits,
        kept_entries: KeptEntries,
        messages: Iterable[IncompleteMessage] = (),
        *,
        delays_messages: bool = False,
    ) -> None:
        self.pending = IncompleteMessages(limits, messages)
        self._kept_entries = kept_entries
        self._delays_messages = delays_messages

    def arrive(self, chunk: Chunk) -> Iterator[Assembled | Rejected]:
        """Add a chunk; yield what it completes or rejects."""
        if self._kept_entries.is_refused(chunk.position):
            yield Rejected(ChunkEvent.KNOWN.value, [(chunk.position, None)])
            return
        effects = self.pending.arrive(chunk)
        yield from self._apply(effects, chunk)
        if Retain(chunk.position) not in effects and not any(
            _takes_entries(effect) for effect in effects
        ):
            self._kept_entries.drop(chunk.position)

    def apply_marker(self, marker: Marker) -> Iterator[Assembled | Rejected]:
        """Apply a marker; yield the message that it completes, or rejects."""
        effects = self.pending.apply_marker(
            ChunkedMessageKey(marker.producer_name, marker.uuid), marker.positions
        )
        yield from self._apply(effects, marker)

    def supersede(self, key: ChunkedMessageKey) -> Iterator[Assembled | Rejected]:
        """Reject the incomplete message of a key, because a message of that key began elsewhere."""
        yield from self._apply(self.pending.supersede(key))

    def evict(self, key: ChunkedMessageKey) -> Iterator[Assembled | Rejected]:
        """Reject the incomplete message of a key, because there is no room for it."""
        yield from self._apply(self.pending.evict(key))

    def adopt(self, message: IncompleteMessage) -> Iterator[Assembled | Rejected]:
        """Continue an incomplete message that began elsewhere; yield what has to give way to it. If
        another chunk waits at one of its positions, it is rejected itself.
        """
        positions = set(message.positions)
        refused = set(filter(self._kept_entries.is_refused, positions))
        if refused or self.pending.has_chunk_of_another(message.key, positions):
            own = set() if message.spilled else positions - refused
            yield self._reject_chunks(ChunkEvent.KNOWN.value, message.positions, own)
        else:
            yield from self._apply(self.pending.adopt(message))

    def expire(self, now_ms: int) -> Iterator[Assembled | Rejected]:
        """Reject the messages that are too old at a time."""
        yield from self._apply(self.pending.expire(now_ms))

    def _apply(
        self, effects: list[Effect], arrived: Chunk | Marker | None = None
    ) -> Iterator[Assembled | Rejected]:
        arriving = {arrived.position} if isinstance(arrived, Chunk) else set()
        for effect in effects:
            if isinstance(effect, Spill):
                for position in effect.positions:
                    self._kept_entries.drop(position)
            elif isinstance(effect, Deliver):
                # Nothing else completes a message.
                assert arrived is not None
                entries = None if effect.reread else map(self._kept_entries.take, effect.positions)
                delayed_until_ms = arrived.deliver_ms if self._delays_messages else None
                yield Assembled(
                    effect.positions,
                    entries,
                    arrived.position,
                    delayed_until_ms,
                    key=effect.key,
                    known=effect.known,
                    schedule_id=arrived.schedule_id,
                    stored_ms=_stored_ms(arrived),
                )
                # A message that is read again has no kept entries, and a marker may have listed
                # chunks of other messages.
                if delayed_until_ms is None and not effect.reread:
                    for position in effect.positions:
                        self._kept_entries.drop(position)
            elif isinstance(effect, Reject):
                own = set(effect.positions) if effect.bytes_kept else arriving
                yield self._reject_chunks(effect.reason, effect.positions, own)

    def _reject_chunks(
        self, reason: Reason, positions: tuple[Position, ...], own: set[Position]
    ) -> Rejected:
        """Return the reject of chunks.

        Args:
            own: the positions at which their bytes are kept. At others there may be bytes of
                another message.
        """
        take = self._kept_entries.take
        return Rejected(
            reason,
            [(position, take(position) if position in own else None) for position in positions],
        )


def _stored_ms(completed_by: Chunk | Marker) -> int:
    """Return when a message was stored, by its last chunk or its marker; by the producer's clock if
    the broker gives no time; 0 if neither is a time.
    """
    if completed_by.time_ms is not None:
        return completed_by.time_ms
    return completed_by.publish_ms if 0 <= completed_by.publish_ms <= MAX_TIME_MS else 0


def _takes_entries(effect: Effect) -> bool:
    return isinstance(effect, Deliver) and not effect.reread
