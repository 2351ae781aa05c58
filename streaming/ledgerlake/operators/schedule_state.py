"""The state variables of schedules by id (see ``delay.schedules``):

    schedules    id -> the messages that wait under it, JSON with a version
    schedule_ids (ledger, entry) -> the id of a message that waits

The marks of positions are stored with the cancels (``delay.cancels``), so that an earlier release
refuses the checkpoint, and does not deliver what was replaced.

Changes are kept in memory until the micro-batch has been processed: a call into the state store
costs far more than the change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.delay.schedules import waiting_from_json, waiting_to_json
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import MapState, StatefulProcessorHandle

    from ledgerlake.delay.schedules import WaitingMessage


class ScheduleState:
    """The state variables, and the changes of this micro-batch."""

    def __init__(self, handle: StatefulProcessorHandle) -> None:
        self.schedules: MapState = handle.getMapState("schedules", "schedule_id string", "messages string")
        self.ids: MapState = handle.getMapState(
            "schedule_ids", "ledger_id bigint, entry_id bigint", "schedule_id string"
        )


class StoredSchedules:
    """The schedules of one topic partition in one micro-batch; ``save`` stores what has changed."""

    def __init__(self, state: ScheduleState) -> None:
        self._state = state
        self._messages: dict[str, list[WaitingMessage]] = {}
        self._stored: dict[str, list[WaitingMessage]] = {}
        self._new_ids: dict[Position, str] = {}

    def load(self, schedule_id: str) -> list[WaitingMessage]:
        if schedule_id not in self._messages:
            row = self._state.schedules.getValue((schedule_id,))
            self._stored[schedule_id] = [] if row is None else waiting_from_json(row[0])
            self._messages[schedule_id] = list(self._stored[schedule_id])
        return self._messages[schedule_id]

    def store(self, schedule_id: str, messages: list[WaitingMessage]) -> None:
        self._messages[schedule_id] = messages

    def set_id(self, position: Position, schedule_id: str) -> None:
        self._new_ids[position] = schedule_id

    def take_id(self, position: Position) -> str | None:
        if position in self._new_ids:
            return self._new_ids.pop(position)
        key = (position.ledger_id, position.entry_id)
        row = self._state.ids.getValue(key)
        if row is None:
            return None
        self._state.ids.removeKey(key)
        return str(row[0])

    def save(self) -> None:
        for schedule_id, messages in self._messages.items():
            if messages and messages != self._stored[schedule_id]:
                self._state.schedules.updateValue((schedule_id,), (waiting_to_json(messages),))
            elif not messages and self._stored[schedule_id]:
                self._state.schedules.removeKey((schedule_id,))
        for position, schedule_id in self._new_ids.items():
            self._state.ids.updateValue((position.ledger_id, position.entry_id), (schedule_id,))
