"""Reads the state variables of a pipeline from its checkpoint, as of its last committed batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.errors import SetupError
from ledgerlake.operators.stateful import set_up_state
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.moved_state import former_place
from ledgerlake.pipeline.query_settings import STATE_FILES
from ledgerlake.runtime.hadoop import connect_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from ledgerlake.options.config import Config


def last_batch(config: Config) -> int | None:
    """Return the number of the last committed batch, for several reads of one state: a bucket could
    be gone between two.
    """
    return Checkpoint(config.checkpoint_place).log.last_committed()


def read_state(
    spark: SparkSession, config: Config, variable: str, batch_id: int | None = None
) -> DataFrame:
    """Return one state variable of a pipeline, as of its last committed batch.

    Args:
        batch_id: that of the last committed batch, for several reads of one batch.

    Raises:
        SetupError: there is no checkpoint of a pipeline that has run, or it has not run since the
            checkpoint was moved.
    """
    from pyspark.errors import PySparkException

    former = former_place(config.checkpoint_place)
    if former is not None:
        raise SetupError(
            f"the checkpoint {config.stream.checkpoint} was moved from {former}, and the pipeline "
            "has not run since; "
            "its next start makes its state readable: ledgerlake run CONFIG --once"
        )
    # Use a session of its own: queries of the caller's may have state files of another version.
    spark = spark.newSession()
    set_up_state(spark)
    connect_store(spark, config.checkpoint_place)
    spark.conf.set(STATE_FILES, str(Checkpoint(config.checkpoint_place).log.state_version()))
    # Reading state needs Spark's coordinator of state stores, which the manager of streams creates.
    _ = spark.streams.active
    reader = spark.read.format("statestore").option("stateVarName", variable)
    if batch_id is not None:
        reader = reader.option("batchId", batch_id)
    try:
        return reader.load(config.checkpoint_place.hadoop_uri)
    except PySparkException:
        raise SetupError(
            f"the checkpoint {config.checkpoint_place} holds no state; run the pipeline first"
        ) from None
