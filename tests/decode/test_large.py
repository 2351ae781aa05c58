"""A large message from its chunks: every codec, and everything that makes it none."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ledgerlake.decode import schema
from ledgerlake.decode.crypto import CryptoSettings
from ledgerlake.decode.large import decode_large
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.errors import CorruptEntryError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.message_id import Position
from tests.chunks import chunk_entries

SOURCE = TopicPartition("persistent://public/default/t", 2)
PAYLOAD = random.Random(1).randbytes(5000) * 3


def at(count: int) -> tuple[Position, ...]:
    return tuple(Position(4, 2 * number) for number in range(count))


def decoded(entries: list[bytes], max_bytes: int = 10**6) -> Any:
    return decode_large(entries, at(len(entries)), SOURCE, max_bytes)


@pytest.mark.parametrize("codec", [pb.NONE, pb.LZ4, pb.ZLIB, pb.ZSTD, pb.SNAPPY])
def test_chunks_are_joined_then_unpacked_once(codec: int) -> None:
    entries = chunk_entries(PAYLOAD, 5, codec=codec, partition_key="k", event_time=7)
    batch = decoded(entries)
    assert batch.schema.equals(schema.MESSAGES)
    (row,) = batch.to_pylist()
    assert row["value"] == PAYLOAD
    assert (row["message_id"], row["first_chunk_id"], row["chunk_count"]) == ("4:8", "4:0", 5)
    assert (row["topic"], row["partition"], row["key"], row["batch_index"]) == (
        SOURCE.topic,
        2,
        "k",
        -1,
    )


def test_a_null_value_stays_null() -> None:
    (row,) = decoded(chunk_entries(b"xy", 2, null_value=True)).to_pylist()
    assert (row["is_null"], row["value"]) == (True, None)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        pytest.param(
            list(reversed(chunk_entries(PAYLOAD, 2))), "chunk_mismatch", id="another order"
        ),
        pytest.param(chunk_entries(PAYLOAD, 3)[:2], "chunk_mismatch", id="one missing"),
        pytest.param(
            [chunk_entries(b"a", 2)[0], chunk_entries(b"b", 2, uuid="other")[1]],
            "chunk_mismatch",
            id="of two",
        ),
        pytest.param(
            [
                chunk_entries(b"ab", 2, publish_time=1)[0],
                chunk_entries(b"cd", 2, publish_time=2)[1],
            ],
            "chunk_mismatch",
            id="of a restarted producer",
        ),
        pytest.param(
            [*chunk_entries(PAYLOAD, 2)[:1], b"garbage"], "malformed_entry", id="no entry"
        ),
        pytest.param([], "chunk_mismatch", id="nothing"),
        pytest.param(
            chunk_entries(PAYLOAD, 2, codec=pb.LZ4, uncompressed_size=9),
            "bad_compression",
            id="wrong size",
        ),
        pytest.param(
            chunk_entries(PAYLOAD, 2, codec=77 - 73, uncompressed_size=2**30),
            "too_large",
            id="claims too much",
        ),
        pytest.param(
            chunk_entries(PAYLOAD, 2, encryption_keys=[pb.EncryptionKeys(key="k", value=b"v")]),
            "encrypted",
            id="encrypted",
        ),
    ],
)
def test_what_is_no_message_says_why(entries: list[bytes], reason: str) -> None:
    with pytest.raises(CorruptEntryError) as raised:
        decoded(entries)
    assert raised.value.reason == reason


def test_a_message_over_the_limit_is_refused_before_it_is_joined() -> None:
    with pytest.raises(CorruptEntryError) as raised:
        decoded(chunk_entries(PAYLOAD, 3), max_bytes=len(PAYLOAD) - 1)
    assert raised.value.reason == "too_large"
    assert decoded(chunk_entries(PAYLOAD, 3), max_bytes=len(PAYLOAD)).num_rows == 1


def test_what_chunks_have_beside_the_payload_is_limited_too() -> None:
    def chunks(property_bytes: int) -> list[bytes]:
        properties = [pb.KeyValue(key="k", value="x" * property_bytes)]
        return chunk_entries(PAYLOAD, 30, properties=properties)

    # Metadata of the size of the payload is free.
    assert decoded(chunks(300), max_bytes=len(PAYLOAD)).num_rows == 1
    unread = iter(chunks(5000))
    with pytest.raises(CorruptEntryError) as raised:
        decode_large(unread, at(30), SOURCE, len(PAYLOAD))
    assert raised.value.reason == "too_large"
    assert len(list(unread)) > 20


def test_what_is_beyond_the_limit_or_of_another_message_is_not_even_read() -> None:
    chunks = chunk_entries(PAYLOAD, 300)
    for entries, reason in (
        (chunks, "too_large"),
        ([chunks[0], None, *chunks[2:]], "chunk_trimmed"),
    ):
        unread = iter(entries)
        with pytest.raises(CorruptEntryError) as raised:
            decode_large(unread, at(300), SOURCE, 1000)
        assert raised.value.reason == reason
        assert len(list(unread)) > 270
    secret = chunk_entries(
        b"cd", 2, uuid="q", encryption_keys=[pb.EncryptionKeys(key="k", value=b"v")]
    )
    with pytest.raises(CorruptEntryError) as raised:
        decode_large(
            [chunk_entries(b"ab", 2)[0], secret[1]],
            at(2),
            SOURCE,
            1000,
            CryptoSettings(failure_action="fail"),
        )
    assert raised.value.reason == "chunk_mismatch"
