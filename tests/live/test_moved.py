"""A pipeline whose folders were moved goes on where it was: a volume mounted elsewhere, a backup
restored beside the original.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ledgerlake.client.producer import EntryProducer
from ledgerlake.inspect.incomplete_messages import incomplete_messages
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.chunks import encode_chunks
from tests.live.pipelines import now_ms, publish_delayed, rows_by_position, run_once

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = pytest.mark.live


def test_a_pipeline_goes_on_after_its_folders_were_moved(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    chunks = list(
        encode_chunks(
            pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=now_ms()),
            b"x" * 3000,
            1000,
        )
    )
    producer = EntryProducer(runtime.cluster(), topic, "p")
    producer.send_and_wait(chunks[:2])
    publish_delayed(runtime, topic, [(b"far", now_ms() + 3_600_000), (b"plain", None)])
    before, after = tmp_path / "before", tmp_path / "after"
    run_once(spark, runtime.config(before, topic, name="moved"))

    before.rename(after)
    producer.send_and_wait(chunks[2:])
    producer.close()
    config = run_once(spark, runtime.config(after, topic, name="moved"))

    assert [row["value"] for row in rows_by_position(config.delta.path)] == [b"plain", b"x" * 3000]
    assert incomplete_messages(spark, config) == []
    assert not before.exists()
