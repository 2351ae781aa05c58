"""A target in processes of its own, so that a crash or an endless loop of native code is a failure
like any other.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import queue
import time
from typing import TYPE_CHECKING, Any

from tests.fuzz.engine import Failure, Result, input_of, run
from tests.fuzz.targets import target_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fuzz.engine import Target

# Inputs that one process judges, so that nothing it keeps grows without end.
_PART = 50_000

# Of wall-clock time in one input: a loop in native code, which no signal ends.
_STUCK_S = 300.0


def run_apart(target: Target, seed: int, count: int) -> Result:
    result = Result()
    for start in range(0, count, _PART):
        for part in _parts(target, seed, start, min(start + _PART, count)):
            result.add(part)
    return _each_once(result)


def _each_once(result: Result) -> Result:
    """The first input of each failure."""
    first: dict[str, Failure] = {}
    for failure in result.failures:
        first.setdefault(failure.what, failure)
    return dataclasses.replace(result, failures=list(first.values()))


def _parts(target: Target, seed: int, start: int, stop: int) -> Iterator[Result]:
    """A process's result; where the process dies, the input that killed it is a failure, and the
    next one goes on behind.
    """
    context = multiprocessing.get_context("spawn")
    while start < stop:
        place = context.Value("q", start, lock=False)
        results: Any = context.Queue()
        process = context.Process(
            target=_work, args=(target.name, seed, start, stop, place, results)
        )
        process.start()
        part_result = _wait(process, results, place)
        if part_result is not None:
            process.join()
            yield part_result
            return
        index = place.value
        what = f"the process died ({process.exitcode})"
        died = Failure(target.name, seed, index, input_of(target, seed, index), what)
        lost = Result(failures=[died], taken=index - start)
        lost.failed[what] += 1
        yield lost
        start = index + 1


def _wait(process: Any, results: Any, place: Any) -> Result | None:
    last, since = place.value, time.monotonic()
    while True:
        try:
            return results.get(timeout=0.2)
        except queue.Empty:
            if not process.is_alive():
                return None
        if place.value != last:
            last, since = place.value, time.monotonic()
        elif time.monotonic() - since > _STUCK_S:
            process.kill()
            process.join()


def _work(name: str, seed: int, start: int, stop: int, place: Any, results: Any) -> None:
    def tell(index: int) -> None:
        place.value = index

    results.put(run(target_of(name), seed, start, stop, tell=tell))
