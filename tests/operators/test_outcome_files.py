"""What the stateful stage of a pipeline does with its outcomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.assembly.assembler import Assembled
from ledgerlake.assembly.rules import Limits
from ledgerlake.operators.outcome_files import OutcomeFiles
from ledgerlake.operators.results import BatchSettings, TaskSettings
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.options.source_options import parse_options
from ledgerlake.stored.places import Place
from ledgerlake.wire.message_id import Position
from tests.operators.stage import SOURCE
from tests.pipeline_tables import messages_table

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = parse_options({"service.url": "pulsar://nowhere:1", "topic": "t"})


def test_the_chunks_after_one_that_is_gone_leave_the_state_too(tmp_path: Path) -> None:
    settings = TaskSettings((messages_table(tmp_path),), Place(str(tmp_path)), Limits(), DelayOptions(), OPTIONS)
    chunks = iter([None, b"second", b"third"])
    positions = tuple(Position(7, number) for number in range(3))
    OutcomeFiles(SOURCE, settings, BatchSettings(0)).take(Assembled(positions, chunks))
    assert list(chunks) == []
