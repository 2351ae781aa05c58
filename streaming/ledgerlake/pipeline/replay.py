"""Puts rejects through again that fit by now: a key is there, a schema or a query was corrected, a limit
was raised.

A row of ``rejects`` with its entry is decoded as the pipeline would decode it now, and its messages go
into the tables that take them, marked ``late``. Then a row of the reason ``replayed`` says so in
``rejects``, with the former reason in ``detail``. A reject that still does not fit stays as it is. Of a
batch of which some messages fit, the others become rejects of their own.

Rejects are replayed in parts. The files of a part are written first, then a record of it is put beside the
checkpoint, then the tables are committed, and ``rejects`` last. Each commit carries the number of the
part:

    ledgerlake.replay:<stream>    the last part that is in the table

So a part that was interrupted is finished by the next replay from its record, and nothing comes twice:

    {"version": 1, "number": 3, "tables": {"messages": [{"name": "part-...", ...}]}, "rejects": [...], "replayed": 17}
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import QueryBuilder
from deltalake.exceptions import DeltaError

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.topics import join_partition
from ledgerlake.decode import schema
from ledgerlake.decode.large import decode_large
from ledgerlake.decode.messages import TopicPartition, decode_entries
from ledgerlake.decode.record_columns import PULSAR_COLUMN
from ledgerlake.decode.rejects import reject_rows
from ledgerlake.errors import CorruptEntryError, DecryptionError, SetupError, TableError
from ledgerlake.operators.partition_writer import misfit_rejects
from ledgerlake.operators.results import BatchSettings
from ledgerlake.operators.table_writer import TableWriters
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.record_schemas import RecordSchemas
from ledgerlake.pipeline.tables import Tables
from ledgerlake.stored.fields import fields_of, stored
from ledgerlake.stored.files import load_stored, save_json
from ledgerlake.table.delta_table import data_folder, open_delta
from ledgerlake.table.ordered_files import BufferedWriter, DataFile
from ledgerlake.table.spark_table import SparkTable
from ledgerlake.wire.entry import peek_metadata
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ledgerlake.options.config import Config
    from ledgerlake.options.table_options import TableOptions
    from ledgerlake.stored.places import Place

REPLAYED = "replayed"

# The reasons of rejects that may fit later.
_REASONS = (
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

# A part has at most so many rejects, or so many bytes of entries.
_PART_ROWS = 20_000
_PART_BYTES = 128 * 1024 * 1024

# No time is later, so each row of a replay is late.
_LATEST_US = 2**62

_QUERY = """
    select rejects.* from rejects left anti join (
        select topic, partition, message_id, detail from rejects where reason = 'replayed'
    ) as done on rejects.topic = done.topic and rejects.partition = done.partition
        and rejects.message_id = done.message_id and rejects.reason = done.detail
    where rejects.entry is not null and rejects.reason in ({reasons})
    order by rejects.topic, rejects.partition, rejects.ledger_id, rejects.entry_id
