"""Does the table hold exactly what the topic held? Position by position, broker index by broker index.

What is compared: the topic's messages after the query's first offset, up to the last micro-batch that it committed, with
the table's rows of that range. An entry that stands in ``rejects`` accounts for its messages. Chunks are accounted for by
their large message, which stands at the last of them; whether that message is whole is found by the rules of
``assembly.rules`` over all chunks of the range, without any limit.

    missing        in the topic, neither in the table nor in rejects
    duplicate      rows beyond the first of one position
    out_of_order   rows that stand before an earlier one, inside a file, or in a file whose stretch overlaps another's
                   (rows marked ``late`` say so themselves and are not counted)
    not_checked    rows of positions that the topic no longer has
    open_chunks    chunks of large messages that are not whole yet
    waiting        delayed messages that were not due when the last micro-batch was planned
    early          rows that were delivered before they were due
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from ledgerlake.assembly.assembler import Assembled, Rejected
from ledgerlake.assembly.chunk_entries import read_alone
from ledgerlake.assembly.rules import Chunk, Limits
from ledgerlake.client.cluster import Cluster
from ledgerlake.client.topics import split_partition
from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.decode.rejects import read_reject
from ledgerlake.decode.split import DELAYED, ENTRIES, REJECT, only_entry
from ledgerlake.errors import CorruptEntryError, TableError
from ledgerlake.operators.in_task import LocalAssembly
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.source.bounds import resolve_end
from ledgerlake.source.planning import EntryRange, entry_range
from ledgerlake.source.range_reader import DATA_LOSS
from ledgerlake.source.task_reader import read_pieces
from ledgerlake.stored.files import resolve
from ledgerlake.stored.offsets import Offset, PartitionOffset
from ledgerlake.table.delta_table import special_features
from ledgerlake.table.ordered_files import sort_keys
from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ledgerlake.client.topics import TopicSelection
    from ledgerlake.options.config import Config
    from ledgerlake.options.source_options import SourceOptions

    Keys = NDArray[np.int64]

_NO_LIMITS = Limits(max_pending=2**31, max_pending_bytes=2**62, max_message_bytes=2**31)

_KEY = ["ledger_id", "entry_id", "batch_index", "broker_index"]
_ORDER_COLUMNS = [
    "topic",
    "partition",
    "ledger_id",
    "entry_id",
    "batch_index",
    "broker_index",
    "broker_timestamp",
    "publish_time",
    "late",
    "deliver_at",
    "delivered_at",
]


@dataclass
class Verdict:
    """What was found; ``clean`` when nothing is wrong."""

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
        found = f"{self.missing:,} missing, {self.duplicate:,} duplicate, {self.out_of_order:,} out of order"
        rest = f"{self.rejects:,} rejects, {self.late:,} late, {self.not_checked:,} no longer in the topic"
        if self.open_chunks:
            rest += f", {self.open_chunks:,} chunks of messages that are not whole yet"
        if self.waiting:
            rest += f", {self.waiting:,} delayed messages wait"
        if self.early:
            found += f", {self.early:,} early"
        return f"{self.messages:,} messages: {found} ({rest})"

    def add(self, other: Verdict) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


def verify(config: Config) -> Verdict:
    """Compare the tables of a configuration with its topics.

    Raises:
        TableError: a table cannot be read.
        BrokerError, TransportError: the topic cannot be read.
    """
    options = config.source
    cluster = Cluster(options.client)
    try:
        start, end = _committed_range(config.stream.checkpoint, cluster, options.topics)
        table = _TableRows(config.delta.path)
        rejected = _TableRows(config.delta.rejects_path)
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
    """What time it was for delayed messages: by the broker's time of the last entry, or the planner's clock."""
    broker_ms = end.time_ms if end.index is not None else None
    return max(broker_ms or 0, end.clock_ms or 0)


def _verify_partition(
    options: SourceOptions, span: EntryRange, reached_ms: int | None, table: _TableRows, rejected: _TableRows
) -> Verdict:
    in_topic = _read_topic(options, span, reached_ms)
    expected, bad_entries = in_topic.messages, in_topic.bad_entries
    files = table.files_of(span.topic_partition, span.end)
    rows = np.concatenate([_keys(one) for one in files]) if files else np.empty((0, 4), dtype=np.int64)
    reject_rows = rejected.files_of(span.topic_partition, span.end)
    reject_entries = (
        np.concatenate([_entries(one) for one in reject_rows]) if reject_rows else np.empty((0, 2), dtype=np.int64)
    )
    distinct = np.unique(_packed(rows))
    missing = _absent(expected, distinct, reject_entries)
    missing += int((~np.isin(_packed(bad_entries), _packed(reject_entries))).sum())
    row_places, reject_places = set(map(tuple, rows[:, :2].tolist())), set(map(tuple, reject_entries.tolist()))
    missing += _missing_large(in_topic.large, row_places, reject_places)
    waiting = _absent(in_topic.waiting, distinct, reject_entries)
    waiting += _missing_large(in_topic.large_waiting, row_places, reject_places)
    return Verdict(
        messages=len(rows),
        missing=missing,
        duplicate=len(rows) - len(distinct),
        out_of_order=_out_of_order(files),
        rejects=len(reject_entries),
        late=sum(int(pc.sum(one["late"]).as_py() or 0) for one in files),
        not_checked=_before(rows, in_topic.first),
        open_chunks=in_topic.open_chunks,
        waiting=waiting,
        early=sum(int(pc.sum(pc.less(one["delivered_at"], one["deliver_at"])).as_py() or 0) for one in files),
    )


@dataclass(frozen=True)
class _InTopic:
    """What the range of a topic partition holds.

    ``messages`` are keys, ``bad_entries`` entries that cannot be messages; ``large`` are the chunks of each whole large
    message, and chunks that belong to none alone; ``waiting`` and ``large_waiting`` are the same of what is not due;
    ``first`` is the first entry.
    """

    messages: Keys
    bad_entries: Keys
    waiting: Keys
    large: list[tuple[Position, ...]]
    large_waiting: list[tuple[Position, ...]]
    open_chunks: int
    first: Position | None


def _read_topic(options: SourceOptions, span: EntryRange, reached_ms: int | None) -> _InTopic:
    source = TopicPartition(*split_partition(span.topic_partition))
    keys: list[Keys] = [np.empty((0, 4), dtype=np.int64)]
    bad: list[Keys] = [np.empty((0, 2), dtype=np.int64)]
    waiting: list[Keys] = [np.empty((0, 4), dtype=np.int64)]
    chunks = LocalAssembly(_NO_LIMITS, hold_delayed=reached_ms is not None)
    large: list[tuple[Position, ...]] = []
    large_waiting: list[tuple[Position, ...]] = []
    first: Position | None = None
    for piece in read_pieces(replace(options, fail_on_data_loss=False), span):
        if piece.kind == REJECT:
            rejected = read_reject(piece.frames)
            if rejected.reason != DATA_LOSS:
                bad.append(np.array([[rejected.position.ledger_id, rejected.position.entry_id]], dtype=np.int64))
            continue
        if piece.kind not in (ENTRIES, DELAYED):
            position, entry = only_entry(piece.frames)
            first = first or position
            try:
                for positions, deliver_ms in _take_alone(chunks, piece.kind, entry, position):
                    (large_waiting if deliver_ms > (reached_ms or 0) else large).append(positions)
            except CorruptEntryError:
                bad.append(np.array([[position.ledger_id, position.entry_id]], dtype=np.int64))
            continue
        for decoded in decode_bundle(piece.frames, source, first_entry=piece.first_entry, **options.decoding):
            waits = np.zeros(decoded.messages.num_rows, dtype=bool)
            if piece.kind == DELAYED and reached_ms is not None:
                waits = decoded.messages["deliver_at"].cast(pa.int64()).to_numpy() > reached_ms * 1000
            found = _keys(decoded.messages)
            keys.append(found[~waits])
            waiting.append(found[waits])
            bad.append(_entries(decoded.rejects))
            first = first or _first_of(found, bad[-1])
    large += [(event.position,) for event in chunks.events if isinstance(event, Chunk)]
    open_chunks = len(list(chunks.hand_over()))
    return _InTopic(
        np.concatenate(keys), np.concatenate(bad), np.concatenate(waiting), large, large_waiting, open_chunks, first
    )


def _take_alone(
    chunks: LocalAssembly, kind: str, entry: memoryview, position: Position
) -> list[tuple[tuple[Position, ...], int]]:
    """Chunks that ended with this one: a whole message's together, those that belong to none alone; and when they are due."""
    event = read_alone(kind, entry, position)
    outcomes = chunks.arrive(event, b"") if isinstance(event, Chunk) else chunks.mark(event)
    found: list[tuple[tuple[Position, ...], int]] = []
    for outcome in outcomes or ():
        if isinstance(outcome, Assembled):
            found.append((outcome.positions, outcome.deliver_ms or 0))
        elif isinstance(outcome, Rejected):
            found += [((one,), 0) for one, _ in outcome.entries]
    return found


