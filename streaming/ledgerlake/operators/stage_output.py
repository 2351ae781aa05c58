"""What leaves the stateful stage: outcomes of one topic partition and micro-batch, the cancels that
are in force, and last a summary of the state.

In the pipeline the stage writes them to files itself (see ``operators.outcome_files``). For other
sinks they are rows of ``operators.stage_rows``, which this module writes and reads.
"""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from ledgerlake.assembly.assembler import Assembled, Entry, Rejected
from ledgerlake.assembly.rules import ChunkedMessageKey
from ledgerlake.decode.messages import BatchRange, TopicPartition
from ledgerlake.operators.outcome_types import (
    Delivery,
    DueEntries,
    DuePositions,
    Outcome,
    RejectedPositions,
)
from ledgerlake.operators.stage_rows import (
    STAGE_ROWS,
    RowKind,
    StateSummary,
    in_groups,
    positions_to_json,
    stage_values,
    summary_from_json,
    summary_to_json,
)
from ledgerlake.reasons import Reason
from ledgerlake.schedules.cancels import Cancels, cancels_from_json, cancels_to_json
from ledgerlake.stored.fields import fields_of
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pandas as pd

    from ledgerlake.operators.stage_rows import StageRow

_Output = tuple[TopicPartition, Outcome | pa.RecordBatch | StateSummary | Cancels]


class StageOutput(Protocol):
    """Takes what comes out of the stateful stage for one topic partition; its frames go on."""

    def take(self, outcome: Outcome | Cancels) -> Iterator[pd.DataFrame]:
        """Take an outcome, and use up its entries before the next one: those of a message that was
        not delayed stay in state if they are not iterated.
        """

    def finish(self, summary: StateSummary) -> Iterator[pd.DataFrame]:
        """Take the summary, which comes last."""

    def pass_on(self, rows: list[StageRow]) -> Iterator[pd.DataFrame]:
        """Take rows in which the stage changes nothing."""


class OutcomeRows:
    """Hands outcomes on as rows, for ``read_stage_rows``."""

    def __init__(self, topic_partition: TopicPartition) -> None:
        self._topic_partition = topic_partition

    def take(self, outcome: Outcome | Cancels) -> Iterator[pd.DataFrame]:
        if isinstance(outcome, Cancels):
            yield self._row(RowKind.CANCELS, None, cancels_to_json(outcome.all), None)
        elif isinstance(outcome, DueEntries):
            first_entry = astuple(outcome.first_entry)
            header = _due_header(
                outcome, first_entry=first_entry, deliveries=_delivery_fields(outcome)
            )
            yield self._row(RowKind.DUE, None, header, outcome.frames)
        elif isinstance(outcome, DuePositions):
            positions = positions_to_json(outcome.positions)
            deliveries = _delivery_fields(outcome)
            header = _due_header(
                outcome, positions=positions, due_ms=outcome.due_ms, deliveries=deliveries
            )
            yield self._row(RowKind.REREAD, None, header, outcome.frames)
        elif isinstance(outcome, Assembled):
            header = _due_header(
                outcome,
                positions=positions_to_json(outcome.positions),
                read_again=outcome.entries is None,
                key=None if outcome.key is None else astuple(outcome.key),
                known=positions_to_json(outcome.known),
                due_ms=outcome.due_ms,
            )
            yield self._row(RowKind.MESSAGE, outcome.positions[-1], header, None)
            for position, entry in zip(outcome.positions, outcome.entries or (), strict=False):
                yield self._row(RowKind.MESSAGE_CHUNK, position, None, entry)
        elif isinstance(outcome, RejectedPositions):
            header = json.dumps(
                {"reason": outcome.reason, "positions": positions_to_json(outcome.positions)}
            )
            yield self._row(RowKind.REREAD_REJECTS, None, header, None)
        else:
            for group in in_groups(outcome.entries, lambda entry: entry[1]):
                rows = (
                    stage_values(
                        self._topic_partition, RowKind.REJECT, position, outcome.reason, entry
                    )
                    for position, entry in group
                )
                yield data_frame(STAGE_ROWS.names, *rows)

    def finish(self, summary: StateSummary) -> Iterator[pd.DataFrame]:
        yield self._row(RowKind.SUMMARY, None, summary_to_json(summary), None)

    def pass_on(self, rows: list[StageRow]) -> Iterator[pd.DataFrame]:
        yield data_frame(STAGE_ROWS.names, *rows)

    def _row(
        self,
        kind: RowKind,
        position: Position | None,
        header: str | None,
        entry: bytes | memoryview | None,
    ) -> pd.DataFrame:
        return data_frame(
            STAGE_ROWS.names, stage_values(self._topic_partition, kind, position, header, entry)
        )


def data_frame(columns: Sequence[str], *rows: Sequence[Any]) -> pd.DataFrame:
    # Spark starts a query with a process that only asks for the names of the state variables. That
    # process needs no pandas.
    import pandas as pd

    return pd.DataFrame(rows, columns=columns)


