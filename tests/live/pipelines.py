"""What live tests share: pipelines that run once, messages to read, and what stands in the
tables.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from deltalake import DeltaTable

from ledgerlake.api import run
from ledgerlake.cli import main
from ledgerlake.client.producer import EntryProducer
from ledgerlake.options.config import parse_config
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.verify.verify import verify
from ledgerlake.wire.entry import encode_entry
from tests.live.runtime import to_toml
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime


def publish_numbers(runtime: Runtime, topic: str, numbers: range, batch: int = 1) -> list[Any]:
    """Numbers as messages, ``batch`` to an entry; the ids where single."""
    producer = runtime.client().create_producer(
        topic,
        batching_enabled=batch > 1,
        batching_max_messages=max(batch, 2),
        batching_max_publish_delay_ms=2000,
        block_if_queue_full=True,
    )
    ids: list[Any] = []
    for number in numbers:
        producer.send_async(b"%d" % number, lambda _result, message_id: ids.append(message_id))
    producer.flush()
    producer.close()
    return ids


def run_once(spark: SparkSession, data: dict[str, Any]) -> Any:
    config = parse_config(data)
    pipeline = run(spark, config, once=True)
    try:
        pipeline.wait()
    finally:
        pipeline.close()
    return config


def rows_by_position(path: str) -> list[dict[str, Any]]:
    """The rows of a table of messages, or of rejects, in the order of their positions."""
    rows: list[dict[str, Any]] = (
        DeltaTable(path).to_pyarrow_table().to_pylist(maps_as_pydicts="strict")
    )
    keys = ("partition", "ledger_id", "entry_id", "batch_index")
    return sorted(rows, key=lambda row: [row.get(key) or 0 for key in keys])


def forget_last_commit(checkpoint: Path) -> None:
    """Leave the checkpoint as a kill does between the table's commit and Spark's."""
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    for checksum in last.parent.glob(f".{last.name}.*"):
        checksum.unlink()


def now_ms() -> int:
    return int(time.time() * 1000)


def publish_delayed(
    runtime: Runtime, topic: str, messages: list[tuple[bytes, int | None]], **options: Any
) -> None:
    """Values with the time at which each is to be delivered, or None."""
    producer = runtime.client().create_producer(topic, block_if_queue_full=True, **options)
    for value, deliver_ms in messages:
        producer.send_async(value, lambda *_: None, deliver_at=deliver_ms)
    producer.flush()
    producer.close()


def wait_for_rows(folder: Path, count: int) -> None:
    table = str(folder / "messages")
    wait_until(lambda: DeltaTable(table).to_pyarrow_table(columns=["ledger_id"]).num_rows >= count)


def small_buckets(runtime: Runtime, folder: Path, topic: str, **delay: Any) -> dict[str, Any]:
    """A pipeline whose buckets are so small that few messages make many."""
    data = runtime.config(folder, topic)
    data["delay"] = {
        "min_indexes_per_bucket": 20,
        "max_indexes_per_segment": 7,
        "max_buckets": 3,
        **delay,
    }
    return data


@contextmanager
def running(spark: SparkSession, data: dict[str, Any]) -> Iterator[Any]:
    """A pipeline that runs while the block does."""
    pipeline = run(spark, parse_config(data))
    try:
        yield pipeline
    finally:
        pipeline.stop()
        pipeline.close()


def run_and_verify(spark: SparkSession, data: dict[str, Any]) -> Any:
    """Run until everything that is there is done; the verdict."""
    return verify(run_once(spark, data))


def ledgerlake(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process; what a process of its own would give."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors), patch.dict(os.environ, environment):
        try:
            code = main(list(arguments))
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def ledgerlake_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, with a Spark session of its own."""
    return subprocess.run(
        [sys.executable, "-m", "ledgerlake.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **environment},
    )


def config_file(folder: Path, data: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pipeline.toml").write_text(to_toml(data))
    return str(folder / "pipeline.toml")


def sentence(result: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line of an error; what Spark itself prints at its start does not count."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("ledgerlake: ")]
    assert result.returncode == code, result.stderr
    assert len(lines) == 1
    assert "Traceback" not in result.stderr
    return lines[0]


def publish_entries(runtime: Runtime, topic: str, entries: list[bytes]) -> None:
    cluster = runtime.cluster()
    producer = EntryProducer(cluster, topic)
    for entry in entries:
        producer.send(entry)
    producer.close()
    cluster.close()


def table_rows(folder: Path) -> list[dict[str, Any]]:
    return rows_by_position(str(folder / "messages"))


def rejects_rows(folder: Path) -> list[dict[str, Any]]:
    return rows_by_position(str(folder / "rejects"))


def small(value: bytes) -> bytes:
    return encode_entry(pb.MessageMetadata(producer_name="s", sequence_id=0, publish_time=1), value)


def backlog(runtime: Runtime, topic: str) -> int:
    """Entries that the pipeline's cursor still pins."""
    stats = runtime.admin("GET", topic, "/stats?getPreciseBacklog=true")["subscriptions"]
    return int(
        next(
            subscription["msgBacklog"]
            for name, subscription in stats.items()
            if name.startswith("ledgerlake-test")
        )
    )


def values(folder: Path) -> list[int]:
    """The numbers that the table's messages hold, in the order of their positions."""
    return [int(row["value"]) for row in table_rows(folder)]


def unload_until_trimmed(runtime: Runtime, topic: str) -> None:
    """Roll the ledger, and wait until the broker has removed the one before.

    A broker that unloads a topic while it opens the ledger of a cursor loses what the cursor has
    just acknowledged, and keeps the messages.
    """

    def cursors() -> list[dict[str, Any]]:
        return list(runtime.admin("GET", topic, "/internalStats")["cursors"].values())

    wait_until(lambda: all(cursor["state"] != "SwitchingLedger" for cursor in cursors()))
    before = runtime.first_ledger(topic)
    runtime.admin("PUT", topic, "/unload")
    wait_until(lambda: runtime.first_ledger(topic) > before)
