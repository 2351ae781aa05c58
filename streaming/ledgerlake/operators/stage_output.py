"""Reads the rows that leave the stateful stage (see ``operators.rows``) into outcomes, state
summaries and cancels.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledgerlake.assembly.assembler import (
    Assembled,
    DueEntries,
    DuePositions,
    Entry,
    Outcome,
    Rejected,
    RejectedPositions,
    Repetition,
)
from ledgerlake.assembly.rules import ChunkedMessageKey
from ledgerlake.decode.messages import BatchRange, TopicPartition
from ledgerlake.delay.cancels import Cancels, cancels_from_json
from ledgerlake.operators.rows import RowKind, StateSummary, in_groups, summary_from_json
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_Output = tuple[TopicPartition, Outcome | pa.RecordBatch | StateSummary | Cancels]


def read_stage_rows(
    batches: Iterable[pa.RecordBatch],
) -> Iterator[_Output]:
    """Yield the content of rows of ``STAGE_ROWS``, in their order, each with its topic partition.
    Rejects that follow each other come together. Use up the entries of an outcome before you ask for
    the next one.
    """
    for (topic_partition, reason), outputs in groupby(_outputs_of(batches), _reject_key):
        if reason is None:
            yield from outputs
            continue
        entries = (entry for _, output in outputs if isinstance(output, Rejected) for entry in output.entries)
        for group in in_groups(entries, lambda entry: entry[1]):
            yield topic_partition, Rejected(reason, group)


def _reject_key(output: _Output) -> tuple[TopicPartition, str | None]:
    topic_partition, content = output
    return topic_partition, content.reason if isinstance(content, Rejected) else None


def _outputs_of(batches: Iterable[pa.RecordBatch]) -> Iterator[_Output]:
    rows = (row for batch in batches for number in range(batch.num_rows) for row in batch.slice(number, 1).to_pylist())
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
            yield topic_partition, RejectedPositions(header["reason"], _positions(header["positions"]))
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
                    [Repetition(**fields) for fields in header["repetitions"]],
                ),
            )
        elif row["kind"] == RowKind.REREAD:
            header = json.loads(row["header"])
            positions = list(_positions(header["positions"]))
            due = DuePositions(positions, header["delivered_ms"], _outputs(header), header["clock_ms"])
            yield topic_partition, due
        else:
            yield topic_partition, _message(row, rows)


def _message(row: dict[str, Any], rows: Iterator[dict[str, Any]]) -> Assembled:
    """Return the message of a row; its chunks are taken from the rows that follow."""
    header = json.loads(row["header"])
    message = Assembled(
        _positions(header["positions"]),
        None,
        delivered_ms=header["delivered_ms"],
        outputs=_outputs(header),
        key=None if header["key"] is None else ChunkedMessageKey(*header["key"]),
        known=_positions(header["known"]),
        clock_ms=header["clock_ms"],
    )
    if header["read_again"]:
        return message
    # Read all chunks now: the caller may stop iterating the message, and must still get the rows
    # that follow.
    return replace(message, entries=pop_each([next(rows)["entry"] for _ in message.positions]))


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
