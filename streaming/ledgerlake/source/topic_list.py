"""The list of topics and partitions that a stream reads: the broker is asked at intervals, or when
it notifies of created or deleted topics (PIP-145).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ledgerlake.errors import TopicNotFoundError

if TYPE_CHECKING:
    from ledgerlake.client.channels import Watcher
    from ledgerlake.client.cluster import Cluster
    from ledgerlake.client.topics import TopicSelection

_REFRESH_S = 2.0

# The interval if the broker notifies of changes, in case that it fails to.
_REFRESH_WATCHED_S = 30.0


class TopicList:
    """The topic partitions of a selection; ``names`` has the broker's last answer. A partition
    that has been there stays as long as its topic has it: its reader notices if it is deleted.
    """

    def __init__(self, cluster: Cluster, topics: TopicSelection) -> None:
        self.names: set[str] = set()
        self._cluster = cluster
        self._topics = topics
        self._watcher: Watcher | None = None
        self._refreshed_s = float("-inf")

    def is_due(self) -> bool:
        """Return whether the names may have changed since the broker was last asked."""
        waited_s = time.monotonic() - self._refreshed_s
        if self._watcher is None or self._watcher.closed:
            return waited_s >= _REFRESH_S
        return self._watcher.changed or waited_s >= _REFRESH_WATCHED_S

    def expire(self) -> None:
        """Have the broker asked at the next opportunity."""
        self._refreshed_s = float("-inf")

    def refresh(self, may_wait: bool) -> None:
        """Ask the broker for the names.

        Args:
            may_wait: whether to wait for topics that do not exist yet.

        Raises:
            TopicNotFoundError: a topic that was named is missing; its names stay as they were.
        """
        if self._watcher is None or self._watcher.closed:
            self._watcher = self._cluster.watch(self._topics)
        if self._watcher is not None:
            self._watcher.changed = False
        try:
            self.names = set(self._cluster.all_partitions(self._topics, may_wait, self.names))
        except TopicNotFoundError:
            # The others may have more partitions by now.
            self.names |= self._cluster.existing_partitions(self._topics.names, self.names)
            self._refreshed_s = time.monotonic()
            raise
        self._refreshed_s = time.monotonic()
