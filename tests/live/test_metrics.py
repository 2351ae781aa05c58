"""Metrics of a running pipeline and of a query on the bare source, as Prometheus would
fetch them.
"""

from __future__ import annotations

import time
import urllib.request
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ledgerlake.api import run
from ledgerlake.errors import SetupError
from ledgerlake.monitor.metrics import ServedMetrics
from ledgerlake.options.config import MetricsConfig, parse_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]

Samples = dict[str, float]


def fetched(port: int) -> Samples:
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=10) as response:
        lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def samples_when(port: int, is_true: Callable[[Samples], bool]) -> Samples:
    """The metrics as soon as something holds of them."""
    deadline = time.monotonic() + 300
    while not is_true(samples := fetched(port)):
        assert time.monotonic() < deadline, samples
        time.sleep(0.2)
    return samples


def test_a_pipeline_shows_its_rate_lag_rejects_and_what_waits(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    producer = runtime.client().create_producer(topic)
    for number in range(100):
        producer.send(b"%d" % number)
    due_ms = int(time.time() * 1000) + 3_600_000
    producer.send(b"later", deliver_at=due_ms)
    config = parse_config(runtime.config(tmp_path, topic, name="measured"))
    pipeline = run(spark, replace(config, metrics=MetricsConfig(port=0)))
    try:
        assert pipeline.metrics is not None
        port = pipeline.metrics.port
        labels = f'{{query="measured",topic_partition="{topic}"}}'
        samples = samples_when(
            port, lambda scraped: scraped.get('ledgerlake_messages_total{query="measured"}') == 100
        )
        assert samples[f"ledgerlake_delayed_messages{labels}"] == 1
        assert samples[f"ledgerlake_next_due_timestamp_seconds{labels}"] == due_ms / 1000
        assert samples['ledgerlake_rejects_total{query="measured"}'] == 0
        samples_when(port, lambda scraped: scraped.get(f"ledgerlake_lag_messages{labels}") == 0)
        producer.send(b"more")
        samples = samples_when(
            port, lambda scraped: scraped['ledgerlake_messages_total{query="measured"}'] == 101
        )
        assert samples['ledgerlake_messages_per_second{query="measured"}'] > 0
    finally:
        pipeline.stop()
        pipeline.close()
    with pytest.raises(OSError, match="refused"):
        fetched(port)


def test_a_query_on_the_bare_source_shows_how_far_it_is_behind(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    producer = runtime.client().create_producer(topic)
    for number in range(50):
        producer.send(b"%d" % number)
    metrics = ServedMetrics(spark, 0)
    try:
        source = spark.readStream.format("ledgerlake").option("service.url", runtime.service_url)
        source = (
            source.option("topic", topic)
            .option("startingOffsets", "earliest")
            .option("maxRowsPerTrigger", 10)
        )
        writer = (
            source.load()
            .writeStream.format("noop")
            .queryName("behind")
            .trigger(processingTime="2 seconds")
        )
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        name = f'ledgerlake_lag_messages{{query="behind",topic_partition="{topic}"}}'

        lags: list[float] = []

        def is_read(samples: Samples) -> bool:
            if name in samples:
                lags.append(samples[name])
            return lags[-1:] == [0]

        samples_when(metrics.port, is_read)
        assert lags == sorted(lags, reverse=True)
        assert {0} < set(lags) <= {40, 30, 20, 10, 0}
        query.stop()
        samples_when(metrics.port, lambda scraped: not scraped)
        with pytest.raises(SetupError, match=f"metrics cannot be served on port {metrics.port}"):
            ServedMetrics(spark, metrics.port)
    finally:
        metrics.close()
