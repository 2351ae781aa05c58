"""The kinds of values that options take, as the text of a Spark option and as a value of TOML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from ledgerlake.errors import UsageError
from ledgerlake.runtime.plugins import check_path
from ledgerlake.stored.local_paths import (
    resolve_catalog_settings,
    resolve_path,
    resolve_reference,
    resolve_secret_file,
)
from ledgerlake.stored.stores import STORES

T = TypeVar("T")

# A part of a topic's name in the path of a table.
PLACEHOLDER = re.compile(r"\{(\w*)\}")

# At most what 64 bits hold, and ASCII digits only.
NUMBER = re.compile(r"[0-9]{1,18}")
_MOST = 10**18 - 1
_DURATION = re.compile(
    r"([0-9]{1,12})\s*(milliseconds?|ms|seconds?|s|minutes?|min|m|hours?|h|days?|d)"
)
_UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

# Behind another word, a colon is part of a folder's name.
_SCHEME_WITHOUT_SLASH = re.compile(rf"({'|'.join(['file', *STORES])}):(?!/)", re.IGNORECASE)

# In place of the folder of the index of delayed messages.
STATE = "state"

# Clocks and timers of the libraries cannot have any number.
_LONGEST_MS = 100 * 365 * _UNITS_MS["d"]


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of value.

    Args:
        takes: what may be written, for the reference.
        parse: from a text, and the name of the option for an error, to the value.
        check: from a value of TOML, and the name of the key for an error, to the value.
        text: from the value to a text that parses to it.
        takes_in_toml, text_in_toml: the same of TOML, if it is another.
        resolve: from the value and a folder to the value whose relative paths begin there.
        example: what to write if a required option is missing.
        skips_empty: an empty text means that the option is not given.
    """

    takes: str
    parse: Callable[[str, str], T]
    check: Callable[[Any, str], T]
    text: Callable[[T], str] = str
    takes_in_toml: str | None = None
    text_in_toml: Callable[[T], str] | None = None
    resolve: Callable[[T, str], T] | None = None
    example: str = ""
    skips_empty: bool = False

    def is_absent(self, value: Any) -> bool:
        """Return whether a value stands for an option that is not given."""
        return self.skips_empty and isinstance(value, str) and not value.strip()


def duration_ms(where: str, text: str) -> int:
    """A time span such as ``200 milliseconds``, ``30s`` or ``1 hour``.

    Raises:
        UsageError: the text is no time span.
    """
    matched = _DURATION.fullmatch(text.strip().lower())
    if matched is None:
        raise UsageError(
            f"{where} '{text}' is not a duration; write for example '30 seconds' or '15 minutes'"
        )
    count, unit = int(matched.group(1)), matched.group(2)
    duration = count if unit.startswith(("ms", "mil")) else count * _UNITS_MS[unit[0]]
    return checked_span_ms(duration, f"{where} '{text}'")


def choice(*words: str, synonyms: dict[str, str] | None = None) -> Kind[str]:
    """Declare a value that is one of some words; their case does not count.

    Args:
        synonyms: other words that are accepted, and the word that each stands for.
    """
    known = {word.lower(): word for word in words} | (synonyms or {})
    shown = " or ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]

    def parse(text: str, where: str) -> str:
        word = text.strip().lower()
        if word not in known:
            raise UsageError(f"{where} cannot be '{text}'; it is {shown}")
        return known[word]

    takes = " or ".join(f"`{word}`" for word in words)
    return Kind(takes, parse, lambda value, where: parse(_check_text(value, where), where))


def _check_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where} must be a text")
    return value


