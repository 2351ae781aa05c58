"""Spark starts a query again with state variables that it did not have before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ledgerlake.operators.stage_rows import (
    STAGE_ROWS_DDL,
    RowKind,
    TaskReport,
    report_to_json,
    stage_row,
)
from ledgerlake.operators.stateful import Processor, set_up_state
from ledgerlake.wire.message_id import Position
from tests.operators.stage import SOURCE, Recorded, stage_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

    from ledgerlake.operators.stage_rows import StateSummary

pytestmark = pytest.mark.spark

NEW = ("schedule_blocks", "schedules")


class _Handle:
    """Gives the state variables except the variables of schedules."""

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


class Summaries(Recorded):
    """Gives a row for the summary."""

    def finish(self, summary: StateSummary) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"delayed": [summary.delayed_count]})


def run(spark: SparkSession, folder: Path, kind: type[Processor]) -> list[int]:
    """Run one micro-batch over a report; how many messages wait, by the summary that came out."""
    rows = spark.readStream.schema(STAGE_ROWS_DDL).parquet(str(folder / "in"))
    processor = kind(stage_settings(), Summaries)
    out = rows.groupBy("topic", "partition").transformWithStateInPandas(
        processor, "delayed bigint", "append", "none"
    )
    seen: list[int] = []
    query = (
        out.writeStream.option("checkpointLocation", str(folder / "checkpoint"))
        .foreachBatch(lambda batch, _: seen.extend(row.delayed for row in batch.collect()))
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
        assert run(spark, tmp_path, kind) == [0]
