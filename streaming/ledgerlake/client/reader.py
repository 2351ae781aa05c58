"""Reads one topic partition, entry by entry, across disconnects.

Rules kept here:
  - Entries come in order, each once: entries that the broker sends again are dropped.
  - After a failure that is worth a retry, the reader looks the topic up again and continues after
    the last entry.
  - Permits count messages, and producers write these counts. The broker takes a read whose counts
    sum up to zero for sent, and sends none of its entries. So if the broker sends nothing, the
    caller has the reader begin again. And where two entries or more are missing between two that
    came, they are asked for one by one: a wrong count cannot hide a single one, as a transaction
    leaves it.
  - Message expiry (TTL) moves the cursors of readers too, past entries that were not sent yet. A
    reader acknowledges nothing, so its mark-delete position says how far. If something is missing
    before that position, a new consumer reads on. A consumer passes over markers before its first
    entry in the same way, so the next consumer has to show the same. Expiry does not run twice so
    soon.
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
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, Position, from_wire, start_after

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

# How long to wait for an entry that may be missing, before the one that came after it: with the
# first consumer, and at least in all.
_HIDDEN_FIRST_S = 1.0
_HIDDEN_S = 10.0

# Brokers run message expiry once a minute at most. Of two consumers, one opened after the other has
# answered and each no older than this, it can have moved one.
FRESH_S = 25.0

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class EntryReader:
    """A non-durable reader of one topic partition, positioned after ``after``. After ``AFTER_ALL``,
    it gets the entries that are stored once it is open.

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
        self.read_compacted = (
            cluster.settings.read_compacted if read_compacted is None else read_compacted
        )
        self._scan = scan
        self._permits = Permits(window)
        # What came and is not taken yet, each with whether entries before it may be hidden.
        self._ready: deque[tuple[Received, bool]] = deque()
        # Up to which entry and how far it is known that the consumer's mark-delete position was
        # moved.
        self._known_to = self._moved_to = BEFORE_ALL
        # The first entry that the consumer got, and whether expiry moved it past others since.
        self._first: Position | None = None
        self._is_expired = False
        self._opened_s = 0.0
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
    def is_fresh(self) -> bool:
        """Return whether the open consumer is so new that message expiry ran at most once for it
        and the one before it.
        """
        return time.monotonic() - self._opened_s < FRESH_S

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
        """Return when the broker opened this reader, by its clock and as it writes times; empty if
        it does not tell.

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
        return (
            None
            if received is None
            else from_wire(received.answer.consumer_mark_delete_position).position
        )

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
        self._known_to = self._moved_to = BEFORE_ALL
        self._first, self._is_expired = None, False
        self._opened_s = time.monotonic()

    def distance(self, end: Position) -> int:
        """Return how many entries the reader gets up to ``end``, which is in the ledger of the last
        one.
        """
        return end.entry_id - self.after.entry_id

    def grant_until(self, end: Position) -> None:
        """Let the broker send the entries up to ``end``; each one takes at least one permit. The
        broker sends no later entry, unless missing entries have left permits.
        """
        assert self._open is not None
        session, consumer = self._open
        permits = min(self.distance(end) - self._permits.outstanding, MOST_PERMITS)
        if permits > 0:
            self._permits.outstanding += permits
            grant(session, consumer, permits)

    def take_until(self, end: Position, deadline: float) -> EntryReceived | None:
        """Return the entry at ``end``, after ``grant_until``; None if it does not come, and then
        the broker may send other entries.

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
            is_alone: whether the broker reads the next entry alone; else it reads it together with
                the last one that came. The next entry comes in one of the two ways: its count and
                that of an entry before it cannot sum up to zero in both.
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
        if self._is_expired:
            self.begin_again(True)
        session, consumer = self._opened()
        if self._permits.outstanding == 0:
            grant(
                session,
                consumer,
                self._permits.open(1 if self._is_alone else max(self._permits.window, 2)),
            )
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
            self._first = self._first or received.position
            new_entries = received.after(self.after)
            if new_entries is not None:
                if self.read_compacted:
                    return new_entries
                self._add_ready(
                    new_entries, self._find_moved_to(session, consumer, new_entries), was_alone
                )
                return self._next_ready() if self._ready else None

    def _add_ready(self, received: Received, moved_to: Position, was_alone: bool) -> None:
        first, *others = received.runs(moved_to)
        may_hide = self._may_hide(first.position, moved_to, was_alone)
        had_entry = self._first is not None and self._first <= moved_to < AFTER_ALL
        if had_entry and (others or (may_hide and self._first != first.position)):
            # Nobody acknowledged what the consumer got. Another one gets what this one did not.
            _log.warning(
                "message expiry has moved the cursor of a reader of %s to %s",
                self.topic_partition,
                moved_to,
            )
            self._is_expired = True
            if not may_hide:
                self._ready.append((first, False))
            return
        self._ready.append((first, may_hide))
        self._ready += ((run, True) for run in others)

    def _may_hide(self, following: Position, moved_to: Position, was_alone: bool) -> bool:
        """Return whether entries may be hidden before the first of some that came."""
        before = self.after
        if following == before.next:
            return False
        # Of a ledger before, it is not known where it ends, and of a topic's beginning, in which
        # ledger it is.
        is_long = (
            before.ledger_id != following.ledger_id
            or following.entry_id - before.entry_id > HOLE_ENTRIES + 1
        )
        # The broker takes at least two entries for sent at once, so a wrong count hides none alone.
        if is_long and not was_alone:
            return True
        if before == BEFORE_ALL:
            # The position is before the first ledger. If the broker does not tell, the topic begins
            # there.
            return moved_to.entry_id >= 0 and moved_to != AFTER_ALL
        return moved_to > before

    def _find_moved_to(self, session: Session, consumer: Consumer, received: Received) -> Position:
        """Return how far the consumer's mark-delete position was moved when entries had come;
        ``BEFORE_ALL`` if none is missing, ``AFTER_ALL`` if the broker does not tell.
        """
        if received.follows(self.after):
            return BEFORE_ALL
        if received.last > self._known_to:
            arrived = [received.last, *(entries.last for entries in list(consumer.entries)[-1:])]
            try:
                request_id = session.start(
                    partial(commands.get_last_message_id, consumer.consumer_id)
                )
                attempt = f"tell the mark-delete position of {self.topic_partition}"
                told = session.answer(LastMessageIdReceived, attempt, request_id, consumer)
            except LedgerlakeError:
                return AFTER_ALL
            self._known_to = max(arrived)
            self._moved_to = from_wire(told.answer.consumer_mark_delete_position).position
        return self._moved_to

    def _next_ready(self) -> Received:
        """Return the next of the entries that came, or one that the broker took for sent before it.
        Those may be very many, so each is read when it is taken.
        """
        received, may_hide = self._ready[0]
        if may_hide and self.after.next != received.position:
            hidden = self._hidden(received.position)
            if hidden is not None:
                return hidden
        self._ready.popleft()
        return received

    def _hidden(self, until: Position) -> EntryReceived | None:
        """Return the next entry if it is before a position, else None.

        Raises:
            DeadlineError: the broker sent none, so that one between may be missing.
        """
        entry = self._certain(until)
        if entry.position >= until:
            return None
        _log.warning(
            "the broker did not send the entry %s of %s at first",
            entry.position,
            self.topic_partition,
        )
        return entry

    def _certain(self, until: Position) -> EntryReceived:
        """Return the next entry before an entry that the broker has sent: it has one.

        Raises:
            DeadlineError: as ``_hidden``.
        """
        give_up_s = time.monotonic() + max(self.cluster.settings.give_up_after_s, _HIDDEN_S)
        shown, wait_s = None, _HIDDEN_FIRST_S
        while time.monotonic() < give_up_s:
            reader = _LoneReader(
                self.cluster, self.topic_partition, self.after, window=1, read_compacted=False
            )
            with contextlib.closing(reader):
                entry = reader.next(wait_s)
                is_fresh = reader.is_fresh
            if entry is not None and (
                not reader.may_hide or (is_fresh and entry.position == shown)
            ):
                return entry
            shown = entry.position if entry is not None and is_fresh else None
            # Expiry may have moved it past all entries; or the broker skips very many.
            wait_s = wait_s if entry is not None else wait_s * 2
        raise DeadlineError(
            f"the broker has an entry of {self.topic_partition} between {self.after} and {until} "
            "or none, and does not tell; try again later"
        )

    def _connected_since_once(self) -> str:
        session, consumer = self._opened()
        build = partial(commands.consumer_stats, consumer.consumer_id)
        attempt = f"tell its time for {self.topic_partition}"
        return str(
            session.request(
                pb.CommandConsumerStatsResponse, attempt, build, consumer
            ).connected_since
        )

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

    def try_to_ask(self) -> None:
        """Open it and ask for the last message, without another try.

        Raises:
            BrokerError, TransportError, ProtocolError: as ``next``.
        """
        self._last_message_once()

    def _opened(self) -> tuple[Session, Consumer]:
        if self._open is None or self._open[1].closed:
            session = self.cluster.session_for(self.topic_partition)
            self.adopt(
                session,
                subscribe(
                    session, f"open a reader on {self.topic_partition}", self.subscribe_command
                ),
            )
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
        if not (
            is_retryable(error)
            or (isinstance(error, BrokerError) and error.code == ConsumerBusyError.code)
        ):
            raise error
        pause_s = self._backoff.failed(time.monotonic(), error)
        if pause_s is None:
            raise error
        time.sleep(pause_s)


