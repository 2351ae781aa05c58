"""Quiet topics with 850 messages a second together, trigger 1 second: what the pipeline costs, how
many files it writes an hour, and how many the table has with upkeep.

    python -m bench.quiet [--topics 10] [--seconds 60]
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import psutil
from deltalake import DeltaTable
from tests.live.runtime import Runtime, start_runtime, to_toml
from tests.waiting import wait_until

from bench.latency import actions_of, publish, run_pipeline
from bench.throughput import cpu_s, pss_mb
from ledgerlake.runtime.java import cache_folder

RATE = 850
_WARM_UP_S = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topics", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    with start_runtime() as runtime, tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder:
        measure(runtime, Path(folder), options.topics, options.seconds)


def measure(runtime: Runtime, folder: Path, count: int, seconds: int) -> None:
    """Run the pipeline over so many topics, and print what it took in the last ``seconds``."""
    topics = [f"{runtime.topic()}-{number}" for number in range(count)]
    data = runtime.config(folder, *topics)
    data["stream"]["trigger"] = "1 second"
    (folder / "pipeline.toml").write_text(to_toml(data))
    ended = threading.Event()
    publisher = threading.Thread(target=publish, args=(runtime, topics, RATE, lambda: b"x" * 100, ended))
    publisher.start()
    running = run_pipeline(folder / "pipeline.toml", cache_folder())
    try:
        wait_until((folder / "messages" / "_delta_log" / f"{2:020}.json").exists)
        time.sleep(_WARM_UP_S)
        process = psutil.Process(running.pid)
        processes = [process, *process.children(recursive=True)]
        before_s, before = cpu_s(*processes), DeltaTable(str(folder / "messages"))
        rows = before.count()
        time.sleep(seconds)
        spent_s = cpu_s(*processes) - before_s
        after = DeltaTable(str(folder / "messages"))
        memory_mb = pss_mb(*processes)
    finally:
        ended.set()
        publisher.join()
        running.terminate()
        running.wait()
    rate = (after.count() - rows) / seconds
    by_stream, by_upkeep = _files_written(folder, before.version(), after.version())
    print(f"{count} topics, {rate:,.0f} messages/s together, trigger 1 second, for {seconds} s")
    print(f"{'files that the stream writes an hour':<40}{by_stream * 3600 / seconds:>10,.0f}")
    print(f"{'files that upkeep writes an hour':<40}{by_upkeep * 3600 / seconds:>10,.0f}")
    print(f"{'files of the table, before and after':<40}{len(before.file_uris()):>10,}{len(after.file_uris()):>8,}")
    print(f"{'CPU of a core':<40}{spent_s / seconds:>10.2f}")
    print(f"{'memory of all processes (PSS), MB':<40}{memory_mb:>10,.0f}")


def _files_written(folder: Path, after: int, through: int) -> tuple[int, int]:
    """How many files the commits of these versions added: those of the stream, and those that put files
    in the place of others.
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
