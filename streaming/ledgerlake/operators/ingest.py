"""The first stage of a micro-batch: a task decodes its range of entries straight into files.

Large messages that begin and end within the range are assembled here. Chunks of other messages go
on to the stateful stage. The task closes its file at the last chunk of such a message, so that the
message's own file, which the last stage writes, fits between. It does so whether or not the message
is delayed, but only a few times in a range: beyond, the last stage merges the files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from ledgerlake.assembly.assembler import Assembled, Entry
from ledgerlake.assembly.rules import Chunk
from ledgerlake.client.topics import split_partition
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.decode.split import PieceKind
from ledgerlake.operators.effects import EffectsInTask
from ledgerlake.operators.local_assembly import LocalAssembly
from ledgerlake.operators.outcome_types import Outcome
from ledgerlake.operators.outcomes import rejected_large
from ledgerlake.operators.partition_writer import PartitionWriter, SharedFiles
from ledgerlake.operators.results import PartitionResult, results_to_json
from ledgerlake.operators.schedule_events import ScheduleEvents
from ledgerlake.operators.scheduled import REFUSED_DETAIL, find_in_frames, schedule_at_once
from ledgerlake.operators.stage_rows import (
    KEY_OF_RESULTS,
    RowKind,
    StateSummary,
    TaskReport,
    delayed_rows,
    latest,
    report_to_json,
    stage_row,
)
from ledgerlake.reasons import CHUNK_EVICTED, SCHEDULE_REFUSED
from ledgerlake.runtime.memory import give_back, keep_freed_blocks
from ledgerlake.source.pieces import read_single
from ledgerlake.source.range_reader import BUNDLE_BYTES
from ledgerlake.stored.fields import fields_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.operators.results import BatchSettings, TaskResult, TaskSettings
    from ledgerlake.source.pieces import Piece
    from ledgerlake.source.planning import EntryRange


def ingest_ranges(
    ranges: Iterable[tuple[EntryRange, Iterable[Piece]]],
    settings: TaskSettings,
    batch: BatchSettings,
    *,
    are_whole: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Write ranges of entries to files; yield rows of ``STAGE_ROWS`` for the stateful stage.

    Args:
        are_whole: no other task of the micro-batch has a range of these topic partitions. So those
            with few messages can share a file, and the stateful stage need not see those without
            state.
    """
    shared = SharedFiles(settings, batch) if are_whole else None
    complete: list[TaskResult] = []
    for span, pieces in ranges:
        ingested = _IngestedRange(span, settings, batch)
        for piece in pieces:
            yield from ingested.take(piece)
        yield from ingested.drain()
        if shared is not None and ingested.is_complete:
            complete.append(ingested.finish(shared))
        else:
            yield ingested.report(ingested.finish())
    if shared is not None and complete:
        shared.finish(complete)
        results = [PartitionResult(result, StateSummary([])) for result in complete]
        yield stage_row(KEY_OF_RESULTS, RowKind.RESULTS, header=results_to_json(results))


