"""Decoded messages and rejects as rows of the stream, for sinks that are not Ledgerlake's.

A row is one of ``STAGE_ROWS`` with rows of ``schema.VIEW`` as an Arrow stream in it. The tasks make
such rows of what they decode, and the stateful stage of its outcomes; ``open_rows`` reads both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from ledgerlake.decode.messages import TopicPartition, as_view, rejects_as_view
from ledgerlake.operators.outcomes import OutcomeDecoder, decode_into
from ledgerlake.operators.stage_output import data_frame
from ledgerlake.operators.stage_rows import STAGE_ROWS, RowKind, StateSummary, stage_row
from ledgerlake.schedules.cancels import Cancels
from ledgerlake.source.views import check_broker_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pandas as pd

    from ledgerlake.decode.rejects import RejectedEntry
    from ledgerlake.operators.outcome_types import Outcome
    from ledgerlake.operators.results import StageSettings
    from ledgerlake.operators.stage_rows import StageRow


class DecodedRows:
    """Makes rows of the messages and rejects of one topic partition."""

    def __init__(self, topic_partition: TopicPartition, settings: StageSettings) -> None:
        self.decoder = OutcomeDecoder(topic_partition, settings)
        self._topic_partition = topic_partition
        self._requires_metadata = settings.options.require_broker_metadata

    def take_messages(self, messages: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the row of some rows of ``schema.MESSAGES``.

        Raises:
            SetupError: as ``check_broker_metadata``.
        """
        check_broker_metadata(self._requires_metadata, messages, self._topic_partition)
        yield self._row(as_view(messages))

    def take_rejects(self, rejected: list[RejectedEntry]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of rejects; see ``OutcomeDecoder.reject_tables``."""
        for rejects in self.decoder.reject_tables(rejected):
            yield from self.take_reject_rows(rejects)

    def take_reject_rows(self, rejects: pa.Table) -> Iterator[pa.RecordBatch]:
        """Yield the rows of some rows of ``schema.REJECTS``."""
        for batch in rejects.to_batches():
            yield self._row(rejects_as_view(batch))

    def make_place(self) -> None:
        """Do nothing: these rows have no order."""

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Yield the last rows."""
        for rejects in self.decoder.last_rejects():
            yield from self.take_reject_rows(rejects)

    def _row(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        with pa.BufferOutputStream() as out, pa.ipc.new_stream(out, rows.schema) as writer:
            writer.write_batch(rows)
        return stage_row(self._topic_partition, RowKind.ROWS, entry=out.getvalue())


class OutcomeRows:
    """Makes rows of outcomes; see ``stage_output.StageOutput``."""

    def __init__(self, topic_partition: TopicPartition, settings: StageSettings) -> None:
        self._rows = DecodedRows(topic_partition, settings)

    def take(self, outcome: Outcome | Cancels) -> Iterator[pd.DataFrame]:
        if isinstance(outcome, Cancels):
            self._rows.decoder.cancels = outcome
            return
        for row in decode_into(self._rows, outcome):
            yield row.to_pandas()

    def finish(self, _summary: StateSummary) -> Iterator[pd.DataFrame]:
        return (row.to_pandas() for row in self._rows.finish())

    def pass_on(self, rows: list[StageRow]) -> Iterator[pd.DataFrame]:
        yield data_frame(STAGE_ROWS.names, *rows)


@dataclass(frozen=True)
class RowOutput:
    """Makes the output of a topic partition in a task, as Spark carries it there."""

    settings: StageSettings

    def __call__(self, topic_partition: TopicPartition) -> OutcomeRows:
        return OutcomeRows(topic_partition, self.settings)


def open_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ``schema.VIEW`` that rows of ``STAGE_ROWS`` have in them."""
    for batch in batches:
        for content in batch["entry"]:
            with pa.ipc.open_stream(content.as_buffer()) as reader:
                yield from reader
