"""Quiet topics with 850 messages a second together, trigger 1 second: what the pipeline costs, and
how many files it makes.

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
from tests.live.runtime import Runtime, start_runtime, to_toml, wait_until

from bench.latency import publish, run_pipeline
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
        before_s, files, rows = cpu_s(*processes), *_table(folder)
        time.sleep(seconds)
        spent_s = cpu_s(*processes) - before_s
        files_later, rows_later = _table(folder)
        memory_mb = pss_mb(*processes)
    finally:
        ended.set()
        publisher.join()
        running.terminate()
        running.wait()
    print(
        f"{count} topics, {(rows_later - rows) / seconds:,.0f} messages/s together, trigger 1 second, for {seconds} s"
    )
    print(f"{'files':<40}{files_later - files:>10,}")
    print(f"{'CPU of a core':<40}{spent_s / seconds:>10.2f}")
    print(f"{'memory of all processes (PSS), MB':<40}{memory_mb:>10,.0f}")


def _table(folder: Path) -> tuple[int, int]:
    """How many files and rows the table has."""
    table = DeltaTable(str(folder / "messages"))
    return len(table.file_uris()), table.count()


if __name__ == "__main__":
    main()
