"""Tables of a configuration beside each other: matches, queries, functions and partitions, as
``deltalake`` and Polars read them.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from pulsar import schema as ps

from ledgerlake.api import parse_config
from ledgerlake.errors import CheckpointError, SetupError, TableError
from ledgerlake.pipeline.forget import forget_topic
from ledgerlake.pipeline.upkeep import keep_up
from ledgerlake.stored.places import Place
from ledgerlake.table import compaction, file_groups
from ledgerlake.table.vacuum import vacuum
from ledgerlake.verify.verify import Verdict, verify
from tests.live.pipelines import rejects_rows, run_once, running
from tests.live.test_schemas import send
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]


class Sale(ps.Record):
    id = ps.Long(required=True)
    country = ps.String()
    amount = ps.Double()


class Visit(ps.Record):
    page = ps.String()


POSITION = ("topic", "partition", "ledger_id", "entry_id", "batch_index")
COUNTRIES = ("de", "fr", None)


def sale(number: int) -> Sale:
    return Sale(id=number, country=COUNTRIES[number % 3], amount=number / 2)


def config(
    runtime: Runtime, folder: Path, topics: list[str], tables: list[dict[str, Any]], **delta: Any
) -> Any:
    """A configuration whose tables are below ``folder``, without a default table unless ``path`` is
    given.
    """
    data = runtime.config(folder, *topics)
    data["delta"] = {"rejects_path": str(folder / "rejects"), **delta}
    data["tables"] = [{**table, "path": str(folder / table["path"])} for table in tables]
    return data


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a table in the order of their positions, without ``pulsar``."""
    rows: list[dict[str, Any]] = DeltaTable(str(folder / name)).to_pyarrow_table().to_pylist()
    in_order = sorted(rows, key=lambda row: [(row.get("pulsar") or row)[name] for name in POSITION])
    return [{name: value for name, value in row.items() if name != "pulsar"} for row in in_order]


def publish(runtime: Runtime, topic: str, values: list[bytes], **options: Any) -> None:
    producer = runtime.client().create_producer(topic)
    for value in values:
        producer.send_async(value, lambda *_: None, **options)
    producer.flush()
    producer.close()


