"""Rejects that fit by now come into the tables, once each, over interruptions."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from pulsar import schema as ps

from ledgerlake.api import parse_config
from ledgerlake.inspect.reject_counts import count_rejects
from ledgerlake.replay.replay import replay
from ledgerlake.table.delta_table import Table
from ledgerlake.verify.verify import verify
from tests.live.pipelines import config_file, ledgerlake, now_ms, rejects_rows, run_once
from tests.live.test_many_tables import Sale, config, publish, rows_of, sale
from tests.live.test_schemas import send

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ledgerlake.stored.places import Place
    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]


def numbered(tmp_path: Path, runtime: Runtime, topic: str, sql: str) -> dict[str, Any]:
    data = runtime.config(tmp_path, topic)
    data["delta"] |= {"shape": "record", "sql": sql}
    return data


STRICT = "select cast(decode(value) as int) as n from messages"
LENIENT = "select try_cast(decode(value) as int) as n from messages"


def test_what_a_corrected_query_takes_comes_once_and_is_late(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = numbered(tmp_path, runtime, topic, STRICT)
    publish(runtime, topic, [b"1", b"two", b"3", b"four"])
    run_once(spark, data)
    publish(runtime, topic, [b"5"])
    run_once(spark, data)
    assert sorted(row["n"] for row in rows_of(tmp_path, "messages")) == [1, 3, 5]
    assert replay(parse_config(data)).left == {"transform_failed": 2}
    data["delta"]["sql"] = LENIENT
    done = parse_config(data)
    assert replay(done).replayed == {"transform_failed": 2}
    assert replay(done).replayed == {}
    table = DeltaTable(str(tmp_path / "messages")).to_pyarrow_table()
    rows = sorted(
        zip(table["pulsar"].to_pylist(), table["n"].to_pylist(), strict=True),
        key=lambda row: row[0]["entry_id"],
    )
    assert len(rows) == 5
    assert [(row["late"], n) for row, n in rows if n is None] == [(True, None)] * 2
    assert verify(done).clean
    assert count_rejects(done) == []
    assert (
        sorted(row["reason"] for row in rejects_rows(tmp_path))
        == ["replayed"] * 2 + ["transform_failed"] * 2
    )
    # And the pipeline goes on.
    publish(runtime, topic, [b"6"])
    run_once(spark, data)
    assert len(rows_of(tmp_path, "messages")) == 6
    assert verify(done).clean


def test_messages_of_a_batch_have_their_places_back(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = config(runtime, tmp_path, [topic], [{"path": "t", "where": "key = 'a'"}])
    producer = runtime.client().create_producer(
        topic, batching_enabled=True, batching_max_publish_delay_ms=500
    )
    for number in range(6):
        producer.send_async(b"%d" % number, lambda *_: None, partition_key="ab"[number % 2])
    producer.flush()
    producer.close()
    run_once(spark, data)
    assert [row["value"] for row in rows_of(tmp_path, "t")] == [b"0", b"2", b"4"]
    data["tables"][0]["where"] = "key is not null"
    done = parse_config(data)
    assert replay(done, ["no_table"]).replayed == {"no_table": 3}
    rows = rows_of(tmp_path, "t")
    assert [row["value"] for row in rows] == [b"%d" % number for number in range(6)]
    assert [row["batch_index"] for row in rows] == list(range(6))
    assert len({row["message_id"] for row in rows}) == 6
    assert [row["broker_index"] - rows[0]["broker_index"] for row in rows] == list(range(6))
    assert verify(done).clean


def test_a_message_comes_into_the_tables_that_lack_it_alone(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = config(
        runtime,
        tmp_path,
        [topic],
        [
            {"path": "all"},
            {"path": "n", "shape": "record", "sql": STRICT},
            {"path": "latest", "mode": "latest"},
        ],
    )
    publish(runtime, topic, [b"1", b"two"], partition_key="k")
    run_once(spark, data)
    data["tables"][1]["sql"] = LENIENT
    done = parse_config(data)
    assert replay(done).replayed == {"transform_failed": 1}
    assert [row["value"] for row in rows_of(tmp_path, "all")] == [b"1", b"two"]
    assert sorted(str(row["n"]) for row in rows_of(tmp_path, "n")) == ["1", "None"]
    assert verify(done).clean


@pytest.mark.parametrize("commits", [0, 1, 2])
def test_an_interrupted_replay_is_finished_by_the_next_one(
    runtime: Runtime,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    commits: int,
) -> None:
    topic = runtime.topic()
    tables = [{"path": name, "shape": "record", "sql": STRICT} for name in ("a", "b")]
    data = config(runtime, tmp_path, [topic], tables)
    publish(runtime, topic, [b"%d" % number if number % 2 else b"x" for number in range(10)])
    run_once(spark, data)
    for table in data["tables"]:
        table["sql"] = LENIENT
    done = parse_config(data)
    append = Table.append_once
    landed: list[Place] = []

    def killed(table: Table, *arguments: Any) -> None:
        if len(landed) == commits:
            raise KeyboardInterrupt
        append(table, *arguments)
        landed.append(table.path)

    with monkeypatch.context() as changed:
        changed.setattr(Table, "append_once", killed)
        with pytest.raises(KeyboardInterrupt):
            replay(done)
    replay(done)
    for name in ("a", "b"):
        assert len(rows_of(tmp_path, name)) == 10
    assert [row["reason"] for row in rejects_rows(tmp_path)].count("replayed") == 5
    assert replay(done).replayed == {}
    assert verify(done).clean


def test_a_large_message_comes_out_of_its_evicted_chunks(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic)
    data["chunks"] = {"max_message_bytes": 5_000_000}
    large = bytes(range(256)) * 40_000
    producer = runtime.client().create_producer(
        topic, chunking_enabled=True, batching_enabled=False
    )
    producer.send(large)
    producer.close()
    run_once(spark, data)
    assert {row["reason"] for row in rejects_rows(tmp_path)} == {"too_large"}
    data["chunks"] = {"max_message_bytes": 50_000_000}
    done = parse_config(data)
    assert sum(replay(done).replayed.values()) > 1
    assert [row["value"] for row in rows_of(tmp_path, "messages")] == [large]
    assert verify(done).clean


def test_a_delayed_message_waits_for_its_time(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = config(runtime, tmp_path, [topic], [{"path": "t", "where": "key = 'a'"}])
    data["delay"] = {"enabled": False}
    due_ms = now_ms() + 6000
    producer = runtime.client().create_producer(topic)
    producer.send(b"later", deliver_at=due_ms, partition_key="b")
    producer.close()
    run_once(spark, data)
    data["delay"] = {"enabled": True}
    data["tables"][0]["where"] = "true"
    done = parse_config(data)
    if now_ms() < due_ms:
        assert replay(done).left == {"no_table": 1}
    time.sleep(max(0.0, due_ms / 1000 - time.time()) + 0.1)
    assert replay(done).replayed == {"no_table": 1}
    (row,) = rows_of(tmp_path, "t")
    assert row["delivered_at"] >= row["deliver_at"]


def test_new_columns_come_with_a_replay_and_the_command_says_what_it_did(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = config(
        runtime, tmp_path, [topic], [{"path": "t", "where": "country = 'de'", "shape": "record"}]
    )
    send(runtime, topic, ps.AvroSchema(Sale), [sale(number) for number in range(6)])
    run_once(spark, data)
    data["tables"][0] |= {"where": "true", "sql": "select *, id * 2 as twice from messages"}
    path = config_file(tmp_path, data)
    result = ledgerlake("rejects", path, "--replay")
    assert (result.returncode, result.stdout) == (0, "no_table: 4 replayed, 0 do not fit\n")
    assert ledgerlake("rejects", path, "--replay").stdout == "there is nothing to replay\n"
    assert ledgerlake("rejects", path).stdout == "there are no rejects\n"
    assert sorted(row["twice"] or 0 for row in rows_of(tmp_path, "t")) == [0, 0, 2, 4, 8, 10]
    refused = ledgerlake("rejects", path, "--replay", "--reason", "data_loss")
    assert refused.returncode == 2
    assert "rejects of data_loss cannot be replayed" in refused.stderr
