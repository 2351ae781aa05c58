"""Typed values: topics written by pulsar-client's own schema classes, and by other means if it has
none.
"""

from __future__ import annotations

import base64
import json
import struct
from datetime import datetime, timezone
from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest
from pulsar import schema as ps
from pyspark.errors import AnalysisException

from ledgerlake.api import typed
from tests.decode.protobuf_schemas import protobuf
from tests.live.pipelines import run_once

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]


class Color(Enum):
    red = 1
    blue = 2


class Inner(ps.Record):
    x = ps.Integer()


class Order(ps.Record):
    id = ps.Long(required=True)
    name = ps.String()
    price = ps.Double()
    rate = ps.Float()
    paid = ps.Boolean()
    tags = ps.Array(ps.String())
    counts = ps.Map(ps.Integer())
    inner = Inner()


class WiderOrder(ps.Record):
    _avro_namespace = None
    id = ps.Long(required=True)
    name = ps.String()
    price = ps.Double()
    rate = ps.Float()
    paid = ps.Boolean()
    tags = ps.Array(ps.String())
    counts = ps.Map(ps.Integer())
    inner = Inner()
    note = ps.String(required_default=True)


WiderOrder.__name__ = "Order"


def order(kind: Any, number: int, **more: Any) -> Any:
    return kind(
        id=number,
        name=f"n{number}",
        price=number / 2,
        rate=0.5,
        paid=True,
        tags=["a", "b"],
        counts={"k": number},
        inner=Inner(x=number),
        **more,
    )


def as_row(number: int) -> dict[str, Any]:
    return {
        "id": number, "name": f"n{number}", "price": number / 2, "rate": 0.5, "paid": True,
        "tags": ["a", "b"], "counts": {"k": number}, "inner": {"x": number},
    }  # fmt: skip


class Primitive(ps.Schema):
    """One of pulsar-client's schema types for which it has no class of its own, and which it does
    not register.
    """

    def __init__(self, name: str, form: str) -> None:
        super().__init__(object, getattr(ps.schema._pulsar.SchemaType, name), "", name)
        self.name = name
        self._form = form

    def encode(self, obj: Any) -> bytes:
        return struct.pack(self._form, obj)


def send(runtime: Runtime, topic: str, schema: Any, values: Iterable[Any], **options: Any) -> None:
    producer = runtime.client().create_producer(topic, schema=schema, **options)
    for value in values:
        producer.send(value)
    producer.close()


def register(
    runtime: Runtime, topic: str, kind: str, definition: str, properties: dict[str, str]
) -> None:
    """A schema by REST, for the kinds that pulsar-client for Python cannot register."""
    name = topic.replace("persistent://", "schemas/")
    body = {"type": kind, "schema": definition, "properties": properties}
    runtime.admin("POST", name, "/schema", body)


def read_typed(runtime: Runtime, spark: SparkSession, topics: str, **options: str) -> DataFrame:
    all_options = {"service.url": runtime.service_url, "topics": topics, "schema": "auto"} | options
    return (
        spark.read.format("ledgerlake")
        .options(**all_options)
        .load()
        .orderBy("topic", "ledger_id", "entry_id")
    )


def values(frame: DataFrame) -> list[Any]:
    row_values = [row["value"] for row in frame.collect()]
    return [
        value.asDict(recursive=True) if hasattr(value, "asDict") else value for value in row_values
    ]


@pytest.mark.parametrize("kind", [ps.JsonSchema, ps.AvroSchema])
def test_records_of_two_versions_in_one_topic_become_columns(
    runtime: Runtime, spark: SparkSession, kind: Any
) -> None:
    topic = runtime.topic()
    send(runtime, topic, kind(Order), [order(Order, 1)])
    before = read_typed(runtime, spark, topic)
    send(runtime, topic, kind(WiderOrder), [order(WiderOrder, 2, note="new")])
    after = read_typed(runtime, spark, topic)
    assert values(before) == [as_row(1), as_row(2)], (
        "a query reads by the schema that was the newest when it was made"
    )
    assert values(after) == [as_row(1) | {"note": None}, as_row(2) | {"note": "new"}]
    assert after.where("value.price > 0.5 and value.inner.x = 2").count() == 1


