"""Cancels among decoded messages: see ``state.delay.cancels``. They are messages like any other, and stay rows of their own."""

from __future__ import annotations

import base64

import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.state.delay.cancels import CANCEL_PROPERTY, Cancel, parse_cancel
from ledgerlake.wire.message_id import Position


def find_cancels(messages: pa.RecordBatch) -> list[Cancel]:
    """What the messages cancel; a property that names nothing is an ordinary property."""
    properties = messages["properties"]
    if not len(properties.keys) or not pc.any(pc.equal(properties.keys, CANCEL_PROPERTY)).as_py():
        return []
    found = [_cancel(messages, row, dict(one)) for row, one in enumerate(properties.to_pylist()) if one]
    return [one for one in found if one is not None]


def key_texts(messages: pa.RecordBatch) -> pa.Array:
    """Each message's key as a cancel names it: its text, or the base64 text of a binary key; null without a key."""
    if messages["key_bytes"].null_count == messages.num_rows:
        return messages["key"]
    both = zip(messages["key"].to_pylist(), messages["key_bytes"].to_pylist(), strict=True)
    return pa.array([key_text(key, key_bytes) for key, key_bytes in both], pa.string())


def key_text(key: str | None, key_bytes: bytes | None) -> str | None:
    return key if key_bytes is None else base64.b64encode(key_bytes).decode()


def _cancel(messages: pa.RecordBatch, row: int, properties: dict[str, str]) -> Cancel | None:
    if CANCEL_PROPERTY not in properties:
        return None
    time = (
        messages["broker_timestamp"][row]
        if messages["broker_timestamp"][row].is_valid
        else messages["publish_time"][row]
    )
    position = Position(messages["ledger_id"][row].as_py(), messages["entry_id"][row].as_py())
    return parse_cancel(properties[CANCEL_PROPERTY], position, time.value // 1000)
