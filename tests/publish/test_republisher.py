"""Sending due messages: nothing behind a message that failed is stored before it, and none is lost
or held up for ever.

The broker here stands for one with the target's producers before it: a message is stored a little
after it was sent, and after the first message that fails a producer stores none.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from ledgerlake.client.cluster import ClientSettings
from ledgerlake.decode import schema
from ledgerlake.errors import CheckpointError, LedgerlakeError, TransportError
from ledgerlake.publish import republisher
from ledgerlake.publish.outbox import Outbox
from ledgerlake.publish.republisher import Republisher
from ledgerlake.publish.target_client import Receipt
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.ordered_files import DataFile
from ledgerlake.wire.entry import parse_entry
from ledgerlake.wire.message_id import Position
from tests.peer import TOPIC, Peer
from tests.publish.outboxes import ROWS, NoTargetReader, filled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ledgerlake.pb import pulsar_pb2 as pb


@dataclass
class Broker:
    """``is_away`` until what has been sent has timed out, or would have; ``breaks_at`` is the
    message whose producer then fails.
    """

    deduplicates: bool = True
    is_away: bool = False
    breaks_at: bytes | None = None
    too_large: frozenset[bytes] = frozenset()
    stored: list[tuple[bytes, dict[str, str]]] = field(default_factory=list)
    last: int = -1
    most_pending: int = 0

    @property
    def values(self) -> list[bytes]:
        return [value for value, _ in self.stored]


@dataclass(frozen=True)
class Sent:
    sequence: int
    content: bytes
    properties: dict[str, str]
    on_receipt: Callable[[Receipt], None]


class Producer:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._pending: list[Sent] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.last_sequence_id = broker.last if broker.deduplicates else -1
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def send(
        self, metadata: pb.MessageMetadata, content: bytes, on_receipt: Callable[[Receipt], None]
    ) -> None:
        if content in self._broker.too_large:
            on_receipt(Receipt("MessageTooBig"))
            return
        properties = {entry.key: entry.value for entry in metadata.properties}
        with self._lock:
            if self._closed.is_set():
                on_receipt(Receipt("AlreadyClosed"))
                return
            self._pending.append(Sent(metadata.sequence_id, content, properties, on_receipt))
            self._broker.most_pending = max(self._broker.most_pending, len(self._pending))

    def close(self) -> None:
        self._closed.set()
        self.thread.join()

    def _work(self) -> None:
        while not self._closed.wait(0.005):
            with self._lock:
                pending = self._pending
                if self._broker.is_away:
                    # It is back when something has waited for it.
                    self._broker.is_away = not pending
                    continue
                self._pending = []
            for sent in pending:
                self._answer(sent)
        for sent in self._pending:
            sent.on_receipt(Receipt("AlreadyClosed"))

    def _answer(self, sent: Sent) -> None:
        if sent.content == self._broker.breaks_at:
            self._broker.breaks_at = None
            self._closed.set()
        if self._closed.is_set():
            sent.on_receipt(Receipt("AlreadyClosed"))
            return
        if sent.sequence > self._broker.last or not self._broker.deduplicates:
            self._broker.stored.append((sent.content, sent.properties))
            self._broker.last = max(self._broker.last, sent.sequence)
        sent.on_receipt(Receipt("Ok", Position(7, len(self._broker.stored))))


class Client:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._producers: list[Producer] = []

    def partitions(self, topic: str) -> list[str]:
        return [topic]

    def open_producer(self, _topic_partition: str, _name: str, _earlier_number: int) -> Producer:
        self._producers.append(Producer(self._broker))
        return self._producers[-1]

    def close(self) -> None:
        for producer in self._producers:
            producer.close()


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    scripted_broker = Broker()
    monkeypatch.setattr(republisher, "TargetClient", lambda _settings: Client(scripted_broker))
    monkeypatch.setattr(republisher, "TargetReader", NoTargetReader)
    monkeypatch.setattr(republisher, "_RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(republisher, "_RETRY_MOST_S", 0.05)
    return scripted_broker


def send(outbox: Outbox, timeout_s: float = 20.0) -> list[LedgerlakeError]:
    """Send everything; what ended the query."""
    ended: list[LedgerlakeError] = []
    due_publisher = Republisher(
        outbox, ClientSettings("pulsar://broker"), "due", "s", lambda: True, ended.append
    )
    due_publisher.start()
    try:
        due_publisher.drain(timeout_s)
    finally:
        due_publisher.stop()
    return ended


@pytest.mark.parametrize("deduplicates", [True, False])
def test_messages_that_wait_for_a_broker_come_once_and_in_order(
    tmp_path: Path, broker: Broker, deduplicates: bool
) -> None:
    broker.deduplicates, broker.is_away = deduplicates, True
    outbox = filled(tmp_path)
    assert send(outbox) == []
    assert broker.values == [b"%d" % number for number in range(ROWS)]
    assert outbox.ready() == []
    assert broker.most_pending <= 500


@pytest.mark.parametrize("deduplicates", [True, False])
def test_after_a_producer_that_failed_the_next_goes_on_behind_what_is_confirmed(
    tmp_path: Path, broker: Broker, deduplicates: bool
) -> None:
    broker.deduplicates, broker.breaks_at = deduplicates, b"1234"
    outbox = filled(tmp_path)
    assert send(outbox) == []
    assert broker.values == [b"%d" % number for number in range(ROWS)]


@pytest.mark.parametrize("deduplicates", [True, False])
@pytest.mark.parametrize("large", [0, 7])
def test_a_message_that_is_too_large_is_replaced_by_an_empty_one_and_is_named(
    tmp_path: Path, broker: Broker, deduplicates: bool, large: int, caplog: pytest.LogCaptureFixture
) -> None:
    broker.deduplicates, broker.too_large = deduplicates, frozenset([b"%d" % large])
    outbox = filled(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert send(outbox) == []
    assert broker.values == [b"" if number == large else b"%d" % number for number in range(ROWS)]
    assert broker.stored[large][1] == {
        "ledgerlake.topic": "t",
        "ledgerlake.message_id": f"1:{large}",
        "ledgerlake.deliver_at": "1000",
        "ledgerlake.too_large": "true",
    }
    assert [record.message for record in caplog.records] == [
        f"the message 1:{large} of t is larger than due takes; it is replaced there by an empty "
        "message with the "
        "property ledgerlake.too_large, and the table, or rejects, has the full message"
    ]


def test_rows_that_are_no_messages_hold_up_none_after_them(
    tmp_path: Path, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = filled(tmp_path, 10, event_ms=1)
    table = pq.read_table(tmp_path / "part.parquet")
    never, early = (
        pa.scalar(None, table.schema.field("deliver_at").type),
        pa.scalar(-1000, pa.int64()),
    )
    for column, row, value in (
        ("deliver_at", 3, never),
        ("event_time", 5, early.cast(table["event_time"].type)),
    ):
        is_row = pa.array([number == row for number in range(10)])
        index = table.schema.get_field_index(column)
        table = table.set_column(
            index, table.schema.field(column), pc.if_else(is_row, value, table[column])
        )
    pq.write_table(table, tmp_path / "part.parquet")
    with caplog.at_level(logging.WARNING):
        assert send(outbox) == []
    assert broker.values == [b"" if number == 5 else b"%d" % number for number in range(10)]
    assert "ledgerlake.deliver_at" not in broker.stored[3][1]
    assert broker.stored[5][1]["ledgerlake.unusable"] == "true"
    assert [record.message for record in caplog.records] == [
        "the message 1:5 of t is none that a topic can have; it is replaced there by an empty "
        "message with the property "
        "ledgerlake.unusable, and the table, or rejects, has the full message"
    ]


def test_a_copy_promises_no_marker_and_has_the_pipelines_word_on_its_origin(
    tmp_path: Path, broker: Broker
) -> None:
    own = {
        "ledgerlake.chunks": "1",
        "ledgerlake.topic": "forged",
        "ledgerlake.null": "true",
        "mine": "kept",
    }
    assert send(filled(tmp_path, 1, properties=own)) == []
    ((_, properties),) = broker.stored
    assert properties == {
        "mine": "kept",
        "ledgerlake.topic": "t",
        "ledgerlake.message_id": "1:0",
        "ledgerlake.deliver_at": "1000",
    }


def test_a_message_that_a_policy_of_the_topic_refuses_is_replaced_and_those_after_it_come(
    tmp_path: Path,
) -> None:
    ended: list[LedgerlakeError] = []
    outbox = filled(tmp_path, 50, others={20: b"L" * 5000})
    with Peer(largest_stored_bytes=2000) as peer:
        due_publisher = Republisher(
            outbox,
            ClientSettings(peer.url, give_up_after_s=2),
            TOPIC,
            "s",
            lambda: True,
            ended.append,
        )
        due_publisher.start()
        due_publisher.drain(20.0)
        due_publisher.stop()
        assert [first for first, _ in peer.stored] == list(range(50))
    entries_by_sequence = {
        entry.metadata.sequence_id: entry for entry in map(parse_entry, peer.received)
    }
    assert [bytes(entries_by_sequence[number].payload) for number in range(50)] == [
        b"" if number == 20 else b"%d" % number for number in range(50)
    ]
    assert "ledgerlake.too_large" in {
        entry.key for entry in entries_by_sequence[20].metadata.properties
    }


def test_a_message_without_a_value_has_none_on_the_topic_and_an_empty_one_stays_a_value(
    tmp_path: Path,
) -> None:
    outbox = filled(tmp_path, 3, others={1: None, 2: b""})
    with Peer() as peer:
        due_publisher = Republisher(
            outbox, ClientSettings(peer.url), TOPIC, "s", lambda: True, lambda _error: None
        )
        due_publisher.start()
        due_publisher.drain(20.0)
        due_publisher.stop()
        assert [parse_entry(raw).metadata.null_value for raw in peer.received] == [
            False,
            True,
            False,
        ]


def test_a_sender_that_waits_for_a_broker_can_be_stopped(
    tmp_path: Path, broker: Broker, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Producer, "_work", lambda _self: None)
    outbox = filled(tmp_path, 10)
    with pytest.raises(TransportError, match=r"could not be sent in 0\.2 s and wait in"):
        send(outbox, 0.2)
    assert len(outbox.ready()) == 1


def test_a_time_that_no_calendar_has_holds_nothing_up(tmp_path: Path, broker: Broker) -> None:
    outbox = filled(tmp_path, 3, event_ms=2**52)
    assert send(outbox) == []
    assert broker.values == [b"0", b"1", b"2"]


@pytest.mark.parametrize("is_missing", [True, False])
def test_an_outbox_that_is_damaged_ends_the_query_with_its_sentence(
    tmp_path: Path, broker: Broker, is_missing: bool
) -> None:
    outbox = filled(tmp_path, 3)
    if is_missing:
        (tmp_path / "part.parquet").unlink()
    else:
        (tmp_path / "part.parquet").write_bytes(b"PAR1 and no more")
    ended: list[LedgerlakeError] = []
    due_publisher = Republisher(
        outbox, ClientSettings("pulsar://broker"), "due", "s", lambda: True, ended.append
    )
    due_publisher.start()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"part\.parquet.*not sent; restore it from a"):
            due_publisher.drain(20.0)
    due_publisher.stop()
    assert len(ended) == 1
    assert len(outbox.ready()) == 1
    assert broker.stored == []


def test_a_file_of_the_outbox_is_sent_with_one_row_group_in_memory(tmp_path: Path) -> None:
    groups, group_bytes = 16, 1024 * 1024
    values = pa.table({"value": [os.urandom(group_bytes) for _ in range(groups)]})
    pq.write_table(values, tmp_path / "part.parquet", row_group_size=1)
    del values
    before, most = pa.total_allocated_bytes(), 0
    count = 0
    for _ in republisher._rows(Place(str(tmp_path)), "part.parquet"):
        count, most = count + 1, max(most, pa.total_allocated_bytes() - before)
    assert count == groups
    assert most < 6 * group_bytes


def test_who_waits_until_everything_is_sent_may_look_around_meanwhile(tmp_path: Path) -> None:
    outbox = filled(tmp_path, 20)
    with Peer(store_pause_s=0.1) as peer:
        due_publisher = Republisher(
            outbox, ClientSettings(peer.url), TOPIC, "s", lambda: True, lambda _error: None
        )
        due_publisher.start()
        looks = 0
        while not due_publisher.drain(20.0, 0.1):
            looks += 1
        due_publisher.stop()
        assert looks > 0
        assert len(peer.stored) == 20


class Uses(threading.Event):
    """An event that, at a use of the sender's, lets others act before the sender goes on."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        super().__init__()
        self._at, self._act, self.uses = at, act, 0
        self.was_set = threading.Event()

    def _use(self) -> None:
        if threading.current_thread().name == "ledgerlake-republish":
            self.uses += 1
            if self.uses == self._at:
                self._act()

    def clear(self) -> None:
        super().clear()
        self._use()

    def set(self) -> None:
        super().set()
        self.was_set.set()

    def is_set(self) -> bool:
        result = super().is_set()
        self._use()
        return result

    def wait(self, timeout: float | None = None) -> bool:
        self._use()
        return super().wait(timeout)


