"""Dataclasses as JSON in a checkpoint: written field by field, and read back with each field
checked before anything is made of it.

A value has the type that its dataclass says, numbers fit 64 bits, and no field is unknown or
missing.
"""

from __future__ import annotations

import json
import types
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ledgerlake.errors import OffsetError, refuse_newer

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

ADVICE = "restore the checkpoint from a copy"


def parse_stored(
    text: str | bytes,
    written: str,
    read: Callable[[dict[str, Any]], T],
    known: int | None = None,
    advice: str = ADVICE,
) -> T:
    """Read a JSON object.

    Args:
        written: the name of the object, for the error.
        read: returns a value from the fields; may raise ValueError, KeyError or TypeError. It takes
            them with ``stored`` or ``exactly``, which refuse unknown ones.
        known: the last version that can be read, if the object has a version.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("no JSON object")
        if known is not None:
            check_version(data.pop("version"), known, f"{written} of version")
        return read(data)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise OffsetError(f"the checkpoint holds damaged {written} ({reason}); {advice}") from None


def check_version(version: Any, known: int, number: str) -> None:
    """Check the version of a stored object, which counts from 1.

    Args:
        known: the last version that can be read.
        number: the name of the version, for the error.

    Raises:
        OffsetError: a newer release wrote it.
        ValueError: it is no version.
    """
    if stored(int, version) < 1:
        raise ValueError(f"version {version}")
    refuse_newer("the checkpoint", version, known, number)


def exactly(data: dict[str, Any], *names: str) -> list[Any]:
    """Return the fields of an object in the order of their names.

    Raises:
        ValueError: it has others, or lacks one.
    """
    if data.keys() != set(names):
        raise ValueError(f"an object with the fields {', '.join(sorted(data))}")
    return [data[name] for name in names]


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by their names. As the ``default`` of ``json.dumps`` it
    writes those within it too, without the copies that ``dataclasses.asdict`` makes.
    """
    return {field.name: getattr(value, field.name) for field in fields(value)}


def stored(kind: Any, value: Any) -> Any:
    """Return a value of a type, from a parsed JSON value.

    Raises:
        ValueError: it is of another type.
    """
    return _reader(kind)(value)


def reader_of(kind: type[T]) -> Callable[[dict[str, Any]], T]:
    """Return the reader of a dataclass, for ``parse_stored``."""

    def read(data: dict[str, Any]) -> T:
        value: T = stored(kind, data)
        return value

    return read


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    if kind is Any:
        return lambda value: value
    if is_dataclass(kind):
        return _dataclass_reader(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return lambda value: _checked(value in arguments, value, kind)
    if origin in (Union, types.UnionType):
        (reader,) = (_reader(argument) for argument in arguments if argument is not type(None))
        return lambda value: None if value is None else reader(value)
    if origin in (list, tuple):
        item = _reader(arguments[0])
        has_length = origin is tuple and Ellipsis not in arguments
        return lambda value: origin(
            item(element)
            for element in _checked(
                isinstance(value, list) and (not has_length or len(value) == len(arguments)),
                value,
                kind,
            )
        )
    if origin is dict:
        item = _reader(arguments[1])
        return lambda value: {
            name: item(element)
            for name, element in _checked(isinstance(value, dict), value, kind).items()
        }
    if kind is int:
        return lambda value: _checked(type(value) is int and -(2**63) <= value < 2**63, value, kind)
    return lambda value: _checked(type(value) is kind, value, kind)


def _dataclass_reader(kind: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in fields(kind)}

    def read(value: Any) -> Any:
        names = set(_checked(isinstance(value, dict), value, kind))
        if names != readers.keys():
            raise ValueError(f"a {kind.__name__} with the fields {', '.join(sorted(names))}")
        return kind(**{name: readers[name](element) for name, element in value.items()})

    return read


def _checked(fits: bool, value: Any, kind: Any) -> Any:
    if not fits:
        raise ValueError(
            f"a {type(value).__name__} stands in place of {getattr(kind, '__name__', kind)}"
        )
    return value
