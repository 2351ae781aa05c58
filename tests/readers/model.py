"""What a table has to have, by plain Python: nothing of Arrow, Delta or the product is used."""

from __future__ import annotations

import contextlib
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tests.readers.recipes import EPOCH

if TYPE_CHECKING:
    from tests.readers.recipes import Message, Recipe

# The number of a message is its sequence id.
NUMBER = "sequence_id"

# A later time of Pulsar's own is a property.
_LAST_EVENT_MS = 253_402_214_399_999

Row = dict[str, Any]


class _RejectedError(Exception):
    """Python does not have a time."""


def rows_of(recipe: Recipe) -> list[Row]:
    """The rows of the table in the order of their numbers, by column; Pulsar's columns too."""
    messages = [message for _, batch in recipe.batches for message in batch]
    rows: list[Row] = []
    for number, message in enumerate(messages):
        with contextlib.suppress(_RejectedError):
            rows.append(_row(recipe, number, message))
    if recipe.options.get("mode") == "latest":
        latest = {row["key"]: row for row in rows}
        return [row for row in rows if row is latest[row["key"]] and not row["is_null"]]
    return rows


def _row(recipe: Recipe, number: int, message: Message) -> Row:
    event_time = None
    if message.event_ms <= _LAST_EVENT_MS:
        event_time = EPOCH + timedelta(milliseconds=message.event_ms)
    row: Row = {
        NUMBER: number,
        "key": message.key,
        "event_time": event_time if message.event_ms else None,
        "properties": properties_of(message, event_time),
        "is_null": message.value is None,
    }
    if recipe.shape == "record":
        fields = recipe.versions[message.version]
        for name in columns_of(recipe):
            value = None if message.value is None else message.value.get(name)
            row[name] = None if value is None else _value(value, fields[name])
    for name in recipe.options.get("partition_by", ()):
        # Delta's log has no empty text.
        row[name] = None if row[name] == "" else row[name]
    return row


def properties_of(message: Message, event_time: datetime | None) -> dict[str, str]:
    """As clients read them: the last of two values counts."""
    more = {} if event_time else {"ledgerlake.event_time": str(message.event_ms)}
    return dict(message.properties) | more


def columns_of(recipe: Recipe) -> dict[str, str]:
    """The columns of the record that the table got, and their kinds."""
    known = max(known for known, _ in recipe.batches)
    return {name: kind for fields in recipe.versions[:known] for name, kind in fields.items()}


def _value(value: Any, kind: str) -> Any:
    try:
        if kind == "date":
            return date.fromordinal(value + 719_163)
        if kind == "days":
            return [_value(each, "date") for each in value]
        if kind == "timestamp-millis":
            return EPOCH + timedelta(milliseconds=value)
        if kind == "timestamp-micros":
            return EPOCH + timedelta(microseconds=value)
        if kind == "local-timestamp-micros":
            return EPOCH.replace(tzinfo=None) + timedelta(microseconds=value)
        if kind == "nested":
            at = value["at"]
            return {"at": None if at is None else _value(at, "timestamp-micros")}
    except (OverflowError, ValueError):
        raise _RejectedError from None
    return value
