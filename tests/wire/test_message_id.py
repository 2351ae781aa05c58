"""Message ids: text, bytes as other clients write them, and order."""

from __future__ import annotations

from typing import Any

import pytest

from ledgerlake.errors import UsageError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.message_id import (
    AFTER_ALL,
    BEFORE_ALL,
    ChunkMessageId,
    MessageId,
    Position,
    from_bytes,
    parse_message_id,
    partition_of,
    start_after,
    to_bytes,
    to_wire,
)

FIRST, LAST = MessageId(1, 2), MessageId(4, 5)


@pytest.mark.parametrize(
    ("serialised", "expected"),
    [
        pytest.param("080110023000", MessageId(1, 2), id="plain"),
        pytest.param("0801100218033000", MessageId(1, 2), id="with partition"),
        pytest.param("08011002180320043000", MessageId(1, 2, 4), id="batch"),
        pytest.param("08011002180320043005", MessageId(1, 2, 4), id="batch with size"),
        pytest.param(
            "08041005180630003a080801100218033000",
            ChunkMessageId(MessageId(1, 2), MessageId(4, 5)),
            id="chunk",
        ),
        pytest.param(
            "08ffffffffffffffffff0110ffffffffffffffffff013000", MessageId(-1, -1), id="earliest"
        ),
    ],
)
def test_ids_serialised_by_the_java_client_are_read(serialised: str, expected: MessageId) -> None:
    assert from_bytes(bytes.fromhex(serialised)) == expected
    assert parse_message_id(serialised) == expected


def go_id(message_id: MessageId, partition: int) -> pb.MessageIdData:
    """As the Go client fills it in: every field is explicit, also if it says none."""
    return pb.MessageIdData(
        ledger_id=message_id.ledger_id,
        entry_id=message_id.entry_id,
        batch_index=message_id.batch_index,
        partition=partition,
    )


@pytest.mark.parametrize("batch_index", [-1, -7])
def test_ids_serialised_by_the_go_client_keep_their_first_chunk(batch_index: int) -> None:
    data = go_id(LAST, -1)
    data.batch_index = batch_index
    data.first_chunk_message_id.CopyFrom(go_id(FIRST, -1))
    data.first_chunk_message_id.batch_index = batch_index
    message_id = from_bytes(data.SerializeToString())
    assert isinstance(message_id, ChunkMessageId)
    assert (message_id.first, message_id.last, str(message_id)) == (FIRST, LAST, "1:2;4:5")


def test_a_negative_batch_index_of_a_plain_id_means_none() -> None:
    assert from_bytes(go_id(MessageId(1, 2, -7), 0).SerializeToString()) == MessageId(1, 2)


@pytest.mark.parametrize(
    "serialised",
    ["0801100218033000", "08011002180320043000", "08041005180630003a080801100218063000"],
)
def test_an_id_keeps_its_partition(serialised: str) -> None:
    message_id = from_bytes(bytes.fromhex(serialised))
    assert (
        partition_of(message_id) == pb.MessageIdData.FromString(bytes.fromhex(serialised)).partition
    )
    assert to_bytes(message_id).hex() == serialised


@pytest.mark.parametrize("text", ["7:8", "7:8:1", "1:2;4:5", "080110023000"])
def test_an_id_that_says_no_partition_has_none(text: str) -> None:
    assert partition_of(parse_message_id(text)) == -1


@pytest.mark.parametrize("text", ["7:8", "7:8:0", "0:0", "123456789012:42:999", "1:2;4:5"])
def test_text_goes_there_and_back(text: str) -> None:
    assert str(parse_message_id(text)) == text


@pytest.mark.parametrize(
    "text", ["", "7", "7:x", "7:8:9:10", "-1:3", "zz", "0a", ";", "1:2;", "1:2;3:4;5:6"]
)
def test_what_is_no_id_is_refused_with_the_forms_that_are(text: str) -> None:
    with pytest.raises(UsageError, match="write ledger:entry"):
        parse_message_id(text)


def test_positions_order_by_ledger_then_entry() -> None:
    assert BEFORE_ALL < Position(0, -1) < Position(0, 0) < Position(0, 9) < Position(1, -1)


def test_the_start_of_everything_is_the_protocols_earliest() -> None:
    wire = start_after(BEFORE_ALL)
    assert (wire.ledger_id, wire.entry_id) == (2**64 - 1, 2**64 - 1)


def test_the_end_of_everything_is_the_protocols_latest() -> None:
    wire = start_after(AFTER_ALL)
    assert (wire.ledger_id, wire.entry_id) == (2**63 - 1, 2**63 - 1)


def test_a_start_asks_for_the_next_entry_because_brokers_step_back_one() -> None:
    assert start_after(Position(5, 9)) == to_wire(Position(5, 10))
    assert start_after(Position(5, -1)) == to_wire(Position(5, 0))


@pytest.mark.parametrize(
    ("message_id", "partition", "expected"),
    [
        (MessageId(1, 2), -1, "080110023000"),
        (MessageId(1, 2), 3, "0801100218033000"),
        (MessageId(1, 2, 4), 3, "08011002180320043000"),
        (ChunkMessageId(FIRST, LAST), -1, "0804100530003a06080110023000"),
    ],
)
def test_ids_are_serialised_as_the_java_client_does(
    message_id: MessageId | ChunkMessageId, partition: int, expected: str
) -> None:
    assert to_bytes(message_id, partition).hex() == expected
    read_back = from_bytes(bytes.fromhex(expected))
    assert (read_back, str(read_back)) == (message_id, str(message_id))


def test_a_chunk_id_stands_at_its_last_chunk_also_beside_plain_ids() -> None:
    chunk = ChunkMessageId(FIRST, LAST)
    other_first = ChunkMessageId(MessageId(0, 0), LAST)
    assert chunk == other_first == LAST
    ids: list[Any] = [LAST]
    assert ids.count(chunk) == 1
    assert len({chunk, other_first, LAST}) == 1
    assert chunk != FIRST
    assert MessageId(4, 4) < chunk < MessageId(4, 6)
    assert chunk <= LAST <= chunk
    ids = [MessageId(9, 9), chunk, MessageId(2, 0)]
    assert sorted(ids) == [MessageId(2, 0), chunk, MessageId(9, 9)]
    assert chunk != "4:5"


def test_bytes_of_an_older_client_without_a_first_chunk_are_a_plain_id() -> None:
    assert isinstance(from_bytes(bytes.fromhex("080410053000")), MessageId)


def test_a_batch_index_wins_over_a_first_chunk() -> None:
    both = bytes.fromhex("080410052001" + "3a06080110023000")
    assert from_bytes(both) == MessageId(4, 5, 1)


def test_a_list_in_a_list_without_end_is_no_id() -> None:
    with pytest.raises(UsageError):
        parse_message_id("[" * 100_000)
