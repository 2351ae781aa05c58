"""Schedules by id, sent by any client, over a restart: fired once each, none early, and none that
was replaced, cancelled, or has expired.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pulsar
import pytest
from deltalake import DeltaTable

from ledgerlake.api import Schedules
from ledgerlake.inspect.delayed_messages import waiting
from ledgerlake.options.config import parse_config
from ledgerlake.verify.verify import verify
from tests.live.pipelines import (
    config_file,
    ledgerlake,
    now_ms,
    rejects_rows,
    run_and_verify,
    running,
    small_buckets,
    table_rows,
    wait_for_rows,
)
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]

COUNT = 300


def name_of(number: int) -> str:
    return f"visit-{number}"


def test_schedules_of_any_client_fire_once_over_a_restart_in_their_last_version(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic(partitions=2)
    data = small_buckets(runtime, tmp_path, topic)
    config = parse_config(data)
    producer = runtime.client().create_producer(topic, block_if_queue_full=True)

    def put(number: int, value: str, due_ms: int | None, **properties: str) -> None:
        schedule = {"ledgerlake.schedule": name_of(number), **properties}
        producer.send_async(
            value.encode(),
            lambda *_: None,
            partition_key=name_of(number),
            properties=schedule,
            deliver_at=due_ms,
        )

    begin_ms = now_ms()
    due_ms = {number: begin_ms + 50_000 + 20 * number for number in range(COUNT)}
    for number, time_ms in due_ms.items():
        put(number, f"first {number}", time_ms)
    producer.flush()
    replaced, cancelled = range(0, COUNT, 10), range(5, COUNT, 10)
    with running(spark, data) as pipeline:
        wait_until(lambda: pipeline.delayed == COUNT)
        for number in replaced:
            due_ms[number] += 3_000 if number % 20 else -10_000
            put(number, f"moved {number}", due_ms[number])
        producer.flush()
        wait_until(lambda: pipeline.delayed == COUNT + len(replaced))
    # While nothing runs.
    for number in cancelled:
        properties = {"ledgerlake.cancel": f"schedule={name_of(number)}"}
        producer.send_async(
            b"", lambda *_: None, partition_key=name_of(number), properties=properties
        )
    put(1, "at once 1", None)
    put(2, "moved 2", due_ms[2], **{"ledgerlake.expires": str(due_ms[2] - 1_000)})
    put(3, "x" * 201, due_ms[3], **{"ledgerlake.expires": "tomorrow"})
    producer.flush()
    for command in (
        ("--in", "25 seconds", "early"),
        ("--in", "20 seconds", "--key", "k", "by command"),
    ):
        said = ledgerlake(
            "schedule",
            topic,
            "--service-url",
            runtime.service_url,
            "--id",
            "command",
            "--json",
            *command,
        )
        assert said.returncode == 0, said.stderr
        assert json.loads(said.stdout)["id"] == "command"
    sent_ms = now_ms()
    with Schedules(runtime.service_url, topic) as schedules:
        large = "l" * 12_000_000
        for text in ("early", "late"):
            soon = datetime.now(timezone.utc) + timedelta(seconds=20)
            schedules.put("large", (text + large).encode(), at=soon, properties={"a": "b"})
        schedules.put("never", b"never", at=now_ms() + 20_000)
        schedules.put("by command too", b"never", at=now_ms() + 20_000)
        schedules.cancel("never")
    config_path = config_file(tmp_path, data)
    assert ledgerlake("cancel", config_path, "--schedule", "by command too").returncode == 0
    with running(spark, data):
        wait_for_rows(tmp_path, len(cancelled) + 4)
        moved, cancelled_one = (
            waiting(spark, config, schedule_id=name_of(number)).where("is_known")
            for number in (30, 5)
        )
        assert [row["value"] for row in moved.collect()] == [b"moved 30"]
        assert cancelled_one.count() == 0
        listed = ledgerlake("waiting", config_path, "--schedule", name_of(30), "--json")
        first, *others = map(json.loads, listed.stdout.splitlines())
        assert first["properties"]["ledgerlake.schedule"] == name_of(30)
        assert not any(other["is_known"] for other in others), "large messages wait too"
    last_due_ms = max(*due_ms.values(), sent_ms + 25_000)
    time.sleep(max(0, last_due_ms + 1_000 - now_ms()) / 1000)
    verdict = run_and_verify(spark, data)
    assert verdict.clean, verdict.sentence()
    assert verdict.not_due == 0
    rows = table_rows(tmp_path)
    for row in rows:
        assert row["delivered_at"] is None or row["delivered_at"] >= row["deliver_at"]
    expected = {
        number: f"moved {number}" if number in replaced else f"first {number}" for number in due_ms
    }
    for number in [2, *cancelled]:
        del expected[number]
    expected[1] = "at once 1"
    delivered = Counter(row["value"] for row in rows if row["value"])
    large_values = [value for value in delivered if len(value) > 1_000_000]
    assert large_values == [("late" + large).encode()]
    assert delivered - Counter(large_values) == Counter(
        [*(text.encode() for text in expected.values()), b"by command"]
    )
    reasons = Counter(row["reason"] for row in rejects_rows(tmp_path))
    chunks = reasons.pop("replaced") - len(replaced) - 3
    assert chunks >= 2
    assert reasons == {"cancelled": len(cancelled) + 2, "expired": 1, "bad_schedule": 1}
    assert all(row["entry"] for row in rejects_rows(tmp_path))
    (bad,) = [row for row in rejects_rows(tmp_path) if row["reason"] == "bad_schedule"]
    assert "ISO-8601" in bad["detail"]
    assert verify(config).rejects == len(rejects_rows(tmp_path))


def test_cancels_and_pauses_are_rows_of_a_typed_table_too(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic)
    data["delta"] |= {"shape": "record", "json_fields": {"id": "long"}}
    with Schedules(runtime.service_url, topic) as schedules:
        schedules.put("now", b'{"id": 1}')
        schedules.put("later", b'{"id": 2}', at=now_ms() + 3_600_000)
        schedules.cancel("later")
        schedules.pause(all_schedules=True)
        schedules.resume("now")
    assert ledgerlake("cancel", config_file(tmp_path, data), "--key", "k").returncode == 0
    verdict = run_and_verify(spark, data)
    assert verdict.clean, verdict.sentence()
    assert (verdict.messages, verdict.rejects, verdict.not_due) == (5, 0, 1)
    ids = DeltaTable(str(tmp_path / "messages")).to_pyarrow_table()["id"].to_pylist()
    assert Counter(ids) == {1: 1, None: 4}


def test_repetitions_fire_once_each_over_restarts_on_the_table_and_the_topic(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    runtime = runtime.deduplicating()
    topic, target = runtime.topic(partitions=2), runtime.topic()
    data = small_buckets(runtime, tmp_path, topic)
    data["deliver"] = {"topic": target}
    config = parse_config(data)
    with Schedules(runtime.service_url, topic) as schedules:
        for number in range(20):
            schedules.put(f"second-{number}", b"s%d" % number, cron="* * * * * *", count=1_000)
            schedules.put(
                f"pair-{number}",
                b"p%d" % number,
                every=timedelta(seconds=2),
                timezone="Asia/Kolkata",
            )
        started_ms = now_ms()
        with running(spark, data):
            wait_for_rows(tmp_path, 150)
            (shown,) = waiting(spark, config, schedule_id="second-3").collect()
            assert shown.deliver_at.timestamp() * 1000 > started_ms
        listed = ledgerlake(
            "waiting", config_file(tmp_path, data), "--schedule", "pair-3", "--json"
        )
        assert json.loads(listed.stdout)["properties"]["ledgerlake.every"] == "PT2.000S"
        schedules.pause("second-1")
        paused_ms = now_ms()
        schedules.put("second-2", b"changed", cron="*/3 * * * * *", until=paused_ms + 60_000)
        time.sleep(4)
        schedules.put("once", b"once", at=now_ms() + 3_600_000, properties={"a": "b"})
        with running(spark, data) as pipeline:
            wait_until(lambda: pipeline.delayed >= 41)
        for schedule_id, is_paused in (("second-1", True), ("second-2", False), ("once", False)):
            listed = ledgerlake(
                "waiting", config_file(tmp_path, data), "--schedule", schedule_id, "--json"
            )
            assert bool(json.loads(listed.stdout)["paused_since"]) == is_paused, listed.stdout
        moved = ledgerlake(
            "reschedule", config_file(tmp_path, data), "--id", "once", "--in", "5 seconds", "--json"
        )
        assert moved.returncode == 0, moved.stderr
        due = datetime.fromisoformat(json.loads(moved.stdout)["due"].replace("Z", "+00:00"))
        with running(spark, data):
            rows_before = len(table_rows(tmp_path))
            wait_for_rows(tmp_path, rows_before + 150)
            schedules.resume(all_schedules=True)
        for number in range(20):
            schedules.cancel(f"second-{number}")
            schedules.cancel(f"pair-{number}")
        ended_ms = now_ms()
    time.sleep(3)
    # What was missed meanwhile may come at once, and the moved message is due later.
    wait_until(lambda: now_ms() > due.timestamp() * 1000 + 100)
    verdict = run_and_verify(spark, data)
    assert verdict.clean, verdict.sentence()
    rows = [row for row in table_rows(tmp_path) if "ledgerlake.timezone_data" in row["properties"]]
    numbers: dict[bytes, list[int]] = {}
    for row in rows:
        nominal = datetime.fromisoformat(
            row["properties"]["ledgerlake.occurrence_time"].replace("Z", "+00:00")
        )
        assert row["delivered_at"] >= row["deliver_at"] == nominal
        assert nominal.timestamp() * 1000 <= ended_ms + 100
        numbers.setdefault(row["value"], []).append(int(row["properties"]["ledgerlake.occurrence"]))
    seconds = (ended_ms - started_ms) // 1000
    for number in (0, *range(3, 20)):
        fired = sorted(numbers[b"s%d" % number])
        assert fired == list(range(1, len(fired) + 1))
        assert len(fired) >= seconds - 2
    for number in range(20):
        fired = sorted(numbers[b"p%d" % number])
        assert fired == list(range(1, len(fired) + 1))
        assert len(fired) >= seconds // 2 - 2
    assert len(numbers[b"s1"]) <= (paused_ms - started_ms) // 1000 + 3
    assert [row["properties"]["a"] for row in table_rows(tmp_path) if row["value"] == b"once"] == [
        "b"
    ]
    assert sorted(numbers[b"changed"]) == list(range(1, len(numbers[b"changed"]) + 1))
    on_topic = Counter(
        occurrence_of(message) for message in delivered_on(runtime, target, len(rows) + 1)
    )
    assert on_topic.pop((b"once", "1")) == 1
    assert on_topic == Counter(
        (row["value"], row["properties"]["ledgerlake.occurrence"]) for row in rows
    )
    reasons = Counter(row["reason"] for row in rejects_rows(tmp_path))
    assert reasons == {"replaced": 1, "cancelled": 40}
    # A message that was moved is a reject at its first time.
    assert verdict.not_due == 1
    assert waiting(spark, config).count() == 0


def occurrence_of(message: Any) -> tuple[bytes, str]:
    return message.data(), message.properties()["ledgerlake.occurrence"]


def delivered_on(runtime: Runtime, target: str, count: int) -> list[Any]:
    """The messages on a topic: so many, and no more."""
    reader = runtime.client().create_reader(target, pulsar.MessageId.earliest)
    messages = [reader.read_next(timeout_millis=30_000) for _ in range(count)]
    assert not reader.has_message_available()
    reader.close()
    return messages
