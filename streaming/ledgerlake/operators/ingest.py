"""The first stage of a micro-batch: a task decodes its range of entries.

What it decodes goes into files (``write_ranges``, in a pipeline) or on as rows (``decode_ranges``,
for other sinks). Large messages that begin and end within the range are assembled here. Chunks of
other messages, delayed entries and events go on to the stateful stage.

The task closes its file at the last chunk of a message that the stateful stage completes, so that
the message's own file, which that stage writes, fits between. It does so whether or not the message
is delayed, but only a few times in a range: beyond, the last stage merges the files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledgerlake.assembly.assembler import Assembled, Entry
from ledgerlake.assembly.rules import Chunk
from ledgerlake.client.topics import split_partition
from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.decode.split import PieceKind
from ledgerlake.operators.decoded_rows import DecodedRows
from ledgerlake.operators.local_assembly import LocalAssembly
from ledgerlake.operators.outcome_types import Outcome
from ledgerlake.operators.outcomes import decode_into, rejected_large
from ledgerlake.operators.partition_writer import PartitionWriter, SharedFiles
from ledgerlake.operators.results import PartitionResult, results_to_json
from ledgerlake.operators.scheduled import REFUSED_DETAIL
from ledgerlake.operators.stage_rows import (
    KEY_OF_RESULTS,
    RowKind,
    StateSummary,
    TaskReport,
    delayed_rows,
    max_time_ms,
    report_to_json,
    stage_row,
)
from ledgerlake.operators.task_controls import Effects, TaskControls
from ledgerlake.reasons import CHUNK_EVICTED, SCHEDULE_REFUSED
from ledgerlake.runtime.memory import keep_freed_blocks, trim_heap
from ledgerlake.source.pieces import read_single
from ledgerlake.source.range_reader import BUNDLE_BYTES
from ledgerlake.stored.fields import fields_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.operators.outcomes import DecodedSink
    from ledgerlake.operators.results import (
        BatchSettings,
        StageSettings,
        TaskResult,
        TaskSettings,
    )
    from ledgerlake.source.pieces import Piece
    from ledgerlake.source.planning import EntryRange

    RangesOfTask = Iterable[tuple[EntryRange, Iterable[Piece]]]


def write_ranges(
    ranges: RangesOfTask,
    settings: TaskSettings,
    batch: BatchSettings,
    *,
    is_sole_reader: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Write ranges of entries to files; yield rows of ``STAGE_ROWS`` for the stateful stage.

    Args:
        is_sole_reader: no other task of the micro-batch has a range of these topic partitions. So
            topic partitions with few messages can share a file, and the stateful stage need not
            see the ones without state.
    """
    shared = SharedFiles(settings, batch) if is_sole_reader else None
    complete: list[TaskResult] = []
    for span, pieces in ranges:
        topic_partition = TopicPartition(*split_partition(span.topic_partition))
        writer = PartitionWriter(topic_partition, settings, batch)
        ingested = _IngestedRange(span, topic_partition, writer, settings)
        yield from ingested.take_all(pieces)
        is_complete = not (ingested.needs_stage or batch.may_have_state(topic_partition))
        result = replace(
            writer.finish(ingested.end, shared if is_complete else None),
            stored_bytes=ingested.stored_bytes,
        )
        if shared is not None and is_complete:
            complete.append(result)
        else:
            yield ingested.report(fields_of(result))
    if shared is not None and complete:
        shared.finish(complete)
        results = [PartitionResult(result, StateSummary([])) for result in complete]
        yield stage_row(KEY_OF_RESULTS, RowKind.RESULTS, header=results_to_json(results))


def decode_ranges(ranges: RangesOfTask, settings: StageSettings) -> Iterator[pa.RecordBatch]:
    """Decode ranges of entries; yield rows of ``STAGE_ROWS``, with the messages and rejects among
    them.
    """
    for span, pieces in ranges:
        topic_partition = TopicPartition(*split_partition(span.topic_partition))
        rows = DecodedRows(topic_partition, settings)
        ingested = _IngestedRange(span, topic_partition, rows, settings)
        yield from ingested.take_all(pieces)
        yield from rows.finish()
        yield ingested.report({})


