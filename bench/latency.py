"""From publish to visible in the table, and from the start of ``ledgerlake run`` to its first
commit, in one run: ``make bench``.

visible     1,000 messages a second, trigger 200 ms: from a message's publish time to when a reader
            of the Delta table sees it; beside it, when a pulsar-client consumer of the same topic
            gets the same message
start       from starting the command to its first commit, with warm caches: tables that are made,
            tables that are there, and queries in which nothing happens (``bench.spark_alone``),
            each without and with an archive of the JVM's classes (``ledgerlake run
            --archive-classes``), in turns

CPU is that of the command and all below it: until the first commit of a start, and a million
messages of those that are counted. Memory is the peak resident set of its largest Python process.

Results are printed and written to ``bench/latest-latency.json``.

python -m bench.latency [SECONDS]
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from tests.live.runtime import Runtime, start_runtime, to_toml

from bench import spark_alone
from bench.throughput import WorkerMemory, cpu_s
from ledgerlake.runtime.java import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LATEST = Path(__file__).parent / "latest-latency.json"
RATE = 1000
STARTS = 5
_POLL_S = 0.01

# A start keeps all cores busy, so looking more often would delay the start.
_START_POLL_S = 0.1

# Messages that are published until so long after the first commit are not counted.
_WARM_UP_S = 30

# All that was published is in the table so long after the last was, or never.
_PATIENCE_S = 120

# When a message was published, and when it was seen.
Seen = tuple[float, float]


@dataclass(frozen=True)
class Start:
    """One start until its first commit."""

    seconds: float
    cpu_s: float
    peak_mb: float


def main(seconds: int) -> None:
    with (
        start_runtime() as runtime,
        tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder,
    ):
        rows = [
            *_starts(runtime, Path(folder)),
            *_visible(runtime, Path(folder) / "visible", seconds),
        ]
    LATEST.write_text(json.dumps(rows, indent=2) + "\n")


def _starts(runtime: Runtime, folder: Path) -> Iterator[dict[str, Any]]:
    print(f"start to first commit, medians of {STARTS} after one uncounted")
    print(f"{'':<40}{'s':>8}{'CPU s':>8}{'peak MB':>10}")
    caches = {"": _cache(folder / "plain"), ", classes archived": _cache(folder / "archived")}
    _archive_classes(runtime, folder, caches[", classes archived"])
    starts_by_name: dict[str, list[Start]] = {}
    for number in range(STARTS + 1):
        for words, cache in caches.items():
            start_folder = folder / f"start-{number}-{cache.name}"
            topic = runtime.topic()
            for place, name in enumerate(
                (f"new tables{words}", f"tables that are there{words}"), 1
            ):
                starts_by_name.setdefault(name, []).append(
                    first_commit(runtime, start_folder, topic, place, cache)
                )
            for kind, name in spark_alone.KINDS.items():
                checkpoint = start_folder / kind
                starts_by_name.setdefault(f"{name}{words}", []).append(
                    _first_micro_batch(kind, checkpoint, cache)
                )
    for name, starts in starts_by_name.items():
        row = {
            key: median(getattr(measured_start, key) for measured_start in starts[1:])
            for key in ("seconds", "cpu_s", "peak_mb")
        }
        print(
            f"{name:<40}{row['seconds']:>8.1f}{row['cpu_s']:>8.1f}{row['peak_mb']:>10.0f}",
            flush=True,
        )
        yield {"block": "start to first commit", "label": name, **row}


def _cache(folder: Path) -> Path:
    """A cache of its own, with the jars of the user's, and no archive of classes."""
    folder.mkdir()
    (folder / "jars").symlink_to(cache_folder() / "jars")
    return folder


def _archive_classes(runtime: Runtime, folder: Path, cache: Path) -> None:
    topic = runtime.topic()
    _publish_one(runtime, topic)
    start(runtime, folder / "archive", topic, cache, "--once", "--archive-classes").wait()


