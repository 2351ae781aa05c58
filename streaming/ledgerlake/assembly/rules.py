"""The rules by which chunks become large messages (PIP-37), without bytes, storage or a clock.

A producer splits a message into ``chunk_count`` chunks, ids from 0, all with one uuid; chunks of
several producers interleave on a topic partition. An incomplete message is known by producer and
uuid.

What a chunk does to the incomplete message of its producer and uuid:

    event       chunk                                          effect
    known       at the position of a chunk that waits          the chunk is rejected, the message
                                                               stays
    invalid     id, count or size that no message can have     the chunk is rejected, the message
                                                               stays as it is
    too_large   claims more bytes than the limit               likewise
    first       id 0, there is no incomplete message           an incomplete message begins
    resent      id 0, at another position than before          its chunks are rejected, the message
                                                               begins again
    mismatch    another count, total size or publish time      the chunk is rejected, the message
                                                               stays
    duplicate   an id that was added, at another position      the chunk is rejected, the message
                                                               stays
    next        the id after the last one                      the chunk is kept; the last one
                                                               completes the message
    gap         an id beyond the next                          chunk and message are rejected: the
                                                               chunks between cannot come
    orphan      id above 0, there is no incomplete message     the chunk is rejected
    awaited     orphan or gap, but it promises a marker        its position is kept; the marker
                                                               lists the others

A marker message (PIP-37, option 2) lists the positions of all chunks of one message. Chunks of such
a message promise the marker in their metadata. If there is no incomplete message of a marker's key,
the message was delivered before; else it is delivered by the marker's list. A marker that lists a
chunk of another incomplete message is refused, and its own message is rejected.

A position is read once. So a chunk is ``known`` only if the topic was created again in another
cluster, where ids begin anew: two entries have one position then, and the one that waits keeps it.

A uuid is ``<producer>-<sequence id>`` and comes again when a producer restarts with a lower
sequence. The publish time tells the two messages apart: the Java, C++ and Go clients stamp a
message once, before they cut it, and a producer that sends chunks again after a reconnect sends the
same bytes. A first chunk that comes again is ``resent`` in both cases.

Pulsar.Client for .NET stamps each chunk, so its messages are not joined, unless the times happen to
be the same. No weaker rule will do, such as that times rise. If the first chunk of the later
message is missing, its next chunk would complete the earlier one. Producers of one name in two
clusters that replicate to each other even interleave, without a chunk that is missing.

Rules kept here:
  - Every chunk ends exactly once: delivered with its message, rejected, or kept with an incomplete
    message.
  - At the limit of messages or bytes the oldest incomplete message is spilled, as PIP-37's "marked
    for redelivery": its bytes are dropped, its positions stay. When it is complete, its chunks are
    read again by position.
  - The limit of bytes counts stored entries: what a producer puts beside the payload is kept too.
  - Spilled messages are limited in number too, and the chunks of all messages together. Beyond that
    the oldest is rejected (``chunk_evicted``), spilled ones first.
  - The age of a message is measured by the clock of the micro-batches: the broker's time if the
    broker gives one, else the planner's. A message whose first chunk came without a broker time is
    as old as the first ``expire`` that sees it.
  - Sizes are checked against the total as chunks arrive; a claimed size never sizes anything.

Reasons of rejects: ``chunk_known``, ``chunk_invalid``, ``too_large``, ``chunk_resent``,
``chunk_mismatch``, ``chunk_duplicate``, ``chunk_gap``, ``chunk_orphan``, ``chunk_size``,
``chunk_evicted``, ``chunk_expired``, ``malformed_marker``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from ledgerlake import reasons
from ledgerlake.wire.limits import MAX_CHUNKS, MAX_INCOMPLETE_CHUNKS
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Limits:
    """The limits of incomplete messages on one topic partition.

    ``max_pending_bytes`` limits the entries that are kept, ``max_incomplete_chunks`` the chunks of
    all messages together, ``max_chunks`` the chunks of one message.
    """

    max_pending: int = 1000
    max_pending_bytes: int = 256 * 1024 * 1024
    max_spilled: int = 10_000
    max_incomplete_chunks: int = MAX_INCOMPLETE_CHUNKS
    max_chunks: int = MAX_CHUNKS
    max_message_bytes: int = 1024 * 1024 * 1024
    expire_after_ms: int = 3_600_000


@dataclass(frozen=True, slots=True)
class ChunkedMessageKey:
    """The key that all chunks of one message share."""

    producer_name: str
    uuid: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """An arriving chunk. ``size_bytes`` is the number of bytes that it adds to the message, after
    decryption; ``entry_bytes`` is the size of its stored entry.

    ``time_ms`` is the broker's time, None if the broker gives none. ``publish_ms`` is the
    producer's time, which tells messages with the same uuid apart and is never used as the clock.
    ``has_marker`` says whether the chunk promises a marker. ``deliver_ms`` is the requested
    delivery time, if any, and ``schedule_id`` the id of the message's schedule.
    """

    key: ChunkedMessageKey
    position: Position
    chunk_id: int
    chunk_count: int
    total_bytes: int
    size_bytes: int
    entry_bytes: int
    time_ms: int | None
    publish_ms: int
    has_marker: bool = False
    deliver_ms: int | None = None
    schedule_id: str | None = None


@dataclass(frozen=True, slots=True)
class IncompleteMessage:
    """The chunks of a message that have arrived: the positions of chunks 0 to n-1. If the message
    is ``spilled``, their bytes are not kept.

    ``arrived_bytes`` is the size of their payloads, ``kept_bytes`` the size of the stored entries
    that are kept. ``opened_ms`` is None until a clock has seen the message. ``publish_ms`` is that
    of its chunks. ``awaiting``: some chunks were missed, ``positions`` are the others, and only a
    marker can complete the message.
    """

    key: ChunkedMessageKey
    chunk_count: int
    total_bytes: int
    opened_ms: int | None
    publish_ms: int
    positions: tuple[Position, ...]
    arrived_bytes: int
    kept_bytes: int
    spilled: bool = False
    awaiting: bool = False


@dataclass(slots=True)
class ArrivingMessage:
    """An incomplete message to which chunks are added, each at the same cost. ``positions`` are in
    the order of the chunks; the other fields are as in ``IncompleteMessage``.
    """

    key: ChunkedMessageKey
    chunk_count: int
    total_bytes: int
    opened_ms: int | None
    publish_ms: int
    positions: dict[Position, None]
    arrived_bytes: int = 0
    kept_bytes: int = 0
    spilled: bool = False
    awaiting: bool = False

    @classmethod
    def of(cls, message: IncompleteMessage) -> ArrivingMessage:
        """Return a stored message, so that its other chunks can be added."""
        return cls(**_fields(message) | {"positions": dict.fromkeys(message.positions)})

    def to_stored(self) -> IncompleteMessage:
        """Return the message as it is stored."""
        return IncompleteMessage(**_fields(self) | {"positions": tuple(self.positions)})


@dataclass(frozen=True, slots=True)
class Retain:
    """The bytes of the arriving chunk must be kept."""

    position: Position


@dataclass(frozen=True, slots=True)
class Spill:
    """The bytes of these chunks must be dropped; their message keeps the positions alone."""

    positions: tuple[Position, ...]


@dataclass(frozen=True, slots=True)
class Deliver:
    """The message is complete: its chunks in order. If ``reread``, the earlier chunks' bytes are
    not kept. ``known`` are then the chunks that have arrived; a marker may have listed others.
    """

    key: ChunkedMessageKey
    positions: tuple[Position, ...]
    reread: bool
    known: tuple[Position, ...] = ()


@dataclass(frozen=True, slots=True)
class Reject:
    """These chunks cannot become a message. If ``bytes_kept``, their bytes are still kept, and are
    no longer needed.
    """

    reason: reasons.Reason
    key: ChunkedMessageKey
    positions: tuple[Position, ...]
    bytes_kept: bool


Effect = Retain | Spill | Deliver | Reject


class ChunkEvent(Enum):
    """An arriving chunk as the rules see it; see the module's table."""

    KNOWN = reasons.CHUNK_KNOWN
    INVALID = reasons.CHUNK_INVALID
    TOO_LARGE = reasons.TOO_LARGE
    FIRST = "first"
    RESENT = reasons.CHUNK_RESENT
    MISMATCH = reasons.CHUNK_MISMATCH
    DUPLICATE = reasons.CHUNK_DUPLICATE
    NEXT = "next"
    GAP = reasons.CHUNK_GAP
    ORPHAN = reasons.CHUNK_ORPHAN
    AWAITED = "awaited"


