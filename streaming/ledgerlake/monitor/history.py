"""The numbers of a query over the last quarter of an hour, one sample for each five seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

STEP_MS = 5_000
_SAMPLES = 180


@dataclass(frozen=True)
class Sample:
    """The numbers at a time; ``messages`` since the start. None: not known."""

    time_ms: int
    messages: int
    lag_messages: int | None
    delayed: int


class History:
    """The samples of a query, the oldest first."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=_SAMPLES)

    def add(self, sample: Sample) -> None:
        """Add a sample, or replace that of the same five seconds. If there was none for long, the
        last one held until now: messages that come after a pause did not come during it.
        """
        last = self.samples[-1] if self.samples else None
        if last is not None and sample.time_ms // STEP_MS <= last.time_ms // STEP_MS:
            self.samples.pop()
        elif last is not None and sample.time_ms - last.time_ms > 2 * STEP_MS:
            self.samples.append(replace(last, time_ms=sample.time_ms - STEP_MS))
        self.samples.append(sample)