def first_commit(runtime: Runtime, folder: Path, topic: str, rows: int, cache: Path) -> Start:
    """From starting the command to the message, the table's last of so many, in it."""
    _publish_one(runtime, topic)
    return _measured(
        lambda: start(runtime, folder, topic, cache), partial(_await_rows, folder, rows)
    )


def _first_micro_batch(kind: str, checkpoint: Path, cache: Path) -> Start:
    """From starting a query in which nothing happens to its first micro-batch."""
    return _measured(lambda: spark_alone.start(kind, 0, checkpoint, cache), spark_alone.await_first)


def _measured(
    begin: Callable[[], subprocess.Popen[bytes]], wait: Callable[[subprocess.Popen[bytes]], None]
) -> Start:
    """Begin a process, wait for what it is to do, and end it."""
    with WorkerMemory() as memory:
        began_s = time.monotonic()
        with ended(begin()) as running:
            wait(running)
            took_s = time.monotonic() - began_s
            spent_s = _cpu_s_of(running)
    return Start(took_s, spent_s, memory.peak_mb)


@contextmanager
def ended(running: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End a process when the block is left."""
    try:
        yield running
    finally:
        running.terminate()
        running.wait()


def _publish_one(runtime: Runtime, topic: str) -> None:
    producer = runtime.client().create_producer(topic)
    producer.send(b"x")
    producer.close()


def _cpu_s_of(running: subprocess.Popen[bytes]) -> float:
    process = psutil.Process(running.pid)
    return cpu_s(process, *process.children(recursive=True))


def start(
    runtime: Runtime, folder: Path, topic: str, cache: Path, *options: str
) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    config = folder / "pipeline.toml"
    config.write_text(to_toml(runtime.config(folder, topic, name=folder.name)))
    return run_pipeline(config, cache, *options)


def run_pipeline(config: Path, cache: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start ``ledgerlake run``."""
    command = [sys.executable, "-m", "ledgerlake.cli", "run", str(config), *options]
    environment = {**os.environ, "LEDGERLAKE_CACHE": str(cache)}
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )


def _visible(runtime: Runtime, folder: Path, seconds: int) -> Iterator[dict[str, Any]]:
    print(f"\n{RATE:,} messages a second for {seconds} s, trigger 200 ms")
    print(f"{'':<40}{'p50 ms':>8}{'p99 ms':>8}{'CPU s/M':>10}{'peak MB':>10}")
    visible, consumed, spent_s, peak_mb = latencies(runtime, folder, seconds)
    for name, delays_s in (("visible in the table", visible), ("pulsar-client consumer", consumed)):
        cuts = quantiles(delays_s, n=100)
        row: dict[str, Any] = {"block": "from publishing", "label": name}
        row |= {"p50_ms": round(cuts[49] * 1000), "p99_ms": round(cuts[98] * 1000)}
        print(f"{name:<40}{row['p50_ms']:>8}{row['p99_ms']:>8}", end="")
        if delays_s is visible:
            row |= {
                "cpu_s_per_million": round(spent_s * 1e6 / len(delays_s)),
                "peak_mb": round(peak_mb),
            }
            print(f"{row['cpu_s_per_million']:>10}{row['peak_mb']:>10}", end="")
        print(f"   of {len(delays_s):,}", flush=True)
        yield row


def _await_rows(folder: Path, rows: int, running: subprocess.Popen[bytes]) -> None:
    while rows_in(folder) < rows:
        if running.poll() is not None:
            raise SystemExit(f"the command ended with {running.returncode} before its first commit")
        time.sleep(_START_POLL_S)


def rows_in(folder: Path) -> int:
    try:
        return int(DeltaTable(str(folder / "messages")).to_pyarrow_dataset().count_rows())
    except TableNotFoundError:
        return 0


