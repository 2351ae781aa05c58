"""A campaign against a broker as users have it: retention 0, ledgers that roll and are trimmed,
deduplication, idle topics deleted.

Producers of pulsar-client publish plain, batched, compressed, chunked and delayed messages without
pause while the topics are unloaded every second or two. The pipeline is killed and stopped at
random; then ``oracle`` judges.

    python -m tests.live.campaign --kills 200 --stops 50 --folder /tmp/campaign --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pulsar

from tests.live import forked
from tests.live.oracle import Confirmed, StoredTable, Verdict, judge, judge_topic
from tests.live.runtime import Runtime, commits, start_runtime, to_toml
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LARGE_BYTES = 6 * 1024 * 1024
_TRIES, _START_AGAIN = 4, 3
_COMMITS_UNTIL_MERGE = 100
# In turn. A broker takes up to two minutes until its topics can be read again.
_KINDS_OF_KILL = (
    "driver",
    "worker",
    "broker",
    "jvm",
    "planner",
    "start",
    "worker",
    "jvm",
    "driver",
    "worker",
    "start",
)


# Unloads have producers send again. The broker's own cursor for that pins ledgers too, until it has
# taken a snapshot.
DEDUPLICATION = {
    "brokerDeduplicationEnabled": "true",
    "brokerDeduplicationEntriesInterval": "100",
    "brokerDeduplicationSnapshotIntervalSeconds": "2",
    "brokerDeduplicationSnapshotFrequencyInSeconds": "2",
}


@contextlib.contextmanager
def default_broker(*, broker_metadata: bool = True) -> Iterator[Runtime]:
    """A broker with Pulsar's own defaults, and deduplication."""
    with start_runtime(
        DEDUPLICATION, keeps_everything=False, broker_metadata=broker_metadata
    ) as runtime:
        yield runtime


class Feeder(threading.Thread):
    """One producer that never pauses for long; counts only what the broker confirmed.

    ``begun`` is set when each partition has a message of it. If a client reconnects while its first
    message is on its way, it gives the next message the same sequence id, and a broker with
    deduplication confirms that one without storing it whole (``handleCreateProducer`` of
    pulsar-client-cpp). So nothing may be unloaded before.

    Args:
        undisturbed: held while the chunks of a message are on their way. Chunks share a sequence
            id, so a broker with deduplication stores some of those that are sent again and drops
            others, and the client is told that all are stored (see apache/pulsar#20948).
    """

    def __init__(
        self,
        runtime: Runtime,
        topic: str,
        name: str,
        confirmed: Confirmed,
        make: Callable[..., Any],
        undisturbed: threading.Lock,
    ) -> None:
        super().__init__(daemon=True, name=name)
        self.confirmed = confirmed
        self._make = make
        self._undisturbed = undisturbed
        self._reached: set[int] = set()
        self.begun, self._ended = threading.Event(), threading.Event()
        self._client = runtime.client()
        self._topic = topic

    def run(self) -> None:
        settings, messages, pause_s = self._make(random.Random(self.name))
        in_chunks = settings.get("chunking_enabled", False)
        producer = self._client.create_producer(
            self._topic,
            producer_name=self.name,
            block_if_queue_full=True,
            send_timeout_millis=0,
            **settings,
        )
        names = self._client.get_topic_partitions(self._topic)
        partitions = set(range(len(names))) if len(names) > 1 else {-1}
        number = 0
        while not self._ended.is_set():
            with self._undisturbed if in_chunks else contextlib.nullcontext():
                for body, delay_ms in messages():
                    due_ms = int(time.time() * 1000) + delay_ms if delay_ms else 0
                    payload = b"%s|%d|%d|%s" % (self.name.encode(), number, due_ms, body)
                    delivery_options = {"deliver_at": due_ms} if due_ms else {}
                    producer.send_async(payload, self._counted(payload, due_ms), **delivery_options)
                    number += 1
                if in_chunks or not self.begun.is_set():
                    producer.flush()
            if self._reached >= partitions:
                self.begun.set()
                self._ended.wait(pause_s)
        producer.flush()
        producer.close()

    def end(self) -> None:
        self._ended.set()

    def _counted(self, payload: bytes, due_ms: int) -> Callable[[Any, Any], None]:
        def stored(result: Any, message_id: Any) -> None:
            if result == pulsar.Result.Ok:
                self._reached.add(message_id.partition())
                self.confirmed.add(payload, message_id, due_ms)

        return stored


