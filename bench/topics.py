"""How long a plan takes over many topics: nothing new, and something new in every one; beside
pulsar-client asking each.

python -m bench.topics [TOPICS]
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import psutil
import pulsar
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.live.runtime import Runtime, start_runtime

from ledgerlake.client.producer import EntryProducer
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source.stream_reader import LedgerlakeStreamReader
from ledgerlake.wire.entry import encode_entry

ROUNDS = 5

# pulsar-client's readers cost file descriptors, and a process has few.
PEER_TOPICS = 100


def main(topics: int) -> None:
    with start_runtime() as runtime:
        names = [f"persistent://public/default/many-{number}" for number in range(topics)]
        for name in names:
            runtime.admin("PUT", name)
        publish_to_all(runtime, names)
        options = {"service.url": runtime.service_url, "topicsPattern": "many-.*", "startingOffsets": "earliest"}
        planner = LedgerlakeStreamReader(parse_options(options))
        began_s = time.monotonic()
        offset = planner.initialOffset()
        offset = planner.latestOffset(offset, ReadAllAvailable())
        print(f"{topics} topics, first plan: {time.monotonic() - began_s:.2f} s")
        idle = median(timed(planner, offset)[0] for _ in range(ROUNDS))
        moved = []
        for _ in range(ROUNDS):
            publish_to_all(runtime, names)
            took_s, offset = timed(planner, offset)
            moved.append(took_s)
        peer = ask_as_pulsar_client(runtime, names[:PEER_TOPICS]) * topics / min(PEER_TOPICS, topics)
        connections = [
            connection for connection in psutil.Process().net_connections("tcp") if connection.status == "ESTABLISHED"
        ]
        print(f"plan with nothing new: {idle * 1000:.0f} ms, with news in every topic: {median(moved) * 1000:.0f} ms")
        print(f"pulsar-client's readers, asked for their last message in turn: {peer * 1000:.0f} ms")
        print(f"ratio with nothing new: {peer / idle:.1f}; connections of this process: {len(connections)}")
        planner.stop()


def timed(planner: LedgerlakeStreamReader, offset: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """One plan, once remembered answers are old."""
    time.sleep(1.2)
    began_s = time.monotonic()
    planned = planner.latestOffset(offset, ReadAllAvailable())
    return time.monotonic() - began_s, planned


def publish_to_all(runtime: Runtime, names: list[str]) -> None:
    cluster = runtime.cluster()
    for name in names:
        producer = EntryProducer(cluster, name)
        metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=int(time.time() * 1000))
        producer.send(encode_entry(metadata, b"x"))
        producer.close()
    cluster.close()


def ask_as_pulsar_client(runtime: Runtime, names: list[str]) -> float:
    """Seconds until a reader of each topic knows whether there is more."""
    client = runtime.client()
    readers = [client.create_reader(name, pulsar.MessageId.latest) for name in names]
    began_s = time.monotonic()
    for reader in readers:
        reader.has_message_available()
    return time.monotonic() - began_s


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
