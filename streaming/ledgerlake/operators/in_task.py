"""Assembles large messages that begin and end within a task's range of a topic partition.

Their bytes do not leave the task, unless they are to be delivered later. All other cases depend on
messages that were incomplete before this range, so the task sends events to the stateful stage, in
order: a chunk, if its message did not begin in this range; ``MessageStarted`` for a message that
began; a marker, if its message is not incomplete in this task; and at the end each message that is
still incomplete.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ledgerlake.assembly.assembler import Assembled, Assembly, Entry, Rejected
from ledgerlake.assembly.rules import Chunk, ChunkedMessageKey, ChunkEvent
from ledgerlake.operators.outcome_types import Outcome
from ledgerlake.operators.rows import DelayedLargeMessage, MessageStarted, TaskEvent
from ledgerlake.reasons import CHUNK_EVICTED
from ledgerlake.wire.limits import MAX_TASK_EVENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ledgerlake.assembly.rules import Limits
    from ledgerlake.wire.chunks import Marker
    from ledgerlake.wire.message_id import Position

_ALWAYS_REJECTED = (ChunkEvent.KNOWN, ChunkEvent.INVALID, ChunkEvent.TOO_LARGE)


# The most bytes of an event as JSON without its names and positions, and those of a position.
_EVENT_BYTES = 512
_POSITION_BYTES = 96


class EventBudget:
    """The bytes that are left in a task's report, which is one value of Arrow."""

    def __init__(self) -> None:
        self._used_bytes = 0

    def take_event(self, event: Chunk | Marker) -> bool:
        """Reserve the bytes of a chunk's or a marker's event; return False if there are too few
        left.
        """
        if isinstance(event, Chunk):
            return self.take(event.key, 1, event.schedule_id)
        key = ChunkedMessageKey(event.producer_name, event.uuid)
        return self.take(key, len(event.positions), event.schedule_id)

    def take(self, key: ChunkedMessageKey | None, positions: int, schedule_id: str | None = None) -> bool:
        """Reserve the bytes of an event with that many positions; return False if there are too few
        left.

        Args:
            key: the event's key; None if the positions are added to an event that is there.
            schedule_id: the id of a schedule in the event.
        """
        # JSON escapes a character with six bytes at most.
        name_bytes = 0 if key is None else _EVENT_BYTES + 6 * (len(key.producer_name) + len(key.uuid))
        id_bytes = 0 if schedule_id is None else len(json.dumps(schedule_id))
        used_bytes = self._used_bytes + name_bytes + id_bytes + _POSITION_BYTES * positions
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
        is_event = not is_begun and self._assembly.pending.classify(chunk) not in _ALWAYS_REJECTED
        if not self.budget.take(chunk.key if is_event else None, 1, chunk.schedule_id if is_event else None):
            return iter([Rejected(CHUNK_EVICTED, [(chunk.position, entry)])])
        if is_event and chunk.chunk_id != 0:
            self.events.append(chunk)
            return None
        if is_event:
            self.events.append(MessageStarted(chunk.key))
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
        if self.budget.take_event(marker):
            self.events.append(marker)
        return iter(())

    def delayed_event(self, message: Assembled) -> DelayedLargeMessage | None:
        """Return the event of a message that is to be delivered later; None if the report has no
        bytes left for it.
        """
        assert message.deliver_ms is not None
        if not self.budget.take(message.key, len(message.positions) + len(message.known), message.schedule_id):
            return None
        return DelayedLargeMessage.of(message, message.deliver_ms)

    def drain_pending(self) -> Iterator[tuple[Position, Entry]]:
        """At the end, make events of the incomplete messages, and yield their chunks."""
        for incomplete in self._assembly.pending.messages:
            self.events.append(incomplete)
            for position in incomplete.positions:
                entry = self._kept_entries.take(position)
                if entry is not None:
                    yield position, entry
