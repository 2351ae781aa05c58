"""Upkeep beside a running pipeline, and beside delta-spark's deletions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from ledgerlake.decode import schema
from ledgerlake.options.config import parse_config
from ledgerlake.stored.places import Place
from ledgerlake.table.compaction import Compaction
from ledgerlake.verify.verify import verify
from tests.live.pipelines import (
    config_file,
    ledgerlake,
    publish_numbers,
    running,
    values,
    wait_for_rows,
)
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]


def merges_of(path: str) -> int:
    """How many commits of the table merged files."""
    return sum(commit.get("engineInfo") == "ledgerlake" for commit in DeltaTable(path).history())


def test_a_running_pipeline_merges_its_files_and_its_table_stays_exact_and_in_order(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic(2)
    data = runtime.config(tmp_path, topic)
    data["upkeep"] = {"interval": "200 ms", "busy_percent": 100}
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"file://{tmp_path}/iceberg",
    }
    data["iceberg"] = {"settings": catalog, "interval": "200 ms"}
    data["delta"]["iceberg_table"] = "shop.orders"
    path = data["delta"]["path"]
    with running(spark, data):
        publish_numbers(runtime, topic, range(20))
        wait_for_rows(tmp_path, 20)
        copy = (
            spark.readStream.format("delta")
            .load(path)
            .writeStream.format("memory")
            .queryName("copied")
            .start()
        )
        for number in range(1, 8):
            publish_numbers(runtime, topic, range(number * 20, (number + 1) * 20))
            wait_for_rows(tmp_path, (number + 1) * 20)
        wait_until(lambda: merges_of(path) > 0)
        publish_numbers(runtime, topic, range(160, 180))
        wait_for_rows(tmp_path, 180)
        copy.processAllAvailable()
        copy.stop()
    assert sorted(int(row.value) for row in spark.table("copied").collect()) == list(range(180)), (
        "a stream of the table"
    )
    assert sorted(values(tmp_path)) == list(range(180))
    assert verify(parse_config(data)).clean
    iceberg = load_catalog("default", **catalog).load_table("shop.orders")
    assert len(list(iceberg.snapshots())) > 1
    assert sorted(int(value) for value in iceberg.scan().to_arrow()["value"].to_pylist()) == list(
        range(180)
    )


def test_a_file_with_a_deletion_vector_of_delta_spark_is_left_and_its_rows_stay_deleted(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic)
    path = data["delta"]["path"]
    with running(spark, data):
        for number in range(9):
            publish_numbers(runtime, topic, range(number * 5, (number + 1) * 5), batch=5)
            wait_for_rows(tmp_path, (number + 1) * 5)
    spark.sql(
        f"alter table delta.`{path}` set tblproperties ('delta.enableDeletionVectors' = 'true')"
    )
    spark.sql(f"delete from delta.`{path}` where cast(cast(value as string) as int) = 42")
    assert Compaction(Place(path), schema.MESSAGES).run() == 8
    left = {int(row.value) for row in spark.read.format("delta").load(path).collect()}
    assert left == set(range(45)) - {42}
    verdict = verify(parse_config(data))
    assert (verdict.missing, verdict.duplicate) == (1, 0)


def test_the_command_merges_what_a_pipeline_without_upkeep_left(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic)
    data["upkeep"] = {"enabled": False}
    with running(spark, data):
        for number in range(9):
            publish_numbers(runtime, topic, range(number, number + 1))
            wait_for_rows(tmp_path, number + 1)
    result = ledgerlake("upkeep", config_file(tmp_path, data))
    assert result.returncode == 0, result.stderr
    assert "messages: 9 small files merged, 0 unused files removed" in result.stdout
    assert values(tmp_path) == list(range(9))
