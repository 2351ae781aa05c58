"""Finds the properties of schedules (``wire.schedules``) in a task: in delayed entries as they were
stored, in decoded messages, and in messages that are due.

Clients send a delayed message alone, never in a batch. So the id of a delayed entry is in its
metadata, which is neither compressed nor encrypted: a search for the bytes of the properties' names
finds the few entries whose metadata must be parsed. A delayed batch is opened when it is due, and
its messages with an id are rejected then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ledgerlake.decode.messages import WHOLE_BATCH
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.decode.single_entry import single_entries
from ledgerlake.decode.split import entries_of, read_delayed
from ledgerlake.delay.cancel_messages import rows_with_property, stored_ms
from ledgerlake.errors import CorruptEntryError
from ledgerlake.operators.rows import Scheduled
from ledgerlake.wire.entry import peek_metadata, read_stamp
from ledgerlake.wire.message_id import Position
from ledgerlake.wire.schedules import BAD_SCHEDULE, EXPIRES_PROPERTY, SCHEDULE_PROPERTY, parse_schedule, schedule_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.assembly.assembler import Assembled, Entry
    from ledgerlake.decode.messages import BatchRange
    from ledgerlake.operators.in_task import EventBudget

# The reason of a message with an id for which the task's report has no room.
SCHEDULE_REFUSED = "schedule_refused"
REFUSED_DETAIL = "the micro-batch has more schedules than a task can pass on; read fewer bytes in a micro-batch"

# The reason of a message that was released later than it said.
EXPIRED = "expired"

_NAMES = re.compile(re.escape(SCHEDULE_PROPERTY.encode()) + b"|" + re.escape(EXPIRES_PROPERTY.encode()))
_PROPERTIES = [SCHEDULE_PROPERTY, EXPIRES_PROPERTY]
_BATCHED = "a delayed message with an id or an expiry must be sent alone, and this one is part of a batch"


@dataclass(frozen=True)
class DelayedFrames:
    """A ``delayed`` piece without the entries that were rejected, and the schedules in it."""

    frames: memoryview
    first_entry: BatchRange
    events: list[Scheduled] = field(default_factory=list)
    rejects: list[RejectedEntry] = field(default_factory=list)


def find_in_frames(frames: memoryview, first_entry: BatchRange, budget: EventBudget) -> DelayedFrames:
    """Return a ``delayed`` piece with its schedules."""
    if _NAMES.search(frames) is None:
        return DelayedFrames(frames, first_entry)
    found = DelayedFrames(frames, first_entry)
    delayed = read_delayed(frames)
    due_ms, ends = delayed.due_ms.tolist(), delayed.frame_ends.tolist()
    refused: set[int] = set()
    for row, (position, entry) in enumerate(entries_of(frames).items()):
        if _NAMES.search(entry) is None:
            continue
        try:
            schedule_id = schedule_of(peek_metadata(memoryview(entry))).schedule_id
            time_ms = read_stamp(memoryview(entry)).time_ms
        except CorruptEntryError as error:
            refused.add(row)
            found.rejects.append(RejectedEntry(position, entry, error.reason, error.message))
            continue
        if schedule_id is None:
            continue
        if not budget.take_schedule(schedule_id):
            refused.add(row)
            found.rejects.append(RejectedEntry(position, entry, SCHEDULE_REFUSED, REFUSED_DETAIL))
            continue
        found.events.append(Scheduled(schedule_id, position, time_ms, due_ms[row]))
    if not refused:
        return found
    spans = zip([0, *ends], ends, strict=False)
    kept = b"".join(frames[start:end] for row, (start, end) in enumerate(spans) if row not in refused)
    first = WHOLE_BATCH if 0 in refused else first_entry
    return DelayedFrames(memoryview(kept), first, found.events, found.rejects)


def find_in_messages(
    messages: pa.RecordBatch, frames: Entry, budget: EventBudget
) -> tuple[pa.RecordBatch, list[Scheduled], list[RejectedEntry]]:
    """Return messages that are delivered at once, without those that were rejected, and their
    schedules.
    """
    events: list[Scheduled] = []

    def take(row: int, properties: dict[str, str]) -> tuple[str, str] | None:
        schedule_id = parse_schedule(properties).schedule_id
        if schedule_id is None:
            return None
        if not budget.take_schedule(schedule_id):
            return SCHEDULE_REFUSED, REFUSED_DETAIL
        events.append(Scheduled(schedule_id, _position(messages, row), stored_ms(messages, row)))
        return None

    kept, rejects = _without_rejects(messages, frames, take)
    return kept, events, rejects


def find_in_due(
    messages: pa.RecordBatch, frames: Entry | None, clock_ms: int | None
) -> tuple[pa.RecordBatch, list[RejectedEntry]]:
    """Return due messages without those that must not be delivered, and these as rejects.

    Args:
        frames: the ``MESSAGE`` frames that they came in; None if only the topic has the bytes.
        clock_ms: the time of the micro-batch.
    """

    def take(row: int, properties: dict[str, str]) -> tuple[str, str] | None:
        if messages["batch_index"][row].as_py() >= 0:
            return BAD_SCHEDULE, _BATCHED
        return _expired(parse_schedule(properties).expires_ms, clock_ms)

    return _without_rejects(messages, frames, take)


def expired_chunk(chunk: Entry | None, clock_ms: int | None) -> tuple[str, str] | None:
    """Return why a due large message must not be delivered, by one of its chunks; None if it may be.

    Raises:
        CorruptEntryError: the chunk is damaged.
    """
    if chunk is None:
        return None
    return _expired(schedule_of(peek_metadata(memoryview(chunk))).expires_ms, clock_ms)


def schedule_of_large(message: Assembled) -> Scheduled | None:
    """Return the schedule of a complete large message; None if it has no id."""
    if message.schedule_id is None:
        return None
    return Scheduled(message.schedule_id, message.positions[-1], message.stored_ms, message.deliver_ms)


def _expired(expires_ms: int | None, clock_ms: int | None) -> tuple[str, str] | None:
    if expires_ms is None or clock_ms is None or clock_ms <= expires_ms:
        return None
    return EXPIRED, f"it expired at {expires_ms} and was released at {clock_ms}, in milliseconds since 1970"


def _without_rejects(
    messages: pa.RecordBatch,
    frames: Entry | None,
    take: Callable[[int, dict[str, str]], tuple[str, str] | None],
) -> tuple[pa.RecordBatch, list[RejectedEntry]]:
    """Return the messages without those for which ``take`` returns the reason and detail of a
    reject, or finds a bad schedule.
    """
    refused: dict[int, tuple[str, str]] = {}
    for row in rows_with_property(messages["properties"], _PROPERTIES):
        try:
            refusal = take(row, dict(messages["properties"][row].as_py()))
        except CorruptEntryError as error:
            refusal = error.reason, error.message
        if refusal is not None:
            refused[row] = refusal
    if not refused:
        return messages, []
    stored = {} if frames is None else entries_of(frames)
    rejects: list[RejectedEntry] = []
    for row, (reason, detail) in refused.items():
        position, batch_index = _position(messages, row), messages["batch_index"][row].as_py()
        entry = stored.get(position) if batch_index < 0 else single_entries(messages.slice(row, 1))[0]
        rejects.append(RejectedEntry(position, entry, reason, detail, batch_index))
    is_kept = np.ones(messages.num_rows, dtype=bool)
    is_kept[list(refused)] = False
    return messages.filter(pa.array(is_kept)), rejects


def _position(messages: pa.RecordBatch, row: int) -> Position:
    return Position(messages["ledger_id"][row].as_py(), messages["entry_id"][row].as_py())
