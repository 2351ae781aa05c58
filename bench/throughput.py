"""Messages per second, side by side with pulsar-client, in one run on one machine: ``make bench``.

Each path reads the same topics from their beginning to their end, from a real broker that runs on
the same machine:

    pulsar-client reader loop    one topic, ``read_next`` until the end
    pulsar-client batch_receive  one topic, ``batch_receive`` until the end
    decode to Arrow              our client and decode in one process, one topic
    source to noop               ``view = messages`` into Spark's noop sink, four partitions
    pipeline to Delta            the whole pipeline, all columns, four partitions; its stateful
                                 stage has nothing to do
    without the stateful stage   the same with that stage taken out

The paths take turns, and with them the two topics, so that an hour in which the machine is fast is
every path's. Numbers are medians of several passes after three that are not counted; ratios are to
the reader loop of the same run. Memory is the peak resident set of the process that did the work,
for Spark paths of the largest Python worker, printed by pass too, so that growth with the length of
a run would show. The stream paths are measured by the duration of their micro-batches, the whole
trigger but its planning: a query plans its stages once, and what that takes belongs to its start,
as the JVM's does (``bench.latency``).

CPU seconds are counted for the process that did the work. For Spark paths, this process and all
below it count except the broker, so the JVM counts too. They are counted from the start of the
query on, which takes two or three. Single messages come as fast as the broker sends them, whoever
reads, which differs by a factor of two from pass to pass; there the CPU is what differs between
paths.

Results are printed and written to ``bench/latest.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import psutil
import pyarrow as pa

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.producer import EntryProducer
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.demo import create_partitioned_topic
from ledgerlake.devbroker import Broker
from ledgerlake.operators.stage_rows import RowKind, StageRow, StateSummary, report_from_json
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.entry import encode_batch, encode_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.pool import Pool

    from pyspark.sql import DataFrame, SparkSession

    from ledgerlake.devbroker.standalone import BrokerAddress
    from ledgerlake.operators.stage_output import StageOutput
    from ledgerlake.operators.stateful import Processor

PARTITIONS = 4
WARM_UP_PASSES = 3
_DISTINCT_ENTRIES = 200
SETTINGS = {
    "defaultRetentionTimeInMinutes": "-1",
    "defaultRetentionSizeInMB": "-1",
    "brokerDeleteInactiveTopicsEnabled": "false",
}
LATEST = Path(__file__).parent / "latest.json"


@dataclass(frozen=True)
class Workload:
    """What the topics hold: ``messages`` of ``value_bytes``, ``batch`` to an entry (1: single,
    uncompressed).
    """

    name: str
    messages: int
    value_bytes: int
    batch: int

    @property
    def plain_mb(self) -> float:
        return self.messages * self.value_bytes / 1e6


@dataclass(frozen=True)
class Measured:
    """One row of the result."""

    name: str
    messages_per_s: float
    mb_per_s: float
    ratio_to_pulsar_client: float
    cpu_s_per_million: float
    peak_rss_mb: float


@dataclass(frozen=True)
class Pass:
    """One reading of a topic from its beginning to its end; ``beyond_s`` is what a run took beside
    its micro-batches, from its start to its end.
    """

    seconds: float
    cpu_s: float
    beyond_s: float = 0.0


# With the peak memory (MB) of what made it.
PassAndPeak = tuple[Pass, float]
Paths = dict[str, "Callable[[], PassAndPeak]"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--messages", type=int, default=10_000_000, help="batched messages (default: 10000000)"
    )
    parser.add_argument(
        "--passes", type=int, default=5, help="passes that are counted (default: 5)"
    )
    options = parser.parse_args()
    workloads = [
        Workload("100 B, batches of 1000, LZ4", options.messages, 100, 1000),
        Workload("100 B, unbatched", options.messages // 100, 100, 1),
        Workload("1 KiB, unbatched", options.messages // 100, 1024, 1),
    ]
    results: list[Measured] = []
    with Broker(settings=SETTINGS) as address:
        for workload in workloads:
            one_partition, four_partitions = (
                publish(address, workload, partitions) for partitions in (1, PARTITIONS)
            )
            results += _measure(
                address.service_url, one_partition, four_partitions, workload, options.passes
            )
    LATEST.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


def publish(address: BrokerAddress, workload: Workload, partitions: int) -> str:
    """The messages on a topic of their own; its name."""
    path = f"public/default/bench-{uuid.uuid4().hex}"
    create_partitioned_topic(address.admin_url, path, partitions)
    cluster = Cluster(ClientSettings(address.service_url))
    producers = [
        EntryProducer(cluster, name) for name in cluster.topic_partitions(f"persistent://{path}")
    ]
    entries = [encode(workload, "bench", number) for number in range(_DISTINCT_ENTRIES)]
    for number in range(workload.messages // workload.batch):
        producers[number % partitions].send(entries[number % len(entries)], workload.batch)
    for producer in producers:
        producer.close()
    cluster.close()
    return f"persistent://{path}"


def encode(workload: Workload, producer_name: str, start: int) -> bytes:
    """Values are half random, so that they compress to about half."""
    half = workload.value_bytes // 2
    noise = os.urandom(half * workload.batch)
    values = [
        noise[half * number : half * (number + 1)] + b"x" * (workload.value_bytes - half)
        for number in range(workload.batch)
    ]
    metadata = pb.MessageMetadata(
        producer_name=producer_name, sequence_id=start, publish_time=int(time.time() * 1000)
    )
    if workload.batch == 1:
        return encode_entry(metadata, values[0])
    from ledgerlake.decode.codecs import compress

    plain = encode_batch(
        [
            (pb.SingleMessageMetadata(payload_size=0, sequence_id=start + number), value)
            for number, value in enumerate(values)
        ]
    )
    metadata.num_messages_in_batch = workload.batch
    metadata.compression = pb.LZ4
    metadata.uncompressed_size = len(plain)
    return encode_entry(metadata, compress(pb.LZ4, plain))


def _measure(
    service_url: str, one_partition: str, four_partitions: str, workload: Workload, passes: int
) -> list[Measured]:
    print(
        f"\n{workload.name}: {workload.messages:,} messages; median of {passes} passes after "
        f"{WARM_UP_PASSES} uncounted"
    )
    print(f"{'path':<32}{'messages/s':>14}{'MB/s':>10}{'ratio':>8}{'CPU s/M':>10}{'peak MB':>10}")
    with _paths(service_url, one_partition, four_partitions, workload.messages) as (
        of_one,
        of_four,
    ):
        passes_by_path: dict[str, list[PassAndPeak]] = {name: [] for name in (*of_one, *of_four)}
        for _ in range(WARM_UP_PASSES + passes):
            for turn in zip(of_one.items(), of_four.items(), strict=True):
                for name, path in turn:
                    passes_by_path[name].append(path())
    results: list[Measured] = []
    for name, path_passes in passes_by_path.items():
        peaks = [peak_mb for _, peak_mb in path_passes]
        results.append(
            _row(
                name,
                workload,
                [measured_pass for measured_pass, _ in path_passes[WARM_UP_PASSES:]],
                max(peaks),
                results,
            )
        )
        print(f"{'  peak MB by pass':<32}{' '.join(f'{peak:.0f}' for peak in peaks)}", flush=True)
    return results


@contextlib.contextmanager
def _paths(
    service_url: str, one_partition: str, four_partitions: str, count: int
) -> Iterator[tuple[Paths, Paths]]:
    """Those that read the topic of one partition, in a process each, and those that read the other,
    in one Spark session.
    """
    from ledgerlake.runtime.session import start_session

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ledgerlake-bench-")))
        spark = start_session("bench", "local[2]")
        stack.callback(spark.stop)

        def alone(path: Callable[..., None]) -> Callable[[], PassAndPeak]:
            return partial(
                stack.enter_context(_process()).apply,
                _timed,
                (path, service_url, one_partition, count),
            )

        def in_spark(path: Callable[..., Pass]) -> Callable[[], PassAndPeak]:
            return partial(
                spark_pass, partial(path, spark, service_url, four_partitions, count, folder)
            )

        yield (
            {
                "pulsar-client reader loop": alone(pulsar_reader),
                "pulsar-client batch_receive": alone(_pulsar_batch_receive),
                "decode to Arrow, one process": alone(_own_decode),
            },
            {
                "source to noop, Spark": in_spark(_source_to_noop),
                "pipeline to Delta, Spark": in_spark(pipeline_to_delta),
                "without the stateful stage": in_spark(_pipeline_without_stage),
            },
        )


def _row(
    name: str, workload: Workload, passes: list[Pass], peak_mb: float, before: list[Measured]
) -> Measured:
    rate = workload.messages / statistics.median(one_pass.seconds for one_pass in passes)
    cpu_s = statistics.median(one_pass.cpu_s for one_pass in passes)
    ratio = rate / before[0].messages_per_s if before else 1.0
    row = Measured(
        f"{name} ({workload.name})",
        round(rate),
        round(rate * workload.value_bytes / 1e6, 1),
        round(ratio, 2),
        round(cpu_s * 1e6 / workload.messages, 2),
        round(peak_mb),
    )
    print(
        f"{name:<32}{row.messages_per_s:>14,.0f}{row.mb_per_s:>10,.1f}{row.ratio_to_pulsar_client:>8.2f}"
        f"{row.cpu_s_per_million:>10.2f}{row.peak_rss_mb:>10,.0f}",
        flush=True,
    )
    return row


def in_process(
    path: Callable[..., None], service_url: str, topic: str, count: int, passes: int
) -> tuple[list[Pass], float]:
    """The passes and the peak memory of a fresh process that makes them."""
    with _process() as process:
        passes_and_peaks = [
            process.apply(_timed, (path, service_url, topic, count)) for _ in range(passes)
        ]
    return [measured_pass for measured_pass, _ in passes_and_peaks], passes_and_peaks[-1][1]


def _process() -> Pool:
    return multiprocessing.get_context("spawn").Pool(1)


def _timed(path: Callable[..., None], service_url: str, topic: str, count: int) -> PassAndPeak:
    began_s, cpu_s = time.perf_counter(), time.process_time()
    path(service_url, topic, count)
    return Pass(time.perf_counter() - began_s, time.process_time() - cpu_s), _peak_mb()


def _peak_mb() -> float:
    """The peak resident set of this process itself; what ``getrusage`` says begins with its
    parent's.
    """
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


def pulsar_reader(service_url: str, topic: str, count: int) -> None:
    import pulsar

    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    reader = client.create_reader(
        f"{topic}-partition-0", pulsar.MessageId.earliest, receiver_queue_size=10_000
    )
    for _ in range(count):
        reader.read_next().data()
    client.close()


def _pulsar_batch_receive(service_url: str, topic: str, count: int) -> None:
    import pulsar

    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    consumer = client.subscribe(
        f"{topic}-partition-0",
        uuid.uuid4().hex,
        initial_position=pulsar.InitialPosition.Earliest,
        receiver_queue_size=10_000,
        batch_receive_policy=pulsar.ConsumerBatchReceivePolicy(5000, 0, 100),
    )
    received_count = 0
    while received_count < count:
        received_count += sum(
            1 for message in consumer.batch_receive() if message.data() is not None
        )
    consumer.unsubscribe()
    client.close()


def _own_decode(service_url: str, topic: str, count: int) -> None:
    from ledgerlake.options.source_options import parse_options
    from ledgerlake.source.bounds import resolve_end
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.source.views import read_messages
    from ledgerlake.wire.message_id import BEFORE_ALL

    options = parse_options({"service.url": service_url, "topic": topic})
    cluster = Cluster(options.client)
    (name,) = cluster.topic_partitions(topic)
    span = EntryRange(name, BEFORE_ALL, resolve_end(cluster, name, "latest").position)
    decoded_count = sum(batch.num_rows for batch in read_messages(options, span))
    cluster.close()
    expect(decoded_count, count)


def spark_pass(path: Callable[[], Pass]) -> PassAndPeak:
    """One pass, and the peak memory of the largest worker meanwhile."""
    with WorkerMemory() as memory:
        measured_pass = path()
    return measured_pass, memory.peak_mb


def in_turns(paths: Paths, passes: int) -> dict[str, list[PassAndPeak]]:
    """The passes of some paths that take turns, after one of each that is not counted."""
    passes_by_name: dict[str, list[PassAndPeak]] = {name: [] for name in paths}
    for _ in range(1 + passes):
        for name, path in paths.items():
            passes_by_name[name].append(path())
    return {name: of_path[1:] for name, of_path in passes_by_name.items()}


def print_compared(
    messages: int, heading: str, passes_by_name: dict[str, list[PassAndPeak]]
) -> None:
    """Print the medians of each path, and its rate beside that of the first."""
    print(
        f"{messages:,} "
        f"messages\n{heading:<32}{'messages/s':>14}{'ratio':>8}{'CPU s/M':>10}{'peak MB':>10}"
    )
    first_rate = 0.0
    for name, of_path in passes_by_name.items():
        rate = messages / statistics.median(one_pass.seconds for one_pass, _ in of_path)
        cpu_s = statistics.median(one_pass.cpu_s for one_pass, _ in of_path)
        first_rate = first_rate or rate
        peak_mb = max(peak_mb for _, peak_mb in of_path)
        print(
            f"{name:<32}{rate:>14,.0f}{rate / first_rate:>8.2f}{cpu_s * 1e6 / messages:>10.2f}{peak_mb:>10,.0f}"
        )


def _source_to_noop(
    spark: SparkSession, service_url: str, topic: str, count: int, folder: Path
) -> Pass:
    reader = (
        spark.readStream.format("ledgerlake")
        .option("service.url", service_url)
        .option("topic", topic)
    )
    checkpoint = tempfile.mkdtemp(dir=folder)
    writer = (
        reader.option("startingOffsets", "earliest")
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", checkpoint)
    )
    cpu_s = spark_cpu_s()
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return Pass(trigger_seconds(query, count, rows_are_messages=True), spark_cpu_s() - cpu_s)


def pipeline_to_delta(
    spark: SparkSession,
    service_url: str,
    topic: str,
    count: int,
    folder: Path,
    tables: Sequence[Mapping[str, Any]] = (),
    **delta: str,
) -> Pass:
    """The micro-batches that bring a whole topic into a table of its own; ``delta`` adds to that
    section of the configuration.

    Args:
        tables: the tables beside it, whose paths are below one folder; each micro-batch counts by
            the first.
    """
    from ledgerlake.api import run
    from ledgerlake.options.config import parse_config

    pipeline_folder = Path(tempfile.mkdtemp(dir=folder))
    batch_counts: list[int] = []
    config = parse_config(
        {
            "source": {"service_url": service_url, "topics": [topic]},
            "stream": {
                "name": pipeline_folder.name,
                "checkpoint": str(pipeline_folder / "checkpoint"),
            },
            "delta": {"path": str(pipeline_folder / "messages"), **delta},
            **(
                {
                    "tables": [
                        {**table, "path": str(pipeline_folder / table["path"])} for table in tables
                    ]
                }
                if tables
                else {}
            ),
        }
    )
    began_s = time.perf_counter()
    pipeline = run(
        spark, config, once=True, on_batch=lambda result: batch_counts.append(result.messages)
    )
    cpu_s = spark_cpu_s()
    pipeline.wait()
    cpu_s = spark_cpu_s() - cpu_s
    pipeline.close()
    whole_s = time.perf_counter() - began_s
    if not tables:
        expect(sum(batch_counts), count)
    seconds = trigger_seconds(pipeline.query, count, rows_are_messages=False)
    shutil.rmtree(pipeline_folder)
    return Pass(seconds, cpu_s, whole_s - seconds)


def _pipeline_without_stage(
    spark: SparkSession, service_url: str, topic: str, count: int, folder: Path
) -> Pass:
    with mock.patch("ledgerlake.pipeline.plan.stateful", _no_stage):
        return pipeline_to_delta(spark, service_url, topic, count, folder)


def _no_stage(flow: DataFrame, processor: Processor, schema: str) -> DataFrame:
    """In place of the stateful stage: reports become results, nothing is open."""
    return flow.mapInArrow(partial(results, processor.output), schema)


def results(
    output: Callable[[TopicPartition], StageOutput], rows: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Turn the report of each task into the result of a stage that has nothing to do."""
    for row in (row for batch in rows for row in batch.to_pylist()):
        stage = output(TopicPartition(row["topic"], row["partition"]))
        if row["kind"] == RowKind.RESULTS:
            frames = stage.pass_on([StageRow(**row)])
        else:
            frames = stage.finish(StateSummary([report_from_json(row["header"]).result]))
        for frame in frames:
            yield pa.RecordBatch.from_pandas(frame, preserve_index=False)


