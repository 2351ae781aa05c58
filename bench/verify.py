"""``verify`` beside only reading the topic, and beside pulsar-client, in one run on one machine.

``python -m bench.verify [--messages 10000000]``

So many messages of 100 bytes, in batches of 1,000 with LZ4, are published to four topic partitions,
and a pipeline brings them into a table. Then each path runs in a process of its own:

    verify                      the whole comparison of table and topic
    reading the topic           the same entries, decoded to the keys of their messages
    pulsar-client reader loop   one of the topic partitions, ``read_next`` until its end

Each path runs twice in its process, and the second run counts: the first one loads modules and
compiled loops. Memory is the peak resident set of the process.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bench.throughput import (
    PARTITIONS,
    SETTINGS,
    Workload,
    expect,
    in_process,
    publish,
    pulsar_reader,
)
from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.devbroker import Broker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--messages", type=int, default=10_000_000, help="default: 10000000")
    options = parser.parse_args()
    batch = 1000
    count = options.messages // (batch * PARTITIONS) * batch * PARTITIONS
    with (
        Broker(settings=SETTINGS) as address,
        tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder,
    ):
        topic = publish(address, Workload("", count, 100, batch), PARTITIONS)
        data = {
            "source": {"service_url": address.service_url, "topics": [topic]},
            "stream": {"name": "bench", "checkpoint": str(Path(folder) / "checkpoint")},
            "delta": {"path": str(Path(folder) / "messages")},
        }
        _run_pipeline(data)
        print(
            f"{count:,} "
            f"messages\n{'path':<28}{'s':>8}{'messages/s':>14}{'CPU s/M':>10}{'peak MB':>10}"
        )
        for name, path, messages in (
            ("verify", partial(_verify, data), count),
            ("reading the topic", _read_topic, count),
            ("pulsar-client reader loop", pulsar_reader, count // PARTITIONS),
        ):
            (_, second), peak_mb = in_process(path, address.service_url, topic, messages, 2)
            print(
                f"{name:<28}{second.seconds:>8.1f}{messages / second.seconds:>14,.0f}"
                f"{second.cpu_s * 1e6 / messages:>10.2f}{peak_mb:>10,.0f}",
                flush=True,
            )


def _run_pipeline(data: dict[str, Any]) -> None:
    from ledgerlake.api import run
    from ledgerlake.options.config import parse_config
    from ledgerlake.runtime.session import start_session

    spark = start_session("bench", "local[2]")
    pipeline = run(spark, parse_config(data), once=True)
    pipeline.wait()
    pipeline.close()
    spark.stop()


def _verify(data: dict[str, Any], _service_url: str, _topic: str, count: int) -> None:
    from ledgerlake.options.config import parse_config
    from ledgerlake.verify.verify import Verdict, verify

    verdict = verify(parse_config(data))
    if verdict != Verdict(messages=count):
        raise SystemExit(f"{verdict.sentence()}; the measurement is worthless")


def _read_topic(service_url: str, topic: str, count: int) -> None:
    from ledgerlake.client.topics import split_partition
    from ledgerlake.decode.messages import TopicPartition, decode_bundle
    from ledgerlake.options.source_options import parse_options
    from ledgerlake.source.bounds import resolve_end
    from ledgerlake.source.pieces import read_pieces
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.verify.table_rows import keys_of
    from ledgerlake.wire.message_id import BEFORE_ALL

    options = parse_options({"service.url": service_url, "topic": topic})
    cluster = Cluster(ClientSettings(service_url))
    keys = 0
    for name in cluster.topic_partitions(topic):
        span = EntryRange(name, BEFORE_ALL, resolve_end(cluster, name, "latest").position)
        for piece in read_pieces(options, span):
            for decoded in decode_bundle(
                piece.frames, TopicPartition(*split_partition(name)), **options.decoding
            ):
                keys += len(keys_of(decoded.messages))
    cluster.close()
    expect(keys, count)


if __name__ == "__main__":
    main()
