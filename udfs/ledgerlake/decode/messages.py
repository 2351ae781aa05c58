"""The decoder: bundles of raw entries to Arrow batches of messages and of rejects.

The steps for a bundle: read its frames, read every entry's metadata, verify checksums, decompress,
read the batches, and gather the columns. The loops are in ``kernels``. Entries that they mark as
odd are decoded by ``reference``, one at a time, and their rows are inserted between the other rows,
so that rows are always in the order of the entries and batch indexes.

Memory: one slice of a bundle is decompressed at a time, at most ``max_bytes`` of plain payload or
one entry. Odd entries are expanded one at a time. Fields of an entry are copied for each of its
messages, and the values of several odd entries may be large together, so rows are returned in
pieces of ``DECODED_PIECE_BYTES``, or one row if a single one is larger. Apart from that, an entry
allocates at most ``DECODING_FACTOR`` times its bytes, whatever sizes it declares (see
``wire.limits``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.decode import kernels as k
from ledgerlake.decode import schema
from ledgerlake.decode.codecs import DEFAULT_MAX_UNCOMPRESSED_BYTES, decompress
from ledgerlake.decode.crypto import NO_KEYS, CryptoSettings, open_entry
from ledgerlake.decode.reference import Row, decode_base64_key, decode_entry
from ledgerlake.decode.weights import bytes_of
from ledgerlake.errors import CorruptEntryError, MalformedFrameError
from ledgerlake.reasons import CHUNK_PART, Reason
from ledgerlake.wire.entry import encode_entry, message_count, parse_entry
from ledgerlake.wire.fields import property_of
from ledgerlake.wire.limits import DECODED_PIECE_BYTES, MAX_BATCH_MESSAGES, MAX_TIME_MS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Matrix = NDArray[np.int64]

# The largest plain payload of a slice; a larger entry is a slice of its own.
_SLICE_BYTES = 32 * 1024 * 1024

# The smallest batched message: a length and the required payload size.
_LEAST_MESSAGE_BYTES = 6

# The bytes of one row's columns without keys, properties and value, and of one of its properties;
# and the same for a row of the reference decoder.
_ROW_BYTES = 256
_PROPERTY_BYTES = 64
_REFERENCE_ROW_BYTES = 3072
_REFERENCE_PROPERTY_BYTES = 256


@dataclass(frozen=True)
class TopicPartition:
    """The topic partition of entries; ``partition`` is -1 for a topic without partitions."""

    topic: str
    partition: int


@dataclass(frozen=True)
class Decoded:
    """Rows in order: ``messages`` of ``schema.VIEW`` (without rejects), ``rejects`` of
    ``schema.REJECTS``.
    """

    messages: pa.RecordBatch
    rejects: pa.RecordBatch


@dataclass(frozen=True)
class BatchRange:
    """The messages of a batch that belong to a read: those after index ``after``, up to and
    including index ``until``.
    """

    after: int | None = None
    until: int | None = None

    def includes(self, batch_indexes: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return a mask of the messages with some indexes that belong to the read."""
        is_included = np.ones(len(batch_indexes), dtype=bool)
        if self.after is not None:
            is_included &= batch_indexes > self.after
        if self.until is not None:
            is_included &= batch_indexes <= self.until
        return is_included

    def includes_whole(self, entry: bytes | memoryview) -> bool:
        """Return whether the read gets an entry that is one thing and not its messages: a reject, a
        chunk, a marker, or a row of the stored entry. Its place is that of its last message. So of
        several reads, one after the other, one gets it, and a read that begins inside it too.
        """
        place = message_count(memoryview(entry)) - 1
        is_read_before = self.after is not None and place <= self.after
        return not is_read_before and (self.until is None or place <= self.until)


WHOLE_BATCH = BatchRange()


@dataclass(frozen=True)
class _Rules:
    """The rules that hold for every entry of a read."""

    max_bytes: int
    crypto: CryptoSettings
    chunks_as_rejects: bool


@dataclass(frozen=True)
class _Slice:
    """Some entries of one buffer with their metadata.

    ``stored`` has the stored bytes of decrypted entries, by ledger and entry.
    """

    buffer: Bytes
    entries: Matrix
    status: NDArray[np.int8]
    stored: Mapping[tuple[int, int], memoryview]


