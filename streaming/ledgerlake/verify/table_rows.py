"""The rows of a table, for ``verify``: read a batch at a time, their keys, and their order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import DeltaError, TableNotFoundError
from numpy.typing import NDArray

from ledgerlake.client.topics import join_partition
from ledgerlake.decode import schema
from ledgerlake.errors import TableAccessError, TableError
from ledgerlake.options.spark_options import LOCAL_MASTER, SparkConfig
from ledgerlake.reasons import REASONS
from ledgerlake.runtime.hadoop import connect_store
from ledgerlake.stored.places import Place
from ledgerlake.table.compaction import CLUSTERED_PREFIX
from ledgerlake.table.deletion_vectors import live_part, live_rows
from ledgerlake.table.features import PARTITIONED, special_features
from ledgerlake.table.layout import has_record_shape
from ledgerlake.table.open_table import no_table, not_readable, open_delta
from ledgerlake.table.ordered_files import open_file, sort_keys
from ledgerlake.table.vacuum import is_own_file
from ledgerlake.values.record_columns import PULSAR_COLUMN

if TYPE_CHECKING:
    from collections.abc import Container, Hashable, Iterable, Iterator, Sequence

    from ledgerlake.wire.message_id import Position

Keys = NDArray[np.int64]

_KEY = ["ledger_id", "entry_id", "batch_index", "broker_index"]
_TYPES = pa.unify_schemas([schema.MESSAGES, schema.REJECTS])
_ORDER_COLUMNS = [
    "topic",
    "partition",
    "ledger_id",
    "entry_id",
    "batch_index",
    "broker_index",
    "broker_timestamp",
    "publish_time",
    "late",
    "deliver_at",
    "delivered_at",
]

_BATCH_ROWS = 65_536

OrderKey = tuple[int, ...]


@dataclass(frozen=True)
class TableFile:
    """A file of a table. Rows have an order in each ``place``: a partition of the table, or a
    clustered file. It is None of a file that another writer made, by its name: a commit of Delta's
    ``OPTIMIZE``, ``UPDATE`` or ``MERGE`` keeps no order.
    """

    place: str | None
    path: str

    @classmethod
    def of(cls, partition: object, path: str) -> TableFile:
        """Return the file at a path, in a partition of the table."""
        name = path.rpartition("/")[2]
        if not is_own_file(name):
            return cls(None, path)
        # The files of one merge divide its rows, so they have no order among themselves.
        return cls(f"{partition} {name if name.startswith(CLUSTERED_PREFIX) else ''}", path)


class TableRows:
    """The rows of one version of a table: the compared columns, a batch at a time."""

    def __init__(self, path: Place, spark: SparkConfig, more: Sequence[str] = ()) -> None:
        """
        Args:
            spark: for the session, on this machine, that reads a table whose files do not have its
                columns' names.
            more: columns beside those that are compared.
        """
        self.path, self._spark = path, spark
        self._columns = [*_ORDER_COLUMNS, *more]
        try:
            table = open_delta(path)
            actions = pa.table(table.get_add_actions(flatten=True))
            paths = actions["path"].to_pylist()
            names = [name for name in actions.column_names if name.startswith("partition.")]
            partitions = actions.select([*names, "path"]).drop(["path"]).to_pylist()
            self._files = [
                TableFile.of(partition, path)
                for partition, path in zip(partitions, paths, strict=True)
            ]
            self._live = live_rows(table)
            columns = pa.schema(table.schema())
            self._inside = f"{PULSAR_COLUMN}." if has_record_shape(columns) else ""
            if not self._inside and "topic" not in columns.names:
                raise TableError(
                    f"the table at {path} has no column topic, nor a column {PULSAR_COLUMN} with "
                    "all the metadata of Pulsar, so no stream has written it; correct its path"
                )
            self._version = table.version()
            self._partitioned_by = [f"`{name}`" for name in table.metadata().partition_columns]
            features = special_features(table)
            # Such files do not have all columns by their names.
            lacks_columns = PARTITIONED in features and not all(map(is_own_file, paths))
            self._needs_spark = "columnMapping" in features or lacks_columns
        except TableNotFoundError:
            raise no_table(path) from None
        except (DeltaError, OSError) as error:
            raise TableAccessError(
                f"the table at {path} cannot be opened: {path.reason(error)}"
            ) from None

    def batches(
        self, wanted: Container[object] | None = None
    ) -> Iterator[tuple[TableFile, pa.Table]]:
        """Yield the rows of each file in their order, and file after file.

        Args:
            wanted: the files; all of them if it is None.

        Raises:
            TableError: a file cannot be read.
        """
        if self._needs_spark:
            for file, rows in self._read_by_spark():
                if wanted is None or file in wanted:
                    yield file, rows
            return
        for file in self._files:
            if wanted is None or file in wanted:
                for rows in self._read(file.path):
                    yield file, rows

    def _read(self, name: str) -> Iterator[pa.Table]:
        live, first = self._live.get(name.rpartition("/")[2]), 0
        try:
            with open_file(self.path.filesystem(), (self.path / name).root) as file:
                present = set(file.schema_arrow.names)
                if self._inside:
                    columns = [f"{self._inside}{name}" for name in self._columns]
                else:
                    columns = [name for name in self._columns if name in present]
                for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                    rows = pa.Table.from_batches([batch])
                    if live is not None:
                        rows = rows.filter(pa.array(live_part(live, first, batch.num_rows)))
                    first += batch.num_rows
                    if self._inside:
                        rows = pa.Table.from_struct_array(rows[PULSAR_COLUMN])
                    # Other writers have other types of Arrow for the same columns of Delta.
                    yield rows.cast(pa.schema([_TYPES.field(name) for name in rows.column_names]))
        except (OSError, pa.ArrowException) as error:
            raise not_readable(self.path, error) from None

    def _read_by_spark(self) -> Iterator[tuple[TableFile, pa.Table]]:
        """Yield what ``batches`` does. Spark sorts the rows, and gives them a part at a time."""
        from ledgerlake.runtime.session import start_session

        spark = replace(self._spark, master=LOCAL_MASTER)
        session = start_session("ledgerlake verify", spark.master, spark.session_settings)
        connect_store(session, self.path)
        rows = (
            session.read.format("delta")
            .option("versionAsOf", self._version)
            .load(self.path.hadoop_uri)
        )
        columns = rows.select(f"{PULSAR_COLUMN}.*").columns if self._inside else rows.columns
        names = [name for name in self._columns if name in columns]
        # A large file is read in splits; within a split, rows are numbered in their order.
        place = [
            "_metadata.file_path",
            "_metadata.file_block_start",
            "monotonically_increasing_id() as row",
        ]
        partition = (
            f"to_json(struct({', '.join(self._partitioned_by)}))" if self._partitioned_by else "''"
        )
        selected = rows.selectExpr(
            *(f"{self._inside}{name}" for name in names), *place, f"{partition} as of_partition"
        )
        in_order = selected.sort("file_path", "file_block_start", "row")
        for (packed_rows,) in in_order.mapInArrow(_as_streams, "rows binary").toLocalIterator():
            with pa.ipc.open_stream(pa.py_buffer(packed_rows)) as stream:
                yield from _by_file(stream.read_all(), names)


def _as_streams(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield each batch as one value: rows one by one are slow to collect."""
    for batch in batches:
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.record_batch({"rows": pa.array([stream.getvalue().to_pybytes()], pa.binary())})