def _classify(chunk: Chunk, incomplete: ArrivingMessage | None, limits: Limits) -> ChunkEvent:
    """Return the event of a chunk whose position is not known.

    Args:
        incomplete: the incomplete message of the chunk's key, if there is one.
    """
    if (
        not 0 <= chunk.chunk_id < chunk.chunk_count
        or chunk.chunk_count < 2
        or min(chunk.total_bytes, chunk.size_bytes) < 0
    ):
        return ChunkEvent.INVALID
    if chunk.total_bytes > limits.max_message_bytes or chunk.chunk_count > limits.max_chunks:
        return ChunkEvent.TOO_LARGE
    if incomplete is None and chunk.chunk_id == 0:
        return ChunkEvent.FIRST
    if incomplete is None:
        return ChunkEvent.AWAITED if chunk.has_marker else ChunkEvent.ORPHAN
    if chunk.chunk_id == 0:
        return ChunkEvent.RESENT
    if incomplete.awaiting:
        return (
            ChunkEvent.AWAITED
            if len(incomplete.positions) < limits.max_chunks
            else ChunkEvent.ORPHAN
        )
    if (chunk.chunk_count, chunk.total_bytes) != (incomplete.chunk_count, incomplete.total_bytes):
        return ChunkEvent.MISMATCH
    if chunk.publish_ms != incomplete.publish_ms:
        return ChunkEvent.MISMATCH
    if chunk.chunk_id < len(incomplete.positions):
        return ChunkEvent.DUPLICATE
    if chunk.chunk_id == len(incomplete.positions):
        return ChunkEvent.NEXT
    return ChunkEvent.AWAITED if chunk.has_marker else ChunkEvent.GAP


