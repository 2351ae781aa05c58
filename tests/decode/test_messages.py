"""Bundles into messages: every column, every reason for a reject, and the fast route against the
plain one.
"""

from __future__ import annotations

import random
import tracemalloc
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledgerlake.decode import kernels, schema
from ledgerlake.decode import messages as messages_module
from ledgerlake.decode.messages import BatchRange, decode_bundle, decode_entries
from ledgerlake.decode.single_entry import single_entries
from ledgerlake.errors import MalformedFrameError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands, limits
from ledgerlake.wire.entry import encode_batch, encode_entry
from tests.decode.both_ways import same_both_ways
from tests.entries import BROKER_TIME_MS, SOURCE, batch, broker, bundle, decoded, metadata, single

CODECS = [pb.NONE, pb.LZ4, pb.ZLIB, pb.ZSTD, pb.SNAPPY]


def moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, tz=timezone.utc)


def test_every_column_of_a_single_message() -> None:
    entry_metadata = metadata(
        sequence_id=5,
        event_time=1_600_000_000_000,
        deliver_at_time=1_800_000_000_000,
        partition_key="key",
        ordering_key=b"\x00order",
        schema_version=b"\0" * 7 + b"\x02",
    )
    entry_metadata.properties.add(key="a", value="1")
    entry_metadata.properties.add(key="ä", value="")
    messages, rejects = decoded([encode_entry(entry_metadata, b"value", broker(41))])
    assert rejects == []
    assert messages == [
        {
            "topic": SOURCE.topic,
            "partition": 3,
            "message_id": "7:0",
            "ledger_id": 7,
            "entry_id": 0,
            "batch_index": -1,
            "broker_timestamp": moment(BROKER_TIME_MS + 41),
            "broker_index": 41,
            "publish_time": moment(1_700_000_000_500),
            "event_time": moment(1_600_000_000_000),
            "deliver_at": moment(1_800_000_000_000),
            "delivered_at": None,
            "producer_name": "p",
            "sequence_id": 5,
            "key": "key",
            "key_bytes": None,
            "ordering_key": b"\x00order",
            "properties": [("a", "1"), ("ä", "")],
            "schema_version": b"\0" * 7 + b"\x02",
            "is_null": False,
            "late": False,
            "chunk_count": None,
            "first_chunk_id": None,
            "value": b"value",
            "chunk_uuid": None,
            "chunk_id": None,
            "chunk_total_bytes": None,
            "reject_reason": None,
        }
    ]


@pytest.mark.parametrize("codec", CODECS, ids=pb.CompressionType.Name)
def test_a_batch_becomes_its_messages_with_their_own_index(codec: int) -> None:
    messages, rejects = decoded([batch([b"a", b"", b"ccc"], codec, index=10)])
    assert rejects == []
    assert [(row["message_id"], row["broker_index"], row["value"]) for row in messages] == [
        ("7:0:0", 8, b"a"),
        ("7:0:1", 9, b""),
        ("7:0:2", 10, b"ccc"),
    ]


def test_a_batch_of_one_is_a_batch() -> None:
    messages, _ = decoded([batch([b"a"])])
    assert (messages[0]["message_id"], messages[0]["batch_index"]) == ("7:0:0", 0)


def test_batched_messages_have_their_own_metadata() -> None:
    first = pb.SingleMessageMetadata(
        payload_size=0, partition_key="k", event_time=5, sequence_id=77, ordering_key=b"o"
    )
    first.properties.add(key="x", value="y")
    second = pb.SingleMessageMetadata(payload_size=0, null_value=True)
    plain = encode_batch([(first, b"v"), (second, b"")])
    entry_metadata = metadata(
        sequence_id=70,
        num_messages_in_batch=2,
        uncompressed_size=len(plain),
        partition_key="not this",
    )
    messages, _ = decoded([encode_entry(entry_metadata, plain, broker(1))])
    first_row, second_row = messages
    assert (first_row["key"], first_row["event_time"], first_row["sequence_id"]) == (
        "k",
        moment(5),
        77,
    )
    assert (first_row["ordering_key"], first_row["properties"]) == (b"o", [("x", "y")])
    assert (
        second_row["key"],
        second_row["event_time"],
        second_row["sequence_id"],
        second_row["is_null"],
        second_row["value"],
    ) == (
        None,
        None,
        70,
        True,
        None,
    )


