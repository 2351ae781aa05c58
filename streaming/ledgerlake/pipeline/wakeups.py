"""Tells the planner, in a process of its own, when topic partitions need a micro-batch without new
entries (see ``source.wakeup_files``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.source.wakeup_files import load_wakeup_times, newest_wakeup_batch, save_wakeup_times

if TYPE_CHECKING:
    from ledgerlake.pipeline.checkpoint import Checkpoint
    from ledgerlake.pipeline.cursors import LastRun
    from ledgerlake.stored.places import Place


class Wakeups:
    """The wake-up times of one pipeline's topic partitions, and the folder in which the planner
    reads them.

    ``batch_id`` is the micro-batch whose file the planner reads; None before the first.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder = wakeup_folder(checkpoint)
        self.batch_id: int | None = None
        self._checkpoint = checkpoint
        self._wakeup_times_ms: dict[str, int] | None = None

    def topic_partitions(self) -> list[str] | None:
        """Return the topic partitions that have a wake-up time, which are those with messages in
        state; None if they are not known.
        """
        return None if self._wakeup_times_ms is None else list(self._wakeup_times_ms)

    def load(self, last_run: LastRun | None) -> None:
        """Load the wake-up times. If they are not known, wake up all topic partitions now: that
        micro-batch brings their times.
        """
        self.batch_id = newest_wakeup_batch(self.folder)
        self._wakeup_times_ms = known_wakeup_times(self._checkpoint, last_run)
        committed = self._checkpoint.log.committed_offset()
        if self._wakeup_times_ms is None and committed is not None:
            # A time that is not after the clock of the last micro-batch would wake up nothing.
            self._save(0, {name: (offset.clock_ms or 0) + 1 for name, offset in committed.items()})

    def update(self, batch_id: int, changed_ms: dict[str, int | None]) -> None:
        """Take the wake-up times after a micro-batch, and write them unless the planner reads the
        same already. A second process may have replaced them before it was refused.

        Args:
            changed_ms: the times of the topic partitions in the batch; None if one needs no batch.
        """
        merged_ms = {**(self._wakeup_times_ms or {}), **changed_ms}
        wakeup_times_ms = {name: time_ms for name, time_ms in merged_ms.items() if time_ms is not None}
        has_changed = wakeup_times_ms != self._wakeup_times_ms
        if has_changed or (wakeup_times_ms and wakeup_times_ms != load_wakeup_times(self.folder)):
            self._save(batch_id, wakeup_times_ms)

    def _save(self, batch_id: int, wakeup_times_ms: dict[str, int]) -> None:
        # The planner reads the file with the highest number, and an earlier run may have left a
        # higher one.
        self.batch_id = batch_id if self.batch_id is None else max(batch_id, self.batch_id)
        save_wakeup_times(self.folder, self.batch_id, wakeup_times_ms)
        self._wakeup_times_ms = wakeup_times_ms


def known_wakeup_times(checkpoint: Checkpoint, last_run: LastRun | None) -> dict[str, int] | None:
    """Return the wake-up times of topic partitions; None if they may be older than the state, as in
    a checkpoint that was copied file by file while the pipeline ran.

    Args:
        last_run: the last micro-batch that was run, and the file of times that was in use after it.
    """
    folder, committed = wakeup_folder(checkpoint), checkpoint.log.last_committed()
    if last_run is None or last_run.wakes_batch != newest_wakeup_batch(folder):
        return None
    if committed is not None and last_run.batch_id < committed:
        return None
    return load_wakeup_times(folder)


def wakeup_folder(checkpoint: Checkpoint) -> Place:
    """Return the folder in which the planner reads the times."""
    return checkpoint.folder / "ledgerlake" / "wakes"
