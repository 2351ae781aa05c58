"""The delayed messages in a pipeline's state after its last committed batch, as rows.

They are read from the checkpoint, and the pipeline may run meanwhile. Tasks decode the blocks of
the buckets (see ``operators.bucket_storage``), so memory is bounded however many messages wait.
Messages that are known to be cancelled or replaced are left out.

Rows have the columns of messages, without those that are known only at delivery. A message that
repeats has the time of its next occurrence in ``deliver_at``. A message whose payload cannot be
read here, for example without the key that decrypts it, has no value; the rest is in its metadata.

If the bytes of a message are not in its bucket, because it is large, was cut in two by a range, or
stays in the topic (``payloads = "reread"``), only its position and its time are known, and
``is_known`` is false; of a large message it is the position of the last chunk. So it is for a batch
whose payload cannot be read. A cancel may hit it or not: its key is not known, nor the marker that
completed a large message behind the cancel. So it is listed, and ``may_be_cancelled`` says whether
there is such a cancel.

A message waits under an id only if its position is marked so (``schedules.schedules``): the copy of
a delivered message has the property too, and is no schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.decode.reference import unread_row
from ledgerlake.decode.split import entries_of
from ledgerlake.delay.segment import key_columns
from ledgerlake.delay.snapshot import segment_from_bytes
from ledgerlake.delay.storage import METADATA
from ledgerlake.errors import CorruptEntryError
from ledgerlake.inspect.delayed_counts import stored_cancels, stored_records
from ledgerlake.inspect.schedule_pauses import ended_repetitions
from ledgerlake.inspect.stored_state import last_batch, read_state
from ledgerlake.operators.bucket_folders import open_folder
from ledgerlake.operators.bucket_storage import segments_of_block
from ledgerlake.operators.cancelled import cancelled_rows, is_entry_cancelled
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.schedules.cancel_messages import key_texts
from ledgerlake.schedules.cancels import Cancels
from ledgerlake.schedules.schedules import REASONS, REPEATING, SCHEDULED, MarkedPositions, Pauses
from ledgerlake.wire.entry import peek_metadata
from ledgerlake.wire.message_id import Position
from ledgerlake.wire.schedules import SCHEDULE_PROPERTY, properties_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from ledgerlake.delay.bucket import Bucket, IndexRecord
    from ledgerlake.options.config import Config
    from ledgerlake.options.source_options import Decoding
    from ledgerlake.stored.places import Place

_UNKNOWN_YET = ("late", "delivered_at")
_COLUMNS = [field for field in schema.MESSAGES if field.name not in _UNKNOWN_YET]
WAITING = pa.schema([*_COLUMNS, ("is_known", pa.bool_()), ("may_be_cancelled", pa.bool_())])

_ENTRIES = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("due_ms", pa.int64()),
        ("entry", pa.binary()),
    ]
)

_LARGEST_MS = 2**62


class WaitingEntry(NamedTuple):
    """An entry that waits, as it was stored, and when it is due next."""

    source: TopicPartition
    due_ms: int
    entry: bytes


def waiting(
    spark: SparkSession,
    config: Config,
    due_before_ms: int | None = None,
    schedule_id: str | None = None,
    key: str | None = None,
) -> DataFrame:
    """Return the delayed messages that wait, in no order.

    Args:
        due_before_ms: only messages that are due before that time.
        schedule_id: only the message that waits under this id, and messages that are not known
            here and wait under some id.
        key: only messages with this key (``key_text``), and messages that are not known here.

    Raises:
        SetupError: there is no checkpoint of a pipeline that has run.
        OffsetError: a newer release wrote it.
    """
    until_ms = _LARGEST_MS if due_before_ms is None else due_before_ms

    def find(
        decoder: _Decoder, source: TopicPartition, segment: pa.RecordBatch
    ) -> Iterator[pa.RecordBatch]:
        return decoder.messages(source, segment, schedule_id, key)

    return _of_state(spark, config, last_batch(config), until_ms, find, WAITING)


def scheduled_entries(spark: SparkSession, config: Config, schedule_id: str) -> list[WaitingEntry]:
    """Return the entries that wait under an id. An entry is left out if its bytes are not in a
    bucket, or if it repeats and was ended: only occurrences that were due before are delivered.

    Raises:
        As ``waiting``.
    """
    batch_id = last_batch(config)
    ended = ended_repetitions(spark, config, batch_id, schedule_id)

    def find(
        decoder: _Decoder, source: TopicPartition, segment: pa.RecordBatch
    ) -> Iterator[pa.RecordBatch]:
        return decoder.entries(source, segment, schedule_id, ended)

    rows = _of_state(spark, config, batch_id, _LARGEST_MS, find, _ENTRIES).collect()
    return [
        WaitingEntry(TopicPartition(row.topic, row.partition), row.due_ms, bytes(row.entry))
        for row in rows
    ]


def _of_state(
    spark: SparkSession,
    config: Config,
    batch_id: int | None,
    until_ms: int,
    read: Callable[[_Decoder, TopicPartition, pa.RecordBatch], Iterator[pa.RecordBatch]],
    columns: pa.Schema,
) -> DataFrame:
    """Return what ``read`` makes of the segments in the state, in tasks."""
    from pyspark.sql.pandas.types import from_arrow_schema

    records = stored_records(spark, config, batch_id)
    decoder = _Decoder(
        records, stored_cancels(spark, config, batch_id), config.source.decoding, until_ms
    )
    folder = config.pipeline_delay.folder
    if folder is None:
        blocks = _blocks(spark, config, batch_id)
        return blocks.mapInArrow(
            lambda rows: (
                batch for found in decoder.of_blocks(rows) for batch in read(decoder, *found)
            ),
            from_arrow_schema(columns),
        )
    query_id = str(Checkpoint(config.checkpoint_place).log.query_id())
    buckets = spark.createDataFrame(
        decoder.buckets, "topic string, partition int, bucket_id bigint"
    )
    return buckets.mapInArrow(
        lambda rows: (
            batch
            for found in decoder.of_folder(rows, folder, query_id)
            for batch in read(decoder, *found)
        ),
        from_arrow_schema(columns),
    )


def _blocks(spark: SparkSession, config: Config, batch_id: int | None) -> DataFrame:
    """Return the blocks of all buckets in the state: topic, partition, bucket, number of the first
    segment, content.
    """
    rows = read_state(spark, config, "snapshots", batch_id).where(
        f"user_map_key.number > {METADATA}"
    )
    return rows.selectExpr(
        "key.topic as topic",
        "key.partition as partition",
        "user_map_key.bucket_id as bucket_id",
        "user_map_key.number as number",
        "user_map_value.snapshot as block",
    )


@dataclass(frozen=True)
class _Decoder:
    """Decodes buckets in tasks.

    Args:
        records, cancels: by topic partition; the cancels with the marked positions.
        decoding: see ``SourceOptions.decoding``.
        until_ms: messages that are due then or later are left out.
    """

    records: dict[TopicPartition, IndexRecord]
    cancels: dict[TopicPartition, tuple[Cancels, MarkedPositions, Pauses]]
    decoding: Decoding
    until_ms: int

    @property
    def buckets(self) -> list[tuple[str, int, int]]:
        """Return the buckets that have messages: topic, partition and id."""
        return [
            (source.topic, source.partition, bucket.bucket_id) for source, bucket in self._used()
        ]

    def of_blocks(
        self, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[tuple[TopicPartition, pa.RecordBatch]]:
        """Yield what waits in the segments of blocks, as ``_blocks`` has them."""
        used = {(source, bucket.bucket_id): bucket for source, bucket in self._used()}
        for row in _rows(batches):
            source = TopicPartition(row["topic"], row["partition"])
            bucket = used.get((source, row["bucket_id"]))
            if bucket is None:
                continue
            for number, segment in enumerate(segments_of_block(row["block"]), row["number"]):
                if number >= bucket.segment:
                    yield source, self.waiting_rows(source, bucket, number, segment)

    def of_folder(
        self, batches: Iterable[pa.RecordBatch], folder: Place, query_id: str
    ) -> Iterator[tuple[TopicPartition, pa.RecordBatch]]:
        """Yield what waits in the segments of buckets in a folder."""
        used = {(source, bucket.bucket_id): bucket for source, bucket in self._used()}
        for row in _rows(batches):
            source = TopicPartition(row["topic"], row["partition"])
            bucket = used[source, row["bucket_id"]]
            storage = open_folder(folder, source, query_id, {bucket.bucket_id: bucket.segment})
            for number in range(bucket.segment, bucket.segments + 1):
                segment = storage.get_segment(bucket.bucket_id, number)
                yield source, self.waiting_rows(source, bucket, number, segment)

    def _used(self) -> Iterator[tuple[TopicPartition, Bucket]]:
        for source, record in self.records.items():
            yield from ((source, bucket) for bucket in record.buckets if bucket.waiting)

    def waiting_rows(
        self, source: TopicPartition, bucket: Bucket, number: int, content: bytes
    ) -> pa.RecordBatch:
        """Return the rows of a segment that wait and were neither replaced nor cancelled by their
        id.
        """
        segment = segment_from_bytes(content).slice(
            bucket.offset if number == bucket.segment else 0
        )
        segment = segment.slice(0, int(np.searchsorted(key_columns(segment)[0], self.until_ms)))
        is_ended = self._marked(source).are_marked(*key_columns(segment)[1:], REASONS)
        return segment.filter(pa.array(~is_ended))

    def messages(
        self,
        source: TopicPartition,
        segment: pa.RecordBatch,
        schedule_id: str | None = None,
        key: str | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ``WAITING`` of a segment; see ``waiting``."""
        if schedule_id is not None:
            segment = self._under_ids(source, segment)
        cancels = self.cancels[source][0] if source in self.cancels else Cancels()
        next_ms = _next_ms(segment, self._marked(source))
        has_frame = segment.column(3).is_valid()
        yield from _positions(source, segment.filter(pc.invert(has_frame)), cancels)
        frames = b"".join(segment.column(3).drop_null().to_pylist())
        for decoded in decode_bundle(frames, source, **self.decoding) if frames else ():
            unread, unknown = _unread(source, decoded.rejects)
            for found in (decoded.messages, unread):
                messages, repeating = _apart(_known(found), next_ms)
                messages = messages.filter(pa.array(~cancelled_rows(messages, cancels)))
                for rows in (messages, repeating):
                    yield from _asked_for(rows, schedule_id, key)
            yield from _positions(source, _at(segment, unknown), cancels)

    def entries(
        self,
        source: TopicPartition,
        segment: pa.RecordBatch,
        schedule_id: str,
        ended: Container[tuple[TopicPartition, Position]] = (),
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ``_ENTRIES`` of a segment whose entries wait under an id and were
        neither ended nor cancelled.
        """
        cancels = self.cancels[source][0] if source in self.cancels else Cancels()
        segment = self._under_ids(source, segment)
        for due_ms, frame in zip(
            segment.column(0).to_pylist(), segment.column(3).to_pylist(), strict=True
        ):
            if frame is None or schedule_id.encode() not in frame:
                continue
            for position, entry in entries_of(frame).items():
                metadata = peek_metadata(memoryview(entry))
                if properties_of(metadata).get(SCHEDULE_PROPERTY) != schedule_id:
                    continue
                if (source, position) in ended:
                    continue
                # Only its id ends a message that repeats.
                repeats = self._marked(source).has(position, REPEATING)
                if repeats or not is_entry_cancelled(entry, position, cancels):
                    row = [source.topic, source.partition, due_ms, entry]
                    yield pa.RecordBatch.from_pylist(
                        [dict(zip(_ENTRIES.names, row, strict=True))], schema=_ENTRIES
                    )

    def _under_ids(self, source: TopicPartition, segment: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a segment that wait under an id."""
        ids = key_columns(segment)[1:]
        return segment.filter(
            pa.array(self._marked(source).are_marked(*ids, (SCHEDULED, REPEATING)))
        )

    def _marked(self, source: TopicPartition) -> MarkedPositions:
        return self.cancels[source][1] if source in self.cancels else MarkedPositions()


def _next_ms(segment: pa.RecordBatch, marked: MarkedPositions) -> dict[tuple[int, int], int]:
    """Return when the messages of a segment that repeat are due next, by ledger and entry."""
    due_ms, ledger_ids, entry_ids = key_columns(segment)
    rows = np.flatnonzero(marked.are_marked(ledger_ids, entry_ids, (REPEATING,))).tolist()
    return {(int(ledger_ids[row]), int(entry_ids[row])): int(due_ms[row]) for row in rows}


def _known(messages: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows of messages whose keys are known."""
    columns = [messages[field.name] for field in _COLUMNS]
    columns += [pa.repeat(pa.scalar(is_so), messages.num_rows) for is_so in (True, False)]
    return pa.RecordBatch.from_arrays(columns, schema=WAITING)


def _asked_for(
    rows: pa.RecordBatch, schedule_id: str | None, key: str | None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of known messages that have an id and a key, if these are given."""
    if schedule_id is not None:
        own_ids = pc.map_lookup(rows["properties"], SCHEDULE_PROPERTY, "last")
        rows = rows.filter(pc.equal(own_ids, schedule_id))
    if key is not None:
        rows = rows.filter(pc.equal(key_texts(rows), key))
    if rows.num_rows:
        yield rows


def _apart(
    messages: pa.RecordBatch, next_ms: dict[tuple[int, int], int]
) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return the messages that do not repeat, and those that do, with the time of the next
    occurrence.
    """
    places = zip(messages["ledger_id"].to_pylist(), messages["entry_id"].to_pylist(), strict=True)
    due_ms = [next_ms.get(place) for place in places] if next_ms else [None] * messages.num_rows
    repeats = pa.array([time_ms is not None for time_ms in due_ms], pa.bool_())
    repeating = messages.filter(repeats)
    number = WAITING.get_field_index("deliver_at")
    times = pa.array([time_ms * 1000 for time_ms in due_ms if time_ms is not None], pa.int64())
    repeating = repeating.set_column(
        number, WAITING.field(number), times.cast(WAITING.field(number).type)
    )
    return messages.filter(pc.invert(repeats)), repeating


def _unread(
    source: TopicPartition, rejects: pa.RecordBatch
) -> tuple[pa.RecordBatch, set[Position]]:
    """Return the entries that are rejects here, for example without the key that decrypts them, and
    may be messages where the pipeline runs: the messages that their metadata tells, without values,
    and the positions of the others.
    """
    told: list[dict[str, Any]] = []
    others: set[Position] = set()
    columns = (rejects[name].to_pylist() for name in ("ledger_id", "entry_id", "entry"))
    for ledger_id, entry_id, entry in zip(*columns, strict=True):
        try:
            row = unread_row(memoryview(entry), ledger_id, entry_id)
        except CorruptEntryError:
            row = None
        if row is None:
            others.add(Position(ledger_id, entry_id))
        else:
            told.append({**row, "topic": source.topic, "partition": source.partition})
    return pa.RecordBatch.from_pylist(told, schema=schema.MESSAGES), others


def _at(segment: pa.RecordBatch, positions: set[Position]) -> pa.RecordBatch:
    """Return the rows of a segment that stand at some positions."""
    _, ledger_ids, entry_ids = (column.tolist() for column in key_columns(segment))
    places = map(Position, ledger_ids, entry_ids)
    return segment.filter(pa.array([place in positions for place in places], pa.bool_()))


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield from batch.to_pylist()


def _positions(
    source: TopicPartition, messages: pa.RecordBatch, cancels: Cancels
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of messages with nothing but a position and a time.

    Args:
        cancels: those that may hit one of them. One by key may, whatever the key is. None is sure
            to: a marker may have completed a large message behind it.
    """
    due_ms, ledger_ids, entry_ids = (column.tolist() for column in key_columns(messages))
    known = [
        {
            "topic": source.topic,
            "partition": source.partition,
            "message_id": f"{ledger_id}:{entry_id}",
            "ledger_id": ledger_id,
            "entry_id": entry_id,
            "batch_index": -1,
            "deliver_at": time_ms * 1000,
            "is_known": False,
            "may_be_cancelled": cancels.may_hit(Position(ledger_id, entry_id), time_ms),
        }
        for time_ms, ledger_id, entry_id in zip(due_ms, ledger_ids, entry_ids, strict=True)
    ]
    if known:
        yield pa.RecordBatch.from_pylist(known, schema=WAITING)
