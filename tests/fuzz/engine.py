"""What an input does to a target, and whether that is allowed.

An input is allowed to be read, or to be refused with an error that the target lists. A failure is

    another exception    also the interpreter's own, and a disagreement between two readers
    too much memory      more than ``memory_factor`` times the input's bytes and ``memory_bytes``
                         beside
    too much work        more things come out than ``work_factor`` times the input's bytes and
                         ``_WORK_BESIDE`` beside
    a hang               more than ``_HANG_S`` seconds of CPU

Memory is the growth of the resident set, which native code is in, for every input; for some inputs
also what Python's own allocator counts, which includes memory that was asked for and not touched.

An input depends on the seed, the target's name and its number alone, so a failure is repeated by
those three.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import resource
import signal
import sys
import time
import traceback
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ledgerlake.errors import LedgerlakeError

MIB = 1024 * 1024

_HANG_S = 20.0
_WORK_BESIDE = 1000

# One input of so many is run under tracemalloc, which is slow.
TRACED_EVERY = 50

# Free memory is given back to the system when the resident set is so much larger than at the start.
_GIVE_BACK_BYTES = 64 * MIB

# A parameter of mallopt: blocks of this size and larger are mapped alone, and unmapped when freed.
_M_MMAP_THRESHOLD = -3

# Writing 5 to it makes the largest resident set so far the present one.
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Target:
    """One boundary.

    Args:
        boundary: what reads there, for people.
        make: a new input.
        judge: reads an input; returns how many things came out of it. Raises one of ``errors``
            where it is refused, and AssertionError where two readers disagree.
        cost: of a slow target so many times fewer inputs are judged.
    """

    name: str
    boundary: str
    make: Callable[[random.Random], bytes]
    judge: Callable[[bytes], int]
    errors: tuple[type[LedgerlakeError], ...] = ()
    memory_factor: int = 100
    memory_bytes: int = 16 * MIB
    work_factor: int = 1
    cost: int = 1


@dataclass(frozen=True)
class Failure:
    """An input that was not judged as it must be, and how to make it again."""

    target: str
    seed: int
    index: int
    data: bytes
    what: str
    detail: str = ""

    @property
    def command(self) -> str:
        return (
            f"python -m tests.fuzz --target {self.target} --seed {self.seed} --index {self.index}"
        )


_TOO_MUCH_MEMORY = "too much memory"


@dataclass
class Result:
    """Some inputs of one target."""

    taken: int = 0
    refused: int = 0
    seconds: float = 0.0
    memory_bytes: int = 0
    memory_index: int = -1
    longest_s: float = 0.0
    longest_index: int = -1
    failed: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.taken + self.refused + self.failed.total()

    def add(self, other: Result) -> None:
        self.taken += other.taken
        self.refused += other.refused
        self.seconds += other.seconds
        if other.memory_bytes > self.memory_bytes:
            self.memory_bytes, self.memory_index = other.memory_bytes, other.memory_index
        if other.longest_s > self.longest_s:
            self.longest_s, self.longest_index = other.longest_s, other.longest_index
        self.failed += other.failed
        self.failures += other.failures


def input_of(target: Target, seed: int, index: int) -> bytes:
    return target.make(random.Random(f"{seed}/{target.name}/{index}"))


def run(
    target: Target,
    seed: int,
    start: int,
    stop: int,
    traced_every: int = TRACED_EVERY,
    tell: Callable[[int], None] = lambda _index: None,
) -> Result:
    """Judge the inputs from ``start`` to before ``stop``; ``tell`` hears the number of each before
    it is read.
    """
    result = Result()
    memory = Memory()
    began = time.monotonic()
    # Whatever is built when it is first needed is no input's.
    with contextlib.suppress(Exception):
        target.judge(input_of(target, seed, start))
    for index in range(start, stop):
        tell(index)
        data = input_of(target, seed, index)
        input_began = time.process_time()
        failure, taken, peak_bytes = judge(target, data, memory, traced=index % traced_every == 0)
        input_s = time.process_time() - input_began
        if input_s > result.longest_s and index % traced_every:
            result.longest_s, result.longest_index = input_s, index
        if failure is not None:
            result.failed[failure[0]] += 1
            if result.failed[failure[0]] == 1:
                result.failures.append(Failure(target.name, seed, index, data, *failure))
        elif taken:
            result.taken += 1
        else:
            result.refused += 1
        if peak_bytes > result.memory_bytes:
            result.memory_bytes, result.memory_index = peak_bytes, index
    result.seconds = time.monotonic() - began
    return result


def judge(
    target: Target, data: bytes, memory: Memory | None = None, *, traced: bool = True
) -> tuple[tuple[str, str] | None, bool, int]:
    """Return the fault (in short, and at length), whether the input was taken, and the most memory
    that it took.
    """
    memory = memory or Memory()
    judged = _judge_once(target, data, memory, traced=traced)
    failure = judged[0]
    if failure is not None and failure[0] == _TOO_MUCH_MEMORY:
        # A kernel is compiled for the first input that needs it.
        judged = _judge_once(target, data, memory, traced=True)
    return judged


def _judge_once(
    target: Target, data: bytes, memory: Memory, *, traced: bool
) -> tuple[tuple[str, str] | None, bool, int]:
    failure: tuple[str, str] | None = None
    work = -1
    with memory.measured(traced):
        try:
            with _time_limit():
                work = target.judge(data)
        except target.errors:
            pass
        except Exception as error:
            failure = _describe(error)
    ceiling = target.memory_factor * len(data) + target.memory_bytes
    if failure is None and memory.peak_bytes > ceiling:
        detail = f"{memory.peak_bytes} bytes for {len(data)}, the most is {ceiling}"
        failure = _TOO_MUCH_MEMORY, detail
    if failure is None and work > target.work_factor * len(data) + _WORK_BESIDE:
        failure = "too much work", f"{work} things came out of {len(data)} bytes"
    return failure, work >= 0, memory.peak_bytes


def _describe(error: Exception) -> tuple[str, str]:
    """Two failures are the same where the same exception comes from the same line of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/ledgerlake/" in frame.filename] or frames
    place = f"{ours[-1].filename.rpartition('/ledgerlake/')[2]}:{ours[-1].lineno}"
    return f"{type(error).__name__} at {place}", "".join(traceback.format_exception(error))[-3000:]


