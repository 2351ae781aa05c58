"""Reads a task's range of entries as Arrow, in the columns of the chosen view."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.client.topics import split_partition
from ledgerlake.decode.compat import as_compat
from ledgerlake.decode.entries import entry_rows
from ledgerlake.decode.messages import TopicPartition, decode_bundle, rejects_as_view
from ledgerlake.decode.rejects import read_reject, reject_rows, rejected_row
from ledgerlake.decode.split import PieceKind
from ledgerlake.errors import SetupError
from ledgerlake.reasons import DATA_LOSS, ENCRYPTED, UNDECRYPTABLE
from ledgerlake.source.pieces import read_pieces
from ledgerlake.source.value_schemas import schemas_of
from ledgerlake.values.typed import typed_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.reasons import Reason
    from ledgerlake.source.pieces import Piece
    from ledgerlake.source.planning import EntryRange

_log = logging.getLogger(__name__)


def read_view(options: SourceOptions, span: EntryRange) -> Iterator[pa.RecordBatch]:
    """Yield the range in the columns of the view that the options name."""
    return _READERS[options.view](options, span)


def read_messages(options: SourceOptions, span: EntryRange) -> Iterator[pa.RecordBatch]:
    """Yield the range as rows of ``schema.VIEW``; a bad entry is a row with its bytes in ``value``
    and a ``reject_reason``.

    With a schema for the values, see ``values.typed``.
    """
    source = TopicPartition(*split_partition(span.topic_partition))
    of_version = schemas_of(options.client, source.topic)
    for piece in read_pieces(options, span):
        for rows in piece_as_view(piece, source, options):
            if options.value_schema is None:
                yield rows
            else:
                keep_bytes = options.includes_value_bytes
                yield from typed_parts(
                    rows, options.value_schema, of_version, keep_bytes=keep_bytes
                )


def read_compat(options: SourceOptions, span: EntryRange) -> Iterator[pa.RecordBatch]:
    """Yield the range in the columns of the JVM connectors. Rejects that the options allow are left
    out with a warning, since these columns have no place for them.

    Raises:
        CorruptEntryError: another entry has no message.
    """
    allowed = pa.array(_allowed_rejects(options), pa.string())
    for rows in read_messages(options, span):
        yield as_compat(_without_rejects(rows, allowed))


def _allowed_rejects(options: SourceOptions) -> list[Reason]:
    """Return the reasons of the rejects with which a read goes on by the options."""
    of_loss = [] if options.fail_on_data_loss else [DATA_LOSS]
    return [
        *of_loss,
        *((ENCRYPTED, UNDECRYPTABLE) if options.client.crypto.failure_action == "reject" else ()),
    ]


def _without_rejects(rows: pa.RecordBatch, reasons: pa.Array) -> pa.RecordBatch:
    """Return the rows without the rejects that have one of the reasons."""
    is_left_out = pc.is_in(rows["reject_reason"], reasons)
    left_out = rows.filter(is_left_out)
    if not left_out.num_rows:
        return rows
    _log.warning(
        "%d rejects of %s are left out, as the options say; the first one is %s: %s",
        left_out.num_rows,
        *(left_out[name][0] for name in ("topic", "message_id", "reject_reason")),
    )
    return rows.filter(pc.invert(is_left_out))


def piece_as_view(
    piece: Piece, source: TopicPartition, options: SourceOptions
) -> Iterator[pa.RecordBatch]:
    """Yield a piece as rows of ``schema.VIEW``.

    Raises:
        SetupError: as ``check_broker_metadata``.
    """
    if piece.kind == PieceKind.REJECT:
        rejects = reject_rows([read_reject(piece.frames)], source)
        yield from map(rejects_as_view, rejects.to_batches())
        return
    decoded_bundles = decode_bundle(
        piece.frames,
        source,
        first_entry=piece.first_entry,
        **options.decoding,
        chunks_as_rejects=False,
    )
    for decoded in decoded_bundles:
        check_broker_metadata(options.require_broker_metadata, decoded.messages, source)
        yield decoded.messages
        if decoded.rejects.num_rows:
            yield rejects_as_view(decoded.rejects)


def read_entries(options: SourceOptions, span: EntryRange) -> Iterator[pa.RecordBatch]:
    """Yield the range as rows of ``schema.ENTRIES``, one per stored entry."""
    source = TopicPartition(*split_partition(span.topic_partition))
    for piece in read_pieces(options, span):
        if piece.kind == PieceKind.REJECT:
            yield rejected_row(read_reject(piece.frames), source)
        else:
            yield entry_rows(piece.frames, source, piece.first_entry)


def check_broker_metadata(required: bool, messages: pa.RecordBatch, source: TopicPartition) -> None:
    """Check that messages have a broker timestamp, if the user requires that.

    Raises:
        SetupError: there are such messages.
    """
    if required and messages["broker_timestamp"].null_count:
        raise SetupError(
            f"messages of {source.topic} have no broker timestamp; set "
            "brokerEntryMetadataInterceptors and exposingBrokerEntryMetadataToClientEnabled in the "
            "broker's configuration, or drop require_broker_metadata"
        )


_READERS = {
    "messages": read_messages,
    "entries": read_entries,
    "compat": read_compat,
}
