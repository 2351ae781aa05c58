"""Removing what killed tasks left in the tables' folders, and what OPTIMIZE or DELETE put out of use: Delta's VACUUM, by ``deltalake``.

A file that the table uses is never touched, nor one younger than the retention, such as those of a micro-batch in work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from ledgerlake.errors import TableError, UsageError

if TYPE_CHECKING:
    from ledgerlake.query.config import Config

# As Delta's own default; a reader of an older version still needs files that are out of use now.
DEFAULT_RETENTION_HOURS = 168


@dataclass(frozen=True)
class Vacuumed:
    """Files of one table that were removed, or would be."""

    table: str
    files: list[str]


def vacuum(config: Config, retention_hours: int = DEFAULT_RETENTION_HOURS, *, dry_run: bool = False) -> list[Vacuumed]:
    """Remove what neither table uses and what is older than so many hours; with ``dry_run`` only say what.

    Raises:
        UsageError: less than an hour, in which a micro-batch could be in work.
        TableError: a table cannot be opened or its files not removed.
    """
    if retention_hours < 1:
        raise UsageError("the retention is less than an hour, and files of a micro-batch in work could be older")
    return [_vacuum(path, retention_hours, dry_run) for path in (config.delta.path, config.delta.rejects_path)]


def _vacuum(path: str, retention_hours: int, dry_run: bool) -> Vacuumed:
    try:
        found = DeltaTable(path).vacuum(
            retention_hours=retention_hours, dry_run=dry_run, enforce_retention_duration=False, full=True
        )
    except (DeltaError, OSError) as error:
        raise TableError(f"the table at {path} cannot be vacuumed: {str(error).splitlines()[0][:200]}") from None
    return Vacuumed(path, sorted(found))
