"""Removes files of killed tasks from the tables' folders, and files that OPTIMIZE or DELETE made
unused.

``deltalake`` lists the files that the table does not use and that are older than the retention, so
that no file of a running micro-batch is among them. Of these, only data files directly in the
table's folder are removed, by their names:

    part-<micro-batch>-<partition>-<number>-<uuid>.<codec>.parquet    of our tasks (see ``operators.partition_writer`` and ``table.ordered_files``)
    part-compacted-<number>-<uuid>.<codec>.parquet                    of ``table.compaction``; part-clustered- of a clustered table
    part-<number>-<uuid>[-.]c<number>.<codec>.parquet                 of Delta's own writers

``deltalake`` looks at the first time when a file was removed. But a commit that changes the deletion
vector of a file removes it and adds it again. So the log of a table with deletion vectors is read
here: a file stays while a version within the retention names it. The vectors of tables with the
latest messages (see ``table.latest_table``) are in files of their own, ``deletion_vector_<uuid>.bin``,
and ``deltalake`` counts each of them as unused. They are judged in the same way; those of other
tables are Spark's.

All other files in the folder or below it are left alone: another table, a checkpoint, files of a
user.
"""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltalake.exceptions import DeltaError, TableNotFoundError
from pyarrow import fs

from ledgerlake.errors import TableAccessError, UsageError
from ledgerlake.table.deletion_vectors import file_of
from ledgerlake.table.delta_table import LATEST, MODE
from ledgerlake.table.log_state import read_log_state, vectors_of
from ledgerlake.table.open_table import no_table, open_delta

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deltalake import DeltaTable

    from ledgerlake.stored.places import Place

# Delta's own default. A reader of an older version still needs files that are unused now.
DEFAULT_RETENTION_HOURS = 168

_OUR_FILE = re.compile(r"part-(\d{8,}-\d{5,}|compacted|clustered)-\d{3,}-.*\.parquet")
_UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_DATA_FILE = re.compile(
    rf"part-((\d{{8,}}-\d{{5,}}|compacted|clustered)-\d{{3,}}-{_UUID}|\d{{5,}}-{_UUID}[-.]c\d{{3,}})(\.[a-z0-9]+)?\.parquet"
)


def is_own_file(name: str) -> bool:
    """Return whether a file below a table has a name that Ledgerlake gives."""
    return is_data_file(name) and _OUR_FILE.fullmatch(name) is not None


def is_data_file(name: str) -> bool:
    """Return whether a file below a table has the name of a data file."""
    return _DATA_FILE.fullmatch(name) is not None


_VECTORS = re.compile(rf"deletion_vector_{_UUID}\.bin")
_DURATION = re.compile(r"interval (\d+) (hour|day|week)s?")
_HOURS = {"hour": 1, "day": 24, "week": 7 * 24}


@dataclass(frozen=True)
class Vacuumed:
    """The files of one table that were removed, or would be."""

    table: str
    files: list[str]


def vacuum(
    places: Iterable[Place],
    retention_hours: int = DEFAULT_RETENTION_HOURS,
    *,
    dry_run: bool = False,
    keeps_longer: bool = False,
) -> list[Vacuumed]:
    """Remove files that the tables at these places do not use and that are older than the
    retention; with ``dry_run`` only list them.

    Args:
        keeps_longer: the retention of the table's own properties holds if it is longer.

    Raises:
        UsageError: the retention is less than an hour, the time of a running micro-batch.
        TableError: a table cannot be opened or its files not removed.
    """
    if retention_hours < 1:
        raise UsageError("the retention is less than an hour, and files of a micro-batch in work could be older")
    return [_vacuum(path, retention_hours, dry_run, keeps_longer) for path in places]


def _vacuum(path: Place, retention_hours: int, dry_run: bool, keeps_longer: bool) -> Vacuumed:
    try:
        table = open_delta(path)
        unused = set(
            table.vacuum(retention_hours=retention_hours, dry_run=True, enforce_retention_duration=False, full=True)
        )
        if keeps_longer:
            unused &= set(table.vacuum(dry_run=True, full=True))
        names = sorted(name for name in unused if is_data_file(name))
        if "deletionVectors" in (table.protocol().reader_features or ()):
            hours = max(retention_hours, _own_retention_hours(table) if keeps_longer else 0)
            is_latest = table.metadata().configuration.get(MODE) == LATEST
            names = _unused_with_vectors(path, table, names, hours, removes_vectors=is_latest)
        if not dry_run:
            for name in names:
                # Keys may be renewed before the last of many files is gone.
                with contextlib.suppress(FileNotFoundError):
                    path.filesystem().delete_file((path / name).root)
    except TableNotFoundError:
        raise no_table(path) from None
    except (DeltaError, OSError, ValueError) as error:
        raise TableAccessError(f"the table at {path} cannot be vacuumed: {path.reason(error)}") from None
    return Vacuumed(str(path), names)


def _unused_with_vectors(
    path: Place, table: DeltaTable, names: list[str], retention_hours: int, *, removes_vectors: bool
) -> list[str]:
    """Return those of a table's unused files that no version within the retention names, and files
    with deletion vectors likewise.

    Args:
        removes_vectors: whether the files with vectors are the pipeline's own.
    """
    before_s = time.time() - 3600 * retention_hours
    files = path.filesystem().get_file_info(fs.FileSelector(path.root, allow_not_found=True)) if removes_vectors else ()
    vectors = {
        file.base_name for file in files if _VECTORS.fullmatch(file.base_name) and file.mtime_ns / 1e9 < before_s
    }
    if not names and not vectors:
        return []
    state = read_log_state(path, table.version())
    kept = [action for action in state.removed if action.get("deletionTimestamp", 0) / 1000 >= before_s]
    actions = [*state.files.values(), *kept]
    used = {action["path"] for action in actions}
    if removes_vectors:
        used |= {file_of(vector) for vector in vectors_of(actions)}
    return sorted({*names, *vectors} - used)


def _own_retention_hours(table: DeltaTable) -> int:
    """Return how long the table's own property keeps unused files; a week, if it does not say it in
    a way that is known here.
    """
    text = table.metadata().configuration.get("delta.deletedFileRetentionDuration", "")
    found = _DURATION.fullmatch(text.strip())
    return int(found[1]) * _HOURS[found[2]] if found else DEFAULT_RETENTION_HOURS
