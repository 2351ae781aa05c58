"""A broker for tests: our own protocol code in the server role, on a real socket, with every knob a
test wants to turn.

It serves topics without partitions, all with the same list of entries. What it does wrong, it does
because the test said so.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, cast

from ledgerlake.errors import CorruptEntryError, ProtocolError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands, limits
from ledgerlake.wire.connection import Connection, Event, Role
from ledgerlake.wire.entry import message_count, parse_entry, peek_metadata
from ledgerlake.wire.message_id import BEFORE_ALL, Position, from_wire, to_wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.wire.framing import Frame

TOPIC = "persistent://public/default/peer"


@dataclass
class _Consumer:
    topic: str
    after: Position
    permits: int = 0
    durable: bool = False
    subscription: str = ""
    connected_since: str = ""
    read_compacted: bool = False
    start: Position = field(init=False)
    expired_to: Position = BEFORE_ALL

    def __post_init__(self) -> None:
        self.start = self.after


class _Connection(Connection):
    """Takes frames as large as the broker announced, and keeps the payload of the last one."""

    def __init__(self, max_message_bytes: int) -> None:
        super().__init__(Role.SERVER)
        self._frames.limit_bytes = self._frames.command_limit_bytes = limits.frame_limit_bytes(
            max_message_bytes
        )
        self.payload = b""

    def _interpret(self, frame: Frame) -> Event | None:
        self.payload = bytes(frame.payload)
        return super()._interpret(frame)


@dataclass
class Peer:
    """Start it with ``with``; ``url`` is where it listens.

    Attributes:
        entries: position and stored bytes, in order. last_position: what GET_LAST_MESSAGE_ID
        answers; None: the last entry. rewrite: turns an outgoing MESSAGE frame into the one really
        sent. drop_after: the connection is cut after so many entries, once. refuse_subscribe: an
        error code for the next subscriptions, taken one by one. refuse_topics: the answer to all
        subscriptions of some topics. refuse_last: the answer to all GET_LAST_MESSAGE_ID of some
        topics. compacted: what compacted readers get in place of ``entries``;
        None: the same. last_entry: the stored entry behind the answer to GET_LAST_MESSAGE_ID, for
        who knows protocol v22 (PIP-429). cannot_tell_last: compacted readers that ask for the last
        message get an error, as of a 4.0 broker. unreadable_last: nobody is told the last message,
        as by a broker that cannot read the metadata of the last entry. is_deleted: the topic is not
        there any more. challenges: how many connections are asked again who they are, before or
        behind an answer. credentials: what clients said of themselves. tls: speaks TLS with this
        context; ``host`` is where it listens. expires: once a consumer has got an entry, message
        expiry acknowledges the others for it. expirations: after how many entries and consumers
        message expiry moves all open consumers to a position, each once, in order. stalled: how
        many consumers, the first that are opened, get no entry. markers: positions that it names,
        and passes over for each consumer, as it acknowledges them itself. first_ledger_id: where
        the topic begins; None: with the ledger of the first entry. topics: what the namespace
        holds; None: the one topic. received: the entries that producers sent, in order, whether
        their numbers were known or not. pushes_only: entries are taken and known by number, and
        neither stored nor answered. loads_anew: a producer that is opened finds the topic loaded
        anew: every number that an entry says in its metadata is taken for stored.
        largest_stored_bytes: a larger entry that is no chunk is refused, and those behind it are
        stored, as by a topic's policy. tells_of_topics: clients may watch the namespace, and are
        told by ``tell_of_topics``. unloads_at: commands of consumers that the broker answers by
        ending the consumer, each once, as while it unloads the topic. refuse_producers: error codes
        for the next producers, taken one by one. missing_topics: the broker
        knows no topics of these names. failing_topics: all that is asked of them is an error.
        terminated_topics: take no producer. most_producers: a topic
        has so many at once, by a policy, and then a number is known under the name of its producer
        alone. partitions: how many a topic has; none if it is not named. subscriptions: the durable
        ones, whether a consumer holds each of them or not. schema: the only version of the topics'
        schema. clock_ms: the clock that it tells; None: it tells none. store_pause_s: how long it
        takes to store an entry. adds_up_claims: it counts as Pulsar's brokers do: it reads as many
        entries as there are permits, a hundred at most, believes the numbers of messages that they
        claim, in 32 bits, and takes a read whose numbers sum up to zero for sent.
    """

    entries: list[tuple[Position, bytes]] = field(default_factory=list)
    last_position: Position | None = None
    rewrite: Callable[[Position, bytes], bytes] = lambda _position, frame: frame
    drop_after: int | None = None
    refuse_subscribe: list[int] = field(default_factory=list)
    refuse_topics: dict[str, tuple[pb.ServerError, str]] = field(default_factory=dict)
    refuse_last: dict[str, tuple[pb.ServerError, str]] = field(default_factory=dict)
    max_message_bytes: int = 5 * 1024 * 1024
    hold_back: set[Position] = field(default_factory=set)
    markers: set[Position] = field(default_factory=set)
    expires: bool = False
    expirations: list[tuple[int, Position]] = field(default_factory=list)
    stalled: int = 0
    requests: list[str] = field(default_factory=list)
    acknowledged: Position | None = None
    drop_acknowledgements: int = 0
    greeting: bytes | None = None
    lookup: dict[str, Any] = field(default_factory=dict)
    proxied_to: str | None = None
    compacted: list[tuple[Position, bytes]] | None = None
    last_entry: bytes = b""
    cannot_tell_last: bool = False
    unreadable_last: bool = False
    first_ledger_id: int | None = None
    is_deleted: bool = False
    challenges: int = 0
    credentials: list[tuple[str, bytes]] = field(default_factory=list)
    tls: ssl.SSLContext | None = None
    host: str = "127.0.0.1"
    stored: list[tuple[int, int]] = field(default_factory=list)
    drop_after_sends: int | None = None
    drop_after_received: int | None = None
    refuse_send: int | None = None
    refuse_producers: list[pb.ServerError] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)
    pushes_only: bool = False
    loads_anew: bool = False
    largest_stored_bytes: int | None = None
    topics: list[str] | None = None
    tells_of_topics: bool = False
    unloads_at: list[type] = field(default_factory=list)
    missing_topics: set[str] = field(default_factory=set)
    failing_topics: set[str] = field(default_factory=set)
    terminated_topics: set[str] = field(default_factory=set)
    most_producers: int | None = None
    partitions: dict[str, int] = field(default_factory=dict)
    subscriptions: dict[str, bool] = field(default_factory=dict)
    schema: pb.Schema | None = None
    clock_ms: Callable[[], int] | None = None
    store_pause_s: float = 0.0
    adds_up_claims: bool = False

    def __enter__(self) -> Peer:
        self._listener = socket.create_server((self.host, 0))
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._sent = self._steps = 0
        self._opened: list[_Consumer] = []
        self._pushed = self._replayed = -1
        self._producers: dict[tuple[int, int], tuple[str, str]] = {}
        self._last_of_name: dict[tuple[str, str], int] = {}
        self._watchers: list[tuple[socket.socket, int]] = []
        thread = threading.Thread(target=self._accept, daemon=True)
        thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.disconnect()

    @property
    def url(self) -> str:
        return f"{'pulsar' if self.tls is None else 'pulsar+ssl'}://{self.host}:{self._listener.getsockname()[1]}"

    def add(self, *entries: bytes, ledger_id: int = 7, first: int = 0) -> None:
        self.entries += [
            (Position(ledger_id, first + number), entry) for number, entry in enumerate(entries)
        ]

    def tell_of_topics(self, new: list[str], deleted: list[str]) -> None:
        """Change what the namespace holds, and say so to those who watch it."""
        self.topics = sorted({*self._topics(), *new} - set(deleted))
        for accepted, watcher_id in self._watchers:
            fields: dict[str, Any] = {
                "watcher_id": watcher_id,
                "new_topics": new,
                "deleted_topics": deleted,
                "topics_hash": "x",
            }
            accepted.sendall(_encode("WATCH_TOPIC_UPDATE", **fields))

    def _topics(self) -> list[str]:
        if self.topics is not None:
            return self.topics
        return [] if self.is_deleted else [TOPIC]

    def disconnect(self) -> None:
        for connection in list(self._open):
            # A thread that waits in ``recv`` would still take new bytes on a socket that is only
            # closed.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            if self.tls is not None:
                try:
                    accepted = self.tls.wrap_socket(accepted, server_side=True)
                except OSError:
                    continue
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open.add(accepted)
            threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        connection = _Connection(self.max_message_bytes)
        consumers: dict[int, _Consumer] = {}
        # Thousands of consumers may be open, and few of them have permits.
        granted: dict[int, _Consumer] = {}
        self._client_version = 0
        try:
            while data := accepted.recv(65536):
                connection.receive_data(data)
                while (event := connection.next_event()) is not None:
                    self._answer(connection, consumers, event)
                    if isinstance(event, pb.CommandWatchTopicList):
                        self._watchers.append((accepted, event.watcher_id))
                    if isinstance(event, pb.CommandFlow):
                        granted[event.consumer_id] = consumers[event.consumer_id]
                    accepted.sendall(connection.data_to_send())
                    for consumer_id, consumer in list(granted.items()):
                        if consumer_id not in consumers or consumer.permits <= 0:
                            del granted[consumer_id]
                        else:
                            self._deliver(accepted, consumer_id, consumer)
        except (OSError, ProtocolError):
            pass
        finally:
            self._open.discard(accepted)
            for key in [key for key in self._producers if key[0] == id(connection)]:
                del self._producers[key]
            accepted.close()

    def _answer(self, connection: _Connection, consumers: dict[int, _Consumer], event: Any) -> None:
        self.requests.append(type(event).__name__)
        if type(event) in self.unloads_at:
            self.unloads_at.remove(type(event))
            del consumers[event.consumer_id]
            connection.send(_encode("CLOSE_CONSUMER", consumer_id=event.consumer_id, request_id=0))
            return
        if isinstance(event, pb.CommandAuthResponse):
            self.credentials.append((event.response.auth_method_name, event.response.auth_data))
            return
        if getattr(event, "topic", "") in self.failing_topics:
            refusal: dict[str, Any] = {"error": pb.MetadataError, "message": "the test says no"}
            connection.send(_encode("ERROR", request_id=event.request_id, **refusal))
            return
        if self.challenges:
            self.challenges -= 1
            challenge = pb.AuthData(auth_method_name="token", auth_data=b"PulsarAuthRefresh")
            connection.send(_encode("AUTH_CHALLENGE", server_version="peer", challenge=challenge))
        if isinstance(event, pb.CommandConnect):
            self.credentials.append((event.auth_method_name, event.auth_data))
            self.proxied_to = event.proxy_to_broker_url or self.proxied_to
            self._client_version = event.protocol_version
            version = min(event.protocol_version, commands.LAST_ENTRY_PROTOCOL_VERSION)
            connection.send(
                self.greeting
                or commands.connected(
                    "peer", self.max_message_bytes, version, watches_topics=self.tells_of_topics
                )
            )
        elif isinstance(event, pb.CommandPartitionedTopicMetadata):
            found: dict[str, Any] = {
                "partitions": self.partitions.get(event.topic, 0),
                "response": 0,
            }
            if event.topic in self.missing_topics:
                found = {"response": 1, "error": pb.TopicNotFound, "message": "the test says no"}
            connection.send(
                _encode("PARTITIONED_METADATA_RESPONSE", request_id=event.request_id, **found)
            )
        elif isinstance(event, pb.CommandGetSchema):
            registered: dict[str, Any] = {
                "error_code": pb.TopicNotFound,
                "error_message": "no schema",
            }
            if self.schema is not None:
                registered = {"schema": self.schema, "schema_version": bytes(8)}
            connection.send(
                _encode("GET_SCHEMA_RESPONSE", request_id=event.request_id, **registered)
            )
        elif isinstance(event, pb.CommandGetTopicsOfNamespace):
            answer: dict[str, Any] = {"request_id": event.request_id, "topics": self._topics()}
            connection.send(_encode("GET_TOPICS_OF_NAMESPACE_RESPONSE", **answer))
        elif isinstance(event, pb.CommandWatchTopicList):
            fields: dict[str, Any] = {
                "request_id": event.request_id,
                "watcher_id": event.watcher_id,
                "topics_hash": "x",
            }
            connection.send(_encode("WATCH_TOPIC_LIST_SUCCESS", topic=self._topics(), **fields))
        elif isinstance(event, pb.CommandLookupTopic):
            owner: dict[str, Any] = {
                "response": pb.CommandLookupTopicResponse.Connect,
                "broker_service_url": self.url,
            }
            connection.send(
                _encode("LOOKUP_RESPONSE", request_id=event.request_id, **owner | self.lookup)
            )
        elif isinstance(event, pb.CommandSubscribe):
            self._subscribe(connection, consumers, event)
        elif isinstance(event, pb.CommandFlow):
            if not event.message_permits:
                raise ProtocolError(
                    "a grant of no permits ends the connection, as at Pulsar's brokers"
                )
            consumers[event.consumer_id].permits += event.message_permits
        elif isinstance(event, pb.CommandGetLastMessageId):
            self._tell_last(connection, consumers[event.consumer_id], event.request_id)
        elif isinstance(event, pb.CommandConsumerStats):
            told: dict[str, Any] = (
                {"connected_since": consumers[event.consumer_id].connected_since}
                if self.clock_ms
                else {}
            )
            connection.send(_encode("CONSUMER_STATS_RESPONSE", request_id=event.request_id, **told))
        elif isinstance(event, pb.CommandAck) and self.drop_acknowledgements:
            self.drop_acknowledgements -= 1
            self.disconnect()
        elif isinstance(event, pb.CommandAck):
            self.acknowledged = from_wire(event.message_id[0]).position
            connection.send(
                _encode("ACK_RESPONSE", request_id=event.request_id, consumer_id=event.consumer_id)
            )
        elif isinstance(event, pb.CommandProducer) and event.topic in self.terminated_topics:
            connection.send(
                commands.error(
                    event.request_id, pb.TopicTerminatedError, "Topic was already terminated"
                )
            )
        elif isinstance(event, pb.CommandProducer) and self.refuse_producers:
            code = self.refuse_producers.pop(0)
            connection.send(commands.error(event.request_id, code, "the test says no"))
        elif isinstance(event, pb.CommandProducer) and self._is_full(event.topic):
            full = f"Topic '{event.topic}' reached max producers limit"
            connection.send(commands.error(event.request_id, pb.ProducerBusy, full))
        elif isinstance(event, pb.CommandProducer):
            self._producers[id(connection), event.producer_id] = event.topic, event.producer_name
            if self.loads_anew:
                stored_metadata = [parse_entry(entry).metadata for entry in self.received]
                self._replayed = max(
                    (
                        max(metadata.sequence_id, metadata.highest_sequence_id)
                        for metadata in stored_metadata
                    ),
                    default=-1,
                )
            last = max(
                self._pushed, self._replayed, self._last_stored(connection, event.producer_id)
            )
            answer_fields: dict[str, Any] = {
                "producer_name": event.producer_name,
                "last_sequence_id": last,
            }
            connection.send(
                _encode("PRODUCER_SUCCESS", request_id=event.request_id, **answer_fields)
            )
        elif isinstance(event, pb.CommandSend):
            self._store(connection, event)
        elif isinstance(event, pb.CommandCloseProducer):
            self._producers.pop((id(connection), event.producer_id), None)
            connection.send(commands.success(event.request_id))
        elif isinstance(event, (pb.CommandCloseConsumer, pb.CommandUnsubscribe)):
            consumers.pop(event.consumer_id, None)
            connection.send(commands.success(event.request_id))

    def _is_full(self, topic: str) -> bool:
        of_topic = [name for open_topic, name in self._producers.values() if open_topic == topic]
        return self.most_producers is not None and len(of_topic) >= self.most_producers

    def _last_stored(self, connection: _Connection, producer_id: int) -> int:
        if self.most_producers is not None:
            return self._last_of_name.get(self._producers[id(connection), producer_id], -1)
        return self.stored[-1][1] if self.stored else -1

    def _store(self, connection: _Connection, event: pb.CommandSend) -> None:
        """Store an entry unless its number is known, and say so, unless the connection is to break
        just then.
        """
        number: dict[str, Any] = {
            "producer_id": event.producer_id,
            "sequence_id": event.sequence_id,
        }
        self.received.append(connection.payload)
        time.sleep(self.store_pause_s)
        if len(self.received) == self.drop_after_received:
            raise OSError
        if self.pushes_only:
            self._pushed = max(self._pushed, event.sequence_id)
            return
        too_large = (
            self.largest_stored_bytes is not None
            and len(connection.payload) > self.largest_stored_bytes
        )
        refusal = pb.NotAllowedError if too_large and not event.is_chunk else self.refuse_send
        if refusal is not None:
            connection.send(
                _encode("SEND_ERROR", error=refusal, message="the test says no", **number)
            )
            return
        metadata = parse_entry(connection.payload).metadata
        is_last = not event.is_chunk or metadata.chunk_id == metadata.num_chunks_from_msg - 1
        known = max(self._replayed, self._last_stored(connection, event.producer_id))
        is_dropped = is_last and event.sequence_id <= known
        if is_last and not is_dropped:
            self.stored.append((event.sequence_id, event.highest_sequence_id))
            self._last_of_name[self._producers[id(connection), event.producer_id]] = (
                event.highest_sequence_id
            )
        if self.drop_after_sends is not None and len(self.stored) >= self.drop_after_sends:
            self.drop_after_sends = None
            raise OSError
        stored_at = BEFORE_ALL if is_dropped else Position(7, len(self.stored))
        connection.send(_encode("SEND_RECEIPT", **number, message_id=to_wire(stored_at)))

    def _tell_last(self, connection: _Connection, consumer: _Consumer, request_id: int) -> None:
        if self.cannot_tell_last and consumer.read_compacted:
            connection.send(
                commands.error(request_id, pb.MetadataError, "Failed to read last entry")
            )
            return
        if refusal := self.refuse_last.get(consumer.topic):
            connection.send(commands.error(request_id, *refusal))
            return
        if self.unreadable_last:
            error_text = (
                "Failed to get batch size for entry java.lang.IllegalStateException: Some required "
                "fields are missing"
            )
            connection.send(commands.error(request_id, pb.MetadataError, error_text))
            return
        entries = self._seen_by(consumer)
        last = self.last_position or (entries[-1][0] if entries else Position(-1, -1))
        first = (
            self.first_ledger_id
            if self.first_ledger_id is not None
            else (entries[0][0].ledger_id if entries else 0)
        )
        marked = Position(first, -1) if consumer.start == Position(-1, -1) else consumer.start
        marked = max(marked, consumer.expired_to)
        for position, _ in entries:
            if (
                position > marked
                and position not in self.markers
                and not self._is_expired(consumer)
            ):
                break
            marked = max(marked, position)
        if consumer.durable:
            marked = self.acknowledged or Position(first, -1)
        answer = {
            "last_message_id": to_wire(last),
            "consumer_mark_delete_position": to_wire(marked),
        }
        knows_entries = self._client_version >= commands.LAST_ENTRY_PROTOCOL_VERSION
        behind = self.last_entry if consumer.read_compacted and knows_entries else b""
        connection.send(
            _encode("GET_LAST_MESSAGE_ID_RESPONSE", behind, request_id=request_id, **answer)
        )

    def _is_expired(self, consumer: _Consumer) -> bool:
        return self.expires and consumer.after != consumer.start

    def _seen_by(self, consumer: _Consumer) -> list[tuple[Position, bytes]]:
        return (
            self.compacted
            if consumer.read_compacted and self.compacted is not None
            else self.entries
        )

    def _subscribe(
        self, connection: _Connection, consumers: dict[int, _Consumer], event: pb.CommandSubscribe
    ) -> None:
        if self.is_deleted:
            connection.send(commands.error(event.request_id, pb.TopicNotFound, "it is gone"))
            return
        if self.refuse_subscribe:
            code = self.refuse_subscribe.pop(0)
            connection.send(
                commands.error(event.request_id, cast(pb.ServerError, code), "the test says no")
            )
            return
        if event.topic in self.missing_topics and event.topic not in self.partitions:
            connection.send(commands.error(event.request_id, pb.TopicNotFound, "no such topic"))
            return
        if refusal := self.refuse_topics.get(event.topic):
            connection.send(commands.error(event.request_id, *refusal))
            return
        if event.subscription in self.subscriptions and not event.durable:
            words = "Durable subscription with the same name already exists."
            connection.send(commands.error(event.request_id, pb.NotAllowedError, words))
            return
        if self.subscriptions.get(event.subscription):
            connection.send(commands.error(event.request_id, pb.ConsumerBusy, "the test says no"))
            return
        if event.durable:
            self.subscriptions.setdefault(event.subscription, False)
        start = from_wire(event.start_message_id).position
        after = (
            start if start == Position(-1, -1) else Position(start.ledger_id, start.entry_id - 1)
        )
        if self.entries:
            after = min(after, self.entries[-1][0])
        if event.durable:
            after = self.acknowledged or BEFORE_ALL
        consumers[event.consumer_id] = _Consumer(
            event.topic,
            after,
            durable=event.durable,
            subscription=event.subscription,
            read_compacted=event.read_compacted,
        )
        if self.clock_ms is not None:
            moment = datetime.fromtimestamp(self.clock_ms() / 1000, timezone.utc)
            consumers[event.consumer_id].connected_since = moment.isoformat(timespec="milliseconds")
        self._opened.append(consumers[event.consumer_id])
        self._step()
        connection.send(commands.success(event.request_id))

    def _step(self) -> None:
        self._steps += 1
        while self.expirations and self.expirations[0][0] <= self._steps:
            _, position = self.expirations.pop(0)
            for consumer in self._opened:
                consumer.after = max(consumer.after, position)
                consumer.expired_to = max(consumer.expired_to, position)

    def _read_next(self, consumer: _Consumer) -> list[tuple[Position, bytes]]:
        """Return the entries of the next read of a broker that adds up claims, which takes reads
        for sent.
        """
        while not consumer.durable and consumer.permits > 0:
            entries = [one for one in self._seen_by(consumer) if one[0] > consumer.after][
                : min(consumer.permits, 100)
            ]
            if not entries:
                break
            consumer.after = entries[-1][0]
            claims = sum(claimed_messages(entry) for _, entry in entries)
            if claims != 0:
                consumer.permits = (consumer.permits - claims + 2**31) % 2**32 - 2**31
                return entries
        return []

    def _deliver(self, accepted: socket.socket, consumer_id: int, consumer: _Consumer) -> None:
        while self.adds_up_claims and (entries := self._read_next(consumer)):
            for position, entry in entries:
                accepted.sendall(
                    commands.message(consumer_id, position.ledger_id, position.entry_id, entry)
                )
                self._sent += 1
        if self.adds_up_claims or any(consumer is one for one in self._opened[: self.stalled]):
            return
        for position, entry in self._seen_by(consumer):
            if (
                position <= consumer.after
                or consumer.permits <= 0
                or position in self.hold_back | self.markers
            ):
                continue
            if self._is_expired(consumer):
                return
            if self.drop_after is not None and self._sent >= self.drop_after:
                self.drop_after = None
                accepted.shutdown(socket.SHUT_RDWR)
                return
            frame = commands.message(consumer_id, position.ledger_id, position.entry_id, entry)
            accepted.sendall(self.rewrite(position, frame))
            self._sent += 1
            consumer.after = position
            consumer.permits -= message_count(memoryview(entry))
            self._step()


def claimed_messages(entry: bytes) -> int:
    """Return how many messages an entry says it has, whatever it says; one if it does not parse."""
    with contextlib.suppress(CorruptEntryError):
        return int(peek_metadata(memoryview(entry)).num_messages_in_batch)
    return 1


def _encode(kind: str, payload: bytes = b"", **fields: Any) -> bytes:
    number = pb.BaseCommand.Type.Value(kind)
    command = pb.BaseCommand(type=kind)
    name = next(
        descriptor.name
        for descriptor in pb.BaseCommand.DESCRIPTOR.fields
        if descriptor.number == number
    )
    getattr(command, name).CopyFrom(type(getattr(command, name))(**fields))
    return commands.encode(command, payload)
