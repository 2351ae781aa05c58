"""What the two writing stages of a micro-batch do in their tasks; both tables' files come from here.

    write_range    decodes the task's range of entries straight into files; large messages that begin and end within it too
    write_rest     writes what the stateful stage brought to an end, merges files that overlap, and sums up

Rows that only state can settle pass from the first to the stateful stage, and from there to the second. Where the last
chunk of such a message stands, the first stage ends its file, so that the message's own file fits between and nothing is
written twice.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.assembly.assembler import Assembled, Entry, Outcome, Rejected
from ledgerlake.assembly.chunk_entries import read_alone
from ledgerlake.assembly.rules import Chunk, Limits
from ledgerlake.client.topics import join_partition, split_partition
from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.decode.rejects import RejectedEntry, read_reject
from ledgerlake.decode.split import DELAYED, ENTRIES, REJECT, only_entry
from ledgerlake.delay.cancel_messages import CANCEL_REFUSED, TaskCancels
from ledgerlake.delay.cancels import Cancels
from ledgerlake.errors import CorruptEntryError
from ledgerlake.operators.delayed import TOPIC
from ledgerlake.operators.in_task import LocalAssembly
from ledgerlake.operators.outcomes import OutcomeDecoder, read_flow
from ledgerlake.operators.rows import (
    Report,
    Standing,
    Waits,
    delayed_rows,
    flow_row,
    latest,
    report_to_json,
    standing_from_dict,
)
from ledgerlake.runtime.memory import give_back, keep_freed_blocks
from ledgerlake.source.range_reader import BUNDLE_BYTES
from ledgerlake.source.task_reader import Piece, check_broker_metadata
from ledgerlake.table.delta_table import data_folder
from ledgerlake.table.ordered_files import DataFile, GatheringWriter, OrderedWriter, merge_overlapping
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.decode.messages import BatchPart
    from ledgerlake.delay.cancels import Cancel
    from ledgerlake.options.delay_options import DelayOptions
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange

_UNREAD_MOST = 10_000

FACT_SCHEMA = "fact string"

# The driver's word for the tasks of a batch, as a local property of the job.
BATCH_PROPERTY = "ledgerlake.batch"


@dataclass(frozen=True)
class TaskSettings:
    """What a writing task needs to know; the same for all batches. The folders are where files go; ``outbox_path``: see ``publish.outbox``."""

    messages_folder: str
    rejects_folder: str
    limits: Limits
    delay: DelayOptions
    options: SourceOptions
    outbox_path: str | None = None


@dataclass(frozen=True)
class BatchNote:
    """What differs from batch to batch: its number, and how far each topic partition's time has come in the table."""

    batch_id: int
    floors_us: dict[str, int]

    @classmethod
    def of_this_task(cls) -> BatchNote:
        from pyspark import TaskContext

        return cls(**json.loads(TaskContext.get().getLocalProperty(BATCH_PROPERTY)))


@dataclass(frozen=True)
class TaskFact:
    """What a task, or several together, did for one topic partition: files, how far was read, and how many stored bytes."""

    topic: str
    partition: int
    end: Position
    max_effective_us: int | None
    messages: list[DataFile]
    rejects: list[DataFile]
    stored_bytes: int = 0


@dataclass(frozen=True)
class PartitionFact:
    """A topic partition's share of a batch, all tasks together.

    ``replaced`` are files that were merged into others; ``outbox`` holds what is for the topic of due messages.
    """

    written: TaskFact
    standing: Standing
    replaced: list[str] = field(default_factory=list)
    outbox: list[DataFile] = field(default_factory=list)

    @property
    def topic_partition(self) -> str:
        return join_partition(self.written.topic, self.written.partition)

    @property
    def done(self) -> Position:
        """Where a durable cursor may stand: read up to here, and nothing before it that only the topic holds."""
        oldest = [one for one in (self.standing.oldest_open, self.standing.oldest_waiting) if one is not None]
        return min([self.written.end, *(one.before for one in oldest)])

    @property
    def wakes_ms(self) -> int | None:
        """When there is something to do although nothing new has come."""
        times_ms = (self.standing.expires_ms, self.standing.next_due_ms)
        return min((one for one in times_ms if one is not None), default=None)


def write_range(
    pieces: Iterable[Piece], span: EntryRange, settings: TaskSettings, note: BatchNote
) -> Iterator[pa.RecordBatch]:
    """First stage: a range of entries in, files out, rows of ``FLOW`` on to the stateful stage."""
    one = _Range(span, settings, note)
    for piece in pieces:
        yield from one.take(piece)
    yield from one.finish()


