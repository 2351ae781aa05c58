"""One history: a script made of a seed, the world in which it plays, and the verdict."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ledgerlake.errors import DataLossError, LedgerlakeError
from ledgerlake.pipeline.forget import forget
from ledgerlake.schedules import cancel_messages
from ledgerlake.stored.offsets import from_json
from ledgerlake.wire.message_id import Position
from tests.simulation.afterwards import Afterwards
from tests.simulation.broker import Cluster, Ledger, Topic
from tests.simulation.disk import Disk
from tests.simulation.driver import (
    CHECKPOINT,
    LATEST_TABLE,
    TABLES,
    Application,
    DueTopic,
    Edges,
    config,
)
from tests.simulation.lake import Lake
from tests.simulation.oracle import Oracle
from tests.simulation.producers import Producers
from tests.simulation.spark import TaskLostError
from tests.simulation.world import Stuck, Trap, World

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.options.config import Config

TOPIC = "persistent://public/default/orders"
DUE_TOPIC = "persistent://public/default/due"

# How long everything may take once nothing disturbs it any more.
_PATIENCE_S = 400.0

# How long the error of the last fault may take to end a run.
_GRACE_S = 5.0

_KILL_AT = [
    "committed messages",
    "committed messages",
    "committed rejects",
    "commit messages",
    "ran ",
    "written /sim/checkpoint/commits",
    "written /sim/checkpoint/offsets",
    "written /sim/checkpoint/state",
    "task done read",
    "task done state",
    "send ACK",
    "sent ACK",
    "moved /sim/checkpoint/ledgerlake",
    "write /sim/checkpoint/ledgerlake",
    "written /sim/messages",
    "written /sim/checkpoint/ledgerlake/outbox/part",
    "sent SUBSCRIBE",
    "stop query",
    "plan",
]
_OUTBOX_AT = [
    "commit rejects",
    "committed rejects",
    "commit messages",
    "committed messages",
    "move /sim/checkpoint/ledgerlake/outbox/0",
    "moved /sim/checkpoint/ledgerlake/outbox/0",
]
# Options that a user may change between two starts, and each promise holds.
_CHUNK_LIMITS: list[dict[str, Any]] = [{}, {"max_pending": 1}, {"max_pending_bytes": 1}]
_OPTIONS: list[dict[str, Any]] = [
    {},
    {"source": {"max_rows_per_trigger": 2}},
    {"source": {"min_partitions": 3}},
    {"chunks": {"max_pending": 1}},
    {"chunks": {"max_pending_bytes": 1}},
    {"delay": {"payloads": "reread"}},
    {"delay": {"payloads": "kept"}, "source": {"max_rows_per_trigger": 5, "min_partitions": 2}},
]

# Sections that a user may switch off for a run.
_OFF: list[dict[str, Any]] = [
    {},
    {"delay": {"enabled": False}},
    {"delay": {"enabled": False}, "deliver": None},
    {"deliver": None},
]

# The parts of a checkpoint, which a copy may take at different moments.
_PARTS = ["offsets", "commits", "state", "ledgerlake", "metadata"]

# What happens, and how often.
_WEIGHTS = {
    "kill": 2,
    "kill_at": 5,
    "suspend": 3,
    "second": 3,
    "stop": 3,
    "unload": 3,
    "roll": 3,
    "topic": 2,
    "restart": 2,
    "frame": 4,
    "task": 2,
    "commit": 3,
    "full": 1,
    "clock": 1,
    "restore": 2,
    "lose": 1,
}
_FRAMES = ["SUBSCRIBE", "FLOW", "LOOKUP", "GET_LAST_MESSAGE_ID", "ACK", "CONNECT", "CLOSE_CONSUMER"]


@dataclass(frozen=True)
class Step:
    """Something that is done at a moment; with ``label``, at the next access after it whose label
    begins so.
    """

    at_s: float
    do: str
    args: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    countdown: int = 1

    def __str__(self) -> str:
        args = " ".join(f"{name}={value}" for name, value in self.args.items())
        where = f" at access {self.countdown} of '{self.label}'" if self.label else ""
        return f"{self.at_s:7.3f}  {self.do} {args}{where}"


@dataclass(frozen=True)
class Features:
    """What a history has beside messages and disturbances. ``keeps_ledgers``: at its end the topics
    still have all ledgers. ``turns_off``: some runs lack ``[deliver]``, or hold no messages back.
    """

    has_tables: bool = False
    has_schedules: bool = False
    limits_cancels: bool = False
    changes_options: bool = False
    changes_keys: bool = False
    has_index: bool = True
    keeps_ledgers: bool = False
    has_pauses: bool = False
    has_lost_chunks: bool = False
    turns_off: bool = False
    has_latest: bool = False
    has_marked: bool = False


@dataclass(frozen=True)
class Script:
    """A history before it is played."""

    seed: int
    partitions: int
    brokers: int
    entries_per_ledger: int
    has_metadata: bool
    starting: str
    max_rows: int
    min_partitions: int
    by_pattern: bool
    delivers: bool
    duration_s: float
    steps: tuple[Step, ...]
    goes_on: bool = False
    cores: tuple[int, ...] = (1, 2, 4)
    features: Features = Features()
    # Whether the commands that judge and mend tables run at the end.
    has_commands: bool = False
    # How many of the partitions are there at the beginning; None for all.
    made: int | None = None

    def __str__(self) -> str:
        head = ", ".join(f"{name} {value}" for name, value in vars(self).items() if name != "steps")
        return "\n".join([head, *map(str, self.steps)])


@dataclass
class Verdict:
    """What came of a history."""

    script: Script
    violations: list[str]
    trace: list[str]
    trimmed: int = 0
    batches: int = 0
    accesses: int = 0
    messages: int = 0
    refused: str = ""


def _draw_features(rng: random.Random) -> Features:
    """Each independent of the others, so that any of them meet."""
    has_tables = rng.random() < 0.2
    has_schedules = rng.random() < 0.4
    return Features(
        has_tables,
        has_schedules,
        limits_cancels=rng.random() < 0.15,
        changes_options=rng.random() < 0.3,
        changes_keys=rng.random() < 0.15 and not has_tables,
        has_index=rng.random() < 0.9,
        keeps_ledgers=rng.random() < 0.5,
        has_pauses=rng.random() < 0.4 and has_schedules,
        has_lost_chunks=rng.random() < 0.25,
        turns_off=rng.random() < 0.1,
        has_latest=rng.random() < 0.5 and has_tables,
        has_marked=rng.random() < 0.25,
    )


def write_script(seed: int, features: Features | None = None) -> Script:
    """The script of a seed.

    Args:
        features: by default, they are drawn too.
    """
    rng = random.Random(seed)
    features = features or _draw_features(random.Random(f"features {seed}"))
    duration_s = rng.uniform(6.0, 14.0)
    partitions = rng.choice([0, 0, 0, 2])
    if features.has_latest:
        # Topic partitions share keys.
        partitions = 2
    steps = []
    for _ in range(rng.randint(6, 14)):
        kind = rng.choices(["plain", "batch", "delayed", "chunked", "cancel"], [6, 3, 3, 2, 1])[0]
        args = {"kind": kind, "count": rng.randint(1, 5), "partition": rng.randrange(6)}
        steps.append(Step(round(rng.uniform(0.0, duration_s), 3), "produce", args))
    steps += [one for _ in range(rng.randint(1, 4)) for one in _disturbance(rng, duration_s)]
    if features.limits_cancels:
        steps += _cancels(random.Random(seed), duration_s)
    if features.changes_keys:
        steps += _keys(random.Random(seed), duration_s)
    if features.has_tables:
        tables = [
            "even",
            "odd",
            "copy",
            "messages",
            "rejects",
            *["latest"] * 5 * features.has_latest,
        ]
        steps += _between_tables(random.Random(seed), duration_s, tables)
    if features.has_schedules:
        steps += _schedules(random.Random(seed), duration_s)
    if features.has_pauses:
        kinds = ["pause", "resume", "repeating"]
        steps += _of_kinds(random.Random(f"pauses {seed}"), duration_s, kinds, 2)
    if features.has_lost_chunks:
        steps += _of_kinds(random.Random(f"chunks {seed}"), duration_s, ["lost", "slow"], 3)
    # A delayed message whose chunks have expired is not replayed.
    if features.has_marked and not features.has_lost_chunks:
        kinds = ["marked", "marked", "cancel", *["schedule", "end"] * features.has_schedules]
        steps += _of_kinds(random.Random(f"marked {seed}"), duration_s, kinds, 2)
    return Script(
        seed,
        partitions,
        rng.choice([1, 2]),
        rng.choice([1, 2, 3, 5, 8]),
        rng.random() < 0.85,
        rng.choice(["earliest", "earliest", "latest"]),
        rng.choice([0, 0, 0, 3, 6]),
        rng.choice([0, 0, 3]),
        rng.random() < 0.25,
        rng.random() < 0.3 or features.changes_keys,
        duration_s,
        tuple(sorted(steps, key=lambda one: one.at_s)),
        features=features,
        has_commands=True,
        made=random.Random(f"made {seed}").choice([1, None]),
    )


def _between_tables(rng: random.Random, duration_s: float, tables: list[str]) -> list[Step]:
    """Kills and failures between the commits of a pipeline with many tables."""
    steps = []
    for _ in range(rng.randint(1, 3)):
        label = f"{rng.choice(['commit', 'committed'])} {rng.choice(tables)}"
        do = rng.choice(["kill", "kill", "verdict"])
        args: dict[str, Any] = {
            "back_s": round(rng.uniform(0.1, 2.0), 2),
            "noticed_s": rng.choice([0.0, 2.0]),
        }
        if do == "verdict":
            args = {"says": "fail"}
        steps.append(
            Step(round(rng.uniform(0.5, duration_s), 3), do, args, label, rng.randint(1, 3))
        )
    return steps


def _schedules(rng: random.Random, duration_s: float) -> list[Step]:
    """Messages with the ids of schedules, and their cancels; some messages repeat."""
    steps = []
    for _ in range(rng.randint(4, 12)):
        kind = rng.choices(["schedule", "repeating", "end"], [4, 2, 2])[0]
        args = {"kind": kind, "count": rng.randint(1, 3), "partition": rng.randrange(6)}
        steps.append(Step(round(rng.uniform(0.0, duration_s), 3), "produce", args))
    return steps


def _of_kinds(rng: random.Random, duration_s: float, kinds: list[str], most: int) -> list[Step]:
    return [
        Step(
            round(rng.uniform(0.0, duration_s), 3),
            "produce",
            {
                "kind": rng.choice(kinds),
                "count": rng.randint(1, most),
                "partition": rng.randrange(6),
            },
        )
        for _ in range(rng.randint(3, 9))
    ]


def _keys(rng: random.Random, duration_s: float) -> list[Step]:
    """Delayed messages that are encrypted, and keys that come and go between two runs of a
    micro-batch.
    """
    steps = []
    for _ in range(rng.randint(4, 10)):
        args = {"kind": "encrypted", "count": rng.randint(1, 2), "partition": rng.randrange(6)}
        steps.append(Step(round(rng.uniform(0.0, duration_s), 3), "produce", args))
    for _ in range(rng.randint(2, 4)):
        label = rng.choice(_OUTBOX_AT)
        args = {
            "back_s": round(rng.uniform(0.1, 2.0), 2),
            "noticed_s": rng.choice([0.0, 0.2, 2.0]),
            "for_s": 4.0,
        }
        args["do"] = rng.choice(["kill", "kill", "suspend"])
        steps.append(
            Step(round(rng.uniform(0.5, duration_s), 3), "keys", args, label, rng.randint(1, 2))
        )
    return steps


def _cancels(rng: random.Random, duration_s: float) -> list[Step]:
    """More cancels at once than a task passes on."""
    args = {"kind": "cancel", "count": 4, "partition": 0}
    return [Step(round(rng.uniform(0.0, duration_s), 3), "produce", args) for _ in range(4)]


def _disturbance(rng: random.Random, duration_s: float) -> list[Step]:
    """One thing that goes wrong, or two that belong together."""
    at_s = round(rng.uniform(0.5, duration_s), 3)
    what = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    back_s = round(rng.uniform(0.1, 3.0), 2)
    partition = rng.randrange(6)
    if what == "kill":
        return [Step(at_s, "kill", {"back_s": back_s, "noticed_s": rng.choice([0.0, 0.5, 2.0])})]
    if what == "kill_at":
        args = {"back_s": back_s, "noticed_s": rng.choice([0.0, 0.0, 2.0])}
        return [Step(at_s, "kill", args, rng.choice(_KILL_AT), rng.randint(1, 3))]
    if what == "suspend":
        args = {"for_s": round(rng.uniform(0.5, 9.0), 2), "noticed_s": rng.choice([0.2, 1.0, 5.0])}
        return [Step(at_s, "suspend", args, rng.choice(["", *_KILL_AT]), rng.randint(1, 2))]
    if what == "second":
        older = (
            []
            if rng.random() < 0.5
            else [Step(at_s + back_s, "kill_older", {"noticed_s": rng.choice([0.0, 2.0])})]
        )
        return [Step(at_s, "second", {}, rng.choice(["", "", *_KILL_AT])), *older]
    if what == "stop":
        label = rng.choice(["", "batch ", "committed messages", "ran ", "task read"])
        return [Step(at_s, "stop", {"back_s": back_s}, label)]
    if what in ("unload", "roll"):
        label = rng.choice(["", "", "batch ", "task read", "committed messages", "send SUBSCRIBE"])
        return [
            Step(at_s, what, {"partition": partition, "away_s": rng.choice([0.0, 0.1, 1.0])}, label)
        ]
    if what == "topic":
        # Many come while the pipeline starts.
        began_s = rng.choice([0.0, 0.0, at_s])
        label = rng.choice(["", "plan", "send SUBSCRIBE", "created", "batch "])
        args = {"count": rng.randint(0, 3)}
        return [Step(began_s, "topic", args, label, rng.randint(1, 3))]
    if what == "restart":
        args = {
            "broker": rng.randrange(2),
            "away_s": rng.choice([0.1, 2.0]),
            "loses_marks": rng.random() < 0.5,
        }
        return [Step(at_s, "restart", args, rng.choice(["", "task read", "batch "]))]
    if what == "frame":
        how = rng.choice(["cut", "unanswered", "half", "twice", "slow"])
        return [
            Step(at_s, "verdict", {"says": how}, f"send {rng.choice(_FRAMES)}", rng.randint(1, 3))
        ]
    if what == "task":
        if rng.random() < 0.5:
            return [
                Step(
                    at_s, "verdict", {"says": "speculate"}, rng.choice(["task read", "task state"])
                )
            ]
        label = rng.choice(
            ["send FLOW", "task done read", "task done state", "written /sim/messages"]
        )
        return [Step(at_s, "lose_task", {}, label)]
    if what == "commit":
        label = rng.choice(
            [
                "commit messages",
                "committed messages",
                "commit rejects",
                "committed rejects",
                "publish",
            ]
        )
        return [Step(at_s, "verdict", {"says": "fail"}, label, rng.randint(1, 2))]
    if what == "full":
        return [
            Step(
                at_s,
                "full",
                {"for_s": round(rng.uniform(0.5, 3.0), 2)},
                rng.choice(["", "batch ", "ran "]),
            )
        ]
    if what == "clock":
        return [Step(at_s, "clock", {"by_s": rng.choice([-3.0, -0.5, 0.5, 4.0])})]
    if what == "lose":
        return [Step(at_s, "lose", {"back_s": back_s})]
    later_s = round(rng.uniform(at_s, duration_s + 4.0), 3)
    torn_s = rng.choice([0.0, 0.0, 0.5, 2.0])
    return [Step(at_s, "backup", {"takes_s": torn_s}), Step(later_s, "restore", {"back_s": back_s})]


def _changed(sections: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The sections with other options; without a section if it is None in the change."""
    changed = {
        name: options and sections.get(name, {}) | options for name, options in change.items()
    }
    return {name: options for name, options in (sections | changed).items() if options is not None}


