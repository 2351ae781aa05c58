"""Restarts and unloads of the broker, and idle connections."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from ledgerlake.client.producer import EntryProducer
from ledgerlake.client.reader import EntryReader
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source.read_until import next_until
from ledgerlake.source.topic_end import last_position
from ledgerlake.wire.entry import encode_entry, parse_entry
from ledgerlake.wire.message_id import BEFORE_ALL
from tests.live.runtime import start_runtime

if TYPE_CHECKING:
    from tests.live.runtime import Runtime

pytestmark = pytest.mark.live


def publish(runtime: Runtime, topic: str, numbers: range) -> None:
    producer = EntryProducer(runtime.cluster(), topic)
    for number in numbers:
        metadata = pb.MessageMetadata(
            producer_name=producer.name, sequence_id=number, publish_time=int(time.time() * 1000)
        )
        producer.send(encode_entry(metadata, b"%d" % number))
    producer.close()


def payload(entry: bytes) -> int:
    return int(bytes(parse_entry(entry).payload))


def test_a_reader_resumes_exactly_after_an_unload(runtime: Runtime) -> None:
    topic = runtime.topic()
    publish(runtime, topic, range(500))
    reader = EntryReader(runtime.cluster(), topic, BEFORE_ALL, window=20)
    last = last_position(reader)
    assert last is not None
    payloads = []
    while (entry := next_until(reader, last)) is not None:
        payloads.append(payload(bytes(entry.entry)))
        if len(payloads) in (50, 200, 201):
            runtime.admin("PUT", topic, "/unload")
    assert payloads == list(range(500))


@pytest.mark.long
def test_a_reader_resumes_exactly_after_a_broker_restart() -> None:
    with start_runtime(broker_metadata=True) as restarting:
        topic = restarting.topic()
        publish(restarting, topic, range(300))
        reader = EntryReader(restarting.cluster(), topic, BEFORE_ALL, window=20)
        last = last_position(reader)
        assert last is not None
        assert restarting.broker is not None
        payloads = []
        while (entry := next_until(reader, last)) is not None:
            payloads.append(payload(bytes(entry.entry)))
            if len(payloads) == 100:
                restarting.broker.kill()
                threading.Thread(target=restarting.broker.start).start()
        assert payloads == list(range(300))


def test_a_cursor_is_kept_alive_on_an_idle_connection(runtime: Runtime) -> None:
    """A broker that is asked for the same subscription probes the old holder, and evicts one that
    does not answer.
    """
    from ledgerlake.client.cursor import DurableCursor
    from ledgerlake.errors import ConsumerBusyError

    topic = runtime.topic()
    holder = DurableCursor(runtime.cluster(), topic, "held")
    holder.ensure(from_earliest=True)
    with pytest.raises(ConsumerBusyError):
        DurableCursor(runtime.cluster(give_up_after_s=3), topic, "held").ensure(from_earliest=True)
