"""Messages and rejects as streaming DataFrames, for sinks and transformations of the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.pandas.types import from_arrow_schema

from ledgerlake.decode import schema
from ledgerlake.errors import UsageError
from ledgerlake.operators.decoded_rows import RowOutput, open_rows
from ledgerlake.operators.ingest_source import ingest
from ledgerlake.operators.results import StageSettings
from ledgerlake.operators.stage_rows import STAGE_ROWS_DDL
from ledgerlake.operators.stateful import Processor, set_up_state, stateful

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from ledgerlake.options.config import Config


def messages(spark: SparkSession, config: Config) -> DataFrame:
    """Return a streaming DataFrame of complete, decoded messages with the table's columns, for any
    sink or transformation.

    Incomplete large messages and delayed messages are kept in the state of the query that uses the
    DataFrame. So that they are released in time, an idle topic has a micro-batch every second.
    Entries that cannot become messages are not in it, but in ``rejects``.

    Raises:
        UsageError: the configuration starts at a cursor, which such a stream does not have.
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
    if config.starting == "cursor":
        raise UsageError(
            "[source] starting is cursor, and messages() and rejects() have no cursor; set it to "
            "earliest, latest, an id or a time"
        )
    set_up_state(spark)
    settings = StageSettings(config.chunks.limits, config.delay.of_messages, config.source)
    rows = ingest(spark, config.source_options() | {"wakes": "always"}, settings)
    decoded = stateful(rows, Processor(settings, RowOutput(settings)), STAGE_ROWS_DDL)
    return decoded.mapInArrow(open_rows, from_arrow_schema(schema.VIEW))
