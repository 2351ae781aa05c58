"""Random tables as plain values: what the schemas, messages and options of a table are.

The values are the ends of their types, texts of any length, times around those that Python has, and
null and missing values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from typing import Any

from hypothesis import strategies as st

KINDS = (
    "int",
    "long",
    "string",
    "double",
    "boolean",
    "date",
    "timestamp-micros",
    "timestamp-millis",
    "local-timestamp-micros",
    "nested",
    "days",
)
FIELDS = ("a", "b", "c", "d", "e")

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
FIRST_US = (datetime.min.replace(tzinfo=timezone.utc) - EPOCH) // timedelta(microseconds=1)
LAST_US = (datetime.max.replace(tzinfo=timezone.utc) - EPOCH) // timedelta(microseconds=1)
FIRST_DAY, LAST_DAY = date.min.toordinal() - 719_163, date.max.toordinal() - 719_163
_LAST = "\U0010ffff"

_TEXTS = ["", "a", "b", "é", "it's\n", "null", *("z" * n for n in (255, 256, 257, 300, 1100, 5000))]
_TEXTS += [_LAST * 256, _LAST * 257 + "a", "z" * 300 + "a"]
_NUMBERS = [0, 1, -1, 2**31 - 1, -(2**31)]
_TIMES_US = [
    0,
    -1,
    1_700_000_000_123_456,
    FIRST_US,
    LAST_US,
    FIRST_US - 1,
    LAST_US + 1,
    2**62,
    -(2**62),
]
_TIMES_MS = [0, -1, 1_700_000_000_123, FIRST_US // 1000, LAST_US // 1000, LAST_US // 1000 + 1]
_TIMES_MS += [1_700_000_000_123_000, -(10**15)]
_DAYS = [0, -1, 20_000, FIRST_DAY, LAST_DAY, FIRST_DAY - 1, LAST_DAY + 1, 2**31 - 1]

_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": st.sampled_from(_NUMBERS),
    "long": st.sampled_from([*_NUMBERS, 2**53 + 1, 2**63 - 1, -(2**63) + 1]),
    "string": st.sampled_from(_TEXTS),
    "double": st.sampled_from([0.0, 1.5, -2.25, 1e300]),
    "boolean": st.booleans(),
    "date": st.sampled_from(_DAYS),
    "timestamp-micros": st.sampled_from(_TIMES_US),
    "timestamp-millis": st.sampled_from(_TIMES_MS),
    "local-timestamp-micros": st.sampled_from(_TIMES_US),
    "nested": st.fixed_dictionaries({"at": st.none() | st.sampled_from(_TIMES_US)}),
    "days": st.lists(st.sampled_from(_DAYS), max_size=2),
}

# What rows of either shape have.
_EVENT_TIMES_MS = [0, 1, 1_700_000_000_123, 253_402_214_399_999, 253_402_214_400_000, 2**62]
_KEYS = ["", "k", "l", "x" * 300, "x" * 5000, "it's", _LAST * 300]
_PROPERTIES = st.lists(
    st.tuples(st.sampled_from("pq"), st.sampled_from(["", "1", "2"])), max_size=3
)

Fields = dict[str, str]


@dataclass(frozen=True)
class Message:
    """A message: the number of its schema's version, and the value as the schema has it; None is a
    null value.
    """

    version: int
    value: dict[str, Any] | None
    key: str | None
    properties: list[tuple[str, str]]
    event_ms: int


@dataclass(frozen=True)
class Recipe:
    """A table: the versions of its topic's schema, and its micro-batches, each with the versions
    that the registry has by then.
    """

    shape: str
    is_json: bool
    options: dict[str, Any]
    versions: list[Fields]
    batches: list[tuple[int, list[Message]]] = field(default_factory=list)
    is_merged: bool = False
    has_checkpoint: bool = False


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """A table that grows."""
    shape = draw(st.sampled_from(["record", "messages", "record"]))
    kinds = {name: draw(st.sampled_from(KINDS)) for name in FIELDS}
    versions: list[Fields] = []
    names: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        names = sorted({*names, *draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3))})
        versions.append({name: kinds[name] for name in names})
    options = draw(_options(shape, versions[0]))
    is_merged = draw(st.booleans()) and "mode" not in options
    batches = []
    known = 1
    for _ in range(9 if is_merged else draw(st.integers(1, 3))):
        known = draw(st.integers(known, len(versions)))
        batches.append(
            (known, draw(st.lists(_messages(versions[:known], options), min_size=1, max_size=3)))
        )
    return Recipe(
        shape, draw(st.booleans()), options, versions, batches, is_merged, draw(st.booleans())
    )


@st.composite
def _options(draw: st.DrawFn, shape: str, first: Fields) -> dict[str, Any]:
    kind = draw(st.sampled_from(["plain", "plain", "partitions", "clusters", "latest"]))
    if kind == "latest":
        return {"mode": "latest"}
    columns = (
        ["key"] if shape == "messages" else [name for name in first if first[name] in _PARTITIONS]
    )
    clusters = (
        ["key"] if shape == "messages" else [name for name in first if first[name] in _CLUSTERS]
    )
    if kind == "partitions" and columns:
        return {"partition_by": [draw(st.sampled_from(columns))]}
    if kind == "clusters" and clusters:
        return {"cluster_by": [draw(st.sampled_from(clusters))]}
    return {}


_PARTITIONS = {"int", "long", "string", "boolean", "date"}
_CLUSTERS = {"int", "long", "string", "date", "timestamp-micros"}


def _may_partition(text: str) -> bool:
    """Return whether a table can be partitioned by a text; messages with a longer one are
    rejects.
    """
    return len(text.encode()) <= 1000


def _values(kind: str, is_partition: bool) -> st.SearchStrategy[Any]:
    if kind == "string" and is_partition:
        return st.sampled_from([text for text in _TEXTS if _may_partition(text)])
    return _VALUES[kind]


@st.composite
def _messages(draw: st.DrawFn, versions: list[Fields], options: dict[str, Any]) -> Message:
    number = draw(st.integers(0, len(versions) - 1))
    partitions = options.get("partition_by", [])
    value = {
        name: draw(st.none() | _values(kind, name in partitions))
        for name, kind in versions[number].items()
    }
    keys = st.sampled_from([key for key in _KEYS if "key" not in partitions or _may_partition(key)])
    # A table with the latest messages rejects those without a key.
    key = draw(keys) if "mode" in options else draw(st.none() | keys)
    is_null = draw(st.integers(0, 9)) == 0
    return Message(
        number,
        None if is_null else value,
        key,
        draw(_PROPERTIES),
        draw(st.sampled_from(_EVENT_TIMES_MS)),
    )
