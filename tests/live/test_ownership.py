"""Checkpoint, cursor and table belong together: a refused run changes nothing, and a run that goes
on is exact.
"""

from __future__ import annotations

import json
import shutil
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from ledgerlake.api import run
from ledgerlake.client.cursor import DurableCursor
from ledgerlake.errors import CheckpointError, ConsumerBusyError, SetupError
from ledgerlake.inspect.delayed_counts import delayed_counts
from ledgerlake.options.config import parse_config
from ledgerlake.pipeline.batches import BatchWriter
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.forget import forget
from ledgerlake.pipeline.pipeline import Pipeline
from ledgerlake.stored.places import Place
from ledgerlake.verify.verify import verify
from tests.live.pipelines import (
    now_ms,
    publish_delayed,
    publish_numbers,
    rows_by_position,
    run_once,
    unload_until_trimmed,
    values,
)
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]


@pytest.fixture(scope="module")
def trimming(runtime: Runtime) -> Runtime:
    """Topics of Pulsar's own defaults: what every cursor has passed is removed."""
    return runtime.trimming()


def _has(folder: Path, count: int) -> bool:
    return len(values(folder)) >= count


def last_number(folder: Path) -> int:
    return max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=-1)


def test_a_batch_that_spark_has_not_recorded_is_still_on_a_broker_that_trims(
    trimming: Runtime, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = trimming.topic()
    data = trimming.config(tmp_path, topic, name="unrecorded")
    publish_numbers(trimming, topic, range(100), batch=10)
    written = threading.Event()
    write = BatchWriter.write

    def die_behind_the_commit(batches: BatchWriter, frame: Any, number: int) -> None:
        write(batches, frame, number)
        written.set()
        raise RuntimeError("killed behind the table's commit")

    monkeypatch.setattr(BatchWriter, "write", die_behind_the_commit)
    pipeline = run(spark, parse_config(data))
    wait_until(written.is_set)
    with pytest.raises(SetupError):
        pipeline.wait()
    pipeline.close()
    monkeypatch.undo()
    trimming.admin("PUT", topic, "/unload")
    trimming.admin("PUT", topic, "/unload")
    publish_numbers(trimming, topic, range(100, 150), batch=10)
    run_once(spark, data)
    assert sorted(values(tmp_path)) == list(range(150))
    assert trimming.subscriptions(topic) == {"ledgerlake-unrecorded": 0}


def test_a_stop_by_hand_leaves_no_backlog_and_can_go_on_after_trimming(
    trimming: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = trimming.topic()
    data = trimming.config(tmp_path, topic, name="stopped")
    for number in range(3):
        publish_numbers(trimming, topic, range(number * 100, number * 100 + 100), batch=10)
        pipeline = run(spark, parse_config(data))
        try:
            wait_until(partial(_has, tmp_path, (number + 1) * 100))
            pipeline.stop()
        finally:
            pipeline.close()
        assert trimming.subscriptions(topic) == {"ledgerlake-stopped": 0}
        unload_until_trimmed(trimming, topic)
    assert sorted(values(tmp_path)) == list(range(300))


def test_what_was_not_acknowledged_before_a_kill_is_at_the_next_start(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic, name="unacknowledged")
    publish_numbers(runtime, topic, range(10))
    with monkeypatch.context() as broken:
        broken.setattr(DurableCursor, "advance", lambda _cursor, _position: None)
        run_once(spark, data)
    assert runtime.subscriptions(topic) == {"ledgerlake-unacknowledged": 10}
    run_once(spark, data)
    assert runtime.subscriptions(topic) == {"ledgerlake-unacknowledged": 0}


def test_an_older_copy_of_the_checkpoint_is_refused_and_the_newest_goes_on(
    trimming: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = trimming.topic()
    data = trimming.config(tmp_path, topic, name="restored")
    copies = []
    for number in range(3):
        publish_numbers(trimming, topic, range(number * 10, number * 10 + 10))
        run_once(spark, data)
        copies.append(tmp_path / f"copy-{number}")
        shutil.copytree(tmp_path / "checkpoint", copies[-1])
    version = DeltaTable(str(tmp_path / "messages")).version()
    publish_numbers(trimming, topic, range(30, 40))
    backlog = trimming.subscriptions(topic)
    for copy in copies[:2]:
        shutil.rmtree(tmp_path / "checkpoint")
        shutil.copytree(copy, tmp_path / "checkpoint")
        with pytest.raises(
            CheckpointError,
            match=r"has batch \d+ of the stream restored, and the checkpoint .* an older copy",
        ):
            run_once(spark, data)
    assert DeltaTable(str(tmp_path / "messages")).version() == version
    assert trimming.subscriptions(topic) == backlog
    shutil.rmtree(tmp_path / "checkpoint")
    shutil.copytree(copies[2], tmp_path / "checkpoint")
    run_once(spark, data)
    assert sorted(values(tmp_path)) == list(range(40))


def test_a_batch_of_another_line_of_the_checkpoint_is_refused(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic, name="forked")
    publish_numbers(runtime, topic, range(10))
    config = run_once(spark, data)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy")
    publish_numbers(runtime, topic, range(10, 20))
    run_once(spark, data)
    shutil.rmtree(tmp_path / "checkpoint")
    shutil.copytree(tmp_path / "copy", tmp_path / "checkpoint")
    # Spark plans a batch of the same number with another range before it can be told that there is
    # one.
    publish_numbers(runtime, topic, range(20, 30))
    assembled = Pipeline(spark, config)
    try:
        assembled._components.start.compare_with_tables = lambda _tables: None  # type: ignore[method-assign,assignment]
        assembled.start(True)
        with pytest.raises(CheckpointError, match="is not the one in the table"):
            assembled.wait()
    finally:
        assembled.close()
    assert sorted(values(tmp_path)) == list(range(20))


def test_a_stream_that_was_renamed_over_its_checkpoint_is_refused(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(10))
    run_once(spark, runtime.config(tmp_path, topic, name="old-name"))
    with pytest.raises(
        CheckpointError,
        match="belongs to the stream old-name, and the configuration names new-name",
    ):
        run_once(spark, runtime.config(tmp_path, topic, name="new-name"))
    assert list(runtime.subscriptions(topic)) == ["ledgerlake-old-name"]


def test_a_stream_whose_topic_the_table_has_from_another_one_is_refused_and_has_changed_nothing(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic, other_topic = runtime.topic(), runtime.topic()
    publish_numbers(runtime, topic, range(10))
    publish_numbers(runtime, other_topic, range(10, 20))
    run_once(spark, runtime.config(tmp_path, topic, name="first-name"))
    version = DeltaTable(str(tmp_path / "messages")).version()
    second = runtime.config(tmp_path, topic, name="second-name")
    second["stream"]["checkpoint"] = str(tmp_path / "second")
    with pytest.raises(
        CheckpointError, match=f"the stream first-name writes the messages of {topic} to the table"
    ):
        run_once(spark, second)
    assert DeltaTable(str(tmp_path / "messages")).version() == version
    assert list(runtime.subscriptions(topic)) == ["ledgerlake-first-name"]
    assert not (tmp_path / "second").exists()
    run_once(spark, second | {"source": {**second["source"], "topics": [other_topic]}})
    assert sorted(values(tmp_path)) == list(range(20))
    second["source"]["starting"] = "latest"
    second["stream"]["checkpoint"] = str(tmp_path / "third")
    second["stream"]["name"] = "third-name"
    run_once(spark, second | {"delta": {**second["delta"], "fail_on_second_stream": False}})
    publish_numbers(runtime, topic, range(20, 30))
    run_once(spark, second)
    assert sorted(values(tmp_path)) == list(range(30))


def test_a_stream_that_is_renamed_by_the_steps_of_the_docs_loses_nothing_and_leaves_nothing(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(3))
    publish_delayed(runtime, topic, [(b"3", now_ms() + 1000)])
    former = runtime.config(tmp_path, topic, name="former")
    config = run_once(spark, former)
    while sum(count.delayed for count in delayed_counts(spark, config)):
        run_once(spark, former)
    renamed = runtime.config(tmp_path, topic, name="renamed")
    renamed["stream"]["checkpoint"] = str(tmp_path / "renamed")
    first_run = json.loads(json.dumps(renamed))
    first_run["source"]["starting"] = "latest"
    first_run["delta"]["fail_on_second_stream"] = False
    run_once(spark, first_run)
    shutil.rmtree(tmp_path / "checkpoint")
    assert forget(config) == [topic]
    publish_numbers(runtime, topic, range(4, 6))
    assert verify(run_once(spark, renamed)).clean
    assert sorted(values(tmp_path)) == list(range(6))
    assert list(runtime.subscriptions(topic)) == ["ledgerlake-renamed"]


@pytest.mark.parametrize("starting", ["latest", pytest.param("earliest", marks=pytest.mark.long)])
def test_a_lost_checkpoint_is_noticed_by_the_table_also_if_the_cursor_looks_new(
    trimming: Runtime, spark: SparkSession, tmp_path: Path, starting: str
) -> None:
    topic = trimming.topic()
    data = trimming.config(tmp_path, topic, name=f"lost-{starting}")
    publish_numbers(trimming, topic, range(10))
    config = run_once(spark, data)
    unload_until_trimmed(trimming, topic)
    publish_numbers(trimming, topic, range(10, 15))
    backlog = trimming.subscriptions(topic)
    shutil.rmtree(tmp_path / "checkpoint")
    data["source"]["starting"] = starting
    with pytest.raises(
        SetupError, match=rf"knows the stream lost-{starting}; restore the checkpoint"
    ):
        run_once(spark, data)
    assert trimming.subscriptions(topic) == backlog == {f"ledgerlake-lost-{starting}": 5}
    data["source"]["starting"] = "cursor"
    run_once(spark, data)
    assert sorted(values(tmp_path)) == list(range(15))
    shutil.rmtree(tmp_path / "checkpoint")
    forget(config)
    data["source"]["starting"] = "latest"
    run_once(spark, data)
    assert sorted(values(tmp_path)) == list(range(15))


def test_a_start_at_latest_over_a_cursor_with_a_backlog_asks(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic, name="latest-again", starting="latest")
    run_once(spark, data)
    publish_numbers(runtime, topic, range(10))
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    with pytest.raises(
        SetupError,
        match=r"latest-again has unread messages of .* behind .*; restore the checkpoint",
    ):
        run_once(spark, data)
    assert runtime.subscriptions(topic) == {"ledgerlake-latest-again": 10}


def test_a_first_start_at_latest_that_was_interrupted_goes_on_from_its_cursor(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(5))
    data = runtime.config(tmp_path, topic, name="interrupted", starting="latest")
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "save_start", lambda _self, _start: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_once(spark, data)
    publish_numbers(runtime, topic, range(5, 10))
    run_once(spark, data)
    assert sorted(values(tmp_path)) == list(range(5, 10))
    assert Checkpoint(Place(str(tmp_path / "checkpoint"))).first_ends() == {}


def test_a_start_at_latest_beside_another_process_still_asks_when_that_has_ended(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ledgerlake.client.cursor.BUSY_FOR_S", 0.5)
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic, name="beside", starting="latest")
    cursor = DurableCursor(runtime.cluster(), topic, "ledgerlake-beside")
    cursor.ensure(from_earliest=True)
    publish_numbers(runtime, topic, range(5))
    with pytest.raises(ConsumerBusyError):
        run_once(spark, data)
    cursor.close()
    publish_numbers(runtime, topic, range(5, 10))
    with pytest.raises(SetupError, match="beside has unread messages of"):
        run_once(spark, data)


def test_a_refused_start_keeps_a_cursor_that_another_run_made(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    runtime.client().subscribe(topic, "ledgerlake-kept").close()
    cursor = DurableCursor(runtime.cluster(), topic, "ledgerlake-kept")
    cursor.make(from_earliest=True)
    publish_numbers(runtime, topic, range(10))
    data = runtime.config(tmp_path, topic, name="kept", starting="cursor")
    data["stream"]["checkpoint"] = "/proc/nowhere"
    with pytest.raises(SetupError, match="cannot be written"):
        run_once(spark, data)
    assert runtime.subscriptions(topic) == {"ledgerlake-kept": 10}


def test_a_second_process_is_refused_and_has_changed_nothing(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ledgerlake.client.cursor.BUSY_FOR_S", 1.0)
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic, name="owned")
    data["deliver"] = {"topic": "persistent://public/nowhere/due"}
    data["delta"]["writer"] = "spark"
    publish_numbers(runtime, topic, range(10))
    pipeline = run(spark, parse_config(data))
    try:
        wait_until(lambda: len(values(tmp_path)) == 10)
        wait_until(lambda: last_number(tmp_path / "checkpoint" / "commits") >= 0)
        outbox, staging = (
            tmp_path / "checkpoint" / "ledgerlake" / name for name in ("outbox", "staging/messages")
        )
        for folder in (outbox, staging):
            (folder / "in-work.parquet").write_bytes(b"of the owner")
        with pytest.raises(ConsumerBusyError, match="another consumer holds this subscription"):
            run_once(spark, data)
        assert (outbox / "in-work.parquet").exists()
        assert (staging / "in-work.parquet").exists()
        publish_numbers(runtime, topic, range(10, 20))
        wait_until(lambda: len(values(tmp_path)) == 20)
        pipeline.stop()
    finally:
        pipeline.close()
    assert sorted(values(tmp_path)) == list(range(20))


def test_a_topic_that_comes_while_the_pipeline_starts_is_read_from_its_beginning(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = runtime.topic()
    second = f"{first}-new"
    publish_numbers(runtime, first, range(10))
    data = runtime.config(tmp_path, name="meanwhile", topics_pattern=f"{first}.*")
    del data["source"]["topics"]
    make_stream = Pipeline._stream

    def with_a_new_topic(pipeline: Pipeline, start: Any) -> Any:
        runtime.admin("PUT", second)
        publish_numbers(runtime, second, range(10, 20))
        return make_stream(pipeline, start)

    monkeypatch.setattr(Pipeline, "_stream", with_a_new_topic)
    config = run_once(spark, data)
    assert sorted(int(row["value"]) for row in rows_by_position(config.delta.path)) == list(
        range(20)
    )
    assert runtime.subscriptions(second) == {"ledgerlake-meanwhile": 0}
