"""A Delta table of the pipeline: created with the contract's columns, checked before every run.

A table's app transactions (Delta's own idempotence record, in its log and checkpoints) have the
numbers that the pipeline needs. ``<query>`` names the stream and its checkpoint:

    <query>                              the last micro-batch of that query which is in the table
    <query>:range                        the digest of a micro-batch's offsets (see
                                         ``batch_commit``)
    <query>:outcomes                     a hash of what that micro-batch made of its offsets (see
                                         ``batch_commit``)
    <query>:since                        its commit is the first one of the micro-batch in this
                                         version or a later one
    <query>:more:<number>                a micro-batch to which a repeat has added rows (see
                                         ``additions``)
    <query>:range_of                     the number of that micro-batch. If delta-spark wrote a
                                         later one (see ``spark_table``), it set ``<query>`` alone,
                                         and the digest is not valid
    ledgerlake.stream:<stream>           the same number, for a start that finds no checkpoint
    ledgerlake.checkpoint:<stream>       the number of the checkpoint that committed last, which is
                                         greater than that of any earlier one (see
                                         ``pipeline.checkpoint``): an earlier checkpoint of the
                                         stream is refused
    ledgerlake.attempt:<stream>          a random number of the last commit for the stream; the
                                         writer finds its own commit by it
    ledgerlake.replay:<stream>           the last part of a replay of rejects (see
                                         ``replay.replay``)
    ledgerlake.outbox:<outbox>           how many messages the outbox has had up to that micro-batch
    ledgerlake.effective_time_us:<topic partition>   the greatest time of that topic partition
    ledgerlake.writer:<topic partition>  the number of the stream that writes its messages, a hash
                                         of its name; another stream is refused, or takes the topic
                                         partition over (``[delta] fail_on_second_stream``)

Two writers of one query cannot both commit: Delta refuses a commit if another one with the same
transaction came first. The history shows each micro-batch with its ranges, under ``ledgerlake``.

Others commit to the table too, and how often must decide nothing. So what a repeat of a micro-batch
is compared with is found by the numbers, and the recent history is searched only for what
delta-spark has written.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction
from pyarrow import fs

from ledgerlake.errors import (
    CheckpointError,
    OwnershipError,
    SetupError,
    TableAccessError,
    TableError,
    refuse_newer,
)
from ledgerlake.stored.fields import stored
from ledgerlake.table.batch_commit import Recorded, number_of
from ledgerlake.table.creation import create_table
from ledgerlake.table.features import (
    CLUSTERED,
    PARTITIONED,
    column_differences,
    listed,
    null_constraints,
    special_features,
)
from ledgerlake.table.layout import file_schema
from ledgerlake.table.log_state import read_transactions
from ledgerlake.table.open_table import (
    batch_at,
    batch_of_commit,
    commit_file,
    existing_table,
    files_added_at,
    open_delta,
    read_commit,
    transactions_in,
    transactions_of,
)
from ledgerlake.table.ordered_files import (
    STATISTICS_PROPERTY,
    DataFile,
    statistics_columns,
    with_named_statistics,
)
from ledgerlake.table.repeated_rejects import KEY_COLUMNS, row_keys
from ledgerlake.table.retention import may_clean_log

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyspark.sql import SparkSession

    from ledgerlake.stored.places import Place
    from ledgerlake.table.batch_commit import BatchCommit
    from ledgerlake.table.repeated_rejects import RowKey

_TIME_PREFIX = "ledgerlake.effective_time_us:"
_WRITER_PREFIX = "ledgerlake.writer:"
_STREAM_PREFIX = "ledgerlake.stream:"
_CHECKPOINT_PREFIX = "ledgerlake.checkpoint:"
_ATTEMPT_PREFIX = "ledgerlake.attempt:"
_OUTBOX_PREFIX = "ledgerlake.outbox:"
_FORGETFUL_PROPERTY = "delta.setTransactionRetentionDuration"
# In the metadata of a commit of delta-spark, which has no numbers for them.
EFFECTIVE_TIMES, OUTBOX = "effective_times_us", "outbox"

_COMMITS_PER_CLEANUP = 100
_COMMIT_ATTEMPTS = 5

# From so many names on, all transactions of the log are read at once.
_MOST_LOOKUPS = 8

# How many commits are searched for a micro-batch: from the version on that the table has recorded,
# or of the newest ones.
HISTORY_COMMITS = 1000

# The property of a table whose rows are the latest messages of their keys (see ``latest_table``).
MODE, LATEST = "ledgerlake.mode", "latest"

# The property of a table with the expressions that compute its partition columns:
#     ledgerlake.partition_by = "1 {"day": "date(broker_timestamp)"}"
PARTITION_BY = "ledgerlake.partition_by"
_PARTITION_VERSION = 1


class Table:
    """A Delta table at ``path``; tasks put its files into ``folder``. ``schema`` has the columns of
    its rows, from which the table's columns follow (see ``table.layout``).

    Args:
        partition_by: the columns by which it is partitioned, with the expressions that compute
            them; an empty one if the rows have the column. Its files have them too.
    """

    # The features that a kind of table honours beside ``HONOURED_FEATURES``.
    own_features: frozenset[str] = frozenset()

    # The features that the properties of a new table need.
    created_with: frozenset[str] = frozenset()

    def __init__(
        self, path: Place, schema: pa.Schema, partition_by: Mapping[str, str] | None = None
    ) -> None:
        self.path = self.folder = path
        self.schema = schema
        self.partition_by = dict(partition_by or {})
        self._opened: DeltaTable | None = None
        self._opened_with: dict[str, str] | None = None
        self._is_refreshed = False
        # The version that ``contains`` has asked last.
        self._asked_version: int | None = None
        # The known transactions of the open version, and of the version that this process made
        # last.
        self._numbers: dict[str, int | None] = {}
        self._own_version, self._own_commit = -1, dict[str, int]()
        self._own_numbers: dict[str, int | None] = {}
        # The topic partitions that this process has begun to write.
        self._begun: set[str] = set()
        self._modified_ms: int | None = None
        self._cleaned_in: int | None = None

    def examine(self) -> bool:
        """Return whether the table exists, with the contract's columns; nothing is changed.

        Raises:
            TableError: another schema (the difference is named) or a feature that this writer
                cannot write.
        """
        existing = existing_table(self.path)
        if existing is not None:
            self._compare(existing)
        return existing is not None

    def check(self, spark: SparkSession) -> bool:
        """Return as ``examine``; the folder of a table that does not exist is created.

        Raises:
            TableError: as ``examine``.
            SetupError: the path cannot be written.
        """
        exists = self.examine()
        if not exists:
            self._make_folder()
        if self.path.is_local:
            # A store would be asked twice more, and its first commit tells the same.
            self.check_writable()
        return exists

    def check_writable(self) -> None:
        """Check that files can be written into the folder, or that it can be made.

        Raises:
            SetupError: they cannot.
        """
        log = self.path / "_delta_log"
        # A log that exists can have rights of its own.
        for folder in (
            (self.path, log) if self.path.is_local and os.path.isdir(log.root) else (self.path,)
        ):
            try:
                folder.check_writable()
            except OSError as error:
                raise SetupError(
                    f"the table folder {folder} cannot be written ({folder.refusal(error)})"
                ) from None

    def create(self, properties: dict[str, str] | None = None) -> None:
        """Create the table, unless another process has just done so.

        Args:
            properties: Delta's properties of the table.

        Raises:
            SetupError: no Delta table can have its columns.
            TableError: it cannot be created.
        """
        try:
            create_table(
                self.path,
                file_schema(self.schema),
                self._statistics_property() | self._partition_property() | (properties or {}),
                list(self.partition_by),
                self.created_with,
            )
        except OSError as error:
            if existing_table(self.path) is None:
                raise TableAccessError(
                    f"the table at {self.path} cannot be made: {self.path.reason(error)}"
                ) from None

    def _statistics_property(self) -> dict[str, str]:
        return {STATISTICS_PROPERTY: statistics_columns(self.schema, self.partition_by)}

    def begin(self) -> None:
        """Begin to write; from here on, no other process may write for this query."""

    @property
    def delta_id(self) -> str:
        """Return the id that Delta gave the table, which exists; a copy has it too."""
        return str((self._opened or self._current()).metadata().id)

    def effective_times_us(self, topic_partitions: list[str]) -> dict[str, int]:
        """Return the greatest effective time of each topic partition in the table; without those
        that have none.
        """
        table = self._current()
        times_us = self._numbers_by(table, _TIME_PREFIX, topic_partitions)
        # A commit of delta-spark has them in its metadata alone, which the history shows.
        for batch in self._recent_batches(table):
            known = batch.get(EFFECTIVE_TIMES, {})
            for name in known.keys() & set(topic_partitions):
                times_us[name] = max(known[name], times_us.get(name, known[name]))
        return times_us

    def recorded(self, query: str) -> Recorded | None:
        """Return the last micro-batch of a query in the current version of the table."""
        return self._recorded(self._current(), query)

    def _recorded(self, table: DeltaTable, query: str) -> Recorded | None:
        batch_id = self._number(table, query)
        if batch_id is None:
            return None
        is_its_own = self._number(table, _numbered(query)) == batch_id
        return Recorded(batch_id, self._number(table, _range_of(query)) if is_its_own else None)

    def last_batch_of(self, stream: str) -> int | None:
        """Return the last micro-batch of a stream of that name; -1 if it only began, None if the
        table does not know it.
        """
        table = self._current()
        # delta-spark sets no such number, so the history may have a later commit.
        batches = (
            batch["batch"] for batch in self._recent_batches(table) if batch["stream"] == stream
        )
        last = next(batches, None)
        return self._number(table, _STREAM_PREFIX + stream) if last is None else last

    def check_writers(self, stream: str, topic_partitions: Iterable[str]) -> None:
        """Check that no other stream writes the messages of some topic partitions to the table.

        Raises:
            CheckpointError: another stream does, so that they would come twice.
        """
        self._check_writers(self._current(), stream, topic_partitions)

    def _check_writers(
        self, table: DeltaTable, stream: str, topic_partitions: Iterable[str]
    ) -> None:
        other = self._other_stream(table, stream, topic_partitions)
        if other is None:
            return
        name, writer = other
        raise CheckpointError(
            f"{writer} writes the messages of {name} to the table at {self.path}, and the stream "
            f"{stream} would write them a second time; set [stream] name and checkpoint back, or "
            "give the stream tables of its own; if it is to take the topic over, set [delta] "
            "fail_on_second_stream to false: what it reads may come twice, and what waits in the "
            "other stream, delayed, repeating or incomplete, is not delivered"
        )

    def _other_stream(
        self, table: DeltaTable, stream: str, topic_partitions: Iterable[str]
    ) -> tuple[str, str] | None:
        """Return the first topic partition that another stream writes, and words for that stream;
        None if there is none.
        """
        own = number_of(stream)
        for name, number in self._writers(table, topic_partitions).items():
            if number != own:
                streams = (batch["stream"] for batch in self._recent_batches(table))
                known = next((other for other in streams if number_of(other) == number), None)
                return name, "another stream" if known is None else f"the stream {known}"
        return None

    def _writers(self, table: DeltaTable, topic_partitions: Iterable[str]) -> dict[str, int]:
        """Return the numbers of the streams that write the messages of topic partitions."""
        return self._numbers_by(table, _WRITER_PREFIX, topic_partitions)

    def written_topic_partitions(self) -> set[str]:
        """Return the topic partitions whose messages streams write to the table, or once did.

        Raises:
            TableAccessError: the log cannot be read.
        """
        try:
            numbers = read_transactions(self.path, self._current().version())
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self._log_unreadable(error) from None
        return {
            name.removeprefix(_WRITER_PREFIX) for name in numbers if name.startswith(_WRITER_PREFIX)
        }

    def last_writer(self, stream: str) -> int | None:
        """Return the number of the checkpoint that committed last for a stream; None if the table
        does not know the stream.
        """
        return self._last_writer(self._current(), stream)

    def _last_writer(self, table: DeltaTable, stream: str) -> int | None:
        # delta-spark sets no such number, so the history may have a later commit.
        for batch in self._recent_batches(table):
            if batch["stream"] == stream:
                return int(batch["checkpoint"])
        return self._number(table, _CHECKPOINT_PREFIX + stream)

    def _recorded_writer(self, table: DeltaTable, stream: str) -> int | None:
        return self._number(table, _CHECKPOINT_PREFIX + stream)

    def _recent_batches(self, table: DeltaTable) -> Iterator[dict[str, Any]]:
        """Yield the micro-batches in the metadata of recent commits, the newest first."""
        for batch in map(batch_of_commit, self._history(table)):
            if (
                batch is not None
                and {"query", "batch", "range_digest", "stream", "checkpoint"} <= batch.keys()
            ):
                yield batch

    def _number(self, table: DeltaTable, name: str) -> int | None:
        """Return the number of a name in the table's transactions. delta-rs reads the whole log for
        each, so it is asked once for a name until the table is read again.
        """
        if name not in self._numbers:
            try:
                self._numbers[name] = table.transaction_version(name)
            except (DeltaError, OSError) as error:
                raise self._log_unreadable(error) from None
        return self._numbers[name]

    def _numbers_by(self, table: DeltaTable, prefix: str, names: Iterable[str]) -> dict[str, int]:
        """Return the numbers of names behind a prefix; without names that have none."""
        prefixed = {name: prefix + name for name in names}
        unknown = [name for name in prefixed.values() if name not in self._numbers]
        if len(unknown) > _MOST_LOOKUPS:
            with contextlib.suppress(OSError, ValueError, pa.ArrowException):
                found = read_transactions(self.path, table.version())
                self._numbers |= {name: found.get(name) for name in unknown}
        numbers = {name: self._number(table, full_name) for name, full_name in prefixed.items()}
        return {name: int(number) for name, number in numbers.items() if number is not None}

    def _numbers_of(self, version: int) -> dict[str, int | None]:
        """Return the known transactions of a version; none unless this process made it. If a store
        lost our commit, another process may have made the version with that number, so its commit
        is read.
        """
        if version != self._own_version:
            return {}
        is_own = self._own_commit.items() <= transactions_of(self.path, version).items()
        return dict(self._own_numbers) if is_own else {}

    def _find(
        self, table: DeltaTable, query: str, batch_id: int
    ) -> tuple[int, dict[str, Any]] | None:
        """Return the version and the metadata of the commit of a query's last micro-batch; None if
        the log does not have it any more.
        """
        for version, batch in self._batches_since(table, query):
            if (batch.get("query"), batch.get("batch")) == (query, batch_id):
                return version, batch
        return None

    def _batches_since(self, table: DeltaTable, query: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield micro-batches with the versions of their commits, from the recorded version of a
        query's last one on. Without a recorded version, yield the ones in the recent history.
        """
        since = self._number(table, since_of(query))
        versions = (
            range(0)
            if since is None
            else range(since, min(since + HISTORY_COMMITS, table.version() + 1))
        )
        try:
            for version in versions:
                batch = batch_at(self.path, version)
                if batch is not None:
                    yield version, batch
        except (OSError, ValueError) as error:
            raise self._log_unreadable(error) from None
        for commit in self._history(table):
            batch = batch_of_commit(commit)
            if batch is not None:
                yield commit["version"], batch

    def _log_unreadable(self, error: Exception) -> TableAccessError:
        return TableAccessError(
            f"the log of the table at {self.path} cannot be read: {self.path.reason(error)}"
        )

    def _history(self, table: DeltaTable) -> list[dict[str, Any]]:
        """Return the recent commits, the newest first."""
        try:
            commits: list[dict[str, Any]] = table.history(HISTORY_COMMITS)
        except (DeltaError, OSError) as error:
            raise self._log_unreadable(error) from None
        return commits

    def number(self, name: str) -> int | None:
        """Return the number of a name in the transactions of the current version; None if it has
        none.
        """
        return self._number(self._current(), name)

    def append_once(
        self, name: str, number: int, before: int | None, files: list[DataFile]
    ) -> None:
        """Add files as one commit that carries a number, unless the table has that number by a
        name.

        Args:
            before: the number that the table had when the files were written.

        Raises:
            TableError: the commit did not land, or it is not known whether it did; or the table has
                another number.
        """
        table = self._current()
        known = self._number(table, name)
        if known == number:
            return
        if known != before:
            raise TableAccessError(
                f"another process has committed to the table at {self.path} by {name}; start again"
            )
        asked = table.version()
        self._fitting(table)
        numbers = {name: number, f"{name}:attempt": secrets.randbits(63)}
        attempt = f"the files of {name} could not be committed to {self.path}"
        self._append(files, numbers, None, attempt, asked)

    def begin_stream(
        self, stream: str, topic_partitions: Iterable[str] = (), *, takes_over: bool = False
    ) -> None:
        """Record that a stream begins, so that the loss of its checkpoint is noticed even before
        its first row, and that it writes the messages of some topic partitions.

        Args:
            takes_over: topic partitions of other streams become its own.

        Raises:
            CheckpointError: as ``check_writers``, unless it takes them over.
            TableError: the commit did not land.
        """
        table, own = self._current(), number_of(stream)
        names = list(topic_partitions)
        if not takes_over:
            self._check_writers(table, stream, names)
        self._begun.update(names)
        writers = self._writers(table, names)
        numbers = {_WRITER_PREFIX + name: own for name in names if writers.get(name) != own}
        if self._number(table, _STREAM_PREFIX + stream) is None:
            numbers[_STREAM_PREFIX + stream] = -1
        if not numbers:
            return
        numbers[_ATTEMPT_PREFIX + stream] = secrets.randbits(63)
        attempt = f"the stream {stream} could not be recorded in {self.path}"
        self._append([], numbers, None, attempt, table.version())

    def outbox_messages(self, outbox: str) -> int | None:
        """Return how many messages an outbox had up to the last commit; None if no commit records
        it.
        """
        table = self._current()
        # They only grow, and a commit of delta-spark has them in its metadata alone.
        counts = [batch.get(OUTBOX, {}).get(outbox) for batch in self._recent_batches(table)]
        counts.append(self._number(table, _OUTBOX_PREFIX + outbox))
        return max((int(count) for count in counts if count is not None), default=None)

    def contains(self, batch: BatchCommit) -> bool:
        """Return whether the table contains a micro-batch.

        Raises:
            CheckpointError: the table has another one of that number, or a later one.
            OwnershipError: a later checkpoint has committed for the stream since this process
            began,
                or another stream has taken over a topic partition of the micro-batch.
        """
        # Bringing the table up to date costs requests to its store, so all checks read one
        # version.
        table = self._current()
        self._asked_version = table.version()
        self._check_writer(table, batch)
        self._check_not_taken_over(table, batch)
        recorded = self._recorded(table, batch.query)
        if recorded is None or recorded.batch_id < batch.batch_id:
            return False
        if recorded.is_batch(batch):
            return True
        raise CheckpointError(
            f"batch {batch.batch_id} of the stream {batch.stream} is not the one in the table at "
            f"{self.path}, which has batch {recorded.batch_id}: another process runs this stream, "
            "or its checkpoint is an older copy; end the other process, or restore the newest copy "
            "of the checkpoint"
        )

    def _check_writer(self, table: DeltaTable, batch: BatchCommit) -> None:
        # Numbers only grow. So a commit of delta-spark, which the history alone has, lets in nobody
        # whom the number refuses.
        if (self._recorded_writer(table, batch.stream) or 0) <= batch.checkpoint:
            return
        raise OwnershipError(
            f"another checkpoint of the stream {batch.stream} has written to the table at "
            f"{self.path} since this process "
            "began; let only one process run it, with the newest checkpoint"
        )

    def _check_not_taken_over(self, table: DeltaTable, batch: BatchCommit) -> None:
        # The table takes the messages of some topics only, and may have others from other streams.
        names = [name for name in batch.with_messages if name in self._begun]
        other = self._other_stream(table, batch.stream, names)
        if other is None:
            return
        name, writer = other
        raise OwnershipError(
            f"{writer} has taken over the messages of {name} in the table at {self.path}, so the "
            f"stream {batch.stream} writes them no more; end this stream, give it tables of its "
            "own, or, to take the topic back, start it with [delta] fail_on_second_stream = false"
        )

    def commit(
        self,
        batch: BatchCommit,
        files: list[DataFile],
        times_us: dict[str, int],
        outbox: dict[str, int] | None = None,
    ) -> None:
        """Add the files of a micro-batch as one commit; ``contains`` must have been False.

        Args:
            times_us: the greatest time of topic partitions with this micro-batch.
            outbox: by outbox name, how many messages it has had with this micro-batch.

        Raises:
            TableError: the commit did not land, or it is not known whether it did; another writer
                has changed the schema so that the files do not fit, or has removed a file.
        """
        table = self._fitting(self._opened or self._current())
        self._check_present(batch, files)
        numbers = {
            batch.query: batch.batch_id,
            _range_of(batch.query): batch.range_digest,
            _numbered(batch.query): batch.batch_id,
            _outcomes_of(batch.query): batch.outcome_digest,
            since_of(batch.query): table.version() + 1,
            **writer_numbers(batch),
            **{_OUTBOX_PREFIX + name: messages for name, messages in (outbox or {}).items()},
            **{_TIME_PREFIX + name: time_us for name, time_us in times_us.items()},
        }
        attempt = f"batch {batch.batch_id} could not be committed to {self.path}"
        asked = table.version() if self._asked_version is None else self._asked_version
        self._append(files, numbers, {"ledgerlake": batch.to_json()}, attempt, asked)
        self._asked_version = None

    def _check_present(self, batch: BatchCommit, files: list[DataFile]) -> None:
        """Check that all files exist: while a process is suspended, a vacuum may remove its files.

        Raises:
            TableError: a file is missing; the table was not changed.
        """
        missing = self.missing(files)
        if missing:
            raise TableError(
                f"batch {batch.batch_id} was not committed to {self.path}: {missing[0]}, which its "
                "tasks wrote, is gone. If a vacuum removed it, start the pipeline again. If "
                "executors are on other machines, they need the same folder"
            )

    def missing(self, files: list[DataFile]) -> list[str]:
        """Return the names of the files that do not exist.

        Raises:
            TableError: the folder cannot be read.
        """
        folder = self.folder
        try:
            found = folder.filesystem().get_file_info([(folder / file.name).root for file in files])
        except OSError as error:
            raise TableAccessError(
                f"the files of {self.path} cannot be listed: {folder.reason(error)}"
            ) from None
        return [file.base_name for file in found if file.type == fs.FileType.NotFound]

    def version_of(self, batch: BatchCommit) -> int | None:
        """Return the version of the commit of a micro-batch, the last one of its query; None if the
        log does not have it any more.
        """
        found = self._commit_of(batch)
        return None if found is None else found[0]

    def outcomes_of(self, batch: BatchCommit) -> dict[str, Any] | None:
        """Return the ``outcomes`` with which a micro-batch was committed, the last one of its
        query; None if the log does not have them any more.
        """
        found = self._commit_of(batch)
        outcomes = None if found is None else found[1].get("outcomes")
        return outcomes if isinstance(outcomes, dict) else None

    def _commit_of(self, batch: BatchCommit) -> tuple[int, dict[str, Any]] | None:
        """Return the version and the metadata of the commit of a micro-batch, the last one of its
        query; None if the log does not have it any more.
        """
        found = self._find(self._current(), batch.query, batch.batch_id)
        return found if found is not None and batch.is_of(found[1]) else None

    def outcome_digest_of(self, batch: BatchCommit) -> int | None:
        """Return the ``outcome_digest`` with which a micro-batch was committed, the last one of its
        query; None if the table does not have it, as from delta-spark.
        """
        table = self._current()
        is_valid = self._number(table, _numbered(batch.query)) == batch.batch_id
        return self._number(table, _outcomes_of(batch.query)) if is_valid else None

    def keys_of(self, batch: BatchCommit, version: int) -> Counter[RowKey]:
        """Return the keys of the rows that a version added of a micro-batch; only for a table of
        rejects.

        Raises:
            CheckpointError: its files cannot be read.
        """
        keys: Counter[RowKey] = Counter()
        try:
            for name in files_added_at(self.path, version):
                rows = pq.read_table(
                    (self.path / name).root,
                    columns=list(KEY_COLUMNS),
                    filesystem=self.path.filesystem(),
                )
                keys.update(row_keys(rows))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self.not_comparable(batch, self.path.reason(error)) from None
        return keys

    def not_comparable(self, batch: BatchCommit, reason: str) -> CheckpointError:
        """Return the error of a repeat whose rows cannot be compared with the rows of the first
        run.
        """
        return CheckpointError(
            f"batch {batch.batch_id} of the stream {batch.stream} is run again, and its rows "
            f"cannot be compared with those in the table at {self.path} ({reason}): restore the "
            "missing files of the table, or choose a new [delta] rejects_path, which may get rows "
            "of that batch again"
        )

    def _append(
        self,
        files: list[DataFile],
        numbers: dict[str, int],
        metadata: dict[str, str] | None,
        attempt: str,
        asked: int,
    ) -> None:
        """Commit files with numbers.

        Args:
            asked: the version that was found to lack the numbers. The commit may come behind later
                ones, which another process may have made with the same numbers.

        Raises:
            TableError: as ``commit``.
        """
        for _ in range(_COMMIT_ATTEMPTS):
            table = self._opened or self._current()
            properties = table.metadata().configuration
            fitting = [with_named_statistics(file, properties) for file in files]
            try:
                self._check_not_there(asked, table.version(), numbers)
                self._append_to(table, fitting, numbers, metadata)
            except (DeltaError, OSError, ValueError) as error:
                if self._has_landed(numbers):
                    return
                reason = self.path.reason(error)
                if not is_metadata_conflict(error):
                    break
                # The files may fit all the same: another writer set a property, or added a column
                # to a table of records.
                try:
                    self._fitting(self._current())
                except TableError as misfit:
                    raise TableError(f"{attempt}: {misfit.message}") from None
            else:
                self._own_version, self._own_commit = table.version() + 1, numbers
                self._own_numbers = {**self._numbers, **numbers}
                return
        raise TableAccessError(f"{attempt}: {reason}")

    def _check_not_there(self, before: int, version: int, numbers: dict[str, int]) -> None:
        """Check that no other writer has committed with one of the same transactions.

        Raises:
            OSError, ValueError: it has, or a commit cannot be read.
        """
        for number in range(before + 1, version + 1):
            if not transactions_in(read_commit(self.path, number)).keys().isdisjoint(numbers):
                raise OSError("a concurrent transaction has the same app id")

    def _append_to(
        self,
        table: DeltaTable,
        files: list[DataFile],
        numbers: dict[str, int],
        metadata: dict[str, str] | None,
    ) -> None:
        now_ms = self._modified_ms = self._next_modified_ms(table)
        actions = [
            AddAction(file.name, file.size_bytes, file.partition_values, now_ms, True, file.stats)
            for file in files
        ]
        transactions = [Transaction(name, number, now_ms) for name, number in numbers.items()]
        # To remove expired entries, the whole log is read, so this is not done at each commit.
        round_of_cleanup = table.version() // _COMMITS_PER_CLEANUP
        expires = round_of_cleanup != self._cleaned_in and may_clean_log(self.path, table)
        self._cleaned_in = round_of_cleanup
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            partition_by=list(self.partition_by) or None,
            commit_properties=CommitProperties(
                custom_metadata=metadata, app_transactions=transactions
            ),
            post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=expires),
        )

    def _next_modified_ms(self, table: DeltaTable) -> int:
        """Return the time of a commit. It is later than the times of earlier commits, even if a
        clock was set back: files are ordered by it (see ``file_groups``).
        """
        last_ms = self._modified_ms
        if last_ms is None:
            last_ms = pc.max(pa.table(table.get_add_actions())["modification_time"]).as_py() or 0
        return max(int(time.time() * 1000), last_ms + 1)

    def _has_landed(self, numbers: dict[str, int]) -> bool:
        """Return whether the table has a commit of ours, by its random number: a store may store a
        commit and answer with a failure, and delta-rs then meets its own when it tries again.
        """
        try:
            table = self._current()
            return all(self._number(table, name) == number for name, number in numbers.items())
        except (TableError, SetupError):
            return False

    def remove_files(self, names: list[str]) -> None:
        """Remove files that were never committed; ``vacuum`` removes those that could not be
        removed.
        """
        filesystem = self.folder.filesystem()
        for name in names:
            with contextlib.suppress(OSError):
                filesystem.delete_file((self.folder / name).root)

    def refresh(self) -> None:
        """Bring the open table up to date, so that the next question need not read the log, unless
        another process commits in between. A failure is left to that question.
        """
        with contextlib.suppress(TableError, SetupError):
            self._load()
            self._is_refreshed = True

    def _current(self) -> DeltaTable:
        """Return the current version of the table."""
        is_refreshed, self._is_refreshed = self._is_refreshed, False
        table = self._opened_table() if is_refreshed else None
        return table if table is not None and self._is_newest(table) else self._load()

    def _load(self) -> DeltaTable:
        """Read what the log has since the last time. The table is kept open, because opening it
        reads the whole list of files. delta-rs keeps the keys with which it opened.
        """
        options = self.path.delta_options()
        table = self._opened_table()
        try:
            if table is None:
                table = self._opened = open_delta(self.path)
                self._opened_with = options
            else:
                table.update_incremental()
        except (DeltaError, OSError) as error:
            raise TableAccessError(
                f"the table at {self.path} cannot be opened: {self.path.reason(error)}"
            ) from None
        self._numbers = self._numbers_of(table.version())
        return table

    def _opened_table(self) -> DeltaTable | None:
        """Return the open table; None if there is none, or if its store has other keys by now."""
        return self._opened if self._opened_with == self.path.delta_options() else None

    def _is_newest(self, table: DeltaTable) -> bool:
        """Return whether the log certainly has no later version. These are two requests to the
        store; an update is several, and takes longer with each commit since the log's last
        checkpoint.
        """
        version = table.version()
        # Another process may have removed old commits, and among them a later one than this.
        return self._has_commit(version) is True and self._has_commit(version + 1) is False

    def _has_commit(self, version: int) -> bool | None:
        """Return whether the log has a commit; None if the store does not say it: it may refuse to
        answer for a file that is not there.
        """
        file = commit_file(self.path, version)
        try:
            file.filesystem().open_input_file(file.root).close()
        except FileNotFoundError:
            return False
        except OSError:
            return None
        return True

    def _check_mode(self, existing: DeltaTable) -> None:
        """Check that the table is of the kind that this object writes.

        Raises:
            TableError: it is not.
        """
        if existing.metadata().configuration.get(MODE) == LATEST:
            raise TableError(
                f'the table at {self.path} was made with mode = "latest"; set that, or use another '
                "path"
            )

    def _check_keeps_transactions(self, existing: DeltaTable) -> None:
        self._check_mode(existing)
        if _FORGETFUL_PROPERTY in existing.metadata().configuration:
            raise TableError(
                f"the table at {self.path} has the property {_FORGETFUL_PROPERTY}, by which it "
                f"forgets its batches; remove it: ALTER TABLE delta.`{self.path}` UNSET "
                f"TBLPROPERTIES ('{_FORGETFUL_PROPERTY}')"
            )

    def _make_folder(self) -> None:
        try:
            self.path.make()
        except OSError as error:
            raise SetupError(
                f"the table folder {self.path} cannot be made ({error.strerror or error}); choose "
                "another path"
            ) from None

    def _fitting(self, table: DeltaTable) -> DeltaTable:
        """Return the table as files of this process fit it.

        Raises:
            TableError: another writer has changed it so that they do not.
        """
        self._compare(table)
        return table

    def _compare(self, existing: DeltaTable) -> None:
        self._check_keeps_transactions(existing)
        self._check_partitions(existing)
        missing, extra, changed = column_differences(self.schema, existing)
        if missing or extra or changed:
            raise TableError(
                f"the table at {self.path} has another schema ({listed(missing, extra, changed)}); "
                "use another path"
            )
        reasons = self._reasons(existing, self.schema)
        if reasons:
            raise TableError(
                f"the table at {self.path} has {', '.join(reasons)}, which this writer cannot "
                f"honour; {self._way_out(reasons)}"
            )

    def _way_out(self, reasons: list[str]) -> str:
        """Return what to do about features that the files of tasks cannot honour."""
        if set(reasons) == CLUSTERED:
            return "set cluster_by again, or use another path"
        return (
            "start again with [delta] writer = auto, without [[tables]] and cluster_by, or use "
            "another path"
        )

    def _check_partitions(self, existing: DeltaTable) -> None:
        """Check how a table is partitioned, if this writer or the configuration says how.

        Raises:
            TableError: it is partitioned by other columns, or they were computed otherwise.
            OffsetError: a newer release wrote how they are computed.
        """
        columns = existing.metadata().partition_columns
        if self.partition_by and columns != list(self.partition_by):
            there = f"is partitioned by {', '.join(columns)}" if columns else "is not partitioned"
            raise TableError(
                f"the table at {self.path} {there}, and partition_by says "
                f"{', '.join(self.partition_by)}; correct it, or use another path"
            )
        computed = _expressions(existing.metadata().configuration.get(PARTITION_BY), str(self.path))
        if computed and not self.partition_by:
            raise TableError(
                f"the table at {self.path} is partitioned by {', '.join(columns)}, computed by "
                f"{', '.join(computed.values())}, and partition_by is not set; set it back, or use "
                "another path"
            )
        for name, now in self.partition_by.items():
            before = computed.get(name, "")
            if now != before:
                was = f"was computed by {before}" if before else "was not computed"
                raise TableError(
                    f"the partition column {name} of the table at {self.path} {was}, and "
                    f"partition_by has {now or 'no expression'}; set it back, or use another path"
                )

    def _partition_property(self) -> dict[str, str]:
        """Return the property that says how partition columns are computed, if any is."""
        computed = {
            name: expression for name, expression in self.partition_by.items() if expression
        }
        return {PARTITION_BY: f"{_PARTITION_VERSION} {json.dumps(computed)}"} if computed else {}

    def _reasons(self, existing: DeltaTable, columns: pa.Schema) -> list[str]:
        """Return what the files of tasks cannot honour."""
        honoured = {*self.own_features, *((PARTITIONED,) if self.partition_by else ())}
        features = [feature for feature in special_features(existing) if feature not in honoured]
        return features + null_constraints(columns, existing)


