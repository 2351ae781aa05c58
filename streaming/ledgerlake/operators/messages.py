"""A stream of bundles as a stream of whole, decoded messages and of rejects, for sinks that are not
ours.

Everything passes the stateful stage here: plain messages as decoded rows, packed; delayed entries
and chunks as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from ledgerlake.assembly.chunk_entries import read_alone
from ledgerlake.assembly.rules import Chunk, Limits
from ledgerlake.decode import schema
from ledgerlake.decode.messages import BatchRange, TopicPartition, as_view, rejects_as_view
from ledgerlake.decode.rejects import read_reject
from ledgerlake.decode.split import PieceKind, only_entry
from ledgerlake.delay.cancel_messages import CANCEL_REFUSED, TaskCancels
from ledgerlake.delay.cancels import Cancels
from ledgerlake.errors import CorruptEntryError
from ledgerlake.operators.in_task import EventBudget
from ledgerlake.operators.outcomes import OutcomeDecoder, read_stage_rows
from ledgerlake.operators.rows import (
    STAGE_ROWS_DDL,
    Event,
    RowKind,
    StateSummary,
    TaskReport,
    delayed_rows,
    latest,
    report_to_json,
    stage_row,
)
from ledgerlake.operators.stateful import stateful
from ledgerlake.source.pieces import Piece
from ledgerlake.source.views import check_broker_metadata, piece_as_view
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import DataFrame

    from ledgerlake.assembly.assembler import Outcome
    from ledgerlake.options.delay_options import DelayOptions
    from ledgerlake.options.source_options import SourceOptions


def complete_messages(bundles: DataFrame, options: SourceOptions, limits: Limits, delay: DelayOptions) -> DataFrame:
    """Rows of ``schema.VIEW``: messages, and what is none with its ``reject_reason``."""
    forwarded = bundles.mapInArrow(lambda rows: _forward(rows, options, delay.enabled), STAGE_ROWS_DDL)
    assembled = stateful(forwarded, limits, delay)
    return assembled.mapInArrow(
        lambda rows: _decode(rows, options, limits, delay.enabled), from_arrow_schema(schema.VIEW)
    )


def _forward(
    batches: Iterable[pa.RecordBatch], options: SourceOptions, holds_delayed: bool
) -> Iterator[pa.RecordBatch]:
    """Rows of ``schema.BUNDLES`` as rows of ``STAGE_ROWS``."""
    ranges: dict[TopicPartition, _DecodedRange] = {}
    for batch in batches:
        for number in range(batch.num_rows):
            row = {name: batch[name][number].as_py() for name in batch.schema.names if name != "frames"}
            topic_partition = TopicPartition(row["topic"], row["partition"])
            if topic_partition not in ranges:
                ranges[topic_partition] = _DecodedRange(topic_partition, row, options, holds_delayed)
            frames = memoryview(batch["frames"][number].as_buffer())
            part = BatchRange(row["after_batch_index"], row["until_batch_index"])
            yield from ranges[topic_partition].take(Piece(PieceKind(row["kind"]), frames, part, row["broker_ms"]))
    for one in ranges.values():
        yield one.report()


class _DecodedRange:
    """The rows of one topic partition in a task before the stateful stage."""

    def __init__(
        self, topic_partition: TopicPartition, row: dict[str, Any], options: SourceOptions, holds_delayed: bool
    ) -> None:
        self._topic_partition = topic_partition
        self._end = Position(row["end_ledger_id"], row["end_entry_id"])
        self._now_ms = row["clock_ms"]
        self._options = options
        self._holds_delayed = holds_delayed
        self._events: list[Event] = []
        self._cancels = TaskCancels()
        self._budget = EventBudget()

    def take(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        self._now_ms = latest((self._now_ms, piece.broker_ms))
        if piece.kind == PieceKind.DELAYED and self._holds_delayed:
            yield from delayed_rows(self._topic_partition, piece.frames, piece.first_entry)
        elif piece.kind in (PieceKind.ENTRIES, PieceKind.DELAYED):
            yield from self._decode(piece)
        else:
            yield from self._take_alone(piece)

    def report(self) -> pa.RecordBatch:
        report = TaskReport(self._end, self._now_ms, {}, self._events)
        return stage_row(self._topic_partition, RowKind.REPORT, note=report_to_json(report))

    def _decode(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        for batch in piece_as_view(piece, self._topic_partition, self._options):
            accepted, refused = self._cancels.take(batch)
            self._events += accepted
            for position in refused:
                yield stage_row(self._topic_partition, RowKind.REJECT, position, CANCEL_REFUSED)
            with pa.BufferOutputStream() as out, pa.ipc.new_stream(out, batch.schema) as writer:
                writer.write_batch(batch)
            yield stage_row(self._topic_partition, RowKind.ROWS, entry=out.getvalue())

    def _take_alone(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        if piece.kind == PieceKind.REJECT:
            rejected = read_reject(piece.frames)
            shown = rejected.entry or rejected.detail.encode()
            yield stage_row(self._topic_partition, RowKind.REJECT, rejected.position, rejected.reason, shown)
            return
        position, entry = only_entry(piece.frames)
        try:
            event = read_alone(piece.kind, entry, position)
        except CorruptEntryError as error:
            yield stage_row(self._topic_partition, RowKind.REJECT, position, error.reason, entry)
            return
        if not self._budget.take_event(event):
            yield stage_row(self._topic_partition, RowKind.REJECT, position, "chunk_evicted", entry)
            return
        self._events.append(event)
        if isinstance(event, Chunk):
            yield stage_row(self._topic_partition, RowKind.CHUNK, position, entry=entry)


def _decode(
    rows: Iterable[pa.RecordBatch], options: SourceOptions, limits: Limits, holds_delayed: bool
) -> Iterator[pa.RecordBatch]:
    decoders: dict[TopicPartition, OutcomeDecoder] = {}
    for topic_partition, found in read_stage_rows(rows):
        if topic_partition not in decoders:
            decoders[topic_partition] = OutcomeDecoder(
                topic_partition, options, limits.max_message_bytes, holds_delayed=holds_delayed
            )
        if isinstance(found, pa.RecordBatch):
            yield found
        elif isinstance(found, Cancels):
            decoders[topic_partition].cancels = found
        elif isinstance(found, StateSummary):
            del decoders[topic_partition]
        else:
            yield from _as_view(found, decoders[topic_partition], topic_partition, options)


def _as_view(
    outcome: Outcome, decoder: OutcomeDecoder, topic_partition: TopicPartition, options: SourceOptions
) -> Iterator[pa.RecordBatch]:
    for decoded in decoder.decode(outcome):
        if isinstance(decoded, list):
            yield from (rejects_as_view(one) for table in decoder.reject_tables(decoded) for one in table.to_batches())
        else:
            check_broker_metadata(options.require_broker_metadata, decoded, topic_partition)
            yield as_view(decoded)
