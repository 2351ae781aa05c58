"""Messages and rejects as streaming DataFrames, for sinks and transformations of the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.decode import schema
from ledgerlake.operators.decoded_stream import complete_messages
from ledgerlake.operators.stateful import set_up_state
from ledgerlake.publish.datasource import LedgerlakeDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from ledgerlake.options.config import Config


def messages(spark: SparkSession, config: Config) -> DataFrame:
    """Return a streaming DataFrame of complete, decoded messages with the table's columns, for any
    sink or transformation.

    Incomplete large messages and delayed messages are kept in the state of the query that uses the
    DataFrame. So that they are released in time, an idle topic has a micro-batch every second.
    Entries that cannot become messages are not in it, but in ``rejects``.
    """
    return (
        _messages_and_rejects(spark, config)
        .where("reject_reason is null")
        .select(*schema.MESSAGES.names)
    )


def rejects(spark: SparkSession, config: Config) -> DataFrame:
    """Return a streaming DataFrame of the rejects: position, reason, and the entry in ``value``."""
    return _messages_and_rejects(spark, config).where("reject_reason is not null")


def _messages_and_rejects(spark: SparkSession, config: Config) -> DataFrame:
    spark.dataSource.register(LedgerlakeDataSource)
    set_up_state(spark)
    bundles = (
        spark.readStream.format("ledgerlake")
        .options(**config.source_options() | {"view": "bundles", "wakes": "always"})
        .load()
    )
    return complete_messages(bundles, config.source, config.chunks.limits, config.delay.options)