def _parse_flag(text: str, where: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise UsageError(f"{where} cannot be '{text}'; it is true or false")
    return word == "true"


def _check_flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{where} must be true or false")
    return value


def _parse_count(text: str, where: str) -> int:
    if not NUMBER.fullmatch(text.strip()) or int(text) <= 0:
        raise UsageError(f"{where} cannot be '{text}'; it is a number above 0, and below 10^18")
    return int(text)


def _check_count(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST:
        raise UsageError(f"{where} must be a whole number above 0, and below 10^18")
    return value


def _parse_limit(text: str, where: str) -> int:
    if not NUMBER.fullmatch(text.strip()):
        raise UsageError(f"{where} cannot be '{text}'; it is a number, or 0, and below 10^18")
    return int(text)


def _check_limit(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise UsageError(f"{where} must be a whole number, or 0, and below 10^18")
    return value


def checked_span_ms(milliseconds: int, where: str) -> int:
    """Return a time span that clocks and timers can have.

    Raises:
        UsageError: it is too long.
    """
    if milliseconds > _LONGEST_MS:
        raise UsageError(f"{where} is longer than 100 years")
    return milliseconds


def _parse_list(text: str, _where: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _check_list(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise UsageError(f'{where} must be a list of texts, such as ["a", "b"]')
    return tuple(value)


def _parse_settings(text: str, where: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = part.partition("=")
        if not separator:
            raise UsageError(f"{where} cannot be '{part}'; it is KEY=VALUE")
        pairs.append((name.strip(), value.strip()))
    return tuple(pairs)


def _settings(table: Any, where: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and texts. In TOML, dots in a key without quotes make tables in tables."""
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table")
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _settings(value, where, f"{name}.")
        elif isinstance(value, bool):
            yield name, str(value).lower()
        elif isinstance(value, (str, int, float)):
            yield name, str(value)
        else:
            raise UsageError(f"{where} {name} must be a text, a number, true or false")


def _check_path(value: Any, where: str) -> str:
    text = _check_secret_file(value, where)
    found = _SCHEME_WITHOUT_SLASH.match(text)
    if found is not None:
        store = STORES.get(found[1].lower())
        shape = store.shape if store else "file:///PATH"
        raise UsageError(f"{where} cannot be '{text}'; write a path alone, or {shape}")
    return text


def _check_secret_file(value: Any, where: str) -> str:
    text = _check_text(value, where)
    if text.startswith("$"):
        raise UsageError(
            f"{where} cannot be '{text}'; variables are not replaced here, so write the path itself"
        )
    return text


def resolve_plain(text: str, folder: str) -> str:
    """Return an absolute path that has only the placeholders of the text.

    Raises:
        UsageError: the folder in which it begins has one.
    """
    path = resolve_path(text, folder)
    found = PLACEHOLDER.findall(path)
    if len(found) > len(PLACEHOLDER.findall(text)):
        raise UsageError(
            f"'{text}' is {path}, and a path with {{{found[0]}}} is that of the tables of single "
            "topics; write an absolute path, or move the configuration to another folder"
        )
    return path


def _texts(takes: str, example: str = "") -> Kind[str]:
    return Kind(takes, lambda text, _where: text, _check_text, example=example, skips_empty=True)


TEXT = _texts("a text")
PATH = replace(_texts("a path"), check=_check_path, resolve=resolve_plain)
PATH_OR_STATE = replace(
    PATH,
    takes="`state` or a path",
    resolve=lambda text, folder: text if text == STATE else resolve_plain(text, folder),
)
SECRET = replace(_texts("a text, `file:PATH` or `env:NAME`"), resolve=resolve_reference)
SECRET_FILE = replace(PATH, check=_check_secret_file, resolve=resolve_secret_file)
URL = _texts("an address", "pulsar://host:6650")
LIST = Kind(
    "texts with commas between them",
    _parse_list,
    _check_list,
    ",".join,
    takes_in_toml="a list of texts",
    skips_empty=True,
)
FLAG = Kind("`true` or `false`", _parse_flag, _check_flag, lambda value: str(value).lower())
COUNT = Kind("a number above 0", _parse_count, _check_count)
LIMIT = Kind("a number, or 0", _parse_limit, _check_limit)
DURATION = Kind(
    "a time span such as `30s`",
    lambda text, where: duration_ms(where, text),
    lambda value, where: duration_ms(where, _check_text(value, where)),
    lambda value: f"{value} milliseconds",
)
MILLISECONDS = Kind(
    "milliseconds",
    lambda text, where: checked_span_ms(_parse_count(text, where), where),
    lambda value, where: checked_span_ms(1000 * _check_count(value, where), where),
    takes_in_toml="seconds",
    text_in_toml=lambda value: str(value // 1000),
)
SETTINGS = Kind(
    "`KEY=VALUE` with commas between them",
    _parse_settings,
    lambda value, where: tuple(_settings(value, where)),
    lambda pairs: ",".join(f"{name}={value}" for name, value in pairs),
    takes_in_toml="a table of texts, numbers and flags",
)
CATALOG_SETTINGS = replace(SETTINGS, resolve=resolve_catalog_settings)
FUNCTION = Kind(
    "`package.module:name`",
    check_path,
    lambda value, where: check_path(_check_text(value, where), where),
    skips_empty=True,
)