def is_metadata_conflict(error: Exception) -> bool:
    """Return whether delta-rs refused a commit because another writer changed columns or properties
    of the table since it was read.
    """
    return isinstance(error, CommitFailedError) and "Metadata changed" in str(error)


def _expressions(text: str | None, place: str) -> dict[str, str]:
    """Return the expressions of a property.

    Raises:
        OffsetError: a newer release wrote it.
        TableError: it is damaged.
    """
    if text is None:
        return {}
    version, _, content = text.partition(" ")
    try:
        refuse_newer(
            f"the table at {place}", int(version), _PARTITION_VERSION, "partitions of version"
        )
        expressions: dict[str, str] = stored(dict[str, str], json.loads(content))
    except (ValueError, TypeError):
        raise TableError(
            f"the property {PARTITION_BY} of the table at {place} is damaged; remove it: ALTER "
            f"TABLE delta.`{place}` UNSET TBLPROPERTIES ('{PARTITION_BY}')"
        ) from None
    return expressions


def _range_of(query: str) -> str:
    return f"{query}:range"


def _numbered(query: str) -> str:
    return f"{query}:range_of"


def _outcomes_of(query: str) -> str:
    return f"{query}:outcomes"


def writer_numbers(batch: BatchCommit) -> dict[str, int]:
    """Return the numbers that say who commits for the stream of a micro-batch."""
    return {
        _STREAM_PREFIX + batch.stream: batch.batch_id,
        _CHECKPOINT_PREFIX + batch.stream: batch.checkpoint,
        _ATTEMPT_PREFIX + batch.stream: secrets.randbits(63),
    }


def since_of(query: str) -> str:
    """Return the name of the version from which on the commit of a query's last micro-batch is."""
    return f"{query}:since"
