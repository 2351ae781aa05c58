"""Makes a table on a disk as old as if days had passed since its last commit."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

DAY_S = 24 * 3600


def make_older(folder: Path, days: float) -> None:
    """Put the times of a table's files and of its log so many days back. A checkpoint keeps those
    in it.
    """
    for commit in (folder / "_delta_log").glob("*.json"):
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        for action in actions:
            _put_back(action.get("remove", {}), "deletionTimestamp", days)
            _put_back(action.get("commitInfo", {}), "timestamp", days)
        times = commit.stat()
        commit.write_text("".join(json.dumps(action) + "\n" for action in actions))
        os.utime(commit, (times.st_atime, times.st_mtime))
    for file in (path for path in folder.rglob("*") if path.is_file()):
        os.utime(file, (file.stat().st_mtime - days * DAY_S,) * 2)


def _put_back(values: dict[str, int], name: str, days: float) -> None:
    if name in values:
        values[name] -= int(days * DAY_S * 1000)
