"""One topic partition read by several tasks: the same table, in the same order, however many."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from ledgerlake.client.producer import EntryProducer
from ledgerlake.decode.codecs import compress
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.verify.verify import Verdict, verify
from ledgerlake.wire.entry import encode_batch, encode_entry
from tests.chunks import chunk_entries
from tests.live.pipelines import publish_entries, run_once, small, table_rows

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark, pytest.mark.slow]

_BATCH = 1000


def publish(runtime: Runtime, topic: str, numbers: range) -> None:
    """Batches of a thousand numbers of a hundred bytes."""
    producer = EntryProducer(runtime.cluster(), topic, "writer")
    for first in numbers[::_BATCH]:
        plain = encode_batch(
            [(pb.SingleMessageMetadata(), b"%0100d" % (first + place)) for place in range(_BATCH)]
        )
        metadata = pb.MessageMetadata(
            producer_name="writer",
            sequence_id=first,
            publish_time=1_700_000_000_000 + first,
            compression=pb.LZ4,
            uncompressed_size=len(plain),
            num_messages_in_batch=_BATCH,
        )
        producer.send(encode_entry(metadata, compress(pb.LZ4, plain)), _BATCH)
    producer.close()


def table_numbers(path: str) -> tuple[pa.Table, int]:
    """The table's rows by position, and how many files they come from."""
    table = DeltaTable(path)
    columns = ["ledger_id", "entry_id", "batch_index", "broker_index", "value"]
    keys = [(name, "ascending") for name in columns[:3]]
    return table.to_pyarrow_table(columns=columns).sort_by(keys), len(table.file_uris())


def test_one_and_four_tasks_write_the_same_table(
    runtime: Runtime, spark: SparkSession, tmp_path: Path, campaign_is_long: bool
) -> None:
    count = 5_000_000 if campaign_is_long else 80_000
    topic = runtime.topic()
    for ledger in range(4):
        publish(runtime, topic, range(count)[ledger * count // 4 : (ledger + 1) * count // 4])
        runtime.admin("PUT", topic, "/unload")
    tables = []
    for tasks in (1, 4):
        folder = tmp_path / str(tasks)
        config = run_once(
            spark, runtime.config(folder, topic, name=f"split{tasks}", min_partitions=tasks)
        )
        table, files = table_numbers(config.delta.path)
        print(f"{tasks} tasks: {table.num_rows} rows in {files} files")
        assert files >= tasks
        assert verify(config).clean, verify(config).sentence()
        tables.append(table)
    first = tables[0]
    assert first.num_rows == count
    assert np.array_equal(
        pc.cast(first["value"].cast(pa.string()), pa.int64()).to_numpy(), np.arange(count)
    )
    assert np.array_equal(first["broker_index"].to_numpy(), np.arange(count))
    assert all(table.equals(first) for table in tables[1:])


def test_a_long_range_of_one_topic_partition_is_read_by_a_task_for_each_core(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    payloads = [random.Random(number).randbytes(4_500_000) for number in range(18)]
    # The range has 91 entries. Its middle is within the ninth large message.
    entries = [small(b"first")]
    for number, payload in enumerate(payloads):
        entries += chunk_entries(payload, 5, uuid=f"p-{number}")
    publish_entries(runtime, topic, entries)
    config = run_once(spark, runtime.config(tmp_path, topic))
    rows = table_rows(tmp_path)
    assert [row["value"] for row in rows] == [b"first", *payloads]
    assert verify(config) == Verdict(messages=len(rows))
    # One for each half, and one for the message between them.
    assert len(DeltaTable(config.delta.path).file_uris()) == 3
