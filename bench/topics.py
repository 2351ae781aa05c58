"""How long a plan takes over many topics: nothing new, and something new in every one; beside
pulsar-client asking each.

With ``--peer``, the broker is the one of the tests, in a process of its own. It takes more topics
than an embedded broker can carry on a small machine, and does hardly anything itself.

python -m bench.topics [--peer] [TOPICS]
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil
import pulsar
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.entries import single
from tests.live.runtime import Runtime, start_runtime
from tests.peer import Peer

from ledgerlake.client.producer import EntryProducer
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source.stream_reader import LedgerlakeStreamReader
from ledgerlake.wire.entry import encode_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

ROUNDS = 5

# pulsar-client's readers cost file descriptors, and a process has few.
PEER_TOPICS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("topics", type=int, nargs="?", default=1000)
    parser.add_argument(
        "--peer", action="store_true", help="a broker of the tests instead of the embedded one"
    )
    options = parser.parse_args()
    names = [f"persistent://public/default/many-{number}" for number in range(options.topics)]
    if options.peer:
        with start_peer(names) as (service_url, publish):
            measure(service_url, names, publish)
        return
    with start_runtime() as runtime:
        for name in names:
            runtime.admin("PUT", name)
        idle_s = measure(runtime.service_url, names, partial(publish_to_all, runtime, names))
        peer_s = (
            ask_as_pulsar_client(runtime, names[:PEER_TOPICS])
            * len(names)
            / min(PEER_TOPICS, len(names))
        )
        print(
            f"pulsar-client's readers, asked for their last message in turn: {peer_s * 1000:.0f} ms"
        )
        print(f"ratio with nothing new: {peer_s / idle_s:.1f}")


def measure(service_url: str, names: list[str], publish: Callable[[], object]) -> float:
    """Print how long plans take, by how Spark calls the planner; return the seconds of one with
    nothing new.

    Args:
        publish: sends a message to each topic.
    """
    process = psutil.Process()
    publish()
    before_mb = process.memory_info().rss / 1e6
    options = {
        "service.url": service_url,
        "topicsPattern": "many-.*",
        "startingOffsets": "earliest",
    }
    planner = LedgerlakeStreamReader(parse_options(options))
    began_s = time.monotonic()
    offset = planner.initialOffset()
    offset = planner.latestOffset(offset, ReadAllAvailable())
    print(f"{len(names)} topics, first plan: {time.monotonic() - began_s:.2f} s", flush=True)
    idle_s = median(timed(planner, offset)[0] for _ in range(ROUNDS))
    moved = []
    for _ in range(ROUNDS):
        publish()
        took_s, offset = timed(planner, offset)
        moved.append(took_s)
    connections = [
        connection
        for connection in process.net_connections("tcp")
        if connection.status == "ESTABLISHED"
    ]
    print(
        f"plan with nothing new: {idle_s * 1000:.0f} ms, with news in every topic: "
        f"{median(moved) * 1000:.0f} ms"
    )
    print(f"connections of this process: {len(connections)}")
    print(f"memory of the planner: {process.memory_info().rss / 1e6 - before_mb:.0f} MB")
    planner.stop()
    return idle_s


def timed(planner: LedgerlakeStreamReader, offset: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """One plan, once remembered answers are old."""
    time.sleep(1.2)
    began_s = time.monotonic()
    planned = planner.latestOffset(offset, ReadAllAvailable())
    planner.partitions(offset, planned)
    return time.monotonic() - began_s, planned


@contextmanager
def start_peer(names: list[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    """A broker of the tests in another process: its address, and a function that sends a message to
    each topic.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(names, theirs), daemon=True
    )
    process.start()

    def publish() -> object:
        ours.send(None)
        return ours.recv()

    try:
        yield str(ours.recv()), publish
    finally:
        process.terminate()
        process.join()


def _serve(names: list[str], driver: Connection) -> None:
    with Peer(topics=names) as peer:
        driver.send(peer.url)
        while True:
            driver.recv()
            count = len(peer.entries)
            peer.add(single(b"x", index=count), first=count)
            driver.send(None)


def publish_to_all(runtime: Runtime, names: list[str]) -> None:
    cluster = runtime.cluster()
    for name in names:
        producer = EntryProducer(cluster, name)
        metadata = pb.MessageMetadata(
            producer_name="p", sequence_id=1, publish_time=int(time.time() * 1000)
        )
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
    main()
