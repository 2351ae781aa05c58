"""When a topic partition wants a micro-batch although nothing new has come: told by the pipeline, read by the planner.

The two live in different processes. After each batch the pipeline writes, where it changed,

    {"version": 1, "wakes": {"persistent://public/default/orders-partition-0": 1777626000123}}

(milliseconds since 1970) beside the checkpoint. A planned batch carries the clock in its offset, so that it does the same
when it is run again; this file only decides when one is planned. Losing it delays what waits until the next entry comes.
"""

from __future__ import annotations

from typing import Any

from ledgerlake.errors import OffsetError
from ledgerlake.files import load_stored, save_json
from ledgerlake.state.stored import stored

VERSION = 1


def load_wakes(path: str) -> dict[str, int]:
    """When each topic partition wants a batch; what cannot be read, or is of a newer version, says nothing.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        return load_stored(path, "wakes", _wakes, VERSION) or {}
    except OffsetError:
        return {}


def save_wakes(path: str, wakes_ms: dict[str, int]) -> None:
    """Write it anew.

    Raises:
        OSError: it cannot be written.
    """
    save_json(path, {"version": VERSION, "wakes": wakes_ms})


def _wakes(data: dict[str, Any], _version: int) -> dict[str, int]:
    found: dict[str, int] = stored(dict[str, int], data["wakes"])
    return found
