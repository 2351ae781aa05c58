"""Giving memory back: what a large message took must not stay with a worker that lives for hours.

glibc keeps freed blocks of up to 32 MiB for itself once it has seen one of that size; chunks are such blocks, and holes
between them are all that a message leaves. A fixed threshold has it map each large block and unmap it when it is free.
"""

from __future__ import annotations

import ctypes
import functools

import pyarrow as pa

_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK_BYTES = 2 * 1024 * 1024


@functools.cache
def return_large_blocks() -> None:
    """From now on, for this process; does nothing where the C library is not glibc."""
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
    except (OSError, AttributeError):
        return


def release_arrow() -> None:
    """Have Arrow give back what it has freed."""
    pa.default_memory_pool().release_unused()
