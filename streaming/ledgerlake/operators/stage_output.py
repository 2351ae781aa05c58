"""The rows that leave the stateful stage (see ``operators.rows``), read back into outcomes, state
summaries and cancels.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledgerlake.assembly.assembler import Assembled, DueEntries, DuePositions, Entry, Outcome, Rejected
from ledgerlake.assembly.rules import ChunkedMessageKey
from ledgerlake.decode.messages import BatchRange, TopicPartition
from ledgerlake.delay.cancels import Cancels, cancels_from_json
from ledgerlake.operators.rows import RowKind, StateSummary, summary_from_json
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def read_stage_rows(
    batches: Iterable[pa.RecordBatch],
) -> Iterator[tuple[TopicPartition, Outcome | pa.RecordBatch | StateSummary | Cancels]]:
    """Yield what rows of ``STAGE_ROWS`` describe, in their order, with its topic partition. Use up
    the entries of an outcome before you ask for the next one.
    """
    rows = (row for batch in batches for number in range(batch.num_rows) for row in batch.slice(number, 1).to_pylist())
    for row in rows:
        topic_partition = TopicPartition(row["topic"], row["partition"])
        if row["kind"] == RowKind.REPORT:
            yield topic_partition, summary_from_json(row["note"])
        elif row["kind"] == RowKind.ROWS:
            with pa.ipc.open_stream(row["entry"]) as reader:
                yield from ((topic_partition, messages) for messages in reader)
        elif row["kind"] == RowKind.REJECT:
            yield topic_partition, Rejected(row["note"], [(Position(row["ledger_id"], row["entry_id"]), row["entry"])])
        elif row["kind"] == RowKind.CANCELS:
            yield topic_partition, cancels_from_json(row["note"])
        elif row["kind"] == RowKind.DUE:
            detail = json.loads(row["note"])
            first_entry = BatchRange(*detail["first_entry"])
            yield topic_partition, DueEntries(row["entry"], detail["delivered_ms"], _outputs(detail), first_entry)
        elif row["kind"] == RowKind.AGAIN:
            detail = json.loads(row["note"])
            positions = list(_positions(detail["positions"]))
            yield topic_partition, DuePositions(positions, detail["delivered_ms"], _outputs(detail))
        else:
            yield topic_partition, _message(row, rows)


def _message(header: dict[str, Any], rows: Iterator[dict[str, Any]]) -> Assembled:
    detail = json.loads(header["note"])
    key = None if detail["key"] is None else ChunkedMessageKey(*detail["key"])
    message = Assembled(
        _positions(detail["positions"]),
        None,
        delivered_ms=detail["delivered_ms"],
        outputs=_outputs(detail),
        key=key,
        refused=detail["refused"],
        known=_positions(detail["known"]),
    )
    if detail["read_again"]:
        return message
    # Read all chunks now: the rows that follow must be reached also if the message is given up
    # half-way.
    return replace(message, entries=pop_each([next(rows)["entry"] for _ in message.positions]))


def _positions(places: list[list[int]]) -> tuple[Position, ...]:
    return tuple(Position(*place) for place in places)


def _outputs(detail: dict[str, Any]) -> dict[str, Position]:
    return {name: Position(**mark) for name, mark in detail["outputs"].items()}


def pop_each(entries: list[Entry | None]) -> Iterator[Entry | None]:
    """Yield the entries in order, and empty the list, so that each entry's memory is free once it
    was used.
    """
    entries.reverse()
    while entries:
        yield entries.pop()
