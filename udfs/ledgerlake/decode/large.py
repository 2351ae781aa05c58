"""A large message from its chunks (PIP-37).

The bytes of each chunk are verified and decrypted, then joined, then decompressed once;
``uncompressed_size`` is the size of the complete message. The row has the position, broker time,
index and metadata of the last chunk; producers repeat the metadata on every chunk.

A message is opened as a whole or not at all. If the settings pass encrypted messages on, and no key
opens one of the chunks, the value is all chunks as they are stored, and the row has the property of
encrypted ones.

Memory: each chunk is released when it is joined, with the bytes that its producer put beside the
payload. If encrypted messages may pass, there are the stored and the opened chunks until then.
After that there are the joined bytes and, if they are compressed, the plain bytes.
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
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.reasons import CHUNK_MISMATCH, CHUNK_TRIMMED, TOO_LARGE
from ledgerlake.wire.entry import RawEntry, parse_entry, peek_metadata
from ledgerlake.wire.limits import MAX_PLAIN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.decode.messages import TopicPartition
    from ledgerlake.wire.message_id import Position


def read_chunks(
    entries: Iterable[bytes | memoryview | None],
    count: int,
    max_bytes: int,
    sender: tuple[str, str] | None = None,
) -> Iterator[tuple[bytes | memoryview, RawEntry]]:
    """Yield each stored entry with its parts, after checking that it is the next chunk of the
    message.

    Args:
        entries: in order; None for an entry that the topic no longer has.
        count: the number of chunks of the message.
        max_bytes: the limit of all chunks together, without encryption. A chunk counts with half of
            its entry at least, so the entries have twice the limit at most.
        sender: the producer name and uuid that the chunks must have, if they are known: a marker
            may list chunks of another message.

    Raises:
        CorruptEntryError: an entry is not the next chunk; ``reason`` tells why.
    """
    before: RawEntry | None = None
    size_bytes = 0
    for chunk_id, raw in enumerate(entries):
        if raw is None:
            raise CorruptEntryError(
                "the topic no longer has all of its chunks", reason=CHUNK_TRIMMED
            )
        if before is None:
            _check_sender(raw, sender)
        entry = _checked(parse_entry(raw), chunk_id, count, before)
        payload_bytes = len(entry.payload) - (TAG_BYTES if entry.metadata.encryption_keys else 0)
        size_bytes += max(payload_bytes, len(raw) // 2)
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
    """Return the message as one row of ``schema.MESSAGES``.

    Args:
        entries: the chunks' stored entries, as many as ``positions``, in order.
        max_bytes: the limit of the message, compressed and plain.
        crypto: how encrypted chunks are decrypted.
        sender: as for ``read_chunks``.

    Raises:
        CorruptEntryError: the chunks are not a message; ``reason`` tells why.
        DecryptionError: there is no key for them, and the settings are to fail.
    """
    chunks = (entry for _, entry in read_chunks(entries, len(positions), max_bytes, sender))
    last, payloads = _open_all(chunks, crypto)
    joined = _join(payloads, max_bytes)
    is_opaque = bool(last.metadata.encryption_keys)
    codec = 0 if is_opaque else last.metadata.compression
    value = (
        joined
        if codec == 0
        else decompress(codec, joined, last.metadata.uncompressed_size, max_bytes)
    )
    batch = _row(last, positions[-1], positions[0], source)
    if batch["is_null"][0].as_py():
        return batch
    return batch.set_column(batch.schema.get_field_index("value"), "value", _binary(value))


def large_message(
    last: bytes | memoryview, position: Position, source: TopicPartition
) -> pa.RecordBatch:
    """Return a large message as one row of ``schema.MESSAGES`` without its value, by its last
    chunk.

    Raises:
        CorruptEntryError: the entry is none.
    """
    return _row(replace(parse_entry(last), payload=memoryview(b"")), position, position, source)


def _row(
    last: RawEntry, position: Position, first: Position, source: TopicPartition
) -> pa.RecordBatch:
    row = large_row(last, position.ledger_id, position.entry_id, first_chunk_id=str(first))
    row |= {"topic": source.topic, "partition": source.partition, "late": False, "value": None}
    return pa.RecordBatch.from_pylist([row], schema=schema.MESSAGES)


def _join(payloads: list[memoryview], max_bytes: int) -> memoryview:
    """Return one buffer of the pieces. Each piece is released when it is copied, so that memory
    holds the message once.
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
    limit_bytes = min(max_bytes, MAX_PLAIN_BYTES)
    if size_bytes > limit_bytes:
        raise CorruptEntryError(f"the message is larger than {limit_bytes} bytes", reason=TOO_LARGE)


def _check_sender(first: bytes | memoryview, sender: tuple[str, str] | None) -> None:
    metadata = peek_metadata(memoryview(first))
    if sender not in (None, (metadata.producer_name, metadata.uuid)):
        raise CorruptEntryError(
            "its chunks were listed by the sender of another message", reason=CHUNK_MISMATCH
        )


def _checked(entry: RawEntry, chunk_id: int, count: int, before: RawEntry | None) -> RawEntry:
    """Return the entry, after checking that it is this chunk of the same message."""
    metadata = entry.metadata
    same = before is None or _message_of(before.metadata) == _message_of(metadata)
    if not same or (metadata.chunk_id, metadata.num_chunks_from_msg) != (chunk_id, count):
        raise CorruptEntryError(
            f"an entry is not chunk {chunk_id} of {count} of its message", reason=CHUNK_MISMATCH
        )
    return entry


def _message_of(metadata: pb.MessageMetadata) -> tuple[str, str, int]:
    """Return what identifies the message of a chunk. A restarted producer uses a uuid again; the
    publish times of its messages differ.
    """
    return metadata.producer_name, metadata.uuid, metadata.publish_time


def _open_all(
    chunks: Iterable[RawEntry], crypto: CryptoSettings
) -> tuple[RawEntry, list[memoryview]]:
    """Return the last chunk without its payload, and the payloads of all: either all opened, or all
    as they are stored. Then the last chunk has the recipients of the first one that no key opens.
    """
    passes = crypto.failure_action == "pass"
    stored: list[memoryview] = []
    opened: list[memoryview] = []
    last: RawEntry | None = None
    closed: RawEntry | None = None
    for entry in chunks:
        last = entry
        if passes:
            stored.append(entry.payload)
        if closed is None:
            try:
                last = open_entry(entry, crypto)
                opened.append(last.payload)
            except CorruptEntryError:
                if not passes:
                    raise
                closed, opened = entry, []
    if last is None:
        raise CorruptEntryError("a message without chunks", reason=CHUNK_MISMATCH)
    last = replace(last, payload=memoryview(b""))
    return (last, opened) if closed is None else (_marked(last, closed.metadata), stored)


def _marked(last: RawEntry, closed: pb.MessageMetadata) -> RawEntry:
    """Return the last chunk of a message that stays encrypted. It has a value, whatever it says."""
    metadata = pb.MessageMetadata()
    metadata.CopyFrom(last.metadata)
    metadata.ClearField("encryption_keys")
    metadata.ClearField("null_value")
    metadata.encryption_keys.extend(closed.encryption_keys)
    return replace(last, metadata=metadata)


def _binary(value: bytes | memoryview) -> pa.Array:
    """Return one value without a copy."""
    offsets = pa.py_buffer(np.array([0, len(value)], dtype=np.int32))
    return pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(value)])
