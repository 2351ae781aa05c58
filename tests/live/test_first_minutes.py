"""The mistakes of a first day, each found by ``check`` before Spark starts, in a sentence that
leads to the mend; and a configuration of ``init`` that ``check`` finds nothing in and ``run``
takes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pulsar
import pytest

from ledgerlake.client.cursor import DurableCursor
from ledgerlake.options.config import load_config, parse_config
from tests.encryption import crypto_key_reader, key_folder
from tests.live.object_store import start_object_store
from tests.live.pipelines import (
    config_file,
    ledgerlake,
    ledgerlake_process,
    now_ms,
    publish_delayed,
    publish_numbers,
    run_once,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = pytest.mark.live


def found(folder: Path, data: dict[str, Any], **environment: str) -> dict[str, dict[str, str]]:
    """What ``check`` finds of a configuration."""
    result = ledgerlake("check", config_file(folder / "config", data), "--json", **environment)
    findings = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == int(any(finding["state"] == "problem" for finding in findings)), (
        result.stderr
    )
    return {finding["check"]: finding for finding in findings}


def problem(findings: dict[str, dict[str, str]], check: str) -> str:
    """The sentence of the check that is the only one with a problem."""
    assert [name for name, finding in findings.items() if finding["state"] == "problem"] == [check]
    return findings[check]["text"]


def test_nothing_is_wrong_with_a_new_stream_and_nothing_is_left_behind(
    runtime: Runtime, tmp_path: Path
) -> None:
    topic = runtime.topic(partitions=2)
    publish_numbers(runtime, topic, range(10))
    findings = found(tmp_path, runtime.config(tmp_path, topic))
    assert {finding["state"] for finding in findings.values()} <= {"ok", "warning"}
    assert "broker's timestamp" in findings["broker metadata"]["text"]
    assert findings["clock"]["state"] == "ok"
    assert [path.name for path in tmp_path.iterdir()] == ["config"]
    assert runtime.subscriptions(f"{topic}-partition-0") == {}


def test_a_host_that_does_not_resolve(runtime: Runtime, tmp_path: Path) -> None:
    findings = found(
        tmp_path, runtime.config(tmp_path, "t", service_url="pulsar://no-such-host.invalid:6650")
    )
    assert "does not resolve" in problem(findings, "broker")


def test_tls_at_a_port_without_it(runtime: Runtime, tmp_path: Path) -> None:
    url = runtime.service_url.replace("pulsar://", "pulsar+ssl://")
    text = problem(found(tmp_path, runtime.config(tmp_path, "t", service_url=url)), "broker")
    assert "check that the port is the one for TLS" in text


def test_a_misspelt_topic(runtime: Runtime, tmp_path: Path) -> None:
    topic = runtime.topic()
    findings = found(tmp_path, runtime.config(tmp_path, f"{topic}s"))
    assert f"the topic does not exist; create it or correct its name; there is {topic}" in problem(
        findings, "topics"
    )
    listed = ledgerlake("peek", topic, LEDGERLAKE_SERVICE_URL=runtime.service_url)
    assert listed.returncode == 0
    assert not any(
        name.endswith(f"{topic}s") for name in runtime.cluster().topics_of("public/default")
    )


def test_a_namespace_that_is_missing(runtime: Runtime, tmp_path: Path) -> None:
    text = problem(found(tmp_path, runtime.config(tmp_path, "public/nowhere/orders")), "topics")
    assert "public/nowhere" in text


def test_an_encrypted_topic_without_its_key(runtime: Runtime, tmp_path: Path) -> None:
    topic = runtime.topic()
    producer = runtime.client().create_producer(
        topic, encryption_key="first", crypto_key_reader=crypto_key_reader(tmp_path, "first")
    )
    producer.send(b"secret")
    producer.close()
    text = problem(found(tmp_path, runtime.config(tmp_path, topic)), "decryption")
    assert "are encrypted for first" in text
    assert "[source] crypto_key_folder" in text
    with_key = runtime.config(tmp_path, topic, crypto_key_folder=key_folder(tmp_path, "first"))
    assert found(tmp_path, with_key)["decryption"]["state"] == "ok"
    other_key = runtime.config(
        tmp_path, topic, crypto_key_folder=key_folder(tmp_path / "other", "second")
    )
    assert "no key here opens them" in problem(found(tmp_path, other_key), "decryption")


def test_a_schema_that_does_not_fit_the_shape(runtime: Runtime, tmp_path: Path) -> None:
    class Order(pulsar.schema.Record):
        pulsar = pulsar.schema.String()

    topic = runtime.topic()
    runtime.client().create_producer(topic, schema=pulsar.schema.JsonSchema(Order)).close()
    data = runtime.config(tmp_path, topic)
    data["delta"]["shape"] = "record"
    text = problem(found(tmp_path, data), "schema")
    assert text.startswith(f"messages of {topic} would be rejects: a schema has a field pulsar")


def test_a_second_run_is_found_while_the_first_one_goes_on(
    runtime: Runtime, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic)
    cursor = DurableCursor(runtime.cluster(), topic, parse_config(data).subscription)
    cursor.ensure(from_earliest=True)
    assert "runs now, with another checkpoint" in problem(found(tmp_path, data), "checkpoint")
    assert cursor.is_open
    cursor.close()
    assert found(tmp_path, data)["checkpoint"]["state"] == "ok"


def test_a_bucket_that_is_missing(runtime: Runtime, tmp_path: Path) -> None:
    data = runtime.config(tmp_path, runtime.topic())
    data["delta"] = {"path": "s3://no-such-bucket/orders"}
    with start_object_store() as store:
        text = problem(found(tmp_path, data, **store.environment), "tables")
        assert text.endswith(
            f"the bucket no-such-bucket does not exist at {store.endpoint_url}; make it first"
        )
        wrong_keys = {**store.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}
        assert "refuses the credentials" in problem(found(tmp_path, data, **wrong_keys), "tables")
        data = runtime.config(tmp_path, runtime.topic())
        data["stream"]["checkpoint"] = "s3://no-such-bucket/checkpoint"
        assert (
            "org.apache.hadoop:hadoop-aws:"
            in found(tmp_path, data, **store.environment)["spark"]["text"]
        )


def test_a_topic_of_due_messages(runtime: Runtime, tmp_path: Path) -> None:
    data = runtime.config(tmp_path, runtime.topic())
    data["deliver"] = {"topic": runtime.topic()}
    assert found(tmp_path, data)["deliver"]["state"] == "ok"
    data["deliver"] = {"topic": f"{runtime.topic()}-not-there"}
    findings = found(tmp_path, data)
    assert findings["deliver"]["state"] == "warning"
    assert "create it" in findings["deliver"]["text"]


@pytest.mark.spark
def test_a_checkpoint_that_was_lost_or_is_of_another_topic(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(10))
    data = runtime.config(tmp_path, topic)
    run_once(spark, data)
    assert "goes on after batch" in found(tmp_path, data)["checkpoint"]["text"]
    other_topic = runtime.topic()
    other = runtime.config(tmp_path, other_topic)
    assert f"of a stream that reads {topic}, and the configuration selects none" in problem(
        found(tmp_path, other), "checkpoint"
    )
    run_once(spark, runtime.config(tmp_path, topic, other_topic))
    checkpoint = found(tmp_path, other)["checkpoint"]
    assert checkpoint["state"] == "warning"
    assert f"has read {topic}, which the configuration does not name any more" in checkpoint["text"]
    renamed = runtime.config(tmp_path, topic, name="renamed")
    findings = found(tmp_path, renamed)
    assert "set [stream] name back" in findings["checkpoint"]["text"]
    # The table has the topic from the stream of the former name.
    assert {findings[check]["state"] for check in ("checkpoint", "tables")} == {"problem"}
    (tmp_path / "checkpoint").rename(tmp_path / "away")
    assert "there is no checkpoint at" in problem(found(tmp_path, data), "checkpoint")
    for table in ("messages", "rejects"):
        (tmp_path / table).rename(tmp_path / f"{table}-away")
    assert "has read" in problem(found(tmp_path, data), "checkpoint")


def test_init_looks_at_the_topic_and_run_takes_the_file(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    topic = runtime.topic(partitions=2)
    publish_numbers(runtime, topic, range(100), batch=10)
    publish_delayed(runtime, topic, [(b"100", now_ms() + 1)], batching_enabled=False)
    result = ledgerlake("init", "orders.toml", "--topic", topic, "--table", "lake", "--json",
                        LEDGERLAKE_SERVICE_URL=runtime.service_url)  # fmt: skip
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    last = facts["last_entries"]
    assert (facts["partitions"], facts["messages"], facts["schema"]) == (2, 101, "")
    assert (last["has_broker_metadata"], last["has_delayed"]) == (True, True)
    assert ledgerlake("check", "orders.toml").returncode == 0
    config = load_config("orders.toml")
    assert (config.delta.shape, config.delay.enabled) == ("messages", True)
    ran = ledgerlake_process("run", "orders.toml", "--once")
    assert ran.returncode == 0, ran.stderr
    assert "101 messages and 0 rejects" in ran.stderr


def test_init_finds_the_columns_of_a_schema(runtime: Runtime, tmp_path: Path) -> None:
    class Order(pulsar.schema.Record):
        id = pulsar.schema.Integer()
        item = pulsar.schema.String()

    topic = runtime.topic()
    runtime.client().create_producer(topic, schema=pulsar.schema.AvroSchema(Order)).close()
    file = tmp_path / "orders.toml"
    assert (
        ledgerlake(
            "init", str(file), "--topic", topic, "--service-url", runtime.service_url
        ).returncode
        == 0
    )
    assert load_config(file).delta.shape == "record"
    assert "the columns id, item, and pulsar" in file.read_text()
