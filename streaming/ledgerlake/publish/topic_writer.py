"""Writes the rows of a DataFrame as messages to topics, in a task of
``writeStream.format("ledgerlake")``.

| column | becomes |
|---|---|
| ``value`` | the payload, binary or string; null: a message without value |
| ``key`` | the key, string or binary; null: none |
| ``ordering_key`` | the ordering key, binary |
| ``properties`` | properties, map of strings |
| ``event_time`` | the event time, timestamp |
| ``deliver_at`` | when the message is to be delivered, timestamp |
| ``topic`` | the target topic; if it is missing or null, the option ``topic`` is |

``__key``, ``__topic``, ``__eventTime`` and ``__messageProperties``, as in the JVM connectors, mean
the same. No topic is created. A string need not be UTF-8: a value is sent as it is, and a key as a
binary one. Only properties and topics must be UTF-8.

A message has what its row has, or the row is an error: for example a property that is null, or a
time that means "none" in a message. Only times are rounded, to milliseconds.

A message goes to the partition of its topic that its key selects (by Java's string hash, as
Pulsar's clients do by default); without a key, to each partition in turn, a hundred rows at a time.

Exactly once, on topics whose broker deduplicates: each task of a query has a producer name that
never changes, and a message's sequence id is made of the micro-batch's number and the message's
number in the task. A task that is run again sends its messages with the same ids, and the broker
stores none of them twice. So a micro-batch that is run again must give its tasks the same rows in
the same order, as Ledgerlake's and Spark's own sources do. Change the number of tasks only between
two runs that ended well. Without deduplication a failure may store messages twice.

A sequence id has these bits, from the highest on:

    31   the number of the micro-batch
     1   whether the plan of the micro-batch is known
    31   a number that its plan gives (see ``planned_batch``; 0 if the plan is not known), and then
         one more for each message

So what the broker has of another plan of the micro-batch nearly always has other ids than this one:
the last of them is below its first id, or beyond its last one. Then the task ends with an error,
and the micro-batch fails. By chance, the ids of a plan may begin between the ids of the other one.
Then the two are not told apart, and the broker drops messages up to the last id of the other one
(see ``planned_batch`` for how likely that is).

The end of a batch depends on its messages and bytes, never on the clock, so that batches are the
same in a second run. A delayed message is never batched, as with Pulsar's producers.

A message that does not fit into one entry is sent in chunks. An entry carries 4 MiB of payload at
most, and no more than the broker's largest message (``max_message_size`` of CONNECTED) leaves
beside the metadata and ten bytes of magic, checksum and length, as in Pulsar's own clients. So a
message that is sent again after that limit has changed may have another number of chunks. It keeps
its one sequence id, which a broker compares at the last chunk only: the complete message is stored
once, and the chunks of an interrupted attempt are an incomplete message. The end of a batch never
depends on the broker, because the ids of batches would overlap; a batch that is too large for the
broker is an error.
"""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledgerlake.client.backoff import with_retries
from ledgerlake.client.cluster import Cluster
from ledgerlake.client.producer import NumberedEntry, NumberedProducer
from ledgerlake.client.topics import full_name
from ledgerlake.decode.codecs import compress
from ledgerlake.errors import CheckpointError, UsageError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.publish.routing import java_hash
from ledgerlake.wire.chunks import attempt_suffix, encode_chunks, payload_limit_bytes
from ledgerlake.wire.entry import encode_batch, encode_entry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ledgerlake.client.cluster import ClientSettings

# The columns of the JVM connectors, and ours for each.
CONNECTOR_COLUMNS = {
    "__key": "key",
    "__topic": "topic",
    "__eventTime": "event_time",
    "__messageProperties": "properties",
}
# The columns of rows, and the types that each may have.
COLUMN_TYPES = {
    "value": ("string", "binary"),
    "key": ("string", "binary"),
    "ordering_key": ("binary",),
    "properties": ("map<string,string>",),
    "event_time": ("timestamp",),
    "deliver_at": ("timestamp",),
    "topic": ("string",),
}