def test_slots_that_compaction_emptied_are_skipped_and_keep_their_index() -> None:
    plain = bytes.fromhex("0000000812026b30180020010000000612026b3018027631")
    entry_metadata = metadata(num_messages_in_batch=2, uncompressed_size=len(plain))
    messages, rejects = decoded([encode_entry(entry_metadata, plain, broker(9))])
    assert rejects == []
    assert [
        (row["message_id"], row["broker_index"], row["key"], row["value"]) for row in messages
    ] == [("7:0:1", 9, "k0", b"v1")]


def test_a_key_that_is_not_text_is_bytes() -> None:
    messages, _ = decoded(
        [
            single(b"", partition_key="AAH/", partition_key_b64_encoded=True),
            single(b"", partition_key="not base64!", partition_key_b64_encoded=True),
            single(b"", partition_key=""),
        ]
    )
    assert [(row["key"], row["key_bytes"]) for row in messages] == [
        (None, b"\x00\x01\xff"),
        (None, b"not base64!"),
        ("", None),
    ]


def test_a_topic_without_broker_metadata_has_null_broker_columns() -> None:
    messages, _ = decoded([encode_entry(metadata(), b"v")])
    assert (messages[0]["broker_timestamp"], messages[0]["broker_index"]) == (None, None)


def test_a_servers_marker_is_no_message_and_no_reject() -> None:
    assert decoded([single(b"", marker_type=21)]) == ([], [])


def bad_entries() -> dict[str, bytes]:
    good = batch([b"a" * 50, b"b" * 50], pb.LZ4)
    flipped = bytearray(good)
    flipped[-5] ^= 1
    plain = encode_batch([(pb.SingleMessageMetadata(payload_size=0), b"abc")] * 2)
    return {
        "bad_checksum": bytes(flipped),
        "malformed_entry": good[:9],
        "unknown_codec": single(b"x", compression=7, uncompressed_size=1),
        "bad_compression": single(b"x" * 20, compression=pb.LZ4, uncompressed_size=99),
        "too_large": single(b"x" * 20, compression=pb.LZ4, uncompressed_size=2**31 - 1),
        "truncated_batch": encode_entry(
            metadata(num_messages_in_batch=2, uncompressed_size=len(plain)), plain[:-1]
        ),
        "batch_count": encode_entry(
            metadata(num_messages_in_batch=1_000_000_000, uncompressed_size=len(plain)), plain
        ),
        "encrypted": encode_entry(
            metadata(
                encryption_keys=[pb.EncryptionKeys(key="k", value=b"v")], encryption_param=b"iv"
            ),
            b"secret",
        ),
        "chunk_part": single(
            b"part", uuid="p-1", chunk_id=0, num_chunks_from_msg=3, total_chunk_msg_size=12
        ),
    }


@pytest.mark.parametrize("reason", sorted(bad_entries()))
def test_a_bad_entry_is_a_reject_with_its_bytes_and_its_neighbours_are_messages(
    reason: str,
) -> None:
    entry = bad_entries()[reason]
    messages, rejects = decoded([single(b"before"), entry, batch([b"behind"], pb.ZSTD)])
    assert [row["value"] for row in messages] == [b"before", b"behind"]
    assert [(row["reason"], row["message_id"], row["entry"]) for row in rejects] == [
        (reason, "7:1", entry)
    ]
    assert rejects[0]["detail"]


@pytest.mark.parametrize("count", [0, -1, 1, 3, 2**31 - 1])
def test_a_batch_that_claims_another_number_is_a_reject(count: int) -> None:
    plain = encode_batch([(pb.SingleMessageMetadata(payload_size=0), b"abc")] * 2)
    _, rejects = decoded(
        [encode_entry(metadata(num_messages_in_batch=count, uncompressed_size=len(plain)), plain)]
    )
    assert [row["reason"] for row in rejects] == ["batch_count"]


def test_parts_of_a_large_message_are_rows_for_those_who_ask() -> None:
    part = single(b"part", uuid="p-1", chunk_id=1, num_chunks_from_msg=3, total_chunk_msg_size=12)
    messages, rejects = decoded([part], chunks_as_rejects=False)
    assert rejects == []
    row = messages[0]
    assert (row["chunk_uuid"], row["chunk_id"], row["chunk_count"], row["chunk_total_bytes"]) == (
        "p-1",
        1,
        3,
        12,
    )
    assert row["value"] == b"part"


