"""Reads one topic partition, entry by entry, across disconnects.

Rules kept here:
  - Entries come in order, each once: entries that the broker sends again are dropped.
  - After a failure that is worth a retry, the reader looks the topic up again and continues after
    the last entry.
  - Permits count messages, and producers write these counts. The broker takes a read whose counts
    sum up to zero for sent, and sends none of its entries. So if the broker sends nothing, the caller
    has the reader begin again. And where two entries or more are missing between two that came, they
    are asked for one by one: a single one, as a transaction leaves it, can hide no honest message.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from ledgerlake.client.backoff import Backoff
from ledgerlake.client.consumers import (
    cannot_read_last,
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
from ledgerlake.errors import (
    BrokerError,
    ConsumerBusyError,
    DeadlineError,
    LedgerlakeError,
    TransportError,
    is_retryable,
)
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.connection import HOLE_ENTRIES, LastMessageIdReceived
from ledgerlake.wire.consumer import MOST_PERMITS, Permits
from ledgerlake.wire.message_id import AFTER_ALL, Position, from_wire, start_after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ledgerlake.client.channels import Consumer
    from ledgerlake.client.cluster import Cluster
    from ledgerlake.wire.connection import EntryReceived, Received, Scan

    Take = Callable[[Session, Consumer, float], Received | None]

DEFAULT_WINDOW = 20_000

# How many entries are read at once, and how many bytes by what their sizes are expected to be.
_TOGETHER_MOST = 64
_TOGETHER_BYTES = 16 * 1024 * 1024
_AT_ONCE_S = 0.5

# How long to wait for an entry that may be missing, before the one that came after it.
_HIDDEN_S = 10.0

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class EntryReader:
    """A non-durable reader of one topic partition, positioned after ``after``; after ``AFTER_ALL``, it
    gets what is stored once it is open.

    Args:
        read_compacted: whether to read the compacted topic; None for the cluster's setting.
        scan: the function that finds runs of entries; without it, entries come one by one.
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
        # Whether the broker named entries that it did not send (see ``source.read_until``).
        self.is_passed_over = False
        self.read_compacted = cluster.settings.read_compacted if read_compacted is None else read_compacted
        self._scan = scan
        self._permits = Permits(window)
        # What came and is not taken yet; and whether an entry that was hidden before it was taken last.
        self._ready: deque[Received] = deque()
        self._is_hidden = False
        # Where the next consumer begins, and whether the broker reads its first entry alone.
        self._begin: tuple[Position, bool] | None = None
        self._is_alone = False
        self._open: tuple[Session, Consumer] | None = None
        self._closing: tuple[Session, list[int]] | None = None
        self._last_message_request: tuple[Consumer, int] | None = None
        self._backoff = Backoff(give_up_after_s=cluster.settings.give_up_after_s)
        self._name = f"ledgerlake-reader-{uuid.uuid4().hex[:12]}"

    def next(self, timeout_s: float) -> EntryReceived | None:
        """Return the next entry; None if none came in time.

        Raises:
            TopicNotFoundError, BrokerError: the broker's answer is final.
            TransportError, ProtocolError: the connection kept failing for ``give_up_after_s``.
        """
        return cast("EntryReceived | None", self._next(timeout_s, next_entry))

    def next_together(self, timeout_s: float) -> Received | None:
        """Return the next entry with those that came with it; None if none came in time.

        Raises:
            As ``next``.
        """
        return self._next(timeout_s, next_received)

    def _next(self, timeout_s: float, take: Take) -> Received | None:
        deadline = time.monotonic() + timeout_s
        while (received := self._retrying(lambda: self._next_once(deadline, take))) is None:
            if time.monotonic() >= deadline:
                return None
        self.after = received.last
        return received

    @property
    def session(self) -> Session | None:
        """Return the session of the open consumer; None without one."""
        return None if self._open is None or self.consumer is None else self._open[0]

    @property
    def consumer(self) -> Consumer | None:
        """Return the open consumer; None without one. A broker ends it if the topic is deleted."""
        return None if self._open is None or self._open[1].closed else self._open[1]

    @property
    def outstanding(self) -> int:
        """Return how many messages the broker may still send, before a new grant."""
        return self._permits.outstanding

    def set_window(self, window: int) -> None:
        """Set how many messages the broker may send ahead, from the next grant on."""
        self._permits.window = window

    def ask_last_message(self) -> None:
        """Request the last message without waiting, so that the next ``last_message`` is faster."""
        if self.session is None or self._last_message_request is not None:
            return
        session, consumer = self._opened()
        with contextlib.suppress(LedgerlakeError):
            self._last_message_request = (
                consumer,
                session.start(partial(commands.get_last_message_id, consumer.consumer_id)),
            )

    def last_message(self) -> LastMessageIdReceived | None:
        """Return the broker's answer about the last message; None if the broker cannot read the
        last entry.

        Raises:
            As ``next``.
        """
        return self._retrying(self._last_message_once)

    def connected_since(self) -> str:
        """Return when the broker opened this reader, by its clock and as it writes times; empty if it
        does not tell.

        Raises:
            As ``next``.
        """
        return self._retrying(self._connected_since_once)

    def mark_delete_position(self) -> Position | None:
        """Return the mark-delete position; of a reader from ``BEFORE_ALL``, the first ledger with
        entry -1.

        None if the broker cannot read the last entry, because the answer includes the last message.

        Raises:
            As ``next``.
        """
        received = self.last_message()
        return None if received is None else from_wire(received.answer.consumer_mark_delete_position).position

    def subscribe_command(self, consumer_id: int, request_id: int) -> bytes:
        """Return the command that opens the reader on a session."""
        start = start_after(self.after if self._begin is None else self._begin[0])
        return commands.subscribe_reader(
            self.topic_partition, self._name, consumer_id, request_id, start, self.read_compacted
        )

    def adopt(self, session: Session, consumer: Consumer) -> None:
        """Use a consumer that ``subscribe_command`` has opened."""
        if self._scan is not None:
            session.scan_with(self._scan)
        self._open = session, consumer
        self._permits.outstanding = 0
        self._is_alone = self._permits.window == 1 if self._begin is None else self._begin[1]
        self._begin = None

    def distance(self, end: Position) -> int:
        """Return how many entries the reader gets up to ``end``, which is in the ledger of the last
        one.
        """
        return end.entry_id - self.after.entry_id

    def grant_until(self, end: Position) -> None:
        """Let the broker send the entries up to ``end``, each of which takes a permit at least. None
        follows unless there were holes before: those have left permits.
        """
        assert self._open is not None
        session, consumer = self._open
        permits = min(self.distance(end) - self._permits.outstanding, MOST_PERMITS)
        if permits > 0:
            self._permits.outstanding += permits
            grant(session, consumer, permits)

    def take_until(self, end: Position, deadline: float) -> EntryReceived | None:
        """Return the entry at ``end``, after ``grant_until``; None if it does not come, and then the
        broker may send other entries.

        Raises:
            TransportError, ProtocolError: the connection failed.
        """
        assert self._open is not None
        session, consumer = self._open
        while self.after < end:
            if self._permits.outstanding <= 0:
                # A batch has used the permits of those behind it.
                self.grant_until(end)
            entry = next_entry(session, consumer, deadline)
            if entry is None:
                return None
            self._permits.outstanding -= entry.message_count
            self.after = max(self.after, entry.position)
            if entry.position == end:
                return entry
        return None

    def begin_again(self, is_alone: bool) -> None:
        """Open a new consumer: the broker's count of its messages begins at zero.

        Args:
            is_alone: whether the broker reads the next entry alone; else it reads it together with the
                last one that came. The next entry comes in one of the two ways: its count and that of
                an entry before it cannot sum up to zero in both.
        """
        self.close()
        start = self.after if is_alone or self.after.entry_id < 0 else self.after.before
        self._begin = start, is_alone

    def close(self) -> None:
        """Close the consumer."""
        self.start_close()
        if self._closing is not None:
            (session, request_ids), self._closing = self._closing, None
            closed(session, request_ids)

    def start_close(self) -> None:
        """Request to close the consumer without waiting; ``close`` waits for the answer."""
        if self._open is not None:
            (session, consumer), self._open = self._open, None
            self._closing = session, start_close(session, [consumer])

    def _next_once(self, deadline: float, take: Take) -> Received | None:
        if self._ready:
            return self._next_ready()
        session, consumer = self._opened()
        if self._permits.outstanding == 0:
            grant(session, consumer, self._permits.open(1 if self._is_alone else max(self._permits.window, 2)))
        while True:
            received = take(session, consumer, deadline)
            if received is None:
                if consumer.closed:
                    raise TransportError(f"the reader of {self.topic_partition} was closed")
                return None
            granted = self._permits.take(received.message_count)
            if granted:
                grant(session, consumer, granted)
            was_alone, self._is_alone = self._is_alone, False
            if self.after == AFTER_ALL:
                return received
            new_entries = received.after(self.after)
            if new_entries is not None and (was_alone or self.read_compacted):
                return new_entries
            if new_entries is not None:
                self._ready += new_entries.runs()
                return self._next_ready()

    def _next_ready(self) -> Received:
        """Return the next of the entries that came, or one that the broker took for sent before it. Those
        may be very many, so each is read when it is taken.
        """
        until = self._ready[0].position
        if self._is_hidden or _may_hide_entries(self.after, until):
            hidden = self._hidden(until)
            self._is_hidden = hidden is not None
            if hidden is not None:
                return hidden
        return self._ready.popleft()

    def _hidden(self, until: Position) -> EntryReceived | None:
        """Return the next entry if it is before a position, else None. The broker reads it alone, for a
        consumer of its own.
        """
        reader = EntryReader(self.cluster, self.topic_partition, self.after, window=1)
        try:
            entry = self._certain(reader, until)
        finally:
            reader.close()
        if entry.position >= until:
            return None
        _log.warning("the broker did not send the entry %s of %s at first", entry.position, self.topic_partition)
        return entry

    def _certain(self, reader: EntryReader, until: Position) -> EntryReceived:
        """Return the next entry of a reader before an entry that the broker has sent: it has one.

        Raises:
            DeadlineError: the broker sent none, so that one between may be missing.
        """
        give_up_s = time.monotonic() + max(self.cluster.settings.give_up_after_s, _HIDDEN_S)
        while time.monotonic() < give_up_s:
            if (entry := reader.next(_HIDDEN_S)) is not None:
                return entry
        raise DeadlineError(
            f"the broker has an entry of {self.topic_partition} between {reader.after} and {until} or none, and does not tell; "
            "try again later"
        )

    def _connected_since_once(self) -> str:
        session, consumer = self._opened()
        build = partial(commands.consumer_stats, consumer.consumer_id)
        attempt = f"tell its time for {self.topic_partition}"
        return str(session.request(pb.CommandConsumerStatsResponse, attempt, build, consumer).connected_since)

    def _last_message_once(self) -> LastMessageIdReceived | None:
        try:
            return self._ask_last_message()
        except BrokerError as error:
            if (error.code == "MetadataError" and self.read_compacted) or cannot_read_last(error):
                return None
            raise

    def _ask_last_message(self) -> LastMessageIdReceived:
        session, consumer = self._opened()
        request, self._last_message_request = self._last_message_request, None
        if request is not None and request[0] is consumer:
            request_id = request[1]
        else:
            request_id = session.start(partial(commands.get_last_message_id, consumer.consumer_id))
        attempt = f"tell the last message of {self.topic_partition}"
        return session.answer(LastMessageIdReceived, attempt, request_id, consumer)

    def try_to_open(self) -> None:
        """Open it without another try.

        Raises:
            BrokerError, TransportError, ProtocolError: as ``next``.
        """
        self._opened()

    def _opened(self) -> tuple[Session, Consumer]:
        if self._open is None or self._open[1].closed:
            session = self.cluster.session_for(self.topic_partition)
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
        # Nobody else has the subscription of a reader, so the broker has no place for it now.
        if not (is_retryable(error) or (isinstance(error, BrokerError) and error.code == ConsumerBusyError.code)):
            raise error
        pause_s = self._backoff.failed(time.monotonic(), error)
        if pause_s is None:
            raise error
        time.sleep(pause_s)


