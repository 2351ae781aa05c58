"""Retries with exponential backoff: how long to wait before the next attempt, and when to give up.
The policy takes the clock as an argument. Failures that last are logged.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ledgerlake.errors import LedgerlakeError, is_retryable

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

# How long a call may fail before the error is logged, and how often it is logged again.
_LOG_EVERY_S = 15.0


@dataclass
class Backoff:
    """Pauses between failures that double; any success starts over.

    ``give_up_after_s`` counts from the first failure since the last success.
    """

    first_s: float = 0.1
    most_s: float = 5.0
    give_up_after_s: float = 120.0
    _next_s: float = 0.0
    _failing_since_s: float | None = None
    _logged_s: float = 0.0

    def failed(self, now_s: float, error: Exception) -> float | None:
        """Return the pause before the next attempt; None if it is time to give up."""
        if self._failing_since_s is None:
            self._failing_since_s = self._logged_s = now_s
            self._next_s = self.first_s
        if now_s - self._failing_since_s >= self.give_up_after_s:
            return None
        if now_s - self._logged_s >= _LOG_EVERY_S:
            _log.warning("%s; trying again since %.0f s", error, now_s - self._failing_since_s)
            self._logged_s = now_s
        pause_s = self._next_s
        self._next_s = min(self._next_s * 2, self.most_s)
        return pause_s

    def succeeded(self) -> None:
        self._failing_since_s = None


def with_retries(call: Callable[[], Result], give_up_after_s: float) -> Result:
    """Call until it succeeds, fails with an error that is not worth a retry, or has failed for
    ``give_up_after_s``.

    Raises:
        LedgerlakeError: the last failure.
    """
    backoff = Backoff(give_up_after_s=give_up_after_s)
    while True:
        try:
            return call()
        except LedgerlakeError as error:
            pause_s = backoff.failed(time.monotonic(), error) if is_retryable(error) else None
            if pause_s is None:
                raise
            time.sleep(pause_s)
