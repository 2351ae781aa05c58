"""Repetition: a message that is delivered again and again, and when.

    ledgerlake.cron       five fields, or six with seconds first: ``0 9 * * MON-FRI``; with lists,
                          steps, names, ``L``, ``LW`` and ``#``, as ``cronsim`` reads them
    ledgerlake.every      an ISO-8601 duration or repeating interval: ``PT15M``, ``P1M``,
                          ``R5/PT1H``, ``R/2030-05-02T09:00:00+02:00/P1D``
    ledgerlake.timezone   the IANA name of the zone of local times; UTC if it is missing
    ledgerlake.until      milliseconds since 1970, or ISO-8601 with a zone: no occurrence is later
    ledgerlake.count      1 to 1,000,000,000: no more occurrences, whether or not they are delivered
    ledgerlake.jitter     a duration up to one day: an occurrence is due up to so much later; not
                          longer than the shortest time between two occurrences, changes of the
                          clock aside, or they would come closer than the rule allows
    ledgerlake.catchup    all, last or none of the occurrences that a stop, or a micro-batch of more
                          than a minute, delayed are delivered; all if it is missing

A message has ``cron`` or ``every``, the others only with one of them, and no ``expires``. A value
that cannot be understood makes the message a reject; no value stands for another one.

Rules kept here:
  - Occurrences begin at the message's start. If an interval has a start of its own, its occurrences
    are counted from there: ``R5`` is the first five, also if some are before the message's start.
    Occurrences before the message's start have no number.
  - The offset in an interval's start is not its zone: ``timezone`` decides about days.
  - Days and months are local dates, hours are real time. ``P1D`` is at the same local time each
    day, ``PT24H`` is not. ``P1DT12H`` twice is two dates later, and 24 hours.
  - Times come from the rule, the package ``tzdata`` and a hash of id and time, and nothing of the
    machine. So a micro-batch that is run again has the same ones.

``schedules.nominal_times`` has the rules of local times that are skipped or shown twice.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

from ledgerlake.outside import Unreadable, reading
from ledgerlake.schedules import local_times
from ledgerlake.schedules.nominal_times import (
    DAY_MS,
    LAST_MS,
    Duration,
    Interval,
    cron_rule,
    cron_times_ms,
    interval_times_ms,
    shortest_cron_ms,
)
from ledgerlake.wire.limits import MAX_CRON_CHARACTERS, MAX_OCCURRENCES
from ledgerlake.wire.schedules import (
    CATCH_UP_PROPERTY,
    COUNT_PROPERTY,
    CRON_PROPERTY,
    EVERY_PROPERTY,
    EXPIRES_PROPERTY,
    JITTER_PROPERTY,
    REPETITION_PROPERTIES,
    TIMEZONE_PROPERTY,
    UNTIL_PROPERTY,
    bad_schedule,
    checked_time_ms,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


# The release of the tz database that decides.
TIMEZONE_DATA_VERSION = local_times.DATA_VERSION

# A rule is read again for each occurrence of each message. A sender can make texts as long as a
# message.
_MOST_KEPT, _LONGEST_KEPT = 10_000, 500

_DAY_S = DAY_MS // 1000

_DURATION = re.compile(
    r"P(?=[0-9T])(?:([0-9]{1,9})Y)?(?:([0-9]{1,9})M)?(?:([0-9]{1,9})W)?(?:([0-9]{1,9})D)?"
    r"(?:T(?=[0-9])(?:([0-9]{1,9})H)?(?:([0-9]{1,9})M)?(?:([0-9]{1,9})(?:\.([0-9]{1,3}))?S)?)?"
)


class CatchUp(str, Enum):
    """Which of the occurrences that a stop, or a micro-batch of more than a minute, delayed are
    delivered after it.
    """

    ALL = "all"
    LAST = "last"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Repetition:
    """What the properties of a message say, checked; either ``cron`` or ``every``."""

    cron: str | None = None
    every: Interval | None = None
    timezone: str = "UTC"
    until_ms: int | None = None
    count: int | None = None
    jitter_ms: int = 0
    catch_up: CatchUp = CatchUp.ALL


@dataclass(frozen=True, slots=True)
class RepetitionRate:
    """What messages that repeat become in a day: occurrences, and the bytes of these."""

    occurrences: int = 0
    size_bytes: int = 0

    def __add__(self, other: RepetitionRate) -> RepetitionRate:
        return RepetitionRate(
            self.occurrences + other.occurrences, self.size_bytes + other.size_bytes
        )

    def __sub__(self, other: RepetitionRate) -> RepetitionRate:
        return RepetitionRate(
            max(0, self.occurrences - other.occurrences), max(0, self.size_bytes - other.size_bytes)
        )


@dataclass(frozen=True, slots=True)
class RepetitionLimit:
    """The most occurrences, and bytes of these, that the messages of a topic partition that repeat
    may become in a second; None without a limit.
    """

    occurrences_per_s: int | None = None
    bytes_per_s: int | None = None

    def allows(self, rate: RepetitionRate) -> bool:
        """Return whether a rate is within the limit."""
        amounts = (self.occurrences_per_s, rate.occurrences), (self.bytes_per_s, rate.size_bytes)
        return all(limit is None or amount <= limit * _DAY_S for limit, amount in amounts)


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One delivery of a message that is repeated.

    Args:
        number: from 1, in the rule, whether or not it is delivered.
        nominal_ms: when it is by the rule.
        due_ms: ``nominal_ms`` and the jitter.
    """

    number: int
    nominal_ms: int
    due_ms: int


