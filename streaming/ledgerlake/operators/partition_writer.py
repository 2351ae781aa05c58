"""Writes the files of all tables for one topic partition in one task."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pyarrow as pa

from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.decode.single_entry import single_entries
from ledgerlake.errors import SetupError
from ledgerlake.operators.outcome_digest import (
    OutcomeDigest,
    depends_on_surroundings,
    message_tally,
    reject_tally,
)
from ledgerlake.operators.outcomes import OutcomeDecoder
from ledgerlake.operators.results import BatchSettings, TableResult, TaskResult, TaskSettings
from ledgerlake.operators.table_writer import SharedTable, TableWriters
from ledgerlake.source.views import check_broker_metadata
from ledgerlake.table.ordered_files import BufferedWriter, data_folder
from ledgerlake.values.record_rows import Misfit
from ledgerlake.wire.message_id import Position

# A range's files are closed at so many places at most, since a producer decides how many last
# chunks come, and a closed file may be tiny. Where no file was closed, the last stage merges.
_MOST_ROLLS = 8


class SharedFiles:
    """Files for the topic partitions of one task that have few messages; a file of its own for each
    would soon make millions.

    Only those without anything in state share one, because what the last stage writes of a topic
    partition may have to be merged with what the first one wrote. The rows of each are in order,
    one topic partition after another. All their results go in one row, so Spark takes all of them
    from one run of the task.
    """

    def __init__(self, settings: TaskSettings, batch: BatchSettings) -> None:
        self._rejects = BufferedWriter(
            data_folder(settings.rejects_folder, schema.REJECTS, file_prefix(0, batch)),
        )
        self._tables: dict[str, SharedTable] = {}

    @property
    def rejects(self) -> BufferedWriter:
        """Return the writer for rejects."""
        return self._rejects

    def table(self, name: str) -> SharedTable:
        """Return the files of a table."""
        return self._tables.setdefault(name, SharedTable())

    def finish(self, results: list[TaskResult]) -> None:
        """Close the files, and add each to the first result that has its table; there is one at
        least.
        """
        for name, table in self._tables.items():
            first = next(result for result in results if name in result.tables)
            first.tables[name].files.extend(table.finish())
        results[0].rejects.extend(self._rejects.finish())


class PartitionWriter:
    """The files of one topic partition in one task. Nothing of what it takes goes on in the
    stream.
    """

    def __init__(
        self, topic_partition: TopicPartition, settings: TaskSettings, batch: BatchSettings
    ) -> None:
        self.topic_partition = topic_partition
        self._options = settings.options
        self._stops_at_misfits = settings.stops_at_misfits
        prefix = file_prefix(topic_partition.partition, batch)
        self._tables = TableWriters(
            settings.tables, topic_partition, settings.options.client, batch, prefix
        )
        self.decoder = OutcomeDecoder(topic_partition, settings)
        self._rolls = 0
        self._reasons: Counter[str] = Counter()
        self._digest = OutcomeDigest()
        self._rejects = BufferedWriter(data_folder(settings.rejects_folder, schema.REJECTS, prefix))

    def take_messages(self, messages: pa.RecordBatch) -> tuple[()]:
        """Write rows of ``schema.MESSAGES``.

        Raises:
            SetupError: as ``check_broker_metadata``; or a message does not fit a table, and the
                stream is to end then.
        """
        check_broker_metadata(self._options.require_broker_metadata, messages, self.topic_partition)
        self._digest += OutcomeDigest(rows=message_tally(messages))
        misfits = self._tables.write(messages)
        mismatch = next((misfit for misfit in misfits if misfit.is_mismatch), None)
        if mismatch is not None and self._stops_at_misfits:
            raise self._misfit_error(mismatch, messages.slice(mismatch.row, 1))
        if misfits:
            self.take_rejects(misfit_rejects(messages, misfits))
        return ()

    def take_rejects(self, rejected: list[RejectedEntry]) -> tuple[()]:
        """Write entries into ``rejects``; see ``OutcomeDecoder.reject_tables``."""
        for rejects in self.decoder.reject_tables(rejected):
            self.take_reject_rows(rejects)
        return ()

    def take_reject_rows(self, rejects: pa.Table) -> tuple[()]:
        """Write rows of ``schema.REJECTS``."""
        self._reasons.update(rejects["reason"].to_pylist())
        self._digest += OutcomeDigest(rejects=reject_tally(rejects))
        self._rejects.write(rejects)
        return ()

    def make_place(self) -> None:
        """Close the open files: a row from another file will come between. After ``_MOST_ROLLS``
        calls they stay open.
        """
        if self._rolls == _MOST_ROLLS:
            return
        self._rolls += 1
        for writer in self._tables.writers:
            writer.roll_files()

    def finish(self, end: Position, shared: SharedFiles | None = None) -> TaskResult:
        """Close the files.

        Args:
            shared: takes the rows for which no file was opened yet.
        """
        for rejects in self.decoder.last_rejects():
            self.take_reject_rows(rejects)
        tables = {
            writer.table.name: writer.finish(
                None if shared is None else shared.table(writer.table.name)
            )
            for writer in self._tables.with_rows
        }
        rejects = self._rejects.finish(None if shared is None else shared.rejects)
        source = self.topic_partition
        may_differ = self._options.gives_other_messages_later or depends_on_surroundings(
            self._reasons
        )
        digest = replace(self._digest, may_differ=may_differ)
        return TaskResult(
            source.topic,
            source.partition,
            end,
            tables,
            rejects,
            dict(self._reasons),
            digest=digest,
        )

    def merged(
        self, results: list[TaskResult]
    ) -> tuple[dict[str, TableResult], dict[str, list[str]]]:
        """Return what all tasks of the topic partition wrote for each table, with files that follow
        each other, and the names of the files that were merged into others.
        """
        tables: dict[str, TableResult] = {}
        replaced: dict[str, list[str]] = {}
        for writer in self._tables.with_rows:
            name = writer.table.name
            of_table = [result.tables[name] for result in results if name in result.tables]
            tables[name], replaced[name] = writer.merge(of_table)
        return tables, replaced

    def _misfit_error(self, misfit: Misfit, message: pa.RecordBatch) -> SetupError:
        message_id = Position(message["ledger_id"][0].as_py(), message["entry_id"][0].as_py())
        return SetupError(
            f"the message {message_id} of {self.topic_partition.topic} does not fit the table "
            f"({misfit.reason}: {misfit.detail}); "
            'correct the topic\'s schema or the query, or set [delta] on_mismatch = "reject" to go '
            "on"
        )


def misfit_rejects(messages: pa.RecordBatch, misfits: list[Misfit]) -> list[RejectedEntry]:
    """Return the rejects of messages that do not fit; each has an entry with that message alone."""
    bad = messages.take(pa.array([misfit.row for misfit in misfits]))
    places = bad.select(["ledger_id", "entry_id", "batch_index"]).to_pylist()
    return [
        RejectedEntry(
            Position(place["ledger_id"], place["entry_id"]),
            entry,
            misfit.reason,
            misfit.detail,
            place["batch_index"],
        )
        for misfit, entry, place in zip(misfits, single_entries(bad), places, strict=True)
    ]


def file_prefix(partition: int, batch: BatchSettings) -> str:
    """Return the prefix of the names of a task's files. ``table.vacuum`` and ``publish.outbox``
    read the micro-batch from it.
    """
    return f"part-{batch.batch_id:08d}-{max(partition, 0):05d}"
