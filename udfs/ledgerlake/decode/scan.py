"""The scan that finds runs of MESSAGE frames in the receive buffer without an object for each frame
(a ``wire.connection.Scan``).
"""

from __future__ import annotations

import numpy as np

from ledgerlake.decode import kernels as k
from ledgerlake.wire.connection import EntriesReceived

# The sizes of a frame, a MESSAGE with the required fields, and the shortest entry.
_LEAST_FRAME_BYTES = 24

_MOST_ENTRIES = 4096


def scan(unread: memoryview, limit_bytes: int) -> EntriesReceived | None:
    """Return the run at the beginning of unread bytes; None if the first frame is incomplete or not
    a plain MESSAGE.
    """
    most = min(len(unread) // _LEAST_FRAME_BYTES, _MOST_ENTRIES)
    if most == 0:
        return None
    rows, ids = np.empty((most, 3), dtype=np.int64), np.empty(2, dtype=np.int64)
    count = k.scan_messages(np.frombuffer(unread, dtype=np.uint8), limit_bytes, rows, ids)
    if count == 0:
        return None
    entry_ids, frame_ends, message_counts = np.ascontiguousarray(rows[:count].T)
    frames = bytes(unread[: int(frame_ends[-1])])
    return EntriesReceived(int(ids[0]), int(ids[1]), entry_ids, frame_ends, message_counts, frames)
