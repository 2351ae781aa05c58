"""The start of a pipeline: it acquires the cursors, and so the right to run the stream, and
compares checkpoint, tables, cursors and outbox.

    before the cursors are acquired   checks that need no cursor; nothing is changed
    after they are acquired           checkpoint, tables, cursors and outbox are compared: no other
                                      process may change them now

A checkpoint that is older than its table, a table that is older than its checkpoint, and an outbox
of another checkpoint are refused with a sentence that says what to do.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.missing_topics import find_topic_partitions
from ledgerlake.client.topics import split_partition
from ledgerlake.decode import schema
from ledgerlake.errors import CheckpointError, ConsumerBusyError, DataLossError, SetupError
from ledgerlake.options.config import check_stores
from ledgerlake.options.table_options import table_name
from ledgerlake.pipeline.batch_ends import last_run, save_seen_tables, seen_tables
from ledgerlake.pipeline.left_topics import (
    check_topics,
    is_gone,
    known_topic_partitions,
    unread_topic_partitions,
    warn_of_left_topics,
)
from ledgerlake.pipeline.moved_state import Move, adopt_state, former_place, move_of
from ledgerlake.pipeline.row_settings import (
    changed,
    delivery_of,
    is_needed_in_state,
    row_settings,
    selected_now,
)
from ledgerlake.pipeline.wakeups import known_wakeup_times
from ledgerlake.source.bounds import (
    end_position,
    first_available,
    first_cluster,
    resolve_start,
)
from ledgerlake.source.latest_offset import describe
from ledgerlake.source.loss import moved_to
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.stored.places import parse_place
from ledgerlake.table.delta_table import Table
from ledgerlake.table.open_table import existing_table
from ledgerlake.wire.message_id import BEFORE_ALL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ledgerlake.errors import LedgerlakeError
    from ledgerlake.options.bounds import Bound
    from ledgerlake.options.config import Config
    from ledgerlake.pipeline.checkpoint import Checkpoint
    from ledgerlake.pipeline.cursors import CursorKeeper
    from ledgerlake.pipeline.row_settings import Selected, Setting
    from ledgerlake.pipeline.tables import Tables
    from ledgerlake.publish.outbox import Outbox
    from ledgerlake.stored.offsets import Offset
    from ledgerlake.table.batch_commit import Recorded, SeenBatch
    from ledgerlake.wire.message_id import Position

_NOTHING = PartitionOffset(BEFORE_ALL)

_log = logging.getLogger(__name__)


class Start:
    """A start of a pipeline. ``tables`` are all of its tables, also those that do not exist yet."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        checkpoint: Checkpoint,
        cursors: CursorKeeper,
        tables: Tables,
    ) -> None:
        self._config = config
        self._options = config.source
        self._cluster = cluster
        self._checkpoint = checkpoint
        self._cursors = cursors
        self._tables = tables
        # Of the checkpoint, once it is acquired: its number, and where the delivery begins.
        self.number = 0
        self.delivery: str | None = None
        self._selected: Selected | None = None

    def acquire(self, names: list[str], tables: list[Table]) -> Offset:
        """Acquire the right to run the stream; return the pipeline's first position, which is
        resolved once for all runs.

        Args:
            tables: the tables that exist.

        Raises:
            CheckpointError: checkpoint and tables do not belong together.
            SetupError: the checkpoint is lost, or cannot be written.
        """
        bound = self._config.starting
        start = self._checkpoint.start()
        ends = self._check_without_cursors(start, names, bound, tables)
        if ends:
            ends |= self._checkpoint.first_ends()
            self._checkpoint.save_first_ends(ends)
        try:
            self._cursors.acquire(
                names,
                from_earliest=bound != "latest" or start is not None,
                unread=unread_topic_partitions(self._checkpoint, names),
            )
        except ConsumerBusyError:
            # Another process owns the stream, so this start has made no cursor.
            self._checkpoint.remove_first_ends()
            raise
        # Another process may have run until it closed the cursors.
        start = self._checkpoint.start()
        removed = self._compare(start, tables)
        if start is not None:
            seen = self._seen_tables()
            save_seen_tables(
                self._checkpoint, {name: seen[name] for name in seen if name not in removed}
            )
            warn_of_left_topics(self._config, self._cluster, self._checkpoint)
            self._save_settings()
            # Last, since only its names tell that the checkpoint was moved.
            adopt_state(self._checkpoint.folder)
            self.number = self._checkpoint.number()
            return start
        first_start = self._first_start(bound, ends)
        number = max(time.time_ns() // 1000, self._last_writer(tables) + 1)
        self.number = self._checkpoint.save_stream(self._config.stream.name, number)
        for table in tables:
            # The record may be of a start that was killed before another checkpoint began.
            self._check_last_writer(table, self.number)
        self._save_settings()
        start = self._checkpoint.save_start(first_start)
        self._cursors.advance({name: offset.position for name, offset in start.items()})
        return start

    def _save_settings(self) -> None:
        settings = row_settings(self._config, self._checkpoint.settings())
        self._checkpoint.save_settings(settings)
        self.delivery = delivery_of(settings)

    def save_selected(self) -> None:
        """Record which tables have to have a message, once they have the first micro-batch of the
        run, and before Spark records it: a run that commits nothing changes nothing for ``verify``.

        Raises:
            SetupError: the folder cannot be written.
        """
        committed = self._checkpoint.log.committed_offset() or {}
        selected = selected_now(self._selected, self._config, committed)
        if selected != self._selected:
            self._checkpoint.save_selected(selected)

    def examine(
        self, names: list[str], tables: list[Table], outbox: Outbox | None
    ) -> dict[str, LedgerlakeError]:
        """Check what ``acquire`` and ``open_outbox`` check, and change nothing: only subscriptions
        that exist are acquired. Return why the topic partitions that ``acquire`` leaves out cannot
        be opened.

        Raises:
            As ``acquire`` and ``open_outbox``.
        """
        bound = self._config.starting
        start = self._checkpoint.start()
        ends = self._check_without_cursors(start, names, bound, tables)
        refused = self._cursors.acquire_existing(
            names, unread_topic_partitions(self._checkpoint, names)
        )
        self._compare(start, tables)
        if start is None:
            self._check_cursors_are_new(
                self._cursors.positions(), bound, ends | self._checkpoint.first_ends()
            )
        else:
            former_place(self._checkpoint.folder)
        if outbox is not None:
            name, table = self._checkpoint.outbox(), self._tables.main.table
            is_there = table in tables
            committed = self._committed(is_there)
            outbox.examine(committed, name)
            in_table = table.outbox_messages(name) if is_there and name is not None else None
            self._compare_with_outbox(outbox, committed, in_table)
        return refused

    def compare_beside_a_run(self, names: Iterable[str], tables: list[Table]) -> list[str]:
        """Check all that a start checks about tables to which messages of topic partitions are to
        be added, while the stream may run. Return as ``check_tables_are_newest``.

        Args:
            tables: the tables that exist.

        Raises:
            CheckpointError: the checkpoint is of another stream, another stream writes the
                messages, or checkpoint and tables do not belong together.
        """
        self._checkpoint.check_stream(self._config.stream.name)
        self._tables.check_writers(names, tables)
        return self._compare_tables(tables)

    def _compare_tables(self, tables: list[Table]) -> list[str]:
        self.compare_with_tables(tables)
        return self.check_tables_are_newest(tables)

    def _compare(self, start: Offset | None, tables: list[Table]) -> list[str]:
        """Compare all; return the tables that ``check_tables_are_newest`` returns."""
        removed = self._compare_tables(tables)
        self.compare_settings(tables)
        # Whoever cannot read it may not write either: it is needed after the first micro-batch.
        self._selected = self._checkpoint.selected()
        if start is not None:
            self._compare_with_cursors(start)
        return removed

    def _check_without_cursors(
        self, start: Offset | None, names: list[str], bound: Bound, tables: list[Table]
    ) -> dict[str, Position]:
        """Check what needs no cursor. Return the ends that ``_check_first_start`` returns, without
        a checkpoint.

        Raises:
            SetupError: as ``check_topics`` and ``_check_first_start``.
            CheckpointError: another stream writes the messages of a topic to a table.
        """
        self._tables.check_writers(names, tables)
        if start is None:
            return self._check_first_start(names, bound, tables)
        check_topics(self._config, self._cluster, self._checkpoint)
        return {}

    def _check_first_start(
        self, names: list[str], bound: Bound, tables: list[Table]
    ) -> dict[str, Position]:
        """Check a start without a checkpoint before a cursor is created. Return the ends of the
        topic partitions for a start at the latest message.

        Raises:
            SetupError: the tables have messages of this stream, so that its checkpoint is lost.
            As ``_check_has_start``.
        """
        last_batches = {
            table.path: table.last_batch_of(self._config.stream.name) for table in tables
        }
        paths = [path for path, last_batch in last_batches.items() if last_batch is not None]
        if paths and bound != "cursor" and not self._checkpoint.is_forgotten:
            raise self._lost_checkpoint(
                f"the table at {paths[0]} knows the stream {self._config.stream.name}"
            )
        with_rows = [
            str(path)
            for path, last_batch in last_batches.items()
            if last_batch is not None and last_batch >= 0
        ]
        if with_rows and bound == "cursor" and not self._checkpoint.is_forgotten:
            self._check_cursor_is_there(names, with_rows[0])
        if with_rows and bound != "latest" and self._checkpoint.is_forgotten:
            _log.warning(
                "the stream %s begins anew, and its rows stay in %s; what the broker still has "
                "comes twice",
                self._config.stream.name,
                ", ".join(with_rows),
            )
        self._checkpoint.check_writable()
        if bound not in ("cursor", "latest", "earliest"):
            for name, start in self._resolved(names, bound).items():
                self._check_has_start(name, start)
        return (
            {name: end_position(self._cluster, name) for name in names} if bound == "latest" else {}
        )

    def _check_has_start(self, name: str, start: PartitionOffset) -> None:
        """Check that a topic partition has the position at which the stream begins.

        Raises:
            DataLossError: it no longer has it, and the options forbid that.
        """
        may_be_gone = self._options.read_compacted or not self._options.fail_on_data_loss
        if start.was_gone and not may_be_gone:
            raise DataLossError(
                f"{name} no longer has the messages to start at, after {start}: they were removed; "
                "correct starting, or, to record that in rejects and go on, set failOnDataLoss "
                "(fail_on_data_loss) to false"
            )

    def _check_cursor_is_there(self, names: list[str], path: str) -> None:
        """Check that a start at the cursor has one.

        Raises:
            SetupError: no topic partition has it, so that a table's rows would come twice.
        """
        existing = self._cursors.existing(names)
        if names and not existing:
            raise SetupError(
                "starting is cursor, but no topic has the subscription "
                f"{self._config.subscription} any more, and the table at {path} has rows of the "
                f"stream {self._config.stream.name}, which would come twice if they are of these "
                "topics; restore the checkpoint, or begin anew with what the broker still has: "
                "remove tables with such rows, then run: ledgerlake forget CONFIG"
            )
        if len(existing) < len(names):
            _log.warning(
                "the subscription %s is not on %s, read from the beginning; rows that the table at "
                "%s has of it come twice",
                self._config.subscription,
                ", ".join(sorted(set(names) - set(existing))),
                path,
            )

    def _last_writer(self, tables: list[Table]) -> int:
        """Return the number of the last checkpoint of the stream that has committed to the
        tables.
        """
        return max(
            (table.last_writer(self._config.stream.name) or 0 for table in tables), default=0
        )

    def _first_start(self, bound: Bound, ends: dict[str, Position]) -> Offset:
        """Return the start of a pipeline without a checkpoint.

        Raises:
            SetupError: as ``_check_cursors_are_new``.
        """
        positions = self._cursors.positions()
        self._check_cursors_are_new(positions, bound, ends)
        if bound in ("latest", "cursor"):
            # Start at the cursor, so that there is no gap between the pinned and the read entries.
            return {
                name: describe(self._cluster, name, position)
                for name, position in positions.items()
            }
        return self._resolved(positions, bound)

    def _resolved(self, names: Iterable[str], bound: Bound) -> Offset:
        with first_cluster(self._cluster, self._options) as cluster:
            return {name: resolve_start(cluster, name, bound, is_pinned=True) for name in names}

    def _check_cursors_are_new(
        self, positions: dict[str, Position], bound: Bound, ends: dict[str, Position]
    ) -> None:
        """Check that the cursors are not older than a start without a checkpoint.

        Args:
            ends: the ends of the topic partitions before the cursors were created, for a start at
                the latest message; by an earlier start, if that was interrupted.

        Raises:
            SetupError: they are, and have unread or read messages. So the checkpoint is lost, and
                the user must choose how to go on.
        """
        if bound == "latest":
            for name, end in ends.items():
                # ``examine`` has no cursor that a first start would create.
                if name in positions and positions[name] < end:
                    raise self._lost_checkpoint(
                        f"the subscription {self._config.subscription} has unread messages of "
                        f"{name} behind {positions[name]}"
                    )
        elif bound != "cursor":
            for name, position in positions.items():
                if position > first_available(self._cluster, name):
                    raise self._lost_checkpoint(
                        f"the subscription {self._config.subscription} has read {name} up to "
                        f"{position}"
                    )

    def _lost_checkpoint(self, sign: str) -> SetupError:
        return SetupError(
            f"there is no checkpoint at {self._config.checkpoint_place}, but {sign}; restore the "
            "checkpoint, or set starting to cursor to go on from there (messages may come twice), "
            "or begin anew with what the broker still has: remove the tables, whose rows would "
            "come twice, then run: ledgerlake forget CONFIG"
        )

    def compare_with_tables(self, tables: list[Table]) -> None:
        """Check that the checkpoint is not older than the tables, and that no later checkpoint has
        written to them.

        Raises:
            CheckpointError: it is older, a later checkpoint has written to a table, or the tables
                have batches of another run.
        """
        has_batches = self._checkpoint.log.last_planned() is not None
        query_id = self._checkpoint.log.query_id()
        if query_id is None:
            if has_batches:
                raise CheckpointError(
                    f"the checkpoint {self._config.stream.checkpoint} lacks its file 'metadata'; "
                    "restore it from a complete copy"
                )
            self._check_not_begun(tables)
            return
        query, number = self._query_name(query_id), self._checkpoint.number()
        of_tables = [(table, table.recorded(query)) for table in tables]
        # After the tables, since a stream that runs goes on meanwhile.
        planned = self._checkpoint.log.last_planned()
        for table, recorded in of_tables:
            self._check_last_writer(table, number)
            if recorded is None:
                continue
            if planned is None or recorded.batch_id > planned:
                reached = "no batch" if planned is None else f"batch {planned}"
                raise self._older_checkpoint(
                    table, f"has batch {recorded.batch_id}", f"reaches {reached}"
                )
            # Spark has removed the offsets of older batches
            # (``spark.sql.streaming.minBatchesToRetain``).
            if recorded.range_digest is not None and self._checkpoint.log.keeps(recorded.batch_id):
                batch = self._checkpoint.log.record(
                    self._config.stream.name, query, recorded.batch_id, number
                )
                if not recorded.is_batch(batch):
                    raise self._older_checkpoint(
                        table, f"has another batch {recorded.batch_id}", "has one of its own"
                    )

    def _check_last_writer(self, table: Table, greatest: int) -> None:
        if self._last_writer([table]) > greatest:
            raise self._older_checkpoint(
                table, "has rows by a later checkpoint", "does not know of them"
            )

    def check_tables_are_newest(self, tables: list[Table]) -> list[str]:
        """Check that no table is missing or older than the checkpoint: the topic may no longer have
        the rows that it lacks. Return the names of the tables that are missing and whose topics
        were deleted or forgotten.

        A folder that the checkpoint never saw, and that has no batch of the stream, is a new table,
        which the user chose. A folder may have been the table of another section: it has to have
        what the checkpoint saw there.

        Raises:
            CheckpointError: a table is older or missing.
        """
        query_id = self._checkpoint.log.query_id()
        if query_id is None:
            return []
        seen_batches, removed = self._seen_tables(), []
        for name, table in self._tables.by_name.items():
            former, path = seen_batches.get(name), str(table.path)
            of_folder = [seen for seen in seen_batches.values() if seen.path == path]
            seen = max(of_folder, key=attrgetter("batch_id"), default=former)
            if seen is None:
                continue
            recorded = table.recorded(self._query_name(query_id)) if table in tables else None
            was_moved = former is not None and former.path != path
            if former is not None and was_moved and (recorded is None or of_folder):
                _log.warning(
                    "the table %s is at %s now, and its rows so far are in the one at %s",
                    name,
                    table.path,
                    former.path,
                )
            if recorded is None and was_moved:
                continue
            if recorded and recorded.batch_id >= seen.batch_id:
                continue
            topics = self._tables.topics_of(name, self._known_topics())
            if table not in tables and topics and self._are_gone(topics):
                _log.warning(
                    "the table at %s was removed, and its topic %s was deleted or forgotten, so "
                    "the stream goes on without them; if that was by mistake, stop it and restore "
                    "the table",
                    table.path,
                    ", ".join(topics),
                )
                removed.append(name)
                continue
            raise self._older_table(table, seen, recorded, topics, is_there=table in tables)
        return removed

    def _seen_tables(self) -> dict[str, SeenBatch]:
        """Return the last batch that a run saw in each table, by the names and paths of now."""
        move, now = move_of(self._checkpoint.folder), self._paths
        moved: dict[str, SeenBatch] = {}
        for name, seen in seen_tables(self._checkpoint).items():
            path = move.name_among(seen.path, now)
            # The name of one of [[tables]] has the path.
            key = table_name(path) if name == table_name(seen.path) else name
            moved[key] = max(
                replace(seen, path=path), moved.get(key, seen), key=attrgetter("batch_id")
            )
        return moved

    def _recorded_place(self, seen: SeenBatch) -> str:
        """Return where a table was before the checkpoint was moved, if ``_seen_tables`` renamed
        it.
        """
        move = move_of(self._checkpoint.folder)
        recorded = [former.path for former in seen_tables(self._checkpoint).values()]
        return Move(move.new, move.old).name_among(seen.path, recorded)

    @property
    def _paths(self) -> set[str]:
        return {str(table.path) for table in self._tables.by_name.values()}

    def _known_topics(self) -> list[str]:
        return sorted(
            {split_partition(name)[0] for name in known_topic_partitions(self._checkpoint)}
        )

    def _are_gone(self, topics: list[str]) -> bool:
        return all(is_gone(self._cluster, self._checkpoint, topic) for topic in topics)

    def _older_table(
        self,
        table: Table,
        seen: SeenBatch,
        recorded: Recorded | None,
        topics: list[str],
        *,
        is_there: bool,
    ) -> CheckpointError:
        """Return the error of a table that is missing, or lacks what the checkpoint saw in it.

        Args:
            topics: those that alone come into it; none of a table with a fixed path.
        """
        anew, place = "", self._recorded_place(seen)
        if recorded is not None and str(table.path) != seen.path:
            state = (
                f"the path is {table.path} now, where the table has batch {recorded.batch_id}: it "
                "is an older copy of that table, or the one from before the path was changed, and "
                f"lacks what came since; set the path to {seen.path} again"
            )
        elif not is_there:
            what = (
                "it was removed; restore it"
                if place == str(table.path)
                else f"it was at {place} before the checkpoint was moved; move it too, or set the "
                "path to it"
            )
            state = f"there is none at {table.path}: {what}"
            if topics:
                anew = (
                    f"or, to go on without its rows, take {', '.join(topics)} out of the "
                    f"configuration and run: ledgerlake forget CONFIG --topic {topics[0]}, "
                )
        elif recorded is None:
            state = (
                f"the one at {table.path} does not know it: it is an older copy; restore the "
                "newest one"
            )
        else:
            state = (
                f"the one at {table.path} has batch {recorded.batch_id}: it is an older copy; "
                "restore the newest one"
            )
        return CheckpointError(
            f"the table at {place} had batch {seen.batch_id} of the stream "
            f"{self._config.stream.name} by the checkpoint {self._config.stream.checkpoint}, and "
            f"{state}, {anew}or choose a new folder for the messages from here on, or begin anew: "
            "remove the checkpoint and both tables, then run: ledgerlake forget CONFIG"
        )

    def compare_settings(self, tables: list[Table]) -> None:
        """Check that no setting was changed that must stay, because a micro-batch is run again or
        messages are kept in state.

        Raises:
            CheckpointError: such a setting was changed.
        """
        self._check_former_tables(tables)
        before = self._checkpoint.settings() or {}
        now = row_settings(self._config, before)
        move = move_of(self._checkpoint.folder)
        before |= {
            name: move.name_among(value, [now.get(name)])
            for name, value in before.items()
            if isinstance(value, str)
        }
        names = changed(before, now)
        if not names:
            return
        table = self._has_uncommitted(tables)
        if table is not None:
            raise CheckpointError(
                f"{names[0]} was {_in_toml(before[names[0]])} when batch "
                f"{self._checkpoint.log.last_planned()} was written to the "
                f"table at {table.path}, and that batch is to be run again; set it back, run once "
                "with --once, then change it"
            )
        needed = [name for name in names if is_needed_in_state(name, before, now)]
        if needed and self._has_messages_in_state():
            name = needed[0]
            raise CheckpointError(
                f"{name} was {_in_toml(before[name])}, and delayed messages need it; set it back "
                "until ledgerlake state CONFIG counts no delayed message"
            )

    def _check_former_tables(self, tables: list[Table]) -> None:
        """Check that the micro-batch that Spark runs again is in no table that the stream no longer
        writes to. A table that was moved is the same one.

        Raises:
            CheckpointError: it is, so that its rows would also come into another table.
            TableError: a former table cannot be opened.
        """
        if self._unfinished is None:
            return
        move = move_of(self._checkpoint.folder)
        before = {move.name_among(path, self._paths) for path in self._checkpoint.tables().values()}
        for path in sorted(before - self._paths):
            former = Table(
                parse_place(path, "the path of a former table", self._config.storage),
                schema.MESSAGES,
            )
            existing = existing_table(former.path)
            if existing is None or self._has_uncommitted([former]) is None:
                continue
            if all(table.delta_id != existing.metadata().id for table in tables):
                raise CheckpointError(
                    f"batch {self._unfinished[1]} of the stream {self._config.stream.name} was "
                    f"written to the table at {path}, which the configuration no longer names, and "
                    "that batch is to be run again; set the path back, run once with --once, then "
                    "change it"
                )

    @property
    def _unfinished(self) -> tuple[str, int] | None:
        """Return the query and the number of the micro-batch that Spark runs again; None if there
        is none.
        """
        planned, query_id = self._checkpoint.log.last_planned(), self._checkpoint.log.query_id()
        if planned is None or query_id is None or self._checkpoint.log.has_committed(planned):
            return None
        return self._query_name(query_id), planned

    def _has_uncommitted(self, tables: list[Table]) -> Table | None:
        """Return a table that has the micro-batch that Spark runs again; None if there is none."""
        unfinished = self._unfinished
        if unfinished is None:
            return None
        query, planned = unfinished
        for table in tables:
            recorded = table.recorded(query)
            if recorded is not None and recorded.batch_id >= planned:
                return table
        return None

    def _has_messages_in_state(self) -> bool:
        """Return whether state may have messages: a topic partition with such messages has a
        wake-up time.
        """
        if self._checkpoint.log.last_committed() is None:
            return False
        wakeups = known_wakeup_times(self._checkpoint, last_run(self._checkpoint))
        return wakeups is None or bool(wakeups.times_ms)

    def _compare_with_cursors(self, start: Offset) -> None:
        """Check that the broker has retained the entries of the micro-batch that is run again.

        A cursor passes a micro-batch only after its commit. So if the cursor is past it, the
        checkpoint is older than the last run.

        Raises:
            CheckpointError: a cursor is past the micro-batch.
        """
        planned = self._checkpoint.log.last_planned()
        if (
            planned is None
            or self._checkpoint.log.has_committed(planned)
            or not self._options.fail_on_data_loss
        ):
            return
        begins = start | (self._checkpoint.log.committed_offset() or {})
        ends = self._checkpoint.log.offset(planned)
        # An end before a ledger's first entry only notes where an unread topic partition begins.
        names = [
            name
            for name, end in ends.items()
            if end.is_beyond(begins.get(name, _NOTHING))
            and (end.position.entry_id >= 0 or end.batch_index is not None)
        ]
        for name, position in self._cursors.positions(names).items():
            begin, end = begins.get(name, _NOTHING).position, ends[name].position
            if moved_to(position, begin) != BEFORE_ALL or position.ledger_id > end.ledger_id:
                raise CheckpointError(
                    f"the subscription {self._config.subscription} has read {name} up to "
                    f"{position}, and batch {planned}, which begins after {begin}, is to be run "
                    f"again: the checkpoint {self._config.stream.checkpoint} is an older copy, or "
                    "the subscription was moved from outside; restore the newest one, or set "
                    "[source] fail_on_data_loss to false to go on with what the topic still has"
                )

    def _check_not_begun(self, tables: list[Table]) -> None:
        """Check that a checkpoint without micro-batches has not lost them.

        Raises:
            CheckpointError: the tables have micro-batches of the stream.
        """
        if self._checkpoint.start() is None:
            return
        for table in tables:
            # It has no micro-batch, so it has written none.
            self._check_last_writer(table, self._checkpoint.number() - 1)

    def _older_checkpoint(self, table: Table, in_table: str, in_checkpoint: str) -> CheckpointError:
        return CheckpointError(
            f"the table at {table.path} {in_table} of the stream {self._config.stream.name}, and "
            f"the checkpoint {self._config.stream.checkpoint} {in_checkpoint}: it is an older "
            "copy; restore the newest one, or, if messages may come twice, remove it and set "
            "starting to cursor to go on at the subscription's position"
        )

    def open_outbox(self, outbox: Outbox) -> None:
        """Open the outbox, if it belongs to checkpoint and table.

        Raises:
            CheckpointError: it is missing, older than the table, or newer than the checkpoint.
        """
        is_there = self._tables.exists(self._tables.main_name)
        committed = self._committed(is_there)
        outbox.begin(committed, self._checkpoint.outbox())
        in_table = self._tables.main.table.outbox_messages(outbox.name) if is_there else None
        self._compare_with_outbox(outbox, committed, in_table)
        self._checkpoint.save_outbox(outbox.name)

    def _committed(self, is_there: bool) -> int | None:
        """Return the last micro-batch of this query that its tables have, by the main one or by
        Spark's log, which has one only once all tables had it: the main table may be another one
        now, or not made yet.

        Args:
            is_there: whether the main table exists.
        """
        query_id, committed = self._checkpoint.log.query_id(), self._checkpoint.log.last_committed()
        if not is_there or query_id is None:
            return committed
        recorded = self._tables.main.table.recorded(self._query_name(query_id))
        return (
            committed
            if recorded is None
            else max(recorded.batch_id, -1 if committed is None else committed)
        )

    def _compare_with_outbox(
        self, outbox: Outbox, committed: int | None, in_table: int | None
    ) -> None:
        """Compare an outbox with checkpoint and main table.

        Args:
            committed: the last micro-batch that the tables have.
            in_table: how many messages the outbox has had by the table.

        Raises:
            CheckpointError: as ``open_outbox``.
        """
        planned = self._checkpoint.log.last_planned()
        if outbox.last_sent > (-1 if planned is None else planned):
            raise CheckpointError(
                f"the outbox {outbox.folder} has sent batch {outbox.last_sent}, which the "
                "checkpoint does not have: it belongs to another one; restore both from one copy"
            )
        outbox_messages = -1 if committed is None else outbox.messages_up_to(committed)
        if in_table is not None and outbox_messages < in_table:
            raise CheckpointError(
                f"the outbox {outbox.folder} has held {outbox_messages} messages, and the table at "
                f"{self._tables.main.table.path} says {in_table}: it is an older copy; restore the "
                "newest one"
            )

    def _query_name(self, query_id: str) -> str:
        return query_name(self._config.stream.name, query_id)


def _in_toml(value: Setting) -> str:
    return "not set" if value is None else json.dumps(value)


def query_name(stream: str, query_id: str) -> str:
    """Return the name of a query in the tables. It contains the checkpoint's id, so that a new
    checkpoint has a new name.
    """
    return f"ledgerlake:{stream}:{query_id}"


def check_reachable(config: Config) -> None:
    """Check, before Spark starts, that the broker answers and knows the topics, and that the stores
    answer.

    Raises:
        TransportError, BrokerError, TopicNotFoundError, SetupError.
    """
    check_stores(config)
    cluster = Cluster(replace(config.source.client, give_up_after_s=0.0))
    try:
        find_topic_partitions(cluster, config.source.topics)
    finally:
        cluster.close()
