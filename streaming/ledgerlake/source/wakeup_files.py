"""The files of wake-up times: when topic partitions need a micro-batch without new entries. The
pipeline writes them, the planner reads them.

The two live in different processes. After a micro-batch that changed a time, and after another
process has replaced the file, the pipeline writes, in a folder of the checkpoint,

    <batch>.json    {"version": 1, "wakes": {"persistent://public/default/orders-partition-0": 1777626000123}}

(milliseconds since 1970); the file of the newest micro-batch counts. A negative time says that
messages have been due since then and were left to the next micro-batch. So a process that was suspended
and continues beside its successor cannot replace the successor's file. A planned micro-batch carries
the clock in its offset, so that it does the same when it is run again; these files only decide when
one is planned.

Earlier builds kept one file for all, beside the folder.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyarrow import fs

from ledgerlake.errors import OffsetError
from ledgerlake.stored.fields import stored
from ledgerlake.stored.files import load_stored, save_json

if TYPE_CHECKING:
    from ledgerlake.stored.places import Place

VERSION = 1


def load_wakeup_times(folder: Place) -> dict[str, int] | None:
    """Return the wake-up times; None if there is no file, or the newest is not valid.

    Raises:
        OSError: a file is there and cannot be read.
    """
    names = _names(folder)
    file = folder / names[-1] if names else replace(folder, uri=f"{folder.uri}.json")
    try:
        return load_stored(file, "wakes", _wakeup_times, VERSION)
    except OffsetError:
        return None


def newest_wakeup_batch(folder: Place) -> int | None:
    """Return the micro-batch whose file counts; None if there is no file of a micro-batch."""
    names = _names(folder)
    return int(names[-1].removesuffix(".json")) if names else None


def save_wakeup_times(folder: Place, batch_id: int, wakeup_times_ms: dict[str, int]) -> None:
    """Write the wake-up times after a micro-batch.

    Raises:
        OSError: it cannot be written.
    """
    save_json(folder / f"{batch_id:010d}.json", {"version": VERSION, "wakes": wakeup_times_ms})
    filesystem = folder.filesystem()
    # The planner may be about to read the previous file.
    for name in _names(folder)[:-2]:
        with contextlib.suppress(FileNotFoundError):
            filesystem.delete_file(f"{folder.root}/{name}")


def _names(folder: Place) -> list[str]:
    files = folder.filesystem().get_file_info(fs.FileSelector(folder.root, allow_not_found=True))
    return sorted(file.base_name for file in files if file.base_name.removesuffix(".json").isdecimal())


def _wakeup_times(fields: dict[str, Any], _version: int) -> dict[str, int]:
    times_ms: dict[str, int] = stored(dict[str, int], fields["wakes"])
    return times_ms
