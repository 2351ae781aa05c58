"""Targets for the data that is kept between micro-batches: offsets, state, rows between stages, the
delayed index.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ledgerlake.assembly.rules import (
    Chunk,
    ChunkedMessageKey,
    IncompleteMessage,
    IncompleteMessages,
    Limits,
)
from ledgerlake.decode.messages import BatchRange
from ledgerlake.delay.bucket import IndexRecord, record_from_json, record_to_json
from ledgerlake.delay.due_times import DueSpan
from ledgerlake.delay.segment import index_rows
from ledgerlake.delay.snapshot import (
    metadata_from_bytes,
    metadata_to_bytes,
    segment_from_bytes,
    segment_to_bytes,
)
from ledgerlake.delay.storage import METADATA
from ledgerlake.delay.tracker import DelayedTracker, DelaySettings
from ledgerlake.errors import OffsetError
from ledgerlake.operators.bucket_storage import StateStorage
from ledgerlake.operators.schedule_state import ScheduleState, StoredSchedules, block_to_bytes
from ledgerlake.operators.separately_stored import (
    SeparatelyStored,
    separately_stored_from_json,
    separately_stored_to_json,
)
from ledgerlake.operators.stage_rows import (
    DelayedLargeMessage,
    MessageStarted,
    StateSummary,
    TaskReport,
    report_from_json,
    report_to_json,
)
from ledgerlake.operators.state_variables import StateVariables
from ledgerlake.operators.stateful import incomplete_from_json, incomplete_to_json
from ledgerlake.pb import delay_pb2 as pb
from ledgerlake.pipeline import batch_ends, checkpoint, row_settings
from ledgerlake.publish import outbox
from ledgerlake.reasons import REPLACED
from ledgerlake.replay import replay_parts
from ledgerlake.schedules.cancels import Cancel, cancels_from_json, cancels_to_json
from ledgerlake.schedules.repetition import Occurrence, RepetitionRate
from ledgerlake.schedules.schedules import (
    SCHEDULED,
    MarkedPositions,
    Pauses,
    Repeating,
    ScheduledMessage,
    waiting_from_json,
    waiting_to_json,
)
from ledgerlake.source import wakeup_files
from ledgerlake.stored.fields import fields_of, parse_stored, stored
from ledgerlake.stored.offsets import PartitionOffset, from_json, to_json
from ledgerlake.table.ordered_files import DataFile
from ledgerlake.wire.chunks import Marker
from ledgerlake.wire.message_id import BEFORE_ALL, Position
from tests.delay.memory_storage import MemoryStorage
from tests.fuzz import mutate
from tests.fuzz.engine import MIB, Target
from tests.operators.stage import DictState

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fuzz.mutate import Rng

_KEY = ChunkedMessageKey("p", "p-1")
_PLACES = (Position(7, 1), Position(7, 4))
_SETTINGS = DelaySettings(
    min_indexes_per_bucket=4,
    max_indexes_per_segment=3,
    max_buckets=2,
    time_step_per_segment_ms=50,
    min_indexes_per_segment=1,
)


def _texts(*texts: str) -> Callable[[Rng], bytes]:
    return lambda rng: mutate.json_text(rng, rng.choice(texts)).encode("utf-8", "surrogatepass")


def _texts_of(make: Callable[[], list[str]]) -> Callable[[Rng], bytes]:
    return _texts(*make())


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


# Offsets.

_OFFSET = json.dumps(
    to_json(
        {
            "t-partition-0": PartitionOffset(
                Position(7, 3), 4, 1_700_000_000_000, 98, 1_700_000_000_500, parts=3
            ),
            "u": PartitionOffset(BEFORE_ALL),
        }
    )
)


def _judge_offset(data: bytes) -> int:
    try:
        stored_offset = json.loads(_text(data))
    except (ValueError, RecursionError):
        return 0  # Spark's own line, or not: from_json gets the parsed value
    offset = from_json(stored_offset)
    assert from_json(to_json(offset)) == offset
    for partition_offset in offset.values():
        partition_offset.is_beyond(PartitionOffset(BEFORE_ALL))
    return len(offset)


# State and rows of the stateful stage.

_OPEN = IncompleteMessage(_KEY, 3, 900, 1_700_000_000_000, 1_700_000_000_000, _PLACES, 600, 640)
_REPORT = TaskReport(
    Position(7, 9), 1_700_000_000_000, {"f": 1},
    [
        Chunk(_KEY, Position(7, 1), 0, 3, 900, 300, 320, 1_700_000_000_000, 1_700_000_000_000), MessageStarted(_KEY), _OPEN,
        Marker("p", "p-1", Position(7, 8), _PLACES, 1_700_000_000_000, 1_700_000_000_000), DelayedLargeMessage(_PLACES, 1_800_000_000_000, True, _PLACES[-1]),
        Cancel("key", "k", Position(7, 5), 1_700_000_000_000),
    ],
)  # fmt: skip
_SEPARATE = [
    separately_stored_to_json(SeparatelyStored(_PLACES, True, _PLACES[-1], key=_KEY)),
    separately_stored_to_json(SeparatelyStored(_PLACES[:1], True, _PLACES[0], BatchRange(None, 3))),
]
_WAITING = waiting_to_json(
    [
        ScheduledMessage(
            Position(7, 4),
            20,
            500,
            Repeating(
                30,
                Occurrence(3, 499, 500),
                800,
                REPLACED,
                Pauses(70, [40, 60]),
                RepetitionRate(24, 2400),
            ),
        )
    ]
)
_SUMMARY = StateSummary(
    [{"f": 1}], Position(7, 1), 5, 1, 600, 2, 7, Position(7, 2), [DueSpan(7, 1000, 2)]
)


def _judge_set(data: bytes) -> int:
    incomplete = incomplete_from_json(_text(data))
    assert incomplete_from_json(incomplete_to_json(incomplete)) == incomplete
    pending = IncompleteMessages(Limits(), [incomplete])
    pending.arrive(
        Chunk(_KEY, Position(7, 9), 2, 3, 900, 300, 320, 1_700_000_000_000, 1_700_000_000_000)
    )
    pending.expire(1_800_000_000_000)
    return 1


def _judge_report(data: bytes) -> int:
    report = report_from_json(_text(data))
    assert report_from_json(report_to_json(report)) == report
    return 1


def _read_summary(text: str) -> StateSummary:
    summary: StateSummary = parse_stored(text, "state summary", partial(stored, StateSummary))
    return summary


def _judge_summary(data: bytes) -> int:
    summary = _read_summary(_text(data))
    assert _read_summary(json.dumps(summary, default=fields_of)) == summary
    return 1


def _judge_cancels(data: bytes) -> int:
    cancels, marked, pauses = cancels_from_json(_text(data))
    again, marked_again, pauses_again = cancels_from_json(
        cancels_to_json(cancels.all, marked, pauses)
    )
    assert pauses_again == pauses
    assert again.all == cancels.all
    assert marked_again.to_fields() == marked.to_fields()
    cancels.is_cancelled(Position(7, 3), -1, "k", 1_800_000_000_000)
    cancels.needed_after(1_700_000_000_000)
    assert len(cancels.keys) + len(cancels.ledger_ids) <= len(cancels)
    return len(cancels)


def _marked() -> MarkedPositions:
    marked = MarkedPositions()
    for entry_id in (3, 4, 70_000):
        marked.mark(Position(7, entry_id), REPLACED)
    marked.mark(Position(8, 3), SCHEDULED)
    return marked


def _judge_waiting(data: bytes) -> int:
    return len(waiting_from_json(_text(data)))


def _schedule_block() -> list[bytes]:
    messages = [ScheduledMessage(Position(7, entry_id), 5, 9) for entry_id in (3, 4)]
    return [block_to_bytes((f"visit-{message.position}", message) for message in messages)]


def _judge_schedule_block(data: bytes) -> int:
    """A block is read in a table of two blocks, which a third one makes larger."""
    state = ScheduleState(StateVariables(_Handle()))
    state.blocks.updateValue(
        (-1,), (pb.ScheduleTable(blocks=2, messages=2, version=1).SerializeToString(),)
    )
    state.blocks.updateValue((0,), (data,))
    store = StoredSchedules(state, _marked())
    store.begin(90)
    store.load("visit-7:3")
    store.save()
    return 1


class _Handle:
    def getMapState(self, *_: str) -> DictState:
        return DictState()


def _judge_large(data: bytes) -> int:
    large_messages = separately_stored_from_json(_text(data))
    assert separately_stored_from_json(separately_stored_to_json(large_messages)) == large_messages
    return 1


# Files beside the checkpoint, by their readers.

_ENDS = (
    '{"version": 1, "batches": {"17": {"persistent://a/b/c": [12, 345]}}, '
    '"tables": {"messages": {"path": "lake/orders", "batch_id": 17}}, "last_run": {"batch_id": 17, '
    '"wakes_batch": 15}}'
)
_OUTBOX = '{"version": 1, "name": "abcd"}'
_OUTBOX_RECORD = (
    '{"version": 1, "batch_id": 8, "files": [{"name": "f", "topic_partition": "t", '
    '"first_sequence": 15, "rows": 2}], '
    '"next_sequences": {"t": 17}}'
)

_PRODUCER = json.dumps({"version": 1, **asdict(outbox.OtherName("t", "due", "", "4711", 12))})
_REPLAY = json.dumps(
    {
        "version": 1,
        "number": 4711,
        "topics": ["t"],
        "tables": {
            "messages": {
                "path": "lake/orders",
                "before": None,
                "files": [asdict(DataFile("part-1", 900, 3, "{}"))],
            }
        },
    }
)


def _reads(read: Callable[[dict[str, Any]], Any], known: int) -> Callable[[bytes], int]:
    def judge(data: bytes) -> int:
        parse_stored(data, "file", read, known)
        return 1

    return judge


# The delayed index.


@cache
def _index() -> tuple[str, dict[int, dict[int, bytes]]]:
    """A record, and its buckets' values by number."""
    storage = MemoryStorage()
    tracker = DelayedTracker(storage, _SETTINGS)
    tracker.add_output("table", BEFORE_ALL)
    keys = [(1_000 + 37 * number % 400, 7 + number // 9, number) for number in range(30)]
    for start in range(0, 30, 5):
        rows = keys[start : start + 5]
        tracker.add(index_rows(rows, [b"frame" if row[0] % 3 else None for row in rows]))
        record = tracker.save()
    list(tracker.take_due(1_100))
    record = tracker.save()
    return record_to_json(record), {
        number: dict(values) for number, values in storage.buckets.items()
    }


def _values(metadata: bool) -> list[bytes]:
    return [
        value
        for values in _index()[1].values()
        for number, value in values.items()
        if (number == METADATA) == metadata
    ]


def _judge_record(data: bytes) -> int:
    record = record_from_json(_text(data))
    assert record_from_json(record_to_json(record)) == record
    return len(record.buckets)


def _judge_metadata(data: bytes) -> int:
    segments_metadata = metadata_from_bytes(data)
    metadata_to_bytes(segments_metadata)
    for segment in segments_metadata:
        for entries in segment.entries.values():
            entries.union(entries)
            if len(entries) < 100_000:
                list(entries)
    return len(segments_metadata)


def _judge_segment(data: bytes) -> int:
    segment = segment_from_bytes(data)
    segment.validate(full=True)
    segment_to_bytes(segment)
    return int(segment.num_rows)


def _an_index(rng: Rng) -> bytes:
    """A record with its buckets; one bucket is changed, missing, or another's."""
    record, buckets = _index()
    buckets = {number: dict(values) for number, values in buckets.items()}
    if rng.random() < 0.5:
        record = mutate.json_text(rng, record)
    else:
        values = buckets[rng.choice(list(buckets))]
        number = rng.choice(list(values))
        kind = rng.random()
        if kind < 0.7:
            values[number] = mutate.message(rng, values[number])
        elif kind < 0.8:
            del values[number]
        else:
            values[number] = rng.choice(_values(number == METADATA))
    stored = [
        mutate.packed(b"%d" % bucket_id, b"%d" % number, value)
        for bucket_id, values in buckets.items()
        for number, value in values.items()
    ]
    return mutate.packed(record.encode("utf-8", "surrogatepass"), *stored)


def _judge_tracker(data: bytes) -> int:
    parts = mutate.unpacked(data)
    record = record_from_json(_text(parts[0])) if parts else IndexRecord()
    storage = MemoryStorage()
    for part in parts[1:]:
        bucket_id, number, value = mutate.unpacked(part)
        storage.buckets.setdefault(int(bucket_id), {})[int(number)] = value
    tracker = DelayedTracker(storage, _SETTINGS, record)
    tracker.add_output("table", BEFORE_ALL)
    tracker.add(index_rows([(1_200, 7, 3), (1_300, 12, 1)], [b"again", b"new"]))
    count = sum(batch.num_rows for batch in tracker.take_due(1_250))
    tracker.save()
    count += sum(batch.num_rows for batch in tracker.take_due(2**62))
    tracker.save()
    return count


@cache
def _packed_bucket() -> dict[int, bytes]:
    state = DictState()
    storage = StateStorage(state)
    values = [(number, value) for number, value in enumerate(_values(metadata=False)[:5], 1)]
    storage.save_all_segments(1, [*values, (METADATA, _values(metadata=True)[0])])
    return {number: value for (_, number), (value,) in state.values.items()}


def _a_packed_bucket(rng: Rng) -> bytes:
    values = dict(_packed_bucket())
    changed = rng.choice([number for number in values if number != METADATA])
    values[changed] = mutate.message(rng, values[changed])
    return mutate.packed(
        *(mutate.packed(b"%d" % number, value) for number, value in values.items())
    )


_next_bucket = iter(range(1, 2**62))


def _judge_packed(data: bytes) -> int:
    state, bucket_id = DictState(), next(_next_bucket)
    storage = StateStorage(state)
    for part in mutate.unpacked(data):
        name, value = mutate.unpacked(part)
        state.values[bucket_id, int(name)] = (value,)
    try:
        for number in (METADATA, 1, 3, 5, 9):
            storage.get_segment(bucket_id, number)
    finally:
        storage.delete_bucket(bucket_id)
    return 1


def _any_of(make: Callable[[], list[bytes]]) -> Callable[[Rng], bytes]:
    return lambda rng: mutate.message(rng, rng.choice(make()))


_REFUSED = (OffsetError,)

# The JSON objects with a version, by the name of their target: the written texts and the reader.
DOCUMENTS: dict[str, tuple[tuple[str, ...], Callable[[bytes], int]]] = {}


def _document(
    name: str, boundary: str, texts: tuple[str, ...], judge: Callable[[bytes], int]
) -> Target:
    DOCUMENTS[name] = texts, judge
    return Target(name, boundary, _texts(*texts), judge, _REFUSED)


TARGETS = [
    _document("offset", "source.offsets", (_OFFSET,), _judge_offset),
    _document("open-set", "open sets in state", (incomplete_to_json(_OPEN),), _judge_set),
    _document("report", "rows to the stateful stage: reports", (report_to_json(_REPORT),), _judge_report),
    _document("summary", "rows from the stateful stage: state summaries", (json.dumps(_SUMMARY, default=fields_of),), _judge_summary),
    _document("cancels", "cancels in state", (cancels_to_json([event for event in _REPORT.events if isinstance(event, Cancel)], _marked()),), _judge_cancels),
    _document("schedules", "messages that repeat, in state", (_WAITING,), _judge_waiting),
    Target("schedule-block", "a block of the table of schedules", _any_of(_schedule_block), _judge_schedule_block, _REFUSED),
    _document("delayed-large", "messages that are stored separately, in state", tuple(_SEPARATE), _judge_large),
    _document("cursor-ends", "pipeline.batch_ends: what is to be acknowledged", (_ENDS,), _reads(batch_ends._read, 1)),
    _document("row-settings", "pipeline.row_settings", ('{"version": 1, "settings": {"[delay] '
                                                        'enabled": true, "[chunks] max_pending": '
                                                        '5, "[delay] storage": "state"}}',), _reads(row_settings.read_settings, 1)),
    _document("outbox", "publish.outbox: its name", (_OUTBOX,), _reads(outbox._name, outbox.VERSION)),
    _document("outbox-name", "pipeline.checkpoint: the outbox's name", ('{"version": 1, "name": "abcd"}',), _reads(checkpoint._outbox_name, 1)),
    _document("selected", "pipeline.row_settings: which tables have to have a message", ('{"version": 1, "settings": {"tables": "[]"}, "earlier_ends": {"t": {"ledger_id": 7, "entry_id": 3}}}',), _reads(row_settings.read_selected, 1)),
    _document("tables", "pipeline.checkpoint: the tables that are written to", ('{"version": 1, "tables": {"messages": "/lake/orders"}}',), _reads(checkpoint._tables, 1)),
    _document("first-ends", "pipeline.checkpoint: ends of a first start", ('{"version": 1, "ends": {"t": {"ledger_id": 7, "entry_id": 3}}}',), _reads(checkpoint._first_ends, 1)),
    _document("forgotten-topics", "pipeline.checkpoint: topics that were forgotten", ('{"version": 1, "topics": ["t"]}',), _reads(checkpoint._forgotten_topics, 1)),
    _document("forgotten", "pipeline.checkpoint: that the stream was forgotten", ('{"version": 1}',), _reads(checkpoint._forgotten, 1)),
    _document("stream", "pipeline.checkpoint: its stream", ('{"version": 1, "stream": "orders", '
                                                            '"number": 4711}',), _reads(checkpoint._stream, 1)),
    _document("replay", "replay.replay_parts: a part", (_REPLAY,), _reads(replay_parts._read_part, 1)),
    _document("outbox-producer", "publish.outbox: the name of a producer", (_PRODUCER,), _reads(outbox._other_name, 1)),
    _document("outbox-record", "publish.outbox: a micro-batch", (_OUTBOX_RECORD,), _reads(outbox._batch, outbox.VERSION)),
    _document("outbox-sent", "publish.outbox: what was sent", ('{"version": 1, "next_sequences": '
                                                               '{"t": 17}}',), _reads(outbox._sent, outbox.SENT_VERSION)),
    _document("outbox-sending", "publish.outbox: how a sending began", ('{"version": 1, "partitions": 3, "ends": {"due": {"ledger_id": 7, "entry_id": -1}}}',), _reads(outbox._sending, 1)),
    _document("wakes", "source.wakes", ('{"version": 1, "wakes": {"t": 1777626000123}, "due": '
                                        '{"t": [[1777626000123, 60000, 4, 1]]}, "extends": 16, "expire_after_ms": 3600}',), _reads(wakeup_files._file, wakeup_files.VERSION)),
    Target("record", "the record of the delayed index", _texts_of(lambda: [_index()[0]]), _judge_record, _REFUSED),
    Target("snapshot-metadata", "state.delay.snapshot: metadata", _any_of(lambda: _values(True)), _judge_metadata, _REFUSED, work_factor=10),
    Target("snapshot-segment", "state.delay.snapshot: segments", _any_of(lambda: _values(False)), _judge_segment, _REFUSED),
    Target("packed-bucket", "operators.bucket_storage: directories and blocks", _a_packed_bucket, _judge_packed, _REFUSED, memory_bytes=48 * MIB),
    Target("tracker", "state.delay.tracker over a damaged index", _an_index, _judge_tracker, _REFUSED, work_factor=10),
]  # fmt: skip
