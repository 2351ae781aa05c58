"""What one task settles by itself: large messages that begin and end within its range of a topic
partition.

Their bytes never leave the task. Whatever else a chunk may mean depends on sets that are open from
before, so it is handed to the stateful stage, in order: chunks whose message did not begin here,
that a message began, markers of messages that are not open here, and at the end the sets that are
still open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.assembly.assembler import Assembly, Entry, Outcome
from ledgerlake.assembly.rules import Event as ChunkEvent
from ledgerlake.assembly.rules import SetKey, classify
from ledgerlake.operators.rows import Begun, Event

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ledgerlake.assembly.rules import Chunk, Limits
    from ledgerlake.wire.chunks import Marker
    from ledgerlake.wire.message_id import Position

_NEEDS_NO_SET = (ChunkEvent.INVALID, ChunkEvent.TOO_LARGE)


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
        self._limits = limits
        self._parts = MemoryParts()
        self._assembly = Assembly(limits, self._parts, hold_delayed=hold_delayed)

    def arrive(self, chunk: Chunk, entry: Entry) -> Iterator[Outcome] | None:
        """Take one chunk; None if it is not for this task to settle."""
        opened = self._assembly.pending.find(chunk.key)
        event = classify(chunk, opened, self._limits)
        if opened is None and chunk.chunk_id != 0 and event not in _NEEDS_NO_SET:
            self.events.append(chunk)
            return None
        if opened is None and event is ChunkEvent.FIRST:
            self.events.append(Begun(chunk.key))
        self._parts.put(chunk.position, entry)
        return self._assembly.arrive(chunk)

    def mark(self, marker: Marker) -> Iterator[Outcome]:
        """Take one marker."""
        key = SetKey(marker.producer_name, marker.uuid)
        if self._assembly.pending.find(key) is None:
            self.events.append(marker)
        return self._assembly.mark(marker)

    def hand_over(self) -> Iterator[tuple[Position, Entry]]:
        """End: what is open becomes an event, and its bytes come out."""
        for opened in self._assembly.pending.sets:
            self.events.append(opened)
            for position in opened.positions:
                entry = self._parts.take(position)
                if entry is not None:
                    yield position, entry
