"""Delayed messages that are due together, over kills just behind the table's commit.

In each round pulsar-client sends very many delayed messages to a new topic, all due within a second
or a few. The pipeline is killed with all its processes within 200 ms after its first commit that
has rows, in some rounds once more at a later commit, and started until all is there. More messages
are due than a micro-batch releases, so a micro-batch that is run again shows whether it releases
the messages that the first run had released. ``oracle`` compares what the broker had confirmed with
the tables, and with what a consumer of pulsar-client got from the topic of due messages.

A round's settings follow from its seed; the rounds of a campaign have consecutive seeds. Round 7
alone, with its files:

    python -m tests.live.due_campaign --rounds 1 --seed 7 --folder /tmp/round-7
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pulsar

from tests.live.campaign import PipelineProcess, begin, default_broker, kill_all, say_at_once
from tests.live.oracle import Confirmed, Verdict, judge, judge_topic
from tests.live.runtime import to_toml

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from tests.live.runtime import Runtime

_MOST_DELAY_OF_KILL_S = 0.2
_KEYS = 499
_SENT_A_SECOND = 8_000
_LIMIT_S = 240
_QUIET_S = 60
_MOST_CANCELS = 5


@dataclass(frozen=True)
class Settings:
    """What a round does.

    Args:
        is_once: whether ``run --once`` is repeated until it ends by itself, or a stream runs.
        delivers: whether due messages are published to a topic as well.
        partitions: 0 for a topic without partitions.
        spread_ms: within which time all messages of the first burst are due.
        more: messages of a second burst, sent when the pipeline was killed.
        cancels: keys whose messages of the first burst are cancelled; none if no message has a key.
        kills: one or two.
        unloads: whether ledgers are rolled behind each kill, so that the broker trims them.
    """

    seed: int
    broker_metadata: bool
    is_once: bool
    delivers: bool
    partitions: int
    messages: int
    spread_ms: int
    more: int
    cancels: int | None
    kills: int
    unloads: bool

    @classmethod
    def of(cls, seed: int) -> Settings:
        """Return the settings of a round; every combination of the flags comes in eight rounds."""
        rng = random.Random(seed)
        return cls(
            seed,
            broker_metadata=seed % 2 == 1,
            is_once=seed // 2 % 2 == 0,
            delivers=seed // 4 % 2 == 0,
            # A micro-batch releases 50,000 messages of a topic partition.
            partitions=rng.choices((0, 1, 2, 4), (3, 3, 2, 1))[0],
            messages=rng.choice((rng.randint(20_000, 60_000), rng.randint(80_000, 100_000))),
            spread_ms=rng.choice((0, 1_000, 1_000, 5_000)),
            more=rng.choice((0, rng.randint(500, 10_000))),
            cancels=rng.choice((None, None, rng.randint(1, _MOST_CANCELS))),
            kills=rng.choice((1, 1, 2)),
            unloads=rng.random() < 0.5,
        )


class Round(PipelineProcess):
    """A topic, its pipeline, and the topic of due messages."""

    def __init__(self, runtime: Runtime, folder: Path, settings: Settings) -> None:
        super().__init__(runtime, folder, random.Random(settings.seed), f"due-{settings.seed}")
        self.settings, self.confirmed, self.cancelled = settings, Confirmed(), 0
        self.received: list[tuple[bytes, int]] = []
        self.last_due_ms, self.rows, self.between = 0, 0, 0
        self._read: set[Path] = set()
        prefix = f"persistent://{runtime.namespace}/{self.name}"
        self.topic, due = f"{prefix}-in", f"{prefix}-out"
        runtime.admin("PUT", due)
        if settings.partitions:
            runtime.admin("PUT", self.topic, "/partitions", settings.partitions)
        else:
            runtime.admin("PUT", self.topic)
        data = runtime.config(folder, self.topic, name=self.name)
        if settings.delivers:
            data["deliver"] = {"topic": due}
        Path(self.config).write_text(to_toml(data))
        client = runtime.client()
        # Retention 0 would take due messages before anybody has read them.
        earliest = pulsar.InitialPosition.Earliest
        self._consumer = client.subscribe(due, "oracle", initial_position=earliest)
        # The broker deletes a topic after a minute without producers and cursors.
        self._producer = client.create_producer(
            self.topic, batching_enabled=False, block_if_queue_full=True, send_timeout_millis=0
        )

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start the pipeline as the round's settings say, unless there are options."""
        return super().start(*(options or (("--once",) if self.settings.is_once else ())))

    def play(self) -> tuple[Verdict, Verdict | None]:
        """Carry out the round; return what the oracle says of the table and of the topic."""
        settings = self.settings
        try:
            if not settings.is_once:
                # A stream has the messages in its state when they are due.
                with self.process():
                    pass
            self.send("first", settings.messages, settings.spread_ms)
            self.cancel(settings.cancels or 0)
            for kill in range(settings.kills):
                if settings.is_once:
                    time.sleep(max(0, self.last_due_ms / 1000 - time.time()))
                self.kill_behind_rows()
                if settings.unloads:
                    self.runtime.admin("PUT", self.topic, "/unload")
                if kill == 0 and settings.more:
                    self.send("more", settings.more, 1_000)
            if not settings.is_once:
                self.run_until_all()
            self.settle(self.last_due_ms)
            self.receive(3_000)
        finally:
            self.end()
            self._producer.close()
            self._consumer.close()
        table = judge(self.confirmed, self.stored("messages"), self.stored("rejects"))
        return table, judge_topic(self.confirmed, self.received) if settings.delivers else None

    def send(self, name: str, count: int, spread_ms: int) -> None:
        """Send delayed messages, and return when all are confirmed, on most machines before they
        are due.
        """
        due_ms = int(time.time() * 1000) + 4_000 + count * 1000 // _SENT_A_SECOND
        before = len(self.confirmed)
        for number in range(count):
            one_ms = due_ms + self.rng.randint(0, spread_ms)
            body = self.rng.randbytes(self.rng.randint(80, 1_000))
            payload = b"%s|%d|%d|%s" % (name.encode(), number, one_ms, body)
            self._send(payload, number % _KEYS, one_ms)
        self._producer.flush()
        confirmed = len(self.confirmed) - before
        assert confirmed == count, f"{count} sent, {confirmed} confirmed"
        self.last_due_ms = due_ms + spread_ms

    def _send(self, payload: bytes, key: int, due_ms: int = 0, **options: Any) -> None:
        def stored(result: Any, message_id: Any) -> None:
            if result == pulsar.Result.Ok:
                self.confirmed.add(payload, message_id, due_ms)

        if due_ms:
            options["deliver_at"] = due_ms
        if self.settings.cancels is not None:
            options["partition_key"] = f"k{key}"
        self._producer.send_async(payload, stored, **options)

    def cancel(self, keys: int) -> None:
        """Cancel the messages of some keys, if these are not due too soon."""
        if time.time() * 1000 > self.last_due_ms - self.settings.spread_ms - 1_000:
            return
        for key in range(keys):
            self._send(b"cancel|%d|0|" % key, key, properties={"ledgerlake.cancel": f"key=k{key}"})
        self._producer.flush()
        names = [name for name, sent in self.confirmed.messages.items() if sent.due_ms]
        gone = [name for name in names if int(name.split("|")[1]) % _KEYS < keys]
        for name in gone:
            del self.confirmed.messages[name]
        self.cancelled = len(gone)

    def kill_behind_rows(self) -> None:
        """Kill the pipeline just after its next commit that has rows, if there is one."""
        self.new_rows()
        with self.process() as running:
            self._kill_behind_rows(running)
        self.end()

    def _kill_behind_rows(self, running: subprocess.Popen[bytes]) -> None:
        deadline_s, listed_s = time.monotonic() + _LIMIT_S, 0.0
        below: list[psutil.Process] = []
        # Cancels are rows, too, and come before the due messages.
        while self.new_rows() <= _MOST_CANCELS:
            is_all_there = self.rows >= len(self.confirmed) and not self.settings.is_once
            if is_all_there or running.poll() == 0:
                break
            assert running.poll() is None, self.last_log()
            assert time.monotonic() < deadline_s, f"no commit has rows: {self.last_log()}"
            if time.monotonic() > listed_s + 1:
                below = psutil.Process(running.pid).children(recursive=True)
                listed_s = time.monotonic()
            time.sleep(self.look_every_s)
        else:
            # Half of the kills come at once: Spark soon records the micro-batch.
            time.sleep(self.rng.choice((0.0, self.rng.uniform(0, _MOST_DELAY_OF_KILL_S))))
            kill_all(running, below)
            self.log.append("kill")
            self.between += self.is_between_commits

    def run_until_all(self) -> None:
        """Stop the pipeline when all is there, or when nothing more has come for a while."""
        due = sum(sent.due_ms > 0 for sent in self.confirmed.messages.values())
        wanted = (len(self.confirmed), self.cancelled, due if self.settings.delivers else 0)
        before, changed_s = None, time.monotonic()
        with self.process():
            pass
        while time.monotonic() < changed_s + _QUIET_S:
            self.new_rows()
            self.receive(50)
            now = (self.rows, self.rejects(), len(self.received))
            if all(there >= count for there, count in zip(now, wanted, strict=True)):
                break
            if now != before:
                before, changed_s = now, time.monotonic()
        with self.process() as running:
            running.send_signal(signal.SIGTERM)
            # If all was there before, it may have begun so little that it handles no signal yet.
            assert running.wait(timeout=_LIMIT_S) in (0, -signal.SIGTERM), self.last_log()

    def new_rows(self) -> int:
        """Return how many rows the commits have that were not looked at."""
        paths = set((self.table / "_delta_log").glob("*.json"))
        lines = [line for path in paths - self._read for line in path.read_text().splitlines()]
        added = [json.loads(line).get("add", {}) for line in lines]
        new = [json.loads(add["stats"])["numRecords"] for add in added if add.get("dataChange")]
        self._read = paths
        self.rows += sum(new)
        return sum(new)

    def rejects(self) -> int:
        """Return how many rejects there are."""
        stored = self.stored("rejects")
        if not stored.exists:
            return 0
        return int(stored.delta_table().to_pyarrow_table(columns=["reason"]).num_rows)

    def receive(self, wait_ms: int) -> None:
        """Take the messages on the topic of due messages."""
        with contextlib.suppress(pulsar.Timeout):
            while True:
                message = self._consumer.receive(wait_ms)
                self._consumer.acknowledge(message)
                self.received.append((message.data(), message.publish_timestamp()))

    def faults(self, table: Verdict, topic: Verdict | None) -> list[str]:
        """Return the faults."""
        faults = [
            f"{name}: {verdict}"
            for name, verdict in (("table", table), ("topic", topic))
            if verdict is not None and not (verdict.is_clean and verdict.rows == verdict.confirmed)
        ]
        if table.rejects != Counter({"cancelled": self.cancelled} if self.cancelled else {}):
            faults.append(f"rejects {dict(table.rejects)} after {self.cancelled} cancels")
        return faults


