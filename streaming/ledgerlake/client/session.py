"""A connection to a broker: handshake, requests with answers, and channels (see
``client.channels``).

Rules kept here:
  - Every wait has a deadline. A session that failed once stays failed; the caller opens a new one.
  - Little is prefetched: bytes are read from the socket while a caller waits for an answer or an
    entry, and at other times only while less than a mebibyte of entries is unread. So TCP slows the
    broker down. Entries that arrive while a caller waits for something else are limited in bytes:
    beyond that a consumer is closed, and its reader opens another one when it is read again.
  - A broker sends PING on an idle connection and closes it after seconds without an answer. So a
    thread answers on sessions that are not in use, and sends a PING of its own at intervals,
    because any frame keeps a connection alive.
  - That thread closes connections without a channel that nobody has used for a while, or that are
    too many, the least recently used first: Spark reuses its workers, and a broker may name ever
    other addresses. Who needs one again opens it again.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from ledgerlake.client.auth import NO_AUTHENTICATION, Authentication, hint
from ledgerlake.client.channels import Channels, Consumer, Watcher
from ledgerlake.client.transport import DEFAULT_TLS, TlsSettings, Transport
from ledgerlake.errors import (
    BrokerError,
    DeadlineError,
    LedgerlakeError,
    ProtocolError,
    TransportError,
)
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.stored.secrets import said
from ledgerlake.wire import commands, limits
from ledgerlake.wire.connection import Connection, Event, Role, Scan
from ledgerlake.wire.lookup import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


CLIENT_VERSION = "ledgerlake 0.1"
KEEPALIVE_S = 15.0
_IDLE_POLL_S = 1.0
_UNUSED_S = 60.0
_UNUSED_MOST = 16
_READ_AHEAD_BYTES = 1024 * 1024
_WRITE_BYTES = 64 * 1024
_ERROR_TEXTS = frozenset({"message", "error_message"})

Answer = TypeVar("Answer")


class Session:
    """A connection after its handshake; ``max_message_bytes`` is the largest entry that the broker
    accepts.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float,
        request_timeout_s: float,
        proxy_to_broker_url: str | None = None,
        protocol_version: int = commands.PROTOCOL_VERSION,
        authentication: Authentication = NO_AUTHENTICATION,
        tls: TlsSettings = DEFAULT_TLS,
    ) -> None:
        self.url = url
        self._authentication = authentication
        # The last ones. They may be renewed since, and are not fetched again for an error.
        self._sent_credentials = ""
        self.request_timeout_s = request_timeout_s
        self._failure: LedgerlakeError | None = None
        self._connection = Connection(Role.CLIENT)
        self._answers: dict[int, Any] = {}
        self._pending_requests: set[int] = set()
        self.channels = Channels()
        self._can_watch = False
        self.max_message_bytes = limits.DEFAULT_MAX_MESSAGE_BYTES
        self._ids = itertools.count(1)
        self.used_s = time.monotonic()
        self._next_ping_s = self.used_s + KEEPALIVE_S
        self._lock = threading.RLock()
        self._holds_back = False
        self._transport = Transport(url, connect_timeout_s, tls)
        try:
            self._shake_hands(proxy_to_broker_url, protocol_version)
        except BaseException:
            self._transport.close()
            raise
        _keep_alive(self)

    @property
    def is_over(self) -> bool:
        """Return whether the connection is known to have failed, without a check."""
        return self._failure is not None

    @property
    def usable(self) -> bool:
        """Return whether the connection is open, after a check whether the peer has closed it."""
        with self._lock:
            self.used_s = time.monotonic()
            if self._failure is None:
                try:
                    self._pump(0.0)
                except LedgerlakeError:
                    return False
            return self._failure is None

    @property
    def is_in_use(self) -> bool:
        """Return whether the connection has a channel, or an answer is waited for."""
        return bool(self._pending_requests) or self.channels.are_open

    def request(
        self,
        answer_type: type[Answer],
        attempt: str,
        build: Callable[[int], bytes],
        consumer: Consumer | None = None,
    ) -> Answer:
        """Send one command and wait for its answer.

        Args:
            attempt: completes "the broker could not ..." in errors.
            consumer: the consumer of the command. If the broker closes it, there may be no answer.

        Raises:
            BrokerError: the broker refused.
            TransportError: the broker closed the consumer.
            TransportError, DeadlineError, ProtocolError: the connection failed, and this session
                with it.
        """
        return self.answer(answer_type, attempt, self.start(build), consumer)

    def start(self, build: Callable[[int], bytes]) -> int:
        """Send a command without waiting; return its request id, for ``answer``. So many requests
        can be pending at once.

        Raises:
            TransportError, DeadlineError: the connection failed.
        """
        with self._lock:
            request_id = self.next_id()
            self.used_s = time.monotonic()
            self._pending_requests.add(request_id)
            self.send(build(request_id))
            return request_id

    def answer(
        self,
        answer_type: type[Answer],
        attempt: str,
        request_id: int,
        consumer: Consumer | None = None,
    ) -> Answer:
        """Wait for the answer to a command that ``start`` has sent.

        Raises:
            As ``request``.
        """
        with self._lock:
            try:
                deadline = time.monotonic() + self.request_timeout_s
                while request_id not in self._answers:
                    if consumer is not None and consumer.closed:
                        raise TransportError(f"the broker unloaded the topic and did not {attempt}")
                    self._wait(deadline, attempt)
                answer = self._answers.pop(request_id)
            finally:
                self._pending_requests.discard(request_id)
        if isinstance(answer, pb.CommandError):
            raise refused(attempt, answer.error, answer.message)
        if not isinstance(answer, answer_type):
            raise self._fail(
                ProtocolError(
                    f"the broker answered with {type(answer).__name__} instead of "
                    f"{answer_type.__name__}"
                )
            )
        return answer

    def answers(
        self, answer_type: type[Answer], attempts: Iterable[tuple[str, int]]
    ) -> list[Answer]:
        """Wait for the answers to several commands, each an attempt with the request id that
        ``start`` gave. If one is an error, the others are not waited for.

        Raises:
            As ``request``.
        """
        pending = list(attempts)
        try:
            return [self.answer(answer_type, attempt, number) for attempt, number in pending]
        finally:
            with self._lock:
                for _, number in pending:
                    self._pending_requests.discard(number)
                    self._answers.pop(number, None)

    def send(self, frame: bytes, *, later: bool = False) -> None:
        """Send a frame without waiting for an answer.

        Args:
            later: send it with the frames that follow, since each write costs more than a small
                frame: when there are ``_WRITE_BYTES`` of them, or before anything is waited for.

        Raises:
            TransportError, DeadlineError: the connection failed.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                self._connection.send(frame)
                if not self._holds_back and not (
                    later and self._connection.unsent_bytes < _WRITE_BYTES
                ):
                    self._flush()
            except LedgerlakeError as error:
                raise self._fail(error) from None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send the frames of this context at its end, or before anything is waited for, since each
        write costs more than a small frame.

        Raises:
            TransportError, DeadlineError: the connection failed.
        """
        with self._lock:
            outer, self._holds_back = self._holds_back, True
            try:
                yield
            finally:
                self._holds_back = outer
                self.send(b"")

    def _flush(self) -> None:
        self._transport.send(self._connection.data_to_send(), self.request_timeout_s)

    def next_id(self) -> int:
        """Return a number that this connection has not used yet, for a request or a channel."""
        return next(self._ids)

    def wait_until(self, is_done: Callable[[], bool], deadline: float) -> None:
        """Receive until a condition is true, or until the deadline (``time.monotonic``).

        Raises:
            TransportError, ProtocolError: the connection failed.
        """
        with self._lock:
            while not is_done():
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return
                self._pump(remaining_s)

    def scan_with(self, scan: Scan) -> None:
        """Set the function that finds runs of entries, see ``Connection``."""
        self._connection.scan = scan

    def watch_topics(self, namespace: str, pattern: str) -> Watcher | None:
        """Return a watcher of created and deleted topics; None if the broker does not support it.

        Raises:
            BrokerError: the broker refused.
            TransportError, DeadlineError, ProtocolError: the connection failed.
        """
        if not self._can_watch:
            return None
        watcher = Watcher(self.next_id())
        self.channels.watchers[watcher.watcher_id] = watcher
        try:
            build = partial(commands.watch_topics, watcher.watcher_id, namespace, pattern)
            self.request(pb.CommandWatchTopicListSuccess, f"watch the topics of {namespace}", build)
        except BaseException:
            del self.channels.watchers[watcher.watcher_id]
            raise
        return watcher

    def close(self) -> None:
        if self._failure is None:
            self._fail(TransportError(f"the session with {self.url} was closed"))

    def service(self, now_s: float, unused_since_s: float) -> bool:
        """Answer pending frames and send PINGs while no other thread uses the session; return False
        once it has failed, or was closed because it is unused since then or longer.
        """
        if not self._lock.acquire(blocking=False):
            return True
        try:
            if self.used_s <= unused_since_s and not self.is_in_use:
                self.close()
            if self.channels.unread_bytes() < _READ_AHEAD_BYTES:
                self._pump(0.0)
            if now_s >= self._next_ping_s:
                self._next_ping_s = now_s + KEEPALIVE_S
                self.send(commands.ping())
        except LedgerlakeError:
            return False
        finally:
            self._lock.release()
        return True

    def _next_event(self) -> Event | None:
        """Return the next event, without the credentials in what it says of an error."""
        event = self._connection.next_event()
        if isinstance(event, Message):
            for name in _ERROR_TEXTS.intersection(event.DESCRIPTOR.fields_by_name):
                if event.HasField(name):
                    setattr(event, name, said(getattr(event, name)))
        return event

    def _credentials(self) -> bytes | None:
        """Return the credentials to send now.

        Raises:
            As ``Authentication.data``.
        """
        data = self._authentication.data()
        self._sent_credentials = (data or b"").decode(errors="replace")
        return data

    def _shake_hands(self, proxy_to_broker_url: str | None, protocol_version: int) -> None:
        self.send(
            commands.connect(
                CLIENT_VERSION,
                self._authentication.method,
                self._credentials(),
                proxy_to_broker_url,
                protocol_version,
            )
        )
        deadline = time.monotonic() + self.request_timeout_s
        try:
            event = self._next_greeting(deadline)
        except ProtocolError:
            raise ProtocolError(
                f"the peer at {self.url} does not speak Pulsar's binary protocol; check the "
                f"port{self._tls_hint}"
            ) from None
        except DeadlineError:
            raise
        except TransportError as failure:
            raise TransportError(
                f"{failure.message} before it answered; try again, and check the "
                f"port{self._tls_hint}"
            ) from None
        if isinstance(event, pb.CommandError):
            error = refused(f"let us connect at {self.url}", event.error, event.message)
            if error.code == "AuthenticationError":
                if self._authentication.forget():
                    raise TransportError(f"{error.message}; the issuer is asked for another token")
                raise BrokerError(
                    error.message + hint(self._authentication, self._sent_credentials, time.time()),
                    code=error.code,
                )
            raise error
        if not isinstance(event, pb.CommandConnected):
            raise ProtocolError(
                f"the peer at {self.url} answered CONNECT with {type(event).__name__}; is it a "
                "Pulsar broker?"
            )
        self._can_watch = event.feature_flags.supports_topic_watchers
        self.max_message_bytes = limits.message_limit_bytes(event.max_message_size)

    def _next_greeting(self, deadline: float) -> Event:
        """Return the first event that is not a challenge; challenges are answered."""
        while True:
            is_challenged = False
            while isinstance(event := self._next_event(), pb.CommandAuthChallenge):
                is_challenged = True
            if is_challenged:
                self._answer_challenge()
            if event is not None:
                return event
            self._receive(deadline, "greet us")

    @property
    def _tls_hint(self) -> str:
        """Return what to do if the port is the one for TLS, as the end of a sentence."""
        return (
            ""
            if self.url.startswith("pulsar+ssl")
            else ", and write pulsar+ssl:// for a port with TLS"
        )

    def _answer_challenge(self) -> None:
        """Send the credentials again, because they are about to expire.

        Raises:
            BrokerError: there are none.
        """
        if self._authentication == NO_AUTHENTICATION:
            raise BrokerError(
                f"the broker at {self.url} asks who we are, and no authentication is configured",
                code="AuthenticationError",
            )
        self.send(
            commands.auth_response(CLIENT_VERSION, self._authentication.method, self._credentials())
        )

    def _wait(self, deadline: float, attempt: str) -> None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise self._fail(
                DeadlineError(
                    f"the broker at {self.url} did not {attempt} in {self.request_timeout_s:g} s"
                )
            )
        self._pump(remaining_s)

    def _receive(self, deadline: float, attempt: str) -> None:
        remaining_s = deadline - time.monotonic()
        # Bytes that have arrived are received without waiting, and a peer may send without end.
        data = self._transport.receive(remaining_s) if remaining_s > 0 else None
        if data is None:
            raise DeadlineError(
                f"the broker at {self.url} did not {attempt} in {self.request_timeout_s:g} s; "
                "check the port and the network"
            )
        self._connection.receive_data(data)

    def _pump(self, timeout_s: float) -> None:
        """Receive once, and dispatch the events."""
        if self._failure is not None:
            raise self._failure
        try:
            if self._connection.unsent_bytes:
                self._flush()
            payload_buffer = self._connection.wanted()
            data = self._transport.receive(timeout_s, payload_buffer)
            if data is None:
                return
            if payload_buffer is None:
                self._connection.receive_data(data)
            else:
                self._connection.filled(len(data))
            is_challenged = False
            while (event := self._next_event()) is not None:
                if isinstance(event, pb.CommandAuthChallenge):
                    is_challenged = True
                else:
                    self._dispatch(event)
            if is_challenged:
                self._answer_challenge()
            for consumer in self.channels.drop_excess():
                self._connection.send(commands.close_consumer(consumer.consumer_id, self.next_id()))
            answer = self._connection.data_to_send()
            if answer:
                self._transport.send(answer, self.request_timeout_s)
        except LedgerlakeError as error:
            raise self._fail(error) from None

    def _dispatch(self, event: Event) -> None:
        if not self.channels.take(event):
            request_id = getattr(event, "request_id", None)
            if request_id in self._pending_requests:
                self._answers[request_id] = event

    def _fail(self, error: LedgerlakeError) -> LedgerlakeError:
        self._failure = error
        self._transport.close()
        self.channels.close_all()
        return error