def decode_bundle(
    frames: pa.Buffer | memoryview | bytes,
    source: TopicPartition,
    *,
    first_entry: BatchRange = WHOLE_BATCH,
    max_bytes: int = DEFAULT_MAX_UNCOMPRESSED_BYTES,
    crypto: CryptoSettings = NO_KEYS,
    chunks_as_rejects: bool = True,
) -> Iterator[Decoded]:
    """Decode consecutive MESSAGE frames.

    Args:
        first_entry: the messages of the first entry that belong to the read; others are left out.
        max_bytes: an entry that becomes larger, by compression or by copies of its metadata, is a
            reject.
        crypto: how encrypted entries are decrypted.
        chunks_as_rejects: chunks become rejects (``chunk_part``) instead of rows with chunk
            columns.

    Raises:
        MalformedFrameError: the bundle does not consist of complete frames, which is a bug.
        DecryptionError: there is no key for an entry, and the settings are to fail.
    """
    buffer, entries = read_entry_table(frames)
    yield from _decode(
        buffer, entries, source, first_entry, _Rules(max_bytes, crypto, chunks_as_rejects)
    )


def decode_entries(
    raw: pa.BinaryArray,
    ledger_ids: Matrix,
    entry_ids: Matrix,
    source: TopicPartition,
    *,
    max_bytes: int = DEFAULT_MAX_UNCOMPRESSED_BYTES,
    crypto: CryptoSettings = NO_KEYS,
) -> Iterator[Decoded]:
    """Decode stored entries, one for each array element: the bytes after the command, as in
    ``view = entries``.
    """
    buffer = np.frombuffer(raw.buffers()[2] or b"", dtype=np.uint8)
    offsets = np.frombuffer(raw.buffers()[1], dtype=np.int32)[
        raw.offset : raw.offset + len(raw) + 1
    ]
    entries = np.zeros((len(raw), k.ENTRY_COLUMNS), dtype=np.int64)
    entries[:, k.E_START], entries[:, k.E_END] = offsets[:-1], offsets[1:]
    entries[:, k.E_LEDGER], entries[:, k.E_ENTRY] = ledger_ids, entry_ids
    yield from _decode(buffer, entries, source, WHOLE_BATCH, _Rules(max_bytes, crypto, True))


