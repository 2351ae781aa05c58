"""Where the next micro-batch of a stream ends: planned in the driver's planner process.

Rules kept here:
  - A batch depends only on (start, end). The planner's memory only saves requests to the broker.
  - With ``Trigger.AvailableNow`` the end is fixed once, and the limits still hold. A stream with an
    end never reads past it.
  - If a topic partition's wake-up time has passed, a batch is planned also without new entries
    (``wakeup_files``). The clock of a batch is the broker's time of its entries. If the broker
    gives none, or there are no entries, it is the broker's time as the planner knows it
    (``client.broker_clocks``), in the offset: when the broker was asked for an end that the batch
    reaches. So no entry that was stored before that time is still unread. A batch that reaches no
    such end has the clock of the one before. If the last entry is older than a message that is due,
    the planner waits for a later one for a moment; if none comes, the topic partition is quiet, and
    the planner's time counts.
  - A batch of fewer messages than the minimum may be deferred (``admission``), unless messages are
    due.
  - The planner of a pipeline keeps the times of the trigger itself, and does not wait for them if
    messages are due (``trigger_times``).
  - A topic partition that comes later is read from its beginning. While it is empty, the offset has
    the position of that, so that a removal before its first read is noticed. If it has messages, a
    batch that another one follows at once only notes the position too: that of a pipeline, and one
    of ``Trigger.AvailableNow``.
  - With ``read_compacted``, the first batch of a topic partition has all that compaction has left,
    and later ones are read as published. So no compaction removes a deletion before it is read.
  - Into how many parts a range is cut depends on the sizes of entries and on how many tasks can
    run, so the offset has it: a batch that is run again is cut in the same places.
  - A position that did not move keeps its JSON unchanged, because Spark takes a changed offset for
    new data.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ledgerlake.client.broker_clocks import BrokerClocks
from ledgerlake.client.cluster import Cluster
from ledgerlake.client.missing_topics import with_similar
from ledgerlake.errors import (
    BrokerError,
    DataLossError,
    LedgerlakeError,
    TopicNotFoundError,
    is_retryable,
)
from ledgerlake.source.admission import BatchAdmission
from ledgerlake.source.batch_limits import READ_AHEAD_BYTES, BacklogCounts, LimitPlanner
from ledgerlake.source.bounds import (
    EndBound,
    beginning,
    check_partitions,
    first_cluster,
    resolve_start,
)
from ledgerlake.source.latest_offset import LatestOffset, entries_at, refresh_all
from ledgerlake.source.loss import LOST_TOPIC_S, NO_INDEX_YET, ends_before, is_entry
from ledgerlake.source.planning import parts_for, parts_of_long, ranges, share
from ledgerlake.source.source_cursors import SourceCursors
from ledgerlake.source.topic_list import TopicList
from ledgerlake.source.trigger_times import TriggerTimes
from ledgerlake.source.wakeup_files import load_times_ms
from ledgerlake.stored.offsets import Offset, PartitionOffset
from ledgerlake.wire.message_id import BEFORE_ALL

if TYPE_CHECKING:
    from collections.abc import Collection

    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.wire.message_id import Position

# The pause before a broker that seems to have another topic is asked again.
_ASK_AGAIN_S = 1.0

# The longest wait for a trigger in one call: Spark ends a query between two calls.
_MOST_WAIT_MS = 1000

# How often, and after which pause, the end of a topic partition is asked for again whose last entry
# is older than a message that is due.
_LATER_TRIES = 5
_LATER_PAUSE_S = 0.01

# How often a batch of an idle topic is planned if no wake-up times are known.
_TICK_MS = 1000

# What an entry lacks and what follows, by whether it has the broker's time, and an index.
_MISSING_METADATA = {
    (False, False): ("entry metadata", "broker columns are null, order is by publish time"),
    (False, True): ("timestamp", "broker_timestamp is null, order is by publish time"),
    (True, False): ("index", "broker_index is null, and the lag in messages is not known"),
}

_log = logging.getLogger(__name__)


def _clock_ms() -> int:
    return int(time.time() * 1000)


class Planner:
    """The connections of the planner process, and its memory of the topics."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._cluster = Cluster(options.client)
        self._topics = TopicList(self._cluster, options.topics)
        self._latest: dict[str, LatestOffset] = {}
        self._end_bounds: dict[str, EndBound] = {}
        self._limit_planners: dict[str, LimitPlanner] = {}
        # Of topic partitions without entries.
        self._beginnings: dict[str, PartitionOffset] = {}
        self._has_noted_unread = False
        self._cursors = SourceCursors(self._cluster, options)
        self._fixed_end: Offset | None = None
        self._fixed_clocks_ms: dict[str, int] = {}
        # Of topic partitions without a time by the broker: an end that is not reached yet, and when
        # the broker was asked for it.
        self._aims: dict[str, tuple[PartitionOffset, int]] = {}
        self._clocks = BrokerClocks(self._cluster)
        self._trigger = None if options.trigger_ms is None else TriggerTimes(options.trigger_ms)
        self._awaited_ms: dict[str, int] | None = None
        self._woken_ms: dict[str, int] = {}
        self._answered: Offset = {}
        self._admission: BatchAdmission | None = None
        if options.min_rows_per_trigger:
            self._admission = BatchAdmission(
                options.min_rows_per_trigger, options.max_trigger_delay_ms
            )
            self._backlog = BacklogCounts(self._cluster, options.min_rows_per_trigger)
        self._warned = False
        self._missing = ""
        # Those that were read; others may be left out.
        self._read: set[str] = set()
        # Those that were never read and that the broker refuses.
        self._refused: dict[str, LedgerlakeError] = {}
        self._came_later: set[str] = set()
        self._has_begun = False
        try:
            self._refresh_topics()
        except LedgerlakeError:
            self.close()
            raise
        self._has_begun = True

    def initial(self) -> Offset:
        """Return where the query begins: a pipeline at its recorded start, whatever came, left the
        configuration or was deleted since.
        """
        for _, by_topic in (self._options.starts, self._options.ends):
            check_partitions(self._topics.names, by_topic)
        names = self._options.starting_by_topic if self._options.pinned_by else self._topics.names
        self._read |= set(names)
        for name in self._refused.keys() & self._read:
            raise self._refused[name]
        with first_cluster(self._cluster, self._options) as cluster:
            return {name: self._start_of(cluster, name) for name in sorted(names)}

    def _start_of(self, first: Cluster, name: str) -> PartitionOffset:
        bound = self._options.starting_of(name, "latest")
        if self._options.pinned_by and isinstance(bound, PartitionOffset):
            # The pipeline resolved it at its first start; its cursor has kept what follows.
            return replace(bound, clock_ms=None)
        position = self._cursors.position(name) if bound == "cursor" else None
        if position is not None:
            return PartitionOffset(position)
        if bound == "latest":
            return resolve_start(self._cluster, name, bound)
        return resolve_start(first, name, bound, is_pinned=self._cursors.is_pinned)

    def _refresh_topics(self) -> None:
        """Ask for the list of topic partitions, if it is time to. A new topic partition is read
        from its beginning.
        """
        if not self._topics.is_due():
            return
        missing = ""
        try:
            self._topics.refresh(may_wait=not self._has_begun)
        except TopicNotFoundError as error:
            if not self._has_begun:
                raise with_similar(error, self._cluster, self._options.topics.names) from None
            if self._options.fail_on_data_loss:
                raise
            missing = error.message
        if missing != self._missing:
            self._missing = missing
            if missing:
                _log.warning(
                    "a topic of this stream is not there any more, and the others are read: %s",
                    missing,
                )
        names = self._topics.names
        # The names of a topic that is missing are those from before.
        gone = (
            []
            if missing
            else [name for name, latest in self._latest.items() if latest.is_gone and name in names]
        )
        # The list of topics shows that those that are gone were created again.
        for name in [*gone, *sorted(names - set(self._latest))]:
            self._begin(name)

    def _begin(self, name: str) -> None:
        """Begin with a topic partition. Who may create a topic decides about its rights and limits,
        so a refusal does not end the others: it stays a new one.
        """
        latest = LatestOffset(self._cluster, name)
        try:
            if self._has_begun:
                latest.try_to_ask()
            self._cursors.begin(name, came_later=self._has_begun)
        except LedgerlakeError as error:
            latest.close()
            if not isinstance(error, BrokerError) and not (self._has_begun and is_retryable(error)):
                raise
            self._refuse(name, error)
            return
        self._refused.pop(name, None)
        if name in self._latest:
            latest.ended = self._latest[name].ended
        self._watch(name, latest)
        if self._has_begun:
            self._came_later.add(name)

    def _refuse(self, name: str, error: LedgerlakeError) -> None:
        """Leave a topic partition out that was never read; it is tried again."""
        before = self._refused.get(name)
        if isinstance(error, TopicNotFoundError) or (
            before is not None and before.message == error.message
        ):
            return
        self._refused[name] = error
        _log.warning("%s cannot be read yet, and the others are read: %s", name, error)

    def _watch(self, name: str, latest: LatestOffset) -> None:
        self._latest[name] = latest
        self._end_bounds[name] = EndBound(self._cluster, name, self._options.ending_of(name))
        self._limit_planners[name] = LimitPlanner(self._cluster, name)
        self._beginnings.pop(name, None)

    def _drop(self, name: str) -> None:
        memory = (
            self._latest,
            self._end_bounds,
            self._limit_planners,
            self._aims,
            self._fixed_end or {},
        )
        for by_name in memory:
            by_name.pop(name, None)
        self._cursors.forget(name)

    def _forget_deleted(self, start: Offset, ends: Offset, delayed: Collection[str]) -> Offset:
        """Return the start without topic partitions that are deleted and were read to their end. If
        one is created again, it is read from its beginning.

        Args:
            delayed: topic partitions that may have messages in the query's state. They stay in the
                start with the clock of their batches, as unread.
        """
        unread = PartitionOffset(BEFORE_ALL)
        result = dict(start)
        deleted = [
            name
            for name, latest in self._latest.items()
            if latest.is_gone and name not in self._topics.names
        ]
        for name in deleted:
            begin, end = start.get(name, unread), ends.get(name, unread)
            if end.is_beyond(begin) or (name in delayed and begin.position == BEFORE_ALL):
                continue
            if end == unread and begin.position != BEFORE_ALL:
                _log.warning(
                    "%s was deleted while no process read it; its messages after %s are lost",
                    name,
                    begin,
                )
            self._drop(name)
            for by_name in (ends, result):
                by_name.pop(name, None)
            if name in delayed:
                result[name] = replace(unread, clock_ms=begin.clock_ms)
        return result

    def _restart_replaced(self, start: Offset, ends: Offset) -> Offset:
        """Return the start, with topic partitions as unread if another topic has taken their name.

        Raises:
            DataLossError: there is one, and the options forbid it.
        """
        result = dict(start)
        for name, proof in self._replaced(start).items():
            if self._options.fail_on_data_loss:
                raise DataLossError(
                    f"{name}: the stream has read up to {start[name].position}, and {proof}: it is "
                    "another topic of that name, deleted and created again, in a cluster that was "
                    "made anew, or in one to which the address now leads; connect to the cluster "
                    "that was read, or, to read this topic from its beginning, set failOnDataLoss "
                    "(fail_on_data_loss) to false"
                )
            _log.warning(
                "%s was read up to %s, and %s: it is another topic of that name and read from its "
                "beginning",
                name,
                start[name].position,
                proof,
            )
            end = self._latest[name].answered
            if self._fixed_end and name in self._fixed_end and self._fixed_end[name].position > end:
                self._fixed_end[name] = PartitionOffset(end)
            self._begin_again(name, result, ends)
        return result

    def _begin_again(self, name: str, start: Offset, ends: Offset) -> None:
        """Take a topic partition for unread: this batch reads nothing of it, and the next one
        begins.
        """
        for by_name in (self._latest, self._end_bounds, self._limit_planners, self._aims, ends):
            by_name.pop(name, None)
        start[name] = PartitionOffset(BEFORE_ALL, clock_ms=start[name].clock_ms)

    def _restart_made_again(self, start: Offset, ends: Offset) -> Offset:
        """Return the start, with topic partitions as unread that were deleted after they were read
        to their end, and made again. The list of topics does not show it of a single partition.

        A broker may have denied for a moment that there is a topic. Then it has the entry that was
        read, or it has removed that one, and all that is left is unread.
        """
        read: Offset = {}
        for name, latest in self._latest.items():
            if latest.ended is not None and not latest.is_gone:
                ended, latest.ended = latest.ended, None
                if (
                    name in start
                    and start[name].time_ms is not None
                    and not ended.is_beyond(start[name])
                ):
                    read[name] = start[name]
        there = {name for name, is_same in self._entries_there(read).items() if is_same}
        result = dict(start)
        for name in set(read) - there:
            if self._fixed_end is not None:
                self._fixed_end.pop(name, None)
            self._begin_again(name, result, ends)
        return result

    def _entries_there(self, read_to: Offset) -> dict[str, bool]:
        """Return of the topic partitions that have an entry where offsets end whether it is the one
        that was read.
        """
        positions = {name: offset.position for name, offset in read_to.items()}
        return {
            name: is_entry(read_to[name], entry.entry)
            for name, entry in entries_at(self._cluster, positions)
        }

    def _replaced(self, start: Offset) -> dict[str, str]:
        """Return the topic partitions whose name another topic has taken, each with what
        proves it.
        """
        ends = self._lasting_earlier_ends(start)
        proofs = {name: f"the topic ends before that, at {end}" for name, end in ends.items()}
        return proofs | dict.fromkeys(
            self._other_entries(start), "the topic has another entry there"
        )

    def _other_entries(self, start: Offset) -> list[str]:
        """Return the topic partitions that have another entry than the one that was read. They are
        looked at when a consumer was opened: between two consumers, a topic may have been replaced.
        """
        new = [
            name for name in start if name in self._latest and not self._latest[name].is_identified
        ]
        there = [name for name in new if not self._latest[name].is_gone]
        have_it = {
            name: start[name]
            for name in there
            if self._latest[name].answered >= start[name].position
        }
        is_same = self._entries_there(
            {name: offset for name, offset in have_it.items() if offset.time_ms is not None}
        )
        for name in have_it:
            self._latest[name].identify()
        return [name for name in is_same if not is_same[name]]

    def _lasting_earlier_ends(self, start: Offset) -> dict[str, Position]:
        """Return the ends of the topic partitions that end before the read position. A broker that
        has lost a topic may not notice it for ``LOST_TOPIC_S``, and may give an old end. So it is
        asked again until then, unless the end moves: an old end does not move.
        """
        ends = self._earlier_ends(start)
        if not ends:
            return ends
        _log.warning(
            "%s ends before the last entry that was read; it is looked up again for %g s",
            ", ".join(ends),
            LOST_TOPIC_S,
        )
        first, deadline_s = ends, time.monotonic() + LOST_TOPIC_S
        while ends and ends.items() <= first.items() and time.monotonic() < deadline_s:
            time.sleep(_ASK_AGAIN_S)
            for name in ends:
                self._latest[name].ask_anew()
            ends = self._earlier_ends({name: start[name] for name in ends})
        return ends

    def _earlier_ends(self, start: Offset) -> dict[str, Position]:
        """Return the ends of the topic partitions that end before the read position, by the last
        answers.
        """
        known = {name: self._latest[name] for name in start if name in self._latest}
        return {
            name: latest.answered
            for name, latest in known.items()
            if not latest.is_gone and ends_before(start[name], latest.answered)
        }

    def latest_offsets(self) -> Offset:
        """Return the current ends of the topic partitions, or the end of the stream if it is
        earlier.
        """
        self._refresh_topics()
        refresh_all(self._latest.values())
        offsets = {}
        for name, latest in list(self._latest.items()):
            try:
                offsets[name] = latest.get()
            except BrokerError as error:
                if name in self._read:
                    raise
                self._drop(name)
                self._refuse(name, error)
        self._warn_without_broker_metadata(offsets)
        self._answered = self._capped(offsets)
        return dict(self._answered)

    def _capped(self, offsets: Offset) -> Offset:
        return {name: self._end_bounds[name].cap(offset) for name, offset in offsets.items()}

    def reported_offsets(self) -> Offset:
        """Return the current ends for Spark's progress; the last known ones while the planner waits
        for the trigger, so that an idle pipeline asks no more often than its trigger says.
        """
        return self.latest_offsets() if self._awaited_ms is None else self._answered

    def fix_end(self) -> None:
        """Fix the end of the stream at the current ends of the topic partitions."""
        if self._options.needs_wakeups:
            self.latest_offsets()
            self._fixed_clocks_ms = {name: self._now_ms(name) for name in self._latest}
            for latest in self._latest.values():
                latest.expire()
        self._fixed_end = self.latest_offsets()

    def plan_end(self, start: Offset, limited: bool) -> Offset:
        """Return the end of the micro-batch that begins at ``start``; ``start`` itself if no batch
        is needed. Wait for the trigger, or until messages are due.

        Raises:
            DataLossError: another topic has taken the name of one that was read.
        """
        self._remember(start)
        # Spark asks for the next batch only after a batch was committed, and calls ``commit`` only
        # with the next one.
        self._cursors.advance(start)
        wakeup_times_ms = (
            self._wakeup_times_ms(start) if self._awaited_ms is None else self._awaited_ms
        )
        if wakeup_times_ms and not self._answered:
            # The brokers are asked for their time.
            self.latest_offsets()
        is_time = self._await_trigger(start, wakeup_times_ms)
        # The times stay as they are until a batch has been planned.
        self._awaited_ms = None if is_time else wakeup_times_ms
        if not is_time:
            # The broker keeps a new topic partition only once it has a cursor. Planning asks again,
            # and raises what goes wrong.
            try:
                self._refresh_topics()
            except LedgerlakeError:
                self._topics.expire()
            return start
        to_wake = self._to_wake(start, wakeup_times_ms)
        ends = self.latest_offsets() if self._fixed_end is None else self._capped(self._fixed_end)
        quiet = self._await_later(start, ends, {name: wakeup_times_ms[name] for name in to_wake})
        start = self._restart_made_again(self._forget_deleted(start, ends, wakeup_times_ms), ends)
        start = self._restart_replaced(start, ends)
        start = self._note_beginnings(start, ends)
        unread = PartitionOffset(BEFORE_ALL)
        moved = [name for name in ends if ends[name].is_beyond(start.get(name, unread))]
        if moved and self._should_defer(start, {name: ends[name] for name in moved}, to_wake):
            return start
        taken = {name: ends[name] for name in moved}
        result = start | (self._within_limits(start, taken) if limited else taken)
        at_end = {
            name for name, end in ends.items() if name in result and not end.is_beyond(result[name])
        }
        last = at_end if self._fixed_end is not None else at_end.intersection(quiet)
        for name, clock_ms in self._clocks_ms(start, result, ends, to_wake, last).items():
            result[name] = replace(result[name], clock_ms=clock_ms)
        result |= self._cut(start, {name: result[name] for name in moved})
        return result | self._noted_ends(result, ends)

    @staticmethod
    def _noted_ends(result: Offset, ends: Offset) -> Offset:
        """Return the offsets of a micro-batch that have reached an end of the stream by time."""
        return {
            name: replace(result[name], ended_ms=end.ended_ms)
            for name, end in ends.items()
            if name in result
            and end.ended_ms not in (None, result[name].ended_ms)
            and not end.is_beyond(result[name])
        }

    def _cut(self, start: Offset, ends: Offset) -> Offset:
        """Return the ends of ranges, with into how many parts each one is cut."""
        spans, options = ranges(start, ends), self._options
        if options.min_partitions > 1:
            parts = parts_for(spans, options.min_partitions)
        else:
            parts = parts_of_long(spans, self.entry_bytes(spans), options.task_slots)
        names = (span.topic_partition for span in spans)
        return {
            name: replace(ends[name], parts=count) for name, count in zip(names, parts, strict=True)
        }

    def _remember(self, start: Offset) -> None:
        self._read |= start.keys()
        for name, offset in start.items():
            if name not in self._latest and self._options.topics.includes(name):
                # The stream has read it before. Ask the broker whether it is deleted.
                if name in self._refused:
                    self._cursors.begin(name, came_later=False)
                self._watch(name, LatestOffset(self._cluster, name))
                end = self._latest[name].get()
                if self._refused.pop(name, None) is not None and self._fixed_end is not None:
                    self._fixed_end[name] = end
            elif name in self._latest:
                self._latest[name].remember(offset)
            if name in self._end_bounds:
                self._end_bounds[name].remember(offset)

    def _within_limits(self, start: Offset, ends: Offset) -> Offset:
        """Return the ends of the micro-batch on topic partitions by its limits."""
        max_rows = share(self._options.max_rows_per_trigger, len(ends))
        max_bytes = share(self._options.max_bytes_per_trigger, len(ends))
        if max_rows is None and max_bytes is None:
            return ends
        # Others keep nothing: a planner that reaches its end closes its reader.
        ahead_bytes = READ_AHEAD_BYTES // max(len(ends), 1)
        unread = PartitionOffset(BEFORE_ALL)
        return {
            name: self._limited(
                name, start.get(name, unread), end, max_rows, max_bytes, ahead_bytes
            )
            for name, end in ends.items()
        }

    def _clocks_ms(
        self, start: Offset, result: Offset, ends: Offset, to_wake: dict[str, int], last: set[str]
    ) -> dict[str, int | None]:
        """Return the clocks that the end of a micro-batch carries: if a wake-up is due and no entry
        came lately, the broker gives no time, or a fixed end is reached. Without the broker's time,
        every batch of a pipeline carries one.

        Args:
            last: the topic partitions with no newer entries expected.
        """
        unread = PartitionOffset(BEFORE_ALL)
        clocks_ms: dict[str, int | None] = {}
        for name, taken in result.items():
            begin = start.get(name, unread)
            is_moved = taken.is_beyond(begin)
            if name in to_wake and (not is_moved or name in last):
                # Time goes on also if the clock is fixed, or Spark would see no new offset.
                clocks_ms[name] = max(to_wake[name], (begin.clock_ms or 0) + 1)
            elif (
                is_moved
                and taken.broker_ms is None
                and taken.position.entry_id >= 0
                and self._options.needs_wakeups
            ):
                clock_ms = to_wake[name] if name in to_wake else self._known_since_ms(name)
                reached_ms = self._reached_ms(name, taken, ends[name], clock_ms)
                clocks_ms[name] = begin.clock_ms if reached_ms is None else reached_ms
        return clocks_ms

    def _known_since_ms(self, name: str) -> int:
        """Return when the broker was asked for the end that is known; if the end is fixed, the time
        of that.
        """
        if self._fixed_end is not None:
            return self._fixed_or_now_ms(name)
        return self._now_ms(name) - self._latest[name].known_for_ms

    def _reached_ms(
        self, name: str, taken: PartitionOffset, end: PartitionOffset, clock_ms: int
    ) -> int | None:
        """Return a time before which no entry was stored that is still unread; None if it is not
        known.

        Args:
            taken: the end of the micro-batch.
            end: the end of the topic partition, as the broker was asked for it at ``clock_ms``.
        """
        aim = self._aims.pop(name, None)
        if not end.is_beyond(taken):
            return clock_ms
        if aim is not None and aim[0].is_beyond(taken):
            self._aims[name] = aim
            return None
        self._aims[name] = (end, clock_ms)
        return None if aim is None else aim[1]

    def _note_beginnings(self, start: Offset, ends: Offset) -> Offset:
        """Return the start with the first position of each unread topic partition, and
        take them from the ends: this batch reads nothing of them.
        """
        result = dict(start)
        is_followed, has_noted_unread = self._is_followed_at_once, False
        for name, end in list(ends.items()):
            begin = start.get(name, PartitionOffset(BEFORE_ALL))
            is_empty = not end.is_beyond(begin)
            is_there = name in self._latest and not self._latest[name].is_gone
            is_unread = begin.position == BEFORE_ALL or self._begins_compacted(begin)
            if not is_there or not is_unread or not (is_empty or is_followed):
                continue
            noted = self._beginning(name, is_empty=is_empty)
            # Entries that were removed since the end was known are a loss, which the range up to it
            # reports.
            if noted.is_beyond(begin) and (is_empty or noted.position <= end.position):
                result[name] = replace(noted, clock_ms=begin.clock_ms)
                del ends[name]
                has_noted_unread |= end.is_beyond(noted)
        # Entries that come during a batch that did not wait for the trigger have to wait for it.
        # Otherwise no batch would wait while new topics come.
        self._has_noted_unread = has_noted_unread and not self._has_noted_unread
        return result

    def _begins_compacted(self, begin: PartitionOffset) -> bool:
        """Return whether a batch begins with what compaction has left of a topic partition."""
        return self._options.read_compacted and begin.is_first

    @property
    def _is_followed_at_once(self) -> bool:
        """Return whether a batch that leaves entries is followed by one that does not wait. A read
        that begins with what compaction has left begins with all of that.
        """
        return not self._options.read_compacted and (
            self._trigger is not None or self._fixed_end is not None
        )

    def _beginning(self, name: str, *, is_empty: bool) -> PartitionOffset:
        """Return where a topic partition begins; ``BEFORE_ALL`` if it has no ledger or is
        deleted.
        """
        if is_empty and name in self._beginnings:
            return self._beginnings[name]
        # A topic partition that came later had no messages before.
        may_have_index = self._cursors.is_pinned and name not in self._came_later
        try:
            noted = beginning(self._cluster, name, None if may_have_index else NO_INDEX_YET)
        except TopicNotFoundError:
            noted = PartitionOffset(BEFORE_ALL)
        self._beginnings[name] = noted
        return noted

    def _limited(
        self,
        name: str,
        begin: PartitionOffset,
        end: PartitionOffset,
        max_rows: int | None,
        max_bytes: int | None,
        ahead_bytes: int,
    ) -> PartitionOffset:
        """Return the end of the micro-batch on a topic partition by its limits. If the topic was
        deleted, that is its end: the tasks report the loss.

        What compaction has left is one batch. Otherwise a compaction after the first part would
        remove deletions of the keys in it from the second part.
        """
        if self._begins_compacted(begin):
            return end
        try:
            return self._limit_planners[name].advance(
                begin.position, end, max_rows, max_bytes, ahead_bytes
            )
        except TopicNotFoundError:
            return end

    def _should_defer(self, start: Offset, ends: Offset, to_wake: dict[str, int]) -> bool:
        """Return whether to wait for more messages before a micro-batch. A batch with due messages
        is not deferred, nor is a run whose end is fixed.
        """
        is_due = to_wake and not self._options.wakes_always
        if self._admission is None or self._fixed_end is not None or is_due:
            return False
        return self._admission.should_defer(self._backlog.total(start, ends), _clock_ms())

    def _await_trigger(self, start: Offset, wakeup_times_ms: dict[str, int]) -> bool:
        """Wait for the trigger, or until messages are due, for ``_MOST_WAIT_MS`` at most; return
        whether it is time to plan.

        A message cuts a wait short once. If the batch does not release it, the broker's time of the
        entries is behind the planner's clock, as in a backlog, and further batches keep the
        trigger.
        """
        if self._trigger is None or self._fixed_end is not None or self._has_noted_unread:
            return True
        ahead_ms = {
            name: time_ms
            for name, time_ms in wakeup_times_ms.items()
            if self._needs_batch(start, name, time_ms)
            and (time_ms < 0 or self._woken_ms.get(name) != time_ms)
        }
        wait_ms = min(
            (time_ms - self._now_ms(name) for name, time_ms in ahead_ms.items()), default=None
        )
        clock_ms = _clock_ms()
        pause_ms = self._trigger.pause_ms(clock_ms, None if wait_ms is None else clock_ms + wait_ms)
        time.sleep(min(pause_ms, _MOST_WAIT_MS) / 1000)
        if pause_ms > _MOST_WAIT_MS:
            return False
        self._trigger.plan(_clock_ms())
        self._woken_ms |= {
            name: time_ms for name, time_ms in ahead_ms.items() if time_ms < self._now_ms(name)
        }
        return True

    @staticmethod
    def _needs_batch(start: Offset, name: str, wakeup_time_ms: int) -> bool:
        """Return whether a topic partition has had no micro-batch at its wake-up time or later, or
        the last one has left messages that are due.
        """
        return name in start and (
            wakeup_time_ms < 0 or wakeup_time_ms > (start[name].clock_ms or 0)
        )

    def _wakeup_times_ms(self, start: Offset) -> dict[str, int]:
        """Return when topic partitions need a batch without new entries."""
        if self._options.wakes_always:
            return {name: (offset.clock_ms or 0) + _TICK_MS for name, offset in start.items()}
        folder = self._options.wakeup_folder
        return {} if folder is None else load_times_ms(folder)

    def _to_wake(self, start: Offset, wakeup_times_ms: dict[str, int]) -> dict[str, int]:
        """Return the topic partitions whose wake-up time has passed, each with the time by its
        broker's clock.

        The clock is read before the broker is asked for the ends, so that no entry is missed that
        a producer knew before that time that it was stored.
        """
        waiting = {
            name
            for name, time_ms in wakeup_times_ms.items()
            if self._needs_batch(start, name, time_ms)
        }
        clocks_ms = {name: self._fixed_or_now_ms(name) for name in waiting}
        to_wake = {
            name: clock_ms
            for name, clock_ms in clocks_ms.items()
            if clock_ms > wakeup_times_ms[name]
        }
        for name in to_wake:
            if name in self._latest:
                self._latest[name].expire()
        return to_wake

    def _fixed_or_now_ms(self, name: str) -> int:
        """Return the time; if the end is fixed, the same each time."""
        if self._fixed_end is None:
            return self._now_ms(name)
        if name not in self._fixed_clocks_ms:
            self._fixed_clocks_ms[name] = self._now_ms(name)
        return self._fixed_clocks_ms[name]

    def _now_ms(self, name: str) -> int:
        """Return the time by the clock of a topic partition's broker; by this machine's, if the
        broker does not tell.
        """
        latest = self._latest.get(name)
        now_ms = self._clocks.now_ms(name, None if latest is None else latest.session)
        return _clock_ms() if now_ms is None else now_ms

    def _await_later(self, start: Offset, ends: Offset, due_ms: dict[str, int]) -> list[str]:
        """Wait a moment for entries that are later than the messages that are due: without one, a
        batch would read the earlier entries and release nothing. Return the topic partitions to
        which no entry came meanwhile.

        Args:
            ends: the ends of the topic partitions; those that have moved are replaced.
        """
        if self._fixed_end is not None or self._options.wakes_always:
            return []
        asked: Offset = {}
        for _ in range(_LATER_TRIES):
            behind = [
                name
                for name, time_ms in due_ms.items()
                if self._is_behind(start[name], ends.get(name), time_ms)
            ]
            if not behind:
                break
            asked = {name: asked.get(name, ends[name]) for name in behind}
            time.sleep(_LATER_PAUSE_S)
            for name in behind:
                self._latest[name].expire()
            ends |= self.latest_offsets()
        return [name for name, end in asked.items() if ends.get(name) == end]

    @staticmethod
    def _is_behind(begin: PartitionOffset, end: PartitionOffset | None, due_ms: int) -> bool:
        """Return whether there are new entries, and all are older than a message that is due."""
        return (
            end is not None
            and end.is_beyond(begin)
            and end.time_ms is not None
            and end.time_ms < due_ms
        )

    def with_pins(self, spans: list[EntryRange]) -> list[EntryRange]:
        """Return the ranges, each with the position from which a durable cursor has retained its
        entries.
        """
        return self._cursors.with_pins(spans)

    def entry_bytes(self, spans: list[EntryRange]) -> list[int | None]:
        """Return about how many bytes an entry of each range has; None if that is not known."""
        names = (span.topic_partition for span in spans)
        return [self._latest[name].entry_bytes if name in self._latest else None for name in names]

    def committed(self, end: Offset) -> None:
        """Acknowledge everything up to the end of a committed micro-batch."""
        self._cursors.advance(end)

    def close(self) -> None:
        self._cluster.close()

    def _warn_without_broker_metadata(self, offsets: Offset) -> None:
        names = {
            (offset.by_broker, offset.index is not None): name
            for name, offset in offsets.items()
            if offset.time_ms is not None
        }
        for kind, (what, consequence) in _MISSING_METADATA.items():
            if kind in names and not self._warned:
                self._warned = True
                _log.warning("the broker adds no %s to %s: %s", what, names[kind], consequence)
