"""Repetition: what the properties may say, and when occurrences are. ``tests/model`` compares them
with a walk through the minutes.
"""

from __future__ import annotations

import contextlib
from datetime import datetime, timezone
from itertools import islice, pairwise
from typing import Any

import pytest
from cronsim import CronSim
from hypothesis import example, given
from hypothesis import strategies as st

from ledgerlake.errors import CorruptEntryError
from ledgerlake.schedules import repetition as repetition_rules
from ledgerlake.schedules.local_times import load_zone, zone_names
from ledgerlake.schedules.repetition import (
    TIMEZONE_DATA_VERSION,
    CatchUp,
    Occurrence,
    RepetitionRate,
    occurrences,
    parse_repetition,
    rate_of,
)
from ledgerlake.wire.limits import MAX_TIME_MS
from ledgerlake.wire.schedules import REPETITION_PROPERTIES
from tests.growth.counting import counted_calls

BERLIN, NEW_YORK, UTC = "Europe/Berlin", "America/New_York", "UTC"
KOLKATA, LORD_HOWE, APIA = "Asia/Kolkata", "Australia/Lord_Howe", "Pacific/Apia"

NEW_YEAR_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def first(properties: dict[str, Any], start_ms: int, count: int = 10) -> list[Occurrence]:
    repetition = parse_repetition(
        {f"ledgerlake.{name}": value for name, value in properties.items()}
    )
    assert repetition is not None
    return list(islice(occurrences(repetition, "visit-17", start_ms), count))


def shown(time_ms: int, zone: str) -> str:
    return (
        datetime.fromtimestamp(time_ms / 1000, timezone.utc).astimezone(load_zone(zone)).isoformat()
    )


@pytest.mark.parametrize("cron", ["0 0 */28 * MON#3", "0 0 */31 * 1L"])
def test_a_rule_looks_at_the_days_of_each_kind_of_month_once_though_none_matches(cron: str) -> None:
    with (
        counted_calls(CronSim, "match_day") as days,
        pytest.raises(CorruptEntryError, match="do not exist"),
    ):
        parse_repetition({"ledgerlake.cron": cron})
    # A month has one of four lengths, and begins on one of seven days of the week.
    assert len(days) <= (28 + 29 + 30 + 31) * 7


