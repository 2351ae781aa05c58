"""Consumers of a session: opening them, taking their entries, and ending them.

Opening and ending come in two steps as well, asking and waiting, so that many consumers cost one
round trip to the broker.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ledgerlake.client.channels import Consumer
from ledgerlake.errors import LedgerlakeError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.connection import EntriesReceived, EntryReceived, Received

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ledgerlake.client.session import Session


def subscribe(session: Session, attempt: str, build: Callable[[int, int], bytes]) -> Consumer:
    """Open a consumer; ``build(consumer_id, request_id)`` makes the command.

    Raises:
        As ``Session.request``.
    """
    return subscribed(session, attempt, *start_subscribe(session, build))


def start_subscribe(session: Session, build: Callable[[int, int], bytes]) -> tuple[Consumer, int]:
    """Ask for a consumer without waiting; returns what ``subscribed`` takes.

    Raises:
        As ``Session.start``.
    """
    consumer = Consumer(session.next_id())
    session.channels.consumers[consumer.consumer_id] = consumer
    return consumer, session.start(lambda request_id: build(consumer.consumer_id, request_id))


def subscribed(session: Session, attempt: str, consumer: Consumer, request_id: int) -> Consumer:
    """Return a consumer that was asked for, once the broker has opened it.

    Raises:
        As ``Session.request``.
    """
    try:
        session.answer(pb.CommandSuccess, attempt, request_id)
    except BaseException:
        session.channels.consumers.pop(consumer.consumer_id, None)
        raise
    return consumer


def grant(session: Session, consumer: Consumer, message_permits: int) -> None:
    """Let the broker send that many messages more."""
    session.send(commands.flow(consumer.consumer_id, message_permits))


def next_received(session: Session, consumer: Consumer, deadline: float) -> Received | None:
    """Return what comes next of a consumer, or None at the deadline (``time.monotonic``) or when
    the broker closed it.
    """
    session.wait_until(lambda: bool(consumer.entries) or consumer.closed, deadline)
    return consumer.entries.popleft() if consumer.entries else None


def next_entry(session: Session, consumer: Consumer, deadline: float) -> EntryReceived | None:
    """Return the next entry of a consumer; None as ``next_received``."""
    received = next_received(session, consumer, deadline)
    if not isinstance(received, EntriesReceived):
        return received
    first, *rest = received.each()
    consumer.entries.extendleft(reversed(rest))
    return first


def close_consumer(session: Session, consumer: Consumer) -> None:
    """End a consumer; entries still on their way are dropped on arrival.

    A broker that cannot even do that has lost the consumer already: the session is given up,
    nothing is raised.
    """
    closed(session, start_close(session, [consumer]))


def start_close(session: Session, consumers: Iterable[Consumer]) -> list[int]:
    """Ask the broker to end consumers without waiting; returns what ``closed`` takes."""
    asked = []
    for one in consumers:
        if session.channels.consumers.pop(one.consumer_id, None) is None or one.closed or session.is_over:
            continue
        one.closed = True
        try:
            asked.append(session.start(partial(commands.close_consumer, one.consumer_id)))
        except LedgerlakeError:
            session.close()
    return asked


def closed(session: Session, request_ids: Iterable[int]) -> None:
    """Wait until the broker has ended consumers."""
    try:
        for request_id in request_ids:
            session.answer(pb.CommandSuccess, "close a consumer", request_id)
    except LedgerlakeError:
        session.close()
