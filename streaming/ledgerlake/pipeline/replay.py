"""Puts rejects through again that fit by now: a key is there, a schema or a query was corrected, a
limit was raised.

A row of ``rejects`` with its entry is decoded as the pipeline would decode it now, and its messages
go into the tables that take them and lack them, marked ``late``. Then a row of the reason
``replayed`` says so in ``rejects``, with the former reason in ``detail``. A reject that still does
not fit stays as it is. Of a batch of which some messages fit, the others become rejects of their
own.

Rejects are replayed in parts (see ``replay_rejects``). The files of a part are written first, then
a record of it is put beside the checkpoint, then the tables are committed, and ``rejects`` last.
Each commit carries the number of the part, which is random:

    ledgerlake.replay:<stream>    the last part that is in the table

So a part that was interrupted is finished by the next replay from its record, and nothing comes
twice. The record tells by table the path, the number that it had before, and the files:

    {"version": 1, "number": 4711, "topics": ["persistent://..."],
     "tables": {"messages": {"path": "lake/orders", "before": null, "files": [{"name": "part-...", ...}]}, "rejects": {...}}}

A micro-batch that has rejects and is not finished has messages in no table yet. So after the
rejects were read, the replay waits until Spark has recorded the last micro-batch that was planned.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import QueryBuilder

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.topics import join_partition
from ledgerlake.decode import schema
from ledgerlake.decode.large import decode_large
from ledgerlake.decode.messages import TopicPartition, decode_entries
from ledgerlake.decode.record_columns import PULSAR_COLUMN
from ledgerlake.decode.rejects import reject_rows
from ledgerlake.delay.cancel_messages import rows_with_property
from ledgerlake.errors import (
    CheckpointError,
    CorruptEntryError,
    DecryptionError,
    SetupError,
    TableAccessError,
    TableError,
)
from ledgerlake.operators.partition_writer import misfit_rejects
from ledgerlake.operators.results import BatchSettings, data_file_from_dict
from ledgerlake.operators.scheduled import find_in_due
from ledgerlake.operators.table_writer import TableWriters
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.record_schemas import RecordSchemas
from ledgerlake.pipeline.replay_rejects import REPLAYED, RejectsToReplay, batch_index_of
from ledgerlake.pipeline.tables import REJECTS_TABLE, Tables
from ledgerlake.stored.fields import fields_of, stored
from ledgerlake.stored.files import load_stored
from ledgerlake.table.delta_table import open_delta
from ledgerlake.table.ordered_files import BufferedWriter, DataFile, data_folder, packed
from ledgerlake.table.spark_table import SparkTable
from ledgerlake.wire.entry import peek_metadata
from ledgerlake.wire.message_id import Position
from ledgerlake.wire.schedules import CRON_PROPERTY, EVERY_PROPERTY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ledgerlake.decode.record_rows import Misfit
    from ledgerlake.options.config import Config
    from ledgerlake.options.table_options import TableOptions

_log = logging.getLogger(__name__)

# The reasons of rejects that may fit later.
REPLAYABLE = (
    "chunk_expired",
    "chunk_evicted",
    "encrypted",
    "undecryptable",
    "payload_processor",
    "unknown_codec",
    "bad_compression",
    "too_large",
    "schema_mismatch",
    "unknown_schema",
    "transform_failed",
    "no_table",
)

_POSITION = ("ledger_id", "entry_id", "batch_index")

_VERSION = 1
_PREFIX = "part-00000000-00000"
_NUMBER = "ledgerlake.replay:"

# No time is later, so each row of a replay is late.
_LATEST_US = 2**62

# How long a micro-batch in work is waited for, and after how long that is said.
_BATCH_S, _TOLD_S = 600.0, 10.0
_POLL_S = 0.2


@dataclass
class Replayed:
    """What a replay did: by reason, how many rejects became messages, how many did not, and why the
    last one of those did not. ``left_out`` are those of topics that the configuration does not
    read.
    """

    replayed: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    why: dict[str, str] = field(default_factory=dict)
    left_out: int = 0


@dataclass(frozen=True)
class _TablePart:
    """What a part adds to a table: ``before`` is the number that the table had."""

    path: str
    before: int | None
    files: list[DataFile]


@dataclass(frozen=True)
class _Part:
    """The record of a part whose files are written."""

    number: int
    topics: list[str]
    tables: dict[str, _TablePart]


def replay(config: Config, reasons: Sequence[str] = ()) -> Replayed:
    """Put the rejects of a configuration through again.

    Args:
        reasons: only those; all that may fit by now if there are none.

    Raises:
        SetupError: a reason cannot be replayed, or delta-spark writes a table.
        TableError: a table cannot be read or written.
        BrokerError, TransportError: the registry of schemas cannot be asked.
    """
    unknown = [reason for reason in reasons if reason not in REPLAYABLE]
    if unknown:
        raise SetupError(f"rejects of {unknown[0]} cannot be replayed; those of {', '.join(REPLAYABLE)} can")
    cluster = Cluster(config.source.client)
    try:
        return _Replay(config, cluster).run(tuple(reasons) or REPLAYABLE)
    finally:
        cluster.close()


class _Replay:
    def __init__(self, config: Config, cluster: Cluster) -> None:
        self._config = config
        # A row of an earlier message would take the place of a later one.
        self._options = [table for table in config.table_options if not table.keeps_latest]
        checkpoint = Checkpoint(config.checkpoint_place)
        self._log = checkpoint.log
        self._folder = checkpoint.folder / "ledgerlake"
        self._record = self._folder / "replay.json"
        self._tables = Tables(config, checkpoint.folder / "ledgerlake" / "staging")
        self._schemas = RecordSchemas(cluster, self._tables)
        self._name = _NUMBER + config.stream.name
        self.result = Replayed()

    def run(self, reasons: Sequence[str]) -> Replayed:
        unfinished = load_stored(self._record, "record of a replay", _read_part, _VERSION)
        if unfinished is not None:
            self._open(unfinished.topics)
            self._commit(unfinished)
        topics = self._config.source.topics
        rejects = RejectsToReplay(
            self._config.rejects_place,
            reasons,
            lambda topic, partition: topics.includes(join_partition(topic, partition)),
        )
        self.result.left_out = rejects.left_out
        self._await_last_batch()
        if rejects.topics:
            # What a start of the pipeline refuses is refused here too, before a table gets columns.
            self._open(rejects.topics)
            self._schemas.learn(rejects.topics, have_messages=False)
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
                    f"batch {planned} of the stream {stream} is not finished, so its rejects cannot be told from its "
                    "messages; run the pipeline with --once, then replay"
                )
            if waited_s > _TOLD_S and not is_told:
                is_told = True
                _log.warning(
                    "batch %d of the stream %s is not finished, and is waited for; if the pipeline does not run, run it with --once",
                    planned,
                    stream,
                )
            time.sleep(_POLL_S)

    def _replay(self, rejects: list[dict[str, Any]]) -> None:
        topics = sorted({reject["topic"] for reject in rejects})
        schemas = self._schemas.learn(topics, have_messages=True)
        self._tables.create()
        known = self._tables.settings(self._tables.messages)
        marks: list[pa.Table] = []
        files: dict[str, list[DataFile]] = {}
        for source in sorted({(reject["topic"], reject["partition"]) for reject in rejects}):
            of_partition = [reject for reject in rejects if (reject["topic"], reject["partition"]) == source]
            late = {join_partition(*source): _LATEST_US}
            tables = {name: replace(settings, reached_us=late) for name, settings in known.items()}
            batch = BatchSettings(0, tables, [], schemas)
            writers = TableWriters(self._options, TopicPartition(*source), self._config.source.client, batch, _PREFIX)
            marks += self._write(of_partition, TopicPartition(*source), writers)
            for writer in writers.with_rows:
                files.setdefault(writer.table.name, []).extend(writer.finish(None).files)
        if marks or any(files.values()):
            self._record_and_commit(topics, files, marks)

    def _open(self, topics: Iterable[str]) -> None:
        self._tables.expect(topics)
        for table in self._tables.by_name.values():
            if isinstance(table, SparkTable):
                raise SetupError(f"rejects cannot be replayed into the table at {table.path}, which delta-spark writes")
        self._tables.check(None)

    def _write(
        self, rejects: list[dict[str, Any]], source: TopicPartition, writers: TableWriters
    ) -> Iterator[pa.Table]:
        """Write the messages of rejects that fit; yield new rows of rejects."""
        entries: list[dict[str, Any]] = []
        chunks: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for reject in rejects:
            message = reject["large_message"]
            if message is None:
                entries.append(reject)
            else:
                chunks.setdefault(message, []).append(reject)
        if entries:
            messages, numbers = self._entries(entries, source)
            yield from self._write_messages(messages, numbers, entries, source, writers)
        for of_message in chunks.values():
            yield from self._write_large(of_message, source, writers)

    def _write_large(
        self, chunks: list[dict[str, Any]], source: TopicPartition, writers: TableWriters
    ) -> Iterator[pa.Table]:
        """Write a large message; its chunks are replayed together, or not at all."""
        message = self._large(chunks, source)
        if message is None:
            self._leave(
                chunks, "not all of its chunks are here, they cannot be joined, or it is not due yet or has expired"
            )
            return
        misfits = writers.write(message, self._present(message, writers))
        if misfits or not writers.is_new.all():
            self._leave(chunks, _why(misfits))
            return
        self.result.replayed.update(reject["reason"] for reject in chunks)
        yield _marks(chunks)

    def _write_messages(
        self,
        messages: pa.RecordBatch,
        numbers: NDArray[np.int64],
        rejects: list[dict[str, Any]],
        source: TopicPartition,
        writers: TableWriters,
    ) -> Iterator[pa.Table]:
        """
        Args:
            numbers: for each message, which of the rejects it comes from. Those without messages stay.
        """
        once, first_of = _once(messages)
        misfits = writers.write(once, self._present(once, writers)) if once.num_rows else []
        is_new = writers.is_new[first_of] if once.num_rows else np.empty(0, dtype=bool)
        fitting = set(numbers[is_new].tolist())
        by_row = {misfit.row: misfit for misfit in misfits}
        for number, reject in enumerate(rejects):
            if number not in fitting:
                of_reject = [by_row[row] for row in first_of[numbers == number].tolist() if row in by_row]
                self._leave([reject], _why(of_reject))
        if not fitting:
            return
        done = [reject for number, reject in enumerate(rejects) if number in fitting]
        self.result.replayed.update(reject["reason"] for reject in done)
        yield _marks(done)
        # The others of a batch become rejects of their own.
        own = {int(first_of[row]) for row in np.flatnonzero(np.isin(numbers, list(fitting))).tolist()}
        others = [misfit for misfit in misfits if misfit.row in own]
        if others:
            yield reject_rows(misfit_rejects(once, others), source)

    def _leave(self, rejects: Iterable[dict[str, Any]], why: str) -> None:
        for reject in rejects:
            self.result.left[reject["reason"]] += 1
            self.result.why[reject["reason"]] = why

    def _present(self, messages: pa.RecordBatch, writers: TableWriters) -> dict[str, NDArray[np.bool_]]:
        """Return which messages of a topic partition the tables have already: one that did not fit
        one of them is in the others.

        Raises:
            TableError: a table cannot be read.
        """
        return {writer.table.name: self._is_in(messages, writer.table) for writer in writers.with_rows}

    @staticmethod
    def _is_in(messages: pa.RecordBatch, table: TableOptions) -> NDArray[np.bool_]:
        struct = f"{PULSAR_COLUMN}." if table.is_of_records else ""
        columns = ", ".join(f"{struct}{name} as {name}" for name in _POSITION)
        ledgers = messages["ledger_id"].to_numpy()
        where = (
            f"{struct}topic = {_quoted(messages['topic'][0].as_py())} and {struct}partition = {messages['partition'][0].as_py()}"
            f" and {struct}ledger_id between {ledgers.min()} and {ledgers.max()}"
        )
        try:
            found = (
                QueryBuilder()
                .register("rows", open_delta(table.place))
                .execute(f"select {columns} from rows where {where}")
            )
            rows = pa.table(found)
        # Errors while the answer comes have no type of their own.
        except Exception as error:
            raise TableAccessError(f"the table at {table.place} cannot be read: {table.place.reason(error)}") from None
        here, there = (np.stack([batch[name].to_numpy() for name in _POSITION], axis=1) for batch in (messages, rows))
        is_in: NDArray[np.bool_] = np.isin(packed(here), packed(there))
        return is_in

    def _entries(
        self, rejects: list[dict[str, Any]], source: TopicPartition
    ) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        """Return the messages of entries that can be decoded, are due, do not repeat and have not expired,
        and for each message which of the rejects it comes from.
        """
        raw = pa.array([reject["entry"] for reject in rejects], pa.binary())
        # Several rejects may be of one entry, so each gets a number of its own for a while.
        ids = np.arange(len(rejects))
        decoding = self._config.source.decoding
        parts, bad = [schema.MESSAGES.empty_table()], set[int]()
        for part in decode_entries(raw, np.zeros(len(rejects), dtype=np.int64), ids, source, **decoding):
            parts.append(pa.Table.from_batches([part.messages.select(schema.MESSAGES.names)]))
            bad.update(part.rejects["entry_id"].to_pylist())
        messages = pa.concat_tables(parts)
        numbers = messages["entry_id"].to_numpy()
        if self._config.delay.enabled:
            bad.update(numbers[_early(messages) | _repeat(messages)].tolist())
            bad.update(_withheld(messages))
        is_whole = ~np.isin(numbers, [*bad])
        messages, numbers = messages.filter(pa.array(is_whole)), numbers[is_whole]
        messages = self._delivered(_in_place(messages, [rejects[number] for number in numbers.tolist()]))
        (batch,) = messages.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], schema.MESSAGES)]
        return batch, numbers

    def _large(self, rejects: list[dict[str, Any]], source: TopicPartition) -> pa.RecordBatch | None:
        """Return the large message of chunks; None if they are not all there."""
        ordered = sorted(rejects, key=lambda reject: int(peek_metadata(memoryview(reject["entry"])).chunk_id))
        first = peek_metadata(memoryview(ordered[0]["entry"]))
        if len(ordered) != first.num_chunks_from_msg:
            return None
        try:
            message = decode_large(
                [reject["entry"] for reject in ordered],
                tuple(Position(reject["ledger_id"], reject["entry_id"]) for reject in ordered),
                source,
                self._config.chunks.max_message_bytes,
                self._config.source.client.crypto,
                (first.producer_name, first.uuid),
            )
        except (CorruptEntryError, DecryptionError):
            return None
        rows = pa.Table.from_batches([message])
        if self._config.delay.enabled and (_early(rows).any() or _withheld(rows)):
            return None
        (batch,) = self._delivered(rows).to_batches()
        return batch

    def _delivered(self, messages: pa.Table) -> pa.Table:
        """Return messages that are due with the time of their delivery."""
        if not self._config.delay.enabled or messages["deliver_at"].null_count == messages.num_rows:
            return messages
        now, never = pa.scalar(_now_us(), pa.int64()), pa.scalar(None, pa.int64())
        delivered = pc.if_else(messages["deliver_at"].is_valid(), now, never)
        return _with(messages, "delivered_at", delivered.cast(schema.TIMESTAMP))

    def _record_and_commit(self, topics: list[str], files: dict[str, list[DataFile]], marks: list[pa.Table]) -> None:
        rejects = self._tables.rejects
        writer = BufferedWriter(data_folder(rejects.folder, rejects.schema, _PREFIX))
        for table in marks:
            writer.write(table)
        by_name = self._tables.by_name
        written = {name: of_table for name, of_table in files.items() if of_table} | {REJECTS_TABLE: writer.finish()}
        tables = {
            name: _TablePart(str(by_name[name].path), by_name[name].number(self._name), of_table)
            for name, of_table in written.items()
        }
        part = _Part(secrets.randbits(62), topics, tables)
        content = json.dumps({"version": _VERSION, **fields_of(part)}, default=fields_of).encode()
        self._folder.make()
        if not self._record.create_file(content):
            raise CheckpointError(
                f"another replay of the stream {self._config.stream.name} is at work, or was interrupted; end it, and replay again"
            )
        self._commit(part)

    def _commit(self, part: _Part) -> None:
        """Commit a part, whatever an earlier attempt has committed of it.

        Raises:
            CheckpointError: the tables are not those of the part.
            TableError: a commit did not land.
        """
        by_name = self._tables.by_name
        for name, of_table in part.tables.items():
            if name not in by_name or str(by_name[name].path) != of_table.path:
                raise CheckpointError(
                    f"an interrupted replay has messages for the table at {of_table.path}, which the configuration does not name any more; "
                    f"put it back, and replay again, or remove {self._record} to leave them as rejects"
                )
        if not self._is_whole(part):
            # Nothing of it is in a table, so its rejects are still to be replayed.
            self._delete_record()
            return
        for name, of_table in sorted(part.tables.items(), key=lambda item: item[0] == REJECTS_TABLE):
            by_name[name].append_once(self._name, part.number, of_table.before, of_table.files)
        self._delete_record()

    def _is_whole(self, part: _Part) -> bool:
        """Return whether the files of a part are there.

        Raises:
            TableError: some are not, and the part is in a table already.
        """
        by_name = self._tables.by_name
        landed = [name for name in part.tables if by_name[name].number(self._name) == part.number]
        missing = [
            file
            for name, of_table in part.tables.items()
            if name not in landed
            for file in by_name[name].missing(of_table.files)
        ]
        if missing and landed:
            raise TableError(
                f"an interrupted replay cannot be finished, because {missing[0]} is gone, and the table at {part.tables[landed[0]].path} has "
                f"its part already; remove {self._record}, and replay again"
            )
        return not missing

    def _delete_record(self) -> None:
        self._record.filesystem().delete_file(self._record.root)


def _why(misfits: Sequence[Misfit]) -> str:
    if not misfits:
        return "it cannot be decoded, is not due yet, has expired, repeats, or no table gets it anew"
    return f"{misfits[0].reason}: {misfits[0].detail}"


def _once(messages: pa.RecordBatch) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
    """Return each message once, and for each row of the batch which of those it is: an entry may
    have been rejected for two reasons.
    """
    keys = packed(np.stack([messages[name].to_numpy() for name in _POSITION], axis=1))
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
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


def _early(messages: pa.Table) -> NDArray[np.bool_]:
    """Return a mask of the messages that are not due yet."""
    is_early: NDArray[np.bool_] = pc.fill_null(messages["deliver_at"].cast(pa.int64()), 0).to_numpy() > _now_us()
    return is_early


def _withheld(messages: pa.Table) -> set[int]:
    """Return the entry ids of the delayed messages that must not be delivered, as those that have
    expired.
    """
    withheld = set[int]()
    for batch in messages.filter(messages["deliver_at"].is_valid()).to_batches():
        _, rejects = find_in_due(batch, None, _now_us() // 1000)
        withheld.update(reject.position.entry_id for reject in rejects)
    return withheld


def _repeat(messages: pa.Table) -> NDArray[np.bool_]:
    """Return a mask of the messages that repeat. Their occurrences have one position, by which a
    replay knows messages.
    """
    repeats = np.zeros(messages.num_rows, dtype=bool)
    repeats[rows_with_property(messages["properties"].combine_chunks(), [CRON_PROPERTY, EVERY_PROPERTY])] = True
    is_delayed: NDArray[np.bool_] = messages["deliver_at"].is_valid().to_numpy()
    return repeats & is_delayed


def _now_us() -> int:
    return time.time_ns() // 1000


def _in_place(messages: pa.Table, rejects: list[dict[str, Any]]) -> pa.Table:
    """Return messages with the positions of the rejects that they come from."""
    of_batch = messages["batch_index"].to_pylist()
    indexes = [
        own if batch_index_of(reject["message_id"]) < 0 else batch_index_of(reject["message_id"])
        for reject, own in zip(rejects, of_batch, strict=True)
    ]
    positions = [f"{reject['ledger_id']}:{reject['entry_id']}" for reject in rejects]
    columns: dict[str, list[Any]] = {
        "ledger_id": [reject["ledger_id"] for reject in rejects],
        "entry_id": [reject["entry_id"] for reject in rejects],
        "batch_index": indexes,
        "message_id": [
            text if index < 0 else f"{text}:{index}" for text, index in zip(positions, indexes, strict=True)
        ],
    }
    for name, values in columns.items():
        messages = _with(messages, name, pa.array(values, schema.MESSAGES.field(name).type))
    return messages


def _with(messages: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return messages.set_column(messages.schema.get_field_index(name), schema.MESSAGES.field(name), column)


def _read_part(data: dict[str, Any], _version: int) -> _Part:
    tables = {
        name: _TablePart(
            stored(str, table["path"]),
            stored(int | None, table["before"]),
            [data_file_from_dict(file) for file in table["files"]],
        )
        for name, table in stored(dict[str, Any], data["tables"]).items()
    }
    return _Part(stored(int, data["number"]), stored(list[str], data["topics"]), tables)
