"""Work beside a stream that may fail and is tried again, for threads of the driver: it never ends
the pipeline, and a failure that lasts is logged once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ledgerlake.errors import LedgerlakeError
from ledgerlake.stored.secrets import said_in_short

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class Attempts:
    """The failures of some work.

    Args:
        name: of the work, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._failures: dict[str, str] = {}
        self.failed_attempts = 0

    @property
    def has_failed(self) -> bool:
        """Return whether the last attempt of any part failed."""
        return bool(self._failures)

    def forget(self, part: str) -> None:
        """Forget the last attempt of a part, which there is no more."""
        self._failures.pop(part, None)

    def attempt(self, part: str, work: Callable[[], object]) -> bool:
        """Do a part of the work, and log a failure unless the last attempt failed alike. Return
        whether it succeeded.
        """
        try:
            work()
        # A failure in a library's native part may be no Exception.
        except BaseException as error:
            reason = error.message if isinstance(error, LedgerlakeError) else said_in_short(error)
            if self._failures.get(part) != reason:
                _log.warning("%s failed, and will be tried again: %s", self._name, reason)
            self._failures[part] = reason
            self.failed_attempts += 1
            return False
        self._failures.pop(part, None)
        return True
