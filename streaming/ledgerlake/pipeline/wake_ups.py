"""When the planner, in a process of its own, is to plan a micro-batch although nothing new has come
(see ``source.wake_ups``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ledgerlake.source.wake_ups import load_wakes, save_wakes

if TYPE_CHECKING:
    from ledgerlake.pipeline.checkpoint import Checkpoint


class WakeUps:
    """The times of one pipeline's topic partitions, and the folder in which the planner reads them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder = wakes_folder(checkpoint)
        self._checkpoint = checkpoint
        self._wakes_ms: dict[str, int] | None = None

    def load(self) -> None:
        """Find out when topic partitions want a micro-batch; if nobody can say it, all of them want
        one now, which tells it.
        """
        self._wakes_ms = load_wakes(self.folder)
        committed = self._checkpoint.last_committed()
        if self._wakes_ms is None and committed is not None:
            self._wakes_ms = dict.fromkeys(self._checkpoint.offset(committed), int(time.time() * 1000))
            save_wakes(self.folder, committed, self._wakes_ms)

    def note(self, batch_id: int, changed_ms: dict[str, int | None]) -> None:
        """Tell the planner, in a process of its own, when it is to plan a batch although nothing
        new has come.
        """
        every_ms = {**(self._wakes_ms or {}), **changed_ms}
        wakes_ms = {name: time_ms for name, time_ms in every_ms.items() if time_ms is not None}
        if wakes_ms != self._wakes_ms:
            save_wakes(self.folder, batch_id, wakes_ms)
        self._wakes_ms = wakes_ms


def wakes_folder(checkpoint: Checkpoint) -> str:
    """The folder in which the planner reads the times."""
    return f"{checkpoint.folder}/ledgerlake/wakes"
