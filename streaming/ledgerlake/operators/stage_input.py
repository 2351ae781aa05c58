"""Turns rows of ``schema.BUNDLES`` into rows for the stateful stage (see ``operators.stage_rows``),
for a stream to sinks that are not Ledgerlake's.

Messages are decoded before the stage and pass it unchanged; delayed entries and chunks go into it
as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledgerlake.assembly.rules import Chunk
from ledgerlake.decode.messages import BatchRange, TopicPartition, rejects_as_view
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.decode.split import PieceKind
from ledgerlake.operators.effects import Effects, EffectsInTask
from ledgerlake.operators.local_assembly import EventBudget
from ledgerlake.operators.schedule_events import ScheduleEvents
from ledgerlake.operators.scheduled import find_in_frames
from ledgerlake.operators.stage_rows import (
    RowKind,
    TaskEvent,
    TaskReport,
    delayed_rows,
    latest,
    report_to_json,
    stage_row,
)
from ledgerlake.reasons import CHUNK_EVICTED
from ledgerlake.source.pieces import Piece, read_single
from ledgerlake.source.views import decode_piece
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.options.source_options import SourceOptions


def forward_bundles(
    batches: Iterable[pa.RecordBatch], options: SourceOptions, delays_messages: bool
) -> Iterator[pa.RecordBatch]:
    """Yield rows of ``STAGE_ROWS`` for rows of ``schema.BUNDLES``; the report of each topic
    partition comes last.
    """
    ranges: dict[TopicPartition, _DecodedRange] = {}
    for batch in batches:
        for number in range(batch.num_rows):
            row = {
                name: batch[name][number].as_py() for name in batch.schema.names if name != "frames"
            }
            topic_partition = TopicPartition(row["topic"], row["partition"])
            if topic_partition not in ranges:
                ranges[topic_partition] = _DecodedRange(
                    topic_partition, row, options, delays_messages
                )
            frames = memoryview(batch["frames"][number].as_buffer())
            first_entry = BatchRange(row["after_batch_index"], row["until_batch_index"])
            piece = Piece(PieceKind(row["kind"]), frames, first_entry, row["broker_ms"])
            yield from ranges[topic_partition].take(piece)
    for decoded_range in ranges.values():
        yield from decoded_range.report()


class _DecodedRange:
    """The rows of one topic partition in a task before the stateful stage."""

    def __init__(
        self,
        topic_partition: TopicPartition,
        row: dict[str, Any],
        options: SourceOptions,
        delays_messages: bool,
    ) -> None:
        self._topic_partition = topic_partition
        self._end = Position(row["end_ledger_id"], row["end_entry_id"])
        self._now_ms = row["clock_ms"]
        self._options = options
        self._delays_messages = delays_messages
        self._events: list[TaskEvent] = []
        self._budget = EventBudget()
        self._schedules, self._delayed_schedules = ScheduleEvents(), ScheduleEvents()
        self._effects = EffectsInTask(self._schedules, delays_messages=delays_messages)

    def take(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        self._now_ms = latest((self._now_ms, piece.broker_ms))
        if piece.kind == PieceKind.DELAYED and self._delays_messages:
            delayed = find_in_frames(piece.frames, piece.first_entry, self._delayed_schedules)
            yield from map(self._reject, delayed.rejects)
            if len(delayed.frames):
                yield from delayed_rows(self._topic_partition, delayed.frames, delayed.first_entry)
        elif piece.kind in (PieceKind.ENTRIES, PieceKind.DELAYED):
            yield from self._decode(piece)
        else:
            yield from self._take_single(piece)
        yield from self._schedule_rows()

    def _schedule_rows(self, *, all_events: bool = False) -> Iterator[pa.RecordBatch]:
        for events in (self._schedules, self._delayed_schedules):
            yield from events.rows(self._topic_partition, all_events=all_events)

    def report(self) -> Iterator[pa.RecordBatch]:
        yield from self._schedule_rows(all_events=True)
        report = TaskReport(self._end, self._now_ms, {}, self._events)
        yield stage_row(self._topic_partition, RowKind.REPORT, header=report_to_json(report))

    def _decode(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        for decoded in decode_piece(piece, self._topic_partition, self._options):
            effects = self._effects.take(decoded, piece.frames)
            yield from self._take_effects(effects)
            yield self._rows(effects.messages)
            if decoded.rejects.num_rows:
                yield self._rows(rejects_as_view(decoded.rejects))

    def _take_effects(self, effects: Effects) -> Iterator[pa.RecordBatch]:
        self._events += effects.cancels
        yield from map(self._reject, effects.rejects)

    def _rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        with pa.BufferOutputStream() as out, pa.ipc.new_stream(out, rows.schema) as writer:
            writer.write_batch(rows)
        return stage_row(self._topic_partition, RowKind.ROWS, entry=out.getvalue())

    def _reject(self, rejected: RejectedEntry) -> pa.RecordBatch:
        shown = rejected.entry or rejected.detail.encode()
        return stage_row(
            self._topic_partition, RowKind.REJECT, rejected.position, rejected.reason, shown
        )

    def _take_single(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        single = read_single(piece)
        if isinstance(single, RejectedEntry):
            yield self._reject(single)
            yield from self._take_effects(self._effects.take_rejected(single))
            return
        if not self._budget.take(single.content):
            yield stage_row(
                self._topic_partition, RowKind.REJECT, single.position, CHUNK_EVICTED, single.entry
            )
            return
        self._events.append(single.content)
        if isinstance(single.content, Chunk):
            yield stage_row(
                self._topic_partition, RowKind.CHUNK, single.position, entry=single.entry
            )
