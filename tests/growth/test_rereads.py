"""Entries that are read from the topic again, if the topic no longer has many of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ledgerlake.client.cluster import ClientSettings
from ledgerlake.source.reread import GoneEntries, read_again
from ledgerlake.wire.message_id import Position
from tests.entries import single
from tests.growth.counting import Case, check
from tests.peer import TOPIC, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Where the peer's topic begins; it had entries of ledger 7 before.
_FIRST_LEDGER = 9


def _removed(
    n: int, *, reads: int = 1, is_followed: bool = True, has_rest: bool = False
) -> Callable[[], dict[str, int]]:
    """
    Args:
        reads: by how many calls the entries are read, the last of them first.
        is_followed: entries follow those that were removed.
        has_rest: ledger 7 is still there, without those entries.
    """
    positions = [Position(7, number) for number in range(n)]

    def work() -> dict[str, int]:
        with Peer(first_ledger_id=7 if has_rest else _FIRST_LEDGER) as peer:
            if is_followed:
                peer.add(single(b"later"), ledger_id=_FIRST_LEDGER)
            client, gone = ClientSettings(peer.url), GoneEntries()
            step = n // reads
            for start in reversed(range(0, n, step)):
                again = read_again(client, TOPIC, positions[start : start + step], gone)
                assert list(again) == [None] * step
            # A reader that waits asks for the last message again after a while.
            asked = [name for name in peer.requests if name != "CommandGetLastMessageId"]
            return {"requests": len(asked)}

    return work


def _large_messages(n: int) -> Callable[[], Mapping[str, int]]:
    return _removed(n, reads=n)


CASES = [
    Case("read_again, removed entries", _removed, n=5, constant=("requests",), has_waits=True),
    Case(
        "read_again, removed entries at the end of the topic",
        lambda n: _removed(n, is_followed=False),
        n=5,
        constant=("requests",),
        has_waits=True,
    ),
    Case(
        "read_again, removed entries of a ledger that is left",
        lambda n: _removed(n, has_rest=True),
        n=5,
        constant=("requests",),
        has_waits=True,
    ),
    Case(
        "read_again, removed large messages",
        _large_messages,
        n=5,
        constant=("requests",),
        has_waits=True,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_entries_that_the_topic_no_longer_has_cost_a_fixed_number_of_requests(case: Case) -> None:
    check(case)
