"""Compares the tables with their topics, by position and broker index.

The topic's messages after the query's first offset, up to the last micro-batch that it committed,
are compared with the table's rows of that range, if the configuration selects their topic. An entry
in ``rejects`` accounts for its messages, and a single message of a batch there for itself. A
replayed reject accounts for nothing. Chunks are accounted for by their large message, which has the
position of its last chunk. Whether that message is complete is found by the rules of
``assembly.rules`` over all chunks of the range, without limits.

A table that takes all messages of a topic is compared by itself. The others are compared together:
a message has to be in one of them. If one of them has a query or a function, nothing is missing for
certain. Rows have an order in each partition of a table.

A table with the latest messages is compared by key, by position and not by content: it has to have
the latest message that counts for it by the configuration of today, as far as the topic still has
messages of the key (see ``latest_rule``). The pipeline's own code decides which table takes a
message, and so which messages the other tables have to have. Keys without a row are ``missing``,
rows beyond the first of a key are ``duplicate``, and rows of keys that the topic does not have are
``not_checked``.

Topics and tables are read a piece at a time. Messages and rows become records, which are compared
part by part (see ``hashed_parts`` and ``key_comparison``). So memory does not grow with messages
and rows. In memory are the rejects, with up to 32 bytes each, and the positions of the chunks of
incomplete large messages.

    missing        in the topic, neither in the table nor in rejects
    left_out       in the topic, and in no table, because a query or a function makes the rows
    duplicate      rows beyond the first of one position in a table, but for the occurrences of a
                   message that repeats
    out_of_order   rows that come after a later one, inside a file, or, by their times, in a file
                   whose range overlaps another's (rows marked ``late`` are not counted, nor are
                   those in files of other writers, such as Delta's ``OPTIMIZE``)
    not_checked    rows before the first message that the topic still has, or before the start of
                   the checkpoint; a later row without a message is not found. And large messages
                   whose last chunk the topic has and whose first chunk it may have had
    for_other_tables
                   messages that are in no table and were read before the tables were changed:
                   nothing tells which tables have to have them. In a table with the latest messages
                   it counts the keys without a later message
    incomplete_chunks
                   chunks of incomplete large messages that are not in rejects
    not_due        delayed messages that were not due when the last micro-batch was planned, and
                   messages that repeat without an occurrence in the table
    early          rows that were delivered before they were due
    outdated       rows of a table with the latest messages that are not the latest of their key, or
                   whose key was deleted
    undecided      keys of such a table that nothing can decide. The latest message may be a large
                   one, one of an entry in rejects, one that repeats, or one that counted by a
                   schema that is not known any more; the micro-batches decided
                   between two topic partitions; or a topic partition of another stream may have
                   deleted a key without a row
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.client.backoff import with_retries
from ledgerlake.client.cluster import Cluster
from ledgerlake.client.topics import split_partition
from ledgerlake.monitor.progress import counted
from ledgerlake.operators.results import BatchSettings, TopicSchemas
from ledgerlake.operators.table_writer import TopicTables
from ledgerlake.options.table_options import tables_of_topic
from ledgerlake.options.table_topics import routing_warnings
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.known_tables import is_missed
from ledgerlake.pipeline.record_schemas import FIRST_VERSION
from ledgerlake.pipeline.row_settings import selected_now
from ledgerlake.pipeline.start import query_name
from ledgerlake.pipeline.tables import Tables
from ledgerlake.pipeline.wakeups import wakeup_folder
from ledgerlake.reasons import REASONS, REPLAYED
from ledgerlake.source.planning import entry_range
from ledgerlake.source.value_schemas import schemas_of
from ledgerlake.source.wakeup_files import load_times_ms
from ledgerlake.stored.offsets import Offset, PartitionOffset
from ledgerlake.table.open_table import existing_table, no_table
from ledgerlake.verify.entry_set import EntrySet
from ledgerlake.verify.hashed_parts import HashedParts
from ledgerlake.verify.key_comparison import RECORD, compare, entry_hashes, row_records
from ledgerlake.verify.latest_rows import CountingTables, LatestComparison
from ledgerlake.verify.latest_rule import Finding, Span
from ledgerlake.verify.table_rows import (
    RowOrder,
    TableRows,
    by_topic_partition,
    keys_of,
    not_replayed,
    rejected_keys,
    rows_before,
    up_to,
)
from ledgerlake.verify.topic_content import ExpectedMessages, read_topic
from ledgerlake.wire.message_id import BEFORE_ALL

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence

    from deltalake import DeltaTable

    from ledgerlake.operators.results import TableBatch
    from ledgerlake.options.config import Config
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.options.table_options import TableOptions
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.stored.places import Place
    from ledgerlake.verify.latest_rows import CountingMessages
    from ledgerlake.verify.table_rows import Keys, TableFile
    from ledgerlake.wire.message_id import Position

# How long a micro-batch that Spark is about to record is waited for.
_TRIES = 50
_POLL_S = 0.1


# The codes of reasons whose messages have their rows all the same.
_BESIDE_THEIR_MESSAGES = [
    code for code, reason in enumerate(REASONS.values()) if reason.is_beside_its_message
]


@dataclass
class Verdict:
    """The result of a comparison; ``clean`` if nothing is wrong. ``warnings`` say which tables get
    no message, which topics no table takes, and which tables have files without an order.
    """

    messages: int = 0
    missing: int = 0
    left_out: int = 0
    duplicate: int = 0
    out_of_order: int = 0
    rejects: int = 0
    late: int = 0
    not_checked: int = 0
    for_other_tables: int = 0
    incomplete_chunks: int = 0
    not_due: int = 0
    early: int = 0
    outdated: int = 0
    undecided: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return not (
            self.missing or self.duplicate or self.out_of_order or self.early or self.outdated
        )

    def sentence(self) -> str:
        problems = (
            f"{self.missing:,} missing, {self.duplicate:,} duplicate, {self.out_of_order:,} out of "
            "order"
        )
        notes = f"{counted(self.rejects, 'reject', 'rejects')}, {self.late:,} late"
        if self.not_checked:
            notes += (
                f", {self.not_checked:,} not compared: removed from the topic, or before the start "
                "of this checkpoint"
            )
        if self.for_other_tables:
            notes += (
                f", {self.for_other_tables:,} lost or in other tables: read before the tables were "
                "changed"
            )
        if self.incomplete_chunks:
            chunks = counted(self.incomplete_chunks, "chunk", "chunks")
            notes += f", {chunks} of incomplete large messages"
        if self.left_out:
            notes += f", {self.left_out:,} left out by queries"
        if self.not_due:
            delayed = counted(self.not_due, "delayed message", "delayed messages")
            notes += f", {delayed} not due"
        if self.early:
            problems += f", {self.early:,} early"
        if self.outdated:
            problems += f", {self.outdated:,} outdated"
        if self.undecided:
            notes += f", {counted(self.undecided, 'key', 'keys')} undecided"
        return f"{counted(self.messages, 'message', 'messages')}: {problems} ({notes})"

    def add(self, other: Verdict) -> None:
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))


def verify(config: Config) -> Verdict:
    """Compare the tables of a configuration with its topics.

    Raises:
        TableError: a table cannot be read.
        BrokerError, TransportError: the topic cannot be read.
        SetupError: there is no checkpoint, or the temporary folder has no room.
    """
    with contextlib.ExitStack() as stack:
        cluster = Cluster(config.source.client)
        stack.callback(cluster.close)
        tables, start, end, wakeup_times_ms = _open(config, cluster)
        for latest in tables.latest:
            stack.enter_context(latest)
        partitions = []
        for number, name in enumerate(sorted(end)):
            span = entry_range(name, start.get(name, PartitionOffset(BEFORE_ALL)), end[name])
            reached_ms = (
                _reached_ms(end[name], wakeup_times_ms.get(name)) if config.delay.enabled else None
            )
            of_topic = tables.of_topic(split_partition(name)[0])
            earlier_end = tables.earlier_ends.get(name, BEFORE_ALL)
            partitions.append(_Partition(number, span, reached_ms, of_topic, earlier_end))
        comparison = _Comparison(partitions, stack.enter_context(HashedParts(RECORD, entry_hashes)))
        comparison.read_rejects(tables.rejects)
        for partition in partitions:
            comparison.read_topic(config.source, partition)
        for number, table in enumerate(tables.opened()):
            comparison.read_table(number, table)
        verdict = comparison.judge()
        verdict.warnings = (*_warnings(config, end), *comparison.warnings)
        for latest in tables.latest:
            verdict.add(_verify_keys(latest))
        return verdict


def _warnings(config: Config, end: Offset) -> tuple[str, ...]:
    if not end:
        _, committed = Checkpoint(config.checkpoint_place).committed_range()
        why = (
            "the configuration selects none of the topics that the stream has read"
            if committed
            else "no topic partition was read yet"
        )
        return (f"{why}, so nothing was compared",)
    topics = {split_partition(name)[0] for name in end}
    return tuple(routing_warnings(config.table_options, dict.fromkeys(topics)))


@dataclass
class _Partition:
    """A topic partition: the range to compare, and the findings so far.

    ``number`` is the number in its records. ``earlier_end`` is up to where it was read by an
    earlier configuration for other tables. ``rejected`` and ``replayed`` have ledger, entry, batch
    index and reason of rejects, until the topic is read.
    """

    number: int
    span: EntryRange
    reached_ms: int | None
    tables: _TablesOfTopic
    earlier_end: Position
    rejected: list[Keys] = field(default_factory=list)
    replayed: list[Keys] = field(default_factory=list)
    first: Position | None = None


class _Comparison:
    """Reads rejects, topics and tables, in this order, and counts the faults. Messages and rows
    become records, which are compared at the end.
    """

    def __init__(self, partitions: Sequence[_Partition], records: HashedParts) -> None:
        self._partitions = {partition.span.topic_partition: partition for partition in partitions}
        self._records = records
        self._verdict = Verdict()
        self._without_order: dict[Place, set[TableFile]] = {}

    def read_rejects(self, table: TableRows) -> None:
        """Read the entries in rejects. They stay in memory until their topic is read."""
        for _, partition, rows in self._rows(table):
            is_mark = pc.equal(rows["reason"], REPLAYED)
            marks, others = rows.filter(is_mark), rows.filter(pc.invert(is_mark))
            partition.rejected.append(rejected_keys(others, others["reason"]))
            partition.replayed.append(rejected_keys(marks, marks["detail"]))

    def read_topic(self, options: SourceOptions, partition: _Partition) -> None:
        """Read a topic partition."""
        nothing = np.empty((0, 4), dtype=np.int64)
        rejected, replayed = (
            np.concatenate([nothing, *keys]) for keys in (partition.rejected, partition.replayed)
        )
        partition.rejected, partition.replayed = [], []
        # A replay writes nothing into a table with the latest messages.
        latest = {
            name: (table, table.begin(partition.span.topic_partition, rejected[:, :2]))
            for name, table in partition.tables.latest.items()
        }
        chunks = EntrySet(rejected[rejected[:, 2] < 0, :2])
        rejected, rejects = not_replayed(rejected, replayed)
        rejected = rejected[~np.isin(rejected[:, 3], _BESIDE_THEIR_MESSAGES)]
        is_entry = rejected[:, 2] < 0
        entries, messages = EntrySet(rejected[is_entry, :2]), EntrySet(rejected[~is_entry, :3])
        expected = ExpectedMessages(partition.number, entries, self._records, messages, chunks)
        make_counting = partition.tables.counting
        content = read_topic(
            options,
            partition.span,
            partition.reached_ms,
            expected,
            make_counting and make_counting({name: found for name, (_, found) in latest.items()}),
        )
        partition.first, end = content.first, partition.span.end
        decisive = None
        if content.first is not None:
            first, earlier = content.first, partition.earlier_end
            decisive = max(
                (first.ledger_id, first.entry_id), (earlier.ledger_id, earlier.entry_id + 1)
            )
        for table, counting in latest.values():
            table.end(counting, Span(decisive, (end.ledger_id, end.entry_id)))
        self._verdict.rejects += rejects
        self._verdict.incomplete_chunks += content.incomplete_chunks
        self._verdict.not_checked += content.not_checked

    def read_table(self, number: int, table: TableRows) -> None:
        """Read the rows of a table; a second time those files whose rows overlap an earlier one's.

        Args:
            number: the number of its records.
        """
        order = RowOrder()
        for file, partition, rows in self._rows(table):
            if table in partition.tables.groups:
                if file.place is None:
                    self._without_order.setdefault(table.path, set()).add(file)
                else:
                    order.add((file.place, partition.number), file, rows)
                self._take_rows(partition, number, partition.tables.groups[table], rows)
        self._verdict.out_of_order += order.descents
        overlaps = order.overlaps()
        if overlaps:
            for file, partition, rows in self._rows(table, overlaps):
                watermark_us = overlaps[file].get((file.place, partition.number))
                if watermark_us is not None:
                    self._verdict.out_of_order += rows_before(rows, watermark_us)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each table with files whose order was not checked."""
        return tuple(
            f"the order of rows was not checked in {counted(len(files), 'file', 'files')} of the "
            f"table at {path}, which another writer made"
            for path, files in self._without_order.items()
        )

    def judge(self) -> Verdict:
        """Compare all records; return the result."""
        partitions = self._partitions.values()
        groups = np.array(
            [partition.tables.group_count for partition in partitions], dtype=np.int64
        )
        absent = np.zeros((groups.max(initial=0), len(groups)), dtype=np.int64)
        earlier, not_due = np.zeros_like(absent), np.zeros_like(absent)
        ends = [partition.earlier_end for partition in partitions]
        earlier_ends = np.array(
            [(end.ledger_id, end.entry_id) for end in ends], dtype=np.int64
        ).reshape(-1, 2)
        for part in self._records.parts():
            compared = compare(part, groups, earlier_ends)
            self._verdict.duplicate += compared.duplicate
            absent += compared.absent
            earlier += compared.earlier
            not_due += compared.not_due
        for partition in partitions:
            number = partition.number
            partition.tables.count_absent(
                self._verdict,
                absent[:, number].tolist(),
                earlier[:, number].tolist(),
                not_due[:, number].tolist(),
            )
        return self._verdict

    def _rows(
        self, table: TableRows, wanted: Container[object] | None = None
    ) -> Iterator[tuple[TableFile, _Partition, pa.Table]]:
        """Yield the rows that are compared, file after file."""
        for file, batch in table.batches(wanted):
            for name, of_partition in by_topic_partition(batch):
                partition = self._partitions.get(name)
                if partition is not None:
                    rows = up_to(of_partition, partition.span.end)
                    if rows.num_rows:
                        yield file, partition, rows

    def _take_rows(self, partition: _Partition, table: int, group: int, rows: pa.Table) -> None:
        keys = keys_of(rows)
        due_us = pc.fill_null(rows["deliver_at"].cast(pa.int64()), 0).to_numpy()
        self._records.add(row_records(table, group, partition.number, keys, due_us), len(keys))
        self._verdict.messages += len(keys)
        self._verdict.late += int(pc.sum(rows["late"]).as_py() or 0)
        self._verdict.early += int(
            pc.sum(pc.less(rows["delivered_at"], rows["deliver_at"])).as_py() or 0
        )
        self._verdict.not_checked += _before(keys, partition.first)


