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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from ledgerlake.assembly.assembler import Assembled
from ledgerlake.decode.messages import WHOLE_BATCH
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.decode.single_entry import single_entries
from ledgerlake.decode.split import entries_of, read_delayed
from ledgerlake.errors import CorruptEntryError
from ledgerlake.operators.cancelled import of_batch
from ledgerlake.operators.schedule_events import PauseChanged, Scheduled
from ledgerlake.reasons import BAD_SCHEDULE, EXPIRED, SCHEDULE_REFUSED, Reason
from ledgerlake.schedules.cancel_messages import rows_with_property, stored_times_ms
from ledgerlake.schedules.cancels import cancel_of
from ledgerlake.schedules.repetition import parse_repetition, rate_of
from ledgerlake.stored.offsets import time_text
from ledgerlake.wire.entry import peek_metadata, read_stamp
from ledgerlake.wire.message_id import Position
from ledgerlake.wire.schedules import (
    CANCEL_PROPERTY,
    CRON_PROPERTY,
    EVERY_PROPERTY,
    EXPIRES_PROPERTY,
    OCCURRENCE_PROPERTY,
    SCHEDULE_PROPERTY,
    SENDER_PROPERTIES,
    bad_schedule,
    fault_of_large,
    occurrence_properties,
    parse_schedule,
    properties_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ledgerlake.assembly.assembler import Entry
    from ledgerlake.decode.messages import BatchRange
    from ledgerlake.operators.outcome_types import Outcome
    from ledgerlake.operators.schedule_events import ScheduleEvent, ScheduleEvents
    from ledgerlake.pb import pulsar_pb2 as pb
    from ledgerlake.schedules.repetition import Repetition

REFUSED_DETAIL = (
    "the micro-batch has more schedules than a task can pass on; read fewer bytes in a micro-batch"
)


_NAMES = re.compile(b"|".join(re.escape(name.encode()) for name in SENDER_PROPERTIES))
_RULES = re.compile(b"|".join(re.escape(name.encode()) for name in (CRON_PROPERTY, EVERY_PROPERTY)))
_BATCHED = (
    "a delayed message with a property of schedules must be sent alone, and this one is "
    "part of a batch"
)
_NO_START = (
    "a message that repeats needs a delivery time: the time from which it counts, for example now"
)
_DELAYED_PAUSE = "a message that pauses or resumes is sent without a delivery time"


def may_repeat(frames: bytes | memoryview | pa.Buffer) -> bool:
    """Return whether frames may hold a message that repeats."""
    return _RULES.search(frames) is not None


class _Message(NamedTuple):
    """A decoded message with one of the properties, and its row."""

    row: int
    position: Position
    batch_index: int
    time_ms: int
    properties: dict[str, str]


@dataclass(frozen=True)
class DelayedFrames:
    """A ``delayed`` piece without the entries that were rejected."""

    frames: memoryview
    first_entry: BatchRange
    rejects: list[RejectedEntry] = field(default_factory=list)


def find_in_frames(
    frames: memoryview, first_entry: BatchRange, schedules: ScheduleEvents
) -> DelayedFrames:
    """Return a ``delayed`` piece, and add its schedules."""
    if _NAMES.search(frames) is None:
        return DelayedFrames(frames, first_entry)
    rejects: list[RejectedEntry] = []
    delayed = read_delayed(frames)
    due_ms, ends = delayed.due_ms.tolist(), delayed.frame_ends.tolist()
    refused: set[int] = set()
    for row, (position, entry) in enumerate(entries_of(frames).items()):
        if _NAMES.search(entry) is None:
            continue
        is_read = row > 0 or first_entry.includes_whole(entry)
        try:
            metadata = peek_metadata(memoryview(entry))
            schedule_id, rule = _schedule_of_delayed(metadata)
            time_ms = read_stamp(memoryview(entry)).time_ms
        except CorruptEntryError as error:
            refused.add(row)
            if is_read:
                rejects.append(RejectedEntry(position, entry, error.reason, error.message))
            continue
        if rule is not None and not is_read:
            refused.add(row)
            continue
        if rule is not None and row == 0:
            first_entry = WHOLE_BATCH
        if schedule_id is None:
            continue
        # A time that is long past would have any number of occurrences up to now.
        start_ms = due_ms[row] if rule is None else max(due_ms[row], time_ms)
        # An occurrence costs as much as it is long, however well it is compressed.
        size_bytes = max(len(entry), metadata.uncompressed_size)
        rate = None if rule is None else rate_of(rule, size_bytes)
        if not schedules.add(Scheduled(schedule_id, position, time_ms, start_ms, rate)):
            refused.add(row)
            if is_read:
                rejects.append(RejectedEntry(position, entry, SCHEDULE_REFUSED, REFUSED_DETAIL))
    if not refused:
        return DelayedFrames(frames, first_entry)
    spans = zip([0, *ends], ends, strict=False)
    kept = b"".join(
        frames[start:end] for row, (start, end) in enumerate(spans) if row not in refused
    )
    first = WHOLE_BATCH if 0 in refused else first_entry
    return DelayedFrames(memoryview(kept), first, rejects)


def find_in_messages(
    messages: pa.RecordBatch,
    frames: Entry | None,
    schedules: ScheduleEvents,
    *,
    delays_messages: bool,
) -> tuple[pa.RecordBatch, list[RejectedEntry]]:
    """Return messages that are delivered at once, without those that are rejected, and add their
    schedules. Also without ``delays_messages`` a message that waits from before can be replaced,
    paused and cancelled.

    Args:
        frames: the ``MESSAGE`` frames that they came in; None if rejects need no bytes of them.
    """

    def take(message: _Message) -> tuple[Reason, str] | None:
        try:
            events = _events(message, delays_messages=delays_messages)
        except CorruptEntryError as fault:
            return _verdict(fault, delays_messages=delays_messages)
        is_full = any(not schedules.add(event, message.batch_index) for event in events)
        return (SCHEDULE_REFUSED, REFUSED_DETAIL) if is_full else None

    return _without_rejects(messages, frames, [*SENDER_PROPERTIES, CANCEL_PROPERTY], take)


def refusal_of_large(entry: Entry, *, delays_messages: bool) -> tuple[Reason, str] | None:
    """Return the reason and detail of the reject of a chunk or a marker; None if its properties can
    be used.
    """
    fault = fault_of_large(peek_metadata(memoryview(entry)))
    return None if fault is None else _verdict(fault, delays_messages=delays_messages)


def refusal_of_delayed(entry: Entry) -> tuple[Reason, str] | None:
    """Return the reason and detail of the reject of a delayed entry; None if its properties can be
    used, or if it is a batch, which is opened when it is due.
    """
    if _NAMES.search(entry) is None:
        return None
    try:
        _schedule_of_delayed(peek_metadata(memoryview(entry)))
    except CorruptEntryError as error:
        return error.reason, error.message
    return None


def _verdict(fault: CorruptEntryError, *, delays_messages: bool) -> tuple[Reason, str] | None:
    """Return the reason and detail of the reject of a message with a bad schedule. Without
    ``delays_messages`` no new message waits, so none is rejected for what it says of that.
    """
    return (fault.reason, fault.message) if delays_messages else None


def _events(message: _Message, *, delays_messages: bool) -> list[ScheduleEvent]:
    """Return the events of a message that is delivered at once.

    Raises:
        CorruptEntryError: ``bad_schedule``, and why.
    """
    position, time_ms = message.position, message.time_ms
    schedule = parse_schedule(message.properties)
    if schedule.repeats and delays_messages:
        raise bad_schedule(_NO_START)
    events: list[ScheduleEvent] = []
    if schedule.pause is not None:
        events.append(
            PauseChanged(schedule.pause.schedule_id, position, time_ms, schedule.pause.resumes)
        )
    if schedule.schedule_id is not None:
        events.append(Scheduled(schedule.schedule_id, position, time_ms))
    cancel = cancel_of(message.properties, position, time_ms)
    if cancel is not None and cancel.by == "schedule":
        events.append(cancel)
    return events


def find_in_due(
    messages: pa.RecordBatch, frames: Entry | None, clock_ms: int | None
) -> tuple[pa.RecordBatch, list[RejectedEntry]]:
    """Return due messages without those that must not be delivered, and these as rejects.

    Args:
        frames: the ``MESSAGE`` frames that they came in; None if only the topic has the bytes.
        clock_ms: the time of the micro-batch.
    """
    has_batches = any(index >= 0 for index in messages["batch_index"].to_pylist())

    def take(message: _Message) -> tuple[Reason, str] | None:
        if message.batch_index >= 0:
            return BAD_SCHEDULE, _BATCHED
        return _expired(parse_schedule(message.properties).expires_ms, clock_ms)

    # The other properties of a message that was sent alone were checked when it arrived.
    names = SENDER_PROPERTIES if has_batches else [EXPIRES_PROPERTY]
    return _without_rejects(messages, frames, list(names), take)


def expired_chunk(chunk: Entry | None, clock_ms: int | None) -> tuple[Reason, str] | None:
    """Return why a due large message must not be delivered, by one of its chunks; None if it may
    be.

    Raises:
        CorruptEntryError: the chunk is damaged.
    """
    if chunk is None:
        return None
    return _expired(
        parse_schedule(properties_of(peek_metadata(memoryview(chunk)))).expires_ms, clock_ms
    )


def with_occurrences(messages: pa.RecordBatch) -> pa.RecordBatch:
    """Return messages that were due, those with an id or a cancel with the properties of a
    delivered message: a copy of one on another topic must not be a schedule or a cancel there.
    """
    rows = _as_sent(messages, [SCHEDULE_PROPERTY, CANCEL_PROPERTY])
    if not rows:
        return messages
    taken = messages.take(pa.array(rows))
    deliver_us = taken["deliver_at"].cast(pa.int64()).to_pylist()
    added = {
        row: occurrence_properties(1, stored_ms if time_us is None else time_us // 1000)
        for row, time_us, stored_ms in zip(rows, deliver_us, stored_times_ms(taken), strict=True)
    }
    return with_properties(messages, added)


def with_properties(
    messages: pa.RecordBatch, added: Mapping[int, Mapping[str, str]]
) -> pa.RecordBatch:
    """Return messages with more properties, in place of their own of the same names.

    Args:
        added: by row.
    """
    number = messages.schema.get_field_index("properties")
    properties: list[list[tuple[str, str]]] = messages["properties"].to_pylist()
    for row, more in added.items():
        properties[row] = [pair for pair in properties[row] if pair[0] not in more] + list(
            more.items()
        )
    column = pa.array(properties, messages.schema.field(number).type)
    return messages.set_column(number, messages.schema.field(number), column)


def schedule_at_once(outcome: Outcome) -> Scheduled | None:
    """Return the schedule of a large message with an id that is delivered at once; None for
    others.
    """
    if (
        not isinstance(outcome, Assembled)
        or outcome.schedule_id is None
        or outcome.deliver_ms is not None
    ):
        return None
    return Scheduled(outcome.schedule_id, outcome.stands_at, outcome.stored_ms)


def _schedule_of_delayed(metadata: pb.MessageMetadata) -> tuple[str | None, Repetition | None]:
    """Return the id of a delayed message, and by which rule it repeats, if it does.

    Raises:
        CorruptEntryError: ``bad_schedule``, and why.
    """
    properties = properties_of(metadata)
    schedule = parse_schedule(properties)
    if any(not isinstance(text, str) for pair in properties.items() for text in pair):
        # It will be a reject when it is due, so it must not replace a message that can be
        # delivered.
        return None, None
    if schedule.pause is not None:
        raise bad_schedule(_DELAYED_PAUSE)
    if not schedule.repeats:
        return schedule.schedule_id, None
    rule = parse_repetition(properties)
    if schedule.schedule_id is None:
        raise bad_schedule(
            f"a message that repeats needs an id, by which it can be ended: {SCHEDULE_PROPERTY}"
        )
    return schedule.schedule_id, rule


def _expired(expires_ms: int | None, clock_ms: int | None) -> tuple[Reason, str] | None:
    if expires_ms is None or clock_ms is None or clock_ms <= expires_ms:
        return None
    return (
        EXPIRED,
        f"it expired at {time_text(expires_ms)} and was released at {time_text(clock_ms)}",
    )


def _without_rejects(
    messages: pa.RecordBatch,
    frames: Entry | None,
    names: list[str],
    take: Callable[[_Message], tuple[Reason, str] | None],
) -> tuple[pa.RecordBatch, list[RejectedEntry]]:
    """Return the messages without those for which ``take`` returns the reason and detail of a
    reject, or finds a bad schedule. It is asked about those with a property of one of some names.
    """
    refused: dict[tuple[Position, Reason], list[tuple[_Message, str]]] = {}
    for message in _with_property(messages, names):
        try:
            refusal = take(message)
        except CorruptEntryError as error:
            refusal = error.reason, error.message
        if refusal is not None:
            reason, detail = refusal
            refused.setdefault((message.position, reason), []).append((message, detail))
    if not refused:
        return messages, []
    is_kept = np.ones(messages.num_rows, dtype=bool)
    is_kept[[message.row for together in refused.values() for message, _ in together]] = False
    return messages.filter(pa.array(is_kept)), _rejects(messages, frames, refused)


def _as_sent(messages: pa.RecordBatch, names: list[str]) -> list[int]:
    """Return the rows with a property of one of some names. A copy of a delivered message is left
    out: it is no schedule and no cancel, wherever it is and however it came there.
    """
    own = messages["properties"]
    return sorted(
        set(rows_with_property(own, names)).difference(
            rows_with_property(own, [OCCURRENCE_PROPERTY])
        )
    )


def _with_property(messages: pa.RecordBatch, names: list[str]) -> Iterator[_Message]:
    """Yield the messages that have a property of one of some names."""
    rows = _as_sent(messages, names)
    # A batch may have a million of them, and a value of Arrow costs more than the message.
    taken = messages.take(pa.array(rows, pa.int64()))
    columns = [
        taken[name].to_pylist() for name in ("ledger_id", "entry_id", "batch_index", "properties")
    ]
    for row, time_ms, ledger_id, entry_id, batch_index, pairs in zip(
        rows, stored_times_ms(taken), *columns, strict=True
    ):
        yield _Message(row, Position(ledger_id, entry_id), batch_index, time_ms, dict(pairs))


def _rejects(
    messages: pa.RecordBatch,
    frames: Entry | None,
    refused: dict[tuple[Position, Reason], list[tuple[_Message, str]]],
) -> list[RejectedEntry]:
    """Return one reject for each entry and reason. If that is one message of a batch, the reject
    has it alone; else it lists them.

    Args:
        refused: by entry and reason, the messages with the detail of each.
    """
    stored = {} if frames is None else entries_of(frames)
    rejects: list[RejectedEntry] = []
    for (position, reason), together in refused.items():
        (first, detail), indexes = together[0], [message.batch_index for message, _ in together]
        if len(together) > 1:
            rejects.append(
                RejectedEntry(
                    position, stored.get(position), reason, f"{of_batch(indexes)}: {detail}"
                )
            )
        elif first.batch_index >= 0:
            (entry,) = single_entries(messages.slice(first.row, 1))
            rejects.append(RejectedEntry(position, entry, reason, detail, first.batch_index))
        else:
            rejects.append(RejectedEntry(position, stored.get(position), reason, detail))
    return rejects
