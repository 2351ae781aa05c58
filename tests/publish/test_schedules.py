"""Schedules as the class and the command publish them."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import pytest

from ledgerlake.api import Schedules
from ledgerlake.errors import UsageError
from ledgerlake.wire.entry import parse_entry
from ledgerlake.wire.limits import MAX_TIME_MS
from tests.live.pipelines import ledgerlake
from tests.peer import TOPIC, Peer


def sent(peer: Peer) -> list[tuple[bytes, int, dict[str, str]]]:
    """Value, delivery time and properties of what the peer stored."""
    entries = [parse_entry(raw) for raw in peer.received]
    return [
        (
            bytes(entry.payload),
            entry.metadata.deliver_at_time,
            {pair.key: pair.value for pair in entry.metadata.properties},
        )
        for entry in entries
    ]


def test_a_schedule_is_a_delayed_message_with_its_id_and_a_cancel_names_it() -> None:
    noon = datetime(2026, 5, 2, 12, tzinfo=timezone.utc)
    with Peer() as peer, Schedules(peer.url, TOPIC) as schedules:
        schedules.put("a", b"one", at=1_800_000_000_000, key="k", properties={"x": "y"}, expires=noon)
        schedules.put("a", b"two", at=noon)
        schedules.put("a", b"now")
        schedules.cancel("a")
        assert sent(peer) == [
            (b"one", 1_800_000_000_000, {"x": "y", "ledgerlake.schedule": "a", "ledgerlake.expires": "1777723200000"}),
            (b"two", 1_777_723_200_000, {"ledgerlake.schedule": "a"}),
            (b"now", 0, {"ledgerlake.schedule": "a"}),
            (b"", 0, {"ledgerlake.cancel": "schedule=a"}),
        ]


@pytest.mark.parametrize(
    ("schedule_id", "arguments", "why"),
    [
        ("", {}, "1 to 200"),
        ("x" * 201, {}, "1 to 200"),
        ("a", {"at": datetime(2026, 5, 2)}, "at has no zone"),
        ("a", {"at": 0}, "at must be from 1"),
        ("a", {"expires": MAX_TIME_MS + 1}, "expires must be from 1"),
        ("a", {"properties": {"ledgerlake.schedule": "b"}}, "set by its own argument"),
    ],
)
def test_what_cannot_be_a_schedule_is_refused_before_it_is_sent(
    schedule_id: str, arguments: dict[str, Any], why: str
) -> None:
    with Peer() as peer, Schedules(peer.url, TOPIC) as schedules:
        with pytest.raises(UsageError, match=why):
            schedules.put(schedule_id, b"", **arguments)
        assert peer.received == []


def test_an_id_decides_the_topic_partition_as_javas_hash_of_it_does() -> None:
    with Peer() as peer, Schedules(peer.url, TOPIC) as schedules:
        schedules._partitions = [f"{TOPIC}-partition-{number}" for number in range(10)]
        # "hello".hashCode() is 99162322 in Java.
        assert schedules.partition_of("hello") == f"{TOPIC}-partition-2"


def test_the_command_schedules_by_time_or_by_span() -> None:
    with Peer() as peer:
        where = (TOPIC, "--service-url", peer.url, "--id", "a")
        said = ledgerlake(
            "schedule", *where, "--at", "2026-05-02T12:00:00Z", "--expires", "1777723200001", "x", "--json"
        )
        assert said.returncode == 0, said.stderr
        assert json.loads(said.stdout)["due"] == "2026-05-02T12:00:00.000+00:00"
        assert ledgerlake("schedule", *where, "--in", "1 hour", "y").returncode == 0
        assert sent(peer)[0] == (
            b"x",
            1_777_723_200_000,
            {"ledgerlake.schedule": "a", "ledgerlake.expires": "1777723200001"},
        )
        assert [value for value, *_ in sent(peer)] == [b"x", b"y"]
        assert ledgerlake("schedule", *where, "--in", "soon", "z").returncode == 2
        assert len(peer.received) == 2
