"""Sending due messages to a topic, in a thread beside the query.

Exactly once needs broker deduplication on the target topic's namespace: each topic partition has a
producer with a name that never changes, and numbers its messages (see ``outbox``). If the broker
does not know a producer whose micro-batch was begun before, the numbers are read from the topic
itself (see ``target_reader``). Without deduplication a crash may send some messages twice.

A message keeps its value, or that it has none (``null_value``), key, ordering key, properties and
event time. It has no schema version: it would mean another schema on the target. Of its own
properties it loses ``ledgerlake.chunks`` and those that are added:

    ledgerlake.topic             the topic partition that it was read from
    ledgerlake.message_id        its id there
    ledgerlake.broker_timestamp  when the broker stored it there, in milliseconds; absent if the
                                 broker did not say
    ledgerlake.deliver_at        when it was due, in milliseconds; absent if its row has no such
                                 time
    ledgerlake.key               ``base64`` if the key is not text; the message's key is then base64
                                 text
    ledgerlake.ordering_key      the ordering key in base64 if it is not text, which pulsar-client
                                 for Python cannot read
    ledgerlake.null              ``true``, if it has no value
    ledgerlake.too_large         ``true``, if its key and properties are too large for the broker's
                                 entries, or a policy of the topic refuses the message for its size.
                                 It is then replaced by an empty message with the first four of
                                 these properties; the table, or ``rejects``, has the full message

Order: by topic partition. A message goes to the partition that its key says (by Java's string hash,
as Pulsar's clients do by default); messages without a key of one topic partition go to one
partition. All messages of a micro-batch are routed by the number of partitions that the target had
when the sending of that micro-batch began, also if it has more when they are sent again.

Only a receipt proves that a message is on the target. Messages without a receipt are sent again in
order, and a broker with deduplication drops those that it has. It drops any number below one that
it has stored. So a message that may be refused is sent alone (see ``client.producer``), and after
the first failure the same producer sends nothing more.

Everybody who may write to the target can use a producer's name while it is not connected, and then
the broker drops the messages up to the number that was used. So a last number that the outbox has
not sent is not believed: the messages after the last own one are sent under another name, which
the outbox records first. A process that was suspended may meet the numbers of its successor. So it
first looks whether the micro-batch was sent meanwhile, or whether the topic has a message of this
stream with that number; then it begins again with what the outbox has now.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import math
import secrets
import threading
import time
import zlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ledgerlake.errors import BrokerError, CheckpointError, TransportError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.publish.outbox import OtherName, OutboxBatch, Sending
from ledgerlake.publish.routing import java_hash
from ledgerlake.publish.target_client import TargetClient
from ledgerlake.publish.target_reader import MESSAGE_ID, TargetReader
from ledgerlake.stored.secrets import said_in_short
from ledgerlake.wire.chunks import MARKER_PROPERTY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.errors import LedgerlakeError
    from ledgerlake.publish.outbox import Outbox, OutboxFile
    from ledgerlake.publish.target_client import Receipt, TargetProducer
    from ledgerlake.stored.places import Place
    from ledgerlake.wire.message_id import Position

_log = logging.getLogger(__name__)

_RETRY_FIRST_S = 0.5
_RETRY_MOST_S = 30.0
_ROWS_TOGETHER = 1000

# The most messages and bytes without a receipt.
_PENDING_MOST = 500
_PENDING_BYTES_MOST = 32 * 1024 * 1024

# How long a sender stays connected if there is nothing to send: a process that takes over the
# stream may have to wait for that long, since the broker takes one producer of a name.
_KEPT_S = 5.0

# How often a sender that waits for receipts checks whether it must stop, and after how many checks
# it logs that no receipt comes.
_CHECK_S = 1.0
_CHECKS_MOST = 30

# The properties of a message that replaces one.
_TOO_LARGE = "ledgerlake.too_large"
_UNUSABLE = "ledgerlake.unusable"

# A copy on the target has these properties from the pipeline or not at all, whatever the message's
# producer says. They are the pipeline's word there; but the promise of a marker is of the chunks on
# the message's own topic, and no marker follows on the target. What a sender says of a schedule
# stays, and means nothing beside the number of an occurrence (see ``wire.schedules``).
_OWN_PROPERTIES = frozenset(
    (
        "ledgerlake.topic",
        MESSAGE_ID,
        "ledgerlake.broker_timestamp",
        "ledgerlake.deliver_at",
        "ledgerlake.key",
        "ledgerlake.ordering_key",
        "ledgerlake.null",
        _TOO_LARGE,
        _UNUSABLE,
        MARKER_PROPERTY,
    )
)


class _NotOwnerError(TransportError):
    """Another process may own the stream, so nothing is sent now."""


class Republisher:
    """Sends the messages of the outbox as they are committed. If sending fails, it is tried again;
    the table does not wait.
    """

    def __init__(
        self,
        outbox: Outbox,
        settings: ClientSettings,
        topic: str,
        stream: str,
        may_send: Callable[[], bool],
        on_failure: Callable[[LedgerlakeError], None],
    ) -> None:
        """Prepare to send the messages of an open outbox.

        Args:
            may_send: returns whether this process still owns the stream; called before each file.
            on_failure: called once, in the background, if the outbox is damaged; nothing more is
                sent.
        """
        self._may_send = may_send
        self._on_failure = on_failure
        self._outbox = outbox
        self._settings = settings
        self._topic = topic
        self._name = f"ledgerlake-{stream}-{outbox.name}"
        self._wake = threading.Event()
        self._stopping = threading.Event()
        # What ``notify`` asked for last, and what the sender has answered, which sets ``_answer``.
        self._asked, self._answered = object(), object()
        self._answer = threading.Event()
        self._drain_began_s: float | None = None
        self._trouble = ""
        self._failure: CheckpointError | None = None
        self._known = _Known()
        self._sender: _Sender | None = None
        self._thread = threading.Thread(target=self._loop, name="ledgerlake-republish", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def notify(self) -> None:
        """Wake up the sender: there may be messages to send."""
        self._asked = object()
        self._wake.set()

    def drain(self, give_up_after_s: float, timeout_s: float | None = None) -> bool:
        """Wait until everything is sent; return False if ``timeout_s`` passed first, and call it
        again.

        Raises:
            CheckpointError: the outbox is damaged. TransportError: nothing was stored for
            ``give_up_after_s`` since the first call; the rest
                stays in the outbox.
        """
        if self._drain_began_s is None:
            self._drain_began_s = time.monotonic()
            self.notify()
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_answered():
            give_up_s = max(self._drain_began_s, self._known.receipt_s) + give_up_after_s
            now_s = time.monotonic()
            if now_s >= give_up_s:
                self._drain_began_s = None
                raise TransportError(
                    f"messages for {self._topic} could not be sent in {give_up_after_s:g} s and "
                    f"wait in {self._outbox.folder}"
                    f"{self._trouble}; run the pipeline again when the topic can be written"
                )
            if now_s >= until_s:
                return False
            self._answer.wait(min(give_up_s, until_s) - now_s)
        self._drain_began_s = None
        if self._failure is not None:
            raise self._failure
        return True

    def _is_answered(self) -> bool:
        """Return whether all is sent that there was when the sender was woken up last."""
        self._answer.clear()
        return self._failure is not None or self._answered is self._asked

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _loop(self) -> None:
        try:
            self._send_until_stopped()
        finally:
            self._close_sender()

    def _send_until_stopped(self) -> None:
        pause_s = _RETRY_FIRST_S
        while not self._stopping.is_set():
            self._wake.clear()
            asked = self._asked
            try:
                self._send_ready()
            except CheckpointError as error:
                self._failure = error
                self._answer.set()
                self._on_failure(error)
                return
            except Exception as error:  # whatever it is, the messages stay in the outbox
                if self._stopping.is_set():
                    return
                self._close_sender()
                self._trouble = f" ({said_in_short(error)})"
                # The cursors reopen the subscription, and log the reason if they cannot.
                if not isinstance(error, _NotOwnerError):
                    _log.warning("%s cannot be written%s; trying again", self._topic, self._trouble)
                self._stopping.wait(pause_s)
                pause_s = min(pause_s * 2, _RETRY_MOST_S)
                continue
            pause_s, self._trouble = _RETRY_FIRST_S, ""
            self._answered = asked
            self._answer.set()
            if not self._wake.wait(_KEPT_S):
                self._close_sender()
                self._wake.wait()

    def _send_ready(self) -> None:
        while batches := self._outbox.ready():
            if self._sender is None:
                self._sender = _Sender(
                    self._settings,
                    self._topic,
                    self._name,
                    self._outbox,
                    self._known,
                    self._stopping,
                )
            for batch in batches:
                if not self._send(self._sender, batch):
                    break
                self._outbox.sent(batch)

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _send(self, sender: _Sender, batch: OutboxBatch) -> bool:
        """Send a micro-batch; False if another process has sent it meanwhile."""
        is_routed = False
        for file in batch.files:
            if self._stopping.is_set() or not self._may_send():
                raise _NotOwnerError("this process does not own the stream")
            if not self._outbox.is_present(batch, file):
                return False
            if not is_routed:
                sender.route(batch, *self._outbox.begin_sending(batch, sender.would_begin()))
                is_routed = True
            sender.send(file, _rows(self._outbox.folder, file.name))
        return True


@dataclass
class _TargetProducer:
    """The producer of the messages of one topic partition for one partition of the target. Those up
    to number ``stored`` are on the target.
    """

    key: tuple[str, str]
    producer: TargetProducer
    stored: int


@dataclass
class _Known:
    """The content of receipts, kept from one sender to the next.

    ``stored`` is the last number of each producer, since a broker without deduplication does not
    know it. ``refused`` are messages that the broker does not take, by a policy of the topic.
    ``ends`` are the last known entries of the target's partitions: messages that are sent later
    come after them. An end is None if it may not be read. ``limited`` are the partitions of the
    target that take fewer producers than there are topic partitions. ``receipt_s`` is when the last
    message was stored, by a clock that does not jump.
    """

    stored: dict[tuple[str, str], int] = field(default_factory=dict)
    refused: set[tuple[tuple[str, str], int]] = field(default_factory=set)
    ends: dict[str, Position | None] = field(default_factory=dict)
    limited: set[str] = field(default_factory=set)
    receipt_s: float = 0.0


class _Sender:
    """The producers: one for each topic partition that is read and each partition of the target.

    Args:
        outbox: records the other names of producers.
        known: the content of the receipts of earlier senders.
        stopping: ends a wait for receipts.
    """

    def __init__(
        self,
        settings: ClientSettings,
        topic: str,
        name: str,
        outbox: Outbox,
        known: _Known,
        stopping: threading.Event,
    ) -> None:
        self._settings = settings
        self._topic = topic
        self._name = name
        self._outbox = outbox
        self._known = known
        self._stopping = stopping
        self._reader = TargetReader(settings, stopping)
        self._targets: list[str] = []
        self._batch = OutboxBatch(-1, [])
        self._sending = Sending(0)
        self._may_be_sent = False
        self._nexts: dict[str, int] = {}
        self._unsent: dict[str, int] = {}
        self._other_names: dict[tuple[str, str], OtherName] = {}
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._pending = 0
        self._pending_bytes = 0
        self._handing_over: tuple[_TargetProducer, int] | None = None
        self._failure = ""
        self._connect()

    def _connect(self) -> None:
        self._client = TargetClient(self._settings)
        self._producers: dict[tuple[str, str], _TargetProducer] = {}
        self._last_numbers: dict[str, dict[str, int]] = {}

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._client.close()

    def would_begin(self) -> Sending:
        """Return how to send a micro-batch whose sending has not begun: the broker is asked for the
        target's partitions and their ends.
        """
        targets = self._targets = self._client.partitions(self._topic)
        if unknown := [target for target in targets if target not in self._known.ends]:
            self._known.ends |= self._reader.ends(unknown)
        ends = {target: end for target in targets if (end := self._known.ends[target]) is not None}
        return Sending(len(targets), ends)

    def route(self, batch: OutboxBatch, sending: Sending, may_be_sent: bool) -> None:
        """Route the micro-batch that is sent next as when its sending began.

        If the target has fewer partitions now, because it was deleted and created again, the
        messages are routed among those.

        Args:
            may_be_sent: the sending began before, and some messages may be on the target.
        """
        if may_be_sent and self._producers:
            # Another process has sent some, so what the open producers know is too old.
            self.close()
            self._connect()
        self._targets = self._targets[: sending.partitions]
        self._batch, self._sending, self._may_be_sent = batch, sending, may_be_sent
        self._last_numbers.clear()
        self._other_names = self._outbox.other_names()
        self._nexts = batch.next_sequences
        firsts: dict[str, int] = {}
        for file in batch.files:
            firsts.setdefault(file.topic_partition, file.first_sequence)
        self._unsent = self._nexts if may_be_sent else self._nexts | firsts

    def send(self, file: OutboxFile, rows: Iterator[dict[str, Any]]) -> None:
        """Send a file's messages and wait until all are stored.

        Raises:
            ConnectionError: a message was not stored, and none after it was sent; or the sender was
                stopped.
        """
        targets = self._targets
        for sequence, row in enumerate(rows, file.first_sequence):
            producer = self._producer(
                file.topic_partition, targets[_route(row, file.topic_partition, len(targets))]
            )
            if sequence <= producer.stored:
                continue
            is_refused = (producer.key, sequence) in self._known.refused
            message = _usable_message(row, file.topic_partition)
            if (
                message is not None
                and not is_refused
                and self._hand_over(producer, sequence, message)
            ):
                continue
            reason = _UNUSABLE if message is None else _TOO_LARGE
            _log.warning(
                "the message %s of %s is %s; it is replaced there by an empty message with "
                "the property %s, and the table, or rejects, has the full message",
                row["message_id"],
                file.topic_partition,
                f"larger than {self._topic} takes"
                if reason == _TOO_LARGE
                else "none that a topic can have",
                reason,
            )
            if not self._hand_over(
                producer, sequence, _placeholder(row, file.topic_partition, reason)
            ):
                raise ConnectionError("the broker takes no message as small as that")
        self._wait_for_receipts(1, _PENDING_BYTES_MOST)

    def _producer(self, topic_partition: str, target: str) -> _TargetProducer:
        key = (topic_partition, target)
        if key not in self._producers:
            opened = self._open(key)
            while opened.last_sequence_id >= self._unsent[topic_partition]:
                if self._is_of_another_process(key, opened.last_sequence_id):
                    raise _NotOwnerError("another process of this stream sends the messages")
                self._rename(key, opened.last_sequence_id)
                opened = self._open(key)
            is_known = opened.last_sequence_id >= 0
            self._producers[key] = _TargetProducer(
                key, opened, self._last_stored(key, is_known=is_known)
            )
        return self._producers[key]

    def _open(self, key: tuple[str, str]) -> TargetProducer:
        """Open a producer; close the others of its target if the target takes no more of them."""
        target = key[1]
        if target in self._known.limited:
            self._close_producers(target)
        while True:
            try:
                return self._client.open_producer(
                    target, self._producer_name(*key), self._unsent[key[0]] - 1
                )
            except BrokerError as error:
                if error.code != "ProducerBusy" or not self._close_producers(target):
                    raise
                self._known.limited.add(target)

    def _close_producers(self, target: str) -> bool:
        """Close the producers of a target; return whether there were any. They are of earlier
        files, whose messages are all stored. None of them is needed again for this micro-batch,
        since the files of a topic partition come one after another.
        """
        keys = [key for key in self._producers if key[1] == target]
        for key in keys:
            self._client.close_producer(self._producers.pop(key).producer)
        return bool(keys)

    def _is_of_another_process(self, key: tuple[str, str], number: int) -> bool:
        """Return whether another process of this stream has sent a number that this one has not."""
        if self._outbox.is_sent(self._batch):
            return True
        return (
            not self._may_be_sent
            and number < self._nexts[key[0]]
            and self._last_on_target(*key) >= number
        )

    def _rename(self, key: tuple[str, str], foreign_number: int) -> None:
        """Give a producer another name: somebody else has sent a number under its name, and the
        broker would drop the messages up to that number.
        """
        topic_partition, target = key
        recorded = self._outbox.other_names()
        if recorded.get(key) == self._other_names.get(key):
            stored = self._last_stored(key, is_known=False)
            _log.warning(
                "another producer has used the name %s on %s, with the sequence id %d; messages of "
                "%s are sent there under another name from now on, and none is lost: either the "
                "checkpoint was restored from a copy, and the messages sent since the copy come "
                "again; or look at who may write to that topic",
                self._producer_name(*key),
                target,
                foreign_number,
                topic_partition,
            )
            before = self._other_names[key].suffix if key in self._other_names else ""
            self._outbox.rename(
                OtherName(topic_partition, target, before, secrets.token_hex(4), stored)
            )
            recorded = self._outbox.other_names()
        self._other_names = recorded
        self._last_numbers.pop(target, None)

    def _last_stored(self, key: tuple[str, str], *, is_known: bool) -> int:
        """Return the number up to which the messages of a producer are on the target; those after
        it may be there too.

        Args:
            is_known: the broker knows the producer, so that the target need not be read.
        """
        other_name = self._other_names.get(key)
        return max(
            -1 if is_known or not self._may_be_sent else self._last_on_target(*key),
            self._known.stored.get(key, -1),
            -1 if other_name is None else other_name.stored,
        )

    def _last_on_target(self, topic_partition: str, target: str) -> int:
        """Return the last number on the target under the present name of a producer."""
        if target not in self._last_numbers:
            nexts = {
                self._producer_name(name, target): number for name, number in self._nexts.items()
            }
            self._last_numbers[target] = self._reader.last_numbers(
                target, self._sending.ends.get(target), nexts
            )
        return self._last_numbers[target].get(self._producer_name(topic_partition, target), -1)

    def _producer_name(self, topic_partition: str, target: str) -> str:
        first_name = f"{self._name}-{topic_partition}"
        other_name = self._other_names.get((topic_partition, target))
        return first_name if other_name is None else f"{first_name}-{other_name.suffix}"

    def _hand_over(self, producer: _TargetProducer, sequence: int, message: _Message) -> bool:
        """Give a message to its producer; return False if the producer refuses it at once as too
        large.
        """
        size_bytes = len(message.content)
        self._wait_for_receipts(_PENDING_MOST, _PENDING_BYTES_MOST - size_bytes)
        with self._lock:
            self._pending += 1
            self._pending_bytes += size_bytes
            self._handing_over = (producer, sequence)
        message.metadata.sequence_id = sequence
        answered = partial(self._answered, producer, sequence, size_bytes)
        producer.producer.send(message.metadata, message.content, answered)
        with self._lock:
            taken, self._handing_over = self._handing_over is not None, None
        return taken

    def _answered(
        self, producer: _TargetProducer, sequence: int, size_bytes: int, receipt: Receipt
    ) -> None:
        with self._lock:
            self._pending -= 1
            self._pending_bytes -= size_bytes
            if receipt.name == "MessageTooBig" and self._handing_over == (producer, sequence):
                self._handing_over = None
            elif receipt.name != "Ok":
                if receipt.name == "NotAllowedError":
                    self._known.refused.add((producer.key, sequence))
                self._failure = self._failure or receipt.name
            elif not self._failure:
                producer.stored = sequence
                self._known.stored[producer.key] = sequence
                self._known.receipt_s = time.monotonic()
                self._know_end(producer.key[1], receipt)
        self._news.set()

    def _know_end(self, target: str, receipt: Receipt) -> None:
        """Remember the position of a stored message. The receipt of a message that the broker had
        already has none.
        """
        position = receipt.position
        if position.is_storable:
            self._known.ends[target] = max(self._known.ends.get(target) or position, position)

    def _wait_for_receipts(self, messages: int, size_bytes: int) -> None:
        """Wait until fewer than ``messages`` messages and at most ``size_bytes`` bytes are pending;
        with a size below zero, until nothing is.
        """
        checks = 0
        while True:
            self._news.clear()
            with self._lock:
                pending, failure = self._pending, self._failure
                if not failure and (
                    not pending or (pending < messages and self._pending_bytes <= size_bytes)
                ):
                    return
            if failure or self._stopping.is_set():
                raise ConnectionError(
                    f"the broker did not store all messages: {failure or 'the sender was stopped'}"
                )
            checks = 0 if self._news.wait(_CHECK_S) else checks + 1
            if checks == _CHECKS_MOST:
                checks = 0
                _log.warning(
                    "%s stores nothing; %d messages were sent and have no receipt",
                    self._topic,
                    pending,
                )


def _rows(folder: Place, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, with times in microseconds. One row group is in memory at a time.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        # With ``pre_buffer`` pyarrow reads row groups ahead, as many as the file has.
        with pq.ParquetFile(
            f"{folder.root}/{name}", filesystem=folder.filesystem(), pre_buffer=False
        ) as file:
            groups = (file.read_row_group(number) for number in range(file.num_row_groups))
            for batch in (batch for group in groups for batch in group.to_batches(_ROWS_TOGETHER)):
                columns = [
                    column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
                    for column in batch.columns
                ]
                yield from pa.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist()
    except pa.ArrowInvalid as error:
        raise CheckpointError(
            f"the file {name} of the outbox {folder} is damaged ({str(error)[:200]}), and its due "
            "messages were not sent; restore it from a copy of the checkpoint",
            lost="unknown",
        ) from None


def _origin(row: dict[str, Any], topic_partition: str) -> dict[str, str]:
    """Return the properties that name the origin of a message."""
    properties = {"ledgerlake.topic": topic_partition, MESSAGE_ID: row["message_id"]}
    for name in ("deliver_at", "broker_timestamp"):
        if row[name] is not None:
            properties[f"ledgerlake.{name}"] = _milliseconds(row[name])
    return properties


@dataclass(frozen=True)
class _Message:
    """A message for the target, without the fields that its producer adds."""

    metadata: pb.MessageMetadata
    content: bytes


def _placeholder(row: dict[str, Any], topic_partition: str, reason: str) -> _Message:
    """Return the empty message that replaces one that cannot be sent."""
    return _Message(_with_properties(_origin(row, topic_partition) | {reason: "true"}), b"")


def _usable_message(row: dict[str, Any], topic_partition: str) -> _Message | None:
    """Return the message of a row; None if there can be no such message, whatever the table
    took.
    """
    try:
        return _message(row, topic_partition)
    except (TypeError, ValueError, OverflowError):
        return None


def _message(row: dict[str, Any], topic_partition: str) -> _Message:
    """Return the message of a row."""
    own = {name: value for name, value in (row["properties"] or ()) if name not in _OWN_PROPERTIES}
    properties = own | _origin(row, topic_partition)
    key, ordering_key = _key(row), row["ordering_key"]
    if row["key_bytes"] is not None:
        properties["ledgerlake.key"] = "base64"
    if row["is_null"]:
        properties["ledgerlake.null"] = "true"
    if ordering_key is not None and not _is_text(ordering_key):
        properties["ledgerlake.ordering_key"] = base64.b64encode(ordering_key).decode()
        ordering_key = None
    metadata = _with_properties(properties)
    if key is not None:
        metadata.partition_key = key
    if ordering_key is not None:
        metadata.ordering_key = ordering_key
    if row["event_time"] is not None:
        metadata.event_time = int(_milliseconds(row["event_time"]))
    if row["is_null"]:
        metadata.null_value = True
    return _Message(metadata, row["value"] or b"")


def _with_properties(properties: dict[str, str]) -> pb.MessageMetadata:
    return pb.MessageMetadata(
        properties=[pb.KeyValue(key=name, value=value or "") for name, value in properties.items()]
    )


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _key(row: dict[str, Any]) -> str | None:
    if row["key_bytes"] is not None:
        return base64.b64encode(row["key_bytes"]).decode()
    key: str | None = row["key"]
    return key


def _route(row: dict[str, Any], topic_partition: str, count: int) -> int:
    key = _key(row)
    return (java_hash(key) if key is not None else zlib.crc32(topic_partition.encode())) % count


def _milliseconds(time_us: int) -> str:
    return str(time_us // 1000)
