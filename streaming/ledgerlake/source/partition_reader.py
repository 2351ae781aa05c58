"""One task: read a range of entries and hand it to Spark as Arrow, in the shape of the chosen view.

Stateless by contract: everything arrives in the arguments, so a retried task reads the same again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ledgerlake.client.ahead import ahead
from ledgerlake.client.cluster import shared_cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.client.topics import split_partition
from ledgerlake.decode import schema
from ledgerlake.decode.entries import entry_rows
from ledgerlake.decode.messages import WHOLE, BatchPart, TopicPartition, decode_bundle, rejects_as_view
from ledgerlake.decode.rejects import RejectedEntry, reject_rows
from ledgerlake.decode.split import DATA_LOSS, ENTRIES, LOST, only_entry, split_bundle
from ledgerlake.errors import CorruptEntryError, DataLossError, SetupError
from ledgerlake.source.bounds import entry_from, first_available
from ledgerlake.source.loss import Loss, Taken, find_loss
from ledgerlake.source.positions import next_until
from ledgerlake.wire import commands
from ledgerlake.wire.entry import message_count, read_stamp
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.source.options import SourceOptions
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.wire.connection import EntryReceived

BUNDLE_BYTES = 1024 * 1024

# Read while those before are worked on; each is a bundle or one larger entry.
_BUNDLES_AHEAD = 8

# Entries that are read again may be as large as entries can be, so few are asked for ahead.
_AGAIN_WINDOW = 8
_AGAIN_NEAR = 16


@dataclass(frozen=True)
class Piece:
    """MESSAGE frames of one kind (see ``decode.split``), in order, and what of the first entry belongs to the range.

    ``broker_ms`` is the broker's time of the last entry, where it says one.
    """

    kind: str
    frames: memoryview
    first_entry: BatchPart = WHOLE
    broker_ms: int | None = None


def read_pieces(options: SourceOptions, span: EntryRange) -> Iterator[Piece]:
    """The range in pieces up to a bundle's size, read a little ahead."""
    for item in ahead(_gather(options, span), _BUNDLES_AHEAD):
        if isinstance(item, Loss):
            yield Piece(LOST, _lost_frame(item))
            continue
        frames, first_entry = item
        for number, (kind, piece, broker_ms) in enumerate(split_bundle(frames)):
            yield Piece(kind, piece, first_entry if number == 0 else WHOLE, broker_ms)


def read_bundles(options: SourceOptions, span: EntryRange) -> Iterator[pa.RecordBatch]:
    """The range as rows of ``schema.BUNDLES``: at least one, empty where the range holds no entry."""
    sent = False
    for piece in read_pieces(options, span):
        yield _bundle(span, piece)
        sent = True
    if not sent:
        yield _bundle(span, Piece(ENTRIES, memoryview(b"")))


_Gathered = tuple[bytes | bytearray, BatchPart]


def _gather(options: SourceOptions, span: EntryRange) -> Generator[_Gathered | Loss, None, None]:
    """Frames of consecutive entries, joined up to a bundle's size, and what of the first one belongs to the range.

    Raises:
        DataLossError: the topic no longer has some of them, and the options say so.
    """
    if span.end <= span.after:
        return
    reader = EntryReader(shared_cluster(options.client), span.topic_partition, span.after)
    watch = _LossWatch(options, span)
    parts = _parts(span)
    frames: list[bytes | bytearray] = []
    size = 0
    first_entry = WHOLE
    try:
        while (entry := next_until(reader, span.end)) is not None:
            part = parts.get(_position(entry), WHOLE)
            loss = watch.take(entry)
            if (loss is not None or part != WHOLE) and frames:
                yield _joined(frames), first_entry
                frames, size = [], 0
            if loss is not None:
                yield loss
            first_entry = first_entry if frames else part
            frames.append(entry.frame)
            size += len(entry.frame)
            if size >= BUNDLE_BYTES:
                yield _joined(frames), first_entry
                frames, size = [], 0
    finally:
        reader.close()
    if frames:
        yield _joined(frames), first_entry
    loss = watch.end()
    if loss is not None:
        yield loss