CRON = [
    # A leap day; 2100 has none.
    ("0 0 29 2 *", UTC, "2092-03-01T00:00:00+00:00",
     ["2096-02-29T00:00:00+00:00", "2104-02-29T00:00:00+00:00"]),
    # The last day, and the last working day, of a month.
    ("30 23 L * *", UTC, "2026-01-15T00:00:00+00:00",
     ["2026-01-31T23:30:00+00:00", "2026-02-28T23:30:00+00:00", "2026-03-31T23:30:00+00:00"]),
    ("0 18 LW * *", UTC, "2026-01-01T00:00:00+00:00",
     ["2026-01-30T18:00:00+00:00", "2026-02-27T18:00:00+00:00", "2026-03-31T18:00:00+00:00"]),
    # Two appointments in an hour that is skipped are one occurrence, when the hour is skipped.
    ("15,30 2 * * *", BERLIN, "2026-03-28T12:00:00+01:00",
     ["2026-03-29T03:00:00+02:00", "2026-03-30T02:15:00+02:00", "2026-03-30T02:30:00+02:00"]),
    # The same, with a third at the end of the hour.
    ("0,30 2-3 * * *", BERLIN, "2026-03-28T12:00:00+01:00",
     ["2026-03-29T03:00:00+02:00", "2026-03-29T03:30:00+02:00", "2026-03-30T02:00:00+02:00"]),
    # The clock shows none of an hour that it skips.
    ("*/30 2 * * *", BERLIN, "2026-03-28T12:00:00+01:00",
     ["2026-03-30T02:00:00+02:00", "2026-03-30T02:30:00+02:00"]),
    # An appointment in an hour that is shown twice is in the first.
    ("30 2 * * *", BERLIN, "2026-10-24T12:00:00+02:00",
     ["2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"]),
    ("30 2 * * *", BERLIN, "2026-10-25T02:15:00+01:00", ["2026-10-26T02:30:00+01:00"]),
    # The clock shows both.
    ("*/30 1 * * *", NEW_YORK, "2026-11-01T00:30:00-04:00",
     ["2026-11-01T01:00:00-04:00", "2026-11-01T01:30:00-04:00", "2026-11-01T01:00:00-05:00",
      "2026-11-01T01:30:00-05:00", "2026-11-02T01:00:00-05:00"]),
    ("15 * * * *", NEW_YORK, "2026-11-01T01:40:00-04:00",
     ["2026-11-01T01:15:00-05:00", "2026-11-01T02:15:00-05:00"]),
    # Seconds come first and change nothing about that.
    ("59,20 30 2 * * *", BERLIN, "2026-10-24T12:00:00+02:00",
     ["2026-10-25T02:30:20+02:00", "2026-10-25T02:30:59+02:00", "2026-10-26T02:30:20+01:00"]),
    # A day of the month or a day of the week.
    ("0 8 1,13 * FRI", UTC, "2026-02-01T00:00:00+00:00",
     ["2026-02-01T08:00:00+00:00", "2026-02-06T08:00:00+00:00", "2026-02-13T08:00:00+00:00"]),
    # Both, if one of them begins with a star: each third day that is a Sunday.
    ("0 8 */3 * 7", UTC, "2026-02-01T00:00:00+00:00",
     ["2026-02-01T08:00:00+00:00", "2026-02-22T08:00:00+00:00", "2026-03-01T08:00:00+00:00"]),
    # The second Tuesday, and the last Friday.
    ("0 8 * * TUE#2", UTC, "2026-01-01T00:00:00+00:00",
     ["2026-01-13T08:00:00+00:00", "2026-02-10T08:00:00+00:00", "2026-03-10T08:00:00+00:00"]),
    ("0 8 * * 5L", UTC, "2026-01-01T00:00:00+00:00",
     ["2026-01-30T08:00:00+00:00", "2026-02-27T08:00:00+00:00", "2026-03-27T08:00:00+00:00"]),
    # East of UTC, the day begins on the day before.
    ("0 0 1 * *", KOLKATA, "2026-01-31T18:29:59.999+00:00",
     ["2026-02-01T00:00:00+05:30", "2026-03-01T00:00:00+05:30"]),
    ("0 0 1 * *", KOLKATA, "2026-01-31T18:30:00.001+00:00", ["2026-03-01T00:00:00+05:30"]),
    # Half an hour is skipped and the hours after it are not.
    ("0 */3 * * *", LORD_HOWE, "2023-10-01T00:00:00+10:30",
     ["2023-10-01T00:00:00+10:30", "2023-10-01T03:00:00+11:00", "2023-10-01T06:00:00+11:00"]),
    # A day is skipped.
    ("0 9 * * *", APIA, "2011-12-29T00:00:00-10:00",
     ["2011-12-29T09:00:00-10:00", "2011-12-31T00:00:00+14:00", "2011-12-31T09:00:00+14:00"]),
]  # fmt: skip

