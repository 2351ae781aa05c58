"""Bounded decompression: it produces at most the declared size, and anything but the declared size
is an error. If the data cannot contain as much as is declared, nothing is allocated.

| codec  | bytes on the wire                                                                     |
|--------|---------------------------------------------------------------------------------------|
| LZ4    | a raw block: no frame, no length                                                      |
| ZLIB   | RFC 1950; Java producers flush and never finish (no final block, no Adler-32), C++ ones do |
| ZSTD   | a standard frame, which may carry its own content size                                |
| SNAPPY | a raw block, its length inside                                                        |
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import cramjam
import lz4.block
import zstandard

from ledgerlake.errors import CorruptEntryError
from ledgerlake.outside import Unreadable, reading
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.reasons import BAD_COMPRESSION, TOO_LARGE, UNKNOWN_CODEC
from ledgerlake.wire.limits import MAX_PLAIN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

# The broker's limit applies to the compressed message; the plain message may be far larger.
DEFAULT_MAX_UNCOMPRESSED_BYTES = 128 * 1024 * 1024


def decompress(
    codec: int, data: memoryview, declared_bytes: int, max_bytes: int
) -> bytes | memoryview:
    """Return the plain bytes of a payload; ``data`` itself if it is not compressed.

    Raises:
        CorruptEntryError: ``unknown_codec``; ``too_large`` if the declared size is above
            ``max_bytes`` or ``MAX_PLAIN_BYTES``; ``bad_compression`` if the data is damaged or
            has another size.
    """
    if codec == pb.NONE:
        return data
    if codec not in _CODECS:
        raise CorruptEntryError(f"compression codec {codec} is unknown", reason=UNKNOWN_CODEC)
    limit_bytes = min(max_bytes, MAX_PLAIN_BYTES)
    if declared_bytes > limit_bytes:
        raise CorruptEntryError(
            f"{declared_bytes} uncompressed bytes are over the limit of {limit_bytes}",
            reason=TOO_LARGE,
        )
    if declared_bytes > _MOST_EXPANSION[codec] * len(data) + _EXPANSION_BESIDE:
        raise CorruptEntryError(
            f"{declared_bytes} bytes were declared, more than {len(data)} of "
            f"{pb.CompressionType.Name(codec)} can hold",
            reason=BAD_COMPRESSION,
        )
    if not data and not declared_bytes:
        # Some encoders make no frame of nothing.
        return data
    try:
        with reading():
            plain = _CODECS[codec](data, declared_bytes)
    except Unreadable as failure:
        raise CorruptEntryError(
            f"{pb.CompressionType.Name(codec)} data is damaged: {failure.error}",
            reason=BAD_COMPRESSION,
        ) from None
    if len(plain) != declared_bytes:
        raise CorruptEntryError(
            f"{len(plain)} bytes came out, and {declared_bytes} were declared",
            reason=BAD_COMPRESSION,
        )
    return plain


def compress(codec: int, data: bytes) -> bytes:
    """Return the bytes that a producer would send, in the formats that ``decompress`` reads."""
    if codec == pb.LZ4:
        return bytes(lz4.block.compress(data, store_size=False))
    if codec == pb.ZLIB:
        return zlib.compress(data)
    if codec == pb.ZSTD:
        return zstandard.ZstdCompressor().compress(data)
    if codec == pb.SNAPPY:
        return bytes(cramjam.snappy.compress_raw(data))
    return data


class _Damaged(Exception):
    """Damage that the libraries do not report themselves."""


def _lz4(data: memoryview, declared_bytes: int) -> bytes:
    return bytes(lz4.block.decompress(data, uncompressed_size=declared_bytes))


def _zlib(data: memoryview, declared_bytes: int) -> bytes:
    stream = zlib.decompressobj()
    # One byte more than declared, so that data which holds more is noticed; max_length 0 would mean
    # no limit.
    return stream.decompress(data, declared_bytes + 1)


def _zstd(data: memoryview, declared_bytes: int) -> bytes:
    # The library trusts a content size inside the frame, so that has to be the declared one.
    content_bytes = zstandard.frame_content_size(data)
    if content_bytes not in (-1, declared_bytes):
        raise _Damaged(f"its frame claims {content_bytes} bytes")
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=declared_bytes + 1)


def _snappy(data: memoryview, declared_bytes: int) -> bytes:
    claimed = cramjam.snappy.decompress_raw_len(data)
    if claimed != declared_bytes:
        raise _Damaged(f"its block claims {claimed} bytes")
    return bytes(cramjam.snappy.decompress_raw(data))


# The largest number of plain bytes for one compressed byte of a format: the libraries allocate the
# declared size before they read the data. LZ4: a length goes on by up to 255 in a byte. ZLIB: 258
# bytes in two bits. ZSTD: a block of 128 KiB in four bytes. SNAPPY: a copy of 64 bytes in three.
_MOST_EXPANSION: dict[int, int] = {pb.LZ4: 255, pb.ZLIB: 1032, pb.ZSTD: 32 * 1024, pb.SNAPPY: 22}
_EXPANSION_BESIDE = 64

_CODECS: dict[int, Callable[[memoryview, int], bytes]] = {
    pb.LZ4: _lz4,
    pb.ZLIB: _zlib,
    pb.ZSTD: _zstd,
    pb.SNAPPY: _snappy,
}
