"""``spark.readStream.format("ledgerlake")``: offsets and planning in the driver's planner process,
reading in tasks.

Rules kept here:
  - A batch depends only on (start, end); what is remembered here only saves questions to the
    broker.
  - Nothing is opened before the first question: Spark makes readers only to pickle them.
  - With ``Trigger.AvailableNow`` the end is fixed once, and the limits still hold. A stream with an
    end never reads past it.
  - Where nothing new has come, a batch is planned all the same for a topic partition that asked to
    be woken (``wakes``). While entries come, their broker times say what time it is; if the broker
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
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.cursor import DurableCursor
from ledgerlake.errors import ConsumerBusyError, DataLossError, TopicNotFoundError
from ledgerlake.source.admission import Admission
from ledgerlake.source.batch_reader import RangePartition
from ledgerlake.source.bounds import EndBound, resolve_start
from ledgerlake.source.loss import is_another_topic, moved_to
from ledgerlake.source.planning import ranges, share, split
from ledgerlake.source.positions import LimitPlanner, Tail, count_messages, look_at_all
from ledgerlake.source.views import read_view
from ledgerlake.source.wake_ups import load_wakes
from ledgerlake.stored.offsets import Offset, PartitionOffset, from_json, to_json
from ledgerlake.wire.message_id import BEFORE_ALL

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import pyarrow as pa

    from ledgerlake.client.channels import Watcher
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.wire.message_id import Position

# How often topics and partitions are looked for.
_LOOK_S = 2.0

# The same if the broker tells when some come or go, in case that a word of it was lost.
_LOOK_WATCHED_S = 30.0

# Between two questions to a broker that says what it should not.
_SURE_S = 0.5

# How often a batch is planned of an idle topic if nobody says when one is wanted.
_TICK_MS = 1000

_log = logging.getLogger(__name__)


def _clock_ms() -> int:
    return int(time.time() * 1000)


class LedgerlakeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """The streaming source of a query. Pickled with its options only; the connections belong to the
    planner process.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._planner: _Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_planner": None}

    def initialOffset(self) -> dict[str, Any]:
        return to_json(self._plan().initial())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        limited = not isinstance(limit, ReadAllAvailable)
        return to_json(self._plan().latest(from_json(start), limited))

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        if self._options.max_rows_per_trigger is not None:
            return ReadMaxRows(self._options.max_rows_per_trigger)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return to_json(self._plan().tails())

    def prepareForTriggerAvailableNow(self) -> None:
        self._plan().fix_end()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        spans = self._plan().with_pins(ranges(from_json(start), from_json(end)))
        return [RangePartition(span) for span in split(spans, self._options.min_partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_view(self._options, partition.span)

    def commit(self, end: dict[str, Any]) -> None:
        self._plan().committed(from_json(end))

    def stop(self) -> None:
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def _plan(self) -> _Planner:
        if self._planner is None:
            self._planner = _Planner(self._options)
        return self._planner


class _Planner:
    """The planner process's connections and what it remembers."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._cluster = Cluster(options.client)
        self._names: set[str] = set()
        self._tails: dict[str, Tail] = {}
        self._end_bounds: dict[str, EndBound] = {}
        self._limit_planners: dict[str, LimitPlanner] = {}
        self._cursors: dict[str, DurableCursor] = {}
        self._looked_s = float("-inf")
        self._watcher: Watcher | None = None
        self._fixed_end: Offset | None = None
        self._fixed_clock_ms: int | None = None
        self._admission = (
            Admission(options.min_rows_per_trigger, options.max_trigger_delay_ms)
            if options.min_rows_per_trigger
            else None
        )
        self._counted: dict[str, tuple[Position, Position, int]] = {}
        self._warned = False
        self._look_for_topics()

    def initial(self) -> Offset:
        return {name: self._start_of(name) for name in sorted(self._names)}

    def _start_of(self, name: str) -> PartitionOffset:
        bound = self._options.starting_of(name, "latest")
        if bound == "cursor" and name in self._cursors:
            return PartitionOffset(self._cursors[name].position())
        return resolve_start(self._cluster, name, bound)

    def _look_for_topics(self) -> None:
        """Find out which topics and partitions there are, now and then; those that are new have no
        start, and are read whole.
        """
        if not self._is_time_to_look():
            return
        if self._watcher is None or self._watcher.closed:
            self._watcher = self._cluster.watch(self._options.topics)
        if self._watcher is not None:
            self._watcher.changed = False
        try:
            self._names = set(self._cluster.all_partitions(self._options.topics, may_wait=not self._tails))
        except TopicNotFoundError:
            if self._options.fail_on_data_loss or not self._tails:
                raise
        self._looked_s = time.monotonic()
        for name in [name for name, tail in self._tails.items() if tail.is_gone and name in self._names]:
            # It is made again, as far as the list of topics says.
            with contextlib.suppress(TopicNotFoundError):
                self._begin(name)
        for name in sorted(self._names - set(self._tails)):
            self._begin(name)

    def _begin(self, name: str) -> None:
        self._watch(name)
        if self._options.pinned_by and name not in dict(self._options.starting_by_topic):
            self._pin(name, self._options.pinned_by)
        if self._options.subscription:
            self._cursors[name] = DurableCursor(self._cluster, name, self._options.subscription)
            self._cursors[name].ensure(from_earliest=True)

    def _pin(self, name: str, subscription: str) -> None:
        """Make the pipeline's durable cursor on a topic partition before its first entry is
        planned.

        The driver holds those that it knows; of a new one it learns with the first batch, when a
        broker may have removed entries that nobody held.
        """
        cursor = DurableCursor(self._cluster, name, subscription)
        with contextlib.suppress(ConsumerBusyError, TopicNotFoundError):
            cursor.make(from_earliest=True)

    def _is_time_to_look(self) -> bool:
        waited_s = time.monotonic() - self._looked_s
        if self._watcher is None or self._watcher.closed:
            return waited_s >= _LOOK_S
        return self._watcher.changed or waited_s >= _LOOK_WATCHED_S

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
        for name in [name for name, tail in self._tails.items() if tail.is_gone and name not in self._names]:
            begin, end = start.get(name, nothing), ends.get(name, nothing)
            if end.is_beyond(begin) or (name in waiting and begin.position == BEFORE_ALL):
                continue
            if end == nothing and begin.position != BEFORE_ALL:
                _log.warning("%s was deleted while nobody read it; what it had beyond %s is lost", name, begin)
            for known in (self._tails, self._end_bounds, self._limit_planners, self._cursors, ends, result):
                known.pop(name, None)
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
        self._look_for_topics()
        look_at_all(self._tails.values())
        found = {name: tail.now() for name, tail in self._tails.items()}
        self._warn_without_broker_metadata(found)
        return {name: self._end_bounds[name].cap(one) for name, one in found.items()}

    def fix_end(self) -> None:
        self._fixed_clock_ms = _clock_ms()
        self._fixed_end = self.tails()

    def latest(self, start: Offset, limited: bool) -> Offset:
        for name, one in start.items():
            if name not in self._tails and self._options.topics.includes(name):
                # It was there before. Whether it is deleted, the broker says.
                self._watch(name)
                self._tails[name].now()
            elif name in self._tails:
                self._tails[name].remember(one)
        # Spark asks for what follows a batch only once that batch is committed, and tells so itself
        # only with the next one.
        self.committed(start)
        wakes_ms = self._wakes_ms(start)
        clock_ms, woken = self._woken(start, wakes_ms)
        ends = dict(self._fixed_end or self.tails())
        start = self._begin_others_anew(self._forget_deleted(start, ends, wakes_ms), ends)
        nothing = PartitionOffset(BEFORE_ALL)
        moved = [name for name in ends if ends[name].is_beyond(start.get(name, nothing))]
        if moved and self._waits_for_more(start, {name: ends[name] for name in moved}, woken):
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

    def _waits_for_more(self, start: Offset, ends: Offset, woken: list[str]) -> bool:
        """Return whether a micro-batch is held back; due messages never wait, nor does a run that
        ends with what is there now.
        """
        due = woken and self._options.wakes != "always"
        if self._admission is None or self._fixed_end is not None or due:
            return False
        return self._admission.holds(sum(self._count(name, start, end) for name, end in ends.items()), _clock_ms())

    def _count(self, name: str, start: Offset, end: PartitionOffset) -> int:
        """Return how many messages of a topic partition there are to read; not fewer than asked for
        if there are more.
        """
        assert self._admission is not None
        begin = start.get(name, PartitionOffset(BEFORE_ALL))
        known = self._counted.get(name)
        if known is None or known[:2] != (begin.position, end.position):
            count = count_messages(self._cluster, name, begin, end, self._admission.min_rows)
            known = self._counted[name] = (begin.position, end.position, count)
        return known[2]

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
        """Say of ranges from where on a durable cursor has kept what they read.

        Also of those that begin behind an index: what follows may have none. Where the pipeline's
        own cursors stand, the driver tells the tasks (see ``loss``).
        """
        return [replace(span, pinned_from=self._pin_of(span)) for span in spans]

    def _pin_of(self, span: EntryRange) -> Position | None:
        cursor = self._cursors.get(span.topic_partition)
        if cursor is not None and span.crosses:
            with contextlib.suppress(TopicNotFoundError):
                return moved_to(cursor.position(), span.after)
        return BEFORE_ALL if cursor is not None or self._options.pinned_by else None

    def committed(self, end: Offset) -> None:
        for name, cursor in self._cursors.items():
            if name in end:
                with contextlib.suppress(TopicNotFoundError):
                    cursor.advance(end[name].position)

    def close(self) -> None:
        self._cluster.close()

    def _warn_without_broker_metadata(self, found: Offset) -> None:
        bare = [name for name, one in found.items() if one.position != BEFORE_ALL and one.index is None]
        if bare and not self._warned:
            self._warned = True
            _log.warning(
                "the broker adds no entry metadata to %s: broker columns are null, order is by publish time", bare[0]
            )