def trigger_seconds(query: Any, count: int, rows_are_messages: bool) -> float:
    progresses = [progress for progress in query.recentProgress if progress.numInputRows]
    if rows_are_messages:
        expect(sum(progress.numInputRows for progress in progresses), count)
    spent_ms = sum(
        progress.durationMs["triggerExecution"] - progress.durationMs["queryPlanning"]
        for progress in progresses
    )
    return float(spent_ms) / 1000


def spark_cpu_s() -> float:
    """CPU seconds of this process and of all below it that are not the broker's, those that have
    ended with the rest.
    """
    me = psutil.Process()
    brokers = {
        process
        for child in me.children()
        if _is_broker(child)
        for process in (child, *child.children(recursive=True))
    }
    return cpu_s(me, *(child for child in me.children(recursive=True) if child not in brokers))


def cpu_s(*processes: psutil.Process) -> float:
    """What they have spent, and those below them that have ended."""
    total_s = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total_s += sum(process.cpu_times()[:4])
    return total_s


def pss_mb(*processes: psutil.Process) -> float:
    """Their memory; what several share counts once."""
    total_bytes = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total_bytes += process.memory_full_info().pss
    return total_bytes / 2**20


def _is_broker(process: psutil.Process) -> bool:
    return any("pulsar" in word for word in process.cmdline())


def expect(arrived: int, count: int) -> None:
    if arrived != count:
        raise SystemExit(
            f"{arrived} messages arrived where {count} were published; the measurement is worthless"
        )


class WorkerMemory:
    """The peak resident set of the largest Python process below this one, and its command, looked
    at ten times a second.

    Those that ``multiprocessing`` started are not looked at: they are other paths.
    """

    def __enter__(self) -> WorkerMemory:
        self.peak_mb = 0.0
        self.command = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        pool_pids = {child.pid for child in multiprocessing.active_children()}
        while not self._end.wait(0.1):
            for child in me.children(recursive=True):
                try:
                    if "python" in child.name() and child.pid not in pool_pids:
                        self._look_at(child)
                except psutil.NoSuchProcess:
                    continue

    def _look_at(self, process: psutil.Process) -> None:
        resident_mb = process.memory_info().rss / 1e6
        if resident_mb > self.peak_mb:
            self.peak_mb, self.command = resident_mb, " ".join(process.cmdline())


if __name__ == "__main__":
    main()
