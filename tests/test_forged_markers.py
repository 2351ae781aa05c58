"""Markers by which a producer claims chunks that others have published (PIP-37, option 2)."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from ledgerlake.wire.chunks import promise
from ledgerlake.wire.limits import MAX_TIME_MS
from tests.simulation.by_hand import by_hand, put
from tests.simulation.driver import REJECTS, Edges
from tests.simulation.history import History

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulation.broker import Topic
    from tests.simulation.history import Step


@pytest.fixture(scope="module")
def edges() -> Iterator[Edges]:
    with Edges() as entered:
        yield entered


class Forged(History):
    """The producer ``x`` publishes one chunk of a message, and a marker that lists what others
    published.
    """

    deliver_in_ms = 0
    marker_deliver_in_ms = 0

    def _send_large(self, topic: Topic) -> None:
        self._send_first_half(topic)
        self._send_second_half(topic)

    def _send_first_half(self, topic: Topic) -> None:
        self.payload = self._payload().ljust(16, b".")
        self.deliver_ms = self.brokers.clock_ms + self.deliver_in_ms if self.deliver_in_ms else 0
        self.fields: dict[str, Any] = {
            "uuid": "p-1",
            "num_chunks_from_msg": 2,
            "total_chunk_msg_size": 16,
        }
        self.fields["publish_time"] = self.brokers.clock_ms
        if self.deliver_ms:
            self.fields["deliver_at_time"] = self.deliver_ms
        self.listed = [
            self._store(topic, self._metadata(chunk_id=0, **self.fields), self.payload[:8])
        ]

    def _send_second_half(self, topic: Topic) -> None:
        self.listed.append(
            self._store(topic, self._metadata(chunk_id=1, **self.fields), self.payload[8:])
        )
        self._confirm(topic, self.payload, *self.listed, deliver_ms=self.deliver_ms)

    def _send_big(self, topic: Topic) -> None:
        payload = self._payload().ljust(10_000, b".")
        self.listed = [*getattr(self, "listed", []), self._store(topic, self._metadata(), payload)]
        self._confirm(topic, payload, self.listed[-1])

    def _send_chunk(self, topic: Topic) -> None:
        metadata = self._metadata(
            chunk_id=0, num_chunks_from_msg=2, total_chunk_msg_size=4, **self._own_fields()
        )
        self.own = self._store(topic, metadata, b"ab")

    def _send_marker(self, topic: Topic) -> None:
        places = self.listed if len(self.listed) > 1 else [self.own, *self.listed]
        fields = self._own_fields()
        if self.marker_deliver_in_ms:
            fields["deliver_at_time"] = self.brokers.clock_ms + self.marker_deliver_in_ms
        payload = json.dumps({"chunks": [str(place) for place in places]}).encode()
        self._store(topic, self._metadata(num_chunks_from_msg=1, **fields), payload)

    def _own_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"producer_name": "x", "uuid": "x-1", "properties": [promise()]}
        return fields | {"publish_time": self.brokers.clock_ms}

    def rejected(self) -> list[tuple[str, str]]:
        """Return what ``rejects`` holds: positions and reasons."""
        names = [name for commit in self.lake.tables[REJECTS].commits for name in commit.files]
        contents = (io.BytesIO(self.disk.files[f"{REJECTS}/{name}"]) for name in names)
        rows = [
            row
            for content in contents
            for row in pq.read_table(content, use_threads=False).to_pylist()
        ]
        return [(row["message_id"], row["reason"]) for row in rows]


@pytest.mark.parametrize("deliver_in_ms", [0, 40_000])
@pytest.mark.parametrize("marker_deliver_in_ms", [0, 5_000])
@pytest.mark.parametrize("marker_at_s", [5.0, 8.0])
def test_a_whole_message_of_another_producer_is_delivered_once(
    edges: Edges, deliver_in_ms: int, marker_deliver_in_ms: int, marker_at_s: float
) -> None:
    forged = put(5.0, "chunk"), put(marker_at_s, "marker")
    history = Forged(by_hand(put(2.0, "large"), *forged, put(10.0), put(12.0, count=20)), edges)
    history.deliver_in_ms, history.marker_deliver_in_ms = deliver_in_ms, marker_deliver_in_ms
    assert history.play().violations == []


@pytest.mark.parametrize(
    ("steps"),
    [
        pytest.param([put(5.0, "chunk"), put(8.0, "marker")], id="each in its own micro-batch"),
        pytest.param([put(5.0, "chunk"), put(5.0, "marker")], id="in one micro-batch"),
    ],
)
@pytest.mark.parametrize("deliver_in_ms", [0, 40_000])
@pytest.mark.parametrize("marker_deliver_in_ms", [0, 5_000])
def test_an_incomplete_message_of_another_producer_goes_on(
    edges: Edges, steps: list[Step], deliver_in_ms: int, marker_deliver_in_ms: int
) -> None:
    script = by_hand(
        put(2.0, "first_half"), *steps, put(10.0, "second_half"), put(12.0), put(14.0, count=20)
    )
    history = Forged(script, edges)
    history.deliver_in_ms, history.marker_deliver_in_ms = deliver_in_ms, marker_deliver_in_ms
    assert history.play().violations == []


def test_a_marker_rejects_no_messages_of_others(edges: Edges) -> None:
    script = by_hand(put(2.0, "big", 10), put(2.0, "chunk"), put(2.0, "marker"), put(6.0))
    history = Forged(replace(script, entries_per_ledger=1000), edges)
    assert history.play().violations == []
    listed = {str(position) for position in history.listed}
    assert [reject for reject in history.rejected() if reject[0] in listed] == []
    assert len(history.rejected()) <= 2


class Waiting(History):
    """The producer ``x`` publishes a large message that is due in the last year that is a time."""

    def _send_marked(self, topic: Topic) -> None:
        """The chunks came in an order that only a marker can tell."""
        fields = {"producer_name": "x", "uuid": "x-1", "publish_time": self.brokers.clock_ms}
        fields |= {"properties": [promise()], "deliver_at_time": MAX_TIME_MS}
        chunks = {"num_chunks_from_msg": 3, "total_chunk_msg_size": 6}
        places = {
            chunk_id: self._store(
                topic, self._metadata(chunk_id=chunk_id, **fields, **chunks), b"ab"
            )
            for chunk_id in (0, 2, 1)
        }
        payload = json.dumps({"chunks": [str(places[chunk_id]) for chunk_id in range(3)]}).encode()
        self._store(topic, self._metadata(num_chunks_from_msg=1, **fields), payload)


def test_a_large_message_that_is_never_due_keeps_nothing_in_the_topic(edges: Edges) -> None:
    script = by_hand(put(1.0), put(2.0, "marked"), put(4.0, count=20), put(8.0, count=20))
    history = Waiting(script, edges)
    assert history.play().violations == []
    topic = history.topics[0]
    assert [cursor.mark_delete for cursor in topic.cursors.values()] == [topic.last]
