"""Brokers that add no entry metadata, as is Pulsar's default: order by publish time, and loss told
by the durable cursor.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from ledgerlake.client.producer import EntryProducer
from ledgerlake.errors import DataLossError, LedgerlakeError
from ledgerlake.options.config import parse_config
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.verify.verify import verify
from ledgerlake.wire.entry import encode_entry
from tests.live.pipelines import (
    config_file,
    ledgerlake_process,
    publish_numbers,
    rejects_rows,
    rows_by_position,
    run_once,
    unload_until_trimmed,
    values,
)
from tests.live.runtime import Runtime, start_runtime
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.live, pytest.mark.spark]


@pytest.fixture(scope="module")
def bare() -> Iterator[Runtime]:
    """Such a broker, which also trims what every cursor has passed."""
    with start_runtime(keeps_everything=False, broker_metadata=False) as running:
        yield running


def test_ledgers_that_went_behind_the_cursor_are_no_loss_without_an_index(
    bare: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = bare.topic()
    data = bare.config(tmp_path, topic)
    for first in (0, 10, 20):
        publish_numbers(bare, topic, range(first, first + 10))
        run_once(spark, data)
        unload_until_trimmed(bare, topic)
    publish_numbers(bare, topic, range(30, 35))
    run_once(spark, data)
    assert sorted(values(tmp_path)) == list(range(35))
    assert rejects_rows(tmp_path) == []


def test_a_cursor_that_somebody_moved_over_unread_ledgers_is_loss_without_an_index(
    bare: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = bare.topic()
    data = bare.config(tmp_path, topic)
    publish_numbers(bare, topic, range(10))
    run_once(spark, data)
    before = bare.first_ledger(topic)
    bare.admin("PUT", topic, "/unload")
    publish_numbers(bare, topic, range(10, 20))
    bare.admin("PUT", topic, "/unload")
    publish_numbers(bare, topic, range(20, 25))
    (name,) = bare.subscriptions(topic)
    bare.admin("POST", topic, f"/subscription/{name}/skip_all")
    wait_until(lambda: bare.first_ledger(topic) > before + 1)
    with pytest.raises(
        DataLossError, match=r"an unknown number of messages after \d+:9 and before .* are lost"
    ):
        run_once(spark, data)
    data["source"]["fail_on_data_loss"] = False
    run_once(spark, data)
    assert sorted(values(tmp_path)) == [*range(10), *range(20, 25)]
    assert [row["reason"] for row in rejects_rows(tmp_path)] == ["data_loss"]


def test_an_empty_topic_whose_ledger_goes_before_its_first_message_has_lost_nothing(
    bare: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = bare.topic()
    data = bare.config(tmp_path, topic)
    run_once(spark, data)
    unload_until_trimmed(bare, topic)
    publish_numbers(bare, topic, range(5))
    run_once(spark, data)
    assert sorted(values(tmp_path)) == list(range(5))
    assert rejects_rows(tmp_path) == []


def test_what_was_skipped_before_the_first_read_of_an_empty_topic_is_loss(
    bare: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = bare.topic()
    data = bare.config(tmp_path, topic)
    run_once(spark, data)
    before = bare.first_ledger(topic)
    publish_numbers(bare, topic, range(10))
    bare.admin("PUT", topic, "/unload")
    publish_numbers(bare, topic, range(10, 15))
    (name,) = bare.subscriptions(topic)
    bare.admin("POST", topic, f"/subscription/{name}/skip_all")
    wait_until(lambda: bare.first_ledger(topic) > before)
    with pytest.raises(
        DataLossError, match=r"an unknown number of messages after \d+:-1 and before .* are lost"
    ):
        run_once(spark, data)


def test_a_broker_without_entry_metadata_gives_null_columns_one_warning_and_publish_order(
    bare: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = bare.topic()
    producer = EntryProducer(bare.cluster(), topic, "skewed")
    for number, minutes in enumerate([0, 9, -7, 3, -2, 0]):
        metadata = pb.MessageMetadata(
            producer_name="skewed",
            sequence_id=number,
            publish_time=1_700_000_000_000 + 60_000 * minutes,
        )
        producer.send(encode_entry(metadata, b"%d" % minutes))
    producer.close()
    data = bare.config(tmp_path, topic)
    ran = ledgerlake_process("run", config_file(tmp_path, data), "--once", "--json")
    assert (ran.returncode, ran.stderr.count("the broker adds no entry metadata")) == (0, 1)
    assert json.loads(ran.stdout)["messages"] == 6
    config = parse_config(data)
    rows = DeltaTable(config.delta.path).to_pyarrow_table().to_pylist()
    assert [int(row["value"]) for row in rows] == [-7, -2, 0, 0, 3, 9]
    assert {(row["broker_timestamp"], row["broker_index"]) for row in rows} == {(None, None)}
    assert verify(config).clean
    publish_numbers(bare, topic, range(100, 101))
    producer = EntryProducer(bare.cluster(), topic, "latecomer")
    metadata = pb.MessageMetadata(
        producer_name="latecomer", sequence_id=1, publish_time=1_600_000_000_000
    )
    producer.send(encode_entry(metadata, b"1"))
    producer.close()
    run_once(spark, data)
    assert {int(row["value"]): row["late"] for row in rows_by_position(config.delta.path)}[
        1
    ] is True
    verdict = verify(config)
    assert (verdict.clean, verdict.late) == (True, 1)
    with pytest.raises(LedgerlakeError, match="brokerEntryMetadataInterceptors"):
        run_once(
            spark,
            bare.config(tmp_path / "strict", topic, name="strict", require_broker_metadata=True),
        )
