"""The way of chunks through tasks and the stateful stage against the plain reference, one seed one
schedule.

Random schedules as in ``test_chunks_model``, cut into batches, batches into tasks, rows shuffled;
any batch may be killed and run again from the state before it. Nothing may depend on any of that.
"""

from __future__ import annotations

import os
import random

import pytest

from ledgerlake.assembly.rules import Chunk, Limits
from tests.model.chunk_schedules import play_all, reference, schedule
from tests.operators.stage import Settled, Stage, task

pytestmark = pytest.mark.slow

SEEDS = 10_000 if os.environ.get("LEDGERLAKE_CAMPAIGN") == "long" else 250
_AT_ONCE = 250


def cut(rng: random.Random, chunks: list[Chunk], most: int) -> list[list[Chunk]]:
    """Consecutive pieces, at most so many."""
    places = sorted(rng.randrange(len(chunks) + 1) for _ in range(rng.randint(0, most - 1)))
    return [chunks[start:stop] for start, stop in zip([0, *places], [*places, len(chunks)])]


def run_batch(stage: Stage, tasks: list[list[Chunk]], settled: Settled, rng: random.Random) -> None:
    rows = [row for task_chunks in tasks for row in task(task_chunks, stage.limits, settled)]
    settled.stage(stage.run(rows, rng))


def play(seed: int) -> Settled:
    rng = random.Random(seed)
    limits = Limits(
        max_pending=rng.choice([1, 2, 100]), max_pending_bytes=rng.choice([1, 20, 10_000])
    )
    chunks = schedule(rng)
    stage, settled = Stage(limits), Settled()
    for batch in cut(rng, chunks, 6):
        tasks = cut(rng, batch, 3)
        if rng.random() < 0.3:
            run_batch(stage.copy(), tasks, Settled(), rng)
        run_batch(stage, tasks, settled, rng)
    assert sorted(settled.delivered, key=lambda positions: positions[-1]) == [
        positions for _, positions in reference(chunks)
    ]
    for now_ms in (10**9, 2 * 10**9):
        settled.stage(stage.run(task([], limits, Settled(), now_ms=now_ms)))
    assert not any(state.values for state in stage.states.values())
    accounted = [position for positions in settled.delivered for position in positions]
    accounted += [position for _, position in settled.rejected]
    assert sorted(accounted) == [chunk.position for chunk in chunks]
    return settled


@pytest.mark.parametrize("start", range(0, SEEDS, _AT_ONCE))
def test_no_cut_into_batches_and_tasks_and_no_kill_changes_what_is_delivered(start: int) -> None:
    plays = play_all(play, range(start, start + _AT_ONCE))
    assert sum(settled.read_again for settled in plays) > 0
    assert sum(len(settled.delivered) for settled in plays) > _AT_ONCE