def batched(
    rng: random.Random,
) -> tuple[dict[str, Any], Callable[[], list[tuple[bytes, int]]], float]:
    settings = {
        "batching_enabled": True,
        "batching_max_messages": 100,
        "compression_type": rng.choice([pulsar.CompressionType.LZ4, pulsar.CompressionType.ZSTD]),
    }
    return settings, lambda: [(b"x" * rng.randint(1, 200), 0) for _ in range(100)], 0.3


def single(
    rng: random.Random,
) -> tuple[dict[str, Any], Callable[[], list[tuple[bytes, int]]], float]:
    return (
        {"batching_enabled": False},
        lambda: [(b"y" * rng.randint(1, 1000), 0) for _ in range(5)],
        0.2,
    )


def delayed(
    rng: random.Random,
) -> tuple[dict[str, Any], Callable[[], list[tuple[bytes, int]]], float]:
    return (
        {"batching_enabled": False},
        lambda: [(b"later", rng.randint(1, 15_000)) for _ in range(10)],
        0.2,
    )


def chunked(
    rng: random.Random,
) -> tuple[dict[str, Any], Callable[[], list[tuple[bytes, int]]], float]:
    settings = {"batching_enabled": False, "chunking_enabled": True}
    return settings, lambda: [(rng.randbytes(LARGE_BYTES), 0 if rng.random() < 0.8 else 3000)], 3.0


class Unloader(threading.Thread):
    """Unloads every topic each second or two, so that its ledger rolls and the old one may be
    trimmed. On a slow machine it is at work a quarter of the time, so that topics can be read.
    """

    def __init__(
        self, runtime: Runtime, topics: list[str], rng: random.Random, undisturbed: threading.Lock
    ) -> None:
        super().__init__(daemon=True)
        self._undisturbed = undisturbed
        self.first: dict[str, int] = {}
        self.trimmed: Counter[str] = Counter()
        self._runtime, self._topics, self._rng = runtime, topics, rng
        self._ended = threading.Event()

    def run(self) -> None:
        took_s = 0.0
        while not self._ended.wait(self._rng.uniform(1, 2) + 3 * took_s):
            began_s = time.monotonic()
            for topic in self._topics:
                # The broker may be down, or busy with the unload before.
                with contextlib.suppress(OSError, urllib.error.URLError, ValueError):
                    with self._undisturbed:
                        self._runtime.admin("PUT", topic, "/unload")
                    self.look(topic)
            took_s = time.monotonic() - began_s

    def look(self, topic: str) -> None:
        """See whether the ledger that was the first one is gone."""
        ledgers = self._runtime.admin("GET", topic, "/internalStats")["ledgers"]
        first = ledgers[0]["ledgerId"] if ledgers else None
        if first is not None and self.first.setdefault(topic, first) < first:
            self.trimmed[topic] += 1
            self.first[topic] = first

    def end(self) -> None:
        self._ended.set()
        self.join()