def test_odd_entries_stand_where_they_belong() -> None:
    entries = [
        batch([b"1", b"2"]),
        single(b"part", uuid="u", num_chunks_from_msg=2, chunk_id=0),
        batch([b"3"]),
    ]
    messages, _ = decoded(entries, chunks_as_rejects=False)
    assert [row["value"] for row in messages] == [b"1", b"2", b"part", b"3"]


def test_what_an_earlier_batch_took_of_the_first_entry_is_left_out() -> None:
    messages, _ = decoded(
        [batch([b"0", b"1", b"2"]), batch([b"3"])], first_entry=BatchRange(after=1)
    )
    assert [row["value"] for row in messages] == [b"2", b"3"]


@pytest.mark.parametrize("more", [{}, {"uuid": "makes it go the plain route"}])
def test_a_broker_gives_one_number_to_a_whole_batch_of_a_transaction(more: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"txnid_most_bits": 0, "txnid_least_bits": 7, **more}
    messages, _ = decoded(
        [batch([b"0", b"1", b"2"], index=5, **fields), batch([b"3", b"4"], index=7)]
    )
    assert [row["broker_index"] for row in messages] == [5, 5, 5, 6, 7]


def test_a_part_of_a_batch_can_end_before_the_batch_does() -> None:
    messages, _ = decoded(
        [batch([b"0", b"1", b"2", b"3"]), single(b"4")], first_entry=BatchRange(0, 2)
    )
    assert [row["value"] for row in messages] == [b"1", b"2", b"4"]


def test_large_payloads_are_expanded_in_slices_without_losing_rows() -> None:
    entries = [batch([bytes([number]) * 12_000_000], pb.LZ4) for number in range(6)]
    parts = list(decode_bundle(bundle(entries), SOURCE))
    assert len(parts) == 3
    assert [row[0] for part in parts for row in part.messages["value"].to_pylist()] == list(
        range(6)
    )


# A field that the kernels leave to the reference.
PLAIN_ROUTE = [pytest.param({}, id="kernels"), pytest.param({"uuid": "u"}, id="reference")]


@pytest.mark.parametrize("more", PLAIN_ROUTE)
def test_what_is_copied_for_each_message_of_a_batch_goes_out_in_bounded_pieces(
    more: dict[str, Any],
) -> None:
    count, name = 1_000, "p" * 100_000
    entries = [
        single(b"before"),
        batch([b"v"] * count, producer_name=name, index=count, **more),
        single(b"behind"),
    ]
    message_ids: list[str] = []
    pieces = 0
    for part in decode_bundle(bundle(entries), SOURCE):
        assert part.messages.nbytes < 1.5 * limits.DECODED_PIECE_BYTES
        assert part.rejects.num_rows == 0
        message_ids += part.messages["message_id"].to_pylist()
        pieces += 1
    assert message_ids == ["7:0", *(f"7:1:{number}" for number in range(count)), "7:2"]
    assert pieces > count * len(name) // (2 * limits.DECODED_PIECE_BYTES)


@pytest.mark.parametrize("more", PLAIN_ROUTE)
@pytest.mark.parametrize("copied", [{"producer_name": "p" * 1000}, {"schema_version": b"s" * 1000}])
def test_a_batch_whose_copies_of_its_metadata_pass_the_limit_is_a_reject(
    more: dict[str, Any], copied: dict[str, Any]
) -> None:
    entry = batch([b"v"] * 100, **copied, **more)
    assert [len(rows) for rows in decoded([entry], max_bytes=100_100)] == [100, 0]
    messages, rejects = decoded([single(b"before"), entry], max_bytes=99_999)
    assert [row["value"] for row in messages] == [b"before"]
    assert [row["reason"] for row in rejects] == ["too_large"]


