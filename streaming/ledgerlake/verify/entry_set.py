"""Which entries are in a set of entries: those in ``rejects``, for ``verify``. They are in memory,
with 16 bytes each, and messages with 24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ledgerlake.table.ordered_files import packed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ledgerlake.verify.table_rows import Keys


class EntrySet:
    """Entries of one topic partition, or messages of its batches.

    Args:
        entries: ledger and entry of each, and the batch index of a message, in any order, and any
            number of times.
    """

    def __init__(self, entries: Keys) -> None:
        self._entries = np.unique(packed(entries))

    def contains(self, entries: Keys) -> NDArray[np.bool_]:
        """Return a mask of the entries that are in the set."""
        if not len(self._entries):
            return np.zeros(len(entries), dtype=bool)
        wanted = packed(entries)
        places = np.searchsorted(self._entries, wanted)
        is_there: NDArray[np.bool_] = (
            self._entries[np.minimum(places, len(self._entries) - 1)] == wanted
        )
        return is_there