def write_rest(rows: Iterable[pa.RecordBatch], settings: TaskSettings, note: BatchNote) -> Iterator[pa.RecordBatch]:
    """Second stage: rows of ``FLOW`` in, files out, one fact for each topic partition."""
    open_rests: dict[TopicPartition, _Rest] = {}
    for source, found in read_flow(rows):
        if source not in open_rests:
            open_rests[source] = _Rest(source, settings, note)
        if isinstance(found, Standing):
            fact = open_rests.pop(source).finish(found)
            yield pa.RecordBatch.from_arrays([pa.array([json.dumps(asdict(fact))], pa.string())], names=["fact"])
        elif not isinstance(found, pa.RecordBatch):
            open_rests[source].take(found)


def fact_from_json(text: str) -> PartitionFact:
    data = json.loads(text)
    outbox = [_data_file(one) for one in data["outbox"]]
    return PartitionFact(_task_fact(data["written"]), standing_from_dict(data["standing"]), data["replaced"], outbox)


def _task_fact(data: dict[str, Any]) -> TaskFact:
    files = {name: [_data_file(one) for one in data[name]] for name in ("messages", "rejects")}
    return TaskFact(**{**data, **files, "end": Position(**data["end"])})


def _data_file(data: dict[str, Any]) -> DataFile:
    first, last = (tuple(data[name]) if data[name] else None for name in ("first", "last"))
    return DataFile(**{**data, "first": first, "last": last})


class _PartitionWriter:
    """Both tables' files for one topic partition in one task."""

    def __init__(self, source: TopicPartition, settings: TaskSettings, note: BatchNote) -> None:
        self.source = source
        self._options = settings.options
        prefix = file_prefix(source, note)
        self.messages_folder = data_folder(settings.messages_folder, schema.MESSAGES, prefix)
        self.messages = OrderedWriter(
            self.messages_folder, note.floors_us.get(join_partition(source.topic, source.partition))
        )
        self.decoder = OutcomeDecoder(source, settings.options, settings.limits.max_message_bytes)
        self._cancels = TaskCancels()
        self._unread: list[RejectedEntry] = []
        self._rejects = GatheringWriter(data_folder(settings.rejects_folder, schema.REJECTS, prefix))

    def write_entries(self, frames: memoryview, first_entry: BatchPart) -> list[Cancel]:
        """Write plain entries; the cancels among them, as far as a task takes any."""
        cancels: list[Cancel] = []
        decoded_parts = decode_bundle(
            frames,
            self.source,
            first_entry=first_entry,
            **self._options.decoding,
        )
        for decoded in decoded_parts:
            self._write_messages(decoded.messages.select(schema.MESSAGES.names))
            accepted, refused = self._cancels.take(decoded.messages)
            cancels += accepted
            self.write_rejects([RejectedEntry(position, None, CANCEL_REFUSED) for position in refused])
            if decoded.rejects.num_rows:
                self._rejects.write(pa.Table.from_batches([decoded.rejects]))
        return cancels

    def write_outcome(self, outcome: Outcome) -> Iterator[pa.RecordBatch]:
        """Write what became of entries; the messages among it come out again."""
        for decoded in self.decoder.decode(outcome):
            if isinstance(decoded, list):
                self.write_rejects(decoded)
            else:
                self._write_messages(decoded)
                yield decoded

    def write_rejects(self, rejected: list[RejectedEntry]) -> None:
        """Write entries into ``rejects``; those that must be read again wait, so that neighbours are read together."""
        self._unread += [one for one in rejected if one.entry is None]
        self._gather([one for one in rejected if one.entry is not None])
        if len(self._unread) >= _UNREAD_MOST:
            self._read_unread()

    def finish(self, end: Position) -> TaskFact:
        self._read_unread()
        messages = self.messages.finish()
        return TaskFact(
            self.source.topic,
            self.source.partition,
            end,
            self.messages.max_effective_us,
            messages,
            self._rejects.finish(),
        )

    def _read_unread(self) -> None:
        unread, self._unread = self._unread, []
        self._gather(unread)

    def _gather(self, rejected: list[RejectedEntry]) -> None:
        for table in self.decoder.whole(rejected):
            self._rejects.write(table)

    def _write_messages(self, messages: pa.RecordBatch) -> None:
        check_broker_metadata(self._options.require_broker_metadata, messages, self.source)
        self.messages.write(messages)


