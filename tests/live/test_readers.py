"""The table in the hands of others: the same rows in every reader, and queries by time that open
few of its files.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import polars
import pytest
from deltalake import DeltaTable

from tests.live.pipelines import run_once

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]

COLUMNS = [
    "topic",
    "partition",
    "message_id",
    "broker_timestamp",
    "broker_index",
    "key",
    "is_null",
    "value",
]
BATCHES = 30
MESSAGES = 100


@pytest.fixture(scope="module")
def table(runtime: Runtime, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of many small commits."""
    folder = tmp_path_factory.mktemp("readers")
    topic = runtime.topic()
    producer = runtime.client().create_producer(topic, batching_enabled=False)
    for batch in range(BATCHES):
        for number in range(batch * MESSAGES, (batch + 1) * MESSAGES):
            producer.send_async(b"%d" % number, None, partition_key=f"k{number % 7}")
        producer.flush()
        # A fast machine stores hundreds of messages in one millisecond: no two batches share one.
        time.sleep(0.002)
    run_once(spark, runtime.config(folder, topic, max_rows_per_trigger=MESSAGES))
    return folder / "messages"


def in_order(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    row_tuples = [
        tuple(bytes(row[name]) if name == "value" else row[name] for name in COLUMNS)
        for row in rows
    ]
    return sorted(row_tuples, key=lambda row: int(row[4]))


def test_spark_deltalake_and_polars_read_the_same_rows(spark: SparkSession, table: Path) -> None:
    spark_rows = spark.read.format("delta").load(str(table)).select(*COLUMNS).toArrow().to_pylist()
    delta_rows = DeltaTable(str(table)).to_pyarrow_table(columns=COLUMNS).to_pylist()
    polars_rows = polars.read_delta(str(table), columns=COLUMNS).to_dicts()
    expected = in_order(delta_rows)
    assert [row[4] for row in expected] == list(range(BATCHES * MESSAGES))
    assert in_order(spark_rows) == expected
    assert in_order(polars_rows) == expected


def test_a_query_by_time_reads_few_files(spark: SparkSession, table: Path) -> None:
    files = len(DeltaTable(str(table)).file_uris())
    assert files >= BATCHES
    rows = spark.read.format("delta").load(str(table))
    (middle,) = (
        rows.where(f"broker_index = {BATCHES * MESSAGES // 2}").select("broker_timestamp").first()
    )
    until = middle + timedelta(milliseconds=1)
    by_time = rows.where(rows.broker_timestamp >= middle).where(rows.broker_timestamp < until)
    assert by_time.count() > 0
    assert len(by_time.inputFiles()) < 0.05 * files
    by_index = rows.where(f"broker_index between {MESSAGES} and {MESSAGES + 5}")
    assert by_index.count() == 6
    assert len(by_index.inputFiles()) < 0.05 * files
