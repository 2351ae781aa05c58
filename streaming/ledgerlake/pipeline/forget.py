"""Forgets a stream: removes its durable cursors from the broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.cursor import DurableCursor
from ledgerlake.pipeline.checkpoint import Checkpoint

if TYPE_CHECKING:
    from ledgerlake.options.config import Config


def forget(config: Config) -> list[str]:
    """Remove the pipeline's durable cursors from the broker, so that it can start from the
    beginning without a checkpoint.

    Returns:
        The topic partitions that had a cursor.

    Raises:
        CheckpointError: the checkpoint is still there; nothing was removed.
        BrokerError, TransportError, TopicNotFoundError: not all cursors are removed.
    """
    checkpoint = Checkpoint(config.checkpoint_place)
    checkpoint.check_gone()
    options = config.source
    cluster = Cluster(options.client)
    try:
        names = cluster.all_partitions(options.topics)
        for name in names:
            DurableCursor(cluster, name, config.subscription).forget()
    finally:
        cluster.close()
    checkpoint.forget()
    return names
