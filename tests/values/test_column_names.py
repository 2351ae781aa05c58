"""Names that are one column to readers."""

from __future__ import annotations

import pytest

from ledgerlake.errors import SetupError
from ledgerlake.values.column_names import folded
from ledgerlake.values.record_columns import record_of, united
from tests.values.test_record_columns import avro

# What Java makes of characters by ``Character.toLowerCase(Character.toUpperCase(c))``, if Python's
# lower case is another one. Java 17 and 25 agree.
SPECIAL = dict(
    zip(
        "\u00b5\u0130\u0131\u017f\u0345\u03c2\u03d0\u03d1\u03d5\u03d6\u03f0\u03f1\u03f5\u1c80\u1c81\u1c82\u1c83\u1c84\u1c85\u1c86\u1c87\u1c88\u1e9b\u1fbe",
        "\u03bcii\u0073\u03b9\u03c3\u03b2\u03b8\u03c6\u03c0\u03ba\u03c1\u03b5\u0432\u0434\u043e\u0441\u0442\u0442\u044a\u0463\ua64b\u1e61\u03b9",
        strict=True,
    )
)


def test_each_character_is_folded_as_java_does() -> None:
    for number in range(0x10000):
        character = chr(number)
        assert folded(character) == SPECIAL.get(character, character.lower())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("id", "\u0131d"),
        ("id", "\u0130d"),
        ("i\u0307d", "\u0130d"),
        ("k", "\u212a"),
        ("is", "I\u017f"),
        ("\u03bcm", "\u00b5m"),
        ("\u03c3", "\u03c2"),
        ("\u00e5", "\u212b"),
        ("\U00010428", "\U00010400"),
    ],
)
def test_names_that_readers_take_as_one_are_one_column(one: str, other: str) -> None:
    for nested in (False, True):
        fields = [(one, "long"), (other, "long")]
        inner = {
            "type": "record",
            "name": "Inner",
            "fields": [{"name": name, "type": kind} for name, kind in fields],
        }
        with pytest.raises(SetupError, match="differ in case at most"):
            record_of(avro(("page", inner)) if nested else avro(*fields))
    first, second = (record_of(avro((name, "long"))) for name in (one, other))
    assert united(first, second).names == [one]


def test_names_that_are_written_differently_are_two_columns() -> None:
    record = record_of(
        avro(("stra\u00dfe", "long"), ("strasse", "long"), ("\u00e4", "long"), ("a", "long"))
    )
    assert record.num_fields == 4
