"""Schedules by id on a broker that trims, over kills of the pipeline and a restart of the broker.

pulsar-client of Python and of Go send messages with an id. Some are moved earlier or later or to
now, some are cancelled, many of both while they are due. Others repeat: by cron expressions and
intervals, with an end, a count, a zone or jitter; some of them are replaced, and some are paused
and resumed. The pipeline is killed at random moments and between the commit of the table and
Spark's record of the micro-batch. All messages of an id go to one topic partition.

A consumer of pulsar-client reads the topic while it is written, since the broker keeps nothing that
was consumed. ``schedules_oracle`` compares what it read, and what the producers had confirmed, with
the tables, and with what a consumer reads from the topic of due messages.

    python -m tests.live.schedules_campaign --schedules 100000 --go 1000 --kills 5 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pulsar

from tests.live.campaign import PipelineProcess, begin, default_broker, kill_all, say_at_once
from tests.live.pipelines import ledgerlake_process
from tests.live.runtime import to_toml
from tests.live.schedules_oracle import (
    Delivered,
    Message,
    Rule,
    Stored,
    expect,
    judge,
    number_of,
    to_delivered,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.live.runtime import Runtime

PARTITIONS = 3
_GO_SOURCE = Path(__file__).parent / "go_schedules"
# Of a hundred schedules, how many repeat by cron each second, and by other rules.
_MOST_CRONS, _MOST_OTHERS = 100, 100
# So few kills are a short campaign, without a restart of the broker, which takes minutes.
_KILLS_WITH_BROKER = 3
# The last due messages are delivered before the pipeline ends.
_LAST_S = 5.0
# No message of the topic comes later than this after the one before.
_READ_S = 30.0
WITHOUT_GO = "Go is not installed, so no message is sent by its client"
_LIMIT_S = 600


@dataclass(frozen=True)
class Planned:
    """A message and when it is sent, in milliseconds since the campaign began; the delivery time of
    the message and the ends of its rule count from there, too.
    """

    at_ms: int
    message: Message
    properties: dict[str, str]
    by: str = "python"


class Plan:
    """The messages to send, by a random generator.

    Schedules are put in the first quarter of the span and are due in the rest. A few repeat until
    ``last`` is sent, so that the pipeline has something to commit for as long as it is killed.
    """

    def __init__(self, rng: random.Random, schedules: int, by_go: int, span_ms: int) -> None:
        self.sent: list[Planned] = []
        self.last: list[Planned] = []
        self._rng, self._span_ms = rng, span_ms
        self._put_ms = span_ms // 4
        for number in range(schedules + by_go):
            name = f"once-{number}"
            self._once(name, "go" if number >= schedules else "python")
        for number in range(min(_MOST_CRONS, schedules // 20)):
            self._repeating(
                f"cron-{number}", {"ledgerlake.cron": "* * * * * *"}, Rule(1000, is_aligned=True)
            )
        for number in range(min(_MOST_OTHERS, schedules // 20)):
            self._repeating(f"rule-{number}", *self._rule())
        for partition in range(PARTITIONS):
            name = f"to-the-end-{partition}"
            self._put(
                0,
                partition,
                name,
                0,
                "python",
                {"ledgerlake.cron": "* * * * * *"},
                Rule(1000, is_aligned=True),
            )
            paused_ms = self._at(self._put_ms, span_ms // 2)
            self._control(paused_ms, "pause", partition, None)
            self._control(paused_ms + self._at(1000, 5000), "resume", partition, None)
            self._control(span_ms, "cancel", partition, name)
            self.last.append(self.sent.pop())
        self.sent.sort(key=lambda planned: planned.at_ms)

    def _at(self, begin_ms: float, end_ms: float) -> int:
        return int(self._rng.uniform(begin_ms, max(begin_ms, end_ms)))

    def _add(
        self, at_ms: int, message: Message, properties: dict[str, str], by: str = "python"
    ) -> None:
        numbered = replace(message, number=len(self.sent) + len(self.last))
        self.sent.append(Planned(at_ms, numbered, properties, by))

    def _put(
        self,
        at_ms: int,
        partition: int,
        name: str,
        due_ms: int | None,
        by: str = "python",
        properties: dict[str, str] | None = None,
        rule: Rule | None = None,
    ) -> None:
        message = Message(0, "put", partition, name, due_ms, rule)
        self._add(at_ms, message, {"ledgerlake.schedule": name, **(properties or {})}, by)

    def _control(self, at_ms: int, kind: str, partition: int, name: str | None) -> None:
        target = "all" if name is None else f"schedule={name}"
        self._add(at_ms, Message(0, kind, partition, name), {f"ledgerlake.{kind}": target})

    def _once(self, name: str, by: str) -> None:
        partition = self._rng.randrange(PARTITIONS)
        put_ms = self._at(0, self._put_ms)
        due_ms = self._at(self._put_ms, self._span_ms)
        self._put(put_ms, partition, name, due_ms, by)
        fate = self._rng.random()
        if fate < 0.1:
            for _ in range(self._rng.choice([1, 1, 1, 2])):
                at_ms = self._moment_of_change(put_ms, due_ms)
                moved_ms = self._other_time(at_ms, due_ms)
                self._put(at_ms, partition, name, moved_ms, self._rng.choice(["python", by]))
                if moved_ms is None:
                    return
                put_ms, due_ms = at_ms, moved_ms
        elif fate < 0.2:
            at_ms = self._moment_of_change(put_ms, due_ms)
            self._control(at_ms, "cancel", partition, name)
            if self._rng.random() < 0.1:
                self._put(at_ms + self._at(0, 100), partition, name, at_ms + self._at(0, 5000), by)

    def _moment_of_change(self, put_ms: int, due_ms: int) -> int:
        while_waiting, while_due = self._at(put_ms, due_ms), due_ms + self._at(-300, 300)
        return max(put_ms, self._rng.choice([while_waiting, while_due]))

    def _other_time(self, at_ms: int, due_ms: int) -> int | None:
        """When a message is due that replaces another one: sooner, at the same time, later, before
        now, or at once.
        """
        choices = [
            at_ms + self._at(0, 2000),
            due_ms,
            due_ms + self._at(0, 20_000),
            at_ms - self._at(0, 5000),
            None,
        ]
        return self._rng.choices(choices, [3, 1, 4, 1, 1])[0]

    def _repeating(self, name: str, properties: dict[str, str], rule: Rule) -> None:
        partition = self._rng.randrange(PARTITIONS)
        put_ms = self._at(0, self._put_ms)
        self._put(
            put_ms, partition, name, put_ms + self._at(-2000, 5000), "python", properties, rule
        )
        end_ms = self._at(self._span_ms // 2, self._span_ms)
        if self._rng.random() < 0.3:
            moved_ms = self._at(put_ms, end_ms)
            self._put(
                moved_ms, partition, name, moved_ms + self._at(-2000, 5000), "python", *self._rule()
            )
        if self._rng.random() < 0.3:
            paused_ms = self._at(self._put_ms, end_ms)
            self._control(paused_ms, "pause", partition, name)
            if self._rng.random() < 0.7:
                self._control(paused_ms + self._at(0, 20_000), "resume", partition, name)
        self._control(end_ms, "cancel", partition, name)

    def _rule(self) -> tuple[dict[str, str], Rule]:
        """A rule, as properties and for the oracle."""
        seconds = self._rng.randint(1, 6)
        cron = {"ledgerlake.cron": f"*/{seconds} * * * * *"}
        every = {"ledgerlake.every": f"PT{seconds}S"}
        aligned, step = Rule(1000 * seconds, is_aligned=True), Rule(1000 * seconds)
        count, until_ms = self._rng.randint(1, 50), self._at(self._put_ms, self._span_ms)
        choices: list[tuple[dict[str, str], Rule]] = [
            (cron | {"ledgerlake.timezone": "Asia/Kolkata"}, aligned),
            (every | {"ledgerlake.timezone": "America/New_York"}, step),
            (cron | {"ledgerlake.count": str(count)}, replace(aligned, count=count)),
            ({"ledgerlake.every": f"R{count}/PT{seconds}S"}, replace(step, count=count)),
            (
                {"ledgerlake.every": f"R/2026-01-01T00:00:00.250+00:00/PT{seconds}S"},
                replace(step, anchor_ms=_ANCHOR_MS),
            ),
            (every | {"ledgerlake.until": ""}, replace(step, until_ms=until_ms)),
            (every | {"ledgerlake.jitter": "PT0.400S"}, replace(step, jitter_ms=400)),
            (
                cron | {"ledgerlake.jitter": f"PT{seconds}S"},
                replace(aligned, jitter_ms=1000 * seconds),
            ),
            (every | {"ledgerlake.catchup": "last"}, replace(step, may_skip=True)),
            (cron | {"ledgerlake.catchup": "none"}, replace(aligned, may_skip=True)),
        ]
        return self._rng.choice(choices)


_ANCHOR_MS = int(datetime.fromisoformat("2026-01-01T00:00:00.250+00:00").timestamp() * 1000)


def begun(planned: Planned, begin_ms: int) -> Planned:
    """A planned message with times since 1970."""
    message, properties = planned.message, planned.properties
    if message.due_ms is not None:
        message = replace(message, due_ms=message.due_ms + begin_ms)
    if message.rule is not None and message.rule.until_ms is not None:
        until_ms = message.rule.until_ms + begin_ms
        message = replace(message, rule=replace(message.rule, until_ms=until_ms))
        properties = properties | {"ledgerlake.until": str(until_ms)}
    return replace(planned, at_ms=planned.at_ms + begin_ms, message=message, properties=properties)


class Sender(threading.Thread):
    """Sends the planned messages, each at its time, and knows the place of each confirmed value."""

    def __init__(
        self,
        runtime: Runtime,
        topic: str,
        sent: list[Planned],
        last: list[Planned],
        go_program: Path | None,
        folder: Path,
    ) -> None:
        super().__init__(daemon=True)
        self.confirmed: dict[str, tuple[int, int, int]] = {}
        self.failures: list[str] = []
        self._sent, self._last, self._lock = sent, last, threading.Lock()
        self._finishes = threading.Event()
        client = runtime.client()
        self._producers = [
            [
                client.create_producer(
                    f"{topic}-partition-{partition}",
                    batching_enabled=is_batching,
                    block_if_queue_full=True,
                    send_timeout_millis=0,
                )
                for is_batching in (False, True)
            ]
            for partition in range(PARTITIONS)
        ]
        self._go: subprocess.Popen[str] | None = None
        if go_program is not None:
            with open(folder / "go.log", "w") as log:
                self._go = subprocess.Popen(
                    [str(go_program), runtime.service_url, topic],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            threading.Thread(target=self._read_go, daemon=True).start()

    def run(self) -> None:
        try:
            for planned in self._sent:
                time.sleep(max(0.0, planned.at_ms / 1000 - time.time()))
                self._send(planned)
            self._finishes.wait()
            for planned in self._last:
                self._send(planned)
            for producers in self._producers:
                for producer in producers:
                    producer.flush()
            if self._go is not None and self._go.stdin is not None:
                self._go.stdin.close()
                if self._go.wait(_LIMIT_S) != 0:
                    self.failures.append("the program in Go has failed; see go.log")
        except Exception as error:
            self.failures.append(repr(error))

    def finish(self) -> None:
        """Send the last messages, when all others are sent, and end."""
        self._finishes.set()
        self.join(_LIMIT_S)
        assert not self.is_alive(), "messages are still being sent"

    def end(self) -> None:
        """End the program in Go by force, if it still runs."""
        self._finishes.set()
        if self._go is not None:
            self._go.kill()
            self._go.wait()

    def _send(self, planned: Planned) -> None:
        message = planned.message
        value = f"{message.number}|{'x' * (message.number % 200)}"
        if planned.by == "go" and self._go is not None and self._go.stdin is not None:
            sent = {
                "partition": message.partition,
                "value": value,
                "properties": planned.properties,
            }
            self._go.stdin.write(json.dumps(sent | {"deliver_at_ms": message.due_ms or 0}) + "\n")
            self._go.stdin.flush()
            return

        def confirm(result: Any, message_id: Any) -> None:
            if result == pulsar.Result.Ok:
                self._confirm(
                    value, (message_id.ledger_id(), message_id.entry_id(), message_id.batch_index())
                )
            else:
                self.failures.append(f"{message}: {result}")

        # A client sends a delayed message at once, before the batch that it is filling. Of that
        # batch, a broker with deduplication then takes nothing.
        can_be_batched = message.due_ms is None and message.number % 2 == 0
        producer = self._producers[message.partition][can_be_batched]
        producer.send_async(
            value.encode(), confirm, properties=planned.properties, deliver_at=message.due_ms
        )

    def _read_go(self) -> None:
        assert self._go is not None
        assert self._go.stdout is not None
        for line in self._go.stdout:
            stored = json.loads(line)
            # The client says 0 both of the first message of a batch and of one that is in no batch.
            self._confirm(
                stored["value"], (stored["ledger_id"], stored["entry_id"], stored["batch_index"])
            )

    def _confirm(self, value: str, place: tuple[int, int, int]) -> None:
        with self._lock:
            self.confirmed[value] = place


class TopicReader(threading.Thread):
    """Reads the topic as it is written, and asks the broker for the time of a message if the oracle
    needs it exactly.
    """

    def __init__(self, runtime: Runtime, topic: str) -> None:
        super().__init__(daemon=True)
        self.stored: dict[int, Stored] = {}
        self.values: dict[int, str] = {}
        self.twice: list[str] = []
        self.asked = 0
        self._runtime, self._topic = runtime, topic
        self._consumer = runtime.client().subscribe(
            topic,
            "oracle",
            initial_position=pulsar.InitialPosition.Earliest,
            receiver_queue_size=5000,
        )
        self._ended = threading.Event()

    def expect(self, sent: list[Planned]) -> None:
        """Take the messages that are going to be sent."""
        self._messages = [
            planned.message for planned in sorted(sent, key=lambda planned: planned.message.number)
        ]
        self._exact: set[str | None] = {None}
        self._due_ms: dict[str | None, list[int]] = defaultdict(list)
        for message in self._messages:
            if message.rule is not None:
                self._exact.add(message.schedule)
            if message.due_ms is not None:
                self._due_ms[message.schedule].append(message.due_ms)

    def run(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(pulsar.Timeout):
                self._take(self._consumer.receive(500))

    def read_until(self, count: int) -> None:
        """Return when so many messages were read, or none has come for a while."""
        read, changed_s = 0, time.monotonic()
        while len(self.stored) < count and time.monotonic() < changed_s + _READ_S:
            time.sleep(0.1)
            if len(self.stored) > read:
                read, changed_s = len(self.stored), time.monotonic()

    def end(self) -> None:
        self._ended.set()
        self.join()

    def _take(self, received: Any) -> None:
        read_ms = int(time.time() * 1000) + 1
        message_id, message = received.message_id(), self._messages[number_of(received.data())]
        place = (message_id.ledger_id(), message_id.entry_id(), message_id.batch_index())
        known = self.stored.get(message.number)
        if known is None:
            publish_ms = received.publish_timestamp()
            is_near = any(
                publish_ms <= due_ms <= read_ms for due_ms in self._due_ms[message.schedule]
            )
            needs_time = message.schedule in self._exact or (
                message.schedule is not None and is_near
            )
            broker_ms = self._broker_ms(message.partition, place) if needs_time else None
            self.stored[message.number] = Stored(message, place, publish_ms, read_ms, broker_ms)
            self.values[message.number] = received.data().decode()
        elif known.place != place:
            self.twice.append(f"{known} is at {place}, too")
        self._consumer.acknowledge(received)

    def _broker_ms(self, partition: int, place: tuple[int, int, int]) -> int:
        self.asked += 1
        for _ in range(_LIMIT_S):
            # The broker may be down.
            with contextlib.suppress(OSError, urllib.error.URLError):
                headers = self._runtime.entry_headers(
                    f"{self._topic}-partition-{partition}", *place[:2]
                )
                text = headers["X-Pulsar-Broker-Entry-METADATA-timestamp"]
                seconds, _, fraction = text.rstrip("Z").partition(".")
                moment = datetime.fromisoformat(f"{seconds}.{fraction:0<6}+00:00")
                return int(moment.timestamp() * 1000 + 0.001)
            time.sleep(1)
        raise AssertionError(f"the broker does not give the entry {place}")


@dataclass
class SchedulesCampaign(PipelineProcess):
    """A topic with schedules, its pipeline, and the topic of due messages."""

    name: str = "schedules"
    between: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        prefix = f"persistent://{self.runtime.namespace}/{self.name}"
        self.topic, self.due = f"{prefix}-in", f"{prefix}-due"
        for topic in (self.topic, self.due):
            self.runtime.admin("PUT", topic, "/partitions", PARTITIONS)
        self.topics = [f"{self.topic}-partition-{number}" for number in range(PARTITIONS)]
        data = self.runtime.config(self.folder, self.topic, name=self.name)
        data["deliver"] = {"topic": self.due}
        data["delay"] = {"min_indexes_per_bucket": 500, "max_indexes_per_segment": 100}
        data["upkeep"] = {"interval": "1 second", "busy_percent": 30}
        Path(self.config).write_text(to_toml(data))
        # Retention 0 would take due messages before anybody has read them.
        self._due_consumer = self.runtime.client().subscribe(
            self.due, "oracle", initial_position=pulsar.InitialPosition.Earliest
        )

    def kill_between(self) -> None:
        """Kill the pipeline at the moment when the table has committed, so that Spark has not
        recorded the micro-batch.
        """
        with self.process() as running:
            self.await_commits(self.rng.randint(1, 5), running)
            below = psutil.Process(running.pid).children(recursive=True)
            self.await_commits(1, running)
            kill_all(running, below)
            self.end()
        self.log.append("behind a commit")
        self.between += self.is_between_commits

    def kill_while_it_runs(self) -> None:
        """Kill the pipeline at a random moment."""
        with self.process() as running:
            self.await_commits(self.rng.randint(1, 5), running)
            time.sleep(self.rng.uniform(0, 2))
            self.end()
        self.log.append("at random")

    def kill_broker(self) -> None:
        """Restart the broker under the pipeline."""
        with self.process() as running:
            self.await_commits(self.rng.randint(1, 3), running)
            self.restart_broker()
            self.await_commits(1, running)
        self.log.append("broker")

    def unload(self) -> None:
        """Roll the topic's ledgers."""
        for topic in self.topics:
            self.runtime.admin("PUT", topic, "/unload")

    def copies(self) -> Iterator[Delivered]:
        """Yield the messages on the topic of due messages."""
        seen: set[tuple[int, int, int, int]] = set()
        with contextlib.suppress(pulsar.Timeout):
            while True:
                message = self._due_consumer.receive(5000)
                self._due_consumer.acknowledge(message)
                at = message.message_id()
                place = (at.partition(), at.ledger_id(), at.entry_id(), at.batch_index())
                if place not in seen:
                    seen.add(place)
                    number, at_ms = number_of(message.data()), message.publish_timestamp()
                    properties = message.properties()
                    due_ms = int(properties["ledgerlake.deliver_at"])
                    yield to_delivered(number, properties, at_ms, due_ms, "on the topic")


