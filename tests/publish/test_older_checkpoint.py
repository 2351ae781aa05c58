"""The sink and a checkpoint that is an older copy: Spark plans a micro-batch anew whose messages
the broker has. What the broker drops then was sent before, or the query ends.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from ledgerlake.client.cluster import ClientSettings
from ledgerlake.errors import CheckpointError, ProducerNameError, TransportError
from ledgerlake.publish.planned_batch import PLAN_BITS, newest_planned
from ledgerlake.publish.topic_writer import TopicSettings, TopicWriter
from ledgerlake.wire.entry import parse_entry
from tests.peer import TOPIC, Peer

if TYPE_CHECKING:
    from pathlib import Path

HISTORIES = 2000 if os.environ.get("LEDGERLAKE_CAMPAIGN") == "long" else 60


def run(
    peer: Peer,
    batch_id: int,
    plan_number: int | None,
    values: list[bytes],
    stops_after: int | None = None,
) -> None:
    """A task of a micro-batch; one that is killed after some messages sends no more."""
    settings = TopicSettings(ClientSettings(peer.url, give_up_after_s=2), TOPIC, batch_messages=1)
    writer = TopicWriter(settings, "ledgerlake-query-0", batch_id, plan_number)
    try:
        writer.write(
            pa.RecordBatch.from_pydict({"value": pa.array(values[:stops_after], pa.binary())})
        )
        writer.flush()
    finally:
        writer.close()


def stored(peer: Peer) -> list[bytes]:
    """The values that a broker with deduplication has."""
    values: dict[int, bytes] = {}
    last = -1
    for entry in map(parse_entry, peer.received):
        if entry.metadata.sequence_id > last:
            last = entry.metadata.sequence_id
            values[last] = bytes(entry.payload)
    return list(values.values())


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_a_micro_batch_is_on_the_topic_once_or_ends_the_query(seed: int) -> None:
    rng = random.Random(seed)
    batch_id = rng.choice([0, 1, 5, 2**20])
    first, second = (rng.randint(1, 2**PLAN_BITS) for _ in range(2))
    rows = [b"%d" % number for number in range(rng.randint(1, 8))]
    sent = rng.randint(1, len(rows))
    is_same_plan = rng.random() < 0.5
    with Peer() as peer:
        before = [b"before"] * rng.randint(0, 2)
        if batch_id and before:
            run(peer, batch_id - 1, rng.randint(1, 2**PLAN_BITS), before)
        run(peer, batch_id, first, rows, sent)
        if is_same_plan:
            run(peer, batch_id, first, rows)
            run(peer, batch_id + 1, second, [b"after"])
            assert stored(peer)[-len(rows) - 1 :] == [*rows, b"after"]
        else:
            others = [b"other %d" % number for number in range(rng.randint(1, 8))]
            with pytest.raises(
                CheckpointError,
                match=rf"messages of micro-batch {batch_id}.*restore the newest copy",
            ):
                run(peer, batch_id, second, others)


@pytest.mark.parametrize(
    ("distance", "is_told_apart"),
    [(-1000, True), (-4, True), (-1, True), (1, False), (2, False), (4, True)],
)
def test_another_plan_is_told_apart_unless_it_begins_among_the_ids_of_the_first(
    distance: int, is_told_apart: bool
) -> None:
    rows = [b"a", b"b", b"c"]
    with Peer() as peer:
        run(peer, 5, 2000, rows)
        if is_told_apart:
            with pytest.raises(CheckpointError, match="messages of micro-batch 5"):
                run(peer, 5, 2000 + distance, rows)
        else:
            run(peer, 5, 2000 + distance, rows)


@pytest.mark.parametrize(("first", "second"), [(None, 7), (7, None)])
def test_a_plan_that_is_not_known_any_more_or_is_known_now_is_another_one(
    first: int | None, second: int | None
) -> None:
    with Peer() as peer:
        run(peer, 5, first, [b"a"])
        with pytest.raises(CheckpointError, match="messages of micro-batch 5"):
            run(peer, 5, second, [b"a"])


def test_a_micro_batch_that_sends_less_than_the_broker_has_ends_the_query() -> None:
    with Peer() as peer:
        run(peer, 5, None, [b"a", b"b"])
        with pytest.raises(CheckpointError, match="messages of micro-batch 5"):
            run(peer, 5, None, [b"c"])


def test_chunks_of_an_interrupted_message_are_of_the_same_plan() -> None:
    with Peer(max_message_bytes=100_000, drop_after_received=2, loads_anew=True) as peer:
        run(peer, 0, 2**PLAN_BITS, [bytes(300_000)])
        run(peer, 0, 2**PLAN_BITS, [bytes(300_000)])
        assert len(peer.stored) == 1


@pytest.mark.parametrize("foreign_id", [2**62, (6 << 32) + 5])
def test_an_id_of_another_program_drops_no_row_and_the_error_names_the_way_on(
    foreign_id: int,
) -> None:
    with Peer() as peer:
        run(peer, 5, 7, [b"a"])
        peer.stored.append((foreign_id, foreign_id))
        with pytest.raises(
            CheckpointError,
            match=r"another program has used that name.*set the option "
            r"'pulsar\.producer\.producerName' to another name",
        ):
            run(peer, 6, 7, [b"b"])


def test_an_id_of_another_program_that_comes_while_a_task_reconnects_drops_no_row() -> None:
    rows = pa.RecordBatch.from_pydict({"value": pa.array([b"a"], pa.binary())})
    with Peer() as peer:
        settings = TopicSettings(
            ClientSettings(peer.url, give_up_after_s=2), TOPIC, batch_messages=1
        )
        writer = TopicWriter(settings, "ledgerlake-query-0", 5)

        def write() -> None:
            writer.write(rows)
            writer.flush()

        write()
        peer.stored.append((2**62, 2**62))
        peer.disconnect()
        with pytest.raises(
            ProducerNameError, match="another producer has used the name ledgerlake-query-0"
        ):
            write()
        writer.close()


def test_a_plan_is_what_the_newest_entry_of_sparks_log_says(tmp_path: Path) -> None:
    assert newest_planned(None) is None
    assert newest_planned("dbfs:/checkpoint") is None
    assert newest_planned(str(tmp_path)) is None
    offsets = tmp_path / "offsets"
    offsets.mkdir()
    entries = {"9": b"v1\n{}\n[1]", "10": b"v1\n{}\n[2]", ".10.crc": b"x", "tmp": b"y"}
    for name, content in entries.items():
        (offsets / name).write_bytes(content)
    first = newest_planned(str(tmp_path))
    assert first is not None
    assert first.batch_id == 10
    assert first == newest_planned(f"file://{tmp_path}")
    (offsets / "10").write_bytes(b"v1\n{}\n[3]")
    second = newest_planned(str(tmp_path))
    assert second is not None
    assert (second.batch_id, second.plan_number == first.plan_number) == (10, False)
    assert 1 <= second.plan_number <= 2**PLAN_BITS


def test_a_plan_that_cannot_be_read_now_is_an_error_and_not_an_unknown_plan(tmp_path: Path) -> None:
    (tmp_path / "offsets" / "7").mkdir(parents=True)
    with pytest.raises(TransportError, match="nothing was sent; start the query again"):
        newest_planned(str(tmp_path))