@pytest.mark.parametrize("at", range(1, 4))
def test_what_comes_at_any_moment_is_sent_when_everything_is_said_to_be(
    tmp_path: Path, broker: Broker, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = filled(tmp_path, 20)
    ready, is_there = outbox.ready, threading.Event()
    monkeypatch.setattr(outbox, "ready", lambda: ready() if is_there.is_set() else [])
    due_publisher = Republisher(
        outbox, ClientSettings("pulsar://broker"), "due", "s", lambda: True, lambda _error: None
    )
    seen: list[int] = []

    def drain() -> None:
        due_publisher.drain(20.0)
        seen.append(len(broker.stored))

    drainer = threading.Thread(target=drain)

    def come() -> None:
        is_there.set()
        wake.was_set.clear()
        drainer.start()
        wake.was_set.wait(5.0)

    wake = due_publisher._wake = Uses(at, come)
    due_publisher.start()
    # Its sender looks again and again until the moment is there.
    while not drainer.ident:
        due_publisher.notify()
    drainer.join()
    due_publisher.stop()
    assert seen == [20]


def test_a_topic_that_stores_slowly_is_waited_for_as_long_as_it_stores(tmp_path: Path) -> None:
    outbox = filled(tmp_path, 20)
    with Peer(store_pause_s=0.1) as peer:
        due_publisher = Republisher(
            outbox, ClientSettings(peer.url), TOPIC, "s", lambda: True, lambda _error: None
        )
        due_publisher.start()
        assert due_publisher.drain(1.0)
        due_publisher.stop()
        assert len(peer.stored) == 20


@pytest.mark.parametrize("most_producers", [1, 2])
def test_a_topic_that_takes_few_producers_gets_the_messages_of_all_topic_partitions(
    tmp_path: Path, most_producers: int, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = Outbox(Place(str(tmp_path)))
    outbox.begin(None, None)
    sources = [f"persistent://public/default/t-partition-{number}" for number in range(5)]
    for batch_id in range(2):
        files: dict[str, list[DataFile]] = {}
        for number, source in enumerate([*sources, *sources]):
            name = f"part-{batch_id}-{number}.parquet"
            columns: dict[str, pa.Array] = {
                field.name: pa.nulls(3, field.type) for field in schema.MESSAGES
            }
            columns["value"] = pa.array(
                [b"%d %d %d" % (batch_id, number, row) for row in range(3)], pa.binary()
            )
            columns["is_null"] = columns["value"].is_null()
            columns["message_id"] = pa.array(["1:1"] * 3)
            pq.write_table(pa.table(columns, schema=schema.MESSAGES), tmp_path / name)
            files.setdefault(source, []).append(DataFile(name, 4, 3, "{}"))
        outbox.add(BatchCommit("s", "q", batch_id, 1), files)
        outbox.commit(batch_id)
    with Peer(most_producers=most_producers) as peer, caplog.at_level(logging.WARNING):
        settings = ClientSettings(peer.url, give_up_after_s=0.5)
        due_publisher = Republisher(outbox, settings, TOPIC, "s", lambda: True, lambda _error: None)
        due_publisher.start()
        try:
            due_publisher.drain(20.0)
        finally:
            due_publisher.stop()
        values = [bytes(parse_entry(raw).payload) for raw in peer.received]
        assert len(values) == len(set(values)) == 60
        assert len(peer.stored) == 60
        names = {parse_entry(raw).metadata.producer_name for raw in peer.received}
        assert len(names) == 5
    assert "another producer" not in caplog.text
