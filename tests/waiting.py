"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def wait_until(condition: Callable[[], bool]) -> None:
    """Return as soon as it is so; a machine may be slow, so only what will never be so fails."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.05)
