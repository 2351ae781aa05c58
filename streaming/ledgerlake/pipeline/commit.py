"""The Delta sink: tasks write files, the driver commits all tables exactly once.

Order of a micro-batch, each step safe to repeat after a kill at any point:

    1. tasks write Parquet files that no table knows (see ``operators.ingest`` and
       ``operators.outcome_files``); what a killed task leaves is an orphan for ``ledgerlake
       vacuum``. Each topic partition of the batch must have one result
    2. ask the tables whether they contain the batch; a batch of another checkpoint is refused
       before anything changes, and so is a repeat with another outcome than the run that committed
    3. record the messages that this run has for a topic in the outbox (see ``publish.outbox``), if
       there is one
    4. commit ``rejects``          with the batch's number and offsets. If ``rejects`` has that
                                   batch, only what the first run did not reject is added; if the
                                   main table has it, only a loss (see ``table.repeated_rejects``)
    5. commit the other tables     those that got rows, several at once, skipped if that batch is in
                                   already, each with how far each topic partition's time has come
    6. commit the main table       likewise, and last (see ``pipeline.tables``); without files if
                                   the batch gave it no row, and read entries or gave rows to other
                                   tables or to rejects
    7. release the messages for the topic that belong to the commit of the main table

The durable cursors move later, when Spark's commit log has the batch (see ``pipeline.cursors``):
until then Spark may run it again. A replayed batch runs the whole plan, because the state store
must advance. Only its commits are skipped. The state is the repeat's, and the rows are the first
run's. So both must have the same outcome (see ``operators.outcome_digest``).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ledgerlake.client.topics import split_partition
from ledgerlake.errors import CheckpointError, ProcessLostError
from ledgerlake.operators.outcome_digest import OutcomeDigest
from ledgerlake.operators.results import (
    BATCH_PROPERTY,
    BatchSettings,
    PartitionResult,
    results_from_json,
)
from ledgerlake.operators.stage_rows import Incomplete, Released, sum_of
from ledgerlake.options.config import REJECTS_TABLE
from ledgerlake.table.batch_commit import SeenBatch
from ledgerlake.table.repeated_rejects import add_losses, add_missing

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

    from ledgerlake.delay.due_times import DueSpan
    from ledgerlake.operators.results import TopicSchemas
    from ledgerlake.pipeline.tables import MessagesTable, Tables
    from ledgerlake.publish.outbox import Outbox
    from ledgerlake.table.batch_commit import BatchCommit
    from ledgerlake.table.delta_table import Table
    from ledgerlake.table.ordered_files import DataFile
    from ledgerlake.wire.message_id import Position

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

# How many tables are committed at once.
_MOST_COMMITS = 8

# From then on a commit is worth a warning, because all tables of a pipeline wait for it.
_SLOW_COMMIT_S = 10.0


@dataclass
class BatchResult:
    """The result of a micro-batch; ``repeated`` if the table had it already. ``reasons`` counts the
    rejects by reason.

    By topic partition, for those in the batch: ``ends`` is the last position that is safe to
    acknowledge; ``wakeup_times_ms`` is when a batch is needed without new entries; ``incomplete``
    counts the large messages that wait for chunks; ``delayed_counts`` counts the delayed messages,
    ``next_due_ms`` is when the next of them is due, and ``due_spans`` counts them by when they are
    due.

    ``released`` has the times of the delayed messages that were delivered (see
    ``operators.stage_rows``).

    ``tables`` has the tables that contain the batch, by name. ``commit_s`` is what the
    commits to all tables took together.
    """

    batch_id: int
    messages: int = 0
    rejects: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    repeated: bool = False
    ends: dict[str, Position] = field(default_factory=dict)
    wakeup_times_ms: dict[str, int | None] = field(default_factory=dict)
    incomplete: dict[str, Incomplete] = field(default_factory=dict)
    delayed_counts: dict[str, int] = field(default_factory=dict)
    next_due_ms: dict[str, int | None] = field(default_factory=dict)
    due_spans: dict[str, list[DueSpan]] = field(default_factory=dict)
    stored_bytes: int = 0
    commit_s: float = 0.0
    released: Released = field(default_factory=Released)
    tables: dict[str, SeenBatch] = field(default_factory=dict)

    @property
    def incomplete_count(self) -> int:
        """Return how many large messages are incomplete, of all topic partitions in the batch."""
        return sum_of(self.incomplete.values()).count

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that are kept of them."""
        return sum_of(self.incomplete.values()).kept_bytes

    def add(self, partition: PartitionResult) -> None:
        """Take the numbers of a topic partition."""
        name, summary = partition.topic_partition, partition.summary
        self.ends[name] = partition.safe_to_acknowledge
        self.wakeup_times_ms[name] = partition.wakeup_time_ms
        self.incomplete[name] = Incomplete(summary.incomplete_count, summary.kept_bytes)
        self.delayed_counts[name] = summary.delayed_count
        self.next_due_ms[name] = summary.next_due_ms
        self.due_spans[name] = summary.due_spans
        self.stored_bytes += partition.written.stored_bytes
        self.released = self.released.and_more(partition.released)
        self.reasons.update(partition.written.reasons)


