"""The files of a table as its log has them, with what ``deltalake`` does not tell: their deletion
vectors, the files that were removed and may still be read, and the columns of a clustered table.

The log is its last checkpoint, which has all actions up to a version, and the commits since. A
checkpoint has any form of Delta's protocol, and this is the only place that knows them:

    <version>.checkpoint.parquet                  one file
    <version>.checkpoint.<part>.<parts>.parquet   several files; all of them must be there
    <version>.checkpoint.<uuid>.parquet or .json  version 2 (``delta.checkpointPolicy = v2``)

A file of one checkpoint may name others, ``_sidecars/<name>.parquet``, which then have the actions
of the table's files. (Source: Delta's PROTOCOL.md, "Checkpoints".)
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow.parquet as pq
from pyarrow import fs

from ledgerlake.table.open_table import read_actions, read_commit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ledgerlake.stored.places import Place

Action = dict[str, Any]

CLUSTERING_DOMAIN = "delta.clustering"

_COMMIT = re.compile(r"(\d{20})\.json")
_UUID = "[0-9a-fA-F-]{36}"
_CHECKPOINT = re.compile(
    rf"(\d{{20}})\.checkpoint((\.\d{{10}}\.(?P<parts>\d{{10}}))?\.parquet|\.{_UUID}\.(parquet|json))"
)

# A file that gets another deletion vector is removed and added, in one commit or in two files of a
# checkpoint. So removals come first.
_OF_FILES = ("remove", "add")
_SIDECAR = "sidecar"

# The fields of them that are read. A checkpoint may have the statistics a second time, as columns.
_FIELDS = (
    "path",
    "partitionValues",
    "size",
    "modificationTime",
    "deletionTimestamp",
    "stats",
    "deletionVector",
)


@dataclass(frozen=True)
class LogState:
    """The entries of the files in a version of a table, by their names, and the entries of removed
    files.
    """

    files: dict[str, Action]
    removed: list[Action]


def read_log_state(path: Place, version: int) -> LogState:
    """Read the log up to a version.

    Raises:
        OSError, ValueError, ArrowException: it cannot be read.
    """
    files: dict[str, Action] = {}
    removed: dict[str, Action] = {}
    for name, action in _actions(path, version, _OF_FILES):
        if name == "add":
            files[action["path"]] = action
        else:
            files.pop(action["path"], None)
            removed[f"{action['path']}:{_vector_of(action)}"] = action
    return LogState(files, list(removed.values()))


def version_at(path: Place, time_s: float) -> int:
    """Return the version that a table had at a time, or the oldest one that can be opened if older
    entries of the log were removed.

    Raises:
        OSError: the log cannot be read.
        ValueError: no version can be opened.
    """
    commits: dict[int, float] = {}
    files = _listed(path)
    for file in files:
        if matched := _COMMIT.fullmatch(file.base_name):
            commits[int(matched[1])] = file.mtime_ns / 1e9
    checkpoints = _checkpoints(files)
    oldest = 0 if 0 in commits else min(checkpoints, default=None)
    if oldest is None:
        raise ValueError("the log has neither its first commit nor a checkpoint")
    later = (version for version, committed_s in commits.items() if committed_s > time_s)
    return max(oldest, min(later, default=max([*commits, *checkpoints]) + 1) - 1)


def clustering_columns(path: Place, version: int) -> list[str]:
    """Return the columns by which a version of a table is clustered, with dots between the parts of
    a name; none if it is not.

    Raises:
        OSError, ValueError, ArrowException: the log cannot be read.
    """
    columns: list[str] = []
    for _, domain in _actions(path, version, ("domainMetadata",)):
        if domain["domain"] == CLUSTERING_DOMAIN:
            columns = _columns_of(domain)
    return columns


def read_transactions(path: Place, version: int) -> dict[str, int]:
    """Return the numbers of all application transactions in a version of a table. delta-rs reads
    the log once for each of them.

    Raises:
        OSError, ValueError, ArrowException: the log cannot be read.
    """
    return {
        transaction["appId"]: transaction["version"]
        for _, transaction in _actions(path, version, ("txn",))
    }


def _columns_of(domain: Action) -> list[str]:
    if domain.get("removed"):
        return []
    return [".".join(name) for name in json.loads(domain["configuration"])["clusteringColumns"]]


def _actions(path: Place, version: int, kinds: Sequence[str]) -> Iterator[tuple[str, Action]]:
    """Yield the actions of some kinds up to a version, the later ones last; each commit, and the
    checkpoint, in the order of the kinds.
    """
    checkpoint, names = _last_checkpoint(path, version)
    yield from _in_order(_of_checkpoint(path / "_delta_log", names, kinds), kinds)
    for number in range(checkpoint + 1, version + 1):
        yield from _in_order(read_commit(path, number), kinds)


def _in_order(actions: Sequence[Action], kinds: Sequence[str]) -> Iterator[tuple[str, Action]]:
    for kind in kinds:
        yield from ((kind, action[kind]) for action in actions if kind in action)


def _listed(path: Place) -> list[fs.FileInfo]:
    log = path / "_delta_log"
    return list(log.filesystem().get_file_info(fs.FileSelector(log.root)))


def _checkpoints(files: Iterable[fs.FileInfo]) -> dict[int, list[str]]:
    """Return the names of the files of a complete checkpoint, by its version."""
    found: dict[int, dict[int, list[str]]] = {}
    for file in files:
        if matched := _CHECKPOINT.fullmatch(file.base_name):
            by_parts = found.setdefault(int(matched[1]), {})
            by_parts.setdefault(int(matched["parts"] or 1), []).append(file.base_name)
    # If a version has several, all say the same; the one of the fewest files comes last here.
    return {
        version: sorted(names)[:parts]
        for version, by_parts in found.items()
        for parts, names in sorted(by_parts.items(), reverse=True)
        if len(names) >= parts
    }


def _last_checkpoint(path: Place, version: int) -> tuple[int, list[str]]:
    """Return the version of the last complete checkpoint up to a version, and the names of its
    files; -1 and none if there is none. The log's own hint at it may be missing or old.
    """
    complete = _checkpoints(_listed(path))
    last = max((number for number in complete if number <= version), default=-1)
    return last, complete.get(last, [])


def _of_checkpoint(log: Place, names: Sequence[str], kinds: Sequence[str]) -> list[Action]:
    actions = [action for name in names for action in _read(log / name, (*kinds, _SIDECAR))]
    if kinds == _OF_FILES:
        for action in list(actions):
            if _SIDECAR in action:
                # The protocol lets it be a whole path, always of a file in this folder.
                name = unquote(action[_SIDECAR]["path"]).rpartition("/")[2]
                actions += _read(log / "_sidecars" / name, kinds)
    return actions


def _read(file: Place, kinds: Sequence[str]) -> list[Action]:
    """Return the actions of some kinds in a file of a checkpoint, as JSON has them."""
    if file.root.endswith(".json"):
        return read_actions(file)
    columns = [
        column
        for kind in kinds
        for column in ([f"{kind}.{field}" for field in _FIELDS] if kind in _OF_FILES else [kind])
    ]
    with file.filesystem().open_input_file(file.root) as source:
        rows = pq.ParquetFile(source).read(columns)
    return [
        {kind: _plain(action)}
        for kind in rows.column_names
        for action in rows[kind].drop_null().to_pylist()
    ]


def _plain(action: Action) -> Action:
    """Return an action of a Parquet file as JSON has it: without nulls, and maps with names."""
    values = {
        name: _plain(value) if isinstance(value, dict) else value
        for name, value in action.items()
        if value is not None
    }
    if "partitionValues" in values:
        values["partitionValues"] = dict(values["partitionValues"])
    return values


def _vector_of(action: Action) -> str:
    vector = action.get("deletionVector") or {}
    return f"{vector.get('pathOrInlineDv', '')}@{vector.get('offset', '')}"


def vectors_of(actions: Iterable[Action]) -> Iterator[Action]:
    """Yield the deletion vectors that actions name."""
    yield from (action["deletionVector"] for action in actions if action.get("deletionVector"))
