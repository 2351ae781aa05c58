"""Local paths of a configuration, which begin in the folder of its file.

A file that is started from two folders is one stream: it has one checkpoint, and the same tables.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from collections.abc import Callable

# Without the slash it is a file with a colon in its name.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(?=/)")
_SQLITE = re.compile(r"(?P<scheme>sqlite(\+\w+)?:///)(?P<path>(?!/|:memory:|file:).+)")
_SQL_TYPES = ("sql", "in-memory")


def resolve_path(text: str, folder: str) -> str:
    """Return the absolute path of a path that may begin in a folder; ``~/`` begins in the user's
    own folder. A URL stays as it is.
    """
    if _URL.match(text):
        return text
    return os.path.abspath(os.path.join(folder, expand_home(text)))


def expand_home(path: str) -> str:
    """Return a path with the user's own folder in place of ``~/``."""
    return os.path.expanduser(path) if path.startswith("~/") else path


def resolve_reference(text: str, folder: str) -> str:
    """Return a secret, or a reference to one with an absolute path."""
    return _with_path(text, lambda path: resolve_path(path, folder))


def path_from(folder: str, text: str) -> str:
    """Return a path that begins in the working folder as one that begins in another folder.
    Absolute paths and URLs stay as they are.
    """
    if _URL.match(text) or text.startswith(("/", "~/", "$")):
        return text
    return os.path.relpath(text, folder)


def reference_from(folder: str, text: str) -> str:
    """Return a reference to a secret by ``path_from``."""
    return _with_path(text, lambda path: path_from(folder, path))


def _with_path(reference: str, change: Callable[[str], str]) -> str:
    if not reference.startswith("file:"):
        return reference
    path = unquote(reference.removeprefix("file:").removeprefix("//"))
    return reference if path.startswith("/") else f"file:{quote(change(path))}"


def resolve_secret_file(text: str, folder: str) -> str:
    """Return a secret that may be the path of a file alone, with an absolute path. JSON is the
    content of such a file.
    """
    if text.startswith(("file:", "env:", "data:")) or text.lstrip().startswith("{"):
        return resolve_reference(text, folder)
    return resolve_path(text, folder)


def resolve_catalog_settings(
    settings: tuple[tuple[str, str], ...], folder: str
) -> tuple[tuple[str, str], ...]:
    """Return properties of an Iceberg catalog with absolute paths of its SQLite database, and of
    the warehouse of a catalog in a database. The warehouse of others is a name.
    """
    values = dict(settings)
    # As pyiceberg does it: it takes any case, and without a type it looks at the URI.
    is_sql = values.get("type", "").lower() in _SQL_TYPES or values.get("uri", "").startswith(
        ("sqlite", "postgresql")
    )
    return tuple(
        (name, _resolve_setting(name, text, folder) if is_sql else text) for name, text in settings
    )


def _resolve_setting(name: str, text: str, folder: str) -> str:
    if name == "warehouse":
        return resolve_path(text, folder)
    database = _SQLITE.fullmatch(text) if name == "uri" else None
    if database is None:
        return text
    return f"{database['scheme']}{resolve_path(database['path'], folder)}"
