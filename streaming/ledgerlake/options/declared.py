"""Options as fields of a frozen dataclass: one declaration holds all that there is to know of an
option.

The metadata of a field is an ``Option``: the name for Spark, the key of the configuration file, the
names in other connectors, the kind of value, and the sentence for the reference. From it come the
parser of Spark's options, the parser of a section of the configuration, the hint at a misspelled
name, and ``docs/options.md``.
"""

from __future__ import annotations

import difflib
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from ledgerlake.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ledgerlake.options.kinds import Kind

Declared = TypeVar("Declared")

_KEY = "option"


@dataclass(frozen=True)
class Option:
    """The declaration of an option.

    Args:
        kind: the values that it takes.
        meaning: a sentence for the reference, in Markdown.
        spark: its name among Spark's options, None if it has none.
        section, key: its place in the configuration file, None if it has none.
        same_as: its names in other connectors.
        shown_default: what the reference says in place of the default.
        is_internal: the pipeline alone sets it; no reference and no hint names it.
    """

    kind: Kind[Any]
    meaning: str
    spark: str | None = None
    section: str | None = None
    key: str | None = None
    same_as: tuple[str, ...] = ()
    shown_default: str | None = None
    is_internal: bool = False


def option(
    kind: Kind[Any],
    default: Any,
    meaning: str,
    *,
    spark: str | None = None,
    toml: str | None = None,
    is_secret: bool = False,
    same_as: tuple[str, ...] = (),
    shown_default: str | None = None,
    is_internal: bool = False,
) -> Any:
    """A field of a dataclass that is an option.

    Args:
        default: ``MISSING`` if the option is required.
        toml: its place in the configuration file, as ``section.key``.
        is_secret: the value is left out of every ``repr``.
    """
    section, _, key = (toml or "").partition(".")
    known = Option(kind, meaning, spark, section or None, key or None, same_as, shown_default, is_internal)
    return field(default=default, repr=not is_secret, metadata={_KEY: known})


def declared(kind: type) -> list[tuple[Field[Any], Option]]:
    """The fields of a dataclass that are options, in their order."""
    return [(each, each.metadata[_KEY]) for each in fields(kind) if _KEY in each.metadata]


def from_spark(kind: type[Declared], given: Iterable[tuple[str, str]], what: str) -> Declared:
    """Parse Spark's options; the case of their names does not count.

    Args:
        what: what has the options, for errors: source or sink.

    Raises:
        UsageError: an option is unknown or missing, or has a value that it cannot have; the message
            names it.
    """
    options = [(each.name, each.default, known) for each, known in declared(kind) if known.spark is not None]
    by_name = {
        str(spelled).lower(): (name, known) for name, _, known in options for spelled in (known.spark, *known.same_as)
    }
    shown = tuple(str(known.spark) for _, _, known in options if not known.is_internal)
    values: dict[str, Any] = {}
    for spelled, text in given:
        if spelled.lower() not in by_name:
            raise UsageError(f"the {what} has no option '{spelled}'{nearest(spelled, shown)}")
        name, known = by_name[spelled.lower()]
        if not known.kind.is_absent(text):
            values[name] = known.kind.parse(text, f"the option '{known.spark}'")
    for name, default, known in options:
        if default is MISSING and name not in values:
            raise UsageError(f"the option '{known.spark}' is missing; write {known.kind.example}")
    return kind(**values)


def from_toml(kind: type[Declared], section: str, data: dict[str, Any]) -> Declared:
    """Parse a section of the configuration that is a dataclass of its own.

    Raises:
        UsageError: as ``toml_values``.
    """
    return kind(**toml_values(kind, section, data))


def toml_values(kind: type, section: str, data: dict[str, Any]) -> dict[str, Any]:
    """The values of a dataclass's fields that a section of the configuration sets.

    Raises:
        UsageError: a key is unknown or missing, or has a value that it cannot have; the message
            names it.
    """
    given = data.get(section, {})
    if not isinstance(given, dict):
        raise UsageError(f"[{section}] must be a section")
    by_key = {str(known.key): (each, known) for each, known in declared(kind) if known.section == section}
    values = {}
    for key, value in given.items():
        if key not in by_key:
            raise UsageError(f"[{section}] has no key '{key}'{nearest(key, tuple(by_key))}")
        each, known = by_key[key]
        if not known.kind.is_absent(value):
            values[each.name] = known.kind.check(value, f"[{section}] {key}")
    for key, (each, _) in by_key.items():
        if each.default is MISSING and each.name not in values:
            raise UsageError(f"[{section}] {key} is missing")
    return values


def to_spark(values: Any) -> dict[str, str]:
    """Spark's options that parse to these values; an option with its default value is left out."""
    texts = {}
    for each, known in declared(type(values)):
        value = getattr(values, each.name)
        if known.spark is not None and value != each.default:
            texts[known.spark] = known.kind.text(value)
    return texts


def nearest(name: str, known: tuple[str, ...]) -> str:
    """A hint that names the closest known word, or all known words."""
    by_lower = {word.lower(): word for word in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean '{by_lower[close[0]]}'?" if close else f"; known are {', '.join(known)}"
