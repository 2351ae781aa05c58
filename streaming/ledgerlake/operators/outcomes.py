"""Decodes outcomes into messages or rejects. Entries whose bytes are not in the outcome are read
from the topic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Reversible
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from ledgerlake.assembly.assembler import Assembled, Entry
from ledgerlake.client.topics import join_partition
from ledgerlake.decode import schema
from ledgerlake.decode.large import decode_large
from ledgerlake.decode.messages import Decoded, TopicPartition, decode_bundle, decode_entries
from ledgerlake.decode.rejects import RejectedEntry, reject_rows
from ledgerlake.decode.split import placed_entries
from ledgerlake.errors import CorruptEntryError
from ledgerlake.operators.cancelled import cancelled_entries, cancelled_rows, is_entry_cancelled
from ledgerlake.operators.outcome_types import (
    Delivery,
    DueEntries,
    DuePositions,
    Outcome,
    RejectedPositions,
)
from ledgerlake.operators.scheduled import (
    expired_chunk,
    find_in_due,
    with_occurrences,
    with_properties,
)
from ledgerlake.operators.stage_rows import in_groups
from ledgerlake.reasons import CANCELLED, ENTRY_TRIMMED, MALFORMED_MARKER, Reason
from ledgerlake.schedules.cancels import Cancels
from ledgerlake.source.reread import GoneEntries, read_again_by
from ledgerlake.wire.entry import delivery_time_ms, parse_entry
from ledgerlake.wire.message_id import MessageId, Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ledgerlake.operators.results import StageSettings

# Due entries that are read from the topic at once.
_REREAD_BYTES = 32 * 1024 * 1024

# Rejects that wait to be read from the topic together.
_MAX_TO_REREAD = 10_000


class _Due(NamedTuple):
    """A due message. ``entry`` is None if only the topic has it, ``delivery`` is None if the
    message does not repeat. ``due_ms`` is the due time in the index; an entry that is read from the
    topic must have the same time.
    """

    position: Position
    entry: bytes | None
    delivery: Delivery | None = None
    due_ms: int | None = None


class OutcomeDecoder:
    """Decodes the outcomes of one topic partition."""

    def __init__(
        self,
        topic_partition: TopicPartition,
        settings: StageSettings,
    ) -> None:
        self.cancels = Cancels()
        self._topic_partition = topic_partition
        self._options = settings.options
        self._max_message_bytes = settings.limits.max_message_bytes
        self._delays_messages = settings.delay.enabled
        self._gone = GoneEntries()
        self._to_reread: list[RejectedEntry] = []

    def decode(self, outcome: Outcome) -> Iterator[pa.RecordBatch | list[RejectedEntry]]:
        """Yield rows of ``schema.MESSAGES``, and rejects. Cancelled messages become rejects.

        Raises:
            BrokerError, TransportError: entries had to be read again and could not.
        """
        if isinstance(outcome, DueEntries) and outcome.deliveries:
            placed = placed_entries(outcome.frames)
            yield from self._with_repeated(
                [
                    _Due(*entry, delivery)
                    for entry, delivery in zip(placed, outcome.deliveries, strict=True)
                ],
                outcome,
            )
        elif isinstance(outcome, DueEntries):
            bundles = decode_bundle(
                outcome.frames,
                self._topic_partition,
                first_entry=outcome.first_entry,
                **self._options.decoding,
            )
            yield from self._due(bundles, outcome)
        elif isinstance(outcome, DuePositions):
            yield from self._due_positions(outcome)
        elif isinstance(outcome, Assembled):
            yield self._large(outcome)
            if outcome.delivered_ms is None:
                # The chunks after one that is refused leave the state too.
                deque(outcome.entries or (), maxlen=0)
        elif isinstance(outcome, RejectedPositions):
            yield [RejectedEntry(position, None, outcome.reason) for position in outcome.positions]
        else:
            yield [
                RejectedEntry(position, entry, outcome.reason)
                for position, entry in outcome.entries
            ]

    def _large(self, message: Assembled) -> pa.RecordBatch | list[RejectedEntry]:
        entries = (
            self._read_again(message.positions) if message.entries is None else message.entries
        )
        sender = None if message.key is None else (message.key.producer_name, message.key.uuid)
        # Before anything else can reject the message, since a replay has no cancels.
        if message.delivered_ms is not None and self._is_cancelled(message):
            return rejected_large(message, CANCELLED)
        try:
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
            return [
                RejectedEntry(position, None, error.reason, error.message)
                for position in message.positions
            ]
        if isinstance(message.entries, list):
            # The row has a copy of them.
            message.entries.clear()
        return (
            row
            if message.delivered_ms is None
            else with_occurrences(_with_delivery(row, message.delivered_ms))
        )

    def _is_cancelled(self, message: Assembled) -> bool:
        if not len(self.cancels):
            return False
        last = message.positions[-1]
        if message.entries is None:
            (chunk,) = self._read_again([last])
        else:
            # The entries of a delayed message can be iterated again, also from the end.
            assert isinstance(message.entries, Reversible)
            chunk = next(reversed(message.entries))
        return is_entry_cancelled(chunk, last, self.cancels, message.stands_at)

    def _check_delivery(self, row: pa.RecordBatch, message: Assembled) -> None:
        """Check that a large message is delayed if its chunks say so, and only then, and not
        released before the time in them. The stateful stage used the time in the marker, which may
        be another one.
        """
        deliver_us = row["deliver_at"].cast(pa.int64())[0].as_py() or 0
        if not self._delays_messages or (message.delivered_ms is None and deliver_us <= 0):
            return
        if message.due_ms is None or not 0 < deliver_us <= message.due_ms * 1000:
            raise CorruptEntryError(
                "the marker says another delivery time than the chunks", reason=MALFORMED_MARKER
            )

    def _due(
        self, bundles: Iterable[Decoded], outcome: DueEntries | DuePositions
    ) -> Iterator[pa.RecordBatch | list[RejectedEntry]]:
        for decoded in bundles:
            messages = _with_delivery(
                decoded.messages.select(schema.MESSAGES.names), outcome.delivered_ms
            )
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
        """Return the reject of a due entry that cannot be decoded; a cancel counts, so that no
        replay delivers it.
        """
        rejected = _rejected(row)
        if not is_entry_cancelled(rejected.entry, rejected.position, self.cancels):
            return rejected
        detail = (
            f"it, or a message in it, was cancelled, and it cannot be read: {rejected.reason} "
            f"{rejected.detail}"
        )
        return RejectedEntry(rejected.position, rejected.entry, CANCELLED, detail.strip())

    def _with_repeated(
        self, due: list[_Due], outcome: DueEntries | DuePositions
    ) -> Iterator[pa.RecordBatch | list[RejectedEntry]]:
        """Decode messages among which some repeat. Only its id ends one of these, so no cancel hits
        it.

        Several entries may have one position, so each has its number in place of it meanwhile.
        """
        repeats = np.array([each.delivery is not None for each in due], dtype=bool)
        numbered = [(Position(0, number), each.entry or b"") for number, each in enumerate(due)]
        for decoded in self._decode_entries(numbered):
            messages = _with_delivery(
                decoded.messages.select(schema.MESSAGES.names), outcome.delivered_ms
            )
            is_cancelled = cancelled_rows(_at_positions(messages, due), self.cancels)
            is_cancelled &= ~repeats[messages["entry_id"].to_numpy()]
            rejects = cancelled_entries(messages.filter(pa.array(is_cancelled)), None)
            messages, refused = find_in_due(
                messages.filter(pa.array(~is_cancelled)), None, outcome.clock_ms
            )
            rejects += refused
            rejects = [_at_position(reject, due) for reject in rejects]
            for row in decoded.rejects.to_pylist():
                judged = _rejected if repeats[row["entry_id"]] else self._rejected_or_cancelled
                position = due[row["entry_id"]].position
                rejects.append(
                    judged({**row, "ledger_id": position.ledger_id, "entry_id": position.entry_id})
                )
            if rejects:
                yield rejects
            yield with_occurrences(_with_deliveries(messages, due))

    def _due_positions(
        self, outcome: DuePositions
    ) -> Iterator[pa.RecordBatch | list[RejectedEntry]]:
        """Read due entries from the topic, and decode them a bundle at a time, in the order in
        which they are due.
        """
        missing: list[Position] = []
        for read in self._read_in_order(_known_entries(outcome)):
            missing += [each.position for each in read if each.entry is None]
            for group in in_groups(
                (each for each in read if each.entry is not None), lambda each: each.entry
            ):
                if outcome.deliveries:
                    yield from self._with_repeated(group, outcome)
                else:
                    entries = [(each.position, each.entry or b"") for each in group]
                    yield from self._due(self._decode_entries(entries), outcome)
        if missing:
            yield [RejectedEntry(position, None, ENTRY_TRIMMED) for position in missing]

    def _read_in_order(self, due: list[_Due]) -> Iterator[list[_Due]]:
        """Yield due messages with the entries that they lack, in the given order, in parts that
        memory has room for.

        A topic is read by rising positions. If there is no room for all, each half is read by
        itself. An entry that is not due when the index says so is one of another topic of that
        name.
        """
        entries: dict[Position, bytes | None] = {}
        size = 0
        in_topic = sorted(
            (each for each in due if each.entry is None), key=lambda each: each.position
        )
        read = self._read_again(each.position for each in in_topic)
        for each, entry in zip(in_topic, read, strict=True):
            entries[each.position] = entry if _is_due(entry, each.due_ms) else None
            size += len(entry or b"")
            if size > _REREAD_BYTES and len(due) > 1:
                break
        else:
            yield [
                each._replace(entry=entries[each.position]) if each.entry is None else each
                for each in due
            ]
            return
        entries.clear()
        middle = len(due) // 2
        yield from self._read_in_order(due[:middle])
        yield from self._read_in_order(due[middle:])

    def _decode_entries(self, entries: list[tuple[Position, bytes]]) -> Iterator[Decoded]:
        ledger_ids = np.array([position.ledger_id for position, _ in entries], dtype=np.int64)
        entry_ids = np.array([position.entry_id for position, _ in entries], dtype=np.int64)
        raw = pa.array([entry for _, entry in entries], pa.binary())
        return decode_entries(
            raw, ledger_ids, entry_ids, self._topic_partition, **self._options.decoding
        )

    def reject_tables(self, rejected: list[RejectedEntry]) -> Iterator[pa.Table]:
        """Yield rows of ``schema.REJECTS``. Entries without bytes are read from the topic, many
        together. So a later call, or ``last_rejects``, may yield their rows.

        Raises:
            As ``decode``.
        """
        self._to_reread += [reject for reject in rejected if reject.entry is None]
        yield from self._reject_rows([reject for reject in rejected if reject.entry is not None])
        if len(self._to_reread) >= _MAX_TO_REREAD:
            yield from self.last_rejects()

    def last_rejects(self) -> Iterator[pa.Table]:
        """Yield the rows of the rejects that were kept back, in the order of positions.

        Raises:
            As ``decode``.
        """
        to_reread, self._to_reread = self._to_reread, []
        in_order = sorted(to_reread, key=lambda reject: reject.position)
        # In the place of an entry that the topic no longer has, there may be one of another topic
        # of that name.
        entries = self._read_again(
            [reject.position for reject in in_order if reject.reason != ENTRY_TRIMMED]
        )
        yield from self._reject_rows(
            reject if reject.reason == ENTRY_TRIMMED else replace(reject, entry=next(entries))
            for reject in in_order
        )

    def _reject_rows(self, rejected: Iterable[RejectedEntry]) -> Iterator[pa.Table]:
        for group in in_groups(rejected, lambda reject: reject.entry):
            yield reject_rows(group, self._topic_partition)

    def _read_again(self, positions: Iterable[Position]) -> Iterator[bytes | None]:
        return read_again_by(
            self._options,
            join_partition(self._topic_partition.topic, self._topic_partition.partition),
            positions,
            self._gone,
        )


class DecodedSink(Protocol):
    """Takes the messages and rejects of one topic partition. The rows that its methods return go on
    in the stream.
    """

    decoder: OutcomeDecoder

    def take_messages(self, messages: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Take rows of ``schema.MESSAGES``."""

    def take_rejects(self, rejected: list[RejectedEntry]) -> Iterable[pa.RecordBatch]:
        """Take entries that are rejected. If they have no bytes, the sink reads them again."""

    def take_reject_rows(self, rejects: pa.Table) -> Iterable[pa.RecordBatch]:
        """Take rows of ``schema.REJECTS``."""

    def make_place(self) -> None:
        """Make a place behind the last message for one that the stateful stage completes."""


