"""Entries in a format of the user, converted to batches that the decoder reads (PIP-96).

The user's function gets an entry's metadata and plain payload, and returns the messages in it. They
replace the payload, as a batch that is neither encrypted nor compressed. The position and the
broker timestamp do not change, nor does the broker's index if the number of messages is the same.

What the sender of an entry says to Ledgerlake holds for its messages, whatever the function makes
of it: they have the entry's properties ``ledgerlake.*``, in place of their own of the same names. A
schedule is of a message that was sent alone. So a delayed message with such properties stays alone,
and is no batch of one, if it is the only one of an entry that was none. If the function finds no
message in an entry that says something about others, such as a cancel, the entry is one message
without a value.

The function is not called for chunks and for a broker's own markers. Entries that cannot be
decrypted or decompressed are rejects, also if they are delayed: nothing calls the function when
they are due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ledgerlake.decode.codecs import decompress
from ledgerlake.decode.columns import first_line
from ledgerlake.decode.crypto import CryptoSettings, open_entry
from ledgerlake.errors import CorruptEntryError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.reasons import PAYLOAD_PROCESSOR
from ledgerlake.wire.entry import (
    delivery_time_ms,
    encode_batch,
    encode_entry,
    parse_entry,
)
from ledgerlake.wire.schedules import is_told_to_others


@dataclass(frozen=True)
class EntryPayload:
    """An entry for a user's function: bytes of its MessageMetadata, and the payload,
    decompressed.
    """

    ledger_id: int
    entry_id: int
    metadata: bytes
    payload: bytes


@dataclass(frozen=True)
class PayloadMessage:
    """A message that the function returned. ``value`` None is a null value; ``event_time_ms`` 0
    means no event time.
    """

    value: bytes | None
    key: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    event_time_ms: int = 0


_Slot = tuple[pb.SingleMessageMetadata, bytes]

# The names of the properties by which a sender says something to Ledgerlake begin so.
_TOLD = "ledgerlake."

# The messages of an entry, in order; None for one in Pulsar's own format.
MessagePayloadProcessor = Callable[[EntryPayload], "Iterable[PayloadMessage] | None"]


def process_entry(
    processor: MessagePayloadProcessor,
    raw: memoryview,
    ledger_id: int,
    entry_id: int,
    max_bytes: int,
    crypto: CryptoSettings,
) -> bytes | None:
    """Return the entry as a batch of the messages that the function returned, which may be empty;
    None if the entry stays unchanged.

    Raises:
        CorruptEntryError: ``payload_processor``, with the function's error; or another reason, if
            the entry is delayed and cannot be decrypted or decompressed.
        DecryptionError: the same, if the settings say to fail.
    """
    try:
        entry = parse_entry(raw)
    except CorruptEntryError:
        # The decoder rejects the entry, with the reason.
        return None
    is_delayed = delivery_time_ms(entry) is not None
    try:
        if entry.metadata.num_chunks_from_msg == 0:
            entry = open_entry(
                entry, crypto if is_delayed else replace(crypto, failure_action="reject")
            )
        metadata = entry.metadata
        if metadata.num_chunks_from_msg > 0 or metadata.HasField("marker_type"):
            return None
        plain = decompress(
            metadata.compression, entry.payload, metadata.uncompressed_size, max_bytes
        )
    except CorruptEntryError:
        if is_delayed:
            raise
        # As above.
        return None
    try:
        messages = processor(
            EntryPayload(ledger_id, entry_id, metadata.SerializeToString(), bytes(plain))
        )
        told = _told(metadata)
        slots = None if messages is None else [_slot(message, told) for message in messages]
        if slots == [] and is_told_to_others(told):
            slots = [_slot(PayloadMessage(None), told)]
        payload = encode_batch(slots or [])
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        raise CorruptEntryError(first_line(error), reason=PAYLOAD_PROCESSOR) from error
    if not slots:
        return None if slots is None else b""
    if entry.broker is not None and len(slots) != max(metadata.num_messages_in_batch, 1):
        entry.broker.ClearField("index")
    if _stays_alone(metadata, slots):
        single, payload = slots[0]
        _describe(metadata, single)
    else:
        metadata.num_messages_in_batch = len(slots)
    metadata.compression, metadata.uncompressed_size = pb.NONE, len(payload)
    return encode_entry(metadata, payload, entry.broker)


def _told(metadata: pb.MessageMetadata) -> dict[str, pb.KeyValue]:
    """Return what the sender of an entry says to Ledgerlake; nothing for a batch, whose messages
    say it.
    """
    if metadata.HasField("num_messages_in_batch"):
        return {}
    return {pair.key: pair for pair in metadata.properties if str(pair.key).startswith(_TOLD)}


def _stays_alone(metadata: pb.MessageMetadata, slots: list[_Slot]) -> bool:
    is_batch = metadata.HasField("num_messages_in_batch") or len(slots) > 1
    if is_batch or metadata.deliver_at_time <= 0:
        return False
    return any(pair.key.startswith(_TOLD) for pair in slots[0][0].properties)


def _describe(metadata: pb.MessageMetadata, single: pb.SingleMessageMetadata) -> None:
    """Give an entry the metadata of its message, in place of its own."""
    for name in (
        "partition_key",
        "partition_key_b64_encoded",
        "ordering_key",
        "event_time",
        "properties",
    ):
        metadata.ClearField(name)
    if single.HasField("partition_key"):
        metadata.partition_key = single.partition_key
    metadata.event_time = single.event_time
    metadata.null_value = single.null_value
    metadata.properties.extend(single.properties)


def _slot(message: PayloadMessage, told: Mapping[str, pb.KeyValue]) -> _Slot:
    single = pb.SingleMessageMetadata(null_value=message.value is None)
    if message.key is not None:
        single.partition_key = message.key
    if message.event_time_ms:
        single.event_time = message.event_time_ms
    for key, value in message.properties.items():
        if key not in told:
            single.properties.add(key=key, value=value)
    single.properties.extend(told.values())
    return single, message.value or b""
