"""Sending due messages to a topic, through pulsar-client, in a thread beside the query.

Exactly once needs broker deduplication on the target topic's namespace: each topic partition has a producer with a name
that never changes, and numbers its messages (see ``outbox``). Without deduplication a crash may send some twice.

What a message keeps: value, key, ordering key, properties, event time. What is added, as properties:

    ledgerlake.topic             the topic partition where it waited
    ledgerlake.message_id        its id there
    ledgerlake.broker_timestamp  when the broker stored it there, in milliseconds; absent where the broker did not say
    ledgerlake.deliver_at        when it was due, in milliseconds
    ledgerlake.key               ``base64``, where the key is not text and stands encoded
    ledgerlake.ordering_key      in base64, where it is not text: pulsar-client cannot send that
    ledgerlake.null              ``true``, where it has no value: nor that

Order: by topic partition. A message goes to the partition that its key says (by Java's string hash, as Pulsar's clients do
unless told otherwise); without a key, all of one topic partition go to one partition.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import threading
import zlib
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from ledgerlake.errors import TransportError
from ledgerlake.files import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ledgerlake.client.auth import Authentication
    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.sinks.outbox import Outbox, OutboxFile

_log = logging.getLogger(__name__)

_RETRY_FIRST_S = 0.5
_RETRY_MOST_S = 30.0
_ROWS_TOGETHER = 1000


class Republisher:
    """Sends what the outbox holds, as it comes; what cannot be sent now is tried again, and the table does not wait."""

    def __init__(
        self, outbox: Outbox, settings: ClientSettings, topic: str, stream: str, may_send: Callable[[], bool]
    ) -> None:
        """Prepare to send what an outbox that was begun holds.

        Args:
            may_send: whether this process still owns the stream; asked before each file.
        """
        self._may_send = may_send
        self._outbox = outbox
        self._settings = settings
        self._topic = topic
        self._name = f"ledgerlake-{stream}-{outbox.name}"
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._idle = threading.Event()
        self._trouble = ""
        self._thread = threading.Thread(target=self._loop, name="ledgerlake-republish", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def notify(self) -> None:
        """There may be something to send."""
        self._idle.clear()
        self._wake.set()

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is sent.

        Raises:
            TransportError: it was not sent in time; it stays in the outbox.
        """
        self.notify()
        if not self._idle.wait(timeout_s):
            raise TransportError(
                f"messages for {self._topic} could not be sent in {timeout_s:g} s and wait in {self._outbox.folder}"
                f"{self._trouble}; run the pipeline again when the topic can be written"
            )

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _loop(self) -> None:
        pause_s = _RETRY_FIRST_S
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                self._send_ready()
            except Exception as error:  # pulsar-client's errors have no common parent below this
                self._trouble = f" ({type(error).__name__}: {str(error)[:200]})"
                _log.warning("%s cannot be written%s; trying again", self._topic, self._trouble)
                self._stopping.wait(pause_s)
                pause_s = min(pause_s * 2, _RETRY_MOST_S)
                continue
            pause_s = _RETRY_FIRST_S
            if not self._wake.is_set():
                self._idle.set()
            self._wake.wait()

    def _send_ready(self) -> None:
        if not (batches := self._outbox.ready()):
            return
        with _Sender(self._settings, self._topic, self._name) as sender:
            while batches:
                for batch in batches:
                    for file in batch.files:
                        if self._stopping.is_set():
                            return
                        if not self._may_send():
                            raise TransportError("the subscription of this stream is not held")
                        self._outbox.check_present(file)
                        sender.send(file, _rows(self._outbox.folder, file.name))
                    self._outbox.sent(batch)
                batches = self._outbox.ready()


def pulsar_client(settings: ClientSettings) -> Any:
    """pulsar-client's, that reaches the cluster as we do."""
    import pulsar

    tls, authentication = settings.tls, settings.authentication
    who: Any = None
    if authentication.method == "tls":
        who = pulsar.AuthenticationTLS(tls.cert_file, tls.key_file)
    elif authentication.method == "token":
        who = pulsar.AuthenticationToken(partial(_text, authentication))
    elif authentication.method == "basic":
        user, _, password = _text(authentication).partition(":")
        who = pulsar.AuthenticationBasic(user, password)
    return pulsar.Client(
        settings.service_url,
        authentication=who,
        tls_trust_certs_file_path=tls.ca_file,
        tls_allow_insecure_connection=tls.allows_insecure,
        tls_validate_hostname=tls.checks_hostname and not tls.allows_insecure,
        listener_name=settings.listener_name,
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
        operation_timeout_seconds=10,
    )