@dataclass
class PipelineProcess:
    """A pipeline in a process of its own, which is killed and started again."""

    runtime: Runtime
    folder: Path
    rng: random.Random
    name: str = "campaign"
    log: list[str] = field(default_factory=list)
    look_every_s: float = 0.002
    topics: list[str] = field(default_factory=list)
    _running: subprocess.Popen[bytes] | None = None
    _undisturbed: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config = str(self.folder / "pipeline.toml")
        self.table = self.folder / "messages"

    @contextlib.contextmanager
    def process(self) -> Iterator[subprocess.Popen[bytes]]:
        """The pipeline's process: the one that runs, else a new one. It stays unless the block
        fails or ends it.
        """
        if self._running is None:
            self._running = self.start()
        try:
            yield self._running
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End the pipeline's process by force, if there is one."""
        if self._running is not None:
            end_group(self._running)
            self._running = None

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start the pipeline with options of its command; ``last_log`` is what it wrote."""
        number = len(list(self.folder.glob("run-*.log")))
        command = [sys.executable, "-m", "ledgerlake.cli", "run", self.config, *options]
        environment = os.environ | {"PYTHONFAULTHANDLER": "1"}
        return self.spawn(command, environment, self.folder / f"run-{number:03d}.log")

    def spawn(
        self, command: list[str], environment: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a process that leads a session; its output goes to ``log``."""
        with open(log, "wb") as output:
            return subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def commits(self) -> int:
        return len(list((self.table / "_delta_log").glob("*.json")))

    @property
    def is_between_commits(self) -> bool:
        """Whether the table has a micro-batch that Spark has not recorded as done."""
        for path in sorted((self.table / "_delta_log").glob("*.json"), reverse=True):
            for action in map(json.loads, path.read_text().splitlines()):
                if "txn" in action:
                    return int(action["txn"]["version"]) >= commits(self.folder / "checkpoint")
        return False

    def await_commits(self, count: int, running: subprocess.Popen[bytes]) -> None:
        """Wait for some more commits of the table, looking often, since what follows aims at the
        moment behind one.
        """
        aim = self.commits() + count
        deadline = time.monotonic() + 600
        while self.commits() < aim:
            assert running.poll() is None, self.last_log()
            if time.monotonic() > deadline:
                # Python's handler of faults prints the stacks of all threads.
                running.send_signal(signal.SIGABRT)
                running.wait()
                raise AssertionError(f"no commit came: {self.last_log(20_000)}")
            time.sleep(self.look_every_s)

    def stored(self, name: str) -> StoredTable:
        """One of the tables, as the oracle reads it."""
        return StoredTable(str(self.folder / name))

    def last_log(self, characters: int = 3000) -> str:
        return sorted(self.folder.glob("run-*.log"))[-1].read_text()[-characters:]

    def restart_broker(self) -> None:
        """Kill the broker, and start it again."""
        assert self.runtime.broker is not None
        with self._undisturbed:
            self.runtime.broker.kill()
        time.sleep(self.rng.uniform(0, 2))
        self.runtime.broker.start()

    def open_cursors(self) -> None:
        """Start the pipeline, and return when it has its cursors: retention 0 keeps nothing that
        was published before. The broker deletes a topic after a minute without producers and
        cursors.
        """
        producers = [self.runtime.client().create_producer(topic) for topic in self.topics]
        with self.process() as running:
            wait_until(
                lambda: (
                    running.poll() is not None
                    or all(self._has_cursor(topic) for topic in self.topics)
                )
            )
            assert running.poll() is None, self.last_log()
        for producer in producers:
            producer.close()

    def _has_cursor(self, topic: str) -> bool:
        return (
            f"ledgerlake-{self.name}" in self.runtime.admin("GET", topic, "/stats")["subscriptions"]
        )

    def settle(self, due_ms: int) -> None:
        """Run to the end of the topic, when the last delayed message is due."""
        time.sleep(max(0, due_ms / 1000 - time.time()))
        code = self._run_once()
        for _ in range(_TRIES):
            # A broker that was killed can take minutes until it loads a topic's last ledger again.
            if code != _START_AGAIN:
                break
            code = self._run_once()
        assert code == 0, self.last_log()

    def _run_once(self) -> int:
        running = self.start("--once", "--json")
        try:
            return running.wait(timeout=600)
        finally:
            end_group(running)

    def backlog(self) -> dict[str, int]:
        """What the broker says is unread."""
        return {
            topic: self.runtime.admin("GET", topic, "/stats?getPreciseBacklog=true")[
                "subscriptions"
            ][f"ledgerlake-{self.name}"]["msgBacklog"]
            for topic in self.topics
        }