def as_view(messages: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of ``schema.MESSAGES`` in the columns of ``schema.VIEW``."""
    missing = [
        pa.nulls(messages.num_rows, field.type)
        for field in list(schema.VIEW)[len(schema.MESSAGES) :]
    ]
    return pa.RecordBatch.from_arrays([*messages.columns, *missing], schema=schema.VIEW)


def rejects_as_view(rejects: pa.RecordBatch) -> pa.RecordBatch:
    """Return rejects in the columns of ``schema.VIEW``: a ``reject_reason``, and the entry's bytes
    in ``value``; of an entry without bytes, the detail.
    """
    count = rejects.num_rows
    arrays = {
        name: rejects[name]
        for name in ("topic", "partition", "message_id", "ledger_id", "entry_id")
    }
    arrays |= {
        "broker_timestamp": rejects["broker_timestamp"],
        "broker_index": rejects["broker_index"],
    }
    has_bytes = pc.fill_null(pc.greater(pc.binary_length(rejects["entry"]), 0), False)
    shown = pc.if_else(has_bytes, rejects["entry"], rejects["detail"].cast(pa.binary()))
    arrays |= {"reject_reason": rejects["reason"], "value": shown}
    columns = [arrays.get(field.name, pa.nulls(count, field.type)) for field in schema.VIEW]
    return pa.RecordBatch.from_arrays(columns, schema=schema.VIEW)


def read_entry_table(frames: pa.Buffer | memoryview | bytes) -> tuple[Bytes, Matrix]:
    """Return a bundle's bytes, and start, end, ledger and entry of each of its entries
    (``kernels.E_*`` columns).

    Raises:
        MalformedFrameError: the bundle does not consist of complete frames.
    """
    buffer = np.frombuffer(frames, dtype=np.uint8)
    entries = np.zeros((k.count_frames(buffer), k.ENTRY_COLUMNS), dtype=np.int64)
    if k.walk_frames(buffer, entries) != len(entries):
        raise MalformedFrameError(
            "a bundle does not consist of whole frames; this is a bug, please report it"
        )
    return buffer, entries


def _decode(
    buffer: Bytes,
    entries: Matrix,
    source: TopicPartition,
    first_entry: BatchRange,
    rules: _Rules,
) -> Iterator[Decoded]:
    status = np.zeros(len(entries), dtype=np.int8)
    k.walk_entries(buffer, entries, status)
    stored: dict[tuple[int, int], memoryview] = {}
    if rules.crypto != NO_KEYS and (status != k.OK).any():
        buffer, stored = _open_encrypted(buffer, entries, status, rules.crypto)
    _verify_checksums(buffer, entries, status)
    too_large = (entries[:, k.E_UNCOMPRESSED] > rules.max_bytes) & (entries[:, k.E_COMPRESSION] > 0)
    copied = np.maximum(entries[:, k.E_BATCH], 0) * _copied_bytes(entries, status) > rules.max_bytes
    status[(status == k.OK) & (too_large | copied)] = k.ODD
    for start, stop in _slices(entries, status):
        part = _expand(
            _Slice(buffer, entries[start:stop], status[start:stop], stored), rules.max_bytes
        )
        batch_range = first_entry if start == 0 else WHOLE_BATCH
        yield from _decode_slice(part, source, batch_range, rules)


def _open_encrypted(
    buffer: Bytes, entries: Matrix, status: NDArray[np.int8], crypto: CryptoSettings
) -> tuple[Bytes, dict[tuple[int, int], memoryview]]:
    """Return a buffer in which entries that a key decrypts are replaced by decrypted ones, whose
    metadata is read again; the others stay odd.

    Also return the stored bytes of the decrypted entries, by ledger and entry: a reject never
    contains decrypted bytes.
    """
    opened = {
        row: plain
        for row in np.flatnonzero(status != k.OK).tolist()
        if (plain := _opened(buffer, entries[row], crypto))
    }
    if not opened:
        return buffer, {}
    stored = {_place(entries[row]): buffer.data[slice(*_span(entries[row]))] for row in opened}
    spans = entries[:, [k.E_START, k.E_END]].tolist()
    pieces = [opened.get(row) or buffer.data[start:end] for row, (start, end) in enumerate(spans)]
    entries[:, k.E_END] = np.cumsum([len(piece) for piece in pieces])
    entries[:, k.E_START] = np.concatenate([[0], entries[:-1, k.E_END]])
    status[list(opened)] = k.OK
    together = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    k.walk_entries(together, entries, status)
    return together, stored


def _span(entry: Matrix) -> tuple[int, int]:
    return int(entry[k.E_START]), int(entry[k.E_END])


def _place(entry: Matrix) -> tuple[int, int]:
    return int(entry[k.E_LEDGER]), int(entry[k.E_ENTRY])


def _opened(buffer: Bytes, entry: Matrix, crypto: CryptoSettings) -> bytes | None:
    """Return the decrypted entry; None if it is not encrypted, no key decrypts it, or it is a
    chunk.
    """
    try:
        raw = parse_entry(buffer.data[entry[k.E_START] : entry[k.E_END]])
        if not raw.metadata.encryption_keys or raw.metadata.num_chunks_from_msg > 1:
            return None
        plain = open_entry(raw, crypto)
    except CorruptEntryError:
        return None
    return encode_entry(plain.metadata, bytes(plain.payload), plain.broker)


def _verify_checksums(buffer: Bytes, entries: Matrix, status: NDArray[np.int8]) -> None:
    view, checksum = buffer.data, crc32c.crc32c
    rows = np.flatnonzero((status == k.OK) & (entries[:, k.E_CRC] != k.NONE))
    starts, ends = entries[rows, k.E_BODY].tolist(), entries[rows, k.E_END].tolist()
    checksums = [checksum(view[start:end]) for start, end in zip(starts, ends, strict=True)]
    status[rows[entries[rows, k.E_CRC] != np.array(checksums, dtype=np.int64)]] = k.ODD


def _slices(entries: Matrix, status: NDArray[np.int8]) -> Iterator[tuple[int, int]]:
    """Yield slices whose plain payloads and messages together stay within a slice's size; each has
    at least one entry.
    """
    packed = entries[:, k.E_END] - entries[:, k.E_START]
    plain = np.where(
        (status == k.OK) & (entries[:, k.E_COMPRESSION] > 0), entries[:, k.E_UNCOMPRESSED], packed
    )
    counts = np.maximum(np.where(status == k.OK, entries[:, k.E_BATCH], 1), 1)
    if plain.sum() <= _SLICE_BYTES and counts.sum() <= MAX_BATCH_MESSAGES and len(entries):
        yield 0, len(entries)
        return
    start, total_bytes, total_rows = 0, 0, 0
    for row, (size, count) in enumerate(zip(plain.tolist(), counts.tolist(), strict=True)):
        if row > start and (
            total_bytes + size > _SLICE_BYTES or total_rows + count > MAX_BATCH_MESSAGES
        ):
            yield start, row
            start, total_bytes, total_rows = row, 0, 0
        total_bytes += size
        total_rows += count
    if start < len(entries):
        yield start, len(entries)


def _expand(part: _Slice, max_bytes: int) -> _Slice:
    """Append decompressed payloads to the buffer, and make the entries refer to them."""
    compressed = np.flatnonzero((part.status == k.OK) & (part.entries[:, k.E_COMPRESSION] > 0))
    if not len(compressed):
        return part
    view = part.buffer.data
    first, last = int(part.entries[0, k.E_START]), int(part.entries[-1, k.E_END])
    pieces: list[bytes | memoryview] = [view[first:last]]
    position = last - first
    _shift(part.entries, -first)
    spans = part.entries[:, [k.E_COMPRESSION, k.E_PAYLOAD, k.E_END, k.E_UNCOMPRESSED]].tolist()
    for row in compressed.tolist():
        codec, start, end, declared_bytes = spans[row]
        try:
            plain = decompress(codec, pieces[0][start:end], declared_bytes, max_bytes)  # type: ignore[arg-type]
        except CorruptEntryError:
            part.status[row] = k.ODD
            continue
        pieces.append(plain)
        part.entries[row, k.E_PLAIN], part.entries[row, k.E_PLAIN_END] = (
            position,
            position + len(plain),
        )
        position += len(plain)
    return _Slice(
        np.frombuffer(b"".join(pieces), dtype=np.uint8), part.entries, part.status, part.stored
    )


_POSITION_COLUMNS = [
    k.E_START, k.E_END, k.E_BODY, k.E_METADATA, k.E_PAYLOAD, k.E_PRODUCER, k.E_KEY, k.E_ORDERING, k.E_SCHEMA, k.E_PLAIN, k.E_PLAIN_END,
]  # fmt: skip


def _shift(entries: Matrix, distance: int) -> None:
    """Add an offset to every position of the entries that is present."""
    for column in _POSITION_COLUMNS:
        present = entries[:, column] != k.NONE
        entries[present, column] += distance


def _decode_slice(
    part: _Slice, source: TopicPartition, first_entry: BatchRange, rules: _Rules
) -> Iterator[Decoded]:
    fields = _allocate_fields(part)
    fields = fields[:, : k.walk_messages(part.buffer, part.entries, part.status, fields)]
    for run in _runs(part, fields, source, rules):
        messages = (
            _columns(part, fields[:, run.start : run.stop], source)
            if run.stop > run.start
            else _NO_MESSAGES
        )
        if run.odd_rows:
            entry_numbers = np.concatenate(
                [fields[k.M_ENTRY, run.start : run.stop], run.odd_entries]
            )
            messages = _put_back(messages, run.odd_rows, entry_numbers, source)
        rejects = run.rejects
        if first_entry != WHOLE_BATCH:
            messages = _keep_part(messages, part.entries[0], first_entry)
            rejects = _keep_rejects(rejects, part.entries[0], first_entry)
        yield Decoded(
            messages, _to_batch(rejects, source, schema.REJECTS) if rejects else _NO_REJECTS
        )


@dataclass
class _Run:
    """Messages that are returned together: messages that the kernels read, as columns of a slice's
    fields, and the rows of odd entries between them, each with its entry's number in the slice.
    """

    start: int = 0
    stop: int = 0
    odd_rows: list[Row] = field(default_factory=list)
    odd_entries: list[int] = field(default_factory=list)
    rejects: list[Row] = field(default_factory=list)
    odd_bytes: int = 0

    def add(self, row: Row, index: int, size_bytes: int) -> None:
        """Add a row of the reference decoder, from the entry of this number."""
        if "reason" in row:
            self.rejects.append(row)
        else:
            self.odd_rows.append(row)
            self.odd_entries.append(index)
        self.odd_bytes += size_bytes

    def extend(self, later: _Run) -> None:
        """Add the rows of an odd entry that is behind this run."""
        self.odd_rows += later.odd_rows
        self.odd_entries += later.odd_entries
        self.rejects += later.rejects
        self.odd_bytes += later.odd_bytes


def _runs(part: _Slice, fields: Matrix, source: TopicPartition, rules: _Rules) -> Iterator[_Run]:
    """Yield the messages of a slice in order, in pieces of limited size; at least one piece.

    A batch is in one piece, or begins a piece. So the entries before it in a bundle do not decide
    how it is cut: rejects of its messages are made by piece. Only the size ends a piece, since each
    one has a cost of its own, however few messages it has.
    """
    row_bytes = _ROW_BYTES + len(source.topic) + _copied_bytes(part.entries, part.status)
    most_bytes = fields.shape[1] * int(row_bytes.max(initial=0)) + _PROPERTY_BYTES * int(
        fields[k.M_PROPERTIES].sum()
    )
    if (part.status == k.OK).all() and most_bytes <= DECODED_PIECE_BYTES:
        yield _Run(0, fields.shape[1])
        return
    counts = np.bincount(fields[k.M_ENTRY], minlength=len(part.entries))
    behind = np.cumsum(counts)
    # The values of a slice are limited already.
    own_bytes = _PROPERTY_BYTES * fields[k.M_PROPERTIES]
    sizes = np.concatenate([[0], np.cumsum(np.repeat(row_bytes, counts) + own_bytes)])
    run = _Run()
    yielded = False
    for index in [*np.flatnonzero(part.status != k.OK).tolist(), None]:
        reached = fields.shape[1] if index is None else int(behind[index])
        while (
            run.odd_bytes + sizes[reached] - sizes[run.start] > DECODED_PIECE_BYTES
            and reached > run.stop
        ):
            # The messages up to ``stop`` fit. Without odd entries, more of them may fit.
            if not run.odd_rows and not run.rejects:
                fitting = (
                    int(np.searchsorted(sizes, sizes[run.start] + DECODED_PIECE_BYTES, "right")) - 1
                )
                whole = int(behind[behind <= fitting].max(initial=0))
                run.stop = min(whole if whole > run.start else max(fitting, run.start + 1), reached)
            yield run
            yielded, run = True, _Run(run.stop, run.stop)
        run.stop = reached
        if index is None:
            break
        batch = _Run(reached, reached)
        held_bytes = run.odd_bytes + int(sizes[run.stop] - sizes[run.start])
        for row in _judge(part, index, rules):
            size_bytes = _row_bytes(row)
            # Two values together may be larger than a column can be.
            if held_bytes and held_bytes + batch.odd_bytes + size_bytes > DECODED_PIECE_BYTES:
                yield run
                yielded, run, held_bytes = True, _Run(reached, reached), 0
            if batch.odd_bytes and batch.odd_bytes + size_bytes > DECODED_PIECE_BYTES:
                yield batch
                yielded, batch = True, _Run(reached, reached)
            batch.add(row, index, size_bytes)
        run.extend(batch)
    if not yielded or run.stop > run.start or run.odd_bytes:
        yield run


def _row_bytes(row: Row) -> int:
    """Return how many bytes a row of the reference decoder takes at most, as Python objects."""
    texts = sum(len(value) for value in row.values() if isinstance(value, (str, bytes)))
    properties = row.get("properties") or ()
    texts += sum(_REFERENCE_PROPERTY_BYTES + len(key) + len(value) for key, value in properties)
    return _REFERENCE_ROW_BYTES + texts


def _copied_bytes(entries: Matrix, status: NDArray[np.int8]) -> Matrix:
    """Return how many bytes of each entry are copied for each of its messages."""
    sizes = np.maximum(entries[:, k.E_PRODUCER_SIZE], 0) + np.maximum(
        entries[:, k.E_SCHEMA_SIZE], 0
    )
    return np.where(status == k.OK, sizes, 0)


def _allocate_fields(part: _Slice) -> Matrix:
    """Allocate the fields for as many messages as the entries declare, but not for more than their
    bytes can contain.
    """
    plain = part.entries[:, k.E_PLAIN_END] - part.entries[:, k.E_PLAIN]
    claimed = np.where(part.entries[:, k.E_BATCH] == k.NONE, 1, part.entries[:, k.E_BATCH])
    possible = np.where(part.entries[:, k.E_BATCH] == k.NONE, 1, plain // _LEAST_MESSAGE_BYTES + 1)
    count = int(np.minimum(claimed, possible)[part.status == k.OK].sum())
    return np.empty((k.MESSAGE_FIELDS, count), dtype=np.int64)


def _judge(part: _Slice, index: int, rules: _Rules) -> Iterator[Row]:
    """Return the reference decoder's rows of an odd entry."""
    start, end, ledger_id, entry_id = part.entries[
        index, [k.E_START, k.E_END, k.E_LEDGER, k.E_ENTRY]
    ].tolist()
    raw = part.stored.get((ledger_id, entry_id)) or part.buffer.data[start:end]
    try:
        rows = decode_entry(raw, ledger_id, entry_id, rules.max_bytes, rules.crypto)
    except CorruptEntryError as error:
        yield _reject(raw, part.entries[index], error.reason, error.message)
        return
    for row in rows:
        if rules.chunks_as_rejects and "chunk_uuid" in row:
            detail = f"part {row['chunk_id']} of {row['chunk_count']} of {row['chunk_uuid']}"
            yield _reject(raw, part.entries[index], CHUNK_PART, detail)
        else:
            yield row


def _reject(raw: memoryview, entry: Matrix, reason: Reason, detail: str) -> Row:
    broker_time, broker_index = int(entry[k.E_BROKER_TIME]), int(entry[k.E_BROKER_INDEX])
    return {
        "message_id": f"{entry[k.E_LEDGER]}:{entry[k.E_ENTRY]}",
        "ledger_id": int(entry[k.E_LEDGER]),
        "entry_id": int(entry[k.E_ENTRY]),
        "broker_timestamp": broker_time * 1000 if 0 <= broker_time <= MAX_TIME_MS else None,
        "broker_index": broker_index if broker_index >= 0 else None,
        "reason": reason,
        "detail": detail,
        "entry": bytes(raw),
    }


def _put_back(
    messages: pa.RecordBatch,
    odd_rows: list[Row],
    entry_numbers: NDArray[np.int64],
    source: TopicPartition,
) -> pa.RecordBatch:
    """Return messages with the rows of odd entries, in the order of the entries, which need not be
    that of their positions.
    """
    odd = _to_batch(odd_rows, source, schema.VIEW)
    if not messages.num_rows:
        return odd
    both = pa.Table.from_batches([messages, odd]).combine_chunks()
    order = np.argsort(entry_numbers, kind="stable")
    return both.take(order).combine_chunks().to_batches()[0]


def _keep_part(messages: pa.RecordBatch, first_entry: Matrix, part: BatchRange) -> pa.RecordBatch:
    of_first = (messages["ledger_id"].to_numpy() == first_entry[k.E_LEDGER]) & (
        messages["entry_id"].to_numpy() == first_entry[k.E_ENTRY]
    )
    is_included = part.includes(messages["batch_index"].to_numpy())
    return messages.filter(pa.array(~of_first | is_included))


def _keep_rejects(rejects: list[Row], first_entry: Matrix, part: BatchRange) -> list[Row]:
    return [
        reject
        for reject in rejects
        if (reject["ledger_id"], reject["entry_id"]) != _place(first_entry)
        or part.includes_whole(reject["entry"])
    ]


_NO_MESSAGES = pa.RecordBatch.from_arrays(
    [pa.nulls(0, field.type) for field in schema.VIEW], schema=schema.VIEW
)
_NO_REJECTS = pa.RecordBatch.from_arrays(
    [pa.nulls(0, field.type) for field in schema.REJECTS], schema=schema.REJECTS
)


def _to_batch(rows: list[Row], source: TopicPartition, target: pa.Schema) -> pa.RecordBatch:
    complete_rows = [
        {"topic": source.topic, "partition": source.partition, "late": False, **row} for row in rows
    ]
    return pa.RecordBatch.from_pylist(complete_rows, schema=target)


def _columns(part: _Slice, fields: Matrix, source: TopicPartition) -> pa.RecordBatch:
    """Return the messages of some fields; there must be one at least."""
    # Messages are in the order of their entries. Other entries than theirs are left out.
    first, last = fields[k.M_ENTRY, [0, -1]].tolist()
    part = _Slice(
        part.buffer, part.entries[first : last + 1], part.status[first : last + 1], part.stored
    )
    entry = fields[k.M_ENTRY] - first
    of_entries = np.bincount(entry, minlength=len(part.entries))
    ledger_ids, entry_ids, broker_ms, publish_ms, deliver_ms = (
        np.repeat(part.entries[:, column], of_entries)
        for column in (k.E_LEDGER, k.E_ENTRY, k.E_BROKER_TIME, k.E_PUBLISH, k.E_DELIVER)
    )
    count = len(entry)
    buffer = part.buffer
    null_value = fields[k.M_NULL] == 1
    value_sizes = np.where(null_value, k.NONE, fields[k.M_VALUE_SIZE])
    key, key_bytes = _keys(buffer, fields)
    arrays: dict[str, pa.Array] = {
        "topic": pa.repeat(pa.scalar(source.topic, pa.string()), count),
        "partition": pa.repeat(pa.scalar(source.partition, pa.int32()), count),
        "message_id": _message_ids(ledger_ids, entry_ids, fields[k.M_BATCH_INDEX]),
        "ledger_id": pa.array(ledger_ids),
        "entry_id": pa.array(entry_ids),
        "batch_index": pa.array(fields[k.M_BATCH_INDEX].astype(np.int32)),
        "broker_timestamp": _times(broker_ms, k.NONE),
        "broker_index": _integers(fields[k.M_BROKER_INDEX]),
        "publish_time": _times(_known(publish_ms), k.NONE),
        "event_time": _times(_known(fields[k.M_EVENT]), 0),
        "deliver_at": _times(deliver_ms, k.NONE),
        "delivered_at": pa.nulls(count, schema.TIMESTAMP),
        "producer_name": _per_entry(part, k.E_PRODUCER, k.E_PRODUCER_SIZE, pa.string(), entry),
        "sequence_id": _integers(fields[k.M_SEQUENCE]),
        "key": key,
        "key_bytes": key_bytes,
        "ordering_key": _spans(
            buffer,
            fields[k.M_ORDERING],
            _absent(fields, k.M_ORDERING, k.M_ORDERING_SIZE),
            pa.binary(),
        ),
        "properties": _properties(
            buffer, fields, {"publish_time": publish_ms, "event_time": fields[k.M_EVENT]}
        ),
        "schema_version": _per_entry(part, k.E_SCHEMA, k.E_SCHEMA_SIZE, pa.binary(), entry),
        "is_null": pa.array(null_value),
        "late": pa.repeat(pa.scalar(False), count),
        "chunk_count": pa.nulls(count, pa.int32()),
        "first_chunk_id": pa.nulls(count, pa.string()),
        "value": _spans(buffer, fields[k.M_VALUE], value_sizes, pa.binary()),
        "chunk_uuid": pa.nulls(count, pa.string()),
        "chunk_id": pa.nulls(count, pa.int32()),
        "chunk_total_bytes": pa.nulls(count, pa.int64()),
        "reject_reason": pa.nulls(count, pa.string()),
    }
    return pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema.VIEW)


