"""The producers of a history: what they send, and what the oracle is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ledgerlake.decode.codecs import compress
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.entry import encode_batch, encode_entry
from tests.simulation.oracle import Sent

if TYPE_CHECKING:
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

    def _store(
        self, topic: Topic, metadata: pb.MessageMetadata, payload: bytes, count: int = 1
    ) -> Position:
        return self.brokers.append(topic, encode_entry(metadata, payload), count)

    def _confirm(self, topic: Topic, payload: bytes, *positions: Position, **more: Any) -> None:
        self.oracle.confirm(Sent(payload, topic.name, positions, self.brokers.clock_ms, **more))

    def _send_plain(self, topic: Topic) -> None:
        payload = self._payload()
        self._confirm(topic, payload, self._store(topic, self._metadata(), payload))

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
        payload, key = self._payload(), self.world.rng.choice(["a", "b", "c"])
        deliver_ms = self.brokers.clock_ms + self.world.rng.choice([1, 500, 2000, 5000, 9000])
        position = self._store(
            topic, self._metadata(deliver_at_time=deliver_ms, partition_key=key), payload
        )
        self._confirm(topic, payload, position, deliver_ms=deliver_ms, key=key)

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
        count = self.world.rng.randint(2, 4)
        payload = self._payload().ljust(8 * count, b".")
        uuid, size = f"p-{self._numbers}", -(-len(payload) // count)
        own = {"uuid": uuid, "num_chunks_from_msg": count, "total_chunk_msg_size": len(payload)}
        # As clients do: one time for all chunks of a message.
        own["publish_time"] = self._metadata().publish_time
        metadata = [self._metadata(chunk_id=number, **own) for number in range(count)]
        positions: list[Position] = []
        self._sending += 1

        def send(number: int) -> None:
            piece = payload[number * size : (number + 1) * size]
            positions.append(self._store(topic, metadata[number], piece))
            if number + 1 == count:
                self._confirm(topic, payload, *positions)
                self._sending -= 1
            else:
                pause_s = self.world.rng.choice([0.0, 0.0, 0.3, 1.5])
                self.world.at(self.world.now_s + pause_s, lambda: send(number + 1))

        send(0)

    def _send_cancel(self, topic: Topic) -> None:
        payload, key = self._payload(), self.world.rng.choice(["a", "b", "c"])
        metadata = self._metadata(
            properties=[pb.KeyValue(key="ledgerlake.cancel", value=f"key={key}")]
        )
        time_ms = self._stored_ms(metadata)
        position = self._store(topic, metadata, payload)
        self._hit(topic, position, time_ms, "cancelled", key=key)
        self._confirm(topic, payload, position)

    def _hit(
        self, topic: Topic, position: Position, time_ms: int, reason: str, **target: str
    ) -> None:
        """What waits under a key, or an id, is cancelled or replaced by a message that stands
        there.
        """
        # Messages that are due by our own clock may be released before a cancel is read, if the
        # broker's clock was set back.
        stored_ms = max(time_ms, self.brokers.clock_ms)
        own_ms = max(stored_ms + max(0, -self.brokers.skew_ms), self.oracle.latest_ms)
        for one in self.oracle.waiting_before(
            topic.name, position, time_ms - _CLOCKS_AGREE_MS, **target
        ):
            if one.repeats:
                if "schedule" in target:
                    self._end_repetition(one, time_ms, own_ms, reason)
                continue
            # A cancel that a task refuses is in rejects, and hits nothing.
            is_sure = one.deliver_ms > own_ms and not self.script.features.limits_cancels
            if one.deliver_ms > time_ms or not is_sure:
                one.is_cancelled |= is_sure
                one.may_be_cancelled.add(reason)

    def _end_repetition(self, one: Sent, time_ms: int, own_ms: int, reason: str) -> None:
        """The first message that hits one that repeats ends it."""
        later = {number for number, due_ms in one.may.items() if due_ms > own_ms}
        if not one.is_ended:
            one.is_cut = bool(later)
            for number in later:
                del one.may[number]
        one.is_ended = True
        one.must -= {
            number for number, due_ms in one.may.items() if due_ms > time_ms - _CLOCKS_AGREE_MS
        } | later
        one.may_be_cancelled.add(reason)
        self.oracle.settle(one)

    def _stored_ms(self, metadata: pb.MessageMetadata) -> int:
        return self.brokers.clock_ms if self.script.has_metadata else metadata.publish_time

    def _send_schedule(self, topic: Topic) -> None:
        payload, name = self._payload(), self.world.rng.choice(["a", "b", "c"])
        deliver_ms = self.brokers.clock_ms + self.world.rng.choice([0, 1, 500, 2000, 5000, 9000])
        metadata = self._metadata(properties=[pb.KeyValue(key="ledgerlake.schedule", value=name)])
        # Without a time it is delivered at once.
        deliver_ms = 0 if self.world.rng.random() < 0.1 else deliver_ms
        if deliver_ms:
            metadata.deliver_at_time = deliver_ms
        time_ms = self._stored_ms(metadata)
        position = self._store(topic, metadata, payload)
        self._hit(topic, position, time_ms, "replaced", schedule=name)
        self._confirm(topic, payload, position, deliver_ms=deliver_ms, schedule=name)

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

    def _send_end(self, topic: Topic) -> None:
        """The cancel of a schedule."""
        payload, name = self._payload(), self.world.rng.choice(["a", "b", "c"])
        metadata = self._metadata(
            properties=[pb.KeyValue(key="ledgerlake.cancel", value=f"schedule={name}")]
        )
        time_ms = self._stored_ms(metadata)
        position = self._store(topic, metadata, payload)
        self._hit(topic, position, time_ms, "cancelled", schedule=name)
        self._confirm(topic, payload, position)

    def _send_reminder(self, topic: Topic) -> None:
        """A delayed message that is due in a minute."""
        payload, deliver_ms = self._payload(), self.brokers.clock_ms + 60_000
        position = self._store(
            topic, self._metadata(deliver_at_time=deliver_ms, partition_key="a"), payload
        )
        self._confirm(topic, payload, position, deliver_ms=deliver_ms, key="a")
