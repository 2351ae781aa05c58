"""The producers of a history: what they send, and what the oracle is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ledgerlake.decode.codecs import compress
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.chunks import encode_marker, promise
from ledgerlake.wire.entry import encode_batch, encode_entry
from tests.simulation.oracle import Pause, Sent

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.wire.message_id import Position
    from tests.simulation.broker import Cluster, Topic
    from tests.simulation.history import Script
    from tests.simulation.oracle import Oracle
    from tests.simulation.world import World

# How far the clocks of producers and the broker's may differ.
_CLOCKS_AGREE_MS = 3000


class Producers:
    """See the module. A kind of message has a method ``_send_KIND``."""

    script: Script
    world: World
    brokers: Cluster
    oracle: Oracle

    def __init__(self) -> None:
        self._numbers = 0
        # Large messages that are not whole yet.
        self._sending = 0

    def _payload(self) -> bytes:
        self._numbers += 1
        return b"message %d" % self._numbers

    def _metadata(self, **fields: Any) -> pb.MessageMetadata:
        publish_ms = self.brokers.clock_ms - self.world.rng.choice([0, 0, 3, 250])
        own: dict[str, Any] = {
            "producer_name": "p",
            "sequence_id": self._numbers,
            "publish_time": publish_ms,
        }
        return pb.MessageMetadata(**own | fields)

    def _key(self) -> dict[str, str]:
        """A key, if a table has the latest message of each."""
        if not self.script.features.has_latest:
            return {}
        return {"partition_key": self.world.rng.choice(["a", "b", "c", "d"])}

    def _store(
        self, topic: Topic, metadata: pb.MessageMetadata, payload: bytes, count: int = 1
    ) -> Position:
        return self.brokers.append(topic, encode_entry(metadata, payload), count)

    def _confirm(self, topic: Topic, payload: bytes, *positions: Position, **more: Any) -> None:
        self.oracle.confirm(Sent(payload, topic.name, positions, self.brokers.clock_ms, **more))

    def _send_plain(self, topic: Topic) -> None:
        payload = self._payload()
        self._confirm(topic, payload, self._store(topic, self._metadata(**self._key()), payload))

    def _send_batch(self, topic: Topic) -> None:
        payloads = [self._payload() for _ in range(self.world.rng.randint(1, 4))]
        plain = encode_batch(
            [(pb.SingleMessageMetadata(payload_size=0), payload) for payload in payloads]
        )
        codec = self.world.rng.choice([pb.NONE, pb.LZ4, pb.ZSTD])
        metadata = self._metadata(
            compression=codec, uncompressed_size=len(plain), num_messages_in_batch=len(payloads)
        )
        position = self._store(topic, metadata, compress(codec, plain), len(payloads))
        for payload in payloads:
            self._confirm(topic, payload, position)

    def _send_delayed(self, topic: Topic) -> None:
        key = self.world.rng.choice(["a", "b", "c"])
        self._send_due_in(topic, self.world.rng.choice([1, 500, 2000, 5000, 9000]), key)

    def _send_encrypted(self, topic: Topic) -> None:
        payload, deliver_ms = (
            self._payload(),
            self.brokers.clock_ms + self.world.rng.choice([1, 500, 2000]),
        )
        metadata = self._metadata(
            deliver_at_time=deliver_ms, encryption_keys=[pb.EncryptionKeys(key="k", value=b"v")]
        )
        position = self._store(topic, metadata, payload)
        self._confirm(topic, payload, position, deliver_ms=deliver_ms, is_encrypted=True)

    def _send_chunked(self, topic: Topic) -> None:
        self._send_pieces(topic, [0.0, 0.0, 0.3, 1.5])

    def _send_marked(self, topic: Topic) -> None:
        """A delayed large message that is complete with its last chunk; or, as its last two chunks
        have changed places, with its marker.
        """
        rng = self.world.rng
        count, size, has_marker = rng.randint(3, 4), 8, rng.random() < 0.7
        payload = self._payload().ljust(count * size, b".")
        target = {rng.choice(["key", "schedule"]): rng.choice(["a", "b", "c"])}
        own = self._metadata(
            uuid=f"p-{self._numbers}",
            deliver_at_time=self.brokers.clock_ms + rng.choice([2000, 9000, 15_000]),
            partition_key=target.get("key"),
        )
        if "schedule" in target:
            own.properties.add(key="ledgerlake.schedule", value=target["schedule"])
        order = list(range(count))
        if has_marker:
            own.properties.append(promise())
            order[-2:] = reversed(order[-2:])
        may_expire = self.script.features.has_lost_chunks
        one = Sent(
            payload, topic.name, (), self.brokers.clock_ms, own.deliver_at_time,
            may_expire=may_expire, is_sending=True, **target,  # type: ignore[arg-type]
        )  # fmt: skip
        self.oracle.confirm(one)
        self._sending += 1

        def send(place: int) -> None:
            if place < count:
                number = order[place]
                metadata = pb.MessageMetadata(
                    chunk_id=number, num_chunks_from_msg=count, total_chunk_msg_size=len(payload)
                )
                metadata.MergeFrom(own)
                piece = payload[number * size : (number + 1) * size]
                position = self._store(topic, metadata, piece)
                self.oracle.add_chunk(one, position, is_last=False)
            else:
                places = dict(zip(order, one.positions, strict=True))
                one.positions = tuple(places[number] for number in range(count))
                marker = encode_marker(own, self._numbers, list(one.positions))
                position = self.brokers.append(topic, marker, 1)
            if place == count - (not has_marker):
                one.stands_at, one.is_sending = position, False
                self._sending -= 1
                if "schedule" in target:
                    self._hit(topic, position, self._stored_ms(own), "replaced", **target)
            else:
                self.world.at(
                    self.world.now_s + rng.choice([0.0, 0.0, 0.3, 1.5]), lambda: send(place + 1)
                )

        send(0)

    def _send_slow(self, topic: Topic) -> None:
        """A large message whose chunks may come too late."""
        self._send_pieces(topic, [0.0, 2.0, 4.0, 7.0])

    def _send_pieces(
        self, topic: Topic, pauses_s: list[float], order: Callable[[int], list[int]] | None = None
    ) -> None:
        """Send the chunks of a large message.

        Args:
            order: from the count of chunks, which of them are sent; by default each once. The
                message is whole if the last ones are all of them, each in its place or again
                behind it.
        """
        count = self.world.rng.randint(2, 4)
        payload = self._payload().ljust(8 * count, b".")
        uuid, size = f"p-{self._numbers}", -(-len(payload) // count)
        own = {"uuid": uuid, "num_chunks_from_msg": count, "total_chunk_msg_size": len(payload)}
        # As clients do: one time for all chunks of a message.
        own["publish_time"] = self._metadata().publish_time
        metadata = [self._metadata(chunk_id=number, **own) for number in range(count)]
        may_expire = self.script.features.has_lost_chunks
        one = Sent(
            payload, topic.name, (), self.brokers.clock_ms, may_expire=may_expire, is_sending=True
        )
        numbers = list(range(count)) if order is None else order(count)
        whole = _whole(numbers, count)
        self._sending += 1

        def send(place: int) -> None:
            number = numbers[place]
            piece = payload[number * size : (number + 1) * size]
            position = self._store(topic, metadata[number], piece)
            if place in whole:
                if place == whole[0]:
                    self.oracle.confirm(one)
                self.oracle.add_chunk(one, position, place == whole[-1])
            else:
                stray = b"%d of %s" % (place, uuid.encode())
                self._confirm(topic, stray, position, must_be_rejected=True)
            if place + 1 == len(numbers):
                self._sending -= 1
            else:
                pause_s = self.world.rng.choice(pauses_s)
                self.world.at(self.world.now_s + pause_s, lambda: send(place + 1))

        send(0)

    def _send_lost(self, topic: Topic) -> None:
        """Chunks of a producer that ends within a large message, or begins it again, or sends a
        chunk twice or not at all.
        """
        rng = self.world.rng

        def order(count: int) -> list[int]:
            way = rng.choice(["ends", "begins again", "twice", "not at all"])
            every = list(range(count))
            if way == "ends":
                return every[: rng.randint(1, count - 1)]
            if way == "begins again":
                return every[: rng.randint(1, count - 1)] + every
            place = rng.randrange(1, count)
            if way == "twice":
                return every[:place] + every[place - 1 :]
            return [0, *every[place + 1 :]]

        self._send_pieces(topic, [0.0, 0.0, 0.3, 1.5], order)

    def _send_cancel(self, topic: Topic) -> None:
        self._cancel(topic, "key")

    def _send_end(self, topic: Topic) -> None:
        self._cancel(topic, "schedule")

    def _cancel(self, topic: Topic, by: str) -> None:
        """Cancel what waits under a key, or under the id of a schedule."""
        payload, target = self._payload(), self.world.rng.choice(["a", "b", "c"])
        metadata = self._metadata(
            properties=[pb.KeyValue(key="ledgerlake.cancel", value=f"{by}={target}")]
        )
        time_ms = self._stored_ms(metadata)
        position = self._store(topic, metadata, payload)
        self._hit(topic, position, time_ms, "cancelled", **{by: target})
        self._confirm(topic, payload, position)

    def _hit(
        self, topic: Topic, position: Position, time_ms: int, reason: str, **target: str
    ) -> None:
        """What waits under a key, or an id, is cancelled or replaced by a message that stands
        there.
        """
        least_ms, own_ms = self._between(time_ms)
        for one in self.oracle.waiting_before(topic.name, position, least_ms, **target):
            if one.repeats:
                if "schedule" in target:
                    self._end_repetition(one, time_ms, own_ms, reason)
                continue
            # A cancel that a task refuses is in rejects, and hits nothing.
            is_sure = one.deliver_ms > own_ms and not (
                self.script.features.limits_cancels or self.oracle.may_come_at_once
            )
            if one.deliver_ms > time_ms or not is_sure:
                one.is_cancelled |= is_sure
                one.may_be_cancelled.add(reason)

    def _between(self, time_ms: int) -> tuple[int, int]:
        """The times between which a message of a time has its effect."""
        # Messages that are due by our own clock may be released before a cancel is read, if the
        # broker's clock was set back.
        stored_ms = max(time_ms, self.brokers.clock_ms)
        own_ms = max(stored_ms + max(0, -self.brokers.skew_ms), self.oracle.latest_ms)
        return time_ms - _CLOCKS_AGREE_MS, own_ms

    def _end_repetition(self, one: Sent, time_ms: int, own_ms: int, reason: str) -> None:
        """The first message that hits one that repeats ends it."""
        later = {number for number, due_ms in one.may.items() if due_ms > own_ms}
        if not one.is_ended and not self.oracle.may_come_at_once:
            one.is_cut = bool(later)
            for number in later:
                del one.may[number]
        one.is_ended = True
        one.must -= later | {
            number for number, due_ms in one.may.items() if due_ms > time_ms - _CLOCKS_AGREE_MS
        }
        one.may_be_cancelled.add(reason)
        self.oracle.settle(one)

    def _stored_ms(self, metadata: pb.MessageMetadata) -> int:
        return self.brokers.clock_ms if self.script.has_metadata else metadata.publish_time

    def _send_schedule(self, topic: Topic) -> None:
        payload, name = self._payload(), self.world.rng.choice(["a", "b", "c"])
        deliver_ms = self.brokers.clock_ms + self.world.rng.choice([0, 1, 500, 2000, 5000, 9000])
        key = self._key()
        metadata = self._metadata(
            properties=[pb.KeyValue(key="ledgerlake.schedule", value=name)], **key
        )
        # Without a time it is delivered at once.
        deliver_ms = 0 if self.world.rng.random() < 0.1 else deliver_ms
        if deliver_ms:
            metadata.deliver_at_time = deliver_ms
        time_ms = self._stored_ms(metadata)
        position = self._store(topic, metadata, payload)
        self._hit(topic, position, time_ms, "replaced", schedule=name)
        self._confirm(
            topic,
            payload,
            position,
            deliver_ms=deliver_ms,
            schedule=name,
            key=key.get("partition_key"),
        )

    def _send_repeating(self, topic: Topic) -> None:
        payload, name = self._payload(), self.world.rng.choice(["a", "b", "c"])
        deliver_ms = self.brokers.clock_ms + self.world.rng.choice([1000, 2000, 5000])
        seconds, count = self.world.rng.randint(1, 3), self.world.rng.randint(1, 5)
        properties = {"schedule": name, "every": f"PT{seconds}S", "count": str(count)}
        metadata = self._metadata(
            deliver_at_time=deliver_ms,
            properties=[
                pb.KeyValue(key=f"ledgerlake.{key}", value=value)
                for key, value in properties.items()
            ],
            **self._key(),
        )
        time_ms = self._stored_ms(metadata)
        position = self._store(topic, metadata, payload)
        self._hit(topic, position, time_ms, "replaced", schedule=name)
        may = {number + 1: deliver_ms + number * seconds * 1000 for number in range(count)}
        self._confirm(
            topic,
            payload,
            position,
            deliver_ms=deliver_ms,
            schedule=name,
            repeats=True,
            must=set(may),
            may=may,
        )

    def _send_reminder(self, topic: Topic) -> None:
        self._send_due_in(topic, 60_000, "a")

    def _send_due_in(self, topic: Topic, delay_ms: int, key: str | None = None) -> None:
        """A delayed message, with a key or without."""
        payload, deliver_ms = self._payload(), self.brokers.clock_ms + delay_ms
        metadata = self._metadata(deliver_at_time=deliver_ms, partition_key=key)
        position = self._store(topic, metadata, payload)
        self._confirm(topic, payload, position, deliver_ms=deliver_ms, key=key)

    def _send_pause(self, topic: Topic) -> None:
        self._change_pause(topic, "pause")

    def _send_resume(self, topic: Topic) -> None:
        self._change_pause(topic, "resume")

    def _change_pause(self, topic: Topic, word: str) -> None:
        """Pause what repeats, all or under an id, or end the pause."""
        payload, name = self._payload(), self.world.rng.choice(["a", "b", "c", None, None])
        value = "all" if name is None else f"schedule={name}"
        metadata = self._metadata(properties=[pb.KeyValue(key=f"ledgerlake.{word}", value=value)])
        time_ms = self._stored_ms(metadata)
        between_ms = self._between(time_ms)
        position = self._store(topic, metadata, payload)
        pauses = self._pauses(topic, position, name)
        is_open = bool(pauses) and pauses[-1].is_open
        if word == "resume":
            if is_open:
                pauses[-1].ends_ms = between_ms
        elif is_open:
            began_ms = pauses[-1].begins_ms
            pauses[-1].begins_ms = tuple(map(min, began_ms, between_ms))  # type: ignore[assignment]
        else:
            pauses.append(Pause(between_ms))
        for one in self.oracle.sent.values():
            if one.topic == topic.name and one.repeats:
                self.oracle.settle(one)
        self._confirm(topic, payload, position)

    def _pauses(self, topic: Topic, position: Position, name: str | None) -> list[Pause]:
        """The pauses that a message changes: of all, or of the last one with an id before it."""
        if name is None:
            return self.oracle.pauses.setdefault(topic.name, [])
        found = [
            one
            for one in self.oracle.sent.values()
            if one.topic == topic.name and one.schedule == name and one.stands_before(position)
        ]
        return (
            max(found, key=lambda one: one.stands_at or one.positions[-1]).pauses if found else []
        )


def _whole(numbers: list[int], count: int) -> list[int]:
    """Which of the chunks that are sent make the message: the first of each number, from the last
    beginning on; none if one is missing.
    """
    start = max(place for place, number in enumerate(numbers) if number == 0)
    places = [
        start + numbers[start:].index(number)
        for number in range(count)
        if number in numbers[start:]
    ]
    return places if len(places) == count else []
