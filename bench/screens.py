"""The status page, the dashboard and the alerts on a live pipeline with traffic: pictures for the docs, and
what the page costs.

Ten topics get 850 messages a second together. Some messages are delayed, by seconds up to weeks, and some
go into no table. Then:

    requests       the CPU of the driver for a request of the document, and its share of a core while one
                   page is open
    page           the bytes of the page, and the share of a core that Chromium's own thread of it takes
    axe            what axe-core finds, at the sizes of a desk and of a phone, dark and light
    queries        which queries of ``deploy/grafana.json`` give no value, asked of a Prometheus that fetches
                   the metrics; left out if there is no ``prometheus``

    python -m bench.screens [--seconds 120] [--pictures docs]

Needs Chromium and Node (Debian's packages chromium and nodejs), and ``npm install`` in ``tools/screens``;
``make screens`` does the latter. Ends with 1 if something is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from tests.live.runtime import Runtime, start_runtime, to_toml, wait_until

from bench.latency import run_pipeline
from bench.throughput import cpu_s
from ledgerlake.runtime.java import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path(__file__).parents[1]
_RATE, _TOPICS = 850, 10
_REQUESTS = 2000
# How often an open page asks.
_POLL_S = 5.0
_MOST_BYTES = 200_000
_MOST_PERCENT = 1.0
# Queries about what this pipeline does not have.
_OF_OTHERS = ("ledgerlake_rows_per_second",)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=120, help="of traffic before the pictures")
    parser.add_argument("--pictures", type=Path, default=_ROOT / "docs", help="the folder for the pictures")
    options = parser.parse_args()
    chromium, node = shutil.which("chromium"), shutil.which("node")
    if chromium is None or node is None:
        sys.exit("chromium and nodejs are needed; they are Debian's packages")
    options.pictures.mkdir(parents=True, exist_ok=True)
    with start_runtime() as runtime, tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder:
        with _pipeline(runtime, Path(folder)) as (url, process), _prometheus(Path(folder), url) as prometheus:
            time.sleep(options.seconds)
            costs_ms, percent = _requests(url, process)
            page_bytes = len(_fetch(url))
            command = [node, str(_ROOT / "tools" / "screens" / "screens.mjs"), chromium, url, str(options.pictures)]
            seen = json.loads(subprocess.run([*command, "30"], check=True, capture_output=True, text=True).stdout)
            silent = None if prometheus is None else _silent_queries(prometheus)
    print(f"{'document, CPU of a request, ms':<50}{costs_ms:>10.2f}")
    print(f"{'driver while a page is open, % of a core':<50}{percent:>10.3f}")
    print(f"{'page, bytes':<50}{page_bytes:>10,}")
    print(f"{'page in Chromium, % of a core':<50}{seen['busy_percent']:>10.2f}")
    for picture, violations in seen["violations"].items():
        print(f"{'axe, ' + picture:<50}{len(violations):>10}", *violations, sep="\n  ")
    print(f"{'requests to other addresses':<50}{len(seen['requests']):>10}", *seen["requests"], sep="\n  ")
    print(f"{'errors of the page':<50}{len(seen['errors']):>10}", *seen["errors"], sep="\n  ")
    if silent is not None:
        print(f"{'queries of the dashboard without a value':<50}{len(silent):>10}", *silent, sep="\n  ")
    serious = [
        text for texts in seen["violations"].values() for text in texts if text.startswith(("serious", "critical"))
    ]
    is_small = page_bytes < _MOST_BYTES and max(percent, seen["busy_percent"]) < _MOST_PERCENT
    return int(bool(serious or seen["requests"] or seen["errors"] or silent or not is_small))


@contextlib.contextmanager
def _pipeline(runtime: Runtime, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A pipeline with traffic; its status page, and the process of its driver."""
    topics = [f"{runtime.topic()}-{number}" for number in range(_TOPICS)]
    port = _free_port()
    data = runtime.config(folder, *topics, name="orders")
    del data["delta"]["path"]
    data["stream"]["trigger"] = "1 second"
    kinds = ("orders", "payments", "returns")
    data["tables"] = [{"path": str(folder / kind), "where": f"properties['kind'] = '{kind}'"} for kind in kinds]
    data["upkeep"] = {"interval": "10 seconds"}
    data["metrics"] = {"port": port}
    (folder / "pipeline.toml").write_text(to_toml(data))
    ended = threading.Event()
    publisher = threading.Thread(target=_publish, args=(runtime, topics, ended))
    publisher.start()
    running = run_pipeline(folder / "pipeline.toml", cache_folder())
    url = f"http://127.0.0.1:{port}/"
    try:
        wait_until(lambda: _has_messages(url))
        yield url, psutil.Process(running.pid)
    finally:
        ended.set()
        publisher.join()
        running.terminate()
        running.wait()


