"""The last message of a compacted topic (PIP-429), found in the topic's last remaining entry.

In the proposal, the broker sends that entry with its GET_LAST_MESSAGE_ID_RESPONSE (protocol v22),
and the client finds the id:

    [total u32] [command size u32] [BaseCommand] [stored entry]

If there is no entry (older brokers), the id in the response is used.

In Pulsar 4.2, which was released instead, the broker finds the id. It uses the list of retained
slots that compaction writes into the entry (``compacted_batch_indexes``, field 31 of
MessageMetadata). Both ways are supported; the protocol version is never used to choose.

Rules kept here:
  - Compaction keeps every slot of a batch: removed messages are marked ``compacted_out`` and have
    no payload.
  - An entry is a batch if ``num_messages_in_batch`` is present, even if it is 1.
  - Compaction does not change the inside of an encrypted batch: if its payload cannot be read, its
    last slot is its last message.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from ledgerlake.errors import CorruptEntryError
from ledgerlake.outside import Unreadable, reading
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.entry import take_message
from ledgerlake.wire.message_id import MessageId


@dataclass(frozen=True)
class LastEntry:
    """The last entry of a compacted topic partition.

    ``metadata`` holds the bytes of its MessageMetadata. ``payload`` is decrypted and decompressed,
    or None if it is encrypted and there is no key for it. ``partition`` is -1 for a topic without
    partitions.
    """

    ledger_id: int
    entry_id: int
    partition: int
    metadata: bytes
    payload: bytes | None


# Finds the id of the last message that a reader will get; may raise any exception.
PayloadToMessageIdConverter = Callable[[LastEntry], MessageId]


def last_message_id(last: LastEntry) -> MessageId:
    """Return the id of the last message that a reader will get from an entry that Pulsar's own
    compaction wrote.

    Raises:
        CorruptEntryError: the metadata or the batch does not parse, or it contains no retained
            message.
    """
    try:
        with reading():
            metadata = pb.MessageMetadata.FromString(last.metadata)
    except Unreadable as failure:
        raise CorruptEntryError(
            f"metadata of the last entry does not parse: {failure.error}"
        ) from None
    if not metadata.HasField("num_messages_in_batch"):
        return MessageId(last.ledger_id, last.entry_id)
    count = metadata.num_messages_in_batch
    if count < 1:
        raise CorruptEntryError(f"the last entry claims a batch of {count} messages")
    kept = [index for index in metadata.compacted_batch_indexes if 0 <= index < count]
    if last.payload is not None:
        slots = _kept_slots(memoryview(last.payload), count)
        # The producer chooses the numbers, and Python's hash of numbers has no secret.
        kept = [index for index in kept if _has(slots, index)] if kept else slots
    elif not kept:
        kept = [count - 1]
    if not kept:
        raise CorruptEntryError("the last entry holds no message that was kept")
    return MessageId(last.ledger_id, last.entry_id, max(kept))


def _has(numbers: list[int], number: int) -> bool:
    """Return whether a number is among numbers that rise."""
    place = bisect_left(numbers, number)
    return place < len(numbers) and numbers[place] == number


def _kept_slots(payload: memoryview, count: int) -> list[int]:
    kept = []
    for batch_index in range(count):
        single, _, payload = take_message(payload, batch_index, count)
        if not single.compacted_out:
            kept.append(batch_index)
    return kept
