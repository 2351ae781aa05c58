"""From publish to visible in the table, and from the start of ``ledgerlake run`` to its first commit, in one run: ``make bench``.

visible     1,000 messages a second, trigger 200 ms: from a message's publish time to when a reader of the Delta table sees it;
            beside it, when a pulsar-client consumer of the same topic gets the same message
start       from starting the command to its first commit, with warm caches

python -m bench.latency [SECONDS]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from tests.live.runtime import Runtime, start_runtime, to_toml

RATE = 1000
STARTS = 5
_POLL_S = 0.01

# A start keeps all cores busy, so that looking more often would delay what is looked for.
_START_POLL_S = 0.1

# What is published while the query starts is not counted.
_WARM_UP_S = 45


def main(seconds: int) -> None:
    with start_runtime() as runtime, tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder:
        starts = [first_commit_s(runtime, Path(folder) / f"start{number}") for number in range(STARTS + 1)]
        print(f"start to first commit: {median(starts[1:]):.1f} s, median of {STARTS} after one uncounted")
        visible, consumed = latencies(runtime, Path(folder) / "visible", seconds)
        for name, found in (("visible in the table", visible), ("pulsar-client consumer", consumed)):
            cuts = quantiles(found, n=100)
            print(f"{name:<24}p50 {cuts[49] * 1000:7.0f} ms  p99 {cuts[98] * 1000:7.0f} ms  of {len(found):,} messages")


def first_commit_s(runtime: Runtime, folder: Path) -> float:
    """Seconds until a table with one message is there."""
    topic = runtime.topic()
    producer = runtime.client().create_producer(topic)
    producer.send(b"x")
    began_s = time.monotonic()
    running = start(runtime, folder, topic)
    try:
        while not rows_in(folder):
            time.sleep(_START_POLL_S)
        return time.monotonic() - began_s
    finally:
        running.terminate()
        running.wait()


def start(runtime: Runtime, folder: Path, topic: str) -> subprocess.Popen[bytes]:
    folder.mkdir()
    config = folder / "pipeline.toml"
    config.write_text(to_toml(runtime.config(folder, topic, name=folder.name)))
    command = [sys.executable, "-m", "ledgerlake.cli", "run", str(config)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def rows_in(folder: Path) -> int:
    try:
        return int(DeltaTable(str(folder / "messages")).to_pyarrow_dataset().count_rows())
    except TableNotFoundError:
        return 0


def latencies(runtime: Runtime, folder: Path, seconds: int) -> tuple[list[float], list[float]]:
    """Seconds from publishing to the table, and to a consumer."""
    topic = runtime.topic()
    consumed: list[float] = []
    consumer = runtime.client().subscribe(topic, "peer", message_listener=lambda one, got: take(one, got, consumed))
    running = start(runtime, folder, topic)
    publisher = threading.Thread(target=publish, args=(runtime, topic, seconds + _WARM_UP_S))
    publisher.start()
    try:
        visible = watch(folder, publisher, (seconds + _WARM_UP_S) * RATE)
    finally:
        publisher.join()
        running.terminate()
        running.wait()
        consumer.close()
    return visible[_WARM_UP_S * RATE :], consumed[_WARM_UP_S * RATE :]


def take(consumer: Any, message: Any, found: list[float]) -> None:
    found.append(time.time() - float(message.data()))
    consumer.acknowledge(message)


def publish(runtime: Runtime, topic: str, seconds: int) -> None:
    """Ten messages every ten milliseconds, each with the time of day in it."""
    producer = runtime.client().create_producer(topic, batching_max_publish_delay_ms=5)
    began_s = time.monotonic()
    for number in range(seconds * RATE):
        ahead_s = began_s + number / RATE - time.monotonic()
        if ahead_s > 0.01:
            time.sleep(ahead_s)
        producer.send_async(repr(time.time()).encode(), lambda *_: None)
    producer.flush()


def watch(folder: Path, publisher: threading.Thread, count: int) -> list[float]:
    """Look at the table until all is in it; seconds from publishing to the look that found it, in order of publishing."""
    seen: set[str] = set()
    found: list[tuple[float, float]] = []
    table: DeltaTable | None = None
    deadline_s = time.monotonic() + count / RATE + 120
    while len(found) < count and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        if table is None:
            if not rows_in(folder):
                continue
            table = DeltaTable(str(folder / "messages"))
        table.update_incremental()
        now_s = time.time()
        for uri in set(table.file_uris()) - seen:
            seen.add(uri)
            values = pq.read_table(uri.removeprefix("file://"), columns=["value"])["value"].to_pylist()
            found += [(float(value), now_s - float(value)) for value in values]
    if len(found) < count:
        raise SystemExit(f"{len(found)} of {count} messages came; publishing is {publisher.is_alive()}")
    return [latency_s for _, latency_s in sorted(found)]


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
