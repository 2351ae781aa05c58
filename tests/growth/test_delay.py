"""The delayed messages of a topic partition, if there are many."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ledgerlake.assembly.rules import ChunkedMessageKey, Limits
from ledgerlake.delay.segment import index_rows
from ledgerlake.delay.storage import METADATA
from ledgerlake.delay.tracker import DelayedTracker, DelaySettings
from ledgerlake.operators.bucket_storage import StateStorage
from ledgerlake.operators.decoded_rows import RowOutput
from ledgerlake.operators.schedule_events import Scheduled, ScheduleEvents
from ledgerlake.operators.stage_rows import (
    DelayedLargeMessage,
    RowKind,
    TaskReport,
    report_to_json,
    stage_row,
)
from ledgerlake.operators.stateful import Processor
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.schedules.repetition import RepetitionRate
from ledgerlake.wire import commands
from ledgerlake.wire.message_id import Position
from tests.delay.memory_storage import MemoryStorage
from tests.entries import single
from tests.growth.counting import Case, check
from tests.operators.stage import SOURCE, DictState, Stage, stage_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ledgerlake.delay.bucket import IndexRecord

TIME_MS = 1_700_000_000_000


def _mixed_arrivals(n: int) -> Callable[[], None]:
    """Prepare messages that come one by one, as between the chunks of large ones."""
    rows = [index_rows([(TIME_MS, 1, number)], [b"frame"]) for number in range(n)]

    def work() -> None:
        tracker = DelayedTracker(StateStorage(DictState()), DelaySettings())
        for row in rows:
            tracker.add(row)
        assert tracker.save().buckets[0].waiting == n

    return work


class _ReadSegments(MemoryStorage):
    """Counts the segments that were read."""

    reads = 0

    def get_segment(self, bucket_id: int, number: int) -> bytes:
        self.reads += number != METADATA
        return super().get_segment(bucket_id, number)


def _parts(n: int) -> Callable[[], Mapping[str, int]]:
    """Prepare messages of a bucket, and parts of entries between them."""
    storage = _ReadSegments()
    tracker = DelayedTracker(storage, DelaySettings())
    keys = [(TIME_MS + number, 1, 2 * number) for number in range(n)]
    tracker.add(index_rows(keys, [bytes(1000)] * n))
    record = tracker.save()

    def work() -> Mapping[str, int]:
        storage.reads = 0
        tracker = DelayedTracker(storage, DelaySettings(), record)
        for number in range(20):
            assert tracker.add_part(TIME_MS, Position(1, 2 * number + 1))
        assert not tracker.add_part(TIME_MS, Position(1, 0))
        assert not tracker.add_part(TIME_MS, Position(1, 2 * n - 2))
        return {"segments that are read": storage.reads}

    return work


def _releases(n: int) -> Callable[[], Mapping[str, int]]:
    """Prepare messages of 1 kB that are due, and one of the same bucket that is due in a year."""
    state, record = DictState(), None

    def micro_batch(cutoff_ms: int, count: int = 0) -> IndexRecord:
        tracker = DelayedTracker(StateStorage(state), DelaySettings(), record)
        keys = [(TIME_MS + number, 1, number) for number in range(count)] + [
            (2 * TIME_MS, 1, count)
        ] * (count > 0)
        tracker.add(index_rows(keys, [bytes(1000)] * len(keys)))
        deque(tracker.take_due(cutoff_ms), maxlen=0)
        return tracker.save()

    record = micro_batch(0, n)

    def work() -> Mapping[str, int]:
        nonlocal record
        record = micro_batch(TIME_MS + n)
        record = micro_batch(TIME_MS + n)
        assert record.buckets[0].waiting == 1
        return {"blocks that stay": sum(number > 0 for _, number in state.values)}

    return work


def _occurrences_between(n: int, *, reread: bool = False) -> Callable[[], Mapping[str, int]]:
    """Prepare messages that are due a second after each other, and one that repeats between
    them.
    """
    stage = Stage(Limits(), DelayOptions(reread=reread))
    names = {"ledgerlake.schedule": "a", "ledgerlake.every": "PT1S"}
    properties = [pb.KeyValue(key=name, value=value) for name, value in names.items()]
    times_ms = [TIME_MS, *(TIME_MS + 500 + 1000 * number for number in range(n))]
    frames = [
        commands.message(
            1,
            7,
            number,
            single(b"v", deliver_at_time=time_ms, properties=[] if number else properties),
        )
        for number, time_ms in enumerate(times_ms)
    ]
    schedules = ScheduleEvents()
    schedules.add(Scheduled("a", Position(7, 0), TIME_MS - 1, TIME_MS, RepetitionRate(1)))
    rows = [
        *schedules.rows(SOURCE, all_events=True),
        stage_row(SOURCE, RowKind.DELAYED, entry=b"".join(frames)),
    ]

    def micro_batch(now_ms: int, rows: Sequence[pa.RecordBatch] = ()) -> list[Any]:
        report = TaskReport(Position(9, 9), now_ms, {})
        return stage.run([*rows, stage_row(SOURCE, RowKind.REPORT, header=report_to_json(report))])

    micro_batch(TIME_MS - 1, rows)

    def work() -> Mapping[str, int]:
        *due, summary = micro_batch(TIME_MS + 1000 * n)
        assert summary.digest.released.count == 2 * n + 1
        return {"pieces to decode": len(due)}

    return work


class _ReadState(DictState):
    """Counts the values that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        self.reads += len(self.values)
        return super().iterator()

    def getValue(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self.reads += 1
        return super().getValue(key)


class _LargeMessages:
    """Delayed large messages in the state of a stage; each one replaced the one before."""

    def __init__(self, n: int) -> None:
        self._stage = Stage(Limits())
        self.chunks = self._stage.states["parts"] = _ReadState()
        self.large = self._stage.states["separate"] = _ReadState()
        for number in range(n):
            positions = (Position(1, 2 * number), Position(1, 2 * number + 1))
            key = ChunkedMessageKey("p", f"p-{number}")
            event = DelayedLargeMessage(
                positions,
                TIME_MS + 10**7,
                True,
                positions[-1],
                key,
                schedule_id="report",
                stored_ms=TIME_MS + number,
            )
            rows = [
                stage_row(SOURCE, RowKind.CHUNK, position, entry=b"chunk") for position in positions
            ]
            deque(self.micro_batch(TIME_MS, rows, event), maxlen=0)

    def micro_batch(
        self, now_ms: int, rows: Sequence[pa.RecordBatch] = (), *events: DelayedLargeMessage
    ) -> Iterator[object]:
        """Yield the outputs of a micro-batch."""
        report = TaskReport(Position(9, 9), now_ms, {}, list(events))
        rows = [*rows, stage_row(SOURCE, RowKind.REPORT, header=report_to_json(report))]
        settings = stage_settings()
        processor = Processor(settings, RowOutput(settings))
        processor.init(self._stage)
        frames = iter([pa.Table.from_batches(rows).to_pandas()])
        return processor.handleInputRows((SOURCE.topic, SOURCE.partition), frames, None)


def _replaced_large_messages(n: int) -> Callable[[], Mapping[str, int]]:
    """Prepare large messages that were replaced; all are due."""
    stage = _LargeMessages(n)

    def work() -> Mapping[str, int]:
        most = stage.chunks.reads = 0
        for _ in stage.micro_batch(TIME_MS + 10**7):
            most, stage.chunks.reads = max(most, stage.chunks.reads), 0
        return {"chunks at one time": most}

    return work


def _waiting_large_messages(n: int) -> Callable[[], Mapping[str, int]]:
    """Prepare large messages that are not due."""
    stage = _LargeMessages(n)

    def work() -> Mapping[str, int]:
        stage.large.reads = 0
        deque(stage.micro_batch(TIME_MS + 1), maxlen=0)
        return {"messages that are read": stage.large.reads}

    return work


CASES = [
    Case("DelayedTracker.add, messages one by one", _mixed_arrivals, n=100),
    Case(
        "DelayedTracker.add_part, messages of a bucket",
        _parts,
        n=1_000,
        constant=("segments that are read",),
    ),
    Case(
        "DelayedTracker.take_due, messages of a bucket",
        _releases,
        n=2_000,
        constant=("blocks that stay",),
    ),
    Case(
        "DelayedMessages.release, occurrences between other messages",
        _occurrences_between,
        constant=("pieces to decode",),
    ),
    Case(
        "DelayedMessages.release, occurrences between messages that only the topic has",
        lambda n: _occurrences_between(n, reread=True),
        constant=("pieces to decode",),
    ),
    Case(
        "DelayedMessages.release, replaced large messages",
        _replaced_large_messages,
        n=10,
        constant=("chunks at one time",),
    ),
    Case(
        "DelayedMessages.save, large messages that wait",
        _waiting_large_messages,
        n=10,
        constant=("messages that are read",),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_work_of_delayed_messages_grows_with_their_number_at_most(case: Case) -> None:
    check(case)