def _absent(fields: Matrix, start_field: int, size_field: int) -> Matrix:
    """Return sizes, with NONE if the field is absent."""
    return np.where(fields[start_field] == k.NONE, k.NONE, fields[size_field])


def _per_entry(
    part: _Slice, start_column: int, size_column: int, kind: pa.DataType, entry: Matrix
) -> pa.Array:
    """Return a field of each message's entry. An odd entry may have incomplete fields, but has no
    messages here.
    """
    sizes = np.where(part.status == k.OK, part.entries[:, size_column], k.NONE)
    values = _spans(part.buffer, part.entries[:, start_column], sizes, kind)
    return (
        pa.nulls(len(entry), kind)
        if values.null_count == len(values)
        else values.take(pa.array(entry))
    )


def _keys(buffer: Bytes, fields: Matrix) -> tuple[pa.Array, pa.Array]:
    sizes = _absent(fields, k.M_KEY, k.M_KEY_SIZE)
    encoded = (fields[k.M_KEY_BASE64] == 1) & (sizes != k.NONE)
    if not encoded.any():
        return _spans(buffer, fields[k.M_KEY], sizes, pa.string()), pa.nulls(
            fields.shape[1], pa.binary()
        )
    text = _spans(buffer, fields[k.M_KEY], np.where(encoded, k.NONE, sizes), pa.string())
    packed = _spans(buffer, fields[k.M_KEY], np.where(encoded, sizes, k.NONE), pa.string())
    plain = [None if key is None else decode_base64_key(key) for key in packed.to_pylist()]
    return text, pa.array(plain, pa.binary())


