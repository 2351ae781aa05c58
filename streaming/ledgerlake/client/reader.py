"""Reading one topic partition, entry by entry, across disconnects.

Rules kept here:
  - Entries come in order, each once: what was taken is never handed out again, whatever the broker
    redelivers.
  - After a failure worth retrying the reader looks the topic up afresh and goes on after the last
    entry taken.
  - Permits are messages. When they run dry without cause (a corrupted count), a fresh window is
    granted.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from ledgerlake.client.backoff import Backoff
from ledgerlake.client.consumers import (
    close_consumer,
    closed,
    grant,
    next_entry,
    next_received,
    start_close,
    start_subscribe,
    subscribe,
    subscribed,
)
from ledgerlake.client.session import Session
from ledgerlake.errors import BrokerError, LedgerlakeError, TransportError, is_retryable
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.connection import LastMessageIdReceived
from ledgerlake.wire.consumer import Permits
from ledgerlake.wire.message_id import Position, from_wire, start_after

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ledgerlake.client.channels import Consumer
    from ledgerlake.client.cluster import Cluster
    from ledgerlake.wire.connection import EntryReceived, Received, Scan

    Take = Callable[[Session, Consumer, float], Received | None]

DEFAULT_WINDOW = 20_000

# Entries of several topic partitions at once; each may be as large as entries can be.
_TOGETHER_MOST = 64
_AT_ONCE_S = 0.5

# A broker's words if it cannot read the metadata of the last entry. It has no code of its own for
# that.
_UNREADABLE_LAST = "Failed to get batch size for entry"

Result = TypeVar("Result")


class EntryReader:
    """A non-durable reader of one topic partition, positioned after ``after``.

    Args:
        read_compacted: whether it sees the topic as compaction left it; None: as the cluster's
            settings say.
        scan: what finds entries that come together; without it they come one by one.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic_partition: str,
        after: Position,
        window: int = DEFAULT_WINDOW,
        read_compacted: bool | None = None,
        scan: Scan | None = None,
    ) -> None:
        self.topic_partition = topic_partition
        self.after = after
        self.cluster = cluster
        self.read_compacted = cluster.settings.read_compacted if read_compacted is None else read_compacted
        self._scan = scan
        self._permits = Permits(window)
        self._open: tuple[Session, Consumer] | None = None
        self._asked: tuple[Consumer, int] | None = None
        self._backoff = Backoff(give_up_after_s=cluster.settings.give_up_after_s)
        self._name = f"ledgerlake-reader-{uuid.uuid4().hex[:12]}"

    def next(self, timeout_s: float) -> EntryReceived | None:
        """The entry after the last one taken, or None when none came in time.

        Raises:
            TopicNotFoundError, BrokerError: final answers of the broker.
            TransportError, ProtocolError: the connection kept failing for ``give_up_after_s``.
        """
        return cast("EntryReceived | None", self._next(timeout_s, next_entry))

    def next_together(self, timeout_s: float) -> Received | None:
        """The same, with those that came with it.

        Raises:
            As ``next``.
        """
        return self._next(timeout_s, next_received)

    def _next(self, timeout_s: float, take: Take) -> Received | None:
        deadline = time.monotonic() + timeout_s
        while True:
            received = self._retrying(lambda: self._next_once(deadline, take))
            if received is not None:
                return received
            if time.monotonic() >= deadline:
                return None

    @property
    def session(self) -> Session | None:
        """The session that it reads through, while there is one."""
        return None if self._open is None or self._open[1].closed else self._open[0]

    def ask_last_message(self) -> None:
        """Ask for the last message without waiting, so that the next ``last_message`` has its
        answer on the way.
        """
        if self.session is None or self._asked is not None:
            return
        session, consumer = self._opened()
        with contextlib.suppress(LedgerlakeError):
            self._asked = consumer, session.start(partial(commands.get_last_message_id, consumer.consumer_id))

    def last_message(self) -> LastMessageIdReceived | None:
        """Return the broker's word on the last message; None if it cannot read the last entry of
        what this reader gets.

        Raises:
            As ``next``.
        """
        return self._retrying(self._last_message_once)

    def mark_delete_position(self) -> Position | None:
        """The last entry that counts as taken; of a reader from ``BEFORE_ALL`` the first ledger,
        and no entry of it.

        None if the broker cannot tell, since it tells the last message with it.

        Raises:
            As ``next``.
        """
        received = self.last_message()
        return None if received is None else from_wire(received.answer.consumer_mark_delete_position).position

    def subscribe_command(self, consumer_id: int, request_id: int) -> bytes:
        """Return the command that opens the reader on a session."""
        start = start_after(self.after)
        return commands.subscribe_reader(
            self.topic_partition, self._name, consumer_id, request_id, start, self.read_compacted
        )

    def adopt(self, session: Session, consumer: Consumer) -> None:
        """Read through a consumer that ``subscribe_command`` has opened."""
        self._open = session, consumer
        self._permits.outstanding = 0

    def wake(self) -> None:
        """Grant a fresh window: for a broker that has entries for us and sends none."""
        if self._open is not None:
            session, consumer = self._open
            grant(session, consumer, self._permits.open())

    def close(self) -> None:
        """End the consumer."""
        if self._open is not None:
            session, consumer = self._open
            self._open = None
            close_consumer(session, consumer)

    def _next_once(self, deadline: float, take: Take) -> Received | None:
        session, consumer = self._opened()
        if self._permits.outstanding == 0:
            grant(session, consumer, self._permits.open())
        while True:
            received = take(session, consumer, deadline)
            if received is None:
                if consumer.closed:
                    raise TransportError(f"the broker closed the reader of {self.topic_partition}")
                return None
            granted = self._permits.take(received.message_count)
            if granted:
                grant(session, consumer, granted)
            fresh = received.after(self.after)
            if fresh is not None:
                self.after = fresh.last
                return fresh

    def _last_message_once(self) -> LastMessageIdReceived | None:
        try:
            return self._ask_last_message()
        except BrokerError as error:
            if error.code == "MetadataError" and (self.read_compacted or _UNREADABLE_LAST in str(error)):
                return None
            raise

    def _ask_last_message(self) -> LastMessageIdReceived:
        session, consumer = self._opened()
        asked, self._asked = self._asked, None
        if asked is not None and asked[0] is consumer:
            request_id = asked[1]
        else:
            request_id = session.start(partial(commands.get_last_message_id, consumer.consumer_id))
        attempt = f"tell the last message of {self.topic_partition}"
        return session.answer(LastMessageIdReceived, attempt, request_id, consumer)

    def _opened(self) -> tuple[Session, Consumer]:
        if self._open is None or self._open[1].closed:
            session = self.cluster.session_for(self.topic_partition)
            if self._scan is not None:
                session.scan_with(self._scan)
            self.adopt(session, subscribe(session, f"open a reader on {self.topic_partition}", self.subscribe_command))
        assert self._open is not None
        return self._open

    def _retrying(self, call: Callable[[], Result]) -> Result:
        while True:
            try:
                result = call()
            except LedgerlakeError as error:
                self._recover(error)
            else:
                self._backoff.succeeded()
                return result

    def _recover(self, error: LedgerlakeError) -> None:
        self.close()
        if not is_retryable(error):
            raise error
        pause_s = self._backoff.failed(time.monotonic(), error)
        if pause_s is None:
            raise error
        time.sleep(pause_s)


