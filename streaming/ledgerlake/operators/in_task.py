"""What one task settles by itself: large messages that begin and end within its range of a topic
partition.

Their bytes do not leave the task, unless they are to be delivered later. All other cases depend on
chunk sets that were open before this range, so the task sends events to the stateful stage, in
order: a chunk, if its message did not begin in this range; a note that a message began; a marker,
if its message is not open in this task; and at the end each chunk set that is still open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.assembly.assembler import Assembled, Assembly, Entry, Outcome, Rejected
from ledgerlake.assembly.rules import Chunk, ChunkedMessageKey, classify
from ledgerlake.assembly.rules import Event as ChunkEvent
from ledgerlake.operators.rows import Begun, Event, Waits
from ledgerlake.wire.limits import MAX_TASK_EVENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ledgerlake.assembly.rules import Limits
    from ledgerlake.wire.chunks import Marker
    from ledgerlake.wire.message_id import Position

_NEEDS_NO_SET = (ChunkEvent.INVALID, ChunkEvent.TOO_LARGE)


# What an event takes as JSON without its names and positions, and what a position takes, at most.
_EVENT_BYTES = 512
_POSITION_BYTES = 96


class EventBudget:
    """The room that is left in a task's report, which is one value of Arrow."""

    def __init__(self) -> None:
        self._used_bytes = 0

    def take_event(self, event: Chunk | Marker) -> bool:
        """Take the room of a chunk's event, or of a marker's."""
        if isinstance(event, Chunk):
            return self.take(event.key, 1)
        return self.take(ChunkedMessageKey(event.producer_name, event.uuid), len(event.positions))

    def take(self, key: ChunkedMessageKey | None, positions: int) -> bool:
        """Take the room of an event with that many positions, or of positions alone; False if there
        is not so much.
        """
        # JSON escapes a character with six bytes at most.
        name_bytes = 0 if key is None else _EVENT_BYTES + 6 * (len(key.producer_name) + len(key.uuid))
        used_bytes = self._used_bytes + name_bytes + _POSITION_BYTES * positions
        if used_bytes > MAX_TASK_EVENT_BYTES:
            return False
        self._used_bytes = used_bytes
        return True


class MemoryParts:
    """Entries in memory; bounded by the limits of the sets that they belong to."""

    def __init__(self) -> None:
        self._entries: dict[Position, Entry] = {}

    def put(self, position: Position, entry: Entry) -> None:
        self._entries[position] = entry

    def take(self, position: Position) -> Entry | None:
        return self._entries.pop(position, None)

    def drop(self, position: Position) -> None:
        self._entries.pop(position, None)


class LocalAssembly:
    """The chunks of one topic partition in a task's range. ``events`` is what the stateful stage
    must know, in order.
    """

    def __init__(self, limits: Limits, *, hold_delayed: bool = False) -> None:
        self.events: list[Event] = []
        self._budget = EventBudget()
        self._limits = limits
        self._parts = MemoryParts()
        self._assembly = Assembly(limits, self._parts, hold_delayed=hold_delayed)

    def arrive(self, chunk: Chunk, entry: Entry) -> Iterator[Outcome] | None:
        """Take one chunk; None if it is not for this task to settle."""
        opened = self._assembly.pending.find(chunk.key)
        event = classify(chunk, opened, self._limits)
        is_event = opened is None and event not in _NEEDS_NO_SET
        if not self._budget.take(chunk.key if is_event else None, 1):
            return iter([Rejected("chunk_evicted", [(chunk.position, entry)])])
        if is_event and chunk.chunk_id != 0:
            self.events.append(chunk)
            return None
        if is_event:
            self.events.append(Begun(chunk.key))
        self._parts.put(chunk.position, entry)
        return self._assembly.arrive(chunk)

    def mark(self, marker: Marker) -> Iterator[Outcome]:
        """Take one marker."""
        key = ChunkedMessageKey(marker.producer_name, marker.uuid)
        if self._assembly.pending.find(key) is not None:
            return self._assembly.mark(marker)
        # Without its marker a message expires, and its chunks are rejects.
        if self._budget.take_event(marker):
            self.events.append(marker)
        return iter(())

    def wait(self, message: Assembled) -> Waits | None:
        """Return the event of a message that is to be delivered later; None if there is no room for
        it.
        """
        assert message.deliver_ms is not None
        if not self._budget.take(message.key, len(message.positions)):
            return None
        return Waits(message.positions, message.deliver_ms, message.entries is not None, message.key)

    def drain_pending(self) -> Iterator[tuple[Position, Entry]]:
        """End: what is open becomes an event, and its bytes come out."""
        for opened in self._assembly.pending.sets:
            self.events.append(opened)
            for position in opened.positions:
                entry = self._parts.take(position)
                if entry is not None:
                    yield position, entry
