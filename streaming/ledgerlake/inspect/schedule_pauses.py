"""Which of the messages that repeat are paused, and which ones were ended, in a pipeline's state,
as of its last committed batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from ledgerlake.inspect.delayed_counts import source_of, stored_cancels
from ledgerlake.inspect.stored_state import last_batch, read_state
from ledgerlake.schedules.schedules import waiting_from_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from pyspark.sql import SparkSession

    from ledgerlake.decode.messages import TopicPartition
    from ledgerlake.options.config import Config
    from ledgerlake.schedules.schedules import ScheduledMessage
    from ledgerlake.wire.message_id import Position


def paused_since_ms(
    spark: SparkSession, config: Config, schedule_ids: Collection[str]
) -> dict[tuple[TopicPartition, Position], int]:
    """Return since when the messages of some ids that repeat are paused, by topic partition and
    position, in milliseconds since 1970: by a pause of their own or of all. Those that are not
    paused are left out.

    Raises:
        SetupError: there is no checkpoint of a pipeline that has run.
        OffsetError: a newer release wrote it.
    """
    batch_id = last_batch(config)
    of_all = {
        source: pauses.since_ms
        for source, (_, _, pauses) in stored_cancels(spark, config, batch_id).items()
    }
    since_ms: dict[tuple[TopicPartition, Position], int] = {}
    for source, messages in _repeating(spark, config, batch_id, schedule_ids):
        paused = paused_messages(messages, of_all.get(source))
        since_ms |= {(source, position): time_ms for position, time_ms in paused.items()}
    return since_ms


def ended_repetitions(
    spark: SparkSession, config: Config, batch_id: int | None, schedule_id: str
) -> set[tuple[TopicPartition, Position]]:
    """Return the messages of an id that repeat and were ended by a cancel or another message, while
    an occurrence waits that was due before.

    Args:
        batch_id: as ``read_state`` has it.

    Raises:
        As ``paused_since_ms``.
    """
    return {
        (source, message.position)
        for source, messages in _repeating(spark, config, batch_id, [schedule_id])
        for message in messages
        if message.repeating is not None and message.repeating.ends_ms is not None
    }


def _repeating(
    spark: SparkSession, config: Config, batch_id: int | None, schedule_ids: Collection[str]
) -> Iterator[tuple[TopicPartition, list[ScheduledMessage]]]:
    """Yield the messages of some ids that repeat, with their topic partition."""
    rows = read_state(spark, config, "schedules", batch_id).where(
        f.col("user_map_key.schedule_id").isin(list(schedule_ids))
    )
    for row in rows.collect():
        yield source_of(row), waiting_from_json(row.user_map_value["messages"])


def paused_messages(
    messages: Iterable[ScheduledMessage], of_all_ms: int | None
) -> dict[Position, int]:
    """Return since when messages are paused, by position, without those that are not.

    Args:
        of_all_ms: when the pause of all began, if there is one.
    """
    begins_ms = {
        message.position: [of_all_ms, message.repeating.pauses.since_ms]
        for message in messages
        if message.repeating is not None
    }
    known = {
        position: [time_ms for time_ms in times if time_ms is not None]
        for position, times in begins_ms.items()
    }
    return {position: min(times) for position, times in known.items() if times}
