"""Which neighbouring files of a table become one. Pure: a list of files in, groups out.

Files are in the order of their commits, so the rows of each topic partition are in order from file to
file. A group may only have neighbours, or its file would lie across the rows of a file between
them. Files between them do no harm if they have rows of other topic partitions alone.

Files have levels by their size. A group has files of one level or of lower ones, at least eight, so
a row is written again at most once for each level:

    level   less than          rows          a group has
    0       1 MiB              16,384        up to 16 MiB
    1       8 MiB              131,072       up to 8 of level 1
    2       64 MiB             1,048,576     up to 8 of level 2

Larger files stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MIB = 1024 * 1024

# By level: files with less than so many bytes, and less than so many rows.
_LEVELS = ((_MIB, 16 * 1024), (8 * _MIB, 128 * 1024), (64 * _MIB, _MIB))

_FEWEST_FILES = 8
_MOST_BYTES = (16 * _MIB, 64 * _MIB, 512 * _MIB)

# Files of messages that large have few rows, and take much memory to merge.
_LARGE_ROW_BYTES = _MIB

Bounds = tuple[str, str, int, int]


@dataclass(frozen=True)
class TableFile:
    """A file of a table, by its log.

    ``modified_ms`` rises from commit to commit. ``bounds`` are the first and last topic, and the
    first and last partition; None if they are not known. ``is_fixed``: it cannot be replaced.
    """

    name: str
    size_bytes: int
    rows: int
    modified_ms: int
    bounds: Bounds | None
    is_fixed: bool = False

    @property
    def level(self) -> int:
        """Return the level of its size; one more than the last for a large file."""
        if self.is_fixed or self.size_bytes > self.rows * _LARGE_ROW_BYTES:
            return len(_LEVELS)
        fitting = (level for level, (size, rows) in enumerate(_LEVELS) if self.size_bytes < size and self.rows < rows)
        return next(fitting, len(_LEVELS))

    def may_share_topic_partition(self, others: Iterable[TableFile]) -> bool:
        """Return whether one of the others may have rows of a topic partition that this one has too."""
        return any(_overlap(self.bounds, other.bounds) for other in others)


def groups_to_merge(files: Sequence[TableFile]) -> list[list[TableFile]]:
    """Return groups of files that are to become one file each, of the lowest level that has any."""
    in_order = sorted(files, key=lambda file: (file.modified_ms, file.name))
    for level in range(len(_LEVELS)):
        groups = [group for group in _runs(in_order, level) if len(group) >= _FEWEST_FILES]
        if groups:
            return groups
    return []


def _runs(files: Sequence[TableFile], level: int) -> list[list[TableFile]]:
    """Return runs of neighbours that are small enough for a group of that level."""
    runs: list[list[TableFile]] = [[]]
    for _, of_commit in groupby(files, attrgetter("modified_ms")):
        fitting, others = _split_commit(list(of_commit), level)
        run = runs[-1]
        crosses_others = any(other.may_share_topic_partition(run) for other in others)
        if run and (crosses_others or _is_full(run, fitting, level)):
            runs.append([])
        runs[-1].extend(fitting)
    return runs


def _split_commit(files: Sequence[TableFile], level: int) -> tuple[list[TableFile], list[TableFile]]:
    """Return the files of a commit that fit into a group of that level, and the others. A small file
    counts as one of the others if it may come between the rows of those: the order of the files of
    a commit is not known.
    """
    large = [file for file in files if file.level > level]
    small = [file for file in files if file.level <= level]
    fitting = [file for file in small if not file.may_share_topic_partition(large)]
    return fitting, [file for file in files if file not in fitting]


def _is_full(run: Sequence[TableFile], following: Sequence[TableFile], level: int) -> bool:
    size_bytes = sum(file.size_bytes for file in (*run, *following))
    is_long = level > 0 and sum(file.level == level for file in run) >= _FEWEST_FILES
    return is_long or size_bytes > _MOST_BYTES[level]


def _overlap(one: Bounds | None, other: Bounds | None) -> bool:
    if one is None or other is None:
        return True
    return one[0] <= other[1] and other[0] <= one[1] and one[2] <= other[3] and other[2] <= one[3]