class IncompleteMessages:
    """The incomplete messages of one topic partition. ``messages`` is all that has to be stored."""

    def __init__(self, limits: Limits, messages: Iterable[IncompleteMessage] = ()) -> None:
        self._limits = limits
        self._kept: OrderedDict[ChunkedMessageKey, ArrivingMessage] = OrderedDict()
        self._spilled: OrderedDict[ChunkedMessageKey, ArrivingMessage] = OrderedDict()
        self._kept_bytes = 0
        # The message of each chunk: a position has one, and a marker cannot list chunks of another.
        self._owners: dict[Position, ChunkedMessageKey] = {}
        for message in messages:
            self._put(ArrivingMessage.of(message))

    @property
    def messages(self) -> tuple[IncompleteMessage, ...]:
        """Return the spilled messages, then the others, each oldest first; a message that begins
        again becomes the youngest.
        """
        return tuple(
            message.to_stored() for message in (*self._spilled.values(), *self._kept.values())
        )

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    def find(self, key: ChunkedMessageKey) -> ArrivingMessage | None:
        return self._kept.get(key) or self._spilled.get(key)

    def classify(self, chunk: Chunk) -> ChunkEvent:
        """Return the event of a chunk: the first line of the module's table that applies."""
        if chunk.position in self._owners:
            return ChunkEvent.KNOWN
        return _classify(chunk, self.find(chunk.key), self._limits)

    def arrive(self, chunk: Chunk) -> list[Effect]:
        """Add a chunk; return the effects to apply, in this order."""
        event = self.classify(chunk)
        return _STEPS[event](self, chunk, event)

    def apply_marker(self, key: ChunkedMessageKey, positions: tuple[Position, ...]) -> list[Effect]:
        """Apply a marker, which lists the message's chunks in order. Without an incomplete message
        of that key, nothing is to be done.
        """
        incomplete = self.find(key)
        if incomplete is None:
            return []
        if self.has_chunk_of_another(key, positions):
            return [self._give_up(key, reasons.MALFORMED_MARKER)]
        self._take(key)
        effects: list[Effect] = [] if incomplete.spilled else [Spill(tuple(incomplete.positions))]
        listed = set(positions)
        left = tuple(position for position in incomplete.positions if position not in listed)
        if left:
            effects.append(Reject(reasons.CHUNK_DUPLICATE, key, left, bytes_kept=False))
        known = tuple(position for position in incomplete.positions if position in listed)
        return [*effects, Deliver(key, positions, reread=True, known=known)]

    def has_chunk_of_another(
        self, key: ChunkedMessageKey | None, positions: Iterable[Position]
    ) -> bool:
        """Return whether a chunk of another incomplete message stands at one of the positions."""
        return any(self._owners.get(position, key) != key for position in positions)

    def supersede(self, key: ChunkedMessageKey) -> list[Effect]:
        """Give up the incomplete message of a key, because a message of that key began
        elsewhere.
        """
        return [self._give_up(key, ChunkEvent.RESENT.value)] if self.find(key) else []

    def evict(self, key: ChunkedMessageKey) -> list[Effect]:
        """Give up the incomplete message of a key, because there is no room for it."""
        return [self._give_up(key, reasons.CHUNK_EVICTED)]

    def adopt(self, message: IncompleteMessage) -> list[Effect]:
        """Add an incomplete message that began elsewhere, as the youngest. Unless it is spilled,
        its bytes must be kept.
        """
        effects = self.supersede(message.key)
        self._put(ArrivingMessage.of(message))
        return [*effects, *self._make_room()]

    def expire(self, now_ms: int) -> list[Effect]:
        """Give up every message whose first chunk is too old; a message without a time
        begins now.
        """
        oldest_ms = now_ms - self._limits.expire_after_ms
        effects: list[Effect] = []
        for message in [*self._spilled.values(), *self._kept.values()]:
            if message.opened_ms is None:
                message.opened_ms = now_ms
            elif message.opened_ms < oldest_ms:
                effects.append(self._give_up(message.key, reasons.CHUNK_EXPIRED))
        return effects

    def _reject_chunk(self, chunk: Chunk, event: ChunkEvent) -> list[Effect]:
        return [_reject_alone(chunk, event.value)]

    def _start_over(self, chunk: Chunk, event: ChunkEvent) -> list[Effect]:
        return [self._give_up(chunk.key, event.value), *self._open(chunk, event)]

    def _close_gap(self, chunk: Chunk, event: ChunkEvent) -> list[Effect]:
        return [self._give_up(chunk.key, event.value), _reject_alone(chunk, event.value)]

    def _open(self, chunk: Chunk, _event: ChunkEvent) -> list[Effect]:
        if chunk.size_bytes > chunk.total_bytes:
            return [_reject_alone(chunk, reasons.CHUNK_SIZE)]
        self._put(_without_chunks(chunk))
        self._add(chunk)
        return [Retain(chunk.position), *self._make_room()]

    def _append(self, chunk: Chunk, _event: ChunkEvent) -> list[Effect]:
        incomplete = self._kept.get(chunk.key) or self._spilled[chunk.key]
        arrived_bytes = incomplete.arrived_bytes + chunk.size_bytes
        complete = chunk.chunk_id == incomplete.chunk_count - 1
        if arrived_bytes > incomplete.total_bytes or (
            complete and arrived_bytes != incomplete.total_bytes
        ):
            return [
                self._give_up(chunk.key, reasons.CHUNK_SIZE),
                _reject_alone(chunk, reasons.CHUNK_SIZE),
            ]
        if complete:
            self._take(chunk.key)
            positions = (*incomplete.positions, chunk.position)
            known = positions if incomplete.spilled else ()
            return [Deliver(chunk.key, positions, reread=incomplete.spilled, known=known)]
        self._add(chunk)
        return [*([] if incomplete.spilled else [Retain(chunk.position)]), *self._make_room()]

    def _await(self, chunk: Chunk, _event: ChunkEvent) -> list[Effect]:
        before = self.find(chunk.key)
        effects: list[Effect] = []
        if before is None:
            before = _without_chunks(chunk)
            before.spilled = True
            self._put(before)
        elif not before.spilled:
            effects.append(self._spill(chunk.key))
        before.awaiting = True
        self._add(chunk)
        return [*effects, *self._make_room()]

    def _spill(self, key: ChunkedMessageKey) -> Spill:
        message = self._take(key)
        message.spilled = True
        message.kept_bytes = 0
        self._put(message)
        return Spill(tuple(message.positions))

    def _make_room(self) -> list[Effect]:
        """Spill the oldest messages until the limits of kept ones are met; give up the oldest
        beyond the others.
        """
        limits = self._limits
        effects: list[Effect] = []
        while self._kept and (
            len(self._kept) > limits.max_pending or self._kept_bytes > limits.max_pending_bytes
        ):
            effects.append(self._spill(next(iter(self._kept))))
        while (
            len(self._spilled) > limits.max_spilled
            or len(self._owners) > limits.max_incomplete_chunks
        ):
            effects.append(
                self._give_up(next(iter(self._spilled or self._kept)), reasons.CHUNK_EVICTED)
            )
        return effects

    def _give_up(self, key: ChunkedMessageKey, reason: reasons.Reason) -> Reject:
        message = self._take(key)
        return Reject(reason, key, tuple(message.positions), bytes_kept=not message.spilled)

    def _put(self, message: ArrivingMessage) -> None:
        """Add a message of a key that has none, as the youngest."""
        self._kept_bytes += message.kept_bytes
        self._owners.update(dict.fromkeys(message.positions, message.key))
        (self._spilled if message.spilled else self._kept)[message.key] = message

    def _add(self, chunk: Chunk) -> None:
        """Add a chunk to the message of its key."""
        message = self._kept.get(chunk.key) or self._spilled[chunk.key]
        message.positions[chunk.position] = None
        message.arrived_bytes += chunk.size_bytes
        if not message.spilled:
            message.kept_bytes += chunk.entry_bytes
            self._kept_bytes += chunk.entry_bytes
        self._owners[chunk.position] = chunk.key

    def _take(self, key: ChunkedMessageKey) -> ArrivingMessage:
        message = self._kept.pop(key, None) or self._spilled.pop(key)
        self._kept_bytes -= message.kept_bytes
        for position in message.positions:
            self._owners.pop(position, None)
        return message


