"""Decodes outcomes into messages or rejects. Entries whose bytes are not in the outcome are read
from the topic.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ledgerlake.assembly.assembler import Assembled, Entry
from ledgerlake.client.topics import join_partition
from ledgerlake.decode import schema
from ledgerlake.decode.large import decode_large, read_chunks
from ledgerlake.decode.messages import Decoded, TopicPartition, decode_bundle, decode_entries
from ledgerlake.decode.rejects import RejectedEntry, reject_rows
from ledgerlake.decode.split import placed_entries
from ledgerlake.delay.cancels import Cancels
from ledgerlake.errors import CorruptEntryError
from ledgerlake.operators.cancelled import cancelled_entries, cancelled_rows, is_entry_cancelled
from ledgerlake.operators.outcome_types import Delivery, DueEntries, DuePositions, Outcome, RejectedPositions
from ledgerlake.operators.rows import in_groups
from ledgerlake.operators.scheduled import expired_chunk, find_in_due, with_occurrences, with_properties
from ledgerlake.operators.stage_output import pop_each
from ledgerlake.reasons import CANCELLED, ENTRY_TRIMMED, MALFORMED_MARKER, Reason
from ledgerlake.source.reread import GoneEntries, read_again
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ledgerlake.options.source_options import SourceOptions

# Due entries that are read from the topic at once.
_REREAD_BYTES = 32 * 1024 * 1024


class OutcomeDecoder:
    """Decodes the outcomes of one topic partition."""

    def __init__(
        self,
        topic_partition: TopicPartition,
        options: SourceOptions,
        max_message_bytes: int,
        *,
        delays_messages: bool,
    ) -> None:
        self.cancels = Cancels()
        self._topic_partition = topic_partition
        self._options = options
        self._max_message_bytes = max_message_bytes
        self._delays_messages = delays_messages
        self._gone = GoneEntries()

    def decode(self, outcome: Outcome) -> Iterator[pa.RecordBatch | list[RejectedEntry]]:
        """Yield rows of ``schema.MESSAGES``, and rejects. Cancelled messages become rejects.

        Raises:
            BrokerError, TransportError: entries had to be read again and could not.
        """
        if isinstance(outcome, DueEntries) and outcome.deliveries:
            yield from self._repeated(outcome)
        elif isinstance(outcome, DueEntries):
            bundles = decode_bundle(
                outcome.frames, self._topic_partition, first_entry=outcome.first_entry, **self._options.decoding
            )
            yield from self._due(bundles, outcome)
        elif isinstance(outcome, DuePositions):
            yield from self._due_positions(outcome)
        elif isinstance(outcome, Assembled):
            yield self._large(outcome)
        elif isinstance(outcome, RejectedPositions):
            yield [RejectedEntry(position, None, outcome.reason) for position in outcome.positions]
        else:
            yield [RejectedEntry(position, entry, outcome.reason) for position, entry in outcome.entries]

    def _large(self, message: Assembled) -> pa.RecordBatch | list[RejectedEntry]:
        entries = self._read_again(message.positions) if message.entries is None else message.entries
        sender = None if message.key is None else (message.key.producer_name, message.key.uuid)
        try:
            if message.delivered_ms is not None and len(self.cancels):
                checked = read_chunks(entries, len(message.positions), self._max_message_bytes, sender)
                chunks: list[Entry | None] = [entry for entry, _ in checked]
                if is_entry_cancelled(chunks[-1], message.positions[-1], self.cancels):
                    placed_chunks = zip(message.positions, chunks, strict=True)
                    return [RejectedEntry(position, entry, CANCELLED) for position, entry in placed_chunks]
                entries = pop_each(chunks)
            if message.delivered_ms is not None:
                entries = iter(entries)
                first = next(entries, None)
                expired = expired_chunk(first, message.clock_ms)
                entries = chain([first], entries)
                if expired is not None:
                    return rejected_large(message, *expired, entries)
            row = decode_large(
                entries,
                message.positions,
                self._topic_partition,
                self._max_message_bytes,
                self._options.client.crypto,
                sender,
            )
            self._check_delivery(row, message)
        except CorruptEntryError as error:
            if message.entries is None or message.delivered_ms is not None:
                # While a message waited, the topic may have removed its chunks.
                return rejected_large(message, error.reason, error.message)
            # The chunks are used up, and the topic has them still.
            return [RejectedEntry(position, None, error.reason, error.message) for position in message.positions]
        if isinstance(message.entries, list):
            # The row has a copy of them.
            message.entries.clear()
        return row if message.delivered_ms is None else with_occurrences(_with_delivery(row, message.delivered_ms))

    def _check_delivery(self, row: pa.RecordBatch, message: Assembled) -> None:
        """Check that a large message is delayed if its chunks say so, and only then, and not released
        before the time in them. The stateful stage used the time in the marker, which may be another
        one.
        """
        deliver_us = row["deliver_at"].cast(pa.int64())[0].as_py() or 0
        if not self._delays_messages or (message.delivered_ms is None and deliver_us <= 0):
            return
        if message.due_ms is None or not 0 < deliver_us <= message.due_ms * 1000:
            raise CorruptEntryError("the marker says another delivery time than the chunks", reason=MALFORMED_MARKER)

    def _due(
        self, bundles: Iterable[Decoded], outcome: DueEntries | DuePositions
    ) -> Iterator[pa.RecordBatch | list[RejectedEntry]]:
        for decoded in bundles:
            messages = _with_delivery(decoded.messages.select(schema.MESSAGES.names), outcome.delivered_ms)
            frames = outcome.frames if isinstance(outcome, DueEntries) else None
            is_cancelled = cancelled_rows(messages, self.cancels)
            if is_cancelled.any():
                yield cancelled_entries(messages.filter(pa.array(is_cancelled)), frames)
                messages = messages.filter(pa.array(~is_cancelled))
            messages, rejects = find_in_due(messages, frames, outcome.clock_ms)
            if rejects:
                yield rejects
            yield with_occurrences(messages)
            if decoded.rejects.num_rows:
                yield [self._rejected_or_cancelled(row) for row in decoded.rejects.to_pylist()]

    def _rejected_or_cancelled(self, row: dict[str, Any]) -> RejectedEntry:
        """Return the reject of a due entry that cannot be decoded; a cancel counts, so that no replay
        delivers it.
        """
        rejected = _rejected(row)
        if not is_entry_cancelled(rejected.entry, rejected.position, self.cancels):
            return rejected
        return RejectedEntry(rejected.position, rejected.entry, CANCELLED)

    def _repeated(self, outcome: DueEntries) -> Iterator[pa.RecordBatch | list[RejectedEntry]]:
        """Decode messages that repeat. Only its id ends one, so no cancel is asked for.

        Several entries may have one position, so each has its number in place of it meanwhile.
        """
        placed = placed_entries(outcome.frames)
        for decoded in self._decode_entries([(Position(0, number), entry) for number, (_, entry) in enumerate(placed)]):
            messages = _with_delivery(decoded.messages.select(schema.MESSAGES.names), outcome.delivered_ms)
            messages, rejects = find_in_due(messages, None, outcome.clock_ms)
            rejects += [_rejected(row) for row in decoded.rejects.to_pylist()]
            if rejects:
                entries = [placed[reject.position.entry_id] for reject in rejects]
                yield [
                    replace(reject, position=position, entry=entry)
                    for reject, (position, entry) in zip(rejects, entries, strict=True)
                ]
            yield _with_deliveries(messages, [position for position, _ in placed], outcome.deliveries)

    def _due_positions(self, outcome: DuePositions) -> Iterator[pa.RecordBatch | list[RejectedEntry]]:
        """Read due entries from the topic, and decode them a bundle at a time, in the order in which they
        are due.
        """
        missing: list[Position] = []
        for read in self._read_in_order(outcome.positions):
            missing += [position for position, entry in read if entry is None]
            entries = [(position, entry) for position, entry in read if entry is not None]
            for group in in_groups(entries, lambda placed: placed[1]):
                yield from self._due(self._decode_entries(group), outcome)
        if missing:
            yield [RejectedEntry(position, None, ENTRY_TRIMMED) for position in missing]

    def _read_in_order(self, positions: list[Position]) -> Iterator[list[tuple[Position, bytes | None]]]:
        """Yield the entries at positions, in the given order, in parts that memory has room for.

        A topic is read by rising positions. If there is no room for all, each half is read by itself.
        """
        entries: dict[Position, bytes | None] = {}
        size = 0
        for position, entry in zip(in_topic := sorted(positions), self._read_again(in_topic), strict=True):
            entries[position] = entry
            size += len(entry or b"")
            if size > _REREAD_BYTES and len(positions) > 1:
                break
        else:
            yield [(position, entries[position]) for position in positions]
            return
        entries.clear()
        middle = len(positions) // 2
        yield from self._read_in_order(positions[:middle])
        yield from self._read_in_order(positions[middle:])

    def _decode_entries(self, entries: list[tuple[Position, bytes]]) -> Iterator[Decoded]:
        ledger_ids = np.array([position.ledger_id for position, _ in entries], dtype=np.int64)
        entry_ids = np.array([position.entry_id for position, _ in entries], dtype=np.int64)
        raw = pa.array([entry for _, entry in entries], pa.binary())
        return decode_entries(raw, ledger_ids, entry_ids, self._topic_partition, **self._options.decoding)

    def reject_tables(self, rejected: list[RejectedEntry]) -> Iterator[pa.Table]:
        """Yield rows of ``schema.REJECTS``, in the order of positions. Entries without bytes are read
        from the topic.

        Raises:
            As ``decode``.
        """
        in_order = sorted(rejected, key=lambda reject: reject.position)
        reread_entries = self._read_again([reject.position for reject in in_order if reject.entry is None])
        complete = (
            replace(reject, entry=next(reread_entries)) if reject.entry is None else reject for reject in in_order
        )
        for group in in_groups(complete, lambda reject: reject.entry):
            yield reject_rows(group, self._topic_partition)

    def _read_again(self, positions: Iterable[Position]) -> Iterator[bytes | None]:
        return read_again(
            self._options.client,
            join_partition(self._topic_partition.topic, self._topic_partition.partition),
            positions,
            self._gone,
        )


def rejected_large(
    message: Assembled, reason: Reason, detail: str = "", entries: Iterable[Entry | None] | None = None
) -> list[RejectedEntry]:
    """Return the rejects of a large message. If it was read again, a marker may have listed entries of
    other messages, and any number of missing ones: only the known chunks are its own.

    Args:
        entries: its chunks, if those of the message were read already.
    """
    if message.entries is None:
        return [RejectedEntry(position, None, reason, detail) for position in message.known]
    chunks = message.entries if entries is None else entries
    return [
        RejectedEntry(position, entry, reason, detail)
        for position, entry in zip(message.positions, chunks, strict=True)
    ]


def _with_delivery(messages: pa.RecordBatch, delivered_ms: int) -> pa.RecordBatch:
    delivered_at = pa.repeat(pa.scalar(delivered_ms * 1000, pa.int64()), messages.num_rows).cast(schema.TIMESTAMP)
    return messages.set_column(messages.schema.get_field_index("delivered_at"), "delivered_at", delivered_at)


def _with_deliveries(
    messages: pa.RecordBatch, positions: Sequence[Position], deliveries: Sequence[Delivery]
) -> pa.RecordBatch:
    """Return messages with the properties of each delivery, and with the time when it was due.

    Args:
        positions, deliveries: of each message, by the number that it has as its entry id.
    """
    numbers = messages["entry_id"].to_pylist()
    messages = with_properties(messages, {row: deliveries[number].properties for row, number in enumerate(numbers)})
    columns = {
        "message_id": [str(positions[number]) for number in numbers],
        "ledger_id": [positions[number].ledger_id for number in numbers],
        "entry_id": [positions[number].entry_id for number in numbers],
        "deliver_at": [deliveries[number].due_ms * 1000 for number in numbers],
    }
    for name, values in columns.items():
        place = messages.schema.get_field_index(name)
        messages = messages.set_column(place, name, pa.array(values, schema.MESSAGES.field(name).type))
    return messages


def _rejected(row: dict[str, Any]) -> RejectedEntry:
    return RejectedEntry(Position(row["ledger_id"], row["entry_id"]), row["entry"], row["reason"], row["detail"])
