"""Producers of a session: functions that open them, send entries, and take the broker's
receipts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ledgerlake.client.channels import Receipts
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.lookup import refused

if TYPE_CHECKING:
    from ledgerlake.client.session import Session


def open_producer(
    session: Session, topic_partition: str, name: str | None
) -> tuple[Receipts, pb.CommandProducerSuccess]:
    """Return a producer's receipts, and the broker's answer with its name and its last stored
    sequence id.

    Raises:
        As ``Session.request``.
    """
    receipts = Receipts(session.next_id())
    session.channels.producers[receipts.producer_id] = receipts
    try:
        answer = session.request(
            pb.CommandProducerSuccess,
            f"open a producer on {topic_partition}",
            lambda request_id: commands.producer(
                topic_partition, receipts.producer_id, request_id, name
            ),
        )
    except BaseException:
        session.channels.producers.pop(receipts.producer_id, None)
        raise
    return receipts, answer


def send_entry(
    session: Session,
    receipts: Receipts,
    sequence_id: int,
    message_count: int,
    entry: bytes,
    *,
    later: bool = False,
    **more: Any,
) -> None:
    """Send an entry, without waiting for its receipt.

    Args:
        later: see ``Session.send``.
        more: see ``commands.send``.
    """
    session.send(
        commands.send(receipts.producer_id, sequence_id, message_count, entry, **more), later=later
    )


def next_receipt(session: Session, receipts: Receipts, deadline: float) -> pb.MessageIdData | None:
    """Return the next stored entry's id; None at the deadline or if the broker closed the producer.

    Raises:
        BrokerError: the broker refused an entry.
    """
    session.wait_until(lambda: bool(receipts.arrived) or receipts.closed, deadline)
    if not receipts.arrived:
        return None
    answer = receipts.arrived.popleft()
    if isinstance(answer, pb.CommandSendError):
        raise refused("store an entry", answer.error, answer.message)
    return answer.message_id


def close_producer(session: Session, receipts: Receipts) -> None:
    """Close a producer.

    Raises:
        As ``Session.request``.
    """
    session.channels.producers.pop(receipts.producer_id, None)
    session.request(
        pb.CommandSuccess,
        "close a producer",
        lambda request_id: commands.close_producer(receipts.producer_id, request_id),
    )
