"""The stateful stage without Spark: its processor over state in dicts, and tasks that feed it."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledgerlake.assembly.assembler import Assembled, Entry, Rejected
from ledgerlake.assembly.rules import Chunk, Limits
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.operators.local_assembly import LocalAssembly
from ledgerlake.operators.results import StageSettings
from ledgerlake.operators.stage_rows import (
    RowKind,
    StateSummary,
    TaskReport,
    report_to_json,
    stage_row,
)
from ledgerlake.operators.stateful import Processor
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.options.source_options import parse_options
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ledgerlake.operators.outcome_types import Outcome
    from ledgerlake.operators.stage_output import StageOutput
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


def stage_settings(
    limits: Limits | None = None,
    delay: DelayOptions | None = None,
    service_url: str = "pulsar://nowhere:1",
) -> StageSettings:
    options = parse_options({"service.url": service_url, "topic": "t"})
    return StageSettings(limits or Limits(), delay or DelayOptions(), options)


class Recorded:
    """Keeps the outcomes of the stage, with the entries of each one, and passes nothing on."""

    def __init__(self, _topic_partition: TopicPartition | None = None) -> None:
        self.seen: list[Any] = []
        self.calls = 0

    def take(self, outcome: Any) -> Iterator[Any]:
        entries = getattr(outcome, "entries", None)
        if entries is not None:
            outcome = replace(outcome, entries=list(entries))
        return self._keep(outcome)

    def finish(self, summary: StateSummary) -> Iterator[Any]:
        return self._keep(summary)

    def pass_on(self, rows: list[Any]) -> Iterator[Any]:
        return self._keep(*rows)

    def _keep(self, *items: Any) -> Iterator[Any]:
        self.calls += 1
        self.seen += items
        return iter(())


@dataclass
class Stage:
    """State that lives from batch to batch, as Spark keeps it."""

    limits: Limits
    delay: DelayOptions = field(default_factory=DelayOptions)
    service_url: str = "pulsar://nowhere:1"
    states: dict[str, DictState | DictValue] = field(default_factory=dict)
    output: Callable[[TopicPartition], StageOutput] | None = None
    calls: int = 0

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
        """Run one batch; return the outcomes, in so many ``calls`` of the output. With an output of
        its own, the stage has rows. With ``rng`` the rows come in shuffled, in frames of any size.
        """
        recorded = Recorded()
        settings = stage_settings(self.limits, self.delay, self.service_url)
        processor = Processor(settings, self.output or (lambda _: recorded))
        processor.init(self)
        rows = rng.sample(rows, len(rows)) if rng else rows
        frames = []
        while rows:
            count = rng.randint(1, len(rows)) if rng else len(rows)
            frames.append(pa.Table.from_batches(rows[:count]).to_pandas())
            rows = rows[count:]
        key = (topic_partition.topic, topic_partition.partition)
        frames_out = list(processor.handleInputRows(key, iter(frames), None))
        self.calls = recorded.calls
        rows_out = [row for frame in frames_out for row in frame.itertuples(index=False)]
        return [*rows_out, *recorded.seen]


@dataclass
class Settled:
    """What became of chunks, by position."""

    delivered: list[tuple[Position, ...]] = field(default_factory=list)
    read_again: int = 0
    rejected: list[tuple[str, Position]] = field(default_factory=list)
    summary: StateSummary | None = None

    def outcomes(self, outcomes: Iterable[Outcome | StateSummary]) -> None:
        """What a task or the stage makes of them; the summary of the stage comes last."""
        for outcome in outcomes:
            assert self.summary is None or not isinstance(outcome, StateSummary)
            if isinstance(outcome, StateSummary):
                self.summary = outcome
            elif isinstance(outcome, Assembled):
                self._deliver(
                    outcome.positions, None if outcome.entries is None else list(outcome.entries)
                )
            elif isinstance(outcome, Rejected):
                self.rejected += [(outcome.reason, position) for position, _ in outcome.entries]

    def stage(self, outcomes: list[Any]) -> None:
        """Check the outcomes of the stage."""
        self.summary = None
        self.outcomes(outcomes)
        assert outcomes[-1] is self.summary

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
