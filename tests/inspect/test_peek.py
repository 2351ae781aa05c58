"""How a stored entry is shown."""

from __future__ import annotations

import pytest

from ledgerlake.client.cluster import ClientSettings
from ledgerlake.inspect.peek import entry_line, peek
from tests.entries import batch, single
from tests.peer import TOPIC, Peer


@pytest.mark.parametrize(
    ("entry", "index"),
    [
        pytest.param(single(b"a", index=15), "15", id="single"),
        pytest.param(batch([b"a"], index=15), "15", id="batch of one"),
        pytest.param(batch([b"a"] * 10, index=15), "6 to 15", id="batch"),
        pytest.param(
            batch([b"a"] * 10, index=15, txnid_most_bits=2, txnid_least_bits=1),
            "15",
            id="batch of a transaction",
        ),
    ],
)
def test_an_entry_is_shown_with_the_numbers_that_the_broker_gave_its_messages(
    entry: bytes, index: str
) -> None:
    with Peer() as peer:
        peer.add(entry)
        (row,) = peek(ClientSettings(peer.url), TOPIC, "earliest", 5)
    assert f" index {index}  published " in entry_line(row)


def test_each_time_of_an_entry_has_its_day_and_its_zone() -> None:
    with Peer() as peer:
        peer.add(single(b"a", publish_time=1_699_999_999_999, deliver_at_time=1_700_003_600_000))
        (row,) = peek(ClientSettings(peer.url), TOPIC, "earliest", 5)
    line = entry_line(row)
    assert "broker 2023-11-14T22:13:20.000Z index 0" in line
    assert "published 2023-11-14T22:13:19.999Z by" in line
    assert " due 2023-11-14T23:13:20.000Z " in line