def decode_into(sink: DecodedSink, outcome: Outcome) -> Iterator[pa.RecordBatch]:
    """Hand the messages and rejects of an outcome to a sink; yield the rows that go on.

    Raises:
        As ``OutcomeDecoder.decode``.
    """
    for decoded in sink.decoder.decode(outcome):
        if isinstance(decoded, list):
            yield from sink.take_rejects(decoded)
        else:
            yield from sink.take_messages(decoded)


def rejected_large(
    message: Assembled,
    reason: Reason,
    detail: str = "",
    entries: Iterable[Entry | None] | None = None,
) -> list[RejectedEntry]:
    """Return the rejects of a large message. If it was read again, a marker may have listed entries
    of other messages, and any number of missing ones: only the known chunks are its own.

    Args:
        entries: its chunks, if the iteration of ``message.entries`` has begun.
    """
    if message.entries is None:
        return [RejectedEntry(position, None, reason, detail) for position in message.known]
    chunks = message.entries if entries is None else entries
    return [
        RejectedEntry(position, entry, reason, detail)
        for position, entry in zip(message.positions, chunks, strict=True)
    ]


def _with_delivery(messages: pa.RecordBatch, delivered_ms: int) -> pa.RecordBatch:
    delivered_at = pa.repeat(pa.scalar(delivered_ms * 1000, pa.int64()), messages.num_rows).cast(
        schema.TIMESTAMP
    )
    return messages.set_column(
        messages.schema.get_field_index("delivered_at"), "delivered_at", delivered_at
    )


