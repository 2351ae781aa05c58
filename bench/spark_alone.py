"""A streaming query in which nothing happens, in a process of its own: what Spark takes by itself,
and so what no pipeline on it gets below. ``bench.latency`` and ``bench.quiet`` run it beside the
pipeline.

    rows       a row a micro-batch from Spark's own source, into its noop sink; Python only starts
               the query
    stages     a source, a stateful stage, a stage of rows and ``foreachBatch``, all in Python as in
               the pipeline, with a row a micro-batch and no code of Ledgerlake's in them

The session and its settings are the pipeline's. The process writes a line when its first
micro-batch is committed, and goes on until it is ended.

python -m bench.spark_alone rows|stages TRIGGER_MS CHECKPOINT
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

KINDS = {"rows": "Spark, no Python stage", "stages": "Spark, the same stages"}
_POLL_S = 0.05


def start(kind: str, trigger_ms: int, checkpoint: Path, cache: Path) -> subprocess.Popen[bytes]:
    """Start the query in a process of its own."""
    command = [sys.executable, "-m", "bench.spark_alone", kind, str(trigger_ms), str(checkpoint)]
    environment = {**os.environ, "LEDGERLAKE_CACHE": str(cache)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )


def await_first(running: subprocess.Popen[bytes]) -> None:
    """Wait for the first micro-batch."""
    assert running.stdout is not None
    if not running.stdout.readline():
        raise SystemExit(f"Spark ended with {running.wait()} before its first micro-batch")


def main(kind: str, trigger_ms: str, checkpoint: str) -> None:
    from ledgerlake.operators.stateful import set_up_state
    from ledgerlake.pipeline.query_settings import settings_of
    from ledgerlake.runtime.session import start_session
    from ledgerlake.stored.places import Place

    spark = start_session("bench", "local[*,4]")
    set_up_state(spark)
    with settings_of(spark, Place(checkpoint), 1):
        flow = _rows(spark) if kind == "rows" else _stages(spark)
        writer = flow.option("checkpointLocation", checkpoint).trigger(
            processingTime=f"{trigger_ms} milliseconds"
        )
        query = writer.start()
    while query.lastProgress is None:
        time.sleep(_POLL_S)
    print("first", flush=True)
    query.awaitTermination()


def _rows(spark: SparkSession) -> Any:
    rows = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 1)
        .option("numPartitions", 1)
        .load()
    )
    return rows.writeStream.format("noop")


def _stages(spark: SparkSession) -> Any:
    spark.dataSource.register(_Counter)
    rows = spark.readStream.format(_Counter.name()).load()
    stateful = rows.groupBy("name").transformWithStateInPandas(
        _Nothing(), _Counter.SCHEMA, "append", "none"
    )
    return stateful.mapInArrow(_same, _Counter.SCHEMA).writeStream.foreachBatch(_collect)


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches


def _collect(rows: DataFrame, _batch_id: int) -> None:
    rows.collect()


class _Nothing(StatefulProcessor):
    """Reads a value of its state, and returns its rows."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._value = handle.getValueState("value", "value long")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        self._value.get()
        yield from rows

    def close(self) -> None:
        pass


class _Counter(DataSource):
    """A source with a row a micro-batch."""

    SCHEMA = "name string, number long"

    @classmethod
    def name(cls) -> str:
        return "ledgerlake-bench-counter"

    def schema(self) -> str:
        return self.SCHEMA

    def streamReader(self, schema: Any) -> _CounterReader:
        return _CounterReader()


class _CounterReader(DataSourceStreamReader):
    def __init__(self) -> None:
        self._number = 0

    def initialOffset(self) -> dict[str, int]:
        return {"number": 0}

    def latestOffset(self) -> dict[str, int]:
        self._number += 1
        return {"number": self._number}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(end["number"])]

    def read(self, partition: InputPartition) -> Iterator[tuple[str, int]]:
        yield "a", partition.value


if __name__ == "__main__":
    main(*sys.argv[1:])
