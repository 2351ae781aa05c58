"""Large messages in MB/s beside pulsar-client's receive loop, with CPU and peak memory.

    pulsar-client receive loop   ``receive`` and ``acknowledge`` until all messages came, chunks put
                                 together in its heap
    the same, kept in files      each message written to a file of its own before it is acknowledged
    pipeline to Delta            the whole pipeline into the table

All read the same messages, uncompressed and incompressible, of 5 MiB and then of 5 to 100 MiB, from
one topic partition of a real broker on the same machine. What keeps them writes them to disk at
their size; the loop by itself keeps nothing.

Memory is the peak resident set of the process that did the work (for the pipeline, of the largest
Python worker), and what that is above the same process without large messages, in multiples of the
largest message.

CPU seconds are counted for the process that did the work, from the end of publishing to the end of
the trigger. For the pipeline, this process and all below it count, except the broker.

Every round publishes between two triggers of a running query, and counts the trigger that takes it,
without the time in which the planner waits for it. What a trigger takes with hardly anything in it
is printed too, for it is in the pipeline's rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.throughput import SETTINGS, Pass, WorkerMemory, expect, in_process, spark_cpu_s
from ledgerlake.demo import create_partitioned_topic
from ledgerlake.devbroker import Broker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress

    from ledgerlake.devbroker.standalone import BrokerAddress
    from ledgerlake.pipeline.commit import BatchResult

MIB = 1024 * 1024
WORKLOADS = ([5] * 120, [5] * 20 + [10] * 10 + [20] * 5 + [50] * 2 + [100] * 2)
LATEST = Path(__file__).parent / "latest-large.json"
_WARM_UP_ROUNDS = 2
_TICK_S = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds that are counted (default: 5)"
    )
    options = parser.parse_args()
    from ledgerlake.runtime.session import start_session

    with Broker(settings=SETTINGS) as address:
        spark = start_session("bench", "local[2]")
        try:
            results = [
                row
                for sizes_mib in WORKLOADS
                for row in _measure(spark, address, options.rounds, sizes_mib)
            ]
        finally:
            spark.stop()
    LATEST.write_text(json.dumps(results, indent=2) + "\n")


def _measure(
    spark: SparkSession, address: BrokerAddress, rounds: int, sizes_mib: list[int]
) -> Iterator[dict[str, Any]]:
    smallest, largest = min(sizes_mib), max(sizes_mib)
    name = f"{smallest} MiB" if smallest == largest else f"{smallest} to {largest} MiB"
    print(f"\n{len(sizes_mib)} messages of {name}, {sum(sizes_mib)} MiB in all")
    print(
        f"{'path':<32}{'MB/s':>8}{'ratio':>8}{'CPU s/M':>10}{'CPU s/GB':>10}{'peak MB':>10}{'x largest':>11}{'above base':>12}"
    )
    block = f"{len(sizes_mib)} messages of {name}"
    loop = _client_loop(address, rounds, sizes_mib, None, keeps=False)
    yield {"block": block, **loop}
    yield {"block": block, **_client_loop(address, rounds, sizes_mib, loop["mb_per_s"], keeps=True)}
    yield {"block": block, **_pipeline(spark, address, rounds, sizes_mib, loop["mb_per_s"])}


class _Ticking:
    """A running pipeline into a table of its own, whose triggers come at fixed seconds."""

    def __init__(self, spark: SparkSession, service_url: str, topic: str, folder: Path) -> None:
        from ledgerlake.api import run
        from ledgerlake.options.config import parse_config

        pipeline_folder = Path(tempfile.mkdtemp(dir=folder))
        config = parse_config(
            {
                "source": {"service_url": service_url, "topics": [topic]},
                "stream": {
                    "name": pipeline_folder.name,
                    "checkpoint": str(pipeline_folder / "checkpoint"),
                    "trigger": f"{_TICK_S} seconds",
                },
                "delta": {"path": str(pipeline_folder / "messages")},
            }
        )
        self._taken: list[BatchResult] = []
        self._pipeline = run(spark, config, on_batch=self._taken.append)

    def round(self, publish: Callable[[], None], count: int) -> Pass:
        """The one trigger that took what ``publish`` published."""
        before = len(self._taken)
        time.sleep(_TICK_S - time.time() % _TICK_S + 0.5)
        tick = time.time() // _TICK_S
        publish()
        if time.time() // _TICK_S != tick:
            raise SystemExit("publishing took longer than the time between two triggers; raise it")
        cpu_s = spark_cpu_s()
        while not (
            batch_results := [
                batch_result for batch_result in self._taken[before:] if batch_result.messages
            ]
        ):
            self._pipeline.wait(0.1)
        (result,) = batch_results
        expect(result.messages, count)
        return Pass(self._trigger_seconds(result.batch_id), spark_cpu_s() - cpu_s)

    def _trigger_seconds(self, batch_id: int) -> float:
        """Of a batch that is done; its progress comes a little later, and idle triggers report
        under a number too.
        """
        while not (
            progresses := [
                progress
                for progress in self._progress()
                if progress.batchId == batch_id and "addBatch" in progress.durationMs
            ]
        ):
            time.sleep(0.1)
        spent_ms = progresses[0].durationMs
        return float(spent_ms["triggerExecution"] - spent_ms["latestOffset"]) / 1000

    def _progress(self) -> list[StreamingQueryProgress]:
        assert self._pipeline.query is not None
        progress: list[StreamingQueryProgress] = self._pipeline.query.recentProgress
        return progress

    def stop(self) -> None:
        self._pipeline.stop()
        self._pipeline.close()


class _LargePublisher:
    """Publishes the same large messages again and again."""

    def __init__(self, address: BrokerAddress, name: str, sizes_mib: list[int]) -> None:
        import pulsar

        self._sizes_mib = sizes_mib
        path = f"public/default/bench-large-{name}-{len(sizes_mib)}"
        create_partitioned_topic(address.admin_url, path, 1)
        self.topic = f"persistent://{path}"
        self._client = pulsar.Client(
            address.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        )
        self._producer = self._client.create_producer(
            f"{self.topic}-partition-0",
            chunking_enabled=True,
            batching_enabled=False,
            send_timeout_millis=120_000,
        )

    def __call__(self) -> None:
        for size_mib in self._sizes_mib:
            self._producer.send(os.urandom(size_mib * MIB))

    def one_small(self) -> None:
        self._producer.send(b"x")

    def close(self) -> None:
        self._client.close()


def _client_loop(
    address: BrokerAddress,
    rounds: int,
    sizes_mib: list[int],
    client_mb_per_s: float | None,
    *,
    keeps: bool,
) -> dict[str, Any]:
    name = "the same, kept in files" if keeps else "pulsar-client receive loop"
    publisher = _LargePublisher(address, "kept" if keeps else "client", sizes_mib)
    publisher()
    publisher.close()
    path = partial(_receive_all, sum(sizes_mib) * MIB, keeps)
    _, base_mb = in_process(path, address.service_url, publisher.topic, 0, 1)
    passes, peak_mb = in_process(
        path, address.service_url, publisher.topic, len(sizes_mib), rounds + _WARM_UP_ROUNDS
    )
    return _row(name, sizes_mib, passes[_WARM_UP_ROUNDS:], peak_mb, base_mb, client_mb_per_s)


def _receive_all(
    expected_bytes: int, keeps: bool, service_url: str, topic: str, count: int
) -> None:
    import uuid

    import pulsar

    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    consumer = client.subscribe(
        f"{topic}-partition-0",
        uuid.uuid4().hex,
        initial_position=pulsar.InitialPosition.Earliest,
        receiver_queue_size=10,
    )
    received_bytes = 0
    with tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder:
        for number in range(count):
            message = consumer.receive()
            received_bytes += len(message.data())
            if keeps:
                Path(folder, str(number)).write_bytes(message.data())
            consumer.acknowledge(message)
    consumer.unsubscribe()
    client.close()
    if count and received_bytes != expected_bytes:
        raise SystemExit(f"{received_bytes} bytes arrived; the measurement is worthless")


def _pipeline(
    spark: SparkSession,
    address: BrokerAddress,
    rounds: int,
    sizes_mib: list[int],
    client_mb_per_s: float,
) -> dict[str, Any]:
    publisher = _LargePublisher(address, "pipeline", sizes_mib)
    with tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder:
        pipeline = _Ticking(spark, address.service_url, publisher.topic, Path(folder))
        with WorkerMemory() as idle:
            pipeline.round(publisher.one_small, 1)
        with WorkerMemory() as memory:
            passes = [
                pipeline.round(publisher, len(sizes_mib)) for _ in range(rounds + _WARM_UP_ROUNDS)
            ]
        small_s = statistics.median(
            pipeline.round(publisher.one_small, 1).seconds for _ in range(rounds)
        )
        pipeline.stop()
    publisher.close()
    row = _row(
        "pipeline to Delta, Spark",
        sizes_mib,
        passes[_WARM_UP_ROUNDS:],
        memory.peak_mb,
        idle.peak_mb,
        client_mb_per_s,
    )
    print(f"  a trigger with one small message takes {small_s:.2f} s")
    return row


def _row(
    name: str,
    sizes_mib: list[int],
    passes: list[Pass],
    peak_mb: float,
    base_mb: float,
    client_mb_per_s: float | None,
) -> dict[str, Any]:
    largest_mb = max(sizes_mib) * MIB / 1e6
    total_mb = sum(sizes_mib) * MIB / 1e6
    rate = total_mb / statistics.median(counted_pass.seconds for counted_pass in passes)
    cpu_s = statistics.median(counted_pass.cpu_s for counted_pass in passes)
    per_million, per_gb = cpu_s * 1e6 / len(sizes_mib), cpu_s * 1e3 / total_mb
    ratio = rate / client_mb_per_s if client_mb_per_s else 1.0
    multiple, above_base = peak_mb / largest_mb, (peak_mb - base_mb) / largest_mb
    print(
        f"{name:<32}{rate:>8,.0f}{ratio:>8.2f}{per_million:>10,.0f}{per_gb:>10.2f}"
        f"{peak_mb:>10,.0f}{multiple:>11.1f}{above_base:>12.1f}",
        flush=True,
    )
    return {
        "label": name,
        "mb_per_s": round(rate, 1),
        "ratio": round(ratio, 2),
        "cpu_s_per_million": round(per_million),
        "cpu_s_per_gb": round(per_gb, 2),
        "peak_mb": round(peak_mb),
        "multiple_of_largest": round(multiple, 2),
        "multiple_above_base": round(above_base, 2),
    }


if __name__ == "__main__":
    main()
