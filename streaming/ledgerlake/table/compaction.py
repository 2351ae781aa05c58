"""Small neighbouring files of a table become one, with the rows of each topic partition in order.

Rows of a merged file of messages are in the order of their key (see ``ordered_files``), over all
topic partitions that it has. So those of a topic partition are in order, and a read of a span of
time needs few row groups. Rows of rejects stay in the order of the files.

Files of the lowest level (see ``file_groups``) are sorted together in memory. Larger ones have
their rows in order already, and are merged with one row group of each in memory; if one has not,
because another writer made it, it is left as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake.exceptions import DeltaError

from ledgerlake.decode.record_columns import PULSAR_COLUMN
from ledgerlake.errors import TableError
from ledgerlake.table.delta_table import column_differences, data_folder, open_delta, special_features
from ledgerlake.table.file_groups import TableFile, groups_to_merge
from ledgerlake.table.layout import file_schema, rows_of_table
from ledgerlake.table.ordered_files import (
    ROW_GROUP_BYTES,
    BufferedWriter,
    delete_files,
    has_order,
    in_order,
    key_of,
    merge_sorted,
    read_row_groups,
)
from ledgerlake.table.replacement import replace_files
from ledgerlake.table.vacuum import is_data_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from deltalake import DeltaTable

    from ledgerlake.stored.places import Place
    from ledgerlake.table.file_groups import Bounds
    from ledgerlake.table.ordered_files import DataFile, Key, ParquetFolder

_FILE_COLUMNS = ("path", "size_bytes", "num_records", "modification_time")
_BOUND_COLUMNS = ("min.topic", "max.topic", "min.partition", "max.partition")
_BOUND_COLUMNS_OF_RECORDS = tuple(name.replace(".", f".{PULSAR_COLUMN}.") for name in _BOUND_COLUMNS)

# What the rows of small files may take in memory.
_MOST_ROWS_BYTES = 128 * 1024 * 1024

_PREFIX = "part-compacted"


class Compaction:
    """The compaction of one table.

    ``obstacles`` has the features for which the last run left the table's files as they are.

    Args:
        schema: the columns of the table's rows; None for a table of records, whose columns its log has.
        pause: called after each replacement; True ends the run.
    """

    def __init__(self, path: Place, schema: pa.Schema | None, pause: Callable[[], bool] = lambda: False) -> None:
        self.path = path
        self.obstacles: list[str] = []
        self._schema = schema
        self._pause = pause
        # Files that cannot be merged, for example because another writer made them.
        self._unfit: set[str] = set()

    def run(self) -> int:
        """Merge small files until there is nothing to merge; return how many were replaced.

        Raises:
            TableError: the table cannot be read or written.
        """
        replaced = 0
        while True:
            version, rows, groups = self._plan()
            if not groups:
                return replaced
            for group in groups:
                replaced += self._merge(group, version, rows)
                if self._pause():
                    return replaced

    def _plan(self) -> tuple[int, pa.Schema, list[list[TableFile]]]:
        """Return the newest version of the table, the columns of its rows, and the groups of files to
        merge in it.
        """
        try:
            table = open_delta(self.path)
            self.obstacles = special_features(table)
            rows = rows_of_table(pa.schema(table.schema())) if self._schema is None else self._schema
            if any(column_differences(file_schema(rows), table)):
                self.obstacles.append("other columns")
            groups = [] if self.obstacles else groups_to_merge(list(_files_of(table, self._unfit)))
        except (DeltaError, OSError) as error:
            raise TableError(f"the table at {self.path} cannot be opened: {self.path.reason(error)}") from None
        return table.version(), rows, groups

    def _merge(self, group: Sequence[TableFile], version: int, rows: pa.Schema) -> int:
        """Replace a group by one file; return how many files were replaced."""
        folder = data_folder(self.path, rows, _PREFIX)
        try:
            old, new = _write(folder, group)
        except _UnfitFileError as error:
            self._unfit.add(error.name)
            return 0
        except OSError as error:
            raise TableError(f"files of the table at {self.path} cannot be merged: {self.path.reason(error)}") from None
        if replace_files(self.path, version, old, new):
            return len(old)
        delete_files(folder, [file.name for file in new])
        return 0


class _UnfitFileError(Exception):
    """A file whose rows cannot be read, or are not in order."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _files_of(table: DeltaTable, unfit: Collection[str]) -> Iterator[TableFile]:
    deletion_vectors = pa.table(table.deletion_vectors())["filepath"].to_pylist()
    fixed = {path.rpartition("/")[2] for path in deletion_vectors}.union(unfit)
    actions = pa.table(table.get_add_actions(flatten=True))
    is_of_records = PULSAR_COLUMN in table.schema().to_arrow().names
    bound_columns = _BOUND_COLUMNS_OF_RECORDS if is_of_records else _BOUND_COLUMNS
    columns = [name for name in (*_FILE_COLUMNS, *bound_columns) if name in actions.column_names]
    for action in actions.select(columns).to_pylist():
        name, rows = action["path"], action["num_records"]
        is_fixed = name in fixed or rows is None or not is_data_file(name)
        yield TableFile(
            name,
            action["size_bytes"],
            rows or 0,
            action["modification_time"],
            _bounds_of([action.get(column) for column in bound_columns]),
            is_fixed,
        )