EVERY = [
    # Months are counted from the start, not from the last occurrence.
    ("P1M", UTC, "2026-01-31T10:00:00+00:00",
     ["2026-01-31T10:00:00+00:00", "2026-02-28T10:00:00+00:00", "2026-03-31T10:00:00+00:00",
      "2026-04-30T10:00:00+00:00"]),
    ("P1Y", UTC, "2024-02-29T10:00:00+00:00",
     ["2024-02-29T10:00:00+00:00", "2025-02-28T10:00:00+00:00", "2026-02-28T10:00:00+00:00",
      "2027-02-28T10:00:00+00:00", "2028-02-29T10:00:00+00:00"]),
    # A day is a date, 24 hours are not.
    ("P1D", BERLIN, "2026-03-28T02:30:00.250+01:00",
     ["2026-03-28T02:30:00.250000+01:00", "2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00.250000+02:00"]),
    ("PT24H", BERLIN, "2026-03-28T02:30:00+01:00",
     ["2026-03-28T02:30:00+01:00", "2026-03-29T03:30:00+02:00", "2026-03-30T03:30:00+02:00"]),
    ("P1W", NEW_YORK, "2026-10-25T01:30:00-04:00",
     ["2026-10-25T01:30:00-04:00", "2026-11-01T01:30:00-04:00", "2026-11-08T01:30:00-05:00"]),
    # Hours are real time, also where the clock shows them twice.
    ("PT30M", NEW_YORK, "2026-11-01T01:30:00-04:00",
     ["2026-11-01T01:30:00-04:00", "2026-11-01T01:00:00-05:00", "2026-11-01T01:30:00-05:00"]),
    # A start in the second of two hours is an occurrence.
    ("P1D", NEW_YORK, "2026-11-01T01:30:00-05:00",
     ["2026-11-01T01:30:00-05:00", "2026-11-02T01:30:00-05:00"]),
    # Dates first, then real time: two dates and 24 hours, through a day of 23 hours.
    ("P1DT12H", BERLIN, "2026-03-27T10:00:00+01:00",
     ["2026-03-27T10:00:00+01:00", "2026-03-28T22:00:00+01:00", "2026-03-30T10:00:00+02:00"]),
    ("P1DT12H", BERLIN, "2026-03-26T22:00:00+01:00",
     ["2026-03-26T22:00:00+01:00", "2026-03-28T10:00:00+01:00", "2026-03-29T23:00:00+02:00"]),
    ("P1DT1.5S", UTC, "2026-01-01T00:00:00+00:00",
     ["2026-01-01T00:00:00+00:00", "2026-01-02T00:00:01.500000+00:00", "2026-01-03T00:00:03+00:00"]),
    # A skipped day and the end of the skip are one instant.
    ("P1D", APIA, "2011-12-29T00:00:00-10:00",
     ["2011-12-29T00:00:00-10:00", "2011-12-31T00:00:00+14:00", "2012-01-01T00:00:00+14:00"]),
    # A start of its own; the offset there says nothing about the zone.
    ("R/2026-03-28T09:00:00+01:00/P1D", BERLIN, "2026-03-29T08:00:00+02:00",
     ["2026-03-29T09:00:00+02:00", "2026-03-30T09:00:00+02:00"]),
    ("R/2026-03-28T09:00:00+01:00/P1D", UTC, "2026-03-29T08:00:00+02:00",
     ["2026-03-29T08:00:00+00:00", "2026-03-30T08:00:00+00:00"]),
    ("R/2026-03-28T09:00:00Z/P1D", UTC, "2026-01-01T08:00:00+00:00", ["2026-03-28T09:00:00+00:00"]),
]  # fmt: skip


@pytest.mark.parametrize(("cron", "zone", "start", "expected"), CRON)
def test_a_cron_expression_names_local_times(
    cron: str, zone: str, start: str, expected: list[str]
) -> None:
    found = first({"cron": cron, "timezone": zone}, ms(start), len(expected))
    assert [shown(occurrence.nominal_ms, zone) for occurrence in found] == expected


@pytest.mark.parametrize(("every", "zone", "start", "expected"), EVERY)
def test_an_interval_is_counted_from_its_start(
    every: str, zone: str, start: str, expected: list[str]
) -> None:
    found = first({"every": every, "timezone": zone}, ms(start), len(expected))
    assert [shown(occurrence.nominal_ms, zone) for occurrence in found] == expected


@pytest.mark.parametrize(
    "properties",
    [
        {"cron": "*/20 1,2 * * *", "timezone": BERLIN},
        {"cron": "5,35 1-3 * * *", "timezone": BERLIN},
        {"every": "R/2026-03-01T02:30:00+01:00/P1D", "timezone": BERLIN},
        {"every": "P1DT1H", "timezone": BERLIN, "jitter": "PT1H"},
    ],
)
@pytest.mark.parametrize("start", ["2026-03-28T12:00:00+01:00", "2026-10-24T12:00:00+02:00"])
def test_occurrences_that_follow_one_are_those_of_the_whole_list(
    properties: dict[str, str], start: str
) -> None:
    repetition = parse_repetition(
        {f"ledgerlake.{name}": value for name, value in properties.items()}
    )
    assert repetition is not None
    found = list(islice(occurrences(repetition, "a", ms(start)), 20))
    for before, after in pairwise(found):
        assert next(occurrences(repetition, "a", ms(start), before)) == after


