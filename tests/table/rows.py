"""Rows of the table for tests."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from ledgerlake.decode import schema


def rows(times_ms: list[int], first_entry: int = 0, **columns: Any) -> pa.RecordBatch:
    """Messages with these broker times, at consecutive entries."""
    row_dicts = [
        {
            "topic": "t",
            "partition": 0,
            "ledger_id": 1,
            "entry_id": first_entry + number,
            "batch_index": -1,
            "broker_timestamp": time_ms * 1000,
            "publish_time": 5_000_000,
            "late": False,
            "value": b"v" * 10,
            **columns,
        }
        for number, time_ms in enumerate(times_ms)
    ]
    return pa.RecordBatch.from_pylist(row_dicts, schema=schema.MESSAGES)
