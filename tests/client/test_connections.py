"""Connections: how many there are, and for how long."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.client import session
from ledgerlake.client.cluster import ClientSettings, Cluster, shared_cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.client.topics import TopicSelection
from ledgerlake.errors import BrokerError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.message_id import BEFORE_ALL
from tests.entries import single
from tests.peer import TOPIC, Peer
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable


class _Moving(Peer):
    """A broker that says at each lookup that another address has the topic; it is at all of
    them.
    """

    hosts: list[str]

    def _answer(self, connection: Any, consumers: Any, event: Any) -> None:
        if isinstance(event, pb.CommandLookupTopic):
            self.lookup = {
                "broker_service_url": f"pulsar://{self.hosts.pop()}:{self.url.rpartition(':')[2]}"
            }
        super()._answer(connection, consumers, event)


def test_a_broker_that_names_ever_other_addresses_leaves_few_connections() -> None:
    peer = _Moving(host="0.0.0.0")
    peer.hosts = [f"127.0.1.{number}" for number in range(40)]
    with peer:
        cluster = Cluster(ClientSettings(peer.url))
        while peer.hosts:
            cluster.session_for(TOPIC)
        wait_until(lambda: len(peer._open) <= 16)
        cluster.close()


def test_names_that_differ_in_case_are_one_address() -> None:
    peer = _Moving()
    peer.hosts = ["localhost", "LOCALHOST", "LocalHost"]
    with peer:
        cluster = Cluster(ClientSettings(peer.url))
        while peer.hosts:
            cluster.session_for(TOPIC)
        assert peer.requests.count("CommandConnect") == 2
        cluster.close()


def test_connections_that_nobody_uses_are_closed_and_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "_UNUSED_S", 0.5)
    with Peer() as peer:
        peer.add(single(b"v"))
        clusters = [
            shared_cluster(ClientSettings(peer.url, poll_timeout_s=number))
            for number in range(1, 4)
        ]
        for cluster in clusters:
            assert cluster.topic_partitions(TOPIC) == [TOPIC]
        wait_until(lambda: not peer._open)
        assert clusters[0].topic_partitions(TOPIC) == [TOPIC]
        clusters[0].close()


def test_a_connection_with_a_reader_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_UNUSED_S", 0.5)
    with Peer() as peer:
        peer.add(single(b"v"))
        cluster = Cluster(ClientSettings(peer.url))
        reader = EntryReader(cluster, TOPIC, BEFORE_ALL)
        assert reader.next(5.0) is not None
        time.sleep(3.0)
        assert reader.session is not None
        assert peer.requests.count("CommandConnect") == 1
        reader.close()
        cluster.close()


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("what", ["partitions", "schemas", "sessions"])
def test_a_connection_that_answers_one_of_several_questions_by_an_error_is_not_in_use_for_good(
    what: str, failing: int
) -> None:
    names = [f"{TOPIC}-{number}" for number in range(3)]
    with Peer() as peer:
        peer.failing_topics = {names[failing]}
        cluster = Cluster(ClientSettings(peer.url, give_up_after_s=0.1))
        ask: dict[str, Callable[[], object]] = {
            "partitions": lambda: cluster.all_partitions(TopicSelection(tuple(names))),
            "schemas": lambda: cluster.schemas([(name, None) for name in names]),
        }
        if what == "sessions":
            assert set(cluster.sessions_for(names)) == set(names) - peer.failing_topics
        else:
            with pytest.raises(BrokerError, match="the test says no"):
                ask[what]()
        assert not cluster._service()[1].is_in_use
        cluster.close()
