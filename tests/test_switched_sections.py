"""Sections of the configuration that are switched off for a run and on again, in the simulated
world: what happens to what waited is judged by a model of what the pages promise.

[deliver]   the topic gets what is due while it is set, but for what waited when it began at `latest`
[delay]     while `enabled = false`, what comes is in a table at once; what waits stays waiting
[[tables]]  a message goes to the table that takes it when it is due
keys        a message that cannot be decoded when it is due is a reject, and never on the topic
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from ledgerlake.pb import pulsar_pb2 as pb
from tests.simulation.driver import MESSAGES, ROUTED, TABLES, Edges, config
from tests.simulation.history import DUE_TOPIC, TOPIC, History, Script, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulation.broker import Topic

_PARTITIONS = 3
# Messages of this topic partition are encrypted.
_ENCRYPTED = 2
_FIRST_STOP_S = 4.0
_RUN_S = 7.0
# All that waits for long is due then.
_DUE_S = 60.0


@pytest.fixture(scope="module")
def edges() -> Iterator[Edges]:
    with Edges() as entered:
        yield entered


@dataclass(frozen=True)
class Run:
    """A run of the pipeline. ``deliver`` is the option ``starting``, None without ``[deliver]``.
    While it runs, each topic partition in ``long`` gets a message that is due after all runs, and
    each one in ``soon`` a message that is due within the run.
    """

    deliver: str | None = None
    delays: bool = True
    has_table: bool = False
    has_keys: bool = True
    long: tuple[int, ...] = ()
    soon: tuple[int, ...] = ()

    @property
    def sections(self) -> dict[str, Any]:
        deliver = {"topic": DUE_TOPIC, "starting": self.deliver}
        tables = {"tables": TABLES[:1]} if self.has_table else {}
        return {
            "delay": {"enabled": self.delays},
            **({"deliver": deliver} if self.deliver else {}),
            **tables,
        }


# Names of messages: the number of the run, the kind and the topic partition.
Name = tuple[int, str, int]


@dataclass
class Model:
    """What the pages promise. ``released`` has the run that takes each message out."""

    began: str | None = None
    waiting: set[Name] = field(default_factory=set)
    for_no_topic: set[Name] = field(default_factory=set)
    published: set[Name] = field(default_factory=set)
    unread: set[Name] = field(default_factory=set)
    refused: list[int] = field(default_factory=list)
    released: dict[Name, Run] = field(default_factory=dict)

    def run(self, number: int, run: Run) -> None:
        self.unread |= {(number, "long", partition) for partition in run.long}
        self.unread |= {(number, "soon", partition) for partition in run.soon}
        if self.began == "latest" and run.deliver == "earliest" and self.waiting:
            self.refused.append(number)
            return
        if run.deliver and self.began is None and run.deliver == "latest":
            self.for_no_topic |= self.waiting
        if run.deliver and self.began != "earliest":
            self.began = run.deliver
        came, self.unread = self.unread, set()
        later = {name for name in came if name[1] == "long"} if run.delays else set()
        self.waiting |= later
        self._release(came - later, run, are_due=run.delays)

    def all_become_due(self, run: Run) -> None:
        self._release(self.waiting, run, are_due=True)

    def _release(self, names: set[Name], run: Run, *, are_due: bool) -> None:
        self.released |= dict.fromkeys(names, run)
        if run.deliver and are_due:
            decoded = {name for name in names if run.has_keys or name[2] != _ENCRYPTED}
            self.published |= decoded - self.for_no_topic

    def place(self, name: Name, entry_id: int) -> str:
        """Return the table that gets a message."""
        run = self.released[name]
        if name[2] == _ENCRYPTED and not run.has_keys:
            return "rejects"
        return ROUTED[0] if run.has_table and entry_id % 2 == 0 else MESSAGES


class Switching(History):
    """A history whose runs have their sections each."""

    def __init__(self, script: Script, edges: Edges, runs: list[Run]) -> None:
        super().__init__(script, edges)
        self._runs = runs
        self.names: dict[bytes, Name] = {}
        self.entry_ids: dict[Name, int] = {}
        self.began_with: list[int] = []
        self.oracle.may_come_at_once = True
        self._configure({"run": 0})

    def _configure(self, args: dict[str, Any]) -> None:
        self.began_with.append(len(self.apps))
        run = self._runs[args["run"]]
        self.settings, self.edges.has_keys = config([TOPIC], **run.sections), run.has_keys

    def _arrive(self, args: dict[str, Any]) -> None:
        topic: Topic = self.topics[args["partition"]]
        payload = self._payload()
        name = self.names[payload] = (args["run"], args["kind"], args["partition"])
        is_encrypted = args["partition"] == _ENCRYPTED
        keys = [pb.EncryptionKeys(key="k", value=b"v")] if is_encrypted else []
        wait_s = 0.3 if args["kind"] == "soon" else _DUE_S - self.world.now_s
        due_ms = self.brokers.clock_ms + int(wait_s * 1000)
        metadata = self._metadata(deliver_at_time=due_ms, encryption_keys=keys)
        position = self._store(topic, metadata, payload)
        self.entry_ids[name] = position.entry_id
        self._confirm(topic, payload, position, deliver_ms=due_ms, is_encrypted=is_encrypted)

    @property
    def places(self) -> dict[Name, str]:
        """The tables that have the messages."""
        found = {
            self.names[payload]: "rejects"
            for payload, one in self.oracle.sent.items()
            if one.is_rejected
        }
        for path in (MESSAGES, ROUTED[0]):
            table = self.lake.tables.get(path)
            for name in (
                [name for commit in table.commits for name in commit.files] if table else []
            ):
                data = pq.read_table(
                    io.BytesIO(self.disk.files[f"{path}/{name}"]), columns=["value"]
                )
                found |= {self.names[value]: path for value in data.column(0).to_pylist()}
        return found

    @property
    def refused_runs(self) -> list[int]:
        """The runs that were refused."""
        ends = [*self.began_with[1:], len(self.apps)]
        return [
            number
            for number, (first, end) in enumerate(zip(self.began_with, ends, strict=True))
            if any("set it back" in app.ended for app in self.apps[first:end])
        ]


def steps_of(runs: list[Run]) -> list[Step]:
    steps = []
    for number, run in enumerate(runs):
        began_s = max(0.0, _FIRST_STOP_S + (number - 1) * _RUN_S)
        if number:
            steps.append(Step(began_s, "stop", {"back_s": 1.0}))
            steps.append(Step(began_s + 0.9, "configure", {"run": number}))
        for kind, partitions in (("long", run.long), ("soon", run.soon)):
            steps += [
                Step(
                    began_s + 3.0,
                    "arrive",
                    {"run": number, "kind": kind, "partition": partition},
                )
                for partition in partitions
            ]
    return steps


def draw(rng: random.Random) -> list[Run]:
    """Runs whose last one delivers what waits."""
    delivers = [None, None, "earliest", "latest", "latest"]

    def partitions(often: float) -> tuple[int, ...]:
        return tuple(number for number in range(_PARTITIONS) if rng.random() < often)

    runs = [
        Run(
            rng.choice(delivers),
            rng.random() < 0.7,
            rng.random() < 0.4,
            rng.random() < 0.7,
            partitions(0.4),
            partitions(0.2),
        )
        for _ in range(rng.randint(3, 6))
    ]
    last = rng.choice(["earliest", "latest"])
    return [
        *runs,
        Run(last, rng.random() < 0.7),
        Run("latest", rng.random() < 0.7, rng.random() < 0.4, rng.random() < 0.7),
    ]


WRITTEN = {
    "what waits is for no topic, what waits later is": [
        Run(long=(0,)),
        Run("latest"),
        Run(long=(0,)),
        Run("latest", long=(0,)),
    ],
    "the beginning stays where it was": [
        Run(long=(0,)),
        Run("latest"),
        Run(),
        Run("earliest"),
        Run("latest"),
    ],
    "also the other way round": [
        Run(long=(0,)),
        Run("earliest"),
        Run(long=(1,)),
        Run("latest", long=(0, 2)),
    ],
    "what waits is delivered while no more is held back": [
        Run("earliest", long=(0, 1)),
        Run("earliest", delays=False, long=(0, 2), soon=(1,)),
    ],
}


def check(runs: list[Run], edges: Edges) -> None:
    model = Model()
    for number, run in enumerate(runs):
        model.run(number, run)
    assert model.refused[-1:] != [len(runs) - 1], "the last run is never refused"
    model.all_become_due(runs[-1])
    script = Script(
        1, _PARTITIONS, 1, 8, True, "earliest", 0, 0, False, False, _DUE_S + 5.0,
        tuple(steps_of(runs)), cores=(1,),
    )  # fmt: skip
    history = Switching(script, edges, runs)
    assert history.play().violations == []
    published = {history.names[payload] for payload, _ in history.oracle._published}
    assert (published, history.refused_runs) == (model.published, model.refused)
    assert history.places == {
        name: model.place(name, entry_id) for name, entry_id in history.entry_ids.items()
    }


@pytest.mark.parametrize("runs", WRITTEN.values(), ids=WRITTEN)
def test_the_beginning_of_the_delivery_is_decided_once(runs: list[Run], edges: Edges) -> None:
    check(runs, edges)


@pytest.mark.parametrize("seed", range(20))
def test_tables_and_topic_get_what_is_promised_however_sections_are_switched(
    seed: int, edges: Edges
) -> None:
    check(draw(random.Random(seed)), edges)