def _due_header(outcome: DueEntries | DuePositions | Assembled, **more: Any) -> str:
    outputs = {name: asdict(mark_delete) for name, mark_delete in outcome.outputs.items()}
    return json.dumps(
        {
            "delivered_ms": outcome.delivered_ms,
            "outputs": outputs,
            "clock_ms": outcome.clock_ms,
            **more,
        }
    )


def _delivery_fields(outcome: DueEntries | DuePositions) -> list[dict[str, Any] | None]:
    return [None if delivery is None else fields_of(delivery) for delivery in outcome.deliveries]


def _deliveries(header: dict[str, Any]) -> list[Delivery | None]:
    return [None if fields is None else Delivery(**fields) for fields in header["deliveries"]]


def read_stage_rows(
    batches: Iterable[pa.RecordBatch],
) -> Iterator[_Output]:
    """Yield the content of rows of ``STAGE_ROWS``, in their order, each with its topic partition.
    Rejects that follow each other come together. Use up the entries of an outcome before you ask
    for the next one.
    """
    for (topic_partition, reason), outputs in groupby(_outputs_of(batches), _reject_key):
        if reason is None:
            yield from outputs
            continue
        entries = (
            entry
            for _, output in outputs
            if isinstance(output, Rejected)
            for entry in output.entries
        )
        for group in in_groups(entries, lambda entry: entry[1]):
            yield topic_partition, Rejected(Reason(reason), group)


def _reject_key(output: _Output) -> tuple[TopicPartition, str | None]:
    topic_partition, content = output
    return topic_partition, content.reason if isinstance(content, Rejected) else None


def _outputs_of(batches: Iterable[pa.RecordBatch]) -> Iterator[_Output]:
    rows = (
        row
        for batch in batches
        for number in range(batch.num_rows)
        for row in batch.slice(number, 1).to_pylist()
    )
    for row in rows:
        topic_partition = TopicPartition(row["topic"], row["partition"])
        if row["kind"] == RowKind.SUMMARY:
            yield topic_partition, summary_from_json(row["header"])
        elif row["kind"] == RowKind.ROWS:
            with pa.ipc.open_stream(row["entry"]) as reader:
                yield from ((topic_partition, messages) for messages in reader)
        elif row["kind"] == RowKind.REJECT:
            position = Position(row["ledger_id"], row["entry_id"])
            yield topic_partition, Rejected(row["header"], [(position, row["entry"])])
        elif row["kind"] == RowKind.REREAD_REJECTS:
            header = json.loads(row["header"])
            yield (
                topic_partition,
                RejectedPositions(header["reason"], _positions(header["positions"])),
            )
        elif row["kind"] == RowKind.CANCELS:
            yield topic_partition, cancels_from_json(row["header"])[0]
        elif row["kind"] == RowKind.DUE:
            header = json.loads(row["header"])
            yield (
                topic_partition,
                DueEntries(
                    row["entry"],
                    header["delivered_ms"],
                    _outputs(header),
                    BatchRange(*header["first_entry"]),
                    header["clock_ms"],
                    _deliveries(header),
                ),
            )
        elif row["kind"] == RowKind.REREAD:
            header = json.loads(row["header"])
            positions = list(_positions(header["positions"]))
            yield (
                topic_partition,
                DuePositions(
                    positions,
                    header["due_ms"],
                    header["delivered_ms"],
                    _outputs(header),
                    header["clock_ms"],
                    row["entry"],
                    _deliveries(header),
                ),
            )
        else:
            yield topic_partition, _message(row, rows)


def _message(row: dict[str, Any], rows: Iterator[dict[str, Any]]) -> Assembled:
    """Return the message of a row; its chunks are taken from the rows that follow."""
    header = json.loads(row["header"])
    message = Assembled(
        _positions(header["positions"]),
        None,
        delivered_ms=header["delivered_ms"],
        due_ms=header["due_ms"],
        outputs=_outputs(header),
        key=None if header["key"] is None else ChunkedMessageKey(*header["key"]),
        known=_positions(header["known"]),
        clock_ms=header["clock_ms"],
    )
    if header["read_again"]:
        return message
    # Read all chunks now: the caller may stop iterating the message, and must still get the rows
    # that follow.
    entries = [next(rows)["entry"] for _ in message.positions]
    return replace(
        message, entries=entries if message.delivered_ms is not None else pop_each(entries)
    )


def _positions(lists: list[list[int]]) -> tuple[Position, ...]:
    return tuple(Position(*ids) for ids in lists)


def _outputs(header: dict[str, Any]) -> dict[str, Position]:
    return {name: Position(**mark_delete) for name, mark_delete in header["outputs"].items()}


def pop_each(entries: list[Entry | None]) -> Iterator[Entry | None]:
    """Yield the entries in order, and empty the list, so that the memory of an entry is free after
    its use.
    """
    entries.reverse()
    while entries:
        yield entries.pop()
