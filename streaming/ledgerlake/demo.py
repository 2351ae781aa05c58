"""The demo: a real broker, live producers with wrong clocks, the pipeline, the ordered table, and a
verdict.

Producers run in processes of their own. Two are pulsar-client's, as applications use it; two
publish through our own wire code, because only there a clock can be set wrong on purpose.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ledgerlake.errors import SetupError
from ledgerlake.pb import pulsar_pb2 as pb

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ledgerlake.options.config import Config

PARTITIONS = 4
_SECONDS = 15.0


@dataclass(frozen=True)
class ProducerPlan:
    """A producer of the demo: its share of the messages, codec, batch size (1: single messages),
    clock error, and library.

    ``large`` is a number of messages in place of a share, each too large for the broker to take in
    one piece; ``delayed`` likewise, each to be delivered some seconds after it was sent.
    """

    name: str
    share: float
    codec: str
    batch: int
    skew_minutes: int
    library: str
    large: int = 0
    delayed: int = 0


PLANS = (
    ProducerPlan("web", 0.35, "LZ4", 500, 0, "pulsar-client"),
    ProducerPlan("mobile", 0.35, "ZSTD", 500, 0, "pulsar-client"),
    ProducerPlan("kiosk-fast-clock", 0.2, "LZ4", 200, 7, "ledgerlake"),
    ProducerPlan("till-slow-clock", 0.1, "NONE", 1, -5, "ledgerlake"),
    ProducerPlan("scanner", 0, "NONE", 1, 0, "pulsar-client", large=12),
    ProducerPlan("reminder", 0, "NONE", 1, 0, "pulsar-client", delayed=300),
)
_MOST_DELAY_MS = 8000
_LARGE_BYTES = 7_000_000


def run_demo(messages: int, *, as_json: bool = False) -> int:
    """Run it; 0 when the verdict is clean, else 1."""
    from ledgerlake.devbroker import Broker
    from ledgerlake.runtime.session import start_session

    began_s = time.monotonic()
    _say("starting a Pulsar broker (fetched once, 240 MB)")
    with tempfile.TemporaryDirectory(prefix="ledgerlake-demo-") as folder, Broker() as address:
        topic = "persistent://public/default/demo"
        create_partitioned_topic(address.admin_url, "public/default/demo", PARTITIONS)
        _say(f"broker ready at {address.service_url}; starting Spark")
        # The session ends with the process; stopping it here makes its Python workers print
        # tracebacks of broken pipes.
        spark = start_session("ledgerlake demo")
        config = _config(address.service_url, topic, Path(folder))
        _stream_while_producing(spark, config, address.service_url, topic, messages)
        clean = _show(spark, config, messages, time.monotonic() - began_s, as_json)
    return 0 if clean else 1


def create_partitioned_topic(admin_url: str, path: str, partitions: int) -> None:
    """Make a partitioned topic through the broker's admin address; ``path`` is
    tenant/namespace/topic.

    Raises:
        SetupError: the broker refused.
    """
    request = urllib.request.Request(
        f"{admin_url}/admin/v2/persistent/{path}/partitions",
        data=str(partitions).encode(),
        method="PUT",
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30):
            pass
    except OSError as error:
        raise SetupError(f"the topic {path} could not be made at {admin_url}: {error}") from None


def _config(service_url: str, topic: str, folder: Path) -> Config:
    from ledgerlake.options.config import parse_config

    return parse_config(
        {
            "source": {"service_url": service_url, "topics": [topic], "starting": "earliest"},
            "stream": {
                "name": "demo",
                "trigger": "500 ms",
                "checkpoint": str(folder / "checkpoint"),
            },
            "delta": {"path": str(folder / "demo"), "rejects_path": str(folder / "demo_rejects")},
        }
    )


def _stream_while_producing(
    spark: SparkSession, config: Config, service_url: str, topic: str, messages: int
) -> None:
    from ledgerlake.monitor.progress_screen import ProgressScreen
    from ledgerlake.pipeline.pipeline import Pipeline

    screen = ProgressScreen(name=config.stream.name)
    pipeline = Pipeline(spark, config, screen.add)
    try:
        pipeline.start(once=False)
        assert pipeline.query is not None
        screen.start(pipeline.query, lambda: pipeline.reading)
        _say(
            f"{len(PLANS)} producers write {messages:,} messages to {PARTITIONS} partitions: "
            f"{', '.join(_describe(plan) for plan in PLANS)}"
        )
        producers = [_start_producer(plan, service_url, topic, messages) for plan in PLANS]
        failed = [
            plan.name for plan, process in zip(PLANS, producers, strict=True) if process.wait() != 0
        ]
        if failed:
            raise SetupError(
                f"the demo's producer {failed[0]} failed; its own message stands above"
            )
        pipeline.query.processAllAvailable()
        give_up_s = time.monotonic() + 2 * _MOST_DELAY_MS / 1000 + 20
        while pipeline.delayed and time.monotonic() < give_up_s:
            time.sleep(0.2)
        pipeline.stop()
    finally:
        screen.stop()
        pipeline.close()


def _show(
    spark: SparkSession, config: Config, messages: int, seconds: float, as_json: bool
) -> bool:
    from ledgerlake.verify.verify import verify

    table = spark.read.format("delta").load(config.delta.path)
    table.createOrReplaceTempView("demo")
    ordered = (
        "select partition, message_id, broker_timestamp, broker_index, publish_time, "
        "producer_name, key, left(cast(value as string), 60) as value from demo order by "
        "partition, broker_timestamp, ledger_id, entry_id, batch_index limit 10"
    )
    skew = (
        "select producer_name, count(*) as messages, round(avg(cast(publish_time as double) - "
        "cast(broker_timestamp as double))) "
        "as clock_error_s from demo group by producer_name order by producer_name"
    )
    large = (
        "select partition, first_chunk_id, message_id, chunk_count, length(value) as bytes from "
        "demo where chunk_count is not null order by partition, ledger_id, entry_id limit 5"
    )
    delayed = (
        "select partition, message_id, broker_timestamp, deliver_at, delivered_at from demo "
        "where delivered_at is not null order by deliver_at desc limit 5"
    )
    if not as_json:
        tables = {
            "the first messages, in the broker's order": ordered,
            "five large messages, which came in chunks": large,
            "the last five delayed messages, none before it was due": delayed,
            "by how much the clocks of the producers are wrong": skew,
        }
        for title, query in tables.items():
            _say(title)
            with contextlib.redirect_stdout(io.StringIO()) as shown:
                spark.sql(query).show(truncate=False)
            # Print line by line: the guarded output escapes newlines within one write.
            for line in shown.getvalue().splitlines():
                print(line)
    verdict = verify(config)
    expected = sum(_share(plan, messages) for plan in PLANS)
    clean = verdict.clean and verdict.messages == expected
    if as_json:
        print(json.dumps({**asdict(verdict), "expected": expected, "seconds": round(seconds, 1)}))
    else:
        outcome = "passed" if clean else "failed"
        print(f"{outcome}, {expected:,} messages were sent and the table has {verdict.sentence()}")
        print(f"{seconds:.0f} s from the start until all messages were in the table")
        print(
            "the demo's broker and tables are gone now; to start your own: ledgerlake broker "
            "start, ledgerlake init"
        )
    return clean


def _describe(plan: ProducerPlan) -> str:
    clock = f", clock {plan.skew_minutes:+d} min" if plan.skew_minutes else ""
    kind = f"batches of {plan.batch}" if plan.batch > 1 else "single"
    if plan.large:
        kind = f"{plan.large} of {_LARGE_BYTES / 1e6:g} MB in chunks"
    if plan.delayed:
        kind = f"{plan.delayed} delayed by up to {_MOST_DELAY_MS / 1000:g} s"
    return f"{plan.name} ({kind}, {plan.codec}{clock})"


def _share(plan: ProducerPlan, messages: int) -> int:
    return plan.large or plan.delayed or int(messages * plan.share)


def _start_producer(
    plan: ProducerPlan, service_url: str, topic: str, messages: int
) -> subprocess.Popen[bytes]:
    arguments = json.dumps(
        {
            "plan": asdict(plan),
            "service_url": service_url,
            "topic": topic,
            "count": _share(plan, messages),
        }
    )
    return subprocess.Popen([sys.executable, "-m", "ledgerlake.demo", arguments])


def produce(plan: ProducerPlan, service_url: str, topic: str, count: int) -> None:
    """Publish ``count`` messages over about a quarter of a minute."""
    send = _produce_pulsar_client if plan.library == "pulsar-client" else _produce_own
    send(plan, service_url, topic, count)


def _value(plan: ProducerPlan, number: int) -> bytes:
    if plan.large:
        return b"scan %d " % number + os.urandom(_LARGE_BYTES // 2).hex().encode()
    return json.dumps({"order": number, "from": plan.name, "amount": number * 37 % 9973}).encode()


def _pace(began_s: float, done: int, count: int) -> None:
    ahead_s = began_s + _SECONDS * done / count - time.monotonic()
    if ahead_s > 0:
        time.sleep(ahead_s)


def _produce_pulsar_client(plan: ProducerPlan, service_url: str, topic: str, count: int) -> None:
    import pulsar

    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    producer = client.create_producer(
        topic,
        producer_name=plan.name,
        compression_type=getattr(pulsar.CompressionType, plan.codec),
        batching_enabled=plan.batch > 1,
        batching_max_messages=max(plan.batch, 2),
        chunking_enabled=plan.large > 0,
        block_if_queue_full=True,
        message_routing_mode=pulsar.PartitionsRoutingMode.RoundRobinDistribution,
    )
    began_s = time.monotonic()
    for number in range(count):
        delay_ms = _MOST_DELAY_MS * (number * 37 % 101) // 100
        producer.send_async(
            _value(plan, number),
            None,
            properties={"source": plan.name},
            partition_key=f"k{number % 100}",
            deliver_at=int(time.time() * 1000) + delay_ms if plan.delayed else None,
        )
        if number % plan.batch == 0:
            _pace(began_s, number, count)
    producer.flush()
    client.close()


def _produce_own(plan: ProducerPlan, service_url: str, topic: str, count: int) -> None:
    from ledgerlake.client.cluster import ClientSettings, Cluster
    from ledgerlake.client.producer import EntryProducer

    cluster = Cluster(ClientSettings(service_url))
    producers = [
        EntryProducer(cluster, name, f"{plan.name}-{index}")
        for index, name in enumerate(cluster.topic_partitions(topic))
    ]
    began_s = time.monotonic()
    for start in range(0, count, plan.batch):
        numbers = range(start, min(start + plan.batch, count))
        producer = producers[start // plan.batch % len(producers)]
        producer.send(_encode(plan, producer.name, numbers), len(numbers))
        _pace(began_s, start, count)
    for producer in producers:
        producer.close()
    cluster.close()


def _encode(plan: ProducerPlan, producer_name: str, numbers: range) -> bytes:
    from ledgerlake.decode.codecs import compress
    from ledgerlake.wire.entry import encode_batch, encode_entry

    metadata = pb.MessageMetadata(
        producer_name=producer_name,
        sequence_id=numbers.start,
        publish_time=int((time.time() + plan.skew_minutes * 60) * 1000),
    )
    if plan.batch == 1:
        metadata.partition_key = f"k{numbers.start % 100}"
        metadata.properties.add(key="source", value=plan.name)
        return encode_entry(metadata, _value(plan, numbers.start))
    singles = []
    for number in numbers:
        single = pb.SingleMessageMetadata(
            sequence_id=number, partition_key=f"k{number % 100}", payload_size=0
        )
        single.properties.add(key="source", value=plan.name)
        singles.append((single, _value(plan, number)))
    plain = encode_batch(singles)
    metadata.num_messages_in_batch = len(singles)
    metadata.compression = pb.CompressionType.Value(plan.codec)
    metadata.uncompressed_size = len(plain)
    return encode_entry(metadata, compress(metadata.compression, plain))


def _say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    produce(
        ProducerPlan(**arguments["plan"]),
        arguments["service_url"],
        arguments["topic"],
        arguments["count"],
    )