# The bits for the number of a message in its micro-batch and producer.
_SEQUENCE_BITS = 32

_HAS_PLAN = 1 << (_SEQUENCE_BITS - 1)

_WHY_DROPPED = (
    ": the checkpoint is an older copy, or a new one; or another program has used that name, as "
    "everybody who may write "
    "to the topic can; restore the newest copy, or, if this is the newest one, set the option "
    "'pulsar.producer.producerName' to another name, and messages may come twice"
)

# So many rows without a key go to one partition before the next one has its turn.
_TURN_ROWS = 100


@dataclass(frozen=True)
class TopicSettings:
    """The target and the form of messages; the same for all tasks. ``producer_name`` begins that of
    every producer, if given.
    """

    client: ClientSettings
    topic: str | None = None
    batch_messages: int = 1000
    batch_bytes: int = 128 * 1024
    codec: int = pb.NONE
    producer_name: str = ""


def check_columns(columns: dict[str, str], topic: str | None) -> None:
    """Check that rows with these columns, by Spark's names of their types, can be messages.

    Raises:
        UsageError: a column is unknown, missing or of a type that it cannot have; the message names
            it.
    """
    for name, kind in columns.items():
        ours = CONNECTOR_COLUMNS.get(name, name)
        if ours not in COLUMN_TYPES:
            raise UsageError(
                f"there is nothing that the column '{name}' could become; select "
                f"{', '.join(COLUMN_TYPES)} only, and put the rest "
                "into value, for example with to_json"
            )
        if kind not in COLUMN_TYPES[ours]:
            raise UsageError(
                f"the column '{name}' is {kind}; it must be {' or '.join(COLUMN_TYPES[ours])}"
            )
    names = [CONNECTOR_COLUMNS.get(name, name) for name in columns]
    if "value" not in names:
        raise UsageError("the column 'value' is missing")
    if len(set(names)) != len(names):
        raise UsageError(f"two columns mean the same: {', '.join(sorted(columns))}")
    if topic is None and "topic" not in names:
        raise UsageError("no target topic: set the option 'topic' or add a column 'topic'")


class TopicWriter:
    """Sends the messages of one task to topics.

    Args:
        name: the name of its producers; no other task has it, and it is the same when the task is
            run again.
        batch_id: the micro-batch's number.
    """

    def __init__(
        self, settings: TopicSettings, name: str, batch_id: int, plan_number: int | None = None
    ) -> None:
        self.messages = 0
        self._settings = settings
        self._cluster = Cluster(settings.client)
        self._name = name
        plan = 0 if plan_number is None else _HAS_PLAN + plan_number
        # Chunks of a message carry the number before its own, see ``wire.chunks``.
        self._first_sequence_id = (batch_id << _SEQUENCE_BITS) + plan or 1
        self._first_turn = batch_id
        # By the topic as a row spells it; spellings of one topic have one target.
        self._targets: dict[str, _Target] = {}
        # Rows may name a topic, and others one of its partitions.
        self._partitions: dict[str, _TargetPartition] = {}

    def write(self, rows: pa.RecordBatch) -> None:
        """Send rows, a bounded number ahead of their receipts.

        Raises:
            UsageError: neither a row nor an option names a topic; or a message or a batch is too
                large for the broker; or a row has what a message cannot have.
            CheckpointError: the broker has messages of a later micro-batch, or of another plan of
                this one.
            ProducerNameError: somebody else has used the producer's name meanwhile.
            TopicNotFoundError, BrokerError, TransportError: a message could not be stored.
        """
        for row in _rows(rows, self.messages):
            topic = row.pop("topic", None)
            topic = self._settings.topic if topic is None else topic
            if topic is None:
                raise UsageError("a row has no topic, and there is no option 'topic'")
            self._target(topic).add(row)
            self.messages += 1

    def flush(self) -> None:
        """Wait until everything is stored.

        Raises:
            As ``write``.
        """
        for partition in self._partitions.values():
            partition.finish()
        for partition in self._partitions.values():
            partition.wait()

    def close(self) -> None:
        for partition in self._partitions.values():
            partition.close()
        self._cluster.close()

    def _target(self, topic: str) -> _Target:
        if topic not in self._targets:
            name = full_name(topic)
            if name not in self._targets:
                found = with_retries(
                    lambda: self._cluster.topic_partitions(name),
                    self._settings.client.give_up_after_s,
                )
                self._targets[name] = _Target(
                    [self._partition(partition) for partition in found], self._first_turn
                )
            self._targets[topic] = self._targets[name]
        return self._targets[topic]

    def _partition(self, name: str) -> _TargetPartition:
        if name not in self._partitions:
            self._partitions[name] = _TargetPartition(
                self._settings, self._cluster, name, self._name, self._first_sequence_id
            )
        return self._partitions[name]


