"""Columns of decoded values: the input and output of decoders, and columns of Python values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.decode.weights import Weigher, too_heavy
from ledgerlake.errors import SetupError
from ledgerlake.outside import Unreadable, reading
from ledgerlake.wire.limits import MAX_VALUES_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

# The limit for one schema and for a table, including nested columns. In a short schema, types that
# each use another one twice can have more columns than any machine can hold.
COLUMNS_MOST = 10_000

# A process keeps what it made of so many schemas: a topic may get new versions for ever.
SCHEMAS_KEPT = 1000

# The most levels of a type: a struct and a list are one, a map is two. Each reader has a limit of
# its own: delta-rs cannot read its own log again from 42 structs on, pyarrow a Parquet file from 50
# lists on, and Arrow a batch from 64 levels on.
DEPTH_MOST = 32

# The most of an error's text that is kept with a reject.
_DETAIL_CHARACTERS = 200


class DoesNotFit(ValueError):
    """A part of a value does not fit its column.

    Attributes:
        names: of the fields that lead to the part.
    """

    def __init__(self, what: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(f"{'.'.join(names)}: {what}" if names else what)
        self.what = what
        self.names = names


@dataclass
class DecodedValues:
    """A column, with null for null and bad values; ``bad`` has the reason for each bad row.
    ``too_large`` are the bad rows that would have taken too much memory.
    """

    values: pa.Array
    bad: dict[int, str] = field(default_factory=dict)
    too_large: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Encoded:
    """The bytes from which values are decoded: payloads and messages' keys, null if there
    is none.
    """

    payloads: pa.BinaryArray
    keys: pa.BinaryArray | None = None


# Decodes values of one writer's schema as values of the reader's.
Read = Callable[[Encoded], DecodedValues]


@dataclass(frozen=True)
class Decoder:
    """Decodes values whose weight is within the limit (see ``weights``).

    Args:
        read: decodes values.
        weigh: returns the weight of each.
    """

    read: Read
    weigh: Weigher

    def __call__(self, encoded: Encoded) -> DecodedValues:
        """Decode values. Those that are too heavy are bad."""
        weights = self.weigh(encoded)
        heavy = np.flatnonzero(weights > MAX_VALUES_BYTES)
        if not len(heavy):
            return self.read(encoded)
        keys = None if encoded.keys is None else without(encoded.keys, heavy)
        decoded = self.read(Encoded(without(encoded.payloads, heavy), keys))
        reasons = {row: too_heavy(int(weights[row])) for row in heavy.tolist()}
        return DecodedValues(decoded.values, decoded.bad | reasons, frozenset(reasons))


def without(values: pa.Array, rows: Collection[int] | NDArray[np.int64]) -> pa.Array:
    """Return values with null in some rows."""
    if not len(rows):
        return values
    is_left_out = np.zeros(len(values), np.bool_)
    is_left_out[list(rows)] = True
    return pc.if_else(pa.array(is_left_out), pa.scalar(None, values.type), values)


def too_wide() -> SetupError:
    """Return the error for a schema with too many columns."""
    return SetupError(f"a schema has more than {COLUMNS_MOST} columns; read it with schema = bytes")


def check_depth(
    kind: pa.DataType, what: str, advice: str = "; read it with schema = bytes"
) -> None:
    """Check that all readers of a table can read a type.

    Args:
        what: what has the type, for the error.
        advice: the end of its sentence.

    Raises:
        SetupError: the type is nested too deeply.
    """
    if _depth(kind) > DEPTH_MOST:
        raise SetupError(
            f"{what} is nested too deeply, in {_depth(kind)} levels of {DEPTH_MOST} at most{advice}"
        )


def _depth(kind: pa.DataType) -> int:
    if pa.types.is_struct(kind):
        return 1 + max((_depth(field.type) for field in kind), default=0)
    if pa.types.is_list(kind):
        return 1 + _depth(kind.value_type)
    return 2 + _depth(kind.item_type) if pa.types.is_map(kind) else 0


def column_count(kind: pa.DataType) -> int:
    """Return the number of columns of a type inside of it, at every depth."""
    if pa.types.is_struct(kind):
        return sum(1 + column_count(field.type) for field in kind)
    if pa.types.is_list(kind):
        return column_count(kind.value_type)
    return column_count(kind.item_type) if pa.types.is_map(kind) else 0


def has_column(kind: pa.DataType) -> bool:
    """Return whether a table can hold something of a type: more than records without fields."""
    if pa.types.is_struct(kind):
        return any(has_column(field.type) for field in kind)
    if pa.types.is_list(kind):
        return has_column(kind.value_type)
    return has_column(kind.item_type) if pa.types.is_map(kind) else True


def build(
    rows: list[Any], physical: pa.DataType, target: pa.DataType, bad: dict[int, str]
) -> pa.Array:
    """Return a column of Python values; those that do not fit are null, and bad."""
    with contextlib.suppress(Unreadable), reading():
        return pa.array(rows, physical).cast(target)
    fitting = list(rows)
    for number, row in enumerate(rows):
        try:
            with reading():
                pa.array([row], physical).cast(target)
        except Unreadable as failure:
            bad[number], fitting[number] = first_line(failure.error), None
    return pa.array(fitting, physical).cast(target)


def exceeds(values: NDArray[np.int64], limit: int) -> NDArray[np.bool_]:
    """Return which values are farther from 0 than the limit. The least 64-bit integer has no
    absolute value.
    """
    return (values > limit) | (values < -limit)


def decode_rows(
    payloads: pa.BinaryArray, read: Callable[[bytes], Any]
) -> tuple[list[Any], dict[int, str]]:
    """Decode values one by one; return them, None for null and bad ones, and the reasons."""
    rows: list[Any] = []
    bad: dict[int, str] = {}
    for number, payload in enumerate(payloads.to_pylist()):
        value = None
        if payload is not None:
            try:
                with reading():
                    value = read(payload)
            except Unreadable as failure:
                bad[number] = first_line(failure.error)
        rows.append(value)
    return rows, bad


def halved(encoded: Encoded, read: Read, target: pa.DataType) -> DecodedValues:
    """Decode values; if that fails for all together, halve them until it fails for single ones.

    Args:
        target: the type of the column.
    """
    count = len(encoded.payloads)
    try:
        with reading():
            return read(encoded)
    except Unreadable as failure:
        if count <= 1:
            bad = (
                {}
                if encoded.payloads.null_count
                else dict.fromkeys(range(count), first_line(failure.error))
            )
            return DecodedValues(pa.nulls(count, target), bad)
    half = count // 2
    first, second = (
        halved(_slice(encoded, *part), read, target) for part in ((0, half), (half, count))
    )
    return DecodedValues(
        pa.concat_arrays([first.values, second.values]),
        first.bad | {row + half: reason for row, reason in second.bad.items()},
        first.too_large | {row + half for row in second.too_large},
    )


def _slice(encoded: Encoded, start: int, end: int) -> Encoded:
    keys = None if encoded.keys is None else encoded.keys.slice(start, end - start)
    return Encoded(encoded.payloads.slice(start, end - start), keys)


def first_line(error: BaseException) -> str:
    """Return the error of a library or a user's function in one line of UTF-8, with its type; one
    of ours without.
    """
    try:
        text = str(error).strip()
    except Exception:  # whatever a user's class does
        text = ""
    name = type(error).__name__
    said = text.splitlines()[0][:_DETAIL_CHARACTERS] if text else ""
    line = said if isinstance(error, DoesNotFit) else f"{name}: {said}" if said else name
    return line.encode(errors="replace").decode()
