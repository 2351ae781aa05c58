"""The first stage and the stateful stage, if what producers send grows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.chunks import chunk_entries
from tests.growth.counting import Case, check
from tests.operators.test_shared_files import TIME_MS, A, batch_in, entry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _chunks_without_the_first(n: int) -> Callable[[], Mapping[str, int]]:
    entries = []
    for number in range(n):
        _, last = chunk_entries(b"ab", 2, uuid=f"orphan-{number}", publish_time=5)
        entries += [entry(b"plain", TIME_MS + 2 * number), last]

    def work() -> Mapping[str, int]:
        with tempfile.TemporaryDirectory() as folder:
            results = batch_in(Path(folder), is_delay_enabled=True).run({A: entries}, None)
        written = results[A].written
        assert written.reasons == {"chunk_orphan": n}
        return {"files": len(written.tables["messages"].files)}

    return work


CASES = [
    Case("ingest, last chunks without a first one", _chunks_without_the_first, constant=("files",)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_work_of_a_stage_grows_with_its_list_at_most(case: Case) -> None:
    check(case)
