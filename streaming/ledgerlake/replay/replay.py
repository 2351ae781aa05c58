"""Puts rejects through again that fit by now: a key is there, a schema or a query was corrected, a
limit was raised.

A row of ``rejects`` with its entry is decoded as the pipeline would decode it now, and its messages
go into the tables that take them and lack them, marked ``late``. Then a row of the reason
``replayed`` says so in ``rejects``, with the former reason in ``detail``. A reject that still does
not fit stays as it is. If only some messages of a batch fit, each other one becomes a reject of its
own, unless a query or a function leaves it out: as in a run, such a message is done. But an entry
stays a reject if no table gets a row from it.

Rejects are replayed in parts (see ``replay_rejects``). Each part is committed to all of its tables
or to none (see ``replay_parts``).

A micro-batch that has rejects and is not finished has messages in no table yet. So after the
rejects were read, the replay waits until Spark has recorded the last micro-batch that was planned.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from deltalake import QueryBuilder

from ledgerlake.client.topics import join_partition
from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.decode.rejects import reject_rows
from ledgerlake.errors import CheckpointError, SetupError
from ledgerlake.operators.partition_writer import misfit_rejects
from ledgerlake.operators.results import BatchSettings
from ledgerlake.operators.table_writer import TableWriters
from ledgerlake.options.config import REJECTS_TABLE
from ledgerlake.pipeline.components import make_components
from ledgerlake.reasons import (
    CHUNK_EVICTED,
    CHUNK_EXPIRED,
    CHUNK_ORPHAN,
    REASONS,
    REPLAYED,
)
from ledgerlake.replay.replay_messages import (
    Decoded,
    by_plain_size,
    large_message,
    messages_of_entries,
)
from ledgerlake.replay.replay_parts import Parts
from ledgerlake.replay.replay_rejects import RejectsToReplay
from ledgerlake.source.planning import entry_range
from ledgerlake.source.range_reader import batch_ranges
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.table.open_table import no_table, not_readable, open_delta
from ledgerlake.table.ordered_files import BufferedWriter, DataFile, data_folder, packed
from ledgerlake.table.spark_table import SparkTable
from ledgerlake.values.record_columns import PULSAR_COLUMN
from ledgerlake.wire.message_id import BEFORE_ALL

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ledgerlake.decode.messages import BatchRange
    from ledgerlake.options.config import Config
    from ledgerlake.options.table_options import TableOptions
    from ledgerlake.pipeline.components import Components
    from ledgerlake.stored.offsets import Offset
    from ledgerlake.values.record_rows import Misfit
    from ledgerlake.wire.message_id import Position

_log = logging.getLogger(__name__)

# The reasons of rejects that may fit later.
REPLAYABLE = tuple(reason for reason, declared in REASONS.items() if declared.can_be_replayed)

_POSITION = ("ledger_id", "entry_id", "batch_index")

# What the rows of a large message have in common, however often its chunks are sent.
_SENT = ("producer_name", "sequence_id", "publish_time")
_Sent = tuple[str, int | None, int | None]

# A topic partition, and what ``replay_rejects.FoundReject`` has as ``large_message``.
_LargeKey = tuple[TopicPartition, tuple[str, str, int]]

_NO_LARGE = (
    "not all of its chunks are here, they are larger than a message may be or cannot be joined, or "
    "it is delayed, and was rejected before it was due, is not due yet or has expired"
)

_NO_ROW = (
    "it cannot be decoded, lacks the message_payload_processor that is to read it, was rejected "
    "before it was due, is not due yet, has expired, repeats, has a bad schedule, or no table gets "
    "it anew"
)

_PREFIX = "part-00000000-00000"

_LEFT_OUT = "the query or the function of the table leaves this message out"

# No time is later, so each row of a replay is late.
_LATEST_US = 2**62

# How long a micro-batch in work is waited for, and after how long that is said.
_BATCH_S, _TOLD_S = 600.0, 10.0
_POLL_S = 0.2


@dataclass
class Replayed:
    """The result of a replay. It counts by reason the rejects that became messages (``replayed``)
    and the rejects that did not (``left``). ``why`` has the cause for the last one that did not.
    ``left_out`` counts the rejects of topics that the configuration does not read.
    """

    replayed: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    why: dict[str, str] = field(default_factory=dict)
    left_out: int = 0


def replay(config: Config, reasons: Sequence[str] = ()) -> Replayed:
    """Put the rejects of a configuration through again.

    Args:
        reasons: only those; all that may fit by now if there are none.

    Raises:
        SetupError: a reason cannot be replayed, there is no checkpoint, or delta-spark writes a
        table.
        TableError: a table cannot be read or written.
        BrokerError, TransportError: the registry of schemas cannot be asked.
    """
    unknown = [reason for reason in reasons if reason not in REPLAYABLE]
    if unknown:
        raise SetupError(
            f"rejects of {unknown[0]} cannot be replayed; the reasons that can are "
            f"{', '.join(REPLAYABLE)}"
        )
    components = make_components(config)
    try:
        return _Replay(config, components).run(_with_late_chunks(reasons) or REPLAYABLE)
    finally:
        components.cluster.close()


def _with_late_chunks(reasons: Sequence[str]) -> tuple[str, ...]:
    """Return reasons with that of chunks which came when their message had been given up."""
    is_given_up = not {CHUNK_EXPIRED, CHUNK_EVICTED}.isdisjoint(reasons)
    return (*reasons, CHUNK_ORPHAN) if is_given_up else tuple(reasons)


class _Replay:
    def __init__(self, config: Config, components: Components) -> None:
        self._config = config
        # A row of an earlier message would take the place of a later one.
        self._options = [table for table in config.table_options if not table.keeps_latest]
        self._unwritten = [table for table in config.table_options if table.keeps_latest]
        self._checkpoint = checkpoint = components.checkpoint
        # It alone tells of a micro-batch that is not finished.
        checkpoint.existing_start()
        self._log = checkpoint.log
        self._tables = components.tables
        self._schemas = components.schemas
        self._compare = components.start.compare_beside_a_run
        self._parts = Parts(checkpoint.folder / "ledgerlake", self._tables, config.stream.name)
        # The large messages that were replayed. Other chunks that say they are of one follow it.
        self._large: set[_LargeKey] = set()
        self._sent: set[tuple[TopicPartition, _Sent]] = set()
        self._start: Offset = {}
        self._end: Offset = {}
        self.result = Replayed()

    def run(self, reasons: Sequence[str]) -> Replayed:
        unfinished = self._parts.unfinished()
        if unfinished is not None:
            self._open(unfinished.topics)
            # The tables may have lost the columns of its files since they were written.
            self._schemas.learn(unfinished.topics)
            self._parts.commit(unfinished)
        topics = self._config.source.topics
        rejects = RejectsToReplay(
            self._config.rejects_place,
            reasons,
            lambda topic, partition: topics.includes(join_partition(topic, partition)),
            self._config.chunks.max_message_bytes,
        )
        self.result.left_out = rejects.left_out
        self._await_last_batch()
        self._start, self._end = self._checkpoint.committed_range()
        topics_with_rejects = sorted({topic for topic, _ in rejects.sources})
        if topics_with_rejects:
            # What a start of the pipeline refuses is refused here too, before a table gets columns.
            self._open(topics_with_rejects, [join_partition(*source) for source in rejects.sources])
            self._schemas.learn(topics_with_rejects)
        for rows in rejects.parts():
            self._replay(rows)
        return self.result

    def _await_last_batch(self) -> None:
        """Wait until the last micro-batch that was planned is finished.

        Raises:
            CheckpointError: it is not, since the pipeline does not run.
        """
        planned, stream = self._log.last_planned(), self._config.stream.name
        began_s, is_told = time.monotonic(), False
        while planned is not None and not self._log.has_committed(planned):
            waited_s = time.monotonic() - began_s
            if waited_s > _BATCH_S:
                raise CheckpointError(
                    f"batch {planned} of the stream {stream} is not finished, so its rejects "
                    "cannot be told from its messages; run the pipeline with --once, then replay"
                )
            if waited_s > _TOLD_S and not is_told:
                is_told = True
                _log.warning(
                    "batch %d of the stream %s is not finished, and is waited for; if the pipeline "
                    "does not run, run it with --once",
                    planned,
                    stream,
                )
            time.sleep(_POLL_S)

    def _replay(self, rejects: list[dict[str, Any]]) -> None:
        topics = sorted({reject["topic"] for reject in rejects})
        schemas = self._schemas.learn(topics, topics)
        self._tables.create()
        self._parts.begin()
        known = self._tables.settings(self._tables.messages)
        marks: list[pa.Table] = []
        files: dict[str, list[DataFile]] = {}
        for source in sorted({(reject["topic"], reject["partition"]) for reject in rejects}):
            of_partition = [
                reject for reject in rejects if (reject["topic"], reject["partition"]) == source
            ]
            late = {join_partition(*source): _LATEST_US}
            tables = {
                name: replace(settings, watermark_us=late) for name, settings in known.items()
            }
            batch = BatchSettings(0, tables, [], schemas)
            writers = TableWriters(
                self._options,
                TopicPartition(*source),
                self._config.source.client,
                batch,
                _PREFIX,
                self._unwritten,
            )
            marks += self._write(of_partition, TopicPartition(*source), writers)
            for writer in writers.with_rows:
                files.setdefault(writer.table.name, []).extend(writer.finish(None).files)
        if marks or any(files.values()):
            self._parts.add(topics, files | {REJECTS_TABLE: self._rows_of_rejects(marks)})

    def _rows_of_rejects(self, rows: list[pa.Table]) -> list[DataFile]:
        rejects = self._tables.rejects
        writer = BufferedWriter(data_folder(rejects.folder, rejects.schema, _PREFIX))
        for table in rows:
            writer.write(table)
        return writer.finish()

    def _open(self, topics: Iterable[str], topic_partitions: Iterable[str] = ()) -> None:
        """Open the tables of topics.

        Raises:
            As ``Start.compare_beside_a_run``.
            SetupError: delta-spark writes a table.
            TableError: a table cannot be opened, or was removed.
        """
        self._tables.add_for_topics(topics)
        for table in self._tables.by_name.values():
            if isinstance(table, SparkTable):
                raise SetupError(
                    f"rejects cannot be replayed into the table at {table.path}, which delta-spark "
                    "writes"
                )
        removed = self._compare(topic_partitions, self._tables.check(None))
        if removed:
            # Only a start may forget it, and would refuse a new one.
            raise no_table(self._tables.by_name[removed[0]].path)

    def _write(
        self, rejects: list[dict[str, Any]], source: TopicPartition, writers: TableWriters
    ) -> Iterator[pa.Table]:
        """Write the messages of rejects that fit; yield new rows of rejects."""
        entries: list[dict[str, Any]] = []
        chunks: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
        for reject in rejects:
            message = reject["large_message"]
            if message is None:
                entries.append(reject)
            else:
                chunks.setdefault(message, []).append(reject)
        partly = self._partly_read(join_partition(source.topic, source.partition))
        for part in by_plain_size(entries):
            decoded = messages_of_entries(self._config, part, source, partly)
            alone = [[reject] for reject in part]
            yield from self._write_messages(decoded, alone, source, writers)
        for key, of_message in chunks.items():
            yield from self._write_large((source, key), of_message, writers)

    def _partly_read(self, name: str) -> dict[Position, BatchRange]:
        """Return the entries of a topic partition that the stream has read in part."""
        unread = PartitionOffset(BEFORE_ALL)
        start, end = self._start.get(name, unread), self._end.get(name, unread)
        return batch_ranges(entry_range(name, start, end))

    def _write_large(
        self, key: _LargeKey, rejects: list[dict[str, Any]], writers: TableWriters
    ) -> Iterator[pa.Table]:
        """Write a large message.

        Args:
            rejects: those with an entry are the message.
        """
        source, _ = key
        whole = [reject for reject in rejects if reject["entry"] is not None]
        message = large_message(self._config, whole, source) if whole else None
        if message is None and key in self._large:
            yield from self._done([rejects])
            return
        if message is None:
            self._leave(rejects, _NO_LARGE)
            return
        sent = source, _sent(message)
        # No table shows yet what this part has written.
        if sent in self._sent:
            self._leave(rejects, _NO_ROW)
            return
        decoded = Decoded(message, np.zeros(1, dtype=np.int64))
        for rows in self._write_messages(decoded, [rejects], source, writers):
            self._large.add(key)
            self._sent.add(sent)
            yield rows

    def _write_messages(
        self,
        decoded: Decoded,
        groups: Sequence[list[dict[str, Any]]],
        source: TopicPartition,
        writers: TableWriters,
    ) -> Iterator[pa.Table]:
        """
        Args:
            decoded: any number of small messages, or a large one, of groups of rejects. Those
                without messages stay.
        """
        numbers = decoded.numbers
        once, first_of = _once(decoded.messages)
        misfits, why = self._put(once, writers) if once.num_rows else ([], {})
        is_new = writers.is_new[first_of] if once.num_rows else np.empty(0, dtype=bool)
        fitting = set(numbers[is_new].tolist())
        for number, rejects in enumerate(groups):
            if number not in fitting:
                of_group = first_of[numbers == number].tolist()
                self._leave(rejects, next((why[row] for row in of_group if row in why), _NO_ROW))
        if not fitting:
            return
        yield from self._done([groups[number] for number in sorted(fitting)])
        # What else does not fit becomes rejects of its own.
        own = {
            int(first_of[row]) for row in np.flatnonzero(np.isin(numbers, list(fitting))).tolist()
        }
        others = [misfit for misfit in misfits if misfit.row in own]
        if others:
            yield reject_rows(misfit_rejects(once, others), source)
        refused = [reject for number, reject in decoded.refused if number in fitting]
        if refused:
            yield reject_rows(list(dict.fromkeys(refused)), source)

    def _done(self, groups: Iterable[list[dict[str, Any]]]) -> Iterator[pa.Table]:
        rejects = [reject for group in groups for reject in group]
        self.result.replayed.update(reject["reason"] for reject in rejects)
        yield _marks(rejects)

    def _put(
        self, messages: pa.RecordBatch, writers: TableWriters
    ) -> tuple[list[Misfit], dict[int, str]]:
        """Write messages into the tables that take them and lack them; return those that do not
        fit, and why messages are in no table afterwards, by their rows.
        """
        present = _present(messages, writers)
        misfits = writers.write(messages, present)
        has_row = np.logical_or.reduce([writers.is_new, *present.values()])
        why = dict.fromkeys(np.flatnonzero(~has_row).tolist(), _LEFT_OUT)
        return misfits, why | {
            misfit.row: f"{misfit.reason}: {misfit.detail}" for misfit in misfits
        }

    def _leave(self, rejects: Iterable[dict[str, Any]], why: str) -> None:
        for reject in rejects:
            self.result.left[reject["reason"]] += 1
            self.result.why[reject["reason"]] = why


def _present(messages: pa.RecordBatch, writers: TableWriters) -> dict[str, NDArray[np.bool_]]:
    """Return which messages of a topic partition the tables have already: one that did not fit one
    of them is in the others. This alone decides which messages are the same: small ones have the
    same position. The rejects of a large one may be of several times that its producer sent it, so
    a table has it wherever it stands.

    Args:
        messages: small messages, or a large one.

    Raises:
        TableError: a table cannot be read.
    """
    is_in = _is_at_place if messages["chunk_count"][0].as_py() is None else _is_of_sender
    return {writer.table.name: is_in(messages, writer.table) for writer in writers.with_rows}


def _is_at_place(messages: pa.RecordBatch, table: TableOptions) -> NDArray[np.bool_]:
    """Return a mask of the messages whose positions are in a table."""
    ledgers = messages["ledger_id"].to_numpy()
    where = [f"{{}}ledger_id between {ledgers.min()} and {ledgers.max()}"]
    here, is_in = _places(messages), np.zeros(messages.num_rows, dtype=bool)
    for rows in _rows_of(messages, table, _POSITION, where):
        # Rows of another writer may have no position.
        is_in |= np.isin(here, _places(rows.drop_null()))
    return is_in


def _places(messages: pa.RecordBatch) -> NDArray[np.void]:
    """Return the position of each message as a single comparable value."""
    return packed(np.stack([messages[name].to_numpy() for name in _POSITION], axis=1))


def _is_of_sender(message: pa.RecordBatch, table: TableOptions) -> NDArray[np.bool_]:
    """Return whether a table has a large message, by what its sender says."""
    producer_name, sequence_id, publish_us = _sent(message)
    # Files of other times are not read.
    published = None if publish_us is None else f"to_timestamp_micros({publish_us})"
    where = [
        f"{{}}producer_name = {_quoted(producer_name)}",
        _equals("sequence_id", sequence_id),
        _equals("publish_time", published),
        "{}chunk_count > 1",
    ]
    return np.array([any(rows.num_rows for rows in _rows_of(message, table, _SENT, where))])


def _equals(name: str, literal: str | int | None) -> str:
    return f"{{}}{name} " + ("is null" if literal is None else f"= {literal}")


def _sent(message: pa.RecordBatch) -> _Sent:
    """Return what the sender of a large message says about it, however often it is sent."""
    publish_us = message["publish_time"].cast(pa.int64())
    return (
        message["producer_name"][0].as_py(),
        message["sequence_id"][0].as_py(),
        publish_us[0].as_py(),
    )


def _rows_of(
    messages: pa.RecordBatch, table: TableOptions, names: Sequence[str], where: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield some columns of the rows of a table that are of a topic partition. They may be the
    whole table, so they come in small batches.

    Args:
        messages: messages of the topic partition.
        where: more conditions, each with ``{}`` before a column.
    """
    struct = f"{PULSAR_COLUMN}." if table.has_record_shape else ""
    columns = ", ".join(f"{struct}{name} as {name}" for name in names)
    conditions = [
        f"{struct}topic = {_quoted(messages['topic'][0].as_py())}",
        f"{struct}partition = {messages['partition'][0].as_py()}",
        *(condition.replace("{}", struct, 1) for condition in where),
    ]
    try:
        found = (
            QueryBuilder()
            .register("rows", open_delta(table.place))
            .execute(f"select {columns} from rows where {' and '.join(conditions)}")
        )
        yield from pa.RecordBatchReader.from_stream(found)
    # Errors while the answer comes have no type of their own.
    except Exception as error:
        raise not_readable(table.place, error) from None


def _once(messages: pa.RecordBatch) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
    """Return each message once, and for each row of the batch which of those it is: an entry may
    have been rejected for two reasons.
    """
    _, first, inverse = np.unique(_places(messages), return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(first), dtype=np.int64)
    place[order] = np.arange(len(first))
    return messages.take(pa.array(first[order])), place[inverse.reshape(-1)]


def _quoted(text: str) -> str:
    """Return a text as a literal of SQL."""
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


def _marks(rejects: list[dict[str, Any]]) -> pa.Table:
    """Return the rows of rejects that say that others were replayed."""
    names = schema.REJECTS.names
    rows = [{name: reject[name] for name in names} for reject in rejects]
    marks = [{**row, "reason": REPLAYED, "detail": row["reason"], "entry": None} for row in rows]
    return pa.Table.from_pylist(marks, schema=schema.REJECTS)
