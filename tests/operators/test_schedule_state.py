"""Spark starts a query again with state variables that it did not have before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ledgerlake.assembly.rules import Limits
from ledgerlake.client.cluster import ClientSettings
from ledgerlake.operators.stage_rows import (
    STAGE_ROWS_DDL,
    RowKind,
    TaskReport,
    report_to_json,
    stage_row,
)
from ledgerlake.operators.stateful import Processor, set_up_state
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.wire.message_id import Position
from tests.operators.stage import SOURCE

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

pytestmark = pytest.mark.spark

NEW = ("schedule_blocks", "schedules")


class _Handle:
    """Gives the state variables without those of schedules."""

    def __init__(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle

    def getMapState(self, name: str, *schemas: str) -> object:
        return None if name in NEW else self._handle.getMapState(name, *schemas)

    def getValueState(self, name: str, *schemas: str) -> object:
        return self._handle.getValueState(name, *schemas)


class FormerProcessor(Processor):
    """The processor without the state variables of schedules."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(_Handle(handle))


def run(spark: SparkSession, folder: Path, kind: type[Processor]) -> list[str]:
    """Run one micro-batch over a report; the kinds of rows that came out."""
    rows = spark.readStream.schema(STAGE_ROWS_DDL).parquet(str(folder / "in"))
    processor = kind(Limits(), DelayOptions(), ClientSettings("pulsar://nowhere:1"))
    out = rows.groupBy("topic", "partition").transformWithStateInPandas(
        processor, STAGE_ROWS_DDL, "append", "none"
    )
    seen: list[str] = []
    query = (
        out.writeStream.option("checkpointLocation", str(folder / "checkpoint"))
        .foreachBatch(lambda batch, _: seen.extend(row.kind for row in batch.collect()))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return seen


def test_a_checkpoint_without_the_variables_of_schedules_goes_on(
    spark: SparkSession, tmp_path: Path
) -> None:
    spark = spark.newSession()
    set_up_state(spark)
    spark.conf.set("spark.sql.shuffle.partitions", "1")
    (tmp_path / "in").mkdir()
    for number, kind in enumerate((FormerProcessor, Processor)):
        report = TaskReport(Position(1, number), 1_700_000_000_000, {}, [])
        row = stage_row(SOURCE, RowKind.REPORT, header=report_to_json(report))
        pq.write_table(pa.Table.from_batches([row]), tmp_path / "in" / f"{number}.parquet")
        assert run(spark, tmp_path, kind) == ["summary"]