def _before(rows: Keys, first: Position | None) -> int:
    """Return the number of rows of entries before the first one that the topic still has."""
    if first is None:
        return len(rows)
    ledger_id, entry_id = first.ledger_id, first.entry_id
    return int(
        ((rows[:, 0] < ledger_id) | ((rows[:, 0] == ledger_id) & (rows[:, 1] < entry_id))).sum()
    )


def _verify_keys(table: LatestComparison) -> Verdict:
    rows, duplicate, findings = table.judge()
    return Verdict(
        messages=rows,
        duplicate=duplicate,
        missing=findings[Finding.MISSING],
        outdated=findings[Finding.OUTDATED],
        not_checked=findings[Finding.TRIMMED],
        for_other_tables=findings[Finding.EARLIER],
        undecided=findings[Finding.UNDECIDED],
    )


def _reached_ms(end: PartitionOffset, wakeup_time_ms: int | None) -> int:
    """Return the time up to which delayed messages have left: the broker's time of the last entry,
    or the planner's clock; less if the last micro-batch has left messages that were due.
    """
    reached_ms = max(end.broker_ms or 0, end.clock_ms or 0)
    if wakeup_time_ms is not None and wakeup_time_ms < 0:
        return min(reached_ms, -wakeup_time_ms - 1)
    return reached_ms


