"""Folders anywhere that pyarrow reaches, and small JSON files in them that are replaced whole."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

from pyarrow import fs

from ledgerlake.stored.fields import parse_stored

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def resolve(path: str) -> tuple[fs.FileSystem, str]:
    """The filesystem of a path or URI, and the path inside it."""
    if "://" in path:
        filesystem, root = fs.FileSystem.from_uri(path)
        return filesystem, root
    return fs.LocalFileSystem(), path


def load_json(path: str) -> Any:
    """A file's content, or None if there is no file.

    Raises:
        OSError, ValueError: it cannot be read, or is no JSON.
    """
    data = _load(path)
    return None if data is None else json.loads(data)


def load_stored(path: str, written: str, read: Callable[[dict[str, Any], int], T], known: int) -> T | None:
    """Return a file's object, or None if there is no file. The other arguments are those of
    ``parse_stored``.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
        OSError: it cannot be read.
    """
    data = _load(path)
    return None if data is None else parse_stored(data, written, read, known)


def save_json(path: str, data: Any) -> None:
    """Replace a file in one step; its folder is made if it is missing.

    Raises:
        OSError: it cannot be written.
    """
    filesystem, name = resolve(path)
    filesystem.create_dir(name.rpartition("/")[0], recursive=True)
    # Of two processes that replace it at once, each moves its own.
    new = f"{name}.{uuid.uuid4().hex}.new"
    with filesystem.open_output_stream(new) as stream:
        stream.write(json.dumps(data, indent=2).encode())
    filesystem.move(new, name)


def _load(path: str) -> bytes | None:
    filesystem, name = resolve(path)
    try:
        with filesystem.open_input_stream(name) as stream:
            return bytes(stream.read())
    except FileNotFoundError:
        return None