@pytest.mark.parametrize("more", PLAIN_ROUTE)
def test_a_large_batch_that_is_broken_at_its_end_is_one_reject(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_module, "DECODED_PIECE_BYTES", 10_000)
    plain = encode_batch([(pb.SingleMessageMetadata(payload_size=0), b"abc")] * 1000)[:-1]
    broken = encode_entry(
        metadata(num_messages_in_batch=1000, uncompressed_size=len(plain), **more), plain
    )
    messages, rejects = decoded([single(b"before"), broken, single(b"behind")])
    assert [row["value"] for row in messages] == [b"before", b"behind"]
    assert [row["reason"] for row in rejects] == ["truncated_batch"]


def test_pieces_of_any_size_are_the_same_rows_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(11)
    for _ in range(5):
        entries = [
            damaged(entry, rng) if rng.random() < 0.2 else entry
            for entry in (random_entry(rng) for _ in range(rng.randrange(30)))
        ]
        entries.append(batch([b"x"] * 30, uuid="the reference's"))
        monkeypatch.setattr(messages_module, "DECODED_PIECE_BYTES", 2**30)
        expected = decoded(entries, first_entry=BatchRange(after=0))
        for size in (1, 2_000, 20_000):
            monkeypatch.setattr(messages_module, "DECODED_PIECE_BYTES", size)
            assert decoded(entries, first_entry=BatchRange(after=0)) == expected


@pytest.mark.parametrize("more", PLAIN_ROUTE)
def test_decoding_allocates_no_more_than_the_stated_factor(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_module, "DECODED_PIECE_BYTES", 2**20)
    entry = batch([b""] * (100_000 if not more else 10_000), **more)
    list(decode_bundle(bundle([entry]), SOURCE))
    frames = bundle([entry])
    held_bytes = pa.total_allocated_bytes()
    tracemalloc.start()
    most_bytes = 0
    for part in decode_bundle(frames, SOURCE):
        most_bytes = max(most_bytes, pa.total_allocated_bytes() - held_bytes)
        assert part.messages.num_rows
    most_bytes += tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_bytes < limits.DECODING_FACTOR * len(frames) + 4 * 2**20


