"""verify compares a table with the latest messages with its topic, key by key."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from pulsar import schema as ps

from ledgerlake.verify.verify import verify
from tests.live.pipelines import now_ms, run_and_verify, run_once, unload_until_trimmed
from tests.live.test_many_tables import Sale, config, sale

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]

LATEST = {"path": "latest", "mode": "latest"}


def publish(
    runtime: Runtime, topic: str, *messages: tuple[str, bytes | None], **options: Any
) -> None:
    producer = runtime.client().create_producer(topic, batching_enabled=False)
    for key, value in messages:
        producer.send(value, partition_key=key, **options)
    producer.close()


def row_of(folder: Path, key: str, name: str = "latest") -> pa.Table:
    query = f"select * from t where key = '{key}'"
    return pa.table(QueryBuilder().register("t", DeltaTable(str(folder / name))).execute(query))


def put_back(folder: Path, key: str, row: pa.Table) -> None:
    """What a person does by hand: the row of a key becomes another one."""
    table = DeltaTable(str(folder / "latest"))
    table.delete(f"key = '{key}'")
    write_deltalake(DeltaTable(str(folder / "latest")), row, mode="append")


def test_an_older_row_a_missing_key_and_a_deleted_one_are_found(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic(partitions=2)
    data = config(runtime, tmp_path, [topic], [LATEST])
    publish(runtime, topic, *((f"k{number}", b"old") for number in range(6)))
    assert run_and_verify(spark, data).clean
    old = {key: row_of(tmp_path, key) for key in ("k0", "k1")}
    publish(runtime, topic, *((f"k{number}", b"new") for number in range(6)), ("k1", None))
    done = run_once(spark, data)
    verdict = verify(done)
    assert (verdict.clean, verdict.messages, verdict.undecided, verdict.not_checked) == (
        True,
        5,
        0,
        0,
    )
    put_back(tmp_path, "k0", old["k0"])
    assert verify(done).outdated == 1
    put_back(tmp_path, "k1", old["k1"])
    assert verify(done).outdated == 2
    DeltaTable(str(tmp_path / "latest")).delete("key = 'k2'")
    verdict = verify(done)
    assert (verdict.outdated, verdict.missing, verdict.clean) == (2, 1, False)
    assert "1 missing, 0 duplicate, 0 out of order, 2 outdated" in verdict.sentence()


def test_conditions_queries_and_rejects_say_which_messages_count(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = config(
        runtime,
        tmp_path,
        [topic],
        [
            {"path": "german", "mode": "latest", "shape": "record", "where": "country = 'de'"},
            {
                "path": "halves",
                "mode": "latest",
                "shape": "record",
                "sql": "select 12 // id as n from messages where id <> 4",
            },
            {"path": "strict", "mode": "latest", "where": "cast(properties['n'] as int) > 2"},
        ],
    )
    producer = runtime.client().create_producer(
        topic, schema=ps.AvroSchema(Sale), batching_enabled=False
    )
    for number in range(9):
        properties = {"n": "x" if number == 7 else str(number)}
        producer.send(sale(number), partition_key=f"k{number % 2}", properties=properties)
    producer.close()
    publish(runtime, topic, ("k0", None))
    publish(runtime, topic, ("k2", b"no sale"), properties={"n": "5"})
    done = run_once(spark, data)
    verdict = verify(done)
    assert verdict.clean, verdict.sentence()
    assert verdict.outdated == verdict.missing == 0


def test_a_large_message_and_a_delayed_one_are_the_latest(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = config(runtime, tmp_path, [topic], [LATEST])
    due_ms = now_ms() + 4000
    publish(runtime, topic, ("a", b"later"), deliver_at=due_ms)
    publish(runtime, topic, ("a", b"at once"), ("b", b"small"), ("c", b"small"))
    producer = runtime.client().create_producer(
        topic, chunking_enabled=True, batching_enabled=False
    )
    producer.send(bytes(6_000_000), partition_key="b")
    producer.close()
    verdict = run_and_verify(spark, data)
    assert (verdict.clean, verdict.messages) == (True, 3), verdict.sentence()
    assert verdict.undecided >= 1
    time.sleep(max(0.0, due_ms / 1000 - time.time()) + 0.5)
    publish(runtime, topic, ("d", b"x"))
    verdict = run_and_verify(spark, data)
    assert (verdict.clean, verdict.undecided) == (True, 1), verdict.sentence()
    assert row_of(tmp_path, "a")["value"].to_pylist() == [b"later"]


def test_rows_of_trimmed_messages_must_not_be_older_than_what_is_left(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    trimming = runtime.trimming()
    topic = trimming.topic()
    data = config(trimming, tmp_path, [topic], [LATEST])
    run_once(spark, data)
    publish(trimming, topic, ("a", b"old"), ("b", b"old"))
    run_once(spark, data)
    old = row_of(tmp_path, "a")
    unload_until_trimmed(trimming, topic)
    publish(trimming, topic, ("a", b"new"))
    done = run_once(spark, data)
    verdict = verify(done)
    assert (verdict.clean, verdict.messages, verdict.not_checked) == (True, 2, 1), (
        verdict.sentence()
    )
    put_back(tmp_path, "a", old)
    assert verify(done).outdated == 1
