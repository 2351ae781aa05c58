"""Cancels delayed messages, by a message with the cancel (see ``schedules.cancels``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.missing_topics import find_topic_partitions
from ledgerlake.client.topics import TopicSelection, full_name
from ledgerlake.errors import UsageError
from ledgerlake.publish.each_partition import send_to_each
from ledgerlake.publish.effects import check_reads
from ledgerlake.publish.large_messages import LargeMessageProducer
from ledgerlake.schedules.cancels import parse_cancel
from ledgerlake.wire.message_id import BEFORE_ALL
from ledgerlake.wire.schedules import CANCEL_PROPERTY

if TYPE_CHECKING:
    from ledgerlake.options.config import Config

_TARGETS = {
    "id": "message id",
    "key": "key",
    "schedule": "id of a schedule; one has 1 to 200 characters",
}


def cancel(
    config: Config, by: Literal["id", "key", "schedule"], target: str, topic: str | None = None
) -> list[str]:
    """Cancel delayed messages. The cancel is sent to each topic partition, because a message's id
    does not name its topic partition, and any client may have sent a schedule.

    Args:
        topic: one of the configuration's topics; by default all of them.

    Raises:
        UsageError: the target is no message id, or no id of a schedule; or the configuration does
            not read the topic, or reads it up to an end that has passed.
        BrokerError, TransportError, TopicNotFoundError: some topic partitions did not store it, and
            the error names them; the others did. Sending it again is harmless.
    """
    value = f"{by}={target}"
    if parse_cancel(value, BEFORE_ALL, 0) is None:
        raise UsageError(f"'{target}' is no {_TARGETS[by]}")
    options = config.source
    cluster = Cluster(options.client)
    try:
        names = find_topic_partitions(cluster, options.topics)
        if topic is not None:
            selected = TopicSelection((full_name(topic),))
            names = list(filter(selected.includes, names))
        if topic is not None and not names:
            raise UsageError(
                f"the configuration reads no topic partition of {topic} that is there; correct "
                "the name"
            )
        for name in names:
            check_reads(config, name)
        send_to_each(names, lambda name: _send(cluster, name, value))
    finally:
        cluster.close()
    return names


def _send(cluster: Cluster, topic_partition: str, value: str) -> None:
    producer = LargeMessageProducer(cluster, topic_partition)
    producer.send(None, properties={CANCEL_PROPERTY: value})
    producer.close()