def test_numbers_count_occurrences_from_the_start_of_the_message() -> None:
    found = first({"every": "R/2026-01-01T00:00:00Z/P1D"}, NEW_YEAR_MS + 1, 2)
    assert [(occurrence.number, shown(occurrence.nominal_ms, UTC)) for occurrence in found] == [
        (1, "2026-01-02T00:00:00+00:00"),
        (2, "2026-01-03T00:00:00+00:00"),
    ]


@pytest.mark.parametrize(
    ("properties", "days"),
    [
        ({"cron": "0 0 * * *", "count": "2"}, [1, 2]),
        ({"every": "P1D", "count": "1"}, [1]),
        ({"every": "R3/P1D"}, [1, 2, 3]),
        # Of five from 30 December, two were before the message.
        ({"every": "R5/2025-12-30T00:00:00Z/P1D"}, [1, 2, 3]),
        ({"every": "R/2025-12-30T00:00:00Z/P1D", "count": "4"}, [1, 2, 3, 4]),
        ({"every": "R5/2025-12-20T00:00:00Z/P1D"}, []),
        ({"cron": "0 0 * * *", "until": "2026-01-03T00:00:00Z"}, [1, 2, 3]),
        ({"cron": "0 0 * * *", "until": str(ms("2026-01-03T00:00:00+00:00") - 1)}, [1, 2]),
        ({"every": "P1D", "until": "2026-01-03T01:00:00+02:00", "count": "9"}, [1, 2]),
        ({"every": "P1D", "until": "2025-12-31T00:00:00Z"}, []),
    ],
)
def test_count_and_until_end_a_repetition(properties: dict[str, str], days: list[int]) -> None:
    found = first(properties, NEW_YEAR_MS)
    assert [(occurrence.number, occurrence.nominal_ms) for occurrence in found] == [
        (number, NEW_YEAR_MS + (day - 1) * 86_400_000) for number, day in enumerate(days, 1)
    ]


@pytest.mark.parametrize(
    ("schedule_id", "jitter", "expected"),
    # printf '1767225600000 visit-17' | b2sum -l 64, modulo the jitter and 1 ms
    [
        ("visit-17", "PT1M", [51_519, 54_124, 17_107]),
        ("visit-17", "P1D", [18_221_956, 64_804_577, 65_675_413]),
        ("besuch-ü", "PT1M", [11_954, 47_919, 26_302]),
    ],
)
def test_jitter_is_the_same_in_every_process_and_release(
    schedule_id: str, jitter: str, expected: list[int]
) -> None:
    repetition = parse_repetition({"ledgerlake.every": "P1D", "ledgerlake.jitter": jitter})
    assert repetition is not None
    found = islice(occurrences(repetition, schedule_id, NEW_YEAR_MS), 3)
    assert [occurrence.due_ms - occurrence.nominal_ms for occurrence in found] == expected


def test_jitter_takes_every_delay_up_to_its_own() -> None:
    found = first({"every": "PT1S", "jitter": "PT0.003S"}, NEW_YEAR_MS, 200)
    assert {occurrence.due_ms - occurrence.nominal_ms for occurrence in found} == {0, 1, 2, 3}


@pytest.mark.parametrize("text", ["all", "last", "none"])
def test_catch_up_is_all_last_or_none(text: str) -> None:
    repetition = parse_repetition({"ledgerlake.every": "P1D", "ledgerlake.catchup": text})
    assert repetition is not None
    assert repetition.catch_up == CatchUp(text)


def test_a_message_without_the_properties_is_not_repeated() -> None:
    assert parse_repetition({"ledgerlake.schedule": "a", "cron": "* * * * *"}) is None


