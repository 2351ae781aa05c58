"""Batch writes, as ``df.write`` and ``foreachBatch`` make them: what a repeat stores, on a broker
that deduplicates.
"""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from ledgerlake.errors import CheckpointError, UsageError
from ledgerlake.publish.datasource import LedgerlakeDataSource
from tests.peer import TOPIC, Peer

SCHEMA = StructType([StructField("value", StringType())])


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    task = SimpleNamespace(partitionId=lambda: 0)
    monkeypatch.setattr(pyspark.TaskContext, "get", lambda: task)


def source_of(peer: Peer, **more: str) -> LedgerlakeDataSource:
    options = {"service.url": peer.url, "topic": TOPIC, "retryTimeoutMs": "2000"}
    return LedgerlakeDataSource(options | more)


def write(peer: Peer, *values: str, **more: str) -> None:
    more = {"pulsar.producer.batchingEnabled": "false"} | more
    writer = source_of(peer, **more).writer(SCHEMA, overwrite=False)
    writer.write(iter([pa.RecordBatch.from_pydict({"value": list(values)})]))


def numbered(version: int) -> dict[str, str]:
    return {"pulsar.producer.producerName": "orders-out", "txnVersion": str(version)}


def test_a_batch_write_that_is_run_again_under_its_version_stores_nothing_twice() -> None:
    with Peer() as peer:
        for version in (0, 0, 1, 1, 7, 7):
            write(peer, "a", "b", **numbered(version))
        assert len(peer.stored) == 6


def test_a_batch_write_that_was_interrupted_is_completed_by_its_repeat() -> None:
    with Peer() as peer:
        write(peer, "a", **numbered(3))
        write(peer, "a", "b", "c", **numbered(3))
        assert len(peer.stored) == 3


def test_a_version_before_the_last_one_is_an_error() -> None:
    with Peer() as peer:
        write(peer, "a", **numbered(3))
        with pytest.raises(CheckpointError, match="this is micro-batch 2"):
            write(peer, "b", **numbered(2))


@pytest.mark.parametrize("more", [{}, {"pulsar.producer.producerName": "orders-out"}])
def test_without_a_version_each_batch_write_stores_its_messages(more: dict[str, str]) -> None:
    with Peer(most_producers=99) as peer:
        write(peer, "a", **more)
        write(peer, "b", **more)
        assert len(peer.stored) == 2


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"txnVersion": "1"}, "name it by 'pulsar.producer.producerName'"),
        (numbered(2**31), "the most is 2147483647"),
    ],
)
def test_a_version_that_cannot_be_is_refused(more: dict[str, str], error: str) -> None:
    with Peer() as peer, pytest.raises(UsageError, match=error):
        source_of(peer, **more).writer(SCHEMA, overwrite=False)


def test_a_query_takes_no_version() -> None:
    with Peer() as peer, pytest.raises(UsageError, match="a query numbers its micro-batches"):
        source_of(peer, **numbered(1)).streamWriter(SCHEMA, overwrite=False)
