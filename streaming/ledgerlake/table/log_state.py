"""The files of a table as its log has them, with what ``deltalake`` does not tell: their deletion
vectors, and the files that were removed and may still be read.

The log is its last checkpoint, a Parquet file of all actions up to a version, and the commits since.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from ledgerlake.table.delta_table import read_commit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.stored.places import Place

Action = dict[str, Any]


@dataclass(frozen=True)
class LogState:
    """The entries of the files in a version of a table, by their names, and those of removed files."""

    files: dict[str, Action]
    removed: list[Action]


def read_state(path: Place, version: int) -> LogState:
    """Read the log up to a version.

    Raises:
        OSError, ValueError, ArrowException: it cannot be read, or its checkpoint is of a kind that is not
            known here.
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


def _actions(path: Place, version: int) -> Iterator[tuple[str, Action]]:
    checkpoint = _last_checkpoint(path, version)
    if checkpoint is not None:
        yield from _of_checkpoint(path / f"_delta_log/{checkpoint:020}.checkpoint.parquet")
    for number in range(0 if checkpoint is None else checkpoint + 1, version + 1):
        # A commit may remove a file and add it again with another vector.
        actions = read_commit(path, number)
        for kind in ("remove", "add"):
            yield from ((kind, action[kind]) for action in actions if kind in action)


def _last_checkpoint(path: Place, version: int) -> int | None:
    """Return the version of the last checkpoint up to a version; None if there is none."""
    hint = path / "_delta_log/_last_checkpoint"
    try:
        with hint.filesystem().open_input_stream(hint.root) as stream:
            found = json.loads(bytes(stream.read()))
    except FileNotFoundError:
        return None
    if found.get("parts") or found["version"] > version:
        raise ValueError("the checkpoint of the log has parts, or is later than the version")
    return int(found["version"])


def _of_checkpoint(file: Place) -> Iterator[tuple[str, Action]]:
    with file.filesystem().open_input_file(file.root) as source:
        rows = pq.read_table(source, columns=["remove", "add"])
    for kind in ("remove", "add"):
        yield from ((kind, _plain(action)) for action in rows[kind].to_pylist() if action is not None)


def _plain(action: Action) -> Action:
    """Return an action of a checkpoint as JSON has it."""
    values = {name: value for name, value in action.items() if value is not None}
    return {**values, "partitionValues": dict(values.get("partitionValues") or ())}


def _vector_of(action: Action) -> str:
    vector = action.get("deletionVector") or {}
    return f"{vector.get('pathOrInlineDv', '')}@{vector.get('offset', '')}"


def vectors_of(actions: Iterable[Action]) -> Iterator[Action]:
    """Yield the deletion vectors that actions name."""
    yield from (action["deletionVector"] for action in actions if action.get("deletionVector"))
