"""Writes Parquet files whose rows are in order, from batches that mostly are.

Key: (effective time, ledger, entry, batch index). The effective time is the broker's timestamp, or
the publish time if there is none; for a delayed message, it is the delivery time if that is later.
If a row has no time, because its producer's time was out of range, its effective time is 0: it
comes before the others, and is late if the table has rows. Broker times normally rise, so rows are
written as they come. But publish times of several producers do not rise, and a broker's clock can
step back.

Memory is bounded: rows are collected up to one row group and sorted there. While each group begins
at or after the end of the one before, all groups go into one file, a run. A group that begins
earlier begins a new run. At the end, the runs are merged. Publish times of several producers
overlap a little, so the merge has a row group of two or three runs in memory. If more runs than
``_MOST_OPEN_FILES`` overlap at one time, they become fewer by merges of so many first. Overlapping
files of several writers are merged the same way.

A value as large as a row group or larger has a file of its own, compressed only if a sample of it
shrinks.

The statistics of a file come from Parquet's own footer, and the bounds of long texts from the rows.
Readers of delta-rs's PyArrow dataset skip a file if the table names a column
(``STATISTICS_PROPERTY``) for which the file has no bounds or no count of nulls; a table that names
none means its first 32. So a file has the statistics of all columns with bounds, our tables name
only these, and the log gets the statistics of the named columns. In a table that names others, the
log has only the number of rows of our files, which no reader skips.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timezone
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ledgerlake.decode import sorted_runs
from ledgerlake.decode.schema import TIMESTAMP
from ledgerlake.runtime.memory import trim_heap
from ledgerlake.table.layout import (
    file_schema,
    from_file,
    log_text,
    path_in_file,
    record_of,
    to_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from numpy.typing import NDArray
    from pyarrow.fs import FileSystem

    from ledgerlake.stored.places import Place

    Times = NDArray[np.int64]

Key = tuple[int, int, int, int]

ROW_GROUP_BYTES = 32 * 1024 * 1024
FILE_BYTES = 256 * 1024 * 1024

# A merge has a row group of each in memory.
_MOST_OPEN_FILES = 8

_SAMPLE_BYTES = 256 * 1024

_MOST_BOUND_CHARACTERS = 256
_LAST_CHARACTER = "\U0010ffff"

# Producers choose texts, and the authors of schemas names and columns. The log keeps the statistics
# of each file, and a task's result has the statistics of all its files.
_MOST_STATS_BYTES = 256 * 1024

# Parquet leaves out the bounds of longer texts; its limit is 4096 bytes.
_MOST_FOOTER_BYTES = 1024

# The columns with statistics; see the module.
STATISTICS_PROPERTY = "delta.dataSkippingStatsColumns"
_PLAIN_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")

# A table of one short row takes kilobytes beside its row.
_MAX_BUFFERED_TABLES = 1000

# Numbers that rise slowly or stay the same: their differences take little space, and little time to
# compress.
_DELTA_ENCODED_COLUMNS = [
    "ledger_id",
    "entry_id",
    "batch_index",
    "broker_timestamp",
    "broker_index",
    "publish_time",
    "event_time",
    "sequence_id",
]
_DICTIONARY_COLUMNS = ["topic", "producer_name", "schema_version", "reason"]
_STATISTICS_COLUMNS = [
    "topic",
    "partition",
    "ledger_id",
    "entry_id",
    "broker_timestamp",
    "broker_index",
    "publish_time",
    "key",
]


@dataclass(frozen=True)
class DataFile:
    """A finished file that is not yet in a table: its name below the table, and its record for
    Delta's log.

    ``first`` and ``last`` are the keys of its first and last row, if its rows have an order.
    ``partition_values`` has the values of the columns by which the table is partitioned, as the log
    writes them.
    """

    name: str
    size_bytes: int
    rows: int
    stats: str
    first: Key | None = None
    last: Key | None = None
    partition_values: dict[str, str | None] = field(default_factory=dict)


@dataclass
class ParquetFolder:
    """The folder for the files of one table; ``prefix`` begins every file's name. All rows have
    ``partition_values`` in the columns by which the table is partitioned.
    """

    filesystem: FileSystem
    root: str
    schema: pa.Schema
    prefix: str
    partition_values: dict[str, str | None] = field(default_factory=dict)


def data_folder(path: Place, schema: pa.Schema, prefix: str) -> ParquetFolder:
    """Return the folder in which a task puts a table's files."""
    return ParquetFolder(path.filesystem(), path.root, schema, prefix)


@dataclass
class _OpenFile:
    name: str
    stream: pa.NativeFile
    writer: pq.ParquetWriter
    footer: list[Any]
    long_texts: dict[str, tuple[str, str]] = field(default_factory=dict)
    bytes_taken: int = 0
    first: Key | None = None
    last: Key | None = None

    def close(self) -> int:
        """Close the file; return its size in bytes. The store is not asked for it: another process
        may remove the file at any time.
        """
        with self.stream:
            self.writer.close()
            return int(self.stream.tell())


class FileWriter:
    """Writes tables one after another into files of a bounded size.

    Args:
        makes_one_file: write one file, whatever its size.
        is_ordered: the rows come in order, if they have one.
    """

    def __init__(
        self, folder: ParquetFolder, *, makes_one_file: bool = False, is_ordered: bool = True
    ) -> None:
        self._folder = folder
        self._makes_one_file = makes_one_file
        self._is_ordered = is_ordered and has_order(folder.schema)
        self._statistics_paths = bounded_paths(folder.schema)
        self._open: _OpenFile | None = None
        self._files: list[DataFile] = []

    def write(self, table: pa.Table) -> None:
        if (
            not self._makes_one_file
            and self._open is not None
            and self._open.bytes_taken >= FILE_BYTES
        ):
            self.roll_file()
        if self._open is None:
            self._open = self._new_file(
                "none" if _is_row_group(table) and not _shrinks(table) else "zstd"
            )
        self._open.bytes_taken += table.nbytes
        if self._is_ordered:
            self._open.first = self._open.first or key_of(table, 0)
            self._open.last = key_of(table, table.num_rows - 1)
        content = to_file(table)
        _note_long_texts(self._open.long_texts, content, self._statistics_paths)
        self._open.writer.write_table(content, row_group_size=max(table.num_rows, 1))

    def roll_file(self) -> None:
        """Close the open file; later rows go into another."""
        if self._open is None:
            return
        size_bytes = self._open.close()
        footer = self._open.footer[0]
        self._files.append(
            DataFile(
                self._open.name,
                size_bytes,
                footer.num_rows,
                _stats(footer, self._statistics_paths, self._open.long_texts),
                self._open.first,
                self._open.last,
                partition_values=self._folder.partition_values,
            )
        )
        self._open = None

    @property
    def has_files(self) -> bool:
        return self._open is not None or bool(self._files)

    def finish(self) -> list[DataFile]:
        self.roll_file()
        return self._files

    def discard(self) -> None:
        """Delete the files, and the one that is open."""
        names = [file.name for file in self._files]
        if self._open is not None:
            names.append(self._open.name)
            with contextlib.suppress(OSError, pa.ArrowException):
                self._open.close()
        self._open, self._files = None, []
        delete_files(self._folder, names)

    def _new_file(self, codec: str) -> _OpenFile:
        name = f"{self._folder.prefix}-{len(self._files):03d}-{uuid.uuid4()}.{codec}.parquet"
        footer: list[Any] = []
        rows = self._folder.schema
        stream = self._folder.filesystem.open_output_stream(
            f"{self._folder.root}/{name}", compression=None
        )
        writer = pq.ParquetWriter(
            stream,
            file_schema(rows),
            compression=codec,
            compression_level=1 if codec == "zstd" else None,
            use_dictionary=[*_paths_of(rows, _DICTIONARY_COLUMNS), *_text_paths(record_of(rows))],
            column_encoding=dict.fromkeys(
                _paths_of(rows, _DELTA_ENCODED_COLUMNS), "DELTA_BINARY_PACKED"
            ),
            write_statistics=self._statistics_paths,
            store_schema=False,
            metadata_collector=footer,
        )
        return _OpenFile(name, stream, writer, footer)