def _by_file(rows: pa.Table, names: list[str]) -> Iterator[tuple[TableFile, pa.Table]]:
    """Yield the rows of each file and partition of the table, which follow each other."""
    for of_file in _by_values(rows, ["of_partition", "file_path"]):
        file = TableFile.of(of_file["of_partition"][0].as_py(), of_file["file_path"][0].as_py())
        yield file, of_file.select(names)


def by_topic_partition(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Yield the rows of each topic partition, in their order; rows without a topic are left out."""
    for of_rows in _by_values(rows, ["topic", "partition"]):
        yield join_partition(of_rows["topic"][0].as_py(), of_rows["partition"][0].as_py()), of_rows


def _by_values(rows: pa.Table, names: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the rows that have the same values in some columns, in their order; rows without a
    value are left out.
    """
    for name in names:
        if rows[name].null_count:
            rows = rows.filter(pc.is_valid(rows[name]))
    if not rows.num_rows:
        return
    if all(pc.all(pc.equal(rows[name], rows[name][0])).as_py() for name in names):
        yield rows
        return
    values = np.zeros(rows.num_rows, dtype=np.int64)
    for name in names:
        encoded = rows[name].combine_chunks().dictionary_encode()
        values = values * len(encoded.dictionary) + encoded.indices.to_numpy()
    order = np.argsort(values, kind="stable")
    in_order = rows.take(pa.array(order))
    ends = [*(np.flatnonzero(np.diff(values[order])) + 1).tolist(), len(order)]
    begin = 0
    for end in ends:
        yield in_order.slice(begin, end - begin)
        begin = end


def up_to(rows: pa.Table, end: Position) -> pa.Table:
    """Return the rows of entries up to ``end``."""
    ledger, entry = rows["ledger_id"], rows["entry_id"]
    is_before_end = pc.or_(
        pc.less(ledger, end.ledger_id),
        pc.and_(pc.equal(ledger, end.ledger_id), pc.less_equal(entry, end.entry_id)),
    )
    return _filtered(rows, is_before_end)


def rejected_keys(rows: pa.Table, reasons: pa.ChunkedArray) -> Keys:
    """Return ledger, entry, batch index and reason of rejects; the index is -1 if the entire entry
    is one.

    Args:
        reasons: their reasons, or the former reasons of rejects that were replayed.
    """
    found = pc.extract_regex(rows["message_id"], r"^\d+:\d+:(?P<index>\d+)")
    indexes = pc.fill_null(pc.struct_field(found, "index").cast(pa.int64()), -1).to_numpy()
    codes = pc.fill_null(pc.index_in(reasons, pa.array(list(REASONS))), -1).to_numpy()
    return np.column_stack([entries_of(rows), indexes, codes]).astype(np.int64)


def not_replayed(rejected: Keys, replayed: Keys) -> tuple[Keys, int]:
    """Return the keys that were rejected more often than replayed, each once, and how many rejects
    they have that were not replayed.
    """
    keys, which, counts = np.unique(
        np.concatenate([rejected, replayed]), axis=0, return_inverse=True, return_counts=True
    )
    done = np.bincount(which.reshape(-1)[len(rejected) :], minlength=len(keys))
    left = np.maximum(counts - 2 * done, 0)
    live: Keys = keys[left > 0]
    return live, int(left.sum())


def _filtered(rows: pa.Table, mask: pa.ChunkedArray) -> pa.Table:
    """Return the rows of a mask, without a copy if these are all."""
    return rows if pc.all(mask, skip_nulls=False).as_py() else rows.filter(mask)


@dataclass
class _FileOrder:
    """The sort keys of the first, last and lowest row of a file."""

    first: OrderKey
    last: OrderKey
    lowest: OrderKey

    @property
    def times_us(self) -> tuple[int, int]:
        return self.first[0], self.last[0]


class RowOrder:
    """Finds rows that come after a later row: inside each file, and between the files of a lane in
    the order of their times. Rows that are marked late are not looked at. The watermark of a
    topic partition is a time, so two commits may have rows of one time in any order.

    A lane is one whose rows have an order: a topic partition in a place of the table.
    """

    def __init__(self) -> None:
        # The rows that come after a later one in their file, each compared with the one before it.
        self.descents = 0
        self._lanes: dict[Hashable, dict[Hashable, _FileOrder]] = {}

    def add(self, lane: Hashable, file: Hashable, rows: pa.Table) -> None:
        """Add the next rows of a file."""
        keys = _order_keys(rows)
        if not len(keys):
            return
        first, last = tuple(keys[0].tolist()), tuple(keys[-1].tolist())
        descents = int(_descends(keys[:-1], keys[1:]).sum())
        lowest = tuple(keys[np.lexsort(keys.T[::-1])[0]].tolist()) if descents else first
        files = self._lanes.setdefault(lane, {})
        before = files.get(file)
        if before is None:
            files[file] = _FileOrder(first, last, lowest)
        else:
            descents += first < before.last
            before.last, before.lowest = last, min(before.lowest, lowest)
        self.descents += descents

    def overlaps(self) -> dict[Hashable, dict[Hashable, int]]:
        """Return the files with rows before the time of the last row of an earlier file of their
        lane; for each lane the latest such time.
        """
        overlaps: dict[Hashable, dict[Hashable, int]] = {}
        for lane, files in self._lanes.items():
            watermark_us = -1
            for name, file in sorted(files.items(), key=lambda item: item[1].times_us):
                if file.lowest[0] < watermark_us:
                    overlaps.setdefault(name, {})[lane] = watermark_us
                watermark_us = max(watermark_us, file.last[0])
        return overlaps


def rows_before(rows: pa.Table, watermark_us: int) -> int:
    """Return the number of rows with an earlier effective time, without late ones."""
    return int((_order_keys(rows)[:, 0] < watermark_us).sum())


def _order_keys(rows: pa.Table) -> Keys:
    """Return the sort key of each row that is not marked late."""
    return np.stack(sort_keys(_filtered(rows, pc.invert(rows["late"]))), axis=1)


def _descends(before: Keys, after: Keys) -> NDArray[np.bool_]:
    """Return a mask of the rows in which ``after`` is less than ``before``."""
    result = np.zeros(len(before), dtype=bool)
    for column in reversed(range(before.shape[1])):
        result = (after[:, column] < before[:, column]) | (
            (after[:, column] == before[:, column]) & result
        )
    return result


def keys_of(rows: pa.Table | pa.RecordBatch) -> Keys:
    """Return ledger, entry, batch index and broker index of each row; -1 for a null."""
    columns = [pc.fill_null(rows[name].cast(pa.int64()), -1).to_numpy() for name in _KEY]
    return np.stack(columns, axis=1)


def entries_of(rows: pa.Table | pa.RecordBatch) -> Keys:
    """Return ledger and entry of each row."""
    return np.stack([rows[name].to_numpy() for name in ("ledger_id", "entry_id")], axis=1)