class _LossWatch:
    """Looks for loss where a range goes from one ledger to another, which is the only place where there can be any."""

    def __init__(self, options: SourceOptions, span: EntryRange) -> None:
        self._cluster = shared_cluster(options.client)
        self._fails = options.fail_on_data_loss
        self._span = span
        # What compaction took away is no loss, and what it left stands where ledgers may be gone.
        self._looks = not options.client.read_compacted and span.after.ledger_id >= 0
        self._ledger_id = span.after.ledger_id
        self._last: EntryReceived | None = None

    def take(self, entry: EntryReceived) -> Loss | None:
        """The loss before an entry of the range.

        Raises:
            DataLossError: there is one, and there must not be.
        """
        loss = None
        if self._looks and entry.ledger_id != self._ledger_id:
            loss = self._look(_position(entry), _first_index(entry))
        self._ledger_id, self._last = entry.ledger_id, entry
        return loss

    def end(self) -> Loss | None:
        """The loss before the end of the range, where its last ledger was never seen.

        Raises:
            As ``take``.
        """
        if not self._looks or self._span.end.ledger_id == self._ledger_id:
            return None
        first = entry_from(self._cluster, self._span.topic_partition, BEFORE_ALL, AFTER_ALL)
        return self._look(*(first.position, first.first_index) if first is not None else (self._span.end, None))

    def _look(self, following: Position, first_index: int | None) -> Loss | None:
        begin = first_available(self._cluster, self._span.topic_partition)
        loss = find_loss(self._taken(), following, first_index, begin)
        if loss is not None and self._fails:
            raise DataLossError(
                f"{self._span.topic_partition}: {loss.sentence()}; to record that in rejects and go on, "
                "set failOnDataLoss (fail_on_data_loss) to false"
            )
        return loss

    def _taken(self) -> Taken:
        if self._last is None:
            return Taken(self._span.after, self._span.after_index)
        try:
            return Taken(_position(self._last), read_stamp(self._last.entry).index)
        except CorruptEntryError:
            return Taken(_position(self._last))


def _first_index(entry: EntryReceived) -> int | None:
    try:
        index = read_stamp(entry.entry).index
    except CorruptEntryError:
        return None
    return None if index is None else index - message_count(entry.entry) + 1


def _lost_frame(loss: Loss) -> memoryview:
    return memoryview(commands.message(0, loss.first.ledger_id, loss.first.entry_id, loss.sentence().encode()))


def read_loss(frames: memoryview) -> RejectedEntry:
    """What is lost, from a piece of that kind."""
    position, sentence = only_entry(frames)
    return RejectedEntry(position, b"", DATA_LOSS, bytes(sentence).decode())


def _joined(frames: list[bytes | bytearray]) -> bytes | bytearray:
    return frames[0] if len(frames) == 1 else b"".join(frames)


def read_again(client: ClientSettings, topic_partition: str, positions: Iterable[Position]) -> Iterator[bytes | None]:
    """Single entries by position, in the order asked for; None for one that the topic no longer has.

    Positions that rise and are near to each other are read in one go.

    Raises:
        TopicNotFoundError, BrokerError, TransportError: as for a reader.
    """
    reader: EntryReader | None = None
    taken: EntryReceived | None = None
    try:
        for position in positions:
            if reader is None or not _is_near(reader, taken, position):
                if reader is not None:
                    reader.close()
                before = Position(position.ledger_id, position.entry_id - 1)
                reader, taken = EntryReader(shared_cluster(client), topic_partition, before, _AGAIN_WINDOW), None
            while taken is None or _position(taken) < position:
                taken = next_until(reader, position)
                if taken is None:
                    break
            yield bytes(taken.entry) if taken is not None and _position(taken) == position else None
    finally:
        if reader is not None:
            reader.close()