def _spans(buffer: Bytes, starts: Matrix, sizes: Matrix, kind: pa.DataType) -> pa.Array:
    """Copy spans of the buffer into an Arrow array; size NONE is null."""
    present = sizes != k.NONE
    if not present.any():
        return pa.nulls(len(sizes), kind)
    lengths = np.where(present, sizes, 0)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    data = np.empty(int(offsets[-1]), dtype=np.uint8)
    k.gather(buffer, starts, lengths, offsets, data)
    buffers = [_validity(present), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, len(sizes), buffers)


def _validity(present: NDArray[np.bool_]) -> pa.Buffer | None:
    return None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))


def _integers(values: Matrix) -> pa.Array:
    present = values != k.NONE
    # Without the copy, the array would keep all fields of its messages in memory.
    return pa.Array.from_buffers(
        pa.int64(), len(values), [_validity(present), pa.py_buffer(values.copy())]
    )


def _times(values_ms: Matrix, absent: int) -> pa.Array:
    present = (values_ms != absent) & (values_ms != k.NONE)
    if not present.any():
        return pa.nulls(len(values_ms), schema.TIMESTAMP)
    microseconds = np.where(present, values_ms, 0) * 1000
    return pa.Array.from_buffers(
        schema.TIMESTAMP, len(values_ms), [_validity(present), pa.py_buffer(microseconds)]
    )