def parse_repetition(properties: Mapping[str, object]) -> Repetition | None:
    """Return what the properties of a message say about repetition; None if it is not repeated.

    Raises:
        CorruptEntryError: ``bad_schedule``, and why.
    """
    texts: dict[str, str] = {}
    for name in REPETITION_PROPERTIES:
        value = properties.get(name)
        if isinstance(value, str):
            texts[name] = value
        elif value is not None:
            raise bad_schedule(f"{name} is not UTF-8 text")
    if not texts:
        return None
    if EXPIRES_PROPERTY in properties:
        raise bad_schedule(
            f"{EXPIRES_PROPERTY} is on a message that repeats; {UNTIL_PROPERTY} ends a repetition, "
            f"and {CATCH_UP_PROPERTY} says which late occurrences are delivered"
        )
    is_short = sum(map(len, texts.values())) <= _LONGEST_KEPT
    return (_parsed if is_short else _parsed.__wrapped__)(tuple(texts.items()))


@lru_cache(maxsize=_MOST_KEPT)
def _parsed(pairs: tuple[tuple[str, str], ...]) -> Repetition:
    texts = dict(pairs)
    if CRON_PROPERTY in texts and EVERY_PROPERTY in texts:
        raise bad_schedule(
            f"{CRON_PROPERTY} and {EVERY_PROPERTY} are on one message; it may have one of them"
        )
    if CRON_PROPERTY not in texts and EVERY_PROPERTY not in texts:
        raise bad_schedule(
            f"{next(iter(texts))} is on a message with neither {CRON_PROPERTY} nor {EVERY_PROPERTY}"
        )
    cron, every = texts.get(CRON_PROPERTY), texts.get(EVERY_PROPERTY)
    until, count = texts.get(UNTIL_PROPERTY), texts.get(COUNT_PROPERTY)
    repetition = Repetition(
        cron=None if cron is None else _checked_cron(cron),
        every=None if every is None else _checked_interval(every),
        timezone=checked_timezone(texts.get(TIMEZONE_PROPERTY, "UTC")),
        until_ms=None if until is None else checked_time_ms(UNTIL_PROPERTY, until),
        count=None if count is None else _checked_count(COUNT_PROPERTY, count),
        jitter_ms=_checked_jitter_ms(texts.get(JITTER_PROPERTY, "PT0S")),
        catch_up=_checked_catch_up(texts.get(CATCH_UP_PROPERTY, CatchUp.ALL)),
    )
    if repetition.every is not None and repetition.every.times is not None and count is not None:
        raise bad_schedule(
            f"{EVERY_PROPERTY} has a number after R, so {COUNT_PROPERTY} may not say another one"
        )
    if repetition.jitter_ms > (shortest_ms := _shortest_ms(repetition)):
        raise bad_schedule(
            f"{JITTER_PROPERTY} is longer than the shortest time between two occurrences, which is "
            f"{shortest_ms / 1000:g} s"
        )
    return repetition


def occurrences(
    repetition: Repetition, schedule_id: str, start_ms: int, after: Occurrence | None = None
) -> Iterator[Occurrence]:
    """Return the occurrences from ``start_ms`` on, or those that follow ``after``, one by one."""
    number, after_ms = (0, start_ms - 1) if after is None else (after.number, after.nominal_ms)
    last_ms = LAST_MS if repetition.until_ms is None else min(repetition.until_ms, LAST_MS)
    if after_ms >= last_ms:
        return
    zone = local_times.load_zone(repetition.timezone)
    if repetition.every is not None:
        times_ms = interval_times_ms(repetition.every, zone, start_ms, after_ms)
    else:
        assert repetition.cron is not None
        times_ms = cron_times_ms(repetition.cron, zone, after_ms)
    numbers = range(number + 1, (repetition.count or sys.maxsize) + 1)
    for next_number, nominal_ms in zip(numbers, times_ms):
        if nominal_ms > last_ms:
            return
        jitter_ms = _hash(schedule_id, nominal_ms) % (repetition.jitter_ms + 1)
        yield Occurrence(next_number, nominal_ms, nominal_ms + jitter_ms)


