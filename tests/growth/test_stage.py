"""The first stage and the stateful stage, if what producers send grows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ledgerlake.assembly.chunk_entries import read_chunk
from ledgerlake.assembly.rules import Chunk, ChunkedMessageKey, Limits
from ledgerlake.operators.local_assembly import LocalAssembly
from ledgerlake.operators.stateful import incomplete_from_json
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.message_id import Position
from tests.chunks import chunk_entries
from tests.growth.counting import Case, check
from tests.operators.stage import Settled, Stage, task
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
    chunks = [
        chunk_entries(b"ab", 2, uuid=f"p-{number}", publish_time=TIME_MS + number)
        for number in range(n)
    ]

    def work() -> Mapping[str, int]:
        with tempfile.TemporaryDirectory() as folder:
            batch = batch_in(Path(folder))
            _, result = batch.run_batches(
                A, [[first for first, _ in chunks], [last for _, last in chunks]]
            )
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


def _chunks_with_properties(n: int) -> Callable[[], Mapping[str, int]]:
    """Prepare first chunks of messages that never end, each with a byte of payload and a kilobyte
    beside it.
    """
    properties = [pb.KeyValue(key="k", value="x" * 1000)]
    entries = [
        chunk_entries(b"ab", 2, f"p-{number:06}", publish_time=5, properties=properties)[0]
        for number in range(n)
    ]

    def work() -> Mapping[str, int]:
        local = LocalAssembly(Limits(max_pending_bytes=50_000))
        for number, raw in enumerate(entries):
            assert list(local.arrive(read_chunk(raw, Position(1, number)), raw) or ()) == []
        kept_bytes = sum(len(kept) for _, kept in local.drain_pending())
        assert 40_000 < kept_bytes <= 50_000
        return {"bytes kept": kept_bytes}

    return work


def _endless_messages(n: int) -> Callable[[], Mapping[str, int]]:
    """Prepare messages of empty chunks that never end."""
    limits = Limits(max_incomplete_chunks=100)
    chunks = [
        Chunk(
            ChunkedMessageKey("p", f"p-{number // 10}"),
            Position(1, number),
            number % 10,
            11,
            0,
            0,
            90,
            5,
            5,
        )
        for number in range(10 * n)
    ]

    def work() -> Mapping[str, int]:
        stage = Stage(limits)
        for start in range(0, len(chunks), 150):
            stage.run(task(chunks[start : start + 150], limits, Settled()))
        waiting = [
            incomplete_from_json(value[0])
            for _, value in stage.getMapState("sets", "", "").iterator()
        ]
        parts = stage.getMapState("parts", "", "").values
        return {
            "positions": sum(len(message.positions) for message in waiting),
            "parts": len(parts),
        }

    return work


CASES = [
    Case(
        "tasks, chunks with large properties",
        _chunks_with_properties,
        n=100,
        constant=("bytes kept",),
    ),
    Case(
        "stage, messages that never end", _endless_messages, n=30, constant=("positions", "parts")
    ),
    Case("ingest, topics with a message each", _quiet_topics, constant=("files",)),
    Case(
        "stage, large messages that are incomplete together",
        _messages_over_two_ranges,
        constant=("files",),
    ),
    Case("stage, chunks of a large message", _chunks_of_a_message),
    Case("ingest, last chunks without a first one", _chunks_without_the_first, constant=("files",)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_work_of_a_stage_grows_with_its_list_at_most(case: Case) -> None:
    check(case)
