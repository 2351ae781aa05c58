"""Which of the messages that repeat are paused, in a pipeline's state, as of its last committed
batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from ledgerlake.inspect.delayed_counts import source_of, stored_cancels
from ledgerlake.inspect.stored_state import last_batch, read_state
from ledgerlake.schedules.schedules import waiting_from_json

if TYPE_CHECKING:
    from collections.abc import Collection

    from pyspark.sql import SparkSession

    from ledgerlake.decode.messages import TopicPartition
    from ledgerlake.options.config import Config


def paused_since_ms(
    spark: SparkSession, config: Config, schedule_ids: Collection[str]
) -> dict[tuple[TopicPartition, str], int]:
    """Return since when messages that repeat are paused, by topic partition and id, in milliseconds
    since 1970: by a pause of their own or of all. Those that are not paused are left out.

    Raises:
        SetupError: there is no checkpoint of a pipeline that has run.
        OffsetError: a newer release wrote it.
    """
    batch_id = last_batch(config)
    of_all = {
        source: pauses.since_ms
        for source, (_, _, pauses) in stored_cancels(spark, config, batch_id).items()
    }
    repeating = read_state(spark, config, "schedules", batch_id)
    since_ms: dict[tuple[TopicPartition, str], int] = {}
    for row in repeating.where(
        f.col("user_map_key.schedule_id").isin(list(schedule_ids))
    ).collect():
        source, schedule_id = source_of(row), row.user_map_key["schedule_id"]
        messages = waiting_from_json(row.user_map_value["messages"])
        own = [
            message.repeating.pauses.since_ms
            for message in messages
            if message.repeating is not None
        ]
        begins_ms = [time_ms for time_ms in (of_all.get(source), *own) if time_ms is not None]
        if own and begins_ms:
            since_ms[source, schedule_id] = min(begins_ms)
    return since_ms
