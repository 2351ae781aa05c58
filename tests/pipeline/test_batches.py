"""What a micro-batch is told before it begins."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from ledgerlake.errors import TableError
from ledgerlake.pipeline import batches
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


def test_the_tables_of_a_run_are_recorded_once_they_have_its_first_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    components = MagicMock()
    components.checkpoint.log.has_committed.return_value = False
    components.checkpoint.log.record.return_value = SimpleNamespace(ranges={}, with_messages=())
    recorded = components.start.save_selected
    monkeypatch.setattr(batches, "moved_cursors", lambda *_: {})
    writer = BatchWriter("s", components, threading.Event(), lambda _result: None)
    components.sink.write.side_effect = TableError("full")
    with pytest.raises(TableError):
        writer.write(MagicMock(), 0)
    recorded.assert_not_called()
    components.sink.write.side_effect = None
    for batch_id in range(2):
        writer.write(MagicMock(), batch_id)
    recorded.assert_called_once_with()
