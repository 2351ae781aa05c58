"""A commit that replaces files of a table by others with the same rows.

delta-rs has no such commit for Python beside its own compaction, which does not keep the order of
rows. So the commit is written here, as Delta's protocol describes it: a file of the log with one
action a line.

    commitInfo   what was done; ``ledgerlakeAttempt`` is a random text by which this process finds its own commit
    remove       each old file, with ``dataChange`` false, so readers of changes pass over it
    add          each new file, likewise

The file is created only if there is none of that version; by this rule all writers agree on an
order. The commits that others have made since the files were listed are read first. If one of them
removed one of the files, or changed the table's columns or features, nothing is committed.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any

from ledgerlake.errors import TableError
from ledgerlake.table.delta_table import commit_file, read_commit

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ledgerlake.stored.places import Place
    from ledgerlake.table.file_groups import TableFile
    from ledgerlake.table.ordered_files import DataFile

Action = dict[str, dict[str, Any]]

ENGINE = "ledgerlake"

_ATTEMPT = "ledgerlakeAttempt"


def replace_files(
    path: Place, version: int, old: Sequence[TableFile], new: Sequence[DataFile], needed: Collection[str]
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
    attempt = uuid.uuid4().hex
    content = _content(version, old, new, attempt)
    try:
        # Old commits may be removed by others, and then a missing one is not a free version.
        commit_file(path, version).check_exists()
        while True:
            version += 1
            try:
                actions = read_commit(path, version)
            except FileNotFoundError:
                _check_present(path, new)
                if commit_file(path, version).create_file(content):
                    return version
                # Somebody's commit is there now, or ours: a request that is sent again meets the
                # file of the first one.
                version -= 1
                continue
            if _is_own(actions, attempt):
                return version
            if _conflicts(actions, needed):
                return None
    except (OSError, ValueError) as error:
        if _has_landed(path, version, attempt):
            return version
        raise TableError(f"files of the table at {path} could not be replaced: {path.reason(error)}") from None


def _check_present(path: Place, new: Sequence[DataFile]) -> None:
    """Check that the new files exist: while a process is suspended, a vacuum may remove them.

    Raises:
        FileNotFoundError: one is gone.
    """
    for file in new:
        place = path / file.name
        place.filesystem().open_input_file(place.root).close()


def _content(version: int, old: Sequence[TableFile], new: Sequence[DataFile], attempt: str) -> bytes:
    now_ms = int(time.time() * 1000)
    actions: list[Action] = [
        {
            "commitInfo": {
                "timestamp": now_ms,
                "operation": "OPTIMIZE",
                "operationParameters": {"predicate": "[]"},
                "readVersion": version,
                "isBlindAppend": False,
                "operationMetrics": {"numAddedFiles": str(len(new)), "numRemovedFiles": str(len(old))},
                "engineInfo": ENGINE,
                _ATTEMPT: attempt,
            }
        },
        *({"remove": _removed(file, now_ms)} for file in old),
        *({"add": _added(file, old)} for file in new),
    ]
    return "".join(json.dumps(action, separators=(",", ":")) + "\n" for action in actions).encode()


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
        "metaData" in action or "protocol" in action or action.get("remove", {}).get("path") in names
        for action in actions
    )


def _is_own(actions: Sequence[Action], attempt: str) -> bool:
    return any(action.get("commitInfo", {}).get(_ATTEMPT) == attempt for action in actions)


def _has_landed(path: Place, version: int, attempt: str) -> bool:
    """Return whether a version is certainly this attempt's: a store may keep a file and answer with
    a failure.
    """
    try:
        return _is_own(read_commit(path, version), attempt)
    except (OSError, ValueError):
        return False
