"""Bad bytes end in ``rejects``, whole and with their reason, or end the connection; the stream goes
on.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.client.producer import EntryProducer
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.verify.verify import verify
from ledgerlake.wire.entry import encode_batch, encode_entry
from ledgerlake.wire.message_id import Position
from tests.entries import batch, metadata, single
from tests.live.pipelines import rows_by_position, run_once
from tests.peer import TOPIC, Peer

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]


def stored_by_a_careless_producer() -> dict[str, bytes]:
    """Entries whose checksum is right and whose content is not: a broker stores them as
    they are.
    """
    plain = encode_batch([(pb.SingleMessageMetadata(payload_size=0), b"abc")] * 2)

    def counted(count: int, payload: bytes = plain) -> bytes:
        return encode_entry(
            metadata(num_messages_in_batch=count, uncompressed_size=len(plain)), payload
        )

    return {
        "truncated_batch": counted(2, plain[:-1]),
        "batch_count": counted(1_000_000_000),
        "unknown_codec": encode_entry(metadata(compression=9, uncompressed_size=3), b"abc"),
        "bad_compression": encode_entry(
            metadata(compression=pb.LZ4, uncompressed_size=77), b"not lz4 at all"
        ),
        "too_large": encode_entry(
            metadata(compression=pb.ZSTD, uncompressed_size=2**31 - 1), b"\x28\xb5\x2f\xfd"
        ),
    }


def test_a_real_brokers_bad_entries_are_rejects_and_the_rest_is_messages(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    cluster = runtime.cluster()
    producer = EntryProducer(cluster, topic, "p")
    bad = stored_by_a_careless_producer()
    for number, entry in enumerate(bad.values()):
        producer.send(encode_entry(metadata(sequence_id=10 * number), b"before"))
        producer.send(entry)
    producer.send(encode_entry(metadata(sequence_id=99), b"last"))
    producer.close()
    config = run_once(spark, runtime.config(tmp_path, topic))
    assert [row["value"] for row in rows_by_position(config.delta.path)] == [b"before"] * len(
        bad
    ) + [b"last"]
    rejects = rows_by_position(config.delta.rejects_path)
    assert [row["reason"] for row in rejects] == list(bad)
    assert all(
        row["entry"].endswith(entry) for row, entry in zip(rejects, bad.values(), strict=True)
    )
    assert all(row["broker_timestamp"] is not None for row in rejects)
    verdict = verify(config)
    assert (verdict.clean, verdict.rejects) == (True, len(bad))
    producer = EntryProducer(cluster, topic, "p")
    producer.send(encode_entry(metadata(sequence_id=100), b"and on it goes"))
    producer.close()
    run_once(spark, runtime.config(tmp_path, topic))
    assert rows_by_position(config.delta.path)[-1]["value"] == b"and on it goes"
    assert len(rows_by_position(config.delta.rejects_path)) == len(bad)


@pytest.mark.parametrize("writer", ["arrow", pytest.param("spark", marks=pytest.mark.long)])
def test_messages_with_times_beyond_all_arrive_without_them_and_the_stream_goes_on(
    spark: SparkSession, tmp_path: Path, writer: str
) -> None:
    beyond = 1_790_000_000_000_000
    slots = [
        (pb.SingleMessageMetadata(payload_size=0, event_time=event_time), b"slot")
        for event_time in (beyond, 5)
    ]
    entries = [
        encode_entry(
            metadata(publish_time=beyond, event_time=2**64 - 1, sequence_id=2**63), b"nothing known"
        ),
        encode_entry(metadata(num_messages_in_batch=2), encode_batch(slots)),
        encode_entry(
            metadata(publish_time=2**64 - 1, deliver_at_time=1_700_000_000_000), b"due long ago"
        ),
        encode_entry(metadata(deliver_at_time=2**62), b"never"),
        encode_entry(
            metadata(
                publish_time=beyond,
                properties=[pb.KeyValue(key="ledgerlake.cancel", value="key=k")],
            ),
            b"",
        ),
    ]
    with Peer() as peer:
        data = _peer_config(peer, tmp_path)
        data["delta"]["writer"] = writer
        for number, entry in enumerate([*entries, *entries]):
            peer.add(entry, first=number)
            config = (
                run_once(spark, data) if number in (0, len(entries), 2 * len(entries) - 1) else None
            )
        assert config is not None
        verdict = verify(config)
    assert (verdict.clean, verdict.rejects) == (True, 2)
    rows = rows_by_position(config.delta.path)
    assert [row["value"] for row in rows] == 2 * [
        b"nothing known",
        b"slot",
        b"slot",
        b"due long ago",
        b"",
    ]
    first, slot = rows[0], rows[1]
    assert (first["publish_time"], first["event_time"], first["sequence_id"]) == (None, None, None)
    assert first["properties"] == {
        "ledgerlake.publish_time": str(beyond),
        "ledgerlake.event_time": str(2**64 - 1),
        "ledgerlake.sequence_id": str(2**63),
    }
    assert (slot["event_time"], slot["properties"]) == (
        None,
        {"ledgerlake.event_time": str(beyond)},
    )
    assert (rows[0]["late"], rows[9]["late"]) == (False, True)


def flipped(entry: bytes, position: int) -> bytes:
    changed = bytearray(entry)
    changed[position] ^= 0x40
    return bytes(changed)


def test_bits_that_flip_on_the_way_are_rejects_wherever_they_are(
    spark: SparkSession, tmp_path: Path
) -> None:
    good = batch([b"a" * 40, b"b" * 40], pb.LZ4)
    checksum = good.index(b"\x0e\x01")
    damage = {
        "broker metadata length": flipped(good, 3),
        "checksum": flipped(good, checksum + 2),
        "metadata length": flipped(good, checksum + 6),
        "metadata": flipped(good, checksum + 12),
        "payload": flipped(good, len(good) - 3),
        "end cut off": good[:-10],
        "everything": b"",
    }
    with Peer() as peer:
        for entry in damage.values():
            peer.add(single(b"good"), entry, first=len(peer.entries))
        config = run_once(spark, _peer_config(peer, tmp_path))
    assert len(rows_by_position(config.delta.path)) == len(damage)
    rejects = rows_by_position(config.delta.rejects_path)
    assert [row["entry"] for row in rejects] == list(damage.values())
    assert {row["reason"] for row in rejects} == {"bad_checksum", "malformed_entry"}


@pytest.mark.parametrize(
    "break_frame",
    [
        pytest.param(lambda frame: struct.pack(">I", 2**30) + frame[4:], id="over the limit"),
        pytest.param(lambda frame: flipped(frame, 4), id="command length", marks=pytest.mark.long),
        pytest.param(
            lambda frame: frame[: len(frame) // 2] + frame,
            id="cut in the middle",
            marks=pytest.mark.long,
        ),
    ],
)
def test_lost_framing_costs_a_connection_and_no_message(
    spark: SparkSession, tmp_path: Path, break_frame: Any
) -> None:
    strikes = iter(range(1))

    def strike(position: Position, frame: bytes) -> bytes:
        return (
            break_frame(frame)
            if position.entry_id == 3 and next(strikes, None) is not None
            else frame
        )

    with Peer() as peer:
        peer.add(*[single(b"%d" % number) for number in range(6)])
        peer.rewrite = strike
        config = run_once(spark, _peer_config(peer, tmp_path))
    assert [row["value"] for row in rows_by_position(config.delta.path)] == [
        b"%d" % number for number in range(6)
    ]


def _peer_config(peer: Peer, folder: Path) -> dict[str, Any]:
    return {
        "source": {"service_url": peer.url, "topics": [TOPIC], "retry_timeout_s": 20},
        "stream": {"name": "peer", "checkpoint": str(folder / "checkpoint")},
        "delta": {"path": str(folder / "messages")},
    }