def go_program(folder: Path) -> Path | None:
    """Build the program that sends by Pulsar's Go client; None if Go is not installed."""
    if shutil.which("go") is None:
        return None
    program = folder / "send-by-go"
    command = ["go", "build", "-buildvcs=false", "-o", str(program), "."]
    subprocess.run(command, cwd=_GO_SOURCE, check=True, env=os.environ | {"CGO_ENABLED": "0"})
    return program


def run(
    runtime: Runtime,
    folder: Path,
    schedules: int,
    by_go: int,
    kills: int,
    seed: int,
    span_s: float,
    say: Callable[[str], None],
) -> list[str]:
    """Play a campaign; return the faults, and report the steps."""
    campaign = SchedulesCampaign(runtime, folder, random.Random(seed))
    program = go_program(folder.absolute()) if by_go else None
    if by_go and program is None:
        say(WITHOUT_GO)
        by_go = 0
    plan = Plan(random.Random(campaign.rng.random()), schedules, by_go, int(span_s * 1000))
    reader = TopicReader(runtime, campaign.topic)
    campaign.open_cursors()
    begin_ms = int(time.time() * 1000) + 1000
    sent, last = ([begun(planned, begin_ms) for planned in part] for part in (plan.sent, plan.last))
    reader.expect([*sent, *last])
    sender = Sender(runtime, campaign.topic, sent, last, program, folder)
    try:
        reader.start()
        sender.start()
        _disturb(campaign, kills, begin_ms / 1000, span_s, say)
        sender.finish()
        reader.read_until(len(sender.confirmed))
        say(f"{len(reader.stored):,} messages are on the topic, {campaign.commits():,} commits")
        expected = expect(reader.stored.values())
        due_ms = [
            time_ms for of_message in expected.values() for time_ms in of_message.may.values()
        ]
        time.sleep(max(0, max(due_ms) / 1000 + _LAST_S - time.time()))
    finally:
        sender.end()
        reader.end()
        campaign.end()
    campaign.settle(0)
    copies = list(campaign.copies())
    wrong, figures = judge(reader.stored, folder, copies)
    wrong += [*sender.failures, *reader.twice, *_unconfirmed(sender, reader, len(sent) + len(last))]
    verified = ledgerlake_process("verify", campaign.config, "--json")
    if verified.returncode != 0:
        wrong.append(f"verify: {verified.stdout}{verified.stderr[-1000:]}")
    kinds = Counter(one.message.kind for one in reader.stored.values())
    say(
        f"{len(sender.confirmed):,} messages confirmed ({dict(kinds)}, "
        f"{sum(one.by == 'go' for one in plan.sent):,} sent by Go), {figures.rows:,} rows, "
        f"{figures.occurrences:,} of them occurrences, {figures.copies:,} on the topic, rejects "
        f"{dict(figures.rejects)}, {Counter(campaign.log)}, {campaign.between} of them before "
        f"Spark's record, {reader.asked:,} times asked of the broker, verify "
        f"{verified.stdout.strip()}, {len(wrong)} wrong"
    )
    return wrong


