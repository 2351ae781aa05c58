"""Codecs: the bytes that other clients send, and never more bytes than the declared size."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ledgerlake.decode.codecs import compress, decompress
from ledgerlake.errors import CorruptEntryError
from ledgerlake.pb import pulsar_pb2 as pb

CODECS = [pb.LZ4, pb.ZLIB, pb.ZSTD, pb.SNAPPY]
HELLO = b" ".join([b"hello pulsar"] * 4)
JAVA_BYTES: dict[int, str] = {
    pb.LZ4: "df68656c6c6f2070756c736172200d000e50756c736172",
    pb.ZLIB: "789cca48cdc9c9572828cd294e2c52c8208a03000000ffff",
    pb.ZSTD: "28b52ffd24339d00006868656c6c6f2070756c736172200100e1995f6ca2bb50",
    pb.SNAPPY: "333068656c6c6f2070756c73617220960d00",
}


def refusal(codec: int, data: bytes, declared: int, limit: int = 1 << 20) -> str:
    with pytest.raises(CorruptEntryError) as caught:
        decompress(codec, memoryview(data), declared, limit)
    return caught.value.reason


@pytest.mark.parametrize("codec", CODECS, ids=pb.CompressionType.Name)
def test_what_the_java_client_compressed_is_read(codec: int) -> None:
    assert (
        decompress(codec, memoryview(bytes.fromhex(JAVA_BYTES[codec])), len(HELLO), 1000) == HELLO
    )


def test_a_finished_zlib_stream_is_read_too() -> None:
    assert decompress(pb.ZLIB, memoryview(zlib.compress(HELLO)), len(HELLO), 1000) == HELLO


@pytest.mark.parametrize("codec", CODECS, ids=pb.CompressionType.Name)
@given(data=st.binary(max_size=2000))
def test_every_codec_goes_there_and_back(codec: int, data: bytes) -> None:
    assert decompress(codec, memoryview(compress(codec, data)), len(data), 1 << 20) == data


@pytest.mark.parametrize("codec", CODECS, ids=pb.CompressionType.Name)
def test_nothing_is_read_as_nothing(codec: int) -> None:
    assert decompress(codec, memoryview(b""), 0, 1 << 20) == b""
    assert refusal(codec, b"", 1) == "bad_compression"


@pytest.mark.parametrize("codec", CODECS, ids=pb.CompressionType.Name)
@pytest.mark.parametrize("lie", [-51, -1, 1, 1000])
def test_a_lying_size_is_noticed_in_both_directions(codec: int, lie: int) -> None:
    assert refusal(codec, compress(codec, HELLO), len(HELLO) + lie) == "bad_compression"


@pytest.mark.parametrize("codec", CODECS, ids=pb.CompressionType.Name)
@given(data=st.binary(max_size=100))
def test_garbage_is_damaged_and_nothing_worse(codec: int, data: bytes) -> None:
    try:
        size, reason = len(decompress(codec, memoryview(data), 40, 1 << 20)), None
    except CorruptEntryError as error:
        size, reason = 40, error.reason
    assert (size, reason) in [(40, None), (40, "bad_compression")]


@pytest.mark.parametrize("codec", CODECS, ids=pb.CompressionType.Name)
def test_a_bomb_allocates_no_more_than_it_declared(codec: int) -> None:
    bomb = compress(codec, bytes(64 << 20))
    tracemalloc.start()
    assert refusal(codec, bomb, 1000) == "bad_compression"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_frame_that_claims_gigabytes_is_refused_by_its_header() -> None:
    header = (
        zstandard.ZstdCompressor(write_content_size=True)
        .compressobj(size=2**40)
        .compress(b"x" * 10)
    )
    assert refusal(pb.ZSTD, header + b"\0" * 20, 10) == "bad_compression"


def test_what_is_declared_over_the_limit_is_too_large() -> None:
    assert refusal(pb.LZ4, b"", 2000, limit=1000) == "too_large"


def test_what_no_column_can_hold_is_too_large_whatever_the_option_says() -> None:
    assert refusal(pb.ZSTD, b"x" * 100_000, 2**31 - 1, limit=2**40) == "too_large"


def test_an_unknown_codec_is_named() -> None:
    assert refusal(9, b"", 0) == "unknown_codec"


@pytest.mark.parametrize("codec", CODECS, ids=pb.CompressionType.Name)
def test_a_claim_beyond_what_the_bytes_can_hold_allocates_nothing(codec: int) -> None:
    claimed = 100 * 1024 * 1024
    tracemalloc.start()
    try:
        assert (
            refusal(codec, compress(codec, HELLO), claimed, limit=2 * claimed) == "bad_compression"
        )
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", CODECS, ids=pb.CompressionType.Name)
def test_the_most_that_a_codec_compresses_is_read(codec: int) -> None:
    for size in (0, 1, 300, 100_000, 10_000_000):
        assert bytes(
            decompress(codec, memoryview(compress(codec, bytes(size))), size, 1 << 24)
        ) == bytes(size)
