"""The first stage and the stateful stage, if what producers send grows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.chunks import chunk_entries
from tests.growth.counting import Case, check
from tests.operators.test_shared_files import TIME_MS, A, batch_in, entry, topic

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


def _quiet_topics(n: int) -> Callable[[], Mapping[str, int]]:
    topics = {topic(f"quiet-{number}"): [entry(b"v")] for number in range(n)}

    def work() -> Mapping[str, int]:
        with tempfile.TemporaryDirectory() as folder:
            batch = batch_in(Path(folder))
            return {"files": len(batch.files_of(batch.run(topics, [])))}

    return work


def _messages_over_two_ranges(n: int) -> Callable[[], Mapping[str, int]]:
    """Prepare large messages that are incomplete between two micro-batches, all at one time."""
    chunks = [chunk_entries(b"ab", 2, uuid=f"p-{number}", publish_time=TIME_MS + number) for number in range(n)]

    def work() -> Mapping[str, int]:
        with tempfile.TemporaryDirectory() as folder:
            batch = batch_in(Path(folder))
            _, result = batch.run_batches(A, [[first for first, _ in chunks], [last for _, last in chunks]])
            assert len(batch.values_of(result)) == n
            return {"files": len(result.written.tables["messages"].files)}

    return work


def _chunks_of_a_message(n: int) -> Callable[[], None]:
    """Prepare a large message whose last chunk is in another range than the others."""
    chunks = chunk_entries(bytes(n + 1), n + 1, publish_time=TIME_MS)

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            batch = batch_in(Path(folder))
            _, result = batch.run_batches(A, [chunks[:-1], chunks[-1:]])
            assert batch.values_of(result) == [bytes(n + 1)]

    return work


CASES = [
    Case("ingest, topics with a message each", _quiet_topics, constant=("files",)),
    Case("stage, large messages that are incomplete together", _messages_over_two_ranges, constant=("files",)),
    Case("stage, chunks of a large message", _chunks_of_a_message),
    Case("ingest, last chunks without a first one", _chunks_without_the_first, constant=("files",)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_work_of_a_stage_grows_with_its_list_at_most(case: Case) -> None:
    check(case)
