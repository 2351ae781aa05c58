"""How many of a pipeline's delayed messages are due when, as of its last micro-batch.

The pipeline keeps the counts in its checkpoint beside the wake-up times (see
``source.wakeup_files``), so they are read without Spark, however many messages wait.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING

from ledgerlake.delay.due_times import DueSpan, spans_of_length
from ledgerlake.errors import SetupError
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.cursors import last_run
from ledgerlake.pipeline.wakeups import known_wakeup_times

if TYPE_CHECKING:
    from ledgerlake.options.config import Config

# A pipeline writes the counts, and then, in another file, that they are the newest.
_TRIES = 20
_POLL_S = 0.1


def due_counts(config: Config, length_ms: int) -> list[DueSpan]:
    """Count the delayed messages by when they are due. Messages that were cancelled or replaced count
    until they would be due.

    Args:
        length_ms: a minute, an hour or a day. Spans far ahead are longer (see ``delay.due_times``).

    Returns:
        The spans in which messages are due, in order.

    Raises:
        SetupError: no pipeline has run with this checkpoint, or it does not have the counts.
        OffsetError: a newer release wrote it.
    """
    checkpoint = Checkpoint(config.checkpoint_place)
    for _ in range(_TRIES):
        wakeups = known_wakeup_times(checkpoint, last_run(checkpoint))
        if wakeups is not None:
            return spans_of_length(chain.from_iterable(wakeups.due_spans.values()), length_ms)
        time.sleep(_POLL_S)
    if last_run(checkpoint) is None and checkpoint.log.last_committed() is None:
        raise SetupError(f"the checkpoint {config.stream.checkpoint} holds no state; run the pipeline first")
    raise SetupError(
        f"the checkpoint {config.stream.checkpoint} does not say when its delayed messages are due, because an earlier "
        "release wrote it, or it was copied while the pipeline ran; run the pipeline: its next micro-batch counts them"
    )
