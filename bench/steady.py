"""An hour of steady load: the memory of each process, CPU, and disk usage, minute by minute.

1,000 messages a second come to four topic partitions, trigger 1 second. A tenth of them are delayed
by a minute, and a message of 2 MiB in chunks comes each ten seconds. So the state has work in each
micro-batch, and upkeep runs as it does by default.

    memory        resident set of the JVM, of the command's own process, of the planner, and of all
                  workers
    all (PSS)     memory of all processes together, what several share counted once
    CPU           of a core, since the sample before
    files, log    of the table; upkeep merges its files
    checkpoint    bytes of the checkpoint's folder, the state included

Results are printed and written to ``bench/latest-steady.json``; ``bench.plot`` draws them.

python -m bench.steady [--minutes 60]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from deltalake import DeltaTable
from tests.live.runtime import Runtime, start_runtime, to_toml
from tests.waiting import wait_until

from bench.latency import run_pipeline
from bench.throughput import cpu_s, pss_mb
from ledgerlake.runtime.java import cache_folder

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

LATEST = Path(__file__).parent / "latest-steady.json"
RATE, PARTITIONS = 1000, 4
_DELAYED_SHARE, _DELAY_S = 10, 60
_LARGE_BYTES, _LARGE_EVERY = 2 * 1024 * 1024, 10 * RATE
_SAMPLE_S = 60

# Words in the name and the command of a process, and what it is. The JVM that archives classes runs
# once in the first minutes, and is not shown.
_ROLES = {
    "ledgerlake.cli": "command_mb",
    "-Xshare:dump": "archive_mb",
    "/java": "jvm_mb",
    "python streamin": "planner_mb",
    "": "workers_mb",
}

TITLES = {
    "jvm_mb": "JVM, MB",
    "command_mb": "the command's own process, MB",
    "planner_mb": "planner, MB",
    "workers_mb": "all workers together, MB",
    "pss_mb": "all processes (PSS), MB",
    "cpu": "CPU, cores",
    "files": "files of the table",
    "log_mb": "log of the table, MB",
    "checkpoint_mb": "checkpoint, MB",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=int, default=60, help="default: 60")
    minutes = parser.parse_args().minutes
    with (
        start_runtime() as runtime,
        tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder,
    ):
        samples = list(_samples(runtime, Path(folder), minutes))
    LATEST.write_text(json.dumps({f"{RATE:,} messages a second": samples}, indent=1) + "\n")


def _samples(runtime: Runtime, folder: Path, minutes: int) -> Iterator[dict[str, float]]:
    topic = runtime.topic(PARTITIONS)
    data = runtime.config(folder, topic)
    data["stream"]["trigger"] = "1 second"
    (folder / "pipeline.toml").write_text(to_toml(data))
    enough = threading.Event()
    publisher = threading.Thread(target=_publish, args=(runtime, topic, enough))
    publisher.start()
    running = run_pipeline(folder / "pipeline.toml", cache_folder())
    print(" ".join(f"{name:>13}" for name in ("minutes", *TITLES, "messages")))
    try:
        wait_until((folder / "messages" / "_delta_log" / f"{2:020}.json").exists)
        began_s = time.monotonic()
        spent_s = cpu_s(*_tree(running))
        for minute in range(1, minutes + 1):
            time.sleep(max(0.0, began_s + minute * _SAMPLE_S - time.monotonic()))
            before_s, spent_s = spent_s, cpu_s(*_tree(running))
            sample = {
                "minutes": minute,
                **_sample(running, folder),
                "cpu": (spent_s - before_s) / _SAMPLE_S,
            }
            print(
                " ".join(f"{sample[name]:>13,.2f}" for name in ("minutes", *TITLES, "messages")),
                flush=True,
            )
            yield sample
    finally:
        enough.set()
        publisher.join()
        running.terminate()
        running.wait()


def _tree(running: subprocess.Popen[bytes]) -> list[psutil.Process]:
    process = psutil.Process(running.pid)
    return [process, *process.children(recursive=True)]


def _sample(running: subprocess.Popen[bytes], folder: Path) -> dict[str, float]:
    processes = _tree(running)
    sizes_mb = dict.fromkeys(_ROLES.values(), 0.0)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join((process.name(), *process.cmdline()))
            role = next(role for words, role in _ROLES.items() if words in command)
            sizes_mb[role] += process.memory_info().rss / 1e6
    table = DeltaTable(str(folder / "messages"))
    return {
        **sizes_mb,
        "pss_mb": pss_mb(*processes),
        "files": len(table.file_uris()),
        "log_mb": _folder_mb(folder / "messages" / "_delta_log"),
        "checkpoint_mb": _folder_mb(folder / "checkpoint"),
        "messages": table.count(),
    }


def _folder_mb(folder: Path) -> float:
    size = 0
    for file in folder.rglob("*"):
        # Files come and go meanwhile.
        with contextlib.suppress(FileNotFoundError):
            size += file.stat().st_size if file.is_file() else 0
    return size / 1e6


def _publish(runtime: Runtime, topic: str, enough: threading.Event) -> None:
    """Publish ``RATE`` messages a second until it is enough."""
    import pulsar

    client = runtime.client()
    routing: Any = pulsar.PartitionsRoutingMode.RoundRobinDistribution
    producer = client.create_producer(
        topic,
        message_routing_mode=routing,
        batching_max_publish_delay_ms=5,
        block_if_queue_full=True,
    )
    large = client.create_producer(
        topic, chunking_enabled=True, batching_enabled=False, block_if_queue_full=True
    )
    began_s = time.monotonic()
    for number in itertools.count():
        if enough.is_set():
            break
        ahead_s = began_s + number / RATE - time.monotonic()
        if ahead_s > 0.01:
            time.sleep(ahead_s)
        if number % _LARGE_EVERY == 0:
            large.send_async(bytes(_LARGE_BYTES), lambda *_: None)
        if number % _DELAYED_SHARE == 0:
            deliver_ms = int((time.time() + _DELAY_S) * 1000)
            producer.send_async(bytes(100), lambda *_: None, deliver_at=deliver_ms)
        else:
            producer.send_async(bytes(100), lambda *_: None)
    producer.flush()
    large.flush()


if __name__ == "__main__":
    main()
