"""Rejects of many reasons, mended and replayed while the replays are killed.

    secret      encrypted, batched and single; the private key is missing at first    undecryptable
    numbers     two tables' queries fail, one for some messages, both for others      transform_failed
    notes       no table takes some of them                                           no_table
    big         compressed values, batched and single, over a limit; large messages   too_large
    people-0    JSON by a schema, and bytes that are none, a topic a round            schema_mismatch

A round publishes messages of all kinds with pulsar-client, and runs the pipeline until all are
read. Then the configuration is mended in two stages, first some of it, and ``ledgerlake rejects
--replay`` is killed at random moments, until one ends by itself. In some stages the pipeline runs
meanwhile, with new messages. Each round has a key, a spelling, a table, limits and a topic of its
own. In the end a replay has to find nothing that is left.

The oracle has no code of Ledgerlake: what the producers had confirmed is compared with what
``deltalake`` reads from the tables.

    python -m tests.live.replay_campaign --rejects 10000 --kills 20 --seed 1
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pulsar
from deltalake import DeltaTable
from pulsar import schema as ps

from tests.encryption import crypto_key_reader
from tests.live.campaign import begin, default_broker, end_group, say_at_once
from tests.live.runtime import to_toml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.live.runtime import Runtime

# What the configuration is mended by, each of it by the number of the round.
_REMEDIES = ("key", "numbers", "halves", "table", "value_limit", "large_limit", "schema")

_VALUE_BYTES = 5000
_LARGE_BYTES = 1_000_000
# The broker takes entries of 5 MiB, so each large message has two chunks.
_LEAST_LARGE_BYTES = 6_000_000
_LARGE_PER_ROUND = 5
_KILLS_PER_ROUND = 5
# The queries' patterns have one digit for a round.
_MOST_ROUNDS = 9

# Of so many rejects, how many are of a kind.
_SHARES = {"secret": 30, "numbers": 40, "notes": 15, "big": 10, "people": 5}
_BATCHED = {
    "batching_enabled": True,
    "batching_max_messages": 5,
    "batching_max_publish_delay_ms": 20,
}
_ONE_BY_ONE = {"batching_enabled": False}

_TEXT = "split_part(decode(value), '|', 2)"
_LIMIT_S = 1200

Place = tuple[int, int, int]


class Person(ps.Record):
    id = ps.String(required=True)
    age = ps.Integer(required=True)


@dataclass(frozen=True)
class Sent:
    """A confirmed message: where the broker put it, the tables that it belongs into, and the reason
    of its reject; ``is_reject`` if it was read before anything of its round was mended.
    """

    place: Place
    tables: tuple[str, ...]
    reason: str = ""
    is_reject: bool = False


@dataclass
class Mended:
    """For each remedy, the last round whose rejects it mends."""

    rounds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_REMEDIES, -1))

    def with_round(self, number: int, remedies: tuple[str, ...] = _REMEDIES) -> Mended:
        return Mended(self.rounds | dict.fromkeys(remedies, number))

    def config(self, runtime: Runtime, folder: Path) -> dict[str, Any]:
        """The configuration data."""
        done = self.rounds
        lake = folder / "lake"
        for number in range(done["key"] + 1):
            shutil.copyfile(
                folder / "pairs" / f"key-{number}.pem", folder / "keys" / f"key-{number}.pem"
            )
        # Each query knows the spellings of its mended rounds.
        numbers = _stripped(_TEXT, f"[xy][0-{done['numbers']}]_") if done["numbers"] >= 0 else _TEXT
        halves = _stripped(
            _stripped(_TEXT, "x[0-9]_"), f"y[0-{done['halves']}]_" if done["halves"] >= 0 else "no"
        )
        tables: list[dict[str, Any]] = [
            {"path": "secrets", "topics_pattern": "secret"},
            {"path": "raw", "topics_pattern": "numbers"},
            {
                "path": "numbers",
                "topics_pattern": "numbers",
                "shape": "record",
                "sql": _query(numbers, 1),
            },
            {
                "path": "halves",
                "topics_pattern": "numbers",
                "shape": "record",
                "sql": _query(halves, 2),
            },
            {"path": "known", "topics_pattern": "notes", "where": "key = 'known'"},
            {"path": "big", "topics_pattern": "big"},
        ]
        tables += [
            {"path": f"new-{number}", "topics_pattern": "notes", "where": f"key = 'new-{number}'"}
            for number in range(done["table"] + 1)
        ]
        for number in range(_MOST_ROUNDS):
            is_mended = number <= done["schema"]
            people = {
                "path": f"people-{number}",
                "topics_pattern": f"people-{number}",
                "shape": "record",
            }
            tables.append(people | ({"schema": "Person"} if is_mended else {}))
            strays = {"path": f"strays-{number}", "topics_pattern": f"people-{number}"}
            tables += [strays | {"where": "schema_version is null"}] if is_mended else []
        data = runtime.config(
            folder, *_topics(), name="replays", crypto_key_folder=str(folder / "keys")
        )
        data["source"]["max_uncompressed_bytes"] = _VALUE_BYTES * (done["value_limit"] + 2)
        data["chunks"] = {
            "max_message_bytes": _LEAST_LARGE_BYTES + _LARGE_BYTES * (done["large_limit"] + 1)
        }
        data["delta"] = {"rejects_path": str(lake / "rejects")}
        data["tables"] = [{**table, "path": str(lake / table["path"])} for table in tables]
        return data


def _topics() -> list[str]:
    return [
        "secret",
        "numbers",
        "notes",
        "big",
        *(f"people-{number}" for number in range(_MOST_ROUNDS)),
    ]


def _stripped(text: str, pattern: str) -> str:
    return f"regexp_replace({text}, '{pattern}', '')"


def _query(number: str, divisor: int) -> str:
    return (
        f"select split_part(decode(value), '|', 1) as id, cast({number} as int) // {divisor} as n "
        "from messages"
    )


class Producers:
    """Publishes messages, and knows the confirmed ones by id."""

    def __init__(self, runtime: Runtime, folder: Path, rng: random.Random) -> None:
        self.confirmed: dict[str, Sent] = {}
        self.failures: list[str] = []
        self._rng, self._folder = rng, folder
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._client = client = runtime.client()
        for topic in _topics():
            runtime.admin("PUT", f"persistent://public/default/{topic}")
        lz4 = {"compression_type": pulsar.CompressionType.LZ4}
        self._plain = {
            topic: [
                client.create_producer(topic, block_if_queue_full=True, **how)
                for how in (_BATCHED, _ONE_BY_ONE)
            ]
            for topic in ("numbers", "notes")
        }
        self._big = [
            client.create_producer("big", block_if_queue_full=True, **how, **lz4)
            for how in (_BATCHED, _ONE_BY_ONE)
        ]
        self._large = client.create_producer("big", chunking_enabled=True, **_ONE_BY_ONE)

    def begin_round(self, number: int) -> None:
        """Make the producers of a round."""
        pairs = self._folder / "pairs"
        reader = crypto_key_reader(pairs, f"key-{number}")
        encrypted = {
            "encryption_key": f"key-{number}",
            "crypto_key_reader": reader,
            "block_if_queue_full": True,
        }
        self._secret = [
            self._client.create_producer("secret", **how, **encrypted)
            for how in (_BATCHED, _ONE_BY_ONE)
        ]
        self._people = self._client.create_producer(
            f"people-{number}", schema=ps.JsonSchema(Person), **_BATCHED
        )
        self._strays = self._client.create_producer(f"people-{number}", **_BATCHED)

    def publish(self, round_number: int, rejects: int, *, is_reject: bool) -> None:
        """Publish as many messages that become rejects, if nothing of the round is mended, and some
        others; return when all are confirmed.
        """
        for kind, share in _SHARES.items():
            for _ in range(max(1, rejects * share // 100)):
                getattr(self, f"_send_{kind}")(round_number, is_reject)
        for _ in range(_LARGE_PER_ROUND if is_reject else 1):
            value = self._rng.randbytes(_LEAST_LARGE_BYTES + _LARGE_BYTES * round_number + 1000)
            self._send(self._large, "large", ("big",), "too_large", is_reject, more=b"|" + value)
        for producer in self._open():
            producer.flush()
        if self.failures:
            raise RuntimeError(self.failures[0])

    def _open(self) -> Iterator[Any]:
        yield from (*self._secret, *self._big, self._large, self._people, self._strays)
        for producers in self._plain.values():
            yield from producers

    def _send_secret(self, _number: int, is_reject: bool) -> None:
        # A batch is one reject.
        producer = self._rng.choice(self._secret)
        for _ in range(_BATCHED["batching_max_messages"] if producer is self._secret[0] else 1):
            self._send(producer, "secret", ("secrets",), "undecryptable", is_reject)

    def _send_numbers(self, number: int, is_reject: bool) -> None:
        spelling = self._rng.choice([f"x{number}_", f"y{number}_"])
        tables = ("raw", "numbers", "halves")
        producer = self._rng.choice(self._plain["numbers"])
        self._send(
            producer,
            "numbers",
            tables,
            "transform_failed",
            is_reject,
            more=f"|{spelling}17".encode(),
        )
        self._send(producer, "numbers", tables, more=b"|17")

    def _send_notes(self, number: int, is_reject: bool) -> None:
        producer = self._rng.choice(self._plain["notes"])
        key = f"new-{number}"
        self._send(producer, "notes", (key,), "no_table", is_reject, partition_key=key)
        self._send(producer, "notes", ("known",), partition_key="known")

    def _send_big(self, number: int, is_reject: bool) -> None:
        filled = b"|" + b"x" * (_VALUE_BYTES * (number + 1))
        producer = self._rng.choice(self._big)
        self._send(producer, "big", ("big",), "too_large", is_reject, more=filled)
        # A batch is as large as all of its messages.
        producer.flush()
        self._send(producer, "big", ("big",), more=b"|small")
        producer.flush()

    def _send_people(self, number: int, is_reject: bool) -> None:
        self._send(
            self._strays, "people", (f"strays-{number}",), "schema_mismatch", is_reject, more=b"|{"
        )
        self._send(self._people, "people", (f"people-{number}",))

    def _send(
        self,
        producer: Any,
        kind: str,
        tables: tuple[str, ...],
        reason: str = "",
        is_reject: bool = False,
        more: bytes = b"",
        **options: Any,
    ) -> None:
        self._counts[kind] += 1
        name = f"{kind}-{self._counts[kind]}"
        content = (
            Person(id=name, age=self._counts[kind])
            if kind == "people" and not more
            else name.encode() + more
        )

        def confirm(result: Any, message_id: Any) -> None:
            with self._lock:
                if result != pulsar.Result.Ok:
                    self.failures.append(f"{name}: {result}")
                    return
                place = (message_id.ledger_id(), message_id.entry_id(), message_id.batch_index())
                self.confirmed[name] = Sent(place, tables, reason, is_reject)

        producer.send_async(content, confirm, **options)


@dataclass
class Campaign:
    """A lake, its rejects, and the replays that are killed."""

    runtime: Runtime
    folder: Path
    rng: random.Random
    rounds: int
    kills: int
    say: Callable[[str], None]
    killed: Counter[str] = field(default_factory=Counter)
    began: int = 0
    replays: int = 0
    replay_s: float = 3.0
    mended: Mended = field(default_factory=Mended)

    def __post_init__(self) -> None:
        for name in ("keys", "pairs", "lake"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.lake, self.config = self.folder / "lake", self.folder / "pipeline.toml"
        self.record = self.folder / "checkpoint" / "ledgerlake" / "replay.json"
        self.producers = Producers(self.runtime, self.folder, random.Random(self.rng.random()))

    def play(self, rejects: int) -> None:
        """Play the rounds."""
        self._write_config()
        # Retention 0 keeps nothing that was published before there are cursors.
        self._run_once()
        number = 0
        while number < self.rounds or (self.killed.total() < self.kills and number < _MOST_ROUNDS):
            self._round(number, -(-rejects // self.rounds))
            number += 1
        self._run_once()
        for _ in range(3):
            if self._replay().endswith("there is nothing to replay"):
                return
        raise AssertionError(f"replays come to no end: {self._replay()}")

    def _round(self, number: int, rejects: int) -> None:
        self.producers.begin_round(number)
        self.producers.publish(number, rejects, is_reject=True)
        self._run_once()
        some = tuple(remedy for remedy in _REMEDIES if self.rng.random() < 0.5)
        for remedies in (some, _REMEDIES):
            self.mended = self.mended.with_round(number, remedies)
            self._write_config()
            left = self.kills - self.killed.total()
            self._stage(number, min(left, _KILLS_PER_ROUND), has_traffic=self.rng.random() < 0.5)
            self.say(
                f"round {number}, mended {', '.join(remedies) or 'nothing'}: {self.killed.total()} "
                "kills so far"
            )

    def _stage(self, number: int, kills: int, *, has_traffic: bool) -> None:
        """Replay, killed so often, until one ends by itself; if there is traffic, beside the
        pipeline and its producers.
        """
        if not has_traffic:
            self._replay_under_kills(kills)
            return
        before = self._commits()
        running = self._spawn("run")
        ended = threading.Event()
        feeder = threading.Thread(target=self._feed, args=(number, ended))
        feeder.start()
        try:
            self._await(lambda: self._commits() > before, running)
            self._replay_under_kills(kills)
            assert running.poll() is None, self._log("run")
        finally:
            ended.set()
            feeder.join()
            if self.rng.random() < 0.5:
                running.send_signal(signal.SIGTERM)
                assert running.wait(_LIMIT_S) == 0, self._log("run")
            end_group(running)
        # An unfinished micro-batch would be waited for.
        self._run_once()
        self._replay()

    def _feed(self, number: int, ended: threading.Event) -> None:
        while not ended.wait(0.5):
            self.producers.publish(number, 20, is_reject=False)

    def _replay_under_kills(self, kills: int) -> None:
        for _ in range(kills):
            moment = self.rng.choice(["start", "record", "record", "commit", "commit"])
            replay = self._spawn("rejects", "--replay")
            self.replays += 1
            is_alive = self._reaches(moment, replay)
            replay.kill()
            code = replay.wait()
            if not is_alive:
                assert code == 0, self._logs()
                return
            self.killed[moment] += 1
            self.began += self.record.exists()
        self._replay()

    def _reaches(self, moment: str, replay: subprocess.Popen[bytes]) -> bool:
        """Wait for a moment of a replay; return whether the replay still ran."""
        if moment == "start":
            return self._sleeps(self.rng.uniform(0.0, self.replay_s), replay)
        began = self.record.stat().st_mtime_ns if self.record.exists() else None
        while replay.poll() is None:
            # The record of an earlier replay is finished by this one.
            if self.record.exists() and (moment == "commit" or self._is_new(began)):
                break
            time.sleep(0.0005)
        if moment == "commit":
            before = self._commits()
            while replay.poll() is None and self._commits() == before and self.record.exists():
                time.sleep(0.0005)
        return self._sleeps(self.rng.choice([0.0, self.rng.uniform(0.0, 0.05)]), replay)

    def _is_new(self, began: int | None) -> bool:
        try:
            return self.record.stat().st_mtime_ns != began
        except FileNotFoundError:
            return False

    @staticmethod
    def _sleeps(seconds: float, replay: subprocess.Popen[bytes]) -> bool:
        try:
            replay.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        return False

    def _replay(self) -> str:
        """Replay to the end; return what the command says."""
        began_s = time.monotonic()
        replay = self._spawn("rejects", "--replay")
        self.replays += 1
        assert replay.wait(_LIMIT_S) == 0, self._logs()
        self.replay_s = time.monotonic() - began_s
        return self._log().strip()

    def _run_once(self) -> None:
        running = self._spawn("run", "--once")
        try:
            assert running.wait(_LIMIT_S) == 0, self._log()
        finally:
            end_group(running)

    def _spawn(self, command: str, *options: str) -> subprocess.Popen[bytes]:
        number = len(list(self.folder.glob("*.log")))
        arguments = [sys.executable, "-m", "ledgerlake.cli", command, str(self.config), *options]
        with open(self.folder / f"{number:03d}-{command}.log", "wb") as output:
            return subprocess.Popen(arguments, stdout=output, stderr=output, start_new_session=True)

    def _log(self, command: str = "*") -> str:
        return sorted(self.folder.glob(f"*-{command}.log"))[-1].read_text()[-3000:]

    def _logs(self) -> str:
        return f"{self._log('rejects')}\nThe last pipeline said: {self._log('run')}"

    def _await(self, condition: Callable[[], bool], running: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not condition():
            assert running.poll() is None, self._log()
            assert time.monotonic() < deadline, "the pipeline commits nothing"
            time.sleep(0.05)

    def _commits(self) -> int:
        return sum(1 for _ in self.lake.glob("*/_delta_log/*.json"))

    def _write_config(self) -> None:
        data = self.mended.config(self.runtime, self.folder)
        self.config.write_text(to_toml(data))


def judge(confirmed: dict[str, Sent], lake: Path) -> tuple[list[str], Counter[str]]:
    """Compare tables and rejects with the confirmed messages; return the faults, and the number of
    rejects by reason.
    """
    wrong: list[str] = []
    expected: dict[str, set[str]] = defaultdict(set)
    for name, sent in confirmed.items():
        for table in sent.tables:
            expected[table].add(name)
    for table in sorted(
        {*expected, *(path.parent.name for path in lake.glob("*/_delta_log"))} - {"rejects"}
    ):
        rows = list(_rows(lake / table))
        counts = Counter(name for name, _ in rows)
        wrong += [f"{name} is not in {table}" for name in sorted(expected[table] - counts.keys())]
        wrong += [
            f"{name} does not belong into {table}"
            for name in sorted(counts.keys() - expected[table])
        ]
        wrong += [
            f"{name} is {count} times in {table}" for name, count in counts.items() if count > 1
        ]
        wrong += [
            f"{name} stands at {place} in {table}, the broker said {confirmed[name].place}"
            for name, place in rows
            if name in confirmed and confirmed[name].place != place
        ]
    counts, more = _judge_rejects(confirmed, lake / "rejects")
    return wrong + more, counts


def _judge_rejects(confirmed: dict[str, Sent], path: Path) -> tuple[Counter[str], list[str]]:
    columns = ["topic", "message_id", "reason", "detail"]
    rejects: Counter[tuple[str, str, str]] = Counter()
    replayed: Counter[tuple[str, str, str]] = Counter()
    for row in DeltaTable(str(path)).to_pyarrow_table(columns=columns).to_pylist():
        if row["reason"] == "replayed":
            replayed[row["topic"], row["message_id"], row["detail"]] += 1
        else:
            rejects[row["topic"], row["message_id"], row["reason"]] += 1
    wrong = [
        f"{key} is {rejects[key]} times in rejects, and {replayed[key]} times replayed"
        for key in sorted(rejects.keys() | replayed.keys())
        if rejects[key] != replayed[key]
    ]
    # A batch may be one reject, so its entry counts.
    places = {
        (tuple(map(int, message_id.split(":")[:2])), reason) for _, message_id, reason in rejects
    }
    wrong += [
        f"{name} at {sent.place} was never a reject of {sent.reason}"
        for name, sent in confirmed.items()
        if sent.is_reject and (sent.place[:2], sent.reason) not in places
    ]
    known = {(sent.place[:2], sent.reason) for sent in confirmed.values()}
    large = {sent.place[0] for name, sent in confirmed.items() if name.startswith("large-")}
    wrong += [
        f"a reject of {reason} at {place} is of no message"
        for place, reason in sorted(places - known)
        # All chunks of a large message but the last have places of their own.
        if reason != "too_large" or place[0] not in large
    ]
    counts: Counter[str] = Counter()
    for (_, _, reason), count in rejects.items():
        counts[reason] += count
    return counts, wrong


def _rows(path: Path) -> Iterator[tuple[str, Place]]:
    """Yield the messages of a table, with their places."""
    if not (path / "_delta_log").exists():
        return
    table = DeltaTable(str(path)).to_pyarrow_dataset()
    for batch in table.to_batches(batch_size=1000):
        for row in batch.to_pylist():
            place = row.get("pulsar") or row
            value = row["id"] if "id" in row else re.split(rb"\|", row["value"][:40])[0].decode()
            yield value, (place["ledger_id"], place["entry_id"], place["batch_index"])


def run(
    runtime: Runtime, folder: Path, rejects: int, kills: int, seed: int, say: Callable[[str], None]
) -> list[str]:
    """Play a campaign; return the faults, and report the steps."""
    rounds = max(1, min(_MOST_ROUNDS, kills // _KILLS_PER_ROUND))
    campaign = Campaign(runtime, folder, random.Random(seed), rounds, kills, say)
    campaign.play(rejects)
    confirmed = campaign.producers.confirmed
    wrong, counts = judge(confirmed, campaign.lake)
    if counts.total() < rejects:
        wrong.append(f"there were {counts.total()} rejects, and not {rejects}")
    if campaign.killed.total() < kills:
        wrong.append(f"{campaign.killed.total()} replays were killed, and not {kills}")
    say(
        f"{len(confirmed):,} messages confirmed, {counts.total():,} rejects ({dict(counts)}), "
        f"{campaign.replays} replays, {campaign.killed.total()} killed ({dict(campaign.killed)}), "
        f"{campaign.began} of them with a part begun, {len(wrong)} wrong"
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.live.replay_campaign", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--rejects", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    options = begin(parser)
    with default_broker() as runtime:
        wrong = run(
            runtime, options.folder, options.rejects, options.kills, options.seed, say_at_once
        )
    print(json.dumps({"seed": options.seed, "wrong": len(wrong), "examples": wrong[:20]}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
