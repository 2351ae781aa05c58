"""Entries that producers send are no larger than the broker announced."""

from __future__ import annotations

import contextlib
import random
import re
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.producer import NumberedEntry, NumberedProducer
from ledgerlake.errors import CheckpointError, LedgerlakeError, TransportError, UsageError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.publish.large_messages import LargeMessageProducer
from ledgerlake.publish.topic_writer import TopicSettings, TopicWriter, _Target
from ledgerlake.wire.chunks import (
    CHUNK_BYTES,
    attempt_suffix,
    chunk_limit_bytes,
    encode_chunks,
    fits_into_one_entry,
)
from ledgerlake.wire.entry import parse_entry
from ledgerlake.wire.message_id import ChunkMessageId, MessageId
from tests.peer import TOPIC, Peer

MEBIBYTE = 2**20
VALUE = random.Random(1).randbytes(3 * MEBIBYTE)


def chunks_of(peer: Peer) -> list[pb.MessageMetadata]:
    """The metadata of entries that are chunks of one message, once they are seen to be
    ``VALUE``.
    """
    entries = [parse_entry(raw) for raw in peer.received]
    chunks = [entry for entry in entries if entry.metadata.num_chunks_from_msg > 1]
    assert b"".join(bytes(chunk.payload) for chunk in chunks) == VALUE
    assert [chunk.metadata.chunk_id for chunk in chunks] == list(range(len(chunks)))
    assert {chunk.metadata.num_chunks_from_msg for chunk in chunks} == {len(chunks)}
    return [chunk.metadata for chunk in chunks]


def write(peer: Peer, batch_id: int = 0, **columns: list[object]) -> None:
    client = ClientSettings(peer.url, give_up_after_s=2)
    writer = TopicWriter(TopicSettings(client, TOPIC), "w", batch_id)
    try:
        writer.write(
            pa.RecordBatch.from_pydict({name: pa.array(values) for name, values in columns.items()})
        )
        writer.flush()
    finally:
        writer.close()


@pytest.mark.parametrize("max_message_bytes", [20_000, MEBIBYTE, 3 * MEBIBYTE, 3 * MEBIBYTE + 40])
def test_a_row_is_sent_in_chunks_that_the_broker_takes(max_message_bytes: int) -> None:
    with Peer(max_message_bytes=max_message_bytes) as peer:
        write(peer, value=[VALUE], key=["k" * 5000])
        chunks_of(peer)
        sizes = [len(entry) for entry in peer.received]
        assert max(sizes) <= max_message_bytes
        assert min(sizes[:-1]) >= max_message_bytes - 40


@pytest.mark.parametrize("max_message_bytes", [3 * MEBIBYTE + 200, 5 * MEBIBYTE])
def test_a_row_that_the_broker_takes_is_one_entry(max_message_bytes: int) -> None:
    with Peer(max_message_bytes=max_message_bytes) as peer:
        write(peer, value=[VALUE])
        (entry,) = map(parse_entry, peer.received)
        assert (bytes(entry.payload), entry.metadata.num_chunks_from_msg) == (VALUE, 0)


def test_a_row_that_is_sent_again_to_a_broker_with_another_limit_is_stored_once() -> None:
    with Peer(max_message_bytes=MEBIBYTE) as peer:
        write(peer, value=[VALUE])
        peer.max_message_bytes = 100_000
        write(peer, value=[VALUE])
        assert len(peer.stored) == 1
        write(peer, batch_id=1, value=[b"next"])
        assert len(peer.stored) == 2


def test_a_row_whose_chunks_broke_off_is_sent_whole_to_a_broker_with_another_limit() -> None:
    with Peer(max_message_bytes=MEBIBYTE) as peer:
        producer = NumberedProducer(
            Cluster(ClientSettings(peer.url, give_up_after_s=2)), TOPIC, "w"
        )
        metadata = pb.MessageMetadata(producer_name="w", sequence_id=1, publish_time=1)
        for entry in list(encode_chunks(metadata, VALUE, MEBIBYTE - 1000))[:2]:
            producer.send(NumberedEntry(entry, 1, 1, is_chunk=True))
        producer.flush()
        producer.close()
        assert (len(peer.received), peer.stored) == (2, [])
        peer.received.clear()
        peer.max_message_bytes = 100_000
        write(peer, value=[VALUE])
        assert len(chunks_of(peer)) > 4
        assert peer.stored == [(1, 1)]


