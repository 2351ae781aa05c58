"""Parses stored entries into the chunks and markers of ``assembly.rules``."""

from __future__ import annotations

from ledgerlake.assembly.rules import Chunk, ChunkedMessageKey
from ledgerlake.decode.crypto import TAG_BYTES
from ledgerlake.decode.split import PieceKind
from ledgerlake.reasons import CHUNK_INVALID
from ledgerlake.wire.chunks import Marker, chunk_names, has_promise, parse_marker
from ledgerlake.wire.entry import broker_time_ms, delivery_time_ms, parse_entry, publish_time_ms
from ledgerlake.wire.message_id import Position
from ledgerlake.wire.schedules import schedule_id_of_large


def read_alone(kind: PieceKind, raw: bytes | memoryview, position: Position) -> Chunk | Marker:
    """Return the chunk or marker in an entry that travels alone (see ``decode.split``).

    Raises:
        CorruptEntryError: as ``read_chunk`` and ``parse_marker``.
    """
    read = parse_marker if kind == PieceKind.MARKER else read_chunk
    return read(raw, position)


def read_chunk(raw: bytes | memoryview, position: Position) -> Chunk:
    """Return the chunk in an entry.

    Raises:
        CorruptEntryError: bad checksum, malformed, or with a name that is too long.
    """
    entry = parse_entry(raw)
    metadata = entry.metadata
    # The total size of a message is counted before encryption.
    tag_bytes = TAG_BYTES if metadata.encryption_keys else 0
    return Chunk(
        key=ChunkedMessageKey(*chunk_names(metadata, CHUNK_INVALID)),
        position=position,
        chunk_id=metadata.chunk_id,
        chunk_count=metadata.num_chunks_from_msg,
        total_bytes=metadata.total_chunk_msg_size,
        size_bytes=len(entry.payload) - tag_bytes,
        entry_bytes=len(raw),
        time_ms=broker_time_ms(entry),
        publish_ms=publish_time_ms(entry),
        has_marker=has_promise(metadata),
        deliver_ms=delivery_time_ms(entry),
        schedule_id=schedule_id_of_large(metadata),
    )
