"""The sink commits what the tasks of a micro-batch wrote, if this process still owns the stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable, write_deltalake

from ledgerlake.decode import schema
from ledgerlake.errors import OwnershipError
from ledgerlake.pipeline.commit import DeltaSink
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_record import BatchRecord
from ledgerlake.table.delta_table import Table

if TYPE_CHECKING:
    from pathlib import Path

_RANGE = {"t": {"start": {"ledger": 1, "entry": 0}, "end": {"ledger": 1, "entry": 5}}}


class Frame:
    """The rows of a micro-batch whose tasks wrote nothing."""

    def __init__(self) -> None:
        context = SimpleNamespace(setLocalProperty=lambda _name, _value: None)
        self.sparkSession = SimpleNamespace(sparkContext=context)

    def collect(self) -> list[Any]:
        return []


def table(path: Path, columns: Any) -> Table:
    write_deltalake(str(path), columns.empty_table())
    return Table(Place(str(path)), columns)


def taken_over() -> None:
    raise OwnershipError("another process has taken over")


def test_a_process_that_lost_the_stream_while_its_tasks_ran_commits_nothing(tmp_path: Path) -> None:
    sink = DeltaSink(table(tmp_path / "messages", schema.MESSAGES), table(tmp_path / "rejects", schema.REJECTS))
    batch = BatchRecord("s", "ledgerlake:s:q", 0, 1, _RANGE)
    frame: Any = Frame()
    with pytest.raises(OwnershipError):
        sink.write(frame, batch, None, taken_over)
    assert DeltaTable(str(tmp_path / "messages")).version() == 0
    sink.write(frame, batch, None, lambda: None)
    assert DeltaTable(str(tmp_path / "messages")).version() == 1