"""


@dataclass
class Replayed:
    """What a replay did: by reason, how many rejects became messages, how many did not, and why the last
    one of those did not.
    """

    replayed: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    why: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """The record of a part whose files are written."""

    number: int
    tables: dict[str, list[DataFile]]
    rejects: list[DataFile]


def replay(config: Config, reasons: Sequence[str] = ()) -> Replayed:
    """Put the rejects of a configuration through again.

    Args:
        reasons: only those; all that may fit by now if there are none.

    Raises:
        SetupError: a reason cannot be replayed, or delta-spark writes a table.
        TableError: a table cannot be read or written.
        BrokerError, TransportError: the registry of schemas cannot be asked.
    """
    unknown = [reason for reason in reasons if reason not in _REASONS]
    if unknown:
        raise SetupError(f"rejects of {unknown[0]} cannot be replayed; those of {', '.join(_REASONS)} can")
    cluster = Cluster(config.source.client)
    try:
        return _Replay(config, cluster).run(tuple(reasons) or _REASONS)
    finally:
        cluster.close()


class _Replay:
    def __init__(self, config: Config, cluster: Cluster) -> None:
        self._config = config
        # A row of an earlier message would take the place of a later one.
        self._options = [table for table in config.table_options if not table.keeps_latest]
        checkpoint = Checkpoint(config.checkpoint_place)
        self._record = checkpoint.folder / "ledgerlake" / "replay.json"
        self._tables = Tables(config, checkpoint.folder / "ledgerlake" / "staging")
        self._schemas = RecordSchemas(cluster, self._tables)
        self._name = _NUMBER + config.stream.name
        self.result = Replayed()

    def run(self, reasons: Sequence[str]) -> Replayed:
        unfinished = load_stored(self._record, "record of a replay", _read_part, _VERSION)
        if unfinished is not None:
            self._open([])
            self._commit(unfinished)
        for rows in self._parts(reasons):
            self._replay(rows)
        return self.result

    def _parts(self, reasons: Sequence[str]) -> Iterator[pa.Table]:
        """Yield rejects to replay, those of a topic partition and of a large message together."""
        place = self._config.rejects_place
        quoted = ", ".join(f"'{reason}'" for reason in reasons)
        try:
            found = QueryBuilder().register("rejects", open_delta(place)).execute(_QUERY.format(reasons=quoted))
            collected: list[pa.Table] = []
            for batch in found:
                rows = pa.Table.from_batches([pa.record_batch(batch)]).cast(schema.REJECTS)
                collected.append(rows)
                if (
                    sum(part.num_rows for part in collected) >= _PART_ROWS
                    or sum(part.nbytes for part in collected) >= _PART_BYTES
                ):
                    yield pa.concat_tables(collected)
                    collected = []
            if collected:
                yield pa.concat_tables(collected)
        except (DeltaError, OSError, pa.ArrowException) as error:
            raise TableError(f"the table at {place} cannot be read: {place.reason(error)}") from None

    def _replay(self, rejects: pa.Table) -> None:
        topics = sorted(set(rejects["topic"].to_pylist()))
        self._open(topics)
        schemas = self._schemas.learn(topics, have_messages=True)
        self._tables.create()
        known = self._tables.settings(self._tables.messages)
        marks: list[pa.Table] = []
        files: dict[str, list[DataFile]] = {}
        places = {(row["topic"], row["partition"]) for row in rejects.select(["topic", "partition"]).to_pylist()}
        for topic, partition in sorted(places):
            of_partition = rejects.filter(
                pc.and_(pc.equal(rejects["topic"], topic), pc.equal(rejects["partition"], partition))
            )
            source = TopicPartition(topic, partition)
            late = {join_partition(topic, partition): _LATEST_US}
            tables = {name: replace(settings, reached_us=late) for name, settings in known.items()}
            batch = BatchSettings(0, tables, [], schemas)
            writers = TableWriters(self._options, source, self._config.source.client, batch, _PREFIX)
            marks += self._write(of_partition.to_pylist(), source, writers)
            for writer in writers.with_rows:
                files.setdefault(writer.table.name, []).extend(writer.finish(None).files)
        if marks:
            self._record_and_commit(files, marks)

    def _open(self, topics: Iterable[str]) -> None:
        self._tables.expect(topics)
        self._tables.check(None)
        for table in self._tables.by_name.values():
            if isinstance(table, SparkTable):
                raise SetupError(f"rejects cannot be replayed into the table at {table.path}, which delta-spark writes")

    def _write(
        self, rejects: list[dict[str, Any]], source: TopicPartition, writers: TableWriters
    ) -> Iterator[pa.Table]:
        """Write the messages of rejects that fit; yield new rows of rejects."""
        entries: list[dict[str, Any]] = []
        chunks: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for reject in sorted(rejects, key=_place):
            message = _large_message_of(reject)
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
        if message is None or writers.write(message, self._present(message, writers)):
            self._leave(chunks)
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
        misfits = writers.write(messages, self._present(messages, writers)) if messages.num_rows else []
        fits = np.ones(messages.num_rows, dtype=bool)
        fits[[misfit.row for misfit in misfits]] = False
        fitting = set(numbers[fits].tolist())
        self._leave(reject for number, reject in enumerate(rejects) if number not in fitting)
        for misfit in misfits:
            if int(numbers[misfit.row]) not in fitting:
                self.result.why[rejects[int(numbers[misfit.row])]["reason"]] = f"{misfit.reason}: {misfit.detail}"
        if not fitting:
            return
        done = [reject for number, reject in enumerate(rejects) if number in fitting]
        self.result.replayed.update(reject["reason"] for reject in done)
        yield _marks(done)
        # The others of a batch become rejects of their own.
        others = [misfit for misfit in misfits if int(numbers[misfit.row]) in fitting]
        if others:
            yield reject_rows(misfit_rejects(messages, others), source)

    def _present(self, messages: pa.RecordBatch, writers: TableWriters) -> dict[str, NDArray[np.bool_]]:
        """Return which messages of a topic partition the tables have already: one that did not fit one of
        them is in the others.

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
        except (DeltaError, OSError, pa.ArrowException) as error:
            raise TableError(f"the table at {table.place} cannot be read: {table.place.reason(error)}") from None
        here, there = (np.stack([batch[name].to_numpy() for name in _POSITION], axis=1) for batch in (messages, rows))
        is_in: NDArray[np.bool_] = np.isin(_packed(here), _packed(there))
        return is_in

    def _leave(self, rejects: Iterable[dict[str, Any]]) -> None:
        self.result.left.update(reject["reason"] for reject in rejects)

    def _entries(
        self, rejects: list[dict[str, Any]], source: TopicPartition
    ) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        """Return the messages of entries that can be decoded and are due, and for each message which of
        the rejects it comes from.
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
        early = _early(messages) if self._config.delay.enabled else np.zeros(len(numbers), dtype=bool)
        is_whole = ~np.isin(numbers, [*bad, *numbers[early].tolist()])
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
        if self._config.delay.enabled and _early(rows).any():
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

    def _record_and_commit(self, files: dict[str, list[DataFile]], marks: list[pa.Table]) -> None:
        rejects = self._tables.rejects
        writer = BufferedWriter(data_folder(rejects.folder, rejects.schema, _PREFIX))
        for table in marks:
            writer.write(table)
        part = _Part((rejects.number(self._name) or 0) + 1, files, writer.finish())
        save_json(self._record, {"version": _VERSION, **json.loads(json.dumps(part, default=fields_of))})
        self._commit(part)

    def _commit(self, part: _Part) -> None:
        by_name = self._tables.by_name
        missing = [name for name in part.tables if name not in by_name]
        if missing:
            raise SetupError(
                f"an interrupted replay has messages for {missing[0]}, which the configuration does not name any more; put it back, and "
                "replay again"
            )
        for name, files in part.tables.items():
            if files:
                by_name[name].append_once(self._name, part.number, files)
        self._tables.rejects.append_once(self._name, part.number, part.rejects)
        _delete(self._record)


def _packed(keys: NDArray[np.int64]) -> NDArray[np.void]:
    """Return each row as a single comparable value."""
    rows = np.ascontiguousarray(keys, dtype=np.int64)
    return rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize))).reshape(-1)


def _quoted(text: str) -> str:
    """Return a text as a literal of SQL."""
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


def _place(reject: dict[str, Any]) -> tuple[int, int, int]:
    """Return the position of a reject, with the index of the message in its batch."""
    return reject["ledger_id"], reject["entry_id"], _batch_index(reject)


def _large_message_of(reject: dict[str, Any]) -> tuple[str, str] | None:
    """Return producer and uuid of the large message of which an entry is a chunk; None if it is none."""
    try:
        metadata = peek_metadata(memoryview(reject["entry"]))
    except CorruptEntryError:
        return None
    return (metadata.producer_name, metadata.uuid) if metadata.num_chunks_from_msg > 1 else None


def _batch_index(reject: dict[str, Any]) -> int:
    """Return the index in its batch of the message that a reject is of; -1 if it is of an entry."""
    index = reject["message_id"].split(":")[2:]
    return int(index[0]) if index else -1


def _marks(rejects: list[dict[str, Any]]) -> pa.Table:
    """Return the rows of rejects that say that others were replayed."""
    marks = [{**reject, "reason": REPLAYED, "detail": reject["reason"], "entry": None} for reject in rejects]
    return pa.Table.from_pylist(marks, schema=schema.REJECTS)


def _early(messages: pa.Table) -> NDArray[np.bool_]:
    """Return a mask of the messages that are not due yet."""
    is_early: NDArray[np.bool_] = pc.fill_null(messages["deliver_at"].cast(pa.int64()), 0).to_numpy() > _now_us()
    return is_early


def _now_us() -> int:
    return time.time_ns() // 1000


def _in_place(messages: pa.Table, rejects: list[dict[str, Any]]) -> pa.Table:
    """Return messages with the positions of the rejects that they come from."""
    of_batch = messages["batch_index"].to_pylist()
    indexes = [
        own if _batch_index(reject) < 0 else _batch_index(reject) for reject, own in zip(rejects, of_batch, strict=True)
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
        name: [_file(file) for file in files] for name, files in stored(dict[str, list[Any]], data["tables"]).items()
    }
    return _Part(stored(int, data["number"]), tables, [_file(file) for file in stored(list[Any], data["rejects"])])


def _file(fields: Any) -> DataFile:
    first, last = (tuple(fields[name]) if fields[name] else None for name in ("first", "last"))
    return DataFile(**{**fields, "first": first, "last": last, "members": tuple(fields["members"])})


def _delete(place: Place) -> None:
    with contextlib.suppress(FileNotFoundError):
        place.filesystem().delete_file(place.root)
