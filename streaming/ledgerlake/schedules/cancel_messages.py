"""Finds cancels by key and message id among decoded messages (see ``schedules.cancels``). The
messages that hold them are written like any other. ``operators.scheduled`` finds schedules.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.schedules.cancels import Cancel, cancel_of
from ledgerlake.wire.limits import MAX_TASK_CANCEL_BYTES, MAX_TASK_CANCELS
from ledgerlake.wire.message_id import Position
from ledgerlake.wire.schedules import CANCEL_PROPERTY

if TYPE_CHECKING:
    from collections.abc import Iterator


def find_cancels(messages: pa.RecordBatch) -> Iterator[Cancel]:
    """Yield the cancels by key and message id that messages ask for; a property that names no
    target is an ordinary property.

    The cancel of a message without a known time has the time 0 (1970).
    """
    rows = rows_with_property(messages["properties"], [CANCEL_PROPERTY])
    taken = messages.take(pa.array(rows, pa.int64()))
    columns = [taken[name].to_pylist() for name in ("ledger_id", "entry_id", "properties")]
    for time_ms, ledger_id, entry_id, pairs in zip(stored_times_ms(taken), *columns, strict=True):
        cancel = cancel_of(dict(pairs), Position(ledger_id, entry_id), time_ms)
        if cancel is not None and cancel.by != "schedule":
            yield cancel


def rows_with_property(properties: pa.MapArray, names: list[str]) -> list[int]:
    """Return the rows that have a property of one of some names."""
    if not len(properties.keys):
        return []
    places = np.flatnonzero(
        pc.is_in(properties.keys, pa.array(names)).to_numpy(zero_copy_only=False)
    )
    rows = np.unique(np.searchsorted(properties.offsets.to_numpy(), places, "right") - 1)
    kept: list[int] = rows[(rows >= 0) & (rows < len(properties))].tolist()
    return kept


def stored_times_ms(messages: pa.RecordBatch) -> list[int]:
    """Return the time when each message was stored: the broker's, else the producer's, else 0
    (1970).
    """
    times = pc.coalesce(messages["broker_timestamp"], messages["publish_time"]).cast(pa.int64())
    return [(time_us or 0) // 1000 for time_us in times.to_pylist()]


def key_texts(messages: pa.RecordBatch) -> pa.Array:
    """Return each message's key as a cancel names it: its text, or the base64 text of a binary key;
    null without a key.
    """
    if messages["key_bytes"].null_count == messages.num_rows:
        return messages["key"]
    keys = zip(messages["key"].to_pylist(), messages["key_bytes"].to_pylist(), strict=True)
    return pa.array([key_text(key, key_bytes) for key, key_bytes in keys], pa.string())


def key_text(key: str | None, key_bytes: bytes | None) -> str | None:
    return key if key_bytes is None else base64.b64encode(key_bytes).decode()


class TaskCancels:
    """The cancels that one task passes on: each once, a bounded number of bounded size."""

    def __init__(self) -> None:
        self._accepted: set[Cancel] = set()
        self._target_bytes = 0
        self._refused: Position | None = None

    def take(self, messages: pa.RecordBatch) -> tuple[list[Cancel], list[Position]]:
        """Return the messages' cancels that are new, and the entries of cancels beyond the limits.

        Entries come in order, in one batch of messages or in several; each refused entry is
        returned once.
        """
        accepted: list[Cancel] = []
        refused: list[Position] = []
        for cancel in find_cancels(messages):
            if cancel in self._accepted:
                continue
            target_bytes = self._target_bytes + len(cancel.target.encode())
            if len(self._accepted) < MAX_TASK_CANCELS and target_bytes <= MAX_TASK_CANCEL_BYTES:
                self._accepted.add(cancel)
                self._target_bytes = target_bytes
                accepted.append(cancel)
            elif cancel.position != self._refused:
                self._refused = cancel.position
                refused.append(cancel.position)
        return accepted, refused