@pytest.mark.parametrize("received", [1, 2, 3])
def test_a_row_is_whole_on_a_topic_that_was_loaded_again_amid_its_chunks(received: int) -> None:
    with Peer(max_message_bytes=MEBIBYTE, drop_after_received=received, loads_anew=True) as peer:
        write(peer, value=[VALUE, b"after"])
        assert [sequence_id for sequence_id, _ in peer.stored] == [1, 2]


@pytest.mark.parametrize("limits", [(600_000, 200_000), (200_000, 600_000)])
def test_a_micro_batch_that_is_run_again_with_other_batches_is_stored_once(
    limits: tuple[int, int],
) -> None:
    values = [b"s" * 300] * 1000 + [b"L" * 900] * 1000
    with Peer(max_message_bytes=MEBIBYTE, drop_after_sends=2) as peer:
        settings = ClientSettings(peer.url, give_up_after_s=0)
        for limit in limits:
            writer = TopicWriter(TopicSettings(settings, TOPIC, 700, limit), "w", 0)
            with contextlib.suppress(LedgerlakeError):
                writer.write(pa.RecordBatch.from_pydict({"value": pa.array(values)}))
                writer.flush()
            writer.close()
        stored = [number for first, last in peer.stored for number in range(first, last + 1)]
        assert stored == list(range(1, 2001))


class Rows(list[dict[str, Any]]):
    """A partition that keeps its rows."""

    def add(self, row: dict[str, Any]) -> None:
        self.append(row)


def test_rows_without_a_key_take_turns_that_depend_on_their_place_alone() -> None:
    """Other options for batches must not change where a repeated micro-batch puts its rows."""
    partitions = [Rows(), Rows(), Rows()]
    target = _Target(partitions, 4)  # type: ignore[arg-type]
    for number in range(250):
        target.add({"value": number})
        target.add({"value": "keyed", "key": "a"})
    without_key = [[row["value"] for row in rows if "key" not in row] for rows in partitions]
    assert without_key == [list(range(200, 250)), list(range(100)), list(range(100, 200))]
    assert sorted(sum("key" in row for row in rows) for rows in partitions) == [0, 0, 250]


def test_spellings_of_one_topic_have_one_producer() -> None:
    short = TOPIC.rpartition("/")[2]
    with Peer() as peer:
        write(peer, value=[b"a", b"b", b"c"], topic=[None, short, TOPIC])
        assert peer.requests.count("CommandProducer") == 1
        assert sum(last - first + 1 for first, last in peer.stored) == 3


def test_a_producer_of_large_messages_goes_on_after_the_numbers_of_an_earlier_one_of_its_name() -> (
    None
):
    with Peer() as peer:
        cluster = Cluster(ClientSettings(peer.url, give_up_after_s=2))
        ids = []
        for value in (b"a", b"b"):
            producer = LargeMessageProducer(cluster, TOPIC, name="p")
            ids += [producer.send(value), producer.send(value)]
            producer.close()
        cluster.close()
        assert len(peer.stored) == len(set(ids)) == 4


@pytest.mark.parametrize("received", [2, 3, 4, 5])
def test_chunks_of_one_uuid_stand_on_a_topic_once_after_a_connection_that_breaks(
    received: int,
) -> None:
    """A client that has seen a chunk of a uuid twice may skip the message."""
    with Peer(max_message_bytes=MEBIBYTE, drop_after_received=received) as peer:
        write(peer, value=[b"before", VALUE, b"after"])
        chunks: dict[str, list[int]] = {}
        for entry in map(parse_entry, peer.received):
            if entry.metadata.num_chunks_from_msg > 1:
                chunks.setdefault(entry.metadata.uuid, []).append(entry.metadata.chunk_id)
        assert all(ids == list(range(len(ids))) for ids in chunks.values())
        assert [0, 1, 2, 3] in chunks.values()
        assert [sequence_id for sequence_id, _ in peer.stored] == [1, 2, 3]


