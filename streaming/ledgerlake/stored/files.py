"""Small JSON files that are made, or replaced, as a whole, on this machine or in an object store.

A process that was suspended may write late. So what a successor relies on is in a file that is
created once (``create_json``), and not in one that is replaced.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

from ledgerlake.stored.fields import parse_stored

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.stored.places import Place

T = TypeVar("T")


def load_json(file: Place) -> Any:
    """A file's content, or None if there is no file.

    Raises:
        OSError, ValueError: it cannot be read, or is no JSON.
    """
    data = load_bytes(file)
    return None if data is None else json.loads(data)


def load_stored(
    file: Place, written: str, read: Callable[[dict[str, Any]], T], known: int
) -> T | None:
    """Return a file's object, or None if there is no file. The other arguments are described at
    ``parse_stored``.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
        OSError: it cannot be read.
    """
    data = load_bytes(file)
    return None if data is None else parse_stored(data, written, read, known)


def save_json(file: Place, data: Any) -> bytes:
    """Replace a file in one step; its folder is made if it is missing. Return its content.

    Raises:
        OSError: it cannot be written.
    """
    filesystem, name = file.filesystem(), file.root
    content = json.dumps(data).encode()
    if not file.is_local:
        # A store shows an object when all of it is there.
        with filesystem.open_output_stream(name) as stream:
            stream.write(content)
        return content
    filesystem.create_dir(name.rpartition("/")[0], recursive=True)
    # Of two processes that replace it at once, each moves its own.
    new = f"{name}.{uuid.uuid4().hex}.new"
    with filesystem.open_output_stream(new) as stream:
        stream.write(content)
    filesystem.move(new, name)
    return content


def create_json(file: Place, data: Any) -> bool:
    """Create a file in one step; its folder is made if it is missing. Return False if it exists
    already: then it stays as it is.

    Raises:
        OSError: it cannot be created; a store may have done it all the same.
    """
    if file.is_local:
        file.filesystem().create_dir(file.root.rpartition("/")[0], recursive=True)
    return file.create_file(json.dumps(data).encode())


def load_bytes(file: Place) -> bytes | None:
    """Return a file's bytes, or None if there is no file.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with file.filesystem().open_input_stream(file.root) as stream:
            return bytes(stream.read())
    except FileNotFoundError:
        file.check_bucket()
        return None