def _disturb(
    campaign: SchedulesCampaign,
    kills: int,
    begin_s: float,
    span_s: float,
    say: Callable[[str], None],
) -> None:
    """Kill the pipeline so often, and restart the broker once, all over the span."""
    actions = [
        campaign.kill_while_it_runs if number % 2 else campaign.kill_between
        for number in range(kills)
    ]
    campaign.rng.shuffle(actions)
    if kills >= _KILLS_WITH_BROKER:
        # A client whose first message is lost with a connection may have the next one dropped as a
        # repetition (see ``Feeder``); so it comes when all producers have begun.
        actions.insert(campaign.rng.randint(len(actions) // 2, len(actions)), campaign.kill_broker)
    for number, action in enumerate(actions):
        time.sleep(max(0, begin_s + number / len(actions) * span_s - time.time()))
        action()
        if number >= len(actions) // 2:
            campaign.unload()
        say(
            f"{time.time() - begin_s:.0f} s: {campaign.log[-1]}, {campaign.between} before Spark's "
            "record"
        )
    with campaign.process():
        pass


def _unconfirmed(sender: Sender, reader: TopicReader, planned: int) -> Iterator[str]:
    """Yield the differences between the messages that were read and the confirmed ones."""
    places = {value: reader.stored[number].place for number, value in reader.values.items()}
    for value, place in sender.confirmed.items():
        read = places.get(value)
        if read != place and read != (*place[:2], place[2] or -1):
            yield f"{value[:20]} was confirmed at {place}, and read at {read}"
    if len(sender.confirmed) != planned or len(places) != planned:
        yield (
            f"{planned} messages were planned, {len(sender.confirmed)} confirmed and "
            f"{len(places)} read"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.live.schedules_campaign", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument(
        "--go", type=int, default=1_000, help="schedules that Pulsar's Go client sends"
    )
    parser.add_argument("--kills", type=int, default=5)
    options = begin(parser)
    span_s = max(20.0, options.schedules / 400)
    with default_broker() as runtime:
        wrong = run(
            runtime,
            options.folder,
            options.schedules,
            options.go,
            options.kills,
            options.seed,
            span_s,
            say_at_once,
        )
    print(json.dumps({"seed": options.seed, "wrong": len(wrong), "examples": wrong[:20]}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
