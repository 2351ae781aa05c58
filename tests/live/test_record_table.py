"""Tables of records: what pulsar-client's schema classes published, as columns that ``deltalake``
and Polars read.
"""

from __future__ import annotations

import contextlib
import time
import urllib.error
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from deltalake import DeltaTable
from pulsar import schema as ps

from ledgerlake.api import parse_config
from ledgerlake.errors import SetupError, TableError
from ledgerlake.verify.verify import verify
from ledgerlake.wire.entry import encode_entry, parse_entry
from tests.entries import metadata
from tests.live.pipelines import (
    config_file,
    ledgerlake,
    now_ms,
    publish_entries,
    rejects_rows,
    run_once,
    running,
)
from tests.live.test_schemas import Inner, Order, WiderOrder, order, send

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]


class Priced(ps.Record):
    id = ps.Long(required=True)
    price = ps.Integer()


class Named(ps.Record):
    id = ps.Long(required=True)
    price = ps.String()
    name = ps.String()


Priced.__name__ = Named.__name__ = "Item"


@pytest.fixture(scope="module")
def anything_goes(runtime: Runtime) -> Runtime:
    """The same broker with topics that take any version of a schema."""
    namespace = "public/records"
    with contextlib.suppress(urllib.error.HTTPError):
        runtime._call("PUT", f"namespaces/{namespace}")
    runtime._call("PUT", f"namespaces/{namespace}/schemaCompatibilityStrategy", "ALWAYS_COMPATIBLE")
    return replace(runtime, namespace=namespace)


def record_config(runtime: Runtime, folder: Path, *topics: str, **delta: Any) -> dict[str, Any]:
    data = runtime.config(folder, *topics)
    data["delta"] |= {"shape": "record", **delta}
    return data


