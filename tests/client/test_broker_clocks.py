"""What a client knows of the clocks of brokers."""

from __future__ import annotations

import time

import pytest

from ledgerlake.client import broker_clocks
from ledgerlake.client.broker_clocks import BrokerClocks, milliseconds_of
from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.wire.message_id import AFTER_ALL
from tests.peer import TOPIC, Peer

# The clock of the machine is far away from that of the broker.
AHEAD_MS = 3_600_000


def broker_ms() -> int:
    return int(time.time() * 1000) + AHEAD_MS


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        ("2026-05-01T08:00:00.123456789Z", 1_777_622_400_123),
        ("2026-05-01T10:00:00.12+02:00", 1_777_622_400_120),
        ("2026-05-01T08:00:00Z", 1_777_622_400_000),
        ("2026-05-01T08:00:00.999999999Z", 1_777_622_400_999),
        ("", None),
        ("2026-05-01T08:00:00", None),
        ("2026-13-01T08:00:00Z", None),
        ("yesterday", None),
    ],
)
def test_the_text_of_a_moment_is_read_and_rounded_down(moment: str, expected: int | None) -> None:
    assert milliseconds_of(moment) == expected


def test_the_clock_is_never_ahead_of_the_brokers_and_goes_on_with_it() -> None:
    with Peer(clock_ms=broker_ms) as peer:
        cluster = Cluster(ClientSettings(peer.url))
        reader = EntryReader(cluster, TOPIC, AFTER_ALL)
        reader.last_message()
        clocks = BrokerClocks(cluster)
        first_ms = clocks.now_ms(TOPIC, reader.session)
        assert first_ms is not None
        assert broker_ms() - 10_000 < first_ms <= broker_ms()
        time.sleep(0.05)
        later_ms = clocks.now_ms(TOPIC, reader.session)
        assert later_ms is not None
        assert first_ms + 50 <= later_ms <= broker_ms()
        assert peer.requests.count("CommandConsumerStats") == 1, (
            "the broker is asked once in a while"
        )
        reader.close()
        peer.is_deleted = True
        last_ms = clocks.now_ms(TOPIC, None)
        assert last_ms is not None
        assert last_ms >= later_ms, "what is known of the broker stays while the topic is gone"
        cluster.close()


def test_a_clock_that_was_set_is_noticed_when_the_broker_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1_777_622_400_000]
    with Peer(clock_ms=lambda: clock[0]) as peer:
        cluster = Cluster(ClientSettings(peer.url))
        clocks = BrokerClocks(cluster)
        assert abs((clocks.now_ms(TOPIC, None) or 0) - clock[0]) < 5_000
        clock[0] -= 100_000
        monkeypatch.setattr(broker_clocks, "_LASTS_S", 0.0)
        assert abs((clocks.now_ms(TOPIC, None) or 0) - clock[0]) < 5_000
        cluster.close()


def test_a_broker_that_does_not_tell_is_not_asked_all_the_time() -> None:
    with Peer() as peer:
        cluster = Cluster(ClientSettings(peer.url))
        clocks = BrokerClocks(cluster)
        assert [clocks.now_ms(TOPIC, None) for _ in range(3)] == [None] * 3
        assert peer.requests.count("CommandConsumerStats") == 1
        cluster.close()


def test_a_topic_that_is_gone_has_no_clock() -> None:
    with Peer(is_deleted=True, clock_ms=broker_ms) as peer:
        cluster = Cluster(ClientSettings(peer.url))
        clocks = BrokerClocks(cluster)
        assert clocks.now_ms(TOPIC, None) is None
        asked = len(peer.requests)
        assert clocks.now_ms(TOPIC, None) is None
        assert len(peer.requests) == asked, "nor is it asked all the time"
        cluster.close()
