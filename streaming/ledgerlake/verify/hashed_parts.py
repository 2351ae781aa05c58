"""Records divided by a hash into parts that fit in memory, as in a hash join of two large inputs.

All records of one hash are in one part, in the order in which they were added. A few records stay
in memory. If there are more, each full buffer is sorted by hash and written to one temporary file.
A part is a range of hashes, so each of the buffers has its records in one piece. The number of
parts follows from the size of all records.

The file is in the temporary folder and has no name. So it is gone when the process has ended,
however that came.
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

from ledgerlake.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import BufferedRandom

    from numpy.typing import NDArray

    Records = NDArray[np.void]

# A part is one or more of these ranges of hashes.
_RANGE_BITS = 12

# About how many records are in memory until they are written, and how large a part is at most.
_BUFFER_RECORDS = 500_000
_PART_SIZE = 1_000_000


class HashedParts:
    """Takes records, and yields them part by part.

    Args:
        hashes_of: the hashes of records. Their first bits divide the records.
    """

    def __init__(
        self, dtype: np.dtype[Any], hashes_of: Callable[[Records], NDArray[np.uint64]]
    ) -> None:
        self._dtype, self._hashes_of = dtype, hashes_of
        self._buffer: list[Records] = []
        self._buffered, self._size = 0, 0
        self._stack = contextlib.ExitStack()
        self._file: BufferedRandom | None = None
        # Where each range of hashes begins in the file, for each written buffer; and its end.
        self._runs: list[NDArray[np.int64]] = []

    def __enter__(self) -> HashedParts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        # What could not be written is not wanted any more.
        with contextlib.suppress(OSError):
            self._stack.close()

    def add(self, records: Records, size: int) -> None:
        """Add records.

        Args:
            size: how many they count for in a part, if it is not their number.

        Raises:
            SetupError: the temporary folder cannot take them.
        """
        if not len(records):
            return
        self._buffer.append(records)
        self._buffered += len(records)
        self._size += size
        if self._buffered >= _BUFFER_RECORDS:
            self._write()

    def parts(self) -> Iterator[Records]:
        """Yield the parts that have records. Nothing can be added afterwards.

        Raises:
            SetupError: the temporary folder cannot be read.
        """
        buffer, of_buffer = self._sorted_buffer()
        bits = min((self._size // _PART_SIZE).bit_length(), _RANGE_BITS)
        step = 1 << (_RANGE_BITS - bits)
        for first in range(0, 1 << _RANGE_BITS, step):
            written = [self._read(int(run[first]), int(run[first + step])) for run in self._runs]
            part = np.concatenate([*written, buffer[of_buffer[first] : of_buffer[first + step]]])
            if len(part):
                yield part

    def _sorted_buffer(self) -> tuple[Records, NDArray[np.int64]]:
        """Take the records of the buffer; return them in the order of their hashes, and where each
        range of hashes begins, and the end.
        """
        records = np.concatenate([np.empty(0, dtype=self._dtype), *self._buffer])
        self._buffer, self._buffered = [], 0
        ranges = (self._hashes_of(records) >> np.uint64(64 - _RANGE_BITS)).astype(np.uint16)
        order = np.argsort(ranges, kind="stable")
        begins = np.searchsorted(ranges[order], np.arange((1 << _RANGE_BITS) + 1, dtype=np.uint16))
        return np.take(records, order), begins

    def _write(self) -> None:
        records, begins = self._sorted_buffer()
        try:
            if self._file is None:
                self._file = self._stack.enter_context(_temporary_file())
            self._file.write(records.view(np.uint8).data)
            self._file.flush()
        except OSError as error:
            raise _unusable(error) from None
        written = int(self._runs[-1][-1]) if self._runs else 0
        self._runs.append(begins + written)

    def _read(self, begin: int, end: int) -> Records:
        """Read the records between two numbers."""
        assert self._file is not None
        records: Records = np.empty(end - begin, dtype=self._dtype)
        try:
            self._file.seek(begin * self._dtype.itemsize)
            if self._file.readinto(records.view(np.uint8).data) != records.nbytes:
                raise OSError("it is shorter than what was written")
        except OSError as error:
            raise _unusable(error) from None
        return records


def _temporary_file() -> BufferedRandom:
    return tempfile.TemporaryFile(prefix="ledgerlake-")


def _unusable(error: OSError) -> SetupError:
    return SetupError(
        f"the temporary folder {tempfile.gettempdir()} cannot be used ({error.strerror or error}); "
        "make room there, or choose another folder by the environment variable TMPDIR"
    )
