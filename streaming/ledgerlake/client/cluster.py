"""A Pulsar cluster: looks up the brokers of topics, and keeps a session with each broker.

Sessions are shared by topics and kept per process, because Spark reuses its Python workers across
micro-batches. A lookup is never cached: after an unload or a restart the answer changes.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ledgerlake.client.auth import NO_AUTHENTICATION, Authentication
from ledgerlake.client.backoff import with_retries
from ledgerlake.client.session import Session
from ledgerlake.client.topics import TopicSelection, full_name, partition_name
from ledgerlake.client.transport import DEFAULT_TLS, Address, TlsSettings, parse_service_url
from ledgerlake.errors import (
    FrameTooLargeError,
    LedgerlakeError,
    ProtocolError,
    TopicNotFoundError,
    UsageError,
    is_retryable,
)
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.stored.secrets import said
from ledgerlake.wire import commands, limits
from ledgerlake.wire.lookup import Owner, refused, step
from ledgerlake.wire.value_schema import ValueSchema, from_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ledgerlake.client.channels import Watcher

# How often to check for topics that do not exist yet.
_TOPIC_POLL_S = 1.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class ClientSettings:
    """The address and the settings of a cluster's client; pickled with a reader for Spark's
    workers.

    ``service_url`` may name several brokers. ``poll_timeout_s``: how long to wait for entries that
    the broker has. ``waits_for_topics``: wait for topics that do not exist yet. ``read_compacted``:
    of the compacted part of a topic, read only the latest message of each key. ``has_own_format``:
    only a function of the user's knows the messages of an entry.
    """

    service_url: str
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 30.0
    give_up_after_s: float = 120.0
    poll_timeout_s: float = 120.0
    waits_for_topics: bool = False
    read_compacted: bool = False
    has_own_format: bool = False
    authentication: Authentication = NO_AUTHENTICATION
    tls: TlsSettings = DEFAULT_TLS
    listener_name: str | None = None


class Cluster:
    """Sessions with the brokers of one cluster."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self._addresses = parse_service_url(settings.service_url)
        self._sessions: dict[tuple[Address, str | None], Session] = {}

    def connect(self) -> None:
        """Open a session with the service address, unless there is one.

        Raises:
            BrokerError, TransportError, ProtocolError, SetupError: the broker is not there, or
                refuses us.
        """
        self._service()

    def topic_partitions(self, topic: str, creates: bool = False) -> list[str]:
        """Return the full names of a topic's partitions, whether they are there or not; the topic
        itself if it has none.

        Args:
            creates: the broker may create the topic, if its settings and the role's rights allow
                it.

        Raises:
            TopicNotFoundError: the broker knows no such topic.
            BrokerError, TransportError, ProtocolError: see ``Session.request``.
        """
        return self._asked(partial(self._partitions, [full_name(topic)], creates))

    def all_partitions(
        self,
        selection: TopicSelection,
        may_wait: bool = True,
        known: Collection[str] = (),
    ) -> list[str]:
        """Return the topic partitions of a selection that are there, after retries if the broker
        does not answer.

        A topic may have fewer partitions than its metadata names: producers make a partition with
        its first message, and a broker removes idle ones. Nothing of those can be read.

        Args:
            may_wait: wait for topics that do not exist, if the settings say so.
            known: partitions that have been there; the broker is not asked about them again.

        Raises:
            UsageError: the namespace of a pattern has more topics than fit into one answer.
            As ``topic_partitions``.
        """
        if selection.pattern is not None:
            return with_retries(lambda: self._matching(selection), self.settings.give_up_after_s)
        while True:
            try:
                return with_retries(
                    lambda: self._partitions_there(selection.names, known),
                    self.settings.give_up_after_s,
                )
            except TopicNotFoundError:
                if not (may_wait and self.settings.waits_for_topics):
                    raise
            time.sleep(_TOPIC_POLL_S)

    def existing_partitions(self, names: Sequence[str], known: Collection[str]) -> set[str]:
        """Return the partitions that are there of those topics that exist, after retries if the
        broker does not answer. ``known``: see ``all_partitions``.

        Raises:
            BrokerError, TransportError, ProtocolError: as ``topic_partitions``.
        """
        found: set[str] = set()
        for name in names:
            with contextlib.suppress(TopicNotFoundError):
                found.update(
                    with_retries(
                        partial(self._partitions_there, [name], known),
                        self.settings.give_up_after_s,
                    )
                )
        return found

    def watch(self, selection: TopicSelection) -> Watcher | None:
        """Return a watcher that notices created and deleted topics of a pattern; None if the broker
        does not support it.

        All topics of the namespace are watched, because a broker accepts short patterns only, and
        has its own syntax for them.
        """
        if selection.pattern is None:
            return None
        pattern = f"persistent://{selection.namespace}/.*"
        try:
            return self._service()[1].watch_topics(selection.namespace, pattern)
        except LedgerlakeError:
            return None

    def _partitions_there(self, names: Sequence[str], known: Collection[str]) -> list[str]:
        """Return the partitions of several topics that are there."""
        partitions = self._asked(partial(self._partitions, names, False))
        told = {*names, *known}
        unsure = [partition for partition in partitions if partition not in told]
        missing = self._asked(partial(self._missing, unsure)) if unsure else set()
        return [partition for partition in partitions if partition not in missing]

    @staticmethod
    def _partitions(names: Sequence[str], creates: bool, session: Session) -> list[str]:
        """Return the partitions of several topics, each once: a name may be that of a topic or of
        one of its partitions.
        """
        partitions = (
            partition
            for name, answer in _metadata(names, creates, session)
            for partition in _partitions_of(name, answer)
        )
        return list(dict.fromkeys(partitions))

    @staticmethod
    def _missing(partitions: Sequence[str], session: Session) -> set[str]:
        """Return the partitions that the broker says are not there."""
        missing = set()
        for partition, answer in _metadata(partitions, False, session):
            try:
                _partitions_of(partition, answer)
            except TopicNotFoundError:
                missing.add(partition)
        return missing

    def topics_of(self, namespace: str) -> list[str]:
        """Return the topic partitions of a namespace.

        Raises:
            BrokerError, TransportError, ProtocolError: see ``Session.request``.
        """
        answer = self._asked(
            lambda session: session.request(
                pb.CommandGetTopicsOfNamespaceResponse,
                f"list the topics of {namespace}",
                partial(commands.topics_of_namespace, namespace),
            )
        )
        return list(answer.topics)

    def _matching(self, selection: TopicSelection) -> list[str]:
        try:
            topics = self.topics_of(selection.namespace)
        except FrameTooLargeError as error:
            if not error.is_command:
                raise
            raise UsageError(
                f"the list of the topics of {selection.namespace} is too long: {error.message}; "
                "name topics in place of a pattern, or split the namespace"
            ) from None
        return sorted(name for name in set(topics) if selection.matches(name))

    def schema(self, topic: str, version: bytes | None = None) -> ValueSchema | None:
        """Return one version of a topic's schema, the newest by default; None if there is none.

        Raises:
            BrokerError, TransportError, ProtocolError: see ``Session.request``.
        """
        (answer,) = self.schemas([(topic, version)])
        return None if answer is None else answer[1]

    def schemas(
        self, asked: Sequence[tuple[str, bytes | None]]
    ) -> list[tuple[bytes, ValueSchema] | None]:
        """Return versions of topics' schemas, each with its version; None where there is none. All
        requests are sent at once.

        Args:
            asked: topics and versions; None for the newest.

        Raises:
            BrokerError, TransportError, ProtocolError: see ``Session.request``.
        """
        return self._asked(partial(self._schemas_by, asked))

    @staticmethod
    def _schemas_by(
        asked: Sequence[tuple[str, bytes | None]], session: Session
    ) -> list[tuple[bytes, ValueSchema] | None]:
        request_ids = [
            session.start(partial(commands.get_schema, topic, version)) for topic, version in asked
        ]
        answers = session.answers(
            pb.CommandGetSchemaResponse,
            (
                (f"tell the schema of {topic}", request_id)
                for (topic, _), request_id in zip(asked, request_ids, strict=True)
            ),
        )
        return [
            _schema_of(topic, answer) for (topic, _), answer in zip(asked, answers, strict=True)
        ]

    def session_for(self, topic_partition: str) -> Session:
        """Return a session with the broker that serves a topic partition, after a lookup."""
        owner = self._asked(partial(self._look_up, topic_partition))
        return self._broker(owner.broker_url, owner.through_proxy)

    def _look_up(self, topic_partition: str, session: Session) -> Owner:
        """Return the owner of a topic partition; the session is the first that is asked."""
        authoritative, hops = False, 0
        while True:
            answer = session.request(
                pb.CommandLookupTopicResponse,
                f"look up {topic_partition}",
                lambda request_id, must=authoritative: commands.lookup(  # type: ignore[misc]
                    topic_partition, request_id, must, self.settings.listener_name
                ),
            )
            outcome = step(topic_partition, answer, hops, self._addresses[0].is_tls, said)
            if isinstance(outcome, Owner):
                return outcome
            session = self._broker(outcome.broker_url, outcome.through_proxy)
            authoritative, hops = outcome.authoritative, outcome.hops

    def sessions_for(self, topic_partitions: Sequence[str]) -> dict[str, Session]:
        """Return the sessions of many topic partitions; all lookups are sent at once. Without those
        whose lookup was redirected or failed.
        """
        sessions: dict[str, Session] = {}
        with contextlib.suppress(LedgerlakeError):
            _, session = self._service()
            listener = self.settings.listener_name
            with session.together():
                request_ids = [
                    session.start(partial(commands.lookup, name, listener_name=listener))
                    for name in topic_partitions
                ]
            for name, request_id in zip(topic_partitions, request_ids, strict=True):
                with contextlib.suppress(LedgerlakeError):
                    answer = session.answer(
                        pb.CommandLookupTopicResponse, f"look up {name}", request_id
                    )
                    outcome = step(name, answer, 0, self._addresses[0].is_tls)
                    if isinstance(outcome, Owner):
                        sessions[name] = self._broker(outcome.broker_url, outcome.through_proxy)
        return sessions

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def _asked(self, ask: Callable[[Session], Result]) -> Result:
        """Return the answer of the service: of the first address that is up and well. An answer
        that may be another one later is that of a sick broker, so the next address is asked.
        """
        for left in reversed(range(len(self._addresses))):
            address, session = self._service()
            try:
                return ask(session)
            except LedgerlakeError as error:
                if not left or not is_retryable(error):
                    raise
            self._addresses = [*(other for other in self._addresses if other != address), address]
        raise AssertionError("a service url has an address")

    def _service(self, proxy_to_broker_url: str | None = None) -> tuple[Address, Session]:
        """Return the first address of the service that lets us in, and a session with it; that
        address is tried first from then on.

        Whatever one address has against us, as a wrong certificate, another program on its port, or
        a broker that does not accept credentials that the others know, another one may let us in.
        """
        failure: LedgerlakeError | None = None
        for address in list(self._addresses):
            try:
                session = self._session(address, proxy_to_broker_url)
            except LedgerlakeError as error:
                failure = error
                continue
            if failure is not None:
                self._addresses = [
                    address,
                    *(other for other in self._addresses if other != address),
                ]
            return address, session
        assert failure is not None
        raise failure

    def _broker(self, url: str, through_proxy: bool) -> Session:
        """Return a session with a broker that a lookup named."""
        if through_proxy:
            return self._service(url)[1]
        (address,) = parse_service_url(url)
        return self._session(address)

    def _session(self, address: Address, proxy_to_broker_url: str | None = None) -> Session:
        key = (address, proxy_to_broker_url)
        session = self._sessions.get(key)
        if session is None or not session.usable:
            for other, known in list(self._sessions.items()):
                if known.is_over:
                    self._sessions.pop(other, None)
            session = self._sessions[key] = self._connect(*key)
        return session

    def _connect(self, address: Address, proxy_to_broker_url: str | None) -> Session:
        settings = self.settings
        return Session(
            address.url,
            connect_timeout_s=settings.connect_timeout_s,
            request_timeout_s=settings.request_timeout_s,
            proxy_to_broker_url=proxy_to_broker_url,
            protocol_version=(
                commands.LAST_ENTRY_PROTOCOL_VERSION
                if settings.read_compacted
                else commands.PROTOCOL_VERSION
            ),
            authentication=settings.authentication,
            tls=settings.tls,
        )