@pytest.mark.parametrize(
    ("properties", "count"),
    [
        ({"every": "P999999999Y"}, 1),
        ({"every": "P999999999M999999999DT999999999H"}, 1),
        ({"every": "PT999999999H"}, 1),
        ({"every": "P2000Y"}, 4),
        ({"every": "R/9000-12-30T00:00:00Z/P1D", "timezone": "Pacific/Kiritimati"}, 2),
        ({"every": "R/9999-12-30T00:00:00Z/P1D"}, 0),
        # Each is in an hour that is skipped.
        ({"cron": "* 2 * 3 7L", "timezone": BERLIN}, 0),
    ],
)
def test_a_repetition_ends_if_nothing_comes_before_the_year_9001(
    properties: dict[str, str], count: int
) -> None:
    assert len(first(properties, NEW_YEAR_MS)) == count


@pytest.mark.parametrize("start_ms", [ms("9001-01-01T00:00:00+00:00"), MAX_TIME_MS, 2**62])
@pytest.mark.parametrize("properties", [{"cron": "* * * * *"}, {"every": "P1D"}, {"every": "PT1S"}])
def test_nothing_begins_after_the_year_9000(properties: dict[str, str], start_ms: int) -> None:
    assert first({**properties, "timezone": APIA}, start_ms) == []


@pytest.mark.parametrize(
    ("properties", "why"),
    [
        ({"cron": "* * * * *", "every": "P1D"}, "cron and ledgerlake.every"),
        ({"count": "5"}, "ledgerlake.count is on a message with neither"),
        ({"timezone": UTC}, "ledgerlake.timezone is on a message with neither"),
        ({"every": "P1D", "expires": "5"}, "ledgerlake.until ends a repetition"),
        ({"every": "R5/P1D", "count": "5"}, "number after R"),
        ({"cron": b"\xff"}, "ledgerlake.cron is not UTF-8"),
        ({"every": "P1D", "count": 5}, "ledgerlake.count is not UTF-8"),
        ({"cron": ""}, "wrong number of fields"),
        ({"cron": "@daily"}, "is a nickname, which is not known; write fields"),
        ({"cron": "* * * *"}, "wrong number of fields"),
        ({"cron": "0 0 * * * * *"}, "wrong number of fields"),
        ({"cron": "61 * * * *"}, "bad minute"),
        ({"cron": "*/0 * * * *"}, "bad minute"),
        ({"cron": "0 0 * * FRI-MON"}, "bad day-of-week"),
        ({"cron": "0 0 31 2 *"}, "bad day-of-month"),
        ({"cron": "0 0 */31 * MON#2"}, "days that do not exist"),
        ({"cron": "* * * * *\0"}, "characters"),
        ({"cron": "*\t* * * *"}, "characters"),
        ({"cron": "٣ * * * *"}, "characters"),
        ({"cron": "0 0 * * \u017fun"}, "characters"),
        ({"cron": "0 0 * * \ud800"}, "characters"),
        ({"cron": "1," * 100 + "1 * * * *"}, "209 characters"),
        ({"every": ""}, "neither an ISO-8601 duration"),
        ({"every": "P"}, "neither an ISO-8601 duration"),
        ({"every": "PT"}, "neither an ISO-8601 duration"),
        ({"every": "P1DT"}, "neither an ISO-8601 duration"),
        ({"every": "1 day"}, "neither an ISO-8601 duration"),
        ({"every": "-P1D"}, "neither an ISO-8601 duration"),
        ({"every": "P0.5D"}, "neither an ISO-8601 duration"),
        ({"every": "P1D\n"}, "neither an ISO-8601 duration"),
        ({"every": "P٣D"}, "neither an ISO-8601 duration"),
        ({"every": "P1000000000D"}, "neither an ISO-8601 duration"),
        ({"every": "2026-01-01T00:00:00Z/P1D"}, "neither an ISO-8601 duration"),
        ({"every": "R/P1D/2026-01-01T00:00:00Z"}, "neither an ISO-8601 duration"),
        ({"every": "R/P1D/P1D/P1D"}, "neither an ISO-8601 duration"),
        ({"every": "R/2026-01-01T00:00:00/P1D"}, "the start in ledgerlake.every"),
        ({"every": "R0/P1D"}, "the number after R in ledgerlake.every"),
        ({"every": "R-1/P1D"}, "the number after R in ledgerlake.every"),
        ({"every": "P0D"}, "shorter than a second"),
        ({"every": "PT0.999S"}, "shorter than a second"),
        ({"every": "P1D", "timezone": ""}, "no time zone"),
        ({"every": "P1D", "timezone": "europe/berlin"}, "no time zone"),
        ({"every": "P1D", "timezone": "Europe/../Europe/Berlin"}, "no time zone"),
        ({"every": "P1D", "timezone": "/etc/localtime"}, "no time zone"),
        ({"every": "P1D", "timezone": "Europe/Berlin\0"}, "no time zone"),
        ({"every": "P1D", "timezone": "+02:00"}, "no time zone"),
        ({"every": "P1D", "until": "tomorrow"}, "ledgerlake.until is neither"),
        ({"every": "P1D", "until": "9" * 5000}, "ledgerlake.until is neither"),
        ({"every": "P1D", "count": "0"}, "from 1 to 1,000,000,000"),
        ({"every": "P1D", "count": "1000000001"}, "from 1 to 1,000,000,000"),
        ({"every": "P1D", "count": "²"}, "from 1 to 1,000,000,000"),
        ({"every": "P1D", "count": "9" * 5000}, "from 1 to 1,000,000,000"),
        ({"every": "P1D", "jitter": "PT24H0.001S"}, "ledgerlake.jitter"),
        ({"every": "P1D", "jitter": "P1DT0.001S"}, "ledgerlake.jitter"),
        ({"every": "P1D", "jitter": "P1M"}, "ledgerlake.jitter"),
        ({"every": "P1D", "jitter": "30"}, "ledgerlake.jitter"),
        ({"every": "PT1H", "jitter": "PT1H0.001S"}, "ledgerlake.jitter is longer .* 3600 s"),
        ({"cron": "*/5 * * * *", "jitter": "PT5M1S"}, "ledgerlake.jitter is longer .* 300 s"),
        ({"every": "P1D", "catchup": "All"}, "none of all, last and none"),
        ({"every": "P1D", "catchup": ""}, "none of all, last and none"),
    ],
)
def test_any_other_value_is_refused_by_its_name(properties: dict[str, object], why: str) -> None:
    with pytest.raises(CorruptEntryError, match=why) as refused:
        parse_repetition({f"ledgerlake.{name}": value for name, value in properties.items()})
    assert refused.value.reason == "bad_schedule"
    assert "ledgerlake." in str(refused.value)
    assert str(refused.value).isprintable()


