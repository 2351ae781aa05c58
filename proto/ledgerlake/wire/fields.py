"""Every field that a producer controls: its range, and the treatment of values out of range.

Brokers store any metadata that a producer sends; they only check the checksum. So the range is
checked here: a value out of range becomes null and its number is kept in a property, or the entry
becomes a reject. No value ends a stream.

``BrokerEntryMetadata`` is normally the broker's. It is in this table because a broker that shows
broker metadata but adds none passes on what a producer put in front of its entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ledgerlake.reasons import CHUNK_INVALID, UNKNOWN_CODEC
from ledgerlake.wire.limits import MAX_BATCH_MESSAGES, MAX_TIME_MS

if TYPE_CHECKING:
    from google.protobuf.message import Message

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


class Outside(Enum):
    """The treatment of a value out of range, or of text that is not UTF-8."""

    NULL = "the column is null, a property has the number"
    REJECT = "the entry is a reject"
    TAKEN = "there is no outside: any value is taken as it is, or nothing reads the field"


@dataclass(frozen=True)
class Field:
    """A field that a producer controls. ``lowest`` and ``highest`` are the range of a number;
    ``note`` adds an explanation.

    ``column`` is the table's column if a number is written to one unchanged. ``below`` is the
    treatment of numbers under ``lowest``, if it is not that of numbers above ``highest``.
    """

    message: str
    name: str
    outside: Outside
    note: str = ""
    lowest: int | None = None
    highest: int | None = None
    column: str | None = None
    below: Outside | None = None

    def fate(self, value: int) -> Outside | None:
        """Return the treatment of a number; None if it is in range."""
        if self.lowest is not None and value < self.lowest:
            return self.below or self.outside
        return self.outside if self.highest is not None and value > self.highest else None


def _time(
    message: str,
    name: str,
    column: str,
    outside: Outside,
    note: str = "",
    below: Outside | None = None,
) -> Field:
    return Field(message, name, outside, note, 0, MAX_TIME_MS, column, below)


def _long(message: str, name: str, column: str, outside: Outside, note: str = "") -> Field:
    return Field(message, name, outside, note, 0, _INT64_MAX, column)


_NULL, _REJECT, _TAKEN = Outside.NULL, Outside.REJECT, Outside.TAKEN
_BROKER, _ENTRY, _SINGLE = "BrokerEntryMetadata", "MessageMetadata", "SingleMessageMetadata"

FIELDS = (
    _time(_BROKER, "broker_timestamp", "broker_timestamp", _REJECT),
    _long(_BROKER, "index", "broker_index", _REJECT),
    Field(
        _ENTRY,
        "producer_name",
        _REJECT,
        "each message of a batch has a copy: too_large if those are; of a chunk as uuid",
    ),
    _long(_ENTRY, "sequence_id", "sequence_id", _NULL),
    _time(_ENTRY, "publish_time", "publish_time", _NULL),
    Field(_ENTRY, "properties", _REJECT),
    Field(_ENTRY, "replicated_from", _TAKEN),
    Field(_ENTRY, "partition_key", _TAKEN, "what is not UTF-8 is in key_bytes"),
    Field(_ENTRY, "replicate_to", _TAKEN),
    Field(_ENTRY, "compression", _REJECT, UNKNOWN_CODEC, 0, 4),
    Field(
        _ENTRY,
        "uncompressed_size",
        _REJECT,
        "too_large; not read without compression",
        0,
        _INT32_MAX,
    ),
    Field(
        _ENTRY,
        "num_messages_in_batch",
        _REJECT,
        "batch_count, also if it is not the payload's",
        1,
        MAX_BATCH_MESSAGES,
    ),
    _time(
        _ENTRY, "event_time", "event_time", _NULL, "0 is none; a batch does not read the entry's"
    ),
    Field(_ENTRY, "encryption_keys", _REJECT, "encrypted, undecryptable"),
    Field(_ENTRY, "encryption_algo", _TAKEN),
    Field(_ENTRY, "encryption_param", _REJECT, "undecryptable; not read without encryption_keys"),
    Field(
        _ENTRY,
        "schema_version",
        _TAKEN,
        "unknown_schema if values are read by it; copied as producer_name is",
    ),
    Field(
        _ENTRY, "partition_key_b64_encoded", _TAKEN, "what is not base64 is in key_bytes as it is"
    ),
    Field(_ENTRY, "ordering_key", _TAKEN),
    _time(
        _ENTRY,
        "deliver_at_time",
        "deliver_at",
        _REJECT,
        "delivered now it would be early, kept it would stay for ever; what is not above 0 is not "
        "delayed",
        _NULL,
    ),
    Field(
        _ENTRY,
        "marker_type",
        _TAKEN,
        "a server's own entry, which is no message; brokers do not deliver it",
    ),
    Field(_ENTRY, "txnid_least_bits", _TAKEN),
    Field(
        _ENTRY,
        "txnid_most_bits",
        _TAKEN,
        "whether it is there says how the broker numbers the batch",
    ),
    Field(_ENTRY, "highest_sequence_id", _TAKEN),
    Field(_ENTRY, "null_value", _TAKEN),
    Field(
        _ENTRY,
        "uuid",
        _REJECT,
        "read of chunks and markers; chunk_invalid, malformed_marker above 1 KiB",
    ),
    Field(
        _ENTRY,
        "num_chunks_from_msg",
        _TAKEN,
        "above 1 the entry is a chunk, see ``assembly.rules``",
    ),
    Field(_ENTRY, "total_chunk_msg_size", _TAKEN, "chunk_invalid, too_large; sizes nothing"),
    Field(_ENTRY, "chunk_id", _TAKEN, CHUNK_INVALID),
    Field(_ENTRY, "null_partition_key", _TAKEN),
    Field(_ENTRY, "compacted_batch_indexes", _TAKEN, "those outside of the batch are passed over"),
    Field(_SINGLE, "properties", _REJECT),
    Field(_SINGLE, "partition_key", _TAKEN, "what is not UTF-8 is in key_bytes"),
    Field(_SINGLE, "payload_size", _REJECT, "truncated_batch, batch_count", 0, _INT32_MAX),
    Field(_SINGLE, "compacted_out", _TAKEN, "no message"),
    _time(_SINGLE, "event_time", "event_time", _NULL, "0 is none"),
    Field(
        _SINGLE, "partition_key_b64_encoded", _TAKEN, "what is not base64 is in key_bytes as it is"
    ),
    Field(_SINGLE, "ordering_key", _TAKEN),
    _long(_SINGLE, "sequence_id", "sequence_id", _NULL),
    Field(_SINGLE, "null_value", _TAKEN),
    Field(_SINGLE, "null_partition_key", _TAKEN),
    Field("CommandSend", "producer_id", _TAKEN, "between producer and broker"),
    Field("CommandSend", "sequence_id", _TAKEN, "between producer and broker"),
    Field(
        "CommandSend",
        "num_messages",
        _TAKEN,
        "the broker adds it to its index, whatever the entry holds",
    ),
    Field("CommandSend", "highest_sequence_id", _TAKEN, "between producer and broker"),
    Field("CommandSend", "is_chunk", _TAKEN, "between producer and broker"),
)

_BY_NAME = {(field.message, field.name): field for field in FIELDS}


def property_of(column: str) -> str:
    """Return the name of the property that keeps a number which its column cannot hold."""
    return f"ledgerlake.{column}"


def read_number(source: Message, name: str) -> tuple[int | None, tuple[str, str] | None]:
    """Return a number for its column, and the property that keeps a number which the column cannot
    hold.

    A number that makes its entry a reject is returned unchanged; ``rejected`` finds it.
    """
    value = getattr(source, name)
    field = _BY_NAME[source.DESCRIPTOR.name, name]
    if field.fate(value) is Outside.NULL:
        return None, (property_of(field.column or name), str(value))
    return value, None


def is_kept(name: str, value: int) -> bool:
    """Return whether a number of a message's metadata does not fit its column, and is kept as a
    property.
    """
    return _BY_NAME["MessageMetadata", name].fate(value) is Outside.NULL


def rejected(source: Message, name: str) -> bool:
    """Return whether a number of a message makes its entry a reject."""
    return _BY_NAME[source.DESCRIPTOR.name, name].fate(getattr(source, name)) is Outside.REJECT
