"""Delayed messages that are due and were cancelled: they become rejects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ledgerlake.decode.codes import heads_of_runs
from ledgerlake.decode.reference import key_of
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.decode.split import entries_of
from ledgerlake.errors import CorruptEntryError
from ledgerlake.reasons import CANCELLED
from ledgerlake.schedules.cancel_messages import key_text, key_texts
from ledgerlake.wire.entry import peek_metadata
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ledgerlake.assembly.assembler import Entry
    from ledgerlake.schedules.cancels import Cancels


def cancelled_rows(messages: pa.RecordBatch, cancels: Cancels) -> NDArray[np.bool_]:
    """Return a mask of the messages that are cancelled."""
    is_cancelled = np.zeros(messages.num_rows, dtype=bool)
    if not len(cancels):
        return is_cancelled
    keys = key_texts(messages)
    rows = np.flatnonzero(
        _are_among(keys, cancels.keys)
        | _are_of_ledgers(messages["ledger_id"].to_numpy(), cancels.ledger_ids)
    )
    taken = messages.take(pa.array(rows))
    columns = [
        taken["ledger_id"],
        taken["entry_id"],
        taken["batch_index"],
        keys.take(pa.array(rows)),
    ]
    # An entry that was read again may be another one, of a topic that was created anew.
    times_us = taken["deliver_at"].cast(pa.int64())
    for row, ledger_id, entry_id, batch_index, key, time_us in zip(
        rows.tolist(), *(column.to_pylist() for column in (*columns, times_us)), strict=True
    ):
        position = Position(ledger_id, entry_id)
        is_cancelled[row] = cancels.is_cancelled(position, batch_index, key, (time_us or 0) // 1000)
    return is_cancelled


def _are_among(texts: pa.Array, known: frozenset[str]) -> NDArray[np.bool_]:
    """Return a mask of the texts that are known. A row of messages may be a single one, and cancels
    are many, so they are looked up by the texts and never gone through.
    """
    if not known:
        return np.zeros(len(texts), dtype=bool)
    # Producers choose the keys, and Arrow's hash of texts has no secret. But often keys are missing
    # or equal to the one before.
    heads = heads_of_runs(texts)
    looked_up = texts.take(pa.array(heads)).to_pylist()
    are_known = np.fromiter(map(known.__contains__, looked_up), bool, len(heads))
    return np.repeat(are_known, np.diff(heads, append=len(texts)))


def _are_of_ledgers(ledger_ids: NDArray[np.int64], known: frozenset[str]) -> NDArray[np.bool_]:
    """Return a mask of the ledgers that are known, likewise; messages are of few ledgers."""
    if not known:
        return np.zeros(len(ledger_ids), dtype=bool)
    distinct, places = np.unique(ledger_ids, return_inverse=True)
    are_known = np.array([str(ledger_id) in known for ledger_id in distinct.tolist()], dtype=bool)
    return are_known[places]


def is_entry_cancelled(
    entry: Entry | None, position: Position, cancels: Cancels, stands_at: Position | None = None
) -> bool:
    """Return whether the message of an entry is cancelled, by its metadata; of a large message, by
    its last chunk. False if the bytes are gone, or do not parse.

    The messages of a batch are unknown. So it is cancelled if one of them may be: a replay that can
    read them has no cancels.

    Args:
        stands_at: see ``Assembled``; by default its position.
    """
    if entry is None or not len(cancels):
        return False
    try:
        metadata = peek_metadata(memoryview(entry))
    except CorruptEntryError:
        return False
    if metadata.HasField("num_messages_in_batch"):
        return cancels.may_hit(position, metadata.deliver_at_time, stands_at)
    key = key_text(*key_of(metadata))
    return cancels.is_cancelled(position, -1, key, metadata.deliver_at_time, stands_at)


def cancelled_entries(messages: pa.RecordBatch, frames: Entry | None) -> list[RejectedEntry]:
    """Return one reject for each entry that has cancelled messages; for a batch the reject
    lists them.

    Args:
        messages: the cancelled messages.
        frames: the ``MESSAGE`` frames that they came in; None if only the topic has the bytes.
    """
    entries = {} if frames is None else entries_of(frames)
    columns = (messages[name].to_pylist() for name in ("ledger_id", "entry_id", "batch_index"))
    batch_indexes: dict[Position, list[int]] = {}
    for ledger_id, entry_id, batch_index in zip(*columns, strict=True):
        batch_indexes.setdefault(Position(ledger_id, entry_id), []).append(batch_index)
    return [
        RejectedEntry(position, entries.get(position), CANCELLED, of_batch(indexes))
        for position, indexes in batch_indexes.items()
    ]


def of_batch(indexes: list[int]) -> str:
    """Return a text that lists messages of a batch; none if the entry is a message."""
    return "" if indexes == [-1] else f"messages {', '.join(map(str, indexes))} of the batch"