def test_every_zone_that_has_a_name_can_be_loaded() -> None:
    assert TIMEZONE_DATA_VERSION[:4].isdecimal()
    assert {BERLIN, UTC, "America/Argentina/Ushuaia", "EST5EDT"} < zone_names()
    for name in zone_names():
        assert load_zone(name).key == name


_WORDS = ["*", "*/7", "0", "59", "L", "LW", "5L", "MON#2", "1-5", "R", "R5", "P1D", "PT1S", "P1Y", "/", ",", "-", " ", "9" * 30, "2026-01-01T00:00:00Z", BERLIN, APIA, "٣", "²", "\0", "\ud800"]  # fmt: skip
_texts = st.one_of(
    st.text(max_size=210),
    st.lists(st.sampled_from(_WORDS), max_size=8).map("".join),
    st.lists(st.sampled_from(_WORDS), min_size=5, max_size=6).map(" ".join),
    st.lists(st.sampled_from(_WORDS), min_size=2, max_size=3).map("/".join),
)
_values = st.one_of(
    _texts,
    _texts,
    st.none(),
    st.binary(max_size=5),
    st.integers(),
    st.floats(),
    st.just("x" * 100_000),
)
_good = {"ledgerlake.cron": "0 9 * * *", "ledgerlake.every": "P1D"}


