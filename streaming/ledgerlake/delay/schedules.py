"""Schedules by id: which delayed message waits under an id, and which ones are no longer to be
delivered.

Rules kept here:
  - A message with an id, or a cancel of the id, hits the messages of that id that stand before it
    and are due after the time when it was stored: the rule of ``delay.cancels``. So the result does
    not depend on how the stream was cut into micro-batches.
  - A message that was hit stays in the index. Its position is marked with the reason, and it becomes
    a reject when it would have been due.
  - A position has one mark: ``SCHEDULED`` while its message waits under its id, or the reason.
    ``release`` removes the mark. The store may still have the message then: a message without the
    mark does not wait any more, and a release costs no call into the state store.

A large message that its marker completes may come after a message that stands behind its chunks.
``put`` compares both ways, so the later one still replaces it.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from pyroaring import BitMap

from ledgerlake.stored.fields import parse_stored, stored
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

VERSION = 1

SCHEDULED = "scheduled"

# Reasons of rejects.
REPLACED = "replaced"
CANCELLED = "cancelled"

_MARKS = (SCHEDULED, REPLACED, CANCELLED)


@dataclass(frozen=True, slots=True)
class WaitingMessage:
    """A message that waits under an id: where it stands, when it was stored, and when it is due."""

    position: Position
    time_ms: int
    deliver_ms: int


class ScheduleStore(Protocol):
    """The messages that wait, by id."""

    def load(self, schedule_id: str) -> list[WaitingMessage]:
        """Return the messages that wait under an id, and maybe some that have left."""

    def store(self, schedule_id: str, messages: list[WaitingMessage]) -> None:
        """Keep the messages that wait under an id; if there are none, forget the id."""


class MarkedPositions:
    """Positions with a mark, as bitmaps by mark and ledger."""

    def __init__(self) -> None:
        self._bitmaps: dict[str, dict[int, BitMap]] = {}

    def __bool__(self) -> bool:
        return bool(self._bitmaps)

    def mark(self, position: Position, mark: str) -> None:
        """Give a position a mark in place of the one that it has."""
        self.take(position)
        self._bitmaps.setdefault(mark, {}).setdefault(position.ledger_id, BitMap()).add(position.entry_id)

    def is_waiting(self, position: Position) -> bool:
        """Return whether a message waits under its id."""
        return position.entry_id in self._bitmaps.get(SCHEDULED, {}).get(position.ledger_id, ())

    def take(self, position: Position) -> str | None:
        """Remove the mark of a position, and return it."""
        for mark, ledgers in self._bitmaps.items():
            entries = ledgers.get(position.ledger_id)
            if entries is None or position.entry_id not in entries:
                continue
            entries.discard(position.entry_id)
            if not entries:
                del ledgers[position.ledger_id]
            if not ledgers:
                del self._bitmaps[mark]
            return mark
        return None

    def discard(self, mark: str, ledger_ids: NDArray[np.int64], entry_ids: NDArray[np.int64]) -> None:
        """Remove a mark of many positions."""
        ledgers = self._bitmaps.get(mark, {})
        for ledger_id in list(ledgers):
            ledgers[ledger_id] -= BitMap(entry_ids[ledger_ids == ledger_id].astype(np.uint32))
            if not ledgers[ledger_id]:
                del ledgers[ledger_id]
        if not ledgers:
            self._bitmaps.pop(mark, None)

    def are_marked(
        self,
        ledger_ids: NDArray[np.int64],
        entry_ids: NDArray[np.int64],
        marks: Iterable[str] = _MARKS,
    ) -> NDArray[np.bool_]:
        """Return a mask of the positions that have one of some marks."""
        is_marked = np.zeros(len(ledger_ids), dtype=bool)
        for mark in marks:
            for ledger_id, entries in self._bitmaps.get(mark, {}).items():
                rows = np.flatnonzero(ledger_ids == ledger_id)
                if len(rows):
                    hits = BitMap(entry_ids[rows].astype(np.uint32)) & entries
                    is_marked[rows] |= np.isin(entry_ids[rows], np.array(hits.to_array(), np.int64))
        return is_marked

    def to_fields(self) -> dict[str, dict[str, str]]:
        """Return the bitmaps for JSON."""
        return {
            mark: {str(ledger): _text(entries) for ledger, entries in ledgers.items()}
            for mark, ledgers in self._bitmaps.items()
        }

    @classmethod
    def from_fields(cls, fields: Any) -> MarkedPositions:
        """Read what ``to_fields`` returned.

        Raises:
            ValueError: it is something else.
        """
        marked = cls()
        for mark, ledgers in stored(dict[str, dict[str, str]], fields).items():
            if mark not in _MARKS:
                raise ValueError(f"the mark {mark}")
            marked._bitmaps[mark] = {int(ledger): _bitmap(text) for ledger, text in ledgers.items()}
        return marked


def _text(entries: BitMap) -> str:
    # Neighbours often have an id each.
    entries.run_optimize()
    return base64.b64encode(entries.serialize()).decode()


def _bitmap(text: str) -> BitMap:
    try:
        return BitMap.deserialize(base64.b64decode(text, validate=True))
    except IndexError:
        raise ValueError("a damaged bitmap") from None


class Schedules:
    """The schedules of one topic partition."""

    def __init__(self, store: ScheduleStore, marked: MarkedPositions) -> None:
        self.marked = marked
        self._store = store

    def put(self, schedule_id: str, message: WaitingMessage) -> None:
        """Add a delayed message: it replaces those that wait under its id."""
        waiting = self._hit(schedule_id, message.position, message.time_ms, REPLACED)
        if any(message.position < later.position and message.deliver_ms > later.time_ms for later in waiting):
            self.marked.mark(message.position, REPLACED)
        else:
            waiting.append(message)
            self.marked.mark(message.position, SCHEDULED)
        self._store.store(schedule_id, waiting)

    def end(self, schedule_id: str, position: Position, time_ms: int, reason: str) -> None:
        """End a schedule: by a message with its id that was delivered at once, or by a cancel."""
        self._store.store(schedule_id, self._hit(schedule_id, position, time_ms, reason))

    def release(self, ledger_ids: NDArray[np.int64], entry_ids: NDArray[np.int64]) -> dict[int, str]:
        """Forget messages that are due; return the numbers of those that are not to be delivered, each
        with the reason.
        """
        self.marked.discard(SCHEDULED, ledger_ids, entry_ids)
        withheld: dict[int, str] = {}
        for row in np.flatnonzero(self.marked.are_marked(ledger_ids, entry_ids)).tolist():
            reason = self.marked.take(Position(int(ledger_ids[row]), int(entry_ids[row])))
            if reason is not None:
                withheld[row] = reason
        return withheld

    def _hit(self, schedule_id: str, position: Position, time_ms: int, reason: str) -> list[WaitingMessage]:
        """Mark the messages of an id that are hit; return the others."""
        others: list[WaitingMessage] = []
        for message in self._store.load(schedule_id):
            if not self.marked.is_waiting(message.position):
                continue
            if message.position < position and message.deliver_ms > time_ms:
                self.marked.mark(message.position, reason)
            else:
                others.append(message)
        return others


def waiting_from_json(text: str) -> list[WaitingMessage]:
    """Read the messages that wait under an id as earlier builds stored them.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    return parse_stored(
        text, "schedules", lambda fields, _version: stored(list[WaitingMessage], fields["messages"]), VERSION
    )
