"""A stream of bundles as a stream of whole, decoded messages and of rejects, for sinks that are not ours.

Everything passes the stateful stage here: bundles untouched, chunks one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass
