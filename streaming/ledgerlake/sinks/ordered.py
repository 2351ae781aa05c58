"""Parquet files whose rows stand in order, from batches that mostly do already.

Key: (effective time, ledger, entry, batch index), where effective time is the broker's timestamp, or the publish time
of a message that has none. Broker times only rise, so rows normally pass straight through; publish times of several
producers do not, and a broker's clock can step back.

How it stays bounded: rows gather up to one row group and are sorted there. While each group begins at or after the end
of the one before, all of them go into one file, a run. A group that begins earlier opens a new run, and at the end the
runs are merged with one row group of each in memory.

The file's facts come from Parquet's own footer, so nothing is counted twice.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from datetime import date, datetime, timezone
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from pyarrow.fs import FileSystem

    Times = NDArray[np.int64]

ROW_GROUP_BYTES = 32 * 1024 * 1024
FILE_BYTES = 256 * 1024 * 1024

_DICTIONARY_COLUMNS = ["topic", "producer_name", "schema_version", "reason"]
_STATISTICS_COLUMNS = [
    "topic",
    "partition",
    "ledger_id",
    "entry_id",
    "broker_timestamp",
    "broker_index",
    "publish_time",
]


@dataclass(frozen=True)
class DataFile:
    """A finished file that no table knows yet: its name below the table, and what Delta's log records of it."""

    name: str
    size_bytes: int
    rows: int
    stats: str


@dataclass
class ParquetFolder:
    """Where the files of one table go; ``prefix`` begins every file's name."""

    filesystem: FileSystem
    root: str
    schema: pa.Schema
    prefix: str


@dataclass
class _OpenFile:
    name: str
    writer: pq.ParquetWriter
    footer: list[Any] = field(default_factory=list)
    bytes_taken: int = 0


class FileWriter:
    """Writes tables one after another into files of a bounded size, in the order given."""

    def __init__(self, folder: ParquetFolder) -> None:
        self._folder = folder
        self._open: _OpenFile | None = None
        self._files: list[DataFile] = []

    def write(self, table: pa.Table) -> None:
        if self._open is not None and self._open.bytes_taken >= FILE_BYTES:
            self._finish_file()
        if self._open is None:
            self._open = self._new_file()
        self._open.bytes_taken += table.nbytes
        self._open.writer.write_table(table, row_group_size=max(table.num_rows, 1))

    def finish(self) -> list[DataFile]:
        self._finish_file()
        return self._files

    def _new_file(self) -> _OpenFile:
        name = f"{self._folder.prefix}-{len(self._files):03d}-{uuid.uuid4()}.zstd.parquet"
        footer: list[Any] = []
        present = set(self._folder.schema.names)
        writer = pq.ParquetWriter(
            f"{self._folder.root}/{name}",
            self._folder.schema,
            filesystem=self._folder.filesystem,
            compression="zstd",
            compression_level=1,
            use_dictionary=[one for one in _DICTIONARY_COLUMNS if one in present],
            write_statistics=[one for one in _STATISTICS_COLUMNS if one in present],
            store_schema=False,
            metadata_collector=footer,
        )
        return _OpenFile(name, writer, footer)

    def _finish_file(self) -> None:
        if self._open is None:
            return
        self._open.writer.close()
        footer = self._open.footer[0]
        size_bytes = self._folder.filesystem.get_file_info(f"{self._folder.root}/{self._open.name}").size
        self._files.append(DataFile(self._open.name, size_bytes, footer.num_rows, _stats(footer)))
        self._open = None


class OrderedWriter:
    """Takes batches of one topic partition's messages in any order, leaves files whose rows are in order.

    Args:
        floor_us: effective time that the table had reached before; what is earlier is marked ``late``.
    """

    def __init__(self, folder: ParquetFolder, floor_us: int | None) -> None:
        self._folder = folder
        self._floor_us = floor_us
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._runs = [FileWriter(folder)]
        self._last_us: int | None = None
        self.max_effective_us: int | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def finish(self) -> list[DataFile]:
        self._flush()
        finished = [run.finish() for run in self._runs]
        if len(finished) == 1:
            return finished[0]
        return self._merge([[file.name for file in run] for run in finished])

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting, schema=self._folder.schema)
        self._waiting, self._waiting_bytes = [], 0
        times = effective_times(table)
        if (times[1:] < times[:-1]).any():
            order = np.argsort(times, kind="stable")
            table, times = table.take(pa.array(order)), times[order]
        if self._floor_us is not None and times[0] < self._floor_us:
            table = _mark_late(table, times < self._floor_us)
        if self._last_us is not None and times[0] < self._last_us:
            self._runs.append(FileWriter(self._folder))
        self._runs[-1].write(table)
        self._last_us = int(times[-1])
        self.max_effective_us = max(self._last_us, self.max_effective_us or self._last_us)

    def _merge(self, runs: list[list[str]]) -> list[DataFile]:
        out = FileWriter(self._folder)
        for table in merge_sorted([self._row_groups(names) for names in runs]):
            out.write(table)
        for name in (one for names in runs for one in names):
            self._folder.filesystem.delete_file(f"{self._folder.root}/{name}")
        return out.finish()

    def _row_groups(self, names: list[str]) -> Iterator[pa.Table]:
        for name in names:
            with pq.ParquetFile(f"{self._folder.root}/{name}", filesystem=self._folder.filesystem) as file:
                for index in range(file.num_row_groups):
                    yield file.read_row_group(index).cast(self._folder.schema)


def effective_times(table: pa.Table | pa.RecordBatch) -> Times:
    """Microseconds by which rows are ordered: the broker's timestamp, or the publish time where there is none."""
    times = pc.coalesce(table["broker_timestamp"], table["publish_time"])
    return times.cast(pa.int64()).to_numpy()  # type: ignore[no-any-return]


def sort_keys(table: pa.Table | pa.RecordBatch) -> tuple[Times, ...]:
    """The whole key, most significant first."""
    return (effective_times(table), *(table[name].to_numpy() for name in ("ledger_id", "entry_id", "batch_index")))


def merge_sorted(runs: list[Iterator[pa.Table]]) -> Iterator[pa.Table]:
    """Merge sorted runs; one table of each is held at a time.

    In each step everything up to the smallest of the tables' last keys can go out: no run has anything earlier left.
    """
    heads = {number: table for number, run in enumerate(runs) if (table := next(run, None)) is not None}
    while heads:
        cut = min(tuple(int(column[-1]) for column in sort_keys(table)) for table in heads.values())
        ready = []
        for number, table in list(heads.items()):
            count = int(_not_after(sort_keys(table), cut).sum())
            ready.append(table.slice(0, count))
            rest = table.slice(count) if count < table.num_rows else next(runs[number], None)
            if rest is None:
                del heads[number]
            else:
                heads[number] = rest
        joined = pa.concat_tables(ready)
        yield joined.take(pa.array(np.lexsort(sort_keys(joined)[::-1])))


def _not_after(keys: tuple[Times, ...], cut: tuple[int, ...]) -> NDArray[np.bool_]:
    result = np.ones(len(keys[0]), dtype=bool)
    for column, value in zip(reversed(keys), reversed(cut), strict=True):
        result = (column < value) | ((column == value) & result)
    return result


def _mark_late(table: pa.Table, late: NDArray[np.bool_]) -> pa.Table:
    return table.set_column(table.schema.get_field_index("late"), "late", pa.array(late))


def _stats(footer: Any) -> str:
    """Delta's statistics of a file, from its Parquet footer."""
    lowest: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for group_index in range(footer.num_row_groups):
        group = footer.row_group(group_index)
        for column_index in range(group.num_columns):
            column = group.column(column_index)
            statistics = column.statistics
            if statistics is None or column.path_in_schema not in _STATISTICS_COLUMNS:
                continue
            name = column.path_in_schema
            nulls[name] = nulls.get(name, 0) + (statistics.null_count or 0)
            if statistics.has_min_max:
                lowest[name] = min(lowest.get(name, statistics.min), statistics.min)
                highest[name] = max(highest.get(name, statistics.max), statistics.max)
    found = {"numRecords": footer.num_rows, "minValues": lowest, "maxValues": highest, "nullCount": nulls}
    return json.dumps(found, default=_stat_text)


def _stat_text(value: object) -> str:
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"no statistics of {type(value).__name__}")