@dataclass
class Campaign(PipelineProcess):
    """One topic of two partitions and one without, a stream over both, everything that is done to
    it.
    """

    kinds: tuple[Callable[..., Any], ...] = (batched, single, delayed, chunked)
    confirmed: Confirmed = field(default_factory=Confirmed)
    received: list[tuple[bytes, int]] = field(default_factory=list)
    copies: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.single = f"persistent://public/default/{self.name}-one"
        self.parted = f"persistent://public/default/{self.name}-two"
        self.due = f"persistent://public/default/{self.name}-due"
        self.runtime.admin("PUT", self.single)
        self.runtime.admin("PUT", self.parted, "/partitions", 2)
        self.runtime.admin("PUT", self.due)
        self.topics = [self.single, *(f"{self.parted}-partition-{number}" for number in range(2))]
        self.data = self.runtime.config(self.folder, self.single, self.parted, name=self.name)
        self.data["deliver"] = {"topic": self.due}
        self.data["upkeep"] = {"interval": "1 second", "busy_percent": 30}
        Path(self.config).write_text(to_toml(self.data))
        # Retention 0 would take due messages before anybody has read them.
        self._due_consumer = self.runtime.client().subscribe(
            self.due, "oracle", initial_position=pulsar.InitialPosition.Earliest
        )

    @contextlib.contextmanager
    def fed(self) -> Iterator[None]:
        """Publish and unload while the block runs."""
        feeders = [
            Feeder(
                self.runtime,
                topic,
                f"{kind.__name__}-{number}",
                self.confirmed,
                kind,
                self._undisturbed,
            )
            for number, topic in enumerate((self.single, self.parted))
            for kind in self.kinds
        ]
        unloader = Unloader(
            self.runtime, self.topics, random.Random(self.rng.random()), self._undisturbed
        )
        for feeder in feeders:
            feeder.start()
        for feeder in feeders:
            assert feeder.begun.wait(timeout=60), f"{feeder.name} publishes nothing"
        unloader.start()
        try:
            yield
        finally:
            for feeder in feeders:
                feeder.end()
            unloader.end()
            for feeder in feeders:
                # A broker that was killed can take minutes until it loads a topic's last ledger
                # again.
                feeder.join(timeout=400)
                assert not feeder.is_alive(), f"{feeder.name} is still publishing"
            self.trimmed = unloader.trimmed

    def kill(self, kind: str, *, behind_commit: bool) -> None:
        """Let the pipeline run for a while and end it, or a part of it, by force; a broker or a
        worker comes back beneath it.
        """
        if kind == "start":
            self._kill_start()
            return
        with self.process() as running:
            self.await_commits(self.rng.randint(1, 6), running)
            time.sleep(self.rng.uniform(0, 0.1) if behind_commit else self.rng.uniform(0, 2))
            self.log.append(f"{kind}{' behind a commit' if behind_commit else ''}")
            if kind == "broker":
                self.restart_broker()
                self.await_commits(1, running)
            elif kind == "worker":
                _kill_one(running.pid, self.rng, forked.is_task_worker)
                self.await_commits(1, running)
            elif kind == "planner":
                _kill_one(running.pid, self.rng, forked.is_stream_planner)
                assert running.wait(timeout=120) == _START_AGAIN, self.last_log()
                self._running = None
            else:
                if kind == "jvm":
                    _kill_one(running.pid, self.rng, _is_jvm)
                self.end()

    def _kill_start(self) -> None:
        """End the pipeline while it starts, or soon after that."""
        self.end()
        self.log.append("start")
        with self.process():
            time.sleep(self.rng.uniform(2, 20))
            self.end()

    def stop(self, signal_number: int) -> None:
        """Let the pipeline run for a while and stop it as a person or a pod does."""
        with self.process() as running:
            self.await_commits(self.rng.randint(1, 6), running)
            time.sleep(self.rng.uniform(0, 1.5))
            self.log.append(signal.Signals(signal_number).name)
            running.send_signal(signal_number)
            code = running.wait(timeout=120)
            assert code == 0, self.last_log()
            self._running = None

    def take_over(self, kind: str) -> None:
        """Start a second process beside a running one, which then stops, dies, or is suspended
        until its successor has committed.
        """
        with self.process() as older:
            self.await_commits(self.rng.randint(1, 4), older)
            self.log.append(f"take over from one that is {kind}")
            if kind == "suspended":
                _signal_tree(older.pid, signal.SIGSTOP)
            younger = self.start()
            try:
                if kind == "suspended":
                    self.await_commits(self.rng.randint(1, 3), younger)
                    _signal_tree(older.pid, signal.SIGCONT)
                    # It finds out at its next look at the broker, at the latest by its next commit.
                    assert older.wait(timeout=240) != 0, (
                        "the older process went on beside its successor"
                    )
                    assert younger.poll() is None, self.last_log()
                else:
                    time.sleep(self.rng.uniform(0, 20))
                    assert older.poll() is None, "the younger process ended the older one"
                    if kind == "stopped":
                        older.send_signal(signal.SIGTERM)
                        assert older.wait(timeout=120) == 0
                    else:
                        end_group(older)
                    self.await_commits(self.rng.randint(1, 3), younger)
            except BaseException:
                end_group(younger)
                raise
            end_group(older)
            self._running = younger

    def copy_checkpoint(self) -> None:
        """Copy the checkpoint file by file while the pipeline runs, as a backup does that knows
        nothing of it.
        """
        with self.process() as running:
            self.await_commits(self.rng.randint(1, 3), running)
            time.sleep(self.rng.uniform(0, 1))
            self.log.append("copy of the checkpoint")
            copy_files(self.folder / "checkpoint", self.folder / f"copy-{len(self.copies)}")
            self.copies.append(self.folder / f"copy-{len(self.copies)}")
            self.await_commits(1, running)

    def restore(self, copy: Path) -> str:
        """Put a copy in the checkpoint's place and run once; return how that ended."""
        shutil.rmtree(self.folder / "checkpoint")
        shutil.copytree(copy, self.folder / "checkpoint")
        before = self.commits()
        if self._run_once() == 0:
            return "went on"
        assert self.commits() == before, f"refused, and the table changed: {self.last_log()}"
        sentences = [
            line for line in self.last_log().splitlines() if line.startswith("ledgerlake: ")
        ]
        assert len(sentences) == 1, self.last_log()
        return sentences[0]

    def judge_table(self) -> Verdict:
        """What the oracle says of the table."""
        return judge(self.confirmed, self.stored("messages"), self.stored("rejects"))

    def judge_due(self) -> Verdict:
        """What the oracle says of the topic of due messages."""
        with contextlib.suppress(pulsar.Timeout):
            while True:
                message = self._due_consumer.receive(3000)
                self.received.append((message.data(), message.publish_timestamp()))
                self._due_consumer.acknowledge(message)
        return judge_topic(self.confirmed, self.received)

    def play(self, actions: list[Callable[[], None]], say: Callable[[str], None]) -> None:
        """Carry out the actions one after another while messages come, and run to the end
        of them.
        """
        self.open_cursors()
        with self.fed():
            began_s = time.monotonic()
            try:
                for number, action in enumerate(actions, 1):
                    action()
                    done = (
                        f"{number}/{len(actions)} {self.log[-1]}, {len(self.confirmed):,} confirmed"
                    )
                    say(f"{time.monotonic() - began_s:.0f} s: {done}")
                self.await_merge()
            finally:
                self.end()
        self.settle(max((sent.due_ms for sent in self.confirmed.messages.values()), default=0))

    def await_merge(self) -> None:
        """Let the pipeline run until its upkeep has merged files: on a slow machine, each process
        before may have been ended too early for that.
        """
        with self.process() as running:
            for _ in range(_COMMITS_UNTIL_MERGE):
                if self.stored("messages").merges():
                    return
                self.await_commits(1, running)

    def faults(self, say: Callable[[str], None]) -> list[str]:
        """What must not be, of the table, the topic of due messages, and what the broker
        has kept.
        """
        table, topic = self.judge_table(), self.judge_due()
        backlog = self.backlog()
        say(f"table: {table}\ntopic: {topic}\nbacklog: {backlog}\ntrimmed: {dict(self.trimmed)}")
        faults = [] if table.is_clean else [f"table: {table}"]
        faults += [] if table.merges else ["upkeep merged nothing"]
        faults += [] if topic.is_clean else [f"topic: {topic}"]
        faults += [f"backlog {count} on {name}" for name, count in backlog.items() if count]
        return faults + [
            f"no ledger of {name} was trimmed" for name in self.topics if not self.trimmed[name]
        ]


