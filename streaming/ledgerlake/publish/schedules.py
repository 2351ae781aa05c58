"""Publishes schedules by id (``docs/schedules.md``): messages with a time or a rule. The last
message with an id counts.

A schedule goes to one topic partition always: the one that Java's string hash of the id selects, as
Pulsar's Java client routes a message with that key. So the id decides, and the message's own key
may be any other. If the topic gets more partitions, an id may go to another one, and a message that
was sent before is not replaced any more.

Other clients route by other hashes. So cancels and pauses go to all topic partitions that the topic
has when they are sent.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.missing_topics import with_similar
from ledgerlake.client.producer import EntryProducer
from ledgerlake.client.topics import full_name, join_partition
from ledgerlake.errors import CorruptEntryError, LedgerlakeError, TopicNotFoundError, UsageError
from ledgerlake.options.bounds import GIVEN_TIMES_MS
from ledgerlake.options.declared import closest
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.publish.each_partition import send_to_each
from ledgerlake.publish.effects import check_moves
from ledgerlake.publish.large_messages import LargeMessageProducer
from ledgerlake.publish.routing import java_hash
from ledgerlake.schedules.local_times import zone_names
from ledgerlake.schedules.repetition import checked_timezone, occurrences, parse_repetition
from ledgerlake.wire.chunks import MARKER_PROPERTY
from ledgerlake.wire.entry import encode_entry, parse_entry
from ledgerlake.wire.message_id import MessageId
from ledgerlake.wire.schedules import (
    CANCEL_PROPERTY,
    CATCH_UP_PROPERTY,
    COUNT_PROPERTY,
    CRON_PROPERTY,
    EVERY_PROPERTY,
    EXPIRES_PROPERTY,
    JITTER_PROPERTY,
    PAUSE_PROPERTY,
    RESUME_PROPERTY,
    ROW_PROPERTIES,
    SCHEDULE_PROPERTY,
    SENDER_PROPERTIES,
    TIMEZONE_PROPERTY,
    UNTIL_PROPERTY,
    checked_schedule_id,
    parse_schedule,
    properties_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ledgerlake.decode.messages import TopicPartition
    from ledgerlake.options.config import Config
    from ledgerlake.wire.message_id import AnyMessageId

# A topic may get more partitions.
_PARTITIONS_KEPT_S = 60

_OF_ARGUMENTS = (CANCEL_PROPERTY, *SENDER_PROPERTIES)
_RESERVED = (*_OF_ARGUMENTS, *ROW_PROPERTIES, MARKER_PROPERTY)

# Fields of a stored message that hold for that place of the topic alone: a broker would take a copy
# for a part of a transaction that never ends, or for what another cluster has sent.
_OF_ITS_PLACE = ("txnid_least_bits", "txnid_most_bits", "replicated_from", "replicate_to")


def moved(entry: bytes, at_ms: int, sequence_id: int, producer_name: str) -> bytes:
    """Return a stored entry with another delivery time. Its content stays as it was stored, also if
    it is compressed or encrypted.

    Raises:
        UsageError: it expires before it would be due, or does not repeat any more then.
    """
    parsed = parse_entry(entry)
    properties = properties_of(parsed.metadata)
    expires_ms = parse_schedule(properties).expires_ms
    if expires_ms is not None and expires_ms < at_ms:
        raise UsageError("it expires before that time; schedule it anew, with another expiry")
    _check_occurs(properties, at_ms)
    metadata = pb.MessageMetadata()
    metadata.CopyFrom(parsed.metadata)
    for name in _OF_ITS_PLACE:
        metadata.ClearField(name)
    metadata.deliver_at_time = at_ms
    metadata.producer_name, metadata.sequence_id = producer_name, sequence_id
    metadata.publish_time = int(time.time() * 1000)
    return encode_entry(metadata, bytes(parsed.payload))


def move(
    config: Config, waiting: TopicPartition, entry: bytes, due_ms: int, at_ms: int
) -> MessageId:
    """Publish an entry that waits with another delivery time, on its topic partition: it replaces
    the one that waits in the configuration's stream.

    Args:
        due_ms: when the one that waits is due.

    Raises:
        UsageError: as ``moved`` and ``check_moves``.
        BrokerError, TransportError, DeadlineError: it may or may not be stored.
    """
    check_moves(config, waiting, entry, due_ms)
    cluster = Cluster(config.source.client)
    try:
        producer = EntryProducer(cluster, join_partition(waiting.topic, waiting.partition))
        (position,) = producer.send_and_wait([moved(entry, at_ms, 0, producer.name)])
        producer.close()
    finally:
        cluster.close()
    return MessageId(position.ledger_id, position.entry_id)


class Schedules:
    """The schedules of one topic. Times are datetimes with a zone, or milliseconds since 1970.
    Threads may share it; they send one after another.

    If a method raises an error, the message may or may not be stored. Calling it again is harmless
    as long as the message waits: it takes its own place. A message that is delivered at once, or is
    due meanwhile, may be delivered twice.

    Args:
        creates_topic: let the broker create the topic if it is not there.

    Raises:
        TopicNotFoundError, BrokerError, TransportError: the broker does not know the topic, or
            cannot be reached.
    """

    def __init__(
        self, settings: ClientSettings | str, topic: str, *, creates_topic: bool = False
    ) -> None:
        self._cluster = Cluster(ClientSettings(settings) if isinstance(settings, str) else settings)
        self._producers: dict[str, LargeMessageProducer] = {}
        self._lock = threading.Lock()
        self._topic = full_name(topic)
        self._creates_topic = creates_topic
        self._partitions: list[str] = []
        self._looked_up_s = -math.inf
        try:
            self._look_up()
        except LedgerlakeError as error:
            if isinstance(error, TopicNotFoundError):
                error = with_similar(error, self._cluster, [self._topic])
            self._cluster.close()
            raise error from None

    def put(
        self,
        schedule_id: str,
        value: bytes,
        *,
        at: datetime | int | None = None,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        expires: datetime | int | None = None,
        cron: str | None = None,
        every: str | timedelta | None = None,
        timezone: str | None = None,
        until: datetime | int | None = None,
        count: int | None = None,
        jitter: str | timedelta | None = None,
        catch_up: str | None = None,
    ) -> AnyMessageId:
        """Schedule a message, in place of the one that waits under the id.

        Args:
            at: when it is to be delivered; at once by default. If it repeats, its rule counts from
                this time; by default, and if it is past, from when the broker stores the message.
            expires: if it is released later than this, it is not delivered.
            cron, every: it repeats, by a cron expression, or by a duration or an ISO-8601 repeating
                interval. A timedelta is elapsed time: ``timedelta(days=1)`` is 24 hours also if
                clocks change. The text ``"P1D"`` keeps the local time.
            timezone, until, count, jitter, catch_up: see ``docs/schedules.md``.

        Raises:
            UsageError: the id, a time or a property cannot be used; or the message repeats, and is
                too large for one entry. Nothing was sent.
            BrokerError, TransportError, DeadlineError: see the class.
        """
        taken = [name for name in _RESERVED if name in (properties or {})]
        if taken:
            how = "an argument of its own sets" if taken[0] in _OF_ARGUMENTS else "Ledgerlake sets"
            raise UsageError(f"{how} the property {taken[0]}; leave it out")
        own = {SCHEDULE_PROPERTY: _checked(schedule_id)}
        expires_ms = None if expires is None else _time_ms(expires, "expires")
        if expires_ms is not None:
            own[EXPIRES_PROPERTY] = str(expires_ms)
        own |= repetition_properties(
            cron=cron,
            every=every,
            timezone=timezone,
            until=until,
            count=count,
            jitter=jitter,
            catch_up=catch_up,
        )
        try:
            repeats = parse_repetition(own) is not None
        except CorruptEntryError as error:
            raise UsageError(error.message) from None
        at = int(time.time() * 1000) if at is None and repeats else at
        deliver_at_ms = None if at is None else _time_ms(at, "at")
        if deliver_at_ms is not None:
            _check_occurs(own, deliver_at_ms)
        if deliver_at_ms is not None and expires_ms is not None and expires_ms < deliver_at_ms:
            raise UsageError("the message would never be delivered: it expires before it is due")
        return self._send(
            self.partition_of(schedule_id), value, {**(properties or {}), **own}, key, deliver_at_ms
        )

    def cancel(self, schedule_id: str) -> list[AnyMessageId]:
        """Cancel the message that waits under an id; return one message id for each topic
        partition.

        Raises:
            As ``put``; the error names the topic partitions that did not store it, and the others
            did.
        """
        return self._tell(CANCEL_PROPERTY, f"schedule={_checked(schedule_id)}")

    def pause(
        self, schedule_id: str | None = None, *, all_schedules: bool = False
    ) -> list[AnyMessageId]:
        """Hold back the repetitions of a schedule, or of all schedules of the topic; return one
        message id for each topic partition.

        Raises:
            UsageError: neither an id nor ``all_schedules``, or both.
            BrokerError, TransportError, DeadlineError: as ``cancel``.
        """
        return self._tell_one_or_all(PAUSE_PROPERTY, schedule_id, all_schedules)

    def resume(
        self, schedule_id: str | None = None, *, all_schedules: bool = False
    ) -> list[AnyMessageId]:
        """End a pause.

        Raises:
            As ``pause``.
        """
        return self._tell_one_or_all(RESUME_PROPERTY, schedule_id, all_schedules)

    def partition_of(self, schedule_id: str) -> str:
        """Return the topic partition to which ``put`` sends an id.

        Raises:
            BrokerError, TransportError: the partitions of the topic are looked up now and then.
        """
        partitions = self._look_up()
        return partitions[java_hash(schedule_id) % len(partitions)]

    def close(self) -> None:
        with self._lock:
            producers, self._producers = self._producers, {}
            try:
                for producer in producers.values():
                    producer.close()
            finally:
                self._cluster.close()

    def __enter__(self) -> Schedules:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell_one_or_all(
        self, name: str, schedule_id: str | None, all_schedules: bool
    ) -> list[AnyMessageId]:
        if (schedule_id is None) != all_schedules:
            raise UsageError("give the id of a schedule, or all_schedules=True, and not both")
        return self._tell(
            name, "all" if schedule_id is None else f"schedule={_checked(schedule_id)}"
        )

    def _tell(self, name: str, target: str) -> list[AnyMessageId]:
        # Schedules may be on a partition that has just been added.
        partitions = self._look_up(anew=True)
        # A message without a value fits every schema.
        return send_to_each(
            partitions, lambda topic_partition: self._send(topic_partition, None, {name: target})
        )

    def _look_up(self, *, anew: bool = False) -> list[str]:
        """Return the partitions of the topic; if not ``anew``, as they are or were a while ago."""
        with self._lock:
            if anew or time.monotonic() - self._looked_up_s > _PARTITIONS_KEPT_S:
                self._partitions = self._cluster.topic_partitions(
                    self._topic, creates=self._creates_topic
                )
                self._looked_up_s = time.monotonic()
            return self._partitions

    def _send(
        self,
        name: str,
        value: bytes | None,
        properties: Mapping[str, str],
        key: str | None = None,
        deliver_at_ms: int | None = None,
    ) -> AnyMessageId:
        with self._lock:
            if name in self._producers and not self._producers[name].is_open:
                self._producers.pop(name).abandon()
            if name not in self._producers:
                self._producers[name] = LargeMessageProducer(self._cluster, name)
            try:
                return self._producers[name].send(
                    value, key=key, properties=properties, deliver_at_ms=deliver_at_ms
                )
            except UsageError:
                raise
            except LedgerlakeError:
                # The next call opens another producer: this one may have lost its connection.
                self._producers.pop(name).abandon()
                raise


def _checked(schedule_id: str) -> str:
    try:
        return checked_schedule_id(schedule_id)
    except CorruptEntryError as error:
        raise UsageError(error.message) from None


def repetition_properties(
    *,
    cron: str | None = None,
    every: str | timedelta | None = None,
    timezone: str | None = None,
    until: datetime | int | None = None,
    count: int | None = None,
    jitter: str | timedelta | None = None,
    catch_up: str | None = None,
) -> dict[str, str]:
    """Return the properties of a rule; none if the message does not repeat.

    Raises:
        UsageError: a time or the zone cannot be used.
    """
    if timezone is not None:
        _check_timezone(timezone)
    texts = {
        CRON_PROPERTY: cron,
        EVERY_PROPERTY: _span(every),
        TIMEZONE_PROPERTY: timezone,
        UNTIL_PROPERTY: None if until is None else str(_time_ms(until, "until")),
        COUNT_PROPERTY: None if count is None else str(count),
        JITTER_PROPERTY: _span(jitter),
        CATCH_UP_PROPERTY: catch_up,
    }
    return {name: text for name, text in texts.items() if text is not None}


@dataclass(frozen=True)
class FirstDue:
    """When a message is due for the first time: ``most_later_ms`` after ``time_ms`` at most."""

    time_ms: int
    most_later_ms: int = 0


def first_due(properties: Mapping[str, object], deliver_at_ms: int) -> FirstDue | None:
    """Return when a message with an id that is stored now is due for the first time; None if its
    rule has no occurrence any more.
    """
    rule = parse_repetition(properties)
    if rule is None:
        return FirstDue(deliver_at_ms)
    # A rule counts from when the broker stores the message, if that is later than its start.
    now_ms = int(time.time() * 1000)
    start_ms = max(deliver_at_ms, now_ms)
    first = next(occurrences(rule, str(properties[SCHEDULE_PROPERTY]), start_ms), None)
    if first is None:
        return None
    if start_ms == now_ms and rule.every is not None and rule.every.start_ms is None:
        # The jitter is a hash of the very millisecond at which the broker stores the message.
        return FirstDue(first.nominal_ms, rule.jitter_ms)
    return FirstDue(first.due_ms)


def _check_occurs(properties: Mapping[str, object], start_ms: int) -> None:
    if first_due(properties, start_ms) is None:
        raise UsageError(
            "its rule has no occurrence from its start on, so it would never be delivered"
        )


def _span(span: str | timedelta | None) -> str | None:
    """Return a duration as ISO-8601 text. A timedelta does not say whether it is a day or 24 hours,
    so it is elapsed time.
    """
    return f"PT{span.total_seconds():.3f}S" if isinstance(span, timedelta) else span


def _check_timezone(name: str) -> None:
    try:
        checked_timezone(name)
    except CorruptEntryError as error:
        raise UsageError(error.message + closest(str(name), sorted(zone_names()))) from None


def _time_ms(moment: datetime | int, name: str) -> int:
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise UsageError(f"{name} has no zone; pass for example datetime.now(timezone.utc)")
        moment = round(moment.timestamp() * 1000)
    if not isinstance(moment, int) or moment not in GIVEN_TIMES_MS:
        raise UsageError(
            f"{name} must be a datetime, or whole milliseconds since 1970 from {GIVEN_TIMES_MS[0]} "
            f"(the year 2000) to {GIVEN_TIMES_MS[-1]}, not {moment!r}"
        )
    return moment
