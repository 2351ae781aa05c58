"""The properties by which a sender names a schedule (``docs/schedules.md``).

    ledgerlake.schedule   an id, 1 to 200 characters: the message replaces the one that waits under the id
    ledgerlake.expires    milliseconds since 1970, or ISO-8601 with a zone: a delayed message that is released later is not
                          delivered

A value that cannot be understood makes the message a reject; no value stands for another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from ledgerlake.errors import CorruptEntryError
from ledgerlake.wire.limits import MAX_SCHEDULE_CHARACTERS, MAX_TIME_MS

if TYPE_CHECKING:
    from ledgerlake.pb import pulsar_pb2 as pb

SCHEDULE_PROPERTY = "ledgerlake.schedule"
EXPIRES_PROPERTY = "ledgerlake.expires"

BAD_SCHEDULE = "bad_schedule"


@dataclass(frozen=True, slots=True)
class ScheduleProperties:
    """What the properties of a message say; None if a property is missing."""

    schedule_id: str | None = None
    expires_ms: int | None = None


def parse_schedule(properties: Mapping[str, object]) -> ScheduleProperties:
    """Return what the properties of a message say.

    Raises:
        CorruptEntryError: ``bad_schedule``, and why.
    """
    schedule_id, expires = properties.get(SCHEDULE_PROPERTY), properties.get(EXPIRES_PROPERTY)
    return ScheduleProperties(
        None if schedule_id is None else checked_schedule_id(schedule_id),
        None if expires is None else _expires_ms(expires),
    )


def schedule_of(metadata: pb.MessageMetadata) -> ScheduleProperties:
    """Return what the properties of an entry say; of a batch, nothing, because its messages have the
    properties.

    Raises:
        CorruptEntryError: ``bad_schedule``, and why.
    """
    if metadata.HasField("num_messages_in_batch"):
        return ScheduleProperties()
    return parse_schedule({entry.key: entry.value for entry in metadata.properties})


def checked_schedule_id(schedule_id: object) -> str:
    """Return an id.

    Raises:
        CorruptEntryError: it is not text, is empty, or is too long.
    """
    if not isinstance(schedule_id, str):
        raise _bad(f"{SCHEDULE_PROPERTY} is not UTF-8 text")
    if not 1 <= len(schedule_id) <= MAX_SCHEDULE_CHARACTERS:
        raise _bad(f"{SCHEDULE_PROPERTY} has {len(schedule_id):,} characters; an id has 1 to {MAX_SCHEDULE_CHARACTERS}")
    return schedule_id


def _expires_ms(text: object) -> int:
    time_ms = _time_ms(text) if isinstance(text, str) else None
    if time_ms is None or not 0 < time_ms <= MAX_TIME_MS:
        raise _bad(f"{EXPIRES_PROPERTY} is neither milliseconds since 1970 nor an ISO-8601 time with a zone")
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


def _bad(detail: str) -> CorruptEntryError:
    return CorruptEntryError(detail, reason=BAD_SCHEDULE)
