"""The last message of a compacted topic (PIP-429), from the last entry that is left of it.

The proposal has a broker send that entry behind its GET_LAST_MESSAGE_ID_RESPONSE (protocol v22),
and the client find the id:

    [total u32] [command size u32] [BaseCommand] [stored entry]        no entry: an older broker, the response's id counts

What shipped instead (Pulsar 4.2) has the broker find it, by the list of retained slots that
compaction leaves in the entry (``compacted_batch_indexes``, field 31 of MessageMetadata). Both are
honoured; the number of the protocol never decides.

Rules kept here:
  - Compaction keeps every slot of a batch: those taken out say ``compacted_out`` and have no
    payload.
  - An entry is a batch if ``num_messages_in_batch`` is present, be it 1.
  - An encrypted batch is never compacted inside: if its payload cannot be read, its last slot is
    its last message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ledgerlake.errors import CorruptEntryError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.entry import take_message
from ledgerlake.wire.message_id import MessageId


@dataclass(frozen=True)
class LastEntry:
    """The last entry of a compacted topic partition.

    ``metadata`` are the bytes of its MessageMetadata; ``payload`` is decrypted and decompressed, or
    None if it is encrypted and nobody here has the key. ``partition`` is -1 for a topic without
    partitions.
    """

    ledger_id: int
    entry_id: int
    partition: int
    metadata: bytes
    payload: bytes | None


# Finds the id of the last message that a reader will get; may raise what it likes.
PayloadToMessageIdConverter = Callable[[LastEntry], MessageId]


def last_message_id(last: LastEntry) -> MessageId:
    """The id of the last message that a reader will get of an entry as Pulsar's own compaction
    writes it.

    Raises:
        CorruptEntryError: the metadata or the batch does not parse, or no message in it was kept.
    """
    try:
        metadata = pb.MessageMetadata.FromString(last.metadata)
    except DecodeError as error:
        raise CorruptEntryError(f"metadata of the last entry does not parse: {error}") from None
    if not metadata.HasField("num_messages_in_batch"):
        return MessageId(last.ledger_id, last.entry_id)
    count = metadata.num_messages_in_batch
    if count < 1:
        raise CorruptEntryError(f"the last entry claims a batch of {count} messages")
    listed = {index for index in metadata.compacted_batch_indexes if 0 <= index < count}
    if last.payload is not None:
        kept = [index for index in _kept_slots(memoryview(last.payload), count) if not listed or index in listed]
    else:
        kept = list(listed) or [count - 1]
    if not kept:
        raise CorruptEntryError("the last entry holds no message that was kept")
    return MessageId(last.ledger_id, last.entry_id, max(kept))


def _kept_slots(payload: memoryview, count: int) -> list[int]:
    kept = []
    for batch_index in range(count):
        single, _, payload = take_message(payload, batch_index, count)
        if not single.compacted_out:
            kept.append(batch_index)
    return kept
