"""When a topic partition wants a micro-batch although nothing new has come: told by the pipeline,
read by the planner.

The two live in different processes. After a micro-batch that changed it the pipeline writes, in a
folder of the checkpoint,

    <batch>.json    {"version": 1, "wakes": {"persistent://public/default/orders-partition-0": 1777626000123}}

(milliseconds since 1970); that of the newest micro-batch counts. So a process that was suspended
and wakes up beside its successor cannot replace what that one wrote. A planned micro-batch carries
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
    """Return when each topic partition wants a micro-batch; None if nothing is written there that
    can be read.

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
    """Write what counts behind a micro-batch.

    Raises:
        OSError: it cannot be written.
    """
    save_json(f"{folder}/{batch_id:010d}.json", {"version": VERSION, "wakes": wakes_ms})
    filesystem, root = resolve(folder)
    # The planner may be about to read the one before.
    for name in _names(folder)[:-2]:
        with contextlib.suppress(FileNotFoundError):
            filesystem.delete_file(f"{root}/{name}")


def _names(folder: str) -> list[str]:
    filesystem, root = resolve(folder)
    found = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
    return sorted(one.base_name for one in found if one.base_name.removesuffix(".json").isdecimal())


def _wakes(data: dict[str, Any], _version: int) -> dict[str, int]:
    found: dict[str, int] = stored(dict[str, int], data["wakes"])
    return found
