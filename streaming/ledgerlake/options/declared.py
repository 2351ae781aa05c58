"""Options as fields of a frozen dataclass: one declaration holds all that there is to know of an
option.

The metadata of a field is an ``Option``: the name for Spark, the key of the configuration file, the
names in other connectors, the kind of value, and the sentence for the reference. From it come the
parser of Spark's options, the parser of a section of the configuration, the hint at a misspelled
name, and ``docs/options.md``.
"""

from __future__ import annotations

import difflib
from dataclasses import MISSING, Field, dataclass, fields, replace
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, Any, TypeVar

from ledgerlake.errors import UsageError
from ledgerlake.stored.secrets import blanked

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
        section, key: its place in the configuration file, None if it has none. The section ``*`` is
            that of the class, which inherits the option.
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
    """Return a field of a dataclass that is an option.

    Args:
        default: ``MISSING`` if the option is required.
        toml: its place in the configuration file, as ``section.key``.
        is_secret: the value is left out of every ``repr``.
    """
    section, _, key = (toml or "").partition(".")
    declaration = Option(
        kind, meaning, spark, section or None, key or None, same_as, shown_default, is_internal
    )
    return dataclass_field(default=default, repr=not is_secret, metadata={_KEY: declaration})


def declared(kind: Any) -> list[tuple[Field[Any], Option]]:
    """Return the fields of a dataclass that are options, in their order; inherited ones of any
    section come last.
    """
    found = [(field, field.metadata[_KEY]) for field in fields(kind) if _KEY in field.metadata]
    own = [(field, option) for field, option in found if option.section != "*"]
    inherited = [
        (field, replace(option, section=kind.section))
        for field, option in found
        if option.section == "*"
    ]
    return own + inherited


def from_spark(kind: type[Declared], texts: Iterable[tuple[str, str]], what: str) -> Declared:
    """Parse Spark's options; the case of their names does not count.

    Args:
        what: what has the options, for errors: source or sink.

    Raises:
        UsageError: an option is unknown or missing, or has a value that it cannot have; the message
            names it.
    """
    options = [
        (field.name, field.default, option)
        for field, option in declared(kind)
        if option.spark is not None
    ]
    by_name = {
        str(spelled).lower(): (name, option)
        for name, _, option in options
        for spelled in (option.spark, *option.same_as)
    }
    shown = tuple(str(option.spark) for _, _, option in options if not option.is_internal)
    values: dict[str, Any] = {}
    for spelled, text in texts:
        if spelled.lower() not in by_name:
            raise UsageError(f"the {what} has no option '{spelled}'{nearest(spelled, shown)}")
        name, option = by_name[spelled.lower()]
        if not option.kind.is_absent(text):
            values[name] = option.kind.parse(text, f"the option '{option.spark}'")
    for name, default, option in options:
        if default is MISSING and name not in values:
            raise UsageError(f"the option '{option.spark}' is missing; write {option.kind.example}")
    return kind(**values)


@dataclass(frozen=True)
class Sections:
    """The sections of a configuration, and the folder in which its relative paths begin."""

    data: dict[str, Any]
    folder: str


def from_toml(kind: type[Declared], section: str, sections: Sections) -> Declared:
    """Parse a section of the configuration that is a dataclass of its own.

    Raises:
        UsageError: as ``toml_values``.
    """
    return kind(**toml_values(kind, section, sections))


def toml_values(kind: type, section: str, sections: Sections) -> dict[str, Any]:
    """Return the values of a dataclass's fields that a section of the configuration sets; paths are
    absolute.

    Raises:
        UsageError: a key is unknown or missing, or has a value that it cannot have; the message
            names it.
    """
    entries = sections.data.get(section, {})
    if not isinstance(entries, dict):
        raise UsageError(f"[{section}] must be a section")
    by_key = {
        str(option.key): (field, option)
        for field, option in declared(kind)
        if option.section == section
    }
    has_secrets = any(not field.repr for field, _ in by_key.values())
    values = {}
    for key, value in entries.items():
        if key not in by_key:
            raise UsageError(f"[{section}] has no key '{key}'{nearest(key, tuple(by_key))}")
        field, option = by_key[key]
        if option.kind.is_absent(value):
            if not field.repr:
                # Else a template whose secret is missing would switch off what the secret protects.
                raise UsageError(
                    f"[{section}] {key} is blank; write the secret, file:PATH or env:NAME, or "
                    "leave it out"
                )
            continue
        try:
            checked = option.kind.check(value, f"[{section}] {key}")
        except UsageError as error:
            # It may be a secret in the wrong place.
            raise UsageError(blanked(error.message, [str(value)] if has_secrets else [])) from None
        resolve = option.kind.resolve
        values[field.name] = checked if resolve is None else resolve(checked, sections.folder)
    for key, (field, _) in by_key.items():
        if field.default is MISSING and field.name not in values:
            raise UsageError(f"[{section}] {key} is missing")
    return values


def to_spark(values: Any) -> dict[str, str]:
    """Return Spark's options that parse to these values, without those that have their default
    value.
    """
    texts = {}
    for field, option in declared(type(values)):
        value = getattr(values, field.name)
        if option.spark is not None and value != field.default:
            texts[option.spark] = option.kind.text(value)
    return texts


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the closest known word, or all known words."""
    return closest(name, known) or f"; known are {', '.join(known)}"


def closest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the closest known word; empty if none is close."""
    by_lower = {word.lower(): word for word in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean '{by_lower[close[0]]}'?" if close else ""
