"""Local times of a time zone, and the instants at which its clock shows them.

A clock that is set forward skips local times, and one that is set back shows some twice. Zones come
from the package ``tzdata``, never from the machine: all machines of a cluster have to agree.
"""

from __future__ import annotations

from bisect import bisect_left
from datetime import datetime, timedelta, timezone
from functools import cache
from importlib.resources import files
from zoneinfo import ZoneInfo

import tzdata

DATA_VERSION: str = tzdata.IANA_VERSION

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MILLISECOND = timedelta(milliseconds=1)


@cache
def zone_names() -> frozenset[str]:
    return frozenset(files("tzdata").joinpath("zones").read_text("ascii").split())


@cache
def load_zone(name: str) -> ZoneInfo:
    """Return the zone of one of ``zone_names``."""
    with files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as data:
        return ZoneInfo.from_file(data, name)


def local_time(zone: ZoneInfo, time_ms: int) -> datetime:
    """Return what the clock shows at an instant, without the zone."""
    return (_EPOCH + time_ms * _MILLISECOND).astimezone(zone).replace(tzinfo=None, fold=0)


def instants_ms(zone: ZoneInfo, local: datetime) -> tuple[int, int]:
    """Return when the clock shows a local time, twice the same for most.

    The first is by the clock before a change and the second by the clock after it. So the second is
    later if the time is shown twice, and earlier if it is skipped.
    """
    before, after = local.replace(tzinfo=zone, fold=0), local.replace(tzinfo=zone, fold=1)
    return (before - _EPOCH) // _MILLISECOND, (after - _EPOCH) // _MILLISECOND


def change_ms(zone: ZoneInfo, before_ms: int, after_ms: int) -> int:
    """Return when the clock is changed between two instants."""
    seconds = range(before_ms // 1000, after_ms // 1000 + 1)
    offset = _offset(zone, seconds[0])
    return (
        1000
        * seconds[bisect_left(seconds, True, key=lambda second: _offset(zone, second) != offset)]
    )


def appointment_ms(zone: ZoneInfo, local: datetime) -> int:
    """Return the first instant of a local time; if it is skipped, when the clock skips it."""
    first_ms, second_ms = instants_ms(zone, local)
    return first_ms if first_ms <= second_ms else change_ms(zone, second_ms, first_ms)


def set_back_ms(zone: ZoneInfo, time_ms: int) -> int | None:
    """Return when the clock is set back to show the local time of an instant again; None if it is
    not.
    """
    first_ms, second_ms = instants_ms(zone, local_time(zone, time_ms))
    return change_ms(zone, first_ms, second_ms) if time_ms == first_ms < second_ms else None


def _offset(zone: ZoneInfo, second: int) -> timedelta | None:
    return datetime.fromtimestamp(second, zone).utcoffset()
