"""Many histories, in processes of their own: one history uses one core."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulation.driver import Edges
from tests.simulation.history import History, Verdict, write_script
from tests.simulation.mutations import MUTATIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

# So that a process is not asked for each history alone.
_TOGETHER = 10

_edges: list[Edges] = []


def play_many(seeds: range, jobs: int, mutation: str | None = None) -> Iterator[Verdict]:
    """Play the histories of some seeds; return the verdicts in their order, without traces.

    Args:
        mutation: a known fault to put back first.
    """
    # Forked, a process would have the locks of threads that it does not have.
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawning, initializer=_enter, initargs=(mutation,)) as pool:
        try:
            yield from pool.map(_play, seeds, chunksize=_TOGETHER)
        finally:
            pool.shutdown(cancel_futures=True)


def _enter(mutation: str | None) -> None:
    # Live tests wait for a broker and for Spark most of the time; histories take what they leave.
    os.nice(19)
    _edges.append(Edges())
    _edges[0].__enter__()
    if mutation is not None:
        MUTATIONS[mutation](_edges[0])


def _play(seed: int) -> Verdict:
    return replace(History(write_script(seed), _edges[0]).play(), trace=[])