class _Target:
    """The partitions of one topic. Rows without a key go to them in turns of so many rows, whatever
    the options are: a micro-batch that is run again under others has to number its rows as before.
    """

    def __init__(self, partitions: list[_TargetPartition], first_turn: int) -> None:
        self._partitions = partitions
        self._first_turn = first_turn
        self._rows_without_key = 0

    def add(self, row: dict[str, Any]) -> None:
        key = _key_text(row.get("key"))[0]
        if key is None:
            turn = self._first_turn + self._rows_without_key // _TURN_ROWS
            self._rows_without_key += 1
        else:
            turn = java_hash(key)
        self._partitions[turn % len(self._partitions)].add(row)


@dataclass
class _OpenBatch:
    """Messages that will be one entry."""

    messages: list[tuple[pb.SingleMessageMetadata, bytes]] = field(default_factory=list)
    size_bytes: int = 0


class _TargetPartition:
    """Collects the messages for one topic partition into batches, and sends those."""

    def __init__(
        self,
        settings: TopicSettings,
        cluster: Cluster,
        topic_partition: str,
        name: str,
        first_sequence_id: int,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._topic_partition = topic_partition
        self._name = name
        self._first_sequence_id = self._sequence_id = first_sequence_id
        self._producer: NumberedProducer | None = None
        self._open_batch = _OpenBatch()

    def add(self, row: dict[str, Any]) -> None:
        """Add a message."""
        if self._sequence_id == self._opened().first_known_id + 1:
            # The batches of an earlier attempt may have had other ends, under other options.
            self.finish()
        payload: bytes = row["value"] or b""
        size_bytes = len(payload) + _size_of(row)
        alone = self._settings.batch_messages == 1 or row.get("deliver_at") is not None
        if alone or size_bytes > self._settings.batch_bytes:
            self.finish()
            self._send_alone(row, payload)
            return
        if self._open_batch.size_bytes + size_bytes > self._settings.batch_bytes:
            self.finish()
        self._open_batch.messages.append((self._single(row), payload))
        self._open_batch.size_bytes += size_bytes
        if len(self._open_batch.messages) >= self._settings.batch_messages:
            self.finish()

    def finish(self) -> None:
        """Send the open batch."""
        batch, self._open_batch = self._open_batch, _OpenBatch()
        if not batch.messages:
            return
        first, last = batch.messages[0][0], batch.messages[-1][0]
        plain = encode_batch(batch.messages)
        metadata = self._metadata(first.sequence_id, len(plain))
        metadata.num_messages_in_batch = len(batch.messages)
        metadata.highest_sequence_id = last.sequence_id
        packed = compress(self._settings.codec, plain)
        entry = encode_entry(metadata, packed)
        if len(entry) > self._opened().max_entry_bytes:
            raise UsageError(
                f"a batch of {len(entry):,} bytes for {self._topic_partition} is more than the "
                f"broker takes ({self._opened().max_entry_bytes:,}); set "
                "'pulsar.producer.batchingMaxBytes' lower"
            )
        self._send(NumberedEntry(entry, first.sequence_id, last.sequence_id, len(batch.messages)))

    def wait(self) -> None:
        if self._producer is not None:
            self._producer.flush()
            self._check_is_of_this_plan(self._producer.first_known_id, is_end=True)

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()

    def _send_alone(self, row: dict[str, Any], payload: bytes) -> None:
        metadata = self._metadata(self._next_sequence_id(), len(payload))
        _fill(metadata, row)
        if row.get("deliver_at") is not None:
            metadata.deliver_at_time = row["deliver_at"]
        sequence_id = metadata.sequence_id
        packed = compress(self._settings.codec, payload)
        if len(packed) <= self._chunk_bytes(metadata, packed):
            self._send(NumberedEntry(encode_entry(metadata, packed), sequence_id, sequence_id))
            return
        # After a disconnect, another broker may serve the topic, with a lower limit.
        self._opened().send_chunks(
            sequence_id,
            lambda: encode_chunks(
                metadata, packed, self._chunk_bytes(metadata, packed), attempt_suffix()
            ),
        )

    def _chunk_bytes(self, metadata: pb.MessageMetadata, packed: bytes) -> int:
        """Return how many bytes of a payload fit into one entry."""
        return payload_limit_bytes(metadata, len(packed), self._opened().max_entry_bytes)

    def _send(self, entry: NumberedEntry) -> None:
        self._opened().send(entry)

    def _opened(self) -> NumberedProducer:
        if self._producer is None:
            end_of_micro_batch = (self._sequence_id >> _SEQUENCE_BITS) + 1 << _SEQUENCE_BITS
            self._producer = NumberedProducer(
                self._cluster, self._topic_partition, self._name, earlier_id=end_of_micro_batch - 1
            )
            self._check_is_newest(self._producer.first_known_id >> _SEQUENCE_BITS)
            self._check_is_of_this_plan(self._producer.first_known_id, is_end=False)
        return self._producer

    def _check_is_newest(self, known_batch_id: int) -> None:
        """Check that the broker knows no later micro-batch: it would drop the messages of
        this one.
        """
        batch_id = self._sequence_id >> _SEQUENCE_BITS
        if known_batch_id > batch_id:
            raise CheckpointError(
                f"{self._topic_partition} has a sequence id of micro-batch {known_batch_id} by the "
                f"producer {self._name}, and this is micro-batch {batch_id}, whose messages the "
                f"broker would drop{_WHY_DROPPED}"
            )

    def _check_is_of_this_plan(self, known_id: int, *, is_end: bool) -> None:
        """Check that what the broker knew of this micro-batch was sent by its plan: it would drop
        messages that are others.

        Args:
            is_end: all messages of the micro-batch have their ids.
        """
        batch_id = self._sequence_id >> _SEQUENCE_BITS
        if known_id >> _SEQUENCE_BITS != batch_id:
            return
        # Of a message in chunks, a broker may know the number before its own alone.
        is_of_plan = (
            known_id >= self._first_sequence_id - 1
            and not (known_id ^ self._first_sequence_id) & _HAS_PLAN
        )
        if not is_of_plan or (is_end and known_id >= self._sequence_id):
            raise CheckpointError(
                f"{self._topic_partition} has messages of micro-batch {batch_id} by the producer "
                f"{self._name}, and this micro-batch of the same number has other messages, which "
                f"the broker would drop{_WHY_DROPPED}"
            )

    def _metadata(self, sequence_id: int, size_bytes: int) -> pb.MessageMetadata:
        return pb.MessageMetadata(
            producer_name=self._name,
            sequence_id=sequence_id,
            publish_time=int(time.time() * 1000),
            compression=self._settings.codec,
            uncompressed_size=size_bytes,
        )

    def _single(self, row: dict[str, Any]) -> pb.SingleMessageMetadata:
        metadata = pb.SingleMessageMetadata(sequence_id=self._next_sequence_id())
        _fill(metadata, row)
        return metadata

    def _next_sequence_id(self) -> int:
        self._sequence_id += 1
        return self._sequence_id - 1


def _rows(rows: pa.RecordBatch, first: int) -> Iterator[dict[str, Any]]:
    """Yield rows, with values as bytes and times in milliseconds.

    Args:
        first: the number of the first row in its task, for errors.

    Raises:
        UsageError: a message cannot have a value; the message names row and column.
    """
    names = [CONNECTOR_COLUMNS.get(name, name) for name in rows.schema.names]
    columns = (
        _values(name, column, first) for name, column in zip(names, rows.columns, strict=True)
    )
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def _values(name: str, column: pa.Array, first: int) -> list[Any]:
    """Return the values of a column. Spark does not check that a string is UTF-8, for example if it
    was cast from bytes, and its times may be beyond those that Python has.
    """
    if name == "value":
        column = column.cast(pa.large_binary())
    elif pa.types.is_timestamp(column.type):
        times_us = column.cast(pa.int64()).to_pylist()
        return [_time_ms(name, time_us, row) for row, time_us in enumerate(times_us, first)]
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = [_value(name, scalar, row) for row, scalar in enumerate(column, first)]
    if name == "properties" and column.items.null_count:
        for row, properties in enumerate(values, first):
            _check_properties(properties, row)
    return values


def _check_properties(properties: list[tuple[str, str | None]] | None, row: int) -> None:
    nulls = [name for name, text in properties or () if text is None]
    if nulls:
        raise UsageError(
            f"row {row} of a task has null as the property '{nulls[0]}' in the column "
            "'properties', and a message has texts there; leave it out, for example with "
            "map_filter, or write an empty text"
        )


def _time_ms(name: str, time_us: int | None, row: int) -> int | None:
    """Return the time of a row in milliseconds. A message has none before 1970, and 0 means that it
    has no time.
    """
    if time_us is None:
        return None
    # A message is never early.
    time_ms = -(-time_us // 1000) if name == "deliver_at" else round(time_us, -3) // 1000
    if time_ms <= 0:
        raise UsageError(
            f"row {row} of a task has a time in the column '{name}' that a message cannot have: "
            f"{time_ms} milliseconds since 1970, and they begin at 1; make it null"
        )
    return time_ms


def _value(name: str, scalar: pa.Scalar, row: int) -> Any:
    """Return the value of a row; of a key that is not UTF-8, its bytes."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        if name == "key":
            return scalar.cast(pa.binary()).as_py()
        raise UsageError(
            f"row {row} of a task has bytes in the column '{name}' that are not UTF-8, and a "
            "message has them as text alone; "
            "encode them, for example with base64, or replace them with make_valid_utf8"
        ) from None


def _fill(metadata: pb.MessageMetadata | pb.SingleMessageMetadata, row: dict[str, Any]) -> None:
    """Fill in the fields that a message of a batch and a single message have in common."""
    if row["value"] is None:
        metadata.null_value = True
    key, is_encoded = _key_text(row.get("key"))
    if key is not None:
        metadata.partition_key = key
        metadata.partition_key_b64_encoded = is_encoded
    if row.get("ordering_key") is not None:
        metadata.ordering_key = row["ordering_key"]
    if row.get("event_time") is not None:
        metadata.event_time = row["event_time"]
    for name, text in row.get("properties") or ():
        metadata.properties.add(key=name, value=text)


def _key_text(key: str | bytes | None) -> tuple[str | None, bool]:
    """Return a key as it is on the wire, and whether that is base64."""
    if isinstance(key, bytes):
        return base64.b64encode(key).decode(), True
    return key, False


def _size_of(row: dict[str, Any]) -> int:
    """Return about how many bytes a message's keys and properties take."""
    keys = len(row.get("key") or "") + len(row.get("ordering_key") or b"")
    return keys + sum(len(name) + len(text) for name, text in row.get("properties") or ())
