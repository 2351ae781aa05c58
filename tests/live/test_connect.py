"""Spark Connect: the source and the sink work through it, and the pipeline says that it
does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.live.pipelines import publish_numbers

if TYPE_CHECKING:
    from pathlib import Path

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark, pytest.mark.long]

_PROGRAM = """
import json, sys
from pyspark.sql import SparkSession
from ledgerlake.api import LedgerlakeDataSource, parse_config, run
from ledgerlake.errors import UsageError

service_url, topic, target, folder = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
spark.dataSource.register(LedgerlakeDataSource)
options = {"service.url": service_url, "topic": topic, "startingOffsets": "earliest"}
batch = spark.read.format("ledgerlake").options(**options).load()
stream = spark.readStream.format("ledgerlake").options(**options).load().select("value")
sink = {"service.url": service_url, "topic": target, "checkpointLocation": folder + "/sink"}
stream.writeStream.format("ledgerlake").options(**sink).trigger(availableNow=True).start().awaitTermination()
copied = spark.read.format("ledgerlake").options(**options | {"topic": target}).load()
config = parse_config(
    {
        "source": {"service_url": service_url, "topics": [topic]},
        "stream": {"name": "connect", "checkpoint": folder + "/checkpoint"},
        "delta": {"path": folder + "/messages"},
    }
)
try:
    run(spark, config)
except UsageError as error:
    refused = str(error)
print(json.dumps({"read": batch.count(), "copied": copied.count(), "refused": refused}))
"""


def test_source_and_sink_work_through_spark_connect_and_the_pipeline_says_that_it_does_not(
    runtime: Runtime, tmp_path: Path
) -> None:
    topic, target = runtime.topic(2), runtime.topic()
    publish_numbers(runtime, topic, range(100), batch=10)
    arguments = [runtime.service_url, topic, target, str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        env=os.environ | {"PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert (seen["read"], seen["copied"]) == (100, 100)
    assert seen["refused"].startswith("the pipeline needs a classic Spark session")
