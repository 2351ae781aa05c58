"""Runs of entries from a real broker are what single frames would have been."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pulsar
import pytest

from ledgerlake.client.reader import EntryReader
from ledgerlake.decode.scan import scan
from ledgerlake.source.bounds import resolve_end
from ledgerlake.source.read_until import next_together_until, next_until
from ledgerlake.wire.connection import EntriesReceived
from ledgerlake.wire.message_id import BEFORE_ALL

if TYPE_CHECKING:
    from ledgerlake.wire.connection import EntryReceived
    from tests.live.runtime import Runtime

pytestmark = pytest.mark.live


def publish(runtime: Runtime, topic: str) -> None:
    """Entries of every kind that the client makes."""
    kinds: list[dict[str, Any]] = [
        {},
        {"batching_enabled": True, "compression_type": pulsar.CompressionType.ZSTD},
        {"chunking_enabled": True},
    ]
    for kind in kinds:
        producer = runtime.client().create_producer(topic, **kind)
        for number in range(300):
            value = b"x" * (6_000_000 if kind.get("chunking_enabled") and number == 7 else number)
            producer.send_async(
                value, lambda *_: None, partition_key=str(number), properties={"n": str(number)}
            )
        producer.flush()
        producer.close()


def test_a_topic_read_in_runs_is_the_topic_read_entry_by_entry(runtime: Runtime) -> None:
    topic = runtime.topic()
    publish(runtime, topic)
    cluster = runtime.cluster()
    end = resolve_end(cluster, topic, "latest").position
    plain = EntryReader(cluster, topic, BEFORE_ALL)
    singles: list[EntryReceived] = []
    while (entry_received := next_until(plain, end)) is not None:
        singles.append(entry_received)
    plain.close()
    reader = EntryReader(cluster, topic, BEFORE_ALL, scan=scan)
    together: list[EntryReceived] = []
    longest = 0
    while (received := next_together_until(reader, end)) is not None:
        longest = max(
            longest, len(received.entry_ids) if isinstance(received, EntriesReceived) else 1
        )
        together += received.each()
    cluster.close()
    assert [(entry.position, bytes(entry.entry)) for entry in together] == [
        (single.position, bytes(single.entry)) for single in singles
    ]
    assert len(singles) > 600
    assert longest > 10
