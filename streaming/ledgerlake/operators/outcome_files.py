"""The end of the stateful stage in a pipeline: it writes the stage's outcomes to files.

Files that overlap are merged, and each topic partition gets one result, which sums up what all
tasks of the micro-batch wrote of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.assembly.assembler import Rejected
from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.operators.delayed import TOPIC
from ledgerlake.operators.outcome_digest import OutcomeDigest, Tally, message_tally
from ledgerlake.operators.outcome_types import Outcome, RejectedPositions
from ledgerlake.operators.partition_writer import PartitionWriter, file_prefix
from ledgerlake.operators.results import (
    BatchSettings,
    PartitionResult,
    TaskSettings,
    results_to_json,
    task_result_from_dict,
)
from ledgerlake.operators.stage_output import data_frame
from ledgerlake.operators.stage_rows import Released, StateSummary
from ledgerlake.schedules.cancels import Cancels
from ledgerlake.table.ordered_files import BufferedWriter, data_folder
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from ledgerlake.operators.stage_rows import StageRow


class OutcomeFiles:
    """Writes outcomes to files, and returns a row of ``RESULT_SCHEMA`` at the end; see
    ``stage_output.StageOutput``.
    """

    def __init__(
        self, topic_partition: TopicPartition, settings: TaskSettings, batch: BatchSettings
    ) -> None:
        self._topic_partition, self._settings, self._batch = topic_partition, settings, batch
        self._outbox: BufferedWriter | None = None
        self._for_outbox = Tally()
        self._released = Released()
        if settings.outbox is not None:
            folder = data_folder(
                settings.outbox, schema.MESSAGES, file_prefix(topic_partition.partition, batch)
            )
            self._outbox = BufferedWriter(folder)

    @cached_property
    def _writer(self) -> PartitionWriter:
        return PartitionWriter(self._topic_partition, self._settings, self._batch)

    def take(self, outcome: Outcome | Cancels) -> Iterator[pd.DataFrame]:
        if isinstance(outcome, Cancels):
            self._writer.decoder.cancels = outcome
        else:
            self._write(outcome)
        return iter(())

    def finish(self, summary: StateSummary) -> Iterator[pd.DataFrame]:
        yield data_frame(["result"], [results_to_json([self._result(summary)])])

    def pass_on(self, rows: list[StageRow]) -> Iterator[pd.DataFrame]:
        yield data_frame(["result"], *([row.header] for row in rows))

    def _write(self, outcome: Outcome) -> None:
        if isinstance(outcome, Rejected | RejectedPositions):
            mark_delete, was_delayed = None, False
        else:
            mark_delete, was_delayed = outcome.outputs.get(TOPIC), outcome.delivered_ms is not None
        for messages in self._writer.decoder.decode(outcome):
            if isinstance(messages, list):
                self._writer.take_rejects(messages)
                continue
            self._writer.take_messages(messages)
            if was_delayed:
                self._released = self._released.and_more(_released(messages))
            if self._outbox is not None and mark_delete is not None:
                for_outbox = _after(messages, mark_delete)
                self._for_outbox += message_tally(for_outbox)
                self._outbox.write(pa.Table.from_batches([for_outbox]))

    def _result(self, summary: StateSummary) -> PartitionResult:
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
            digest=sum(
                (result.digest for result in results),
                summary.digest + OutcomeDigest(outbox=self._for_outbox),
            ),
        )
        outbox = self._outbox.finish() if self._outbox is not None else []
        return PartitionResult(
            written, replace(summary, results=[]), replaced, outbox, self._released
        )


def _released(messages: pa.RecordBatch) -> Released:
    """Return when messages were due. One that was stored later than its delivery time was
    due then.
    """
    times_us = (messages[name].cast(pa.int64()) for name in ("deliver_at", "broker_timestamp"))
    due_ms = pc.max_element_wise(*times_us).drop_null().to_numpy() // 1000
    if not len(due_ms):
        return Released()
    return Released(len(due_ms), int(due_ms.mean()), int(due_ms.min()))


def _after(messages: pa.RecordBatch, mark_delete: Position) -> pa.RecordBatch:
    """Return the messages after an output's mark-delete position."""
    ledger, entry = messages["ledger_id"], messages["entry_id"]
    in_same_ledger = pc.and_(
        pc.equal(ledger, mark_delete.ledger_id), pc.greater(entry, mark_delete.entry_id)
    )
    return messages.filter(pc.or_(pc.greater(ledger, mark_delete.ledger_id), in_same_ledger))


@dataclass(frozen=True)
class FileOutput:
    """Makes the output of a topic partition in a task, as Spark carries it there."""

    settings: TaskSettings

    def __call__(self, topic_partition: TopicPartition) -> OutcomeFiles:
        return OutcomeFiles(topic_partition, self.settings, BatchSettings.of_this_task())
