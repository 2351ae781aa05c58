"""The stateful stage with millions of delayed messages waiting, in real Spark: state on disk,
memory, rates.

Messages of 100 bytes, due at random over a horizon of days, are fed to the stage as the source
would hand them on; Spark keeps them in RocksDB. Then the clock is moved, and they come out.

    added       messages a second into the stage, micro-batches and their state commits included
    released    messages a second out of it, when a stretch of the horizon is due at once
    worker      peak resident set of the largest Python worker
    state       the checkpoint's folder on disk when all wait
    by hour     ``ledgerlake state --by hour`` while the query runs: from its start to its end,
                and the peak resident set of its process
    index       what the index of one topic partition takes in memory by itself, its bitmaps all
                loaded; the broker's own tracker of delayed messages holds 24 bytes a message in its
                heap, for each subscription

With ``--ids`` each message has the id of a schedule of its own. With ``--replaced N`` as many more
messages follow, each with the id of one that waits, which it replaces. A replaced message stays in
the index until it is due, and ``--by hour`` counts it.

Peers: what Pulsar's brokers and clients do is not the same thing (readers get delayed messages at
once), so nothing is compared but the memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from tests.live.runtime import to_toml

from bench.throughput import WorkerMemory
from ledgerlake.assembly.rules import Limits
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.delay.bucket import record_from_json, record_to_json
from ledgerlake.delay.segment import INDEX_SCHEMA, index_rows
from ledgerlake.delay.tracker import DelayedTracker, DelaySettings
from ledgerlake.operators.bucket_storage import FolderStorage
from ledgerlake.operators.outcome_types import DueEntries
from ledgerlake.operators.results import StageSettings
from ledgerlake.operators.schedule_events import Scheduled, ScheduleEvents
from ledgerlake.operators.stage_output import data_frame
from ledgerlake.operators.stage_rows import (
    STAGE_ROWS,
    RowKind,
    TaskReport,
    report_to_json,
    stage_row,
)
from ledgerlake.operators.stateful import Processor, set_up_state, stateful
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.pipeline.batch_ends import BatchEnds, LastRun
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.wakeups import Wakeups
from ledgerlake.stored.fields import fields_of, stored
from ledgerlake.stored.files import load_json, save_json
from ledgerlake.stored.places import Place
from ledgerlake.wire import commands
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import Position
from ledgerlake.wire.schedules import SCHEDULE_PROPERTY

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from ledgerlake.operators.outcome_types import Outcome
    from ledgerlake.operators.stage_rows import StageRow, StateSummary
    from ledgerlake.schedules.cancels import Cancels


LATEST = Path(__file__).parent / "latest-delay.json"
SOURCE = TopicPartition("persistent://public/default/bench", -1)
VALUE_BYTES = 100
BATCH = 500_000
HORIZON_MS = 7 * 86_400_000
FIRST_DUE_MS = 1_800_000_000_000
RELEASES = 5

# Brokers begin another ledger after 50,000 entries unless told otherwise.
_LEDGER_ENTRIES = 50_000
_BUNDLE = 5000
_ID = "visit-{:010}"
_BROKER_BYTES = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--messages", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--ids", action="store_true", help="each message has the id of a schedule")
    parser.add_argument(
        "--replaced",
        type=int,
        default=0,
        metavar="N",
        help="so many are replaced by id (with --ids)",
    )
    parser.add_argument("--open-index", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open_index:
        print(_open_index(options.open_index))
        return
    if options.replaced and not options.ids:
        parser.error("--replaced needs --ids")
    from ledgerlake.runtime.session import start_session

    spark = start_session("bench", "local[2]")
    spark.sparkContext.setLogLevel("ERROR")
    set_up_state(spark)
    spark.dataSource.register(_BenchSource)
    measures = []
    for messages in options.messages:
        measure = _measure(spark, _Load(messages, options.ids, options.replaced))
        measures.append(measure | {"index_bytes_per_message": _index_bytes(messages)})
        _show(measures[-1])
    spark.stop()
    LATEST.write_text(json.dumps(measures, indent=2) + "\n")


@dataclass(frozen=True)
class _Load:
    """The messages of a measurement: so many wait, after as many were replaced."""

    messages: int
    has_ids: bool
    replaced: int

    @property
    def added(self) -> int:
        return self.messages + self.replaced

    @property
    def batches(self) -> int:
        return -(-self.added // BATCH)

    def id_number(self, number: int) -> int:
        """Return the number in the id of an added message."""
        later = number - self.messages
        return number if later < 0 else later * (self.messages // self.replaced)


def _show(measure: dict[str, Any]) -> None:
    if measure["replaced"]:
        print(f"\n{measure['replaced']:,} of them have replaced another one", end="")
    print(
        f"\n{measure['messages']:,} messages of {VALUE_BYTES} bytes wait ({measure['frame_bytes']} "
        "with all that is stored of each)"
    )
    print(f"{'added':<10}{measure['added_per_s']:>14,.0f} messages/s")
    print(f"{'released':<10}{measure['released_per_s']:>14,.0f} messages/s")
    print(
        f"{'worker':<10}{measure['worker_mb']:>14,.0f} MB at its peak, "
        f"{measure['idle_worker_mb']:,.0f} MB before anything waits"
    )
    print(
        f"{'state':<10}{measure['state_mb']:>14,.0f} MB on disk, "
        f"{measure['state_mb'] * 1e6 / measure['messages']:,.0f} bytes a message"
    )
    print(f"{'by hour':<10}{measure['by_hour_s']:>14.1f} s, {measure['by_hour_mb']:,.0f} MB")
    print(
        f"{'index':<10}{measure['index_bytes_per_message']:>14.2f} bytes a message in memory "
        f"(the broker's tracker: {_BROKER_BYTES} for each subscription)",
        flush=True,
    )


def _measure(spark: SparkSession, load: _Load) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder,
        WorkerMemory() as memory,
    ):
        run = _Run(spark, f"{folder}/checkpoint", load)
        run.to(1)
        idle_mb, memory.peak_mb = memory.peak_mb, 0.0
        add_s = run.to(1 + load.batches)
        worker_mb = memory.peak_mb
        state_mb = _folder_mb(Path(folder) / "checkpoint" / "state")
        by_hour_s, by_hour_mb = _by_hour(Path(folder), load.added)
        memory.peak_mb = 0.0
        release_s = run.to(1 + load.batches + RELEASES)
        run.stop()
        released = run.released
    return {
        "messages": load.messages,
        "replaced": load.replaced,
        "frame_bytes": _frame_bytes(load.has_ids),
        "added_per_s": load.added / add_s,
        "released_per_s": released / release_s,
        "released": released,
        "idle_worker_mb": idle_mb,
        "worker_mb": max(worker_mb, memory.peak_mb),
        "state_mb": state_mb,
        "by_hour_s": by_hour_s,
        "by_hour_mb": by_hour_mb,
    }


def _by_hour(folder: Path, messages: int) -> tuple[float, float]:
    """Run the command on the checkpoint; its seconds, and its peak in MB."""
    data = {
        "source": {"service_url": "pulsar://nowhere:1", "topics": [SOURCE.topic]},
        "stream": {"name": "bench", "checkpoint": str(folder / "checkpoint")},
        "delta": {"path": str(folder / "messages"), "rejects_path": str(folder / "rejects")},
    }
    config = folder / "pipeline.toml"
    config.write_text(to_toml(data))
    command = [
        sys.executable,
        "-m",
        "ledgerlake.cli",
        "state",
        str(config),
        "--by",
        "hour",
        "--json",
    ]
    began_s = time.monotonic()
    peak_mb = 0.0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as running:
        assert running.stdout is not None
        lines: list[str] = []
        reading = threading.Thread(target=lines.extend, args=(running.stdout,))
        reading.start()
        while running.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                peak_mb = max(peak_mb, psutil.Process(running.pid).memory_info().rss / 1e6)
            time.sleep(0.05)
        reading.join()
    took_s = time.monotonic() - began_s
    assert sum(json.loads(line)["messages"] for line in lines) == messages
    return took_s, peak_mb


class _Run:
    """The stage as a running query whose steps are let through one by one."""

    def __init__(self, spark: SparkSession, checkpoint: str, load: _Load) -> None:
        self.released = 0
        # Replaced whole: a planner that found it empty would begin again.
        self._steps = f"{checkpoint}-steps"
        save_json(Place(self._steps), 0)
        self._wakeups = Wakeups(Checkpoint(Place(checkpoint)), 0)
        self._keeper = BatchEnds(Checkpoint(Place(checkpoint)))
        self._done = threading.Semaphore(0)
        self._at = 0
        options = {"load": json.dumps(astuple(load)), "steps": self._steps}
        flow = spark.readStream.format(_BenchSource.name()).options(**options).load()
        nowhere = parse_options({"service.url": "pulsar://nowhere:1", "topic": SOURCE.topic})
        settings = StageSettings(Limits(), DelayOptions(), nowhere)
        output = partial(_Counted, _frame_bytes(load.has_ids))
        counted = stateful(flow, Processor(settings, output), "released bigint, summary string")
        writer = counted.writeStream.option("checkpointLocation", checkpoint).foreachBatch(
            self._take
        )
        self._query = writer.trigger(processingTime="0 seconds").start()

    def to(self, step: int) -> float:
        """Let the steps up to one through, each a micro-batch; how long they took."""
        began_s = time.monotonic()
        while self._at < step:
            self._at += 1
            save_json(Place(self._steps), self._at)
            while not self._done.acquire(timeout=1):
                if self._query.exception() is not None:
                    raise self._query.exception()
        return time.monotonic() - began_s

    def stop(self) -> None:
        self._query.stop()

    def _take(self, rows: DataFrame, batch_id: int) -> None:
        for row in rows.collect():
            self.released += row.released
            if row.summary is not None:
                self._record(batch_id, stored(StateSummary, json.loads(row.summary)))
        self._done.release()

    def _record(self, batch_id: int, summary: StateSummary) -> None:
        """Write into the checkpoint what a pipeline does after a micro-batch."""
        self._wakeups.update(
            batch_id, {SOURCE.topic: summary.next_due_ms}, {SOURCE.topic: summary.due_spans}
        )
        self._keeper.add(LastRun(batch_id, self._wakeups.batch_id), {}, {})


class _BenchSource(DataSource):
    """Steps: one that brings nothing, then batches of messages, then steps of the clock."""

    @classmethod
    def name(cls) -> str:
        return "ledgerlake-bench-delay"

    def schema(self) -> StructType:
        return from_arrow_schema(STAGE_ROWS)

    def streamReader(self, schema: StructType) -> _BenchReader:
        return _BenchReader(_Load(*json.loads(self.options["load"])), self.options["steps"])


class _Step(InputPartition):
    def __init__(self, number: int) -> None:
        self.number = number


class _BenchReader(DataSourceStreamReader):
    def __init__(self, load: _Load, steps: str) -> None:
        self._load = load
        self._steps = steps

    def initialOffset(self) -> dict[str, int]:
        return {"step": 0}

    def latestOffset(self) -> dict[str, int]:
        return {"step": load_json(Place(self._steps))}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [_Step(number) for number in range(start["step"] + 1, end["step"] + 1)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        load, batches = self._load, self._load.batches
        number = partition.number - 2
        due_ms = FIRST_DUE_MS - 1
        events = ScheduleEvents()
        if 0 <= number < batches:
            for start in range(number * BATCH, min((number + 1) * BATCH, load.added), _BUNDLE):
                count = min(_BUNDLE, load.added - start)
                yield stage_row(SOURCE, RowKind.DELAYED, entry=_frames(start, count, load))
                if load.has_ids:
                    for event in _events(start, count, load):
                        events.add(event)
                    yield from events.rows(SOURCE)
        elif number >= batches:
            # A twentieth of the horizon at a time.
            due_ms += (number - batches + 1) * HORIZON_MS // 20
        yield from events.rows(SOURCE, all_events=True)
        report = TaskReport(Position(partition.number, 0), due_ms, {}, [])
        yield stage_row(SOURCE, RowKind.REPORT, header=report_to_json(report))


class _Counted:
    """Counts the messages that the stage releases; see ``stage_output.StageOutput``."""

    def __init__(self, frame_bytes: int, _topic_partition: TopicPartition) -> None:
        self._frame_bytes = frame_bytes
        self._released = 0

    def take(self, outcome: Outcome | Cancels) -> Iterator[pd.DataFrame]:
        if isinstance(outcome, DueEntries):
            self._released += len(outcome.frames) // self._frame_bytes
        return iter(())

    def finish(self, summary: StateSummary) -> Iterator[pd.DataFrame]:
        yield data_frame(
            ["released", "summary"], [self._released, json.dumps(summary, default=fields_of)]
        )

    def pass_on(self, rows: list[StageRow]) -> Iterator[pd.DataFrame]:
        raise AssertionError(f"unexpected rows: {rows}")


def _times_ms(first: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """When messages are due: at random, but always the same."""
    return FIRST_DUE_MS + np.random.default_rng(first).integers(0, HORIZON_MS, count)


def _template(has_ids: bool) -> bytes:
    metadata = pb.MessageMetadata(
        producer_name="bench", sequence_id=1, publish_time=FIRST_DUE_MS - HORIZON_MS
    )
    metadata.deliver_at_time = FIRST_DUE_MS
    if has_ids:
        metadata.properties.add(key=SCHEDULE_PROPERTY, value=_ID.format(0))
    broker = pb.BrokerEntryMetadata(broker_timestamp=FIRST_DUE_MS - HORIZON_MS, index=1)
    return commands.message(1, 2**21, 2**21, encode_entry(metadata, bytes(VALUE_BYTES), broker))


def _frame_bytes(has_ids: bool) -> int:
    return len(_template(has_ids))


def _events(first: int, count: int, load: _Load) -> Iterator[Scheduled]:
    """The schedules of consecutive messages."""
    for number, due_ms in enumerate(_times_ms(first, count).tolist(), first):
        position = Position(2**21 + number // _LEDGER_ENTRIES, 2**21 + number % _LEDGER_ENTRIES)
        yield Scheduled(
            _ID.format(load.id_number(number)), position, FIRST_DUE_MS - HORIZON_MS, due_ms
        )


def _frames(first: int, count: int, load: _Load) -> bytes:
    """MESSAGE frames of consecutive entries: one for all, with ledger, entry, delivery time and id
    written over.
    """
    template = _template(load.has_ids)
    frames = np.tile(np.frombuffer(template, dtype=np.uint8), (count, 1))
    numbers = np.arange(first, first + count)
    place = template.index(_varint(np.array([2**21]), 4).tobytes() + b"\x10")
    frames[:, place : place + 4] = _varint(2**21 + numbers // _LEDGER_ENTRIES, 4)
    frames[:, place + 5 : place + 9] = _varint(2**21 + numbers % _LEDGER_ENTRIES, 4)
    time_ms = _varint(np.array([FIRST_DUE_MS]), 6).tobytes()
    place = template.rindex(time_ms)
    frames[:, place : place + 6] = _varint(_times_ms(first, count), 6)
    if load.has_ids:
        place = template.index(_ID.format(0).encode())
        ids = "".join(_ID.format(load.id_number(number)) for number in numbers.tolist()).encode()
        size = len(_ID.format(0))
        frames[:, place : place + size] = np.frombuffer(ids, dtype=np.uint8).reshape(count, size)
    # Values that no compression makes smaller.
    frames[:, -VALUE_BYTES:] = np.random.default_rng(first).integers(
        0, 256, (count, VALUE_BYTES), dtype=np.uint8
    )
    return frames.tobytes()


def _varint(values: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    shifted = values[:, None] >> (7 * np.arange(size))
    continuation_bits = np.where(np.arange(size) < size - 1, 0x80, 0)
    return ((shifted & 0x7F) | continuation_bits).astype(np.uint8)


def _index_bytes(messages: int) -> float:
    """Resident bytes per message that the index takes in a process that opens it and asks about
    every bucket.
    """
    with tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder:
        tracker = DelayedTracker(FolderStorage(Place(f"{folder}/buckets"), {}), DelaySettings())
        for first in range(0, messages, _BUNDLE):
            tracker.add(index_batch(first, min(_BUNDLE, messages - first)))
        Path(folder, "record.json").write_text(record_to_json(tracker.save()))
        return int(_in_process("--open-index", folder)) / messages


def index_batch(first: int, count: int, frame: bytes | None = None) -> pa.RecordBatch:
    """Rows of the index for consecutive messages, each with the same frame."""
    numbers = np.arange(first, first + count)
    columns = [_times_ms(first, count), numbers // _LEDGER_ENTRIES, numbers % _LEDGER_ENTRIES]
    frames = pa.array([frame] * count, pa.binary())
    return pa.RecordBatch.from_arrays([*map(pa.array, columns), frames], schema=INDEX_SCHEMA)


def _open_index(folder: str) -> int:
    """What the resident set grows by."""
    record = record_from_json(Path(folder, "record.json").read_text())
    # What the libraries take once, whatever the size of the index, is not counted. The second
    # message is looked up.
    unused = DelayedTracker(FolderStorage(Place(f"{folder}/unused"), {}), DelaySettings())
    for _ in range(2):
        unused.add(index_rows([(0, 1, 1)]))
        unused.save()
    before = _resident_bytes()
    storage = FolderStorage(
        Place(f"{folder}/buckets"), {bucket.bucket_id: bucket.segment for bucket in record.buckets}
    )
    tracker = DelayedTracker(storage, DelaySettings(), record)
    for bucket in tracker.buckets:
        # The bucket's bitmaps tell whether a message was added before.
        tracker.add(index_rows([(0, bucket.first.ledger_id, bucket.first.entry_id)]))
    return _resident_bytes() - before


def _in_process(*arguments: str) -> str:
    command = [sys.executable, "-m", "bench.delay", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _folder_mb(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


if __name__ == "__main__":
    main()