def latencies(
    runtime: Runtime, folder: Path, seconds: int
) -> tuple[list[float], list[float], float, float]:
    """Seconds from publishing to the table, and to a consumer; CPU seconds and peak memory (MB)
    meanwhile.
    """
    topic = runtime.topic()
    consumed: list[Seen] = []
    consumer = runtime.client().subscribe(
        topic, "peer", message_listener=lambda receiver, message: take(receiver, message, consumed)
    )
    running = start(runtime, folder, topic, cache_folder())
    enough = threading.Event()
    publisher = threading.Thread(target=publish, args=(runtime, [topic], RATE, _now, enough))
    publisher.start()
    try:
        _await_rows(folder, 1, running)
        time.sleep(_WARM_UP_S)
        before_s = _cpu_s_of(running)
        with WorkerMemory() as memory:
            began_s, visible = watch(folder, seconds)
        spent_s = _cpu_s_of(running) - before_s
    finally:
        enough.set()
        publisher.join()
        running.terminate()
        running.wait()
        consumer.close()
    counted = [
        [
            seen_s - sent_s
            for sent_s, seen_s in messages_seen
            if began_s <= sent_s < began_s + seconds
        ]
        for messages_seen in (visible, consumed)
    ]
    return counted[0], counted[1], spent_s, memory.peak_mb


def take(consumer: Any, message: Any, messages_seen: list[Seen]) -> None:
    messages_seen.append((float(message.data()), time.time()))
    consumer.acknowledge(message)


def publish(
    runtime: Runtime,
    topics: list[str],
    rate: int,
    value: Callable[[], bytes],
    enough: threading.Event,
) -> None:
    """Publish so many messages a second, in turn to each topic."""
    client = runtime.client()
    producers = [
        client.create_producer(topic, batching_max_publish_delay_ms=5, block_if_queue_full=True)
        for topic in topics
    ]
    began_s = time.monotonic()
    for number in itertools.count():
        if enough.is_set():
            break
        ahead_s = began_s + number / rate - time.monotonic()
        if ahead_s > 0.01:
            time.sleep(ahead_s)
        producers[number % len(producers)].send_async(value(), lambda *_: None)
    for producer in producers:
        producer.flush()


def _now() -> bytes:
    return repr(time.time()).encode()


def actions_of(commit: Path) -> list[dict[str, Any]]:
    """The actions of a commit of a Delta table. One of upkeep has a ``remove``."""
    return [json.loads(line) for line in commit.read_text().splitlines()]


class AddedFiles:
    """The files of a table by the commits that brought new rows. Files of upkeep hold rows again,
    so they are left out.
    """

    def __init__(self, table: Path) -> None:
        self._table = table
        self._version = -1

    def files(self) -> list[Path]:
        """Those that were added since the last call."""
        added: list[Path] = []
        while (commit := self._table / "_delta_log" / f"{self._version + 1:020}.json").exists():
            actions = actions_of(commit)
            if not any("remove" in action for action in actions):
                added += [
                    self._table / action["add"]["path"] for action in actions if "add" in action
                ]
            self._version += 1
        return added


def watch(folder: Path, seconds: int) -> tuple[float, list[Seen]]:
    """Look at the table until it has all messages that are published in so many seconds from now.
    Return the time of the start, and the messages that were seen.
    """
    added = AddedFiles(folder / "messages")
    added.files()
    messages_seen: list[Seen] = []
    began_s = now_s = newest_s = time.time()
    while newest_s < began_s + seconds:
        if now_s > began_s + seconds + _PATIENCE_S:
            raise SystemExit(f"{len(messages_seen)} messages came in {seconds + _PATIENCE_S} s")
        time.sleep(_POLL_S)
        files = added.files()
        now_s = time.time()
        for file in files:
            values = pq.read_table(file, columns=["value"])["value"].to_pylist()
            sent_s = [float(value) for value in values]
            newest_s = max([newest_s, *sent_s])
            messages_seen += [(publish_time_s, now_s) for publish_time_s in sent_s]
    return began_s, messages_seen


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
