"""A cluster beside one machine, and S3 beside a disk; then a thousand topic partitions on the
cluster. Root alone can run it, because each host is a network namespace (``tests.live.hosts``).

rates       a topic of four partitions, from its beginning to its end, by the duration of the
            micro-batches without planning: a standalone cluster with two workers of one core into
            S3; ``local[2]`` into S3, and onto a disk
partitions  a topic of many partitions on that cluster, a few messages for each partition now and
            then; then none. Spark gives the planning times. Connections are counted at the broker's
            process by host; CPU and memory at driver and workers

All share the cores of one machine, so a cluster cannot be faster here than one machine is.

    python -m bench.cluster [--partitions 1000] [--messages 4000000] [--idle 600]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from tests.live.cluster_campaign import Cluster
from tests.live.hosts import network
from tests.live.object_store import (
    ACCESS_KEY,
    SECRET_KEY,
    ObjectStore,
    hadoop_version,
    start_object_store,
)
from tests.live.pipelines import ledgerlake_process
from tests.live.runtime import Runtime, start_runtime
from tests.waiting import wait_until

from bench.throughput import PARTITIONS, Workload, cpu_s, expect, pss_mb, publish, trigger_seconds
from ledgerlake.runtime.java import fetch_jars

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession
    from tests.live.hosts import Host

    from ledgerlake.api import Pipeline

_PASSES = 3
_ROUNDS = 8
_SECRETS = {"LAKE_KEY": ACCESS_KEY, "LAKE_SECRET": SECRET_KEY}


@dataclass
class Bench:
    """The cluster, its broker and its store; ``spark`` is the configuration of a driver for it."""

    runtime: Runtime
    store: ObjectStore
    cluster: Cluster
    folder: Path
    spark: dict[str, Any]

    @property
    def driver(self) -> Host:
        return self.cluster.hosts["driver1"]

    def config(self, name: str, topic: str, *, is_stored: bool) -> dict[str, Any]:
        """A pipeline into the store, or onto the disk of this machine."""
        data = self.runtime.config(self.folder / name, topic, name=name)
        data["stream"]["trigger"] = "1 second"
        jars = {"spark.jars": self.spark["settings"]["spark.jars"], "spark.ui.enabled": "false"}
        data["spark"] = {"master": "local[2]", "settings": jars}
        if is_stored:
            bucket = self.store.bucket()
            data["delta"] = {
                "path": f"s3://{bucket}/messages",
                "rejects_path": f"s3://{bucket}/rejects",
            }
            data["stream"]["checkpoint"] = f"s3://{bucket}/checkpoint"
            data["storage"] = self.store.settings | {
                "access_key_id": "env:LAKE_KEY",
                "secret_access_key": "env:LAKE_SECRET",
            }
        return data

    def drive(self, data: dict[str, Any], log: Path, *options: str) -> subprocess.Popen[bytes]:
        """Start a driver on a host of its own; ``log`` gets what it prints."""
        config = log.with_suffix(".json")
        config.write_text(json.dumps(data))
        command = [sys.executable, "-m", "bench.cluster", "--drive", str(config), *options]
        return self.driver.start(command, {**os.environ, **_SECRETS}, log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=1000)
    parser.add_argument("--messages", type=int, default=4_000_000)
    parser.add_argument("--idle", type=int, default=600, help="seconds without messages")
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--passes", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive is not None:
        drive(json.loads(options.drive.read_text()), options.passes, options.messages)
        return
    with start_bench() as running:
        if options.messages:
            rates(running, options.messages)
        many_partitions(running, options.partitions, options.idle)


@contextmanager
def start_bench() -> Iterator[Bench]:
    """The hosts, the broker and the store, until the end of the context."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ledgerlake-bench-")))
        bundle = folder / "bundle.tar.gz"
        assert ledgerlake_process("bundle", str(bundle)).returncode == 0
        net = stack.enter_context(network())
        runtime = stack.enter_context(start_runtime(broker_metadata=True, host=net.address))
        store = stack.enter_context(start_object_store(net.address))
        cluster = Cluster(net, folder)
        jars = fetch_jars("org.apache.hadoop", "hadoop-aws", hadoop_version())
        settings = {
            "spark.jars": ",".join(map(str, jars)),
            "spark.executor.cores": "1",
            "spark.executor.memory": "1g",
        }
        spark = {"master": cluster.master, "bundle": str(bundle), "settings": settings}
        yield Bench(runtime, store, cluster, folder, spark)


def rates(running: Bench, messages: int) -> None:
    """Print the rate of each place."""
    assert running.runtime.broker is not None
    address = running.runtime.broker.status()
    assert address is not None
    workload = Workload("", messages, 100, 1000)
    topic = publish(address, workload, PARTITIONS)
    print(
        f"{messages:,} messages of 100 B, {PARTITIONS} partitions, medians of {_PASSES} after one "
        "uncounted"
    )
    print(f"{'':<40}{'messages/s':>12}{'ratio':>8}")
    first = 0.0
    for name, words, is_stored in (
        ("disk", "local[2], disk", False),
        ("store", "local[2], S3", True),
        ("cluster", "cluster of two workers, S3", True),
    ):
        data = running.config(f"rates-{name}", topic, is_stored=is_stored)
        if name == "cluster":
            data["spark"] = running.spark
        log = running.folder / f"rates-{name}.log"
        process = running.drive(
            data, log, "--passes", str(_PASSES + 1), "--messages", str(messages)
        )
        assert process.wait() == 0, log.read_text()[-3000:]
        rate = messages / statistics.median(_results(log)[1:])
        first = first or rate
        print(f"{words:<40}{rate:>12,.0f}{rate / first:>8.2f}", flush=True)