class _IngestedRange:
    """The range of one topic partition in a task of the first stage."""

    def __init__(
        self,
        span: EntryRange,
        topic_partition: TopicPartition,
        sink: DecodedSink,
        settings: StageSettings,
    ) -> None:
        self._topic_partition = topic_partition
        self._sink = sink
        self._decoding = settings.options.decoding
        self._delays_messages = settings.delay.enabled
        self._local = LocalAssembly(settings.limits, delays_messages=settings.delay.enabled)
        self._controls = TaskControls(delays_messages=settings.delay.enabled)
        self._after, self.end = span.after, span.through
        self._now_ms = max_time_ms((span.clock_ms, span.end_ms))
        self.stored_bytes = 0
        self._saw_chunks = self._saw_delayed = False

    def take_all(self, pieces: Iterable[Piece]) -> Iterator[pa.RecordBatch]:
        """Take the range; yield rows for the stateful stage."""
        for piece in pieces:
            self.stored_bytes += len(piece.frames)
            self._now_ms = max_time_ms((self._now_ms, piece.broker_ms))
            yield from self._take(piece)
            yield from self._controls.rows(self._topic_partition)
        yield from self._controls.rows(self._topic_partition, all_events=True)
        yield from self._settle(self._local.evict())
        for position, entry in self._local.drain_pending():
            yield stage_row(self._topic_partition, RowKind.CHUNK, position, entry=entry)
        if self._saw_chunks:
            trim_heap()

    @property
    def needs_stage(self) -> bool:
        """Return whether the stateful stage may write something that must fit between the rows of
        this task.
        """
        return bool(self._saw_delayed or self._local.events or self._controls.has_events)

    def report(self, result: dict[str, Any]) -> pa.RecordBatch:
        """Return the row of the report, which comes last."""
        report = TaskReport(self.end, self._now_ms, result, self._local.events, self._after)
        return stage_row(self._topic_partition, RowKind.REPORT, header=report_to_json(report))

    def _take(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        if piece.kind == PieceKind.DELAYED and self._delays_messages:
            yield from self._take_delayed(piece)
        elif piece.kind in (PieceKind.ENTRIES, PieceKind.DELAYED):
            yield from self._take_entries(piece)
        else:
            yield from self._take_single(piece)

    def _take_delayed(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        self._saw_delayed = True
        delayed = self._controls.arriving(piece.frames, piece.first_entry)
        yield from self._sink.take_rejects(delayed.rejects)
        if len(delayed.frames):
            yield from delayed_rows(self._topic_partition, delayed.frames, delayed.first_entry)

    def _take_entries(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        for decoded in decode_bundle(
            piece.frames, self._topic_partition, first_entry=piece.first_entry, **self._decoding
        ):
            effects, rejects = self._controls.at_once(decoded, piece.frames)
            yield from self._sink.take_messages(effects.messages.select(schema.MESSAGES.names))
            yield from self._take_effects(effects)
            if rejects.num_rows:
                yield from self._sink.take_reject_rows(pa.Table.from_batches([rejects]))

    def _take_effects(self, effects: Effects) -> Iterator[pa.RecordBatch]:
        self._local.events += effects.cancels
        yield from self._sink.take_rejects(effects.rejects)

    def _take_single(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        single = read_single(piece)
        if isinstance(single, RejectedEntry):
            yield from self._take_effects(self._controls.rejected(single))
        elif (refused := self._controls.refused(single)) is not None:
            yield from self._sink.take_rejects([refused])
        elif isinstance(single.content, Chunk):
            # A small chunk must not keep the whole bundle in memory that it came with.
            entry = bytes(single.entry) if len(single.entry) < BUNDLE_BYTES else single.entry
            yield from self._take_chunk(single.content, entry)
        else:
            yield from self._settle(self._local.apply_marker(single.content))

    def _take_chunk(self, chunk: Chunk, entry: Entry) -> Iterator[pa.RecordBatch]:
        keep_freed_blocks()
        self._saw_chunks = True
        outcomes = self._local.arrive(chunk, entry)
        if outcomes is not None:
            yield from self._settle(outcomes)
            return
        yield stage_row(self._topic_partition, RowKind.CHUNK, chunk.position, entry=entry)
        if chunk.chunk_id == chunk.chunk_count - 1:
            self._sink.make_place()

    def _settle(self, outcomes: Iterable[Outcome]) -> Iterator[pa.RecordBatch]:
        """Hand the outcomes to the sink; pass messages that are to be delivered later on to the
        stateful stage.
        """
        for outcome in outcomes:
            if isinstance(outcome, Assembled) and not self._controls.accepts(outcome):
                rejected = rejected_large(outcome, SCHEDULE_REFUSED, REFUSED_DETAIL)
                yield from self._sink.take_rejects(rejected)
                continue
            if not isinstance(outcome, Assembled) or outcome.deliver_ms is None:
                yield from decode_into(self._sink, outcome)
                continue
            delayed = self._local.delayed_event(outcome)
            if delayed is None:
                yield from self._sink.take_rejects(rejected_large(outcome, CHUNK_EVICTED))
                continue
            self._local.events.append(delayed)
            for position, entry in zip(outcome.positions, outcome.entries or (), strict=False):
                yield stage_row(self._topic_partition, RowKind.CHUNK, position, entry=entry)
