"""When a pipeline plans its next micro-batch: at the times of its trigger, and when messages are
due.

As with Spark's trigger, the times are multiples of the interval since 1970, and if one has passed
while a micro-batch ran, the next one is planned at once; with an interval of 0 each one is. The
query itself has a trigger of 0, and its planner waits: Spark's trigger knows nothing of messages
that are due. Pure: the clock is the caller's, in milliseconds.
"""

from __future__ import annotations


class TriggerTimes:
    """Remembers until when plain messages wait."""

    def __init__(self, interval_ms: int) -> None:
        # Every millisecond is a time of the shortest interval.
        self._interval_ms = max(interval_ms, 1)
        self._next_ms = 0

    def pause_ms(self, clock_ms: int, due_ms: int | None) -> int:
        """Return how long to wait before a micro-batch is planned.

        Args:
            due_ms: when the next message is due; None if no message is delayed.
        """
        pause_ms = max(0, self._next_ms - clock_ms)
        if pause_ms > self._interval_ms:
            # The clock was set back.
            pause_ms = 0
        return pause_ms if due_ms is None else min(pause_ms, max(0, due_ms + 1 - clock_ms))

    def plan(self, clock_ms: int) -> None:
        """Take note that a micro-batch is planned."""
        if clock_ms >= self._next_ms or self._next_ms - clock_ms > self._interval_ms:
            self._next_ms = clock_ms - clock_ms % self._interval_ms + self._interval_ms
