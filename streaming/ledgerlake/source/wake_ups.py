"""The wake-up times of topic partitions: when one needs a micro-batch although nothing new has come.
The pipeline writes them, the planner reads them.

The two live in different processes. After a micro-batch that changed a time, the pipeline writes, in
a folder of the checkpoint,

    <batch>.json    {"version": 1, "wakes": {"persistent://public/default/orders-partition-0": 1777626000123}}

(milliseconds since 1970); the file of the newest micro-batch counts. So a process that was suspended
and continues beside its successor cannot replace the successor's file. A planned micro-batch carries
the clock in its offset, so that it does the same when it is run again; these files only decide when
one is planned.

Earlier builds kept one file for all, beside the folder.
"""

from __future__ import annotations

import contextlib
from typing import Any

from pyarrow import fs

from ledgerlake.errors import OffsetError
from ledgerlake.stored.fields import stored
from ledgerlake.stored.files import load_stored, resolve, save_json

VERSION = 1


def load_wakes(folder: str) -> dict[str, int] | None:
    """Return the wake-up times; None if there is no file, or the newest is not valid.

    Raises:
        OSError: a file is there and cannot be read.
    """
    names = _names(folder)
    path = f"{folder}/{names[-1]}" if names else f"{folder}.json"
    try:
        return load_stored(path, "wakes", _wakes, VERSION)
    except OffsetError:
        return None


def newest_wakes_batch(folder: str) -> int | None:
    """Return the micro-batch whose file counts; None if there is no file of a micro-batch."""
    names = _names(folder)
    return int(names[-1].removesuffix(".json")) if names else None


def save_wakes(folder: str, batch_id: int, wakes_ms: dict[str, int]) -> None:
    """Write the wake-up times after a micro-batch.

    Raises:
        OSError: it cannot be written.
    """
    save_json(f"{folder}/{batch_id:010d}.json", {"version": VERSION, "wakes": wakes_ms})
    filesystem, root = resolve(folder)
    # The planner may be about to read the previous file.
    for name in _names(folder)[:-2]:
        with contextlib.suppress(FileNotFoundError):
            filesystem.delete_file(f"{root}/{name}")


def _names(folder: str) -> list[str]:
    filesystem, root = resolve(folder)
    files = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
    return sorted(file.base_name for file in files if file.base_name.removesuffix(".json").isdecimal())


def _wakes(fields: dict[str, Any], _version: int) -> dict[str, int]:
    wakes_ms: dict[str, int] = stored(dict[str, int], fields["wakes"])
    return wakes_ms
