"""The incomplete large messages in a pipeline's state, as of its last committed batch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgerlake.client.topics import join_partition
from ledgerlake.errors import SetupError
from ledgerlake.operators.stateful import incomplete_from_json, set_up_state
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.moved_state import former_place
from ledgerlake.pipeline.query_settings import STATE_FILES
from ledgerlake.runtime.hadoop import connect_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

    from ledgerlake.assembly.rules import IncompleteMessage
    from ledgerlake.options.config import Config


@dataclass(frozen=True)
class OpenMessage:
    """An incomplete large message. ``age_ms`` counts from its first chunk, by the clock of the
    micro-batches.

    If it was spilled, its chunks will be read again, and ``held_bytes`` is 0.
    """

    topic_partition: str
    producer_name: str
    uuid: str
    first_chunk_id: str
    present: int
    missing: int
    held_bytes: int
    total_bytes: int
    age_ms: int
    awaits_marker: bool

    def sentence(self) -> str:
        where = "held" if self.held_bytes else "spilled"
        until = ", waits for its marker" if self.awaits_marker else ""
        return (
            f"{self.topic_partition} {self.uuid} of {self.producer_name}: {self.present} chunks present, "
            f"{self.missing} missing, {self.held_bytes:,} of {self.total_bytes:,} bytes {where}, "
            f"first chunk {self.first_chunk_id}, {self.age_ms / 1000:,.0f} s old{until}"
        )


def open_messages(spark: SparkSession, config: Config) -> list[OpenMessage]:
    """Return the incomplete messages of every topic partition, oldest first.

    Raises:
        SetupError: there is no checkpoint of a pipeline that has run.
    """
    now_ms = int(time.time() * 1000)
    messages = [_describe(row, now_ms) for row in read_state(spark, config, "sets").collect()]
    return sorted(messages, key=lambda message: -message.age_ms)


def last_batch(config: Config) -> int | None:
    """Return the number of the last committed batch, for several reads of one state: a bucket could
    be gone between two.
    """
    return Checkpoint(config.checkpoint_place).log.last_committed()


def read_state(spark: SparkSession, config: Config, variable: str, batch_id: int | None = None) -> DataFrame:
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
            f"the checkpoint {config.stream.checkpoint} was moved from {former}, and the pipeline has not run since; "
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
        raise SetupError(f"the checkpoint {config.stream.checkpoint} holds no state; run the pipeline first") from None


def _describe(row: Row, now_ms: int) -> OpenMessage:
    message: IncompleteMessage = incomplete_from_json(row.user_map_value["set"])
    return OpenMessage(
        topic_partition=join_partition(row.key["topic"], row.key["partition"]),
        producer_name=message.key.producer_name,
        uuid=message.key.uuid,
        first_chunk_id=str(message.positions[0]),
        present=len(message.positions),
        missing=message.chunk_count - len(message.positions),
        held_bytes=message.kept_bytes,
        total_bytes=message.total_bytes,
        age_ms=0 if message.opened_ms is None else now_ms - message.opened_ms,
        awaits_marker=message.awaiting,
    )