class BufferedWriter:
    """Collects small tables up to a row group, then writes them as they came.

    Args:
        makes_one_file: as for ``FileWriter``.
    """

    def __init__(self, folder: ParquetFolder, *, makes_one_file: bool = False) -> None:
        self._files = FileWriter(folder, makes_one_file=makes_one_file, is_ordered=False)
        self._buffer: list[pa.Table] = []
        self._buffered_bytes = 0

    def write(self, table: pa.Table) -> None:
        if table.num_rows == 0:
            return
        self._buffer.append(table)
        self._buffered_bytes += table.nbytes
        if self._buffered_bytes >= ROW_GROUP_BYTES:
            self.flush()
        elif len(self._buffer) >= _MAX_BUFFERED_TABLES:
            self._buffer = [pa.concat_tables(self._buffer).combine_chunks()]

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of the rows that no file has yet."""
        return self._buffered_bytes

    def finish(self, shared: BufferedWriter | None = None) -> list[DataFile]:
        """Close the files, and return them.

        Args:
            shared: takes the rows instead, if no file was opened for them yet.
        """
        if shared is not None and not self._files.has_files:
            for table in self._buffer:
                shared.write(table)
            return []
        self.flush()
        return self._files.finish()

    def discard(self) -> None:
        """Drop the buffered rows, and delete the written files."""
        self._buffer, self._buffered_bytes = [], 0
        self._files.discard()

    def flush(self) -> None:
        """Write the rows that were collected."""
        if self._buffer:
            self._files.write(pa.concat_tables(self._buffer))
        self._buffer, self._buffered_bytes = [], 0


class OrderedWriter:
    """Takes batches of one topic partition's messages in any order, and writes files whose rows are
    in order.

    Args:
        watermark_us: the greatest effective time in the table; earlier rows are marked ``late``.
    """

    def __init__(self, folder: ParquetFolder, watermark_us: int | None) -> None:
        self._folder = folder
        self._watermark_us = watermark_us
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_bytes = 0
        self._runs = [FileWriter(folder)]
        self._last: Key | None = None
        self._stepped_back = False
        self._last_taken = (-1, -1)
        self.max_effective_us: int | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Add a batch, in which positions must rise, unless its messages were delayed; batches may
        come in any order.
        """
        if batch.num_rows == 0:
            return
        first, last = (
            (batch["ledger_id"][row].as_py(), batch["entry_id"][row].as_py())
            for row in (0, batch.num_rows - 1)
        )
        # Delayed messages come in the order in which they were due.
        self._stepped_back |= (
            first < self._last_taken or batch["delivered_at"].null_count < batch.num_rows
        )
        self._last_taken = last
        alone = _is_row_group(batch)
        if alone:
            self.roll_file()
            # The chunks of the value are free by now, and writing it takes as much memory as they
            # did.
            trim_heap()
        self._buffer.append(batch)
        self._buffered_bytes += batch.nbytes
        if self._buffered_bytes >= ROW_GROUP_BYTES:
            self._flush()
        if alone:
            self.roll_file()
            trim_heap()

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of the rows that no file has yet."""
        return self._buffered_bytes

    def roll_file(self) -> None:
        """Close the open file: a row from another file will come between."""
        self._flush()
        self._runs[-1].roll_file()

    def finish(self, shared: BufferedWriter | None = None) -> list[DataFile]:
        """Close the files, and return them in order.

        Args:
            shared: takes the rows instead, if no file was opened for them yet.
        """
        if shared is not None and self._last is None:
            shared.write(self._take_buffer())
            return []
        self._flush()
        files = [file for run in self._runs for file in run.finish()]
        merged, replaced = merge_overlapping(self._folder, files)
        delete_files(self._folder, replaced)
        return merged

    def _flush(self) -> None:
        table = self._take_buffer()
        if table.num_rows == 0:
            return
        if self._last is not None and key_of(table, 0) < self._last:
            self._runs[-1].roll_file()
            self._runs.append(FileWriter(self._folder))
        self._runs[-1].write(table)
        self._last = key_of(table, table.num_rows - 1)

    def _take_buffer(self) -> pa.Table:
        """Return the rows that no file has yet, in order."""
        table = pa.Table.from_batches(self._buffer, schema=self._folder.schema)
        self._buffer, self._buffered_bytes = [], 0
        if table.num_rows == 0:
            return table
        times = effective_times(table)
        if self._stepped_back or (times[1:] < times[:-1]).any():
            order = np.lexsort(sort_keys(table)[::-1])
            # A copy may be as large as the largest message.
            if (order[1:] < order[:-1]).any():
                table, times = table.take(pa.array(order)), times[order]
        self._stepped_back = False
        if self._watermark_us is not None and times[0] < self._watermark_us:
            table = _mark_late(table, times < self._watermark_us)
        last_us = int(times[-1])
        self.max_effective_us = max(last_us, self.max_effective_us or last_us)
        return table


def _is_row_group(rows: pa.Table | pa.RecordBatch) -> bool:
    """Return whether this is a single row as large as a row group, which gets a file of its own."""
    return bool(rows.num_rows == 1 and rows.nbytes >= ROW_GROUP_BYTES)


def _shrinks(row: pa.Table) -> bool:
    """Return whether a sample of the value compresses by at least 5 %. If not, compression wastes
    time, and memory for a copy. Records are compressed always.
    """
    name = next((name for name in ("value", "entry") if name in row.schema.names), None)
    if name is None:
        return True
    value = row.column(name).chunk(0)[0].as_buffer()
    middle = value.slice(value.size // 2, min(_SAMPLE_BYTES, value.size - value.size // 2))
    packed: pa.Buffer = pa.Codec("zstd", 1).compress(middle)
    return bool(packed.size < 0.95 * middle.size)


def copy_rows(
    folder: Place, schema: pa.Schema, file: DataFile, is_wanted: Callable[[pa.Table], pa.Array]
) -> list[DataFile]:
    """Write the wanted rows of a file to new files of the same micro-batch; return those.

    Args:
        is_wanted: a mask of rows.

    Raises:
        OSError, ArrowException: the file cannot be read.
    """
    prefix = "-".join(file.name.split("-")[:3])
    to = ParquetFolder(folder.filesystem(), folder.root, schema, prefix, file.partition_values)
    writer = BufferedWriter(to)
    for rows in read_row_groups(to, file.name):
        writer.write(rows.filter(is_wanted(rows)))
    return writer.finish()


def merge_overlapping(
    folder: ParquetFolder, files: list[DataFile]
) -> tuple[list[DataFile], list[str]]:
    """Merge the files of one topic partition that overlap, so that all files follow each other.

    Args:
        files: the files, each with its rows in order. Files of different partitions of the table
            do not count as overlapping.

    Returns:
        The files in order, and the names of those that were replaced, which still exist.
    """
    result: list[DataFile] = []
    replaced: list[str] = []
    by_partition: dict[str, list[DataFile]] = {}
    for file in files:
        by_partition.setdefault(json.dumps(file.partition_values), []).append(file)
    for of_partition in by_partition.values():
        to = replace(folder, partition_values=of_partition[0].partition_values)
        for group in _overlapping(_in_order_of_keys(of_partition)):
            if len(group) == 1:
                result += group
            else:
                result += _merged(to, group)
                replaced += [file.name for file in group]
    return result, replaced


def _merged(folder: ParquetFolder, files: list[DataFile]) -> list[DataFile]:
    """Write the rows of files, in the order of their first keys, to new files in order."""
    if _most_at_one_time(files) <= _MOST_OPEN_FILES:
        return _merged_at_once(folder, files, FileWriter(folder))
    fewer = []
    for start in range(0, len(files), _MOST_OPEN_FILES):
        part = files[start : start + _MOST_OPEN_FILES]
        fewer += _merged_at_once(folder, part, FileWriter(folder, makes_one_file=True))
    result = _merged(folder, _in_order_of_keys(fewer))
    delete_files(folder, [file.name for file in fewer])
    return result


def _merged_at_once(
    folder: ParquetFolder, files: list[DataFile], out: FileWriter
) -> list[DataFile]:
    first_keys = [file.first for file in files if file.first is not None]
    for table in merge_sorted([read_row_groups(folder, file.name) for file in files], first_keys):
        count = -(-table.num_rows * ROW_GROUP_BYTES // max(table.nbytes, ROW_GROUP_BYTES))
        for start in range(0, table.num_rows, count):
            out.write(table.slice(start, count))
    return out.finish()


def _most_at_one_time(files: list[DataFile]) -> int:
    """Return how many files overlap at most at one key."""
    begins = [(file.first, 0) for file in files]
    ends = [(file.last, 1) for file in files]
    counts = accumulate(1 if kind == 0 else -1 for _, kind in sorted([*begins, *ends]))
    return max(counts)


def _in_order_of_keys(files: list[DataFile]) -> list[DataFile]:
    return sorted(files, key=lambda file: (file.first, file.last))


def _overlapping(files: list[DataFile]) -> Iterator[list[DataFile]]:
    """Yield groups of neighbours that overlap."""
    group: list[DataFile] = []
    reached: Key | None = None
    for file in files:
        assert file.first is not None
        assert file.last is not None
        if reached is not None and file.first > reached:
            yield group
            group, reached = [], None
        group.append(file)
        reached = max(reached or file.last, file.last)
    if group:
        yield group


def delete_files(folder: ParquetFolder, names: Iterable[str]) -> None:
    """Delete files that no table has. ``vacuum`` deletes those that could not be deleted."""
    for name in names:
        with contextlib.suppress(OSError):
            folder.filesystem.delete_file(f"{folder.root}/{name}")


def open_file(filesystem: FileSystem, path: str) -> pq.ParquetFile:
    """Open a file of a table.

    Another writer, such as Spark, may have written times as INT96. By default Arrow reads these in
    nanoseconds, which no time beyond the year 2262 has.

    Raises:
        OSError, ArrowException: it cannot be read.
    """
    return pq.ParquetFile(path, filesystem=filesystem, coerce_int96_timestamp_unit="us")


def read_row_groups(
    folder: ParquetFolder, name: str, *, use_threads: bool = True
) -> Iterator[pa.Table]:
    """Yield the row groups of a file, one at a time.

    Raises:
        OSError, ArrowException: it cannot be read, or has other columns.
    """
    with open_file(folder.filesystem, f"{folder.root}/{name}") as file:
        for index in range(file.num_row_groups):
            yield from_file(file.read_row_group(index, use_threads=use_threads), folder.schema)


def has_order(schema: pa.Schema) -> bool:
    """Return whether rows of these columns have a key; rejects have none."""
    return "batch_index" in schema.names


def in_order(rows: pa.Table) -> pa.Table:
    """Return the rows in the order of their key, if they have one."""
    if not has_order(rows.schema):
        return rows
    order = np.lexsort(sort_keys(rows)[::-1])
    return rows if (order[1:] > order[:-1]).all() else rows.take(pa.array(order))


def effective_times(table: pa.Table | pa.RecordBatch) -> Times:
    """Return the effective time of each row in microseconds, 0 if there is none; see the module."""
    stored = pc.coalesce(table["broker_timestamp"], table["publish_time"])
    times: Times = pc.fill_null(stored.cast(pa.int64()), 0).to_numpy()
    if table["delivered_at"].null_count == table.num_rows:
        return times
    due = pc.if_else(pc.is_valid(table["delivered_at"]), table["deliver_at"].cast(pa.int64()), None)
    latest: Times = np.maximum(times, pc.fill_null(due, 0).to_numpy())
    return latest


def sort_keys(table: pa.Table | pa.RecordBatch) -> tuple[Times, ...]:
    """Return the columns of the key, most significant first."""
    return (
        effective_times(table),
        *(table[name].to_numpy() for name in ("ledger_id", "entry_id", "batch_index")),
    )


def key_of(table: pa.Table | pa.RecordBatch, row: int) -> Key:
    """Return the key of one row."""
    effective_us, ledger_id, entry_id, batch_index = (
        int(column[0]) for column in sort_keys(table.slice(row, 1))
    )
    return effective_us, ledger_id, entry_id, batch_index


def packed(rows: NDArray[np.int64]) -> NDArray[np.void]:
    """Return each row of integers as a single comparable value."""
    values = np.ascontiguousarray(rows, dtype=np.int64)
    return values.view(np.dtype((np.void, values.shape[1] * values.itemsize))).reshape(-1)


def merge_sorted(
    runs: list[Iterator[pa.Table]], first_keys: list[Key] | None = None
) -> Iterator[pa.Table]:
    """Merge sorted runs; one table of each is in memory at a time. With their first keys, which
    rise, those that are not needed yet are not opened.
    """
    return sorted_runs.merge_sorted(runs, sort_keys, pa.Table.slice, _joined, first_keys)


def _joined(tables: list[pa.Table]) -> pa.Table:
    return in_order(pa.concat_tables(tables))


def _mark_late(table: pa.Table, late: NDArray[np.bool_]) -> pa.Table:
    return table.set_column(table.schema.get_field_index("late"), "late", pa.array(late))


def _paths_of(rows: pa.Schema, columns: list[str]) -> list[str]:
    """Return the paths in the files of those columns that the rows have."""
    return [path_in_file(rows, name) for name in columns if name in rows.names]


def bounded_paths(rows: pa.Schema) -> list[str]:
    """Return the columns of the files for rows that have bounds in the log; with a dot for one
    inside another.
    """
    fields = record_of(rows) or ()
    return [
        *_paths_of(rows, _STATISTICS_COLUMNS),
        *(field.name for field in fields if _has_bounds(field.type)),
    ]


def statistics_columns(rows: pa.Schema, partitioned_by: Collection[str] = ()) -> str:
    """Return the value of ``STATISTICS_PROPERTY`` for a table: the columns for which the log gets
    the bounds. Names that would have to be quoted are left out, as are columns that partition the
    table.
    """
    paths = [path for path in bounded_paths(rows) if path not in partitioned_by]
    return ",".join(path for path in paths if _PLAIN_PATH.fullmatch(path))


def with_named_statistics(file: DataFile, properties: Mapping[str, str]) -> DataFile:
    """Return a file with its statistics of the columns that the table names, or with its number of
    rows alone if one of them has none. With other columns, each file would have all fields in the
    log that the schemas of a topic ever added.

    Args:
        properties: Delta's properties of the table.
    """
    known = json.loads(file.stats)
    named = [tuple(path.split(".")) for path in properties.get(STATISTICS_PROPERTY, "*").split(",")]
    stats: dict[str, Any] = {"numRecords": file.rows}
    if all(_at(known.get("nullCount"), path) is not None for path in named):
        stats |= {
            part: _chosen(known[part], named) for part in ("minValues", "maxValues", "nullCount")
        }
    return replace(file, stats=log_text(stats))


def _at(values: Any, path: Iterable[str]) -> Any:
    """Return what values have at a path; None if they have nothing there."""
    for name in path:
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _chosen(values: dict[str, Any], paths: Iterable[tuple[str, ...]]) -> dict[str, Any]:
    """Return the values at some paths, without the others."""
    chosen: dict[str, Any] = {}
    for path in paths:
        value = _at(values, path)
        if value is not None:
            *outer, name = path
            part = chosen
            for step in outer:
                part = part.setdefault(step, {})
            part[name] = value
    return chosen


def _has_bounds(kind: pa.DataType) -> bool:
    """Return whether Delta's statistics are written of a column of a record. Parquet leaves numbers
    that are none out of the bounds of floating columns, and readers count them as the largest.
    """
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_string(kind)
        or pa.types.is_date(kind)
        or kind == TIMESTAMP
    )


def _text_paths(kind: pa.DataType | None, path: str = "") -> Iterator[str]:
    """Yield the paths of texts in a record. They often repeat, and a dictionary then saves
    space.
    """
    if kind is None:
        return
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _text_paths(field.type, f"{path}.{field.name}" if path else field.name)
    elif pa.types.is_list(kind):
        yield from _text_paths(kind.value_type, f"{path}.list.element")
    elif pa.types.is_map(kind):
        yield from _text_paths(kind.key_type, f"{path}.key_value.key")
        yield from _text_paths(kind.item_type, f"{path}.key_value.value")
    elif pa.types.is_string(kind):
        yield path


def _note_long_texts(
    bounds: dict[str, tuple[str, str]], content: pa.Table, paths: Iterable[str]
) -> None:
    """Add the bounds of those texts of a file that may be too long for its footer."""
    for path in paths:
        outer, _, name = path.rpartition(".")
        column = pc.struct_field(content[outer], name) if outer else content[name]
        if not pa.types.is_string(column.type):
            continue
        if (pc.max(pc.binary_length(column)).as_py() or 0) > _MOST_FOOTER_BYTES:
            found = pc.min_max(column).as_py()
            lowest, highest = bounds.get(path, (found["min"], found["max"]))
            bounds[path] = min(lowest, found["min"]), max(highest, found["max"])


def _stats(footer: Any, paths: Collection[str], long_texts: Mapping[str, tuple[str, str]]) -> str:
    """Return Delta's statistics of a file; only its number of rows, if the bounds of a column are
    not known or cannot be represented, or if all together are too long.

    Args:
        footer: Parquet's.
        paths: the columns with statistics.
        long_texts: bounds of texts; they may lie outside of the bounds in the footer.
    """
    lowest = {path: bounds[0] for path, bounds in long_texts.items()}
    highest = {path: bounds[1] for path, bounds in long_texts.items()}
    nulls = dict.fromkeys(paths, 0)
    for group_index in range(footer.num_row_groups):
        group = footer.row_group(group_index)
        for column_index in range(group.num_columns):
            column = group.column(column_index)
            path, statistics = column.path_in_schema, column.statistics
            if path not in nulls:
                continue
            if statistics is None or statistics.null_count is None:
                return _stats_text(footer, {})
            nulls[path] += statistics.null_count
            if statistics.has_min_max:
                try:
                    lowest[path] = min(lowest.get(path, statistics.min), statistics.min)
                    highest[path] = max(highest.get(path, statistics.max), statistics.max)
                except (OverflowError, ValueError):
                    return _stats_text(footer, {})
            elif statistics.null_count < column.num_values and path not in long_texts:
                return _stats_text(footer, {})
    uppers = {path: _upper(value) for path, value in highest.items()}
    if None in uppers.values():
        return _stats_text(footer, {})
    parts = {
        "minValues": {path: _lower(value) for path, value in lowest.items()},
        "maxValues": uppers,
        "nullCount": nulls,
    }
    text = _stats_text(footer, {part: _nested(values) for part, values in parts.items()})
    return text if len(text.encode()) <= _MOST_STATS_BYTES else _stats_text(footer, {})


def _stats_text(footer: Any, parts: dict[str, Any]) -> str:
    return log_text({"numRecords": footer.num_rows, **parts})


def _lower(bound: Any) -> Any:
    """Return a lower bound as the log should have it: a long text would be in each checkpoint of
    the log.
    """
    return text_before(bound, _MOST_BOUND_CHARACTERS) if isinstance(bound, str) else _plain(bound)


def _upper(bound: Any) -> Any:
    """Return an upper bound as the log should have it; None if there is none."""
    return text_after(bound, _MOST_BOUND_CHARACTERS) if isinstance(bound, str) else _plain(bound)


def text_before(text: str, characters: int) -> str:
    """Return a lower bound of a text, of so many characters at most."""
    return text[:characters]


def text_after(text: str, characters: int) -> str | None:
    """Return an upper bound of a text, of so many characters and one at most: the beginning of a
    long text, with the last character in place of the last one that can become greater. None if
    there is no such bound.
    """
    if len(text) <= characters:
        return text
    beginning = text[: characters + 1].rstrip(_LAST_CHARACTER)
    return beginning[:-1] + _LAST_CHARACTER if beginning else None


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with the fields of the column ``pulsar`` in a dict of their own, as Delta has
    them.
    """
    result: dict[str, Any] = {}
    for path, value in values.items():
        outer, _, name = path.rpartition(".")
        if outer:
            result.setdefault(outer, {})[name] = value
        else:
            result[path] = value
    return result


def _plain(bound: Any) -> Any:
    """Return a bound as JSON has it."""
    if isinstance(bound, datetime):
        return (
            bound.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        )
    return bound.isoformat() if isinstance(bound, date) else bound