def test_a_stream_reads_typed_values_and_bad_ones_are_rejects(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    send(runtime, topic, ps.AvroSchema(Order), [order(Order, 1)])
    send(runtime, topic, ps.BytesSchema(), [b"\xff\xff"])
    send(runtime, topic, ps.AvroSchema(Order), [order(Order, 3)])
    options = {
        "service.url": runtime.service_url,
        "topic": topic,
        "schema": "auto",
        "startingOffsets": "earliest",
    }
    stream = spark.readStream.format("ledgerlake").options(**options).load()
    query = (
        stream.writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .option("path", str(tmp_path / "table"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    rows = spark.read.parquet(str(tmp_path / "table")).orderBy("ledger_id", "entry_id").collect()
    assert [(row.value and row.value.id, row.reject_reason, row.value_bytes) for row in rows] == [
        (1, None, None),
        (None, "undecodable_value", bytearray(b"\xff\xff")),
        (3, None, None),
    ]


@pytest.mark.parametrize(
    ("name", "form", "good", "column"),
    [
        ("INT8", ">b", [-1, 5], "tinyint"),
        ("INT16", ">h", [-300, 5], "smallint"),
        ("INT32", ">i", [-(2**31), 5], "int"),
        ("INT64", ">q", [2**60, 5], "bigint"),
        ("FLOAT", ">f", [0.5, -1.0], "float"),
        ("DOUBLE", ">d", [0.1, -1.0], "double"),
    ],
)
def test_numbers(
    runtime: Runtime, spark: SparkSession, name: str, form: str, good: list[Any], column: str
) -> None:
    topic = runtime.topic()
    register(runtime, topic, name, "", {})
    send(runtime, topic, Primitive(name, form), good)
    send(runtime, topic, ps.BytesSchema(), [b"abc"])
    frame = read_typed(runtime, spark, topic)
    assert dict(frame.dtypes)["value"] == column
    assert values(frame) == [*good, None]
    assert [row.reject_reason for row in frame.collect()] == [None, None, "undecodable_value"]


def test_strings_and_bytes(runtime: Runtime, spark: SparkSession) -> None:
    text, raw = runtime.topic(), runtime.topic()
    send(runtime, text, ps.StringSchema(), ["grüße", ""])
    send(runtime, raw, ps.BytesSchema(), [b"\xff"])
    assert values(read_typed(runtime, spark, text, includeValueBytes="true")) == ["grüße", ""]
    assert values(read_typed(runtime, spark, raw)) == [bytearray(b"\xff")]


@pytest.mark.parametrize(
    ("kind", "payload", "expected"),
    [
        ("BOOLEAN", b"\1", True),
        ("TIMESTAMP", struct.pack(">q", 1_777_626_000_123), datetime(2026, 5, 1, 9, 0, 0, 123000)),
        ("LOCAL_DATE", struct.pack(">q", 1), datetime(1970, 1, 2).date()),
        ("LOCAL_DATE_TIME", struct.pack(">qq", 1, 10**9), datetime(1970, 1, 2, 0, 0, 1)),
    ],
)
def test_kinds_that_only_java_writes(
    runtime: Runtime, spark: SparkSession, kind: str, payload: bytes, expected: Any
) -> None:
    topic = runtime.topic()
    register(runtime, topic, kind, "", {})
    send(runtime, topic, ps.BytesSchema(), [payload])
    (value,) = values(read_typed(runtime, spark, topic))
    if kind == "TIMESTAMP":
        value, expected = value.astimezone(timezone.utc), expected.replace(tzinfo=timezone.utc)
    assert value == expected


@pytest.mark.parametrize("encoding", ["INLINE", "SEPARATED"])
def test_key_and_value(runtime: Runtime, spark: SparkSession, encoding: str) -> None:
    topic = runtime.topic()
    record = {"type": "record", "name": "V", "fields": [{"name": "a", "type": "int"}]}
    properties = {
        "kv.encoding.type": encoding, "key.schema.name": "k", "key.schema.type": "STRING", "key.schema.properties": "{}",
        "value.schema.name": "v", "value.schema.type": "JSON", "value.schema.properties": "{}",
    }  # fmt: skip
    definition = json.dumps({"key": "", "value": record})
    register(runtime, topic, "KEY_VALUE", definition, properties)
    producer = runtime.client().create_producer(topic)
    value = b'{"a": 7}'
    if encoding == "INLINE":
        producer.send(struct.pack(">i", 1) + b"k" + struct.pack(">i", len(value)) + value)
    else:
        producer.send(value, partition_key=base64.b64encode(b"k").decode())
    producer.close()
    key = "k" if encoding == "INLINE" else base64.b64encode(b"k").decode()
    assert values(read_typed(runtime, spark, topic)) == [{"key": key, "value": {"a": 7}}]


def test_protobuf_by_its_descriptor(runtime: Runtime, spark: SparkSession) -> None:
    topic = runtime.topic()
    register(runtime, topic, "PROTOBUF_NATIVE", protobuf("shop.Order").definition.decode(), {})
    send(runtime, topic, ps.BytesSchema(), [b"\x08\x05\x12\x05\x0a\x01s\x10\x03\x18\x01", b"\xff"])
    good, bad = values(read_typed(runtime, spark, topic))
    assert (int(good["id"]), good["items"], good["color"], bad) == (
        5,
        [{"sku": "s", "count": 3}],
        "BLUE",
        None,
    )


def test_topics_of_different_schemas_are_refused_or_read_as_bytes(
    runtime: Runtime, spark: SparkSession
) -> None:
    text, number = runtime.topic(), runtime.topic()
    send(runtime, text, ps.StringSchema(), ["x"])
    register(runtime, number, "INT32", "", {})
    send(runtime, number, Primitive("INT32", ">i"), [1])
    with pytest.raises(AnalysisException, match="have different schemas"):
        read_typed(runtime, spark, f"{text},{number}")
    frame = read_typed(runtime, spark, f"{text},{number}", allowDifferentTopicSchemas="true")
    assert values(frame) == [bytearray(b"x"), bytearray(b"\0\0\0\1")]


def test_the_table_keeps_bytes_and_is_read_by_schema_later(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    send(runtime, topic, ps.AvroSchema(Order), [order(Order, 1)])
    send(runtime, topic, ps.BytesSchema(), [b"\xff\xff"])
    config = run_once(spark, runtime.config(tmp_path, topic))
    send(runtime, topic, ps.AvroSchema(WiderOrder), [order(WiderOrder, 2, note="new")])
    run_once(spark, runtime.config(tmp_path, topic))
    table = spark.read.format("delta").load(config.delta.path)
    rows = typed(table, config).orderBy("ledger_id", "entry_id").collect()
    assert [row.value and (row.value.id, row.value.note) for row in rows] == [
        (1, None),
        None,
        (2, "new"),
    ]
    assert [row.reject_reason for row in rows] == [None, "undecodable_value", None]
    assert rows[1].value_bytes == b"\xff\xff"
    assert [row.value_bytes is None for row in typed(table, config, keep_bytes=True).collect()] == [
        False
    ] * 3


def test_a_schema_that_no_column_can_hold_says_what_to_do(
    runtime: Runtime, spark: SparkSession
) -> None:
    topic = runtime.topic()
    node = {
        "type": "record",
        "name": "N",
        "fields": [{"name": "n", "type": ["null", "N"], "default": None}],
    }
    register(runtime, topic, "AVRO", json.dumps(node), {})
    with pytest.raises(
        AnalysisException, match=r"holds itself, which no column can; read it with schema = bytes"
    ):
        read_typed(runtime, spark, topic)