def _is_near(reader: EntryReader, taken: EntryReceived | None, position: Position) -> bool:
    """Whether reading on is cheaper than a new start. A reader that found a gap may have passed over what comes next."""
    reached = reader.after
    distance = position.entry_id - reached.entry_id
    return taken is not None and reached.ledger_id == position.ledger_id and 0 <= distance <= _AGAIN_NEAR


def _position(entry: EntryReceived) -> Position:
    return Position(entry.ledger_id, entry.entry_id)


def read_messages(options: SourceOptions, span: EntryRange) -> Iterator[pa.RecordBatch]:
    """The range as rows of ``schema.VIEW``; a bad entry is a row with its bytes in ``value`` and a ``reject_reason``."""
    source = TopicPartition(*split_partition(span.topic_partition))
    for piece in read_pieces(options, span):
        yield from piece_as_view(piece, source, options)


def piece_as_view(piece: Piece, source: TopicPartition, options: SourceOptions) -> Iterator[pa.RecordBatch]:
    """A piece as rows of ``schema.VIEW``.

    Raises:
        SetupError: as ``check_broker_metadata``.
    """
    if piece.kind == LOST:
        yield from map(rejects_as_view, reject_rows([read_loss(piece.frames)], source).to_batches())
        return
    decoded_parts = decode_bundle(
        piece.frames,
        source,
        first_entry=piece.first_entry,
        max_bytes=options.max_uncompressed_bytes,
        chunks_as_rejects=False,
    )
    for decoded in decoded_parts:
        check_broker_metadata(options.require_broker_metadata, decoded.messages, source)
        yield decoded.messages
        if decoded.rejects.num_rows:
            yield rejects_as_view(decoded.rejects)


def read_entries(options: SourceOptions, span: EntryRange) -> Iterator[pa.RecordBatch]:
    """The range as rows of ``schema.ENTRIES``, one per stored entry."""
    source = TopicPartition(*split_partition(span.topic_partition))
    for piece in read_pieces(options, span):
        yield entry_rows(piece.frames, source, DATA_LOSS if piece.kind == LOST else None)


def check_broker_metadata(required: bool, messages: pa.RecordBatch, source: TopicPartition) -> None:
    """Refuse messages without a broker timestamp where the user asked for that.

    Raises:
        SetupError: there are such messages.
    """
    if required and messages["broker_timestamp"].null_count:
        raise SetupError(
            f"the broker adds no entry metadata to {source.topic}; set brokerEntryMetadataInterceptors and "
            "exposingBrokerEntryMetadataToClientEnabled in its configuration, or drop require_broker_metadata"
        )


def _parts(span: EntryRange) -> dict[Position, BatchPart]:
    """The entries of a range of which not every message belongs to it."""
    parts = {}
    if span.after_batch_index is not None:
        parts[Position(span.after.ledger_id, span.after.entry_id + 1)] = BatchPart(after=span.after_batch_index)
    if span.end_batch_index is not None:
        parts[span.end] = replace(parts.get(span.end, WHOLE), until=span.end_batch_index)
    return parts


def _bundle(span: EntryRange, piece: Piece) -> pa.RecordBatch:
    data = piece.frames
    topic, partition = split_partition(span.topic_partition)
    columns = [
        pa.array([topic], pa.string()),
        pa.array([partition], pa.int32()),
        pa.array([piece.kind], pa.string()),
        pa.array([span.end.ledger_id], pa.int64()),
        pa.array([span.end.entry_id], pa.int64()),
        pa.array([span.clock_ms], pa.int64()),
        pa.array([piece.first_entry.after], pa.int32()),
        pa.array([piece.first_entry.until], pa.int32()),
        pa.array([piece.broker_ms], pa.int64()),
        pa.Array.from_buffers(
            pa.binary(), 1, [None, pa.py_buffer(np.array([0, len(data)], dtype=np.int32)), pa.py_buffer(data)]
        ),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema.BUNDLES)
