"""The plan of a micro-batch: ingest, stateful, finalize. The driver commits its result (see
``commit``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.operators.finalize import finalize
from ledgerlake.operators.ingest_source import ingest
from ledgerlake.operators.results import RESULT_SCHEMA, BatchSettings
from ledgerlake.operators.stateful import stateful

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from ledgerlake.operators.results import TaskSettings


def plan(spark: SparkSession, source_options: dict[str, str], settings: TaskSettings) -> DataFrame:
    """Return a stream with one row for each topic partition of a micro-batch: its
    ``PartitionResult``, for ``result_from_json``.
    """
    ingested = ingest(spark, source_options, settings)
    settled = stateful(ingested, settings.limits, settings.delay, settings.options.client)
    return settled.mapInArrow(lambda rows: finalize(rows, settings, BatchSettings.of_this_task()), RESULT_SCHEMA)
