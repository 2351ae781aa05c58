"""Messages and rejects as streaming DataFrames, for sinks and transformations that are not ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.decode import schema
from ledgerlake.operators.messages import complete_messages
from ledgerlake.operators.stateful import set_up_state
from ledgerlake.publish.datasource import LedgerlakeDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from ledgerlake.options.config import Config


def messages(spark: SparkSession, config: Config) -> DataFrame:
    """A streaming DataFrame of whole, decoded messages with the table's columns, for any sink or
    transformation.

    Large messages are put together, and delayed ones wait, in the state of whatever query this
    becomes a part of; so that they leave it in time, an idle topic still has a micro-batch every
    second. What cannot become a message is not in it: ``rejects`` streams that.
    """
    return _whole(spark, config).where("reject_reason is null").select(*schema.MESSAGES.names)


def rejects(spark: SparkSession, config: Config) -> DataFrame:
    """A streaming DataFrame of what ``messages`` leaves out: position, reason, and the whole entry
    in ``value``.
    """
    return _whole(spark, config).where("reject_reason is not null")


def _whole(spark: SparkSession, config: Config) -> DataFrame:
    spark.dataSource.register(LedgerlakeDataSource)
    set_up_state(spark)
    bundles = (
        spark.readStream.format("ledgerlake")
        .options(**config.source_options() | {"view": "bundles", "wakes": "always"})
        .load()
    )
    return complete_messages(bundles, config.source, config.chunks.limits, config.delay.options)
