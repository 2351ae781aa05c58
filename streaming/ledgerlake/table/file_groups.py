"""Which neighbouring files of a table become one. Pure: a list of files in, groups out.

Files are in the order of their commits, so the rows of each topic partition are in order from file
to file. A group may only have neighbours, or its file would lie across the rows of a file between
them. Files between them do no harm if they have rows of other topic partitions alone.

A file that another writer made, for example by a deletion, has rows from somewhere before its
commit. So files before it are not merged any more, unless they have other topic partitions.

Files have levels by their size. A group has at least eight files of one level, and the files of
lower levels between them:

    level   less than          rows          a group has
    0       1 MiB              16,384        up to 1,000 files, 16 MiB together
    1       8 MiB              131,072       up to 16 of level 1, 32 files, 128 MiB together
    2       64 MiB             1,048,576     up to 16 of level 2, 32 files, 1 GiB together

Larger files stay as they are. A commit with more than a group may have stays as it is, too. Of a
clustered table, a group of the last level waits until it has enough for several files, 256 MiB or
four million rows, or can get no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MIB = 1024 * 1024

# By level: files with less than so many bytes, and less than so many rows.
_LEVELS = ((_MIB, 16 * 1024), (8 * _MIB, 128 * 1024), (64 * _MIB, _MIB))

_FEWEST_FILES = 8
_MOST_OF_LEVEL = (1000, 16, 16)
_MOST_FILES = (1000, 32, 32)
_MOST_BYTES = (16 * _MIB, 128 * _MIB, 1024 * _MIB)

# The level of the largest files that are merged.
LAST_LEVEL = len(_LEVELS) - 1

# What a last group of a clustered table has at least.
_CLUSTERED_BYTES, _CLUSTERED_ROWS = 256 * _MIB, 4 * _MIB

# Files of messages that large have few rows, and take much memory to merge.
_LARGE_ROW_BYTES = _MIB

Bounds = tuple[str, str, int, int]


@dataclass(frozen=True)
class TableFile:
    """A file of a table, by its log.

    ``modified_ms`` rises from commit to commit. ``bounds`` are the first and last topic, and the
    first and last partition; None if they are not known. ``partition_values`` has the values of the
    columns by which the table is partitioned, as the log writes them. ``is_fixed``: it cannot be
    replaced. ``is_foreign``: another writer made it, so it cannot be replaced, and its rows may be
    older than its commit.
    """

    name: str
    size_bytes: int
    rows: int
    modified_ms: int
    bounds: Bounds | None
    is_fixed: bool = False
    is_foreign: bool = False
    partition_values: dict[str, str | None] = field(default_factory=dict, hash=False)

    @property
    def level(self) -> int:
        """Return the level of its size; one more than the last for a large file."""
        if self.is_fixed or self.is_foreign or self.size_bytes > self.rows * _LARGE_ROW_BYTES:
            return len(_LEVELS)
        fitting = (
            level
            for level, (size, rows) in enumerate(_LEVELS)
            if self.size_bytes < size and self.rows < rows
        )
        return next(fitting, len(_LEVELS))

    def may_share_topic_partition(self, others: Iterable[TableFile]) -> bool:
        """Return whether one of the others may have rows of a topic partition that this one has
        too.
        """
        return any(_overlap(self.bounds, other.bounds) for other in others)


def groups_to_merge(
    files: Sequence[TableFile], *, are_clustered: bool = False
) -> list[list[TableFile]]:
    """Return groups of files that are to become one file each, of the lowest level that has any.

    Args:
        files: the files of a table, or of one partition of it.
        are_clustered: the table is clustered, so a group of the last level becomes several files.
    """
    in_order = sorted(files, key=attrgetter("modified_ms", "name"))
    foreign = [file for file in in_order if file.is_foreign]
    for level in range(len(_LEVELS)):
        runs = _runs(in_order, foreign, level)
        if are_clustered and level == LAST_LEVEL and not _is_enough(runs[-1]):
            del runs[-1]
        groups = [run for run in runs if sum(file.level == level for file in run) >= _FEWEST_FILES]
        if groups:
            return groups
    return []


def _is_enough(run: Sequence[TableFile]) -> bool:
    """Return whether a run has enough for several files of a clustered table."""
    size_bytes, rows = sum(file.size_bytes for file in run), sum(file.rows for file in run)
    return size_bytes >= _CLUSTERED_BYTES or rows >= _CLUSTERED_ROWS


def _runs(
    files: Sequence[TableFile], foreign: Sequence[TableFile], level: int
) -> list[list[TableFile]]:
    """Return runs of neighbours that are small enough for a group of that level."""
    runs: list[list[TableFile]] = [[]]
    for _, of_commit in groupby(files, attrgetter("modified_ms")):
        fitting, others = _split_commit(list(of_commit), foreign, level)
        run = runs[-1]
        crosses_others = any(other.may_share_topic_partition(run) for other in others)
        if run and (crosses_others or _is_full([*run, *fitting], level)):
            runs.append([])
        runs[-1].extend(fitting)
    return runs


def _split_commit(
    files: Sequence[TableFile], foreign: Sequence[TableFile], level: int
) -> tuple[Sequence[TableFile], Sequence[TableFile]]:
    """Return the files of a commit that fit into a group of that level, and the others. A small
    file counts as one of the others if it may come between the rows of those: the order of the
    files of a commit is not known.
    """
    large = [file for file in files if file.level > level]
    small = [file for file in files if file.level <= level]
    later = [file for file in foreign if file.modified_ms >= files[0].modified_ms]
    fitting = [file for file in small if not file.may_share_topic_partition([*large, *later])]
    if _is_full(fitting, level):
        return [], files
    names = {file.name for file in fitting}
    return fitting, [file for file in files if file.name not in names]


def _is_full(files: Sequence[TableFile], level: int) -> bool:
    """Return whether these are more than a group may have."""
    of_level = sum(file.level == level for file in files)
    return (
        len(files) > _MOST_FILES[level]
        or sum(file.size_bytes for file in files) > _MOST_BYTES[level]
        or of_level > _MOST_OF_LEVEL[level]
    )


def _overlap(one: Bounds | None, other: Bounds | None) -> bool:
    if one is None or other is None:
        return True
    return one[0] <= other[1] and other[0] <= one[1] and one[2] <= other[3] and other[2] <= one[3]