def _absent(keys: Keys, rows: NDArray[np.void], rejected: Keys) -> int:
    """Messages that are neither rows of the table nor accounted for by an entry in rejects."""
    in_rejects = np.isin(_packed(keys[:, :2]), _packed(rejected))
    return int((~np.isin(_packed(keys), rows) & ~in_rejects).sum())


def _missing_large(large: list[tuple[Position, ...]], rows: set[Any], rejected: set[Any]) -> int:
    """Large messages of which neither the last chunk is in the table nor all are in rejects; single chunks likewise."""
    missing = 0
    for positions in large:
        places = [(one.ledger_id, one.entry_id) for one in positions]
        in_table = len(places) > 1 and places[-1] in rows
        missing += not in_table and not rejected.issuperset(places)
    return missing


def _first_of(keys: Keys, bad: Keys) -> Position | None:
    found = [Position(*one[:2]) for one in (*keys[:1].tolist(), *bad[:1].tolist())]
    return min(found, default=None)


class _TableRows:
    """A table's files as Arrow tables of the columns that matter here, rows in file order."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            table = DeltaTable(path)
            self._files = [uri.removeprefix("file://") for uri in table.file_uris()]
            # Such files do not have the columns by their names.
            self._needs_spark = not {"columnMapping", "partition columns"}.isdisjoint(special_features(table))
        except (DeltaError, OSError) as error:
            raise TableError(
                f"the table at {path} cannot be opened: {str(error).splitlines()[0][:200]}; run the pipeline first"
            ) from None
        self._tables: list[pa.Table] | None = None

    def files_of(self, name: str, end: Position) -> list[pa.Table]:
        """Each file's rows of one topic partition up to ``end``; files without any are left out."""
        if self._tables is None:
            self._tables = self._read_by_spark() if self._needs_spark else [self._read(uri) for uri in self._files]
        topic, partition = split_partition(name)
        found = []
        for table in self._tables:
            ledger, entry = table["ledger_id"], table["entry_id"]
            inside = pc.or_(
                pc.less(ledger, end.ledger_id),
                pc.and_(pc.equal(ledger, end.ledger_id), pc.less_equal(entry, end.entry_id)),
            )
            ours = pc.and_(pc.equal(table["topic"], topic), pc.equal(table["partition"], partition))
            rows = table.filter(pc.and_(inside, ours))
            if rows.num_rows:
                found.append(rows)
        return found

    def _read_by_spark(self) -> list[pa.Table]:
        from ledgerlake.runtime.session import start_session

        rows = start_session("ledgerlake verify").read.format("delta").load(self._path)
        names = [name for name in _ORDER_COLUMNS if name in rows.columns]
        # A large file is read in pieces; within a piece rows are numbered as they stand.
        place = ["_metadata.file_path", "_metadata.file_block_start", "monotonically_increasing_id() as row"]
        found = rows.selectExpr(*names, *place).toArrow()
        whole = found.sort_by([(name, "ascending") for name in ("file_path", "file_block_start", "row")])
        paths = pc.unique(whole["file_path"]).to_pylist()
        return [whole.filter(pc.equal(whole["file_path"], path)).select(names) for path in paths]

    def _read(self, uri: str) -> pa.Table:
        filesystem, path = resolve(uri)
        with pq.ParquetFile(path, filesystem=filesystem) as file:
            present = set(file.schema_arrow.names)
            return file.read([name for name in _ORDER_COLUMNS if name in present])