def _known(values_ms: Matrix) -> Matrix:
    """Return times, absent if they are out of range."""
    return (
        np.where(values_ms > MAX_TIME_MS, k.NONE, values_ms)
        if _passes_range(values_ms)
        else values_ms
    )


def _passes_range(values_ms: Matrix) -> bool:
    return bool(values_ms.max(initial=0) > MAX_TIME_MS)


def _message_ids(ledgers: Matrix, entries: Matrix, batch_indexes: Matrix) -> pa.Array:
    offsets = np.empty(len(ledgers) + 1, dtype=np.int32)
    out = np.empty(60 * len(ledgers), dtype=np.uint8)
    used = k.write_message_ids(ledgers, entries, batch_indexes, offsets, out)
    return pa.Array.from_buffers(
        pa.string(), len(ledgers), [None, pa.py_buffer(offsets), pa.py_buffer(out[:used].copy())]
    )


def _properties(buffer: Bytes, fields: Matrix, times_ms: dict[str, Matrix]) -> pa.Array:
    """Return each message's properties, followed by its times that are out of range. Of a key that
    a message has several times, the last value counts, as in Pulsar's clients.
    """
    counts = fields[k.M_PROPERTIES]
    spans = np.empty((int(counts.sum()), 4), dtype=np.int64)
    repeats = k.walk_properties(buffer, np.ascontiguousarray(fields), spans)
    keys: Any = (
        _spans(buffer, spans[:, 0], spans[:, 1], pa.string())
        if len(spans)
        else pa.array([], pa.string())
    )
    values: Any = (
        _spans(buffer, spans[:, 2], spans[:, 3], pa.string())
        if len(spans)
        else pa.array([], pa.string())
    )
    for column, numbers in times_ms.items():
        if _passes_range(numbers):
            rows = np.flatnonzero(numbers > MAX_TIME_MS)
            owners = np.repeat(np.arange(len(counts)), counts)
            order = pa.array(np.argsort(np.concatenate([owners, rows]), kind="stable"))
            more = pa.repeat(pa.scalar(property_of(column), pa.string()), len(rows))
            keys = pa.concat_arrays([keys, more]).take(order)
            values = pa.concat_arrays([values, pa.array(numbers[rows]).cast(pa.string())]).take(
                order
            )
            counts = counts + np.bincount(rows, minlength=len(counts))
            repeats = True
    if repeats:
        is_last = np.ones(len(keys), dtype=bool)
        k.mark_last(*bytes_of(keys), counts, is_last)
        # Many names of a message may all be different.
        if not is_last.all():
            owners = np.repeat(np.arange(len(counts)), counts)[is_last]
            counts = np.bincount(owners, minlength=len(counts))
            keys, values = keys.filter(pa.array(is_last)), values.filter(pa.array(is_last))
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, values)