class _Range:
    """One topic partition's range in a task of the first stage."""

    def __init__(self, span: EntryRange, settings: TaskSettings, note: BatchNote) -> None:
        self._writer = _PartitionWriter(TopicPartition(*split_partition(span.topic_partition)), settings, note)
        self._holds_delayed = settings.delay.enabled
        self._local = LocalAssembly(settings.limits, hold_delayed=settings.delay.enabled)
        self._end = span.through
        self._now_ms = span.clock_ms
        self._stored_bytes = 0
        self._saw_chunks = False

    def take(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        self._stored_bytes += len(piece.frames)
        self._now_ms = latest((self._now_ms, piece.broker_ms))
        if piece.kind == DELAYED and self._holds_delayed:
            yield from delayed_rows(self._writer.source, piece.frames, piece.first_entry)
            return
        if piece.kind in (ENTRIES, DELAYED):
            self._local.events += self._writer.write_entries(piece.frames, piece.first_entry)
            return
        if piece.kind == REJECT:
            self._writer.write_rejects([read_reject(piece.frames)])
            return
        position, entry = only_entry(piece.frames)
        try:
            event = read_alone(piece.kind, entry, position)
        except CorruptEntryError as error:
            self._writer.write_rejects([RejectedEntry(position, entry, error.reason, error.message)])
            return
        if isinstance(event, Chunk):
            # A small chunk must not keep the whole bundle in memory that it came with.
            yield from self._take_chunk(event, bytes(entry) if len(entry) < BUNDLE_BYTES else entry)
        else:
            yield from self._settle(self._local.mark(event))

    def finish(self) -> Iterator[pa.RecordBatch]:
        for position, entry in self._local.hand_over():
            yield flow_row(self._writer.source, "chunk", position, entry=entry)
        fact = replace(self._writer.finish(self._end), stored_bytes=self._stored_bytes)
        report = Report(self._end, self._now_ms, asdict(fact), self._local.events)
        yield flow_row(self._writer.source, "report", note=report_to_json(report))
        if self._saw_chunks:
            give_back()

    def _take_chunk(self, chunk: Chunk, entry: Entry) -> Iterator[pa.RecordBatch]:
        keep_freed_blocks()
        self._saw_chunks = True
        outcomes = self._local.arrive(chunk, entry)
        if outcomes is not None:
            yield from self._settle(outcomes)
            return
        yield flow_row(self._writer.source, "chunk", chunk.position, entry=entry)
        if chunk.chunk_id == chunk.chunk_count - 1:
            self._writer.messages.cut()

    def _settle(self, outcomes: Iterable[Outcome]) -> Iterator[pa.RecordBatch]:
        """Write what can be written now; a message that is to be delivered later goes on to the stateful stage."""
        for outcome in outcomes:
            if not isinstance(outcome, Assembled) or outcome.deliver_ms is None:
                _use_up(self._writer.write_outcome(outcome))
                continue
            self._local.events.append(Waits(outcome.positions, outcome.deliver_ms, outcome.entries is not None))
            for position, entry in zip(outcome.positions, outcome.entries or (), strict=False):
                yield flow_row(self._writer.source, "chunk", position, entry=entry)


class _Rest:
    """One topic partition in a task of the second stage."""

    def __init__(self, source: TopicPartition, settings: TaskSettings, note: BatchNote) -> None:
        self._writer = _PartitionWriter(source, settings, note)
        self._outbox: GatheringWriter | None = None
        if settings.outbox_path is not None:
            folder = data_folder(settings.outbox_path, schema.MESSAGES, file_prefix(source, note))
            self._outbox = GatheringWriter(folder)

    def take(self, found: Outcome | Cancels) -> None:
        if isinstance(found, Cancels):
            self._writer.decoder.cancels = found
            return
        mark = None if isinstance(found, Rejected) else found.outputs.get(TOPIC)
        for messages in self._writer.write_outcome(found):
            if self._outbox is not None and mark is not None:
                self._outbox.write(pa.Table.from_batches([_behind(messages, mark)]))

    def finish(self, standing: Standing) -> PartitionFact:
        tasks = [_task_fact(one) for one in standing.facts]
        own = self._writer.finish(max(one.end for one in tasks))
        everything = [*tasks, own]
        files = [file for one in everything for file in one.messages]
        messages, replaced = merge_overlapping(self._writer.messages_folder, files)
        times_us = [one.max_effective_us for one in everything if one.max_effective_us is not None]
        rejects = [file for one in everything for file in one.rejects]
        stored_bytes = sum(one.stored_bytes for one in tasks)
        written = TaskFact(
            own.topic, own.partition, own.end, max(times_us, default=None), messages, rejects, stored_bytes
        )
        outbox = self._outbox.finish() if self._outbox is not None else []
        return PartitionFact(written, replace(standing, facts=[]), replaced, outbox)


def file_prefix(source: TopicPartition, note: BatchNote) -> str:
    return f"part-{note.batch_id:08d}-{max(source.partition, 0):05d}"


def _behind(messages: pa.RecordBatch, mark: Position) -> pa.RecordBatch:
    ledger, entry = messages["ledger_id"], messages["entry_id"]
    same = pc.and_(pc.equal(ledger, mark.ledger_id), pc.greater(entry, mark.entry_id))
    return messages.filter(pc.or_(pc.greater(ledger, mark.ledger_id), same))


def _use_up(messages: Iterator[pa.RecordBatch]) -> None:
    for _ in messages:
        pass
