"""What a library raises over bytes from outside is told apart from what says nothing of them."""

from __future__ import annotations

import pytest

from ledgerlake.errors import CorruptEntryError
from ledgerlake.outside import Unreadable, reading


class OfALibrary(Exception):
    pass


@pytest.mark.parametrize(
    "error", [OfALibrary(), KeyError("a"), UnicodeDecodeError("utf-8", b"a", 0, 1, "x")]
)
def test_whatever_a_library_raises_is_unreadable(error: Exception) -> None:
    with pytest.raises(Unreadable) as failure, reading():
        raise error
    assert failure.value.error is error


@pytest.mark.parametrize(
    "error", [CorruptEntryError("x"), MemoryError(), KeyboardInterrupt(), SystemExit()]
)
def test_an_error_of_our_own_or_of_the_machine_stays_what_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)), reading():
        raise error
