"""Finds the topic partitions of names that a user wrote. If a topic does not exist, the error names
those that may have been meant.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING

from ledgerlake.client.topics import split_partition
from ledgerlake.errors import LedgerlakeError, TopicNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ledgerlake.client.cluster import Cluster
    from ledgerlake.client.topics import TopicSelection

_MOST = 3

# So many missing topics are named.
_MOST_NAMED = 5


def find_topic_partitions(cluster: Cluster, selection: TopicSelection) -> list[str]:
    """Return the topic partitions to read.

    Raises:
        As ``Cluster.all_partitions``.
    """
    try:
        return cluster.all_partitions(selection)
    except TopicNotFoundError as error:
        raise with_similar(error, cluster, selection.names) from None


def with_similar(
    error: TopicNotFoundError, cluster: Cluster, topics: Iterable[str]
) -> TopicNotFoundError:
    """Return the error, which names the first missing topic, with some other missing ones, and
    with the names of existing topics that are similar to each.

    Args:
        topics: full names.
    """
    topics_of = cache(cluster.topics_of)
    missing = _missing(cluster, topics)
    named = missing[:_MOST_NAMED]
    hints = [_hint(topic, topics_of) for topic in named]
    also = (
        f"; {topic} does not exist either{hint}"
        for topic, hint in zip(named[1:], hints[1:], strict=True)
    )
    more = f"; {len(missing):,} topics do not exist in all" if named != missing else ""
    return TopicNotFoundError(error.message + "".join(hints[:1]) + "".join(also) + more)


def _missing(cluster: Cluster, topics: Iterable[str]) -> list[str]:
    """Return the topics that the broker says are missing, up to the first that it does not tell of:
    each such one may take as long as all tries.
    """
    missing: list[str] = []
    for topic in topics:
        try:
            cluster.topic_partitions(topic)
        except TopicNotFoundError:
            missing.append(topic)
        except LedgerlakeError:
            break
    return missing


def _hint(topic: str, topics_of: Callable[[str], list[str]]) -> str:
    """Return the end of a sentence that names topics of the same namespace with a similar name, or
    says that there are none; empty if the broker does not tell.

    Args:
        topic: a full name.
    """
    namespace, _, local_name = topic.partition("://")[2].rpartition("/")
    try:
        names = topics_of(namespace)
    except LedgerlakeError:
        return ""
    by_local_name = {name.rpartition("/")[2]: name for name, _ in map(split_partition, names)}
    similar = [
        by_local_name[name] for name in get_close_matches(local_name, by_local_name, n=_MOST)
    ]
    if similar:
        return f"; there is {', '.join(similar)}"
    return "" if names else f"; the namespace {namespace} has no topics, or does not exist"
