"""The tutorials run as they are written, one after the other: their files, their commands and their
Python, with a topic and folders of the test.
"""

from __future__ import annotations

import re
import secrets
import shlex
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from tests.live.pipelines import ledgerlake, run_and_verify, run_once, running
from tests.pages import DOCS, Block, blocks_of
from tests.waiting import wait_until

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]


@dataclass
class Reader:
    """Somebody who does what a tutorial says.

    Args:
        until: what a run that does not end by itself is waited for.
        config: the file of the configuration.
        words: the page's words and the test's words instead; by default the words of the first
            table.
        arguments: the same for the arguments of commands.
    """

    runtime: Runtime
    spark: SparkSession
    folder: Path
    topic: str
    until: Callable[[], bool] = lambda: True
    config: str = "orders.toml"
    words: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    printed: list[str] = field(default_factory=list)
    names: dict[str, dict[str, Any]] = field(default_factory=dict)

    def follow(self, page: str) -> None:
        """Do the steps of a page."""
        for block in blocks_of(DOCS / page):
            self._step(block)

    def run_python(self, page: str) -> None:
        """Run the Python of a page, one block after the other."""
        for block in blocks_of(DOCS / page):
            if block.language == "python":
                self._run_python(block)

    def _step(self, block: Block) -> None:
        if block.language == "toml":
            (self.folder / self.config).write_text(self._of_the_test(block.text))
        elif block.language == "python" and "receive()" in block.text:
            # It waits for the messages of the next steps.
            threading.Thread(target=self._run_python, args=(block,), daemon=True).start()
        elif block.language == "python":
            self._run_python(block)
        elif block.language == "sh":
            for line in block.text.splitlines():
                self._command(shlex.split(line))

    def _run_python(self, block: Block) -> None:
        names = self.names.setdefault(
            block.page,
            {
                "__name__": "page",
                "print": lambda *words: self.printed.append(" ".join(map(str, words))),
            },
        )
        exec(compile(self._of_the_test(block.text), block.place, "exec"), names)

    def _of_the_test(self, text: str) -> str:
        words = self.words or {
            "persistent://public/default/orders": self.topic,
            "lake/orders": f"{self.folder}/lake/orders",
            "checkpoints/orders": f"{self.folder}/checkpoints/orders",
            "orders.toml": f"{self.folder}/orders.toml",
            '"topic", "orders"': f'"topic", "{self.topic}"',
            "persistent://public/default/scans": self.topic,
            "scan.tiff": f"{self.folder}/orders.toml",
        }
        for word, instead in {"pulsar://localhost:6650": self.runtime.service_url, **words}.items():
            text = text.replace(word, instead)
        return text

    def _command(self, words: list[str]) -> None:
        # The broker and the environment are there.
        if words[0] != "ledgerlake" or words[1] == "broker":
            return
        if words[1] == "run":
            self._run(once="--once" in words)
            return
        here = {
            self.config: str(self.folder / self.config),
            "10 seconds": "2 seconds",
            **self.arguments,
        }
        done = ledgerlake(
            *(here.get(word, word) for word in words[1:]),
            LEDGERLAKE_SERVICE_URL=self.runtime.service_url,
        )
        assert done.returncode == 0, (words, done.stderr)
        self.printed.append(done.stdout)

    def _run(self, once: bool) -> None:
        data: dict[str, Any] = tomllib.loads((self.folder / self.config).read_text())
        if once:
            run_once(self.spark, data)
            return
        with running(self.spark, data):
            wait_until(self.until)


def test_the_first_table_and_the_first_schedule(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    def is_delivered() -> bool:
        rows = DeltaTable(str(tmp_path / "lake" / "orders")).to_pyarrow_table(columns=["value"])
        return b"Your visit is soon" in rows["value"].to_pylist()

    topic = runtime.topic()
    reader = Reader(runtime, spark, tmp_path, topic, is_delivered, arguments={"orders": topic})
    reader.follow("first-table.md")
    assert "100 messages" in reader.printed
    reader.printed.clear()
    reader.follow("first-schedule.md")
    assert any("visit-17" in text for text in reader.printed)
    (delivered,) = [text for text in reader.printed if "Your visit is soon" in text]
    assert "Your visit is today" not in delivered
    # Pages with Python that needs no more than this.
    for page in ("pipeline.md", "python.md", "large-messages.md"):
        reader.run_python(page)


def test_a_cron_job_becomes_a_schedule(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    def worker_has_ended() -> bool:
        return sum(text.startswith("write-report was due") for text in reader.printed) == 3

    # The page has the topic of the schedules created.
    topic, due_topic = (
        f"persistent://{runtime.namespace}/cron-{secrets.token_hex(4)}",
        runtime.topic(),
    )
    words = {
        "persistent://public/default/schedules": topic,
        "persistent://public/default/due": due_topic,
        "lake/": f"{tmp_path}/lake/",
        "checkpoints/": f"{tmp_path}/checkpoints/",
    }
    arguments = {"schedules": topic, "*/10 * * * * *": "* * * * * *"}
    reader = Reader(
        runtime, spark, tmp_path, topic, worker_has_ended, "schedules.toml", words, arguments
    )
    reader.follow("cron-jobs.md")
    assert worker_has_ended()
    assert any("  ledgerlake.cron=* * * * * *" in text for text in reader.printed)
    verdict = run_and_verify(spark, tomllib.loads((tmp_path / "schedules.toml").read_text()))
    assert verdict.clean, verdict.sentence()


def test_the_tour_ends_with_a_chart_of_late_payments(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    runtime = runtime.in_namespace("tour")
    words = {name: f"{tmp_path}/{name}" for name in ("lake/", "checkpoints/", "late.svg")}
    words |= {
        "persistent://public/default/": f"persistent://{runtime.namespace}/",
        'topics_pattern = "': f'topics_pattern = "persistent://{runtime.namespace}/',
    }
    reader = Reader(runtime, spark, tmp_path, "", config="shop.toml", words=words)
    reader.follow("tour.md")
    rows = {
        name: DeltaTable(str(tmp_path / "lake" / name)).to_pyarrow_table().to_pylist()
        for name in ("orders", "payments", "reminders", "rejects")
    }
    assert len(rows["orders"]) == 200
    ids = [row["order_id"] for row in rows["reminders"]]
    cancelled = [row for row in rows["rejects"] if row["reason"] == "cancelled"]
    assert len(set(ids)) == len(ids)
    assert len(ids) + len(cancelled) == 200
    assert 0 < len(ids) < 200
    # Orders without a reminder are those that were paid in time.
    paid = {row["order_id"]: row["pulsar"]["broker_timestamp"] for row in rows["payments"]}
    assert set(range(200)) - set(ids) <= paid.keys()
    for row in rows["reminders"]:
        assert row["order_id"] not in paid or paid[row["order_id"]] > row["pulsar"]["deliver_at"]
    chart = (tmp_path / "late.svg").read_text()
    assert sum(map(int, re.findall(r'>([0-9]+)</text><text x="[0-9]+" y="180"', chart))) == len(ids)


def test_the_tour_takes_less_than_fifty_lines_of_python() -> None:
    blocks = [block.text for block in blocks_of(DOCS / "tour.md") if block.language == "python"]
    assert sum(bool(line.strip()) for text in blocks for line in text.splitlines()) < 50
