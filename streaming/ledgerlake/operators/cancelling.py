"""Cancels among decoded messages: see ``state.delay.cancels``. They are messages like any other, and stay rows of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.compute as pc

from ledgerlake.state.delay.cancels import CANCEL_PROPERTY, Cancel, parse_cancel
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    import pyarrow as pa


def find_cancels(messages: pa.RecordBatch) -> list[Cancel]:
    """What the messages cancel; a property that names nothing is an ordinary property."""
    properties = messages["properties"]
    if not len(properties.keys) or not pc.any(pc.equal(properties.keys, CANCEL_PROPERTY)).as_py():
        return []
    found = [_cancel(messages, row, dict(one)) for row, one in enumerate(properties.to_pylist()) if one]
    return [one for one in found if one is not None]


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
