"""Properties of a table that are a number or a flag. Any writer may set them to any text, and Delta
reads a flag in small and large letters. A number that cannot be is the default, and no error: they
are read when a commit has landed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deltalake import DeltaTable

# The default of delta-rs; Delta Spark's is 10.
_CHECKPOINT_INTERVAL = 100

_COUNT = re.compile(r"0*[1-9]\d{0,8}", re.ASCII)


def checkpoint_interval(table: DeltaTable) -> int:
    """Return after how many commits the log of a table gets a checkpoint."""
    text = table.metadata().configuration.get("delta.checkpointInterval", "").strip()
    return int(text) if len(text) < 20 and _COUNT.fullmatch(text) else _CHECKPOINT_INTERVAL


def is_on(table: DeltaTable, name: str, *, default: bool = False) -> bool:
    """Return whether a flag of a table is set.

    Args:
        default: what a table that does not say it has.
    """
    text = table.metadata().configuration.get(name)
    return default if text is None else text.strip().lower() == "true"
