"""A message of a reject as an entry of its own is decoded to what it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition, decode_entries
from ledgerlake.decode.single_entry import single_entries
from ledgerlake.wire.entry import encode_entry
from tests.entries import metadata


def decoded(entry: bytes) -> pa.RecordBatch:
    ids = np.zeros(1, dtype=np.int64)
    (part,) = decode_entries(pa.array([entry], pa.binary()), ids, ids, TopicPartition("t", -1))
    return part.messages.select(schema.MESSAGES.names)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"publish_time": 2**62},
        {"event_time": 2**63, "publish_time": 2**64 - 1, "sequence_id": 2**64 - 1},
        {
            "properties": [
                {"key": "ledgerlake.event_time", "value": "5"},
                {"key": "a", "value": "b"},
            ]
        },
        {
            "sequence_id": 2**63,
            "properties": [{"key": "ledgerlake.sequence_id", "value": f"{2**63 + 1}"}],
        },
        {
            "sequence_id": 2**63,
            "properties": [{"key": "ledgerlake.sequence_id", "value": "not a number"}],
        },
    ],
)
def test_numbers_that_no_column_can_hold_are_what_they_were(fields: dict[str, Any]) -> None:
    once = decoded(encode_entry(metadata(**fields), b"value"))
    (entry,) = single_entries(once)
    assert decoded(entry).to_pylist() == once.to_pylist()