def _may_hide_entries(before: Position, following: Position) -> bool:
    """Return whether entries between two that came one after another may hide an honest message: the
    broker takes at least two for sent at once. Of a ledger before, it is not known where it ends, and
    of a topic's beginning, in which ledger it is.
    """
    return before.ledger_id != following.ledger_id or following.entry_id - before.entry_id > HOLE_ENTRIES + 1


def open_together(cluster: Cluster, readers: Sequence[EntryReader]) -> None:
    """Open many readers with few round trips; readers that cannot be opened so open at their first
    use.
    """
    sessions = cluster.sessions_for([reader.topic_partition for reader in readers])
    by_session: dict[Session, list[EntryReader]] = {}
    for reader in readers:
        if reader.topic_partition in sessions:
            by_session.setdefault(sessions[reader.topic_partition], []).append(reader)
    requests = []
    for session, together in by_session.items():
        with contextlib.suppress(LedgerlakeError), session.together():
            requests += [(reader, session, *start_subscribe(session, reader.subscribe_command)) for reader in together]
    for reader, session, consumer, request_id in requests:
        with contextlib.suppress(LedgerlakeError):
            attempt = f"open a reader on {reader.topic_partition}"
            reader.adopt(session, subscribed(session, attempt, consumer, request_id))


@dataclass(frozen=True)
class Wanted:
    """The position that a reader is to read up to, and about how many bytes an entry has there."""

    reader: EntryReader
    position: Position
    entry_bytes: int