@pytest.mark.parametrize("beyond", [1_790_000_000_000_000, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_time_out_of_range_is_null_and_its_number_a_property(beyond: int) -> None:
    slots = [
        (pb.SingleMessageMetadata(payload_size=0, event_time=event_time), b"")
        for event_time in (5, beyond)
    ]
    slots[0][0].properties.add(key="a", value="1")
    entry_metadata = metadata(publish_time=beyond, num_messages_in_batch=2, uncompressed_size=0)
    messages, rejects = decoded(
        [
            encode_entry(entry_metadata, encode_batch(slots), broker(2)),
            single(b"", event_time=beyond),
        ]
    )
    assert rejects == []
    published, event = (
        ("ledgerlake.publish_time", str(beyond)),
        ("ledgerlake.event_time", str(beyond)),
    )
    assert [(row["publish_time"], row["event_time"], row["properties"]) for row in messages] == [
        (None, moment(5), [("a", "1"), published]),
        (None, None, [published, event]),
        (moment(1_700_000_000_500), None, [event]),
    ]


@pytest.mark.parametrize("others", [0, 1, 40])
def test_a_property_that_is_there_twice_has_its_last_value(others: int) -> None:
    slot = pb.SingleMessageMetadata(payload_size=0)
    more = [(str(number), "") for number in range(others)]
    for key, value in [("p", "first"), *more, ("q", "only"), ("p", "last"), ("", "a"), ("", "b")]:
        slot.properties.add(key=key, value=value)
    plain = encode_batch([(slot, b""), (pb.SingleMessageMetadata(payload_size=0), b"")])
    entry = encode_entry(
        metadata(uncompressed_size=len(plain), num_messages_in_batch=2), plain, None
    )
    same_both_ways([entry])
    (row, other), _ = decoded([entry])
    assert row["properties"] == [*more, ("q", "only"), ("p", "last"), ("", "b")]
    assert other["properties"] == []


def test_a_sequence_id_beyond_what_the_column_holds_is_a_property() -> None:
    messages, _ = decoded([single(b"", sequence_id=2**63), single(b"", sequence_id=2**63 - 1)])
    assert [(row["sequence_id"], row["properties"]) for row in messages] == [
        (None, [("ledgerlake.sequence_id", str(2**63))]),
        (2**63 - 1, []),
    ]


@pytest.mark.parametrize(
    ("deliver_at", "is_kept"), [(-1, True), (-(2**63), True), (0, True), (2**62, False)]
)
def test_a_delivery_time_beyond_all_is_a_reject_and_one_before_all_a_property(
    deliver_at: int, is_kept: bool
) -> None:
    messages, rejects = decoded([single(b"", deliver_at_time=deliver_at)])
    assert [row["reason"] for row in rejects] == ([] if is_kept else ["malformed_entry"])
    if deliver_at < 0:
        assert [(row["deliver_at"], row["properties"]) for row in messages] == [
            (None, [("ledgerlake.deliver_at", str(deliver_at))])
        ]


def test_an_empty_bundle_has_no_rows() -> None:
    assert list(decode_bundle(b"", SOURCE)) == []


def test_a_bundle_of_broken_frames_is_our_own_fault_and_says_so() -> None:
    with pytest.raises(MalformedFrameError, match="bug"):
        list(decode_bundle(bundle([single(b"x")])[:-1], SOURCE))


def test_stored_entries_decode_like_bundles() -> None:
    entries = [batch([b"a", b"b"], pb.ZSTD), single(b"c"), b"garbage"]
    stored = pa.array([b"skipped", *entries], pa.binary()).slice(1)
    parts = list(decode_entries(stored, np.full(3, 7), np.arange(3), SOURCE))
    assert [row for part in parts for row in part.messages.to_pylist()] == decoded(entries)[0]
    assert [row for part in parts for row in part.rejects.to_pylist()] == decoded(entries)[1]


def test_the_columns_are_the_contract() -> None:
    part = next(iter(decode_bundle(bundle([single(b"x"), b"bad"]), SOURCE)))
    assert part.messages.schema.equals(schema.VIEW)
    assert part.rejects.schema.equals(schema.REJECTS)


# The two routes against each other.


def random_entry(rng: random.Random) -> bytes:
    """An entry of any legal shape."""
    entry_metadata = metadata(
        sequence_id=rng.randrange(2**40), producer_name=rng.choice(["p", "prodücer", ""])
    )
    singles = []
    for _ in range(rng.choice([0, 1, 1, 2, 7])):
        slot = pb.SingleMessageMetadata(payload_size=0)
        decorate(slot, rng)
        if rng.random() < 0.1:
            slot.compacted_out = True
        if rng.random() < 0.5:
            slot.sequence_id = rng.randrange(2**40)
        singles.append((slot, rng.randbytes(rng.choice([0, 1, 20, 300]))))
    if not singles:
        decorate(entry_metadata, rng)
    plain = encode_batch(singles) if singles else rng.randbytes(rng.choice([0, 5, 500]))
    if singles:
        entry_metadata.num_messages_in_batch = len(singles)
    if rng.random() < 0.2:
        entry_metadata.deliver_at_time = rng.randrange(2**42)
    if rng.random() < 0.2:
        entry_metadata.schema_version = rng.randbytes(8)
    if rng.random() < 0.1:
        entry_metadata.highest_sequence_id = 2**40
        entry_metadata.txnid_most_bits = 3
    if rng.random() < 0.2:
        entry_metadata.MergeFromString(
            rng.choice([b"\x82\x02\x03abc", b"\x88\x02\x05", b"\x91\x02" + b"8bytes!!"])
        )
    entry_metadata.compression = rng.choice([pb.NONE, pb.LZ4, pb.ZLIB, pb.ZSTD, pb.SNAPPY])
    entry_metadata.uncompressed_size = len(plain)
    from ledgerlake.decode.codecs import compress

    entry_broker = rng.choice([None, broker(rng.randrange(2**40)), pb.BrokerEntryMetadata(index=7)])
    return encode_entry(entry_metadata, compress(entry_metadata.compression, plain), entry_broker)


def decorate(target: Any, rng: random.Random) -> None:
    if rng.random() < 0.5:
        target.partition_key = rng.choice(["", "key", "schlüssel", "a2V5"])
        target.partition_key_b64_encoded = rng.random() < 0.3
    if rng.random() < 0.3:
        target.ordering_key = rng.randbytes(3)
    if rng.random() < 0.3:
        target.event_time = rng.randrange(2**42)
    if rng.random() < 0.1:
        target.null_value = True
    for _ in range(rng.choice([0, 0, 1, 3])):
        target.properties.add(key=rng.choice(["a", "ключ"]), value=rng.choice(["", "1", "x" * 100]))


def damaged(entry: bytes, rng: random.Random) -> bytes:
    """The entry with some bytes changed, cut or added, and in half of the cases a checksum that
    fits again.
    """
    broken = bytearray(entry)
    for _ in range(rng.choice([1, 1, 3])):
        if broken:
            broken[rng.randrange(len(broken))] = rng.randrange(256)
    if rng.random() < 0.2:
        del broken[rng.randrange(len(broken) + 1) :]
    if rng.random() < 0.6:
        return without_checksum(bytes(broken))
    return bytes(broken)


def without_checksum(entry: bytes) -> bytes:
    start = entry.find(b"\x0e\x01")
    return entry if start < 0 else entry[:start] + entry[start + 6 :]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_kernels_and_protobuf_agree_on_legal_entries(seed: int) -> None:
    rng = random.Random(seed)
    entries = [random_entry(rng) for _ in range(rng.randrange(1, 12))]
    same_both_ways(entries)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32))