def _bounds_of(values: list[Any]) -> Bounds | None:
    first, last, first_partition, last_partition = values
    if first is None or last is None or first_partition is None or last_partition is None:
        return None
    return first, last, first_partition, last_partition


def _write(folder: ParquetFolder, group: Sequence[TableFile]) -> tuple[Sequence[TableFile], list[DataFile]]:
    """Write the rows of a group to one file; return the files that it replaces, and the new one.

    Raises:
        _UnfitFileError: a file cannot be merged.
        OSError: a file cannot be read or written now.
    """
    writer = BufferedWriter(folder, makes_one_file=True)
    try:
        if any(file.level for file in group):
            for rows in _merged(folder, group):
                writer.write(rows)
        else:
            group, rows = _read(folder, group)
            for part in _row_groups(in_order(rows)):
                writer.write(part)
        return group, writer.finish()
    except BaseException:
        writer.discard()
        raise


def _read(folder: ParquetFolder, group: Sequence[TableFile]) -> tuple[Sequence[TableFile], pa.Table]:
    """Return the first files of a group whose rows fit into memory, and their rows."""
    tables: list[pa.Table] = []
    size_bytes = 0
    for number, file in enumerate(group):
        # The files of one commit stay together, see ``file_groups``.
        begins_commit = number > 0 and file.modified_ms != group[number - 1].modified_ms
        if size_bytes > _MOST_ROWS_BYTES and begins_commit:
            group = group[:number]
            break
        for rows in _rows_of(folder, file.name):
            tables.append(rows)
            size_bytes += rows.nbytes
    if len(group) == 1:
        # Its rows were compressed well, and take much memory.
        raise _UnfitFileError(group[0].name)
    return group, pa.concat_tables(tables)


def _merged(folder: ParquetFolder, group: Sequence[TableFile]) -> Iterator[pa.Table]:
    """Yield the rows of files in their order, with one row group of each in memory."""
    if has_order(folder.schema):
        yield from merge_sorted([_ordered_rows_of(folder, file.name) for file in group])
    else:
        for file in group:
            yield from _rows_of(folder, file.name)


def _ordered_rows_of(folder: ParquetFolder, name: str) -> Iterator[pa.Table]:
    last: Key | None = None
    for unsorted in _rows_of(folder, name):
        rows = in_order(unsorted)
        first, before, last = key_of(rows, 0), last, key_of(rows, rows.num_rows - 1)
        if before is not None and first < before:
            raise _UnfitFileError(name)
        yield rows


def _rows_of(folder: ParquetFolder, name: str) -> Iterator[pa.Table]:
    try:
        for rows in read_row_groups(folder, name):
            if rows.num_rows:
                yield rows
    except (FileNotFoundError, ValueError, pa.ArrowException):
        raise _UnfitFileError(name) from None


def _row_groups(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield parts that take about as much memory as a row group of other files."""
    count = max(1, rows.num_rows * ROW_GROUP_BYTES // max(rows.nbytes, 1))
    for start in range(0, rows.num_rows, count):
        yield rows.slice(start, count)
