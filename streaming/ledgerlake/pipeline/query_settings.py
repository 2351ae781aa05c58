"""Spark's settings for one query. Spark copies them when the query starts, so other queries of the
session keep their own.

checkpoint files   in a local checkpoint they are renamed by the JVM; Hadoop's default there starts
                   eight processes for each. Hadoop keeps a checksum of each file there, so Spark
                   keeps none of state files: each is two more files, and each file starts a process
state files        of the version that the checkpoint has (see ``pipeline.spark_log``)
shuffles           Spark does not compare what a repeated task hands to the stateful stage with what
                   it did before: the files have other names, so they never agree, and Spark would
                   end the query. No comparison is needed: each row comes from one run of a task,
                   and the driver checks that each topic partition has one result
state partitions   at most as many as keys, since each costs about a tenth of a second per
                   micro-batch, also if it is empty
code generation    off: Spark sees a few rows of each micro-batch, and generating code for them
                   costs more than they do
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ledgerlake.pipeline.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from ledgerlake.stored.places import Place

STATE_FILES = "spark.sql.streaming.stateStore.checkpointFormatVersion"
_LOCAL_CHECKPOINT = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
}
_SHUFFLES = {
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "false",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "false",
}
_FEW_ROWS = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
_STATE_PARTITIONS = "spark.sql.shuffle.partitions"


@contextlib.contextmanager
def settings_of(spark: SparkSession, checkpoint: Place, most_keys: int | None) -> Iterator[None]:
    """Set the settings that a query needs for its checkpoint and its keys; start the query inside
    this context.

    Args:
        most_keys: how many keys its state can have; None if that is not known.
    """
    settings = {STATE_FILES: str(Checkpoint(checkpoint).log.state_version()), **_SHUFFLES}
    unless_set = _FEW_ROWS | (_LOCAL_CHECKPOINT if checkpoint.is_local else {})
    settings |= {
        name: value for name, value in unless_set.items() if spark.conf.get(name, None) is None
    }
    if most_keys is not None:
        settings[_STATE_PARTITIONS] = str(
            min(int(spark.conf.get(_STATE_PARTITIONS) or 1), most_keys)
        )
    before = {name: spark.conf.get(name, None) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, old in before.items():
            spark.conf.unset(name) if old is None else spark.conf.set(name, old)
