"""Nominal times: when the occurrences of a cron expression or of an interval are.

Rules kept here:
  - Times grow, up to the end of the year 9000. Occurrences at one instant are one occurrence.
  - An appointment is a local time of a zone. If the clock skips it, it is when the clock skips it;
    if the clock shows it twice, it is the first.
  - A cron expression whose minute or hour begins with ``*`` matches each instant at which the clock
    shows a matching time: none of an hour that is skipped, all of one that is shown twice. Any
    other one gives appointments. This is the rule of Debian's cron, here also for seconds.
  - Occurrence k, from 0, of an interval is its start and k times its duration. Months and days are
    dates at the start's local time, and appointments; a month that is too short has its last day.
    The rest of the duration is real time after that.

``cronsim`` reads an expression here, and says which days match. It does not search for times: of a
zone with changes of half an hour it loses occurrences, of an expression with seconds it makes no
appointments, and it goes through each day of decades if few days or none match.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from calendar import monthrange
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from cronsim import CronSim

from ledgerlake.schedules.local_times import (
    appointment_ms,
    change_ms,
    instants_ms,
    local_time,
    set_back_ms,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from zoneinfo import ZoneInfo

DAY_MS = 24 * 60 * 60 * 1000

# The end of the year 9000. A search that begins before it stays within Python's dates.
LAST_MS = 221_876_927_999_999
_AFTER_LAST_DAY = date(9001, 1, 1)

# Days of one date and weekday are at most 40 years apart.
_LONGEST_SEARCH_YEARS = 50
_LONGEST_SEARCH_MS = _LONGEST_SEARCH_YEARS * 366 * DAY_MS

# A month for each length and weekday of its first day: all that the days of a month differ by.
_MONTHS = {
    (length, weekday): (year, month)
    for year in range(2000, 2028)
    for month in range(1, 13)
    for weekday, length in [monthrange(year, month)]
}

# Rules that are kept, of some kilobytes each.
_MOST_RULES = 1_000

_SECOND = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Duration:
    """An ISO-8601 duration: calendar months, calendar days, and real time."""

    months: int
    days: int
    time_ms: int

    @property
    def shortest_ms(self) -> int:
        return (28 * self.months + self.days) * DAY_MS + self.time_ms


@dataclass(frozen=True, slots=True)
class Interval:
    """A repeating interval; ``start_ms`` None is the start of the message, ``times`` None is
    without end.
    """

    duration: Duration
    start_ms: int | None = None
    times: int | None = None


class CronRule:
    """A cron expression. To find a day, it looks at the days of the 28 kinds of months at most,
    however far the day is, also if no day matches: each message may bring another expression.

    Raises:
        CronSimError: the text is no cron expression.
    """

    def __init__(self, cron: str) -> None:
        self._fields = CronSim(cron, datetime(2000, 1, 1))
        self._months = sorted(self._fields.months)
        self.hours, self.minutes, self.seconds = map(
            sorted, (self._fields.hours, self._fields.minutes, self._fields.seconds)
        )
        self._days: dict[tuple[int, int], list[int]] = {}

    def local_times(self, after: datetime) -> Iterator[datetime]:
        """Yield the local times that match, after another one, until none follows for decades."""
        begin = after.replace(microsecond=0) + _SECOND
        for day in self._days_from(begin.date()):
            yield from self._times_of(day, begin.time() if day == begin.date() else time())

    def _days_from(self, first: date) -> Iterator[date]:
        year, last_year = first.year, first.year + _LONGEST_SEARCH_YEARS
        while year <= last_year:
            for month in self._months:
                for day in self._days_of(year, month):
                    found = date(year, month, day)
                    if found >= first:
                        yield found
                        last_year = year + _LONGEST_SEARCH_YEARS
            year += 1

    def _days_of(self, year: int, month: int) -> list[int]:
        """Return the days of a month that match."""
        weekday, length = monthrange(year, month)
        if (length, weekday) not in self._days:
            year, month = _MONTHS[length, weekday]
            days = range(1, length + 1)
            self._days[length, weekday] = [
                day for day in days if self._fields.match_day(date(year, month, day))
            ]
        return self._days[length, weekday]

    def _times_of(self, day: date, first: time) -> Iterator[datetime]:
        for hour in self.hours[bisect_left(self.hours, first.hour) :]:
            first_minute = first.minute if hour == first.hour else 0
            for minute in self.minutes[bisect_left(self.minutes, first_minute) :]:
                is_first = (hour, minute) == (first.hour, first.minute)
                for second in self.seconds[
                    bisect_left(self.seconds, first.second if is_first else 0) :
                ]:
                    yield datetime.combine(day, time(hour, minute, second))


@lru_cache(maxsize=_MOST_RULES)
def cron_rule(cron: str) -> CronRule:
    """Return the rule of an expression; one that this process has had is not read again.

    Raises:
        CronSimError: as ``CronRule``.
    """
    return CronRule(cron)


def cron_times_ms(cron: str, zone: ZoneInfo, after_ms: int) -> Iterator[int]:
    """Yield the times of a valid cron expression after an instant."""
    minute, hour = cron.split()[-5:-3]
    is_by_clock = minute.startswith("*") or hour.startswith("*")
    return (_clock_times_ms if is_by_clock else _appointments_ms)(cron, zone, after_ms)


@lru_cache(maxsize=10_000)
def shortest_cron_ms(cron: str) -> int:
    """Return the shortest time between two occurrences of a valid cron expression, as if each day
    matched and no clock were changed: a day if it has one time of the day.
    """
    rule = cron_rule(cron)
    units = ((rule.seconds, 1_000), (rule.minutes, 60_000), (rule.hours, 3_600_000))
    shortest_ms, span_ms = DAY_MS, 0
    for values, unit_ms in (*units, ([0, 1], DAY_MS)):
        # From the last time of a minute, an hour or a day to the first one of the next that has
        # times.
        gaps_ms = [(later - earlier) * unit_ms - span_ms for earlier, later in pairwise(values)]
        shortest_ms = min([shortest_ms, *gaps_ms])
        span_ms += (values[-1] - values[0]) * unit_ms
    return shortest_ms


def _appointments_ms(cron: str, zone: ZoneInfo, after_ms: int) -> Iterator[int]:
    """Yield the appointments. After one that was skipped, the search goes on where the
    clock does.
    """
    while True:
        for local in cron_rule(cron).local_times(local_time(zone, after_ms)):
            time_ms = appointment_ms(zone, local)
            if time_ms <= after_ms:
                continue
            yield time_ms
            after_ms = time_ms
            if local_time(zone, time_ms) != local:
                break
        else:
            return


def _clock_times_ms(cron: str, zone: ZoneInfo, after_ms: int) -> Iterator[int]:
    """Yield each instant whose local time matches. The search is for local times, so it starts
    again at each change of the clock that it comes to.
    """
    begin_ms = (after_ms // 1000 + 1) * 1000
    while begin_ms - after_ms < _LONGEST_SEARCH_MS:
        next_change_ms = set_back_ms(zone, begin_ms)
        for local in cron_rule(cron).local_times(local_time(zone, begin_ms) - _SECOND):
            first_ms, second_ms = instants_ms(zone, local)
            time_ms = first_ms if first_ms >= begin_ms else second_ms
            if next_change_ms is not None and time_ms >= next_change_ms:
                break
            if second_ms < first_ms:
                next_change_ms = change_ms(zone, second_ms, first_ms)
                break
            if first_ms < second_ms:
                next_change_ms = set_back_ms(zone, time_ms)
            yield time_ms
            after_ms = time_ms
        if next_change_ms is None:
            return
        begin_ms = next_change_ms


def interval_times_ms(
    every: Interval, zone: ZoneInfo, start_ms: int, after_ms: int
) -> Iterator[int]:
    """Yield the times of an interval after an instant.

    Args:
        start_ms: the start of an interval without one.
    """
    begin_ms = start_ms if every.start_ms is None else every.start_ms

    def time_of(step: int) -> int:
        return _step_ms(every.duration, zone, begin_ms, step)

    steps_until_then = range((after_ms - begin_ms) // every.duration.shortest_ms + 1)
    first_step = bisect_right(steps_until_then, after_ms, key=time_of)
    for step in range(first_step, every.times or sys.maxsize):
        time_ms = time_of(step)
        if time_ms > LAST_MS:
            return
        if time_ms > after_ms:
            yield time_ms
            after_ms = time_ms


def _step_ms(duration: Duration, zone: ZoneInfo, begin_ms: int, step: int) -> int:
    """Return a start and ``step`` times a duration; a time after the last one if that is no
    date.
    """
    if step == 0 or not (duration.months or duration.days):
        return begin_ms + step * duration.time_ms
    begin = local_time(zone, begin_ms)
    year, month = divmod(12 * begin.year + begin.month - 1 + step * duration.months, 12)
    if year >= _AFTER_LAST_DAY.year:
        return LAST_MS + 1
    month_day = date(year, month + 1, min(begin.day, monthrange(year, month + 1)[1]))
    day = month_day.toordinal() + step * duration.days
    if day >= _AFTER_LAST_DAY.toordinal():
        return LAST_MS + 1
    local = datetime.combine(date.fromordinal(day), begin.time())
    return appointment_ms(zone, local) + step * duration.time_ms