def open_together(cluster: Cluster, readers: Sequence[EntryReader]) -> None:
    """Open many readers by few waits; one that this does not open opens itself when it is used."""
    sessions = cluster.sessions_for([one.topic_partition for one in readers])
    asked = []
    for one in readers:
        session = sessions.get(one.topic_partition)
        if session is not None:
            with contextlib.suppress(LedgerlakeError):
                asked.append((one, session, *start_subscribe(session, one.subscribe_command)))
    for one, session, consumer, request_id in asked:
        with contextlib.suppress(LedgerlakeError):
            one.adopt(session, subscribed(session, f"open a reader on {one.topic_partition}", consumer, request_id))


def read_one_each(session: Session, wanted: Mapping[str, Position]) -> dict[str, EntryReceived]:
    """The entries at positions, one of each topic partition of one broker, asked for many at once.

    Those that are not there at once are left out, and so is everything of a connection that fails:
    this is a short cut, and who needs an entry has ``EntryReader``.
    """
    found: dict[str, EntryReceived] = {}
    names = list(wanted)
    closing: list[int] = []
    with contextlib.suppress(LedgerlakeError):
        for start in range(0, len(names), _TOGETHER_MOST):
            part = {name: wanted[name] for name in names[start : start + _TOGETHER_MOST]}
            closing += start_close(session, _read_together(session, part, found))
    closed(session, closing)
    return found


def _read_together(
    session: Session, wanted: Mapping[str, Position], found: dict[str, EntryReceived]
) -> Collection[Consumer]:
    """Subscribe to all, then ask each for one entry, each with one wait; the consumers, which are
    to be ended.
    """
    subscription = f"ledgerlake-reader-{uuid.uuid4().hex[:12]}"
    asked = {}
    for name, position in wanted.items():
        start = start_after(position.before)
        build = partial(_subscribe, name, subscription, start)
        asked[name] = start_subscribe(session, build)
    opened = {}
    for name, (consumer, request_id) in asked.items():
        with contextlib.suppress(BrokerError):
            opened[name] = subscribed(session, f"open a reader on {name}", consumer, request_id)
    for consumer in opened.values():
        grant(session, consumer, 1)
    deadline = time.monotonic() + _AT_ONCE_S
    for name, consumer in opened.items():
        entry = next_entry(session, consumer, deadline)
        if entry is not None and entry.position == wanted[name]:
            found[name] = entry
    return opened.values()


def _subscribe(topic: str, subscription: str, start: pb.MessageIdData, consumer_id: int, request_id: int) -> bytes:
    return commands.subscribe_reader(topic, subscription, consumer_id, request_id, start, False)