def test_kernels_and_protobuf_agree_on_damaged_entries(seed: int) -> None:
    rng = random.Random(seed)
    entries = [random_entry(rng) for _ in range(4)]
    same_both_ways([damaged(entry, rng) if rng.random() < 0.7 else entry for entry in entries])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=5))
def test_kernels_and_protobuf_agree_on_garbage(entries: list[bytes]) -> None:
    same_both_ways(entries)


def test_legal_entries_take_the_fast_route() -> None:
    rng = random.Random(1)
    entries = [random_entry(rng) for _ in range(200)]
    table = np.zeros((len(entries), kernels.ENTRY_COLUMNS), dtype=np.int64)
    frames = np.frombuffer(bundle(entries), dtype=np.uint8)
    status = np.zeros(len(entries), dtype=np.int8)
    assert kernels.walk_frames(frames, table) == len(entries)
    kernels.walk_entries(frames, table, status)
    assert (status == kernels.OK).all()


@pytest.mark.parametrize("index", [0, 1, 2, 7])
def test_a_batch_of_more_messages_than_the_broker_has_counted_has_no_index_below_zero(
    index: int,
) -> None:
    entry = batch([b"a", b"b", b"c"], index=index)
    same_both_ways([entry])
    messages, _ = decoded([entry])
    expected = [number if number >= 0 else None for number in range(index - 2, index + 1)]
    assert [row["broker_index"] for row in messages] == expected
    # A message of the batch alone can be made an entry again.
    parts = decode_bundle(bundle([entry]), SOURCE)
    rows = pa.Table.from_batches([part.messages for part in parts]).to_batches()[0]
    assert len(list(single_entries(rows.select(schema.MESSAGES.names)))) == 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=8),
    st.data(),
)
def test_how_a_batch_is_cut_into_pieces_does_not_depend_on_its_bundle(
    stored: list[tuple[int, bool]], data: st.DataObject
) -> None:
    # Such a sequence id is odd, so the reference decoder reads the entry.
    entries = [
        batch([b"v"] * count, **({"sequence_id": 2**63} if is_odd else {}))
        for count, is_odd in stored
    ]

    def pieces_of(first: int, end: int) -> dict[int, list[int]]:
        cut: dict[int, list[int]] = {}
        frames = b"".join(
            commands.message(1, 7, number, entries[number]) for number in range(first, end)
        )
        for part in decode_bundle(frames, SOURCE):
            entry_ids = part.messages["entry_id"].to_pylist()
            for number in sorted(set(entry_ids)):
                cut.setdefault(number, []).append(entry_ids.count(number))
        return cut

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages_module, "DECODED_PIECE_BYTES", 6_000)
        together = pieces_of(0, len(entries))
        cuts = sorted(data.draw(st.sets(st.integers(1, len(entries)))) | {len(entries)})
        apart: dict[int, list[int]] = {}
        for first, end in zip([0, *cuts], cuts, strict=False):
            apart |= pieces_of(first, end)
    assert apart == together
    assert {number: sum(counts) for number, counts in together.items()} == {
        number: count for number, (count, _) in enumerate(stored)
    }
