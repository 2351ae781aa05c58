"""Flow control of one consumer, counted in messages as the broker counts.

One permit is one message: an entry with a batch of N messages uses N permits, a chunk or a single
message uses one. The broker may exceed the permits by the last batch and then waits. Messages of a
batch that compaction removed are counted too.
"""

from __future__ import annotations

from dataclasses import dataclass

# The count of a batch may be any number. Brokers read permits as a signed number and close the
# connection if it is negative.
MOST_PERMITS = 2**31 - 1


@dataclass
class Permits:
    """The number of messages that the broker may still send; the caller sends FLOW for the number
    that ``take`` returns.
    """

    window: int
    outstanding: int = 0

    def open(self, permits: int | None = None) -> int:
        """Return the permits of a new consumer; None for a window."""
        self.outstanding = self.window if permits is None else permits
        return self.outstanding

    def take(self, message_count: int) -> int:
        """Count a received entry; return how many permits to grant now (0: none yet).

        Half a window is granted at a time, so that FLOW commands are rare and the broker does not
        wait for permits.
        """
        self.outstanding -= message_count
        if self.outstanding > self.window // 2:
            return 0
        granted = min(self.window - self.outstanding, MOST_PERMITS)
        self.outstanding = self.window
        return granted
