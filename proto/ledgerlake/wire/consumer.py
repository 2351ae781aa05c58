"""Flow of one consumer, counted in messages as the broker counts.

One permit is one message: an entry with a batch of N costs N permits, a chunk or a single message
one. The broker may overdraw by the last batch and then waits. Slots that are never shown to anybody
are charged too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Permits:
    """The number of messages that the broker may still send; the caller sends FLOW for what
    ``take`` returns.
    """

    window: int
    outstanding: int = 0

    def open(self) -> int:
        """Permits for a fresh consumer."""
        self.outstanding = self.window
        return self.window

    def take(self, message_count: int) -> int:
        """Account for one entry that arrived; returns how many permits to grant now (0: none yet).

        Half a window is granted at a time, so that FLOW commands stay rare and the pipe stays full.
        """
        self.outstanding -= message_count
        if self.outstanding > self.window // 2:
            return 0
        # A batch may claim any count. Brokers read permits as a signed number and close the
        # connection at a negative one.
        granted = min(self.window - self.outstanding, 2**31 - 1)
        self.outstanding = self.window
        return granted
