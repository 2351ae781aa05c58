"""Compares the tables with their topics, by position and broker index.

The topic's messages after the query's first offset, up to the last micro-batch that it committed,
are compared with the table's rows of that range. An entry in ``rejects`` accounts for its messages.
Chunks are accounted for by their large message, which has the position of its last chunk. Whether
that message is complete is found by the rules of ``assembly.rules`` over all chunks of the range,
without limits.

A table that takes all messages of a topic is compared by itself. The others are compared together:
a message has to be in one of them. If one of them has a query or a function, nothing is missing for
certain. Rows have an order in each partition of a table.

A table with the latest messages is compared by key, by position and not by content: it has to have
the latest message that counts for it by the configuration of today, as far as the topic still has
messages of the key (see ``latest_rule``). Keys without a row are ``missing``, rows beyond the first
of a key are ``duplicate``, and rows of keys that the topic does not have are ``not_checked``.

    missing        in the topic, neither in the table nor in rejects
    left_out       in the topic, and in no table, because a query or a function makes the rows
    duplicate      rows beyond the first of one position in a table, but for the occurrences of a message that repeats
    out_of_order   rows that come after a later one, inside a file, or in a file whose range overlaps another's
                   (rows marked ``late`` are not counted)
    not_checked    rows of positions that the topic no longer has
    open_chunks    chunks of incomplete large messages
    waiting        delayed messages that were not due when the last micro-batch was planned, and messages that repeat of
                   which no occurrence is in the table
    early          rows that were delivered before they were due
    outdated       rows of a table with the latest messages that are not the latest of their key, or whose key was deleted
    undecided      keys of such a table that nothing can decide: a large message, one of an entry in rejects, or one that
                   repeats, may be the latest, or the micro-batches decided between two topic partitions
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.topics import split_partition
from ledgerlake.inspect.latest_rows import LatestComparison
from ledgerlake.inspect.latest_rule import Finding, Span
from ledgerlake.inspect.table_rows import Keys, TableRows, entries_of, keys_of, out_of_order
from ledgerlake.inspect.topic_content import read_topic
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.start import query_name
from ledgerlake.pipeline.wakeups import wakeup_folder
from ledgerlake.source.bounds import resolve_end
from ledgerlake.source.planning import EntryRange, entry_range
from ledgerlake.source.wakeup_files import load_wakeup_times
from ledgerlake.stored.offsets import Offset, PartitionOffset
from ledgerlake.table.delta_table import existing_table
from ledgerlake.table.ordered_files import packed
from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ledgerlake.client.topics import TopicSelection
    from ledgerlake.inspect.topic_content import TopicContent
    from ledgerlake.options.config import Config
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.options.table_options import TableOptions

# How long a micro-batch that Spark is about to record is waited for.
_TRIES = 50
_POLL_S = 0.1


@dataclass
class Verdict:
    """The result of a comparison; ``clean`` if nothing is wrong."""

    messages: int = 0
    missing: int = 0
    left_out: int = 0
    duplicate: int = 0
    out_of_order: int = 0
    rejects: int = 0
    late: int = 0
    not_checked: int = 0
    open_chunks: int = 0
    waiting: int = 0
    early: int = 0
    outdated: int = 0
    undecided: int = 0

    @property
    def clean(self) -> bool:
        return not (self.missing or self.duplicate or self.out_of_order or self.early or self.outdated)

    def sentence(self) -> str:
        problems = f"{self.missing:,} missing, {self.duplicate:,} duplicate, {self.out_of_order:,} out of order"
        notes = f"{self.rejects:,} rejects, {self.late:,} late, {self.not_checked:,} no longer in the topic"
        if self.open_chunks:
            notes += f", {self.open_chunks:,} chunks of messages that are not whole yet"
        if self.left_out:
            notes += f", {self.left_out:,} left out by queries"
        if self.waiting:
            notes += f", {self.waiting:,} delayed messages wait"
        if self.early:
            problems += f", {self.early:,} early"
        if self.outdated:
            problems += f", {self.outdated:,} outdated"
        if self.undecided:
            notes += f", {self.undecided:,} keys undecided"
        return f"{self.messages:,} messages: {problems} ({notes})"

    def add(self, other: Verdict) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def verify(config: Config) -> Verdict:
    """Compare the tables of a configuration with its topics.

    Raises:
        TableError: a table cannot be read.
        BrokerError, TransportError: the topic cannot be read.
    """
    options = config.source
    cluster = Cluster(options.client)
    try:
        tables, start, end, wakeup_times_ms = _open(config, cluster)
        verdict = Verdict()
        for name in sorted(end):
            begin = start.get(name, PartitionOffset(BEFORE_ALL))
            span = entry_range(name, begin, end[name])
            reached_ms = _reached_ms(end[name], wakeup_times_ms.get(name)) if config.delay.enabled else None
            verdict.add(_verify_partition(options, span, reached_ms, tables))
        for table in tables.latest:
            verdict.add(_verify_keys(table))
        return verdict
    finally:
        cluster.close()


def _reached_ms(end: PartitionOffset, wakeup_time_ms: int | None) -> int:
    """Return the time up to which delayed messages have left: the broker's time of the last entry, or
    the planner's clock; less if the last micro-batch has left messages that were due.
    """
    broker_ms = end.time_ms if end.index is not None else None
    reached_ms = max(broker_ms or 0, end.clock_ms or 0)
    if wakeup_time_ms is not None and wakeup_time_ms < 0:
        return min(reached_ms, -wakeup_time_ms - 1)
    return reached_ms


def _open(config: Config, cluster: Cluster) -> tuple[_Tables, Offset, Offset, dict[str, int]]:
    """Open the tables; return them with the query's first offset, that of its last committed batch,
    and the wake-up times, which are not newer than the tables.
    """
    checkpoint = Checkpoint(config.checkpoint_place)
    for _ in range(_TRIES):
        wakeup_times_ms = load_wakeup_times(wakeup_folder(checkpoint)) or {}
        start, end = _committed_range(checkpoint, cluster, config.source.topics)
        tables = _Tables(config, cluster, end)
        if not tables.are_ahead(checkpoint):
            break
        # A micro-batch is in the tables, and Spark is about to record it.
        time.sleep(_POLL_S)
    return tables, start, end, wakeup_times_ms


class _Tables:
    """The tables of a configuration, each read once. ``latest`` are those with the latest messages
    that exist.
    """

    def __init__(self, config: Config, cluster: Cluster, end: Offset) -> None:
        self._config = config
        self._rows: dict[str, TableRows | None] = {}
        for options in config.table_options:
            if not options.is_template and not options.keeps_latest:
                self._open(options)
        self.rejects = TableRows(config.rejects_place, config.spark)
        topics = sorted({split_partition(name)[0] for name in end})
        of_topics = {
            options.of_topic(topic).name: options.of_topic(topic)
            for options in config.table_options
            for topic in topics
            if options.keeps_latest and options.takes_topic(topic)
        }
        self._snapshots = {
            name: snapshot
            for name, options in of_topics.items()
            if (snapshot := existing_table(options.place)) is not None
        }
        self.latest = [
            LatestComparison(config, of_topics[name], snapshot, cluster) for name, snapshot in self._snapshots.items()
        ]

    def are_ahead(self, checkpoint: Checkpoint) -> bool:
        """Return whether a table with the latest messages has a micro-batch that Spark has not
        recorded yet.
        """
        query_id, committed = checkpoint.log.query_id(), checkpoint.log.last_committed()
        if query_id is None or committed is None:
            return False
        name = query_name(self._config.stream.name, query_id)
        return any((table.transaction_version(name) or 0) > committed for table in self._snapshots.values())

    def of_topic(self, topic: str) -> tuple[list[TableRows], list[TableRows], bool]:
        """Return the tables that take all messages of a topic, those that take some of them, and
        whether messages may be left out of the latter.
        """
        taking = [options.of_topic(topic) for options in self._config.table_options if options.takes_topic(topic)]
        leaves_out = any(table.makes_records or table.keeps_latest for table in taking)
        taking = [table for table in taking if not table.keeps_latest]
        opened = [(options, self._open(options)) for options in taking]
        there = [(options, rows) for options, rows in opened if rows is not None]
        whole = [rows for options, rows in there if not options.drops_messages]
        parts = [rows for options, rows in there if options.drops_messages]
        return whole, parts, leaves_out

    def _open(self, options: TableOptions) -> TableRows | None:
        """Return the rows of a table; None if it does not exist yet."""
        if options.name not in self._rows:
            is_missing = options.name != self._config.main_table and existing_table(options.place) is None
            self._rows[options.name] = None if is_missing else TableRows(options.place, self._config.spark)
        return self._rows[options.name]


def _verify_partition(options: SourceOptions, span: EntryRange, reached_ms: int | None, tables: _Tables) -> Verdict:
    topic, partition = split_partition(span.topic_partition)
    whole, parts, leaves_out = tables.of_topic(topic)
    reject_files = tables.rejects.files_of(span.topic_partition, span.end)
    reject_entries = (
        np.concatenate([entries_of(file) for file in reject_files])
        if reject_files
        else np.empty((0, 2), dtype=np.int64)
    )
    latest = [
        (table, table.begin(topic, partition, reject_entries)) for table in tables.latest if table.takes_topic(topic)
    ]
    in_topic = read_topic(options, span, reached_ms, [counting for _, counting in latest])
    first = None if in_topic.first is None else (in_topic.first.ledger_id, in_topic.first.entry_id)
    for table, counting in latest:
        table.end(counting, Span(first, (span.end.ledger_id, span.end.entry_id)))
    verdict = Verdict(rejects=len(reject_entries), open_chunks=in_topic.open_chunks)
    verdict.missing = int((~np.isin(packed(in_topic.bad_entries), packed(reject_entries))).sum())
    for table_rows in whole:
        rows = _judge_rows(verdict, table_rows, span, in_topic.first)
        missing, waiting = _compare(in_topic, rows, reject_entries)
        verdict.missing += missing
        verdict.waiting = max(verdict.waiting, waiting)
    rows_of_parts = [_judge_rows(verdict, table, span, in_topic.first) for table in parts]
    if not whole:
        together = np.concatenate([np.empty((0, 4), dtype=np.int64), *rows_of_parts])
        absent, waiting = _compare(in_topic, together, reject_entries)
        if latest:
            # An absent message may be a row there, or have been one. Those tables are compared by key.
            verdict.waiting = waiting
        elif leaves_out:
            verdict.left_out += absent
        else:
            verdict.missing += absent
            verdict.waiting = waiting
    return verdict


def _verify_keys(table: LatestComparison) -> Verdict:
    rows, duplicate, findings = table.judge()
    return Verdict(
        messages=rows,
        duplicate=duplicate,
        missing=findings[Finding.MISSING],
        outdated=findings[Finding.OUTDATED],
        not_checked=findings[Finding.TRIMMED],
        undecided=findings[Finding.UNDECIDED],
    )


def _judge_rows(verdict: Verdict, table: TableRows, span: EntryRange, first: Position | None) -> Keys:
    """Count what is wrong with a table's rows of a topic partition; return their keys.

    Args:
        first: the first entry that the topic still has.
    """
    partitions = table.partitions_of(span.topic_partition, span.end)
    files = [file for partition in partitions for file in partition]
    rows: Keys = np.concatenate([np.empty((0, 4), dtype=np.int64), *map(keys_of, files)])
    verdict.messages += len(rows)
    # The occurrences of a message that repeats have one position, and each a time of its own.
    due_us = [pc.fill_null(file["deliver_at"].cast(pa.int64()), 0).to_numpy() for file in files]
    with_due = np.column_stack([rows, np.concatenate([np.empty(0, dtype=np.int64), *due_us])])
    verdict.duplicate += len(rows) - len(np.unique(packed(with_due)))
    verdict.out_of_order += sum(map(out_of_order, partitions))
    verdict.late += sum(int(pc.sum(file["late"]).as_py() or 0) for file in files)
    verdict.not_checked += _before(rows, first)
    verdict.early += sum(int(pc.sum(pc.less(file["delivered_at"], file["deliver_at"])).as_py() or 0) for file in files)
    return rows


def _compare(in_topic: TopicContent, rows: Keys, reject_entries: Keys) -> tuple[int, int]:
    """Return how many messages are neither among the rows nor in rejects: due ones, and those that
    wait.
    """
    distinct = np.unique(packed(rows))
    row_ids, reject_ids = set(map(tuple, rows[:, :2].tolist())), set(map(tuple, reject_entries.tolist()))
    absent = _absent(in_topic.messages, distinct, reject_entries) + _missing_large(in_topic.large, row_ids, reject_ids)
    waiting = _absent(in_topic.delayed, distinct, reject_entries)
    return absent, waiting + _missing_large(in_topic.large_delayed, row_ids, reject_ids)


def _absent(keys: Keys, rows: NDArray[np.void], rejected: Keys) -> int:
    """Return the number of messages that are neither rows of the table nor of an entry in
    rejects.
    """
    in_rejects = np.isin(packed(keys[:, :2]), packed(rejected))
    return int((~np.isin(packed(keys), rows) & ~in_rejects).sum())


def _missing_large(large: list[tuple[Position, ...]], rows: set[Any], rejected: set[Any]) -> int:
    """Return the number of large messages and single chunks that are missing: the last chunk is not
    in the table, and not all chunks are in rejects.
    """
    missing = 0
    for positions in large:
        ids = [(position.ledger_id, position.entry_id) for position in positions]
        in_table = len(ids) > 1 and ids[-1] in rows
        missing += not in_table and not rejected.issuperset(ids)
    return missing


def _before(rows: Keys, first: Position | None) -> int:
    """Return the number of rows of entries before the first one that the topic still has."""
    if first is None:
        return len(rows)
    ledger_id, entry_id = first.ledger_id, first.entry_id
    return int(((rows[:, 0] < ledger_id) | ((rows[:, 0] == ledger_id) & (rows[:, 1] < entry_id))).sum())


def _committed_range(checkpoint: Checkpoint, cluster: Cluster, topics: TopicSelection) -> tuple[Offset, Offset]:
    """Return the query's first offset and that of its last committed batch; the range of all
    entries if there is no checkpoint.
    """
    end = checkpoint.log.committed_offset()
    if end is not None:
        return checkpoint.start() or {}, end
    return {}, {name: resolve_end(cluster, name, "latest") for name in cluster.all_partitions(topics)}
