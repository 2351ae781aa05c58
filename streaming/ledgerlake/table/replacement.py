"""A commit that replaces files of a table by others with the same rows.

delta-rs has no such commit for Python beside its own compaction, which does not keep the order of
rows. So the commit is written here (see ``log_commit``):

    remove       each old file, with ``dataChange`` false, so readers of changes pass over it
    add          each new file, likewise

The commits that others have made since the files were listed are read first. If one of them removed
one of the files, or changed the table's columns or features, nothing is committed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ledgerlake.errors import TableAccessError
from ledgerlake.table.log_commit import OwnCommit
from ledgerlake.table.open_table import commit_file, read_commit

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ledgerlake.stored.places import Place
    from ledgerlake.table.file_groups import TableFile
    from ledgerlake.table.log_commit import Action
    from ledgerlake.table.ordered_files import DataFile


def replace_files(
    path: Place,
    version: int,
    old: Sequence[TableFile],
    new: Sequence[DataFile],
    needed: Collection[str],
) -> int | None:
    """Commit the replacement; return its version. None if another writer came first, and nothing
    was changed.

    Args:
        version: the version of the table in which the old files were found.
        needed: names of files that no other writer may have removed since; the old ones among them.

    Raises:
        TableError: the log cannot be read or written. The commit may have landed all the same, so
            the new files must stay.
    """
    commit = _commit(path, version, old, new)
    try:
        # Old commits may be removed by others, and then a missing one is not a free version.
        commit_file(path, version).check_exists()
        while True:
            version += 1
            try:
                actions = read_commit(path, version)
            except FileNotFoundError:
                if commit.create(version):
                    return version
                # Somebody's commit is there now, or ours: a request that is sent again meets the
                # file of the first one.
                version -= 1
                continue
            if commit.is_in(actions):
                return version
            if _conflicts(actions, needed):
                return None
    except (OSError, ValueError) as error:
        if _has_landed(commit, version):
            return version
        raise TableAccessError(
            f"files of the table at {path} could not be replaced: {path.reason(error)}"
        ) from None


def _commit(
    path: Place, version: int, old: Sequence[TableFile], new: Sequence[DataFile]
) -> OwnCommit:
    now_ms = int(time.time() * 1000)
    actions = [
        *({"remove": _removed(file, now_ms)} for file in old),
        *({"add": _added(file, old)} for file in new),
    ]
    metrics = {"numAddedFiles": str(len(new)), "numRemovedFiles": str(len(old))}
    return OwnCommit(
        path, "OPTIMIZE", {"predicate": "[]"}, version, actions, {"operationMetrics": metrics}
    )


def _removed(file: TableFile, now_ms: int) -> dict[str, Any]:
    return {
        "path": file.name,
        "deletionTimestamp": now_ms,
        "dataChange": False,
        "extendedFileMetadata": True,
        "partitionValues": file.partition_values,
        "size": file.size_bytes,
    }


def _added(file: DataFile, old: Sequence[TableFile]) -> dict[str, Any]:
    return {
        "path": file.name,
        "partitionValues": file.partition_values,
        "size": file.size_bytes,
        # Files are ordered by it (see ``file_groups``), and this one takes the place of the old
        # ones.
        "modificationTime": max(replaced.modified_ms for replaced in old),
        "dataChange": False,
        "stats": file.stats,
    }


def _conflicts(actions: Sequence[Action], names: Collection[str]) -> bool:
    """Return whether a commit of another writer forbids a replacement of these files."""
    return any(
        "metaData" in action
        or "protocol" in action
        or action.get("remove", {}).get("path") in names
        for action in actions
    )


def _has_landed(commit: OwnCommit, version: int) -> bool:
    """Return whether a version is certainly this commit."""
    try:
        return commit.is_at(version)
    except (OSError, ValueError):
        return False