def test_a_message_is_in_each_table_that_takes_it_and_others_go_to_the_default(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    sales, visits, notes = (runtime.topic() for _ in range(3))
    local = sales.rpartition("/")[2]
    data = config(
        runtime,
        tmp_path,
        [sales, visits, notes],
        [
            {"path": "sales", "topics_pattern": f"{runtime.namespace}/{local}", "shape": "record"},
            {"path": "german", "schema": "Sale", "where": "country = 'de'", "shape": "record"},
            {"path": "visits", "schema": "Visit"},
            {"path": "urgent", "where": "properties['urgent'] = 'yes'"},
        ],
        path=str(tmp_path / "others"),
    )
    send(runtime, sales, ps.AvroSchema(Sale), [sale(number) for number in range(6)])
    send(runtime, visits, ps.JsonSchema(Visit), [Visit(page="/a"), Visit(page="/b")])
    publish(runtime, notes, [b"calm"])
    publish(runtime, notes, [b"hot"], properties={"urgent": "yes"})
    done = run_once(spark, data)
    assert [row["id"] for row in rows_of(tmp_path, "sales")] == list(range(6))
    assert rows_of(tmp_path, "german") == [
        {"id": number, "country": "de", "amount": number / 2} for number in (0, 3)
    ]
    assert [json.loads(row["value"]) for row in rows_of(tmp_path, "visits")] == [
        {"page": "/a"},
        {"page": "/b"},
    ]
    assert [row["value"] for row in rows_of(tmp_path, "urgent")] == [b"hot"]
    assert [row["value"] for row in rows_of(tmp_path, "others")] == [b"calm"]
    assert rejects_rows(tmp_path) == []
    verdict = verify(done)
    assert verdict.clean
    assert verdict.messages == 12


def test_without_a_default_table_what_no_table_takes_is_a_reject(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = config(runtime, tmp_path, [topic], [{"path": "a", "where": "key = 'a'"}])
    publish(runtime, topic, [b"1"], partition_key="a")
    publish(runtime, topic, [b"2", b"3"], partition_key="b")
    done = run_once(spark, data)
    assert [row["value"] for row in rows_of(tmp_path, "a")] == [b"1"]
    assert [row["reason"] for row in rejects_rows(tmp_path)] == ["no_table"] * 2
    assert verify(done).clean


def test_topics_have_tables_of_their_own_that_are_made_when_they_come(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    base = runtime.topic()
    data = runtime.config(tmp_path, base)
    data["source"] = {
        **{name: value for name, value in data["source"].items() if name != "topics"},
        "topics_pattern": f"{base}-.*",
    }
    data["delta"] = {"rejects_path": str(tmp_path / "rejects"), "path": str(tmp_path / "others")}
    data["tables"] = [{"path": str(tmp_path / "lake" / "{topic}")}]
    publish(runtime, f"{base}-a", [b"1"])
    with running(spark, data):
        wait_until((tmp_path / "lake" / f"{base.rpartition('/')[2]}-a" / "_delta_log").exists)
        publish(runtime, f"{base}-b", [b"2"])
        publish(runtime, f"{base}-a", [b"3"])
        name = tmp_path / "lake" / f"{base.rpartition('/')[2]}-b"
        wait_until(lambda: (name / "_delta_log").exists() and DeltaTable(str(name)).count() == 1)
    run_once(spark, data)
    found = {
        path.name[-1]: DeltaTable(str(path)).to_pyarrow_table()
        for path in (tmp_path / "lake").iterdir()
    }
    assert {name: sorted(table["value"].to_pylist()) for name, table in found.items()} == {
        "a": [b"1", b"3"],
        "b": [b"2"],
    }
    assert verify(parse_config(data)).clean
    assert [kept.table.rpartition("/")[2][-1] for kept in keep_up(parse_config(data))] == [
        "a",
        "b",
        "s",
        "s",
    ]


def test_a_query_makes_the_rows(runtime: Runtime, spark: SparkSession, tmp_path: Path) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic)
    data["delta"] |= {
        "shape": "record",
        "sql": "select id, upper(country) as land, amount * 100 as cents, pulsar.key as key\nfrom "
        "messages where amount >= 1",
    }
    send(runtime, topic, ps.AvroSchema(Sale), [sale(number) for number in range(5)])
    done = run_once(spark, data)
    assert rows_of(tmp_path, "messages") == [
        {"id": 2, "land": None, "cents": 100.0, "key": None},
        {"id": 3, "land": "DE", "cents": 150.0, "key": None},
        {"id": 4, "land": "FR", "cents": 200.0, "key": None},
    ]
    verdict = verify(done)
    assert (verdict.clean, verdict.left_out, verdict.messages) == (True, 2, 3)
    assert (
        spark.read.format("delta")
        .load(str(tmp_path / "messages"))
        .where("pulsar.entry_id >= 0")
        .count()
        == 3
    )


def test_json_without_a_schema_becomes_columns_by_a_query(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic)
    data["delta"] |= {
        "shape": "record",
        "sql": "select decode(value)->>'$.who' as who, cast(decode(value)->>'$.n' as int) as n "
        "from messages",
    }
    publish(
        runtime,
        topic,
        [b'{"who": "a", "n": 1}', b'{"who": "b", "n": "two"}', b"\xff", b'{"who": "c"}'],
    )
    done = run_once(spark, data)
    assert rows_of(tmp_path, "messages") == [{"who": "a", "n": 1}, {"who": "c", "n": None}]
    rejects = rejects_rows(tmp_path)
    assert [row["reason"] for row in rejects] == ["transform_failed"] * 2
    assert "Could not convert string 'two'" in rejects[0]["detail"]
    assert verify(done).clean
    # Another query may add columns, and not change the type of one.
    data["delta"]["sql"] = "select decode(value)->>'$.who' as who, 1 as more from messages"
    publish(runtime, topic, [b'{"who": "d"}'])
    run_once(spark, data)
    assert rows_of(tmp_path, "messages")[-1] == {"who": "d", "n": None, "more": 1}
    data["delta"]["sql"] = "select octet_length(value) as who from messages"
    publish(runtime, topic, [b"x"])
    with pytest.raises(
        SetupError, match=r"the column who of \[delta\] is int64, and the table has it as string"
    ):
        run_once(spark, data)


def test_a_query_that_does_not_fit_the_schema_ends_the_start_with_column_and_line(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic)
    data["delta"] |= {"shape": "record", "sql": "select id,\n  contry\nfrom messages"}
    send(runtime, topic, ps.AvroSchema(Sale), [sale(1)])
    with pytest.raises(
        SetupError, match=r'"contry" not found.*Candidate bindings: "country".*line 2'
    ):
        run_once(spark, data)


def test_a_function_makes_the_rows(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic)
    data["delta"] |= {"shape": "record", "function": "tests.live.test_many_tables:cheap_sales"}
    send(runtime, topic, ps.AvroSchema(Sale), [sale(number) for number in range(8)])
    done = run_once(spark, data)
    assert rows_of(tmp_path, "messages") == [
        {"id": number, "double": number * 2} for number in range(4)
    ]
    assert verify(done).left_out == 4
    data["delta"]["function"] = "tests.live.test_many_tables:turned_around"
    send(runtime, topic, ps.AvroSchema(Sale), [sale(1), sale(2)])
    run_once(spark, data)
    # Single rows are in order, so each of them comes through.
    assert len(rows_of(tmp_path, "messages")) == 6


def cheap_sales(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Keep the cheap ones, with another column."""
    kept = batch.filter(pc.less(batch["amount"], 2))
    columns = [kept["id"], pc.multiply(kept["id"], 2), kept["pulsar"]]
    return pa.RecordBatch.from_arrays(columns, names=["id", "double", "pulsar"])


def turned_around(batch: pa.RecordBatch) -> pa.RecordBatch:
    rows = pa.array(range(batch.num_rows - 1, -1, -1), pa.int64())
    return batch.select(["id", "pulsar"]).take(rows)


def test_partitions_are_by_columns_and_by_expressions(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic(partitions=2)
    data = config(
        runtime,
        tmp_path,
        [topic],
        [
            {"path": "by_land", "shape": "record", "partition_by": ["country"]},
            {
                "path": "by_day",
                "partition_by": ["date(broker_timestamp)", "octet_length(value) as size"],
            },
        ],
    )
    send(runtime, topic, ps.JsonSchema(Sale), [sale(number) for number in range(30)])
    run_once(spark, data)
    send(runtime, topic, ps.JsonSchema(Sale), [sale(number) for number in range(30, 40)])
    done = run_once(spark, data)
    assert verify(done).clean
    by_land = DeltaTable(str(tmp_path / "by_land"))
    assert by_land.metadata().partition_columns == ["country"]
    assert {
        str(row["partition.country"])
        for row in pa.table(by_land.get_add_actions(flatten=True)).to_pylist()
    } == {
        "de",
        "fr",
        "None",
    }
    expected = {
        land: [number for number in range(40) if COUNTRIES[number % 3] == land]
        for land in COUNTRIES
    }
    assert {
        land: sorted(row["id"] for row in rows_of(tmp_path, "by_land") if row["country"] == land)
        for land in COUNTRIES
    } == expected
    assert (
        sorted(pl.read_delta(str(tmp_path / "by_land")).filter(pl.col("country") == "fr")["id"])
        == expected["fr"]
    )
    assert spark.read.format("delta").load(str(tmp_path / "by_land")).where(
        "country is null"
    ).count() == len(expected[None])
    by_day = DeltaTable(str(tmp_path / "by_day"))
    assert by_day.metadata().partition_columns == ["broker_timestamp_date", "size"]
    rows = rows_of(tmp_path, "by_day")
    assert {row["broker_timestamp_date"] for row in rows} == {
        row["broker_timestamp"].date() for row in rows
    }
    assert all(row["size"] == len(row["value"]) for row in rows)
    assert abs((datetime.now(timezone.utc).date() - rows[0]["broker_timestamp_date"]).days) <= 1
    today = rows[0]["broker_timestamp_date"].isoformat()
    frame = (
        spark.read.format("delta")
        .load(str(tmp_path / "by_day"))
        .where(f"broker_timestamp_date = '{today}'")
    )
    assert frame.count() == sum(row["broker_timestamp_date"].isoformat() == today for row in rows)


def test_a_table_of_the_latest_has_one_row_for_each_key(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic(partitions=2)
    latest = {"mode": "latest", "shape": "record"}
    data = config(
        runtime,
        tmp_path,
        [topic],
        [
            {"path": "all"},
            {"path": "raw", "mode": "latest"},
            {"path": "typed", **latest},
            {
                "path": "query",
                **latest,
                "sql": "select id * 2 as twice, pulsar.key as name from messages where id >= 0",
            },
        ],
    )
    data["source"]["max_rows_per_trigger"] = 20
    expected: dict[str, int] = {}
    producer = runtime.client().create_producer(topic, schema=ps.AvroSchema(Sale))
    for number in range(120):
        key = f"k{number % 7}"
        producer.send_async(sale(number), lambda *_: None, partition_key=key)
        expected[key] = number
    producer.flush()
    bare = runtime.client().create_producer(topic)
    bare.send(None, partition_key="k3")
    bare.send(b"no key")
    bare.close()
    run_once(spark, data)
    producer.send(sale(500), partition_key="k5")
    producer.close()
    done = run_once(spark, data)
    del expected["k3"]
    expected["k5"] = 500
    for name in ("raw", "typed", "query"):
        rows = spark.read.format("delta").load(str(tmp_path / name))
        polars_rows = pl.read_delta(str(tmp_path / name))
        assert rows.count() == polars_rows.height == len(expected)
    typed = (
        spark.read.format("delta")
        .load(str(tmp_path / "typed"))
        .selectExpr("pulsar.key", "id")
        .collect()
    )
    assert {row.key: row.id for row in typed} == expected
    query = pl.read_delta(str(tmp_path / "query"))
    assert dict(zip(query["name"], query["twice"], strict=True)) == {
        key: value * 2 for key, value in expected.items()
    }
    assert [row["reason"] for row in rejects_rows(tmp_path)] == ["no_key"]
    assert len(rows_of(tmp_path, "all")) == 123
    verdict = verify(done)
    assert (verdict.clean, verdict.messages) == (True, 123 + 3 * len(expected))
    assert [kept.merged for kept in keep_up(done)][1:4] == [0, 0, 0]


def test_upkeep_merges_the_files_of_each_partition(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = config(
        runtime, tmp_path, [topic], [{"path": "t", "shape": "record", "partition_by": ["country"]}]
    )
    data["source"]["max_rows_per_trigger"] = 3
    send(
        runtime,
        topic,
        ps.JsonSchema(Sale),
        [sale(number) for number in range(36)],
        batching_enabled=False,
    )
    done = run_once(spark, data)
    before = rows_of(tmp_path, "t")
    files = len(DeltaTable(str(tmp_path / "t")).file_uris())
    assert keep_up(done)[0].merged > 0
    assert len(DeltaTable(str(tmp_path / "t")).file_uris()) == 3 < files
    after = rows_of(tmp_path, "t")
    assert sorted(after, key=str) == sorted(before, key=str)
    assert [row["id"] for row in after if row["country"] == "de"] == list(range(0, 36, 3))
    assert verify(done).clean


def test_a_clustered_table_is_so_for_spark_too_and_the_stream_goes_on_after_its_optimize(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = runtime.topic()
    clustered = {
        "path": "t",
        "shape": "record",
        "cluster_by": ["country", "pulsar.broker_timestamp"],
    }
    data = config(runtime, tmp_path, [topic], [clustered, {"path": "all"}])
    data["source"]["max_rows_per_trigger"] = 3
    send(
        runtime,
        topic,
        ps.JsonSchema(Sale),
        [sale(number) for number in range(36)],
        batching_enabled=False,
    )
    done = run_once(spark, data)
    monkeypatch.setattr(file_groups, "LAST_LEVEL", 0)
    monkeypatch.setattr(file_groups, "_CLUSTERED_BYTES", 1)
    monkeypatch.setattr(compaction, "_CLUSTER_BYTES", 1000)
    assert keep_up(done)[0].merged > 0
    assert verify(done).clean
    path = str(tmp_path / "t")
    detail = spark.sql(f"describe detail delta.`{path}`").first()
    assert detail is not None
    assert detail.clusteringColumns == ["country", "pulsar.broker_timestamp"]
    spark.sql(f"optimize delta.`{path}`")
    send(
        runtime,
        topic,
        ps.JsonSchema(Sale),
        [sale(number) for number in range(36, 40)],
        batching_enabled=False,
    )
    assert verify(run_once(spark, data)).clean
    assert sorted(row["id"] for row in rows_of(tmp_path, "t")) == list(range(40))
    assert spark.read.format("delta").load(path).where("country = 'de'").count() == len(
        range(0, 40, 3)
    )


def test_what_was_read_for_other_tables_and_topics_that_have_left_are_not_missing(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic, leaving = runtime.topic(), runtime.topic()
    of_b = {"path": "b", "where": "key = 'b'"}
    data = config(runtime, tmp_path, [topic, leaving], [of_b], path=str(tmp_path / "rest"))
    for name in (topic, leaving):
        publish(runtime, name, [b"1", b"2"])
        publish(runtime, name, [b"3"], partition_key="b")
    assert verify(run_once(spark, data)) == Verdict(messages=6)
    del data["tables"]
    data["source"]["topics"] = [topic]
    assert verify(parse_config(data)) == Verdict(messages=2, for_other_tables=1)
    publish(runtime, topic, [b"4"], partition_key="b")
    done = run_once(spark, data)
    assert verify(done) == Verdict(messages=3, for_other_tables=1)
    assert forget_topic(done, leaving) == [leaving]
    assert verify(run_once(spark, data)) == Verdict(messages=3, for_other_tables=1)


def test_a_table_that_is_partitioned_otherwise_is_refused(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = config(runtime, tmp_path, [topic], [{"path": "t", "partition_by": ["topic"]}])
    publish(runtime, topic, [b"1"])
    run_once(spark, data)
    data["tables"][0]["partition_by"] = ["partition"]
    publish(runtime, topic, [b"2"])
    with pytest.raises(
        TableError, match="is partitioned by topic, and partition_by says partition"
    ):
        run_once(spark, data)


def test_tables_that_change_before_a_batch_is_run_again_are_refused(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ledgerlake.pipeline.cursors import CursorKeeper

    topic = runtime.topic()
    data = config(runtime, tmp_path, [topic], [{"path": "a"}, {"path": "b", "where": "key = 'x'"}])
    publish(runtime, topic, [b"1"], partition_key="x")

    def killed(*_: Any) -> None:
        raise SetupError("killed")

    with monkeypatch.context() as changed:
        changed.setattr(CursorKeeper, "add", killed)
        with pytest.raises(SetupError, match="killed"):
            run_once(spark, data)
    changed_tables = {
        **data,
        "tables": [data["tables"][0], {**data["tables"][1], "where": "key = 'y'"}],
    }
    with pytest.raises(CheckpointError, match="is to be run again; set it back"):
        run_once(spark, changed_tables)
    run_once(spark, data)
    assert [row["value"] for row in rows_of(tmp_path, "b")] == [b"1"]


def test_tables_whose_log_has_checkpoints_of_version_2_by_spark_go_on(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic, names = runtime.topic(), ("latest", "clustered", "records", "rejects")
    tables: list[dict[str, Any]] = [
        {"path": "latest", "mode": "latest"},
        {"path": "clustered", "cluster_by": ["key"]},
        {"path": "records", "shape": "record"},
    ]
    data = config(runtime, tmp_path, [topic], tables)
    publish(runtime, topic, [b"1", b"2"], partition_key="a")
    publish(runtime, topic, [b"3"], partition_key="b")
    run_once(spark, data)
    for name in names:
        spark.sql(
            f"alter table delta.`{tmp_path / name}` set tblproperties "
            "('delta.checkpointPolicy' = 'v2', 'delta.checkpointInterval' = '1')"
        )
        spark.sql(f"alter table delta.`{tmp_path / name}` set tblproperties ('its' = 'own')")
        log = tmp_path / name / "_delta_log"
        last = max(file.name for file in log.glob("*.checkpoint.*-*"))
        for file in (*log.glob("*.json"), *log.glob("*.checkpoint.parquet")):
            if file.name < last[:20] or file.name == f"{last[:20]}.checkpoint.parquet":
                file.unlink()
    publish(runtime, topic, [b"4"], partition_key="a")
    done = run_once(spark, data)
    assert verify(done).clean
    for name, values in {
        "latest": [b"3", b"4"],
        "clustered": [b"1", b"2", b"3", b"4"],
        "records": [b"1", b"2", b"3", b"4"],
    }.items():
        rows = spark.read.format("delta").load(str(tmp_path / name)).select("value").collect()
        assert sorted(bytes(row.value) for row in rows) == values
    keep_up(done)
    for name in names:
        assert (
            vacuum(Place(str(tmp_path / name)), 1, overrules_table=True, dry_run=True).files == []
        )


assert "tests.live.test_many_tables" in sys.modules