class _LoneReader(EntryReader):
    """Reads one entry, which the broker reads alone; ``may_hide`` says whether expiry may have
    moved its consumer past an entry before that one.
    """

    may_hide = False

    def _add_ready(self, received: Received, moved_to: Position, was_alone: bool) -> None:
        self.may_hide = self._may_hide(received.position, moved_to, was_alone)
        self._ready.append((received, False))


def open_together(readers: Sequence[EntryReader]) -> None:
    """Open many readers with few round trips; readers that cannot be opened so open at their first
    use.
    """
    by_session: dict[Session, list[EntryReader]] = {}
    for cluster in {reader.cluster for reader in readers}:
        of_cluster = [reader for reader in readers if reader.cluster is cluster]
        sessions = cluster.sessions_for([reader.topic_partition for reader in of_cluster])
        for reader in of_cluster:
            if reader.topic_partition in sessions:
                by_session.setdefault(sessions[reader.topic_partition], []).append(reader)
    requests = []
    for session, together in by_session.items():
        with contextlib.suppress(LedgerlakeError), session.together():
            requests += [
                (reader, session, *start_subscribe(session, reader.subscribe_command))
                for reader in together
            ]
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


def read_one_each(
    session: Session, ends: Sequence[Wanted]
) -> Iterator[tuple[EntryReader, EntryReceived]]:
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