class DeltaSink:
    """Writes micro-batches into the tables."""

    def __init__(self, tables: Tables, outbox: Outbox | None = None) -> None:
        self._tables = tables
        self._outbox = outbox
        self._last_batch: int | None = None

    def write(
        self,
        written: DataFrame,
        batch: BatchCommit,
        with_state: list[str] | None,
        check_owner: Callable[[], None],
        schemas: TopicSchemas,
    ) -> BatchResult:
        """Run the plan of a micro-batch (see ``plan``) and commit what it wrote.

        Args:
            with_state: the topic partitions with messages in state; None if they are not known.
            check_owner: raises if this process does not own the stream any more; called before
                anything is committed.
            schemas: the schemas of the topics.

        Raises:
            ProcessLostError: the results are of two runs of a task that do not fit together.
            TableError: a commit did not land; the batch is not counted as done. CheckpointError:
            the tables contain another batch of that number, or a later one, or this
                batch with another outcome; nothing was changed.
        """
        tables = self._tables_of(batch)
        settings = asdict(
            BatchSettings(batch.batch_id, self._tables.settings(tables), with_state, schemas)
        )
        # The tasks' code was fixed when the query began, but they can read this in every batch.
        written.sparkSession.sparkContext.setLocalProperty(BATCH_PROPERTY, json.dumps(settings))
        # While the tasks run, the driver has time to read its last commits.
        refreshing = threading.Thread(
            target=_refresh, args=(tables,), name="ledgerlake-table", daemon=True
        )
        refreshing.start()
        partitions = [
            result for row in written.collect() for result in results_from_json(row.result)
        ]
        refreshing.join()
        check_owner()
        _check_complete(batch, partitions)
        begun_s = time.monotonic()
        result = self.commit(batch, partitions)
        result.commit_s = time.monotonic() - begun_s
        return result

    def commit(self, batch: BatchCommit, partitions: list[PartitionResult]) -> BatchResult:
        """Commit what the tasks of a micro-batch wrote; see ``write``. Each topic partition has one
        result, with all that was written for it.
        """
        batch = replace(batch, outcomes=_outcomes(partitions))
        rejects = [file for partition in partitions for file in partition.written.rejects]
        parts = [_TablePart(table, partitions) for table in self._tables_of(batch)]
        main = next(part for part in parts if part.name == self._tables.main_name)
        rows = sum(part.rows for part in parts)
        result = BatchResult(batch.batch_id, rows, sum(file.rows for file in rejects))
        # Entries that stay in state give no row, but the cursor passes them. So the batch is
        # recorded without rows, and an older copy of the checkpoint is not taken for the newest.
        # The outbox of a later start sends what the main table has recorded.
        has_due = any(partition.outbox for partition in partitions)
        # So it is without rows if it has rejects alone: a process that was suspended may have run
        # it with rows, and commits them only if the main table does not have it.
        is_recorded = rows > 0 or has_due or batch.reads or bool(rejects)
        # A first run may have written to tables for which the repeat has nothing.
        may_repeat = self._last_batch is None or batch.batch_id <= self._last_batch
        written = [part for part in parts if part.files]
        # Rejects are committed first, and the main table last. If the main table has a batch, the
        # other tables have the rows of its first run.
        asked = parts if may_repeat else [*written, main] if is_recorded else []
        with_batch = self._with_batch(batch, asked)
        in_main = main in with_batch
        in_rejects = bool(rejects or may_repeat) and self._tables.rejects.contains(batch)
        committed = [part.table for part in parts if part in with_batch]
        _check_repeat(batch, [*committed[::-1], *([self._tables.rejects] if in_rejects else [])])
        outbox, counts = self._outbox, None
        if outbox is not None:
            new_files = {partition.topic_partition: partition.outbox for partition in partitions}
            counts = {outbox.name: outbox.add(batch, new_files)}
        if rejects and in_main:
            add_losses(self._tables.rejects, batch, rejects, in_rejects)
        elif rejects:
            self._commit_rejects(batch, rejects, in_rejects)
        if is_recorded and not in_main:
            others = [part for part in written if part is not main and part not in with_batch]
            _each(others, lambda part: part.commit(batch))
            if self._tables.exists(main.name):
                main.commit(batch, counts)
            with_batch |= {*others, main}
        result.repeated = in_main
        result.tables = {
            part.name: part.seen(batch) for part in with_batch if self._tables.exists(part.name)
        }
        if in_rejects or (rejects and not in_main):
            result.tables[REJECTS_TABLE] = SeenBatch(str(self._tables.rejects.path), batch.batch_id)
        if outbox is not None:
            outbox.commit(batch.batch_id, main.table.outcomes_of(batch) if in_main else None)
        self._last_batch = batch.batch_id
        for part in parts:
            part.remove_replaced()
        for partition in partitions:
            result.add(partition)
        return result

    def _tables_of(self, batch: BatchCommit) -> list[MessagesTable]:
        """Return the tables that messages of the micro-batch may come into, the main one last."""
        names = {
            table.options.name
            for name in batch.ranges
            for table in self._tables.of_topic(split_partition(name)[0])
        }
        return [
            table
            for table in self._tables.messages
            if table.options.name in names or table is self._tables.main
        ]

    def _commit_rejects(self, batch: BatchCommit, files: list[DataFile], is_in_table: bool) -> None:
        if is_in_table:
            add_missing(self._tables.rejects, batch, files)
        else:
            self._tables.rejects.commit(batch, files, {})

    def _with_batch(self, batch: BatchCommit, parts: list[_TablePart]) -> set[_TablePart]:
        """Return the parts whose tables contain the micro-batch.

        Raises:
            CheckpointError, OwnershipError: as ``Table.contains``.
        """
        existing = [part for part in parts if self._tables.exists(part.name)]
        contained = _each(existing, lambda part: part.contains(batch))
        return {part for part, is_in in zip(existing, contained, strict=True) if is_in}


