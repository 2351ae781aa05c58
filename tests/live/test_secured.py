"""A broker with TLS that asks who everybody is: the right credentials work, others are told apart
in one sentence.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.api import Schedules, messages
from ledgerlake.options.config import parse_config
from ledgerlake.verify.verify import verify
from tests.live.pipelines import (
    config_file,
    ledgerlake,
    ledgerlake_process,
    run_once,
    running,
    table_rows,
    values,
    wait_for_rows,
)
from tests.live.runtime import Runtime, start_runtime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.live, pytest.mark.spark]


@pytest.fixture(scope="module")
def secured() -> Iterator[Runtime]:
    with start_runtime(secure=True, settings={"authenticationRefreshCheckSeconds": "1"}) as running:
        yield running


def config(runtime: Runtime, folder: Path, *topics: str, **auth: str) -> dict[str, Any]:
    assert runtime.security is not None
    data = runtime.config(folder, *topics)
    data["source"]["retry_timeout_s"] = 5
    data["tls"] = {"ca_file": runtime.security.ca_file}
    if auth:
        data["auth"] = auth
    return data


def publish(runtime: Runtime, topic: str, values: range) -> None:
    producer = runtime.client().create_producer(topic)
    for value in values:
        producer.send(b"%d" % value)
    producer.close()


def said_by(runtime: Runtime, folder: Path, *topics: str, **auth: str) -> str:
    """What a run that must fail says: one sentence, without the secret."""
    result = ledgerlake_process(
        "run", config_file(folder, config(runtime, folder, *topics, **auth)), "--once"
    )
    assert result.returncode == 2, result.stderr
    sentence = result.stderr.strip()
    assert sentence.count("\n") == 0
    assert all(len(secret) < 20 or secret not in sentence for secret in auth.values())
    return sentence


def test_a_token_in_a_file_opens_the_broker(
    secured: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    assert secured.security is not None
    topic = secured.topic(partitions=2)
    publish(secured, topic, range(10))
    data = config(
        secured,
        tmp_path,
        topic,
        method="token",
        token=f"file:{secured.security.folder}/admin.token",
    )
    parsed_config = run_once(spark, data)
    assert sorted(int(row["value"]) for row in table_rows(tmp_path)) == list(range(10))
    assert verify(parsed_config).clean
    peeked = ledgerlake("peek", topic, "--config", config_file(tmp_path, data), "-n", "1")
    assert (peeked.returncode, len(peeked.stdout.splitlines())) == (0, 2)


def test_a_client_certificate_opens_it_too(
    secured: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    assert secured.security is not None
    topic = secured.topic()
    publish(secured, topic, range(3))
    data = config(secured, tmp_path, topic, method="tls")
    data["tls"]["cert_file"] = str(secured.security.folder / "client.pem")
    data["tls"]["key_file"] = str(secured.security.folder / "client.key.pem")
    run_once(spark, data)
    assert len(table_rows(tmp_path)) == 3


def test_wrong_expired_and_missing_credentials_are_one_sentence_each(
    secured: Runtime, tmp_path: Path
) -> None:
    assert secured.security is not None
    topic = secured.topic()
    wrong = secured.security.admin_token[:-6] + "AAAAAA"
    assert "check the token" in said_by(secured, tmp_path, topic, method="token", token=wrong)
    expired = secured.security.token("admin", -10)
    assert "the token expired at 20" in said_by(
        secured, tmp_path, topic, method="token", token=expired
    )
    assert "no authentication is configured" in said_by(secured, tmp_path, topic)


def test_a_broker_that_nobody_vouches_for_is_not_talked_to(
    secured: Runtime, tmp_path: Path
) -> None:
    assert secured.security is not None
    data = config(
        secured, tmp_path, secured.topic(), method="token", token=secured.security.admin_token
    )
    del data["tls"]["ca_file"]
    result = ledgerlake_process("run", config_file(tmp_path, data), "--once")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "the certificate of pulsar+ssl://127.0.0.1" in result.stderr
    assert "tlsTrustCertsFilePath" in result.stderr


def test_a_topic_that_we_may_not_read_is_named(secured: Runtime, tmp_path: Path) -> None:
    assert secured.security is not None
    allowed, forbidden = secured.topic(), secured.topic()
    secured.admin("POST", allowed, "/permissions/reader", ["consume"])
    error_text = said_by(
        secured,
        tmp_path,
        allowed,
        forbidden,
        method="token",
        token=secured.security.token("reader"),
    )
    assert forbidden in error_text
    assert "AuthorizationError" in error_text


def test_the_right_to_consume_is_enough_to_read_and_that_to_produce_to_schedule(
    secured: Runtime, tmp_path: Path
) -> None:
    assert secured.security is not None
    topic = secured.topic()
    publish(secured, topic, range(3))
    for role, action in (("reader", "consume"), ("sender", "produce")):
        secured.admin("POST", topic, f"/permissions/{role}", [action])
    data = config(secured, tmp_path, topic, method="token", token=secured.security.token("reader"))
    result = ledgerlake_process("run", config_file(tmp_path, data), "--once")
    assert result.returncode == 0, result.stderr
    sender = config(
        secured, tmp_path, topic, method="token", token=secured.security.token("sender")
    )
    with Schedules(parse_config(sender).source.client, topic) as schedules:
        schedules.put("a", b"sent")


def test_due_messages_for_a_topic_that_we_may_not_send_to_stop_the_start(
    secured: Runtime, tmp_path: Path
) -> None:
    assert secured.security is not None
    topic, target = secured.topic(), secured.topic()
    secured.admin("POST", topic, "/permissions/reader", ["consume"])
    data = config(secured, tmp_path, topic, method="token", token=secured.security.token("reader"))
    result = ledgerlake_process(
        "run", config_file(tmp_path, data | {"deliver": {"topic": target}}), "--once"
    )
    assert result.returncode == 2, result.stderr
    assert (
        f"may not send to {target}, for which it needs the permission to produce" in result.stderr
    )


def test_a_token_that_expires_in_mid_stream_is_refreshed(
    secured: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    assert secured.security is not None
    security = secured.security
    topic = secured.topic()
    file = tmp_path / "token"
    file.write_text(security.token("admin", 6))
    data = config(secured, tmp_path, topic, method="token", token=f"file:{file}")
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(2):
            file.write_text(security.token("admin", 6))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with running(spark, data) as pipeline:
            for value in range(15):
                publish(secured, topic, range(value, value + 1))
                time.sleep(1)
            wait_for_rows(tmp_path, 15)
            assert pipeline.query.isActive
    finally:
        stop.set()
        thread.join()
    assert values(tmp_path) == list(range(15))


def test_secrets_are_in_no_plan_progress_offset_or_log(
    secured: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    assert secured.security is not None
    secret = secured.security.admin_token
    topic = secured.topic()
    publish(secured, topic, range(3))
    data = config(secured, tmp_path, topic, method="token", token=secret)
    ran = ledgerlake_process("run", config_file(tmp_path / "..", data), "--once", "--debug")
    assert ran.returncode == 0
    assert secret not in ran.stdout + ran.stderr
    stream = messages(spark, parse_config(data))
    query = (
        stream.writeStream.format("memory").queryName("secrets").trigger(availableNow=True).start()
    )
    query.awaitTermination()
    descriptions = [
        str(stream._jdf.queryExecution()),
        str(query.lastProgress),
        repr(parse_config(data)),
    ]
    descriptions += [str(query._jsq.explainInternal(True)), repr(parse_config(data).source)]
    assert [text for text in descriptions if secret in text] == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [file for file in files if secret.encode() in file.read_bytes()] == []
