"""The rows of a table, for ``verify``: keys of messages and entries, and their order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.exceptions import DeltaError, TableNotFoundError
from numpy.typing import NDArray

from ledgerlake.client.topics import split_partition
from ledgerlake.decode import schema
from ledgerlake.decode.record_columns import PULSAR_COLUMN
from ledgerlake.errors import TableError
from ledgerlake.options.spark_options import LOCAL_MASTER, SparkConfig
from ledgerlake.runtime.hadoop import connect_store
from ledgerlake.stored.places import Place
from ledgerlake.table.compaction import CLUSTERED_PREFIX
from ledgerlake.table.delta_table import PARTITIONED, open_delta, special_features
from ledgerlake.table.ordered_files import sort_keys
from ledgerlake.table.vacuum import is_own_file
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


class TableRows:
    """A table's files as Arrow tables of the compared columns, with rows in the order of the
    file.
    """

    def __init__(self, path: Place, spark: SparkConfig) -> None:
        """
        Args:
            spark: for the session, on this machine, that reads a table whose files do not have its
                columns' names.
        """
        self._path, self._spark = path, spark
        try:
            table = open_delta(path)
            actions = pa.table(table.get_add_actions(flatten=True))
            self._files = actions["path"].to_pylist()
            names = [name for name in actions.column_names if name.startswith("partition.")]
            self._partitions = [str(row) for row in actions.select([*names, "path"]).drop(["path"]).to_pylist()]
            # The files of one merge divide its rows, so they have no order among themselves.
            self._partitions = [
                f"{partition} {name if name.startswith(CLUSTERED_PREFIX) else ''}"
                for partition, name in zip(self._partitions, self._files, strict=True)
            ]
            self._partitioned_by = [f"`{name}`" for name in table.metadata().partition_columns]
            features = special_features(table)
            # Such files do not have all columns by their names.
            lacks_columns = PARTITIONED in features and not all(map(is_own_file, self._files))
            self._needs_spark = "columnMapping" in features or lacks_columns
        except TableNotFoundError:
            raise TableError(f"there is no table at {path}; run the pipeline first") from None
        except (DeltaError, OSError) as error:
            raise TableError(f"the table at {path} cannot be opened: {path.reason(error)}") from None
        self._tables: list[pa.Table] | None = None

    def files_of(self, name: str, end: Position) -> list[pa.Table]:
        """Return each file's rows of one topic partition up to ``end``; without files that have
        none.
        """
        return [file for files in self.partitions_of(name, end) for file in files]

    def partitions_of(self, name: str, end: Position) -> list[list[pa.Table]]:
        """Return what ``files_of`` does, apart for each partition of the table, and for each
        clustered file. Rows have an order in each of those.
        """
        if self._tables is None and self._needs_spark:
            self._tables, self._partitions = self._read_by_spark()
        elif self._tables is None:
            self._tables = [self._read(name) for name in self._files]
        topic, partition = split_partition(name)
        found: dict[str, list[pa.Table]] = {}
        for place, table in zip(self._partitions, self._tables, strict=True):
            ledger, entry = table["ledger_id"], table["entry_id"]
            is_before_end = pc.or_(
                pc.less(ledger, end.ledger_id),
                pc.and_(pc.equal(ledger, end.ledger_id), pc.less_equal(entry, end.entry_id)),
            )
            is_of_partition = pc.and_(pc.equal(table["topic"], topic), pc.equal(table["partition"], partition))
            rows = table.filter(pc.and_(is_before_end, is_of_partition))
            if rows.num_rows:
                found.setdefault(place, []).append(rows)
        return list(found.values())

    def _read_by_spark(self) -> tuple[list[pa.Table], list[str]]:
        """Return the rows of each file and of each partition of the table in it, and those
        partitions.
        """
        from ledgerlake.runtime.session import start_session

        spark = replace(self._spark, master=LOCAL_MASTER)
        session = start_session("ledgerlake verify", spark.master, spark.session_settings)
        connect_store(session, self._path)
        rows = session.read.format("delta").load(self._path.hadoop_uri)
        inside = f"{PULSAR_COLUMN}." if PULSAR_COLUMN in rows.columns else ""
        columns = rows.select(f"{PULSAR_COLUMN}.*").columns if inside else rows.columns
        names = [name for name in _ORDER_COLUMNS if name in columns]
        # A large file is read in splits; within a split, rows are numbered in their order.
        place = ["_metadata.file_path", "_metadata.file_block_start", "monotonically_increasing_id() as row"]
        partition = f"to_json(struct({', '.join(self._partitioned_by)}))" if self._partitioned_by else "''"
        selected = rows.selectExpr(*(f"{inside}{name}" for name in names), *place, f"{partition} as of_partition")
        in_order = selected.toArrow().sort_by(
            [(name, "ascending") for name in ("file_path", "file_block_start", "row")]
        )
        tables, partitions = [], []
        for path in pc.unique(in_order["file_path"]).to_pylist():
            of_file = in_order.filter(pc.equal(in_order["file_path"], path))
            for value in pc.unique(of_file["of_partition"]).to_pylist():
                tables.append(of_file.filter(pc.equal(of_file["of_partition"], value)).select(names))
                partitions.append(value)
        return tables, partitions

    def _read(self, name: str) -> pa.Table:
        with pq.ParquetFile((self._path / name).root, filesystem=self._path.filesystem()) as file:
            present = set(file.schema_arrow.names)
            if PULSAR_COLUMN in present:
                pulsar = file.read([f"{PULSAR_COLUMN}.{name}" for name in _ORDER_COLUMNS])[PULSAR_COLUMN]
                rows = pa.Table.from_struct_array(pulsar)
            else:
                rows = file.read([name for name in _ORDER_COLUMNS if name in present])
        # Other writers have other types of Arrow for the same columns of Delta.
        return rows.cast(pa.schema([_TYPES.field(name) for name in rows.column_names]))


def out_of_order(files: list[pa.Table]) -> int:
    """Return the number of rows that come after a later row: inside each file, and between files in
    the order of their first rows.
    """
    count = 0
    keys_of_files = []
    for file in files:
        rows = file.filter(pc.invert(file["late"]))
        if not rows.num_rows:
            continue
        keys = np.stack(sort_keys(rows), axis=1)
        count += int(_descends(keys[:-1], keys[1:]).sum())
        keys_of_files.append(keys)
    keys_of_files.sort(key=lambda keys: tuple(keys[0]))
    reached: Keys | None = None
    for keys in keys_of_files:
        if reached is not None:
            count += int(_descends(np.broadcast_to(reached, keys.shape), keys).sum())
        reached = keys[-1] if reached is None or tuple(keys[-1]) > tuple(reached) else reached
    return count


def _descends(before: Keys, after: Keys) -> NDArray[np.bool_]:
    """Return a mask of the rows in which ``after`` is less than ``before``."""
    result = np.zeros(len(before), dtype=bool)
    for column in reversed(range(before.shape[1])):
        result = (after[:, column] < before[:, column]) | ((after[:, column] == before[:, column]) & result)
    return result


def keys_of(rows: pa.Table | pa.RecordBatch) -> Keys:
    """Return ledger, entry, batch index and broker index of each row; -1 for a null."""
    columns = [pc.fill_null(rows[name].cast(pa.int64()), -1).to_numpy() for name in _KEY]
    return np.stack(columns, axis=1)


def entries_of(rows: pa.Table | pa.RecordBatch) -> Keys:
    """Return ledger and entry of each row."""
    return np.stack([rows[name].to_numpy() for name in ("ledger_id", "entry_id")], axis=1)
