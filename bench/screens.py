"""The status page, the dashboard and the live screen on live pipelines with traffic: pictures for
the docs, and what the page costs.

Four topic partitions get 850 messages a second, and each minute 30,000 at once. Some messages are
delayed, by seconds up to weeks, some replace each other by their id, and some go into no table.
Then:

    driver         the share of a core that the driver's Python spends more while a page is open, in
                   rounds with and without; and the same by the CPU of two thousand requests in a
                   row
    page           the bytes of the page, and the share of a core that Chromium's own thread of it
                   takes
    axe            what axe-core finds, at the sizes of a desk and of a phone, light and dark
    queries        which queries of ``deploy/grafana.json`` give no value, asked of a Prometheus
                   that fetches the metrics; left out if there is no ``prometheus``
    live screen    in terminals of tmux with 80 and 200 columns, with 4 and then with 400 topic
                   partitions: lines that the terminal had to break, and screens that were not
                   erased

    python -m bench.screens [--rounds 4] [--seconds 20] [--pictures docs]

The pictures for the docs are ``status-*.png`` and ``live-screen.svg``; what the terminals showed is
also in ``artifacts/screens`` as text. Needs Debian's packages chromium, nodejs and tmux, and ``npm
install`` in ``tools/screens``; ``make screens`` does the latter. Ends with 1 if something is not as
it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
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
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import psutil
from tests.live.runtime import Runtime, start_runtime, to_toml
from tests.waiting import wait_until

from bench.terminal import Terminal, terminal
from bench.throughput import cpu_s

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path(__file__).parents[1]
_TEXTS = _ROOT / "artifacts" / "screens"
_RATE = 850
# The first micro-batches of a pipeline take long.
_WARM_BATCHES = 4
# A burst takes several micro-batches, so that there is a lag for a while.
_BURST, _EACH_S, _MOST_ROWS_A_BATCH = 30_000, 60, 12_000
_FEW, _MANY = 4, 400
_TERMINALS = ((200, 50), (80, 24))
# The live screen changes each second.
_DRAWN_S = 4
_REQUESTS = 2000
# How often an open page asks.
_POLL_S = 5.0
_MOST_BYTES = 200_000
_MOST_PERCENT = 1.0
_MOST_PICTURE_BYTES = 150_000
# Queries about what this pipeline does not have.
_OF_OTHERS = ("ledgerlake_rows_per_second",)


@dataclass(frozen=True)
class _Line:
    """A line of the result, and whether it is as it should be."""

    name: str
    value: str
    is_right: bool = True
    details: tuple[str, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="with and without an open page")
    parser.add_argument("--seconds", type=int, default=20, help="of each half of a round")
    parser.add_argument(
        "--pictures", type=Path, default=_ROOT / "docs", help="the folder for the pictures"
    )
    options = parser.parse_args()
    missing = [program for program in ("chromium", "node", "tmux") if shutil.which(program) is None]
    if missing:
        sys.exit(
            f"{', '.join(missing)} missing; they are of Debian's packages chromium, nodejs and tmux"
        )
    for folder in (options.pictures, _TEXTS):
        folder.mkdir(parents=True, exist_ok=True)
    lines: list[_Line] = []
    with (
        start_runtime() as runtime,
        tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as name,
    ):
        folder = Path(name)
        with (
            _pipeline(runtime, folder / "orders", _FEW) as (url, shown, traffic),
            _prometheus(folder, url) as prometheus,
        ):
            lines += _page(url, shown.pid, options)
            lines += _silent_queries(prometheus) if prometheus else []
            lines += _screens(shown, traffic, "orders", _FEW)
            picture = shown.svg("ledgerlake run orders.toml", _TERMINALS[-1][0])
            (options.pictures / "live-screen.svg").write_text(picture)
        with _pipeline(runtime, folder / "sensors", _MANY) as (_, shown, traffic):
            time.sleep(options.seconds)
            lines += _screens(shown, traffic, "sensors", _MANY)
    lines += [_size(picture) for picture in sorted(options.pictures.glob("status-*.png"))]
    for line in lines:
        print(
            f"{line.name:<60}{line.value:>12}{'' if line.is_right else '   wrong'}",
            *line.details,
            sep="\n  ",
        )
    return int(not all(line.is_right for line in lines))


def _page(url: str, pid: int, options: argparse.Namespace) -> list[_Line]:
    """What the status page shows and costs."""
    script = [
        str(shutil.which("node")),
        str(_ROOT / "tools" / "screens" / "screens.mjs"),
        str(shutil.which("chromium")),
    ]
    numbers = [str(number) for number in (pid, options.rounds, options.seconds)]
    done = subprocess.run(
        [*script, url, str(options.pictures), *numbers], check=True, capture_output=True, text=True
    )
    seen: dict[str, Any] = json.loads(done.stdout)
    percents = [
        100 * (open_s - closed_s) / options.seconds
        for open_s, closed_s in zip(seen["open_s"], seen["closed_s"], strict=True)
    ]
    closed_percent = 100 * mean(seen["closed_s"]) / options.seconds
    error = stdev(percents) / math.sqrt(len(percents)) if len(percents) > 1 else 0.0
    cost_ms = _cost_of_a_request_ms(url, psutil.Process(pid))
    cost_percent = cost_ms / _POLL_S / 10
    size_bytes = len(_fetch(url))
    return [
        _Line("driver without a page, % of a core", f"{closed_percent:.2f}"),
        _Line(
            "driver, more while a page is open, % of a core",
            f"{mean(percents):.2f}",
            mean(percents) - error < _MOST_PERCENT,
            (
                f"standard error {error:.2f} over {options.rounds} rounds of {options.seconds} s "
                "each",
            ),
        ),
        _Line("document, CPU of a request, ms", f"{cost_ms:.2f}"),
        _Line(
            "driver for a request each 5 s, % of a core",
            f"{cost_percent:.3f}",
            cost_percent < _MOST_PERCENT,
        ),
        _Line("page, kB", f"{size_bytes / 1000:.1f}", size_bytes < _MOST_BYTES),
        _Line(
            "page in Chromium, % of a core",
            f"{seen['page_percent']:.2f}",
            seen["page_percent"] < _MOST_PERCENT,
        ),
        *(
            _Line(
                f"axe, {picture}, findings ({seen['checked'][picture]} rules)",
                str(len(found)),
                not any(text.startswith(("serious", "critical")) for text in found),
                tuple(found),
            )
            for picture, found in seen["violations"].items()
        ),
        _Line(
            "requests to other addresses",
            str(len(seen["requests"])),
            not seen["requests"],
            tuple(seen["requests"]),
        ),
        _Line(
            "errors of the page",
            str(len(seen["errors"])),
            not seen["errors"],
            tuple(seen["errors"]),
        ),
    ]


def _screens(
    shown: Terminal, traffic: _Traffic, name: str, topic_partitions: int
) -> Iterator[_Line]:
    """What the live screen shows in terminals of each size."""
    for columns, height in _TERMINALS:
        shown.resize(columns, height)
        time.sleep(_DRAWN_S)
        traffic.burst()
        wait_until(lambda: _shows_lag(shown))
        lines = shown.lines()
        (_TEXTS / f"live-{topic_partitions}-{columns}.txt").write_text("\n".join(lines) + "\n")
        words = f"live screen, {topic_partitions} topic partitions, {columns} columns"
        broken = len(lines) - len(shown.lines(joined=True))
        screens = sum(line.split() == ["Ledgerlake", name] for line in lines)
        yield _Line(f"{words}, broken lines", str(broken), broken == 0)
        yield _Line(f"{words}, screens", str(screens), screens == 1)


def _shows_lag(shown: Terminal) -> bool:
    (lag,) = [line.split()[1] for line in shown.lines() if line.startswith("lag ")][:1] or ["0"]
    return lag != "0"


def _size(picture: Path) -> _Line:
    size_bytes = picture.stat().st_size
    return _Line(
        f"{picture.name}, kB", f"{size_bytes / 1000:.1f}", size_bytes < _MOST_PICTURE_BYTES
    )


@contextlib.contextmanager
def _pipeline(
    runtime: Runtime, folder: Path, partitions: int
) -> Iterator[tuple[str, Terminal, _Traffic]]:
    """A pipeline with traffic, named as its folder; its status page, and the terminal that it runs
    in.
    """
    folder.mkdir()
    topic = f"persistent://public/default/{folder.name}"
    runtime.admin("PUT", topic, "/partitions", partitions)
    port = _free_port()
    data = runtime.config(folder, topic, name=folder.name, max_rows_per_trigger=_MOST_ROWS_A_BATCH)
    del data["delta"]["path"]
    data["stream"]["trigger"] = "1 second"
    kinds = ("orders", "payments", "returns")
    data["tables"] = [
        {"path": str(folder / kind), "where": f"properties['kind'] = '{kind}'"} for kind in kinds
    ]
    data["upkeep"] = {"interval": "10 seconds"}
    data["metrics"] = {"port": port}
    config = folder / "pipeline.toml"
    config.write_text(to_toml(data))
    command = [sys.executable, "-m", "ledgerlake.cli", "run", str(config)]
    url = f"http://127.0.0.1:{port}/"
    traffic = _Traffic(runtime, topic)
    with terminal(folder / "tmux", command, *_TERMINALS[0]) as shown:
        wait_until(lambda: traffic.publish(1) and _batches(url) >= _WARM_BATCHES)
        traffic.start()
        try:
            yield url, shown, traffic
        finally:
            traffic.stop()


class _Traffic:
    """Publishes orders, payments and returns; some of them delayed, and some other messages."""

    def __init__(self, runtime: Runtime, topic: str) -> None:
        self._choice = random.Random(1)
        self._producer = runtime.client().create_producer(
            topic, batching_max_publish_delay_ms=5, block_if_queue_full=True
        )
        self._ended = threading.Event()
        self._burst = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def burst(self) -> None:
        """Publish many messages at once, soon."""
        self._burst.set()

    def publish(self, count: int) -> bool:
        """Publish so many messages, and wait until they are stored."""
        choice = self._choice
        for _ in range(count):
            kind = choice.choices(["orders", "payments", "returns", "unknown"], [80, 15, 5, 0.1])[0]
            properties, deliver_at = {"kind": kind}, None
            if choice.random() < 0.02:
                deliver_at = int(1000 * (time.time() + 10 ** choice.uniform(0.5, 6.5)))
                properties |= (
                    {"ledgerlake.schedule": f"visit-{choice.randrange(20)}"}
                    if choice.random() < 0.1
                    else {}
                )
                properties |= (
                    {"ledgerlake.timezone": "Mars/Phobos"} if choice.random() < 0.01 else {}
                )
            self._producer.send_async(
                b"x" * 100, lambda *_: None, properties=properties, deliver_at=deliver_at
            )
        self._producer.flush()
        return True

    def _run(self) -> None:
        next_s, burst_s = time.monotonic(), time.monotonic() + _EACH_S / 2
        while not self._ended.wait(max(next_s - time.monotonic(), 0)):
            self.publish(_RATE // 10)
            next_s += 0.1
            if self._burst.is_set() or time.monotonic() > burst_s:
                self.publish(_BURST)
                self._burst.clear()
                next_s, burst_s = time.monotonic(), time.monotonic() + _EACH_S


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
    (folder / "prometheus.yaml").write_text(
        json.dumps({"scrape_configs": [job], "rule_files": [rules]})
    )
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


def _silent_queries(prometheus: str) -> list[_Line]:
    """Which queries of the dashboard give no value."""
    panels = json.loads((_ROOT / "deploy" / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    silent = []
    for query in queries:
        text = re.sub(r"\$__(rate_interval|range)", "1m", query).replace("$query", ".*")
        answer = json.loads(
            _fetch(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': text})}")
        )
        if not answer["data"]["result"] and not query.startswith(_OF_OTHERS):
            silent.append(query)
    return [
        _Line(
            "queries of the dashboard without a value", str(len(silent)), not silent, tuple(silent)
        )
    ]


def _cost_of_a_request_ms(url: str, process: psutil.Process) -> float:
    """The CPU that a request of the document costs the driver's process, beyond what it spends
    anyway.
    """
    begun_s, before_s = time.monotonic(), cpu_s(process)
    for _ in range(_REQUESTS):
        _fetch(f"{url}status.json")
    taken_s, between_s = time.monotonic() - begun_s, cpu_s(process)
    time.sleep(taken_s)
    idle_s = cpu_s(process) - between_s
    return 1000 * max(between_s - before_s - idle_s, 0.0) / _REQUESTS


def _batches(url: str) -> int:
    with contextlib.suppress(OSError):
        queries = json.loads(_fetch(f"{url}status.json"))["queries"]
        return sum(query["pipeline"]["batches"] for query in queries if query["pipeline"])
    return 0


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
