"""Messages that are due, and cancels by key and by id."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from ledgerlake.decode import schema
from ledgerlake.operators.cancelled import cancelled_rows
from ledgerlake.schedules.cancels import Cancels, parse_cancel
from ledgerlake.wire.message_id import Position

DUE_US = 1_700_000_000_000_000


@pytest.mark.parametrize("seed", range(20))
def test_a_message_is_cancelled_by_its_key_or_its_id_wherever_it_is_in_the_batch(seed: int) -> None:
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = [
        {
            "ledger_id": rng.choice([7, 7, 8]),
            "entry_id": entry,
            "batch_index": -1,
            "key": rng.choice([None, None, "", "a", "b"]),
            "deliver_at": DUE_US,
        }
        for entry in range(rng.choice([0, 1, 2, 30]))
    ]
    columns = {name: [row.get(name) for row in rows] for name in schema.MESSAGES.names}
    messages = pa.RecordBatch.from_pydict(columns, schema.MESSAGES)
    targets = ["key=a", "id=7:3", "id=8:0", "id=9:1", "key=other"]
    hit = rng.sample(targets, rng.randrange(4))
    cancels = [parse_cancel(target, Position(9, 9), 0) for target in hit]
    assert cancelled_rows(messages, Cancels(filter(None, cancels))).tolist() == [
        f"key={row['key']}" in hit or f"id={row['ledger_id']}:{row['entry_id']}" in hit
        for row in rows
    ]
