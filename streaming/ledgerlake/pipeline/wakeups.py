"""Tells the planner, in a process of its own, when topic partitions need a micro-batch without new
entries (see ``source.wakeup_files``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ledgerlake.source.wakeup_files import (
    WakeupTimes,
    load_wakeup_times,
    newest_digest,
    newest_wakeup_batch,
    save_wakeup_times,
)

if TYPE_CHECKING:
    from ledgerlake.delay.due_times import DueSpan
    from ledgerlake.pipeline.batch_ends import LastRun
    from ledgerlake.pipeline.checkpoint import Checkpoint
    from ledgerlake.stored.places import Place


# After so many files with changes, a file has all spans again.
_MOST_CHANGES = 32


class Wakeups:
    """The wake-up times of one pipeline's topic partitions, and the folder in which the planner
    reads them.

    ``batch_id`` is the micro-batch whose file the planner reads; None before the first.
    """

    def __init__(self, checkpoint: Checkpoint, expire_after_ms: int) -> None:
        self.folder = wakeup_folder(checkpoint)
        self.batch_id: int | None = None
        self._checkpoint = checkpoint
        self._expire_after_ms = expire_after_ms
        self._known: WakeupTimes | None = None
        # The digest of the file that the planner reads.
        self._written: bytes | None = None
        # Changed spans that may be written before all are written again: as many as there are.
        self._spans_left = 0

    def topic_partitions(self) -> list[str] | None:
        """Return the topic partitions that have a wake-up time, which are those with messages in
        state; None if they are not known.
        """
        return None if self._known is None else list(self._known.times_ms)

    @property
    def due_spans(self) -> dict[str, list[DueSpan]]:
        """Return how many delayed messages are due when, for the topic partitions for which that is
        known.
        """
        return {} if self._known is None else self._known.due_spans

    def load(self, last_run: LastRun | None) -> None:
        """Load the wake-up times. If they are not known, wake up all topic partitions now. If they
        hold for another ``expire_after``, wake up all that have a time. That micro-batch brings
        their times.
        """
        self.batch_id = newest_wakeup_batch(self.folder)
        self._known = known = known_wakeup_times(self._checkpoint, last_run)
        self._written = newest_digest(self.folder)
        committed = self._checkpoint.log.committed_offset()
        if committed is None:
            return
        # A time that is not after the clock of the last micro-batch would wake up nothing.
        now_ms = {name: (offset.clock_ms or 0) + 1 for name, offset in committed.items()}
        if known is None:
            self._save(0, WakeupTimes(now_ms, expire_after_ms=self._expire_after_ms))
        elif known.expire_after_ms != self._expire_after_ms:
            times_ms = {
                name: min(time_ms, now_ms.get(name, time_ms))
                for name, time_ms in known.times_ms.items()
            }
            self._save(0, WakeupTimes(times_ms, known.due_spans, self._expire_after_ms))

    def update(
        self, batch_id: int, changed_ms: dict[str, int | None], due_spans: dict[str, list[DueSpan]]
    ) -> None:
        """Take what a micro-batch has changed, and write it unless the planner reads the same
        already. A second process may have replaced the file before it was refused.

        Args:
            changed_ms: the times of the topic partitions in the batch; None if one needs no batch.
            due_spans: the spans of those topic partitions.
        """
        known = self._known or WakeupTimes()
        merged_ms = {**known.times_ms, **changed_ms}
        times_ms = {name: time_ms for name, time_ms in merged_ms.items() if time_ms is not None}
        spans = {
            name: spans
            for name, spans in {**known.due_spans, **due_spans}.items()
            if name in times_ms
        }
        wakeups = WakeupTimes(times_ms, spans, self._expire_after_ms)
        is_replaced = newest_digest(self.folder) != self._written
        if wakeups != self._known or (times_ms and is_replaced):
            self._save(
                batch_id,
                wakeups,
                None if is_replaced else self._changed_spans(batch_id, known, wakeups),
            )

    def _changed_spans(
        self, batch_id: int, known: WakeupTimes, wakeups: WakeupTimes
    ) -> dict[str, list[DueSpan]] | None:
        """Return the spans that have changed; None if all are to be written, because the files with
        changes would have more spans than that.
        """
        spans = wakeups.due_spans
        changed = {
            name: of_name for name, of_name in spans.items() if known.due_spans.get(name) != of_name
        }
        count, changed_count = (sum(map(len, some.values())) for some in (spans, changed))
        self._spans_left -= max(changed_count, count // _MOST_CHANGES, 1)
        if self._spans_left < 0 or self.batch_id is None or self.batch_id >= batch_id:
            self._spans_left = count
            return None
        return changed

    def _save(
        self, batch_id: int, wakeups: WakeupTimes, changed: dict[str, list[DueSpan]] | None = None
    ) -> None:
        """
        Args:
            changed: the spans that the former file does not have; None to write a file that extends
                none.
        """
        # The planner reads the file with the highest number, and an earlier run may have left a
        # higher one.
        former, self.batch_id = (
            self.batch_id,
            batch_id if self.batch_id is None else max(batch_id, self.batch_id),
        )
        file = wakeups if changed is None else replace(wakeups, due_spans=changed)
        extends = None if changed is None else former
        self._written = save_wakeup_times(self.folder, self.batch_id, file, extends)
        self._known = wakeups


def known_wakeup_times(checkpoint: Checkpoint, last_run: LastRun | None) -> WakeupTimes | None:
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
