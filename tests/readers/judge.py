"""Compares all readers of a table with plain Python."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from ledgerlake.values.record_columns import PULSAR_COLUMN
from tests.readers.model import NUMBER, columns_of, rows_of
from tests.readers.readers import ARROW, OF_LATEST, READERS, Condition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ledgerlake.stored.places import Place
    from tests.readers.model import Row
    from tests.readers.readers import Reader
    from tests.readers.recipes import Recipe

_OF_MESSAGES = {"key": "string", "event_time": "timestamp-millis", NUMBER: "long"}


def differences(recipe: Recipe, place: Place, *, conditions: int, seed: int = 0) -> list[str]:
    """Return what a reader of the table at a place sees otherwise than plain Python.

    Args:
        conditions: how many filters are tried.
    """
    kinds = OF_LATEST if recipe.options.get("mode") == "latest" else READERS
    outer = PULSAR_COLUMN if recipe.shape == "record" else ""
    return compare(recipe, [kind(place, outer) for kind in kinds], conditions, seed)


def compare(recipe: Recipe, readers: Sequence[Reader], conditions: int, seed: int = 0) -> list[str]:
    """Return what readers see otherwise than plain Python."""
    rows = rows_of(recipe)
    found: list[str] = []
    names = [NUMBER, "key", "event_time", "properties"]
    names += list(columns_of(recipe)) if recipe.shape == "record" else []
    expected = [{name: row[name] for name in names} for row in rows]
    for reader in readers:
        found += _other_rows(reader, reader.rows(names), expected)
    for condition in _conditions(recipe, rows, conditions, random.Random(seed)):
        numbers = [row[NUMBER] for row in rows if condition.holds(row)]
        for reader in readers:
            seen_numbers = reader.numbers(condition)
            if seen_numbers != numbers:
                found.append(
                    f"{reader.name} finds {seen_numbers}, not {numbers}, by {condition.column} "
                    f"{condition.operator} {_short(condition.values)}"
                )
    return found


def _other_rows(reader: Reader, seen: Sequence[Row], expected: Sequence[Row]) -> list[str]:
    numbers = [row[NUMBER] for row in seen]
    if numbers != [row[NUMBER] for row in expected]:
        return [f"{reader.name} reads the rows {numbers}, not {[row[NUMBER] for row in expected]}"]
    return [
        f"{reader.name} reads {name} {_short(row[name])}, not {_short(other[name])}"
        for row, other in zip(seen, expected, strict=True)
        for name in row
        if row[name] != other[name]
    ]


def _short(value: Any) -> str:
    """Return a value for a sentence; a long text by its first characters and its length."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_short, value))})"
    is_long = isinstance(value, str) and len(value) > 20
    return f"{value[:5]!r}...{value[-2:]!r} of {len(value)}" if is_long else repr(value)


def _conditions(
    recipe: Recipe, rows: Sequence[Row], count: int, rng: random.Random
) -> list[Condition]:
    kinds = _OF_MESSAGES | (columns_of(recipe) if recipe.shape == "record" else {})
    columns = [name for name, kind in kinds.items() if kind in ARROW]
    made = []
    for number in range(count):
        column = columns[number % len(columns)]
        values: list[Any] = [row[column] for row in rows if row[column] is not None]
        operator = rng.choice(["is null", "=", "<", ">=", "in"]) if values else "is null"
        if operator in ("<", ">=") and kinds[column] == "boolean":
            operator = "="
        chosen = (
            () if operator == "is null" else tuple(rng.choices(values, k=1 + (operator == "in")))
        )
        made.append(Condition(column, kinds[column], operator, chosen))
    return made
