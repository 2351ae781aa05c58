"""Large messages put together from their chunks (PIP-37): the rules, without bytes, storage or a
clock.

A producer splits a message into ``chunk_count`` chunks, ids from 0, all with one uuid; chunks of
several producers interleave on a topic partition. An incomplete message is known by producer and
uuid.

What a chunk does to the incomplete message of its producer and uuid:

    event       chunk                                          what follows
    invalid     id, count or size that no message can have     the chunk is rejected, the message stays as it is
    too_large   claims more bytes than the limit               likewise
    first       id 0, nothing of its message is here           an incomplete message begins
    resent      id 0, another position than the one here       its chunks are rejected, the message begins again
    repeated    a position that is here already                nothing: the same stored entry twice
    mismatch    another count, total size or publish time      the chunk is rejected, the message stays
    duplicate   an id that is here, at another position        the chunk is rejected, the message stays
    next        the id after the last one here                 kept; the last one completes the message
    gap         an id beyond the next                          chunk and message are rejected: what is between cannot come
    orphan      id above 0, nothing of its message is here     the chunk is rejected
    awaited     orphan or gap, and a marker is promised        its position is kept: the marker tells the rest

A marker message (PIP-37, option 2) lists the positions of all chunks of one message. Chunks that
are published so promise it in their metadata. If nothing is here of a marker's message, it was
delivered before; else it is delivered by the marker's list. A marker that lists a chunk of another
incomplete message is refused, and its own message with it.

A uuid is ``<producer>-<sequence id>`` and comes again when a producer restarts with a lower
sequence. The publish time tells the two messages apart: the Java, C++ and Go clients stamp a
message once, before they cut it, and a producer that sends chunks again after a reconnect sends the
same bytes. A first chunk that comes again is ``resent`` in both cases.

Rules kept here:
  - Every chunk ends exactly once: delivered with its message, rejected, or kept with an incomplete
    message.
  - At the limit of messages or bytes the oldest incomplete message is spilled, as PIP-37's "marked
    for redelivery": its bytes leave, its positions stay, and it is delivered all the same, with its
    chunks read again by position.
  - Spilled messages are limited in number too; beyond that the oldest is rejected
    (``chunk_evicted``).
  - The age of a message is measured by the clock of the micro-batches: the broker's time if the
    broker gives one, else the planner's. A message whose first chunk came without a broker time is
    as old as the first ``expire`` that sees it.
  - Sizes are checked against the total as chunks arrive; a claimed size never sizes anything.

Reasons that end in ``rejects``: ``chunk_invalid``, ``too_large``, ``chunk_resent``,
``chunk_mismatch``, ``chunk_duplicate``, ``chunk_gap``, ``chunk_orphan``, ``chunk_size``,
``chunk_evicted``, ``chunk_expired``, ``malformed_marker``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from ledgerlake.wire.limits import MAX_CHUNKS
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable


# The reason of a marker that cannot be right, and of the chunks whose message it was to complete.
MALFORMED_MARKER = "malformed_marker"


@dataclass(frozen=True)
class Limits:
    """The limits of incomplete messages on one topic partition."""

    max_pending: int = 1000
    max_pending_bytes: int = 256 * 1024 * 1024
    max_spilled: int = 10_000
    max_chunks: int = MAX_CHUNKS
    max_message_bytes: int = 1024 * 1024 * 1024
    expire_after_ms: int = 3_600_000


@dataclass(frozen=True, slots=True)
class ChunkedMessageKey:
    """Which message a chunk belongs to."""

    producer_name: str
    uuid: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """An arriving chunk. ``size_bytes`` is what it adds to the message, after decryption.

    ``time_ms`` is the broker's, None if the broker gives none; ``publish_ms`` the producer's, which
    tells messages with the same uuid apart and is never the clock. ``deliver_ms`` is when the
    message is to be delivered, if it says.
    """

    key: ChunkedMessageKey
    position: Position
    chunk_id: int
    chunk_count: int
    total_bytes: int
    size_bytes: int
    time_ms: int | None
    publish_ms: int
    marked: bool = False
    deliver_ms: int | None = None


@dataclass(frozen=True, slots=True)
class IncompleteMessage:
    """The chunks that have come of a message: the positions of chunks 0 to n-1, and whether their
    bytes are held.

    ``opened_ms`` is None until a clock has seen the message; ``publish_ms`` is None if a release
    wrote it that did not store it. ``awaiting``: some chunks were missed, the positions are those of the
    others, and only a marker can complete the message.
    """

    key: ChunkedMessageKey
    chunk_count: int
    total_bytes: int
    opened_ms: int | None
    publish_ms: int | None
    positions: tuple[Position, ...]
    arrived_bytes: int
    spilled: bool = False
    awaiting: bool = False

    @property
    def held_bytes(self) -> int:
        return 0 if self.spilled else self.arrived_bytes


@dataclass(frozen=True, slots=True)
class Retain:
    """Keep the arriving chunk's bytes."""

    position: Position


