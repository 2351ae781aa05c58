"""Tables of records: what it costs to decode values by schema, with ten fields each.

    bytes         the table of messages, values as bytes
    avro, json, protobuf   the table of records, of topics with such a schema
    sql           the same Avro messages through a query
    five          the same into five tables: bytes, records, a query, a condition, partitions
    from_avro, from_json   the source with values as bytes, Spark's own function for the columns,
                           delta-spark's sink

Four partitions, batches of 1,000 with LZ4; medians of several passes after one that is not counted,
by the duration of micro-batches without planning. CPU seconds are counted for this process and all
below it except the broker.

    python -m bench.records [--messages 2000000] [--passes 3]
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import statistics
import tempfile
import time
import urllib.request
import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastavro
import pyspark
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from bench.throughput import (
    PARTITIONS,
    SETTINGS,
    Pass,
    pipeline_to_delta,
    spark_cpu_s,
    trigger_seconds,
)
from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.producer import EntryProducer
from ledgerlake.decode.codecs import compress
from ledgerlake.demo import create_partitioned_topic
from ledgerlake.devbroker import Broker
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.runtime.java import fetch_jars
from ledgerlake.runtime.session import start_session
from ledgerlake.wire.entry import encode_batch, encode_entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from ledgerlake.devbroker.standalone import BrokerAddress

BATCH = 1000
SQL = (
    "select id, customer, upper(country) as country, price * quantity as total, paid, ordered_at, "
    "note, product, discount, quantity from messages where quantity > 0"
)
TABLES = [
    {"path": "all"},
    {"path": "records", "shape": "record"},
    {"path": "query", "shape": "record", "sql": SQL},
    {"path": "chosen", "shape": "record", "where": "country = 'DE'"},
    {"path": "partitioned", "shape": "record", "partition_by": ["country"]},
]
_DISTINCT_ENTRIES = 50

AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": "string"},
        {"name": "product", "type": ["null", "string"], "default": None},
        {"name": "quantity", "type": "int"},
        {"name": "price", "type": "double"},
        {"name": "discount", "type": ["null", "double"], "default": None},
        {"name": "paid", "type": "boolean"},
        {"name": "country", "type": "string"},
        {"name": "ordered_at", "type": "long"},
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}
_PROTOBUF_TYPES = {"long": 3, "int": 5, "double": 1, "boolean": 8, "string": 9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    spark_avro = fetch_jars("org.apache.spark", "spark-avro_2.13", pyspark.__version__)
    with (
        Broker(settings=SETTINGS) as address,
        tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder,
    ):
        topics = {
            kind: publish(address, kind, options.messages)
            for kind in ("AVRO", "JSON", "PROTOBUF_NATIVE")
        }
        spark = start_session("bench", "local[2]", {"spark.jars": ",".join(map(str, spark_avro))})
        try:
            measure(
                spark, address.service_url, topics, options.messages, options.passes, Path(folder)
            )
        finally:
            spark.stop()


def measure(
    spark: SparkSession,
    service_url: str,
    topics: dict[str, str],
    count: int,
    passes: int,
    folder: Path,
) -> None:
    """Print a row for each path; the paths take turns."""
    own: Callable[..., Pass] = partial(pipeline_to_delta, spark, service_url)
    sparks: Callable[..., Pass] = partial(by_spark, spark, service_url)
    paths: dict[str, Callable[[], Pass]] = {
        "bytes": partial(own, topics["AVRO"], count, folder),
        "avro": partial(own, topics["AVRO"], count, folder, shape="record"),
        "json": partial(own, topics["JSON"], count, folder, shape="record"),
        "protobuf": partial(own, topics["PROTOBUF_NATIVE"], count, folder, shape="record"),
        "sql": partial(own, topics["AVRO"], count, folder, shape="record", sql=SQL),
        "five": partial(own, topics["AVRO"], count, folder, tables=TABLES),
        "from_avro": partial(sparks, topics["AVRO"], count, folder, "avro"),
        "from_json": partial(sparks, topics["JSON"], count, folder, "json"),
    }
    results: dict[str, list[Pass]] = {name: [] for name in paths}
    for _ in range(passes + 1):
        for name, path in paths.items():
            results[name].append(path())
    print(f"{count:,} messages of ten fields; median of {passes} passes after one uncounted")
    print(f"{'path':<12}{'messages/s':>14}{'ratio':>8}{'CPU s/M':>10}")
    first = 0.0
    for name, all_passes in results.items():
        rate = count / statistics.median(one.seconds for one in all_passes[1:])
        cpu_s = statistics.median(one.cpu_s for one in all_passes[1:]) * 1e6 / count
        first = first or rate
        print(f"{name:<12}{rate:>14,.0f}{rate / first:>8.2f}{cpu_s:>10.2f}", flush=True)


def by_spark(
    spark: SparkSession, service_url: str, topic: str, count: int, folder: Path, kind: str
) -> Pass:
    """The source, Spark's function, and delta-spark's sink."""
    from pyspark.sql import functions as f
    from pyspark.sql.avro.functions import from_avro

    source = (
        spark.readStream.format("ledgerlake")
        .option("service.url", service_url)
        .option("topic", topic)
    )
    rows = source.option("startingOffsets", "earliest").load()
    columns = ("id long, customer string, product string, quantity int, price double, discount "
              "double, paid boolean, country string, ordered_at long, note string")  # fmt: skip
    value = (
        from_avro("value", json.dumps(AVRO))
        if kind == "avro"
        else f.from_json(rows["value"].cast("string"), columns)
    )
    others = [name for name in rows.columns if name not in ("value", "reject_reason")]
    typed = rows.select(value.alias("record"), f.struct(*others).alias("pulsar")).select(
        "record.*", "pulsar"
    )
    place = tempfile.mkdtemp(dir=folder)
    cpu_s = spark_cpu_s()
    writer = typed.writeStream.format("delta").option("checkpointLocation", f"{place}/checkpoint")
    query = writer.trigger(availableNow=True).start(f"{place}/table")
    query.awaitTermination()
    return Pass(trigger_seconds(query, count, rows_are_messages=True), spark_cpu_s() - cpu_s)


def publish(address: BrokerAddress, kind: str, count: int) -> str:
    """The messages on a topic of their own, whose schema is registered; its name."""
    path = f"public/default/bench-{uuid.uuid4().hex}"
    create_partitioned_topic(address.admin_url, path, PARTITIONS)
    _register(address, path, kind)
    encode = {"AVRO": _avro, "JSON": _json, "PROTOBUF_NATIVE": _protobuf}[kind]
    entries = [_entry(encode, number * BATCH) for number in range(_DISTINCT_ENTRIES)]
    cluster = Cluster(ClientSettings(address.service_url))
    producers = [
        EntryProducer(cluster, name) for name in cluster.topic_partitions(f"persistent://{path}")
    ]
    for number in range(count // BATCH):
        producers[number % PARTITIONS].send(entries[number % len(entries)], BATCH)
    for producer in producers:
        producer.close()
    cluster.close()
    return f"persistent://{path}"


def _register(address: BrokerAddress, path: str, kind: str) -> None:
    definition = json.dumps(AVRO)
    if kind == "PROTOBUF_NATIVE":
        files = base64.b64encode(_descriptors().SerializeToString()).decode()
        definition = json.dumps(
            {
                "fileDescriptorSet": files,
                "rootMessageTypeName": "bench.Order",
                "rootFileDescriptorName": "bench.proto",
            }
        )
    body = json.dumps({"type": kind, "schema": definition, "properties": {}}).encode()
    url = f"{address.admin_url}/admin/v2/schemas/{path}/schema"
    request = urllib.request.Request(
        url, data=body, method="POST", headers={"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=30).close()


def _entry(encode: Callable[[dict[str, Any]], bytes], start: int) -> bytes:
    messages = [
        (
            pb.SingleMessageMetadata(payload_size=0, sequence_id=start + number),
            encode(_order(start + number)),
        )
        for number in range(BATCH)
    ]
    plain = encode_batch(messages)
    metadata = pb.MessageMetadata(
        producer_name="bench",
        sequence_id=start,
        publish_time=int(time.time() * 1000),
        num_messages_in_batch=BATCH,
        compression=pb.LZ4,
        uncompressed_size=len(plain),
        schema_version=bytes(8),
    )
    return encode_entry(metadata, compress(pb.LZ4, plain))


def _order(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "customer": f"customer-{number * 7919 % 100_000}",
        "product": None if number % 10 == 0 else f"product-{number % 500}",
        "quantity": number % 9 + 1,
        "price": number % 10_000 / 100,
        "discount": 0.1 if number % 3 == 0 else None,
        "paid": number % 2 == 0,
        "country": ("DE", "FR", "US", "JP")[number % 4],
        "ordered_at": 1_700_000_000_000 + number,
        "note": f"note {number}" if number % 5 == 0 else None,
    }


def _avro(order: dict[str, Any]) -> bytes:
    encoded = io.BytesIO()
    fastavro.schemaless_writer(encoded, AVRO, order)
    return encoded.getvalue()


def _json(order: dict[str, Any]) -> bytes:
    return json.dumps(order).encode()


def _protobuf(order: dict[str, Any]) -> bytes:
    pool = descriptor_pool.DescriptorPool()
    for file in _descriptors().file:
        pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Order"))
    message: bytes = kind(
        **{name: value for name, value in order.items() if value is not None}
    ).SerializeToString()
    return message


def _descriptors() -> descriptor_pb2.FileDescriptorSet:
    """The same fields as a Protobuf message."""
    file = descriptor_pb2.FileDescriptorProto(name="bench.proto", package="bench", syntax="proto3")
    order = file.message_type.add(name="Order")
    for number, field in enumerate(AVRO["fields"], 1):
        kind = field["type"][1] if isinstance(field["type"], list) else field["type"]  # type: ignore[index]
        order.field.add(name=field["name"], number=number, type=_PROTOBUF_TYPES[kind], label=1)  # type: ignore[index]
    return descriptor_pb2.FileDescriptorSet(file=[file])


if __name__ == "__main__":
    main()
