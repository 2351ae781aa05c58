"""What a micro-batch is told before it begins."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ledgerlake.pipeline.batches import BatchWriter


@pytest.mark.parametrize(
    ("batch_id", "last", "with_state"),
    [
        pytest.param(0, None, [], id="a query begins without state"),
        pytest.param(7, None, None, id="the state of an earlier run is not known"),
        pytest.param(7, 6, ["t"], id="the micro-batch before told it"),
    ],
)
def test_tasks_are_told_which_topic_partitions_have_state(
    batch_id: int, last: int | None, with_state: list[str] | None
) -> None:
    components: Any = SimpleNamespace(wakeups=SimpleNamespace(topic_partitions=lambda: ["t"]))
    writer = BatchWriter("s", components, threading.Event(), lambda _result: None)
    writer._last = last
    assert writer._with_state(batch_id) == with_state
