"""The two Delta tables: made with the contract's columns by delta-spark, checked before every run.

A table's app transactions (Delta's own idempotence record, kept in its log and checkpoints) hold two things of ours:

    <query>                       the last micro-batch of that query which is in the table
    ledgerlake.effective_time_us:<topic partition>   how far that topic partition's time has come
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import deltalake
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction
from pyarrow import fs

from ledgerlake.errors import SetupError, TableError
from ledgerlake.sinks.ordered import DataFile, ParquetFolder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TIME_PREFIX = "ledgerlake.effective_time_us:"

# What our files cannot carry; such a table needs delta-spark's own writer.
_REFUSED_FEATURES = {"columnMapping", "generatedColumns", "checkConstraints", "changeDataFeed", "identityColumns", "rowTracking", "icebergCompatV1", "icebergCompatV2", "typeWidening"}  # fmt: skip


class Table:
    """One Delta table at ``path`` with the columns of ``schema``."""

    def __init__(self, path: str, schema: pa.Schema) -> None:
        self.path = path
        self.schema = schema

    def ensure(self, spark: SparkSession) -> None:
        """Make the table where there is none, else check that its columns are the contract's.

        Raises:
            TableError: another schema (the difference is named) or a feature that we cannot write.
            SetupError: the path cannot be written.
        """
        try:
            existing: DeltaTable | None = DeltaTable(self.path)
        except TableNotFoundError:
            existing = None
        except (DeltaError, OSError) as error:
            raise TableError(f"the table at {self.path} cannot be opened: {_first_line(error)}") from None
        if existing is None:
            self._create(spark)
        else:
            self._check(existing)

    def folder(self, prefix: str) -> ParquetFolder:
        filesystem, root = resolve(self.path)
        return ParquetFolder(filesystem, root, self.schema, prefix)

    def last_batch(self, query: str) -> int | None:
        """The last micro-batch of ``query`` in the table."""
        version = self._open().transaction_version(query)
        return None if version is None else int(version)

    def effective_time_us(self, topic_partition: str) -> int | None:
        """How far a topic partition's effective time has come in the table."""
        version = self._open().transaction_version(_TIME_PREFIX + topic_partition)
        return None if version is None else int(version)

    def commit(self, query: str, batch_id: int, files: list[DataFile], times_us: dict[str, int]) -> bool:
        """Add files as one commit that carries the batch's number; False where that batch is in the table already.

        Raises:
            TableError: the commit did not land.
        """
        table = self._open()
        done = table.transaction_version(query)
        if done is not None and done >= batch_id:
            return False
        now_ms = int(time.time() * 1000)
        actions = [AddAction(file.name, file.size_bytes, {}, now_ms, True, file.stats) for file in files]
        transactions = [Transaction(query, batch_id, now_ms)]
        transactions += [Transaction(_TIME_PREFIX + name, time_us, now_ms) for name, time_us in times_us.items()]
        try:
            table.create_write_transaction(
                actions, "append", table.schema(), commit_properties=CommitProperties(app_transactions=transactions)
            )
        except DeltaError as error:
            raise TableError(f"batch {batch_id} could not be committed to {self.path}: {_first_line(error)}") from None
        return True

    def _open(self) -> DeltaTable:
        try:
            return DeltaTable(self.path, without_files=True)
        except (DeltaError, OSError) as error:
            raise TableError(f"the table at {self.path} cannot be opened: {_first_line(error)}") from None

    def _create(self, spark: SparkSession) -> None:
        from delta.tables import DeltaTable as SparkDeltaTable
        from pyspark.sql.pandas.types import from_arrow_schema

        try:
            filesystem, root = resolve(self.path)
            filesystem.create_dir(root, recursive=True)
            builder = SparkDeltaTable.createIfNotExists(spark).location(self.path)
            builder.addColumns(from_arrow_schema(self.schema)).execute()
        except OSError as error:
            raise SetupError(
                f"the table folder {self.path} cannot be made ({error.strerror or error}); choose another path"
            ) from None

    def _check(self, existing: DeltaTable) -> None:
        found = {field.name: field.type for field in deltalake.Schema.to_arrow(existing.schema())}
        found = {name: pa.field(name, kind).type for name, kind in found.items()}
        differences = _differences(self.schema, found)
        if differences:
            raise TableError(
                f"the table at {self.path} has another schema ({'; '.join(differences)}); use another path"
            )
        protocol = existing.protocol()
        features = set(protocol.writer_features or []) & _REFUSED_FEATURES
        if features:
            raise TableError(
                f"the table at {self.path} uses {', '.join(sorted(features))}, which this writer cannot honour"
            )


def resolve(path: str) -> tuple[fs.FileSystem, str]:
    """The filesystem of a path or URI, and the path inside it."""
    if "://" in path:
        filesystem, root = fs.FileSystem.from_uri(path)
        return filesystem, root
    return fs.LocalFileSystem(), path


def _differences(wanted: pa.Schema, found: dict[str, pa.DataType]) -> list[str]:
    names = {field.name: field.type for field in wanted}
    missing = [f"it lacks {name}" for name in names if name not in found]
    extra = [f"it has {name}" for name in found if name not in names]
    other = [
        f"{name} is {found[name]} where {kind} belongs"
        for name, kind in names.items()
        if name in found and not _same(kind, found[name])
    ]
    return missing + extra + other


def _same(wanted: pa.DataType, found: pa.DataType) -> bool:
    """Equal up to how Arrow names a map's fields and sizes its offsets."""
    return _plain(wanted) == _plain(found)


def _plain(kind: pa.DataType) -> str:
    if pa.types.is_map(kind):
        return f"map<{_plain(kind.key_type)},{_plain(kind.item_type)}>"
    return str(kind).replace("large_", "").replace("_view", "")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300]
