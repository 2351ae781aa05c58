"""Opens tables, and reads single commits of their logs."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from pyarrow import fs

from ledgerlake.errors import TableAccessError, TableError, refuse_newer
from ledgerlake.table.batch_commit import VERSION

if TYPE_CHECKING:
    from ledgerlake.stored.places import Place


def existing_table(path: Place) -> DeltaTable | None:
    """Return the table at a path; None if there is none.

    Raises:
        TableAccessError: it cannot be opened now.
        TableError: the path has no table that can be opened, and further attempts will fail too.
    """
    try:
        return _find(path)
    except (DeltaError, OSError) as error:
        if not _answers(path):
            raise TableAccessError(_not_opened(path, error)) from None
    # The store answers by now, so a second failure is due to what it has.
    try:
        return _find(path)
    except (DeltaError, OSError) as error:
        raise TableError(_not_opened(path, error)) from None


def _find(path: Place) -> DeltaTable | None:
    try:
        return open_delta(path)
    except TableNotFoundError:
        return None


def _not_opened(path: Place, error: Exception) -> str:
    return f"the table at {path} cannot be opened: {path.reason(error)}"


def _answers(path: Place) -> bool:
    """Return whether the store of a table answers: it gives a file of the log. A local file system
    also answers if the log is missing, empty or not a folder, or if this process may not read it.
    """
    log = path / "_delta_log"
    try:
        filesystem = log.filesystem()
        files = [
            file.path
            for file in filesystem.get_file_info(fs.FileSelector(log.root))
            if file.is_file
        ]
        with filesystem.open_input_stream(max(files)) as file:
            file.read(1)
    except (ValueError, FileNotFoundError, NotADirectoryError, PermissionError):
        return path.is_local
    except OSError:
        return False
    return True


def no_table(path: Place) -> TableError:
    """Return the error of a command that needs a table which is not there."""
    return TableError(
        f"there is no table at {path}; if it was removed, restore it; else run the pipeline first"
    )


def not_readable(path: Place, error: Exception) -> TableAccessError:
    """Return the error for what a library raises while a table is read."""
    return TableAccessError(f"the table at {path} cannot be read: {path.reason(error)}")


def open_delta(path: Place, version: int | None = None) -> DeltaTable:
    """Open a version of a table, the current one by default.

    Raises:
        DeltaError, OSError: it does not exist, or cannot be read.
    """
    return DeltaTable(path.uri, version=version, storage_options=path.delta_options())


@dataclass(frozen=True)
class TableSize:
    """The files of a table that are in use, and their bytes."""

    files: int
    size_bytes: int


def size_of(path: Place) -> TableSize | None:
    """Return the size of a table, None if there is none.

    Raises:
        TableError: it cannot be opened.
    """
    table = existing_table(path)
    if table is None:
        return None
    sizes = pa.table(table.get_add_actions())["size_bytes"]
    return TableSize(len(sizes), sum(sizes.to_pylist()))


def transactions_of(path: Place, version: int) -> dict[str, int]:
    """Return the transactions in the commit of a version; none if it cannot be read."""
    try:
        actions = read_commit(path, version)
    except (OSError, ValueError):
        return {}
    return transactions_in(actions)


def transactions_in(actions: list[dict[str, dict[str, Any]]]) -> dict[str, int]:
    """Return the numbers of the application transactions in the actions of a commit."""
    return {
        action["txn"]["appId"]: action["txn"]["version"] for action in actions if "txn" in action
    }


def read_commit(path: Place, version: int) -> list[dict[str, dict[str, Any]]]:
    """Return the actions in the commit of a version.

    Raises:
        FileNotFoundError: there is no such commit, or it was removed.
        OSError, ValueError: it cannot be read.
    """
    return read_actions(commit_file(path, version))


def read_actions(file: Place) -> list[dict[str, dict[str, Any]]]:
    """Return the actions in a file of a log, one on each line.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    with file.filesystem().open_input_stream(file.root) as stream:
        return [json.loads(line) for line in bytes(stream.read()).splitlines()]


def batch_at(path: Place, version: int) -> dict[str, Any] | None:
    """Return the micro-batch in the commit of a version; None if it has none, or if it was removed.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    try:
        actions = read_commit(path, version)
    except FileNotFoundError:
        return None
    commits = (action["commitInfo"] for action in actions if "commitInfo" in action)
    return next((batch for batch in map(batch_of_commit, commits) if batch is not None), None)


def files_added_at(path: Place, version: int) -> list[str]:
    """Return the names of the files that the commit of a version added, below the table.

    Raises:
        OSError, ValueError: it was removed, or cannot be read.
    """
    return [
        unquote(action["add"]["path"]) for action in read_commit(path, version) if "add" in action
    ]


def commit_file(path: Place, version: int) -> Place:
    """Return the file of a version in the log of a table."""
    return path / f"_delta_log/{version:020}.json"


def batch_of_commit(commit: dict[str, Any]) -> dict[str, Any] | None:
    """Return the micro-batch in a commit's metadata, from either writer; None if there is none."""
    for name in ("ledgerlake", "userMetadata"):
        with contextlib.suppress(ValueError, TypeError):
            batch = json.loads(commit.get(name) or "null")
            if isinstance(batch, dict):
                if "range_digest" in batch:
                    refuse_newer(
                        "the table",
                        batch.get("version", 0),
                        VERSION,
                        "record of a micro-batch of version",
                    )
                return batch
    return None
