"""How far a pipeline is behind, of a topic that is not the one that was read."""

from __future__ import annotations

import pytest

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.inspect.lag import Lag, _lag
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.wire.message_id import Position
from tests.entries import single
from tests.peer import TOPIC, Peer


@pytest.mark.parametrize(("taken", "is_another"), [(Position(7, 5), True), (Position(3, 1), False)])
def test_a_topic_that_ends_before_what_was_read_is_named_so(taken: Position, is_another: bool) -> None:
    with Peer() as peer:
        peer.add(single(b"a", index=0), single(b"b", index=1), ledger_id=3)
        cluster = Cluster(ClientSettings(peer.url))
        try:
            lag = _lag(cluster, TOPIC, PartitionOffset(taken, time_ms=1, index=9))
        finally:
            cluster.close()
    if is_another:
        assert (lag.messages, lag.is_another_topic) == (2, True)
        assert lag.sentence() == (
            f"{TOPIC}: the topic ends at 3:1, before 7:5, up to which it was read: it is another topic of that name"
        )
    else:
        assert lag == Lag(TOPIC, "3:1", "3:1", 0, 0)


def test_a_compacted_topic_may_end_before_what_was_read() -> None:
    with Peer() as peer:
        peer.add(single(b"a", index=0), single(b"b", index=1), ledger_id=3)
        cluster = Cluster(ClientSettings(peer.url, read_compacted=True))
        try:
            lag = _lag(cluster, TOPIC, PartitionOffset(Position(7, 5), time_ms=1, index=9))
        finally:
            cluster.close()
    assert (lag.messages, lag.is_another_topic) == (0, False)