def rate_of(repetition: Repetition, size_bytes: int) -> RepetitionRate:
    """Return what a message becomes in a day on which its occurrences are as near to each other as
    its rule allows, at least one.

    Args:
        size_bytes: of the message.
    """
    count = -(-DAY_MS // _shortest_ms(repetition))
    return RepetitionRate(count, count * size_bytes)


def _shortest_ms(repetition: Repetition) -> int:
    """Return the shortest time between two occurrences of a rule."""
    if repetition.every is not None:
        return repetition.every.duration.shortest_ms
    assert repetition.cron is not None
    return shortest_cron_ms(repetition.cron)


def _hash(schedule_id: str, nominal_ms: int) -> int:
    text = f"{nominal_ms} {schedule_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def _checked_cron(text: str) -> str:
    if len(text) > MAX_CRON_CHARACTERS:
        raise bad_schedule(
            f"{CRON_PROPERTY} has {len(text):,} characters; it may have {MAX_CRON_CHARACTERS}"
        )
    if not (text.isascii() and text.isprintable()):
        raise bad_schedule(
            f"{CRON_PROPERTY} has characters that no cron expression has; fields are separated by "
            "spaces"
        )
    if text.startswith("@"):
        raise bad_schedule(
            f"{CRON_PROPERTY} is a nickname, which is not known; write fields, as 0 0 * * * for "
            "@daily"
        )
    if fault := _cron_fault(text):
        raise bad_schedule(f"{CRON_PROPERTY} '{text}' {fault}")
    return text


@lru_cache(maxsize=10_000)
def _cron_fault(text: str) -> str:
    """Return the fault of a cron expression as a phrase; empty if it has none."""
    try:
        with reading():
            first = next(cron_rule(text).local_times(datetime(2000, 1, 1)), None)
    except Unreadable as failure:
        return (
            "is no cron expression of five fields, or six with seconds first: "
            f"{str(failure).lower()}"
        )
    return "" if first is not None else "names days that do not exist"


def _checked_interval(text: str) -> Interval:
    word, *rest = text.split("/", 3)
    duration = _parse_duration(rest[-1] if rest else word)
    if duration is None or len(rest) > 2 or (rest and not word.startswith("R")):
        raise bad_schedule(
            f"{EVERY_PROPERTY} is neither an ISO-8601 duration such as PT15M or P1D nor a "
            "repeating interval such as R5/PT1H or R/2030-05-02T09:00:00+02:00/P1D"
        )
    if duration.shortest_ms < 1000:
        raise bad_schedule(f"{EVERY_PROPERTY} is shorter than a second")
    return Interval(
        duration,
        checked_time_ms(f"the start in {EVERY_PROPERTY}", rest[0]) if len(rest) == 2 else None,
        _checked_count(f"the number after R in {EVERY_PROPERTY}", word[1:])
        if rest and word != "R"
        else None,
    )


def _parse_duration(text: str) -> Duration | None:
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    years, months, weeks, days, hours, minutes, seconds = (
        int(part or 0) for part in match.groups()[:7]
    )
    milliseconds = int((match[8] or "").ljust(3, "0"))
    time_ms = ((hours * 60 + minutes) * 60 + seconds) * 1000 + milliseconds
    return Duration(12 * years + months, 7 * weeks + days, time_ms)


def _checked_jitter_ms(text: str) -> int:
    duration = _parse_duration(text)
    if duration is None:
        raise bad_schedule(f"{JITTER_PROPERTY} is no ISO-8601 duration, such as PT30S")
    if duration.shortest_ms > DAY_MS:
        raise bad_schedule(f"{JITTER_PROPERTY} is longer than a day")
    return duration.shortest_ms


def checked_timezone(text: str) -> str:
    """Return the name of a zone.

    Raises:
        CorruptEntryError: no zone has that name.
    """
    if text not in local_times.zone_names():
        raise bad_schedule(
            f"{TIMEZONE_PROPERTY} is no time zone of the IANA database {TIMEZONE_DATA_VERSION}, "
            "such as Europe/Berlin"
        )
    return text


def _checked_count(name: str, text: str) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_OCCURRENCES))
    if not (is_number and 1 <= int(text) <= MAX_OCCURRENCES):
        raise bad_schedule(f"{name} is no number from 1 to {MAX_OCCURRENCES:,}")
    return int(text)


def _checked_catch_up(text: str) -> CatchUp:
    try:
        return CatchUp(text)
    except ValueError:
        raise bad_schedule(f"{CATCH_UP_PROPERTY} is none of all, last and none") from None
