"""Assembles large messages that begin and end within a task's range of a topic partition.

Their bytes do not leave the task, unless they are to be delivered later. All other cases depend on
messages that were incomplete before this range, so the task sends events to the stateful stage, in
order: a chunk, if its message did not begin in this range; ``MessageStarted`` for a message that
began; a marker, if its message is not incomplete in this task; and at the end each message that is
still incomplete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.assembly.assembler import Assembled, Assembly, Entry, Rejected
from ledgerlake.assembly.rules import Chunk, ChunkedMessageKey, ChunkEvent
from ledgerlake.operators.outcome_types import Outcome
from ledgerlake.operators.stage_rows import (
    DelayedLargeMessage,
    MessageStarted,
    TaskEvent,
    event_bytes,
)
from ledgerlake.reasons import CHUNK_EVICTED
from ledgerlake.wire.limits import MAX_TASK_EVENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ledgerlake.assembly.rules import Limits
    from ledgerlake.wire.chunks import Marker
    from ledgerlake.wire.message_id import Position

_ALWAYS_REJECTED = (ChunkEvent.KNOWN, ChunkEvent.INVALID, ChunkEvent.TOO_LARGE)


class EventBudget:
    """The bytes that are left in a task's report, which is one value of Arrow."""

    def __init__(self) -> None:
        self._used_bytes = 0

    def take(self, event: TaskEvent) -> bool:
        """Reserve the bytes of an event; return False if there are too few left."""
        used_bytes = self._used_bytes + event_bytes(event)
        if used_bytes > MAX_TASK_EVENT_BYTES:
            return False
        self._used_bytes = used_bytes
        return True


class MemoryEntries:
    """Entries in memory; bounded by the limits of incomplete messages."""

    def __init__(self) -> None:
        self._entries: dict[Position, Entry] = {}
        self._refused: set[Position] = set()

    def put(self, position: Position, entry: Entry) -> None:
        if position in self._entries:
            self._refused.add(position)
        else:
            self._entries[position] = entry

    def is_refused(self, position: Position) -> bool:
        return position in self._refused

    def take(self, position: Position) -> Entry | None:
        return self._entries.pop(position, None)

    def drop(self, position: Position) -> None:
        self._entries.pop(position, None)


class LocalAssembly:
    """The chunks of one topic partition in a task's range. ``events`` are the events for the
    stateful stage, in order.
    """

    def __init__(self, limits: Limits, *, delays_messages: bool = False) -> None:
        self.events: list[TaskEvent] = []
        self.budget = EventBudget()
        self._kept_entries = MemoryEntries()
        self._assembly = Assembly(limits, self._kept_entries, delays_messages=delays_messages)

    def arrive(self, chunk: Chunk, entry: Entry) -> Iterator[Outcome] | None:
        """Add a chunk; return the outcomes, or None if only the stateful stage can tell them."""
        is_begun = self._assembly.pending.find(chunk.key) is not None
        if not is_begun and self._assembly.pending.classify(chunk) not in _ALWAYS_REJECTED:
            event = chunk if chunk.chunk_id else MessageStarted(chunk.key)
            if not self.budget.take(event):
                return iter([Rejected(CHUNK_EVICTED, [(chunk.position, entry)])])
            self.events.append(event)
            if event is chunk:
                return None
        self._kept_entries.put(chunk.position, entry)
        return self._assembly.arrive(chunk)

    def apply_marker(self, marker: Marker) -> Iterator[Outcome]:
        """Apply a marker; return the outcomes. If its message began before the range, the marker
        becomes an event for the stateful stage.
        """
        key = ChunkedMessageKey(marker.producer_name, marker.uuid)
        if self._assembly.pending.find(key) is not None:
            return self._assembly.apply_marker(marker)
        # Without its marker a message expires, and its chunks are rejects.
        if self.budget.take(marker):
            self.events.append(marker)
        return iter(())

    def delayed_event(self, message: Assembled) -> DelayedLargeMessage | None:
        """Return the event of a message that is to be delivered later; None if the report has no
        bytes left for it.
        """
        assert message.deliver_ms is not None
        event = DelayedLargeMessage.of(message, message.deliver_ms)
        return event if self.budget.take(event) else None

    def evict(self) -> Iterator[Outcome]:
        """At the end, give up the oldest incomplete messages if the report has no bytes left for
        them. Messages that are complete by then have needed none.
        """
        for incomplete in reversed(self._assembly.pending.messages):
            if not self.budget.take(incomplete):
                yield from self._assembly.evict(incomplete.key)

    def drain_pending(self) -> Iterator[tuple[Position, Entry]]:
        """At the end, make events of the incomplete messages, and yield their chunks."""
        for incomplete in self._assembly.pending.messages:
            self.events.append(incomplete)
            for position in incomplete.positions:
                entry = self._kept_entries.take(position)
                if entry is not None:
                    yield position, entry
