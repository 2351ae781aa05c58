"""Decides whether a micro-batch waits for more messages: ``minRowsPerTrigger`` and
``maxTriggerDelay``, as in Spark's Kafka source.

A batch is deferred while there are fewer messages than the minimum, but for no longer than the
delay since the last batch was admitted. The first batch after a start is never deferred, because it
is not known how long its messages have waited.
"""

from __future__ import annotations


class BatchAdmission:
    """Remembers when a micro-batch was last admitted. The clock is the caller's, in
    milliseconds.
    """

    def __init__(self, min_rows: int, max_delay_ms: int) -> None:
        self.min_rows = min_rows
        self._max_delay_ms = max_delay_ms
        self._admitted_ms: int | None = None

    def should_defer(self, rows: int, clock_ms: int) -> bool:
        """Return whether a batch of ``rows`` messages, at least one, waits for more."""
        may_wait = (
            self._admitted_ms is not None and clock_ms - self._admitted_ms < self._max_delay_ms
        )
        if may_wait and rows < self.min_rows:
            return True
        self._admitted_ms = clock_ms
        return False
