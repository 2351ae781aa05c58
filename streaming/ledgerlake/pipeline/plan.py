"""What a micro-batch runs: ingest, stateful, finalize. The driver commits what comes out (see
``commit``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.operators.facts import FACT_SCHEMA, BatchSettings
from ledgerlake.operators.finalize import finalize
from ledgerlake.operators.ingest_source import ingest
from ledgerlake.operators.stateful import stateful

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from ledgerlake.operators.facts import TaskSettings


def plan(spark: SparkSession, source_options: dict[str, str], settings: TaskSettings) -> DataFrame:
    """A stream with one row for each topic partition of a micro-batch: what its tasks wrote, as
    ``fact_from_json`` reads it.
    """
    ingested = ingest(spark, source_options, settings)
    settled = stateful(ingested, settings.limits, settings.delay, settings.options.client)
    return settled.mapInArrow(lambda rows: finalize(rows, settings, BatchSettings.of_this_task()), FACT_SCHEMA)
