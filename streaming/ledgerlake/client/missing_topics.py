"""A hint at the topic that a user may have meant by the name of one that does not exist."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from ledgerlake.client.topics import split_partition
from ledgerlake.errors import LedgerlakeError, TopicNotFoundError

if TYPE_CHECKING:
    from ledgerlake.client.cluster import Cluster

_MOST = 3


def missing_topic_hint(cluster: Cluster, topic: str) -> str:
    """Return the end of a sentence that names topics of the same namespace with a similar name, or says
    that there are none; empty if the topic exists, or the broker does not tell.

    Args:
        topic: a full name.
    """
    namespace, _, local_name = topic.partition("://")[2].rpartition("/")
    try:
        cluster.topic_partitions(topic)
    except TopicNotFoundError:
        try:
            names = cluster.topics_of(namespace, is_persistent=topic.startswith("persistent://"))
        except LedgerlakeError:
            return ""
        by_local_name = {name.rpartition("/")[2]: name for name, _ in map(split_partition, names)}
        similar = [by_local_name[name] for name in get_close_matches(local_name, by_local_name, n=_MOST)]
        if similar:
            return f"; there is {', '.join(similar)}"
        return "" if names else f"; the namespace {namespace} has no topics, or does not exist"
    except LedgerlakeError:
        pass
    return ""
