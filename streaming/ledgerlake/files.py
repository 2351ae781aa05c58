"""Folders anywhere that pyarrow reaches, and small JSON files in them that are replaced whole."""

from __future__ import annotations

import json
from typing import Any

from pyarrow import fs


def resolve(path: str) -> tuple[fs.FileSystem, str]:
    """The filesystem of a path or URI, and the path inside it."""
    if "://" in path:
        filesystem, root = fs.FileSystem.from_uri(path)
        return filesystem, root
    return fs.LocalFileSystem(), path


def load_json(path: str) -> Any:
    """A file's content, or None where there is no file.

    Raises:
        OSError, ValueError: it cannot be read, or is no JSON.
    """
    filesystem, name = resolve(path)
    try:
        with filesystem.open_input_stream(name) as stream:
            return json.loads(bytes(stream.read()))
    except FileNotFoundError:
        return None


def save_json(path: str, data: Any) -> None:
    """Replace a file in one step; its folder is made where it is missing.

    Raises:
        OSError: it cannot be written.
    """
    filesystem, name = resolve(path)
    filesystem.create_dir(name.rpartition("/")[0], recursive=True)
    with filesystem.open_output_stream(f"{name}.new") as stream:
        stream.write(json.dumps(data, indent=2).encode())
    filesystem.move(f"{name}.new", name)
