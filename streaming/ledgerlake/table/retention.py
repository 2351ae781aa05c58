"""How long a table keeps what it no longer uses, as its properties say it.

Delta reads an interval as Spark does: ``interval 30 days``, ``30 days``, ``INTERVAL 1 DAY 12
HOURS``. delta-rs (1.6) knows only ``interval N unit`` in small letters, and takes its default for
anything else. So it is not asked how long files are kept, and it may clean a log only if it knows
how long.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from typing import TYPE_CHECKING

from ledgerlake.errors import TableError
from ledgerlake.table.properties import is_on

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from ledgerlake.stored.places import Place

_log = logging.getLogger(__name__)

# Delta's own default, for a table that does not say it.
DEFAULT_RETENTION_HOURS = 168

# No file is older, and libraries cannot count back any number of hours.
MOST_RETENTION_HOURS = 100 * 365 * 24

_FILES_PROPERTY = "delta.deletedFileRetentionDuration"
_LOG_PROPERTY = "delta.logRetentionDuration"
_CLEANS_PROPERTY = "delta.enableExpiredLogCleanup"

_HOURS = {
    "week": 7 * 24.0,
    "day": 24.0,
    "hour": 1.0,
    "minute": 1 / 60,
    "second": 1 / 3600,
    "millisecond": 1 / 3.6e6,
    "microsecond": 1 / 3.6e9,
}
_PART = re.compile(
    rf"\+?\s*(\d{{1,18}}(?:\.\d{{1,9}}(?=\s+second))?)\s+({'|'.join(_HOURS)})s?(?:\s+|$)", re.ASCII
)
_INTERVAL = re.compile(rf"(?:interval\s+)?(?:{_PART.pattern})+", re.ASCII)
_KNOWN_TO_DELTA_RS = re.compile(r"interval \d{1,9} (second|minute|hour|day|week)s?")


def interval_hours(text: str) -> float | None:
    """Return the hours of an interval as Delta reads it; None if it is none that a retention may
    have, such as one of months or a negative one.
    """
    text = text.strip().lower()
    if _INTERVAL.fullmatch(text) is None:
        return None
    return sum(float(count) * _HOURS[unit] for count, unit in _PART.findall(text))


def retention_hours(path: Place, table: DeltaTable) -> float:
    """Return how long a table keeps files that it no longer uses.

    Raises:
        TableError: it says it in a way that is not known.
    """
    text = table.metadata().configuration.get(_FILES_PROPERTY)
    hours = DEFAULT_RETENTION_HOURS if text is None else interval_hours(text)
    if hours is None:
        raise TableError(
            f"no unused file of the table at {path} is removed, because its property "
            f"{_FILES_PROPERTY} = '{text}' is not known; "
            "write for example 'interval 30 days', or run ledgerlake vacuum with --retention-hours"
        )
    return hours


def may_clean_log(path: Place, table: DeltaTable) -> bool:
    """Return whether delta-rs may remove old entries of a table's log: the table wants it, and says
    their age in words that delta-rs knows. A warning says once if they are others.
    """
    text = table.metadata().configuration.get(_LOG_PROPERTY)
    if not is_on(table, _CLEANS_PROPERTY, default=True):
        return False
    if text is None or _KNOWN_TO_DELTA_RS.fullmatch(text):
        return True
    _warn_of_words(str(path), text)
    return False


@cache
def _warn_of_words(path: str, text: str) -> None:
    _log.warning(
        "the log of the table at %s is not cleaned, because its property %s = '%s' is not known; "
        "write for example 'interval 30 days'",
        path,
        _LOG_PROPERTY,
        text,
    )