class History(Producers):
    """A script being played."""

    def __init__(self, script: Script, edges: Edges, traces: bool = False) -> None:
        super().__init__()
        self.script = script
        self.world = World(random.Random(script.seed * 7919 + 1), traces_accesses=traces)
        self.brokers = Cluster(
            self.world, script.brokers, script.entries_per_ledger, script.has_metadata
        )
        self.brokers.has_index = script.features.has_index
        self.disk = Disk(self.world)
        self.lake = Lake(self.world, self.disk)
        # If the broker's clock is set back, the pipeline counts on from where it was for a minute.
        self.highest_skew_ms = 0
        self.oracle = Oracle(
            self.disk, lambda: self.brokers.clock_ms - self.brokers.skew_ms + self.highest_skew_ms
        )
        self.lake.on_commit = self.oracle.committed
        self.brokers.on_mark_delete = self._cursor_moved
        self.brokers.on_trim = self._trimmed
        edges.enter(self.world, self.disk, self.brokers, self.lake)
        self.edges = edges
        vars(cancel_messages)["MAX_TASK_CANCELS"] = 1 if script.features.limits_cancels else 20_000
        self.brokers.add_topic(TOPIC, script.partitions, script.made)
        sections: dict[str, Any] = {}
        if script.max_rows:
            sections["source"] = {"max_rows_per_trigger": script.max_rows}
        if script.min_partitions:
            sections.setdefault("source", {})["min_partitions"] = script.min_partitions
        if script.goes_on:
            sections.setdefault("source", {})["fail_on_data_loss"] = False
        if script.delivers:
            sections["deliver"] = {"topic": DUE_TOPIC}
        if script.features.has_tables:
            sections["tables"] = TABLES + [LATEST_TABLE] * script.features.has_latest
        if script.features.has_lost_chunks:
            limits = random.Random(f"limits {script.seed}").choice(_CHUNK_LIMITS)
            sections["chunks"] = {"expire_after": "5 seconds", **limits}
        self._sections = sections
        self.settings = self.configured()
        # With other options, and what earlier runs had.
        changes = _OPTIONS if script.features.changes_options else []
        changes = changes + (_OFF if script.features.turns_off else [])
        self._choices = [self.configured(change) for change in changes]
        self._earlier: list[Config] = []
        edges.due = DueTopic(self.world, self.oracle.published)
        self.oracle.awaits_publishing = script.delivers and not script.features.turns_off
        self.oracle.may_come_at_once = script.features.turns_off
        self.oracle.has_copy = script.features.has_tables
        self.apps: list[Application] = []
        self.resume_s = 0.0
        self.calm_s = float("inf")
        self.was_restored = False
        self.refused = ""
        self.backup: dict[str, Any] = {}
        self._copied: list[str] = []
        self._refusals = 0
        self._commits_at_start = 0

    def configured(self, change: dict[str, Any] | None = None) -> Config:
        """The configuration with some options changed."""
        pattern = f"{TOPIC}.*" if self.script.by_pattern else None
        sections = _changed(self._sections, change or {})
        return config([TOPIC], pattern, starting=self.script.starting, **sections)

    @property
    def topics(self) -> list[Topic]:
        return list(self.brokers.topics.values())

    def play(self) -> Verdict:
        stuck = False
        try:
            self._play()
        except Stuck:
            stuck = True
        except AssertionError as error:
            self.oracle.complain(f"the simulator: {error!r}")
        if stuck:
            self.oracle.complain("the history goes on without end")
        self.world.accesses = -(10**9)
        self.world._quiet = -(10**9)
        self.world.end()
        return Verdict(
            self.script,
            self.oracle.violations,
            self.world.trace,
            self.brokers.trimmed,
            sum(app.committed for app in self.apps),
            self.world.accesses + 10**9,
            len(self.oracle.sent),
            self.refused,
        )

    def _play(self) -> None:
        for step in self.script.steps:
            self.world.at(step.at_s, lambda step=step: self._begin(step))  # type: ignore[misc]
        self.world.at(0.0, self._supervise)
        end_s = max([self.script.duration_s, *(step.at_s for step in self.script.steps)]) + 0.5
        self.world.pause(end_s, self._is_over)
        if self._is_over():
            return
        self._calm_down()
        self.world.pause(self.world.now_s + _PATIENCE_S, lambda: self._is_over() or self._is_done())
        if self._is_over():
            return
        if not self._is_done():
            unpublished = {payload for payload, _ in self.oracle.unpublished}
            missing = self.oracle.unsettled or unpublished or self.oracle.differs_from_copy
            some = ", ".join(map(str, map(self.oracle.sent.__getitem__, sorted(missing)[:3])))
            where = (
                ""
                if self.oracle.unsettled
                else " to the topic"
                if unpublished
                else " to all tables"
            )
            self.oracle.complain(
                f"nothing missing: {len(missing)} messages never came{where}, among them {some}"
            )
            return
        self.world.sleep(3.0)
        self.resume_s = 1e9
        app = self._running() or self.apps[-1]
        self._stop_all()
        if app.ended != "ended" and not app.was_alone:
            # It was killed or had found a successor, so nothing has ended cleanly yet.
            app = self.start()
            self.world.sleep(5.0)
            self._stop_all()
        if not self._is_over():
            self._check_end(app)
        if self.script.has_commands and not self._is_over():
            if self.script.features.keeps_ledgers:
                for topic in self.topics:
                    topic.ledgers[:0] = topic.trimmed
            Afterwards(self).check()

    def _stop_all(self) -> None:
        for app in self.apps:
            app.ask_to_stop()
        self.world.pause(
            self.world.now_s + 120.0, lambda: not any(app.is_running for app in self.apps)
        )

    def _check_end(self, app: Application) -> None:
        if app.is_running:
            self.oracle.complain("a stop by signal does not end the pipeline")
        elif self._choices and "set it back" in app.ended:
            self.refused = app.ended
            return
        elif self.was_restored and app.was_refused:
            # Everything was in the table when it came; what the checkpoint lacks is said.
            self.refused = app.ended
            return
        elif app.ended != "ended" and app.was_alone:
            self.oracle.complain(f"lost is said: the last run ended with {app.ended}")
        if self.script.features.has_latest:
            self.oracle.check_latest(self.lake)
        for topic in self.topics:
            for name, cursor in topic.cursors.items():
                if cursor.mark_delete < topic.last:
                    self.oracle.complain(
                        f"after a clean end the backlog of {name} is not empty: "
                        f"{cursor.mark_delete} of {topic.last}"
                    )

    def _is_over(self) -> bool:
        return bool(self.oracle.violations or self.refused)

    def _is_done(self) -> bool:
        oracle = self.oracle
        return not (
            oracle.unsettled or oracle.unpublished or oracle.differs_from_copy or self._sending
        )

    def _calm_down(self) -> None:
        self.world.say("from here on nothing disturbs")
        self.calm_s = self.world.now_s
        self.world.traps.clear()
        self.disk.is_full = False
        for app in self.apps:
            app.process.suspended = False
        self.resume_s = min(self.resume_s, self.world.now_s + 1.0)

    # The operator

    def _supervise(self) -> None:
        """Start the pipeline where none runs, and look at how one ended."""
        self.world.at(self.world.now_s + 0.37, self._supervise)
        for app in self.apps:
            if app.ended and app.error is not None:
                self._judge(app)
                app.error = None
        if (
            not any(app.is_running and not app.process.suspended for app in self.apps)
            and self.world.now_s >= self.resume_s
            and not self._is_over()
        ):
            self.start()

    def start(self) -> Application:
        name = f"run {len(self.apps) + 1}"
        self.world.say(f"{name} is started")
        self._commits_at_start = self.oracle.commits
        rng = self.world.rng
        once, cores = rng.random() < 0.1, rng.choice(self.script.cores)
        app = Application(self.world, name, self._settings(), self.disk, self.lake, once, cores)
        # The threads that are left go with the process.
        app.exits = lambda: self._end_of(app, 0.0)
        for other in self.apps:
            if other.is_running:
                other.was_alone = app.was_alone = False
        self.apps.append(app)
        return app

    def _settings(self) -> Config:
        """The configuration of the next run. After a refusal, it is that of an earlier run."""
        if not self._choices:
            return self.settings
        ended = self.apps[-1].ended if self.apps else ""
        if "set it back" in ended and self._earlier:
            self._earlier.pop()
        if not ("set it back" in ended and self._earlier):
            rng = random.Random(self.script.seed * 31 + len(self.apps))
            self._earlier.append(rng.choice(self._choices))
        return self._earlier[-1]

    def _judge(self, app: Application) -> None:
        """A run that ended with an error: allowed while a fault lasts, or as the refusal of what
        cannot be mended.
        """
        self.resume_s = self.world.now_s + 1.0
        if app.mistake:
            self.oracle.complain(f"lost is said: {app.process.name} ended with {app.mistake}")
        elif not app.was_alone or (self._choices and "set it back" in app.ended):
            return
        elif isinstance(app.error, DataLossError) and not self.was_restored:
            self.oracle.complain(f"nothing missing: {app.process.name} ended with {app.ended}")
        elif app.ended_s > self.calm_s + _GRACE_S:
            self._refusals += 1
            if not self.was_restored:
                self.oracle.complain(
                    f"lost is said: undisturbed, {app.process.name} ended with {app.ended}"
                )
            elif self._refusals >= 2:
                self.refused = app.ended
                if self.oracle.commits != self._commits_at_start:
                    self.oracle.complain(
                        f"lost is said: {app.process.name} was refused and has changed a table"
                    )
                self._check_refused()

    def _check_refused(self) -> None:
        lost = self.oracle.lost(self._is_stored)
        if lost:
            self.oracle.complain(
                f"nothing unpinned: refused, and {len(lost)} messages are gone, such as {lost[0]}"
            )

    def _is_stored(self, name: str, position: Position) -> bool:
        return self.brokers.topics[name].ledgers[0].ledger_id <= position.ledger_id

    # The steps

    def _begin(self, step: Step) -> None:
        if step.label:
            act = lambda: self._do(step)  # noqa: E731
            self.world.traps.append(Trap(step.label, step.countdown, act))
        else:
            self._do(step)

    def _do(self, step: Step) -> str | None:
        self.world.say(f"> {step.do} {step.args}")
        verdict: str | None = getattr(self, "_add_topic" if step.do == "topic" else f"_{step.do}")(
            step.args
        )
        return verdict

    def _running(self) -> Application | None:
        """The run at whose access this happens; else the newest."""
        found = [app for app in self.apps if app.is_running]
        here = [app for app in found if app.process is self.world.current.process.root]
        return (here or found or [None])[-1]  # type: ignore[list-item]

    def _kill(self, args: dict[str, Any]) -> None:
        app = self._running()
        if app is not None:
            self.resume_s = self.world.now_s + args["back_s"]
            self._end_of(app, args["noticed_s"])

    def _end_of(self, app: Application, noticed_s: float) -> None:
        self.world.kill(app.process)
        self.world.at(self.world.now_s + noticed_s, lambda: self.brokers.cut_all_of(app.process))

    def _kill_older(self, args: dict[str, Any]) -> None:
        found = [app for app in self.apps if app.is_running]
        if len(found) > 1:
            self._end_of(found[0], args["noticed_s"])

    def _second(self, _args: dict[str, Any]) -> None:
        if self._running() is not None:
            self.start()

    def _suspend(self, args: dict[str, Any]) -> None:
        app = self._running()
        if app is None:
            return
        app.process.suspended = True
        self.resume_s = self.world.now_s + 0.5
        self.world.at(self.world.now_s + args["noticed_s"], lambda: self._notice(app))

        def go_on() -> None:
            self.world.say(f"{app.process.name} goes on")
            app.process.suspended = False

        self.world.at(self.world.now_s + args["for_s"], go_on)

    def _notice(self, app: Application) -> None:
        """The broker hears nothing from a process any more."""
        if app.process.suspended:
            self.brokers.cut_all_of(app.process)

    def _keys(self, args: dict[str, Any]) -> None:
        """The key goes, or is there again, while no process runs or one is suspended."""
        getattr(self, f"_{args['do']}")(args)
        self.edges.has_keys = not self.edges.has_keys

    def _stop(self, args: dict[str, Any]) -> None:
        app = self._running()
        if app is not None:
            app.ask_to_stop()
            self.resume_s = self.world.now_s + args["back_s"]

    def _verdict(self, args: dict[str, Any]) -> str:
        return str(args["says"])

    def _lose_task(self, _args: dict[str, Any]) -> None:
        context = self.world.current.context
        if "worker" in context.name:
            for broker in self.brokers.brokers:
                for link in [link for link in broker.links if link.process is context]:
                    self.brokers.cut(link)
            raise TaskLostError("Python worker exited unexpectedly (crashed)")

    def _topic(self, args: dict[str, Any]) -> Topic:
        return self.topics[args["partition"] % len(self.topics)]

    def _unload(self, args: dict[str, Any]) -> None:
        self.brokers.unload(self._topic(args), args["away_s"])

    def _roll(self, args: dict[str, Any]) -> None:
        self.brokers.roll(self._topic(args))

    def _restart(self, args: dict[str, Any]) -> None:
        broker = self.brokers.brokers[args["broker"] % len(self.brokers.brokers)]
        self.brokers.restart(broker, args["away_s"], args["loses_marks"])

    def _bare(self, _args: dict[str, Any]) -> None:
        """Brokers take over that add no entry metadata."""
        self.brokers.has_metadata = False
        for topic in self.topics:
            self.brokers.unload(topic, 0.0)

    def _skip(self, _args: dict[str, Any]) -> None:
        """Somebody moves the cursors up to the last entry but one, by message TTL or by hand."""
        for topic in self.topics:
            for cursor in topic.cursors.values():
                cursor.mark_delete = topic.last.before
            self.brokers.trim(topic)

    def _anew(self, _args: dict[str, Any]) -> None:
        """The cluster is made anew: the same topics without entries and cursors, ledger ids from
        the beginning.
        """
        for broker in self.brokers.brokers:
            for link in list(broker.links):
                self.brokers.cut(link)
        names = list(self.brokers.topics)
        self.brokers.topics.clear()
        self.brokers.begin_ledgers_anew()
        for name in names:
            self.brokers.add_topic(name)

    def _delete(self, args: dict[str, Any]) -> None:
        self.brokers.delete(self._topic(args))

    def _full(self, args: dict[str, Any]) -> None:
        self.disk.is_full = True

        def free() -> None:
            self.disk.is_full = False

        self.world.at(self.world.now_s + args["for_s"], free)

    def _clock(self, args: dict[str, Any]) -> None:
        # Messages that were due when a micro-batch was planned are released when it is run again.
        self.oracle.latest_ms = max(self.oracle.latest_ms, self.oracle.clock_ms())
        self.brokers.skew_ms += int(args["by_s"] * 1000)
        self.highest_skew_ms = max(self.highest_skew_ms, self.brokers.skew_ms)

    def _add_topic(self, args: dict[str, Any]) -> None:
        """A topic of the pattern, or partitions of the topic, that were not there before."""
        before = len(self.topics)
        if self.script.by_pattern:
            self.brokers.add_topic(f"{TOPIC}-{before}")
        elif self.script.partitions:
            self.brokers.add_topic(TOPIC, self.brokers.partitioned[TOPIC] + 1)
        for topic in self.topics[before:]:
            if self.script.starting == "latest" and not self._has_begun():
                continue
            for _ in range(args["count"]):
                self._send_plain(topic)

    def _backup(self, args: dict[str, Any]) -> None:
        """Copy the checkpoint; a copy that takes its time has each part as of another moment."""
        self.oracle.copied()
        parts = self.world.rng.sample(_PARTS, len(_PARTS))
        copied, done = self.backup, self._copied = {}, []
        for number, part in enumerate(parts):
            at_s = self.world.now_s + args["takes_s"] * number / len(parts)
            folder = f"{CHECKPOINT}/{part}"

            def copy(folder: str = folder) -> None:
                copied.update(
                    {
                        path: data
                        for path, data in self.disk.files.items()
                        if path.startswith(folder)
                    }
                )
                done.append(folder)

            if args["takes_s"]:
                self.world.at(at_s, copy)
            else:
                copy()

    def _restore(self, args: dict[str, Any]) -> None:
        if not self.backup or len(self._copied) < len(_PARTS):
            return
        self._end_all(args["back_s"])
        self.disk.replace(CHECKPOINT, self.backup)
        self.oracle.restored()
        self.was_restored = True

    def _lose(self, args: dict[str, Any]) -> None:
        self._end_all(args["back_s"])
        self.disk.replace(CHECKPOINT, {})
        self.was_restored = True

    def _put(self, args: dict[str, Any]) -> None:
        """Messages of one kind and no other; scripts that are written by hand use it."""
        for _ in range(args.get("count", 1)):
            getattr(self, f"_send_{args['kind']}")(self.topics[0])

    def _forget(self, _args: dict[str, Any]) -> None:
        """``ledgerlake forget``."""

        def run() -> None:
            try:
                forget(self.settings)
                self.was_restored = True
            except LedgerlakeError as error:
                self.world.say(f"forget: {error}")

        self.world.spawn(self.world.process("forget"), "forget", run)

    def _restore_table(self, args: dict[str, Any]) -> None:
        """A table is put back to a copy that lacks its newest commits; without any it is gone."""
        self._end_all(args["back_s"])
        stored = self.lake.tables[args["table"]]
        del stored.commits[-args["commits"] :]
        if not stored.commits:
            del self.lake.tables[args["table"]]
        self.was_restored = True

    def _end_all(self, back_s: float) -> None:
        self.resume_s = self.world.now_s + back_s
        for app in self.apps:
            if app.is_running:
                self._end_of(app, 0.0)

    # Producers

    def _produce(self, args: dict[str, Any]) -> None:
        topic = self._topic(args)
        if self.script.starting == "latest" and not self._has_begun():
            # The pipeline does not read messages from before its beginning.
            return
        for _ in range(args["count"]):
            getattr(self, f"_send_{args['kind']}")(topic)

    def _has_begun(self) -> bool:
        return f"{CHECKPOINT}/ledgerlake/start.json" in self.disk.files

    # Cursors

    def _trimmed(self, topic: Topic, ledger: Ledger) -> None:
        """What goes before there was ever a cursor is nobody's loss."""
        if not topic.had_cursor:
            for number in range(len(ledger.entries)):
                self.oracle.excuse(topic.name, Position(ledger.ledger_id, number))

    def _cursor_moved(self, topic: Topic, _name: str, before: Position, to: Position) -> None:
        self.oracle.passed(topic.name, before, to, self._committed_to(topic.name))

    def _committed_to(self, name: str) -> Position | None:
        """How far the batches reach that Spark has recorded; before them, where the pipeline
        began.
        """
        start = f"{CHECKPOINT}/commits/"
        numbers = [int(file[len(start) :]) for file in self.disk.files if file.startswith(start)]
        if numbers:
            data = self.disk.files[f"{CHECKPOINT}/offsets/{max(numbers)}"].decode().splitlines()[-1]
        elif f"{CHECKPOINT}/ledgerlake/start.json" in self.disk.files:
            data = self.disk.files[f"{CHECKPOINT}/ledgerlake/start.json"]
        else:
            return None
        found = from_json(json.loads(data)).get(name)
        return None if found is None else found.position


def shrink(script: Script, play: Callable[[Script], Verdict], most: int = 200) -> Script:
    """The script with as few steps as still fail in the same way."""
    steps = list(script.steps)
    kind = play(script).violations[0].split(":")[0]
    tries = 0
    place = 0
    while place < len(steps) and tries < most:
        fewer = replace(script, steps=tuple(steps[:place] + steps[place + 1 :]))
        tries += 1
        if any(violation.startswith(kind) for violation in play(fewer).violations[:1]):
            steps = list(fewer.steps)
        else:
            place += 1
    return replace(script, steps=tuple(steps))
