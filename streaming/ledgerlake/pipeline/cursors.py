"""The durable cursors of a running pipeline: they own the stream, and follow Spark's commit log.

Rules kept here:
  - The exclusive subscription on every topic partition is the right to run the stream. Nothing of
    the stream is touched before ``acquire`` has returned, and nothing is committed or sent while
    ``is_owner`` is false.
  - A cursor passes the end of a micro-batch only when Spark's commit log has that micro-batch, so
    that no run of it can be asked for again. The broker may remove what a cursor has passed at
    once.
  - A failure of a cursor is retried and never ends the query, except that another process holds the
    subscription of a topic partition that was this one's, or of all there are.
  - A topic partition that comes gets its cursor within seconds, also while a long micro-batch runs:
    until then the planner, which sees it otherwise, is not asked.

The ends of micro-batches that are not acknowledged yet are in the checkpoint
(``pipeline.batch_ends``), so that a restart acknowledges them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgerlake.client.cursor import BUSY_FOR_S, DurableCursor
from ledgerlake.errors import ConsumerBusyError, LedgerlakeError, OwnershipError, TopicNotFoundError
from ledgerlake.pipeline.batch_ends import BatchEnds
from ledgerlake.source.source_cursors import position_of
from ledgerlake.source.topic_list import TopicList

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from ledgerlake.client.cluster import Cluster
    from ledgerlake.client.topics import TopicSelection
    from ledgerlake.pipeline.batch_ends import Ends, LastRun
    from ledgerlake.pipeline.checkpoint import Checkpoint
    from ledgerlake.table.batch_commit import SeenBatch

_log = logging.getLogger(__name__)

# How often Spark's commit log is looked at while something is to be acknowledged, and the
# connections while nothing is.
_POLL_S = 0.05
_IDLE_POLL_S = 1.0
_RETRY_MOST_S = 10.0

# How often the list of topics is looked at.
_TOPICS_S = 10.0

# How often the subscription of a new topic partition is tried.
_TRY_AGAIN_S = 1.0
_TRY_AGAIN_MOST_S = 60.0

# The broker notices after a while that a consumer has disappeared, and a start that waits for this
# process gives up before.
_HELD_FOR_S = BUSY_FOR_S + 30.0


@dataclass(frozen=True)
class _Unopened:
    """A new topic partition whose subscription could not be opened since a time, when it is tried
    again, and why it could not be opened.
    """

    since_s: float
    again_s: float
    error: LedgerlakeError

    @property
    def is_busy(self) -> bool:
        """Return whether another consumer holds it."""
        return isinstance(self.error, ConsumerBusyError)


class CursorKeeper:
    """The cursors of one pipeline. ``acquire`` and ``positions`` are for the start; after ``begin``
    a thread works.
    """

    def __init__(self, cluster: Cluster, subscription: str, checkpoint: Checkpoint) -> None:
        self.subscription = subscription
        self._cluster = cluster
        self._checkpoint = checkpoint
        self._cursors: dict[str, DurableCursor] = {}
        self._ends = BatchEnds(checkpoint)
        self._at_broker = threading.RLock()
        self._news = threading.Event()
        self._idle = threading.Event()
        self._ending = threading.Event()
        self._lost: OwnershipError | None = None
        self._thread: threading.Thread | None = None
        self._topics: TopicList | None = None
        self._look_at_topics_s = 0.0
        self._unopened: dict[str, _Unopened] = {}
        self._left: Ends = {}

    def acquire(
        self,
        topic_partitions: Iterable[str],
        from_earliest: bool,
        busy_for_s: float | None = None,
        unread: Collection[str] = (),
    ) -> None:
        """Acquire the subscriptions, in order, so that one of two processes gets all of them;
        create those that are missing.

        Args:
            busy_for_s: how long to wait for another process, as ``DurableCursor.ensure`` has it.
            unread: topic partitions that came since the stream began. If the broker refuses one, it
                is tried again, as one that comes while the stream runs, unless it refuses all.

        Raises:
            ConsumerBusyError: another process holds one; no subscription was created before the
                first that is free.
            TopicNotFoundError, BrokerError, TransportError: as for a reader.
        """
        for name in sorted(topic_partitions, key=lambda name: (name in unread, name)):
            if name in unread and self._may_wait(name):
                continue
            self._acquire_one(name, from_earliest, busy_for_s)
        if self._unopened and not self._cursors:
            # Only an open subscription shows that no other process runs the stream.
            name = min(self._unopened)
            del self._unopened[name]
            self._acquire_one(name, from_earliest, busy_for_s)

    def _acquire_one(self, name: str, from_earliest: bool, busy_for_s: float | None) -> None:
        cursor = DurableCursor(self._cluster, name, self.subscription)
        self._cursors[name] = cursor
        cursor.ensure(from_earliest, busy_for_s)

    def _may_wait(self, name: str) -> bool:
        """Try to open the subscription of a new topic partition; return whether the stream may
        begin. If somebody holds it, this process needs another one, which shows that it owns the
        stream.
        """
        with contextlib.suppress(TopicNotFoundError):
            is_open = self._open_new(name)
            return is_open or bool(self._cursors) or not self._unopened[name].is_busy
        return True

    def acquire_existing(
        self, topic_partitions: Collection[str], unread: Collection[str]
    ) -> dict[str, LedgerlakeError]:
        """Acquire the subscriptions that exist, and create none; wait for no other process. Return
        why the topic partitions that ``acquire`` leaves out cannot be opened.

        Raises:
            As ``acquire``.
        """
        refused: dict[str, LedgerlakeError] = {}
        existing: list[str] = []
        for name in topic_partitions:
            try:
                existing += self.existing([name])
            except LedgerlakeError as error:
                if name not in unread:
                    raise
                refused[name] = error
        if refused and len(refused) == len(topic_partitions):
            raise min(refused.items())[1]
        self.acquire(existing, from_earliest=True, busy_for_s=0.0, unread=unread)
        return refused | {name: unopened.error for name, unopened in self._unopened.items()}

    def existing(self, topic_partitions: Iterable[str]) -> list[str]:
        """Return the topic partitions that have the subscription, whoever holds it.

        Raises:
            TopicNotFoundError, BrokerError, TransportError: as for a reader.
        """
        return [
            name
            for name in topic_partitions
            if DurableCursor(self._cluster, name, self.subscription).exists()
        ]

    def positions(self, topic_partitions: Iterable[str] | None = None) -> Ends:
        """Return the mark-delete position of each cursor.

        Args:
            topic_partitions: the topic partitions whose cursors to return, if they exist; None for
                all.
        """
        names = (
            self._cursors
            if topic_partitions is None
            else self._cursors.keys() & set(topic_partitions)
        )
        return {name: position_of(self._cluster, self._cursors[name]) for name in names}

    def positions_now(self, topic_partitions: Collection[str]) -> Ends:
        """Return positions while the thread runs; without the cursors of deleted topics.

        Raises:
            OwnershipError: another process has taken over.
            LedgerlakeError: the broker cannot be asked.
        """
        positions: Ends = {}
        if not topic_partitions:
            return positions
        with self._at_broker:
            self._reopen()
            for name in topic_partitions:
                with contextlib.suppress(TopicNotFoundError):
                    positions |= self.positions([name])
        return positions

    def advance(self, ends: Ends) -> None:
        """Acknowledge everything up to some positions, at once; for the start of a new pipeline."""
        for name, position in ends.items():
            self._cursors[name].advance(position)

    def begin(self, topics: TopicSelection, on_lost: Callable[[OwnershipError], None]) -> None:
        """Acknowledge in the background from here on.

        Args:
            topics: those that the stream reads.
            on_lost: called once, in the background, if another process holds a subscription.

        Raises:
            OffsetError: a newer release wrote the positions to acknowledge, or they are damaged.
        """
        # A topic that has left the configuration may have no subscription any more.
        self._ends.load(self._cursors)
        self._topics = TopicList(self._cluster, topics)
        self._look_at_topics_s = time.monotonic() + _TOPICS_S
        self._news.set()
        self._thread = threading.Thread(
            target=self._loop, args=(on_lost,), name="ledgerlake-cursors", daemon=True
        )
        self._thread.start()

    @property
    def is_owner(self) -> bool:
        """Return whether this process owns the stream, as far as it knows without a request to the
        broker.
        """
        return self._lost is None and all(cursor.is_open for cursor in list(self._cursors.values()))

    def check_owner(self) -> None:
        """Check that this process owns the stream; reconnect first if the connection was lost.

        Raises:
            OwnershipError: another process has taken over.
            LedgerlakeError: the broker cannot be asked.
        """
        if self._lost is None and not self.is_owner:
            with self._at_broker:
                self._reopen()
        if self._lost is not None:
            raise self._lost

    def add(
        self, last_run: LastRun, ends: Ends, tables: dict[str, SeenBatch] | None = None
    ) -> None:
        """Record the ends of a micro-batch whose files are in the table, and the tables that have
        it.
        """
        self._ends.add(last_run, ends, tables or {})
        self._idle.clear()
        self._news.set()

    def finish(self, timeout_s: float) -> None:
        """Wait until the cursors have passed every committed micro-batch. They do not pass a
        micro-batch that will run again.
        """
        if self._thread is None or self._lost is not None:
            return
        self._idle.clear()
        self._ending.set()
        self._news.set()
        if not self._idle.wait(timeout_s):
            _log.warning(
                "the subscription %s could not be moved; the next start does it", self.subscription
            )

    def close(self) -> None:
        """Close the subscriptions; the cursors stay on the broker."""
        self._ending.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop_thread(thread)
        self._close_cursors()

    def _close_cursors(self) -> None:
        for cursor in list(self._cursors.values()):
            with contextlib.suppress(LedgerlakeError):
                cursor.close()

    def step(self) -> bool:
        """Reopen closed subscriptions, open subscriptions of new topic partitions, and acknowledge
        committed micro-batches. Return whether some are still pending.

        Raises:
            OwnershipError: another process has taken over.
            LedgerlakeError: the broker did not do it; call it again.
        """
        with self._at_broker:
            self._reopen()
            self._keep_new_topics()
            pending = self._ends.pending()
            committed = self._checkpoint.log.last_committed() if pending else None
            done = [
                (batch_id, ends)
                for batch_id, ends in pending
                if committed is not None and batch_id <= committed
            ]
            newest: Ends = {}
            for _, ends in done:
                newest |= ends
            self._left = self._acknowledge(newest)
            self._ends.remove(done, self._left)
            return len(done) < len(pending)

    def _acknowledge(self, ends: Ends) -> Ends:
        """Acknowledge ends. Return what a subscription that cannot be opened yet has not passed."""
        left: Ends = {}
        for name, position in ends.items():
            with contextlib.suppress(TopicNotFoundError):
                # A topic partition may have come while the query runs.
                if name in self._cursors or self._open_new(name):
                    self._cursors[name].advance(position)
                else:
                    left[name] = position
        return left

    def _reopen(self) -> None:
        for name, cursor in list(self._cursors.items()):
            if cursor.is_open:
                continue
            try:
                cursor.ensure(from_earliest=True)
            except TopicNotFoundError:
                # The planner decides about deleted topics; a topic that is created again has a new
                # cursor.
                del self._cursors[name]
            except ConsumerBusyError:
                self._lost = self._held_by_another(name)
                raise self._lost from None

    def _keep_new_topics(self) -> None:
        if self._topics is None or time.monotonic() < self._look_at_topics_s:
            return
        self._look_at_topics_s = time.monotonic() + _TOPICS_S
        with contextlib.suppress(TopicNotFoundError):
            if self._topics.is_due():
                self._topics.refresh(may_wait=False)
        for name in sorted(self._topics.names - self._cursors.keys()):
            with contextlib.suppress(TopicNotFoundError):
                self._open_new(name)

    def _open_new(self, name: str) -> bool:
        """Try to open the subscription of a new topic partition once: the other topic partitions do
        not wait for it. Return whether it is open.

        Raises:
            OwnershipError: another process keeps holding it.
            TopicNotFoundError: the topic is deleted.
        """
        before, now_s = self._unopened.pop(name, None), time.monotonic()
        if before is not None and now_s < before.again_s:
            self._unopened[name] = before
            return False
        cursor = DurableCursor(self._cluster, name, self.subscription)
        try:
            cursor.try_to_open(from_earliest=True)
        except TopicNotFoundError:
            raise
        except LedgerlakeError as error:
            is_busy = isinstance(error, ConsumerBusyError)
            if before is None or not is_busy or not before.is_busy:
                _log.warning(
                    "the subscription %s of %s cannot be opened yet: %s",
                    self.subscription,
                    name,
                    error,
                )
            since_s = before.since_s if before is not None and before.is_busy == is_busy else now_s
            # A process that has taken over holds all of them. Who may create a topic holds that
            # one.
            if (
                is_busy
                and now_s - since_s >= _HELD_FOR_S
                and not any(one.is_open for one in self._cursors.values())
            ):
                self._lost = self._held_by_another(name)
                raise self._lost from None
            # What no try can mend, such as a right that is missing, is tried less and less often.
            pause_s = (
                _TRY_AGAIN_S
                if is_busy
                else min(max(now_s - since_s, _TRY_AGAIN_S), _TRY_AGAIN_MOST_S)
            )
            self._unopened[name] = _Unopened(since_s, now_s + pause_s, error)
            return False
        self._cursors[name] = cursor
        return True

    def _held_by_another(self, name: str) -> OwnershipError:
        return OwnershipError(
            f"another process holds the subscription {self.subscription} of {name} and has taken "
            "over this stream; let only one process run it"
        )

    def _loop(self, on_lost: Callable[[OwnershipError], None]) -> None:
        try:
            self._work(on_lost)
        finally:
            if self._thread is None:
                # A subscription that was being opened while ``close`` did not wait any longer.
                self._close_cursors()

    def _work(self, on_lost: Callable[[OwnershipError], None]) -> None:
        pause_s = _POLL_S
        while True:
            self._news.clear()
            is_last = self._ending.is_set()
            try:
                more = self.step()
                pause_s = _POLL_S
            except OwnershipError as error:
                self._idle.set()
                on_lost(error)
                return
            except Exception as error:  # whatever it is, the topics must not grow without end
                _log.warning(
                    "the subscription %s cannot be moved (%s); trying again",
                    self.subscription,
                    error,
                )
                more, is_last = True, False
                pause_s = min(pause_s * 2, _RETRY_MOST_S)
            if is_last and not self._left:
                # Positions that are still pending belong to a micro-batch that will run again.
                self._idle.set()
            if self._thread is None:
                return
            self._news.wait(pause_s if more else _IDLE_POLL_S)

    def _stop_thread(self, thread: threading.Thread) -> None:
        self._news.set()
        if thread is not threading.current_thread():
            thread.join(timeout=_RETRY_MOST_S)
