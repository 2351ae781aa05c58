"""Where the next micro-batch of a stream ends: planned in the driver's planner process.

Rules kept here:
  - A batch depends only on (start, end); what is remembered here only saves questions to the
    broker.
  - With ``Trigger.AvailableNow`` the end is fixed once, and the limits still hold. A stream with an
    end never reads past it.
  - If nothing new has come, a batch is planned all the same for a topic partition that asked to be
    woken (``wakes``). While entries come, their broker times say what time it is; if the broker
    says none, the clock is ours then too.
  - A batch of fewer messages than asked for may be held back (``admission``), but never one with
    something due.
  - A position that did not move keeps the very JSON it had, since Spark takes a changed offset for
    new data.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ledgerlake.client.cluster import Cluster
from ledgerlake.errors import DataLossError, TopicNotFoundError
from ledgerlake.source.admission import Admission
from ledgerlake.source.bounds import EndBound, resolve_start
from ledgerlake.source.loss import is_another_topic
from ledgerlake.source.planning import share
from ledgerlake.source.positions import BacklogCounts, LimitPlanner, Tail, look_at_all
from ledgerlake.source.source_cursors import SourceCursors
from ledgerlake.source.topic_list import TopicList
from ledgerlake.source.wake_ups import load_wakes
from ledgerlake.stored.offsets import Offset, PartitionOffset
from ledgerlake.wire.message_id import BEFORE_ALL

if TYPE_CHECKING:
    from collections.abc import Collection

    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.wire.message_id import Position

# Between two questions to a broker that says what it should not.
_SURE_S = 0.5

# How often a batch is planned of an idle topic if nobody says when one is wanted.
_TICK_MS = 1000

_log = logging.getLogger(__name__)


def _clock_ms() -> int:
    return int(time.time() * 1000)


class Planner:
    """The connections of the planner process, and what it remembers."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._cluster = Cluster(options.client)
        self._topics = TopicList(self._cluster, options.topics)
        self._tails: dict[str, Tail] = {}
        self._end_bounds: dict[str, EndBound] = {}
        self._limit_planners: dict[str, LimitPlanner] = {}
        self._cursors = SourceCursors(self._cluster, options)
        self._fixed_end: Offset | None = None
        self._fixed_clock_ms: int | None = None
        self._admission: Admission | None = None
        if options.min_rows_per_trigger:
            self._admission = Admission(options.min_rows_per_trigger, options.max_trigger_delay_ms)
            self._backlog = BacklogCounts(self._cluster, options.min_rows_per_trigger)
        self._warned = False
        self._look_for_topics()

    def initial(self) -> Offset:
        """Return where the query begins."""
        return {name: self._start_of(name) for name in sorted(self._topics.names)}

    def _start_of(self, name: str) -> PartitionOffset:
        bound = self._options.starting_of(name, "latest")
        position = self._cursors.position(name) if bound == "cursor" else None
        if position is not None:
            return PartitionOffset(position)
        return resolve_start(self._cluster, name, bound)

    def _look_for_topics(self) -> None:
        """Find out which topics and partitions there are, now and then; those that are new have no
        start, and are read from the beginning.
        """
        if not self._topics.is_time_to_look():
            return
        try:
            self._topics.look(may_wait=not self._tails)
        except TopicNotFoundError:
            if self._options.fail_on_data_loss or not self._tails:
                raise
        names = self._topics.names
        for name in [name for name, tail in self._tails.items() if tail.is_gone and name in names]:
            # It is made again, as far as the list of topics says.
            with contextlib.suppress(TopicNotFoundError):
                self._begin(name)
        for name in sorted(names - set(self._tails)):
            self._begin(name)

    def _begin(self, name: str) -> None:
        self._watch(name)
        self._cursors.begin(name)

    def _watch(self, name: str) -> None:
        self._tails[name] = Tail(self._cluster, name)
        self._end_bounds[name] = EndBound(self._cluster, name, self._options.ending_of(name))
        self._limit_planners[name] = LimitPlanner(self._cluster, name)

    def _forget_deleted(self, start: Offset, ends: Offset, waiting: Collection[str]) -> Offset:
        """The start without topic partitions that are deleted and were read whole: one made again
        is a new one.

        Args:
            waiting: those of which something may wait in the query's state. They stay, for the
                clock of their batches, and nothing of them was read.
        """
        nothing = PartitionOffset(BEFORE_ALL)
        result = dict(start)
        for name in [name for name, tail in self._tails.items() if tail.is_gone and name not in self._topics.names]:
            begin, end = start.get(name, nothing), ends.get(name, nothing)
            if end.is_beyond(begin) or (name in waiting and begin.position == BEFORE_ALL):
                continue
            if end == nothing and begin.position != BEFORE_ALL:
                _log.warning("%s was deleted while nobody read it; what it had beyond %s is lost", name, begin)
            for known in (self._tails, self._end_bounds, self._limit_planners, ends, result):
                known.pop(name, None)
            self._cursors.forget(name)
            if name in waiting:
                result[name] = replace(nothing, clock_ms=begin.clock_ms)
        return result

    def _begin_others_anew(self, start: Offset, ends: Offset) -> Offset:
        """The start with nothing read of topic partitions that are others than those that were
        read.

        Raises:
            DataLossError: there is one, and there must not be.
        """
        result = dict(start)
        for name, end in self._others(start).items():
            if self._options.fail_on_data_loss:
                raise DataLossError(
                    f"{name}: the stream has read up to {start[name].position}, and the topic ends before that, at {end}: it "
                    "is another topic of that name, in a cluster that was made anew or to which the address now leads; connect to "
                    "the cluster that was read, or, to read this topic from its beginning, set failOnDataLoss "
                    "(fail_on_data_loss) to false"
                )
            _log.warning(
                "%s ends at %s, before %s, up to which it was read: it is another topic of that name and read from its beginning",
                name,
                end,
                start[name].position,
            )
            for known in (self._tails, self._end_bounds, self._limit_planners, ends):
                known.pop(name, None)
            result[name] = PartitionOffset(BEFORE_ALL, clock_ms=start[name].clock_ms)
        return result

    def _others(self, start: Offset) -> dict[str, Position]:
        """The topic partitions that took the name of one that was read, and where they end; asked
        more than once.
        """
        # What compaction leaves may end before what was read.
        found = {} if self._options.client.read_compacted else dict.fromkeys(start, BEFORE_ALL)
        for is_last in (False, False, True):
            known = {name: self._tails[name] for name in found if name in self._tails}
            found = {
                name: tail.answered
                for name, tail in known.items()
                if not tail.is_gone and is_another_topic(start[name], tail.answered)
            }
            if not found or is_last:
                break
            time.sleep(_SURE_S)
            for name in found:
                known[name].ask_afresh()
        return found

    def tails(self) -> Offset:
        """Return where the topic partitions end now, or where the stream ends before that."""
        self._look_for_topics()
        look_at_all(self._tails.values())
        found = {name: tail.now() for name, tail in self._tails.items()}
        self._warn_without_broker_metadata(found)
        return {name: self._end_bounds[name].cap(one) for name, one in found.items()}

    def fix_end(self) -> None:
        """Read no further than to where the topic partitions end now."""
        self._fixed_clock_ms = _clock_ms()
        self._fixed_end = self.tails()

    def latest(self, start: Offset, limited: bool) -> Offset:
        """Return where the micro-batch ends that begins at ``start``; ``start`` itself if none is
        wanted.

        Raises:
            DataLossError: a topic is another one than the one that was read.
        """
        for name, one in start.items():
            if name not in self._tails and self._options.topics.includes(name):
                # It was there before. Whether it is deleted, the broker says.
                self._watch(name)
                self._tails[name].now()
            elif name in self._tails:
                self._tails[name].remember(one)
        # Spark asks for what follows a batch only once that batch is committed, and tells so itself
        # only with the next one.
        self._cursors.advance(start)
        wakes_ms = self._wakes_ms(start)
        clock_ms, woken = self._woken(start, wakes_ms)
        ends = dict(self._fixed_end or self.tails())
        start = self._begin_others_anew(self._forget_deleted(start, ends, wakes_ms), ends)
        nothing = PartitionOffset(BEFORE_ALL)
        moved = [name for name in ends if ends[name].is_beyond(start.get(name, nothing))]
        if moved and self._is_held_back(start, {name: ends[name] for name in moved}, woken):
            return start
        rows, size = (
            share(self._options.max_rows_per_trigger, len(moved)),
            share(self._options.max_bytes_per_trigger, len(moved)),
        )
        result = dict(start)
        for name in moved:
            if limited and (rows is not None or size is not None):
                result[name] = self._limit_planners[name].advance(
                    start.get(name, nothing).position, ends[name], rows, size
                )
            else:
                result[name] = ends[name]
        for name in woken:
            # A run that ends here has no later batch that could carry the clock.
            ends_here = self._fixed_end is not None and result[name] == ends.get(name)
            if name not in moved or result[name].index is None or ends_here:
                result[name] = replace(result[name], clock_ms=clock_ms)
        if self._options.wakes is not None:
            # Producers' clocks are no clock, so without the broker's each batch needs ours.
            for name in moved:
                if result[name].index is None and result[name].time_ms is not None:
                    result[name] = replace(result[name], clock_ms=clock_ms)
        return result

    def _is_held_back(self, start: Offset, ends: Offset, woken: list[str]) -> bool:
        """Return whether a micro-batch waits for more messages; due messages never wait, nor does a
        run that ends with what is there now.
        """
        due = woken and self._options.wakes != "always"
        if self._admission is None or self._fixed_end is not None or due:
            return False
        return self._admission.holds(self._backlog.total(start, ends), _clock_ms())

    def _wakes_ms(self, start: Offset) -> dict[str, int]:
        """Return when topic partitions want a batch although nothing new has come."""
        if self._options.wakes is None:
            return {}
        if self._options.wakes == "always":
            return {name: (one.clock_ms or 0) + _TICK_MS for name, one in start.items()}
        return load_wakes(self._options.wakes) or {}

    def _woken(self, start: Offset, wakes_ms: dict[str, int]) -> tuple[int, list[str]]:
        """Return the time, and the topic partitions whose wake-up time has come.

        The clock is read before the broker is asked where they end: so nothing that was stored
        before that time is missed.
        """
        clock_ms = self._fixed_clock_ms or _clock_ms()
        woken = [name for name in start if clock_ms > wakes_ms.get(name, clock_ms) > (start[name].clock_ms or 0)]
        for name in woken:
            if name in self._tails:
                self._tails[name].ask_again()
        return clock_ms, woken

    def with_pins(self, spans: list[EntryRange]) -> list[EntryRange]:
        """Return the ranges with the position from which a durable cursor has kept what they read."""
        return self._cursors.with_pins(spans)

    def committed(self, end: Offset) -> None:
        """Acknowledge everything up to the end of a committed micro-batch."""
        self._cursors.advance(end)

    def close(self) -> None:
        self._cluster.close()

    def _warn_without_broker_metadata(self, found: Offset) -> None:
        bare = [name for name, one in found.items() if one.position != BEFORE_ALL and one.index is None]
        if bare and not self._warned:
            self._warned = True
            _log.warning(
                "the broker adds no entry metadata to %s: broker columns are null, order is by publish time", bare[0]
            )