def _open(config: Config, cluster: Cluster) -> tuple[_Tables, Offset, Offset, dict[str, int]]:
    """Open the tables; return them with the query's first offset, that of its last committed batch,
    and the wake-up times, which are not newer than the tables.
    """
    checkpoint = Checkpoint(config.checkpoint_place)
    for _ in range(_TRIES):
        wakeup_times_ms = load_times_ms(wakeup_folder(checkpoint))
        start, committed = checkpoint.committed_range()
        topics = config.source.topics
        end = {name: offset for name, offset in committed.items() if topics.includes(name)}
        tables = _Tables(config, cluster, end)
        if not tables.are_ahead(checkpoint):
            break
        # A micro-batch is in the tables, and Spark is about to record it.
        time.sleep(_POLL_S)
    return tables, start, end, wakeup_times_ms


class _Tables:
    """The tables of a configuration, each read once."""

    def __init__(self, config: Config, cluster: Cluster, end: Offset) -> None:
        self._config = config
        # First, because a replay commits to it last: of what it marks there, the others have the
        # rows.
        self.rejects = TableRows(
            config.rejects_place, config.spark, ["message_id", "reason", "detail"]
        )
        self._rows: dict[str, TableRows | None] = {}
        for options in config.table_options:
            if not options.is_template and not options.keeps_latest:
                self._open(options)
        self._cluster = cluster
        recorded = Checkpoint(config.checkpoint_place).selected()
        self.earlier_ends = selected_now(recorded, config, end).earlier_ends
        self._settings: dict[str, TableBatch] = {}
        self._snapshots: dict[str, DeltaTable] = {}
        self._latest: dict[str, LatestComparison] = {}
        if any(options.keeps_latest for options in config.table_options):
            self._open_latest(end)

    def _open_latest(self, end: Offset) -> None:
        tables = Tables(self._config, self._config.checkpoint_place / "ledgerlake" / "staging")
        topics = sorted({split_partition(name)[0] for name in end})
        tables.add_for_topics(topics)
        tables.keep_columns()
        self._settings = tables.settings(tables.messages)
        of_topics = {table for topic in topics for table in tables.of_topic(topic)}
        for table in (table for table in of_topics if table.options.keeps_latest):
            name, place = table.options.name, table.options.place
            if (snapshot := existing_table(place)) is not None:
                self._snapshots[name] = snapshot
                self._latest[name] = LatestComparison(table, snapshot, end.keys())
            elif is_missed(self._config, name, place):
                raise no_table(place)

    @property
    def latest(self) -> list[LatestComparison]:
        """Return the tables with the latest messages that exist."""
        return list(self._latest.values())

    def are_ahead(self, checkpoint: Checkpoint) -> bool:
        """Return whether a table with the latest messages has a micro-batch that Spark has not
        recorded yet.
        """
        query_id, committed = checkpoint.log.query_id(), checkpoint.log.last_committed()
        if query_id is None or committed is None:
            return False
        name = query_name(self._config.stream.name, query_id)
        return any(
            (table.transaction_version(name) or 0) > committed for table in self._snapshots.values()
        )

    def of_topic(self, topic: str) -> _TablesOfTopic:
        """Return the tables that take messages of a topic."""
        latest: dict[str, LatestComparison] = {}
        whole: list[TableRows] = []
        parts: list[TableRows] = []
        # A table that does not exist has taken nothing.
        there: list[TableOptions] = []
        for table in tables_of_topic(self._config.table_options, topic):
            if table.name in self._latest:
                latest[table.name] = self._latest[table.name]
            elif table.keeps_latest or (rows := self._open(table)) is None:
                continue
            else:
                (parts if table.drops_messages else whole).append(rows)
            there.append(table)
        counting = self._counting(topic, there, has_whole=bool(whole)) if latest else None
        leaves_out = any(table.computes_rows for table in there if not table.keeps_latest)
        return _TablesOfTopic(whole, parts, latest, counting, leaves_out=leaves_out)

    def _counting(
        self, topic: str, tables: Sequence[TableOptions], *, has_whole: bool
    ) -> Callable[[Mapping[str, CountingMessages]], CountingTables]:
        """Return what takes messages for the tables with the latest messages, by today's schemas.

        Args:
            tables: those that exist.
            has_whole: one of the others takes all messages. Then the others matter only if a table
                with the latest messages gets what no other one takes.

        Raises:
            BrokerError, TransportError: the registry of schemas cannot be asked.
        """
        latest = [table for table in tables if table.keeps_latest]
        # A newest version may have been deleted, and the first one still be there.
        newest, oldest = with_retries(
            lambda: self._cluster.schemas([(topic, None), (topic, FIRST_VERSION)]),
            self._cluster.settings.give_up_after_s,
        )
        schemas = TopicSchemas.of({} if newest is None else {topic: newest})
        client = self._config.source.client
        deciding = TopicTables(
            latest if has_whole and not any(table.is_default for table in latest) else tables,
            topic,
            client,
            BatchSettings(0, self._settings, [], schemas),
        )
        return partial(
            CountingTables,
            deciding,
            of_version=schemas_of(client, topic, schemas.asked),
            had_schemas=newest is not None or oldest is not None,
            others_take_all=has_whole,
        )

    def opened(self) -> list[TableRows]:
        """Return the tables that exist, of those that are asked for; without those with the latest
        messages.
        """
        return [rows for rows in self._rows.values() if rows is not None]

    def _open(self, options: TableOptions) -> TableRows | None:
        """Return the rows of a table; None if it does not exist yet."""
        if options.name not in self._rows:
            place = options.place
            is_expected = existing_table(place) is not None or is_missed(
                self._config, options.name, place
            )
            self._rows[options.name] = TableRows(place, self._config.spark) if is_expected else None
        return self._rows[options.name]


