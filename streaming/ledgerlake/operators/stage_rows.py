"""Rows that pass from tasks to the stateful stage; they are never stored.

Of each task and topic partition, in any order (a shuffle lies between):

    kind     content                                                    header
    rows     decoded messages and rejects that pass unchanged, as an    none
             Arrow stream (``operators.decoded_rows``)
    chunk    the entry of a chunk that the stage needs, by position     none
    delayed  entries to deliver later (see ``decode.split``); if only   the entry's ``BatchRange``, if it is alone
             some messages of an entry belong to the range, it is
             alone in its row, by position
    schedules events of schedules, many in one row, as Arrow            none
             (``operators.schedule_events``)
    report   once: the task's result, and the events that need the      ``TaskReport``
             incomplete messages, in order
    results  instead of reports, of all topic partitions of a task      ``PartitionResult`` of each
             that have neither state nor rows for the stage; under      (``operators.results``)
             ``KEY_OF_RESULTS``

The stage yields only ``rows``: it passes rows of tasks, and makes rows of its outcomes. In a
pipeline the tasks and the stage write files, and the stage yields results (``operators.results``).
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

import pyarrow as pa

from ledgerlake.assembly.rules import Chunk, ChunkedMessageKey, IncompleteMessage
from ledgerlake.decode.messages import WHOLE_BATCH, TopicPartition
from ledgerlake.decode.split import read_delayed
from ledgerlake.delay.due_times import DueSpan
from ledgerlake.operators.outcome_digest import OutcomeDigest
from ledgerlake.schedules.cancels import Cancel
from ledgerlake.stored.fields import exactly, fields_of, parse_stored, stored
from ledgerlake.wire.chunks import Marker
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ledgerlake.assembly.assembler import Assembled
    from ledgerlake.decode.messages import BatchRange


class RowKind(str, Enum):
    """The kind of a row, see above; its value is the content of the column ``kind``."""

    ROWS = "rows"
    CHUNK = "chunk"
    DELAYED = "delayed"
    SCHEDULES = "schedules"
    REPORT = "report"
    RESULTS = "results"


STAGE_ROWS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("kind", pa.string()),
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("header", pa.string()),
        ("entry", pa.binary()),
    ]
)

# The advice of errors: rows between two stages of one batch are never stored.
_BUG = "this is a bug, please report it"

STAGE_ROWS_DDL = (
    "topic string, partition int, kind string, ledger_id bigint, entry_id bigint, "
    "header string, entry binary"
)


# Under this key the rows of results pass the stage: one key for all tasks, since each one costs.
KEY_OF_RESULTS = TopicPartition("", -1)

# The most bytes, and the most rows, of rejects that pass together.
_GROUP_BYTES = 1024 * 1024
_GROUP_ROWS = 10_000

_Item = TypeVar("_Item")


class StageRow(NamedTuple):
    """A row of ``STAGE_ROWS``. Pandas would make a class like this for each frame."""

    topic: str
    partition: int
    kind: str
    ledger_id: int
    entry_id: int
    header: Any
    entry: Any


@dataclass(frozen=True)
class MessageStarted:
    """The event of a message that began in the task's range. It supersedes an incomplete message of
    the same key.
    """

    key: ChunkedMessageKey


@dataclass(frozen=True)
class DelayedLargeMessage:
    """The event of a complete large message that is to be delivered later.

    ``positions`` are its chunks in order, ``key`` the key that they must have. If ``bytes_kept``,
    the stage has their bytes; if not, they are read from the topic. ``stands_at``, ``known``,
    ``schedule_id``, ``stored_ms``: see ``Assembled``.
    """

    positions: tuple[Position, ...]
    deliver_ms: int
    bytes_kept: bool
    stands_at: Position
    key: ChunkedMessageKey | None = None
    known: tuple[Position, ...] = ()
    schedule_id: str | None = None
    stored_ms: int = 0

    @classmethod
    def of(cls, message: Assembled, deliver_ms: int) -> DelayedLargeMessage:
        """Return the event of a message that is to be delivered at ``deliver_ms``."""
        return cls(
            message.positions,
            deliver_ms,
            message.entries is not None,
            message.stands_at,
            message.key,
            message.known,
            message.schedule_id,
            message.stored_ms,
        )


TaskEvent = Chunk | MessageStarted | IncompleteMessage | Marker | DelayedLargeMessage | Cancel


@dataclass(frozen=True)
class TaskReport:
    """The report of a task on its range of one topic partition, up to ``end``. ``result`` is the
    task's result (``operators.results``) as JSON, which the stage only hands on. The range begins
    behind ``after``.

    ``now_ms`` is the latest time that the range knows of, by the broker or by the planner's clock.
    """

    end: Position
    now_ms: int | None
    result: dict[str, Any]
    events: list[TaskEvent] = field(default_factory=list)
    after: Position = AFTER_ALL


@dataclass(frozen=True)
class Released:
    """When the delayed messages were due that a micro-batch has delivered: on average, and the
    first of them.
    """

    count: int = 0
    mean_due_ms: int = 0
    first_due_ms: int | None = None

    def and_more(self, other: Released) -> Released:
        """Return both together."""
        firsts_ms = [
            time_ms for time_ms in (self.first_due_ms, other.first_due_ms) if time_ms is not None
        ]
        count = self.count + other.count
        due_ms = self.count * self.mean_due_ms + other.count * other.mean_due_ms
        return Released(count, due_ms // max(count, 1), min(firsts_ms, default=None))


@dataclass(frozen=True)
class Incomplete:
    """How many large messages are incomplete, and the bytes of the entries kept of them."""

    count: int = 0
    kept_bytes: int = 0


def sum_of(incomplete: Iterable[Incomplete]) -> Incomplete:
    """Return the numbers of several topic partitions together."""
    parts = list(incomplete)
    return Incomplete(sum(part.count for part in parts), sum(part.kept_bytes for part in parts))


@dataclass(frozen=True)
class StateSummary:
    """A topic partition after the stage: the results of its tasks, and its incomplete and
    delayed messages in numbers.

    ``oldest_incomplete`` is the position of the first chunk of an incomplete message, and
    ``expires_ms`` is when the first of those messages expires. ``kept_bytes`` are the bytes of the
    entries kept of incomplete messages. ``oldest_to_reread`` is the position of the first delayed
    message whose bytes only the topic has. ``due_spans`` counts the delayed messages by when they
    are due; ``more_due`` tells that some of them are due already. ``digest`` is of the messages
    that left the delayed index.
    """

    results: list[dict[str, Any]]
    oldest_incomplete: Position | None = None
    expires_ms: int | None = None
    incomplete_count: int = 0
    kept_bytes: int = 0
    delayed_count: int = 0
    next_due_ms: int | None = None
    oldest_to_reread: Position | None = None
    due_spans: list[DueSpan] = field(default_factory=list)
    more_due: bool = False
    digest: OutcomeDigest = field(default_factory=OutcomeDigest)


def report_to_json(report: TaskReport) -> str:
    events = [_named(event) for event in report.events]
    data = {
        "after": report.after,
        "end": report.end,
        "now_ms": report.now_ms,
        "result": report.result,
        "events": events,
    }
    return json.dumps(data, default=fields_of)


def _named(event: TaskEvent) -> list[str | TaskEvent]:
    return [type(event).__name__, event]


def event_bytes(event: TaskEvent) -> int:
    """Return the bytes that an event adds to a report."""
    return len(json.dumps([_named(event)], default=fields_of))


def report_from_json(text: str) -> TaskReport:
    """Read a report that ``report_to_json`` wrote.

    Raises:
        OffsetError: the text is no such report.
    """
    return parse_stored(text, "report of a task", _report, advice=_BUG)


def _report(data: dict[str, Any]) -> TaskReport:
    after, end, now_ms, result, named = exactly(data, "after", "end", "now_ms", "result", "events")
    events: list[TaskEvent] = [stored(_EVENTS[kind], fields) for kind, fields in named]
    return TaskReport(
        stored(Position, end),
        stored(int | None, now_ms),
        stored(dict[str, Any], result),
        events,
        stored(Position, after),
    )


def incomplete_from_dict(data: dict[str, Any]) -> IncompleteMessage:
    message: IncompleteMessage = stored(IncompleteMessage, data)
    if not message.positions:
        raise ValueError("an incomplete message without chunks")
    return message


_EVENTS: dict[str, type[TaskEvent]] = {kind.__name__: kind for kind in get_args(TaskEvent)}


def max_time_ms(times_ms: Iterable[int | None]) -> int | None:
    """Return the latest time that is not None; None if there is none."""
    return max((time_ms for time_ms in times_ms if time_ms is not None), default=None)


def positions_to_json(positions: Iterable[Position]) -> list[list[int]]:
    """Return positions as lists of ledger id and entry id, for JSON."""
    return [[position.ledger_id, position.entry_id] for position in positions]


def in_groups(
    items: Iterable[_Item], entry_of: Callable[[_Item], bytes | memoryview | None]
) -> Iterator[list[_Item]]:
    """Yield items in lists of bounded size, by the entry that each has."""
    group: list[_Item] = []
    size = 0
    for item in items:
        group.append(item)
        size += len(entry_of(item) or b"")
        if size >= _GROUP_BYTES or len(group) >= _GROUP_ROWS:
            yield group
            group, size = [], 0
    if group:
        yield group


def delayed_rows(
    topic_partition: TopicPartition, frames: memoryview, first_entry: BatchRange
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a ``delayed`` piece. ``first_entry`` says which messages of its first entry
    belong to the range.
    """
    if first_entry != WHOLE_BATCH:
        delayed = read_delayed(frames)
        end = int(delayed.frame_ends[0])
        position = Position(int(delayed.ledger_ids[0]), int(delayed.entry_ids[0]))
        yield stage_row(
            topic_partition,
            RowKind.DELAYED,
            position,
            json.dumps(astuple(first_entry)),
            frames[:end],
        )
        frames = frames[end:]
    if len(frames):
        yield stage_row(topic_partition, RowKind.DELAYED, entry=frames)


def stage_row(
    topic_partition: TopicPartition,
    kind: RowKind,
    position: Position | None = None,
    header: str | None = None,
    entry: bytes | memoryview | None = None,
) -> pa.RecordBatch:
    """Return one row of ``STAGE_ROWS``, for Arrow."""
    values = stage_values(
        topic_partition, kind, position, header, bytes(entry) if entry is not None else None
    )
    columns = [
        pa.array([value], column.type) for value, column in zip(values, STAGE_ROWS, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=STAGE_ROWS)


def stage_values(
    topic_partition: TopicPartition,
    kind: RowKind,
    position: Position | None,
    header: str | None,
    entry: bytes | memoryview | None,
) -> list[Any]:
    """Return the values of one row of ``STAGE_ROWS``, in the order of its columns."""
    # Pandas, through which these rows pass, has no integer column with nulls that keeps large
    # numbers exact.
    position = position or BEFORE_ALL
    return [
        topic_partition.topic,
        topic_partition.partition,
        kind.value,
        position.ledger_id,
        position.entry_id,
        header,
        entry,
    ]
