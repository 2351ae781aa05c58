"""Very many micro-batches: what a query keeps beside its table stays as large as it was after the
first of them.
"""

from __future__ import annotations

import itertools
import os
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ledgerlake.api import run
from ledgerlake.options.config import parse_config
from ledgerlake.verify.verify import verify
from tests.live.pipelines import now_ms
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ledgerlake.pipeline.commit import BatchResult
    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark, pytest.mark.slow, pytest.mark.long]

_RETAINED = "spark.sql.streaming.minBatchesToRetain"


@pytest.fixture
def retained(spark: SparkSession) -> Iterator[int]:
    """Batches that Spark keeps in a checkpoint, fewer than its hundred."""
    spark.conf.set(_RETAINED, "4")
    yield 4
    spark.conf.unset(_RETAINED)


class Publisher(threading.Thread):
    """Plain, delayed and large messages until it is told to stop, so that every state variable
    comes and goes.
    """

    def __init__(self, runtime: Runtime, topic: str) -> None:
        super().__init__(daemon=True)
        self.stop_asked = threading.Event()
        self._producer = runtime.client().create_producer(
            topic, batching_enabled=False, chunking_enabled=True
        )

    def run(self) -> None:
        large = os.urandom(6 * 1024 * 1024)
        for number in itertools.count():
            self._producer.send(b"at once", partition_key=str(number))
            if number % 5 == 0:
                self._producer.send(b"later", deliver_at=now_ms() + 500, partition_key=str(number))
            if number % 100 == 0:
                self._producer.send(large, partition_key=str(number))
            if self.stop_asked.wait(0.04):
                return

    def stop(self) -> None:
        self.stop_asked.set()
        self.join()
        self._producer.close()


def file_count_and_bytes(checkpoint: Path) -> tuple[int, int]:
    """Files below a checkpoint, and their bytes."""
    paths = [os.path.join(root, name) for root, _, names in os.walk(checkpoint) for name in names]
    return len(paths), sum(os.path.getsize(path) for path in paths if os.path.exists(path))


def test_a_checkpoint_does_not_grow_with_the_number_of_micro_batches(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, retained: int, campaign_is_long: bool
) -> None:
    batches = 3000 if campaign_is_long else 30
    topic = runtime.topic(partitions=2)
    data = runtime.config(tmp_path, topic)
    data["stream"]["trigger"] = "0 seconds"
    config = parse_config(data)
    done: list[BatchResult] = []
    publisher = Publisher(runtime, topic)
    publisher.start()
    pipeline = run(spark, config, on_batch=done.append)
    try:
        # Of these Spark has removed few, and keeps that many at most.
        wait_for_batches(done, 2 * retained + 4)
        files, size_bytes = file_count_and_bytes(tmp_path / "checkpoint")
        wait_for_batches(done, batches)
        publisher.stop()
        # Old state goes once in a while, by a thread of its own.
        wait_until(lambda: file_count_and_bytes(tmp_path / "checkpoint")[0] <= files * 1.2)
        now = file_count_and_bytes(tmp_path / "checkpoint")
        print(
            f"{files} files, {size_bytes:,} bytes after the first batches; {now[0]}, {now[1]:,} "
            f"after {len(done)}"
        )
        assert now[1] <= size_bytes * 1.5
    finally:
        pipeline.stop()
        pipeline.close()
    run(spark, config, once=True).wait()
    verdict = verify(config)
    assert verdict.clean, verdict.sentence()
    assert verdict.not_due == verdict.incomplete_chunks == 0


def wait_for_batches(done: list[BatchResult], count: int) -> None:
    while (before := len(done)) < count:
        wait_until(partial(_is_longer, done, before))


def _is_longer(done: list[BatchResult], before: int) -> bool:
    return len(done) > before