def run_round(
    runtime: Runtime, folder: Path, settings: Settings, say: Callable[[str], None]
) -> tuple[Counter[str], list[str]]:
    """Play a round and say its line; return its counts and its faults."""
    began_s = time.monotonic()
    one = Round(runtime, folder, settings)
    counts = Counter(rounds=1)
    try:
        table, topic = one.play()
        faults = one.faults(table, topic)
        on_topic = topic.rows if topic else 0
        counts.update(confirmed=table.confirmed, rows=table.rows, on_topic=on_topic)
    except Exception as error:
        faults = [f"the round did not end: {error!r}"]
    counts.update(kills=len(one.log), before_spark=one.between, cancelled=one.cancelled)
    counts.update(faults=bool(faults))
    took_s, verdict = time.monotonic() - began_s, "; ".join(faults) or "clean"
    say(f"{json.dumps(asdict(settings))} {dict(counts)} {took_s:.0f} s: {verdict}")
    if not faults:
        shutil.rmtree(folder)
    return counts, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    options = begin(parser)
    totals: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        runtimes: dict[bool, Runtime] = {}
        for seed in range(options.seed, options.seed + options.rounds):
            settings = Settings.of(seed)
            kind = settings.broker_metadata
            if kind not in runtimes:
                runtimes[kind] = stack.enter_context(default_broker(broker_metadata=kind))
            folder = options.folder / f"round-{seed}"
            counts, _ = run_round(runtimes[kind], folder, settings, say_at_once)
            totals += counts
    say_at_once(f"seed {options.seed}: {json.dumps(totals)}")
    return 1 if totals["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