def _known_entries(outcome: DuePositions) -> list[_Due]:
    """Return due messages with the entries that need not be read: any message may have been kept in
    the state, and occurrences of one message share its entry.
    """
    known = dict(placed_entries(outcome.frames) if outcome.deliveries else [])
    deliveries = outcome.deliveries or [None] * len(outcome.positions)
    return [
        _Due(position, known.get(position), delivery, due_ms)
        for position, due_ms, delivery in zip(
            outcome.positions, outcome.due_ms, deliveries, strict=True
        )
    ]


def _is_due(entry: bytes | None, due_ms: int | None) -> bool:
    """Return whether there is an entry that is due at a time, or is damaged: the decoder rejects
    that.
    """
    try:
        return entry is not None and delivery_time_ms(parse_entry(entry)) == due_ms
    except CorruptEntryError:
        return True


def _at_position(reject: RejectedEntry, due: Sequence[_Due]) -> RejectedEntry:
    """Return the reject of an entry that has its number as the entry id."""
    of_entry = due[reject.position.entry_id]
    return replace(reject, position=of_entry.position, entry=reject.entry or of_entry.entry)


def _at_positions(messages: pa.RecordBatch, due: Sequence[_Due]) -> pa.RecordBatch:
    """Return messages of entries that have their numbers as entry ids, with the positions
    of these.
    """
    numbers = zip(
        messages["entry_id"].to_pylist(), messages["batch_index"].to_pylist(), strict=True
    )
    placed = [(due[number].position, batch_index) for number, batch_index in numbers]
    ids = [
        MessageId(position.ledger_id, position.entry_id, batch_index)
        for position, batch_index in placed
    ]
    columns: dict[str, Sequence[Any]] = {
        "message_id": [str(message_id) for message_id in ids],
        "ledger_id": [message_id.ledger_id for message_id in ids],
        "entry_id": [message_id.entry_id for message_id in ids],
    }
    return _with_columns(messages, columns)


