"""Prefetching: a thread reads items ahead while the caller works on earlier ones."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

Item = TypeVar("Item")

_POLL_S = 0.1


class _End:
    """The end of the source; ``error`` if it raised one."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetched(source: Generator[Item, None, None], most: int) -> Iterator[Item]:
    """Yield the items of ``source``; up to ``most`` of them are read ahead.

    The source runs in a thread of its own, which ends with this iterator. Its errors are raised
    here.
    """
    items: queue.Queue[Item | _End] = queue.Queue(most)
    stopped = threading.Event()

    def put(item: Item | _End) -> bool:
        while not stopped.is_set():
            try:
                items.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        error: BaseException | None = None
        try:
            for item in source:
                if not put(item):
                    break
        except BaseException as raised:
            error = raised
        finally:
            source.close()
        put(_End(error))

    thread = threading.Thread(target=work, name="ledgerlake-prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := items.get(), _End):
            yield item
            del item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        thread.join()
