"""Whether a micro-batch waits for more to come: ``minRowsPerTrigger`` and ``maxTriggerDelay``, as
in Spark's Kafka source.

A batch is held back while fewer messages are there than asked for, but for no longer than the delay
since the last one that was let go. The first after a start is never held back, since nobody knows
how long it has waited already.
"""

from __future__ import annotations


class Admission:
    """The planner's memory of when it last let a micro-batch go. The clock is the caller's, in
    milliseconds.
    """

    def __init__(self, min_rows: int, max_delay_ms: int) -> None:
        self.min_rows = min_rows
        self._max_delay_ms = max_delay_ms
        self._let_go_ms: int | None = None

    def holds(self, rows: int, clock_ms: int) -> bool:
        """Return whether a batch of so many messages, at least one, is held back."""
        waits = self._let_go_ms is not None and clock_ms - self._let_go_ms < self._max_delay_ms
        if waits and rows < self.min_rows:
            return True
        self._let_go_ms = clock_ms
        return False
