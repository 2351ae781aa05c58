"""A durable cursor: the broker retains the entries after it, and shows how far the pipeline is.

It is an exclusive durable subscription per topic partition. It is created before the first read,
moved by cumulative acknowledgement when no entry before it is needed again, and removed by
``forget``.
"""

from __future__ import annotations

import contextlib
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ledgerlake.client.backoff import Backoff
from ledgerlake.client.consumers import (
    cannot_read_last,
    close_consumer,
    grant,
    next_entry,
    subscribe,
)
from ledgerlake.errors import BrokerError, ConsumerBusyError, LedgerlakeError, is_retryable
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.connection import LastMessageIdReceived
from ledgerlake.wire.lookup import refused
from ledgerlake.wire.message_id import BEFORE_ALL, Position, from_wire, start_after, to_wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.client.channels import Consumer
    from ledgerlake.client.cluster import Cluster
    from ledgerlake.client.session import Session

# The broker notices by its keep-alive that a consumer has disappeared: within two intervals of 30
# seconds.
BUSY_FOR_S = 75.0

# How long to wait for the first entry that a cursor has not passed.
_UNREAD_S = 10.0

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class DurableCursor:
    """The subscription ``name`` on one topic partition. While it is open, a second pipeline of that
    name cannot open it.
    """

    def __init__(self, cluster: Cluster, topic_partition: str, name: str) -> None:
        self.topic_partition = topic_partition
        self.name = name
        self._cluster = cluster
        self._open: tuple[Session, Consumer] | None = None
        self._reached = BEFORE_ALL
        # Whether the topic of the open consumer has had a position that was acknowledged.
        self._is_confirmed = False
        # The last entry that the broker sent to the open consumer.
        self._sent: Position | None = None

    def ensure(self, from_earliest: bool, busy_for_s: float | None = None) -> None:
        """Open it; create it if it does not exist. An existing cursor is not moved.

        Args:
            busy_for_s: how long to wait for a consumer that holds it; None for as long as that may
                be one of our own that has disappeared.

        Raises:
            ConsumerBusyError: another pipeline of this name holds it.
            TopicNotFoundError, BrokerError, TransportError: as for a reader.
        """
        self._retrying(lambda: self._opened(from_earliest), busy_for_s)

    def try_to_open(self, from_earliest: bool) -> None:
        """Open it, or create it, as ``ensure`` does, without another try.

        Raises:
            As ``ensure``.
        """
        self._opened(from_earliest)

    def make(self, from_earliest: bool) -> None:
        """Create it if it does not exist, and close it at once.

        Raises:
            ConsumerBusyError: it is held, and so exists.
            TopicNotFoundError, BrokerError, TransportError: as for a reader.
        """
        self.ensure(from_earliest, busy_for_s=0.0)
        self.close()

    def exists(self) -> bool:
        """Return whether the subscription exists, without creating it: the broker refuses a
        non-durable one of that name.

        Raises:
            TopicNotFoundError, BrokerError, TransportError: as for a reader.
        """
        return self._retrying(self._exists)

    def _exists(self) -> bool:
        session = self._cluster.session_for(self.topic_partition)
        try:
            consumer = subscribe(
                session,
                f"look for the subscription {self.name} on {self.topic_partition}",
                lambda consumer_id, request_id: commands.subscribe_reader(
                    self.topic_partition,
                    self.name,
                    consumer_id,
                    request_id,
                    start_after(BEFORE_ALL),
                    False,
                ),
            )
        except ConsumerBusyError:
            return True
        except BrokerError as error:
            if error.code == "NotAllowedError":
                return True
            raise
        close_consumer(session, consumer)
        return False

    @property
    def is_open(self) -> bool:
        """Return whether the consumer is open, as far as is known without a request to the
        broker.
        """
        if self._open is None:
            return False
        session, consumer = self._open
        return session.usable and not consumer.closed

    def advance(self, position: Position) -> None:
        """Acknowledge everything up to and including ``position``, if that is further than before.

        A position after the end of the topic is ignored: it belongs to an earlier topic of that
        name.
        """
        if (
            position.ledger_id < 0
            or position.entry_id < 0
            or (self._is_confirmed and position <= self._reached)
        ):
            return
        self._retrying(lambda: self._advance(position))

    def _advance(self, position: Position) -> None:
        opened = self._opened(True)
        if not self._is_confirmed:
            # A broker that cannot read its last entry does not return the cursor's position, but
            # acknowledging works. Any broker ignores a position after the end without an error.
            with contextlib.suppress(BrokerError):
                answer = self._ask(opened).answer
                self._reached = from_wire(answer.consumer_mark_delete_position).position
                if from_wire(answer.last_message_id).position < position:
                    return
                self._is_confirmed = True
        if position > self._reached:
            self._acknowledge(opened, position)
            self._reached = position

    def position(self) -> Position | None:
        """Return the mark-delete position; entry -1 if nothing is acknowledged.

        A broker that cannot read the topic's last entry does not tell it. Then it is the position
        before the first entry that the broker sends to the cursor; None if it sends none.
        """
        return self._retrying(self._mark_delete_position)

    def forget(self) -> bool:
        """Remove the subscription; the broker may then delete the entries that it retained. Return
        whether there was one.
        """
        if not self.exists():
            return False
        session, consumer = self._retrying(lambda: self._opened(True))
        session.request(
            pb.CommandSuccess,
            f"remove the subscription {self.name} of {self.topic_partition}",
            lambda request_id: commands.unsubscribe(consumer.consumer_id, request_id),
        )
        self._open = None
        return True

    def close(self) -> None:
        if self._open is not None:
            session, consumer = self._open
            self._open = None
            close_consumer(session, consumer)

    def _mark_delete_position(self) -> Position | None:
        opened = self._opened(True)
        try:
            return from_wire(self._ask(opened).answer.consumer_mark_delete_position).position
        except BrokerError as error:
            if not cannot_read_last(error):
                raise
        if self._sent is None or self._sent <= self._reached:
            session, consumer = opened
            grant(session, consumer, 1)
            entry = next_entry(session, consumer, time.monotonic() + _UNREAD_S)
            if entry is None:
                return None
            self._sent = entry.position
        return self._sent.before

    def _ask(self, opened: tuple[Session, Consumer]) -> LastMessageIdReceived:
        session, consumer = opened
        return session.request(
            LastMessageIdReceived,
            f"tell the position of the subscription {self.name} of {self.topic_partition}",
            partial(commands.get_last_message_id, consumer.consumer_id),
            consumer,
        )

    def _acknowledge(self, opened: tuple[Session, Consumer], position: Position) -> None:
        """Acknowledge, on the connection on which the topic was checked; on a new connection, it
        may be another topic of that name.
        """
        session, consumer = opened
        answer = session.request(
            pb.CommandAckResponse,
            f"move the subscription {self.name} of {self.topic_partition}",
            lambda request_id: commands.acknowledge_cumulative(
                consumer.consumer_id, request_id, to_wire(position)
            ),
            consumer,
        )
        if answer.HasField("error"):
            raise refused(f"move the subscription {self.name}", answer.error, answer.message)

    def _opened(self, from_earliest: bool) -> tuple[Session, Consumer]:
        if not self.is_open:
            session = self._cluster.session_for(self.topic_partition)
            consumer = subscribe(
                session,
                f"hold the subscription {self.name} on {self.topic_partition}",
                lambda consumer_id, request_id: commands.subscribe_durable(
                    self.topic_partition, self.name, consumer_id, request_id, from_earliest
                ),
            )
            self._open, self._sent, self._is_confirmed = (session, consumer), None, False
            if self._reached != BEFORE_ALL:
                self._acknowledge_again(self._open)
        assert self._open is not None
        return self._open

    def _acknowledge_again(self, opened: tuple[Session, Consumer]) -> None:
        """Repeat the last acknowledgement, which a broker that crashed may not have stored; but not
        on another topic of that name.
        """
        with contextlib.suppress(BrokerError):
            last = from_wire(self._ask(opened).answer.last_message_id).position
            if last >= self._reached:
                self._acknowledge(opened, self._reached)
            else:
                self._reached = BEFORE_ALL

    def _retrying(self, call: Callable[[], Result], busy_for_s: float | None = None) -> Result:
        """Call until it succeeds or a retry is pointless; if another consumer has the subscription,
        for ``busy_for_s``: by default as long as that may be one of our own that has disappeared.
        """
        busy_s = BUSY_FOR_S if busy_for_s is None else busy_for_s
        backoff = Backoff(give_up_after_s=self._cluster.settings.give_up_after_s)
        busy = Backoff(give_up_after_s=busy_s, most_s=1.0)
        is_told = busy_s == 0.0
        while True:
            try:
                return call()
            except LedgerlakeError as error:
                self.close()
                if isinstance(error, ConsumerBusyError) and not is_told:
                    # A person sees nothing else meanwhile.
                    _log.warning(
                        "another consumer holds the subscription %s of %s; waiting up to %.0f s "
                        "for its end",
                        self.name,
                        self.topic_partition,
                        busy_s,
                    )
                    is_told = True
                policy = busy if isinstance(error, ConsumerBusyError) else backoff
                can_retry = isinstance(error, ConsumerBusyError) or is_retryable(error)
                pause_s = policy.failed(time.monotonic(), error) if can_retry else None
                if pause_s is None:
                    raise
                time.sleep(pause_s)