@dataclass(frozen=True, slots=True)
class Spill:
    """Drop the bytes of these chunks; their message goes on with positions alone."""

    positions: tuple[Position, ...]


@dataclass(frozen=True, slots=True)
class Deliver:
    """The message is complete: its chunks in order. ``reread``: the earlier chunks' bytes are not
    held; ``known`` are then the chunks that have come, and a marker may have listed others.
    """

    key: ChunkedMessageKey
    positions: tuple[Position, ...]
    reread: bool
    known: tuple[Position, ...] = ()


@dataclass(frozen=True, slots=True)
class Reject:
    """These chunks cannot become a message. ``held``: their bytes are held, and are free now."""

    reason: str
    key: ChunkedMessageKey
    positions: tuple[Position, ...]
    held: bool


Effect = Retain | Spill | Deliver | Reject


class Event(Enum):
    """An arriving chunk as the rules see it; see the module's table."""

    INVALID = "chunk_invalid"
    TOO_LARGE = "too_large"
    FIRST = "first"
    RESENT = "chunk_resent"
    REPEATED = "repeated"
    MISMATCH = "chunk_mismatch"
    DUPLICATE = "chunk_duplicate"
    NEXT = "next"
    GAP = "chunk_gap"
    ORPHAN = "chunk_orphan"
    AWAITED = "awaited"


def classify(chunk: Chunk, held: IncompleteMessage | None, limits: Limits) -> Event:
    """Read the table: the first line that fits."""
    if (
        not 0 <= chunk.chunk_id < chunk.chunk_count
        or chunk.chunk_count < 2
        or min(chunk.total_bytes, chunk.size_bytes) < 0
    ):
        return Event.INVALID
    if chunk.total_bytes > limits.max_message_bytes or chunk.chunk_count > limits.max_chunks:
        return Event.TOO_LARGE
    if held is None and chunk.chunk_id == 0:
        return Event.FIRST
    if held is None:
        return Event.AWAITED if chunk.marked else Event.ORPHAN
    if chunk.position in held.positions:
        return Event.REPEATED
    if chunk.chunk_id == 0:
        return Event.RESENT
    if held.awaiting:
        return Event.AWAITED if len(held.positions) < limits.max_chunks else Event.ORPHAN
    if (chunk.chunk_count, chunk.total_bytes) != (held.chunk_count, held.total_bytes):
        return Event.MISMATCH
    if held.publish_ms is not None and chunk.publish_ms != held.publish_ms:
        return Event.MISMATCH
    if chunk.chunk_id < len(held.positions):
        return Event.DUPLICATE
    if chunk.chunk_id == len(held.positions):
        return Event.NEXT
    return Event.AWAITED if chunk.marked else Event.GAP


