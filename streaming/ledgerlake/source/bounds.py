"""Resolves the start and the end of a read to positions: ids (PIP-107), and times and indexes of
the broker (PIP-70).

    starts                                 ends
    earliest  before the first entry       latest    the current last entry
    latest    after the last entry
    ID        its message is the first     ID        its message is the last
    after ID  the message after it         before ID the message before it
    TIME      first stored then or later   TIME      last stored before that
    index N   message number N             index N   message number N

So the end of a read by time is the start of the next one, if times rise (see ``search``), and a
read by index continues at N + 1.

An id with a partition is a start or an end of that topic partition only.

A topic may not have reached a time or an index yet. A stream that ends there goes on until it does
(``EndBound``). A stream that starts there is refused, since it would read earlier entries. A read
that also ends now has nothing to read.

A topic that has nothing to read yet begins where its first ledger does. So a removal of entries
before the first read is noticed (see ``loss``).

An entry whose stamp cannot be read counts with the next one whose stamp can, and by index an entry
without an index with the next one that has one: a producer can write what a broker gives no index.

A chunked message begins at its first chunk and ends at its last one. Times and indexes, and the
plain id of a chunk, name single entries: a read that starts there may get only the last chunks of a
message.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from ledgerlake.client.broker_clocks import BrokerClocks
from ledgerlake.client.cluster import Cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.client.topics import partition_name, split_partition
from ledgerlake.errors import CorruptEntryError, SetupError, TopicNotFoundError, UsageError
from ledgerlake.options.bounds import After, AtIndex, AtTime, Before
from ledgerlake.source.latest_offset import LatestOffset, describe, entry_at, offset_of
from ledgerlake.source.loss import NO_INDEX_YET
from ledgerlake.source.read_until import next_until
from ledgerlake.source.search import (
    StampedEntry,
    first_not_above,
    first_since,
    first_with_index,
    last_before,
)
from ledgerlake.source.topic_end import Arrivals, last_position, next_readable
from ledgerlake.stored.offsets import PartitionOffset, time_text
from ledgerlake.wire.entry import first_index, index_count, message_count, read_stamp
from ledgerlake.wire.limits import MAX_TIME_MS
from ledgerlake.wire.message_id import (
    AFTER_ALL,
    BEFORE_ALL,
    ChunkMessageId,
    MessageId,
    Position,
    partition_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator, Mapping, Sequence

    from ledgerlake.options.bounds import Bound
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.search import Probe
    from ledgerlake.wire.connection import EntryReceived
    from ledgerlake.wire.message_id import AnyMessageId

# How many entries without an index are read before a topic counts as one that has none.
_SKIPPED_MOST = 1024


@contextlib.contextmanager
def first_cluster(cluster: Cluster, options: SourceOptions) -> Iterator[Cluster]:
    """Yield the cluster by which starts are resolved: ``cluster``, unless a read begins with what
    compaction has left.
    """
    if not options.read_compacted:
        yield cluster
        return
    with contextlib.closing(Cluster(options.first_client)) as compacted:
        yield compacted


def resolve_start(
    cluster: Cluster,
    topic_partition: str,
    bound: Bound,
    *,
    is_pinned: bool = False,
    is_bounded: bool = False,
) -> PartitionOffset:
    """Return the position after which a read begins. If the cluster's settings read what compaction
    has left, the read begins with that.

    Args:
        is_pinned: whether a durable cursor of the reader keeps unread entries.
        is_bounded: whether the read ends at an end of the topic that is known already, so that
            nothing is read from a time or an index that the topic has not reached.

    Raises:
        SetupError: a start by index, and the entries have no index.
        UsageError: a start at a cursor, which only the reader that has the cursor can resolve. Or
            an id of another partition, of an entry that the topic does not have yet, or of a
            message that its entry does not have. Or a time or an index that the topic has not
            reached.
    """
    start = _resolve_start(cluster, topic_partition, bound, is_pinned, is_bounded)
    # Entries behind it may be left by compaction alone, and no cursor keeps these.
    return replace(start, was_gone=True) if cluster.settings.read_compacted else start


def _resolve_start(
    cluster: Cluster, topic_partition: str, bound: Bound, is_pinned: bool, is_bounded: bool
) -> PartitionOffset:
    _check_partition(topic_partition, bound)
    if isinstance(bound, PartitionOffset):
        return _if_gone(cluster, topic_partition, replace(bound, clock_ms=None))
    _check_is_there(cluster, topic_partition, bound, is_bounded=is_bounded)
    if isinstance(bound, (AtTime, AtIndex)):
        start = _resolve_entry_start(cluster, topic_partition, bound, is_bounded=is_bounded)
    else:
        start = _resolve_named_start(cluster, topic_partition, bound)
    if start.position != BEFORE_ALL:
        return start if _message_id(bound) is None else _if_gone(cluster, topic_partition, start)
    # Without a cursor, only the broker's index can tell later whether something was removed unread.
    return empty_start(cluster, topic_partition, None if is_pinned else NO_INDEX_YET)


def _if_gone(cluster: Cluster, topic_partition: str, start: PartitionOffset) -> PartitionOffset:
    """Return a start that a user named; it says so if the topic has lost it. A cursor that is
    created for this read does not keep entries from before its creation (see ``loss``).
    """
    if start.position.ledger_id < 0:
        return start
    first = first_available(cluster, topic_partition)
    return replace(start, was_gone=start.position.ledger_id < first.ledger_id)


def beginning(cluster: Cluster, topic_partition: str, empty_index: int | None) -> PartitionOffset:
    """Return where a topic partition begins now: before its first ledger, with the broker's index
    before its first message; ``BEFORE_ALL`` if it has no ledger.

    Args:
        empty_index: the index if it has no message yet; None if it is unknown.
    """
    first = entry_from(cluster, topic_partition, BEFORE_ALL, AFTER_ALL)
    if first is None:
        return empty_start(cluster, topic_partition, empty_index)
    return empty_start(cluster, topic_partition, _before_stamped(first).index)


def empty_start(cluster: Cluster, topic_partition: str, index: int | None) -> PartitionOffset:
    """Return where the read of a topic partition begins that has nothing to read yet;
    ``BEFORE_ALL`` if it has no ledger.

    Args:
        index: the broker's index before the first message that will come; None if it is unknown.
    """
    position = first_available(cluster, topic_partition)
    return (
        PartitionOffset(BEFORE_ALL)
        if position == BEFORE_ALL
        else PartitionOffset(position, index=index)
    )


def _resolve_entry_start(
    cluster: Cluster, topic_partition: str, bound: AtTime | AtIndex, *, is_bounded: bool
) -> PartitionOffset:
    # Entries behind the end that is found next are stored at this time or later.
    now_ms = None if is_bounded or isinstance(bound, AtIndex) else _now_ms(cluster, topic_partition)
    entry, end = find_entry(cluster, topic_partition, bound)
    if (
        entry is not None
        and isinstance(bound, AtIndex)
        and _is_removed(cluster, topic_partition, bound, entry, end)
    ):
        # As by id: the read begins before all that is left, and finds the loss.
        before = Position(first_available(cluster, topic_partition).ledger_id - 1, -1)
        return PartitionOffset(before, index=bound.index - 1, was_gone=True)
    if entry is not None:
        return _before_message(entry, bound)
    if isinstance(bound, AtIndex) and not is_bounded:
        next_index = _next_index(cluster, topic_partition, end)
        if bound.index > next_index:
            raise UsageError(
                f"{topic_partition} has no message with the number {bound.index} to start at: the "
                "next one that comes has "
                f"{next_index}; correct starting (startingOffsets, startingIndex)"
            )
    if isinstance(bound, AtTime) and now_ms is not None and bound.time_ms > now_ms:
        raise UsageError(
            f"{topic_partition} has no message of {time_text(min(bound.time_ms, MAX_TIME_MS))} to "
            "start at: by its broker's "
            f"clock it is {time_text(now_ms)}; correct starting (startingOffsets, startingTime)"
        )
    return _at_end(cluster, topic_partition, end)


def _is_removed(
    cluster: Cluster, topic_partition: str, bound: AtIndex, entry: StampedEntry, end: Position
) -> bool:
    """Return whether the topic no longer has a number: all of its entries have later ones.

    Args:
        entry: the first one with that number or a higher one.
    """
    if (
        entry.first_index is None
        or bound.index >= entry.first_index
        or cluster.settings.read_compacted
    ):
        return False
    first = entry_from(cluster, topic_partition, BEFORE_ALL, end)
    return first is not None and first.position == entry.position


def _at_end(cluster: Cluster, topic_partition: str, end: Position) -> PartitionOffset:
    """Return the start after the last entry that has a stamp, with that stamp. Entries behind it
    may have any time or index, so they are read.
    """
    offset = describe(cluster, topic_partition, end)
    if offset.time_ms is not None:
        return offset
    last = _last_stamped(cluster, topic_partition, end)
    if last is not None:
        return offset_of(last.position, last.stamp)
    return _resolve_named_start(cluster, topic_partition, "earliest")


def _last_stamped(cluster: Cluster, topic_partition: str, end: Position) -> StampedEntry | None:
    """Return the last entry up to the end of a topic that has a readable stamp; None if
    none has.
    """
    if end == BEFORE_ALL:
        return None
    return last_before(
        lambda position: entry_from(cluster, topic_partition, position, end), end, end.next
    )


def _now_ms(cluster: Cluster, topic_partition: str) -> int:
    """Return the time by the broker's clock; by this machine's, if the broker does not tell."""
    now_ms = BrokerClocks(cluster).now_ms(topic_partition, None)
    return int(time.time() * 1000) if now_ms is None else now_ms


def _next_index(cluster: Cluster, topic_partition: str, end: Position) -> int:
    """Return the broker's index of the first message behind the end of a topic; 0 if the topic has
    no message that shows it.
    """
    last = None if end == BEFORE_ALL else _last_with_index(cluster, topic_partition, end)
    return 0 if last is None or last.stamp.index is None else last.stamp.index + 1


def _resolve_named_start(cluster: Cluster, topic_partition: str, bound: Bound) -> PartitionOffset:
    if isinstance(bound, After):
        return _through(cluster, topic_partition, bound.message_id)
    if isinstance(bound, (MessageId, ChunkMessageId)):
        return _before(
            cluster, topic_partition, bound.first if isinstance(bound, ChunkMessageId) else bound
        )
    if bound == "cursor":
        raise UsageError("a start at the cursor is for streams with a subscription")
    if bound == "latest":
        return latest_offset(cluster, topic_partition)
    first = _first_entry(cluster, topic_partition)
    if first is None:
        return PartitionOffset(BEFORE_ALL)
    return _with_index_before(_before_entry(first.position), first_index(first.entry))


def resolve_end(cluster: Cluster, topic_partition: str, bound: Bound) -> PartitionOffset:
    """Return the end of a bounded read: the last entry, or the last message of a batch.

    Raises:
        SetupError: an end by index, and the entries have none.
        UsageError: an id of another partition, or of a message that its entry does not have.
    """
    _check_partition(topic_partition, bound)
    end = _resolve_named_end(cluster, topic_partition, bound) or latest_offset(
        cluster, topic_partition
    )
    if isinstance(bound, PartitionOffset) and end.is_beyond(
        latest_offset(cluster, topic_partition)
    ):
        # The offset was of another topic.
        return replace(end, time_ms=None)
    return end


class EndBound:
    """The end of a stream of one topic partition, which the topic may not have reached yet.

    Raises:
        UsageError: an id of another partition.
    """

    def __init__(self, cluster: Cluster, topic_partition: str, bound: Bound) -> None:
        _check_partition(topic_partition, bound)
        self._cluster = cluster
        self._topic_partition = topic_partition
        self._bound = bound
        self._end: PartitionOffset | None = None
        # The end of the topic for which the last search found nothing.
        self._searched_to = BEFORE_ALL

    def remember(self, taken: PartitionOffset) -> None:
        """Remember that a stream was read up to an offset. If the offset shows that it has the end,
        nothing more is read: what follows may be removed, so that a search would find a later one.
        """
        bound = self._bound
        if (
            isinstance(bound, AtIndex) and taken.index is not None and taken.index >= bound.index
        ) or (
            isinstance(bound, AtTime)
            and taken.ended_ms is not None
            and taken.ended_ms >= bound.time_ms
        ):
            self._end = taken

    def cap(self, latest: PartitionOffset) -> PartitionOffset:
        """Return the position up to which the stream may read, if the topic now ends at
        ``latest``.
        """
        end = self._resolved(latest)
        return end if end is not None and latest.is_beyond(end) else latest

    def is_reached(self, latest: PartitionOffset) -> bool:
        """Return whether the topic, which now ends at ``latest``, has the end, so that the stream
        reads nothing that comes later.
        """
        end = self._resolved(latest)
        return end is not None and not end.is_beyond(latest)

    def _resolved(self, latest: PartitionOffset) -> PartitionOffset | None:
        """Return where the end is; None as long as only messages that come later can tell."""
        if self._end is None and self._may_be_reached(latest):
            self._end = _resolve_named_end(
                self._cluster, self._topic_partition, self._bound, is_awaited=True
            )
            self._searched_to = latest.position
            if self._end is not None and isinstance(self._bound, AtTime):
                self._end = replace(self._end, ended_ms=self._bound.time_ms)
        return self._end

    def _may_be_reached(self, latest: PartitionOffset) -> bool:
        """Return whether the topic may have reached the end, so that a search for it makes
        sense.
        """
        if (
            self._bound == "latest"
            or latest.position.entry_id < 0
            or latest.position == self._searched_to
        ):
            return False
        message_id = _message_id(self._bound)
        if message_id is not None:
            return latest.position >= _last_of(message_id).position
        if isinstance(self._bound, AtTime) and latest.broker_ms is not None:
            return latest.broker_ms >= self._bound.time_ms
        if isinstance(self._bound, AtIndex) and latest.index is not None:
            return latest.index >= self._bound.index
        return True


def find_entry(
    cluster: Cluster, topic_partition: str, bound: AtTime | AtIndex, *, is_awaited: bool = False
) -> tuple[StampedEntry | None, Position]:
    """Return the entry of a time or an index, None if the topic has not reached it; and the end of
    the topic.

    Args:
        is_awaited: whether an index that the topic has not reached may still come, so that no
            indexes are refused before it does.

    Raises:
        SetupError: by index, and the entries have none.
        UsageError: by index, and the search has met indexes that begin again.
    """
    end = end_position(cluster, topic_partition)
    if end == BEFORE_ALL:
        return None, BEFORE_ALL

    def probe(position: Position) -> StampedEntry | None:
        return entry_from(cluster, topic_partition, position, end)

    if isinstance(bound, AtTime):
        return first_since(probe, end, bound.time_ms), end
    first = probe(BEFORE_ALL)
    if first is None:
        # No stamp can be read, so the entries may have any index.
        return None, end
    # Of a broker that began with indexes later, the entries before that are not all read.
    skipped_most = _SKIPPED_MOST if first.stamp.index is None else sys.maxsize
    last = _last_with_index(cluster, topic_partition, end, skipped_most)
    if last is None:
        raise SetupError(
            f"the entries of {topic_partition} have no index; set brokerEntryMetadataInterceptors "
            "and exposingBrokerEntryMetadataToClientEnabled in the broker's configuration, or give "
            "an id or a time"
        )
    assert last.stamp.index is not None
    until, last_index = last.position, last.stamp.index
    if is_awaited and bound.index > last_index:
        return None, end
    met = {until: last}

    def probe_index(position: Position) -> StampedEntry | None:
        entry = entry_from(cluster, topic_partition, position, until, skipped_most)
        if entry is not None:
            met[entry.position] = entry
        return entry

    # A number that the end has not reached is not searched for, but the numbers must rise up to it.
    entry = first_with_index(probe_index, until, min(bound.index, last_index))
    _check_rise(topic_partition, probe_index, [met[position] for position in sorted(met)])
    return entry if bound.index <= last_index else None, end


def _check_rise(topic_partition: str, probe: Probe, entries: Sequence[StampedEntry]) -> None:
    """Check that the indexes of entries do not begin again: a broker that was without its metadata
    for a while counts from 0, with another ledger, and several messages have one number. What a
    producer claims is no reason to refuse: an entry that claims no message, or less than none, has
    no higher index than the one before.
    """
    known = [(entry, entry.stamp.index) for entry in entries if entry.stamp.index is not None]
    for (earlier, high), (later, low) in pairwise(known):
        if low > high or earlier.position.ledger_id == later.position.ledger_id:
            continue
        begin = first_not_above(probe, earlier, later, high)
        if begin is not None and begin.first_index == NO_INDEX_YET + 1:
            raise UsageError(
                f"the numbers of {topic_partition} do not rise: {earlier.position} has {high}, and "
                f"{later.position} has {low}, since its broker began to count again, so a number "
                "may be that of several messages; give an id or a time"
            )


def _last_with_index(
    cluster: Cluster, topic_partition: str, end: Position, skipped_most: int = sys.maxsize
) -> StampedEntry | None:
    """Return the last entry up to ``end`` that has an index; None if none of about ``skipped_most``
    has one. It reads back in steps, since few entries at the end have none.
    """
    step = 1
    until = end
    while step <= skipped_most:
        begin = Position(until.ledger_id, max(until.entry_id - step + 1, 0))
        found = None
        with contextlib.closing(_entries_from(cluster, topic_partition, begin, until)) as entries:
            for entry in entries:
                with contextlib.suppress(CorruptEntryError):
                    stamp = read_stamp(entry.entry)
                    if stamp.index is not None:
                        found = StampedEntry(
                            entry.position, stamp, index_count(entry.entry), entry.position
                        )
        if found is not None:
            return found
        before = last_before(
            lambda position: entry_from(cluster, topic_partition, position, end), end, begin
        )
        if before is None:
            break
        until, step = before.position, step * 2
    return None


def entry_from(
    cluster: Cluster,
    topic_partition: str,
    position: Position,
    last: Position,
    skipped_most: int = 0,
) -> StampedEntry | None:
    """Return the first entry with a readable stamp at a position or after it, up to ``last``
    (``AFTER_ALL``: up to the end of the topic); None if no entry has one.

    Args:
        skipped_most: so many entries without an index are passed over, for one that has one.
    """
    begin = found = None
    with contextlib.closing(_entries_from(cluster, topic_partition, position, last)) as entries:
        for number, entry in enumerate(entries):
            begin = begin or entry.position
            with contextlib.suppress(CorruptEntryError):
                found = StampedEntry(
                    entry.position, read_stamp(entry.entry), index_count(entry.entry), begin
                )
                if found.stamp.index is not None or number >= skipped_most:
                    break
    return found


def _first_entry(cluster: Cluster, topic_partition: str) -> EntryReceived | None:
    """Return the first entry of a topic partition, whatever it holds; None for an empty topic."""
    with contextlib.closing(
        _entries_from(cluster, topic_partition, BEFORE_ALL, AFTER_ALL)
    ) as entries:
        return next(entries, None)


def _entries_from(
    cluster: Cluster, topic_partition: str, position: Position, last: Position
) -> Generator[EntryReceived, None, None]:
    """Yield the entries at a position and after it, as ``entry_from`` looks at them."""
    before = position if position == BEFORE_ALL else position.before
    reader = EntryReader(cluster, topic_partition, before, window=1)
    arrivals = Arrivals(reader)
    try:
        # Where the broker cannot read the last entry, it takes the whole topic to find the end.
        is_end_known = (
            last != AFTER_ALL or reader.read_compacted or reader.last_message() is not None
        )
        end = last if last != AFTER_ALL or not is_end_known else last_position(reader)
        while end is not None:
            entry = next_until(reader, end) if is_end_known else next_readable(reader)
            if entry is None:
                break
            yield entry
            if not is_end_known and arrivals.are_reached_by(reader):
                break
    finally:
        arrivals.close()
        reader.close()


def first_available(cluster: Cluster, topic_partition: str) -> Position:
    """Return the position before all entries that the topic still has, deliverable or not: the
    first ledger, before its first entry.
    """
    reader = EntryReader(cluster, topic_partition, BEFORE_ALL, window=1)
    try:
        begin = reader.mark_delete_position()
    finally:
        reader.close()
    if begin is not None:
        return begin
    first = _first_entry(cluster, topic_partition)
    return BEFORE_ALL if first is None else Position(first.position.ledger_id, -1)


def end_position(
    cluster: Cluster, topic_partition: str, known_end: Position = BEFORE_ALL
) -> Position:
    """Return the topic's last entry now; ``BEFORE_ALL`` for an empty topic. ``known_end``: see
    ``last_position``.
    """
    reader = EntryReader(cluster, topic_partition, AFTER_ALL)
    try:
        return last_position(reader, known_end) or BEFORE_ALL
    finally:
        reader.close()


def latest_offset(cluster: Cluster, topic_partition: str) -> PartitionOffset:
    """Return the current end of a topic partition, with the broker's time and index of its last
    entry.
    """
    latest = LatestOffset(cluster, topic_partition)
    try:
        offset = latest.get()
        if latest.is_gone:
            raise TopicNotFoundError(
                f"the topic {topic_partition} does not exist; create it or correct its name"
            )
        return offset
    finally:
        latest.close()


def matching_partitions(topic_partitions: Sequence[str], bound: Bound) -> Sequence[str]:
    """Return the topic partitions that a bound may belong to; all if it belongs to none, so that
    resolving it raises an error.
    """
    return [name for name in topic_partitions if _may_belong(name, bound)] or topic_partitions


def check_partitions(topic_partitions: Collection[str], by_topic: Mapping[str, Bound]) -> None:
    """Check that the topics that are read have the partitions with a bound of their own.

    Raises:
        UsageError: a topic does not have one.
    """
    for name, bound in by_topic.items():
        topic, number = split_partition(name)
        numbers = {
            split_partition(other)[1]
            for other in topic_partitions
            if split_partition(other)[0] == topic
        }
        # A partition between others may not be there yet, and one of an offset not any more.
        if numbers and number > max(numbers) and not isinstance(bound, PartitionOffset):
            there = (
                f"its last one is {max(numbers)}" if max(numbers) >= 0 else "it has no partitions"
            )
            raise UsageError(
                f"{topic} has no partition {number} to start or to end at: {there}; correct the "
                f"name {name}"
            )


def _check_partition(topic_partition: str, bound: Bound) -> None:
    if _may_belong(topic_partition, bound):
        return
    message_id = _message_id(bound)
    assert message_id is not None
    topic, number = split_partition(topic_partition)
    partition = partition_of(message_id)
    if number < 0:
        advice = ", which has no partitions; give an id of one of its messages"
    else:
        name = partition_name(topic, partition)
        advice = f'; give it by topic partition, as JSON such as {{"{name}": "..."}}'
    raise UsageError(
        f"the message id {message_id} is of partition {partition}, not of {topic_partition}{advice}"
    )


def _check_is_there(
    cluster: Cluster, topic_partition: str, bound: Bound, *, is_bounded: bool
) -> None:
    """Check that a start is not behind the end of the topic: all that comes before it would never
    be read. An id that names no partition may be meant for another one, in which a read that ends
    now finds nothing.
    """
    message_id = _message_id(bound)
    if message_id is None:
        return
    may_be_of_another = _may_be_of_another(topic_partition, message_id)
    first = message_id.first if isinstance(message_id, ChunkMessageId) else message_id
    if isinstance(bound, After):
        taken = _last_of(message_id).position
    else:
        taken = first.position if first.batch_index > 0 else first.position.before
    # A compacted topic may end before a message that a reader had got.
    last = _stored_end(cluster, topic_partition)
    if last == BEFORE_ALL:
        # All messages may have been removed.
        last = first_available(cluster, topic_partition)
        end = f"it has no message, and its first ledger is {last.ledger_id}"
    else:
        end = f"its last one is {last}"
    if taken > last and first.position.entry_id >= 0 and not (is_bounded and may_be_of_another):
        advice = f', or give it by topic partition, as JSON such as {{"{topic_partition}": "..."}}'
        raise UsageError(
            f"{topic_partition} has no entry {message_id} to start at: {end}; correct starting "
            "(startingOffsets)" + (advice if may_be_of_another else "")
        )


def _may_be_of_another(topic_partition: str, message_id: AnyMessageId) -> bool:
    """Return whether an id may be meant for another partition of the topic."""
    return split_partition(topic_partition)[1] >= 0 and partition_of(message_id) < 0


def _stored_end(cluster: Cluster, topic_partition: str) -> Position:
    """Return the topic's last entry, also if compaction has removed it; ``BEFORE_ALL`` for an empty
    topic.
    """
    reader = EntryReader(cluster, topic_partition, AFTER_ALL, read_compacted=False)
    try:
        return last_position(reader) or BEFORE_ALL
    finally:
        reader.close()


def _may_belong(topic_partition: str, bound: Bound) -> bool:
    """Return whether a bound may belong to a topic partition: it is not an id, or its id names that
    partition or none.
    """
    message_id = _message_id(bound)
    if message_id is None or partition_of(message_id) < 0:
        return True
    number = split_partition(topic_partition)[1]
    # The Go client numbers a topic without partitions as partition 0.
    return partition_of(message_id) == max(number, 0)


def _message_id(bound: Bound) -> AnyMessageId | None:
    bound = bound.message_id if isinstance(bound, (After, Before)) else bound
    return bound if isinstance(bound, (MessageId, ChunkMessageId)) else None


def _resolve_named_end(
    cluster: Cluster, topic_partition: str, bound: Bound, *, is_awaited: bool = False
) -> PartitionOffset | None:
    """Return the end that a bound names; None if that is the end of the topic."""
    if isinstance(bound, PartitionOffset):
        return replace(bound, clock_ms=None)
    if isinstance(bound, (AtTime, AtIndex)):
        entry, _ = find_entry(cluster, topic_partition, bound, is_awaited=is_awaited)
        if entry is None:
            return None
        return (
            _before_stamped(entry) if isinstance(bound, AtTime) else _through_message(entry, bound)
        )
    if isinstance(bound, Before):
        return _before(cluster, topic_partition, _last_of(bound.message_id))
    if isinstance(bound, (MessageId, ChunkMessageId)):
        return _through(cluster, topic_partition, bound)
    return PartitionOffset(BEFORE_ALL) if bound == "earliest" else None


def _before_stamped(entry: StampedEntry) -> PartitionOffset:
    return _with_index_before(_before_entry(entry.begin), entry.first_index)


def _with_index_before(offset: PartitionOffset, index: int | None) -> PartitionOffset:
    return replace(offset, index=None if index is None else index - 1)


def _before_message(entry: StampedEntry, bound: AtTime | AtIndex) -> PartitionOffset:
    first = entry.first_index
    if isinstance(bound, AtTime) or first is None or bound.index <= first:
        return _before_stamped(entry)
    return _inside(entry, bound.index - first - 1, bound.index - 1)


def _through_message(entry: StampedEntry, bound: AtIndex) -> PartitionOffset:
    first, last_index = entry.first_index, entry.stamp.index
    if first is None or bound.index < first:
        # The entry with that index is gone or has no message.
        return _before_stamped(entry)
    if bound.index == last_index:
        return offset_of(entry.position, entry.stamp)
    return _inside(entry, bound.index - first, bound.index)


def _inside(entry: StampedEntry, batch_index: int, index: int) -> PartitionOffset:
    return PartitionOffset(entry.position.before, batch_index, None, index)


def _before(cluster: Cluster, topic_partition: str, message_id: MessageId) -> PartitionOffset:
    if message_id.batch_index > 0:
        return _in_batch(cluster, topic_partition, message_id, message_id.batch_index - 1)
    return describe(cluster, topic_partition, message_id.position.before)


def _through(cluster: Cluster, topic_partition: str, message_id: AnyMessageId) -> PartitionOffset:
    last = _last_of(message_id)
    if last.batch_index < 0:
        return describe(cluster, topic_partition, last.position)
    return _in_batch(cluster, topic_partition, last, last.batch_index)


def _in_batch(
    cluster: Cluster, topic_partition: str, message_id: MessageId, taken: int
) -> PartitionOffset:
    """Return the offset up to message ``taken`` of the entry of an id, with the broker's index of
    that message.

    Raises:
        UsageError: the entry does not have the message of the id. So an index beyond its messages
            neither skips nor takes them all.
    """
    offset = PartitionOffset(message_id.position.before, taken)
    if cluster.settings.has_own_format:
        # Only the user's function knows which messages the entry has.
        return offset
    entry = entry_at(cluster, topic_partition, message_id.position)
    if entry is None:
        return offset
    count = message_count(entry.entry)
    if message_id.batch_index >= count:
        raise UsageError(
            f"{topic_partition} has no message {message_id.batch_index} in the entry "
            f"{message_id.position}: it has {count}, counted from 0; the third number is no "
            f"partition; write {message_id.position}"
        )
    first = first_index(entry.entry)
    # A batch of a transaction has one index.
    if first is None or index_count(entry.entry) != count:
        return offset
    return replace(offset, index=first + taken)


def _last_of(message_id: AnyMessageId) -> MessageId:
    """Return the id of the last entry that an id names."""
    return message_id.last if isinstance(message_id, ChunkMessageId) else message_id


def _before_entry(position: Position) -> PartitionOffset:
    return PartitionOffset(position.before)
