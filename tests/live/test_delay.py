"""Delayed delivery (PIP-195): never early, in order, once, whatever happens meanwhile."""

from __future__ import annotations

import bisect
import random
import threading
import time
from collections import Counter
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from ledgerlake.api import messages, run
from ledgerlake.inspect.delayed_counts import delayed_counts
from ledgerlake.inspect.delayed_messages import waiting
from ledgerlake.inspect.due_counts import due_counts
from ledgerlake.options.config import parse_config
from ledgerlake.publish.cancel import cancel
from ledgerlake.publish.large_messages import LargeMessageProducer
from ledgerlake.verify.verify import verify
from ledgerlake.wire.limits import MAX_TIME_MS
from ledgerlake.wire.message_id import ChunkMessageId
from tests.live.pipelines import (
    backlog,
    config_file,
    forget_last_commit,
    ledgerlake,
    now_ms,
    publish_delayed,
    rejects_rows,
    run_and_verify,
    run_once,
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


def milliseconds(moment: Any) -> int:
    return round(moment.timestamp() * 1000)


def test_delays_among_other_messages_are_kept(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, campaign_is_long: bool
) -> None:
    messages, most_delay_ms = (15_000, 60_000) if campaign_is_long else (1_500, 6_000)
    topic = runtime.topic(partitions=2)
    data = runtime.config(tmp_path, topic)
    data["stream"]["trigger"] = "1 second"
    data["delay"] = {"min_indexes_per_bucket": 2000, "max_indexes_per_segment": 500}
    config = parse_config(data)
    commits_ms: list[int] = []
    pipeline = run(spark, config, on_batch=lambda _: commits_ms.append(now_ms()))
    count = 0
    for _ in range(3):
        # Workers and their compiled code are to be warm before anything is measured.
        publish_delayed(runtime, topic, [(b"warm", now_ms() + 100) for _ in range(1000)])
        count += 1000
        wait_for_rows(tmp_path, count)

    def produce(number: int) -> None:
        rng = random.Random(number)
        producer = runtime.client().create_producer(topic, block_if_queue_full=True)
        for index in range(messages):
            delay_ms = rng.randrange(most_delay_ms) if index % 6 else None
            deliver_ms = None if delay_ms is None else now_ms() + delay_ms
            producer.send_async(b"%d-%d" % (number, index), lambda *_: None, deliver_at=deliver_ms)
            if index % 100 == 0:
                time.sleep(0.1)
        producer.flush()
        producer.close()

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(most_delay_ms / 1000 + 3)
    pipeline.stop()
    pipeline.close()
    run(spark, config, once=True).wait()
    verdict = verify(config)
    assert verdict.clean, verdict.sentence()
    assert (verdict.messages, verdict.not_due, verdict.late, verdict.rejects) == (
        count + 4 * messages,
        0,
        0,
        0,
    ), verdict.sentence()
    delayed_rows = [
        row
        for row in table_rows(tmp_path)
        if row["delivered_at"] is not None and row["value"] != b"warm"
    ]
    assert len(delayed_rows) > 2 * messages
    lateness_ms = sorted(
        milliseconds(row["delivered_at"]) - milliseconds(row["deliver_at"]) for row in delayed_rows
    )
    visible_ms = []
    for row in delayed_rows:
        place = bisect.bisect_left(commits_ms, milliseconds(row["delivered_at"]))
        if place < len(commits_ms):
            visible_ms.append(commits_ms[place] - milliseconds(row["deliver_at"]))
    visible_ms.sort()
    assert lateness_ms[0] >= 0
    assert visible_ms[0] >= 0
    for name, times in (("let go", lateness_ms), ("in the table", visible_ms)):
        print(
            f"{name}: p50 {times[len(times) // 2]} ms, p99 {times[len(times) * 99 // 100]} ms "
            "late, trigger 1,000 ms"
        )


@pytest.mark.parametrize(
    "storage", ["state", pytest.param("folder", marks=pytest.mark.long), "reread"]
)
def test_an_idle_topic_releases_on_time_whatever_keeps_the_messages(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, storage: str
) -> None:
    topic = runtime.topic()
    options = {
        "state": {},
        "folder": {"storage": str(tmp_path / "buckets")},
        "reread": {"payloads": "reread"},
    }[storage]
    data = small_buckets(runtime, tmp_path, topic, **options)
    publish_delayed(runtime, topic, [(b"now", None)])
    assert run_and_verify(spark, data).messages == 1
    due_ms = now_ms() + 15_000
    publish_delayed(
        runtime, topic, [(b"%d" % number, due_ms + number % 50) for number in range(100)]
    )
    with running(spark, data) as pipeline:
        wait_until(lambda: waits(pipeline) == 100)
        unread = 100 if storage == "reread" else 0
        wait_until(lambda: backlog(runtime, topic) == unread)
        wait_for_rows(tmp_path, 101)
        wait_until(lambda: backlog(runtime, topic) == 0)
    rows = table_rows(tmp_path)[1:]
    assert [row["value"] for row in rows] == [b"%d" % number for number in range(100)]
    for index, row in enumerate(rows):
        assert milliseconds(row["deliver_at"]) == due_ms + index % 50
        assert milliseconds(row["delivered_at"]) >= milliseconds(row["deliver_at"])
    verdict = verify(parse_config(data))
    assert verdict.clean, verdict.sentence()
    assert (verdict.messages, verdict.not_due, verdict.late) == (101, 0, 0)


def test_messages_that_are_due_in_one_millisecond_leave_in_order_over_several_micro_batches(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ledgerlake.options.config.MOST_DUE", 20)
    topic = runtime.topic()
    data = small_buckets(runtime, tmp_path, topic)
    due_ms = now_ms() + 15_000
    values = [b"%d" % number for number in range(200)]
    publish_delayed(
        runtime,
        topic,
        [(value, due_ms + 20_000 * (number // 100)) for number, value in enumerate(values)],
    )
    run_once(spark, data)
    time.sleep(max(0, due_ms + 100 - now_ms()) / 1000)
    before = commits(tmp_path)
    verdict = run_and_verify(spark, data)
    assert verdict.clean, verdict.sentence()
    assert (verdict.messages, verdict.not_due) == (100, 100), "a run to the end leaves nothing due"
    assert commits(tmp_path) - before > 2
    with running(spark, data):
        wait_for_rows(tmp_path, 200)
    assert [row["value"] for row in table_rows(tmp_path)] == values
    verdict = verify(parse_config(data))
    assert verdict.clean, verdict.sentence()


def commits(folder: Path) -> int:
    return DeltaTable(str(folder / "messages")).version()


def waits(pipeline: Any) -> int:
    return int(pipeline.delayed)


def test_what_waits_survives_restarts_and_is_shown(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic(partitions=2)
    data = small_buckets(runtime, tmp_path, topic)
    due_ms = now_ms() + 1_800_000
    for part in range(3):
        publish_delayed(
            runtime, topic, [(b"%d-%d" % (part, number), due_ms + number) for number in range(60)]
        )
        verdict = run_and_verify(spark, data)
        assert verdict.clean, verdict.sentence()
        assert (verdict.messages, verdict.not_due) == (0, 60 * (part + 1))
    partitions = delayed_counts(spark, parse_config(data))
    assert sum(partition.delayed for partition in partitions) == 180
    assert sum(partition.horizon["within an hour"] for partition in partitions) == 180
    assert all(due_ms <= partition.next_due_ms[0] < due_ms + 60 for partition in partitions)
    assert all(
        f"{partition.delayed:,} delayed messages" in partition.lines()[0]
        for partition in partitions
    )
    rows = waiting(spark, parse_config(data)).collect()
    expected = sorted(b"%d-%d" % (part, number) for part in range(3) for number in range(60))
    assert sorted(row.value for row in rows) == expected
    assert all(
        milliseconds(row.deliver_at) == due_ms + int(row.value.partition(b"-")[2]) for row in rows
    )
    listed = ledgerlake("waiting", config_file(tmp_path, data), "-n", "2")
    due = (
        datetime.fromtimestamp(due_ms / 1000, timezone.utc)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [due, due], listed.stderr
    assert sum(span.count for span in due_counts(parse_config(data), 86_400_000)) == 180
    soon_ms = now_ms() + 1000
    publish_delayed(
        runtime, topic, [(b"soon-%d" % number, soon_ms + number) for number in range(60)]
    )
    time.sleep(max(0, soon_ms + 100 - now_ms()) / 1000)
    verdict = run_and_verify(spark, data)
    assert verdict.clean, verdict.sentence()
    assert (verdict.messages, verdict.not_due, verdict.late) == (60, 180, 0)
    assert sum(partition.delayed for partition in delayed_counts(spark, parse_config(data))) == 180


def state_files(folder: Path) -> dict[Path, bytes]:
    paths = (folder / "checkpoint" / "state" / "0").rglob("*.changelog")
    return {path: path.read_bytes() for path in paths if not path.name.startswith(".")}


def test_a_second_run_of_a_micro_batch_leaves_the_state_files_of_the_first_as_they_are(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    """Both may go on for a while, if the process of the first one was only suspended."""
    topic = runtime.topic()
    data = small_buckets(runtime, tmp_path, topic)
    # The cursor is past the micro-batch, which would be refused.
    data["source"]["fail_on_data_loss"] = False
    due_ms = now_ms() + 1_800_000
    publish_delayed(runtime, topic, [(b"%d" % number, due_ms) for number in range(60)])
    run_and_verify(spark, data)
    before = state_files(tmp_path)
    forget_last_commit(tmp_path / "checkpoint")
    verdict = run_and_verify(spark, data)
    assert (verdict.messages, verdict.not_due) == (0, 60)
    after = state_files(tmp_path)
    assert before.items() <= after.items()
    numbers = [path.name.split("_")[0] for path in after]
    assert len(numbers) > len(set(numbers)), "the micro-batch was not run a second time"


def test_a_checkpoint_whose_state_files_are_of_version_1_goes_on(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = runtime.topic()
    data = small_buckets(runtime, tmp_path, topic)
    due_ms = now_ms() + 30_000
    publish_delayed(runtime, topic, [(b"a%d" % number, due_ms) for number in range(60)])
    with monkeypatch.context() as older:
        older.setattr("ledgerlake.pipeline.spark_log.STATE_VERSION", 1)
        assert run_and_verify(spark, data).not_due == 60
    assert (tmp_path / "checkpoint" / "commits" / "0").read_text().startswith("v1")
    assert sum(partition.delayed for partition in delayed_counts(spark, parse_config(data))) == 60
    publish_delayed(runtime, topic, [(b"b%d" % number, due_ms) for number in range(60)])
    time.sleep(max(0, due_ms + 100 - now_ms()) / 1000)
    verdict = run_and_verify(spark, data)
    assert verdict.clean, verdict.sentence()
    assert (verdict.messages, verdict.not_due, verdict.late) == (120, 0, 0)


def test_a_large_message_waits_too(runtime: Runtime, spark: SparkSession, tmp_path: Path) -> None:
    topic = runtime.topic()
    data = small_buckets(runtime, tmp_path, topic)
    due_ms = now_ms() + 30_000
    values = [bytes([number]) * (6 * 1024 * 1024 + number) for number in range(3)]
    publish_delayed(runtime, topic, [(values[0], due_ms), (values[1], None), (values[2], due_ms + 1)], chunking_enabled=True, batching_enabled=False)  # fmt: skip
    cluster = runtime.cluster()
    LargeMessageProducer(cluster, topic, chunk_bytes=1000).send(
        b"marked" * 1000, deliver_at_ms=due_ms + 2
    )
    cluster.close()
    verdict = run_and_verify(spark, data)
    assert (verdict.messages, verdict.not_due) == (1, 3), verdict.sentence()
    time.sleep(max(0, due_ms + 100 - now_ms()) / 1000)
    verdict = run_and_verify(spark, data)
    assert verdict.clean, verdict.sentence()
    assert (verdict.messages, verdict.not_due, verdict.rejects) == (4, 0, 0)
    rows = sorted(table_rows(tmp_path), key=lambda row: len(row["value"]))
    assert [row["value"] for row in rows] == [b"marked" * 1000, *values]
    assert [row["delivered_at"] is None for row in rows] == [False, False, True, False]
    assert rows[1]["chunk_count"] == 2


def test_a_large_message_that_only_its_marker_tells_waits_and_holds_nothing_in_the_topic(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    cluster = runtime.cluster()
    producer = LargeMessageProducer(cluster, topic, chunk_bytes=1000)
    large = producer.send(b"marked" * 1000, deliver_at_ms=MAX_TIME_MS)
    producer.send(b"small")
    producer.close()
    cluster.close()
    assert isinstance(large, ChunkMessageId)
    config = run_once(spark, runtime.config(tmp_path, topic, starting=f"after {large.first}"))
    assert [row["value"] for row in table_rows(tmp_path)] == [b"small"]
    assert [partition.delayed for partition in delayed_counts(spark, config)] == [1]
    assert backlog(runtime, topic) == 0


def test_cancels_by_id_and_by_key_before_and_after_due_and_while_nobody_runs(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic(partitions=2)
    data = small_buckets(runtime, tmp_path, topic)
    config = parse_config(data)
    due_ms = now_ms() + 40_000
    producer = runtime.client().create_producer(topic)
    sent = {}
    for number in range(20):
        for name, deliver_ms in (
            ("soon", now_ms() + 1),
            ("id", due_ms),
            ("key", due_ms + 1),
            ("kept", due_ms + 2),
        ):
            message_id = producer.send(
                name.encode(), partition_key=f"{name}-{number}", deliver_at=deliver_ms
            )
            sent[name, number] = f"{message_id.ledger_id()}:{message_id.entry_id()}"
    with running(spark, data):
        wait_for_rows(tmp_path, 20)
        for number in range(10):
            cancel(config, "id", sent["id", number])
            cancel(config, "key", f"key-{number}")
        cancel(config, "id", sent["soon", 1])
        cancel(config, "key", "soon-2")
    for number in range(10, 19):
        cancel(config, "id", sent["id", number])
        # As any client sends it, in a batch.
        producer.send(
            b"",
            partition_key=f"key-{number}",
            properties={"ledgerlake.cancel": f"key=key-{number}"},
        )
    assert run_and_verify(spark, data).not_due == 60
    producer.send(b"again", partition_key="key-3", deliver_at=due_ms + 3)
    time.sleep(max(0, due_ms + 1000 - now_ms()) / 1000)
    verdict = run_and_verify(spark, data)
    assert verdict.clean, verdict.sentence()
    delivered = Counter(row["value"] for row in table_rows(tmp_path))
    # Our cancels have no value.
    del delivered[b""], delivered[None]
    assert delivered == {b"soon": 20, b"kept": 20, b"id": 1, b"key": 1, b"again": 1}
    rejects = rejects_rows(tmp_path)
    assert Counter(row["reason"] for row in rejects) == {"cancelled": 38}
    assert {row["message_id"] for row in rejects} == {
        sent[name, number] for name in ("id", "key") for number in range(19)
    }
    assert all(row["entry"] for row in rejects)


def test_messages_for_any_sink_wait_too(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = small_buckets(runtime, tmp_path, topic)
    due_ms = now_ms() + 20_000
    publish_delayed(runtime, topic, [(b"now", None), (b"later", due_ms), (b"never", due_ms)])
    config = parse_config(data)
    rows: list[Any] = []
    query = (
        messages(spark, config)
        .select("entry_id", "value", "deliver_at", "delivered_at")
        .writeStream.foreachBatch(lambda batch, _: rows.extend(batch.collect()))
        .option("checkpointLocation", str(tmp_path / "own"))
        .trigger(processingTime="3 seconds")
        .start()
    )
    try:
        wait_until(lambda: len(rows) == 1)
        cancel(config, "id", f"{runtime.first_ledger(topic)}:2")
        wait_until(lambda: len(rows) == 3)
        assert now_ms() >= due_ms
        assert sorted(bytes(row.value or b"") for row in rows) == [b"", b"later", b"now"]
        (later,) = [row for row in rows if row.value == b"later"]
        assert later.delivered_at >= later.deliver_at
    finally:
        query.stop()
