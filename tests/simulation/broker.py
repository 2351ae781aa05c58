"""A Pulsar cluster in memory: our sans-IO server role behind every connection, and topics as a
default cluster keeps them.

ledgers      roll after a few entries and whenever a topic is loaded anew; ids are the cluster's
trimming     a ledger that lies wholly behind every durable cursor goes at once (retention 0)
cursors      durable and exclusive; one that has read a whole ledger stands before the first entry
             of the next
unload       ends the consumers of a topic, rolls its ledger, and lets another broker serve it
restart      cuts all connections of a broker; its cursors may fall back to where they were stored
             last
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, cast

from ledgerlake.errors import ProtocolError, TransportError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.connection import Connection, Role
from ledgerlake.wire.entry import message_count
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, Position, from_wire, to_wire
from tests.simulation.world import EPOCH_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.world import Process, World

_COMMANDS = {value: name for name, value in pb.BaseCommand.Type.items()}


@dataclass(eq=False)
class Ledger:
    """Some consecutive entries of a topic partition."""

    ledger_id: int
    entries: list[bytes] = field(default_factory=list)


@dataclass(eq=False)
class Cursor:
    """A durable subscription. ``stored`` is where a broker that crashes finds it again."""

    mark_delete: Position
    holder: Consumer | None = None
    stored: Position = BEFORE_ALL
    stored_s: float = 0.0


@dataclass(eq=False)
class Topic:
    """One topic partition; ``owner`` is the broker that serves it, ``closed_until_s`` when it can
    be reached again.
    """

    name: str
    owner: Broker
    ledgers: list[Ledger]
    trimmed: list[Ledger] = field(default_factory=list)
    cursors: dict[str, Cursor] = field(default_factory=dict)
    consumers: list[Consumer] = field(default_factory=list)
    next_index: int = 0
    closed_until_s: float = 0.0
    had_cursor: bool = False

    @property
    def first(self) -> Position:
        """Before everything that it holds."""
        return Position(self.ledgers[0].ledger_id, -1)

    @property
    def last(self) -> Position:
        """The last entry that it holds; the place before all if it holds none."""
        for ledger in reversed(self.ledgers):
            if ledger.entries:
                return Position(ledger.ledger_id, len(ledger.entries) - 1)
        return BEFORE_ALL

    def after(self, position: Position) -> list[tuple[Position, bytes]]:
        found = []
        for ledger in self.ledgers:
            if ledger.ledger_id >= position.ledger_id:
                start = position.entry_id + 1 if ledger.ledger_id == position.ledger_id else 0
                for number, entry in enumerate(ledger.entries[start:], start):
                    found.append((Position(ledger.ledger_id, number), entry))
        return found

    def before(self, position: Position) -> Position:
        """The place before an entry, as a broker reckons it."""
        if position == BEFORE_ALL or position <= self.first:
            return self.first
        for ledger in reversed(self.ledgers):
            if ledger.ledger_id < position.ledger_id or (
                ledger.ledger_id == position.ledger_id and position.entry_id > 0
            ):
                most = len(ledger.entries) - 1
                entry_id = (
                    min(position.entry_id - 1, most)
                    if ledger.ledger_id == position.ledger_id
                    else most
                )
                return Position(ledger.ledger_id, entry_id)
        return self.first


@dataclass(eq=False)
class Consumer:
    """One consumer of a connection; ``read`` is the last entry that it was sent."""

    link: Link
    consumer_id: int
    topic: Topic
    read: Position
    connected_ms: int
    cursor: Cursor | None = None
    permits: int = 0
    start: Position = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.read


@dataclass(eq=False)
class Link:
    """One connection: what the broker has sent and the client has not yet taken. ``most`` bytes
    come at a time.
    """

    broker: Broker
    process: Process
    server: Connection = field(default_factory=lambda: Connection(Role.SERVER))
    inbox: bytearray = field(default_factory=bytearray)
    consumers: dict[int, Consumer] = field(default_factory=dict)
    is_cut: bool = False
    most: int = 1 << 30
    silent: bool = False


@dataclass(eq=False)
class Broker:
    """One broker of the cluster."""

    url: str
    cluster: Cluster
    down_until_s: float = 0.0
    links: list[Link] = field(default_factory=list)


class Cluster:
    """All brokers and topics. ``entries_per_ledger`` after which a ledger rolls; ``has_metadata``:
    PIP-70; ``has_index``: with it, entries have an index too, and not a time alone.
    """

    def __init__(
        self, world: World, brokers: int, entries_per_ledger: int, has_metadata: bool
    ) -> None:
        self.world = world
        self.entries_per_ledger = entries_per_ledger
        self.has_metadata = has_metadata
        self.has_index = True
        self.brokers = [Broker(f"pulsar://broker-{number}:6650", self) for number in range(brokers)]
        self.topics: dict[str, Topic] = {}
        self.partitioned: dict[str, int] = {}
        self.on_mark_delete: Callable[[Topic, str, Position, Position], None] = lambda *_: None
        self.on_trim: Callable[[Topic, Ledger], None] = lambda *_: None
        self.trimmed = 0
        self.skew_ms = 0
        self._next_ledger = 3

    # Topics

    @property
    def clock_ms(self) -> int:
        return int((EPOCH_S + self.world.now_s) * 1000) + self.skew_ms

    def add_topic(self, name: str, partitions: int = 0, made: int | None = None) -> None:
        """Make a topic, or as many partitions of it as it does not have yet; of those that its
        metadata names, the first ``made`` ones.
        """
        names = [f"{name}-partition-{number}" for number in range(partitions)] or [name]
        for one in names[:made]:
            if one not in self.topics:
                owner = self.world.rng.choice(self.brokers)
                self.topics[one] = Topic(one, owner, [self._new_ledger()])
                self.world.say(f"{_short(one)} is made")
        if partitions:
            self.partitioned[name] = partitions

    def _new_ledger(self) -> Ledger:
        self._next_ledger += 1
        return Ledger(self._next_ledger)

    def append(self, topic: Topic, entry: bytes, count: int) -> Position:
        """Store an entry of so many messages as its producer sent it."""
        current = topic.ledgers[-1]
        if len(current.entries) >= self.entries_per_ledger:
            self.roll(topic)
            current = topic.ledgers[-1]
        topic.next_index += count
        if self.has_metadata:
            stamp = pb.BrokerEntryMetadata(broker_timestamp=self.clock_ms)
            if self.has_index:
                stamp.index = topic.next_index - 1
            data = stamp.SerializeToString()
            entry = b"\x0e\x02" + len(data).to_bytes(4, "big") + data + entry
        current.entries.append(entry)
        for consumer in list(topic.consumers):
            self._deliver(consumer)
        return Position(current.ledger_id, len(current.entries) - 1)

    def roll(self, topic: Topic) -> None:
        if topic.ledgers[-1].entries:
            topic.ledgers.append(self._new_ledger())
        self.trim(topic)

    def trim(self, topic: Topic) -> None:
        """Remove the ledgers that every durable cursor has passed."""
        for cursor in topic.cursors.values():
            for ledger, following in zip(topic.ledgers, topic.ledgers[1:], strict=False):
                if cursor.mark_delete == Position(ledger.ledger_id, len(ledger.entries) - 1):
                    cursor.mark_delete = Position(following.ledger_id, -1)
        marks = [cursor.mark_delete.ledger_id for cursor in topic.cursors.values()]
        slowest = min(marks, default=topic.ledgers[-1].ledger_id)
        while len(topic.ledgers) > 1 and topic.ledgers[0].ledger_id < slowest:
            self.trimmed += 1
            gone = topic.ledgers.pop(0)
            if topic.had_cursor:
                topic.trimmed.append(gone)
            self.on_trim(topic, gone)
            self.world.say(
                f"{_short(topic.name)}: ledger {gone.ledger_id} ({len(gone.entries)} entries) is "
                "trimmed"
            )

    def mark_delete(self, topic: Topic, name: str, position: Position) -> None:
        cursor = topic.cursors[name]
        if position <= cursor.mark_delete or position > topic.last:
            return
        before, cursor.mark_delete = cursor.mark_delete, position
        if self.world.now_s - cursor.stored_s >= 1.0:
            cursor.stored, cursor.stored_s = position, self.world.now_s
        self.world.say(f"{_short(topic.name)}: the cursor moves to {position}")
        self.on_mark_delete(topic, name, before, position)
        self.trim(topic)

    def unload(self, topic: Topic, away_s: float) -> None:
        for consumer in list(topic.consumers):
            self._close(consumer)
        topic.owner = self.world.rng.choice(self.brokers)
        topic.closed_until_s = self.world.now_s + away_s
        self.roll(topic)

    def _close(self, consumer: Consumer) -> None:
        self._end(consumer)
        body = pb.CommandCloseConsumer(consumer_id=consumer.consumer_id, request_id=0)
        self._answer(
            consumer.link,
            commands.encode(
                pb.BaseCommand(type=pb.BaseCommand.CLOSE_CONSUMER, close_consumer=body)
            ),
        )

    def delete(self, topic: Topic) -> None:
        for consumer in list(topic.consumers):
            self._close(consumer)
        del self.topics[topic.name]

    def begin_ledgers_anew(self) -> None:
        self._next_ledger = 0

    def restart(self, broker: Broker, away_s: float, loses_marks: bool) -> None:
        broker.down_until_s = self.world.now_s + away_s
        for link in list(broker.links):
            self.cut(link)
        for topic in self.topics.values():
            if topic.owner is broker:
                up = [broker for broker in self.brokers if broker.down_until_s <= self.world.now_s]
                topic.owner = self.world.rng.choice(up or [broker])
                for cursor in topic.cursors.values() if loses_marks else ():
                    if topic.first < cursor.stored < cursor.mark_delete:
                        cursor.mark_delete = cursor.stored
                self.roll(topic)

    # Connections

    def connect(self, url: str, process: Process) -> Link:
        found = [broker for broker in self.brokers if broker.url == url]
        if not found or found[0].down_until_s > self.world.now_s:
            self.world.sleep(0.01)
            raise TransportError(
                f"no broker listens at {url} (Connection refused); start it or correct the service "
                "url"
            )
        link = Link(found[0], process)
        found[0].links.append(link)
        return link

    def cut(self, link: Link) -> None:
        """The connection is gone, and the broker knows."""
        link.is_cut = True
        if link in link.broker.links:
            link.broker.links.remove(link)
        for consumer in list(link.consumers.values()):
            self._end(consumer)

    def cut_all_of(self, process: Process) -> None:
        for broker in self.brokers:
            for link in [link for link in broker.links if link.process.root is process]:
                self.cut(link)

    def received(self, link: Link, data: bytes) -> None:
        """Bytes from a client."""
        world = self.world
        name = _COMMANDS.get(data[9], "?") if len(data) > 9 else "?"
        verdict = world.access(f"send {name}")
        if verdict == "cut":
            self.cut(link)
        if link.is_cut:
            raise TransportError(
                f"the connection to {link.broker.url} broke while sending (Broken pipe)"
            )
        link.silent = verdict in ("unanswered", "half")
        kept = len(link.inbox)
        link.server.receive_data(data)
        try:
            while (event := link.server.next_event()) is not None:
                self._handle(link, event)
        except ProtocolError:
            self.cut(link)
        if verdict == "twice":
            link.inbox += link.inbox[kept:]
        elif verdict == "half":
            link.inbox += self._held[: len(self._held) // 2]
        elif verdict == "slow":
            link.most = world.rng.randint(1, 40)
        if link.silent:
            self.cut(link)
        world.access(f"sent {name}")

    _held = b""

    def _answer(self, link: Link, frame: bytes) -> None:
        link.server.send(frame)
        data = link.server.data_to_send()
        if link.silent:
            self._held = data
        elif not link.is_cut:
            link.inbox += data

    def _handle(self, link: Link, event: Any) -> None:
        handler = getattr(self, "_on_" + type(event).__name__.removeprefix("Command").lower(), None)
        if handler is not None:
            handler(link, event)

    def _on_connect(self, link: Link, event: pb.CommandConnect) -> None:
        self._answer(
            link, commands.connected("simulated", 5 * 1024 * 1024, min(event.protocol_version, 21))
        )

    def _on_partitionedtopicmetadata(
        self, link: Link, event: pb.CommandPartitionedTopicMetadata
    ) -> None:
        known = event.topic in self.partitioned or event.topic in self.topics
        fields: dict[str, Any] = {"partitions": self.partitioned.get(event.topic, 0), "response": 0}
        if not known:
            fields = {"response": 1, "error": pb.TopicNotFound, "message": "Topic not found"}
        self._encode(link, "PARTITIONED_METADATA_RESPONSE", request_id=event.request_id, **fields)

    def _on_gettopicsofnamespace(self, link: Link, event: pb.CommandGetTopicsOfNamespace) -> None:
        names = [
            topic for topic in self.topics if topic.startswith(f"persistent://{event.namespace}/")
        ]
        self._encode(
            link, "GET_TOPICS_OF_NAMESPACE_RESPONSE", request_id=event.request_id, topics=names
        )

    def _on_lookuptopic(self, link: Link, event: pb.CommandLookupTopic) -> None:
        topic = self.topics.get(event.topic)
        outcome = pb.CommandLookupTopicResponse
        fields: dict[str, Any]
        if topic is None:
            fields = {
                "response": outcome.Failed,
                "error": pb.TopicNotFound,
                "message": "Topic not found",
            }
        elif topic.owner.down_until_s > self.world.now_s:
            fields = {
                "response": outcome.Failed,
                "error": pb.ServiceNotReady,
                "message": "not ready",
            }
        elif not event.authoritative and topic.owner is not link.broker:
            fields = {
                "response": outcome.Redirect,
                "broker_service_url": topic.owner.url,
                "authoritative": True,
            }
        else:
            fields = {
                "response": outcome.Connect,
                "broker_service_url": topic.owner.url,
                "authoritative": True,
            }
        self._encode(link, "LOOKUP_RESPONSE", request_id=event.request_id, **fields)

    def _on_subscribe(self, link: Link, event: pb.CommandSubscribe) -> None:
        topic = self.topics.get(event.topic)
        if topic is None:
            return self._error(link, event.request_id, pb.TopicNotFound, "Topic does not exist")
        if topic.owner is not link.broker or topic.closed_until_s > self.world.now_s:
            return self._error(
                link, event.request_id, pb.ServiceNotReady, "Namespace bundle is being unloaded"
            )
        cursor = None
        if event.durable:
            cursor = topic.cursors.get(event.subscription)
            if cursor is not None and cursor.holder is not None:
                return self._error(
                    link,
                    event.request_id,
                    pb.ConsumerBusy,
                    "Exclusive consumer is already connected",
                )
            if cursor is None:
                earliest = event.initial_position == pb.CommandSubscribe.Earliest
                mark = topic.first if earliest or topic.last == BEFORE_ALL else topic.last
                cursor = topic.cursors[event.subscription] = Cursor(mark, stored=mark)
                topic.had_cursor = True
                self.world.say(f"{_short(topic.name)}: the cursor is made at {mark}")
            read = cursor.mark_delete
        elif event.subscription in topic.cursors:
            words = "Durable subscription with the same name already exists."
            return self._error(link, event.request_id, pb.NotAllowedError, words)
        else:
            start = from_wire(event.start_message_id).position
            read = (
                topic.first
                if start == BEFORE_ALL
                else topic.last
                if start == AFTER_ALL
                else topic.before(start)
            )
        consumer = Consumer(link, event.consumer_id, topic, read, self.clock_ms, cursor)
        if cursor is not None:
            cursor.holder = consumer
        topic.consumers.append(consumer)
        link.consumers[event.consumer_id] = consumer
        self._answer(link, commands.success(event.request_id))
        return None

    def _on_flow(self, link: Link, event: pb.CommandFlow) -> None:
        consumer = link.consumers.get(event.consumer_id)
        if consumer is not None:
            consumer.permits += event.message_permits
            self._deliver(consumer)

    def _on_consumerstats(self, link: Link, event: pb.CommandConsumerStats) -> None:
        consumer = link.consumers.get(event.consumer_id)
        if consumer is None:
            return self._error(link, event.request_id, pb.MetadataError, "Consumer not found")
        since = datetime.fromtimestamp(consumer.connected_ms / 1000, timezone.utc).isoformat(
            timespec="milliseconds"
        )
        self._encode(
            link, "CONSUMER_STATS_RESPONSE", request_id=event.request_id, connected_since=since
        )
        return None

    def _on_getlastmessageid(self, link: Link, event: pb.CommandGetLastMessageId) -> None:
        consumer = link.consumers.get(event.consumer_id)
        if consumer is None:
            return self._error(link, event.request_id, pb.MetadataError, "Consumer not found")
        marked = consumer.start if consumer.cursor is None else consumer.cursor.mark_delete
        answer = {
            "last_message_id": to_wire(consumer.topic.last),
            "consumer_mark_delete_position": to_wire(marked),
        }
        self._encode(link, "GET_LAST_MESSAGE_ID_RESPONSE", request_id=event.request_id, **answer)
        return None

    def _on_ack(self, link: Link, event: pb.CommandAck) -> None:
        consumer = link.consumers.get(event.consumer_id)
        fields: dict[str, Any] = {}
        if consumer is None or consumer.cursor is None:
            fields = {"error": pb.ConsumerNotFound, "message": "no such consumer"}
        else:
            topic = consumer.topic
            name = next(one for one, cursor in topic.cursors.items() if cursor is consumer.cursor)
            self.mark_delete(topic, name, from_wire(event.message_id[0]).position)
        self._encode(
            link,
            "ACK_RESPONSE",
            request_id=event.request_id,
            consumer_id=event.consumer_id,
            **fields,
        )

    def _on_unsubscribe(self, link: Link, event: pb.CommandUnsubscribe) -> None:
        consumer = link.consumers.get(event.consumer_id)
        if consumer is None:
            return self._error(link, event.request_id, pb.ConsumerNotFound, "no such consumer")
        self._end(consumer)
        for name, cursor in list(consumer.topic.cursors.items()):
            if cursor is consumer.cursor:
                del consumer.topic.cursors[name]
                self.world.say(f"{_short(consumer.topic.name)}: the cursor is removed")
        self.trim(consumer.topic)
        self._answer(link, commands.success(event.request_id))
        return None

    def _on_closeconsumer(self, link: Link, event: pb.CommandCloseConsumer) -> None:
        consumer = link.consumers.get(event.consumer_id)
        if consumer is not None:
            self._end(consumer)
        self._answer(link, commands.success(event.request_id))

    def _end(self, consumer: Consumer) -> None:
        consumer.link.consumers.pop(consumer.consumer_id, None)
        if consumer in consumer.topic.consumers:
            consumer.topic.consumers.remove(consumer)
        if consumer.cursor is not None and consumer.cursor.holder is consumer:
            consumer.cursor.holder = None

    def _deliver(self, consumer: Consumer) -> None:
        if (
            consumer.permits <= 0
            or consumer.cursor is not None
            or consumer.topic.last <= consumer.read
        ):
            return
        for position, entry in consumer.topic.after(consumer.read):
            if consumer.permits <= 0:
                break
            self._answer(
                consumer.link,
                commands.message(
                    consumer.consumer_id, position.ledger_id, position.entry_id, entry
                ),
            )
            consumer.read = position
            consumer.permits -= message_count(memoryview(entry))

    def _error(self, link: Link, request_id: int, code: int, text: str) -> None:
        self._answer(link, commands.error(request_id, cast(pb.ServerError, code), text))

    def _on_getschema(self, link: Link, event: pb.CommandGetSchema) -> None:
        """No topic has a schema."""
        self._encode(
            link,
            "GET_SCHEMA_RESPONSE",
            request_id=event.request_id,
            error_code=pb.TopicNotFound,
            error_message="Topic not found",
        )

    def _encode(self, link: Link, kind: str, **fields: Any) -> None:
        number = pb.BaseCommand.Type.Value(kind)
        command = pb.BaseCommand(type=kind)
        body = getattr(command, _FIELDS[number])
        body.CopyFrom(type(body)(**fields))
        self._answer(link, commands.encode(command))


_FIELDS = {one.number: one.name for one in pb.BaseCommand.DESCRIPTOR.fields}


def _short(name: str) -> str:
    return name.rpartition("/")[2]


class MemoryTransport:
    """In the place of ``client.transport.Transport``: the bytes go to a broker in memory."""

    cluster: Cluster

    def __init__(self, url: str, connect_timeout_s: float, tls: Any = None) -> None:
        self.url = url
        world = self.cluster.world
        world.access(f"connect {url}")
        self._link = self.cluster.connect(url, world.current.context)

    def send(self, data: bytes, timeout_s: float) -> None:
        self.cluster.received(self._link, data)

    def receive(self, timeout_s: float, into: memoryview | None = None) -> memoryview | None:
        link, world = self._link, self.cluster.world
        if not link.inbox and not link.is_cut and timeout_s > 0.0:
            world.pause(world.now_s + timeout_s, lambda: bool(link.inbox) or link.is_cut)
        if link.inbox:
            most = link.most if into is None else min(link.most, len(into))
            data = link.inbox[:most]
            del link.inbox[:most]
            if into is None:
                return memoryview(data)
            into[: len(data)] = data
            return into[: len(data)]
        if link.is_cut:
            raise TransportError(f"the broker at {self.url} closed the connection")
        return None

    def close(self) -> None:
        # Of a killed process the broker hears in its own time.
        if not self._link.is_cut and not self._link.process.is_dead:
            self.cluster.cut(self._link)
