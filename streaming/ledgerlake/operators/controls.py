"""The cancels, schedules and pauses of one topic partition in a micro-batch of the stateful stage.

Events are collected as they come, and applied before anything is released. Then the cancels,
schedules and pauses that are still needed are stored. The state variable ``cancels`` has the
cancels, marks of positions and pauses, as JSON with a version (``schedules.cancels``). The
schedules are stored by id (``schedule_state``). Senders decide how large both become, so they are
loaded only if something is due or an event has come.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ledgerlake.assembly.assembler import Rejected
from ledgerlake.operators.schedule_events import PauseChanged, Scheduled, ScheduleEvents
from ledgerlake.operators.schedule_state import ScheduleState, StoredSchedules
from ledgerlake.reasons import (
    CANCEL_REFUSED,
    CANCELLED,
    PAUSE_REFUSED,
    REPETITION_REFUSED,
    REPLACED,
    Reason,
)
from ledgerlake.schedules.cancels import (
    MOST_CANCEL_BYTES,
    MOST_CANCELS,
    Cancel,
    Cancels,
    cancels_from_json,
    cancels_to_json,
)
from ledgerlake.schedules.schedules import (
    MarkedPositions,
    Pauses,
    Repeating,
    ScheduledMessage,
    Schedules,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pyspark.sql.streaming.stateful_processor import ValueState

    from ledgerlake.schedules.repetition import RepetitionLimit
    from ledgerlake.wire.message_id import Position


class Controls:
    """See the module. ``cancels`` and ``schedules`` are in force after ``apply``."""

    def __init__(
        self,
        cancels: ValueState,
        schedules: ScheduleState,
        repetition_limit: RepetitionLimit | None,
    ) -> None:
        self._stored_cancels, self._stored_schedules = cancels, schedules
        self._repetition_limit = repetition_limit
        self._new_cancels: list[Cancel] = []
        self.events = ScheduleEvents(sys.maxsize)
        # The positions of large messages in the index, by those at which they stand.
        self._waits_at: dict[Position, Position] = {}

    def add_cancel(self, cancel: Cancel) -> None:
        """Add a cancel by key or by message id."""
        self._new_cancels.append(cancel)

    def add_large(self, scheduled: Scheduled, waits_at: Position) -> None:
        """Add a large message that waits in the index at the position of its last chunk; it may
        stand at its marker.
        """
        self.events.add(scheduled)
        self._waits_at[scheduled.position] = waits_at

    @property
    def has_new(self) -> bool:
        """Return whether an event has come."""
        return bool(self._new_cancels) or self.events.is_any

    def apply(self, last_due_ms: int | None, not_added: Collection[Position]) -> Iterator[Rejected]:
        """Load the stored cancels, pauses and schedules, and apply the events; yield the rejects of
        refused events.

        Args:
            last_due_ms: when the last of the messages that wait is due; None if none waits.
            not_added: the positions of messages that have come and do not wait.
        """
        text = _read_value(self._stored_cancels)
        self.cancels, self._marked, self._pauses = (
            cancels_from_json(text) if text else (Cancels(), MarkedPositions(), Pauses())
        )
        self._stored = self._content(self.cancels.all)
        self._store = StoredSchedules(self._stored_schedules, self._marked)
        self.schedules = Schedules(self._store, self._marked, self._pauses, self._repetition_limit)
        not_repeated, not_paused = self._apply_events(not_added)
        yield from _refused(REPETITION_REFUSED, not_repeated)
        yield from _refused(PAUSE_REFUSED, not_paused)
        yield from _refused(CANCEL_REFUSED, self._add_cancels(last_due_ms))

    def save(self, next_due_ms: int | None, cutoff_ms: int) -> None:
        """Store the cancels, pauses and schedules that are still needed after a release up to
        ``cutoff_ms``.

        Args:
            next_due_ms: when the first of the messages that wait is due; None if none waits.
        """
        # A later message is due at ``cutoff_ms`` at the earliest.
        self._pauses.forget_before(
            cutoff_ms if next_due_ms is None else min(next_due_ms, cutoff_ms)
        )
        if self._has_schedules and not self._marked:
            self._stored_schedules.clear()
        elif self._has_schedules:
            self._store.save_repeating()
        released_ms = cutoff_ms if next_due_ms is None else min(cutoff_ms, next_due_ms - 1)
        needed = self.cancels.needed_after(released_ms)
        if self._content(needed) == self._stored:
            return
        if needed or self._marked or self._pauses != Pauses():
            self._stored_cancels.update((cancels_to_json(needed, self._marked, self._pauses),))
        else:
            self._stored_cancels.clear()

    def _content(self, cancels: list[Cancel]) -> tuple[Any, ...]:
        """Return the content to store, for a comparison: writing it costs much more."""
        pauses = self._pauses
        return cancels, self._marked.to_fields(), pauses.since_ms, list(pauses.ended_ms)

    def _add_cancels(self, until_ms: int | None) -> list[Position]:
        """Add cancels; return the positions of those that are refused because there are too many.
        If no message is delayed, nothing can be cancelled.
        """
        if until_ms is None:
            return []
        refused: list[Position] = []
        count, target_bytes = len(self.cancels), self.cancels.target_bytes
        for cancel in self._new_cancels:
            count, target_bytes = count + 1, target_bytes + len(cancel.target.encode())
            if refused or count > MOST_CANCELS or target_bytes > MOST_CANCEL_BYTES:
                refused.append(cancel.position)
            else:
                self.cancels.add(replace(cancel, until_ms=until_ms))
        return refused

    def _apply_events(
        self, not_added: Collection[Position]
    ) -> tuple[list[Position], list[Position]]:
        """Apply the events block by block, so that each block is loaded once. The events of an id
        are applied in the order of their messages. Return the positions of refused repetitions and
        pauses.
        """
        not_repeated: list[Position] = []
        not_paused: list[Position] = []
        schedules = self.schedules
        added = self.events.delayed_ids
        # Whether a message waits under an id, or did so before.
        self._has_schedules = added > 0 or bool(self._marked)
        if self._has_schedules:
            self._store.begin(added)
        for event in self.events.in_order(self._store.block_of):
            if isinstance(event, PauseChanged):
                if not self._has_schedules and event.schedule_id is not None:
                    continue
                if event.resumes:
                    schedules.resume(event.schedule_id, event.position, event.time_ms)
                elif not schedules.pause(event.schedule_id, event.position, event.time_ms):
                    not_paused.append(event.position)
            elif not self._has_schedules:
                continue
            elif isinstance(event, Cancel):
                schedules.end(event.target, event.position, event.time_ms, CANCELLED)
            elif event.deliver_ms is None:
                schedules.end(event.schedule_id, event.position, event.time_ms, REPLACED)
            elif event.position not in not_added:
                repeating = (
                    None if event.rate is None else Repeating(event.deliver_ms, rate=event.rate)
                )
                message = ScheduledMessage(
                    self._waits_at.get(event.position, event.position),
                    event.time_ms,
                    event.deliver_ms,
                    repeating,
                )
                if not schedules.put(event.schedule_id, message, event.position):
                    not_repeated.append(event.position)
        if self._has_schedules:
            self._store.save()
        return not_repeated, not_paused


def _refused(reason: Reason, positions: list[Position]) -> Iterator[Rejected]:
    """Yield the reject of entries, each of them once."""
    if positions:
        yield Rejected(reason, [(position, None) for position in dict.fromkeys(positions)])


def _read_value(state: ValueState) -> str | None:
    row = state.get()
    return None if row is None else str(row[0])
