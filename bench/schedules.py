"""Delayed delivery on the clock, against a live broker: from due to visible in the table and to
received on the topic of ``[deliver]``, and a million messages due in one second.

fires     1,000 messages a second become due, on a topic that as many come to. Late is the time from
          a message's delivery time until somebody gets it. A reader of the Delta table sees it
          (``visible``). A pulsar-client consumer of the topic of ``[deliver]`` gets it
          (``received``). And a pulsar-client consumer of the source topic with a shared
          subscription gets it: this is Pulsar's own delayed delivery, with the broker's default
          tick of a second. A broker may deliver up to a tick early; that time is negative.
sparse    one message every two seconds is due, on a topic without others, trigger 10 seconds
burst     messages that are all due in one second, on four topic partitions, without and with an id
          each; plain messages come all the while. Printed: the time from the first one due to all
          visible, the peak resident set of the largest Python process and its command, and how late
          plain messages are visible before and meanwhile

Results are printed and written to ``bench/latest-schedules.json``.

python -m bench.schedules [--seconds 60] [--messages 1000000] [--only fires|sparse|burst]
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import threading
import time
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from tests.live.runtime import Runtime, start_runtime, to_toml

from bench.latency import AddedFiles, run_pipeline, take, watch
from bench.throughput import WorkerMemory
from ledgerlake.runtime.java import cache_folder

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from bench.latency import Seen

LATEST = Path(__file__).parent / "latest-schedules.json"
RATE = 1000
PARTITIONS = 4
_DELAY_S = 5.0
_WARM_UP_S = 30
# A JVM compiles what runs often in its first minutes, and takes half of its CPU for that.
_COMPILING_S = 120
_SPARSE_RATE = 0.5
_PLAIN_RATE = 100
_POLL_S = 0.02

# With an id, a message takes the publisher up to half a millisecond, while the pipeline reads and
# stores it.
_PUBLISH_RATE = 2000
_PATIENCE_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=int, default=60, help="that are counted (default: 60)")
    parser.add_argument(
        "--messages", type=int, default=1_000_000, help="of the burst (default: 1000000)"
    )
    parser.add_argument("--only", choices=("fires", "sparse", "burst"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with (
        start_runtime() as runtime,
        tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder,
    ):
        if options.only in (None, "fires"):
            for trigger in ("1 second", "200 ms"):
                rows += _fires(runtime, Path(folder), trigger, RATE, options.seconds)
        if options.only in (None, "sparse"):
            rows += _fires(runtime, Path(folder), "10 seconds", _SPARSE_RATE, options.seconds)
        if options.only in (None, "burst"):
            rows += [
                _burst(runtime, Path(folder), options.messages, has_ids)
                for has_ids in (False, True)
            ]
    LATEST.write_text(json.dumps(rows, indent=2) + "\n")


def _start(
    runtime: Runtime, folder: Path, topic: str, trigger: str, **more: Any
) -> subprocess.Popen[bytes]:
    folder.mkdir()
    data = runtime.config(folder, topic, name=folder.name)
    data["stream"]["trigger"] = trigger
    (folder / "pipeline.toml").write_text(to_toml(data | more))
    return run_pipeline(folder / "pipeline.toml", cache_folder())


def _fires(
    runtime: Runtime, folder: Path, trigger: str, rate: float, seconds: int
) -> Iterator[dict[str, Any]]:
    import pulsar

    topic, delivered = runtime.topic(), runtime.topic()
    received: list[Seen] = []
    shared: list[Seen] = []
    client = runtime.client()
    consumers = [
        client.subscribe(
            delivered,
            "bench",
            message_listener=lambda consumer, message: take(consumer, message, received),
        ),
        client.subscribe(
            topic,
            "peer",
            consumer_type=pulsar.ConsumerType.Shared,
            message_listener=lambda consumer, message: take(consumer, message, shared),
        ),
    ]
    run_folder = folder / f"fires-{trigger.replace(' ', '-')}"
    running = _start(runtime, run_folder, topic, trigger, deliver={"topic": delivered})
    enough = threading.Event()
    publisher = threading.Thread(target=_publish_delayed, args=(runtime, topic, rate, enough))
    publisher.start()
    try:
        _await_table(run_folder, running)
        time.sleep(_COMPILING_S)
        began_s, visible = watch(run_folder, seconds)
        _await_received(received, began_s + seconds)
    finally:
        enough.set()
        publisher.join()
        running.terminate()
        running.wait()
        for consumer in consumers:
            consumer.close()
    block = f"{rate:g} a second due, trigger {trigger}"
    print(f"\n{block}, for {seconds} s\n{'':<40}{'p50 ms':>8}{'p99 ms':>8}{'least ms':>10}")
    for label, messages_seen in (
        ("visible", visible),
        ("received", received),
        ("Pulsar, shared", shared),
    ):
        late_s = [
            seen_s - due_s
            for due_s, seen_s in messages_seen
            if began_s <= due_s < began_s + seconds
        ]
        yield {"block": block, "label": label, **_show(label, late_s)}


def _await_received(received: list[Seen], due_s: float) -> None:
    """Wait until a message that is due then, or later, has been received."""
    until_s = time.time() + _PATIENCE_S
    while max(received, default=(0.0, 0.0))[0] < due_s:
        if time.time() > until_s:
            raise SystemExit(
                f"{len(received):,} messages were received, and none that was due {_PATIENCE_S} s "
                "ago"
            )
        time.sleep(_POLL_S)


def _show(label: str, late_s: list[float]) -> dict[str, int]:
    cuts = quantiles(late_s, n=100, method="inclusive")
    row = {
        "p50_ms": round(cuts[49] * 1000),
        "p99_ms": round(cuts[98] * 1000),
        "least_ms": round(min(late_s) * 1000),
    }
    print(
        f"{label:<40}{row['p50_ms']:>8}{row['p99_ms']:>8}{row['least_ms']:>10}   of "
        f"{len(late_s):,}",
        flush=True,
    )
    return row


def _publish_delayed(runtime: Runtime, topic: str, rate: float, enough: threading.Event) -> None:
    producer = runtime.client().create_producer(topic, block_if_queue_full=True)
    began_s = time.monotonic()
    for number in itertools.count():
        if enough.wait(
            max(0.0, began_s + number / rate - time.monotonic())
            if number % 10 == 0 or rate < 10
            else 0
        ):
            break
        due_ms = int((time.time() + _DELAY_S) * 1000)
        producer.send_async(repr(due_ms / 1000).encode(), lambda *_: None, deliver_at=due_ms)
    producer.flush()


def _burst(runtime: Runtime, folder: Path, messages: int, has_ids: bool) -> dict[str, Any]:
    topic = runtime.topic(PARTITIONS)
    run_folder = folder / f"burst-{has_ids}"
    running = _start(runtime, run_folder, topic, "1 second")
    enough = threading.Event()
    plain = threading.Thread(target=_publish_plain, args=(runtime, topic, enough))
    plain.start()
    try:
        _await_table(run_folder, running)
        due_s = float(int(time.time()) + _WARM_UP_S + messages // _PUBLISH_RATE)
        watched = _BurstWatch(run_folder, messages, due_s, running)
        watched.start()
        _publish_burst(runtime, topic, messages, due_s, has_ids)
        if time.time() > due_s - _WARM_UP_S / 2:
            raise SystemExit("publishing took so long that the messages are due already")
        time.sleep(due_s - _WARM_UP_S / 4 - time.time())
        with WorkerMemory() as memory:
            watched.join()
    finally:
        enough.set()
        plain.join()
        running.terminate()
        running.wait()
    label = f"{messages:,} due in one second, {'an id each' if has_ids else 'without ids'}"
    released_s = watched.released_s - due_s
    before = [
        seen - sent
        for sent, seen in watched.plain_seen
        if due_s - _WARM_UP_S / 2 <= sent < due_s - 2
    ]
    meanwhile = [
        seen - sent for sent, seen in watched.plain_seen if due_s - 1 <= sent < watched.released_s
    ]
    print(
        f"\n{label}\n{'all visible after, s':<40}{released_s:>8.1f}\n{'peak of a Python process, MB':<40}{memory.peak_mb:>8.0f}"
    )
    print(f"{'  its command':<40}{memory.command}")
    print(f"{'':<40}{'p50 ms':>8}{'p99 ms':>8}{'least ms':>10}")
    row = {
        "block": "burst",
        "label": label,
        "released_s": round(released_s, 1),
        "peak_mb": round(memory.peak_mb),
    }
    row["plain_before"] = _show("plain messages before", before)
    row["plain_meanwhile"] = _show("plain messages meanwhile", meanwhile)
    row["plain_most_s"] = round(max(meanwhile), 1)
    print(f"{'most, s':<40}{row['plain_most_s']:>8.1f}", flush=True)
    return row


class _BurstWatch(threading.Thread):
    """Looks at the table until the burst is in it."""

    def __init__(
        self, folder: Path, messages: int, due_s: float, running: subprocess.Popen[bytes]
    ) -> None:
        super().__init__(daemon=True)
        self.plain_seen: list[Seen] = []
        self.released_s = 0.0
        self._added = AddedFiles(folder / "messages")
        self._missing = messages
        self._until_s = due_s + _PATIENCE_S
        self._running = running

    def run(self) -> None:
        while self._missing and time.time() < self._until_s and self._running.poll() is None:
            time.sleep(_POLL_S)
            files = self._added.files()
            now_s = time.time()
            for file in files:
                rows = pq.read_table(file, columns=["value", "deliver_at"])
                self._missing -= rows.num_rows - rows["deliver_at"].null_count
                plain = rows.filter(rows["deliver_at"].is_null())["value"].to_pylist()
                self.plain_seen += [(float(value), now_s) for value in plain]
        if self._missing:
            print(f"{self._missing:,} messages of the burst did not come")
        self.released_s = time.time()


def _publish_plain(runtime: Runtime, topic: str, enough: threading.Event) -> None:
    producer = runtime.client().create_producer(topic, batching_enabled=False)
    while not enough.wait(1 / _PLAIN_RATE):
        producer.send_async(repr(time.time()).encode(), lambda *_: None)
    producer.flush()


def _publish_burst(
    runtime: Runtime, topic: str, messages: int, due_s: float, has_ids: bool
) -> None:
    import pulsar

    producer = runtime.client().create_producer(
        topic,
        block_if_queue_full=True,
        message_routing_mode=pulsar.PartitionsRoutingMode.RoundRobinDistribution,
    )
    for number in range(messages):
        properties = {"ledgerlake.schedule": f"visit-{number}"} if has_ids else None
        due_ms = int(due_s * 1000) + number % 1000
        producer.send_async(bytes(100), lambda *_: None, deliver_at=due_ms, properties=properties)
    producer.flush()


def _await_table(folder: Path, running: subprocess.Popen[bytes]) -> None:
    while not (folder / "messages" / "_delta_log" / f"{1:020}.json").exists():
        if running.poll() is not None:
            raise SystemExit(f"the command ended with {running.returncode} before its first commit")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
