"""The last message of a batch that compaction went through (PIP-429), by its slots and by the list
beside it.
"""

from __future__ import annotations

import pytest

from ledgerlake.errors import CorruptEntryError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.entry import encode_batch
from ledgerlake.wire.last_message import LastEntry, last_message_id
from ledgerlake.wire.message_id import MessageId


def entry(slot_signs: str, listed: list[int] | None = None, *, readable: bool = True) -> LastEntry:
    """A batch with a slot for each sign of ``slot_signs``: ``x`` for a message, ``-`` for one that
    was compacted away.
    """
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=1, publish_time=1, num_messages_in_batch=len(slot_signs)
    )
    metadata.compacted_batch_indexes.extend(listed or [])
    slots = [
        (pb.SingleMessageMetadata(compacted_out=sign == "-"), b"" if sign == "-" else b"v")
        for sign in slot_signs
    ]
    return LastEntry(
        3, 7, -1, metadata.SerializeToString(), encode_batch(slots) if readable else None
    )


@pytest.mark.parametrize(
    ("last", "batch_index"),
    [
        pytest.param(entry("-x--"), 1, id="the example of the proposal"),
        pytest.param(entry("xxx"), 2, id="nothing was compacted"),
        pytest.param(entry("x"), 0, id="a batch of one"),
        pytest.param(entry("-x-x", [1, 3]), 3, id="slots and list agree"),
        pytest.param(entry("-x--", [1, 3]), 1, id="a listed slot that is empty does not count"),
        pytest.param(entry("xxxx", [1]), 1, id="the list alone leaves slots out"),
        pytest.param(entry("xx", [0, 99, -5]), 0, id="a list that points outside"),
        pytest.param(entry("xxxx", readable=False), 3, id="encrypted, so never compacted inside"),
        pytest.param(entry("xxxx", [0, 2], readable=False), 2, id="encrypted with a list"),
    ],
)
def test_the_last_kept_slot_is_the_last_message(last: LastEntry, batch_index: int) -> None:
    assert last_message_id(last) == MessageId(3, 7, batch_index)


def test_a_single_message_is_its_entry() -> None:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=1)
    assert last_message_id(LastEntry(3, 7, 2, metadata.SerializeToString(), b"v")) == MessageId(
        3, 7
    )


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(entry("--"), id="nothing was kept"),
        pytest.param(LastEntry(3, 7, -1, b"\xff\xff", b""), id="metadata that does not parse"),
        pytest.param(
            LastEntry(3, 7, -1, entry("xx").metadata, b"\x00\x00\x00\xff"), id="a batch cut short"
        ),
    ],
)
def test_what_holds_no_last_message_is_an_error(last: LastEntry) -> None:
    with pytest.raises(CorruptEntryError):
        last_message_id(last)


@pytest.mark.parametrize("count", [0, -1])
def test_a_batch_of_no_messages_has_no_last_one(count: int) -> None:
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=1, publish_time=1, num_messages_in_batch=count
    )
    with pytest.raises(CorruptEntryError, match="claims a batch"):
        last_message_id(LastEntry(3, 7, -1, metadata.SerializeToString(), None))


def test_a_long_list_beside_a_long_batch_is_looked_at_once() -> None:
    # In the square of its length this would not end.
    assert last_message_id(entry("x" * 100_000, list(range(100_000)))) == MessageId(3, 7, 99_999)