class _IngestedRange:
    """The range of one topic partition in a task of the first stage."""

    def __init__(self, span: EntryRange, settings: TaskSettings, batch: BatchSettings) -> None:
        self.topic_partition = TopicPartition(*split_partition(span.topic_partition))
        self._writer = PartitionWriter(self.topic_partition, settings, batch)
        self._may_have_state = batch.may_have_state(self.topic_partition)
        self._delays_messages = settings.delay.enabled
        self._local = LocalAssembly(settings.limits, delays_messages=settings.delay.enabled)
        self._schedules, self._delayed_schedules = ScheduleEvents(), ScheduleEvents()
        self._effects = EffectsInTask(self._schedules, delays_messages=self._delays_messages)
        self._after, self._end = span.after, span.through
        self._now_ms = latest((span.clock_ms, span.end_ms))
        self._stored_bytes = 0
        self._saw_chunks = self._saw_delayed = False

    def take(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        self._stored_bytes += len(piece.frames)
        self._now_ms = latest((self._now_ms, piece.broker_ms))
        if piece.kind == PieceKind.DELAYED and self._delays_messages:
            self._saw_delayed = True
            delayed = find_in_frames(piece.frames, piece.first_entry, self._delayed_schedules)
            self._writer.write_rejects(delayed.rejects)
            if len(delayed.frames):
                yield from delayed_rows(self.topic_partition, delayed.frames, delayed.first_entry)
            yield from self._schedule_rows()
            return
        if piece.kind in (PieceKind.ENTRIES, PieceKind.DELAYED):
            self._local.events += self._writer.write_entries(
                piece.frames, piece.first_entry, self._effects
            )
            yield from self._schedule_rows()
            return
        single = read_single(piece)
        if isinstance(single, RejectedEntry):
            effects = self._effects.take_rejected(single)
            self._local.events += effects.cancels
            self._writer.write_rejects([single, *effects.rejects])
            yield from self._schedule_rows()
            return
        if isinstance(single.content, Chunk):
            # A small chunk must not keep the whole bundle in memory that it came with.
            entry = bytes(single.entry) if len(single.entry) < BUNDLE_BYTES else single.entry
            yield from self._take_chunk(single.content, entry)
        else:
            yield from self._settle(self._local.apply_marker(single.content))

    def _schedule_rows(self, *, all_events: bool = False) -> Iterator[pa.RecordBatch]:
        for events in (self._schedules, self._delayed_schedules):
            yield from events.rows(self.topic_partition, all_events=all_events)

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Yield the chunks of incomplete messages, and the last schedules, at the end of
        the range.
        """
        yield from self._schedule_rows(all_events=True)
        yield from self._settle(self._local.evict())
        for position, entry in self._local.drain_pending():
            yield stage_row(self.topic_partition, RowKind.CHUNK, position, entry=entry)

    @property
    def is_complete(self) -> bool:
        """Return whether the last stage writes nothing that must fit between the rows of this
        task.
        """
        return not (
            self._may_have_state
            or self._saw_delayed
            or self._local.events
            or self._schedules.is_any
            or self._delayed_schedules.is_any
        )

    def finish(self, shared: SharedFiles | None = None) -> TaskResult:
        result = self._writer.finish(self._end, shared)
        if self._saw_chunks:
            give_back()
        return replace(result, stored_bytes=self._stored_bytes)

    def report(self, result: TaskResult) -> pa.RecordBatch:
        report = TaskReport(
            self._end, self._now_ms, fields_of(result), self._local.events, self._after
        )
        return stage_row(self.topic_partition, RowKind.REPORT, header=report_to_json(report))

    def _take_chunk(self, chunk: Chunk, entry: Entry) -> Iterator[pa.RecordBatch]:
        keep_freed_blocks()
        self._saw_chunks = True
        outcomes = self._local.arrive(chunk, entry)
        if outcomes is not None:
            yield from self._settle(outcomes)
            return
        yield stage_row(self.topic_partition, RowKind.CHUNK, chunk.position, entry=entry)
        if chunk.chunk_id == chunk.chunk_count - 1:
            self._writer.roll_files()

    def _settle(self, outcomes: Iterable[Outcome]) -> Iterator[pa.RecordBatch]:
        """Write the outcomes; pass messages that are to be delivered later on to the stateful
        stage.
        """
        for outcome in outcomes:
            scheduled = schedule_at_once(outcome)
            if (
                isinstance(outcome, Assembled)
                and scheduled is not None
                and not self._schedules.add(scheduled)
            ):
                self._writer.write_rejects(
                    rejected_large(outcome, SCHEDULE_REFUSED, REFUSED_DETAIL)
                )
                continue
            if not isinstance(outcome, Assembled) or outcome.deliver_ms is None:
                _use_up(self._writer.write_outcome(outcome))
                continue
            delayed = self._local.delayed_event(outcome)
            if delayed is None:
                self._writer.write_rejects(rejected_large(outcome, CHUNK_EVICTED))
                continue
            self._local.events.append(delayed)
            for position, entry in zip(outcome.positions, outcome.entries or (), strict=False):
                yield stage_row(self.topic_partition, RowKind.CHUNK, position, entry=entry)


def _use_up(messages: Iterator[pa.RecordBatch]) -> None:
    for _ in messages:
        pass
