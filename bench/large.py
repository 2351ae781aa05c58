"""Large messages in MB/s beside pulsar-client's receive loop, with peak memory; and what the stateful stage costs without any.

    pulsar-client receive loop   ``receive`` and ``acknowledge`` until all messages came, chunks put together in its heap
    pipeline to Delta            the whole pipeline into the table

Both read the same messages, uncompressed and incompressible, of 5 to 100 MiB, from one topic partition of a real broker on
the same machine. Memory is the peak resident set of the process that did the work (for the pipeline, of the largest Python
worker), and what that is above the same process without large messages, in multiples of the largest message.

The last table is the pipeline over small messages with the stateful stage and with it taken out, rounds in turn, so that a
machine's moods hit both.

Every round publishes between two triggers of a running query, and counts the trigger that takes it, from its beginning to
its end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pyarrow as pa

from bench.throughput import PARTITIONS, SETTINGS, WorkerMemory, Workload, encode, expect, in_process
from ledgerlake.broker import Broker
from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.producer import EntryProducer
from ledgerlake.demo import create_partitioned_topic
from ledgerlake.operators.rows import FLOW_DDL, Standing, report_from_json, standing_to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress

    from ledgerlake.broker.standalone import BrokerAddress
    from ledgerlake.sinks.delta import BatchResult

MIB = 1024 * 1024
SIZES_MIB = [5] * 20 + [10] * 10 + [20] * 5 + [50] * 2 + [100] * 2
LATEST = Path(__file__).parent / "latest-large.json"
_WARM_UP_ROUNDS = 2
_TICK_S = 10
_DISTINCT_ENTRIES = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are counted (default: 5)")
    parser.add_argument("--messages", type=int, default=4_000_000, help="small messages in a round (default: 4000000)")
    parser.add_argument("--only", choices=["large", "stage"], help="one of the two parts")
    options = parser.parse_args()
    from ledgerlake.query.session import start_session

    with Broker(settings=SETTINGS) as address:
        results = {}
        if options.only != "stage":
            results["client"] = _client_loop(address, options.rounds)
        spark = start_session("bench", "local[2]")
        try:
            if options.only != "stage":
                results["pipeline"] = _pipeline(spark, address, options.rounds, results["client"]["mb_per_s"])
            if options.only != "large":
                results["stage"] = _stage_cost(spark, address, options.messages, options.rounds)
        finally:
            spark.stop()
    LATEST.write_text(json.dumps(results, indent=2) + "\n")


class _Ticking:
    """A running pipeline into a table of its own, whose triggers come at fixed seconds."""

    def __init__(self, spark: SparkSession, service_url: str, topic: str, folder: Path) -> None:
        from ledgerlake.query import run
        from ledgerlake.query.config import parse_config

        own = Path(tempfile.mkdtemp(dir=folder))
        config = parse_config(
            {
                "source": {"service_url": service_url, "topics": [topic]},
                "stream": {"name": own.name, "checkpoint": str(own / "checkpoint"), "trigger": f"{_TICK_S} seconds"},
                "delta": {"path": str(own / "messages")},
            }
        )
        self._taken: list[BatchResult] = []
        self._pipeline = run(spark, config, on_batch=self._taken.append)

    def round(self, publish: Callable[[], None], count: int) -> float:
        """Seconds of the one trigger that took what ``publish`` published."""
        before = len(self._taken)
        time.sleep(_TICK_S - time.time() % _TICK_S + 0.5)
        tick = time.time() // _TICK_S
        publish()
        if time.time() // _TICK_S != tick:
            raise SystemExit("publishing took longer than the time between two triggers; raise it")
        while not (found := [one for one in self._taken[before:] if one.messages]):
            self._pipeline.wait(0.1)
        (result,) = found
        expect(result.messages, count)
        return self._trigger_seconds(result.batch_id)

    def _trigger_seconds(self, batch_id: int) -> float:
        """Of a batch that is done; its progress comes a little later, and idle triggers report under a number too."""
        while not (
            found := [one for one in self._progress() if one.batchId == batch_id and "addBatch" in one.durationMs]
        ):
            time.sleep(0.1)
        return float(found[0].durationMs["triggerExecution"]) / 1000

    def _progress(self) -> list[StreamingQueryProgress]:
        assert self._pipeline.query is not None
        return self._pipeline.query.recentProgress

    def stop(self) -> None:
        self._pipeline.stop()
        self._pipeline.close()


class _LargePublisher:
    """Publishes the same large messages again and again."""

    def __init__(self, address: BrokerAddress, name: str) -> None:
        import pulsar

        path = f"public/default/{name}"
        create_partitioned_topic(address.admin_url, path, 1)
        self.topic = f"persistent://{path}"
        self._client = pulsar.Client(address.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
        self._producer = self._client.create_producer(
            f"{self.topic}-partition-0", chunking_enabled=True, batching_enabled=False, send_timeout_millis=120_000
        )

    def __call__(self) -> None:
        for size in SIZES_MIB:
            self._producer.send(os.urandom(size * MIB))

    def one_small(self) -> None:
        self._producer.send(b"x")

    def close(self) -> None:
        self._client.close()


def _client_loop(address: BrokerAddress, rounds: int) -> dict[str, float]:
    print(f"\n{len(SIZES_MIB)} messages of {min(SIZES_MIB)} to {max(SIZES_MIB)} MiB, {sum(SIZES_MIB)} MiB in all")
    print(f"{'path':<32}{'MB/s':>8}{'ratio':>8}{'peak MB':>10}{'x largest':>11}{'above base':>12}")
    publisher = _LargePublisher(address, "bench-large-client")
    publisher()
    publisher.close()
    _, base_mb = in_process(_receive_all, address.service_url, publisher.topic, 0, 1)
    made, peak_mb = in_process(
        _receive_all, address.service_url, publisher.topic, len(SIZES_MIB), rounds + _WARM_UP_ROUNDS
    )
    seconds = [one.seconds for one in made[_WARM_UP_ROUNDS:]]
    return _row("pulsar-client receive loop", seconds, peak_mb, base_mb, None)


def _receive_all(service_url: str, topic: str, count: int) -> None:
    import uuid

    import pulsar

    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    consumer = client.subscribe(
        f"{topic}-partition-0",
        uuid.uuid4().hex,
        initial_position=pulsar.InitialPosition.Earliest,
        receiver_queue_size=10,
    )
    taken = 0
    for _ in range(count):
        message = consumer.receive()
        taken += len(message.data())
        consumer.acknowledge(message)
    consumer.unsubscribe()
    client.close()
    if count and taken != sum(SIZES_MIB) * MIB:
        raise SystemExit(f"{taken} bytes arrived; the measurement is worthless")


def _pipeline(spark: SparkSession, address: BrokerAddress, rounds: int, client_mb_per_s: float) -> dict[str, float]:
    publisher = _LargePublisher(address, "bench-large-pipeline")
    with tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder:
        pipeline = _Ticking(spark, address.service_url, publisher.topic, Path(folder))
        with WorkerMemory() as idle:
            pipeline.round(publisher.one_small, 1)
        with WorkerMemory() as memory:
            seconds = [pipeline.round(publisher, len(SIZES_MIB)) for _ in range(rounds + _WARM_UP_ROUNDS)]
        pipeline.stop()
    publisher.close()
    return _row("pipeline to Delta, Spark", seconds[_WARM_UP_ROUNDS:], memory.peak_mb, idle.peak_mb, client_mb_per_s)


def _row(
    name: str, seconds: list[float], peak_mb: float, base_mb: float, client_mb_per_s: float | None
) -> dict[str, float]:
    largest_mb = max(SIZES_MIB) * MIB / 1e6
    rate = sum(SIZES_MIB) * MIB / 1e6 / statistics.median(seconds)
    ratio = rate / client_mb_per_s if client_mb_per_s else 1.0
    multiple, above_base = peak_mb / largest_mb, (peak_mb - base_mb) / largest_mb
    print(f"{name:<32}{rate:>8,.0f}{ratio:>8.2f}{peak_mb:>10,.0f}{multiple:>11.1f}{above_base:>11.1f}", flush=True)
    return {
        "mb_per_s": round(rate, 1),
        "ratio": round(ratio, 2),
        "peak_mb": round(peak_mb),
        "multiple_of_largest": round(multiple, 2),
        "multiple_above_base": round(above_base, 2),
    }


def _stage_cost(spark: SparkSession, address: BrokerAddress, messages: int, rounds: int) -> dict[str, float]:
    """Medians of rounds with the stage and without, in turn."""
    workload = Workload("100 B, batches of 1000, LZ4", messages, 100, 1000)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder:
        publishers = {name: _SmallPublisher(address, f"bench-{name}-stage", workload) for name in seconds}
        pipelines = {"with": _Ticking(spark, address.service_url, publishers["with"].topic, Path(folder))}
        with mock.patch("ledgerlake.sinks.delta.assemble", _no_stage):
            pipelines["without"] = _Ticking(spark, address.service_url, publishers["without"].topic, Path(folder))
        for _ in range(rounds + _WARM_UP_ROUNDS):
            for name, pipeline in pipelines.items():
                seconds[name].append(pipeline.round(publishers[name], messages))
        for pipeline in pipelines.values():
            pipeline.stop()
    rates = {name: messages / statistics.median(found[_WARM_UP_ROUNDS:]) for name, found in seconds.items()}
    ratio = rates["with"] / rates["without"]
    print(f"\n{workload.name}, none of them large: {messages:,} a round, median of {rounds} rounds each, in turn")
    print(f"{'pipeline to Delta':<32}{rates['with']:>14,.0f} messages/s")
    print(f"{'without the stateful stage':<32}{rates['without']:>14,.0f} messages/s")
    print(f"{'ratio':<32}{ratio:>14.3f}", flush=True)
    return {
        "with_stage_per_s": round(rates["with"]),
        "without_per_s": round(rates["without"]),
        "ratio": round(ratio, 3),
    }


class _SmallPublisher:
    """Publishes batches that were encoded once, over the partitions of a topic."""

    def __init__(self, address: BrokerAddress, name: str, workload: Workload) -> None:
        path = f"public/default/{name}"
        create_partitioned_topic(address.admin_url, path, PARTITIONS)
        self.topic = f"persistent://{path}"
        self._cluster = Cluster(ClientSettings(address.service_url))
        self._producers = [EntryProducer(self._cluster, one) for one in self._cluster.topic_partitions(self.topic)]
        self._entries = [encode(workload, "bench", number) for number in range(_DISTINCT_ENTRIES)]
        self._workload = workload

    def __call__(self) -> None:
        for number in range(self._workload.messages // self._workload.batch):
            producer = self._producers[number % len(self._producers)]
            producer.send(self._entries[number % len(self._entries)], self._workload.batch)
        for producer in self._producers:
            producer.flush()


def _no_stage(flow: DataFrame, *_: object) -> DataFrame:
    """In place of the stateful stage: reports become standings, nothing is open."""
    return flow.mapInArrow(_standings, FLOW_DDL)


def _standings(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in rows:
        notes = [standing_to_json(Standing([report_from_json(note).fact])) for note in batch["note"].to_pylist()]
        yield batch.set_column(batch.schema.get_field_index("note"), "note", pa.array(notes, pa.string()))


if __name__ == "__main__":
    main()
