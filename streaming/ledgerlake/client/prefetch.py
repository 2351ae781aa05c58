"""Reading ahead: a thread takes from a source while what it took before is worked on."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

Item = TypeVar("Item")

_LOOK_S = 0.1


class _End:
    """The source is at its end, or raised ``error``."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetched(source: Generator[Item, None, None], most: int) -> Iterator[Item]:
    """The items of ``source``, of which up to ``most`` are taken before they are asked for.

    The source runs in a thread of its own, which ends with this iterator; what it raises is raised
    here.
    """
    taken: queue.Queue[Item | _End] = queue.Queue(most)
    stopped = threading.Event()

    def put(item: Item | _End) -> bool:
        while not stopped.is_set():
            try:
                taken.put(item, timeout=_LOOK_S)
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
        while not isinstance(item := taken.get(), _End):
            yield item
            del item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        thread.join()