class _TablesOfTopic:
    """The tables that take messages of a topic. ``groups`` has the number of each one's group (see
    ``key_comparison``), -1 for none; tables with the ``latest`` messages are not among them.

    Args:
        whole: they take all messages.
        parts: they take some of them.
        latest: by name.
        counting: takes messages for ``latest``, by what counts for each; None if there are none.
        leaves_out: a query or a function may leave out messages of ``parts``.
    """

    def __init__(
        self,
        whole: list[TableRows],
        parts: list[TableRows],
        latest: dict[str, LatestComparison],
        counting: Callable[[Mapping[str, CountingMessages]], CountingTables] | None,
        *,
        leaves_out: bool,
    ) -> None:
        self.latest, self.counting = latest, counting
        self._has_whole, self._leaves_out = bool(whole), leaves_out
        self.groups = {table: number for number, table in enumerate(whole)}
        self.groups |= dict.fromkeys(parts, -1 if whole else 0)
        self.group_count = len(whole) or 1

    def count_absent(
        self,
        verdict: Verdict,
        absent: Sequence[int],
        earlier: Sequence[int],
        not_due: Sequence[int],
    ) -> None:
        """Count the messages of a topic partition that the tables of a group do not have.

        Args:
            absent: those that are due, by group.
            earlier: due ones too, that were read for other tables, by group.
            not_due: those that are not due, by group.
        """
        # A message that is not due is no fault, whatever a query would make of it.
        verdict.not_due += max(not_due)
        if self._leaves_out and not self._has_whole:
            verdict.left_out += absent[0] + earlier[0]
        else:
            verdict.missing += sum(absent)
            verdict.for_other_tables += sum(earlier)
