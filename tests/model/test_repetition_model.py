"""Cron expressions and intervals against a walk: minute by minute, or second by second, what the
clock of a zone shows.

The walk reads cron expressions itself, and asks the zone only what it shows at an instant. So it
knows neither skipped nor repeated local times. An appointment is kept when the clock first shows
its time or a later one.
"""

from __future__ import annotations

import calendar
import random
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from functools import cache, cached_property
from importlib.resources import files
from itertools import count, pairwise, takewhile
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from ledgerlake.schedules.repetition import Occurrence, Repetition, occurrences, parse_repetition

if TYPE_CHECKING:
    from numpy.typing import NDArray

ZONES = (
    "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "Africa/Casablanca",
    "America/Sao_Paulo", "Asia/Tehran", "Pacific/Apia", "Europe/London", "UTC",
)  # fmt: skip
YEARS = range(2009, 2029)

CRON = (
    "0 9 * * *", "30 2 * * *", "15,30 2 * * *", "0,30 0-3 * * *", "59 23 * * MON-FRI", "0 0 L * *", "45 1 LW * *",
    "30 0 * * SUN#2", "0 1 * * 0L", "0 12 13 * FRI", "0 2 */2 * 1-6/2", "10-20/5 2/6 * MAR,OCT *", "0 0 29 2 *",
    "17 * * * 7", "*/40 * 1 * *", "*/30 */3 * * SUN", "30 */2 1-7 * *", "*/20 1-3 * 3-4,9-12 0", "0 */3 31 * *",
)  # fmt: skip
WITH_SECONDS = (
    "0 0 2 * * *", "59,7 29-31 0-3 * * *", "*/25 10 1,2 * * *", "30 */10 * * * *", "*/15 * 2 * * *", "20-25 0 */1 * * SUN",
)  # fmt: skip
INTERVALS = {"P1D": (0, 1, 0), "P1W": (0, 7, 0), "P1M": (1, 0, 0), "P1Y2M3D": (14, 3, 0), "P1DT12H": (0, 1, 720), "PT90M": (0, 0, 90)}  # fmt: skip

DAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]
MONTHS = ["-", "JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]


# What a cron expression matches.


def numbers(field: str, least: int, most: int, names: list[str] | None = None) -> set[int]:
    """The numbers of a field without ``L`` and ``#``."""

    def number(text: str) -> int:
        return names.index(text) if names and text in names else int(text)

    found: set[int] = set()
    for part in field.split(","):
        span, slash, step = part.partition("/")
        first, dash, last = span.partition("-")
        if span == "*":
            begin, end = least, most
        else:
            begin = number(first)
            end = number(last) if dash else most if slash else begin
        found |= set(range(begin, end + 1, int(step or 1)))
    return found


def matches_day(day: date, of_month: str, month: str, of_week: str) -> bool:
    if day.month not in numbers(month, 1, 12, MONTHS):
        return False
    last = calendar.monthrange(day.year, day.month)[1]
    weekday = day.isoweekday() % 7
    if of_month == "L":
        by_month = day.day == last
    elif of_month == "LW":
        working = [
            number for number in range(1, last + 1) if day.replace(day=number).isoweekday() < 6
        ]
        by_month = day.day == working[-1]
    else:
        by_month = day.day in numbers(of_month, 1, 31)
    if of_week.endswith("L"):
        by_week = weekday == int(of_week[0]) % 7 and day.day > last - 7
    elif "#" in of_week:
        name, nth = of_week.split("#")
        by_week = weekday == DAYS.index(name) and (day.day - 1) // 7 == int(nth) - 1
    else:
        by_week = weekday in {number % 7 for number in numbers(of_week, 0, 7, DAYS)}
    both = of_month[0] == "*" or of_week[0] == "*"
    return by_month and by_week if both else by_month or by_week


@dataclass(frozen=True)
class Walk:
    """Equal steps of time, and what the clock of a zone shows at each; both in steps since 1970.

    Args:
        step_s: the length of a step, which divides a minute.
    """

    zone: str
    step_s: int
    instants: NDArray[np.int64]
    shown: NDArray[np.int64]

    @cached_property
    def local(self) -> tuple[NDArray[Any], ...]:
        """The day, hour, minute and second of each local time from the first to the last one."""
        times_s = np.arange(self.shown.min(), self.shown.max() + 1) * self.step_s
        return times_s // 86_400, times_s // 3600 % 24, times_s // 60 % 60, times_s % 60

    @cached_property
    def reached(self) -> NDArray[np.int64]:
        """The latest time that the clock has shown so far."""
        return np.maximum.accumulate(self.shown)

    def times_of(self, cron: str) -> list[int]:
        """The seconds at which an expression has occurrences."""
        fields = cron.split()
        second, minute, hour = fields[:3] if len(fields) == 6 else ("0", *fields[:2])
        days, *of_day = self.local
        first_day, last_day = int(days[0]), int(days[-1])
        dates = [date(1970, 1, 1) + timedelta(day) for day in range(first_day, last_day + 1)]
        matching = np.array([matches_day(day, *fields[-3:]) for day in dates])[days - first_day]
        for values, field, most in zip(of_day, (hour, minute, second), (23, 59, 59), strict=True):
            matching &= np.isin(np.arange(most + 1), list(numbers(field, 0, most)))[values]
        first = self.shown.min()
        if minute[0] == "*" or hour[0] == "*":
            has = matching[self.shown - first]
        else:
            has = np.diff(np.cumsum(matching)[self.reached - first], prepend=0) > 0
        return [int(instant) * self.step_s for instant in self.instants[has]]

    def times_every(self, duration: str, begin_s: int) -> list[int]:
        """The seconds at which an interval from ``begin_s``, a minute, has occurrences."""
        months, days, minutes = INTERVALS[duration]
        end_s = int(self.instants[-1] + 1) * 60
        if not months and not days:
            return list(range(begin_s, end_s, minutes * 60))
        day, minute = divmod(int(self.shown[begin_s // 60 - self.instants[0]]), 1440)
        begin = np.datetime64(day, "D")
        month = begin.astype("datetime64[M]")
        times = [begin_s]
        for number in count(1):
            new_month = month + np.timedelta64(number * months, "M")
            last = (new_month + np.timedelta64(1, "M")).astype("datetime64[D]") - np.timedelta64(
                1, "D"
            )
            new_day = min(new_month + (begin - month), last) + np.timedelta64(number * days, "D")
            place = np.searchsorted(self.reached, int(new_day.astype(int)) * 1440 + minute)
            if place == len(self.reached):
                break
            second = (int(self.instants[place]) + number * minutes) * 60
            if times[-1] < second < end_s:
                times.append(second)
        return times


@cache
def zone_data(name: str) -> ZoneInfo:
    with (files("tzdata") / "zoneinfo" / name).open("rb") as data:
        return ZoneInfo.from_file(data)


def offset_s(zone: str, second: int) -> int:
    offset = datetime.fromtimestamp(second, timezone.utc).astimezone(zone_data(zone)).utcoffset()
    assert offset is not None
    return int(offset.total_seconds())


def walk(zone: str, begin_s: int, end_s: int, step_s: int = 60) -> Walk:
    """Walk from begin to before end; the begin must not be in local times that are repeated."""
    offsets = []
    for part_s in range(begin_s, end_s, 6 * 3600):
        seconds = range(part_s, min(part_s + 6 * 3600, end_s), step_s)
        before, after = offset_s(zone, seconds[0]), offset_s(zone, seconds[-1])
        offsets += (
            [before] * len(seconds)
            if before == after
            else [offset_s(zone, second) for second in seconds]
        )
    instants = np.arange(begin_s, end_s, step_s) // step_s
    return Walk(zone, step_s, instants, instants + np.array(offsets) // step_s)


@cache
def changes(zone: str) -> list[int]:
    """Days, in seconds since 1970, that a change of the clock follows."""
    days = range(seconds_of(YEARS[0]), seconds_of(YEARS[-1] + 1), 86_400)
    return [
        before
        for before, after in pairwise(days)
        if offset_s(zone, before) != offset_s(zone, after)
    ]


def seconds_of(year: int) -> int:
    return int(datetime(year, 1, 10, tzinfo=timezone.utc).timestamp())


# What Ledgerlake says.


def found(properties: dict[str, str], zone: str, begin_s: int, end_s: int) -> list[int]:
    """The seconds of all occurrences, taken from one list, from begin to before end."""
    repetition = parse({**properties, "timezone": zone})
    all_of_them = occurrences(repetition, "a", begin_s * 1000)
    return [
        one.nominal_ms // 1000
        for one in takewhile(lambda one: one.nominal_ms < end_s * 1000, all_of_them)
    ]


def found_one_by_one(properties: dict[str, str], zone: str, begin_s: int, end_s: int) -> list[int]:
    """The same, each taken as the one that follows the last."""
    repetition = parse({**properties, "timezone": zone})
    times: list[int] = []
    last: Occurrence | None = None
    while (
        last := next(occurrences(repetition, "a", begin_s * 1000, last), None)
    ) and last.nominal_ms < end_s * 1000:
        times.append(last.nominal_ms // 1000)
        assert last.number == len(times)
    return times


def parse(properties: dict[str, Any]) -> Repetition:
    repetition = parse_repetition({f"ledgerlake.{name}": text for name, text in properties.items()})
    assert repetition is not None
    return repetition


def random_cron(rng: random.Random) -> str:
    minute = rng.choice(["0", "30", "7,37", "*/20", "5-50/15", "*", "59"])
    hour = rng.choice(["*", "*/2", "*/5", "0", "1,2", "2", "3", "0-4", "23", "2/7", "12"])
    of_month = rng.choice(["*", "*/3", "1", "L", "LW", "31", "1-7", "8-14/2", "25-31"])
    month = rng.choice(["*", "3,10", "MAR", "4-11", "*/6", "DEC"])
    of_week = rng.choice(["*", "*/2", "SUN", "1-5", "6,7", "SAT#1", "SUN#5", "0L", "3L"])
    if minute == "*" and month == "*":
        month = "3,10"
    return f"{minute} {hour} {of_month} {month} {of_week}"


def crons(seed: int, more: int) -> list[str]:
    rng = random.Random(seed)
    return [*CRON, *(random_cron(rng) for _ in range(more))]


@pytest.mark.parametrize("zone", ZONES)
def test_cron_expressions_around_changes_of_the_clock(zone: str) -> None:
    rng = random.Random(zone)
    days = changes(zone) or [seconds_of(2024)]
    for day in {days[0], days[-1], *rng.sample(days, min(len(days), 3))}:
        steps = walk(zone, day - 2 * 86_400, day + 3 * 86_400)
        for cron in crons(day, 5):
            begin_s = rng.randrange(day - 86_400, day + 2 * 86_400)
            expected = [second for second in steps.times_of(cron) if second >= begin_s]
            assert found({"cron": cron}, zone, begin_s, day + 3 * 86_400) == expected, (
                cron,
                begin_s,
            )
            assert found_one_by_one({"cron": cron}, zone, begin_s, day + 3 * 86_400) == expected, (
                cron,
                begin_s,
            )


@pytest.mark.parametrize("zone", ZONES)
def test_cron_expressions_with_seconds_around_changes_of_the_clock(zone: str) -> None:
    rng = random.Random(zone)
    days = changes(zone) or [seconds_of(2024)]
    for day in {days[0], days[-1]}:
        steps = walk(zone, day, day + 86_400, 1)
        for cron in WITH_SECONDS:
            begin_s = rng.randrange(day, day + 86_400)
            expected = [second for second in steps.times_of(cron) if second >= begin_s]
            assert found({"cron": cron}, zone, begin_s, day + 86_400) == expected, (cron, begin_s)


@pytest.mark.parametrize("zone", ZONES)
def test_intervals(zone: str) -> None:
    rng = random.Random(zone)
    days = changes(zone) or [seconds_of(2024)]
    for day in {days[0], days[-1], rng.choice(days)}:
        end_s = day + 70 * 86_400
        steps = walk(zone, day - 2 * 86_400, end_s)
        for duration in INTERVALS:
            begin_s = rng.randrange(day - 86_400, day + 2 * 86_400, 60)
            start_s = begin_s + rng.choice([-86_400, 0, 1, 86_400, 40 * 86_400])
            expected = [
                second for second in steps.times_every(duration, begin_s) if second >= start_s
            ]
            every = f"R/{begin_s * 1000}/{duration}"
            assert found({"every": every}, zone, start_s, end_s) == expected, (every, start_s)
            assert found_one_by_one({"every": every}, zone, start_s, end_s) == expected, (
                every,
                start_s,
            )


@pytest.mark.long
@pytest.mark.parametrize("year", YEARS)
@pytest.mark.parametrize("zone", ZONES)
def test_twenty_years_of_cron_expressions_and_intervals(zone: str, year: int) -> None:
    begin_s, end_s = seconds_of(year), seconds_of(year + 1)
    steps = walk(zone, begin_s, end_s)
    for cron in crons(year, 12):
        assert found({"cron": cron}, zone, begin_s, end_s) == steps.times_of(cron), cron
    for duration in INTERVALS:
        found_times = found({"every": duration}, zone, begin_s, end_s)
        assert found_times == steps.times_every(duration, begin_s), duration


def test_the_walk_passes_skipped_and_repeated_times() -> None:
    """A comparison in which nothing special comes would show nothing."""
    skipped_days = {
        zone
        for zone in ZONES
        for day in changes(zone)
        if abs(offset_s(zone, day + 86_400) - offset_s(zone, day)) >= 86_400
    }
    assert skipped_days == {"Pacific/Apia"}
    assert {zone for zone in ZONES if not changes(zone)} == {"Asia/Kolkata", "UTC"}
    steps = walk(
        "Australia/Lord_Howe",
        changes("Australia/Lord_Howe")[0],
        changes("Australia/Lord_Howe")[0] + 86_400,
    )
    assert {*np.diff(steps.shown)} == {1, -29}