def _text(authentication: Authentication) -> str:
    return (authentication.data() or b"").decode()


class _Sender:
    """pulsar-client's producers: one for each topic partition of ours and each partition of the target."""

    def __init__(self, settings: ClientSettings, topic: str, name: str) -> None:
        self._client: Any = pulsar_client(settings)
        self._topic = topic
        self._name = name
        self._targets: list[str] = []
        self._producers: dict[tuple[str, str], Any] = {}
        self._failed: list[Any] = []

    def __enter__(self) -> _Sender:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self._client.close()

    def send(self, one: OutboxFile, rows: Iterator[dict[str, Any]]) -> None:
        """Send a file's messages and wait until all are stored."""
        self._targets = self._targets or self._client.get_topic_partitions(self._topic)
        self._failed.clear()
        used = set()
        for sequence, row in enumerate(rows, one.first_sequence):
            target = self._targets[_route(row, one.topic_partition, len(self._targets))]
            producer, last_sequence = self._producer(one.topic_partition, target)
            if sequence > last_sequence:
                used.add((one.topic_partition, target))
                producer.send_async(callback=self._stored, sequence_id=sequence, **_message(row, one.topic_partition))
        for key in used:
            self._producers[key][0].flush()
        if self._failed:
            raise ConnectionError(f"the broker did not store all: {self._failed[0]}")

    def _producer(self, topic_partition: str, target: str) -> Any:
        key = (topic_partition, target)
        if key not in self._producers:
            made = self._client.create_producer(
                target,
                producer_name=f"{self._name}-{topic_partition}",
                batching_enabled=False,
                chunking_enabled=True,
                block_if_queue_full=True,
            )
            self._producers[key] = (made, made.last_sequence_id())
        return self._producers[key]

    def _stored(self, result: Any, _message_id: Any) -> None:
        if result.name != "Ok":
            self._failed.append(result)


def _rows(folder: str, name: str) -> Iterator[dict[str, Any]]:
    filesystem, root = resolve(folder)
    with pq.ParquetFile(f"{root}/{name}", filesystem=filesystem) as file:
        for batch in file.iter_batches(_ROWS_TOGETHER):
            yield from batch.to_pylist()


def _message(row: dict[str, Any], topic_partition: str) -> dict[str, Any]:
    """Arguments of pulsar-client's ``send_async``."""
    properties = dict(row["properties"] or ())
    properties |= {"ledgerlake.topic": topic_partition, "ledgerlake.message_id": row["message_id"]}
    properties["ledgerlake.deliver_at"] = _milliseconds(row["deliver_at"])
    if row["broker_timestamp"] is not None:
        properties["ledgerlake.broker_timestamp"] = _milliseconds(row["broker_timestamp"])
    if row["key_bytes"] is not None:
        properties["ledgerlake.key"] = "base64"
    if row["is_null"]:
        properties["ledgerlake.null"] = "true"
    found = {"content": row["value"] or b"", "properties": properties, "partition_key": _key(row)}
    if row["ordering_key"] is not None:
        try:
            found["ordering_key"] = row["ordering_key"].decode()
        except UnicodeDecodeError:
            properties["ledgerlake.ordering_key"] = base64.b64encode(row["ordering_key"]).decode()
    if row["event_time"] is not None:
        found["event_timestamp"] = int(_milliseconds(row["event_time"]))
    return {name: value for name, value in found.items() if value is not None}


def _key(row: dict[str, Any]) -> str | None:
    if row["key_bytes"] is not None:
        return base64.b64encode(row["key_bytes"]).decode()
    key: str | None = row["key"]
    return key


def _route(row: dict[str, Any], topic_partition: str, count: int) -> int:
    key = _key(row)
    return (java_hash(key) if key is not None else zlib.crc32(topic_partition.encode())) % count


def java_hash(text: str) -> int:
    """Java's ``String.hashCode``, without its sign bit."""
    found = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for place in range(0, len(units), 2):
        found = (31 * found + int.from_bytes(units[place : place + 2], "big")) & 0xFFFFFFFF
    return found & 0x7FFFFFFF


def _milliseconds(moment: Any) -> str:
    return str(round(moment.timestamp() * 1000))
