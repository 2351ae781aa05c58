"""Topics that a stream has read and that its configuration no longer selects.

Their durable subscriptions and the unread messages stay on the broker, until ``ledgerlake forget
CONFIG --topic NAME`` removes the subscriptions. The stream's offsets keep their positions, so a
topic that comes back to the configuration is read on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ledgerlake.client.topics import split_partition
from ledgerlake.errors import LedgerlakeError, SetupError, TopicNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ledgerlake.client.cluster import Cluster
    from ledgerlake.options.config import Config
    from ledgerlake.pipeline.checkpoint import Checkpoint

# How many topics a warning names.
_MOST_NAMED = 3

_log = logging.getLogger(__name__)


def known_topic_partitions(checkpoint: Checkpoint) -> set[str]:
    """Return the topic partitions that the stream has read, as far as its checkpoint says.

    Raises:
        OffsetError, CheckpointError: a newer release wrote it, or it is damaged.
    """
    planned = checkpoint.log.last_planned()
    return {
        *(checkpoint.start() or {}),
        *(checkpoint.log.offset(planned) if planned is not None else {}),
    }


def unread_topic_partitions(checkpoint: Checkpoint, names: Iterable[str]) -> set[str]:
    """Return the names that came since the stream began, and that it has not read: if the broker
    refuses one, a start leaves it out.

    Raises:
        As ``known_topic_partitions``.
    """
    return set() if checkpoint.start() is None else {*names} - known_topic_partitions(checkpoint)


def warn_of_left_topics(config: Config, cluster: Cluster, checkpoint: Checkpoint) -> None:
    """Say which topics have left the configuration and still have a subscription, and which have
    come back without the one that they had.

    Raises:
        OffsetError, CheckpointError, SetupError: as the checkpoint.
    """
    forgotten = checkpoint.forgotten_topics()
    back = {name for name in forgotten if config.source.topics.includes(name)}
    if back:
        _log.warning(
            "the subscription %s of %s was removed by ledgerlake forget, and the topic is read "
            "again from where the stream "
            "left it; what the broker has removed there since then is missing",
            config.subscription,
            _some(back),
        )
        checkpoint.save_forgotten_topics(forgotten - back)
    there = {
        topic
        for topic in left_topics(config, checkpoint)
        if _is_there(cluster, topic, if_unknown=True)
    }
    if there:
        _log.warning(
            "the stream %s no longer reads %s, and its subscription %s stays there, so that the "
            "broker keeps its unread entries; to remove it: ledgerlake forget CONFIG --topic %s",
            config.stream.name,
            _some(there),
            config.subscription,
            min(there),
        )


def check_topics(config: Config, cluster: Cluster, checkpoint: Checkpoint) -> None:
    """Check that the stream still reads one of the topics that it has read, if one of them is
    there.

    Raises:
        SetupError: it does not, so the configuration is probably a copy for another stream.
        OffsetError, CheckpointError: as the checkpoint.
    """
    known = known_topic_partitions(checkpoint)
    topics, known_topics = config.source.topics, {split_partition(name)[0] for name in known}
    if any(map(topics.includes, known)) or any(
        split_partition(name)[0] in known_topics for name in topics.names
    ):
        return
    there = {
        topic
        for topic in left_topics(config, checkpoint)
        if _is_there(cluster, topic, if_unknown=False)
    }
    if there:
        raise SetupError(
            f"the checkpoint {checkpoint.folder} is of a stream that reads {_some(there)}, and the "
            "configuration selects none of its topics; for another stream, set another [stream] "
            "name, checkpoint and table; to leave the unread entries there, run: "
            f"ledgerlake forget CONFIG --topic {min(there)}"
        )


def left_topics(config: Config, checkpoint: Checkpoint) -> set[str]:
    """Return the topics that the stream has read and that the configuration no longer selects,
    without those whose subscriptions the user has removed.

    Raises:
        OffsetError, CheckpointError, SetupError: as the checkpoint.
    """
    known = known_topic_partitions(checkpoint) - checkpoint.forgotten_topics()
    return {split_partition(name)[0] for name in known if not config.source.topics.includes(name)}


def _of_topic(names: set[str], topic: str) -> set[str]:
    return {name for name in names if split_partition(name)[0] == topic}


def is_gone(cluster: Cluster, checkpoint: Checkpoint, topic: str) -> bool:
    """Return whether a topic is deleted, or the user has told the stream to forget all that it has
    read of it.

    Raises:
        OffsetError, CheckpointError, SetupError: as the checkpoint.
    """
    forgotten = _of_topic(checkpoint.forgotten_topics(), topic)
    is_forgotten = forgotten and forgotten >= _of_topic(known_topic_partitions(checkpoint), topic)
    return bool(is_forgotten) or not _is_there(cluster, topic, if_unknown=True)


def _is_there(cluster: Cluster, topic: str, *, if_unknown: bool) -> bool:
    """Return whether a topic exists; ``if_unknown`` if the broker does not tell."""
    try:
        cluster.topic_partitions(topic)
    except TopicNotFoundError:
        return False
    except LedgerlakeError:
        return if_unknown
    return True


def _some(names: set[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(sorted(names)[:_MOST_NAMED]) + more
