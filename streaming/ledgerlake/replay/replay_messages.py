"""Decodes rejects as the pipeline would now: their entries, or the chunks of a large message.

Only messages that may be delivered come out: they are due, have not expired, do not repeat, and
were rejected when they were to be delivered: when they were due, or, without ``[delay] enabled``,
when they came. A delayed message that was rejected before has never waited, so nobody knows whether
it was cancelled or replaced. A delayed message gets the time of the replay as that of its delivery.

Messages are judged by the rules of a run. So one with a bad schedule stays a reject; in a batch it
becomes one of its own beside the others.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.decode import schema
from ledgerlake.decode.large import decode_large
from ledgerlake.decode.messages import decode_entries
from ledgerlake.decode.payloads import process_entry
from ledgerlake.decode.single_entry import chunks_of
from ledgerlake.errors import CorruptEntryError, DecryptionError
from ledgerlake.operators.schedule_events import ScheduleEvents
from ledgerlake.operators.scheduled import (
    find_in_due,
    find_in_messages,
    refusal_of_delayed,
    refusal_of_large,
)
from ledgerlake.reasons import (
    PAYLOAD_PROCESSOR,
    REASONS,
    TOO_LARGE,
)
from ledgerlake.replay.replay_rejects import batch_index_of
from ledgerlake.runtime.plugins import load
from ledgerlake.schedules.cancel_messages import rows_with_property
from ledgerlake.wire.entry import peek_metadata
from ledgerlake.wire.message_id import MessageId, Position
from ledgerlake.wire.schedules import CRON_PROPERTY, EVERY_PROPERTY, OCCURRENCE_PROPERTY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from ledgerlake.decode.messages import BatchRange, TopicPartition
    from ledgerlake.decode.rejects import RejectedEntry
    from ledgerlake.options.config import Config
    from ledgerlake.options.source_options import SourceOptions


# Entries that may take so much memory when they are decoded are decoded together.
_PLAIN_BYTES = 64 * 1024 * 1024

_Reject = dict[str, Any]
_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)


@dataclass(frozen=True)
class Decoded:
    """The messages of rejects that may be delivered, and for each message which of the rejects it
    comes from. ``refused`` are the messages that a run rejects for their schedules, likewise.
    """

    messages: pa.RecordBatch
    numbers: NDArray[np.int64]
    refused: list[tuple[int, RejectedEntry]] = field(default_factory=list)


def by_plain_size(rejects: list[_Reject]) -> Iterator[list[_Reject]]:
    """Yield the rejects in parts that can be decoded together; rejects of one entry stay
    together.
    """
    part: list[_Reject] = []
    part_bytes = 0
    for _, of_entry in groupby(sorted(rejects, key=_position), key=_position):
        same = list(of_entry)
        size_bytes = _plain_bytes(same[0]["entry"]) * len(same)
        if part and part_bytes + size_bytes > _PLAIN_BYTES:
            yield part
            part, part_bytes = [], 0
        part += same
        part_bytes += size_bytes
    if part:
        yield part


def _position(reject: _Reject) -> tuple[int, int]:
    return reject["ledger_id"], reject["entry_id"]


def _plain_bytes(entry: bytes) -> int:
    """Return how many bytes an entry has, or claims to have when it is decompressed."""
    try:
        return max(len(entry), peek_metadata(memoryview(entry)).uncompressed_size)
    except CorruptEntryError:
        return len(entry)


def messages_of_entries(
    config: Config,
    rejects: list[_Reject],
    source: TopicPartition,
    partly: Mapping[Position, BatchRange],
) -> Decoded:
    """Return the messages of entries that can be decoded and may be delivered.

    Args:
        partly: the entries that are partly in the stream, with their messages in it. A reject has
            the whole entry.
    """
    entries, bad = [], set[int]()
    for number, reject in enumerate(rejects):
        try:
            entries.append(_processed(config.source, reject))
        except CorruptEntryError:
            entries.append(reject["entry"])
            bad.add(number)
    raw = pa.array(entries, pa.binary())
    # Several rejects may be of one entry, so each gets a number of its own for a while.
    ids = np.arange(len(rejects))
    decoding = config.source.decoding
    parts = [schema.MESSAGES.empty_table()]
    for part in decode_entries(
        raw, np.zeros(len(rejects), dtype=np.int64), ids, source, **decoding
    ):
        parts.append(pa.Table.from_batches([part.messages.select(schema.MESSAGES.names)]))
        bad.update(part.rejects["entry_id"].to_pylist())
    messages = pa.concat_tables(parts)
    messages = messages.filter(pa.array(_are_read(messages, rejects, partly)))
    messages = _with_own_indexes(messages, rejects)
    messages, refused = _without_refused(config, messages, rejects)
    numbers = messages["entry_id"].to_numpy()
    bad.update(numbers[_have_one_position(messages)].tolist())
    if config.delay.enabled:
        bad.update(numbers[_early(messages) | _repeat(messages)].tolist())
        delayed = set(numbers[messages["deliver_at"].is_valid().to_numpy()].tolist())
        bad.update(
            number
            for number in delayed
            if _may_precede_due(config.source, rejects[number])
            or refusal_of_delayed(rejects[number]["entry"])
        )
    is_whole = ~np.isin(numbers, [*bad])
    messages, numbers = messages.filter(pa.array(is_whole)), numbers[is_whole]
    messages = _delivered(
        config, _in_place(messages, [rejects[number] for number in numbers.tolist()])
    )
    (batch,) = messages.combine_chunks().to_batches() or [
        pa.RecordBatch.from_pylist([], schema.MESSAGES)
    ]
    return Decoded(batch, numbers, refused)


def _without_refused(
    config: Config, messages: pa.Table, rejects: list[_Reject]
) -> tuple[pa.Table, list[tuple[int, RejectedEntry]]]:
    """Return the messages without the ones that a run rejects for their schedules when it has
    decoded them, and these as rejects, each with the number of the one that it comes from. One that
    has expired is the only message of its entry.

    Args:
        messages: they have the numbers of their rejects as entry ids.
    """
    if not config.delay.enabled:
        return messages, []
    is_delayed = messages["deliver_at"].is_valid()
    at_once = messages.filter(pc.invert(is_delayed)).combine_chunks().to_batches()
    due = messages.filter(is_delayed).combine_chunks().to_batches()
    judged = [
        find_in_messages(batch, None, ScheduleEvents(sys.maxsize), delays_messages=True)
        for batch in at_once
    ] + [find_in_due(batch, None, _now_us() // 1000) for batch in due]
    parts = []
    refused: list[tuple[int, RejectedEntry]] = []
    for kept, bad in judged:
        parts.append(pa.Table.from_batches([kept]))
        for reject in bad:
            number = reject.position.entry_id
            entry = reject.entry or rejects[number]["entry"]
            position = Position(*_position(rejects[number]))
            refused.append((number, replace(reject, position=position, entry=entry)))
    if not refused:
        return messages, []
    order = [("entry_id", "ascending"), ("batch_index", "ascending")]
    return pa.concat_tables(parts).sort_by(order), refused


def _are_read(
    messages: pa.Table, rejects: list[_Reject], partly: Mapping[Position, BatchRange]
) -> NDArray[np.bool_]:
    """Return a mask of the messages that are in the stream.

    Args:
        messages: they have the numbers of their rejects as entry ids.
    """
    are_read = np.ones(messages.num_rows, dtype=bool)
    numbers, batch_indexes = (messages[name].to_numpy() for name in ("entry_id", "batch_index"))
    for position, part in partly.items():
        of_entry = [
            number
            for number, reject in enumerate(rejects)
            # A message that is a reject by itself was read.
            if Position(*_position(reject)) == position and _is_of_entry(reject)
        ]
        are_read &= ~np.isin(numbers, of_entry) | part.includes(batch_indexes)
    return are_read


def _with_own_indexes(messages: pa.Table, rejects: list[_Reject]) -> pa.Table:
    """Return messages in which one that is a reject by itself has its place in its batch again.

    Args:
        messages: they have the numbers of their rejects as entry ids.
    """
    of_rejects = [batch_index_of(reject["message_id"]) for reject in rejects]
    pairs = zip(messages["entry_id"].to_pylist(), messages["batch_index"].to_pylist(), strict=True)
    indexes = [of_entry if of_rejects[n] < 0 else of_rejects[n] for n, of_entry in pairs]
    return _with(messages, "batch_index", pa.array(indexes, pa.int32()))


def _is_of_entry(reject: _Reject) -> bool:
    return batch_index_of(reject["message_id"]) < 0


def _processed(source: SourceOptions, reject: _Reject) -> bytes:
    """Return the entry of a reject after the user's function, if the entry was rejected before the
    function had returned its messages.

    Raises:
        CorruptEntryError: the function failed or found no message, or the one that failed is no
            longer there: nothing else knows the format.
    """
    entry: bytes = reject["entry"]
    if source.message_payload_processor is None and reject["reason"] == PAYLOAD_PROCESSOR:
        raise CorruptEntryError("there is no function to read it", reason=PAYLOAD_PROCESSOR)
    if source.message_payload_processor is None or REASONS[reject["reason"]].is_of_a_table:
        return entry
    if reject["reason"] == TOO_LARGE and not peek_metadata(memoryview(entry)).compression:
        # The function has returned the messages, together too large.
        return entry
    place = reject["ledger_id"], reject["entry_id"]
    processed = process_entry(
        load(source.message_payload_processor), memoryview(entry), *place, **source.decoding
    )
    if processed == b"":
        raise CorruptEntryError("the function found no message", reason=PAYLOAD_PROCESSOR)
    return entry if processed is None else processed


def large_message(
    config: Config, chunks: list[_Reject], source: TopicPartition
) -> pa.RecordBatch | None:
    """Return the large message of all of its chunks, or of the entry that has it whole; None if it
    cannot be joined, or must not be delivered.
    """
    if REASONS[chunks[0]["reason"]].is_of_a_table:
        return _whole_message(config, chunks[:1], source)
    if any(
        refusal_of_large(chunk["entry"], delays_messages=config.delay.enabled) for chunk in chunks
    ):
        return None
    ordered = sorted(
        chunks, key=lambda chunk: int(peek_metadata(memoryview(chunk["entry"])).chunk_id)
    )
    first = peek_metadata(memoryview(ordered[0]["entry"]))
    try:
        message = decode_large(
            [chunk["entry"] for chunk in ordered],
            tuple(Position(chunk["ledger_id"], chunk["entry_id"]) for chunk in ordered),
            source,
            config.chunks.max_message_bytes,
            config.source.client.crypto,
            (first.producer_name, first.uuid),
        )
    except (CorruptEntryError, DecryptionError):
        return None
    rows = pa.Table.from_batches([message])
    is_delayed = config.delay.enabled and rows["deliver_at"].null_count == 0
    if is_delayed and (
        _early(rows).any()
        or find_in_due(message, None, _now_us() // 1000)[1]
        or any(REASONS[chunk["reason"]].may_precede_due for chunk in chunks)
    ):
        return None
    (batch,) = _delivered(config, rows).to_batches()
    return batch


def _whole_message(
    config: Config, reject: list[_Reject], source: TopicPartition
) -> pa.RecordBatch | None:
    """Return the large message of a reject that has it whole."""
    messages = messages_of_entries(config, reject, source, {}).messages
    if not messages.num_rows:
        return None
    chunk_count, first_chunk_id = chunks_of(peek_metadata(memoryview(reject[0]["entry"])))
    for name, value in (("chunk_count", chunk_count), ("first_chunk_id", first_chunk_id)):
        messages = _with(messages, name, pa.array([value], schema.MESSAGES.field(name).type))
    return messages


def _delivered(config: Config, messages: pa.Table) -> pa.Table:
    """Return messages that are due with the time of their delivery."""
    if not config.delay.enabled or messages["deliver_at"].null_count == messages.num_rows:
        return messages
    now, never = pa.scalar(_now_us(), pa.int64()), pa.scalar(None, pa.int64())
    delivered = pc.if_else(messages["deliver_at"].is_valid(), now, never)
    return _with(messages, "delivered_at", delivered.cast(schema.TIMESTAMP))


def _early(messages: pa.Table) -> NDArray[np.bool_]:
    """Return a mask of the messages that are not due yet."""
    is_early: NDArray[np.bool_] = (
        pc.fill_null(messages["deliver_at"].cast(pa.int64()), 0).to_numpy() > _now_us()
    )
    return is_early


def _may_precede_due(source: SourceOptions, reject: _Reject) -> bool:
    """Return whether a delayed message may have been rejected before it was due: as all that the
    user's function was to read.
    """
    reason = REASONS[reject["reason"]]
    has_function = source.message_payload_processor is not None
    return reason.may_precede_due or (has_function and not reason.is_of_a_table)


def _have_one_position(messages: pa.Table) -> NDArray[np.bool_]:
    """Return a mask of the occurrences of messages that repeat. All occurrences of a message have
    its position, by which a replay knows messages.
    """
    return _are_delayed_with(messages, [OCCURRENCE_PROPERTY])


def _repeat(messages: pa.Table) -> NDArray[np.bool_]:
    """Return a mask of the messages that repeat: a replay cannot deliver their occurrences."""
    return _are_delayed_with(messages, [CRON_PROPERTY, EVERY_PROPERTY])


def _are_delayed_with(messages: pa.Table, names: list[str]) -> NDArray[np.bool_]:
    """Return a mask of the delayed messages with one of some properties."""
    mask = np.zeros(messages.num_rows, dtype=bool)
    mask[rows_with_property(messages["properties"].combine_chunks(), names)] = True
    is_delayed: NDArray[np.bool_] = messages["deliver_at"].is_valid().to_numpy()
    return mask & is_delayed


def _now_us() -> int:
    return time.time_ns() // 1000


def _in_place(messages: pa.Table, rejects: list[_Reject]) -> pa.Table:
    """Return messages with the positions of the rejects that they come from."""
    indexes = messages["batch_index"].to_pylist()
    ids = [
        MessageId(reject["ledger_id"], reject["entry_id"], index)
        for reject, index in zip(rejects, indexes, strict=True)
    ]
    columns: dict[str, list[Any]] = {
        "ledger_id": [reject["ledger_id"] for reject in rejects],
        "entry_id": [reject["entry_id"] for reject in rejects],
        "message_id": [str(message_id) for message_id in ids],
    }
    for name, values in columns.items():
        messages = _with(messages, name, pa.array(values, schema.MESSAGES.field(name).type))
    return messages


def _with(messages: _Rows, name: str, column: pa.Array) -> _Rows:
    return messages.set_column(
        messages.schema.get_field_index(name), schema.MESSAGES.field(name), column
    )