class IncompleteMessages:
    """Those of one topic partition. ``sets`` is all there is to keep over a restart."""

    def __init__(self, limits: Limits, sets: Iterable[IncompleteMessage] = ()) -> None:
        self._limits = limits
        self._held: OrderedDict[ChunkedMessageKey, IncompleteMessage] = OrderedDict()
        self._spilled: OrderedDict[ChunkedMessageKey, IncompleteMessage] = OrderedDict()
        self._held_bytes = 0
        # Whose chunks stand where, so that a marker cannot list those of another message.
        self._owners: dict[Position, ChunkedMessageKey] = {}
        for one in sets:
            self._put(one)

    @property
    def sets(self) -> tuple[IncompleteMessage, ...]:
        """Return the spilled messages, then those that are held, each oldest first; a message that
        begins again becomes the youngest.
        """
        return (*self._spilled.values(), *self._held.values())

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def find(self, key: ChunkedMessageKey) -> IncompleteMessage | None:
        return self._held.get(key) or self._spilled.get(key)

    def arrive(self, chunk: Chunk) -> list[Effect]:
        """Take one chunk; what is to be done, in this order."""
        event = classify(chunk, self.find(chunk.key), self._limits)
        return _STEPS[event](self, chunk, event)

    def mark(self, key: ChunkedMessageKey, positions: tuple[Position, ...]) -> list[Effect]:
        """Take a marker: the message's chunks, in order. Nothing if none of its chunks is here."""
        incomplete = self.find(key)
        if incomplete is None:
            return []
        if self.has_chunk_of_another(key, positions):
            return [self._give_up(key, MALFORMED_MARKER)]
        self._take(key)
        effects: list[Effect] = [] if incomplete.spilled else [Spill(incomplete.positions)]
        listed = set(positions)
        left = tuple(position for position in incomplete.positions if position not in listed)
        if left:
            effects.append(Reject("chunk_duplicate", key, left, held=False))
        known = tuple(position for position in incomplete.positions if position in listed)
        return [*effects, Deliver(key, positions, reread=True, known=known)]

    def has_chunk_of_another(self, key: ChunkedMessageKey | None, positions: Iterable[Position]) -> bool:
        """Return whether a chunk of another incomplete message stands at one of the positions."""
        return any(self._owners.get(position, key) != key for position in positions)

    def supersede(self, key: ChunkedMessageKey) -> list[Effect]:
        """A message of this key began again somewhere else: what is open of it is given up."""
        return [self._give_up(key, Event.RESENT.value)] if self.find(key) else []

    def adopt(self, opened: IncompleteMessage) -> list[Effect]:
        """Go on with a message that began elsewhere, younger than all that are here; its bytes
        come along if held.
        """
        effects = self.supersede(opened.key)
        self._put(opened)
        return [*effects, *self._make_room()]

    def expire(self, now_ms: int) -> list[Effect]:
        """Give up every message whose first chunk is older than allowed; one without a time began
        now.
        """
        oldest_ms = now_ms - self._limits.expire_after_ms
        effects: list[Effect] = []
        for one in self.sets:
            if one.opened_ms is None:
                self._put(replace(one, opened_ms=now_ms))
            elif one.opened_ms < oldest_ms:
                effects.append(self._give_up(one.key, "chunk_expired"))
        return effects

    def _reject_chunk(self, chunk: Chunk, event: Event) -> list[Effect]:
        return [_reject_alone(chunk, event.value)]

    def _ignore(self, _chunk: Chunk, _event: Event) -> list[Effect]:
        return []

    def _start_over(self, chunk: Chunk, event: Event) -> list[Effect]:
        return [self._give_up(chunk.key, event.value), *self._open(chunk, event)]

    def _close_gap(self, chunk: Chunk, event: Event) -> list[Effect]:
        return [self._give_up(chunk.key, event.value), _reject_alone(chunk, event.value)]

    def _open(self, chunk: Chunk, _event: Event) -> list[Effect]:
        if chunk.size_bytes > chunk.total_bytes:
            return [_reject_alone(chunk, "chunk_size")]
        self._put(replace(_nothing_of(chunk), positions=(chunk.position,), arrived_bytes=chunk.size_bytes))
        return [Retain(chunk.position), *self._make_room()]

    def _append(self, chunk: Chunk, _event: Event) -> list[Effect]:
        held = self._held.get(chunk.key) or self._spilled[chunk.key]
        arrived_bytes = held.arrived_bytes + chunk.size_bytes
        complete = chunk.chunk_id == held.chunk_count - 1
        if arrived_bytes > held.total_bytes or (complete and arrived_bytes != held.total_bytes):
            return [self._give_up(chunk.key, "chunk_size"), _reject_alone(chunk, "chunk_size")]
        if complete:
            self._take(chunk.key)
            positions = (*held.positions, chunk.position)
            return [Deliver(chunk.key, positions, held.spilled, known=positions if held.spilled else ())]
        self._put(replace(held, positions=(*held.positions, chunk.position), arrived_bytes=arrived_bytes))
        return [] if held.spilled else [Retain(chunk.position), *self._make_room()]

    def _await(self, chunk: Chunk, _event: Event) -> list[Effect]:
        before = self.find(chunk.key)
        effects: list[Effect] = []
        if before is None:
            before = _nothing_of(chunk)
        elif not before.spilled:
            self._take(chunk.key)
            effects.append(Spill(before.positions))
        self._put(replace(before, positions=(*before.positions, chunk.position), spilled=True, awaiting=True))
        return [*effects, *self._make_room()]

    def _make_room(self) -> list[Effect]:
        """Spill the oldest messages until the limits hold, and give up what is too much even so."""
        limits = self._limits
        effects: list[Effect] = []
        while self._held and (len(self._held) > limits.max_pending or self._held_bytes > limits.max_pending_bytes):
            oldest = self._take(next(iter(self._held)))
            self._put(replace(oldest, spilled=True))
            effects.append(Spill(oldest.positions))
        while len(self._spilled) > limits.max_spilled:
            effects.append(self._give_up(next(iter(self._spilled)), "chunk_evicted"))
        return effects

    def _give_up(self, key: ChunkedMessageKey, reason: str) -> Reject:
        given_up = self._take(key)
        return Reject(reason, key, given_up.positions, held=not given_up.spilled)

    def _put(self, changed: IncompleteMessage) -> None:
        """Store a message; one that is there already keeps its place."""
        where = self._spilled if changed.spilled else self._held
        before = where.get(changed.key)
        self._held_bytes += changed.held_bytes - (before.held_bytes if before else 0)
        # Positions are only ever appended.
        self._owners.update(dict.fromkeys(changed.positions[len(before.positions) if before else 0 :], changed.key))
        where[changed.key] = changed

    def _take(self, key: ChunkedMessageKey) -> IncompleteMessage:
        taken = self._held.pop(key, None) or self._spilled.pop(key)
        self._held_bytes -= taken.held_bytes
        for position in taken.positions:
            self._owners.pop(position, None)
        return taken


def _nothing_of(chunk: Chunk) -> IncompleteMessage:
    """The message of a chunk, before the chunk itself."""
    return IncompleteMessage(chunk.key, chunk.chunk_count, chunk.total_bytes, chunk.time_ms, chunk.publish_ms, (), 0)


def _reject_alone(chunk: Chunk, reason: str) -> Reject:
    return Reject(reason, chunk.key, (chunk.position,), held=False)


_STEPS: dict[Event, Callable[[IncompleteMessages, Chunk, Event], list[Effect]]] = {
    Event.INVALID: IncompleteMessages._reject_chunk,
    Event.TOO_LARGE: IncompleteMessages._reject_chunk,
    Event.FIRST: IncompleteMessages._open,
    Event.RESENT: IncompleteMessages._start_over,
    Event.REPEATED: IncompleteMessages._ignore,
    Event.MISMATCH: IncompleteMessages._reject_chunk,
    Event.DUPLICATE: IncompleteMessages._reject_chunk,
    Event.NEXT: IncompleteMessages._append,
    Event.GAP: IncompleteMessages._close_gap,
    Event.ORPHAN: IncompleteMessages._reject_chunk,
    Event.AWAITED: IncompleteMessages._await,
}
