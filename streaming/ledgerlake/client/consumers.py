"""Consumers of a session: functions that open them, take their entries, and close them.

Opening and closing are also available in two steps, request and wait, so that many consumers cost
one round trip to the broker.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from ledgerlake.client.channels import Consumer
from ledgerlake.errors import BrokerError, LedgerlakeError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.connection import EntriesReceived, EntryReceived, Received

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ledgerlake.client.session import Session

# The broker's error text if it cannot read the metadata of the last entry; there is no code for
# that.
_UNREADABLE_LAST = "Failed to get batch size for entry"


def cannot_read_last(error: BrokerError) -> bool:
    """Return whether a broker has refused to tell the last message because it cannot read that
    entry.
    """
    return error.code == "MetadataError" and _UNREADABLE_LAST in str(error)


def subscribe(session: Session, attempt: str, build: Callable[[int, int], bytes]) -> Consumer:
    """Open a consumer; ``build(consumer_id, request_id)`` returns the command.

    Raises:
        As ``Session.request``.
    """
    return subscribed(session, attempt, *start_subscribe(session, build))


def start_subscribe(session: Session, build: Callable[[int, int], bytes]) -> tuple[Consumer, int]:
    """Request a consumer without waiting; return the arguments of ``subscribed``.

    Raises:
        As ``Session.start``.
    """
    consumer = Consumer(session.next_id())
    session.channels.consumers[consumer.consumer_id] = consumer
    return consumer, session.start(lambda request_id: build(consumer.consumer_id, request_id))


def subscribed(session: Session, attempt: str, consumer: Consumer, request_id: int) -> Consumer:
    """Return a requested consumer after the broker has opened it.

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
    """Return the next entries of a consumer; None at the deadline (``time.monotonic``) or if it is
    closed.
    """
    session.wait_until(lambda: bool(consumer.entries) or consumer.closed, deadline)
    # Another thread that waits on the session may have dropped them meanwhile.
    with contextlib.suppress(IndexError):
        return consumer.entries.popleft()
    return None


def next_entry(session: Session, consumer: Consumer, deadline: float) -> EntryReceived | None:
    """Return the next entry of a consumer; None as ``next_received``."""
    received = next_received(session, consumer, deadline)
    if not isinstance(received, EntriesReceived):
        return received
    first, *others = received.each()
    consumer.entries.extendleft(reversed(others))
    return first


def close_consumer(session: Session, consumer: Consumer) -> None:
    """Close a consumer; entries that arrive later are dropped.

    If the broker fails to do it, it has lost the consumer already: the session is closed, and
    nothing is raised.
    """
    closed(session, start_close(session, [consumer]))


def start_close(session: Session, consumers: Iterable[Consumer]) -> list[int]:
    """Request to close consumers without waiting; return the request ids for ``closed``."""
    request_ids: list[int] = []
    to_close = []
    for consumer in consumers:
        is_known = session.channels.consumers.pop(consumer.consumer_id, None) is not None
        if is_known and not consumer.closed:
            consumer.closed = True
            to_close.append(consumer)
    if not to_close or session.is_over:
        return request_ids
    try:
        with session.together():
            for consumer in to_close:
                request_ids.append(
                    session.start(partial(commands.close_consumer, consumer.consumer_id))
                )
    except LedgerlakeError:
        session.close()
    return request_ids


def closed(session: Session, request_ids: Iterable[int]) -> None:
    """Wait until the broker has closed consumers."""
    try:
        for request_id in request_ids:
            session.answer(pb.CommandSuccess, "close a consumer", request_id)
    except LedgerlakeError:
        session.close()