def end_group(running: subprocess.Popen[bytes]) -> None:
    """End a pipeline and all that it started."""
    processes = []
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = psutil.Process(running.pid).children(recursive=True)
    kill_all(running, processes)


def kill_all(running: subprocess.Popen[bytes], below: list[psutil.Process]) -> None:
    """Kill a pipeline and the processes below it, which were listed before, because listing them
    takes longer than Spark takes to record a micro-batch.
    """
    running.kill()
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    running.wait()


def _signal_tree(pid: int, number: int) -> None:
    """Signal a process and all that it started."""
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def copy_files(source: Path, target: Path) -> None:
    """Copy a folder whose files come and go meanwhile."""
    for path in sorted(source.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / path.relative_to(source))


def _kill_one(driver: int, rng: random.Random, is_wanted: Callable[[psutil.Process], bool]) -> None:
    below = psutil.Process(driver).children(recursive=True)
    candidates = [process for process in below if is_wanted(process)]
    if candidates:
        rng.choice(candidates).kill()


def _is_jvm(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name() == "java"
    return False


def run_campaign(
    campaign: Campaign,
    kills: int,
    stops: int,
    takeovers: int = 0,
    copies: int = 0,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Kill and stop the pipeline so often, take it over, copy its checkpoint; return what must not
    be.
    """
    actions: list[Callable[[], None]] = []
    for number in range(kills):
        kind = _KINDS_OF_KILL[number % len(_KINDS_OF_KILL)]
        behind = number % 3 == 0
        actions.append(lambda kind=kind, behind=behind: campaign.kill(kind, behind_commit=behind))  # type: ignore[misc]
    actions += [
        (lambda number=number: campaign.stop((signal.SIGINT, signal.SIGTERM)[number % 2]))  # type: ignore[misc]
        for number in range(stops)
    ]
    actions += [
        (lambda number=number: campaign.take_over(("stopped", "killed", "suspended")[number % 3]))  # type: ignore[misc]
        for number in range(takeovers)
    ]
    actions += [campaign.copy_checkpoint] * copies
    campaign.rng.shuffle(actions)
    campaign.play(actions, say)
    for copy in campaign.copies:
        say(f"restored {copy.name}: {campaign.restore(copy)}")
    return campaign.faults(say)


def begin(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options of a campaign's command, with its seed and its folder, and say these."""
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    options.folder = options.folder or Path(tempfile.mkdtemp(prefix="campaign-"))
    # So that a campaign that is ended takes its pipeline and its broker with it.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    say_at_once(f"seed {options.seed}, folder {options.folder}")
    return options


def say_at_once(line: str) -> None:
    print(line, flush=True)


def finish(campaign: Campaign, seed: int, faults: list[str]) -> int:
    """Say what a campaign did and found; return the exit code."""
    print(json.dumps({"seed": seed, "log": Counter(campaign.log), "faults": faults}))
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument(
        "--takeovers", type=int, default=0, help="starts of a second process beside a running one"
    )
    parser.add_argument(
        "--copies", type=int, default=0, help="copies of the checkpoint, each restored at the end"
    )
    options = begin(parser)
    with default_broker() as runtime:
        campaign = Campaign(runtime, options.folder, random.Random(options.seed))
        faults = run_campaign(
            campaign,
            options.kills,
            options.stops,
            options.takeovers,
            options.copies,
            say_at_once,
        )
    return finish(campaign, options.seed, faults)


if __name__ == "__main__":
    sys.exit(main())