@pytest.mark.parametrize("max_message_bytes", [20_000, MEBIBYTE, 5 * MEBIBYTE])
def test_a_large_message_is_published_in_chunks_that_the_broker_takes(
    max_message_bytes: int,
) -> None:
    with Peer(max_message_bytes=max_message_bytes) as peer:
        cluster = Cluster(ClientSettings(peer.url, give_up_after_s=2))
        producer = LargeMessageProducer(cluster, TOPIC, name="p")
        stored = producer.send(VALUE, key="k" * 5000, properties={"a": "b"})
        producer.close()
        cluster.close()
        assert isinstance(stored, MessageId if max_message_bytes > CHUNK_BYTES else ChunkMessageId)
        if isinstance(stored, ChunkMessageId):
            chunks_of(peer)
        assert max(map(len, peer.received)) <= max_message_bytes


def test_metadata_that_the_broker_does_not_take_are_named() -> None:
    now = datetime.now(tz=timezone.utc)
    with Peer(max_message_bytes=20_000) as peer, pytest.raises(UsageError) as raised:
        write(peer, value=[b"v"], key=["k" * 20_000], deliver_at=[now])
    assert re.fullmatch(
        r"the key and the properties of a message take 20,\d+ bytes, which each of its chunks "
        r"repeats, and the broker takes entries of 20,000; .*",
        raised.value.message,
    )


def test_a_batch_that_the_broker_does_not_take_is_named() -> None:
    with Peer(max_message_bytes=20_000) as peer, pytest.raises(UsageError) as raised:
        write(peer, value=[b"v" * 1000] * 30)
    assert re.fullmatch(
        r"a batch of 30,\d+ bytes for .* is more than the broker takes \(20,000\); set "
        r"'.*batchingMaxBytes' lower",
        raised.value.message,
    )


def test_keys_count_where_a_batch_ends() -> None:
    with Peer() as peer:
        write(peer, value=[b"v"] * 1000, key=["k" * 10_000] * 1000)
        assert max(map(len, peer.received)) < 150_000


def test_a_message_that_is_said_to_need_no_chunks_is_below_the_limit_of_chunks() -> None:
    rng = random.Random(7)
    answers = []
    for _ in range(2000):
        metadata = pb.MessageMetadata(
            producer_name="p" * rng.choice([1, 50, 5000]),
            sequence_id=rng.choice([0, 2**40]),
            publish_time=1_700_000_000_000,
            partition_key="k" * rng.choice([0, 10, 2000]),
        )
        max_entry_bytes = rng.choice([100, 1_000, 20_000, 5 * MEBIBYTE])
        size = rng.randrange(max_entry_bytes)
        answers.append(fits_into_one_entry(metadata, size, max_entry_bytes))
        if answers[-1]:
            assert size <= chunk_limit_bytes(metadata, size, max_entry_bytes)
            chunk_fields_bytes = len(next(encode_chunks(metadata, b"x", 1, attempt_suffix()))) - 1
            assert chunk_fields_bytes + size <= max_entry_bytes
    assert 200 < sum(answers) < 1800


def test_a_micro_batch_that_is_older_than_what_the_broker_has_is_refused_and_not_dropped() -> None:
    with Peer() as peer:
        write(peer, batch_id=5, value=[b"a"])
        with pytest.raises(
            CheckpointError,
            match="sequence id of micro-batch 5 by the producer w, and this is micro-batch 3",
        ):
            write(peer, batch_id=3, value=[b"b"])
        write(peer, batch_id=5, value=[b"a"])
        write(peer, batch_id=6, value=[b"c"])
        assert [bytes(parse_entry(entry).payload)[-1:] for entry in peer.received] == [
            b"a",
            b"a",
            b"c",
        ]


def test_a_broker_that_is_away_for_a_moment_ends_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    find = Cluster.topic_partitions

    def away_at_first(self: Cluster, topic: str) -> list[str]:
        asked.append(topic)
        if len(asked) == 1:
            raise TransportError("the broker is away")
        return find(self, topic)

    monkeypatch.setattr(Cluster, "topic_partitions", away_at_first)
    with Peer() as peer:
        write(peer, value=[b"a"])
        assert len(peer.stored) == 1
