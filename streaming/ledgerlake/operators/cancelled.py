"""Delayed messages that are due and were cancelled: they become rejects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.decode.reference import key_of
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.decode.split import entries_of
from ledgerlake.delay.cancel_messages import key_text, key_texts
from ledgerlake.errors import CorruptEntryError
from ledgerlake.reasons import CANCELLED
from ledgerlake.wire.entry import peek_metadata
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ledgerlake.assembly.assembler import Entry
    from ledgerlake.delay.cancels import Cancels


def cancelled_rows(messages: pa.RecordBatch, cancels: Cancels) -> NDArray[np.bool_]:
    """Return a mask of the messages that are cancelled."""
    is_cancelled = np.zeros(messages.num_rows, dtype=bool)
    if not len(cancels):
        return is_cancelled
    keys = key_texts(messages)
    by_key = pc.is_in(keys, pa.array(cancels.keys, pa.string()))
    by_id = np.isin(messages["ledger_id"].to_numpy(), cancels.ledger_ids)
    for row in np.flatnonzero(by_key.to_numpy(zero_copy_only=False) | by_id).tolist():
        position = Position(messages["ledger_id"][row].as_py(), messages["entry_id"][row].as_py())
        # An entry that was read again may be another one, of a topic that was created anew.
        deliver_ms = (messages["deliver_at"][row].cast(pa.int64()).as_py() or 0) // 1000
        batch_index, key = messages["batch_index"][row].as_py(), keys[row].as_py()
        is_cancelled[row] = cancels.is_cancelled(position, batch_index, key, deliver_ms)
    return is_cancelled


def is_entry_cancelled(entry: Entry | None, position: Position, cancels: Cancels) -> bool:
    """Return whether the message of an entry is cancelled, by its metadata; of a large message, by its
    last chunk. False if the bytes are gone, or do not parse.
    """
    if entry is None or not len(cancels):
        return False
    try:
        metadata = peek_metadata(memoryview(entry))
    except CorruptEntryError:
        return False
    return cancels.is_cancelled(position, -1, key_text(*key_of(metadata)), metadata.deliver_at_time)


def cancelled_entries(messages: pa.RecordBatch, frames: Entry | None) -> list[RejectedEntry]:
    """Return one reject for each entry of which messages are cancelled; for a batch the reject
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
