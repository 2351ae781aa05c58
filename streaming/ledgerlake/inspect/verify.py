"""Compares the table with its topics, by position and broker index.

The topic's messages after the query's first offset, up to the last micro-batch that it committed,
are compared with the table's rows of that range. An entry in ``rejects`` accounts for its messages.
Chunks are accounted for by their large message, which has the position of its last chunk. Whether
that message is complete is found by the rules of ``assembly.rules`` over all chunks of the range,
without limits.

    missing        in the topic, neither in the table nor in rejects
    duplicate      rows beyond the first of one position
    out_of_order   rows that come after a later one, inside a file, or in a file whose range overlaps another's
                   (rows marked ``late`` are not counted)
    not_checked    rows of positions that the topic no longer has
    open_chunks    chunks of incomplete large messages
    waiting        delayed messages that were not due when the last micro-batch was planned
    early          rows that were delivered before they were due
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from ledgerlake.client.cluster import Cluster
from ledgerlake.inspect.table_rows import Keys, TableRows, entries_of, keys_of, out_of_order, packed
from ledgerlake.inspect.topic_content import read_topic
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.source.bounds import resolve_end
from ledgerlake.source.planning import EntryRange, entry_range
from ledgerlake.stored.offsets import Offset, PartitionOffset
from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ledgerlake.client.topics import TopicSelection
    from ledgerlake.options.config import Config
    from ledgerlake.options.source_options import SourceOptions


@dataclass
class Verdict:
    """The result of a comparison; ``clean`` if nothing is wrong."""

    messages: int = 0
    missing: int = 0
    duplicate: int = 0
    out_of_order: int = 0
    rejects: int = 0
    late: int = 0
    not_checked: int = 0
    open_chunks: int = 0
    waiting: int = 0
    early: int = 0

    @property
    def clean(self) -> bool:
        return not (self.missing or self.duplicate or self.out_of_order or self.early)

    def sentence(self) -> str:
        problems = f"{self.missing:,} missing, {self.duplicate:,} duplicate, {self.out_of_order:,} out of order"
        notes = f"{self.rejects:,} rejects, {self.late:,} late, {self.not_checked:,} no longer in the topic"
        if self.open_chunks:
            notes += f", {self.open_chunks:,} chunks of messages that are not whole yet"
        if self.waiting:
            notes += f", {self.waiting:,} delayed messages wait"
        if self.early:
            problems += f", {self.early:,} early"
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
        start, end = _committed_range(Checkpoint(config.checkpoint_place), cluster, options.topics)
        table = TableRows(config.messages_place, config.spark)
        rejected = TableRows(config.rejects_place, config.spark)
        verdict = Verdict()
        for name in sorted(end):
            begin = start.get(name, PartitionOffset(BEFORE_ALL))
            span = entry_range(name, begin, end[name])
            reached_ms = _reached_ms(end[name]) if config.delay.enabled else None
            verdict.add(_verify_partition(options, span, reached_ms, table, rejected))
        return verdict
    finally:
        cluster.close()


def _reached_ms(end: PartitionOffset) -> int:
    """Return the time up to which delayed messages are due: the broker's time of the last entry, or
    the planner's clock.
    """
    broker_ms = end.time_ms if end.index is not None else None
    return max(broker_ms or 0, end.clock_ms or 0)


def _verify_partition(
    options: SourceOptions, span: EntryRange, reached_ms: int | None, table: TableRows, rejected: TableRows
) -> Verdict:
    in_topic = read_topic(options, span, reached_ms)
    expected, bad_entries = in_topic.messages, in_topic.bad_entries
    files = table.files_of(span.topic_partition, span.end)
    rows = np.concatenate([keys_of(file) for file in files]) if files else np.empty((0, 4), dtype=np.int64)
    reject_files = rejected.files_of(span.topic_partition, span.end)
    reject_entries = (
        np.concatenate([entries_of(file) for file in reject_files])
        if reject_files
        else np.empty((0, 2), dtype=np.int64)
    )
    distinct = np.unique(packed(rows))
    missing = _absent(expected, distinct, reject_entries)
    missing += int((~np.isin(packed(bad_entries), packed(reject_entries))).sum())
    row_ids, reject_ids = set(map(tuple, rows[:, :2].tolist())), set(map(tuple, reject_entries.tolist()))
    missing += _missing_large(in_topic.large, row_ids, reject_ids)
    delayed = _absent(in_topic.delayed, distinct, reject_entries)
    delayed += _missing_large(in_topic.large_delayed, row_ids, reject_ids)
    return Verdict(
        messages=len(rows),
        missing=missing,
        duplicate=len(rows) - len(distinct),
        out_of_order=out_of_order(files),
        rejects=len(reject_entries),
        late=sum(int(pc.sum(file["late"]).as_py() or 0) for file in files),
        not_checked=_before(rows, in_topic.first),
        open_chunks=in_topic.open_chunks,
        waiting=delayed,
        early=sum(int(pc.sum(pc.less(file["delivered_at"], file["deliver_at"])).as_py() or 0) for file in files),
    )


def _absent(keys: Keys, rows: NDArray[np.void], rejected: Keys) -> int:
    """Return the number of messages that are neither rows of the table nor of an entry in rejects."""
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
