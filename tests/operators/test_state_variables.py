"""Which state variables a task declares, and when; the rows that Spark hands to the stage."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor_api_client import (
    StatefulProcessorHandleState as HandleState,
)
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructField, StructType

from ledgerlake.operators.decoded_rows import RowOutput
from ledgerlake.operators.stage_rows import (
    STAGE_ROWS_DDL,
    RowKind,
    TaskReport,
    report_to_json,
    stage_row,
)
from ledgerlake.operators.state_variables import StateVariables
from ledgerlake.operators.stateful import Processor, set_up_state, stateful
from ledgerlake.wire.message_id import Position
from tests.operators.stage import SOURCE, DictState, stage_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pandas as pd
    from pyspark.sql import SparkSession

BUCKETS = StructType([StructField("bucket_id", LongType()), StructField("number", IntegerType())])
SNAPSHOT = StructType([StructField("snapshot", BinaryType())])


@dataclass
class Client:
    handle_state: HandleState

    def set_handle_state(self, state: HandleState) -> None:
        self.handle_state = state


@dataclass
class Handle:
    """Declares a variable only in the states in which Spark does."""

    client: Client
    declared: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    snapshots: Any = None

    @property
    def _statefulProcessorApiClient(self) -> Client:
        return self.client

    def getMapState(self, name: str, *schemas: StructType) -> DictState:
        assert self.client.handle_state in (HandleState.PRE_INIT, HandleState.CREATED)
        assert name not in self.declared
        self.declared[name] = schemas
        return DictState()


@pytest.fixture
def run_batch(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Handle]:
    """Runs a task of a micro-batch of a query in this process; returns its handle."""
    properties = {"sql.streaming.queryId": uuid.uuid4().hex}
    context = SimpleNamespace(getLocalProperty=properties.get, partitionId=lambda: 3)
    monkeypatch.setattr(TaskContext, "get", lambda: context)

    def run(batch_id: int) -> Handle:
        properties["streaming.sql.batchId"] = str(batch_id)
        handle = Handle(Client(HandleState.CREATED))
        handle.snapshots = declare(handle)
        return handle

    return run


def declare(handle: Any) -> Any:
    return StateVariables(handle).getMapState(
        "snapshots", "bucket_id bigint, number int", "snapshot binary"
    )


def test_the_driver_declares_all_variables() -> None:
    handle = Handle(Client(HandleState.PRE_INIT))
    declare(handle)
    assert handle.declared == {"snapshots": (BUCKETS, SNAPSHOT)}


def test_the_first_micro_batch_of_a_state_partition_declares_all_variables_however_often_it_is_tried(
    run_batch: Callable[[int], Handle],
) -> None:
    declared = [run_batch(batch_id).declared for batch_id in (7, 7, 8)]
    assert declared == [{"snapshots": (BUCKETS, SNAPSHOT)}] * 2 + [{}]


def test_a_later_one_declares_a_variable_once_and_when_it_is_used(
    run_batch: Callable[[int], Handle],
) -> None:
    run_batch(7)
    handle = run_batch(8)
    handle.client.handle_state = HandleState.INITIALIZED
    handle.snapshots.updateValue((1, 2), (b"three",))
    assert handle.declared == {"snapshots": (BUCKETS, SNAPSHOT)}
    assert handle.snapshots.getValue((1, 2)) == (b"three",)
    assert handle.client.handle_state == HandleState.INITIALIZED


def test_a_handle_whose_state_is_not_known_declares_at_once() -> None:
    class Other:
        declared: str | None = None

        def getMapState(self, name: str, *_: StructType) -> DictState:
            self.declared = name
            return DictState()

    other = Other()
    declare(other)
    assert other.declared == "snapshots"


@pytest.mark.spark
def test_a_variable_that_nothing_was_written_to_is_read_as_empty(
    spark: SparkSession, tmp_path: Path
) -> None:
    spark = spark.newSession()
    set_up_state(spark)
    spark.conf.set("spark.sql.shuffle.partitions", "1")
    report = TaskReport(Position(1, 0), 1_700_000_000_000, {}, [])
    row = stage_row(SOURCE, RowKind.REPORT, header=report_to_json(report))
    (tmp_path / "in").mkdir()
    pq.write_table(pa.Table.from_batches([row]), tmp_path / "in" / "0.parquet")
    rows = spark.readStream.schema(STAGE_ROWS_DDL).parquet(str(tmp_path / "in"))
    processor = Processor(stage_settings(), RowOutput(stage_settings()))
    writer = stateful(rows, processor, STAGE_ROWS_DDL).writeStream.format("noop")
    writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
        availableNow=True
    ).start().awaitTermination()
    for name in ("sets", "index", "snapshots", "schedule_blocks"):
        state = (
            spark.read.format("statestore")
            .option("stateVarName", name)
            .load(str(tmp_path / "checkpoint"))
        )
        assert state.collect() == []


class _FrameSizes(Processor):
    """Yields a row for each frame of its input, whose ``entry_id`` is the bytes in the frame."""

    def handleInputRows(
        self, key: tuple[str, int], rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        for frame in rows:
            yield frame.head(1).assign(entry_id=frame["entry"].map(len).sum(), entry=None)


@pytest.mark.spark
def test_the_stage_gets_its_rows_a_few_megabytes_at_a_time(
    spark: SparkSession, tmp_path: Path
) -> None:
    spark = spark.newSession()
    set_up_state(spark)
    rows = [stage_row(SOURCE, RowKind.ROWS, entry=bytes(2**20)) for _ in range(24)]
    (tmp_path / "in").mkdir()
    pq.write_table(pa.Table.from_batches(rows), tmp_path / "in" / "0.parquet")
    flow = spark.readStream.schema(STAGE_ROWS_DDL).parquet(str(tmp_path / "in"))
    processor = _FrameSizes(stage_settings(), RowOutput(stage_settings()))
    writer = (
        stateful(flow, processor, STAGE_ROWS_DDL)
        .writeStream.queryName("frame_sizes")
        .format("memory")
    )
    writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
        availableNow=True
    ).start().awaitTermination()
    sizes = [row.entry_id for row in spark.table("frame_sizes").collect()]
    assert sum(sizes) == 24 * 2**20
    assert max(sizes) <= 9 * 2**20


@pytest.mark.spark
def test_a_sessions_own_choice_of_how_many_rows_stands(spark: SparkSession) -> None:
    spark = spark.newSession()
    spark.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", "16m")
    set_up_state(spark)
    assert spark.conf.get("spark.sql.execution.arrow.maxBytesPerBatch") == "16m"
