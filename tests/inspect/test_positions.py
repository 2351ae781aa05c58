"""What ``ledgerlake positions`` shows."""

from __future__ import annotations

import pytest

from ledgerlake.cli import main
from ledgerlake.client.cluster import ClientSettings
from ledgerlake.inspect.positions import find_places
from ledgerlake.options.bounds import AtIndex
from tests.entries import batch, single
from tests.peer import TOPIC, Peer


def test_a_message_inside_a_batch_is_shown_with_its_own_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Peer() as peer:
        peer.add(
            single(b"before", index=9),
            batch([b"zero", b"one", b"two"], index=12),
            batch([b"next", b"other"], index=14),
        )
        (place,) = find_places(ClientSettings(peer.url), TOPIC, AtIndex(11))
        assert main(["positions", TOPIC, "--index", "11", "--service-url", peer.url]) == 0
    assert place.at is not None
    assert place.after is not None
    assert (place.at["value"], place.after["value"]) == ("one", "next")
    _, before, at, after = capsys.readouterr().out.splitlines()
    assert before.split(maxsplit=1) == ["before", "in the same batch"]
    assert at.endswith("one")
    assert after.endswith("next")


def test_before_the_first_message_of_a_batch_stands_another_entry() -> None:
    with Peer() as peer:
        peer.add(single(b"before", index=9), batch([b"zero", b"one"], index=11))
        (place,) = find_places(ClientSettings(peer.url), TOPIC, AtIndex(10))
    assert place.before is not None
    assert place.at is not None
    assert (place.before["value"], place.at["value"]) == ("before", "zero")
    assert not place.is_inside_batch


def test_seconds_are_not_taken_for_milliseconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["positions", TOPIC, "--at", "1796134815"]) != 0
    assert "--at: '1796134815' is no time from 2000-01-01" in capsys.readouterr().err
