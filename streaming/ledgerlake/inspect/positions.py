"""Finds the position of a time, a message's number or an id in a topic, with its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.missing_topics import find_topic_partitions
from ledgerlake.client.topics import TopicSelection, full_name, split_partition
from ledgerlake.inspect.peek import described_entries
from ledgerlake.source.bounds import end_position, entry_from, matching_partitions, resolve_start
from ledgerlake.source.search import last_before
from ledgerlake.wire.message_id import BEFORE_ALL, MessageId, to_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.options.bounds import Bound

# How many entries are shown from the position on.
_SHOWN = 2


@dataclass(frozen=True)
class FoundPosition:
    """A position in one topic partition: the first message that a read from there gets.

    ``serialised`` is the id as hex, in the form of every Pulsar client. Both are None after the
    last message. The entries are rows as ``peek`` shows them; None if no entry is there. If the
    message is not the first one of its batch, the message before it is in the entry ``at`` too, and
    that entry shows the value of the message.
    """

    topic_partition: str
    message_id: str | None
    serialised: str | None
    before: dict[str, Any] | None
    at: dict[str, Any] | None
    after: dict[str, Any] | None
    is_inside_batch: bool


def find_places(settings: ClientSettings, topic: str, bound: Bound) -> Iterator[FoundPosition]:
    """Return the place of a bound in each partition of a topic.

    Raises:
        SetupError: the bound is a number, and the entries have none.
        BrokerError, TransportError, ProtocolError.
    """
    cluster = Cluster(settings)
    try:
        for name in matching_partitions(
            find_topic_partitions(cluster, TopicSelection((full_name(topic),))), bound
        ):
            yield _place(cluster, name, bound)
    finally:
        cluster.close()


def _place(cluster: Cluster, name: str, bound: Bound) -> FoundPosition:
    end = end_position(cluster, name)
    start = resolve_start(cluster, name, bound, is_bounded=True)
    before = None
    if end != BEFORE_ALL:
        previous = last_before(
            lambda position: entry_from(cluster, name, position, end), end, start.next_position
        )
        if previous is not None:
            before = next(described_entries(cluster, name, previous.position.before, end, 1), None)
    message = 0 if start.batch_index is None else start.batch_index + 1
    rows = list(described_entries(cluster, name, start.position, end, _SHOWN, message))
    at, after = [*rows, None, None][:_SHOWN]
    message_id = None if at is None else _first_message(at, message)
    return FoundPosition(
        name,
        None if message_id is None else str(message_id),
        None if message_id is None else to_bytes(message_id, split_partition(name)[1]).hex(),
        before,
        at,
        after,
        message > 0,
    )


def _first_message(entry: dict[str, Any], message: int) -> MessageId:
    batch_index = -1 if entry["num_messages_in_batch"] is None else message
    return MessageId(entry["ledger_id"], entry["entry_id"], batch_index)