class _TablePart:
    """What the tasks of a micro-batch wrote for one table."""

    def __init__(self, table: MessagesTable, partitions: list[PartitionResult]) -> None:
        self.name = table.options.name
        self._table = table
        self._written = {
            partition.topic_partition: partition.written.tables[self.name]
            for partition in partitions
            if self.name in partition.written.tables
        }
        self.files = [file for written in self._written.values() for file in written.files]
        self._replaced = [
            name for partition in partitions for name in partition.replaced.get(self.name, ())
        ]

    @property
    def table(self) -> Table:
        return self._table.table

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def contains(self, batch: BatchCommit) -> bool:
        """Return whether the table contains the micro-batch."""
        is_there = self._table.table.contains(batch)
        if is_there:
            # Another process may have committed it, so only the table has its times.
            self._table.watermark_us |= self._table.table.effective_times_us(list(self._written))
        return is_there

    def seen(self, batch: BatchCommit) -> SeenBatch:
        """Return the record for the checkpoint of a batch that the table contains."""
        return SeenBatch(str(self._table.table.path), batch.batch_id)

    def commit(self, batch: BatchCommit, outbox: dict[str, int] | None = None) -> None:
        begun_s = time.monotonic()
        later_us = self._later_times()
        self._table.table.commit(batch, self.files, later_us, outbox)
        self._table.watermark_us |= later_us
        taken_s = time.monotonic() - begun_s
        if taken_s > _SLOW_COMMIT_S:
            _log.warning(
                "the commit of batch %d to the table at %s took %d s; nothing else is written "
                "meanwhile",
                batch.batch_id,
                self._table.table.path,
                taken_s,
            )

    def remove_replaced(self) -> None:
        """Remove the files that others replace."""
        self._table.table.remove_files(self._replaced)

    def _later_times(self) -> dict[str, int]:
        """Return the greatest time of each topic partition in the batch; never less than that in
        the table.
        """
        times_us = {name: written.max_effective_us for name, written in self._written.items()}
        reached = {name: time_us for name, time_us in times_us.items() if time_us is not None}
        return {
            name: max(time_us, self._table.watermark_us.get(name, time_us))
            for name, time_us in reached.items()
        }


