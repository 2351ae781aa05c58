"""A large message from its chunks (PIP-37).

Order of work on the bytes: verify each chunk, decrypt each chunk, join, decompress once;
``uncompressed_size`` is that of the whole. The row is the last chunk's: position, broker time,
index and metadata, which producers repeat on every chunk.

Memory: chunks are let go of as they are joined; then the joined bytes and, if compressed, the plain
ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ledgerlake.decode import schema
from ledgerlake.decode.codecs import decompress
from ledgerlake.decode.crypto import NO_KEYS, TAG_BYTES, CryptoSettings, open_entry
from ledgerlake.decode.reference import large_row
from ledgerlake.errors import CorruptEntryError
from ledgerlake.wire.entry import RawEntry, parse_entry, peek_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.decode.messages import TopicPartition
    from ledgerlake.pb import pulsar_pb2 as pb
    from ledgerlake.wire.message_id import Position


def read_chunks(
    entries: Iterable[bytes | memoryview | None], count: int, max_bytes: int, sender: tuple[str, str] | None = None
) -> Iterator[tuple[bytes | memoryview, RawEntry]]:
    """Yield each stored entry with its parts, once it is known to be the next chunk of one message.

    Args:
        entries: in order; None for an entry that the topic no longer has.
        count: how many chunks the message has.
        max_bytes: the chunks may not hold more together, before encryption.
        sender: producer name and uuid that the chunks must have, if they are known: a list of
            chunks may name those of another message.

    Raises:
        CorruptEntryError: an entry is not the next chunk; ``reason`` says why.
    """
    before: RawEntry | None = None
    size_bytes = 0
    for chunk_id, raw in enumerate(entries):
        if raw is None:
            raise CorruptEntryError("the topic no longer has all of its chunks", reason="chunk_trimmed")
        if before is None:
            _check_sender(raw, sender)
        entry = _checked(parse_entry(raw), chunk_id, count, before)
        size_bytes += len(entry.payload) - (TAG_BYTES if entry.metadata.encryption_keys else 0)
        _check_size(size_bytes, max_bytes)
        yield raw, entry
        before = replace(entry, payload=memoryview(b""))


def decode_large(
    entries: Iterable[bytes | memoryview | None],
    positions: tuple[Position, ...],
    source: TopicPartition,
    max_bytes: int,
    crypto: CryptoSettings = NO_KEYS,
    sender: tuple[str, str] | None = None,
) -> pa.RecordBatch:
    """The message as one row of ``schema.MESSAGES``.

    Args:
        entries: the chunks' stored entries, as many as ``positions``, in order.
        max_bytes: the message may not be larger, packed or plain.
        crypto: what opens encrypted chunks.
        sender: as for ``read_chunks``.

    Raises:
        CorruptEntryError: the chunks are no message; ``reason`` says why.
        DecryptionError: they are not for us, and the settings say to fail.
    """
    payloads: list[memoryview] = []
    last: RawEntry | None = None
    for _, entry in read_chunks(entries, len(positions), max_bytes, sender):
        last = _open(entry, crypto)
        payloads.append(last.payload)
    if last is None:
        raise CorruptEntryError("a message without chunks", reason="chunk_mismatch")
    last = replace(last, payload=memoryview(b""))
    joined = _join(payloads, max_bytes)
    is_opaque = bool(last.metadata.encryption_keys)
    codec = 0 if is_opaque else last.metadata.compression
    value = joined if codec == 0 else decompress(codec, joined, last.metadata.uncompressed_size, max_bytes)
    end = positions[-1]
    row = large_row(last, end.ledger_id, end.entry_id, first_chunk_id=str(positions[0]))
    row |= {"topic": source.topic, "partition": source.partition, "late": False, "value": None}
    batch = pa.RecordBatch.from_pylist([row], schema=schema.MESSAGES)
    if row["is_null"]:
        return batch
    return batch.set_column(batch.schema.get_field_index("value"), "value", _binary(value))


def _join(payloads: list[memoryview], max_bytes: int) -> memoryview:
    """Return one buffer of the pieces that have arrived; each piece is let go of on the way, so
    that memory holds the message once.
    """
    size_bytes = sum(map(len, payloads))
    _check_size(size_bytes, max_bytes)
    joined = np.empty(size_bytes, dtype=np.uint8).data
    payloads.reverse()
    start = 0
    while payloads:
        piece = payloads.pop()
        joined[start : start + len(piece)] = piece
        start += len(piece)
    return joined


def _check_size(size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise CorruptEntryError(f"the message is larger than {max_bytes} bytes", reason="too_large")


def _check_sender(first: bytes | memoryview, sender: tuple[str, str] | None) -> None:
    metadata = peek_metadata(memoryview(first))
    if sender not in (None, (metadata.producer_name, metadata.uuid)):
        raise CorruptEntryError("its chunks were listed by the sender of another message", reason="chunk_mismatch")


def _checked(entry: RawEntry, chunk_id: int, count: int, before: RawEntry | None) -> RawEntry:
    """The entry, where it is this chunk of the message that the one before belongs to."""
    metadata = entry.metadata
    same = before is None or _message_of(before.metadata) == _message_of(metadata)
    if not same or (metadata.chunk_id, metadata.num_chunks_from_msg) != (chunk_id, count):
        raise CorruptEntryError(f"an entry is not chunk {chunk_id} of {count} of its message", reason="chunk_mismatch")
    return entry


def _message_of(metadata: pb.MessageMetadata) -> tuple[str, str, int]:
    """Which message a chunk is of. A restarted producer uses a uuid again; the publish time tells
    its messages apart.
    """
    return metadata.producer_name, metadata.uuid, metadata.publish_time


def _open(entry: RawEntry, crypto: CryptoSettings) -> RawEntry:
    try:
        return open_entry(entry, crypto)
    except CorruptEntryError:
        if crypto.failure_action != "pass":
            raise
        return entry


def _binary(value: bytes | memoryview) -> pa.Array:
    """Return one value without a copy."""
    offsets = pa.py_buffer(np.array([0, len(value)], dtype=np.int32))
    return pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(value)])