def _without_chunks(chunk: Chunk) -> ArrivingMessage:
    """Return the incomplete message that a chunk begins, before the chunk is added."""
    return ArrivingMessage(
        chunk.key, chunk.chunk_count, chunk.total_bytes, chunk.time_ms, chunk.publish_ms, {}
    )


def _fields(message: IncompleteMessage | ArrivingMessage) -> dict[str, Any]:
    """Return the fields that both kinds of messages have."""
    return {name: getattr(message, name) for name in IncompleteMessage.__slots__}


def _reject_alone(chunk: Chunk, reason: reasons.Reason) -> Reject:
    return Reject(reason, chunk.key, (chunk.position,), bytes_kept=False)


_STEPS: dict[ChunkEvent, Callable[[IncompleteMessages, Chunk, ChunkEvent], list[Effect]]] = {
    ChunkEvent.KNOWN: IncompleteMessages._reject_chunk,
    ChunkEvent.INVALID: IncompleteMessages._reject_chunk,
    ChunkEvent.TOO_LARGE: IncompleteMessages._reject_chunk,
    ChunkEvent.FIRST: IncompleteMessages._open,
    ChunkEvent.RESENT: IncompleteMessages._start_over,
    ChunkEvent.MISMATCH: IncompleteMessages._reject_chunk,
    ChunkEvent.DUPLICATE: IncompleteMessages._reject_chunk,
    ChunkEvent.NEXT: IncompleteMessages._append,
    ChunkEvent.GAP: IncompleteMessages._close_gap,
    ChunkEvent.ORPHAN: IncompleteMessages._reject_chunk,
    ChunkEvent.AWAITED: IncompleteMessages._await,
}
