"""What large messages take of memory: used again from one to the next, given back when the task
ends.

Left to itself glibc maps a block of a chunk's size and unmaps it when it is free, so that each
chunk costs a thousand page faults: more than reading it. Told to keep such blocks, it would keep
them for as long as the worker lives, which is hours; so a task that has seen chunks gives back what
it had, holes between blocks as well.
"""

from __future__ import annotations

import ctypes
import functools

import pyarrow as pa

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# The most that glibc allows. A joined message that is larger is mapped by itself, and unmapped when
# it is written.
_LARGEST_KEPT_BYTES = 32 * 1024 * 1024
_NEVER_BYTES = 1024 * 1024 * 1024


@functools.cache
def keep_freed_blocks() -> None:
    """From now on, for this process; does nothing if the C library is not glibc."""
    try:
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES)
    except (OSError, AttributeError):
        return


def trim_heap() -> None:
    """Return to the system what Arrow and glibc hold free; another C library does so by itself."""
    pa.default_memory_pool().release_unused()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return
