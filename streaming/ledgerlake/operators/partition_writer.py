"""Writes the files of both tables, ``messages`` and ``rejects``, for one topic partition in one task."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from ledgerlake.assembly.assembler import Outcome
from ledgerlake.client.topics import join_partition
from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.decode.record_rows import rows_schema
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.delay.cancel_messages import CANCEL_REFUSED, TaskCancels
from ledgerlake.operators.outcomes import OutcomeDecoder
from ledgerlake.operators.record_rows import RecordRows
from ledgerlake.operators.results import BatchSettings, TaskResult, TaskSettings
from ledgerlake.source.views import check_broker_metadata
from ledgerlake.table.delta_table import data_folder
from ledgerlake.table.ordered_files import BufferedWriter, OrderedWriter
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ledgerlake.decode.messages import BatchRange
    from ledgerlake.delay.cancels import Cancel


_MAX_TO_REREAD = 10_000


class SharedFiles:
    """Files for the topic partitions of one task that have few messages; a file of its own for each
    would soon make millions.

    Only those without anything in state share one, because what the last stage writes of a topic
    partition may have to be merged with what the first one wrote. The rows of each are in order,
    one topic partition after another. Each reports all shared files of its task, because Spark may
    take the reports from several runs of the task (see ``table.shared_files``).
    """

    def __init__(self, settings: TaskSettings, batch: BatchSettings) -> None:
        prefix = file_prefix(0, batch)
        self.messages = BufferedWriter(data_folder(settings.messages_folder, _message_rows(batch), prefix))
        self.rejects = BufferedWriter(data_folder(settings.rejects_folder, schema.REJECTS, prefix))

    def finish(self, results: list[TaskResult]) -> list[TaskResult]:
        """Close the files, and return the results of the topic partitions with them."""
        members = tuple(join_partition(result.topic, result.partition) for result in results)
        messages, rejects = (
            [replace(file, members=members) for file in writer.finish()] for writer in (self.messages, self.rejects)
        )
        return [
            replace(result, messages=[*result.messages, *messages], rejects=[*result.rejects, *rejects])
            for result in results
        ]


class PartitionWriter:
    """The files of one topic partition in one task."""

    def __init__(self, topic_partition: TopicPartition, settings: TaskSettings, batch: BatchSettings) -> None:
        self.topic_partition = topic_partition
        self._options = settings.options
        prefix = file_prefix(topic_partition.partition, batch)
        self.messages_folder = data_folder(settings.messages_folder, _message_rows(batch), prefix)
        self.messages = OrderedWriter(
            self.messages_folder, batch.reached_us.get(join_partition(topic_partition.topic, topic_partition.partition))
        )
        self.decoder = OutcomeDecoder(
            topic_partition, settings.options, settings.limits.max_message_bytes, delays_messages=settings.delay.enabled
        )
        self._records = (
            None
            if batch.records is None
            else RecordRows(
                topic_partition.topic, settings.options.client, batch.records, stops=settings.stops_at_misfits
            )
        )
        self._cancels = TaskCancels()
        self._rejects_to_reread: list[RejectedEntry] = []
        self._rejects = BufferedWriter(data_folder(settings.rejects_folder, schema.REJECTS, prefix))

    def write_entries(self, frames: memoryview, first_entry: BatchRange) -> list[Cancel]:
        """Write plain entries; return the cancels among them that the task accepts."""
        cancels: list[Cancel] = []
        decoded_bundles = decode_bundle(
            frames,
            self.topic_partition,
            first_entry=first_entry,
            **self._options.decoding,
        )
        for decoded in decoded_bundles:
            self._write_messages(decoded.messages.select(schema.MESSAGES.names))
            accepted, refused = self._cancels.take(decoded.messages)
            cancels += accepted
            self.write_rejects([RejectedEntry(position, None, CANCEL_REFUSED) for position in refused])
            if decoded.rejects.num_rows:
                self._rejects.write(pa.Table.from_batches([decoded.rejects]))
        return cancels

    def write_outcome(self, outcome: Outcome) -> Iterator[pa.RecordBatch]:
        """Write an outcome; yield the messages that were written."""
        for decoded in self.decoder.decode(outcome):
            if isinstance(decoded, list):
                self.write_rejects(decoded)
            else:
                self._write_messages(decoded)
                yield decoded

    def write_rejects(self, rejected: list[RejectedEntry]) -> None:
        """Write entries into ``rejects``. Entries that must be read again are collected, so that
        neighbours are read together.
        """
        self._rejects_to_reread += [reject for reject in rejected if reject.entry is None]
        self._write_tables([reject for reject in rejected if reject.entry is not None])
        if len(self._rejects_to_reread) >= _MAX_TO_REREAD:
            self._reread_rejects()

    def finish(self, end: Position, shared: SharedFiles | None = None) -> TaskResult:
        """Close the files.

        Args:
            shared: takes the rows for which no file was opened yet.
        """
        self._reread_rejects()
        messages = self.messages.finish(None if shared is None else shared.messages)
        return TaskResult(
            self.topic_partition.topic,
            self.topic_partition.partition,
            end,
            self.messages.max_effective_us,
            messages,
            self._rejects.finish(None if shared is None else shared.rejects),
        )

    def _reread_rejects(self) -> None:
        to_reread, self._rejects_to_reread = self._rejects_to_reread, []
        self._write_tables(to_reread)

    def _write_tables(self, rejected: list[RejectedEntry]) -> None:
        for table in self.decoder.reject_tables(rejected):
            self._rejects.write(table)

    def _write_messages(self, messages: pa.RecordBatch) -> None:
        check_broker_metadata(self._options.require_broker_metadata, messages, self.topic_partition)
        if self._records is None:
            self.messages.write(messages)
            return
        for rows, misfits in self._records.of(messages):
            self.messages.write(rows)
            self.write_rejects(misfits)


def _message_rows(batch: BatchSettings) -> pa.Schema:
    """Return the columns of the rows that are written."""
    return schema.MESSAGES if batch.records is None else rows_schema(batch.records.record)


def file_prefix(partition: int, batch: BatchSettings) -> str:
    """Return the prefix of the names of a task's files. ``table.vacuum`` and ``publish.outbox``
    read the micro-batch from it.
    """
    return f"part-{batch.batch_id:08d}-{max(partition, 0):05d}"
