"""What libraries raise over bytes from outside.

A library may raise anything over bytes that it does not expect, whatever its documentation says: an
error of its own, of another library that it uses, or of Python. To name the classes is to miss one,
and then a single message ends the stream, at each start. So code that gives such bytes to a library
does so in ``reading``, and catches ``Unreadable``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.errors import LedgerlakeError

if TYPE_CHECKING:
    from types import TracebackType


class Unreadable(Exception):
    """Bytes that a library cannot read.

    Attributes:
        error: what it raised.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _Reading:
    """The block of ``reading``. It has no state, and is entered for each entry and each value: a
    block made from a generator would take a third of the time in which an entry is parsed.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not isinstance(
            error, (LedgerlakeError, MemoryError, Unreadable)
        ):
            raise Unreadable(error) from error


_READING = _Reading()


def reading() -> _Reading:
    """Turn what a library raises in the block into Unreadable. Our own errors stay as they are, and
    too little memory says something of the machine, not of the bytes.

    Raises:
        Unreadable: the block failed.
    """
    return _READING