def many_partitions(running: Bench, partitions: int, idle_s: int) -> None:
    """Print planning times, connections, memory and CPU of a topic of many partitions."""
    topic = running.runtime.topic(partitions)
    data = running.config("many", topic, is_stored=True) | {"spark": running.spark}
    log = running.folder / "many.log"
    process = running.drive(data, log)
    producer = running.runtime.client().create_producer(topic, batching_max_publish_delay_ms=1)
    for _ in range(_ROUNDS):
        before = len(_results(log))
        for number in range(partitions * 3):
            producer.send_async(b"%d" % number, lambda *_: None)
        producer.flush()
        wait_until(partial(_has_more, process, log, before))
        assert process.poll() is None, log.read_text()[-3000:]
    batches = _results(log)
    first, later = batches[0], [batch for batch in batches[1:] if batch["rows"]]
    print(
        f"\n{partitions:,} topic partitions on the cluster, {_ROUNDS} rounds of three messages for "
        "each"
    )
    for words, name in (
        ("first plan, ms", "latestOffset"),
        ("first micro-batch, ms", "triggerExecution"),
    ):
        print(f"{words:<40}{first[name]:>12,}")
    for words, name in (("plan, ms", "latestOffset"), ("micro-batch, ms", "triggerExecution")):
        print(
            f"{words + ' (median of ' + str(len(later)) + ')':<40}{statistics.median(b[name] for b in later):>12,.0f}"
        )
    workers = [
        host.address for name, host in running.cluster.hosts.items() if name.startswith("worker")
    ]
    for words, count in _connections(
        running, {"driver": [running.driver.address], "workers": workers}
    ).items():
        print(f"{'connections of the ' + words:<40}{count:>12,}")
    print(
        f"{'memory of driver and workers (PSS), MB':<40}{pss_mb(*_processes()):>12,.0f}", flush=True
    )
    # Some processes end meanwhile, and what they had spent before does not count.
    before_s, began_s = {process: cpu_s(process) for process in _processes()}, time.monotonic()
    time.sleep(idle_s)
    spent_s = sum(cpu_s(process) - before_s.get(process, 0.0) for process in _processes())
    cores = spent_s / (time.monotonic() - began_s)
    print(f"{f'CPU of a core, idle for {idle_s} s':<40}{cores:>12.2f}")
    print(f"{'memory then, MB':<40}{pss_mb(*_processes()):>12,.0f}", flush=True)
    process.terminate()


def drive(data: dict[str, Any], passes: int, messages: int) -> None:
    """Run a pipeline as its driver: so many passes over a topic, or until this process is ended.
    Each line of the output is a result as JSON.
    """
    from ledgerlake.api import parse_config, run, start_session

    config = parse_config(data)
    spark = start_session("bench", config.spark.master, config.spark.session_settings)
    if not passes:
        _report_batches(run(spark, config))
        return
    for number in range(passes):
        print(json.dumps(_pass_s(spark, data, number, messages)), flush=True)
    spark.stop()


def _pass_s(spark: SparkSession, data: dict[str, Any], number: int, messages: int) -> float:
    """Read the topic into a new table; return the seconds of the micro-batches without planning."""
    from ledgerlake.api import parse_config, run

    places = {
        "path": f"{data['delta']['path']}-{number}",
        "rejects_path": f"{data['delta']['rejects_path']}-{number}",
    }
    stream = data["stream"] | {
        "name": f"{data['stream']['name']}-{number}",
        "checkpoint": f"{data['stream']['checkpoint']}-{number}",
    }
    counts: list[int] = []
    config = parse_config({**data, "delta": places, "stream": stream})
    pipeline = run(spark, config, once=True, on_batch=lambda result: counts.append(result.messages))
    pipeline.wait()
    pipeline.close()
    expect(sum(counts), messages)
    return trigger_seconds(pipeline.query, messages, rows_are_messages=False)


def _report_batches(pipeline: Pipeline) -> None:
    """Print the durations of each micro-batch until the pipeline ends."""
    reported = -1
    assert pipeline.query is not None
    while not pipeline.wait(0.5):
        for progress in pipeline.query.recentProgress:
            if progress.batchId > reported and "addBatch" in progress.durationMs:
                reported = progress.batchId
                print(
                    json.dumps(
                        {"batch": reported, "rows": progress.numInputRows, **progress.durationMs}
                    ),
                    flush=True,
                )


def _has_more(process: subprocess.Popen[bytes], log: Path, before: int) -> bool:
    return len(_results(log)) > before or process.poll() is not None


def _results(log: Path) -> list[Any]:
    """What a driver has printed as JSON so far."""
    results = []
    for line in log.read_text().splitlines():
        with suppress(ValueError):
            results.append(json.loads(line))
    return results


def _connections(running: Bench, hosts: dict[str, list[str]]) -> dict[str, int]:
    """How many connections the broker has with each group of hosts."""
    counts: Counter[str] = Counter()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any("PulsarStandalone" in word for word in process.cmdline()):
                counts.update(
                    connection.raddr.ip
                    for connection in process.net_connections("tcp")
                    if connection.status == "ESTABLISHED" and connection.raddr
                )
    return {
        name: sum(counts[address] for address in addresses) for name, addresses in hosts.items()
    }


def _processes() -> list[psutil.Process]:
    """Driver, master and workers, and all below them."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if not any("pulsar" in word or "weed" in word for word in _words(process))
    ]


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


if __name__ == "__main__":
    main()
