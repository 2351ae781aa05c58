"""The properties by which a sender names a schedule (``docs/schedules.md``).

    ledgerlake.schedule   an id, 1 to 200 characters: the message replaces the one that waits under
                          the id
    ledgerlake.expires    milliseconds since 1970, or ISO-8601 with a zone: a delayed message that
                          is released later is not delivered
    ledgerlake.cron, ledgerlake.every and five more say that the message is delivered again and
                          again; ``schedules.repetition`` has their values ledgerlake.pause,
                          ledgerlake.resume ``schedule=ID`` or ``all``: from the time of the message
                          on, repetitions are not delivered, or delivered again

A message with an id that is delivered when it is due has the number of its occurrence in
``ledgerlake.occurrence``. Such a message is no schedule and no cancel, wherever it is sent to.

A value that cannot be understood makes the message a reject; no value stands for another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from ledgerlake.errors import CorruptEntryError
from ledgerlake.reasons import BAD_SCHEDULE
from ledgerlake.wire.limits import MAX_SCHEDULE_CHARACTERS, MAX_TIME_MS

if TYPE_CHECKING:
    from ledgerlake.pb import pulsar_pb2 as pb

SCHEDULE_PROPERTY = "ledgerlake.schedule"
EXPIRES_PROPERTY = "ledgerlake.expires"
CRON_PROPERTY = "ledgerlake.cron"
EVERY_PROPERTY = "ledgerlake.every"
TIMEZONE_PROPERTY = "ledgerlake.timezone"
UNTIL_PROPERTY = "ledgerlake.until"
COUNT_PROPERTY = "ledgerlake.count"
JITTER_PROPERTY = "ledgerlake.jitter"
CATCH_UP_PROPERTY = "ledgerlake.catchup"
PAUSE_PROPERTY = "ledgerlake.pause"
RESUME_PROPERTY = "ledgerlake.resume"
# Of one that cancels others, whatever their schedules (see ``schedules.cancels``).
CANCEL_PROPERTY = "ledgerlake.cancel"

# Of a delivered message.
OCCURRENCE_PROPERTY = "ledgerlake.occurrence"
NOMINAL_PROPERTY = "ledgerlake.occurrence_time"
TIMEZONE_DATA_PROPERTY = "ledgerlake.timezone_data"
ROW_PROPERTIES = (OCCURRENCE_PROPERTY, NOMINAL_PROPERTY, TIMEZONE_DATA_PROPERTY)

REPETITION_PROPERTIES = (
    CRON_PROPERTY,
    EVERY_PROPERTY,
    TIMEZONE_PROPERTY,
    UNTIL_PROPERTY,
    COUNT_PROPERTY,
    JITTER_PROPERTY,
    CATCH_UP_PROPERTY,
)
# All that a sender may set.
SENDER_PROPERTIES = (
    SCHEDULE_PROPERTY,
    EXPIRES_PROPERTY,
    PAUSE_PROPERTY,
    RESUME_PROPERTY,
    *REPETITION_PROPERTIES,
)
# What a message says about others.
_TOLD_TO_OTHERS = (SCHEDULE_PROPERTY, PAUSE_PROPERTY, RESUME_PROPERTY, CANCEL_PROPERTY)

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """A request to pause the repetitions of a schedule, or of all schedules if there is no id, or
    to resume them.
    """

    schedule_id: str | None
    resumes: bool


@dataclass(frozen=True, slots=True)
class ScheduleProperties:
    """What the properties of a message say; None if a property is missing. ``repeats`` says whether
    one of ``REPETITION_PROPERTIES`` is there, whatever its value.
    """

    schedule_id: str | None = None
    expires_ms: int | None = None
    repeats: bool = False
    pause: PauseRequest | None = None


def parse_schedule(properties: Mapping[str, object]) -> ScheduleProperties:
    """Return what the properties of a message say.

    Raises:
        CorruptEntryError: ``bad_schedule``, and why.
    """
    if OCCURRENCE_PROPERTY in properties:
        return ScheduleProperties()
    schedule_id, expires = properties.get(SCHEDULE_PROPERTY), properties.get(EXPIRES_PROPERTY)
    return ScheduleProperties(
        None if schedule_id is None else checked_schedule_id(schedule_id),
        None if expires is None else checked_time_ms(EXPIRES_PROPERTY, expires),
        any(name in properties for name in REPETITION_PROPERTIES),
        _pause(properties),
    )


def is_told_to_others(properties: Mapping[str, object]) -> bool:
    """Return whether a message says something about others: whether it replaces, pauses, resumes or
    cancels.
    """
    return OCCURRENCE_PROPERTY not in properties and any(
        name in properties for name in _TOLD_TO_OTHERS
    )


def occurrence_properties(number: int, time_ms: int) -> dict[str, str]:
    """Return the properties that a message gets when it is delivered.

    Args:
        time_ms: when the occurrence is, by the message or its rule.
    """
    # A float of seconds may be below the millisecond, and the text would be that of the one before.
    time = (_EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="milliseconds")
    return {OCCURRENCE_PROPERTY: str(number), NOMINAL_PROPERTY: time.replace("+00:00", "Z")}


def properties_of(metadata: pb.MessageMetadata) -> dict[str, object]:
    """Return the properties of an entry; of a batch, none, because its messages have them."""
    if metadata.HasField("num_messages_in_batch"):
        return {}
    return {entry.key: entry.value for entry in metadata.properties}


def schedule_id_of_large(metadata: pb.MessageMetadata) -> str | None:
    """Return the id of the schedule of a large message, by the metadata of its chunk or marker;
    None also if its properties cannot be used (``fault_of_large``).
    """
    try:
        return parse_schedule(properties_of(metadata)).schedule_id
    except CorruptEntryError:
        return None


def fault_of_large(metadata: pb.MessageMetadata) -> CorruptEntryError | None:
    """Return why the properties of a large message cannot be used, ``bad_schedule``; None if they
    can. Whether it is rejected then depends on whether messages are delayed.
    """
    try:
        schedule = parse_schedule(properties_of(metadata))
    except CorruptEntryError as fault:
        return fault
    if schedule.repeats or schedule.pause:
        return bad_schedule(
            "a message that repeats, pauses or resumes is not sent in chunks; send a smaller one"
        )
    return None


def checked_schedule_id(schedule_id: object) -> str:
    """Return an id.

    Raises:
        CorruptEntryError: it is not text, is empty, or is too long.
    """
    if not isinstance(schedule_id, str):
        raise bad_schedule(f"{SCHEDULE_PROPERTY} is not UTF-8 text")
    if not 1 <= len(schedule_id) <= MAX_SCHEDULE_CHARACTERS:
        raise bad_schedule(
            f"{SCHEDULE_PROPERTY} has {len(schedule_id):,} characters; an id has 1 to "
            f"{MAX_SCHEDULE_CHARACTERS}"
        )
    return schedule_id


def _pause(properties: Mapping[str, object]) -> PauseRequest | None:
    found = [name for name in (PAUSE_PROPERTY, RESUME_PROPERTY) if name in properties]
    if not found:
        return None
    if len(found) > 1 or SCHEDULE_PROPERTY in properties:
        raise bad_schedule(
            f"{found[0]} is sent alone, without {SCHEDULE_PROPERTY} and not with its opposite"
        )
    target = properties[found[0]]
    if target == "all":
        return PauseRequest(None, found[0] == RESUME_PROPERTY)
    if not isinstance(target, str) or not target.startswith("schedule="):
        raise bad_schedule(f"{found[0]} is neither schedule=ID nor all")
    return PauseRequest(
        checked_schedule_id(target.removeprefix("schedule=")), found[0] == RESUME_PROPERTY
    )


def checked_time_ms(name: str, text: object) -> int:
    """Return a time.

    Args:
        name: what has the time, for the error.

    Raises:
        CorruptEntryError: it is neither milliseconds since 1970 nor ISO-8601 with a zone.
    """
    time_ms = _time_ms(text) if isinstance(text, str) else None
    if time_ms is None or not 0 < time_ms <= MAX_TIME_MS:
        raise bad_schedule(
            f"{name} is neither milliseconds since 1970 nor an ISO-8601 time with a zone"
        )
    return time_ms


def _time_ms(text: str) -> int | None:
    if text.isascii() and text.isdigit():
        return int(text) if len(text) <= len(str(MAX_TIME_MS)) else None
    try:
        # Python 3.10 does not read the zone "Z".
        moment = datetime.fromisoformat(text[:-1] + "+00:00" if text[-1:] in ("Z", "z") else text)
        return None if moment.tzinfo is None else round(moment.timestamp() * 1000)
    except (ValueError, OverflowError):
        return None


def bad_schedule(detail: str) -> CorruptEntryError:
    """Return the error of a property that cannot be used."""
    return CorruptEntryError(detail, reason=BAD_SCHEDULE)
