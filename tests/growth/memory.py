"""The peak memory of some work, in a process of its own.

In a process of many tests, work reuses memory that another test freed, so it seems to take less;
and it seems to take more if it is the first that has a kernel compiled. A process that was just
forked from a server, which has only imported modules, does what it prepares and then the work.
"""

from __future__ import annotations

import multiprocessing
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

from tests.fuzz.engine import Memory, give_back

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection


Result = TypeVar("Result")


def measured(prepare: Callable[..., Callable[[], Result]], *given: Any) -> tuple[Result, int]:
    """Return the result of some work, and how many bytes more than before its process has at most
    meanwhile.

    Args:
        prepare: makes the work from what is ``given``; a function of a module, as another process
            imports it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([prepare.__module__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, prepare, given))
    process.start()
    sender.close()
    try:
        result, peak_bytes, failure = receiver.recv()
    finally:
        process.join()
    assert failure is None, failure
    return result, peak_bytes


def _measure(
    sender: Connection, prepare: Callable[..., Callable[[], object]], given: tuple[Any, ...]
) -> None:
    memory = Memory()
    result, failure = None, None
    try:
        work = prepare(*given)
        give_back()
        with memory.measured(traced=False):
            result = work()
    except Exception:
        failure = traceback.format_exc()
    sender.send((result, memory.peak_bytes, failure))