@given(
    st.sampled_from([{}, *({name: text} for name, text in _good.items())]),
    st.dictionaries(st.sampled_from(REPETITION_PROPERTIES), _values, max_size=3),
    st.integers(0, MAX_TIME_MS),
)
def test_no_value_does_anything_but_be_read_or_refused(
    rule: dict[str, str], values: dict[str, Any], start_ms: int
) -> None:
    with contextlib.suppress(CorruptEntryError):
        repetition = parse_repetition({**rule, **values})
        if repetition is None:
            return
        before = start_ms - 1
        for number, occurrence in enumerate(
            islice(occurrences(repetition, "\ud800", start_ms), 3), 1
        ):
            assert occurrence.number == number
            assert (
                before
                < occurrence.nominal_ms
                <= min(repetition.until_ms or MAX_TIME_MS, MAX_TIME_MS)
            )
            assert 0 <= occurrence.due_ms - occurrence.nominal_ms <= repetition.jitter_ms
            before = occurrence.nominal_ms


def test_a_rule_is_kept_and_a_text_as_long_as_a_message_is_not() -> None:
    rule = {"ledgerlake.every": "PT1M", "ledgerlake.until": "2030-01-01T00:00:00.5Z"}
    assert parse_repetition(rule) is parse_repetition(dict(rule))
    kept = repetition_rules._parsed.cache_info().currsize
    # Not every release of Python takes so many digits.
    with contextlib.suppress(CorruptEntryError):
        parse_repetition(rule | {"ledgerlake.until": f"2030-01-01T00:00:00.{'5' * 1000}Z"})
    assert repetition_rules._parsed.cache_info().currsize == kept


@pytest.mark.parametrize(
    ("properties", "a_day"),
    [
        ({"every": "PT1S"}, 86_400),
        ({"every": "PT7H"}, 4),
        ({"every": "P1M"}, 1),
        ({"every": "R/2030-05-02T09:00:00+02:00/P1DT12H"}, 1),
        ({"cron": "* * * * * *"}, 86_400),
        ({"cron": "0,50 * * * * *"}, 8_640),
        ({"cron": "30 */5 * * * *"}, 288),
        ({"cron": "0 0 9-17 * * *"}, 24),
        ({"cron": "0 9,18 * * *"}, 3),
        ({"cron": "0,55 9 * * *"}, 27),
        ({"cron": "0,59 0 9 * * *"}, 1_465),
        ({"cron": "0 9 L * *"}, 1),
        ({"cron": "0 0 29 2 *"}, 1),
    ],
)
def test_a_message_counts_as_if_it_always_came_as_often_as_it_may(
    properties: dict[str, str], a_day: int
) -> None:
    rule = parse_repetition({f"ledgerlake.{name}": value for name, value in properties.items()})
    assert rule is not None
    assert rate_of(rule, 1_000) == RepetitionRate(a_day, 1_000 * a_day)


def lists(most: int) -> st.SearchStrategy[str]:
    """Fields of a cron expression, up to a number."""
    numbers = st.lists(st.integers(0, most), min_size=1, max_size=5, unique=True)
    steps = st.integers(1, most).map(lambda step: f"*/{step}")
    return st.one_of(st.just("*"), steps, numbers.map(lambda few: ",".join(map(str, sorted(few)))))


@given(lists(59), lists(59), lists(23), st.sampled_from(["*", "*/3", "MON-FRI"]))
@example("0", "0,55", "9", "*")
@example("0,59", "0", "9", "*")
@example("0", "0,50", "0,12", "*")
@example("30", "59", "0,23", "*")
@example("0", "0", "0", "*")
def test_occurrences_are_as_near_as_a_cron_expression_counts_and_never_nearer(
    seconds: str, minutes: str, hours: str, weekdays: str
) -> None:
    rule = parse_repetition({"ledgerlake.cron": f"{seconds} {minutes} {hours} * * {weekdays}"})
    assert rule is not None
    # Two days say it all, and three weeks if they are few.
    times_ms = [
        each.nominal_ms
        for each in islice(occurrences(rule, "a", NEW_YEAR_MS), 5_000)
        if each.nominal_ms < NEW_YEAR_MS + 21 * 86_400_000
    ]
    really_ms = min([later - earlier for earlier, later in pairwise(times_ms)] + [86_400_000])
    counted_ms = repetition_rules._shortest_ms(rule)
    assert counted_ms <= really_ms
    assert counted_ms == really_ms or weekdays != "*"
