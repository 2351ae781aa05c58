"""The Delta sink: tasks write files, the driver commits both tables exactly once.

Order of a micro-batch, each step safe to repeat after a kill at any point:

    1. tasks write Parquet files that no table knows (see ``operators.ingest`` and
       ``operators.finalize``); what a killed task leaves is an orphan for ``ledgerlake vacuum``
    2. ask both tables whether they contain the batch; a batch of another checkpoint is refused
       before anything changes
    3. record the messages for a topic in the outbox (see ``publish.outbox``), if there is one
    4. commit ``rejects``     with the batch's number and offsets. If ``rejects`` has that batch, only what the first run did not reject
                              is added; if ``messages`` has it, only a loss (see ``table.additions``)
    5. commit ``messages``    likewise, skipped if that batch is in already, with how far each topic partition's time has come; without files if the batch read entries and
                              gave no row to either table
    6. let the outbox be sent

The durable cursors move later, when Spark's commit log has the batch (see ``pipeline.cursors``):
until then Spark may run it again. A replayed batch runs the whole plan, because the state store
must advance. Only its commits are skipped.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from ledgerlake.operators.results import BATCH_PROPERTY, BatchSettings, PartitionResult, result_from_json
from ledgerlake.table.additions import add_losses, add_missing
from ledgerlake.table.batch_record import SeenBatch
from ledgerlake.table.delta_table import Table
from ledgerlake.table.shared_files import settle_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import DataFrame

    from ledgerlake.operators.results import RecordSettings
    from ledgerlake.publish.outbox import Outbox
    from ledgerlake.table.batch_record import BatchRecord
    from ledgerlake.table.ordered_files import DataFile
    from ledgerlake.wire.message_id import Position


@dataclass
class BatchResult:
    """The result of a micro-batch; ``repeated`` if the table had it already.

    By topic partition, for those in the batch: ``ends`` is the last position that is safe to
    acknowledge; ``wakeup_times_ms`` is when a batch is needed without new entries;
    ``delayed_counts`` counts the delayed messages, and ``next_due_ms`` is when the next of them is
    due.

    ``incomplete_count`` and ``kept_bytes`` are the incomplete large messages and the bytes kept of
    them. ``tables`` has the tables that contain the batch, by name.
    """

    batch_id: int
    messages: int = 0
    rejects: int = 0
    repeated: bool = False
    ends: dict[str, Position] = field(default_factory=dict)
    wakeup_times_ms: dict[str, int | None] = field(default_factory=dict)
    incomplete_count: int = 0
    kept_bytes: int = 0
    delayed_counts: dict[str, int] = field(default_factory=dict)
    next_due_ms: dict[str, int | None] = field(default_factory=dict)
    stored_bytes: int = 0
    tables: dict[str, SeenBatch] = field(default_factory=dict)


class DeltaSink:
    """Writes micro-batches into the two tables."""

    def __init__(self, messages: Table, rejects: Table, outbox: Outbox | None = None) -> None:
        self.messages = messages
        self.rejects = rejects
        self._outbox = outbox
        self._reached_us: dict[str, int] = {}

    @property
    def tables(self) -> dict[str, Table]:
        """Return the tables by the names that the checkpoint has for them."""
        return {"messages": self.messages, "rejects": self.rejects}

    def begin(self, previous_writers: Mapping[str, int | None]) -> None:
        """Begin to write; from here on, no other process may write for this query.

        Args:
            previous_writers: by table name; see ``Table.begin``.
        """
        for name, table in self.tables.items():
            table.begin(previous_writers.get(name))

    def load_reached_times(self, topic_partitions: list[str]) -> None:
        """Load the greatest time of each topic partition in the table."""
        self._reached_us = self._reached_us | self.messages.effective_times_us(topic_partitions)

    def write(
        self,
        written: DataFrame,
        batch: BatchRecord,
        with_state: list[str] | None,
        check_owner: Callable[[], None],
        records: RecordSettings | None = None,
    ) -> BatchResult:
        """Run the plan of a micro-batch (see ``plan``) and commit what it wrote.

        Args:
            with_state: the topic partitions with messages in state; None if they are not known.
            check_owner: raises if this process does not own the stream any more; called before
                anything is committed.
            records: the columns of a table of records.

        Raises:
            TableError: a commit did not land; the batch is not counted as done.
            CheckpointError: the tables contain another batch of that number, or a later one;
                nothing was changed.
        """
        settings = asdict(BatchSettings(batch.batch_id, self._reached_us, with_state, records))
        # The tasks' code was fixed when the query began, but they can read this in every batch.
        written.sparkSession.sparkContext.setLocalProperty(BATCH_PROPERTY, json.dumps(settings))
        # While the tasks run, the driver has time to read its last commit.
        refreshing = threading.Thread(target=self.messages.refresh, name="ledgerlake-table", daemon=True)
        refreshing.start()
        partitions = [result_from_json(row.result) for row in written.collect()]
        refreshing.join()
        check_owner()
        return self.commit(batch, partitions)

    def commit(self, batch: BatchRecord, partitions: list[PartitionResult]) -> BatchResult:
        """Commit what the tasks of a micro-batch wrote; see ``write``."""
        written = {partition.topic_partition: partition.written for partition in partitions}
        rejects, cut_rejects = settle_shared(self.rejects, {name: files.rejects for name, files in written.items()})
        messages, cut = settle_shared(self.messages, {name: files.messages for name, files in written.items()})
        result = BatchResult(batch.batch_id, sum(file.rows for file in messages), sum(file.rows for file in rejects))
        # Entries that stay in state give no row, but the cursor passes them. So the batch is
        # recorded without rows, and an older copy of the checkpoint is not taken for the newest.
        is_recorded = bool(messages) or (batch.reads and not rejects)
        # Rejects are committed first. If messages has a batch, rejects has those of its first run.
        in_messages = (is_recorded or bool(rejects)) and self.messages.contains(batch)
        in_rejects = bool(rejects) and self.rejects.contains(batch)
        outbox_messages = None
        if self._outbox is not None:
            self._outbox.add(batch, {partition.topic_partition: partition.outbox for partition in partitions})
            outbox_messages = {self._outbox.name: self._outbox.messages}
        if rejects and in_messages:
            add_losses(self.rejects, batch, rejects, in_rejects)
        elif rejects:
            self._commit_rejects(batch, rejects, in_rejects)
        if is_recorded and not in_messages:
            later_us = self._later_times(partitions)
            self.messages.commit(batch, messages, later_us, outbox_messages)
            self._reached_us = self._reached_us | later_us
        if in_messages:
            # Another process may have committed it, so only the table has its times.
            self.load_reached_times([partition.topic_partition for partition in partitions])
        result.repeated = in_messages or (in_rejects and not is_recorded)
        is_in_table = {
            "messages": is_recorded or in_messages,
            "rejects": in_rejects or (bool(rejects) and not in_messages),
        }
        result.tables = {
            name: SeenBatch(str(table.path), batch.batch_id) for name, table in self.tables.items() if is_in_table[name]
        }
        if self._outbox is not None:
            self._outbox.commit(batch.batch_id)
        self.rejects.remove_files(cut_rejects)
        self.messages.remove_files([*cut, *(name for partition in partitions for name in partition.replaced)])
        for partition in partitions:
            result.ends[partition.topic_partition] = partition.safe_to_acknowledge
            result.wakeup_times_ms[partition.topic_partition] = partition.wakeup_time_ms
            result.incomplete_count += partition.summary.incomplete_count
            result.kept_bytes += partition.summary.kept_bytes
            result.delayed_counts[partition.topic_partition] = partition.summary.delayed_count
            result.next_due_ms[partition.topic_partition] = partition.summary.next_due_ms
            result.stored_bytes += partition.written.stored_bytes
        return result

    def _commit_rejects(self, batch: BatchRecord, files: list[DataFile], is_in_table: bool) -> None:
        if is_in_table:
            add_missing(self.rejects, batch, files)
        else:
            self.rejects.commit(batch, files, {})

    def _later_times(self, partitions: list[PartitionResult]) -> dict[str, int]:
        """Return the greatest time of each topic partition in the batch; never less than that in
        the table.
        """
        times_us = {partition.topic_partition: partition.written.max_effective_us for partition in partitions}
        reached = {name: time_us for name, time_us in times_us.items() if time_us is not None}
        return {name: max(time_us, self._reached_us.get(name, time_us)) for name, time_us in reached.items()}
