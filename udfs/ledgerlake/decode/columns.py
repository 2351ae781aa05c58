"""A column of decoded values: what decoding gives, what it takes, and how Python values become one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from ledgerlake.errors import SetupError

# Of one schema, nested ones included. A few lines that name each other twice over can stand for
# more than any machine holds.
COLUMNS_MOST = 10_000


@dataclass
class DecodedValues:
    """A column, null if a value is null or bad; ``bad`` says by row what is wrong."""

    values: pa.Array
    bad: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoded:
    """The bytes from which values are decoded: the payloads, and the messages' own keys; null if
    there is none.
    """

    payloads: pa.BinaryArray
    keys: pa.BinaryArray | None = None


# Values of one writer's schema as the reader's.
Decoder = Callable[[Encoded], DecodedValues]


def too_wide() -> SetupError:
    """The error of a schema that is too wide."""
    return SetupError(f"a schema has more than {COLUMNS_MOST} columns; read it with schema = bytes")


def build(rows: list[Any], physical: pa.DataType, target: pa.DataType, bad: dict[int, str]) -> pa.Array:
    """A column of Python values; those that do not fit are noted as bad and null."""
    try:
        return pa.array(rows, physical).cast(target)
    except (TypeError, ValueError, OverflowError):
        pass
    fitting = list(rows)
    for number, row in enumerate(rows):
        try:
            pa.array([row], physical).cast(target)
        except (TypeError, ValueError, OverflowError) as error:
            bad[number], fitting[number] = first_line(error), None
    return pa.array(fitting, physical).cast(target)


def decode_rows(payloads: pa.BinaryArray, read: Callable[[bytes], Any]) -> tuple[list[Any], dict[int, str]]:
    """Values one by one, None for null and bad ones; and what is wrong with those."""
    rows: list[Any] = []
    bad: dict[int, str] = {}
    for number, payload in enumerate(payloads.to_pylist()):
        value = None
        if payload is not None:
            try:
                value = read(payload)
            except Exception as error:  # whatever a library finds wrong with bytes from outside
                bad[number] = first_line(error)
        rows.append(value)
    return rows, bad


def first_line(error: Exception) -> str:
    """An error of a library in one line, with its kind."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__
