"""When the planner, in a process of its own, is to plan a micro-batch although nothing new has come
(see ``source.wake_ups``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ledgerlake.source.wake_ups import load_wakes, newest_wakes_batch, save_wakes

if TYPE_CHECKING:
    from ledgerlake.pipeline.checkpoint import Checkpoint
    from ledgerlake.pipeline.cursors import LastRun
    from ledgerlake.stored.places import Place


class WakeUps:
    """The times of one pipeline's topic partitions, and the folder in which the planner reads them.

    ``batch_id`` is the micro-batch whose file counts; None before the first.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder = wakes_folder(checkpoint)
        self.batch_id: int | None = None
        self._checkpoint = checkpoint
        self._wakes_ms: dict[str, int] | None = None

    def load(self, last_run: LastRun | None) -> None:
        """Find out when topic partitions want a micro-batch; if nobody can say it, all of them want
        one now, which tells it.
        """
        self.batch_id = newest_wakes_batch(self.folder)
        self._wakes_ms = known_wakes(self._checkpoint, last_run)
        committed = self._checkpoint.log.committed_offset()
        if self._wakes_ms is None and committed is not None:
            # A time that is not beyond the clock of the last micro-batch would wake nobody.
            now_ms = int(time.time() * 1000)
            self._save(0, {name: max(now_ms, (one.clock_ms or 0) + 1) for name, one in committed.items()})

    def note(self, batch_id: int, changed_ms: dict[str, int | None]) -> None:
        """Tell the planner, in a process of its own, when it is to plan a batch although nothing
        new has come.
        """
        every_ms = {**(self._wakes_ms or {}), **changed_ms}
        wakes_ms = {name: time_ms for name, time_ms in every_ms.items() if time_ms is not None}
        if wakes_ms != self._wakes_ms:
            self._save(batch_id, wakes_ms)

    def _save(self, batch_id: int, wakes_ms: dict[str, int]) -> None:
        # The file with the highest number counts, and one may have been left with a higher one.
        self.batch_id = batch_id if self.batch_id is None else max(batch_id, self.batch_id)
        save_wakes(self.folder, self.batch_id, wakes_ms)
        self._wakes_ms = wakes_ms


def known_wakes(checkpoint: Checkpoint, last_run: LastRun | None) -> dict[str, int] | None:
    """Return when topic partitions want a micro-batch; None if what is noted may be older than the
    state, as in a checkpoint that was copied while the pipeline ran, file by file.

    Args:
        last_run: the last micro-batch that was run, and the file of times that counted behind it.
    """
    folder, committed = wakes_folder(checkpoint), checkpoint.log.last_committed()
    if last_run is None or last_run.wakes_batch != newest_wakes_batch(folder):
        return None
    if committed is not None and last_run.batch_id < committed:
        return None
    return load_wakes(folder)


def wakes_folder(checkpoint: Checkpoint) -> Place:
    """The folder in which the planner reads the times."""
    return checkpoint.folder / "ledgerlake" / "wakes"
