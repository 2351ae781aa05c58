"""Small neighbouring files of a table become one, with the rows of each topic partition in order.

Rows of a merged file of messages are in the order of their key (see ``ordered_files``), over all
topic partitions that it has. So the rows of each topic partition are in order, and a read of a span
of time needs few row groups. Rows of rejects stay in the order of the files.

Files of the lowest level (see ``file_groups``) are sorted together in memory. Larger ones have
their rows in order already, and are merged with one row group of each in memory. A file is left as
it is if its rows are not in order, or would take too much memory.

Of a clustered table (see ``clustered_table``), the last merge makes several files, which divide the
rows by the clustering columns (see ``clusters``). Within each file, rows stay in the same order.

If another writer merges the table's files too, this one leaves them to it: delta-rs does not notice
that files which it replaces are gone, and both results would stay in the table.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.exceptions import DeltaError, TableNotFoundError

from ledgerlake.decode.columns import first_line
from ledgerlake.errors import TableAccessError
from ledgerlake.table import file_groups
from ledgerlake.table.clusters import part_numbers, parts_of, split_of
from ledgerlake.table.features import CLUSTERED, PARTITIONED, column_differences, special_features
from ledgerlake.table.file_groups import TableFile, groups_to_merge
from ledgerlake.table.layout import (
    file_schema,
    partition_text,
    path_in_file,
    rows_of_table,
    to_file,
)
from ledgerlake.table.log_commit import ENGINE, write_checkpoint
from ledgerlake.table.log_state import clustering_columns
from ledgerlake.table.open_table import TableSize, no_table, open_delta, read_commit
from ledgerlake.table.ordered_files import (
    ROW_GROUP_BYTES,
    BufferedWriter,
    data_folder,
    delete_files,
    has_order,
    in_order,
    key_of,
    merge_sorted,
    open_file,
    read_row_groups,
    with_named_statistics,
)
from ledgerlake.table.properties import checkpoint_interval
from ledgerlake.table.replacement import replace_files
from ledgerlake.table.vacuum import is_own_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from deltalake import DeltaTable

    from ledgerlake.stored.places import Place
    from ledgerlake.table.clusters import Split
    from ledgerlake.table.file_groups import Bounds
    from ledgerlake.table.ordered_files import DataFile, Key, ParquetFolder

_log = logging.getLogger(__name__)

_FILE_COLUMNS = ("path", "size_bytes", "num_records", "modification_time")

# What the rows of small files may take in memory, and the row groups of larger ones together.
# Parquet's own sizes leave out what a dictionary saves, which is some hundred bytes a row.
_MOST_ROWS_BYTES = 128 * 1024 * 1024
_MOST_MERGED_BYTES = 512 * 1024 * 1024
_ROW_BYTES = 150

_PREFIX = "part-compacted"

# Clustered files are left as they are from then on. A merge makes files of about so many bytes or
# rows, and so many at most. It divides them by a sample of so many rows and bytes.
CLUSTERED_PREFIX = "part-clustered"
_CLUSTER_BYTES, _CLUSTER_ROWS = 32 * 1024 * 1024, 512 * 1024
_MOST_CLUSTERS = 16
_MOST_SAMPLED, _MOST_SAMPLE_BYTES = 100_000, 32 * 1024 * 1024

# At the first look: a commit is a request to the store, and a day may have 86,400 of them.
_COMMITS_LOOKED_AT = 100
_RIVAL_MS = 24 * 60 * 60 * 1000


@dataclass(frozen=True)
class _Plan:
    """The groups of files to merge in a version of a table, all from ``newest_ms`` or before; the
    columns of its rows, the columns by which it is clustered, and its properties.
    """

    version: int
    newest_ms: int
    rows: pa.Schema
    cluster_by: list[str]
    groups: list[list[TableFile]]
    checkpoint_interval: int
    properties: Mapping[str, str]


class Compaction:
    """The compaction of one table.

    ``obstacles`` says why the last run left the table's files as they are. ``size`` is that of the
    table when it was last looked at, None before.

    Args:
        schema: the columns of the table's rows; None for a table of records, whose columns its log
            has.
        rest: called after each piece of work.
        is_stopped: whether to end; asked often.
    """

    def __init__(
        self,
        path: Place,
        schema: pa.Schema | None,
        rest: Callable[[], object] = lambda: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.path = path
        self.obstacles: list[str] = []
        self.size: TableSize | None = None
        self._schema = schema
        self._rest = rest
        self._is_stopped = is_stopped
        # Files that cannot be merged, for example because another writer made them.
        self._unfit: set[str] = set()
        # The last version in which nothing was to do, and up to which the log was looked at.
        self._settled: int | None = None
        self._looked_at: int | None = None
        self._rival, self._rival_ms = "", 0

    def run(self) -> int:
        """Merge the small files that the table has now, until there is nothing to merge; return how
        many were replaced. Files that come meanwhile wait for the next call: a busy table would
        have more of them at each look, and other tables would wait forever.

        Raises:
            TableError: the table cannot be read or written.
        """
        replaced = 0
        try:
            if not self._has_changed():
                return 0
            plan = self._plan()
            self._rest()
            if not plan.groups:
                self._settled = plan.version
            while plan.groups:
                merged, is_overtaken = self._carry_out(plan)
                replaced += merged
                if is_overtaken:
                    break
                plan = self._plan(plan.newest_ms)
                self._rest()
        except _StoppedError:
            pass
        except TableNotFoundError:
            raise no_table(self.path) from None
        except (DeltaError, OSError, ValueError) as error:
            raise TableAccessError(
                f"files of the table at {self.path} cannot be merged: {self.path.reason(error)}"
            ) from None
        return replaced

    def _has_changed(self) -> bool:
        """Return whether the table has a later version than the one in which nothing was to do."""
        if self._settled is None:
            return True
        for version in (self._settled + 1, self._settled):
            try:
                read_commit(self.path, version)
            except FileNotFoundError:
                continue
            return version > self._settled
        # Both were cleaned from the log, which keeps the newest commit.
        return True

    def _plan(self, newest_ms: int | None = None) -> _Plan:
        """Look at the table.

        Args:
            newest_ms: later files stay as they are; by default, there are none.
        """
        table = open_delta(self.path)
        version, columns = table.version(), pa.schema(table.schema())
        partition_columns = table.metadata().partition_columns
        rows = (
            rows_of_table(columns)
            if self._schema is None
            else _with_columns(self._schema, columns, partition_columns)
        )
        self._look_for_rivals(version)
        features = special_features(table)
        cluster_by = clustering_columns(self.path, version) if CLUSTERED.issubset(features) else []
        self.obstacles = [
            feature for feature in features if feature not in {PARTITIONED, *CLUSTERED}
        ]
        if any(column_differences(file_schema(rows), table)):
            self.obstacles.append("other columns")
        if time.time() * 1000 - self._rival_ms < _RIVAL_MS:
            self.obstacles.append(f"another writer that merges its files ({self._rival})")
        files = list(_files_of(table, rows, self._unfit))
        self.size = TableSize(len(files), sum(file.size_bytes for file in files))
        self._unfit &= {file.name for file in files}
        if newest_ms is None:
            newest_ms = max((file.modified_ms for file in files), default=0)
        # Rows of a foreign file may be older than the others, whenever it came.
        known = [file for file in files if file.modified_ms <= newest_ms or file.is_foreign]
        groups = [
            group
            for part in ([] if self.obstacles else _by_partition(known))
            for group in groups_to_merge(part, are_clustered=bool(cluster_by))
        ]
        properties = table.metadata().configuration
        return _Plan(
            version, newest_ms, rows, cluster_by, groups, checkpoint_interval(table), properties
        )

    def _look_for_rivals(self, version: int) -> None:
        first = (
            max(0, version - _COMMITS_LOOKED_AT) if self._looked_at is None else self._looked_at + 1
        )
        for number in range(first, version + 1):
            with contextlib.suppress(FileNotFoundError):
                for action in read_commit(self.path, number):
                    commit = action.get("commitInfo", {})
                    if commit.get("operation") == "OPTIMIZE" and commit.get("engineInfo") != ENGINE:
                        self._rival, self._rival_ms = (
                            str(commit.get("engineInfo")),
                            int(commit.get("timestamp", 0)),
                        )
        self._looked_at = version

    def _carry_out(self, plan: _Plan) -> tuple[int, bool]:
        """Replace each group by one file; return how many files were replaced, and whether another
        writer came first.
        """
        replaced, version = 0, plan.version
        needed = {file.name for group in plan.groups for file in group}
        for group in plan.groups:
            names = {file.name for file in group}
            count, landed = self._replace(group, plan, version, needed)
            self._rest()
            if landed is None:
                return replaced, True
            if (
                count
                and (landed + 1) // plan.checkpoint_interval
                != (version + 1) // plan.checkpoint_interval
            ):
                # delta-rs makes one with its own commit of such a version, and this may be ours.
                write_checkpoint(self.path)
            needed -= names
            replaced, version = replaced + count, landed
        return replaced, False

    def _replace(
        self, group: Sequence[TableFile], plan: _Plan, version: int, needed: Collection[str]
    ) -> tuple[int, int | None]:
        """Replace a group; return how many files that were, and the version of the table then, None
        if another writer came first.
        """
        folder = replace(
            data_folder(self.path, plan.rows, _PREFIX), partition_values=group[0].partition_values
        )
        try:
            old, new = _write(folder, group, plan.cluster_by, self._is_stopped)
        except _UnfitFileError as error:
            self._unfit.add(error.name)
            return 0, version
        except (pa.ArrowException, ValueError) as error:
            _log.warning(
                "files of the table at %s cannot be merged and are left: %s",
                self.path,
                first_line(error),
            )
            self._unfit.update(file.name for file in group)
            return 0, version
        new = [with_named_statistics(file, plan.properties) for file in new]
        landed = replace_files(self.path, version, old, new, needed)
        if landed is None:
            delete_files(folder, [file.name for file in new])
            return 0, None
        return len(old), landed


class _StoppedError(Exception):
    """The compaction is to end, and nothing more is written."""


class _UnfitFileError(Exception):
    """A file whose rows cannot be read, are not in order, or take too much memory."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _with_columns(rows: pa.Schema, table: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """Return the columns of rows, with the columns that the table is partitioned by."""
    return pa.schema([*rows, *(table.field(name) for name in names if name not in rows.names)])


def _by_partition(files: Iterable[TableFile]) -> list[list[TableFile]]:
    partitions: dict[str, list[TableFile]] = {}
    for file in files:
        partitions.setdefault(json.dumps(file.partition_values), []).append(file)
    return list(partitions.values())


def _files_of(table: DeltaTable, rows: pa.Schema, unfit: Collection[str]) -> Iterator[TableFile]:
    deletion_vectors = pa.table(table.deletion_vectors())["filepath"].to_pylist()
    fixed = {path.rpartition("/")[2] for path in deletion_vectors}.union(unfit)
    actions = pa.table(table.get_add_actions(flatten=True))
    bound_columns = [
        f"{bound}.{path_in_file(rows, name)}"
        for name in ("topic", "partition")
        for bound in ("min", "max")
    ]
    partition_columns = table.metadata().partition_columns
    wanted = (*_FILE_COLUMNS, *bound_columns, *(f"partition.{name}" for name in partition_columns))
    columns = [name for name in wanted if name in actions.column_names]
    for action in actions.select(columns).to_pylist():
        name, count = action["path"], action["num_records"]
        is_fixed = name in fixed or count is None or name.startswith(CLUSTERED_PREFIX)
        yield TableFile(
            name,
            action["size_bytes"],
            count or 0,
            action["modification_time"],
            _bounds_of([action.get(column) for column in bound_columns]),
            is_fixed,
            is_foreign=not is_own_file(name),
            partition_values={
                name: partition_text(action[f"partition.{name}"]) for name in partition_columns
            },
        )


def _bounds_of(values: list[Any]) -> Bounds | None:
    first, last, first_partition, last_partition = values
    if first is None or last is None or first_partition is None or last_partition is None:
        return None
    return first, last, first_partition, last_partition


def _write(
    folder: ParquetFolder,
    group: Sequence[TableFile],
    cluster_by: list[str],
    is_stopped: Callable[[], bool],
) -> tuple[Sequence[TableFile], list[DataFile]]:
    """Write the rows of a group to one file, or to several by the clustering columns; return the
    files that it replaces, and the new ones.

    Raises:
        _UnfitFileError: a file cannot be merged.
        _StoppedError: it is to end.
        OSError: a file cannot be read or written now.
    """
    reader = _Reader(folder, is_stopped)
    if any(file.level for file in group):
        group, tables = reader.merged(group)
    else:
        group, rows = reader.together(group)
        tables = _row_groups(in_order(rows))
    is_last = bool(cluster_by) and max(file.level for file in group) >= file_groups.LAST_LEVEL
    split = reader.split(group, cluster_by) if is_last else None
    writers = _Writers(folder, cluster_by, split)
    try:
        for part in tables:
            writers.write(part)
        return group, writers.finish()
    except BaseException:
        writers.discard()
        raise


class _Writers:
    """Writes rows to one file, or to a file for each part of a split."""

    def __init__(self, folder: ParquetFolder, cluster_by: list[str], split: Split | None) -> None:
        self._cluster_by, self._split = cluster_by, split
        if split is not None:
            folder = replace(folder, prefix=CLUSTERED_PREFIX)
        self._writers = [
            BufferedWriter(folder, makes_one_file=True) for _ in range(parts_of(split))
        ]

    def write(self, rows: pa.Table) -> None:
        if self._split is None:
            self._writers[0].write(rows)
            return
        numbers = part_numbers(_columns_at(to_file(rows), self._cluster_by), self._split)
        for number in np.unique(numbers).tolist():
            self._writers[number].write(rows.filter(pa.array(numbers == number)))
        if sum(writer.buffered_bytes for writer in self._writers) > _MOST_ROWS_BYTES:
            for writer in self._writers:
                writer.flush()

    def finish(self) -> list[DataFile]:
        return [file for writer in self._writers for file in writer.finish()]

    def discard(self) -> None:
        for writer in self._writers:
            writer.discard()


def _columns_at(content: pa.Table, paths: list[str]) -> pa.Table:
    """Return the columns of a file's content at some paths, null if it has none."""
    columns = []
    for path in paths:
        name, *inner = path.split(".")
        if name not in content.column_names:
            columns.append(pa.chunked_array([pa.nulls(content.num_rows)]))
            continue
        column = content[name]
        columns.append(pc.struct_field(column, inner) if inner else column)
    return pa.table(dict(zip(paths, columns, strict=True)))