def _schema_of(topic: str, answer: pb.CommandGetSchemaResponse) -> tuple[bytes, ValueSchema] | None:
    if answer.HasField("error_code"):
        if answer.error_code == pb.TopicNotFound:
            return None
        raise refused(f"tell the schema of {topic}", answer.error_code, answer.error_message)
    return answer.schema_version, from_wire(answer.schema)


def _metadata(
    names: Sequence[str], creates: bool, session: Session
) -> list[tuple[str, pb.CommandPartitionedTopicMetadataResponse]]:
    """Return the broker's answers about names. All requests are sent at once."""
    with session.together():
        request_ids = [
            session.start(partial(commands.partition_metadata, name, creates=creates))
            for name in names
        ]
    answers = session.answers(
        pb.CommandPartitionedTopicMetadataResponse,
        (
            (f"describe {name}", request_id)
            for name, request_id in zip(names, request_ids, strict=True)
        ),
    )
    return list(zip(names, answers, strict=True))


def _partitions_of(name: str, answer: pb.CommandPartitionedTopicMetadataResponse) -> list[str]:
    if answer.response == pb.CommandPartitionedTopicMetadataResponse.Failed:
        raise refused(f"describe {name}", answer.error, answer.message)
    if answer.partitions > limits.MAX_PARTITIONS:
        raise ProtocolError(
            f"the broker claims {answer.partitions} partitions for {name}, over the limit of "
            f"{limits.MAX_PARTITIONS}"
        )
    return [partition_name(name, index) for index in range(answer.partitions)] or [name]


_clusters: dict[tuple[int, ClientSettings, str], Cluster] = {}


def shared_cluster(settings: ClientSettings, use: str = "") -> Cluster:
    """Return this process's cluster object for some settings. Its users share connections: entries
    for one are received while another waits for an answer. One that asks much beside a reader with
    large entries names its ``use``, and has connections of its own.
    """
    return _clusters.setdefault((os.getpid(), settings, use), Cluster(settings))
