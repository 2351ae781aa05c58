"""A Delta table with features that plain appended files would violate, so it is written by
delta-spark.

Tasks write their files into a staging folder in the checkpoint instead of the table's folder. In
the driver, Spark reads the files of a micro-batch, sorts their rows, and appends them with the
batch's number, by which Delta skips a batch that it has. So delta-spark enforces constraints,
generated columns, the change data feed and column mapping, at the cost of one extra pass over every
row.

delta-spark's commits carry only one number for each query. So the other numbers of a micro-batch
(see ``delta_table``) are stored in the metadata of its commit. What a start records is in commits
without files, which are written here. So is, from time to time, from which version on a query's
last commit is found, however often others have committed since. The greatest time of each topic
partition is computed from the rows too when a query starts.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from ledgerlake.client.topics import join_partition, split_partition
from ledgerlake.errors import SetupError, TableAccessError, TableError
from ledgerlake.runtime.hadoop import connect_store
from ledgerlake.runtime.java_errors import root_cause
from ledgerlake.table.batch_commit import Recorded
from ledgerlake.table.delta_table import EFFECTIVE_TIMES, OUTBOX, Table, since_of, writer_numbers
from ledgerlake.table.features import (
    PARTITIONED,
    column_differences,
    listed,
    null_constraints,
    special_features,
    unfillable_columns,
)
from ledgerlake.table.log_commit import OwnCommit
from ledgerlake.table.open_table import existing_table, files_added_at, read_commit
from ledgerlake.table.own_commits import OwnCommits
from ledgerlake.table.properties import is_on
from ledgerlake.table.repeated_rejects import KEY_COLUMNS, row_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltalake import DeltaTable
    from pyspark.sql import Column, DataFrame, SparkSession

    from ledgerlake.stored.places import Place
    from ledgerlake.table.batch_commit import BatchCommit
    from ledgerlake.table.ordered_files import DataFile
    from ledgerlake.table.repeated_rejects import RowKey

_log = logging.getLogger(__name__)

# The signs of a pattern for Hadoop, and the one that makes each of them a plain character.
_SIGNS = re.compile(r"[\\{}\[\]*?]")

# The property of a table whose commits have a time of their own, each later than the one before.
_COMMIT_TIMES = "delta.enableInCommitTimestamps"

# After so many commits of all writers, the place of the next micro-batch is recorded again.
_COMMITS_PER_PLACE = 20

# The exception of a row that a constraint, a column that is NOT NULL, or the length of a text
# refuses.
_VIOLATION = "DeltaInvariantViolationException"

# Features of a table whose commits another service has to order.
_ORDERED_ELSEWHERE = {"catalogManaged", "catalogOwned-preview", "coordinatedCommits-preview"}


class SparkTable(OwnCommits):
    """The table at ``path``; tasks write their files to ``staging``."""

    def __init__(self, path: Place, schema: pa.Schema, staging: Place) -> None:
        super().__init__(path, schema)
        self.folder = staging

    def check(self, spark: SparkSession) -> bool:
        """Check as ``Table.check``, but allow extra columns, as long as Spark can fill them."""
        self._spark = spark
        connect_store(spark, self.path)
        return super().check(spark)

    def _compare(self, existing: DeltaTable) -> None:
        self._check_keeps_transactions(existing)
        self._check_partitions(existing)
        missing, _, changed = column_differences(self.schema, existing)
        if missing or changed:
            raise TableError(
                f"the table at {self.path} has another schema ({listed(missing, changed)}); use "
                "another path"
            )
        unfillable = unfillable_columns(self.schema, existing)
        if unfillable:
            raise TableError(
                f"the table at {self.path} has {listed(unfillable)}, which no message has and "
                "Spark cannot compute; give it a default, or use another path"
            )
        elsewhere = _ORDERED_ELSEWHERE & set(existing.protocol().writer_features or [])
        if elsewhere:
            raise TableError(
                f"the table at {self.path} has {min(elsewhere)}, so that only its catalog may "
                "commit to it; use another path"
            )

    def begin(self) -> None:
        """Remove the files of earlier runs from the staging folder: a micro-batch that is run again
        writes new files.

        Raises:
            SetupError: the staging folder cannot be created.
        """
        try:
            self.folder.make()
            self.folder.filesystem().delete_dir_contents(self.folder.root, missing_dir_ok=True)
        except OSError as error:
            raise SetupError(
                f"the folder {self.folder} cannot be made ({error.strerror or error}); choose "
                "another checkpoint"
            ) from None
        super().begin()

    def effective_times_us(self, topic_partitions: list[str]) -> dict[str, int]:
        # A row that somebody else has added may be without a topic.
        rows = (
            self._spark.read.format("delta")
            .load(self.path.hadoop_uri)
            .dropna(subset=["topic", "partition"])
        )
        rows = rows.where(
            f.col("topic").isin(sorted({split_partition(name)[0] for name in topic_partitions}))
        )
        latest = rows.groupBy("topic", "partition").agg(
            f.max(f.unix_micros(_effective_time())).alias("time_us")
        )
        times_us = {
            join_partition(row.topic, row.partition): int(row.time_us) for row in latest.collect()
        }
        recorded = super().effective_times_us(topic_partitions)
        return {
            name: max(times.get(name, 0) for times in (times_us, recorded))
            for name in topic_partitions
            if name in times_us or name in recorded
        }

    def _recorded(self, table: DeltaTable, query: str) -> Recorded | None:
        batch_id = self._number(table, query)
        if batch_id is None:
            return None
        found = self._find(table, query, batch_id)
        return Recorded(batch_id, None if found is None else found[1].get("range_digest"))

    def _recorded_writer(self, table: DeltaTable, stream: str) -> int | None:
        return self._last_writer(table, stream)

    def _try_to_append(
        self,
        table: DeltaTable,
        files: list[DataFile],
        numbers: dict[str, int],
        metadata: dict[str, str] | None,
    ) -> int | None:
        # Files would have to honour the features of the table; numbers violate none.
        assert not files
        version, now_ms = table.version(), int(time.time() * 1000)
        more: dict[str, Any] = dict(metadata or {})
        if is_on(table, _COMMIT_TIMES):
            last_ms = max(
                action.get("commitInfo", {}).get("inCommitTimestamp", 0)
                for action in read_commit(self.path, version)
            )
            more["inCommitTimestamp"] = max(now_ms, last_ms + 1)
        actions = [
            {"txn": {"appId": name, "version": number, "lastUpdated": now_ms}}
            for name, number in numbers.items()
        ]
        parameters = {"mode": "Append"}
        commit = OwnCommit(self.path, "WRITE", parameters, version, actions, more, is_blind=True)
        return version + 1 if commit.land(version + 1) else None

    def _keep_up_log(self, table: DeltaTable, version: int) -> None:
        """Leave the checkpoint to delta-spark: delta-rs may drop what it does not know."""

    def keys_of(self, batch: BatchCommit, version: int) -> Counter[RowKey]:
        # Spark applies the column mapping and the deletion vectors of the table.
        try:
            names = [name.rpartition("/")[2] for name in files_added_at(self.path, version)]
            rows = (
                self._at(version)
                .where(f.col("_metadata.file_name").isin(names))
                .select(*KEY_COLUMNS)
            )
            return Counter(row_key(*row) for row in rows.collect())
        except (OSError, ValueError) as error:
            raise self.not_comparable(batch, self.path.reason(error)) from None
        except (PySparkException, Py4JJavaError) as error:
            raise self.not_comparable(batch, root_cause(error)) from None

    def _at(self, version: int) -> DataFrame:
        return (
            self._spark.read.format("delta")
            .option("versionAsOf", version)
            .load(self.path.hadoop_uri)
        )

    def commit(
        self,
        batch: BatchCommit,
        files: list[DataFile],
        times_us: dict[str, int],
        outbox: dict[str, int] | None = None,
    ) -> None:
        self._record_place(batch)
        metadata = json.loads(batch.to_json()) | {EFFECTIVE_TIMES: times_us, OUTBOX: outbox or {}}
        try:
            rows = (
                self._spark.read.parquet(*(_as_pattern(self.folder / file.name) for file in files))
                if files
                else self._spark.createDataFrame(self.schema.empty_table())
            )
            sorted_rows = rows.repartition("topic", "partition").sortWithinPartitions(
                *self._sort_keys()
            )
            writer = (
                sorted_rows.write.format("delta").mode("append").option("optimizeWrite", "false")
            )
            writer = writer.option("txnAppId", batch.query).option("txnVersion", batch.batch_id)
            writer.option("userMetadata", json.dumps(metadata)).save(self.path.hadoop_uri)
        except (PySparkException, Py4JJavaError) as error:
            if _VIOLATION in str(error):
                raise TableError(
                    f"batch {batch.batch_id} has a row that the table at {self.path} refuses: "
                    f"{root_cause(error)}; change the "
                    "table, or leave such messages out (where), and run again"
                ) from None
            raise TableAccessError(
                f"batch {batch.batch_id} could not be committed to {self.path}: {root_cause(error)}"
            ) from None
        self.remove_files([file.name for file in files])

    def _record_place(self, batch: BatchCommit) -> None:
        """Record from which version on the commit of a micro-batch is found, and who writes for the
        stream. This is a commit of its own, so it is made only once the commit could be too far
        behind what the table has recorded.
        """
        table = self._opened or self._current()
        since, version = self._number(table, since_of(batch.query)), table.version() + 1
        if since is not None and version - since < _COMMITS_PER_PLACE:
            return
        attempt = f"batch {batch.batch_id} could not be committed to {self.path}"
        numbers = {since_of(batch.query): version, **writer_numbers(batch)}
        self._append([], numbers, None, attempt, table.version())

    def _sort_keys(self) -> list[Column]:
        position = [
            f.col(name)
            for name in ("ledger_id", "entry_id", "batch_index")
            if name in self.schema.names
        ]
        times = [_effective_time()] if "publish_time" in self.schema.names else []
        return [f.col("topic"), f.col("partition"), *times, *position]


def _effective_time() -> Column:
    """Return the column of the effective time; 1970 if there is none. See
    ``table.ordered_files``.
    """
    stored = f.coalesce(
        f.col("broker_timestamp"), f.col("publish_time"), f.timestamp_seconds(f.lit(0))
    )
    return f.when(f.col("delivered_at").isNull(), stored).otherwise(
        f.greatest(stored, f.col("deliver_at"))
    )


def _as_pattern(file: Place) -> str:
    """Return the pattern that only one file matches. Spark takes names of files for patterns."""
    return _SIGNS.sub(r"\\\g<0>", file.hadoop_uri)


def open_table(
    path: Place,
    schema: pa.Schema,
    writer: str,
    staging: Place,
    partition_by: Mapping[str, str] | None = None,
) -> Table:
    """Return a table with its writer: ``arrow`` appends files, ``spark`` is delta-spark's, ``auto``
    chooses the one that the table needs.

    Args:
        partition_by: the columns by which the configuration partitions it, as for ``Table``.

    Raises:
        TableError: the table exists and cannot be opened.
    """
    if writer == "arrow":
        return Table(path, schema, partition_by)
    if writer == "spark":
        return SparkTable(path, schema, staging)
    existing = existing_table(path)
    if existing is None:
        return Table(path, schema, partition_by)
    missing, extra, changed = column_differences(schema, existing)
    special = [
        name for name in special_features(existing) if name != PARTITIONED or not partition_by
    ] + null_constraints(schema, existing)
    special += [phrase.replace("it has", "a column", 1) for phrase in extra]
    if not special or missing or changed:
        return Table(path, schema, partition_by)
    _log.warning(
        "the table at %s has %s: it is written by delta-spark, which is slower",
        path,
        ", ".join(special),
    )
    return SparkTable(path, schema, staging)
