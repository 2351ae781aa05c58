"""Topics that come and go while a pipeline of a pattern runs; partitions that are added; topics
that are deleted.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from ledgerlake.client.topics import TopicSelection, full_pattern
from ledgerlake.errors import DataLossError, TopicNotFoundError
from ledgerlake.inspect.checks import check_config
from ledgerlake.inspect.lag import find_lags
from ledgerlake.options.config import parse_config
from ledgerlake.verify.verify import verify
from tests.live.pipelines import rejects_rows, run_once, running
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ledgerlake.client.channels import Watcher
    from ledgerlake.client.cluster import Cluster
    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]


def send(runtime: Runtime, topic: str, values: range) -> None:
    client = runtime.clients[0] if runtime.clients else runtime.client()
    producer = client.create_producer(topic)
    for value in values:
        producer.send_async(b"%d" % value, lambda *_: None)
    producer.flush()
    producer.close()


def row_counts(folder: Path) -> Counter[tuple[str, int]]:
    try:
        table = DeltaTable(str(folder / "messages")).to_pyarrow_table(columns=["topic", "value"])
    except TableNotFoundError:
        return Counter()
    return Counter((row["topic"], int(row["value"])) for row in table.to_pylist())


def wait_for(folder: Path, expected: set[tuple[str, int]], pipeline: Any) -> None:
    wait_until(lambda: expected <= set(row_counts(folder)) or pipeline.wait(0.5))
    assert expected <= set(row_counts(folder)), "the pipeline has ended"


@pytest.mark.slow
def test_many_topics_come_and_go_while_a_pipeline_runs(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, campaign_is_long: bool
) -> None:
    tenth = 20 if campaign_is_long else 2
    base = f"persistent://public/default/many-{os.getpid()}"
    names = [f"{base}-{number}" for number in range(10 * tenth)]
    expected: set[tuple[str, int]] = set()

    def create(new_names: list[str]) -> None:
        for name in new_names:
            runtime.admin("PUT", name)
            send(runtime, name, range(3))
            expected.update((name, value) for value in range(3))

    create(names[: 4 * tenth])
    data = runtime.config(tmp_path)
    del data["source"]["topics"]
    data["source"]["topics_pattern"] = f"many-{os.getpid()}-.*"
    data["stream"]["trigger"] = "1 second"
    with running(spark, data) as pipeline:
        wait_for(tmp_path, set(expected), pipeline)
        create(names[4 * tenth : 7 * tenth])
        wait_for(tmp_path, set(expected), pipeline)
        for name in names[: 3 * tenth]:
            runtime.admin("DELETE", name, "?force=true")
        create(names[7 * tenth :])
        for name in names[3 * tenth : 7 * tenth]:
            send(runtime, name, range(3, 5))
            expected.update((name, value) for value in range(3, 5))
        wait_for(tmp_path, set(expected), pipeline)
    assert row_counts(tmp_path) == Counter(expected)
    assert rejects_rows(tmp_path) == []
    cursor = f"ledgerlake-{data['stream']['name']}"
    with_cursor = [
        name
        for name in names[3 * tenth :]
        if cursor in runtime.admin("GET", name, "/subscriptions")
    ]
    assert len(with_cursor) == 7 * tenth
    run_once(spark, data)
    assert row_counts(tmp_path) == Counter(expected)


def test_the_broker_tells_when_topics_come_and_go(runtime: Runtime) -> None:
    base = runtime.topic()
    cluster = runtime.cluster()
    try:
        for change in ("PUT", "DELETE"):
            watcher = unchanged_watcher(cluster, base)
            runtime.admin(change, f"{base}-a")
            wait_until(partial(getattr, watcher, "changed"))
        assert cluster.watch(TopicSelection(names=(base,))) is None
    finally:
        cluster.close()


def unchanged_watcher(cluster: Cluster, base: str) -> Watcher:
    """A watcher that the broker tells nothing of changes before it; a slow one tells those late."""
    for _ in range(30):
        watcher = cluster.watch(TopicSelection(pattern=full_pattern(f"{base}-[ab]")))
        assert watcher is not None
        time.sleep(2)
        if not watcher.changed:
            return watcher
    raise AssertionError("the broker tells of changes without end")


def test_quiet_topics_share_a_file(runtime: Runtime, spark: SparkSession, tmp_path: Path) -> None:
    data = runtime.config(tmp_path)
    names = data["source"]["topics"] = [f"{runtime.topic()}-{number}" for number in range(12)]
    expected: set[tuple[str, int]] = set()
    for name in names:
        runtime.admin("PUT", name)
    with running(spark, data) as pipeline:
        for values in (range(5), range(5, 10)):
            begun = files_of_commits(tmp_path)
            for name in names:
                send(runtime, name, values)
            expected |= {(name, value) for name in names for value in values}
            wait_for(tmp_path, expected, pipeline)
    # In the first micro-batch after a start, each topic may have messages in state.
    assert set(files_of_commits(tmp_path)[len(begun) :]) <= {0, 1}
    assert row_counts(tmp_path) == Counter(expected)
    assert verify(parse_config(data)).clean


def files_of_commits(folder: Path) -> list[int]:
    """How many files each commit of the table added."""
    commits = sorted((folder / "messages" / "_delta_log").glob("*.json"))
    return [sum('"add"' in line for line in commit.read_text().splitlines()) for commit in commits]


def test_partitions_that_are_added_are_read_from_their_beginning(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic(partitions=1)
    send(runtime, topic, range(10))
    data = runtime.config(tmp_path, topic)
    run_once(spark, data)
    runtime.admin("POST", topic, "/partitions", 3)
    client: Any = runtime.client()
    for partition in range(3):
        producer = client.create_producer(f"{topic}-partition-{partition}")
        producer.send(b"%d" % (100 + partition))
        producer.close()
    run_once(spark, data)
    assert sorted(value for _, value in row_counts(tmp_path)) == [*range(10), 100, 101, 102]


def test_partitions_that_the_metadata_names_and_that_are_not_there_are_left_out_until_they_come(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic(partitions=3)
    names = [f"{topic}-partition-{number}" for number in range(3)]
    for name in names:
        runtime.admin("DELETE", name, "?force=true")
    data = runtime.config(tmp_path, topic, starting="latest")
    config, expected = parse_config(data), Counter[tuple[str, int]]()
    for number, made in enumerate([[], names[1:2], names[:1]]):
        for name in made:
            send(runtime, name, range(10 * number, 10 * number + 3))
            expected.update((topic, 10 * number + value) for value in range(3))
        problems = [finding for finding in check_config(config) if finding.state == "problem"]
        assert problems == []
        run_once(spark, data)
        assert row_counts(tmp_path) == expected
        assert [lag.messages for lag in find_lags(config)] == number * [0]
        assert verify(config).clean
        read = spark.read.format("ledgerlake").options(
            **{"service.url": runtime.service_url, "topic": topic, "schema": "bytes"}
        )
        assert read.load().count() == 3 * number
    with running(spark, data) as pipeline:
        runtime.admin("DELETE", names[1], "?force=true")
        send(runtime, names[2], range(30, 33))
        expected.update((topic, value) for value in range(30, 33))
        wait_for(tmp_path, set(expected), pipeline)
    run_once(spark, data)
    send(runtime, names[1], range(40, 43))
    expected.update((topic, value) for value in range(40, 43))
    run_once(spark, data)
    assert row_counts(tmp_path) == expected
    assert rejects_rows(tmp_path) == []


def test_a_deleted_topic_ends_a_pipeline_or_is_left_behind(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    kept_topic, deleted_topic = runtime.topic(), runtime.topic()
    for topic in (kept_topic, deleted_topic):
        send(runtime, topic, range(5))
    prefix = kept_topic.rpartition("-")[0]
    data = runtime.config(tmp_path)
    del data["source"]["topics"]
    data["source"]["topics_pattern"] = (
        f"{prefix}-({kept_topic.rpartition('-')[2]}|{deleted_topic.rpartition('-')[2]})"
    )
    run_once(spark, data)
    runtime.admin("DELETE", deleted_topic, "?force=true")
    send(runtime, kept_topic, range(5, 8))
    run_once(spark, data)
    assert sorted(row_counts(tmp_path)) == sorted(
        [(kept_topic, value) for value in range(8)] + [(deleted_topic, value) for value in range(5)]
    )
    runtime.admin("PUT", deleted_topic)
    send(runtime, deleted_topic, range(50, 53))
    run_once(spark, data)
    assert row_counts(tmp_path)[(deleted_topic, 52)] == 1
    named_config = runtime.config(tmp_path / "named", kept_topic, deleted_topic)
    run_once(spark, named_config)
    runtime.admin("DELETE", deleted_topic, "?force=true")
    with pytest.raises((TopicNotFoundError, DataLossError)):
        run_once(spark, named_config)
