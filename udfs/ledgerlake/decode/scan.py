"""Runs of MESSAGE frames straight from the receive buffer, without an object for each (a
``wire.connection.Scan``).
"""

from __future__ import annotations

import numpy as np

from ledgerlake.decode import kernels as k
from ledgerlake.wire.connection import EntriesReceived

# Frame sizes, MESSAGE with the required fields, and the shortest entry.
_LEAST_FRAME_BYTES = 24

_MOST_ENTRIES = 4096


def scan(waiting: memoryview, limit_bytes: int) -> EntriesReceived | None:
    """The run that some bytes begin with, or None if the first frame is not whole or no plain
    MESSAGE.
    """
    most = min(len(waiting) // _LEAST_FRAME_BYTES, _MOST_ENTRIES)
    if most == 0:
        return None
    rows, found = np.empty((most, 3), dtype=np.int64), np.empty(2, dtype=np.int64)
    count = k.scan_messages(np.frombuffer(waiting, dtype=np.uint8), limit_bytes, rows, found)
    if count == 0:
        return None
    entry_ids, frame_ends, message_counts = np.ascontiguousarray(rows[:count].T)
    frames = bytes(waiting[: int(frame_ends[-1])])
    return EntriesReceived(int(found[0]), int(found[1]), entry_ids, frame_ends, message_counts, frames)
