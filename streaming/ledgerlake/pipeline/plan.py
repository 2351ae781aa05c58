"""The plan of a micro-batch: ingest, then the stateful stage, which writes its outcomes. The driver
commits the result (see ``commit``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.operators.ingest_source import ingest
from ledgerlake.operators.outcome_files import FileOutput
from ledgerlake.operators.results import RESULT_SCHEMA
from ledgerlake.operators.stateful import Processor, stateful

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from ledgerlake.operators.results import TaskSettings


def plan(spark: SparkSession, source_options: dict[str, str], settings: TaskSettings) -> DataFrame:
    """Return a stream of rows of ``RESULT_SCHEMA``, which have the ``PartitionResult`` of each
    topic partition of a micro-batch.
    """
    ingested = ingest(spark, source_options, settings)
    return stateful(ingested, Processor(settings, FileOutput(settings)), RESULT_SCHEMA)
