"""Sections of the configuration that are switched off for a run and on again, in the simulated
world: what happens to what waited is judged by a model of what the pages promise.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.simulation.driver import Edges, config
from tests.simulation.history import DUE_TOPIC, TOPIC, History, Script, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulation.broker import Topic

_PARTITIONS = 3
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
    While it runs, messages come to topic partitions: those of ``long`` are due after all runs,
    those of ``soon`` within the run.
    """

    deliver: str | None = None
    delays: bool = True
    long: tuple[int, ...] = ()
    soon: tuple[int, ...] = ()

    @property
    def sections(self) -> dict[str, Any]:
        deliver = {"topic": DUE_TOPIC, "starting": self.deliver}
        return {"delay": {"enabled": self.delays}, **({"deliver": deliver} if self.deliver else {})}


# Names of messages: the number of the run, the kind and the topic partition.
Name = tuple[int, str, int]


@dataclass
class Model:
    """What `docs/write-to-topics.md` promises of the topic, in words of sets."""

    began: str | None = None
    waiting: set[Name] = field(default_factory=set)
    for_no_topic: set[Name] = field(default_factory=set)
    published: set[Name] = field(default_factory=set)
    unread: set[Name] = field(default_factory=set)
    refused: list[int] = field(default_factory=list)

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
        if run.delays:
            self.waiting |= {name for name in came if name[1] == "long"}
            if run.deliver:
                self.published |= {name for name in came if name[1] == "soon"}

    def all_become_due(self, run: Run) -> None:
        if run.deliver:
            self.published |= self.waiting - self.for_no_topic


class Switching(History):
    """A history whose runs have their sections each."""

    def __init__(self, script: Script, edges: Edges, runs: list[Run]) -> None:
        super().__init__(script, edges)
        self._runs = runs
        self.names: dict[bytes, Name] = {}
        self.began_with: list[int] = []
        self.oracle.may_come_at_once = True
        self._configure({"run": 0})

    def _configure(self, args: dict[str, Any]) -> None:
        self.began_with.append(len(self.apps))
        self.settings = config([TOPIC], **self._runs[args["run"]].sections)

    def _arrive(self, args: dict[str, Any]) -> None:
        topic: Topic = self.topics[args["partition"]]
        payload = self._payload()
        self.names[payload] = (args["run"], args["kind"], args["partition"])
        wait_s = 0.3 if args["kind"] == "soon" else _DUE_S - self.world.now_s
        due_ms = self.brokers.clock_ms + int(wait_s * 1000)
        position = self._store(topic, self._metadata(deliver_at_time=due_ms), payload)
        self._confirm(topic, payload, position, deliver_ms=due_ms)

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
        Run(rng.choice(delivers), rng.random() < 0.7, partitions(0.4), partitions(0.2))
        for _ in range(rng.randint(3, 6))
    ]
    last = rng.choice(["earliest", "latest"])
    return [*runs, Run(last, rng.random() < 0.7), Run("latest", rng.random() < 0.7)]


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


@pytest.mark.parametrize("runs", WRITTEN.values(), ids=WRITTEN)
def test_the_beginning_of_the_delivery_is_decided_once(runs: list[Run], edges: Edges) -> None:
    check(runs, edges)


@pytest.mark.parametrize("seed", range(20))
def test_the_topic_gets_what_is_promised_however_sections_are_switched(
    seed: int, edges: Edges
) -> None:
    check(draw(random.Random(seed)), edges)
