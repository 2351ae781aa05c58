"""A micro-batch that was sent in part: what the topic has of it is not sent again, whatever
happened to the topic meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ledgerlake.client.cluster import ClientSettings
from ledgerlake.decode import schema
from ledgerlake.errors import TransportError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.publish import republisher
from ledgerlake.publish.outbox import Outbox
from ledgerlake.publish.republisher import Republisher
from ledgerlake.publish.target_client import Receipt
from ledgerlake.publish.target_reader import TargetReader
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.ordered_files import DataFile
from ledgerlake.wire.message_id import BEFORE_ALL, Position
from tests.entries import single
from tests.peer import Peer
from tests.publish.outboxes import NoTargetReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOPIC = "persistent://public/default/due"
VALUES = [b"%d" % number for number in range(20)]


@dataclass(frozen=True)
class Stored:
    target: str
    producer: str
    sequence: int
    value: bytes
    properties: dict[str, str] = field(default_factory=dict)


@dataclass
class Broker:
    """One with deduplication: ``last`` is what it knows of each producer; ``takes`` messages and
    then is away.

    ``topic``: where its one partition can be read. ``meanwhile`` is called once, before a producer
    is opened: the process that opens it was suspended.
    """

    partitions: int = 1
    takes: int = 10**9
    connections: int = 0
    all_connections: int = 0
    last: dict[tuple[str, str], int] = field(default_factory=dict)
    stored: list[Stored] = field(default_factory=list)
    topic: Peer | None = None
    meanwhile: Callable[[], None] | None = None

    def store(self, message: Stored) -> Position:
        self.stored.append(message)
        if self.topic is not None:
            self.topic.add(
                single(
                    message.value,
                    producer_name=message.producer,
                    sequence_id=message.sequence,
                    properties=[
                        pb.KeyValue(key=key, value=value)
                        for key, value in message.properties.items()
                    ],
                ),
                first=len(self.stored),
            )
        return Position(7, len(self.stored))

    @property
    def values(self) -> Counter[bytes]:
        return Counter(message.value for message in self.stored)


class Producer:
    def __init__(self, broker: Broker, target: str, name: str) -> None:
        self._broker = broker
        self._key = target, name
        self.last_sequence_id = broker.last.get(self._key, -1)

    def send(
        self, metadata: pb.MessageMetadata, content: bytes, on_receipt: Callable[[Receipt], None]
    ) -> None:
        broker, position = self._broker, BEFORE_ALL
        if broker.takes == 0:
            on_receipt(Receipt("TransportError"))
            return
        broker.takes -= 1
        if metadata.sequence_id > broker.last.get(self._key, -1):
            broker.last[self._key] = metadata.sequence_id
            properties = {pair.key: pair.value for pair in metadata.properties}
            position = broker.store(Stored(*self._key, metadata.sequence_id, content, properties))
        on_receipt(Receipt("Ok", position))


class Client:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        broker.connections += 1
        broker.all_connections += 1

    def partitions(self, topic: str) -> list[str]:
        return [f"{topic}-partition-{number}" for number in range(self._broker.partitions)]

    def open_producer(self, topic_partition: str, name: str, _earlier_number: int) -> Producer:
        if meanwhile := self._broker.meanwhile:
            self._broker.meanwhile = None
            meanwhile()
        return Producer(self._broker, topic_partition, name)

    def close(self) -> None:
        self._broker.connections -= 1


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    scripted_broker = Broker()
    monkeypatch.setattr(republisher, "TargetClient", lambda _settings: Client(scripted_broker))
    monkeypatch.setattr(republisher, "TargetReader", NoTargetReader)
    monkeypatch.setattr(republisher, "_RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(republisher, "_RETRY_MOST_S", 0.05)
    return scripted_broker


@pytest.fixture
def readable(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    """The topic as a reader gets it; an entry of somebody else is in it."""
    monkeypatch.setattr(republisher, "TargetReader", TargetReader)
    with Peer() as topic:
        topic.add(single(b"of somebody else"))
        broker.topic = topic
        yield topic


def add(outbox: Outbox, batch_id: int, values: list[bytes]) -> None:
    """A micro-batch of messages with keys of their own is committed."""
    count = len(values)
    columns: dict[str, pa.Array] = {
        field.name: pa.nulls(count, field.type) for field in schema.MESSAGES
    }
    columns["value"] = pa.array(values, pa.binary())
    columns["key"] = pa.array([f"key {number}" for number in range(count)])
    columns["message_id"] = pa.array([f"1:{number}" for number in range(count)])
    columns["deliver_at"] = pa.array([1_000_000] * count, schema.MESSAGES.field("deliver_at").type)
    columns["is_null"] = pa.array([False] * count)
    name = f"{batch_id}.parquet"
    pq.write_table(pa.table(columns, schema=schema.MESSAGES), f"{outbox.folder}/{name}")
    outbox.add(BatchCommit("s", "q", batch_id, 1), {"t": [DataFile(name, 4, count, "{}")]})
    outbox.commit(batch_id)


def opened(folder: Path) -> Outbox:
    outbox = Outbox(Place(str(folder)))
    outbox.begin(10, None)
    return outbox


@contextmanager
def publisher(outbox: Outbox, url: str = "pulsar://broker") -> Iterator[Republisher]:
    due_publisher = Republisher(
        outbox, ClientSettings(url), TOPIC, "s", lambda: True, lambda _error: None
    )
    due_publisher.start()
    try:
        yield due_publisher
    finally:
        due_publisher.stop()


def send(outbox: Outbox, timeout_s: float = 20.0, url: str = "pulsar://broker") -> None:
    with publisher(outbox, url) as due_publisher:
        due_publisher.drain(timeout_s)


def send_in_part(outbox: Outbox, broker: Broker, count: int) -> None:
    """The process ends when the broker has stored so many messages, and the broker is back."""
    broker.takes = count
    with pytest.raises(TransportError):
        send(outbox, 1.0, "pulsar://broker" if broker.topic is None else broker.topic.url)
    assert broker.takes == 0
    broker.takes = 10**9


def test_a_micro_batch_that_is_half_sent_when_the_topic_grows_is_routed_as_before(
    tmp_path: Path, broker: Broker
) -> None:
    outbox = opened(tmp_path)
    add(outbox, 1, VALUES)
    send_in_part(outbox, broker, 5)
    broker.partitions = 2
    send(opened(tmp_path))
    assert broker.values == Counter(VALUES)


def test_micro_batches_behind_it_are_routed_among_the_partitions_that_there_are_now(
    tmp_path: Path, broker: Broker
) -> None:
    outbox = opened(tmp_path)
    add(outbox, 1, VALUES)
    send_in_part(outbox, broker, 5)
    broker.partitions = 2
    later = [b"later %d" % number for number in range(20)]
    add(outbox, 2, later)
    send_in_part(outbox, broker, 30)
    broker.partitions = 3
    send(opened(tmp_path))
    assert broker.values == Counter(VALUES + later)
    assert {message.target[-1] for message in broker.stored if message.value in VALUES} == {"0"}
    assert {message.target[-1] for message in broker.stored if message.value in later} == {"0", "1"}


def test_a_topic_that_was_made_again_with_fewer_partitions_gets_what_is_left(
    tmp_path: Path, broker: Broker
) -> None:
    broker.partitions = 3
    outbox = opened(tmp_path)
    add(outbox, 1, VALUES)
    send_in_part(outbox, broker, 5)
    broker.partitions = 1
    broker.last.clear()
    broker.stored.clear()
    send(opened(tmp_path))
    assert set(broker.values) <= set(VALUES)
    assert opened(tmp_path).ready() == []


@pytest.mark.parametrize("count", [1, 7, 20])
def test_what_the_topic_has_is_not_sent_again_when_the_broker_has_forgotten_the_producer(
    tmp_path: Path, broker: Broker, readable: Peer, count: int
) -> None:
    outbox = opened(tmp_path)
    add(outbox, 1, [b"first"])
    send(outbox, url=readable.url)
    add(outbox, 2, VALUES)
    if count < 20:
        send_in_part(outbox, broker, count)
    else:
        kill_before_it_is_recorded(outbox, broker)
    broker.last.clear()
    send(opened(tmp_path), url=readable.url)
    assert broker.values == Counter([b"first", *VALUES])


def kill_before_it_is_recorded(outbox: Outbox, broker: Broker) -> None:
    """The process ends behind the last receipt."""

    def killed(_batch: Any) -> None:
        raise ConnectionError("killed")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(outbox, "sent", killed)
        with pytest.raises(TransportError):
            send(outbox, 1.0, broker.topic.url if broker.topic is not None else "")


def test_a_micro_batch_whose_sending_has_not_begun_is_sent_without_a_look_at_the_topic(
    tmp_path: Path, broker: Broker, readable: Peer
) -> None:
    outbox = opened(tmp_path)
    add(outbox, 1, [b"first"])
    send(outbox, url=readable.url)
    broker.last.clear()
    add(outbox, 2, VALUES)
    looks = readable.requests.count("CommandFlow")
    send(opened(tmp_path), url=readable.url)
    assert broker.values == Counter([b"first", *VALUES])
    assert readable.requests.count("CommandFlow") == looks


def test_a_connection_is_kept_for_the_next_micro_batch_and_not_for_long(
    tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(republisher, "_KEPT_S", 1.0)
    outbox = opened(tmp_path)
    with publisher(outbox) as due_publisher:
        for batch_id in (1, 2):
            add(outbox, batch_id, VALUES)
            due_publisher.drain(20)
        assert (broker.all_connections, broker.connections) == (1, 1)
        deadline_s = time.monotonic() + 20
        while broker.connections and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert broker.connections == 0
        add(outbox, 3, VALUES)
        due_publisher.drain(20)
    assert broker.values == Counter(3 * VALUES)
    assert broker.connections == 0


def test_a_sender_that_is_still_connected_learns_what_another_process_has_sent(
    tmp_path: Path, broker: Broker, readable: Peer
) -> None:
    outbox = opened(tmp_path)
    add(outbox, 1, [b"first"])
    with publisher(outbox, readable.url) as due_publisher:
        due_publisher.drain(20)
        successor = opened(tmp_path)
        add(successor, 2, VALUES)
        send_in_part(successor, broker, 7)
        broker.last.clear()
        add(outbox, 2, VALUES)
        due_publisher.drain(20)
    assert broker.values == Counter([b"first", *VALUES])


@pytest.mark.parametrize("count", [1, 7, 20, 25, 40])
def test_a_process_that_was_suspended_before_it_sent_doubles_nothing_of_its_successor(
    tmp_path: Path, broker: Broker, readable: Peer, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    later = [b"later %d" % number for number in range(20)]

    def succeed() -> None:
        successor = opened(tmp_path)
        add(successor, 3, later)
        if count < 40:
            send_in_part(successor, broker, count)
        else:
            send(successor, url=readable.url)

    outbox = opened(tmp_path)
    add(outbox, 1, [b"first"])
    send(outbox, url=readable.url)
    add(outbox, 2, VALUES)
    broker.meanwhile = succeed
    with caplog.at_level(logging.WARNING):
        send(outbox, url=readable.url)
        send(opened(tmp_path), url=readable.url)
    assert [message.value for message in broker.stored] == [b"first", *VALUES, *later]
    assert not [record.message for record in caplog.records if "another producer" in record.message]


@pytest.mark.parametrize("number", [6, 2**62])
def test_a_number_of_somebody_else_who_can_be_read_hides_and_doubles_no_message(
    tmp_path: Path, broker: Broker, readable: Peer, number: int
) -> None:
    outbox = opened(tmp_path)
    add(outbox, 1, VALUES[:5])
    send(outbox, url=readable.url)
    add(outbox, 2, VALUES[5:])
    (key,) = broker.last

    def use_the_name() -> None:
        broker.last[key] = number
        broker.store(Stored(*key, number, b"of somebody else"))

    broker.meanwhile = use_the_name
    send(outbox, url=readable.url)
    assert [message.value for message in broker.stored] == [
        *VALUES[:5],
        b"of somebody else",
        *VALUES[5:],
    ]


@pytest.mark.parametrize("when", ["at the first start", "at the second start"])
def test_a_topic_that_may_not_be_read_holds_up_nothing_and_is_named(
    tmp_path: Path, broker: Broker, readable: Peer, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = opened(tmp_path)
    add(outbox, 1, VALUES)
    refused: list[int] = [pb.AuthorizationError] * 2
    if when == "at the first start":
        readable.refuse_subscribe = refused[:1]
    send_in_part(outbox, broker, 5)
    if when == "at the second start":
        readable.refuse_subscribe = refused
    broker.last.clear()
    with caplog.at_level(logging.WARNING):
        send(opened(tmp_path), url=readable.url)
    assert set(broker.values) == set(VALUES)
    warnings = [
        record.message
        for record in caplog.records
        if "and the topic does not tell" in record.message
    ]
    assert len(warnings) == 1
    assert warnings[0].endswith("; some may be there twice")


FOREIGN_NUMBERS = [6, 2**62]


@pytest.mark.parametrize("number", FOREIGN_NUMBERS)
def test_a_number_that_somebody_else_used_under_the_producers_name_hides_no_message(
    tmp_path: Path, broker: Broker, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = opened(tmp_path)
    add(outbox, 1, VALUES[:5])
    send(outbox)
    (key,) = broker.last
    broker.last[key] = number
    with caplog.at_level(logging.WARNING):
        for batch_id in (2, 3):
            add(outbox, batch_id, [b"%d of %d" % (n, batch_id) for n in range(5)])
            send(outbox)
    later = [b"%d of %d" % (n, batch_id) for batch_id in (2, 3) for n in range(5)]
    assert [message.value for message in broker.stored] == VALUES[:5] + later
    assert [
        record.message for record in caplog.records if "another producer has used" in record.message
    ] == [
        f"another producer has used the name {key[1]} on {key[0]}, with the sequence id {number}; "
        "messages of t are sent there under another name from now on, and none is lost: either the "
        "checkpoint was restored from a copy, and the messages sent since the copy come again; or "
        "look at who may write to that topic"
    ]


@pytest.mark.parametrize("ends_again", [False, True])
def test_a_number_of_somebody_else_amid_a_micro_batch_hides_and_doubles_no_message(
    tmp_path: Path, broker: Broker, readable: Peer, ends_again: bool
) -> None:
    outbox = opened(tmp_path)
    add(outbox, 1, VALUES)
    send_in_part(outbox, broker, 5)
    (key,) = broker.last
    broker.last[key] = 2**62
    if ends_again:
        send_in_part(opened(tmp_path), broker, 7)
        broker.last.clear()
    send(opened(tmp_path), url=readable.url)
    assert [message.value for message in broker.stored] == VALUES


def test_each_name_that_somebody_else_used_is_left(tmp_path: Path, broker: Broker) -> None:
    outbox = opened(tmp_path)
    for batch_id in range(1, 5):
        add(outbox, batch_id, [b"%d" % batch_id])
        send(opened(tmp_path))
        broker.last = dict.fromkeys(broker.last, 2**62)
    assert broker.values == Counter([b"1", b"2", b"3", b"4"])
    assert len({message.producer for message in broker.stored}) == 4
