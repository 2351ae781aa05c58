"""Tables in an object store, judged by what pulsar-client confirmed and ``deltalake`` reads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from pyarrow.fs import FileSelector

from ledgerlake.errors import SetupError, TableError
from ledgerlake.options.config import parse_config
from ledgerlake.table.vacuum import vacuum
from ledgerlake.verify.verify import verify
from tests.live.campaign import end_group
from tests.live.cloud_stores import CloudStore, start_azure, start_google
from tests.live.object_store import SECRET_KEY, ObjectStore, hadoop_version, start_object_store
from tests.live.pipelines import (
    config_file,
    ledgerlake,
    ledgerlake_process,
    now_ms,
    publish_delayed,
    publish_numbers,
    run_once,
    sentence,
)
from tests.table.test_compaction import Writer
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]

SCHEMES = [
    "s3",
    *(pytest.param(scheme, marks=pytest.mark.long) for scheme in ("s3a", "gs", "abfss")),
]


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with start_object_store() as running:
        yield running


def in_cloud(runtime: Runtime, folder: Path, root: str, topic: str) -> dict[str, Any]:
    """A pipeline with a local checkpoint and its tables and delayed messages in a store."""
    data = runtime.config(folder, topic)
    return data | {"delta": {"path": f"{root}/messages"}, "delay": {"storage": f"{root}/delayed"}}


def in_store(runtime: Runtime, folder: Path, store: ObjectStore, topic: str) -> dict[str, Any]:
    return in_cloud(runtime, folder, f"s3://{store.bucket()}/lake", topic)


def values(path: str, options: dict[str, str]) -> list[bytes]:
    """The values of a table by an independent reader, in the order of their positions."""
    table = DeltaTable(path.replace("s3a:", "s3:"), storage_options=options).to_pyarrow_table()
    order = [(name, "ascending") for name in ("partition", "ledger_id", "entry_id", "batch_index")]
    table_values: list[bytes] = table.sort_by(order)["value"].to_pylist()
    return table_values


def kill_after_a_commit(config: str, is_committed: Callable[[], bool]) -> None:
    """Let a pipeline run until something is in its table, and kill all its processes."""
    running = subprocess.Popen([sys.executable, "-m", "ledgerlake.cli", "run", config])
    try:
        wait_until(lambda: running.poll() is not None or is_committed())
        assert running.poll() is None
    finally:
        end_group(running)


@pytest.fixture
def cloud(request: pytest.FixtureRequest) -> Iterator[CloudStore]:
    """An empty place in a store, by its scheme."""
    if request.param == "gs":
        with start_google() as running:
            yield running
    elif request.param == "abfss":
        with start_azure() as running:
            yield running
    else:
        store: ObjectStore = request.getfixturevalue("store")
        yield CloudStore(
            f"{request.param}://{store.bucket()}/lake", store.settings, store.delta_options
        )


@pytest.mark.parametrize("cloud", SCHEMES, indirect=True)
def test_tables_in_a_store_hold_each_message_once_over_restarts(
    runtime: Runtime, spark: SparkSession, cloud: CloudStore, tmp_path: Path
) -> None:
    topic = runtime.topic(2)
    data = in_cloud(runtime, tmp_path, cloud.root, topic) | {"storage": cloud.settings}
    publish_numbers(runtime, topic, range(200), batch=20)
    run_once(spark, data)
    due_ms = int(time.time() * 1000) + 1500
    publish_delayed(runtime, topic, [(b"late", due_ms)])
    publish_numbers(runtime, topic, range(200, 300))
    run_once(spark, data)
    time.sleep(max(0.0, due_ms / 1000 - time.time()) + 0.1)
    config = run_once(spark, data)
    expected = sorted([b"late", *(b"%d" % number for number in range(300))])
    assert sorted(values(data["delta"]["path"], cloud.delta_options)) == expected
    assert verify(config).clean
    assert vacuum(config.messages_place, 168, dry_run=True).files == []


@pytest.mark.long
def test_keys_of_the_environment_are_enough(
    runtime: Runtime, store: ObjectStore, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(10))
    data = in_store(runtime, tmp_path, store, topic)
    config = config_file(tmp_path, data)
    result = ledgerlake_process("run", config, "--once", **store.environment)
    assert result.returncode == 0, result.stderr
    assert values(data["delta"]["path"], store.delta_options) == [
        b"%d" % number for number in range(10)
    ]
    assert ledgerlake("verify", config, **store.environment).returncode == 0


def test_a_wrong_key_is_one_sentence_without_the_key(
    runtime: Runtime, store: ObjectStore, tmp_path: Path
) -> None:
    data = in_store(runtime, tmp_path, store, runtime.topic())
    data["storage"] = store.settings | {"secret_access_key": "not-the-secret"}
    result = ledgerlake_process("run", config_file(tmp_path, data), "--once")
    assert "refuses the credentials for the bucket" in sentence(result, 3)
    assert "not-the-secret" not in result.stderr + result.stdout


def test_a_checkpoint_in_a_store_without_sparks_connector_is_one_sentence(
    runtime: Runtime, spark: SparkSession, store: ObjectStore, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = in_store(runtime, tmp_path, store, topic) | {"storage": store.settings}
    data["stream"]["checkpoint"] = f"s3://{store.bucket()}/checkpoint"
    with pytest.raises(
        SetupError,
        match=r"needs the package org\.apache\.hadoop:hadoop-aws:3\.[\d.]+ to reach s3://",
    ):
        run_once(spark, data)
    assert runtime.subscriptions(topic) == {}


# Spark fetches a connector of 700 MB for it.
@pytest.mark.long
def test_a_checkpoint_in_a_store_goes_on_over_kills_and_restarts_and_holds_no_key(
    runtime: Runtime, store: ObjectStore, tmp_path: Path
) -> None:
    topic, due, checkpoint = runtime.topic(2), runtime.topic(), f"{store.bucket()}/checkpoint"
    data = in_store(runtime, tmp_path, store, topic) | {
        "storage": store.settings,
        "deliver": {"topic": due},
    }
    data["stream"]["checkpoint"] = f"s3a://{checkpoint}"
    data["spark"] = {"packages": [f"org.apache.hadoop:hadoop-aws:{hadoop_version()}"]}
    config = config_file(tmp_path, data)
    large = [b"%d" % number * 2_000_000 for number in range(3)]
    publish_delayed(
        runtime,
        topic,
        [(value, None) for value in large],
        chunking_enabled=True,
        batching_enabled=False,
    )
    due_ms = now_ms() + 60_000
    publish_delayed(runtime, topic, [(b"late", due_ms)])
    publish_numbers(runtime, topic, range(200), batch=20)
    first = ledgerlake_process("run", config, "--once")
    assert first.returncode == 0, first.stderr
    publish_numbers(runtime, topic, range(200, 300))
    kill_after_a_commit(
        config, lambda: len(values(data["delta"]["path"], store.delta_options)) > 203
    )
    time.sleep(max(0.0, due_ms / 1000 - time.time()) + 0.1)
    last = ledgerlake_process("run", config, "--once")
    assert last.returncode == 0, last.stderr
    expected = sorted([*large, b"late", *(b"%d" % number for number in range(300))])
    assert sorted(values(data["delta"]["path"], store.delta_options)) == expected
    assert ledgerlake("verify", config).returncode == 0
    state = json.loads(ledgerlake_process("state", config, "--json").stdout)
    assert (state["large"], sum(partition["delayed"] for partition in state["delayed"])) == ([], 0)
    assert sorted(os.listdir(tmp_path)) == ["pipeline.toml"]
    filesystem = store.filesystem()
    files = [
        file
        for file in filesystem.get_file_info(FileSelector(checkpoint, recursive=True))
        if file.is_file
    ]
    assert len(files) > 20
    for file in files:
        with filesystem.open_input_file(file.path) as stored:
            assert SECRET_KEY.encode() not in stored.read()
    assert SECRET_KEY not in first.stderr + last.stderr


@pytest.mark.parametrize("cloud", SCHEMES, indirect=True)
def test_small_files_in_a_store_are_merged(cloud: CloudStore, tmp_path: Path) -> None:
    data = {
        "source": {"service_url": "pulsar://nowhere:1", "topics": ["t"]},
        "stream": {"name": "orders", "checkpoint": str(tmp_path / "checkpoint")},
        "delta": {"path": f"{cloud.root}/messages"},
        "storage": cloud.settings,
    }
    writer = Writer(parse_config(data).messages_place)
    for _ in range(3):
        writer.commit()
    assert writer.compaction().run() == 9
    files = DeltaTable(
        cloud.root.replace("s3a:", "s3:") + "/messages", storage_options=cloud.delta_options
    )
    assert len(files.file_uris()) == 1
    assert files.to_pyarrow_table().num_rows == 180
    first_commit = parse_config(data).messages_place / f"_delta_log/{0:020}.json"
    assert not first_commit.create_file(b"a commit of another writer")


# fake-gcs-server answers as if it had failed itself.
@pytest.mark.parametrize(
    "cloud", ["s3", pytest.param("abfss", marks=pytest.mark.long)], indirect=True
)
def test_a_bucket_that_is_missing_is_one_sentence(
    runtime: Runtime, spark: SparkSession, cloud: CloudStore, tmp_path: Path
) -> None:
    data = runtime.config(tmp_path, runtime.topic()) | {"storage": cloud.settings}
    data["delta"] = {"path": re.sub(r"//lake-\w+", "//no-such-bucket", f"{cloud.root}/messages")}
    with pytest.raises(TableError, match="the bucket no-such-bucket does not exist"):
        run_once(spark, data)


@pytest.mark.long
@pytest.mark.parametrize("cloud", ["abfss"], indirect=True)
def test_a_wrong_key_of_an_account_is_one_sentence(
    runtime: Runtime, spark: SparkSession, cloud: CloudStore, tmp_path: Path
) -> None:
    data = runtime.config(tmp_path, runtime.topic()) | {
        "storage": cloud.settings | {"account_key": "bm90LWl0"}
    }
    data["delta"] = {"path": f"{cloud.root}/messages"}
    with pytest.raises(TableError, match="refuses the credentials for the bucket"):
        run_once(spark, data)


def test_the_keys_are_in_no_file_of_the_checkpoint_and_in_no_plan(
    runtime: Runtime, spark: SparkSession, store: ObjectStore, tmp_path: Path
) -> None:
    from ledgerlake.api import run

    topic = runtime.topic()
    publish_numbers(runtime, topic, range(10))
    data = in_store(runtime, tmp_path, store, topic) | {"storage": store.settings}
    pipeline = run(spark, parse_config(data), once=True)
    try:
        pipeline.wait()
        assert pipeline.query is not None
        plan = pipeline.query._jsq.explainInternal(True)
    finally:
        pipeline.close()
    assert SECRET_KEY not in plan
    assert SECRET_KEY not in str(pipeline.query.lastProgress)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files
    assert not [file for file in files if SECRET_KEY.encode() in file.read_bytes()]


def test_a_missing_bucket_is_no_missing_checkpoint(
    runtime: Runtime, store: ObjectStore, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = in_store(runtime, tmp_path, store, topic) | {"storage": store.settings}
    runtime.client().subscribe(topic, f"ledgerlake-{data['stream']['name']}").close()
    data["stream"]["checkpoint"] = "s3://no-such-bucket/checkpoint"
    result = ledgerlake("forget", config_file(tmp_path, data))
    assert "the bucket no-such-bucket does not exist" in sentence(result, 2)
    assert list(runtime.subscriptions(topic)) == [f"ledgerlake-{data['stream']['name']}"]
