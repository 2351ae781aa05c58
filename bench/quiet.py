"""Quiet topics with 850 messages a second together: what the pipeline costs, how many files it
writes an hour, and how many the table has with upkeep. Beside it, queries of Spark's in which
nothing happens (``bench.spark_alone``), one after the other in one run, with triggers of 1 second
and 200 ms.

    python -m bench.quiet [--topics 10] [--warm-up 40] [--seconds 60]
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from deltalake import DeltaTable
from tests.live.runtime import Runtime, start_runtime, to_toml
from tests.waiting import wait_until

from bench import spark_alone
from bench.latency import actions_of, ended, publish, run_pipeline
from bench.throughput import cpu_s, pss_mb
from ledgerlake.runtime.java import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

RATE = 850
_TRIGGERS_MS = (1000, 200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topics", type=int, default=10)
    parser.add_argument(
        "--warm-up",
        type=int,
        default=40,
        metavar="SECONDS",
        help="not counted, after the first commit",
    )
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    print(
        f"{options.topics} topics, {RATE} messages/s together, {options.seconds} s after "
        f"{options.warm_up} s"
    )
    print(
        f"{'':<32}{'trigger ms':>12}{'CPU of a core':>15}{'PSS of all, MB':>16}{'micro-batches/s':>17}"
    )
    with (
        start_runtime() as runtime,
        tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder,
    ):
        for trigger_ms in _TRIGGERS_MS:
            place = Path(folder) / f"pipeline-{trigger_ms}"
            place.mkdir()
            _pipeline(runtime, place, trigger_ms, options)
            for kind, name in spark_alone.KINDS.items():
                checkpoint = Path(folder) / f"{kind}-{trigger_ms}"
                running = spark_alone.start(kind, trigger_ms, checkpoint, cache_folder())
                with ended(running):
                    spark_alone.await_first(running)
                    time.sleep(options.warm_up)
                    _measure(name, trigger_ms, running, checkpoint, options.seconds)


def _pipeline(runtime: Runtime, folder: Path, trigger_ms: int, options: argparse.Namespace) -> None:
    """Run the pipeline, and print what it took in the last seconds."""
    topics, seconds = (
        [f"{runtime.topic()}-{number}" for number in range(options.topics)],
        options.seconds,
    )
    data = runtime.config(folder, *topics)
    data["stream"]["trigger"] = f"{trigger_ms} milliseconds"
    (folder / "pipeline.toml").write_text(to_toml(data))
    with (
        _publishing(runtime, topics),
        ended(run_pipeline(folder / "pipeline.toml", cache_folder())) as running,
    ):
        wait_until((folder / "messages" / "_delta_log" / f"{2:020}.json").exists)
        time.sleep(options.warm_up)
        before = DeltaTable(str(folder / "messages"))
        _measure("pipeline", trigger_ms, running, folder / "checkpoint", seconds)
        after = DeltaTable(str(folder / "messages"))
    by_stream, by_upkeep = _files_written(folder, before.version(), after.version())
    print(f"  {(after.count() - before.count()) / seconds:,.0f} messages/s arrived", end="")
    print(
        f"; the table has {len(before.file_uris()):,} files, then {len(after.file_uris()):,}",
        end="",
    )
    print(f"; an hour's: {by_stream * 3600 / seconds:,.0f} of the stream", end="")
    print(f" and {by_upkeep * 3600 / seconds:,.0f} of upkeep", flush=True)


def _measure(
    name: str, trigger_ms: int, running: subprocess.Popen[bytes], checkpoint: Path, seconds: int
) -> None:
    process = psutil.Process(running.pid)
    processes = [process, *process.children(recursive=True)]
    before_s, before = cpu_s(*processes), _last_commit(checkpoint)
    time.sleep(seconds)
    cores, batches = (
        (cpu_s(*processes) - before_s) / seconds,
        (_last_commit(checkpoint) - before) / seconds,
    )
    print(
        f"{name:<32}{trigger_ms:>12,}{cores:>15.2f}{pss_mb(*processes):>16,.0f}{batches:>17.1f}",
        flush=True,
    )


def _last_commit(checkpoint: Path) -> int:
    """The number of the last micro-batch."""
    return max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())


@contextmanager
def _publishing(runtime: Runtime, topics: list[str]) -> Iterator[None]:
    enough = threading.Event()
    publisher = threading.Thread(
        target=publish, args=(runtime, topics, RATE, lambda: b"x" * 100, enough)
    )
    publisher.start()
    try:
        yield
    finally:
        enough.set()
        publisher.join()


def _files_written(folder: Path, after: int, through: int) -> tuple[int, int]:
    """Return how many files the commits of these versions added: the stream's commits, and the
    commits that replaced files.
    """
    by_stream = by_upkeep = 0
    for version in range(after + 1, through + 1):
        commit = folder / "messages" / "_delta_log" / f"{version:020}.json"
        actions = [next(iter(action)) for action in actions_of(commit)]
        if "remove" in actions:
            by_upkeep += actions.count("add")
        else:
            by_stream += actions.count("add")
    return by_stream, by_upkeep


if __name__ == "__main__":
    main()
