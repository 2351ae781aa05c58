"""Rows that pass from tasks to the stateful stage and from there to the last one; nothing of it is
ever stored.

To the stage, of each task and topic partition, in any order (a shuffle lies between):

    rows     decoded messages that pass untouched, as an Arrow stream
    chunk    the bytes of one entry that the task could not settle itself, by position
    delayed  entries that are to be delivered later (see ``decode.split``); an entry of which only a part belongs to the
             range travels alone, by position, with that part in ``note``
    report   once: what became of the task's range, and the events that need the incomplete messages, in order (``TaskReport``)

From the stage, in order but for ``rows``, which pass as they come:

    message  a complete large message follows: ``note`` lists its positions, and whether to read it again from the topic
    part     the next chunk of that message
    reject   one entry that cannot become a message; ``entry`` is null if only the topic may still have it
    cancels  what is cancelled, of everything due that follows
    due      delayed entries that are due now; ``note`` says when that is, and which outputs they are for
    again    positions of due entries whose bytes only the topic has
    report   once for a topic partition, last: what the tasks did, and what is incomplete (``StateSummary``)
"""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, get_args

import pyarrow as pa

from ledgerlake.assembly.rules import Chunk, ChunkedMessageKey, IncompleteMessage
from ledgerlake.decode.messages import WHOLE_BATCH
from ledgerlake.decode.split import read_delayed
from ledgerlake.delay.cancels import Cancel
from ledgerlake.stored.fields import parse_stored, stored
from ledgerlake.wire.chunks import Marker
from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.decode.messages import BatchRange, TopicPartition


class RowKind(str, Enum):
    """The kind of a row, see above; its value is the content of the column ``kind``."""

    ROWS = "rows"
    CHUNK = "chunk"
    DELAYED = "delayed"
    REPORT = "report"
    MESSAGE = "message"
    PART = "part"
    REJECT = "reject"
    CANCELS = "cancels"
    DUE = "due"
    AGAIN = "again"


STAGE_ROWS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("kind", pa.string()),
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("note", pa.string()),
        ("entry", pa.binary()),
    ]
)
# The advice of errors: rows between two stages of one batch are never stored.
_BUG = "this is a bug, please report it"

STAGE_ROWS_DDL = (
    "topic string, partition int, kind string, ledger_id bigint, entry_id bigint, note string, entry binary"
)


@dataclass(frozen=True)
class Begun:
    """A message began in the task's range: it supersedes an incomplete message of the same key."""

    key: ChunkedMessageKey


@dataclass(frozen=True)
class Waits:
    """A large message that is to be delivered later: its chunks in order, whether their bytes are
    held, and whose chunks they must be. ``known``: see ``Assembled``.
    """

    positions: tuple[Position, ...]
    deliver_ms: int
    held: bool
    key: ChunkedMessageKey | None = None
    known: tuple[Position, ...] = ()


Event = Chunk | Begun | IncompleteMessage | Marker | Waits | Cancel


@dataclass(frozen=True)
class TaskReport:
    """The report of a task on its range of one topic partition, up to ``end``. ``fact`` is the
    writer's own and only handed on.

    ``now_ms`` is the latest time that the range knows of, by the broker or by the planner's clock.
    """

    end: Position
    now_ms: int | None
    fact: dict[str, Any]
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True)
class StateSummary:
    """A topic partition after the stage: the facts of its tasks, and its incomplete and delayed
    messages in numbers.

    ``oldest_waiting`` is the position of the first delayed message whose bytes only the topic has.
    """

    facts: list[dict[str, Any]]
    oldest_open: Position | None = None
    expires_ms: int | None = None
    open_sets: int = 0
    held_bytes: int = 0
    waiting: int = 0
    next_due_ms: int | None = None
    oldest_waiting: Position | None = None


def report_to_json(report: TaskReport) -> str:
    events = [[type(event).__name__, asdict(event)] for event in report.events]
    return json.dumps({"end": asdict(report.end), "now_ms": report.now_ms, "fact": report.fact, "events": events})


def report_from_json(text: str) -> TaskReport:
    """Read a report that ``report_to_json`` wrote.

    Raises:
        OffsetError: the text is no such report.
    """
    return parse_stored(text, "report of a task", _report, advice=_BUG)


def _report(data: dict[str, Any], _version: int) -> TaskReport:
    events: list[Event] = [stored(_EVENTS[kind], fields) for kind, fields in data["events"]]
    fact = stored(dict[str, Any], data["fact"])
    return TaskReport(stored(Position, data["end"]), stored(int | None, data["now_ms"]), fact, events)


def summary_to_json(summary: StateSummary) -> str:
    return json.dumps(asdict(summary))


def summary_from_json(text: str) -> StateSummary:
    """Read a summary that ``summary_to_json`` wrote.

    Raises:
        OffsetError: the text is no such summary.
    """
    return parse_stored(
        text, "state summary of a topic partition", lambda data, _version: summary_from_dict(data), advice=_BUG
    )


def summary_from_dict(data: dict[str, Any]) -> StateSummary:
    summary: StateSummary = stored(StateSummary, data)
    return summary


def incomplete_from_dict(data: dict[str, Any]) -> IncompleteMessage:
    opened: IncompleteMessage = stored(IncompleteMessage, data)
    if not opened.positions:
        raise ValueError("an incomplete message without chunks")
    return opened


_EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}


def latest(times_ms: Iterable[int | None]) -> int | None:
    """Return the latest time that is not None; None if there is none."""
    return max((time_ms for time_ms in times_ms if time_ms is not None), default=None)


def places(positions: Iterable[Position]) -> list[list[int]]:
    """Return positions for JSON."""
    return [[position.ledger_id, position.entry_id] for position in positions]


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
        yield stage_row(topic_partition, RowKind.DELAYED, position, json.dumps(astuple(first_entry)), frames[:end])
        frames = frames[end:]
    if len(frames):
        yield stage_row(topic_partition, RowKind.DELAYED, entry=frames)


def stage_row(
    topic_partition: TopicPartition,
    kind: RowKind,
    position: Position | None = None,
    note: str | None = None,
    entry: bytes | memoryview | None = None,
) -> pa.RecordBatch:
    """Return one row of ``STAGE_ROWS``, for Arrow."""
    values = stage_values(topic_partition, kind, position, note, bytes(entry) if entry is not None else None)
    columns = [pa.array([value], column.type) for value, column in zip(values, STAGE_ROWS, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=STAGE_ROWS)


def stage_values(
    topic_partition: TopicPartition,
    kind: RowKind,
    position: Position | None,
    note: str | None,
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
        note,
        entry,
    ]