def _outcomes(partitions: list[PartitionResult]) -> dict[str, Any]:
    """Return the digests of a micro-batch by topic partition, for those with an outcome."""
    digests = {
        partition.topic_partition: partition.written.digest.to_json() for partition in partitions
    }
    return {name: digest for name, digest in digests.items() if digest}


def _check_repeat(batch: BatchCommit, tables: list[Table]) -> None:
    """Check that a micro-batch has the outcome with which a table has it already. All tables have
    that of one run, so the first one that knows it decides.

    Args:
        tables: those that contain the micro-batch.

    Raises:
        CheckpointError: it has another one; nothing was changed.
    """
    for table in tables:
        digest = table.outcome_digest_of(batch)
        if digest == batch.outcome_digest:
            return
        # Some outcomes differ and are allowed to; the commit says it by topic partition.
        committed = table.outcomes_of(batch)
        if committed is not None:
            _check_outcomes(batch, table, committed)
            return
        if digest is not None:
            raise _another_outcome(
                batch, table, "its log no longer has the commit that says in what"
            )
    if tables:
        _log.warning(
            "batch %d of the stream %s is run again, and its outcome is compared with none: the "
            "logs of its tables no longer have the commits of the first run",
            batch.batch_id,
            batch.stream,
        )


def _check_outcomes(batch: BatchCommit, table: Table, committed: dict[str, Any]) -> None:
    for name in sorted({*committed, *batch.outcomes}):
        first = OutcomeDigest.from_json(committed.get(name, {}))
        difference = first.difference(OutcomeDigest.from_json(batch.outcomes.get(name, {})))
        if difference:
            raise _another_outcome(batch, table, f"of {name} it had {difference}")


def _another_outcome(batch: BatchCommit, table: Table, difference: str) -> CheckpointError:
    return CheckpointError(
        f"batch {batch.batch_id} of the stream {batch.stream} is in the table at {table.path}, and "
        f"was run again with another outcome: {difference}; nothing was changed, since messages "
        "would be lost or come twice. Run it with the release and the settings of the first run, "
        "or see 'A repeated micro-batch has another outcome' in docs/recover.md"
    )


def _check_complete(batch: BatchCommit, partitions: list[PartitionResult]) -> None:
    """Check that each topic partition has one result. If an executor is lost, Spark may use rows of
    two runs of one task, and the second run may have found less in a topic.
    """
    counts = Counter(partition.topic_partition for partition in partitions)
    wrong = [name for name in {*counts, *batch.reporting} if counts[name] != 1]
    if wrong:
        raise ProcessLostError(
            f"batch {batch.batch_id} has {counts[min(wrong)]} results of {min(wrong)} in place of "
            "one, as after the loss of an executor whose task then found other messages; nothing "
            "was committed, start the pipeline again"
        )


def _each(parts: list[_TablePart], work: Callable[[_TablePart], Result]) -> list[Result]:
    """Do the work for several tables at once, and wait for all of it; return the results."""
    if len(parts) < 2:
        return [work(part) for part in parts]
    with ThreadPoolExecutor(min(_MOST_COMMITS, len(parts)), "ledgerlake-commit") as executor:
        return [future.result() for future in [executor.submit(work, part) for part in parts]]


def _refresh(tables: list[MessagesTable]) -> None:
    for table in tables:
        table.table.refresh()
