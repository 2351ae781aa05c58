"""Removes files of killed tasks from the tables' folders, and files that OPTIMIZE or DELETE made
unused.

A file stays while a version that is not older than the retention names it, or a table of another
format that has the same files. Of the others, those that are older than the retention are removed,
so that no file of a running micro-batch is among them. Only data files directly in the table's
folder are, by their names:

    part-<micro-batch>-<partition>-<number>-<uuid>.<codec>.parquet    of our tasks (see ``operators.partition_writer`` and ``table.ordered_files``)
    part-compacted-<number>-<uuid>.<codec>.parquet                    of ``table.compaction``; part-clustered- of a clustered table
    part-<number>-<uuid>[-.]c<number>.<codec>.parquet                 of Delta's own writers

Three things together tell which files the versions of that time name. A file that was added since
is young. The log says when a file was removed. But a checkpoint of the log leaves out files that
were removed before the time in the table's property, or more than a week ago if its writer cannot
read that property. So the version at the begin of the retention is opened too, or the oldest one
that can still be opened.

``deltalake`` lists the files that the log has not, and those that were removed for the first time
before the retention. But a commit that changes the deletion vector of a file removes it and adds it
again. So the log of a table with deletion vectors is read here. The vectors of tables with the
latest messages (see ``table.latest_table``) are in files of their own,
``deletion_vector_<uuid>.bin``, and ``deltalake`` counts each of them as unused. They are judged in
the same way; the vectors of other tables are Spark's.

All other files in the folder or below it are left alone: another table, a checkpoint, files of a
user.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake.exceptions import DeltaError, TableNotFoundError
from pyarrow import fs

from ledgerlake.errors import TableAccessError, UsageError
from ledgerlake.table.deletion_vectors import file_of
from ledgerlake.table.delta_table import LATEST, MODE
from ledgerlake.table.log_state import read_log_state, vectors_of, version_at
from ledgerlake.table.open_table import no_table, open_delta
from ledgerlake.table.retention import MOST_RETENTION_HOURS, retention_hours

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from deltalake import DeltaTable

    from ledgerlake.stored.places import Place

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


@dataclass(frozen=True)
class Vacuumed:
    """The files of one table that were removed, or would be."""

    table: str
    files: list[str]


def vacuum(
    path: Place,
    hours: int,
    *,
    overrules_table: bool = False,
    named_elsewhere: Callable[[], Collection[str]] = tuple,
    dry_run: bool = False,
) -> Vacuumed:
    """Remove files that the table at a path does not use and that are older than the retention.

    Args:
        hours: the retention, unless the table's own is longer.
        overrules_table: the table's own retention does not count.
        named_elsewhere: returns the names of files that stay, because tables of another format have
            them; it is asked if there is anything to remove.
        dry_run: only list the files.

    Raises:
        UsageError: the retention is less than an hour, the time of a running micro-batch, or
        absurd.
        TableError: the table cannot be opened or its files not removed, or it is not known whether
            they are in use.
    """
    if hours < 1:
        raise UsageError(
            "the retention is less than an hour, and files of a micro-batch in work could be older"
        )
    if hours > MOST_RETENTION_HOURS:
        raise UsageError(
            f"the retention is more than {MOST_RETENTION_HOURS:,} hours, which are 100 years"
        )
    try:
        table = open_delta(path)
        if not overrules_table:
            hours = math.ceil(min(max(hours, retention_hours(path, table)), MOST_RETENTION_HOURS))
        names = _unused(path, table, hours)
        if names:
            names = names.difference(named_elsewhere())
        if not dry_run:
            for name in names:
                # Keys may be renewed before the last of many files is gone.
                with contextlib.suppress(FileNotFoundError):
                    path.filesystem().delete_file((path / name).root)
    except TableNotFoundError:
        raise no_table(path) from None
    except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
        raise TableAccessError(
            f"the table at {path} cannot be vacuumed: {path.reason(error)}"
        ) from None
    return Vacuumed(str(path), sorted(names))


def _unused(path: Place, table: DeltaTable, hours: int) -> set[str]:
    """Return the old files of a table that no version within the retention names."""
    before_s = time.time() - 3600 * hours
    listed = table.vacuum(
        retention_hours=hours, dry_run=True, enforce_retention_duration=False, full=True
    )
    names = {name for name in listed if is_data_file(name)}
    has_vectors = "deletionVectors" in (table.protocol().reader_features or ())
    if has_vectors and table.metadata().configuration.get(MODE) == LATEST:
        names |= _old_vectors(path, before_s)
    if not names:
        return names
    first = version_at(path, before_s)
    if has_vectors:
        return names - _named_with_vectors(path, first, table.version(), before_s)
    return names.difference(pa.table(open_delta(path, first).get_add_actions())["path"].to_pylist())


def _old_vectors(path: Place, before_s: float) -> set[str]:
    files = path.filesystem().get_file_info(fs.FileSelector(path.root, allow_not_found=True))
    return {
        file.base_name
        for file in files
        if _VECTORS.fullmatch(file.base_name) and file.mtime_ns / 1e9 < before_s
    }


def _named_with_vectors(path: Place, first: int, last: int, since_s: float) -> set[str]:
    """Return the files, and those with vectors, that the first or the last of some versions names,
    or one between them by what the log says of removals since a time.
    """
    state = read_log_state(path, last)
    kept = [
        action for action in state.removed if action.get("deletionTimestamp", 0) / 1000 >= since_s
    ]
    actions = [*read_log_state(path, first).files.values(), *state.files.values(), *kept]
    vectors = (file_of(vector) for vector in vectors_of(actions))
    return {action["path"] for action in actions} | {name for name in vectors if name is not None}
