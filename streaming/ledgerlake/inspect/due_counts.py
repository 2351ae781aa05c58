"""How many of a pipeline's delayed messages are due when, as of its last micro-batch.

The pipeline keeps the counts in its checkpoint beside the wake-up times (see
``source.wakeup_files``), so they are read without Spark, however many messages wait.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from ledgerlake.delay.due_times import DueSpan, spans_of_length
from ledgerlake.errors import SetupError
from ledgerlake.pipeline.batch_ends import last_run
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.wakeups import wakeup_folder
from ledgerlake.source.wakeup_files import newest_wakeup_batch, read_wakeup_times

if TYPE_CHECKING:
    from ledgerlake.options.config import Config
    from ledgerlake.pipeline.batch_ends import LastRun


def due_counts(config: Config, length_ms: int) -> list[DueSpan]:
    """Count the delayed messages by when they are due. Messages that were cancelled or replaced
    count until they would be due.

    Args:
        length_ms: a minute, an hour or a day. Spans far ahead are longer (see ``delay.due_times``).

    Returns:
        The spans in which messages are due, in order.

    Raises:
        SetupError: no pipeline has run with this checkpoint, or it does not have the counts.
        OffsetError: a newer release wrote it, or the pipeline has not counted all messages yet.
    """
    checkpoint = Checkpoint(config.checkpoint_place)
    # In this order, because a pipeline that runs writes the counts first.
    run, folder = last_run(checkpoint), wakeup_folder(checkpoint)
    newest, committed = newest_wakeup_batch(folder), checkpoint.log.last_committed()
    if run is None and committed is None:
        raise SetupError(
            f"the checkpoint {config.checkpoint_place} holds no state; run the pipeline first"
        )
    wakeups = None if run is None else read_wakeup_times(folder)
    if run is None or wakeups is None or _is_older(newest, run, committed):
        raise SetupError(
            f"the checkpoint {config.stream.checkpoint} does not say when its delayed messages are "
            "due, because its files "
            "were copied one by one; run the pipeline: its next micro-batch counts them"
        )
    return spans_of_length(chain.from_iterable(wakeups.due_spans.values()), length_ms)


def _is_older(newest: int | None, run: LastRun, committed: int | None) -> bool:
    """Return whether the counts are older than the state. They may be newer than ``last_run``: the
    pipeline was ended before it had written that.
    """
    written = -1 if newest is None else newest
    return written < (run.wakes_batch or 0) or max(run.batch_id, written) < (committed or 0)
