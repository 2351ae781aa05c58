"""Which messages of a topic may be the latest of their keys."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ledgerlake.verify.latest_rows import CountingMessages
from ledgerlake.verify.latest_rule import REPEATS_US
from tests.operators.test_scheduled import decoded, frame


def with_key(frame: bytes) -> pa.RecordBatch:
    messages = decoded(frame)
    place = messages.schema.get_field_index("key")
    return messages.set_column(place, "key", pa.array(["k"]))


def test_a_message_that_repeats_is_later_than_any_other_and_uncertain() -> None:
    counting = CountingMessages(0, np.empty((0, 2), dtype=np.int64))
    counting.take(with_key(frame(3, 9)), were_delayed=True)
    assert not counting.latest.last_of_each()["is_uncertain"].any()
    counting.take(with_key(frame(2, 9)), were_delayed=True, repeat=True)
    (last,) = counting.latest.last_of_each()
    assert (last["entry_id"], last["time_us"], bool(last["is_uncertain"])) == (2, REPEATS_US, True)
