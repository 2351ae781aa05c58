"""The stateful stage without Spark: its processor over state in dicts, and tasks that feed it."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledgerlake.assembly.assembler import Assembled, Entry, Rejected
from ledgerlake.assembly.rules import Chunk
from ledgerlake.client.cluster import ClientSettings
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.operators.local_assembly import LocalAssembly
from ledgerlake.operators.stage_output import OutcomeRows, StageOutput
from ledgerlake.operators.stage_rows import (
    RowKind,
    StateSummary,
    TaskReport,
    report_to_json,
    stage_row,
    summary_from_json,
)
from ledgerlake.operators.stateful import Processor
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ledgerlake.assembly.rules import Chunk, Limits
    from ledgerlake.operators.outcome_types import Outcome
    from ledgerlake.wire.chunks import Marker

SOURCE = TopicPartition("persistent://public/default/t", 0)


class DictState:
    """As much of Spark's MapState as is used."""

    def __init__(self) -> None:
        self.values: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self.writes = 0

    def exists(self) -> bool:
        return bool(self.values)

    def getValue(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return self.values.get(key)

    def containsKey(self, key: tuple[Any, ...]) -> bool:
        return key in self.values

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        self.writes += 1
        self.values[key] = value

    def removeKey(self, key: tuple[Any, ...]) -> None:
        self.values.pop(key, None)

    def clear(self) -> None:
        self.values.clear()

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        return iter(list(self.values.items()))


class DictValue:
    """As much of Spark's ValueState as is used."""

    def __init__(self) -> None:
        self.values: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self.writes = 0

    def get(self) -> tuple[Any, ...] | None:
        return self.values.get(())

    def update(self, value: tuple[Any, ...]) -> None:
        self.writes += 1
        self.values[()] = value

    def clear(self) -> None:
        self.values.clear()


@dataclass
class Stage:
    """State that lives from batch to batch, as Spark keeps it."""

    limits: Limits
    delay: DelayOptions = field(default_factory=DelayOptions)
    client: ClientSettings = field(default_factory=lambda: ClientSettings("pulsar://nowhere:1"))
    states: dict[str, DictState | DictValue] = field(default_factory=dict)
    output: Callable[[TopicPartition], StageOutput] = OutcomeRows
    frames: int = 0

    def getMapState(self, name: str, _key_schema: str, _value_schema: str) -> DictState:
        return self.states.setdefault(name, DictState())  # type: ignore[return-value]

    def getValueState(self, name: str, _schema: str) -> DictValue:
        return self.states.setdefault(name, DictValue())  # type: ignore[return-value]

    def copy(self) -> Stage:
        return copy.deepcopy(self)

    def run(
        self,
        rows: list[pa.RecordBatch],
        rng: random.Random | None = None,
        topic_partition: TopicPartition = SOURCE,
    ) -> list[Any]:
        """One batch; the rows that come out, in so many ``frames``. With ``rng`` the rows come in
        shuffled, in frames of any size.
        """
        processor = Processor(self.limits, self.delay, self.client, self.output)
        processor.init(self)
        rows = rng.sample(rows, len(rows)) if rng else rows
        frames = []
        while rows:
            count = rng.randint(1, len(rows)) if rng else len(rows)
            frames.append(pa.Table.from_batches(rows[:count]).to_pandas())
            rows = rows[count:]
        key = (topic_partition.topic, topic_partition.partition)
        frames_out = list(processor.handleInputRows(key, iter(frames), None))
        self.frames = len(frames_out)
        return [row for frame in frames_out for row in frame.itertuples(index=False)]


@dataclass
class Settled:
    """What became of chunks, by position."""

    delivered: list[tuple[Position, ...]] = field(default_factory=list)
    read_again: int = 0
    rejected: list[tuple[str, Position]] = field(default_factory=list)
    summary: StateSummary | None = None

    def outcomes(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Assembled):
                self._deliver(
                    outcome.positions, None if outcome.entries is None else list(outcome.entries)
                )
            elif isinstance(outcome, Rejected):
                self.rejected += [(outcome.reason, position) for position, _ in outcome.entries]

    def rows(self, rows: list[Any]) -> None:
        """Rows of the stage, checked against what ``rows`` promises of their order."""
        remaining_rows = list(rows)
        while remaining_rows:
            row = remaining_rows.pop(0)
            if row.kind == RowKind.MESSAGE:
                note = json.loads(row.header)
                positions = tuple(Position(*pair) for pair in note["positions"])
                count = 0 if note["read_again"] else len(positions)
                parts, remaining_rows = remaining_rows[:count], remaining_rows[count:]
                assert all(part.kind == RowKind.MESSAGE_CHUNK for part in parts)
                self._deliver(
                    positions, None if note["read_again"] else [part.entry for part in parts]
                )
            elif row.kind == RowKind.REJECT:
                self.rejected.append((row.header, Position(row.ledger_id, row.entry_id)))
            else:
                assert row.kind == RowKind.SUMMARY
                assert not remaining_rows
                self.summary = summary_from_json(row.header)

    def _deliver(
        self, positions: tuple[Position, ...], entries: Sequence[Entry | None] | None
    ) -> None:
        self.delivered.append(positions)
        if entries is None:
            self.read_again += 1
        else:
            assert entries == [entry_of(position) for position in positions]


def entry_of(position: Position) -> bytes:
    """Stands for the bytes of an entry."""
    return b"entry %d:%d" % (position.ledger_id, position.entry_id)


def task(
    events: Sequence[Chunk | Marker], limits: Limits, settled: Settled, now_ms: int | None = None
) -> list[pa.RecordBatch]:
    """One task over a range: what it settles itself goes to ``settled``, the rest comes back as
    rows.
    """
    local = LocalAssembly(limits)
    rows = []
    end = Position(-1, -1)
    for event in events:
        if isinstance(event, Chunk):
            end = event.position
            outcomes = local.arrive(event, entry_of(end))
            if outcomes is None:
                rows.append(stage_row(SOURCE, RowKind.CHUNK, end, entry=entry_of(end)))
            else:
                settled.outcomes(outcomes)
        else:
            settled.outcomes(local.apply_marker(event))
    settled.outcomes(local.evict())
    rows += [
        stage_row(SOURCE, RowKind.CHUNK, position, entry=entry)
        for position, entry in local.drain_pending()
    ]
    report = TaskReport(end, now_ms, {"end": str(end)}, local.events)
    return [*rows, stage_row(SOURCE, RowKind.REPORT, header=report_to_json(report))]