def _out_of_order(files: list[pa.Table]) -> int:
    """Rows behind an earlier one: inside each file, and between files taken by where they begin."""
    wrong = 0
    stretches = []
    for file in files:
        rows = file.filter(pc.invert(file["late"]))
        if not rows.num_rows:
            continue
        keys = np.stack(sort_keys(rows), axis=1)
        wrong += int(_descends(keys[:-1], keys[1:]).sum())
        stretches.append(keys)
    stretches.sort(key=lambda keys: tuple(keys[0]))
    reached: Keys | None = None
    for keys in stretches:
        if reached is not None:
            wrong += int(_descends(np.broadcast_to(reached, keys.shape), keys).sum())
        reached = keys[-1] if reached is None or tuple(keys[-1]) > tuple(reached) else reached
    return wrong


def _descends(before: Keys, after: Keys) -> NDArray[np.bool_]:
    """Row by row, whether ``after`` comes before ``before``."""
    result = np.zeros(len(before), dtype=bool)
    for column in reversed(range(before.shape[1])):
        result = (after[:, column] < before[:, column]) | ((after[:, column] == before[:, column]) & result)
    return result


def _keys(rows: pa.Table | pa.RecordBatch) -> Keys:
    columns = [pc.fill_null(rows[name].cast(pa.int64()), -1).to_numpy() for name in _KEY]
    return np.stack(columns, axis=1)


def _entries(rows: pa.Table | pa.RecordBatch) -> Keys:
    return np.stack([rows[name].to_numpy() for name in ("ledger_id", "entry_id")], axis=1)


def _packed(keys: Keys) -> NDArray[np.void]:
    """Rows as single comparable values."""
    whole = np.ascontiguousarray(keys, dtype=np.int64)
    return whole.view(np.dtype((np.void, whole.shape[1] * 8))).reshape(-1)


def _before(rows: Keys, first: Position | None) -> int:
    """Rows of entries before the first one that the topic still has."""
    if first is None:
        return len(rows)
    ledger_id, entry_id = first.ledger_id, first.entry_id
    return int(((rows[:, 0] < ledger_id) | ((rows[:, 0] == ledger_id) & (rows[:, 1] < entry_id))).sum())


def _committed_range(checkpoint: str, cluster: Cluster, topics: TopicSelection) -> tuple[Offset, Offset]:
    """The query's first offset and that of its last committed batch; the whole topics if there is no checkpoint."""
    known = Checkpoint(checkpoint)
    end = known.committed_offset()
    if end is not None:
        return known.start() or {}, end
    return {}, {name: resolve_end(cluster, name, "latest") for name in cluster.all_partitions(topics)}
