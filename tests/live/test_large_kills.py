"""Large messages over kills: the driver dies while twenty are half published, the broker too;
afterwards all are whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from tests.chunks import chunk_entries
from tests.live.pipelines import (
    config_file,
    ledgerlake,
    ledgerlake_process,
    publish_entries,
    small,
    table_rows,
)
from tests.live.runtime import commits, start_runtime, wait_for_commits

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.long]


def interleaved(rng: random.Random, chunk_sets: list[list[bytes]], stop_at: int) -> list[bytes]:
    """Entries of several messages in a random order that keeps each one's own, until so many are
    left.
    """
    entries = []
    while sum(map(len, chunk_sets)) > stop_at:
        entries.append(rng.choice([chunks for chunks in chunk_sets if chunks]).pop(0))
        if rng.random() < 0.3:
            entries.append(small(b"small"))
    return entries


@pytest.mark.parametrize("broker_restarts", [False, True], ids=["driver", "driver and broker"])
def test_messages_that_were_half_published_at_a_kill_are_whole_afterwards(
    tmp_path: Path, broker_restarts: bool
) -> None:
    seed = int(os.environ.get("LEDGERLAKE_SEED", "0")) or random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    kills = 5
    with start_runtime(broker_metadata=True) as runtime:
        assert runtime.broker is not None
        topic = runtime.topic()
        config = config_file(tmp_path, runtime.config(tmp_path, topic))
        checkpoint = tmp_path / "checkpoint"
        payloads = [rng.randbytes(rng.randint(500_000, 4_000_000)) for _ in range(20)]
        chunk_sets = [
            chunk_entries(
                payload, rng.randint(3, 8), uuid=f"p{number}-0", producer_name=f"p{number}"
            )
            for number, payload in enumerate(payloads)
        ]
        total = sum(map(len, chunk_sets))
        for kill in range(kills):
            half = interleaved(rng, chunk_sets, total - (kill + 1) * total // (kills + 1))
            publish_entries(runtime, topic, half[: len(half) // 2])
            with open(tmp_path / f"run-{kill}.log", "wb") as errors:
                running = subprocess.Popen(
                    [sys.executable, "-m", "ledgerlake.cli", "run", config], stderr=errors
                )
            try:
                wait_for_commits(checkpoint, commits(checkpoint) + 1, running)
                publish_entries(runtime, topic, half[len(half) // 2 :])
                time.sleep(rng.uniform(0, 1.5))
            finally:
                running.send_signal(signal.SIGKILL)
                running.wait()
            if broker_restarts:
                runtime.broker.kill()
                runtime.broker.start()
        listed = ledgerlake_process("state", config, "--json")
        assert 0 < len(json.loads(listed.stdout)["large"]) <= 20
        publish_entries(runtime, topic, interleaved(rng, chunk_sets, 0))
        last = ledgerlake_process("run", config, "--once")
        assert last.returncode == 0, last.stderr
        verified = ledgerlake("verify", config, "--json")
        assert verified.returncode == 0, verified.stdout
        digests = [
            hashlib.sha256(row["value"]).digest()
            for row in table_rows(tmp_path)
            if row["chunk_count"]
        ]
        assert sorted(digests) == sorted(hashlib.sha256(payload).digest() for payload in payloads)
        assert DeltaTable(str(tmp_path / "rejects")).to_pyarrow_table().num_rows == 0
