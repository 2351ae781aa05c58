"""The last stage of a micro-batch: it writes the outcomes of the stateful stage to files.

Files that overlap are merged, and each topic partition gets one result, which sums up all stages.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.assembly.assembler import Outcome, Rejected, RejectedPositions
from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.delay.cancels import Cancels
from ledgerlake.operators.delayed import TOPIC
from ledgerlake.operators.partition_writer import PartitionWriter, file_prefix
from ledgerlake.operators.results import BatchSettings, PartitionResult, TaskSettings, task_result_from_dict
from ledgerlake.operators.rows import StateSummary
from ledgerlake.operators.stage_output import read_stage_rows
from ledgerlake.stored.fields import fields_of
from ledgerlake.table.delta_table import data_folder
from ledgerlake.table.ordered_files import BufferedWriter
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def finalize(rows: Iterable[pa.RecordBatch], settings: TaskSettings, batch: BatchSettings) -> Iterator[pa.RecordBatch]:
    """Run a task of the last stage: rows of ``STAGE_ROWS`` in, files out, one result for each
    topic partition.
    """
    partitions: dict[TopicPartition, _FinalizedPartition] = {}
    for topic_partition, output in read_stage_rows(rows):
        if topic_partition not in partitions:
            partitions[topic_partition] = _FinalizedPartition(topic_partition, settings, batch)
        if isinstance(output, StateSummary):
            result = json.dumps(partitions.pop(topic_partition).finish(output), default=fields_of)
            yield pa.RecordBatch.from_arrays([pa.array([result], pa.string())], names=["result"])
        elif not isinstance(output, pa.RecordBatch):
            partitions[topic_partition].take(output)


class _FinalizedPartition:
    """The files and messages of one topic partition in a task of the last stage."""

    def __init__(self, topic_partition: TopicPartition, settings: TaskSettings, batch: BatchSettings) -> None:
        self._writer = PartitionWriter(topic_partition, settings, batch)
        self._outbox: BufferedWriter | None = None
        if settings.outbox is not None:
            folder = data_folder(settings.outbox, schema.MESSAGES, file_prefix(topic_partition.partition, batch))
            self._outbox = BufferedWriter(folder)

    def take(self, output: Outcome | Cancels) -> None:
        if isinstance(output, Cancels):
            self._writer.decoder.cancels = output
            return
        mark_delete = None if isinstance(output, Rejected | RejectedPositions) else output.outputs.get(TOPIC)
        for messages in self._writer.write_outcome(output):
            if self._outbox is not None and mark_delete is not None:
                self._outbox.write(pa.Table.from_batches([_after(messages, mark_delete)]))

    def finish(self, summary: StateSummary) -> PartitionResult:
        ingested = [task_result_from_dict(fields) for fields in summary.results]
        finalized = self._writer.finish(max(result.end for result in ingested))
        results = [*ingested, finalized]
        tables, replaced = self._writer.merged(results)
        written = replace(
            finalized,
            tables=tables,
            rejects=[file for result in results for file in result.rejects],
            reasons=dict(sum((Counter(result.reasons) for result in results), Counter())),
            stored_bytes=sum(result.stored_bytes for result in ingested),
        )
        outbox = self._outbox.finish() if self._outbox is not None else []
        return PartitionResult(written, replace(summary, results=[]), replaced, outbox)


def _after(messages: pa.RecordBatch, mark_delete: Position) -> pa.RecordBatch:
    """Return the messages after an output's mark-delete position."""
    ledger, entry = messages["ledger_id"], messages["entry_id"]
    in_same_ledger = pc.and_(pc.equal(ledger, mark_delete.ledger_id), pc.greater(entry, mark_delete.entry_id))
    return messages.filter(pc.or_(pc.greater(ledger, mark_delete.ledger_id), in_same_ledger))