class _Reader:
    """Reads the files of a group in bounded memory."""

    def __init__(self, folder: ParquetFolder, is_stopped: Callable[[], bool]) -> None:
        self._folder = folder
        self._is_stopped = is_stopped

    def together(self, group: Sequence[TableFile]) -> tuple[Sequence[TableFile], pa.Table]:
        """Return the first files of a group, as many as fit into memory together, and their
        rows.
        """
        fitting = self._fitting(group, sum, _MOST_ROWS_BYTES)
        tables: list[pa.Table] = []
        size_bytes = 0
        for file in fitting:
            for rows in self._rows_of(file.name):
                tables.append(rows)
                size_bytes += rows.nbytes
            if size_bytes > _MOST_MERGED_BYTES:
                # Its texts repeat, so its footer says little of the memory that they take.
                raise _UnfitFileError(file.name)
        return fitting, pa.concat_tables(tables)

    def merged(self, group: Sequence[TableFile]) -> tuple[Sequence[TableFile], Iterator[pa.Table]]:
        """Return the first files of a group, as many as fit into memory by one row group of each,
        and their rows in order.
        """
        fitting = self._fitting(group, max, _MOST_MERGED_BYTES)
        if has_order(self._folder.schema):
            return fitting, merge_sorted([self._ordered_rows_of(file.name) for file in fitting])
        return fitting, (rows for file in fitting for rows in self._rows_of(file.name))

    def split(self, group: Sequence[TableFile], cluster_by: list[str]) -> Split | None:
        """Return how the rows of a group are divided into files, by a sample of them."""
        size_bytes, count = sum(file.size_bytes for file in group), sum(file.rows for file in group)
        parts = min(max(size_bytes // _CLUSTER_BYTES, count // _CLUSTER_ROWS), _MOST_CLUSTERS)
        step = max(1, count // _MOST_SAMPLED)
        samples: list[pa.Table] = []
        for file in group:
            samples += self._sample_of(file.name, cluster_by, step)
            if sum(sample.nbytes for sample in samples) > _MOST_SAMPLE_BYTES:
                step *= 2
                samples = [
                    sample.take(pa.array(np.arange(0, sample.num_rows, 2))) for sample in samples
                ]
        return (
            split_of(pa.concat_tables(samples, promote_options="permissive"), parts)
            if samples
            else None
        )

    def _sample_of(self, name: str, paths: list[str], step: int) -> Iterator[pa.Table]:
        """Yield the values of some columns in each ``step``-th row of a file; none if it has none
        of them.
        """
        try:
            with open_file(self._folder.filesystem, f"{self._folder.root}/{name}") as file:
                present = [
                    path for path in paths if path.partition(".")[0] in file.schema_arrow.names
                ]
                for index in range(file.num_row_groups if present else 0):
                    if self._is_stopped():
                        raise _StoppedError
                    content = file.read_row_group(index, columns=present, use_threads=False)
                    yield _columns_at(
                        content.take(pa.array(np.arange(0, content.num_rows, step))), paths
                    )
        except (FileNotFoundError, ValueError, pa.ArrowException):
            raise _UnfitFileError(name) from None

    def _fitting(
        self, group: Sequence[TableFile], size_of: Callable[[list[int]], int], most_bytes: int
    ) -> Sequence[TableFile]:
        """Return the files of the first commits of a group, at least of two; the files of one
        commit stay together, see ``file_groups``.
        """
        fitting: list[TableFile] = []
        left_bytes = most_bytes
        for number, (_, commit) in enumerate(groupby(group, attrgetter("modified_ms"))):
            files = list(commit)
            left_bytes -= sum(size_of(self._sizes_bytes(file.name)) for file in files)
            if left_bytes < 0:
                if number < 2:
                    raise _UnfitFileError(max(files, key=attrgetter("rows")).name)
                break
            fitting += files
        return fitting

    def _ordered_rows_of(self, name: str) -> Iterator[pa.Table]:
        last: Key | None = None
        for unsorted in self._rows_of(name):
            rows = in_order(unsorted)
            first, before, last = key_of(rows, 0), last, key_of(rows, rows.num_rows - 1)
            if before is not None and first < before:
                raise _UnfitFileError(name)
            yield rows

    def _rows_of(self, name: str) -> Iterator[pa.Table]:
        try:
            for rows in read_row_groups(self._folder, name, use_threads=False):
                if self._is_stopped():
                    raise _StoppedError
                if rows.num_rows:
                    yield rows
        except (FileNotFoundError, ValueError, pa.ArrowException):
            raise _UnfitFileError(name) from None

    def _sizes_bytes(self, name: str) -> list[int]:
        """Return about how much memory the rows of each row group take."""
        try:
            footer = pq.read_metadata(
                f"{self._folder.root}/{name}", filesystem=self._folder.filesystem
            )
        except (FileNotFoundError, ValueError, pa.ArrowException):
            raise _UnfitFileError(name) from None
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        return [0, *(group.total_byte_size + group.num_rows * _ROW_BYTES for group in groups)]


def _row_groups(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield parts that take about as much memory as a row group of other files."""
    count = max(1, rows.num_rows * ROW_GROUP_BYTES // max(rows.nbytes, 1))
    for start in range(0, rows.num_rows, count):
        yield rows.slice(start, count)
