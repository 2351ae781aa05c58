"""A durable cursor: it pins what was not read yet, and shows the broker how far the pipeline is.

One exclusive durable subscription per topic partition. It is made before the first read, moved by cumulative
acknowledgement when nothing before can be asked for again, and removed by ``forget``.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ledgerlake.client.backoff import Backoff
from ledgerlake.errors import ConsumerBusyError, LedgerlakeError, is_retryable
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.connection import LastMessageIdReceived
from ledgerlake.wire.lookup import refused
from ledgerlake.wire.message_id import BEFORE_ALL, Position, from_wire, to_wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.client.cluster import Cluster
    from ledgerlake.client.session import Consumer, Session

# Of a consumer that is gone without a word, the broker learns by its keep-alive: within two intervals of 30 seconds.
_BUSY_FOR_S = 75.0

Result = TypeVar("Result")


class DurableCursor:
    """The subscription ``name`` on one topic partition. Holding it open keeps a second pipeline of that name out."""

    def __init__(self, cluster: Cluster, topic_partition: str, name: str) -> None:
        self.topic_partition = topic_partition
        self.name = name
        self._cluster = cluster
        self._open: tuple[Session, Consumer] | None = None
        self._reached = BEFORE_ALL

    def ensure(self, from_earliest: bool) -> None:
        """Create it where it does not exist yet; an existing one stays where it is.

        Raises:
            ConsumerBusyError: another pipeline of this name holds it.
            TopicNotFoundError, BrokerError, TransportError: as for a reader.
        """
        self._retrying(lambda: self._opened(from_earliest))

    def make(self, from_earliest: bool) -> None:
        """Create it if it does not exist yet, and let go of it at once.

        Raises:
            ConsumerBusyError: it is held, and so exists.
            TopicNotFoundError, BrokerError, TransportError: as for a reader.
        """
        self._opened(from_earliest)
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether the broker has this consumer, as far as that can be known without asking it."""
        if self._open is None:
            return False
        session, consumer = self._open
        return session.usable and not consumer.closed

    def advance(self, position: Position) -> None:
        """Acknowledge everything up to and including ``position``, where that is further than before."""
        if position.ledger_id < 0 or position.entry_id < 0 or position <= self._reached:
            return
        if not self.is_open:
            self.ensure(from_earliest=True)
        if self._reached == BEFORE_ALL:
            # A broker that cannot read its last entry does not say where the cursor stands; it acknowledges all the same.
            with contextlib.suppress(LedgerlakeError):
                self._reached = self._mark_delete_position()
                if not self._has(position):
                    return
        if position <= self._reached:
            return
        self._retrying(lambda: self._acknowledge(position))
        self._reached = position

    def position(self) -> Position:
        """The last entry that counts as taken, with everything before it; entry -1 where nothing was yet."""
        return self._retrying(self._mark_delete_position)

    def forget(self) -> None:
        """Remove the subscription; what it pinned may now be deleted by the broker."""
        session, consumer = self._retrying(lambda: self._opened(True))
        session.request(
            pb.CommandSuccess,
            f"remove the subscription {self.name} of {self.topic_partition}",
            lambda request_id: commands.unsubscribe(consumer.consumer_id, request_id),
        )
        self._open = None

    def close(self) -> None:
        if self._open is not None:
            session, consumer = self._open
            self._open = None
            session.close_consumer(consumer)

    def _mark_delete_position(self) -> Position:
        return from_wire(self._ask().answer.consumer_mark_delete_position).position

    def _has(self, position: Position) -> bool:
        """Whether the topic reaches as far; not if nothing is left of it, or if it is another one of that name."""
        return from_wire(self._ask().answer.last_message_id).ledger_id >= position.ledger_id

    def _ask(self) -> LastMessageIdReceived:
        session, consumer = self._opened(True)
        return session.request(
            LastMessageIdReceived,
            f"tell where the subscription {self.name} of {self.topic_partition} stands",
            partial(commands.get_last_message_id, consumer.consumer_id),
        )

    def _acknowledge(self, position: Position) -> None:
        session, consumer = self._opened(True)
        answer = session.request(
            pb.CommandAckResponse,
            f"move the subscription {self.name} of {self.topic_partition}",
            lambda request_id: commands.acknowledge_cumulative(consumer.consumer_id, request_id, to_wire(position)),
        )
        if answer.HasField("error"):
            raise refused(f"move the subscription {self.name}", answer.error, answer.message)

    def _opened(self, from_earliest: bool) -> tuple[Session, Consumer]:
        if not self.is_open:
            session = self._cluster.session_for(self.topic_partition)
            consumer = session.subscribe(
                f"hold the subscription {self.name} on {self.topic_partition}",
                lambda consumer_id, request_id: commands.subscribe_durable(
                    self.topic_partition, self.name, consumer_id, request_id, from_earliest
                ),
            )
            self._open = session, consumer
            if self._reached != BEFORE_ALL:
                # A broker that died forgets acknowledgements that it had not stored yet.
                with contextlib.suppress(LedgerlakeError):
                    if self._has(self._reached):
                        self._acknowledge(self._reached)
                    else:
                        self._reached = BEFORE_ALL
        assert self._open is not None
        return self._open

    def _retrying(self, call: Callable[[], Result]) -> Result:
        patience_s = min(_BUSY_FOR_S, self._cluster.settings.give_up_after_s)
        backoff = Backoff(give_up_after_s=self._cluster.settings.give_up_after_s)
        busy = Backoff(give_up_after_s=patience_s, most_s=1.0)
        while True:
            try:
                return call()
            except LedgerlakeError as error:
                self.close()
                policy = busy if isinstance(error, ConsumerBusyError) else backoff
                worth_it = isinstance(error, ConsumerBusyError) or is_retryable(error)
                pause_s = policy.failed(time.monotonic()) if worth_it else None
                if pause_s is None:
                    raise
                time.sleep(pause_s)
