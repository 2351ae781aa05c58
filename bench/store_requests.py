"""Requests that a pipeline sends to an object store: for each micro-batch, and while it is idle.

A pipeline process with its tables in an S3 server, and its checkpoint on a disk or there too. A
proxy between the two counts requests by their method and by what they are for.

    python -m bench.store_requests [SECONDS]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from tests.live.object_store import ObjectStore, hadoop_version, start_object_store
from tests.live.pipelines import config_file
from tests.live.runtime import Runtime, start_runtime
from tests.live.store_proxy import StoreProxy
from tests.waiting import wait_until

_PARTS = ("_delta_log", "offsets", "commits", "state", "ledgerlake")


def main(seconds: float) -> None:
    with start_runtime() as runtime, start_object_store() as store:
        print(
            f"{'checkpoint':<12}{'':<12}{'micro-batches':>14}{'requests':>10}{'GET+HEAD':>10}{'PUT+POST':>10}{'DELETE':>10}"
        )
        for checkpoint in ("disk", "S3"):
            _measure(runtime, store, checkpoint, seconds)


def _measure(runtime: Runtime, store: ObjectStore, checkpoint: str, seconds: float) -> None:
    proxy, topic, bucket = StoreProxy(store.ports["s3.port"]), runtime.topic(2), store.bucket()
    with tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder:
        config = config_file(
            Path(folder), _config(runtime, store, Path(folder), topic, bucket, checkpoint, proxy)
        )
        producer = runtime.client().create_producer(topic)
        producer.send(b"first")
        table = f"s3://{bucket}/messages"
        running = subprocess.Popen(
            [sys.executable, "-m", "ledgerlake.cli", "run", config], stderr=subprocess.DEVNULL
        )
        try:
            wait_until(lambda: running.poll() is not None or _version(table, store) > 1)
            before, counts = _version(table, store), proxy.counts.copy()
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                producer.send(b"x" * 100)
                time.sleep(0.1)
            time.sleep(8)
            batches, busy = _version(table, store) - before, proxy.counts - counts
            _print(checkpoint, "a batch", batches, busy, batches)
            counts = proxy.counts.copy()
            time.sleep(seconds)
            _print("", "a minute idle", 0, proxy.counts - counts, seconds / 60)
        finally:
            running.terminate()
            running.wait()


def _config(
    runtime: Runtime,
    store: ObjectStore,
    folder: Path,
    topic: str,
    bucket: str,
    checkpoint: str,
    proxy: StoreProxy,
) -> dict[str, Any]:
    data = runtime.config(folder, topic, name=bucket)
    data["delta"] = {"path": f"s3://{bucket}/messages"}
    data["storage"] = store.settings | {"endpoint_url": f"http://127.0.0.1:{proxy.port}"}
    data["stream"]["trigger"] = "2 s"
    if checkpoint == "S3":
        data["stream"]["checkpoint"] = f"s3://{bucket}/checkpoint"
        data["spark"] = {"packages": [f"org.apache.hadoop:hadoop-aws:{hadoop_version()}"]}
    return data


def _version(table: str, store: ObjectStore) -> int:
    if not DeltaTable.is_deltatable(table, storage_options=store.delta_options):
        return -1
    return DeltaTable(table, storage_options=store.delta_options).version()


def _print(
    checkpoint: str, kind: str, batches: int, counts: Counter[tuple[str, str]], by: float
) -> None:
    methods: Counter[str] = Counter()
    for (method, _), count in counts.items():
        methods[method] += count
    numbers = [
        sum(methods.values()),
        methods["GET"] + methods["HEAD"],
        methods["PUT"] + methods["POST"],
        methods["DELETE"],
    ]
    figures = "".join(f"{number / by:>10.1f}" for number in numbers)
    print(f"{checkpoint:<12}{kind:<14}{batches or '':>12}{figures}", flush=True)
    parts = Counter[tuple[str, str]]()
    for (method, path), count in counts.items():
        parts[method, _part(path)] += count
    for (method, part), count in sorted(parts.items()):
        print(f"    {method:<7}{part:<12}{count / by:6.1f}", flush=True)


def _part(path: str) -> str:
    """Return the part of the lake that a request is for."""
    return next((part for part in _PARTS if f"/{part}" in path or f"%2F{part}" in path), "files")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60)
