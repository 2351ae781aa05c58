"""Behind the stateful stage: rows of ``STAGE_ROWS`` become outcomes again, and outcomes become messages
or rejects.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.assembly.assembler import Assembled, DueEntries, DuePositions, Entry, Outcome, Rejected
from ledgerlake.assembly.rules import ChunkedMessageKey
from ledgerlake.client.topics import join_partition
from ledgerlake.decode import schema
from ledgerlake.decode.large import decode_large
from ledgerlake.decode.messages import BatchRange, Decoded, TopicPartition, decode_bundle, decode_entries
from ledgerlake.decode.reference import key_of
from ledgerlake.decode.rejects import RejectedEntry, reject_rows
from ledgerlake.decode.split import entries_of
from ledgerlake.delay.cancel_messages import key_text, key_texts
from ledgerlake.delay.cancels import Cancels, cancels_from_json
from ledgerlake.errors import CorruptEntryError
from ledgerlake.operators.rows import RowKind, StateSummary, summary_from_json
from ledgerlake.source.range_reader import BUNDLE_BYTES
from ledgerlake.source.reread import read_again
from ledgerlake.wire.entry import peek_metadata
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from ledgerlake.options.source_options import SourceOptions

CANCELLED = "cancelled"


def read_stage_rows(
    batches: Iterable[pa.RecordBatch],
) -> Iterator[tuple[TopicPartition, Outcome | pa.RecordBatch | StateSummary | Cancels]]:
    """Yield the events that rows describe, in their order; each is to be used up before the next."""
    rows = (row for batch in batches for number in range(batch.num_rows) for row in batch.slice(number, 1).to_pylist())
    for row in rows:
        topic_partition = TopicPartition(row["topic"], row["partition"])
        if row["kind"] == RowKind.REPORT:
            yield topic_partition, summary_from_json(row["note"])
        elif row["kind"] == RowKind.ROWS:
            with pa.ipc.open_stream(row["entry"]) as reader:
                yield from ((topic_partition, batch) for batch in reader)
        elif row["kind"] == RowKind.REJECT:
            yield topic_partition, Rejected(row["note"], [(Position(row["ledger_id"], row["entry_id"]), row["entry"])])
        elif row["kind"] == RowKind.CANCELS:
            yield topic_partition, cancels_from_json(row["note"])
        elif row["kind"] == RowKind.DUE:
            note = json.loads(row["note"])
            part = BatchRange(*note["first_entry"])
            yield topic_partition, DueEntries(row["entry"], note["delivered_ms"], _outputs(note), part)
        elif row["kind"] == RowKind.AGAIN:
            note = json.loads(row["note"])
            yield topic_partition, DuePositions(list(_positions(note)), note["delivered_ms"], _outputs(note))
        else:
            yield topic_partition, _message(row, rows)


def _message(header: dict[str, Any], rows: Iterator[dict[str, Any]]) -> Assembled:
    note = json.loads(header["note"])
    key = None if note["key"] is None else ChunkedMessageKey(*note["key"])
    message = Assembled(_positions(note), None, delivered_ms=note["delivered_ms"], outputs=_outputs(note), key=key)
    if note["read_again"]:
        return message
    # Taken now, since the rows behind must be reached also when the message is given up half-way.
    return replace(message, entries=_emptying([next(rows)["entry"] for _ in message.positions]))


def _positions(note: dict[str, Any]) -> tuple[Position, ...]:
    return tuple(Position(*one) for one in note["positions"])


def _outputs(note: dict[str, Any]) -> dict[str, Position]:
    return {name: Position(**mark) for name, mark in note["outputs"].items()}


def _emptying(entries: list[Entry | None]) -> Iterator[Entry | None]:
    """The entries in order, each let go of once it was used."""
    entries.reverse()
    while entries:
        yield entries.pop()


class OutcomeDecoder:
    """Outcomes of one topic partition as rows; reads from the topic what nobody holds any more."""

    def __init__(
        self,
        topic_partition: TopicPartition,
        options: SourceOptions,
        max_message_bytes: int,
        *,
        holds_delayed: bool,
    ) -> None:
        self.cancels = Cancels()
        self._topic_partition = topic_partition
        self._options = options
        self._max_message_bytes = max_message_bytes
        self._holds_delayed = holds_delayed

    def decode(self, outcome: Outcome) -> Iterator[pa.RecordBatch | list[RejectedEntry]]:
        """Yield rows of ``schema.MESSAGES``, and rejects. Cancelled messages become rejects.

        Raises:
            BrokerError, TransportError: entries had to be read again and could not.
        """
        if isinstance(outcome, DueEntries):
            first_entry = outcome.first_entry
            parts = decode_bundle(
                outcome.frames, self._topic_partition, first_entry=first_entry, **self._options.decoding
            )
            yield from self._due(parts, outcome)
        elif isinstance(outcome, DuePositions):
            yield from self._due_again(outcome)
        elif isinstance(outcome, Assembled):
            yield self._large(outcome)
        else:
            yield [RejectedEntry(*one, outcome.reason) for one in outcome.entries]

    def _large(self, outcome: Assembled) -> pa.RecordBatch | list[RejectedEntry]:
        entries = self._read_again(outcome.positions) if outcome.entries is None else outcome.entries
        if outcome.delivered_ms is not None and len(self.cancels):
            kept = list(entries)
            if self._is_cancelled(kept[-1], outcome.positions[-1]):
                return [RejectedEntry(*one, CANCELLED) for one in zip(outcome.positions, kept, strict=True)]
            entries = _emptying(kept)
        try:
            row = decode_large(
                _all_there(entries),
                outcome.positions,
                self._topic_partition,
                self._max_message_bytes,
                self._options.client.crypto,
                None if outcome.key is None else (outcome.key.producer_name, outcome.key.uuid),
            )
            self._check_delivery(row, outcome.delivered_ms)
        except CorruptEntryError as error:
            return [RejectedEntry(one, None, error.reason, error.message) for one in outcome.positions]
        return row if outcome.delivered_ms is None else _with_delivery(row, outcome.delivered_ms)

    def _check_delivery(self, row: pa.RecordBatch, delivered_ms: int | None) -> None:
        """Check that a large message is not delivered before the time that its chunks say. A marker,
        by which it waited or did not, may say another time.
        """
        deliver_us = row["deliver_at"].cast(pa.int64())[0].as_py()
        if not self._holds_delayed or deliver_us is None or deliver_us <= 0:
            return
        if delivered_ms is None or delivered_ms * 1000 < deliver_us:
            raise CorruptEntryError("the marker says another delivery time than the chunks", reason="malformed_marker")

    def _is_cancelled(self, entry: Entry | None, position: Position) -> bool:
        if entry is None:
            return False
        metadata = peek_metadata(memoryview(entry))
        return self.cancels.hit(position, -1, key_text(*key_of(metadata)), metadata.deliver_at_time)

    def _due(
        self, parts: Iterable[Decoded], outcome: DueEntries | DuePositions
    ) -> Iterator[pa.RecordBatch | list[RejectedEntry]]:
        for decoded in parts:
            messages = _with_delivery(decoded.messages.select(schema.MESSAGES.names), outcome.delivered_ms)
            hit = cancelled_rows(messages, self.cancels)
            if hit.any():
                yield self._cancelled(messages.filter(pa.array(hit)), outcome)
                messages = messages.filter(pa.array(~hit))
            yield messages
            if decoded.rejects.num_rows:
                yield [_rejected(row) for row in decoded.rejects.to_pylist()]

    def _cancelled(self, messages: pa.RecordBatch, outcome: DueEntries | DuePositions) -> list[RejectedEntry]:
        """Each entry once, with its bytes where they are at hand; of a batch it says which messages
        were cancelled.
        """
        columns = (messages[name].to_pylist() for name in ("ledger_id", "entry_id", "batch_index"))
        indexes: dict[Position, list[int]] = {}
        for ledger_id, entry_id, batch_index in zip(*columns, strict=True):
            indexes.setdefault(Position(ledger_id, entry_id), []).append(batch_index)
        entries = entries_of(outcome.frames) if isinstance(outcome, DueEntries) else {}
        return [RejectedEntry(one, entries.get(one), CANCELLED, _of_batch(found)) for one, found in indexes.items()]

    def _due_again(self, outcome: DuePositions) -> Iterator[pa.RecordBatch | list[RejectedEntry]]:
        found: list[tuple[Position, bytes]] = []
        missing: list[Position] = []
        size = 0
        for position, entry in zip(positions := sorted(outcome.positions), self._read_again(positions), strict=True):
            if entry is None:
                missing.append(position)
                continue
            found.append((position, entry))
            size += len(entry)
            if size >= BUNDLE_BYTES:
                yield from self._due(self._entries(found), outcome)
                found, size = [], 0
        if found:
            yield from self._due(self._entries(found), outcome)
        if missing:
            yield [RejectedEntry(one, None, "entry_trimmed") for one in missing]

    def _entries(self, found: list[tuple[Position, bytes]]) -> Iterator[Decoded]:
        ledger_ids, entry_ids = (np.array(ids, dtype=np.int64) for ids in zip(*((one.ledger_id, one.entry_id) for one, _ in found), strict=True))  # fmt: skip
        raw = pa.array([entry for _, entry in found], pa.binary())
        return decode_entries(raw, ledger_ids, entry_ids, self._topic_partition, **self._options.decoding)

    def reject_tables(self, rejected: list[RejectedEntry]) -> Iterator[pa.Table]:
        """Rows of ``schema.REJECTS``, one by one; entries whose bytes are not at hand are read from
        the topic.

        Raises:
            As ``decode``.
        """
        in_order = sorted(rejected, key=lambda one: one.position)
        again = self._read_again([one.position for one in in_order if one.entry is None])
        for one in in_order:
            found = replace(one, entry=next(again)) if one.entry is None else one
            yield reject_rows([found], self._topic_partition)

    def _read_again(self, positions: Iterable[Position]) -> Iterator[bytes | None]:
        return read_again(
            self._options.client,
            join_partition(self._topic_partition.topic, self._topic_partition.partition),
            positions,
        )


def cancelled_rows(messages: pa.RecordBatch, cancels: Cancels) -> NDArray[np.bool_]:
    """Which delayed messages are cancelled."""
    hit = np.zeros(messages.num_rows, dtype=bool)
    if not len(cancels):
        return hit
    keys = key_texts(messages)
    by_key = pc.is_in(keys, pa.array(cancels.keys, pa.string()))
    by_id = np.isin(messages["ledger_id"].to_numpy(), [one.ledger_id for one in cancels.positions])
    for row in np.flatnonzero(by_key.to_numpy(zero_copy_only=False) | by_id).tolist():
        position = Position(messages["ledger_id"][row].as_py(), messages["entry_id"][row].as_py())
        deliver_us = messages["deliver_at"][row].cast(pa.int64()).as_py()
        hit[row] = cancels.hit(position, messages["batch_index"][row].as_py(), keys[row].as_py(), deliver_us // 1000)
    return hit


def _of_batch(indexes: list[int]) -> str:
    return "" if indexes == [-1] else f"messages {', '.join(map(str, indexes))} of the batch"


def _with_delivery(messages: pa.RecordBatch, delivered_ms: int) -> pa.RecordBatch:
    when = pa.repeat(pa.scalar(delivered_ms * 1000, pa.int64()), messages.num_rows).cast(schema.TIMESTAMP)
    return messages.set_column(messages.schema.get_field_index("delivered_at"), "delivered_at", when)


def _rejected(row: dict[str, Any]) -> RejectedEntry:
    return RejectedEntry(Position(row["ledger_id"], row["entry_id"]), row["entry"], row["reason"], row["detail"])


def _all_there(entries: Iterable[Entry | None]) -> Iterator[Entry]:
    for entry in entries:
        if entry is None:
            raise CorruptEntryError("the topic no longer has all of its chunks", reason="chunk_trimmed")
        yield entry
