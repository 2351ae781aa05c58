"""What large messages took goes back to the system; in a process of its own, since it is the
process's allocator that is told.
"""

import ctypes
import subprocess
import sys

import pytest

_SCRIPT = """
from pathlib import Path
from ledgerlake.runtime.memory import trim_heap, keep_freed_blocks

MIB = 1024 * 1024


def resident_mib():
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmRSS:"))
    return int(line.split()[1]) // 1024


before = resident_mib()
keep_freed_blocks()
blocks = [bytearray(b"x" * (5 * MIB)) for _ in range(20)]
last = blocks[-1]
del blocks
print(resident_mib() - before)
trim_heap()
print(resident_mib() - before)
"""


def _is_glibc() -> bool:
    return hasattr(ctypes.CDLL(None), "malloc_trim")


@pytest.mark.skipif(not _is_glibc(), reason="told to glibc's allocator alone")
def test_blocks_of_chunks_are_kept_until_they_are_given_back_though_some_are_still_used() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )
    kept_mib, left_mib = map(int, ran.stdout.split())
    assert kept_mib >= 90
    assert left_mib <= 15
