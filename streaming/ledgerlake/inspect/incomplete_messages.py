"""The incomplete large messages in a pipeline's state, as of its last committed batch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgerlake.client.topics import join_partition
from ledgerlake.inspect.stored_state import read_state
from ledgerlake.operators.stateful import incomplete_from_json

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

    from ledgerlake.assembly.rules import IncompleteMessage
    from ledgerlake.options.config import Config


@dataclass(frozen=True)
class IncompleteLargeMessage:
    """An incomplete large message. ``age_ms`` counts from its first chunk, by the clock of the
    micro-batches.

    ``kept_bytes`` is the size of the entries that are kept, ``total_bytes`` the size of the
    message. If it was spilled, its chunks will be read again, and ``kept_bytes`` is 0.
    """

    topic_partition: str
    producer_name: str
    uuid: str
    first_chunk_id: str
    present: int
    missing: int
    kept_bytes: int
    total_bytes: int
    age_ms: int
    awaits_marker: bool

    def sentence(self) -> str:
        where = f"{self.kept_bytes:,} bytes kept" if self.kept_bytes else "spilled"
        until = ", waits for its marker" if self.awaits_marker else ""
        return (
            f"{self.topic_partition} {self.uuid} of {self.producer_name}: {self.present} chunks "
            f"present, {self.missing} missing, {self.total_bytes:,} bytes when complete, {where}, "
            f"first chunk {self.first_chunk_id}, {self.age_ms / 1000:,.0f} s old{until}"
        )


def incomplete_messages(spark: SparkSession, config: Config) -> list[IncompleteLargeMessage]:
    """Return the incomplete messages of every topic partition, oldest first.

    Raises:
        SetupError: there is no checkpoint of a pipeline that has run.
    """
    now_ms = int(time.time() * 1000)
    messages = [_describe(row, now_ms) for row in read_state(spark, config, "sets").collect()]
    return sorted(messages, key=lambda message: -message.age_ms)


def _describe(row: Row, now_ms: int) -> IncompleteLargeMessage:
    message: IncompleteMessage = incomplete_from_json(row.user_map_value["set"])
    return IncompleteLargeMessage(
        topic_partition=join_partition(row.key["topic"], row.key["partition"]),
        producer_name=message.key.producer_name,
        uuid=message.key.uuid,
        first_chunk_id=str(message.positions[0]),
        present=len(message.positions),
        missing=message.chunk_count - len(message.positions),
        kept_bytes=message.kept_bytes,
        total_bytes=message.total_bytes,
        age_ms=0 if message.opened_ms is None else now_ms - message.opened_ms,
        awaits_marker=message.awaiting,
    )