def read_one_each(session: Session, ends: Sequence[Wanted]) -> Iterator[tuple[EntryReader, EntryReceived]]:
    """Yield the entries at some positions, one of each topic partition of one broker, with few
    round trips. A reader that is not open is opened on the session; one that is reads the entries
    before that position too, which must be of the same ledger.

    Entries that do not come soon are left out, as are all after the connection has failed. This is
    an optimisation: the caller reads the missing ones in another way, and closes their readers. A
    caller that keeps no entry has few of them in memory.
    """
    with contextlib.suppress(LedgerlakeError):
        for group in _groups(ends):
            yield from _read_together(session, group)


def close_together(session: Session, readers: Sequence[EntryReader]) -> None:
    """Close readers of one session with few round trips."""
    with contextlib.suppress(LedgerlakeError), session.together():
        for reader in readers:
            reader.start_close()
    for reader in readers:
        reader.close()


def _groups(ends: Sequence[Wanted]) -> Iterator[list[tuple[EntryReader, Position]]]:
    """Yield the readers in groups that get so many entries and bytes at once."""
    group: list[tuple[EntryReader, Position]] = []
    count = size = 0
    for wanted in ends:
        distance = wanted.reader.distance(wanted.position)
        more_bytes = distance * wanted.entry_bytes
        if group and (count + distance > _TOGETHER_MOST or size + more_bytes > _TOGETHER_BYTES):
            yield group
            group, count, size = [], 0, 0
        group.append((wanted.reader, wanted.position))
        count, size = count + distance, size + more_bytes
    if group:
        yield group


def _read_together(
    session: Session, ends: list[tuple[EntryReader, Position]]
) -> Iterator[tuple[EntryReader, EntryReceived]]:
    requests = []
    with session.together():
        for reader, _ in ends:
            if reader.session is None:
                requests.append((reader, *start_subscribe(session, reader.subscribe_command)))
    for reader, consumer, request_id in requests:
        with contextlib.suppress(BrokerError):
            attempt = f"open a reader on {reader.topic_partition}"
            reader.adopt(session, subscribed(session, attempt, consumer, request_id))
    opened = [(reader, end) for reader, end in ends if reader.session is session]
    with session.together():
        for reader, end in opened:
            reader.grant_until(end)
    deadline = time.monotonic() + _AT_ONCE_S
    for reader, end in opened:
        entry = reader.take_until(end, deadline)
        if entry is not None:
            yield reader, entry
