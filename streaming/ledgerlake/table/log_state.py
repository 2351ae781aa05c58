"""The files of a table as its log has them, with what ``deltalake`` does not tell: their deletion
vectors, the files that were removed and may still be read, and the columns of a clustered table.

The log is its last checkpoint, a Parquet file of all actions up to a version, and the commits
since.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from pyarrow import fs

from ledgerlake.table.open_table import read_commit, transactions_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.stored.places import Place

Action = dict[str, Any]

CLUSTERING_DOMAIN = "delta.clustering"

# A part of a checkpoint of version 2, which names further files.
_SIDECAR = "sidecar"

# A checkpoint in one file, or in several: <version>.checkpoint.parquet,
# <version>.checkpoint.<part>.<parts>.parquet
_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10}))?\.parquet")
# Checkpoints of version 2 have other names too.
_ANY_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\..*")


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
        OSError, ValueError, ArrowException: it cannot be read, or its checkpoint is of a kind that
            is not known here.
    """
    files: dict[str, Action] = {}
    removed: dict[str, Action] = {}
    for name, action in _actions(path, version):
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
    checkpoints: list[int] = []
    log = path / "_delta_log"
    for file in log.filesystem().get_file_info(fs.FileSelector(log.root)):
        if matched := _COMMIT.fullmatch(file.base_name):
            commits[int(matched[1])] = file.mtime_ns / 1e9
        elif matched := _ANY_CHECKPOINT.fullmatch(file.base_name):
            checkpoints.append(int(matched[1]))
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
    checkpoint, parts = _last_checkpoint(path, version)
    for number in range(version, checkpoint, -1):
        for action in read_commit(path, number):
            if action.get("domainMetadata", {}).get("domain") == CLUSTERING_DOMAIN:
                return _columns_of(action["domainMetadata"])
    for part in parts:
        file = path / f"_delta_log/{part}"
        with file.filesystem().open_input_file(file.root) as source:
            if "domainMetadata" not in pq.read_schema(source).names:
                continue
            for domain in pq.read_table(source, columns=["domainMetadata"])[
                "domainMetadata"
            ].to_pylist():
                if domain is not None and domain["domain"] == CLUSTERING_DOMAIN:
                    return _columns_of(domain)
    return []


def read_transactions(path: Place, version: int) -> dict[str, int]:
    """Return the numbers of all application transactions in a version of a table. delta-rs reads
    the log once for each of them.

    Raises:
        OSError, ValueError, ArrowException: the log cannot be read.
    """
    numbers: dict[str, int] = {}
    checkpoint, parts = _last_checkpoint(path, version)
    for part in parts:
        file = path / f"_delta_log/{part}"
        with file.filesystem().open_input_file(file.root) as source:
            if "txn" in pq.read_schema(source).names:
                rows = pq.read_table(source, columns=["txn"])["txn"].drop_null().to_pylist()
                numbers |= {row["appId"]: row["version"] for row in rows}
    for number in range(checkpoint + 1, version + 1):
        numbers |= transactions_in(read_commit(path, number))
    return numbers


def _columns_of(domain: Action) -> list[str]:
    if domain.get("removed"):
        return []
    return [".".join(name) for name in json.loads(domain["configuration"])["clusteringColumns"]]


def _actions(path: Place, version: int) -> Iterator[tuple[str, Action]]:
    checkpoint, parts = _last_checkpoint(path, version)
    for part in parts:
        yield from _of_checkpoint(path / f"_delta_log/{part}")
    for number in range(checkpoint + 1, version + 1):
        # A commit may remove a file and add it again with another vector.
        actions = read_commit(path, number)
        for kind in ("remove", "add"):
            yield from ((kind, action[kind]) for action in actions if kind in action)


def _last_checkpoint(path: Place, version: int) -> tuple[int, list[str]]:
    """Return the version of the last complete checkpoint up to a version, and the names of its
    files; -1 and none if there is none. The log's own hint at it may be missing or old.
    """
    log = path / "_delta_log"
    found: dict[int, dict[str, int]] = {}
    for file in log.filesystem().get_file_info(fs.FileSelector(log.root)):
        matched = _CHECKPOINT.fullmatch(file.base_name)
        if matched and int(matched[1]) <= version:
            found.setdefault(int(matched[1]), {})[file.base_name] = int(matched[2] or 1)
    for number in sorted(found, reverse=True):
        single = [name for name, count in found[number].items() if count == 1]
        complete = single[:1] or [
            name for name, count in found[number].items() if count == len(found[number])
        ]
        if complete:
            return number, sorted(complete)
    return -1, []


def _of_checkpoint(file: Place) -> Iterator[tuple[str, Action]]:
    with file.filesystem().open_input_file(file.root) as source:
        known = set(pq.read_schema(source).names)
        rows = pq.read_table(
            source, columns=[kind for kind in ("remove", "add", _SIDECAR) if kind in known]
        )
    if _SIDECAR in rows.column_names and rows[_SIDECAR].null_count < rows.num_rows:
        raise ValueError("the checkpoint of the log is in files that are not known here")
    for kind in ("remove", "add"):
        if kind in rows.column_names:
            yield from (
                (kind, _plain(action)) for action in rows[kind].to_pylist() if action is not None
            )


def _plain(action: Action) -> Action:
    """Return an action of a checkpoint as JSON has it."""
    values = {name: value for name, value in action.items() if value is not None}
    # Such a field says nothing if it is empty.
    values = {
        name: value for name, value in values.items() if name not in ("tags", "clusteringProvider")
    }
    return {**values, "partitionValues": dict(values.get("partitionValues") or ())}


def _vector_of(action: Action) -> str:
    vector = action.get("deletionVector") or {}
    return f"{vector.get('pathOrInlineDv', '')}@{vector.get('offset', '')}"


def vectors_of(actions: Iterable[Action]) -> Iterator[Action]:
    """Yield the deletion vectors that actions name."""
    yield from (action["deletionVector"] for action in actions if action.get("deletionVector"))
