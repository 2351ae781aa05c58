"""The lag of a pipeline behind its topics, in messages and in time, by the broker's own numbers
(PIP-70).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ledgerlake.client.cluster import Cluster
from ledgerlake.monitor.progress import counted
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.source.bounds import EndBound, entry_from, latest_offset
from ledgerlake.source.latest_offset import entry_at
from ledgerlake.source.loss import ends_before, is_entry
from ledgerlake.stored.offsets import PartitionOffset, messages_between
from ledgerlake.wire.message_id import BEFORE_ALL

if TYPE_CHECKING:
    from ledgerlake.options.bounds import Bound
    from ledgerlake.options.config import Config
    from ledgerlake.wire.message_id import Position


@dataclass(frozen=True)
class Lag:
    """The messages of one topic partition that the table does not have yet, up to ``last``: the end
    of the topic, or that of the stream if it is earlier.

    ``messages`` is exact if the broker numbers messages, and counts every chunk of a large message,
    as the broker does; None if the broker does not number them. ``time_ms`` is how long the first
    of them has been in the topic; 0 if there are none. ``is_another_topic``: nothing of this topic
    was read, but of an earlier topic of its name (see ``source.loss``). ``has_ended``: the stream
    has read up to its ``ending``, and reads no more.
    """

    topic_partition: str
    taken: str
    last: str
    messages: int | None
    time_ms: int
    is_another_topic: bool = False
    has_ended: bool = False

    def sentence(self) -> str:
        if self.is_another_topic:
            return (
                f"{self.topic_partition}: the topic, which ends at {self.last}, does not have the "
                f"entry {self.taken}, up to which it was read: it is another topic of that name"
            )
        if self.has_ended:
            return f"{self.topic_partition}: the stream has reached its ending, {self.last}"
        count = (
            "an unknown number of messages"
            if self.messages is None
            else counted(self.messages, "message", "messages")
        )
        return (
            f"{self.topic_partition}: {count} and {self.time_ms / 1000:,.1f} s behind, at "
            f"{self.taken} of "
            f"{'a topic without messages' if self.last == str(BEFORE_ALL) else self.last}"
        )


def find_lags(config: Config) -> list[Lag]:
    """Return the lag of each topic partition behind the last committed batch.

    Raises:
        BrokerError, TransportError, ProtocolError: the topics cannot be read.
        SetupError: there is no checkpoint, or the ending is an index and the entries have none.
        UsageError: the ending cannot be found in a topic partition.
    """
    checkpoint = Checkpoint(config.checkpoint_place)
    start = checkpoint.existing_start()
    taken = checkpoint.log.committed_offset() or start
    cluster = Cluster(config.source.client)
    try:
        names = cluster.all_partitions(config.source.topics)
        # A topic partition that came later is read from its beginning.
        unread = PartitionOffset(BEFORE_ALL)
        return [
            _lag(cluster, name, taken.get(name, unread), config.source.ending_of(name))
            for name in names
        ]
    finally:
        cluster.close()


def _is_another_topic(cluster: Cluster, name: str, taken: PartitionOffset, end: Position) -> bool:
    if taken.time_ms is None or end < taken.position:
        return ends_before(taken, end)
    entry = entry_at(cluster, name, taken.position)
    return entry is not None and not is_entry(taken, entry.entry)


def _lag(cluster: Cluster, name: str, taken: PartitionOffset, bound: Bound) -> Lag:
    latest = latest_offset(cluster, name)
    if _is_another_topic(cluster, name, taken, latest.position):
        lag = _lag(cluster, name, PartitionOffset(BEFORE_ALL), bound)
        return replace(lag, taken=str(taken.position), is_another_topic=True)
    # The planner and the metrics count to the same end.
    ending = EndBound(cluster, name, bound)
    ending.remember(taken)
    end = ending.cap(latest)
    is_read = not end.is_beyond(taken)
    position = taken.next_position if taken.position != BEFORE_ALL else BEFORE_ALL
    last = end.last_position
    first = None if is_read or last == BEFORE_ALL else entry_from(cluster, name, position, last)
    if first is None:
        has_ended = is_read and ending.is_reached(latest)
        return Lag(name, str(taken.position), str(end), 0, 0, has_ended=has_ended)
    taken_messages = (
        0 if taken.batch_index is None or first.position != position else taken.batch_index + 1
    )
    messages = None
    if first.first_index is not None:
        messages = messages_between(first.first_index - 1 + taken_messages, end.index)
    age_ms = max(int(time.time() * 1000) - first.stamp.time_ms, 0)
    return Lag(name, str(taken.position), str(end), messages, age_ms)
