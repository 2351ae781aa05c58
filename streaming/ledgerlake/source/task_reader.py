"""One task: read a range of entries and hand it to Spark as Arrow, in the shape of the chosen view.

Stateless by contract: everything arrives in the arguments, so a retried task reads the same again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ledgerlake.client.cluster import shared_cluster
from ledgerlake.client.prefetch import ahead
from ledgerlake.client.reader import EntryReader
from ledgerlake.client.topics import split_partition
from ledgerlake.decode import schema
from ledgerlake.decode.compat import as_compat
from ledgerlake.decode.entries import entry_rows
from ledgerlake.decode.messages import WHOLE, BatchPart, TopicPartition, decode_bundle, rejects_as_view
from ledgerlake.decode.rejects import RejectedEntry, read_reject, reject_frame, reject_rows, rejected_row
from ledgerlake.decode.split import ENTRIES, REJECT, split_bundle
from ledgerlake.decode.typed import type_values
from ledgerlake.errors import SetupError, TopicNotFoundError
from ledgerlake.source.positions import next_until
from ledgerlake.source.range_reader import gather
from ledgerlake.source.value_schemas import schemas_of
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.wire.connection import EntryReceived

# Read while those before are worked on; each is a bundle or one larger entry.
_BUNDLES_AHEAD = 8

# Entries that are read again may be as large as entries can be, so few are asked for ahead.
_AGAIN_WINDOW = 8
_AGAIN_NEAR = 16


@dataclass(frozen=True)
class Piece:
    """MESSAGE frames of one kind (see ``decode.split``), in order, and what of the first entry belongs to the range.

    ``broker_ms`` is the broker's time of the last entry, if it says one.
    """

    kind: str
    frames: memoryview
    first_entry: BatchPart = WHOLE
    broker_ms: int | None = None


def read_pieces(options: SourceOptions, span: EntryRange) -> Iterator[Piece]:
    """The range in pieces up to a bundle's size, read a little ahead."""
    for item in ahead(gather(options, span), _BUNDLES_AHEAD):
        if isinstance(item, RejectedEntry):
            yield Piece(REJECT, reject_frame(item))
            continue
        frames, first_entry = item
        for number, (kind, piece, broker_ms) in enumerate(split_bundle(frames)):
            yield Piece(kind, piece, first_entry if number == 0 else WHOLE, broker_ms)


def read_bundles(options: SourceOptions, span: EntryRange) -> Iterator[pa.RecordBatch]:
    """The range as rows of ``schema.BUNDLES``: at least one, empty if the range holds no entry."""
    sent = False
    for piece in read_pieces(options, span):
        yield _bundle(span, piece)
        sent = True
    if not sent:
        yield _bundle(span, Piece(ENTRIES, memoryview(b"")))


def read_again(client: ClientSettings, topic_partition: str, positions: Iterable[Position]) -> Iterator[bytes | None]:
    """Single entries by position, in the order asked for; None for one that the topic no longer has, or went with it.

    Positions that rise and are near to each other are read in one go.

    Raises:
        BrokerError, TransportError: as for a reader.
    """
    wanted = iter(positions)
    try:
        yield from _read_again(client, topic_partition, wanted)
    except TopicNotFoundError:
        # The one that was being read, and those behind it.
        yield None
        for _ in wanted:
            yield None


def _read_again(client: ClientSettings, topic_partition: str, positions: Iterable[Position]) -> Iterator[bytes | None]:
    reader: EntryReader | None = None
    taken: EntryReceived | None = None
    try:
        for position in positions:
            if reader is None or not _is_near(reader, taken, position):
                if reader is not None:
                    reader.close()
                reader = EntryReader(shared_cluster(client), topic_partition, position.before, _AGAIN_WINDOW)
                taken = None
            while taken is None or taken.position < position:
                taken = next_until(reader, position)
                if taken is None:
                    break
            yield bytes(taken.entry) if taken is not None and taken.position == position else None
    finally:
        if reader is not None:
            reader.close()


def _is_near(reader: EntryReader, taken: EntryReceived | None, position: Position) -> bool:
    """Whether reading on is cheaper than a new start. A reader that found a gap may have passed over what comes next."""
    reached = reader.after
    distance = position.entry_id - reached.entry_id
    return taken is not None and reached.ledger_id == position.ledger_id and 0 <= distance <= _AGAIN_NEAR


def read_messages(options: SourceOptions, span: EntryRange) -> Iterator[pa.RecordBatch]:
    """The range as rows of ``schema.VIEW``; a bad entry is a row with its bytes in ``value`` and a ``reject_reason``.

    With a schema for the values, see ``decode.typed``.
    """
    source = TopicPartition(*split_partition(span.topic_partition))
    of_version = schemas_of(options.client, source.topic)
    for piece in read_pieces(options, span):
        for rows in piece_as_view(piece, source, options):
            if options.value_schema is None:
                yield rows
            else:
                yield type_values(rows, options.value_schema, of_version, keep_bytes=options.includes_value_bytes)


def read_compat(options: SourceOptions, span: EntryRange) -> Iterator[pa.RecordBatch]:
    """The range in the columns of the JVM connectors.

    Raises:
        CorruptEntryError: something in it is no message.
    """
    yield from map(as_compat, read_messages(options, span))


def piece_as_view(piece: Piece, source: TopicPartition, options: SourceOptions) -> Iterator[pa.RecordBatch]:
    """A piece as rows of ``schema.VIEW``.

    Raises:
        SetupError: as ``check_broker_metadata``.
    """
    if piece.kind == REJECT:
        rejected = read_reject(piece.frames)
        shown = replace(rejected, entry=rejected.entry or rejected.detail.encode())
        yield from map(rejects_as_view, reject_rows([shown], source).to_batches())
        return
    decoded_parts = decode_bundle(
        piece.frames,
        source,
        first_entry=piece.first_entry,
        **options.decoding,
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
        if piece.kind == REJECT:
            yield rejected_row(read_reject(piece.frames), source)
        else:
            yield entry_rows(piece.frames, source)


def check_broker_metadata(required: bool, messages: pa.RecordBatch, source: TopicPartition) -> None:
    """Refuse messages without a broker timestamp if the user asked for that.

    Raises:
        SetupError: there are such messages.
    """
    if required and messages["broker_timestamp"].null_count:
        raise SetupError(
            f"the broker adds no entry metadata to {source.topic}; set brokerEntryMetadataInterceptors and "
            "exposingBrokerEntryMetadataToClientEnabled in its configuration, or drop require_broker_metadata"
        )


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
