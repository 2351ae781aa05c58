"""Exactly once through delta-spark's writer: the driver dies, the broker is restarted, producers go
on; then the verdict.

``test_default_broker`` does the same, and more, with the writer that appends files.

A failure prints its seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import psutil
import pulsar
import pytest

from tests.live.forked import is_worker
from tests.live.pipelines import config_file, ledgerlake, ledgerlake_process
from tests.live.runtime import Runtime, commits, start_runtime, wait_for_commits

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.long]


class Publisher(threading.Thread):
    """Publishes until it is told to stop, over broker restarts too; counts what the broker
    confirmed.
    """

    def __init__(
        self, runtime: Runtime, topic: str, batch: int, codec: pulsar.CompressionType
    ) -> None:
        super().__init__(daemon=True)
        self.confirmed = 0
        self._stop_asked = threading.Event()
        self._batch = batch
        self._producer = runtime.client().create_producer(
            topic,
            batching_enabled=batch > 1,
            batching_max_messages=max(batch, 2),
            compression_type=codec,
            block_if_queue_full=True,
            send_timeout_millis=0,
        )

    def run(self) -> None:
        number = 0
        while not self._stop_asked.is_set():
            for _ in range(self._batch):
                self._producer.send_async(
                    b"%d" % number * 10, self._count, partition_key=f"k{number % 97}"
                )
                number += 1
            time.sleep(0.05)
        self._producer.flush()
        self._producer.close()

    def stop(self) -> None:
        self._stop_asked.set()
        # A broker that was killed can take minutes until it loads a topic's last ledger again.
        self.join(timeout=400)
        assert not self.is_alive()

    def _count(self, result: pulsar.Result, _message_id: object) -> None:
        self.confirmed += result == pulsar.Result.Ok


def test_a_table_of_delta_sparks_writer_is_exact_after_kills_of_the_driver_and_restarts_of_the_broker(
    tmp_path: Path,
) -> None:
    kills, restarts = 12, 3
    seed = int(os.environ.get("LEDGERLAKE_SEED", "0")) or random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with start_runtime(broker_metadata=True) as runtime:
        topic = runtime.topic(partitions=4)
        # This writer takes seconds for each commit, so its batches are few.
        data = runtime.config(tmp_path, topic, name="kills", max_rows_per_trigger=100_000)
        data["delta"]["writer"] = "spark"
        config = config_file(tmp_path, data)
        publishers = [
            Publisher(runtime, topic, 200, pulsar.CompressionType.LZ4),
            Publisher(runtime, topic, 50, pulsar.CompressionType.ZSTD),
            Publisher(runtime, topic, 1, pulsar.CompressionType.NONE),
        ]
        with contextlib.ExitStack() as ending:
            for publisher in publishers:
                publisher.start()
                ending.callback(publisher.stop)
            _run_and_kill(runtime, tmp_path, config, kills, restarts, rng)
        last = ledgerlake_process("run", config, "--once", "--json")
        assert last.returncode == 0, last.stderr
        verified = ledgerlake("verify", config, "--json")
        verdict = json.loads(verified.stdout)
        print(verdict, f"{sum(publisher.confirmed for publisher in publishers)} confirmed")
        assert verified.returncode == 0
        assert verdict["messages"] >= sum(publisher.confirmed for publisher in publishers) > 0
        assert verdict["not_checked"] == 0


def _run_and_kill(
    runtime: Runtime, folder: Path, config: str, kills: int, restarts: int, rng: random.Random
) -> None:
    """Start the pipeline and end it by force, some while they start and most while they work; now
    and then the broker too.
    """
    assert runtime.broker is not None
    restart_at = set(rng.sample(range(kills), restarts))
    early = set(rng.sample(range(kills), kills // 3))
    checkpoint = folder / "checkpoint"
    for kill in range(kills):
        log = folder / f"run-{kill}.log"
        with open(log, "wb") as errors:
            running = subprocess.Popen(
                [sys.executable, "-m", "ledgerlake.cli", "run", config], stderr=errors
            )
        try:
            if kill in early:
                time.sleep(rng.uniform(4, 15))
            else:
                wait_for_commits(checkpoint, commits(checkpoint) + rng.randint(1, 2), running)
            if kill in restart_at:
                runtime.broker.kill()
                time.sleep(rng.uniform(0, 2))
                runtime.broker.start()
            time.sleep(rng.uniform(1, 5))
            _kill_a_worker(running.pid, rng)
            time.sleep(rng.uniform(0, 4))
            assert running.poll() is None, log.read_text()
        finally:
            running.send_signal(signal.SIGKILL)
            running.wait()


def _kill_a_worker(driver: int, rng: random.Random) -> None:
    """End one of Spark's Python workers, if there is one; the task that it was in is tried
    again.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        workers = [
            process
            for process in psutil.Process(driver).children(recursive=True)
            if is_worker(process)
        ]
        if workers:
            rng.choice(workers).kill()
