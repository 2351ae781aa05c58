"""The reasons of rejects: what the column ``reason`` of ``rejects`` may say.

All reasons are declared here. The type checker accepts only a declared reason as a ``Reason``.
``Reason(text)`` converts a text from a table or a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

Reason = NewType("Reason", str)


@dataclass(frozen=True)
class Declared:
    """A reason, with texts for people and properties for the code that decides by it.

    Args:
        cause: the fault. cure: the action that repairs it. can_be_replayed: the entry may fit
            later.
        is_mismatch: the message does not fit its table, and `[delta] on_mismatch` decides whether
            the stream ends.
        is_of_a_table: it depends on a table's rows, so that one table may take a message that
        another rejects. Such a reject has that message alone.
        may_change: it depends on more than the entry and the options, such as keys and what the
            topic still has, so a repeated micro-batch may give another outcome.
        is_beside_its_message: the message has its row all the same.
        may_precede_due: a delayed message may be rejected for it before it waits, so that no cancel
            and no replacement meets it.
    """

    cause: str
    cure: str
    can_be_replayed: bool = False
    is_mismatch: bool = False
    is_of_a_table: bool = False
    may_change: bool = False
    is_beside_its_message: bool = False
    may_precede_due: bool = False


REASONS: dict[Reason, Declared] = {}


def _declare(name: str, cause: str, cure: str, **properties: bool) -> Reason:
    reason = Reason(name)
    REASONS[reason] = Declared(cause, cure, **properties)
    return reason


BAD_CHECKSUM = _declare(
    "bad_checksum",
    "The stored checksum differs from the bytes. The entry was damaged.",
    "Publish the message again. If it happens often, check the disks and the network of the "
    "brokers.",
)
MALFORMED_ENTRY = _declare(
    "malformed_entry",
    "The entry or its metadata does not parse, or has a field that no message can have.",
    "Correct the producer: `entry` has the bytes, `detail` names the field.",
)
TRUNCATED_BATCH = _declare(
    "truncated_batch",
    "A batch ends inside a message.",
    "Correct the producer.",
)
BATCH_COUNT = _declare(
    "batch_count",
    "A batch claims another number of messages than it has, or more than a batch can have.",
    "Correct the producer.",
)
UNKNOWN_CODEC = _declare(
    "unknown_codec",
    "The compression is not none, LZ4, zlib, zstd or Snappy.",
    "Change the compression of the producer. After an upgrade of Ledgerlake that knows it, replay.",
    can_be_replayed=True,
)
BAD_COMPRESSION = _declare(
    "bad_compression",
    "The payload does not decompress, or to another size than it claims.",
    "Correct the producer. If a newer Ledgerlake reads it, replay.",
    can_be_replayed=True,
)
TOO_LARGE = _declare(
    "too_large",
    "The entry expands to more than `max_uncompressed_bytes`, or a large message has more than "
    "`max_message_bytes`, or the copies of its properties are too large, or the metadata of a "
    "message has more than 8 MiB.",
    "Raise the limit, then replay.",
    can_be_replayed=True,
    may_precede_due=True,
)
ENCRYPTED = _declare(
    "encrypted",
    "The entry is encrypted, and no keys are configured.",
    "Set `crypto_key_folder` or `crypto_key_reader`, then replay.",
    can_be_replayed=True,
    may_change=True,
)
UNDECRYPTABLE = _declare(
    "undecryptable",
    "No configured key opens the entry, or it is damaged.",
    "Add the private key that `detail` names, then replay.",
    can_be_replayed=True,
    may_change=True,
)
PAYLOAD_PROCESSOR = _declare(
    "payload_processor",
    "Your `message_payload_processor` raised an error; `detail` has its words.",
    "Correct the function, then replay.",
    can_be_replayed=True,
    may_change=True,
    may_precede_due=True,
)
CHUNK_ORPHAN = _declare(
    "chunk_orphan",
    "The first chunk of the large message was not read, since the read began behind it or the "
    "topic has lost it; or the message was given up or delivered before.",
    "Start at an earlier position, if the topic still has it: see [large "
    "messages](large-messages.md#start-at-a-large-message). If other chunks are `chunk_expired` or "
    "`chunk_evicted`, replay.",
    can_be_replayed=True,
    may_precede_due=True,
)
CHUNK_GAP = _declare(
    "chunk_gap",
    "A chunk is missing between two others. The producer gave up, or the topic has lost it.",
    "Publish the message again.",
)
CHUNK_RESENT = _declare(
    "chunk_resent",
    "The first chunk came again at another position. The producer began the message again.",
    "Nothing: the message that began again is delivered.",
)
CHUNK_DUPLICATE = _declare(
    "chunk_duplicate",
    "A chunk that has arrived came again at another position.",
    "Nothing: the message has the chunk once.",
)
CHUNK_MISMATCH = _declare(
    "chunk_mismatch",
    "A chunk says another count, total size or publish time than the others of its message.",
    "Give each producer a name of its own, and let restarted producers continue their sequence "
    "ids. `Pulsar.Client` "
    "for .NET gives each chunk another publish time: do not let it send chunks.",
)
CHUNK_SIZE = _declare(
    "chunk_size",
    "The chunks have more or fewer bytes than the message claims.",
    "Correct the producer.",
)
CHUNK_INVALID = _declare(
    "chunk_invalid",
    "A chunk has an id, a count or a size that no message can have; for example more than 10,000 "
    "chunks.",
    "Correct the producer, or make its chunks larger.",
)
CHUNK_KNOWN = _declare(
    "chunk_known",
    "Another chunk with that id waits already, because the topic was created again in another "
    "cluster.",
    "Publish the message again: it gets another id.",
)
CHUNK_PART = _declare(
    "chunk_part",
    "A single chunk was decoded by `ledgerlake.decode.as_udf`, which assembles nothing.",
    "Use the pipeline or `ledgerlake.api.messages`.",
)
CHUNK_EXPIRED = _declare(
    "chunk_expired",
    "The message was incomplete for longer than `[chunks] expire_after`.",
    "Raise `expire_after`, then replay. If the producer died, publish the message again.",
    can_be_replayed=True,
    may_precede_due=True,
)
CHUNK_EVICTED = _declare(
    "chunk_evicted",
    "More than ten thousand incomplete messages of a topic partition were spilled, or more "
    "than 100,000 of their chunks waited; this was the oldest. Or what a task passes on of large "
    "messages took more than 256 MiB.",
    "Find the producers that begin messages and do not end them; then replay.",
    can_be_replayed=True,
    may_precede_due=True,
)
CHUNK_TRIMMED = _declare(
    "chunk_trimmed",
    "The message was spilled or completed by its marker, and the topic no longer has all its "
    "chunks.",
    "Let the topic retain its messages for longer than `expire_after`, or raise `[chunks] "
    "max_pending` and `max_pending_bytes`.",
    may_change=True,
)
MALFORMED_MARKER = _declare(
    "malformed_marker",
    "The marker of a large message does not parse, lists chunks that cannot be its own, or has "
    "another delivery time than they.",
    "Correct the producer.",
)
CANCELLED = _declare(
    "cancelled",
    "The delayed message was cancelled. Or it is in a batch that cannot be decoded, and a message "
    "of the batch may be cancelled: `detail` has the former reason.",
    "Nothing: this is what a cancel does.",
)
REPLACED = _declare(
    "replaced",
    "A later message with the same `ledgerlake.schedule` took its place.",
    "Nothing: this is what a schedule does.",
)
NO_OCCURRENCE = _declare(
    "no_occurrence",
    "The message repeats, but its rule has no occurrence from its start on: `ledgerlake.until` "
    "or the times of its `ledgerlake.every` are past, or the clock of its zone never shows its "
    "times.",
    "Correct the rule, and publish the message again.",
)
EXPIRED = _declare(
    "expired",
    "The message was released later than its `ledgerlake.expires`.",
    "Nothing, or find out why the pipeline was behind: see "
    "[troubleshooting](troubleshooting.md#delayed-messages-are-late).",
)
ENTRY_TRIMMED = _declare(
    "entry_trimmed",
    "The topic no longer has the entry of a delayed message, or another topic of that name has "
    "another one "
    'in its place; only with `payloads = "reread"`.',
    'Use `payloads = "kept"`, or let the topic retain messages for longer than their delay.',
    may_change=True,
)
DELAYED_TRIMMED = _declare(
    "delayed_trimmed",
    "The topic no longer had all chunks of a large message when the message arrived to be delayed.",
    "Let the topic retain its messages for longer.",
    may_change=True,
)
DELAYED_KNOWN = _declare(
    "delayed_known",
    "A message with that id is delayed already, because the topic was created again in another "
    "cluster.",
    "Publish the message again: it gets another id.",
)
SCHEMA_MISMATCH = _declare(
    "schema_mismatch",
    "The value does not fit the columns of a table of records without loss.",
    "Correct the producer, or the declared fields (`json_fields`); then replay.",
    can_be_replayed=True,
    is_mismatch=True,
    is_of_a_table=True,
)
VALUE_TOO_LARGE = _declare(
    "value_too_large",
    "The value would take more than 256 MiB when it is decoded by its schema, for example an "
    "array of millions of items. `detail` has the bytes that it would take.",
    "Write smaller messages, or read the topic with `schema = bytes`; then replay.",
    can_be_replayed=True,
    is_mismatch=True,
    is_of_a_table=True,
)
UNKNOWN_SCHEMA = _declare(
    "unknown_schema",
    "The registry does not have the version of the schema that wrote the value.",
    "Restore the version in the registry, then replay.",
    can_be_replayed=True,
    is_mismatch=True,
    is_of_a_table=True,
)
UNDECODABLE_VALUE = _declare(
    "undecodable_value",
    "A typed read (`schema = auto`, `typed`) cannot decode the value by its schema. It is a "
    "`reject_reason`, and in no table.",
    "Read the topic with `schema = bytes`; the bytes are in `value_bytes`.",
)
TRANSFORM_FAILED = _declare(
    "transform_failed",
    "The query, the condition or the function cannot compute a value for the message, or the "
    "message has too many or impossible partition values.",
    "Correct the query (`try_cast` gives null), then replay.",
    can_be_replayed=True,
    is_mismatch=True,
    is_of_a_table=True,
)
NO_TABLE = _declare(
    "no_table",
    "No table takes the message.",
    "Add a table, or `[delta] path` for the others; then replay.",
    can_be_replayed=True,
    is_of_a_table=True,
)
NO_KEY = _declare(
    "no_key",
    "The table keeps the latest message of each key, and the message has no key.",
    "Give the message a key, or the table a condition.",
    is_of_a_table=True,
)
BAD_SCHEDULE = _declare(
    "bad_schedule",
    "A property of a schedule has a value that it cannot have; `detail` says which. See "
    "[schedules](schedules.md).",
    "Correct the producer, and send the message again.",
)
SCHEDULE_REFUSED = _declare(
    "schedule_refused",
    "The range that a task read had more messages with an id than it can pass on: 256 MiB, "
    "with 64 bytes and the id for each. Or 10,000 messages waited under the id, and it "
    "replaced none of them.",
    "Read fewer bytes in a micro-batch (`max_bytes_per_trigger`), or correct the clocks of the "
    "senders; and send the messages again.",
)
REPETITION_REFUSED = _declare(
    "repetition_refused",
    "With this message, the messages of its topic partition would repeat more often, or with "
    "more bytes, than `[delay] max_repetitions_per_second` and `max_repeated_bytes_per_second` "
    "allow. A message counts as if its occurrences were always as near to each other as its "
    "rule allows, at least one a day. Or 10,000 messages wait under the id, and it replaces "
    "none of them. What waits under its id goes on.",
    "Cancel schedules that are not needed, or raise the limits; then send the message again.",
)
CANCEL_REFUSED = _declare(
    "cancel_refused",
    "There are too many cancels: a topic partition has at most 100,000 pending cancels with 16 "
    "MiB of targets, and a task passes on at most 20,000 cancels with 4 MiB of targets. A "
    "cancel is pending until the last message that waited when it came has left. Cancels of "
    "[schedules](schedules.md) have no such limit.",
    "Give the messages ids of schedules, keep messages with long delays on another topic, or, "
    "if one range had too many cancels, set `max_rows_per_trigger` and send them again.",
    is_beside_its_message=True,
)
PAUSE_REFUSED = _declare(
    "pause_refused",
    "The pause did not begin: 1,000 earlier pauses of the same schedule, or of all, are kept, "
    "because occurrences wait that were due before the ends of these pauses, or will be.",
    "Wait until the pipeline has caught up, or, on a broker without timestamps, correct the "
    "clocks of the senders; and send the pause again.",
    is_beside_its_message=True,
)
DATA_LOSS = _declare(
    "data_loss",
    "The topic no longer has entries that were not read, and `fail_on_data_loss` is `false`. "
    "Or the broker names entries and does not send them. See [loss](loss.md).",
    "Find out what removed them: retention, message TTL, truncation, a deleted topic or "
    "subscription; or which producer wrote batches with wrong counts.",
    may_change=True,
)
REPLAYED = _declare(
    "replayed",
    "A replay has put the reject into its tables; `detail` has the former reason.",
    "Nothing: see [replay rejects](replay.md).",
)