_alive: weakref.WeakSet[Session] = weakref.WeakSet()
_keeper_pid = 0
_keeper_lock = threading.Lock()


def _keep_alive(session: Session) -> None:
    """Register a session with this process's keep-alive thread, which is started when first needed
    (also after a fork).
    """
    global _keeper_pid  # noqa: PLW0603
    with _keeper_lock:
        _alive.add(session)
        if _keeper_pid != os.getpid():
            _keeper_pid = os.getpid()
            threading.Thread(target=_keeper, name="ledgerlake-keepalive", daemon=True).start()


def _keeper() -> None:
    while True:
        time.sleep(_IDLE_POLL_S)
        with _keeper_lock:
            sessions = list(_alive)
        unused_since_s = _unused_since_s(sessions, time.monotonic())
        for session in sessions:
            if not session.service(time.monotonic(), unused_since_s):
                with _keeper_lock:
                    _alive.discard(session)
        del sessions


def _unused_since_s(sessions: Iterable[Session], now_s: float) -> float:
    """Return since when a session that is closed now is unused."""
    used_s = sorted((session.used_s for session in sessions if not session.is_in_use), reverse=True)
    too_many_s = used_s[_UNUSED_MOST] if len(used_s) > _UNUSED_MOST else -math.inf
    return max(now_s - _UNUSED_S, too_many_s)