def _publish(runtime: Runtime, topics: list[str], ended: threading.Event) -> None:
    """Publish orders, payments and returns; some of them delayed, and some other messages."""
    client, choice = runtime.client(), random.Random(1)
    producers = [
        client.create_producer(topic, batching_max_publish_delay_ms=5, block_if_queue_full=True) for topic in topics
    ]
    began_s = time.monotonic()
    number = 0
    while not ended.is_set():
        ahead_s = began_s + number / _RATE - time.monotonic()
        if ahead_s > 0.01:
            time.sleep(ahead_s)
        number += 1
        kind = choice.choices(["orders", "payments", "returns", "unknown"], [80, 15, 5, 0.1])[0]
        delay_s = 10 ** choice.uniform(0.5, 6.5) if choice.random() < 0.02 else 0.0
        deliver_at = int((time.time() + delay_s) * 1000) if delay_s else None
        producer = producers[number % len(producers)]
        producer.send_async(b"x" * 100, lambda *_: None, properties={"kind": kind}, deliver_at=deliver_at)
    for producer in producers:
        producer.flush()


@contextlib.contextmanager
def _prometheus(folder: Path, url: str) -> Iterator[str | None]:
    """A Prometheus that fetches the metrics each two seconds, if it is installed."""
    program = shutil.which("prometheus")
    if program is None:
        yield None
        return
    job = {
        "job_name": "ledgerlake",
        "scrape_interval": "2s",
        "static_configs": [{"targets": [urllib.parse.urlsplit(url).netloc]}],
    }
    rules = str(_ROOT / "deploy" / "alerts.yaml")
    (folder / "prometheus.yaml").write_text(json.dumps({"scrape_configs": [job], "rule_files": [rules]}))
    address = f"127.0.0.1:{_free_port()}"
    options = {
        "config.file": folder / "prometheus.yaml",
        "storage.tsdb.path": folder / "tsdb",
        "web.listen-address": address,
    }
    running = subprocess.Popen(
        [program, *(f"--{name}={value}" for name, value in options.items())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://{address}"
    finally:
        running.terminate()
        running.wait()


def _silent_queries(prometheus: str) -> list[str]:
    """The queries of the dashboard that give no value."""
    panels = json.loads((_ROOT / "deploy" / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    silent = []
    for query in queries:
        text = re.sub(r"\$__(rate_interval|range)", "1m", query).replace("$query", ".*")
        answer = json.loads(_fetch(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': text})}"))
        if not answer["data"]["result"] and not query.startswith(_OF_OTHERS):
            silent.append(query)
    return silent


def _requests(url: str, process: psutil.Process) -> tuple[float, float]:
    """The milliseconds of CPU that a request of the document costs the driver's process, beyond what it spends
    anyway, and the share of a core that one page takes.
    """
    begun_s, before_s = time.monotonic(), cpu_s(process)
    for _ in range(_REQUESTS):
        _fetch(f"{url}status.json")
    taken_s, between_s = time.monotonic() - begun_s, cpu_s(process)
    time.sleep(taken_s)
    idle_s = cpu_s(process) - between_s
    cost_s = max(between_s - before_s - idle_s, 0.0) / _REQUESTS
    return 1000 * cost_s, 100 * cost_s / _POLL_S


def _has_messages(url: str) -> bool:
    with contextlib.suppress(OSError):
        queries = json.loads(_fetch(f"{url}status.json"))["queries"]
        return any(query["pipeline"] and query["pipeline"]["messages"] for query in queries)
    return False


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        content: bytes = response.read()
    return content


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


if __name__ == "__main__":
    sys.exit(main())