def table_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows in the order of their positions, without ``pulsar``."""
    table = DeltaTable(data["delta"]["path"]).to_pyarrow_table()
    places = table["pulsar"].combine_chunks()
    order_of = table.append_column("ledger", places.field("ledger_id")).append_column(
        "entry", places.field("entry_id")
    )
    order_of = order_of.append_column("batch", places.field("batch_index"))
    rows = order_of.sort_by(
        [("ledger", "ascending"), ("entry", "ascending"), ("batch", "ascending")]
    )
    return list(
        rows.drop_columns(["pulsar", "ledger", "entry", "batch"]).to_pylist(
            maps_as_pydicts="strict"
        )
    )


def row_of(number: int, note: str | None = None) -> dict[str, Any]:
    return {
        "id": number,
        "name": f"n{number}",
        "price": number / 2,
        "rate": 0.5,
        "paid": True,
        "tags": ["a", "b"],
        "counts": {"k": number},
        "inner": {"x": number},
        "note": note,
    }


@pytest.mark.parametrize("kind", [ps.JsonSchema, ps.AvroSchema])
def test_fields_of_versions_that_alternate_are_columns(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, kind: Any
) -> None:
    topic = runtime.topic()
    data = record_config(runtime, tmp_path, topic)
    send(runtime, topic, kind(Order), [order(Order, number) for number in range(3)])
    run_once(spark, data)
    assert table_of(data) == [
        {k: v for k, v in row_of(number).items() if k != "note"} for number in range(3)
    ]
    send(runtime, topic, kind(WiderOrder), [order(WiderOrder, 3, note="new")])
    send(runtime, topic, kind(Order), [order(Order, 4)])
    send(runtime, topic, kind(WiderOrder), [order(WiderOrder, 5, note="too")])
    config = run_once(spark, data)
    notes = {3: "new", 5: "too"}
    assert table_of(data) == [row_of(number, notes.get(number)) for number in range(6)]
    assert verify(config).clean
    read = pl.read_delta(data["delta"]["path"]).filter(pl.col("id") > 3).sort("id")
    assert read["note"].to_list() == [None, "too"]
    assert (
        spark.read.format("delta")
        .load(data["delta"]["path"])
        .where("id = 4 and pulsar.topic is not null")
        .count()
        == 1
    )


def test_a_version_that_comes_while_the_pipeline_runs_adds_its_columns_before_its_rows(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = record_config(runtime, tmp_path, topic)
    data["upkeep"] = {"interval": "200 ms", "busy_percent": 100}
    with running(spark, data):
        for number in range(9):
            kind, more = (Order, {}) if number < 5 else (WiderOrder, {"note": f"{number}"})
            send(runtime, topic, ps.AvroSchema(kind), [order(kind, number, **more)])
            wait_for_rows_of_records(tmp_path, number + 1)
        time.sleep(1)
    assert table_of(data) == [
        row_of(number, f"{number}" if number >= 5 else None) for number in range(9)
    ]
    assert verify(parse_config(data)).clean


class Valued(ps.Record):
    value = ps.Double()


def test_a_topic_that_is_still_empty_makes_no_column(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    from tests.waiting import wait_until

    first = runtime.topic()
    second = f"{first}-later"
    data = record_config(runtime, tmp_path)
    del data["source"]["topics"]
    data["source"]["topics_pattern"] = f"{first.rpartition('/')[2]}(-later)?"
    send(runtime, first, ps.AvroSchema(Priced), [Priced(id=1, price=2)])
    with running(spark, data):
        wait_for_rows_of_records(tmp_path, 1)
        version = DeltaTable(data["delta"]["path"]).version()
        runtime.admin("PUT", second)
        # The micro-batch that only notes where the topic begins.
        wait_until(lambda: DeltaTable(data["delta"]["path"]).version() > version)
        send(runtime, second, ps.AvroSchema(Valued), [Valued(value=1.5)])
        wait_for_rows_of_records(tmp_path, 2)
    rows = [{name: row[name] for name in ("id", "price", "value")} for row in table_of(data)]
    assert sorted(rows, key=str) == [
        {"id": 1, "price": 2, "value": None},
        {"id": None, "price": None, "value": 1.5},
    ]
    assert rejects_rows(tmp_path) == []


def wait_for_rows_of_records(folder: Path, count: int) -> None:
    from tests.waiting import wait_until

    wait_until(lambda: DeltaTable(str(folder / "messages")).count() >= count)


def test_large_and_delayed_messages_are_records_too(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = record_config(runtime, tmp_path, topic)
    name = "x" * 6_000_000
    large = Order(
        id=1, name=name, price=0.5, rate=0.5, paid=True, tags=[], counts={}, inner=Inner(x=1)
    )
    send(
        runtime, topic, ps.AvroSchema(Order), [large], chunking_enabled=True, batching_enabled=False
    )
    producer = runtime.client().create_producer(topic, schema=ps.AvroSchema(Order))
    due_ms = now_ms() + 2000
    producer.send(order(Order, 2), deliver_at=due_ms)
    producer.close()
    run_once(spark, data)
    # The other one may be due by now.
    assert table_of(data)[0]["id"] == 1
    time.sleep(max(0.0, due_ms / 1000 - time.time()) + 0.1)
    run_once(spark, data)
    rows = table_of(data)
    assert [row["id"] for row in rows] == [1, 2]
    assert rows[0]["name"] == name
    pulsar = DeltaTable(data["delta"]["path"]).to_pyarrow_table()["pulsar"].to_pylist()
    assert sorted(row["chunk_count"] or 0 for row in pulsar)[-1] > 1
    (delayed,) = (row for row in pulsar if row["delivered_at"] is not None)
    assert delayed["delivered_at"] >= delayed["deliver_at"]


def test_topics_of_other_kinds_and_without_schemas_have_a_column_value(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = record_config(runtime, tmp_path, topic)
    producer = runtime.client().create_producer(topic)
    producer.send(b"\x00\xff", partition_key="k", properties={"a": "1"})
    producer.close()
    run_once(spark, data)
    assert table_of(data) == [{"value": b"\x00\xff"}]
    pulsar = DeltaTable(data["delta"]["path"]).to_pyarrow_table()["pulsar"].to_pylist()[0]
    assert (pulsar["key"], pulsar["properties"], pulsar["topic"]) == ("k", [("a", "1")], topic)


def test_a_message_that_does_not_fit_is_a_reject_with_all_that_it_had(
    anything_goes: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    runtime, topic = anything_goes, anything_goes.topic()
    data = record_config(runtime, tmp_path, topic)
    send(runtime, topic, ps.AvroSchema(Priced), [Priced(id=1, price=5)])
    run_once(spark, data)
    producer = runtime.client().create_producer(
        topic, schema=ps.AvroSchema(Named), batching_enabled=True, batching_max_publish_delay_ms=500
    )
    for number in (2, 3):
        named = Named(id=number, price=None if number == 3 else "dear", name=f"n{number}")
        producer.send_async(named, lambda *_: None, partition_key=f"k{number}")
    producer.flush()
    producer.close()
    config = run_once(spark, data)
    assert table_of(data) == [
        {"id": 1, "price": 5, "name": None},
        {"id": 3, "price": None, "name": "n3"},
    ]
    (reject,) = rejects_rows(tmp_path)
    assert (reject["reason"], reject["detail"]) == (
        "schema_mismatch",
        "price is string, and its column is int32",
    )
    assert reject["message_id"].endswith(":0")
    entry = parse_entry(reject["entry"])
    assert entry.metadata.partition_key == "k2"
    assert ps.AvroSchema(Named).decode(bytes(entry.payload)).name == "n2"
    assert verify(config).clean


def test_a_message_with_a_schema_version_that_no_broker_gave_is_a_reject(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = record_config(runtime, tmp_path, topic)
    send(runtime, topic, ps.AvroSchema(Priced), [Priced(id=1, price=5)])
    versions = [b"\x01", b"\xff" * 8, b"\x00" * 7 + b"\x63", b"a" * 20]
    # pulsar-client sends only versions that a broker gave.
    publish_entries(
        runtime,
        topic,
        [encode_entry(metadata(schema_version=version), b"x") for version in versions],
    )
    run_once(spark, data)
    assert table_of(data) == [{"id": 1, "price": 5}]
    assert [row["reason"] for row in rejects_rows(tmp_path)] == ["unknown_schema"] * len(versions)


def test_or_it_ends_the_stream_with_a_sentence(
    anything_goes: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    runtime, topic = anything_goes, anything_goes.topic()
    data = record_config(runtime, tmp_path, topic, on_mismatch="stop")
    send(runtime, topic, ps.JsonSchema(Priced), [Priced(id=1, price=5)])
    run_once(spark, data)
    send(runtime, topic, ps.JsonSchema(Named), [Named(id=2, price="dear", name="n")])
    with pytest.raises(
        SetupError, match=r"does not fit the table \(schema_mismatch: price is string"
    ):
        run_once(spark, data)
    assert [row["id"] for row in table_of(data)] == [1]
    run_once(spark, {**data, "delta": data["delta"] | {"on_mismatch": "reject"}})
    assert [row["reason"] for row in rejects_rows(tmp_path)] == ["schema_mismatch"]


def test_a_table_of_the_other_shape_is_refused(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = record_config(runtime, tmp_path / "a", topic)
    run_once(spark, data)
    other = runtime.config(tmp_path / "b", topic)
    other["delta"]["path"] = data["delta"]["path"]
    with pytest.raises(TableError, match=r"has another schema \(it lacks topic.*it has pulsar"):
        run_once(spark, other)
    run_once(spark, runtime.config(tmp_path / "c", topic))
    wrong = record_config(runtime, tmp_path / "d", topic, path=str(tmp_path / "c" / "messages"))
    with pytest.raises(TableError, match="has no column pulsar with all "):
        run_once(spark, wrong)


def test_a_column_of_the_users_own_stays_and_is_null(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = record_config(runtime, tmp_path, topic)
    send(runtime, topic, ps.JsonSchema(Priced), [Priced(id=1, price=5)])
    run_once(spark, data)
    spark.sql(f"alter table delta.`{data['delta']['path']}` add columns (checked boolean)")
    send(runtime, topic, ps.JsonSchema(Priced), [Priced(id=2, price=6)])
    run_once(spark, data)
    assert [(row["id"], row["checked"]) for row in table_of(data)] == [(1, None), (2, None)]
    assert ledgerlake("verify", config_file(tmp_path, data)).returncode == 0