def _with_deliveries(messages: pa.RecordBatch, due: Sequence[_Due]) -> pa.RecordBatch:
    """Return messages of entries that have their numbers as entry ids, with the positions of these;
    those that repeat with the properties of the delivery, and with the time when it was due.
    """
    deliveries = [due[number].delivery for number in messages["entry_id"].to_pylist()]
    own_us = messages["deliver_at"].cast(pa.int64()).to_pylist()
    times_us = [
        time_us if delivery is None else delivery.due_ms * 1000
        for time_us, delivery in zip(own_us, deliveries, strict=True)
    ]
    added = {
        row: delivery.properties for row, delivery in enumerate(deliveries) if delivery is not None
    }
    return _with_columns(
        with_properties(_at_positions(messages, due), added), {"deliver_at": times_us}
    )


def _with_columns(messages: pa.RecordBatch, columns: Mapping[str, Sequence[Any]]) -> pa.RecordBatch:
    for name, values in columns.items():
        place = messages.schema.get_field_index(name)
        messages = messages.set_column(
            place, name, pa.array(values, schema.MESSAGES.field(name).type)
        )
    return messages


def _rejected(row: dict[str, Any]) -> RejectedEntry:
    return RejectedEntry(
        Position(row["ledger_id"], row["entry_id"]), row["entry"], row["reason"], row["detail"]
    )
