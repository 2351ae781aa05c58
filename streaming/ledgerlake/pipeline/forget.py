"""Removes durable cursors from the broker: all cursors of a stream that starts from the beginning,
or the cursors of a topic that the stream no longer reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.cursor import DurableCursor
from ledgerlake.client.missing_topics import find_topic_partitions
from ledgerlake.client.topics import TopicSelection, full_name, split_partition
from ledgerlake.decode import schema
from ledgerlake.errors import CheckpointError, UsageError
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.known_tables import known_tables
from ledgerlake.pipeline.left_topics import known_topic_partitions
from ledgerlake.table.delta_table import Table
from ledgerlake.table.open_table import existing_table

if TYPE_CHECKING:
    from ledgerlake.options.config import Config
    from ledgerlake.stored.places import Place


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
        names = find_topic_partitions(cluster, options.topics)
        had_cursor = [
            name for name in names if DurableCursor(cluster, name, config.subscription).forget()
        ]
    finally:
        cluster.close()
    checkpoint.forget()
    return had_cursor


def tables_with_rows(config: Config) -> list[Place]:
    """Return the places of the tables that have micro-batches of the stream: a new beginning adds
    their rows again.

    Raises:
        TableError: a table cannot be opened.
    """
    tables = [Table(table.place, table.schema or schema.MESSAGES) for table in known_tables(config)]
    existing = [table for table in tables if existing_table(table.path) is not None]
    last_batches = {table.path: table.last_batch_of(config.stream.name) for table in existing}
    return [
        path
        for path, last_batch in last_batches.items()
        if last_batch is not None and last_batch >= 0
    ]


def forget_topic(config: Config, topic: str) -> list[str]:
    """Remove the pipeline's durable cursors from one topic, or one topic partition.

    Returns:
        The topic partitions that had a cursor.

    Raises:
        CheckpointError: the configuration still selects the topic; nothing was removed.
        UsageError: the topic's name is none, or the stream has not read it.
        BrokerError, TransportError, TopicNotFoundError: not all cursors are removed.
    """
    checkpoint = Checkpoint(config.checkpoint_place)
    has_checkpoint = checkpoint.start() is not None
    cluster = Cluster(config.source.client)
    try:
        names = cluster.all_partitions(TopicSelection((full_name(topic),)), may_wait=False)
        _check_left(config, full_name(topic), names, has_checkpoint)
        known = _known(config, checkpoint, full_name(topic), names) if has_checkpoint else set()
        had_cursor = [
            name for name in names if DurableCursor(cluster, name, config.subscription).forget()
        ]
    finally:
        cluster.close()
    if has_checkpoint:
        checkpoint.save_forgotten_topics(checkpoint.forgotten_topics() | known | set(names))
    return had_cursor


def _check_left(config: Config, topic: str, names: list[str], has_checkpoint: bool) -> None:
    if any(config.source.topics.includes(name) for name in names):
        name, advice = config.stream.name, "take the topic out of the configuration first"
        raise CheckpointError(
            f"the stream {name} still reads {topic}, and would go on without what the topic "
            f"removes when its subscription goes; {advice}"
            if has_checkpoint
            else f"the stream {name} has no checkpoint, and reads {topic} when it starts again; "
            f"forget all its topics, or {advice}"
        )


def _known(config: Config, checkpoint: Checkpoint, topic: str, names: list[str]) -> set[str]:
    """Return the topic partitions of a topic that the stream has read. The topic may have been
    created again with other partitions.
    """
    known = {
        name
        for name in known_topic_partitions(checkpoint)
        if name in names or split_partition(name)[0] == topic
    }
    if not known:
        raise UsageError(
            f"the stream {config.stream.name} has not read {topic}, by the checkpoint "
            f"{checkpoint.folder}; correct the name"
        )
    return known
