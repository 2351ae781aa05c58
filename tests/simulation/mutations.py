"""Known faults, put back into the product one at a time: the simulator is worth something if it
finds them.

``python -m tests.simulation --mutation NAME --seeds 2000`` looks for the first seed that does.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ledgerlake.client.cursor import DurableCursor
from ledgerlake.decode.sorted_runs import count_through
from ledgerlake.decode.split import placed_entries
from ledgerlake.delay.segment import key_at, key_columns, shared_queue
from ledgerlake.delay.tracker import DelayedTracker
from ledgerlake.operators import outcomes
from ledgerlake.operators.results import PartitionResult
from ledgerlake.pipeline import commit, wakeups
from ledgerlake.pipeline.commit import DeltaSink
from ledgerlake.pipeline.cursors import CursorKeeper
from ledgerlake.pipeline.pipeline import Pipeline
from ledgerlake.pipeline.spark_log import SparkLog
from ledgerlake.pipeline.start import Start
from ledgerlake.publish import outbox
from ledgerlake.publish.outbox import Outbox
from ledgerlake.reasons import REPLACED, Reason
from ledgerlake.schedules.schedules import Schedules
from ledgerlake.source import wakeup_files
from ledgerlake.source.bounds import resolve_start
from ledgerlake.source.planner import Planner
from ledgerlake.source.planning import parts_of_long
from ledgerlake.stored.files import load_stored, save_json
from ledgerlake.table import latest_table
from ledgerlake.table.delta_table import Table
from ledgerlake.table.ordered_files import effective_times
from ledgerlake.wire.message_id import BEFORE_ALL

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.operators.outcome_types import DuePositions
    from ledgerlake.stored.places import Place
    from tests.simulation.driver import Edges


def _cursors_before_spark(edges: Edges) -> None:
    """A cursor moves when the table has a batch, not when Spark has recorded it."""
    edges.replace(CursorKeeper, "add", lambda self, _batch_id, ends, *_: self._acknowledge(ends))


def _batches_by_number(edges: Edges) -> None:
    """A batch whose number the table has is skipped, whatever its range; nothing is compared at a
    start, nor is the outcome of a repeat.
    """
    _repeats_are_not_compared(edges)

    def contains(self: Table, batch: Any) -> bool:
        recorded = self.recorded(batch.query)
        return recorded is not None and recorded.batch_id >= batch.batch_id

    edges.replace(Table, "contains", contains)
    edges.replace(Start, "compare_with_tables", lambda _self, _tables: None)


def _latest_without_question(edges: Edges) -> None:
    """A start at the latest message without a checkpoint does not look at what there was before."""
    first_start, check = Start._first_start, Start._check_first_start

    def start(self: Any, bound: Any, ends: Any) -> Any:
        if bound != "latest":
            return first_start(self, bound, ends)
        return {
            name: resolve_start(self._cluster, name, bound) for name in self._cursors.positions()
        }

    def only_others(self: Any, names: Any, bound: Any, tables: Any) -> None:
        if bound != "latest":
            check(self, names, bound, tables)

    edges.replace(Start, "_first_start", start)
    edges.replace(Start, "_check_first_start", only_others)


def _outbox_before_ownership(edges: Edges) -> None:
    """The outbox is tidied up as soon as a process is there, before it knows that it may run."""
    make = Pipeline.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self._components.outbox is not None:
            self._components.outbox.begin(2**62, None)

    edges.replace(Pipeline, "__init__", init)
    edges.replace(Outbox, "is_present", lambda _self, _batch, _file: True)


def _new_topics_at_latest(edges: Edges) -> None:
    """A topic that comes between the start of the pipeline and Spark's first offset begins at its
    latest message.
    """

    def initial(self: Any) -> Any:
        starts = self._options.starting_by_topic
        return {
            name: resolve_start(self._cluster, name, starts.get(name, "latest"))
            for name in self._topics.names
        }

    edges.replace(Planner, "initial", initial)


def _forgotten_acknowledgements(edges: Edges) -> None:
    """A cursor that is opened again stays if the broker says, which may have lost what it had not
    stored.
    """
    opened = DurableCursor._opened

    def again(self: Any, from_earliest: bool) -> Any:
        if self.is_open:
            return opened(self, from_earliest)
        reached, self._reached = self._reached, BEFORE_ALL
        try:
            return opened(self, from_earliest)
        finally:
            self._reached = reached

    edges.replace(DurableCursor, "_opened", again)


def _wakes_in_one_file(edges: Edges) -> None:
    """The wake-up times are in one file, which the last writer replaces."""

    def save(
        folder: Place, _batch_id: int, written: wakeup_files.WakeupTimes, _extends: int | None
    ) -> bytes:
        return wakeup_files.save_wakeup_times(folder, 0, written)

    edges.replace(wakeups, "save_wakeup_times", save)


def _batches_run_again_without_their_entries(edges: Edges) -> None:
    """A start does not compare the cursors with the entries that are to be read again."""
    edges.replace(Start, "_compare_with_cursors", lambda _self, _start: None)


def _state_files_of_version_1(edges: Edges) -> None:
    """All runs of a batch write their state to the same file."""
    edges.replace(SparkLog, "state_version", lambda _self: 1)


def _one_table_for_all(edges: Edges) -> None:
    """If one table has a batch, all are taken to have it."""
    with_batch = DeltaSink._with_batch

    def all_or_none(self: Any, batch: Any, parts: Any) -> Any:
        return set(parts) if with_batch(self, batch, parts) else set()

    edges.replace(DeltaSink, "_with_batch", all_or_none)


def _replaced_is_delivered(edges: Edges) -> None:
    """A message with an id does not replace the one that waits."""
    hit = Schedules._hit

    def without_replacing(
        self: Schedules, schedule_id: str, position: Any, time_ms: int, reason: Reason
    ) -> Any:
        if reason == REPLACED:
            waiting = self._store.load(schedule_id)
            return waiting, len(waiting)
        return hit(self, schedule_id, position, time_ms, reason)

    edges.replace(Schedules, "_hit", without_replacing)


def _repeats_after_a_cancel(edges: Edges) -> None:
    """The end of a message that repeats is forgotten with its next occurrence."""
    advance = Schedules.advance

    def without_end(self: Schedules, schedule_id: str, position: Any, *args: Any) -> Any:
        messages = self._store.load_repeating(schedule_id)
        for place, message in enumerate(messages):
            if message.position == position and message.repeating is not None:
                endless = replace(message.repeating, ends_ms=None, ends_by=None)
                messages[place] = replace(message, repeating=endless)
        self._store.store_repeating(schedule_id, messages)
        return advance(self, schedule_id, position, *args)

    edges.replace(Schedules, "advance", without_end)


def _rest_waits_for_a_message(edges: Edges) -> None:
    """No micro-batch is planned for messages that the last one has left."""
    edges.replace(
        PartitionResult, "wakeup_time_ms", property(lambda result: result.summary.next_due_ms)
    )


def _released_to_the_end_of_a_row(edges: Edges) -> None:
    """A release ends with what the index hands over together, which depends on how it was
    stored.
    """

    def take_due(self: Any, cutoff_ms: int, most_messages: int = sys.maxsize) -> Any:
        due = [bucket for bucket in self._buckets if bucket.waiting and bucket.next_ms <= cutoff_ms]
        heads: dict[int, Any] = {}
        fresh = self._take_fresh(cutoff_ms)
        count = 0
        for batch in shared_queue(
            [iter(fresh), *(self._take_from(one, cutoff_ms, heads) for one in due)]
        ):
            yield batch
            count += batch.num_rows
            if count >= most_messages:
                last = key_at(batch, batch.num_rows - 1)
                for rows in fresh:
                    self._fresh.add(rows.slice(count_through(key_columns(rows), last)))
                for bucket, messages in heads.values():
                    self._advance(bucket, messages, count_through(key_columns(messages), last))
                return

    edges.replace(DelayedTracker, "take_due", take_due)


def _cut_for_the_cores_of_this_process(edges: Edges) -> None:
    """A range is cut as the process that reads it likes, and not as the offset says."""
    with_pins = Planner.with_pins

    def cut_now(self: Planner, spans: list[Any]) -> list[Any]:
        parts = parts_of_long(spans, self.entry_bytes(spans), self._options.task_slots)
        return [
            replace(one, parts=count)
            for one, count in zip(with_pins(self, spans), parts, strict=True)
        ]

    edges.replace(Planner, "with_pins", cut_now)


def _repeats_are_not_compared(edges: Edges) -> None:
    edges.replace(commit, "_check_repeat", lambda *_: None)


def _released_otherwise_and_not_compared(edges: Edges) -> None:
    """As before, and a repeat is not compared with the first run: the tables alone tell."""
    _released_to_the_end_of_a_row(edges)
    _repeats_are_not_compared(edges)


def _clock_ahead_of_what_is_read(edges: Edges) -> None:
    """A micro-batch that leaves entries unread has the present time as its clock."""
    edges.replace(Planner, "_reached_ms", lambda _self, _name, _taken, _end, clock_ms: clock_ms)


def _first_run_of_a_batch_is_sent(edges: Edges) -> None:
    """The first record of what a micro-batch has for the topic stands, whichever run the
    table has.
    """
    add, same = Outbox.add, "0" * 16
    edges.replace(outbox, "_outcome_name", lambda _outcomes: same)

    def add_first(self: Outbox, batch: Any, new_files: Any) -> int:
        path = self._run_path(batch.batch_id, same)
        first = load_stored(path, "record", outbox._batch, outbox.VERSION)
        messages = add(self, batch, new_files)
        if first is not None and self._run is not None:
            self._run = outbox._Run(same, first)
            save_json(path, {"version": outbox.VERSION, **asdict(first)})
        return messages

    edges.replace(Outbox, "add", add_first)


def _bytes_by_their_order(edges: Edges) -> None:
    """Messages that repeat get the bytes that are kept in the state by their order, not by their
    positions.
    """

    def in_order(outcome: DuePositions) -> list[outcomes._Due]:
        known = iter(placed_entries(outcome.frames) if outcome.deliveries else [])
        deliveries = outcome.deliveries or [None] * len(outcome.positions)
        return [
            outcomes._Due(position, None, due_ms=due_ms)
            if delivery is None
            else outcomes._Due(*next(known), delivery)
            for position, due_ms, delivery in zip(
                outcome.positions, outcome.due_ms, deliveries, strict=True
            )
        ]

    edges.replace(outcomes, "_known_entries", in_order)


def _latest_by_time(edges: Edges) -> None:
    """Within a micro-batch, times alone say which message of a key is the latest."""
    edges.replace(latest_table, "ranks", effective_times)


MUTATIONS: dict[str, Callable[[Edges], None]] = {
    "cursors-before-spark": _cursors_before_spark,
    "batches-by-number": _batches_by_number,
    "latest-without-question": _latest_without_question,
    "outbox-before-ownership": _outbox_before_ownership,
    "new-topics-at-latest": _new_topics_at_latest,
    "forgotten-acknowledgements": _forgotten_acknowledgements,
    "wakes-in-one-file": _wakes_in_one_file,
    "batches-run-again-without-their-entries": _batches_run_again_without_their_entries,
    "state-files-of-version-1": _state_files_of_version_1,
    "one-table-for-all": _one_table_for_all,
    "replaced-is-delivered": _replaced_is_delivered,
    "repeats-after-a-cancel": _repeats_after_a_cancel,
    "rest-waits-for-a-message": _rest_waits_for_a_message,
    "released-to-the-end-of-a-row": _released_to_the_end_of_a_row,
    "released-otherwise-and-not-compared": _released_otherwise_and_not_compared,
    "clock-ahead-of-what-is-read": _clock_ahead_of_what_is_read,
    "cut-for-the-cores-of-this-process": _cut_for_the_cores_of_this_process,
    "first-run-of-a-batch-is-sent": _first_run_of_a_batch_is_sent,
    "bytes-by-their-order": _bytes_by_their_order,
    "latest-by-time": _latest_by_time,
}
