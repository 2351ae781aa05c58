"""Raw entries, against bytes that the Java client made."""

from __future__ import annotations

import pytest

from ledgerlake.errors import CorruptEntryError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.entry import encode_batch, encode_entry, message_count, parse_entry, read_stamp

JAVA_ENTRY = bytes.fromhex(
    "0e01c850836c0000001b0a017010071880d095ffbc31d20103702d37d80103e0010be8010161626364"
)
BROKER_INDEX_4 = bytes.fromhex("0e02000000021004")


def test_an_entry_of_the_java_client_comes_apart() -> None:
    entry = parse_entry(JAVA_ENTRY)
    metadata = entry.metadata
    assert (metadata.producer_name, metadata.sequence_id, metadata.publish_time) == (
        "p",
        7,
        1700000000000,
    )
    assert (metadata.uuid, metadata.chunk_id, metadata.num_chunks_from_msg) == ("p-7", 1, 3)
    assert (bytes(entry.payload), entry.broker) == (b"abcd", None)


def test_broker_metadata_stands_in_front_and_outside_the_checksum() -> None:
    entry = parse_entry(BROKER_INDEX_4 + JAVA_ENTRY)
    assert entry.broker is not None
    assert entry.broker.index == 4
    assert not entry.broker.HasField("broker_timestamp")


def test_our_encoding_is_the_java_clients() -> None:
    entry = parse_entry(JAVA_ENTRY)
    assert encode_entry(entry.metadata, bytes(entry.payload)) == JAVA_ENTRY


@pytest.mark.parametrize("position", range(6, len(JAVA_ENTRY)))
def test_a_flipped_bit_behind_the_checksum_is_noticed_also_with_broker_metadata(
    position: int,
) -> None:
    damaged = bytearray(JAVA_ENTRY)
    damaged[position] ^= 0x10
    for raw in (bytes(damaged), BROKER_INDEX_4 + bytes(damaged)):
        with pytest.raises(CorruptEntryError) as caught:
            parse_entry(raw)
        assert caught.value.reason == "bad_checksum"


@pytest.mark.parametrize("length", range(len(JAVA_ENTRY)))
def test_a_truncated_entry_is_corrupt_at_every_length(length: int) -> None:
    with pytest.raises(CorruptEntryError):
        parse_entry(JAVA_ENTRY[:length])


def test_an_entry_without_checksum_is_read_as_very_old_producers_sent_it() -> None:
    assert bytes(parse_entry(JAVA_ENTRY[6:]).payload) == b"abcd"


def test_metadata_that_lacks_a_required_field_is_malformed() -> None:
    with pytest.raises(CorruptEntryError, match="lacks a required field"):
        parse_entry(bytes.fromhex("00000002") + b"\x10\x07")


def test_a_batch_costs_as_many_permits_as_it_claims_and_garbage_one() -> None:
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=1, publish_time=1, num_messages_in_batch=5
    )
    assert message_count(memoryview(encode_entry(metadata, b""))) == 5
    assert message_count(memoryview(JAVA_ENTRY)) == 1
    assert message_count(memoryview(b"garbage")) == 1


def test_the_batch_of_the_java_client_is_what_we_encode() -> None:
    first = pb.SingleMessageMetadata(
        partition_key="k0", compacted_out=True, partition_key_b64_encoded=False, payload_size=0
    )
    batch = encode_batch(
        [(first, b""), (pb.SingleMessageMetadata(partition_key="k0", payload_size=0), b"v1")]
    )
    assert batch.endswith(bytes.fromhex("0000000612026b3018027631"))


def test_time_is_the_brokers_where_it_is_there_and_the_producers_otherwise() -> None:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=111)
    with_broker = encode_entry(metadata, b"", pb.BrokerEntryMetadata(broker_timestamp=222, index=9))
    stamp = read_stamp(memoryview(with_broker))
    assert (stamp.time_ms, stamp.index, stamp.by_broker) == (222, 9, True)
    numbered = encode_entry(metadata, b"", pb.BrokerEntryMetadata(index=9))
    stamp = read_stamp(memoryview(numbered))
    assert (stamp.time_ms, stamp.index, stamp.by_broker) == (111, 9, False)
    stamp = read_stamp(memoryview(encode_entry(metadata, b"")))
    assert (stamp.time_ms, stamp.index, stamp.by_broker) == (111, None, False)