class Hang(Exception):
    """An input takes too long."""


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """CPU seconds of this process; a busy machine is no hang. A loop in native code is the parent's
    to notice.
    """

    def stop(_number: int, _frame: Any) -> None:
        raise Hang(f"more than {_HANG_S:g} s of CPU")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Memory:
    """The most memory that a piece of code takes beyond what the process has.

    Arrow's own allocator keeps freed blocks for a while, and how many depends on time. So Arrow
    takes its blocks from C's allocator, which gives large ones back at once.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        if sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB)
        self._can_reset = os.access(_CLEAR_REFS, os.W_OK)
        self._least_bytes = self._resident_bytes()

    @contextlib.contextmanager
    def measured(self, traced: bool) -> Iterator[None]:
        before = self._resident_bytes()
        if before > self._least_bytes + _GIVE_BACK_BYTES:
            give_back()
            before = self._resident_bytes()
            self._least_bytes = max(self._least_bytes, before - _GIVE_BACK_BYTES // 2)
        pool = pa.default_memory_pool()
        pa.set_memory_pool(pa.system_memory_pool())
        if traced:
            tracemalloc.start()
        try:
            yield
        finally:
            pa.set_memory_pool(pool)
            self.peak_bytes = self._peak_bytes() - before if self._can_reset else 0
            if traced:
                self.peak_bytes = max(self.peak_bytes, tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()

    def _resident_bytes(self) -> int:
        """The resident set now; the system counts its peak from here on."""
        if not self._can_reset:
            return 0
        _CLEAR_REFS.write_text("5")
        return self._peak_bytes()

    @staticmethod
    def _peak_bytes() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def give_back() -> None:
    """Return the memory that was freed to the system."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
